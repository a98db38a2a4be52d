"""The contract of the page of `verify --html`: it holds the numbers of --json, trusts no name, and fetches nothing."""

from __future__ import annotations

import base64
import gzip
import json
import re
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from page_data import (
    COMMAND,
    UNTRUSTED,
    big_report,
    forward_data,
    input_row,
    parameter,
    result,
    untrusted_report,
    weights_report,
)
from page_reader import Reader, fetches, odd_figures, odd_scripts, strange

from ckptkit import UsageError
from ckptkit.verification.page import check_page, page, write_page
from ckptkit.verification.page_parts import groups, levels, verdict

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return weights_report(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def big() -> dict[str, Any]:
    return big_report()


@pytest.fixture(scope="module")
def small_page() -> str:
    return page(big_report(4, 8), COMMAND)


@pytest.fixture(scope="module")
def big_page(big: dict[str, Any]) -> str:
    return page(big, COMMAND)


def test_the_page_holds_the_data_once_and_whole(big: dict[str, Any], big_page: str, weights: dict[str, Any]) -> None:
    assert Reader(big_page).data == big
    assert Reader(page(weights, COMMAND)).data == weights
    assert len([e for e in Reader(big_page).elements if e[0] == "script" and e[1].get("type")]) == 2


def test_the_tables_hold_the_numbers_of_the_data(big: dict[str, Any], big_page: str, weights: dict[str, Any]) -> None:
    assert odd_figures(big_page, big) == []
    assert odd_figures(page(weights, COMMAND), weights) == []


@pytest.mark.parametrize("number", ["0.1234567890123456", "4e-06", "7.152557373046875e-07"])
def test_a_number_that_is_another_one_in_a_table_is_seen(small_page: str, number: str) -> None:
    assert f'value="{number}"' in small_page
    assert odd_figures(small_page.replace(f'value="{number}"', 'value="0.5"', 1), big_report(4, 8))


def test_numbers_that_are_not_finite_are_words_and_the_json_stays_valid() -> None:
    data = big_report(3, 8)
    data["forward"]["inputs"][0] |= {"relative": None, "sensitivity": float("inf"), "cosine": float("nan")}
    data["layers"]["rows"][2] |= {"relative": None, "max_abs": None, "largest": float("-inf"), "wrong": True}
    reader = Reader(page(data, COMMAND))
    assert reader.data["forward"]["inputs"][0]["sensitivity"] == "Infinity"
    assert reader.data["layers"]["rows"][2]["largest"] == "-Infinity"
    assert "NaN" in next(row for row in reader.rows if row.of == "logits" and row.values).values


@pytest.fixture(scope="module")
def tame_page() -> str:
    """Return the page of the report of untrusted names, with harmless ones in their place."""
    text = json.dumps(untrusted_report())
    for number, name in enumerate(UNTRUSTED):
        text = text.replace(json.dumps(name), f'"name_{chr(97 + number)}.w"')
    return page(json.loads(text), COMMAND)


def test_no_name_becomes_an_element_or_an_attribute(tame_page: str) -> None:
    data = untrusted_report()
    text = page(data, COMMAND)
    text.encode()
    reader = Reader(text)
    assert strange(text, tame_page) == []
    assert reader.data == data
    assert "49" not in {row.text for row in reader.rows} and "{{ 7 * 7 }}" in reader.text
    assert not {"\u202e", "\u2028", "\ud800"} & set(text)
    assert len(reader.inside["script"]) == 3


def test_a_name_that_is_not_escaped_is_seen(tame_page: str) -> None:
    text = page(untrusted_report(), COMMAND)
    for escaped, raw in (
        ("&lt;img src=x", "<img src=x"),
        ("&lt;script&gt;", "<script>"),
        ("\\u003c/script\\u003e", "</script>"),
    ):
        assert escaped in text
        broken = text.replace(escaped, raw)
        with suppress(json.JSONDecodeError):  # the data ended early
            assert strange(broken, tame_page) or Reader(broken).data != untrusted_report()


def test_the_page_fetches_nothing(small_page: str) -> None:
    assert list(fetches(small_page)) == []


@pytest.mark.parametrize(
    "added",
    [
        "<script src='//host/plotly.js'></script>",
        "<link rel=stylesheet href=style.css>",
        "<style>@import 'a.css';</style>",
        "<style>body { background: url(a.png) }</style>",
        "<p style='background: url(a.png)'>",
        "<script>fetch('a')</script>",
        "https://host/a",
    ],
)
def test_a_page_that_fetches_something_is_seen(small_page: str, added: str) -> None:
    assert list(fetches(small_page.replace("</main>", f"{added}</main>")))


def test_the_policy_names_the_two_scripts_and_lets_nothing_else_run(small_page: str) -> None:
    assert odd_scripts(small_page) == []
    assert odd_scripts(small_page.replace("startChart();\n</script>", "startChart(); \n</script>"))
    assert b"plotly.js v" in gzip.decompress(base64.b64decode(Reader(small_page).inside["script"][1]))[:100]


def test_80_layers_and_5000_parameters_make_a_page_of_a_few_megabytes(
    big: dict[str, Any], weights: dict[str, Any]
) -> None:
    """plotly.js takes 1.96 MB of each; the JSON and the rows take 0.4 kB a parameter."""
    assert len(big["layers"]["rows"]) == 3 + 3 * 80 and len(big["parameters"]) > 5000
    start = time.perf_counter()
    size = len(page(big, COMMAND).encode())
    assert time.perf_counter() - start < 30
    assert size < 4_500_000
    assert len(page(weights, COMMAND).encode()) < 2_100_000


def test_what_is_wrong_comes_first_then_layers_by_number() -> None:
    names = ["norm.weight", *(f"layers.{n}.w" for n in (0, 10, 9, 2)), "vision.1.w", "9" * 5000]
    rows = [parameter(name) for name in names] + [parameter("layers.9.b", "missing"), parameter("layers.2.b", "dtype")]
    found = groups(rows)
    titles = ["layers.9", "outside of the layers", "layers.0", "layers.2", "layers.10", "vision.1"]
    assert [group.title for group in found] == titles
    assert [group.unfolded for group in found] == [True, False, False, False, False, False]
    assert sorted(number for group in found for number, _ in group.rows) == list(range(len(rows)))
    assert found[0].counts == {"missing": 1, "loaded": 1} and found[0].rows[0][1]["name"] == "layers.9.b"


def test_the_verdict_and_the_levels_are_those_of_the_report(weights: dict[str, Any], big: dict[str, Any]) -> None:
    alone = {"level": "forward", "failed": [], "a": {"path": "a"}, "b": {"path": "a.dump"}, "files": [{}]}
    dumped = {**alone, "forward": {"a": result("a"), "runners": [], "inputs": [], "readings": {}}}
    against = {**alone, "failed": ["forward"], "forward": forward_data()}
    cases = [
        (weights, "A and B are equal at level weights", "passed passed not asked for not asked for"),
        (big, "A and B differ at level weights, forward and layers", "passed failed failed failed"),
        ({**weights, "failed": ["weights"], "level": "forward"}, "A and B differ at level weights",
         "passed failed not tried not asked for"),
        (dumped, "A's forward pass was run and kept", "passed not tried passed not asked for"),
        (against, "The forward passes differ", "passed not tried failed not asked for"),
    ]  # fmt: skip
    for data, words, states in cases:
        assert verdict(data) == words
        assert " ".join(level.state for level in levels(data)) == states


def reports_of_every_kind(weights: dict[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return reports, each with a text that its page must show."""
    files = {key: weights[key] for key in ("level", "failed", "notes", "a", "b", "files", "unlike_config")}
    alone = {**files, "a": {"path": "a"}, "b": {"path": "a.dump"}}
    ran = {"a": result("a"), "runners": [{"runner": "torch", "why": "told so"}], "inputs": [], "readings": {}}
    unloaded = forward_data(b=result("b", missing=["x.0.w", "x.1.w"], shapes=[["y.w", [2], [3]]]), inputs=[])
    odd = {"name": "odd", "tokens": 3, "skipped": "", "wrong": "A's logits are (3, 4)", "bound": 1e-6, "sensitivity": 0}
    read = forward_data(readings={"rope_base": [1e4, 1e6]})
    unknown = {**big_report(3, 8)["layers"], "cause": None, "first": "layers.1.mlp"}
    whole = {**weights, "forward": forward_data()}
    return {
        "files": (files, "equal at level"),
        "an empty checkpoint": ({**weights, "parameters": []}, "there is none on either side"),
        "one side": ({**alone, "forward": ran}, "told so"),
        "one side against a dump": ({**alone, "forward": ran | {"b": result("b")}}, "a.dump"),
        "not loaded": ({**weights, "forward": unloaded}, "x.{0..1}.w x 2"),
        "no logits": ({**weights, "forward": forward_data(inputs=[odd])}, "A's logits are (3, 4)"),
        "skipped": (whole, "not compared: no positions"),
        "readings": ({**weights, "forward": read}, "1000000.0"),
        "no cause": ({**whole, "layers": unknown}, "The cause is not known"),
        "layers that agree": ({**whole, "layers": {**unknown, "first": None}}, "Error by layer"),
        "not by its digest": (
            {**weights, "files": [{**weights["files"][1], "wrong": ["w in a.safetensors"]}]},
            "A: not as",
        ),
        "not by config": ({**weights, "unlike_config": ["A: w is (3,)"]}, "A: w is (3,)"),
    }


def test_reports_of_every_kind_have_their_page(weights: dict[str, Any]) -> None:
    for kind, (data, words) in reports_of_every_kind(weights).items():
        reader = Reader(page(data, "ckptkit verify a 'b c'"))
        text = " ".join(reader.text.split())
        assert words in text, kind
        assert "ckptkit verify a 'b c'" in text and verdict(data) in text, kind


def test_the_page_is_the_same_every_time(weights: dict[str, Any]) -> None:
    assert page(weights, COMMAND) == page(weights, COMMAND)


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    """Return the contrast of two colors, by WCAG 2: relative luminances, plus 0.05 for a screen's glare."""
    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_text_has_the_contrast_that_wcag_asks_for_in_both_color_schemes() -> None:
    style = (REPOSITORY / "ckptkit/verification/templates/verify.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in style.split("@media", 2)[:2])
    assert light.keys() == dark.keys() and len(light) > 15
    for colors in (light, dark):
        parts = ("embedding", "attention", "mlp", "block", "norm", "logits")
        pairs = [(name, "page") for name in ("text", "quiet", "good", "bad", "warn", "link", *parts)]
        pairs += [("text", "card"), ("quiet", "card"), *((name, f"{name}-back") for name in ("good", "bad", "warn"))]
        found = {(one, two): contrast(colors[one], colors[two]) for one, two in pairs}
        assert min(found.values()) >= 4.5, found
    assert contrast("#777777", "#ffffff") < 4.5 < contrast("#767676", "#ffffff")


def test_a_page_replaces_a_page_and_nothing_else(weights: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_page(weights, file, "first")
    write_page(weights, file, "second")
    assert "<code>second</code>" in file.read_text()
    file.write_text("<!doctype html>mine")
    for _ in range(2):
        with pytest.raises(UsageError, match="is no page that"):
            write_page(weights, file, "third")
    assert file.read_text() == "<!doctype html>mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_is_replaced_and_not_what_it_points_to(weights: dict[str, Any], tmp_path: Path) -> None:
    """A link to an older page, that is; one to anything else is kept."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report.html").symlink_to("mine")
    with pytest.raises(UsageError, match="is no page that"):
        write_page(weights, tmp_path / "report.html", COMMAND)
    (tmp_path / "mine").unlink()
    write_page(weights, tmp_path / "mine", "first")
    write_page(weights, tmp_path / "report.html", "second")
    assert "<code>first</code>" in (tmp_path / "mine").read_text() and not (tmp_path / "report.html").is_symlink()


def test_where_no_page_can_be_is_known_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.html").symlink_to("nowhere")
    for file, what in (
        (tmp_path, "is no file"),
        (tmp_path / "none" / "a.html", "there is no folder"),
        (tmp_path / "broken.html", "is no page that"),
        (Path("/dev/null"), "is no file"),
    ):
        with pytest.raises(UsageError, match=what):
            check_page(file)
    check_page(tmp_path / "a.html")
    monkeypatch.setitem(sys.modules, "plotly", None)  # as where it is not installed
    with pytest.raises(UsageError, match="needs plotly, which is not installed"):
        check_page(tmp_path / "a.html")


def test_a_disk_that_is_full_leaves_the_older_page_whole(weights: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_page(weights, file, "first")
    before = file.read_bytes()
    code = (
        "import json, resource, signal, sys\nfrom pathlib import Path\nfrom ckptkit import ResourceError\n"
        "from ckptkit.verification.page import write_page\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_page(json.loads(sys.stdin.read()), Path(sys.argv[1]), 'second')\n"
        "except ResourceError:\n    sys.exit(4)"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(file)],
        input=json.dumps(weights),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 4, done.stderr
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_the_templates_are_in_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {Path(name).name for name in wheel.namelist() if "verification/templates/" in name}
    assert packed == {path.name for path in (REPOSITORY / "ckptkit/verification/templates").iterdir()}
    assert "verify.html.j2" in packed


@pytest.mark.frameworks
def test_a_report_of_real_forward_passes_has_its_page(tmp_path: Path) -> None:
    from ckptkit import verify

    weights_report(tmp_path)
    report = verify(tmp_path / "hf", tmp_path / "ms", runner="builtin")
    data = json.loads(report.to_json())
    text = page(report.data, COMMAND)
    assert {"schema": 1, "command": "verify", "ok": True} | Reader(text).data == data
    assert odd_figures(text, data) == [] and "A and B are equal at level forward" in text
    assert input_row("x").keys() == data["forward"]["inputs"][0].keys()  # the made-up reports are of this form
    assert result("a").keys() == data["forward"]["a"].keys() and parameter("x").keys() == data["parameters"][0].keys()
