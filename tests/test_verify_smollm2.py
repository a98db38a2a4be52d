"""The contract: the real model verifies at level forward, whole and cut, with both runners; a wrong one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clients.run import smollm2_folder

from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.verify import verify
from ckptkit.report import Report

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = smollm2_folder()
    if folder is None:
        pytest.skip("the package that holds SmolLM2 cannot be had here")
    return folder


@pytest.fixture(scope="module")
def six(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("six") / "six"
    convert(smollm2, folder, to_dialect="mindformers", parallel=Parallel(mp=3, pp=2))
    return folder


@pytest.fixture(scope="module")
def dump(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump") / "dump"
    assert verify(smollm2, dump=folder).exit_code == 0
    return folder


def inputs_of(report: Report) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report.data["forward"]["inputs"] if not row["skipped"]}


def test_its_shards_run_in_mindformers_and_give_its_logits(smollm2: Path, six: Path) -> None:
    report = verify(smollm2, six)
    assert report.exit_code == 0, report.to_text()
    assert [side["runner"] for side in report.data["forward"]["runners"]] == ["torch", "mindformers"]
    assert report.data["forward"]["b"]["parameters"] == 272
    assert {"text", "ids-64"} <= inputs_of(report).keys()
    assert max(row["relative"] for row in inputs_of(report).values()) < 1e-5


def test_the_whole_model_runs_in_the_builtin_network_to_its_last_position(
    smollm2: Path, dump: Path, tmp_path: Path
) -> None:
    convert(smollm2, tmp_path / "ms", to_dialect="mindformers", variant="qkv_concat")
    report = verify(tmp_path / "ms", against=dump, runner="builtin")
    assert report.exit_code == 0, report.to_text()
    assert {"text", "positions 0..8191"} <= inputs_of(report).keys()


def test_another_norm_eps_does_not_pass(smollm2: Path, six: Path, dump: Path, tmp_path: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text()) | {"rms_norm_eps": 1.2e-05}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = verify(six, against=dump, runner="builtin", config=tmp_path / "config.json")
    assert (report.exit_code, report.data["failed"]) == (1, ["forward"])
    assert "norm_eps" in report.data["forward"]["readings"]
    assert any("relative distance" in row["wrong"] for row in inputs_of(report).values())
