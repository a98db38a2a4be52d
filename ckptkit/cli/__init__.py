"""The command line: parse, call one command function, print its report, set the exit code.

stdout carries the report (or its JSON), stderr the progress bar and errors. Exit codes: 0 done; 1 a difference was
found; 2 bad usage; 3 coverage; 4 space, memory or disk; 5 corrupt or unsafe input; 6 training ran into NaN; 70 an
internal error; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

from ckptkit.cli.run import main, run

__all__ = ["main", "run"]
