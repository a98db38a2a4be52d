"""`ckptkit inspect`: what a checkpoint holds, from its headers alone. Works without numpy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.commands.choose import type_text
from ckptkit.commands.source import Source, load_own_tables, open_source
from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.files import look, read_json_object, regular_file
from ckptkit.formats.manifest import read_manifest
from ckptkit.formats.mindformers_folder import METADATA
from ckptkit.formats.mindspore_strategy import Strategy, find_strategy, read_strategies
from ckptkit.formats.model_config import CONFIG, quantization, read_config
from ckptkit.formats.part_manifests import refuse_incomplete
from ckptkit.formats.rank_folders import RankSet, find_ranks, open_ranks
from ckptkit.formats.wrappers import ADAPTER_CONFIG, adapter_names
from ckptkit.layout.slices import whole_shape
from ckptkit.mapping.state_names import parameter_of
from ckptkit.mapping.tables import Tables
from ckptkit.report import Report, fold_names, human_bytes, listed
from ckptkit.types import TensorInfo


def inspect(
    path: str | Path,
    *,
    expect: str | Path | None = None,
    table: Sequence[str | Path] = (),
    all_tensors: bool = False,
    step: int | None = None,
) -> Report:
    """Describe the checkpoint at `path`: format, naming, tensors, sizes, what is odd about it.

    `expect` is a JSON file of the tensors that must be there: a list of names, or an object of name -> shape
    (null for any); CoverageError when one is missing, unexpected or misshapen. `all_tensors` lists each tensor in
    the text; the data always has all of them. A checkpoint that is cut over ranks is described rank by rank, at the
    newest step or at `step`. Reads headers only.
    """
    path = Path(path)
    look(path)
    if path.is_dir() and find_ranks(path):
        refuse_incomplete(path, read_manifest(path))
        return _inspect_ranks(open_ranks(path, step=step), expect, all_tensors)
    source = open_source(path)
    checkpoint = source.checkpoint
    if expect is not None:
        _compare_with_expected(checkpoint, Path(expect))
    report = Report("inspect", f"`{path}`")
    report.data = _data(checkpoint)
    report.add("format", f"{checkpoint.kind}, {len(checkpoint.files)} file(s), {human_bytes(_file_bytes(checkpoint))}")
    _add_naming(report, source, load_own_tables(table))
    _add_quantization(report, checkpoint)
    _add_adapter(report, checkpoint)
    count = sum(t.num_elements for t in checkpoint.tensors.values())
    size = sum(t.num_bytes for t in checkpoint.tensors.values())
    report.add("tensors", f"{len(checkpoint.tensors)}, {count:,} elements, {human_bytes(size)}")
    by_dtype = Counter(t.dtype for t in checkpoint.tensors.values())
    report.add("dtypes", ", ".join(f"{dtype} x {number}" for dtype, number in by_dtype.most_common()))
    for text in listed([f"{f.name}  {human_bytes(f.stat().st_size)}" for f in checkpoint.files]):
        report.add("files", text)
    for text in _tensor_rows(checkpoint, all_tensors):
        report.add("holds", text)
    for note in checkpoint.notes:
        report.add("note", note)
    if expect is not None:
        report.add("expected", f"all {len(checkpoint.tensors)} tensors are as `{expect}` says")
    return report


def _inspect_ranks(ranks: RankSet, expect: str | Path | None, all_tensors: bool) -> Report:
    """Describe a sharded checkpoint: each rank's file, and the tensors of rank 0."""
    if expect is not None:
        for checkpoint in ranks.ranks.values():
            _compare_with_expected(checkpoint, Path(expect))
    report = Report("inspect", f"`{ranks.folder}`")
    report.data = {"path": str(ranks.folder), "ranks": {str(r): _data(c) for r, c in ranks.ranks.items()}}
    report.add("format", f"{ranks.ranks[0].kind}, sharded over {len(ranks.ranks)} rank(s)")
    _add_iteration(report, ranks)
    rows = [
        f"rank_{rank}  {_file_names(c)}  {len(c.tensors)} tensors, {human_bytes(_file_bytes(c))}"
        for rank, c in ranks.ranks.items()
    ]
    for text in listed(rows):
        report.add("ranks", text)
    names = {frozenset(checkpoint.tensors) for checkpoint in ranks.ranks.values()}
    report.add("names", "every rank has the same" if len(names) == 1 else f"{len(names)} different sets (stages)")
    strategies, where = _strategies(ranks)
    if strategies:
        _add_layout(report, ranks, strategies, where, all_tensors)
    else:
        report.add("layout", where)
        for text in _tensor_rows(ranks.ranks[0], all_tensors):
            report.add("rank_0", text)
    for note in (*ranks.notes, *(note for c in ranks.ranks.values() for note in c.notes)):
        report.add("note", note)
    return report


def _add_iteration(report: Report, ranks: RankSet) -> None:
    """Say which iteration of a newer folder of MindFormers this is, and what it says of itself."""
    iteration = ranks.iteration
    if iteration is None:
        return
    common = {key: value for key, value in (iteration.common or {}).items() if value is not None}
    report.data["iteration"] = {"number": iteration.number, "folder": iteration.place.folder.name, "common": common}
    facts = ", ".join(f"{key} {value}" for key, value in common.items())
    report.add("iteration", f"{iteration.place.folder.name}{f': {facts}' if facts else ''}")
    if ranks.thinned:
        report.add("saved", "with `remove_redundancy`: of the ranks with equal slices one has them")


def _file_names(checkpoint: Checkpoint) -> str:
    return ", ".join(file.name for file in checkpoint.files) or "(no file)"


def _strategies(ranks: RankSet) -> tuple[Sequence[Strategy], str]:
    """Return the layout of each stage, and what says it; none, and why, where nothing does."""
    if ranks.iteration is not None:
        metadata = ranks.iteration.metadata
        return (metadata.strategies(), METADATA) if metadata else ((), "whole: one rank saved it")
    where = find_strategy(ranks.folder)
    if where is None:
        return (), "unknown: no strategy files lie here, so what is whole and what is cut cannot be told"
    axes = {name: len(info.shape) for rank in ranks.ranks.values() for name, info in rank.tensors.items()}
    return read_strategies(where, num_axes=axes), where.name


def _add_layout(report: Report, ranks: RankSet, strategies: Sequence[Strategy], where: str, all_tensors: bool) -> None:
    """Say how the tensors are cut, and list them whole."""
    devices = prod(next(iter(strategies[0].tensors.values())).dev_matrix)
    what = f"{len(strategies)} stage(s) of {devices} device(s), from `{where}`"
    if len(strategies) * devices != len(ranks.ranks):
        report.add("layout", f"{what}: not of these {len(ranks.ranks)} ranks")
        return
    report.add("layout", what)
    whole: dict[str, TensorInfo] = {}
    for rank, checkpoint in ranks.ranks.items():
        strategy = strategies[rank // devices]
        for name, info in checkpoint.tensors.items():
            if name in whole:
                continue
            layout = strategy.tensors.get(name) or strategy.tensors.get(parameter_of(name) or "")
            shape = info.shape if layout is None else whole_shape(layout, info.shape, name)
            whole[name] = replace(info, shape=shape)
    report.data["whole"] = {name: {"shape": list(info.shape), "dtype": info.dtype} for name, info in whole.items()}
    for text in _tensor_rows(replace(ranks.ranks[0], tensors=whole), all_tensors):
        report.add("whole", text)


def _file_bytes(checkpoint: Checkpoint) -> int:
    return sum(f.stat().st_size for f in checkpoint.files)


def _data(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.kind,
        "files": [{"name": f.name, "bytes": f.stat().st_size} for f in checkpoint.files],
        "metadata": dict(checkpoint.metadata),
        "tensors": {
            t.name: {"shape": list(t.shape), "dtype": t.dtype, "file": t.file.name} for t in checkpoint.tensors.values()
        },
        "notes": list(checkpoint.notes),
    }


def _add_naming(report: Report, source: Source, tables: Tables) -> None:
    """Say which family and dialect the names and config.json show; nothing is guessed between equal fits."""
    checkpoint, manifest = source.checkpoint, source.manifest
    if manifest is not None and manifest["to"]["dialect"]:  # a reshard by names alone knows of none
        to = manifest["to"]
        variant = f", variant {to['variant']}" if to["variant"] else ""
        report.add("naming", f"{manifest['family']}, {to['dialect']}{variant} (ckptkit.json)")
        report.data |= {"family": manifest["family"], "dialect": to["dialect"], "variant": to["variant"]}
        return
    family = None
    if (checkpoint.folder / "config.json").is_file():
        config = read_config(checkpoint.folder)
        try:
            family = tables.for_config(config)
        except UsageError:
            report.add("naming", f"no table for {type_text(config)}")
            return
    matches = tables.detect(checkpoint.tensors.keys(), family)
    if not matches:
        report.add("naming", "not known to any table")
        return
    first = matches[0]
    best = [m for m in matches if m.matched == first.matched and (m.dialect, m.absent) == (first.dialect, first.absent)]
    names = sorted({f"{m.dialect}{', variant ' + m.variant if m.variant else ''}" for m in best})
    prefix = f"{family.name}, " if family else ""
    report.add("naming", prefix + " or ".join(names))
    if len(names) > 1:  # nothing in a file says how fused rows lie
        report.add("", "`ckptkit verify HF THIS --level layers --variant-b V`, with any V of these, tells which it is")
    report.data |= {"family": family.name if family else None, "dialects": names}


def _add_quantization(report: Report, checkpoint: Checkpoint) -> None:
    """Say that config.json calls the weights quantised: their names, shapes and dtypes are another matter then."""
    method = None
    if (checkpoint.folder / CONFIG).is_file():
        method = quantization(read_config(checkpoint.folder))
    report.data["quantization"] = method
    if method is not None:
        report.add("quantised", f"{method} ({CONFIG})")


def _add_adapter(report: Report, checkpoint: Checkpoint) -> None:
    """Say that a LoRA adapter is among the tensors, or beside them."""
    names = adapter_names(checkpoint)
    config: dict[str, Any] = {}
    if has_config := checkpoint.path.is_dir() and (checkpoint.path / ADAPTER_CONFIG).is_file():
        config = read_json_object(checkpoint.path / ADAPTER_CONFIG)
    report.data["adapter"] = None
    if not names and not has_config:
        return
    kind, base = (config.get(key) for key in ("peft_type", "base_model_name_or_path"))
    report.data["adapter"] = {"type": kind, "base": base, "tensors": len(names)}
    text = f"{kind or 'LoRA'}{f' of `{base}`' if base else ''}{f' ({ADAPTER_CONFIG})' if has_config else ''}"
    text += f", {len(names)} of {len(checkpoint.tensors)} tensors" if names else ""
    report.add("adapter", f"{text}: not merged, so `convert` refuses it")


def _tensor_rows(checkpoint: Checkpoint, all_tensors: bool) -> list[str]:
    if all_tensors:
        return [f"{t.name}  {t.shape}  {t.dtype}" for t in checkpoint.tensors.values()]
    groups: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for tensor in checkpoint.tensors.values():
        groups.setdefault((tensor.shape, tensor.dtype), []).append(tensor.name)
    folded = {
        pattern: f"{pattern}  {shape}  {dtype}" + (f"  x {number}" if number > 1 else "")
        for (shape, dtype), names in groups.items()
        for pattern, number in fold_names(names)
    }
    return [folded[p] for p, _ in fold_names(checkpoint.tensors) if p in folded] or list(folded.values())


def _compare_with_expected(checkpoint: Checkpoint, path: Path) -> None:
    expected = _read_expected(path)
    found = checkpoint.tensors
    wrong = [f"missing: {name}" for name in expected if name not in found]
    wrong += [f"unexpected: {name}" for name in found if name not in expected]
    wrong += [
        f"shape: {name} is {found[name].shape}, expected {tuple(shape)}"
        for name, shape in expected.items()
        if shape is not None and name in found and tuple(shape) != found[name].shape
    ]
    if wrong:
        raise CoverageError(
            f"`{checkpoint.path}` differs from `{path.name}` in {len(wrong)} tensors",
            items=wrong,
            why=f"{len(expected)} tensors are expected and {len(found)} are there, {_elements(found)} elements",
            hint="the file may be cut; get it again",
        )


def _elements(found: Mapping[str, Any]) -> str:
    return f"{sum(prod(t.shape) for t in found.values()):,}"


def _read_expected(path: Path) -> dict[str, list[int] | None]:
    regular_file(path, "`--expect`")
    try:
        expected = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read `{path}`: {error}", hint="a JSON list of names, or {name: shape}") from None
    if isinstance(expected, list) and all(isinstance(name, str) for name in expected):
        return dict.fromkeys(expected)
    if isinstance(expected, dict) and all(v is None or isinstance(v, list) for v in expected.values()):
        return expected
    raise UsageError(f"`{path}` is neither a list of names nor an object of name -> shape")
