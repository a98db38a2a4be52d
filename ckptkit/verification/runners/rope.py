"""Rotary positions in numbers: inverse frequencies, and the cosines and sines of a sequence, in numpy.

Everything is rounded to float32 where transformers' `modeling_rope_utils.py` (release 4.57) does so, because a
frequency that differs in its last bit turns a far position by a visible angle. What does not live here: reading
config.json (`rope_facts.py`).

Shapes: T tokens, D a head's size, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ckptkit.verification.runners.job import Floats
from ckptkit.verification.runners.rope_facts import Rope

_ZERO, _ONE = np.float32(0), np.float32(1)


def inverse_frequencies(rope: Rope, head_dim: int, num_positions: int | None = None) -> Floats:
    """Return the angle between neighbouring positions, one for each pair of a head's elements, (F,).

    `num_positions` is the largest position plus one; only `dynamic` goes by it, beyond the original length.
    """
    if rope.type == "linear":
        return _plain(rope.base, head_dim) / np.float32(rope.factor)
    if rope.type == "dynamic":
        return _plain(_dynamic_base(rope, head_dim, num_positions), head_dim)
    if rope.type == "llama3":
        return _llama3(rope, _plain(rope.base, head_dim))
    if rope.type == "yarn":
        return _yarn(rope, head_dim)
    return _plain(rope.base, head_dim)


def rotary_table(frequencies_F: Floats, positions: Sequence[int], attention_factor: float) -> tuple[Floats, Floats]:
    """Return the cosines and the sines of each position's angles, (T, D) both: the F angles twice in a row.

    An angle is a product in float32, as in transformers; its cosine and sine are rounded from float64.
    """
    angles_TF = np.asarray(positions, np.float32)[:, None] * frequencies_F[None, :]
    angles_TD = np.concatenate([angles_TF, angles_TF], axis=1).astype(np.float64)
    factor = np.float32(attention_factor)
    return np.cos(angles_TD).astype(np.float32) * factor, np.sin(angles_TD).astype(np.float32) * factor


def _powers(base: float, head_dim: int) -> Floats:
    """Return base ** (2i / D), (F,): the exponent rounded to float32, then the power."""
    exponents_F = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(np.float32(base)), exponents_F.astype(np.float64)).astype(np.float32)


def _plain(base: float, head_dim: int) -> Floats:
    """Su et al., RoFormer (arXiv 2104.09864), section 3.2.2: theta_i = base ** (-2i / D)."""
    return _ONE / _powers(base, head_dim)


def _dynamic_base(rope: Rope, head_dim: int, num_positions: int | None) -> float:
    """Return the base that stretches the lowest frequency over `num_positions` ("dynamic NTK" scaling).

    base * (s * L' / L - (s - 1)) ** (D / (D - 2)), as `_compute_dynamic_ntk_parameters` has it. It computes in
    float64 when a model is made, and in float32 once a sequence is longer than the original length.
    """
    power = head_dim / (head_dim - 2)
    if num_positions is None or num_positions <= rope.original:
        return float(rope.base * ((rope.factor * rope.original / rope.original) - (rope.factor - 1)) ** power)
    scaled = np.float32(rope.factor) * np.float32(num_positions) / np.float32(rope.original)
    grown = np.float32(float(scaled - np.float32(rope.factor - 1)) ** power)
    return float(np.float32(rope.base) * grown)


def _llama3(rope: Rope, plain_F: Floats) -> Floats:
    """Keep short wavelengths, divide long ones by the factor, go smoothly between: Llama 3.1's own scaling.

    As `_compute_llama3_parameters` evaluates it; torch divides a number by a tensor as number * (1 / tensor).
    """
    factor, low, original = (np.float32(x) for x in (rope.factor, rope.low_freq_factor, rope.original))
    wavelengths_F = np.float32(2 * math.pi) * (_ONE / plain_F)
    longest = np.float32(rope.original / rope.low_freq_factor)
    shortest = np.float32(rope.original / rope.high_freq_factor)
    divided_F = np.where(wavelengths_F > longest, plain_F / factor, plain_F)
    spread = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    smooth_F = (original * (_ONE / wavelengths_F) - low) / spread
    between_F = (_ONE - smooth_F) * divided_F / factor + smooth_F * divided_F
    is_between_F = (wavelengths_F >= shortest) & (wavelengths_F <= longest)
    return np.where(is_between_F, between_F, divided_F).astype(np.float32)


def _yarn(rope: Rope, head_dim: int) -> Floats:
    """Interpolate the frequencies that turn seldom within the original length, keep those that turn often.

    Peng et al., YaRN (arXiv 2309.00071), section 3.2, as `_compute_yarn_parameters` evaluates it.
    """
    powers_F = _powers(rope.base, head_dim)
    kept_F, divided_F = _ONE / powers_F, _ONE / (np.float32(rope.factor) * powers_F)
    low, high = (_turns_at(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_F = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    share_F: Floats = _ONE - np.clip(ramp_F, _ZERO, _ONE)
    mixed_F: Floats = divided_F * (_ONE - share_F) + kept_F * share_F
    return mixed_F


def _turns_at(rope: Rope, head_dim: int, turns: float) -> float:
    """Return the index, a fraction, of the frequency that makes so many turns within the original length."""
    return (head_dim * math.log(rope.original / (turns * 2 * math.pi))) / (2 * math.log(rope.base))
