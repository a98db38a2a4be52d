"""A page of `verify --html` as a browser without JavaScript reads it, and what a check may find odd about it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass(slots=True)
class Row:
    """A row of a table: the table's own id or that of what it is in, its text, and the values of its numbers."""

    of: str
    number: str = ""
    text: str = ""
    values: list[str] = field(default_factory=list)


class Reader(HTMLParser):
    """Read a page as a browser without JavaScript does: elements, rows of tables, and what is in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows = [Row("")]  # the first is what stands before all tables
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self._in, self._of = "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        self._of = found.get("id") or self._of
        self._in = tag
        if tag in self.inside:
            self.inside[tag].append("")
        elif tag == "tr":
            self.rows.append(Row(self._of, found.get("data-row") or ""))
        elif tag == "data":
            self.rows[-1].values.append(str(found["value"]))

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in self.inside:
            self.inside[self._in][-1] += data
            return
        self.text += data
        self.rows[-1].text += data

    @property
    def data(self) -> Any:
        return json.loads(self.inside["script"][0])


def numbers(*values: Any) -> list[str]:
    return [json.dumps(value) for value in values if value is not None]


def odd_figures(text: str, data: dict[str, Any]) -> list[str]:
    """Return the rows of the page's tables whose numbers are not exactly those of the data."""
    rows = Reader(text).rows
    wanted = {}
    for number, found in enumerate(data.get("parameters", [])):
        figures = numbers(found["changed"], found["max_abs"], found["max_relative"]) if "shape" in found else []
        wanted[f"parameter {number}"] = (found["name"], figures)
    for found in data.get("forward", {}).get("inputs", []):
        keys = ("tokens", "relative", "bound", "sensitivity", "max_abs", "cosine", "kl", "top1", "top5", "worst")
        figures = numbers(*(found[key] for key in (keys if "max_abs" in found else ["tokens"])))
        wanted[f"logits {found['name']}"] = (found["name"], figures)
    for found in data.get("layers", {}).get("rows", []):
        keys = ("relative", "bound", "max_abs", "largest")
        wanted[f"layers {found['name']}"] = (found["name"], numbers(*(found[key] for key in keys)))
    computed = data.get("compute", {})
    sides = [computed[label] for label in "ab" if label in computed]
    for at in range(len(sides[0]["rows"]) if sides else 0):
        cells = [side["rows"][at] for side in sides]
        keys = ("relative", "largest", "share", "not_finite")
        wanted[f"compute {at}"] = (cells[0]["name"], numbers(*(cell[key] for cell in cells for key in keys)))
    for at in range(len(sides[0]["inputs"]) if sides else 0):
        cells = [side["inputs"][at] for side in sides]
        figures = numbers(cells[0]["tokens"], *(cell[key] for cell in cells for key in ("relative", "top1")))
        wanted[f"computed {at}"] = (cells[0]["name"], figures)
    shown = {f"parameter {row.number}": row for row in rows if row.number}
    for table in ("logits", "layers", "compute", "computed"):
        own = [row for row in rows if row.of == table and row.values]
        known = [key for key in wanted if key.startswith(f"{table} ")]
        assert len(own) == len(known)
        shown |= dict(zip(known, own, strict=True))
    assert shown.keys() == wanted.keys()
    return [
        key for key, (name, figures) in wanted.items() if shown[key].values != figures or name not in shown[key].text
    ]


def strange(text: str, tame: str) -> list[str]:
    """Return the elements and attributes that a page has, or lacks, other than a page of harmless names."""
    kinds = [
        Counter((tag, attribute) for tag, found in Reader(source).elements for attribute in found or [""])
        for source in (text, tame)
    ]
    return [f"{tag} {attribute}" for tag, attribute in (kinds[0] - kinds[1]) + (kinds[1] - kinds[0])]


def fetches(text: str) -> Iterator[str]:
    """Yield whatever in the page's elements and styles a browser would fetch, and every URL outside of plotly.js."""
    reader = Reader(text)
    for tag, attributes in reader.elements:
        for name in ("src", "srcset", "href", "data", "poster", "action", "formaction", "background", "xlink:href"):
            if name in attributes:
                yield f"<{tag} {name}={attributes[name]}>"
        style = attributes.get("style") or ""
        yield from re.findall(r"url\(.*?\)", style)
        if attributes.get("http-equiv", "").lower() == "refresh":  # type: ignore[union-attr]
            yield "<meta refresh>"
    for style in reader.inside["style"]:
        yield from re.findall(r"@import[^;]*|(?:url|image-set|src)\(.*?\)", style)
    yield from re.findall(r"\b(?:https?|wss?|ftp):(?://|\\/\\/)[^\s\"'<]*", text)
    yield from re.findall(r"\b(?:fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b", text)


def odd_scripts(text: str) -> list[str]:
    """Return the scripts, plotly.js unpacked, that the page's own policy does not name, or names in vain."""
    reader = Reader(text)
    policy = next(a["content"] for _, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy")
    named = set(re.findall(r"'sha256-([^']+)'", policy or ""))
    kinds = [attributes.get("type") for tag, attributes in reader.elements if tag == "script"]
    assert kinds == ["application/json", "text/plain", None]
    scripts = [gzip.decompress(base64.b64decode(reader.inside["script"][1])), reader.inside["script"][2].encode()]
    digests = {base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts}
    assert "default-src 'none'" in (policy or "") and "unsafe-eval" not in (policy or "")
    return sorted(digests ^ named)
