"""The contract: a dump that is damaged, lost or of others is seen; no option and no key of config.json is a trap."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runner_jobs import config_of, make_folder

from ckptkit import CorruptError, UsageError, verify
from ckptkit.errors import CkptkitError, ResourceError
from ckptkit.verification.dumps import DumpFolder, check_dump_target
from ckptkit.verification.forward import compare, open_dump
from ckptkit.verification.runners.facts import read_facts
from ckptkit.verification.runners.job import REPORT, SEAL
from tests.rank_results import read_file, write_whole

pytestmark = pytest.mark.frameworks
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hf") / "hf", config_of("llama"))


@pytest.fixture(scope="module")
def dump(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump") / "hf.dump"
    assert verify(hf, dump=folder).exit_code == 0
    return folder


def nan_frequencies(report: dict[str, Any]) -> None:
    [name] = report["constants"]
    report["constants"][name] = [float("nan")] * len(report["constants"][name])


def damaged(dump: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(dump, folder)
    report = json.loads((folder / REPORT).read_text())
    change(report)
    (folder / REPORT).write_text(json.dumps(report))
    return folder


def test_frequencies_that_are_no_numbers_are_not_equal_to_any(dump: Path, tmp_path: Path) -> None:
    """Nor is a report with NaN in it JSON. The dump itself is the control."""
    assert compare(open_dump(dump), open_dump(dump)).ok
    try:
        equal = compare(open_dump(dump), open_dump(damaged(dump, tmp_path / "dump", nan_frequencies))).ok
    except CorruptError:
        equal = False
    assert not equal


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report.update(constants={"x": ["a"]}),
        lambda report: report.update(versions=None),
        lambda report: report.update(reading=None),
        lambda report: report["inputs"][0].update(sensitivity="a"),
        lambda report: report["inputs"][0].update(file=5),
    ],
)
def test_a_report_with_values_of_another_type_is_corrupt(dump: Path, tmp_path: Path, change: Change) -> None:
    other = damaged(dump, tmp_path / "dump", change)
    with pytest.raises(CorruptError):
        compare(open_dump(dump), open_dump(other))
        open_dump(other).result.versions.items()


def test_inputs_that_were_changed_after_the_run_are_corrupt_and_no_difference(dump: Path, tmp_path: Path) -> None:
    """They would be run, and the logits beside them are of others."""
    shutil.copytree(dump, tmp_path / "dump")
    file = tmp_path / "dump" / "inputs.json"
    found = json.loads(file.read_text())
    found["inputs"][1]["ids"][3] = (found["inputs"][1]["ids"][3] + 1) % 67
    file.write_text(json.dumps(found))
    with pytest.raises(CorruptError):
        open_dump(tmp_path / "dump")


def test_a_folder_beside_a_dump_that_is_not_of_a_dump_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "out.partial-dump" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    try:
        with DumpFolder(tmp_path / "out").partial():
            pass
    except CkptkitError:
        pass
    assert mine.is_file()


def test_two_dumps_to_one_place_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second one is refused, or has a folder of its own."""
    one, two = DumpFolder(tmp_path / "out"), DumpFolder(tmp_path / "out")
    with one.partial() as first:
        (first / "logits-0.npy").write_text("of the first run")
        try:
            with two.partial():
                assert (first / "logits-0.npy").is_file()
        except CkptkitError:
            pass
        assert (first / "logits-0.npy").is_file()


def test_the_report_names_no_dump_that_was_not_made(hf: Path, tmp_path: Path) -> None:
    shutil.copytree(hf, tmp_path / "less")
    tensors = read_file(tmp_path / "less" / "model.safetensors")
    write_whole(tmp_path / "less" / "model.safetensors", {n: t for n, t in tensors.items() if ".layers.1." not in n})
    report = verify(tmp_path / "less", dump=tmp_path / "out.dump")
    assert report.exit_code == 1
    assert (tmp_path / "out.dump").exists() or "look at" not in report.headline


@pytest.mark.parametrize(
    "options", [{"device_b": "ascend"}, {"dialect_b": "foo"}, {"variant_b": "foo"}, {"step_b": 3}], ids=str
)
def test_an_option_about_b_is_refused_where_there_is_no_b(hf: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        verify(hf, dump=tmp_path / "out.dump", **options)


@pytest.mark.parametrize("key", ["quantization_config", "return_dict"])
def test_a_key_that_asks_for_nothing_does_not_end_a_runner(hf: Path, tmp_path: Path, key: str) -> None:
    """`quantization_config: null` is no quantization, and what forward returns is no matter of the weights."""
    shutil.copytree(hf, tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    read_facts(config | {key: None})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {key: None}))
    assert verify(tmp_path / "hf", dump=tmp_path / "out.dump").exit_code == 0


def test_a_dump_of_a_larger_vocabulary_is_a_difference_or_an_error_in_words(hf: Path, tmp_path: Path) -> None:
    larger = make_folder(tmp_path / "larger", config_of("llama", vocab_size=1000))
    assert verify(larger, dump=tmp_path / "out.dump").exit_code == 0
    try:
        assert verify(hf, against=tmp_path / "out.dump").exit_code == 1
    except ResourceError as error:
        pytest.fail(str(error))
    except CkptkitError:
        pass


def test_both_frameworks_read_a_model_of_experts_without_any_alike(tmp_path: Path) -> None:
    """All layers are dense: no expert is in either network."""
    folder = make_folder(tmp_path / "hf", config_of("qwen3_moe", mlp_only_layers=[0, 1]))
    assert verify(folder, dump=tmp_path / "out.dump").exit_code == 0
    found = open_dump(tmp_path / "out.dump").result.reading
    told = read_facts(json.loads((folder / "config.json").read_text())).reading()
    assert {key: found[key] for key in ("experts", "moe_ffn")} == {key: told[key] for key in ("experts", "moe_ffn")}


def file_called_report(folder: Path) -> None:
    for name in ("inputs.json", "logits-0.npy"):
        (folder / name).unlink()
    (folder / REPORT).write_text('{"schema": 1, "mine": "a year of work"}')


def unsealed(folder: Path) -> None:
    report = json.loads((folder / REPORT).read_text())
    (folder / REPORT).write_text(json.dumps({key: value for key, value in report.items() if key != SEAL}))


def notes_of_mine(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def folder_of_mine(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "thesis.txt").write_text("mine")


def logits_that_no_run_wrote(folder: Path) -> None:
    (folder / "logits-999.npy").write_bytes(b"mine")


@pytest.mark.parametrize(
    "change", [file_called_report, unsealed, notes_of_mine, folder_of_mine, logits_that_no_run_wrote]
)
def test_what_is_not_of_a_dump_is_never_replaced(
    hf: Path, dump: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Neither before a run nor where it came during one. The dump alone is the control: it may be replaced."""
    place = tmp_path / "out"
    shutil.copytree(dump, place)
    target = DumpFolder(place, overwrite=True)
    check_dump_target(target, [hf])
    change(place)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    with pytest.raises(UsageError) as refused:
        check_dump_target(target, [hf])
    assert refused.value.items
    with pytest.raises(UsageError), target.partial() as made:
        (made / REPORT).write_text("{}")
        target.finish(made)
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_a_link_to_a_dump_is_no_dump(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(dump)
    with pytest.raises(UsageError):
        check_dump_target(DumpFolder(tmp_path / "link", overwrite=True), [])
