"""The contract of the page in a real browser without network: it draws, its numbers are the data's, and it filters.

Where there is no Chromium, these tests are skipped. What does not live here: driving it (`chromium.py`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from chromium import NEEDS_CHROMIUM, Browser
from page_data import COMMAND, UNTRUSTED, Data, big_report, layers_data, untrusted_report, weights_report

from ckptkit.verification.page import page

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Data]]:
    folder = tmp_path_factory.mktemp("pages")
    reports = {"big": big_report(), "untrusted": untrusted_report(), "weights": weights_report(folder / "models")}
    for name, data in reports.items():
        (folder / f"{name}.html").write_text(page(data, COMMAND))
    return {name: (folder / f"{name}.html", data) for name, data in reports.items()}


@pytest.fixture
def big(browser: Browser, pages: dict[str, tuple[Path, Data]]) -> Data:
    """Return the report of 80 layers and 5,000 parameters, whose page is open."""
    browser.open(pages["big"][0])
    return pages["big"][1]


SHOWN_ROWS = "[...document.querySelectorAll('tr[data-row]')].filter((r) => !r.hidden).map((r) => Number(r.dataset.row))"
POINTS = "[...document.querySelectorAll('#chart .scatterlayer .trace')].map((t) => t.querySelectorAll('.point').length)"
HOVER = "[...document.querySelectorAll('#chart .hoverlayer text')].map((t) => t.textContent).join(' ')"


def test_the_page_draws_the_chart_and_asks_nothing_of_a_network(browser: Browser, big: Data) -> None:
    rows = big["layers"]["rows"]
    wrong = sum(row["wrong"] for row in rows)
    assert browser.evaluate(POINTS) == [0, wrong, 1, 80, 80, 80, 1, 1]  # bound, rings, then the parts
    assert "first divergence: layers.40.attention" in browser.evaluate("document.querySelector('#chart').textContent")
    assert browser.evaluate("document.querySelectorAll('#chart .shapelayer path').length") == 1
    titles = browser.evaluate("[...document.querySelectorAll('#chart .modebar-btn')].map((b) => b.dataset.title)")
    assert len(titles) == 4 and not [title for title in titles if "hare" in title or "loud" in title]
    assert browser.complaints() == []


@pytest.mark.parametrize("added", ["<img src='https://host.invalid/a.png'>", "<script>1</script>", "<p onclick='1'>"])
def test_a_page_that_fetches_or_runs_something_is_seen(
    browser: Browser, pages: dict[str, tuple[Path, Data]], tmp_path: Path, added: str
) -> None:
    text = pages["weights"][0].read_text()
    (tmp_path / "page.html").write_text(text.replace("</main>", f"{added}</main>"))
    browser.open(tmp_path / "page.html")
    browser.call("Runtime.evaluate", expression="document.querySelector('[onclick]')?.click()")
    assert browser.complaints()


def test_the_numbers_that_are_shown_are_those_of_the_data(browser: Browser, big: Data) -> None:
    script = (
        "[...document.querySelectorAll('%s')].map((r) => [...r.querySelectorAll('data')].map((d) => Number(d.value)))"
    )
    keys = ("relative", "bound", "max_abs", "largest")
    rows = browser.evaluate(script % "#layers tbody tr")
    assert rows == [[row[key] for key in keys] for row in big["layers"]["rows"]]
    rows = browser.evaluate(script % "tr[data-row]")
    order = browser.evaluate(SHOWN_ROWS)
    assert sorted(order) == list(range(len(big["parameters"])))
    for number, found in zip(order, rows, strict=True):
        row = big["parameters"][number]
        figures = [row[key] for key in ("changed", "max_abs", "max_relative") if row.get(key) is not None]
        assert found == figures
    drawn = browser.evaluate("document.getElementById('chart').data.slice(2).flatMap((t) => Array.from(t.y))")
    wanted = sorted(row["relative"] for row in big["layers"]["rows"] if row["relative"])
    assert sorted(drawn)[1:] == wanted  # and the zero, at the scale's lower end
    assert json.loads(browser.evaluate("JSON.stringify(DATA)")) == big


def test_a_point_under_the_mouse_tells_its_numbers(browser: Browser, big: Data) -> None:
    row = next(row for row in big["layers"]["rows"] if row["name"] == "layers.40.attention")
    browser.evaluate("document.querySelectorAll('#chart .trace')[3].querySelectorAll('.point')[40].id = 'here'")
    browser.point("#here")
    browser.wait(f"{HOVER} !== ''")
    text = browser.evaluate(HOVER)
    assert row["name"] in text and "over the bound" in text
    for key in ("relative", "bound", "max_abs"):
        assert json.dumps(row[key]) in text


def test_typing_and_clicking_filters_the_parameters(browser: Browser, big: Data) -> None:
    names = [row["name"] for row in big["parameters"]]
    assert len(browser.evaluate(SHOWN_ROWS)) == len(names) > 5000
    browser.click("#text")
    start = time.perf_counter()
    browser.call("Input.insertText", text="Layers.41. experts.1")
    wanted = [number for number, name in enumerate(names) if "layers.41." in name and "experts.1" in name]
    assert browser.evaluate(SHOWN_ROWS) == wanted and len(wanted) == 11
    assert time.perf_counter() - start < 10
    assert browser.evaluate("document.getElementById('shown').textContent") == f"11 of {len(names)} parameters shown"
    groups = (
        "[...document.querySelectorAll('details.group')].filter((g) => !g.hidden).map((g) => [g.open, g.innerText])"
    )
    assert [opened for opened, _ in browser.evaluate(groups)] == [True]
    browser.evaluate("document.getElementById('text').select()")
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Backspace", code="Backspace", windowsVirtualKeyCode=8)
    assert len(browser.evaluate(SHOWN_ROWS)) == len(names)
    browser.click("input[name=status][value=loaded]")
    statuses = [big["parameters"][number]["status"] for number in browser.evaluate(SHOWN_ROWS)]
    assert sorted(statuses) == ["dtype", "missing", "value", "value"]
    visible = browser.evaluate("document.getElementById('parameters').innerText")
    assert "model.layers.40.attention.wq.weight" in visible and "experts" not in visible


def test_layers_fold(browser: Browser, big: Data) -> None:
    opened = "document.querySelectorAll('details.group[open]').length"
    assert browser.evaluate(opened) == 2  # those where something is wrong
    browser.click("#unfold")
    assert browser.evaluate(opened) == 81
    browser.click("#fold")
    assert browser.evaluate(opened) == 0
    assert browser.evaluate("document.querySelector('[data-row]').checkVisibility()") is False
    browser.click("details.group summary")
    assert browser.evaluate(opened) == 1


def test_no_name_runs_or_becomes_an_element(browser: Browser, pages: dict[str, tuple[Path, Data]]) -> None:
    browser.open(pages["untrusted"][0])
    name = next(name for name in UNTRUSTED if "<b>" in name)  # Plotly would make it bold, and a link
    browser.evaluate("document.querySelectorAll('#chart .trace')[4].querySelectorAll('.point')[1].id = 'here'")
    browser.point("#here")
    browser.wait(f"{HOVER} !== ''")
    assert name in browser.evaluate(HOVER)
    assert browser.evaluate(
        "window.hacked === undefined && document.querySelector('main img, main a, main script') === null"
    )
    assert browser.complaints() == []


FITS = "document.querySelector('#chart .main-svg').clientWidth === document.getElementById('chart').clientWidth"
MARK = """(() => {
    const text = document.querySelector('#chart .annotation-text').getBoundingClientRect();
    const svg = document.querySelector('#chart .main-svg').getBoundingClientRect();
    return {
        cut: text.left < svg.left || text.right > svg.right || text.top < svg.top,
        wide: document.documentElement.scrollWidth > innerWidth,
        words: document.querySelector('#chart .annotation-text').textContent,
    };
})()"""


@pytest.mark.parametrize("first", [0, 11, 14, 15, 29])
def test_on_a_narrow_screen_the_words_of_the_first_divergence_are_whole(
    browser: Browser, tmp_path: Path, first: int
) -> None:
    """420 pixels, as of a phone: opened there, and made as narrow while the page is open."""
    layers = layers_data(30, first)
    (tmp_path / "page.html").write_text(page(big_report(30, 3) | {"layers": layers}, COMMAND))
    try:
        for widths in ((420,), (1280, 420)):
            for number, width in enumerate(widths):
                browser.resize(width)
                if number == 0:
                    browser.open(tmp_path / "page.html")
                browser.wait(FITS)
                found = browser.evaluate(MARK)
                assert found == {"cut": False, "wide": False, "words": f"first divergence: layers.{first}.attention"}
        control = "{'annotations[0].x': 29 * 3, 'annotations[0].xanchor': 'left'}"
        browser.evaluate(f"Plotly.relayout('chart', {control}).then(() => null)")
        assert browser.evaluate(MARK)["cut"]
    finally:
        browser.resize(0)


def test_a_long_name_of_the_first_divergence_is_shortened_to_the_screen(browser: Browser, tmp_path: Path) -> None:
    data = big_report(30, 3)
    data["layers"]["rows"][46]["name"] = data["layers"]["first"] = name = "layers.15." + "attention" * 9
    (tmp_path / "page.html").write_text(page(data, COMMAND))
    try:
        browser.resize(420)
        browser.open(tmp_path / "page.html")
        found = browser.evaluate(MARK)
        assert not found["cut"] and found["words"].startswith(f"first divergence:{name[:20]}"), found
    finally:
        browser.resize(0)


def test_the_page_follows_the_color_scheme(browser: Browser, big: Data) -> None:
    colors = """[document.body, document.querySelector('#chart .main-svg')]
        .map((element) => getComputedStyle(element).backgroundColor)"""
    light = browser.evaluate(colors)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.wait(f"{colors}.every((color, at) => color !== {json.dumps(light)}[at])")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.wait(f"JSON.stringify({colors}) === JSON.stringify({json.dumps(light)})")


def test_a_picture_of_the_page_is_not_blank(browser: Browser, big: Data, tmp_path: Path) -> None:
    shown = browser.screenshot(tmp_path / "page.png")
    (tmp_path / "blank.html").write_text("<!doctype html><body style='background: #fcfcfb'>")
    browser.open(tmp_path / "blank.html")
    blank = browser.screenshot(tmp_path / "blank.png")
    assert len(shown) > 5 * len(blank)  # PNG packs one color to almost nothing


def test_without_javascript_the_verdict_and_the_tables_are_there(
    browser: Browser, pages: dict[str, tuple[Path, Data]]
) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=pages["big"][0].as_uri())
        browser.wait("document.readyState === 'complete'")
        text = browser.evaluate("document.body.innerText")
        assert "A and B differ at level weights, forward and layers" in text
        assert "model.layers.40.attention.wq.weight" in text and COMMAND in text
        assert browser.evaluate("document.querySelector('.filter').checkVisibility()") is False
        assert browser.evaluate("typeof DATA") == "undefined"
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
