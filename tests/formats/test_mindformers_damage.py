"""The contract: a damaged newer folder of MindFormers is refused by every command, with the exit code of its kind.

5: bytes that no format or manifest allows; 3: tensors that are missing or contradict what is said of them; 2: what a
user must settle. Each damage is done to a sound copy of what MindFormers wrote, which the same commands take first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.commands.diff import diff
from ckptkit.commands.inspect import inspect
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CkptkitError, CorruptError, CoverageError, UsageError
from ckptkit.formats.manifest import MANIFEST
from ckptkit.report import Report
from tests.rank_results import odd_names, read_file, read_whole
from tests.tiny_models import make_hf_plain

GOLDEN = Path(__file__).parent.parent / "golden" / "mindformers"
ITERATION = "iteration_00000008"
PROJ, HEAD = "decoder.layers.0.self_attention.linear_proj.weight", "output_layer.weight"
MODEL_1 = "CKP-model-0000001-0000002.safetensors"
Damage = Callable[[Path], Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A sound copy of a save over two tensor-parallel ranks."""
    return shutil.copytree(GOLDEN / "tp2", tmp_path / "root")


def edit(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Return the damage that changes metadata.json."""

    def damage(root: Path) -> None:
        file = root / ITERATION / "metadata.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return damage


def rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a safetensors file again with other tensors, its header sound."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    metadata = header.pop("__metadata__")
    kept = change({name: (row, body[slice(*row["data_offsets"])]) for name, row in header.items()})
    rows: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (row, content) in kept.items():
        rows[name] = {**row, "data_offsets": [offset, offset + len(content)]}
        offset += len(content)
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(content for _, content in kept.values()))


def flip(file: Path, name: str) -> None:
    """Flip a bit of a tensor's first byte."""
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    data[8 + length + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


def cut(root: Path) -> None:
    file = root / ITERATION / MODEL_1
    file.write_bytes(file.read_bytes()[:-8])


def lose_tensor(root: Path) -> None:
    rewrite(root / ITERATION / MODEL_1, lambda found: {n: row for n, row in found.items() if n != PROJ})


def add_tensor(root: Path) -> None:
    rewrite(root / ITERATION / MODEL_1, lambda found: {**found, "extra.weight": found[HEAD]})


def add_file(root: Path) -> None:
    shutil.copy(root / ITERATION / MODEL_1, root / ITERATION / "CKP-model-0000002-0000002.safetensors")


def turn_header(root: Path) -> None:
    rewrite(
        root / ITERATION / MODEL_1,
        lambda found: {n: ({**row, "shape": row["shape"][::-1]}, data) for n, (row, data) in found.items()},
    )


def other_dtype(root: Path) -> None:
    rewrite(
        root / ITERATION / MODEL_1,
        lambda found: {n: ({**row, "dtype": row["dtype"].replace("BF16", "F16")}, d) for n, (row, d) in found.items()},
    )


def turn_to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def add_ranks(root: Path) -> None:
    for rank in range(2):
        (root / f"rank_{rank}").mkdir()
        shutil.copy(root / ITERATION / MODEL_1, root / f"rank_{rank}" / "net.safetensors")


def set_tracker(text: str) -> Damage:
    return lambda root: (root / "latest_checkpointed_iteration.txt").write_text(text)


def entry(content: dict[str, Any], name: str) -> Any:
    return content["state_dict_metadata"][name]


def swap_offsets(content: dict[str, Any]) -> None:
    one, two = f"('{HEAD}', (0,))", f"('{HEAD}', (1,))"
    storage = content["storage_data"]
    storage[one], storage[two] = storage[two], storage[one]


def exchange_files(content: dict[str, Any]) -> None:
    one, two = (content["storage_data"][f"('{HEAD}', ({k},))"][0] for k in (0, 1))
    one["file_name"], two["file_name"] = two["file_name"], one["file_name"]


def wrong_file(content: dict[str, Any]) -> None:
    content["storage_data"][f"('{HEAD}', (1,))"][0]["file_name"] = "CKP-model-0000000-0000002.safetensors"


DAMAGES: dict[str, tuple[Damage, type[CkptkitError], str]] = {
    "a truncated file": (cut, CorruptError, "is cut"),
    "a file that is no safetensors": (
        lambda root: (root / ITERATION / MODEL_1).write_bytes(b"nothing"), CorruptError, "is cut"
    ),
    "metadata.json that is no JSON": (
        lambda root: (root / ITERATION / "metadata.json").write_text("{"), CorruptError, "not valid JSON"
    ),
    "a listed file that is missing": (
        lambda root: (root / ITERATION / MODEL_1).unlink(), CoverageError, "1 of 4 files .* are not in"
    ),
    "a tensor missing from its file": (lose_tensor, CoverageError, "1 slices .* are not in the files"),
    "metadata.json missing": (
        lambda root: (root / ITERATION / "metadata.json").unlink(), CoverageError, "has no `metadata.json`"
    ),
    "an unlisted tensor": (add_tensor, CoverageError, "holds 1 tensors or files that"),
    "an unlisted file": (add_file, CoverageError, "holds 1 tensors or files that"),
    "a tensor that is listed and has no file": (
        edit(lambda c: c["storage_data"].pop(f"('{HEAD}', (0,))")), CoverageError, "do not make a tensor"
    ),
    "another shape in the header": (turn_header, CoverageError, "slices .* are not what `metadata.json` says"),
    "another dtype in the header": (other_dtype, CoverageError, "slices .* are not what `metadata.json` says"),
    "another local shape": (
        edit(lambda c: [chunk.update(local_shape=[8, 8]) for chunk in entry(c, HEAD)["chunk"]]), CoverageError,
        "slices .* are not what `metadata.json` says",
    ),
    "another file": (edit(wrong_file), CoverageError, "puts several slices of a tensor in one file"),
    "exchanged files": (edit(exchange_files), CoverageError, "that several ranks wrote them"),
    "a wrong offset": (
        edit(lambda c: entry(c, HEAD)["chunk"][1].update(global_offset=[3])), CoverageError, "do not make a tensor"
    ),
    "a tracker of an iteration that is gone": (set_tracker("16"), CoverageError, "names iteration 16, which is not"),
    "a tracker that is no number": (set_tracker("last"), CorruptError, "should be the number"),
    "a tracker that is a folder": (
        lambda root: turn_to_folder(root / "latest_checkpointed_iteration.txt"), CorruptError, "is a folder, not a"
    ),
    "common.json that is a folder": (
        lambda root: turn_to_folder(root / ITERATION / "common.json"), CorruptError, "is a folder, not a"
    ),
    "metadata.json that is a folder": (
        lambda root: turn_to_folder(root / ITERATION / "metadata.json"), CorruptError, "is a folder, not a"
    ),
    "a flag that is no flag": (
        edit(lambda c: entry(c, HEAD)["layout"].update(interleaved_parallel=float("nan"))), CorruptError, "no sound"
    ),
    "folders of ranks beside": (lambda root: add_ranks(root), UsageError, "holds two checkpoints"),
    "a loose file beside": (
        lambda root: shutil.copy(root / ITERATION / MODEL_1, root / "part0.safetensors"), UsageError, "two checkpoints"
    ),
    "files of an iteration beside": (
        lambda root: shutil.copy(root / ITERATION / MODEL_1, root), UsageError, "holds two checkpoints"
    ),
    "two iterations and no tracker": (
        lambda root: (
            (root / "latest_checkpointed_iteration.txt").unlink(),
            shutil.copytree(root / ITERATION, root / "iteration_00000016"),
        ),
        UsageError, "holds 2 iterations and no",
    ),
}  # fmt: skip
# what a look at the headers does not tell, and every other command does
DEEP: dict[str, tuple[Damage, type[CkptkitError], str]] = {
    "exchanged offsets": (edit(swap_offsets), CoverageError, "not where their layouts put them"),
    "another whole shape": (
        edit(lambda c: entry(c, HEAD).update(global_shape=[64, 8])), CoverageError, "not where their layouts put them"
    ),
    "another layout": (
        edit(lambda c: entry(c, HEAD)["layout"].update(tensor_map=[-1, 0])), CoverageError, "not where their layouts"
    ),
}  # fmt: skip


def commands(tmp_path: Path) -> dict[str, Callable[[Path], Any]]:
    return {
        "check": check,
        "adopt": lambda path: check(path, adopt=True),
        "diff": lambda path: diff(GOLDEN / "tp2", path),
        "reshard": lambda path: reshard(path, tmp_path / "out", Parallel(), dry_run=True),
    }


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(tmp_path: Path, root: Path, name: str) -> None:
    damage, error, words = DAMAGES[name]
    for command in (inspect, *(run for label, run in commands(tmp_path).items() if label != "adopt")):
        command(root)
    damage(root)
    for command in (inspect, *commands(tmp_path).values()):
        with pytest.raises(error, match=words) as caught:
            command(root)
        assert type(caught.value) is error
    assert not (root / MANIFEST).exists()


@pytest.mark.parametrize("name", DEEP)
def test_slices_in_the_wrong_place_are_refused(tmp_path: Path, root: Path, name: str) -> None:
    damage, error, words = DEEP[name]
    damage(root)
    for command in commands(tmp_path).values():
        with pytest.raises(error, match=words) as caught:
            command(root)
        assert type(caught.value) is error


def test_reordered_keys_are_read_and_said(tmp_path: Path, root: Path) -> None:
    def reorder(content: dict[str, Any]) -> None:
        for row in content["state_dict_metadata"].values():
            row["layout"] = dict(sorted(row["layout"].items()))

    edit(reorder)(root)
    report = reshard(root, tmp_path / "whole", Parallel(), format="safetensors")
    assert any("not in MindFormers' order" in text for label, text in report.rows if label == "note")
    reshard(GOLDEN / "tp2", tmp_path / "sound", Parallel(), format="safetensors")
    assert odd_names(read_whole(tmp_path / "whole"), read_whole(tmp_path / "sound")) == []


def test_a_save_that_did_not_end_is_passed_over_and_refused_when_named(tmp_path: Path, root: Path) -> None:
    shutil.copytree(root / ITERATION, root / "iteration_00000016")
    (root / "iteration_00000016" / MODEL_1).unlink()
    notes = [text for label, text in check(root).rows if label == "note"]
    assert any("`iteration_00000016` is newer than iteration 8" in note for note in notes)
    with pytest.raises(CoverageError, match="files .* are not in"):
        check(root / "iteration_00000016")
    with pytest.raises(CoverageError, match="files .* are not in"):
        reshard(root, tmp_path / "out", Parallel(step=16), format="safetensors")


def test_each_of_two_checkpoints_in_a_folder_is_named_and_the_iteration_is_read_by_its_own(root: Path) -> None:
    add_ranks(root)
    with pytest.raises(UsageError) as caught:
        check(root)
    assert caught.value.items == ("`rank_0`, `rank_1`", f"`{ITERATION}`")
    check(root / ITERATION)


def test_loose_files_beside_ranks_are_passed_over_with_a_note_by_every_command(tmp_path: Path) -> None:
    convert(make_hf_plain(tmp_path / "hf"), tmp_path / "ranks", parallel=Parallel(mp=2))
    (tmp_path / "ranks" / MANIFEST).unlink()

    def noted(report: Report) -> bool:
        return any("beside the ranks: `part0.safetensors`" in text for label, text in report.rows if label == "note")

    told = commands(tmp_path)
    runs = (inspect, check, told["reshard"], told["adopt"])
    assert not any(noted(run(tmp_path / "ranks")) for run in (inspect, check))
    shutil.copy(tmp_path / "hf" / "model.safetensors", tmp_path / "ranks" / "part0.safetensors")
    assert all(noted(run(tmp_path / "ranks")) for run in runs)


def test_a_step_that_is_of_no_such_iteration_is_noted_by_every_command(tmp_path: Path, root: Path) -> None:
    def noted(report: Report) -> bool:
        return any("of iteration 8 says step_num 99" in text for label, text in report.rows if label == "note")

    runs = (inspect, check, lambda path: reshard(path, tmp_path / "out", Parallel(), dry_run=True))
    assert not any(noted(run(root)) for run in runs)
    file = root / ITERATION / "common.json"
    file.write_text(file.read_text().replace('"step_num": 8', '"step_num": 99'))
    assert all(noted(run(root)) for run in runs)
    assert noted(check(root, adopt=True))


def test_replicas_that_differ_are_refused(tmp_path: Path, root: Path) -> None:
    name = "decoder.layers.1.input_layernorm.weight"
    flip(root / ITERATION / MODEL_1, name)
    with pytest.raises(CoverageError, match="differs between ranks"):
        check(root)
    with pytest.raises(CoverageError, match="differs between ranks"):
        check(root, adopt=True)
    with pytest.raises(CoverageError, match="differs between ranks"):
        reshard(root, tmp_path / "out", Parallel(), format="safetensors")


# ---- adopted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", ITERATION])
def test_an_adopted_folder_tells_a_flipped_byte(tmp_path: Path, root: Path, where: str) -> None:
    flip(root / ITERATION / MODEL_1, HEAD)
    check(root)  # nothing tells it: the control
    flip(root / ITERATION / MODEL_1, HEAD)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    report = check(root / where, adopt=True)
    assert report.headline.startswith("adopted")
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert {path: data for path, data in after.items() if path.name != MANIFEST} == before
    assert len(after) == len(before) + 1
    assert check(root / where).headline == f"`{root / where}` is sound"
    flip(root / ITERATION / MODEL_1, HEAD)
    with pytest.raises(CorruptError, match=f"1 items of .* are not what {MANIFEST} promises") as caught:
        check(root / where)
    assert caught.value.items == (f"rank_1:{HEAD} in {MODEL_1}",)
    with pytest.raises(CorruptError):
        reshard(root / where, tmp_path / "out", Parallel(), format="safetensors")


@pytest.mark.parametrize("name", ["metadata.json", "common.json"])
def test_an_adopted_folder_tells_a_changed_small_file(root: Path, name: str) -> None:
    check(root, adopt=True)
    file = root / ITERATION / name
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(CorruptError) as caught:
        check(root)
    assert caught.value.items == (f"{ITERATION}/{name}",)


def test_another_metadata_json_in_an_adopted_folder_is_no_layout(tmp_path: Path, root: Path) -> None:
    check(root, adopt=True)
    reshard(root, tmp_path / "sound", Parallel(), format="safetensors")
    edit(lambda content: entry(content, HEAD)["layout"].update(alias_name=["x", "y"]))(root)  # says the same
    with pytest.raises(CorruptError, match=r"metadata.json` is not what ckptkit.json promises"):
        reshard(root, tmp_path / "out", Parallel(), format="safetensors")
    (root / MANIFEST).unlink()
    reshard(root, tmp_path / "out", Parallel(), format="safetensors")


def test_an_adopted_root_says_when_the_tracker_moves_on(tmp_path: Path, root: Path) -> None:
    check(root, adopt=True)
    shutil.copytree(root / ITERATION, root / "iteration_00000016")
    check(root)
    (root / "latest_checkpointed_iteration.txt").write_text("16")
    with pytest.raises(CorruptError, match="names iteration 16, and ckptkit.json is of another"):
        check(root)
    reshard(root, tmp_path / "newer", Parallel(step=16), format="safetensors")
    reshard(root, tmp_path / "older", Parallel(step=8), format="safetensors")
    check(root / "iteration_00000016", adopt=True)
    assert "is sound" in check(root / "iteration_00000016").headline


def test_an_adopted_folder_is_never_replaced(root: Path, tmp_path: Path) -> None:
    check(root, adopt=True)
    hf = make_hf_plain(tmp_path / "hf")
    with pytest.raises(UsageError, match="that ckptkit did not write") as caught:
        convert(hf, root, overwrite=True)
    assert "check --adopt" in caught.value.why
    convert(hf, tmp_path / "ours")
    convert(hf, tmp_path / "ours", overwrite=True, format="ckpt")


def test_a_folder_is_adopted_once(root: Path, tmp_path: Path) -> None:
    check(root, adopt=True)
    with pytest.raises(UsageError, match="has a ckptkit.json already"):
        check(root, adopt=True)
    with pytest.raises(UsageError, match="is a file"):
        check(root / ITERATION / MODEL_1, adopt=True)


def test_other_foreign_checkpoints_are_adopted_too(tmp_path: Path) -> None:
    hf = make_hf_plain(tmp_path / "hf", shards=3)
    check(hf, adopt=True)
    convert(hf, tmp_path / "ranks", parallel=Parallel(mp=2))
    (tmp_path / "ranks" / MANIFEST).unlink()
    check(tmp_path / "ranks", adopt=True)
    assert "is sound" in check(tmp_path / "ranks").headline
    convert(tmp_path / "ranks", tmp_path / "back", to_dialect="hf", variant="base")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(hf)) == []
    for file in sorted(tmp_path.glob("ranks/rank_1/*.safetensors")):
        flip(file, next(iter(read_file(file))))
    with pytest.raises(CorruptError):
        check(tmp_path / "ranks")


def test_ranks_of_several_steps_are_not_adopted(tmp_path: Path) -> None:
    hf = make_hf_plain(tmp_path / "hf")
    convert(hf, tmp_path / "ranks", parallel=Parallel(mp=2))
    (tmp_path / "ranks" / MANIFEST).unlink()
    for rank in range(2):
        file = tmp_path / f"ranks/rank_{rank}/checkpoint_{rank}.safetensors"
        shutil.copy(file, file.with_name(f"net_rank_{rank}-1_20.safetensors"))
        file.rename(file.with_name(f"net_rank_{rank}-1_10.safetensors"))
    with pytest.raises(CoverageError, match="has 2 weight files that"):
        check(tmp_path / "ranks", adopt=True)
    assert not (tmp_path / "ranks" / MANIFEST).exists()


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "code"),
    [(None, 0), (cut, 5), (lose_tensor, 3), (set_tracker("16"), 3), (edit(swap_offsets), 3)],
)
def test_the_exit_code_is_that_of_the_damage(root: Path, damage: Damage | None, code: int) -> None:
    if damage is not None:
        damage(root)
    command = [sys.executable, "-m", "ckptkit", "check", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_adopt_is_an_option_of_check(root: Path) -> None:
    command = [sys.executable, "-m", "ckptkit", "check", str(root)]
    done = subprocess.run([*command, "--adopt"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, "adopted" in done.stdout) == (0, True)
    flip(root / ITERATION / MODEL_1, HEAD)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 5
    assert HEAD in done.stderr
