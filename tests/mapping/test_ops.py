"""The laws of ops: pull, coverage, inverse. They hold because an op is a bijection of elements (padding aside)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import CARRIERS, Case, numbered, op_cases, regions

from ckptkit.errors import CkptkitError, CoverageError, UsageError
from ckptkit.mapping.op import Array, Op
from ckptkit.mapping.ops import (
    Concat,
    Deinterleave,
    Index,
    Interleave,
    Merge,
    Pad,
    RopePermute,
    Slice,
    Split,
    Stack,
    Transpose,
)
from ckptkit.types import Region, Shape


def pulled(op: Op, region: Region, arrays: list[Array]) -> Array:
    """Return `region` of the output, made of the pulled boxes alone."""
    boxes = op.pull(region, [a.shape for a in arrays])
    assert len(boxes) == len(arrays)
    return op.within(region).apply([a[box.slices()] for a, box in zip(arrays, boxes, strict=True)])


def check_pull(op: Op, shapes: list[Shape], data: st.DataObject) -> None:
    arrays = numbered(shapes)
    whole = op.apply(arrays)
    granules = tuple(op.granule(axis, shapes) for axis in range(whole.ndim))
    region = data.draw(regions(whole.shape, granules))
    if region.size:
        boxes = op.pull(region, shapes)
        assert op.needed(region, shapes) == [(number, box) for number, box in enumerate(boxes) if box.size]
        np.testing.assert_array_equal(pulled(op, region, arrays), whole[region.slices()])


@given(op_cases(), st.data())
def test_a_region_of_the_output_comes_from_the_pulled_boxes(case: Case, data: st.DataObject) -> None:
    check_pull(*case, data)


@given(op_cases(), st.data())
def test_a_region_of_a_part_comes_from_the_pulled_box(case: Case, data: st.DataObject) -> None:
    op, shapes = case
    index = data.draw(st.integers(0, len(shapes) - 1))
    check_pull(op.part(index, shapes), [op.out_shape(shapes)], data)


@given(op_cases(), st.sampled_from(CARRIERS))
def test_each_part_gives_its_input_back_bit_for_bit(case: Case, dtype: str) -> None:
    op, shapes = case
    arrays = numbered(shapes, dtype)
    whole = op.apply(arrays)
    assert whole.shape == op.out_shape(shapes)
    assert whole.dtype == dtype
    for index, array in enumerate(arrays):
        part = op.part(index, shapes)
        assert part.out_shape([whole.shape]) == array.shape
        np.testing.assert_array_equal(part.apply([whole]), array)


@given(op_cases())
def test_every_element_is_moved_exactly_once_and_only_padding_is_zero(case: Case) -> None:
    op, shapes = case
    arrays = numbered(shapes)
    count = sum(a.size for a in arrays)
    moved = np.sort(op.apply(arrays).ravel())
    np.testing.assert_array_equal(moved[moved.size - count :], np.arange(1, count + 1))
    assert not moved[: moved.size - count].any()
    assert isinstance(op, Pad) or moved.size == count


@given(op_cases(), st.data())
def test_any_region_is_right_or_refused(case: Case, data: st.DataObject) -> None:
    op, shapes = case
    arrays = numbered(shapes)
    whole = op.apply(arrays)
    region = data.draw(regions(whole.shape, (1,) * whole.ndim))
    if not region.size:
        return
    try:
        got = pulled(op, region, arrays)
    except UsageError as error:
        assert "group" in error.what
        return
    np.testing.assert_array_equal(got, whole[region.slices()])


@given(op_cases())
def test_no_input_is_changed(case: Case) -> None:
    op, shapes = case
    arrays = numbered(shapes)
    before = [a.copy() for a in arrays]
    op.apply(arrays)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_wrong_pull_is_caught_by_the_pull_law() -> None:
    class Shifted(Concat):
        def pull(self, region: Region, shapes: object) -> tuple[Region, ...]:
            boxes = super().pull(region, shapes)  # type: ignore[arg-type]
            return tuple(reversed(boxes))

    arrays = numbered([(2, 2), (2, 2)])
    whole = Shifted(0).apply(arrays)
    region = Region((0, 0), (2, 2))
    assert not np.array_equal(pulled(Shifted(0), region, arrays), whole[region.slices()])


def test_interleave_puts_each_group_together() -> None:
    q, k = np.array([10, 11, 20, 21]), np.array([1, 2])
    assert Interleave(0, (2, 1)).apply([q, k]).tolist() == [10, 11, 1, 20, 21, 2]


def test_rope_permute_makes_pairs_of_halves_in_each_head() -> None:
    rows = np.arange(8)
    assert RopePermute(0, 4, 0, 4, "pairs").apply([rows]).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert RopePermute(0, 8, 2, 6, "pairs").apply([rows]).tolist() == [0, 1, 2, 4, 3, 5, 6, 7]


def test_a_part_of_one_group_pulls_no_more_than_its_rows() -> None:
    part = Deinterleave(0, (4, 2, 2), 1)
    assert part.pull(Region((2, 0), (4, 3)), [(24, 3)]) == (Region((12, 0), (14, 3)),)
    assert part.pull(Region((0, 0), (4, 3)), [(24, 3)]) == (Region((0, 0), (16, 3)),)


@pytest.mark.parametrize(
    ("op", "region", "shapes"),
    [
        (Interleave(0, (4, 2, 2)), Region((0, 0), (6, 3)), [(12, 3), (6, 3), (6, 3)]),
        (Deinterleave(0, (4, 2, 2), 0), Region((2, 0), (8, 3)), [(24, 3)]),
        (Merge(0), Region((2,), (9,)), [(3, 8)]),
        (Split(0, 8), Region((0, 1), (2, 8)), [(24,)]),
        (RopePermute(0, 8, 0, 8, "pairs"), Region((4,), (8,)), [(24,)]),
    ],
)
def test_a_cut_through_a_group_names_the_groups(op: Op, region: Region, shapes: list[Shape]) -> None:
    with pytest.raises(UsageError) as caught:
        op.pull(region, shapes)
    assert "group" in caught.value.what
    assert "3 groups of" in caught.value.why
    assert "divides 3" in caught.value.hint


@pytest.mark.parametrize(
    ("op", "shapes", "said"),
    [
        (Concat(0), [(2, 3), (2, 4)], "(2, 4)"),
        (Concat(2), [(2, 3)], "axis 2"),
        (Slice(0, 1, 5), [(4,)], "1:5"),
        (Stack(0, 2), [(2,), (3,)], "(3,)"),
        (Stack(0, 3), [(2,), (2,)], "takes 3"),
        (Stack(3, 1), [(2,)], "axis 3"),
        (Index(0, 4, 1), [(5, 2)], "has 5 entries, not 4"),
        (Transpose((1, 0)), [(2, 3, 4)], "(1, 0)"),
        (Pad(0, 3), [(4,)], "padded to 3"),
        (Interleave(0, (2, 1)), [(4,), (3,)], "4, 3 rows"),
        (Deinterleave(0, (2, 1), 0), [(7,)], "7 rows"),
        (Merge(1), [(4, 2)], "axis 1"),
        (Split(0, 3), [(7,)], "7 rows"),
        (RopePermute(0, 4, 0, 4, "pairs"), [(6,)], "6 rows"),
        (RopePermute(0, 4, 0, 3, "pairs"), [(8,)], "0:3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_their_numbers(op: Op, shapes: list[Shape], said: str) -> None:
    with pytest.raises(CoverageError) as caught:
        op.out_shape(shapes)
    assert said in str(caught.value)


@pytest.mark.parametrize("op", [Slice(0, 0, 1), Index(0, 2, 0), Deinterleave(0, (1, 1), 0)])
def test_a_part_alone_has_no_way_back(op: Op) -> None:
    assert op.is_part
    with pytest.raises(CkptkitError, match="not determine a tensor"):
        op.part(0, [(2, 2)])


def test_a_big_transpose_goes_tile_by_tile_and_is_right() -> None:
    array = np.arange(3 * 300 * 520, dtype="uint32").reshape(3, 300, 520)
    for perm in ((0, 2, 1), (2, 1, 0), (1, 0, 2), (2, 0, 1)):
        made = Transpose(perm).apply([array])
        np.testing.assert_array_equal(made, array.transpose(perm))
        assert made.flags.c_contiguous
