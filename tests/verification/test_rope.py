"""Rotary frequencies are those of transformers, nearly all to the bit, and turn pairs by the half layout.

How near: every step is rounded as transformers rounds it, but for the power, which torch takes by a routine that is
good to one unit in the last place and here is rounded correctly. Of 150,000 frequencies 99 in 100 are equal to the bit;
the others differ by one unit, by two or three where a scaling works on after the power. The bound is three units, and
one in 20 that differ at all.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_jobs import start

from ckptkit.verification.runners.rope import inverse_frequencies, rotary_table
from ckptkit.verification.runners.rope_facts import Rope, read_rope

CLIENT = Path(__file__).with_name("rope_client.py")
UNITS = 3


def llama3(factor: float, original: int) -> dict[str, Any]:
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": "llama3", "factor": factor, **bounds, "original_max_position_embeddings": original}


def yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **more}


SCALINGS: dict[str, list[Any]] = {
    "default": [None],
    "linear": [{"rope_type": "linear", "factor": factor} for factor in (2.0, 3.7)],
    "dynamic": [{"rope_type": "dynamic", "factor": factor} for factor in (2.0, 8.0)],
    "llama3": [llama3(factor, original) for factor in (8.0, 32.0) for original in (64, 8192)],
    "yarn": [
        yarn(factor, original, **more)
        for factor in (4.0, 40.0)
        for original in (64, 4096, 32768)
        for more in (
            {}, {"truncate": False}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"mscale": 1.0, "mscale_all_dim": 0.7},
            {"attention_factor": 1.3}, {"mscale": 1.0},
        )
    ],
}  # fmt: skip
BASES = (5000.0, 10000.0, 500000.0, 1e6, 8e6)
HEAD_DIMS = (8, 12, 48, 64, 80, 96, 128, 256)
POSITIONS = {"dynamic": (None, 100, 129, 5000, 10**6)}


def jobs() -> list[dict[str, Any]]:
    return [
        {
            "config": {"rope_theta": base, "head_dim": dim, "rope_scaling": scaling, "max_position_embeddings": 128},
            "kind": kind,
            "positions": positions,
        }
        for kind, scalings in SCALINGS.items()
        for scaling, base, dim in product(scalings, BASES, HEAD_DIMS)
        for positions in POSITIONS.get(kind, (None,))
    ]


def rope_of(config: dict[str, Any]) -> Rope:
    return read_rope(config, config["max_position_embeddings"]).rope


def units_apart(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return how many float32 values apart the elements lie; all are positive."""
    return np.abs(one.view(np.int32).astype(np.int64) - other.view(np.int32).astype(np.int64))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[np.ndarray, float]]:
    """transformers' frequencies and attention factor, for each job."""
    folder = tmp_path_factory.mktemp("rope")
    (folder / "jobs.json").write_text(json.dumps(jobs()))
    done = start([str(CLIENT), str(folder / "jobs.json"), str(folder / "out.npz")], folder, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(folder / "out.npz") as arrays:
        return [(arrays[f"frequencies-{n}"], float(arrays[f"factor-{n}"])) for n in range(len(jobs()))]


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers(theirs: list[tuple[np.ndarray, float]], kind: str) -> None:
    units = []
    for job, (frequencies, factor) in zip(jobs(), theirs, strict=True):
        if job["kind"] == kind:
            rope = rope_of(job["config"])
            assert rope.attention_factor == factor
            ours = inverse_frequencies(rope, job["config"]["head_dim"], job["positions"])
            assert ours.dtype == np.float32
            units.append(units_apart(ours, frequencies))
    every = np.concatenate(units)
    assert every.max() <= UNITS
    assert np.count_nonzero(every) <= every.size / 20


@pytest.mark.frameworks
def test_frequencies_of_another_scaling_are_further_apart(theirs: list[tuple[np.ndarray, float]]) -> None:
    """A control: another base in its fourth digit, and linear scaling taken for none."""
    for job, (frequencies, _) in zip(jobs(), theirs, strict=True):
        config, dim = job["config"], job["config"]["head_dim"]
        other_base = inverse_frequencies(rope_of({**config, "rope_theta": config["rope_theta"] * 1.001}), dim)
        assert units_apart(other_base, frequencies).max() > 100
        if job["kind"] == "linear":
            plain = inverse_frequencies(Rope("default", config["rope_theta"]), dim)
            assert units_apart(plain, frequencies).max() > 100


def test_plain_frequencies_fall_by_powers_of_the_base() -> None:
    assert inverse_frequencies(Rope("default", 10000.0), 4).tolist() == [1.0, np.float32(0.01)]


def test_a_linear_factor_divides_every_frequency() -> None:
    plain, divided = (inverse_frequencies(Rope(kind, 5000.0, 4.0), 16) for kind in ("default", "linear"))
    assert np.array_equal(divided, plain / 4)


def test_dynamic_frequencies_are_plain_up_to_the_original_length_and_lower_beyond() -> None:
    rope = Rope("dynamic", 5000.0, 4.0, original=128)
    plain = inverse_frequencies(Rope("default", 5000.0), 16)
    assert np.array_equal(inverse_frequencies(rope, 16, 128), plain)
    beyond = inverse_frequencies(rope, 16, 129)
    assert beyond[0] == plain[0] and (beyond[1:] < plain[1:]).all()
    assert (inverse_frequencies(rope, 16, 4000)[1:] < beyond[1:]).all()


def test_llama3_keeps_short_waves_divides_long_ones_and_goes_between() -> None:
    rope = Rope("llama3", 10000.0, 8.0, original=64, low_freq_factor=1.0, high_freq_factor=4.0)
    plain, scaled = inverse_frequencies(Rope("default", 10000.0), 32), inverse_frequencies(rope, 32)
    turns = 64 * plain / (2 * np.pi)  # within the original length
    assert np.array_equal(scaled[turns > 4], plain[turns > 4])
    assert np.array_equal(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_yarn_keeps_what_turns_often_and_divides_what_turns_seldom() -> None:
    rope = Rope("yarn", 10000.0, 4.0, original=4096)
    plain, scaled = inverse_frequencies(Rope("default", 10000.0), 64), inverse_frequencies(rope, 64)
    assert np.array_equal(scaled[:3], plain[:3])
    assert np.allclose(scaled[-3:], plain[-3:] / 4, rtol=1e-6)
    assert (np.diff(scaled) < 0).all()


def test_a_table_has_each_angle_twice_and_its_product_in_float32() -> None:
    frequencies = np.array([1.0, 0.1], np.float32)
    cos, sin = rotary_table(frequencies, (0, 3, 100003), 2.0)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (3, 4)
    assert cos[0].tolist() == [2, 2, 2, 2] and sin[0].tolist() == [0, 0, 0, 0]
    far = float(np.float32(100003) * np.float32(0.1))
    assert far != 100003 * 0.1
    assert cos[2, 1] == cos[2, 3] == np.float32(np.cos(far)) * 2
    assert sin[1, 0] == np.float32(np.sin(3.0)) * 2
