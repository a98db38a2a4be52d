"""Hypotheses about biases, norms, embedding and head. Orders of biases are `causes_layout.py`'s.

Shapes: T tokens, H hidden, R rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ckptkit.verification.causes_case import Case, Repair
from ckptkit.verification.causes_layout import swap_of, words
from ckptkit.verification.layer_weights import Weights
from ckptkit.verification.replay import Setting, embed, replay
from ckptkit.verification.runners.job import Floats

_ROWS = "look at the rows of the mapping table for these tensors"
_FEWEST_TOKENS = 3  # any difference of one token is a constant


def vector_repairs(case: Case) -> Iterator[Repair]:
    """Yield every hypothesis about biases and norms that fits the part."""
    yield from _missing_biases(case)
    yield from _biases_too_many(case)
    yield from _rolled_biases(case)
    yield from _norms(case)


def end_repairs(case: Case) -> Iterator[Repair]:
    """Yield every hypothesis about the embedding, or about the head."""
    weights = case.wrong.weights
    if case.place.part == "embedding":
        yield from _embedding(case)
    elif case.place.part == "logits":
        yield from _heads(case, weights)


def constant_repairs(case: Case) -> Iterator[Repair]:
    """Yield a bias of unknown values, where what is missing is one vector for all tokens.

    So it is with the bias of the last projection, and with that of v: the weights of attention sum to 1.
    """
    if case.place.part not in ("attention", "mlp") or len(case.given.ids) < _FEWEST_TOKENS:
        return
    field = "o_bias" if case.place.part == "attention" else "down_bias"
    missing_TH = case.expected - replay(case.place, case.wrong, case.given)
    if not np.isfinite(missing_TH).all():
        return
    missing_H = missing_TH.mean(0).astype(np.float32)
    of = "o or of v" if field == "o_bias" else "down"
    yield Repair(
        name="bias missing",
        text=f"what is off is one vector, the same for every token: the bias of {of} is missing or has other values",
        fields=tuple(name for name in (field, "v_bias") if name in case.wrong.weights)
        or ("o" if field == "o_bias" else "down",),
        hint="look at the rows of the mapping table for these biases, and at the keys of config.json about biases",
        change=lambda setting: setting.having(**{field: setting.weights.get(field, np.float32(0)) + missing_H}),
    )


def _missing_biases(case: Case) -> Iterator[Repair]:
    """Yield the biases that A has and B has not, or has as zeros: each, and all."""
    right, weights = case.right, case.wrong.weights
    if right is None:
        return
    lost = [f for f in right if f.endswith("_bias") and right[f].any() and not (f in weights and weights[f].any())]
    lost = [f for f in lost if f not in weights or weights[f].shape == right[f].shape]
    for fields in [*((field,) for field in lost), *([tuple(lost)] if len(lost) > 1 else [])]:
        zero = all(field in weights for field in fields)
        yield Repair(
            name="bias missing",
            text=f"{words(fields)} {'is all zero' if zero else 'is not there'}, and A's is not",
            fields=fields,
            hint=f"{_ROWS}, and at the keys of config.json about biases",
            change=partial(_taking, {field: right[field] for field in fields}),
        )


def _biases_too_many(case: Case) -> Iterator[Repair]:
    """Yield biases of B that A's network has not."""
    facts, weights = case.facts_a, case.wrong.weights
    has = {"q": facts.qkv_bias, "k": facts.qkv_bias, "v": facts.qkv_bias, "o": facts.o_bias}
    has |= dict.fromkeys(("gate", "up", "down"), facts.mlp_bias)
    extra = tuple(f for f in weights if f.endswith("_bias") and weights[f].any() and not has[f.removesuffix("_bias")])
    if extra:
        yield Repair(
            name="bias too many",
            text=f"A's network has no {words(extra).removeprefix('the ')}, and B's has",
            fields=extra,
            hint="the keys of config.json about biases (`attention_bias`, `mlp_bias`) differ between A and B",
            change=partial(_taking, {field: np.zeros_like(weights[field]) for field in extra}),
        )


def _rolled_biases(case: Case) -> Iterator[Repair]:
    """Yield biases that lie one row too early or too late, in tensors of their own or in a fused one."""
    weights = case.wrong.weights
    for field in [name for name in weights if name.endswith("_bias") and weights[name].any()]:
        for step in (1, -1):
            yield Repair(
                name="bias shifted",
                text=f"{words((field,))} lies {abs(step)} row too {'early' if step > 0 else 'late'}",
                fields=(field,),
                hint=_ROWS,
                change=partial(_rolled, field, step),
            )


def _rolled(field: str, step: int, setting: Setting) -> Setting:
    return setting.having(**{field: np.roll(setting.weights[field], step)})


def _norms(case: Case) -> Iterator[Repair]:
    """Yield norms in each other's place, and weights that are stored less or more by one."""
    weights, part = case.wrong.weights, case.place.part
    used = {"attention": ("attention_norm",), "mlp": ("mlp_norm",), "norm": ("norm",)}.get(part, ())
    for field in used:
        for other in ("attention_norm", "mlp_norm"):
            if other != field:
                where = "the last layer's " if part == "norm" else ""
                yield Repair(
                    name="norms exchanged",
                    text=f"{words((field, other))}: the weight of the one lies where {where}other's should",
                    fields=(field, other),
                    hint=_ROWS,
                    change=partial(_taking, {field: weights[other], other: weights[field]}),
                )
    if "q_norm" in weights and part == "attention" and weights["q"].shape != weights["k"].shape:
        yield swap_of("norms exchanged", ("q_norm", "k_norm"))  # of equal shapes, it comes with q and k
    for field in [name for name in weights if name in (*used, "q_norm", "k_norm")]:
        for step, text in ((1.0, "less by one"), (-1.0, "more by one")):
            yield Repair(
                name="norm offset",
                text=f"{field} is stored {text}: some networks scale by (1 + weight), and these by the weight",
                fields=(field,),
                hint="the converter of the other family of networks was used",
                change=partial(_taking, {field: weights[field] + np.float32(step)}),
            )


def _heads(case: Case, weights: Weights) -> Iterator[Repair]:
    """Yield the embedding as the head, or a head of its own in the place of the embedding."""
    facts_a, facts_b = case.facts_a, case.facts_b
    key = "`tie_word_embeddings` of config.json"
    if not facts_b.tied:
        name = "tied head" if facts_a.tied else "embedding and head exchanged"
        text = "A's head is the embedding, and B's is a tensor of its own, with other values"
        yield Repair(
            name=name,
            text=text if facts_a.tied else "A's head is what lies in B as the embedding",
            fields=("head",) if facts_a.tied else ("embedding", "head"),
            hint=f"set {key} to true for B, or make the head the embedding" if facts_a.tied else _ROWS,
            change=partial(_taking, {"head": weights["embedding"]}),
        )
        return
    own = weights.get("own_head") if "own_head" in weights else (case.right or {}).get("head")
    if own is not None and not facts_a.tied:
        yield Repair(
            name="tied head",
            text="B's head is the embedding, and A's is a tensor of its own, with other values",
            fields=("head",),
            hint=f"set {key} to false for B, and convert it again if it has no head of its own",
            change=partial(_taking, {"head": own}),
        )


def _embedding(case: Case) -> Iterator[Repair]:
    """Yield the head as the embedding, another row for every token, and a constant factor."""
    weights, ids = case.wrong.weights, case.given.ids
    table_VH = weights["embedding"]
    if not np.may_share_memory(table_VH, weights["head"]):
        yield Repair(
            name="embedding and head exchanged", text="embedding and head have each other's place",
            fields=("embedding", "head"), hint=_ROWS, change=partial(_taking, {"embedding": weights["head"]}),
        )  # fmt: skip
    found = _rows_of(table_VH, case.expected)
    if found is not None:
        steps = {int(row - i) % len(table_VH) for row, i in zip(found, ids, strict=True)}
        how = f"shifted by {steps.pop()} rows" if len(steps) == 1 else "in another order"
        yield Repair(
            name="rows of the embedding moved", text=f"rows of the embedding are {how}", fields=("embedding",),
            hint="the vocabulary was cut over ranks, padded or sorted otherwise", change=partial(_rows_put, ids, found),
        )  # fmt: skip
    rows_TH, expected_TH = embed(table_VH, ids), case.expected.astype(np.float64)
    squares = float((rows_TH * rows_TH).sum())
    factor = float((rows_TH * expected_TH).sum()) / squares if squares else 0.0
    if np.isfinite(factor) and factor not in (0.0, 1.0):
        yield Repair(
            name="embedding scaled", text=f"A's embedding is B's times {factor:.6g}", fields=("embedding",),
            hint="some networks scale the embedding when they run: a converter did it in the file",
            change=lambda setting: setting.having(embedding=setting.weights["embedding"] * np.float32(factor)),
        )  # fmt: skip


def _rows_of(table_VH: Floats, wanted_TH: Floats) -> list[int] | None:
    """Return the row of the table that each wanted one equals bit for bit; None when one is not there."""
    if table_VH.shape[1:] != wanted_TH.shape[1:]:
        return None
    places = {row.tobytes(): -1 for row in wanted_TH}
    for index, row in enumerate(table_VH):
        if row.tobytes() in places:
            places[row.tobytes()] = index
    found = [places[row.tobytes()] for row in wanted_TH]
    return None if -1 in found else found


def _rows_put(ids: Sequence[int], rows: Sequence[int], setting: Setting) -> Setting:
    table_VH = setting.weights["embedding"].copy()
    table_VH[list(ids)] = setting.weights["embedding"][list(rows)]
    return setting.having(embedding=table_VH)


def _taking(weights: Weights, setting: Setting) -> Setting:
    return setting.having(**weights)
