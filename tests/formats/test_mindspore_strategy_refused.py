"""Strategy files that lie or are damaged: each is refused, by an error that says why; see `strategy_bytes.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import mutations
from strategy_bytes import (
    CUT,
    GOLDEN,
    dims,
    field,
    file_bytes,
    json_bytes,
    layout_bytes,
    layout_item,
    read,
    stage_item,
    stage_of,
)

from ckptkit.errors import CkptkitError, CorruptError, CoverageError, UsageError
from ckptkit.formats.mindspore_strategy import (
    dump_json,
    dump_merged,
    dump_strategy,
    is_strategy_file,
    read_strategies,
)
from ckptkit.types import TensorLayout


def said(value: object) -> str:
    """Name a case by what its error says."""
    return value[:50] if isinstance(value, str) else "file"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (layout_bytes(maps=[dims(2, -1)]), r"device axes \[2\], and the device matrix \[2, 2\] has 2"),
        (layout_bytes(maps=[field(0x08, -1)[:-10] + b"\xfe" + b"\xff" * 8 + b"\x01"]), r"device axes \[-2\]"),
        (layout_bytes(maps=[dims(0, 0)]), "uses a device axis twice"),
        (layout_bytes(maps=[dims(1, 0), dims(0)]), "uses a device axis twice"),
        (layout_bytes(dev=dims(2, 0)), r"device matrix \[2, 0\]"),
        (layout_bytes(dev=field(0x0A, b"\x80\x80\x80\x80\x08"), maps=[dims(-1)]), "device matrix"),
        (layout_bytes(dev=b"", maps=[b""]), "it is empty"),
    ],
    ids=said,
)  # fmt: skip
def test_an_impossible_layout_is_refused(tmp_path: Path, layout: bytes, message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        read(tmp_path, file_bytes(stage_item(), layout_item(layout=layout)))


@pytest.mark.parametrize(
    ("layout", "possible"),
    [
        (TensorLayout((4, 2), ((0,),), 2, 4), True),
        (TensorLayout((4, 2), ((0,),), 2, 2), True),
        (TensorLayout((4, 2), ((0,),), 2, -1), True),
        (TensorLayout((2, 3, 2), ((0,),), 2, 6), True),
        (TensorLayout((4, 2), ((0,),), 2, 3), False),
        (TensorLayout((4, 2), ((0,),), 2, 8), False),
        (TensorLayout((4, 2), ((0,),), 2, -2), False),
        (TensorLayout((4, 2), ((0,),), -1, 2), False),
        (TensorLayout((2, 3, 2), ((0,),), 2, 2), False),  # the last unused axis has 3 devices
    ],
)
def test_an_optimizer_shard_must_fit_the_devices_with_equal_parts(layout: TensorLayout, possible: bool) -> None:
    if possible:
        assert dump_strategy(stage_of(0, w=layout))
    else:
        with pytest.raises(CoverageError, match="optimizer shard"):
            dump_strategy(stage_of(0, w=layout))


LEGACY_BYTES = {
    "param_split_shape": layout_bytes(more=field(0x1A, dims(1))),
    "indices_offset": layout_bytes(more=field(0x22, dims(1))),
    "field": layout_bytes().replace(field(0x28, 0), field(0x28, 3)),
}


@pytest.mark.parametrize("name", LEGACY_BYTES)
def test_a_legacy_field_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(CorruptError, match=f"states `{name}` for `w`, which is not supported"):
        read(tmp_path, file_bytes(stage_item(), layout_item(layout=LEGACY_BYTES[name])))
    with pytest.raises(CorruptError, match=f"states `{name}` for `w`, which is not supported"):
        read(tmp_path, json_bytes(w={name: 3 if name == "field" else [3]}))


def test_the_fields_of_an_item_may_come_in_any_order_and_far_apart(tmp_path: Path) -> None:
    name = b"w" * 9000
    item = field(0x1A, field(0x12, layout_bytes()) + field(0x0A, name))
    assert read(tmp_path, file_bytes(stage_item(), item)) == (stage_of(0, **{name.decode(): CUT}),)


def test_empty_legacy_fields_and_packed_lists_are_read(tmp_path: Path) -> None:
    layout = layout_bytes(dev=field(0x0A, b"\x02\x02"), more=field(0x1A, b"") + field(0x22, b""))
    assert read(tmp_path, file_bytes(stage_item(), layout_item(layout=layout))) == (stage_of(0),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file_bytes(stage_item(), field(0x22, b"")), "unknown or repeated field, key 34"),
        (file_bytes(stage_item(), b"\x08\x02"), "unknown or repeated field, key 8"),
        (file_bytes(field(0x12, field(0x0A, b"x"))), "an item without name or without content"),
        (file_bytes(layout_item(name=b"")), "an item without name or without content"),
        (file_bytes(layout_item(name=b"\xff")), "not valid UTF-8"),
        (file_bytes(field(0x1A, field(0x0A, b"x") + field(0x0A, b"x"))), "unknown or repeated field, key 10"),
        (file_bytes(field(0x12, field(0x0A, b"x") + field(0x12, b""))), "without stage"),
        (file_bytes(field(0x12, field(0x0A, b"x") + field(0x12, b"\x08\xf0\xa2\x04"))), "an impossible one"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes(more=field(0x38, 0)))), "repeated field, key 56"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes(more=field(0x0A, dims(4))))), "missing or repeated"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes()[:-2])), "missing or repeated"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes(maps=[]))), "an empty list"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes(maps=[b"", dims(0)]))), "an empty list"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes(maps=[dims(0), b"", b""]))), "an empty list"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes(maps=[dims(*[0] * 17)]))), "more than 16 axes"),
        (file_bytes(stage_item(), layout_item(layout=layout_bytes(maps=[b""] * 17))), "more than 16 lists"),
        (file_bytes(stage_item(), layout_item())[:-1], "is cut"),
    ],
    ids=said,
)  # fmt: skip
def test_damaged_bytes_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        read(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (file_bytes(stage_item()), "states the layout of no tensor"),
        (file_bytes(stage_item(), layout_item(), layout_item()), "two layouts for `w`"),
        (file_bytes(stage_item(), stage_item(1), layout_item()), "name the stages 0, 1; 1 of its tensors name none"),
        (file_bytes(stage_item(), stage_item(1), layout_item(b"0-w")), "lack some\n  stage 1"),
        (
            file_bytes(stage_item(), layout_item(), layout_item(b"v", layout_bytes(dev=dims(2, 4)))),
            "different numbers of devices for stage 0\n  4: `w` and perhaps others\n  8: `v`",
        ),
        (file_bytes(stage_item(2), layout_item()), "lacks 2 of 3 stages\n  stage 0\n  stage 1"),
        (file_bytes(stage_item(2), layout_item(b"0-w"), layout_item(b"2-w")), "lacks 1 of 3 stages\n  stage 1"),
        (
            file_bytes(layout_item(b"0-w"), layout_item(b"1-w", layout_bytes(dev=dims(2, 4)))),
            "have different numbers of devices\n  stage 0: 4\n  stage 1: 8",
        ),
    ],
    ids=said,
)  # fmt: skip
def test_contradictions_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        read(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (json_bytes(w={"tensor_shape": [8]}), CoverageError, r"shape \[8\] for `w`, and a map of 2 axes"),
        (json_bytes(w={"tensor_shape": [7, 4]}), CoverageError, r"does not fit its shape(.|\n)*\[7, 4\]"),
        (json_bytes(w={"tensor_map": [[0], [-1]]}), CorruptError, "is no whole number"),
        (json_bytes(w={"tensor_map": 0}), CorruptError, "is no list"),
        (json_bytes(w={"dev_matrix": [True]}), CorruptError, "is no whole number"),
        (json_bytes(w={"tensor_map": [0, 2]}), CoverageError, "impossible layout"),
        (json_bytes(w={"opt_weight_shard_step": 1.5}), CorruptError, "is no whole number"),
        (json_bytes(w={"stride": 1}), CorruptError, "unknown keys `stride`"),
        (json_bytes(stage=-1, w={}), CorruptError, "has the stage -1"),
        (json_bytes().replace(b"}}", b"}"), CorruptError, "not valid JSON"),
        (b'{"current_stage": 2, "parallel_layout_item": {"w": 3}}', CorruptError, "`w` is no object"),
        (b'{"current_stage": 2, "parallel_layout_item": {}}', CoverageError, "layout of no tensor"),
        (b'{"current_stage": 2, "more": {}}', CorruptError, "unknown keys `more`"),
        (b'{"current_stage": 2, "parallel_layout_item": {"w": 1, "w": 2}}', CorruptError, "two different values"),
        (b'{"current_stage": 2, "parallel_layout_item": ' + b"[" * 100_000, CorruptError, "not valid JSON"),
    ],
    ids=said,
)  # fmt: skip
def test_json_that_lies_is_refused(tmp_path: Path, data: bytes, error: type[CkptkitError], message: str) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, data)


def test_a_file_of_absurd_size_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (file_bytes(stage_item(), layout_item()), json_bytes(w={})):
        monkeypatch.setattr("ckptkit.formats.mindspore_strategy_protobuf.MOST_BYTES", len(data))
        monkeypatch.setattr("ckptkit.formats.mindspore_strategy_json.MOST_BYTES", len(data))
        assert len(read(tmp_path, data)) == 1
        monkeypatch.setattr("ckptkit.formats.mindspore_strategy_protobuf.MOST_BYTES", len(data) - 1)
        monkeypatch.setattr("ckptkit.formats.mindspore_strategy_json.MOST_BYTES", len(data) - 1)
        with pytest.raises(CorruptError, match=f"has {len(data)} bytes"):
            read(tmp_path, data)


def test_weights_are_no_strategy_files(tmp_path: Path) -> None:
    others = [GOLDEN / "dp2mp2" / "full.ckpt", *GOLDEN.parent.glob("safetensors/*"), *GOLDEN.parent.glob("*/*.bin")]
    others += [GOLDEN.parent / "expected.json", *GOLDEN.parent.glob("ckpt/*"), GOLDEN / "README.md"]
    assert len(others) >= 12
    for file in others:
        assert not is_strategy_file(file)
        with pytest.raises(UsageError, match="is not a strategy file of MindSpore"):
            read_strategies(file)
    assert not is_strategy_file(GOLDEN)
    assert not is_strategy_file(tmp_path / "nothing")
    with pytest.raises(UsageError, match="no such file"):
        read_strategies(tmp_path / "nothing")


@pytest.mark.parametrize("size", [0x1208, 0x120108, 0x1A7F08, 0x128108, 0x0A120108])
def test_the_size_at_the_head_of_a_safetensors_file_is_not_taken_for_a_strategy(tmp_path: Path, size: int) -> None:
    file = tmp_path / "x"
    file.write_bytes(size.to_bytes(8, "little") + b'{"' + bytes(500))
    assert not is_strategy_file(file)


def test_the_shortest_heads_of_strategy_files_are_known(tmp_path: Path) -> None:
    whole = file_bytes(stage_item(), layout_item())
    for size in range(2, len(whole)):
        (tmp_path / "x").write_bytes(whole[:size])
        assert is_strategy_file(tmp_path / "x")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("source", ["layout", "dp2mp2_opt", "merged"])
@pytest.mark.parametrize("form", ["ckpt", "json"])
def test_a_damaged_file_gives_strategies_or_an_error_of_ours(tmp_path: Path, form: str, source: str, seed: int) -> None:
    data = b""
    if source == "merged":
        parts = read_strategies(GOLDEN / "pp2dp2mp2")
        data = dump_merged(parts) if form == "ckpt" else dump_json(parts[0])
    else:
        data = (GOLDEN / source / f"strategy_stage0.{form}").read_bytes()
    refused = 0
    for mutant in mutations(data, seed, 150):
        try:
            for strategy in read(tmp_path, mutant):
                dump_strategy(strategy)
        except CkptkitError:
            refused += 1
    assert refused > 50


def test_a_file_cut_anywhere_is_refused_or_ends_between_two_tensors(tmp_path: Path) -> None:
    data = (GOLDEN / "layout" / "strategy_stage0.ckpt").read_bytes()
    read_sizes = []
    for size in range(len(data)):
        try:
            read(tmp_path, data[:size])
            read_sizes.append(size)
        except CkptkitError:
            continue
    assert len(read_sizes) == 10  # of 11 tensors
    assert all(data[size] == 0x1A for size in read_sizes)
