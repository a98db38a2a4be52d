"""Opening a checkpoint of any format, and laying out a new one.

`open_checkpoint` tells a file's format by its first bytes, then by its suffix, and joins the files of a folder.
`lay_out_checkpoint` is its counterpart: which files a new checkpoint has, where each tensor goes. What does not live
here: which files of a folder count (`folder.py`), the formats themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path

from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats import files, mindspore_ckpt, safetensors
from ckptkit.formats.base import Checkpoint, FileIndex, OutputFile
from ckptkit.formats.bin_beside import notes_on_bin
from ckptkit.formats.folder import HF_INDEX, NAME_MAP, file_names, is_index, is_weight, select, with_notes
from ckptkit.formats.mindformers_folder import refuse_beside_iterations
from ckptkit.formats.weight_map import WeightMap, apply_map, find_files, read_weight_map
from ckptkit.types import TensorInfo, TensorSpec, sizes_of

HF = "hf"
MINDSPORE_SAFETENSORS = "mindspore-safetensors"
CKPT = "ckpt"
MINDFORMERS = "mindformers"  # a folder of its newer kind, which `commands/sharding.py` lays out
STATE = "training_state"  # the folder of such tensors beside HuggingFace weights

_STATE_FILE = re.compile(r"state-\d{5}-of-(\d{5})\.safetensors")

_SUFFIXES = {
    ".safetensors": files.SAFETENSORS,
    ".ckpt": files.CKPT,
    ".bin": files.TORCH,
    ".pt": files.TORCH,
    ".pth": files.TORCH,
}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at `path`, a file or a folder, without reading its tensors.

    The tensors of equal name that several files hold are compared when no index says which counts. Raises
    UsageError, CoverageError, CorruptError or ResourceError.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if is_index(path.name):
        raise UsageError(f"`{path}` is an index and holds no tensors", hint="name the folder that it is in")
    kind, index = read_file(path)
    tensors, notes = _join([index])
    notes += [] if path.suffix == "" or _SUFFIXES.get(path.suffix) == kind else [f"`{path.name}` is a {kind} file"]
    return Checkpoint(path, path.parent, kind, (path,), tensors, index.metadata, (*index.notes, *notes))


def read_file(file: Path) -> tuple[str, FileIndex]:
    """Return one file's format (`safetensors`, `ckpt`, `torch`) and index."""
    head, size = files.read_head(file)
    by_suffix = _SUFFIXES.get(file.suffix)
    kind = files.kind_of(head, size) or by_suffix
    if kind == files.CKPT and by_suffix not in (None, files.CKPT):
        kind = by_suffix  # the first byte of a record is weak evidence
    if kind == files.SAFETENSORS:
        return kind, safetensors.read_index(file)
    if kind == files.CKPT:
        return kind, mindspore_ckpt.read_index(file)
    if kind == files.TORCH:
        from ckptkit.formats import torch_pickle

        return kind, torch_pickle.read_index(file)
    looks = files.describe(head)
    raise UsageError(
        f"`{file}` is of no format that ckptkit reads",
        why=f"it looks like {looks}" if looks else "",
        hint="ckptkit reads safetensors, PyTorch .bin / .pt / .pth and MindSpore .ckpt files",
    )


def _open_folder(folder: Path) -> Checkpoint:
    refuse_beside_iterations(folder, [name for name in file_names(folder) if is_weight(name)])
    selection = select(folder)
    weights = None if selection.index is None else read_weight_map(selection.index)
    state = _find_state(folder) if weights is None or weights.file.name == HF_INDEX else []
    paths = (*([] if weights is None else find_files(weights)), *selection.files, *state)
    found = [read_file(path) for path in dict.fromkeys(paths)]
    indexes = [index for _, index in found]
    kind = _check_one_kind({index.file.name: kind for kind, index in found})
    tensors, notes = _join(indexes) if weights is None else _join_indexed(weights, indexes)
    metadata, odd = _join_metadata(indexes)
    notes = [note for index in indexes for note in index.notes] + notes + odd
    used = [index.file for index in indexes]
    if selection.kind == files.SAFETENSORS:
        notes += notes_on_bin(folder, used, tensors)
    return Checkpoint(
        folder,
        folder,
        kind,
        tuple(used),
        tensors,
        metadata,
        (*with_notes(folder, selection, used), *notes),
    )


def _state_file(number: int, total: int) -> str:
    return f"state-{number:05d}-of-{total:05d}.safetensors"


def _find_state(folder: Path) -> list[Path]:
    """Return the files that hold training state beside HuggingFace weights, all of them or CoverageError."""
    found = sorted((folder / STATE).glob("*.safetensors"))
    last = _STATE_FILE.fullmatch(found[-1].name) if found else None
    total = int(last[1]) if last else 0
    if [path.name for path in found] != [_state_file(number, total) for number in range(1, total + 1)]:
        raise CoverageError(
            f"`{folder / STATE}` does not hold all files of one training state, and these alone",
            items=[path.name for path in found],
            why="the rest of the training state would be lost",
            hint=f"copy the missing files, or remove the folder `{STATE}` to go on with the weights alone",
        )
    return found


def _join_indexed(weights: WeightMap, indexes: Sequence[FileIndex]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return the tensors that the index places, and those of files beside it (`hyper_param.safetensors`)."""
    named = set(weights.file_names)
    tensors, notes = apply_map(weights, [index for index in indexes if index.file.name in named])
    extra, more = _join([index for index in indexes if index.file.name not in named])
    twice = [name for name in extra if name in tensors]
    if twice:
        more.append(f"{files.listed(twice)}: also in a file that the index does not name")
    return extra | tensors, notes + more


def _check_one_kind(kinds: Mapping[str, str]) -> str:
    """Return the format that all files have; `kinds` is by file name."""
    first = next(iter(kinds.values()))
    odd = [f"{name} is a {kind} file" for name, kind in kinds.items() if kind != first]
    if odd:
        raise CorruptError(
            f"the checkpoint begins with a {first} file and has files of another format",
            items=odd,
            hint="download these again, or name one file to read it alone",
        )
    return first


def _join(indexes: Sequence[FileIndex]) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return all tensors of the files; equal copies are noted, different ones raise CorruptError."""
    tensors: dict[str, TensorInfo] = {}
    equal = []
    for index in indexes:
        for tensor in index.tensors:
            first = tensors.setdefault(tensor.name, tensor)
            if first is tensor:
                continue
            if not _same(first, tensor):
                raise CorruptError(
                    f"duplicate tensor `{tensor.name}`: `{first.file.name}` and `{tensor.file.name}` hold different "
                    "values, and no index says which counts",
                    hint="remove one file, or add an index",
                )
            equal.append(tensor.name)
    return tensors, [f"{len(equal)} equal copies of tensors passed over: {files.listed(equal)}"] if equal else []


def _same(a: TensorInfo, b: TensorInfo) -> bool:
    if a.strides is None and b.strides is None:
        return files.same_bytes(a, b)
    from ckptkit.formats.io import same_values  # numpy, which `inspect` does without

    return same_values(a, b)


def _join_metadata(indexes: Sequence[FileIndex]) -> tuple[dict[str, str], list[str]]:
    """Return the files' metadata as one, and a note if files disagree (the first one's value stands)."""
    metadata: dict[str, str] = {}
    odd: set[str] = set()
    for index in indexes:
        odd |= {key for key, value in index.metadata.items() if metadata.setdefault(key, value) != value}
    return metadata, [f"the files' metadata differ in {files.listed(sorted(odd))}"] if odd else []


def lay_out_checkpoint(
    kind: str, specs: Sequence[TensorSpec], *, max_shard_bytes: int, state: Collection[str] = ()
) -> tuple[list[OutputFile], dict[str, bytes]]:
    """Return the files of a new checkpoint, and the content of the small files that go with them by name.

    `hf`: `model.safetensors`, or shards and their index. `mindspore-safetensors`: MindSpore's unified layout.
    `ckpt`: one file, whatever its size, since no loader joins a split set. The tensors called `state`, of a training
    run, lie beside HuggingFace weights in a folder that no loader of weights looks into. Shards are filled in order to
    at most `max_shard_bytes` of tensors; a larger tensor has a shard of its own. Raises UsageError for a tensor that
    the format cannot hold.
    """
    if kind == CKPT:
        return [mindspore_ckpt.lay_out("model.ckpt", specs)], {}
    if kind not in (HF, MINDSPORE_SAFETENSORS):
        raise UsageError(f"unknown kind of checkpoint `{kind}`", hint=f"{HF}, {MINDSPORE_SAFETENSORS} or {CKPT}")
    apart = [spec for spec in specs if spec.name in state] if kind == HF and state else []
    if apart:
        specs = [spec for spec in specs if spec.name not in state]
    sizes = sizes_of(specs)
    shards = _shards(specs, sizes, max_shard_bytes)
    if kind == MINDSPORE_SAFETENSORS:
        named: dict[str, Sequence[TensorSpec]] = {
            f"part{number}.safetensors": shard for number, shard in enumerate(shards)
        }
        small = {NAME_MAP: _index_text(named, sum(sizes), indent=4).encode()}
        return [safetensors.lay_out(name, shard, {"format": "ms"}) for name, shard in named.items()], small
    named, small = name_shards(shards, sum(sizes))
    if apart:
        shards = _shards(apart, sizes_of(apart), max_shard_bytes)
        total = len(shards)
        named |= {f"{STATE}/{_state_file(n, total)}": shard for n, shard in enumerate(shards, start=1)}
    return [safetensors.lay_out(name, shard, {"format": "pt"}) for name, shard in named.items()], small


def name_shards(
    shards: Sequence[Sequence[TensorSpec]], total_size: int
) -> tuple[dict[str, Sequence[TensorSpec]], dict[str, bytes]]:
    """Return the shards of HuggingFace weights by file name, and their index by its own, which one shard does without.

    `total_size` is the bytes of all tensors.
    """
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}, {}
    total = len(shards)
    named = {f"model-{number:05d}-of-{total:05d}.safetensors": shard for number, shard in enumerate(shards, start=1)}
    return named, {HF_INDEX: (_index_text(named, total_size, indent=2) + "\n").encode()}


def _shards(specs: Sequence[TensorSpec], sizes: Sequence[int], max_bytes: int) -> list[list[TensorSpec]]:
    """Fill shards in order, each to at most `max_bytes`; there is at least one. `sizes` are the tensors' bytes."""
    if max_bytes <= 0:
        raise UsageError(f"a shard cannot have {max_bytes} bytes", hint="give a positive size, such as `5GB`")
    shard: list[TensorSpec] = []
    shards = [shard]
    room = max_bytes
    for spec, size in zip(specs, sizes, strict=True):
        if shard and size > room:
            shard = []
            shards.append(shard)
            room = max_bytes
        shard.append(spec)
        room -= size
    return shards


def _index_text(named: Mapping[str, Sequence[TensorSpec]], total_size: int, *, indent: int) -> str:
    """Return the index of the shards in `named`, by file name, as JSON.

    The text is that of `json.dumps(..., indent=indent)`, which takes five times as long: with `indent` it does not
    use its C code.
    """
    one, two = " " * indent, " " * 2 * indent
    rows = [f"{two}{quote(spec.name)}: {quote(name)}" for name, shard in named.items() for spec in shard]
    weight_map = "{\n" + ",\n".join(rows) + f"\n{one}}}" if rows else "{}"
    metadata = f'{{\n{two}"total_size": {total_size}\n{one}}}'
    return f'{{\n{one}"metadata": {metadata},\n{one}"weight_map": {weight_map}\n}}'
