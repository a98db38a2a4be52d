"""The contract: however an output's bytes arrive, and however the other tensor lies, each element is compared once."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import compare as compare_module
from ckptkit.compare import Comparer, Tally, boxes
from ckptkit.plan.jobs import tiles
from ckptkit.types import Extent, TensorInfo, TensorSpec

Array = np.ndarray[Any, Any]


def stored(
    file: Path, array: Array, dtype: str, *, pieces: int = 1, strides: tuple[int, ...] | None = None
) -> TensorInfo:
    """Write an array's bytes in so many pieces, each after two bytes of something else."""
    raw, data, extents = array.tobytes(), b"", []
    step = -(-len(raw) // pieces)
    for start in range(0, len(raw), step):
        piece = raw[start : start + step]
        extents.append(Extent(len(data) + 2, len(piece)))
        data += b"??" + piece
    file.write_bytes(data)
    shape = array.shape if strides is None else array.shape[::-1]
    return TensorInfo("b", shape, dtype, file, tuple(extents), strides)


def compared(mine: Array, other: TensorInfo, dtype: str, cuts: list[int]) -> Tally:
    """Put the bytes of `mine` cut at `cuts`, in order."""
    sink = Comparer([TensorSpec("a", other.shape, dtype)], [other])
    data = memoryview(np.ascontiguousarray(mine).tobytes())
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    for start, stop in pairwise(edges):
        sink.put(0, start, data[start:stop])
    sink.finish(0, None)
    sink.close()
    return sink.tallies[0]


def values(seed: int, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(
    cuts=st.lists(st.integers(1, 300), max_size=6),
    block=st.sampled_from([1, 3, 7, 1000]),
    flips=st.sets(st.integers(0, 76)),
)
def test_cuts_and_blocks_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], block: int, flips: set[int]
) -> None:
    mine = values(0, (7, 11))
    theirs = mine.copy()
    for place in flips:
        theirs.reshape(-1)[place] += np.float32(1)
    other = stored(tmp_path_factory.mktemp("b") / "file", theirs, "F32", pieces=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "BLOCK", block)
        patch.setattr(compare_module, "_MOST_PLACES", 2)
        tally = compared(mine, other, "F32", cuts)
    assert tally.equal == (not flips)
    assert (tally.changed, tally.first) == (len(flips), min(flips) if flips else None)
    if flips:
        exact, changed = mine.astype(np.float64), theirs.astype(np.float64)
        assert tally.max_abs == np.abs(exact - changed).max()
        assert tally.max_a == np.abs(exact).max()


def test_a_view_is_compared_in_its_own_order(tmp_path: Path) -> None:
    base = values(1, (5, 9))
    view = stored(tmp_path / "file", base, "F32", strides=(1, 9))
    assert compared(base.T, view, "F32", [10, 33]).equal
    assert compared(base.T[::-1], view, "F32", [10]).changed == 8 * 5  # the middle row of 9 stays in its place


@pytest.mark.parametrize("tile", [(1, 1), (3, 2), (2, 11), (7, 4)])
def test_tiles_are_compared_as_their_elements(
    tmp_path: Path, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_module, "BLOCK", 5)
    mine = values(2, (7, 11))
    theirs = mine.copy()
    theirs[5, 3], theirs[2, 9] = 8.0, -9.0
    for case, changed in ((mine, 0), (theirs, 2)):
        other = stored(tmp_path / "file", case, "F32")
        sink = Comparer([TensorSpec("a", mine.shape, "F32")], [other])
        for region in tiles(mine.shape, tile):
            sink.put_region(0, region, mine[region.slices()].copy().view(np.uint32))
        sink.finish(0, None)
        (tally,) = sink.tallies
        assert (tally.changed, tally.first) == (changed, 2 * 11 + 9 if changed else None)
        if changed:
            assert tally.max_abs == np.abs(mine.astype(np.float64) - theirs).max()
            assert tally.max_a == np.abs(mine.astype(np.float64)).max()


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(0, total - first))
    numbers = np.arange(total).reshape(shape)
    found = [int(n) for box in boxes(tuple(shape), first, count) for n in numbers[box.slices()].reshape(-1)]
    assert found == list(range(first, first + count))


def test_zeros_of_two_signs_and_other_nans_are_other_bytes(tmp_path: Path) -> None:
    mine = np.array([0x00000000, 0x7FC00000, 0x3F800000], np.uint32)
    theirs = np.array([0x80000000, 0x7FC00001, 0x3F800000], np.uint32)
    tally = compared(mine, stored(tmp_path / "file", theirs, "F32"), "F32", [])
    assert not tally.equal
    assert (tally.changed, tally.max_abs, tally.max_relative, tally.nan) == (2, 0.0, 0.0, (1, 1))


def test_a_tensor_of_zeros_has_an_infinite_relative_difference(tmp_path: Path) -> None:
    other = stored(tmp_path / "file", np.ones(3, np.float32), "F32")
    assert compared(np.zeros(3, np.float32), other, "F32", []).max_relative == float("inf")


def test_values_of_two_dtypes_are_compared_and_a_nan_equals_a_nan(tmp_path: Path) -> None:
    wide = np.array([1.5, -2.0, np.nan, np.inf, 0.0], np.float32)
    other = stored(tmp_path / "file", (wide.view(np.uint32) >> 16).astype(np.uint16), "BF16")
    tally = compared(wide, other, "F32", [6])
    assert not tally.equal
    assert (tally.changed, tally.rounded, tally.nan, tally.inf) == (0, True, (1, 1), (1, 1))


@pytest.mark.parametrize("dtype", ["STR", "C64"])
def test_what_is_no_number_is_compared_by_bytes_alone(tmp_path: Path, dtype: str) -> None:
    carrier = np.uint32 if dtype == "STR" else np.uint64
    mine = np.arange(4, dtype=carrier)
    tally = compared(mine + carrier(1), stored(tmp_path / "file", mine, dtype), dtype, [])
    assert (tally.changed, tally.max_abs, tally.max_relative) == (4, None, None)
    assert compared(mine, stored(tmp_path / "file", mine, dtype), dtype, []).equal


def test_integers_have_figures_and_no_nans(tmp_path: Path) -> None:
    mine, theirs = np.array([-3, 7], np.int8), np.array([-3, -128], np.int8)
    tally = compared(mine, stored(tmp_path / "file", theirs, "I8"), "I8", [])
    assert (tally.max_abs, tally.max_a, tally.nan) == (135.0, 7.0, (0, 0))
