"""Stream a plan with a few workers: each does its part of the jobs, then helps the others; the first error stops all.

When a value does not fit in a cast, the run goes on without writing, to tell of all such values. What does not live
here: what a worker does with a job (`moves/`), where bytes go (`Sink`), what is made of what (`plan/`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod

from ckptkit.cast import CastCount, overflow_error
from ckptkit.formats.base import Sink
from ckptkit.formats.io import FilePool, extents_digest
from ckptkit.mapping.expr import leaves
from ckptkit.moves import Run, Stopped, compare_promised, do_job
from ckptkit.plan import jobs
from ckptkit.plan.jobs import Job, make_jobs
from ckptkit.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """`counts` is what each cast output lost, by name; `compared` are the source tensors that kept their promise."""

    counts: dict[str, CastCount]
    compared: frozenset[str]


def execute(
    plan: Plan,
    sink: Sink,
    *,
    workers: int = 2,
    digests: bool = True,
    skip_files: Collection[int] = frozenset(),
    source_digests: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Put every output of `plan` into `sink`, but for those in the files numbered in `skip_files`.

    `source_digests` are what the source's manifest promises: each tensor that outputs read is compared with its entry.
    `progress` is told of bytes done. In the outcome, what casts of outputs in `skip_files` lose is counted too. Raises
    the first error of any worker; CoverageError when a value overflows in a cast, and the sink then has only a part.
    """
    with FilePool() as pool:
        run = Run(
            plan, sink, pool, digests, source_digests or {}, progress, jobs.TILES_BYTES // max(2, workers), skip_files
        )
        todo = [job for job in make_jobs(plan) if any(map(run.wants, job.outputs))]
        parts = _parts(todo, max(1, min(workers, len(todo))))
        lock = threading.Lock()

        def work(own: deque[Job]) -> None:
            buffer = memoryview(bytearray(jobs.BLOCK_BYTES))
            while not run.stop.is_set():
                with lock:
                    part = own or max(parts, key=len)
                    job = part.popleft() if part else None
                if job is None:
                    return
                do_job(run, job, buffer)

        _run_workers(run, [partial(work, part) for part in parts])
        if run.digests and not run.overflow.is_set():
            _compare_rest(run, workers)
    if run.overflow.is_set():
        raise _overflow(run)
    counts: dict[str, CastCount] = {}  # of a tensor that ranks share: of all its parts
    for number in sorted(run.counts):
        counts.setdefault(plan.outputs[number].spec.name, CastCount()).add(run.counts[number])
    return Outcome(counts, frozenset(run.compared))


def _compare_rest(run: Run, workers: int) -> None:
    """Read once more the source tensors whose digests are promised and that did not come whole and in order.

    Of a part of a plan, those that other parts read from too are left: `Outcome.compared` does not name them.
    """
    if not run.source_digests:
        return
    rest = {
        info.name: info
        for output in run.plan.outputs
        if output.region is None or run.plan.whole is None
        for info in output.inputs.values()
        if info.name in run.source_digests and info.name not in run.compared
    }
    run.stop.clear()
    queue, lock = iter(rest.values()), threading.Lock()

    def work() -> None:
        while not run.stop.is_set():
            with lock:
                info = next(queue, None)
            if info is None:
                return
            compare_promised(run, info, extents_digest(info.file, info.extents, run.pool))

    _run_workers(run, [work] * max(1, min(workers, len(rest))))


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


def _parts(todo: Sequence[Job], count: int) -> list[deque[Job]]:
    """Return the jobs in parts of neighbours, one for each worker: each begins with files of its own."""
    bounds = [len(todo) * number // count for number in range(count + 1)]
    return [deque(todo[start:stop]) for start, stop in pairwise(bounds)]


def _run_workers(run: Run, works: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(works), thread_name_prefix="ckptkit") as threads:
        futures = [threads.submit(work) for work in works]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            run.stop.set()
    errors = [error for f in futures if (error := f.exception()) is not None]
    for error in errors:
        if not isinstance(error, Stopped):
            raise error
