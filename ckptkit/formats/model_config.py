"""The files beside the weights: config.json as a plain dict, and which files travel with a checkpoint.

Nothing here interprets a config: the tables' dims and flags do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.formats import files, folder
from ckptkit.formats.mindformers_folder import COMMON, METADATA, TRACKER, is_iteration

CONFIG = "config.json"
MANIFEST = "ckptkit.json"
_QUANTIZATION = ("quantization_config", "compression_config")
_PASSING_SUFFIXES = (".lock", ".incomplete", ".tmp", ".partial", ".aria2", ".crc")


def read_config(path: Path) -> dict[str, Any]:
    """Return the model's config from a folder or from the file itself.

    Raises UsageError when there is none, CorruptError when it is no JSON object or a git-lfs pointer.
    """
    file = path / CONFIG if path.is_dir() else path
    if not file.exists() and not file.is_symlink():
        raise UsageError(f"no `{CONFIG}` in `{file.parent}`", hint="name an HF folder or config.json with `--config`")
    return files.read_json_object(file)


def quantization(config: Mapping[str, Any]) -> str | None:
    """Return what a config says of quantised weights, as `gptq, 4 bits`; None when it says nothing."""
    key = next((key for key in _QUANTIZATION if config.get(key)), None)
    if key is None:
        return None
    found = config[key] if isinstance(config[key], dict) else {"quant_method": config[key]}
    method, bits = found.get("quant_method"), found.get("bits")
    text = method if isinstance(method, str) else "by a method that is not named"
    return f"{text}, {bits} bits" if isinstance(bits, int) else text


def side_files(path: Path) -> list[Path]:
    """Return the files of a folder that travel beside the weights, in natural order; links count as files.

    That is every file at the top level that is not a weight file, an index, training state, a lock, an unfinished
    download, hidden, ckptkit's own manifest, or what MindFormers says there of a checkpoint. Raises CoverageError for
    a dangling link, CorruptError for a git-lfs pointer.
    """
    own = (METADATA, COMMON) if is_iteration(path) else (TRACKER,)
    found = [path / name for name in folder.file_names(path) if _travels(name) and name not in own]
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
