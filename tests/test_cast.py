"""The contract of a cast: every element is the oracle's, which rounds in whole numbers, and every loss is counted.

The oracle decodes bits to (sign, n, e), a value of n * 2**e, and rounds n by hand: it shares nothing with `cast.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit.cast as cast_module
from ckptkit.cast import Caster, common_dtype, is_lossy, largest_finite, parse_dtype, why_kept
from ckptkit.errors import UsageError
from ckptkit.types import DTYPES

Array = np.ndarray[Any, Any]
BITS = {"F16": (5, 10), "BF16": (8, 7), "F32": (8, 23), "F64": (11, 52)}  # exponent, mantissa
PAIRS = [(a, b) for a in BITS for b in BITS if a != b and (b != "F64" or a != "F64")]
NARROWING = [("F32", "F16"), ("F32", "BF16"), ("F64", "F16"), ("F64", "BF16"), ("F64", "F32"), ("BF16", "F16")]


def is_nan(bits: int, dtype: str) -> bool:
    exponent, mantissa = BITS[dtype]
    return bits & ((1 << (exponent + mantissa)) - 1) > ((1 << exponent) - 1) << mantissa


def oracle(bits: int, source: str, target: str, *, truncate: bool = False) -> int:
    """Return the bits of one element cast; `truncate` is the broken control."""
    exponent, mantissa = BITS[source]
    to_exponent, to_mantissa = BITS[target]
    sign = bits >> (exponent + mantissa) << (to_exponent + to_mantissa)
    field, fraction = (bits >> mantissa) & ((1 << exponent) - 1), bits & ((1 << mantissa) - 1)
    inf = ((1 << to_exponent) - 1) << to_mantissa
    if field == (1 << exponent) - 1:
        if not fraction:
            return sign | inf
        kept = fraction >> (mantissa - to_mantissa) if mantissa > to_mantissa else fraction << (to_mantissa - mantissa)
        return sign | inf | (kept or 1 << (to_mantissa - 1))
    number = fraction | (bool(field) << mantissa)
    if not number:
        return sign
    power = max(field, 1) - (2 ** (exponent - 1) - 1) - mantissa
    lowest = 2 - 2 ** (to_exponent - 1) - to_mantissa  # the power of two of a subnormal's last bit
    step = max(number.bit_length() + power - 1 - to_mantissa, lowest)
    if step <= power:
        rounded = number << (power - step)
    else:
        rounded, rest = divmod(number, 1 << (step - power))
        half = 1 << (step - power - 1)
        if not truncate and (rest > half or (rest == half and rounded % 2)):
            rounded += 1
    return sign | min(inf, ((step - lowest) << to_mantissa) + rounded)


def cast(patterns: Array, source: str, target: str) -> Array:
    return Caster(source, target)(patterns.astype(DTYPES[source].carrier))


def oracles(patterns: Array, source: str, target: str, **more: bool) -> Array:
    return np.array([oracle(int(p), source, target, **more) for p in patterns], DTYPES[target].carrier)


def hard_patterns(source: str, target: str, count: int = 1500) -> Array:
    """Return all patterns of 16 bits; of more, random ones, the middles between neighbours of `target`, and the values
    just beside these."""
    if source in ("F16", "BF16"):
        return np.arange(1 << 16).astype(np.uint16)
    width = DTYPES[source].bits
    rng = np.random.default_rng(0)
    found = [int.from_bytes(rng.bytes(width // 8), "little") for _ in range(count)]
    target = "BF16" if target == "F64" else target
    exponent, mantissa = BITS[target]
    inf = ((1 << exponent) - 1) << mantissa
    edges = [0, 1, 2, (1 << mantissa) - 1, 1 << mantissa, (1 << mantissa) + 1, inf - 2, inf - 1]
    for low in [*edges, *(int(n) for n in rng.integers(0, inf, count))]:
        for bits in (low, low + 1):
            here = oracle(bits, target, source)
            found += [here, here + 1, max(0, here - 1)]
        if bits < inf:
            ends = [oracle(b, target, source) for b in (low, low + 1)]
            middle = middle_of(*ends, source)
        else:  # half a step above the largest finite value
            middle = oracle(low, target, source) + (1 << (BITS[source][1] - mantissa - 1))
        found += [middle, middle + 1, middle - 1]
    sign = 1 << (width - 1)
    return np.array([*found, *(f ^ sign for f in found)], DTYPES[source].carrier)


def middle_of(low: int, high: int, dtype: str) -> int:
    """Return the bits of the value half-way between two finite values (of one sign) that a narrower dtype holds."""
    ends = np.array([low, high], DTYPES[dtype].carrier)
    values = ends.view({"F32": np.float32, "F64": np.float64}[dtype])
    return int((values[:1] + (values[1:] - values[:1]) / 2).view(ends.dtype)[0])


@pytest.mark.parametrize(("source", "target"), [(a, b) for a, b in PAIRS if a in ("F16", "BF16")])
def test_every_pattern_of_16_bits_is_cast_as_the_oracle_says(source: str, target: str) -> None:
    every = hard_patterns(source, target)
    assert (cast(every, source, target) == oracles(every, source, target)).all()


@pytest.mark.parametrize(("source", "target"), NARROWING)
def test_ties_and_their_neighbours_are_rounded_to_nearest_even(source: str, target: str) -> None:
    hard = hard_patterns(source, target)
    assert (cast(hard, source, target) == oracles(hard, source, target)).all()


@pytest.mark.parametrize(("source", "target"), [("F32", "F16"), ("F32", "BF16"), ("F64", "BF16")])
def test_a_cast_that_cuts_instead_of_rounding_fails_the_oracle(source: str, target: str) -> None:
    hard = hard_patterns(source, target, 100)
    assert (oracles(hard, source, target, truncate=True) != oracles(hard, source, target)).any()


@pytest.mark.parametrize("target", ["F16", "BF16"])
def test_a_cast_that_rounds_twice_fails_the_oracle(target: str) -> None:
    hard = hard_patterns("F64", target, 100)
    twice = cast(cast(hard, "F64", "F32"), "F32", target)
    assert (twice != oracles(hard, "F64", target)).any()


def test_f32_to_f64_is_exact() -> None:
    hard = hard_patterns("F32", "BF16")
    assert (cast(hard, "F32", "F64") == oracles(hard, "F32", "F64")).all()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("through", ["F32", "F64"])
def test_all_patterns_come_back_from_a_wider_dtype(dtype: str, through: str) -> None:
    every = np.arange(1 << 16).astype(np.uint16)
    assert (cast(cast(every, dtype, through), through, dtype) == every).all()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_nan_stays_one_whatever_its_payload(source: str, target: str) -> None:
    exponent, mantissa = BITS[source]
    inf = ((1 << exponent) - 1) << mantissa
    nans = [inf | payload for payload in (1, 2, 1 << (mantissa - 1), (1 << mantissa) - 1)]
    nans += [nan | 1 << (exponent + mantissa) for nan in nans]
    result = cast(np.array(nans, DTYPES[source].carrier), source, target)
    assert all(is_nan(int(bits), target) for bits in result)
    assert (result == oracles(np.array(nans, DTYPES[source].carrier), source, target)).all()


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_losses_are_counted_and_only_where_there_can_be_any(source: str, target: str) -> None:
    patterns = hard_patterns(source, target)
    results = oracles(patterns, source, target)
    size, to_size = (1 << (DTYPES[d].bits - 1) for d in (source, target))
    inf, to_inf = (((1 << BITS[d][0]) - 1) << BITS[d][1] for d in (source, target))
    magnitudes, after = [int(p) & (size - 1) for p in patterns], [int(r) & (to_size - 1) for r in results]
    caster = Caster(source, target)
    caster(patterns.astype(DTYPES[source].carrier))
    over = [m for m, a in zip(magnitudes, after, strict=True) if m < inf and a == to_inf]
    assert caster.count.overflowed == len(over)
    assert caster.count.flushed == sum(a == 0 < m for m, a in zip(magnitudes, after, strict=True))
    assert is_lossy(source, target) == (caster.count.flushed > 0)
    if over:
        largest = np.array([max(over)], DTYPES[source].carrier)
        wide = Caster(source, "F64")(largest) if source != "F64" else largest
        assert caster.count.largest == float(wide.view(np.float64)[0])


@pytest.mark.parametrize(("source", "target"), NARROWING)
def test_clamping_changes_only_the_values_that_overflow(source: str, target: str) -> None:
    hard = hard_patterns(source, target)
    plain, clamped = Caster(source, target), Caster(source, target, clamp=True)
    values, limited = plain(hard).copy(), clamped(hard)
    changed = values != limited
    assert clamped.count == plain.count
    assert np.count_nonzero(changed) == plain.count.overflowed > 0
    assert (limited[changed] == values[changed] - 1).all()
    assert (hard[~changed & np.isinf(wide_values(limited, target))] & 1 == 0).all()  # only inf itself stays inf


def wide_values(bits: Array, dtype: str) -> Array:
    return Caster(dtype, "F64")(bits).copy().view(np.float64)


@pytest.mark.parametrize("block", [1, 3, 64, 1000, 5000])
@pytest.mark.parametrize(("source", "target"), [("BF16", "F32"), ("F16", "F32"), ("F32", "BF16"), ("F64", "F16")])
def test_blocks_of_any_size_give_the_same_bytes_and_counts(
    source: str, target: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = hard_patterns(source, target, 200)
    hard = hard[:: max(1, hard.size // 5003)]
    whole = Caster(source, target)
    wanted = whole(hard).copy()
    monkeypatch.setattr(cast_module, "CHUNK", 64)
    parts = Caster(source, target)
    found = [parts(hard[start : start + block]).copy() for start in range(0, hard.size, block)]
    assert (np.concatenate(found) == wanted).all()
    assert parts.count == whole.count


def test_a_tile_keeps_its_shape() -> None:
    assert Caster("BF16", "F32")(np.zeros((3, 4, 5), np.uint16)).shape == (3, 4, 5)


@pytest.mark.frameworks
@pytest.mark.parametrize(("source", "target"), [(a, b) for a, b in PAIRS if b != "F64"])
def test_torch_casts_alike(source: str, target: str) -> None:
    import torch

    patterns = hard_patterns(source, target)
    carriers = patterns.astype(DTYPES[source].carrier)
    signed = torch.from_numpy(carriers.view(f"i{carriers.itemsize}"))
    theirs = signed.view(getattr(torch, str(DTYPES[source].torch))).to(getattr(torch, str(DTYPES[target].torch)))
    ours = cast(carriers, source, target)
    width = {2: torch.int16, 4: torch.int32}[ours.itemsize]
    bits = theirs.view(width).numpy().view(ours.dtype)
    nan = np.array([is_nan(int(b), target) for b in ours])
    assert (nan == theirs.isnan().numpy()).all()
    same = (bits == ours) | nan
    if (source, target) in (("F64", "F16"), ("F64", "BF16")):  # torch rounds twice, through F32
        twice = cast(cast(carriers, "F64", "F32").copy(), "F32", target)
        same |= bits == twice
        assert (twice != ours).any()
    assert same.all()


FLUSHING = """
import sys, numpy as np, torch
from ckptkit.cast import Caster
from ckptkit.errors import UsageError
torch.set_flush_denormal(sys.argv[1] == "on")
try:
    Caster("F64", "F32")
except UsageError as error:
    print(error.what)
"""


@pytest.mark.frameworks
@pytest.mark.parametrize(("mode", "said"), [("on", "subnormal numbers count as zero"), ("off", "")])
def test_a_process_that_flushes_subnormals_is_refused(mode: str, said: str) -> None:
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", FLUSHING, mode], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said) and bool(done.stdout) == bool(said)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16"), ("float16", "F16"), ("FP32", "F32"), ("float32", "F32")],
)
def test_dtypes_are_named_as_people_name_them(text: str, dtype: str) -> None:
    assert parse_dtype(text) == dtype


@pytest.mark.parametrize("text", ["", "int8", "fp64", "f8_e4m3", "half"])
def test_other_dtypes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no dtype to cast to"):
        parse_dtype(text)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in BITS])
def test_only_the_four_floats_are_cast(dtype: str) -> None:
    assert "never cast" in str(why_kept([dtype], (4,), keep_fp32=False, wanted="F32"))


def test_scalars_are_never_cast() -> None:
    assert "without axes" in str(why_kept(["F32"], (), keep_fp32=False, wanted="BF16"))
    assert why_kept(["F32"], (1,), keep_fp32=False, wanted="BF16") is None


@pytest.mark.parametrize(("wanted", "kept"), [("BF16", True), ("F16", True), ("F32", False)])
def test_a_row_that_keeps_fp32_is_cast_to_nothing_else(wanted: str, kept: bool) -> None:
    assert (why_kept(["F64"], (64,), keep_fp32=True, wanted=wanted) is not None) == kept


@pytest.mark.parametrize(
    ("dtypes", "common"),
    [(["BF16"], "BF16"), (["BF16", "F16"], "F32"), (["F16", "F32"], "F32"), (["BF16", "F64"], "F64"), (["I8"], "I8")],
)
def test_mixed_dtypes_meet_in_one_that_holds_both(dtypes: list[str], common: str) -> None:
    assert common_dtype(dtypes) == common


@pytest.mark.parametrize(("dtype", "number"), [("F16", 65504.0), ("F32", float(np.finfo(np.float32).max))])
def test_the_largest_finite_values(dtype: str, number: float) -> None:
    assert largest_finite(dtype) == number


def test_the_oracle_knows_values_that_everybody_knows() -> None:
    known: list[tuple[Callable[..., int], int, str, str, int]] = [
        (oracle, 0x3F800000, "F32", "F16", 0x3C00),  # 1
        (oracle, 0x477FF000, "F32", "F16", 0x7C00),  # 65520, a tie: to inf
        (oracle, 0x477FEFFF, "F32", "F16", 0x7BFF),
        (oracle, 0x33000000, "F32", "F16", 0x0000),  # 2**-25, a tie: to zero
        (oracle, 0x33000001, "F32", "F16", 0x0001),
        (oracle, 0x80000001, "F32", "BF16", 0x8000),
        (oracle, 0x0001, "F16", "F32", 0x33800000),
    ]
    for function, bits, source, target, wanted in known:
        assert function(bits, source, target) == wanted
