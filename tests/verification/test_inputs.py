"""The contract: the inputs reach every place where a wrong model may still look right, and say where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CorruptError, UsageError
from ckptkit.verification.inputs import make_inputs, read_inputs, write_inputs
from ckptkit.verification.runners.job import Input

CONFIG: dict[str, Any] = {"vocab_size": 50, "max_position_embeddings": 512}


def lengths(config: dict[str, Any], **options: Any) -> list[int]:
    return [len(item.ids) for item in make_inputs(config, None, **{"windows": [], **options})[0]]


def test_inputs_have_several_lengths_and_far_positions() -> None:
    inputs, notes = make_inputs(CONFIG, None, windows=[])
    assert [len(item.ids) for item in inputs] == [1, 7, 64, 24]
    far = inputs[-1]
    assert far.positions is not None
    assert far.positions[0] == 0 and far.positions[-4:] == (508, 509, 510, 511)
    assert list(far.positions) == sorted(set(far.positions))
    assert all(0 <= number < 50 for item in inputs for number in item.ids)
    assert notes == ["no tokenizer.json, so no real text was tried"]


def test_the_same_model_has_the_same_inputs_and_another_length_other_ids() -> None:
    inputs, _ = make_inputs(CONFIG, None, windows=[])
    assert inputs == make_inputs(CONFIG, None, windows=[])[0]
    assert inputs[1].ids != inputs[2].ids[:7]


def test_both_sides_of_a_window_are_tried() -> None:
    assert lengths(CONFIG, windows=[9]) == [1, 7, 64, 8, 9, 10, 24]


@pytest.mark.parametrize(
    ("window", "most", "note"),
    [(100, 90, "`--max-tokens 101` makes one"), (600, 512, "longer than any sequence of this model")],
)
def test_a_window_that_no_input_reaches_is_told(window: int, most: int, note: str) -> None:
    inputs, notes = make_inputs(CONFIG, None, windows=[window], max_tokens=most)
    assert max(len(item.ids) for item in inputs) <= window
    assert any(note in line for line in notes)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("word", ["rope_type", "type"])
def test_a_scaled_model_runs_beyond_the_positions_of_its_training(key: str, word: str) -> None:
    scaled = {key: {word: "llama3", "factor": 8.0, "original_max_position_embeddings": 30}}
    assert 61 in lengths(CONFIG | scaled)
    assert 61 not in lengths(CONFIG | {key: {word: "default"}})
    assert 61 not in lengths(CONFIG | {key: None})


def test_a_dynamically_scaled_model_reaches_beyond_its_own_positions() -> None:
    config = CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    far = make_inputs(config, None, windows=[])[0][-1]
    assert far.positions is not None and far.positions[-1] == 2047


@pytest.mark.parametrize(("positions", "most"), [(5, 512), (512, 5), (1, 1)])
def test_no_input_is_longer_than_it_may_be(positions: int, most: int) -> None:
    inputs, _ = make_inputs(CONFIG | {"max_position_embeddings": positions}, None, windows=[3], max_tokens=most)
    assert all(len(item.ids) <= min(positions, most) or item.positions is not None for item in inputs)
    assert all(max(item.positions) < positions for item in inputs if item.positions)


def test_a_text_is_tried_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"the": 0, "of": 1, "weights": 2, "[UNK]": 3, "a": 49, "model": 60}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    inputs, notes = make_inputs(CONFIG, tmp_path, windows=[])
    text = next(item for item in inputs if item.name == "text")
    assert not notes and set(text.ids) <= {0, 1, 2, 3, 49}  # `model` is no id of this vocabulary
    (tmp_path / "tokenizer.json").write_text("{")
    inputs, notes = make_inputs(CONFIG, tmp_path, windows=[])
    assert [item.name for item in inputs].count("text") == 0
    assert "cannot be read" in notes[0]


@pytest.mark.parametrize("wrong", [None, 0, -3, "50", True, 1.5])
def test_a_config_without_a_vocabulary_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="vocab_size"):
        make_inputs({**CONFIG, "vocab_size": wrong}, None, windows=[])


def test_inputs_come_back_from_a_dump(tmp_path: Path) -> None:
    inputs = [Input("one", (1, 2)), Input("far", (3, 4), (0, 90))]
    write_inputs(inputs, tmp_path)
    assert read_inputs(tmp_path) == inputs


@pytest.mark.parametrize(
    "content",
    [
        None, "", "[]", "{}", '{"inputs": []}', '{"inputs": [{"name": "x", "ids": []}]}',
        json.dumps({"inputs": [{"name": "x", "ids": [1, 2], "positions": [0]}]}),
        json.dumps({"inputs": [{"name": "x", "ids": ["a"], "positions": None}]}),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_dump_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "inputs.json").write_text(content)
    with pytest.raises(CorruptError):
        read_inputs(tmp_path)
