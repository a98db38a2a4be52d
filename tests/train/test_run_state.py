"""The contract of `state.json`: what was saved comes back bit for bit; damage and contradictions are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ckptkit.errors import CorruptError, InternalError, UsageError
from ckptkit.train.state import dump_state, parse_state, read_state
from tests.train.tiny_steps import BATCH, ROWS, make_state

FILE = Path("state.json")


def sealed(**changed: Any) -> bytes:
    """Return a state whose seal fits, with other content than any run would write; a value of ... drops the key."""
    content = json.loads(dump_state(make_state(5))) | changed
    del content["seal"]
    text = json.dumps({key: value for key, value in content.items() if value is not ...}, indent=1)
    body = text.removesuffix("\n}").encode()
    return body + f',\n "seal": "{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def faults_of(data: bytes) -> str:
    with pytest.raises(CorruptError) as caught:
        parse_state(data, FILE)
    return str(caught.value)


def test_a_state_comes_back_as_it_was_and_has_the_same_bytes_again(tmp_path: Path) -> None:
    state = make_state(
        7, loss=0.1 + 0.2, best={"step": 4, "loss": 1 / 3, "held_out": "a" * 32}, adaptive={"micro_batch": 2}
    )
    (tmp_path / FILE).write_bytes(dump_state(state))
    found = read_state(tmp_path)
    assert found == state
    assert found.loss is not None
    assert found.loss.hex() == (0.1 + 0.2).hex()
    assert dump_state(found) == dump_state(state)


def test_a_state_cut_at_any_byte_is_refused() -> None:
    data = dump_state(make_state(5))
    for size in range(len(data)):
        assert faults_of(data[:size])
    assert parse_state(data, FILE) == make_state(5)  # the control: all of it is accepted


def test_a_state_with_any_byte_changed_is_refused() -> None:
    data = dump_state(make_state(5))
    for place in range(len(data)):
        with pytest.raises(CorruptError):
            parse_state(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], FILE)


def test_a_step_and_a_position_that_do_not_belong_together_are_refused() -> None:
    """T04: the counter goes on while an epoch is walked again."""
    assert parse_state(sealed(), FILE) == make_state(5)  # the control: the seal of `sealed` fits
    text = faults_of(sealed(step=6))
    assert f"after 6 updates of {BATCH} rows from {ROWS} the position is epoch 2, sample 20" in text
    assert "it says epoch 1, sample 18" in text
    assert "the position is epoch" in faults_of(sealed(sample_counter=14))


def test_updates_and_micro_batches_are_counted_apart() -> None:
    """T10: a counter of the one that is taken for the other is wrong by the factor of accumulation."""
    content = json.loads(dump_state(make_state(3)))
    assert (content["step"], content["micro_step"], content["slots"]) == (3, 6, 2)
    assert "5 updates took at least as many micro-batches; it says 2" in faults_of(sealed(micro_step=2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"step": -1}, "`step` is -1"),
        ({"step": 5.0}, "`step` is 5.0"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"mode": None}, "`mode` is None"),
        ({"maths": []}, "`maths` is []"),
        ({"scaler": 65536.0}, "`scaler` is 65536.0"),
        ({"loss": "low"}, "`loss` is 'low'"),
        ({"best": {"step": 6, "loss": 1.0, "held_out": ""}}, "a step up to 5, its loss"),
        ({"best": {"step": 5, "held_out": ""}}, "a step up to 5, its loss"),
        ({"best": {"step": 5, "loss": 1.0}}, "of which held-out set"),
        ({"seeds": ...}, "`seeds` is missing"),
        ({"cursor": 1}, "`cursor` is unknown"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_named(changed: dict[str, Any], words: str) -> None:
    assert words in faults_of(sealed(**changed))


def test_the_state_of_another_version_is_no_damage() -> None:
    with pytest.raises(UsageError, match="schema 2; this version reads 1"):
        parse_state(sealed(schema=2), FILE)


def test_a_state_that_contradicts_itself_is_never_written() -> None:
    with pytest.raises(InternalError, match="contradicts itself"):
        dump_state(replace(make_state(5), sample_counter=0))
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_state(replace(make_state(5), loss=float("nan")))


def test_a_state_that_is_gone_is_damage(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="is gone"):
        read_state(tmp_path)
