"""What Linux says of memory: of the machine, of the control groups of this process, and of the process itself.

A system that does not say something gives None for it, and no error. What an accelerator holds is not seen. What does
not live here: what follows from it (`train/memory.py`, `commands/env.py`). Reference: proc(5), cgroups(7).
"""

from __future__ import annotations

import resource
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def machine_bytes(name: str = "MemTotal", proc: Path = PROC) -> int | None:
    """Return the bytes of a field of /proc/meminfo, such as `MemAvailable`."""
    return _field(proc / "meminfo", name)


def group_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the smallest limit of the control groups that this process is in, and of those around them."""
    limits = (_number(file) for file in _limit_files(proc, cgroups))
    return min((limit for limit in limits if limit is not None), default=None)


def allowed_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the smallest of the machine's memory and the limits of the control groups that this process is in."""
    limits = machine_bytes(proc=proc), group_bytes(proc, cgroups)
    return min((limit for limit in limits if limit is not None), default=None)


def marked_bytes(proc: Path = PROC) -> int | None:
    """Return the most bytes that were resident since this process began, or since its mark was set back (VmHWM)."""
    return _field(proc / "self" / "status", "VmHWM")


def peak_bytes(proc: Path = PROC) -> int:
    """Return the most bytes that were resident: since the mark was set back, or, without one, in a whole life.

    The latter, `ru_maxrss`, begins with what the parent process had.
    """
    marked = marked_bytes(proc)
    return life_bytes() if marked is None else marked


def life_bytes() -> int:
    """Return the most bytes that were resident in the life of this process: `ru_maxrss`, which never falls."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit_files(proc: Path, cgroups: Path) -> list[Path]:
    """Return the files that may hold a limit: of its groups and of every group around them, in both versions."""
    files = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (cgroups / "memory", "memory.limit_in_bytes") if controllers else (cgroups, "memory.max")
        parts = [part for part in group.split("/") if part not in ("", ".", "..")]
        files += [root.joinpath(*parts[:depth], name) for depth in range(len(parts) + 1)]
    return files


def _field(file: Path, name: str) -> int | None:
    """Return a field of a file of /proc in bytes (`VmHWM:   1234 kB`), or None."""
    for line in _text(file).splitlines():
        key, _, value = line.partition(":")
        if key == name and value.split()[1:] == ["kB"]:
            return int(value.split()[0]) * 1024
    return None


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
