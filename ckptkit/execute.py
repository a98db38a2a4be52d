"""Stream a plan with a few workers: jobs from one queue, the first error stops all.

When a value does not fit in a cast, the run goes on without writing, to tell of all such values. What does not live
here: what a worker does with a job (`moves.py`), where bytes go (`Sink`), what is made of what (`plan/`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from math import prod

from ckptkit.cast import CastCount, overflow_error
from ckptkit.formats.base import Sink
from ckptkit.formats.io import FilePool
from ckptkit.mapping.expr import leaves
from ckptkit.moves import Run, Stopped, do_job
from ckptkit.plan import jobs
from ckptkit.plan.jobs import make_jobs
from ckptkit.plan.plan import Plan


def execute(
    plan: Plan,
    sink: Sink,
    *,
    workers: int = 2,
    digests: bool = True,
    skip_files: Collection[int] = frozenset(),
    source_digests: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, CastCount]:
    """Put every output of `plan` into `sink`, but for those in the files numbered in `skip_files`.

    `source_digests` are what the source's manifest promises: a tensor that moves whole is compared with its entry.
    `progress` is told of bytes done. Returns what each cast output lost, by its name; those in `skip_files` are
    counted too. Raises the first error of any worker; CoverageError when a value overflows in a cast, and the sink
    then has only a part.
    """
    with FilePool() as pool:
        run = Run(
            plan, sink, pool, digests, source_digests or {}, progress, jobs.TILES_BYTES // max(2, workers), skip_files
        )
        todo = [job for job in make_jobs(plan) if run.wants(job.outputs[0])]
        queue = iter(todo)
        lock = threading.Lock()

        def work() -> None:
            while not run.stop.is_set():
                with lock:
                    job = next(queue, None)
                if job is None:
                    return
                do_job(run, job)

        _run_workers(run, work, max(1, min(workers, len(todo))))
    if run.overflow.is_set():
        raise _overflow(run)
    return {plan.outputs[number].spec.name: run.counts[number] for number in sorted(run.counts)}


def _overflow(run: Run) -> Exception:
    """Return the error that names each output with values that do not fit, and the tensors it is made of."""
    found = []
    for number in sorted(run.counts):
        output, count = run.plan.outputs[number], run.counts[number]
        if count.overflowed:
            name = ", ".join(dict.fromkeys(leaf.name for leaf in leaves(output.expr)))
            name += f" -> {output.spec.name}" if name != output.spec.name else ""
            found.append((name, prod(output.spec.shape), count))
            target = output.spec.dtype
    return overflow_error(found, target)


def _run_workers(run: Run, work: Callable[[], None], count: int) -> None:
    with ThreadPoolExecutor(count, thread_name_prefix="ckptkit") as threads:
        futures = [threads.submit(work) for _ in range(count)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            run.stop.set()
    errors = [error for f in futures if (error := f.exception()) is not None]
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
