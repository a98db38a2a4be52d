"""How much memory this process had at most during a step, and how much a step may take (Linux).

The kernel keeps a high-water mark of resident memory, VmHWM in /proc/self/status; writing 5 to /proc/self/clear_refs
sets it back to what is resident now (proc(5)). Where that is not allowed, the mark of the whole life of the process,
`ru_maxrss`, stands in: it never falls, so that nothing can be seen to need less. What does not live here: reading what
the kernel says (`ckptkit/memory.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckptkit.memory import CGROUPS, PROC, allowed_bytes, life_bytes, marked_bytes, peak_bytes

_SHARE = 0.9
_NO_RESET = (
    "the peak memory of a single step cannot be measured here (`/proc/self/clear_refs` cannot be written): "
    "the most since the start of the process is taken instead, which never falls"
)


@dataclass(frozen=True, slots=True)
class Meter:
    """Measures steps: `start` before one, `peak_bytes` after it. `note` says what it cannot do, or is empty."""

    proc: Path
    note: str

    def start(self) -> None:
        """Forget the peak so far."""
        if not self.note:
            _set_back(self.proc)

    def peak_bytes(self) -> int:
        """Return the most bytes that were resident since `start`, or, with a note, since the process began."""
        return life_bytes() if self.note else peak_bytes(self.proc)


def open_meter(proc: Path = PROC) -> Meter:
    """Return a meter of this process, having tried what the system allows."""
    able = _set_back(proc) and marked_bytes(proc) is not None
    return Meter(proc, "" if able else _NO_RESET)


def default_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return 90 % of the bytes that this process may have; None where the system does not say."""
    allowed = allowed_bytes(proc, cgroups)
    return None if allowed is None else int(allowed * _SHARE)


def _set_back(proc: Path) -> bool:
    try:
        fd = os.open(proc / "self" / "clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"5")
        finally:
            os.close(fd)
    except OSError:
        return False
    return True
