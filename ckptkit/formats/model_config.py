"""The files beside the weights: config.json as a plain dict, and which files travel with a checkpoint.

transformers 4 and 5 spell some keys differently: `torch_dtype` became `dtype`, `rope_theta` and `rope_scaling` became
`rope_parameters`. Both are read here; nothing else interprets a config here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, UsageError
from ckptkit.formats import files, folder

CONFIG = "config.json"
MANIFEST = "ckptkit.json"
DEFAULT_ROPE_THETA = 10000.0
_PASSING_SUFFIXES = (".lock", ".incomplete", ".tmp", ".partial", ".aria2", ".crc")


def read_config(path: Path) -> dict[str, Any]:
    """Return the model's config from a folder or from the file itself.

    Raises UsageError when there is none, CorruptError when it is no JSON object or a git-lfs pointer.
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.exists() and not file.is_symlink():
        raise UsageError(f"no `{CONFIG}` in `{file.parent}`", hint="name an HF folder or config.json with `--config`")
    return files.read_json_object(file)


def rope_theta(config: Mapping[str, Any]) -> float:
    """Return the rotary base; 10000 when the config has none, as in transformers.

    Raises CorruptError when both spellings are there and differ.
    """
    new = config.get("rope_parameters")
    stated = [
        value
        for value in (config.get("rope_theta"), new.get("rope_theta") if isinstance(new, dict) else None)
        if value is not None
    ]
    if len(stated) == 2 and stated[0] != stated[1]:
        raise CorruptError(
            f"config has rope_theta {stated[0]} and rope_parameters.rope_theta {stated[1]}",
            why="transformers 4 reads the first and transformers 5 the second",
            hint="remove the wrong one",
        )
    return float(stated[0]) if stated else DEFAULT_ROPE_THETA


def rope_scaling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary scaling as transformers 4 spells it, or None for plain rotary embedding."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return None
    result = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type")}
    result.setdefault("rope_type", scaling.get("type", "default"))
    return None if result == {"rope_type": "default"} else result


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that the config states, as torch names it (`bfloat16`), or None."""
    value = config.get("dtype") or config.get("torch_dtype")
    return value.removeprefix("torch.") if isinstance(value, str) else None


def side_files(path: Path) -> list[Path]:
    """Return the files of a folder that travel beside the weights, in natural order; links count as files.

    That is every file at the top level that is not a weight file, an index, training state, a lock, an unfinished
    download, hidden, or ckptkit's own manifest. Raises CoverageError for a dangling link, CorruptError for a
    git-lfs pointer.
    """
    found = [path / name for name in folder.file_names(path) if _travels(name)]
    for file in found:
        if file.is_symlink() and not file.exists():
            raise files.dangling_link(file)
    found = [file for file in found if file.is_file()]
    for file in found:
        with files.opened(file) as descriptor:
            head = files.pread(file, descriptor, files.HEAD_BYTES, 0)
        if head:
            files.refuse_empty_or_pointer(file, head)
    return found


def _travels(name: str) -> bool:
    return not (
        name.startswith((".", "events.out.tfevents"))
        or name == MANIFEST
        or name.endswith(_PASSING_SUFFIXES)
        or folder.is_weight(name)
        or folder.is_index(name)
        or folder.is_training_state(name)
    )
