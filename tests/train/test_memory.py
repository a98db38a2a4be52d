"""The contract: the peak of a step is that of the step, and the limit is the smallest that the system says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckptkit.memory import allowed_bytes
from ckptkit.train.memory import Meter, default_limit, open_meter


def test_the_peak_of_a_step_is_that_of_the_step() -> None:
    """100 MB are written to, then freed: seen in that step and not in the next. 5 % for what else the process does."""
    code = (
        "from ckptkit.train.memory import open_meter\n"
        "meter = open_meter()\nmeter.start()\nbase = meter.peak_bytes()\n"
        "size = 100_000_000\nblock = b'x' * size\ndel block\n"
        "first = meter.peak_bytes() - base\nmeter.start()\nprint(first, meter.peak_bytes() - base, meter.note)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second, *note = done.stdout.split()
    assert 95e6 < int(first) < 105e6
    assert int(second) < 5e6 or note, "only where the system allows no better, and that is said"


def test_without_clear_refs_the_process_peak_stands_in_with_a_note(tmp_path: Path) -> None:
    meter = open_meter(tmp_path)
    assert "never falls" in meter.note
    meter.start()
    assert meter.peak_bytes() == Meter(tmp_path, "a note").peak_bytes() > 10**6


def test_the_limit_is_the_smallest_of_the_machine_and_its_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16000000 kB\nMemFree: 1 kB\n")
    assert allowed_bytes(proc, groups) == 16000000 * 1024
    (proc / "self/cgroup").write_text("4:cpu,memory:/a/b\n3:cpu:/z\n0::/c/d\n")
    for name, text in {
        "c/memory.max": "9000000000\n",
        "c/d/memory.max": "max\n",
        "memory/a/memory.limit_in_bytes": "8000000000",
    }.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    assert allowed_bytes(proc, groups) == 8_000_000_000
    assert default_limit(proc, groups) == 7_200_000_000
    (groups / "memory/a/memory.limit_in_bytes").write_text("9223372036854771712")
    assert allowed_bytes(proc, groups) == 9_000_000_000
    assert default_limit(tmp_path / "none", tmp_path / "none") is None


def test_this_machine_says_what_it_has() -> None:
    assert (default_limit() or 0) > 10**8
