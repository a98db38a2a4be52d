"""The `.ckpt` reader and writer: records and malformed files from byte literals.

The contract shared by all formats is in `test_contract.py`; MindSpore's own view is in `test_mindspore_itself.py`.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from format_contract import assemble, random_contents

from ckptkit.errors import CorruptError, InternalError, UnsafeError, UsageError
from ckptkit.formats import mindspore_ckpt
from ckptkit.formats.base import FileIndex
from ckptkit.formats.io import read_region
from ckptkit.formats.mindspore_ckpt import lay_out, read_index, verify_crc
from ckptkit.types import Extent, TensorSpec

# One record: tensor `w`, shape (2,), type Int16, content.
RECORD = b"\x0a\x14\x0a\x01w\x12\x0f\x08\x02\x12\x05Int16\x1a\x04\x01\x00\x02\x00"
HEAD = b"\x0a\x01w"


def sized(key: int, data: bytes) -> bytes:
    """Return a protobuf field with a size; short data only."""
    assert len(data) < 128
    return bytes((key, len(data))) + data


def record(name: bytes = b"w", dims: bytes = b"\x08\x02", kind: bytes = b"Int16", data: bytes = b"\1\0\2\0") -> bytes:
    tensor = dims + sized(0x12, kind) + sized(0x1A, data)
    return sized(0x0A, sized(0x0A, name) + sized(0x12, tensor))


def read(tmp_path: Path, data: bytes) -> FileIndex:
    file = tmp_path / "x.ckpt"
    file.write_bytes(data)
    return read_index(file)


def refusal(tmp_path: Path, data: bytes, kind: type[CorruptError] = CorruptError) -> str:
    """Return the message with which the file is refused; it must name the file and a remedy."""
    with pytest.raises(kind) as caught:
        read(tmp_path, data)
    assert "x.ckpt" in str(caught.value)
    assert caught.value.hint
    return str(caught.value)


def test_a_record_is_read_as_it_lies(tmp_path: Path) -> None:
    assert record() == RECORD
    index = read(tmp_path, RECORD)
    (tensor,) = index.tensors
    assert (tensor.name, tensor.shape, tensor.dtype) == ("w", (2,), "I16")
    assert tensor.extents == (Extent(len(RECORD) - 4, 4),)
    assert (index.metadata, index.notes) == ({}, ())


def test_a_record_is_written_as_it_is_read() -> None:
    assert assemble(lay_out("x", [TensorSpec("w", (2,), "I16")]), {"w": b"\1\0\2\0"}) == RECORD


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    assert "is empty (0 bytes)" in refusal(tmp_path, b"")


def test_a_pointer_of_git_lfs_tells_the_size_that_the_file_should_have(tmp_path: Path) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 77\n"
    assert "it should have 77 bytes" in refusal(tmp_path, text)


@pytest.mark.parametrize("magic", [b"\xd8\x5e\x3a\x7f", b"\xd9\x5e\x3a\x7f", b"\xda\x5e\x3a\x7f"])
def test_an_encrypted_file_is_refused(tmp_path: Path, magic: bytes) -> None:
    assert "is encrypted" in refusal(tmp_path, magic + b"\x88\0\0\0\x10\0\0\0" + bytes(40), UnsafeError)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"\x80\x02\x8a\x0al\xfc\x9cF", "a Python pickle"),
        (b"\x40\0\0\0\0\0\0\0{" + bytes(80), "a safetensors file"),
        (b"\x08\x02\x12\x03abc", "a MindSpore strategy file"),
        (b"GGUF\x03\0\0\0", "a GGUF file"),
        (b"<!DOCTYPE html>", "an HTML or XML page"),
        (b"hello", "its first byte is not that of a record"),
    ],
)
def test_another_format_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal(tmp_path, data)


@pytest.mark.parametrize("cut", range(1, len(RECORD) - 1))
def test_a_file_cut_inside_a_record_is_refused(tmp_path: Path, cut: int) -> None:
    refusal(tmp_path, record(b"v") + RECORD[:-cut])


def test_a_cut_file_tells_both_sizes(tmp_path: Path) -> None:
    assert f"needs {len(RECORD)} bytes; the file has {len(RECORD) - 3}" in refusal(tmp_path, RECORD[:-3])


def test_a_scalar_has_no_dims_or_dims_of_one_zero(tmp_path: Path) -> None:
    for dims in (b"", b"\x08\x00"):
        (tensor,) = read(tmp_path, record(dims=dims, data=b"\1\0")).tensors
        assert tensor.shape == ()


def test_a_record_of_no_elements_is_read(tmp_path: Path) -> None:
    shapes = [read(tmp_path, record(dims=dims, data=b"")).tensors[0].shape for dims in (b"\x08\0", b"\x08\0\x08\3")]
    assert shapes == [(0,), (0, 3)]


def test_packed_dims_are_read(tmp_path: Path) -> None:
    (tensor,) = read(tmp_path, record(dims=b"\x0a\x02\x02\x01")).tensors
    assert tensor.shape == (2, 1)


def test_fields_may_come_in_any_order(tmp_path: Path) -> None:
    tensor = sized(0x1A, b"\1\0\2\0") + sized(0x12, b"Int16") + b"\x08\x02"
    (found,) = read(tmp_path, sized(0x0A, sized(0x12, tensor) + sized(0x0A, b"w"))).tensors
    assert (found.name, found.shape, read_region(found).tolist()) == ("w", (2,), [1, 2])


def test_a_text_value_is_its_code_points(tmp_path: Path) -> None:
    text = "h\u00e9llo"
    (tensor,) = read(tmp_path, record(dims=b"\x08\0", kind=b"str", data=text.encode("utf-32-le"))).tensors
    assert (tensor.shape, tensor.dtype) == ((5,), "STR")
    assert read_region(tensor).tobytes().decode("utf-32-le") == text


@pytest.mark.parametrize("data", [b"\1\0", b"\1\0\2\0\3\0", b""])
def test_content_that_does_not_fit_the_shape_is_refused(tmp_path: Path, data: bytes) -> None:
    assert f"`w` of `{tmp_path / 'x.ckpt'}` has {len(data)} bytes; I16 [2] needs 4" in refusal(
        tmp_path, record(data=data)
    )


def test_a_negative_length_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path, record(dims=b"\x08" + b"\xff" * 9 + b"\x01"))


@pytest.mark.parametrize("kind", [b"Int4", b"Complex64", b"Float8E4M3FN", b"float32", b""])
def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path, kind: bytes) -> None:
    assert f"has type `{kind.decode()}`, which is not supported" in refusal(tmp_path, record(kind=kind))


def test_a_map_parameter_is_refused_by_name(tmp_path: Path) -> None:
    data = sized(0x0A, sized(0x0A, b"table") + sized(0x1A, sized(0x0A, b"")))
    assert "the map parameter `table`" in refusal(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [
        sized(0x12, b""),
        b"\x0a\x00",
        sized(0x0A, sized(0x0A, b"w")),
        sized(0x0A, sized(0x12, sized(0x12, b"Int16") + sized(0x1A, b""))),
        sized(0x0A, HEAD + sized(0x12, sized(0x12, b"Int16"))),
        sized(0x0A, HEAD + sized(0x12, sized(0x1A, b""))),
        sized(0x0A, HEAD + sized(0x12, b"")),
        sized(0x0A, HEAD + HEAD + sized(0x12, sized(0x12, b"Int16") + sized(0x1A, b""))),
        sized(0x0A, HEAD + sized(0x12, sized(0x12, b"Int16") * 2 + sized(0x1A, b""))),
        sized(0x0A, HEAD + sized(0x12, sized(0x12, b"Int16") + sized(0x1A, b"") * 2)),
        sized(0x0A, HEAD + sized(0x22, b"")),
        sized(0x0A, HEAD + b"\x09" + bytes(8) + sized(0x12, b"")),
        sized(0x0A, HEAD + sized(0x12, sized(0x12, b"Int16") + sized(0x1A, b"") + b"\x20\x01")),
        sized(0x0A, HEAD + sized(0x12, b"\x0d\0\0\0\0" + sized(0x12, b"Int16") + sized(0x1A, b""))),
        sized(0x0A, sized(0x0A, b"\xff\xfe") + sized(0x12, sized(0x12, b"Int16") + sized(0x1A, b""))),
        sized(0x0A, HEAD + b"\x12\x7f" + sized(0x12, b"Int16")) + bytes(200),
        b"\x0a" + b"\x80" * 12,
        b"\x0a\x03\x0a\xff\xff",
        record(dims=b"\x0a\x02\x02\x80"),
        record(dims=b"\x82\x01\x02"),
    ],
)
def test_a_record_that_breaks_the_schema_is_refused(tmp_path: Path, data: bytes) -> None:
    refusal(tmp_path, RECORD.replace(b"w", b"v") + data)
    with pytest.raises(CorruptError):
        read(tmp_path, data)


def test_a_record_that_breaks_the_schema_tells_where(tmp_path: Path) -> None:
    assert f"at byte {len(RECORD) + 5}" in refusal(tmp_path, RECORD + sized(0x0A, HEAD + sized(0x22, b"")))


def test_a_monstrous_name_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    file.write_bytes(b"\x0a\xff\xff\xff\xff\x00\x0a\xf0\xff\xff\x7f")
    with file.open("r+b") as stream:
        stream.truncate(2**29)
    with pytest.raises(CorruptError, match="a name of 268435440 bytes"):
        read_index(file)


def test_pieces_of_one_tensor_are_joined(tmp_path: Path) -> None:
    index = read(tmp_path, record(data=b"\1\0") + record(data=b"\2\0") + record(b"v"))
    assert [(tensor.name, len(tensor.extents)) for tensor in index.tensors] == [("w", 2), ("v", 1)]
    assert read_region(index.tensors[0]).tolist() == [1, 2]


def test_a_file_cut_between_the_pieces_of_a_tensor_is_refused(tmp_path: Path) -> None:
    assert "cut between the pieces" in refusal(tmp_path, record(b"v") + record(data=b"\1\0"))


@pytest.mark.parametrize("second", [record(dims=b"\x08\x03", data=b"\2\0"), record(kind=b"UInt16", data=b"\2\0")])
def test_pieces_that_disagree_are_refused(tmp_path: Path, second: bytes) -> None:
    assert "the pieces of tensor `w`" in refusal(tmp_path, record(data=b"\1\0") + second)


@pytest.mark.parametrize("between", [b"", record(b"v")])
def test_duplicates_with_different_bytes_are_refused(tmp_path: Path, between: bytes) -> None:
    message = refusal(tmp_path, record() + between + record(data=b"\1\0\3\0"))
    assert "duplicate tensor `w`" in message


@pytest.mark.parametrize("other", [record(kind=b"UInt16"), record(dims=b"\x08\2\x08\1")])
def test_duplicates_of_another_shape_or_dtype_are_refused(tmp_path: Path, other: bytes) -> None:
    assert "duplicate tensor `w`" in refusal(tmp_path, record() + record(b"v") + other)


@pytest.mark.parametrize("between", [b"", record(b"v")])
def test_duplicates_with_equal_bytes_are_noted(tmp_path: Path, between: bytes) -> None:
    index = read(tmp_path, record() + between + record())
    assert [tensor.name for tensor in index.tensors] == (["w", "v"] if between else ["w"])
    assert index.notes == ("`x.ckpt`: duplicate records with equal bytes: `w`",)


@pytest.mark.parametrize(("last", "equal"), [(b"\2\0", True), (b"\3\0", False)])
def test_duplicates_are_compared_however_they_are_cut(tmp_path: Path, last: bytes, equal: bool) -> None:
    data = record() + record(b"v") + record(data=b"\1") + record(data=b"\0") + record(data=last)
    if equal:
        assert "duplicate records with equal bytes: `w`" in read(tmp_path, data).notes[0]
    else:
        assert "duplicate tensor `w`" in refusal(tmp_path, data)


def with_crc(data: bytes, crc: int | None = None) -> bytes:
    return data + b"crc_num" + (zlib.crc32(data) if crc is None else crc).to_bytes(10, "big")


def test_a_crc_trailer_is_recognised_and_checked_on_request(tmp_path: Path) -> None:
    index = read(tmp_path, with_crc(RECORD))
    assert len(index.tensors) == 1
    assert "ends with a crc32" in index.notes[0]
    verify_crc(index.file)


def test_a_wrong_crc_is_found_by_the_check_only(tmp_path: Path) -> None:
    spoilt = with_crc(RECORD[:-1] + b"\x07", zlib.crc32(RECORD))
    index = read(tmp_path, spoilt)
    with pytest.raises(CorruptError, match="its trailer states"):
        verify_crc(index.file)


def test_a_file_without_crc_passes_the_check(tmp_path: Path) -> None:
    verify_crc(read(tmp_path, RECORD).file)


def test_a_large_tensor_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mindspore_ckpt, "PIECE_BYTES", 8)
    specs = [TensorSpec("w", (5,), "I32"), TensorSpec("v", (2,), "I32")]
    contents = random_contents(specs)
    output = lay_out("x.ckpt", specs)
    assert [[extent.size for extent in output.extents[name]] for name in ("w", "v")] == [[8, 8, 4], [8]]
    index = read(tmp_path, assemble(output, contents))
    assert [read_region(tensor).tobytes() for tensor in index.tensors] == [contents["w"], contents["v"]]


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_a_tensor_without_elements_cannot_be_written(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"`w`: its shape .* has no elements"):
        lay_out("x.ckpt", [TensorSpec("w", shape, "F32")])


@pytest.mark.parametrize("dtype", ["C64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_a_dtype_that_mindspore_lacks_cannot_be_written(dtype: str) -> None:
    with pytest.raises(UsageError, match=f"`w`: MindSpore's .ckpt format has no `{dtype}`"):
        lay_out("x.ckpt", [TensorSpec("w", (2,), dtype)])


def test_a_name_that_mindspore_cannot_load_is_not_written() -> None:
    lay_out("x.ckpt", [TensorSpec("\u00e9" * 1024, (2,), "F32")])
    with pytest.raises(UsageError, match="1025 characters"):
        lay_out("x.ckpt", [TensorSpec("n" * 1025, (2,), "F32")])


def test_two_tensors_of_one_name_are_an_internal_error() -> None:
    with pytest.raises(InternalError, match="`w`"):
        lay_out("x.ckpt", [TensorSpec("w", (3,), "F32")] * 2)


def test_the_scan_reads_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [TensorSpec(f"t{n}", (300_000,), "F32") for n in range(20)]
    output = lay_out("x.ckpt", specs)
    file = tmp_path / "x.ckpt"
    with file.open("wb") as stream:
        stream.truncate(output.size)
        for offset, data in output.fixed:
            stream.seek(offset)
            stream.write(data)
    counted = []
    pread = mindspore_ckpt.files.pread
    monkeypatch.setattr(mindspore_ckpt.files, "pread", lambda *a: counted.append(a[2]) or pread(*a))
    assert len(read_index(file).tensors) == 20
    assert sum(counted) < 25 * 4096
