"""The contract of `ckptkit verify` as a whole: both frameworks, in processes of their own, and one exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runner_jobs import config_of, make_folder, wrong_table

from ckptkit import CorruptError, Parallel, UsageError, convert, verify
from ckptkit.report import Report
from tests.rank_results import read_whole, write_whole

pytestmark = pytest.mark.frameworks
COMMAND = (sys.executable, "-m", "ckptkit", "verify")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 66}
    return make_folder(tmp_path_factory.mktemp("hf") / "hf", config_of("llama", **sizes))


@pytest.fixture(scope="module")
def ms(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ms") / "ms"
    convert(hf, folder, to_dialect="mindformers", variant="qkv_concat")
    return folder


@pytest.fixture(scope="module")
def dump(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the HuggingFace side alone, as another machine would."""
    folder = tmp_path_factory.mktemp("dump") / "hf.dump"
    report = verify(hf, dump=folder)
    assert report.exit_code == 0, report.to_text()
    assert "is in" in report.headline
    return folder


def logits_wrong(report: Report) -> list[str]:
    return [row["name"] for row in report.data["forward"]["inputs"] if row["wrong"]]


def test_a_converted_checkpoint_is_equal_at_level_forward(hf: Path, ms: Path) -> None:
    report = verify(hf, ms, runner="builtin")
    assert (report.exit_code, report.data["failed"]) == (0, []), report.to_text()
    forward = report.data["forward"]
    assert [side["runner"] for side in forward["runners"]] == ["torch", "builtin"]
    assert not logits_wrong(report) and len(forward["inputs"]) == 4
    for side in "ab":
        assert forward[side]["settings"] and forward[side]["versions"]
        assert forward[side]["missing"] == forward[side]["unexpected"] == forward[side]["altered"] == []
        assert all(row["repeated"] for row in forward[side]["inputs"])
    assert json.loads(report.to_json())["level"] == "forward"
    assert "are equal at level forward" in report.to_text() and "1-cosine" in report.to_text()


def test_shards_that_are_cast_and_padded_are_equal_too(hf: Path, tmp_path: Path) -> None:
    """Both sides run the values that the cast made, and rows of padding are no words.

    That it is the wider side that is rounded, A or B: test_weights.py.
    """
    parallel = Parallel(mp=4, pp=2, pad_vocab_to=68)
    convert(hf, tmp_path / "ms", to_dialect="mindformers", dtype="bf16", parallel=parallel)
    report = verify(hf, tmp_path / "ms", runner="builtin")
    assert report.exit_code == 0, report.to_text()
    assert max(row["relative"] for row in report.data["forward"]["inputs"]) < 1e-5


def test_a_wrong_but_invertible_table_passes_weights_and_fails_forward(hf: Path, tmp_path: Path) -> None:
    table = wrong_table(tmp_path)
    convert(hf, tmp_path / "ms", to_dialect="mindformers", table=table)
    convert(tmp_path / "ms", tmp_path / "back", to_dialect="hf", table=table)
    assert verify(hf, tmp_path / "back", level="weights").exit_code == 0
    report = verify(hf, tmp_path / "ms", runner="builtin", table=table)
    assert (report.exit_code, report.data["failed"]) == (1, ["forward"])
    assert {row["status"] for row in report.data["parameters"]} == {"loaded"}
    assert logits_wrong(report)


def test_both_runners_of_mindspores_side_agree(ms: Path, tmp_path: Path) -> None:
    assert verify(ms, dump=tmp_path / "dump", runner="mindformers").exit_code == 0
    report = verify(ms, against=tmp_path / "dump", runner="builtin")
    assert report.exit_code == 0, report.to_text()
    compared = [row for row in report.data["forward"]["inputs"] if not row["skipped"]]
    assert len(compared) == 3 and max(row["relative"] for row in compared) < 5e-6


def test_a_side_that_ran_elsewhere_is_compared_by_its_dump_on_the_command_line(
    ms: Path, dump: Path, tmp_path: Path
) -> None:
    words = [*COMMAND, str(ms), "--against", str(dump), "--runner", "builtin"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "agrees with" in done.stdout and "1-cosine" in done.stdout
    assert "A: runner builtin" in done.stdout and "B: runner" not in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []  # what frameworks leave behind stays in a scratch folder


def test_another_model_differs_from_the_dump(dump: Path, tmp_path: Path) -> None:
    config = config_of("llama", num_attention_heads=4, num_key_value_heads=4, vocab_size=66, rope_theta=9000.0)
    other = make_folder(tmp_path / "other", config)
    report = verify(other, against=dump)
    assert report.exit_code == 1
    assert "rope_base" in report.data["forward"]["readings"] and logits_wrong(report)


def test_a_dump_is_not_replaced_unless_told_and_nothing_else_is_ever(hf: Path, dump: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists"):
        verify(hf, dump=dump)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is no dump"):
        verify(hf, dump=tmp_path / "notes", overwrite=True)
    with pytest.raises(UsageError, match="the same as, inside, or around"):
        verify(hf, dump=hf / "dump")
    before = (dump / "report.json").stat().st_mtime_ns
    assert verify(hf, dump=dump, overwrite=True).exit_code == 0
    assert (dump / "report.json").stat().st_mtime_ns > before
    assert sorted(path.name for path in dump.parent.iterdir()) == [dump.name]


def test_a_folder_that_is_no_dump_is_refused_before_anything_runs(ms: Path, hf: Path) -> None:
    with pytest.raises(CorruptError, match="is no dump"):
        verify(ms, against=hf)


def test_a_layer_that_is_not_loaded_shows_without_the_other_side(hf: Path, dump: Path, tmp_path: Path) -> None:
    """Level weights is left out then, so the runner itself must tell."""
    tensors = {name: array for name, array in read_whole(hf).items() if ".layers.1." not in name}
    write_whole(tmp_path / "less" / "model.safetensors", tensors)
    (tmp_path / "less" / "config.json").write_bytes((hf / "config.json").read_bytes())
    report = verify(tmp_path / "less", against=dump)
    assert (report.exit_code, len(report.data["forward"]["a"]["missing"])) == (1, 9)
    assert "model.layers.1.self_attn.q_proj.weight" in report.to_text()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"runner": "mindformers"}, "MindFormers cannot run this side: .*4"),
        ({"config": "nowhere"}, "config.json"),
    ],
)
def test_what_cannot_be_run_is_known_before_anything_is_read(
    hf: Path, tmp_path: Path, options: dict[str, Any], word: str
) -> None:
    convert(hf, tmp_path / "ms", to_dialect="mindformers", variant="qkv_concat-1.4")
    with pytest.raises(UsageError, match=word):
        verify(hf, tmp_path / "ms", **options)


def test_layouts_that_nothing_tells_are_not_guessed(hf: Path, ms: Path, tmp_path: Path) -> None:
    """Two foreign files of one fused layout: equal by name, and what they compute depends on which layout it is."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "part0.safetensors").write_bytes((ms / "part0.safetensors").read_bytes())
        (tmp_path / name / "config.json").write_bytes((hf / "config.json").read_bytes())
    with pytest.raises(UsageError, match="fit 2 layouts"):
        verify(tmp_path / "a", tmp_path / "b")
    assert verify(tmp_path / "a", tmp_path / "b", level="weights").exit_code == 0


@contextmanager
def running(hf: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a dump of `hf` in `folder`; give the command's process and the number of its runner's."""
    # a shell that starts the tests in the background has them, and their children, ignore Ctrl-C
    words = ["env", "--default-signal=INT", *COMMAND, str(hf), "--dump", str(folder / "dump")]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, first_child(process)
        finally:
            process.kill()


def first_child(process: subprocess.Popen[str]) -> int:
    """Wait for a process to have a child, and return its number."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(600):
        if process.poll() is None and (numbers := file.read_text().split()):
            return int(numbers[0])
        time.sleep(0.05)
    raise AssertionError("there is no child")


def ends(process: int) -> bool:
    """Wait until a process is gone; False when it stays for longer than twenty seconds."""
    for _ in range(200):
        if not Path(f"/proc/{process}").exists():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
@pytest.mark.parametrize("seconds", [0, 1.5])  # as the runner starts, and when it is at work
def test_no_process_outlives_the_command_and_there_is_no_dump(
    hf: Path, tmp_path: Path, how: signal.Signals, code: int, seconds: float
) -> None:
    with running(hf, tmp_path) as (process, child):
        time.sleep(seconds)
        process.send_signal(how)
        process.communicate(timeout=60)
    assert process.returncode == code
    assert ends(child)
    assert not (tmp_path / "dump").exists()
    assert how == signal.SIGKILL or list(tmp_path.iterdir()) == []  # who is killed takes nothing away


def test_a_runner_that_is_killed_is_an_error_and_no_result(hf: Path, tmp_path: Path) -> None:
    with running(hf, tmp_path) as (process, child):
        os.kill(child, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "was killed by signal 9" in errors and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
