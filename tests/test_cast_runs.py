"""The contract of `--dtype`: what is cast is cast once and counted; what does not fit leaves nothing behind.

All else is bit for bit what it was.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from test_execute import MemorySink, whole
from tiny_models import TinyModel, make_hf_plain, tensors_of

from ckptkit import open_checkpoint
from ckptkit.cast import Caster
from ckptkit.cli import run as run_command
from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.execute import execute
from ckptkit.formats.io import read_region
from ckptkit.formats.result_folder import ResultFolder
from ckptkit.mapping.expr import Expr, Leaf, invert, node
from ckptkit.mapping.groups import Interleave
from ckptkit.plan import jobs as jobs_module
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.report import Report
from ckptkit.types import DTYPES, Extent, TensorInfo, TensorSpec, item_bytes

Array = np.ndarray[Any, Any]
Tensors = dict[str, tuple[str, Array]]  # name -> dtype, carriers
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"


def write_mixed(file: Path, tensors: Tensors) -> None:
    header, offset = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for _, a in tensors.values()))


def model(folder: Path, *, dtype: str = "BF16", **values: Any) -> tuple[Path, Tensors]:
    """Write a tiny llama; `values` are (dtype, values) put over single tensors, by the last words of their names."""
    make_hf_plain(folder, dtype=dtype)
    tensors: Tensors = {name: (dtype, array) for name, array in tensors_of(TinyModel(dtype=dtype)).items()}
    for ending, replacement in values.items():
        for name in [n for n in tensors if n.replace(".", "_").endswith(ending)]:
            tensors[name] = replacement(*tensors[name])
    write_mixed(folder / "model.safetensors", tensors)
    return folder, tensors


def as_dtype(target: str) -> Any:
    return lambda dtype, array: (target, Caster(dtype, target)(array).copy())


def with_first(*numbers: float) -> Any:
    """Put numbers first in a BF16 tensor."""

    def change(dtype: str, array: Array) -> tuple[str, Array]:
        array = array.copy()
        array.reshape(-1)[: len(numbers)] = Caster("F32", dtype)(np.array(numbers, np.float32).view(np.uint32))
        return dtype, array

    return change


def contents(folder: Path) -> dict[str, tuple[str, bytes]]:
    tensors = open_checkpoint(folder).tensors
    return {name: (info.dtype, read_region(info).tobytes()) for name, info in tensors.items()}


def wanted(tensors: Tensors, dtype: str) -> dict[str, tuple[str, bytes]]:
    return {
        name: (dtype, (array if old == dtype else Caster(old, dtype)(array)).tobytes())
        for name, (old, array) in tensors.items()
    }


def rows(report: Report, label: str) -> list[str]:
    return [text for name, text in report.rows if name == label]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


# --- the engine -----------------------------------------------------------------------------------------------------


def make_plan(
    folder: Path, tensors: Tensors, exprs: list[tuple[str, str, Expr]], *, clamp: bool = False, piece: int = 51
) -> Plan:
    """Store tensors in pieces of `piece` bytes, and plan outputs (name, dtype, expression) of them."""
    infos, data = {}, bytearray(b"head")
    for name, (dtype, array) in tensors.items():
        raw, extents = array.tobytes(), []
        for start in range(0, len(raw), piece):
            extents.append(Extent(len(data), len(raw[start : start + piece])))
            data += raw[start : start + piece] + b"gap"
        infos[name] = TensorInfo(name, array.shape, dtype, folder / "source", tuple(extents))
    (folder / "source").write_bytes(data)
    outputs = tuple(
        OutputTensor(TensorSpec(name, expr.shape, dtype), number % 2, expr, infos)
        for number, (name, dtype, expr) in enumerate(exprs)
    )
    return Plan(outputs, (), {}, (), (), (), (), (), {}, clamp=clamp)


def random_tensors(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> Tensors:
    rng = np.random.default_rng(0)
    return {
        name: (dtype, rng.integers(0, 1 << 8 * item_bytes(dtype), shape, DTYPES[dtype].carrier))
        for name, (dtype, shape) in shapes.items()
    }


@pytest.mark.parametrize("piece", [51, 72])  # an element may lie across two extents, or not
@pytest.mark.parametrize("tile_bytes", [24, 100, 1 << 20])
@pytest.mark.parametrize(("source", "target"), [("BF16", "F32"), ("F32", "BF16"), ("F64", "F16"), ("F16", "F32")])
def test_moved_and_fused_tensors_are_cast_and_counted_tile_by_tile(
    tmp_path: Path, source: str, target: str, tile_bytes: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "TILES_BYTES", 2 * tile_bytes)
    monkeypatch.setattr(jobs_module, "BLOCK_BYTES", 32)
    tensors = random_tensors({n: (source, (r, 6)) for n, r in (("q", 24), ("k", 8), ("v", 8), ("w", 17))})
    leaf = {name: Leaf(name, array.shape) for name, (_, array) in tensors.items()}
    fused = node(Interleave(0, (6, 2, 2)), [leaf["q"], leaf["k"], leaf["v"]])
    plan = make_plan(tmp_path, tensors, [("qkv", target, fused), ("w", target, leaf["w"])], clamp=True, piece=piece)
    sink = MemorySink(plan)
    counts = execute(plan, sink).counts
    arrays = {name: array for name, (_, array) in tensors.items()}
    for number, output in enumerate(plan.outputs):
        moved = np.frombuffer(whole(output.expr, arrays), DTYPES[source].carrier)
        caster = Caster(source, target, clamp=True)
        assert bytes(sink.data[number]) == caster(moved).tobytes()
        assert sink.digests[number] in (None, xxhash.xxh3_128_hexdigest(sink.data[number]))
        assert counts[output.spec.name] == caster.count


@pytest.mark.parametrize("target", ["F32", "BF16", "F16"])
def test_parts_of_different_dtypes_become_one_tensor(tmp_path: Path, target: str) -> None:
    shapes = {"q": ("F64", (24, 6)), "k": ("F16", (8, 6)), "v": ("BF16", (8, 6)), "e": ("F32", (8, 6))}
    tensors = random_tensors(shapes)
    leaf = {name: Leaf(name, array.shape) for name, (_, array) in tensors.items()}
    fused = node(Interleave(0, (6, 2, 2, 2)), list(leaf.values()))
    plan = make_plan(tmp_path, tensors, [("qkve", target, fused)], clamp=True)
    sink = MemorySink(plan)
    counts = execute(plan, sink).counts
    each = {name: Caster(dtype, target, clamp=True) for name, (dtype, _) in tensors.items() if dtype != target}
    arrays = {name: each[name](array).copy() if name in each else array for name, (_, array) in tensors.items()}
    assert bytes(sink.data[0]) == whole(fused, arrays)
    assert counts["qkve"].flushed == sum(caster.count.flushed for caster in each.values())
    assert counts["qkve"].overflowed == sum(caster.count.overflowed for caster in each.values())


def overflowing(folder: Path) -> Plan:
    """Return a plan of four whole tensors and three parts of a fused one; 70000 is in `a`, `d` and the second part."""
    ones = np.full((40, 6), 0x3F80, np.uint16)
    big = ones.copy()
    big[33, 2:4] = 0x4789, 0xC790  # 70144, -73728
    fused = node(Interleave(0, (2, 2)), [Leaf("g", (8, 6)), Leaf("u", (8, 6))])
    parts = [(f"part {leaf.name}", "F16", part) for leaf, part in invert(fused, Leaf("gu", fused.shape))]
    stored = np.full(fused.shape, 0x3F80, np.uint16)
    stored[2, 5] = 0x4789  # interleaved by twos: the first row of `u`
    tensors: Tensors = {name: ("BF16", big if name in "ad" else ones) for name in "abcd"}
    whole_ones = [(name, "F16", Leaf(name, ones.shape)) for name in "abcd"]
    return make_plan(folder, tensors | {"gu": ("BF16", stored)}, [*whole_ones, *parts])


@pytest.mark.parametrize("workers", [1, 3])
def test_all_tensors_that_overflow_are_named_and_none_of_them_is_finished(tmp_path: Path, workers: int) -> None:
    plan = overflowing(tmp_path)
    sink = MemorySink(plan)
    with pytest.raises(CoverageError, match="3 tensors overflow float16") as caught:
        execute(plan, sink, workers=workers)
    assert caught.value.exit_code == 3
    assert [item.split("  ") for item in caught.value.items] == [
        ["a", "2 of 240 values, the largest 73728"],
        ["d", "2 of 240 values, the largest 73728"],
        ["gu -> part u", "1 of 48 values, the largest 70144"],
    ]
    names = {plan.outputs[number].spec.name for number in sink.digests}
    assert not names & {"a", "d", "part u"}


def test_files_that_are_done_are_counted_but_not_written_again(tmp_path: Path) -> None:
    tensors = random_tensors(dict.fromkeys("abcd", ("F32", (40, 6))))
    exprs = [(name, "F16", Leaf(name, (40, 6))) for name in "abcd"]
    plan = make_plan(tmp_path, tensors, exprs, clamp=True)
    told: list[int] = []
    first, second = MemorySink(plan), MemorySink(plan)
    counts = execute(plan, first).counts
    assert execute(plan, second, skip_files={1}, progress=told.append).counts == counts
    assert any(count.overflowed for count in counts.values())
    assert set(second.digests) == {0, 2}
    assert not any(times.any() for times in second.times[1::2])
    assert sum(told) == 2 * 40 * 6 * 2


def test_a_source_is_compared_with_its_promise_before_it_is_cast(tmp_path: Path) -> None:
    tensors = random_tensors({"a": ("BF16", (40, 6))})
    plan = make_plan(tmp_path, tensors, [("b", "F32", Leaf("a", (40, 6)))], piece=100)
    promised = xxhash.xxh3_128_hexdigest(tensors["a"][1].tobytes())
    execute(plan, MemorySink(plan), source_digests={"a": promised})
    with pytest.raises(CorruptError, match="not what its manifest promises"):
        execute(plan, MemorySink(plan), source_digests={"a": "0" * 32})


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"variant": "qkv_concat"}, {"format": "ckpt"}])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_way_through_float32_and_back_gives_the_same_bytes(
    tmp_path: Path, dtype: str, options: dict[str, str]
) -> None:
    source, tensors = model(tmp_path / "hf", dtype=dtype)
    report = convert(source, tmp_path / "ms", dtype="fp32", **options)
    assert {dtype for dtype, _ in contents(tmp_path / "ms").values()} == {"F32"}
    name = {"BF16": "bfloat16", "F16": "float16"}[dtype]
    assert rows(report, "note") == [f"config.json: torch_dtype {name} -> float32"]
    convert(tmp_path / "ms", tmp_path / "wide")
    assert contents(tmp_path / "wide") == wanted(tensors, "F32")
    back = convert(tmp_path / "ms", tmp_path / "back", dtype=name)
    assert contents(tmp_path / "back") == contents(source)
    assert back.data["cast"]["overflowed"] == back.data["cast"]["flushed"] == 0
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    check(tmp_path / "back")


def test_a_cast_is_said_in_the_report_its_json_and_the_manifest(tmp_path: Path) -> None:
    source, tensors = model(tmp_path / "hf", mlp_up_proj_weight=with_first(0.0, 1e-8, -1e-8, 1e-5))
    report = convert(source, tmp_path / "out", dtype="fp16")
    head, losses, *each = rows(report, "cast")
    assert head == f"bfloat16 -> float16: {len(tensors)} tensors"
    assert losses.startswith("values lost: 0 overflowed, ")
    assert "model.layers.0.feed_forward.w3.weight: 0 overflowed, 2 became zero" in each
    cast = json.loads(report.to_json())["cast"]
    assert cast["dtype"] == "F16" and cast["clamp"] is False and cast["overflowed"] == 0
    assert cast["pairs"] == [{"from": "BF16", "to": "F16", "tensors": len(tensors)}]
    assert cast["flushed"] == sum(row["flushed"] for row in cast["tensors"].values()) >= 4
    manifest = json.loads((tmp_path / "out" / "ckptkit.json").read_text())
    assert {key: manifest["cast"][key] for key in ("dtype", "flushed")} == {"dtype": "F16", "flushed": cast["flushed"]}
    assert {name: row["cast"] for name, row in manifest["tensors"].items()} == cast["tensors"]
    assert manifest["source"]["tensors"] == {}  # what was cast says nothing of the source's bytes


def test_without_a_dtype_nothing_is_said_of_casts(tmp_path: Path) -> None:
    source, _ = model(tmp_path / "hf")
    report = convert(source, tmp_path / "out")
    assert "cast" not in report.data and not rows(report, "cast")
    assert "cast" not in json.loads((tmp_path / "out" / "ckptkit.json").read_text())


@pytest.mark.parametrize("variant", ["", "qkv_concat"])
def test_an_overflow_is_refused_and_leaves_nothing(
    tmp_path: Path, variant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    over = with_first(70000.0, 1e-8)
    source, _ = model(tmp_path / "hf", layers_0_mlp_up_proj_weight=over, layers_1_mlp_down_proj_weight=over)
    args = ["convert", str(source), str(tmp_path / "out"), "--dtype", "float16", "--variant", variant]
    assert run_command(args if variant else args[:-2]) == 3
    said = capsys.readouterr().err
    assert "2 tensors overflow float16" in said and UP in said and DOWN in said and "--clamp" in said
    assert leftovers(tmp_path) == []


def test_a_refused_overwrite_keeps_the_old_result(tmp_path: Path) -> None:
    source, _ = model(tmp_path / "hf", layers_0_mlp_up_proj_weight=with_first(70000.0))
    convert(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(CoverageError, match="1 tensor overflows float16"):
        convert(source, tmp_path / "out", dtype="fp16", overwrite=True)
    assert contents(tmp_path / "out") == before
    assert leftovers(tmp_path) == ["out"]


def test_clamp_writes_the_largest_finite_value_and_counts(tmp_path: Path) -> None:
    source, _ = model(tmp_path / "hf", layers_0_mlp_up_proj_weight=with_first(70000.0, -1e30, float("inf"), 1e-8))
    report = convert(source, tmp_path / "out", to_dialect="hf", dtype="fp16", clamp=True)
    dtype, data = contents(tmp_path / "out")[UP]
    assert dtype == "F16"
    assert np.frombuffer(data, np.float16)[:3].tolist() == [65504.0, -65504.0, float("inf")]
    assert f"{UP}: 2 overflowed, 1 became zero" in rows(report, "cast")
    assert "2 overflowed and were clamped to 65504" in rows(report, "cast")[1]
    assert report.data["cast"]["tensors"][UP]["overflowed"] == report.data["cast"]["overflowed"] == 2


def test_inf_and_nan_that_were_there_pass(tmp_path: Path) -> None:
    source, _ = model(tmp_path / "hf", layers_0_mlp_up_proj_weight=with_first(float("inf"), float("nan")))
    report = convert(source, tmp_path / "out", to_dialect="hf", dtype="fp16")
    values = np.frombuffer(contents(tmp_path / "out")[UP][1], np.float16)
    assert values[0] == np.inf and np.isnan(values[1])
    assert report.data["cast"]["overflowed"] == 0


def test_four_dtypes_in_one_file_become_one(tmp_path: Path) -> None:
    source, tensors = model(
        tmp_path / "hf", dtype="F32", q_proj_weight=as_dtype("F64"), norm_weight=as_dtype("BF16"),
        gate_proj_weight=as_dtype("F16"),
    )  # fmt: skip
    with pytest.raises(CoverageError, match="different dtypes") as caught:
        convert(source, tmp_path / "ms", variant="qkv_concat")
    assert "--dtype" in caught.value.hint
    report = convert(source, tmp_path / "ms", variant="qkv_concat", dtype="bf16")
    assert sorted(rows(report, "cast")[:3]) == [
        "float16 and float32 -> bfloat16: 2 tensors",
        "float32 -> bfloat16: 6 tensors",
        "float32 and float64 -> bfloat16: 2 tensors",
    ]
    convert(tmp_path / "ms", tmp_path / "back")
    assert contents(tmp_path / "back") == wanted(tensors, "BF16")


def test_a_dry_run_shows_dtypes_and_sizes(tmp_path: Path) -> None:
    source, tensors = model(tmp_path / "hf")
    report = convert(source, tmp_path / "out", dtype="fp32", dry_run=True)
    size = sum(array.nbytes for _, array in tensors.values())
    assert report.data["summary"]["tensor_bytes"] == 2 * size
    assert report.data["summary"]["bytes_read"] == size
    assert report.data["summary"]["read_amplification"] == 1.0
    assert all((o["from"], o["dtype"]) == ("BF16", "F32") for o in report.data["outputs"])
    assert report.data["cast"]["overflowed"] is None
    assert rows(report, "cast")[0] == f"bfloat16 -> float32: {len(tensors)} tensors"
    assert leftovers(tmp_path) == []


def test_a_cast_to_the_dtype_that_is_there_changes_no_byte(tmp_path: Path) -> None:
    source, _ = model(tmp_path / "hf")
    report = convert(source, tmp_path / "out", to_dialect="hf", dtype="bf16")
    assert contents(tmp_path / "out") == contents(source)
    assert rows(report, "cast") == ["none: no tensor that may be cast has another dtype than bfloat16"]
    assert rows(report, "note") == []


def test_fp8_is_not_cast_without_its_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = model(tmp_path / "hf", mlp_up_proj_weight=lambda _, array: ("F8_E4M3", array.astype(np.uint8)))
    assert run_command(["convert", str(source), str(tmp_path / "out"), "--dtype", "bf16"]) == 3
    said = capsys.readouterr().err
    assert "up_proj" in said and "scale" in said
    assert leftovers(tmp_path) == []


TABLE = """
family = "toy"
model_types = ["toy"]
dialect = "mine"

[dims]
experts = "experts"

[[tensor]]
hf = "gate.weight"
target = "router.weight"
shape = ["experts", 4]

[[tensor]]
hf = "gate.e_score_correction_bias"
target = "router.bias"
shape = ["experts"]
keep_fp32 = KEEP

[[tensor]]
hf = "gate.table"
target = "router.table"
shape = ["experts"]
"""


def router(folder: Path, keep: str) -> tuple[Path, Path]:
    """Write a router whose correction biases collapse to a few values as bfloat16, and the table of its family."""
    bias = (6.817 + np.arange(64) * 0.246 / 63).astype(np.float32)
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text('{"model_type": "toy", "experts": 64, "dtype": "float32"}')
    (folder / "toy.toml").write_text(TABLE.replace("KEEP", keep))
    tensors: Tensors = {
        "gate.weight": ("F32", np.ones((64, 4), np.float32).view(np.uint32)),
        "gate.e_score_correction_bias": ("F32", bias.view(np.uint32)),
        "gate.table": ("I32", np.arange(64, dtype=np.uint32)),
    }
    write_mixed(folder / "hf" / "model.safetensors", tensors)
    return folder / "hf", folder / "toy.toml"


def test_a_row_keeps_fp32_and_integers_keep_themselves(tmp_path: Path) -> None:
    source, table = router(tmp_path, "true")
    report = convert(source, tmp_path / "out", table=[table], to_dialect="mine", dtype="bf16")
    before, after = contents(source), contents(tmp_path / "out")
    assert after["router.bias"] == before["gate.e_score_correction_bias"]
    assert after["router.table"] == before["gate.table"]
    assert after["router.weight"][0] == "BF16"
    assert rows(report, "kept") == ["router.bias: its row says `keep_fp32`", "router.table: int32 is never cast"]
    assert len(report.data["cast"]["kept"]) == 2
    assert rows(report, "note") == ["config.json: dtype float32 -> bfloat16"]


def test_without_that_row_the_bias_would_collapse(tmp_path: Path) -> None:
    source, table = router(tmp_path, "false")
    convert(source, tmp_path / "out", table=[table], to_dialect="mine", dtype="bf16")
    dtype, data = contents(tmp_path / "out")["router.bias"]
    assert dtype == "BF16"
    assert len(set(np.frombuffer(data, np.uint16).tolist())) < 12


def test_keep_fp32_is_true_or_false(tmp_path: Path) -> None:
    source, table = router(tmp_path, '"yes"')
    with pytest.raises(UsageError, match="`keep_fp32` must be true or false"):
        convert(source, tmp_path / "out", table=[table])


@pytest.mark.parametrize(
    ("options", "said"), [(["--clamp"], "without `--dtype`"), (["--dtype", "int8"], "no dtype to cast to")]
)
def test_mistaken_options_are_refused(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = model(tmp_path / "hf")
    assert run_command(["convert", str(source), str(tmp_path / "out"), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_result_that_only_lacked_its_name_reports_its_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = model(tmp_path / "hf", mlp_up_proj_weight=with_first(1e-8))
    rename = ResultFolder._rename

    def stopped(self: ResultFolder) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ResultFolder, "_rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", dtype="fp16")
    monkeypatch.setattr(ResultFolder, "_rename", rename)
    again = convert(source, tmp_path / "out", dtype="fp16")
    fresh = convert(source, tmp_path / "other", dtype="fp16")
    assert again.data["cast"] == fresh.data["cast"]
    assert again.data["cast"]["flushed"] >= 2
