"""SIGTERM and Ctrl-C in a training run: they wait while a framework loads, and end the loop after the update in hand.

What does not live here: what a signal means to every other command (`cli/run.py`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Let a signal wait until the block is done: in the import of a framework it would be an ImportError, or an abort.

    A second one ends the process at once.
    """
    came: list[int] = []
    with _first(came.append, again=lambda _: signal.SIG_DFL):
        yield
    for sent in came[:1]:
        signal.raise_signal(sent)


@contextlib.contextmanager
def stopping(stop: Callable[[int], None]) -> Iterator[None]:
    """Call `stop` with the number of the first signal that comes while the block runs; a second one means what it did.

    MindSpore's graphs put a handler in the place of SIGINT's that sends SIGTERM, so both come as that.
    """
    with _first(stop, again=lambda before: before):
        yield


@contextlib.contextmanager
def _first(take: Callable[[int], None], again: Callable[[Any], Any]) -> Iterator[None]:
    """Give the first signal to `take`, and a second one to `again` of the handler before; put that back in the end."""
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, again(before[number]))
        take(number)

    if threading.current_thread() is threading.main_thread():
        for number in _STOPPING:
            before[number] = signal.getsignal(number)
            if before[number] not in (signal.SIG_IGN, None):  # ignored, as under nohup
                signal.signal(number, handle)
    try:
        yield
    finally:  # a framework may have set its own, even where one was ignored
        for known, handler in before.items():
            if handler is not None:
                signal.signal(known, handler)
