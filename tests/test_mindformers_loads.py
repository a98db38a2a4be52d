"""MindFormers 1.9's own load code reads the newer checkpoint folders that ckptkit writes, bit for bit.

One child process runs it (`clients/mindformers_loads.py`): `load_checkpoint` as one process, from folders of 1, 2, 4
and 6 ranks; its reader of metadata, its loader and its `load_parameters` as each of several ranks, with layouts that
are written down here once more, since a CPU compiles none; and the same in two processes that `msrun` starts. Every
parameter is one before loading. The controls are folders that are damaged in one place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.run import run_client, smollm2_folder

from ckptkit.commands.convert import convert
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.reshard import reshard
from ckptkit.errors import CoverageError
from tests.commands.test_reshard_grid import TP_AXES
from tests.rank_results import Array, Tensors, odd_names, part_of, read_file, read_whole
from tests.trained_models import make_llama, make_trained, weights_of

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"mp": 2},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "dp2 opt": {"dp": 2, "optimizer_shard": True},
    "tp4": {"mp": 4},
    "tp2 dp2": {"mp": 2, "dp": 2},
    "tp2 dp2 opt": {"mp": 2, "dp": 2, "optimizer_shard": True},
    "tp2 pp2": {"mp": 2, "pp": 2},
    "tp3 pp2": {"mp": 3, "pp": 2},
}
STATE = ("adam_m.", "adam_v.", "global_step", "beta1_power", "loss_scale", "learning_rate")
EMBEDDING = "model.tok_embeddings.embedding_weight"
HOLDS = "model.layers.1.attention.wq.weight"


def tp_layout(name: str, axes: int, tp: int) -> list[Any]:
    """Return how a tensor is cut over `tp` devices."""
    axis = TP_AXES.get(name.split(".")[-2]) if "." in name else None
    return [[tp], [[0] if axis == a else [] for a in range(axes)], list(range(tp))]


class Room:
    """The folders, what MindFormers is to do with them, and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}
        hf = make_llama(folder / "hf", dtype="BF16")
        self.model = make_trained(hf, folder / "ms")
        as_counter(self.model / "model.safetensors")
        self.whole = read_whole(self.model)

    def add(self, name: str, **job: Any) -> None:
        known = {name: ["BF16" if a.itemsize == 2 else "F32", a.shape] for name, a in self.whole.items()}
        known["global_step"][0] = "I32"
        tensors = {
            "network": {n: of for n, of in known.items() if not n.startswith(STATE)},
            "optimizer": {n: of for n, of in known.items() if n.startswith(STATE)},
        }
        self.jobs.append({"name": name, **tensors, "to": self.to(name), **job})

    def to(self, name: str) -> Path:
        return self.folder / "loaded" / f"{name}{'' if 'ranks' in name else '.safetensors'}"

    def loaded(self, name: str) -> Tensors:
        assert self.answers[name] == {}
        return read_file(self.to(name))

    def loaded_by(self, name: str, rank: int) -> Tensors:
        assert self.answers[name] == {}
        return read_file(self.to(name) / f"{rank}.safetensors")

    def tp(self, count: int) -> list[dict[str, Any]]:
        return [{name: tp_layout(name, a.ndim, count) for name, a in self.whole.items()}] * count

    def part(self, name: str, array: Array, rank: int, count: int) -> Array:
        dev, axes, _ = tp_layout(name, array.ndim, count)
        return part_of(array, rank, dev, axes)


def as_counter(file: Path) -> None:
    """Make the counter of steps the integer 8, as optimizers have it."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start = 8 + length + header["global_step"]["data_offsets"][0]
    text = data[8 : 8 + length].replace(b'"global_step": {"dtype": "F32"', b'"global_step": {"dtype": "I32"')
    assert text != data[8 : 8 + length]
    file.write_bytes(data[:8] + text + data[8 + length : start] + (8).to_bytes(4, "little") + data[start + 4 :])


def damage_metadata(room: Room, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of the two-way folder whose metadata.json is changed."""
    folder = room.folder / name
    shutil.copytree(room.folder / "tp2", folder)
    file = folder / "iteration_00000008" / "metadata.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    (folder / "ckptkit.json").unlink()  # it would tell at once
    return folder


def sort_layouts(content: dict[str, Any]) -> None:
    for entry in content["state_dict_metadata"].values():
        entry["layout"] = dict(sorted(entry["layout"].items()))


def exchange_files(content: dict[str, Any]) -> None:
    one, two = (content["storage_data"][f"('{HOLDS}', ({k},))"] for k in (0, 1))
    one[0]["file_name"], two[0]["file_name"] = two[0]["file_name"], one[0]["file_name"]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Room:
    room = Room(tmp_path_factory.mktemp("mindformers"))
    for label, degrees in CUTS.items():
        table = {"variant": "base"} if degrees else {}
        reshard(room.model, room.folder / label, Parallel(**degrees), format="mindformers", **table)
        room.add(label, load=room.folder / label)
    for source in ("one", "tp2 dp2 opt", "pp2", "tp3 pp2"):
        room.add(f"{source} as ranks of 2", load=room.folder / source, ranks=room.tp(2))
    room.add("dp2 opt as ranks of 4", load=room.folder / "dp2 opt", ranks=room.tp(4))
    for source in ("tp2", "tp2 pp2"):
        room.add(f"{source} as ranks in processes", load=room.folder / source, ranks=room.tp(2), processes=True)
    tied = make_trained(make_llama(room.folder / "hf tied", tied=True), room.folder / "tied")
    reshard(tied, room.folder / "tied pp3", Parallel(pp=3), variant="base", format="mindformers")
    weights = {name: ["F32", array.shape] for name, array in weights_of(read_whole(tied)).items()}
    room.add("tied", load=room.folder / "tied pp3", network=weights, optimizer={})
    room.add("sorted", load=damage_metadata(room, "sorted", sort_layouts))
    room.add("exchanged", load=damage_metadata(room, "exchanged", exchange_files))
    jobs = room.folder / "jobs.json"
    jobs.write_text(json.dumps(room.jobs, default=str))
    room.answers = run_client("mindformers_loads", "--jobs", str(jobs), timeout=500)
    return room


@pytest.mark.parametrize("label", CUTS)
def test_load_checkpoint_takes_every_tensor_from_what_we_wrote(room: Room, label: str) -> None:
    assert odd_names(room.loaded(label), room.whole) == []


def test_a_tied_embedding_that_two_stages_hold_is_loaded(room: Room) -> None:
    assert odd_names(room.loaded("tied"), weights_of(read_whole(room.folder / "tied"))) == []
    first, last = (
        read_file(room.folder / f"tied pp3/iteration_00000000/CKP-model-000000{rank}-0000003.safetensors")
        for rank in (0, 2)
    )
    assert EMBEDDING in first.keys() & last.keys()


@pytest.mark.parametrize("source", ["one", "tp2 dp2 opt", "pp2", "tp3 pp2"])
def test_each_of_two_ranks_loads_its_part(room: Room, source: str) -> None:
    for rank in range(2):
        expected = {name: room.part(name, array, rank, 2) for name, array in room.whole.items()}
        assert expected[HOLDS].shape != room.whole[HOLDS].shape
        assert odd_names(room.loaded_by(f"{source} as ranks of 2", rank), expected) == []


def test_each_of_four_ranks_loads_its_part(room: Room) -> None:
    for rank in range(4):
        expected = {name: room.part(name, array, rank, 4) for name, array in room.whole.items()}
        assert odd_names(room.loaded_by("dp2 opt as ranks of 4", rank), expected) == []


@pytest.mark.parametrize("source", ["tp2", "tp2 pp2"])
def test_two_processes_load_their_parts(room: Room, source: str) -> None:
    for rank in range(2):
        expected = {name: room.part(name, array, rank, 2) for name, array in room.whole.items()}
        assert odd_names(room.loaded_by(f"{source} as ranks in processes", rank), expected) == []


def test_mindformers_reads_a_layout_by_the_order_of_its_keys(room: Room) -> None:
    assert "error" in room.answers["sorted"]
    reshard(room.folder / "sorted", room.folder / "sorted whole", Parallel(), format="safetensors")
    assert odd_names(read_whole(room.folder / "sorted whole"), room.whole) == []


def test_mindformers_believes_metadata_that_names_the_wrong_files(room: Room) -> None:
    assert odd_names(room.loaded("exchanged"), room.whole) == [HOLDS]
    with pytest.raises(CoverageError, match="several ranks wrote"):
        reshard(room.folder / "exchanged", room.folder / "exchanged whole", Parallel(), format="safetensors")


def test_smollm2_goes_from_ranks_to_the_newer_folder_and_comes_back(tmp_path: Path) -> None:
    model = smollm2_folder()
    if model is None:
        pytest.skip("the package that holds SmolLM2 cannot be had here")
    convert(model, tmp_path / "six", parallel=Parallel(mp=3, pp=2))
    reshard(tmp_path / "six", tmp_path / "newer", Parallel(mp=1, pp=2, dp=2), format="mindformers")
    assert len(list((tmp_path / "newer" / "iteration_00000000").glob("*.safetensors"))) == 4
    convert(tmp_path / "newer", tmp_path / "back", to_dialect="hf")
    assert odd_names(read_whole(tmp_path / "back"), read_whole(model)) == []
    damaged = tmp_path / "newer" / "iteration_00000000" / "CKP-model-0000000-0000004.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.unlink()
    damaged.write_bytes(data)
    shutil.rmtree(tmp_path / "back")
    (tmp_path / "newer" / "ckptkit.json").unlink()
    with pytest.raises(CoverageError, match="differs between ranks"):
        convert(tmp_path / "newer", tmp_path / "back", to_dialect="hf")
