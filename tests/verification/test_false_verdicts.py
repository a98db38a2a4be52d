"""Verdicts of level weights that were once wrong: a wrong checkpoint called equal, or a right one different."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_jobs import config_of, make_folder

from ckptkit import Parallel, convert, diff, verify
from tests.rank_results import Tensors, read_file, write_whole
from tests.tiny_models import carry
from tests.trained_models import make_trained

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


@pytest.mark.parametrize("configured", [True, False])
def test_two_checkpoints_of_no_tensor_are_not_equal(hf: Path, tmp_path: Path, configured: bool) -> None:
    """Nothing was proved. One tensor on both sides, where no config.json asks for more, is the control."""
    for side in "ab":
        (tmp_path / side).mkdir()
        write_whole(tmp_path / side / "model.safetensors", {})
        if configured:
            shutil.copy(hf / "config.json", tmp_path / side)
    pair = tmp_path / "a", tmp_path / "b"
    for level in ("files", "weights"):
        report = verify(*pair, level=level)
        assert (report.exit_code, "no tensor" in report.to_text()) == (1, True)
    report = verify(*pair, level="weights", keep_going=True)
    assert (report.exit_code, "no parameter" in report.to_text()) == (1, True)
    assert diff(*pair).exit_code == 1
    if not configured:
        for folder in pair:
            write_whole(folder / "model.safetensors", {"weight": np.ones((2, 3), np.uint32)})
        assert (verify(*pair, level="weights").exit_code, diff(*pair).exit_code) == (0, 0)


def rounded(array: np.ndarray) -> np.ndarray:
    """Return float32, as bits, as those of bfloat16."""
    return carry(array.view(np.float32), "BF16")


STATE = {
    "one moment": ["adam_m.model.layers.1.attention.wq.weight"],
    "all moments": ["adam_m.", "adam_v."],
    "a counter": ["loss_scale"],
}


@pytest.mark.parametrize("weights_too", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("which", STATE)
def test_training_state_of_another_dtype_is_a_failure(
    hf: Path, tmp_path: Path, which: str, exact: bool, weights_too: bool
) -> None:
    """A cast leaves it alone, even where all values are exact. Weights that are cast beside it are the control."""
    convert(hf, tmp_path / "ms", to_dialect="mindformers")
    [file] = (tmp_path / "ms").glob("*.safetensors")
    weights = copied(file)
    rng = np.random.default_rng(0)
    state = {
        p + n: rng.random(x.shape, np.float32).view(np.uint32) for n, x in weights.items() for p in STATE["all moments"]
    }
    state["loss_scale"] = np.array([1.2345678], np.float32).view(np.uint32)
    if exact:
        state = {name: rounded(array).astype(np.uint32) << 16 for name, array in state.items()}
    for side, of_side in (
        ("a", weights),
        ("b", {n: rounded(x) for n, x in weights.items()} if weights_too else weights),
    ):
        folder = tmp_path / side
        folder.mkdir()
        shutil.copy(hf / "config.json", folder)
        odd = [n for n in state if n.startswith(tuple(STATE[which]))] if side == "b" else []
        its = {**of_side, **state, **{name: rounded(state[name]) for name in odd}}
        write_whole(folder / "part0.safetensors", its)
        if side == "b":
            (tmp_path / "cast").mkdir()
            shutil.copy(hf / "config.json", tmp_path / "cast")
            its = {**of_side, **state}
            write_whole(tmp_path / "cast/part0.safetensors", its)
    assert verify(tmp_path / "a", tmp_path / "cast", level="weights").exit_code == 0
    for pair in (("a", "b"), ("b", "a")):
        report = verify(*(tmp_path / side for side in pair), level="weights")
        assert (report.exit_code, "never cast" in report.to_text()) == (1, True), report.to_text()


@pytest.mark.parametrize("dtype", ["I32", "BOOL", "I64", "U8"])
def test_equal_values_of_a_dtype_that_no_rounding_leads_to_are_a_failure(hf: Path, tmp_path: Path, dtype: str) -> None:
    """A norm of ones as bfloat16 is the control: alone of its kind, but nothing in it is rounded."""
    norm, tensors = "model.norm.weight", copied(hf / "model.safetensors")
    tensors[norm] = np.full_like(tensors[norm], 0x3F800000)
    write_whole(hf / "model.safetensors", tensors)
    shutil.copytree(hf, tmp_path / "b")
    ones = np.ones(tensors[norm].shape, {"I32": np.uint32, "I64": np.uint64}.get(dtype, np.uint8))
    write_whole(tmp_path / "b/model.safetensors", {**tensors, norm: ones}, {norm: dtype})
    for pair in ((hf, tmp_path / "b"), (tmp_path / "b", hf)):
        report = verify(*pair, level="weights")
        assert (report.exit_code, "no rounding" in report.to_text()) == (1, True), report.to_text()
    write_whole(tmp_path / "b/model.safetensors", {**tensors, norm: rounded(tensors[norm])}, {norm: "BF16"})
    assert verify(hf, tmp_path / "b", level="weights").exit_code == 0


@pytest.mark.parametrize(("dtype", "code"), [("F16", 0), ("BF16", 0), ("I32", 1)])
def test_a_tensor_without_elements_may_be_cast(tmp_path: Path, dtype: str, code: int) -> None:
    """Its values are equal, for there are none; an integer is no cast of it all the same."""
    rest = {"weight": np.ones((2, 3), np.uint32)}
    for side, of in (("a", "F32"), ("b", dtype)):
        (tmp_path / side).mkdir()
        none = np.zeros((0, 3), np.uint32 if of in ("F32", "I32") else np.uint16)
        write_whole(tmp_path / side / "model.safetensors", {"none": none, **rest}, {"none": of})
    assert verify(tmp_path / "a", tmp_path / "b", level="weights").exit_code == code


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("level", ["files", "weights"])
@pytest.mark.parametrize(
    "said",
    [
        {"vocab_size": 999}, {"num_hidden_layers": 5}, {"num_hidden_layers": 1}, {"num_key_value_heads": 2},
        {"intermediate_size": 41}, {"tie_word_embeddings": False, "initializer_range": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_each_side_is_what_its_own_config_json_asks(
    hf: Path, tmp_path: Path, level: str, side: str, said: dict[str, Any]
) -> None:
    """The last one asks for no other sizes, and is the control."""
    convert(hf, tmp_path / "ms", to_dialect="mindformers")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    config = json.loads((hf / "config.json").read_text()) | said
    for folder in (hf, tmp_path / "ms"):
        odd = tmp_path / f"odd-{folder.name}"
        shutil.copytree(folder, odd)
        (odd / "config.json").write_text(json.dumps(config))
        report = verify(*((odd, hf) if side == "a" else (hf, odd)), level=level)
        assert report.exit_code == (0 if "initializer_range" in said else 1), report.to_text()
        assert report.data["failed"] == ([] if "initializer_range" in said else ["files"])
        assert all(line.startswith(f"{side.upper()}: ") for line in report.data["unlike_config"])


def test_a_config_json_of_b_that_lacks_a_size_is_said_of_b(hf: Path, tmp_path: Path) -> None:
    shutil.copytree(hf, tmp_path / "b")
    config = json.loads((hf / "config.json").read_text())
    del config["intermediate_size"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    report = verify(hf, tmp_path / "b", level="files")
    assert report.exit_code == 1
    assert report.data["unlike_config"] == ["B: config.json has no `intermediate_size`"]


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(("to", "of"), [("hf", ""), ("padded to 80", ""), ("hf", "adam_m.")])
@pytest.mark.parametrize("put", [0x3F800000, 0x80000000, 0])
def test_padding_that_is_not_zero_is_a_difference_on_either_side(
    hf: Path, tmp_path: Path, put: int, to: str, of: str, side: str
) -> None:
    """Zeros are the control. -0.0 is no zero that padding has."""
    if of:
        make_trained(hf, tmp_path / "trained", to_dialect="mindformers")
        convert(tmp_path / "trained", tmp_path / "hf-trained", to_dialect="hf")
    source = tmp_path / "trained" if of else hf
    convert(source, tmp_path / "a", to_dialect="mindformers", parallel=Parallel(mp=4, pad_vocab_to=72), digests=False)
    other = tmp_path / "hf-trained" if of else hf
    if to != "hf":
        other = tmp_path / "b"
        convert(hf, other, to_dialect="mindformers", parallel=Parallel(mp=4, pad_vocab_to=80), digests=False)
    [file] = (tmp_path / "a" / "rank_3").glob("*.safetensors")
    tensors = copied(file)
    [name] = [name for name in tensors if name == of + "model.tok_embeddings.embedding_weight"]
    tensors[name][-1] = put
    data = file.read_bytes()
    start = data.index(read_file(file)[name].tobytes())
    data = data[:start] + tensors[name].tobytes() + data[start + tensors[name].nbytes :]
    file.write_bytes(data)
    pair = (tmp_path / "a", other) if side == "a" else (other, tmp_path / "a")
    report = verify(*pair, level="weights")
    assert (report.exit_code, diff(*pair).exit_code) == ((1, 1) if put else (0, 0)), report.to_text()
    if put and side == "a":
        assert "padding is not zero" in report.to_text()


@pytest.mark.parametrize("odd", ["F16", "BF16"])
def test_parts_of_one_tensor_that_were_cast_to_two_dtypes_are_a_failure_in_words(
    hf: Path, tmp_path: Path, odd: str
) -> None:
    """Level forward could not run both sides on the same values. One dtype is the control."""
    convert(hf, tmp_path / "fused", to_dialect="mindformers", variant="qkv_concat")
    tensors, dtypes = {}, {}
    for name, array in copied(hf / "model.safetensors").items():
        dtypes[name] = odd if ".k_proj." in name else "BF16"
        tensors[name] = carry(array.view(np.float32), dtypes[name])
    (tmp_path / "b").mkdir()
    shutil.copy(hf / "config.json", tmp_path / "b")
    write_whole(tmp_path / "b" / "model.safetensors", tensors, dtypes)
    report = verify(tmp_path / "fused", tmp_path / "b", level="weights")
    assert report.exit_code == (0 if odd == "BF16" else 1), report.to_text()
    assert ("a cast has one dtype" in report.to_text()) == (odd != "BF16")
    if odd == "F16":  # in one naming each tensor has its own dtype, and is rounded to it
        assert verify(hf, tmp_path / "b", level="weights").exit_code == 0
