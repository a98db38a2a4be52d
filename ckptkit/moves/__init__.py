"""What a worker does with a job: read, move elements, cast, hash, put; in bounded memory.

What does not live here: the queue of jobs (`execute.py`), how a plan is cut into them (`plan/jobs.py`).
"""

from ckptkit.moves.columns import copy_columns
from ckptkit.moves.copies import copy_batch, copy_ranges
from ckptkit.moves.run import Run, Stopped, compare_promised
from ckptkit.moves.tiles import make_tiles
from ckptkit.plan.jobs import Job

__all__ = ["Run", "Stopped", "compare_promised", "do_job"]


def do_job(run: Run, job: Job, buffer: memoryview) -> None:
    """Do a job; `buffer`, of `jobs.BLOCK_BYTES`, is the worker's own. Raises Stopped when another worker failed."""
    if job.how == "tiles":
        make_tiles(run, job)
    elif job.how == "columns":
        copy_columns(run, job.outputs)
    elif job.how == "batch":
        copy_batch(run, job.outputs, buffer)
    else:
        copy_ranges(run, job.outputs, buffer)
