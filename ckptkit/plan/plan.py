"""The Plan: every output tensor, where its bytes come from, and what becomes of every source tensor.

A plan is complete before the first byte is written. It says what will be in each file, so it can be printed
(`--dry-run`), proved (`plan/prove.py`), digested (a rerun recognises its own half-done work) and executed
(`execute.py`). How it is made lives in `plan/build.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
from ckptkit.types import Region, TensorInfo, TensorSpec, total_bytes, value

PLAN_SCHEMA = 1
BYTES_PER_SLICE = 4096
BASE_MEMORY_BYTES = 64 << 20
HASHED_ROWS = 256  # rows hashed at a time: one call for each would take most of the time


@value
class Replica:
    """A shard that must equal `region` of the whole tensor `name`, `expr`, which is read from other ranks."""

    name: str
    expr: Expr
    region: Region
    inputs: Mapping[str, TensorInfo]
    shard: TensorInfo


@value
class OutputTensor:
    """One tensor to be written: `spec`, into file number `file`, as `expr` over source tensors.

    The leaves of `expr` are names in the source checkpoint; `inputs` gives each its place in a file. Where their
    dtype is not the spec's, elements are moved in `moved_as` and then cast. A `region` is the part of `expr` that a
    rank holds, for which `read_bytes` of the sources are read; None for all of it.
    """

    spec: TensorSpec
    file: int
    expr: Expr
    inputs: Mapping[str, TensorInfo]
    region: Region | None = None
    read_bytes: int = 0

    @property
    def box(self) -> Region:
        """The part of `expr` that the output holds."""
        return Region.whole(self.expr.shape) if self.region is None else self.region

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
    alone, and why; with `clamp`, values that overflow in a cast become the largest finite one. `links` are further
    files, each equal to one of `files`: name -> its name; `load` the settings with which the result is loaded.
    `replicas` must be found equal before anything is written; `compared` are tied twins that were read to compare
    them. `whole` is the plan that this one is a part of.
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
    compared: frozenset[str] = frozenset()
    sources: tuple[Path, ...] = field(default=())
    kept: tuple[Fate, ...] = ()
    clamp: bool = False
    links: Mapping[str, str] = field(default_factory=dict)
    load: tuple[str, ...] = ()
    replicas: tuple[Replica, ...] = ()
    whole: Plan | None = None

    @cached_property
    def num_slices(self) -> int:
        whole = [output.expr for output in self.outputs if output.region is None]
        parts = sum([len(output.inputs) for output in self.outputs if output.region is not None])
        return parts + sum([1 if isinstance(expr, Leaf) else len(leaves(expr)) for expr in whole])

    @property
    def bytes_written(self) -> int:
        return sum(f.size for f in self.files) + sum(len(b) for b in self.extra.values()) + self.side_bytes

    @property
    def side_bytes(self) -> int:
        return sum(path.stat().st_size for path, _ in self.side)

    @cached_property
    def tensor_bytes(self) -> int:
        return total_bytes(output.spec for output in self.outputs)

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of the source tensors that outputs read, each of which is read once."""
        used = {name: info for o in self.outputs if o.region is None for name, info in o.inputs.items()}
        parts = {(id(o.expr), o.region): o.read_bytes for o in self.outputs if o.region is not None}
        return total_bytes(used.values()) + sum(parts.values())

    @cached_property
    def needed_replicas(self) -> tuple[Replica, ...]:
        """The replicas of what outputs read, or what was compared with a twin: not those of what else is left out."""
        if not self.replicas:
            return ()
        read = {name for output in self.outputs for name in output.inputs}
        return tuple(
            replica for replica in self.replicas if replica.name in self.compared or not read.isdisjoint(replica.inputs)
        )

    @cached_property
    def replica_bytes(self) -> int:
        """Bytes that are read to compare replicas: each of these, and once what it must equal."""
        regions = {(id(r.expr), r.region): r.shard.num_bytes for r in self.needed_replicas}
        return sum(regions.values()) + sum(replica.shard.num_bytes for replica in self.needed_replicas)

    @property
    def bytes_read(self) -> int:
        """Bytes of source tensors that the run reads, comparisons of twins and replicas included."""
        return self.source_bytes + self.compared_bytes + self.replica_bytes

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

        A part has the digest of the whole. Files are looked at on the first call, and not again.
        """
        return self._digest if self.whole is None else self.whole.digest()

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
        if self.whole is not None:
            self.whole.check_sources()
            return
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
        files = [quote(file.name) for file in self.files]
        names = [quote(output.spec.name) for output in self.outputs]
        kinds = {(output.spec.shape, output.spec.dtype) for output in self.outputs}
        shaped = {(shape, dtype): f'{list(shape)}, "{dtype}"' for shape, dtype in kinds}
        for output, name, made in zip(self.outputs, names, self._made(names), strict=True):
            spec = output.spec
            yield f"[{files[output.file]}, {name}, {shaped[spec.shape, spec.dtype]}, {made}]"
        if self.links:
            yield json.dumps(self.links, sort_keys=True)
        for name, data in sorted(self.extra.items()):
            yield json.dumps([name, xxhash.xxh3_128_hexdigest(data)])
        for path, name in self.side:
            yield json.dumps([name, file_digest(path)])

    def _made(self, names: Sequence[str]) -> list[str]:
        """Return how each output is made, as JSON text; what ranks share is said once, then by its first name."""
        if all(output.region is None for output in self.outputs):
            exprs = [output.expr for output in self.outputs]
            return [quote(e.name if isinstance(e, Leaf) else describe(e)) for e in exprs]
        shared: dict[int, str] = {}
        made = []
        for output, name in zip(self.outputs, names, strict=True):
            text = shared.get(id(output.expr)) or quote(describe(output.expr))
            if output.region is not None:
                shared.setdefault(id(output.expr), name)
                text = f"{text}, {list(output.region.start)}"
            made.append(text)
        return made

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data: what `--dry-run --json` prints and `plan.json` holds."""
        return {
            "schema": PLAN_SCHEMA,
            "digest": self.digest(),
            **self.facts,
            "summary": self.summary(),
            "files": [{"name": f.name, "bytes": f.size} for f in self.files],
            "links": dict(self.links),
            "outputs": [
                dict(zip(("name", "shape", "dtype", "value"), _output_row(o), strict=True))
                | {"file": self.files[o.file].name}
                | ({"from": o.cast_from} if o.cast_from else {})
                | ({"start": list(o.region.start)} if o.region else {})
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


def stored_name(file: str, tensor: str) -> str:
    """Return what a manifest calls a tensor of a result's file: `rank_3:NAME` for a rank's, else its own name."""
    folder = file.rpartition("/")[0]
    return f"{folder}:{tensor}" if folder.startswith("rank_") else tensor


def tensor_name(stored: str, row: Mapping[str, Any]) -> str:
    """Return a tensor's own name: the inverse of `stored_name`, given its row in the manifest."""
    folder = str(row["file"]).rpartition("/")[0]
    return stored.removeprefix(f"{folder}:") if folder.startswith("rank_") else stored


class SourceChanged(CorruptError):
    """A source file was written while it was read."""


def look_at(path: Path) -> str:
    """Return what tells a file from another, and from itself after a change: inode, size, times of data and inode.

    The inode's time counts because a tool that copies in place can set the data's time back. The device's number does
    not: two machines that share a disk number it differently.
    """
    try:
        stat = path.stat()
    except OSError as error:
        return f"{path.name} cannot be looked at: {error.strerror}"
    return json.dumps([path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])


def _output_row(output: OutputTensor) -> tuple[str, list[int], str, str]:
    return output.spec.name, list(output.spec.shape), output.spec.dtype, describe(output.expr)


def describe(expr: Expr) -> str:
    """Return `expr` as one line: `Interleave(axis=0, rows=(8, 4, 4))[a, b, c]`."""
    if isinstance(expr, Leaf):
        return expr.name
    return f"{expr.op}[{', '.join([describe(child) for child in expr.children])}]"
