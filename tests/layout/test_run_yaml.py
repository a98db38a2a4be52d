"""A MindFormers run file gives degrees, or an error that names the key; what we write is read back as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.errors import CkptkitError, CorruptError, UsageError
from ckptkit.layout.degrees import Degrees
from ckptkit.layout.run_yaml import RunFacts, read_run_yaml, yaml_lines
from ckptkit.layout.stages import chunk_layers

LEGACY = """
use_parallel: True
parallel:
  parallel_mode: 1  # semi auto
  enable_parallel_optimizer: True
  full_batch: True
  strategy_ckpt_save_file: "./strategy.ckpt"
  parallel_optimizer_config:
    gradient_accumulation_shard: False
    parallel_optimizer_threshold: 128
    optimizer_weight_shard_size: 2
parallel_config:
  data_parallel: 2
  model_parallel: 4
  pipeline_stage: 2
  context_parallel: 1
  micro_batch_num: 4
  vocab_emb_dp: True
  gradient_aggregation_group: 4
model:
  model_config:
    type: LlamaConfig
    num_layers: 7
    hidden_size: 64
    num_heads: 8
    n_kv_heads: 4
    vocab_size: 32000
    qkv_concat: True
    offset: [0, 1]
  arch:
    type: LlamaForCausalLM
"""
MCORE = """
use_parallel: True
use_legacy: False
parallel_config:
  data_parallel: &dp 2
  model_parallel: 4
  pipeline_stage: 2
  expert_parallel: 8
  micro_batch_num: 2
  use_seq_parallel: True
parallel:
  enable_parallel_optimizer: True
  pipeline_config: {pipeline_interleave: True, pipeline_scheduler: "1f1b"}
model:
  model_config:
    model_type: qwen3_moe
    num_hidden_layers: 8
    num_attention_heads: 8
    num_key_value_heads: 4
    pp_interleave_num: 2
    offset: 0
"""


def read(folder: Path, text: str, **said: Any) -> tuple[Degrees, list[str], RunFacts]:
    path = folder / "run.yaml"
    path.write_text(text)
    return read_run_yaml(path, **said)


def refused(folder: Path, text: str, **said: Any) -> CkptkitError:
    with pytest.raises(CkptkitError) as caught:
        read(folder, text, **said)
    return caught.value


def test_a_run_file_of_a_legacy_model(tmp_path: Path) -> None:
    degrees, notes, facts = read(tmp_path, LEGACY, devices=16)
    assert degrees == Degrees(
        dp=2, tp=4, pp=2, optimizer_shard=True, opt_threshold_bytes=128 << 10, opt_shard_size=2, pp_layers=(3, 4)
    )
    assert notes == ["`vocab_emb_dp` has no effect with `pipeline_stage > 1`: the embedding is cut"]
    assert facts == RunFacts(
        devices=16, num_layers=7, num_heads=8, num_kv_heads=4, hidden=64, vocab=32000, qkv_concat=True,
        micro_batch_num=4, model_type="LlamaConfig", strategy_file="./strategy.ckpt",
    )  # fmt: skip


def test_a_run_file_of_an_mcore_model(tmp_path: Path) -> None:
    degrees, notes, facts = read(tmp_path, MCORE)
    assert degrees == Degrees(
        dp=2, tp=4, pp=2, ep=8, pp_interleave=2, optimizer_shard=True, opt_threshold_bytes=64 << 10
    )
    assert notes == []
    assert (facts.legacy, facts.num_layers, facts.num_kv_heads, facts.qkv_concat) == (False, 8, 4, None)


def test_an_empty_section_means_one_device_and_defaults(tmp_path: Path) -> None:
    degrees, notes, facts = read(tmp_path, "parallel_config:\nmodel: {}\n")
    assert degrees == Degrees(shard_embedding=False)  # vocab_emb_dp is True by default
    assert notes == []
    assert facts == RunFacts()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("micro_batch_num: 4", "micro_batch_num: 1", "`micro_batch_num` is 1 for 2 pipeline stages"),
        ("num_heads: 8", "num_heads: 6", "the model has 6 heads, which `model_parallel` 4 does not divide"),
        ("n_kv_heads: 4", "n_kv_heads: 2", "the model has 2 KV heads, which `model_parallel` 4 does not divide"),
        ("hidden_size: 64", "hidden_size: 66", "the model has 66 hidden sizes, which `model_parallel` 4 does not"),
        ("offset: [0, 1]", "offset: [1, 1]", "adds up to 2, and 7 layers over 2 stages leave 1"),
        ("offset: [0, 1]", "offset: 0", "adds up to 0, and 7 layers over 2 stages leave 1"),
        ("offset: [0, 1]", "offset: [0, 1, 0]", "and 2 stages want 0 or 2 numbers"),
        ("offset: [0, 1]", "offset: [-4, 5]", "leave a stage without any"),
        ("num_layers: 7", "", "`offset` is [0, 1], and the file does not say how many layers there are"),
        ("context_parallel: 1", "expert_parallel: 4", "`expert_parallel` 4 does not divide dp 2 * cp 1"),
        ("context_parallel: 1", "context_parallel: 2", "dp 2 * cp 2 * tp 4 * pp 2 is 32, and the run has 16 devices"),
        ("data_parallel: 2", "data_parallel: two", "`data_parallel` is `two`, not a whole number of 1 or more"),
        ("data_parallel: 2", "data_parallel: True", "`data_parallel` is `True`, not a whole number"),
        ("data_parallel: 2", "data_parallel: 0", "`data_parallel` is `0`, not a whole number"),
        (
            "model_parallel: 4",
            "model_parallel: 4\n  tensor_model_parallel_size: 2",
            "`tensor_model_parallel_size` is 2",
        ),
        ("vocab_emb_dp: True", "vocab_emb_dp: 1", "`vocab_emb_dp` is `1`, neither True nor False"),
        ("parallel_mode: 1", "parallel_mode: 0", "`parallel_mode` is 0"),
        ("qkv_concat: True", "qkv_concat: maybe", "`qkv_concat` is `maybe`, neither True nor False"),
        ("qkv_concat: True", "use_3d_tensor_parallel: True", "`use_3d_tensor_parallel` is True"),
        ("full_batch: True", "pipeline_config: {pipeline_scheduler: zero_bubble_v}", "is zero_bubble_v"),
        ("full_batch: True", "device_num: 8", "`device_num` is [8]"),
        ("use_parallel: True", "base_config: other.yaml", "`base_config` refers to other.yaml"),
        ("parallel_config:\n", "parallel_config: 3\nother:\n", "`parallel_config` is `3`, not a section"),
    ],
)
def test_what_mindformers_would_trip_over_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LEGACY
    error = refused(tmp_path, LEGACY.replace(old, new, 1), devices=16)
    assert isinstance(error, UsageError)
    assert error.what.startswith(f"{tmp_path / 'run.yaml'}: ")
    assert message in error.what


def test_the_devices_and_layers_that_the_caller_knows_are_compared(tmp_path: Path) -> None:
    assert "is 16, and the run has 8 devices" in refused(tmp_path, LEGACY, devices=8).what
    assert "the file has 7 layers, and the model has 9" in refused(tmp_path, LEGACY, num_layers=9).what
    assert read(tmp_path, LEGACY.replace("num_layers: 7", ""), num_layers=7)[0].pp_layers == (3, 4)
    own = LEGACY.replace("full_batch: True", "device_num: 8")
    assert "is 16, and the run has 8 devices" in refused(tmp_path, own).what


def test_kv_heads_may_be_replicated_on_request(tmp_path: Path) -> None:
    text = LEGACY.replace("n_kv_heads: 4", "n_kv_heads: 2")
    assert "`--replicate-kv`" in refused(tmp_path, text).hint
    degrees, notes, _ = read(tmp_path, text, replicate_kv=True)
    assert degrees.replicate_kv
    assert "each of 2 KV heads lies on several devices" in notes[-1]
    assert "--replicate-kv" not in refused(tmp_path, text.replace("n_kv_heads: 2", "n_kv_heads: 3")).hint


def test_experts_of_mcore_models_may_lie_on_the_tp_axis_too(tmp_path: Path) -> None:
    assert read(tmp_path, MCORE)[0].ep == 8
    legacy = refused(tmp_path, MCORE.replace("use_legacy: False", "use_legacy: True"))
    assert "`expert_parallel` 8 does not divide dp 2 * cp 1" in legacy.what
    assert "does not divide dp 2 * tp 4" in refused(tmp_path, MCORE.replace("parallel: 8", "parallel: 16")).what


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("use_parallel: True", "use_parallel: False", "`use_parallel` is not True in the file"),
        ("use_seq_parallel: True", "auto_pipeline: False", "`parallel_config.auto_pipeline` was ignored"),
        ("use_seq_parallel: True", "optimizer_shard: True", "`parallel_config.optimizer_shard` has no effect"),
        ("use_seq_parallel: True", "vocab_emb_dp: True", "`vocab_emb_dp` has no effect with `use_legacy: False`"),
        ("pipeline_interleave: True", "x: 1", "`pp_interleave_num` 2 has no effect without `parallel.pipeline_config"),
        ("enable_parallel_optimizer: True", "parallel_mode: 2", "in `parallel_mode` auto_parallel MindSpore may"),
        ("model_parallel: 4", "tensor_model_parallel_size: 4", "calls it `model_parallel` in a run file"),
        ("offset: 0", "vocab_size: 151", "does not divide the vocabulary of 151: MindFormers wants a padded one"),
    ],
)
def test_what_is_ignored_or_reset_is_said(tmp_path: Path, old: str, new: str, note: str) -> None:
    assert old in MCORE
    _, notes, _ = read(tmp_path, MCORE.replace(old, new, 1))
    assert [note in each for each in notes] == [True]


def test_interleave_counts_only_where_the_pipeline_is_told_to(tmp_path: Path) -> None:
    assert read(tmp_path, MCORE.replace("pipeline_interleave: True", "x: 1"))[0].pp_interleave == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is no YAML"),
        (b"\xff\xfe\x00", "is no YAML"),
        (b"- 1\n- 2\n", "does not hold sections"),
        (b"", "does not hold sections"),
        (b"1: 2\n", "does not hold sections"),
        (b"a: 2024-13-45\n", "is no YAML"),
        (b"a: !!python/object/apply:os.system ['true']\n", "is no YAML"),
        (b"[" * 5000, "is no YAML"),
        (b"a: &a [*a, 1]\n? [x]\n: 1\n", "is no YAML"),
        (b"#" * (5 << 20), "too many for settings"),
    ],
)
def test_a_damaged_or_unsafe_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=message):
        read_run_yaml(path)


def test_a_key_that_is_there_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refused(tmp_path, "a: 1\nparallel_config:\n  model_parallel: 2\n  model_parallel: 4\n")
    assert "`model_parallel` is there twice in the section at line 3" in error.what
    with pytest.raises(UsageError, match="cannot read"):
        read_run_yaml(tmp_path / "none.yaml")


def test_an_anchor_is_no_second_key(tmp_path: Path) -> None:
    text = "x: &x {data_parallel: 2}\nuse_parallel: True\nparallel_config:\n  <<: *x\n  model_parallel: 2\n"
    assert read(tmp_path, text)[0] == Degrees(dp=2, tp=2, shard_embedding=False)


# What we write.


@st.composite
def runs(draw: st.DrawFn) -> tuple[Degrees, int, RunFacts]:
    degree = st.integers(1, 4)
    pp, interleave = draw(degree), draw(st.integers(1, 2))
    chunks = pp * interleave
    layers = draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))
    own = chunk_layers(sum(layers), pp, interleave, None)
    legacy, ep = draw(st.booleans()), draw(degree)
    shard = draw(st.booleans())
    degrees = Degrees(
        tp=draw(degree),
        pp=pp,
        dp=ep * draw(degree),
        ep=ep,
        cp=draw(degree),
        optimizer_shard=shard,
        opt_threshold_bytes=draw(st.integers(0, 3)) << 10 if shard else 0,
        opt_shard_size=draw(st.sampled_from([-1, 1, 4])) if shard else -1,
        pp_layers=None if chunks == 1 or tuple(layers) == own else tuple(layers),
        pp_interleave=interleave,
        shard_embedding=not legacy or pp > 1 or draw(st.booleans()),
    )
    facts = RunFacts(
        legacy=legacy,
        num_layers=sum(layers),
        qkv_concat=draw(st.sampled_from([None, True, False])),
        micro_batch_num=draw(degree),
    )
    return degrees, sum(layers), facts


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)  # it writes and reads a file
@given(runs())
def test_the_lines_that_load_a_result_are_read_back_as_the_same_degrees(
    tmp_path: Path, run: tuple[Degrees, int, RunFacts]
) -> None:
    degrees, layers, facts = run
    text = "\n".join(yaml_lines(degrees, layers, facts, load="/some where/it's: \\ \u00e9"))
    found, notes, read_facts = read(tmp_path, text, num_layers=layers)
    assert found == degrees
    assert notes == []
    assert read_facts == replace(facts, micro_batch_num=max(facts.micro_batch_num, degrees.pp))


def test_the_lines_of_a_small_run() -> None:
    degrees = Degrees(tp=4, pp=2, optimizer_shard=True, opt_threshold_bytes=64 << 10, pp_layers=(3, 4))
    assert yaml_lines(degrees, 7, RunFacts(qkv_concat=True), load="DST") == [
        'load_checkpoint: "DST"',
        "load_ckpt_format: 'safetensors'",
        "auto_trans_ckpt: False",
        "use_parallel: True",
        "parallel_config:",
        "  data_parallel: 1",
        "  model_parallel: 4",
        "  pipeline_stage: 2",
        "  context_parallel: 1",
        "  expert_parallel: 1",
        "  micro_batch_num: 2",
        "  vocab_emb_dp: False",
        "parallel:",
        "  enable_parallel_optimizer: True",
        "  parallel_optimizer_config:",
        "    parallel_optimizer_threshold: 64",
        "model:",
        "  model_config:",
        "    offset: [0, 1]",
        "    qkv_concat: True",
    ]


def test_what_a_run_file_cannot_say_is_refused_or_said() -> None:
    with pytest.raises(UsageError, match="a threshold of 100 bytes cannot be said"):
        yaml_lines(Degrees(dp=2, optimizer_shard=True, opt_threshold_bytes=100), 2, RunFacts())
    lines = yaml_lines(Degrees(pp=2, shard_embedding=False), 2, RunFacts())
    assert "  vocab_emb_dp: True  # MindFormers resets this to False where pipeline_stage > 1" in lines


READER = """
import json, sys
from mindformers.tools.register import MindFormerConfig
from mindformers.core.parallel_config import build_parallel_config
config = MindFormerConfig(sys.argv[1])
build_parallel_config(config)
kept = config.parallel_config.to_dict()
print("FOUND" + json.dumps({
    **{key: kept[key] for key in ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel",
                                  "expert_parallel", "micro_batch_num", "vocab_emb_dp")},
    "load": [config.load_checkpoint, config.load_ckpt_format, config.auto_trans_ckpt, config.use_parallel],
    "parallel": config.parallel, "model": config.model,
}))
"""


@pytest.mark.frameworks
@pytest.mark.timeout(300)
def test_mindformers_reads_our_lines_as_they_are_meant(tmp_path: Path) -> None:
    """MindFormers refuses unknown keys of `parallel_config`, so its own reader is the check of their names."""
    degrees = Degrees(
        tp=2, pp=2, dp=4, ep=2, cp=2, optimizer_shard=True, opt_threshold_bytes=8 << 10, opt_shard_size=2,
        pp_interleave=2, pp_layers=(1, 2, 3, 1),
    )  # fmt: skip
    path = tmp_path / "run.yaml"
    lines = yaml_lines(degrees, 7, RunFacts(qkv_concat=True), load=str(tmp_path))
    path.write_text("\n".join(["run_mode: train", *lines, "trainer: {type: x}"]))
    done = subprocess.run(
        [sys.executable, "-c", READER, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert "FOUND" in done.stdout, done.stderr[-2000:]
    found = json.loads(done.stdout.split("FOUND")[1])
    parallel, model = found.pop("parallel"), found.pop("model")
    assert found == {
        "data_parallel": 4,
        "model_parallel": 2,
        "pipeline_stage": 2,
        "context_parallel": 2,
        "expert_parallel": 2,
        "micro_batch_num": 2,
        "vocab_emb_dp": False,
        "load": [str(tmp_path), "safetensors", False, True],
    }
    assert parallel["enable_parallel_optimizer"] is True
    assert parallel["parallel_optimizer_config"] == {
        "parallel_optimizer_threshold": 8,
        "optimizer_weight_shard_size": 2,
    }
    assert parallel["pipeline_config"] == {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}
    assert model["model_config"] == {"offset": [[0, 1], [2, 0]], "pp_interleave_num": 2, "qkv_concat": True}
