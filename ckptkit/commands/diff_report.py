"""The report of `ckptkit diff`: what differs, the worst of it, and what was passed over, as text and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite, prod
from pathlib import Path
from typing import Any

from ckptkit.commands.sides import Sides
from ckptkit.commands.source import Source
from ckptkit.compare import Tally
from ckptkit.plan.pair import Finding
from ckptkit.plan.plan import OutputTensor
from ckptkit.report import Report, fold_names, human_bytes, listed, times
from ckptkit.types import Shape
from ckptkit.verification.weights import Compared

WORST = 10
RELATIVE = "max |a - b| / max |a| over the tensor"
_KINDS = {
    "only_in_a": "only in A", "only_in_b": "only in B", "shape": "shape", "parts": "dtype", "padding": "padding",
    "replica": "replica",
}  # fmt: skip


def report_on(path_a: Path, path_b: Path, sides: Sides, compared: Compared) -> Report:
    """Return the report; exit code 1 when anything differs, or when there is nothing on either side."""
    pairing, tallies = compared.pairing, compared.tallies
    rows = [row for row in compared.rows if not row[1].equal]
    rows.sort(key=lambda row: _badness(row[1]), reverse=True)
    count = len(rows) + len(pairing.findings)
    what = f"differ in {count} tensor{'s' if count > 1 else ''}" if count else "hold the same"
    nothing = not (count or tallies or pairing.benign)
    what = "hold no tensor, neither of them" if nothing else what
    report = Report("diff", f"`{path_a}` and `{path_b}` {what}", exit_code=1 if count or nothing else 0)
    for label, source, spoke in (("A", sides.a, sides.spoke_a), ("B", sides.b, sides.spoke_b)):
        report.add(label, side_text(source, spoke))
    report.add("compared", sides.how)
    report.add("tensors", _counts(tallies, pairing.findings))
    _add_dtypes(report, [tally for _, tally in rows if tally.is_cast], len(tallies))
    _add_values(report, [row for row in rows if not row[1].is_cast])
    if any(tally.changed and tally.max_relative is not None for _, tally in rows):
        report.add("", f"(relative: {RELATIVE})")
    _add_findings(report, pairing.findings)
    for fate in pairing.benign:
        report.add("no difference", f"{fate.name}: {fate.reason}")
    notes = [f"{label}: {note}" for label, c in (("A", sides.a), ("B", sides.b)) for note in c.checkpoint.notes]
    notes += pairing.notes
    for note in dict.fromkeys(notes):
        report.add("note", note)
    report.data = _data(path_a, path_b, sides, compared, notes)
    return report


def side_text(source: Source, spoke: tuple[str, str]) -> str:
    """Return a side in a line: naming, format, ranks, tensors, bytes."""
    checkpoint = source.checkpoint
    naming = f"{spoke[0]}{f', variant {spoke[1]}' if spoke[1] else ''}, " if spoke[0] else ""
    ranks = f" over {len(source.ranks.ranks)} ranks" if source.ranks else ""
    size = sum(t.num_bytes for t in checkpoint.tensors.values())
    return f"{naming}{checkpoint.kind}{ranks}, {len(checkpoint.tensors)} tensors, {human_bytes(size)}"


def _counts(tallies: Sequence[Tally], findings: Sequence[Finding]) -> str:
    equal = [t for t in tallies if t.equal]
    text = [f"{len(equal)} equal in every byte ({human_bytes(sum(t.mine.num_bytes for t in equal))})"]
    values = sum(t.mine.dtype == t.theirs.dtype for t in tallies) - len(equal)
    dtypes = sum(t.mine.dtype != t.theirs.dtype for t in tallies)
    text += [f"{values} with other bytes"] if values else []
    text += [f"{dtypes} of another dtype"] if dtypes else []
    counts: Counter[str] = Counter(finding.kind for finding in findings)
    words = {
        "only_in_a": "only in A",
        "only_in_b": "only in B",
        "shape": "of another shape",
        "parts": "not comparable",
        "padding": "with padding that is not zero",
        "replica": "with a replica that is no copy",
    }
    return ", ".join(text + [f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind]])


def _badness(tally: Tally) -> tuple[bool, float, int]:
    """Order by: not finite on one side only, relative difference, number of elements."""
    relative = tally.max_relative
    return tally.is_odd, 0.0 if relative is None else relative, tally.changed


def _add_dtypes(report: Report, tallies: Sequence[Tally], total: int) -> None:
    """Add the tensors of which only the dtype differs, by what became of their values, with the largest figures."""
    for text, group in _by_cast(tallies).items():
        folded = [("all", total)] if len(group) == total > 1 else fold_names(tally.mine.name for tally in group)
        for line in listed([f"{times(pattern, count)}: {text}" for pattern, count in folded]):
            report.add("dtype", line)
        if changed := [tally for tally in group if tally.changed]:
            report.add("dtype", f"  {sum(tally.changed for tally in changed)} elements changed, {_gaps(changed)}")


def _add_values(report: Report, rows: Sequence[tuple[OutputTensor, Tally]]) -> None:
    """Add the tensors whose values differ: the worst of them with their figures, then the others, folded."""
    for output, tally in rows[:WORST]:
        report.add("values", f"{_named(output)}: {_figures(tally)}")
    others = []
    for text, group in _by_cast([tally for _, tally in rows[WORST:]]).items():
        folded = fold_names(tally.mine.name for tally in group)
        others += [times(pattern, count) + (f": {text}" if text else "") for pattern, count in folded]
    for line in listed(others):
        report.add("others", line)


def _by_cast(tallies: Sequence[Tally]) -> dict[str, list[Tally]]:
    found: dict[str, list[Tally]] = {}
    for tally in tallies:
        found.setdefault(cast_text(tally), []).append(tally)
    return found


def cast_text(tally: Tally) -> str:
    """Say what the dtypes are and how the values came about; empty for tensors of one dtype."""
    if tally.mine.dtype == tally.theirs.dtype:
        return ""
    text = f"{tally.mine.dtype} in A, {tally.theirs.dtype} in B"
    if not tally.changed and tally.max_abs is not None:
        odd = "" if tally.is_cast else ", but for the sign of zeros or the bits of NaN"
        return f"{text}; the values are equal{odd}"
    if tally.rounded or tally.rounded_a:
        one, other = ("B", "A") if tally.rounded else ("A", "B")
        return f"{text}; {one} is exactly {other} rounded to nearest, ties to even"
    return text


def _gaps(tallies: Sequence[Tally]) -> str:
    """Return the largest differences of some tensors, as far as they are known."""
    gaps = [t.max_abs for t in tallies if t.max_abs is not None]
    relatives = [t.max_relative for t in tallies if t.max_relative is not None]
    return f"max |a - b| {max(gaps):.3g}, relative {max(relatives):.3g}" if gaps and relatives else ""


def _figures(tally: Tally) -> str:
    total = prod(tally.mine.shape)
    cast = cast_text(tally)
    text = f"{cast}; " if cast else ""
    text += f"{tally.changed} of {total} elements"
    if tally.first is not None and tally.mine.shape:
        text += f", the first at {place(tally.mine.shape, tally.first)}"
    if gaps := _gaps([tally]):
        text += f"; {gaps}"
    for word, (a, b) in (("NaN", tally.nan), ("inf", tally.inf)):
        text += f"; {a} {word} in A, {b} in B" if a != b else ""
    return text


def place(shape: Shape, number: int) -> tuple[int, ...]:
    """Return the index of element `number`, in C order, of a tensor of `shape`."""
    found: list[int] = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        found.insert(0, index)
    return tuple(found)


def _add_findings(report: Report, findings: Sequence[Finding]) -> None:
    for kind, label in _KINDS.items():
        of_kind = [finding for finding in findings if finding.kind == kind]
        texts = {finding.name: finding.text for finding in of_kind}
        lines = []
        for pattern, count in fold_names(texts):
            if count > 1:
                lines.append(times(pattern, count))
            else:
                lines.append(f"{pattern}: {texts[pattern]}" if texts.get(pattern) else pattern)
        for line in listed(lines):
            report.add(label, line)


def _named(output: OutputTensor) -> str:
    """Return a tensor's name in B, with what it is in A where that has another name."""
    sources = list(output.inputs)
    if sources == [output.spec.name]:
        return output.spec.name
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{output.spec.name} (A: {sources[0]}{more})"


def _data(path_a: Path, path_b: Path, sides: Sides, compared: Compared, notes: Sequence[str]) -> dict[str, Any]:
    pairing, tallies = compared.pairing, compared.tallies
    return {
        "a": side_data(path_a, sides.a, sides.spoke_a),
        "b": side_data(path_b, sides.b, sides.spoke_b),
        "family": sides.family.name if sides.family else None,
        "compared": sides.how,
        "relative": RELATIVE,
        "equal": sum(t.equal for t in tallies),
        "different": _rows(compared),
        "findings": [{"kind": f.kind, "name": f.name, "text": f.text} for f in pairing.findings],
        "benign": [[fate.name, fate.reason] for fate in pairing.benign],
        "notes": list(notes),
    }


def side_data(path: Path, source: Source, spoke: tuple[str, str]) -> dict[str, Any]:
    """Return a side as data."""
    naming = {"dialect": spoke[0] or None, "variant": spoke[1] or None}
    ranks = len(source.ranks.ranks) if source.ranks else None
    checkpoint = source.checkpoint
    return {"path": str(path), "format": checkpoint.kind, **naming, "ranks": ranks, "tensors": len(checkpoint.tensors)}


def _rows(compared: Compared) -> list[dict[str, Any]]:
    """Return a row for each pair that differs, the worst first."""
    rows = [
        (tally, _row(output, tally) | {"shards": compared.shards.get(number, [])})
        for number, (output, tally) in enumerate(compared.rows)
        if not tally.equal
    ]
    return [row for _, row in sorted(rows, key=lambda row: _badness(row[0]), reverse=True)]


def _row(output: OutputTensor, tally: Tally) -> dict[str, Any]:
    relative = tally.max_relative
    return {
        "name": tally.theirs.name,
        "of": list(output.inputs),
        "shape": list(tally.mine.shape),
        "dtypes": [tally.mine.dtype, tally.theirs.dtype],
        "elements": prod(tally.mine.shape),
        "changed": tally.changed,
        "first": None if tally.first is None else list(place(tally.mine.shape, tally.first)),
        "max_abs": tally.max_abs if tally.max_abs is None or isfinite(tally.max_abs) else None,
        "max_relative": relative if relative is None or isfinite(relative) else None,
        "nan": list(tally.nan),
        "inf": list(tally.inf),
        "rounded": tally.rounded,
        "rounded_a": tally.rounded_a,
    }
