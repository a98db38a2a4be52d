"""Level weights: every element of both sides, bit for bit, and what it means for each parameter of B.

The pairs are those of `plan/pair.py`; the executor makes A's tensors in B's naming and layout, and the comparer reads
B's. What does not live here: opening the sides and settling their naming (`commands/sides.py`), text (`commands/`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptkit.compare import Comparer, Tally, joined_tally
from ckptkit.execute import execute
from ckptkit.mapping.state_names import is_state
from ckptkit.plan.against import Comparison, Part, over_parts
from ckptkit.plan.join import Joined
from ckptkit.plan.pair import Pairing
from ckptkit.plan.plan import Fate, OutputTensor
from ckptkit.types import Region
from ckptkit.values import FLOATS

Progress = Callable[[int, int], Callable[[int], None]]
Status = Literal["loaded", "dtype", "value", "shape", "missing", "unexpected"]
_STATUS_OF: dict[str, Status] = {
    "only_in_a": "missing", "only_in_b": "unexpected", "shape": "shape", "parts": "value", "padding": "value",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compared:
    """The pairs with a tally for each, and the shards that differ.

    `replicas` are the replicas in A that differ from what is read in their place, each with its tally; `shards[i]`
    are the names of the shards of pair i that differ (`rank_3:NAME`), where B is cut over ranks.
    """

    pairing: Pairing
    tallies: list[Tally]
    replicas: list[tuple[Part, Tally]]
    shards: dict[int, list[str]]

    @property
    def rows(self) -> list[tuple[OutputTensor, Tally]]:
        return list(zip(self.pairing.outputs, self.tallies, strict=True))


def compare(
    pairing: Pairing, a: Joined | None, b: Joined | None, *, workers: int, progress: Progress | None
) -> Compared:
    """Compare every pair; `a` and `b` say how the tensors of a side that is cut over ranks are joined."""
    comparison = over_parts(pairing, a, b)
    comparer = Comparer([output.spec for output in comparison.outputs], comparison.others)
    plan = comparison.plan()
    try:
        advance = progress(plan.tensor_bytes, 0) if progress else lambda _: None
        execute(plan, comparer, workers=workers, digests=False, progress=advance)
    finally:
        comparer.close()
    return _of_pairs(pairing, comparison, comparer.tallies)


def _of_pairs(pairing: Pairing, comparison: Comparison, tallies: Sequence[Tally]) -> Compared:
    """Return the tally of each pair, of those of its parts."""
    parts: dict[int, list[tuple[Region, Tally]]] = {}
    replicas: list[tuple[Part, Tally]] = []
    shards: dict[int, list[str]] = {}
    for part, tally in zip(comparison.parts, tallies, strict=True):
        if part.pair is None:
            if not tally.equal:
                replicas.append((part, tally))
            continue
        parts.setdefault(part.pair, []).append((part.region, tally))
        if not tally.equal and part.stored != part.name:
            shards.setdefault(part.pair, []).append(part.stored)
    found = []
    for number, (output, other) in enumerate(zip(pairing.outputs, pairing.others, strict=True)):
        its = parts[number]
        whole = len(its) == 1 and its[0][0] == Region.whole(other.shape)
        found.append(its[0][1] if whole else joined_tally(output.spec, other.spec, its))
    return Compared(pairing, found, replicas, shards)


@dataclass(frozen=True, slots=True)
class Parameter:
    """What becomes of one parameter when B is loaded in A's place. `name` is its name in B, or in A if B lacks it.

    `dtype`: all that differs is the dtype, and the values are equal or exactly those that rounding gives. That is no
    success, and `wrong`, for training state, which is never cast, and where values were rounded that are not in other
    tensors of the same dtype.
    """

    name: str
    status: Status
    tally: Tally | None = None
    text: str = ""
    wrong: bool = False

    @property
    def ok(self) -> bool:
        return self.status in ("loaded", "dtype") and not self.wrong


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """Every parameter of both sides; `benign` are tensors that need no partner, with the reason."""

    parameters: tuple[Parameter, ...]
    benign: tuple[Fate, ...]

    @property
    def ok(self) -> bool:
        """All are loaded, and there is at least one: two sides of nothing prove nothing."""
        return bool(self.parameters) and all(parameter.ok for parameter in self.parameters)


def load_status(
    compared: Compared, kept: Collection[str] = (), odd: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
) -> LoadStatus:
    """Say of each parameter whether it is loaded, missing, unexpected, of another shape or dtype, or differs.

    Training state that only one side has is benign; that both have is compared like any tensor. A cast rounds all
    tensors of a dtype but those in `kept`: where it rounded some of them only, these are no success. `odd` is the
    state of each side, by name, that fits no parameter of it, and why: no success either, where it has no partner.
    """
    pairing = compared.pairing
    stateful = {side: _has_state(pairing, side) for side in ("only_in_a", "only_in_b")}
    one_sided = stateful["only_in_a"] != stateful["only_in_b"] and not any(
        is_state(output.spec.name) for output in pairing.outputs
    )
    found = _paired(compared.rows, kept)
    benign = list(pairing.benign)
    for finding in pairing.findings:
        why = {"only_in_a": odd[0], "only_in_b": odd[1]}.get(finding.kind, {}).get(finding.name)
        if why is not None:
            found.append(Parameter(finding.name, "unexpected", None, f"only in {finding.kind[-1].upper()}: {why}"))
        elif one_sided and finding.kind != "shape" and is_state(finding.name):
            benign.append(Fate(finding.name, f"only in {finding.kind[-1].upper()}: training state, no weight"))
        else:
            found.append(Parameter(finding.name, _STATUS_OF[finding.kind], None, finding.text))
    found += [Parameter(name, "missing", None, "neither A nor B has it") for name in pairing.absent]
    found += list(_replicas(compared))
    return LoadStatus(tuple(found), tuple(benign))


def _paired(rows: Sequence[tuple[OutputTensor, Tally]], kept: Collection[str]) -> list[Parameter]:
    tallies = [tally for _, tally in rows]
    split = _casts_of_one(rows)
    left = Counter(
        tally.mine.dtype
        for tally in tallies
        if tally.mine.dtype == tally.theirs.dtype and tally.theirs.name not in kept and not is_state(tally.theirs.name)
    )
    found = []
    for output, tally in rows:
        status = status_of(tally)
        text = _why_no_cast(tally, left[tally.mine.dtype])
        if status == "dtype" and not text:
            text = next((split[name] for name in output.inputs if name in split), "")
        found.append(Parameter(tally.theirs.name, status, tally, text, wrong=status == "dtype" and bool(text)))
    return found


def _casts_of_one(rows: Sequence[tuple[OutputTensor, Tally]]) -> dict[str, str]:
    """Return the tensors of A that B has in parts, some of them rounded, of several dtypes, by name, and what is wrong.

    No one dtype is what such a tensor is rounded to, so level forward could not run both sides on the same values.
    """
    dtypes: dict[str, set[str]] = {}
    rounded: set[str] = set()
    for output, tally in rows:
        for name in output.inputs:
            dtypes.setdefault(name, set()).add(tally.theirs.dtype)
            if tally.changed and tally.rounded:
                rounded.add(name)
    return {
        name: f"one tensor of A, `{name}`, is {' and '.join(sorted(dtypes[name]))} in parts: a cast has one dtype"
        for name in rounded
        if len(dtypes[name]) > 1
    }


def _why_no_cast(tally: Tally, left: int) -> str:
    """Return why two dtypes are no cast that a checkpoint may have gone through, else nothing.

    `left` other tensors kept the dtype that this one has in A.
    """
    dtypes = {tally.mine.dtype, tally.theirs.dtype}
    if len(dtypes) == 1:
        return ""
    if is_state(tally.theirs.name):
        return "training state is never cast"
    if not dtypes <= FLOATS:
        return "no rounding leads from one of these dtypes to the other"
    if status_of(tally) == "dtype" and tally.changed and left:
        return f"values were rounded here, and not in {left} other tensor{'s' * (left > 1)} of {tally.mine.dtype}"
    return ""


def status_of(tally: Tally) -> Status:
    """Return what a tally means; of two dtypes only floats are a cast of one another."""
    if tally.mine.dtype == tally.theirs.dtype:
        return "value" if tally.changed else "loaded"
    return "dtype" if tally.is_cast and {tally.mine.dtype, tally.theirs.dtype} <= FLOATS else "value"


def rounding(compared: Compared) -> tuple[dict[str, str], dict[str, str]]:
    """Return the dtypes that tensors of A, and of B, must be rounded to so that both sides hold the same values.

    That is what a cast from one to the other did, where all that differs is that.
    """
    of_a: dict[str, str] = {}
    of_b: dict[str, str] = {}
    for output, tally in compared.rows:
        if not tally.changed or status_of(tally) != "dtype":
            continue
        if tally.rounded:
            of_a |= dict.fromkeys(output.inputs, tally.theirs.dtype)
        else:
            of_b[tally.theirs.name] = tally.mine.dtype
    return of_a, of_b


def _has_state(pairing: Pairing, kind: str) -> bool:
    return any(finding.kind == kind and is_state(finding.name) for finding in pairing.findings)


def _replicas(compared: Compared) -> Iterator[Parameter]:
    for part, tally in compared.replicas:
        rank = part.stored.partition(":")[0]
        yield Parameter(part.name, "value", tally, f"{rank} of A holds another copy than the rank that is read")
