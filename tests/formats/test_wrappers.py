"""The contract: wrapper prefixes go when all names carry them, and adapters are never lost in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import CoverageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.wrappers import unwrap
from ckptkit.types import Extent, TensorInfo


def checkpoint(*names: str) -> Checkpoint:
    file = Path("model.safetensors")
    tensors = {n: TensorInfo(n, (1,), "F32", file, (Extent(8 * i, 4),)) for i, n in enumerate(names)}
    return Checkpoint(file, Path(), "safetensors", (file,), tensors)


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.module.", "module._orig_mod.", "module.module.", "base_model.model."]
)
def test_a_prefix_that_all_names_carry_is_taken_off_in_any_nesting(prefix: str) -> None:
    done = unwrap(checkpoint(f"{prefix}model.norm.weight", f"{prefix}lm_head.weight"))
    assert list(done.tensors) == ["model.norm.weight", "lm_head.weight"]
    assert [info.name for info in done.tensors.values()] == list(done.tensors)
    assert [info.extents[0].offset for info in done.tensors.values()] == [0, 8]
    assert f"`{prefix}`" in done.notes[0]


def test_a_name_with_the_same_word_inside_stays() -> None:
    names = ("model.module.weight", "model.module_list.weight")
    assert list(unwrap(checkpoint(*names)).tensors) == list(names)


def test_a_prefix_that_only_some_names_carry_is_an_error_about_the_odd_ones() -> None:
    with pytest.raises(CoverageError, match="1 of 3 tensors .* do not begin with `module.`") as caught:
        unwrap(checkpoint("module.a.weight", "module.b.weight", "c.weight"))
    assert caught.value.items == ("c.weight",)
    with pytest.raises(CoverageError, match="1 of 3 tensors .* begin with `module.`") as caught:
        unwrap(checkpoint("module.a.weight", "b.weight", "c.weight"))
    assert caught.value.items == ("module.a.weight",)


@pytest.mark.parametrize(
    "name", ["base_model.model.x.lora_A.default.weight", "x.lora_B.weight", "x.mindpet_delta_lora_a"]
)
def test_an_unmerged_adapter_is_refused(name: str) -> None:
    with pytest.raises(CoverageError, match="LoRA adapter tensors that are not merged"):
        unwrap(checkpoint("base_model.model.x.base_layer.weight", name))


def test_a_merged_adapter_models_names_lose_base_layer() -> None:
    done = unwrap(checkpoint("base_model.model.q.base_layer.weight", "base_model.model.norm.weight"))
    assert list(done.tensors) == ["q.weight", "norm.weight"]


def test_two_tensors_never_get_one_name() -> None:
    with pytest.raises(CoverageError, match="two tensors each"):
        unwrap(checkpoint("q.base_layer.weight", "q.weight"))
