"""The contract: a config is checked before anything starts, and each fault names its key and its remedy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ckptkit.cli.train import log_setting
from ckptkit.errors import UsageError
from ckptkit.quantities import parse_bytes, parse_numbers
from ckptkit.train.config import TrainConfig, load_config

SMALL: Mapping[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "corpus.jsonl", "seq_length": 16},
    "optimizer": {"lr": 0.001},
    "schedule": {"total_steps": 20},
    "training": {"batch_size": 8},
    "checkpoint": {"folder": "run", "every": 4},
}


def write(folder: Path, text: str = "", **sections: Any) -> Path:
    """Write SMALL with some sections changed, and `text` after it."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **sections}) + text)
    return file


def fault(folder: Path, *sets: str, text: str = "", **sections: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(write(folder, text, **sections), sets)
    return str(caught.value)


def small(folder: Path, *sets: str) -> TrainConfig:
    return load_config(write(folder), sets)


def test_a_small_config_has_the_documented_defaults(tmp_path: Path) -> None:
    config = small(tmp_path)
    assert config.model.path == tmp_path / "model"
    assert (config.training.micro_batch, config.training.device, config.training.dropout) == (8, "cpu", 0.0)
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.clip_norm) == (0.9, 0.999, 1.0)
    assert (config.precision.compute, config.precision.loss_scale, config.precision.initial_scale) == (
        "fp32",
        "dynamic",
        65536.0,
    )
    assert config.checkpoint.keep_last == 2
    assert config.recompute.selected(3) == frozenset()


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-5", 1e-5), ("3E+2", 300.0), ("1.5e-4", 1.5e-4), (".5", 0.5), ("5.", 5.0), ("2", 2.0), ("1_0.5", 10.5)],
)
def test_numbers_are_numbers_although_yaml_1_1_takes_some_for_texts(tmp_path: Path, written: str, value: float) -> None:
    file = write(tmp_path, optimizer=None)
    file.write_text(file.read_text().replace("optimizer: null", f"optimizer:\n  lr: {written}"))
    assert load_config(file).optimizer.lr == value
    assert small(tmp_path, f"optimizer.lr={written}").optimizer.lr == value


@pytest.mark.parametrize("written", ["'1e-5'", "010", "1:30", "2024-01-01", "0o17", "yes", "[1]", "0x", ".inf", ".nan"])
def test_what_only_looks_like_a_number_is_none(tmp_path: Path, written: str) -> None:
    assert "`optimizer.lr` is" in fault(tmp_path, f"optimizer.lr={written}")


def test_a_folder_that_is_called_like_a_date_is_a_folder(tmp_path: Path) -> None:
    assert small(tmp_path, "checkpoint.folder=2024-01-01").checkpoint.folder.name == "2024-01-01"


def test_paths_of_the_file_begin_at_its_folder_and_typed_ones_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = write(there, model={"path": "m", "table": ["a.toml", "/b.toml"], "strategy": "~/s"})
    config = load_config(Path("../there/run.yaml"), ["data.path=c", "eval={path: e}", "log.file=~/l"])
    assert config.model.path.resolve() == there / "m"
    assert [path.resolve() for path in config.model.table] == [there / "a.toml", Path("/b.toml")]
    assert config.model.strategy == tmp_path / "home/s"
    assert config.data.path == here / "c"
    assert config.eval.path == here / "e"
    assert config.log.file == tmp_path / "home/l"
    assert load_config(file).data.path == there / "corpus.jsonl"  # and without `--set`, the file's


@pytest.mark.parametrize(
    "name", ["7", "true", "a #b.jsonl", "a: b", '"a', "a\\b", "\N{LATIN SMALL LETTER E WITH ACUTE}\U0001f642", "~"]
)
def test_the_option_log_takes_a_name_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert small(tmp_path, log_setting(Path(name))).log.file == (tmp_path if name == "~" else tmp_path / name)


def test_without_quotes_such_a_name_would_be_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.chdir(tmp_path)
    assert small(tmp_path, "log.file=a #b.jsonl").log.file == tmp_path / "a"
    with pytest.raises(UsageError):
        small(tmp_path, "log.file=7")


def test_set_replaces_one_key_in_order_and_leaves_the_rest(tmp_path: Path) -> None:
    config = small(tmp_path, "optimizer.lr=1", "optimizer.lr=2e-4", "training.adaptive.enabled=true")
    assert config.optimizer.lr == 2e-4
    assert config.training.adaptive.enabled
    assert config.training.batch_size == 8
    assert small(tmp_path, "optimizer.clip_norm=").optimizer.clip_norm is None
    assert small(tmp_path, "optimizer.freeze=[a.*, b]").optimizer.freeze == ("a.*", "b")


# a `--set`, and what the error has to say: the key, what is wrong, the remedy
FAULTS = [
    ("optimizer.weight_decy=1", ["`optimizer.weight_decy` is no key", "did you mean `optimizer.weight_decay`?"]),
    ("optimizer.learning_rate=1", ["did you mean `optimizer.lr`?"]),
    ("training.lr=1", ["no key of `training`", "did you mean `optimizer.lr`?"]),
    ("training.adaptive.limits=1", ["did you mean `training.adaptive.limit`?"]),
    ("training.zzz=1", ["no key of `training`", "known: batch_size, micro_batch"]),
    ("optimiser.lr=1", ["`optimiser` is no section", "did you mean `optimizer`?"]),
    ("optimizer.lr=0", ["`optimizer.lr` is `0`, not a number above 0"]),
    ("optimizer.lr='1e-4'", ["write the number without quotes"]),
    ("optimizer.lr.x=1", ["`lr` is no section"]),
    ("optimizer=1", ["`optimizer` is `1`, not a section"]),
    ("optimizer.lr=true", ["`optimizer.lr` is `true`, not a number"]),
    ("optimizer.beta1=1", ["`optimizer.beta1` is `1`", "below 1"]),
    ("optimizer.freeze=[1]", ["`optimizer.freeze`", "not a list of texts"]),
    ("data.seq_length=1", ["whole number of 2 or more"]),
    ("data.seq_length=16.0", ["`data.seq_length` is `16.0`, not a whole number"]),
    ("data.shuffle=1", ["not `true` or `false`"]),
    ("data.format=jsonl", ["not one of `auto`, `text`, `prompt`, `ids`, `mindrecord`"]),
    ("schedule.kind=cosin", ["did you mean `cosine`?"]),
    ("schedule.warmup_steps=20", ["not below `schedule.total_steps`", "shorten the warm-up"]),
    ("schedule.min_lr=0.1", ["`schedule.min_lr` is 0.1, above `optimizer.lr`"]),
    ("training.micro_batch=3", ["does not divide `training.batch_size`, 8", "choose one of 1, 2, 4, 8"]),
    ("training.micro_batch=16", ["does not divide"]),
    ("training.stop_at_step=21", ["above `schedule.total_steps`, 20"]),
    ("training.dropout=1", ["`training.dropout` is `1`", "below 1"]),
    ("training.device=tpu", ["`training.device` is `tpu`, no device", "`ascend`"]),
    ("training.adaptive.limit=6XB", ["not a size", "`6GB`"]),
    ("training.adaptive.limit=0", ["not a size"]),
    ("training.adaptive={enabled: true, min_micro_batch: 9}", ["above `training.micro_batch`, 8"]),
    ("precision.compute=bf16", ["`cpu` does not train", "MindSpore's CPU kernels", "`ascend`"]),
    ("precision.loss_scale=dynamic", ["does nothing with `precision.compute` `fp32`"]),
    ("precision={compute: fp16, loss_scale: 0}", ["not a loss scale"]),
    ("precision={compute: fp16, loss_scale: 8, growth_interval: 4}", ["does nothing with `precision.loss_scale` 8"]),
    ("recompute.layers=3-1", ["no selection of layers", "`0-3,7`"]),
    ("recompute.layers=0-99999999999", ["no range of layers"]),
    ("checkpoint.keep_last=1", ["whole number of 2 or more"]),
    ("checkpoint.keep_best=true", ["needs `eval.path`", "lowest loss"]),
    ("eval.every=3", ["`eval.every` needs `eval.path`"]),
    ("model.path=", ["`model.path` is empty, not a path"]),
    ("model.path=3", ["`model.path` is `3`, not a path", "quotes"]),
    ("optimizer.lr", ["is not `key=value`", "--set optimizer.lr=1e-4"]),
    ("=3", ["is not `key=value`"]),
    ("optimizer.lr=[1", ["is no YAML"]),
]


@pytest.mark.parametrize(("typed", "words"), FAULTS, ids=[typed for typed, _ in FAULTS])
def test_a_fault_names_the_key_what_is_wrong_and_the_remedy(tmp_path: Path, typed: str, words: list[str]) -> None:
    text = fault(tmp_path, typed)
    assert [word for word in words if word not in text] == [], text
    assert "`--set " in text.splitlines()[0]
    assert "pydantic" not in text and "Input should" not in text


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"optimizer": {}}, "the key `optimizer.lr` is missing"),
        ({"optimizer": None}, "the key `optimizer.lr` is missing"),
        ({"eval": {"path": "held.jsonl"}, "log": {"file": "held.jsonl"}}, "`log.file` is `eval.path`"),
        ({"eval": {"path": "held.jsonl"}, "log": {"file": "a/../held.jsonl"}}, "`log.file` is `eval.path`"),
        ({"checkpoint": {"folder": "a/../model", "every": 1}}, "`checkpoint.folder` is `model.path`"),
        (
            {"eval": {"path": "held.jsonl", "every": 3}, "checkpoint": {"folder": "r", "every": 2, "keep_best": True}},
            "`eval.every`, 3, is no multiple of `checkpoint.every`, 2",
        ),
        ({"checkpoint": {"folder": "model", "every": 1}}, "`checkpoint.folder` is `model.path`"),
    ],
)
def test_a_fault_of_the_file_names_the_file(tmp_path: Path, sections: dict[str, Any], word: str) -> None:
    text = fault(tmp_path, **sections)
    assert text.startswith(f"`{tmp_path / 'run.yaml'}`: ")
    assert word in text


def test_a_missing_section_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in SMALL.items() if key != "data"}))
    with pytest.raises(UsageError, match="the section `data` is missing"):
        load_config(file)


def test_several_faults_are_told_at_once_five_and_a_count(tmp_path: Path) -> None:
    text = fault(tmp_path, *(f"data.zz{i}=1" for i in range(6)), "optimizer.lr=-1")
    assert text.startswith("7 settings of `")
    assert text.count("zz") + text.count("optimizer.lr") == 5
    assert "... and 2 more" in text


def test_several_contradictions_are_told_at_once(tmp_path: Path) -> None:
    text = fault(tmp_path, "training.micro_batch=5", "schedule.warmup_steps=30")
    assert "`training.micro_batch`" in text and "`schedule.warmup_steps`" in text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("data: {path: a}\ndata: {path: b}\n", "`data` is there twice"),
        ("data:\n  path: a\n  path: b\n", "`data.path` is there twice, again in line 3"),
        ("data: &x {path: a}\neval: *x\n", "alias"),
        ("- a\n", "has no sections"),
        ("3\n", "has no sections"),
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("a: [\n", "is no YAML"),
        ("a: 1\n---\nb: 1\n", "is no YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "is no YAML"),
        ("1: a\n", "a key that is no text"),
        ("a: \x00\n", "is no text"),
    ],
)
def test_a_file_that_is_no_settings_is_refused_in_words(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(file)
    assert word in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_or_is_no_text_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            load_config(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no text"):
        load_config(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ("none", ()),
        ("all", (0, 1, 2, 3)),
        ("0-1,3", (0, 1, 3)),
        ("[3, 1]", (1, 3)),
        ("2", (2,)),
        ("[]", ()),
        ("off", ()),
    ],
)
def test_layers_are_selected_by_words_ranges_and_lists(tmp_path: Path, written: str, layers: Sequence[int]) -> None:
    assert small(tmp_path, f"recompute.layers={written}").recompute.selected(4) == frozenset(layers)


def test_a_layer_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names layer 4, and the model has 4"):
        small(tmp_path, "recompute.layers=0-4").recompute.selected(4)


@pytest.mark.parametrize("text", ["", "-", "1-", "a", "1,,2", "1.5", "-1"])
def test_what_is_no_list_of_layers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layer"):
        parse_numbers(text, 100_000, "layer")


def test_sizes_are_read_in_both_kinds_of_units() -> None:
    assert [parse_bytes(text) for text in ("6GB", "2GiB", "500 mb", "1.5k", "7")] == [
        6_000_000_000,
        2 << 30,
        500_000_000,
        1500,
        7,
    ]


def test_fp16_takes_a_static_scale_and_bf16_an_accelerator(tmp_path: Path) -> None:
    assert small(tmp_path, "precision={compute: fp16, loss_scale: 1024}").precision.loss_scale == 1024.0
    assert small(tmp_path, "precision.compute=bf16", "training.device=npu:1").training.device == "ascend:1"


def test_the_command_line_does_not_load_pydantic() -> None:
    code = "import sys\nfrom ckptkit.cli import run\nrun(['--help'])\nprint('loaded:', 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: False"
