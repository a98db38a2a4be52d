"""The contract of sharing: only frozen tensors are linked, and only while their bytes are those that are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.train.step_write import write_step
from tests.train.tiny_steps import (
    EMBEDDING,
    assert_holds,
    flip_last_bit,
    make_snapshot,
    names_in,
    write,
)

pytestmark = pytest.mark.usefixtures("quick_disk")


def test_frozen_tensors_are_linked_while_their_bytes_are_sound(run: Path, model: Path) -> None:
    first = write(run, model, 1, frozen=(EMBEDDING,))
    second = write(run, model, 2, frozen=(EMBEDDING,), previous=first.folder)
    name = "model-00002-of-00002.safetensors"
    assert (first.folder / name).samefile(second.folder / name)
    assert second.linked_bytes == (first.folder / name).stat().st_size
    shared = [n for n in names_in(second.folder) if (second.folder / n).stat().st_nlink > 1]
    assert shared == [name]  # a damage of any other file leaves the checkpoint before as it was
    assert_holds(second.folder, 2, frozen=(EMBEDDING,))
    flip_last_bit(second.folder / name)
    third = write(run, model, 3, frozen=(EMBEDDING,), previous=second.folder)
    assert third.linked_bytes == 0
    assert_holds(third.folder, 3, frozen=(EMBEDDING,))


def test_frozen_tensors_that_did_change_are_written(run: Path, model: Path) -> None:
    first = write(run, model, 1, frozen=(EMBEDDING,))
    snapshot = make_snapshot(2, frozen=(EMBEDDING,))
    snapshot.weights[EMBEDDING][0, 0] += 1  # what no frozen tensor should do
    second = write_step(run, snapshot, side_files={}, facts={}, previous=first.folder)
    assert second.linked_bytes == 0
    name = "model-00002-of-00002.safetensors"
    assert not (first.folder / name).samefile(second.folder / name)


def test_without_hard_links_frozen_tensors_are_written(run: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(run, model, 1, frozen=(EMBEDDING,))

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    second = write(run, model, 2, frozen=(EMBEDDING,), previous=first.folder)
    assert second.linked_bytes == 0
    assert_holds(second.folder, 2, frozen=(EMBEDDING,))
