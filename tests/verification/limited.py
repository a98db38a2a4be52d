"""Runs of `ckptkit verify` of which each process has only so much memory: the kernel refuses what goes beyond it.

The limit is RLIMIT_DATA: all memory of a process that is private and writable, touched or not, so it asks for more
than a limit of resident memory would. Anybody may set it, in any container.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from runner_jobs import REPOSITORY

STACK_BYTES = 1 << 20  # of a thread: with the usual 8 MiB, idle threads would be half of what is counted
CORES = 2  # as many threads as these ask for, whatever the machine
_TRY = "import numpy; numpy.ones(300 << 20, numpy.uint8)"
_IMPORT = {
    "torch": "import torch, transformers.models.llama.modeling_llama; torch.ones(64, 64) @ torch.ones(64, 64)",
    "mindspore": (
        "import mindspore as ms, numpy as np; ms.set_context(mode=ms.PYNATIVE_MODE); "
        "x = ms.Tensor(np.ones((64, 64), np.float32)); ms.ops.matmul(x, x).asnumpy()"
    ),
}
_SAY = "; print(next(line for line in open('/proc/self/status') if line.startswith('VmData')).split()[1])"


def is_enforced() -> bool:
    """Say whether the system keeps a process to its limit, and lets one with room for it pass."""
    codes = []
    for num_bytes in (200 << 20, 2 << 30):
        command = [sys.executable, "-c", _TRY]
        codes.append(subprocess.run(command, stderr=subprocess.DEVNULL, preexec_fn=_limiter(num_bytes)).returncode)
    return codes == [1, 0]


def framework_bytes() -> int:
    """Return what the larger of both frameworks takes by itself, once it has computed something."""
    found = []
    for statements in _IMPORT.values():
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", statements + _SAY], env={**os.environ, "GLOG_v": "3"},
            stdout=subprocess.PIPE, text=True, check=True, timeout=120, preexec_fn=_limiter(None),
        )  # fmt: skip
        found.append(1024 * int(done.stdout.split()[-1]))
    return max(found)


def start_verify(folder: Path, *arguments: str, limit: int | None) -> subprocess.Popen[str]:
    """Start `ckptkit verify` in `folder`, of which every process has `limit` bytes."""
    return subprocess.Popen(
        [sys.executable, "-m", "ckptkit", "verify", *arguments, "--no-progress"], cwd=folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, preexec_fn=_limiter(limit),
    )  # fmt: skip


def _limiter(num_bytes: int | None) -> Callable[[], None]:
    def limit() -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        if num_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))

    return limit
