"""The sections of `scripts/bench convert`: inputs, subjects, and the figures with their goals.

ckptkit fsyncs what it writes, so `cp` is measured with `sync` of its output too, and that is the one it is held
against; the other peers do not fsync and are not charged for it. `ckptkit, start-up` is the same command on a tiny
model: it is taken off where a figure is about the work itself, and stated.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import bench_models
import bench_moe
from benchlib import INNER, LAZY, MIB, Bench, Goal, Measured, Subject, ratio

PEERS = ("cp", "safetensors", "transformers", "mergekit", "mindformers", "mindformers-bf16")
MORE_PEERS = ("transformers5",)  # measured when asked for
SLICE_BYTES = 4096
BASE_MIB = 64
OURS, NO_DIGEST, START = "ckptkit", "ckptkit --no-digest", "ckptkit, start-up"
CP, CP_SYNC = "cp", "cp, then sync"


@dataclass(frozen=True, slots=True)
class Context:
    """What the sections share: where inputs are, how much to measure, and of whom."""

    cache: Path
    rounds: int
    size: int
    num_small: int
    peers: frozenset[str]
    bench: Bench
    peers_python: Path | None

    @property
    def tiny(self) -> Path:
        return bench_models.ensure(self.cache, "llama-tiny", bench_models.tiny(), shards=1)

    def big(self) -> tuple[Path, bench_models.Llama]:
        model = bench_models.of_size(self.size)
        return bench_models.ensure(self.cache, f"llama-{self.size // 10**6}MB", model), model


@dataclass(frozen=True, slots=True)
class Section:
    """A section's outcome."""

    title: str
    results: Sequence[Measured]
    goals: Sequence[Goal]


def ckptkit(*options: str) -> Callable[[Path, Path], list[str]]:
    """Return the command that converts a folder for MindFormers."""

    def command(source: Path, target: Path) -> list[str]:
        convert = ["convert", str(source), str(target), "--to", "mindformers", "--no-progress"]
        return [sys.executable, "-m", "ckptkit", *convert, *options]

    return command


def peer(task: str, python: Path | str = sys.executable) -> Callable[[Path, Path], list[str]]:
    """Return the command of a task of `bench_peers.py`."""
    script = str(Path(__file__).with_name("bench_peers.py"))
    return lambda source, target: [str(python), "-P", script, task, str(source), str(target)]


def shell(line: str) -> Callable[[Path, Path], list[str]]:
    """Return a shell command in which `$1` is the source and `$2` the target."""
    return lambda source, target: ["sh", "-c", line, "sh", str(source), str(target)]


def copy_section(context: Context) -> Section:
    """HF bf16 safetensors to MindFormers naming: every byte moves, none changes."""
    source, model = context.big()
    tiny, least = context.tiny, model.num_bytes

    def subject(name: str, note: str, command: Callable[[Path, Path], list[str]]) -> Subject:
        return Subject(name, note, command, source, tiny, least)

    subjects = [
        subject(OURS, "fsyncs; xxh3-128 of each tensor", ckptkit()),
        subject(NO_DIGEST, "fsyncs", ckptkit("--no-digest")),
        Subject(START, "the same command on a tiny model", ckptkit(), tiny, tiny),
    ]
    copy = 'mkdir "$2" && cp "$1"/*.safetensors "$2"'
    if "cp" in context.peers:
        subjects.append(subject(CP, "no fsync", shell(copy)))
        subjects.append(subject(CP_SYNC, "fsyncs", shell(copy + ' && sync "$2"/*')))
    others = (
        ("safetensors", "load_file + save_file, shard by shard", "safetensors"),
        ("transformers", "from_pretrained + save_pretrained", "transformers"),
        ("mindformers", "its llama conversion as it is; writes fp32", "mindformers"),
        ("mindformers-bf16", "the same, told to write bf16", "mindformers_bf16"),
    )
    subjects += [subject(name, note, peer(task)) for name, note, task in others if name in context.peers]
    apart = (
        ("transformers5", "from_pretrained + save_pretrained", "transformers"),
        ("mergekit", "passthrough of one model", "mergekit"),
    )
    if context.peers_python is not None:
        python = context.peers_python
        subjects += [subject(name, note, peer(task, python)) for name, note, task in apart if name in context.peers]
    results = context.bench.rounds(subjects, context.rounds)
    results += [
        Measured(name, note, missing="its environment could not be installed")
        for name, note, _ in apart
        if name in context.peers and context.peers_python is None
    ]
    title = f"copy: {model.num_tensors} bf16 tensors, {model.num_bytes / 1e9:.2f} GB, HF -> MindFormers names"
    return Section(title, results, copy_goals(results, model.num_tensors))


def copy_goals(results: Sequence[Measured], num_tensors: int) -> list[Goal]:
    """Return the figures of `copy_section`; `net` is the CPU time without start-up."""
    cpu = {result.name: result.values("cpu_s") for result in results}
    inner = {result.name: result.values(INNER) for result in results}
    lazy = {result.name: result.values(LAZY) for result in results}
    anonymous = {result.name: result.values("anonymous_bytes") for result in results}
    both = {name: [a + b for a, b in zip(inner[name], lazy[name], strict=True)] for name in inner}
    net = {name: less(cpu[name], cpu[START]) for name in (OURS, NO_DIGEST)}
    goals = [
        Goal("speed of the copy itself, no digests, over cp + sync", ratio(cpu.get(CP_SYNC, ()), net[NO_DIGEST]), 0.70),
        Goal("speed of the copy itself, digests, over cp + sync", ratio(cpu.get(CP_SYNC, ()), net[OURS]), 0.60),
        Goal("the same, no digests, over cp that does not fsync", ratio(cpu.get(CP, ()), net[NO_DIGEST])),
        Goal("the same, digests, over cp that does not fsync", ratio(cpu.get(CP, ()), net[OURS])),
        memory_goal([a / MIB for a in anonymous[OURS]], num_tensors),
        Goal("speed of the copy itself over safetensors' in process", ratio(inner.get("safetensors", ()), net[OURS])),
        Goal(
            "... over transformers' in process, late imports included",
            ratio(both.get("transformers", ()), net[OURS]),
            2.5,
        ),
        Goal("... over transformers' in process, without these", ratio(inner.get("transformers", ()), net[OURS]), 2.5),
        Goal("... over transformers 5's, late imports included", ratio(both.get("transformers5", ()), net[OURS])),
        Goal("... over transformers 5's, without these", ratio(inner.get("transformers5", ()), net[OURS])),
    ]
    whole = (
        ("transformers", None),
        ("mergekit", 5.0),
        ("mindformers", 20.0),
        ("mindformers-bf16", 20.0),
    )
    goals += [Goal(f"whole process over {name}", ratio(cpu.get(name, ()), cpu[OURS]), least) for name, least in whole]
    return goals


def less(values: Sequence[float], start_up: Sequence[float]) -> list[float]:
    """Return each round's value without that round's start-up."""
    return [value - start for value, start in zip(values, start_up, strict=False)]


def start_section(context: Context) -> Section:
    """What a user waits for before anything happens."""
    source, model = context.big()

    def subject(name: str, *options: str) -> Subject:
        def command(source: Path, target: Path) -> list[str]:
            return [sys.executable, "-m", "ckptkit", *(str(source) if o == "SRC" else o for o in options)]

        return Subject(name, "", command, source, context.tiny)

    subjects = [subject("ckptkit --help", "--help"), subject("ckptkit inspect", "inspect", "SRC")]
    results = context.bench.rounds(subjects, context.rounds)
    goals = [Goal(r.name, tuple(r.values("cpu_s")), 0.25, False, "CPU s") for r in results]
    return Section(f"start-up: help, and inspect of 3 shards with {model.num_tensors} tensors", results, goals)


def bin_section(context: Context) -> Section:
    """A zip pickle as input: ours reads it without torch."""
    source, model = context.big()
    folder = bench_models.ensure_bin(context.cache, source, run_make_bin)
    tiny = bench_models.ensure_bin(context.cache, context.tiny, run_make_bin)
    subjects = [
        Subject(OURS, "fsyncs; xxh3-128 of each tensor", ckptkit(), folder, tiny, model.num_bytes),
        Subject(START, "the same command on a tiny model", ckptkit(), tiny, tiny),
        Subject("torch", "load + save as safetensors", peer("torch_bin"), folder, tiny, model.num_bytes),
    ]
    return _against_one(context, subjects, f"bin: pytorch_model.bin, {model.num_bytes / 1e9:.2f} GB", model)


def ckpt_section(context: Context) -> Section:
    """A MindSpore .ckpt as output, against MindSpore's own writer."""
    source, model = context.big()
    subjects = [
        Subject(OURS, "fsyncs; xxh3-128", ckptkit("--format", "ckpt"), source, context.tiny, model.num_bytes),
        Subject(START, "the same on a tiny model", ckptkit("--format", "ckpt"), context.tiny, context.tiny),
        Subject("mindspore", "save_checkpoint", peer("mindspore_ckpt"), source, context.tiny, model.num_bytes),
    ]
    return _against_one(context, subjects, f"ckpt: .ckpt output, {model.num_bytes / 1e9:.2f} GB", model)


def _against_one(context: Context, subjects: Sequence[Subject], title: str, model: bench_models.Llama) -> Section:
    """Measure ckptkit against the last of `subjects`."""
    results = context.bench.rounds(subjects, context.rounds)
    return Section(title, results, pair_goals(results, subjects[-1].name, model.num_tensors))


def cast_section(context: Context) -> Section:
    """bf16 to fp32: every value is kept exactly, and takes twice the room."""
    source, model = context.big()
    tiny, least = context.tiny, 2 * model.num_bytes
    twice = 'for i in 1 2; do mkdir -p "$2/$i" && cp "$1"/*.safetensors "$2/$i"; done && sync "$2"/*/*'
    subjects = [
        Subject(OURS, "fsyncs; xxh3-128 of each tensor", ckptkit("--dtype", "fp32"), source, tiny, least),
        Subject(NO_DIGEST, "fsyncs", ckptkit("--dtype", "fp32", "--no-digest"), source, tiny, least),
        Subject(START, "the same command on a tiny model", ckptkit("--dtype", "fp32"), tiny, tiny),
        Subject("torch", "load_file, .to(float32), save_file", peer("torch_cast"), source, tiny, least),
        Subject(CP_SYNC, "as many bytes as the output has", shell(twice), source, tiny, least),
    ]
    results = context.bench.rounds(subjects, context.rounds)
    title = f"cast: bf16 to fp32, {model.num_bytes / 1e9:.2f} GB to {least / 1e9:.2f} GB"
    cpu = {result.name: result.values("cpu_s") for result in results}
    speed = {name: ratio(cpu[CP_SYNC], less(cpu[name], cpu[START])) for name in (NO_DIGEST, OURS)}
    goals = [
        Goal("speed of the work itself, no digests, over cp + sync of the output", speed[NO_DIGEST], 0.75),
        Goal("speed of the work itself, digests, over cp + sync of the output", speed[OURS], 0.75),
    ]
    return Section(title, results, goals + pair_goals(results, "torch", model.num_tensors))


def run_make_bin(source: Path, target: Path) -> None:
    """Make the .bin input; it takes torch, as its readers do."""
    subprocess.run(peer("make_bin")(source, target), check=True, stdout=subprocess.DEVNULL)


def pair_goals(results: Sequence[Measured], other: str, num_tensors: int) -> list[Goal]:
    """Return the figures of a section that compares with one peer."""
    cpu = {result.name: result.values("cpu_s") for result in results}
    inner = {result.name: result.values(INNER) for result in results}
    anonymous = {result.name: tuple(a / MIB for a in result.values("anonymous_bytes")) for result in results}
    return [
        Goal(f"the work itself over {other} in process", ratio(inner[other], less(cpu[OURS], cpu[START]))),
        Goal(f"whole process over {other}", ratio(cpu[other], cpu[OURS])),
        memory_goal(anonymous[OURS], num_tensors),
    ]


def memory_goal(values: Sequence[float], num_tensors: int) -> Goal:
    """Return the promise of every plan: 64 MiB, and 4 KiB for each slice."""
    return Goal("anonymous memory", tuple(values), round(BASE_MIB + num_tensors * SLICE_BYTES / MIB, 1), False, "MiB")


def small_section(context: Context) -> Section:
    """Many small tensors: what one tensor costs."""
    model = bench_models.many_small(context.num_small)
    source = bench_models.ensure(context.cache, f"llama-{model.num_tensors}-tensors", model)
    tiny, least = context.tiny, model.num_bytes
    subjects = [
        Subject(OURS, "fsyncs; xxh3-128 of each tensor", ckptkit(), source, tiny, least),
        Subject(NO_DIGEST, "fsyncs", ckptkit("--no-digest"), source, tiny, least),
        Subject(START, "the same command on a tiny model", ckptkit(), tiny, tiny),
        Subject("safetensors", "load_file + save_file, shard by shard", peer("safetensors"), source, tiny, least),
    ]
    results = context.bench.rounds(subjects, context.rounds)
    cpu = {result.name: result.values("cpu_s") for result in results}

    def each(name: str) -> tuple[float, ...]:
        return tuple(seconds * 1e6 / model.num_tensors for seconds in less(cpu[name], cpu[START]))

    inner = next(r.values(INNER) for r in results if r.name == "safetensors")
    anonymous = next(r.values("anonymous_bytes") for r in results if r.name == OURS)
    goals = [
        Goal("one tensor, start-up taken off", each(OURS), 25, False, "us"),
        Goal("one tensor, no digests", each(NO_DIGEST), 25, False, "us"),
        Goal("one tensor, safetensors in process", tuple(s * 1e6 / model.num_tensors for s in inner), unit="us"),
        memory_goal([a / MIB for a in anonymous], model.num_tensors),
    ]
    return Section(f"small: {model.num_tensors} tensors, {model.num_bytes / 1e6:.0f} MB", results, goals)


def plan_section(context: Context) -> Section:
    """A dry run of Qwen3-235B-A22B's shape: planning alone, of sparse files that nobody reads."""
    sparse = bench_models.ensure_made(context.cache, "qwen3-235b", bench_moe.write)

    def command(source: Path, target: Path) -> list[str]:
        return ckptkit("--dry-run")(sparse if source == context.tiny else source, target)

    subjects = [Subject("ckptkit --dry-run", "36,945 tensors, 470 GB of holes", command, context.tiny, context.tiny)]
    results = context.bench.rounds(subjects, context.rounds)
    anonymous = [a / MIB for a in results[0].values("anonymous_bytes")]
    goals = [
        Goal("a dry run, start-up included", tuple(results[0].values("cpu_s")), 3.0, False, "CPU s"),
        memory_goal(anonymous, sum(1 for _ in bench_moe.tensors())),
    ]
    return Section("plan: Qwen3-235B-A22B's shape, 94 layers of 128 experts", results, goals)


SECTIONS: dict[str, Callable[[Context], Section]] = {
    "copy": copy_section,
    "start": start_section,
    "cast": cast_section,
    "bin": bin_section,
    "ckpt": ckpt_section,
    "small": small_section,
    "plan": plan_section,
}
