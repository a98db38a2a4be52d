"""The Plan: every output tensor, where its bytes come from, and what becomes of every source tensor.

A plan is complete before the first byte is written. It says what will be in each file, so it can be printed
(`--dry-run`), proved (`plan/prove.py`), digested (a rerun recognises its own half-done work) and executed
(`execute.py`). How it is made lives in `plan/build.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.cast import common_dtype
from ckptkit.errors import CorruptError
from ckptkit.formats.base import OutputFile
from ckptkit.formats.disk import file_digest
from ckptkit.mapping.expr import Expr, Leaf, leaves
from ckptkit.types import TensorInfo, TensorSpec, value

PLAN_SCHEMA = 1
BYTES_PER_SLICE = 4096
BASE_MEMORY_BYTES = 64 << 20
HASHED_ROWS = 256  # rows hashed at a time: one call for each would take most of the time


@value
class OutputTensor:
    """One tensor to be written: `spec`, into file number `file`, as `expr` over source tensors.

    The leaves of `expr` are names in the source checkpoint; `inputs` gives each its place in a file. Where their
    dtype is not the spec's, elements are moved in `moved_as` and then cast.
    """

    spec: TensorSpec
    file: int
    expr: Expr
    inputs: Mapping[str, TensorInfo]

    @property
    def moved_as(self) -> str:
        """The dtype of the elements while ops move them: the sources' own, or one that holds all of these exactly."""
        return common_dtype({info.dtype for info in self.inputs.values()})

    @property
    def cast_from(self) -> str:
        """The sources' dtype, or dtypes (`BF16+F32`), when one of them is cast; else empty."""
        found = {info.dtype for info in self.inputs.values()}
        return "" if found == {self.spec.dtype} else "+".join(sorted(found))


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a source tensor that no output reads, or of a name that the source lacks."""

    name: str
    reason: str


@dataclass(frozen=True)  # without slots, so that the figures can be kept once they are computed
class Plan:
    """All that a conversion will do.

    `extra` are small files written from memory, `side` the files copied beside the weights (source, name);
    `ignored`, `dropped` and `unmapped` account for every source tensor that no output reads; `facts` is what the
    manifest and the report say of families, dialects and tables. `kept` are outputs that the wanted dtype leaves
    alone, and why; with `clamp`, values that overflow in a cast become the largest finite one.
    """

    outputs: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...]
    extra: Mapping[str, bytes]
    side: tuple[tuple[Path, str], ...]
    ignored: tuple[Fate, ...]
    dropped: tuple[Fate, ...]
    unmapped: tuple[Fate, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    compared_bytes: int = 0
    sources: tuple[Path, ...] = field(default=())
    kept: tuple[Fate, ...] = ()
    clamp: bool = False

    @cached_property
    def num_slices(self) -> int:
        return sum([len(leaves(output.expr)) for output in self.outputs])

    @property
    def bytes_written(self) -> int:
        return sum(f.size for f in self.files) + sum(len(b) for b in self.extra.values()) + self.side_bytes

    @property
    def side_bytes(self) -> int:
        return sum(path.stat().st_size for path, _ in self.side)

    @cached_property
    def tensor_bytes(self) -> int:
        return sum([output.spec.num_bytes for output in self.outputs])

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of the source tensors that outputs read, each of which is read once."""
        used: dict[str, TensorInfo] = {}
        for output in self.outputs:
            used.update(output.inputs)
        return sum([info.num_bytes for info in used.values()])

    @property
    def bytes_read(self) -> int:
        """Bytes of source tensors that the run reads, comparisons of twins included."""
        return self.source_bytes + self.compared_bytes

    @property
    def peak_memory_bytes(self) -> int:
        """The promise: anonymous memory stays below this."""
        return BASE_MEMORY_BYTES + BYTES_PER_SLICE * self.num_slices

    @property
    def read_amplification(self) -> float:
        """Bytes read over the bytes of the source tensors used, each counted once."""
        return self.bytes_read / self.source_bytes if self.source_bytes else 1.0

    def digest(self) -> str:
        """Return the xxh3-128 of all that decides the result: outputs, layout, source files and their times.

        Files are looked at on the first call, and not again.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        state = xxhash.xxh3_128()
        lines = self._canonical()
        while some := list(islice(lines, HASHED_ROWS)):
            state.update("\n".join([*some, ""]).encode())
        return state.hexdigest()

    @cached_property
    def _source_state(self) -> list[str]:
        return [look_at(path) for path in self.sources]

    def check_sources(self) -> None:
        """Raise SourceChanged when a source file is no longer the one that the digest saw."""
        now = [look_at(path) for path in self.sources]
        if now != self._source_state:
            pairs = zip(self.sources, self._source_state, now, strict=True)
            raise SourceChanged(
                "the source changed while it was read",
                items=[path.name for path, before, after in pairs if before != after],
                why="the result would mix two checkpoints",
                hint="let no other program write to the source, and start again",
            )

    def _canonical(self) -> Iterator[str]:
        yield json.dumps([PLAN_SCHEMA, self.facts], sort_keys=True, default=str)
        yield from self._source_state
        names = [quote(file.name) for file in self.files]
        for output in self.outputs:
            spec, made = output.spec, quote(describe(output.expr))
            yield f'[{names[output.file]}, {quote(spec.name)}, {list(spec.shape)}, "{spec.dtype}", {made}]'
        for name, data in sorted(self.extra.items()):
            yield json.dumps([name, xxhash.xxh3_128_hexdigest(data)])
        for path, name in self.side:
            yield json.dumps([name, file_digest(path)])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data: what `--dry-run --json` prints and `plan.json` holds."""
        return {
            "schema": PLAN_SCHEMA,
            "digest": self.digest(),
            **self.facts,
            "summary": self.summary(),
            "files": [{"name": f.name, "bytes": f.size} for f in self.files],
            "outputs": [
                dict(zip(("name", "shape", "dtype", "value"), _output_row(o), strict=True))
                | {"file": self.files[o.file].name}
                | ({"from": o.cast_from} if o.cast_from else {})
                for o in self.outputs
            ],
            "ignored": [[f.name, f.reason] for f in self.ignored],
            "dropped": [[f.name, f.reason] for f in self.dropped],
            "unmapped": [[f.name, f.reason] for f in self.unmapped],
            "side_files": [name for _, name in self.side],
            "notes": list(self.notes),
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures of the plan: counts, bytes, memory, amplification."""
        return {
            "tensors": len(self.outputs),
            "slices": self.num_slices,
            "tensor_bytes": self.tensor_bytes,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "peak_memory_bytes": self.peak_memory_bytes,
            "read_amplification": round(self.read_amplification, 3),
        }


class SourceChanged(CorruptError):
    """A source file was written while it was read."""


def look_at(path: Path) -> str:
    """Return what tells a file from another, and from itself after a change: inode, size, times of data and inode.

    The inode's time counts because a tool that copies in place can set the data's time back.
    """
    try:
        stat = path.stat()
    except OSError as error:
        return f"{path.name} cannot be looked at: {error.strerror}"
    return json.dumps([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev])


def _output_row(output: OutputTensor) -> tuple[str, list[int], str, str]:
    return output.spec.name, list(output.spec.shape), output.spec.dtype, describe(output.expr)


def describe(expr: Expr) -> str:
    """Return `expr` as one line: `Interleave(axis=0, rows=(8, 4, 4))[a, b, c]`."""
    if isinstance(expr, Leaf):
        return expr.name
    return f"{expr.op}[{', '.join([describe(child) for child in expr.children])}]"
