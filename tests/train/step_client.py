"""Checks of updates: `Trainer`, overflow, errors, AdamW against torch; see `arithmetic.py`."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from arithmetic import Settings, data_of, farthest, main, make_net, rows_of, same_bits
from runner_jobs import config_of

from ckptkit.errors import CkptkitError

LLAMA = config_of("llama", num_hidden_layers=2)


def _trainer(scaler: Any = None, *, settings: Settings | None = None, spread: float = 0.2, **net: Any) -> Any:
    from ckptkit.train.step import Trainer

    return Trainer(make_net(LLAMA, spread=spread, **net), settings or Settings(), scaler)


def _rows(rows: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows whose tokens count unevenly: the first rows have few."""
    made = rows_of(LLAMA["vocab_size"], rows=rows, tokens=16, seed=seed)
    made["weights_RT"][: rows // 2, 3:] = 0
    return made


def _message(act: Any) -> str:
    try:
        act()
    except CkptkitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def accumulation() -> dict[str, Any]:
    """Compare one update in slots of 8, 4 and 1 rows, and with a mean of the slots' means."""
    states, losses, norms = {}, {}, {}
    for size in (8, 4, 1):
        trainer = _trainer(settings=Settings(clip_norm=None))
        result = trainer.step(data_of(_rows()), lr=1e-3, micro_batch=size)
        states[size], losses[size], norms[size] = trainer.state(), result.loss, result.grad_norm
    moments = {size: {n: a for n, a in state.items() if n.startswith("exp_avg.")} for size, state in states.items()}
    trainer = _trainer()
    halves = [{name: array[part] for name, array in _rows().items()} for part in (slice(0, 4), slice(4, 8))]
    sums = [trainer.evaluate(data_of(half), micro_batch=4) for half in halves]
    total, tokens = trainer.evaluate(data_of(_rows()), micro_batch=2)
    return {
        "losses": [abs(losses[size] / losses[8] - 1) for size in (4, 1)],
        "norms": [abs(norms[size] / norms[8] - 1) for size in (4, 1)],
        "gradients": [farthest(moments[size], moments[8]) for size in (4, 1)],
        "evaluation": abs(total / tokens / losses[8] - 1),
        "mean of means": abs(sum(s / n for s, n in sums) / 2 / losses[8] - 1),
    }


def training(compute: str, scale: str) -> dict[str, Any]:
    """Train for 30 steps; return losses, the last scale, and a digest of all state after it."""
    from ckptkit.train.scaler import make_scaler

    scaler = make_scaler(compute, scale if scale == "dynamic" else float(scale), 65536.0, 4)
    trainer = _trainer(scaler, spread=0.05, compute=compute)
    results = [
        trainer.step(data_of(_rows(seed=step % 2), step), lr=3e-3, micro_batch=4, recompute=frozenset({1}))
        for step in range(30)
    ]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in trainer.state().values())).hexdigest()
    return {
        "losses": [result.loss for result in results],
        "scales": [result.scale for result in results],
        "state": trainer.scaler.state(),
        "digest": digest,
    }


def resumed() -> dict[str, bool]:
    """Compare six steps with three and three in another trainer that was given the state."""
    whole, first, second = _trainer(), _trainer(), _trainer(spread=0.1)
    for step in range(6):
        whole.step(data_of(_rows(seed=step), step), lr=1e-3, micro_batch=4)
    for step in range(3):
        first.step(data_of(_rows(seed=step), step), lr=1e-3, micro_batch=4)
    kept = first.state()
    first.step(data_of(_rows(seed=9), 3), lr=1.0, micro_batch=4)  # what was kept is a copy
    forgetful = _trainer()
    second.load(kept)
    forgetful.load({name: array for name, array in kept.items() if not name.startswith("exp_avg")})
    for step in range(3, 6):
        second.step(data_of(_rows(seed=step), step), lr=1e-3, micro_batch=4)
        forgetful.step(data_of(_rows(seed=step), step), lr=1e-3, micro_batch=4)
    return {
        "same": same_bits(second.state(), whole.state()),
        "without moments": same_bits(forgetful.state(), whole.state()),
    }


def overflow() -> dict[str, Any]:
    """Compare an update that overflowed a few times with the same one at the scale that it ended with."""
    from ckptkit.train.scaler import Scaler

    scaler = Scaler(2.0**24, 1000)
    tried = _trainer(scaler, compute="fp16")
    result = tried.step(data_of(_rows()), lr=1e-3, micro_batch=4)
    plain = _trainer(Scaler(result.scale, 1000), compute="fp16")
    again = plain.step(data_of(_rows()), lr=1e-3, micro_batch=4)
    static = _trainer(Scaler(2.0**24), compute="fp16")
    before = static.state()
    floor = _trainer(Scaler(1.0, 1000), compute="fp16")
    floor.net.put("model.norm.weight", floor.net.get("model.norm.weight") * np.float32(1e7))
    return {
        "overflows": result.overflows,
        "scale": result.scale,
        "scaler": tried.scaler.state(),
        "same": same_bits(tried.state(), plain.state()) and result.loss == again.loss,
        "static": _message(lambda: static.step(data_of(_rows()), lr=1e-3, micro_batch=4)),
        "nothing changed": same_bits(before, static.state()),
        "floor": _message(lambda: floor.step(data_of(_rows()), lr=1e-3, micro_batch=4)),
    }


def not_finite() -> dict[str, str]:
    """Return what is said when a number is none, for numbers planted in several places."""
    found = {}
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"):
        trainer = _trainer()
        values = trainer.net.get(name)
        values.reshape(-1)[0] = np.nan
        trainer.net.put(name, values)
        found[name] = _message(lambda t=trainer: t.step(data_of(_rows(), 6), lr=1e-3, micro_batch=4))
    trainer = _trainer()
    name = "model.layers.1.mlp.down_proj.weight"
    trainer.net.put(name, trainer.net.get(name) * np.float32(1e38))
    found["infinite"] = _message(lambda: trainer.step(data_of(_rows(), 6), lr=1e-3, micro_batch=4))
    trainer = _trainer()
    name = "model.layers.1.self_attn.o_proj.weight"
    trainer.net.put(name, trainer.net.get(name) * np.float32(1e-42))
    trainer.net.put(
        "model.layers.1.mlp.gate_proj.weight", trainer.net.get("model.layers.1.mlp.gate_proj.weight") * np.float32(0)
    )
    trainer.net.put("model.layers.1.mlp.up_proj.weight", np.full((40, 32), 3e37, np.float32))
    found["gradient"] = _message(lambda: trainer.step(data_of(_rows(), 6), lr=1e-3, micro_batch=4))
    found["fine"] = _message(lambda: _trainer().step(data_of(_rows(), 6), lr=1e-3, micro_batch=4))
    return found


def refusals() -> dict[str, str]:
    """Return the messages for what cannot be."""
    trainer, rows = _trainer(), _rows()
    empty = {**rows, "weights_RT": np.zeros_like(rows["weights_RT"])}
    return {
        "no token": _message(lambda: trainer.step(data_of(empty, 4), lr=1e-3, micro_batch=4)),
        "slots": _message(lambda: trainer.step(data_of(rows), lr=1e-3, micro_batch=3)),
        "idle glob": _message(lambda: _trainer(settings=Settings(freeze=("model.layers.0.*", "*.wq")))),
        "all": _message(lambda: _trainer(settings=Settings(freeze=("*",)))),
    }


def frozen() -> dict[str, Any]:
    """Train with a frozen embedding, layer and norm; say what changed and which moments there are."""
    patterns = ("*embed_tokens*", "model.layers.1.*", "model.norm.weight")
    trainer = _trainer(settings=Settings(freeze=patterns))
    before = trainer.state()
    trainer.step(data_of(_rows()), lr=1e-2, micro_batch=4)
    after = trainer.state()
    return {
        "changed": sorted(n for n in trainer.net.names if before[n].tobytes() != after[n].tobytes()),
        "moments": sorted(n for n in after if n.startswith("exp_avg.")),
        "names": list(trainer.net.names),
    }


def empty_slots() -> dict[str, bool]:
    """Compare a batch with rows of no weight at its end, in slots of them alone and not."""
    rows = _rows()
    rows["weights_RT"][4:] = 0
    rows["segments_RT"][4:] = 0
    states = []
    for size in (4, 8):
        trainer = _trainer()
        trainer.step(data_of(rows), lr=1e-3, micro_batch=size)
        states.append(trainer.state())
    return {"close": farthest(states[0], states[1]) < 1e-3}


def adamw(steps: str, fault: str = "") -> dict[str, float]:
    """Return how far 20 updates are from torch.optim.AdamW's, in learning rates, with a fault on purpose or none."""
    import mindspore
    import torch

    from ckptkit.train.optimizer import AdamW

    settings = Settings(beta2=0.95, eps=1e-6)
    net = make_net(config_of("qwen2"), spread=1.0)
    optimizer = AdamW(net, settings)
    theirs = {name: torch.nn.Parameter(torch.tensor(net.get(name))) for name in net.names}
    kinds = [[p for p in theirs.values() if p.ndim > 1], [p for p in theirs.values() if p.ndim == 1]]
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]
    if fault == "decays norms":
        groups[1]["weight_decay"] = 0.1
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    random, norms = np.random.default_rng(0), []
    for step in range(int(steps)):
        rate = 1e-2 * (1 - step / int(steps))
        made = {
            n: (random.standard_normal(net.shapes[n]) * 10.0 ** random.integers(-7, 1)).astype("f4") for n in net.names
        }
        for name, parameter in theirs.items():
            parameter.grad = torch.tensor(made[name])
        norm = float(torch.nn.utils.clip_grad_norm_(list(theirs.values()), 1.0))
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
        gradients = {name: mindspore.Tensor(array) for name, array in made.items()}
        own = float(np.sqrt(optimizer.squares(gradients).sum()))
        norms.append(abs(own / norm - 1))
        factor = 1.0 if fault == "no clipping" else optimizer.clip_factor(own)
        count = 10**6 if fault == "no bias correction" else step + 1
        optimizer.update(gradients, lr=rate, count=count, factor=factor)
    squares = optimizer.state()
    kept = {n: reference.state[p]["exp_avg_sq"].numpy() for n, p in theirs.items()}
    return {
        "weights": max(float(np.abs(net.get(n) - p.detach().numpy()).max()) for n, p in theirs.items()) / 1e-2,
        "squares": farthest({n: squares[f"exp_avg_sq.{n}"] for n in kept}, kept),
        "norms": max(norms),
    }


def together() -> dict[str, Any]:
    """Return what all of the checks give that need no process of their own."""
    found: dict[str, Any] = {
        check.__name__: check()
        for check in (accumulation, resumed, overflow, not_finite, refusals, frozen, empty_slots)
    }
    found["training"] = {
        f"{c} {s}": training(c, s) for c, s in (("fp32", "dynamic"), ("fp16", "dynamic"), ("fp16", "1024"))
    }
    faults = ("", "no bias correction", "decays norms", "no clipping")
    found["adamw"] = {fault: adamw("20", fault) for fault in faults}
    return found


CHECKS = (together, training)

if __name__ == "__main__":
    main({check.__name__: check for check in CHECKS})
