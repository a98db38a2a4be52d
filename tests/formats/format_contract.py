"""What every format promises, as checks that a test calls; `test_contract.py` runs them for each format.

1. The fixed bytes and the extents of `lay_out` cover the file exactly once.
2. `read_index` finds what was laid out: names, shapes, dtypes, and extents that hold the right bytes.
3. `read_region` gives any region of any tensor, bit for bit.
4. The framework's own loader accepts the file and sees the same bytes, and the reader here reads the framework's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from ckptkit.formats import mindspore_ckpt, safetensors
from ckptkit.formats.base import FileIndex, OutputFile
from ckptkit.formats.io import read_region
from ckptkit.types import DTYPES, Region, TensorSpec

Contents = Mapping[str, bytes]

NAMES = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x4FF, exclude_characters="\x7f"), min_size=1, max_size=12
)


@dataclass(frozen=True)
class Format:
    """A format under test; `min_length` is the least length of an axis that it can write."""

    name: str
    suffix: str
    dtypes: tuple[str, ...]
    min_length: int
    lay_out: Callable[[str, Sequence[TensorSpec]], OutputFile]
    read_index: Callable[[Path], FileIndex]


FORMATS = (
    Format(
        "safetensors",
        ".safetensors",
        tuple(name for name in DTYPES if name != "STR"),
        0,
        lambda name, specs: safetensors.lay_out(name, specs, {"format": "pt"}),
        safetensors.read_index,
    ),
    Format(
        "ckpt",
        ".ckpt",
        tuple(name for name, dtype in DTYPES.items() if dtype.mindspore),
        1,
        mindspore_ckpt.lay_out,
        mindspore_ckpt.read_index,
    ),
)


@st.composite
def specs_of(draw: st.DrawFn, form: Format) -> list[TensorSpec]:
    """Draw up to six tensors that `form` can hold."""
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    result = []
    for name in names:
        dtype = draw(st.sampled_from(form.dtypes))
        axes = 1 if dtype == "STR" else draw(st.integers(0, 4))
        shape = draw(st.lists(st.integers(form.min_length, 5), min_size=axes, max_size=axes))
        result.append(TensorSpec(name, tuple(shape), dtype))
    return result


@st.composite
def region_of(draw: st.DrawFn, shape: Sequence[int]) -> Region:
    """Draw a region of a tensor of `shape`, perhaps empty."""
    edges = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return Region(tuple(a for a, _ in edges), tuple(b for _, b in edges))


def random_contents(specs: Sequence[TensorSpec], seed: int = 0) -> dict[str, bytes]:
    """Return bytes for each tensor; bools are 0 or 1 and text is code points, since loaders look at these."""
    rng = np.random.default_rng(seed)
    contents = {}
    for spec in specs:
        data = rng.integers(0, 256, spec.num_bytes, dtype=np.uint8)
        if spec.dtype == "BOOL":
            data &= 1
        if spec.dtype == "STR":
            data = rng.integers(65, 0x4FF, spec.num_bytes // 4, dtype=np.uint32)
        contents[spec.name] = data.tobytes()
    return contents


def assemble(output: OutputFile, contents: Contents) -> bytes:
    """Return the file that `output` describes; fail unless each byte of it is written exactly once."""
    data = bytearray(output.size)
    written = bytearray(output.size)
    pieces = list(output.fixed)
    for name, extents in output.extents.items():
        position = 0
        for extent in extents:
            pieces.append((extent.offset, contents[name][position : position + extent.size]))
            position += extent.size
        assert position == len(contents[name]), f"extents of {name} hold {position} bytes"
    for offset, piece in pieces:
        end = offset + len(piece)
        assert end <= output.size, f"bytes {offset} to {end} of a file of {output.size}"
        assert not any(written[offset:end]), f"bytes {offset} to {end} written twice"
        data[offset:end] = piece
        written[offset:end] = b"\1" * len(piece)
    assert all(written), "bytes left out"
    return bytes(data)


def rewrite(file: Path, data: bytes) -> None:
    """Replace a file's content; never cuts it to 0 bytes, which ext4 answers with a flush to disk."""
    with file.open("r+b" if file.exists() else "wb") as stream:
        stream.write(data)
        stream.truncate(len(data))


def check_read_back(form: Format, file: Path, specs: Sequence[TensorSpec], contents: Contents) -> None:
    """Fail unless `read_index` and `read_region` find in `file` just what was written."""
    index = form.read_index(file)
    found = {tensor.name: tensor for tensor in index.tensors}
    assert len(found) == len(index.tensors)
    assert {name: tensor.spec for name, tensor in found.items()} == {spec.name: spec for spec in specs}
    assert [t.extents[0].offset for t in index.tensors] == sorted(t.extents[0].offset for t in index.tensors)
    for spec in specs:
        assert read_region(found[spec.name]).tobytes() == contents[spec.name]


def array_of(spec: TensorSpec, contents: Contents) -> np.ndarray:
    """Return a tensor's elements as an array of its dtype's carrier."""
    return np.frombuffer(contents[spec.name], DTYPES[spec.dtype].carrier).reshape(spec.shape)
