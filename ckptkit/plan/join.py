"""Join the shards of a distributed checkpoint: each whole tensor as an expression over what the ranks hold.

A stored shard is called `rank_3:NAME`. What several ranks hold is read from the first of them; the others are
replicas, to be compared with it before the first byte is written. Nothing is taken for granted: a rank that lacks a
tensor, shards of different shapes, and layouts that do not fit the shapes are errors. What does not live here: which
layout a tensor has (`layout/`, strategy files), and comparing (`commands/replicas.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import TypeAlias

from ckptkit.errors import CoverageError
from ckptkit.formats.base import Checkpoint
from ckptkit.layout.layout import Layout
from ckptkit.layout.slices import num_parts, shard_index, shard_region, whole_shape
from ckptkit.mapping.expr import Expr, Leaf, node, pull
from ckptkit.mapping.ops import Concat
from ckptkit.plan.equal import equal
from ckptkit.plan.plan import Replica
from ckptkit.report import tensors
from ckptkit.types import Extent, Region, Shape, TensorInfo, TensorLayout

Parameter: TypeAlias = Callable[[str], str | None]  # the weight that a name of optimizer state belongs to
_Holder: TypeAlias = tuple[int, int, TensorLayout]  # rank, device in its stage, layout


@dataclass(frozen=True)  # without slots, so that `replicas_of` can be kept
class Joined:
    """Whole tensors over shards: `exprs` by name; `shards` by stored name, those that are read.

    `tensors` have the whole shapes and no bytes of their own. `notes` says what was taken without a layout.
    """

    tensors: Mapping[str, TensorInfo]
    exprs: Mapping[str, Expr]
    shards: Mapping[str, TensorInfo]
    replicas: tuple[Replica, ...]
    notes: tuple[str, ...]

    def same(self, a: TensorInfo, b: TensorInfo) -> bool:
        """Say whether two of `tensors` have the same shape, dtype and elements; reads both."""
        return equal(self.exprs[a.name], self.exprs[b.name], self.shards)

    def parts_of(self, name: str) -> Iterator[tuple[Region, TensorInfo]]:
        """Yield the shards that the whole tensor `name` is read from, each with the region that it is."""
        expr = self.exprs[name]
        yield from self._parts(expr, (0,) * len(expr.shape))

    def _parts(self, expr: Expr, start: Shape) -> Iterator[tuple[Region, TensorInfo]]:
        if isinstance(expr, Leaf):
            yield Region.whole(expr.shape).shifted(start), self.shards[expr.name]
            return
        assert isinstance(expr.op, Concat), "shards are joined by concats alone"
        axis = expr.op.axis
        for child in expr.children:
            yield from self._parts(child, start)
            start = (*start[:axis], start[axis] + child.shape[axis], *start[axis + 1 :])

    @cached_property
    def replicas_of(self) -> Mapping[str, Sequence[Replica]]:
        """The replicas of each whole tensor."""
        found: dict[str, list[Replica]] = {}
        for replica in self.replicas:
            found.setdefault(replica.name, []).append(replica)
        return found


@dataclass(slots=True)
class _State:
    ranks: Mapping[int, Checkpoint]
    layout: Layout
    parameter_of: Parameter
    told: bool  # that the ranks were thinned
    thinned: bool | None = None  # None: not known
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    exprs: dict[str, Expr] = field(default_factory=dict)
    shards: dict[str, TensorInfo] = field(default_factory=dict)
    replicas: list[tuple[str, Region, TensorInfo]] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    thin: list[str] = field(default_factory=list)
    inodes: dict[Path, tuple[int, int]] = field(default_factory=dict)


def join(
    ranks: Mapping[int, Checkpoint],
    layout: Layout,
    *,
    parameter_of: Parameter,
    shapes: Mapping[str, Shape] | None = None,
    thinned: bool = False,
) -> Joined:
    """Return the whole tensors of a complete set of `ranks`.

    `parameter_of` names the weight whose layout optimizer state without one of its own follows. `shapes` are whole
    shapes that a strategy file promises. `thinned` says that of equal parts only one rank may hold one (MindSpore's
    `remove_redundancy`); this is also seen when no part is on two ranks. Raises CoverageError.
    """
    _check_number(ranks, layout)
    state = _State(ranks, layout, parameter_of, thinned)
    for name in dict.fromkeys(name for checkpoint in ranks.values() for name in checkpoint.tensors):
        holders = _holders(state, name)
        if holders:
            _join_one(state, name, holders, (shapes or {}).get(name))
        else:
            _take_whole(state, name)
    _check_nothing_lacks(state, parameter_of)
    notes = []
    if state.free:
        count, example = len(state.free), state.free[0]
        notes.append(
            f"{tensors(count, 'has', 'have')} no layout (`{example}`): whole on every rank that holds "
            f"{'it' if count == 1 else 'them'}, and compared"
        )
    if state.thin:
        notes.append(
            f"{tensors(len(state.thin), 'is', 'are')} on fewer ranks than the layout names, "
            "as MindSpore's `remove_redundancy` leaves them"
        )
    return Joined(state.tensors, state.exprs, state.shards, tuple(_replicas(state)), tuple(notes))


def _replicas(state: _State) -> Iterator[Replica]:
    """Yield what is to be compared, without the shards that are the same bytes on disk: links to one file."""
    for name, region, shard in state.replicas:
        expr = state.exprs[name]
        inputs = {leaf.name: state.shards[leaf.name] for leaf, _ in pull(expr, region)}
        read = next(iter(inputs.values()))
        same_place = len(inputs) == 1 and (read.shape, read.extents) == (shard.shape, shard.extents)
        if not same_place or _inode(read.file, state.inodes) != _inode(shard.file, state.inodes):
            yield Replica(name, expr, region, inputs, shard)


def _inode(file: Path, known: dict[Path, tuple[int, int]]) -> tuple[int, int]:
    if file not in known:
        stat = file.stat()
        known[file] = stat.st_dev, stat.st_ino
    return known[file]


def _check_number(ranks: Mapping[int, Checkpoint], layout: Layout) -> None:
    if len(ranks) == layout.num_ranks:
        return
    unknown = [
        f"rank_{rank} holds {name}" for rank in ranks if rank >= layout.num_ranks for name in ranks[rank].tensors
    ]
    raise CoverageError(
        f"{len(ranks)} rank{'s' * (len(ranks) > 1)} lie here, and the layout is one of {layout.num_ranks}: "
        f"{len(layout.stages)} (stages) * {layout.devices} (devices of each)",
        items=unknown,
        why="a stage or some ranks are missing, here or in the strategy files",
        hint="give the strategy files of all stages, of the run that saved these ranks",
    )


def _is_thinned(state: _State) -> bool:
    """Say whether the ranks that lack a tensor were thinned: told, or seen when no two hold the same part of any.

    A .ckpt file does not tell. A rank that lost a tensor by damage still shares parts of the others.
    """
    if state.thinned is None:
        state.thinned = state.told or not _has_copies(state)
    return state.thinned


def _has_copies(state: _State) -> bool:
    """Say whether two ranks of one stage hold the same part of a tensor that has a layout."""
    for name in dict.fromkeys(name for checkpoint in state.ranks.values() for name in checkpoint.tensors):
        seen = set()
        for rank, device, layout in _holders(state, name):
            if name in state.ranks[rank].tensors:
                part = rank // state.layout.devices, shard_index(layout, device)
                if part in seen:
                    return True
                seen.add(part)
    return False


def _holders(state: _State, name: str) -> list[_Holder]:
    """Return who holds a tensor: as its layout says, or for state that of its weight, if it has as many axes."""
    found = list(state.layout.ranks_of(name))
    if not found and (parameter := state.parameter_of(name)) is not None:
        axes = next(len(rank.tensors[name].shape) for rank in state.ranks.values() if name in rank.tensors)
        found = [held for held in state.layout.ranks_of(parameter) if len(held[2].tensor_map) == axes]
    return found


def _join_one(state: _State, name: str, holders: Sequence[_Holder], promised: Shape | None) -> None:
    held = [(rank, device, layout, info) for rank, device, layout in holders
            if (info := state.ranks[rank].tensors.get(name)) is not None]  # fmt: skip
    _check_everybody_has_it(state, name, holders, {rank for rank, *_ in held})
    if len(held) < len(holders):
        state.thin.append(name)
    shards = [info for *_, info in held]
    _check_alike(name, shards, [rank for rank, *_ in held])
    first_rank, _, layout, first = held[0]
    shape = whole_shape(layout, first.shape, name)
    if promised is not None and shape != promised:
        raise CoverageError(
            f"the shards of `{name}` make a tensor of shape {shape}, and its strategy file says {promised}",
            items=[f"rank_{first_rank} holds {first.shape}"],
            why="the ranks and the strategy file are of different runs",
            hint="give the strategy file of the run that saved these ranks",
        )
    parts: dict[Shape, str] = {}
    grid = num_parts(layout)
    for rank, device, own, info in held:
        index = shard_index(own, device)
        if num_parts(own) == grid and index not in parts:
            parts[index] = _store(state, rank, name, info)
        else:
            region = shard_region(name, own, shape, device)
            state.replicas.append((name, region, _named(rank, name, info)))
    _check_grid(name, grid, parts)
    _check_apart(state, name, parts)
    state.tensors[name] = TensorInfo(name, shape, first.dtype, first.file, ())
    state.exprs[name] = _mosaic(grid, {index: Leaf(stored, first.shape) for index, stored in parts.items()})


def _take_whole(state: _State, name: str) -> None:
    """Take a tensor that has no layout: whole and equal on every rank of the stages that hold it, if not thinned."""
    held = {rank: info for rank, checkpoint in state.ranks.items() if (info := checkpoint.tensors.get(name))}
    devices = state.layout.devices
    expected = {rank for rank in state.ranks if any(other // devices == rank // devices for other in held)}
    lacking = sorted(expected - held.keys())
    if lacking and _is_thinned(state):
        state.thin.append(name)
    elif lacking:
        raise CoverageError(
            f"`{name}` has no layout in the strategy, and not every rank holds it",
            items=[f"rank_{rank} holds none" for rank in lacking],
            why="whether it is cut or whole, nothing says",
            hint="give the strategy file of the run that saved these ranks",
        )
    infos = list(held.values())
    _check_alike(name, infos, list(held))
    (first, info), *others = held.items()
    stored = _store(state, first, name, info)
    whole = Region.whole(info.shape)
    state.replicas.extend((name, whole, _named(rank, name, other)) for rank, other in others)
    state.tensors[name] = TensorInfo(name, info.shape, info.dtype, info.file, ())
    state.exprs[name] = Leaf(stored, info.shape)
    state.free.append(name)


def _store(state: _State, rank: int, name: str, info: TensorInfo) -> str:
    named = _named(rank, name, info)
    state.shards[named.name] = named
    return named.name


def _named(rank: int, name: str, info: TensorInfo) -> TensorInfo:
    return replace(info, name=f"rank_{rank}:{name}")


def _mosaic(grid: Shape, parts: Mapping[Shape, Leaf]) -> Expr:
    """Return the tensor whose parts lie on `grid`: a concat along the first axis of concats along the next."""
    layer: dict[Shape, Expr] = dict(parts)
    for axis in reversed(range(len(grid))):
        rows = product(*(range(n) for n in grid[:axis]))
        layer = {row: node(Concat(axis), [layer[(*row, i)] for i in range(grid[axis])]) for row in rows}
    return layer[()]


def _check_everybody_has_it(state: _State, name: str, holders: Sequence[_Holder], held: set[int]) -> None:
    expected, ranks = {rank for rank, *_ in holders}, state.ranks
    lacking = [f"rank_{rank} lacks it" for rank in sorted(expected - held)]
    if lacking and _is_thinned(state) and (state.told or _is_complete(holders, held)):
        lacking = []
    extra = [f"rank_{rank} holds it" for rank in sorted(ranks) if rank not in expected and name in ranks[rank].tensors]
    if not lacking and not extra and held:
        return
    copied = lacking and held and not _is_thinned(state)
    no_thinning = "; what `remove_redundancy` leaves is on one rank only, and here some parts are on several"
    raise CoverageError(
        f"`{name}` is not on the ranks that its layout names: {len(expected)} of {len(ranks)}",
        items=lacking + extra,
        why="the ranks and the strategy files are of different runs, or a file was cut short"
        + (no_thinning if copied else ""),
        hint="copy the damaged ranks again, or give the strategy files of the run that saved them",
    )


def _is_complete(holders: Sequence[_Holder], held: set[int]) -> bool:
    """Say whether the ranks that hold parts of a tensor have all of them."""
    parts = {shard_index(layout, device) for rank, device, layout in holders if rank in held}
    return bool(held) and len(parts) == prod(num_parts(holders[0][2]))


def _check_alike(name: str, infos: Sequence[TensorInfo], ranks: Sequence[int]) -> None:
    first = infos[0]
    if all((info.shape, info.dtype) == (first.shape, first.dtype) for info in infos):
        return
    raise CoverageError(
        f"the ranks hold parts of `{name}` that differ in shape or dtype",
        items=[f"rank_{rank}: {info.shape} {info.dtype}" for rank, info in zip(ranks, infos, strict=True)],
        why="a parallel layout gives every rank an equal part",
        hint="give the strategy file of the run that saved these ranks; a rank of another run may be among them",
    )


def _check_grid(name: str, grid: Shape, parts: Mapping[Shape, str]) -> None:
    lacking = [index for index in product(*(range(n) for n in grid)) if index not in parts]
    if lacking:
        raise CoverageError(
            f"{len(lacking)} of {len(lacking) + len(parts)} parts of `{name}` are on no rank",
            items=[f"part {index}" for index in lacking],
            why="a part that was removed as redundant is nowhere else",
            hint="copy the ranks again",
        )


def _check_apart(state: _State, name: str, parts: Mapping[Shape, str]) -> None:
    """Raise CoverageError when the same bytes on disk, by way of a link, stand for two parts of a tensor."""
    seen: dict[tuple[tuple[int, int], tuple[Extent, ...]], str] = {}
    for stored in parts.values():
        info = state.shards[stored]
        other = seen.setdefault((_inode(info.file, state.inodes), info.extents), stored)
        if other != stored:
            raise CoverageError(
                f"`{other}` and `{stored}` are the same bytes of one file, and should be different parts of a tensor",
                why="a link stands where the file of another rank should be",
                hint="copy the right file of that rank",
            )


def _check_nothing_lacks(state: _State, parameter_of: Parameter) -> None:
    """Raise CoverageError for weights that the layout has and no rank holds; optimizer state may be left out."""
    lacking = [name for name in state.layout.stages_of if name not in state.exprs and parameter_of(name) is None]
    if lacking:
        raise CoverageError(
            tensors(len(lacking), "of the layout is", "of the layout are") + " on no rank",
            items=lacking,
            why="the checkpoint was saved without them, or the strategy files are of another run",
            hint="give the strategy files of the run that saved these ranks",
        )
