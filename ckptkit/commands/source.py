"""Open what the user names: a checkpoint, its config.json, its manifest, the files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats import files
from ckptkit.formats.base import Checkpoint
from ckptkit.formats.manifest import compare_with_manifest, read_manifest
from ckptkit.formats.mindspore_strategy import is_strategy_file
from ckptkit.formats.model_config import CONFIG, read_config, side_files
from ckptkit.formats.rank_folders import RankSet
from ckptkit.formats.registry import open_checkpoint
from ckptkit.formats.wrappers import unwrap
from ckptkit.mapping.tables import Tables, load_tables

if TYPE_CHECKING:  # it needs numpy, which `inspect` does without
    from ckptkit.plan.join import Joined

SideFiles = list[tuple[Path, str]]  # (source, name in the result)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint with what lies beside it. `manifest` is None for a folder that ckptkit did not write.

    Of a checkpoint that is cut over `ranks`, `checkpoint` has the whole tensors, and `joined` says how they are made.
    """

    checkpoint: Checkpoint
    manifest: Mapping[str, Any] | None
    joined: Joined | None = None
    ranks: RankSet | None = None

    @property
    def promised_digests(self) -> dict[str, str]:
        """The digests that the manifest promises, by tensor name."""
        rows = self.manifest["tensors"] if self.manifest else {}
        return {name: row["xxh3_128"] for name, row in rows.items() if row.get("xxh3_128")}

    @property
    def padded(self) -> dict[str, int]:
        """The rows, padding included, of the tensors that the manifest says are padded."""
        layout = self.manifest.get("layout", {}) if self.manifest else {}
        padded = layout.get("padded", {}) if isinstance(layout, dict) else {}
        return {name: int(rows[1]) for name, rows in padded.items()}


def open_source(path: Path, *, unwrapped: bool = False) -> Source:
    """Open a checkpoint and, in a folder of ours, compare names, shapes and dtypes with the manifest.

    `unwrapped` takes the prefixes of training wrappers off the names.
    """
    checkpoint = open_named(path)
    manifest = manifest_of(path)
    if manifest is not None:
        compare_with_manifest(checkpoint, manifest)
    return Source(unwrap(checkpoint) if unwrapped else checkpoint, manifest)


def open_named(path: Path) -> Checkpoint:
    """Open the checkpoint that a user named; UsageError when there is nothing of that name."""
    if files.look(path) is None and not path.is_symlink():
        raise UsageError(f"no such file or folder: `{path}`")
    return open_checkpoint(path)


def manifest_of(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder, or what the one beside a weight file says of it; None where there is none."""
    return read_manifest(path) if path.is_dir() else _manifest_of_file(path)


def as_list(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return paths as a list, where one alone may be given."""
    return [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]


def load_own_tables(paths: str | Path | Sequence[str | Path]) -> Tables:
    """Load the shipped tables and a user's own files, which must be regular ones."""
    paths = as_list(paths)
    try:
        return load_tables([files.regular_file(Path(path), "a mapping table") for path in paths])
    except RecursionError:
        raise UsageError("a mapping table is nested too deeply", items=[str(path) for path in paths]) from None


def _manifest_of_file(path: Path) -> dict[str, Any] | None:
    """Return the part of the manifest beside a weight file that is about this file, or None when none is.

    Where the file is a link, the manifest beside it comes before one beside what it leads to.
    """
    for file in dict.fromkeys((path.absolute(), path.resolve())):
        manifest = read_manifest(file.parent) or {"tensors": {}}
        rows = {name: row for name, row in manifest["tensors"].items() if row.get("file") == file.name}
        if rows:
            return manifest | {"tensors": rows}
    return None


def refuse_part(source: Source) -> None:
    """Raise UsageError for one file of a result of ours that has several: it is no checkpoint."""
    files_of = (source.manifest or {}).get("files", [])
    if source.checkpoint.path.is_file() and len(files_of) > 1:
        raise UsageError(
            f"`{source.checkpoint.path}` is one of {len(files_of)} files of a checkpoint",
            why="the tensors of the others would be missing",
            hint="name the folder",
        )


def check_rules(source: Source, dims: Mapping[str, int], digest: str) -> None:
    """Raise CoverageError when `dims` or rules are not those that made the tensors of our own result.

    `dims` are the numbers that config.json gives now, `digest` that of the rules that would be used.
    """
    manifest = source.manifest or {}
    made = manifest.get("dims", {})
    changed = [f"{name} is {dims[name]}, was {made[name]}" for name in made if dims.get(name, made[name]) != made[name]]
    if not changed and manifest.get("to", {}).get("rules", digest) == digest:
        return
    raise CoverageError(
        f"`{source.checkpoint.path}` was not made with this config.json and these tables",
        items=changed,
        why="another number of heads, or another row of a table, would cut or fuse its tensors in other places",
        hint="use the config.json and the `--table` that made it; `ckptkit check` says whether config.json changed",
    )


def find_config(source: Source, given: Path | None) -> tuple[dict[str, Any], SideFiles, list[str]]:
    """Return config.json as a dict, the side files, and notes; from `given` (a folder or a config.json) if it is named.

    Beside a folder given, or a file, what a source folder has under other names travels too.
    """
    where = given or source.checkpoint.folder
    if given is not None:
        files.look(given)
    file = where / CONFIG if where.is_dir() else where
    if not file.is_file():
        raise UsageError(
            f"no config.json for `{source.checkpoint.path}`" if given is None else f"no config.json at `{given}`",
            why="the model's sizes decide how fused tensors are cut",
            hint="pass `--config DIR`: a HuggingFace folder of this model, or its config.json",
        )
    config = read_config(file)
    own = _side_files(source, source.checkpoint.folder)
    if given is None:
        return config, own, []
    side = _side_files(source, where) if where.is_dir() else [(file, CONFIG)]
    taken = {name for _, name in side}
    more = [pair for pair in own if pair[1] not in taken] if source.checkpoint.path.is_dir() else []
    notes = [f"{files.listed([name for _, name in more])}: from SRC, as `--config` has none"] if more else []
    return config, side + more, notes + _config_note(source, config)


def find_side_files(source: Source, given: Path | None) -> SideFiles:
    """Return what travels beside the weights where no config.json is needed; from the folder `given`, if named."""
    if given is not None and not given.is_dir():
        return [(files.regular_file(given, "a config.json"), CONFIG)]
    return _side_files(source, given or source.checkpoint.folder)


def _side_files(source: Source, folder: Path) -> SideFiles:
    """Return what travels of a folder's files, under their own names; never the weights, whatever they are called."""
    weights = {path.resolve() for path in source.checkpoint.files}
    found = [path for path in side_files(folder) if path.resolve() not in weights]
    if source.ranks is not None or source.checkpoint.kind == "ckpt":  # strategy files are of the source's own layout
        found = [path for path in found if not is_strategy_file(path)]
    return [(path, path.name) for path in found]


def _config_note(source: Source, config: Mapping[str, Any]) -> list[str]:
    """Return a note when the config.json beside the source says otherwise than the one that is followed."""
    if not (source.checkpoint.folder / CONFIG).is_file():
        return []
    own = read_config(source.checkpoint.folder)
    odd = [key for key in {**config, **own} if config.get(key) != own.get(key)]
    return (
        [f"the config.json of SRC differs from that of `--config`, which counts, in {files.listed(odd)}"] if odd else []
    )
