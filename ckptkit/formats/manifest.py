"""`ckptkit.json`: what a result holds and where it came from, written beside the weights.

    schema     1
    tool       "ckptkit 0.1.0"
    plan       the plan's digest
    family, from, to, layout      as the plan's facts say them: dialect, variant, format, tables; `layout.only` are the
                ranks that are there, of `layout.ranks`, as long as parts of a result are missing; `state` says how
                many tensors of each kind of training state there are
    source     {"name", "files": [{"name", "bytes"}], "tensors": {name: digest}}   digests where they are known
    adopted    true where `check --adopt` wrote this for a foreign folder: `plan`, `family` and dialect are empty then
    files      [{"name", "bytes", "header"}]    header: `header_digest`; older results have none
    side_files {name: digest}                   of all that lies beside the weights, this file excepted
    tensors    {name: {"shape", "dtype", "file", "xxh3_128"}}       xxh3_128 is null after `--no-digest`
    ignored, dropped, unmapped    [[name, reason]]
    seal       the digest of all bytes before this last entry: what the manifest promises is only as good as itself

The digest of a tensor is the xxh3-128 of its bytes in C order, as 32 hex digits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from json.encoder import encode_basestring as quote
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.errors import CorruptError
from ckptkit.formats.base import Checkpoint, OutputFile
from ckptkit.formats.seal import is_sealed, sealed
from ckptkit.types import Shape, TensorSpec

MANIFEST = "ckptkit.json"
SCHEMA = 1
_FOREIGN = "remove it to treat the folder as a foreign one"


def header_digest(file: OutputFile) -> str:
    """Return the digest of a file's bytes that belong to no tensor, in their order."""
    return xxhash.xxh3_128_hexdigest(b"".join(data for _, data in sorted(file.fixed)))


def tensor_rows(tensors: Iterable[tuple[str, TensorSpec, str, str | None]], casts: Mapping[str, Any]) -> list[str]:
    """Return the rows of `tensors` as JSON text: each the name of its row, its spec, its file and its digest.

    `casts` are by the tensor's own name. A tensor's text differs from the next one's in name and digest, so the rest is
    made once for each kind of tensor: the JSON library takes five times as long for all of it.
    """
    kinds: dict[tuple[Shape, str, str], str] = {}
    rows = []
    for name, spec, file, digest in tensors:
        kind = kinds.get((spec.shape, spec.dtype, file))
        if kind is None:
            row = {"shape": spec.shape, "dtype": spec.dtype, "file": file}
            kind = kinds[spec.shape, spec.dtype, file] = _text(row)[:-1]
        told = f'"{digest}"' if digest else "null"
        cast = f', "cast": {_text(casts[spec.name])}' if spec.name in casts else ""
        rows.append(f'{quote(name)}: {kind}, "xxh3_128": {told}{cast}}}')
    return rows


def dump_manifest(manifest: Mapping[str, Any], rows: Iterable[str] | None = None) -> bytes:
    """Return the manifest as bytes: one line a tensor, so that two of them can be compared with `diff`.

    `rows` are those of its tensors (see `tensor_rows`), for a manifest that does not hold them.
    """
    if rows is None:
        rows = [f"{quote(name)}: {_text(row)}" for name, row in manifest["tensors"].items()]
    head = ((key, value) for key, value in manifest.items() if key not in ("tensors", "seal"))
    text = ",\n".join(f' "{key}": {_text(value)}' for key, value in head)
    text = "".join(["{\n", text, ',\n "tensors": {\n  ', ",\n  ".join(rows), "\n }"])
    body = text.encode(errors="backslashreplace")  # a half character's escape
    return sealed(body)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of `folder`, or None when it has none; CorruptError when it is not as it was written."""
    path = folder / MANIFEST
    if not path.is_file():
        if os.path.lexists(path):
            raise CorruptError(f"`{path}` is no file, or a link to none", hint=_FOREIGN)
        return None
    data = path.read_bytes()
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"`{path}` is not valid JSON", why=str(error), hint=_FOREIGN) from None
    if not isinstance(manifest, dict):
        raise CorruptError(f"`{path}` is not a ckptkit manifest", hint=_FOREIGN)
    if manifest.get("schema", SCHEMA) != SCHEMA:
        raise CorruptError(
            f"`{path}` has schema {manifest.get('schema')!r}; this version reads {SCHEMA}",
            hint="use the version of ckptkit that wrote it",
        )
    if not is_sealed(data):
        raise CorruptError(
            f"`{path}` is not as ckptkit wrote it: its seal does not fit",
            why="it says how fused tensors are cut and what every byte should be, so it must be sound itself",
            hint=f"restore it from a copy, or {_FOREIGN}",
        )
    if not _is_manifest(manifest):
        raise CorruptError(f"`{path}` is not a ckptkit manifest", hint=_FOREIGN)
    return manifest


def plan_of(folder: Path) -> str | None:
    """Return the digest of the plan that made `folder`, or None when that is not known."""
    try:
        manifest = read_manifest(folder)
    except CorruptError:
        return None
    return str(manifest.get("plan")) if manifest else None


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    """Say whether all that readers rely on is there."""
    naming, files, side, tensors = (manifest.get(key) for key in ("to", "files", "side_files", "tensors"))
    return (
        isinstance(manifest.get("plan"), str)
        and isinstance(manifest.get("family"), str)
        and isinstance(naming, dict)
        and all(isinstance(naming.get(key), str) for key in ("dialect", "variant", "format"))
        and isinstance(files, list)
        and all(isinstance(row, dict) and {"name", "bytes"} <= row.keys() for row in files)
        and isinstance(side, dict)
        and all(isinstance(digest, str) for digest in side.values())
        and isinstance(tensors, dict)
        and all(isinstance(row, dict) and {"shape", "dtype", "xxh3_128"} <= row.keys() for row in tensors.values())
    )


def named_files(manifest: Mapping[str, Any]) -> set[str]:
    """Return the names of all files of the result that a manifest is of, the manifest's own included."""
    return {MANIFEST, *manifest["side_files"], *(row["name"] for row in manifest["files"])}


def compare_with_manifest(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> None:
    """Raise CorruptError when names, shapes or dtypes differ from what the manifest promises."""
    promised = manifest["tensors"]
    found = checkpoint.tensors
    wrong = [f"missing: {name}" for name in promised if name not in found]
    wrong += [f"not in the manifest: {name}" for name in found if name not in promised]
    for name, row in promised.items():
        if name in found:
            is_now = [list(found[name].shape), found[name].dtype]
            if is_now != [row.get("shape"), row.get("dtype")]:
                wrong.append(f"changed: {name} is {is_now[1]} {is_now[0]}, was {row.get('dtype')} {row.get('shape')}")
    if wrong:
        raise CorruptError(
            f"`{checkpoint.path.name}` does not hold what its {MANIFEST} says ({len(promised)} tensors)",
            items=wrong,
            why=f"files were lost, cut or replaced after {MANIFEST} was written",
            hint=f"restore the files, or remove {MANIFEST} to treat the folder as a foreign one",
        )
