"""The contract: at any moment `DST` holds the old result, the new one, or nothing; never a part of one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptkit.errors import ResourceError, UsageError
from ckptkit.formats import result_folder
from ckptkit.formats.disk import disk_error
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest
from ckptkit.formats.result_folder import JOURNAL, ResultFolder, check_space, check_target

MANIFEST_BYTES = dump_manifest({"schema": SCHEMA, "plan": "aa", "tensors": {}})


def begin(target: Path, digest: str = "aa", *, overwrite: bool = False) -> ResultFolder:
    folder = ResultFolder(target, digest, overwrite)
    folder.open()
    return folder


def finish(folder: ResultFolder, text: bytes = b"new") -> None:
    folder.add("weights", text)
    folder.add(MANIFEST, MANIFEST_BYTES)
    folder.commit()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_result_appears_only_at_commit(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    folder.add("weights", b"new")
    assert names(tmp_path) == {"out.partial-aa"}
    folder.add(MANIFEST, MANIFEST_BYTES)
    folder.commit()
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"weights", MANIFEST}


def test_parents_of_the_target_are_made(tmp_path: Path) -> None:
    finish(begin(tmp_path / "a" / "b" / "out"))
    assert (tmp_path / "a" / "b" / "out" / "weights").read_bytes() == b"new"


def test_an_empty_target_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    finish(begin(tmp_path / "out"))
    assert (tmp_path / "out" / "weights").read_bytes() == b"new"


def test_finished_files_are_remembered_and_a_torn_line_is_not(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    folder.note_finished("a", {"x": "1"})
    folder.note_finished("b", {"y": "2"})
    folder.close()
    journal = tmp_path / "out.partial-aa" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-4])
    again = begin(tmp_path / "out")
    assert again.finished == {"a": {"x": "1"}}
    again.close()


def test_an_unfinished_result_of_another_plan_is_refused_unless_overwritten(tmp_path: Path) -> None:
    begin(tmp_path / "out", "aa").close()
    with pytest.raises(UsageError, match="another plan"):
        begin(tmp_path / "out", "bb")
    finish(begin(tmp_path / "out", "bb", overwrite=True))
    assert names(tmp_path) == {"out"}


def test_two_runs_of_one_plan_exclude_each_other(tmp_path: Path) -> None:
    first = begin(tmp_path / "out")
    with pytest.raises(UsageError, match="another process is writing"):
        begin(tmp_path / "out")
    finish(first)


def test_overwrite_of_another_plan_does_not_touch_a_running_one(tmp_path: Path) -> None:
    first = begin(tmp_path / "out", "aa")
    with pytest.raises(UsageError, match="another process is writing"):
        begin(tmp_path / "out", "bb", overwrite=True)
    finish(first)


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite_replaces_the_whole_folder(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(result_folder, "_exchange", lambda one, two: False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "left_over").write_bytes(b"old")
    finish(begin(out, overwrite=True))
    assert names(tmp_path) == {"out"}
    assert names(out) == {"weights", MANIFEST}


def test_a_crash_between_the_two_renames_is_repaired_at_the_next_start(tmp_path: Path) -> None:
    old = tmp_path / "out.old-aa"
    old.mkdir()
    (old / "weights").write_bytes(b"old")
    begin(tmp_path / "out", "bb", overwrite=True).close()
    assert (tmp_path / "out" / "weights").read_bytes() == b"old"


def test_a_crash_before_the_old_result_was_removed_is_cleaned_up(tmp_path: Path) -> None:
    finish(begin(tmp_path / "out"))
    (tmp_path / "out.old-aa").mkdir()
    begin(tmp_path / "out", "bb", overwrite=True).close()
    assert (tmp_path / "out" / "weights").read_bytes() == b"new"
    assert not (tmp_path / "out.old-aa").exists()


def test_a_crash_after_the_journal_was_removed_continues_with_the_rename(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    folder.add("weights", b"new")
    folder.add(MANIFEST, MANIFEST_BYTES)
    folder.close()
    (tmp_path / "out.partial-aa" / JOURNAL).unlink()
    again = begin(tmp_path / "out")
    assert again.complete
    again.commit()
    assert names(tmp_path) == {"out"}


def test_a_partial_folder_without_journal_or_manifest_is_started_over(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial-aa"
    partial.mkdir()
    (partial / "weights").write_bytes(b"junk")
    folder = begin(tmp_path / "out")
    assert not folder.complete
    assert names(partial) == {JOURNAL}
    folder.close()


def test_a_target_filled_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "somebody").write_bytes(b"else")
    with pytest.raises(UsageError, match="filled by somebody else"):
        finish(folder)
    assert names(tmp_path / "out") == {"somebody"}


@pytest.mark.parametrize("where", ["src", "src/inside", ".", "link", "link/inside", "src/../src"])
def test_an_output_that_is_holds_or_lies_in_the_input_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "link").symlink_to("src")
    with pytest.raises(UsageError, match="same as, inside, or around"):
        check_target(tmp_path / where, [tmp_path / "src"], overwrite=True)


def test_a_file_and_a_filled_folder_are_no_targets(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"")
    with pytest.raises(UsageError, match="is a file"):
        check_target(tmp_path / "file", [], overwrite=True)
    with pytest.raises(UsageError, match="not empty"):
        check_target(tmp_path / "full", [], overwrite=False)
    check_target(tmp_path / "full", [], overwrite=True)


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="has .* free"):
        check_space(tmp_path / "deep" / "out", 1 << 60)
    check_space(tmp_path / "out", 1)
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "no space"), (errno.EROFS, "read-only"), (errno.EFBIG, "size limit"), (errno.EACCES, "permission")],
)
def test_disk_errors_are_said_in_words(code: int, words: str) -> None:
    error = disk_error(OSError(code, os.strerror(code)), Path("dir/model.safetensors"))
    assert words in str(error)
    assert "model.safetensors" in str(error)
    assert error.exit_code == 4
