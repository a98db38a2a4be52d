"""Checkpoints of a run made without any training: the tensors of a tiny llama, with numbers that tell the step.

`python -m tests.train.tiny_steps RUN MODEL FIRST LAST` saves one after another in the background, and says so.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.train.order import position_of, samples_before
from ckptkit.train.prune import Keep
from ckptkit.train.saver import Saver
from ckptkit.train.state import RunState
from ckptkit.train.step_files import MOMENTS, side_files_in
from ckptkit.train.step_folders import StepFolder
from ckptkit.train.step_read import open_step, tensors_in
from ckptkit.train.step_write import Snapshot, Written, write_step
from tests.tiny_models import TinyModel, make_hf_plain, tensors_of

ROWS, BATCH = 10, 4
MODEL: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 24, "vocab": 19}
FACTS: dict[str, Any] = {"family": "llama"}
EMBEDDING = "model.embed_tokens.weight"


def make_model(folder: Path, **shape: Any) -> Path:
    """Write the model that the run began with, float32 and with a tokenizer of no use; return `folder`."""
    make_hf_plain(folder, **(MODEL | shape))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    return folder


def make_state(step: int, **changed: Any) -> RunState:
    fields: dict[str, Any] = {
        "step": step,
        "epoch": position_of(step, ROWS, BATCH).epoch,
        "sample_counter": samples_before(step, ROWS, BATCH),
        "rows": ROWS,
        "batch_size": BATCH,
        "micro_step": 2 * step,
        "slots": 2,
        "scaler": {"scale": 65536.0, "counter": step, "skipped": 0},
        "seeds": {"data": 0, "training": 1},
        "versions": {"mindspore": "2.9.0"},
        "maths": {"optimizer.lr": 0.003},
        "config_hash": "c0ffee",
        "corpus_fingerprint": "f00d",
        "loss": 1 / (step + 3),
    }
    return RunState(**(fields | changed))


def make_tensors(
    step: int, *, frozen: Collection[str] = (), **shape: Any
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return weights, of which the frozen ones know no step, and moments."""
    start = {n: a.view(np.float32) for n, a in tensors_of(TinyModel(**(MODEL | shape))).items()}
    weights = {name: array.copy() if name in frozen else array + np.float32(step) for name, array in start.items()}
    moments = {
        prefix + name: np.full(array.shape, 1000 * step + place, np.float32) + start[name]
        for place, prefix in enumerate(MOMENTS)
        for name, array in weights.items()
        if name not in frozen
    }
    return weights, moments


def make_snapshot(
    step: int, *, frozen: Collection[str] = (), shape: Mapping[str, Any] | None = None, **changed: Any
) -> Snapshot:
    weights, moments = make_tensors(step, frozen=frozen, **(shape or {}))
    return Snapshot(make_state(step, **changed), weights, moments, frozen)


def write(run: Path, model: Path, step: int, **options: Any) -> Written:
    """Write the checkpoint of a step; `options` are those of `write_step`, or of the snapshot."""
    passed = {key: options.pop(key) for key in ("previous", "keep", "max_shard_bytes") if key in options}
    return write_step(run, make_snapshot(step, **options), side_files=side_files_in(model), facts=FACTS, **passed)


def flip_last_bit(file: Path) -> None:
    """Change one bit of a file's last byte."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_holds(folder: Path, step: int, **options: object) -> None:
    """Hold what a step's folder has against the arrays that were saved, bit for bit."""
    weights, moments = make_tensors(step, **options)  # type: ignore[arg-type]
    found = dict(tensors_in(open_step(StepFolder(step, folder))))
    assert found.keys() == weights.keys() | moments.keys()
    for name, array in {**weights, **moments}.items():
        assert np.array_equal(found[name].view(np.uint32), array.view(np.uint32)), name


def save_steps(run: Path, model: Path, first: int, last: int) -> None:
    """Save the steps from `first` to `last` in the background, and print each step whose save is finished."""
    keep = Keep(2)
    previous: list[Path | None] = [None]
    side_files = side_files_in(model)

    def put(snapshot: Snapshot) -> None:
        written = write_step(run, snapshot, side_files=side_files, facts=FACTS, keep=keep, previous=previous[0])
        previous[0] = written.folder
        print(f"saved {written.step}", flush=True)

    with Saver(put) as saver:
        for step in range(first, last + 1):
            saver.save(make_snapshot(step, frozen=(EMBEDDING,)))


def main() -> None:
    save_steps(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))


if __name__ == "__main__":
    main()
