"""The contract: a document has each special token once, and the loss is on the response and its end alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpora import AB, END, START, A, B, C, D, Data, open_rows, write_model

from ckptkit.errors import CorruptError, UsageError
from ckptkit.train.corpus import Corpus
from ckptkit.train.tokenizing import TextTokenizer, Tokenized, open_tokenizer

BOTH = ("<s>", "$A", "</s>")


def tokenizer(folder: Path, *, eos: bool = True, **more: Any) -> TextTokenizer:
    return open_tokenizer(Data(folder / "none", eos=eos), write_model(folder, **more))


def learned(made: Tokenized) -> list[int]:
    """Return the ids that count in the loss."""
    return [token for token, counts in zip(made.ids, made.learned, strict=True) if counts]


@pytest.mark.parametrize(
    ("template", "text", "ids"),
    [
        ((), "a b", [A, B, END]),
        ((), "a b </s>", [A, B, END]),
        ((), "<s> a b", [START, A, B, END]),
        (("<s>", "$A"), "a b", [START, A, B, END]),
        (("<s>", "$A"), "<s> a b", [START, A, B, END]),
        (("<s>", "$A"), "a <s> b", [START, A, START, B, END]),
        (BOTH, "a b", [START, A, B, END]),
        (BOTH, "<s> a b </s>", [START, A, B, END]),
        (BOTH, "a b </s> </s>", [START, A, B, END, END]),
    ],
)
def test_special_tokens_are_not_doubled(tmp_path: Path, template: Any, text: str, ids: list[int]) -> None:
    made = tokenizer(tmp_path, template=template).document(text)
    assert (made.ids, made.joined) == (ids, False)
    assert made.learned[1:] == [True] * (len(ids) - 1)  # nothing predicts the first


def test_tokens_that_the_library_alone_would_double_are_seen(tmp_path: Path) -> None:
    """The control: this is what the tests above guard against."""
    made = tokenizer(tmp_path, template=BOTH)
    assert made.tokenizer.encode("<s> a </s>").ids == [START, START, A, END, END]


def test_without_eos_a_document_is_as_the_tokenizer_makes_it(tmp_path: Path) -> None:
    assert tokenizer(tmp_path, eos=False).document("a b").ids == [A, B]
    assert tokenizer(tmp_path, eos=False, template=BOTH).document("a b").ids == [START, A, B, END]


@pytest.mark.parametrize(("template", "start"), [((), []), (BOTH, [START]), (("<s>", "$A"), [START])])
def test_the_loss_is_on_the_response_and_its_end(tmp_path: Path, template: Any, start: list[int]) -> None:
    made = tokenizer(tmp_path, template=template).document(" c d", "a b")
    assert made.ids == [*start, A, B, C, D, END]
    assert learned(made) == [C, D, END]
    assert not made.joined


def test_a_prompt_that_has_its_start_token_already_keeps_its_mask(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, template=BOTH).document(" c", "<s> a")
    assert (made.ids, learned(made), made.joined) == ([START, A, C, END], [C, END], False)


def test_without_a_prompt_everything_counts(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, template=BOTH).document("a b", "")
    assert learned(made) == [A, B, END]


def test_a_token_over_the_border_counts_and_is_told(tmp_path: Path) -> None:
    made = tokenizer(tmp_path).document("b c", "d a")
    assert (made.ids, learned(made), made.joined) == ([D, AB, C, END], [AB, C, END], True)


def test_how_many_lines_have_a_token_over_the_border_is_noted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": " b"}]
    notes = open_rows(tmp_path, rows).statistics.notes
    assert [note for note in notes if note.startswith("1 documents have other tokens at the border")]
    assert not [note for note in open_rows(tmp_path, rows[1:]).statistics.notes if "border" in note]


def weighted(corpus: Corpus) -> list[int]:
    row = corpus.row(0)
    return row.targets_T[row.weights_T == 1].tolist()


def test_rows_have_the_weights_of_prompt_and_response(tmp_path: Path) -> None:
    corpus = open_rows(tmp_path, [{"prompt": "a b", "response": " c d"}])
    assert corpus.row(0).ids_T.tolist() == [A, B, C, D, END, 0, 0, 0]
    assert corpus.row(0).weights_T.tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert weighted(corpus) == [C, D, END]


def test_multi_byte_text_has_its_border_in_characters(tmp_path: Path) -> None:
    """Offsets are characters: bytes would put the border elsewhere."""
    made = tokenizer(tmp_path).document(" c", "\u4e2d\u6587 \U0001f642 a")
    assert learned(made) == [C, END]


CONFIG, NAMED, MAP, GENERATION = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Return a byte-level BPE tokenizer, as GPT-2 and Llama 3 have it: it knows every text, and leading spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["the answer is 42: the end", " caf\u00e9 \u4e2d\u6587", "Answer: Paris  is it"] * 3
    made.train_from_iterator(text, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    folder = tmp_path_factory.mktemp("bytes")
    made.save(str(folder / "tokenizer.json"))
    return open_tokenizer(Data(folder / "none", eos=False), folder)


PIECES = st.text(st.sampled_from("the answr42: \n\u00e9\u4e2d\u6587\U0001f642"), max_size=12)


@settings(deadline=None, max_examples=300)
@given(prompt=PIECES, response=PIECES)
def test_the_tokens_with_loss_spell_the_response(byte_level: TextTokenizer, prompt: str, response: str) -> None:
    made = byte_level.document(response, prompt)
    decode = byte_level.tokenizer.decode
    assert decode(made.ids) == prompt + response
    with_loss = decode(learned(made))
    assert with_loss == response or (made.joined and (prompt + response).endswith(with_loss)), (
        "or reach over the border"
    )
    assert len(learned(made)) >= (response != "")


def test_a_space_at_the_end_of_a_prompt_joins_the_response(byte_level: TextTokenizer) -> None:
    """Byte-level tokens begin with a space; offsets leave it out, so the border alone would not tell."""
    made = byte_level.document("Paris", "Answer: ")
    assert made.joined
    assert byte_level.tokenizer.decode(learned(made)) == " Paris"
    assert not byte_level.document(" Paris", "Answer:").joined


@pytest.mark.parametrize(
    ("files", "eos", "where"),
    [
        ({NAMED: {"eos_token": "d"}, CONFIG: {"eos_token_id": A}}, D, NAMED),
        ({NAMED: {"eos_token": {"content": "d"}}}, D, NAMED),
        ({NAMED: {"eos_token": None}, CONFIG: {"eos_token_id": A}}, A, CONFIG),
        ({MAP: {"eos_token": "c"}, CONFIG: {"eos_token_id": A}}, C, MAP),
        ({CONFIG: {"eos_token_id": [B, A]}, GENERATION: {"eos_token_id": A}}, B, CONFIG),
        ({CONFIG: {"eos_token_id": None}, GENERATION: {"eos_token_id": 0}}, 0, GENERATION),
    ],
)
def test_the_end_token_is_that_of_the_models_files(tmp_path: Path, files: Any, eos: int, where: str) -> None:
    write_model(tmp_path, eos=None)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    made = open_tokenizer(Data(tmp_path / "none"), tmp_path)
    assert (made.eos, made.eos_from) == (eos, where)


def test_the_files_beside_the_tokenizer_come_before_those_of_the_model(tmp_path: Path) -> None:
    own, model = write_model(tmp_path / "own", eos=None), write_model(tmp_path / "model")
    data = Data(tmp_path / "none", tokenizer=own)
    assert open_tokenizer(data, model).eos == END
    (own / "config.json").write_text(json.dumps({"eos_token_id": A}))
    assert (open_tokenizer(data, model).eos, open_tokenizer(data, model).file) == (A, own / "tokenizer.json")


def test_a_model_without_an_end_token_is_refused_unless_none_is_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, eos=None)
    with pytest.raises(UsageError, match="no file says which token ends a document") as caught:
        open_tokenizer(Data(tmp_path / "none"), tmp_path)
    assert "data.eos: false" in caught.value.hint
    assert open_tokenizer(Data(tmp_path / "none", eos=False), tmp_path).eos is None


def test_an_end_token_that_the_tokenizer_does_not_have_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, eos="<|gone|>")
    with pytest.raises(UsageError, match=r"the end token `<\|gone\|>` of .* is no token"):
        open_tokenizer(Data(tmp_path / "none"), tmp_path)


def test_tokens_that_the_embedding_does_not_have_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 2 .* has the token 6, and the embedding has 6 rows"):
        open_rows(tmp_path, [{"text": "a b c"}, {"text": "a d"}], vocab=6)


def test_text_without_a_tokenizer_is_refused_and_ids_are_not(tmp_path: Path) -> None:
    elsewhere = tmp_path / "no_model"
    with pytest.raises(UsageError, match=r"no such file: .*tokenizer\.json") as caught:
        open_tokenizer(Data(tmp_path / "none"), elsewhere)
    assert "data.tokenizer" in caught.value.hint
    (tmp_path / "tokenizer.json").write_text("damaged")
    assert open_rows(tmp_path, [{"input_ids": [1, 2]}]).statistics.targets == 1


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0"', "\x00"])
def test_a_tokenizer_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CorruptError, match=r"tokenizer\.json` cannot be read"):
        open_tokenizer(Data(tmp_path / "none"), tmp_path)


def test_a_missing_package_is_said_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # what Python itself takes for a package that is not there
    with pytest.raises(UsageError, match="`tokenizers` is not installed") as caught:
        open_tokenizer(Data(tmp_path / "none"), write_model(tmp_path))
    assert "pip install" in caught.value.hint


def test_padding_and_truncation_of_the_tokenizer_are_no_text(tmp_path: Path) -> None:
    """Both stand in many a tokenizer.json, for batches; a document would be cut, or end in padding."""
    made = tokenizer(
        tmp_path,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 6}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<unk>"},
    )  # fmt: skip
    assert made.document("a b c").ids == [A, B, C, END]
