"""`ckptkit verify A [B] --sanity FILE`: after a conversion, before a run: do the weights look trained, and is the loss?

What does not live here: the report (`sanity_report.py`), statistics and losses (`verification/`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ckptkit.commands.forward_sides import WHOLE, Devices, Runner, Side, Steps, make_job, one_side, side_of
from ckptkit.commands.sanity_report import Checked, SanityFound, sanity_report
from ckptkit.commands.sides import Asked, Sides, open_side, open_sides
from ckptkit.commands.source import load_own_tables
from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats.manifest import MANIFEST
from ckptkit.formats.tokenizer import TOKENIZER
from ckptkit.report import Report
from ckptkit.verification.forward import compare, run_side
from ckptkit.verification.inputs import MAX_TOKENS
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.job import Input, Job, Stored
from ckptkit.verification.sanity import (
    LINES,
    faults_of_loss,
    faults_of_pair,
    loss_bound,
    loss_of,
    make_text_inputs,
    read_lines,
)
from ckptkit.verification.statistics import Statistics, measure, strange
from ckptkit.verification.weights import Progress, rounding
from ckptkit.verification.weights import compare as compare_weights


def sanity(
    a: str | Path,
    b: str | Path | None = None,
    *,
    text: str | Path,
    lines: int = LINES,
    max_tokens: int = MAX_TOKENS,
    asked: Asked | None = None,
    runner: Runner = "auto",
    devices: Devices | None = None,
    workers: int = 2,
    progress: Progress | None = None,
    steps: Steps | None = None,
) -> Report:
    """Look at every parameter of `a`, and at its loss on a text; against those of `b`, where it is named.

    `text` is a file of JSON lines, of which the first `lines` are taken, each with at most `max_tokens` tokens. The
    exit code is 1 when a parameter is missing, unexpected, not finite, zero, or equal to another one; when the loss is
    not finite, or not `MARGIN` nats below ln(vocabulary); or when the sides' losses are further apart than rounding
    explains. Who runs what is settled as for level forward.

    Raises UsageError, CorruptError, ResourceError; CoverageError when a side's ranks do not go together.
    """
    asked, devices = asked or Asked(), devices or Devices()
    for name, number in (("lines", lines), ("max_tokens", max_tokens)):
        if number < 1:
            raise UsageError(f"`{name}` is {number}, and must be at least 1")
    text = Path(text)
    taken = read_lines(text, lines)
    sides: Sides | None = None
    if b is None:
        source = open_side(Path(a), asked.strategy_a, asked.step_a, "a")
        runs = [one_side(source, asked, load_own_tables(asked.table), runner, devices.a)]
    else:
        sides = open_sides(Path(a), Path(b), asked)
        sides.check_layouts()
        runs = [side_of(sides, "a", runner, devices.a), side_of(sides, "b", runner, devices.b)]
    vocab = read_facts(runs[0].config).vocab
    tokenizer = _tokenizer(runs, asked)
    inputs, notes = make_text_inputs(
        text, taken, tokenizer, vocab=vocab, max_tokens=min(max_tokens, _positions(runs[0].config))
    )
    found = SanityFound([Path(a)] if b is None else [Path(a), Path(b)], text, inputs, tokenizer, vocab, notes=notes)
    rounded = _rounded(sides, workers, progress)
    jobs = [
        make_job(side, inputs, WHOLE, rounded=its, sensitivity=sides is not None and number == 0)
        for number, (side, its) in enumerate(zip(runs, rounded, strict=False))
    ]
    found.sides = [_look(side, job, workers, progress) for side, job in zip(runs, jobs, strict=True)]
    _run(found, jobs, steps)
    return sanity_report(found)


def _tokenizer(runs: Sequence[Side], asked: Asked) -> Path | None:
    """Return the tokenizer.json beside A, else B, else in the folder of `--config`."""
    folders = [side.folder for side in runs]
    if asked.config is not None:
        folders.append(asked.config if asked.config.is_dir() else asked.config.parent)
    return next((file for folder in folders if (file := folder / TOKENIZER).is_file()), None)


def _positions(config: Mapping[str, Any]) -> int:
    found = config.get("max_position_embeddings")
    return found if type(found) is int and found > 0 else MAX_TOKENS


def _rounded(sides: Sides | None, workers: int, progress: Progress | None) -> Sequence[Mapping[str, str]]:
    """Return what each side's tensors are rounded to, so that a cast from one to the other is no difference.

    The weights are compared for that, but only where dtypes differ.
    """
    if sides is None:
        return {}, {}
    dtypes = [{info.dtype for info in side.checkpoint.tensors.values()} for side in (sides.a, sides.b)]
    if dtypes[0] == dtypes[1] and len(dtypes[0]) == 1:
        return {}, {}
    return rounding(compare_weights(sides.pair(), sides.a.joined, sides.b.joined, workers=workers, progress=progress))


def _look(side: Side, job: Job, workers: int, progress: Progress | None) -> Checked:
    """Read every parameter of a side once; CorruptError when its bytes are not those that its manifest promises."""
    total = sum(_bytes(tensor) for tensor in job.tensors)
    advance = progress(total, 0) if progress and total else lambda _: None
    statistics = measure(job.tensors, workers=workers, advance=advance)
    _compare_promised(side, statistics)
    facts = read_facts(side.config)
    spread = side.config.get("initializer_range")
    spread = float(spread) if isinstance(spread, int | float) and spread > 0 else None
    return Checked(side, statistics, strange(statistics, tied=facts.tied, vocab=facts.vocab, initializer_range=spread))


def _bytes(tensor: Stored) -> int:
    return sum(piece.source.size * piece.info.num_bytes // max(1, piece.info.num_elements) for piece in tensor.pieces)


def _compare_promised(side: Side, statistics: Sequence[Statistics]) -> None:
    if side.source.joined is not None or side.source.padded:
        return
    stored, promised = side.source.checkpoint.tensors, side.source.promised_digests
    odd = [
        row.name
        for row in statistics
        if stored[row.name].strides is None and promised.get(row.name, row.digest) != row.digest
    ]
    if odd:
        raise CorruptError(
            f"{len(odd)} tensors of `{side.source.checkpoint.path}` are not what {MANIFEST} promises",
            items=odd,
            why=f"bytes changed after {MANIFEST} was written",
            hint="convert again, or restore the folder from a copy",
        )


def _run(found: SanityFound, jobs: Sequence[Job], steps: Steps | None) -> None:
    """Run the sides, one after the other, and judge their losses; the logits are gone afterwards."""
    said = steps(sum(_runs_of(job, found.inputs) for job in jobs)) if steps else lambda _: None
    with ExitStack() as stack:
        dumps = []
        for checked, job in zip(found.sides, jobs, strict=True):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptkit-dump-")))
            dump = run_side(checked.side.runner, job, folder, said)
            dumps.append(dump)
            checked.result, checked.loss = dump.result, loss_of(dump)
        losses = [checked.loss for checked in found.sides]
        for label, loss in zip("AB", losses, strict=False):
            found.faults += [] if loss is None else faults_of_loss(label, loss, found.vocab)
        if len(dumps) == 2 and losses[0] is not None and losses[1] is not None:
            forward = compare(*dumps)
            found.bound = loss_bound(forward)
            found.faults += faults_of_pair(losses[0], losses[1], forward)


def _runs_of(job: Job, inputs: Sequence[Input]) -> int:
    return len(inputs) * (2 if job.sensitivity else 1)
