"""`ckptkit resume-train` and `ckptkit runs` as commands, where that takes few updates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_log_events import read_events
from tiny_runs import log_lines, make_config, make_corpus, make_model, train

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
