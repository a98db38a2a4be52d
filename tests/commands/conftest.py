"""A working folder that holds one tiny HuggingFace model, `hf`."""

from __future__ import annotations

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
