"""On a machine with two processors, the thread that computes has one of them for itself, and no bit depends on it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from arithmetic import run_check

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor alone"),
]
SCRIPT = "net_client.py"


@pytest.fixture(scope="module")
def placed() -> Any:
    return run_check(SCRIPT, "placed", "2")


def test_the_caller_is_alone_and_all_others_are_on_the_other_processor(placed: Any) -> None:
    own, others = placed["caller"], placed["others"]
    assert len(own) == 1 and others == [processor for processor in placed["given"] if processor not in own]
    assert placed["strays"] == [] and placed["threads"] > 2


def test_a_thread_of_ours_does_not_inherit_the_callers_place(placed: Any) -> None:
    assert placed["inherited"] == placed["caller"], "the control: a new thread starts where its maker is"
    assert placed["clear"] == placed["others"]


def test_nothing_is_placed_on_one_processor_and_the_bits_are_the_same(placed: Any) -> None:
    alone = run_check(SCRIPT, "placed", "1")
    assert alone["caller"] == alone["given"] == alone["clear"]
    assert alone["digest"] == placed["digest"]
