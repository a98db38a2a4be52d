"""The contract: a damaged PyTorch file is a ckptkit error that names it; a sound one is read without PyTorch.

The golden files were written by PyTorch (`golden/make_torch.py`).
"""

from __future__ import annotations

import json
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from fuzz import mutations
from torch_bytes import (
    GOLDEN,
    call,
    damaged_files,
    dict_of,
    integer,
    legacy,
    named,
    storage,
    tensor,
    text,
    tuple_of,
    whole,
    write_zip,
)

from ckptkit.errors import CkptkitError, CorruptError, UnsafeError, UsageError
from ckptkit.formats.io import read_region
from ckptkit.formats.torch_pickle import read_index
from ckptkit.types import DTYPES

PLAIN = whole(dict_of({"w": tensor()}))
DATA = bytes(range(24))


def refused(file: Path, *words: str) -> CorruptError:
    with pytest.raises(CorruptError) as caught:
        read_index(file)
    for word in (file.name, *words):
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_the_golden_files_are_read_bit_for_bit(kind: str) -> None:
    expected = json.loads((GOLDEN / "expected.json").read_text())
    index = read_index(GOLDEN / f"{kind}.bin")
    found = {
        info.name: {
            "shape": list(info.shape),
            "dtype": DTYPES[info.dtype].torch,
            "bytes": read_region(info).tobytes().hex(),
        }
        for info in index.tensors
    }
    assert found == expected
    assert ("the tensors are those under the key `state_dict`" in index.notes) == (kind == "legacy")


def test_a_file_written_by_hand_is_read(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "model.bin", PLAIN, {"0": DATA}, {"byteorder": b"little"})
    (info,) = read_index(file).tensors
    assert (info.name, info.shape, info.dtype, info.strides) == ("w", (2, 3), "F32", None)
    assert read_region(info).tobytes() == DATA
    file.write_bytes(legacy(PLAIN, {"0": (6, DATA)}))
    assert read_region(read_index(file).tensors[0]).tobytes() == DATA


def test_a_legacy_view_of_a_storage_is_read(tmp_path: Path) -> None:
    part = storage("0", 6, "FloatStorage", tuple_of(text("part"), integer(2), integer(3)))
    file = tmp_path / "model.bin"
    file.write_bytes(legacy(whole(dict_of({"w": tensor(part, 1, (2,), (1,))})), {"0": (6, DATA)}))
    assert read_region(read_index(file).tensors[0]).tobytes() == DATA[12:20]
    file.write_bytes(legacy(whole(dict_of({"w": tensor(part, 2, (2,), (1,))})), {"0": (6, DATA)}))
    refused(file, "`w`", "past the end")
    part = storage("0", 6, "FloatStorage", tuple_of(text("part"), integer(2), integer(5)))
    file.write_bytes(legacy(whole(dict_of({"w": tensor(part, 0, (2,), (1,))})), {"0": (6, DATA)}))
    refused(file, "past its end")


def test_names_written_by_python_2_are_text(tmp_path: Path) -> None:
    pairs = b"](](U\x01w" + tensor() + b"ee"
    pickled = whole(call(named("collections", "OrderedDict"), pairs))
    file = write_zip(tmp_path / "model.bin", pickled, {"0": DATA})
    assert [info.name for info in read_index(file).tensors] == ["w"]


def test_the_oldest_rebuild_function_is_known(tmp_path: Path) -> None:
    oldest = call(
        named("torch._utils", "_rebuild_tensor"), storage(), integer(1), tuple_of(integer(2)), tuple_of(integer(2))
    )
    file = write_zip(tmp_path / "model.bin", whole(dict_of({"w": oldest})), {"0": DATA})
    (info,) = read_index(file).tensors
    assert info.strides == (2,) and read_region(info).tobytes() == DATA[4:8] + DATA[12:16]


VIEWS = {
    "offset": tensor(None, 1),
    "shape": tensor(None, 0, (3, 3)),
    "strides": tensor(None, 0, (2, 3), (4, 1)),
    "huge": tensor(None, 0, (1 << 40, 1 << 40), (0, 0)),
    "huge strides": tensor(None, 0, (2, 2), (1 << 61, 1)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_outside_its_storage_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.bin"
    pickled = whole(dict_of({"w": VIEWS[kind]}))
    refused(write_zip(file, pickled, {"0": DATA}), "`w`", "past the end of its storage")
    file.write_bytes(legacy(pickled, {"0": (6, DATA)}))
    refused(file, "`w`", "past the end of its storage")


def test_a_storage_of_another_size_or_without_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    refused(write_zip(file, PLAIN, {"0": DATA[:-1]}), "storage `0` 24 bytes in the pickle, 23 in the archive")
    refused(write_zip(file, PLAIN, {"1": DATA}), "lacks the record of storage `0`")
    file.write_bytes(legacy(PLAIN, {"0": (5, DATA)}))
    refused(file, "storage `0` 6 elements in the pickle, 5 before its bytes")
    file.write_bytes(legacy(PLAIN, {"0": (-6, DATA)}))
    refused(file, "-6 before its bytes")
    file.write_bytes(legacy(PLAIN, {}))
    refused(file, "does not list")
    file.write_bytes(legacy(PLAIN, {"7": (6, DATA)}))
    refused(file, "storage `7`")
    file.write_bytes(legacy(PLAIN, {"0": (6, DATA)}) + b"more")
    refused(file, "4 bytes after its last storage")
    file.write_bytes(legacy(PLAIN, {"0": (6, DATA)})[:-1])
    refused(file, "ends 1 bytes before the end of its storages")


def test_a_storage_that_no_tensor_uses_is_noted(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "model.bin", PLAIN, {"0": DATA, "1": DATA})
    assert read_index(file).notes == ("1 storages belong to no tensor and are passed over",)


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    refused(write_zip(file, PLAIN, {"0": DATA}, {"byteorder": b"big"}), "big-endian")
    refused(write_zip(file, PLAIN, {"0": DATA}, {"byteorder": b"middle"}), "byte order `middle`")
    refused(write_zip(file, PLAIN, {"0": DATA}, {"byteorder": b"b" * 100}), "100 bytes")
    file.write_bytes(legacy(PLAIN, {"0": (6, DATA)}, little_endian=False))
    refused(file, "big-endian")


def test_a_zip_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    refused(write_zip(file, PLAIN, {}, {"constants.pkl": b"x"}), "TorchScript")
    refused(write_zip(file, PLAIN, {}, {"code/__torch__.py": b"x"}), "TorchScript")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pytorch_model.bin", PLAIN)
    refused(file, "0 records `data.pkl`")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", PLAIN)
        archive.writestr("b/data.pkl", PLAIN)
    refused(file, "2 records `data.pkl`")
    zipfile.ZipFile(file, "w").close()
    refused(file, "0 records `data.pkl`")


def test_a_compressed_record_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    for packed in ("archive/data.pkl", "archive/data/0"):
        with zipfile.ZipFile(file, "w") as archive:
            for name, value in (("archive/data.pkl", PLAIN), ("archive/data/0", DATA)):
                method = zipfile.ZIP_DEFLATED if name == packed else zipfile.ZIP_STORED
                archive.writestr(name, value, compress_type=method)
        refused(file, f"`{packed}` compressed (zip method 8)")


def patched(file: Path, signature: bytes, at: int, value: bytes, number: int = -1) -> None:
    """Overwrite bytes of the last (or other) zip structure that starts with `signature`."""
    data = bytearray(file.read_bytes())
    places = [i for i in range(len(data)) if data.startswith(signature, i)]
    data[places[number] + at : places[number] + at + len(value)] = value
    file.write_bytes(data)


CENTRAL, LOCAL, END = b"PK\1\2", b"PK\3\4", b"PK\5\6"
ZIP_FAULTS = {
    "other local signature": (LOCAL, 0, b"PK\7\7", "no record `archive/data/0` where"),
    "other local name": (LOCAL, 30, b"X", "contradict"),
    "other local name size": (LOCAL, 26, b"\1\0", "contradict"),
    "other local method": (LOCAL, 8, b"\x08\0", "contradict"),
    "huge local extra": (LOCAL, 28, b"\xff\xff", "ends inside record `archive/data/0`"),
    "size outside the file": (CENTRAL, 20, b"\xff\xff\xff\0" * 2, "in the archive"),
    "offset outside the file": (CENTRAL, 42, b"\xff\xff\xff\0", "ends inside a record"),
    "two sizes": (CENTRAL, 20, b"\x19\0\0\0", "damaged zip directory"),
    "zip64 without its field": (CENTRAL, 24, b"\xff\xff\xff\xff", "damaged zip directory"),
    "record on another disk": (CENTRAL, 34, b"\1\0", "another file"),
    "folder with bytes": (CENTRAL, 38, b"\x10", "a folder with bytes"),
    "name size": (CENTRAL, 28, b"\xff\xff", "damaged zip directory"),
    "central signature": (CENTRAL, 0, b"PK\7\7", "damaged zip directory"),
    "count too large": (END, 8, b"\xff\0\xff\0", "cannot hold 255 records"),
    "record comment that is not there": (CENTRAL, 32, b"\5\0", "damaged zip directory"),
    "first record's comment": (CENTRAL, 32, b"\x14\0", "ends too early"),
    "two counts": (END, 8, b"\1\0", "several files"),
    "second disk": (END, 4, b"\1\0", "several files"),
    "directory outside the file": (END, 16, b"\xff\xff\xff\0", "past its end record"),
    "comment that is not there": (END, 20, b"\5\0", "after its zip end record"),
}


@pytest.mark.parametrize("kind", ZIP_FAULTS)
def test_a_contradictory_zip_is_refused(tmp_path: Path, kind: str) -> None:
    signature, at, value, words = ZIP_FAULTS[kind]
    file = write_zip(tmp_path / "model.bin", PLAIN, {"0": DATA})
    patched(file, signature, at, value, 0 if kind.startswith("first") else -1)
    refused(file, words)


def test_an_encrypted_or_repeated_record_is_refused(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "model.bin", PLAIN, {"0": DATA})
    patched(file, CENTRAL, 8, b"\1\0")
    assert isinstance(refused(file, "`archive/data/0`", "encrypted"), UnsafeError)
    write_zip(file, PLAIN, {"0": DATA, "1": DATA})
    for signature, at in ((LOCAL, 30), (CENTRAL, 46)):
        patched(file, signature, at, b"archive/data/0")
    refused(file, "two records named `archive/data/0`")


def test_zip64_fields_are_read_where_the_short_ones_are_saturated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_index(write_zip(tmp_path / "plain.bin", PLAIN, {"0": DATA})).tensors[0].extents
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    file = write_zip(tmp_path / "model.bin", PLAIN, {"0": DATA})
    assert b"PK\6\6" in file.read_bytes() and b"PK\6\7" in file.read_bytes()
    (extent,) = read_index(file).tensors[0].extents
    assert extent.size == plain[0].size and file.read_bytes()[extent.offset :][:24] == DATA
    patched(file, b"PK\6\6", 24, b"\2\0\0\0\0\0\0\1")
    refused(file)


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    data = (GOLDEN / f"{kind}.bin").read_bytes()
    file = tmp_path / "cut.bin"
    for size in [*range(64), *range(64, len(data), 37), len(data) - 1]:
        file.write_bytes(data[:size])
        refused(file)


def test_a_pickle_longer_than_the_first_window_is_read(tmp_path: Path) -> None:
    long = dict_of({"w": tensor(), "text": text("x" * 3_000_000)})
    file = tmp_path / "model.bin"
    file.write_bytes(legacy(whole(long), {"0": (6, DATA)}))
    assert read_region(read_index(file).tensors[0]).tobytes() == DATA


def test_what_is_not_a_pytorch_file_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    refused(file, "empty")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n")
    refused(file, "git-lfs pointer", "988097824 bytes")
    file.write_bytes(b"<!DOCTYPE html>")
    refused(file, "not a PyTorch file", "HTML")
    file.write_bytes(whole(dict_of({"w": b"N"})))
    refused(file, "torch.save did not write")
    file.write_bytes(b"\x80\x02" + bytes(100))
    refused(file)
    with pytest.raises(UsageError):
        read_index(tmp_path)
    with pytest.raises(UsageError):
        read_index(tmp_path / "missing.bin")


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_any_damage_ends_in_a_valid_index_or_an_error(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "damaged.bin"
    slowest, survived = 0.0, 0
    mutants = list(damaged_files(kind, 1000, seed=20261))
    tracemalloc.start()
    try:
        for damaged in mutants:
            file.write_bytes(damaged)
            started = time.process_time()
            try:
                index = read_index(file)
            except CkptkitError as error:
                assert file.name in str(error)
            else:
                survived += 1
                assert all(0 <= e.offset <= e.offset + e.size <= len(damaged) for i in index.tensors for e in i.extents)
            slowest = max(slowest, time.process_time() - started)
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
    assert 30 < survived < 970  # damage inside a tensor is not seen here; most other damage is
    assert slowest < 5


def test_mutations_are_repeatable_and_differ_from_the_file() -> None:
    data = bytes(range(200))
    first = list(mutations(data, seed=1, count=200))
    assert first == list(mutations(data, seed=1, count=200)) != list(mutations(data, seed=2, count=200))
    assert sum(mutant != data for mutant in first) > 190 and min(map(len, first)) < 100 < 200 < max(map(len, first))
