"""The contract: a pickle that names anything but tensors and plain containers is refused by that name, and never runs.

Why it holds: `torch_unpickler` interprets a closed list of opcodes over inert values, and calls only the functions of
its own table.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from torch_bytes import HOOKS, call, dict_of, integer, legacy, named, storage, tensor, text, tuple_of, whole, write_zip

from ckptkit.errors import CkptkitError, CorruptError, UnsafeError
from ckptkit.formats import torch_unpickler
from ckptkit.formats.torch_pickle import read_index

STORAGES = {"0": bytes(24)}


class Running:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.reduced


def body(value: object, protocol: int) -> bytes:
    """Return the opcodes that push `value`, without the pickle's first and last."""
    return pickle.dumps(value, protocol)[2:-1]


def refusal(file: Path) -> str:
    with pytest.raises(UnsafeError) as caught:
        read_index(file)
    assert caught.value.exit_code == 5 and "sandbox" in caught.value.hint
    return str(caught.value)


def payloads(marker: Path) -> dict[str, tuple[object, str]]:
    """Return values whose unpickling makes `marker`, and the name that a refusal must give."""
    make = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    return {
        "os.system": (Running(os.system, f"touch {marker}"), "posix.system"),
        "eval": (Running(eval, make), "builtins.eval"),
        "exec": (Running(exec, make), "builtins.exec"),
        "open": (Running(open, str(marker), "w"), "io.open"),
        "Path.touch": (Running(pathlib.Path.touch, str(marker)), "pathlib.Path.touch"),
        "Path.touch of a Path": (Running(pathlib.Path.touch, Path(marker)), "pathlib.Path.touch"),
        "os.mkdir": (Running(os.mkdir, str(marker)), "posix.mkdir"),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", payloads(Path("marker")))
def test_a_pickle_that_calls_a_function_is_refused_by_its_name_and_does_not_run(
    tmp_path: Path, kind: str, protocol: int
) -> None:
    marker = tmp_path / "marker"
    value, name = payloads(marker)[kind]
    pickled = whole(dict_of({"w": tensor(), "x": body(value, protocol)}), protocol)
    (tmp_path / "legacy.bin").write_bytes(legacy(pickled, {"0": (6, bytes(24))}))
    (tmp_path / "raw.bin").write_bytes(pickle.dumps(value, protocol))
    for file in (write_zip(tmp_path / "model.bin", pickled, STORAGES), tmp_path / "legacy.bin", tmp_path / "raw.bin"):
        message = refusal(file)
        assert f"{file.name}` asks to run `{name}` when it is loaded" in message
    assert not marker.exists()


@pytest.mark.parametrize("kind", payloads(Path("marker")))
def test_the_same_payload_does_run_in_pythons_own_unpickler(tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "marker"
    result = pickle.loads(pickle.dumps(payloads(marker)[kind][0], 4))
    getattr(result, "close", int)()
    assert marker.exists()


ODD = {
    "INST": (b"(" + text("true") + b"ios\nsystem\n", "os.system"),
    "OBJ": (b"(" + named("os", "system") + text("true") + b"o", "os.system"),
    "NEWOBJ": (named("subprocess", "Popen") + tuple_of(text("true")) + b"\x81", "subprocess.Popen"),
    "NEWOBJ_EX": (named("subprocess", "Popen") + b")}\x92", "subprocess.Popen"),
    "NEWOBJ of a known class": (named("torch", "Size") + b")\x81", "torch.Size"),
    "EXT1": (b"\x82\x07", "copyreg extension 7"),
    "EXT2": (b"\x83\x07\x01", "copyreg extension 263"),
    "EXT4": (b"\x84\x07\x00\x01\x00", "copyreg extension 65543"),
    "STACK_GLOBAL": (text("torch.storage.") + text("__globals__") + b"\x93", "torch.storage..__globals__"),
    "attribute of a known function": (
        text("torch._utils") + text("_rebuild_tensor_v2.__globals__") + b"\x93",
        "torch._utils._rebuild_tensor_v2.__globals__",
    ),
    "known name split elsewhere": (named("torch", "_utils._rebuild_tensor_v2"), "torch._utils._rebuild_tensor_v2"),
    "known module with a dot": (named("collections.", "OrderedDict"), "collections..OrderedDict"),
    "getattr of a known class": (
        call(named("__builtin__", "getattr"), named("torch", "Size"), text("__init__")),
        "torch.Size.__init__",
    ),
    "getattr chain": (
        call(
            named("builtins", "getattr"),
            call(named("builtins", "getattr"), named("torch", "serialization"), text("os")),
            text("system"),
        )
        + tuple_of(text("true"))
        + b"R",
        "torch.serialization.os.system",
    ),
    "getattr without a name": (call(named("builtins", "getattr"), text("a"), text("b")), "builtins.getattr"),
    "BUILD on a class": (named("torch", "Size") + b"}b", "torch.Size.__setstate__"),
    "BUILD on a foreign class": (named("os", "environ") + b"}b", "os.environ"),
    "BUILD on a tensor": (tensor() + b"}b", "torch.Tensor.__setstate__"),
    "torch.load": (call(named("torch", "load"), text("other.bin")), "torch.load"),
    "storage in bytes": (call(named("torch.storage", "_load_from_bytes"), text("x")), "torch.storage._load_from_bytes"),
    "numpy": (named("numpy.core.multiarray", "_reconstruct"), "numpy.core.multiarray._reconstruct"),
    "a call of a dtype": (call(named("torch", "float32")), "torch.float32"),
    "a foreign tensor class": (
        call(
            named("torch._tensor", "_rebuild_from_type_v2"),
            named("torch._utils", "_rebuild_tensor_v2"),
            named("mylib", "MyTensor"),
            tuple_of(storage(), integer(0), tuple_of(), tuple_of(), b"\x89", HOOKS),
            b"}",
        ),
        "mylib.MyTensor",
    ),
    "a foreign storage class": (
        tuple_of(text("storage"), named("mylib", "Storage"), text("0"), text("cpu"), integer(6)) + b"Q",
        "mylib.Storage",
    ),
    "a module saved whole": (
        tuple_of(text("module"), named("mylib", "Net"), text("net.py"), text("import os")) + b"Q",
        "mylib.Net",
    ),
    "a class as a value": (named("argparse", "Namespace"), "argparse.Namespace"),
    "terminal control codes": (named("os\x1b[31m", "x"), "os\\x1b[31m.x"),
}


@pytest.mark.parametrize("kind", ODD)
def test_every_other_way_to_reach_code_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    opcodes, name = ODD[kind]
    file = write_zip(tmp_path / "model.bin", whole(dict_of({"w": tensor(), "x": opcodes}), 4), STORAGES)
    assert f"`{name}` when it is loaded" in refusal(file)


def test_every_call_of_a_pickle_is_listed(tmp_path: Path) -> None:
    value = [Running(os.system, "true"), Running(os.getcwd), Running(os.system, "true")]
    file = write_zip(tmp_path / "model.bin", whole(dict_of({"x": body(value, 4)}), 4), {})
    with pytest.raises(UnsafeError, match=r"asks to run `posix\.system`") as caught:
        read_index(file)
    assert caught.value.items == ("`posix.getcwd`", "`posix.system`")


def test_endless_foreign_calls_end_early(tmp_path: Path) -> None:
    opcodes = named("os", "x") + b")R" * 100_000
    assert len(refusal(write_zip(tmp_path / "model.bin", whole(opcodes), {}))) < 5000


def test_the_refusals_do_not_come_from_the_tensor_beside_them(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "model.bin", whole(dict_of({"w": tensor(), "x": b"N"})), STORAGES)
    assert [info.name for info in read_index(file).tensors] == ["w"]


BAD = {
    "protocol 0 text": b"I1\n",
    "LONG4": b"\x8b\x04\x00\x00\x00\x01\x00\x00\x00",
    "persistent text": b"P1\n",
    "stack underflow": b"R",
    "tuple underflow": b"\x87",
    "mark underflow": b"t",
    "mark above the stack": text("a") + b"(s" + b"t",
    "unknown memo": b"h\x09",
    "calls text": call(text("os.system"), text("true")),
    "calls with a list": named("torch", "Size") + b"]R",
    "appends to a dict": b"}Na",
    "items in a list": b"]NNs",
    "odd items": b"}(Nu",
    "text that is not UTF-8": b"X\x01\x00\x00\x00\xff",
    "name that is not UTF-8": b"c\xff\nx\n",
    "endless name": b"c" + b"a" * 5000,
    "global named by a number": integer(1) + integer(2) + b"\x93",
    "protocol 6": b"\x80\x06",
    "two objects": b"N.",
    "a key twice": dict_of({"a": b"N"})[:-1] + text("a") + b"Nu",
    "storage of another kind": tuple_of(text("outside"), text("x")) + b"Q",
    "storage that is a name": text("0") + b"Q",
    "storage of a negative size": tensor(storage(count=-6)),
    "storage of a huge size": tensor(storage(count=1 << 70)),
    "storage of two sizes": tensor(storage(count=5), 0, (5,), (1,)),
    "storage of two types": tensor(storage(kind="IntStorage")),
    "tensor without a storage": tensor(text("0")),
    "offset below zero": tensor(None, -1),
    "length below zero": tensor(None, 0, (-2, 3)),
    "stride below zero": tensor(None, 5, (2, 3), (-3, -1)),
    "strides too few": tensor(None, 0, (2, 3), (1,)),
    "65 axes": tensor(None, 0, (1,) * 65, (1,) * 65),
    "too few arguments": call(named("torch._utils", "_rebuild_tensor_v2"), storage()),
    "dtype that is none": call(
        named("torch._utils", "_rebuild_tensor_v3"),
        *(storage(), integer(0), tuple_of(), tuple_of(), b"\x89", HOOKS, text("float32")),
    ),
    "parameter of nothing": call(named("torch._utils", "_rebuild_parameter"), b"N", b"\x89", HOOKS),
    "rebuild by a rebuild": call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        *(named("torch._tensor", "_rebuild_from_type_v2"), named("torch", "Tensor"), b")", b"}"),
    ),
    "dict of a number": call(named("collections", "OrderedDict"), integer(3)),
    "dict of no pairs": call(named("collections", "OrderedDict"), b"](Ne"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_damaged_pickle_is_an_error_that_names_the_file(tmp_path: Path, kind: str) -> None:
    file = write_zip(tmp_path / "model.bin", whole(dict_of({"w": tensor(), "x": BAD[kind]}), 4), STORAGES)
    with pytest.raises(CorruptError, match=r"model\.bin") as caught:
        read_index(file)
    assert not isinstance(caught.value, UnsafeError)


def nested(depth: int) -> bytes:
    return b")" + b"\x85" * depth


def doubled(levels: int) -> bytes:
    """Return pairs of pairs of pairs ..., each pair twice the same one: 2 ** levels leaves."""
    return b"]q\x00" + b"".join(b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(levels))


def copies(items: int, times: int) -> bytes:
    """Return one list of pairs, and a dict made of it over and over."""
    pairs = b"](" + b"".join(integer(i) + b"N\x86" for i in range(items)) + b"eq\x00"
    return tuple_of(pairs, *[named("collections", "OrderedDict") + b"h\x00\x85R"] * times)


BOMBS = {
    "memo index": (b"Nr\xff\xff\xff\xff", CorruptError),
    "memo indices": (b"".join(b"Nr" + i.to_bytes(4, "little") for i in range(1 << 16, 1 << 26, 1 << 16)), CorruptError),
    "text of 2 ** 62 bytes": (b"\x8d" + (1 << 62).to_bytes(8, "little"), CorruptError),
    "bytes of 2 ** 62 bytes": (b"\x8e" + (1 << 62).to_bytes(8, "little"), CorruptError),
    "bytearray of 2 ** 62 bytes": (b"\x96" + (1 << 62).to_bytes(8, "little"), CorruptError),
    "frame of 2 ** 62 bytes": (b"\x95" + (1 << 62).to_bytes(8, "little") + b"N", None),
    "very many marks": (b"(" * 300_000, CorruptError),
    "very many nested tuples": (nested(300_000), None),
    "very many nested tuples as a key": (b"}" + nested(300_000) + b"Ns", None),
    "very many nested lists": (b"]" * 300_000 + b"a" * 299_999, None),
    "a list in itself": (b"]q\x00h\x00a", None),
    "colliding ints as keys": (
        b"}(" + b"".join(integer(i * ((1 << 61) - 1)) + b"N" for i in range(1, 20_000)) + b"u",
        None,
    ),
    "pairs doubled 200 times": (doubled(200), None),
    "a dict copied very often": (copies(10_000, 300), CorruptError),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_takes_little_time_and_memory(tmp_path: Path, kind: str) -> None:
    opcodes, error = BOMBS[kind]
    pickled = whole(dict_of({"w": tensor(), "x": opcodes}), 4)
    (tmp_path / "legacy.bin").write_bytes(legacy(pickled, {"0": (6, bytes(24))}))
    for file in (write_zip(tmp_path / "model.bin", pickled, STORAGES), tmp_path / "legacy.bin"):
        started = time.process_time()
        if error is None:
            assert [info.name for info in read_index(file).tensors] == ["w"]
        else:
            with pytest.raises(error):
                read_index(file)
        assert time.process_time() - started < 20


def test_memory_grows_with_the_pickle_and_not_with_what_it_claims(tmp_path: Path) -> None:
    for kind in (
        "memo index",
        "memo indices",
        "text of 2 ** 62 bytes",
        "frame of 2 ** 62 bytes",
        "pairs doubled 200 times",
    ):
        file = write_zip(tmp_path / "model.bin", whole(dict_of({"w": tensor(), "x": BOMBS[kind][0]}), 4), STORAGES)
        tracemalloc.start()
        try:
            with contextlib.suppress(CkptkitError):
                read_index(file)
            assert tracemalloc.get_traced_memory()[1] < 4_000_000
        finally:
            tracemalloc.stop()


def test_the_number_of_operations_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_unpickler, "MAX_OPCODES", 20)
    file = write_zip(tmp_path / "model.bin", whole(dict_of({"w": tensor()})), STORAGES)
    with pytest.raises(CorruptError, match="more than 20 operations"):
        read_index(file)


def test_importing_the_reader_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, ckptkit.formats.torch_pickle; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
