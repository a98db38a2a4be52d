"""Protobuf's ints and the window over a file: what is written is read, from any place and in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import CorruptError
from ckptkit.formats import files
from ckptkit.formats.protobuf import LONGEST_NAME, WINDOW_BYTES, Window, sized, varint

NUMBERS = [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1]


@pytest.mark.parametrize("number", NUMBERS)
def test_an_int_is_read_as_it_was_written(tmp_path: Path, number: int) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"\x08" + varint(number) + b"\x12" + sized(b"end"))
    with files.opened(file) as descriptor:
        window = Window(file, descriptor, file.stat().st_size, "test")
        (first, second) = window.fields(0, window.end)
        assert first[1:3] == (8, number)
        assert window.text(second[3], second[2]) == "end"


def test_packed_ints_are_read_and_one_without_end_is_refused_at_once(tmp_path: Path) -> None:
    good = b"".join(varint(number) for number in NUMBERS)
    endless = b"\xff" * (LONGEST_NAME - 1)
    file = tmp_path / "x"
    file.write_bytes(good + endless)
    with files.opened(file) as descriptor:
        window = Window(file, descriptor, file.stat().st_size, "test")
        assert window.packed(0, len(good)) == NUMBERS
        for size in (1, 11, len(endless)):
            with pytest.raises(CorruptError, match="is damaged or no test: a number that does not end"):
                window.packed(len(good), size)


def test_bytes_behind_the_window_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x"
    data = bytes(i % 100 for i in range(3 * WINDOW_BYTES))
    file.write_bytes(data)
    with files.opened(file) as descriptor:
        window = Window(file, descriptor, len(data), "test")
        window.field(2 * WINDOW_BYTES, len(data))
        for at in (0, 5, WINDOW_BYTES, 2 * WINDOW_BYTES - 100):
            assert window.bytes_at(at, 7) == data[at : at + 7]
