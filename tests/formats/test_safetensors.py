"""The safetensors reader and writer: one test for each malformed file, built from byte literals.

The contract shared by all formats is in `test_contract.py`; the library's own view is in `test_safetensors_itself.py`.
"""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from format_contract import assemble, random_contents

from ckptkit.errors import CorruptError, InternalError, ResourceError, UsageError
from ckptkit.formats.safetensors import lay_out, read_index
from ckptkit.types import DTYPES, Extent, TensorSpec

GOOD = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of a header and data, or of raw bytes."""

    def make(header: bytes | None = None, data: bytes = b"\0" * 4, raw: bytes | None = None) -> Path:
        file = tmp_path / "x.safetensors"
        file.write_bytes(raw if header is None else struct.pack("<Q", len(header)) + header + data)
        return file

    return make


def refusal(file: Path, kind: type[CorruptError] = CorruptError) -> str:
    """Return the message with which `file` is refused; it must name the file and a remedy."""
    with pytest.raises(kind) as caught:
        read_index(file)
    assert file.name in str(caught.value)
    assert caught.value.hint
    return str(caught.value)


def entry(dtype: str = '"F32"', shape: str = "[1]", offsets: str = "[0,4]") -> bytes:
    return f'{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'.encode()


def test_a_sound_file_is_read(write: Write) -> None:
    index = read_index(write(GOOD))
    (tensor,) = index.tensors
    assert (tensor.name, tensor.shape, tensor.dtype) == ("w", (1,), "F32")
    assert tensor.extents == (Extent(8 + len(GOOD), 4),)
    assert (index.metadata, index.notes) == ({}, ())


def test_an_empty_file_is_called_empty(write: Write) -> None:
    assert "is empty (0 bytes)" in refusal(write(raw=b""))


def test_a_pointer_of_git_lfs_tells_the_size_that_the_file_should_have(write: Write) -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4976698672\n"
    message = refusal(write(raw=text))
    assert "git-lfs pointer" in message
    assert "4976698672 bytes" in message


def test_a_pointer_of_git_lfs_without_size_is_still_called_a_pointer(write: Write) -> None:
    assert "git-lfs pointer" in refusal(write(raw=b"version https://git-lfs.github.com/spec/v1\n"))


def test_a_file_shorter_than_the_header_length_is_cut(write: Write) -> None:
    assert "is cut: it has 4 bytes" in refusal(write(raw=b"\x10\0\0\0"))


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 100_000_001])
def test_a_header_length_beyond_the_limit_is_refused_before_it_is_read(write: Write, length: int) -> None:
    assert f"state a header of {length} bytes" in refusal(write(raw=struct.pack("<Q", length) + b"{}"))


def test_random_bytes_are_no_safetensors_file(write: Write) -> None:
    assert "is not a safetensors file" in refusal(write(raw=bytes(range(256)) * 8))


def test_another_format_is_named(write: Write) -> None:
    assert "looks like a zip archive" in refusal(write(raw=b"PK\x03\x04" + b"\xff" * 60))


def test_a_file_cut_in_its_header_tells_both_sizes(write: Write) -> None:
    message = refusal(write(raw=struct.pack("<Q", len(GOOD)) + GOOD[:20]))
    assert f"ends at byte {8 + len(GOOD)}; the file has 28 bytes" in message


def test_a_file_cut_in_its_data_tells_both_sizes_and_the_tensor(write: Write) -> None:
    message = refusal(write(GOOD, data=b"\0\0"))
    assert f"needs {len(GOOD) + 12} bytes; the file has {len(GOOD) + 10}" in message
    assert "\n  w" in message


def test_bytes_after_the_last_tensor_are_refused(write: Write) -> None:
    assert "has 1 bytes after its last tensor" in refusal(write(GOOD, data=b"\0" * 5))


@pytest.mark.parametrize(
    "header",
    [b"{", b"{]", b"nonsense", b"{'w':1}", b"\xff\xfe{}", b'{"w":1e}', b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"],
)
def test_a_header_that_is_not_json_is_refused(write: Write, header: bytes) -> None:
    assert "not valid JSON" in refusal(write(header))


@pytest.mark.parametrize("header", [b"[]", b"null", b"1", b'"w"'])
def test_a_header_that_is_no_object_is_refused(write: Write, header: bytes) -> None:
    assert "not a JSON object" in refusal(write(header))


def test_a_header_in_utf_16_is_refused(write: Write) -> None:
    refusal(write(GOOD.decode().encode("utf-16-le")))


@pytest.mark.parametrize(
    "header",
    [
        GOOD[:-1] + b"," + GOOD[1:],
        GOOD[:-1] + b',"\\u0077"' + GOOD[4:],
        b'{"w":{"dtype":"F16","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"w":{"dtype":"F32","shape":[9],"shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"a":"1","a":"2"},' + GOOD[1:],
        b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"1"},' + GOOD[1:],
        b'{"__metadata__":null,"__metadata__":{},' + GOOD[1:],
        b'{"__metadata__":{"a":"1","a":"2"},"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data\\u005foffsets":[0,4]}}',
    ],
)
def test_a_key_that_occurs_twice_is_refused(write: Write, header: bytes) -> None:
    assert "duplicate keys" in refusal(write(header))


@pytest.mark.parametrize("metadata", [b"", b'"__metadata__":{},', b'"__metadata__":null,'])
def test_missing_null_and_empty_metadata_are_the_same(write: Write, metadata: bytes) -> None:
    index = read_index(write(b"{" + metadata + GOOD[1:]))
    assert (index.metadata, index.notes, len(index.tensors)) == ({}, (), 1)


@pytest.mark.parametrize("value", [b"1", b"null", b"true", b"[]", b'{"a":"b"}', b"1.5"])
def test_metadata_that_is_not_text_is_refused(write: Write, value: bytes) -> None:
    assert "values that are not text" in refusal(write(b'{"__metadata__":{"a":' + value + b"}," + GOOD[1:]))


@pytest.mark.parametrize("value", [b"1", b"[]", b'"a"', b"false"])
def test_metadata_that_is_no_object_is_refused(write: Write, value: bytes) -> None:
    assert "is not a JSON object" in refusal(write(b'{"__metadata__":' + value + b"," + GOOD[1:]))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_a_packed_dtype_is_refused_by_name(write: Write, dtype: str) -> None:
    message = refusal(write(entry(f'"{dtype}"')))
    assert f"`w` of `{write(entry())}` has dtype `{dtype}`" in message
    assert "several in a byte" in message


@pytest.mark.parametrize("dtype", ["F128", "f32", "STR", ""])
def test_an_unknown_dtype_is_refused_by_name(write: Write, dtype: str) -> None:
    assert f"has dtype `{dtype}`, which is not supported" in refusal(write(entry(f'"{dtype}"')))


@pytest.mark.parametrize("dtype", ["1", "null", "[]", "{}"])
def test_a_dtype_that_is_not_text_is_refused(write: Write, dtype: str) -> None:
    assert "has a dtype that is not text" in refusal(write(entry(dtype)))


@pytest.mark.parametrize("shape", ["[-1]", "[1.0]", "[true]", '["1"]', "null", "1", '"1"', "{}", "[[1]]", "[-1,-1]"])
def test_a_shape_that_is_no_list_of_sizes_is_refused(write: Write, shape: str) -> None:
    assert "its lengths must be ints >= 0" in refusal(write(entry(shape=shape)))


@pytest.mark.parametrize("offsets", ["[0]", "[0,4,8]", "null", "[-4,0]", "[0,4.0]", "[false,4]", '["0","4"]', "{}"])
def test_offsets_that_are_no_pair_of_sizes_are_refused(write: Write, offsets: str) -> None:
    assert "must be two ints >= 0" in refusal(write(entry(offsets=offsets)))


@pytest.mark.parametrize("offsets", ["[0,8]", "[0,0]", "[4,0]", "[0,3]"])
def test_a_range_that_does_not_fit_shape_and_dtype_is_refused(write: Write, offsets: str) -> None:
    message = refusal(write(entry(offsets=offsets)))
    assert "`w`" in message
    assert "F32 [1] needs 4" in message


@pytest.mark.parametrize("value", ["1", "null", "[]", '"x"', "{}", '{"dtype":"F32"}'])
def test_an_entry_without_the_three_keys_is_refused(write: Write, value: str) -> None:
    assert "needs an entry with" in refusal(write(f'{{"w":{value}}}'.encode()))


def two(first: str, second: str) -> bytes:
    text = '{"a":{"dtype":"U8","shape":[4],"data_offsets":%s},"b":{"dtype":"U8","shape":[4],"data_offsets":%s}}'
    return (text % (first, second)).encode()


def test_tensors_that_overlap_are_refused(write: Write) -> None:
    message = refusal(write(two("[0,4]", "[2,6]"), b"\0" * 6))
    assert "`b`" in message
    assert "overlaps `a`" in message


def test_a_tensor_on_top_of_another_is_refused(write: Write) -> None:
    assert "overlaps" in refusal(write(two("[0,4]", "[0,4]"), b"\0" * 4))


def test_a_hole_between_tensors_is_refused(write: Write) -> None:
    assert "leaves unused bytes after `a`" in refusal(write(two("[0,4]", "[6,10]"), b"\0" * 10))


def test_a_hole_before_the_first_tensor_is_refused(write: Write) -> None:
    assert "leaves unused bytes after `the header`" in refusal(write(two("[4,8]", "[8,12]"), b"\0" * 12))


def test_a_name_that_is_no_unicode_is_refused(write: Write) -> None:
    with pytest.raises(CorruptError, match="not valid Unicode"):
        read_index(write(GOOD.replace(b'"w"', b'"\\ud800"')))


def test_unknown_keys_in_an_entry_are_noted(write: Write) -> None:
    index = read_index(write(GOOD.replace(b'"dtype"', b'"zip":1,"dtype"')))
    assert len(index.tensors) == 1
    assert index.notes == ("`x.safetensors`: unknown keys in its tensor entries: zip",)


def test_tensors_come_in_file_order_whatever_the_header_says(write: Write) -> None:
    index = read_index(write(two("[4,8]", "[0,4]"), b"\0" * 8))
    assert [tensor.name for tensor in index.tensors] == ["b", "a"]


def test_empty_tensors_may_lie_anywhere(write: Write) -> None:
    header = (
        b'{"e":{"dtype":"F32","shape":[0,3],"data_offsets":[4,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    )
    assert [tensor.shape for tensor in read_index(write(header)).tensors] == [(4,), (0, 3)]


def test_a_name_with_quotes_and_backslashes_is_read(write: Write) -> None:
    header = json.dumps({'a"\\b\u00e9': {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    index = read_index(write(header))
    assert (index.tensors[0].name, index.notes) == ('a"\\b\u00e9', ())


def test_a_file_without_tensors_is_read(write: Write) -> None:
    assert read_index(write(b"{}      ", b"")).tensors == ()


def test_a_missing_file_a_folder_and_a_dangling_link_are_told_apart(tmp_path: Path) -> None:
    from ckptkit.errors import CoverageError

    link = tmp_path / "link.safetensors"
    link.symlink_to("gone")
    for path, kind, words in [
        (tmp_path / "none.safetensors", UsageError, "no such file"),
        (tmp_path, UsageError, "is a folder"),
        (link, CoverageError, "points to missing `gone`"),
    ]:
        with pytest.raises(kind, match=words):
            read_index(path)


def test_a_file_that_may_not_be_read_is_a_resource_error(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    file = write(GOOD)
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ResourceError, match="Permission denied"):
        read_index(file)


def test_reading_leaves_the_garbage_collector_as_it_was(write: Write) -> None:
    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            read_index(write(GOOD))
            with pytest.raises(CorruptError):
                read_index(write(b"{"))
            assert gc.isenabled() is on
        finally:
            gc.enable()


def test_reading_an_index_imports_no_numpy(write: Write) -> None:
    code = (
        "import sys; from pathlib import Path; from ckptkit.formats.registry import open_checkpoint;"
        f"open_checkpoint(Path({str(write(GOOD))!r})); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_written_tensors_are_aligned_to_their_elements() -> None:
    dtypes = [name for name in DTYPES if name != "STR"]
    specs = [TensorSpec(f"{n}.{dtype}", (n,), dtype) for n in (1, 3) for dtype in dtypes]
    output = lay_out("x", specs, {})
    for spec in specs:
        (extent,) = output.extents[spec.name]
        assert extent.offset % (DTYPES[spec.dtype].bits // 8) == 0


def test_tensors_of_one_width_are_written_in_the_given_order() -> None:
    specs = [TensorSpec(name, (2,), dtype) for name, dtype in (("z", "F16"), ("a", "BF16"), ("m", "I16"))]
    assert list(lay_out("x", specs, {}).extents) == ["z", "a", "m"]


def test_the_header_is_padded_with_spaces_to_a_multiple_of_eight(tmp_path: Path) -> None:
    for length in range(1, 10):
        specs = [TensorSpec("n" * length, (1,), "U8")]
        data = assemble(lay_out("x", specs, {"format": "pt"}), random_contents(specs))
        (size,) = struct.unpack("<Q", data[:8])
        assert size % 8 == 0
        assert data[8:9] == b"{"
        assert json.loads(data[8 : 8 + size])["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize("metadata", [{}, {"format": "pt", "note": 'a "quote"'}])
def test_the_header_is_the_text_that_json_dumps_writes(metadata: dict[str, str]) -> None:
    names = ["plain", 'with "quotes" and \\', "line\nbreak", "\u00e9\u4e2d\U0001f600"]
    specs = [TensorSpec(name, shape, "BF16") for name, shape in zip(names, [(), (3,), (0, 2), (2, 3, 4)], strict=True)]
    ((_, head),) = lay_out("x", specs, metadata).fixed
    header = json.loads(head[8:])
    assert head[8:].decode().rstrip(" ") == json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    assert header.pop("__metadata__", {}) == metadata
    assert [(name, tuple(entry["shape"])) for name, entry in header.items()] == [(s.name, s.shape) for s in specs]


def test_a_text_value_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="`note`"):
        lay_out("x", [TensorSpec("note", (3,), "STR")], {})


def test_the_name_of_the_metadata_cannot_be_a_tensor() -> None:
    for metadata in ({}, {"format": "pt"}):
        with pytest.raises(UsageError, match="__metadata__"):
            lay_out("x", [TensorSpec("__metadata__", (3,), "F32")], metadata)


def test_two_tensors_of_one_name_are_an_internal_error() -> None:
    with pytest.raises(InternalError, match="`w`"):
        lay_out("x", [TensorSpec("w", (3,), "F32")] * 2, {})


def test_a_header_over_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.formats.safetensors.HEADER_LIMIT", 40)
    lay_out("x", [], {})
    with pytest.raises(UsageError, match="smaller shards"):
        lay_out("x", [TensorSpec("w", (3,), "F32")], {})
