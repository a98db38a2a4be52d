"""MindSpore on one device, in float32 and in one order of arithmetic, before a network is made."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.verification.runners.devices import parse_device
from ckptkit.verification.runners.frameworks import framework

_TARGETS = {"cpu": "CPU", "cuda": "GPU", "ascend": "Ascend"}


def mindspore_device(name: str, *, option: str = "--device") -> tuple[str, int]:
    """Return MindSpore's name of the device (`CPU`, `GPU`, `Ascend`) and its number; UsageError for no device.

    `option` is what the user calls the setting.
    """
    kind, index = parse_device(name, option=option)
    return _TARGETS[kind], index


def be_exact(mindspore: Any, target: str, index: int, *, graph: bool = False) -> dict[str, Any]:
    """Choose the device and the mode, switch off all that is less exact than float32; return what was set."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE if graph else mindspore.PYNATIVE_MODE)
    try:
        mindspore.set_device(target, index)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"MindSpore {mindspore.__version__} finds no device `{target}` {index} on this machine",
            why=str(error).strip().partition("\n")[0],
            hint="`cpu` runs everywhere",
        ) from error
    if target == "CPU" and not graph:  # its pipeline of launches costs milliseconds an operator on few cores
        mindspore.runtime.launch_blocking()
    if mindspore.get_context("deterministic") != "ON":  # it may be set once a process
        mindspore.set_deterministic(True)
    settings = {
        "dtype": "float32",
        "mode": "graph" if graph else "pynative",
        "attention": "eager",
        "dropout": "off",
        "cache": "off",
        "deterministic": mindspore.get_context("deterministic") == "ON",
    }
    if target == "GPU":
        precision = mindspore.device_context.gpu.op_precision
        precision.matmul_allow_tf32(False)
        precision.conv_allow_tf32(False)
        settings["tf32"] = "off"
    if target == "Ascend":
        precision = mindspore.device_context.ascend.op_precision
        precision.matmul_allow_hf32(False)
        precision.conv_allow_hf32(False)
        settings["hf32"] = "off"
    return settings


def uninitialised() -> AbstractContextManager[Any]:
    """Return a context in which networks get no random weights, where MindSpore has one: all are loaded anyway."""
    make = getattr(framework("mindspore.nn.utils"), "no_init_parameters", nullcontext)
    context: AbstractContextManager[Any] = make()
    return context
