"""The contract: where B goes wrong first is found in the outputs of both networks, and named; a right B is not accused.

The faults are those of `planted_faults.py`; here B is run by its own network, so that the part that is off must show
in what this network gives. All models run in one process of each framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_faults import FAULTS, LEGACY, MCORE
from runner_jobs import job_of, run_jobs
from tap_models import NEAR, SPREAD, Models, Planted, make_models

from ckptkit.commands.layers_report import add_layers, layers_data
from ckptkit.formats.file_pool import FilePool
from ckptkit.report import Report
from ckptkit.verification.forward import Dump, open_dump
from ckptkit.verification.inputs import write_inputs
from ckptkit.verification.layers import Layers, compare_layers, traced_input
from ckptkit.verification.runners.job import Input, Job

pytestmark = pytest.mark.frameworks

RIGHT = {
    "right: llama": Planted("llama", LEGACY, "qkv_concat"),
    "right: llama tied": Planted("llama tied", LEGACY),
    "right: mistral": Planted("mistral", LEGACY),
    "right: qwen2": Planted("qwen2", LEGACY, "qkv_concat-1.4"),
    "right: qwen3": Planted("qwen3", MCORE, "contiguous"),
    "right: qwen3_moe": Planted("qwen3_moe", MCORE),
    "right: qwen3_moe plain": Planted("qwen3_moe plain", MCORE),
}
# B's network cannot hold what was planted, and says so before it runs
NOT_RUN = {"biases that A has not", "a head of its own beside a tied one"}


class Sides:
    """The dumps of A, by model and input, and of B, by fault, with the jobs that made them."""

    def __init__(self, models: Models, room: Path) -> None:
        self.jobs_a = {
            f"{model} {item.name}": job_of(folder, item, sensitivity=True, trace=item.name)
            for model, folder in models.folders.items()
            for item in (NEAR, SPREAD)
        }
        self.jobs_b = {name: b_job(models, planted, room / f"b-{number}", item)
                       for number, (name, (planted, item)) in enumerate(every().items())}  # fmt: skip
        self.a = dumps("torch", self.jobs_a, room / "a")
        self.b = dumps("builtin", self.jobs_b, room / "b")

    def layers(self, name: str, *, with_weights: bool = True) -> Layers | None:
        planted, item = every()[name]
        key = f"{planted.model} {item.name}"
        return compare_layers(
            self.a[key], self.b[name], (self.jobs_a[key] if with_weights else None, self.jobs_b[name])
        )


def every() -> dict[str, tuple[Planted, Input]]:
    faults = {name: (fault.planted, fault.item) for name, fault in FAULTS.items() if name not in NOT_RUN}
    return faults | {name: (planted, NEAR) for name, planted in RIGHT.items()}


def b_job(models: Models, planted: Planted, folder: Path, item: Input) -> Job:
    with FilePool() as pool:
        planted.make(models, folder, pool)
    job = job_of(folder, item, trace=item.name, dialect=planted.dialect, variant=planted.variant)
    config = {key: value for key, value in {**job.config, **planted.config}.items() if value is not None}
    return replace(job, config=config)


def dumps(runner: str, jobs: Mapping[str, Job], folder: Path) -> dict[str, Dump]:
    ran = run_jobs(runner, jobs, folder, timeout=500)
    found = {}
    for number, (name, job) in enumerate(jobs.items()):
        assert ran[name].code == 0, (name, ran[name].error)
        write_inputs(job.inputs, folder / f"out-{number}")
        found[name] = open_dump(folder / f"out-{number}")
        assert found[name].result.loaded, name
    return found


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    models = make_models(tmp_path_factory.getbasetemp() / "tap-models")
    return Sides(models, tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in NOT_RUN])
def test_a_planted_fault_is_located_and_named(sides: Sides, name: str) -> None:
    fault = FAULTS[name]
    places = {fault.where, *fault.also}
    layers = sides.layers(name)
    assert layers is not None and layers.first is not None and layers.cause is not None
    assert (layers.first.part, layers.first.layer or 0) == min(places, key=order), layers.first
    assert layers.cause.name == fault.name
    before = layers.rows[: layers.rows.index(layers.first)]
    assert not any(row.wrong for row in before)


def order(place: tuple[str, int]) -> tuple[int, int, int]:
    """Return a part's place in the network."""
    part, layer = place
    parts = ("embedding", "attention", "mlp", "norm", "logits")
    return (0 if part == "embedding" else 1 if part in ("attention", "mlp") else 2, layer, parts.index(part))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_checkpoint_is_not_accused(sides: Sides, name: str) -> None:
    layers = sides.layers(name)
    assert layers is not None and layers.ok and layers.cause is None
    assert layers.rows[0].name == "embedding" and layers.rows[-1].name == "logits"
    assert all(row.relative < row.bound / 3 for row in layers.rows)


def test_without_the_weights_of_a_most_faults_are_named_too(sides: Sides) -> None:
    named = 0
    for name, fault in FAULTS.items():
        if name in NOT_RUN or not fault.alone:
            continue
        layers = sides.layers(name, with_weights=False)
        named += layers is not None and layers.cause is not None and layers.cause.name == fault.name
    assert named >= 30


def test_the_report_and_the_data_say_the_same(sides: Sides) -> None:
    layers = sides.layers("gate and up")
    assert layers is not None and layers.first is not None
    report = Report("verify", "x")
    add_layers(report, layers)
    data: dict[str, Any] = json.loads(json.dumps(layers_data(layers), allow_nan=False))
    assert data["first"] == "layers.1.mlp" and data["cause"]["name"] == "gate and up exchanged"
    assert "the first that is off is layers.1.mlp" in report.to_text()
    assert "gate and up exchanged" in report.to_text()
    assert [row["name"] for row in data["rows"]] == [row.name for row in layers.rows]


def test_the_text_is_looked_into_where_there_is_one() -> None:
    ids = Input("ids-64", tuple(range(64)))
    text, far = Input("text", (1, 2, 3)), Input("far", tuple(range(99)), tuple(range(99)))
    assert traced_input([ids, text, far]) == "text"
    assert traced_input([Input("ids-7", (1,) * 7), ids, far]) == "ids-64"
    assert traced_input([far]) == "far"
