"""The sink that writes files: each byte goes to the place that the file's layout gives it.

Thread-safe. A file is preallocated when its first tensor arrives, fsynced and noted in the journal when its last
one is finished.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from ckptkit.errors import InternalError
from ckptkit.formats.base import OutputFile
from ckptkit.formats.disk import disk_error
from ckptkit.formats.files import pread
from ckptkit.formats.io import FilePool, extents_digest
from ckptkit.formats.result_folder import ResultFolder
from ckptkit.types import Extent

_READ_BACK_BYTES = 256 << 10


@dataclass(slots=True)
class _OpenFile:
    fd: int = -1
    turn: threading.Lock = field(default_factory=threading.Lock)
    waiting: int = 0  # outputs that are not complete
    digests: dict[str, str] = field(default_factory=dict)


class FileSink:
    """Write outputs into the files of a `ResultFolder`.

    `outputs` gives each output's (tensor name, file number). `digests` asks for the digest of every tensor.
    """

    def __init__(
        self,
        folder: ResultFolder,
        files: Sequence[OutputFile],
        outputs: Sequence[tuple[str, int]],
        *,
        digests: bool = True,
    ) -> None:
        self._folder = folder
        self._files = files
        self._outputs = outputs
        self._want_digests = digests
        self._open = [_OpenFile() for _ in files]
        self._taken_over: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        for file, count in Counter([file for _, file in outputs]).items():
            self._open[file].waiting = count
        self._extents = [files[file].extents[name] for name, file in outputs]
        self._states = [self._open[file] for _, file in outputs]

    @property
    def digests(self) -> list[Mapping[str, str]]:
        """The digests of the finished tensors, file by file, by name."""
        return [state.digests for state in self._open]

    def finished_files(self) -> frozenset[int]:
        """Return the numbers of the files that an earlier run finished; their digests are taken over.

        A file counts only while its bytes have the digests that were noted; without digests, while it has its size.
        """
        done = set()
        for number, file in enumerate(self._files):
            digests = self._folder.finished.get(file.name)
            path = self._folder.partial / file.name
            if digests is None or not path.is_file() or path.stat().st_size != file.size:
                continue
            if self._want_digests and set(digests) != set(file.extents):
                continue
            with FilePool(1) as pool:
                if any(extents_digest(path, file.extents[name], pool) != d for name, d in digests.items()):
                    continue
            done.add(number)
            self._open[number].digests.update(digests)
        self._taken_over = frozenset(done)
        return self._taken_over

    def put(self, output: int, offset: int, data: memoryview) -> None:
        """Write `data` at byte `offset` of output number `output`.

        Threads take turns at a file: the kernel lets one write at a time, and the others would spin, not sleep.
        """
        state, extents = self._states[output], self._extents[output]
        fd = state.fd if state.fd >= 0 else self._fd(self._outputs[output][1])
        try:
            with state.turn:
                if len(extents) == 1:
                    _pwrite(fd, data, extents[0].offset + offset)
                else:
                    _pwrite_pieces(fd, data, offset, extents)
        except OSError as error:
            path = self._folder.partial / self._files[self._outputs[output][1]].name
            raise disk_error(error, path) from error

    def put_batch(self, outputs: Sequence[int], data: memoryview, digests: Sequence[str | None]) -> None:
        """Write the whole bytes of `outputs`, neighbours in one file, and note that they are complete."""
        self.put(outputs[0], 0, data)
        self._note(outputs, digests)

    def finish(self, output: int, digest: str | None) -> None:
        """Note, once, that `output` is complete. A digest of None is computed by reading the bytes back."""
        if self._want_digests:
            digest = digest or self._read_back(output)
        self._note([output], [digest])

    def check_complete(self) -> None:
        """Raise InternalError when an output was neither finished now nor taken over from an earlier run."""
        lacking = [
            self._files[number].name
            for number, state in enumerate(self._open)
            if state.waiting and number not in self._taken_over
        ]
        if lacking:
            raise InternalError(f"{len(lacking)} files of the result were not written to their end", items=lacking)

    def _note(self, outputs: Sequence[int], digests: Sequence[str | None]) -> None:
        """Take outputs of one file off its list, and close the file after the last one."""
        number = self._outputs[outputs[0]][1]
        with self._lock:
            state = self._open[number]
            found = zip(outputs, digests, strict=True)
            state.digests.update({self._outputs[output][0]: digest for output, digest in found if digest})
            state.waiting -= len(outputs)
            last = not state.waiting
        if last:
            self._close_file(number)

    def _fd(self, number: int) -> int:
        state = self._open[number]
        if state.fd < 0:
            with self._lock:
                if state.fd < 0:
                    state.fd = self._create(self._files[number])
        return state.fd

    def _create(self, file: OutputFile) -> int:
        path = self._folder.partial / file.name
        fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # never through a link that took its place
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _preallocate(fd, file.size)
            for offset, data in file.fixed:
                _pwrite(fd, memoryview(data), offset)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                with contextlib.suppress(OSError):
                    path.unlink()  # give back what was allocated before the disk was full
            raise disk_error(error, path) from error
        return fd

    def _close_file(self, number: int) -> None:
        file, state = self._files[number], self._open[number]
        fd = self._fd(number)  # made only now where all of its tensors are empty
        try:
            os.fsync(fd)
            os.close(fd)
        except OSError as error:
            raise disk_error(error, self._folder.partial / file.name) from error
        state.fd = -1
        self._folder.note_finished(file.name, state.digests)

    def _read_back(self, output: int) -> str:
        state = xxhash.xxh3_128()
        number = self._outputs[output][1]
        path = self._folder.partial / self._files[number].name
        for offset, size in self._extents[output]:
            for start in range(offset, offset + size, _READ_BACK_BYTES):
                count = min(_READ_BACK_BYTES, offset + size - start)
                data = pread(path, self._fd(number), count, start)
                if len(data) < count:
                    raise disk_error(OSError(errno.EIO, "what was written cannot be read back"), path)
                state.update(data)
        return state.hexdigest()

    def close(self) -> None:
        """Close what an interrupted run left open."""
        for state in self._open:
            if state.fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(state.fd)
                state.fd = -1


def _preallocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV):
            raise
        os.ftruncate(fd, size)


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = os.pwrite(fd, data, offset)
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _pwrite_pieces(fd: int, data: memoryview, offset: int, extents: Sequence[Extent]) -> None:
    for extent in extents:
        if not len(data):
            return
        if offset < extent.size:
            size = min(len(data), extent.size - offset)
            _pwrite(fd, data[:size], extent.offset + offset)
            data, offset = data[size:], 0
        else:
            offset -= extent.size
