"""The contract: every bit pattern of every numeric dtype becomes its value, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from ckptkit.types import DTYPES
from ckptkit.values import FLOATS, widener


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [
        ("BF16", 0x3FC0, 1.5), ("BF16", 0x0001, 2.0**-133), ("F16", 0x0001, 2.0**-24), ("F32", 0x80000000, -0.0),
        ("F8_E4M3", 0x7E, 448.0), ("F8_E4M3", 0x01, 2.0**-9), ("F8_E4M3", 0x88, -(2.0**-6)),
        ("F8_E5M2", 0x7B, 57344.0), ("F8_E5M2", 0xFC, -np.inf), ("F8_E4M3FNUZ", 0x7F, 240.0),
        ("F8_E5M2FNUZ", 0x7F, 57344.0), ("F8_E8M0", 0x00, 2.0**-127), ("F8_E8M0", 0xFE, 2.0**127),
        ("I8", 0x80, -128.0), ("U8", 0x80, 128.0), ("BOOL", 1, 1.0), ("I32", 0xFFFFFFFF, -1.0),
    ],
)  # fmt: skip
def test_a_pattern_has_its_value(dtype: str, bits: int, value: float) -> None:
    widen = widener(dtype)
    assert widen is not None
    result = widen(np.array([bits], DTYPES[dtype].carrier))
    assert result.dtype == np.float64
    assert result.tobytes() == np.array([value], np.float64).tobytes()


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [("F8_E4M3", [0x7F, 0xFF]), ("F8_E5M2", [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]), ("F8_E8M0", [0xFF]),
     ("F8_E4M3FNUZ", [0x80]), ("F8_E5M2FNUZ", [0x80])],
)  # fmt: skip
def test_only_these_patterns_are_nan(dtype: str, patterns: list[int]) -> None:
    widen = widener(dtype)
    assert widen is not None
    assert np.flatnonzero(np.isnan(widen(np.arange(256, dtype=np.uint8)))).tolist() == patterns


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_a_number_or_is_known_not_to_be(dtype: str) -> None:
    assert (widener(dtype) is None) == (dtype in ("STR", "C64"))


@pytest.mark.frameworks
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_every_pattern_has_the_value_that_torch_gives_it(dtype: str) -> None:
    import torch

    carrier = np.dtype(DTYPES[dtype].carrier)
    count = 256 if carrier.itemsize == 1 else 1 << 16
    bits = np.arange(count, dtype=np.uint64) * np.uint64(
        1 if carrier.itemsize < 4 else (1 << 8 * carrier.itemsize) // count
    )
    bits = bits.astype(carrier)
    widen = widener(dtype)
    assert widen is not None
    raw = torch.frombuffer(bytearray(bits.tobytes()), dtype=getattr(torch, DTYPES[dtype].torch or ""))
    wanted = raw.to(torch.float32 if carrier.itemsize == 1 else torch.float64).to(torch.float64).numpy()
    np.testing.assert_array_equal(widen(bits), wanted)
