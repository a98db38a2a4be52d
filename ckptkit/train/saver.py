"""Save in the background: one checkpoint is written while training goes on; the next one waits until it is on the disk.

The arrays of a snapshot are the caller's copies: nothing here copies them, so a live tensor that goes on changing would
mix two steps in one checkpoint. An error of the thread surfaces at the next call. A signal handler should set a flag
that the loop reads: the thread is no daemon, so even a process that leaves by an exception ends only when the save in
flight has. What does not live here: how a checkpoint is written (`step_write.py`), when (`driver.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from ckptkit.train.processors import stay_clear
from ckptkit.train.step_write import Snapshot


class Saver:
    """Call `write` with one snapshot after another; a context manager that waits for the last one.

    Without `background` a save is done when it returns.
    """

    def __init__(self, write: Callable[[Snapshot], object], *, background: bool = True) -> None:
        self._call = write
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Begin to write `snapshot`, whose arrays nobody may change from now on.

        It waits for the save before; raises the error of that one, if it had one, and begins nothing then.
        """
        self.finish()
        if self._background:
            self._thread = threading.Thread(target=self._write_beside, args=(snapshot,), name="ckptkit-save")
            self._thread.start()
        else:
            self._write(snapshot)
            self._raise()

    def finish(self) -> None:
        """Wait until nothing is in flight; raises the error of the save that was."""
        self._join()
        self._raise()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._join()
        failed, self._error = self._error, None
        if failed is None:
            return
        if error is None:
            raise failed
        error.add_note(f"the save in flight failed too: {failed}")  # the first error is the one to hear of

    def _join(self) -> None:
        thread = self._thread
        if thread is not None and thread.ident is not None:  # without one, its start was interrupted
            thread.join()
        self._thread = None

    def _write_beside(self, snapshot: Snapshot) -> None:
        stay_clear()
        self._write(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._call(snapshot)
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that asked for the save
            self._error = error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
