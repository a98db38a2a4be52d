"""Puts this folder on the path, so that tests in every room can import `fuzz` and the other shared helpers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crash_checks import Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("runner"))
    yield runner
    runner.close()
