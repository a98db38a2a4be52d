"""Which processor each thread of MindSpore's CPU backend runs on, where there are two.

Its workers wait by yielding in a loop. On a Linux that takes time from a thread that yields, a worker with nothing to
do then holds up one that computes, for a tick of the scheduler (4 ms) an operator: one layer's gradient took 17 ms or
130, as chance had placed the threads (docs/decisions/0006). An operator is computed by an actor's thread, or by the
caller, together with a kernel's; so the former two get one processor and all others the other. On more processors
nothing is set, and nothing was measured.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

_others: set[int] = set()  # where threads go that share the work of the caller, once they are placed


def place_threads() -> None:
    """Place the calling thread and MindSpore's, which are there after the first update; no bit depends on it."""
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(processors) != 2:  # also when they are placed already
        return
    own = processors[os.getpid() % 2]  # two processes side by side may so share both
    _others.update(set(processors) - {own})
    for task in Path("/proc/self/task").iterdir():
        try:
            is_first = int(task.name) == threading.get_native_id() or _name(task).startswith("ActorThread")
            os.sched_setaffinity(int(task.name), {own} if is_first else _others)
        except OSError:  # a thread that has ended
            continue


def stay_clear() -> None:
    """Move the calling thread off the processor of the one that made it, whose place it has inherited."""
    if _others:
        os.sched_setaffinity(0, _others)


def _name(task: Path) -> str:
    return (task / "comm").read_text(encoding="ascii", errors="replace")
