"""The contract: a right checkpoint is within the measured bound in every family, and a wrong one never is.

All models run in one process of each framework. The bound has no constant of a model in it; where it comes from says
`ckptkit/verification/logits.py`. Embeddings are as small as trained ones are (a deviation of 0.05), so that a norm's
eps shows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_jobs import SHORT_LLAMA3, config_of, job_of, make_folder, run_jobs

from ckptkit import convert
from ckptkit.errors import CorruptError
from ckptkit.formats.disk import file_digest
from ckptkit.verification.forward import Dump, Forward, compare, open_dump
from ckptkit.verification.inputs import make_inputs, write_inputs
from ckptkit.verification.logits import ROUNDINGS, UNITS_OF_CONSTANTS, bound, distance
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.job import REPORT, SEAL, Job, seal_of
from tests.rank_results import Tensors, read_file, write_whole

pytestmark = pytest.mark.frameworks

CONTROLS = ("k rows permuted", "gate and up swapped", "another rope base", "another norm eps")


@dataclass(frozen=True, slots=True)
class Model:
    """A model with the variants of its MindSpore naming that are tried; `controls` are made of the first."""

    family: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = ("",)
    controls: tuple[str, ...] = ()


MODELS = {
    "llama": Model("llama", {}, ("", "qkv_concat", "qkv_concat-1.4"), CONTROLS),
    "llama, tied": Model("llama", {"tie_word_embeddings": True}, ("", "qkv_concat")),
    "llama, scaled": Model("llama", {"rope_scaling": SHORT_LLAMA3}, ("",), ("no rope scaling",)),
    "mistral": Model("mistral", {"sliding_window": 12}, ("",), (*CONTROLS, "no window")),
    "qwen2": Model("qwen2", {}, ("",), CONTROLS),
    "qwen2, tied": Model("qwen2", {"tie_word_embeddings": True}),
    "qwen3": Model("qwen3", {}, ("", "contiguous", "contiguous-qkv", "contiguous-mlp"), CONTROLS),
    "qwen3, tied": Model("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": Model("qwen3_moe", {}, ("",), CONTROLS),
    "qwen3_moe, plain top-k": Model("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1]}),
}
CASES = [(name, variant) for name, model in MODELS.items() for variant in model.variants]
CONTROL_CASES = [(name, control) for name, model in MODELS.items() for control in model.controls]


def made(folder: Path, model: Model, control: str = "") -> Path:
    """Write a HuggingFace folder, with the change of a control made to its tensors."""
    config = config_of(model.family, **model.changed)
    make_folder(folder, config)
    tensors = {name: array.copy() for name, array in read_file(folder / "model.safetensors").items()}
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:] = (embedding.view(np.float32) * np.float32(0.05)).view(np.uint32)
    if control == "k rows permuted":
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name] = tensors[name][np.random.default_rng(1).permutation(len(tensors[name]))]
    if control == "gate and up swapped":
        swap_gate_and_up(tensors)
    write_whole(folder / "model.safetensors", tensors)
    return folder


def swap_gate_and_up(tensors: Tensors) -> None:
    gates = [name for name in tensors if ".layers.1." in name and ".gate_proj." in name]
    for gate in gates:
        up = gate.replace("gate_proj", "up_proj")
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
    assert gates


def config_under(control: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json says in a control that is wrong there."""
    if control == "another rope base":
        return config | {"rope_theta": config["rope_theta"] * 2}
    if control == "another norm eps":
        return config | {"rms_norm_eps": 1e-6}
    if control == "no rope scaling":
        return {key: value for key, value in config.items() if key != "rope_scaling"}
    if control == "no window":
        return config | {"sliding_window": None}
    return config


def inputs_of(config: dict[str, Any]) -> Any:
    windows = [size for size in dict.fromkeys(read_facts(config).reading()["window"]) if size]
    return make_inputs(config, None, windows=windows, max_tokens=40)[0]


def hf_job(folder: Path) -> Job:
    config = json.loads((folder / "config.json").read_text())
    return job_of(folder, *inputs_of(config), sensitivity=True)


def ms_job(hf: Path, folder: Path, variant: str, control: str, inputs: Any) -> Job:
    convert(hf, folder, to_dialect="mindformers", variant=variant or None)
    to = json.loads((folder / "ckptkit.json").read_text())["to"]
    job = job_of(folder, *inputs, dialect=to["dialect"], variant=to["variant"])
    return Job(
        config_under(control, dict(job.config)), job.dialect, job.variant, job.device, job.tensors, job.inputs, False
    )


def dumps_of(runner: str, jobs: Mapping[str, Job], folder: Path) -> dict[str, Dump]:
    """Run all jobs in one process and open what each left as a dump."""
    found = run_jobs(runner, jobs, folder, timeout=500)
    dumps = {}
    for number, (name, job) in enumerate(jobs.items()):
        assert found[name].code == 0, found[name].error
        out = folder / f"out-{number}"
        write_inputs(job.inputs, out)
        dumps[name] = open_dump(out)
    return dumps


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Dump], dict[str, Dump]]:
    """Return every model's dump in transformers, and that of each case and control in MindSpore."""
    room = tmp_path_factory.mktemp("forward")
    one: dict[str, Job] = {}
    two: dict[str, Job] = {}
    for number, (name, model) in enumerate(MODELS.items()):
        hf = made(room / f"hf-{number}", model)
        one[name] = hf_job(hf)
        for variant in model.variants:
            two[f"{name}: {variant}"] = ms_job(hf, room / f"ms-{number}{variant}", variant, "", one[name].inputs)
        for control in model.controls:
            wrong = made(room / f"wrong-{number}-{control}", model, control)
            two[f"{name}: {control}"] = ms_job(
                wrong, room / f"wrong-ms-{number}-{control}", "", control, one[name].inputs
            )
    return dumps_of("torch", one, room / "torch"), dumps_of("builtin", two, room / "builtin")


Dumps = tuple[dict[str, Dump], dict[str, Dump]]


def compared(dumps: Dumps, name: str, other: str) -> Forward:
    return compare(dumps[0][name], dumps[1][f"{name}: {other}"])


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_what_was_converted_computes_the_same(dumps: Dumps, name: str, variant: str) -> None:
    found = compared(dumps, name, variant)
    assert found.ok, [(row.name, row.why, row.bound) for row in found.rows] + [found.readings]
    assert all(row.distance and row.distance.top1 == row.tokens for row in found.rows)
    assert any(item.positions for item in found.a.inputs)


@pytest.mark.parametrize(("name", "control"), CONTROL_CASES)
def test_what_is_wrong_is_seen_in_the_logits(dumps: Dumps, name: str, control: str) -> None:
    found = compared(dumps, name, control)
    assert not found.ok
    assert any("relative distance" in row.why for row in found.rows), [
        (row.name, row.distance.relative if row.distance else None, row.bound) for row in found.rows
    ]


@pytest.mark.parametrize(
    ("name", "control", "key"),
    [
        ("llama", "another rope base", "rope_base"),
        ("llama", "another norm eps", "norm_eps"),
        ("llama, scaled", "no rope scaling", "rope"),
        ("mistral", "no window", "window"),
    ],
)
def test_a_config_that_one_side_reads_otherwise_is_named(dumps: Dumps, name: str, control: str, key: str) -> None:
    assert key in compared(dumps, name, control).readings
    assert not compared(dumps, name, "").readings


def test_the_bound_leaves_room_and_not_much(dumps: Dumps) -> None:
    """What rounding does in fact is within a part of the bound in every model, and is no rarity far below it."""
    parts = [
        row.distance.relative / row.bound
        for name, variant in CASES
        for row in compared(dumps, name, variant).rows
        if row.distance
    ]
    assert 0.02 < max(parts) < 0.5


def test_bits_of_a_repeated_run_are_equal_and_every_logit_is_a_number(dumps: Dumps) -> None:
    for side in dumps:
        for dump in side.values():
            assert all(row.repeated and row.not_finite == 0 for row in dump.result.inputs)


def test_a_run_that_does_not_repeat_is_no_proof(dumps: Dumps, tmp_path: Path) -> None:
    other = copy_of(dumps[1]["llama: "], tmp_path / "dump")
    other.result.inputs[2].repeated = False
    found = compare(dumps[0]["llama"], other)
    assert [bool(row.why) for row in found.rows].count(True) == 1
    assert "two runs of B do not give the same bits" in found.rows[2].why


def test_a_nan_is_a_failure_and_never_passed_over(dumps: Dumps, tmp_path: Path) -> None:
    other = copy_of(dumps[1]["llama: "], tmp_path / "dump")
    row = other.result.inputs[2]
    logits_TV = np.load(other.folder / row.file)
    logits_TV[1, 3] = np.nan
    np.save(other.folder / row.file, logits_TV)
    with pytest.raises(CorruptError, match="does not hold the numbers"):
        compare(dumps[0]["llama"], other)
    rewrite(other, row.file, logits_TV)
    assert "1 logits are NaN or inf" in compare(dumps[0]["llama"], other).rows[2].why


def test_swapped_positions_are_seen(dumps: Dumps, tmp_path: Path) -> None:
    """Logits are compared position by position: the same rows in another order are not the same."""
    other = copy_of(dumps[1]["llama: "], tmp_path / "dump")
    row = other.result.inputs[2]
    rewrite(other, row.file, np.ascontiguousarray(np.load(other.folder / row.file)[::-1]))
    assert "relative distance" in compare(dumps[0]["llama"], other).rows[2].why


def test_a_dump_that_was_not_finished_is_refused(dumps: Dumps, tmp_path: Path) -> None:
    other = copy_of(dumps[1]["llama: "], tmp_path / "dump")
    (other.folder / REPORT).unlink()
    with pytest.raises(CorruptError, match="no complete dump"):
        open_dump(other.folder)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"schema": 2}, "another schema"),
        ({"inputs": [{"name": "ids-1", "colour": 1}]}, "no report of this version"),
        ({"inputs": []}, "not about the inputs beside it"),
    ],
)
def test_a_report_that_is_not_of_this_dump_is_refused(
    dumps: Dumps, tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    other = copy_of(dumps[1]["llama: "], tmp_path / "dump")
    report = {**json.loads((other.folder / REPORT).read_text()), **changed}
    (other.folder / REPORT).write_text(json.dumps({**report, SEAL: seal_of(report)}))
    with pytest.raises(CorruptError, match=says):
        open_dump(other.folder)


@pytest.mark.parametrize("side", [0, 1])
def test_dumps_of_other_inputs_are_not_compared(dumps: Dumps, tmp_path: Path, side: int) -> None:
    """One input more on either side would be left out in silence."""
    pair = [dumps[0]["llama"], dumps[1]["llama: "]]
    pair[side] = copy_of(pair[side], tmp_path / "dump")
    del pair[side].inputs[-1]
    with pytest.raises(CorruptError, match="of other inputs"):
        compare(*pair)


def copy_of(dump: Dump, folder: Path) -> Dump:
    shutil.copytree(dump.folder, folder)
    return open_dump(folder)


def rewrite(dump: Dump, file: str, logits_TV: np.ndarray[Any, Any]) -> None:
    """Replace logits, with their digest."""
    np.save(dump.folder / file, logits_TV)
    row = next(row for row in dump.result.inputs if row.file == file)
    row.digest = file_digest(dump.folder / file)


def test_a_distance_is_that_of_the_worst_position() -> None:
    a_TV = np.zeros((3, 4), np.float32)
    a_TV[:, 0] = 2
    b_TV = a_TV.copy()
    b_TV[1, 3] = 0.5
    b_TV[2, 2] = 3
    found = distance(a_TV, b_TV)
    assert (found.max_abs, found.worst, found.relative) == (3, 2, 1.5)
    assert (found.top1, found.tokens, found.not_finite) == (2, 3, 0)
    assert found.cosine == pytest.approx(2 / np.sqrt(13))
    p = np.exp([2, 0, 0, 0]) / np.exp([2, 0, 0, 0]).sum()
    q = np.exp([2, 0, 3, 0]) / np.exp([2, 0, 3, 0]).sum()
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum()))


def test_the_bound_is_never_below_a_few_roundings() -> None:
    assert bound([0.0, None]) == ROUNDINGS * 2.0**-24
    assert bound([1e-6, 2e-6]) == ROUNDINGS * 2e-6
    assert bound([1e-6], [1e-4]) == ROUNDINGS * 1e-6 + UNITS_OF_CONSTANTS * 1e-4
