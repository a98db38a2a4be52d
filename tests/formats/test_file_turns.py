"""The contract: bytes go to their places, digests are kept by name, one thread at a time writes to a file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ckptkit.formats import file_sink
from ckptkit.formats.file_sink import FileSink
from ckptkit.formats.result_folder import ResultFolder
from ckptkit.formats.safetensors import lay_out, read_index
from ckptkit.types import TensorSpec

SPECS = [TensorSpec(f"t{number}", (5,), "U8") for number in range(4)]


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    """Return a sink of two files with two tensors each."""
    folder = ResultFolder(tmp_path / "out", "a" * 32)
    folder.open()
    files = [lay_out("a.safetensors", SPECS[:2], {}), lay_out("b.safetensors", SPECS[2:], {})]
    return FileSink(folder, files, [(spec.name, number // 2) for number, spec in enumerate(SPECS)])


def test_a_file_is_complete_after_its_last_output(sink: FileSink, tmp_path: Path) -> None:
    sink.put_batch([0, 1], memoryview(b"0000011111"), ["x", "y"])
    sink.put(3, 2, memoryview(b"333"))
    sink.put(3, 0, memoryview(b"33"))
    sink.finish(3, "z")
    (partial,) = tmp_path.iterdir()
    assert '"a.safetensors"' in (partial / ".ckptkit-journal.jsonl").read_text()
    assert '"b.safetensors"' not in (partial / ".ckptkit-journal.jsonl").read_text()
    assert sink.digests == [{"t0": "x", "t1": "y"}, {"t3": "z"}]
    sink.close()
    for name, first in (("a.safetensors", b"00000"), ("b.safetensors", bytes(5))):
        (offset, size) = read_index(partial / name).tensors[0].extents[0]
        assert (partial / name).read_bytes()[offset : offset + size] == first


def most_at_once(sink: FileSink, monkeypatch: pytest.MonkeyPatch, outputs: tuple[int, int]) -> int:
    """Return how many writes are under way at once when two threads put to `outputs`."""
    now, most, lock = 0, 0, threading.Lock()

    def slow(*_: object) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1

    for output in outputs:
        sink.put(output, 0, memoryview(b""))  # so that the files are there
    monkeypatch.setattr(file_sink, "_pwrite", slow)
    threads = [threading.Thread(target=sink.put, args=(output, 0, memoryview(b"x"))) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    return most


def test_threads_take_turns_at_a_file(sink: FileSink, monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_at_once(sink, monkeypatch, (0, 1)) == 1


def test_threads_write_to_two_files_at_once(sink: FileSink, monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_at_once(sink, monkeypatch, (0, 2)) == 2
