"""Open what the user names: a checkpoint, its config.json, its manifest, the files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.manifest import compare_with_manifest, read_manifest
from ckptkit.formats.model_config import read_config, side_files
from ckptkit.formats.registry import open_checkpoint
from ckptkit.formats.wrappers import unwrap


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint with what lies beside it. `manifest` is None for a folder that ckptkit did not write."""

    checkpoint: Checkpoint
    manifest: Mapping[str, Any] | None

    @property
    def promised_digests(self) -> dict[str, str]:
        """The digests that the manifest promises, by tensor name."""
        rows = self.manifest["tensors"] if self.manifest else {}
        return {name: row["xxh3_128"] for name, row in rows.items() if row.get("xxh3_128")}


def open_source(path: Path, *, unwrapped: bool = False) -> Source:
    """Open a checkpoint and, in a folder of ours, compare names, shapes and dtypes with the manifest.

    `unwrapped` takes the prefixes of training wrappers off the names.
    """
    if not path.exists() and not path.is_symlink():
        raise UsageError(f"no such file or folder: `{path}`")
    checkpoint = open_checkpoint(path)
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None:
        compare_with_manifest(checkpoint, manifest)
    return Source(unwrap(checkpoint) if unwrapped else checkpoint, manifest)


def check_rules(source: Source, digest: str) -> None:
    """Raise CoverageError when the rules that would be used are not those that made the tensors of our own result."""
    made = (source.manifest or {})["to"].get("rules")
    if made is not None and made != digest:
        raise CoverageError(
            f"`{source.checkpoint.path}` was not made with this config.json and these tables",
            why="another number of heads, or another row of a table, would cut its fused tensors in other places",
            hint="use the config.json that lies beside it and the `--table` that made it; `ckptkit check` says what changed",
        )


def find_config(source: Source, given: Path | None) -> tuple[dict[str, Any], list[Path]]:
    """Return config.json as a dict and the side files; from `given` (a folder or a config.json) when it is named."""
    where = given or source.checkpoint.folder
    file = where / "config.json" if where.is_dir() else where
    if not file.is_file():
        raise UsageError(
            f"no config.json for `{source.checkpoint.path}`" if given is None else f"no config.json at `{given}`",
            why="the model's sizes decide how fused tensors are cut",
            hint="pass `--config DIR`: a HuggingFace folder of this model, or its config.json",
        )
    return read_config(file), side_files(file.parent) if where.is_dir() else [file]
