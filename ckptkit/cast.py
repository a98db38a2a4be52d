"""Cast floating-point elements to another dtype, the one step that changes values, and count what does not survive.

Rounding is to nearest, ties to even, once. A NaN stays a NaN: it keeps its sign and the top bits of its payload, and
is made quiet only where no bit of the payload would remain; so BF16 -> F32 -> BF16 and F16 -> F32 -> F16 are the
identity on all 65,536 patterns. Elements come and go as unsigned integers, as everywhere (`types.py`). What does not
live here: which tensors are cast (`plan/build.py`) and what becomes of the counts (`execute.py`, `commands/`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.errors import CoverageError, UsageError
from ckptkit.types import DTYPES, Shape

Array = NDArray[Any]

CHUNK = 65536  # elements: the input, the output and the scratch of a chunk stay in the processor's cache
_NAMES = {
    "bf16": "BF16", "bfloat16": "BF16", "fp16": "F16", "float16": "F16", "fp32": "F32", "float32": "F32",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Format:
    """An IEEE 754 binary format: one sign bit, `exponent` bits, `mantissa` bits."""

    exponent: int
    mantissa: int

    @property
    def inf(self) -> int:
        """The bits of +inf; those of the largest finite value are one less."""
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def limit(self) -> float:
        """The least magnitude that rounds to inf: half a step above the largest finite value."""
        return float((2.0 - 2.0 ** -(self.mantissa + 1)) * 2.0 ** ((1 << (self.exponent - 1)) - 1))


_FORMATS = {"F16": _Format(5, 10), "BF16": _Format(8, 7), "F32": _Format(8, 23), "F64": _Format(11, 52)}


@dataclass(slots=True)
class CastCount:
    """What one tensor lost: finite values that became inf (or were clamped), the largest of them, and values
    that became zero and were not."""

    overflowed: int = 0
    flushed: int = 0
    largest: float = 0.0

    def add(self, other: CastCount) -> None:
        """Count what another part of the tensor lost too."""
        self.overflowed += other.overflowed
        self.flushed += other.flushed
        self.largest = max(self.largest, other.largest)


def parse_dtype(text: str) -> str:
    """Return the dtype that a user's `bf16`, `float16` or `fp32` names; UsageError for anything else."""
    if text.lower() not in _NAMES:
        raise UsageError(f"`{text}` is no dtype to cast to", hint=f"one of {', '.join(_NAMES)}")
    return _NAMES[text.lower()]


def why_kept(dtypes: Collection[str], shape: Shape, *, keep_fp32: bool, wanted: str) -> str | None:
    """Return why a tensor made of `dtypes` is not cast to `wanted`, or None when it is."""
    odd = [dtype for dtype in dtypes if dtype not in _FORMATS]
    if odd:
        return f"{DTYPES[odd[0]].torch or odd[0]} is never cast"
    if not shape:
        return "a tensor without axes is never cast"
    if keep_fp32 and wanted != "F32":
        return "its row says `keep_fp32`"
    return None


def common_dtype(dtypes: Collection[str]) -> str:
    """Return the dtype in which elements of all these dtypes travel exactly: the only one, or F32, or F64."""
    if len(set(dtypes)) == 1:
        return next(iter(dtypes))
    return "F64" if "F64" in dtypes else "F32"


def is_lossy(source: str, target: str) -> bool:
    """Say whether a value can overflow or become zero: when the target's exponent range is the smaller one."""
    return source != target and source != "F16" and target != "F64" and (source, target) != ("BF16", "F32")


def largest_finite(dtype: str) -> float:
    """Return the largest finite value of `dtype`."""
    form = _FORMATS[dtype]
    return float((2.0 - 2.0**-form.mantissa) * 2.0 ** ((1 << (form.exponent - 1)) - 1))


class CastOverflow(CoverageError):
    """Finite values that do not fit the dtype they are cast to."""


def overflow_error(overflowed: Collection[tuple[str, int, CastCount]], target: str) -> CastOverflow:
    """Return the error for tensors (name, number of elements, count) whose finite values do not fit `target`."""
    name = DTYPES[target].torch
    return CastOverflow(
        f"{len(overflowed)} {'tensor overflows' if len(overflowed) == 1 else 'tensors overflow'} {name}",
        items=[
            f"{tensor}  {count.overflowed} of {total} values, the largest {count.largest:.6g}"
            for tensor, total, count in overflowed
        ],
        why=f"{name} ends at {largest_finite(target):.6g}: these values would become inf, and then NaN in the model",
        hint="cast to `bfloat16` or `float32`, or pass `--clamp` to write the largest finite value instead",
    )


class Caster:
    """Casts the elements of one tensor, in as many calls as one likes; `count` grows. For one thread at a time.

    With `clamp`, a finite value that overflows becomes the largest finite one of its sign; else it becomes inf.
    Raises UsageError in a process whose processor flushes subnormal numbers to zero.
    """

    def __init__(self, source: str, target: str, *, clamp: bool = False) -> None:
        self.count = CastCount()
        self.lossy = is_lossy(source, target)
        self._source, self._target, self._clamp = source, target, clamp
        self._wide = "F64" if source == "F64" else "F32"
        self._out: Array = np.empty(0, DTYPES[target].carrier)
        self._scratch: Array = np.empty(CHUNK, np.uint32)
        self._widened: Array = np.empty(CHUNK, np.uint32)
        _refuse_flushing()

    def __call__(self, values: Array) -> Array:
        """Return contiguous `values` cast, in the same shape; the next call overwrites the result."""
        flat = values.reshape(-1)
        if self._out.size < flat.size:
            self._out = np.empty(flat.size, self._out.dtype)
        out = self._out[: flat.size]
        if (self._source, self._target) == ("BF16", "F32"):  # no arithmetic: every value has its place, none is lost
            _to_single(flat, "BF16", out)
            return out.reshape(values.shape)
        chunks = [(flat[start : start + CHUNK], out[start : start + CHUNK]) for start in range(0, flat.size, CHUNK)]
        with np.errstate(all="ignore"):
            for bits, cast in chunks:
                self._cast(bits, cast)
        return out.reshape(values.shape)

    def _cast(self, bits: Array, out: Array) -> None:
        if self._target == "F32" and self._source != "F64":
            _to_single(bits, self._source, out)
            return
        wide = bits
        if self._source in ("BF16", "F16"):
            wide = self._widened[: bits.size]
            _to_single(bits, self._source, wide)
        values = wide.view(np.float64 if self._wide == "F64" else np.float32)
        self._round(values, out)
        limit = _FORMATS[self._target].limit if self.lossy else _FORMATS["F32"].limit
        if not (-limit < values.min() and values.max() < limit):  # also where one is NaN
            self._repair(wide, values, out)
        if self.lossy:
            self._count_zeros(values, out)

    def _round(self, values: Array, out: Array) -> None:
        if self._target == "BF16":
            singles = _to_odd_single(values) if self._wide == "F64" else values
            _to_bf16(singles.view(np.uint32), out, self._scratch[: out.size])
        else:
            width = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[self._target]
            np.copyto(out.view(width), values, casting="same_kind")

    def _repair(self, bits: Array, values: Array, out: Array) -> None:
        """Write the NaNs as promised, and count (and clamp) the finite values that became inf."""
        nan = np.isnan(values)
        if nan.any():
            out[nan] = _nan_bits(bits[nan], _FORMATS[self._wide], _FORMATS[self._target]).astype(out.dtype)
        if not self.lossy:
            return
        form = _FORMATS[self._target]
        over = (np.abs(values) >= form.limit) & np.isfinite(values)
        if over.any():
            self.count.overflowed += int(np.count_nonzero(over))
            self.count.largest = max(self.count.largest, float(np.abs(values[over]).max()))
            if self._clamp:
                out[over] -= out.dtype.type(1)  # from the bits of inf to those of the largest finite value

    def _count_zeros(self, values: Array, out: Array) -> None:
        magnitudes = self._scratch.view(out.dtype)[: out.size]
        np.left_shift(out, 1, out=magnitudes)
        if np.count_nonzero(magnitudes) < out.size:
            self.count.flushed += int(np.count_nonzero(values)) - int(np.count_nonzero(magnitudes))


def _to_single(bits: Array, source: str, out: Array) -> None:
    """Write BF16 or F16 as F32, exactly."""
    if source == "BF16":
        np.copyto(out.view(np.float32), bits.view(_bfloat16()))
        return
    # the half's bits, in place within a single's, stand for the value times 2**-112, subnormal or not
    np.copyto(out.view(np.int32), bits.view(np.int16))
    np.left_shift(out, 13, out=out)
    np.bitwise_and(out, 0x8FFFE000, out=out)
    values = out.view(np.float32)
    np.multiply(values, np.float32(2.0**112), out=values)
    if not (values.min() > -65536.0 and values.max() < 65536.0):  # where the half was inf or NaN
        out[np.abs(values) >= 65536.0] |= np.uint32(_FORMATS["F32"].inf)


@cache
def _bfloat16() -> np.dtype[Any]:
    """Return numpy's dtype of bfloat16; what casts none does not wait for the import."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _to_bf16(bits: Array, out: Array, scratch: Array) -> None:
    """Write F32 as BF16: add just under half a step, or half a step where the last kept bit is odd, and cut."""
    np.right_shift(bits, 16, out=scratch)
    np.bitwise_and(scratch, 1, out=scratch)
    np.add(scratch, bits, out=scratch)
    np.add(scratch, 0x7FFF, out=scratch)
    np.right_shift(scratch, 16, out=scratch)
    np.copyto(out, scratch, casting="unsafe")


def _to_odd_single(values: Array) -> Array:
    """Return F64 as F32, inexact ones as the odd neighbour: a second rounding then falls as one from F64 would."""
    singles = values.astype(np.float32)
    bits = singles.view(np.uint32)
    even = (bits & 1) == 0
    kept, wanted = np.abs(singles.astype(np.float64)), np.abs(values)
    more, less = even & (kept < wanted), even & (kept > wanted)
    np.add(bits, more, out=bits)
    np.subtract(bits, less, out=bits)
    return singles


def _nan_bits(bits: Array, source: _Format, target: _Format) -> Array:
    """Return NaNs in another format: sign and top payload bits kept, quiet where none of these would remain."""
    wide = bits.astype(np.uint64)
    payload = wide & np.uint64((1 << source.mantissa) - 1)
    shift = source.mantissa - target.mantissa
    payload = payload >> np.uint64(shift) if shift >= 0 else payload << np.uint64(-shift)
    payload[payload == 0] = 1 << (target.mantissa - 1)
    sign = wide >> np.uint64(source.exponent + source.mantissa)
    return (sign << np.uint64(target.exponent + target.mantissa)) | np.uint64(target.inf) | payload


def _refuse_flushing() -> None:
    """Raise UsageError when arithmetic in this thread takes subnormal numbers for zero (DAZ and FTZ modes)."""
    smallest = np.full(1, 2.0**-149, np.float32)
    if not (smallest * np.float32(2.0**100)).any():
        raise UsageError(
            "subnormal numbers count as zero in this process, so casts would not be exact",
            why="a library has set the processor's flush-to-zero mode, as code built with -ffast-math does",
            hint="cast in a process of its own: `ckptkit convert`",
        )
