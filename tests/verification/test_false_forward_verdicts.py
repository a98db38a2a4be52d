"""Level forward: what cannot be run is said before anything is read; no side runs with what is the other's."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from runner_jobs import config_of, make_folder

from ckptkit import UsageError, verify
from tests.rank_results import read_file, write_whole

pytestmark = pytest.mark.frameworks


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "hf", config_of("llama"))


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_config_json_that_says_nothing_is_not_the_other_sides(hf: Path, tmp_path: Path, side: str) -> None:
    """Without a file, the other side's counts: that is the control."""
    pair = (tmp_path / "x", hf) if side == "a" else (hf, tmp_path / "x")
    shutil.copytree(hf, tmp_path / "x")
    (tmp_path / "x" / "config.json").unlink()
    assert verify(*pair, max_tokens=4).exit_code == 0
    (tmp_path / "x" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="model_type"):
        verify(*pair, max_tokens=4)


@pytest.mark.parametrize("side", ["a", "b"])
def test_weights_in_float64_are_refused_before_anything_is_read(hf: Path, tmp_path: Path, side: str) -> None:
    """Level weights is the control: it compares them."""
    tensors = {
        name: array.view(np.float32).astype(np.float64) for name, array in read_file(hf / "model.safetensors").items()
    }
    (tmp_path / "x").mkdir()
    shutil.copy(hf / "config.json", tmp_path / "x")
    write_whole(tmp_path / "x" / "model.safetensors", tensors, dict.fromkeys(tensors, "F64"))
    pair = (tmp_path / "x", hf) if side == "a" else (hf, tmp_path / "x")
    assert verify(*pair, level="weights").exit_code == 0
    read: list[int] = []
    with pytest.raises(UsageError, match="F64"):
        verify(*pair, progress=lambda total, done: read.append)
    assert not read
    with pytest.raises(UsageError, match="F64"):
        verify(tmp_path / "x", dump=tmp_path / "dump")
