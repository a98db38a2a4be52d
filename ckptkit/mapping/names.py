"""Name patterns of tables: `model.layers.{layer}.mlp.up_proj.weight`.

A placeholder stands for one whole number and fills a whole dotted part of a name, so that a pattern is filled in
by formatting and a name finds its pattern by blotting out its numbers. Only [[ignore]] rows may also use `*`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_NUMBER = re.compile(r"\.\d+(?=[.\n])")  # a whole dotted part, of a name with a dot before and a line's end after it


def placeholders(pattern: str) -> tuple[str, ...]:
    """Return the names of the placeholders of `pattern`, in order."""
    return tuple(_PLACEHOLDER.findall(pattern))


def fault(pattern: str) -> str:
    """Return what is wrong with `pattern`, or the empty string."""
    if not pattern or pattern != pattern.strip() or "" in pattern.split("."):
        return "has an empty part"
    for part in pattern.split("."):
        if ("{" in part or "}" in part) and not _PLACEHOLDER.fullmatch(part):
            return f"has `{part}`: a placeholder such as `{{layer}}` must be all between two dots"
    found = placeholders(pattern)
    if len(set(found)) != len(found):
        return "has a placeholder twice"
    return ""


def fill(pattern: str, numbers: Mapping[str, int]) -> str:
    """Return `pattern` with numbers in the place of its placeholders, as far as they are given."""
    for placeholder, number in numbers.items():
        pattern = pattern.replace(f"{{{placeholder}}}", str(number))
    return pattern


def skeleton(name: str) -> str:
    """Return a tensor's name with its numbers blotted out: `model.layers.{}.mlp.up_proj.weight`."""
    return ".".join(["{}" if part.isdecimal() else part for part in name.split(".")])


def skeletons(names: Collection[str]) -> list[str]:
    """Return the skeleton of each name: one search through all of them takes half the time of one for each."""
    text = "." + "\n.".join(names) + "\n"
    if not names or text.count("\n") != len(names):  # a name of several lines
        return [skeleton(name) for name in names]
    return _NUMBER.sub(".{}", text)[1:-1].split("\n.")


def pattern_skeleton(pattern: str) -> str:
    """Return the skeleton of the names that `pattern` stands for."""
    return skeleton(_PLACEHOLDER.sub("0", pattern))


def ignore_regex(pattern: str) -> re.Pattern[str]:
    """Return a regex for an [[ignore]] pattern: `{layer}` is a number, `*` is anything."""
    parts = re.split(r"(\{[a-z_]+\}|\*)", pattern)
    return re.compile("".join(r"\d+" if p[:1] == "{" else ".*" if p == "*" else re.escape(p) for p in parts))


def bias_name(weight: str) -> str:
    """Return the name of the bias that goes with a weight: `.weight` becomes `.bias`."""
    return weight.removesuffix(".weight") + ".bias"
