"""The contract: docs/tables.md works as it stands, and a faulty table is refused with its file and row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import UsageError, check_tables, convert, diff, inspect, list_tables, show_table
from ckptkit.cli import run
from ckptkit.commands.tables import op_text
from ckptkit.formats.io import read_region
from ckptkit.formats.registry import open_checkpoint
from ckptkit.mapping.dims import Formula
from ckptkit.mapping.rows import OpSpec
from tests.tiny_models import make_hf_plain, write_safetensors

DOC = Path(__file__).parents[2] / "docs" / "tables.md"
CONFIG = {
    "model_type": "nova", "vocab_size": 13, "hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 3, "use_qkv_bias": True,
}  # fmt: skip


@pytest.fixture
def nova(tmp_path: Path) -> list[Path]:
    """The two files of docs/tables.md."""
    blocks = re.findall(r"^```toml\n(.*?)^```$", DOC.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    files = [tmp_path / "nova.toml", tmp_path / "nova.fused.toml"]
    for file, block in zip(files, blocks, strict=True):
        file.write_text(block)
    return files


@pytest.fixture
def model(tmp_path: Path, nova: list[Path]) -> Path:
    """A checkpoint with the tensors that the catalogue expects, and one that it ignores."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    report = show_table("nova", dialect="hf", config=folder, table=nova)
    tensors: dict[str, Any] = {"nova.blocks.0.rotary.inv_freq": np.zeros(3, np.uint32)}
    rng = np.random.default_rng(0)
    for row in report.data["rows"]:
        for layer in range(CONFIG["num_hidden_layers"]):
            name, shape = row["hf"][0].replace("{layer}", str(layer)), row["hf_shapes"][0]
            tensors[name] = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
            if row["bias"]:
                tensors[name.replace(".weight", ".bias")] = rng.integers(0, 1 << 32, shape[0], dtype=np.uint32)
    write_safetensors(folder / "model.safetensors", tensors, "F32")
    return folder


@pytest.mark.parametrize("variant", [None, "fused"])
def test_the_documented_table_converts_both_ways(
    tmp_path: Path, nova: list[Path], model: Path, variant: str | None
) -> None:
    convert(model, tmp_path / "ms", table=nova, variant=variant)
    convert(tmp_path / "ms", tmp_path / "back", table=nova)
    for folder in (tmp_path / "ms", tmp_path / "back"):
        report = diff(model, folder, table=nova)
        assert report.exit_code == 0, report.to_text()
        assert [name for name, _ in report.data["benign"]] == ["nova.blocks.0.rotary.inv_freq"]
    names = {name for name in open_checkpoint(tmp_path / "ms").tensors if ".feed_forward.w1." in name}
    assert len(names) == (0 if variant else 2)


def test_the_documented_ops_do_what_the_page_says(tmp_path: Path, nova: list[Path], model: Path) -> None:
    convert(model, tmp_path / "ms", table=nova)
    hf = {name: read_region(info) for name, info in open_checkpoint(model).tensors.items()}
    ms = {name: read_region(info) for name, info in open_checkpoint(tmp_path / "ms").tensors.items()}
    q, k, v = (hf[f"nova.blocks.1.{part}.weight"] for part in "qkv")
    groups = [np.concatenate([q[6 * g : 6 * g + 6], k[3 * g : 3 * g + 3], v[3 * g : 3 * g + 3]]) for g in range(2)]
    assert np.array_equal(ms["model.layers.1.attention.w_qkv.weight"], np.concatenate(groups))
    assert np.array_equal(ms["model.layers.1.attention.wo.weight"], hf["nova.blocks.1.out.weight"].T)


def test_the_documented_error_is_what_is_printed(
    nova: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(nova[0].parent)
    nova[0].write_text(nova[0].read_text().replace('"interleave"', '"interleaved"'))
    assert run(["tables", "check", "nova.toml"]) == 2
    assert capsys.readouterr().err.strip() in DOC.read_text()


def test_a_sound_table_is_described(nova: list[Path], model: Path) -> None:
    report = check_tables(nova, config=model)
    yours = [text for label, text in report.rows if label == "yours"]
    assert [text.partition(": ")[2] for text in yours] == [
        "catalogue of nova, 10 tensors",
        "nova in mindformers-legacy, 8 row(s)",
        "nova in mindformers-legacy, variant fused, 1 row(s)",
    ]
    assert not [text for label, text in report.rows if label == "shipped"]
    assert report.headline == f"sound tables: 2 of your own, with the {len(check_tables().data['files'])} shipped ones"
    counts = {(row["dialect"], row["variant"]): row["tensors"] for row in report.data["resolved"]}
    assert counts == {("hf", None): 24, ("mindformers-legacy", None): 16, ("mindformers-legacy", "fused"): 14}
    elements = {row["elements"] for row in report.data["resolved"]}
    assert elements == {sum(t.num_elements for n, t in open_checkpoint(model).tensors.items() if "inv_freq" not in n)}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('target = "lm_head.weight"', 'target = "lm_head.weight"\nmagic = 1', "nova.toml row 8: unknown key `magic`"),
        ('shape = ["hidden", "ffn"]', 'shape = ["hidden", "wide"]', "nova.toml row 7: unknown dim `wide`"),
        ("perm = [1, 0]", "perm = [0, 2, 1]", "nova.toml row 4: `perm` has 3 axes"),
        ('tied_to = "nova.embed.weight"', 'tied_to = "nova.emb.weight"', "nova.toml row 8: unknown tensor"),
    ],
)
def test_a_faulty_table_is_refused_with_its_file_and_row(nova: list[Path], old: str, new: str, said: str) -> None:
    text = nova[0].read_text()
    assert text.count(old) == 1
    nova[0].write_text(text.replace(old, new))
    with pytest.raises(UsageError) as error:
        check_tables(nova)
    assert said in error.value.what


def test_numbers_that_do_not_fit_are_found_with_a_config(nova: list[Path], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 3}))
    check_tables(nova)
    with pytest.raises(UsageError, match="not a multiple"):
        check_tables(nova, config=model)


def test_shipped_tables_are_listed_and_sound() -> None:
    families = {row["family"]: row for row in list_tables().data["families"]}
    assert families["llama"]["dialects"]["mindformers-legacy"].keys() == {"qkv_concat", "qkv_concat-1.4"}
    assert "llama2" in families["llama"]["aliases"]
    report = check_tables()
    checked = report.data["files"]
    assert next(text for label, text in report.rows if label == "shipped") in checked
    shipped = (DOC.parents[1] / "mappings").glob("*/*.toml")
    assert sorted(checked) == sorted(f"mappings/{p.parent.name}/{p.name}" for p in shipped)


@pytest.mark.parametrize("family", [row["family"] for row in list_tables().data["families"]])
def test_every_shipped_table_can_be_shown(family: str) -> None:
    dialects = {row["family"]: row["dialects"] for row in list_tables().data["families"]}[family]
    for dialect, variants in dialects.items():
        for variant in ("", *variants):
            report = show_table(family, dialect=dialect, variant=variant)
            shown = " ".join(text for _, text in report.rows)
            assert all(
                row["target"] in shown and all(name in shown for name in row["hf"]) for row in report.data["rows"]
            )


def test_shapes_are_numbers_with_a_config(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    rows = {row["target"]: row for row in show_table("llama", variant="qkv_concat", config=source).data["rows"]}
    row = rows["model.layers.{layer}.attention.w_qkv.weight"]
    assert (row["shape"], row["hf_shapes"]) == ([64, 32], [[32, 32], [16, 32], [16, 32]])
    assert row["ops"] == ["interleave axis 0 groups kv_heads"]


def test_an_unknown_family_or_dialect_says_what_there_is() -> None:
    with pytest.raises(UsageError, match="unknown family `lama`") as error:
        show_table("lama")
    assert "did you mean llama?" in error.value.items
    with pytest.raises(UsageError, match="no dialect `mcore`") as error:
        show_table("llama", dialect="mcore")
    assert "mindformers-legacy" in error.value.items


def test_an_op_is_told_in_words() -> None:
    rotary = OpSpec("rope-permute", 0, Formula.parse("heads"), to="pairs", start=Formula.parse("rope_dim"))
    assert op_text(rotary) == "rope-permute axis 0 blocks heads to pairs start rope_dim"
    assert op_text(OpSpec("stack", 1, over="expert")) == "stack over expert axis 1"


@pytest.mark.parametrize("arguments", [["list"], ["check"], ["show", "llama"]])
def test_tables_without_a_config_do_without_numpy(arguments: list[str]) -> None:
    code = "import sys\nfrom ckptkit.cli import run\nrun(['tables', *sys.argv[1:]])\nassert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)


def test_the_command_line_takes_defaults_for_a_command_in_a_group(
    nova: list[Path], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    Path("ckptkit.toml").write_text('[tables.show]\nfamily = "nova"\ntable = ["nova.toml"]\n')
    assert run(["tables", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "nova"
    Path("ckptkit.toml").write_text('[tables.show]\nfamliy = "nova"\n')
    assert run(["tables", "show", "nova"]) == 2
    assert "`ckptkit tables show` does not know" in capsys.readouterr().err


def test_inspect_knows_a_family_of_ones_own(nova: list[Path], model: Path) -> None:
    assert "nova" in inspect(model, table=nova).to_text()
