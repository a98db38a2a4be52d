"""The contract: a trained model on a real text is sane, and a broken one is not, with the broken weights named.

A model with random weights knows nothing, so it must fail, however right its conversion is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.run import smollm2_folder
from runner_jobs import config_of, ids_of, make_folder

from ckptkit import CorruptError, UsageError, convert
from ckptkit.commands.sanity import sanity
from ckptkit.commands.sides import Asked
from ckptkit.report import Report
from ckptkit.verification.sanity import make_text_inputs, read_lines, token_losses
from tests.rank_results import Tensors, read_whole, write_whole

SENTENCES = (
    "Water boils at a lower temperature on a high mountain, because the air pressure there is lower than at the sea.",
    "The museum opens at nine in the morning and closes at five in the afternoon. On Mondays it is closed all day.",
    "She put the kettle on, took two cups from the shelf, and asked him whether he wanted milk or sugar in his tea.",
    "In spring the farmers plant their seeds, and in autumn they bring in the harvest before the first snow falls.",
)
WORDS = ("<unk>", "the", "water", "boils", "sea", "is", "cold")


def write_text(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_tokenizer(folder: Path, **more: Any) -> Path:
    """Write a tokenizer.json of whole words."""
    rules = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(WORDS)}, "unk_token": "<unk>"},
    }
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(rules | more))
    return file


# The text


def test_each_kind_of_line_becomes_tokens(tmp_path: Path) -> None:
    rows = ({"text": "the water boils"}, {"prompt": "the ", "response": "sea"}, {"input_ids": [5, 6, 5, 6, 5]})
    file = write_text(tmp_path / "text.jsonl", *rows)
    tokenizer = write_tokenizer(tmp_path)
    inputs, notes = make_text_inputs(file, read_lines(file), tokenizer, vocab=7, max_tokens=4)
    assert [(item.name, item.ids) for item in inputs] == [
        ("line 1", (1, 2, 3)), ("line 2", (1, 4)), ("line 3", (5, 6, 5, 6)),
    ]  # fmt: skip
    assert len(notes) == 1 and "1 lines are longer than 4 tokens" in notes[0]


def test_no_more_lines_are_read_than_asked_and_empty_ones_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('\ufeff\n{"input_ids": [1, 2]}\n\n{"input_ids": [3, 4]}\n{broken\n'.removeprefix("\ufeff"))
    assert [line.number for line in read_lines(file, 2)] == [2, 4]
    with pytest.raises(CorruptError, match="line 5 of"):
        read_lines(file, 3)


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"input_ids": [1, 2]}')
    assert read_lines(tmp_path / "text.jsonl")[0].ids == (1, 2)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b'{"text": "cut', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b'"text"', "is not a JSON object"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "has neither"),
        (b'{"prompt": "alone"}', "has neither"),
        (b'{"text": 5}', "`text` that is no text"),
        (b'{"input_ids": [1, 2.5]}', "no list of whole numbers"),
        (b'{"input_ids": [1, true]}', "no list of whole numbers"),
        (b'{"input_ids": "1 2"}', "no list of whole numbers"),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}", "is not JSON"),
        (b'{"text": "' + b"a" * (17 << 20) + b'"}', "is longer than 16 MiB"),
    ],
)
def test_a_damaged_line_is_refused_by_its_number(tmp_path: Path, line: bytes, word: str) -> None:
    file = tmp_path / "text.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorruptError, match=f"line 2 of .*{word}"):
        read_lines(file)
    assert len(read_lines(file, 1)) == 1  # the control: it is that line


def test_half_a_character_is_refused_by_its_line(tmp_path: Path) -> None:
    file = write_text(tmp_path / "text.jsonl", {"text": "the sea"}, {"text": "the \ud83d"})
    with pytest.raises(CorruptError, match="line 2 of .*not Unicode"):
        make_text_inputs(file, read_lines(file), write_tokenizer(tmp_path), vocab=7, max_tokens=9)


@pytest.mark.parametrize("ids", [[1, 7], [-1, 2]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, ids: list[int]) -> None:
    file = write_text(tmp_path / "text.jsonl", {"input_ids": [1, 2]}, {"input_ids": ids})
    lines = read_lines(file)
    with pytest.raises(UsageError, match="line 2 of .* has token -?[17], and the vocabulary has 7"):
        make_text_inputs(file, lines, None, vocab=7, max_tokens=9)
    assert len(make_text_inputs(file, lines[:1], None, vocab=7, max_tokens=9)[0]) == 1


def test_a_text_without_a_tokenizer_is_refused_and_ids_are_not(tmp_path: Path) -> None:
    file = write_text(tmp_path / "text.jsonl", {"input_ids": [1, 2]}, {"text": "the sea"})
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        make_text_inputs(file, read_lines(file), None, vocab=7, max_tokens=9)
    assert make_text_inputs(file, read_lines(file, 1), None, vocab=7, max_tokens=9)[0][0].ids == (1, 2)


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    file = write_text(tmp_path / "text.jsonl", {"text": "the sea"})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"tokenizer\.json` cannot be read"):
        make_text_inputs(file, read_lines(file), tmp_path / "tokenizer.json", vocab=7, max_tokens=9)


def test_padding_and_truncation_of_the_tokenizer_are_no_text(tmp_path: Path) -> None:
    """Both stand in many a tokenizer.json, for batches."""
    shape = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>", "pad_to_multiple_of": None}
    tokenizer = write_tokenizer(
        tmp_path, padding={"strategy": {"Fixed": 8}, **shape},
        truncation={"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    )  # fmt: skip
    file = write_text(tmp_path / "text.jsonl", {"text": "the water boils"})
    assert make_text_inputs(file, read_lines(file), tokenizer, vocab=7, max_tokens=9)[0][0].ids == (1, 2, 3)


def test_a_line_of_one_token_is_passed_over_with_a_note_unless_it_is_the_only_one(tmp_path: Path) -> None:
    file = write_text(tmp_path / "text.jsonl", {"input_ids": [1]}, {"input_ids": [1, 2]})
    inputs, notes = make_text_inputs(file, read_lines(file), None, vocab=7, max_tokens=9)
    assert [item.name for item in inputs] == ["line 2"] and "line 1 has 1 tokens" in notes[0]
    with pytest.raises(UsageError, match="no line of .* has two tokens"):
        make_text_inputs(file, read_lines(file, 1), None, vocab=7, max_tokens=9)


def test_a_file_without_lines_and_none_at_all_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("\n \n")
    with pytest.raises(UsageError, match="has no lines"):
        read_lines(tmp_path / "text.jsonl")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError):
            read_lines(path)


# The loss


def test_the_loss_is_the_cross_entropy_of_the_next_token() -> None:
    """150 positions are three blocks. Both ways are float64; a softmax written out differs by a few roundings."""
    rng = np.random.default_rng(0)
    logits_TV = rng.normal(0, 5, (150, 30)).astype(np.float32)
    ids = rng.integers(0, 30, 150).tolist()
    wide_TV = logits_TV.astype(np.float64)
    chances_TV = np.exp(wide_TV) / np.exp(wide_TV).sum(1, keepdims=True)
    wanted = [-np.log(chances_TV[t, ids[t + 1]]) for t in range(149)]
    found = token_losses(logits_TV, ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    shifted = [-np.log(chances_TV[t, ids[t]]) for t in range(149)]  # the control: the token itself, and not the next
    assert not np.allclose(found, shifted)


def test_large_logits_do_not_overflow_and_equal_ones_give_ln_of_the_vocabulary() -> None:
    big = np.full((3, 8), 3e38, np.float32)
    np.testing.assert_allclose(token_losses(big, [0, 1, 2]), log(8), rtol=1e-15)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_makes_the_loss_nan(odd: float) -> None:
    logits_TV = np.zeros((3, 4), np.float32)
    logits_TV[1, 3] = odd
    found = token_losses(logits_TV, [0, 1, 2])
    assert np.isfinite(found[0]) and np.isnan(found[1])


def test_a_loss_moves_by_no_more_than_twice_the_largest_change_of_a_logit() -> None:
    """The bound that compares two sides; the worst case comes near to it, so half of it would be wrong."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        logits_TV = rng.normal(0, 3, (20, 40)).astype(np.float32)
        moved_TV = logits_TV + rng.uniform(-0.1, 0.1, logits_TV.shape).astype(np.float32)
        ids = rng.integers(0, 40, 20).tolist()
        gap = np.abs(token_losses(moved_TV, ids) - token_losses(logits_TV, ids)).max()
        assert gap <= 2 * np.abs(moved_TV.astype(np.float64) - logits_TV).max()
    worst = np.zeros((2, 4), np.float32)
    away = np.full((2, 4), 0.1, np.float32)
    away[:, 1] = -0.1
    assert token_losses(away, [0, 1])[0] - token_losses(worst, [0, 1])[0] > 0.14


# The command, on models that know nothing


@dataclass(frozen=True, slots=True)
class Room:
    """A random HuggingFace model, its conversion, and a text of ids."""

    hf: Path
    ms: Path
    text: Path


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    folder = tmp_path_factory.mktemp("sanity")
    hf = make_folder(folder / "hf", config_of("llama", num_hidden_layers=3))
    convert(hf, folder / "ms", to_dialect="mindformers")
    rows = [{"input_ids": ids_of(40, seed=seed)} for seed in range(3)]
    return Room(hf, folder / "ms", write_text(folder / "text.jsonl", *rows))


def changed(folder: Path, target: Path, change: Callable[[Tensors], None], config: Mapping[str, Any] = {}) -> Path:
    """Write a HuggingFace folder with `change` made to its tensors, and other words in its config.json."""
    tensors = {name: array.copy() for name, array in read_whole(folder).items()}
    change(tensors)
    target.mkdir()
    write_whole(target / "model.safetensors", tensors)
    said = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(said | config))
    if (folder / "tokenizer.json").is_file():
        (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return target


def named(report: Report, side: str = "a") -> dict[tuple[str, str], list[str]]:
    """Return the names of what looks odd, by severity and kind."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in report.data[side]["strange"]:
        found.setdefault((line["severity"], line["kind"]), []).extend(line["names"])
    return found


@pytest.mark.frameworks
def test_a_random_model_knows_nothing_and_its_conversion_has_the_same_loss(room: Room) -> None:
    report = sanity(room.hf, room.ms, text=room.text, runner="builtin")
    assert report.exit_code == 1
    failed, data = report.data["failed"], report.data
    assert len(failed) == 2 and all("knows nothing" in line for line in failed), failed
    assert data["a"]["loss"] > log(67) - 1 and data["a"]["tokens"] == 117
    assert abs(data["a"]["loss"] - data["b"]["loss"]) <= data["bound"] < 1e-3
    assert named(report) == named(report, "b") == {}
    assert [len(data[side]["parameters"]) for side in "ab"] == [30, 30]
    assert json.loads(report.to_json())["a"]["lines"][0]["tokens"] == 39
    assert "line 3" in report.to_text() and "rounding explains" in report.to_text()


@pytest.mark.frameworks
def test_a_cast_is_no_difference_of_the_loss_and_another_norm_eps_is(room: Room, tmp_path: Path) -> None:
    convert(room.hf, tmp_path / "bf16", to_dialect="mindformers", dtype="bf16")
    report = sanity(room.hf, tmp_path / "bf16", text=room.text, runner="builtin")
    assert all("knows nothing" in line for line in report.data["failed"]), report.to_text()
    config = json.loads((room.hf / "config.json").read_text()) | {"rms_norm_eps": 1e-2}
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(config))
    odd = sanity(room.hf, tmp_path / "bf16", text=room.text, runner="builtin").data["failed"]
    for word in ("the losses of A and B are", "norm_eps is 1e-05 in A", "the logits of line 2"):
        assert any(word in line for line in odd), odd


@pytest.mark.frameworks
def test_what_is_not_loaded_is_named_and_no_loss_is_made_up(room: Room, tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.down_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.other.weight"] = tensors.pop(gone)

    report = sanity(changed(room.hf, tmp_path / "less", change), text=room.text)
    assert (report.exit_code, report.data["a"]["loss"], report.data["a"]["lines"]) == (1, None, [])
    assert named(report) == {
        ("wrong", "missing"): [gone], ("wrong", "unexpected"): ["model.layers.1.mlp.other.weight"],
    }  # fmt: skip
    assert "no loss" in report.headline and gone in report.to_text()


@pytest.mark.frameworks
def test_one_nan_is_found_in_its_parameter_and_in_the_loss(room: Room, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"

    def change(tensors: Tensors) -> None:
        tensors[name].view(np.float32)[1, 1] = np.nan

    report = sanity(changed(room.hf, tmp_path / "nan", change), text=room.text)
    assert named(report) == {("wrong", "nan"): [name]}
    assert report.data["failed"] == ["the loss of A is not finite"]
    assert json.loads(report.to_json())["a"]["loss"] is None


def test_bytes_that_are_not_what_the_manifest_promises_are_an_error(room: Room, tmp_path: Path) -> None:
    for file in room.ms.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = bytearray((tmp_path / "part0.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "part0.safetensors").write_bytes(weights)
    with pytest.raises(CorruptError, match="1 tensors of .* are not what"):
        sanity(tmp_path, text=room.text, runner="builtin")


def test_what_cannot_be_right_is_refused_before_anything_is_read(room: Room, tmp_path: Path) -> None:
    words = write_text(tmp_path / "words.jsonl", {"text": "the sea"})
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        sanity(room.hf, text=words)
    with pytest.raises(UsageError, match="`lines` is 0"):
        sanity(room.hf, text=room.text, lines=0)
    with pytest.raises(UsageError, match="no such file"):
        sanity(room.hf, text=tmp_path / "nothing.jsonl")
    far = write_text(tmp_path / "far.jsonl", {"input_ids": [1, 67]})
    with pytest.raises(UsageError, match="the vocabulary has 67"):
        sanity(room.hf, text=far)


@pytest.mark.frameworks
def test_the_tokenizer_of_the_config_folder_is_taken_where_the_sides_have_none(room: Room, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((room.hf / "config.json").read_bytes())
    write_tokenizer(tmp_path)
    words = write_text(tmp_path / "words.jsonl", {"text": "the water boils the sea is cold"})
    report = sanity(room.hf, text=words, asked=Asked(config=tmp_path))
    assert report.data["tokenizer"] == str(tmp_path / "tokenizer.json")
    assert report.data["a"]["tokens"] == 6
    assert "6 tokens are few" in report.to_text()


# A model that was trained


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = smollm2_folder()
    if folder is None:
        pytest.skip("the package that holds SmolLM2 cannot be had here")
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    asked = {"prompt": "What is the capital of France? ", "response": "The capital of France is Paris."}
    return write_text(file, *({"text": sentence} for sentence in SENTENCES), asked)


@pytest.mark.frameworks
def test_a_trained_model_and_its_conversion_are_sane(smollm2: Path, sentences: Path, tmp_path: Path) -> None:
    convert(smollm2, tmp_path / "ms", to_dialect="mindformers")
    report = sanity(smollm2, tmp_path / "ms", text=sentences, runner="builtin")
    assert report.exit_code == 0, report.to_text()
    losses = [report.data[side]["loss"] for side in "ab"]
    assert 1 < losses[0] < 5 and abs(losses[0] - losses[1]) <= report.data["bound"] < 1e-2
    assert named(report) == named(report, "b") == {}
    assert "sane, loss" in report.headline and "NOT" not in report.headline


@pytest.mark.frameworks
def test_broken_weights_of_a_trained_model_are_named(smollm2: Path, sentences: Path, tmp_path: Path) -> None:
    """Three faults at once: each is named, each as what it is, and nothing else is."""
    zero, ones = "model.layers.0.mlp.down_proj.weight", "model.layers.12.input_layernorm.weight"

    def change(tensors: Tensors) -> None:
        tensors[zero][:] = 0
        tensors[ones][:] = 0x3F80  # 1 in bfloat16
        for name in [name for name in tensors if name.startswith("model.layers.20.")]:
            tensors[name.replace(".20.", ".21.")] = tensors[name]

    report = sanity(changed(smollm2, tmp_path / "broken", change), text=sentences)
    found = named(report)
    assert report.exit_code == 1 and any("knows nothing" in line for line in report.data["failed"]), report.to_text()
    assert found.keys() == {("wrong", "zero"), ("suspect", "fresh"), ("wrong", "duplicate")}
    assert (found["wrong", "zero"], found["suspect", "fresh"]) == ([zero], [ones])
    twice = found["wrong", "duplicate"]
    assert len(twice) == 18 and {name.split(".")[2] for name in twice} == {"20", "21"}
    assert "layers 20, 21: 9 parameters are equal in every byte" in report.to_text()
