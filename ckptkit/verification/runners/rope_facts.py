"""config.json's words about rotary positions, in both spellings, as a `Rope`. The frequencies are `rope.py`'s.

transformers 4 has `rope_theta`, and `rope_scaling` with `rope_type` (older: `type`); transformers 5 has
`rope_parameters` with all of these inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import UsageError

DEFAULT_BASE = 10000.0
# The parameters that each type needs, and those it may have beside them.
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_MAY = {
    "dynamic": ("original_max_position_embeddings",),
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings",
        "truncate",
    ),
}  # fmt: skip
# Parameters of rotary schemes that are not here: with one of them the type alone does not say what is meant.
_OTHER_SCHEMES = frozenset({"long_factor", "short_factor", "long_mscale", "short_mscale", "mrope_section", "alpha"})
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions turn queries and keys. `original` is the number of positions before scaling, `attention_factor`
    what cosines and sines are multiplied by; what a type does not use keeps its neutral value."""

    type: str
    base: float
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def reading(self) -> dict[str, Any]:
        """Return the type and the parameters that it uses, under the names that all runners share."""
        every = {
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "attention_factor": self.attention_factor,
            "original_max_position_embeddings": self.original,
            "truncate": self.truncate,
        }
        used = {
            "default": (),
            "linear": ("factor",),
            "dynamic": ("factor", "original_max_position_embeddings"),
            "llama3": _NEEDS["llama3"],
            "yarn": (
                "factor", "beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings", "truncate",
            ),
        }  # fmt: skip
        return {"type": self.type, **{name: every[name] for name in used[self.type]}}


@dataclass(frozen=True, slots=True)
class RopeWords:
    """What a config says: the keys that were read, a Rope, remarks, and parameters of unknown meaning."""

    read: frozenset[str]
    rope: Rope
    notes: tuple[str, ...]
    unknown: tuple[str, ...]


def read_rope(config: Mapping[str, Any], max_positions: int) -> RopeWords:
    """Return the rotary scheme of `config`, whose `max_position_embeddings` is `max_positions`.

    UsageError when the two spellings contradict each other, or the scheme is none of default, linear, dynamic,
    llama3, yarn over the whole head.
    """
    key, scaling = _scaling(config)
    kind = _kind(key, scaling)
    notes: list[str] = []
    base = _base(config, key, scaling, notes)
    _refuse_partial(config, key, scaling)
    if outer := config.get("original_max_position_embeddings"):
        inner = scaling.get("original_max_position_embeddings")
        if kind in ("llama3", "yarn") and inner != outer:
            raise UsageError(
                f"`original_max_position_embeddings` is {outer} in config.json and {inner} in its `{key}`",
                why="transformers 4 goes by the inner one, transformers 5 by the outer one",
            )
    rope = _rope(key, kind, base, scaling, max_positions, notes)
    known = {*_COMMON, *_NEEDS[kind], *_MAY.get(kind, ())}
    unknown = tuple(f"{key}.{name}" for name in scaling if name not in known)
    read = {
        "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings",
    }  # fmt: skip
    return RopeWords(frozenset(read), rope, tuple(notes), unknown)


def _scaling(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the dict of rotary parameters, whichever its spelling, and its key; an empty dict for none."""
    both = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None}
    for key, value in both.items():
        if not isinstance(value, Mapping):
            raise UsageError(f"`{key}` of config.json is {value!r}, not an object")
        if any(isinstance(inner, Mapping) for inner in value.values()):
            raise UsageError(f"`{key}` of config.json differs by kind of layer, which this network does not express")
    if len(both) == 2:
        old, new = (
            {"rope_type": _kind(key, value), **{k: v for k, v in value.items() if k not in ("type", "rope_theta")}}
            for key, value in both.items()
        )
        if old != new:
            raise UsageError(
                "`rope_scaling` and `rope_parameters` of config.json contradict each other",
                why="transformers 4 goes by the one, transformers 5 by the other",
            )
    if "rope_parameters" in both:
        return "rope_parameters", both["rope_parameters"]
    return "rope_scaling", both.get("rope_scaling", {})


def _kind(key: str, scaling: Mapping[str, Any]) -> str:
    """Return the type; UsageError for one that is not expressed here, and for two that differ."""
    types = {scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None}
    if len(types) > 1:
        raise UsageError(
            f"`rope_type` and `type` in `{key}` of config.json differ: {', '.join(sorted(map(str, types)))}"
        )
    if not types and key == "rope_scaling" and scaling:
        raise UsageError("`rope_scaling` of config.json has no `rope_type`", items=sorted(scaling))
    kind = str(types.pop()) if types else "default"
    if kind not in _NEEDS:
        raise UsageError(
            f"rotary type `{kind}` in `{key}` of config.json is not expressed by this network",
            hint=f"it knows {', '.join(_NEEDS)}",
        )
    if foreign := sorted(_OTHER_SCHEMES & {name for name, value in scaling.items() if value is not None}):
        raise UsageError(f"`{key}` of config.json has parameters of another rotary scheme than `{kind}`", items=foreign)
    return kind


def _base(config: Mapping[str, Any], key: str, scaling: Mapping[str, Any], notes: list[str]) -> float:
    said = {}
    if "rope_theta" in config:
        said["rope_theta"] = positive("rope_theta", config["rope_theta"])
    if "rope_theta" in scaling:
        said[f"{key}.rope_theta"] = positive(f"{key}.rope_theta", scaling["rope_theta"])
    if len(set(said.values())) > 1:
        raise UsageError(
            "config.json has two rotary bases",
            items=[f"{name}  {value}" for name, value in said.items()],
            why="transformers 4 goes by the outer one, transformers 5 by the inner one",
        )
    if not said:
        notes.append(f"`rope_theta` is missing: {DEFAULT_BASE}, transformers' default")
        return DEFAULT_BASE
    base = next(iter(said.values()))
    if base <= 1:
        raise UsageError(f"`rope_theta` of config.json is {base}, which gives no falling frequencies")
    return base


def _refuse_partial(config: Mapping[str, Any], key: str, scaling: Mapping[str, Any]) -> None:
    for name, value in (
        ("partial_rotary_factor", config.get("partial_rotary_factor")),
        (f"{key}.partial_rotary_factor", scaling.get("partial_rotary_factor")),
    ):
        if value is not None and value != 1:
            raise UsageError(
                f"`{name}` of config.json is {value}: rotary positions over a part of each head are not expressed here"
            )


def _rope(key: str, kind: str, base: float, scaling: Mapping[str, Any], max_positions: int, notes: list[str]) -> Rope:
    if missing := [name for name in _NEEDS[kind] if scaling.get(name) is None]:
        raise UsageError(f"rotary type `{kind}` in `{key}` of config.json lacks parameters", items=missing)

    def number(name: str, default: float = 1.0) -> float:
        value = scaling.get(name)
        return default if value is None else positive(f"{key}.{name}", value)

    if kind == "default":
        return Rope(kind, base)
    factor = number("factor")
    if kind == "linear":
        return Rope(kind, base, factor)
    stated = scaling.get("original_max_position_embeddings")
    if kind == "dynamic":
        if stated is not None and stated != max_positions:
            notes.append(
                f"`{key}.original_max_position_embeddings` is {stated}: transformers does not read it for `dynamic`, "
                f"and goes by `max_position_embeddings`, {max_positions}"
            )
        return Rope(kind, base, factor, max_positions)
    if not stated:
        notes.append(
            f"`{key}.original_max_position_embeddings` is missing: `max_position_embeddings`, {max_positions}, "
            "as transformers takes it"
        )
    original = count(f"{key}.original_max_position_embeddings", stated or max_positions)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise UsageError(f"`{key}` of config.json has a low_freq_factor of {low}, not below its high_freq_factor")
        return Rope(kind, base, factor, original, low, high)
    return Rope(
        kind, base, factor, original,
        beta_fast=number("beta_fast") if scaling.get("beta_fast") else 32.0,
        beta_slow=number("beta_slow") if scaling.get("beta_slow") else 1.0,
        attention_factor=_yarn_attention_factor(factor, scaling, number),
        truncate=bool(scaling.get("truncate", True)),
    )  # fmt: skip


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any], number: Callable[[str], float]) -> float:
    """Return what yarn multiplies cosines and sines by.

    The formula is that of the paper (arXiv 2309.00071, section 3.4: 0.1 ln(s) + 1), with DeepSeek's two `mscale`s,
    as transformers' `_compute_yarn_parameters` evaluates it.
    """
    if scaling.get("attention_factor") is not None:
        return number("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _mscale(factor, number("mscale")) / _mscale(factor, number("mscale_all_dim"))
    return _mscale(factor)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def positive(name: str, value: Any) -> float:
    """Return the value of a key; UsageError when it is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise UsageError(f"`{name}` of config.json is {value!r}, not a number above 0")
    return float(value)


def count(name: str, value: Any) -> int:
    """Return the value of a key; UsageError when it is no whole number above 0."""
    number = positive(name, value)
    if number != int(number):
        raise UsageError(f"`{name}` of config.json is {value!r}, not a whole number")
    return int(number)
