"""The contract: `--stream` verifies a model whose fp32 weights are more than all the memory that the system allows.

The same run without `--stream` must die of that limit, and without a limit must give the same figures.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from limited import framework_bytes, is_enforced, start_verify
from runner_jobs import config_of, shapes_of

from ckptkit import convert
from tests.rank_results import write_whole

pytestmark = pytest.mark.frameworks
ROOM = 200 << 20  # beyond the frameworks: three layers in fp32, of which a runner has one and copies of its tensors
TIMEOUT = 400
ASKED = ("--level", "layers", "--runner", "builtin", "--max-tokens", "8")


@dataclass(frozen=True, slots=True)
class Room:
    """A folder with a model, `hf`, and its conversion, `ms`; the bytes that its weights take in fp32, and the limit."""

    folder: Path
    weight_bytes: int
    limit: int


def wide_config(layers: int) -> dict[str, Any]:
    return config_of(
        "llama", hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_hidden_layers=layers,
        torch_dtype="bfloat16",
    )  # fmt: skip


def num_elements(layers: int) -> int:
    return sum(prod(shape) for shape in shapes_of(wide_config(layers)).values())


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    if not is_enforced():
        pytest.skip("this system does not enforce a limit of memory (RLIMIT_DATA)")
    limit = framework_bytes() + ROOM
    layers = limit // (4 * (num_elements(2) - num_elements(1))) + 2
    config, folder = wide_config(layers), tmp_path_factory.mktemp("large")
    drawn = np.random.default_rng(0)

    def bf16(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return values of either sign between 2^-7 and 2^-5: all bits but sign, last exponent and mantissa are set."""
        bits = np.frombuffer(drawn.bytes(2 * prod(shape)), np.uint16)
        return (bits & 0x80FF | 0x3C00).astype(np.uint16).reshape(shape)

    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    tensors = {name: bf16(shape) for name, shape in shapes_of(config).items()}
    write_whole(folder / "hf" / "model.safetensors", tensors)
    del tensors
    convert(folder / "hf", folder / "ms", to_dialect="mindformers")
    yield Room(folder, 4 * num_elements(layers), limit)
    shutil.rmtree(folder)  # gigabytes


def figures(done: str) -> dict[str, Any]:
    """Return a report's data without what no two runs have alike: time and memory."""
    data: dict[str, Any] = json.loads(done)
    for side in "ab":
        result = data["forward"][side]
        for key in ("load_seconds", "peak_bytes"):
            del result[key]
        for row in result["inputs"]:
            del row["seconds"]
    return data


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, error


def test_a_model_larger_than_memory_is_verified_and_the_figures_are_those_of_a_large_machine(room: Room) -> None:
    """Both runs compute on one core for the most part, so they run at the same time."""
    assert room.weight_bytes > room.limit
    streamed = start_verify(room.folder, "hf", "ms", *ASKED, "--stream", "--json", limit=room.limit)
    whole = start_verify(room.folder, "hf", "ms", *ASKED, "--json", limit=None)
    try:
        found = [ended(process) for process in (streamed, whole)]
    finally:
        streamed.kill()
        whole.kill()
    assert [code for code, _, _ in found] == [0, 0], [error for _, _, error in found]
    few, all_of_it = (figures(out) for _, out, _ in found)
    assert few == all_of_it
    assert len(few["layers"]["rows"]) > 3 * 20 and few["layers"]["first"] is None


def test_without_stream_either_side_dies_of_the_limit(room: Room) -> None:
    """The control: the limit is less than either framework needs for the whole network."""
    sides = [
        start_verify(room.folder, name, *ASKED, "--dump", f"{name}.dump", limit=room.limit) for name in ("hf", "ms")
    ]
    for name, runner, process in zip(("hf", "ms"), ("torch", "builtin"), sides, strict=True):
        code, out, error = ended(process)
        assert (code, out) == (4, ""), error
        assert error.startswith((f"error: the {runner} runner ended with", f"error: the {runner} runner was killed"))
        assert not (room.folder / f"{name}.dump").exists()
