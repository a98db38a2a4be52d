"""The contract: whatever the tile size, every output's bytes are its expression's, put once, and digested."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckptkit.errors import CorruptError
from ckptkit.execute import execute
from ckptkit.formats.io import FilePool
from ckptkit.formats.safetensors import lay_out
from ckptkit.mapping.expr import Expr, Leaf, evaluate, invert, node
from ckptkit.mapping.groups import Interleave, Merge
from ckptkit.mapping.ops import Concat, Stack, Transpose
from ckptkit.moves.run import Run
from ckptkit.moves.tiles import _Reader
from ckptkit.plan import jobs as jobs_module
from ckptkit.plan.jobs import Job, Making, in_order, make_jobs, tile_shapes, tiles
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.types import Extent, Region, TensorInfo, TensorSpec


class MemorySink:
    """Keep every byte that is put, and count how often."""

    def __init__(self, plan: Plan) -> None:
        self.data = [bytearray(o.spec.num_bytes) for o in plan.outputs]
        self.times = [np.zeros(o.spec.num_bytes, np.uint8) for o in plan.outputs]
        self.digests: dict[int, str | None] = {}
        self._lock = threading.Lock()

    def put(self, output: int, offset: int, data: memoryview) -> None:
        with self._lock:
            self.data[output][offset : offset + len(data)] = data
            self.times[output][offset : offset + len(data)] += 1

    def put_batch(self, outputs: Sequence[int], data: memoryview, digests: Sequence[str | None]) -> None:
        for output, digest in zip(outputs, digests, strict=True):
            self.put(output, 0, data[: len(self.data[output])])
            self.finish(output, digest)
            data = data[len(self.data[output]) :]
        assert not data

    def finish(self, output: int, digest: str | None) -> None:
        assert output not in self.digests
        self.digests[output] = digest


def store(folder: Path, arrays: dict[str, np.ndarray[Any, Any]], *, pieces: int = 1) -> dict[str, TensorInfo]:
    """Write arrays one after another into a file, each in so many pieces with a gap between them."""
    infos, data = {}, bytearray(b"head")
    for name, array in arrays.items():
        raw = array.tobytes()
        step = -(-len(raw) // pieces)
        extents = []
        for start in range(0, len(raw), step):
            piece = raw[start : start + step]
            extents.append(Extent(len(data), len(piece)))
            data += piece + b"gap"
        infos[name] = TensorInfo(name, array.shape, "BF16", folder / "source", tuple(extents))
    (folder / "source").write_bytes(data)
    return infos


def make_plan(infos: dict[str, TensorInfo], exprs: Sequence[tuple[str, Expr]]) -> Plan:
    outputs = tuple(OutputTensor(TensorSpec(name, expr.shape, "BF16"), 0, expr, infos) for name, expr in exprs)
    return Plan(outputs, (), {}, (), (), (), (), (), {})


def whole(expr: Expr, arrays: dict[str, np.ndarray[Any, Any]]) -> bytes:
    value = evaluate(expr, Region.whole(expr.shape), lambda leaf, box: arrays[leaf.name][box.slices()])
    return np.ascontiguousarray(value).tobytes()


def random_arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 1 << 16, shape, dtype=np.uint16) for name, shape in shapes.items()}


def fused() -> tuple[dict[str, np.ndarray[Any, Any]], list[tuple[str, Expr]]]:
    arrays = random_arrays(
        {"q": (24, 6), "k": (8, 6), "v": (8, 6), "g": (10, 6), "u": (10, 6), "e0": (4, 6), "e1": (4, 6)}
    )
    leaf = {name: Leaf(name, array.shape) for name, array in arrays.items()}
    exprs = [
        ("qkv", node(Interleave(0, (6, 2, 2)), [leaf["q"], leaf["k"], leaf["v"]])),
        ("gate_up", node(Interleave(0, (1, 1)), [leaf["g"], leaf["u"]])),
        ("experts", node(Transpose((0, 2, 1)), [node(Stack(0, 2), [leaf["e0"], leaf["e1"]])])),
        ("plain", node(Concat(0), [leaf["q"], leaf["k"]])),
        ("same", leaf["v"]),
    ]
    return arrays, exprs


@pytest.mark.parametrize("tile_bytes", [1, 24, 60, 100, 1 << 20])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_byte_is_put_once_and_is_the_expressions(
    tmp_path: Path, tile_bytes: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "TILES_BYTES", 2 * tile_bytes)
    monkeypatch.setattr(jobs_module, "BLOCK_BYTES", 32)
    arrays, exprs = fused()
    plan = make_plan(store(tmp_path, arrays, pieces=3), exprs)
    sink = MemorySink(plan)
    execute(plan, sink, workers=workers)
    for number, (_, expr) in enumerate(exprs):
        wanted = whole(expr, arrays)
        assert bytes(sink.data[number]) == wanted
        assert (sink.times[number] == 1).all()
        assert sink.digests[number] in (None, xxhash.xxh3_128_hexdigest(wanted))


@pytest.mark.parametrize("tile_bytes", [216, 432, 1 << 20])
def test_the_parts_of_a_fused_tensor_are_made_from_one_reading(
    tmp_path: Path, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "TILES_BYTES", 2 * tile_bytes)
    arrays, exprs = fused()
    qkv = exprs[0][1]
    stored = {"qkv": np.frombuffer(whole(qkv, arrays), np.uint16).reshape(qkv.shape)}
    parts = [(leaf.name, part) for leaf, part in invert(qkv, Leaf("qkv", qkv.shape))]
    plan = make_plan(store(tmp_path, stored), parts)
    assert make_jobs(plan) == [Job("tiles", [0, 1, 2])]
    count = 0
    original = FilePool.pread_many

    def counted(self: FilePool, path: Path, pieces: Iterable[tuple[int, memoryview]]) -> None:
        nonlocal count
        listed = list(pieces)
        count += sum(len(data) for _, data in listed)
        original(self, path, listed)

    monkeypatch.setattr(FilePool, "pread_many", counted)
    sink = MemorySink(plan)
    execute(plan, sink)
    assert count == stored["qkv"].nbytes
    for number, (name, _) in enumerate(parts):
        assert bytes(sink.data[number]) == arrays[name].tobytes()


def test_what_is_read_lasts_for_a_tile_and_is_read_again_in_the_next(tmp_path: Path) -> None:
    """Reads of a tile have arrays of their own, which the next tile uses again: nothing kept may point to them."""
    arrays = random_arrays({"a": (2, 3), "b": (2, 3)})
    infos = store(tmp_path, arrays)
    plan = make_plan(infos, [])
    with FilePool() as pool:
        read = _Reader(Run(plan, MemorySink(plan), pool, False, {}, lambda _: None, 1 << 20), infos, keeps=True)
        read.dtype = "BF16"
        a, b = (Leaf(name, (2, 3)) for name in "ab")
        box = Region.whole((2, 3))
        first, second = read(a, box), read(b, box)
        assert read(a, box) is first
        assert (first == arrays["a"]).all()
        assert (second == arrays["b"]).all()
        read.restart()
        assert (read(b, Region((1, 0), (2, 3))) == arrays["b"][1:]).all()
        assert (read(a, box) == arrays["a"]).all()


@pytest.mark.parametrize("block_bytes", [8, 32, 1 << 18])
@pytest.mark.parametrize("digests", [False, True])
def test_small_neighbours_are_put_together_wherever_they_come_from(
    tmp_path: Path, block_bytes: int, digests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "BLOCK_BYTES", block_bytes)
    arrays = random_arrays({f"t{number}": (number % 5 + 1,) for number in range(30)} | {"large": (1 << 15,)})
    infos = store(tmp_path, arrays)
    names = sorted(arrays, key=lambda name: name[::-1])  # another order than in the source
    outputs = tuple(
        OutputTensor(
            TensorSpec(name, arrays[name].shape, "BF16"), 0, Leaf(name, arrays[name].shape), {name: infos[name]}
        )
        for name in names
    )
    file = lay_out("out.safetensors", [output.spec for output in outputs], {})
    plan = Plan(outputs, (file,), {}, (), (), (), (), (), {})
    for job in make_jobs(plan):
        assert (job.how == "batch") == (infos[names[job.outputs[0]]].num_bytes <= min(1 << 15, block_bytes))
        assert job.how == "ranges" or sum(infos[names[n]].num_bytes for n in job.outputs) <= block_bytes
    sink = MemorySink(plan)
    execute(plan, sink, digests=digests)
    for number, name in enumerate(names):
        assert bytes(sink.data[number]) == arrays[name].tobytes()
        assert sink.digests[number] == (xxhash.xxh3_128_hexdigest(arrays[name].tobytes()) if digests else None)
    promised = {"t7": "0" * 32}
    with pytest.raises(CorruptError, match="not what its manifest promises"):
        execute(plan, MemorySink(plan), source_digests=promised)


def test_digests_are_left_out_when_not_wanted(tmp_path: Path) -> None:
    arrays, exprs = fused()
    plan = make_plan(store(tmp_path, arrays), exprs)
    sink = MemorySink(plan)
    execute(plan, sink, digests=False)
    assert set(sink.digests.values()) == {None}


def test_a_source_that_broke_its_manifests_promise_is_refused(tmp_path: Path) -> None:
    arrays = random_arrays({"v": (8, 6)})
    plan = make_plan(store(tmp_path, arrays), [("same", Leaf("v", (8, 6)))])
    execute(plan, MemorySink(plan), source_digests={"v": xxhash.xxh3_128_hexdigest(arrays["v"].tobytes())})
    with pytest.raises(CorruptError, match="not what its manifest promises"):
        execute(plan, MemorySink(plan), source_digests={"v": "0" * 32})


def test_the_first_error_of_a_worker_stops_the_others(tmp_path: Path) -> None:
    arrays, exprs = fused()
    infos = store(tmp_path, arrays)
    source = tmp_path / "source"
    source.write_bytes(source.read_bytes()[:-40])
    plan = make_plan(infos, exprs)
    with pytest.raises(CorruptError, match="shrank"):
        execute(plan, MemorySink(plan), workers=3)


def test_progress_adds_up_to_all_bytes(tmp_path: Path) -> None:
    arrays, exprs = fused()
    plan = make_plan(store(tmp_path, arrays), exprs)
    told: list[int] = []
    execute(plan, MemorySink(plan), workers=1, progress=told.append)
    assert sum(told) == plan.tensor_bytes


def test_tiles_cover_a_shape_once() -> None:
    seen = np.zeros((7, 5, 3), np.uint8)
    for region in tiles((7, 5, 3), (2, 3, 3)):
        seen[region.slices()] += 1
    assert (seen == 1).all()


def tile_of(expr: Expr, tile_bytes: int) -> tuple[int, ...]:
    (tile,) = tile_shapes([Making(expr, Region.whole(expr.shape), [])], 2, tile_bytes)
    return tile


def test_a_tile_stays_within_the_budget_where_the_ops_allow() -> None:
    tile = tile_of(node(Transpose((1, 0)), [Leaf("w", (1000, 1000))]), 4096)
    assert np.prod(tile) * 2 <= 4096


def test_a_group_that_is_larger_than_a_tile_is_cut_in_bands_that_lie_in_order() -> None:
    experts = node(Merge(0), [node(Transpose((0, 2, 1)), [Leaf("w", (4, 64, 32))])])
    assert experts.shape == (128, 64)
    assert tile_of(experts, 2048) == (16, 64)
    assert in_order(experts.shape, (16, 64))


def test_bands_never_cut_across_the_parts_of_a_group() -> None:
    parts = [Leaf("w", (48, 8)), Leaf("w", (16, 8)), Leaf("w", (16, 8))]
    assert tile_of(node(Interleave(0, (24, 8, 8)), parts), 160) == (8, 8)
    assert tile_of(node(Interleave(0, (24, 7, 9)), [parts[0], Leaf("w", (14, 8)), Leaf("w", (18, 8))]), 160) == (40, 2)


@pytest.mark.parametrize("tile_bytes", [64, 1 << 20])
@pytest.mark.parametrize("order", ["in order", "in columns"])
def test_a_fused_source_that_broke_its_promise_is_refused(
    tmp_path: Path, tile_bytes: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "TILES_BYTES", 2 * tile_bytes)
    arrays = random_arrays({"w": (30, 6)})
    leaf = Leaf("w", (30, 6))
    fused = node(Interleave(0, (6, 2, 2)), [Leaf("q", (18, 6)), Leaf("k", (6, 6)), Leaf("v", (6, 6))])
    halves = node(Concat(1), [Leaf("a", (30, 2)), Leaf("b", (30, 4))])
    parts = [(part.name, expr) for part, expr in invert(fused if order == "in order" else halves, leaf)]
    plan = make_plan(store(tmp_path, arrays), parts)
    promised = {"w": xxhash.xxh3_128_hexdigest(arrays["w"].tobytes())}
    execute(plan, MemorySink(plan), source_digests=promised)
    source = tmp_path / "source"
    data = bytearray(source.read_bytes())
    data[100] ^= 1
    source.write_bytes(data)
    with pytest.raises(CorruptError, match="not what its manifest promises"):
        execute(plan, MemorySink(plan), source_digests=promised)
