"""The contract: training state that one side alone has is benign only where it fits the parameters beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from runner_jobs import config_of, make_folder

from ckptkit import convert, diff, verify
from tests.rank_results import Tensors, read_file, read_whole, write_whole

WEIGHT = "model.layers.1.attention.wq.weight"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "hf"
    return make_folder(folder, config_of("llama", num_key_value_heads=4, vocab_size=66))


@pytest.fixture(scope="module")
def weights(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    folder = tmp_path_factory.mktemp("ms") / "ms"
    convert(hf, folder, to_dialect="mindformers")
    return read_whole(folder)


def folder_of(folder: Path, hf: Path, tensors: Tensors) -> Path:
    write_whole(folder / "part0.safetensors", tensors)
    shutil.copy(hf / "config.json", folder)
    return folder


STATE = {
    "a moment of another shape": ("adam_m." + WEIGHT, (3, 3), 1),
    "a moment that lacks an axis": ("adam_v." + WEIGHT, (32,), 1),
    "a moment of no parameter": ("adam_m.no.such.weight", (3,), 1),
    "a sum of no parameter": ("exp_avg_sq_row_no.such.weight", (3,), 1),
    "a moment of its parameter": ("adam_m." + WEIGHT, (32, 32), 0),
    "a sum over an axis": ("exp_avg_sq_row_" + WEIGHT, (32,), 0),
    "a placeholder of Muon for nothing": ("muon_m." + WEIGHT, (1,), 1),
    "a counter": ("global_step", (1,), 0),
}


@pytest.mark.parametrize("other", ["same naming", "hf"])
@pytest.mark.parametrize("what", STATE)
def test_state_of_one_side_must_fit_a_parameter(
    hf: Path, weights: Tensors, tmp_path: Path, what: str, other: str
) -> None:
    """Either way round, and with a word of it. What fits is the control, counters and sums over an axis too."""
    name, shape, code = STATE[what]
    odd = folder_of(tmp_path / "odd", hf, {**weights, name: np.full(shape, 7, np.uint32)})
    plain = hf if other == "hf" else folder_of(tmp_path / "plain", hf, weights)
    for pair in ((plain, odd), (odd, plain)):
        report = verify(*pair, level="weights")
        assert report.exit_code == code, report.to_text()
        assert diff(*pair).exit_code == 1
        found = [row["name"] for row in report.data["parameters"] if row["status"] == "unexpected"]
        assert found == ([name] if code else [])
        assert ("training state of" in report.to_text()) == bool(code)


def test_state_of_a_network_that_no_table_knows_must_fit_a_parameter_too(tmp_path: Path) -> None:
    one, moment = {"net.weight": np.ones((2, 3), np.uint32)}, np.ones((2, 3), np.uint32)
    for name, state in (("a", {}), ("b", {"moments.net.weight": moment}), ("c", {"moments.weight": moment})):
        write_whole(tmp_path / name / "model.safetensors", {**one, **state})
    assert verify(tmp_path / "a", tmp_path / "b", level="weights").exit_code == 0
    assert verify(tmp_path / "a", tmp_path / "c", level="weights").exit_code == 1
    assert read_file(tmp_path / "a" / "model.safetensors").keys() == one.keys()


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_moment_of_another_shape_in_one_of_two_trained_sides_is_a_difference(
    hf: Path, weights: Tensors, tmp_path: Path, which: str
) -> None:
    """Across namings, where a conversion would refuse it, too."""
    state = {"adam_m." + name: array for name, array in weights.items()}
    right = folder_of(tmp_path / "right", hf, {**weights, **state})
    wrong = folder_of(tmp_path / "wrong", hf, {**weights, **state, "adam_m." + WEIGHT: np.zeros((3, 3), np.uint32)})
    convert(right, tmp_path / "hf", to_dialect="hf")
    assert verify(right, tmp_path / "hf", level="weights").exit_code == 0
    for other in (right, tmp_path / "hf"):
        report = verify(*((wrong, other) if which == "a" else (other, wrong)), level="weights")
        assert report.exit_code == 1, report.to_text()


def test_a_placeholder_of_muon_fits_where_the_other_moment_is(hf: Path, weights: Tensors, tmp_path: Path) -> None:
    state = {"muon_m." + WEIGHT: np.zeros(1, np.uint32), "adam_m." + WEIGHT: weights[WEIGHT]}
    odd = folder_of(tmp_path / "odd", hf, {**weights, **state})
    assert verify(hf, odd, level="weights").exit_code == 0
    assert verify(odd, hf, level="weights").exit_code == 0
