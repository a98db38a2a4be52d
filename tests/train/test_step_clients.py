"""The contract with others: transformers loads a step as it is, and `verify` proves it against a conversion."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptkit.commands.convert import convert
from tests.train.tiny_steps import EMBEDDING, make_model, write

ROOT = Path(__file__).parent.parent.parent
LOAD = """
import json, sys
import numpy as np
from transformers import AutoModelForCausalLM
from tests.train.tiny_steps import EMBEDDING, make_tensors
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tied = sys.argv[2] == "tied"
weights, _ = make_tensors(8, frozen=(EMBEDDING,), tied=tied)
found = {name: array.numpy() for name, array in model.state_dict().items() if name in weights}
print(json.dumps({
    "odd": [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]],
    "dtype": str(model.dtype),
    "equal": sorted(name for name in weights if np.array_equal(found[name], weights[name])) == sorted(weights),
    "tied": model.lm_head.weight is model.model.embed_tokens.weight,
}))
"""


@pytest.mark.frameworks
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_a_step_as_it_is(tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path / "model", tied=tied)
    (model / "tokenizer.json").unlink()
    folder = write(tmp_path / "run", model, 8, shape={"tied": tied}, frozen=(EMBEDDING,)).folder
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), "tied" if tied else "apart"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"odd": [], "dtype": "torch.float32", "equal": True, "tied": tied}


@pytest.mark.frameworks
def test_verify_takes_a_step_and_its_conversion(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", make_model(tmp_path / "model"), 8).folder
    convert(folder, tmp_path / "there", to_dialect="mindformers")
    command = [sys.executable, "-m", "ckptkit", "verify", str(folder), str(tmp_path / "there"), "--no-progress"]
    done = subprocess.run(
        [*command, "--level", "weights", "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    other = write(tmp_path / "run", tmp_path / "model", 9).folder
    command[4] = str(other)
    done = subprocess.run([*command, "--level", "weights"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr  # the control
