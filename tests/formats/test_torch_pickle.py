"""The contract: whatever torch.save writes, the bytes found here are the bits that torch.load gives.

The files are made by the PyTorch that is installed; `test_torch_damage.py` reads committed ones without it.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_bytes import damaged_files

from ckptkit.errors import CorruptError
from ckptkit.formats.base import FileIndex
from ckptkit.formats.io import read_region
from ckptkit.formats.torch_pickle import read_index
from ckptkit.types import DTYPES, Region, TensorInfo

pytestmark = pytest.mark.frameworks

DTYPE_NAMES = [name for name, dtype in DTYPES.items() if dtype.torch]
KINDS = ("zip", "legacy")
kinds = pytest.mark.parametrize("kind", KINDS)


def save(value: object, file: Path, kind: str, protocol: int = 2) -> Path:
    torch.save(value, file, _use_new_zipfile_serialization=kind == "zip", pickle_protocol=protocol)
    return file


def random_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any bit patterns, NaN payloads and subnormals included (but for bool)."""
    raw = torch.randint(
        0,
        256,
        (math.prod(shape) * DTYPES[dtype].bits // 8,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    raw = raw % 2 if dtype == "BOOL" else raw
    return raw.view(getattr(torch, DTYPES[dtype].torch or "")).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements in C order."""
    tensor = tensor.detach().view(torch.uint8) if tensor.dtype == torch.bool else tensor.detach()
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(file: Path, expected: dict[str, torch.Tensor]) -> FileIndex:
    """Compare names, shapes, dtypes and bits of a file with tensors that torch.load gave."""
    index = read_index(file)
    assert {info.name for info in index.tensors} == set(expected)
    for info in index.tensors:
        tensor = expected[info.name]
        assert info.shape == tuple(tensor.shape)
        assert DTYPES[info.dtype].torch == str(tensor.dtype).removeprefix("torch.")
        assert read_region(info).tobytes() == bits(tensor), info.name
    return index


def loaded(file: Path, state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Return what torch.load gives; the saved tensors where it fails (legacy files with dtypes newer than them)."""
    if kind == "legacy" and any(tensor.dtype in torch.storage._new_dtypes() for tensor in state.values()):
        return state
    return torch.load(file, weights_only=False)


def info_of(index: FileIndex, name: str) -> TensorInfo:
    return next(info for info in index.tensors if info.name == name)


@kinds
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_is_found_bit_for_bit(tmp_path: Path, kind: str, protocol: int) -> None:
    state = {name: random_bits((3, 5), name) for name in DTYPE_NAMES}
    file = save(state, tmp_path / "model.bin", kind, protocol)
    assert len(state) == len(DTYPES) - 1  # all but STR
    assert_same(file, state)
    assert_same(file, loaded(file, state, kind))


def test_a_comparison_with_one_changed_bit_fails(tmp_path: Path) -> None:
    file = save({"w": torch.ones(3)}, tmp_path / "model.bin", "zip")
    with pytest.raises(AssertionError):
        assert_same(file, {"w": torch.tensor([1.0, 1.0, np.nextafter(np.float32(1), np.float32(2))])})


@kinds
def test_views_shared_storages_scalars_and_empty_tensors_are_found(tmp_path: Path, kind: str) -> None:
    base = random_bits((6, 8), "F32")
    state = {
        "base": base,
        "transposed": base.t(),
        "permuted": random_bits((2, 3, 4), "BF16").permute(2, 0, 1),
        "step": base[::2, 1::3],
        "row": base[3],
        "expanded": torch.arange(3).reshape(3, 1).expand(3, 4),
        "expanded scalar": torch.tensor(5).expand(2, 2),
        "overlapping": torch.arange(10).unfold(0, 4, 2),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "element": base[2, 3],
        "empty": torch.empty(0),
        "empty axis": torch.empty(3, 0, 2, dtype=torch.int8),
        "empty view": base[2:2, 3:],
        "one by one": base[2:3, 4:5],
        "twin": base,
    }
    file = save(state, tmp_path / "model.bin", kind)
    index = assert_same(file, torch.load(file, weights_only=True))
    assert info_of(index, "base").extents == info_of(index, "twin").extents
    assert info_of(index, "base").strides is info_of(index, "row").strides is None
    assert info_of(index, "one by one").strides is None
    transposed = info_of(index, "transposed")
    assert transposed.strides == (1, 8) and transposed.extents == info_of(index, "base").extents
    assert info_of(index, "step").extents[0].size == ((4 * 8 + 7) - 1 + 1) * 4
    assert read_region(transposed, Region((2, 1), (5, 3))).tobytes() == bits(base.t()[2:5, 1:3])
    offsets = [info.extents[0].offset for info in index.tensors]
    assert offsets == sorted(offsets)


@st.composite
def views(draw: st.DrawFn) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """Return a dtype, and offset, shape and strides of any view of a storage of up to 4,000 elements."""
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim)))
    strides = tuple(draw(st.lists(st.integers(0, 40), min_size=ndim, max_size=ndim)))
    return draw(st.sampled_from(DTYPE_NAMES)), draw(st.integers(0, 30)), shape, strides


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(views(), min_size=1, max_size=4), kind=st.sampled_from(KINDS), room=st.integers(0, 3))
def test_any_view_of_any_storage_is_found(
    tmp_path: Path, data: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]], kind: str, room: int
) -> None:
    state = {}
    for number, (dtype, offset, shape, strides) in enumerate(data):
        need = offset + 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
        state[f"t{number}"] = random_bits((need + room,), dtype, number).as_strided(shape, strides, offset)
    file = save(state, tmp_path / "view.bin", kind)
    assert_same(file, loaded(file, state, kind))


@kinds
def test_parameters_modules_and_tensors_with_attributes_are_found(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Embedding(5, 2))
    state = model.state_dict()
    assert isinstance(state, OrderedDict) and state._metadata  # written by BUILD
    state["parameter"] = torch.nn.Parameter(torch.ones(2, 2))
    state["buffer"] = torch.nn.Buffer(torch.arange(3.0))
    for name in ("parameter with attribute", "tensor with attribute"):
        state[name] = torch.nn.Parameter(torch.ones(3)) if name.startswith("parameter") else torch.ones(3)
        state[name].note = {"a": [1, 2]}
    file = save(state, tmp_path / "model.bin", kind)
    index = assert_same(file, torch.load(file, weights_only=False))
    assert index.notes == ()


@kinds
def test_a_slice_of_a_large_storage_takes_only_its_own_bytes_and_is_noted(tmp_path: Path, kind: str) -> None:
    table = torch.arange(200_000 * 2, dtype=torch.int32).reshape(200_000, 2)
    file = save({"slice": table[500:532], "other": table[:10], "plain": torch.ones(2)}, tmp_path / "model.bin", kind)
    index = assert_same(file, torch.load(file, weights_only=True))
    assert info_of(index, "slice").extents[0].size == 32 * 2 * 4
    idle = (200_000 - 42) * 2 * 4
    assert index.notes == (f"2 tensors keep a storage larger than themselves ({idle} bytes belong to no tensor)",)


@kinds
def test_slices_that_together_fill_their_storage_are_not_noted(tmp_path: Path, kind: str) -> None:
    fused = torch.ones(6, 2)
    assert read_index(save({"q": fused[:4], "k": fused[4:]}, tmp_path / "model.bin", kind)).notes == ()


@kinds
@pytest.mark.parametrize("key", ["model", "state_dict", "module", "model_state_dict"])
def test_a_wrapped_state_dict_is_unwrapped_and_the_rest_is_noted(tmp_path: Path, kind: str, key: str) -> None:
    state = {"w": torch.ones(2), "n": torch.zeros(1)}
    rest = {"epoch": 3, "lr": 0.1, "tags": ["a", {"b": None}], "big": 2**100, "set": {1, 2}, "bytes": b"\0\xff"}
    rest |= {"dtype": torch.bfloat16, "size": torch.Size([1, 2]), "device": torch.device("cpu"), "j": 1j, (1, 2): 3}
    rest |= {"layout": torch.strided, "counter": Counter("ab"), "frozen": frozenset("a"), "array": bytearray(b"x")}
    file = save({**rest, key: state}, tmp_path / "model.bin", kind)
    index = assert_same(file, state)
    assert index.notes[0].startswith(f"{len(rest)} entries are not tensors and are passed over: `epoch`, `lr`")
    assert index.notes[1] == f"the tensors are those under the key `{key}`"


HIDDEN = {
    "optimizer": {"model": {"w": torch.ones(1)}, "optimizer": {"state": {0: {"m": torch.ones(1)}}}},
    "list": {"w": torch.ones(1), "history": [1, (torch.ones(1),)]},
    "wrapper beside tensors": {"w": torch.ones(1), "model": {"v": torch.ones(1)}},
    "two wrappers": {"model": {"w": torch.ones(1)}, "state_dict": {"w": torch.ones(1)}},
    "nested modules": {"model": {"encoder": {"w": torch.ones(1)}}},
    "storage": {"w": torch.ones(1), "s": [torch.ones(2).untyped_storage()]},
    "key": {"w": torch.ones(1), torch.ones(1): 3},
}


@kinds
@pytest.mark.parametrize("place", HIDDEN)
def test_a_tensor_where_no_name_leads_is_refused_and_not_dropped(tmp_path: Path, kind: str, place: str) -> None:
    with pytest.raises(CorruptError, match="lost"):
        read_index(save(HIDDEN[place], tmp_path / "model.bin", kind))


@kinds
def test_a_tensor_in_an_attribute_is_refused(tmp_path: Path, kind: str) -> None:
    state = {"w": torch.nn.Parameter(torch.ones(1))}
    state["w"].scale = torch.ones(1)
    with pytest.raises(CorruptError, match="attribute"):
        read_index(save(state, tmp_path / "model.bin", kind))


@kinds
@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], 3], ids=["tensor", "list", "int"])
def test_a_file_that_holds_no_dict_is_refused(tmp_path: Path, kind: str, value: object) -> None:
    with pytest.raises(CorruptError, match="not a dict of named tensors"):
        read_index(save(value, tmp_path / "model.bin", kind))


@kinds
def test_a_tensor_whose_name_is_not_text_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CorruptError, match="not text"):
        read_index(save({3: torch.ones(1)}, tmp_path / "model.bin", kind))


def odd_tensors() -> dict[str, torch.Tensor]:
    return {
        "sparse": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "channels": torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8),
        "meta": torch.empty(2, device="meta"),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "complex128": torch.ones(2, dtype=torch.complex128),
        "complex32": torch.ones(2, dtype=torch.complex32),
    }


ODD_WORDS = {
    "sparse": "_rebuild_sparse_tensor",
    "csr": "_rebuild_sparse_tensor",
    "quantized": "_rebuild_qtensor",
    "channels": "_rebuild_qtensor",
    "meta": "without any values",
    "conj": "conjugation",
    "complex128": "complex128",
    "complex32": "complex32",
}


@kinds
@pytest.mark.parametrize("name", ODD_WORDS)
@pytest.mark.filterwarnings("ignore")  # PyTorch calls these features beta, or to be removed
def test_a_tensor_that_is_no_plain_array_is_refused_by_name(tmp_path: Path, kind: str, name: str) -> None:
    file = save({"plain": torch.ones(2), "odd.tensor": odd_tensors()[name]}, tmp_path / "model.bin", kind)
    with pytest.raises(CorruptError, match="not supported") as caught:
        read_index(file)
    assert caught.value.items[0].startswith("`odd.tensor` is ") and ODD_WORDS[name] in caught.value.items[0]


@pytest.mark.filterwarnings("ignore")  # torch.jit is to be removed
def test_a_torchscript_archive_is_refused_by_name(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "model.pt")
    with pytest.raises(CorruptError, match="TorchScript"):
        read_index(tmp_path / "model.pt")


def test_a_zip64_file_of_six_gigabytes_is_found(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    with torch.serialization.skip_data():  # a file with holes: it takes no room
        state = {name: torch.empty(3_000_000_000, dtype=torch.uint8) for name in "ab"}
        save({**state, "c": torch.empty(5)}, file, "zip")
    assert file.stat().st_blocks * 512 < 1_000_000
    marks = {}
    for name in "abc":
        info = info_of(read_index(file), name)
        marks[name] = info.extents[0].offset
        with file.open("r+b") as out:
            out.seek(info.extents[0].offset + info.extents[0].size - 4)
            out.write(name.encode() * 4)
    assert marks["a"] < 2**32 < marks["c"]
    for name, tensor in torch.load(file, mmap=True, weights_only=True).items():
        assert tensor[-4 // tensor.element_size() :].view(torch.uint8).numpy().tobytes() == name.encode() * 4


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of what it finds in damaged files
@pytest.mark.parametrize("kind", ["zip", "pickle"])
def test_a_damaged_file_that_both_can_read_holds_the_same_tensors_for_both(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "damaged.bin"
    agreed = 0
    for damaged in damaged_files(kind, 600, seed=11):
        file.write_bytes(damaged)
        try:
            names = {info.name for info in read_index(file).tensors}
            state = torch.load(file, weights_only=True)
        except Exception:  # noqa: BLE001 - PyTorch raises anything
            continue
        for wrapper in ("state_dict", "model", "module"):
            state = state if names <= set(state) else state[wrapper]
        assert_same(file, {name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
        agreed += 1
    assert agreed > 20


@kinds
def test_an_index_of_many_tensors_takes_little_time(tmp_path: Path, kind: str) -> None:
    state = {f"model.layers.{i}.mlp.gate_proj.weight": torch.full((1,), float(i)) for i in range(10_000)}
    file = save(state, tmp_path / "model.bin", kind)
    started = time.process_time()
    index = read_index(file)
    seconds = time.process_time() - started
    assert len(index.tensors) == 10_000
    assert seconds < 10_000 * 200e-6  # measured: 30 to 60 us a tensor
    for i in (0, 1, 4321, 9999):
        info = info_of(index, f"model.layers.{i}.mlp.gate_proj.weight")
        assert read_region(info).view("float32").tolist() == [float(i)]
