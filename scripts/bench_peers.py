"""What the other tools are asked to do, each in a process of its own.

`python -P bench_peers.py TASK SOURCE TARGET` makes the folder TARGET.

The last line of its output states the CPU seconds of the work alone, without imports. Each task is what the tool's
own documentation shows for the job, with no change of dtype where the tool lets one choose.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Seconds = tuple[float, float]  # of the work, of what the tool imports for it at the first use


def safetensors(source: Path, target: Path) -> float:
    """Load each shard and save it again."""
    from safetensors.torch import load_file, save_file

    started = time.process_time()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), target / file.name, metadata={"format": "pt"})
    return time.process_time() - started


def transformers(source: Path, target: Path) -> Seconds:
    """Load the model in the dtype of its checkpoint and save it again; it imports the model's code when asked to."""
    import torch  # noqa: F401
    import transformers

    started = time.process_time()
    model_class = transformers.AutoModelForCausalLM
    _ = transformers.LlamaForCausalLM
    lazy = time.process_time() - started
    started = time.process_time()
    model_class.from_pretrained(source, dtype="auto").save_pretrained(target)
    return time.process_time() - started, lazy


def mindformers(source: Path, target: Path) -> float:
    """Convert with the function behind `convert_weight.py --model llama`; it widens bfloat16 to float32."""
    from mindformers.models.llama.convert_weight import convert_pt_to_ms

    started = time.process_time()
    convert_pt_to_ms(input_path=str(source), output_path=str(target / "llama.ckpt"))
    print()
    return time.process_time() - started


def mindformers_bf16(source: Path, target: Path) -> float:
    """The same with `--dtype bf16`."""
    import mindspore
    from mindformers.models.llama.convert_weight import convert_pt_to_ms

    started = time.process_time()
    convert_pt_to_ms(input_path=str(source), output_path=str(target / "llama.ckpt"), dtype=mindspore.bfloat16)
    print()
    return time.process_time() - started


def mergekit(source: Path, target: Path) -> float:
    """Pass one model through, with the options of the README but for the tokenizer, which the input lacks."""
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    text = f"merge_method: passthrough\ndtype: bfloat16\nmodels:\n  - model: {source}\n"
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)
    started = time.process_time()
    run_merge(config, str(target), options)
    return time.process_time() - started


def torch_bin(source: Path, target: Path) -> float:
    """Load `pytorch_model.bin` and save it as safetensors."""
    import torch
    from safetensors.torch import save_file

    started = time.process_time()
    for file in sorted(source.glob("*.bin")):
        state = torch.load(file, map_location="cpu", weights_only=True)
        save_file(state, target / file.with_suffix(".safetensors").name, metadata={"format": "pt"})
    return time.process_time() - started


def torch_cast(source: Path, target: Path) -> float:
    """Load each shard, widen it to float32 and save it."""
    import torch
    from safetensors.torch import load_file, save_file

    started = time.process_time()
    for file in sorted(source.glob("*.safetensors")):
        state = {name: tensor.to(torch.float32) for name, tensor in load_file(file).items()}
        save_file(state, target / file.name, metadata={"format": "pt"})
    return time.process_time() - started


def mindspore_ckpt(source: Path, target: Path) -> float:
    """Save a .ckpt with `mindspore.save_checkpoint`; reading the source is not counted."""
    import mindspore

    loaded: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        loaded |= mindspore.load_checkpoint(str(file), format="safetensors")
    rows = [{"name": name, "data": value} for name, value in loaded.items()]
    started = time.process_time()
    mindspore.save_checkpoint(rows, str(target / "model.ckpt"))
    return time.process_time() - started


def mindspore_transform(source: Path, target: Path) -> float:
    """Give .ckpt shards another layout with `mindspore.transform_checkpoints`, by the strategy files of both layouts.

    That of the target lies beside the source, as `strategy_beside` says.
    """
    import mindspore

    own = source / "strategy" / "ckpt_strategy_rank_0.ckpt"
    started = time.process_time()
    mindspore.transform_checkpoints(str(source), str(target), "checkpoint_", str(own), str(strategy_beside(source)))
    return time.process_time() - started


def strategy_beside(source: Path) -> Path:
    """Return the strategy file of the layout that the shards in `source` are to get."""
    return source.with_name(source.name + ".target-strategy.ckpt")


def make_bin(source: Path, target: Path) -> float:
    """Not a peer: make the input of `torch_bin`, one file, and copy config.json."""
    import torch
    from safetensors.torch import load_file

    started = time.process_time()
    state = {name: t for file in sorted(source.glob("*.safetensors")) for name, t in load_file(file).items()}
    torch.save(state, target / "pytorch_model.bin")
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return time.process_time() - started


TASKS: dict[str, Callable[[Path, Path], float | Seconds]] = {
    task.__name__: task
    for task in (
        safetensors,
        transformers,
        mindformers,
        mindformers_bf16,
        mergekit,
        torch_bin,
        torch_cast,
        mindspore_ckpt,
        mindspore_transform,
        make_bin,
    )
}


def main() -> None:
    task, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    target.mkdir(parents=True, exist_ok=True)
    seconds = TASKS[task](source, target)
    inner, lazy = seconds if isinstance(seconds, tuple) else (seconds, 0.0)
    print(json.dumps({"inner_cpu_s": round(inner, 4), "lazy_cpu_s": round(lazy, 4)}), flush=True)


if __name__ == "__main__":
    main()
