"""The report of `ckptkit verify`: level by level, as text and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.commands.diff_report import cast_text, side_data, side_text
from ckptkit.commands.forward_sides import Side
from ckptkit.commands.layers_report import add_layers, layers_data
from ckptkit.commands.sides import Sides
from ckptkit.commands.verify_compute_report import add_compute, compute_data
from ckptkit.formats.manifest import MANIFEST
from ckptkit.report import Report, finite, fold_names, folded, human_bytes, listed, times
from ckptkit.verification.compute import SideComputed, sides_computed
from ckptkit.verification.files import Sound
from ckptkit.verification.forward import Dump, Forward, Row, part_of
from ckptkit.verification.layers import Layers
from ckptkit.verification.logits import ROUNDINGS
from ckptkit.verification.runners.job import Result
from ckptkit.verification.weights import Compared, LoadStatus, Parameter, Status

_WORDS: dict[Status, str] = {
    "loaded": "loaded, equal in every byte",
    "dtype": "loaded, of another dtype, and what differs is what that rounds",
    "value": "whose values differ",
    "shape": "of another shape",
    "missing": "missing in B",
    "unexpected": "unexpected: A has nothing for them, or they fit no parameter",
}


@dataclass(slots=True)
class Found:
    """What was found, as far as the levels went. `b` is the second checkpoint, or the dump that A was run for;
    `compute` the dtype that was asked for besides float32, or empty."""

    level: str
    a: Path
    b: Path
    sides: Sides | None
    files: list[Sound] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    compared: Compared | None = None
    status: LoadStatus | None = None
    runners: list[Side] = field(default_factory=list)
    dump: Dump | None = None
    forward: Forward | None = None
    layers: Layers | None = None
    compute: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        """The levels that found a difference, and `compute` when a dtype overflows."""
        found = []
        if self.unlike or not all(sound.tensors for sound in self.files):
            found.append("files")
        if self.status is not None and not self.status.ok:
            found.append("weights")
        if (self.forward is not None and not self.forward.ok) or self.unsound:
            found.append("forward")
        if self.layers is not None and not self.layers.ok:
            found.append("layers")
        if not all(side.ok for side in self.computed):
            found.append("compute")
        return found

    @property
    def differs(self) -> list[str]:
        """The levels that found a difference."""
        return [level for level in self.failed if level != "compute"]

    @property
    def results(self) -> list[tuple[str, Result]]:
        """What the runners of the sides that ran report, by label."""
        if self.forward is not None:
            return [("A", self.forward.a.result), ("B", self.forward.b.result)]
        return [("A", self.dump.result)] if self.dump else []

    @property
    def part(self) -> str:
        """Which layers alone were run, in words; empty for all, or where nothing was."""
        return next((part for _, result in self.results if (part := part_of(result))), "")

    @property
    def computed(self) -> list[SideComputed]:
        return sides_computed(self.results, self.compute) if self.compute else []

    @property
    def unsound(self) -> list[str]:
        """What is wrong with a checkpoint that was run alone."""
        if self.dump is None:
            return []
        result = self.dump.result
        rows = result.inputs
        wrong = [] if result.loaded else ["not every parameter was loaded"]
        wrong += [f"{row.name}: {row.not_finite} logits are NaN or inf" for row in rows if row.not_finite]
        return wrong + [f"{r.name}: two runs do not give the same bits" for r in rows if not (r.repeated or r.skipped)]

    @property
    def ok(self) -> bool:
        return not self.failed


def report_on(found: Found) -> Report:
    """Return the report; exit code 1 when a level found a difference."""
    overflows = "".join(f"; {side.label}: {side.verdict}" for side in found.computed if not side.ok)
    part = f" ({found.part} alone)" if found.part else ""
    report = Report("verify", f"{_headline(found)}{part}{overflows}", exit_code=0 if found.ok else 1)
    sides = found.sides
    if sides is not None:
        report.add("A", side_text(sides.a, sides.spoke_a))
        report.add("B", side_text(sides.b, sides.spoke_b))
    _add_files(report, found)
    if found.status is not None and found.compared is not None and sides is not None:
        report.add("compared", sides.how)
        _add_weights(report, found.status, found.compared)
    _add_forward(report, found)
    if found.layers is not None:
        add_layers(report, found.layers)
    elif found.level == "layers" and found.forward is not None and found.dump is None:
        report.add("layers", "not compared: a side was not run, or shows nothing of its inside")
    if found.compute:
        add_compute(report, found.compute, found.computed)
    notes = [*found.notes, *_without_compute(found)]
    if found.part:
        notes.append(f"{found.part} alone were run (`--layers`), as if there were no others: a sample of the network")
    if sides is not None:
        notes += [f"{label}: {n}" for label, s in (("A", sides.a), ("B", sides.b)) for n in s.checkpoint.notes]
    notes += found.compared.pairing.notes if found.compared else []
    for note in dict.fromkeys(notes):
        report.add("note", note)
    report.fill = lambda: finite(_data(found, notes))
    return report


def _without_compute(found: Found) -> list[str]:
    """Return the sides that ran, but not in the dtype that was asked for: dumps that were made without it."""
    ran = {side.label for side in found.computed}
    lacking = [label for label, result in found.results if found.compute and result.loaded and label not in ran]
    return [f"{label} was not run in {found.compute}: make its dump with the same `--compute`" for label in lacking]


def _headline(found: Found) -> str:
    if found.sides is None:
        if found.forward is None:
            if found.dump is not None and not found.dump.result.loaded:
                return f"`{found.a}` could not be run, and there is no dump of it"
            what = "is in" if not found.differs else "could not be run soundly; look at"
            return f"the forward pass of `{found.a}` {what} `{found.b}`"
        what = "agrees with" if not found.differs else "differs from"
        return f"the forward pass of `{found.a}` {what} the one in `{found.b}`"
    pair = f"`{found.a}` and `{found.b}`"
    if not found.differs:
        return f"{pair} are equal at level {found.level}"
    last = "layers" if found.layers else "forward" if found.forward else "weights" if found.status else "files"
    rest = "" if last == found.level else "; the levels after it were not tried (`--keep-going`)"
    return f"{pair} differ at level {' and '.join(found.differs)}{rest}"


def _add_files(report: Report, found: Found) -> None:
    for label, sound in zip("AB", found.files, strict=False):
        text = f"{sound.tensors} tensors, {human_bytes(sound.num_bytes)}: structure as the format demands"
        if not sound.tensors:
            text = "there is no tensor in it"
        elif sound.compared:
            text += f"; {sound.compared} have the bytes that {MANIFEST} promises"
        else:
            text += f"; no digests to compare with ({MANIFEST} has none, or is not there)"
        report.add("files", f"{label}: {text}")
        for line in sound.added:
            report.add("files", f"{label}: {line}")
    if found.sides is not None and found.sides.family is not None:
        lines = [f"not as config.json says: {line}" for line in found.unlike]
        for line in listed(lines) or ["shapes are as config.json says"]:
            report.add("files", line)
    elif found.sides is not None:
        report.add("files", f"shapes were not compared with a config.json ({found.sides.how})")


def _add_weights(report: Report, status: LoadStatus, compared: Compared) -> None:
    counts = Counter(parameter.status for parameter in status.parameters)
    whole = len(status.parameters)
    for kind, word in _WORDS.items():
        if counts[kind]:
            report.add("weights", f"{counts[kind]} of {whole} parameters {word}")
            for line in listed(list(_folded(status.parameters, kind))):
                report.add("", f"  {line}")
    if not counts:
        report.add("weights", "there is no parameter on either side")
    for names in (names for names in compared.shards.values() if names):
        report.add("", f"  in {', '.join(listed(names))}")
    reasons: dict[str, list[str]] = {}
    for fate in status.benign:
        reasons.setdefault(fate.reason, []).append(fate.name)
    for reason, names in reasons.items():
        shown = folded(names)
        for text in shown[:4]:
            report.add("benign", f"{text}: {reason}")
        if len(shown) > 4:
            report.add("benign", f"  and {len(names)} in all for that reason")


def _folded(parameters: Sequence[Parameter], kind: Status) -> Iterator[str]:
    """Yield a line for each kind of parameter of that status, layers folded, with the largest figures.

    Those that are a failure come first.
    """
    groups: dict[tuple[str, str], dict[str, Parameter]] = {}
    for parameter in sorted(parameters, key=lambda parameter: parameter.ok):
        if parameter.status == kind:
            cast = cast_text(parameter.tally) if parameter.tally else ""
            why = parameter.text if parameter.wrong else ""
            groups.setdefault((cast, why), {})[parameter.name] = parameter
    for (cast, _), named in groups.items():
        for pattern, count in fold_names(named):
            text = times(pattern, count)
            reasons = dict.fromkeys(parameter.text for parameter in named.values() if parameter.text)
            if len(reasons) == 1 and (count == 1 or len(named) == count or all(p.wrong for p in named.values())):
                text += f": {next(iter(reasons))}"
            yield f"{text}{f': {cast}' if cast else ''}"
        if kind in ("value", "dtype"):
            yield from _largest([p for p in named.values() if p.tally is not None])


def _largest(parameters: Sequence[Parameter]) -> Iterator[str]:
    tallies = [p.tally for p in parameters if p.tally is not None and p.tally.changed]
    gaps = [(t.max_abs, t.max_relative) for t in tallies if t.max_abs is not None and t.max_relative is not None]
    if tallies:
        figures = f", max |a - b| {max(g[0] for g in gaps):.3g}, relative {max(g[1] for g in gaps):.3g}" if gaps else ""
        odd = [
            f", {sum(counts[0] for counts in pairs)} {word} in A and {sum(counts[1] for counts in pairs)} in B"
            for word, pairs in (("NaN", [t.nan for t in tallies]), ("inf", [t.inf for t in tallies]))
            if any(one != two for one, two in pairs)
        ]
        yield f"{sum(t.changed for t in tallies)} elements differ{figures}{''.join(odd)}"


def _add_forward(report: Report, found: Found) -> None:
    for label, side in zip("AB", found.runners, strict=False):
        report.add("forward", f"{label}: runner {side.runner} on {side.device} ({side.why})")
    for label, result in found.results:
        for line in _loaded(result):
            report.add("forward", f"{label}: {line}")
    for line in found.unsound:
        report.add("forward", line)
    if found.forward is None:
        return
    for key, (one, two) in found.forward.readings.items():
        report.add("forward", f"{key} differs: {one} in A, {two} in B, as the networks read their config.json")
    if found.forward.constants_differ and not found.forward.readings:
        report.add("forward", "the rotary frequencies differ in their last place, which the bound allows for")
    for line in _table(found.forward.rows):
        report.add("logits", line)
    if any(row.distance for row in found.forward.rows):
        report.add(
            "", f"(bound: {ROUNDINGS:g} times what one unit in the last place of every weight does; docs/verify.md)"
        )


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the distances of all inputs as the lines of a table."""
    if not rows:
        return
    width = max(len("input"), *(len(row.name) for row in rows))
    numbers = "{:>6}  {:>8}  {:>8}  {:>9}  {:>8}  {:>7}  {:>9}  {:>9}"
    heads = ("tokens", "relative", "bound", "max |a-b|", "1-cosine", "KL", "top-1", "top-5")
    yield f"{'input':<{width}}  {numbers.format(*heads)}"
    for row in rows:
        found = row.distance
        if found is None:
            text = f"not compared: {row.skipped}" if row.skipped else f"WRONG: {row.why}"
            yield f"{row.name:<{width}}  {row.tokens:>6}  {text}"
            continue
        figures = (f"{found.relative:.1e}", f"{row.bound:.1e}", f"{found.max_abs:.1e}", f"{abs(1 - found.cosine):.0e}",
                   f"{found.kl:.0e}", f"{found.top1}/{found.tokens}", f"{found.top5}/{found.tokens}")  # fmt: skip
        yield f"{row.name:<{width}}  {numbers.format(row.tokens, *figures)}"
        if row.why:
            yield f"  WRONG: {row.why}; the worst is position {found.worst}"


def _loaded(result: Result) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    if result.loaded:
        yield f"{result.parameters} parameters loaded, none missing, none left over; {versions}"
    else:
        yield f"not run: {versions}"
    for what, names in (
        ("missing, NaN before loading and after", result.missing),
        ("unexpected, no parameter takes it", result.unexpected),
        ("not what its file holds, once all is loaded", result.altered),
        ("of another shape", [f"{name}: {net} in the network, {file} stored" for name, net, file in result.shapes]),
        ("not looked at here, of a layer that was not run", result.left_out),
    ):
        for line in listed(folded(names)):
            yield f"  {what}: {line}"
    for text in folded(name for name, _ in result.benign):
        yield f"  in the network only, and no weight: {text}"
    yield from result.notes


def _data(found: Found, notes: Sequence[str]) -> dict[str, Any]:
    sides = found.sides
    data: dict[str, Any] = {"level": found.level, "failed": found.failed, "notes": list(dict.fromkeys(notes))}
    data["part"] = found.part
    if sides is not None:
        data |= {"a": side_data(found.a, sides.a, sides.spoke_a), "b": side_data(found.b, sides.b, sides.spoke_b)}
    else:
        data |= {"a": {"path": str(found.a)}, "b": {"path": str(found.b)}}
    data["files"] = [asdict(sound) for sound in found.files]
    data["unlike_config"] = found.unlike
    if found.status is not None:
        data["parameters"] = [_parameter_data(parameter) for parameter in found.status.parameters]
        data["benign"] = [[fate.name, fate.reason] for fate in found.status.benign]
        data["shards"] = [name for names in found.compared.shards.values() for name in names] if found.compared else []
    forward = found.forward
    if forward is not None or found.dump is not None:
        data["forward"] = {
            "runners": [{"runner": s.runner, "why": s.why, "device": s.device} for s in found.runners],
            **{label.lower(): _result_data(result) for label, result in found.results},
            "readings": {k: list(v) for k, v in forward.readings.items()} if forward else {},
            "inputs": [_row_data(row) for row in forward.rows] if forward else [],
        }
    if found.layers is not None:
        data["layers"] = layers_data(found.layers)
    if found.compute:
        data["compute"] = compute_data(found.compute, found.computed)
    return data


def _result_data(result: Result) -> dict[str, Any]:
    return {key: value for key, value in asdict(result).items() if key != "computed"}  # it has a key of its own


def _parameter_data(parameter: Parameter) -> dict[str, Any]:
    tally = parameter.tally
    figures: dict[str, Any] = {}
    if tally is not None:
        figures = {
            "shape": list(tally.theirs.shape),
            "dtypes": [tally.mine.dtype, tally.theirs.dtype],
            "changed": tally.changed,
            "max_abs": tally.max_abs,
            "max_relative": tally.max_relative,
        }
    return {"name": parameter.name, "status": parameter.status, "text": parameter.text, **figures}


def _row_data(row: Row) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": row.name, "tokens": row.tokens, "skipped": row.skipped, "wrong": row.why, "bound": row.bound,
        "sensitivity": row.sensitivity,
    }  # fmt: skip
    if row.distance is not None:
        data |= asdict(row.distance) | {"relative": row.distance.relative}
    return data
