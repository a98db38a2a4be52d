"""A computation that stands still where it is told to, and goes on later: each in a thread of its own, one at a time.

A framework's own forward function runs from its first layer to its last one. Stopped by a hook before each, it lets
other inputs catch up, and the layer be loaded for all of them. What does not live here: any framework.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from threading import Semaphore, Thread
from typing import Generic, TypeVar

T = TypeVar("T")
Pause = Callable[[str], None]


class _Computation(Generic[T]):
    def __init__(self, work: Callable[[Pause], T]) -> None:
        self._work = work
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self.at = ""
        self.result: T | None = None
        self.error: BaseException | None = None
        self.done = False
        self._thread = Thread(target=self._run, daemon=True)

    def resume(self) -> None:
        """Go on to the next pause or the end, and wait for it."""
        if not self._thread.is_alive():
            self._thread.start()
        self._go.release()
        self._stopped.acquire()

    def _pause(self, name: str) -> None:
        self.at = name
        self._stopped.release()
        self._go.acquire()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._work(self._pause)
        except BaseException as error:  # noqa: BLE001 - it is raised again where somebody waits for it
            self.error = error
        self.done = True
        self._stopped.release()


def paused(work: Callable[[Pause], T]) -> Generator[str, None, T]:
    """Run `work(pause)`; yield the name at each pause, and return what it returns. Raises its error."""
    computation = _Computation(work)
    while True:
        computation.resume()
        if computation.error is not None:
            raise computation.error
        if computation.done:
            return computation.result  # type: ignore[return-value]  # set, when nothing was raised
        yield computation.at
