"""From degrees to a layout: the parts of every tensor tile it, no unit is cut, and MindFormers' nets are cut so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CkptkitError, CoverageError, UsageError
from ckptkit.layout.degrees import Cuts, Degrees, as_legacy_net, lay_out, offset_lines, smallest_dp, split_layers
from ckptkit.layout.layout import Layout
from ckptkit.layout.slices import num_opt_shards, num_parts, shard_region
from ckptkit.layout.stages import chunk_layers, chunks_of_offset, offset_of
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables
from ckptkit.types import Region, TensorLayout

NETS = json.loads((Path(__file__).parent / "mindformers_layouts.json").read_text())["cases"]
TABLES = load_tables()


def plain(name: str, *shape: int, **said: Any) -> Cuts:
    return Cuts(name, shape, 4, **{"layer": None, "stage": "all", **said})


def one(degrees: Degrees, cuts: Cuts, *others: Cuts) -> tuple[TensorLayout, list[str]]:
    """Return the layout of one tensor of a model without layers, and the notes."""
    layout, notes = lay_out(degrees, [cuts, *others], 0)
    return layout.stages[0].tensors[cuts.name], notes


def regions(layout: TensorLayout, cuts: Cuts) -> list[Region]:
    """Return the part of each device of a stage."""
    return [shard_region(cuts.name, layout, cuts.shape, d) for d in range(int(np.prod(layout.dev_matrix)))]


def rows(layout: TensorLayout, cuts: Cuts) -> list[tuple[int, int]]:
    return [(region.start[0], region.stop[0]) for region in regions(layout, cuts)]


# Layers.


def test_every_split_is_contiguous_complete_and_disjoint() -> None:
    for layers in range(1, 41):
        for pp in range(1, layers + 1):
            stages = split_layers(layers, Degrees(pp=pp))
            sizes = [stages.count(stage) for stage in range(pp)]
            assert stages == tuple(sorted(stages))
            assert len(stages) == layers
            assert set(stages) == set(range(pp))
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) - min(sizes) <= 1


def test_a_remainder_goes_to_the_first_stages_and_is_said_with_its_offset() -> None:
    assert split_layers(7, Degrees(pp=3)) == (0, 0, 0, 1, 1, 2, 2)
    assert offset_lines(7, Degrees(pp=3)) == ["offset: [1, 0, 0]"]
    assert offset_lines(6, Degrees(pp=3)) == []
    _, notes = lay_out(Degrees(pp=3), [], 7)
    assert notes[0] == "layers per stage: 3, 2, 2; MindFormers needs `offset: [1, 0, 0]` for it"


@pytest.mark.parametrize(
    ("layers", "said", "message"),
    [
        (2, {"pp": 3}, "2 layers cannot be spread over 3 stages"),
        (3, {"pp": 2, "pp_interleave": 2}, "3 layers cannot be spread over 2 stages of 2 chunks"),
        (7, {"pp": 3, "pp_layers": (3, 3, 2)}, "layers 3,3,2 add up to 8, and the model has 7"),
        (7, {"pp": 3, "pp_layers": (3, 4)}, "layers 3,4 are 2 numbers for 3 stages"),
        (7, {"pp": 3, "pp_layers": (4, 0, 3)}, "layers 4,0,3 leave a stage without any"),
        (7, {"pp": 3, "pp_layers": (9, -1, -1)}, "layers 9,-1,-1 leave a stage without any"),
    ],
)
def test_layers_that_do_not_add_up_are_refused(layers: int, said: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_layers(layers, Degrees(**said))
    assert message in caught.value.what


def test_given_layers_are_taken_and_the_ends_may_be_empty() -> None:
    assert split_layers(7, Degrees(pp=3, pp_layers=(2, 2, 3))) == (0, 0, 1, 1, 2, 2, 2)
    assert split_layers(7, Degrees(pp=3, pp_layers=(0, 7, 0))) == (1,) * 7
    assert offset_lines(7, Degrees(pp=3, pp_layers=(0, 7, 0))) == ["offset: [-2, 5, -2]"]


def test_with_interleave_a_stage_has_a_chunk_of_each_round() -> None:
    assert split_layers(8, Degrees(pp=2, pp_interleave=2)) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert split_layers(5, Degrees(pp=2, pp_interleave=2)) == (0, 0, 1, 0, 1)
    assert offset_lines(5, Degrees(pp=2, pp_interleave=2)) == ["offset: [[1, 0], [0, 0]]"]


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.data())
def test_offset_and_layers_are_each_others_inverse(layers: int, pp: int, interleave: int, data: st.DataObject) -> None:
    chunks = pp * interleave
    cuts = sorted(data.draw(st.lists(st.integers(0, layers), min_size=chunks - 1, max_size=chunks - 1)))
    given_layers = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    try:
        sizes = chunk_layers(layers, pp, interleave, given_layers)
    except UsageError:
        assert 0 in given_layers[1:-1]
        return
    assert sizes == given_layers
    if chunks > 1:
        assert chunks_of_offset(offset_of(sizes, pp), layers, pp, interleave) == sizes


def test_one_number_as_offset_fills_the_stages_as_mindformers_does() -> None:
    assert chunks_of_offset(1, 7, 3, 1) == (3, 3, 1)
    with pytest.raises(UsageError, match="leave a stage without any"):
        chunks_of_offset(3, 7, 4, 1)  # MindFormers would leave two stages empty


@pytest.mark.parametrize("offset", [2, [1, 1, 0], [0, 0, 0], [1, 0], [[1, 0, 0], [0, 0, 0]], [True, 0, 0], ["1", 0, 0]])
def test_an_offset_that_does_not_fit_is_refused(offset: Any) -> None:
    with pytest.raises(UsageError, match="`offset`"):
        chunks_of_offset(offset, 7, 3, 1)


LAYER_SETTING = """
import json, sys
from types import SimpleNamespace
import mindspore as ms
from mindformers.parallel_core.training_graph.transformer import utils
utils.LayerSetting._format_recompute_list = lambda *a: a
utils.LayerSetting._format_recompute_dict = lambda *a: {}
ms.set_auto_parallel_context(pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "1f1b"})
found = []
for layers, pp, interleave, offset in json.load(sys.stdin):
    recompute = SimpleNamespace(recompute=True, select_recompute=False, select_comm_recompute=False,
                                select_recompute_exclude=False, select_comm_recompute_exclude=False)
    config = SimpleNamespace(swap=SimpleNamespace(swap=False), recompute=recompute, pipeline_stage=pp,
                             gradient_aggregation_group=1)
    try:
        setting = utils.LayerSetting(layers, offset, config, interleave)
        found.append([int(stage) for stage in setting.pp_ids])
    except ValueError:
        found.append(None)
print("FOUND" + json.dumps(found))
"""


@pytest.mark.frameworks
@pytest.mark.timeout(300)
def test_mindformers_puts_the_layers_on_the_same_stages(tmp_path: Path) -> None:
    """Its own LayerSetting, given our offset, and given an offset by hand that we read."""
    splits = [(n, pp, v, None) for n in (4, 5, 7, 12, 30) for pp in (1, 2, 3, 4) for v in (1, 2) if pp * v <= n]
    splits += [(7, 3, 1, (2, 2, 3)), (7, 3, 1, (0, 7, 0)), (9, 2, 2, (1, 3, 4, 1)), (8, 2, 2, (0, 4, 4, 0))]
    ours = [split_layers(n, Degrees(pp=pp, pp_interleave=v, pp_layers=given)) for n, pp, v, given in splits]
    asked = [[n, pp, v, offset_of(chunk_layers(n, pp, v, given), pp)] for n, pp, v, given in splits]
    by_hand = [[7, 3, 1, 1], [7, 3, 1, [0, 0, 0]], [7, 3, 1, [0, 1, 0]], [8, 2, 2, [1, -1]], [5, 2, 2, [1, 0]]]
    done = subprocess.run(
        [sys.executable, "-c", LAYER_SETTING],
        input=json.dumps(asked + by_hand),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.split("FOUND")[1])
    assert [tuple(stages) for stages in theirs[: len(ours)]] == ours
    for (layers, pp, interleave, offset), stages in zip(by_hand, theirs[len(ours) :], strict=True):
        if stages is None:
            with pytest.raises(UsageError):
                chunks_of_offset(offset, layers, pp, interleave)
            continue
        chunks = chunks_of_offset(offset, layers, pp, interleave)
        assert split_layers(layers, Degrees(pp=pp, pp_interleave=interleave, pp_layers=chunks)) == tuple(stages)


# Where tensors lie.


def test_each_tensor_lies_on_its_stage_and_a_tied_copy_on_the_first_and_the_last() -> None:
    layers = [plain(f"layers.{i}.w", 8, layer=i, stage="layer") for i in range(5)]
    embedding = plain("embedding", 8, 2, stage="first", also_last=True)
    head, table = plain("norm", 8, stage="last"), plain("rope", 8)
    layout, _ = lay_out(Degrees(pp=4, dp=2), [embedding, *layers, head, table], 5)
    held = [sorted(stage.tensors) for stage in layout.stages]
    assert held == [
        ["embedding", "layers.0.w", "layers.1.w", "rope"],
        ["layers.2.w", "rope"],
        ["layers.3.w", "rope"],
        ["embedding", "layers.4.w", "norm", "rope"],
    ]
    assert [rank for rank, _, _ in layout.ranks_of("layers.2.w")] == [2, 3]
    alone, _ = lay_out(Degrees(), [embedding], 1)
    assert alone.stages_of["embedding"] == (0,)


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(CoverageError, match="`mtp` is of layer 2, and the model has layers 0 to 1"):
        lay_out(Degrees(), [plain("mtp", 8, layer=2, stage="layer")], 2)


def test_a_number_of_ranks_that_mindspore_refuses_is_said() -> None:
    assert lay_out(Degrees(tp=3, pp=2), [], 2)[1] == [
        "MindSpore itself runs on 1, 2, 4 or a multiple of 8 devices, and this layout has 6"
    ]
    assert lay_out(Degrees(tp=4, dp=3, pp=2), [], 2)[1] == []


@pytest.mark.parametrize("field", ["tp", "pp", "dp", "ep", "cp", "pp_interleave", "opt_shard_size"])
def test_a_degree_below_one_is_refused(field: str) -> None:
    with pytest.raises(UsageError, match=f"`{field}` is 0"):
        Degrees(**{field: 0})


@pytest.mark.parametrize("said", [{"dp": 65_537}, {"tp": 256, "pp": 257}, {"ep": 65_537}, {"cp": 10**9}], ids=str)
def test_more_ranks_than_any_run_has_are_refused(said: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="and at most 65536 are allowed"):
        Degrees(**said)
    assert Degrees(tp=256, pp=256).num_ranks == 65_536


# Tensor parallelism: units.


def test_fewer_kv_heads_than_tp_are_refused_or_replicated_on_request() -> None:
    wk = plain("layers.0.wk", 8, 6, tp_axis=0, tp_unit=4)
    wo = plain("layers.0.wo", 6, 32, tp_axis=1, tp_unit=4)
    with pytest.raises(CoverageError) as caught:
        one(Degrees(tp=4), wk, wo)
    assert "`layers.0.wk` has 2 heads or other units of 4 rows on axis 0, which tp 4 cannot share" in caught.value.what
    assert "`--replicate-kv`" in caught.value.hint
    layout, notes = one(Degrees(tp=4, dp=2, replicate_kv=True), wk, wo)
    assert layout == TensorLayout((2, 2, 2), ((1,), ()))
    assert rows(layout, wk) == [(0, 4), (0, 4), (4, 8), (4, 8)] * 2
    assert "1 tensor with each of their 2 KV heads on 2 neighbouring devices" in notes[0]
    with pytest.raises(CoverageError) as caught:
        one(Degrees(tp=3, replicate_kv=True), wk)
    assert "2 heads" in caught.value.what and "tp 3" in caught.value.what
    assert "--replicate-kv" not in caught.value.hint


def test_kv_groups_with_query_heads_in_them_are_not_replicated() -> None:
    fused = plain("layers.0.w_qkv", 48, 6, tp_axis=0, tp_unit=24)  # 2 groups of 4 query heads, a key and a value head
    wo = plain("layers.0.wo", 6, 32, tp_axis=1, tp_unit=4)
    with pytest.raises(CoverageError) as caught:
        one(Degrees(tp=4, replicate_kv=True), fused, wo)
    assert "each of its 2 KV groups holds query heads too" in caught.value.why
    assert "--replicate-kv" not in caught.value.hint


def test_single_rows_are_not_taken_for_kv_heads() -> None:
    with pytest.raises(CoverageError, match="has 2 rows on axis 0, which tp 4 cannot share equally"):
        one(Degrees(tp=4, replicate_kv=True), plain("w1", 2, 6, tp_axis=0))


def test_a_vocabulary_that_tp_does_not_divide_stays_whole_and_is_noted() -> None:
    cuts = plain("embedding", 63, 4, tp_axis=0, tp_indivisible="replicate", stage="first")
    layout, notes = one(Degrees(tp=2), cuts)
    assert rows(layout, cuts) == [(0, 63)] * 2
    assert notes == ["1 tensor whole on every device, as 2 does not divide their 63 rows: `embedding`"]
    with pytest.raises(CoverageError, match="63 rows"):
        one(Degrees(tp=2), replace(cuts, tp_indivisible="refuse"))


def test_an_embedding_stays_whole_on_request() -> None:
    cuts = plain("embedding", 64, 4, tp_axis=0, tp_unless="vocab_emb_dp")
    assert num_parts(one(Degrees(tp=2), cuts)[0]) == (2, 1)
    layout, notes = one(Degrees(tp=2, shard_embedding=False), cuts)
    assert num_parts(layout) == (1, 1)
    assert "as `vocab_emb_dp` asks for: `embedding`" in notes[0]
    with pytest.raises(UsageError, match="unless `other`"):
        one(Degrees(tp=2), replace(cuts, tp_unless="other"))


def test_notes_name_three_tensors_and_count_the_rest() -> None:
    cuts = [plain(f"t{i}", 3, tp_axis=0, tp_indivisible="replicate") for i in range(5)]
    _, notes = lay_out(Degrees(tp=2), cuts, 0)
    assert notes == ["5 tensors whole on every device, as 2 does not divide their 3 rows: `t0`, `t1`, `t2` and 2 more"]


# Experts.


@pytest.mark.parametrize("tp_axis", [None, 2])
def test_experts_lie_where_the_table_says_with_and_without_tp(tp_axis: int | None) -> None:
    cuts = plain("experts", 4, 6, 8, ep_axis=0, tp_axis=tp_axis)
    layout, _ = one(Degrees(tp=2, dp=2, ep=2), cuts)
    first = [(r.start[0], r.start[2], r.stop[2]) for r in regions(layout, cuts)]
    if tp_axis is None:  # ep is the fastest axis of all four devices
        assert first == [(0, 0, 8), (2, 0, 8), (0, 0, 8), (2, 0, 8)]
    else:
        assert first == [(0, 0, 4), (0, 4, 8), (2, 0, 4), (2, 4, 8)]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"ep": 3, "dp": 3}, "`experts` has 4 experts, which ep 3 cannot share equally"),
        ({"ep": 4, "dp": 2}, "ep 4 does not divide dp 2 * tp 1 = 2"),
        ({"ep": 4, "dp": 2, "cp": 2}, "ep 4 does not divide dp 2 * tp 1 = 2"),
    ],
)
def test_expert_degrees_that_do_not_fit_are_refused(said: dict[str, int], message: str) -> None:
    with pytest.raises(CkptkitError) as caught:
        one(Degrees(**said), plain("experts", 4, 6, 8, ep_axis=0))
    assert message in caught.value.what


def test_the_smallest_dp_for_expert_parallelism() -> None:
    whole, cut = plain("a", 8, 8, ep_axis=0), plain("b", 8, 8, ep_axis=0, tp_axis=1)
    assert smallest_dp(8, 4, 1, [whole]) == 2
    assert smallest_dp(8, 4, 2, [cut]) == 4
    assert smallest_dp(8, 4, 1, [plain("c", 8)]) == 1
    for ep in (1, 2, 4, 8):
        for tp in (1, 2, 4):
            for cuts in (whole, cut):
                dp = smallest_dp(ep, tp, 1, [cuts])
                lay_out(Degrees(ep=ep, tp=tp, dp=dp), [cuts], 0)
                for less in range(1, dp):
                    with pytest.raises(UsageError):
                        lay_out(Degrees(ep=ep, tp=tp, dp=less), [cuts], 0)


def test_expert_parallelism_without_experts_is_noted() -> None:
    assert "ep 2 cuts nothing" in one(Degrees(ep=2, dp=2), plain("w", 8))[1][0]


def test_expert_parallelism_that_fits_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="ep 3 does nothing here, and does not divide the 2 devices of a stage"):
        one(Degrees(ep=3, tp=2), plain("w", 8))


# The optimizer shard.


def test_what_an_optimizer_shard_leaves_whole_is_noted() -> None:
    degrees = Degrees(dp=4, optimizer_shard=True, opt_threshold_bytes=64)
    tensors = [plain("big", 16), plain("small", 12), plain("odd", 18), plain("norm", 64, opt=False)]
    layout, notes = lay_out(degrees, tensors, 0)
    held = layout.stages[0].tensors
    assert {name: (each.opt_step, each.opt_size) for name, each in held.items()} == {
        "big": (1, -1),
        "small": (0, 0),
        "odd": (0, 0),
        "norm": (0, 0),
    }
    assert notes == [
        "1 tensor without an optimizer shard, smaller than 64 bytes: `small`",
        "1 tensor without an optimizer shard, as 4 more parts do not divide their rows: `odd`",
        "1 tensor without an optimizer shard, as their net excludes them: `norm`",
    ]


def test_an_optimizer_shard_of_a_given_size() -> None:
    cuts = plain("w", 48, 16, tp_axis=0)
    layout, _ = one(Degrees(dp=4, tp=2, optimizer_shard=True, opt_shard_size=2), cuts)
    assert layout == TensorLayout((4, 2), ((0,), ()), 2, 2)
    layout, notes = one(Degrees(dp=4, tp=2, optimizer_shard=True, opt_shard_size=8), cuts)
    assert (layout.opt_step, layout.opt_size) == (0, 0)
    assert "as 8 does not divide their 4 copies" in notes[0]


# Laws.


@st.composite
def models(draw: st.DrawFn) -> tuple[Degrees, list[Cuts]]:
    """Draw degrees, and tensors of all kinds whose units they divide, or which may stay whole."""
    degree = st.integers(1, 4)
    tp, cp, ep, kv = draw(degree), draw(degree), draw(degree), draw(st.sampled_from([1, 2]))
    dp = draw(degree) * ep
    rows = st.integers(1, 3)
    tensors = [
        plain("whole", draw(rows) * 4, draw(rows)),
        plain("rows", tp * draw(rows), draw(rows), tp_axis=0),
        plain("heads", draw(rows), tp * draw(rows) * 3, tp_axis=1, tp_unit=3),
        plain("vocabulary", draw(st.integers(1, 24)), draw(rows), tp_axis=0, tp_indivisible="replicate", cp_too=True),
        plain("experts", ep * draw(rows) * 2, draw(rows), ep_axis=0, ep_unit=2),
        plain("cut experts", ep * draw(rows), tp * draw(rows), ep_axis=0, tp_axis=1),
        plain("scalar"),
    ]
    if tp % kv == 0:
        tensors.append(plain("kv", kv * 5, draw(rows), tp_axis=0, tp_unit=5))
    shard = draw(st.booleans())
    return Degrees(tp=tp, cp=cp, ep=ep, dp=dp, optimizer_shard=shard, replicate_kv=True), tensors


@given(models())
def test_the_parts_of_every_tensor_tile_it_and_no_unit_is_cut(model: tuple[Degrees, list[Cuts]]) -> None:
    degrees, tensors = model
    layout, _ = lay_out(degrees, tensors, 0)
    for cuts in tensors:
        times = np.zeros(cuts.shape, int)
        held = layout.stages[0].tensors[cuts.name]
        assert int(np.prod(held.dev_matrix)) == degrees.devices
        for region in regions(held, cuts):
            times[region.slices()] += 1
        assert times.min() == times.max() == degrees.devices // int(np.prod(num_parts(held)))
        parts = replace(held, opt_step=0, opt_size=0)
        for region in regions(parts, cuts):
            for axis, unit in ((cuts.tp_axis, cuts.tp_unit), (cuts.ep_axis, cuts.ep_unit)):
                if axis is not None:
                    assert region.start[axis] % unit == region.stop[axis] % unit == 0


@given(models())
def test_a_device_that_differs_in_dp_alone_holds_the_same_part(model: tuple[Degrees, list[Cuts]]) -> None:
    """Data parallelism copies: without experts and optimizer shard, device d and d + cp * tp are equal."""
    degrees, tensors = model
    degrees = replace(degrees, optimizer_shard=False)
    layout, _ = lay_out(degrees, tensors, 0)
    for cuts in tensors:
        if cuts.ep_axis is None:
            held = regions(layout.stages[0].tensors[cuts.name], cuts)
            stride = degrees.cp * degrees.tp
            assert held[stride:] == held[:-stride]


# MindFormers' own nets.


def cuts_of_tables(case: Mapping[str, Any]) -> list[Cuts]:
    """Return what our tables say of a net's tensors."""
    config = case["config"]
    rules = resolve(TABLES.for_config(config), config, case["dialect"], case["variant"])
    found = []
    for rule in rules.rules:
        traits = rule.traits
        cuts = Cuts(
            rule.target, rule.expr.shape, 4, rule.layer, traits.stage, traits.tp_axis, traits.tp_unit,
            traits.tp_unless, traits.tp_indivisible, traits.ep_axis, traits.ep_unit,
        )  # fmt: skip
        found.append(as_legacy_net(cuts) if case["dialect"] == "mindformers-legacy" else cuts)
    return found


def differences(case: Mapping[str, Any], layout: Layout) -> Sequence[str]:
    """Return the tensors of a net that our layout puts on other devices, or marks otherwise, than MindSpore does."""
    found = []
    ours = layout.stages[0].tensors
    for name, (shape, dev, tensor_map, step, size) in case["layouts"].items():
        axes = tuple(() if m == -1 else (m,) for m in tensor_map)
        theirs = TensorLayout(tuple(dev), axes, step, size)
        for device in range(layout.devices):
            region = shard_region(name, theirs, tuple(shape), device)
            if shard_region(name, ours[name], tuple(shape), device) != region:
                found.append(f"{name} on {device}")
        if (ours[name].opt_step, ours[name].opt_size) != (step, size):
            found.append(f"{name}: {ours[name].opt_step}, {ours[name].opt_size}")
    return found


@pytest.mark.parametrize("case", NETS, ids=[case["name"] for case in NETS])
def test_our_layout_is_the_one_that_mindspore_compiles_for_mindformers_nets(case: dict[str, Any]) -> None:
    layout, _ = lay_out(Degrees(**case["degrees"]), cuts_of_tables(case), 2)
    assert differences(case, layout) == []


def test_another_layout_than_mindspores_is_seen() -> None:
    """The control: mcore's nets are not cut as legacy ones are, nor dp * tp as tp * dp."""
    case = next(case for case in NETS if case["name"] == "mcore dp2 tp2 optimizer")
    cuts = cuts_of_tables(case)
    turned = Degrees(tp=4, optimizer_shard=True)
    for degrees, tensors in ((turned, cuts), (Degrees(**case["degrees"]), [as_legacy_net(each) for each in cuts])):
        assert differences(case, lay_out(degrees, tensors, 2)[0])


def test_the_optimizer_shards_are_counted_as_mindspore_counts_them() -> None:
    case = next(case for case in NETS if case["name"] == "mcore experts dp4 tp2 ep4 optimizer")
    layout, _ = lay_out(Degrees(**case["degrees"]), cuts_of_tables(case), 2)
    held = layout.stages[0].tensors["decoder.layers.0.mlp.experts.weight1"]
    assert held == TensorLayout((2, 4), ((0,), ()), 4, -1)
    assert num_opt_shards(held) == 2
