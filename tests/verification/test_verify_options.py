"""The contract: no option does nothing in silence, and no page takes the place of what somebody else wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runner_jobs import REPOSITORY, config_of, make_folder

from ckptkit import UsageError, convert, verify
from ckptkit.cli import run
from tests.rank_results import read_file, write_whole

pytest.importorskip("plotly")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "hf", config_of("llama"))


@pytest.fixture
def ms(hf: Path, tmp_path: Path) -> Path:
    convert(hf, tmp_path / "ms", to_dialect="mindformers")
    return tmp_path / "ms"


def differing(ms: Path) -> None:
    """Change a checkpoint that was converted: its manifest would tell, too."""
    (ms / "ckptkit.json").unlink()
    [file] = ms.glob("*.safetensors")
    tensors = {name: array.copy() for name, array in read_file(file).items()}
    tensors["model.norm_out.weight"][0] ^= 1 << 20
    write_whole(file, tensors)


RUNS: dict[str, dict[str, Any]] = {
    "--stream": {"stream": True}, "--layers": {"layers": "0"}, "--runner": {"runner": "builtin"},
    "--device": {"device": "cuda"}, "--device-a": {"device_a": "cpu"}, "--device-b": {"device_b": "cuda:1"},
    "--max-tokens": {"max_tokens": 7},
}  # fmt: skip
IDLE: list[tuple[str, dict[str, Any]]] = [
    *((option, {"level": level, **told}) for option, told in RUNS.items() for level in ("files", "weights")),
    ("--lines", {"lines": 3}),
    ("--overwrite", {"overwrite": True}),
    ("--keep-going", {"level": "files", "keep_going": True}),
    ("--max-tokens", {"b": None, "against": "dump", "max_tokens": 7}),
    ("--overwrite", {"b": None, "against": "dump", "overwrite": True}),
    ("--keep-going", {"b": None, "dump": "dump", "keep_going": True}),
    ("--keep-going", {"sanity": "text.jsonl", "keep_going": True}),
    ("--overwrite", {"sanity": "text.jsonl", "overwrite": True}),
]


@pytest.mark.parametrize(("option", "told"), IDLE, ids=str)
def test_an_option_that_would_do_nothing_is_refused(hf: Path, ms: Path, option: str, told: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        verify(hf, **{"b": ms, **told})
    assert f"`{option}`" in refused.value.what


@pytest.mark.parametrize("level", ["files", "weights", "forward"])
@pytest.mark.parametrize(
    "told", [{"device": "bogus"}, {"device_a": "tpu"}, {"device_b": ""}, {"runner": "caffe"}], ids=str
)
def test_a_device_or_runner_that_there_is_not_is_refused_at_every_level(
    hf: Path, ms: Path, told: dict[str, Any], level: str
) -> None:
    with pytest.raises(UsageError, match="is no device|unknown runner"):
        verify(hf, ms, level=level, **told)


def test_a_default_of_the_settings_is_passed_over_and_named(
    hf: Path, ms: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is typed is the control: it is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckptkit.toml").write_text('[verify]\nstream = true\nmax-tokens = 9\ndevice-b = "cuda"\nlines = 3\n')
    assert run(["verify", str(hf), str(ms), "--level", "weights", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    for option in ("stream", "max-tokens", "device-b", "lines"):
        assert any(note.startswith(f"`{option}` of ckptkit.toml passed over: ") for note in notes), notes
    assert run(["verify", str(hf), str(ms), "--level", "weights", "--stream"]) == 2
    assert "`--stream` does nothing at level weights" in capsys.readouterr().err


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("place", ["hf/model.safetensors", "hf/config.json", "mine.txt", "hf/new.html", "ms/new.html",
                                   "config/new.html", "dump/new.html", "link/new.html", "link.html"])  # fmt: skip
def test_no_page_replaces_or_joins_what_is_read_or_what_is_no_page(
    hf: Path, ms: Path, tmp_path: Path, place: str, overwrite: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A place of its own is the control, where an older page is replaced."""
    (tmp_path / "config").mkdir()
    (tmp_path / "dump").mkdir()
    shutil.copy(hf / "config.json", tmp_path / "config")
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(hf)
    (tmp_path / "link.html").symlink_to(hf / "model.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ["verify", str(hf)]
    words += ["--dump", str(tmp_path / "dump")] if "dump" in place else [str(ms), "--level", "weights"]
    words += ["--config", str(tmp_path / "config")] if "config/" in place else []
    assert run([*words, "--html", str(tmp_path / place), *overwrite]) == 2, capsys.readouterr().out
    assert "does nothing" not in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    if place == "mine.txt":
        for _ in range(2):
            assert run([*words, "--html", str(tmp_path / "page.html")]) == 0
        assert "<!doctype html>" in (tmp_path / "page.html").read_text()


def test_overwrite_is_of_a_dump_and_not_of_a_page(
    hf: Path, ms: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", str(hf), str(ms), "--level", "weights", "--html", str(tmp_path / "page.html")]
    assert run([*words, "--overwrite"]) == 2
    assert "`--overwrite` does nothing without `--dump`" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    assert run(words) == 0


def test_where_no_page_can_be_written_is_said_before_anything_is_read(
    hf: Path, ms: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that is damaged is the control: where it is read, that is the error."""
    [file] = ms.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)
    words = ["verify", str(hf), str(ms), "--level", "weights"]
    assert run(words) == 5
    capsys.readouterr()
    assert run([*words, "--html", "/proc/x.html"]) == 4
    said = capsys.readouterr()
    assert said.out == "" and "cannot write" in said.err


LIMITED = """
import resource, signal, sys
from ckptkit.cli import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the page is larger
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("differ", [True, False])
def test_a_page_that_is_lost_takes_no_report_with_it(
    hf: Path, ms: Path, tmp_path: Path, as_json: bool, differ: bool
) -> None:
    """A difference is still what the exit code tells."""
    if differ:
        differing(ms)
    words = ["verify", str(hf), str(ms), "--level", "weights", "--html", str(tmp_path / "page.html")]
    done = subprocess.run(
        [sys.executable, "-B", "-c", LIMITED, *words, *(["--json"] if as_json else [])],
        capture_output=True, text=True, timeout=120, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == (1 if differ else 4), done.stderr
    assert "error: cannot write" in done.stderr and "page.html" in done.stderr
    assert not (tmp_path / "page.html").exists() and not list(tmp_path.glob(".*"))
    if as_json:
        assert json.loads(done.stdout)["ok"] is not differ
    else:
        assert f"{'differ' if differ else 'are equal'} at level weights" in done.stdout
