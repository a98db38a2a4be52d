"""config.json reaches transformers in words that the installed release reads; two spellings may not contradict."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.errors import UsageError
from ckptkit.verification.runners.spelling import spelled_for

Config = dict[str, Any]
V4, V5 = "4.57.1", "5.24.0"
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
BASE = {"rope_theta": 500000.0}
SAID_BY_4 = {"model_type": "llama", **BASE, "rope_scaling": {"rope_type": "yarn", **YARN}}
SAID_BY_5 = {"model_type": "llama", "rope_parameters": {"rope_type": "yarn", **BASE, **YARN}}


def test_a_plain_base_of_transformers_5_is_given_to_transformers_4_with_a_note() -> None:
    config, notes = spelled_for({"rope_parameters": {"rope_type": "default", **BASE}, "vocab_size": 5}, V4)
    assert config == {"vocab_size": 5, "rope_theta": 500000.0, "rope_scaling": None}
    assert notes == [
        "transformers 4.57.1 would read the default rotary base 10000 from this config.json: "
        "given rope_theta = 500000.0"
    ]


def test_scaling_of_transformers_5_is_given_to_transformers_4_with_a_note() -> None:
    config, notes = spelled_for(SAID_BY_5, V4)
    assert config == SAID_BY_4
    assert len(notes) == 2 and "no rotary scaling" in notes[1] and "type `yarn`" in notes[1]


@pytest.mark.parametrize("said", [SAID_BY_4, {"model_type": "llama"}, {"rope_scaling": None, **BASE}])
@pytest.mark.parametrize("version", [V4, V5])
def test_the_words_of_transformers_4_are_left_as_they_are_for_both(said: Config, version: str) -> None:
    assert spelled_for(said, version) == (said, [])


def test_the_words_of_transformers_5_mean_the_same_to_it_as_before() -> None:
    assert spelled_for(SAID_BY_5, V5) == (SAID_BY_5, [])


def test_the_default_base_needs_no_note() -> None:
    config, notes = spelled_for({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, V4)
    assert config["rope_theta"] == 10000.0 and notes == []
    config, notes = spelled_for({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, V4)
    assert config["rope_theta"] == 10000.0 and len(notes) == 1


def test_two_spellings_that_agree_become_the_one_that_is_read() -> None:
    """transformers 5 would take `rope_scaling` whole, and lose the base in the other table."""
    both = {**SAID_BY_5, "rope_scaling": {"type": "yarn", **YARN}}
    assert spelled_for(both, V5) == (SAID_BY_5, [])
    assert spelled_for({**both, **BASE}, V4) == (SAID_BY_4, [])


def test_a_base_inside_rope_scaling_is_read_by_both() -> None:
    inside = {"rope_scaling": {"type": "linear", "factor": 2.0, **BASE}}
    config, notes = spelled_for(inside, V4)
    assert config == {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert len(notes) == 1 and "500000.0" in notes[0]
    assert spelled_for(inside, V5)[0]["rope_parameters"]["rope_theta"] == 500000.0


def test_the_length_before_scaling_is_filled_in_as_transformers_5_does() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config, _ = spelled_for({"max_position_embeddings": 64, "rope_parameters": {**llama3, **BASE}}, V4)
    assert config["rope_scaling"] == {**llama3, "original_max_position_embeddings": 64}


def test_the_config_that_was_given_stays_as_it_was() -> None:
    said = {"rope_parameters": {"rope_type": "default", **BASE}}
    spelled_for(said, V4)
    assert said == {"rope_parameters": {"rope_type": "default", **BASE}}


@pytest.mark.parametrize("version", [V4, V5])
@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({**SAID_BY_5, "rope_theta": 10000.0}, ["rope_theta", "rope_parameters.rope_theta"]),
        ({**SAID_BY_5, "rope_scaling": None}, ["rope_scaling", "rope_parameters"]),
        ({**SAID_BY_5, "rope_scaling": {"type": "yarn", **YARN, "factor": 2.0}}, ["rope_scaling"]),
        ({**SAID_BY_4, "rope_parameters": {"rope_type": "default", **BASE}}, ["rope_scaling"]),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", **YARN}}, ["rope_scaling.type"]),
        ({**BASE, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 2.0}}, ["rope_scaling.rope_theta"]),
    ],
)
def test_a_contradiction_is_refused_by_name(said: Config, names: list[str], version: str) -> None:
    with pytest.raises(UsageError, match="contradicts itself") as caught:
        spelled_for(said, version)
    assert all(f"`{name}`" in caught.value.what for name in names)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"rope_parameters": [1]}, "no table"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for each type of layer"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}}, "no number"),
    ],
)
def test_tables_that_make_no_sense_are_refused(said: Config, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        spelled_for(said, V4)


def test_the_count_of_experts_has_the_name_that_transformers_4_reads() -> None:
    config, notes = spelled_for({"model_type": "qwen3_moe", "num_local_experts": 6}, V4)
    assert config == {"model_type": "qwen3_moe", "num_experts": 6} and "num_experts = 6" in notes[0]
    assert spelled_for({"model_type": "qwen3_moe", "num_local_experts": 6}, V5)[0]["num_local_experts"] == 6
    with pytest.raises(UsageError, match="num_local_experts"):
        spelled_for({"model_type": "qwen3_moe", "num_local_experts": 6, "num_experts": 7}, V4)
