"""Hypotheses about where rows and columns lie: fused orders, rotary pairs, exchanged and transposed tensors.

Each gives repairs of a case. What does not live here: biases and norms (`causes_vectors.py`), the config
(`causes_config.py`), the order of experts (`causes_experts.py`).

Shapes: R rows, Q query heads, K key heads, D a head's size, H hidden, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ckptkit.verification.causes_case import Case, Repair, row_axis, rows_moved
from ckptkit.verification.layer_weights import GATE_UP, QKV, Index, Weights
from ckptkit.verification.replay import Setting
from ckptkit.verification.runners.dialects import DIALECTS
from ckptkit.verification.runners.facts import Facts
from ckptkit.verification.runners.job import Floats

_TABLE = "look at the rows of the mapping table for these tensors: one has the other's name"
_EXPERT_GATE_UP = ("experts_gate", "experts_up")


def layout_repairs(case: Case) -> Iterator[Repair]:
    """Yield every hypothesis of this file that fits the part's shapes."""
    weights, facts = case.wrong.weights, case.facts_b
    if case.place.part == "attention":
        yield from _rotary(case)
        yield from _qkv_orders(case)
        for pair in (("k", "v"), ("q", "k"), ("q", "v"), ("q", "o"), ("k", "o"), ("v", "o")):
            yield from _exchanged(weights, *pair)
        yield from _transposed(case, ("q", "k", "v", "o"))
        if len(case.evidence.weights_b.dialect.qkv) == 1:
            yield from _fused_transposed(weights, QKV, _qkv_index(facts, _read_shards(case, QKV)))
    if case.place.part == "mlp":
        fused = _EXPERT_GATE_UP if "router" in weights else GATE_UP
        matrices = (*fused, "experts_down" if "router" in weights else "down")
        yield from _exchanged(weights, *fused)
        yield from _gate_up_orders(case, fused)
        yield from _exchanged(weights, matrices[0], matrices[2])
        yield from _exchanged(weights, matrices[1], matrices[2])
        yield from _transposed(case, matrices)
        if _read_shards(case, GATE_UP):
            index = _gate_up_index(weights[fused[0]].shape[-2], _read_shards(case, GATE_UP))
            yield from _fused_transposed(weights, fused, index)


def sets_of(weights: Weights, fields: Sequence[str], suffixes: Sequence[str] = ("_bias",)) -> Iterator[tuple[str, ...]]:
    """Yield the fields with what belongs to them (biases that are not zero, norms), and the parts of that alone."""
    every = [tuple(field + suffix for field in fields) for suffix in suffixes]
    beside = [group for group in every if any(name in weights and weights[name].any() for name in group)]
    beside = [group for group in beside if all(name in weights for name in group)]
    plain = tuple(fields)
    yield plain + sum(beside, ())
    for group in beside:
        yield group
        yield plain + sum((other for other in beside if other != group), ())
    if len(beside) > 1:
        yield plain


def _rotary(case: Case) -> Iterator[Repair]:
    """Yield both orders of rotary pairs, of q and k and of one alone."""
    facts, weights = case.facts_b, case.wrong.weights
    ways = {
        "interleaved pairs (0, 0', 1, 1', ...) where the network takes halves (0, 1, ..., 0', 1', ...)": (-1, 2),
        "halves (0, 1, ..., 0', 1', ...) of interleaved pairs: they were brought to halves twice": (2, -1),
    }
    for text, split in ways.items():
        for fields in (("q", "k"), ("q",), ("k",)):
            for moved in sets_of(weights, fields, ("_bias", "_norm")):
                is_bias = all(name.endswith("_bias") for name in moved)
                yield Repair(
                    name="bias order" if is_bias else "rotary permutation",
                    text=f"rows of {words(moved)} lie in {text}",
                    fields=moved,
                    hint="permute the rows of each head: a converter for Meta's own checkpoints did it once too often, "
                    "or not at all, or for q without k",
                    change=partial(_pairs_moved, facts.head_dim, moved, split),
                )


def _pairs_moved(size: int, fields: Sequence[str], split: tuple[int, int], setting: Setting) -> Setting:
    for field in fields:
        rows = setting.weights[field].shape[0]
        index = np.arange(rows).reshape(rows // size, *(size // 2 if n < 0 else n for n in split))
        setting = rows_moved(setting, (field,), index.transpose(0, 2, 1).reshape(-1))
    return setting


def _qkv_orders(case: Case) -> Iterator[Repair]:
    """Yield every other order in which q, k and v may lie in one fused tensor of the same shape."""
    facts, weights = case.facts_b, case.wrong.weights
    for read, meant in _order_pairs(_read_shards(case, QKV), facts.kv_heads, _divisors(facts.kv_heads)):
        index = _inverse(_qkv_index(facts, read))[_qkv_index(facts, meant)]
        yield from _reordered(
            case, QKV, weights, index, "order of the fused QKV",
            f"q, k and v lie {_qkv_words(meant, facts.kv_heads)} in one fused tensor, which was read as if they lay "
            f"{_qkv_words(read, facts.kv_heads)}",
            _order_hint(case, "qkv_order", {1: "parts", facts.kv_heads: "groups"}.get(meant, ""), meant),
        )  # fmt: skip


def _gate_up_orders(case: Case, fields: tuple[str, str]) -> Iterator[Repair]:
    """Yield every other order in which gate and up may lie in one fused tensor."""
    weights = case.wrong.weights
    rows = weights[fields[0]].shape[-2]
    shards = [count for count in (1, 2, 4, 8, 16, 32) if rows % count == 0 and count < rows]
    for read, meant in _order_pairs(_read_shards(case, GATE_UP), rows, [*shards, rows]):
        index = _inverse(_gate_up_index(rows, read))[_gate_up_index(rows, meant)]
        yield from _reordered(
            case, fields, weights, index, "order of the fused gate and up",
            f"gate and up lie {_gate_up_words(meant, rows)} in one fused tensor, which was read as if they lay "
            f"{_gate_up_words(read, rows)}",
            _order_hint(case, "gate_up_order", {1: "halves", rows: "turns"}.get(meant, ""), meant),
        )  # fmt: skip


def _reordered(
    case: Case, fields: tuple[str, ...], weights: Weights, index: Index, name: str, text: str, hint: str
) -> Iterator[Repair]:
    for moved in sets_of(weights, fields):
        is_bias = all(field.endswith("_bias") for field in moved)
        some = f"{words(moved)} alone: " if len(moved) == len(fields) and f"{fields[0]}_bias" in weights else ""
        yield Repair(
            name="bias order" if is_bias else name, text=some + text, fields=moved, hint=hint,
            change=partial(_groups_moved, moved, len(fields), index),
        )  # fmt: skip


def _groups_moved(fields: tuple[str, ...], count: int, index: Index, setting: Setting) -> Setting:
    for start in range(0, len(fields), count):
        setting = rows_moved(setting, fields[start : start + count], index)
    return setting


def _order_pairs(read: int, by_one: int, every: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (read, meant): of a fused tensor its order against every other one; of tensors that are apart, those that
    a reader of a fused one may have confused with the plain order or with the finest."""
    for one in every:
        for other in every:
            is_likely = one in (1, by_one) or other in (1, by_one)
            if one != other and (one == read if read else is_likely):
                yield one, other


def _read_shards(case: Case, fields: tuple[str, ...]) -> int:
    """Return the order that B's dialect reads a fused tensor in, as a number of shards; 0 where they are apart."""
    dialect, facts = case.evidence.weights_b.dialect, case.facts_b
    if fields == QKV:
        return {"parts": 1, "groups": facts.kv_heads}[dialect.qkv_order] if len(dialect.qkv) == 1 else 0
    if "router" in case.wrong.weights:
        return 0 if dialect.experts == "each" else 1
    return {"halves": 1, "turns": facts.ffn}[dialect.gate_up_order] if len(dialect.gate_up) == 1 else 0


def _qkv_index(facts: Facts, shards: int) -> Index:
    """Return the rows of q, k and v, in this order, in a tensor that has `shards` times (q, k, v) one after another.

    One shard is the plain order, one for each key head the grouped one; between them is what ranks fused each for
    itself.
    """
    rows = np.arange((facts.heads + 2 * facts.kv_heads) * facts.head_dim).reshape(shards, -1)
    ends = np.cumsum([facts.heads, facts.kv_heads])[:2] * facts.head_dim // shards
    return np.concatenate([part.reshape(-1) for part in np.split(rows, ends, axis=1)])


def _gate_up_index(rows: int, shards: int) -> Index:
    """Return the rows of gate and up, in this order, in a tensor that has `shards` times (gate, up)."""
    return np.arange(2 * rows).reshape(shards, 2, -1).transpose(1, 0, 2).reshape(-1)


def _inverse(index: Index) -> Index:
    inverse = np.empty_like(index)
    inverse[index] = np.arange(len(index))
    return inverse


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def _qkv_words(shards: int, kv_heads: int) -> str:
    if shards == 1:
        return "plainly (all of q, then k, then v)"
    if shards == kv_heads:
        return "in groups (for each key head its queries, its key, its value)"
    return f"plainly within each of {shards} shards"


def _gate_up_words(shards: int, rows: int) -> str:
    if shards == 1:
        return "in halves (all of gate, then up)"
    return "by turns (a row of gate, a row of up)" if shards == rows else f"in halves within each of {shards} shards"


def _order_hint(case: Case, key: str, order: str, shards: int) -> str:
    dialect = case.evidence.weights_b.dialect
    if not order:
        return f"it was fused on {shards} model-parallel ranks and joined as it lay: convert the ranks' files instead"
    name = next((name for (name, _), known in DIALECTS.items() if known == dialect), "")
    variants = [
        variant for (other, variant), known in DIALECTS.items() if (other, getattr(known, key)) == (name, order)
    ]
    if not variants:
        return "convert it again with another `--variant`: the fused tensor was cut in the wrong order"
    best = min(variants, key=lambda v: sum(getattr(DIALECTS[name, v], k) != getattr(dialect, k) for k in _ORDERS))
    return f"read it as what it is, with `--variant-b {best}`, or convert it again with the variant that its reader has"


_ORDERS = ("qkv_order", "gate_up_order")


def _exchanged(weights: Weights, one: str, other: str) -> Iterator[Repair]:
    """Yield two modules of equal shape that have each other's place, with and without what belongs to them."""
    if weights[one].shape != weights[other].shape:
        return
    suffixes = ("_bias", "_norm") if {one, other} == {"q", "k"} else ("_bias",)
    for fields in sets_of(weights, (one, other), suffixes):
        name = f"{words((one,))} and {words((other,))} exchanged"
        yield swap_of({"bias": "bias order", "norm": "norms exchanged"}.get(fields[0].rpartition("_")[2], name), fields)


def swap_of(name: str, fields: tuple[str, ...]) -> Repair:
    """Return the repair in which fields have each other's place, two by two."""
    text = f"{words(fields)} have each other's place"
    return Repair(name=name, text=text, fields=fields, hint=_TABLE, change=partial(_swapped, fields))


def _swapped(fields: tuple[str, ...], setting: Setting) -> Setting:
    pairs = zip(fields[::2], fields[1::2], strict=True)
    found: Weights = {}
    for one, other in pairs:
        found |= {one: setting.weights[other], other: setting.weights[one]}
    return setting.having(**found)


def _transposed(case: Case, fields: Sequence[str]) -> Iterator[Repair]:
    """Yield each square matrix transposed, and all of them."""
    weights = case.wrong.weights
    square = [field for field in fields if weights[field].shape[-1] == weights[field].shape[-2]]
    for some in [*((field,) for field in square), *([tuple(square)] if len(square) > 1 else [])]:
        yield Repair(
            name="transposed",
            text=f"{words(some)}: square and transposed, so no shape shows it",
            fields=some,
            hint="the row of the mapping table transposes where it must not, or does not where it must",
            change=partial(_all_turned, some),
        )


def _all_turned(fields: Sequence[str], setting: Setting) -> Setting:
    return setting.having(**{field: _turned(setting.weights[field]) for field in fields})


def _turned(values: Floats) -> Floats:
    return np.swapaxes(values, -1, -2)


def _fused_transposed(weights: Weights, fields: tuple[str, ...], index: Index) -> Iterator[Repair]:
    """Yield a fused tensor that is square and transposed; `index` are its rows as the fields have them."""
    if len(index) != weights[fields[0]].shape[-1]:
        return

    def change(setting: Setting) -> Setting:
        whole = rows_moved(setting, fields, _inverse(index))
        axis = row_axis(whole.weights[fields[0]])
        turned = _turned(np.concatenate([whole.weights[field] for field in fields], axis=axis))
        ends = np.cumsum([whole.weights[field].shape[axis] for field in fields])[:-1]
        parts = dict(zip(fields, np.split(turned, ends, axis=axis), strict=True))
        return rows_moved(setting.having(**parts), fields, index)

    text = "the fused tensor is square and transposed, so no shape shows it"
    yield Repair(
        name="transposed", text=text, fields=fields, hint="look at the row of the mapping table", change=change
    )


def words(fields: Sequence[str]) -> str:
    """Return fields as a reader calls them: `q_bias` is the bias of q."""
    plain = [field.removeprefix("experts_") for field in fields if not field.endswith("_bias")]
    biases = [field.removesuffix("_bias") for field in fields if field.endswith("_bias")]
    kind = "biases" if len(biases) > 1 else "bias"
    every = [", ".join(plain)] * bool(plain) + [f"the {kind} of {', '.join(biases)}"] * bool(biases)
    return " and ".join(every)
