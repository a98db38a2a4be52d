"""Manifests: rows made fast, byte for byte those that the JSON library makes; nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CorruptError
from ckptkit.formats.manifest import MANIFEST, dump_manifest, read_manifest, tensor_rows
from ckptkit.types import TensorSpec

SPECS = [
    (TensorSpec("a.weight", (2, 3), "BF16"), "part0.safetensors"),
    (TensorSpec("b.weight", (2, 3), "BF16"), "part0.safetensors"),
    (TensorSpec('a "quoted" \\ name \N{SNOWMAN}', (), "F32"), "part1.safetensors"),
    (TensorSpec("c.weight", (2, 3), "F32"), "part0.safetensors"),
    (TensorSpec("half \udc80", (7,), "U8"), 'odd "\N{SNOWMAN}" file'),
]
DIGESTS = {"a.weight": "0" * 32, "c.weight": "f" * 32}
CASTS = {"c.weight": {"from": "BF16", "to": "F32", "overflowed": 0, "flushed": 0}}


@pytest.mark.parametrize(("digests", "casts"), [({}, {}), (DIGESTS, {}), (DIGESTS, CASTS)])
def test_rows_are_those_of_the_json_library(digests: dict[str, str], casts: dict[str, Any]) -> None:
    rows: dict[str, Any] = {}
    for spec, file in SPECS:
        row = {"shape": list(spec.shape), "dtype": spec.dtype, "file": file, "xxh3_128": digests.get(spec.name)}
        rows[spec.name] = row | ({"cast": casts[spec.name]} if spec.name in casts else {})
    head = {"schema": 1, "files": []}
    tensors = [(spec.name, spec, file, digests.get(spec.name)) for spec, file in SPECS]
    made = dump_manifest(head, tensor_rows(tensors, casts))
    assert made == dump_manifest(head | {"tensors": rows})
    assert json.loads(made)["tensors"] == rows


def test_a_row_has_a_line_of_its_own() -> None:
    tensors = [(f"rank_0:{spec.name}", spec, file, None) for spec, file in SPECS]
    lines = dump_manifest({"schema": 1}, tensor_rows(tensors, {})).splitlines()
    assert sum(b'"xxh3_128"' in line for line in lines) == len(SPECS)
    assert sum(b'"rank_0:' in line for line in lines) == len(SPECS)


@pytest.mark.parametrize("kind", ["folder", "link to nothing"])
def test_what_has_its_name_and_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    assert read_manifest(tmp_path) is None
    if kind == "folder":
        (tmp_path / MANIFEST).mkdir()
    else:
        (tmp_path / MANIFEST).symlink_to("gone.json")
    with pytest.raises(CorruptError, match="is no file, or a link to none"):
        read_manifest(tmp_path)
