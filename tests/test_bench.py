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
def reshard(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_reshard")


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


@pytest.mark.parametrize("size", (200 * 10**6, 2 * 10**9))
def test_the_model_for_4_to_3_divides_by_both_and_has_the_wanted_size(models: Any, size: int) -> None:
    model = models.of_size_for_12(size)
    assert model.num_tensors == 219
    assert 0.8 * size < model.num_bytes <= size
    assert [n % 12 for n in (model.heads, model.kv_heads, model.intermediate, model.vocab)] == [0] * 4


def measured(lib: Any, name: str, cpu_s: list[float], anonymous_mib: int = 0, inner_cpu_s: float | None = None) -> Any:
    runs = [lib.Run(cpu, cpu, anonymous_mib << 20, 0, 0, inner_cpu_s) for cpu in cpu_s]
    return lib.Measured(name, "", runs)


def test_the_speed_of_a_step_is_cp_over_ours_without_start_up_round_by_round(lib: Any, reshard: Any) -> None:
    runs = {"ckptkit": [3.0, 2.0], "ckptkit --no-digest": [2.0, 2.0], "ckptkit, start-up": [1.0, 0.0]}
    runs["ckptkit --no-digest --workers 1"] = [1.5, 1.5]
    results = [measured(lib, name, cpu, 30) for name, cpu in runs.items()]
    results += [measured(lib, "cp", [0.5, 0.5]), measured(lib, "cp, then sync", [1.0, 1.5])]
    goals = reshard.step_goals(results, 256, 0.75)
    assert [goal.values for goal in goals[:5]] == [(1.0, 0.75), (2.0, 1.0), (0.5, 0.75), (0.5, 0.25), (0.25, 0.25)]
    assert [goal.state for goal in goals] == ["met", "met", "missed", "", "", "met"]
    assert goals[5].limit == 65.0


def test_the_peer_is_held_to_ten_times_the_cpu_and_forty_times_the_memory(lib: Any, reshard: Any) -> None:
    ours, start = measured(lib, "ckptkit", [3.0], 30), measured(lib, "ckptkit, start-up", [1.0], 20)
    peer = measured(lib, "mindspore", [29.0], 1200, 20.0)
    goals = reshard.peer_goals([ours, start, peer], 0)
    assert [goal.state for goal in goals] == ["missed", "", "met", "met"]
    assert goals[1].values == (10.0,)


def test_the_bytes_of_a_rank_count_when_the_report_prints_them(reshard: Any) -> None:
    report = "  ranks    0..7: writes 8.0 GB each, reads 8.0 GB each\n           8: writes 7.7 GB, reads 7.7 GB\n"
    assert reshard.num_ranks_told(report) == 9
    assert reshard.num_ranks_told("  cost     reads 470.2 GB, writes 486.8 GB\n") == 0
