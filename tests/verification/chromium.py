"""A real Chromium without network, driven through its own protocol over a pipe: real key strokes, a real mouse."""

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

Data = dict[str, Any]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)
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

    def resize(self, width: int) -> None:
        """Make the screen so many pixels wide; 0: as it was."""
        if width:
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            self.call("Emulation.setDeviceMetricsOverride", **metrics)
        else:
            self.call("Emulation.clearDeviceMetricsOverride")

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
