"""The contract: ranks by number, all of them, of one step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.rank_folders import find_ranks, open_ranks


def put(folder: Path, rank: int, *names: str) -> None:
    path = folder / f"rank_{rank}"
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        save_file({"w": np.full(2, rank, np.float32)}, path / name)


def test_ranks_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    for rank in range(12):
        put(tmp_path, rank, f"net{rank}.safetensors")
    (tmp_path / "rank_x").mkdir()
    assert list(find_ranks(tmp_path)) == list(range(12))
    assert [c.path.name for c in open_ranks(tmp_path).ranks.values()] == [f"net{r}.safetensors" for r in range(12)]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        put(tmp_path, rank, "a.safetensors")
    with pytest.raises(CoverageError, match="lacks 1 of 4 ranks") as caught:
        open_ranks(tmp_path)
    assert caught.value.items == ("rank_2",)


def test_the_newest_step_by_number_is_taken_and_said(tmp_path: Path) -> None:
    for rank in range(2):
        put(tmp_path, rank, "a-1_9.safetensors", "a-1_10.safetensors")
    ranks = open_ranks(tmp_path)
    assert {c.path.name for c in ranks.ranks.values()} == {"a-1_10.safetensors"}
    assert "passed over: a-1_9.safetensors" in ranks.notes[0]
    assert {c.path.name for c in open_ranks(tmp_path, step=9).ranks.values()} == {"a-1_9.safetensors"}


def test_ranks_of_different_steps_are_refused(tmp_path: Path) -> None:
    put(tmp_path, 0, "a-1_9.safetensors", "a-1_10.safetensors")
    put(tmp_path, 1, "a-1_9.safetensors")
    with pytest.raises(CoverageError, match="do not offer the same step"):
        open_ranks(tmp_path)
    with pytest.raises(CoverageError, match="no file of step 10"):
        open_ranks(tmp_path, step=10)


def test_files_whose_names_say_no_step_are_not_guessed_between(tmp_path: Path) -> None:
    put(tmp_path, 0, "a.safetensors", "b.safetensors")
    with pytest.raises(UsageError, match="do not say which is the newest"):
        open_ranks(tmp_path)


def test_an_empty_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    with pytest.raises(CoverageError, match="holds no .ckpt"):
        open_ranks(tmp_path)
