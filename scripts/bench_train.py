"""The benchmark of `ckptkit resume-train`: run it as `scripts/bench train`.

    step       seconds of an update against torch with the same model, both in turn, in processes of their own
    save       how long saves hold up the run, and how much slower it is while one is written
    recovery   what a run that goes on spends before its first update: verify, load, framework, compilation
    recompute  what recompute of every layer saves and costs

Ratios are taken in each round; the median decides. CPU seconds are those of all threads of the process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import train_subjects
import yaml
from benchlib import MIB, Goal

HERE = Path(__file__).parent
Found = dict[str, Any]


def subject(name: str, size: str, steps: int) -> Found:
    """Run a subject of `train_subjects.py` and return its figures."""
    command = [sys.executable, str(HERE / "train_subjects.py"), name, size, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {size} failed:\n{done.stderr[-2000:]}")
    found: Found = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def steps_section(size: str, rounds: int, steps: int) -> list[Goal]:
    """Compare updates with torch's."""
    runs: dict[str, list[Found]] = {"ours": [], "torch": []}
    for number in range(rounds):
        for name in ("ours", "torch") if number % 2 == 0 else ("torch", "ours"):
            say(f"step {size}: round {number + 1} of {rounds}: {name}")
            runs[name].append(subject(name, size, steps))
    pairs = list(zip(runs["ours"], runs["torch"], strict=True))
    cpu = tuple(statistics.median(a["cpu"]) / statistics.median(b["cpu"]) for a, b in pairs)
    best = tuple(min(a["wall"]) / min(b["wall"]) for a, b in pairs)
    apart = max(abs(x - y) for a, b in pairs for x, y in zip(a["losses"], b["losses"], strict=True))
    return [
        Goal(f"{size}: CPU seconds of an update over torch's", cpu, 2.2, at_least=False),
        Goal(f"{size}: best wall time of an update over torch's best", best, 2.2, at_least=False),
        Goal(f"{size}: an update", tuple(statistics.median(a["wall"]) for a, _ in pairs), unit="s"),
        Goal(f"{size}: torch's", tuple(statistics.median(b["wall"]) for _, b in pairs), unit="s"),
        Goal(f"{size}: the first update, compilation included", tuple(a["first"] for a, _ in pairs), unit="s"),
        Goal(f"{size}: largest difference of losses", (apart,)),
    ]


def recompute_section(size: str, rounds: int, steps: int) -> list[Goal]:
    """Compare updates with and without recompute."""
    runs: dict[str, list[Found]] = {"ours": [], "ours-recompute": []}
    for number in range(rounds):
        for name in runs:
            say(f"recompute {size}: round {number + 1} of {rounds}: {name}")
            runs[name].append(subject(name, size, steps))
    pairs = list(zip(runs["ours-recompute"], runs["ours"], strict=True))
    same = all(a["losses"] == b["losses"] for a, b in pairs)
    if not same:
        raise SystemExit("recompute changed the losses")
    memory = tuple(a["step_bytes"] / b["step_bytes"] for a, b in pairs)
    return [
        Goal(f"{size}: memory of updates, recompute over none", memory),
        Goal(
            f"{size}: CPU seconds, recompute over none",
            tuple(statistics.median(a["cpu"]) / statistics.median(b["cpu"]) for a, b in pairs),
        ),
        Goal(f"{size}: memory of updates without", tuple(b["step_bytes"] / MIB for _, b in pairs), unit="MiB"),
    ]  # fmt: skip


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
    names = dict.fromkeys(name for row in recoveries for name in row)
    return [
        Goal("20M: stall by saves, averaged over the interval, of an update", tuple(stalls), 0.1, at_least=False),
        Goal("20M: the update beside a save, over one that is alone", tuple(slower)),
        *(Goal(f"20M: recovery, {name}", tuple(row.get(name, 0.0) for row in recoveries), unit="s") for name in names),
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
    parser.add_argument("--sections", default="step,save,recompute")
    args = parser.parse_args(argv)
    wanted = args.sections.split(",")
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="ckptkit-bench-train-") as scratch:
        sections: dict[str, list[Callable[[], list[Goal]]]] = {
            "step": [lambda s=size: steps_section(s, args.rounds, args.steps) for size in train_subjects.SIZES],
            "save": [lambda: run_sections(Path(scratch), args.rounds, args.every)],
            "recompute": [lambda: recompute_section("20M", args.rounds, args.steps)],
        }
        for name in wanted:
            for section in sections[name]:
                goals += section()
    for goal in goals:
        low, high = min(goal.values), max(goal.values)
        limit = "" if goal.limit is None else f"  at most {goal.limit:g}: {goal.state}"
        unit = f" {goal.unit}" if goal.unit else ""
        print(f"{goal.text:<62} {statistics.median(goal.values):.4g} ({low:.4g}-{high:.4g}){unit}{limit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
