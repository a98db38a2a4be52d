"""The builtin network gives transformers' logits, from every dialect's own tensors.

What holds: for every family, dialect and variant it takes every tensor, its logits are those of transformers' eager
path in float32 (by the torch runner), it reads config.json as the network that transformers builds does, and a second
run gives the same bits.

The bounds: both compute the same sums in float32 in other orders. Over two or three layers of width 32 the difference
measures 2e-7 to 1e-6 of the largest logit (unit roundoff 6e-8); 1e-5 leaves a factor of 10 for other processors. A
frequency may differ by a unit in its last place (test_rope.py), which turns position p by up to p * 2**-24: for 4000
that is 2e-4, and 1e-3 is the bound where positions are spread; here they measure what the others do. What is wrong on
purpose measures 9e-4 (an epsilon of 1e-3 for 1e-5) to 1.4, and five times the bound or more is asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import pytest
from clients.run import relative_difference
from runner_jobs import (
    EVERY_KIND,
    LINEAR,
    LLAMA3,
    YARN,
    Config,
    Ran,
    config_of,
    ids_of,
    in_5s_words,
    job_of,
    make_folder,
    run_jobs,
    shapes_of,
)

from ckptkit.commands.convert import convert
from ckptkit.verification.runners.attention import BLOCK
from ckptkit.verification.runners.job import Input, Job

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

BOUND, SPREAD_BOUND = 1e-5, 1e-3
LEGACY, MCORE = "mindformers-legacy", "mindformers-mcore"
SPREAD = (0, 1, 6, 31, 64, 127, 128, 300, 999, 1000, 2500, 4000)
INPUTS = (Input("near", ids_of(13)), Input("spread", ids_of(12, seed=1), SPREAD), Input("one token", ids_of(1)))
BOUNDS = {"near": BOUND, "spread": SPREAD_BOUND, "one token": BOUND, "long": BOUND}
LONG = Input("long", ids_of(BLOCK + 9))  # scores of these models are made in two blocks
LONG_MODELS = ("llama", "mistral window")

# config.json in other words than those that the model's shapes follow from.
STEPPED = config_of("qwen3_moe", num_hidden_layers=3, decoder_sparse_step=2)
SAID: dict[str, Config] = {
    "llama3 in 5's words": in_5s_words(EVERY_KIND["llama3"]),
    "qwen3_moe stepped": STEPPED,
}
MODELS = {
    **EVERY_KIND,
    "llama3 in 5's words": EVERY_KIND["llama3"],
    "qwen3_moe stepped": {**STEPPED, "mlp_only_layers": [0, 2]},
}
WAYS: dict[str, list[tuple[str, str]]] = {
    "llama": [(LEGACY, ""), (LEGACY, "qkv_concat"), (LEGACY, "qkv_concat-1.4")],
    "qwen3": [(MCORE, variant) for variant in ("", "contiguous-qkv", "contiguous-mlp", "contiguous")],
}
WAYS |= {"mistral": WAYS["llama"], "qwen2": WAYS["llama"], "qwen3_moe": [*WAYS["qwen3"], ("hf", "stacked")]}
# Models whose tensors differ from one another's; for the rest HuggingFace's own naming will do.
CONVERTED = (
    "llama", "llama tied", "llama biases", "llama wide heads", "mistral", "qwen2", "qwen2 tied", "qwen3",
    "qwen3 tied", "qwen3 biases", "qwen3_moe", "qwen3_moe not normed", "qwen3_moe stepped", "qwen3_moe biases",
)  # fmt: skip
FAMILIES = tuple(WAYS)


def way_name(model: str, dialect: str, variant: str) -> str:
    return f"{model} / {dialect} {variant}".strip()


RIGHT = {name: name for name in MODELS} | {
    way_name(model, *way): model for model in CONVERTED for way in WAYS[MODELS[model]["model_type"]]
}


def right_jobs(folder: Path, folders: dict[str, Path]) -> Iterator[tuple[str, Job]]:
    """Yield a job for each model and each way to store it."""
    for model in MODELS:
        yield model, job_of(folders[model], *INPUTS, *([LONG] if model in LONG_MODELS else ()))
    for model in CONVERTED:
        for dialect, variant in WAYS[MODELS[model]["model_type"]]:
            name = way_name(model, dialect, variant)
            convert(folders[model], folder / name, to_dialect=dialect, variant=variant or None)
            yield name, job_of(folder / name, *INPUTS, dialect=dialect, variant=variant)


@dataclass(frozen=True, slots=True)
class Wrong:
    """A job that is right but for one thing: what is read otherwise. `shows` is the input whose logits tell."""

    right: str
    variant: str | None = None
    config: Config = field(default_factory=dict)
    swapped: tuple[str, str] | None = None
    shows: str = "near"

    def job(self, right: dict[str, Job]) -> Job:
        job = right[self.right]
        changed = {key: value for key, value in {**job.config, **self.config}.items() if value is not None}
        job = replace(job, config=changed, variant=job.variant if self.variant is None else self.variant)
        if self.swapped:
            job = replace(job, tensors=[replace(t, name=exchanged(t.name, *self.swapped)) for t in job.tensors])
        return job


def exchanged(text: str, one: str, other: str) -> str:
    return text.replace(one, "\0").replace(other, one).replace("\0", other)


WRONG = {
    "legacy fused as releases up to 1.4 have it": Wrong(f"llama / {LEGACY} qkv_concat", "qkv_concat-1.4"),
    "legacy fused as releases since 1.5 have it": Wrong(f"qwen2 / {LEGACY} qkv_concat-1.4", "qkv_concat"),
    "queries, keys and values of mcore in parts": Wrong(f"qwen3 / {MCORE}", "contiguous-qkv"),
    "queries, keys and values of mcore in groups": Wrong(f"qwen3_moe / {MCORE} contiguous-qkv", ""),
    "gate and up of mcore in halves": Wrong(f"qwen3 / {MCORE}", "contiguous-mlp"),
    "gate and up of mcore by turns": Wrong(f"qwen3 / {MCORE} contiguous-mlp", ""),
    "experts that are not normed": Wrong("qwen3_moe", config={"norm_topk_prob": False}),
    "a window one token wider": Wrong("mistral window", config={"sliding_window": 6}),
    "a window in a layer too many": Wrong("qwen2 window", config={"max_window_layers": 0}),
    "no window": Wrong("qwen3_moe window", config={"use_sliding_window": False}),
    "a linear factor": Wrong("llama linear", config={"rope_scaling": {**LINEAR, "factor": 2.0}}),
    "a dynamic length": Wrong("llama dynamic", config={"max_position_embeddings": 64}, shows="spread"),
    "a llama3 bound": Wrong("llama3", config={"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, shows="spread"),
    "yarn's attention factor": Wrong("llama yarn", config={"rope_scaling": {**YARN, "attention_factor": 1.0}}),
    "yarn that is not truncated": Wrong("llama yarn", config={"rope_scaling": {**YARN, "truncate": False}}),
    **{
        f"gate and up of {family} change places": Wrong(family, swapped=("gate_proj", "up_proj")) for family in FAMILIES
    },
    **{f"the rotary base of {family}": Wrong(family, config={"rope_theta": 6000.0}) for family in FAMILIES},
    **{f"the epsilon of {family}": Wrong(family, config={"rms_norm_eps": 1e-3}) for family in FAMILIES},
}
TWICE = tuple(2 * position for position in SPREAD)
BIG = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}


def other_jobs(folder: Path, right: dict[str, Job]) -> Iterator[tuple[str, Job]]:
    """Yield jobs about one thing each."""
    yield "half frequencies", replace(right["llama"], inputs=[replace(INPUTS[1], positions=TWICE)])
    yield "half frequencies, dynamic", right["llama dynamic"]
    yield "nudged", replace(right["llama"], sensitivity=True)
    yield "an id too many", replace(right["llama"], inputs=[Input("near", (1, 67))])
    for model, table in (("llama tied", "model.embed_tokens"), (f"llama tied / {LEGACY}", "model.tok_embeddings")):
        tied = right[model]
        (embedding,) = (tensor for tensor in tied.tensors if tensor.name.startswith(table))
        yield f"{model}, with a head", replace(tied, tensors=[*tied.tensors, replace(embedding, name="lm_head.weight")])
    other = make_folder(folder / "other-head", MODELS["llama tied"], extra=["lm_head.weight"])
    yield "another head", job_of(other)
    yield "lost", replace(right["qwen3"], tensors=right["qwen3"].tensors[1:])


def jobs_of_two_sizes(folder: Path) -> Iterator[tuple[str, Job]]:
    """Yield a tiny model and one of 84 MB. They come first in a process, whose peak of memory only grows."""
    for name, shape in (("small", {}), ("big", BIG)):
        yield name, job_of(make_folder(folder / name, config_of("llama", **shape)), sensitivity=True)


@dataclass(frozen=True, slots=True)
class Runs:
    torch: dict[str, Ran]
    builtin: dict[str, Ran]

    def difference(self, job: str, model: str, which: str) -> float:
        return relative_difference(self.builtin[job].logits[which], self.torch[model].logits[which])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Make, convert and run everything: two child processes, since importing takes longer than running."""
    folder = tmp_path_factory.mktemp("decoder")
    folders = {name: make_folder(folder / name, config, said=SAID.get(name)) for name, config in MODELS.items()}
    right = dict(right_jobs(folder / "converted", folders))
    jobs = dict(jobs_of_two_sizes(folder)) | right | {name: wrong.job(right) for name, wrong in WRONG.items()}
    jobs |= dict(other_jobs(folder, right))
    halved = {name: "halve_frequencies" for name in jobs if name.startswith("half")}
    torch = run_jobs("torch", {name: right[name] for name in MODELS}, folder / "torch")
    return Runs(torch, run_jobs("builtin", jobs, folder / "builtin", changes=halved))


@pytest.mark.parametrize("name", RIGHT)
def test_it_takes_every_tensor_and_gives_the_logits_of_transformers(runs: Runs, name: str) -> None:
    report = runs.builtin[name].report
    assert [report[key] for key in ("missing", "unexpected", "shapes", "altered", "benign")] == [[]] * 5
    assert all(row["repeated"] and row["not_finite"] == 0 for row in report["inputs"])
    for which in runs.builtin[name].logits:
        assert runs.difference(name, RIGHT[name], which) < BOUNDS[which], which


@pytest.mark.parametrize("name", WRONG)
def test_what_is_read_otherwise_misses_the_logits(runs: Runs, name: str) -> None:
    wrong = WRONG[name]
    assert runs.builtin[name].report["missing"] == runs.builtin[name].report["altered"] == []
    assert runs.difference(name, RIGHT[wrong.right], wrong.shows) > 5 * BOUNDS[wrong.shows]


@pytest.mark.parametrize("model", MODELS)
def test_it_reads_config_json_as_the_network_of_transformers_does(runs: Runs, model: str) -> None:
    assert runs.builtin[model].report["reading"] == runs.torch[model].report["reading"]


def test_readings_of_two_models_differ(runs: Runs) -> None:
    readings = [str(ran.report["reading"]) for ran in runs.builtin.values() if ran.report]
    assert len(set(readings)) > len(MODELS) - 6  # some of them differ in words or tensors alone


def test_frequencies_that_are_put_are_those_that_turn(runs: Runs) -> None:
    """Half the angle a step, twice the positions: the same float32 products, so the same bits."""
    halved, plain = runs.builtin["half frequencies"].logits["spread"], runs.builtin["llama"].logits["spread"]
    assert (halved.view("uint32") == plain.view("uint32")).all()
    assert runs.difference("half frequencies, dynamic", "llama dynamic", "spread") > 5 * SPREAD_BOUND


def test_a_nudge_of_the_frequencies_shows_where_positions_are_far(runs: Runs) -> None:
    near, spread, *_ = runs.builtin["nudged"].report["inputs"]
    assert 1e-8 < near["sensitivity"] < BOUND < spread["constants"] < SPREAD_BOUND


def test_a_token_that_the_vocabulary_does_not_have_is_refused(runs: Runs) -> None:
    ran = runs.builtin["an id too many"]
    assert (ran.code, ran.error["what"]) == (2, "token id 67 is not in a vocabulary of 67")


def test_the_head_of_a_tied_checkpoint_must_equal_the_embedding(runs: Runs) -> None:
    for model in ("llama tied", f"llama tied / {LEGACY}"):
        with_head = runs.builtin[f"{model}, with a head"]
        assert with_head.report["unexpected"] == with_head.report["altered"] == []
        assert (with_head.logits["near"] == runs.builtin[model].logits["near"]).all()
    assert runs.builtin["another head"].report["altered"] == ["lm_head.weight"]


def test_a_parameter_without_a_tensor_is_missing_and_nothing_is_run(runs: Runs) -> None:
    report = runs.builtin["lost"].report
    assert (len(report["missing"]), report["inputs"]) == (1, [])


def test_one_copy_of_the_model_is_in_memory(runs: Runs) -> None:
    """Poisoning, loading, comparing, running and nudging; the bounds leave out a second copy, and see the first."""
    before, after = (runs.builtin[name].report["peak_bytes"] for name in ("small", "big"))
    model_bytes = 4 * sum(prod(shape) for shape in shapes_of(config_of("llama", **BIG)).values())
    assert 0.9 * model_bytes < after - before < 1.7 * model_bytes


def test_settings_say_what_makes_it_exact_and_stdout_is_quiet(runs: Runs) -> None:
    settings = runs.builtin["llama"].report["settings"]
    wanted = {"dtype": "float32", "mode": "pynative", "attention": "eager", "dropout": "off", "deterministic": True}
    assert wanted.items() <= settings.items()
    assert runs.builtin["llama"].stdout == ""
