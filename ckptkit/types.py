"""The words that every other file shares: dtypes, regions, extents, tensors.

Data only. Nothing here reads a file, and nothing here imports numpy: `--help` and `inspect` work without it.
Dtypes are spelled as safetensors spells them. Element values never matter to most of ckptkit, so each dtype names
a *carrier*: the unsigned numpy integer of the same width, in which elements travel bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar, dataclass_transform

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make `cls` a slotted dataclass that is not to be changed, for what there is one of for each tensor.

    mypy refuses an assignment to its fields, as with `frozen=True`; at run time nothing does, because a frozen object
    takes three to five times as long to make, and a plan makes several for each of perhaps 100,000 tensors.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@dataclass(frozen=True, slots=True)
class DType:
    """One element type: its width in bits, its carrier, and its spelling elsewhere (None: not representable)."""

    name: str
    bits: int
    carrier: str
    mindspore: str | None = None
    torch: str | None = None


# STR is MindSpore's alone: a text value in a .ckpt file, UTF-32 code points.
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("BOOL", 8, "uint8", "Bool", "bool"),
        DType("U8", 8, "uint8", "UInt8", "uint8"),
        DType("I8", 8, "uint8", "Int8", "int8"),
        DType("I16", 16, "uint16", "Int16", "int16"),
        DType("U16", 16, "uint16", "UInt16", "uint16"),
        DType("I32", 32, "uint32", "Int32", "int32"),
        DType("U32", 32, "uint32", "UInt32", "uint32"),
        DType("I64", 64, "uint64", "Int64", "int64"),
        DType("U64", 64, "uint64", "UInt64", "uint64"),
        DType("F16", 16, "uint16", "Float16", "float16"),
        DType("BF16", 16, "uint16", "BFloat16", "bfloat16"),
        DType("F32", 32, "uint32", "Float32", "float32"),
        DType("F64", 64, "uint64", "Float64", "float64"),
        DType("C64", 64, "uint64", None, "complex64"),
        DType("F8_E4M3", 8, "uint8", None, "float8_e4m3fn"),
        DType("F8_E5M2", 8, "uint8", None, "float8_e5m2"),
        DType("F8_E8M0", 8, "uint8", None, "float8_e8m0fnu"),
        DType("F8_E4M3FNUZ", 8, "uint8", None, "float8_e4m3fnuz"),
        DType("F8_E5M2FNUZ", 8, "uint8", None, "float8_e5m2fnuz"),
        DType("STR", 32, "uint32", "str"),
    )
}
_ITEM_BYTES = {name: dtype.bits // 8 for name, dtype in DTYPES.items()}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of `dtype`."""
    return _ITEM_BYTES[dtype]


@value
class Region:
    """A box inside a tensor: `start` and `stop`, one int per axis, half open."""

    start: Shape
    stop: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the region as an index for an array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def relative_to(self, origin: Sequence[int]) -> Region:
        """Return the same box in the coordinates of a box that starts at `origin`."""
        return Region(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )

    def shifted(self, by: Sequence[int]) -> Region:
        """Return the same box `by` further on."""
        return self.relative_to([-n for n in by])

    def common(self, other: Region) -> Region:
        """Return the box that lies in both; an empty one when none does."""
        start = tuple(map(max, self.start, other.start))
        return Region(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def with_axis(self, axis: int, start: int, stop: int) -> Region:
        """Return a copy whose `axis` runs from `start` to `stop`."""
        return Region(
            (*self.start[:axis], start, *self.start[axis + 1 :]),
            (*self.stop[:axis], stop, *self.stop[axis + 1 :]),
        )


class Extent(NamedTuple):
    """A byte range of a file."""

    offset: int
    size: int


# an extent of a pair of ints, in half the time that `Extent` takes: for where each tensor of many gets one
new_extent: Callable[[tuple[int, int]], Extent] = partial(tuple.__new__, Extent)


@value
class TensorSpec:
    """What a tensor is, wherever it is: name, shape, dtype."""

    name: str
    shape: Shape
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@value
class TensorInfo:
    """A tensor in a file: its elements lie, in C order, in `extents`, one after another.

    `strides` (in elements) is None for all but the views that a PyTorch pickle may hold; then the one extent
    spans the view's storage range from its first element on.
    """

    name: str
    shape: Shape
    dtype: str
    file: Path
    extents: tuple[Extent, ...]
    strides: Shape | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape, self.dtype)


@value
class TensorLayout:
    """How one tensor is cut over the devices of a pipeline stage, in the words of MindSpore's strategy files.

    `dev_matrix` arranges the devices, row-major. `tensor_map` has for each tensor axis the device axes that cut it,
    the most significant first, each counted from the last device axis (0 is the last one); `()` for an axis that is
    whole. `opt_step` and `opt_size` are those of an optimizer shard, which cuts axis 0 once more over the devices that
    hold equal parts: 0 without one; a size of -1 means all of these devices.
    """

    dev_matrix: Shape
    tensor_map: tuple[Shape, ...]
    opt_step: int = 0
    opt_size: int = 0


def total_bytes(tensors: Iterable[TensorSpec | TensorInfo]) -> int:
    """Return the bytes of all tensors."""
    return sum(sizes_of(tensors))


def sizes_of(tensors: Iterable[TensorSpec | TensorInfo]) -> list[int]:
    """Return the bytes of each tensor; each dtype and shape is multiplied out once."""
    kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
    known = {kind: prod(kind[0]) * _ITEM_BYTES[kind[1]] for kind in set(kinds)}
    return [known[kind] for kind in kinds]


def contiguous_runs(shape: Shape, region: Region) -> Iterator[tuple[int, int]]:
    """Yield (first element, count) of each run of `region` that is contiguous in a C-order tensor of `shape`."""
    extent = region.shape
    if 0 in extent:
        return
    axis = len(shape)
    run = 1
    while axis and extent[axis - 1] == shape[axis - 1]:
        axis -= 1
        run *= shape[axis]
    if axis:
        axis -= 1
        run *= extent[axis]
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(a * s for a, s in zip(region.start, strides, strict=True))
    for index in product(*(range(n) for n in extent[:axis])):
        yield base + sum(i * s for i, s in zip(index, strides, strict=False)), run
