"""Trees of ops: evaluating a region reads only what it needs, inverting gives each leaf back, simplifying is safe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import chains, numbered, regions

from ckptkit.errors import CoverageError
from ckptkit.mapping.expr import Expr, Leaf, Node, evaluate, granules, invert, leaves, node, pull, renamed, substitute
from ckptkit.mapping.op import Array
from ckptkit.mapping.ops import Concat, Deinterleave, Index, Interleave, Pad, Slice, Stack, Transpose
from ckptkit.types import Region

Both = tuple[Expr, Expr]


class Store:
    """Tensors by name; counts the elements that are read."""

    def __init__(self, tensors: list[Leaf]) -> None:
        arrays = numbered([leaf.shape for leaf in tensors])
        self.arrays = {leaf.name: array for leaf, array in zip(tensors, arrays, strict=True)}
        self.read_elements = 0

    def read(self, leaf: Leaf, region: Region) -> Array:
        self.read_elements += region.size
        return self.arrays[leaf.name][region.slices()]

    def whole(self, expr: Expr) -> Array:
        return evaluate(expr, Region.whole(expr.shape), self.read)


@given(chains(), st.data())
def test_a_region_of_a_chain_is_that_region_of_the_whole(both: Both, data: st.DataObject) -> None:
    expr, _ = both
    store = Store(list(leaves(expr)))
    whole = store.whole(expr)
    region = data.draw(regions(expr.shape, granules(expr)))
    store.read_elements = 0
    got = evaluate(expr, region, store.read)
    assert got.shape == region.shape
    assert got.dtype == whole.dtype
    np.testing.assert_array_equal(got, whole[region.slices()])
    assert store.read_elements == sum(box.size for _, box in pull(expr, region))
    assert store.read_elements <= region.size


@given(chains())
def test_simplifying_changes_no_value(both: Both) -> None:
    neat, plain = both
    store = Store(list(leaves(plain)))
    assert neat.shape == plain.shape
    np.testing.assert_array_equal(store.whole(neat), store.whole(plain))


@given(chains())
def test_inverting_gives_each_leaf_back(both: Both) -> None:
    for expr in both:
        store = Store(list(leaves(expr)))
        target = Leaf("target", expr.shape)
        store.arrays["target"] = store.whole(expr)
        for leaf, back in invert(expr, target):
            assert {x.name for x in leaves(back)} == {"target"}
            np.testing.assert_array_equal(store.whole(back), store.arrays[leaf.name])


@given(chains(), st.data())
def test_a_region_of_an_inverse_is_that_region_of_the_leaf(both: Both, data: st.DataObject) -> None:
    expr, _ = both
    store = Store(list(leaves(expr)))
    store.arrays["target"] = store.whole(expr)
    pairs = invert(expr, Leaf("target", expr.shape))
    leaf, back = data.draw(st.sampled_from(pairs))
    region = data.draw(regions(back.shape, granules(back)))
    np.testing.assert_array_equal(evaluate(back, region, store.read), store.arrays[leaf.name][region.slices()])


@given(chains())
def test_there_and_back_again_simplifies_to_the_leaf_itself(both: Both) -> None:
    neat, _ = both
    for leaf, back in invert(neat, Leaf("target", neat.shape)):
        assert substitute(back, {"target": neat}) == leaf


@given(chains())
def test_back_and_there_again_is_the_target(both: Both) -> None:
    neat, _ = both
    if "Pad" in repr(neat):  # a padded tensor loses its padding on the way
        return
    pairs = invert(neat, Leaf("target", neat.shape))
    again = substitute(neat, {leaf.name: back for leaf, back in pairs})
    assert again == Leaf("target", neat.shape)


def rebuilt(expr: Expr, values: dict[str, Expr]) -> Expr:
    """What `substitute` is to return, without a short way."""
    if isinstance(expr, Leaf):
        return values[expr.name]
    return node(expr.op, [rebuilt(child, values) for child in expr.children])


@given(chains())
def test_substituting_is_building_anew(both: Both) -> None:
    neat, _ = both
    other_names: dict[str, Expr] = {leaf.name: Leaf(f"{leaf.name}!", leaf.shape) for leaf in leaves(neat)}
    assert substitute(neat, other_names) == rebuilt(neat, other_names)
    inverted: dict[str, Expr] = {leaf.name: back for leaf, back in invert(neat, Leaf("target", neat.shape))}
    assert substitute(neat, inverted) == rebuilt(neat, inverted)


@given(chains())
def test_renaming_changes_the_names_of_all_leaves_and_nothing_else(both: Both) -> None:
    for expr in both:
        other = renamed(expr, "", "{layer}")
        assert renamed(other, "{layer}", "") == expr
        assert [leaf.shape for leaf in leaves(other)] == [leaf.shape for leaf in leaves(expr)]
        assert all("{layer}" in leaf.name for leaf in leaves(other))


def test_leaves_come_from_left_to_right() -> None:
    a, b, c = (Leaf(name, (2, 3)) for name in "abc")
    assert leaves(a) == (a,)
    assert leaves(node(Concat(0), [node(Stack(0, 1), [b]), node(Stack(0, 2), [c, a])])) == (b, c, a)


def test_leaves_that_a_region_does_not_need_are_not_pulled() -> None:
    a, b = Leaf("a", (2, 3)), Leaf("b", (4, 3))
    joined = node(Concat(0), [a, b])
    assert pull(joined, Region((0, 0), (2, 3))) == [(a, Region((0, 0), (2, 3)))]
    assert pull(joined, Region((1, 0), (3, 3))) == [(a, Region((1, 0), (2, 3))), (b, Region((0, 0), (1, 3)))]


def test_a_leaf_can_occur_twice() -> None:
    a = Leaf("a", (4, 3))
    swapped = node(Concat(0), [node(Slice(0, 2, 4), [a]), node(Slice(0, 0, 2), [a])])
    assert [box.start[0] for _, box in pull(swapped, Region.whole((4, 3)))] == [2, 0]


def test_a_region_of_padding_alone_is_zeros_of_the_right_dtype() -> None:
    padded = node(Pad(0, 5), [Leaf("a", (3, 2))])
    store = Store([Leaf("a", (3, 2))])
    got = evaluate(padded, Region((3, 0), (5, 2)), store.read)
    assert got.tolist() == [[0, 0], [0, 0]]
    assert got.dtype == "uint16"
    assert pull(padded, Region((3, 0), (5, 2))) == []


def test_an_empty_region_is_an_empty_array_of_its_shape() -> None:
    store = Store([Leaf("a", (3, 2))])
    got = evaluate(Leaf("a", (3, 2)), Region((1, 1), (1, 2)), store.read)
    assert got.shape == (0, 1)
    assert got.dtype == "uint16"


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (Slice(0, 2, 6), lambda a, b: node(Concat(0), [a, b])),
        (Deinterleave(0, (1, 2), 1), lambda a, b: node(Interleave(0, (1, 2)), [a, b])),
    ],
)
def test_taking_out_what_was_just_joined_is_the_child(outer: object, inner: object) -> None:
    a, b = Leaf("a", (2, 3)), Leaf("b", (4, 3))
    assert node(outer, [inner(a, b)]) == b  # type: ignore[arg-type,operator]


def test_taking_out_another_part_is_not_simplified_away() -> None:
    a, b = Leaf("a", (2, 3)), Leaf("b", (4, 3))
    kept = node(Slice(0, 1, 5), [node(Concat(0), [a, b])])
    assert isinstance(kept, Node)
    assert isinstance(node(Transpose((1, 0)), [node(Concat(0), [a, b])]), Node)
    assert isinstance(node(Index(0, 2, 1), [node(Concat(0), [a, Leaf("c", (0, 3))])]), Node)


def test_joining_parts_in_another_order_is_not_simplified_away() -> None:
    whole = Leaf("w", (2, 3))
    parts = [node(Index(0, 2, i), [whole]) for i in (0, 1)]
    assert node(Stack(0, 2), parts) == whole
    assert node(Stack(0, 2), parts[::-1]) != whole
    assert node(Stack(0, 1), parts[:1]) != whole


def test_substituting_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(CoverageError, match=r"`a` has shape \(2, 3\) on one side and \(3, 2\) on the other"):
        substitute(Leaf("a", (2, 3)), {"a": Leaf("b", (3, 2))})


def test_an_op_with_the_wrong_number_of_inputs_is_refused() -> None:
    with pytest.raises(CoverageError, match="takes 1 tensors, not 2"):
        node(Transpose((0,)), [Leaf("a", (1,)), Leaf("b", (1,))])


def test_a_region_of_many_joined_parts_makes_boxes_for_those_it_meets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks may hold parts, and as many may be cut out: a box for each pair would be a million."""
    made = []
    plain = Region.with_axis

    def counted(region: Region, axis: int, start: int, stop: int) -> Region:
        made.append(start)
        return plain(region, axis, start, stop)

    monkeypatch.setattr(Region, "with_axis", counted)
    whole = node(Concat(0), [Leaf(f"part {number}", (2, 3)) for number in range(100)])
    for first in range(0, 200, 4):
        found = pull(whole, Region((first, 0), (first + 4, 3)))
        assert [leaf.name for leaf, _ in found] == [f"part {first // 2}", f"part {first // 2 + 1}"]
    assert len(made) == 100
