"""MindSpore's own loaders and writers: `save_checkpoint` must be matched byte for byte, and what it writes be read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_contract import FORMATS, assemble, check_read_back, random_contents, rewrite, specs_of
from fuzz import mutations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.errors import CkptkitError, CorruptError, UnsafeError
from ckptkit.formats import mindspore_ckpt, registry
from ckptkit.formats.io import read_region
from ckptkit.types import DTYPES, TensorSpec

pytestmark = pytest.mark.frameworks

SAFETENSORS, CKPT = FORMATS
DTYPES_OF_MINDSPORE = [name for name in CKPT.dtypes if name != "STR"]


@pytest.fixture(scope="module")
def ms() -> Iterator[Any]:
    os.environ.setdefault("GLOG_v", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mindspore

        yield mindspore


def tensor_of(ms: Any, spec: TensorSpec, data: bytes) -> Any:
    """Return a MindSpore tensor of the given bytes; text as text."""
    if spec.dtype == "STR":
        return data.decode("utf-32-le")
    make = ms.train.serialization.Tensor_.convert_bytes_to_tensor
    kind = ms.train.serialization.tensor_to_ms_type[DTYPES[spec.dtype].mindspore]
    return ms.Parameter(make(data, spec.shape, kind), name=spec.name)


def save(ms: Any, file: Path, specs: Sequence[TensorSpec], contents: Mapping[str, bytes], **options: object) -> bytes:
    """Save by MindSpore and return the file's bytes; texts come last, as MindSpore appends them."""
    values = [(spec, tensor_of(ms, spec, contents[spec.name])) for spec in specs]
    texts = {spec.name: value for spec, value in values if spec.dtype == "STR"}
    rest = [{"name": spec.name, "data": value} for spec, value in values if spec.dtype != "STR"]
    ms.save_checkpoint(rest, str(file), append_dict=texts or None, **options)
    return file.read_bytes()


def loaded(ms: Any, file: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Return what MindSpore loads: shape, type and bytes by name; a text is its code points."""
    result = {}
    for name, value in ms.load_checkpoint(str(file)).items():
        if isinstance(value, str):
            result[name] = ((len(value),), "str", value.encode("utf-32-le"))
        else:
            result[name] = (tuple(value.shape), str(value.dtype), bytes(value.get_bytes()))
    return result


def all_dtypes_of_mindspore() -> list[TensorSpec]:
    specs = [TensorSpec(f"layer.{dtype}", (2, 3), dtype) for dtype in DTYPES_OF_MINDSPORE]
    specs += [TensorSpec(f"scalar.{dtype}", (), dtype) for dtype in DTYPES_OF_MINDSPORE]
    return [*specs, TensorSpec("one", (1,), "F32"), TensorSpec("note", (7,), "STR")]


def test_every_dtype_is_written_as_mindspore_writes_it(ms: Any, tmp_path: Path) -> None:
    specs = all_dtypes_of_mindspore()
    contents = random_contents(specs)
    ours = assemble(mindspore_ckpt.lay_out("x.ckpt", specs), contents)
    assert ours == save(ms, tmp_path / "x.ckpt", specs, contents)
    assert len(specs) == 28


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ckpt_is_written_as_mindspore_writes_it_and_loads(ms: Any, tmp_path: Path, data: st.DataObject) -> None:
    drawn = data.draw(specs_of(CKPT).filter(bool))
    specs = sorted(drawn, key=lambda spec: spec.dtype == "STR")
    contents = random_contents(specs)
    file = tmp_path / "x.ckpt"
    saved = save(ms, file, specs, contents)
    assert assemble(mindspore_ckpt.lay_out("x.ckpt", specs), contents) == saved
    check_read_back(CKPT, file, specs, contents)
    want = {s.name: (s.shape, DTYPES[s.dtype].mindspore, contents[s.name]) for s in specs}
    assert loaded(ms, file) == want


def test_append_values_are_read_as_mindspore_stores_them(ms: Any, tmp_path: Path) -> None:
    values = {"epoch": 3, "step": 2**40, "lr": 0.1, "done": True, "note": "h\u00e9", "empty": ""}
    file = tmp_path / "x.ckpt"
    ms.save_checkpoint([{"name": "w", "data": ms.Tensor(np.ones(2, np.float32))}], str(file), append_dict=values)
    index = mindspore_ckpt.read_index(file)
    found = {t.name: (t.shape, t.dtype, read_region(t).tobytes()) for t in index.tensors if t.name != "w"}
    assert found == {
        "epoch": ((), "I64", (3).to_bytes(8, "little")),
        "step": ((), "I64", (2**40).to_bytes(8, "little")),
        "lr": ((), "F32", np.float32(0.1).tobytes()),
        "done": ((), "BOOL", b"\1"),
        "note": ((2,), "STR", "h\u00e9".encode("utf-32-le")),
        "empty": ((1,), "STR", bytes(4)),
    }
    contents = {tensor.name: read_region(tensor).tobytes() for tensor in index.tensors}
    again = assemble(mindspore_ckpt.lay_out("x.ckpt", [tensor.spec for tensor in index.tensors]), contents)
    assert again == file.read_bytes()


def test_many_tensors_are_written_as_mindspore_writes_them(ms: Any, tmp_path: Path) -> None:
    specs = [TensorSpec(f"model.layers.{n}.\u5c42.w\u00e9ight", (n % 5 + 1, 130), "BF16") for n in range(500)]
    contents = random_contents(specs)
    file = tmp_path / "x.ckpt"
    assert assemble(mindspore_ckpt.lay_out("x.ckpt", specs), contents) == save(ms, file, specs, contents)
    check_read_back(CKPT, file, specs, contents)


def test_pieces_are_cut_as_mindspore_cuts_them(ms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ms.train.serialization, "SLICE_SIZE", 1)  # KiB
    monkeypatch.setattr(mindspore_ckpt, "PIECE_BYTES", 1024)
    specs = [TensorSpec(f"t{count}", (count,), "BF16") for count in (511, 512, 513, 1024, 1025, 2000)]
    contents = random_contents(specs)
    file = tmp_path / "x.ckpt"
    assert assemble(mindspore_ckpt.lay_out("x.ckpt", specs), contents) == save(ms, file, specs, contents)
    assert [len(tensor.extents) for tensor in mindspore_ckpt.read_index(file).tensors] == [1, 1, 2, 2, 3, 4]
    check_read_back(CKPT, file, specs, contents)
    assert {name: value[2] for name, value in loaded(ms, file).items()} == contents


def test_a_tensor_over_512_mib_is_laid_out_as_mindspore_does(ms: Any, tmp_path: Path) -> None:
    spec = TensorSpec("w", (513, 1024, 1024), "U8")
    file = tmp_path / "x.ckpt"
    ms.save_checkpoint([{"name": "w", "data": ms.Tensor(np.zeros(spec.shape, np.uint8))}], str(file))
    output = mindspore_ckpt.lay_out("x.ckpt", [spec])
    assert output.size == file.stat().st_size
    with file.open("rb") as stream:
        for offset, data in output.fixed:
            stream.seek(offset)
            assert stream.read(len(data)) == data
    (tensor,) = mindspore_ckpt.read_index(file).tensors
    assert (tensor.spec, tensor.extents) == (spec, output.extents["w"])
    assert [extent.size for extent in tensor.extents] == [2**29, 2**20]
    file.chmod(0o600)
    file.unlink()


@pytest.mark.filterwarnings("ignore:getName:DeprecationWarning")  # of MindSpore
def test_the_async_writer_of_mindspore_is_read(ms: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts arrays along their first axis, in pieces of unequal size."""
    monkeypatch.setattr(ms.train.serialization, "SLICE_SIZE", 1)
    specs = [TensorSpec("w", (7, 100), "F32"), TensorSpec("v", (2,), "F32")]
    contents = random_contents(specs)
    file = tmp_path / "x.ckpt"
    ms.save_checkpoint(
        [{"name": s.name, "data": tensor_of(ms, s, contents[s.name])} for s in specs], str(file), async_save=True
    )
    ms.train.serialization._async_save_close()
    sizes = [extent.size for extent in mindspore_ckpt.read_index(file).tensors[0].extents]
    assert len(set(sizes)) > 1
    check_read_back(CKPT, file, specs, contents)


def test_a_crc_of_mindspore_is_checked(ms: Any, tmp_path: Path) -> None:
    specs = all_dtypes_of_mindspore()
    file = tmp_path / "x.ckpt"
    data = save(ms, file, specs, random_contents(specs), crc_check=True)
    mindspore_ckpt.verify_crc(file)
    file.chmod(0o600)
    file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(CorruptError, match="crc32"):
        mindspore_ckpt.verify_crc(file)


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_what_mindspore_encrypts_is_refused(ms: Any, tmp_path: Path, mode: str) -> None:
    specs = [TensorSpec("w", (2, 3), "F32")]
    file = tmp_path / "x.ckpt"
    save(ms, file, specs, random_contents(specs), enc_key=b"0123456789abcdef", enc_mode=mode)
    for path in (file, tmp_path):
        with pytest.raises(UnsafeError, match="is encrypted"):
            registry.open_checkpoint(path)


def test_a_map_parameter_in_the_schema_of_mindspore_is_refused(ms: Any, tmp_path: Path) -> None:
    checkpoint = ms.train.serialization.Checkpoint()
    value = checkpoint.value.add()
    value.tag = "table"
    for kind, data in (("int32", bytes(8)), ("float32", bytes(16)), ("int32", bytes(8))):
        tensor = value.maptensor.tensor.add()
        tensor.dims.extend([2])
        tensor.tensor_type, tensor.tensor_content = kind, data
    file = tmp_path / "x.ckpt"
    file.write_bytes(checkpoint.SerializeToString())
    with pytest.raises(CorruptError, match="the map parameter `table`"):
        mindspore_ckpt.read_index(file)


def test_damaged_ckpt_files_that_are_accepted_hold_what_protobuf_finds(ms: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    specs = [TensorSpec("a", (2, 3), "BF16"), TensorSpec("b.weight", (4,), "F32"), TensorSpec("c", (), "I64")]
    data = assemble(mindspore_ckpt.lay_out(file.name, specs), random_contents(specs))
    compared = 0
    for mutant in mutations(data, 7, 4000):
        rewrite(file, mutant)
        try:
            index = mindspore_ckpt.read_index(file)
        except CkptkitError:
            continue
        found = {tensor.name: read_region(tensor).tobytes() for tensor in index.tensors}
        values = ms.train.serialization.Checkpoint.FromString(mutant).value
        assert found == {value.tag: value.tensor.tensor_content for value in values}
        compared += 1
    assert compared > 100


def test_complex_numbers_of_mindspore_are_refused_by_name(ms: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    ms.save_checkpoint([{"name": "c", "data": ms.Tensor(np.ones(2, np.complex64))}], str(file))
    with pytest.raises(CorruptError, match=r"`c` .* has type `Complex64`"):
        mindspore_ckpt.read_index(file)


def test_a_unified_layout_of_ours_is_loaded_by_mindspore(ms: Any, tmp_path: Path) -> None:
    specs = [TensorSpec(f"t{n}", (n + 1, 3), dtype) for n, dtype in enumerate(("F32", "F16", "F32", "I32"))]
    contents = random_contents(specs)
    outputs, small = registry.lay_out_checkpoint(registry.MINDSPORE_SAFETENSORS, specs, max_shard_bytes=40)
    assert len(outputs) > 1
    for output in outputs:
        (tmp_path / output.name).write_bytes(assemble(output, contents))
    for name, data in small.items():
        (tmp_path / name).write_bytes(data)
    ms.load_distributed_checkpoint(
        network=None,
        predict_strategy=None,
        unified_safetensors_dir=str(tmp_path),
        format="safetensors",
        dst_safetensors_dir=str(tmp_path / "dst"),
        rank_id=0,
    )
    (merged,) = (tmp_path / "dst").rglob("*.safetensors")
    result = ms.load_checkpoint(str(merged), format="safetensors")
    assert {name: bytes(value.get_bytes()) for name, value in result.items()} == contents
