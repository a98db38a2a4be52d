"""Opening a file and telling what it is, from its first bytes.

Every reader starts here, so that a missing file, a dangling link, an empty file, a git-lfs pointer and a disk that
fails read the same in every format. Without numpy: `inspect` must not need it. What does not live here: reading
tensors (`io.py`).
"""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import resource
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, ResourceError, UsageError
from ckptkit.types import TensorInfo

HEAD_BYTES = 1024
COMPARE_BYTES = 256 * 1024
SHOWN_CHARACTERS = 200  # of a path that is too long

SAFETENSORS = "safetensors"
CKPT = "ckpt"
TORCH = "torch"

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ENCRYPTED = (b"\xd8\x5e\x3a\x7f", b"\xd9\x5e\x3a\x7f", b"\xda\x5e\x3a\x7f")  # AES-GCM, AES-CBC, SM4-CBC
_POINTER = b"version https://git-lfs"
_NO_NAMES = {
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ELOOP: "its links lead back to one another",
    errno.ENOTDIR: "a part of it is a file and no folder",
}


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """Open `file` for reading and yield its descriptor.

    Raises UsageError for a path that is not a file, CoverageError for a dangling link, ResourceError for a file
    that may not or cannot be read.
    """
    descriptor = open_descriptor(file)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_descriptor(file: Path) -> int:
    """Return a descriptor open for reading; the errors are those of `opened`."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
    except OSError as error:
        raise open_error(file, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
        raise UsageError(f"`{file}` is {what}, not a regular file")
    return descriptor


def name_error(path: Path | str, error: OSError) -> UsageError | None:
    """Return the error to raise when `path` can be no file's name, which is what `error` says; None for others."""
    why = _NO_NAMES.get(error.errno or 0)
    shown = str(path) if len(str(path)) <= SHOWN_CHARACTERS else f"{str(path)[:SHOWN_CHARACTERS]}..."
    return UsageError(f"`{shown}` cannot be a path: {why}", hint="choose another name") if why else None


def look(path: Path) -> os.stat_result | None:
    """Return what a path leads to, links followed, or None for nothing; UsageError when it can be no path."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        if isinstance(error, NotADirectoryError):
            return None
        raise name_error(path, error) or open_error(path, error) from error


def regular_file(path: Path, option: str) -> Path:
    """Return `path` when it is a regular file; UsageError, before it is opened, when it is not.

    `option` is where the user named it. A pipe would block, or give its bytes only once; a device may have no end.
    """
    found = look(path)
    if found is None:
        raise UsageError(f"no such file: `{path}` ({option})")
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or device"
        raise UsageError(f"`{path}` ({option}) is {what}, not a regular file", hint="name a file on a disk")
    return path


def has_small(file: Path) -> bool:
    """Tell whether a file is there that is known by its name; CorruptError where that name is of something else."""
    found = look(file)
    if found is None and not file.is_symlink():
        return False
    if found is not None and stat.S_ISREG(found.st_mode):
        return True
    what = "a link to nothing" if found is None else "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or device"
    raise CorruptError(
        f"`{file}` is {what}, not a regular file",
        why="a file of that name says how the checkpoint is to be read",
        hint="restore it from a copy, or move it away",
    )


def open_error(file: Path, error: OSError) -> CkptkitError:
    """Return the error to raise for a failed open of `file`."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        if file.is_symlink():
            return dangling_link(file)
        return UsageError(f"no such file: `{file}`")
    odd = name_error(file, error)
    if odd is not None:
        return odd
    hint = "check the permissions and the disk"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit of open files (`ulimit -n`)"
    return ResourceError(f"cannot open `{file}`: {error.strerror}", hint=hint)


def raise_open_files(needed: int) -> int:
    """Let this process open `needed` files; return that, or how many it may open where those are fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    if hard != resource.RLIM_INFINITY and hard < needed:
        return hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed


def dangling_link(file: Path) -> CoverageError:
    """Return the error for a link whose target is gone."""
    return CoverageError(
        f"link `{file}` points to missing `{file.readlink()}`",
        why="its tensors would be lost",
        hint="download the file again; a cache may have been cleaned in part",
    )


@contextmanager
def paused_gc() -> Iterator[None]:
    """Switch the garbage collector off: making 50,000 small objects takes twice the time with it.

    What was made meanwhile counts as old afterwards, so that the next collection of the young does not walk it all.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what a caller froze stays frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def size_of(descriptor: int) -> int:
    """Return the size in bytes of an open file."""
    return os.fstat(descriptor).st_size


def pread(file: Path, descriptor: int, size: int, offset: int) -> bytes:
    """Return `size` bytes from `offset` on, or fewer at the end of the file; raises ResourceError."""
    try:
        data = os.pread(descriptor, size, offset)
        while len(data) < size:
            more = os.pread(descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
    except OSError as error:
        raise read_error(file, error) from error
    return data


def read_error(file: Path, error: OSError) -> ResourceError:
    """Return the error to raise for a failed read of `file`."""
    return ResourceError(f"cannot read `{file}`: {error.strerror}", hint="check the disk or the network mount")


def read_head(file: Path) -> tuple[bytes, int]:
    """Return the first bytes of a file and its size in bytes.

    Raises CorruptError for an empty file and for a git-lfs pointer.
    """
    with opened(file) as descriptor:
        size = size_of(descriptor)
        head = pread(file, descriptor, min(HEAD_BYTES, size), 0)
    refuse_empty_or_pointer(file, head)
    return head, size


def refuse_empty_or_pointer(file: Path, head: bytes) -> None:
    """Raise CorruptError if a file that begins with `head` is empty or is a git-lfs pointer."""
    if not head:
        raise CorruptError(f"`{file}` is empty (0 bytes)", hint="download or save the file again")
    size = pointer_size(head)
    if size is not None:
        should = f"it should have {size} bytes" if size else "its size is not stated"
        raise CorruptError(
            f"`{file}` is a git-lfs pointer, not the file itself: {should}",
            why="the repository was cloned without git-lfs",
            hint="run `git lfs pull` in the repository, or download the file",
        )


def pointer_size(head: bytes) -> int | None:
    """Return the size in bytes that a git-lfs pointer states (0: none stated), or None if `head` is not of one."""
    if not head.startswith(_POINTER):
        return None
    found = re.search(rb"^size (\d+)", head, re.MULTILINE)
    return int(found[1]) if found else 0


def is_encrypted(head: bytes) -> bool:
    """Tell whether a file that begins with `head` was encrypted by MindSpore."""
    return head.startswith(_ENCRYPTED)


def kind_of(head: bytes, size: int) -> str | None:
    """Return the format of a file by its first bytes: `safetensors`, `ckpt`, `torch`, or None."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= max(size, 100_000_000):
        return SAFETENSORS  # perhaps cut
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return TORCH
    if re.match(rb"\x80[\x02-\x05]", head):
        return TORCH
    if head.startswith(b"\x0a") or is_encrypted(head):
        return CKPT
    return None


def describe(head: bytes) -> str:
    """Say in words what a file that begins with `head` looks like; empty if there is nothing to say."""
    known = (
        (b"PK\x03\x04", "a zip archive, as PyTorch writes"),
        (b"\x80", "a Python pickle, as old PyTorch writes"),
        (b"GGUF", "a GGUF file"),
        (b"\x89HDF", "an HDF5 file"),
        (b"\x08", "a MindSpore strategy file, which holds layouts and no tensors"),
        (b"\x0a", "a MindSpore .ckpt file"),
        (b"<", "an HTML or XML page, perhaps the error page of a download"),
        (b"{", "a JSON text"),
    )
    for magic, words in known:
        if head.startswith(magic):
            return words
    return "a safetensors file" if head[8:9] == b"{" else ""


def listed(names: Sequence[str]) -> str:
    """Return names for a note: the first five, then a count."""
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object that a text file holds.

    Raises CorruptError for anything else, a git-lfs pointer and a key with two different values included.
    """

    with opened(file) as descriptor:
        data = pread(file, descriptor, size_of(descriptor), 0)
    refuse_empty_or_pointer(file, data)
    try:
        value = _parse_json(file, data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"`{file}` is not valid JSON: {error}", hint="download or save the file again") from error
    if not isinstance(value, dict):
        raise CorruptError(f"`{file}` is not a JSON object", hint="download or save the file again")
    if _SURROGATE.search(data):
        _refuse_half_characters(file, value)
    return value


def _parse_json(file: Path, text: str) -> Any:
    """Return the value of a JSON text; CorruptError for a key with two different values.

    Every key has a colon after it, so a text with no more colons than keys that were kept has no key twice.
    """
    kept = 0

    def counted(result: dict[str, Any]) -> dict[str, Any]:
        nonlocal kept
        kept += len(result)
        return result

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) == len(pairs):
            return result
        odd = sorted({key for key, value in pairs if result[key] != value})
        if odd:
            raise CorruptError(f"`{file}` has keys with two different values", items=odd, hint="remove one of each")
        return result

    value = json.loads(text, object_hook=counted)
    return value if text.count(":") == kept else json.loads(text, object_pairs_hook=unique)


def _refuse_half_characters(file: Path, value: dict[str, Any]) -> None:
    """Raise CorruptError for one of the two halves of an escape like `\\ud83d\\ude00`: no file can hold it as text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        odd = error.object[error.start].encode("unicode_escape").decode()
        raise CorruptError(
            f"`{file}` is not valid Unicode: `{odd}` is half a character", hint="save the file again"
        ) from None


def same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    """Tell whether two tensors without strides have the same shape, dtype and bytes; reads both."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    with opened(a.file) as one, opened(b.file) as two:
        for position in range(0, a.num_bytes, COMPARE_BYTES):
            size = min(COMPARE_BYTES, a.num_bytes - position)
            if _bytes_at(a, one, position, size) != _bytes_at(b, two, position, size):
                return False
    return True


def _bytes_at(info: TensorInfo, descriptor: int, position: int, size: int) -> bytes:
    """Return `size` bytes of a tensor from its byte `position` on."""
    parts = []
    for offset, length in info.extents:
        if position < length and size:
            count = min(size, length - position)
            parts.append(pread(info.file, descriptor, count, offset + position))
            position, size = 0, size - count
        else:
            position = max(0, position - length)
    return b"".join(parts)
