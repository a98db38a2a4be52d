"""What elements mean as numbers: bits of any numeric dtype -> float64, for figures in reports.

Nothing is ever written from these values. Exact for all dtypes but 64-bit integers. What does not live here: casts
(`cast.py`), which go from dtype to dtype and keep every bit that they can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]

_PLAIN = {
    "BOOL": "uint8", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tiny:
    """An 8-bit float: its exponent bits and bias, the largest finite value's bits, and what lies above.

    `special` is `ieee` (inf, then NaN), `fn` (one NaN, no inf), `fnuz` (minus zero is the only NaN).
    Source: the OCP 8-bit floating point specification, and the `fnuz` types of arXiv 2206.02915.
    """

    mantissa: int
    bias: int
    special: str


_TINY = {
    "F8_E4M3": _Tiny(3, 7, "fn"),
    "F8_E5M2": _Tiny(2, 15, "ieee"),
    "F8_E4M3FNUZ": _Tiny(3, 8, "fnuz"),
    "F8_E5M2FNUZ": _Tiny(2, 16, "fnuz"),
}
FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E8M0", *_TINY})


def widener(dtype: str) -> Callable[[Array], Floats] | None:
    """Return a function from elements of `dtype`, as unsigned integers, to float64; None for STR and C64."""
    if dtype == "BF16":
        return lambda bits: _as_double((bits.astype(np.uint32) << 16).view(np.float32))
    if dtype in _PLAIN:
        plain = np.dtype(_PLAIN[dtype])
        return lambda bits: _as_double(np.ascontiguousarray(bits).view(plain))
    if dtype in _TINY or dtype == "F8_E8M0":
        table = _powers_of_two() if dtype == "F8_E8M0" else _tiny_values(_TINY[dtype])
        return lambda bits: table[bits]
    return None


def _as_double(values: Array) -> Floats:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return values.astype(np.float64)


def _tiny_values(form: _Tiny) -> Floats:
    """Return the values of all 256 patterns."""
    bits = np.arange(256)
    magnitude = bits & 0x7F
    exponent, fraction = magnitude >> form.mantissa, magnitude & ((1 << form.mantissa) - 1)
    scale = np.exp2(np.maximum(exponent, 1) - form.bias - form.mantissa)
    values: Floats = (fraction + np.where(exponent > 0, 1 << form.mantissa, 0)) * scale
    if form.special == "fn":
        values[magnitude == 0x7F] = np.nan
    if form.special == "ieee":
        inf = 0x7F & ~((1 << form.mantissa) - 1)
        values[magnitude == inf] = np.inf
        values[magnitude > inf] = np.nan
    values[bits >= 0x80] *= -1
    if form.special == "fnuz":
        values[0x80] = np.nan
    return values


def _powers_of_two() -> Floats:
    values: Floats = np.exp2(np.arange(256, dtype=np.float64) - 127)
    values[255] = np.nan
    return values
