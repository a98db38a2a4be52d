"""What a benchmark ran on, and the environment of those peers that cannot share ours."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

OURS = ("numpy", "xxhash", "safetensors", "torch", "transformers", "mindspore", "mindformers")
PINS = {"torch": "2.13.0", "mergekit": "0.1.5", "transformers": "5.24.0"}  # mergekit needs transformers 5
_ASK = (
    "import json, sys; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
)


def facts(cache: Path, peers_python: Path | None) -> dict[str, str]:
    """Return the machine's facts, in words."""
    meminfo = Path("/proc/meminfo").read_text().split()
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{int(meminfo[1]) / (1 << 20):.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _file_system(cache),
        "cp": _first_line(["cp", "--version"]),
        "python": platform.python_version(),
        "versions": _versions(Path(sys.executable), OURS),
    }
    if peers_python is not None:
        found["versions of the peers' environment"] = _versions(peers_python, tuple(PINS))
    return found


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`: that of the longest mount point above it."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [row for row in mounts if folder.resolve().is_relative_to(row[1])]
    return max(above, key=lambda row: len(row[1]))[2] if above else "unknown"


def _first_line(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def _versions(python: Path, names: tuple[str, ...]) -> str:
    """Return `name version, ...` of those packages that `python` has."""
    found = []
    for name in names:
        asked = subprocess.run([python, "-c", _ASK, name], capture_output=True, text=True)
        if asked.returncode == 0:
            found.append(f"{name} {json.loads(asked.stdout)[name]}")
    return ", ".join(found)


def peers_python(cache: Path, say: Callable[[str], None]) -> Path:
    """Return the Python of the peers' environment; install it when it is not there as pinned.

    pip's own settings (`PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`) decide which build of torch is fetched. Raises
    OSError when the packages cannot be had.
    """
    folder = cache / "peers-venv"
    python, note = folder / "bin" / "python", folder / "pins.json"
    if note.is_file() and json.loads(note.read_text()) == PINS:
        return python
    say("installing the peers' environment (some minutes, 1.6 GB with a CPU build of torch)")
    venv.create(folder, with_pip=True, symlinks=True)
    wanted = [f"{name}=={version}" for name, version in PINS.items()]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(f"pip could not install {', '.join(wanted)}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    note.write_text(json.dumps(PINS))
    return python
