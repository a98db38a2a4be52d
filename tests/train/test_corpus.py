"""The contract: every line of a file becomes tokens in rows, or is counted, or is an error with its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_corpora import A, B, C, Data, corpus_of, open_rows, write_lines

from ckptkit.errors import CkptkitError, CorruptError, UsageError
from ckptkit.train import jsonl
from ckptkit.train.corpus import Corpus, first_rows, open_corpus

ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7], "loss_mask": [0, 0, 1, 1]}, {"input_ids": [8, 9]}]


def ids(corpus: Corpus) -> list[list[int]]:
    """Return the ids of each document."""
    return [corpus.documents.document(index)[0].tolist() for index in range(len(corpus.documents))]


def weights(tmp_path: Path, row: dict[str, Any]) -> list[int]:
    return [int(weight) for weight in open_rows(tmp_path, [row], seq_length=len(row["input_ids"])).row(0).weights_T]


def test_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    corpus = open_rows(tmp_path, ROWS)
    assert ids(corpus) == [row["input_ids"] for row in ROWS]
    assert corpus.statistics.targets == 2 + 2 + 1


def test_a_loss_mask_and_labels_say_which_tokens_count(tmp_path: Path) -> None:
    """Both are at the place of the token that is predicted, and weights at the place before it."""
    assert weights(tmp_path, {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 0]}) == [0, 1, 0, 0]
    assert weights(tmp_path, {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}) == [0, 1, 1, 0]
    assert weights(tmp_path, {"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 1]}) == [1, 1, 1, 0]
    assert weights(tmp_path, {"input_ids": [5, 6, 7, 8], "source": "other keys are no matter"}) == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"input_ids": "1 2"}, "no list of whole numbers"),
        ({"input_ids": [1, 2.0]}, "no list of whole numbers"),
        ({"input_ids": [1, True]}, "no list of whole numbers"),
        ({"input_ids": [[1, 2]]}, "no list of whole numbers"),
        ({"input_ids": None}, "no list of whole numbers"),
        ({"input_ids": [1, 2**40]}, "no 32 bits hold"),
        ({"input_ids": [1, -(10**30)]}, "no 32 bits hold"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 ids and 1 numbers in `loss_mask`"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "other numbers than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1], "labels": [1, 2]}, "`loss_mask` and `labels`"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "neither its `input_ids` nor -100"),
        ({"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}, "`attention_mask` with zeros"),
    ],
)
def test_ids_and_masks_that_are_none_are_refused_with_their_line(tmp_path: Path, row: Any, what: str) -> None:
    with pytest.raises(CorruptError, match=what) as caught:
        open_rows(tmp_path, [{"input_ids": [1, 2]}, row])
    assert caught.value.what.startswith(f"line 2 of `{tmp_path / 'text.jsonl'}`")
    assert caught.value.hint


def test_ids_outside_of_the_embedding_are_refused_with_their_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 2 of .* has the token 10, and the embedding has 10 rows"):
        open_rows(tmp_path, [{"input_ids": [1, 2]}, {"input_ids": [9, 10]}], vocab=10)
    with pytest.raises(UsageError, match=r"line 1 of .* has the token -100, and ids start at 0"):
        open_rows(tmp_path, [{"input_ids": [1, -100]}], vocab=10)
    assert open_rows(tmp_path, [{"input_ids": [0, 9]}], vocab=10).statistics.targets == 1


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ({"input_ids": [1, 2]}, "line 2 .* is of the kind `ids`, and those before it are `text`"),
        ({"prompt": "a", "response": "b"}, "line 2 .* is of the kind `prompt`, and those before it are `text`"),
        ({"prompt": "a"}, "line 2 .* has neither `text`"),
        ({"text": "a", "input_ids": [1]}, "line 2 .* could be read as `text` or as `ids`"),
        ({}, "line 2 .* has neither `text`"),
    ],
)
def test_lines_of_several_kinds_are_refused(tmp_path: Path, second: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        open_rows(tmp_path, [{"text": "a b"}, second])
    assert "data." in caught.value.hint


def test_a_format_that_is_said_settles_which_keys_count(tmp_path: Path) -> None:
    both = [{"text": "a b", "input_ids": [4, 5, 6]}, {"input_ids": [7, 8]}]
    assert ids(open_rows(tmp_path, both, format="ids")) == [[4, 5, 6], [7, 8]]
    with pytest.raises(UsageError, match="line 2 .* has no `text`, and `data.format` is `text`"):
        open_rows(tmp_path, both, format="text")


def test_keys_may_have_other_names(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": " b"}]
    with pytest.raises(UsageError, match="line 1 .* has neither `text`") as caught:
        open_rows(tmp_path, rows)
    assert caught.value.items == ("it has `instruction`", "it has `output`")
    assert ids(open_rows(tmp_path, rows, prompt_key="instruction", response_key="output")) == [[A, B, 2]]
    assert ids(open_rows(tmp_path, [{"tokens": [A, C]}], ids_key="tokens")) == [[A, C]]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": "a', "is not JSON"),
        ('{"text": "a b"} {"text": "c"}', "is not JSON"),
        ('{"text": "a", "text": "b"}', "has the key `text` twice"),
        ("[" * 100_000, "is not JSON"),
        ('["a"]', "is not a JSON object"),
        ("12", "is not a JSON object"),
        ('{"text": 12}', "has a `text` that is no text"),
        ('{"text": null}', "has a `text` that is no text"),
        (r'{"text": "a \ud83d"}', "is not Unicode"),
        ("\x00\x00", "is not JSON"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(CorruptError, match=what) as caught:
        open_rows(tmp_path, [{"text": "a b"}, "", line])
    assert caught.value.what.startswith(f"line 3 of `{tmp_path / 'text.jsonl'}`")


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_bytes(b'{"input_ids": [1, 2]}\n{"text": "caf\xe9"}\n')
    with pytest.raises(CorruptError, match="line 2 .* is not JSON: 'utf-8' codec"):
        open_corpus(Data(file), tmp_path, 9)


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_LONGEST_LINE", 1 << 20)
    with pytest.raises(CorruptError, match="line 2 .* is longer than 1 MiB"):
        open_rows(tmp_path, [{"input_ids": [1, 2]}, {"input_ids": [1] * 400_000}])


@pytest.mark.parametrize(
    ("head", "what"),
    [
        ('{"text": "a"}'.encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
        (b'\xef\xbb\xbf [\n{"text": "a"}]', "one JSON list"),
    ],
)
def test_a_file_of_another_kind_is_told_by_its_first_bytes(tmp_path: Path, head: bytes, what: str) -> None:
    file = tmp_path / "text.jsonl"
    file.write_bytes(head)
    with pytest.raises(UsageError, match=what) as caught:
        open_corpus(Data(file), tmp_path, 9)
    assert caught.value.hint


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_corpus(Data(tmp_path / "gone.jsonl"), tmp_path, 9)
    with pytest.raises(UsageError, match="is a folder"):
        open_corpus(Data(tmp_path), tmp_path, 9)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(CorruptError, match="is empty"):
        open_corpus(Data(tmp_path / "empty.jsonl"), tmp_path, 9)
    (tmp_path / "lfs.jsonl").write_text("version https://git-lfs.github.com/spec/v1\nsize 12\n")
    with pytest.raises(CorruptError, match="git-lfs pointer"):
        open_corpus(Data(tmp_path / "lfs.jsonl"), tmp_path, 9)
    with pytest.raises(UsageError, match="has no lines"):
        open_corpus(Data(write_lines(tmp_path / "blank.jsonl", ["", "  "])), tmp_path, 9)


def test_a_file_without_a_row_to_learn_from_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": []}, {"input_ids": [1]}, {"input_ids": [1, 2], "loss_mask": [1, 0]}]
    with pytest.raises(UsageError, match="gives no row to learn from") as caught:
        open_rows(tmp_path, rows)
    assert [item.partition(" ")[0] for item in caught.value.items] == ["1", "2"]


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    found = open_rows(tmp_path, [{"text": ""}, {"text": "a b"}, {"text": " \n"}]).statistics
    assert (found.documents, found.empty, found.untaught) == (1, 2, 0)
    found = open_rows(tmp_path, [{"prompt": "a", "response": ""}, {"prompt": "", "response": "b"}]).statistics
    assert (found.documents, found.empty, found.untaught) == (1, 1, 0)
    found = open_rows(tmp_path, [{"input_ids": []}, {"input_ids": [1]}, {"input_ids": [1, 2]}]).statistics
    assert (found.documents, found.empty, found.untaught) == (1, 1, 1)
    assert [line.partition(" ")[0] for line in found.lines()] == ["1", "1", "1"]


def test_what_an_editor_leaves_in_a_file_is_passed_over_and_said(tmp_path: Path) -> None:
    plain = open_rows(tmp_path, ROWS)
    assert plain.statistics.notes == ()
    text = b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(row).encode() for row in ROWS)
    (tmp_path / "odd.jsonl").write_bytes(text)
    odd = open_corpus(Data(tmp_path / "odd.jsonl"), tmp_path, 100)
    assert odd.fingerprint == plain.fingerprint
    assert [word in note for note, word in zip(odd.statistics.notes, ("byte order", "Windows", "2 blank"), strict=True)]
    assert all("passed over" in note for note in odd.statistics.notes)


@pytest.mark.parametrize(
    "other",
    [
        [{"input_ids": [1, 2, 4]}, *ROWS[1:]],
        [ROWS[0], {"input_ids": [4, 5, 6, 7], "loss_mask": [0, 1, 1, 1]}, ROWS[2]],
        [ROWS[1], ROWS[0], ROWS[2]],
        ROWS[:2],
        [{"input_ids": [1, 2]}, {"input_ids": [3, 4, 5, 6, 7], "loss_mask": [1, 0, 0, 1, 1]}, ROWS[2]],
    ],
)
def test_another_corpus_has_another_fingerprint(tmp_path: Path, other: Any) -> None:
    assert open_rows(tmp_path, ROWS).fingerprint != open_rows(tmp_path, other).fingerprint


def test_the_fingerprint_is_of_rows_and_not_of_the_file(tmp_path: Path) -> None:
    first = open_rows(tmp_path, ROWS)
    spaced = [json.dumps(row, indent=None, separators=(" , ", " : ")) for row in ROWS]
    assert open_rows(tmp_path, [*spaced, {"input_ids": []}]).fingerprint == first.fingerprint
    assert len(first.fingerprint) == 32
    assert open_rows(tmp_path, ROWS, seq_length=9).fingerprint != first.fingerprint
    assert open_rows(tmp_path, ROWS, packing=False).fingerprint != first.fingerprint


def test_the_fingerprint_of_a_version_is_that_of_every_later_one() -> None:
    """Frozen: a run that was started before an upgrade must find its corpus again."""
    assert corpus_of([[1, 2, 3], [4, 5, 6, 7]], 8).fingerprint == "6a17a13d904c3e85bfde1fb1e203b43a"


def test_an_evaluation_set_is_read_by_the_same_settings(tmp_path: Path) -> None:
    train = open_rows(tmp_path, ROWS)
    held_out = write_lines(tmp_path / "eval.jsonl", [{"input_ids": [3, 4]}])
    found = open_corpus(Data(tmp_path / "text.jsonl"), tmp_path, 100, path=held_out)
    assert (ids(found), found.seq_length) == ([[3, 4]], train.seq_length)
    with pytest.raises(UsageError, match="no such file: .* \\(`eval.path`\\)"):
        open_corpus(Data(tmp_path / "text.jsonl"), tmp_path, 100, path=tmp_path / "gone")


def test_the_first_rows_of_a_corpus_are_those_of_the_corpus() -> None:
    corpus = corpus_of([[n, n + 1, n + 2] for n in range(20)], 4)
    part = first_rows(corpus, 3)
    assert (len(part), len(corpus)) == (3, 20)
    assert all(part.row(n).ids_T.tolist() == corpus.row(n).ids_T.tolist() for n in range(3))
    assert part.statistics.targets == 6
    assert part.fingerprint == corpus_of([[n, n + 1, n + 2] for n in range(3)], 4).fingerprint
    assert first_rows(corpus, 99).fingerprint == corpus.fingerprint


def test_a_row_that_is_not_there_is_an_error() -> None:
    corpus = corpus_of([[1, 2]], 4)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            corpus.row(index)


def test_rows_cannot_change_the_corpus() -> None:
    corpus = corpus_of([[1, 2, 3]], 4)
    corpus.row(0).ids_T[:] = 9
    assert corpus.row(0).ids_T.tolist() == [1, 2, 3, 0]
    with pytest.raises(ValueError):
        corpus.documents.ids_N[0] = 9


def test_a_token_takes_five_bytes() -> None:
    """Not the 8 of a pointer in a list, and not the 28 of a Python int beside it."""
    documents = corpus_of([list(range(1000))] * 3, 100).documents
    assert documents.ids_N.nbytes + documents.learned_N.nbytes == 5 * 3000
    assert documents.ids_N.dtype == np.int32


def test_every_error_says_what_to_do(tmp_path: Path) -> None:
    for row in ({"text": 1}, {"input_ids": [1, 200]}, {"input_ids": [-1]}, {"input_ids": []}, {"other": 1}):
        with pytest.raises(CkptkitError) as caught:
            open_rows(tmp_path, [row])
        assert caught.value.hint
