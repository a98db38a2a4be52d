"""Read damaged copies of every kind of file that ckptkit reads: each must give a sound result or a CkptkitError.

Sound: every byte range lies in the file and every element can be read. Each kind runs in a process of its own, whose
address space is limited, and each reading has a time limit: a few bytes must not cost gigabytes or hours. The same
seed gives the same damage, so that a failure can be replayed:

    python tests/fuzz_files.py --kinds ckpt --seed 7 --count 100000

The exit code is 1 when anything else than a CkptkitError was raised. `scripts/fuzz` is this program.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

from fuzz import mutations  # noqa: E402
from tiny_models import make_hf_plain  # noqa: E402

from ckptkit.commands.check import check  # noqa: E402
from ckptkit.commands.convert import convert  # noqa: E402
from ckptkit.commands.source import find_config, open_source  # noqa: E402
from ckptkit.errors import CkptkitError, ResourceError  # noqa: E402
from ckptkit.formats import mindspore_ckpt, safetensors, torch_pickle  # noqa: E402
from ckptkit.formats.base import FileIndex  # noqa: E402
from ckptkit.formats.io import read_region  # noqa: E402
from ckptkit.formats.journal import JOURNAL, Journal  # noqa: E402

MEMORY_BYTES = 512 << 20  # on top of what the process has when it begins
SECONDS = 5.0  # for one reading, however busy the machine is
SHAPE = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "intermediate": 12, "vocab": 7}


class TooSlowError(BaseException):
    """A reading took too long."""


@dataclass(slots=True)
class Outcome:
    """What became of the damaged copies of one kind; `failures` are [number of the copy, error], the first ten."""

    kind: str
    count: int = 0
    sound: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[int, str]] = field(default_factory=list)
    num_failures: int = 0
    slowest_seconds: float = 0.0
    seconds: float = 0.0
    memory_bytes: int = 0

    def line(self) -> str:
        refused = ", ".join(f"{number:,} {name}" for name, number in sorted(self.refused.items()))
        return (
            f"{self.kind:<12} {self.count:>8,} copies: {self.sound:,} read soundly; {refused}; "
            f"slowest {1000 * self.slowest_seconds:.0f} ms, {self.memory_bytes / 1e6:.0f} MB more, "
            f"{self.seconds:.0f} s, {self.num_failures} failures"
        )


Reader = Callable[[Path], object]
Kind = Callable[[Path], tuple[list[Path], Reader]]


def check_sound(index: FileIndex) -> None:
    """Fail unless names are unique, every range lies in the file, and every element can be read."""
    size = index.file.stat().st_size
    assert len({tensor.name for tensor in index.tensors}) == len(index.tensors)
    for tensor in index.tensors:
        assert all(0 <= extent.offset <= extent.offset + extent.size <= size for extent in tensor.extents)
        if tensor.num_bytes < 1 << 20:  # a view may be long though its file is short
            read_region(tensor)


def weight_file(read_index: Callable[[Path], FileIndex], *golden: str) -> Kind:
    def kind(room: Path) -> tuple[list[Path], Reader]:
        return [TESTS / "golden" / name for name in golden], lambda file: check_sound(read_index(file))

    return kind


def side_file(name: str, *, ours: bool, format: str = "safetensors") -> Kind:
    """A file of a folder, which is opened and checked as a whole after each damage."""

    def kind(room: Path) -> tuple[list[Path], Reader]:
        make_hf_plain(room / "hf", shards=2, **SHAPE)
        folder = room / "hf"
        if ours:
            folder = room / "ms"
            convert(room / "hf", folder, format=format)

        def read(damaged: Path) -> None:
            (folder / name).write_bytes(damaged.read_bytes())
            if ours:
                check(folder)
            find_config(open_source(folder), None)
            if name == "config.json":
                convert(folder, room / "never", dry_run=True)

        (room / "sound").write_bytes((folder / name).read_bytes())
        return [room / "sound"], read

    return kind


def journal(room: Path) -> tuple[list[Path], Reader]:
    """The journal of an unfinished result."""
    folder = room / "out.partial"
    folder.mkdir()
    begun = Journal.take(folder)
    begun.resume("a" * 32)
    for number in range(4):
        begun.note_finished(f"part{number}.safetensors", {f"layer.{number}.weight": "0" * 32})
    begun.close()

    def read(damaged: Path) -> None:
        (folder / JOURNAL).write_bytes(damaged.read_bytes())
        taken = Journal.take(folder)
        finished = taken.resume("a" * 32)
        taken.note_finished("more", {})
        assert taken.resume("a" * 32) == {**finished, "more": {}}
        taken.close()

    (room / "sound").write_bytes((folder / JOURNAL).read_bytes())
    return [room / "sound"], read


KINDS: dict[str, Kind] = {
    "safetensors": weight_file(safetensors.read_index, "safetensors/torch.safetensors", "unified/part0.safetensors"),
    "ckpt": weight_file(mindspore_ckpt.read_index, "ckpt/all.ckpt", "ckpt/appended.ckpt"),
    "torch": weight_file(torch_pickle.read_index, "torch/zip.bin", "torch/legacy.bin"),
    "index": side_file("model.safetensors.index.json", ours=False),
    "name-map": side_file("param_name_map.json", ours=True),
    "config": side_file("config.json", ours=False),
    "manifest": side_file("ckptkit.json", ours=True),
    "journal": journal,
}


def broken(fault: Callable[[], object]) -> Kind:
    """A reader with a fault, for the test of this program itself."""

    def read(damaged: Path) -> None:
        if damaged.stat().st_size % 3 == 0:
            fault()

    return lambda room: ([TESTS / "golden/torch/zip.bin"], read)


def _loop() -> None:
    while True:
        time.sleep(0.01)


BROKEN: dict[str, Kind] = {
    "broken-error": broken(lambda: {}["missing"]),
    "broken-memory": broken(lambda: bytearray(4 * MEMORY_BYTES)),
    "broken-time": broken(_loop),
}


def run(kind: str, seed: int, count: int, seconds: float) -> Outcome:
    """Read `count` damaged copies in this process, whose limits are set for good."""
    outcome = Outcome(kind)
    signal.signal(signal.SIGALRM, _too_slow)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as room:
        samples, read = (KINDS | BROKEN)[kind](Path(room))
        begin = _memory("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (begin + MEMORY_BYTES, resource.RLIM_INFINITY))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        resident = _memory("VmRSS")
        file = Path(room) / f"damaged{samples[0].suffix}"
        share = -(-count // len(samples))
        for sample in samples:
            for damaged in mutations(sample.read_bytes(), seed, min(share, count - outcome.count)):
                file.write_bytes(damaged)
                _read_one(outcome, read, file, seconds)
        outcome.memory_bytes = _memory("VmHWM") - resident
    outcome.seconds = time.monotonic() - started
    return outcome


def _read_one(outcome: Outcome, read: Reader, file: Path, seconds: float) -> None:
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        read(file)
        outcome.sound += 1
    except CkptkitError as error:
        name = type(error).__name__
        outcome.refused[name] = outcome.refused.get(name, 0) + 1
        if isinstance(error, ResourceError) or error.exit_code == 70:
            _fail(outcome, error)
    except (Exception, TooSlowError) as error:  # noqa: BLE001  any other error is what this program looks for
        _fail(outcome, error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    outcome.count += 1
    outcome.slowest_seconds = max(outcome.slowest_seconds, time.monotonic() - started)


def _fail(outcome: Outcome, error: BaseException) -> None:
    outcome.num_failures += 1
    if len(outcome.failures) < 10:
        outcome.failures.append((outcome.count, f"{type(error).__name__}: {error}"))


def _too_slow(*_: object) -> None:
    raise TooSlowError


def _memory(key: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def run_apart(kind: str, seed: int, count: int, seconds: float = SECONDS) -> Outcome:
    """Run one kind in a child process; that the child dies is a failure too."""
    command = [sys.executable, __file__, "--one", "--kinds", kind, "--seed", str(seed), "--count", str(count)]
    done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True)
    if done.returncode:
        return Outcome(kind, failures=[(-1, done.stderr[-2000:])], num_failures=1)
    return Outcome(**json.loads(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description="Read damaged copies of every kind of file that ckptkit reads.")
    parser.add_argument("--count", type=int, default=100_000, help="damaged copies of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, *BROKEN], default=list(KINDS), metavar="KIND")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the limit for one reading")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(run(options.kinds[0], options.seed, options.count, options.seconds))))
        return 0
    failed = 0
    for kind in options.kinds:
        outcome = run_apart(kind, options.seed, options.count, options.seconds)
        print(outcome.line(), flush=True)
        for number, error in outcome.failures:
            print(f"  copy {number} of seed {options.seed}: {error}")
        failed += outcome.num_failures
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
