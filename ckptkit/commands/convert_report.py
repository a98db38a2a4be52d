"""What a conversion or a reshard did, or would do, for a terminal and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from ckptkit.cast import CastCount
from ckptkit.commands.cast_report import cast_data, cast_rows, cast_tensors
from ckptkit.commands.choose import Choice
from ckptkit.commands.rank_rows import beside, rank_rows
from ckptkit.commands.write import Options
from ckptkit.errors import UsageError
from ckptkit.formats.manifest import read_manifest
from ckptkit.formats.part_manifests import missing_ranks
from ckptkit.formats.parts import check_part
from ckptkit.formats.target import check_replaceable
from ckptkit.mapping.state_names import is_counter, state_of
from ckptkit.plan.plan import Plan
from ckptkit.quantities import numbers_text
from ckptkit.report import Report, fold_names, human_bytes, listed

_WEIGHTS = ("F16", "F32", "F64", "BF")  # how the dtypes begin that a model's weights have


def dtype_notes(plan: Plan) -> Iterator[str]:
    """Yield a note for each dtype of the result that a model's weights do not have unless they are quantised.

    Tensors that a cast left alone are in the report already, with their dtype; training state is no weight.
    """
    odd = [o.spec for o in plan.outputs if not o.spec.dtype.startswith(_WEIGHTS)]
    names = {output.spec.name for output in plan.outputs} if odd else set()
    passed = {fate.name for fate in plan.kept} | {spec.name for spec in odd if _is_state_beside(spec.name, names)}
    for dtype, number in Counter(spec.dtype for spec in odd if spec.name not in passed).items():
        what = f"{number} tensors are {dtype}" if number > 1 else f"1 tensor is {dtype}"
        if dtype.startswith("F8_"):
            unknown = ", a dtype that MindSpore does not have" if plan.facts["to"]["dialect"] != "hf" else ""
            yield f"{what}{unknown}: the scales of FP8 weights are not applied"
        else:
            yield f"{what}, where a model has floating-point weights: if they are quantised, no scale is applied"


def _is_state_beside(name: str, names: Container[str]) -> bool:
    """Tell a counter, and state of a parameter that is among `names`: a network may call a layer `accum` itself."""
    known = state_of(name)
    return is_counter(name) or (known is not None and known[1] in names)


def naming_rows(plan: Plan, choice: Choice) -> list[tuple[str, str]]:
    """Return the report's rows on the family and the two namings."""
    rows = [("family", f"{choice.family.name} ({choice.family_from})")]
    for label, side in (("from", plan.facts["from"]), ("to", plan.facts["to"])):
        variant = f", variant {side['variant']}" if side["variant"] else ""
        rows.append((label, f"{side['dialect']}{variant}, {side['format']} ({', '.join(side['tables'])})"))
    return rows


def convert_report(
    plan: Plan, command: str, src: Path, dst: Path, heading: Sequence[tuple[str, str]], options: Options,
    counts: dict[str, CastCount] | None, seconds: float,
) -> Report:  # fmt: skip
    """Return the report of a run of `command`; `heading` are its first rows."""
    verb = f"would {command}" if options.dry_run else {"convert": "converted", "reshard": "resharded"}[command]
    report = Report(command, f"{verb} `{src}` -> `{dst}`")
    for label, text in heading:
        report.add(label, text)
    report.add("tensors", f"{len(plan.outputs)}, {human_bytes(plan.tensor_bytes)} in {len(plan.files)} file(s)")
    if state := plan.facts.get("state"):
        report.add("state", ", ".join(f"{kind} x {count}" for kind, count in state.items()))
    of_files = [("files", text) for text in listed([f"{f.name}  {human_bytes(f.size)}" for f in plan.files])]
    for label, text in rank_rows(plan) or of_files:
        report.add(label, text)
    report.add("beside", ", ".join(beside(plan)))
    for text in cast_rows(plan, counts):
        report.add("cast", text)
    fates_of = {key: getattr(plan, key) for key in ("kept", "ignored", "dropped", "unmapped")}
    for label, fates in fates_of.items():
        for reason in dict.fromkeys(fate.reason for fate in fates):
            for pattern, count in fold_names(fate.name for fate in fates if fate.reason == reason):
                report.add(label, f"{count} x {pattern}: {reason}" if count > 1 else f"{pattern}: {reason}")
    for note in plan.notes:
        report.add("note", note)
    for note in _refusal(plan, dst, options) if options.dry_run else _part_notes(plan, dst):
        report.add("note", note)
    for line in plan.load:
        report.add("yaml", line.replace("{dst}", str(dst)))
    report.add("cost", _cost(plan, options, seconds))
    casts = cast_data(plan, counts)
    report.data = {"source": str(src), "target": str(dst), "dry_run": options.dry_run}
    report.fill = lambda: (
        plan.to_json() | {key: {**value, "tensors": cast_tensors(plan, counts)} for key, value in casts.items()}
    )
    return report


def _part_notes(plan: Plan, dst: Path) -> list[str]:
    """Return a note on what `dst` lacks after a part was written."""
    if plan.whole is None:
        return []
    missing = missing_ranks(read_manifest(dst) or {})
    return [
        f"`{dst}` lacks ranks {numbers_text(missing)}" if missing else f"`{dst}` is complete: the last part joined it"
    ]


def _refusal(plan: Plan, dst: Path, options: Options) -> list[str]:
    """Return a note when the run that a dry run is about would not be allowed to write to `dst`."""
    try:
        if plan.whole is None:
            check_replaceable(dst, overwrite=options.overwrite)
        else:
            check_part(dst, plan.digest(), plan.facts["layout"]["only"], overwrite=options.overwrite)
    except UsageError as error:
        return [f"the run itself will be refused: {' '.join((error.what, ', '.join(error.items)))}; {error.hint}"]
    return []


def _cost(plan: Plan, options: Options, seconds: float) -> str:
    text = (
        f"reads {human_bytes(plan.bytes_read)} (amplification {plan.read_amplification:.2f}), "
        f"writes {human_bytes(plan.bytes_written)}, memory below {human_bytes(plan.peak_memory_bytes)}"
    )
    return text if options.dry_run else f"{text}; {seconds:.1f} s"
