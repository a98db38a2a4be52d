"""`ckptkit runs`: the checkpoints of a training run, listed and pruned.

What does not live here: what makes a checkpoint whole (`train/step_read.py`), which ones stay (`train/prune.py`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptkitError, ResourceError, UsageError
from ckptkit.formats import files
from ckptkit.formats.manifest import MANIFEST
from ckptkit.report import Report, human_bytes, listed
from ckptkit.train.prune import Keep, prune
from ckptkit.train.step_folders import LATEST, StepFolder, folder_of, latest_hint, scan
from ckptkit.train.step_read import StepContent, open_step


def list_runs(folder: str | Path, *, digests: bool = False) -> Report:
    """List the checkpoints in the folder of a run, newest first: step, date, size, losses, and whether each is whole.

    Sizes, headers and manifests are looked at; with `digests` every byte is read. The exit code is 1 when one is not
    whole. Raises UsageError when `folder` is no run.
    """
    run = Path(folder)
    found = [(step, *_open(step, digests=digests)) for step in _steps(run)]
    whole = [content for _, content, _ in found if content is not None]
    best = whole[0].state.best if whole else None
    report = Report("runs ls", f"`{run}`: {_count(len(found))}, {len(whole)} whole")
    report.exit_code = int(len(whole) < len(found))
    rows = []
    for step, content, fault in found:
        is_best = best is not None and step.step == best["step"]
        row = _row(step, content, fault) | {"newest": bool(whole) and content is whole[0], "best": is_best}
        rows.append(row)
        own = "" if step.path == folder_of(run, step.step) else f"`{step.path.name}`  "
        report.add(f"step {step.step}", own + _text(row, best))
    hint = latest_hint(run)
    if whole and hint != whole[0].path.name:
        report.add("note", f"{LATEST} {f'names `{hint}`' if hint else 'names none'}; nothing relies on it")
    if not digests:
        report.add("note", "sizes and headers were looked at; `--digests` reads every byte")
    report.data = {"path": str(run), "digests_compared": digests, "latest": hint, "checkpoints": rows}
    return report


def prune_runs(folder: str | Path, *, keep_last: int = 2, keep_best: bool = False, dry_run: bool = False) -> Report:
    """Remove all checkpoints of a run but the `keep_last` newest whole ones and, with `keep_best`, the best one.

    Every byte of the newest one is read first: a damaged one does not count. What is not a whole checkpoint is left
    alone. `dry_run` says what would go. Raises UsageError when `folder` is no run, ResourceError when something
    cannot be removed; what could be is gone then.
    """
    run = Path(folder)
    steps = _steps(run)
    keep = Keep(keep_last, best=_best(steps) if keep_best else None)
    pruned = prune(run, keep, verify_newest=True, dry_run=dry_run)
    if pruned.failures:
        raise ResourceError(
            f"{_count(len(pruned.failures))} in `{run}` could not be removed",
            items=pruned.failures,
            hint="check the permissions of the folder, then run the same command again",
        )
    would = "would be " if dry_run else ""
    report = Report("runs prune", f"`{run}`: {_count(len(pruned.removed))} {would}removed, {len(pruned.kept)} kept")
    for label, names in (("removed", pruned.removed), ("kept", pruned.kept), ("left alone", pruned.left)):
        for text in listed(names):
            report.add(f"{would}{label}" if label == "removed" else label, text)
    report.add("space", f"{human_bytes(pruned.freed_bytes)} {would}freed")
    report.data = {
        "path": str(run),
        "dry_run": dry_run,
        "removed": list(pruned.removed),
        "kept": list(pruned.kept),
        "left": list(pruned.left),
        "freed_bytes": pruned.freed_bytes,
    }
    return report


def _steps(run: Path) -> list[StepFolder]:
    """Return the step folders of a run; UsageError where there are none."""
    if files.look(run) is None:
        raise UsageError(f"no such folder: `{run}`")
    steps = scan(run)
    if not steps:
        below = sorted(path.name for path in run.iterdir() if path.is_dir() and scan(path))
        raise UsageError(
            f"`{run}` holds no checkpoints of a run",
            items=below,
            why="they are called `step-00000008`, after the updates that were done",
            hint="name one of these: they do"
            if below
            else "name the folder that `checkpoint.folder` of the config says",
        )
    return steps


def _open(step: StepFolder, *, digests: bool) -> tuple[StepContent | None, str]:
    """Return a checkpoint, or what is wrong with it."""
    try:
        return open_step(step, digests=digests), ""
    except CkptkitError as error:
        return None, error.what


def _best(steps: list[StepFolder]) -> int | None:
    """Return the step that the newest whole checkpoint calls the best one."""
    for step in steps:
        content, _ = _open(step, digests=False)
        if content is not None:
            return int(content.state.best["step"]) if content.state.best else None
    return None


def _row(step: StepFolder, content: StepContent | None, fault: str) -> dict[str, Any]:
    manifest = step.path / MANIFEST
    written = manifest if manifest.is_file() else step.path
    found = [path.stat() for path in step.path.rglob("*") if path.is_file()]
    return {
        "step": step.step,
        "name": step.path.name,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(written.stat().st_mtime)),
        "whole": content is not None,
        "fault": fault or None,
        "bytes": sum(stat.st_size for stat in found),
        "shared_bytes": sum(stat.st_size for stat in found if stat.st_nlink > 1),
        "epoch": content.state.epoch if content else None,
        "loss": content.state.loss if content else None,
    }


def _text(row: dict[str, Any], best: Any) -> str:
    size = human_bytes(row["bytes"])
    if row["shared_bytes"]:
        size += f" ({human_bytes(row['shared_bytes'])} shared with others)"
    date = row["written"][:19].replace("T", " ")
    if not row["whole"]:
        return f"{date}  {size}  NOT WHOLE: {row['fault']}"
    parts = [date, "whole", size]
    if row["loss"] is not None:
        parts.append(f"loss {row['loss']:.4f}")
    if row["best"]:
        parts.append(f"best (evaluation loss {best['loss']:.4f})")
    if row["newest"]:
        parts.append("newest")
    return "  ".join(parts)


def _count(number: int) -> str:
    return "1 checkpoint" if number == 1 else f"{number} checkpoints"
