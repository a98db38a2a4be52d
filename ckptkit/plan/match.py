"""Match the tensors that a checkpoint has against those that its family's table expects.

The outcome accounts for every name on both sides: present, missing, of another shape, tied to a twin, ignored for a
written reason, or unmapped. Nothing is guessed: what is not one of the first and has no reason is an error, and
`--allow-unmapped` turns only the unmapped ones into a report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckptkit.errors import CoverageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.io import same_values
from ckptkit.mapping.rules import Rule, RuleSet, Tie
from ckptkit.mapping.state_names import PREFIXES, is_counter, is_state, state_of
from ckptkit.plan.plan import Fate
from ckptkit.report import tensors
from ckptkit.types import TensorInfo

_ROW_HINT = "add a row, add an [[ignore]] with its reason, or pass `--allow-unmapped`"
_PACKED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale_inv|weight_scale)$")
_PACKED_HINT = "these are packed or scaled weights (GPTQ, AWQ, fp8): dequantise the model first"
_STATE_HINT = "these are training state of no weight that is here: `--no-optimizer` leaves all of it out"
_LEFT_OUT = "training state, left out by `--no-optimizer`"


Same = Callable[[TensorInfo, TensorInfo], bool]


@dataclass(slots=True)
class Match:
    """`found`: expected name -> its place in a file (a tied twin may stand in). `absent`: tied names not stored."""

    found: dict[str, TensorInfo] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    ignored: list[Fate] = field(default_factory=list)
    dropped: list[Fate] = field(default_factory=list)
    unmapped: list[Fate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tied: bool = False
    compared_bytes: int = 0
    compared: set[str] = field(default_factory=set)  # stored tensors that were read for it
    same: Same = same_values


def match(
    source: Checkpoint,
    rules: RuleSet,
    *,
    tie: bool = False,
    allow_unmapped: bool = False,
    drop_state: bool = False,
    same: Same = same_values,
) -> Match:
    """Account for every tensor of `source`; raise CoverageError when one is missing, misshapen or unmapped.

    `tie` is the user's word that a head which is not stored is the embedding; `drop_state` that training state is to be
    left out. `same` compares two of its tensors.
    """
    expected = {rule.target: rule for rule in rules.rules}
    stored = source.tensors
    found = {name: info for name in expected if (info := stored.get(name)) is not None}
    result = Match(found, tied=rules.tied or tie, same=same)
    rest = [name for name in stored if name not in found] if len(found) < len(stored) else []
    _refuse_empty(source)
    if result.tied:
        for pair in rules.ties:
            _resolve_tie(pair, expected, result, told=not rules.tied)
    _set_orphans_aside(expected, result)
    lacking = [name for name in expected if name not in found] if len(found) < len(expected) else []
    missing = [name for name in lacking if name not in result.absent and not expected[name].optional]
    _sort_out(rest, rules, result, stored, drop_state=drop_state)
    if missing:
        raise _missing(missing, rules, result, source)
    _check_shapes(expected, found, rules)
    if result.unmapped and not allow_unmapped:
        raise _unmapped(result.unmapped, rules, source)
    result.absent.update(lacking)
    return result


def _refuse_empty(source: Checkpoint) -> None:
    empty = [f"{t.name}  {t.shape}  {t.dtype}" for t in source.tensors.values() if 0 in t.shape]
    if empty:
        raise CoverageError(
            f"{len(empty)} tensors of `{source.path.name}` hold no elements",
            items=empty,
            why="they were saved empty, as happens when only one process of a partitioned model writes its part",
            hint="save the model again with all its weights gathered",
        )


def _resolve_tie(pair: Tie, expected: Mapping[str, Rule], result: Match, *, told: bool) -> None:
    """Settle a tied pair: either twin suffices; two equal ones are one; two different ones are untied.

    Their training state goes with them, and makes them different when it differs. `told` says that it is the user's
    word that they are tied, and not config.json's.
    """
    name, twin = pair.target, pair.target_twin
    head, embedding = result.found.get(name), result.found.get(twin)
    if head is None:
        result.absent.add(name)
        return
    of_both = [(name, twin), *((p + name, p + twin) for p in PREFIXES if p + name in result.found)]
    if embedding is None:
        result.notes.append(f"`{twin}` is not stored; its tied twin `{name}` is read in its place")
        for one, other in of_both:
            if other in expected and other not in result.found:
                result.found[other] = result.found.pop(one)
                result.absent.add(one)
        return
    odd = next((one for one, other in of_both if not _equal(one, other, result)), None)
    what = "differ" if odd == name else f"have different training state (`{odd}`)"
    if odd is None:
        result.notes.append(f"`{name}` is bit-equal to its tied twin `{twin}`: one copy is written")
        for one, other in of_both:
            result.dropped.append(Fate(one, f"bit-equal to its tied twin `{other}`"))
            del result.found[one]
            result.absent.add(one)
    elif told:
        raise CoverageError(
            f"`--tie-embeddings` says that `{name}` is `{twin}`, but both are stored and {what}",
            why="one of them would be lost",
            hint="leave out `--tie-embeddings`: both are kept then",
        )
    else:
        result.tied = False
        result.notes.append(
            f"config.json says that `{name}` is tied to `{twin}`, but they {what}: both are kept, and "
            "tie_word_embeddings is written as false"
        )


def _equal(one: str, other: str, result: Match) -> bool:
    """Say whether two tensors are stored and equal; reads both."""
    a, b = result.found[one], result.found.get(other)
    if b is None:
        return False
    result.compared_bytes += a.num_bytes + b.num_bytes
    result.compared |= {a.name, b.name}
    return result.same(a, b)


def _set_orphans_aside(expected: Mapping[str, Rule], result: Match) -> None:
    """Take state out of what was found whose weight, which the table knows, is not there."""
    for name in [name for name in result.found if expected[name].is_state]:
        known = state_of(name)
        if known is not None and known[1] in expected and known[1] not in result.found:
            del result.found[name]
            result.unmapped.append(Fate(name, f"training state of `{known[1]}`, which is not stored"))


def _sort_out(rest: Sequence[str], rules: RuleSet, result: Match, stored: Collection[str], *, drop_state: bool) -> None:
    """Say what becomes of the stored tensors that no rule expects."""
    side: Literal["hf", "dialect"] = "hf" if rules.dialect == "hf" else "dialect"
    for name in rest:
        why = rules.ignored(name, side)
        if why is None and drop_state and _belongs_to_training(name, stored):
            result.dropped.append(Fate(name, _LEFT_OUT))
        elif why is None:
            result.unmapped.append(Fate(name, "matches no row of the table"))
        else:
            result.ignored.append(Fate(name, why))


def _belongs_to_training(name: str, stored: Collection[str]) -> bool:
    """Say whether a tensor is a counter, or state of a parameter that is stored; a layer may be called `accum`."""
    found = state_of(name)
    return is_counter(name) or (found is not None and found[1] in stored)


def _tables(rules: RuleSet) -> str:
    return " and ".join(f"`{name}`" for name in rules.table_files)


def _missing(missing: list[str], rules: RuleSet, result: Match, source: Checkpoint) -> CoverageError:
    twins = {pair.target: pair.target_twin for pair in rules.ties}
    if not result.found:
        return CoverageError(
            f"no tensor of `{source.path.name}` has a name that {_tables(rules)} expects",
            items=[f"it has {name}" for name in source.tensors],
            why=f"this is not a {rules.family} checkpoint in {rules.dialect} naming",
            hint="name the family with `--model` and the naming with `--from`",
        )
    if any(_PACKED.search(fate.name) for fate in result.unmapped):
        hint = _PACKED_HINT
        why = "weights of that name are stored in another form"
    elif all(name in twins for name in missing):
        hint = "if the head is the embedding on purpose, pass `--tie-embeddings`; otherwise get the missing tensor"
        why = "config.json says the head is not tied to the embedding, and it is not stored"
    else:
        prefix = _common_prefix([fate.name for fate in result.unmapped])
        hint = "get the missing files, or fix config.json (or `--model`) if it describes another model"
        if prefix:
            hint = f"the {len(result.unmapped)} tensors without a row begin with `{prefix}`; " + hint
        why = "a model loaded without them would keep random values there"
    return CoverageError(
        tensors(len(missing), "is", "are") + f" missing from `{source.path.name}`", items=missing, why=why, hint=hint
    )


def _common_prefix(names: list[str]) -> str:
    """Return the dotted words that all names begin with: `model.layers.`, or nothing."""
    common = []
    for words in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0] + ".")
    return "".join(common)


def _unmapped(unmapped: list[Fate], rules: RuleSet, source: Checkpoint) -> CoverageError:
    infos = (source.tensors[fate.name] for fate in unmapped)
    name = f"`{source.path.name}`"
    return CoverageError(
        tensors(len(unmapped), f"of {name} matches", f"of {name} match") + f" no row of {_tables(rules)}",
        items=[f"{t.name}  {t.shape}  {t.dtype}" for t in infos],
        why="unmapped tensors would be lost in the output",
        hint=_hint(unmapped),
    )


def _hint(unmapped: list[Fate]) -> str:
    if all(is_state(fate.name) for fate in unmapped):
        return _STATE_HINT
    return _PACKED_HINT if any(_PACKED.search(fate.name) for fate in unmapped) else _ROW_HINT


def _check_shapes(expected: Mapping[str, Rule], found: Mapping[str, TensorInfo], rules: RuleSet) -> None:
    wrong = [
        f"{name}  stored {info.shape}, expected {expected[name].expr.shape}"
        for name, info in found.items()
        if info.shape != expected[name].expr.shape
    ]
    if wrong:
        raise CoverageError(
            tensors(len(wrong), "has", "have") + f" another shape than config.json and {_tables(rules)} give",
            items=wrong,
            why="config.json and the weights contradict each other; the weights of another model, or cut ones",
            hint="use the config.json that came with these weights, or name the right family with `--model`",
        )
