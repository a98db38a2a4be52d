"""The contract: the sink knows what it was not given, and a result of many files does not meet the limit half-way."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.errors import InternalError, ResourceError
from ckptkit.formats import safetensors
from ckptkit.formats.disk import OTHER_FILES, allow_open_files
from ckptkit.formats.file_sink import FileSink
from ckptkit.formats.mindspore_strategy import Strategy, dump_strategy
from ckptkit.formats.result_folder import ResultFolder
from ckptkit.types import TensorLayout, TensorSpec

NUM_FILES = 64
MANY_FILES = """
import resource, sys
from pathlib import Path
from ckptkit.commands import write
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.formats import files
from tests.rank_results import random_tensors, write_whole

source = Path(sys.argv[1])
write_whole(source / "model.safetensors", random_tensors({"model.w.weight": (8, 8), "model.v.weight": (8,)}))
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), int(sys.argv[4])))
if sys.argv[6] == "broken":
    write.allow_open_files = lambda count: None
    files.raise_open_files = lambda needed: needed
reshard(source, sys.argv[2], Parallel(dst_strategy=sys.argv[5]), workers=1)  # one tensor after another
"""


@pytest.fixture
def limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0], before[1]))


def test_an_output_that_never_came_is_noticed(tmp_path: Path) -> None:
    specs = [TensorSpec("a", (2,), "U8"), TensorSpec("b", (2,), "U8")]
    folder = ResultFolder(tmp_path / "out", "0" * 32)
    folder.open()
    sink = FileSink(folder, [safetensors.lay_out("f", specs, {})], [("a", 0), ("b", 0)])
    for number in range(2):
        with pytest.raises(InternalError, match="1 files of the result were not written to their end") as caught:
            sink.check_complete()
        assert caught.value.items == ("f",)
        sink.put(number, 0, memoryview(b"xy"))
        sink.finish(number, None)
    sink.check_complete()
    folder.close()


def test_a_file_of_empty_tensors_alone_is_made(tmp_path: Path) -> None:
    file = safetensors.lay_out("f", [TensorSpec("a", (0,), "U8"), TensorSpec("b", (2, 0), "F32")], {})
    folder = ResultFolder(tmp_path / "out", "0" * 32)
    folder.open()
    sink = FileSink(folder, [file], [("a", 0), ("b", 0)])
    for number in range(2):
        sink.finish(number, None)
    sink.check_complete()
    written = folder.partial / "f"
    assert written.read_bytes() == b"".join(data for _, data in file.fixed) and written.stat().st_size == file.size
    folder.close()


@pytest.mark.usefixtures("limits")
def test_the_limit_is_raised_as_far_as_needed() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OTHER_FILES + 100, hard))
    allow_open_files(100)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (OTHER_FILES + 100, hard)
    allow_open_files(200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (OTHER_FILES + 200, hard)


def test_a_limit_that_may_not_be_raised_is_told_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    with pytest.raises(ResourceError, match="the result has 1024 files that are written at once") as caught:
        allow_open_files(1024)
    assert caught.value.hint.startswith(
        f"raise the limit to {1024 + OTHER_FILES} (`ulimit -Hn`), or write some `--ranks`"
    )


@pytest.mark.parametrize(
    ("hard", "how", "said"),
    [
        (4096, "right", ""),
        (100, "right", "64 files that are written at once, and this process may open 100"),
        (4096, "broken", "this process has too many files open"),  # the control: the limit does bind
    ],
)
def test_more_ranks_than_files_may_be_open(tmp_path: Path, hard: int, how: str, said: str) -> None:
    """64 ranks are written at once where 50 files may be open."""
    layout = {
        "model.w.weight": TensorLayout((8, 8), ((1,), (0,))),
        "model.v.weight": TensorLayout((8, 8), ((1,),)),
    }
    shapes = {"model.w.weight": (8, 8), "model.v.weight": (8,)}
    (tmp_path / "strategy.ckpt").write_bytes(dump_strategy(Strategy(0, layout, shapes)))
    arguments = [tmp_path / "source", tmp_path / "out", 50, hard, tmp_path / "strategy.ckpt", how]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", MANY_FILES, *map(str, arguments)],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert said in done.stderr
    assert (done.returncode != 0) == bool(said), done.stderr
    if not said:
        assert len(list((tmp_path / "out").glob("rank_*/*"))) == NUM_FILES
    elif how == "right":
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == []
