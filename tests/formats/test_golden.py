"""Files that the real frameworks wrote (`tests/golden/make.py`), against what was given to the frameworks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from format_contract import assemble

from ckptkit.errors import UnsafeError
from ckptkit.formats import mindspore_ckpt
from ckptkit.formats.io import read_region
from ckptkit.formats.registry import open_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())["files"]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_golden_file_holds_what_was_given_to_the_framework(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    found = {
        tensor.name: [list(tensor.shape), tensor.dtype, read_region(tensor).tobytes().hex()]
        for tensor in checkpoint.tensors.values()
    }
    assert found == EXPECTED[name]


def test_the_golden_files_are_all_there() -> None:
    assert len(EXPECTED) == 5
    assert sum(len(tensors) for tensors in EXPECTED.values()) > 100


def test_metadata_of_golden_files_is_read() -> None:
    assert open_checkpoint(GOLDEN / "safetensors" / "torch.safetensors").metadata == {"format": "pt"}
    assert open_checkpoint(GOLDEN / "unified").metadata == {"format": "ms"}
    assert open_checkpoint(GOLDEN / "unified").notes == ()


def test_a_golden_ckpt_is_written_again_byte_for_byte() -> None:
    file = GOLDEN / "ckpt" / "all.ckpt"
    tensors = mindspore_ckpt.read_index(file).tensors
    contents = {tensor.name: read_region(tensor).tobytes() for tensor in tensors}
    output = mindspore_ckpt.lay_out(file.name, [tensor.spec for tensor in tensors])
    assert assemble(output, contents) == file.read_bytes()


def test_the_crc_of_a_golden_ckpt_fits() -> None:
    file = GOLDEN / "ckpt" / "appended.ckpt"
    assert any("crc32" in note for note in mindspore_ckpt.read_index(file).notes)
    mindspore_ckpt.verify_crc(file)


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_an_encrypted_golden_ckpt_is_refused(mode: str) -> None:
    with pytest.raises(UnsafeError, match="is encrypted"):
        open_checkpoint(GOLDEN / "ckpt" / f"encrypted-{mode}.ckpt")
