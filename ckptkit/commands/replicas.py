"""Compare what several ranks hold, before anything is written: equal parts must be equal bytes."""

from __future__ import annotations

from collections.abc import Callable

from ckptkit.compare import Comparer, Tally
from ckptkit.errors import CoverageError
from ckptkit.execute import execute
from ckptkit.plan.plan import OutputTensor, Plan, Replica

Progress = Callable[[int, int], Callable[[int], None]]


def compare_replicas(plan: Plan, workers: int, progress: Progress | None) -> None:
    """Raise CoverageError, with figures, when a replica differs from what is read in its place."""
    replicas = plan.needed_replicas
    if not replicas:
        return
    outputs = [
        OutputTensor(replica.shard.spec, 0, replica.expr, replica.inputs, replica.region) for replica in replicas
    ]
    comparison = Plan(tuple(outputs), (), {}, (), (), (), (), (), {})
    sink = Comparer([output.spec for output in outputs], [replica.shard for replica in replicas])
    try:
        execute(
            comparison, sink, workers=workers, digests=False,
            progress=progress(comparison.tensor_bytes, 0) if progress else lambda _: None,
        )  # fmt: skip
        tallies = sink.tallies
    finally:
        sink.close()
    wrong = [_line(replica, tally) for replica, tally in zip(replicas, tallies, strict=True) if not tally.equal]
    if wrong:
        what = "1 part of a tensor differs" if len(wrong) == 1 else f"{len(wrong)} parts of tensors differ"
        raise CoverageError(
            f"{what} between ranks that hold the same part",
            items=wrong,
            why="a merged tensor would take one of them and lose the other; the ranks may be of different steps",
            hint="find out which ranks are right; a wrong strategy file shows itself like this too",
        )


def _line(replica: Replica, tally: Tally) -> str:
    rank, _, name = replica.shard.name.partition(":")
    first = next(iter(replica.inputs)).partition(":")[0]
    figures = "" if tally.max_abs is None else f", by up to {tally.max_abs:g}"
    what = f"1 element of {rank} differs" if tally.changed == 1 else f"{tally.changed} elements of {rank} differ"
    return f"{name}: {what} from {first}{figures}"
