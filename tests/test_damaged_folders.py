"""The contract: a damaged file never passes in silence.

Cut at 200 places, any file of a checkpoint, ours or foreign, is refused by name. In a folder that ckptkit wrote, any
flipped bit is found by `check`, and a flipped bit of a tensor that moves whole by `convert`. In a foreign folder a bit
of the elements can be anything, but the header's bits cannot.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_models import make_hf_plain

from ckptkit.cli import run
from ckptkit.commands.check import check
from ckptkit.commands.convert import convert
from ckptkit.commands.inspect import inspect
from ckptkit.commands.source import find_config, open_source
from ckptkit.errors import CkptkitError, CorruptError
from ckptkit.formats import mindspore_ckpt
from ckptkit.formats.base import OutputFile
from ckptkit.formats.manifest import MANIFEST, dump_manifest, header_digest, read_manifest
from ckptkit.formats.registry import open_checkpoint
from ckptkit.formats.result_folder import ResultFolder
from ckptkit.types import Extent

PLACES = 200
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "intermediate": 24, "vocab": 19}


@dataclass(frozen=True)
class Sample:
    """A checkpoint folder with config.json, and whether ckptkit wrote it."""

    folder: Path
    ours: bool


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    """Every kind of folder: HF and MindSpore, safetensors and .ckpt, ours and foreign."""
    room = tmp_path_factory.mktemp("samples")
    make_hf_plain(room / "hf", shards=2, **SHAPE)
    convert(room / "hf", room / "ms", max_shard_size=6000)
    convert(room / "hf", room / "ckpt", format="ckpt")
    convert(room / "ms", room / "back", max_shard_size=6000)
    samples = {"foreign hf": Sample(room / "hf", False)}
    for name in ("ms", "ckpt", "back"):
        samples[f"our {name}"] = Sample(room / name, True)
        add_header_digests(room / name)
        shutil.copytree(room / name, room / f"foreign_{name}")
        (room / f"foreign_{name}" / MANIFEST).unlink()
        samples[f"foreign {name}"] = Sample(room / f"foreign_{name}", False)
    return samples


def add_header_digests(folder: Path) -> None:
    """Give a manifest the digests of headers, if it has none."""
    manifest = read_manifest(folder)
    assert manifest
    for row in manifest["files"]:
        data = (folder / row["name"]).read_bytes()
        file = OutputFile(row["name"], len(data), outside(data, extents_in(folder / row["name"])), {})
        assert row.setdefault("header", header_digest(file)) == header_digest(file)
    (folder / MANIFEST).write_bytes(dump_manifest(manifest))


def extents_in(file: Path) -> list[Extent]:
    return sorted(
        e for info in open_checkpoint(file.parent).tensors.values() if info.file == file for e in info.extents
    )


def outside(data: bytes, extents: list[Extent]) -> tuple[tuple[int, bytes], ...]:
    """Return the stretches of `data` between extents."""
    pieces, position = [], 0
    for offset, size in [*extents, Extent(len(data), 0)]:
        pieces.append((position, data[position:offset]))
        position = offset + size
    return tuple(pieces)


def files_of(folder: Path) -> list[Path]:
    """Return the files that decide what a checkpoint is."""
    names = [MANIFEST, "config.json", "param_name_map.json", "model.safetensors.index.json"]
    named = [folder / name for name in names]
    weights = [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".ckpt")]
    return [path for path in named if path.exists()] + weights[:2]


def passes(folder: Path) -> str:
    """Convert as far as needed to meet the damage; return the error's text, or an empty text when all is well."""
    try:
        find_config(open_source(folder), None)  # most damage is met here, and this is fast
        convert(folder, folder.parent / "never", dry_run=True)
    except CkptkitError as error:
        assert error.exit_code in (2, 3, 5), error
        return str(error)
    return ""


def same_content(file: Path, sound: bytes) -> bool:
    """Say whether a JSON file still says the same: a cut at its last line end takes nothing away."""
    return file.suffix == ".json" and file.name != MANIFEST and file.read_bytes().strip() == sound.strip()


def unnoticed(
    folder: Path,
    name: str,
    places: Iterable[int],
    harm: Callable[[bytearray, int], None],
    notice: Callable[[Path], str],
) -> list[int]:
    """Harm a file of `folder` at each place; return those that `notice` did not complain of, or not by its name."""
    file = folder / name
    sound = file.read_bytes()
    silent = []
    for place in places:
        data = bytearray(sound)
        harm(data, place)
        file.write_bytes(data)
        said = notice(folder)
        if not (name in said or (said and file.suffix == ".ckpt")) and not same_content(file, sound):
            silent.append(place)
    file.write_bytes(sound)
    return silent


def checked(folder: Path) -> str:
    return complains(lambda: check(folder))


def copy_of(sample: Sample, room: Path) -> Path:
    return Path(shutil.copytree(sample.folder, room / "copy"))


def complains(command: Callable[[], object]) -> str:
    try:
        command()
    except CkptkitError as error:
        return str(error)
    return ""


def cut(data: bytearray, place: int) -> None:
    del data[place:]


def flip(data: bytearray, place: int) -> None:
    data[place // 8] ^= 1 << place % 8


KINDS = ["foreign hf", "our ms", "foreign ms", "our ckpt", "foreign ckpt", "our back", "foreign back"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_anywhere_is_refused_by_name(samples: dict[str, Sample], tmp_path: Path, kind: str) -> None:
    folder = copy_of(samples[kind], tmp_path)
    for number, file in enumerate(files_of(folder)):
        size = file.stat().st_size
        places = [0, *random.Random(number).sample(range(size), min(PLACES, size)), size - 1]
        assert unnoticed(folder, file.name, places, cut, passes) == [], file.name
        if samples[kind].ours:
            assert unnoticed(folder, file.name, places, cut, checked) == [], file.name


@pytest.mark.parametrize("kind", ["our ckpt", "foreign ckpt"])
def test_a_ckpt_cut_between_two_records_is_missed_by_its_names(
    samples: dict[str, Sample], tmp_path: Path, kind: str
) -> None:
    folder = copy_of(samples[kind], tmp_path)
    ends = [extent.offset + extent.size for extent in extents_in(folder / "model.ckpt")]
    assert len(ends) > 10
    assert unnoticed(folder, "model.ckpt", ends[:-1], cut, passes) == []
    (tmp_path / "five.ckpt").write_bytes((folder / "model.ckpt").read_bytes()[: ends[4]])
    assert len(mindspore_ckpt.read_index(tmp_path / "five.ckpt").tensors) == 5  # as a file it is sound


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_in_a_header_is_refused(samples: dict[str, Sample], tmp_path: Path, kind: str) -> None:
    """Foreign: but for the bits of `__metadata__` and of the spaces at the end, which mean nothing to anybody."""
    folder = copy_of(samples[kind], tmp_path)
    for file in files_of(folder):
        if file.suffix not in (".safetensors", ".ckpt"):
            continue
        data = file.read_bytes()
        stretches = outside(data, extents_in(file))
        places = [at + n for at, stretch in stretches for n in range(len(stretch))]
        if not samples[kind].ours:
            places = [at for at in places if not idle(data, at)]
        chosen = random.Random(0).sample([8 * at + bit for at in places for bit in range(8)], PLACES)
        found = unnoticed(folder, file.name, chosen, flip, checked if samples[kind].ours else passes)
        assert [data[max(0, bit // 8 - 9) : bit // 8 + 9] for bit in found] == []


def idle(data: bytes, at: int) -> bool:
    end = data.find(b"}", data.find(b"__metadata__"))
    return data[8:9] == b"{" and (data.find(b"__metadata__") - 1 <= at <= end or data[at : at + 1] == b" ")


@pytest.mark.parametrize("kind", ["our ms", "our ckpt", "our back"])
def test_a_flipped_bit_in_the_elements_is_found_and_its_tensor_named(
    samples: dict[str, Sample], tmp_path: Path, kind: str
) -> None:
    folder = copy_of(samples[kind], tmp_path)
    chance = random.Random(1)
    tensors = open_checkpoint(folder).tensors
    for name in chance.sample(sorted(tensors), 8):
        info = tensors[name]
        sound = info.file.read_bytes()
        data = bytearray(sound)
        flip(data, 8 * info.extents[0].offset + chance.randrange(8 * info.extents[0].size))
        info.file.write_bytes(data)
        assert name in complains(lambda: check(folder))
        said = complains(lambda: convert(folder, tmp_path / "out", overwrite=True))
        assert name in said
        assert "manifest promises" in said
        assert not (tmp_path / "out").exists()
        info.file.write_bytes(sound)
    check(folder)
    convert(folder, tmp_path / "out", overwrite=True)


def test_a_flipped_bit_in_the_manifest_is_refused_by_every_command(samples: dict[str, Sample], tmp_path: Path) -> None:
    folder = copy_of(samples["our ms"], tmp_path)
    sound = (folder / MANIFEST).read_bytes()
    for place in random.Random(2).sample(range(8 * len(sound)), PLACES):
        data = bytearray(sound)
        flip(data, place)
        (folder / MANIFEST).write_bytes(data)
        for command in (check, inspect, open_source):
            assert MANIFEST in complains(lambda command=command: command(folder)), data[place // 8 - 9 : place // 8 + 9]


def test_a_manifest_that_lacks_what_readers_need_is_refused(samples: dict[str, Sample], tmp_path: Path) -> None:
    folder = copy_of(samples["our ms"], tmp_path)
    sound = read_manifest(folder)
    assert sound
    for key in ("plan", "family", "to", "files", "side_files"):
        for value in (None, 7, [7], {"dialect": 1}):
            (folder / MANIFEST).write_bytes(dump_manifest(sound | {key: value}))
            with pytest.raises(CorruptError, match="not a ckptkit manifest"):
                read_manifest(folder)
    for row in (None, [], {"shape": [1]}):
        (folder / MANIFEST).write_bytes(dump_manifest(sound | {"tensors": {"x": row}}))
        with pytest.raises(CorruptError, match="not a ckptkit manifest"):
            read_manifest(folder)
    for text in ("[]", "[" * 100_000, "{}", '{"schema": 2}'):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(CorruptError, match=MANIFEST):
            read_manifest(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "param_name_map.json"])
@pytest.mark.parametrize("change", ["changed", "removed"])
def test_a_side_file_that_changed_is_named(
    samples: dict[str, Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: str
) -> None:
    folder = copy_of(samples["our ms"], tmp_path)
    content = json.loads((folder / name).read_bytes())
    (folder / name).write_text(json.dumps(content | {"more": 1}))
    if change == "removed":
        (folder / name).unlink()
    assert run(["check", str(folder)]) in (3, 5)
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_says_what_why_and_how(
    samples: dict[str, Sample], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder = copy_of(samples[kind], tmp_path)
    for file in files_of(folder):
        sound = file.read_bytes()
        file.write_bytes(sound[: len(sound) // 2])
        commands = [["convert", str(folder), str(tmp_path / "out")]] + (
            [["check", str(folder)]] if samples[kind].ours else []
        )
        for command in commands:
            code = run(command)
            said = capsys.readouterr()
            assert code in (3, 5), (command, said)
            assert said.err.startswith("error: ")
            assert file.name in said.err
            assert "hint: " in said.err
            assert said.out == ""
        file.write_bytes(sound)
    assert not (tmp_path / "out").exists()


def test_the_damage_test_catches_a_reader_that_ignores_the_end(
    samples: dict[str, Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptkit.formats.safetensors._check_ranges", lambda *_: None)
    folder = copy_of(samples["foreign ms"], tmp_path)
    size = (folder / "part0.safetensors").stat().st_size
    assert unnoticed(folder, "part0.safetensors", [size - 1], cut, passes) == [size - 1]


def test_check_names_files_that_were_added(tmp_path: Path) -> None:
    convert(make_hf_plain(tmp_path / "hf"), tmp_path / "ms")
    (tmp_path / "ms" / "modeling_x.py").write_text("x = 1\n")
    assert "not written by ckptkit: modeling_x.py" in check(tmp_path / "ms").to_text()


def test_a_finished_file_that_was_damaged_since_is_written_again(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    out = tmp_path / "out"
    convert(source, out, max_shard_size="20kB")
    digest = json.loads((out / "ckptkit.json").read_text())["plan"]
    folder = ResultFolder(tmp_path / "again", digest)
    folder.open()
    for file in sorted(out.glob("part*")):
        (folder.partial / file.name).write_bytes(file.read_bytes())
    tensors = json.loads((out / "ckptkit.json").read_text())["tensors"]
    for name in sorted({row["file"] for row in tensors.values()}):
        folder.note_finished(name, {n: row["xxh3_128"] for n, row in tensors.items() if row["file"] == name})
    folder.close()
    damaged = folder.partial / "part1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    convert(source, tmp_path / "again", max_shard_size="20kB")
    assert check(tmp_path / "again").exit_code == 0
    assert (tmp_path / "again" / "part1.safetensors").read_bytes() == (out / "part1.safetensors").read_bytes()
