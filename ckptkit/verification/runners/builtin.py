"""The MindSpore side without MindFormers: the small decoder of `decoder.py`, as a runner.

    python -m ckptkit.verification.runners.builtin JOB OUT

It runs wherever MindSpore runs, the CPU included, and takes tensors in any dialect's naming. What does not live here:
what config.json means (`facts.py`), the network (`decoder.py`). Shapes: T tokens, V the vocabulary.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ckptkit.verification.runners.decoder import Decoder
from ckptkit.verification.runners.dialects import find_dialect
from ckptkit.verification.runners.facts import Facts, read_facts
from ckptkit.verification.runners.frameworks import framework
from ckptkit.verification.runners.job import Floats, Job
from ckptkit.verification.runners.low_kernels import KEPT, LowKernels
from ckptkit.verification.runners.main import main
from ckptkit.verification.runners.mindspore_exact import be_exact, mindspore_device
from ckptkit.verification.runners.net import WHOLE, Net, Tap, Walk, Watch, as_one

INV_FREQ = "rotary.inv_freq"
_ENVIRONMENT = {"GLOG_v": "3"}  # errors only, and on stderr


class BuiltinNet:
    """A `Decoder` as a `Net`."""

    runner = "builtin"
    takes_positions = True
    constants: Sequence[str] = (INV_FREQ,)
    kept: Sequence[str] = KEPT

    def __init__(self, decoder: Decoder, *, streamed: bool) -> None:
        self.versions: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.reading = decoder.facts.reading()
        self.notes = _notes(decoder.facts)
        self._decoder, self._streamed = decoder, streamed

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._decoder.shapes

    def benign(self, name: str) -> str | None:
        return None

    def twin(self, name: str) -> str | None:
        dialect = self._decoder.dialect
        return dialect.embedding if self._decoder.facts.tied and name == dialect.head else None

    def put(self, name: str, values: Floats) -> None:
        if name == INV_FREQ:
            self._decoder.frequencies = np.array(values, np.float32)
        else:
            self._decoder.put(name, values)

    def get(self, name: str) -> Floats:
        return self._decoder.frequencies.copy() if name == INV_FREQ else self._decoder.get(name)

    def blocks(self) -> Sequence[tuple[str, Sequence[str]]]:
        return self._decoder.blocks() if self._streamed else [(WHOLE, list(self.shapes()))]

    def free(self, names: Sequence[str]) -> None:
        self._decoder.free(names)

    def lowered(self, names: Sequence[str]) -> AbstractContextManager[None]:
        return self._decoder.lowered(names)

    def walk(self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None) -> Walk:
        steps = self._decoder.walk(ids, positions, tap)
        return steps if self._streamed else as_one(steps)

    def watched(
        self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None, watch: Watch, *, low: bool
    ) -> Walk:
        steps = self._decoder.walk(ids, positions, tap, watch, low=low)
        return steps if self._streamed else as_one(steps)


def _notes(facts: Facts) -> list[str]:
    unknown = [f"`{key}` in config.json is a key of which nothing is known" for key in facts.unknown]
    return [*facts.notes, *unknown]


def build(job: Job) -> Net:
    """Return the network for the job's config.json in the job's dialect, its parameters not set.

    UsageError for a config.json that the network cannot express, a dialect that it does not know, a device that is
    not there; what needs no framework is checked before one is imported.
    """
    facts = read_facts(job.config)
    dialect = find_dialect(job.dialect, job.variant, facts)
    target, index = mindspore_device(job.device)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    mindspore = framework("mindspore")
    settings = be_exact(mindspore, target, index)
    low = LowKernels(mindspore, job.compute) if job.compute else None
    if low is not None:
        low.try_all(job.device)
    net = BuiltinNet(Decoder(mindspore, facts, dialect, job.layers, low), streamed=job.stream)
    net.settings = settings
    versions = {"mindspore": mindspore.__version__, "numpy": np.__version__}
    net.versions = {**versions, "python": platform.python_version()}
    return net


if __name__ == "__main__":
    sys.exit(main(build))
