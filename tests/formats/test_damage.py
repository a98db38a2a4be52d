"""Damaged copies of files: a sound index or a ckptkit error, and nothing accepted that the reference refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_contract import FORMATS, Format, assemble, random_contents, rewrite
from fuzz import mutations
from safetensors import SafetensorError, deserialize

from ckptkit.errors import CkptkitError
from ckptkit.formats.base import FileIndex
from ckptkit.formats.io import read_region
from ckptkit.types import TensorSpec

GOLDEN = Path(__file__).parent.parent / "golden"
COUNT = 3000

SPECS = [TensorSpec("a", (2, 3), "BF16"), TensorSpec("b.weight", (4,), "F32"), TensorSpec("c", (), "I64")]


def check_sound(index: FileIndex, size: int) -> None:
    """Fail unless every tensor's extents lie in the file and fit its shape and dtype."""
    names = [tensor.name for tensor in index.tensors]
    assert len(set(names)) == len(names)
    for tensor in index.tensors:
        assert all(0 <= extent.offset <= extent.offset + extent.size <= size for extent in tensor.extents)
        assert sum(extent.size for extent in tensor.extents) == tensor.num_bytes
        read_region(tensor)


def sources(form: Format) -> list[bytes]:
    golden = {"safetensors": "safetensors/torch.safetensors", "ckpt": "ckpt/appended.ckpt"}[form.name]
    return [assemble(form.lay_out("x", SPECS), random_contents(SPECS)), (GOLDEN / golden).read_bytes()]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_damaged_file_gives_a_sound_index_or_an_error(form: Format, tmp_path: Path) -> None:
    file = tmp_path / "x"
    accepted = refused = 0
    for seed, data in enumerate(sources(form)):
        for mutant in mutations(data, seed, COUNT):
            rewrite(file, mutant)
            try:
                index = form.read_index(file)
            except CkptkitError as error:
                refused += 1
                assert str(file) in str(error)
                continue
            accepted += 1
            check_sound(index, len(mutant))
    assert accepted > 100
    assert refused > 1000


def test_what_the_library_refuses_is_refused_and_what_is_accepted_is_read_alike(tmp_path: Path) -> None:
    form = FORMATS[0]
    file = tmp_path / "x"
    compared = 0
    for seed, data in enumerate(sources(form)):
        for mutant in mutations(data, 100 + seed, COUNT):
            rewrite(file, mutant)
            try:
                index = form.read_index(file)
            except CkptkitError:
                continue
            try:
                library = deserialize(mutant)
            except SafetensorError as error:
                raise AssertionError(f"accepted what the library refuses: {error}: {mutant!r}") from error
            want = {name: (tuple(info["shape"]), info["dtype"], bytes(info["data"])) for name, info in library}
            found = {t.name: (t.shape, t.dtype, read_region(t).tobytes()) for t in index.tensors}
            assert found == want
            compared += 1
    assert compared > 100


def test_the_soundness_check_can_fail(tmp_path: Path) -> None:
    form = FORMATS[0]
    file = tmp_path / "x"
    data = sources(form)[0]
    file.write_bytes(data)
    index = form.read_index(file)
    check_sound(index, len(data))
    with pytest.raises(AssertionError):
        check_sound(index, len(data) - 1)
