"""What the manifest of a sharded result says of its ranks: which are there, which are to come; two made one.

`layout.ranks` is how many there are to be; `layout.only` those that are there, as long as some are missing. What does
not live here: bringing the files of two parts into one folder (`parts.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckptkit.errors import CoverageError
from ckptkit.formats.manifest import MANIFEST
from ckptkit.quantities import numbers_text


def missing_ranks(manifest: Mapping[str, Any]) -> list[int]:
    """Return the ranks of a result that are not there, as its manifest says."""
    layout = manifest.get("layout", {})
    if not isinstance(layout, dict) or "only" not in layout:
        return []
    return sorted(set(range(layout["ranks"])) - set(layout["only"]))


def refuse_incomplete(folder: Path, manifest: Mapping[str, Any] | None) -> None:
    """Raise CoverageError for a result that lacks ranks, or has some that its manifest does not name."""
    if manifest is None or not (missing := missing_ranks(manifest)):
        return
    come = [rank for rank in missing if (folder / f"rank_{rank}").is_dir()]
    why = "they were copied here by hand, or a run that was to join them was stopped" if come else ""
    raise CoverageError(
        f"`{folder.name}` is not complete: its {MANIFEST} names ranks {numbers_text(manifest['layout']['only'])} "
        f"of {manifest['layout']['ranks']}",
        items=[f"rank_{rank} is {'not in the manifest' if rank in come else 'missing'}" for rank in missing],
        why=why or "the run that writes the other ranks has not ended",
        hint=f"run the command that made it with `--ranks {numbers_text(missing)}`, into this folder: that joins them",
    )


def ranks_in(manifest: Mapping[str, Any]) -> set[int]:
    """Return the ranks that a manifest has files of."""
    return {_rank_of(row["name"]) for row in manifest["files"]}


def _rank_of(file: str) -> int:
    return int(file.partition("/")[0].removeprefix("rank_"))


def joined(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of two parts, rank by rank; of what both have, that of `one`."""
    rows = {row["name"]: row for part in (two, one) for row in part["files"]}
    files = [rows[name] for name in sorted(rows, key=_rank_of)]
    tensors = {**two["tensors"], **one["tensors"]}
    order = sorted(tensors, key=lambda name: _rank_of(tensors[name]["file"]))
    seen = {**two["source"]["tensors"], **one["source"]["tensors"]}
    return {
        **one,
        **({"cast": _added_casts(one["cast"], two["cast"])} if "cast" in one else {}),
        "layout": _with_only(one["layout"], {_rank_of(name) for name in rows}),
        "source": {**one["source"], "tensors": seen},
        "files": files,
        "side_files": {**two["side_files"], **one["side_files"]},
        "tensors": {name: tensors[name] for name in order},
    }


def without(manifest: Mapping[str, Any], ranks: Collection[int]) -> dict[str, Any]:
    """Return the manifest of what is left when `ranks` are taken away."""
    away = {f"rank_{rank}" for rank in ranks}
    return {
        **manifest,
        "layout": _with_only(manifest["layout"], ranks_in(manifest) - set(ranks)),
        "files": [row for row in manifest["files"] if row["name"].partition("/")[0] not in away],
        "side_files": {n: digest for n, digest in manifest["side_files"].items() if n.partition("/")[0] not in away},
        "tensors": {n: row for n, row in manifest["tensors"].items() if row["file"].partition("/")[0] not in away},
    }


def _with_only(layout: Mapping[str, Any], ranks: Collection[int]) -> dict[str, Any]:
    known = {key: value for key, value in layout.items() if key != "only"}
    return known if len(ranks) == layout["ranks"] else {**known, "only": sorted(ranks)}


def _added_casts(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the casts of two parts did; each part counts what it wrote."""
    pairs: dict[tuple[str, str], int] = {}
    for row in (*one["pairs"], *two["pairs"]):
        key = row["from"], row["to"]
        pairs[key] = pairs.get(key, 0) + row["tensors"]
    return {
        **one,
        "pairs": [{"from": old, "to": new, "tensors": count} for (old, new), count in pairs.items()],
        **{key: one[key] + two[key] for key in ("overflowed", "flushed")},
    }
