"""The process of a runner: a job's folder and a result's folder in, an exit code out.

What does not live here: what is run (`run_net.py`), and the process that waits (`verification/process.py`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ckptkit.errors import CkptkitError
from ckptkit.formats.disk import disk_error
from ckptkit.verification.runners.job import Job
from ckptkit.verification.runners.net import Net
from ckptkit.verification.runners.run_net import AGAIN, NOT_ENDED, run_net

PARENT = "CKPTKIT_PARENT"  # the variable with the number of the process that waits for the result
_POLL_SECONDS = 0.5


def main(build: Callable[[Job], Net], argv: Sequence[str] | None = None) -> int:
    """Run `build(job)` on the job in the folder argv[0] and write to the folder argv[1].

    An error of ours goes to `error.json` beside the report: what, items, why, hint; then the exit code is its own.
    """
    job_folder, out = map(Path, (sys.argv[1:] if argv is None else argv)[:2])
    if PARENT in os.environ:
        threading.Thread(target=_end_with, args=(int(os.environ[PARENT]),), daemon=True).start()
    try:
        job = Job.read(job_folder)
        run_net(build(job), job, out)
    except CkptkitError as error:
        return _tell(error, out)
    except OSError as error:
        return _tell(disk_error(error, out, why=NOT_ENDED, then=AGAIN), out)
    return 0


def _tell(error: CkptkitError, out: Path) -> int:
    """Leave an error for the process that waits; where the disk is full, its first line goes to stderr."""
    text = {"what": error.what, "items": list(error.items), "why": error.why, "hint": error.hint}
    try:
        (out / "error.json").write_text(json.dumps(text))
    except OSError:
        (out / "error.json").unlink(missing_ok=True)
        print(error.what, file=sys.stderr, flush=True)
    return error.exit_code


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, however it went: nobody waits for the result then."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
