"""The report of `ckptkit verify --sanity`: the loss line by line, what is wrong with weights and what is suspect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import log
from pathlib import Path
from typing import Any

from ckptkit.commands.diff_report import side_data, side_text
from ckptkit.commands.forward_sides import Side
from ckptkit.report import Report, finite, listed
from ckptkit.verification.runners.job import Input, Result
from ckptkit.verification.sanity import FEW_TOKENS, MARGIN, Loss, high_loss
from ckptkit.verification.statistics import Statistics, Strange
from ckptkit.verification.strange_lines import folded


@dataclass(slots=True)
class Checked:
    """One side: its parameters, and what a run of it gave; `loss` is None when nothing was run."""

    side: Side
    statistics: list[Statistics]
    strange: list[Strange]
    result: Result | None = None
    loss: Loss | None = None

    def unloaded(self) -> Iterator[Strange]:
        """Yield what kept parameters from being loaded; nothing was run then."""
        result = self.result
        if result is None:
            return
        for kind, text, names in (
            ("missing", "missing: it is NaN before loading and after", result.missing),
            ("unexpected", "unexpected: no parameter takes it", result.unexpected),
            ("altered", "not what its file holds, once all is loaded", result.altered),
        ):
            if names:
                yield Strange(tuple(names), "wrong", kind, text)
        for name, net, stored in result.shapes:
            yield Strange((name,), "wrong", "shape", f"is {stored}, and {net} in the network")

    def of(self, severity: str) -> list[Strange]:
        return [line for line in (*self.unloaded(), *self.strange) if line.severity == severity]


@dataclass(slots=True)
class SanityFound:
    """What was found of A, and of B where it is named. `bound` is how far apart rounding may put their losses."""

    paths: list[Path]
    text: Path
    inputs: list[Input]
    tokenizer: Path | None
    vocab: int
    sides: list[Checked] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    bound: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def labelled(self) -> list[tuple[str, Checked]]:
        return list(zip("AB", self.sides, strict=False))

    @property
    def tokens(self) -> int:
        """How many tokens have one before them: those that are predicted."""
        return sum(len(item.ids) - 1 for item in self.inputs)

    @property
    def gap(self) -> float | None:
        """How far apart the losses of two sides are, in nats; None where there are not two."""
        losses = [checked.loss.mean for checked in self.sides if checked.loss is not None]
        return abs(losses[0] - losses[1]) if len(losses) == 2 else None

    @property
    def unsteady(self) -> list[str]:
        rows = [(label, row) for label, its in self.labelled if its.result for row in its.result.inputs]
        return [f"{label}: two runs of {row.name} do not give the same bits" for label, row in rows if not row.repeated]

    @property
    def ok(self) -> bool:
        ran = all(checked.loss is not None for checked in self.sides)
        return ran and not (self.faults or self.unsteady or any(checked.of("wrong") for checked in self.sides))


def sanity_report(found: SanityFound) -> Report:
    """Return the report; exit code 1 when something is wrong. Suspects alone are not: they are named."""
    report = Report("verify", _headline(found), exit_code=0 if found.ok else 1)
    for label, checked in found.labelled:
        report.add(label, side_text(checked.side.source, checked.side.spoke))
        report.add(label, f"runner {checked.side.runner} on {checked.side.device} ({checked.side.why})")
    by = f", tokens by {found.tokenizer}" if found.tokenizer else ""
    report.add("text", f"{found.text}: {len(found.inputs)} lines, {found.tokens} tokens to predict{by}")
    for line in _losses(found):
        report.add("loss", line)
    for label, checked in found.labelled:
        sound = sum(not (row.nan or row.inf) for row in checked.statistics)
        report.add("weights", f"{label}: {len(checked.statistics)} tensors, {sound} of them without NaN and inf")
    for line in (*found.faults, *found.unsteady):
        report.add("WRONG", line)
    for severity, word in (("wrong", "WRONG"), ("suspect", "suspect"), ("note", "note")):
        for label, checked in found.labelled:
            for line in listed(list(folded(checked.of(severity)))):
                report.add(word, f"{label}: {line}")
    for note in _notes(found):
        report.add("note", note)
    report.fill = lambda: finite(_data(found))
    return report


def _headline(found: SanityFound) -> str:
    names = " and ".join(f"`{path}`" for path in found.paths)
    loss = found.sides[0].loss
    first = "no loss, as not all parameters could be loaded" if loss is None else f"loss {loss.mean:.3f} nats"
    number = sum(len(line.names) for checked in found.sides for line in checked.of("suspect"))
    suspects = f", but {number} parameters look odd" if number and found.ok else ""
    return f"{names}: {'sane' if found.ok else 'NOT sane'}, {first}{suspects}"


def _losses(found: SanityFound) -> Iterator[str]:
    """Yield the losses as a table: a row for each line of text, then the mean."""
    losses = [checked.loss for checked in found.sides]
    there = [loss for loss in losses if loss is not None]
    if there:
        heads = [label for label, checked in found.labelled if checked.loss is not None]
        width = max(len("all"), *(len(line.name) for line in there[0].lines))
        yield f"{'nats':<{width}}  {'tokens':>6}" + "".join(f"  {head:>8}" for head in heads)
        for rows in zip(*(loss.lines for loss in there), strict=True):
            figures = "".join(f"  {row.loss:>8.4f}" for row in rows)
            yield f"{rows[0].name:<{width}}  {rows[0].tokens:>6}{figures}"
        yield f"{'all':<{width}}  {there[0].tokens:>6}" + "".join(f"  {loss.mean:>8.4f}" for loss in there)
    yield f"ln({found.vocab}) = {log(found.vocab):.4f}: a network that knows nothing; the loss must be {MARGIN:g} below"
    if found.bound is not None and found.gap is not None:
        yield f"A and B are {found.gap:.1e} apart; rounding explains {found.bound:.1e}"


def _notes(found: SanityFound) -> Iterator[str]:
    yield from found.notes
    if found.tokens < FEW_TOKENS:
        yield f"{found.tokens} tokens are few, so chance decides much: give {FEW_TOKENS} or more"
    for label, checked in found.labelled:
        if checked.loss is not None and not found.faults and (high := high_loss(checked.loss, found.vocab)):
            yield f"{label}: {high}"
        for note in (*checked.side.source.checkpoint.notes, *(checked.result.notes if checked.result else ())):
            yield f"{label}: {note}"


def _data(found: SanityFound) -> dict[str, Any]:
    return {
        "level": "sanity",
        "text": str(found.text),
        "tokenizer": None if found.tokenizer is None else str(found.tokenizer),
        "vocab": found.vocab,
        "ln_vocab": log(found.vocab),
        "margin": MARGIN,
        "gap": found.gap,
        "bound": found.bound,
        "failed": [*found.faults, *found.unsteady],
        "notes": list(_notes(found)),
        **{
            label.lower(): _side_data(path, its) for path, (label, its) in zip(found.paths, found.labelled, strict=True)
        },
    }


def _side_data(path: Path, checked: Checked) -> dict[str, Any]:
    loss, side = checked.loss, checked.side
    return {
        **side_data(path, side.source, side.spoke),
        "runner": side.runner,
        "device": side.device,
        "why": side.why,
        "versions": checked.result.versions if checked.result else {},
        "loss": loss.mean if loss else None,
        "tokens": loss.tokens if loss else 0,
        "lines": [asdict(line) for line in loss.lines] if loss else [],
        "strange": [asdict(line) for kind in ("wrong", "suspect", "note") for line in checked.of(kind)],
        "parameters": [asdict(row) for row in checked.statistics],
    }
