"""Parallel degrees from a run file of MindFormers (YAML), and the lines of one that load a result.

The keys and defaults are those of MindFormers 1.9: `parallel_config` (degrees), `parallel` (what goes to MindSpore's
context) and `model.model_config`, in the spelling of its legacy models (`num_layers`, `n_kv_heads`) and of its mcore
models (`num_hidden_layers`, `num_key_value_heads`). `use_legacy: False` in the file says mcore.

What does not live here: the layout that degrees make (`degrees.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.layout.degrees import Degrees, chunks_of, offset_lines
from ckptkit.layout.stages import chunk_layers, chunks_of_offset
from ckptkit.layout.yaml_file import YamlFile, load_yaml

KB = 1024
DEFAULT_THRESHOLD_KB = 64  # MindSpore's, where the file names none
DEGREES = {
    "dp": ("data_parallel", "data_parallel_size"),
    "tp": ("model_parallel", "tensor_model_parallel_size"),
    "pp": ("pipeline_stage", "pipeline_model_parallel_size"),
    "cp": ("context_parallel", "context_parallel_size"),
    "ep": ("expert_parallel", "expert_model_parallel_size"),
}
# What the model's sizes are called.
SIZES = {
    "num_layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "num_heads": ("num_heads", "num_attention_heads", "n_head"),
    "num_kv_heads": ("n_kv_heads", "num_key_value_heads", "num_query_groups", "multi_query_group_num"),
    "hidden": ("hidden_size",),
    "vocab": ("vocab_size",),
}
MODEL = ("model", "model_config")
OPT_SIZE = "optimizer_weight_shard_size"
# What `parallel_config` may have besides the degrees.
OTHER_KEYS = {
    "context_parallel_algo", "gradient_aggregation_group", "mem_coeff", "micro_batch_num", "optimizer_shard",
    "seq_split_num", "ulysses_degree_in_cp", "use_seq_parallel", "vocab_emb_dp",
}  # fmt: skip
SEMI_AUTO, AUTO = (1, "SEMI_AUTO_PARALLEL"), (2, "AUTO_PARALLEL")
INTERLEAVE = ("pp_interleave_num", "virtual_pipeline_model_parallel_size")
# Keys that change how tensors are cut in ways that `Degrees` does not say.
UNSUPPORTED = {
    "use_3d_tensor_parallel": "cuts weights over three tensor axes",
    "rmsnorm_compute_2d": "leaves the embedding whole",
}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run file says besides the degrees; None where it says nothing."""

    legacy: bool = True
    devices: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    qkv_concat: bool | None = None
    micro_batch_num: int = 1
    embedding_opt: bool = False  # an optimizer shard cuts a legacy net's embedding too
    model_type: str | None = None
    strategy_file: str | None = None


def read_run_yaml(
    path: Path, *, devices: int | None = None, num_layers: int | None = None, replicate_kv: bool = False
) -> tuple[Degrees, list[str], RunFacts]:
    """Return the degrees of a run file, notes on what is ignored or will be different, and other facts.

    `devices` is the number that the run has, `num_layers` that of the model, for files that do not say it. Raises
    UsageError for degrees that MindFormers would refuse, CorruptError for a file that is no YAML of this kind.
    """
    file = load_yaml(path)
    facts = _facts(file, num_layers, devices)
    degrees = _degrees(file, facts, replicate_kv)
    _check_mode(file, degrees)
    _check_degrees(file, degrees, facts)
    return degrees, [*_ignored(file, degrees, facts), *_remarks(degrees, facts)], facts


def yaml_lines(
    degrees: Degrees, num_layers: int, facts: RunFacts, *, load: str = "", format: str = "safetensors"
) -> list[str]:
    """Return the lines of a run file with which MindFormers loads a result of these degrees from the folder `load`.

    A folder of rank_N folders is read as it is (`auto_trans_ckpt: False`): its layout is the run's. The number of
    micro batches is the smallest that the stages allow.
    """
    micro = max(facts.micro_batch_num, degrees.pp)
    lines = (
        [f"load_checkpoint: {json.dumps(load)}", f"load_ckpt_format: '{format}'", "auto_trans_ckpt: False"]
        if load
        else []
    )
    lines += [f"use_parallel: {degrees.num_ranks > 1}", *([] if facts.legacy else ["use_legacy: False"])]
    lines += ["parallel_config:", *(f"  {names[0]}: {getattr(degrees, key)}" for key, names in DEGREES.items())]
    lines += [f"  micro_batch_num: {micro}"]
    if facts.legacy:
        lines += [f"  vocab_emb_dp: {not degrees.shard_embedding}"]
        if degrees.pp > 1 and not degrees.shard_embedding:
            lines[-1] += "  # MindFormers resets this to False where pipeline_stage > 1"
    if degrees.optimizer_shard or degrees.pp_interleave > 1:
        lines += ["parallel:", *_context_lines(degrees)]
    model = [f"    {line}" for line in offset_lines(num_layers, degrees)]
    if degrees.pp_interleave > 1:
        model += [f"    pp_interleave_num: {degrees.pp_interleave}"]
    if facts.qkv_concat is not None:
        model += [f"    qkv_concat: {facts.qkv_concat}"]
    return [*lines, *(["model:", "  model_config:", *model] if model else [])]


def _context_lines(degrees: Degrees) -> Iterator[str]:
    """Yield the lines of `parallel`."""
    if degrees.optimizer_shard:
        kilobytes, rest = divmod(degrees.opt_threshold_bytes, KB)
        if rest:
            raise UsageError(
                f"a threshold of {degrees.opt_threshold_bytes} bytes cannot be said in a run file",
                why="`parallel_optimizer_threshold` counts whole KB",
            )
        yield "  enable_parallel_optimizer: True"
        yield "  parallel_optimizer_config:"
        yield f"    parallel_optimizer_threshold: {kilobytes}"
        if degrees.opt_shard_size != -1:
            yield f"    optimizer_weight_shard_size: {degrees.opt_shard_size}"
    if degrees.pp_interleave > 1:
        yield "  pipeline_config:"
        yield "    pipeline_interleave: True"
        yield "    pipeline_scheduler: '1f1b'"


def _facts(file: YamlFile, num_layers: int | None, devices: int | None) -> RunFacts:
    """Return what the file says besides the degrees."""
    if "base_config" in file.values:
        raise file.error(
            f"`base_config` refers to {file.values['base_config']}, which is not read",
            hint="give one file that has the sections parallel_config, parallel and model",
        )
    model, parallel = file.section(*MODEL), file.section("parallel")
    sizes = {field: file.number(model, names) for field, names in SIZES.items()}
    if None not in (num_layers, sizes["num_layers"]) and num_layers != sizes["num_layers"]:
        raise file.error(f"the file has {sizes['num_layers']} layers, and the model has {num_layers}")
    stated = {file.number(part, ("device_num",)) for part in (file.values, parallel, file.section("context"))} - {None}
    if (devices is not None and stated - {devices}) or len(stated) > 1:
        raise file.error(f"`device_num` is {sorted(filter(None, stated))}", f"{devices} devices were asked for")
    saved = parallel.get("strategy_ckpt_save_file") or file.section("parallel", "strategy_ckpt_config").get("save_file")
    return RunFacts(
        num_layers=sizes["num_layers"] or num_layers,
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"] or sizes["num_heads"],
        hidden=sizes["hidden"],
        vocab=sizes["vocab"],
        legacy=file.flag(file.values, "use_legacy", True),
        devices=devices or next(iter(stated), None),
        qkv_concat=None if model.get("qkv_concat") is None else file.flag(model, "qkv_concat", False),
        micro_batch_num=file.number(file.section("parallel_config"), ("micro_batch_num",)) or 1,
        embedding_opt=file.flag(model, "parallel_optimizer", False),
        model_type=str(model["type"]) if "type" in model else None,
        strategy_file=str(saved) if saved else None,
    )


def _degrees(file: YamlFile, facts: RunFacts, replicate_kv: bool) -> Degrees:
    """Return the degrees as MindFormers and MindSpore take them from the file, with their defaults."""
    config, parallel, model = file.section("parallel_config"), file.section("parallel"), file.section(*MODEL)
    dp, tp, pp, cp, ep = (file.number(config, names) or 1 for names in DEGREES.values())
    interleave = 1
    if file.flag(file.section("parallel", "pipeline_config"), "pipeline_interleave", False):
        interleave = file.number(model, INTERLEAVE) or 1
    degrees = Degrees(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        pp_interleave=interleave,
        pp_layers=_pp_layers(file, facts, pp, interleave),
        shard_embedding=not facts.legacy or pp > 1 or not file.flag(config, "vocab_emb_dp", True),
        replicate_kv=replicate_kv,
    )
    if not file.flag(parallel, "enable_parallel_optimizer", False):
        return degrees
    shard = file.section("parallel", "parallel_optimizer_config")
    threshold = file.number(shard, ("parallel_optimizer_threshold",), 0)
    size = None if shard.get(OPT_SIZE) == -1 else file.number(shard, (OPT_SIZE,))
    return replace(
        degrees,
        optimizer_shard=True,
        opt_threshold_bytes=KB * (DEFAULT_THRESHOLD_KB if threshold is None else threshold),
        opt_shard_size=size or -1,
    )


def _pp_layers(file: YamlFile, facts: RunFacts, pp: int, interleave: int) -> tuple[int, ...] | None:
    """Return the layers of each chunk as MindFormers reads them from `offset`; None where it is the default split."""
    offset, layers = file.section(*MODEL).get("offset") or 0, facts.num_layers
    if pp * interleave == 1 or (layers is None and offset == 0):
        return None
    if layers is None:
        raise file.error(
            f"`offset` is {offset}, and the file does not say how many layers there are",
            hint="give the config.json of the model as well",
        )
    try:
        given = chunks_of_offset(offset, layers, pp, interleave)
    except UsageError as error:
        raise file.error(error.what, error.why, error.hint) from error
    return None if given == chunk_layers(layers, pp, interleave, None) else given


def _check_mode(file: YamlFile, degrees: Degrees) -> None:
    """Raise UsageError for ways to run that arrange the ranks, or cut the weights, as `Degrees` cannot say."""
    mode = file.section("parallel").get("parallel_mode")
    if degrees.num_ranks > 1 and mode not in (None, *SEMI_AUTO, *AUTO):
        raise file.error(
            f"`parallel_mode` is {mode}, in which MindFormers does not use the degrees of `parallel_config` so",
            hint="a layout can be made for `parallel_mode: 1` (semi_auto_parallel)",
        )
    if file.section("parallel", "pipeline_config").get("pipeline_scheduler") == "zero_bubble_v":
        raise file.error("`pipeline_scheduler` is zero_bubble_v, whose order of layers is not supported")
    model = file.section(*MODEL)
    for key, effect in UNSUPPORTED.items():
        if file.flag(model, key, False):
            raise file.error(f"`{key}` is True, which is not supported", f"it {effect}")


def _check_degrees(file: YamlFile, degrees: Degrees, facts: RunFacts) -> None:
    """Raise UsageError for degrees that contradict one another, the number of devices or the model's sizes."""
    tp, pp, ep, ranks = degrees.tp, degrees.pp, degrees.ep, degrees.num_ranks
    if facts.devices is not None and facts.devices != ranks:
        product = f"dp {degrees.dp} * cp {degrees.cp} * tp {tp} * pp {pp}"
        raise file.error(f"{product} is {ranks}, and the run has {facts.devices} devices", "they must be equal")
    if facts.micro_batch_num < pp:
        raise file.error(
            f"`micro_batch_num` is {facts.micro_batch_num} for {pp} pipeline stages",
            "a pipeline wants at least one micro batch for each stage",
            f"say `micro_batch_num: {pp}` or more",
        )
    kv_heads = facts.num_kv_heads or tp
    copies = degrees.replicate_kv and tp % kv_heads == 0
    for what, number, fits in (
        ("heads", facts.num_heads, False),
        ("KV heads", facts.num_kv_heads, copies),
        ("hidden sizes", facts.hidden if facts.legacy else None, False),
    ):
        if number is not None and number % tp and not fits:
            hint = f"choose a `model_parallel` that divides {number}"
            if what == "KV heads" and tp % kv_heads == 0:
                hint += ", or `--replicate-kv`"
            raise file.error(f"the model has {number} {what}, which `model_parallel` {tp} does not divide", hint=hint)
    beside = ("cp", degrees.cp) if facts.legacy else ("tp", tp)
    if degrees.dp * beside[1] % ep:
        raise file.error(
            f"`expert_parallel` {ep} does not divide dp {degrees.dp} * {beside[0]} {beside[1]}",
            "the experts are spread over these devices",
        )
    if facts.num_layers is not None:
        chunks_of(facts.num_layers, degrees)


def _ignored(file: YamlFile, degrees: Degrees, facts: RunFacts) -> Iterator[str]:
    """Yield a note for each key that has no effect, or another one than it seems."""
    config, parallel, model = file.section("parallel_config"), file.section("parallel"), file.section(*MODEL)
    if degrees.num_ranks > 1 and not file.flag(file.values, "use_parallel", False):
        yield "`use_parallel` is not True in the file: the degrees hold for a run that sets it"
    for names in DEGREES.values():
        if names[1] in config:
            yield f"`{names[1]}` was read; MindFormers 1.9 calls it `{names[0]}` in a run file"
    known = {name for names in DEGREES.values() for name in names} | OTHER_KEYS
    for key in sorted(config.keys() - known):
        yield f"`parallel_config.{key}` was ignored: MindFormers 1.9 has no such key"
    if config.get("optimizer_shard"):
        yield "`parallel_config.optimizer_shard` has no effect; `parallel.enable_parallel_optimizer` decides"
    if parallel.get("parallel_mode") in AUTO:
        yield "in `parallel_mode` auto_parallel MindSpore may choose other layouts than these"
    asked = file.number(model, INTERLEAVE) or 1
    if asked != degrees.pp_interleave:
        yield f"`pp_interleave_num` {asked} has no effect without `parallel.pipeline_config.pipeline_interleave: True`"
    if degrees.shard_embedding and file.flag(config, "vocab_emb_dp", False):
        cause = "pipeline_stage > 1" if facts.legacy else "use_legacy: False"
        yield f"`vocab_emb_dp` has no effect with `{cause}`: the embedding is cut"


def _remarks(degrees: Degrees, facts: RunFacts) -> Iterator[str]:
    """Yield what follows from the degrees and the model's sizes."""
    if facts.vocab is not None and facts.vocab % degrees.tp and degrees.shard_embedding:
        yield f"model_parallel {degrees.tp} does not divide the vocabulary of {facts.vocab}: " + (
            "embedding and head stay whole" if facts.legacy else "MindFormers wants a padded one"
        )
    if degrees.replicate_kv and facts.num_kv_heads and facts.num_kv_heads % degrees.tp:
        yield f"each of {facts.num_kv_heads} KV heads lies on several devices, which MindFormers 1.9 does not train"
