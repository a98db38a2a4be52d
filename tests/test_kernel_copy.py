"""Without digests the kernel copies, file to file, what is neither made nor cast; with them ckptkit sees every byte."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptkit import Parallel, convert, reshard
from ckptkit.errors import CorruptError
from ckptkit.formats.file_pool import FilePool
from ckptkit.moves import copies
from ckptkit.types import Extent
from tests.rank_results import rank_bytes
from tests.tiny_models import make_hf_plain

LAYOUTS = [Parallel(mp=2), Parallel(pp=2), Parallel()]


def through(source: Path, room: Path, *, digests: bool) -> list[dict[str, bytes]]:
    """Reshard a checkpoint from layout to layout; return the weights' files of each."""
    found = []
    for number, layout in enumerate(LAYOUTS):
        target = room / f"{number} {digests}"
        reshard(source, target, layout, digests=digests)
        found.append({name: data for name, data in rank_bytes(target).items() if name.endswith(".safetensors")})
        source = target
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    convert(make_hf_plain(tmp_path / "hf", bias=True), tmp_path / "ms")
    return tmp_path / "ms"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each call that the kernel is asked to copy, which come in small pieces here."""
    calls: list[int] = []
    plain = os.copy_file_range

    def watched(source: int, target: int, count: int, *offsets: int) -> int:
        calls.append(count)
        return plain(source, target, min(count, 300), *offsets)  # as the kernel may, a part of it

    monkeypatch.setattr(os, "copy_file_range", watched)
    monkeypatch.setattr(copies, "KERNEL_BYTES", 500)
    return calls


def test_the_kernels_copies_are_the_bytes_that_others_are(model: Path, tmp_path: Path, asked: list[int]) -> None:
    wanted = through(model, tmp_path, digests=True)
    assert asked == [] and all(wanted), "whoever asks for digests has every byte read"
    assert through(model, tmp_path, digests=False) == wanted
    assert max(asked) == 500 and len(asked) > 100


def test_a_cast_is_never_left_to_the_kernel(model: Path, tmp_path: Path, asked: list[int]) -> None:
    convert(model, tmp_path / "hf16", to_dialect="hf", dtype="bf16", digests=False)
    assert asked == []


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EIO])
def test_what_the_kernel_does_not_copy_is_read_and_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It may refuse in the middle of a tensor, too."""
    wanted = through(model, tmp_path, digests=True)
    plain, calls = os.copy_file_range, 0

    def moody(*words: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise OSError(code, os.strerror(code))
        return plain(*words)

    monkeypatch.setattr(os, "copy_file_range", moody)
    monkeypatch.setattr(copies, "KERNEL_BYTES", 500)
    assert through(model, tmp_path, digests=False) == wanted and calls > 100


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    with FilePool() as pool, pytest.raises(CorruptError, match="shrank while being read"):
        pool.copy_to(tmp_path / "short", Extent(2, 3), target, 0)
    os.close(target)
