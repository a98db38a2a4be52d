"""The hypothesis that experts lie in another order than the router's rows, found from what the experts give.

Shapes: T tokens, N of them, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ckptkit.verification.causes_case import Case, Repair
from ckptkit.verification.layer_weights import EXPERTS, Index
from ckptkit.verification.replay import Doubles, Setting, expert_output, norm, routing
from ckptkit.verification.runners.job import Floats

_MOST_TOKENS = 64
_SHOWN = 4


def expert_repairs(case: Case) -> Iterator[Repair]:
    """Yield the experts in the order that gives A's output, where there is one other than theirs.

    A's output of a token is a sum of experts' outputs, each times its share. With all experts' outputs at hand, the
    shares are the solution of a linear system of H equations for E unknowns; it has one solution while E <= H. The
    shares that B's router gives are the same numbers on other experts, and that says which is whose.
    """
    weights = case.wrong.weights
    if "router" not in weights or len(weights["router"]) > weights["router"].shape[1]:
        return
    order = _order(case)
    if order is None or np.array_equal(order, np.arange(len(order))):
        return
    fields: tuple[str, ...] = ("router", *EXPERTS)
    if case.right is not None:
        fields = ("router",) if not np.array_equal(case.right["router"], weights["router"]) else EXPERTS
    moved = [f"{row} -> {expert}" for row, expert in enumerate(order) if row != expert]
    more = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
    yield Repair(
        name="expert order",
        text=f"the router's rows are those of other experts (row -> expert: {', '.join(moved[:_SHOWN])}{more})",
        fields=fields,
        hint="experts were sorted by name (10 before 2), or joined in another order of ranks than the router's rows",
        change=partial(_reordered, order),
    )


def _order(case: Case) -> Index | None:
    """Return for each row of the router the expert that it is about; None when that is not to be found."""
    weights, facts = case.wrong.weights, case.facts_b
    normed_TH = norm(weights["mlp_norm"], case.given.x[:_MOST_TOKENS], facts.norm_eps)
    shares_TE = routing(facts, weights["router"], normed_TH)
    every_ETH = np.stack([expert_output(weights, expert, normed_TH) for expert in range(facts.experts)])
    expected_TH = case.expected[:_MOST_TOKENS]
    if not all(np.isfinite(values).all() for values in (every_ETH, shares_TE, expected_TH)):
        return None
    wanted_TE = _solved(every_ETH, expected_TH)
    # Rows that took part, the surest first; the others keep what is left over, in its order.
    distances_EE = np.abs(shares_TE[:, :, None] - wanted_TE[:, None, :]).sum(0)
    order, free = np.full(facts.experts, -1, np.intp), set(range(facts.experts))
    for row in np.argsort(-shares_TE.sum(0), kind="stable"):
        if not shares_TE[:, row].any():
            continue
        best = min(free, key=lambda expert: (distances_EE[row, expert], expert))
        order[row] = best
        free.remove(best)
    idle = [row for row in range(facts.experts) if order[row] < 0]
    for row in [row for row in idle if row in free]:
        order[row] = row
        free.remove(row)
    order[order < 0] = sorted(free)
    return order


def _solved(every_ETH: Doubles, expected_TH: Floats) -> Doubles:
    """Return the shares (T, E) with which the experts' outputs add up to what is expected, by least squares."""
    rows = [
        np.linalg.lstsq(every_ETH[:, token].T, expected_TH[token].astype(np.float64), rcond=None)[0]
        for token in range(len(expected_TH))
    ]
    return np.array(rows)


def _reordered(order: Index, setting: Setting) -> Setting:
    """Give the router's rows their experts: the experts move, for their order is what a sum does not show."""
    return setting.having(**{field: setting.weights[field][order] for field in EXPERTS})
