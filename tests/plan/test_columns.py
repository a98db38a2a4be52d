"""What is cut or joined on a later axis is moved row by row, and is what numpy says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckptkit.cast import Caster
from ckptkit.errors import CorruptError, InternalError
from ckptkit.execute import execute
from ckptkit.layout.layout import Layout
from ckptkit.layout.slices import shard_region
from ckptkit.mapping.expr import Expr, Leaf, node
from ckptkit.mapping.ops import Concat, Slice, Transpose
from ckptkit.moves import columns as columns_module
from ckptkit.plan import jobs as jobs_module
from ckptkit.plan.columns import Piece, columns
from ckptkit.plan.jobs import make_jobs
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.types import DTYPES, Extent, Region, TensorInfo, TensorLayout, TensorSpec
from tests.plan.test_shards import Array, as_wholes, joined_from, one_stage, parts_of, placed
from tests.test_execute import MemorySink

SHAPE = (6, 8, 12)


def info(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(name, shape, dtype, Path("f"), (Extent(10, TensorSpec(name, shape, dtype).num_bytes),))


def output(expr: Expr, *infos: TensorInfo, region: Region | None = None, dtype: str = "BF16") -> OutputTensor:
    shape = expr.shape if region is None else region.shape
    return OutputTensor(TensorSpec("out", shape, dtype), 0, expr, {i.name: i for i in infos}, region)


def parts(source: TensorInfo, axis: int, count: int) -> list[OutputTensor]:
    """Return `count` outputs that share a tensor on one axis."""
    leaf, step = Leaf(source.name, source.shape), source.shape[axis] // count
    whole = Region.whole(source.shape)
    return [
        output(leaf, source, region=whole.with_axis(axis, i * step, (i + 1) * step), dtype=source.dtype)
        for i in range(count)
    ]


# ---- what columns are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "rows", "row_bytes", "size"), [(1, 6, 192, 48), (2, 48, 24, 6)])
def test_parts_of_one_tensor_are_pieces_of_its_rows(axis: int, rows: int, row_bytes: int, size: int) -> None:
    source = info("w", SHAPE)
    made = columns(parts(source, axis, 4))
    assert made is not None
    assert (made.rows, made.strips) == (rows, ((source, 0, row_bytes),))
    assert made.pieces == tuple((Piece(0, i * size, size, 0),) for i in range(4))


def test_a_joined_tensor_has_rows_of_its_parts_in_turn() -> None:
    a, b = info("a", (4, 6)), info("b", (4, 2))
    made = columns([output(node(Concat(1), [Leaf("a", (4, 6)), Leaf("b", (4, 2))]), a, b)])
    assert made is not None and made.strips == ((a, 0, 12), (b, 0, 4))
    assert made.pieces == ((Piece(0, 0, 12, 0), Piece(1, 0, 4, 12)),)


def test_a_part_on_the_first_axis_is_rows_further_down() -> None:
    source, whole = info("w", SHAPE), Region.whole(SHAPE).with_axis(0, 2, 5)
    halves = [output(Leaf("w", SHAPE), source, region=whole.with_axis(2, at, at + 6)) for at in (0, 6)]
    made = columns(halves)
    assert made is not None and (made.rows, made.strips) == (24, ((source, 2 * 8 * 24, 24),))


def cases_that_are_not() -> dict[str, list[OutputTensor]]:
    source, leaf, whole = info("w", SHAPE), Leaf("w", SHAPE), Region.whole(SHAPE)
    strided = replace(source, strides=(1, 6, 48))
    apart = replace(source, extents=(Extent(0, 500), Extent(600, 652)))
    long = info("w", (2, 400, 400))
    return {
        "cut on the first axis": parts(source, 0, 2),
        "not cut": [output(leaf, source)],
        "cut on two axes": [output(leaf, source, region=whole.with_axis(1, 0, 4).with_axis(2, 0, 6))],
        "some of the parts, so not all of the rows": parts(source, 2, 4)[:3],
        "a hole between the parts": parts(source, 2, 4)[:1] + parts(source, 2, 4)[2:],
        "elements in another order": [output(node(Transpose((0, 2, 1)), [leaf]), source)],
        "cast": [replace(o, spec=replace(o.spec, dtype="F32")) for o in parts(source, 2, 4)],
        "of another dtype, which is widened first": [
            output(
                node(Concat(1), [Leaf("a", (4, 6)), Leaf("b", (4, 2))]),
                info("a", (4, 6)),
                info("b", (4, 2), "F32"),
                dtype="F32",
            )
        ],
        "a row that is too long, of one that is repeated": [
            output(node(Concat(1), [Leaf("a", (4, 9000))] * 16), info("a", (4, 9000)))
        ],
        "a view": [replace(o, inputs={"w": strided}) for o in parts(source, 2, 4)],
        "in two places of its file": [replace(o, inputs={"w": apart}) for o in parts(source, 2, 4)],
        "rows too long to be held": parts(long, 1, 2),
        "different numbers of rows": [*parts(source, 2, 2), *parts(info("v", (6, 4, 12)), 2, 2)],
        "empty": parts(info("w", (0, 8, 12)), 2, 2),
    }


@pytest.mark.parametrize("case", cases_that_are_not())
def test_what_is_not_columns(case: str) -> None:
    assert columns(cases_that_are_not()[case]) is None


def test_a_slice_of_what_was_joined_is_columns_where_it_takes_all_of_each_row() -> None:
    a, b = info("a", (4, 6)), info("b", (4, 2))
    joined = node(Concat(1), [Leaf("a", (4, 6)), Leaf("b", (4, 2))])
    cut = [output(node(Slice(1, at, at + 4), [joined]), a, b) for at in (0, 4)]
    made = columns(cut)
    assert made is not None
    assert made.pieces == ((Piece(0, 0, 8, 0),), (Piece(0, 8, 4, 0), Piece(1, 0, 4, 4)))
    assert columns(cut[:1]) is None, "of the first tensor's rows a third is not needed"


# ---- moving them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtypes", [("BF16", "F32"), ("F32", "BF16"), ("F16", "BF16")])
def test_parts_of_different_dtypes_are_widened_first(tmp_path: Path, axis: int, dtypes: tuple[str, str]) -> None:
    """Of all parts, and of those that a slice leaves."""
    numbers = {"a": np.arange(8, dtype=np.float32).reshape(4, 2), "b": np.arange(8, 16, dtype=np.float32).reshape(4, 2)}
    data, infos = bytearray(), {}
    for (name, array), dtype in zip(numbers.items(), dtypes, strict=True):
        bits = array.view(DTYPES["F32"].carrier)
        stored = (bits if dtype == "F32" else Caster("F32", dtype, clamp=False)(bits)).tobytes()
        infos[name] = TensorInfo(name, (4, 2), dtype, tmp_path / "f", (Extent(len(data), len(stored)),))
        data += stored
    (tmp_path / "f").write_bytes(data)
    joined = node(Concat(axis), [Leaf("a", (4, 2)), Leaf("b", (4, 2))])
    exprs = [
        joined,
        node(Slice(axis, 0, 2), [joined]),
        node(Slice(axis, joined.shape[axis] - 2, joined.shape[axis]), [joined]),
    ]
    outputs = tuple(OutputTensor(TensorSpec(f"{i}", expr.shape, "F32"), 0, expr, infos) for i, expr in enumerate(exprs))
    plan = Plan(outputs, (), {}, (), (), (), (), (), {})
    sink = MemorySink(plan)
    execute(plan, sink)
    whole = np.concatenate(list(numbers.values()), axis)
    wanted = [whole, *np.split(whole, [2, whole.shape[axis] - 2], axis)[::2]]
    for made, right in zip(sink.data, wanted, strict=True):
        assert np.array_equal(np.frombuffer(bytes(made), np.float32), right.reshape(-1))


def test_an_output_that_gets_too_few_bytes_is_never_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = stored(np.zeros((5, 12), np.uint16), 1, 1, 2, tmp_path)
    short = [replace(o, spec=replace(o.spec, shape=(5, 7))) for o in plan.outputs]
    sink = MemorySink(plan)
    with pytest.raises(InternalError, match="`w` has 70 bytes, and 60 were made"):
        execute(replace(plan, outputs=tuple(short)), sink)
    assert sink.digests == {}


class Calls(MemorySink):
    """Keep the bytes, and where each put would lie in its file."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.places = [plan.files[o.file].extents[o.spec.name][0] for o in plan.outputs]
        self.puts: list[tuple[int, int, Extent]] = []  # first byte and end in the file, and the tensor's extent there

    def put(self, output: int, offset: int, data: memoryview) -> None:
        super().put(output, offset, data)
        place = self.places[output]
        self.puts.append((place.offset + offset, place.offset + offset + len(data), place))


def stored(array: Array, axis: int, before: int, after: int, folder: Path) -> tuple[Plan, Layout]:
    """Return the plan that gives a tensor, cut in `before` parts on an axis, to `after` ranks."""
    maps = [tuple((0,) if i == axis else () for i in range(array.ndim)) for _ in range(2)]
    old, new = (one_stage(TensorLayout((n,), m)) for n, m in zip((before, after), maps, strict=True))
    return placed(as_wholes(joined_from(folder, old, {"w": array})), new), new


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 2), (2, 4), (4, 3), (12, 1), (1, 12)])
@pytest.mark.parametrize(("axis", "block_bytes"), list(product((1, 2), (32, 100, 1 << 18))))
@pytest.mark.parametrize("digests", [True, False])
def test_every_rank_gets_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: int, before: int, after: int, block_bytes: int, digests: bool
) -> None:
    monkeypatch.setattr(jobs_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(columns_module, "BAND_BYTES", 4 * block_bytes)
    monkeypatch.setattr(columns_module, "TELL_BYTES", 8 * block_bytes)
    array = np.random.default_rng(axis).integers(0, 1 << 16, (5, 12, 12), dtype=np.uint16)
    plan, layout = stored(array, axis, before, after, tmp_path)
    assert {job.how for job in make_jobs(plan)} == {"columns"}
    sink, told = Calls(plan), []
    execute(plan, sink, digests=digests, progress=told.append)
    assert sum(told) == sum(map(len, sink.data))
    found = parts_of(plan, sink)
    for rank, device, how in layout.ranks_of("w"):
        part = array[shard_region("w", how, array.shape, device).slices()]
        assert np.array_equal(found[f"rank_{rank}/f", "w"], part)
    assert all((times == 1).all() for times in sink.times)
    digest = [xxhash.xxh3_128_hexdigest(data) if digests else None for data in sink.data]
    assert [sink.digests[number] for number in range(len(digest))] == digest
    row_bytes = max(output.spec.num_bytes for output in plan.outputs) // (5 if axis == 1 else 60)
    assert max(end - first for first, end, _ in sink.puts) <= max(block_bytes, row_bytes)


def test_a_changed_source_tensor_is_found_on_the_way(tmp_path: Path) -> None:
    array = np.arange(5 * 12, dtype=np.uint16).reshape(5, 12)
    plan, _ = stored(array, 1, 2, 1, tmp_path)
    infos = {name: source for o in plan.outputs for name, source in o.inputs.items()}
    halves = {i.name: np.ascontiguousarray(h) for i, h in zip(infos.values(), np.split(array, 2, 1), strict=True)}
    promised = {name: xxhash.xxh3_128_hexdigest(half) for name, half in halves.items()}
    assert execute(plan, MemorySink(plan), source_digests=promised).compared == promised.keys()
    (first, *_) = infos
    with pytest.raises(CorruptError, match="not what its manifest promises"):
        execute(plan, MemorySink(plan), source_digests={**promised, first: "0" * 32})


def test_many_ranks_take_no_more_memory_than_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A band has fewer rows, or each rank less of them."""
    taken: list[int] = []
    original = np.empty

    def counted(shape: Any, dtype: Any) -> Array:
        made = original(shape, dtype)
        taken.append(made.nbytes)
        return made

    array = np.zeros((400, 12 * 128), np.uint16)
    totals = []
    for after in (2, 8, 128):
        plan, _ = stored(array, 1, 1, after, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", counted)
            taken.clear()
            execute(plan, MemorySink(plan), workers=1)
        totals.append(sum(taken))
    assert 0 < max(totals) <= columns_module.BAND_BYTES + jobs_module.BLOCK_BYTES, totals


def test_a_run_that_is_stopped_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "BLOCK_BYTES", 32)
    plan, _ = stored(np.zeros((50, 12), np.uint16), 1, 1, 2, tmp_path)

    class Full(MemorySink):
        def put(self, output: int, offset: int, data: memoryview) -> None:
            if offset > 100:
                raise OSError("full")
            super().put(output, offset, data)

    sink = Full(plan)
    with pytest.raises(OSError, match="full"):
        execute(plan, sink)
    assert sink.digests == {} and any((times == 0).any() for times in sink.times)


def test_outputs_of_finished_files_are_not_written_again(tmp_path: Path) -> None:
    plan, _ = stored(np.zeros((50, 12), np.uint16), 1, 1, 2, tmp_path)
    sink, told = MemorySink(plan), 0

    def progress(count: int) -> None:
        nonlocal told
        told += count

    execute(plan, sink, skip_files={plan.outputs[0].file}, progress=progress)
    assert (sink.times[0] == 0).all() and (sink.times[1] == 1).all()
    assert told == len(sink.data[1]) and list(sink.digests) == [1]


def blocks_of(plan: Plan, **options: Any) -> Sequence[tuple[int, int, Extent]]:
    sink = Calls(plan)
    execute(plan, sink, **options)
    return sink.puts


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("how", ["copied", "made in tiles"])
def test_other_outputs_come_in_aligned_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, dtype: str
) -> None:
    monkeypatch.setattr(jobs_module, "BLOCK_BYTES", 256)
    plan, _ = stored(np.ones((40, 24), np.uint16), 0, 1, 2, tmp_path)
    if how == "made in tiles":
        turned = node(Transpose((1, 0)), [plan.outputs[0].expr])
        plan = replace(plan, outputs=tuple(replace(o, expr=turned, region=None) for o in plan.outputs[:1]))
    spec = replace(plan.outputs[0].spec, dtype=dtype, shape=plan.outputs[0].box.shape)
    where = Extent(12, spec.num_bytes)
    file = replace(plan.files[0], extents={"w": (where,)})
    plan = replace(plan, outputs=(replace(plan.outputs[0], spec=spec, file=0),), files=(file,))
    puts = blocks_of(plan)
    assert len(puts) >= 4 and sum(end - first for first, end, _ in puts) == where.size
    assert all(end % 256 == 0 or end == where.offset + where.size for _, end, _ in puts)
