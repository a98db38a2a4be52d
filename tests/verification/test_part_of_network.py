"""The contract: what `--layers` leaves out is said wherever the verdict is; no part is compared with another one."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from runner_jobs import config_of, make_folder

from ckptkit import UsageError, verify
from ckptkit.commands.verify_options import layers_of
from ckptkit.verification.runners.job import REPORT
from tests.rank_results import read_file, write_whole

SHORT: dict[str, Any] = {"max_tokens": 4}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hf") / "hf", config_of("llama"))


@pytest.fixture(scope="module")
def dumps(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The whole network, at level forward and at level layers, all its layers by their numbers, and one alone."""
    folder = tmp_path_factory.mktemp("dumps")
    options: dict[str, dict[str, Any]] = {
        "whole": {}, "inside": {"level": "layers"}, "all": {"layers": "0-1"}, "first": {"layers": "0"},
    }  # fmt: skip
    for name, how in options.items():
        assert verify(hf, dump=folder / name, **SHORT, **how).exit_code == 0
    return {name: folder / name for name in options}


@pytest.mark.frameworks
def test_the_report_says_which_layers_alone_were_run(hf: Path, tmp_path: Path) -> None:
    """All layers by their numbers are the control: nothing is left out, and nothing is said."""
    shutil.copytree(hf, tmp_path / "b")
    report = verify(hf, tmp_path / "b", layers="0", **SHORT)
    assert report.exit_code == 0
    assert "layer 0 of 2 alone" in report.headline
    assert any("layer 0 of 2 alone" in note for note in report.data["notes"])
    for side in "ab":
        found = report.data["forward"][side]
        assert found["layers"] == [0]
        assert len(found["left_out"]) == 9 and all(".layers.1." in name for name in found["left_out"])
    text = report.to_text()
    assert "not looked at here" in text and "model.layers.1.self_attn.q_proj.weight" in text
    report = verify(hf, tmp_path / "b", layers="0,1", **SHORT)
    assert (report.exit_code, report.data["part"], "alone" in report.headline) == (0, "", False)


@pytest.mark.frameworks
def test_a_dump_holds_which_layers_it_is_of(hf: Path, dumps: dict[str, Path]) -> None:
    said = {name: json.loads((folder / REPORT).read_text())["layers"] for name, folder in dumps.items()}
    assert said == {"whole": None, "inside": None, "all": [0, 1], "first": [0]}


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("dump", "layers"), [("whole", "0"), ("first", None), ("first", "1"), ("first", "0-1"), ("all", "0")]
)
def test_a_part_is_not_compared_with_another_part(
    hf: Path, dumps: dict[str, Path], dump: str, layers: str | None
) -> None:
    with pytest.raises(UsageError, match="layer"):
        verify(hf, against=dumps[dump], layers=layers)


@pytest.mark.frameworks
@pytest.mark.parametrize(("dump", "layers"), [("first", "0"), ("all", None), ("whole", "0-1")])
def test_a_part_is_compared_with_the_same_part(hf: Path, dumps: dict[str, Path], dump: str, layers: str | None) -> None:
    """The control of the test above."""
    report = verify(hf, against=dumps[dump], layers=layers)
    assert (report.exit_code, "layer 0 of 2 alone" in report.headline) == (0, dump == "first")


@pytest.mark.frameworks
def test_a_dump_that_shows_no_inside_is_refused_at_level_layers(hf: Path, dumps: dict[str, Path]) -> None:
    """One that does is the control."""
    with pytest.raises(UsageError, match="level layers"):
        verify(hf, against=dumps["whole"], level="layers")
    report = verify(hf, against=dumps["inside"], level="layers")
    assert report.exit_code == 0 and report.data["layers"]["rows"]


@pytest.mark.frameworks
@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("layers", ["2", "0,7", [5], "99999"])
def test_layers_that_the_model_does_not_have_are_refused_before_anything_runs(
    hf: Path, tmp_path: Path, layers: str | list[int], two: bool
) -> None:
    with pytest.raises(UsageError, match="layers 0 to 1"):
        verify(hf, hf if two else None, dump=None if two else tmp_path / "dump", layers=layers)
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize("text", ["0-4000000000", "4000000000", "9" * 5000, "3-1", "-1", "", "0,,1", "a", []])
def test_what_names_no_layers_is_refused_at_once(text: str | list[int]) -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match="names no layers"):
        layers_of(text)
    assert time.monotonic() - began < 1
    assert layers_of("0,1,40-43") == (0, 1, 40, 41, 42, 43)


@pytest.mark.frameworks
def test_a_tensor_of_a_layer_that_the_model_does_not_have_is_not_left_out_but_unexpected(
    hf: Path, tmp_path: Path
) -> None:
    shutil.copytree(hf, tmp_path / "hf")
    tensors = dict(read_file(hf / "model.safetensors"))
    stray = {"model.layers.7.self_attn.q_proj.weight": tensors["model.layers.1.self_attn.q_proj.weight"]}
    write_whole(tmp_path / "hf" / "model.safetensors", {**tensors, **stray})
    report = verify(tmp_path / "hf", dump=tmp_path / "dump", layers="0", **SHORT)
    assert (report.exit_code, report.data["forward"]["a"]["unexpected"]) == (1, list(stray))
