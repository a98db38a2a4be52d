"""The parts of `scripts/bench` that could make a figure wrong without anybody noticing.

What the figures mean: a subject that fails or writes too little has no figures; every subject runs once a round; CPU
seconds hold those of children and threads; memory is anonymous memory; inputs are the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit import open_checkpoint

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
TINY_SHA256 = "7240a049da29384fbfc722c9d84de30d81effece3692205e7b8e24dedc886321"


@pytest.fixture
def lib(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("benchlib")


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_models")


@pytest.fixture
def bench(lib: Any, tmp_path: Path) -> Any:
    (tmp_path / "source").mkdir()
    return lib.Bench(tmp_path / "work", dict(os.environ), say=lambda text: None)


def subject(lib: Any, tmp_path: Path, code: str, *, name: str = "it", least_bytes: int = 0) -> Any:
    """Return a subject that runs Python `code`, in which `target` is the folder to make."""
    source = tmp_path / "source"

    def command(source: Path, target: Path) -> list[str]:
        return [sys.executable, "-c", f"from pathlib import Path; target = Path({str(target)!r}); {code}"]

    return lib.Subject(name, "", command, source, source, least_bytes)


WRITE = "target.mkdir(); (target / 'x').write_bytes(bytes(1000))"


def test_a_subject_runs_once_a_round_and_its_output_is_removed(lib: Any, bench: Any, tmp_path: Path) -> None:
    (result,) = bench.rounds([subject(lib, tmp_path, WRITE, least_bytes=1000)], 3)
    assert [run.output_bytes for run in result.runs] == [1000] * 3
    assert not result.missing
    assert not (tmp_path / "work").exists()


def test_a_subject_that_writes_too_little_has_no_figures(lib: Any, bench: Any, tmp_path: Path) -> None:
    (result,) = bench.rounds([subject(lib, tmp_path, WRITE, least_bytes=1001)], 2)
    assert result.runs == []
    assert "1000 bytes where 1001 are due" in result.missing
    assert "not measured" in lib.results_table([result])


def test_a_subject_that_fails_has_no_figures_and_says_why(lib: Any, bench: Any, tmp_path: Path) -> None:
    (result,) = bench.rounds([subject(lib, tmp_path, "raise SystemExit('out of luck')")], 2)
    assert (result.runs, result.missing) == ([], "exit code 1: out of luck")


def test_cpu_seconds_hold_those_of_threads_and_children(lib: Any, bench: Any, tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}], check=True)"
    (result,) = bench.rounds([subject(lib, tmp_path, code)], 1)
    assert result.runs[0].cpu_s >= 0.3


def test_memory_is_that_of_children_too_and_leaves_file_pages_out(lib: Any, bench: Any, tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(bytes(64 << 20))
    hold = "import time; held = b'x' * (32 << 20); time.sleep(0.2)"
    map_pages = (
        f"import mmap; f = open({str(tmp_path / 'pages')!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); "
        "n = sum(m[i] for i in range(0, len(m), 4096)); "
    )
    code = f"import subprocess, sys; {map_pages} subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    (result,) = bench.rounds([subject(lib, tmp_path, code)], 1)
    assert 32 << 20 <= result.runs[0].anonymous_bytes < 64 << 20
    assert result.runs[0].resident_bytes >= 64 << 20


def test_what_a_subject_says_of_itself_is_its_last_line(lib: Any) -> None:
    assert lib.own_figures('noise\n{"inner_cpu_s": 1.5, "lazy_cpu_s": 0.5}\n') == {
        "inner_cpu_s": 1.5,
        "lazy_cpu_s": 0.5,
    }
    assert lib.own_figures('{"inner_cpu_s": 1.5}\nnoise\n') == {}
    assert lib.own_figures("") == {}


def test_the_order_turns_and_every_subject_keeps_its_place_in_each_round(lib: Any) -> None:
    orders = [lib.turned("abc", number) for number in range(4)]
    assert [sorted(order) for order in orders] == [["a", "b", "c"]] * 4
    assert len({order[0] for order in orders}) > 1


def test_a_goal_is_met_or_missed_by_the_median(lib: Any) -> None:
    states = [lib.Goal("", (1.0, 2.0, 9.0), limit, at_least).state for limit, at_least in ((2, True), (2.1, True))]
    assert states == ["met", "missed"]
    assert lib.Goal("", (1.0, 2.0, 9.0), 1.9, at_least=False).state == "missed"
    assert lib.Goal("", (), 1.9).state == "not measured"


def test_a_ratio_is_taken_round_by_round(lib: Any) -> None:
    assert lib.ratio([2.0, 9.0], [1.0, 3.0]) == (2.0, 3.0)
    assert lib.ratio([], [1.0]) == ()


def test_the_input_is_the_same_bytes_everywhere_and_a_sound_checkpoint(models: Any, tmp_path: Path) -> None:
    folder = models.ensure(tmp_path, "tiny", models.tiny(), shards=1)
    data = (folder / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == TINY_SHA256
    assert models.ensure(tmp_path, "tiny", models.tiny(), shards=1) == folder
    assert len(open_checkpoint(folder).tensors) == models.tiny().num_tensors


def test_the_model_has_219_tensors_in_3_shards_and_the_wanted_size(models: Any) -> None:
    for size in (200 * 10**6, 2 * 10**9, 14 * 10**9):
        model = models.of_size(size)
        assert model.num_tensors == 219
        assert 0.96 * size < model.num_bytes <= size
        assert len(models.split(list(model.tensors()), 3)) == 3
