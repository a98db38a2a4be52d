"""What a network of llama, mistral, qwen2, qwen3 or qwen3_moe needs to know, read from config.json.

A missing key means what it means to transformers (its configuration classes, release 4.57), and is noted where
nothing makes the default likely. What cannot be expressed is refused: a network that left it out would prove nothing.
What does not live here: rotary positions (`rope_facts.py`), lists of keys (`config_keys.py`), frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.verification.runners.config_keys import ALIASES, HARMLESS, MATHS
from ckptkit.verification.runners.rope_facts import Rope, count, positive, read_rope

# transformers' defaults that differ by family; `head_dim` None is hidden / heads.
_SIZES = {
    "llama": (32000, 4096, 11008, 32, 32, None, 2048, None),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 131072, None),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, 32768, None),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 32768, 128),
    "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, 32768, None),
}
_SIZE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "head_dim",
)  # fmt: skip
_NORM_EPS = 1e-6
_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28
_GATED = ("qwen2", "qwen3")  # families whose layers say for themselves whether they have a window
# Read by some of the families only; in another they do nothing, and are named when they ask for something.
_OF_SOME = (
    "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types",
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    "mlp_only_layers", "norm_topk_prob",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A decoder in numbers. `window` has for each layer the tokens that a token sees, itself included; None for all
    before it. `sparse_layers` are those with experts. `notes` say what was assumed or passed over, and `unknown`
    are keys of config.json of which nothing is known."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope: Rope
    tied: bool
    window: tuple[int | None, ...]
    activation: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: int
    experts_per_token: int
    moe_ffn: int
    norm_topk: bool
    sparse_layers: tuple[bool, ...]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]

    def reading(self) -> dict[str, Any]:
        """Return what the network takes the config for, under the names that all runners share."""
        names = (
            "model_type", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "norm_eps", "tied",
            "activation", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "experts", "experts_per_token", "moe_ffn",
            "norm_topk",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "rope_base": self.rope.base,
            "rope": self.rope.reading(),
            "window": list(self.window),
            "sparse_layers": list(self.sparse_layers),
        }


def read_facts(config: Mapping[str, Any]) -> Facts:
    """Return the facts of a config.json in either spelling, transformers 4's or 5's.

    UsageError, which names the key, for a value that makes no sense or that the network cannot express.
    """
    reader = _Reader(config)
    family, read = reader.family, reader.read
    sizes = reader.sizes()
    rope = read_rope(config, sizes["max_position_embeddings"])
    read |= rope.read
    reader.notes += rope.notes
    layers, heads, kv_heads = (sizes[f"num_{k}"] for k in ("hidden_layers", "attention_heads", "key_value_heads"))
    _check_heads(heads, kv_heads, sizes["head_dim"])
    activation = reader.get("hidden_act", "silu", note=True)
    if activation != "silu":
        raise UsageError(f"`hidden_act` of config.json is {activation!r}, which this network does not express")
    eps = positive("rms_norm_eps", reader.get("rms_norm_eps", _NORM_EPS, note=True))
    attention_bias = reader.flag("attention_bias") if family in ("llama", "qwen3", "qwen3_moe") else False
    window = _window(reader, layers)
    experts = _experts(reader, layers)
    tied, mlp_bias = reader.flag("tie_word_embeddings"), family == "llama" and reader.flag("mlp_bias")
    return Facts(
        model_type=family,
        layers=layers,
        hidden=sizes["hidden_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=sizes["head_dim"],
        ffn=sizes["intermediate_size"],
        vocab=sizes["vocab_size"],
        norm_eps=eps,
        rope=rope.rope,
        tied=tied,
        window=window,
        activation=activation,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        **experts,
        unknown=(*reader.unread(), *rope.unknown),
        notes=tuple(reader.notes),  # last: `unread` adds to them
    )


class _Reader:
    """A config, which keys of it were read, and what there is to say about them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.notes: list[str] = []
        self.read: set[str] = {"model_type"}
        self.family = str(config.get("model_type"))
        if self.family not in _SIZES:
            raise UsageError(
                f"`model_type` of config.json is {config.get('model_type')!r}, and this network is none of that family",
                hint=f"it knows {', '.join(_SIZES)}",
            )

    def get(self, key: str, default: Any, *, note: bool = False) -> Any:
        """Return the value of a key, or transformers' default; with `note`, say so."""
        self.read.add(key)
        if key in self.config:
            return self.config[key]
        if found := [alias for alias in ALIASES.get(key, ()) if alias in self.config]:
            raise UsageError(
                f"config.json has no `{key}`, and `{found[0]}`, which {self.family} does not read",
                why=f"transformers would take its default for `{key}`, {default}",
                hint=f"if `{found[0]}` is meant, call it `{key}`",
            )
        if note:
            self.notes.append(f"`{key}` is missing: {default}, transformers' default for {self.family}")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"`{key}` of config.json is {value!r}, neither true nor false")
        return value

    def count(self, key: str, default: int, *, note: bool = True) -> int:
        return count(key, self.get(key, default, note=note))

    def sizes(self) -> dict[str, int]:
        """Return the sizes under their keys in config.json."""
        defaults = dict(zip(_SIZE_KEYS, _SIZES[self.family], strict=True))
        head_dim, kv_heads = defaults.pop("head_dim"), defaults.pop("num_key_value_heads")
        sizes = {key: self.count(key, default or 0) for key, default in defaults.items()}
        heads = sizes["num_attention_heads"]
        # null is as many as heads in every family; only llama's default is null
        said = self.get("num_key_value_heads", kv_heads, note=kv_heads is not None)
        sizes["num_key_value_heads"] = heads if said is None else count("num_key_value_heads", said)
        own = self.get("head_dim", head_dim, note=head_dim is not None)
        if own is None and self.config.get("head_dim", 0) is None and self.family not in ("llama", "mistral"):
            raise UsageError("`head_dim` of config.json is null", why=f"transformers' {self.family} cannot run so")
        sizes["head_dim"] = sizes["hidden_size"] // heads if own is None else count("head_dim", own)
        return sizes

    def unread(self) -> list[str]:
        """Return the keys of which nothing is known; refuse those that are known to change the arithmetic."""
        rest = [key for key in self.config if key not in self.read and key not in HARMLESS]
        refused = [key for key in rest if key in MATHS and self.config[key] not in (None, False, MATHS[key])]
        if refused:
            raise UsageError(
                f"config.json asks for arithmetic that this network does not have: {len(refused)} keys",
                items=[f"{key}  {self.config[key]!r}" for key in refused],
                hint="if the model is trained so, no network of this family gives its logits",
            )
        idle = [key for key in rest if key in _OF_SOME]
        self.notes += [
            f"`{key}` is {self.config[key]!r}: transformers' {self.family} does not read it"
            for key in idle
            if self.config[key] not in (None, False, [])
        ]
        return [key for key in rest if key not in MATHS and key not in idle]


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise UsageError(f"`num_attention_heads`, {heads}, is no multiple of `num_key_value_heads`, {kv_heads}")
    if head_dim % 2:
        raise UsageError(f"`head_dim` is {head_dim}: rotary positions need an even one")


def _window(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window. Mistral's is on unless it is null; the others have `use_sliding_window` for it."""
    none = (None,) * layers
    if reader.family == "llama":
        return none
    if reader.family == "mistral":
        size = reader.get("sliding_window", _WINDOW, note=True)
        return none if size is None else (count("sliding_window", size),) * layers
    if not reader.flag("use_sliding_window"):
        reader.read |= {"sliding_window", "max_window_layers"}
        size = None
    else:
        size = reader.get("sliding_window", _WINDOW, note=True)
    size = None if size is None else count("sliding_window", size)
    if reader.family not in _GATED:
        return (size,) * layers
    first = reader.get("max_window_layers", _MAX_WINDOW_LAYERS, note=size is not None)
    types = reader.get("layer_types", None)
    if types is None:
        types = ["sliding_attention" if size is not None and i >= first else "full_attention" for i in range(layers)]
    return tuple(size if kind == "sliding_attention" else None for kind in _checked_types(types, layers, size))


def _checked_types(types: Any, layers: int, size: int | None) -> list[str]:
    if not isinstance(types, list) or len(types) != layers:
        raise UsageError(f"`layer_types` of config.json is no list of {layers} types, one for each layer")
    if other := sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"}):
        raise UsageError("`layer_types` of config.json has types that this network does not express", items=other)
    if size is None and "sliding_attention" in types:
        raise UsageError(
            "`layer_types` of config.json has `sliding_attention`, and no window is on",
            why="`sliding_window` counts only with `use_sliding_window: true`",
        )
    return types


def _experts(reader: _Reader, layers: int) -> dict[str, Any]:
    """Return the facts about experts: a layer has some unless a list or a step leaves it out."""
    none = {"experts": 0, "experts_per_token": 0, "moe_ffn": 0, "norm_topk": False}
    if reader.family != "qwen3_moe":
        return {**none, "sparse_layers": (False,) * layers}
    step, wide = reader.count("decoder_sparse_step", 1, note=False), reader.count("moe_intermediate_size", 768)
    chosen, norm = reader.count("num_experts_per_tok", 8), reader.flag("norm_topk_prob")
    dense = reader.get("mlp_only_layers", None) or []
    experts = _num_experts(reader)
    sparse = tuple(experts > 0 and (layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    if not any(sparse):
        return {**none, "sparse_layers": sparse}
    if chosen > experts:
        raise UsageError(f"`num_experts_per_tok` is {chosen}, more than `num_experts`, {experts}")
    facts = {"experts": experts, "experts_per_token": chosen, "moe_ffn": wide, "norm_topk": norm}
    return {**facts, "sparse_layers": sparse}


def _num_experts(reader: _Reader) -> int:
    """Return the count of experts, which some releases of transformers call `num_local_experts`; it may be 0."""
    reader.read.add("num_local_experts")
    local = reader.config.get("num_local_experts")
    said = reader.get("num_experts", 128 if local is None else local, note=local is None)
    if local is not None and said != local:
        raise UsageError(f"`num_experts` of config.json is {said!r}, and `num_local_experts` {local!r}")
    return 0 if said == 0 and said is not False else count("num_experts", said)
