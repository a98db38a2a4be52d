"""A real model, SmolLM2-135M, goes over six devices to three others and comes back byte for byte.

It has 9 heads, 3 KV heads, 30 layers and a tied embedding: three-way cuts, uneven stages, a copy on the last stage.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.run import smollm2_folder

from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from tests.rank_results import odd_names, read_ranks, read_whole

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

EMBEDDING = "model.tok_embeddings.embedding_weight"
SIX = Parallel(mp=3, pp=2)
THREE = Parallel(mp=1, pp=3, pp_layers="9,10,11")


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_smollm2_goes_over_six_devices_and_three_and_comes_back(tmp_path: Path, format: str) -> None:
    model = smollm2_folder()
    if model is None:
        pytest.skip("the package that holds SmolLM2 cannot be had here")
    convert(model, tmp_path / "six", parallel=SIX, format=format)
    reshard(tmp_path / "six", tmp_path / "three", THREE)
    convert(tmp_path / "three", tmp_path / "back", to_dialect="hf")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(model)) == []
    six, three = read_ranks(tmp_path / "six"), read_ranks(tmp_path / "three")
    assert {rank: tensors[EMBEDDING].shape for rank, tensors in six.items()} == dict.fromkeys(range(6), (16384, 576))
    assert [len({name.split(".")[2] for name in tensors if ".layers." in name}) for tensors in three.values()] == [
        9, 10, 11,
    ]  # fmt: skip
    assert [EMBEDDING in tensors for tensors in three.values()] == [True, False, True]
