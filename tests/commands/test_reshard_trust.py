"""A promise is kept or broken, and never believed: digests of a source, strategy files, links, recorded padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats.mindspore_strategy import Strategy, dump_strategy
from ckptkit.types import TensorLayout
from tests.rank_results import odd_names, random_tensors, read_file, read_whole, weight_files, write_whole
from tests.trained_models import make_llama, make_qwen3_moe, make_trained

pytestmark = pytest.mark.usefixtures("quick_disk")

LAYOUTS: list[dict[str, Any]] = [
    {"mp": 2}, {"dp": 2, "optimizer_shard": True}, {"mp": 2, "dp": 2, "optimizer_shard": True}, {"mp": 4}, {"pp": 2},
    {},
]  # fmt: skip


def write_strategy(file: Path, tensor_map: tuple[tuple[int, ...], ...], devices: tuple[int, ...]) -> Path:
    file.write_bytes(dump_strategy(Strategy(0, {"w": TensorLayout(devices, tensor_map)}, {})))
    return file


def flip(file: Path, name: str) -> None:
    """Change one bit of a tensor, and nothing that a header says."""
    data, wanted = bytearray(file.read_bytes()), read_file(file)[name].tobytes()
    data[bytes(data).find(wanted) + len(wanted) // 2] ^= 1
    file.unlink()
    file.write_bytes(data)


@pytest.mark.parametrize("after", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["wo", "wq"])
def test_a_changed_bit_of_a_source_is_found_under_every_layout(
    tmp_path: Path, after: dict[str, Any], name: str
) -> None:
    hf = make_llama(tmp_path / "hf")
    convert(hf, tmp_path / "g", parallel=Parallel(mp=2))
    reshard(tmp_path / "g", tmp_path / "sound", Parallel(**after))
    (file,) = weight_files(tmp_path / "g" / "rank_1")
    flip(file, f"model.layers.0.attention.{name}.weight")
    with pytest.raises(CorruptError, match="is not what its manifest promises"):
        reshard(tmp_path / "g", tmp_path / "o", Parallel(**after))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("variant", ["contiguous", None])
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_a_changed_bit_of_a_fused_tensor_is_found_on_the_way_back(
    tmp_path: Path, variant: str | None, format: str
) -> None:
    hf = make_qwen3_moe(tmp_path / "hf")
    convert(hf, tmp_path / "f", variant=variant, format=format)
    (file,) = weight_files(tmp_path / "f")
    flip(file, "decoder.layers.0.self_attention.linear_qkv.weight")
    with pytest.raises(CorruptError, match="linear_qkv"):
        convert(tmp_path / "f", tmp_path / "back")


def test_the_manifest_records_only_digests_that_were_compared(tmp_path: Path) -> None:
    convert(make_llama(tmp_path / "hf"), tmp_path / "g", parallel=Parallel(mp=2))
    layout = Parallel(dp=2, optimizer_shard=True)
    reshard(tmp_path / "g", tmp_path / "all", layout)
    manifest = json.loads((tmp_path / "all" / "ckptkit.json").read_text())
    promised = json.loads((tmp_path / "g" / "ckptkit.json").read_text())["tensors"]
    read = manifest["source"]["tensors"]
    assert read and all(promised[name]["xxh3_128"] == digest for name, digest in read.items())
    report = reshard(tmp_path / "g", tmp_path / "one", Parallel(dp=2, optimizer_shard=True, ranks="0"))
    part = json.loads((tmp_path / "one" / "ckptkit.json").read_text())["source"]["tensors"]
    assert part.keys() < read.keys()
    assert "was not compared with the digests of SRC" in report.to_text()


def test_strategy_files_are_what_the_manifest_promises(tmp_path: Path) -> None:
    whole = write_whole(tmp_path / "s.safetensors", random_tensors({"w": (8, 8)}))
    write_strategy(tmp_path / "d.ckpt", ((1, 0), ()), (2, 2))
    write_strategy(tmp_path / "other.ckpt", ((0, 1), ()), (2, 2))
    reshard(whole, tmp_path / "r", Parallel(dst_strategy=tmp_path / "d.ckpt"))
    with pytest.raises(UsageError, match="has its own strategy files"):
        reshard(tmp_path / "r", tmp_path / "m", Parallel(src_strategy=tmp_path / "other.ckpt"))
    (own,) = (tmp_path / "r" / "strategy").iterdir()
    own.write_bytes((tmp_path / "other.ckpt").read_bytes())
    with pytest.raises(CorruptError, match="strategy files of"):
        reshard(tmp_path / "r", tmp_path / "m", Parallel())
    with pytest.raises(CorruptError):
        check(tmp_path / "r")


def test_one_file_cannot_stand_for_two_parts(tmp_path: Path) -> None:
    whole = write_whole(tmp_path / "s.safetensors", random_tensors({"w": (8, 8)}))
    write_strategy(tmp_path / "d.ckpt", ((0,), ()), (4,))
    reshard(whole, tmp_path / "r", Parallel(dst_strategy=tmp_path / "d.ckpt"))
    (tmp_path / "r" / "ckptkit.json").unlink()
    (first,), (second,) = (weight_files(tmp_path / "r" / f"rank_{rank}") for rank in (0, 1))
    second.unlink()
    second.symlink_to(first)
    with pytest.raises(CoverageError, match="same bytes of one file"):
        reshard(tmp_path / "r", tmp_path / "m", Parallel())


# ---- padding ------------------------------------------------------------------------------------------------------


def padded(folder: Path, rows: int, **degrees: int) -> Path:
    convert(make_llama(folder / "hf"), folder / "p", parallel=Parallel(pad_vocab_to=rows, **degrees))
    return folder / "p"


def test_a_rank_that_holds_padding_alone_is_written_and_read(tmp_path: Path) -> None:
    source = padded(tmp_path, 1024, mp=4)
    convert(source, tmp_path / "back")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(tmp_path / "hf")) == []


@pytest.mark.parametrize("rows", [1024, 2048, None])
def test_a_padded_checkpoint_goes_to_another_layout_with_padding_as_asked(tmp_path: Path, rows: int | None) -> None:
    source = padded(tmp_path, 1024, mp=4)
    reshard(source, tmp_path / "o", Parallel(mp=2, pad_vocab_to=rows))
    convert(tmp_path / "o", tmp_path / "back")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(tmp_path / "hf")) == []


@pytest.mark.parametrize("degrees", [{"mp": 4}, {}])
def test_a_merged_padded_checkpoint_converts(tmp_path: Path, degrees: dict[str, int]) -> None:
    reshard(padded(tmp_path, 1024, **degrees), tmp_path / "m", Parallel())
    convert(tmp_path / "m", tmp_path / "back")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(tmp_path / "hf")) == []


@pytest.mark.parametrize("degrees", [{"mp": 2, "pp": 2}, {}])
def test_padding_with_values_is_left_behind_and_counted(tmp_path: Path, degrees: dict[str, int]) -> None:
    """Training moves the rows of a head that no word has; they are no part of the model, and nobody is to wonder."""
    source = tmp_path / "p"
    convert(make_llama(tmp_path / "hf"), source, parallel=Parallel(pad_vocab_to=1024, **degrees), digests=False)
    assert not any("not zero" in note for note in convert(source, tmp_path / "zero", digests=False).data["notes"])
    file = weight_files(sorted(source.glob("rank_*"))[-1] if degrees else source)[0]
    tensors = {name: array.copy() for name, array in read_file(file).items()}
    tensors["lm_head.weight"][-1, :3] = 1
    write_whole(file, tensors)
    for to, report in (
        (tmp_path / "back", convert(source, tmp_path / "back", digests=False)),
        (tmp_path / "whole", reshard(source, tmp_path / "whole", Parallel(), digests=False)),
    ):
        notes = [note for note in report.data["notes"] if "not zero" in note]
        whole = read_whole(tmp_path / "hf")["lm_head.weight"]
        assert [note.split(" elements")[0] for note in notes] == [
            f"`lm_head.weight`: 3 of the {(1024 - len(whole)) * whole.shape[1]}"
        ]
        assert np.array_equal(read_whole(to)["lm_head.weight"], whole)


# ---- optimizer shards of fused tensors ----------------------------------------------------------------------------


def test_an_optimizer_shard_may_cut_a_group_of_heads_for_it_is_joined_before_use(tmp_path: Path) -> None:
    hf = make_qwen3_moe(tmp_path / "hf", heads=4, kv_heads=2)
    whole = make_trained(hf, tmp_path / "whole")
    layout = Parallel(mp=2, dp=2, optimizer_shard=True)
    reshard(whole, tmp_path / "by_reshard", layout, variant="base")
    convert(whole, tmp_path / "hf_trained", to_dialect="hf", from_variant="base")
    convert(tmp_path / "hf_trained", tmp_path / "straight", parallel=layout)
    for rank in range(4):
        (a,), (b,) = (weight_files(tmp_path / way / f"rank_{rank}") for way in ("straight", "by_reshard"))
        assert odd_names(read_file(a), read_file(b)) == []
    convert(tmp_path / "straight", tmp_path / "back", no_optimizer=True)
    assert odd_names(read_whole(tmp_path / "back"), read_whole(hf)) == []


# ---- numbers of layers --------------------------------------------------------------------------------------------


def test_stages_that_number_their_layers_from_zero_are_refused_and_not_taken_for_copies(tmp_path: Path) -> None:
    """Names must be those of the whole net: two stages with a `layers.0.w` each would lose one of them."""
    tensors = random_tensors({"layers.0.w": (4, 4), "other": (4, 4)})
    for stage, values in enumerate(tensors.values()):
        (tmp_path / "run" / f"rank_{stage}").mkdir(parents=True)
        write_whole(tmp_path / "run" / f"rank_{stage}" / "a.safetensors", {"layers.0.w": values})
        layout = {"layers.0.w": TensorLayout((1,), ((), ()))}
        (tmp_path / "strategy").mkdir(exist_ok=True)
        (tmp_path / "strategy" / f"stage{stage}.ckpt").write_bytes(dump_strategy(Strategy(stage, layout, {})))
    with pytest.raises(CoverageError, match="differ") as caught:
        reshard(tmp_path / "run", tmp_path / "m", Parallel(src_strategy=tmp_path / "strategy"))
    assert "layers.0.w" in caught.value.items[0]
    assert not (tmp_path / "m").exists()
