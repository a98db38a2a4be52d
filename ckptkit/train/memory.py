"""How much memory this process had at most during a step, and how much it may have (Linux).

The kernel keeps a high-water mark of resident memory, VmHWM in /proc/self/status; writing 5 to /proc/self/clear_refs
sets it back to what is resident now (proc(5)). Where that is not allowed, the mark of the whole life of the process,
`ru_maxrss`, stands in: it never falls, so that nothing can be seen to need less. What an accelerator holds is not seen.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_SHARE = 0.9
_NO_RESET = (
    "the peak memory of a single step cannot be measured here (`/proc/self/clear_refs` cannot be written): "
    "the most since the start of the process is taken instead, which never falls"
)


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures steps: `start` before one, `peak_bytes` after it. `note` says what it cannot do, or is empty."""

    process: Path
    note: str

    def start(self) -> None:
        """Forget the peak so far."""
        if not self.note:
            _set_back(self.process)

    def peak_bytes(self) -> int:
        """Return the most bytes that were resident since `start`, or, with a note, since the process began."""
        peak = None if self.note else _high_water(self.process)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def open_meter(proc: Path = _PROC) -> Meter:
    """Return a meter of this process, having tried what the system allows."""
    process = proc / "self"
    able = _set_back(process) and _high_water(process) is not None
    return Meter(process, "" if able else _NO_RESET)


def default_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return 90 % of the bytes that this process may have; None where the system does not say."""
    allowed = allowed_bytes(proc, cgroups)
    return None if allowed is None else int(allowed * _SHARE)


def allowed_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the smallest of the machine's memory and the limits of the control groups that this process is in."""
    limits = [_field(proc / "meminfo", "MemTotal"), *(_number(file) for file in _limit_files(proc, cgroups))]
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


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


def _set_back(process: Path) -> bool:
    try:
        fd = os.open(process / "clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"5")
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


def _high_water(process: Path) -> int | None:
    return _field(process / "status", "VmHWM")


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
