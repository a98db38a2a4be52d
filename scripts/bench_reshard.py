"""The benchmark of `ckptkit reshard`: run it as `scripts/bench reshard`.

Each step changes the layout of one model: 1 rank to 4, 4 to 2, 4 to 3; the source is what this ckptkit's `convert`
writes. `cp` of the source, with `sync` of its copies, is as many bytes as the result has (replicas of norms aside). The
peer is MindSpore's own `transform_checkpoints`, on the same `.ckpt` shards. The plan section is planning alone.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_models
import bench_moe
from bench_convert import add_common, measure
from bench_peers import strategy_beside
from bench_sections import (
    BASE_MIB,
    CP,
    CP_SYNC,
    NO_DIGEST,
    OURS,
    SLICE_BYTES,
    START,
    Context,
    Section,
    ckptkit,
    less,
    peer,
    shell,
)
from benchlib import MIB, Goal, Measured, Subject, ratio

PEER = "mindspore"
ONE_WORKER = f"{NO_DIGEST} --workers 1"
QWEN3_LAYOUT = ("--pp", "8", "--mp", "4", "--ep", "8")
QWEN3_RANKS = 64


def reshard(*options: str) -> Callable[[Path, Path], list[str]]:
    """Return the command that gives a folder another layout."""

    def command(source: Path, target: Path) -> list[str]:
        line = ["reshard", str(source), str(target), "--no-progress", *options]
        return [sys.executable, "-m", "ckptkit", *line]

    return command


def step(context: Context, title: str, before: int, after: int, least: float | None) -> Section:
    """Measure a step of `before` ranks to `after`; `least` is the goal for its speed, None where it is only stated."""
    big, model, tiny_hf = _inputs(context, by_three=after % 3 == 0)
    source = _sharded(context, big, "--mp", str(before))
    tiny = _sharded(context, tiny_hf, "--mp", str(before))
    layout, alone = ("--mp", str(after)), ("--no-digest", "--workers", "1")
    copy, sync = 'cp -r "$1" "$2"', 'find "$2" -type f -exec sync {} +'
    subjects = [
        Subject(OURS, "fsyncs; xxh3-128 of both sides", reshard(*layout), source, tiny, model.num_bytes),
        Subject(NO_DIGEST, "fsyncs", reshard(*layout, "--no-digest"), source, tiny, model.num_bytes),
        Subject(ONE_WORKER, "one thread, as cp has", reshard(*layout, *alone), source, tiny, model.num_bytes),
        Subject(START, "the same command on a tiny model", reshard(*layout), tiny, tiny),
        Subject(CP, "no fsync", shell(copy), source, tiny, model.num_bytes),
        Subject(CP_SYNC, "fsyncs", shell(f"{copy} && {sync}"), source, tiny, model.num_bytes),
    ]
    results = context.bench.rounds(subjects, context.rounds)
    goals = step_goals(results, _num_slices(context, reshard(*layout), source), least)
    shutil.rmtree(_sources(context))
    return Section(f"{title}, {model.num_tensors} bf16 tensors, {model.num_bytes / 1e9:.2f} GB", results, goals)


def step_goals(results: Sequence[Measured], num_slices: int, least: float | None) -> list[Goal]:
    """Return the figures of a step; `the step itself` is the CPU time without start-up."""
    cpu = {result.name: result.values("cpu_s") for result in results}
    net = {name: less(cpu[name], cpu[START]) for name in (OURS, NO_DIGEST, ONE_WORKER)}
    anonymous = next(result.values("anonymous_bytes") for result in results if result.name == OURS)
    return [
        Goal("speed of the step itself, no digests, over cp + sync", ratio(cpu[CP_SYNC], net[NO_DIGEST]), least),
        Goal("the same, no digests, one worker, over cp + sync", ratio(cpu[CP_SYNC], net[ONE_WORKER]), least),
        Goal("speed of the step itself, digests, over cp + sync", ratio(cpu[CP_SYNC], net[OURS]), least),
        Goal("the same, no digests, over cp that does not fsync", ratio(cpu[CP], net[NO_DIGEST])),
        Goal("the same, digests, over cp that does not fsync", ratio(cpu[CP], net[OURS])),
        law(anonymous, num_slices),
    ]


def law(anonymous_bytes: Sequence[float], num_slices: int) -> Goal:
    """Return the promise of every plan, 64 MiB and 4 KiB for each of its slices, as ckptkit counts them."""
    limit = round(BASE_MIB + num_slices * SLICE_BYTES / MIB, 1)
    return Goal("anonymous memory", tuple(value / MIB for value in anonymous_bytes), limit, False, "MiB")


def peer_section(context: Context) -> Section:
    """4 ranks to 2 in `.ckpt`, against MindSpore's own tool."""
    big, model, tiny_hf = _inputs(context, by_three=False)
    source, tiny = (_sharded(context, folder, "--mp", "4", "--format", "ckpt") for folder in (big, tiny_hf))
    layout = ("--mp", "2")
    for folder in (source, tiny):
        _put_strategy_beside(context, folder, layout)
    subjects = [
        Subject(OURS, "fsyncs; xxh3-128 of both sides", reshard(*layout), source, tiny, model.num_bytes),
        Subject(START, "the same command on a tiny model", reshard(*layout), tiny, tiny),
        Subject(PEER, "transform_checkpoints", peer("mindspore_transform"), source, tiny, model.num_bytes),
    ]
    results = context.bench.rounds(subjects, context.rounds)
    goals = peer_goals(results, _num_slices(context, reshard(*layout), source))
    shutil.rmtree(_sources(context))
    return Section(f"mindspore: 4 ranks to 2, .ckpt, {model.num_bytes / 1e9:.2f} GB", results, goals)


def peer_goals(results: Sequence[Measured], num_slices: int) -> list[Goal]:
    """Return the figures of `peer_section`."""
    of = {result.name: result for result in results}
    cpu = {name: result.values("cpu_s") for name, result in of.items()}
    memory = {name: result.values("anonymous_bytes") for name, result in of.items()}
    inner = of[PEER].values("inner_cpu_s")
    return [
        Goal("CPU of MindSpore's over ours, whole processes", ratio(cpu[PEER], cpu[OURS]), 10),
        Goal("the same, start-up and imports of both taken off", ratio(inner, less(cpu[OURS], cpu[START]))),
        Goal("anonymous memory of MindSpore's over ours", ratio(memory[PEER], memory[OURS]), 40),
        law(memory[OURS], num_slices),
    ]


def plan_section(context: Context) -> Section:
    """A dry run of Qwen3-235B-A22B's shape, from HuggingFace to 64 ranks: planning alone; nobody reads the files."""
    sparse = bench_models.ensure_made(context.cache, "qwen3-235b", bench_moe.write)

    def command(*options: str) -> Callable[[Path, Path], list[str]]:
        dry_run = ckptkit(*QWEN3_LAYOUT, "--dry-run", *options)
        return lambda _, target: dry_run(sparse, target)

    note = "36,945 tensors, 470 GB of holes"
    subjects = [Subject("ckptkit --dry-run", note, command(), context.tiny, context.tiny)]
    results = context.bench.rounds(subjects, context.rounds)
    said = subprocess.run(command()(sparse, context.bench.scratch), capture_output=True, text=True, check=True).stdout
    plan = _dry_run(context, command("--json"), sparse)
    goals = [
        Goal("a dry run, start-up included", tuple(results[0].values("cpu_s")), 15.0, False, "CPU s"),
        law(results[0].values("anonymous_bytes"), plan["summary"]["slices"]),
        Goal("ranks whose bytes the report prints", (num_ranks_told(said),), QWEN3_RANKS),
        Goal("ranks whose bytes `--json` prints", (_num_ranks_planned(plan),), QWEN3_RANKS),
    ]
    return Section(f"plan: Qwen3-235B-A22B's shape, HF to {' '.join(QWEN3_LAYOUT)}", results, goals)


def num_ranks_told(report: str) -> float:
    """Return of how many ranks a report says what each writes: its rows are `3: writes ..` or `0..7: writes ..`."""
    rows = re.findall(r"(\d+)(?:\.\.(\d+))?: writes \d", report)
    return float(sum(int(last or first) - int(first) + 1 for first, last in rows))


def _num_ranks_planned(plan: dict[str, Any]) -> float:
    told = {file["name"].partition("/")[0] for file in plan["files"] if file["bytes"] > 0}
    return float(len(told | {name.partition("/")[0] for name in plan["links"]}))


def _inputs(context: Context, *, by_three: bool) -> tuple[Path, bench_models.Llama, Path]:
    """Return a HuggingFace checkpoint of the wanted size, its model, and a tiny one that every layout divides."""
    tiny = bench_models.ensure(context.cache, "llama-for-12-tiny", bench_models.tiny_for_12(), shards=1)
    if not by_three and bench_models.of_size(context.size).kv_heads % 4 == 0:
        return *context.big(), tiny
    model = bench_models.of_size_for_12(context.size)
    name = f"llama-for-12-{context.size // 10**6}MB"
    return bench_models.ensure(context.cache, name, model), model, tiny


def _sources(context: Context) -> Path:
    """Return the folder of sharded inputs, made anew by each section: what this ckptkit writes, not an older one."""
    return context.bench.scratch.with_name("sources")


def _sharded(context: Context, source: Path, *options: str) -> Path:
    """Return `source` under a layout."""
    target = _sources(context) / source.name
    target.parent.mkdir(exist_ok=True)
    _call(context, ckptkit(*options)(source, target))
    return target


def _put_strategy_beside(context: Context, source: Path, layout: Sequence[str]) -> None:
    """Give MindSpore's tool the strategy file of the layout that it is to make: the one that ckptkit writes."""
    made = source.with_name("made")
    _call(context, reshard(*layout)(source, made))
    shutil.copyfile(made / "strategy" / "ckpt_strategy_rank_0.ckpt", strategy_beside(source))
    shutil.rmtree(made)


def _num_slices(context: Context, command: Callable[[Path, Path], list[str]], source: Path) -> int:
    dry_run = [*command(source, source.with_name("none")), "--dry-run", "--json"]
    return int(json.loads(_call(context, dry_run))["summary"]["slices"])


def _dry_run(context: Context, command: Callable[[Path, Path], list[str]], source: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(_call(context, command(source, context.bench.scratch)))
    return plan


def _call(context: Context, command: Sequence[str]) -> str:
    """Run a command that is not measured, and return what it prints."""
    return subprocess.run(command, env=context.bench.env, stdout=subprocess.PIPE, text=True, check=True).stdout


SECTIONS: dict[str, Callable[[Context], Section]] = {
    "1to4": lambda context: step(context, "1to4: 1 rank to 4", 1, 4, 0.75),
    "4to2": lambda context: step(context, "4to2: 4 ranks to 2", 4, 2, 0.70),
    "4to3": lambda context: step(context, "4to3: 4 ranks to 3", 4, 3, None),
    "mindspore": peer_section,
    "plan": plan_section,
}


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench reshard", description="Measure `ckptkit reshard`.")
    add_common(parser, tuple(SECTIONS), default=tuple(SECTIONS))
    parser.set_defaults(peers=(), tensors=0)
    measure(parser.parse_args(args), SECTIONS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
