"""Fixtures of the tests of verification."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        browser.connect()
        yield browser
    finally:
        browser.close()
