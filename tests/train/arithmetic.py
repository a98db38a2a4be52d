"""What the clients of the training arithmetic share: seeded networks, rows, and a report as JSON.

    python SCRIPT CHECK

A check is a function of the script; what it returns is printed as the last line. These run in processes of their own,
so that pytest imports no framework.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
Config = dict[str, Any]


def run_check(script: str, check: str, *words: str, timeout: float = 800) -> Any:
    """Run a check of `script` in a process of its own and return its report."""
    path = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent / "verification", HERE.parent.parent)))
    done = subprocess.run(
        [sys.executable, str(HERE / script), check, *words],
        env={**os.environ, "PYTHONPATH": path, "GLOG_v": "3"}, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def main(checks: Mapping[str, Callable[..., Any]]) -> None:
    """Run the check that the command line names, and print its report."""
    report = checks[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(report, allow_nan=False))


def weights_of(shapes: Mapping[str, Sequence[int]], *, seed: int = 0, spread: float = 0.2) -> dict[str, np.ndarray]:
    """Return seeded float32 weights; gains are near 1."""
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape) * spread
        made[name] = (values * 0.5 + 1 if "norm" in name else values).astype(np.float32)
    return made


def make_net(config: Config, *, spread: float = 0.2, threads: int | None = None, **settings: Any) -> Any:
    """Return a network with seeded weights; `settings` are its own. The first of a process chooses the threads."""
    import mindspore

    from ckptkit.train.net import TrainNet, prepare
    from ckptkit.verification.runners.facts import read_facts

    if mindspore.get_context("deterministic") != "ON":  # not prepared yet
        prepare(mindspore, "cpu", threads)
    net = TrainNet(mindspore, read_facts(config), **settings)
    for name, values in weights_of(net.shapes, spread=spread).items():
        net.put(name, values)
    return net


def rows_of(vocab: int, *, rows: int, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the arrays of rows of one document each, about a third of whose tokens do not count."""
    random = np.random.default_rng(seed)
    shape = (rows, tokens)
    return {
        "ids_RT": random.integers(0, vocab, shape).astype(np.int32),
        "targets_RT": random.integers(0, vocab, shape).astype(np.int32),
        "weights_RT": (random.random(shape) > 0.3).astype(np.float32),
        "positions_RT": np.tile(np.arange(tokens, dtype=np.int32), (rows, 1)),
        "segments_RT": np.ones(shape, np.int32),
    }


def slot_of(rows: Mapping[str, np.ndarray], first: int = 0) -> Any:
    from ckptkit.train.micro_batch import Slot

    return Slot(**rows, counters=tuple(range(first, first + len(rows["ids_RT"]))))


def data_of(rows: Mapping[str, np.ndarray], step: int = 0, first: int = 0) -> Any:
    from ckptkit.train.batches import StepData

    samples = tuple(range(len(rows["ids_RT"])))
    return StepData(step, 0, first, samples, **rows, tokens=int(np.count_nonzero(rows["weights_RT"])))


class Settings:
    """An optimizer's settings."""

    def __init__(self, **changed: Any) -> None:
        self.beta1, self.beta2, self.eps = 0.9, 0.999, 1e-8
        self.weight_decay, self.clip_norm, self.freeze = 0.1, 1.0, ()
        for name, value in changed.items():
            assert hasattr(self, name)
            setattr(self, name, value)


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference as a share of the largest value wanted."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def arrays(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return copies of MindSpore's tensors."""
    return {name: np.array(tensor.asnumpy()) for name, tensor in tensors.items()}


def farthest(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    """Return the largest `far` of all; names must agree."""
    assert found.keys() == wanted.keys()
    return max(far(found[name], wanted[name]) for name in wanted)


def same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Say whether all arrays have the same bits."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
