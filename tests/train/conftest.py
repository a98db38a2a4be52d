"""Fixtures of the tests of checkpoints of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.train.tiny_steps import make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run"


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: nobody pulls a plug here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
