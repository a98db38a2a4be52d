"""The contract: a damaged file ends in a sound reading or a CkptkitError, in bounded time and memory.

The long form of this test is `scripts/fuzz`; see fuzz_files.py. Each format's own tests hold it to more than that.
"""

from __future__ import annotations

import pytest
from fuzz_files import BROKEN, KINDS, run_apart

COUNTS = {"safetensors": 2000, "ckpt": 2000, "torch": 2000}
OTHERS = 400


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_end_in_a_sound_reading_or_an_error(kind: str) -> None:
    count = COUNTS.get(kind, OTHERS)
    outcome = run_apart(kind, seed=3, count=count)
    assert outcome.failures == []
    assert outcome.count == outcome.sound + sum(outcome.refused.values()) == count
    assert kind == "journal" or sum(outcome.refused.values()) > count // 2
    assert outcome.memory_bytes < 64 << 20


@pytest.mark.parametrize(
    ("kind", "error"), [("broken-error", "KeyError"), ("broken-memory", "MemoryError"), ("broken-time", "TooSlow")]
)
def test_a_reader_with_a_fault_is_caught(kind: str, error: str) -> None:
    assert kind in BROKEN
    outcome = run_apart(kind, seed=3, count=30, seconds=0.2)
    assert outcome.num_failures > 0
    assert all(text.startswith(error) for _, text in outcome.failures)
