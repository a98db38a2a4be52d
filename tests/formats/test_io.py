"""Reading regions, and the pool of open files."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
from format_contract import region_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import CorruptError, InternalError, ResourceError, UsageError
from ckptkit.formats import io
from ckptkit.formats.file_pool import VIEWS
from ckptkit.formats.io import FilePool, read_region
from ckptkit.types import DTYPES, Extent, Region, TensorInfo

BYTES = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("io") / "data"
    path.write_bytes(BYTES)
    return path


@st.composite
def stored_tensor(draw: st.DrawFn, file: Path) -> tuple[TensorInfo, np.ndarray]:
    """Draw a tensor in `file`, in several extents that need not end at an element's end, and its elements."""
    dtype = draw(st.sampled_from(["U8", "BF16", "F32", "F64"]))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    size = prod(shape) * DTYPES[dtype].bits // 8
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    extents, offset = [], draw(st.integers(0, 50))
    for a, b in pairwise(edges):
        extents.append(Extent(offset, b - a))
        offset += b - a + draw(st.integers(0, 30))
    content = b"".join(BYTES[e.offset : e.offset + e.size] for e in extents)
    elements = np.frombuffer(content, DTYPES[dtype].carrier).reshape(shape)
    return TensorInfo("t", shape, dtype, file, tuple(extents)), elements


@st.composite
def stored_view(draw: st.DrawFn, file: Path) -> tuple[TensorInfo, np.ndarray]:
    """Draw a view as a PyTorch pickle may hold it: transposed, stepped, expanded or all of it."""
    info, elements = draw(stored_tensor(file).filter(lambda pair: pair[1].size > 0))
    view = elements.transpose(draw(st.permutations(range(elements.ndim))))
    view = view[tuple(slice(None, None, draw(st.integers(1, 3))) for _ in view.shape)]
    if draw(st.booleans()):
        view = np.moveaxis(np.broadcast_to(view[None], (3, *view.shape)), 0, draw(st.integers(0, view.ndim)))
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return TensorInfo("t", view.shape, info.dtype, file, info.extents, strides), view


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", [stored_tensor, stored_view])
def test_any_region_of_any_tensor_is_read(file: Path, kind: object, data: st.DataObject) -> None:
    info, elements = data.draw(kind(file))
    region = data.draw(region_of(info.shape))
    got = read_region(info, region)
    assert got.dtype == DTYPES[info.dtype].carrier
    assert got.shape == region.shape
    assert np.array_equal(got, elements[region.slices()])


@settings(deadline=None)
@given(data=st.data())
def test_any_array_is_filled_and_nothing_beside_it(file: Path, data: st.DataObject) -> None:
    info, elements = data.draw(stored_view(file))
    region = data.draw(region_of(info.shape).filter(lambda region: len(region.start) > 0))
    around = np.full([2 * length + 1 for length in region.shape], 77, elements.dtype)
    inside = tuple(slice(1, 2 * length + 1, 2) for length in region.shape)
    assert read_region(info, region, out=around[inside]) is not None
    want = np.full_like(around, 77)
    want[inside] = elements[region.slices()]
    assert np.array_equal(around, want)


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the bytes of each `preadv` from here on."""
    counts: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: counts.append(len(parts[0])) or preadv(fd, parts, at))
    return counts


def whole(shape: Sequence[int], dtype: str, file: Path, strides: tuple[int, ...] | None = None) -> TensorInfo:
    size = prod(shape) * DTYPES[dtype].bits // 8
    return TensorInfo("t", tuple(shape), dtype, file, (Extent(0, size),), strides)


def test_a_contiguous_region_takes_one_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted_reads(monkeypatch)
    read_region(whole((100, 50), "F32", file), Region((10, 0), (60, 50)))
    assert counts == [50 * 50 * 4]


def test_runs_near_each_other_are_read_together(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted_reads(monkeypatch)
    read_region(whole((100, 50), "F32", file), Region((0, 10), (100, 20)))
    assert counts == [(99 * 50 + 10) * 4]


def test_runs_far_from_each_other_are_read_apart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted_reads(monkeypatch)
    read_region(whole((10, 5000), "F32", file), Region((0, 0), (10, 100)))
    assert counts == [400] * 10


def test_scratch_memory_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "SCRATCH_BYTES", 1000)
    counts = counted_reads(monkeypatch)
    info = whole((100, 50), "F32", file)
    got = read_region(info, Region((0, 10), (100, 20)))
    assert max(counts) <= 1000
    assert np.array_equal(got, read_region(info)[:, 10:20])


def test_a_transposed_view_is_read_as_its_storage_lies(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted_reads(monkeypatch)
    view = read_region(whole((40, 30), "F32", file, strides=(1, 40)))
    assert counts == [4800]
    assert np.array_equal(view, np.frombuffer(BYTES[:4800], np.uint32).reshape(30, 40).T)


def test_an_expanded_view_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = TensorInfo("t", (1000, 8), "F32", file, (Extent(0, 32),), (0, 1))
    counts = counted_reads(monkeypatch)
    view = read_region(info)
    assert counts == [32]
    assert (view == view[0]).all()


def test_a_file_that_shrank_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(90))
    with pytest.raises(CorruptError, match=r"file shrank while being read: .*x.*10 bytes too early"):
        read_region(whole((100,), "U8", path))


def test_a_file_that_shrinks_while_a_pool_holds_it_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    with FilePool() as pool:
        read_region(whole((100,), "U8", path), pool=pool)
        os.truncate(path, 40)
        with pytest.raises(CorruptError, match="60 bytes too early"):
            read_region(whole((100,), "U8", path), pool=pool)


def test_short_reads_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:7]], at))
    assert read_region(whole((100,), "U8", file)).tobytes() == BYTES[:100]


def test_a_disk_that_fails_is_a_resource_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ResourceError, match="Input/output error"):
        read_region(whole((4,), "U8", file))


def test_a_region_outside_the_tensor_is_an_internal_error(file: Path) -> None:
    info = whole((4, 4), "U8", file)
    for region in (Region((0,), (4,)), Region((0, 0), (4, 5)), Region((2, 0), (1, 4)), Region((-1, 0), (4, 4))):
        with pytest.raises(InternalError, match="is not inside"):
            read_region(info, region)


def test_an_array_that_does_not_fit_is_an_internal_error(file: Path) -> None:
    for out in (np.empty((4, 3), np.uint16), np.empty((4, 4), np.int16), np.empty((4, 4), np.uint8)):
        with pytest.raises(InternalError, match="does not fit"):
            read_region(whole((4, 4), "BF16", file), out=out)


def test_extents_that_are_too_short_are_an_internal_error(file: Path) -> None:
    with pytest.raises(InternalError, match="has no byte 3"):
        read_region(TensorInfo("t", (4,), "U8", file, (Extent(0, 3),)))


def open_descriptors(folder: Path) -> int:
    links = list(Path("/proc/self/fd").iterdir())
    return sum(os.path.realpath(link).startswith(f"{folder}{os.sep}") for link in links)


def numbered(folder: Path, count: int) -> list[Path]:
    paths = [folder / str(number) for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 4)
    return paths


def test_a_pool_keeps_at_most_its_limit_of_files_open(tmp_path: Path) -> None:
    paths = numbered(tmp_path, 10)
    buffer = bytearray(4)
    with FilePool(3) as pool:
        for _ in range(2):
            for number, path in enumerate(paths):
                pool.pread_into(path, 0, memoryview(buffer))
                assert buffer == bytes([number]) * 4
                assert open_descriptors(tmp_path) <= 3
        assert open_descriptors(tmp_path) == 3
    assert open_descriptors(tmp_path) == 0


def test_a_pool_serves_more_threads_than_it_may_open_files(tmp_path: Path) -> None:
    paths = numbered(tmp_path, 8)
    wrong: list[int] = []

    def work(seed: int) -> None:
        buffer = bytearray(4)
        for step in range(200):
            number = (seed * 7 + step * 3) % len(paths)
            pool.pread_into(paths[number], 0, memoryview(buffer))
            if buffer != bytes([number]) * 4:
                wrong.append(number)

    with FilePool(2) as pool:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert open_descriptors(tmp_path) <= 2
    assert wrong == []


def test_a_pool_that_cannot_open_a_file_serves_others(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    buffer = bytearray(4)
    with FilePool(1) as pool:
        with pytest.raises(UsageError, match="no such file"):
            pool.pread_into(tmp_path / "none", 0, memoryview(buffer))
        pool.pread_into(path, 0, memoryview(buffer))


def test_reading_a_region_leaves_no_file_open(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    read_region(whole((4,), "U8", path))
    assert open_descriptors(tmp_path) == 0


def pieces_of(data: bytearray, *parts: tuple[int, int]) -> list[tuple[int, memoryview]]:
    """Return a view of `data` for each (offset, size): one after another there, from `offset` on in the file."""
    views, done = [], 0
    for offset, size in parts:
        views.append((offset, memoryview(data)[done : done + size]))
        done += size
    return views


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_pieces_that_follow_one_another_are_read_with_one_call(
    file: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, calls = os.preadv, []

    def counted(fd: int, parts: list[memoryview], at: int) -> int:
        """Read `most` bytes at most, into as many of the parts as these fill."""
        calls.append((at, len(parts)))
        left, taken = most, []
        for part in parts:
            taken.append(part[:left])
            left -= len(taken[-1])
        return preadv(fd, taken, at)

    monkeypatch.setattr(os, "preadv", counted)
    data = bytearray(40)
    parts = ((30, 10), (50, 10), (10, 12), (22, 8))
    with FilePool() as pool:
        pool.pread_joined(file, pieces_of(data, *parts))
    assert data == b"".join(BYTES[offset : offset + size] for offset, size in parts)
    assert calls[0] == (10, 3)
    assert most < 1000 or calls == [(10, 3), (50, 1)]


def test_no_call_fills_more_views_than_the_system_takes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(BYTES)
    data = bytearray(3 * VIEWS)
    with FilePool() as pool:
        pool.pread_joined(path, pieces_of(data, *((number, 1) for number in range(len(data)))))
    assert data == BYTES[: len(data)]


@pytest.mark.parametrize(
    ("position", "ends"),
    [
        (0, [(3, 11), (11, 19), (19, 23), (40, 44), (44, 48)]),
        (5, [(3, 6), (6, 14), (14, 22), (22, 23), (40, 47), (47, 48)]),
    ],
)
def test_blocks_are_the_bytes_of_the_extents_in_order(file: Path, position: int, ends: list[tuple[int, int]]) -> None:
    """They begin at multiples of the buffer's length, as counted from `position`, and where an extent does."""
    buffer, extents = memoryview(bytearray(8)), [Extent(3, 20), Extent(50, 0), Extent(40, 8)]
    with FilePool() as pool:
        blocks = [bytes(block) for block in pool.pread_blocks(file, extents, buffer, position=position)]
    assert blocks == [BYTES[start:stop] for start, stop in ends]


def test_blocks_that_nobody_asks_for_any_more_let_go_of_their_file(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    with FilePool() as pool:
        blocks = pool.pread_blocks(path, [Extent(0, 4)], memoryview(bytearray(2)))
        assert next(blocks) == bytes(2)
        blocks.close()
    assert open_descriptors(tmp_path) == 0


def test_blocks_of_a_file_that_shrank_are_an_error(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    with FilePool() as pool, pytest.raises(CorruptError, match="2 bytes too early"):
        list(pool.pread_blocks(path, [Extent(2, 4)], memoryview(bytearray(4))))
    with FilePool() as pool, pytest.raises(CorruptError, match="3 bytes too early"):
        pool.pread_joined(path, pieces_of(bytearray(6), (1, 2), (3, 4)))
