"""`ckptkit env`: what is installed and on what machine, against the versions that were run together.

Versions come from the packages' metadata: no framework is imported. What is tested, and the traps, are data:
`ckptkit/tested.toml`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from ckptkit import __version__
from ckptkit.memory import group_bytes, machine_bytes
from ckptkit.report import Report, human_bytes

PACKAGES = ("numpy", "safetensors", "torch", "mindspore", "mindformers", "transformers")
DEVICES = (
    ("Ascend NPU", "davinci[0-9]*", "npu-smi"),
    ("NVIDIA GPU", "nvidia[0-9]*", "nvidia-smi"),
)


def env(folder: str | Path = ".") -> Report:
    """Describe this environment and return a report; `folder` is where free space is looked for.

    A trap that applies here is named with its remedy. The exit code is 0 in any case: none of the traps is about
    ckptkit's own work.
    """
    data = tomllib.loads((resources.files("ckptkit") / "tested.toml").read_text())
    others = {
        name for trap in data["trap"] for name in (trap["package"], *trap.get("with", ()), *trap.get("without", ()))
    }
    versions = {name: version for name in {*PACKAGES, *others} if (version := _version(name)) is not None}
    traps = [trap for trap in data["trap"] if applies(trap, versions)]
    report = Report("env", f"ckptkit {__version__}, python {platform.python_version()}, {platform.platform()}")
    for name in PACKAGES:
        report.add("versions", f"{name} {versions.get(name, '(not installed)')}")
    report.add("tested", compare_with_tested(versions, data["tested"]))
    for trap in traps:
        report.add("trap", f"{trap['package']} {versions[trap['package']]}: {trap['what']}")
        report.add("trap", f"  remedy: {trap['remedy']}")
    if not traps:
        report.add("traps", "none of the known ones applies here")
    machine = _machine(Path(folder))
    report.add("cores", f"{machine['cores']}")
    report.add("memory", memory_text(machine))
    report.add("space", f"{human_bytes(machine['free_bytes'])} free in the working folder")
    devices = find_devices()
    for name, found in devices.items():
        report.add("devices", _device_text(name, found))
    report.data = {
        "ckptkit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: versions.get(name) for name in PACKAGES},
        "tested": data["tested"],
        "traps": [{k: trap[k] for k in ("package", "what", "remedy")} for trap in traps],
        **machine,
        "devices": devices,
    }
    return report


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without zeros at the end: `2.13.0+cpu` gives (2, 13)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(n) for n in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def applies(trap: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Say whether a trap of `tested.toml` applies where `versions` are installed."""
    if trap["package"] not in versions:
        return False
    here = release(versions[trap["package"]])
    return (
        ("at_least" not in trap or here >= release(trap["at_least"]))
        and ("below" not in trap or here < release(trap["below"]))
        and ("exactly" not in trap or here == release(trap["exactly"]))
        and all(name in versions for name in trap.get("with", ()))
        and not any(name in versions for name in trap.get("without", ()))
    )


def compare_with_tested(versions: Mapping[str, str], tested: Sequence[Mapping[str, str]]) -> str:
    """Say how the installed versions stand to the sets that were run together; only what is installed counts."""
    known = {name for row in tested for name in row}
    here = {name: release(version) for name, version in versions.items() if name in known}
    if not here.keys() & {"mindspore", "torch"}:
        return "no framework is installed; ckptkit converts without one"
    best = min(tested, key=lambda row: (len(_unlike(row, here)), -len(row.keys() & here)))
    other = [f"{name} {best[name]}" for name in _unlike(best, here)]
    if other:
        return f"not run together in these versions; the nearest tested set has {', '.join(other)}"
    same = [f"{name} {version}" for name, version in best.items() if name in here]
    return f"these were run together: {', '.join(same)}"


def _unlike(row: Mapping[str, str], here: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name, version in row.items() if name in here and here[name] != release(version)]


def find_devices(root: Path = Path("/dev")) -> dict[str, dict[str, Any]]:
    """Return, for each kind of accelerator, its device files under `root` and the path of its tool, or None."""
    return {
        name: {"files": sorted(p.name for p in root.glob(pattern)), "tool": shutil.which(tool)}
        for name, pattern, tool in DEVICES
    }


def _device_text(name: str, found: Mapping[str, Any]) -> str:
    if not found["files"] and found["tool"] is None:
        return f"{name}: none"
    tool = Path(found["tool"]).name if found["tool"] else "no tool on the path"
    return f"{name}: {len(found['files'])} ({', '.join(found['files']) or 'no device file'}), {tool}"


def _machine(folder: Path) -> dict[str, Any]:
    """Return cores, bytes of memory (None where the system does not say) and free bytes under `folder`."""
    total, limit = machine_bytes(), group_bytes()
    return {
        "cores": _cores(),
        "memory_bytes": total,
        "memory_available_bytes": machine_bytes("MemAvailable"),
        "memory_limit_bytes": limit if limit is not None and (total is None or limit < total) else None,
        "free_bytes": shutil.disk_usage(folder).free,
    }


def _cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_text(machine: Mapping[str, Any]) -> str:
    """Say in words what `machine` holds of memory."""
    if machine["memory_bytes"] is None:
        return "not known on this system"
    text = human_bytes(machine["memory_bytes"])
    if machine["memory_available_bytes"] is not None:
        text += f", {human_bytes(machine['memory_available_bytes'])} available"
    if machine["memory_limit_bytes"] is not None:
        text += f", limited to {human_bytes(machine['memory_limit_bytes'])}"
    return text
