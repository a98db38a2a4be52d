"""The safetensors library, torch and transformers: they accept what is laid out, and what they write is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_contract import FORMATS, assemble, check_read_back, random_contents, specs_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.formats import registry, safetensors
from ckptkit.formats.io import read_region
from ckptkit.types import DTYPES, TensorSpec

pytestmark = pytest.mark.frameworks

SAFETENSORS = FORMATS[0]


def torch_bytes(file: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Return what the library loads through torch."""
    import torch
    from safetensors import safe_open

    result = {}
    with safe_open(str(file), "pt") as opened:
        for name in opened.keys():  # noqa: SIM118  it is no dict
            tensor = opened.get_tensor(name)
            data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            result[name] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data)
    return result


TORCH_DTYPES = [name for name in SAFETENSORS.dtypes if name not in ("F8_E4M3FNUZ", "F8_E5M2FNUZ")]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_safetensors_file_of_ours_is_accepted_by_the_library(tmp_path: Path, data: st.DataObject) -> None:
    specs = data.draw(specs_of(SAFETENSORS))
    contents = random_contents(specs)
    raw = assemble(SAFETENSORS.lay_out("x.safetensors", specs), contents)
    from safetensors import deserialize

    found = {name: (tuple(info["shape"]), info["dtype"], bytes(info["data"])) for name, info in deserialize(raw)}
    assert found == {s.name: (s.shape, s.dtype, contents[s.name]) for s in specs}


def test_every_dtype_of_ours_is_loaded_by_the_library_through_torch(tmp_path: Path) -> None:
    specs = [TensorSpec(f"t.{dtype}", (3, 2), dtype) for dtype in TORCH_DTYPES]
    specs += [TensorSpec(f"s.{dtype}", (), dtype) for dtype in TORCH_DTYPES]
    contents = random_contents(specs)
    file = tmp_path / "x.safetensors"
    file.write_bytes(assemble(SAFETENSORS.lay_out(file.name, specs), contents))
    assert torch_bytes(file) == {s.name: (s.shape, DTYPES[s.dtype].torch, contents[s.name]) for s in specs}


def test_every_dtype_of_torch_that_the_library_writes_is_read(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    specs = [TensorSpec(f"t.{dtype}", (3, 2), dtype) for dtype in TORCH_DTYPES]
    contents = random_contents(specs)
    tensors = {}
    for spec in specs:
        kind = getattr(torch, DTYPES[spec.dtype].torch)
        tensors[spec.name] = torch.frombuffer(bytearray(contents[spec.name]), dtype=kind).reshape(spec.shape)
    file = tmp_path / "x.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    check_read_back(SAFETENSORS, file, specs, contents)
    assert safetensors.read_index(file).metadata == {"format": "pt"}


def test_our_header_has_the_fields_and_spelling_of_the_library(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    file = tmp_path / "x.safetensors"
    save_file({"b": torch.ones(2), "a": torch.ones(2, 3)}, file, metadata={"format": "pt"})
    specs = [tensor.spec for tensor in safetensors.read_index(file).tensors]
    contents = {tensor.name: read_region(tensor).tobytes() for tensor in safetensors.read_index(file).tensors}
    assert assemble(safetensors.lay_out(file.name, specs, {"format": "pt"}), contents) == file.read_bytes()


def test_an_hf_index_of_ours_is_what_transformers_needs(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "whole")
    whole = registry.open_checkpoint(tmp_path / "whole")
    contents = {name: read_region(info).tobytes() for name, info in whole.tensors.items()}
    specs = [info.spec for info in whole.tensors.values()]
    outputs, small = registry.lay_out_checkpoint(registry.HF, specs, max_shard_bytes=4000)
    assert len(outputs) > 2
    for output in outputs:
        (tmp_path / "whole" / output.name).write_bytes(assemble(output, contents))
    for name, data in small.items():
        (tmp_path / "whole" / name).write_bytes(data)
    (tmp_path / "whole" / "model.safetensors").unlink()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name].view(torch.int32), tensor.view(torch.int32)), name


def test_a_sharded_checkpoint_of_transformers_is_opened_without_a_note(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="4KB")
    checkpoint = registry.open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 2
    assert checkpoint.notes == ()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert checkpoint.tensors.keys() == index["weight_map"].keys()
