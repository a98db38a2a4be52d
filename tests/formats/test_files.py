"""What every reader starts from: JSON objects without a key twice, and a collector of garbage that may pause."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from ckptkit.errors import CorruptError
from ckptkit.formats.files import paused_gc, read_json_object


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a" : 1, "a": 2}',
        '{"a" : 1, "b": {"c" : 3, "c": 4}}',
        '{"a": ":", "b": {"c": 3, "c": 4}}',
        '[{"a": {"a:": 1, "a:": 2}}]',
    ],
)
def test_a_key_with_two_values_is_refused_wherever_it_stands(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(CorruptError):
        read_json_object(tmp_path / "x.json")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '{"a:b": ":", "c": [{"d": {}}]}', "{}"])
def test_other_objects_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read_json_object(tmp_path / "x.json") == json.loads(text)


def test_what_was_made_while_collection_paused_is_not_young_afterwards() -> None:
    assert gc.isenabled()
    with paused_gc():
        assert not gc.isenabled()
        made = [[number] for number in range(100)]
    assert gc.isenabled()
    young = {id(item) for item in gc.get_objects(generation=0)}
    assert not any(id(item) in young for item in made)
    assert gc.get_freeze_count() == 0


def test_what_a_caller_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with paused_gc():
            pass
        assert gc.get_freeze_count() > count / 2 > 0  # a frozen object may end, in another thread too
    finally:
        gc.unfreeze()


def test_a_pause_within_a_pause_does_not_end_it() -> None:
    with paused_gc():
        with paused_gc():
            pass
        assert not gc.isenabled()
