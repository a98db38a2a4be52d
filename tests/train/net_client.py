"""Checks of the network that is trained; see `arithmetic.py`. Reports are differences and booleans."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from arithmetic import Config, Settings, arrays, data_of, far, farthest, main, make_net, rows_of, same_bits, slot_of
from runner_jobs import EVERY_KIND, YARN, config_of

from ckptkit.memory import peak_bytes
from ckptkit.train.processors import stay_clear

NONE: frozenset[int] = frozenset()
CONTROLS = ("llama", "qwen2", "qwen3_moe")  # compared with a network of another eps, too
KINDS = (
    "llama", "llama tied", "llama biases", "llama wide heads", "llama linear", "llama dynamic", "llama3", "mistral",
    "mistral window", "qwen2", "qwen2 window", "qwen3", "qwen3_moe", "qwen3_moe not normed", "qwen3_moe dense layer",
)  # fmt: skip
MODELS: dict[str, Config] = {
    **{name: EVERY_KIND[name] for name in KINDS},
    "llama yarn": config_of("llama", rope_scaling={**YARN, "original_max_position_embeddings": 32}),
    "qwen3 tied biases": config_of("qwen3", tie_word_embeddings=True, attention_bias=True),
}


def families() -> dict[str, dict[str, Any]]:
    """Return, for each model, how far logits and gradients are from transformers', and logits from the verifier's."""
    found = {name: _against_torch(MODELS[name]) for name in MODELS}
    for name in CONTROLS:
        found[name].update(_of_another_eps(MODELS[name]))
    return found


def _against_torch(config: Config) -> dict[str, Any]:
    net = make_net(config, ce_chunk=10)
    rows = rows_of(net.facts.vocab, rows=3, tokens=13)
    logits, gradients = _torch(config, net, rows)
    loss, found = net.gradients(slot_of(rows), 0.25, NONE)
    again = net.gradients(slot_of(rows), 0.25, frozenset(range(net.facts.layers)))[1]
    plain_loss = net.loss(slot_of(rows))
    return {
        "logits": far(net.logits(slot_of(rows)), logits),
        "gradients": farthest(arrays(found), gradients),
        "decoder": far(net.logits(slot_of(rows)), _decoder(net, rows)),
        "recomputed": same_bits(arrays(found), arrays(again)),
        "losses are equal": bool(plain_loss == loss),
    }


def _of_another_eps(config: Config) -> dict[str, float]:
    wrong = make_net({**config, "rms_norm_eps": 1e-3}, ce_chunk=10)
    rows = rows_of(wrong.facts.vocab, rows=3, tokens=13)
    logits, gradients = _torch(config, wrong, rows)
    return {
        "wrong logits": far(wrong.logits(slot_of(rows)), logits),
        "wrong gradients": farthest(arrays(wrong.gradients(slot_of(rows), 0.25, NONE)[1]), gradients),
    }


def _torch(config: Config, net: Any, rows: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return transformers' logits, and torch's gradient of a quarter of the summed cross entropies."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    words = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    made = AutoConfig.for_model(config["model_type"], **words)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == set(net.names)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(net.get(name)))
    logits = model(input_ids=torch.tensor(rows["ids_RT"]).long()).logits.reshape(-1, net.facts.vocab)
    targets = torch.tensor(rows["targets_RT"]).long().reshape(-1)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    (losses * torch.tensor(rows["weights_RT"]).reshape(-1)).sum().mul(0.25).backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in parameters.items()}
    return logits.detach().numpy(), gradients


def _decoder(net: Any, rows: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits of the network that `verify` uses."""
    from ckptkit.verification.runners.decoder import Decoder

    decoder = Decoder(net.mindspore, net.facts, net.dialect)
    for name in net.names:
        decoder.put(name, net.get(name))
    found = []
    for ids_T in rows["ids_RT"]:
        walk = decoder.walk(ids_T.tolist(), None, None)
        try:
            while True:
                next(walk)
        except StopIteration as stop:
            found.append(stop.value)
    return np.concatenate(found)


LENGTHS = (5, 3, 6)


def packed() -> dict[str, float | bool]:
    """Compare three documents in one row with the same in rows of their own, padded."""
    report: dict[str, float | bool] = {}
    for name in ("llama", "qwen2 window", "qwen3_moe"):
        net = make_net(MODELS[name], ce_chunk=7)
        one, many = _documents(net.facts.vocab, tokens=16)
        wanted_loss, wanted = net.gradients(slot_of(many), 0.1, NONE)
        found_loss, found = net.gradients(slot_of(one), 0.1, NONE)
        report[f"{name} loss"] = abs(float(found_loss) / float(wanted_loss) - 1)
        report[f"{name} gradients"] = farthest(arrays(found), arrays(wanted))
        mixed = {**one, "segments_RT": np.minimum(one["segments_RT"], 1)}
        report[f"{name} mixed"] = farthest(arrays(net.gradients(slot_of(mixed), 0.1, NONE)[1]), arrays(wanted))
        filled = {**one, "ids_RT": np.where(one["segments_RT"] == 0, 7, one["ids_RT"]).astype(np.int32)}
        report[f"{name} padding"] = same_bits(arrays(net.gradients(slot_of(filled), 0.1, NONE)[1]), arrays(found))
    return report


def _documents(vocab: int, tokens: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    random = np.random.default_rng(3)
    names = ("ids_RT", "targets_RT", "positions_RT", "segments_RT")
    one, many = ({name: np.zeros((n, tokens), np.int32) for name in names} for n in (1, len(LENGTHS)))
    for arrays_ in (one, many):
        arrays_["weights_RT"] = np.zeros(arrays_["ids_RT"].shape, np.float32)
    start = 0
    for row, length in enumerate(LENGTHS):
        ids, targets = random.integers(0, vocab, (2, length))
        for place, part, segment in (
            (one, (0, slice(start, start + length)), row + 1),
            (many, (row, slice(0, length)), 1),
        ):
            place["ids_RT"][part], place["targets_RT"][part] = ids, targets
            place["positions_RT"][part], place["segments_RT"][part] = np.arange(length), segment
            place["weights_RT"][part] = 1
        start += length
    return one, many


def dropout() -> dict[str, bool]:
    """Compare gradients under other splits, with and without recompute, and with other counters."""
    net = make_net(MODELS["llama"], dropout=0.25, seed=3)
    rows = rows_of(net.facts.vocab, rows=4, tokens=13)

    def summed(size: int, recompute: frozenset[int] = NONE, first: int = 40) -> dict[str, np.ndarray]:
        gradients = None
        for start in range(0, 4, size):
            part = {name: array[start : start + size] for name, array in rows.items()}
            gradients = net.gradients(slot_of(part, first + start), 0.25, recompute, gradients)[1]
        return arrays(gradients)

    whole, halves = summed(4), summed(2)
    plain = make_net(MODELS["llama"])
    return {
        "split": farthest(halves, whole) < 1e-5,
        "again": same_bits(whole, summed(4)),
        "recomputed": same_bits(whole, summed(4, frozenset({0, 1}))),
        "other rows": farthest(summed(4, first=41), whole) > 0.01,
        "without": farthest(arrays(plain.gradients(slot_of(rows), 0.25, NONE)[1]), whole) > 0.01,
        "none in evaluation": bool(plain.loss(slot_of(rows)) == net.loss(slot_of(rows))),
    }


def bits(threads: str) -> str:
    """Return a digest of the loss and all gradients of a few networks."""
    digest = hashlib.sha256()
    for name in ("llama tied", "qwen3", "qwen3_moe"):
        config = {**MODELS[name], "hidden_size": 128, "intermediate_size": 200}
        net = make_net(config, ce_chunk=100, threads=int(threads))
        loss, gradients = net.gradients(slot_of(rows_of(net.facts.vocab, rows=4, tokens=96)), 0.1, NONE)
        digest.update(loss.tobytes())
        for array in arrays(gradients).values():
            digest.update(array.tobytes())
    return digest.hexdigest()


def placed(processors: str) -> dict[str, Any]:
    """Return where threads may run after an update, on so many processors, and a digest of gradients made then."""
    from ckptkit.train.step import Trainer

    given = sorted(os.sched_getaffinity(0))[: int(processors)]
    os.sched_setaffinity(0, given)
    net = make_net(MODELS["llama tied"], threads=1)
    Trainer(net, Settings()).step(data_of(rows_of(net.facts.vocab, rows=2, tokens=9)), lr=1e-3, micro_batch=2)
    digest = bits("1")
    caller = sorted(os.sched_getaffinity(0))
    seen: dict[str, list[int]] = {}

    def look() -> None:
        seen["inherited"] = sorted(os.sched_getaffinity(0))
        stay_clear()
        seen["clear"] = sorted(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    others = [processor for processor in given if processor not in caller] or given
    strays = []
    for task in tasks:
        name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        wanted = caller if task == os.getpid() or name.startswith("ActorThread") else others
        if sorted(os.sched_getaffinity(task)) != wanted:
            strays.append(name)
    found = {"given": given, "caller": caller, "others": others, "strays": strays, "threads": len(tasks)}
    return {**found, **seen, "digest": digest}


def memory(recompute: str) -> int:
    """Return the bytes by which the process grew beyond those of its first, small step."""
    net = make_net(config_of("llama", num_hidden_layers=12, hidden_size=64, max_position_embeddings=512))
    layers = frozenset(range(12)) if recompute == "all" else NONE
    net.gradients(slot_of(rows_of(net.facts.vocab, rows=1, tokens=8)), 0.1, layers)
    before = peak_bytes()
    for _ in range(2):
        net.gradients(slot_of(rows_of(net.facts.vocab, rows=4, tokens=256)), 0.1, layers)
    return peak_bytes() - before


def refusals() -> dict[str, str]:
    """Return the messages for what cannot be."""
    import mindspore

    from ckptkit.errors import UsageError
    from ckptkit.train.net import TrainNet

    net = make_net(config_of("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=8))
    found = {}
    for name, act in {
        "bf16": lambda: TrainNet(mindspore, net.facts, compute="bf16"),
        "dynamic": lambda: net.loss(slot_of(rows_of(net.facts.vocab, rows=1, tokens=9))),
        "shape": lambda: net.put("model.norm.weight", np.zeros(3, np.float32)),
    }.items():
        try:
            act()
        except (UsageError, ValueError) as error:
            found[name] = str(error)
    return found


def half() -> dict[str, float]:
    """Compare float16's gradients with float32's, and with those of halved weights."""
    report = {}
    for name in ("llama biases", "qwen3", "qwen3_moe"):
        wide, narrow = make_net(MODELS[name]), make_net(MODELS[name], compute="fp16")
        rows = rows_of(wide.facts.vocab, rows=3, tokens=13)
        wanted = arrays(wide.gradients(slot_of(rows), 0.25, NONE)[1])
        report[f"{name} loss"] = abs(float(narrow.loss(slot_of(rows))) / float(wide.loss(slot_of(rows))) - 1)
        report[f"{name} gradients"] = farthest(arrays(narrow.gradients(slot_of(rows), 0.25, NONE)[1]), wanted)
        again = arrays(narrow.gradients(slot_of(rows), 0.25, frozenset({0, 1}))[1])
        report[f"{name} recomputed"] = farthest(again, arrays(narrow.gradients(slot_of(rows), 0.25, NONE)[1]))
    return report


def frozen() -> dict[str, Any]:
    """Return which gradients there are when parameters are frozen, and whether the others keep their bits."""
    net = make_net(MODELS["llama tied"])
    rows = rows_of(net.facts.vocab, rows=2, tokens=13)
    whole = arrays(net.gradients(slot_of(rows), 0.25, NONE)[1])
    report: dict[str, Any] = {}
    kinds = {
        "no embedding": [n for n in net.names if "embed" not in n],
        "last layer": [n for n in net.names if "layers.1." in n],
        "norm": ["model.norm.weight"],
        "one matrix": ["model.layers.1.mlp.up_proj.weight"],
    }
    for kind, names in kinds.items():
        net.train_only(names)
        found = arrays(net.gradients(slot_of(rows), 0.25, NONE)[1])
        report[kind] = same_bits(found, {name: whole[name] for name in names})
    return report


def together() -> dict[str, Any]:
    """Return what all of the checks give that need no process of their own."""
    checks = (families, packed, dropout, refusals, half, frozen)
    return {check.__name__: check() for check in checks}


if __name__ == "__main__":
    main({f.__name__: f for f in (together, bits, placed, memory)})
