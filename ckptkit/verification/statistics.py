"""What the numbers of each parameter look like, and which look wrong: every element is read once, in bounded memory.

A thread holds one block of a tensor and a few small float64 arrays, whatever the tensor's size and however it is cut
over ranks. What does not live here: the loss (`sanity.py`), comparing two checkpoints (`weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import exp, inf, log, prod, sqrt
from threading import Event
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckptkit.compare import boxes
from ckptkit.formats.file_pool import FilePool
from ckptkit.formats.io import read_region
from ckptkit.types import DTYPES, Region, item_bytes
from ckptkit.values import Floats, widener
from ckptkit.verification.runners.job import Stored

Array = NDArray[Any]

BLOCK_BYTES = 256 * 1024
CHUNK = 16384  # elements: their float64 forms stay in the processor's cache
MOST_THREADS = 16
FAR = 8.0  # robust z-score; in a right model of 30 layers the largest was 6.6, of its first layer
FAR_RATIO = 2.0  # and that far from the median, where all other layers are nearly equal
FEWEST_LAYERS = 8  # of which a spread can be told
_LEAST_SPREAD = 0.01  # of the logarithms of deviations: below it, a z-score would make much of nothing
_MANY_ZEROS = 0.05

Severity = Literal["wrong", "suspect", "note"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """One parameter. `mean`, `std` (of the population), `low` and `high` are of its finite elements, None where there
    are none or the dtype is no number; `nan`, `inf` and `zeros` count elements. `digest` is the xxh3-128 of its bytes
    in C order, however it is cut over ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None
    nan: int
    inf: int
    zeros: int
    digest: str

    @property
    def constant(self) -> float | None:
        """The value that all elements have; None when they differ, or when there are fewer than two."""
        same = self.elements > 1 and self.low == self.high and not (self.nan or self.inf)
        return self.low if same else None

    @property
    def role(self) -> Literal["matrix", "norm", "bias"]:
        """What a parameter is, by its name and axes: a norm is what has one axis and is no bias."""
        if self.name.endswith(("bias", "beta")):
            return "bias"
        return "matrix" if len(self.shape) > 1 else "norm"


@dataclass(frozen=True, slots=True)
class Strange:
    """Parameters that look odd, for one reason. `wrong`: no right checkpoint has that; `suspect`: it would explain a
    bad loss; `note`: neither, but worth knowing."""

    names: tuple[str, ...]
    severity: Severity
    kind: str
    text: str


def measure(
    tensors: Sequence[Stored], *, workers: int = 2, advance: Callable[[int], None] = lambda _: None
) -> list[Statistics]:
    """Return the statistics of each tensor, in order; `advance` is told of bytes read.

    Raises CorruptError when a file has shrunk, ResourceError when it cannot be read.
    """
    stop = Event()

    def work(tensor: Stored) -> Statistics | None:
        return _measure(tensor, pool, advance, stop)

    with FilePool() as pool, ThreadPoolExecutor(max(1, min(workers, MOST_THREADS))) as threads:
        try:
            found = list(threads.map(work, tensors))
        finally:
            stop.set()  # after an error, or a Ctrl-C, nobody wants the rest
    return [row for row in found if row is not None]


@dataclass(slots=True)
class _Figures:
    """Figures in the making; mean and sum of squared deviations `square` are joined as Chan, Golub and LeVeque (1979)
    do, so that nothing is lost where the mean is far from zero."""

    finite: int = 0
    mean: float = 0.0
    square: float = 0.0
    low: float = inf
    high: float = -inf
    nan: int = 0
    inf: int = 0
    zeros: int = 0

    def add(self, values: Floats) -> None:
        low, high = float(values.min()), float(values.max())  # NaN where one element is
        if not (low > -inf and high < inf):
            nan = int(np.isnan(values).sum())
            finite = values[np.isfinite(values)]
            self.nan += nan
            self.inf += values.size - finite.size - nan
            if not finite.size:
                return
            values, low, high = finite, float(finite.min()), float(finite.max())
        self.zeros += values.size - int(np.count_nonzero(values))
        mean = low if low == high else float(values.mean())
        from_mean = values - mean
        square = float(np.square(from_mean, out=from_mean).sum())
        both, gap = self.finite + values.size, mean - self.mean
        self.square += square + gap * gap * self.finite * values.size / both
        self.mean += gap * values.size / both
        self.finite = both
        self.low, self.high = min(self.low, low), max(self.high, high)


def _measure(tensor: Stored, pool: FilePool, advance: Callable[[int], None], stop: Event) -> Statistics | None:
    figures, digest = _Figures(), xxhash.xxh3_128()
    widen = widener(tensor.dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # float64 values may be too large to square
        for block in _blocks(tensor, pool):
            if stop.is_set():
                return None
            flat = block.reshape(-1)
            digest.update(flat.view(np.uint8).data)
            for start in range(0, flat.size if widen else 0, CHUNK):
                assert widen is not None
                figures.add(widen(flat[start : start + CHUNK]))
            advance(flat.nbytes)
    count = figures.finite
    std = 0.0 if figures.low == figures.high else sqrt(figures.square / count) if count else None
    mean, low, high = (figures.mean, figures.low, figures.high) if count else (None, None, None)
    return Statistics(
        tensor.name, tensor.shape, tensor.dtype, prod(tensor.shape), mean, std, low, high, figures.nan, figures.inf,
        figures.zeros, digest.hexdigest(),
    )  # fmt: skip


def _blocks(tensor: Stored, pool: FilePool) -> Iterator[Array]:
    """Yield all elements in C order, in boxes of at most BLOCK_BYTES, each put together from the pieces in it."""
    most = BLOCK_BYTES // item_bytes(tensor.dtype)
    row = prod(tensor.shape[1:])
    count = most // row * row if 0 < row <= most else most
    for first in range(0, prod(tensor.shape), count):
        for box in boxes(tensor.shape, first, min(count, prod(tensor.shape) - first)):
            out = np.empty(box.shape, DTYPES[tensor.dtype].carrier)
            for piece in tensor.pieces:
                common = Region.whole(piece.source.shape).shifted(piece.start).common(box)
                if common.size:
                    source = common.relative_to(piece.start).shifted(piece.source.start)
                    place: tuple[Any, ...] = common.relative_to(box.start).slices()
                    read_region(piece.info, source, out=out[(*place, ...)], pool=pool)
            yield out


def strange(
    found: Sequence[Statistics], *, tied: bool, vocab: int, initializer_range: float | None = None
) -> list[Strange]:
    """Return what looks odd in the parameters of a decoder, the worst first.

    `tied` says whether embedding and head, of `vocab` rows, are one parameter; `initializer_range` is the deviation
    of config.json that a matrix has before training.
    """
    layers: dict[str, list[Statistics]] = {}
    for row in found:
        layers.setdefault(_over_layers(row.name), []).append(row)
    lines = [line for row in found if (line := _by_itself(row)) is not None]
    lines += _duplicates(found, tied=tied, vocab=vocab)
    lines += _untrained_norms([row for row in found if row.role == "norm"])
    if initializer_range:
        alone = {siblings[0].name for siblings in layers.values() if len(siblings) == 1}
        lines += _untrained_matrices([row for row in found if row.role == "matrix"], alone, initializer_range)
    for siblings in layers.values():
        lines += _unlike_siblings([row for row in siblings if row.std], initializer_range)
        lines += _zeros_unlike_siblings(siblings)
    order = ("wrong", "suspect", "note")
    return sorted(lines, key=lambda line: order.index(line.severity))


def _over_layers(name: str) -> str:
    """Return a name with its first number, that of the layer, blotted out."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    parts[first : first + 1] = ["{}"] * len(parts[first : first + 1])
    return ".".join(parts)


def _by_itself(row: Statistics) -> Strange | None:
    """Return what is odd about a parameter, whatever the others are."""

    def line(severity: Severity, kind: str, text: str) -> Strange:
        return Strange((row.name,), severity, kind, text)

    if not row.elements:
        return line("wrong", "empty", "has no elements")
    if row.nan or row.inf:
        kind = "nan" if row.nan else "inf"
        return line("wrong", kind, f"{row.nan} NaN and {row.inf} inf of {row.elements} elements")
    if row.zeros == row.elements:
        return line("note" if row.role == "bias" else "wrong", "zero", f"every element is zero, a {row.role}")
    if row.role == "matrix" and row.constant is not None:
        return line("wrong", "constant", f"every element is {row.constant:g}, a matrix")
    return None


def _duplicates(found: Sequence[Statistics], *, tied: bool, vocab: int) -> Iterator[Strange]:
    """Yield the parameters that are equal in every byte; constant ones, such as norms of ones, are none of them."""
    groups: dict[tuple[Any, ...], list[Statistics]] = {}
    for row in found:
        if row.elements > 1 and row.constant is None:
            groups.setdefault((row.shape, row.dtype, row.digest), []).append(row)
    for rows in groups.values():
        if len(rows) < 2:
            continue
        names = tuple(row.name for row in rows)
        of_words = len(rows) == 2 and rows[0].role == "matrix" and rows[0].shape[0] == vocab
        if of_words and tied:
            yield Strange(names, "note", "tied", "equal in every byte, as config.json ties them")
        else:
            why = ", and config.json does not tie embedding and head" if of_words else ""
            yield Strange(names, "wrong", "duplicate", f"equal in every byte{why}")


def _untrained_norms(norms: Sequence[Statistics]) -> Iterator[Strange]:
    """Yield the norms of exact ones: suspects where others are not."""
    ones = [row for row in norms if row.low == row.high == 1.0 and not (row.nan or row.inf)]
    if ones and len(ones) == len(norms):
        text = "every norm weight is exactly 1, as before training"
        yield Strange(tuple(row.name for row in ones), "note", "fresh", text)
        return
    for row in ones:
        text = f"looks freshly initialised: every element is exactly 1, as in {len(ones)} of {len(norms)} norms"
        yield Strange((row.name,), "suspect", "fresh", text)


def _untrained_matrices(
    matrices: Sequence[Statistics], alone: Collection[str], initializer_range: float
) -> Iterator[Strange]:
    """Yield the matrices that look untrained and that no other layer tells apart: most of them, or one `alone`."""
    fresh = [row for row in matrices if _is_fresh(row, initializer_range)]
    most = 2 * len(fresh) > len(matrices)
    names = tuple(row.name for row in fresh if most or row.name in alone)
    if names:
        text = f"looks freshly initialised: mean 0, std {initializer_range:g}, the initializer_range of config.json"
        yield Strange(names, "suspect", "fresh", text)


def _unlike_siblings(rows: Sequence[Statistics], initializer_range: float | None) -> Iterator[Strange]:
    """Yield the layers whose deviation is far from that of the same parameter in the others.

    The score is (log std - median) / (1.4826 * median absolute deviation), over the layers; the factor makes of the
    latter a standard deviation, for a normal distribution. First and last layers differ much in right models, too.
    """
    if len(rows) < FEWEST_LAYERS:
        return
    logs = np.log([row.std or 1.0 for row in rows])
    middle = float(np.median(logs))
    spread = max(1.4826 * float(np.median(np.abs(logs - middle))), _LEAST_SPREAD)
    for row, value in zip(rows, logs.tolist(), strict=True):
        score = (value - middle) / spread
        figures = f"std {row.std:.3g}, in the median of {len(rows)} layers {exp(middle):.3g} (robust z {score:.0f})"
        if abs(score) > FAR and initializer_range and _is_fresh(row, initializer_range):
            text = f"looks freshly initialised: mean 0 and the initializer_range of config.json; {figures}"
            yield Strange((row.name,), "suspect", "fresh", text)
        elif abs(score) > FAR and abs(value - middle) > log(FAR_RATIO):
            yield Strange((row.name,), "suspect", "scale", figures)


def _is_fresh(row: Statistics, initializer_range: float) -> bool:
    """Say whether a matrix may be n normal draws: mean within 4 s / sqrt(n), std within 1 % and 3 s / sqrt(2 n)."""
    if row.role != "matrix" or row.mean is None or row.std is None or row.nan or row.inf:
        return False
    margin = max(0.01, 3 / sqrt(2 * row.elements))
    return abs(row.std / initializer_range - 1) <= margin and abs(row.mean) <= 4 * row.std / sqrt(row.elements)


def _zeros_unlike_siblings(rows: Sequence[Statistics]) -> Iterator[Strange]:
    """Yield the layers of which a part is zero, and is not in others: a part of a fused tensor, or of a rank."""
    if len(rows) < 3:
        return
    shares = [row.zeros / max(1, row.elements) for row in rows]
    usual = float(np.median(shares))
    for row, share in zip(rows, shares, strict=True):
        if row.role == "matrix" and _MANY_ZEROS <= share < 1 and share > 10 * usual:
            text = f"{share:.1%} of its elements are zero, in the median of {len(rows)} layers {usual:.1%}"
            yield Strange((row.name,), "suspect", "zeros", text)
