"""The contract: a corpus that goes through MindRecord gives the bits of the rows that the JSONL file gave.

MindSpore runs in one child process for all of this file; what it found is compared here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from arithmetic import run_check
from tiny_corpora import Data, corpus_of

from ckptkit.errors import UsageError
from ckptkit.train.corpus import open_corpus
from ckptkit.train.mindrecord import write_mindrecord


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the client once."""
    return dict(run_check("mindrecord_client.py", "together", str(tmp_path_factory.mktemp("mindrecord"))))


@pytest.mark.frameworks
def test_rows_are_equal_bit_for_bit(found: dict[str, Any]) -> None:
    """Packed and padded, rows of several lengths, masks, and more documents than MindSpore is given at a time."""
    for name, (jsonl, mindrecord) in found["digests"].items():
        assert jsonl == mindrecord, name
    assert found["fingerprints"][0] == found["fingerprints"][1]
    assert len({jsonl for jsonl, _ in found["digests"].values()}) == len(found["digests"]), "the control: all differ"
    assert found["statistics"][0] == found["statistics"][1]


@pytest.mark.frameworks
def test_nothing_is_left_beside_the_two_files(found: dict[str, Any]) -> None:
    assert found["listing"] == ["corpus.mindrecord", "corpus.mindrecord.db"]


@pytest.mark.frameworks
def test_both_files_may_be_moved_together(found: dict[str, Any]) -> None:
    assert found["moved"] == found["fingerprints"][0]


@pytest.mark.frameworks
def test_a_file_of_others_needs_nothing_but_its_ids(found: dict[str, Any]) -> None:
    assert found["foreign"] == [[1, 2, 3], [4, 5, 6, 7]]
    assert found["foreign_weights"] == [1, 1, 0, 0, 1, 1, 0, 0]


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("case", "kind", "what"),
    [
        ("no index", "UsageError", "has no index: there is no `corpus.mindrecord.db` beside it"),
        ("renamed", "CorruptError", "cannot be read"),
        ("cut", "CorruptError", "cannot be read"),
        ("no MindRecord", "CorruptError", "cannot be read"),
        ("one bit", "CorruptError", "is not what was written: its digest differs"),
        ("other column", "UsageError", "has no column `tokens`"),
        ("small vocab", "UsageError", "record 1 of"),
        ("there already", "UsageError", "exists already"),
        ("no folder", "ResourceError", "cannot write"),
    ],
)
def test_a_mindrecord_that_cannot_be_is_refused_in_words(
    found: dict[str, Any], case: str, kind: str, what: str
) -> None:
    error = found["errors"][case]
    assert error["kind"] == kind
    assert what in error["what"]
    assert error["hint"]
    assert "\n" not in error["what"]


def test_a_mindrecord_that_is_not_there_is_no_matter_of_mindspore(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_corpus(Data(tmp_path / "gone.mindrecord"), tmp_path, 9)
    (tmp_path / "lone.mindrecord").write_bytes(b"MindRecord")
    with pytest.raises(UsageError, match="has no index") as caught:
        open_corpus(Data(tmp_path / "lone.mindrecord"), tmp_path, 9)
    assert "copy both" in caught.value.hint


def test_a_format_that_the_name_contradicts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.mindrecord").touch()
    with pytest.raises(UsageError, match="is MindRecord, and `data.format` is `text`"):
        open_corpus(Data(tmp_path / "a.mindrecord", format="text"), tmp_path, 9)


def test_a_name_without_the_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not end in `\.mindrecord`"):
        write_mindrecord(corpus_of([[1, 2]]), tmp_path / "a.bin")


def test_a_missing_mindspore_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mindspore", *(name for name in sys.modules if name.startswith("mindspore."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="a MindRecord file needs the package `mindspore`") as caught:
        write_mindrecord(corpus_of([[1, 2]]), tmp_path / "a.mindrecord")
    assert "JSONL" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
