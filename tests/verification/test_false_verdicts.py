"""Verdicts of level weights that were once wrong: a wrong checkpoint called equal, or a right one different."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runner_jobs import config_of, make_folder

from ckptkit import Parallel, convert, diff, verify
from tests.rank_results import Tensors, read_file, write_whole

SIZES = {"num_key_value_heads": 4, "vocab_size": 66}
UP = "model.layers.0.feed_forward.w3.weight"


def copied(file: Path) -> Tensors:
    return {name: array.copy() for name, array in read_file(file).items()}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "hf", config_of("llama", **SIZES))


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_an_untied_head_that_neither_side_has_is_missing_like_any_tensor(tmp_path: Path, name: str) -> None:
    """The norm is the control: it is found."""
    for side in "ab":
        folder = make_folder(tmp_path / side, config_of("llama", **SIZES))
        tensors = copied(folder / "model.safetensors")
        del tensors[name]
        write_whole(folder / "model.safetensors", tensors)
    report = verify(tmp_path / "a", tmp_path / "b", level="weights")
    assert report.exit_code == 1, report.to_text()


@pytest.mark.parametrize("put", [0x8000, 0x0000])
def test_a_cast_keeps_the_sign_of_zero(hf: Path, tmp_path: Path, put: int) -> None:
    """All values are exact in bfloat16 here, and rounding -0.0 gives -0.0. The right sign is the control."""
    tensors = {name: array & np.uint32(0xFFFF0000) for name, array in read_file(hf / "model.safetensors").items()}
    tensors["model.layers.0.mlp.up_proj.weight"][0] = 0x80000000
    write_whole(hf / "model.safetensors", tensors)
    convert(hf, tmp_path / "ms", to_dialect="mindformers", dtype="bf16", format="safetensors")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    [file] = (tmp_path / "ms").glob("*.safetensors")
    cast = copied(file)
    assert (cast[UP][0] == 0x8000).all()
    cast[UP][0] = put
    write_whole(file, cast)
    assert verify(hf, tmp_path / "ms", level="weights").exit_code == (0 if put else 1)


@pytest.mark.parametrize("variant", ["qkv_concat", None])
def test_a_padded_vocabulary_equals_one_that_is_not_padded_in_the_same_naming_too(
    hf: Path, tmp_path: Path, variant: str | None
) -> None:
    """Another variant is the control: it goes by the rules, which know of the padding, and is equal."""
    convert(hf, tmp_path / "whole", to_dialect="mindformers", variant=variant)
    convert(hf, tmp_path / "cut", to_dialect="mindformers", parallel=Parallel(mp=2, pad_vocab_to=72))
    for a, b in (("whole", "cut"), ("cut", "whole")):
        report = verify(tmp_path / a, tmp_path / b, level="weights")
        assert report.exit_code == 0, report.to_text()


@pytest.mark.parametrize("level", ["files", "weights"])
def test_a_step_that_is_named_is_taken_beside_a_manifest_of_another(hf: Path, tmp_path: Path, level: str) -> None:
    """`diff --step-b` is the control: it takes the step."""
    convert(hf, tmp_path / "ms", to_dialect="mindformers", format="ckpt", parallel=Parallel(mp=2))
    for rank in (0, 1):
        folder = tmp_path / "ms" / f"rank_{rank}"
        [file] = folder.glob("*.ckpt")
        (folder / f"net_rank_{rank}-1_20.ckpt").write_bytes(file.read_bytes())
    assert diff(hf, tmp_path / "ms", step_b=20).exit_code == 0
    report = verify(hf, tmp_path / "ms", step_b=20, level=level)
    assert report.exit_code == 0, report.to_text()


def test_the_report_tells_in_what_the_two_config_json_files_differ(hf: Path, tmp_path: Path) -> None:
    """`diff` is the control: it tells."""
    convert(hf, tmp_path / "ms", to_dialect="mindformers")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    config = json.loads((tmp_path / "ms" / "config.json").read_text())
    (tmp_path / "ms" / "config.json").write_text(json.dumps({**config, "rope_theta": 1e6}))
    assert "rope_theta" in diff(hf, tmp_path / "ms").to_text()
    assert "rope_theta" in verify(hf, tmp_path / "ms", level="weights").to_text()
