"""`ckptkit resume-train` and `ckptkit runs` as commands, where that takes few updates."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_log_events import read_events
from tiny_runs import command, log_lines, make_config, make_corpus, make_model, train

pytestmark = pytest.mark.frameworks


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus.jsonl")


def ckptkit(*words: str | Path, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ckptkit", *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def as_bfloat16(folder: Path) -> dict[str, Any]:
    """Round the weights of a model to bfloat16 in its file; return them as float32."""
    import torch
    from safetensors.torch import save_file as save_torch

    file = folder / "model.safetensors"
    narrow = {name: torch.from_numpy(array).bfloat16() for name, array in load_file(file).items()}
    save_torch(narrow, file, metadata={"format": "pt"})
    return {name: tensor.float().numpy() for name, tensor in narrow.items()}


def test_masters_are_made_of_the_weights_and_are_what_a_resumed_run_goes_on_with(tmp_path: Path, corpus: Path) -> None:
    """T19: after an update with next to no learning rate, the masters are the bfloat16 weights to the bit.

    Then the model that the run began with is replaced: a run that goes on does not look at it again.
    """
    model = make_model(tmp_path / "model", torch_dtype="bfloat16")
    wanted = as_bfloat16(model)
    quiet = {"optimizer": {"lr": 1e-30, "weight_decay": 0.1}, "schedule": {"kind": "constant", "warmup_steps": 0}}
    config = make_config(tmp_path, model, corpus, **quiet)
    train(config, "--stop-at-step", "1")
    first = load_file(tmp_path / "run/step-00000001/model.safetensors")
    assert first.keys() == wanted.keys()
    for name, array in wanted.items():
        assert first[name].dtype == np.float32 and first[name].tobytes() == array.tobytes(), name
    save_file({name: array + 1 for name, array in wanted.items()}, model / "model.safetensors")
    train(config, "--stop-at-step", "2")
    second = load_file(tmp_path / "run/step-00000002/model.safetensors")
    assert all(second[name].tobytes() == array.tobytes() for name, array in wanted.items())


def test_masters_hold_what_the_weights_dtype_could_not(tmp_path: Path, corpus: Path) -> None:
    """T19's control: masters that were made of bfloat16 anew would have lost these bits."""
    model = make_model(tmp_path / "model", torch_dtype="bfloat16")
    as_bfloat16(model)
    config = make_config(tmp_path, model, corpus)
    train(config, "--stop-at-step", "1")
    found = load_file(tmp_path / "run/step-00000001/model.safetensors").values()
    assert any((array.view(np.uint32) & 0xFFFF).any() for array in found)


def test_events_are_those_of_the_log_and_a_resumed_run_adds_to_them(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = make_config(tmp_path, model, corpus, log={"tensorboard": "board"})
    train(config, "--stop-at-step", "2")
    train(config, "--stop-at-step", "3")
    losses = {line["step"]: line["loss"] for line in log_lines(tmp_path / "run/log.jsonl") if line["kind"] == "step"}
    events = read_events(tmp_path / "board")
    tags = {tag for _, _, _, values in events for tag in values}
    tag = next(tag for tag in sorted(tags) if tag.endswith("loss"))
    found = {step: values[tag] for _, step, _, values in events if tag in values}
    assert found == {step: float(np.float32(loss)) for step, loss in losses.items()} and list(losses) == [1, 2, 3]


def test_runs_are_listed_and_pruned(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = make_config(tmp_path, model, corpus, checkpoint={"every": 1, "keep_last": 5})
    train(config, "--stop-at-step", "4")
    run = tmp_path / "run"
    text = ckptkit("runs", "ls", run)
    assert "4 checkpoints, 4 whole" in text and text.index("step 4") < text.index("step 1")
    listed = json.loads(ckptkit("runs", "ls", run, "--digests", "--json"))
    assert listed["ok"] is True
    ckptkit("runs", "prune", run, "--keep-last", "2", "--dry-run")
    assert len(list(run.glob("step-*"))) == 4
    ckptkit("runs", "prune", run, "--keep-last", "2")
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000003", "step-00000004"]
    weights = run / "step-00000004/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "2 checkpoints, 1 whole" in ckptkit("runs", "ls", run, "--digests", code=1)
    assert "nowhere" in ckptkit("runs", "ls", tmp_path / "nowhere", code=2)


def test_rows_longer_than_the_models_positions_are_noted(tmp_path: Path, model: Path, corpus: Path) -> None:
    long = make_config(tmp_path, model, corpus, data={"seq_length": 160}, training={"batch_size": 1, "micro_batch": 1})
    assert "max_position_embeddings" in train(long, "--stop-at-step", "1").stdout
    (tmp_path / "fits").mkdir()
    fits = make_config(tmp_path / "fits", model, corpus, data={"seq_length": 128})
    assert "max_position_embeddings" not in train(fits, "--stop-at-step", "1").stdout


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, model: Path) -> None:
    config = make_config(tmp_path, model, tmp_path / "nowhere.jsonl")
    assert "nowhere.jsonl" in train(config, code=2).stderr
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    train(config, code=2)
    assert (tmp_path / "run").is_dir(), "a folder of the user's stays"


def test_another_held_out_set_begins_its_best_loss_anew(tmp_path: Path, model: Path, corpus: Path) -> None:
    """One that was easier would be the best for ever, and its checkpoint the one that is kept."""
    easy, hard = (tmp_path / name for name in ("easy.jsonl", "hard.jsonl"))
    easy.write_text('{"text": "the the the the"}\n')
    hard.write_text('{"text": "Qx7!zP#"}\n')
    config = make_config(tmp_path, model, corpus, checkpoint={"every": 1}, eval={"path": str(easy), "every": 1})
    train(config, "--stop-at-step", "2")
    before = json.loads((tmp_path / "run/step-00000002/state.json").read_text())["best"]
    done = train(config, "--set", f"eval.path={hard}", "--stop-at-step", "3")
    after = json.loads((tmp_path / "run/step-00000003/state.json").read_text())["best"]
    assert "the held-out set is another one" in done.stdout
    assert after["step"] == 3 and after["loss"] > before["loss"] and after["held_out"] != before["held_out"]
    same = json.loads(train(config, "--set", f"eval.path={hard}", "--stop-at-step", "4", "--json").stdout)
    assert not any("another one" in note for note in same["notes"])


def test_a_log_is_not_added_to_a_file_of_something_else(tmp_path: Path, model: Path, corpus: Path) -> None:
    """A document without a line break at its end would have been cut off as a torn line."""
    config = make_config(tmp_path, model, corpus)
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "mine"}')
    done = train(config, "--log", other, "--stop-at-step", "1", code=2)
    assert "is no log of a run" in done.stderr and other.read_text() == '{"text": "mine"}'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_framework_is_loaded_ends_the_command_in_words(
    tmp_path: Path, model: Path, corpus: Path, number: signal.Signals
) -> None:
    config = make_config(tmp_path, model, corpus)
    process = subprocess.Popen(command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    while "mindspore" not in maps.read_text():  # its import has begun
        time.sleep(0.002)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number and "run the same command again" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_a_plot_and_a_config_do_not_go_together(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = make_config(tmp_path, model, corpus)
    assert "--plot" in ckptkit("resume-train", config, "--plot", tmp_path / "run", code=2)


def test_a_log_inside_of_a_checkpoint_does_not_damage_it(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = make_config(tmp_path, model, corpus)
    train(config, "--stop-at-step", "1")
    state = tmp_path / "run/step-00000001/state.json"
    before = state.read_bytes()
    assert "is no log of a run" in train(config, "--log", state, "--stop-at-step", "2", code=2).stderr
    assert state.read_bytes() == before


def test_what_lies_beside_a_config_of_its_own_goes_beside_checkpoints(
    tmp_path: Path, model: Path, corpus: Path
) -> None:
    """Weights in one place, config.json and tokenizer.json in another: a resumed run finds both in its checkpoint."""
    weights = tmp_path / "alone" / "weights.safetensors"
    weights.parent.mkdir()
    (model / "model.safetensors").rename(weights)
    for number, named in enumerate((model / "config.json", model)):
        place = tmp_path / str(number)
        place.mkdir()
        config = make_config(place, weights, corpus, model={"config": str(named)})
        train(config, "--stop-at-step", "1")
        step = place / "run/step-00000001"
        assert (step / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        assert "resumed from step 1" in train(config, "--stop-at-step", "2").stdout


def test_moments_that_begin_anew_are_corrected_from_there(tmp_path: Path, model: Path, corpus: Path) -> None:
    """With zero moments Adam's first step is the learning rate in size, whenever it is; not corrected it is larger."""
    config = make_config(
        tmp_path, model, corpus, checkpoint={"every": 10},
        optimizer={"lr": 0.001, "weight_decay": 0.0, "beta1": 0.5, "beta2": 0.99, "clip_norm": None},
        schedule={"kind": "constant", "warmup_steps": 0},
    )  # fmt: skip
    train(config, "--stop-at-step", "10")
    shutil.rmtree(tmp_path / "run/step-00000010/training_state")
    done = train(config, "--without-optimizer", "--stop-at-step", "11")
    assert "moments begin at zero, as `--without-optimizer` says\n" in done.stdout
    before, after = (load_file(tmp_path / f"run/step-000000{step}/model.safetensors") for step in (10, 11))
    moved = np.concatenate([np.abs(after[name] - before[name]).ravel() for name in before])
    assert 0.00099 < np.quantile(moved, 0.9) < 0.00101 and moved.max() < 0.00101
    assert json.loads((tmp_path / "run/step-00000011/state.json").read_text())["moments_begun"] == 10
    train(config, "--stop-at-step", "12")  # and it is still known
    assert json.loads((tmp_path / "run/step-00000012/state.json").read_text())["moments_begun"] == 10


def test_another_loss_scale_is_taken_when_it_is_accepted(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = make_config(tmp_path, model, corpus, checkpoint={"every": 1})
    train(config, "--stop-at-step", "1")
    half = ("--set", "precision.compute=fp16", "--accept-changes")
    train(config, *half, "--set", "precision.initial_scale=1024", "--stop-at-step", "2")
    train(config, *half, "--set", "precision.initial_scale=256", "--stop-at-step", "3")
    train(config, *half, "--set", "precision.initial_scale=256", "--set", "optimizer.lr=0.001", "--stop-at-step", "4")
    lines = [line for line in log_lines(tmp_path / "run/log.jsonl") if line["kind"] == "step"]
    assert [line["scale"] for line in lines] == [1.0, 1024.0, 256.0, 256.0]


def test_what_of_config_json_is_not_trained_is_noted(tmp_path: Path, corpus: Path) -> None:
    model = make_model(tmp_path / "model", attention_dropout=0.5)
    done = train(make_config(tmp_path, model, corpus), "--stop-at-step", "1")
    assert "`attention_dropout`, 0.5, is not applied" in done.stdout


def test_ctrl_c_saves_as_sigterm_does(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = make_config(tmp_path, model, corpus, checkpoint={"every": 100}, schedule={"total_steps": 5000})
    process = subprocess.Popen(command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run/log.jsonl"
    while not log.exists() or log.read_text().count('"kind": "step"') < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "stopped by SIG" in said
    assert len(list((tmp_path / "run").glob("step-*"))) == 1


def test_a_trial_that_is_stopped_has_no_answers(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = make_config(tmp_path, model, corpus, schedule={"total_steps": 5000})
    process = subprocess.Popen([*command(config), "--smoke"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "      2 " not in process.stderr.readline():  # the table's row of the second update
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said, more = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and "terminated" in more and "trial of" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "corpus.jsonl", "model"]


def test_a_signal_after_the_last_word_changes_nothing() -> None:
    end = "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGTERM)"
    script = f"{end}; sys.argv = ['ckptkit', '--version']; from ckptkit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("ckptkit ")


def test_a_held_out_loss_that_is_no_number_is_never_the_best(tmp_path: Path, corpus: Path) -> None:
    """One token of the held-out set has NaN for its embedding; training, which never meets it, goes on and saves."""
    model = make_model(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(model / "model.safetensors")
    letter = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]["Q"]
    weights["model.embed_tokens.weight"][letter] = np.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    held = tmp_path / "held.jsonl"
    held.write_text('{"text": "QQQQ"}\n')
    config = make_config(
        tmp_path, model, corpus, checkpoint={"every": 1, "keep_best": True}, eval={"path": str(held), "every": 1}
    )
    done = train(config, "--stop-at-step", "2")
    assert "the held-out loss at step 2 is nan" in done.stdout
    assert json.loads((tmp_path / "run/step-00000002/state.json").read_text())["best"] is None
