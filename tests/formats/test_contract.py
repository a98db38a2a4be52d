"""The contract of `format_contract.py`, for every format, without the frameworks (see `test_*_itself.py`)."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from format_contract import (
    FORMATS,
    Format,
    array_of,
    assemble,
    check_read_back,
    random_contents,
    region_of,
    specs_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.formats.base import OutputFile
from ckptkit.formats.io import read_region
from ckptkit.types import Extent, TensorSpec

each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
SPEC = TensorSpec("w", (2, 3), "BF16")


@each_format
@settings(deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back(form: Format, data: st.DataObject) -> None:
    specs = data.draw(specs_of(form))
    if form.name == "ckpt" and not specs:
        return
    contents = random_contents(specs)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"x{form.suffix}"
        file.write_bytes(assemble(form.lay_out(file.name, specs), contents))
        check_read_back(form, file, specs, contents)


@each_format
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_region_is_read(form: Format, data: st.DataObject) -> None:
    specs = data.draw(specs_of(form).filter(bool))
    contents = random_contents(specs)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"x{form.suffix}"
        file.write_bytes(assemble(form.lay_out(file.name, specs), contents))
        for tensor in form.read_index(file).tensors:
            region = data.draw(region_of(tensor.shape))
            want = array_of(tensor.spec, contents)[region.slices()]
            got = read_region(tensor, region)
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


@each_format
def test_every_dtype_is_written_and_read_back(form: Format, tmp_path: Path) -> None:
    specs = [TensorSpec(f"t.{dtype}", (3,), dtype) for dtype in form.dtypes]
    contents = random_contents(specs)
    file = tmp_path / f"x{form.suffix}"
    file.write_bytes(assemble(form.lay_out(file.name, specs), contents))
    check_read_back(form, file, specs, contents)


@each_format
def test_a_layout_is_the_same_each_time(form: Format) -> None:
    specs = [TensorSpec(f"t{number}", (number + 1,), dtype) for number, dtype in enumerate(form.dtypes)]
    assert form.lay_out("x", specs) == form.lay_out("x", list(specs))


@each_format
@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_cut_file_is_refused(form: Format, cut: int, tmp_path: Path) -> None:
    from ckptkit.errors import CorruptError

    specs = [TensorSpec("a", (64,), "F32")]
    file = tmp_path / f"x{form.suffix}"
    file.write_bytes(assemble(form.lay_out(file.name, specs), random_contents(specs))[:-cut])
    with pytest.raises(CorruptError, match=r"is cut"):
        form.read_index(file)


def spoilt(output: OutputFile) -> list[tuple[str, OutputFile]]:
    """Return layouts that break the promise of covering the file once."""
    extent = output.extents["w"][0]
    return [
        ("left out", replace(output, size=output.size + 1)),
        ("written twice", replace(output, fixed=(*output.fixed, (0, b"x")))),
        ("hold", replace(output, extents={"w": (Extent(extent.offset, extent.size - 1),)})),
        ("of a file", replace(output, extents={"w": (Extent(extent.offset + 1, extent.size),)})),
    ]


@each_format
def test_a_layout_with_holes_or_overlaps_fails_the_contract(form: Format) -> None:
    output = form.lay_out("x", [SPEC])
    contents = random_contents([SPEC])
    assemble(output, contents)
    for reason, broken in spoilt(output):
        with pytest.raises(AssertionError, match=reason):
            assemble(broken, contents)


@each_format
def test_a_reader_that_gives_wrong_bytes_fails_the_contract(form: Format, tmp_path: Path) -> None:
    contents = random_contents([SPEC])
    file = tmp_path / f"x{form.suffix}"
    file.write_bytes(assemble(form.lay_out(file.name, [SPEC]), contents))
    check_read_back(form, file, [SPEC], contents)

    def shifted(path: Path) -> object:
        index = form.read_index(path)
        tensor = index.tensors[0]
        moved = tuple(Extent(extent.offset - 1, extent.size) for extent in tensor.extents)
        return replace(index, tensors=(replace(tensor, extents=moved),))

    with pytest.raises(AssertionError):
        check_read_back(replace(form, read_index=shifted), file, [SPEC], contents)
