"""Files kept open for reading, shared between threads: bytes by `pread`, one view, many views, or block by block.

No mmap: a file that shrinks while it is read gives an error here and would give a signal there. What does not live
here: which bytes are a tensor's (`io.py`).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from threading import Condition
from types import TracebackType

from ckptkit.errors import CorruptError
from ckptkit.formats import files
from ckptkit.types import Extent

OPEN_FILES = 64
OTHER_FILES = 64  # that a process has open besides
VIEWS = 1024  # that one call can fill: IOV_MAX of Linux and macOS


@dataclass(slots=True)
class _Handle:
    descriptor: int
    users: int = 0


@dataclass(slots=True)
class FilePool:
    """Files kept open for reading, at most `limit` at a time; a context manager, safe to share between threads."""

    limit: int = OPEN_FILES
    _handles: OrderedDict[Path, _Handle] = field(default_factory=OrderedDict)
    _changed: Condition = field(default_factory=Condition)

    def __enter__(self) -> FilePool:
        files.raise_open_files(self.limit + OTHER_FILES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file that nobody is reading."""
        with self._changed:
            for path in [path for path, handle in self._handles.items() if not handle.users]:
                os.close(self._handles.pop(path).descriptor)

    def pread_into(self, path: Path, offset: int, data: memoryview) -> None:
        """Fill `data`, a writable view of bytes, from byte `offset` of the file on.

        Raises CorruptError when the file ends before that, ResourceError when it cannot be read.
        """
        self.pread_many(path, [(offset, data)])

    def pread_many(self, path: Path, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill several views of bytes, each from its offset on; the errors are those of `pread_into`."""
        handle = self._take(path)
        try:
            for offset, data in pieces:
                _fill(path, handle.descriptor, offset, data)
        finally:
            self._give_back(handle)

    def pread_joined(self, path: Path, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill several views as `pread_many` does, but those of bytes that follow one another with one call."""
        handle = self._take(path)
        try:
            for offset, views in _neighbours(pieces):
                _fill_all(path, handle.descriptor, offset, views)
        finally:
            self._give_back(handle)

    def pread_blocks(
        self, path: Path, extents: Iterable[Extent], buffer: memoryview, *, position: int = 0
    ) -> Generator[memoryview, None, None]:
        """Yield the bytes of `extents`, in order, as blocks that lie in `buffer` until the next one is asked for.

        Every extent begins a new block. The others begin at multiples of the buffer's length, counted as if the
        first byte were at `position`. Whoever may stop halfway must close the iterator. The errors are those of
        `pread_into`.
        """
        handle = self._take(path)
        try:
            for offset, size in extents:
                done = 0
                while done < size:
                    block = buffer[: min(size - done, len(buffer) - position % len(buffer))]
                    _fill(path, handle.descriptor, offset + done, block)
                    yield block
                    done += len(block)
                    position += len(block)
        finally:
            self._give_back(handle)

    def _take(self, path: Path) -> _Handle:
        with self._changed:
            while path not in self._handles and len(self._handles) >= self.limit and not self._close_oldest():
                self._changed.wait()
            if path not in self._handles:
                self._handles[path] = _Handle(files.open_descriptor(path))
            handle = self._handles[path]
            self._handles.move_to_end(path)
            handle.users += 1
            return handle

    def _give_back(self, handle: _Handle) -> None:
        with self._changed:
            handle.users -= 1
            if not handle.users:
                self._changed.notify()

    def _close_oldest(self) -> bool:
        """Close the file that was unused for longest; return whether there was one."""
        for path, handle in self._handles.items():
            if not handle.users:
                os.close(self._handles.pop(path).descriptor)
                return True
        return False


def _fill(path: Path, descriptor: int, offset: int, data: memoryview) -> None:
    """Fill `data` from byte `offset` of an open file on; the errors are those of `FilePool.pread_into`."""
    try:
        done = os.preadv(descriptor, [data], offset)
        while done < len(data):
            count = os.preadv(descriptor, [data[done:]], offset + done)
            if not count:
                raise _shrank(path, offset + done, len(data) - done)
            done += count
    except OSError as error:
        raise files.read_error(path, error) from error


def _fill_all(path: Path, descriptor: int, offset: int, views: Sequence[memoryview]) -> None:
    """Fill `views` one after another from byte `offset` on; the errors are those of `FilePool.pread_into`."""
    try:
        done = os.preadv(descriptor, views, offset)
    except OSError as error:
        raise files.read_error(path, error) from error
    if done < sum(map(len, views)):
        for view in views:
            if done < len(view):
                _fill(path, descriptor, offset + done, view[done:])
            offset += len(view)
            done = max(0, done - len(view))


def _neighbours(pieces: Iterable[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield (offset, views) for each run of `pieces` that follow one another in the file, at most VIEWS at a time."""
    first, end = 0, -1
    views: list[memoryview] = []
    for offset, view in sorted(pieces, key=itemgetter(0)):
        if offset != end or len(views) == VIEWS:
            if views:
                yield first, views
            first, views = offset, []
        views.append(view)
        end = offset + len(view)
    if views:
        yield first, views


def _shrank(path: Path, offset: int, missing: int) -> CorruptError:
    return CorruptError(
        f"file shrank while being read: `{path}` ends at or before byte {offset}, {missing} bytes too early",
        hint="let no other program write to the checkpoint, and start again",
    )
