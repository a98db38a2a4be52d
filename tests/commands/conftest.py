"""A working folder that holds one tiny HuggingFace model, `hf`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiny_models import make_hf_plain


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return make_hf_plain(tmp_path / "hf")


@pytest.fixture
def room(tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk, in tests that write many results and pull no plug."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
