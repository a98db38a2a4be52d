"""The contract: `.bin` files that safetensors files were chosen over are compared by their headers, and never fail."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from small_checkpoints import POINTER, put, put_index, put_sharded, values
from torch_bytes import dict_of, storage, tensor, whole, write_zip

from ckptkit import convert, inspect
from ckptkit.formats.registry import open_checkpoint
from ckptkit.report import Report
from tests.tiny_models import TinyModel, make_hf_plain, shapes_of

Entry = tuple[str, tuple[int, ...], str]  # key of the storage, shape, storage class
BIN = "pytorch_model.bin"


def put_bin(file: Path, entries: Mapping[str, Entry], *, width: int = 1) -> Path:
    """Write a `.bin` file of contiguous tensors; those with one key share its storage."""
    tensors, storages = {}, {}
    for name, (key, shape, kind) in entries.items():
        count = 1
        for size in shape:
            count *= size
        strides = tuple(1 if axis == len(shape) - 1 else shape[-1] for axis in range(len(shape)))
        tensors[name] = tensor(storage(key, count, kind), 0, shape, strides)
        storages[key] = bytes(count * width)
    return write_zip(file, whole(dict_of(tensors)), storages)


def byte_tensors(*names: str) -> dict[str, Entry]:
    return {name: (name, (4,), "ByteStorage") for name in names}


def said(folder: Path) -> str:
    """Return the notes on the `.bin` files; the chosen tensors must be those of the safetensors file all the same."""
    found = [note for note in open_checkpoint(folder).notes if "ignored .bin files" in note]
    assert len(found) <= 1
    return "".join(found)


def test_a_set_with_the_same_tensors_needs_no_word(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"a": 1, "b": 2})
    put_bin(tmp_path / BIN, byte_tensors("b", "a"))
    assert said(tmp_path) == ""
    assert open_checkpoint(tmp_path).notes == (f"`{BIN}` ignored: safetensors files were chosen",)


def test_names_that_only_one_set_has_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"a": 1, "c": 2})
    put_bin(tmp_path / BIN, byte_tensors("a", *(f"x{number}" for number in range(7))))
    assert said(tmp_path) == (
        "the ignored .bin files differ from the chosen ones: "
        "7 only in .bin: `x0`, `x1`, `x2`, `x3`, `x4` and 2 more; 1 only in safetensors: `c`"
    )
    assert values(tmp_path) == {"a": 1, "c": 2}


def test_other_shapes_and_dtypes_are_told(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"a": 1, "b": 2, "c": 3})
    put_bin(tmp_path / BIN, byte_tensors("a") | {"b": ("b", (2, 2), "ByteStorage"), "c": ("c", (4,), "CharStorage")})
    assert "1 of another shape: `b (2, 2), not (4,)`" in said(tmp_path)
    assert "1 I8 in .bin, U8 in safetensors: `c`" in said(tmp_path)
    assert "`a`" not in said(tmp_path)


def test_a_tied_tensor_that_only_the_bin_names_is_called_tied(tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors", {"embed": 1})
    put_bin(tmp_path / BIN, dict.fromkeys(("embed", "head"), ("0", (4,), "ByteStorage")))
    assert said(tmp_path).endswith(": 1 only in .bin and the same bytes there as another (tied): `head = embed`")
    put_bin(tmp_path / BIN, byte_tensors("embed", "head"))
    assert said(tmp_path).endswith(": 1 only in .bin: `head`")


def test_sharded_sets_are_compared_through_their_indexes(tmp_path: Path) -> None:
    put_sharded(tmp_path)
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    put_bin(tmp_path / names[0], byte_tensors("a", "b"))
    put_bin(tmp_path / names[1], byte_tensors("d"))
    put_index(tmp_path / f"{BIN}.index.json", {"a": names[0], "b": names[0], "d": names[1]})
    assert said(tmp_path).endswith("1 only in .bin: `d`; 1 only in safetensors: `c`")
    (tmp_path / names[1]).unlink()
    assert "not compared" in said(tmp_path)
    assert names[1] in said(tmp_path)
    (tmp_path / names[0]).unlink()  # the index alone, as most downloads of safetensors files leave it
    assert said(tmp_path) == ""


def test_a_bin_file_of_the_same_name_is_the_other_set_too(tmp_path: Path) -> None:
    put(tmp_path / "weights.safetensors", {"a": 1})
    put_bin(tmp_path / "weights.bin", byte_tensors("z"))
    put_bin(tmp_path / "voices.bin", byte_tensors("y"))
    assert "1 only in .bin: `z`" in said(tmp_path)


def unsafe(file: Path) -> None:
    write_zip(file, b"\x80\x02cos\nsystem\n(X\x04\x00\x00\x00true" + b"tR.", {})


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda file: file.write_bytes(b"junk"), "not a PyTorch file"),
        (lambda file: file.write_bytes(b""), "is empty"),
        (lambda file: file.write_text(POINTER), "git-lfs pointer"),
        (lambda file: file.symlink_to("gone"), "points to missing"),
        (os.mkfifo, "a pipe or device"),
        (unsafe, "system"),
    ],
    ids=["junk", "empty", "pointer", "dangling link", "pipe", "unsafe"],
)
def test_a_set_that_cannot_be_read_is_a_note_that_says_why(tmp_path: Path, make: object, why: str) -> None:
    assert callable(make)
    put(tmp_path / "model.safetensors", {"a": 1})
    make(tmp_path / BIN)
    assert values(tmp_path) == {"a": 1}
    assert "not compared with the chosen ones" in said(tmp_path)
    assert why in said(tmp_path)


def test_no_element_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header's few kB of a file of 8 MB."""
    put(tmp_path / "model.safetensors", {"a": 1})
    put_bin(tmp_path / BIN, {"a": ("0", (8_000_000,), "ByteStorage")})
    pread, sizes = os.pread, []

    def counting(descriptor: int, size: int, offset: int) -> bytes:
        data = pread(descriptor, size, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counting)
    assert "1 of another shape" in said(tmp_path)
    assert 0 < sum(sizes) < 200_000


def notes(report: Report) -> str:
    return "\n".join(text for label, text in report.rows if label == "note")


def test_inspect_and_convert_both_say_it(tmp_path: Path) -> None:
    """N32: both formats in one repository, and the two sets differ in names."""
    source = make_hf_plain(tmp_path / "hf")
    entries = {name: (name, shape, "FloatStorage") for name, shape in shapes_of(TinyModel()).items()}
    put_bin(source / BIN, entries, width=4)
    for report in (inspect(source), convert(source, tmp_path / "one")):
        assert f"`{BIN}` ignored" in notes(report)
        assert "differ" not in notes(report)
    entries["model.extra.weight"] = entries.pop("model.norm.weight")
    put_bin(source / BIN, entries, width=4)
    for report in (inspect(source), convert(source, tmp_path / "two")):
        assert "1 only in .bin: `model.extra.weight`; 1 only in safetensors: `model.norm.weight`" in notes(report)
    one, two = ((tmp_path / name / "part0.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
