"""Reports of verify for the tests of its page: level weights is real, the forward pass and the layers are made up."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner_jobs import config_of, make_folder

from ckptkit import convert
from ckptkit.commands.verify import verify
from ckptkit.verification.logits import Distance
from ckptkit.verification.runners.job import Result

Data = dict[str, Any]
COMMAND = "ckptkit verify hub/model ms/model --html report.html"
READING = {"layers": 2, "norm_eps": 1e-05, "window": [None, None], "rope": {"type": "default"}, "tied": False}
UNTRUSTED = [
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "<!--<script>",
    "' onmouseover='window.hacked=1",
    "{{ 7 * 7 }}{% for %}",
    "&lt;b&gt;<b>bold</b><a href='javascript:window.hacked=1'>a</a>",
    "%{customdata}<extra></extra>",
    "two\nlines\u2028three",
    "right\u202eto left",
    "half \ud800 character",
    "\u6743\u91cd",
    "layers.99999999999999999999999.w",
    "__proto__",
]


def weights_report(folder: Path) -> Data:
    """Return what level weights finds between a tiny model and its conversion."""
    hf = make_folder(folder / "hf", config_of("llama"))
    convert(hf, folder / "ms", to_dialect="mindformers")
    found: Data = json.loads(json.dumps(verify(hf, folder / "ms", level="weights").data))
    return found


def result(label: str, **changed: Any) -> Data:
    runner, versions = ("torch", {"torch": "2.13.0"}) if label == "a" else ("builtin", {"mindspore": "2.9.0"})
    made = Result(runner, "cpu", {**versions, "python": "3.11.7"}, {"dtype": "float32"}, READING, parameters=15)
    own = {key: value for key, value in asdict(made).items() if key != "computed"}  # a key of the report, not of a side
    return {**own, "load_seconds": 0.0122334455667788, "peak_bytes": 394_500_123, **changed}


def input_row(name: str, max_abs: float = 7.152557373046875e-07, **changed: Any) -> Data:
    found = Distance(64, max_abs, 3.2584643363952637, 13, 0.9999999999998, 3.4217e-13, 64, 64, 0)
    row = {"name": name, "tokens": 64, "skipped": "", "wrong": "", "bound": 1.4981e-05, "sensitivity": 9.363e-07}
    return {**row, **asdict(found), "relative": found.relative, **changed}


def forward_data(**changed: Any) -> Data:
    runners = [{"runner": "torch", "why": "its naming", "device": "cpu"}]
    runners += [{"runner": "builtin", "why": "as told", "device": "cpu"}]
    skipped = {"name": "far", "tokens": 9, "skipped": "no positions", "wrong": "", "bound": 0.0, "sensitivity": None}
    inputs = [input_row("ids-7", 1.19e-06), input_row("ids-64"), skipped]
    return {"runners": runners, "a": result("a"), "b": result("b"), "readings": {}, "inputs": inputs, **changed}


def layers_data(count: int, first_wrong: int | None = None) -> Data:
    """Return level layers of `count` layers, of which the attention of `first_wrong` and all after it are wrong."""
    drawn = random.Random(count)
    names = [("embedding", None, "embedding")]
    for layer in range(count):
        names += [(f"layers.{layer}{tail}", layer, tail[1:] or "block") for tail in (".attention", ".mlp", "")]
    names += [("norm", None, "norm"), ("logits", None, "logits")]
    first = len(names) if first_wrong is None else 1 + 3 * first_wrong
    rows = []
    for number, (name, layer, part) in enumerate(names):
        bound = 4e-6 * (1 + number / 10) ** 0.5
        relative = drawn.uniform(2e-3, 5e-3) if number >= first else bound * drawn.uniform(0.02, 0.15)
        largest = drawn.uniform(3, 30)
        rows.append({"name": name, "layer": layer, "part": part, "relative": relative, "bound": bound,
                     "max_abs": relative * largest, "largest": largest, "wrong": number >= first})  # fmt: skip
    rows[0] |= {"relative": 0.0, "max_abs": 0.0}
    cause = None if first_wrong is None else {
        "name": "rotary permutation", "text": "the rows of `wq` and `wk` are in pairs, not in halves",
        "tensors": [f"model.layers.{first_wrong}.attention.{w}.weight" for w in ("wq", "wk")],
        "before": 0.0031234567891234, "after": 2.1098765e-07, "hint": "convert again with `--variant qkv_concat`",
    }  # fmt: skip
    return {"input": "ids-64", "rows": rows, "first": names[first][0] if cause else None, "cause": cause}


def parameter(name: str, status: str = "loaded", **changed: Any) -> Data:
    data: Data = {"name": name, "status": status, "text": ""}
    if status in ("loaded", "dtype", "value"):
        figures = {"changed": 0, "max_abs": None, "max_relative": None}
        if status != "loaded":
            figures = {"changed": 8_388_608, "max_abs": 0.1234567890123456, "max_relative": 0.0103456789}
        data |= {"shape": [14336, 4096], "dtypes": ["F32", "BF16" if status == "dtype" else "F32"], **figures}
    return data | changed


def big_report(layers: int = 80, each: int = 63) -> Data:
    """Return a report of all levels; from the layer in the middle on, the model is wrong."""
    middle = layers // 2
    side = {"path": "hub/big", "format": "safetensors", "dialect": "hf", "variant": None, "ranks": None, "tensors": 9}
    rows = [parameter("model.tok_embeddings.embedding_weight", "dtype")]
    for layer in range(layers):
        rows += [parameter(f"model.layers.{layer}.feed_forward.experts.{n}.w1.weight") for n in range(each)]
    rows[1 + middle * each + 2] = parameter(f"model.layers.{middle}.attention.wq.weight", "value")
    rows[1 + middle * each + 5] = parameter(f"model.layers.{middle}.attention.wk.weight", "value")
    rows[-3] = parameter(f"model.layers.{layers - 1}.ffn_norm.weight", "missing", text="config.json expects it")
    wrong = "relative distance 3.1e-03, bound 1.5e-05"
    return {
        "level": "layers", "failed": ["weights", "forward", "layers"], "notes": ["a note about `text.jsonl`"],
        "a": side, "b": {**side, "path": "ms/big", "dialect": "mindformers-legacy", "variant": "qkv_concat"},
        "files": [{"tensors": 9, "num_bytes": 81024, "compared": 9, "wrong": [], "added": []}] * 2,
        "unlike_config": [], "parameters": rows, "benign": [], "shards": [],
        "forward": forward_data(inputs=[input_row("ids-7"), input_row("ids-64", 0.01, wrong=wrong)]),
        "layers": layers_data(layers, middle),
    }  # fmt: skip


def untrusted_report() -> Data:
    """Return a report in which every text that comes from a checkpoint is one of UNTRUSTED."""
    data = big_report(6, 8)
    layers = data["layers"]
    for at, name in enumerate(UNTRUSTED):
        layers["rows"][at] |= {"name": name}
    layers |= {"input": UNTRUSTED[0], "first": UNTRUSTED[0]}
    layers["cause"] |= {"text": UNTRUSTED[1], "tensors": UNTRUSTED, "hint": UNTRUSTED[0], "name": UNTRUSTED[1]}
    data["a"]["path"] = data["b"]["path"] = UNTRUSTED[0]
    data["parameters"] = [parameter(name, "value", text=name) for name in UNTRUSTED]
    data["benign"], data["shards"] = [[name, UNTRUSTED[1]] for name in UNTRUSTED], list(UNTRUSTED)
    data["notes"] = data["unlike_config"] = list(UNTRUSTED)
    for side in (data["forward"]["a"], data["forward"]["b"]):
        side |= {"missing": UNTRUSTED, "notes": UNTRUSTED, "versions": {UNTRUSTED[0]: UNTRUSTED[1]}}
    data["forward"]["readings"] = {UNTRUSTED[0]: [UNTRUSTED[1], UNTRUSTED[0]]}
    data["forward"]["inputs"] = [input_row(name, wrong=name) for name in UNTRUSTED]
    return data
