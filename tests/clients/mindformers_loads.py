"""Let MindFormers' own load code read checkpoint folders of its newer kind, on a CPU.

    python mindformers_loads.py --jobs JOBS.json [--report FILE]

A job names a ROOT and the tensors that a network and its optimizer have, {NAME: [dtype, shape]}, and is one of:

    {"load": ROOT, "network": .., "optimizer": .., "to": FILE}         `load_checkpoint`, as one process
    {"load": ROOT, .., "ranks": [{NAME: LAYOUT}, ..], "to": FOLDER}    as each of N ranks in turn: its reader of
                                                          metadata, its loader, its `load_parameters`
    with "processes": true                                            the same, in N processes that `msrun` starts

A LAYOUT is [device matrix, tensor map, rank list]; NAME's shape is the whole one, and each rank has its part of it.
What a rank has loaded goes to FOLDER/N.safetensors. An exception is a job's answer: `{"error": TEXT}`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOG_v", "3")  # configured at import

import mindspore as ms
import numpy as np
from command import Job, run
from mindformers.checkpoint.checkpoint import get_checkpoint_path, load_checkpoint, load_parameters
from mindformers.checkpoint.metadata import get_metadata_of_checkpoint
from mindformers.checkpoint.reshard import ReshardLoader
from mindformers.checkpoint.sharded_tensor import build_sharded_tensor

WORKER = "worker"
FAILURES = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, FileNotFoundError)
DTYPES = {"F32": ms.float32, "BF16": ms.bfloat16, "I32": ms.int32}


def make_cell(wanted: Mapping[str, Any]) -> ms.nn.Cell:
    """Return a cell with a parameter of ones for each tensor: what is not loaded is seen."""
    cell = ms.nn.Cell()
    for number, (name, (dtype, shape)) in enumerate(wanted.items()):
        value = ms.Tensor(np.ones(shape, np.float32)).astype(DTYPES[dtype])
        cell.insert_param_to_cell(f"p{number}", ms.Parameter(value, name=name), check_name_contain_dot=False)
    return cell


def save(cells: list[ms.nn.Cell], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"name": p.name, "data": ms.Tensor(p)} for cell in cells for p in cell.get_parameters()]
    ms.save_checkpoint(rows, str(file), format="safetensors")


def load_whole(job: Job) -> None:
    network, optimizer = make_cell(job["network"]), make_cell(job["optimizer"])
    folder = get_checkpoint_path(job["load"])
    load_checkpoint(folder, network, optimizer=optimizer if job["optimizer"] else None)
    save([network, optimizer], Path(job["to"]))


def load_as_rank(job: Job, rank: int) -> None:
    """Load what `rank` has, as `load_checkpoint` does once the compiler has told it the layouts."""
    layouts = job["ranks"][rank]
    folder = get_checkpoint_path(job["load"])
    sources, storage = get_metadata_of_checkpoint(folder)
    whole = {**job["network"], **job["optimizer"]}
    local = {name: (whole[name][0], local_shape(whole[name][1], layouts[name])) for name in layouts}
    targets = {
        name: build_sharded_tensor(
            name, DTYPES[dtype], shape, whole[name][1], global_offset=(0,), layout=as_layout(layouts[name])
        )
        for name, (dtype, shape) in local.items()
    }
    state = ReshardLoader(folder, targets, sources, storage).load()
    cells = [make_cell({n: local[n] for n in job[kind] if n in local}) for kind in ("network", "optimizer")]
    load_parameters(cells[0], state, cells[1])
    save(cells, Path(job["to"]) / f"{rank}.safetensors")


def as_layout(layout: list[Any]) -> ms.parallel.Layout:
    matrix, axes, ranks = layout
    names = "abcdefgh"[: len(matrix)]
    words = [tuple(names[len(matrix) - 1 - m] for m in axis) if axis else "None" for axis in axes]
    return ms.parallel.Layout(tuple(matrix), tuple(names), ranks)(*words)


def local_shape(shape: list[int], layout: list[Any]) -> list[int]:
    matrix, axes, _ = layout
    parts = [prod(matrix[len(matrix) - 1 - m] for m in axis) for axis in axes]
    return [size // count for size, count in zip(shape, parts, strict=True)]


def run_processes(job: Job) -> None:
    """Start a process for each rank, by `msrun`, and wait for them."""
    folder = Path(job["to"])
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(job))
    count = str(len(job["ranks"]))
    command = [str(Path(sys.executable).with_name("msrun")), "--worker_num", count, "--local_worker_num", count,
               "--master_port", str(20000 + os.getpid() % 20000), "--log_dir", str(folder / "logs"), "--join", "True",
               __file__, WORKER, str(folder / "job.json")]  # fmt: skip
    here = str(Path(sys.executable).parent)  # msrun starts whatever `python` is
    path = os.pathsep.join([here, os.environ.get("PATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=240,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])


def worker(file: str) -> None:
    ms.set_context(device_target="CPU")
    ms.communication.init()
    load_as_rank(json.loads(Path(file).read_text()), ms.communication.get_rank())


def run_job(job: Job) -> Job:
    """Run one job and return its part of the report."""
    try:
        if "ranks" not in job:
            load_whole(job)
        elif job.get("processes"):
            run_processes(job)
        else:
            for rank in range(len(job["ranks"])):
                os.environ["RANK_ID"] = str(rank)
                load_as_rank(job, rank)
    except FAILURES as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        worker(sys.argv[2])
    else:
        sys.exit(run(run_job, argparse.ArgumentParser(description=__doc__)))
