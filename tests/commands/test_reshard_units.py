"""What is cut where: stages, heads, vocabulary, tied embeddings, many ranks; each there and back, byte for byte.

Every case has training state beside the weights unless it is about numbers alone, for moments go where their weight
goes. A cut that has no equal parts is refused with both numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.commands.convert import convert
from ckptkit.commands.inspect import inspect
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CkptkitError, CoverageError, UsageError
from tests.rank_results import (
    Tensors,
    odd_names,
    rank_bytes,
    read_file,
    read_ranks,
    read_whole,
    same_tensors,
    weight_files,
)
from tests.trained_models import COUNTERS, make_llama, make_qwen3_moe, make_trained, weights_of

pytestmark = pytest.mark.usefixtures("quick_disk")

EMBEDDING, HEAD = "model.tok_embeddings.embedding_weight", "lm_head.weight"
KINDS = ("", "adam_m.", "adam_v.")


def trained(folder: Path, **shape: Any) -> Path:
    """Return a whole MindSpore checkpoint with training state, made of a tiny llama in `folder / "hf"`."""
    return make_trained(make_llama(folder / "hf", **shape), folder / "base")


def cut(source: Path, **degrees: Any) -> Path:
    """Reshard into a folder beside `source` that is named after the degrees."""
    target = source.parent / f"{source.name} {' '.join(f'{key} {value}' for key, value in degrees.items())}"
    reshard(source, target, Parallel(**degrees))
    return target


def check_merged(folder: Path, whole: Path) -> None:
    """Merge `folder`, and compare the result with `whole`; convert it, and compare with the model that it was."""
    assert odd_names(read_whole(cut(folder)), read_whole(whole)) == []
    back = folder.parent / f"{folder.name} hf"
    convert(folder, back, to_dialect="hf", no_optimizer=True)
    assert odd_names(read_whole(back), read_whole(whole.parent / "hf")) == []


def check_refused(kind: type[CkptkitError], words: str, source: Path, **degrees: Any) -> CkptkitError:
    with pytest.raises(kind, match=words) as caught:
        cut(source, **degrees)
    assert type(caught.value) is kind
    return caught.value


def layers_of(tensors: Mapping[str, Any], kind: str = "") -> list[int]:
    found = {m[1] for name in tensors if (m := re.match(rf"{re.escape(kind)}model\.layers\.(\d+)\.", name))}
    return sorted(int(number) for number in found)


def flip(folder: Path, rank: int, name: str) -> None:
    """Change one bit of one tensor in a rank's file."""
    (file,) = weight_files(folder / f"rank_{rank}")
    wanted, data = read_file(file)[name].tobytes(), bytearray(file.read_bytes())
    assert bytes(data).count(wanted) == 1
    data[bytes(data).find(wanted)] ^= 1
    file.unlink()  # it may be a link that other ranks share
    file.write_bytes(data)


# ---- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "pp_layers", "stages"),
    [
        (3, None, [[0, 1, 2], [3, 4], [5, 6]]),
        (3, "2,2,3", [[0, 1], [2, 3], [4, 5, 6]]),
        (3, (1, 5, 1), [[0], [1, 2, 3, 4, 5], [6]]),
        (3, "0,4,3", [[], [0, 1, 2, 3], [4, 5, 6]]),
        (2, "7,0", [[0, 1, 2, 3, 4, 5, 6], []]),
    ],
)
def test_stages_have_the_layers_that_they_are_given(
    tmp_path: Path, pp: int, pp_layers: str | tuple[int, ...] | None, stages: list[list[int]]
) -> None:
    base = trained(tmp_path, layers=7)
    ranks = read_ranks(folder := cut(base, mp=2, pp=pp, pp_layers=pp_layers))
    for rank, tensors in ranks.items():
        assert [layers_of(tensors, kind) for kind in KINDS] == [stages[rank // 2]] * 3
        assert (EMBEDDING in tensors, HEAD in tensors) == (rank < 2, rank >= 2 * pp - 2)
        assert COUNTERS.keys() <= tensors.keys()
    check_merged(folder, base)


@pytest.mark.parametrize(
    ("layers", "pp_layers", "stages"),
    [
        (8, None, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (7, "2,2,2,1", [[0, 1, 4, 5], [2, 3, 6]]),
        (7, "1,3,2,1", [[0, 4, 5], [1, 2, 3, 6]]),
    ],
)
def test_interleaved_stages_take_turns(
    tmp_path: Path, layers: int, pp_layers: str | None, stages: list[list[int]]
) -> None:
    base = trained(tmp_path, layers=layers)
    folder = cut(base, pp=2, pp_interleave=2, pp_layers=pp_layers)
    assert [layers_of(tensors, kind) for tensors in read_ranks(folder).values() for kind in KINDS] == [
        stage for stage in stages for _ in KINDS
    ]
    check_merged(folder, base)
    plain = cut(base, mp=3, pp=2)
    assert rank_bytes(cut(folder, mp=3, pp=2)) == rank_bytes(plain)
    assert rank_bytes(cut(plain, pp=2, pp_interleave=2, pp_layers=pp_layers)) == rank_bytes(folder)


def test_layers_that_do_not_fit_the_stages_are_refused_with_both_numbers(tmp_path: Path) -> None:
    base = trained(tmp_path, layers=7)
    check_refused(UsageError, "3,3,2 add up to 8, and the model has 7", base, pp=3, pp_layers="3,3,2")
    check_refused(UsageError, "2,2,3 are 3 numbers for 2 stages", base, pp=2, pp_layers="2,2,3")
    check_refused(UsageError, "7 layers cannot be spread over 8 stages", base, pp=8)
    check_refused(UsageError, "leave a stage without any", base, pp=3, pp_layers="3,0,4")


def test_a_stage_that_another_split_would_need_is_not_made_up(tmp_path: Path) -> None:
    """Stages of another split under the strategy files of this one: refused, never random values."""
    base = trained(tmp_path, layers=4)
    plain, turns = cut(base, pp=2), cut(base, pp=2, pp_interleave=2)
    with pytest.raises(UsageError, match="has its own strategy files"):
        reshard(plain, tmp_path / "m", Parallel(src_strategy=turns / "strategy"))
    (plain / "ckptkit.json").unlink()
    with pytest.raises(CoverageError, match="is not on the ranks that its layout names"):
        reshard(plain, tmp_path / "m", Parallel(src_strategy=turns / "strategy"))


# ---- heads ----------------------------------------------------------------------------------------------------------


def test_kv_heads_fewer_than_tp_are_refused_or_copied_and_compared(tmp_path: Path) -> None:
    base = trained(tmp_path, kv_heads=2)
    error = check_refused(CoverageError, "2 heads or other units of 2 rows .* tp 4", base, mp=4)
    assert "--replicate-kv" in error.hint
    assert "--replicate-kv" not in check_refused(CoverageError, "2 heads .* tp 3", base, mp=3).hint
    check_refused(CoverageError, "2 heads .* tp 3", base, mp=3, replicate_kv=True)
    folder = cut(base, mp=4, replicate_kv=True)
    whole, ranks = read_whole(base), read_ranks(folder)
    for kind in KINDS:
        for name in (f"{kind}model.layers.{layer}.attention.{w}.weight" for layer in range(3) for w in ("wk", "wv")):
            heads = np.split(whole[name], 2)
            assert [np.array_equal(ranks[rank][name], heads[rank // 2]) for rank in range(4)] == [True] * 4
    check_merged(folder, base)
    halves = cut(base, mp=2)
    assert rank_bytes(cut(folder, mp=2)) == rank_bytes(halves)
    assert rank_bytes(cut(halves, mp=4, replicate_kv=True)) == rank_bytes(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_kv_head_that_differ_are_refused(tmp_path: Path, kind: str) -> None:
    folder = cut(trained(tmp_path, kv_heads=2), mp=4, replicate_kv=True)
    name = f"{kind}model.layers.1.attention.wk.weight"
    flip(folder, 3, name)
    error = check_refused(CoverageError, "differs? between ranks", folder)
    assert [item.partition(":")[0] for item in error.items] == [name]
    assert "1 element of rank_3 differs from rank_2" in error.items[0]


def test_a_cut_inside_a_query_head_is_refused(tmp_path: Path) -> None:
    base = trained(tmp_path, heads=6, kv_heads=6, head_dim=4)
    check_refused(CoverageError, "6 heads or other units of 4 rows .* tp 4", base, mp=4)  # of 24 rows, which 4 divides


# ---- the vocabulary -------------------------------------------------------------------------------------------------


def test_a_padded_vocabulary_is_cut_evenly_and_comes_back_without_padding(tmp_path: Path) -> None:
    base = trained(tmp_path, vocab=33)
    whole, folder = read_whole(base), cut(base, mp=4, pad_vocab_to=36)
    ranks = read_ranks(folder)
    for name in (kind + word for kind in KINDS for word in (EMBEDDING, HEAD)):
        rows = np.concatenate([ranks[rank][name] for rank in range(4)])
        assert rows.shape == (36, 24) and len(ranks[3][name]) == 9
        assert np.array_equal(rows[:33], whole[name]) and not rows[33:].any()
    check_merged(folder, base)
    assert rank_bytes(cut(folder, mp=3)) == rank_bytes(cut(base, mp=3))  # 33 rows, in equal parts again
    wider = cut(base, mp=4, pp=3, pad_vocab_to=40)
    assert rank_bytes(cut(folder, mp=4, pp=3, pad_vocab_to=40)) == rank_bytes(wider)
    check_merged(wider, base)
    check_refused(CoverageError, "cannot be padded to 32 rows", base, mp=4, pad_vocab_to=32)


def test_a_vocabulary_that_tp_does_not_divide_stays_whole_and_the_report_says_so(tmp_path: Path) -> None:
    base = trained(tmp_path, vocab=33)
    report = reshard(base, tmp_path / "cut", Parallel(mp=4))
    assert any("whole on every device, as 4 does not divide their 33 rows" in text for _, text in report.rows)
    assert {tensors[HEAD].shape for tensors in read_ranks(tmp_path / "cut").values()} == {(33, 24)}
    check_merged(tmp_path / "cut", base)


def test_an_embedding_is_whole_on_request(tmp_path: Path) -> None:
    base = trained(tmp_path)
    folder = cut(base, mp=2, shard_embedding=False)
    whole = read_whole(base)
    for tensors in read_ranks(folder).values():
        for name in (kind + word for kind in KINDS for word in (EMBEDDING, HEAD)):
            assert np.array_equal(tensors[name], whole[name])
        assert tensors["model.layers.0.attention.wq.weight"].shape == (24, 24)
    check_merged(folder, base)
    assert rank_bytes(cut(cut(folder, mp=2), mp=2, shard_embedding=False)) == rank_bytes(folder)


# ---- state and names ------------------------------------------------------------------------------------------------


def test_moments_are_cut_as_their_weights_though_their_elements_are_wider(tmp_path: Path) -> None:
    """A threshold in bytes, between a BF16 weight and its FP32 moment: the weight decides for both."""
    base = trained(tmp_path, dtype="BF16")
    run = tmp_path / "run.yaml"
    run.write_text(
        "parallel_config: {data_parallel: 2, model_parallel: 1, pipeline_stage: 1}\n"
        "parallel: {enable_parallel_optimizer: True, parallel_mode: 1,"
        " parallel_optimizer_config: {parallel_optimizer_threshold: 2}}\n"
    )
    reshard(base, tmp_path / "cut", Parallel(parallel_config=run))
    held = read_ranks(tmp_path / "cut")[1]
    layer = "model.layers.0.attention"
    assert [held[f"{kind}{layer}.wq.weight"].shape for kind in KINDS] == [(24, 24)] * 3  # 2304 bytes, cut
    assert [held[f"{kind}{layer}.wk.weight"].shape for kind in KINDS] == [(24, 24)] * 3  # 1152 bytes, whole
    check_merged(tmp_path / "cut", base)


def test_what_was_merged_by_names_alone_can_be_cut_by_a_table(tmp_path: Path) -> None:
    base = trained(tmp_path)
    merged = cut(base)
    assert inspect(merged).data["dialects"] == ["mindformers-legacy"]
    assert rank_bytes(cut(merged, mp=3)) == rank_bytes(cut(base, mp=3))
    check_merged(merged, base)


# ---- tied embeddings ------------------------------------------------------------------------------------------------


def test_a_tied_embedding_and_its_moments_are_on_the_first_and_the_last_stage(tmp_path: Path) -> None:
    base = trained(tmp_path, tied=True, layers=4)
    whole, folder = read_whole(base), cut(base, mp=2, pp=4)
    assert HEAD not in whole
    for kind in KINDS:
        name = kind + EMBEDDING
        held = {rank: tensors[name] for rank, tensors in read_ranks(folder).items() if name in tensors}
        assert list(held) == [0, 1, 6, 7]
        halves = np.split(whole[name], 2)
        assert all(np.array_equal(part, halves[rank % 2]) for rank, part in held.items())
    check_merged(folder, base)
    assert rank_bytes(cut(folder, mp=3, pp=2)) == rank_bytes(cut(base, mp=3, pp=2))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_tied_embedding_that_differ_are_refused(tmp_path: Path, kind: str) -> None:
    folder = cut(trained(tmp_path, tied=True, layers=4), mp=2, pp=4)
    flip(folder, 7, kind + EMBEDDING)
    error = check_refused(CoverageError, "differs? between ranks", folder)
    assert "1 element of rank_7 differs from rank_1" in error.items[0]


# ---- numbers of two and three digits --------------------------------------------------------------------------------


def test_128_ranks_keep_their_order(tmp_path: Path) -> None:
    sizes = {"heads": 128, "kv_heads": 128, "hidden": 128, "head_dim": 1, "intermediate": 128, "vocab": 128}
    hf = make_llama(tmp_path / "hf", layers=2, **sizes)
    convert(hf, tmp_path / "128", parallel=Parallel(mp=128))
    ranks, whole = read_ranks(tmp_path / "128"), by_hand(hf, layers=2)
    assert list(ranks) == list(range(128))
    for rank, tensors in ranks.items():
        assert np.array_equal(tensors[EMBEDDING], whole[EMBEDDING][rank : rank + 1])
        name = "model.layers.1.attention.wo.weight"
        assert np.array_equal(tensors[name], whole[name][:, rank : rank + 1])
    mixed = cut(tmp_path / "128", mp=32, pp=2, dp=2)
    assert len(read_ranks(mixed)) == 128
    for folder in (tmp_path / "128", mixed):
        convert(folder, tmp_path / f"{folder.name} hf", to_dialect="hf")
        assert same_tensors(read_whole(tmp_path / f"{folder.name} hf"), read_whole(hf))


def by_hand(hf: Path, layers: int) -> Tensors:
    """Return two of a model's tensors under MindFormers' names, renamed here."""
    stored = read_whole(hf)
    found = {EMBEDDING: stored["model.embed_tokens.weight"]}
    for n in range(layers):
        found[f"model.layers.{n}.attention.wo.weight"] = stored[f"model.layers.{n}.self_attn.o_proj.weight"]
    return found


def test_over_99_layers_and_stages_keep_their_order(tmp_path: Path) -> None:
    sizes = {"heads": 2, "kv_heads": 2, "hidden": 4, "head_dim": 2, "intermediate": 4, "vocab": 4}
    hf = make_llama(tmp_path / "hf", layers=102, **sizes)
    convert(hf, tmp_path / "cut", parallel=Parallel(pp=101))
    ranks, whole = read_ranks(tmp_path / "cut"), by_hand(hf, layers=102)
    assert len(ranks) == 101
    for rank, tensors in ranks.items():
        layers = [0, 1] if rank == 0 else [rank + 1]  # the first stage has the one that is left over
        assert layers_of(tensors) == layers
        for layer in layers:
            name = f"model.layers.{layer}.attention.wo.weight"
            assert np.array_equal(tensors[name], whole[name])
    convert(cut(tmp_path / "cut", mp=2, pp=4), tmp_path / "back", to_dialect="hf")
    assert same_tensors(read_whole(tmp_path / "back"), read_whole(hf))


def test_over_99_experts_keep_their_order(tmp_path: Path) -> None:
    sizes = {"hidden": 4, "heads": 2, "kv_heads": 1, "head_dim": 2, "ffn": 2, "moe_ffn": 2, "vocab": 4, "layers": 2}
    hf = make_qwen3_moe(tmp_path / "hf", experts=104, **sizes)
    base = make_trained(hf, tmp_path / "base")
    stored = read_whole(hf)
    reshard(base, tmp_path / "cut", Parallel(ep=52), variant="base")
    for rank, tensors in read_ranks(tmp_path / "cut").items():
        wanted = [stored[f"model.layers.1.mlp.experts.{n}.down_proj.weight"].T for n in (2 * rank, 2 * rank + 1)]
        assert np.array_equal(tensors["decoder.layers.1.mlp.experts.weight2"], np.concatenate(wanted))
        moment = np.split(read_whole(base)["adam_v.decoder.layers.1.mlp.experts.weight2"], 52)[rank]
        assert np.array_equal(tensors["adam_v.decoder.layers.1.mlp.experts.weight2"], moment)
    again = tmp_path / "cut again"
    reshard(tmp_path / "cut", again, Parallel(ep=8, pp=2), variant="base")
    convert(again, tmp_path / "back", to_dialect="hf", from_variant="base")
    assert same_tensors(weights_of(read_whole(tmp_path / "back")), stored)
