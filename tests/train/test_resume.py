"""The contract of `resume-train`: a stopped run, run again, ends with the bits of one that nobody stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from kill_training import MODES, kill_once, result_of, run_to_end, steps_of
from tiny_runs import by_step, command, log_lines, make_config, make_corpus, make_model, train

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "hf")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", documents=18)


def config_in(folder: Path, model_folder: Path, corpus_file: Path, **sections: Any) -> Path:
    """Write the config of a run of 12 updates, over more than one epoch, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    sections["schedule"] = {"total_steps": 12, "warmup_steps": 5, **sections.get("schedule", {})}
    sections["checkpoint"] = {
        "folder": str(folder / "run"),
        "every": 2,
        "keep_last": 3,
        **sections.get("checkpoint", {}),
    }
    return make_config(folder, model_folder, corpus_file, **sections)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model: Path, corpus: Path) -> dict[str, Any]:
    """What a run in each mode gives that nobody stops."""
    found = {}
    for mode, sections in MODES.items():
        folder = tmp_path_factory.mktemp("straight") / mode
        config = config_in(folder, model, corpus, **{key: dict(value) for key, value in sections.items()})
        _, said = run_to_end(config)
        assert said.startswith("resumed from step 0\n")
        found[mode] = result_of(folder / "run")
    return found


def test_a_run_that_was_stopped_three_times_is_the_run_that_was_not(
    straight: dict[str, Any], tmp_path: Path, model: Path, corpus: Path
) -> None:
    """Stopped in the warm-up, at the end of an epoch, and one update before the end; the learning rate goes on."""
    config = config_in(tmp_path, model, corpus)
    for stop in (3, 6, 11):
        done = train(config, "--stop-at-step", str(stop))
        assert f"step {stop} of 12" in done.stdout
    assert train(config).stdout.startswith("resumed from step 11\n")
    assert result_of(tmp_path / "run") == straight["fp32"]
    assert len(steps_of(tmp_path / "run")) == 12


def test_every_row_of_an_epoch_is_seen_once_however_often_the_run_was_resumed(
    tmp_path: Path, model: Path, corpus: Path
) -> None:
    config = config_in(tmp_path, model, corpus)
    for stop in (1, 4, 7, 12):
        train(config, "--stop-at-step", str(stop))
    rows: dict[int, list[int]] = {}
    for line in steps_of(tmp_path / "run"):
        rows.setdefault(line["epoch"], []).extend(line["ids"])
    counts = [len(ids) for ids in rows.values()]
    assert len(rows) > 1 and len(set(counts[:-1])) == 1
    for ids in rows.values():
        assert len(set(ids)) == len(ids)
    assert sorted(rows[0]) == list(range(counts[0]))
    assert rows[0] != rows[1][: counts[0]]  # another order


@pytest.mark.parametrize(("mode", "in_save"), [("fp32", True), ("fp16", False), ("dropout", True),
                                               ("accumulate", False), ("adaptive", True)])  # fmt: skip
def test_a_run_that_was_killed_is_the_run_that_was_not(
    straight: dict[str, Any], tmp_path: Path, model: Path, corpus: Path, mode: str, in_save: bool
) -> None:
    """Two kills each, at moments that a seed gives; `scripts/killtrain` is the long form."""
    config = config_in(tmp_path, model, corpus, **{key: dict(value) for key, value in MODES[mode].items()})
    run, chance = tmp_path / "run", random.Random(mode)
    kills = []
    for most in (4, 8):
        step = chance.randint(0, most)
        kills.append(kill_once(config, run, step, chance.random() * 0.01, in_save=in_save))
    assert any(kills), "it ended before it was killed"
    run_to_end(config)
    assert result_of(run) == straight[mode]


def test_the_comparison_sees_another_run(straight: dict[str, Any], tmp_path: Path, model: Path, corpus: Path) -> None:
    """The control: a run whose rows come in another order is not the same in any of the three ways."""
    config = config_in(tmp_path, model, corpus, data={"seed": 1})
    run_to_end(config)
    found = result_of(tmp_path / "run")
    assert all(mine != theirs for mine, theirs in zip(found, straight["fp32"], strict=True))


def test_modes_differ_where_they_should(straight: dict[str, Any]) -> None:
    """The controls of the modes: dropout and fp16 alter the losses, adaptive decisions were taken."""
    losses = {mode: [row[0] for row in result[0].values()] for mode, result in straight.items()}
    assert losses["fp32"] != losses["fp16"] and losses["fp32"] != losses["dropout"]
    micro = [row[7] for row in straight["adaptive"][0].values()]
    assert micro[0] == 4 and micro[-1] == 1
    overflows = [row[4] for row in straight["fp16"][0].values()]
    assert overflows[0] > 0  # the first scale is too large on purpose


def test_sigterm_saves_and_exits_0(straight: dict[str, Any], tmp_path: Path, model: Path, corpus: Path) -> None:
    config = config_in(tmp_path, model, corpus, checkpoint={"every": 100})
    log = tmp_path / "run/log.jsonl"
    process = subprocess.Popen(command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not log.exists() or log.read_text().count('"step"') < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    steps = [line["step"] for line in steps_of(tmp_path / "run")]
    if steps[-1] < 12:
        assert "stopped by SIGTERM" in out
    assert (tmp_path / f"run/step-{steps[-1]:08d}/ckptkit.json").is_file()
    assert f"resumed from step {steps[-1]}" in train(config).stdout
    assert result_of(tmp_path / "run")[:2] == straight["fp32"][:2]


def test_a_damaged_checkpoint_is_passed_over_with_a_message(
    straight: dict[str, Any], tmp_path: Path, model: Path, corpus: Path
) -> None:
    config = config_in(tmp_path, model, corpus)
    train(config, "--stop-at-step", "6")
    os.truncate(tmp_path / "run/step-00000006/training_state/state-00001-of-00001.safetensors", 3000)
    done = train(config)
    assert "resumed from step 4\n" in done.stdout
    assert "passed over: `step-00000006` is not whole" in done.stdout
    assert result_of(tmp_path / "run") == straight["fp32"]


def test_a_run_with_nothing_but_damaged_checkpoints_never_begins_anew(
    tmp_path: Path, model: Path, corpus: Path
) -> None:
    config = config_in(tmp_path, model, corpus)
    train(config, "--stop-at-step", "2")
    os.truncate(tmp_path / "run/step-00000002/model.safetensors", 100)
    done = train(config, code=5)
    assert "none of the 1 checkpoints" in done.stderr and "Traceback" not in done.stderr


def test_lost_moments_are_refused_unless_told(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = config_in(tmp_path, model, corpus)
    train(config, "--stop-at-step", "2")
    shutil.rmtree(tmp_path / "run/step-00000002/training_state")
    done = train(config, code=5)
    assert "--without-optimizer" in done.stderr
    done = train(config, "--without-optimizer", "--stop-at-step", "3")
    assert "resumed from step 2" in done.stdout and "moments" in done.stdout


def test_settings_that_alter_the_maths_are_refused_and_others_are_not(
    tmp_path: Path, model: Path, corpus: Path
) -> None:
    config = config_in(tmp_path, model, corpus)
    train(config, "--stop-at-step", "2")
    done = train(config, "--set", "optimizer.lr=0.5", code=2)
    assert "optimizer.lr: 0.003 -> 0.5" in done.stderr and "--accept-changes" in done.stderr
    other = make_corpus(tmp_path / "other.jsonl", documents=20, seed=1)
    done = train(config, "--set", f"data.path={other}", code=2)
    assert "the corpus" in done.stderr
    done = train(config, "--set", "optimizer.lr=0.5", "--accept-changes", "--stop-at-step", "3")
    assert "changed since step 2: optimizer.lr" in done.stdout
    done = train(config, "--set", "optimizer.lr=0.5", "--set", "checkpoint.every=1", "--set", "recompute.layers=all",
                 "--stop-at-step", "4")  # fmt: skip
    assert "resumed from step 3" in done.stdout


def test_recompute_changes_no_bit(straight: dict[str, Any], tmp_path: Path, model: Path, corpus: Path) -> None:
    config = config_in(tmp_path, model, corpus, recompute={"layers": "all"})
    run_to_end(config)
    found, want = result_of(tmp_path / "run"), straight["fp32"]
    assert found[1] == want[1]
    assert {step: row[:-1] for step, row in found[0].items()} == {step: row[:-1] for step, row in want[0].items()}


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path, model: Path, corpus: Path) -> None:
    import fcntl

    config = config_in(tmp_path, model, corpus)
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/.lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        done = train(config, code=2)
    assert "another process trains" in done.stderr


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, model: Path, corpus: Path) -> None:
    """The rate is absurd, so the weights run away; the checkpoints before stay as they are."""
    config = config_in(
        tmp_path, model, corpus, optimizer={"lr": 1e30, "clip_norm": None}, checkpoint={"every": 1},
        schedule={"kind": "constant", "warmup_steps": 0},
    )  # fmt: skip
    done = train(config, code=6)
    assert "is not finite at step" in done.stderr and "optimizer.lr" in done.stderr and "Traceback" not in done.stderr
    last = steps_of(tmp_path / "run")[-1]["step"]
    assert (tmp_path / f"run/step-{last:08d}/ckptkit.json").is_file()


def test_nothing_is_left_to_do_after_the_last_step(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = config_in(tmp_path, model, corpus, schedule={"total_steps": 2, "warmup_steps": 0})
    train(config)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    done = train(config)
    assert "resumed from step 2" in done.stdout and "nothing to do" in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert len(steps_of(tmp_path / "run")) == 2


def test_the_report_as_json_is_all_that_stdout_holds(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = config_in(tmp_path, model, corpus)
    done = train(config, "--stop-at-step", "1", "--json")
    report = json.loads(done.stdout)
    assert report["ok"] and report["step"] == 1 and report["resumed_from"] == 0
    assert "resumed from step 0" in done.stderr
    assert by_step(log_lines(tmp_path / "run/log.jsonl")[-2:-1], "kind") or report["loss"]


def test_a_trial_answers_its_questions_and_leaves_nothing(tmp_path: Path, model: Path, corpus: Path) -> None:
    config = config_in(tmp_path, model, corpus)
    found = json.loads(train(config, "--smoke", "--json").stdout)["smoke"]
    assert found["steps"] == 12 and found["rows"] == 4 < found["all_rows"]
    assert found["falls"] and found["fits"] and found["loads_back"] and found["has_room"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"]


def test_moments_of_weights_that_were_frozen_are_asked_for(tmp_path: Path, model: Path, corpus: Path) -> None:
    """A checkpoint has none of them: they begin at zero when that is said, and never in silence."""
    config = config_in(tmp_path, model, corpus, optimizer={"freeze": ["*embed_tokens*"]})
    train(config, "--stop-at-step", "2")
    thawed = ("--set", "optimizer.freeze=[]", "--accept-changes", "--stop-at-step", "3")
    done = train(config, *thawed, code=3)
    assert "lacks 2 moments" in done.stderr and "--without-optimizer" in done.stderr
    done = train(config, *thawed, "--without-optimizer")
    assert "2 moments begin at zero" in done.stdout and "resumed from step 2" in done.stdout
