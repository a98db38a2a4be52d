"""The contract: at any moment `DST` holds the old result, the new one, or nothing; never a part of one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from ckptkit.errors import ResourceError, UsageError
from ckptkit.formats import result_folder
from ckptkit.formats.disk import disk_error, fsync_folder
from ckptkit.formats.manifest import MANIFEST, SCHEMA, dump_manifest
from ckptkit.formats.result_folder import JOURNAL, ResultFolder, check_space, check_target

A, B = "a" * 32, "b" * 32


def manifest_of(digest: str) -> bytes:
    """Return the manifest of a result with one file, `weights`, of three bytes."""
    naming = {"dialect": "hf", "variant": "", "format": "hf"}
    return dump_manifest(
        {
            "schema": SCHEMA, "plan": digest, "family": "llama", "from": naming, "to": naming,
            "files": [{"name": "weights", "bytes": 3}], "side_files": {}, "tensors": {},
        }
    )  # fmt: skip


def begin(target: Path, digest: str = A, *, overwrite: bool = False) -> ResultFolder:
    folder = ResultFolder(target, digest, overwrite)
    folder.open()
    return folder


def finish(folder: ResultFolder, text: bytes = b"new") -> None:
    folder.add("weights", text)
    folder.add(MANIFEST, manifest_of(folder.digest))
    folder.commit()


def put(folder: Path, weights: bytes) -> Path:
    """Make a result of another plan."""
    folder.mkdir()
    (folder / "weights").write_bytes(weights)
    (folder / MANIFEST).write_bytes(manifest_of("0" * 32))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_result_appears_only_at_commit(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    folder.add("weights", b"new")
    assert names(tmp_path) == {f"out.partial-{A}"}
    folder.add(MANIFEST, manifest_of(folder.digest))
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
    journal = tmp_path / f"out.partial-{A}" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-4])
    again = begin(tmp_path / "out")
    assert again.finished == {"a": {"x": "1"}}
    again.close()


def test_an_unfinished_result_of_another_plan_is_refused_unless_overwritten(tmp_path: Path) -> None:
    begin(tmp_path / "out", A).close()
    with pytest.raises(UsageError, match="another plan"):
        begin(tmp_path / "out", B)
    finish(begin(tmp_path / "out", B, overwrite=True))
    assert names(tmp_path) == {"out"}


def test_two_runs_of_one_plan_exclude_each_other(tmp_path: Path) -> None:
    first = begin(tmp_path / "out")
    with pytest.raises(UsageError, match="another process is writing"):
        begin(tmp_path / "out")
    finish(first)


def test_overwrite_of_another_plan_does_not_touch_a_running_one(tmp_path: Path) -> None:
    first = begin(tmp_path / "out", A)
    with pytest.raises(UsageError, match="another process is writing"):
        begin(tmp_path / "out", B, overwrite=True)
    finish(first)


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite_replaces_the_whole_folder(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(result_folder, "exchange", lambda one, two: False)
    out = put(tmp_path / "out", b"old")
    finish(begin(out, overwrite=True))
    assert names(tmp_path) == {"out"}
    assert (out / "weights").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("name", "listed"),
    [("notes.txt", "notes.txt"), ("sub/notes.txt", "sub/notes.txt"), ("link", "link"), (".hidden", ".hidden")],
)
@pytest.mark.parametrize("ours", [True, False])
def test_overwrite_never_removes_what_no_manifest_names(tmp_path: Path, name: str, listed: str, ours: bool) -> None:
    out = tmp_path / "out"
    put(out, b"old") if ours else out.mkdir()
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).symlink_to(tmp_path) if name == "link" else (out / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match="files .* that ckptkit did not write") as caught:
        begin(out, overwrite=True)
    assert caught.value.items == (listed,)
    assert "move them away" in caught.value.hint
    assert names(tmp_path) == {"out"}
    assert (out / name).exists()
    if ours:
        (out / name).unlink()
        finish(begin(out, overwrite=True))  # an empty subfolder is no loss
        assert names(out) == {"weights", MANIFEST}


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff"])
def test_a_result_whose_manifest_is_damaged_is_not_replaced(tmp_path: Path, damage: bytes) -> None:
    out = put(tmp_path / "out", b"old")
    (out / MANIFEST).write_bytes(damage)
    with pytest.raises(UsageError, match="did not write") as caught:
        begin(out, overwrite=True)
    assert caught.value.items == (MANIFEST, "weights")
    assert MANIFEST in caught.value.why


def test_what_is_put_into_the_old_result_meanwhile_is_not_removed_either(tmp_path: Path) -> None:
    out = put(tmp_path / "out", b"old")
    folder = begin(out, overwrite=True)
    (out / "notes.txt").write_bytes(b"mine")
    with pytest.raises(UsageError, match="did not write"):
        finish(folder)
    assert (out / "notes.txt").read_bytes() == b"mine"
    (out / "notes.txt").unlink()
    again = begin(out, overwrite=True)
    assert again.complete
    again.commit()
    assert (out / "weights").read_bytes() == b"new"


def test_a_crash_between_the_two_renames_is_repaired_at_the_next_start(tmp_path: Path) -> None:
    old = put(tmp_path / f"out.old-{A}", b"old")
    (tmp_path / f"out.partial-{A}").mkdir()
    begin(tmp_path / "out", B, overwrite=True).close()
    assert (tmp_path / "out" / "weights").read_bytes() == b"old"
    assert not old.exists()


def test_without_overwrite_a_result_that_the_repair_brings_back_is_in_use(tmp_path: Path) -> None:
    put(tmp_path / f"out.old-{A}", b"old")
    (tmp_path / f"out.partial-{A}").mkdir()
    with pytest.raises(UsageError, match="not empty"):
        begin(tmp_path / "out")
    assert (tmp_path / "out" / "weights").read_bytes() == b"old"


def test_an_empty_target_made_after_a_crash_does_not_cost_the_old_result(tmp_path: Path) -> None:
    put(tmp_path / f"out.old-{A}", b"old")
    (tmp_path / f"out.partial-{A}").mkdir()
    (tmp_path / "out").mkdir()
    begin(tmp_path / "out", A, overwrite=True).close()
    assert (tmp_path / "out" / "weights").read_bytes() == b"old"


@pytest.mark.parametrize("filled", [False, True])
def test_an_old_result_that_nothing_has_replaced_is_neither_removed_nor_restored(tmp_path: Path, filled: bool) -> None:
    """It may be whole or half removed, and the result that replaced it may have been moved away by the user."""
    old = put(tmp_path / f"out.old-{A}", b"old")
    if filled:
        put(tmp_path / "out", b"foreign")
    with pytest.raises(UsageError, match="set aside"):
        begin(tmp_path / "out", B, overwrite=True)
    assert (old / "weights").read_bytes() == b"old"
    assert (tmp_path / "out").exists() == filled


def test_folders_of_the_user_with_similar_names_are_left_alone(tmp_path: Path) -> None:
    """`model.old-2023` is a backup, not ours: only a plan's digest, 32 hex digits, makes a name ours."""
    own = [put(tmp_path / f"out.{word}-{end}", b"own") for word in ("old", "partial") for end in ("2023", "x", "beef")]
    finish(begin(tmp_path / "out"))
    finish(begin(tmp_path / "out", B, overwrite=True))
    assert all((path / "weights").read_bytes() == b"own" for path in own)
    assert len(names(tmp_path)) == len(own) + 1


def test_a_partial_folder_that_lost_a_file_is_started_over_in_spite_of_its_manifest(tmp_path: Path) -> None:
    """Such a folder is left when a run that clears up is killed."""
    partial = tmp_path / f"out.partial-{A}"
    for kept in (b"", b"ne"):
        partial.mkdir()
        (partial / MANIFEST).write_bytes(manifest_of(A))
        if kept:
            (partial / "weights").write_bytes(kept)
        folder = begin(tmp_path / "out")
        assert not folder.complete
        assert names(partial) == {JOURNAL}
        folder.close()
        shutil.rmtree(partial)


def test_what_lies_in_a_partial_folder_without_a_readable_journal_is_removed(tmp_path: Path) -> None:
    partial = put(tmp_path / f"out.partial-{A}", b"junk")
    (partial / "below").mkdir()
    (partial / JOURNAL).write_bytes(b"user's own\n")
    folder = begin(tmp_path / "out")
    assert names(partial) == {JOURNAL}
    folder.close()


def test_a_journal_torn_once_keeps_what_is_noted_afterwards(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    folder.note_finished("a", {"x": "1"})
    folder.close()
    with (tmp_path / f"out.partial-{A}" / JOURNAL).open("ab") as journal:
        journal.write(b'{"file": "b", "dig')
    folder = begin(tmp_path / "out")
    folder.note_finished("c", {"z": "3"})
    folder.close()
    folder = begin(tmp_path / "out")
    assert set(folder.finished) == {"a", "c"}
    folder.close()


@pytest.mark.parametrize("line", [b"[]\n", b"1\n", b'{"file": 1}\n', b'{"file": "b"}\n', b'{"plan": "x"}\n', b"\0" * 9])
def test_a_journal_counts_up_to_the_first_line_that_makes_no_sense(tmp_path: Path, line: bytes) -> None:
    folder = begin(tmp_path / "out")
    folder.note_finished("a", {"x": "1"})
    folder.close()
    journal = tmp_path / f"out.partial-{A}" / JOURNAL
    sound = journal.read_bytes()
    journal.write_bytes(sound + line + sound.splitlines()[-1])
    folder = begin(tmp_path / "out")
    assert folder.finished == {"a": {"x": "1"}}
    folder.close()
    assert journal.read_bytes() == sound


def test_a_short_write_does_not_tear_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    folder = begin(tmp_path / "out")
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    folder.note_finished("a", {"x": "1"})
    monkeypatch.undo()
    folder.close()
    assert json.loads((tmp_path / f"out.partial-{A}" / JOURNAL).read_bytes().splitlines()[-1])["file"] == "a"


def test_a_full_disk_at_the_journal_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = begin(tmp_path / "out")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ResourceError, match="no space is left"):
        folder.note_finished("a", {"x": "1"})
    folder.close()


def test_a_failed_second_rename_puts_the_old_result_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith("out.partial-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    put(tmp_path / "out", b"old")
    monkeypatch.setattr(result_folder, "exchange", lambda one, two: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ResourceError, match="input/output"):
        finish(begin(tmp_path / "out", overwrite=True))
    assert (tmp_path / "out" / "weights").read_bytes() == b"old"


def test_an_old_result_that_cannot_be_removed_does_not_hide_that_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    put(tmp_path / "out", b"old")
    folder = begin(tmp_path / "out", overwrite=True)
    monkeypatch.setattr(shutil, "rmtree", failing)
    with pytest.raises(ResourceError, match="the new result is in place"):
        finish(folder)
    assert (tmp_path / "out" / "weights").read_bytes() == b"new"


def test_a_start_waits_while_another_run_changes_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the removal of the journal and the rename nobody may take the folder for abandoned, and clear it."""
    inside, go_on = threading.Event(), threading.Event()
    exchange = result_folder.exchange

    def slow(one: Path, two: Path) -> bool:
        inside.set()
        assert go_on.wait(20)
        return exchange(one, two)

    put(tmp_path / "out", b"old")
    first = begin(tmp_path / "out", A, overwrite=True)
    monkeypatch.setattr(result_folder, "exchange", slow)
    committing = threading.Thread(target=finish, args=(first,))
    committing.start()
    assert inside.wait(20)
    second = ResultFolder(tmp_path / "out", B, overwrite=True)
    starting = threading.Thread(target=second.open)
    starting.start()
    time.sleep(0.1)
    assert starting.is_alive()
    assert (tmp_path / f"out.partial-{A}" / "weights").exists()
    go_on.set()
    committing.join(20)
    starting.join(20)
    assert (tmp_path / "out" / "weights").read_bytes() == b"new"
    assert names(tmp_path) == {"out", f"out.partial-{B}"}
    second.close()


def test_a_running_conversion_of_another_plan_is_said_to_be_running(tmp_path: Path) -> None:
    first = begin(tmp_path / "out", A)
    with pytest.raises(UsageError, match="another process is writing"):
        begin(tmp_path / "out", B)
    finish(first)


def test_a_file_system_that_cannot_sync_folders_or_lock_files_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr("fcntl.flock", flock)
    finish(begin(tmp_path / "out"))
    monkeypatch.setattr(os, "fsync", lambda fd: flock(fd, 0))
    with pytest.raises(OSError, match="not implemented"):
        fsync_folder(tmp_path)


def test_a_file_is_never_written_through_a_link_that_took_its_place(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    folder = begin(tmp_path / "out")
    os.link(tmp_path / "precious", folder.partial / "weights")
    (folder.partial / MANIFEST).symlink_to(tmp_path / "precious")
    finish(folder)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_mount_point_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="mounted"):
        check_target(Path("/proc"), [], overwrite=True)
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(Path, "read_text", lambda self, **_: f"1 2 8:1 /x {tmp_path}/a\\040b rw - ext4 /dev/a rw\n")
    with pytest.raises(UsageError, match="mounted"):
        check_target(tmp_path / "a b", [], overwrite=False)
    check_target(tmp_path / "a", [], overwrite=False)


def test_a_crash_before_the_old_result_was_removed_is_cleaned_up(tmp_path: Path) -> None:
    finish(begin(tmp_path / "out"))
    put(tmp_path / f"out.old-{A}", b"old")
    begin(tmp_path / "out", B, overwrite=True).close()
    assert (tmp_path / "out" / "weights").read_bytes() == b"new"
    assert not (tmp_path / f"out.old-{A}").exists()


def test_a_crash_after_the_journal_was_removed_continues_with_the_rename(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    folder.add("weights", b"new")
    folder.add(MANIFEST, manifest_of(folder.digest))
    folder.close()
    (tmp_path / f"out.partial-{A}" / JOURNAL).unlink()
    again = begin(tmp_path / "out")
    assert again.complete
    again.commit()
    assert names(tmp_path) == {"out"}


def test_a_partial_folder_without_journal_or_manifest_is_started_over(tmp_path: Path) -> None:
    partial = tmp_path / f"out.partial-{A}"
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
    with pytest.raises(UsageError, match="did not write"):
        check_target(tmp_path / "full", [], overwrite=True)


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"has .* free"):
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
