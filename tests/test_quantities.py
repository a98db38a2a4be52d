"""The contract: what is said of a set of numbers is read as that set, and what is no such set is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.quantities import numbers_text, parse_numbers


@given(st.sets(st.integers(0, 50), min_size=1))
def test_what_is_said_of_numbers_is_read_as_these(numbers: set[int]) -> None:
    assert parse_numbers(numbers_text(numbers), 51, "rank") == tuple(sorted(numbers))


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_run_of_numbers_is_said_by_its_ends(first: int, more: int) -> None:
    ends = {first, first + more}
    assert numbers_text(range(first, first + more + 1)) == "-".join(map(str, sorted(ends)))
    assert parse_numbers(numbers_text(ends), 101, "rank") == tuple(sorted(ends))


def test_a_number_that_is_too_large_is_refused_however_it_is_said() -> None:
    assert parse_numbers(numbers_text([0, 1, 2]), 3, "layer") == (0, 1, 2)
    for text in ("0-3", "3", "2-1"):
        with pytest.raises(ValueError, match="no range of layers from 0 to 2"):
            parse_numbers(text, 3, "layer")
