"""The next batch, made by a thread while the step before it runs.

The next one is begun when the one before is taken, so no more than one is ready. The thread has no state that a resumed
run would miss: a batch is a function of its step.
What does not live here: what a batch is (`batches.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from ckptkit.train.batches import StepData
from ckptkit.train.processors import stay_clear

_PATIENCE = 5.0  # seconds that `close` waits for a batch that is being made


class Source(Protocol):
    """What makes batches: `Batches`."""

    def at(self, step: int) -> StepData: ...


class Prefetch:
    """Batches from step `start` on, in order; a context that closes itself. For one caller.

    An error of the thread is raised by the `next` that would have had the batch, and by every one after it. `clock`
    is in seconds.
    """

    def __init__(self, batches: Source, start: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._batches, self._clock = batches, clock
        self._changed = threading.Condition()
        self._ready: StepData | None = None
        self._error: BaseException | None = None
        self._closed = False
        # a daemon: a batch that never comes must not keep the process alive
        self._thread = threading.Thread(target=self._run, args=(start,), name="prefetch", daemon=True)
        self._thread.start()

    def next(self) -> tuple[StepData, float]:
        """Return the next batch, and the seconds that were spent waiting for it; ValueError when closed."""
        begin = self._clock()
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None or self._error is not None or self._closed)
            if self._closed:
                raise ValueError("the prefetch is closed")
            if self._ready is None:
                assert self._error is not None
                raise self._error
            data, self._ready = self._ready, None
            self._changed.notify_all()
        return data, self._clock() - begin

    def close(self) -> None:
        """Stop the thread, and wait for it, for at most a few seconds. Closing twice is no error."""
        with self._changed:
            self._closed, self._ready = True, None
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, step: int) -> None:
        stay_clear()
        try:
            while self._has_room():
                data = self._batches.at(step)
                with self._changed:
                    self._ready = data
                    self._changed.notify_all()
                step += 1
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whose `next` raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until the batch before is taken; False when no other one is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready is None or self._closed)
            return not self._closed
