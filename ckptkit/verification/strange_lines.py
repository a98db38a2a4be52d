"""What is strange about parameters, in as few lines as say it: layers folded, and equal layers told as layers.

What does not live here: what is strange (`statistics.py`), reports and pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptkit.report import fold_names, times
from ckptkit.verification.statistics import Strange


def folded(lines: Sequence[Strange]) -> Iterator[str]:
    """Yield lines with layers folded: those of one kind, and of one text, are told together."""
    told: dict[str, list[str]] = {}
    for line in lines:
        if line.kind in ("duplicate", "tied"):
            continue
        told.setdefault(line.text, []).extend(line.names)
    for text, names in told.items():
        for pattern, count in fold_names(names):
            yield f"{times(pattern, count)}: {text}"
    yield from _equal([line for line in lines if line.kind in ("duplicate", "tied")])


def _equal(lines: Sequence[Strange]) -> Iterator[str]:
    """Yield groups of equal parameters; those of the same layers are told together, as a layer that is another."""
    groups: dict[tuple[str, ...], list[Strange]] = {}
    for line in lines:
        layers = [next((part for part in name.split(".") if part.isdecimal()), "") for name in line.names]
        key = tuple(layers) if all(layers) and len(set(layers)) > 1 else line.names
        groups.setdefault((line.text, *key), []).append(line)
    for (text, *layers), its in groups.items():
        if len(its) > 1:
            yield f"layers {', '.join(layers)}: {len(its)} parameters are {text}, {_pattern(its[0].names)} first"
        else:
            yield f"{_pattern(its[0].names)}: {text}"


def _pattern(names: Sequence[str]) -> str:
    return ", ".join(pattern for pattern, _ in fold_names(names))
