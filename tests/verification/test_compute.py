"""The contract: where fp16 overflows inside of a network is found, on both sides; a tame network passes; and the run in
another dtype changes no figure of the run in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_data import COMMAND
from page_reader import Reader, odd_figures
from runner_jobs import Ran, config_of, ids_of, job_of, make_folder, run_jobs
from tap_models import Arrays, floats_of, rewrite

from ckptkit import UsageError, convert, verify
from ckptkit.report import Report
from ckptkit.verification.compute import SideComputed
from ckptkit.verification.page import page
from ckptkit.verification.runners.computing import FORMATS, magnitude
from ckptkit.verification.runners.job import Computed, ComputedRow, Input, Job

LEGACY = "mindformers-legacy"
INPUTS = (
    Input("short", ids_of(4)),
    Input("long", ids_of(19, seed=1)),
    Input("far", ids_of(5, seed=2), (0, 3, 9, 60, 99)),
)
FP16_MAX = 65504.0


def loud_mlp(tensors: Arrays) -> None:
    """Let gate * up of layer 1 reach some 200,000, which down brings back; each weight fits in fp16."""
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] *= np.float32(200)
    tensors["model.layers.1.mlp.down_proj.weight"] /= np.float32(200 * 200)


def loud_attention(tensors: Arrays) -> None:
    """Let the products of queries and keys of layer 2 leave the range; queries and keys themselves stay in it."""
    for name in ("q_proj", "k_proj"):
        tensors[f"model.layers.2.self_attn.{name}.weight"] *= np.float32(150)


def large_weight(tensors: Arrays) -> None:
    """Have one weight that fp16 has no number for, and that nothing of these inputs is multiplied with."""
    tensors["model.embed_tokens.weight"][0, 0] = 70000.0


def faint_weights(tensors: Arrays) -> None:
    """Have a matrix of which fp16 keeps nothing."""
    tensors["model.layers.1.mlp.up_proj.weight"] *= np.float32(1e-9)


LOUD = {
    "loud mlp": loud_mlp, "loud attention": loud_attention, "large weight": large_weight,
    "faint weights": faint_weights, "tame": None,
}  # fmt: skip


def make(folder: Path, name: str) -> Path:
    make_folder(folder, config_of("llama", num_hidden_layers=3))
    tensors = floats_of(folder)
    plant = LOUD[name]
    if plant is not None:
        plant(tensors)
        rewrite(folder, tensors)
    assert name == "large weight" or max(np.abs(array).max() for array in tensors.values()) < FP16_MAX
    return folder


class Runs:
    """What a runner gives for each model without another dtype (`tame`), in one (`tame fp16`), and streamed."""

    def __init__(self, runner: str, room: Path) -> None:
        jobs: dict[str, Job] = {}
        how: dict[str, Any] = {"sensitivity": True, "trace": "long"}
        for number, name in enumerate(LOUD):
            folder = make(room / f"hf-{number}", name)
            if runner == "builtin":
                convert(folder, room / f"ms-{number}", to_dialect="mindformers")
                folder, how["dialect"] = room / f"ms-{number}", LEGACY
            jobs[name] = job_of(folder, *INPUTS, **how)
            jobs[f"{name} fp16"] = job_of(folder, *INPUTS, compute="fp16", **how)
            jobs[f"{name} fp16 streamed"] = job_of(folder, *INPUTS, compute="fp16", stream=True, **how)
            jobs[f"{name} bf16"] = job_of(folder, *INPUTS, compute="bf16", **how)
        for change in ("stay_in_float32", "keep_rounded"):
            jobs[change] = jobs["tame fp16"]
        self.ran: dict[str, Ran] = run_jobs(runner, jobs, room / "runs", changes={c: c for c in jobs if "_" in c})

    def side(self, name: str) -> SideComputed:
        assert self.ran[name].code == 0, self.ran[name].error
        found = self.ran[name].report["computed"]
        rows = [ComputedRow(**row) for row in found["rows"]]
        return SideComputed("A", Computed(found["dtype"], found["kept"], found["unfit"], rows))

    def same_figures(self, one: str, two: str) -> bool:
        """Say whether two runs have the same float32 figures, to the last bit."""
        reports = [self.ran[name].report for name in (one, two)]
        inputs = [[{**row, "seconds": 0} for row in report["inputs"]] for report in reports]
        return inputs[0] == inputs[1] and reports[0]["taps"] == reports[1]["taps"] and len(reports[0]["taps"]) == 11


@pytest.fixture(scope="module", params=["torch", "builtin"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(request.param, tmp_path_factory.mktemp("compute"))


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("name", "where", "at"),
    [("loud mlp", "layers.1.mlp", "the input of "), ("loud attention", "layers.2.attention", "q @ k")],
)
@pytest.mark.parametrize("how", ["fp16", "fp16 streamed"])
def test_an_overflow_is_found_at_its_layer_and_part(runs: Runs, name: str, where: str, at: str, how: str) -> None:
    side = runs.side(f"{name} {how}")
    assert side.first is not None and side.first.name == where and not side.ok
    assert side.first.largest > FP16_MAX and side.first.not_finite and side.first.relative is None
    assert side.first.at.startswith(at) and side.first.lost.startswith(at)
    assert f"fp16 overflows in {where}: " in side.verdict and "of at most 65504" in side.verdict
    before = side.found.rows[: side.found.rows.index(side.first)]
    assert before and all(row.relative is not None and row.not_finite == 0 for row in before)
    assert [row.name for row in side.found.rows if side.overflows(row)] == [where]


@pytest.mark.frameworks
def test_a_tame_network_passes_and_its_errors_are_those_of_the_dtype(runs: Runs) -> None:
    """fp16 has 11 bits: a rounding moves a number by at most 2^-11 of the largest. A handful of roundings in a row and
    sums of some 30 products end far below 32 of them, and above a part of one."""
    side = runs.side("tame fp16")
    assert side.ok and side.verdict == ""
    assert [row.name for row in side.found.rows] == [
        *(tap["name"] for tap in runs.ran["tame"].report["taps"]),
        "logits",
    ]
    assert all(row.relative is not None and 2**-14 < row.relative < 32 * 2**-11 for row in side.found.rows)
    assert [item["top1"] for item in runs.ran["tame fp16"].report["computed"]["inputs"]] == pytest.approx(
        [4, 19, 5], abs=1
    )


@pytest.mark.frameworks
def test_the_figures_are_those_of_the_outputs(runs: Runs) -> None:
    """An embedding is only rounded, so its error and its largest number can be computed here."""
    row, wide_TH = runs.side("tame fp16").found.rows[0], runs.ran["tame fp16"].taps["embedding"]
    gap = np.abs(wide_TH.astype(np.float16).astype(np.float32) - wide_TH).max()
    assert row.relative == float(gap) / float(np.abs(wide_TH).max())
    of_inputs = [row for row in runs.side("tame fp16").found.rows if row.input == "long" and row.at == "its output"]
    assert of_inputs
    for row in of_inputs:
        values = runs.ran["tame fp16"].logits["long"] if row.name == "logits" else runs.ran["tame fp16"].taps[row.name]
        assert row.largest == float(np.abs(values).max())


@pytest.mark.frameworks
@pytest.mark.parametrize("name", LOUD)
def test_no_float32_figure_changes(runs: Runs, name: str) -> None:
    assert runs.same_figures(name, f"{name} fp16") and runs.same_figures(name, f"{name} fp16 streamed")
    for item in INPUTS:
        bits = [runs.ran[f"{name}{how}"].logits[item.name].view(np.uint32) for how in ("", " fp16")]
        assert np.array_equal(*bits)


@pytest.mark.frameworks
@pytest.mark.parametrize("name", LOUD)
def test_a_streamed_run_says_the_same(runs: Runs, name: str) -> None:
    whole, streamed = (runs.ran[f"{name} fp16{how}"].report["computed"] for how in ("", " streamed"))
    assert whole == streamed and whole["rows"]


@pytest.mark.frameworks
def test_weights_that_are_left_rounded_are_seen(runs: Runs) -> None:
    """The control of the unchanged figures."""
    assert not runs.same_figures("tame", "keep_rounded")


@pytest.mark.frameworks
def test_a_run_that_stayed_in_float32_is_seen(runs: Runs) -> None:
    """The control of the errors: there are none then."""
    rows = runs.side("stay_in_float32").found.rows
    assert len(rows) == 12 and {row.relative for row in rows} == {0.0}


@pytest.mark.frameworks
def test_weights_beyond_the_range_are_named(runs: Runs) -> None:
    side = runs.side("large weight fp16")
    assert len(side.found.unfit) == 1 and "embed" in side.found.unfit[0] and not side.ok
    assert "fp16 does not hold all weights: not those of " in side.verdict
    assert side.first is None  # no input has that token


@pytest.mark.frameworks
def test_weights_that_all_become_0_are_named(runs: Runs) -> None:
    side = runs.side("faint weights fp16")
    assert len(side.found.unfit) == 1 and "layers.1." in side.found.unfit[0] and not side.ok
    assert side.first is None  # nothing overflows
    assert runs.side("tame fp16").ok


@pytest.mark.frameworks
@pytest.mark.parametrize("name", ["loud mlp", "large weight"])
def test_bf16_holds_what_fp16_does_not_and_errs_more(runs: Runs, name: str) -> None:
    ran = runs.ran[f"{name} bf16"]
    if ran.error:  # MindSpore's kernels for CPUs, which is why `--compute bf16` is refused there
        assert ran.code == 2 and "does not compute in bfloat16 on `cpu`" in ran.error["what"]
        return
    assert runs.side(f"{name} bf16").ok
    ratio = runs.side(f"{name} bf16").found.rows[0].relative / runs.side(f"{name} fp16").found.rows[0].relative  # type: ignore[operator]
    assert 4 < ratio < 16  # three bits less


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the loud and the tame model of both frameworks."""
    room = tmp_path_factory.mktemp("sides")
    for name in ("loud mlp", "tame"):
        convert(make(room / name / "hf", name), room / name / "ms", to_dialect="mindformers")
    return room


@pytest.fixture(scope="module")
def loud(sides: Path) -> Report:
    return verify(sides / "loud mlp/hf", sides / "loud mlp/ms", level="layers", compute="fp16")


@pytest.mark.frameworks
def test_an_overflow_fails_the_command_though_both_sides_are_equal(loud: Report) -> None:
    assert (loud.exit_code, loud.data["failed"]) == (1, ["compute"])
    assert "are equal at level layers; A: fp16 overflows in layers.1.mlp: " in loud.headline
    assert "B: fp16 overflows in layers.1.mlp: " in loud.headline
    found = loud.data["compute"]
    assert (found["dtype"], found["limit"], found["a"]["first"], found["b"]["first"]) == (
        "fp16", FP16_MAX, "layers.1.mlp", "layers.1.mlp",
    )  # fmt: skip
    assert [row["wrong"] for row in found["a"]["rows"]].index(True) == 5
    assert "WRONG: overflows in layers.1.mlp" in loud.to_text()
    assert "`--compute`" in loud.data["forward"]["runners"][1]["why"]
    assert loud.data["layers"]["first"] is None and '"compute"' in loud.to_json()


@pytest.mark.frameworks
def test_a_tame_model_passes_streamed_or_not_with_the_same_figures(sides: Path) -> None:
    reports = [
        verify(sides / "tame/hf", sides / "tame/ms", level="layers", compute="fp16", stream=stream)
        for stream in (False, True)
    ]
    for report in reports:
        assert (report.exit_code, report.data["failed"]) == (0, []), report.to_text()
        assert "fp16      A: nothing overflows; the largest number is in " in report.to_text()
    assert reports[0].data["compute"] == reports[1].data["compute"]
    assert reports[0].data["layers"] == reports[1].data["layers"]


@pytest.mark.frameworks
def test_the_page_has_the_numbers_of_the_json(loud: Report) -> None:
    text = page(loud.data, COMMAND)
    assert odd_figures(text, loud.data) == []
    assert "Overflows" in text and "fp16 overflows in layers.1.mlp" in text
    assert any(row.of == "compute" and "layers.1.mlp" in row.text for row in Reader(text).rows)
    shown = str(loud.data["compute"]["a"]["rows"][5]["largest"])
    assert f'value="{shown}"' in text
    assert odd_figures(text.replace(f'value="{shown}"', 'value="7.5"', 1), loud.data)


@pytest.mark.frameworks
def test_a_dump_keeps_its_run_in_the_dtype(sides: Path, tmp_path: Path) -> None:
    hf, ms = sides / "loud mlp/hf", sides / "loud mlp/ms"
    with_it, without = tmp_path / "with", tmp_path / "without"
    report = verify(hf, dump=with_it, level="layers", compute="fp16")
    assert (report.exit_code, report.data["compute"]["a"]["first"]) == (1, "layers.1.mlp")
    assert verify(hf, dump=without, level="layers").exit_code == 0
    report = verify(ms, against=with_it, level="layers", compute="fp16")
    assert report.data["failed"] == ["compute"] and report.data["compute"]["b"]["first"] == "layers.1.mlp"
    report = verify(ms, against=without, level="layers", compute="fp16")
    assert report.data["failed"] == ["compute"] and "b" not in report.data["compute"]
    assert "B was not run in fp16: make its dump with the same `--compute`" in report.data["notes"]


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"compute": "bf16", "level": "layers"}, "MindSpore does not compute in bf16 on a CPU"),
        ({"compute": "fp16", "level": "layers", "runner": "mindformers"}, "made for one dtype"),
        ({"compute": "fp16"}, "which level layers shows"),
        ({"compute": "fp8", "level": "layers"}, "no dtype to compute in"),
        ({"compute": "fp16", "sanity": "text.jsonl"}, "`--compute` does nothing with `--sanity`"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_anything_is_read(
    sides: Path, options: dict[str, Any], word: str
) -> None:
    def read(*_: Any) -> Any:
        raise AssertionError("it was read")

    with pytest.raises(UsageError, match=word):
        verify(sides / "tame/hf", sides / "tame/ms", progress=read, steps=read, **options)


def side_of(**figures: Any) -> SideComputed:
    rows = [ComputedRow("embedding", 1e-4, 3.0, "its output", "ids-7"), ComputedRow("layers.3.mlp", **figures)]
    return SideComputed("A", Computed("fp16", rows=rows))


@pytest.mark.parametrize(("largest", "ok"), [(65504.0, True), (65519.0, True), (65520.0, False), (71000.0, False)])
def test_what_rounds_to_the_largest_number_does_not_overflow(largest: float, ok: bool) -> None:
    side = side_of(relative=1e-3, largest=largest, at="q @ k", input="ids-7")
    with np.errstate(over="ignore"):
        assert side.ok is ok and np.isfinite(np.float64(largest).astype(np.float16)) == ok
    assert side.verdict == ("" if ok else f"fp16 overflows in layers.3.mlp: {largest:.0f} of at most 65504")


def test_numbers_that_are_none_are_a_failure_without_an_overflow_too() -> None:
    side = side_of(largest=9.0, at="q @ k", input="ids-7", not_finite=12, lost="its output")
    assert side.verdict == "fp16 fails in layers.3.mlp: 12 numbers are inf or NaN, first its output"


def test_the_ranges_are_those_of_the_formats() -> None:
    """Of bfloat16, numpy has none: its largest number is the upper half of float32's bits 7F7F."""
    fp16, bf16 = FORMATS["fp16"], FORMATS["bf16"]
    assert fp16.limit == float(np.finfo(np.float16).max)
    assert bf16.limit == float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
    assert bf16.limit < bf16.overflows < float(np.finfo(np.float32).max)


def test_the_largest_finite_number_is_told_beside_what_is_none() -> None:
    assert magnitude(np.array([1, -7, np.inf, np.nan, 3], np.float32)) == (7.0, 2)
    assert magnitude(np.zeros((0, 4), np.float32)) == (0.0, 0)
