"""Run the command line: defaults from `ckptkit.toml`, every error printed, one exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import typer

from ckptkit.cli import convert as _convert
from ckptkit.cli import env as _env
from ckptkit.cli import look as _look
from ckptkit.cli import reshard as _reshard
from ckptkit.cli import tables as _tables
from ckptkit.cli import train as _train
from ckptkit.cli import verify as _verify
from ckptkit.cli.app import app, say
from ckptkit.errors import CkptkitError, InternalError, ResourceError, UsageError
from ckptkit.formats.files import name_error
from ckptkit.report import REPORT_SCHEMA
from ckptkit.settings import SETTINGS_FILE, default_map

STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}  # the exit code is 128 + the signal's number
# importing a module registers its commands with the app
COMMANDS = (_convert, _reshard, _verify, _train, _look, _tables, _env)
# typer carries its own copy of click, or uses the installed one; its errors' base class is found through typer
ClickError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Stopped(BaseException):
    """Ctrl-C or SIGTERM came. No KeyboardInterrupt, which typer would take for its own and end without a word."""

    def __init__(self, number: int) -> None:
        self.number = number


def run(args: Sequence[str]) -> int:
    """Run the command line on `args` and return the exit code; every error is printed here, and nowhere else."""
    as_json = "--json" in args
    try:
        command = typer.main.get_command(app)
        defaults = default_map(Path(SETTINGS_FILE), command)
        as_json = as_json or _json_by_default(defaults, args)
        result = command.main(list(args), prog_name="ckptkit", standalone_mode=False, default_map=defaults)
        return result if isinstance(result, int) else 0
    except CkptkitError as error:
        return _fail(error, args, as_json)
    except ClickError as error:
        return _fail_usage(error, args, as_json)
    except _Stopped as stop:
        return _say_stopped(stop.number)
    except (KeyboardInterrupt, typer.Abort):
        return _say_stopped(signal.SIGINT)
    except (BrokenPipeError, SystemExit):  # whoever read the help had enough; the parser itself exits with 1 then
        return 0
    except MemoryError:
        return _fail(ResourceError("memory ran out", hint="use fewer `--workers`"), args, as_json)
    except OSError as error:
        other = ResourceError(f"the system reports: {error}", hint="check the disk and the permissions")
        return _fail(name_error(str(error.filename), error) or other, args, as_json)
    except Exception as error:
        if os.environ.get("CKPTKIT_DEBUG"):
            raise
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        hint = "this is a bug in ckptkit: please report it; CKPTKIT_DEBUG=1 shows where it happened"
        return _fail(InternalError(f"internal error: {what}", hint=hint), args, as_json)


def _json_by_default(defaults: Mapping[str, Any], args: Sequence[str]) -> bool:
    """Say whether the settings ask for JSON for the command in `args`."""
    for arg in args:
        if isinstance(defaults.get(arg), dict):
            defaults = defaults[arg]
    return defaults.get("as_json") is True


def _say_stopped(number: int) -> int:
    how = "what has its final name is whole, and nothing else has; run the same command again to continue"
    say(f"\n{STOPPED[signal.Signals(number)]}: {how}", stream="stderr")
    return 128 + number


def _fail_usage(error: Any, args: Sequence[str], as_json: bool) -> int:
    """Print an error of the option parser: the help itself when there were no arguments at all."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        say(message, stream="stderr")
        return UsageError.exit_code
    context = getattr(error, "ctx", None)
    what = message[:1].lower() + message[1:].rstrip(".")
    return _fail(UsageError(what, hint=context.get_usage() if context else ""), args, as_json)


def _fail(error: CkptkitError, args: Sequence[str], as_json: bool) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    say(f"{red}error:{plain} {error}", stream="stderr")
    if as_json:
        say(json.dumps(_error_data(error, args), indent=1))
    return error.exit_code


def _error_data(error: CkptkitError, args: Sequence[str]) -> dict[str, Any]:
    command = next((arg for arg in args if not arg.startswith("-")), "")
    details = {"what": error.what, "items": list(error.items), "why": error.why, "hint": error.hint}
    kind = {"type": type(error).__name__, "exit_code": error.exit_code}
    return {"schema": REPORT_SCHEMA, "command": command, "ok": False, "error": kind | details}


def main() -> NoReturn:
    """Run the command line on this process's arguments."""
    _open_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's idle threads would only spin
    for number in STOPPED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    code = run(sys.argv[1:])
    for number in STOPPED:  # all is done and said; the interpreter's own end has no place for an exception
        signal.signal(number, signal.SIG_IGN)
    try:
        sys.stdout.flush()
    except OSError:  # else python tries again, and ends with a code of its own
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(code)


def _open_streams() -> None:
    """Put something in the place of streams that were closed, before a file of a checkpoint gets their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a plain locale cannot show


def _stop(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once, which is as safe
    raise _Stopped(number)
