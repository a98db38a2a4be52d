"""Open a checkpoint that is cut over ranks: its files, what says how it was cut, its manifest.

Both kinds are opened here alike: `rank_N` folders with strategy files, and MindFormers' newer folders, whose
metadata.json has the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ckptkit.commands.source import Source
from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.disk import file_digest
from ckptkit.formats.files import listed
from ckptkit.formats.folder import file_names
from ckptkit.formats.manifest import MANIFEST, compare_with_manifest, named_files, read_manifest
from ckptkit.formats.mindformers_folder import METADATA, TRACKER, Place
from ckptkit.formats.mindformers_ranks import Iteration
from ckptkit.formats.mindspore_strategy import STRATEGY, find_strategy, read_strategies
from ckptkit.formats.part_manifests import refuse_incomplete
from ckptkit.formats.rank_folders import SUFFIXES, RankSet, find_ranks, open_ranks
from ckptkit.layout.layout import Layout, Stage, check_num_ranks, replicated, slice_number
from ckptkit.layout.slices import num_parts, shard_index, whole_shape
from ckptkit.mapping.state_names import parameter_of
from ckptkit.plan.join import join
from ckptkit.types import Shape, TensorInfo, TensorLayout

_UNCUT = "no strategy file says how `rank_0` was cut: its tensors are taken as whole"


def open_sharded(path: Path, *, strategy: Path | None = None, step: int | None = None) -> Source:
    """Open the ranks of `path` as one checkpoint of whole tensors.

    `strategy` is a strategy file or a folder of them, for `rank_N` folders; without it, those in `path` or in its
    folder `strategy` count. Raises UsageError when there are none and several ranks, CoverageError when ranks and
    layout do not fit, or when the manifest says that parts of the result are still to come.
    """
    manifest = read_manifest(path)
    refuse_incomplete(path, manifest)
    if step is None:
        refuse_others(path, manifest)
    ranks = open_ranks(path, step=step)
    if ranks.iteration is not None:
        return _open_iteration(path, ranks, ranks.iteration, strategy, step)
    if manifest is not None:
        _check_manifest(path, ranks, manifest)
        _check_strategy(path, strategy, manifest, _num_axes(ranks))
    where = strategy or find_strategy(path)
    if where is None and len(ranks.ranks) > 1:
        raise UsageError(
            f"`{path}` holds {len(ranks.ranks)} ranks, and nothing says how its tensors were cut",
            why="the same shards make different tensors under different layouts",
            hint="pass `--src-strategy`: the strategy file, or the folder of them, that the run saved",
        )
    layout, shapes = (_single_device(ranks.ranks[0]), {}) if where is None else read_layout(where, _num_axes(ranks))
    joined = join(ranks.ranks, layout, parameter_of=parameter_of, shapes=shapes, thinned=ranks.thinned)
    first = ranks.ranks[0]
    checkpoint = Checkpoint(
        path, path, first.kind, tuple(file for rank in ranks.ranks.values() for file in rank.files), joined.tensors,
        first.metadata, (*_notes(ranks), *([_UNCUT] if where is None else []), *ranks.notes, *joined.notes),
    )  # fmt: skip
    return Source(checkpoint, manifest, joined, ranks)


def open_stored(path: Path) -> Source:
    """Open the ranks of `path` as what is stored in them, each tensor by the name that a manifest has."""
    manifest = read_manifest(path)
    refuse_incomplete(path, manifest)
    refuse_others(path, manifest)
    ranks = open_ranks(path)
    if ranks.iteration is not None:
        manifest = _manifest_of(path, ranks.iteration, told=False)
    if manifest is not None:
        _check_manifest(path, ranks, manifest)
    odd = [] if ranks.iteration is None else _iteration_layout(ranks, ranks.iteration)[2]
    tensors = flat(ranks.ranks)
    files = dict.fromkeys(info.file for info in tensors.values())
    notes = (*_notes(ranks), *ranks.notes, *odd)
    folder = ranks.folder
    checkpoint = Checkpoint(folder, folder, ranks.ranks[0].kind, tuple(files), tensors, {}, notes)
    return Source(checkpoint, manifest, ranks=ranks)


def _open_iteration(
    path: Path, ranks: RankSet, iteration: Iteration, strategy: Path | None, step: int | None
) -> Source:
    """Open an iteration of a newer folder of MindFormers as one checkpoint of whole tensors."""
    if strategy is not None:
        raise UsageError(
            f"`--src-strategy` is about `rank_N` folders, and `{path}` has its layout in `{METADATA}`",
            hint="leave it out",
        )
    manifest = _manifest_of(path, iteration, told=step is not None)
    if manifest is not None:
        _check_manifest(path, ranks, manifest)
        _check_metadata(iteration.place, manifest)
    layout, shapes, notes = _iteration_layout(ranks, iteration)
    joined = join(ranks.ranks, layout, parameter_of=parameter_of, shapes=shapes, thinned=ranks.thinned)
    first = ranks.ranks[0]
    where = ranks.folder if step is None else iteration.place.folder  # opened again by this, it is the same iteration
    found = tuple(dict.fromkeys(file for rank in ranks.ranks.values() for file in rank.files))
    checkpoint = Checkpoint(
        where, ranks.folder, first.kind, found, joined.tensors, first.metadata, (*ranks.notes, *notes, *joined.notes)
    )
    return Source(checkpoint, manifest, joined, ranks)


def _manifest_of(path: Path, iteration: Iteration, *, told: bool) -> dict[str, Any] | None:
    """Return the manifest that is about an iteration, from its own folder or from the one around it.

    Raises CorruptError when there is one of another iteration, and nobody `told` that this one is meant.
    """
    place = iteration.place
    manifest = read_manifest(place.root)
    if manifest is None or all(row["name"].startswith(place.prefix) for row in manifest["files"]):
        return manifest
    if told or path.resolve() == place.folder.resolve():
        return None
    raise CorruptError(
        f"`{TRACKER}` names iteration {place.number}, and {MANIFEST} is of another",
        items=sorted({str(row["name"]).partition("/")[0] for row in manifest["files"]}),
        why="the tracker was changed after the manifest was written",
        hint=f"name an iteration with `--step`, or by its folder; or remove {MANIFEST}",
    )


def _check_metadata(place: Place, manifest: Mapping[str, Any]) -> None:
    """Raise CorruptError for a metadata.json that is not the one that a manifest was written with."""
    name = place.prefix + METADATA
    promised = manifest["side_files"].get(name)
    if promised is not None and file_digest(place.folder / METADATA) != promised:
        raise CorruptError(
            f"`{name}` is not what {MANIFEST} promises",
            why="under another layout the same slices make other tensors",
            hint="restore it from a copy, or make the result again",
        )


def _iteration_layout(ranks: RankSet, iteration: Iteration) -> tuple[Layout, Mapping[str, Shape], list[str]]:
    """Return the layout that metadata.json states, the whole shapes, and notes on where it contradicts itself.

    Raises CoverageError when a rank's slice is not the one that the layout gives it, or does not fit the whole shape.
    """
    metadata = iteration.metadata
    if metadata is None:
        return _single_device(ranks.ranks[0]), {}, []
    strategies = metadata.strategies()
    wrong, odd = [], []
    for entry in metadata.entries.values():
        how = strategies[metadata.stages[entry.name][0]].tensors[entry.name]
        parts = num_parts(how)
        if parts != entry.parts:
            odd.append(entry.name)
        for number, stored in entry.places():
            if whole_shape(how, entry.shapes[number], entry.name) != entry.shape:
                wrong.append(
                    f"{entry.name}: slice {number} is {entry.shapes[number]}, of {entry.shape} in {parts} parts"
                )
            elif number != (at := slice_number(how, stored.rank % metadata.devices)):
                wrong.append(f"{entry.name}: rank {stored.rank} has slice {number}, and slice {at} by the layout")
    if wrong:
        raise CoverageError(
            f"{len(wrong)} slices in `{METADATA}` are not where their layouts put them",
            items=wrong,
            why="offsets and layouts say different things, and each makes another tensor",
            hint="the file is damaged, or was edited: restore it from a copy",
        )
    layout = Layout(tuple(Stage(metadata.devices, strategy.tensors) for strategy in strategies))
    note = f"`axis_fragmentations` of {listed(odd)} are not those of the layout, which counts"
    return layout, {name: shape for s in strategies for name, shape in s.shapes.items()}, [note] if odd else []


def flat(ranks: Mapping[int, Checkpoint]) -> dict[str, TensorInfo]:
    """Return every stored tensor of a set of ranks by the name that a manifest gives it: `rank_3:NAME`."""
    return {
        f"rank_{rank}:{name}": replace(info, name=f"rank_{rank}:{name}")
        for rank, checkpoint in ranks.items()
        for name, info in checkpoint.tensors.items()
    }


def read_layout(path: Path, num_axes: Mapping[str, int]) -> tuple[Layout, dict[str, Shape]]:
    """Return the layout in strategy files, and the whole shapes that they promise, by tensor."""
    if not path.exists():
        raise UsageError(f"no such strategy file or folder: `{path}`")
    strategies = read_strategies(path, num_axes=num_axes)
    devices = [prod(next(iter(strategy.tensors.values())).dev_matrix) for strategy in strategies]
    check_num_ranks(max(devices) * len(devices))
    if len(set(devices)) > 1:
        raise CoverageError(
            f"the stages in `{path}` have different numbers of devices",
            items=[f"stage {stage}: {count}" for stage, count in enumerate(devices)],
            why="every pipeline stage of a run has as many devices as the others",
            hint="give the strategy files of one run",
        )
    layout = Layout(tuple(Stage(devices[0], strategy.tensors) for strategy in strategies))
    return layout, {name: shape for strategy in strategies for name, shape in strategy.shapes.items()}


def refuse_others(path: Path, manifest: Mapping[str, Any] | None) -> None:
    """Raise CoverageError for weight files in `rank_N` folders that a manifest beside these does not name."""
    if manifest is None:
        return
    ours = named_files(manifest)
    folders = {name.partition("/")[0] for name in ours}
    found = [f"{rank.name}/{name}" for rank in find_ranks(path).values() for name in file_names(rank)
             if rank != path and rank.name in folders]  # fmt: skip
    others = [name for name in found if name.endswith(SUFFIXES) and name not in ours]
    if others:
        raise CoverageError(
            f"`{path}` has {len(others)} weight file{'s' * (len(others) > 1)} that ckptkit did not write",
            items=others,
            why=f"which file of a rank counts, {MANIFEST} says, and it names another",
            hint=f"move what is not of this result away, or remove {MANIFEST} to treat the folder as a foreign one",
        )


def _single_device(checkpoint: Checkpoint) -> Layout:
    """Return the layout of a checkpoint that one device holds whole."""
    tensors = {name: replicated(len(info.shape), 1) for name, info in checkpoint.tensors.items()}
    return Layout((Stage(1, tensors),))


def _check_manifest(path: Path, ranks: RankSet, manifest: Mapping[str, Any]) -> None:
    stored = Checkpoint(path, path, "", (), flat(ranks.ranks))
    compare_with_manifest(stored, manifest)


def _check_strategy(path: Path, given: Path | None, manifest: Mapping[str, Any], num_axes: Mapping[str, int]) -> None:
    """Raise for strategy files that are not those that were written with the ranks, or that say otherwise."""
    own = {name: digest for name, digest in manifest["side_files"].items() if name.startswith(f"{STRATEGY}/")}
    wrong = [name for name, digest in own.items() if not (path / name).is_file() or file_digest(path / name) != digest]
    if wrong:
        raise CorruptError(
            f"strategy files of `{path}` are not what {MANIFEST} promises",
            items=wrong,
            why="under another layout the same shards make other tensors",
            hint="restore them from a copy, or make the result again",
        )
    if own and given is not None and not _alike(read_layout(path / STRATEGY, num_axes), read_layout(given, num_axes)):
        raise UsageError(
            f"`{path}` has its own strategy files, which {MANIFEST} names, and those given say otherwise",
            why="its own were written with the ranks, so they say how these were cut",
            hint=f"leave out `--src-strategy`, or remove {MANIFEST} to treat the folder as a foreign one",
        )


def _alike(one: tuple[Layout, Mapping[str, Shape]], two: tuple[Layout, Mapping[str, Shape]]) -> bool:
    """Say whether two layouts cut the tensors that both name alike, into as many stages."""
    (a, _), (b, _) = one, two
    if (len(a.stages), a.devices) != (len(b.stages), b.devices):
        return False
    both = a.stages_of.keys() & b.stages_of.keys()
    return all(
        a.stages_of[name] == b.stages_of[name]
        and all(_same_cut(a.stages[s].tensors[name], b.stages[s].tensors[name], a.devices) for s in a.stages_of[name])
        for name in both
    )


def _same_cut(one: TensorLayout, two: TensorLayout, devices: int) -> bool:
    if one == two:
        return True
    return num_parts(one) == num_parts(two) and all(shard_index(one, d) == shard_index(two, d) for d in range(devices))


def _num_axes(ranks: RankSet) -> dict[str, int]:
    return {name: len(info.shape) for rank in ranks.ranks.values() for name, info in rank.tensors.items()}


def _notes(ranks: RankSet) -> list[str]:
    """Return the notes of the ranks' files, each once however many have it."""
    found: dict[str, int] = {}
    for checkpoint in ranks.ranks.values():
        for note in checkpoint.notes:
            found[note] = found.get(note, 0) + 1
    return [f"{count} ranks: {note}" if count > 1 else note for note, count in found.items()]
