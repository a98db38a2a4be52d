"""The plan: it is proved before it is used, its digest names all that decides the result, and it is small.

The plans of the first tests are made by hand, each broken in one way; those of the others are built from tiny models
on disk. What executing a plan gives is tested in `test_execute.py`.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CoverageError, InternalError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.model_config import read_config
from ckptkit.formats.registry import lay_out_checkpoint, open_checkpoint
from ckptkit.mapping.expr import Expr, Leaf, leaves, node
from ckptkit.mapping.ops import Concat, Slice
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables
from ckptkit.plan import prove as proving
from ckptkit.plan.build import Target, build_plan
from ckptkit.plan.plan import BYTES_PER_SLICE, Fate, OutputTensor, Plan
from ckptkit.types import Extent, TensorInfo, TensorSpec
from tests.tiny_models import TinyModel, make_hf_plain, shapes_of

TABLES = load_tables()
LEGACY = "mindformers-legacy"
SHARD = 5 * 10**9


# ---- plans made by hand -------------------------------------------------------------------------------------------

A, B, C = Leaf("a", (2, 3)), Leaf("b", (4, 3)), Leaf("c", (5,))
JOINED = node(Concat(0), [A, B])


def stored(*tensors: Leaf, file: str = "x.safetensors") -> Checkpoint:
    infos, offset = {}, 8
    for leaf in tensors:
        info = TensorInfo(leaf.name, leaf.shape, "F32", Path(file), ())
        infos[leaf.name] = replace(info, extents=(Extent(offset, info.num_bytes),))
        offset += info.num_bytes
    return Checkpoint(Path(file), Path(), "safetensors", (Path(file),), infos)


SOURCE = stored(A, B, C)


def output(name: str, expr: Expr, source: Checkpoint = SOURCE) -> OutputTensor:
    inputs = {leaf.name: source.tensors[leaf.name] for leaf in leaves(expr)}
    return OutputTensor(TensorSpec(name, expr.shape, "F32"), 0, expr, inputs)


def plan_of(*outputs: OutputTensor, **fates: Sequence[Fate]) -> Plan:
    kinds = {key: tuple(fates.get(key, ())) for key in ("ignored", "dropped", "unmapped")}
    return Plan(outputs, (), {}, (), notes=(), facts={}, **kinds)


def prove(plan: Plan, source: Checkpoint) -> None:
    """Prove a plan whose outputs are whole."""
    proving.prove(plan.outputs, plan, source)


@pytest.mark.parametrize("fate", ["ignored", "dropped", "unmapped"])
def test_a_plan_that_uses_or_names_every_tensor_once_is_proved(fate: str) -> None:
    prove(plan_of(output("ab", JOINED), output("c", C)), SOURCE)
    prove(plan_of(output("ab", JOINED), **{fate: [Fate("c", "a reason")]}), SOURCE)


def test_a_tensor_may_be_used_in_parts_as_long_as_these_are_all_of_it() -> None:
    parts = [output(f"b{start}", node(Slice(0, start, start + 2), [B])) for start in (0, 2)]
    prove(plan_of(output("a", A), *parts, output("c", C)), SOURCE)
    with pytest.raises(CoverageError, match="1 tensor of the source would not be used exactly once") as caught:
        prove(plan_of(output("a", A), parts[0], output("c", C)), SOURCE)
    assert caught.value.items == ("b: 6 of 12 elements used",)


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (output("a", A), "a: 12 of 6 elements used"),
        (output("aa", node(Concat(0), [A, Leaf("a", (2, 3))])), "a: 18 of 6 elements used"),
    ],
)
def test_a_tensor_used_twice_is_refused(again: OutputTensor, said: str) -> None:
    with pytest.raises(CoverageError, match="would not be used exactly once") as caught:
        prove(plan_of(output("ab", JOINED), again, output("c", C)), SOURCE)
    assert caught.value.items == (said,)


def test_a_tensor_left_out_without_a_reason_is_refused() -> None:
    with pytest.raises(InternalError, match="1 source tensors have neither a use nor a fate") as caught:
        prove(plan_of(output("ab", JOINED)), SOURCE)
    assert caught.value.items == ("c",)


@pytest.mark.parametrize("shape", [(7, 3), (5, 3), (6, 3, 1, 2)])
def test_an_output_that_its_sources_do_not_fill_is_refused(shape: tuple[int, ...]) -> None:
    partly = replace(output("ab", JOINED), spec=TensorSpec("ab", shape, "F32"))
    with pytest.raises(InternalError, match="`ab` would not be filled exactly by its sources"):
        prove(plan_of(partly, output("c", C)), SOURCE)


def test_a_tensor_that_is_stored_in_another_shape_than_planned_is_refused() -> None:
    turned = output("ab", JOINED)
    inputs = {**turned.inputs, "b": replace(SOURCE.tensors["b"], shape=(3, 4))}
    with pytest.raises(InternalError, match=r"`b` is stored as \(3, 4\) but planned as \(4, 3\)"):
        prove(plan_of(replace(turned, inputs=inputs), output("c", C)), SOURCE)
    alone = replace(output("c", C), inputs={"c": replace(SOURCE.tensors["c"], shape=(1, *C.shape))})
    with pytest.raises(InternalError, match="`c` is stored as"):
        prove(plan_of(output("ab", JOINED), alone), SOURCE)


def test_a_tensor_both_used_and_passed_over_is_refused() -> None:
    with pytest.raises(InternalError, match="both used and passed over") as caught:
        prove(plan_of(output("ab", JOINED), output("c", C), ignored=[Fate("a", "a buffer")]), SOURCE)
    assert caught.value.items == ("a",)


def test_two_outputs_of_one_name_are_refused() -> None:
    with pytest.raises(InternalError, match="1 output names are planned twice") as caught:
        prove(plan_of(output("x", A), output("x", B), output("c", C)), SOURCE)
    assert caught.value.items == ("x",)


def test_a_tensor_read_under_its_twins_name_is_used_but_one_at_the_same_place_in_another_file_is_not() -> None:
    head = replace(SOURCE.tensors["c"], name="head")
    source = replace(SOURCE, tensors={"a": SOURCE.tensors["a"], "head": head})
    twin = OutputTensor(TensorSpec("c", (5,), "F32"), 0, C, {"c": head})
    prove(plan_of(output("a", A), twin), source)
    elsewhere = replace(head, name="other", file=Path("y.safetensors"))
    with pytest.raises(InternalError, match="neither a use nor a fate") as caught:
        prove(plan_of(output("a", A), twin), replace(source, tensors={**source.tensors, "other": elsewhere}))
    assert caught.value.items == ("other",)


# ---- plans of tiny models -----------------------------------------------------------------------------------------


def planned(folder: Path, dialect: str = LEGACY, variant: str = "", **changed: Any) -> Plan:
    """Return the plan of a HuggingFace folder into a dialect; `changed` are fields of `Target`, or config.json's."""
    kind = "hf" if dialect == "hf" else "mindspore-safetensors"
    fields = {"kind": kind, "max_shard_bytes": SHARD, **{k: v for k, v in changed.items() if k in Target.__slots__}}
    config = {**read_config(folder / "config.json"), **{k: v for k, v in changed.items() if k not in Target.__slots__}}
    family = TABLES.for_config(config)
    return build_plan(
        open_checkpoint(folder),
        resolve(family, config, "hf"),
        resolve(family, config, dialect, variant),
        Target(**fields),
        config=config,
        side=[(folder / name, name) for name in ("config.json", "generation_config.json")],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_hf_plain(tmp_path / "hf", shards=2)


def test_the_figures_are_those_of_the_model(folder: Path) -> None:
    model = TinyModel()
    shapes = shapes_of(model)
    total = sum(4 * prod(shape) for shape in shapes.values())
    plan, fused = planned(folder), planned(folder, variant="qkv_concat")
    for found in (plan, fused):
        assert found.num_slices == len(shapes)
        assert found.tensor_bytes == found.source_bytes == found.bytes_read == total
        assert found.read_amplification == 1.0
        assert found.peak_memory_bytes == (64 << 20) + BYTES_PER_SLICE * len(shapes)
    assert len(plan.outputs) == len(shapes)
    assert len(fused.outputs) < len(shapes)
    assert fused.summary()["tensors"] == len(fused.outputs)
    side = sum((folder / name).stat().st_size for name in ("config.json", "generation_config.json"))
    assert plan.bytes_written == sum(f.size for f in plan.files) + sum(map(len, plan.extra.values())) + side


def test_outputs_lie_in_the_files_that_they_name(folder: Path) -> None:
    plan = planned(folder, max_shard_bytes=9000)
    assert len(plan.files) > 2
    assert [output.file for output in plan.outputs] == sorted(output.file for output in plan.outputs)
    for made in plan.outputs:
        assert sum(extent.size for extent in plan.files[made.file].extents[made.spec.name]) == made.spec.num_bytes
    assert sum(len(file.extents) for file in plan.files) == len(plan.outputs)


def test_a_tied_head_that_is_stored_is_dropped_for_its_reason_and_counted_as_read(tmp_path: Path) -> None:
    folder = make_hf_plain(tmp_path / "hf")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    tensors = open_checkpoint(folder).tensors
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    begin, end = (embedding.extents[0].offset, sum(embedding.extents[0]))
    data[head.extents[0].offset : sum(head.extents[0])] = data[begin:end]
    path.write_bytes(data)
    plan = planned(folder, tie_word_embeddings=True)
    assert plan.dropped == (Fate("lm_head.weight", "bit-equal to its tied twin `model.embed_tokens.weight`"),)
    assert plan.bytes_read == plan.source_bytes + 2 * embedding.num_bytes
    assert plan.read_amplification > 1
    untied = planned(make_hf_plain(tmp_path / "other"), tie_word_embeddings=True)
    assert untied.dropped == ()
    assert b'"tie_word_embeddings": false' in untied.extra["config.json"]


def test_a_model_that_lacks_a_tensor_or_has_one_too_many_is_not_planned(folder: Path) -> None:
    with pytest.raises(CoverageError, match="9 tensors are missing"):
        planned(folder, num_hidden_layers=3)
    with pytest.raises(CoverageError, match="9 tensors of `hf` match no row"):
        planned(folder, num_hidden_layers=1)
    plan = planned(folder, num_hidden_layers=1, allow_unmapped=True)
    assert len(plan.unmapped) == 9
    with pytest.raises(CoverageError, match="another shape than config.json") as caught:
        planned(folder, vocab_size=66)
    assert len(caught.value.items) == 2


def test_sides_that_disagree_on_a_shape_are_refused(folder: Path) -> None:
    config = read_config(folder / "config.json")
    family = TABLES.for_config(config)
    other = resolve(family, {**config, "intermediate_size": 41}, LEGACY)
    with pytest.raises(CoverageError, match=r"has shape \(41, 32\) on one side and \(40, 32\) on the other"):
        build_plan(
            open_checkpoint(folder), resolve(family, config, "hf"), other,
            Target("mindspore-safetensors", SHARD), config=config,
        )  # fmt: skip


# ---- the digest ---------------------------------------------------------------------------------------------------


def touch(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def lengthen(folder: Path) -> None:
    """Make a source file eight bytes longer, by padding of its header, at the same time of change."""
    path = folder / "model-00002-of-00002.safetensors"
    data, stat = path.read_bytes(), path.stat()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes((size + 8).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 8 + data[8 + size :])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def edit_side_file(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(path.read_text().replace("1", "3", 1))


@pytest.mark.parametrize("change", [touch, lengthen, edit_side_file])
def test_the_digest_changes_with_a_file_that_is_read(folder: Path, change: Callable[[Path], None]) -> None:
    before = planned(folder).digest()
    change(folder)
    assert planned(folder).digest() != before


@pytest.mark.parametrize(
    "change",
    [
        {"variant": "qkv_concat"},
        {"dialect": "hf"},
        {"kind": "ckpt"},
        {"max_shard_bytes": 9000},
        {"dtype": "BF16"},
        {"dtype": "F16"},
        {"dtype": "F16", "clamp": True},
        {"tie_word_embeddings": True},
    ],
)
def test_the_digest_changes_with_what_is_asked_for(folder: Path, change: Mapping[str, Any]) -> None:
    plain = {key: value for key, value in change.items() if key != "clamp"}
    others = {planned(folder).digest()} | ({planned(folder, **plain).digest()} if "clamp" in change else set())
    assert planned(folder, **change).digest() not in others


def test_the_digest_changes_with_nothing_else(folder: Path) -> None:
    plan = planned(folder)
    assert planned(folder).digest() == plan.digest()
    assert replace(plan, notes=("a note",)).digest() == plan.digest()
    moved = folder.rename(folder.with_name("moved"))
    assert planned(moved).digest() == plan.digest()


def test_the_digest_is_that_of_the_time_when_it_was_first_asked_for(folder: Path) -> None:
    plan = planned(folder)
    first = plan.digest()
    touch(folder)
    assert plan.digest() == first
    assert planned(folder).digest() != first


def test_names_that_look_like_the_text_between_them_have_their_own_digests() -> None:
    def digest(*names: str) -> str:
        source = stored(*(Leaf(name, (1,)) for name in names))
        outputs = tuple(output(name, Leaf(name, (1,)), source) for name in names)
        files = tuple(lay_out_checkpoint("hf", [o.spec for o in outputs], max_shard_bytes=SHARD)[0])
        return replace(plan_of(*outputs), files=files).digest()

    names = [("a", "b"), ("b", "a"), ('a", [1], "F32", "a"]\n["', "b"), ("a\nb",), ("a\\nb",), ("a",)]
    assert len({digest(*some) for some in names}) == len(names)


# ---- memory -------------------------------------------------------------------------------------------------------

QWEN3_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip


@pytest.mark.parametrize(("source", "target"), [("hf", "mindformers-mcore"), ("mindformers-mcore", "hf")])
def test_planning_takes_less_than_4_kb_a_slice(tmp_path: Path, source: str, target: str) -> None:
    """Qwen3-235B-A22B with 6 of its 94 layers, in sparse files: opened, resolved, planned, proved and digested."""
    config = {**QWEN3_235B, "num_hidden_layers": 6}
    family = TABLES.family("qwen3_moe")
    specs = [TensorSpec(rule.target, rule.expr.shape, "BF16") for rule in resolve(family, config, source).rules]
    kinds = {"hf": "hf", "mindformers-mcore": "mindspore-safetensors"}
    files, small = lay_out_checkpoint(kinds[source], specs, max_shard_bytes=SHARD)
    for file in files:
        with (tmp_path / file.name).open("wb") as handle:
            handle.write(file.fixed[0][1])
            handle.truncate(file.size)
    for name, data in small.items():
        (tmp_path / name).write_bytes(data)
    del specs, files, small
    tracemalloc.start()
    try:
        plan = build_plan(
            open_checkpoint(tmp_path), resolve(family, config, source), resolve(family, config, target),
            Target(kinds[target], SHARD), config=config,
        )  # fmt: skip
        plan.digest()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.num_slices == 3 + 6 * (9 + 3 * 128)
    assert kept < peak < BYTES_PER_SLICE * plan.num_slices


def test_a_lost_tensor_of_a_joined_source_is_noticed() -> None:
    """Joined tensors have no bytes of their own, so nothing but their names tells them apart."""
    joined = {leaf.name: TensorInfo(leaf.name, leaf.shape, "F32", Path("rank_0"), ()) for leaf in (A, B)}
    source = replace(SOURCE, tensors=joined)
    with pytest.raises(InternalError, match="neither a use nor a fate"):
        prove(plan_of(output("a", A, source)), source)
    prove(plan_of(output("a", A, source), output("b", B, source)), source)
