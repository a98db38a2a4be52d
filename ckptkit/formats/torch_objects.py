"""The inert values that a PyTorch pickle is read into: storages, tensors, names.

Beside these records an object read from a pickle holds only dict, list, tuple, str, int, float, bool, bytes and
None. What does not live here: which names a pickle may use (`torch_globals.py`), and the opcodes
(`torch_unpickler.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

from ckptkit.errors import CorruptError
from ckptkit.types import Shape

MAX_AXES = 64
MAX_COUNT = 1 << 62
UNTYPED = "untyped"


@dataclass(frozen=True, slots=True)
class Storage:
    """A flat run of `count` elements, `key` in the file; tensors may use elements `start` to `stop` of it."""

    key: str
    dtype: str
    item_bytes: int
    count: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.item_bytes


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor: a strided view of a storage; `dtype` in PyTorch's spelling, `offset` and `strides` in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: Shape
    strides: Shape


@dataclass(frozen=True, slots=True)
class OddTensor:
    """A tensor that is not a plain strided array; `what` says why, to follow "is"."""

    what: str


@dataclass(frozen=True, slots=True)
class Inert:
    """A value whose content is of no interest: bytes, a device, a complex number."""

    what: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """A name that is not in the table."""

    name: str


@dataclass(slots=True)
class Builder:
    """What one pickle has built so far, beside its stack.

    `aside` are values that stand at no key (attributes of containers and parameters, hooks): nothing reads them,
    but a tensor among them must not be lost in silence.
    """

    file_name: str
    storages: dict[str, Storage] = field(default_factory=dict)
    aside: list[object] = field(default_factory=list)
    copied_items: int = 0

    def error(self, what: str) -> CorruptError:
        """Return the error that this pickle is damaged."""
        return CorruptError(f"the pickle in `{self.file_name}` {what}")

    def set_aside(self, value: object) -> None:
        """Keep a value that is not read, unless it is empty."""
        if value:
            self.aside.append(value)

    def put(self, target: dict[object, object], key: object, value: object) -> None:
        """Store `value` at `key`.

        Keys that are not scalars are replaced: hashing a deeply nested tuple would exhaust the C stack, and ints
        above 64 bits can be made to collide.
        """
        kind = type(key)
        if kind is not str and not (
            kind in (bool, float, bytes, type(None)) or (type(key) is int and -MAX_COUNT < key < MAX_COUNT)
        ):
            self.aside.append(key)
            key = _OddKey()
        if key in target:
            raise self.error(f"stores the key {shown(key)} twice")
        target[key] = value


class _OddKey:
    """Stands for a key that is not a scalar; equal to itself only."""


Call = Callable[[Builder, tuple[object, ...]], object]


@dataclass(frozen=True, slots=True)
class Global:
    """A name of the table; `call` is None for one that may be referred to, and not called."""

    name: str
    call: Call | None = None
    storage: tuple[str, int] | None = None
    dtype: str | None = None
    is_tensor_class: bool = False
    builds_tensor: bool = False


def shown(value: object) -> str:
    """Return a name or number from a file for a message: printable ASCII in backticks, at most 120 characters."""
    if type(value) not in (str, int, bool, float):
        return f"of type {type(value).__name__}"
    plain = str(value)[:240].encode("unicode_escape").decode("ascii")
    return f"`{plain if len(plain) <= 120 else plain[:117] + '...'}`"


def open_storage(builder: Builder, reference: object) -> Storage:
    """Return the storage of a persistent reference `("storage", type, key, location, count[, view])`."""
    if type(reference) is not tuple or len(reference) not in (5, 6) or reference[0] != "storage":
        raise builder.error("refers to an outside object that is not a storage")
    _, kind, key, _, count = reference[:5]
    if type(kind) is not Global or kind.storage is None or type(key) is not str:
        raise builder.error("refers to a storage without a known type and key")
    if not is_count(count):
        raise builder.error(f"gives storage {shown(key)} an impossible size")
    dtype, item_bytes = kind.storage
    known = builder.storages.get(key)
    if known is None:
        known = builder.storages[key] = Storage(key, dtype, item_bytes, count, 0, count)
    elif known.dtype != dtype or known.count != count:
        raise builder.error(f"describes storage {shown(key)} in two ways that contradict each other")
    view = reference[5] if len(reference) == 6 else None
    return known if view is None else _part_of(builder, known, view)


def _part_of(builder: Builder, root: Storage, view: object) -> Storage:
    """Return the part of `root` that a legacy view `(key, offset, count)` names."""
    if type(view) is not tuple or len(view) != 3 or not (is_count(view[1]) and is_count(view[2])):
        raise builder.error(f"holds a damaged view of storage {shown(root.key)}")
    start, stop = view[1], view[1] + view[2]
    if stop > root.count:
        raise builder.error(f"holds a view of storage {shown(root.key)} that reaches past its end")
    return Storage(root.key, root.dtype, root.item_bytes, root.count, start, stop)


def is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < MAX_COUNT


def is_counts(value: object) -> TypeGuard[Shape]:
    return type(value) is tuple and len(value) <= MAX_AXES and all(map(is_count, value))
