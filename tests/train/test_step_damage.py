"""The contract of going on: the newest checkpoint counts that is whole to its last byte, others are passed over with a
message, and nothing is ever begun again in silence."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptkit.errors import CorruptError, CoverageError, ResourceError, UsageError
from ckptkit.train import step_read
from ckptkit.train.state import read_state
from ckptkit.train.step_folders import LATEST, folder_of
from ckptkit.train.step_read import tensors_in
from ckptkit.train.step_scan import Loaded, check_fits, load_newest
from tests.train.tiny_steps import EMBEDDING, flip_last_bit, make_model, make_tensors, names_in, write

STATE_FILE = "training_state/state-00001-of-00001.safetensors"


@pytest.fixture
def run(tmp_path: Path, quick_disk: None) -> Path:
    """A run with checkpoints of the steps 4 and 8."""
    model = make_model(tmp_path / "model")
    for step in (4, 8):
        write(tmp_path / "run", model, step)
    return tmp_path / "run"


def load(run: Path, **options: object) -> Loaded:
    found = load_newest(run, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_cut_at_any_offset_of_any_file_the_newest_is_passed_over_for_the_one_before(run: Path) -> None:
    folder = folder_of(run, 8)
    assert load(run).state.step == 8  # the control
    sizes = {name: (folder / name).stat().st_size for name in names_in(folder)}
    chance = random.Random(7)
    places = [(name, place) for name, size in sizes.items() for place in (0, size - 1)]
    places += [(name, chance.randrange(sizes[name])) for name in chance.choices([*sizes], k=200 - len(places))]
    assert len(places) == 200
    for name, place in places:
        data = (folder / name).read_bytes()
        os.truncate(folder / name, place)
        for verify in (True, False):
            found = load(run, verify=verify)
            assert found.state.step == 4, (name, place)
            assert found.notes[0].startswith("passed over: `"), (name, place)
        (folder / name).write_bytes(data)
    assert load(run).notes == ()


def test_a_byte_changed_anywhere_is_seen_before_anything_counts(run: Path) -> None:
    folder = folder_of(run, 8)
    chance = random.Random(8)
    for name in names_in(folder):
        data = (folder / name).read_bytes()
        for place in {0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(8))}:
            (folder / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            assert load(run).state.step == 4, (name, place)
        (folder / name).write_bytes(data)
    assert load(run).state.step == 8


def test_without_verifying_only_sizes_and_headers_are_held_against_the_manifest(run: Path) -> None:
    flip_last_bit(folder_of(run, 8) / STATE_FILE)
    assert load(run, verify=False).state.step == 8
    assert load(run).state.step == 4


def test_any_file_that_is_gone_leads_to_the_checkpoint_before(run: Path) -> None:
    folder = folder_of(run, 8)
    for name in names_in(folder):
        (folder / name).rename(run / "away")
        found = load(run)
        assert (found.state.step, len(found.notes)) == (4, 2), name
        assert name in found.notes[0]
        (run / "away").rename(folder / name)


def test_when_no_checkpoint_is_whole_that_is_an_error_and_no_start_from_zero(run: Path) -> None:
    for step in (4, 8):
        os.truncate(folder_of(run, step) / "model.safetensors", 100)
    with pytest.raises(CorruptError, match="none of the 2 checkpoints") as caught:
        load_newest(run)
    assert [item.split(":")[0] for item in caught.value.items] == [
        "`step-00000008` is not whole",
        "`step-00000004` is not whole",
    ]
    assert "from step 0 would throw the run away" in str(caught.value)


def test_where_there_never_was_a_checkpoint_a_run_begins(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "run") is None
    (tmp_path / ".tmp-step-00000004-1-0123abcd").mkdir()
    (tmp_path / LATEST).write_text("")
    assert load_newest(tmp_path) is None


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_in_silence(run: Path) -> None:
    for step in (4, 8):
        shutil.rmtree(folder_of(run, step))
    with pytest.raises(UsageError, match="names `step-00000008`, and no checkpoint is there"):
        load_newest(run)


def test_a_folder_under_the_name_of_another_step_does_not_count(run: Path) -> None:
    folder_of(run, 8).rename(folder_of(run, 9))
    found = load(run)
    assert found.state.step == 4
    assert "`step-00000009` holds the state of step 8" in found.notes[0]


def test_a_checkpoint_that_somebody_else_made_is_passed_over(run: Path) -> None:
    (run / "step-00000012").mkdir()
    shutil.copy(folder_of(run, 8) / "model.safetensors", run / "step-00000012")
    found = load(run)
    assert found.state.step == 8
    assert "there is no ckptkit.json" in found.notes[0]


def test_what_cannot_be_read_for_another_reason_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling back for want of file descriptors would throw away what was trained since."""

    def fail(number: int) -> object:
        def read(path: Path) -> object:
            error = ResourceError(f"cannot open `{path}`")
            error.__cause__ = OSError(number, "no")
            if path == folder_of(run, 8):
                raise error
            return read_state(path)

        return read

    monkeypatch.setattr(step_read, "read_state", fail(24))
    with pytest.raises(ResourceError, match="cannot open"):
        load_newest(run)
    monkeypatch.setattr(step_read, "read_state", fail(5))  # the control: a disk that fails is damage
    assert load(run).state.step == 4


def test_a_checkpoint_without_optimizer_state_is_refused_unless_told(run: Path) -> None:
    """T14: moments that begin at zero make the loss jump."""
    shutil.rmtree(folder_of(run, 8) / "training_state")
    assert load(run).state.step == 4
    found = load(run, without_optimizer=True)
    assert found.state.step == 8
    content = found.content
    assert len(check_fits(content, content.shapes, content.trained, without_optimizer=True)) == 24
    assert "all moments start at zero" in found.notes[0]
    assert dict(tensors_in(found.content)).keys() == make_tensors(8)[0].keys()
    shutil.rmtree(folder_of(run, 4) / "training_state")
    with pytest.raises(CorruptError, match="none of the 2") as caught:
        load_newest(run)
    assert "`--without-optimizer`" in caught.value.hint


def test_moments_of_weights_that_were_frozen_are_refused_unless_told(run: Path, tmp_path: Path) -> None:
    write(run, tmp_path / "model", 12, frozen=(EMBEDDING,))
    found = load(run)
    shapes, everything = found.content.shapes, make_tensors(12)[0].keys()
    assert check_fits(found.content, shapes, found.content.trained, without_optimizer=False) == []
    with pytest.raises(CoverageError, match="lacks 2 moments"):
        check_fits(found.content, shapes, everything, without_optimizer=False)
    lacking = check_fits(found.content, shapes, everything, without_optimizer=True)
    assert lacking == [f"exp_avg.{EMBEDDING}", f"exp_avg_sq.{EMBEDDING}"]
    assert len(dict(tensors_in(found.content))) == 12 + 22  # the other moments are there


def test_the_weights_of_another_network_are_refused_and_not_fallen_back_from(run: Path) -> None:
    shapes = {name: array.shape for name, array in make_tensors(8)[0].items()}
    found = load(run)
    assert found.state.step == 8
    assert check_fits(found.content, shapes, found.content.trained, without_optimizer=False) == []
    other = shapes | {"model.norm.weight": (17,), "model.layers.1.x": (1,)}
    with pytest.raises(CoverageError, match="another network") as caught:
        check_fits(found.content, other, found.content.trained, without_optimizer=False)
    assert caught.value.items == ("missing: model.layers.1.x (1,)", "model.norm.weight is (16,), in the network (17,)")


def test_moments_belong_to_names_and_not_to_places(run: Path) -> None:
    """T15: two weights of one shape, defined the other way round in the second run."""
    from ckptkit.train.step_write import Snapshot, write_step
    from tests.train.tiny_steps import make_state

    ones = np.ones((8, 8), np.float32)
    weights = {"a": ones, "b": 2 * ones}
    moments = {f"{p}.{n}": np.float32(10 + i) * w for p in ("exp_avg", "exp_avg_sq") for i, (n, w) in
               enumerate(weights.items())}  # fmt: skip
    turned = {name: moments[name] for name in reversed(moments)}, {name: weights[name] for name in reversed(weights)}
    for step, (some, others) in enumerate([(weights, moments), (turned[1], turned[0])], start=20):
        write_step(run, Snapshot(make_state(step), some, others), side_files={}, facts={})
        found = dict(tensors_in(load(run).content))
        for name, array in {**weights, **moments}.items():
            assert np.array_equal(found[name], array), name
    assert not np.array_equal(moments["exp_avg.a"], moments["exp_avg.b"])  # the control: a swap would show
