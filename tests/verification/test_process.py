"""What a runner says went wrong is raised as the error that it was, with its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner_jobs import config_of, job_of, make_folder

from ckptkit.errors import (
    CkptkitError,
    CorruptError,
    CoverageError,
    InternalError,
    ResourceError,
    UnsafeError,
    UsageError,
)
from ckptkit.verification.process import error_of, run_process
from ckptkit.verification.runners.job import Job
from ckptkit.verification.runners.main import main
from ckptkit.verification.runners.net import Net


def test_an_error_of_a_runner_comes_back_whole(tmp_path: Path) -> None:
    """This one is raised before any framework is imported."""
    job = job_of(make_folder(tmp_path / "hf", config_of("llama")), device="tpu")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="`--device tpu` is no device") as caught:
        run_process("builtin", job, tmp_path / "out", lambda _: None)
    assert "`ascend`" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (UsageError, UsageError),
        (CoverageError, CoverageError),
        (ResourceError, ResourceError),
        (CorruptError, CorruptError),
        (UnsafeError, CorruptError),  # of its exit code
        (InternalError, InternalError),
    ],
)
def test_an_error_of_every_kind_keeps_its_exit_code(
    tmp_path: Path, kind: type[CkptkitError], raised: type[CkptkitError]
) -> None:
    def build(job: Job) -> Net:
        raise kind("it went wrong", items=["one", "two"], why="so", hint="do this")

    out = tmp_path / "out"
    out.mkdir()
    job_of(make_folder(tmp_path / "hf", config_of("llama"))).write(tmp_path)
    code = main(build, [str(tmp_path), str(out)])
    error = error_of("torch", code, out, [])
    assert (type(error), error.exit_code) == (raised, kind.exit_code)
    assert (error.what, error.items, error.why, error.hint) == ("it went wrong", ("one", "two"), "so", "do this")


@pytest.mark.parametrize(("code", "says"), [(-9, "killed by signal 9"), (1, "ended with 1 and left no report")])
def test_a_runner_that_ends_without_a_word_is_an_error_with_its_last_lines(
    tmp_path: Path, code: int, says: str
) -> None:
    error = error_of("torch", code, tmp_path, ["Traceback", "MemoryError"])
    assert type(error) is ResourceError and says in error.what and error.items == ("Traceback", "MemoryError")
