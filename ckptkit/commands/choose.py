"""Settle what a command works on: the family, the source's dialect and variant, the target's.

Each answer has one source of truth, in this order: what the user says, what ckptkit's own manifest says, what the
bytes show (config.json, tensor names). Two answers that fit equally well are never guessed between.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptkit.commands.defaults import Defaults
from ckptkit.commands.source import Source
from ckptkit.errors import UsageError
from ckptkit.mapping.rows import Family
from ckptkit.mapping.tables import Match, Tables

Spoke = tuple[str, str]  # (dialect, variant)
_FRAMEWORKS = {
    "mindspore": "mindformers",
    "mindformers": "mindformers",
    "huggingface": "hf",
    "torch": "hf",
    "pytorch": "hf",
}
BASE = "base"  # how a user names the layout without a variant
HUB = "hf"


@dataclass(frozen=True, slots=True)
class Choice:
    """The family with how it was found, and the two spokes."""

    family: Family
    family_from: str
    source: Spoke
    target: Spoke
    notes: tuple[str, ...]


def choose(
    source: Source,
    config: Mapping[str, Any],
    tables: Tables,
    *,
    model: str | None,
    from_dialect: str | None,
    to_dialect: str | None,
    variant: str | None,
    from_variant: str | None,
    given: Defaults,
) -> Choice:
    """Return the choice; UsageError says what to pass when it cannot be settled.

    `variant` belongs to the side that is not HuggingFace, or to the target: with two such sides, and where it names
    a form of HuggingFace's own. One that HuggingFace's side does not have is passed over where it is a default.
    """
    refuse_empty(
        {"--model": model, "--from": from_dialect, "--to": to_dialect, "--variant": variant,
         "--from-variant": from_variant}
    )  # fmt: skip
    family, how, notes = _family(tables, config, model)
    for_hub = to_dialect in (None, HUB) and variant in tables.variants(family, HUB)  # the form to write, not to read
    of_source = variant if from_variant is None and to_dialect in (None, HUB) and not for_hub else from_variant
    origin = choose_source(source, tables, family, from_dialect, of_source)
    try:
        check_hub_variant(tables, family, origin, from_variant, "--from-variant")
    except UsageError as error:
        given.pass_over("from_variant", error)
    target = to_dialect or ("mindformers" if origin[0] == "hf" else "hf")
    target = _dialect(tables, family, target, "--to")
    told = variant if target != HUB or for_hub else None
    goal = (target, _check_variant(tables, family, target, told))
    if origin[0] == HUB or from_variant not in (None, variant):  # then `variant` is not the source's
        try:
            check_hub_variant(tables, family, goal, variant, "--variant")
        except UsageError as error:
            given.pass_over("variant", error)
    return Choice(family, how, origin, goal, tuple(notes))


def refuse_empty(told: Mapping[str, str | None]) -> None:
    """Raise UsageError for an option that was given an empty word: an unset variable of a script, most likely."""
    for option, word in told.items():
        if word == "":
            raise UsageError(f"`{option}` is empty", hint="give it a value, or leave it out")


def check_hub_variant(tables: Tables, family: Family, spoke: Spoke, told: str | None, option: str) -> None:
    """Raise UsageError for a variant that HuggingFace's naming does not have, if that is the spoke's."""
    if spoke[0] == HUB:
        _check_variant(tables, family, HUB, told, option)


def type_text(config: Mapping[str, Any]) -> str:
    """Return what config.json says of its type, for a sentence: `model_type "llama"`, or `no model_type`."""
    kind = config.get("model_type")
    return "no model_type" if kind is None else f'model_type "{kind}"'


def _family(tables: Tables, config: Mapping[str, Any], model: str | None) -> tuple[Family, str, list[str]]:
    kind = config.get("model_type")
    if model is None:
        family = tables.for_config(config)
        notes = _refusals(family, config) + _other_architecture(tables, family, config)
        return family, f"config.json says {type_text(config)}", notes
    family = tables.family(model)
    notes = _refusals(family, config)
    if kind is not None and kind not in family.model_types:
        notes.append(f"`--model {model}` was followed, though config.json says {type_text(config)}")
    return family, f"`--model {model}`", notes


def _other_architecture(tables: Tables, family: Family, config: Mapping[str, Any]) -> list[str]:
    """Return a note when config.json names architectures of another family than its model_type."""
    named = config.get("architectures")
    if not isinstance(named, list) or any(name in family.catalogue.architectures for name in named):
        return []
    with suppress(UsageError):
        other = tables.for_config({"architectures": [name for name in named if isinstance(name, str)]})
        if other.name != family.name:
            names = ", ".join(map(str, named))
            return [
                f"config.json says {type_text(config)}, which was followed, and architectures {names} ({other.name})"
            ]
    return []


def _refusals(family: Family, config: Mapping[str, Any]) -> list[str]:
    """Raise UsageError when config.json asks for what the tables cannot do; return what deserves a note."""
    refused = family.refused(config)
    if refused:
        raise UsageError(
            f"config.json asks for something that `{family.name}` here does not support",
            items=refused,
            why="the converted model would compute something else",
            hint="dequantise a quantised model first; else use a table that knows these fields (`--table FILE`)",
        )
    return family.warned(config)


def choose_source(
    source: Source,
    tables: Tables,
    family: Family,
    dialect: str | None,
    variant: str | None,
    *,
    options: tuple[str, str] = ("--from", "--from-variant"),
) -> Spoke:
    """Return the dialect and variant of a checkpoint: as told, as its manifest says, or as its names show.

    `options` are what a user passes to tell them, for the errors.
    """
    if dialect is not None:
        dialect = _dialect(tables, family, dialect, options[0])
    if source.manifest is not None and source.manifest["to"]["dialect"]:  # a reshard by names alone knows of none
        return _as_written(source.manifest["to"], dialect, variant, options)
    matches = [
        match
        for match in tables.detect(source.checkpoint.tensors.keys(), family)
        if dialect in (None, match.dialect) and _may_be(match, variant)
    ]
    if not matches:
        if dialect is not None:
            return dialect, _check_variant(tables, family, dialect, variant)
        raise UsageError(
            f"`{source.checkpoint.path.name}` has no tensor name that a {family.name} table knows",
            items=[f"it has {name}" for name in source.checkpoint.tensors],
            hint=f"name the family with `--model`, the naming with `{options[0]}`, or your own table with `--table`",
        )
    best = max(match.matched for match in matches)
    found = [(m.dialect, m.variant) for m in matches if m.matched == best]
    if variant is not None:
        found = [spoke for spoke in found if spoke[1] == _stored(variant)] or found
    if len(found) > 1 and found[0][0] != "hf":
        raise _several(found, source, family, options[1])
    spoke = found[0]
    if variant is not None and _stored(variant) != spoke[1] and spoke[0] != "hf":
        raise UsageError(
            f"`{source.checkpoint.path.name}` is no `{variant}` checkpoint",
            why=f"its tensor names are those of {spoke[0]}" + (f", variant {spoke[1]}" if spoke[1] else ""),
            hint=f"leave out `{options[1]}`, or name the layout that the file has",
        )
    return spoke


def _stored(variant: str | None) -> str:
    """Return a variant's name as tables and manifests have it: none for the base layout."""
    return "" if variant in (None, BASE) else str(variant)


def _as_written(
    written: Mapping[str, str], dialect: str | None, variant: str | None, options: tuple[str, str]
) -> Spoke:
    """Return what the manifest says; UsageError when the user says otherwise, for the manifest knows."""
    spoke = written["dialect"], written["variant"]
    told_other = variant is not None and _stored(variant) != spoke[1] and spoke[0] != "hf"
    if dialect not in (None, spoke[0]) or told_other:
        raise UsageError(
            f"ckptkit.json says {spoke[0]}, variant {spoke[1] or BASE}, and the options say otherwise",
            why="the manifest was written with the tensors, so it knows how they are laid out",
            hint=f"leave out `{options[0]}`, `{options[1]}` and `--variant`",
        )
    return spoke


def _may_be(match: Match, variant: str | None) -> bool:
    """Say whether a match can be what `variant` names; on the HuggingFace side it names nothing."""
    return match.dialect == "hf" or match.variant == "" or variant in (None, match.variant)


def _several(found: list[Spoke], source: Source, family: Family, option: str) -> UsageError:
    return UsageError(
        f"the tensor names of `{source.checkpoint.path.name}` fit {len(found)} layouts",
        items=[f"{variant or BASE}: {family.table(dialect, variant).about or dialect}" for dialect, variant in found],
        why="their fused tensors differ only in the order of rows, and nothing in the file tells which it has",
        hint=f"pass `{option}`: what made the file decides (`{BASE}` is the layout without a variant)",
    )


def _dialect(tables: Tables, family: Family, told: str, option: str) -> str:
    """Return a dialect by the name that a user gives it: its own, or that of a framework."""
    dialect = _FRAMEWORKS.get(told.lower(), told)
    if dialect == "mindformers":
        return tables.mindformers_dialect(family)
    known = [HUB, *tables.dialects(family)]
    if dialect not in known:
        raise UsageError(
            f"`{option} {told}`: the {family.name} family has no such dialect",
            items=known,
            hint="these are the dialects it has; `mindformers` stands for the one that MindFormers reads",
        )
    return dialect


def _check_variant(tables: Tables, family: Family, dialect: str, told: str | None, option: str = "--variant") -> str:
    known, variant = list(tables.variants(family, dialect)), _stored(told)
    if variant and variant not in known:
        raise UsageError(
            f"`{dialect}` of the {family.name} family has no variant `{variant}`",
            items=known or ["(none)"],
            hint=f"choose one of these, leave out `{option}`, or give the table that has it with `--table`",
        )
    return variant
