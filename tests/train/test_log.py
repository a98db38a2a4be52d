"""The contract: what a run wrote down is strict JSON with exact numbers, and a kill costs one line at most."""

from __future__ import annotations

import io
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CorruptError, ResourceError, UsageError
from ckptkit.train.evaluate import perplexity
from ckptkit.train.log import Evaluation, Log, StepLine, open_log
from ckptkit.train.log_file import read_log


@dataclass(frozen=True)
class Settings:
    every: int = 1
    file: Path | None = None
    tensorboard: Path | None = None
    sample_ids: bool = False
    console: bool = True


LINE = StepLine(
    step=1, epoch=0, loss=2.5, lr=1e-3, grad_norm=0.75, scale=None, overflows=0, tokens=120, tokens_per_second=800.0,
    data_wait=0.001, step_seconds=0.15, memory_bytes=300_000_000, save_stall=0.0, micro_batch=2, recompute=0,
    sample_ids=(3, 1),
)  # fmt: skip


def at(step: int, **changed: Any) -> StepLine:
    return replace(LINE, step=step, **changed)


def opened(run: Path, start: int = 0, **settings: Any) -> tuple[Log, io.StringIO]:
    shown = io.StringIO()
    return open_log(Settings(**settings), run, start, shown), shown


def parsed(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_step_has_the_documented_keys_and_every_step_a_line(tmp_path: Path) -> None:
    log, shown = opened(tmp_path / "run", every=2)
    for step in (1, 2, 3, 4):
        log.step(at(step))
    log.close()
    lines = parsed(tmp_path / "run/log.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert list(lines[0]) == [
        "kind", "step", "epoch", "loss", "lr", "grad_norm", "scale", "overflows", "tokens", "tokens_per_second",
        "data_wait", "step_seconds", "memory_bytes", "save_stall", "micro_batch", "recompute",
    ]  # fmt: skip
    assert [row.split()[0] for row in shown.getvalue().splitlines()] == ["step", "2", "4"]


def test_sample_ids_are_written_when_they_are_asked_for(tmp_path: Path) -> None:
    log, _ = opened(tmp_path, sample_ids=True)
    log.step(LINE)
    log.close()
    assert parsed(tmp_path / "log.jsonl")[0]["ids"] == [3, 1]


@given(st.lists(st.floats(width=32), min_size=1, max_size=5))
def test_numbers_read_back_as_the_same_bits_and_what_is_none_is_named(losses: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, _ = opened(Path(folder), console=False)
        for step, loss in enumerate(losses, 1):
            log.step(at(step, loss=loss))
        log.close()
        parsed(Path(folder) / "log.jsonl")
        for step, line in read_log(Path(folder) / "log.jsonl").steps.items():
            loss = losses[step - 1]
            if math.isfinite(loss):
                assert struct.pack("<d", line["loss"]) == struct.pack("<d", loss)
            else:
                assert line["loss"] is None
                assert line["not_finite"] == {"loss": str(loss)}


def test_a_reader_takes_the_last_line_of_a_step_and_orders_steps(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    for step in (1, 2, 3, 4):
        log.step(at(step, step_seconds=1.0))
    log.eval(4, Evaluation(loss=1.0, perplexity=perplexity(1.0), tokens=9, seconds=0.1))
    log.close()
    log, _ = opened(tmp_path, start=2)
    log.note("resumed from step 2", step=2)
    for step in (3, 4, 5):
        log.step(at(step, step_seconds=2.0))
    log.close()
    found = read_log(tmp_path / "log.jsonl")
    assert [(step, line["step_seconds"]) for step, line in found.steps.items()] == [
        (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0),
    ]  # fmt: skip
    assert found.evals[4]["perplexity"] == math.e
    assert found.notes[0]["text"] == "resumed from step 2"


def test_a_line_that_a_kill_tore_is_cut_off_at_every_length(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    log.step(at(1))
    log.step(at(2))
    log.close()
    file = tmp_path / "log.jsonl"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        read_log(file)  # a torn line is none yet
        log, _ = opened(tmp_path)
        log.step(at(3))
        log.close()
        assert [line["step"] for line in parsed(file)] == ([3] if length < first else [1, 3])


def test_without_the_repair_the_torn_line_would_spoil_the_next(tmp_path: Path) -> None:
    """The control of the test above."""
    log, _ = opened(tmp_path)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'{"kind": "st')
    log.step(at(1))
    log.close()
    with pytest.raises(CorruptError, match=r"line 1 of .* is no line of a log"):
        read_log(tmp_path / "log.jsonl")


def test_a_long_torn_end_is_cut_off(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    log.step(at(1))
    log.close()
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b"\0" * 200_000)  # what a loss of power may leave
    opened(tmp_path)[0].close()
    assert [line["step"] for line in parsed(tmp_path / "log.jsonl")] == [1]


def test_a_file_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("buy milk")
    with pytest.raises(UsageError, match="no log of a run"):
        opened(tmp_path, file=notes)
    assert notes.read_text() == "buy milk"


def test_a_disk_that_is_full_is_an_error_in_words(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log.fd)
    os.close(full)
    with pytest.raises(ResourceError, match="no space is left"):
        log.step(LINE)
    log.close()
    with pytest.raises(ResourceError, match="cannot write"):
        opened(tmp_path, file=tmp_path)


_KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_log import opened, at
log, _ = opened(Path(sys.argv[1]))
for step in range(1, 10**6):
    log.step(at(step))
    print(step, flush=True)
"""


def test_lines_that_were_written_outlive_a_kill(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    run = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path), here], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    last = [int(run.stdout.readline()) for _ in range(random.randrange(20, 200))][-1]
    run.send_signal(signal.SIGKILL)
    run.communicate()
    opened(tmp_path)[0].close()
    steps = [line["step"] for line in parsed(tmp_path / "log.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= last


# the table


def test_columns_are_aligned_and_the_header_comes_again(tmp_path: Path) -> None:
    log, shown = opened(tmp_path)
    for step in range(1, 42):
        log.step(at(step, loss=10.0 / step, scale=65536.0))
    log.close()
    rows = shown.getvalue().splitlines()
    assert [i for i, row in enumerate(rows) if "grad norm" in row] == [0, 21, 42]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert "scale" in rows[0] and "300.0 MB" in rows[1]


def test_without_a_loss_scale_there_is_no_such_column(tmp_path: Path) -> None:
    log, shown = opened(tmp_path)
    log.step(LINE)
    log.close()
    assert "scale" not in shown.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "bold"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_no_color_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], bold: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    shown = Terminal()
    log = open_log(Settings(), tmp_path, 0, shown)
    log.step(LINE)
    log.close()
    assert ("\033[" in shown.getvalue()) == bold


def test_the_table_can_be_turned_off_and_notes_are_printed_all_the_same(tmp_path: Path) -> None:
    log, shown = opened(tmp_path, console=False)
    log.step(LINE)
    log.note("resumed from step 0\nand \033[31mmore")
    log.close()
    assert shown.getvalue() == "resumed from step 0\\nand \\x1b[31mmore\n"


def test_a_terminal_that_is_closed_ends_the_table_and_not_the_run(tmp_path: Path) -> None:
    log, shown = opened(tmp_path)
    shown.close()
    log.step(at(1))
    log.step(at(2))
    log.close()
    assert len(parsed(tmp_path / "log.jsonl")) == 2


def test_a_perplexity_beyond_floats_is_infinite() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
