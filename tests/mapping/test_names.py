"""The contract of name patterns: numbers are blotted out name by name or in all names at once, with one outcome."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.mapping.names import skeleton, skeletons

odd_names = st.text(alphabet="a.09_\n\uff11\u0663", max_size=8)  # with line ends, and digits of other scripts


def test_only_whole_parts_that_are_numbers_are_blotted_out() -> None:
    names = ["model.layers.10.w1.weight", "0", "0.1.2", "layer_3.x", "a.7"]
    assert skeletons(names) == ["model.layers.{}.w1.weight", "{}", "{}.{}.{}", "layer_3.x", "a.{}"]


@given(st.lists(odd_names))
def test_all_at_once_is_as_one_by_one(names: list[str]) -> None:
    assert skeletons(names) == [skeleton(name) for name in names]
