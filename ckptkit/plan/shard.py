"""Cut whole tensors over ranks: each rank's file, and the region of each tensor that it holds.

All ranks share a tensor's expression. Ranks whose files would be equal have one file, and links to it. What does not
live here: what a layout says (`layout/`), and how a file is laid out (`formats/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.base import OutputFile
from ckptkit.layout.layout import Layout, replicated
from ckptkit.layout.slices import shard_region
from ckptkit.mapping.expr import aligned, leaves, pull
from ckptkit.plan.join import Parameter
from ckptkit.plan.plan import OutputTensor
from ckptkit.report import tensors
from ckptkit.types import Region, TensorInfo, TensorLayout, TensorSpec, item_bytes, value

LayOut = Callable[[int, Sequence[TensorSpec]], OutputFile]  # rank, tensors -> its file
Apart = tuple[Callable[[str], bool], LayOut]  # which tensors lie in a second file of each rank, and that file
Holder = tuple[int, int, TensorLayout]  # rank, device in its stage, layout


@dataclass(frozen=True, slots=True)
class Placement:
    """`files` with their `outputs`; `links` are further files, each equal to one of `files`: name -> its name."""

    outputs: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...]
    links: Mapping[str, str]


@value
class _Piece:
    """A region of a whole tensor, one for all the ranks that hold it."""

    whole: OutputTensor
    region: Region
    inputs: Mapping[str, TensorInfo]
    read_bytes: int


def place_on_ranks(
    wholes: Sequence[OutputTensor],
    layout: Layout,
    lay_out: LayOut,
    *,
    parameter_of: Parameter,
    on_every_rank: Callable[[str], bool],
    apart: Apart | None = None,
) -> Placement:
    """Return the files of the ranks, proved to hold every tensor whole.

    `parameter_of` names the weight whose layout optimizer state without one of its own follows; tensors for which
    `on_every_rank` (counters of a training run) need no layout; those that are `apart` go into a file of their own.
    Raises CoverageError when a tensor has no place, or the layout one that is not there.
    """
    held: list[list[_Piece]] = [[] for _ in range(layout.num_ranks)]
    homeless = []
    for whole in wholes:
        holders = holders_of(whole.spec, layout, parameter_of, on_every_rank)
        if not holders:
            homeless.append(whole.spec.name)
        _hand_out(whole, holders, held)
    _check_places(homeless, wholes, layout, parameter_of)
    if empty := [f"rank_{rank}" for rank, pieces in enumerate(held) if not pieces]:
        raise CoverageError(
            f"{len(empty)} of {len(held)} ranks would hold nothing",
            items=empty,
            why="the layout names no tensor of the source for them",
            hint="give the strategy files of the net that will load this; or is the source another model?",
        )
    return _files(held, lay_out, apart)


def holders_of(
    spec: TensorSpec, layout: Layout, parameter_of: Parameter, on_every_rank: Callable[[str], bool]
) -> list[Holder]:
    """Return who holds parts of a tensor; nobody when it has no place."""
    found = list(layout.ranks_of(spec.name))
    if not found and (parameter := parameter_of(spec.name)) is not None:
        axes, whole = len(spec.shape), replicated(len(spec.shape), layout.devices)
        holders = layout.ranks_of(parameter)
        found = [(rank, device, how if len(how.tensor_map) == axes else whole) for rank, device, how in holders]
    if not found and on_every_rank(spec.name):
        whole = replicated(len(spec.shape), layout.devices)
        found = [(rank, rank % layout.devices, whole) for rank in range(layout.num_ranks)]
    return found


def _hand_out(whole: OutputTensor, holders: Sequence[Holder], held: Sequence[list[_Piece]]) -> None:
    pieces: dict[Region, _Piece] = {}
    for rank, device, layout in holders:
        region = shard_region(whole.spec.name, layout, whole.spec.shape, device)
        piece = pieces.get(region)
        if piece is None:
            piece = pieces[region] = _piece(whole, region)
        held[rank].append(piece)
    if pieces:
        prove_tiling(whole.spec, pieces.keys())


def part_of(whole: OutputTensor, region: Region) -> OutputTensor:
    """Return the output that is `region` of a whole one."""
    piece = _piece(whole, region)
    spec = TensorSpec(whole.spec.name, region.shape, whole.spec.dtype)
    return OutputTensor(spec, whole.file, whole.expr, piece.inputs, region, piece.read_bytes)


def _piece(whole: OutputTensor, region: Region) -> _Piece:
    inputs: dict[str, TensorInfo] = {}
    read_bytes = 0
    try:
        found = pull(whole.expr, region)
    except UsageError:  # an optimizer shard may cut a group
        found = pull(whole.expr, aligned(whole.expr, region))
    for leaf, box in found:
        info = inputs[leaf.name] = whole.inputs[leaf.name]
        read_bytes += box.size * item_bytes(info.dtype)
    if not inputs:  # all of it is padding: one source still tells the dtype
        name = leaves(whole.expr)[0].name
        inputs[name] = whole.inputs[name]
    return _Piece(whole, region, inputs, read_bytes)


def prove_tiling(spec: TensorSpec, regions: Iterable[Region]) -> None:
    """Raise unless the distinct `regions` cover a tensor exactly: a grid of boxes without gap or overlap."""
    boxes = list(regions)
    sides = [sorted({(box.start[axis], box.stop[axis]) for box in boxes}) for axis in range(len(spec.shape))]
    seamless = all(
        side[0][0] == 0 and side[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(side))
        for side, size in zip(sides, spec.shape, strict=True)
    )
    if not seamless or len(boxes) != prod(len(side) for side in sides):
        raise CoverageError(
            f"the layout of `{spec.name}` does not tile it: {len(boxes)} different parts of {spec.shape}",
            why="some elements would be on no rank",
            hint="its optimizer shard, or its map, does not fit the device matrix: make the strategy file again",
        )


def _check_places(
    homeless: Sequence[str], wholes: Sequence[OutputTensor], layout: Layout, parameter_of: Parameter
) -> None:
    if homeless:
        raise CoverageError(
            tensors(len(homeless), "has", "have") + " no place in the target layout",
            items=homeless,
            why="no rank would hold it, and a net that is loaded without it keeps random values there",
            hint="give the strategy files of all stages of the net that will load this",
        )
    there = {whole.spec.name for whole in wholes}
    lacking = [name for name in layout.stages_of if name not in there and parameter_of(name) is None]
    if lacking:
        raise CoverageError(
            tensors(len(lacking), "of the target layout is", "of the target layout are") + " not in the source",
            items=lacking,
            why="the net that the layout is of would keep random values there",
            hint="give the strategy files of the net that will load this; or is the source another model?",
        )


def _files(held: Sequence[Sequence[_Piece]], lay_out: LayOut, apart: Apart | None) -> Placement:
    outputs: list[OutputTensor] = []
    files: list[OutputFile] = []
    links: dict[str, str] = {}
    numbers: dict[tuple[int, ...], int] = {}  # by the pieces that a file holds
    for rank, pieces, laid_out in _by_file(held, lay_out, apart):
        content = tuple(id(piece) for piece in pieces)
        specs = [TensorSpec(p.whole.spec.name, p.region.shape, p.whole.spec.dtype) for p in pieces]
        if content in numbers:
            links[laid_out(rank, []).name] = files[numbers[content]].name
            continue
        number = numbers[content] = len(files)
        files.append(laid_out(rank, specs))
        outputs += [
            OutputTensor(spec, number, piece.whole.expr, piece.inputs, piece.region, piece.read_bytes)
            for spec, piece in zip(specs, pieces, strict=True)
        ]
    return Placement(tuple(outputs), tuple(files), links)


def _by_file(
    held: Sequence[Sequence[_Piece]], lay_out: LayOut, apart: Apart | None
) -> Iterator[tuple[int, Sequence[_Piece], LayOut]]:
    """Yield what each file holds: its rank, its pieces, and how it is laid out."""
    for rank, pieces in enumerate(held):
        if apart is None:
            yield rank, pieces, lay_out
            continue
        is_apart, lay_out_apart = apart
        for others, laid_out in ((False, lay_out), (True, lay_out_apart)):
            if some := [piece for piece in pieces if is_apart(piece.whole.spec.name) == others]:
                yield rank, some, laid_out
