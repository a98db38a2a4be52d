"""Kill training runs at random moments, run the same command again, and compare with a run that nobody killed.

    scripts/killtrain --count 50 --modes fp32,fp16,dropout,accumulate,adaptive

For each mode: one run to the end; then `count` runs of the same config, each killed with SIGKILL once or twice, at a
moment drawn from the updates that are left (now and then from what comes before the first), every second time inside of
a save, and run again until it ends. A run that ended before it was killed does not count. All must have, for each step,
the same loss, gradient norm, learning rate, scale, epoch and rows, and in the end the same digest of every tensor and
the same state. Prints a line a run; the exit code is 1 when one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tiny_runs import by_step, command, log_lines, make_config, make_corpus, make_model

MODES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fp32": {},
    "fp16": {"precision": {"compute": "fp16", "initial_scale": 2.0**24, "growth_interval": 4}},
    "dropout": {"training": {"dropout": 0.2, "seed": 7}},
    "accumulate": {"training": {"batch_size": 6, "micro_batch": 2}},
    # more than any machine needs is over this limit, so every decision is taken, and at the same steps
    "adaptive": {"training": {"adaptive": {"enabled": True, "limit": "1MB", "patience": 2}}},
}
KEYS = ("loss", "grad_norm", "lr", "scale", "overflows", "epoch", "ids", "micro_batch", "recompute")
LIMIT_SECONDS = 240


def result_of(run: Path) -> tuple[dict[int, tuple[Any, ...]], dict[str, str], str]:
    """Return what counts of a run: figures by step, the digest of each tensor, the last state."""
    last = max(run.glob("step-*"))
    manifest = json.loads((last / "ckptkit.json").read_text())
    digests = {name: row["xxh3_128"] for name, row in manifest["tensors"].items()}
    return by_step(steps_of(run), *KEYS), digests, (last / "state.json").read_text()


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of updates; AssertionError when a step that was run twice was not the same both times."""
    lines = [line for line in log_lines(run / "log.jsonl") if line["kind"] == "step"]
    seen: dict[int, tuple[Any, ...]] = {}
    for line in lines:
        row = by_step([line], *KEYS)[line["step"]]
        assert seen.setdefault(line["step"], row) == row, f"step {line['step']} was not the same twice"
    return lines


def run_to_end(config: Path) -> tuple[float, str]:
    """Run the command to its end; return seconds and what it printed."""
    started = time.monotonic()
    done = subprocess.run(command(config), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return time.monotonic() - started, done.stdout


def kill_once(config: Path, run: Path, step: int, delay: float, *, in_save: bool) -> str:
    """Start the command and kill it `delay` seconds after update `step`, or inside of the first save after that.

    Returns a word on where it was killed, none when it had ended.
    """
    process = subprocess.Popen(
        command(config), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and last_step(run) < step:
        time.sleep(0.002)
    time.sleep(delay)
    while in_save and process.poll() is None and not any(run.glob(".tmp-step-*")):
        time.sleep(0.0005)
    ended = process.poll() is not None
    if not ended:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return "" if ended else f"in a save after {step}" if in_save else f"{delay:.3f} s after {step}"


def last_step(run: Path) -> int:
    """Return the number of the last update that the log has, 0 where it has none."""
    file, last = run / "log.jsonl", 0
    for line in file.read_bytes().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):  # a line that is being written
            row = json.loads(line)
            last = max(last, row["step"]) if row["kind"] == "step" else last
    return last


def try_mode(folder: Path, mode: str, count: int, seed: int, shared: Mapping[str, Path]) -> int:
    """Run a mode `count` times with kills; return how many were not what the run without kills was."""
    straight = _config(folder / mode / "straight", mode, shared)
    seconds, _ = run_to_end(straight)
    want = result_of(straight.parent / "run")
    print(f"{mode}: straight run of {len(want[0])} updates, {seconds:.1f} s", flush=True)
    chance, bad, number = random.Random(f"{mode} {seed}"), 0, 0
    while number < count:
        config = _config(folder / mode / f"{number}-{chance.randrange(10**9)}", mode, shared)
        run, kills = config.parent / "run", []
        for _ in range(chance.choice([1, 1, 2])):
            early = chance.random() < 0.1
            step = 0 if early else chance.randint(last_step(run), len(want[0]) - 2)
            delay = chance.random() * (0.8 * seconds if early else 0.1)
            kills += [word for word in [kill_once(config, run, step, delay, in_save=number % 2 == 1)] if word]
        _, said = run_to_end(config)
        begun = next((line for line in said.splitlines() if line.startswith("resumed from step")), "begun again")
        same = result_of(run) == want
        bad += not same
        number += bool(kills)
        print(
            f"{mode}: killed {', '.join(kills) or 'too late'}; {begun}: {'same' if same else 'DIFFERENT'}", flush=True
        )
    return bad


def _config(folder: Path, mode: str, shared: Mapping[str, Path]) -> Path:
    folder.mkdir(parents=True)
    sections = {section: dict(keys) for section, keys in MODES[mode].items()}
    sections["checkpoint"] = {"folder": str(folder / "run"), "every": 2, "keep_last": 3}
    return make_config(folder, shared["model"], shared["corpus"], **sections)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="killed runs of each mode")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep all runs here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="ckptkit-killtrain-") as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        shared = {"model": make_model(folder / "model"), "corpus": make_corpus(folder / "corpus.jsonl")}
        bad = sum(try_mode(folder, mode, args.count, args.seed, shared) for mode in args.modes.split(","))
    print("all the same" if not bad else f"{bad} runs were DIFFERENT")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
