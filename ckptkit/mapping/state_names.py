"""Which tensors are training state: by their names, as MindSpore's and MindFormers' optimizers give them.

Imports nothing but types, so that `inspect` can ask. What does not live here: rules for state (`state.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# What is of the shape of its parameter, by the prefix of its name: the optimizers that make it. `linear.`, which
# nn.FTRL makes too, is not here: it is how networks call their own layers.
PREFIXES: Mapping[str, str] = {
    "adam_m.": "nn.AdamWeightDecay; MindFormers AdamW, PmaAdamW, Muon",
    "adam_v.": "nn.AdamWeightDecay; MindFormers AdamW, PmaAdamW, Muon",
    "muon_m.": "MindFormers Muon",
    "moment1.": "nn.Adam, AdamOffload, LazyAdam, AdaMax",
    "moment2.": "nn.Adam, AdamOffload, LazyAdam, AdaMax",
    "vhat.": "nn.Adam with use_amsgrad",
    "exp_avg.": "Adam, AdamW, Adamax, NAdam, RAdam of mint and experimental; AdaFactor; MindFormers FusedAdamW, Came",
    "exp_avg_sq.": "Adam, AdamW, NAdam, RAdam of mint and experimental; MindFormers FusedAdamW",
    "max_exp_avg_sq.": "the same with amsgrad",
    "exp_inf.": "experimental Adamax",
    "lamb_m.": "nn.Lamb",
    "lamb_v.": "nn.Lamb",
    "moments.": "nn.Momentum, FTRL, Thor",
    "moment.": "nn.RMSProp, experimental RMSprop",
    "mean_grad.": "nn.RMSProp, experimental RMSprop",
    "mean_square.": "nn.RMSProp, experimental RMSprop",
    "momentum_buf.": "mint SGD",
    "accum.": "nn.SGD, Adagrad, Adadelta, ProximalAdagrad and those of experimental",
    "accum_update.": "nn.Adadelta, experimental Adadelta",
    "stat.": "nn.SGD, experimental SGD",
    "prev.": "nn.Rprop, experimental Rprop",
    "step_size.": "nn.Rprop, experimental Rprop",
    "ax_.": "nn.ASGD",
    "ax.": "experimental ASGD",
    "pma_weight_ema.": "MindFormers PmaAdamW, FusedPmaAdamW",
    "pma_weight_sma.": "MindFormers PmaAdamW, FusedPmaAdamW",
    "main_param.": "MindFormers: the FP32 master copy",
    "accu_grads.": "the cells that accumulate gradients, of MindSpore and MindFormers",
    "grad_accumulation.": "mindspore.boost",
}
# What AdaFactor and MindFormers' Came make: sums over an axis, which no fusing or cutting of the parameter can follow.
FACTORED = ("exp_avg_sq_row_", "exp_avg_sq_col_", "exp_avg_insta_row_", "exp_avg_insta_col_", "exp_avg_sq_")
_COUNTERS = frozenset(
    (
        "global_step", "learning_rate", "lr", "beta1_power", "beta2_power", "momentum", "state_step", "step_t",
        "afactor_step", "cov_step", "epoch_num", "step_num", "global_batch_size", "loss_scale", "scale_sense",
        "scale_value", "counter", "current_iterator_step", "last_overflow_iterator_step", "list_index",
        "scale_window_up_count", "scale_window_down_count", "accumulation_step", "best", "wait", "cooldown_counter",
        "T_0", "T_i", "T_cur", "graceful_exit", "graceful_init", "fake_lr", "fake_param",
    )
)  # fmt: skip
_NUMBERED = re.compile(r"learning_rate_group_\d+|last_epoch_\w+")


def state_of(name: str) -> tuple[str, str] | None:
    """Return prefix and parameter of what an optimizer keeps for a parameter, or None for all other names."""
    head, dot, rest = name.partition(".")
    if rest and head + dot in PREFIXES:
        return head + dot, rest
    if name.startswith(FACTORED):
        prefix = next(p for p in FACTORED if name.startswith(p))
        return (prefix, name[len(prefix) :]) if len(name) > len(prefix) else None
    return None


def parameter_of(name: str) -> str | None:
    """Return the parameter whose layout the state `name` follows; None when it follows none."""
    found = state_of(name)
    return found[1] if found is not None and found[0] in PREFIXES else None


def is_counter(name: str) -> bool:
    """Tell whether `name` is training state of no parameter: a step, a rate, a loss scale."""
    return "." not in name and (name in _COUNTERS or _NUMBERED.fullmatch(name) is not None)


def is_state(name: str) -> bool:
    """Tell by its name whether a tensor is training state and no weight.

    A network may call a layer `accum`: drop state on this word only when its parameter is stored too.
    """
    return state_of(name) is not None or is_counter(name)
