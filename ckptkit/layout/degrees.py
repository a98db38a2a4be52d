"""From parallel degrees to a layout: how each tensor is cut, and the stage of each layer.

A rank is stage * devices + device. The devices of a stage are (dp, cp, tp) row-major, tp the fastest, as MindFormers
arranges them. What its nets cut, and the shards that MindSpore's compiler makes of them (both releases as in
constraints.txt), decides these rules:

    tp        cuts `tp_axis` at the edges of units (heads, say); a vocabulary that it does not divide stays whole
    ep, tp    experts that tp cuts too lie on (dp * cp / ep, ep, tp)
    ep        experts that tp leaves whole lie on (dp * cp * tp / ep, ep): then ep runs over the tp axis as well
    optimizer shard    cuts axis 0 once more over all devices that hold the same part

What does not live here: where the facts about a tensor come from (tables), a run's YAML (`run_yaml.py`), the formula
that makes regions of a layout (`slices.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd, lcm, prod

from ckptkit.errors import CoverageError, UsageError
from ckptkit.layout.layout import Layout, Stage, check_num_ranks
from ckptkit.layout.slices import num_opt_shards, num_parts, shard_region, unused_axes
from ckptkit.layout.stages import chunk_layers, offset_of, stage_of_layers
from ckptkit.report import fold_names
from ckptkit.types import Shape, TensorLayout

SHOWN_NAMES = 3
SETTINGS = ("vocab_emb_dp",)  # what a table's `unless` may name


@dataclass(frozen=True, slots=True)
class Degrees:
    """Parallel degrees, as options or a run's YAML say them.

    `opt_threshold_bytes`: an optimizer shard leaves smaller tensors whole. `opt_shard_size` is the number of parts
    that it makes; -1 stands for as many as there are devices with the same part. `pp_layers` has the number of layers
    of each stage; with `pp_interleave` > 1 of each chunk, all stages' first chunks before their second ones.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    optimizer_shard: bool = False
    opt_threshold_bytes: int = 0
    opt_shard_size: int = -1
    pp_layers: tuple[int, ...] | None = None
    pp_interleave: int = 1
    shard_embedding: bool = True
    replicate_kv: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            least = 0 if field.name == "opt_threshold_bytes" else 1
            allowed = field.name == "opt_shard_size" and number == -1
            if type(number) is int and number < least and not allowed:
                raise UsageError(f"`{field.name}` is {number}, and must be {least} or more")
        check_num_ranks(max(self.num_ranks, self.ep))

    @property
    def devices(self) -> int:
        """The number of devices of one stage."""
        return self.dp * self.cp * self.tp

    @property
    def num_ranks(self) -> int:
        return self.devices * self.pp


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a table says of one tensor, as far as a layout needs it; `shape` is that of the whole tensor.

    `stage` is first, last, all, or layer: then `layer` is its number. With `also_last` the last stage holds a copy
    too. `opt` says whether an optimizer shard may cut the tensor, `cp_too` whether cp cuts `tp_axis` together with tp.
    """

    name: str
    shape: Shape
    item_bytes: int
    layer: int | None
    stage: str
    tp_axis: int | None = None
    tp_unit: int = 1
    tp_unless: str | None = None
    tp_indivisible: str = "refuse"
    ep_axis: int | None = None
    ep_unit: int = 1
    also_last: bool = False
    opt: bool = True
    cp_too: bool = False


def as_legacy_net(cuts: Cuts, *, embedding_opt: bool = False) -> Cuts:
    """Return the cuts of a tensor with what holds in all of MindFormers' legacy nets, and not in its mcore nets.

    There an optimizer shard leaves norms and biases whole, and without `embedding_opt` (`parallel_optimizer` in a
    model's settings) the embedding as well; and cp cuts the embedding together with tp.
    """
    embedding = cuts.stage == "first"
    return replace(cuts, opt=len(cuts.shape) > 1 and (embedding_opt or not embedding), cp_too=embedding)


def smallest_dp(ep: int, tp: int, cp: int, tensors: Sequence[Cuts]) -> int:
    """Return the smallest dp with which `ep` divides the devices that the experts among `tensors` lie on."""
    beside = {cp if cuts.tp_axis is not None else tp for cuts in tensors if cuts.ep_axis is not None}
    return lcm(*(ep // gcd(ep, size) for size in beside))


def chunks_of(num_layers: int, degrees: Degrees) -> tuple[int, ...]:
    """Return the number of layers of each stage; with `pp_interleave` of each chunk, chunk by chunk."""
    return chunk_layers(num_layers, degrees.pp, degrees.pp_interleave, degrees.pp_layers)


def split_layers(num_layers: int, degrees: Degrees) -> tuple[int, ...]:
    """Return the stage of each layer. Raises UsageError when the layers cannot be spread so."""
    return stage_of_layers(chunks_of(num_layers, degrees), degrees.pp)


def offset_lines(num_layers: int, degrees: Degrees) -> list[str]:
    """Return the YAML line that makes MindFormers split the layers so, or none where its own split is the same."""
    offset = offset_of(chunks_of(num_layers, degrees), degrees.pp)
    return [f"offset: {offset}"] if offset else []


def lay_out(degrees: Degrees, tensors: Sequence[Cuts], num_layers: int) -> tuple[Layout, list[str]]:
    """Return the layout of `tensors`, and notes: what stays whole and why, uneven stages, what MindSpore refuses.

    Raises UsageError when the degrees contradict one another or the number of layers, and CoverageError when a tensor
    cannot be cut by them.
    """
    stages = split_layers(num_layers, degrees)
    if degrees.devices % degrees.ep and all(cuts.ep_axis is None for cuts in tensors):
        raise UsageError(
            f"ep {degrees.ep} does nothing here, and does not divide the {degrees.devices} devices of a stage",
            why="no tensor of the model has an axis of experts",
            hint="leave out `--ep`",
        )
    notes = _Notes()
    heads = {(c.tp_unit, c.shape[c.tp_axis] // c.tp_unit) for c in tensors if c.tp_axis is not None and c.tp_unit > 1}
    placed: list[dict[str, TensorLayout]] = [{} for _ in range(degrees.pp)]
    misfits: list[CoverageError] = []
    for cuts in tensors:
        try:
            layout = _optimizer_shard(degrees, cuts, _cut(degrees, cuts, heads, notes), notes)
            shard_region(cuts.name, layout, cuts.shape, 0)  # raises when the parts are not equal
        except CoverageError as error:
            misfits.append(error)
            continue
        for stage in _stages_of(cuts, stages, degrees.pp):
            placed[stage][cuts.name] = layout
    if misfits:
        raise _all_misfits(misfits, notes)
    general = _general_notes(degrees, tensors, num_layers)
    return Layout(tuple(Stage(degrees.devices, held) for held in placed)), [*general, *notes.lines()]


def _all_misfits(misfits: Sequence[CoverageError], notes: _Notes) -> CoverageError:
    """Return the first error with all others in one line each, and what else these degrees would do."""
    first = misfits[0]
    others = [pattern for pattern, _ in fold_names(error.what for error in misfits)]
    items = [*others, *(f"besides: {line}" for line in notes.lines())]
    return CoverageError(first.what, items=items if len(items) > 1 else (), why=first.why, hint=first.hint)


def _stages_of(cuts: Cuts, stages: tuple[int, ...], pp: int) -> Iterator[int]:
    """Yield each stage that holds the tensor, once."""
    if cuts.stage == "all":
        yield from range(pp)
    elif cuts.stage in ("first", "last"):
        yield 0 if cuts.stage == "first" else pp - 1
    elif cuts.layer is None or not 0 <= cuts.layer < len(stages):
        raise CoverageError(f"`{cuts.name}` is of layer {cuts.layer}, and the model has layers 0 to {len(stages) - 1}")
    else:
        yield stages[cuts.layer]
    if cuts.also_last and cuts.stage == "first" and pp > 1:
        yield pp - 1


def _cut(degrees: Degrees, cuts: Cuts, heads: set[tuple[int, int]], notes: _Notes) -> TensorLayout:
    """Return the layout of a tensor without an optimizer shard."""
    if cuts.ep_axis is not None and degrees.ep > 1:
        return _cut_experts(degrees, cuts)
    sizes, axis = (degrees.dp, degrees.cp, degrees.tp), cuts.tp_axis
    parts = degrees.tp * (degrees.cp if cuts.cp_too else 1)
    if axis is None or parts == 1:
        return _layout(sizes, {}, cuts)
    if cuts.tp_unless is not None and cuts.tp_unless not in SETTINGS:
        raise UsageError(f"`{cuts.name}` is whole unless `{cuts.tp_unless}`, and no option sets that")
    if cuts.tp_unless == "vocab_emb_dp" and not degrees.shard_embedding:
        notes.add("whole on every device, as `vocab_emb_dp` asks for", cuts.name)
        return _layout(sizes, {}, cuts)
    units = cuts.shape[axis] // cuts.tp_unit
    if units % parts == 0:
        return _layout(sizes, {axis: (1, 2) if cuts.cp_too else (2,)}, cuts)
    if cuts.tp_indivisible == "replicate":
        notes.add(f"whole on every device, as {parts} does not divide their {units} rows", cuts.name)
        return _layout(sizes, {}, cuts)
    if degrees.replicate_kv and _are_kv_heads(cuts, units, degrees.tp, heads):
        notes.add(
            f"with each of their {units} KV heads on {degrees.tp // units} neighbouring devices, "
            "which no training net of MindFormers 1.9 takes",
            cuts.name,
        )
        return _layout((degrees.dp, degrees.cp, units, degrees.tp // units), {axis: (2,)}, cuts)
    raise _uncut(degrees, cuts, units, heads)


def _cut_experts(degrees: Degrees, cuts: Cuts) -> TensorLayout:
    """Return the layout of a tensor of experts: ep on its axis, and tp where the table names one."""
    assert cuts.ep_axis is not None
    ep, tp, axis = degrees.ep, degrees.tp, cuts.tp_axis
    experts = cuts.shape[cuts.ep_axis] // cuts.ep_unit
    if experts % ep:
        raise CoverageError(
            f"`{cuts.name}` has {experts} experts, which ep {ep} cannot share equally",
            hint=f"choose `--ep` so that it divides {experts}",
        )
    if axis is None:
        if degrees.dp * tp % ep:
            raise _ep_misfit(ep, f"dp {degrees.dp} * tp {tp}", degrees.dp * tp)
        return _layout((degrees.devices // ep, ep), {cuts.ep_axis: (1,)}, cuts)
    if axis == cuts.ep_axis:
        raise UsageError(f"`{cuts.name}` would be cut on axis {axis} by both ep and tp", why="its table names both")
    if degrees.dp * degrees.cp % ep:
        raise _ep_misfit(ep, f"dp {degrees.dp} * cp {degrees.cp}", degrees.dp * degrees.cp)
    units = cuts.shape[axis] // cuts.tp_unit
    if units % tp:
        raise _uncut(degrees, cuts, units, set())
    return _layout((degrees.dp * degrees.cp // ep, ep, tp), {cuts.ep_axis: (1,), axis: (2,)}, cuts)


def _optimizer_shard(degrees: Degrees, cuts: Cuts, layout: TensorLayout, notes: _Notes) -> TensorLayout:
    """Return the layout with the optimizer shard that MindSpore's compiler gives the tensor, if any.

    It compares the whole tensor's bytes with the threshold, and notes as step the mean distance of the ranks that
    hold the same part.
    """
    spare = unused_axes(layout)
    copies = prod(layout.dev_matrix[axis] for axis in spare)
    if not degrees.optimizer_shard or not cuts.shape or copies == 1:
        return layout
    size = degrees.opt_shard_size
    last = sum((layout.dev_matrix[axis] - 1) * prod(layout.dev_matrix[axis + 1 :]) for axis in spare)
    sharded = replace(layout, opt_step=last // (copies - 1), opt_size=size)
    reason = ""
    if not cuts.opt:
        reason = "as their net excludes them"
    elif prod(cuts.shape) * cuts.item_bytes < degrees.opt_threshold_bytes:
        reason = f"smaller than {degrees.opt_threshold_bytes} bytes"
    elif size > 0 and copies % size:
        reason = f"as {size} does not divide their {copies} copies"
    elif cuts.shape[0] % num_parts(sharded)[0]:
        reason = f"as {num_opt_shards(sharded)} more parts do not divide their rows"
    if reason:
        notes.add(f"without an optimizer shard, {reason}", cuts.name)
        return layout
    return sharded


def _layout(sizes: Sequence[int], axes: Mapping[int, Shape], cuts: Cuts) -> TensorLayout:
    """Return a layout over device axes of `sizes`, those of 1 left out; `axes` are the ones that cut a tensor axis."""
    kept = [axis for axis, size in enumerate(sizes) if size > 1]
    number = {axis: len(kept) - 1 - place for place, axis in enumerate(kept)}
    tensor_map = (tuple(number[a] for a in axes.get(axis, ()) if a in number) for axis in range(len(cuts.shape)))
    return TensorLayout(tuple(sizes[axis] for axis in kept) or (1,), tuple(tensor_map))


def _are_kv_heads(cuts: Cuts, units: int, tp: int, heads: set[tuple[int, int]]) -> bool:
    """Return whether the units may be KV heads: of several rows, and fewer than tp, which is a multiple of them."""
    return cuts.tp_unit > 1 and not cuts.cp_too and tp % units == 0 and not _is_grouped(cuts, units, heads)


def _is_grouped(cuts: Cuts, units: int, heads: set[tuple[int, int]]) -> bool:
    """Return whether each unit has the rows of a KV head, its value head and its share of query heads."""
    return any(count % units == 0 and cuts.tp_unit == (count // units + 2) * rows for rows, count in heads)


def _uncut(degrees: Degrees, cuts: Cuts, units: int, heads: set[tuple[int, int]]) -> CoverageError:
    """Return the error for units that tp does not divide."""
    what = f"{units} heads or other units of {cuts.tp_unit} rows" if cuts.tp_unit > 1 else f"{units} rows"
    why, hint = "a cut inside a unit would tear a head apart", f"choose `--mp` so that it divides {units}"
    if cuts.tp_unit == 1:
        why = "a parallel layout gives every device an equal part"
    elif _is_grouped(cuts, units, heads):
        why = f"each of its {units} KV groups holds query heads too, which are not replicated"
        hint += ", or write the layout that has q, k and v apart"
    elif _are_kv_heads(cuts, units, degrees.tp, heads):
        hint += ", or `--replicate-kv` where they are KV heads"
    return CoverageError(
        f"`{cuts.name}` has {what} on axis {cuts.tp_axis}, which tp {degrees.tp} cannot share equally",
        why=why,
        hint=hint,
    )


def _ep_misfit(ep: int, what: str, product: int) -> UsageError:
    return UsageError(
        f"ep {ep} does not divide {what} = {product}",
        why="expert parallelism runs over these devices",
        hint="choose `--dp` so that it does",
    )


def _general_notes(degrees: Degrees, tensors: Sequence[Cuts], num_layers: int) -> Iterator[str]:
    """Yield what there is to say of the degrees themselves."""
    for line in offset_lines(num_layers, degrees):
        split = ", ".join(map(str, chunks_of(num_layers, degrees)))
        per = "stage" if degrees.pp_interleave == 1 else "chunk"
        yield f"layers per {per}: {split}; MindFormers needs `{line}` for it"
    if not degrees.shard_embedding and all(cuts.tp_unless != "vocab_emb_dp" for cuts in tensors):
        yield "`--no-shard-embedding` changes nothing: this naming's nets always cut their embedding"
    if degrees.ep > 1 and all(cuts.ep_axis is None for cuts in tensors):
        yield f"ep {degrees.ep} cuts nothing: no tensor has an axis of experts"
    ranks = degrees.num_ranks
    if ranks not in (1, 2, 4) and ranks % 8:
        yield f"MindSpore itself runs on 1, 2, 4 or a multiple of 8 devices, and this layout has {ranks}"


class _Notes:
    """Tensors that share a remark, so that a report has one line for each remark."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, remark: str, name: str) -> None:
        self._names.setdefault(remark, []).append(name)

    def lines(self) -> Iterator[str]:
        for remark, names in self._names.items():
            shown = ", ".join(f"`{name}`" for name in names[:SHOWN_NAMES])
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            yield f"{len(names)} tensor{'s' * (len(names) > 1)} {remark}: {shown}{more}"
