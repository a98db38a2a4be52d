"""config.json in the words that the installed transformers reads.

transformers 5 writes `rope_parameters`, which has the rotary base and the scaling in one table; transformers 4 reads
`rope_theta` and `rope_scaling`, takes no notice of the other, and rotates by another base without a word. From one
release to the next the count of experts goes by `num_experts` or `num_local_experts`, with the same effect.

What does not live here: what the values mean to a network (`facts.py`), and frameworks: none is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import UsageError

Config = dict[str, Any]
DEFAULT_BASE = 10000.0  # in both, for every family here, when config.json names no base
# Types whose formula needs the context length before scaling; 5 takes `max_position_embeddings` where it is not given.
_NEED_ORIGINAL = ("llama3", "yarn", "longrope")


def spelled_for(config: Mapping[str, Any], transformers_version: str) -> tuple[Config, list[str]]:
    """Return `config` as transformers of that version reads it, and a note for each thing it would have misread.

    UsageError when the two spellings in one file contradict each other.
    """
    major = int(transformers_version.partition(".")[0])
    reader = f"transformers {transformers_version}"
    spelled = dict(config)
    notes = _name_experts(spelled, reader) if major < 5 else []
    parameters, scaling = (_table(config, key) for key in ("rope_parameters", "rope_scaling"))
    if not parameters and (scaling is None or "rope_theta" not in scaling):
        return spelled, notes  # transformers 4's own, which transformers 5 reads as well
    base, agreed = _base(config, parameters, scaling), _scaling(config, parameters, scaling)
    for key in ("rope_parameters", "rope_scaling", "rope_theta"):
        spelled.pop(key, None)
    if major >= 5:  # of two spellings it would take `rope_scaling` whole, and with it the default base
        return spelled | {"rope_parameters": {**(agreed or {"rope_type": "default"}), "rope_theta": base}}, notes
    if config.get("rope_theta") is None and base != DEFAULT_BASE:
        notes.append(
            f"{reader} would read the default rotary base {DEFAULT_BASE:g} from this config.json: "
            f"given rope_theta = {base}"
        )
    if agreed and not scaling:
        notes.append(
            f"{reader} would read no rotary scaling from this config.json: "
            f"given rope_scaling of type `{agreed['rope_type']}`"
        )
    return spelled | {"rope_theta": base, "rope_scaling": agreed}, notes


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Return a table of rotary settings, None where there is none."""
    table = config.get(key)
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise UsageError(f"`{key}` in config.json is no table: {table!r}")
    nested = [name for name, value in table.items() if isinstance(value, Mapping)]
    if nested:
        raise UsageError(
            f"`{key}` in config.json has a rotary embedding for each type of layer",
            items=nested,
            why="the networks of these families have one for all layers",
        )
    old, new = table.get("type"), table.get("rope_type")
    if None not in (old, new) and old != new:  # transformers 4 follows the one, transformers 5 the other
        raise _contradiction(f"{key}.type", old, f"{key}.rope_type", new)
    return table


def _base(config: Mapping[str, Any], *tables: Mapping[str, Any] | None) -> float:
    """Return the rotary base, wherever it stands."""
    places = ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta")
    said = {
        place: table["rope_theta"]
        for place, table in zip(places, (config, *tables), strict=True)
        if table is not None and table.get("rope_theta") is not None
    }
    for place, base in said.items():
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise UsageError(f"`{place}` in config.json is no number: {base!r}")
    if len(set(said.values())) > 1:
        (one, its), (two, other) = list(said.items())[:2]
        raise _contradiction(one, its, two, other)
    return float(next(iter(said.values()), DEFAULT_BASE))


def _scaling(config: Mapping[str, Any], parameters: Mapping[str, Any] | None, old: Any) -> Config | None:
    """Return the scaling that both tables, or the only one, ask for; None for none."""
    if parameters is None:
        return _normal(old, config)
    agreed = _normal(parameters, config)
    if "rope_scaling" in config and _normal(old or {}, config) != agreed:
        raise _contradiction("rope_scaling", old, "rope_parameters", dict(parameters))
    return agreed


def _normal(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> Config | None:
    """Return a scaling with its type under one name and its original length filled in; None for the default."""
    rest = {key: value for key, value in scaling.items() if key not in ("type", "rope_type", "rope_theta")}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind in _NEED_ORIGINAL and rest.get("original_max_position_embeddings") is None:
        length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        if length is not None:
            rest["original_max_position_embeddings"] = length
    return {"rope_type": kind, **rest}


def _name_experts(config: Config, reader: str) -> list[str]:
    """Give the count of experts the name that transformers 4 reads; it would take its default, 128."""
    if config.get("model_type") != "qwen3_moe" or "num_local_experts" not in config:
        return []
    count = config.pop("num_local_experts")
    if config.setdefault("num_experts", count) != count:
        raise _contradiction("num_experts", config["num_experts"], "num_local_experts", count)
    return [f"{reader} reads the count of experts from `num_experts`: given num_experts = {count}"]


def _contradiction(one: str, its: Any, two: str, others: Any) -> UsageError:
    return UsageError(
        f"config.json contradicts itself: `{one}` is {its!r} and `{two}` is {others!r}",
        why="transformers 4 reads the one, transformers 5 the other",
        hint="correct config.json, so that both say the same or only one is there",
    )
