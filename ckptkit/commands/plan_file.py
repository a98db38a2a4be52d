"""`--plan FILE`: the plan as JSON. It never takes the place of a file that ckptkit was not asked to replace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.formats import files
from ckptkit.formats.disk import disk_error, write_file
from ckptkit.formats.target import overlap
from ckptkit.plan.plan import Plan

_THEN = "or name another file"


def check_plan_file(path: Path, result: Path, sources: Iterable[Path]) -> None:
    """Raise UsageError when no plan may be written to `path`: into the result or a source, or to no regular file."""
    real = Path(os.path.realpath(path))
    found = files.look(path)
    if found is not None:
        files.regular_file(path, "`--plan`")
        if any(_is_open_as(stream, found) for stream in (1, 2)):
            raise UsageError(f"`--plan {path}` is where the report goes", hint="name a file for the plan alone")
    if overlap(Path(os.path.realpath(result)), path):
        raise UsageError(f"`--plan {path}` is inside the result", hint="write the plan beside it")
    if any(overlap(real, source) for source in sources):
        raise UsageError(
            f"`--plan {path}` is a part of the input, or inside it",
            why="the input is never written",
            hint="write the plan to another folder",
        )
    if not real.parent.is_dir():
        raise UsageError(f"no such folder: `{real.parent}` (`--plan`)", hint="make it first")


def _is_open_as(stream: int, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(stream), found)
    except OSError:  # closed
        return False


def write_plan_file(path: Path, plan: Plan, *, overwrite: bool) -> None:
    """Write the plan, all of it or nothing; UsageError when `path` holds something else, unless `overwrite`."""
    real = Path(os.path.realpath(path))
    data = (json.dumps(plan.to_json(), indent=1) + "\n").encode()
    if real.exists():
        if real.read_bytes() == data:  # as when a killed run is given again
            return
        if not overwrite:
            raise UsageError(
                f"`--plan {path}` is there already, and holds something else",
                hint="name another file, or pass `--overwrite`",
            )
    partial = real.with_name(f".ckptkit-plan-{os.getpid()}")
    try:
        write_file(partial, data, why="", then=_THEN)
        partial.replace(real)
    except OSError as error:
        raise disk_error(error, real, why="", then=_THEN) from error
    finally:
        partial.unlink(missing_ok=True)
