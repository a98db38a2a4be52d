"""The contract: what `check --adopt` writes names files as they lie in the folder, wherever links lead.

HuggingFace's cache keeps each file under its hash and links to it; a folder of ranks or of iterations may link to
another disk. Such a folder is sound once it is adopted, and a flipped byte behind a link is told by the link's name.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CorruptError
from ckptkit.formats.manifest import MANIFEST, named_files, read_manifest
from ckptkit.formats.mindformers_folder import locate
from tests.rank_results import odd_names, read_whole
from tests.tiny_models import make_hf_plain

pytestmark = pytest.mark.usefixtures("quick_disk")

GOLDEN = Path(__file__).parent.parent / "golden" / "mindformers"
ITERATION = "iteration_00000008"
MODEL_1 = "CKP-model-0000001-0000002.safetensors"


def link_away(path: Path) -> None:
    """Move a file or folder to where its name is another, and leave a relative link to it."""
    store = path.parent / ".." / f"store-{path.parent.name}"
    store.mkdir(exist_ok=True)
    away = store / f"blob-{len(list(store.iterdir()))}"
    path.rename(away)
    path.symlink_to(os.path.relpath(away, path.parent))


def flip_last(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def make_cache(folder: Path) -> Path:
    """Return a snapshot as HuggingFace's cache keeps it: every file a link to a blob."""
    snapshot = make_hf_plain(folder / "snapshots" / "0a1b", shards=3)
    (snapshot / "tokenizer.json").write_text("{}")
    for file in sorted(snapshot.iterdir()):
        link_away(file)
    return snapshot


def make_root(folder: Path) -> Path:
    root = shutil.copytree(GOLDEN / "tp2", folder / "root")
    (root / "tokenizer.json").write_text("{}")
    return root


def make_ranks(folder: Path) -> Path:
    convert(make_hf_plain(folder / "hf"), folder / "ranks", parallel=Parallel(mp=2))
    (folder / "ranks" / MANIFEST).unlink()
    return folder / "ranks"


def make_linked(make: Callable[[Path], Path], *links: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        root = make(folder)
        for name in links:
            link_away(root / name)
        return root

    return made


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a snapshot of HuggingFace's cache": (make_cache, "model-00002-of-00003.safetensors"),
    "an iteration": (make_linked(make_root, ITERATION), f"{ITERATION}/{MODEL_1}"),
    "a file of an iteration": (make_linked(make_root, f"{ITERATION}/{MODEL_1}"), f"{ITERATION}/{MODEL_1}"),
    "small files of an iteration": (
        make_linked(make_root, f"{ITERATION}/metadata.json", f"{ITERATION}/common.json"), f"{ITERATION}/metadata.json"
    ),
    "the tracker": (make_linked(make_root, "latest_checkpointed_iteration.txt"), "latest_checkpointed_iteration.txt"),
    "a small file beside": (make_linked(make_root, "tokenizer.json"), "tokenizer.json"),
    "a rank": (make_linked(make_ranks, "rank_1"), "rank_1/checkpoint_1.safetensors"),
    "a file of a rank": (
        make_linked(make_ranks, "rank_1/checkpoint_1.safetensors"), "rank_1/checkpoint_1.safetensors"
    ),
    "the strategy": (make_linked(make_ranks, "strategy"), "strategy/ckpt_strategy_rank_0.ckpt"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_links_in_an_adopted_folder_go_by_their_own_names(tmp_path: Path, name: str) -> None:
    make, linked = FOLDERS[name]
    root = make(tmp_path)
    check(root, adopt=True)
    manifest = read_manifest(root)
    assert manifest is not None
    names = named_files(manifest)
    assert linked in names
    assert all(not Path(found).is_absolute() and ".." not in Path(found).parts for found in names)
    assert [found for found in names if not (root / found).is_file()] == []
    report = check(root)
    assert report.headline == f"`{root}` is sound"
    added = report.to_text().rpartition("not written by ckptkit: ")[2].split(", ")
    assert {linked, linked.split("/")[0]}.isdisjoint(added)
    if linked.endswith(".safetensors"):
        flip_last(root / linked)
        with pytest.raises(CorruptError, match=f"1 items of .* are not what {MANIFEST} promises"):
            check(root)


@pytest.mark.parametrize("above", [True, False])
def test_an_adopted_folder_is_sound_by_another_path(tmp_path: Path, monkeypatch: Any, above: bool) -> None:
    root = make_root(tmp_path)
    (tmp_path / "elsewhere").symlink_to(root)
    path = tmp_path / "elsewhere" if above else tmp_path / "elsewhere" / ITERATION
    check(path, adopt=True)
    assert check(path).headline == f"`{path}` is sound"
    monkeypatch.chdir(root if above else root / ITERATION)
    assert check(".").headline == "`.` is sound"


def test_a_manifest_around_a_linked_iteration_is_found_from_inside(tmp_path: Path) -> None:
    root = make_linked(make_root, ITERATION)(tmp_path)
    check(root, adopt=True)
    assert locate(root / ITERATION).number == 8
    assert check(root / ITERATION).headline == f"`{root / ITERATION}` is sound"
    reshard(root / ITERATION, tmp_path / "whole", Parallel(), format="safetensors")
    flip_last(root / ITERATION / MODEL_1)
    with pytest.raises(CorruptError):
        check(root / ITERATION)


def test_one_linked_file_is_held_against_the_manifest_beside_the_link(tmp_path: Path) -> None:
    snapshot = make_linked(lambda folder: make_hf_plain(folder / "s" / "0a1b"), "model.safetensors")(tmp_path)
    check(snapshot, adopt=True)
    file = snapshot / "model.safetensors"
    assert check(file).headline == f"`{file}` is sound"
    convert(snapshot, tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "back", to_dialect="hf")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(snapshot)) == []
    flip_last(file)
    with pytest.raises(CorruptError):
        check(file)
