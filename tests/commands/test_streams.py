"""The contract: a stream that is closed, full or cut short changes no exit code and shows no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ckptkit.cli import run
from tests.tiny_models import make_hf_plain


def python(command: str, shell: Callable[[str], str], cwd: Path) -> subprocess.CompletedProcess[str]:
    line = shell(f"{sys.executable} -m ckptkit {command}")
    return subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_streams_that_are_closed_or_full_change_no_exit_code(room: Path) -> None:
    for shell in ("{} 2>&-", "{} 2>/dev/full", "{} 1>&- 2>&-", "{} >/dev/full 2>/dev/full"):
        found = python("inspect gone --json", lambda line, shell=shell: shell.format(line), room)  # type: ignore[misc]
        assert found.returncode == 2, (shell, found)
    found = python("inspect gone --json", "{} 2>&-".format, room)
    assert json.loads(found.stdout)["error"]["exit_code"] == 2
    assert python("inspect hf", "{} 1>&-".format, room).returncode == 0
    found = python("inspect hf", "{} <&- 1>&- 2>&-".format, room)
    assert found.returncode == 0


def test_a_report_that_cannot_be_written_is_said_to_be_all_that_is_lost(room: Path) -> None:
    found = python("convert hf ms", "{} >/dev/full".format, room)
    assert found.returncode == 4
    assert "only the report is lost" in found.stderr
    assert "Traceback" not in found.stderr
    assert run(["check", "ms"]) == 0


def test_help_that_nobody_reads_or_that_has_no_room_is_no_traceback(room: Path) -> None:
    assert python("--help", "{} >/dev/full".format, room).returncode == 4
    found = python("--help", "{} | true; exit ${{PIPESTATUS[0]}}".format, room)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_exit_code_of_a_difference_survives_a_broken_pipe(room: Path) -> None:
    make_hf_plain(room / "other", seed=1)
    found = python("diff hf other", "{} | true; exit ${{PIPESTATUS[0]}}".format, room)
    assert found.returncode == 1
    assert found.stderr == ""
