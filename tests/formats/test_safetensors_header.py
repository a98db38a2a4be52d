"""The two ways through a header: what the short one takes, the long one reads alike; it takes nothing with a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CorruptError
from ckptkit.formats.safetensors_header import Header, _any, _plain, parse_header
from ckptkit.types import DTYPES

FILE = Path("x.safetensors")
ENTRY = '"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}'
OTHER = '"v":{"dtype":"U8","shape":[],"data_offsets":[8,9]}'
FORMAT = '"__metadata__":{"format":"pt"}'


def header_of(entries: dict[str, Any]) -> str:
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("text", [f"{{{ENTRY}}}", f"{{{ENTRY},{OTHER}}}   ", f"{{{FORMAT},{ENTRY}}}"])
def test_a_header_as_the_library_writes_it_goes_the_short_way(text: str) -> None:
    assert _plain(FILE, text) == _any(FILE, text) == parse_header(FILE, text.encode())


def test_the_short_way_gives_what_stands_there() -> None:
    metadata = {"format": "pt"}
    assert _plain(FILE, f"{{{FORMAT},{ENTRY},{OTHER}}}") == Header(
        ["w", "v"], [("F32", (2, 1), 8), ("U8", (), 1)], [0, 8], metadata
    )


SOUND = [
    "{}",
    f"{{{FORMAT}}}",
    f"{{{ENTRY}, {OTHER}}}",
    f"{{{ENTRY},{FORMAT}}}",
    f"{{{ENTRY}}}\n",
    '{"__metadata__":null,"w":{"shape":[2,1],"dtype":"F32","data_offsets":[0,8]}}',
    '{"a\\u0062":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}',
    '{"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8],"more":"x"}}',
]
UNSOUND = [
    f"{{{ENTRY},{ENTRY}}}",
    f"{{{ENTRY},,{OTHER}}}",
    f"{{{ENTRY}{OTHER}}}",
    f"{{,{ENTRY}}}",
    f"{{{ENTRY},}}",
    f"{{{ENTRY}",
    f"{{{ENTRY}}}}}",
    f"[{ENTRY}]",
    f'{{"a":{{{ENTRY}}}}}',
    f"{{{FORMAT}{ENTRY}}}",
    f"{{{FORMAT},{FORMAT},{ENTRY}}}",
    f'{{"__metadata__":{{"a":"1","a":"2"}},{ENTRY}}}',
    f'{{"__metadata__":{{"a":1}},{ENTRY}}}',
    f'{{"a":1,{ENTRY}}}',
    f'{{"a":1{ENTRY}}}',
    f"\ufeff{{{ENTRY}}}",
    f"{{{ENTRY.replace('w', '__metadata__')}}}",
    f"{{{ENTRY.replace('w', chr(7))}}}",
    f"{{{ENTRY.replace('[0,8]', '[00,8]')}}}",
    f"{{{ENTRY.replace('[0,8]', '[0,9]')}}}",
    f"{{{ENTRY.replace('[0,8]', '[0,8.0]')}}}",
    f"{{{ENTRY.replace('[0,8]', '[-8,0]')}}}",
    f"{{{ENTRY.replace('[0,8]', '[0,' + '9' * 5000 + ']')}}}",
    f"{{{ENTRY.replace('[2,1]', '[02,1]')}}}",
    f"{{{ENTRY.replace('[2,1]', '[2,1,]')}}}",
    f"{{{ENTRY.replace('[2,1]', '[,]')}}}",
    f"{{{ENTRY.replace('F32', 'STR')}}}",
    f"{{{ENTRY.replace('F32', 'F4')}}}",
]


@pytest.mark.parametrize("text", SOUND)
def test_any_other_sound_header_goes_the_long_way(text: str) -> None:
    assert _plain(FILE, text) is None
    assert parse_header(FILE, text.encode()) == _any(FILE, text)


@pytest.mark.parametrize("text", UNSOUND)
def test_a_header_with_a_fault_is_refused_and_never_goes_the_short_way(text: str) -> None:
    with pytest.raises(CorruptError):
        parse_header(FILE, text.encode())
    try:
        assert _plain(FILE, text) is None
    except CorruptError as error:  # the metadata are looked at by the same function on both ways
        assert "__metadata__" in str(error)


@given(
    st.lists(
        st.tuples(st.text(max_size=4), st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 12), max_size=3)),
        max_size=4,
        unique_by=lambda row: row[0],
    ),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
def test_both_ways_read_every_header_alike(rows: list[tuple[str, str, list[int]]], metadata: dict[str, str]) -> None:
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in rows:
        size = DTYPES[dtype].bits // 8
        for length in shape:
            size *= length
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = header_of(entries)
    short = _plain(FILE, text)
    if short is not None:
        assert short == _any(FILE, text)
    elif rows and "\\" not in text and "STR" not in text and "__metadata__" not in [name for name, _, _ in rows]:
        raise AssertionError(f"{text} should have gone the short way")
