"""The contract: figures are numpy's of the whole tensor, however it is stored; what looks wrong is named, and no more.

Counts, ends and digests are compared exactly. Mean and deviation are sums of float64 in another order than numpy's:
of n = 3,000 elements the rounding is below n * 2^-53 = 3e-13 of the largest summand, so 1e-11 is ample.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckptkit import CorruptError, Parallel, convert
from ckptkit.commands.ranks import open_sharded
from ckptkit.formats.file_pool import FilePool
from ckptkit.formats.registry import open_checkpoint
from ckptkit.types import DTYPES, Extent, Region, TensorInfo
from ckptkit.values import widener
from ckptkit.verification import statistics
from ckptkit.verification.forward import stored_tensors
from ckptkit.verification.runners.job import Piece, Stored
from ckptkit.verification.statistics import Statistics, Strange, measure, strange
from tests.trained_models import make_llama

CLOSE = 1e-11
Array = np.ndarray[Any, Any]
PLAIN = ("F16", "BF16", "F32", "F64", "I32", "I64", "U8", "I8", "F8_E4M3", "BOOL")


def store(file: Path, array: Array, dtype: str, parts: Iterable[Region] | None = None) -> Stored:
    """Write the parts of a tensor of unsigned integers one after another, and return it as a whole."""
    pieces, data = [], bytearray(b"head")
    for number, region in enumerate(parts or [Region.whole(array.shape)]):
        raw = array[region.slices()].tobytes()
        info = TensorInfo(f"rank_{number}:w", region.shape, dtype, file, (Extent(len(data), len(raw)),))
        pieces.append(Piece(info, Region.whole(region.shape), region.start))
        data += raw + b"gap"
    file.write_bytes(data)
    return Stored("w", array.shape, dtype, tuple(pieces))


def bits_of(dtype: str, shape: tuple[int, ...]) -> Array:
    """Return random elements, finite but for some NaN and inf, with some zeros."""
    rng = np.random.default_rng(0)
    carrier = np.dtype(DTYPES[dtype].carrier)
    if dtype in ("F32", "F64", "F16"):
        values = rng.normal(3, 0.5, shape).astype(f"f{carrier.itemsize}")
        values.reshape(-1)[::7] = 0
        values.reshape(-1)[5:40:5] = [np.nan, np.inf, -np.inf, -0.0, 1e-30, 2, np.nan]
        return values.view(carrier)
    if dtype == "BF16":
        return (bits_of("F32", shape) >> 16).astype(carrier)
    top = 2 if dtype == "BOOL" else 120 if carrier.itemsize == 1 else 1 << 30
    return rng.integers(0, top, shape, carrier)


def check(found: Statistics, bits: Array) -> None:
    """Compare figures with numpy's, of the whole tensor at once."""
    widen = widener(found.dtype)
    assert widen is not None
    values = widen(bits.reshape(-1))
    finite = values[np.isfinite(values)]
    assert (found.elements, found.shape) == (bits.size, bits.shape)
    assert (found.nan, found.inf) == (np.isnan(values).sum(), np.isinf(values).sum())
    assert found.zeros == (values == 0).sum()
    assert (found.low, found.high) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=CLOSE)
    assert found.std == pytest.approx(finite.std(), rel=CLOSE, abs=0)
    assert found.digest == xxhash.xxh3_128_hexdigest(np.ascontiguousarray(bits).tobytes())


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("block_bytes", [40, 1 << 18])
def test_figures_are_numpys_for_every_dtype(
    tmp_path: Path, dtype: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(statistics, "CHUNK", 100)
    bits = bits_of(dtype, (50, 3, 20))
    (found,) = measure([store(tmp_path / "w", bits, dtype)])
    check(found, bits)


def test_a_mean_far_from_zero_loses_no_digits(tmp_path: Path) -> None:
    """A sum of squares would give a deviation of nothing here: 1e8 squared has no room for 1e-4."""
    values = np.float64(1e8) + np.random.default_rng(0).normal(0, 1e-4, 40_000)
    (found,) = measure([store(tmp_path / "w", values.view(np.uint64), "F64")])
    # an element is stored to within 2^-53 * 1e8 = 1e-8, so the deviation is known to 1e-4 of itself
    assert found.std == pytest.approx(1e-4, rel=0.02)
    squares = (values**2).mean() - values.mean() ** 2
    assert np.sqrt(abs(squares)) != pytest.approx(1e-4, rel=0.02)


@pytest.mark.parametrize("block_bytes", [16, 60, 1 << 18])
@pytest.mark.parametrize("cut", ["rows", "columns", "both"])
def test_how_a_tensor_is_cut_changes_nothing_and_each_byte_is_read_once(
    tmp_path: Path, cut: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "BLOCK_BYTES", block_bytes)
    bits = bits_of("F32", (12, 18))
    rows = [(0, 4), (4, 12)] if cut != "columns" else [(0, 12)]
    columns = [(0, 9), (9, 15), (15, 18)] if cut != "rows" else [(0, 18)]
    parts = [Region((a, c), (b, d)) for a, b in rows for c, d in columns]
    read: list[int] = []
    original = FilePool.pread_many

    def counted(self: FilePool, path: Path, pieces: Iterable[tuple[int, memoryview]]) -> None:
        listed = list(pieces)
        read.extend(position for offset, data in listed for position in range(offset, offset + len(data)))
        original(self, path, listed)

    monkeypatch.setattr(FilePool, "pread_many", counted)
    told: list[int] = []
    (found,) = measure([store(tmp_path / "w", bits, "F32", parts)], advance=told.append)
    check(found, bits)
    assert len(read) == len(set(read)) == sum(told) == bits.nbytes


def test_a_view_with_strides_is_read_as_its_elements_lie(tmp_path: Path) -> None:
    bits = bits_of("F32", (8, 6))
    stored = store(tmp_path / "w", bits, "F32")
    info = replace(stored.pieces[0].info, shape=(6, 8), strides=(1, 6))
    piece = Piece(info, Region.whole((6, 8)), (0, 0))
    (found,) = measure([Stored("w", (6, 8), "F32", (piece,))])
    check(found, bits.T)


def test_a_tensor_without_axes_is_one_element_and_one_without_elements_is_wrong(tmp_path: Path) -> None:
    one = np.array(np.float32(2.5)).view(np.uint32)
    none = np.zeros((0, 4), np.uint32)
    found = measure([store(tmp_path / "one", one, "F32"), store(tmp_path / "none", none, "F32")])
    assert (found[0].mean, found[0].std, found[0].elements, found[0].constant) == (2.5, 0.0, 1, None)
    assert (found[1].mean, found[1].std, found[1].elements, found[1].low) == (None, None, 0, None)
    assert [line.kind for line in look(found)] == ["empty"]


@pytest.mark.parametrize("dtype", ["C64", "STR"])
def test_what_is_no_number_has_a_digest_and_no_figures(tmp_path: Path, dtype: str) -> None:
    bits = np.arange(1, 9, dtype=DTYPES[dtype].carrier)
    (found,) = measure([store(tmp_path / "w", bits, dtype)])
    assert (found.mean, found.zeros, found.digest) == (None, 0, xxhash.xxh3_128_hexdigest(bits.tobytes()))


def test_float64_values_too_large_to_square_are_no_error(tmp_path: Path) -> None:
    values = np.array([1e300, -1e300, 5.0])
    (found,) = measure([store(tmp_path / "w", values.view(np.uint64), "F64")])
    assert (found.low, found.high, found.nan, found.inf) == (-1e300, 1e300, 0, 0)
    assert found.std == float("inf")


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    stored = store(tmp_path / "w", bits_of("F32", (40, 40)), "F32")
    (tmp_path / "w").write_bytes((tmp_path / "w").read_bytes()[:-50])
    with pytest.raises(CorruptError, match="shrank"):
        measure([stored, stored, stored])


def test_ranks_give_the_figures_of_the_whole_without_their_padding(tmp_path: Path) -> None:
    hf = make_llama(tmp_path / "hf")
    convert(hf, tmp_path / "whole", to_dialect="mindformers")
    convert(hf, tmp_path / "ranks", to_dialect="mindformers", parallel=Parallel(mp=4, pp=3, pad_vocab_to=56))
    plain = open_checkpoint(tmp_path / "whole")
    source = open_sharded(tmp_path / "ranks")
    rows = dict.fromkeys(source.padded, 48)
    assert rows
    tensors = list(stored_tensors(plain, None, rounded={}, rows={}))
    cut = list(stored_tensors(source.checkpoint, source.joined, rounded={}, rows=rows))
    key = {row.name: row for row in measure(tensors)}
    assert {row.name: row for row in measure(cut)} == key
    padded = list(stored_tensors(source.checkpoint, source.joined, rounded={}, rows={}))  # the control
    assert {row.name for row in measure(padded) if row != key[row.name]} == set(rows)


RUN = """
import re, sys, threading, time
from pathlib import Path
from ckptkit.types import Extent, Region, TensorInfo
from ckptkit.verification.runners.job import Piece, Stored
from ckptkit.verification.statistics import measure

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

file, hold = Path(sys.argv[1]), sys.argv[2]
size = file.stat().st_size
side = 6144

def piece(shape, start, extent):
    info = TensorInfo("w", shape, "BF16", file, (extent,))
    return Piece(info, Region.whole(shape), start)

cut = tuple(piece((side, side // 4), (0, n * side // 4), Extent(n * size // 4, size // 4)) for n in range(4))
long = (piece((side * side,), (0,), Extent(0, size)),)
tensors = [Stored("cut", (side, side), "BF16", cut), Stored("long", (side * side,), "BF16", long)]
done, peak = threading.Event(), [0]
watcher = threading.Thread(target=watch)
watcher.start()
held = file.read_bytes() if hold else b""
print(sum(row.elements for row in measure(tensors, workers=4)), end=" ")
done.set()
watcher.join()
print(peak[0])
"""  # fmt: skip


@pytest.mark.parametrize("holds_all", [False, True])
def test_memory_stays_within_64_mb_whatever_the_size(tmp_path: Path, holds_all: bool) -> None:
    np.zeros(6144 * 6144, np.uint16).tofile(tmp_path / "w")  # 75 MB
    words = [str(tmp_path / "w"), "hold" if holds_all else ""]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True)
    elements, peak = map(int, done.stdout.split())
    assert elements == 2 * 6144 * 6144
    assert (peak > 64 * 10**6 + 2 * 5 * 4096) == holds_all


# What looks wrong: figures of a decoder of 12 layers, with one thing changed.

LAYERS, HIDDEN, VOCAB = 12, 16, 40
MATRIX = "model.layers.{}.mlp.up_proj.weight"
NORM = "model.layers.{}.input_layernorm.weight"
BIAS = "model.layers.{}.self_attn.q_proj.bias"


def decoder() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    arrays = {"model.embed_tokens.weight": rng.normal(0, 1, (VOCAB, HIDDEN))}
    for layer in range(LAYERS):
        arrays[MATRIX.format(layer)] = rng.normal(0, 0.1 + 0.002 * layer, (64, HIDDEN))
        arrays[NORM.format(layer)] = rng.normal(0.5, 0.1, HIDDEN)
        arrays[BIAS.format(layer)] = rng.normal(0, 0.1, HIDDEN)
    arrays["model.norm.weight"] = rng.normal(1, 0.1, HIDDEN)
    arrays["lm_head.weight"] = rng.normal(0, 1, (VOCAB, HIDDEN))
    return arrays


def figures(arrays: dict[str, Array], folder: Path) -> list[Statistics]:
    stored = [
        replace(store(folder / f"{number}", np.asarray(array, np.float32).view(np.uint32), "F32"), name=name)
        for number, (name, array) in enumerate(arrays.items())
    ]
    return measure(stored)


def look(found: list[Statistics], *, tied: bool = False) -> list[Strange]:
    return strange(found, tied=tied, vocab=VOCAB, initializer_range=0.02)


def normal(shape: tuple[int, int], deviation: float) -> Array:
    """Return numbers of exactly that deviation, and of mean 0."""
    noise = np.random.default_rng(1).normal(0, 1, shape)
    return (noise - noise.mean()) / noise.std() * deviation


def fresh(arrays: dict[str, Array], deviation: float) -> None:
    arrays[MATRIX.format(5)] = normal((64, HIDDEN), deviation)


def same_layers(arrays: dict[str, Array]) -> None:
    for pattern in (MATRIX, NORM, BIAS):
        arrays[pattern.format(7)] = arrays[pattern.format(6)]


CHANGES: dict[str, tuple[Any, set[tuple[str, str, str]]]] = {
    "a NaN": (lambda a: a[MATRIX.format(3)].__setitem__((0, 0), np.nan), {("wrong", "nan", MATRIX.format(3))}),
    "an inf": (lambda a: a[NORM.format(3)].__setitem__(0, -np.inf), {("wrong", "inf", NORM.format(3))}),
    "a matrix of zeros": (lambda a: a[MATRIX.format(3)].fill(0), {("wrong", "zero", MATRIX.format(3))}),
    "a norm of zeros": (lambda a: a["model.norm.weight"].fill(0), {("wrong", "zero", "model.norm.weight")}),
    "a bias of zeros": (lambda a: a[BIAS.format(3)].fill(0), {("note", "zero", BIAS.format(3))}),
    "a matrix of one value": (lambda a: a[MATRIX.format(3)].fill(0.1), {("wrong", "constant", MATRIX.format(3))}),
    "a norm of one value": (lambda a: a[NORM.format(3)].fill(0.5), set()),
    "a norm of ones": (lambda a: a[NORM.format(3)].fill(1), {("suspect", "fresh", NORM.format(3))}),
    "a fresh matrix": (lambda a: fresh(a, 0.02), {("suspect", "fresh", MATRIX.format(5))}),
    "a matrix of another scale": (lambda a: fresh(a, 0.03), {("suspect", "scale", MATRIX.format(5))}),
    "a matrix as the others": (lambda a: fresh(a, 0.13), set()),
    "a matrix half of zeros": (lambda a: a[MATRIX.format(5)][:32].fill(0), {("suspect", "zeros", MATRIX.format(5))}),
    "a fresh embedding": (
        lambda a: a.update({"model.embed_tokens.weight": normal((VOCAB, HIDDEN), 0.02)}),
        {("suspect", "fresh", "model.embed_tokens.weight")},
    ),
    "an embedding of another scale": (
        lambda a: a.update({"model.embed_tokens.weight": normal((VOCAB, HIDDEN), 0.03)}), set(),
    ),
    "a layer twice": (
        same_layers, {("wrong", "duplicate", pattern.format(6)) for pattern in (MATRIX, NORM, BIAS)},
    ),
    "an untied head that is the embedding": (
        lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"]}),
        {("wrong", "duplicate", "model.embed_tokens.weight")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_looks_wrong_is_named_and_nothing_else(tmp_path: Path, name: str) -> None:
    arrays = decoder()
    change, wanted = CHANGES[name]
    change(arrays)
    assert {(line.severity, line.kind, line.names[0]) for line in look(figures(arrays, tmp_path))} == wanted


def test_a_right_decoder_has_nothing_odd(tmp_path: Path) -> None:
    assert look(figures(decoder(), tmp_path)) == []


def test_a_tied_head_may_be_the_embedding_and_norms_of_ones_are_a_note(tmp_path: Path) -> None:
    arrays = decoder() | {"lm_head.weight": decoder()["model.embed_tokens.weight"]}
    arrays |= {name: np.ones(HIDDEN) for name in arrays if "norm" in name}
    found = figures(arrays, tmp_path)
    assert [(line.severity, line.kind, len(line.names)) for line in look(found, tied=True)] == [
        ("note", "tied", 2), ("note", "fresh", LAYERS + 1),
    ]  # fmt: skip
    assert [line.severity for line in look(found, tied=False)] == ["wrong", "note"]  # the control


def test_a_model_that_was_never_trained_is_said_to_be_that(tmp_path: Path) -> None:
    arrays = decoder()
    rng = np.random.default_rng(2)
    arrays |= {name: rng.normal(0, 0.02, array.shape) for name, array in arrays.items() if array.ndim == 2}
    (line,) = look(figures(arrays, tmp_path))
    assert (line.severity, line.kind) == ("suspect", "fresh") and len(line.names) >= LAYERS


def test_the_worst_comes_first(tmp_path: Path) -> None:
    arrays = decoder()
    arrays[BIAS.format(0)].fill(0)
    arrays[NORM.format(1)].fill(1)
    arrays[MATRIX.format(2)].fill(0)
    assert [line.severity for line in look(figures(arrays, tmp_path))] == ["wrong", "suspect", "note"]


def test_of_few_layers_no_spread_is_told(tmp_path: Path) -> None:
    arrays = decoder()
    fresh(arrays, 0.02)
    few = {name: array for name, array in arrays.items() if ".layers." not in name or int(name.split(".")[2]) < 7}
    assert look(figures(few, tmp_path)) == []
