"""Run one side in a process of its own, in a working folder of its own, and take what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import IO

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, InternalError, ResourceError, UsageError
from ckptkit.verification.runners.job import Job
from ckptkit.verification.runners.main import PARENT
from ckptkit.verification.runners.run_net import STEP

_SHOWN_LINES = 12
_KINDS: dict[int, type[CkptkitError]] = {
    kind.exit_code: kind for kind in (UsageError, CoverageError, ResourceError, CorruptError, InternalError)
}


def run_process(runner: str, job: Job, out: Path, step: Callable[[str], None]) -> None:
    """Run `job` with a runner, which writes to the folder `out`; `step` is told of each thing done.

    Raises the runner's own error, and ResourceError when it was killed or ended without a report.
    """
    with tempfile.TemporaryDirectory(prefix="ckptkit-verify-") as name:
        folder = Path(name)
        (folder / "work").mkdir()
        job.write(folder)
        command = [sys.executable, "-m", f"ckptkit.verification.runners.{runner}", str(folder), str(out.absolute())]
        with subprocess.Popen(
            command, cwd=folder / "work", env=_environment(folder, stream=job.stream), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        ) as process:  # fmt: skip
            assert process.stderr is not None
            said: list[str] = []
            listener = Thread(target=_listen, args=(process.stderr, said, step), daemon=True)
            try:
                listener.start()
                code = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                if listener.is_alive():
                    listener.join()
                raise
            listener.join()
    if code:
        raise error_of(runner, code, out, said)


def _environment(folder: Path, *, stream: bool) -> dict[str, str]:
    """Return the environment of a runner: it must find this very package, whatever its working folder."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "LOCAL_DEFAULT_PATH": str(folder / "work"),
        PARENT: str(os.getpid()),
    }
    removed = ("OPENBLAS_NUM_THREADS",)  # ours, for a process that multiplies nothing
    if stream:  # else glibc keeps what a freed block had, for the next one that may not fit in
        own["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    return {key: value for key, value in os.environ.items() if key not in removed} | own


def _listen(stream: IO[str], said: list[str], step: Callable[[str], None]) -> None:
    for line in stream:
        if line.startswith(STEP):
            step(line[len(STEP) :].rstrip())
        elif line.strip():
            said.append(line.rstrip())
            del said[:-_SHOWN_LINES]


def error_of(runner: str, code: int, out: Path, said: Sequence[str]) -> CkptkitError:
    """Return what a runner that ended with `code` says went wrong; `said` are its last lines on stderr."""
    file = out / "error.json"
    if file.is_file():
        told = json.loads(file.read_text())
        kind = _KINDS.get(code, CkptkitError)
        return kind(told["what"], items=told["items"], why=told["why"], hint=told["hint"])
    if code < 0:
        return ResourceError(
            f"the {runner} runner was killed by signal {-code}",
            items=said,
            why="the system does that to a process that takes more memory than there is",
            hint="run this side on a larger machine with `--dump`, and the other one with `--against`",
        )
    return ResourceError(
        f"the {runner} runner ended with {code} and left no report",
        items=said[-5:],
        hint="its last lines may tell why; `ckptkit env` shows the versions that were run together",
    )
