"""The contract of the page in a real browser without network: it draws, its numbers are the data's, and it filters.

Chromium is driven through its own protocol over a pipe, with real key strokes and a real mouse. Where there is no
Chromium, these tests are skipped.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_data import COMMAND, UNTRUSTED, Data, big_report, untrusted_report, weights_report

from ckptkit.verification.page import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--remote-debugging-pipe",
    "--window-size=1280,1600",
]  # fmt: skip
PATIENCE = 90.0


class Browser:
    """A headless Chromium with one page, and the events that it told of."""

    def __init__(self, folder: Path) -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pair in (os.pipe(), os.pipe()) for end in _closed_after(pair)]
        reads, self._out, self._in, writes = ends
        for mine in (self._out, self._in):
            os.set_inheritable(mine, False)
        script = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'
        command = ["bash", "-c", script, str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(reads, writes), env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[Data] = []

    def connect(self) -> None:
        """Take hold of the page that Chromium opened, and ask to be told of what happens in it."""
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Data:
        """Ask for something and wait for the answer."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._receive()).get("id") != self._number:
            self.events.append(found)
        assert "error" not in found, found
        return dict(found["result"])

    def _receive(self) -> Data:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            block = os.read(self._in, 1 << 20) if ready else b""
            assert block, "Chromium does not answer"
            self._buffer += block
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))

    def evaluate(self, script: str) -> Any:
        """Return the value of a script's expression in the page, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, file: Path) -> None:
        """Open a page and wait until its chart is drawn, where it has one."""
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait("document.readyState === 'complete' && document.URL.startsWith('file:')")
        self.wait("!document.getElementById('chart') || document.getElementById('chart').dataset.done === 'yes'")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.evaluate(condition):
            assert time.monotonic() < until, f"never came true: {condition}"
            time.sleep(0.05)

    def point(self, selector: str, event: str = "mouseMoved") -> None:
        """Move the mouse to the middle of an element, or press or release it there."""
        script = f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        x, y = self.evaluate(script)
        button = {} if event == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=event, x=x, y=y, **button)

    def click(self, selector: str) -> None:
        for event in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.point(selector, event)

    def screenshot(self, file: Path) -> bytes:
        image = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(image)
        return image

    def complaints(self) -> list[str]:
        """Return what the page asked of a network, and errors: of scripts, and of the security policy."""
        found = []
        self.evaluate("1")
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                found.append(params["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)


def _closed_after(pair: tuple[int, int]) -> Iterator[int]:
    for end in pair:
        yield end
        os.close(end)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        browser.connect()
        yield browser
    finally:
        browser.close()


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
