"""The contract: training teaches, begins from whatever `convert` reads, and gives what everybody reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from arithmetic import run_check
from clients.run import smollm2_folder
from tiny_runs import log_lines, make_config, make_corpus, make_model, train

from ckptkit import Parallel, check, convert, diff, verify

pytestmark = pytest.mark.frameworks

# float32 sums of a few hundred terms in another order, layer after layer: some hundred units of 2 ** -24
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=120)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in log_lines(run / "log.jsonl") if line["kind"] == "step"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Train a model of a million parameters that comes from MindFormers' naming, cut over two ranks; return its run."""
    folder = tmp_path_factory.mktemp("million")
    hf = make_model(
        folder / "hf", hidden_size=128, intermediate_size=384, num_hidden_layers=4, tie_word_embeddings=False
    )
    convert(hf, folder / "ms", parallel=Parallel(mp=2))
    held_out = make_corpus(folder / "held.jsonl", documents=20, seed=5)
    config = make_config(
        folder, folder / "ms", corpus, schedule={"total_steps": 40, "warmup_steps": 5},
        training={"batch_size": 8, "micro_batch": 4}, checkpoint={"every": 20},
        eval={"path": str(held_out), "every": 20, "at_start": True},
    )  # fmt: skip
    done = train(config)
    assert "held out" in done.stdout
    return folder / "run"


def test_the_loss_of_a_model_of_a_million_parameters_falls(trained: Path) -> None:
    found = losses(trained)
    assert len(found) == 40 and found[-1] < found[0] - 1.5
    held_out = [line["loss"] for line in log_lines(trained / "log.jsonl") if line["kind"] == "eval"]
    assert len(held_out) == 3 and held_out[-1] < held_out[0] - 1.5


@pytest.mark.parametrize("form", ["hf", "iteration"])
def test_the_first_updates_are_the_same_whichever_form_the_weights_come_in(
    trained: Path, corpus: Path, tmp_path: Path, form: str
) -> None:
    """Two ranks of MindFormers' naming, HuggingFace's folder, and MindFormers' newer folder: the same bits."""
    source = trained.parent / "hf"
    if form == "iteration":
        convert(source, tmp_path / "iteration", format="mindformers", parallel=Parallel(mp=2))
        source = tmp_path / "iteration"
    config = make_config(
        tmp_path, source, corpus, schedule={"total_steps": 40, "warmup_steps": 5},
        training={"batch_size": 8, "micro_batch": 4},
    )  # fmt: skip
    train(config, "--stop-at-step", "2")
    assert [loss.hex() for loss in losses(tmp_path / "run")] == [loss.hex() for loss in losses(trained)[:2]]


def test_a_checkpoint_of_a_run_is_one_for_every_command(trained: Path, tmp_path: Path) -> None:
    step = trained / "step-00000040"
    assert check(step).exit_code == 0
    convert(step, tmp_path / "ms", parallel=Parallel(mp=2))
    assert verify(step, tmp_path / "ms", level="weights").exit_code == 0
    convert(tmp_path / "ms", tmp_path / "back", to_dialect="hf")
    assert diff(step, tmp_path / "back").exit_code == 0  # moments too
    assert diff(step, trained / "step-00000020").exit_code == 1  # the control
    assert not (tmp_path / "ms/state.json").exists()


def test_transformers_gives_the_drivers_logits(trained: Path) -> None:
    found = run_check("trained_client.py", str(trained / "step-00000040"))
    assert found["logits"] < ROUNDING < found["control"]


def test_smollm2_learns_and_transformers_gives_its_logits(corpus: Path, tmp_path: Path) -> None:
    """The real model, from its MindSpore conversion: a few updates, stopped and resumed once between."""
    smollm2 = smollm2_folder()
    if smollm2 is None:
        pytest.skip("the package that holds SmolLM2 cannot be had here")
    convert(smollm2, tmp_path / "ms")
    config = make_config(
        tmp_path, tmp_path / "ms", corpus, data={"seq_length": 64}, optimizer={"lr": 1e-4},
        schedule={"kind": "constant", "warmup_steps": 0, "total_steps": 6}, checkpoint={"every": 100},
        training={"batch_size": 2, "micro_batch": 2},
    )  # fmt: skip
    train(config, "--stop-at-step", "3")
    report: dict[str, Any] = json.loads(train(config, "--json").stdout)
    assert report["resumed_from"] == 3 and report["step"] == 6
    found = losses(tmp_path / "run")
    assert len(found) == 6 and found[-1] < found[0]
    compared = run_check("trained_client.py", str(tmp_path / "run/step-00000006"))
    assert compared["logits"] < ROUNDING < compared["control"]


def test_training_state_of_the_model_stays_behind_and_is_counted(trained: Path, corpus: Path, tmp_path: Path) -> None:
    """A step's folder as the model of another run: its weights, and none of its moments, which is said."""
    config = make_config(tmp_path, trained / "step-00000040", corpus, training={"batch_size": 8, "micro_batch": 4})
    done = train(config, "--stop-at-step", "1")
    assert "78 tensors of training state" in done.stdout and "resumed from step 0" in done.stdout
    assert losses(tmp_path / "run")[0] < losses(trained)[0] - 1.5


def test_hints_about_the_model_name_keys_of_the_config(trained: Path, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((trained.parent / "hf/model.safetensors").read_bytes())
    done = train(make_config(tmp_path, folder, corpus), code=2)
    assert "`model.config: DIR`" in done.stderr and "--config" not in done.stderr
