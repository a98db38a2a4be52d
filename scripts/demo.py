"""Take SmolLM2-135M to MindSpore, cut it for several devices, and bring it back; let both frameworks continue a text.

    scripts/demo [--format ckpt|safetensors]

1. get the model as a Hugging Face folder (made once, see smollm2.py)
2. `ckptkit convert` it to MindSpore
3. run the one in transformers, the other in MindFormers' own network, and compare their logits
4. `ckptkit reshard` it for six devices, and that for three others; compare with what one step makes
5. `ckptkit convert` the shards back, and compare every tensor and file
6. `ckptkit verify` that the six shards hold, and compute layer by layer, what the model does; verify.html is its page

Everything stays in `.cache/demo` to be looked at. Exits with 1 when a comparison fails.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import shlex
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import smollm2
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))

from clients.run import Result, relative_difference, run_jobs  # noqa: E402

NUM_NEW = 8
# Two fp32 computations in different orders; see tests/test_real_clients.py for where it comes from.
BOUND = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert a real model to MindSpore and back.")
    parser.add_argument("--format", choices=("safetensors", "ckpt"), default="safetensors")
    options = parser.parse_args()
    began = time.monotonic()
    step("1. the model: SmolLM2-135M-Instruct, bfloat16")
    try:
        source = smollm2.ensure(smollm2.default_cache())
    except smollm2.NotAvailableError as error:
        print(error)
        return 1
    print(f"  {shown(source)}")
    room = source.parent / "demo"
    mindspore, back = room / "mindspore", room / "back"

    step("2. to MindSpore")
    ckptkit("convert", source, mindspore, "--to", "mindformers", "--format", options.format)

    step(f"3. what comes after {smollm2.PROMPT!r}?")
    same = compare_frameworks(source, mindspore)

    step("4. for six devices, and then for three others")
    six, three, at_once = room / "six", room / "three", room / "three-at-once"
    ckptkit("reshard", mindspore, six, "--mp", "3", "--pp", "2")
    ckptkit("reshard", six, three, "--pp", "3", "--pp-layers", "9,10,11")
    ckptkit("reshard", mindspore, at_once, "--pp", "3", "--pp-layers", "9,10,11")
    same &= compare_ranks(three, at_once)

    step("5. from three devices back to Hugging Face")
    ckptkit("convert", three, back, "--to", "hf")
    same &= compare_files(source, back)

    step("6. is it the same model, number by number and in what it computes?")
    same &= verified(source, six, room / "verify.html")

    print(f"\n{'All is equal.' if same else 'SOMETHING DIFFERS.'} {time.monotonic() - began:.0f} s")
    return 0 if same else 1


def step(title: str) -> None:
    print(f"\n{title}", flush=True)


def shown(path: Path) -> str:
    """Return a path as it is seen from the checkout."""
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)


def ckptkit(command: str, source: Path, target: Path, *options: str) -> None:
    """Run a command of ckptkit that writes, and show it and its report."""
    code = run(command, shown(source), shown(target), *options, "--overwrite")
    if code:
        raise SystemExit(code)


def verified(source: Path, other: Path, page: Path) -> bool:
    """Verify one against the other, layer by layer; show the report, write it to a page, return the verdict."""
    return run("verify", shown(source), shown(other), "--level", "layers", "--html", shown(page)) == 0


def run(*words: str) -> int:
    print(f"  $ ckptkit {shlex.join(words)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "ckptkit", *words, "--no-progress"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    print("".join(f"  {line}\n" for line in done.stdout.splitlines()), end="")
    return done.returncode


def compare_frameworks(hf_folder: Path, mindspore_folder: Path) -> bool:
    """Run both, print what they say and how far their logits are apart; return whether they agree."""
    job = {"name": "demo", "ids": [smollm2.PROMPT_IDS], "generate": NUM_NEW}
    tokenizer = Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    hf = run_jobs("hf_logits", [{**job, "folder": hf_folder}], timeout=300)["demo"]
    print(f"  transformers: {text_of(tokenizer, hf)}", flush=True)
    ms_job = {**job, "checkpoint": mindspore_folder, "config": mindspore_folder}
    ms = run_jobs("mindformers_logits", [ms_job], timeout=600)["demo"]
    print(f"  MindFormers:  {text_of(tokenizer, ms)}")
    left_over = ms.report["not_loaded"] + ms.report["unused"]
    print(f"  {ms.report['parameters']} parameters in its network, left over on either side: {left_over or 'none'}")
    difference = relative_difference(ms.logits, hf.logits)
    largest = np.abs(hf.logits).max()
    print(f"  largest difference of {hf.logits.size} logits: {difference * largest:.1e} (largest logit {largest:.1f})")
    return difference < BOUND and not left_over and np.array_equal(hf.generated, ms.generated)


def text_of(tokenizer: Tokenizer, result: Result) -> str:
    assert result.generated is not None
    return repr(tokenizer.decode(result.generated[0].tolist()))


def compare_ranks(folder: Path, other: Path) -> bool:
    """Compare all files of all ranks, and the strategy files, byte for byte; print the verdict."""
    names, others = (
        {str(file.relative_to(where)) for place in ("rank_*", "strategy") for file in where.glob(f"{place}/*")}
        for where in (folder, other)
    )
    _, differing, absent = filecmp.cmpfiles(folder, other, sorted(names | others), shallow=False)
    if differing or absent or not names:
        print(f"  files that differ from those made in one step: {differing}; absent: {absent}")
        return False
    print(f"  all {len(names)} files of the ranks are what one step makes, byte for byte")
    return True


def compare_files(source: Path, back: Path) -> bool:
    """Compare the tensors of both folders bit for bit, and their other files byte for byte; print the verdict."""
    weights = {folder: tensors_of(folder) for folder in (source, back)}
    odd_tensors = {name for name, _ in weights[source].items() ^ weights[back].items()}
    names = sorted(file.name for file in source.iterdir() if file.suffix != ".safetensors")
    _, differing, absent = filecmp.cmpfiles(source, back, names, shallow=False)
    if odd_tensors or differing or absent:
        print(f"  tensors that differ: {sorted(odd_tensors)[:5]}; files: {differing}; absent: {absent}")
        return False
    print(
        f"  all {len(weights[source])} tensors are what they were, bit for bit, and so are the other {len(names)} files"
    )
    return True


def tensors_of(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Return the dtype, the shape and the SHA-256 of the bytes of each tensor of a folder's safetensors files."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            for name, entry in json.loads(stream.read(length)).items():
                if name == "__metadata__":
                    continue
                start, stop = entry["data_offsets"]
                stream.seek(8 + length + start)
                digest = hashlib.sha256(stream.read(stop - start)).hexdigest()
                tensors[name] = (entry["dtype"], str(entry["shape"]), digest)
    return tensors


if __name__ == "__main__":
    sys.exit(main())
