"""The names that a PyTorch pickle may use, and what each builds: one closed table.

A pickle names functions and classes ("globals") and calls them. A call of a name in the table builds one of the
records of `torch_objects.py`; nothing of the file's choosing ever runs. A name that is not in the table has no
meaning, and any use of it is an `UnsafeError` (`torch_machine.py`). The source of the names and of their arguments
is `torch/_utils.py`, `torch/_tensor.py` and `torch/storage.py` of PyTorch 0.4 to 2.13.
"""

from __future__ import annotations

from ckptkit.formats.torch_objects import (
    UNTYPED,
    Builder,
    Call,
    Global,
    Inert,
    OddTensor,
    Storage,
    TensorView,
    is_count,
    is_counts,
)
from ckptkit.types import DTYPES

MAX_COPIED_ITEMS = 1 << 20


def _view(builder: Builder, args: tuple[object, ...], dtype: str | None) -> TensorView:
    """Return the tensor of `(storage, offset, shape, strides)`; `dtype` None is the storage's own."""
    storage, offset, shape, strides = args
    if type(storage) is not Storage:
        raise builder.error("rebuilds a tensor from something that is not a storage")
    if not (is_count(offset) and is_counts(shape) and is_counts(strides)):
        raise builder.error("rebuilds a tensor whose offset, shape or strides are not sizes")
    if len(shape) != len(strides):
        raise builder.error(f"rebuilds a tensor with {len(shape)} sizes and {len(strides)} strides")
    own = "uint8" if storage.dtype == UNTYPED else storage.dtype
    return TensorView(storage, dtype or own, offset, shape, strides)


def _tensor_v1(builder: Builder, args: tuple[object, ...]) -> object:
    _expect(builder, args, "_rebuild_tensor", 4)
    return _view(builder, args, None)


def _tensor_v2(builder: Builder, args: tuple[object, ...]) -> object:
    _expect(builder, args, "_rebuild_tensor_v2", 6, 7)
    builder.set_aside(args[5])
    return _with_bits(_view(builder, args[:4], None), args[6:])


def _tensor_v3(builder: Builder, args: tuple[object, ...]) -> object:
    _expect(builder, args, "_rebuild_tensor_v3", 7, 8)
    dtype = args[6]
    if type(dtype) is not Global or dtype.dtype is None:
        raise builder.error("rebuilds a tensor whose dtype is not a dtype")
    builder.set_aside(args[5])
    return _with_bits(_view(builder, args[:4], dtype.dtype), args[7:])


def _with_bits(tensor: TensorView, rest: tuple[object, ...]) -> object:
    """Return the tensor, unless its metadata (`conj`, `neg`) says that its bytes are not its values."""
    return OddTensor("stored with a pending conjugation or negation") if any(rest) else tensor


def _parameter(builder: Builder, args: tuple[object, ...]) -> object:
    _expect(builder, args, "_rebuild_parameter", 3, 4)
    if type(args[0]) not in (TensorView, OddTensor):
        raise builder.error("makes a parameter of something that is not a tensor")
    for extra in args[2:]:
        builder.set_aside(extra)
    return args[0]


def _typed(builder: Builder, args: tuple[object, ...]) -> object:
    """Rebuild `(function, class, arguments, attributes)`; only tensors and parameters have a known class."""
    _expect(builder, args, "_rebuild_from_type_v2", 4)
    function, kind, inner, state = args
    if type(function) is not Global or not function.builds_tensor or function.call is None:
        raise builder.error("rebuilds a tensor with something that is not a rebuild function")
    if type(kind) is not Global or not kind.is_tensor_class or type(inner) is not tuple:
        raise builder.error("rebuilds a tensor of a class that is not a tensor")
    builder.set_aside(state)
    return function.call(builder, inner)


def _from_cpu(builder: Builder, args: tuple[object, ...]) -> object:
    _expect(builder, args, "_rebuild_device_tensor_from_cpu_tensor", 4)
    tensor, dtype = args[:2]
    if type(tensor) is not TensorView or type(dtype) is not Global or dtype.dtype is None:
        raise builder.error("moves something that is not a tensor to a device")
    return tensor if tensor.dtype == dtype.dtype else OddTensor(f"to be cast to `{dtype.dtype}` when loaded")


def _odd(what: str) -> Call:
    def call(builder: Builder, args: tuple[object, ...]) -> object:
        return OddTensor(what)

    return call


def _inert(what: str) -> Call:
    value = Inert(what)

    def call(builder: Builder, args: tuple[object, ...]) -> object:
        builder.set_aside(args)
        return value

    return call


def _size(builder: Builder, args: tuple[object, ...]) -> object:
    _expect(builder, args, "torch.Size", 1)
    if type(args[0]) is not tuple:
        raise builder.error("makes a `torch.Size` of something that is not a tuple")
    return args[0]


def _mapping(builder: Builder, args: tuple[object, ...]) -> object:
    """Build a dict: of nothing (SETITEMS follows), of pairs (as Python 2 wrote them), or of a dict's items."""
    result: dict[object, object] = {}
    if not args:
        return result
    _expect(builder, args, "OrderedDict", 1)
    source = args[0]
    pairs = list(source.items()) if isinstance(source, dict) else source
    if not isinstance(pairs, list | tuple):
        raise builder.error("makes a dict of something that is not a sequence of pairs")
    builder.copied_items += len(pairs)
    if builder.copied_items > MAX_COPIED_ITEMS:
        raise builder.error("copies more items than a checkpoint has")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise builder.error("makes a dict of something that is not a sequence of pairs")
        builder.put(result, pair[0], pair[1])
    return result


def _expect(builder: Builder, args: tuple[object, ...], name: str, *counts: int) -> None:
    if len(args) not in counts:
        raise builder.error(f"calls `{name}` with {len(args)} arguments")


_STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
    "QInt8Storage": ("qint8", 1),
    "QUInt8Storage": ("quint8", 1),
    "QInt32Storage": ("qint32", 4),
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
    "UntypedStorage": (UNTYPED, 1),
}
_OTHER_DTYPES = (
    *("complex32", "complex128", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
_REBUILD: dict[str, Call] = {
    "_rebuild_tensor": _tensor_v1,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_device_tensor_from_cpu_tensor": _from_cpu,
    "_rebuild_qtensor": _odd("quantized (`_rebuild_qtensor`)"),
    "_rebuild_sparse_tensor": _odd("sparse (`_rebuild_sparse_tensor`)"),
    "_rebuild_sparse_csr_tensor": _odd("sparse (`_rebuild_sparse_csr_tensor`)"),
    "_rebuild_nested_tensor": _odd("nested (`_rebuild_nested_tensor`)"),
    "_rebuild_meta_tensor_no_storage": _odd("on the meta device, without any values"),
    "_rebuild_wrapper_subclass": _odd("a wrapper class, without any values"),
}
_VALUES: dict[tuple[str, str], Call] = {
    ("collections", "OrderedDict"): _mapping,
    ("collections", "Counter"): _mapping,
    ("torch", "Size"): _size,
    ("torch", "device"): _inert("a device"),
    ("torch.serialization", "_get_layout"): _inert("a layout"),
    ("_codecs", "encode"): _inert("bytes"),
    ("builtins", "bytearray"): _inert("bytes"),
    ("builtins", "complex"): _inert("a complex number"),
    ("builtins", "set"): _inert("a set"),
    ("builtins", "frozenset"): _inert("a set"),
    ("builtins", "slice"): _inert("a slice"),
    ("builtins", "range"): _inert("a range"),
}
_TENSOR_CLASSES = (
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.tensor", "Tensor"),
    ("torch.nn", "Parameter"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
)
_QSCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)


def _table() -> dict[tuple[str, str], Global]:
    """Return every name that a pickle may use, by (module, name) exactly as written in the file."""
    table: dict[tuple[str, str], Global] = {}
    for name, kind in _STORAGES.items():
        for module in ("torch", "torch.cuda", "torch.storage"):
            table[module, name] = Global(f"{module}.{name}", storage=kind)
    for name in [*(d.torch for d in DTYPES.values() if d.torch), *_OTHER_DTYPES]:
        table["torch", name] = Global(f"torch.{name}", dtype=name)
    for name in _QSCHEMES:
        table["torch", name] = Global(f"torch.{name}")
    for name, call in _REBUILD.items():
        table["torch._utils", name] = Global(f"torch._utils.{name}", call, builds_tensor=True)
    for module in ("torch._tensor", "torch.tensor"):
        for name in ("_rebuild_from_type", "_rebuild_from_type_v2"):
            table[module, name] = Global(f"{module}.{name}", _typed)
    for module, name in _TENSOR_CLASSES:
        table[module, name] = Global(f"{module}.{name}", is_tensor_class=True)
    for (module, name), call in _VALUES.items():
        table[module, name] = Global(f"{module}.{name}", call)
    return table


GLOBALS = _table()
