"""Reports of `verify --sanity` for the tests of their page: made up, of the form that the real one has."""

from __future__ import annotations

import random
from math import log
from typing import Any

from page_data import UNTRUSTED

Data = dict[str, Any]
COMMAND = "ckptkit verify hub/model ms/model --sanity text.jsonl --html report.html"
ZERO, ONES, GONE = "layers.5.mlp.w2", "layers.9.norm", "layers.7.mlp.w4"
PARTS = ("attention.wq", "attention.wk", "mlp.w1", "mlp.w2", "mlp.w4", "norm")


def parameter(drawn: random.Random, name: str, **changed: Any) -> Data:
    figures = {
        "mean": drawn.gauss(0, 1e-4),
        "std": drawn.uniform(0.01, 0.2),
        "low": -1.0625,
        "high": drawn.uniform(1, 3),
    }
    counts = {"nan": 0, "inf": 0, "zeros": drawn.randrange(300)}
    return {"name": name, "shape": [576, 192], "dtype": "BF16", "elements": 110592, **figures, **counts,
            "digest": f"{drawn.getrandbits(128):032x}", **changed}  # fmt: skip


def line(severity: str, kind: str, text: str, *names: str) -> Data:
    return {"names": list(names), "severity": severity, "kind": kind, "text": text}


def side(label: str, layers: int, loss: float, strange: list[Data]) -> Data:
    drawn = random.Random(label)
    lines = [{"name": f"line {n}", "tokens": 20 + n, "loss": drawn.uniform(3, 4)} for n in (1, 2, 4)]
    rows = [parameter(drawn, f"layers.{layer}.{part}") for layer in range(layers) for part in PARTS]
    return {
        "path": f"hub/{label}", "format": "safetensors", "dialect": "hf", "variant": None, "ranks": None,
        "tensors": len(rows), "runner": "torch", "device": "cpu", "why": "HuggingFace's naming",
        "versions": {"torch": "2.13.0"}, "loss": loss, "tokens": 67, "lines": lines, "strange": strange,
        "parameters": [parameter(drawn, "embedding", dtype="F32"), *rows],
    }  # fmt: skip


def report(*labels: str, layers: int = 12, **changed: Any) -> Data:
    """Return the report of one side, or two, of a sane model."""
    sides = {label: side(label, layers, 3.4979 + 1e-7 * len(label), []) for label in labels}
    return {
        "level": "sanity", "text": "text.jsonl", "tokenizer": "hub/a/tokenizer.json", "vocab": 49152,
        "ln_vocab": log(49152), "margin": 1.0, "gap": 5.321e-07 if len(labels) == 2 else None,
        "bound": 1.9e-3 if len(labels) == 2 else None, "failed": [], "notes": ["a note about `text.jsonl`"],
        **sides, **changed,
    }  # fmt: skip


def odd_report(layers: int = 12) -> Data:
    """Return one of which side b has a zeroed matrix, a layer twice, a fresh norm, and a parameter that is missing."""
    data = report("a", "b", layers=layers, failed=["the losses of A and B are 1.00e-01 nats apart"], gap=0.1)
    rows = {row["name"]: row for row in data["b"]["parameters"]}
    rows[ZERO] |= {"mean": 0.0, "std": 0.0, "low": 0.0, "high": 0.0, "zeros": rows[ZERO]["elements"]}
    rows[ONES] |= {"mean": 1.0, "std": 0.0, "low": 1.0, "high": 1.0}
    rows["embedding"] |= {"mean": None, "std": None, "low": None, "high": None, "nan": 110592}
    data["b"]["parameters"] = [row for row in data["b"]["parameters"] if row["name"] != GONE]
    data["b"]["strange"] = [
        line("wrong", "missing", "missing: it is NaN before loading and after", GONE),
        line("wrong", "zero", "every element is zero, a matrix", ZERO),
        line("wrong", "nan", "110592 NaN and 0 inf of 110592 elements", "embedding"),
        *(line("wrong", "duplicate", "equal in every byte", f"layers.2.{p}", f"layers.3.{p}") for p in PARTS),
        line("suspect", "fresh", "looks freshly initialised: every element is exactly 1", ONES),
        line("note", "zero", "every element is zero, a bias", "layers.0.norm"),
    ]
    return data


def unloaded_report() -> Data:
    """Return one of a side that could not be loaded, so that nothing was run."""
    data = report("a")
    missing = line("wrong", "missing", "missing: it is NaN before loading and after", GONE)
    data["a"] |= {"loss": None, "tokens": 0, "lines": [], "strange": [missing]}
    return data


def untrusted_report() -> Data:
    """Return a report in which every text that comes from a checkpoint or a file's name is one of UNTRUSTED."""
    data = report("a", "b", text=UNTRUSTED[0], tokenizer=UNTRUSTED[1], notes=list(UNTRUSTED), failed=list(UNTRUSTED))
    drawn = random.Random(0)
    for label in "ab":
        data[label] |= {
            "path": UNTRUSTED[0], "dialect": UNTRUSTED[1], "variant": UNTRUSTED[0], "why": UNTRUSTED[1],
            "versions": {UNTRUSTED[0]: UNTRUSTED[1]},
            "parameters": [parameter(drawn, name, dtype="F32") for name in UNTRUSTED],
            "strange": [line("wrong", "zero", name, *UNTRUSTED) for name in UNTRUSTED[:3]]
            + [line("suspect", "duplicate", UNTRUSTED[0], *UNTRUSTED)],
        }  # fmt: skip
    return data
