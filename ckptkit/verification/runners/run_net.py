"""What every runner does, whatever its framework: poison, load, check what was loaded, run each input twice.

A framework gives a `Net` (`net.py`); the rest is here. A network runs as one block, or streamed: block after block,
each loaded, run for all inputs and freed, so that one block is in memory at a time. Both ways run the same arithmetic
in the same order. What does not live here: the process (`main.py`), and a run in another dtype (`computing.py`).
Shapes: T tokens, H hidden, V the vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.errors import UsageError
from ckptkit.formats.disk import file_digest, write_file
from ckptkit.formats.file_pool import FilePool
from ckptkit.memory import peak_bytes
from ckptkit.verification.runners.computing import Computing
from ckptkit.verification.runners.job import (
    REPORT,
    SCHEMA,
    SEAL,
    Computed,
    Floats,
    Input,
    InputResult,
    Job,
    Result,
    Stored,
    TapResult,
    inputs_digest,
    seal_of,
)
from ckptkit.verification.runners.net import LAYER, Computes, Net, Tap, Walk, as_floats

STEP = "ckptkit-step: "  # begins a line on stderr that tells the parent process of a step
NOT_ENDED, AGAIN = "the network was not run to its end", "then run the same command again"
_BLOCK = 1 << 20  # elements that are nudged at a time
_READABLE = frozenset({"F16", "BF16", "F32"})


@dataclass(slots=True)
class _Run:
    """One input on its way: its walks through the network as it is, twice, in another dtype, and with nudged weights
    and constants. `traced` when its outputs inside of the network are kept."""

    number: int
    item: Input
    row: InputResult
    traced: bool
    walks: dict[str, Walk] = field(default_factory=dict)
    nudged_logits: Floats | None = None


def run_net(net: Net, job: Job, out: Path) -> Result:
    """Load the job's tensors into `net`, run its inputs, write logits and report to `out`; return the report."""
    result = Result(net.runner, job.device, net.versions, net.settings, net.reading, list(net.notes))
    result.inputs_digest = inputs_digest(job.inputs)
    result.layers = None if job.layers is None else list(job.layers)
    result.constants = {name: net.get(name).reshape(-1).tolist() for name in net.constants}
    tensors = _compare_names(net, job, result)
    if result.loaded:
        computing = _computing(net, job, result)
        runs = _start(net, job, result, out, computing)
        with FilePool() as pool:
            for number, (block, names) in enumerate(net.blocks()):
                began = time.monotonic()
                _load(net, names, tensors, result, pool)
                result.load_seconds += time.monotonic() - began
                if not result.loaded:
                    break
                first = number == 0
                _advance(net, runs, out, first=first)
                if computing is not None:
                    _advance_computed(net, runs, names, out, computing, first=first)
                _advance_nudged(net, runs, names, out, first=first)
                if job.stream:
                    net.free(names)
                    print(f"{STEP}{net.runner}: {block}", file=sys.stderr, flush=True)
    if not result.loaded:
        result.inputs, result.taps, result.computed = [], [], Computed()
    result.peak_bytes = peak_bytes()
    write_report(result, out)
    return result


def write_report(result: Result, out: Path) -> None:
    """Write the report; it comes last, so a folder that has one is complete."""
    report = {"schema": SCHEMA, **asdict(result)}
    data = json.dumps({**report, SEAL: seal_of(report)}, indent=1).encode()
    write_file(out / REPORT, data, why=NOT_ENDED, then=AGAIN)


def _compare_names(net: Net, job: Job, result: Result) -> dict[str, list[Stored]]:
    """Compare the names and shapes of tensors and parameters; return the tensors of each parameter, twins last."""
    shapes = net.shapes()
    result.parameters = len(shapes)
    found: dict[str, list[Stored]] = {}
    for tensor in job.tensors:
        name = tensor.name if tensor.name in shapes else net.twin(tensor.name)
        if name is None:
            left_out = _is_left_out(tensor.name, job.layers, net.reading["layers"])
            (result.left_out if left_out else result.unexpected).append(tensor.name)
        elif shapes[name] != tensor.shape:
            result.shapes.append((name, shapes[name], tensor.shape))
        elif name == tensor.name:
            found.setdefault(name, []).insert(0, tensor)
        else:
            found.setdefault(name, []).append(tensor)
    given = {tensor.name for tensor in job.tensors}
    for name in shapes:
        reason = None if name in given else net.benign(name)
        if reason is not None:
            result.benign.append((name, reason))
        elif name not in given:
            result.missing.append(name)
    return found


def _is_left_out(name: str, layers: Sequence[int] | None, total: int) -> bool:
    """Say whether a tensor is of a layer that the model has, of `total`, and that is not run, where only some are."""
    found = LAYER.search(name)
    return layers is not None and found is not None and int(found[1]) < total and int(found[1]) not in layers


def _load(
    net: Net, names: Sequence[str], tensors: Mapping[str, Sequence[Stored]], result: Result, pool: FilePool
) -> None:
    """Fill parameters with NaN, then with their tensors; then compare each with its file, and with its twin's."""
    shapes = net.shapes()
    for name in names:
        if net.benign(name) is None:
            net.put(name, np.full(shapes[name], np.nan, np.float32))
    for name in names:
        if name in tensors:
            net.put(name, _values(tensors[name][0], pool))
    for name in names:
        for tensor in tensors.get(name, ()):
            if not np.array_equal(net.get(name).view(np.uint32), _values(tensor, pool).view(np.uint32)):
                result.altered.append(tensor.name)


def _values(tensor: Stored, pool: FilePool) -> Floats:
    if tensor.dtype not in _READABLE:
        raise UsageError(f"`{tensor.name}` is {tensor.dtype}, which no weight of these networks is")
    return tensor.read(pool)


def _computing(net: Net, job: Job, result: Result) -> Computing | None:
    if not job.compute:
        return None
    if not isinstance(net, Computes):
        raise UsageError(f"the {net.runner} runner computes in float32 alone, and not in {job.compute}")
    return Computing(net, job.compute, result)


def _start(net: Net, job: Job, result: Result, out: Path, computing: Computing | None) -> list[_Run]:
    """Return the runs of all inputs, each before its first block."""
    runs = []
    for number, item in enumerate(job.inputs):
        row = InputResult(item.name)
        result.inputs.append(row)
        if item.positions is not None and not net.takes_positions:
            row.skipped = f"{net.runner} takes no position ids"
            continue
        run = _Run(number, item, row, item.name == job.trace)
        taps = _Taps(number, out, result.taps) if run.traced else None
        kinds = ["once", "again", *(["nudged"] if job.sensitivity else [])]
        if job.sensitivity and item.positions is not None and net.constants:
            kinds.append("constants")
        for kind in kinds:
            tap = None if taps is None else {"once": taps.keep, "nudged": taps.measure}.get(kind)
            run.walks[kind] = net.walk(item.ids, item.positions, tap)
        if computing is not None:
            run.walks["once"] = computing.plain(item, None if taps is None else taps.keep)
            run.walks["low"] = computing.low(item, None if taps is None else taps.comparing(computing))
        runs.append(run)
    return runs


def _advance(net: Net, runs: Sequence[_Run], out: Path, *, first: bool) -> None:
    """Take every run through the block that is loaded, twice."""
    for run in runs:
        began = time.monotonic()
        logits_TV = _step(run.walks["once"], first=first)
        again_TV = _step(run.walks["again"], first=first)
        run.row.seconds += time.monotonic() - began
        if logits_TV is not None and again_TV is not None:
            _note(run, logits_TV, again_TV, out)
            print(f"{STEP}{net.runner}: {run.item.name}", file=sys.stderr, flush=True)


def _advance_computed(
    net: Net, runs: Sequence[_Run], names: Sequence[str], out: Path, computing: Computing, *, first: bool
) -> None:
    """Take every run through the block that is loaded in the other dtype, and leave the block as it is."""
    with computing.lowered(names):
        for run in runs:
            low_TV = _step(run.walks["low"], first=first)
            if low_TV is not None:
                plain_TV = np.load(out / run.row.file, allow_pickle=False)
                computing.end(run.item, plain_TV, low_TV, traced=run.traced)
                print(f"{STEP}{net.runner}: {run.item.name}, another dtype", file=sys.stderr, flush=True)


def _advance_nudged(net: Net, runs: Sequence[_Run], names: Sequence[str], out: Path, *, first: bool) -> None:
    """Nudge the parameters of the block that is loaded, `names`, and take the runs through it that measure what that
    does."""
    if not any("nudged" in run.walks for run in runs):
        return
    for name in names:
        if net.benign(name) is None:
            _nudge(net, name)
    for run in runs:
        moved_TV = _step(run.walks["nudged"], first=first)
        if moved_TV is not None:
            _measure(run, moved_TV, out)
            print(f"{STEP}{net.runner}: {run.item.name}, sensitivity", file=sys.stderr, flush=True)
    _advance_constants(net, [run for run in runs if "constants" in run.walks], first=first)


def _advance_constants(net: Net, runs: Sequence[_Run], *, first: bool) -> None:
    """Take the runs with far positions through the nudged block with the constants nudged too: they multiply these."""
    if not runs:
        return
    before = {name: net.get(name) for name in net.constants}
    for name in net.constants:
        _nudge(net, name)
    for run in runs:
        logits_TV = _step(run.walks["constants"], first=first)
        if logits_TV is not None and run.nudged_logits is not None:
            run.row.constants = _moved(run.nudged_logits, logits_TV, run.row.largest)
            run.nudged_logits = None
    for name, values in before.items():
        net.put(name, values)


def _step(walk: Walk, *, first: bool) -> Floats | None:
    """Run one block; return the logits after the last one, else None."""
    try:
        if first:
            next(walk)  # to the first block
        next(walk)
    except StopIteration as end:
        logits_TV: Floats = end.value
        return logits_TV
    return None


def _note(run: _Run, logits_TV: Floats, again_TV: Floats, out: Path) -> None:
    """Write the logits, and note what they are."""
    row = run.row
    row.repeated = np.array_equal(logits_TV.view(np.uint32), again_TV.view(np.uint32))
    finite_TV = np.isfinite(logits_TV)
    row.not_finite = int(logits_TV.size - np.count_nonzero(finite_TV))
    row.largest = float(np.abs(logits_TV).max(initial=0.0, where=finite_TV))
    row.file = f"logits-{run.number}.npy"
    np.save(out / row.file, logits_TV, allow_pickle=False)
    row.digest = file_digest(out / row.file)


def _measure(run: _Run, moved_TV: Floats, out: Path) -> None:
    """Note how far the logits move when every weight does, by one unit in its last place."""
    if run.row.not_finite:
        return
    run.row.sensitivity = _moved(np.load(out / run.row.file, allow_pickle=False), moved_TV, run.row.largest)
    if "constants" in run.walks:
        run.nudged_logits = moved_TV


class _Taps:
    """The outputs inside of a network for one input: each a file, and how far it moves when the weights do."""

    def __init__(self, number: int, out: Path, results: list[TapResult]) -> None:
        self._number, self._out, self._results = number, out, results

    def keep(self, name: str, values: Any) -> None:
        """Write one, of the network as it is."""
        values_TH = as_floats(values)
        file = f"tap-{self._number}-{name}.npy"
        np.save(self._out / file, values_TH, allow_pickle=False)
        finite_TH = np.isfinite(values_TH)
        largest = float(np.abs(values_TH).max(initial=0.0, where=finite_TH))
        digest = file_digest(self._out / file)
        self._results.append(TapResult(name, file, digest, largest, int(values_TH.size - finite_TH.sum())))

    def measure(self, name: str, values: Any) -> None:
        """Compare one, of the nudged network, with the one that was kept."""
        row, values_TH = self._kept(name)
        if not row.not_finite:
            row.sensitivity = _moved(values_TH, as_floats(values), row.largest)

    def comparing(self, computing: Computing) -> Tap:
        """Return what compares one, of a network that computes in another dtype, with the one that was kept."""
        return lambda name, values: computing.compare(name, self._kept(name)[1], as_floats(values))

    def _kept(self, name: str) -> tuple[TapResult, Floats]:
        row = next(row for row in self._results if row.name == name)
        return row, np.load(self._out / row.file, allow_pickle=False)


def _nudge(net: Net, name: str) -> None:
    net.put(name, nudged(net.get(name), seed=zlib.crc32(name.encode())))


def _moved(before: Floats, after: Floats, largest: float) -> float:
    """Return the largest change of a number, relative to the largest one; 1 when something is no number any more."""
    change = float(np.abs(after - before).max(initial=0.0))
    relative = change / largest if largest else change
    return relative if np.isfinite(relative) else 1.0


def nudged(values: Floats, *, seed: int) -> Floats:
    """Return `values`, each moved to the next float32 up or down at random; zeros stay."""
    bits = np.array(values, np.float32).view(np.int32)
    flat = bits.reshape(-1)
    rng = np.random.default_rng(seed)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        step = 1 - 2 * rng.integers(0, 2, block.size, np.int8)
        block += np.where(block & 0x7FFFFFFF, step, 0)
    return bits.view(np.float32)
