"""The contract: 0 only when every byte of every tensor was found equal; whatever differs is named, never an error."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import CoverageError, UsageError, convert, diff, open_checkpoint
from ckptkit.cli import run
from ckptkit.formats.io import read_region
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables
from ckptkit.report import Report
from tests.mapping.tiny_configs import tiny_config
from tests.tiny_models import TinyModel, config_of, make_hf_plain, tensors_of, write_safetensors

VARIANTS = ["", "qkv_concat", "qkv_concat-1.4"]
Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def changed(source: Path, to: Path, change: Any) -> Path:
    """Copy a one-file HF folder to `to`, with `change` made to its tensors."""
    shutil.copytree(source, to)
    model = next(
        m for m in (TinyModel(**s) for s in SHAPES) if config_of(m) == json.loads((to / "config.json").read_text())
    )
    tensors = tensors_of(model)
    change(tensors)
    write_safetensors(to / "model.safetensors", tensors, model.dtype)
    return to


SHAPES: list[dict[str, Any]] = [{}, {"bias": True}, {"dtype": "BF16"}, {"tied": True}]


def flip(name: str, *, bit: int = 0, element: int = 5) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name].reshape(-1)[element] ^= tensors[name].dtype.type(1 << bit)

    return change


def rows_of(report: Report, label: str) -> str:
    return "\n".join(text for name, text in report.rows if name == label)


def names_of(report: Report) -> set[str]:
    return {row["name"] for row in report.data["different"]}


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_conversion_is_equal_to_its_source_both_ways(
    tmp_path: Path, shape: dict[str, Any], variant: str, format: str
) -> None:
    source = make_hf_plain(tmp_path / "hf", **shape)
    convert(source, tmp_path / "ms", variant=variant or None, format=format)
    for a, b in ((source, tmp_path / "ms"), (tmp_path / "ms", source)):
        report = diff(a, b)
        assert report.exit_code == 0, report.to_text()
        assert report.data["equal"] == len(open_checkpoint(b).tensors)
        assert not report.data["benign"]


@pytest.mark.parametrize("family", load_tables().families())
def test_every_shipped_table_is_compared_through(tmp_path: Path, family: str) -> None:
    tables = load_tables()
    config = tiny_config(tables.family(family))
    rng, source, other = np.random.default_rng(0), tmp_path / "hf", tmp_path / "other"
    rules = resolve(tables.family(family), config, "hf").rules
    tensors = {rule.target: rng.integers(0, 1 << 16, rule.expr.shape, dtype=np.uint16) for rule in rules}
    for folder in (source, other):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", tensors, "F16")
        tensors[rules[-2].target] = tensors[rules[-2].target] ^ np.uint16(1)
    for dialect in ("hf", *tables.dialects(family)):
        for variant in ("", *tables.variants(family, dialect)):
            made = tmp_path / f"{dialect}-{variant}"
            if dialect == "hf" and not variant:
                continue
            convert(source, made, to_dialect=dialect, variant=variant or None)
            assert diff(source, made).exit_code == diff(made, source).exit_code == 0
            assert diff(other, made).exit_code == diff(made, other).exit_code == 1


def test_two_layouts_of_fused_tensors_are_compared_through_the_tables(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", bias=True)
    for variant in VARIANTS[1:]:
        convert(source, tmp_path / variant, variant=variant, format="ckpt")
    one, two = tmp_path / "qkv_concat", tmp_path / "qkv_concat-1.4"
    assert diff(one, two).exit_code == diff(one / "model.ckpt", two / "model.ckpt").exit_code == 0
    for folder in (one, two):
        (folder / "ckptkit.json").unlink()
    report = diff(one / "model.ckpt", two / "model.ckpt")  # without manifests, by their names, they differ
    assert report.exit_code == 1
    assert names_of(report) == {n for n in open_checkpoint(two).tensors if "w_qkv" in n or "w_gate_hidden" in n}
    assert (
        diff(one / "model.ckpt", two / "model.ckpt", variant_a="qkv_concat", variant_b="qkv_concat-1.4").exit_code == 0
    )
    assert diff(one / "model.ckpt", two / "model.ckpt", variant_a="qkv_concat", variant_b="qkv_concat").exit_code == 1


def test_a_layout_that_nothing_tells_is_asked_for(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", variant="qkv_concat", format="ckpt")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    with pytest.raises(UsageError, match="fit 2 layouts") as error:
        diff(source, tmp_path / "ms" / "model.ckpt")
    assert "--variant-b" in error.value.hint
    assert diff(source, tmp_path / "ms" / "model.ckpt", variant_b="qkv_concat").exit_code == 0
    assert diff(source, tmp_path / "ms" / "model.ckpt", variant_b="qkv_concat-1.4").exit_code == 1


def test_one_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    for bit in (0, 9, 22, 23, 30, 31):
        report = diff(source, changed(source, tmp_path / f"other{bit}", flip(K, bit=bit)))
        assert report.exit_code == 1
        assert names_of(report) == {K}
        (row,) = report.data["different"]
        assert (row["changed"], row["first"]) == (1, [0, 5])


def test_one_flipped_bit_in_any_tensor_is_found_through_a_conversion(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", bias=True)
    convert(source, tmp_path / "ms", variant="qkv_concat")
    names = [n for n in tensors_of(TinyModel(bias=True)) if ".layers.0." not in n]
    for number, name in enumerate(names):
        other = changed(source, tmp_path / f"other{number}", flip(name))
        report = diff(other, tmp_path / "ms")
        assert report.exit_code == 1
        (row,) = report.data["different"]
        assert name in row["of"]
        report = diff(tmp_path / "ms", other)
        assert report.exit_code == 1
        assert names_of(report) == {name}


def test_two_swapped_rows_are_found_and_named(tmp_path: Path) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        tensors[Q][[2, 3]] = tensors[Q][[3, 2]]

    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", format="ckpt")
    other = changed(source, tmp_path / "other", swap)
    report = diff(other, tmp_path / "ms")
    assert report.exit_code == 1
    assert names_of(report) == {"model.layers.1.attention.wq.weight"}
    assert report.data["different"][0]["first"] == [2, 0]


def test_a_missing_bias_is_a_difference_on_either_side(tmp_path: Path) -> None:
    bias = "model.layers.0.self_attn.k_proj.bias"
    source = make_hf_plain(tmp_path / "hf", bias=True)
    other = changed(source, tmp_path / "other", lambda tensors: tensors.pop(bias))
    for variant in VARIANTS:
        convert(source, tmp_path / f"ms{variant}", variant=variant or None)
    for a, b, kind in ((source, other, "only_in_a"), (other, source, "only_in_b")):
        report = diff(a, b)
        assert report.exit_code == 1
        assert [(f["kind"], f["name"]) for f in report.data["findings"]] == [(kind, bias)]
    report = diff(other, tmp_path / "ms")
    assert report.exit_code == 1
    (finding,) = report.data["findings"]
    assert finding["name"] == "model.layers.0.attention.wk.bias" and bias in finding["text"]
    report = diff(tmp_path / "ms", other)
    (finding,) = report.data["findings"]
    assert finding["name"] == "model.layers.0.attention.wk.bias" and bias in finding["text"]
    report = diff(other, tmp_path / "msqkv_concat")
    assert report.exit_code == 1
    (finding,) = report.data["findings"]
    assert finding["name"] == "model.layers.0.attention.w_qkv.bias" and bias in finding["text"]


def test_biases_that_config_json_denies_are_still_seen(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    name = "model.layers.0.self_attn.k_proj.bias"
    other = changed(source, tmp_path / "other", lambda tensors: tensors.update({name: np.ones(16, np.uint32)}))
    convert(source, tmp_path / "ms")
    for a, b in ((source, other), (other, source), (other, tmp_path / "ms"), (tmp_path / "ms", other)):
        report = diff(a, b)
        assert report.exit_code == 1
        assert [f["name"] for f in report.data["findings"]] == [name]


def test_another_shape_is_a_difference(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors[Q] = tensors[Q][:-8].copy()

    source = make_hf_plain(tmp_path / "hf")
    other = changed(source, tmp_path / "other", cut)
    convert(source, tmp_path / "ms", variant="qkv_concat")
    for a, b in ((source, other), (other, source), (tmp_path / "ms", other), (other, tmp_path / "ms")):
        report = diff(a, b)
        assert report.exit_code == 1
        assert [(f["kind"], f["name"]) for f in report.data["findings"]] == [("shape", Q)]
        assert not report.data["different"]


def test_another_size_of_model_is_a_difference_in_every_way(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    longer = make_hf_plain(tmp_path / "longer", layers=3)
    convert(longer, tmp_path / "ms")
    report = diff(source, tmp_path / "ms")
    assert report.exit_code == 1
    assert {f["kind"] for f in report.data["findings"]} == {"only_in_b"}
    assert all(".layers.2." in f["name"] for f in report.data["findings"])


def test_a_cast_is_a_difference_that_is_told_in_full(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "bf16", to_dialect="mindformers", dtype="bf16", variant="qkv_concat")
    report = diff(source, tmp_path / "bf16")
    assert report.exit_code == 1
    assert {row["rounded"] for row in report.data["different"]} == {True}
    assert "all x 15: F32 in A, BF16 in B; B is exactly A rounded" in rows_of(report, "dtype")
    assert all(0 < row["max_relative"] <= 2**-8 for row in report.data["different"])  # half a step of 8 bits
    changed = sum(row["changed"] for row in report.data["different"])
    figures = [f"{max(row[key] for row in report.data['different']):.3g}" for key in ("max_abs", "max_relative")]
    last = f"{changed} elements changed, max |a - b| {figures[0]}, relative {figures[1]}"
    assert rows_of(report, "dtype").splitlines()[1:] == [f"  {last}"]
    assert not rows_of(report, "values") and not rows_of(report, "others")
    back = diff(tmp_path / "bf16", source)
    assert {row["rounded"] for row in back.data["different"]} == {False}
    assert all("BF16 in A, F32 in B; " in text for label, text in back.rows if label == "values")


def test_each_tensor_that_differs_is_named_once(tmp_path: Path) -> None:
    """Some were cast as a cast does it, one was not, one overflowed, and one has other values in the same dtype."""
    source = make_hf_plain(tmp_path / "hf")
    tensors = tensors_of(TinyModel())
    tensors[EMBEDDING].view(np.float32)[0, 0] = 1e6
    write_safetensors(source / "model.safetensors", tensors, "F32")
    convert(source, tmp_path / "half", to_dialect="hf", dtype="fp16", clamp=True)
    half = {name: read_region(info) for name, info in open_checkpoint(tmp_path / "half").tensors.items()}
    half[EMBEDDING].view(np.float16)[0, 0] = np.inf
    half[K][0, 0] ^= 1
    (tmp_path / "mixed").mkdir()
    write_safetensors(tmp_path / "mixed" / "half.safetensors", {n: a for n, a in half.items() if n != Q}, "F16")
    write_safetensors(tmp_path / "mixed" / "full.safetensors", {Q: tensors[Q] ^ np.uint32(1)}, "F32")
    report = diff(source, tmp_path / "mixed")
    shown = [text for label, text in report.rows if label in ("dtype", "values", "others")]
    patterns = [pattern.split(" x ")[0] for pattern in (text.partition(":")[0] for text in shown if text[0] != " ")]
    for row in report.data["different"]:
        name = row["name"]
        assert sum(name in expanded(pattern) for pattern in patterns) == 1, name
    values = {text.partition(":")[0]: text for label, text in report.rows if label == "values"}
    assert values.keys() == {EMBEDDING, Q, K}
    assert "0 inf in A, 1 in B" in values[EMBEDDING]
    assert values[K].startswith(f"{K}: F32 in A, F16 in B; ") and "rounded" not in values[K]
    assert "F32 in A" not in values[Q]


def expanded(pattern: str) -> set[str]:
    """Return the names that a folded one stands for."""
    found = re.search(r"\{([^}]*)\}", pattern)
    if found is None:
        return {pattern}
    first, _, last = found[1].partition("..")
    numbers = range(int(first), int(last) + 1) if last else map(int, first.split(","))
    parts = (f"{pattern[: found.start()]}{number}{pattern[found.end() :]}" for number in numbers)
    return {name for part in parts for name in expanded(part)}


def test_a_cast_that_rounds_another_way_is_seen(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "bf16", to_dialect="hf", dtype="bf16")
    file = tmp_path / "bf16" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    rows = {row["name"]: row["rounded"] for row in diff(source, file).data["different"]}
    assert [name for name, rounded in rows.items() if not rounded] == [HEAD]


def test_a_wider_dtype_with_equal_values_is_still_a_difference(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", dtype="BF16")
    convert(source, tmp_path / "f32", to_dialect="hf", dtype="fp32")
    report = diff(source, tmp_path / "f32")
    assert report.exit_code == 1
    assert not rows_of(report, "values")
    assert rows_of(report, "dtype") == "all x 21: BF16 in A, F32 in B; the values are equal"


def test_figures_are_right(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        values = tensors[Q].view(np.float32)
        values[0, 0], values[3, 4], values[3, 5] = values[0, 0] + 0.5, np.nan, np.inf

    source = make_hf_plain(tmp_path / "hf")
    before = tensors_of(TinyModel())[Q].view(np.float32).astype(np.float64)
    (row,) = diff(source, changed(source, tmp_path / "other", change)).data["different"]
    gap = float(np.float32(before[0, 0]) + np.float32(0.5)) - before[0, 0]
    assert row["max_abs"] == gap
    assert row["max_relative"] == gap / np.abs(before).max()
    assert (row["nan"], row["inf"], row["changed"], row["first"]) == ([0, 1], [0, 1], 3, [0, 0])


def test_the_worst_tensors_come_first_and_only_ten(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        for number, array in enumerate(tensors.values()):
            array.view(np.float32).reshape(-1)[0] += np.float32(10.0 + number)

    source = make_hf_plain(tmp_path / "hf")
    report = diff(source, changed(source, tmp_path / "other", change))
    relatives = [row["max_relative"] for row in report.data["different"]]
    assert len(relatives) == 21 and relatives == sorted(relatives, reverse=True)
    named = [text.partition(":")[0] for label, text in report.rows if label == "values"]
    assert named == [row["name"] for row in report.data["different"][:10]]
    others = rows_of(report, "others")
    assert not any(name in others for name in named)
    assert sum(int(count or 1) for count in re.findall(r"^\S+(?: x (\d+))?$", others, re.MULTILINE)) == 11


def test_a_head_that_is_its_tied_embedding_is_no_difference(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", tied=True)
    both = changed(source, tmp_path / "both", lambda t: t.update({HEAD: t[EMBEDDING].copy()}))
    convert(source, tmp_path / "ms", format="ckpt")
    for a, b in ((source, both), (both, source), (both, tmp_path / "ms"), (tmp_path / "ms", both)):
        report = diff(a, b)
        assert report.exit_code == 0, report.to_text()
        assert [name for name, _ in report.data["benign"]] == [HEAD]
        assert HEAD in rows_of(report, "no difference")


def test_a_head_alone_stands_for_its_tied_embedding(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        tensors[HEAD] = tensors.pop(EMBEDDING)

    source = make_hf_plain(tmp_path / "hf", tied=True)
    other = changed(source, tmp_path / "other", rename)
    assert diff(source, other).exit_code == diff(other, source).exit_code == 0
    shutil.copytree(other, tmp_path / "wrong")
    file = tmp_path / "wrong" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    assert diff(source, tmp_path / "wrong").exit_code == 1


def test_a_head_that_is_not_its_embedding_or_not_tied_is_missing(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", tied=True)
    other = changed(source, tmp_path / "other", lambda t: t.update({HEAD: t[EMBEDDING] ^ np.uint32(1)}))
    assert diff(source, other).exit_code == diff(other, source).exit_code == 1
    untied = make_hf_plain(tmp_path / "untied")
    both = changed(untied, tmp_path / "both", lambda t: t.update({HEAD: t[EMBEDDING].copy()}))
    lacking = changed(untied, tmp_path / "lacking", lambda t: t.pop(HEAD))
    report = diff(both, lacking)
    assert report.exit_code == 1
    assert [f["name"] for f in report.data["findings"]] == [HEAD]


def test_a_buffer_that_the_table_ignores_is_named_and_no_difference(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = make_hf_plain(tmp_path / "hf")
    other = changed(source, tmp_path / "other", lambda t: t.update({name: np.ones(4, np.uint32)}))
    convert(source, tmp_path / "ms")
    for a, b in ((source, other), (other, source), (other, tmp_path / "ms"), (tmp_path / "ms", other)):
        report = diff(a, b)
        assert report.exit_code == 0
        assert [fate for fate, _ in report.data["benign"]] == [name]
    wrong = changed(source, tmp_path / "wrong", lambda t: t.update({name: np.zeros(4, np.uint32)}))
    assert names_of(diff(other, wrong)) == {name}


def test_files_without_a_config_are_compared_by_name(tmp_path: Path) -> None:
    for folder, seed in (("one", 0), ("two", 1)):
        (tmp_path / folder).mkdir()
        arrays = {"w": np.arange(12, dtype=np.uint32).reshape(3, 4) + seed, "same": np.ones(3, np.uint32)}
        write_safetensors(tmp_path / folder / "model.safetensors", arrays, "F32")
    report = diff(tmp_path / "one", tmp_path / "two")
    assert report.exit_code == 1 and names_of(report) == {"w"}
    assert "no config.json" in rows_of(report, "compared")
    assert diff(tmp_path / "one", tmp_path / "one" / "model.safetensors").exit_code == 0


def test_an_unknown_family_is_compared_by_name(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text()) | {"model_type": "novel", "architectures": ["Novel"]}
    (source / "config.json").write_text(json.dumps(config))
    assert diff(source, source).exit_code == 0
    assert '"novel"' in rows_of(diff(source, source), "compared")


def test_a_file_that_a_wrapper_named_is_compared_without_its_prefix(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    tensors = {f"module.{name}": array for name, array in tensors_of(TinyModel()).items()}
    (tmp_path / "wrapped").mkdir()
    write_safetensors(tmp_path / "wrapped" / "model.safetensors", tensors, "F32")
    assert diff(source, tmp_path / "wrapped").exit_code == 0
    tensors["stray"] = tensors.pop(f"module.{Q}")
    write_safetensors(tmp_path / "wrapped" / "model.safetensors", tensors, "F32")
    assert diff(source, tmp_path / "wrapped").exit_code == 1


def test_two_fused_parts_of_different_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", dtype="BF16")
    convert(source, tmp_path / "ms", variant="qkv_concat")
    convert(source, tmp_path / "mixed", to_dialect="hf", dtype="fp32")
    file = tmp_path / "mixed" / "model.safetensors"
    narrow = tensors_of(TinyModel(dtype="BF16"))
    extra = tmp_path / "mixed" / "part.safetensors"
    write_safetensors(extra, {Q: narrow[Q]}, "BF16")
    wide = {n: (a.astype(np.uint32) << 16) for n, a in narrow.items() if n != Q}
    write_safetensors(file, wide, "F32")
    weight_map = dict.fromkeys(wide, file.name) | {Q: extra.name}
    (tmp_path / "mixed" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (tmp_path / "mixed" / "ckptkit.json").unlink()
    report = diff(tmp_path / "mixed", tmp_path / "ms")
    rows = {row["name"]: row for row in report.data["different"]}
    assert rows["model.layers.1.attention.w_qkv.weight"]["dtypes"] == ["F32", "BF16"]
    assert {row["changed"] for row in rows.values()} == {0}


def test_the_command_line_prints_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms")
    assert run(["diff", str(source), str(tmp_path / "ms")]) == 0
    assert "hold the same" in capsys.readouterr().out
    other = changed(source, tmp_path / "other", flip(Q))
    assert run(["diff", str(other), str(tmp_path / "ms"), "--json", "--no-progress"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["ok"] and [row["of"] for row in data["different"]] == [[Q]]
    assert run(["diff", str(source), str(tmp_path / "nothing")]) == 2
    assert re.search("no such file or folder", capsys.readouterr().err)


def test_a_head_alone_is_compared_with_an_embedding_alone(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", tied=True)
    tensors = tensors_of(TinyModel(tied=True))
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_safetensors(source / "model.safetensors", tensors, "F32")
    convert(source, tmp_path / "ms")
    report = diff(source, tmp_path / "ms")
    assert report.exit_code == 0
    assert "is compared with its tied twin" in rows_of(report, "note")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] ^ 1
    write_safetensors(source / "model.safetensors", tensors, "F32")
    assert diff(source, tmp_path / "ms").exit_code == 1


def test_a_side_that_was_fused_with_other_sizes_gets_no_verdict(tmp_path: Path) -> None:
    """Its shapes fit, but its rows lie in another order: equal bytes would not be equal weights."""
    source = make_hf_plain(tmp_path / "hf", heads=4, kv_heads=2)
    config = json.loads((source / "config.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config | {"num_attention_heads": 8, "num_key_value_heads": 4}))
    convert(source, tmp_path / "eight", config=other, variant="qkv_concat")
    convert(source, tmp_path / "four", variant="qkv_concat")
    assert diff(source, tmp_path / "four").exit_code == diff(tmp_path / "four", source).exit_code == 0
    assert diff(tmp_path / "eight", source).exit_code == 0
    for a, b in ((source, "eight"), (tmp_path / "four", "eight"), (tmp_path / "eight", "four")):
        with pytest.raises(CoverageError, match="was not made with this config.json"):
            diff(a, tmp_path / b)
