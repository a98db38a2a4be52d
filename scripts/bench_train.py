"""The benchmark of `ckptkit resume-train`: run it as `scripts/bench train`.

    step       seconds of an update against torch with the same model, both in turn, in processes of their own
    save       how long saves hold up the run, how much slower it is while one is written, and what a run that goes on
               from one spends before its first update: verify, load, framework, compilation
    recompute  what recompute of every layer saves and costs

These are `--sections`. Ratios are taken in each round; the median decides. CPU seconds are those of all threads of the
process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import train_subjects
import yaml
from bench_convert import names
from benchlib import MIB, Goal, goals_table, ratio, turned

HERE = Path(__file__).parent
SECTIONS = ("step", "save", "recompute")
Found = dict[str, Any]


def subject(name: str, size: str, steps: int) -> Found:
    """Run a subject of `train_subjects.py` and return its figures."""
    command = [sys.executable, str(HERE / "train_subjects.py"), name, size, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {size} failed:\n{done.stderr[-2000:]}")
    found: Found = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_rounds(section: str, names: Sequence[str], size: str, rounds: int, steps: int) -> dict[str, list[Found]]:
    """Run the subjects once a round, in an order that turns, and return the figures of each."""
    runs: dict[str, list[Found]] = {name: [] for name in names}
    for number in range(rounds):
        for name in turned(names, number):
            say(f"{section} {size}: round {number + 1} of {rounds}: {name}")
            runs[name].append(subject(name, size, steps))
    return runs


def medians(runs: Sequence[Found], figure: str) -> tuple[float, ...]:
    """Return the median of a figure over the updates of each round."""
    return tuple(statistics.median(run[figure]) for run in runs)


def steps_section(size: str, rounds: int, steps: int) -> list[Goal]:
    """Compare updates with torch's."""
    runs = in_rounds("step", ("ours", "torch"), size, rounds, steps)
    ours, torch = runs["ours"], runs["torch"]
    best = ratio([min(run["wall"]) for run in ours], [min(run["wall"]) for run in torch])
    cpu = ratio(medians(ours, "cpu"), medians(torch, "cpu"))
    pairs = zip(ours, torch, strict=True)
    apart = max(abs(x - y) for a, b in pairs for x, y in zip(a["losses"][:10], b["losses"][:10], strict=True))
    return [
        Goal(f"{size}: CPU seconds of an update over torch's", cpu, 2.2, at_least=False),
        Goal(f"{size}: best wall time of an update over torch's best", best, 2.2, at_least=False),
        Goal(f"{size}: an update, ms", tuple(1e3 * seconds for seconds in medians(ours, "wall"))),
        Goal(f"{size}: torch's, ms", tuple(1e3 * seconds for seconds in medians(torch, "wall"))),
        Goal(f"{size}: the first update, compilation included, s", tuple(run["first"] for run in ours)),
        Goal(f"{size}: largest difference of losses, ten updates, millionths", (1e6 * apart,)),
    ]


def recompute_section(size: str, rounds: int, steps: int) -> list[Goal]:
    """Compare updates with and without recompute."""
    runs = in_rounds("recompute", ("ours", "ours-recompute"), size, rounds, steps)
    some, none = runs["ours-recompute"], runs["ours"]
    if any(a["losses"] != b["losses"] for a, b in zip(some, none, strict=True)):
        raise SystemExit("recompute changed the losses")
    memory = [run["step_bytes"] for run in none]
    return [
        Goal(f"{size}: memory of updates, recompute over none", ratio([run["step_bytes"] for run in some], memory)),
        Goal(f"{size}: CPU seconds, recompute over none", ratio(medians(some, "cpu"), medians(none, "cpu"))),
        Goal(f"{size}: memory of updates without, MiB", tuple(size_bytes / MIB for size_bytes in memory)),
    ]


def run_sections(folder: Path, rounds: int, every: int) -> list[Goal]:
    """Train 20 M parameters with a save each `every` updates, and go on from it once."""
    from safetensors.numpy import save_file

    model = folder / "model"
    model.mkdir()
    config = train_subjects.config_of("20M")
    (model / "config.json").write_text(json.dumps(config))
    save_file(train_subjects.weights_of(shapes_of(config)), model / "model.safetensors", metadata={"format": "pt"})
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], (64, train_subjects.TOKENS + 1))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids))
    stalls, slower, recoveries = [], [], []
    for number in range(rounds):
        say(f"save and recovery: round {number + 1} of {rounds}")
        settings = folder / f"{number}.yaml"
        settings.write_text(yaml.safe_dump(_settings(folder, number, every)))
        train(settings, 3 * every)
        lines = [json.loads(line) for line in (folder / f"run{number}" / "log.jsonl").read_text().splitlines()]
        updates = [line for line in lines if line["kind"] == "step"][every:]
        seconds = statistics.median(line["step_seconds"] for line in updates)
        stalls.append(sum(line["save_stall"] for line in updates) / len(updates) / seconds)
        after = [line["step_seconds"] for line in updates if line["step"] % every == 1]
        slower.append(statistics.median(after) / seconds)
        recoveries.append(train(settings, 3 * every + 1)["seconds"])
    parts = dict.fromkeys(name for row in recoveries for name in row)
    return [
        Goal("20M: stall by saves, averaged over the interval, of an update", tuple(stalls), 0.1, at_least=False),
        Goal("20M: the update beside a save, over one that is alone", tuple(slower)),
        *(Goal(f"20M: recovery, {name}, s", tuple(row.get(name, 0.0) for row in recoveries)) for name in parts),
    ]


def _settings(folder: Path, number: int, every: int) -> Found:
    return {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "corpus.jsonl"), "seq_length": train_subjects.TOKENS},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "schedule": {"total_steps": 1000},
        "training": {"batch_size": train_subjects.ROWS},
        "checkpoint": {"folder": str(folder / f"run{number}"), "every": every},
        "log": {"console": False},
    }


def train(settings: Path, stop: int) -> Found:
    """Run the command up to a step, and return its report."""
    words = ["resume-train", str(settings), "--stop-at-step", str(stop), "--json", "--no-progress"]
    done = subprocess.run([sys.executable, "-m", "ckptkit", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"resume-train failed:\n{done.stderr[-2000:]}")
    found: Found = json.loads(done.stdout)
    return found


def shapes_of(config: Found) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tied Llama by HuggingFace's names."""
    from ckptkit.verification.runners.dialects import find_dialect, parameter_shapes
    from ckptkit.verification.runners.facts import read_facts

    facts = read_facts(config)
    return {name: tuple(shape) for name, shape in parameter_shapes(find_dialect("hf", "", facts), facts).items()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="measured updates of a subject")
    parser.add_argument("--every", type=int, default=10, help="updates between two saves")
    parser.add_argument("--sections", type=names(SECTIONS), default=list(SECTIONS), help=f"out of {','.join(SECTIONS)}")
    args = parser.parse_args(argv)
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="ckptkit-bench-train-") as scratch:
        if "step" in args.sections:
            for size in train_subjects.SIZES:
                goals += steps_section(size, args.rounds, args.steps)
        if "save" in args.sections:
            goals += run_sections(Path(scratch), args.rounds, args.every)
        if "recompute" in args.sections:
            goals += recompute_section("20M", args.rounds, args.steps)
    print(goals_table(goals))
    return 0


if __name__ == "__main__":
    sys.exit(main())
