"""The contract of the page of `verify --sanity`: it holds the report once and whole, and shows its numbers.

What does not live here: a browser (`test_sanity_page_in_browser.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_data import UNTRUSTED
from page_reader import Reader, fetches, numbers, strange
from runner_jobs import REPOSITORY, config_of, ids_of, make_folder
from sanity_data import COMMAND, GONE, ONES, ZERO, Data, odd_report, report, side, unloaded_report, untrusted_report

from ckptkit import convert
from ckptkit.verification.page import page
from ckptkit.verification.sanity_parts import words

KEYS = ("mean", "std", "low", "high", "nan", "inf", "zeros")


def odd_statistics(text: str, data: Data) -> list[str]:
    """Return the rows of the page's tables whose numbers are not exactly those of the data."""
    rows = Reader(text).rows
    sides = [label for label in "ab" if label in data]
    wanted = {
        f"{label.upper()} {number}": (row["name"], numbers(*(row[key] for key in KEYS)))
        for label in sides
        for number, row in enumerate(data[label]["parameters"])
    }
    lines: list[tuple[str, list[str]]] = [
        (row["name"], numbers(row["tokens"], *(data[label]["lines"][at]["loss"] for label in sides)))
        for at, row in enumerate(data["a"]["lines"])
    ]
    lines += [("all", numbers(data["a"]["tokens"], *(data[label]["loss"] for label in sides)))] if lines else []
    wanted |= {f"loss {at}": line for at, line in enumerate(lines)}
    wanted["ln"] = (f"ln({data['vocab']})", numbers(data["ln_vocab"], data["margin"]))
    if data["gap"] is not None:
        wanted["gap"] = ("|A - B|", numbers(data["gap"], data["bound"]))
    shown = {row.number: row for row in rows if row.number and row.values}
    shown |= {f"loss {at}": row for at, row in enumerate(row for row in rows if row.of == "loss" and row.values)}
    shown |= dict(zip(("ln", "gap"), (row for row in rows if row.of == "bounds" and row.values), strict=False))
    assert shown.keys() == wanted.keys()
    return [key for key, (name, found) in wanted.items() if shown[key].values != found or name not in shown[key].text]


REPORTS = {
    "one side": report("a"), "two sides": report("a", "b"), "odd": odd_report(), "unloaded": unloaded_report(),
    "ids": report("a", tokenizer=None),
}  # fmt: skip


@pytest.mark.parametrize("kind", REPORTS)
def test_the_page_holds_the_data_once_and_shows_its_numbers(kind: str) -> None:
    text = page(REPORTS[kind], COMMAND)
    assert Reader(text).data == REPORTS[kind]
    assert odd_statistics(text, REPORTS[kind]) == []
    assert list(fetches(text)) == [] and COMMAND in Reader(text).text
    assert len(text) < 500_000 and len(Reader(text).inside["script"]) == 2  # no plotly.js: there is no chart


@pytest.mark.parametrize("key", ["std", "loss", "gap", "ln_vocab"])
def test_a_number_that_is_another_one_in_a_table_is_seen(key: str) -> None:
    data = odd_report()
    number = data["b"]["parameters"][7]["std"] if key == "std" else data["a"]["loss"] if key == "loss" else data[key]
    text = page(data, COMMAND)
    assert f'value="{number}"' in text
    assert odd_statistics(text.replace(f'value="{number}"', 'value="0.5"', 1), data)


def test_the_verdict_is_that_of_the_report() -> None:
    suspect = report("a")
    suspect["a"]["strange"] = [line for line in odd_report()["b"]["strange"] if line["severity"] == "suspect"]
    wrong_b = odd_report() | {"failed": []}
    not_finite = report("a", failed=["the loss of A is not finite"])
    not_finite["a"]["loss"] = None
    cases = [
        (report("a"), True, "A looks like a trained model"),
        (report("a", "b"), True, "A and B look like a trained model"),
        (suspect, True, "A looks like a trained model, but 1 parameters look odd"),
        (wrong_b, False, "Something is wrong with B"),
        (odd_report(), False, "Something is wrong with A and B"),
        (unloaded_report(), False, "Something is wrong with A"),
        (not_finite, False, "Something is wrong with A"),
    ]
    for data, sane, verdict in cases:
        found = words(data)
        assert (found["sane"], found["verdict"]) == (sane, verdict)
        assert verdict in " ".join(Reader(page(data, COMMAND)).text.split())


def test_what_is_strange_comes_first_and_a_parameter_that_is_in_no_file_has_its_row() -> None:
    b = words(odd_report())["sides"][1]
    wrong = [("outside of the layers", "embedding"), ("layers.2", "layers.2.attention.wq")]
    wrong += [("layers.3", "layers.3.attention.wq"), ("layers.5", ZERO), ("layers.7", GONE)]
    first = [(group.title, group.rows[0][1]["name"]) for group in b.groups]
    assert first[:7] == [*wrong, ("layers.9", ONES), ("layers.0", "layers.0.norm")]
    assert [group.unfolded for group in b.groups[:5]] == [True, True, True, False, False]
    statuses = {row["name"]: row["status"] for row in b.rows}
    assert (statuses[GONE], statuses[ONES], statuses["layers.0.norm"]) == ("wrong", "suspect", "note")
    assert sum(status != "fine" for status in statuses.values()) == 3 + 12 + 2
    text = next(row["texts"] for row in b.rows if row["name"] == "layers.3.norm")
    assert text == ["equal in every byte: layers.2.norm"]


def test_equal_layers_are_told_in_one_line() -> None:
    text = " ".join(Reader(page(odd_report(), COMMAND)).text.split())
    assert "B: layers 2, 3: 6 parameters are equal in every byte" in text
    assert f"B: {ONES}: looks freshly initialised" in text


def test_no_name_becomes_an_element_or_an_attribute() -> None:
    tame = json.dumps(untrusted_report())
    for number, name in enumerate(UNTRUSTED):
        tame = tame.replace(json.dumps(name), f'"name_{chr(97 + number)}.w"')
    text, tame_page = page(untrusted_report(), COMMAND), page(json.loads(tame), COMMAND)
    text.encode()
    assert strange(text, tame_page) == []
    assert Reader(text).data == untrusted_report()
    assert not {"\u202e", "\u2028", "\ud800"} & set(text)
    broken = text.replace("&lt;img src=x", "<img src=x")  # the control
    assert broken != text and strange(broken, tame_page)


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptkit", "verify", *map(str, arguments), "--no-progress"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


@pytest.mark.frameworks
def test_the_command_line_writes_the_page_of_its_json(tmp_path: Path) -> None:
    hf, file = make_folder(tmp_path / "hf", config_of("llama")), tmp_path / "page.html"
    convert(hf, tmp_path / "ms", to_dialect="mindformers")
    (tmp_path / "text.jsonl").write_text(json.dumps({"input_ids": ids_of(40)}))
    asked = ("--sanity", tmp_path / "text.jsonl", "--runner", "builtin", "--html", file, "--json")
    done = run(hf, tmp_path / "ms", *asked)
    assert done.returncode == 1, done.stderr  # random weights know nothing
    data = json.loads(done.stdout)
    text = file.read_text()
    assert {"schema": 1, "command": "verify", "ok": False} | Reader(text).data == data
    assert odd_statistics(text, data) == []
    assert "knows nothing" in text and f"--html {file}" in Reader(text).text
    made_up = odd_report()
    assert data.keys() - {"schema", "command", "ok"} == made_up.keys()  # the made-up reports are of this form
    assert data["a"].keys() == made_up["a"].keys() == side("a", 1, 0.0, []).keys()
    assert data["a"]["parameters"][0].keys() == made_up["a"]["parameters"][0].keys()
    assert data["gap"] == abs(data["a"]["loss"] - data["b"]["loss"])
