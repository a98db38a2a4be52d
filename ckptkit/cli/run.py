"""Run the command line: defaults from `ckptkit.toml`, every error printed, one exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer

from ckptkit.cli import convert as _convert
from ckptkit.cli import env as _env
from ckptkit.cli import look as _look
from ckptkit.cli import tables as _tables
from ckptkit.cli.app import app
from ckptkit.errors import CkptkitError, InternalError, ResourceError, UsageError
from ckptkit.report import REPORT_SCHEMA
from ckptkit.settings import SETTINGS_FILE, default_map

STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}  # the exit code is 128 + the signal's number
COMMANDS = (_convert, _look, _tables, _env)  # importing a module registers its commands with the app
# typer carries its own copy of click, or uses the installed one; its errors' base class is found through typer
ClickError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Stopped(BaseException):
    """Ctrl-C or SIGTERM came. No KeyboardInterrupt, which typer would take for its own and end without a word."""

    def __init__(self, number: int) -> None:
        self.number = number


def run(args: Sequence[str]) -> int:
    """Run the command line on `args` and return the exit code; every error is printed here, and nowhere else."""
    try:
        command = typer.main.get_command(app)
        defaults = default_map(Path(SETTINGS_FILE), command)
        result = command.main(list(args), prog_name="ckptkit", standalone_mode=False, default_map=defaults)
        return result if isinstance(result, int) else 0
    except CkptkitError as error:
        return _fail(error, args)
    except ClickError as error:
        return _fail_usage(error, args)
    except _Stopped as stop:
        return _say_stopped(stop.number)
    except (KeyboardInterrupt, typer.Abort):
        return _say_stopped(signal.SIGINT)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except MemoryError:
        return _fail(ResourceError("memory ran out", hint="use fewer `--workers`"), args)
    except OSError as error:
        return _fail(ResourceError(f"the system reports: {error}", hint="check the disk and the permissions"), args)
    except Exception as error:
        if os.environ.get("CKPTKIT_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "this is a bug in ckptkit: please report it; CKPTKIT_DEBUG=1 shows where it happened"
        return _fail(InternalError(f"internal error: {what}", hint=hint), args)


def _say_stopped(number: int) -> int:
    how = "no part of a result has been given its final name; run the same command again to continue"
    print(f"\n{STOPPED[signal.Signals(number)]}: {how}", file=sys.stderr)
    return 128 + number


def _fail_usage(error: Any, args: Sequence[str]) -> int:
    """Print an error of the option parser: the help itself when there were no arguments at all."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return UsageError.exit_code
    context = getattr(error, "ctx", None)
    what = message[:1].lower() + message[1:].rstrip(".")
    return _fail(UsageError(what, hint=context.get_usage() if context else ""), args)


def _fail(error: CkptkitError, args: Sequence[str]) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}error:{plain} {error}", file=sys.stderr)
    if "--json" in args:
        print(json.dumps(_error_data(error, args), indent=1, ensure_ascii=False))
    return error.exit_code


def _error_data(error: CkptkitError, args: Sequence[str]) -> dict[str, Any]:
    command = next((arg for arg in args if not arg.startswith("-")), "")
    details = {"what": error.what, "items": list(error.items), "why": error.why, "hint": error.hint}
    kind = {"type": type(error).__name__, "exit_code": error.exit_code}
    return {"schema": REPORT_SCHEMA, "command": command, "ok": False, "error": kind | details}


def main() -> NoReturn:
    """Run the command line on this process's arguments."""
    for number in STOPPED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    sys.exit(run(sys.argv[1:]))


def _stop(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once, which is as safe
    raise _Stopped(number)
