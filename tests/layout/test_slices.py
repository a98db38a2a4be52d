"""The slice formula against one made of nothing but np.split: cut an array again and again, as the layout says."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CoverageError
from ckptkit.layout.layout import replicated
from ckptkit.layout.slices import coordinates, num_opt_shards, num_parts, shard_region, unused_axes, whole_shape
from ckptkit.types import Shape, TensorLayout


def cut_by_hand(layout: TensorLayout, whole: np.ndarray) -> list[np.ndarray]:
    """Return what each device holds of `whole`.

    Axis by axis, the more significant device axis first. Then those that hold equal parts share them out in the order
    of their ranks, one after another, as MindSpore's compiler groups them.
    """
    dev, last = layout.dev_matrix, len(layout.dev_matrix) - 1
    held, groups = [], {}
    for device, place in enumerate(np.ndindex(*dev)):
        part, used = whole, []
        for axis, device_axes in enumerate(layout.tensor_map):
            for m in device_axes:
                part = np.split(part, dev[last - m], axis)[place[last - m]]
                used.append((axis, place[last - m]))
        held.append(part)
        groups.setdefault(tuple(used), []).append(device)
    if layout.opt_step and layout.opt_size:
        for devices in groups.values():
            shards = len(devices) if layout.opt_size == -1 else layout.opt_size
            for index, device in enumerate(devices):
                held[device] = np.split(held[device], shards)[index % shards]
    return held


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorLayout, Shape]:
    """Draw a layout and the shape of a tensor that it fits."""
    dev = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    num_axes = draw(st.integers(1, 3))
    tensor_map: list[list[int]] = [[] for _ in range(num_axes)]
    for m in draw(st.permutations(range(len(dev)))):
        axis = draw(st.integers(-1, num_axes - 1))
        if axis >= 0:
            tensor_map[axis].append(m)
    layout = TensorLayout(dev, tuple(map(tuple, tensor_map)))
    if draw(st.booleans()):
        layout = replace(layout, opt_step=1, opt_size=draw(opt_sizes(layout)))
    rows = st.integers(1, 3)
    return layout, tuple(parts * draw(rows) for parts in num_parts(layout))


@st.composite
def opt_sizes(draw: st.DrawFn, layout: TensorLayout) -> int:
    """Draw -1, or a number of parts that takes whole device axes from the last one on, and a share of one more."""
    free = [layout.dev_matrix[axis] for axis in unused_axes(layout)]
    whole = draw(st.integers(0, len(free)))
    share = 1
    if whole < len(free):
        share = draw(st.sampled_from([n for n in range(1, free[-1 - whole] + 1) if free[-1 - whole] % n == 0]))
    return draw(st.sampled_from([-1, prod(free[len(free) - whole :]) * share]))


@given(layouts())
def test_each_device_holds_what_cutting_by_hand_gives_it(case: tuple[TensorLayout, Shape]) -> None:
    layout, shape = case
    whole = np.arange(prod(shape)).reshape(shape)
    held = cut_by_hand(layout, whole)
    assert len(held) == prod(layout.dev_matrix)
    for device, part in enumerate(held):
        region = shard_region("x", layout, shape, device)
        np.testing.assert_array_equal(whole[region.slices()], part)
        assert whole_shape(layout, part.shape) == shape


@given(layouts())
def test_the_parts_cover_the_tensor_equally_often(case: tuple[TensorLayout, Shape]) -> None:
    layout, shape = case
    times = np.zeros(shape, int)
    devices = prod(layout.dev_matrix)
    for device in range(devices):
        times[shard_region("x", layout, shape, device).slices()] += 1
    assert (times == devices // prod(num_parts(layout))).all()


def test_two_device_axes_on_one_tensor_axis_count_in_the_order_of_the_map() -> None:
    """The control: with the other order, cutting by hand gives something else."""
    layout = TensorLayout((2, 3), ((1, 0),))
    turned = TensorLayout((2, 3), ((0, 1),))
    starts = [shard_region("x", layout, (6,), device).start[0] for device in range(6)]
    assert starts == [0, 1, 2, 3, 4, 5]
    assert [int(part[0]) for part in cut_by_hand(turned, np.arange(6))] == [0, 2, 4, 1, 3, 5]
    assert [shard_region("x", turned, (6,), device).start[0] for device in range(6)] == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(
    ("dev", "size"),
    [
        ((3, 2), 3),  # the last axis gives 2 parts, and the third would lie nowhere
        ((2, 3), 2),  # three devices in a row cannot share two parts
        ((4,), 8),
        ((4,), 3),
    ],
)
def test_an_optimizer_shard_that_the_device_axes_cannot_share_is_refused(dev: Shape, size: int) -> None:
    layout = TensorLayout(dev, ((),), opt_step=1, opt_size=size)
    with pytest.raises(CoverageError, match=f"an optimizer shard of {size} parts does not fit the"):
        shard_region("x", layout, (24,), 0)


@pytest.mark.parametrize(("step", "size"), [(0, -1), (1, 0), (0, 0)])
def test_without_step_or_size_there_is_no_optimizer_shard(step: int, size: int) -> None:
    assert num_opt_shards(TensorLayout((4,), ((),), step, size)) == 1


def test_a_scalar_is_whole_on_every_device() -> None:
    layout = replace(replicated(0, 4), opt_step=1, opt_size=-1)
    assert [shard_region("step", layout, (), device).shape for device in range(4)] == [()] * 4


def test_parts_of_unequal_size_are_refused_with_both_numbers() -> None:
    with pytest.raises(CoverageError, match="`x` has 6 rows on axis 1, which 4 devices cannot share equally"):
        shard_region("x", TensorLayout((4,), ((), (0,))), (4, 6), 0)
    with pytest.raises(CoverageError, match="its layout is one of 1 axes"):
        shard_region("x", TensorLayout((4,), ((0,),)), (4, 4), 0)


def test_coordinates_are_row_major() -> None:
    assert [coordinates((2, 3), device) for device in range(6)] == [(i, j) for i in range(2) for j in range(3)]


def test_a_part_of_another_number_of_axes_is_refused_by_name() -> None:
    with pytest.raises(CoverageError, match="the part of `x` that a rank holds has shape \\(2, 8\\)") as caught:
        whole_shape(TensorLayout((2,), ((0,),)), (2, 8), "x")
    assert caught.value.what.endswith("and its layout is one of 1 axes")
    assert caught.value.why and caught.value.hint
