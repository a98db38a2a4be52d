"""The contract: whatever a user names, types or leaves lying about ends in a result or in an error with a remedy.

No traceback, no exit code 70, nothing that hangs, and no file lost that ckptkit did not make.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit import CorruptError, UsageError, check, convert, diff, inspect, open_checkpoint
from ckptkit.cli import run
from ckptkit.commands.common import parse_size
from ckptkit.formats.files import read_json_object
from ckptkit.report import Report, fold_names
from tests.tiny_models import make_hf_plain

DEEP = "[" * 100_000
A = "a" * 32


def notes(report: Report) -> str:
    return "\n".join(text for label, text in report.rows if label == "note")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --plan


@pytest.mark.parametrize("plan", ["hf/model.safetensors", "hf/config.json", "hf/new.json", "taken.json"])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_a_plan_is_never_written_over_a_file_nor_into_the_source(room: Path, plan: str, more: tuple[str]) -> None:
    (room / "taken.json").write_text("mine")
    before = files_of(room)
    assert run(["convert", "hf", "ms", "--plan", plan, *more]) == 2
    assert files_of(room) == before


@pytest.mark.parametrize("plan", ["hf/model.safetensors", "hf/config.json", "ms/plan.json", "ms", f"ms.partial-{A}/p"])
def test_overwrite_does_not_let_a_plan_into_the_source_or_the_result(room: Path, plan: str) -> None:
    before = files_of(room)
    assert run(["convert", "hf", "ms", "--overwrite", "--plan", plan]) == 2
    assert files_of(room) == before


def test_a_plan_is_replaced_on_demand_and_may_stay_when_it_is_the_same(room: Path) -> None:
    (room / "plan.json").write_text("mine")
    assert run(["convert", "hf", "ms", "--plan", "plan.json", "--overwrite"]) == 0
    made = (room / "plan.json").read_bytes()
    assert json.loads(made)["schema"] == 1
    assert run(["convert", "hf", "other", "--plan", "plan.json"]) == 0
    assert (room / "plan.json").read_bytes() == made
    assert sorted(path.name for path in room.iterdir()) == ["hf", "ms", "other", "plan.json"]


@pytest.mark.parametrize("plan", ["gone/plan.json", "folder", "pipe", "/dev/null", "/dev/stdout", "x" * 300, "loop"])
def test_a_plan_goes_to_a_regular_file_in_a_folder_that_is_there(
    room: Path, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "folder").mkdir()
    os.mkfifo(room / "pipe")
    (room / "loop").symlink_to("loop")
    assert run(["convert", "hf", "ms", "--overwrite", "--plan", plan]) == 2
    assert "the system reports" not in capsys.readouterr().err
    assert not (room / "ms").exists()


# files that are no files


@pytest.mark.parametrize("kind", ["pipe", "folder", "gone", "loop"])
@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "hf", "--expect", "{}"],
        ["convert", "hf", "ms", "--table", "{}"],
        ["diff", "hf", "hf", "--table", "{}"],
        ["inspect", "hf", "--table", "{}"],
        ["tables", "check", "{}"],
        ["tables", "list", "--table", "{}"],
        ["tables", "show", "llama", "--config", "{}"],
        ["convert", "hf", "ms", "--config", "{}"],
    ],
)
def test_a_file_argument_that_is_no_regular_file_is_refused(room: Path, kind: str, command: list[str]) -> None:
    os.mkfifo(room / "pipe")
    (room / "folder").mkdir()
    (room / "loop").symlink_to("loop")
    assert run([word.replace("{}", kind) for word in command]) == 2


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_settings_that_are_no_regular_file_are_refused(room: Path, kind: str) -> None:
    os.mkfifo(room / "ckptkit.toml") if kind == "pipe" else (room / "ckptkit.toml").mkdir()
    assert run(["convert", "hf", "ms"]) == 2


# ckptkit.toml


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[convert]\ntable = 3", "`table` must be a list of texts"),
        ('[convert]\ntable = "x.toml"', "`table` must be a list of texts"),
        ("[convert]\ntable = [3]", "`table` must be a list of texts"),
        ("[convert]\nconfig = {a = 1}", "`config` must be a text"),
        ("[convert]\nplan = true", "`plan` must be a text"),
        ("[convert]\nworkers = 2.7", "`workers` must be a whole number"),
        ("[convert]\nworkers = true", "`workers` must be a whole number"),
        ('[convert]\noverwrite = "no"', "`overwrite` must be true or false"),
        ("[tables.list]\ntable = 5", "`table` must be a list of texts"),
        ('[convert]\nsrc = "a\\u0000b"', "`src`"),
        ("x = " + DEEP, "nested too deeply"),
        ("\udcff", "is not valid TOML"),
    ],
)
def test_settings_of_a_wrong_type_are_named(
    room: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "ckptkit.toml").write_bytes(text.encode(errors="surrogateescape"))
    assert run(["convert", "hf", "ms"]) == 2
    assert words in capsys.readouterr().err


def test_json_in_the_settings_holds_for_errors_too(room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (room / "ckptkit.toml").write_text("[convert]\njson = true\n[tables.list]\njson = true\n")
    assert run(["convert", "gone", "ms"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2
    assert run(["tables", "list", "--table", "gone"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2
    assert run(["inspect", "gone"]) == 2
    assert capsys.readouterr().out == ""


# nesting, sizes, empty words


def test_deeply_nested_json_is_damage_and_no_bug(room: Path) -> None:
    (room / "deep.toml").write_text("x = " + DEEP)
    assert run(["tables", "check", "deep.toml"]) == 2
    (room / "deep.json").write_text(DEEP)
    assert run(["inspect", "hf", "--expect", "deep.json"]) == 2
    assert run(["convert", "hf", "ms", "--config", "deep.json"]) == 5
    (room / "hf" / "config.json").write_text('{"a":' * 50_000)
    assert run(["convert", "hf", "ms"]) == 5


def test_a_json_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00", "b": "\\\\udc00"}')
    assert read_json_object(tmp_path / "a.json")["a"] == "\N{GRINNING FACE}"
    (tmp_path / "b.json").write_text('{"a": ["\\uDC80"]}')
    with pytest.raises(CorruptError, match="half a character"):
        read_json_object(tmp_path / "b.json")


@pytest.mark.parametrize("text", ["inf", "nan", "1e999", "1e999GB", "-inf", "0", "-1", ""])
def test_no_number_that_is_no_size_is_taken_for_one(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("option", ["--from", "--to", "--variant", "--from-variant", "--model"])
def test_an_empty_word_is_not_taken_for_none(room: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "hf", "ms", option, ""]) == 2
    assert f"`{option}` is empty" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--dialect-a", "--dialect-b", "--variant-a", "--variant-b", "--model"])
def test_an_empty_word_is_not_taken_for_none_by_diff(room: Path, option: str) -> None:
    assert run(["diff", "hf", "hf", option, ""]) == 2


@pytest.mark.parametrize(
    "command",
    [
        ["convert", "hf", "ms", "--from-variant", "nonsense"],
        ["convert", "hf", "ms", "--to", "hf", "--variant", "nonsense"],
        ["convert", "hf", "ms", "--to", "hf", "--from-variant", "base", "--variant", "nonsense"],
        ["convert", "one", "ms", "--variant", "nonsense"],
        ["convert", "foreign", "ms", "--variant", "nonsense"],
        ["diff", "hf", "one", "--variant-a", "nonsense"],
        ["diff", "one", "hf", "--variant-b", "nonsense"],
    ],
)
def test_a_variant_that_a_side_does_not_have_is_refused(room: Path, command: list[str]) -> None:
    for name in ("one", "foreign"):
        convert("hf", name)
    (room / "foreign" / "ckptkit.json").unlink()
    assert run(command) == 2
    assert not (room / "ms").exists()


def test_the_base_layout_may_be_named_on_a_side_without_variants(room: Path) -> None:
    assert run(["convert", "hf", "ms", "--from-variant", "base", "--variant", "qkv_concat"]) == 0


# where a result may go


@pytest.mark.parametrize("target", [".", "../here", "..", "{}"])
def test_the_folder_that_one_is_in_is_not_replaced(tmp_path: Path, hf: Path, target: str, monkeypatch: Any) -> None:
    (tmp_path / "room" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "room" / "here")
    for more in ([], ["--overwrite"]):
        assert run(["convert", str(hf), target.replace("{}", str(tmp_path / "room")), *more]) == 2
    assert Path.cwd().is_dir()


def test_a_slash_at_the_end_changes_nothing(room: Path) -> None:
    assert run(["convert", "hf/", "ms/"]) == 0
    assert run(["convert", "hf", "new/../other/"]) == 0
    assert sorted(path.name for path in room.iterdir()) == ["hf", "ms", "other"]


@pytest.mark.parametrize("word", ["partial", "old"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_source_that_is_named_like_an_unfinished_result_of_the_target_is_kept(
    room: Path, word: str, inside: bool
) -> None:
    source = room / f"ms.{word}-{A}" / ("deep" if inside else "")
    make_hf_plain(source)
    before = files_of(room)
    assert run(["convert", str(source), "ms", "--overwrite"]) == 2
    assert run(["convert", "hf", "ms", "--config", str(source), "--overwrite"]) == 2
    assert run(["convert", "hf", f"ms.{word}-{A}x", "--dry-run"]) == 0
    assert run(["convert", "hf", f"new.{word}-{A}", "--overwrite"]) == 2
    assert files_of(room) == before


@pytest.mark.parametrize("target", ["x" * 300, "x" * 240, "loop", "loop/new", "d/" * 2500, "hf/config.json/new"])
def test_names_that_no_disk_takes_are_refused_in_words(
    room: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "loop").symlink_to("loop")
    assert run(["convert", "hf", target]) == 2
    assert "the system reports" not in capsys.readouterr().err
    assert sorted(path.name for path in room.iterdir()) == ["hf", "loop"]


@pytest.mark.parametrize("command", ["inspect", "check", "diff", "convert"])
@pytest.mark.parametrize("name", ["x" * 300, "loop", "loop/x", "d/" * 2500])
def test_sources_that_no_disk_has_are_refused_in_words(
    room: Path, name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "loop").symlink_to("loop")
    assert run([command, name, *(["hf"] if command in ("diff", "convert") else [])]) == 2
    assert "the system reports" not in capsys.readouterr().err


def test_overwrite_takes_the_place_of_a_result_and_of_nothing_else(
    room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (room / "keep").mkdir()
    assert run(["convert", "hf", "keep", "--overwrite"]) == 0
    assert run(["convert", "hf", "keep", "--overwrite", "--format", "ckpt"]) == 0
    (room / "keep" / "notes.txt").write_text("mine")
    make_hf_plain(room / "foreign")
    before = files_of(room)
    capsys.readouterr()
    for target, names in (("keep", ["notes.txt"]), ("foreign", ["config.json", "model.safetensors"])):
        assert run(["convert", "hf", target, "--overwrite"]) == 2
        said = capsys.readouterr().err
        assert all(f"\n  {name}\n" in said for name in names)
        assert "move them away, or choose another folder" in said
        assert files_of(room) == before
    (room / "keep" / "notes.txt").rename(room / "notes.txt")
    assert run(["convert", "hf", "keep", "--overwrite"]) == 0
    assert not (room / "keep" / "model.ckpt").exists()


def test_a_dry_run_says_that_the_run_itself_would_be_refused(room: Path) -> None:
    convert("hf", "ms")
    assert "refused" not in notes(convert("hf", "new", dry_run=True))
    assert "refused" not in notes(convert("hf", "ms", dry_run=True, overwrite=True))
    assert "the run itself will be refused: the output folder `ms` is not empty" in notes(
        convert("hf", "ms", dry_run=True)
    )
    (room / "ms" / "notes.txt").write_text("mine")
    assert "did not write, such as notes.txt" in notes(convert("hf", "ms", dry_run=True, overwrite=True))


# names


def test_names_that_are_not_utf_8_are_kept_as_they_are(room: Path) -> None:
    odd = os.fsdecode(b"m\xff\xc3\xbc")
    source, target = make_hf_plain(room / odd), room / f"{odd}2"
    (source / f"{odd}.txt").write_bytes(b"side")
    for command in (["convert", str(source), str(target)], ["check", str(target)], ["inspect", str(target)]):
        found = subprocess.run(
            [sys.executable, "-m", "ckptkit", *command, "--json"], capture_output=True, check=True, timeout=60
        )
        assert json.loads(found.stdout.decode())["ok"]
        assert found.stderr == b""
    assert (target / f"{odd}.txt").read_bytes() == b"side"
    (target / f"{odd}.txt").write_bytes(b"other")
    with pytest.raises(CorruptError, match="not what"):
        check(target)


def test_a_plain_locale_is_no_obstacle(room: Path) -> None:
    make_hf_plain(room / "mödel")
    bare = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for number, more in enumerate(([], ["--json"])):
        command = [sys.executable, "-m", "ckptkit", "convert", "mödel", f"öut{number}", *more]
        found = subprocess.run(command, env=bare, capture_output=True, timeout=60)
        assert found.returncode == 0, found.stderr
        assert run(["check", f"öut{number}"]) == 0


@pytest.mark.parametrize("name", ["a\0b.1.c\0", "a\nb", "\u202eb", "\x1b[31m", "7" * 5000, "a.\u0663.b"])
def test_any_name_can_be_shown_on_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    plain = inspect(file).to_text().count("\n")
    assert run(["inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == plain + 1 == 7
    assert all(c.isprintable() or c == "\n" for c in text)
    assert run(["inspect", str(file), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["tensors"]) == [name]


def test_an_item_of_an_error_is_one_line() -> None:
    assert str(UsageError("a\nb", items=["c\nd", "\x1b"])).splitlines() == ["a\\nb", "  c\\nd", "  \\x1b"]


def test_folding_keeps_what_is_not_a_plain_number() -> None:
    assert fold_names(["a.00.b", "a.01.b"]) == [("a.00.b", 1), ("a.01.b", 1)]
    assert fold_names(["a.0.b", "a.1.b", "a.10.b"]) == [("a.{0,1,10}.b", 3)]
    assert fold_names(["\0", "1", "2"]) == [("\0", 1), ("{1..2}", 2)]


# what travels beside the weights


def test_what_ckptkit_names_itself_does_not_clash_with_side_files(room: Path) -> None:
    for name in ("journal.jsonl", "notes.txt"):
        (room / "hf" / name).write_bytes(b"mine")
    reserved = (".ckptkit-journal.jsonl", "ckptkit.json.tmp", "param_name_map.json", "model.ckpt")
    for name in reserved:
        (room / "hf" / name).write_bytes(b"\x08")
    report = convert("hf", "ms")
    assert (room / "ms" / "journal.jsonl").read_bytes() == (room / "ms" / "notes.txt").read_bytes() == b"mine"
    assert "`param_name_map.json`" in notes(report)
    assert check("ms").exit_code == 0
    convert("ms", "ckpt", to_dialect="mindformers", format="ckpt")
    assert not {path.name for path in (room / "ckpt").iterdir()} & {*reserved[:-1]}


def test_a_config_of_another_name_becomes_config_json(room: Path) -> None:
    (room / "c").mkdir()
    (room / "hf" / "config.json").rename(room / "c" / "my-config.json")
    convert("hf", "ms", config="c/my-config.json", dtype="bf16")
    assert json.loads((room / "ms" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert not (room / "ms" / "my-config.json").exists()
    convert("ms", "back", to_dialect="hf")
    convert("hf", "plain", config="c/my-config.json")
    assert (room / "plain" / "config.json").read_bytes() == (room / "c" / "my-config.json").read_bytes()
    assert (room / "plain" / "generation_config.json").is_file()


def test_side_files_come_from_the_folder_given_and_then_from_the_source(room: Path) -> None:
    (room / "hf" / "tokenizer.json").write_text("source")
    (room / "hf" / "both.txt").write_text("source")
    make_hf_plain(room / "c")
    (room / "c" / "both.txt").write_text("given")
    (room / "c" / "only.txt").write_text("given")
    report = convert("hf", "ms", config="c")
    found = {path.name: path.read_text() for path in (room / "ms").iterdir() if path.suffix != ".safetensors"}
    assert (found["tokenizer.json"], found["both.txt"], found["only.txt"]) == ("source", "given", "given")
    assert "`tokenizer.json`" in notes(report)
    assert "differ" not in notes(report)
    config = json.loads((room / "c" / "config.json").read_text())
    (room / "c" / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    report = convert("hf", "two", config="c")
    assert "`rope_theta`" in notes(report)
    assert json.loads((room / "two" / "config.json").read_text())["rope_theta"] == 1.0


def test_a_source_file_does_not_travel_beside_itself(room: Path) -> None:
    (room / "hf" / "model.safetensors").rename(room / "hf" / "weights")
    convert("hf/weights", "ms")
    assert not (room / "ms" / "weights").exists()
    assert (room / "ms" / "generation_config.json").is_file()


def test_a_file_of_a_result_is_known_by_the_manifest_beside_it(room: Path) -> None:
    convert("hf", "ms", variant="qkv_concat", format="ckpt")
    with pytest.raises(UsageError, match="variant qkv_concat, and the options say otherwise"):
        convert("ms/model.ckpt", "back", variant="qkv_concat-1.4")
    convert("ms/model.ckpt", "back")
    assert diff("hf", "back").exit_code == 0
    assert check("ms/model.ckpt").data["digests_compared"] == len(open_checkpoint(room / "ms").tensors)
    convert("hf", "two", max_shard_size="20kB")
    assert check("two/part1.safetensors").data["digests_compared"] > 0


# what a report says


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_architectures_of_another_family_are_noted(room: Path) -> None:
    assert "architectures" not in notes(convert("hf", "ms", dry_run=True))
    edit(room / "hf", architectures=["Qwen3ForCausalLM"])
    assert "architectures Qwen3ForCausalLM" in notes(convert("hf", "ms", dry_run=True))


def test_a_config_without_a_model_type_is_said_to_have_none(room: Path) -> None:
    edit(room / "hf", model_type=None)
    family = dict(convert("hf", "ms", dry_run=True).rows)["family"]
    assert "no model_type" in family
    assert "None" not in family
    edit(room / "hf", architectures=None)
    assert "None" not in inspect("hf").to_text()


def with_dtype(folder: Path, dtype: str, only: str) -> None:
    """Store the tensors whose names end with `only` as `dtype`, which is one byte wide."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body, rows = b"", {}
    for name, row in header.items():
        if name == "__metadata__":
            continue
        begin, end = row["data_offsets"]
        part = data[8 + size + begin : 8 + size + end]
        if name.endswith(only):
            part, row["dtype"] = part[: len(part) // 4], dtype
        rows[name] = row | {"data_offsets": [len(body), len(body) + len(part)]}
        body += part
    head = json.dumps(rows).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + body)


@pytest.mark.parametrize(("dtype", "words"), [("F8_E4M3", "F8_E4M3"), ("I8", "I8"), ("U8", "U8")])
def test_weights_that_seem_quantised_are_noted(room: Path, dtype: str, words: str) -> None:
    assert "scale" not in notes(convert("hf", "ms", dry_run=True))
    with_dtype(room / "hf", dtype, "down_proj.weight")
    said = notes(convert("hf", "ms", dry_run=True))
    assert f"2 tensors are {words}" in said
    assert "scale" in said


def test_a_check_says_how_much_it_compared(room: Path) -> None:
    convert("hf", "ms")
    assert "is sound" in check("ms").headline
    forget_digests(room / "ms", 7)
    report = check("ms")
    assert "is sound" not in report.headline
    assert "7 of 21 tensors" in report.headline


def forget_digests(folder: Path, kept: int) -> None:
    from ckptkit.formats.manifest import dump_manifest, read_manifest

    manifest = read_manifest(folder)
    assert manifest is not None
    for row in list(manifest["tensors"].values())[kept:]:
        row["xxh3_128"] = None
    (folder / "ckptkit.json").write_bytes(dump_manifest(manifest))


def test_a_diff_says_when_the_two_configs_disagree(room: Path) -> None:
    convert("hf", "ms")
    assert dict(diff("hf", "ms").rows)["compared"].endswith("makes it")
    edit(room / "hf", num_attention_heads=8, torch_dtype="x")
    assert "B's differs in `num_attention_heads`" in dict(diff("hf", "ms").rows)["compared"]


def test_digests_that_were_not_compared_are_noted(room: Path) -> None:
    convert("hf", "ms")
    assert "digests" not in notes(convert("ms", "back"))
    assert "digests" in notes(convert("ms", "other", digests=False))
    assert "digests" not in notes(convert("hf", "third", digests=False))
