"""The table on the terminal: a header, repeated now and then, and a line of aligned columns a step.

It goes to stderr: the report of the command goes to stdout. A terminal that is closed ends the table, not the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from ckptkit.errors import printable
from ckptkit.report import human_bytes

_HEADER_EVERY = 20
_BOLD, _PLAIN = "\033[1m", "\033[0m"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 1000 else f"{value:.0f}s"


# key of a line, title, width, what it looks like
_COLUMNS: tuple[tuple[str, str, int, Callable[[Any], str]], ...] = (
    ("step", "step", 7, str),
    ("epoch", "epoch", 5, str),
    ("loss", "loss", 9, lambda value: f"{value:.4f}"),
    ("lr", "lr", 9, lambda value: f"{value:.2e}"),
    ("grad_norm", "grad norm", 9, lambda value: f"{value:.4g}"),
    ("scale", "scale", 8, lambda value: f"{value:g}"),
    ("tokens_per_second", "tokens/s", 8, lambda value: f"{value:.0f}"),
    ("step_seconds", "step", 7, _seconds),
    ("data_wait", "data", 7, _seconds),
    ("save_stall", "saving", 7, _seconds),
    ("memory_bytes", "memory", 9, human_bytes),
    ("micro_batch", "micro", 5, str),
)


@dataclass(slots=True)
class Table:
    """A table that is being printed to `stream`; None once the stream is closed."""

    stream: TextIO | None
    bold: bool
    lines: int = 0

    def row(self, line: Mapping[str, Any]) -> None:
        """Print one step; columns of which the line has None are left out."""
        columns = [column for column in _COLUMNS if line.get(column[0]) is not None]
        if self.lines % _HEADER_EVERY == 0:
            header = "  ".join(f"{title:>{width}}" for _, title, width, _ in columns)
            self.say(f"{_BOLD}{header}{_PLAIN}" if self.bold else header, exactly=True)
        self.lines += 1
        self.say("  ".join(f"{form(line[key]):>{width}}" for key, _, width, form in columns))

    def say(self, text: str, *, exactly: bool = False) -> None:
        """Print a line between the rows."""
        if self.stream is None:
            return
        try:
            print(text if exactly else printable(text), file=self.stream, flush=True)
        except (OSError, ValueError):  # a terminal that went away, a file that was closed
            self.stream = None


def open_table(stream: TextIO) -> Table:
    """Return a table for `stream`; its header is bold on a terminal, unless NO_COLOR is set (no-color.org)."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return Table(stream, bold=not plain and stream.isatty())
