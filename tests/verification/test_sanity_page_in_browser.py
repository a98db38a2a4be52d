"""The contract of the page of `verify --sanity` in a real browser without network: it filters, and fits the screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chromium import NEEDS_CHROMIUM, Browser
from page_data import UNTRUSTED
from sanity_data import COMMAND, ONES, Data, odd_report, untrusted_report

from ckptkit.verification.page import page

pytestmark = NEEDS_CHROMIUM
SHOWN = "[...document.querySelectorAll('tr[data-row]')].filter((r) => !r.hidden).map((r) => r.dataset.row)"
OPEN = "document.querySelectorAll('details.group[open]').length"


@pytest.fixture
def odd(browser: Browser, tmp_path: Path) -> Data:
    """Return the report of a model in which much is odd, whose page is open."""
    (tmp_path / "page.html").write_text(page(odd_report(), COMMAND))
    browser.open(tmp_path / "page.html")
    return odd_report()


def test_the_numbers_that_are_shown_are_those_of_the_data(browser: Browser, odd: Data) -> None:
    script = "[...document.querySelectorAll('%s')].map((r) => [...r.querySelectorAll('data')].map((d) => d.value))"
    shown = browser.evaluate(script % "tr[data-row]")
    for key, values in zip(browser.evaluate(SHOWN), shown, strict=True):
        label, number = key.split()
        rows = odd[label.lower()]["parameters"]
        row = rows[int(number)] if int(number) < len(rows) else {}
        figures = [row.get(key) for key in ("mean", "std", "low", "high", "nan", "inf", "zeros")]
        assert values == [json.dumps(figure) for figure in figures if figure is not None]
    losses = browser.evaluate(script % "#loss tbody tr")
    assert losses[-1] == [json.dumps(odd["a"]["tokens"]), json.dumps(odd["a"]["loss"]), json.dumps(odd["b"]["loss"])]
    assert json.loads(browser.evaluate("JSON.stringify(DATA)")) == odd
    assert browser.complaints() == []


def test_a_bar_is_as_long_as_its_loss_is_of_ln_of_the_vocabulary(browser: Browser, odd: Data) -> None:
    script = """[...document.querySelectorAll('#loss .bar')].map((bar) => {
        const width = (style) => Number(style.width.replace('px', ''));
        return width(getComputedStyle(bar, '::before')) / bar.clientWidth;
    })"""
    found = browser.evaluate(script)
    wanted = [odd[label]["lines"][at]["loss"] / odd["ln_vocab"] for at in range(3) for label in "ab"]
    wanted += [odd[label]["loss"] / odd["ln_vocab"] for label in "ab"]
    # a tenth of a percent is what the page rounds to, and a browser to the 64th of a pixel
    assert found == pytest.approx(wanted, abs=2e-3)


def test_typing_and_clicking_filters_the_parameters_of_both_sides(browser: Browser, odd: Data) -> None:
    everything = browser.evaluate(SHOWN)
    assert len(everything) == sum(len(odd[label]["parameters"]) for label in "ab") + 1  # and the missing one
    assert browser.evaluate(OPEN) == 3
    browser.click("#text")
    browser.call("Input.insertText", text="Layers.9. NORM")
    number = next(n for n, row in enumerate(odd["a"]["parameters"]) if row["name"] == ONES)
    assert browser.evaluate(SHOWN) == [f"A {number}", f"B {number - 1}"]  # the missing one stood before it
    assert (
        browser.evaluate("document.getElementById('shown').textContent") == f"2 of {len(everything)} parameters shown"
    )
    browser.evaluate("document.getElementById('text').select()")
    browser.call("Input.insertText", text="freshly")  # the words about a parameter are found, too
    assert browser.evaluate(SHOWN) == [f"B {number - 1}"]
    browser.evaluate("document.getElementById('text').select()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Backspace", code="Backspace", windowsVirtualKeyCode=8)
    browser.click("input[name=status][value=fine]")
    assert len(browser.evaluate(SHOWN)) == 3 + 12 + 2
    browser.click("input[name=status][value=fine]")
    assert browser.evaluate(SHOWN) == everything and browser.evaluate(OPEN) == 3
    browser.click("#fold")
    assert browser.evaluate(OPEN) == 0


def test_the_page_is_no_wider_than_a_narrow_screen(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(odd_report(), COMMAND))
    overflow = "document.documentElement.scrollWidth - innerWidth"
    try:
        browser.resize(420)
        browser.open(tmp_path / "page.html")
        assert browser.evaluate(overflow) <= 0
        browser.evaluate("document.querySelector('.wide').className = ''")  # the control: a table that does not scroll
        browser.evaluate("document.querySelector('#loss').style.width = '500px'")
        assert browser.evaluate(overflow) > 0
    finally:
        browser.resize(0)


def test_no_name_runs_or_becomes_an_element(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(untrusted_report(), COMMAND))
    browser.open(tmp_path / "page.html")
    shown = browser.evaluate("document.body.textContent")
    assert next(name for name in UNTRUSTED if "<b>" in name) in shown
    assert browser.evaluate(
        "window.hacked === undefined && document.querySelector('main img, main a, main b, main script') === null"
    )
    assert browser.complaints() == []


def test_without_javascript_the_verdict_and_the_tables_are_there(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page(odd_report(), COMMAND))
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=(tmp_path / "page.html").as_uri())
        browser.wait("document.readyState === 'complete'")
        text = browser.evaluate("document.body.innerText")
        assert "Something is wrong with A and B" in text and "every element is zero, a matrix" in text
        assert browser.evaluate("document.querySelector('.filter').checkVisibility()") is False
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
