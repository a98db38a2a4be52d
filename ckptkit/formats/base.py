"""What a file format gives to the rest: an index of byte ranges to read, a file layout to write.

A format is two functions. `read_index(file)` says where each tensor's bytes lie; `lay_out(name, specs)` says where
each tensor's bytes must go and which bytes stand between them. All input and output is then the same code for every
format (`formats/io.py` reads regions, `execute.py` streams), and no format ever holds a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ckptkit.types import Extent, TensorInfo


@dataclass(frozen=True, slots=True)
class FileIndex:
    """One file's tensors, in file order, and its text metadata."""

    file: Path
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A logical checkpoint: one name, one tensor, whatever the number of files.

    `kind` is `safetensors`, `ckpt` or `torch`; `files` are those that hold tensors; `notes` says what was passed
    over or found odd, one line each; `folder` is where side files (config.json, tokenizer) are looked for.
    """

    path: Path
    folder: Path
    kind: str
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written: `fixed` bytes at their offsets, and the extents that each tensor's bytes fill.

    Fixed bytes and extents cover the file's `size` bytes exactly once.
    """

    name: str
    size: int
    fixed: tuple[tuple[int, bytes], ...]
    extents: Mapping[str, tuple[Extent, ...]]


class Sink(Protocol):
    """Where an executed plan goes: `put` may be called from several threads, once for each byte."""

    def put(self, output: int, offset: int, data: memoryview) -> None:
        """Take `data`, the bytes of output number `output` from `offset` (in the tensor) on."""

    def put_batch(self, outputs: Sequence[int], data: memoryview, digests: Sequence[str | None]) -> None:
        """Take the whole bytes of `outputs`, which lie side by side in their file; they are complete then."""

    def finish(self, output: int, digest: str | None) -> None:
        """Note that output number `output` is complete; `digest` is None when the executor did not compute it."""
