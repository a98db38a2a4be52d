"""The MindSpore side with MindFormers' own network, where it can express config.json.

    python -m ckptkit.verification.runners.mindformers JOB OUT

Importing MindFormers makes a folder `output` in the working folder and writes a log there and to the standard output.
It takes no position ids; its mcore networks run in graph mode, as they do in training. What does not live here: what it
cannot express (`expressible.py`), how its networks are configured (`mindformers_nets.py`). Shapes: B one sequence, T
tokens, V the vocabulary, D a head's size, F = D / 2.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.errors import InternalError, UsageError
from ckptkit.verification.runners.expressible import MCORE, why_not
from ckptkit.verification.runners.facts import Facts, read_facts
from ckptkit.verification.runners.frameworks import framework
from ckptkit.verification.runners.job import Floats, Job
from ckptkit.verification.runners.main import main
from ckptkit.verification.runners.mindformers_nets import make_legacy, make_mcore
from ckptkit.verification.runners.mindspore_exact import be_exact, mindspore_device, uninitialised
from ckptkit.verification.runners.net import WHOLE, Net, Tap, Walk
from ckptkit.verification.runners.rope import inverse_frequencies

INV_FREQ = "rotary.inv_freq"
FILLER = 0  # an id like any other: causality hides what follows a sequence
# In networks, never in checkpoints; none of them enters a forward run without training.
BENIGN = {
    "*_dropout.seed": "state of a dropout's random numbers",
    "*_dropout.offset": "state of a dropout's random numbers",
    "*.router.expert_load": "counts the tokens of each expert while training",
    "*.router.fi_accu": "sums the router's choices while training",
    "*num_tokens_per_expert": "counts the tokens of each expert while training",
}


class MindFormersNet:
    """A MindFormers network as a `Net`, for sequences of exactly `length` tokens; shorter ones are padded.

    `head` is the name of an output layer, and of the embedding that it is when they are tied. `frequencies_F` are the
    rotary ones, None when they are not to be compared.
    """

    runner = "mindformers"
    takes_positions = False

    def __init__(
        self,
        mindspore: Any,
        cell: Any,
        facts: Facts,
        *,
        length: int,
        head: tuple[str, str],
        frequencies_F: Floats | None,
        reading: Mapping[str, Any],
    ) -> None:
        self.versions: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.notes = [*facts.notes]
        self.constants: Sequence[str] = () if frequencies_F is None else (INV_FREQ,)
        self.reading = {**facts.reading(), **reading}
        self._ms, self._cell, self._length, self._vocab = mindspore, cell, length, facts.vocab
        self._parameters = {parameter.name: parameter for parameter in cell.get_parameters()}
        self._frequencies_F = frequencies_F
        self._twins = dict([head]) if facts.tied else {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def benign(self, name: str) -> str | None:
        return next((reason for pattern, reason in BENIGN.items() if fnmatch(name, pattern)), None)

    def twin(self, name: str) -> str | None:
        return None if name in self._parameters else self._twins.get(name)

    def put(self, name: str, values: Floats) -> None:
        if name == INV_FREQ:
            raise InternalError("MindFormers' network keeps its rotary frequencies to itself")
        parameter, tensor = self._parameters[name], self._ms.Tensor(np.ascontiguousarray(values))
        if parameter.has_init:
            parameter.set_data(tensor)
        else:  # new data would be storage beside that of a graph which has run
            self._ms.ops.assign(parameter, tensor)

    def get(self, name: str) -> Floats:
        if name == INV_FREQ and self._frequencies_F is not None:
            return self._frequencies_F.copy()
        values: Floats = np.array(self._parameters[name].asnumpy())
        return values

    def blocks(self) -> Sequence[tuple[str, Sequence[str]]]:
        return [(WHOLE, list(self._parameters))]

    def free(self, names: Sequence[str]) -> None:
        """Free nothing: it runs whole."""

    def walk(self, ids: Sequence[int], positions: Sequence[int] | None, tap: Tap | None) -> Walk:
        yield WHOLE
        hooks = [] if tap is None else list(self._watch(tap, len(ids)))
        try:
            return self._forward(ids)
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, ids: Sequence[int]) -> Floats:
        if outside := [i for i in ids if not 0 <= i < self._vocab]:  # it would gather zeros, or anything
            raise UsageError(f"token id {outside[0]} is not in a vocabulary of {self._vocab}")
        ids_BT = np.full((1, self._length), FILLER, np.int32)
        ids_BT[0, : len(ids)] = ids
        out = self._cell(self._ms.Tensor(ids_BT))
        whole_TV = (out[0] if isinstance(out, tuple) else out).asnumpy().reshape(self._length, self._vocab)
        logits_TV: Floats = np.array(whole_TV[: len(ids)])
        return logits_TV

    def _watch(self, tap: Tap, tokens: int) -> Iterator[Any]:
        """Let the cells tell of what they give for the first `tokens`; yield what ends it."""

        def teller(name: str) -> Callable[[Any, Any, Any], None]:
            def tell(_cell: Any, _inputs: Any, output: Any) -> None:
                values = output[0] if isinstance(output, tuple) else output
                tap(name, values.reshape(-1, values.shape[-1])[:tokens])

            return tell

        body = self._cell.model
        yield body.tok_embeddings.register_forward_hook(teller("embedding"))
        for number, layer in enumerate(body.layers):
            yield layer.attention.register_forward_hook(teller(f"layers.{number}.attention"))
            yield layer.feed_forward.register_forward_hook(teller(f"layers.{number}.mlp"))
            yield layer.register_forward_hook(teller(f"layers.{number}"))
        yield body.norm_out.register_forward_hook(teller("norm"))


def read_legacy(cell: Any) -> dict[str, Any]:
    """Return what the built network says of itself."""
    model, layer = cell.model, cell.model.layers[0]
    attention, feed_forward = layer.attention, layer.feed_forward
    fused = hasattr(attention, "w_qkv")
    hidden = int(model.tok_embeddings.embedding_weight.shape[1])
    rows = feed_forward.w2.weight.shape
    return {
        "layers": len(model.layers),
        "hidden": hidden,
        "heads": int(attention.n_head),
        "kv_heads": int(attention.n_kv_head),
        "head_dim": int(attention.head_dim),
        "ffn": int(rows[1]),
        "vocab": int(model.tok_embeddings.embedding_weight.shape[0]),
        "norm_eps": float(model.norm_out.eps),
        "rope_base": float(cell.config.theta),
        "tied": cell.lm_head.weight is model.tok_embeddings.embedding_weight,
        "window": [None] * len(model.layers),
        "qkv_bias": bool((attention.w_qkv if fused else attention.wq).has_bias),
        "o_bias": bool(attention.wo.has_bias),
        "mlp_bias": bool(feed_forward.w2.has_bias),
    }


def read_mcore(config: Any) -> dict[str, Any]:
    """Return what the configuration of the built network says; it is MindFormers' own, made of what it was given."""
    reading = {
        "layers": int(config.num_layers),
        "hidden": int(config.hidden_size),
        "heads": int(config.num_attention_heads),
        "kv_heads": int(config.num_query_groups),
        "head_dim": int(config.kv_channels),
        "ffn": int(config.ffn_hidden_size),
        "vocab": int(config.vocab_size),
        "norm_eps": float(config.layernorm_epsilon),
        "rope_base": float(config.rotary_base),
        "tied": bool(config.tie_word_embeddings),
        "activation": str(config.hidden_act),
        "qkv_bias": bool(config.add_qkv_bias),
    }
    if config.num_moe_experts:
        reading |= {
            "experts": int(config.num_moe_experts),
            "experts_per_token": int(config.moe_router_topk),
            "moe_ffn": int(config.moe_ffn_hidden_size),
            "norm_topk": bool(config.norm_topk_prob),
        }
    return reading


def frequencies_of(manager: Any) -> Floats:
    """Return the legacy network's frequencies, (F,), from its cosines and sines of position 1: it keeps nothing else.

    None is above 1, so the angle is the frequency, to about a unit in its last place.
    """
    cos_D, sin_D = (table_TD.asnumpy()[1].astype(np.float64) for table_TD in (manager.freqs_cos, manager.freqs_sin))
    angles_F: Floats = np.arctan2(sin_D, cos_D)[: len(cos_D) // 2].astype(np.float32)
    return angles_F


def build(job: Job, *, mcore_anywhere: bool = False, after_build: Callable[[Any], None] = lambda cell: None) -> Net:
    """Return MindFormers' network for the job's config.json, its weights not loaded.

    UsageError when it cannot express the job. `mcore_anywhere` lets mcore networks run where MindFormers does not run
    them, once something has taken the place of Ascend's primitives; `after_build` is given the mcore network.
    """
    is_mcore = job.dialect == MCORE
    reason = why_not(job.config, job.dialect, job.variant, "ascend" if is_mcore and mcore_anywhere else job.device)
    if job.stream or job.layers is not None:
        reason = reason or "its network runs whole"
    if job.trace and is_mcore:
        reason = reason or "its graph does not show what happens inside"
    if reason is not None:
        raise UsageError(f"MindFormers cannot run this: {reason}", hint="use `--runner builtin`")
    facts, (target, index) = read_facts(job.config), mindspore_device(job.device)
    # Both loggers are configured at import.
    os.environ.setdefault("GLOG_v", "3")
    os.environ.setdefault("LOG_MF_PATH", str(Path.cwd() / "log"))
    mindspore = framework("mindspore")
    settings = be_exact(mindspore, target, index, graph=is_mcore)
    length = max((len(item.ids) for item in job.inputs if item.positions is None), default=1)
    with uninitialised():
        if is_mcore:
            cell = make_mcore(mindspore, facts, job.variant, length, target)
        else:
            cell = make_legacy(facts, job.variant, length)
    if is_mcore:
        after_build(cell)
        net = _mcore(mindspore, cell, facts, length)
        if not mcore_anywhere:
            settings["attention"] = "flash, float16"
            net.notes.append("MindFormers' mcore attention casts to float16 on Ascend: its logits are that coarse")
    else:
        net = _legacy(mindspore, cell, facts, length)
    net.settings = settings
    net.versions = _versions(mindspore)
    return net


def _mcore(mindspore: Any, cell: Any, facts: Facts, length: int) -> MindFormersNet:
    return MindFormersNet(
        mindspore, cell, facts, length=length, head=("output_layer.weight", "embedding.word_embeddings.weight"),
        frequencies_F=np.array(cell.model.rotary_pos_emb.inv_freq.asnumpy()), reading=read_mcore(cell.model.config),
    )  # fmt: skip


def _legacy(mindspore: Any, cell: Any, facts: Facts, length: int) -> MindFormersNet:
    frequencies_F = frequencies_of(cell.model.freqs_mgr)
    if not np.allclose(frequencies_F, inverse_frequencies(facts.rope, facts.head_dim), rtol=1e-4, atol=0):
        raise InternalError("MindFormers' network turns positions otherwise than config.json says")
    # It scales frequencies in float64 and transformers in float32: then they differ by more than a last place.
    is_plain = facts.rope.type == "default"
    return MindFormersNet(
        mindspore, cell, facts, length=length, head=("lm_head.weight", "model.tok_embeddings.embedding_weight"),
        frequencies_F=frequencies_F if is_plain else None, reading=read_legacy(cell),
    )  # fmt: skip


def _versions(mindspore: Any) -> dict[str, str]:
    mindformers = framework("mindformers", extra="mindformers")
    versions = {"mindspore": mindspore.__version__, "mindformers": mindformers.__version__}
    return {**versions, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main(build))
