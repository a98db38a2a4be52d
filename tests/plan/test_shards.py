"""The contract: whatever two layouts, every rank gets exactly its part of what the other ranks hold together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import CoverageError
from ckptkit.execute import execute
from ckptkit.formats.base import Checkpoint, OutputFile
from ckptkit.layout.layout import Layout, Stage
from ckptkit.layout.slices import num_parts, shard_region
from ckptkit.mapping.expr import Leaf, leaves, node
from ckptkit.mapping.groups import Interleave
from ckptkit.mapping.ops import Transpose
from ckptkit.plan import jobs as jobs_module
from ckptkit.plan.join import Joined, join
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.plan.ranges import ranges
from ckptkit.plan.shard import place_on_ranks
from ckptkit.types import Extent, Region, TensorInfo, TensorLayout, TensorSpec
from tests.test_execute import MemorySink

Array = np.ndarray[Any, Any]
SHAPE = (24, 24)


@st.composite
def layouts(draw: st.DrawFn, axes: int = 2, devices: int | None = None) -> TensorLayout:
    """Draw a device matrix, a map of its axes to a tensor's, and perhaps an optimizer shard."""
    dev = draw(st.sampled_from([(1,), (2,), (4,), (2, 2), (3, 2), (2, 1, 2), (2, 3, 2), (4, 2), (6,)]))
    if devices is not None and prod(dev) != devices:
        dev = (devices,)
    homes = [draw(st.integers(-1, axes - 1)) for _ in dev]
    order = draw(st.permutations(range(len(dev))))
    tensor_map = tuple(tuple(len(dev) - 1 - a for a in order if homes[a] == axis) for axis in range(axes))
    opt = draw(st.sampled_from([(0, 0), (1, -1)]))
    return TensorLayout(dev, tensor_map, *opt)


def numbered(shape: tuple[int, ...]) -> Array:
    return np.arange(prod(shape), dtype=np.uint16).reshape(shape)


def store_ranks(folder: Path, layout: Layout, arrays: Mapping[str, Array]) -> dict[int, Checkpoint]:
    """Write each rank's parts into a file of its own."""
    ranks = {}
    for rank in range(layout.num_ranks):
        file, data, infos = folder / f"rank_{rank}", bytearray(b"head"), {}
        for name, array in arrays.items():
            for holder, device, how in layout.ranks_of(name):
                if holder == rank:
                    part = array[shard_region(name, how, array.shape, device).slices()]
                    extent = Extent(len(data), part.nbytes)
                    data += part.tobytes() + b"gap"
                    infos[name] = TensorInfo(name, part.shape, "BF16", file, (extent,))
        file.write_bytes(data)
        ranks[rank] = Checkpoint(file, folder, "safetensors", (file,), infos)
    return ranks


def joined_from(folder: Path, layout: Layout, arrays: Mapping[str, Array]) -> Joined:
    return join(store_ranks(folder, layout, arrays), layout, parameter_of=lambda _: None)


def as_wholes(joined: Joined) -> list[OutputTensor]:
    return [
        OutputTensor(
            TensorSpec(name, expr.shape, "BF16"),
            0,
            expr,
            {leaf.name: joined.shards[leaf.name] for leaf in leaves(expr)},
        )
        for name, expr in joined.exprs.items()
    ]


def placed(wholes: list[OutputTensor], layout: Layout) -> Plan:
    def lay_out(rank: int, specs: Sequence[TensorSpec]) -> OutputFile:
        ends = list(accumulate([spec.num_bytes for spec in specs], initial=10 + rank))
        extents = {spec.name: (Extent(end, spec.num_bytes),) for spec, end in zip(specs, ends, strict=False)}
        return OutputFile(f"rank_{rank}/f", ends[-1], (), extents)

    placement = place_on_ranks(wholes, layout, lay_out, parameter_of=lambda _: None, on_every_rank=lambda _: False)
    return Plan(placement.outputs, placement.files, {}, (), (), (), (), (), {}, links=placement.links)


def parts_of(plan: Plan, sink: MemorySink) -> dict[tuple[str, str], Array]:
    """Return what each rank holds, by (file, tensor), links included."""
    found = {}
    files = {file.name: [file.name] for file in plan.files}
    for link, file in plan.links.items():
        files[file].append(link)
    for output, data in zip(plan.outputs, sink.data, strict=True):
        for name in files[plan.files[output.file].name]:
            found[name, output.spec.name] = np.frombuffer(bytes(data), np.uint16).reshape(output.spec.shape)
    return found


def one_stage(how: TensorLayout, *names: str) -> Layout:
    return Layout((Stage(prod(how.dev_matrix), dict.fromkeys(names or ("w",), how)),))


def check(plan: Plan, layout: Layout, arrays: Mapping[str, Array], tile_bytes: int) -> None:
    """Execute a plan and compare every rank's part with numpy's slice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs_module, "TILES_BYTES", 2 * tile_bytes)
        patch.setattr(jobs_module, "BLOCK_BYTES", 64)
        sink = MemorySink(plan)
        execute(plan, sink, workers=2)
    assert all((times == 1).all() for times in sink.times)
    found = parts_of(plan, sink)
    wanted = {}
    for name, array in arrays.items():
        for rank, device, how in layout.ranks_of(name):
            wanted[f"rank_{rank}/f", name] = array[shard_region(name, how, array.shape, device).slices()]
    assert found.keys() == wanted.keys()
    for key, part in wanted.items():
        assert np.array_equal(found[key], part), key


@settings(max_examples=150, deadline=None)
@given(layouts(), layouts(), st.sampled_from([16, 100, 1 << 20]))
def test_any_layout_becomes_any_other(
    tmp_path_factory: pytest.TempPathFactory, before: TensorLayout, after: TensorLayout, tile_bytes: int
) -> None:
    arrays = {"w": numbered(SHAPE)}
    if any(24 % n for how in (before, after) for n in num_parts(how)):
        return
    joined = joined_from(tmp_path_factory.mktemp("s"), one_stage(before), arrays)
    check(placed(as_wholes(joined), one_stage(after)), one_stage(after), arrays, tile_bytes)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from([16, 100, 1 << 20]))
def test_a_fused_and_a_transposed_tensor_are_cut_from_shards(
    tmp_path_factory: pytest.TempPathFactory, before: TensorLayout, tile_bytes: int
) -> None:
    if any(24 % n for n in num_parts(before)):
        return
    arrays = {"q": numbered(SHAPE), "k": numbered(SHAPE) + np.uint16(1000)}
    joined = joined_from(tmp_path_factory.mktemp("s"), one_stage(before, "q", "k"), arrays)
    fused = node(Interleave(0, (4, 4)), [joined.exprs["q"], joined.exprs["k"]])
    turned = node(Transpose((1, 0)), [joined.exprs["q"]])
    wholes = [
        OutputTensor(
            TensorSpec(name, expr.shape, "BF16"),
            0,
            expr,
            {leaf.name: joined.shards[leaf.name] for leaf in leaves(expr)},
        )
        for name, expr in (("qk", fused), ("t", turned))
    ]
    both = np.stack([arrays["q"].reshape(6, 4, 24), arrays["k"].reshape(6, 4, 24)], axis=1).reshape(48, 24)
    after = TensorLayout((3, 2), ((1,), (0,)))
    check(
        placed(wholes, one_stage(after, "qk", "t")), one_stage(after, "qk", "t"), {"qk": both, "t": arrays["q"].T},
        tile_bytes,
    )  # fmt: skip


def test_each_source_byte_is_read_once_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = os.preadv

    def counted(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        nonlocal count
        done = original(descriptor, buffers, offset)
        count += done
        return done

    monkeypatch.setattr(os, "preadv", counted)
    arrays = {"w": numbered(SHAPE), "n": numbered((24,))}
    before, after = (
        Layout((Stage(n, {"w": TensorLayout((n,), ((), (0,))), "n": TensorLayout((n,), ((),))}),)) for n in (4, 3)
    )
    joined = joined_from(tmp_path, before, arrays)
    plan = placed(as_wholes(joined), after)
    execute(plan, MemorySink(plan), workers=1)
    assert count == 24 * 24 * 2 + 24 * 2 == plan.source_bytes
    assert len(joined.replicas) == 3  # of the norm, on the other ranks


def test_what_is_cut_on_the_first_axis_is_copied_as_ranges() -> None:
    info = TensorInfo("w", (8, 4), "BF16", Path("f"), (Extent(10, 30), Extent(100, 34)))
    leaf = Leaf("w", (8, 4))
    (part,) = ranges(leaf, Region((2, 0), (6, 4)), {"w": info}) or []
    assert (part.start, part.size) == (16, 32)
    assert part.extents() == [Extent(26, 14), Extent(100, 18)]
    assert ranges(leaf, Region((2, 0), (6, 2)), {"w": info}) is None
    assert ranges(leaf, Region((2, 1), (3, 3)), {"w": info}) is not None  # one row


def test_equal_files_are_written_once_and_linked() -> None:
    info = TensorInfo("w", SHAPE, "BF16", Path("f"), (Extent(0, 24 * 48),))
    whole = OutputTensor(TensorSpec("w", SHAPE, "BF16"), 0, Leaf("w", SHAPE), {"w": info})
    plan = placed([whole], one_stage(TensorLayout((2, 2), ((0,), ()))))
    assert [file.name for file in plan.files] == ["rank_0/f", "rank_1/f"]
    assert plan.links == {"rank_2/f": "rank_0/f", "rank_3/f": "rank_1/f"}


# ---- what is refused ----------------------------------------------------------------------------------------------

CUT = one_stage(TensorLayout((2,), ((0,), ())))


def test_a_rank_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    ranks = store_ranks(tmp_path, CUT, {"w": numbered(SHAPE)})
    ranks[1] = Checkpoint(tmp_path, tmp_path, "safetensors", (), {})
    with pytest.raises(CoverageError, match="not on the ranks") as error:
        join(ranks, CUT, parameter_of=lambda _: None)
    assert error.value.items == ("rank_1 lacks it",) or list(error.value.items) == ["rank_1 lacks it"]


def test_shards_of_different_shapes_are_refused(tmp_path: Path) -> None:
    ranks = store_ranks(tmp_path, CUT, {"w": numbered(SHAPE)})
    other = store_ranks(tmp_path, CUT, {"w": numbered((12, 24))})
    with pytest.raises(CoverageError, match="differ in shape"):
        join({0: ranks[0], 1: other[1]}, CUT, parameter_of=lambda _: None)


def test_a_promised_shape_that_does_not_come_out_is_refused(tmp_path: Path) -> None:
    ranks = store_ranks(tmp_path, CUT, {"w": numbered(SHAPE)})
    with pytest.raises(CoverageError, match=r"its strategy file says \(24, 48\)"):
        join(ranks, CUT, parameter_of=lambda _: None, shapes={"w": (24, 48)})


def test_more_ranks_than_the_layout_has_are_refused_with_what_they_hold(tmp_path: Path) -> None:
    ranks = store_ranks(tmp_path, CUT, {"w": numbered(SHAPE)})
    with pytest.raises(CoverageError, match="2 ranks lie here, and the layout is one of 1") as error:
        join(ranks, one_stage(TensorLayout((1,), ((), ()))), parameter_of=lambda _: None)
    assert "rank_1 holds w" in error.value.items


def test_a_tensor_without_a_place_and_a_place_without_a_tensor_are_refused() -> None:
    info = TensorInfo("w", SHAPE, "BF16", Path("f"), (Extent(0, 24 * 48),))
    whole = OutputTensor(TensorSpec("w", SHAPE, "BF16"), 0, Leaf("w", SHAPE), {"w": info})
    how = TensorLayout((2,), ((0,), ()))
    with pytest.raises(CoverageError, match="no place in the target layout"):
        placed([whole], one_stage(how, "other"))
    with pytest.raises(CoverageError, match="not in the source"):
        placed([whole], one_stage(how, "w", "other"))


def test_an_axis_that_does_not_divide_is_refused_with_both_numbers() -> None:
    info = TensorInfo("w", SHAPE, "BF16", Path("f"), (Extent(0, 24 * 48),))
    whole = OutputTensor(TensorSpec("w", SHAPE, "BF16"), 0, Leaf("w", SHAPE), {"w": info})
    with pytest.raises(CoverageError, match="24 rows on axis 0, which 5 devices"):
        placed([whole], one_stage(TensorLayout((5,), ((0,), ()))))


def test_a_region_without_a_region_is_the_whole() -> None:
    output = OutputTensor(TensorSpec("w", SHAPE, "BF16"), 0, Leaf("w", SHAPE), {})
    assert output.box == Region.whole(SHAPE)
