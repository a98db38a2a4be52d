"""The contract of `--ranks`: parts of one result, written by several runs, make what one run makes; less is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.commands.inspect import inspect
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CkptkitError, CorruptError, CoverageError, UsageError
from ckptkit.formats import parts
from ckptkit.formats.manifest import MANIFEST, dump_manifest, read_manifest
from ckptkit.formats.part_manifests import missing_ranks
from ckptkit.quantities import numbers_text
from tests.rank_results import read_whole, same_tensors
from tests.trained_models import make_llama, make_trained

DEGREES: dict[str, Any] = {"mp": 2, "pp": 2, "dp": 2}  # 8 ranks, of which pairs are equal
OPTIONS = {"variant": "base"}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return make_trained(make_llama(folder / "hf"), folder / "base")


def write(source: Path, target: Path, ranks: str | None, **options: Any) -> dict[str, list[str]]:
    """Write some ranks and return the report's rows by label."""
    report = reshard(source, target, Parallel(**DEGREES, ranks=ranks), **(OPTIONS | options))
    rows: dict[str, list[str]] = {}
    for label, text in report.rows:
        rows.setdefault(label, []).append(text)
    return rows


def manifest_in(folder: Path) -> dict[str, Any]:
    """Return a manifest as far as it says what there is: in no order, without its own seal."""
    content = json.loads((folder / MANIFEST).read_bytes())
    content.pop("seal")
    return content | {"files": sorted(content["files"], key=lambda row: str(row["name"]))}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file() and f.name != MANIFEST}


READERS = {
    "check": lambda folder, room: check(folder),
    "inspect": lambda folder, room: inspect(folder),
    "reshard": lambda folder, room: reshard(folder, room / "other", Parallel()),
    "convert": lambda folder, room: convert(folder, room / "other", to_dialect="hf"),
}


@pytest.mark.parametrize("order", [["0-3", "4-7"], ["4-7", "0-3"], ["6,1", "0,2-5", "7"], ["5", "0-4,6-7"]], ids=str)
def test_parts_make_the_result_of_one_run(whole: Path, tmp_path: Path, order: list[str]) -> None:
    write(whole, tmp_path / "one", None)
    for number, ranks in enumerate(order, start=1):
        rows = write(whole, tmp_path / "out", ranks)
        missing = missing_ranks(read_manifest(tmp_path / "out") or {})
        assert bool(missing) == (number < len(order))
        assert rows["part"][0].startswith("ranks ")
        said = f"lacks ranks {numbers_text(missing)}" if missing else "is complete"
        assert any(said in note for note in rows["note"])
    assert everything(tmp_path / "out") == everything(tmp_path / "one")
    assert manifest_in(tmp_path / "out") == manifest_in(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir() if "." in path.name] == []
    assert "is sound" in check(tmp_path / "out").headline
    reshard(tmp_path / "out", tmp_path / "merged", Parallel())
    assert same_tensors(read_whole(tmp_path / "merged"), read_whole(whole))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("ranks", ["0-3", "4-7", "1,6"])
def test_a_result_that_lacks_ranks_is_refused(whole: Path, tmp_path: Path, reader: str, ranks: str) -> None:
    write(whole, tmp_path / "out", ranks)
    with pytest.raises(CoverageError, match="is not complete: its ckptkit.json names ranks") as caught:
        READERS[reader](tmp_path / "out", tmp_path)
    missing = numbers_text(missing_ranks(read_manifest(tmp_path / "out") or {}))
    assert f"`--ranks {missing}`" in caught.value.hint
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("reader", READERS)
def test_parts_that_were_copied_together_are_refused(whole: Path, tmp_path: Path, reader: str) -> None:
    for name, ranks in {"a": "0-3", "b": "4-7"}.items():
        write(whole, tmp_path / name, ranks)
    kept = (tmp_path / "a" / MANIFEST).read_bytes()
    shutil.copytree(tmp_path / "b", tmp_path / "a", dirs_exist_ok=True)
    for manifest in ((tmp_path / "b" / MANIFEST).read_bytes(), kept):
        (tmp_path / "a" / MANIFEST).write_bytes(manifest)
        with pytest.raises(CoverageError, match="is not complete") as caught:
            READERS[reader](tmp_path / "a", tmp_path)
        assert caught.value.items[0].endswith("is not in the manifest")
        assert "copied here by hand" in caught.value.why


def test_a_part_of_another_plan_is_refused(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(whole, out, "0-3")
    before = everything(out)
    for change in ({"no_optimizer": True}, {"format": "ckpt"}):
        for overwrite in (False, True):
            with pytest.raises(UsageError, match="holds parts of another result"):
                write(whole, out, "4-7", overwrite=overwrite, **change)
    with pytest.raises(UsageError, match="holds parts of another result"):
        reshard(whole, out, Parallel(mp=4, pp=2, ranks="4-7"), **OPTIONS)
    shutil.copytree(whole, tmp_path / "again")  # the same bytes, but who knows
    with pytest.raises(UsageError, match="holds parts of another result"):
        write(tmp_path / "again", out, "4-7")
    assert everything(out) == before


def test_a_join_itself_refuses_another_plan(whole: Path, tmp_path: Path) -> None:
    """As when DST changed between the look at it and the join."""
    write(whole, tmp_path / "a", "0-3")
    write(whole, tmp_path / "b", "4-7", no_optimizer=True)
    write(whole, tmp_path / "c", "4-7")
    before = everything(tmp_path / "a")
    with pytest.raises(UsageError, match="holds parts of another result"):
        parts.join_part(tmp_path / "b", tmp_path / "a", overwrite=False)
    assert everything(tmp_path / "a") == before
    parts.join_part(tmp_path / "c", tmp_path / "a", overwrite=False)
    assert "is sound" in check(tmp_path / "a").headline


def test_no_part_goes_into_a_folder_of_something_else(whole: Path, tmp_path: Path) -> None:
    reshard(whole, tmp_path / "merged", Parallel())
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    for folder in ("merged", "own"):
        with pytest.raises(UsageError, match="is not empty, and holds no parts of a result"):
            write(whole, tmp_path / folder, "0-3", overwrite=True)


def test_a_part_that_is_there_is_written_again_when_asked(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(whole, out, "0-3")
    with pytest.raises(UsageError, match="holds ranks 2-3 of this result already") as caught:
        write(whole, out, "2-5")
    assert caught.value.hint == "`--ranks 4-7` are missing; `--overwrite` writes these again"
    dry = write(whole, out, "2-5", dry_run=True)
    assert any("holds ranks 2-3 of this result already" in note for note in dry["note"])
    damaged = next((out / "rank_3").glob("*.safetensors"))
    data = damaged.read_bytes()
    damaged.unlink()  # it is a link
    damaged.write_bytes(bytes(len(data)))
    write(whole, out, "2-5", overwrite=True)
    write(whole, out, "6-7", overwrite=True)
    assert damaged.read_bytes() == data
    write(whole, tmp_path / "one", None)
    assert everything(out) == everything(tmp_path / "one")
    assert manifest_in(out) == manifest_in(tmp_path / "one")
    with pytest.raises(UsageError, match="holds ranks 0-5,7 of this result already") as caught:
        write(whole, out, "0-3,5,4,7")
    assert caught.value.hint == "`--overwrite` writes these again"


def test_a_run_for_all_ranks_takes_the_place_of_parts_when_asked(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(whole, out, "0-3")
    with pytest.raises(UsageError, match="is not empty"):
        write(whole, out, None)
    write(whole, out, None, overwrite=True)
    write(whole, tmp_path / "one", None)
    assert everything(out) == everything(tmp_path / "one")
    assert manifest_in(out) == manifest_in(tmp_path / "one")


def test_folders_that_no_manifest_names_are_not_replaced_unless_asked(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(whole, out, "0-3")
    (out / "rank_6").mkdir()
    (out / "rank_6" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds folders of ranks that its ckptkit.json does not name") as caught:
        write(whole, out, "4-7")
    assert caught.value.items == ("rank_6",)
    write(whole, out, "4-7", overwrite=True)
    assert "is sound" in check(out).headline


def test_a_rank_that_there_is_not_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no rank 8: the layout has 8"):
        write(whole, tmp_path / "out", "4-8")


def test_all_ranks_in_one_part_are_the_whole(whole: Path, tmp_path: Path) -> None:
    write(whole, tmp_path / "one", None)
    write(whole, tmp_path / "out", "0-7")
    assert everything(tmp_path / "out") == everything(tmp_path / "one")
    assert manifest_in(tmp_path / "out") == manifest_in(tmp_path / "one")


def test_a_part_reads_and_needs_no_more_than_its_ranks(whole: Path, tmp_path: Path) -> None:
    one = reshard(whole, tmp_path / "a", Parallel(mp=4, ranks="3"), dry_run=True, **OPTIONS).data["summary"]
    every = reshard(whole, tmp_path / "a", Parallel(mp=4), dry_run=True, **OPTIONS).data["summary"]
    assert one["bytes_read"] < every["bytes_read"] / 2
    assert one["tensor_bytes"] < every["tensor_bytes"] / 3


def test_resume_files_go_with_their_ranks(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    reshard(whole, run, Parallel(mp=2), **OPTIONS)
    (run / MANIFEST).unlink()
    for rank in range(2):
        (run / f"rank_{rank}" / f"checkpoint_{rank}.safetensors").rename(
            run / f"rank_{rank}" / f"CKP_rank_{rank}-1_5.safetensors"
        )
    write(run, tmp_path / "out", "0-2")
    assert len(list((tmp_path / "out").rglob("meta.json"))) == 3
    write(run, tmp_path / "out", "3-7")
    assert len(list((tmp_path / "out").rglob("meta.json"))) == 8
    write(run, tmp_path / "one", None)
    assert everything(tmp_path / "out") == everything(tmp_path / "one")
    assert manifest_in(tmp_path / "out") == manifest_in(tmp_path / "one")


def test_runs_at_the_same_time_do_not_harm_one_another(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--mp", "2", "--pp", "2", "--dp", "2", "--variant", "base", "--no-progress", "--workers", "1"]
    for _ in range(3):
        runs = [
            subprocess.Popen(
                [sys.executable, "-m", "ckptkit", "reshard", whole, out, *arguments, "--ranks", ranks],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for ranks in ("0", "1-2", "3,5", "4", "6-7", "4")  # one of them twice
        ]  # fmt: skip
        said = [run.communicate(timeout=120)[1] for run in runs]
        codes = [run.returncode for run in runs]
        assert [code for code, ranks in zip(codes, range(6), strict=True) if ranks not in (3, 5)] == [0] * 4, said
        assert sorted([codes[3], codes[5]]) in ([0, 0], [0, 2]), said
        assert "is sound" in check(out).headline
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        shutil.rmtree(out)


def test_a_manifest_that_names_less_than_there_is_would_be_seen(whole: Path, tmp_path: Path) -> None:
    """The control: what a join that forgot the other part's rows would leave is refused by every reader."""
    write(whole, tmp_path / "out", "0-3")
    forgetful = manifest_in(tmp_path / "out") | {"layout": {"ranks": 8, "pp": 2}}
    (tmp_path / "out" / MANIFEST).write_bytes(dump_manifest(forgetful))
    write(whole, tmp_path / "other", "4-7")
    for rank in range(4, 8):
        shutil.copytree(tmp_path / "other" / f"rank_{rank}", tmp_path / "out" / f"rank_{rank}")
    for reader in READERS:
        if reader != "inspect":
            with pytest.raises((CorruptError, CkptkitError), match="does not hold what its ckptkit.json says"):
                READERS[reader](tmp_path / "out", tmp_path)


def test_ranks_are_said_as_the_option_takes_them() -> None:
    assert numbers_text([3, 0, 1, 2, 6, 8, 9]) == "0-3,6,8-9"
    assert numbers_text([]) == ""


def test_parts_of_a_plan_know_one_another_by_their_folders() -> None:
    one, other = "0" * 32, "1" * 32
    names = {parts.part_name(digest, ranks) for digest in (one, other) for ranks in (None, (0,), (0, 1), (1,))}
    assert len(names) == 8
    assert all(len(name) == 32 for name in names)
    assert parts.same_plan(parts.part_name(one, (0, 1)), one)
    assert not parts.same_plan(parts.part_name(other, (0, 1)), one)
