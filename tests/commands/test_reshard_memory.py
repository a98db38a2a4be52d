"""The memory law: anonymous memory stays within 64 MB and 4 KB a slice, whatever the size of the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.formats.mindspore_strategy import Strategy, dump_strategy
from ckptkit.types import TensorLayout
from tests.rank_results import write_whole

RUN = """
import re, sys, threading, time
from pathlib import Path
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

source, strategy, target, hold = sys.argv[1:]
done, peak = threading.Event(), [0]
watcher = threading.Thread(target=watch)
watcher.start()
held = [file.read_bytes() for file in Path(source).rglob("*.safetensors")] if hold else []
report = reshard(source, target, Parallel(dst_strategy=strategy))
done.set()
watcher.join()
print(peak[0], report.to_json() and report.data["summary"]["peak_memory_bytes"])
"""
SHAPE = (6144, 6144)  # 75 MB of 16-bit elements


def layout(folder: Path, devices: int) -> Path:
    """Write a strategy that cuts one tensor by rows, and one by columns."""
    cuts = {"rows": ((0,), ()), "columns": ((), (0,))}
    file = folder / f"{devices}.ckpt"
    file.write_bytes(dump_strategy(Strategy(0, {n: TensorLayout((devices,), c) for n, c in cuts.items()}, {})))
    return file


@pytest.mark.parametrize("holds_all", [False, True])
def test_a_reshard_of_four_ranks_to_three_keeps_the_memory_law(tmp_path: Path, holds_all: bool) -> None:
    values = np.arange(SHAPE[0] * SHAPE[1], dtype=np.uint16).reshape(SHAPE)
    whole = write_whole(tmp_path / "whole.safetensors", {"rows": values, "columns": values})
    reshard(whole, tmp_path / "four", Parallel(dst_strategy=layout(tmp_path, 4)))
    words = [tmp_path / "four", layout(tmp_path, 3), tmp_path / "three", "hold" if holds_all else ""]
    done = subprocess.run([sys.executable, "-c", RUN, *map(str, words)], capture_output=True, text=True, check=True)
    peak, promised = map(int, done.stdout.split())
    assert (peak > promised) == holds_all
