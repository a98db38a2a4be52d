"""Which files of a folder are the checkpoint.

Only the top level counts; subfolders (`original/`, `metal/`) are never looked into. The first of these that is
there decides, and layouts are never mixed:

1. `model.safetensors.index.json`
2. `param_name_map.json` and `part*.safetensors` (MindSpore's unified layout), with `hyper_param.safetensors` if any
3. `model.safetensors`; else one other `*.safetensors.index.json` (`model.fp16...`); else one numbered set
   `NAME-00001-of-0000N.safetensors`; else all `*.safetensors`
4. `pytorch_model.bin.index.json`
5. `pytorch_model.bin`; else the numbered set; else all `pytorch_model*.bin`
6. the only `.ckpt` file that is not a strategy file
7. `consolidated.safetensors.index.json`, or the only vendor file `consolidated*`
8. the only `.bin`, `.pt` or `.pth` file

A `param_name_map.json` without a file that it could be about is passed over where there are other weights. All other
weight files and indexes are named in the notes. Training state is never opened. What does not live here: reading the
files and holding the index against them (`registry.py`, `weight_map.py`), comparing safetensors files with the `.bin`
files that were passed over for them (`bin_beside.py`), joining ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptkit.errors import CoverageError, UsageError
from ckptkit.formats import files

HF_INDEX = "model.safetensors.index.json"
HF_WHOLE = "model.safetensors"
TORCH_INDEX = "pytorch_model.bin.index.json"
VENDOR = "consolidated"
VENDOR_INDEX = "consolidated.safetensors.index.json"
NAME_MAP = "param_name_map.json"
HYPER_PARAM = "hyper_param.safetensors"

WEIGHT_SUFFIXES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ot", ".mindir")
)
_TRAINING = re.compile(
    r"training_args\.bin|trainer_state\.json|state\.json|optimizer\..*|scheduler\..*|rng_state.*|random_states.*|"
    r"scaler\.pt"
)
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)(\.[a-z]+)")
_RANK = re.compile(r"rank_\d+")
MINDFORMERS_FILE = re.compile(r"(?:.*-)?(?:model|opt)-\d{7}-\d{7}\.safetensors")


@dataclass(frozen=True, slots=True)
class Selection:
    """The files that are the checkpoint.

    `index` is the file that says which tensor is in which file, or None; then every file's tensors count. `files`
    are those to read, without those that only the index names. `notes` says what was passed over and why.
    """

    kind: str
    files: tuple[Path, ...] = ()
    index: Path | None = None
    notes: tuple[str, ...] = ()


def select(folder: Path) -> Selection:
    """Return the checkpoint's files in `folder`.

    Raises UsageError when there is none or when it is not clear which, CoverageError when a numbered set has gaps.
    """
    names = file_names(folder)
    weights = [name for name in names if is_weight(name)]
    selection = (
        _from_index(folder, names, weights)
        or _from_safetensors(folder, weights)
        or _from_torch(folder, names)
        or _from_ckpt(folder, weights)
    )
    if selection is None:
        refuse_sharded(folder)
        selection = _from_vendor(folder, names, weights) or _from_lone_file(folder, weights)
    if selection is None:
        raise _nothing(folder, names)
    return selection


def select_bin(folder: Path, used: Sequence[Path]) -> Selection | None:
    """Return the `.bin` files that would be chosen if the safetensors files `used` were not there, or None.

    These have PyTorch's usual names, or those of the files `used`. The errors are those of `select`.
    """
    names = file_names(folder)
    twins = [folder / f"{path.stem}.bin" for path in used if f"{path.stem}.bin" in names]
    return _from_torch(folder, names) or (Selection(files.TORCH, tuple(twins)) if twins else None)


def with_notes(folder: Path, selection: Selection, used: Sequence[Path]) -> tuple[str, ...]:
    """Return the notes on the files of `folder` that are weights and are not among those `used`."""
    taken = {path.name for path in used}
    reasons: dict[str, list[str]] = {}
    for name in file_names(folder):
        if name in taken:
            continue
        reason = _reason(name, selection)
        if reason:
            reasons.setdefault(reason, []).append(name)
    return (*selection.notes, *(f"{files.listed(found)} {reason}" for reason, found in reasons.items()))


def _reason(name: str, selection: Selection) -> str:
    """Say why a file that was not used was not, or return an empty text for a file that needs no word."""
    if name.endswith(".incomplete"):
        return "is an unfinished download"
    if is_training_state(name):
        return "not opened: training state" if Path(name).suffix in WEIGHT_SUFFIXES else ""
    if is_index(name) and (selection.index is None or name != selection.index.name):
        return "ignored: an index of other files than the chosen ones"
    if not is_weight(name):
        return ""
    if name.startswith(VENDOR):
        return "ignored: a vendor's own layout beside the chosen files"
    chosen = {files.SAFETENSORS: ".safetensors", files.TORCH: ".bin", files.CKPT: ".ckpt"}[selection.kind]
    if selection.index is not None and name.endswith(chosen):
        return f"ignored: `{selection.index.name}` does not name it"
    return f"ignored: {selection.kind} files were chosen"


def file_names(folder: Path) -> list[str]:
    """Return the names of all that is in `folder` and is no folder (dangling links included), in natural order."""
    try:
        return sorted((path.name for path in folder.iterdir() if not path.is_dir()), key=natural)
    except OSError as error:
        raise files.open_error(folder, error) from error


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that takes digits as numbers: `part2` before `part10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def is_training_state(name: str) -> bool:
    """Tell whether a file name is that of optimizer, scheduler or other training state."""
    return _TRAINING.fullmatch(name) is not None


def is_weight(name: str) -> bool:
    """Tell whether a file name is that of a weight file, of this checkpoint or another."""
    return Path(name).suffix in WEIGHT_SUFFIXES and not is_training_state(name)


def is_index(name: str) -> bool:
    """Tell whether a file name is that of an index of weight files."""
    return name.endswith(".index.json") or name == NAME_MAP


def rank_folders(folder: Path) -> list[str]:
    """Return the names of the `rank_N` folders in `folder`, by rank."""
    return sorted((p.name for p in folder.iterdir() if p.is_dir() and _RANK.fullmatch(p.name)), key=natural)


def refuse_sharded(folder: Path) -> None:
    """Raise UsageError if `folder` holds one checkpoint in a folder or a file for each rank."""
    found = rank_folders(folder)
    if not found:
        found = [name for name in file_names(folder) if MINDFORMERS_FILE.fullmatch(name)]
    if not found:
        found = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"iteration_\d+", p.name))
    if found:
        raise UsageError(
            f"`{folder}` holds a checkpoint cut over ranks",
            items=found,
            why="its parts are slices of tensors; `ckptkit reshard` puts them together",
            hint="name one file to read a single rank as it is",
        )


def _from_index(folder: Path, names: Sequence[str], weights: Sequence[str]) -> Selection | None:
    """Choose by an index of safetensors files, HuggingFace's or MindSpore's."""
    if HF_INDEX in names:
        return Selection(files.SAFETENSORS, index=folder / HF_INDEX)
    parts = [name for name in weights if name.endswith(".safetensors") and name != HF_WHOLE]
    if NAME_MAP in names and (parts or not weights):
        extra = (folder / HYPER_PARAM,) if HYPER_PARAM in names else ()
        return Selection(files.SAFETENSORS, files=extra, index=folder / NAME_MAP)
    found = [name for name in names if name.endswith(".safetensors.index.json") and name != VENDOR_INDEX]
    if HF_WHOLE in names or not found:
        return None
    if len(found) > 1:
        raise UsageError(f"`{folder}` holds {len(found)} index files", items=found, hint="move all but one away")
    return Selection(files.SAFETENSORS, index=folder / found[0])


def _from_safetensors(folder: Path, weights: Sequence[str]) -> Selection | None:
    found = [n for n in weights if n.endswith(".safetensors") and not n.startswith(VENDOR)]
    if any(MINDFORMERS_FILE.fullmatch(name) for name in found):
        refuse_sharded(folder)
    return _from_set(folder, files.SAFETENSORS, found, HF_WHOLE)


def _from_torch(folder: Path, names: Sequence[str]) -> Selection | None:
    if TORCH_INDEX in names:
        return Selection(files.TORCH, index=folder / TORCH_INDEX)
    found = [name for name in names if re.fullmatch(r"pytorch_model.*\.bin", name)]
    return _from_set(folder, files.TORCH, found, "pytorch_model.bin")


def _from_set(folder: Path, kind: str, found: Sequence[str], whole: str) -> Selection | None:
    """Choose among the files of one kind without an index: the `whole` one, a numbered set, or all."""
    if not found:
        return None
    if whole in found:
        return Selection(kind, (folder / whole,))
    sets: dict[tuple[str, str], list[str]] = {}
    for name in found:
        match = _NUMBERED.fullmatch(name)
        if match:
            sets.setdefault((match[1], match[3]), []).append(name)
    if len(sets) > 1:
        raise UsageError(
            f"`{folder}` holds {len(sets)} numbered sets of weight files and no index",
            items=[f"{stem}-*-of-{total}: {len(names)} files" for (stem, total), names in sets.items()],
            hint="move all but one away",
        )
    for (stem, total), names in sets.items():
        _check_complete(folder, stem, total, names)
        found = names
    return Selection(kind, tuple(folder / name for name in found))


def _check_complete(folder: Path, stem: str, total: str, names: Sequence[str]) -> None:
    """Raise CoverageError if a numbered set has gaps; numbers run from 1, or from 0 as some writers count."""
    numbers = {int(match[2]) for match in map(_NUMBERED.fullmatch, names) if match}
    first = 0 if 0 in numbers else 1
    missing = sorted(set(range(first, first + int(total))) - numbers)
    if missing:
        suffix = Path(names[0]).suffix
        raise CoverageError(
            f"{len(missing)} of {int(total)} weight files are missing in `{folder}`",
            items=[f"{stem}-{number:0{len(total)}}-of-{total}{suffix}" for number in missing],
            why="their tensors would be lost",
            hint="the download may be incomplete: finish it",
        )


def _from_ckpt(folder: Path, weights: Sequence[str]) -> Selection | None:
    """Choose the only `.ckpt` file; strategy files share the suffix and begin with another byte."""
    found = [name for name in weights if name.endswith(".ckpt")]
    strategies = [name for name in found if _is_strategy(folder / name)]
    found = [name for name in found if name not in strategies]
    if not found:
        return None
    if len(found) > 1:
        raise UsageError(
            f"`{folder}` holds {len(found)} .ckpt files",
            items=found,
            why="no loader joins .ckpt files: each is a checkpoint of its own, or a rank's slices",
            hint="name one file",
        )
    return Selection(files.CKPT, (folder / found[0],), notes=tuple(f"`{n}` is a strategy file" for n in strategies))


def _is_strategy(file: Path) -> bool:
    with files.opened(file) as descriptor:
        return files.pread(file, descriptor, 1, 0) == b"\x08"


def _from_vendor(folder: Path, names: Sequence[str], weights: Sequence[str]) -> Selection | None:
    if VENDOR_INDEX in names:
        return Selection(files.SAFETENSORS, index=folder / VENDOR_INDEX)
    found = [name for name in weights if name.startswith(VENDOR)]
    if len(found) > 1:
        raise UsageError(
            f"`{folder}` holds {len(found)} vendor files",
            items=found,
            why="each may hold slices of tensors, which cannot be joined without their layout",
            hint="use the HuggingFace files of the model",
        )
    return Selection(_kind_by_suffix(found[0]), (folder / found[0],)) if found else None


def _from_lone_file(folder: Path, weights: Sequence[str]) -> Selection | None:
    found = [name for name in weights if Path(name).suffix in (".bin", ".pt", ".pth")]
    if len(found) > 1:
        raise UsageError(f"`{folder}` holds {len(found)} PyTorch files", items=found, hint="name one file")
    return Selection(files.TORCH, (folder / found[0],)) if found else None


def _kind_by_suffix(name: str) -> str:
    return files.SAFETENSORS if name.endswith(".safetensors") else files.TORCH


def _nothing(folder: Path, names: Sequence[str]) -> UsageError:
    return UsageError(
        f"`{folder}` holds no weights that ckptkit reads",
        items=names,
        why="looked for safetensors, pytorch_model*.bin and .ckpt files at the top level",
        hint="finish the download"
        if any(n.endswith(".incomplete") for n in names)
        else "name the folder or file that does",
    )
