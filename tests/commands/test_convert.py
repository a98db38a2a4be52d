"""The contract: HF -> MindSpore -> HF gives the same bytes back, and nothing that is not converted goes unsaid."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from ckptkit import CorruptError, CoverageError, UsageError, convert, open_checkpoint
from ckptkit.cli import run
from ckptkit.formats.io import read_region
from ckptkit.mapping.rules import resolve
from ckptkit.mapping.tables import load_tables
from ckptkit.report import Report
from tests.mapping.tiny_configs import numbered_tensors, tiny_config
from tests.tiny_models import TinyModel, config_of, make_hf_plain, tensors_of, write_safetensors

MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one KV head, tied": {"kv_heads": 1, "tied": True},
    "all heads, three shards": {"kv_heads": 4, "shards": 3},
    "biases": {"bias": True},
    "head_dim apart": {"head_dim": 12},
    "twelve layers, four shards": {"layers": 12, "shards": 4},
    "bfloat16": {"dtype": "BF16"},
}
VARIANTS = ["", "qkv_concat", "qkv_concat-1.4"]


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return every tensor of a checkpoint as (dtype, shape, bytes)."""
    tensors = open_checkpoint(folder).tensors
    return {name: (info.dtype, info.shape, read_region(info).tobytes()) for name, info in tensors.items()}


def row(report: Report, label: str) -> str:
    return "\n".join(text for name, text in report.rows if name == label)


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_round_trip_gives_the_same_bytes(tmp_path: Path, model: dict[str, Any], variant: str, format: str) -> None:
    source = make_hf_plain(tmp_path / "hf", **model)
    convert(source, tmp_path / "ms", variant=variant or None, format=format)
    assert contents(tmp_path / "ms") != contents(source)
    convert(tmp_path / "ms", tmp_path / "back", max_shard_size="40kB")
    assert contents(tmp_path / "back") == contents(source)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("first", VARIANTS)
@pytest.mark.parametrize("second", VARIANTS)
def test_one_variant_becomes_another_as_if_made_from_hf(tmp_path: Path, first: str, second: str) -> None:
    source = make_hf_plain(tmp_path / "hf", bias=True)
    convert(source, tmp_path / "one", variant=first or None)
    convert(tmp_path / "one", tmp_path / "two", to_dialect="mindformers", variant=second or None)
    convert(source, tmp_path / "direct", variant=second or None)
    assert contents(tmp_path / "two") == contents(tmp_path / "direct")


def test_hf_is_written_in_shards_with_an_index(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    report = convert(source, tmp_path / "out", to_dialect="hf", max_shard_size="20kB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > 2
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in contents(source).values())
    assert contents(tmp_path / "out") == contents(source)
    assert report.data["summary"]["read_amplification"] == 1.0


def test_side_files_travel_and_others_do_not(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    for name in ("tokenizer.json", "generation_config.json", "modeling_x.py", "training_args.bin", "optimizer.pt"):
        (source / name).write_bytes(b"{}")
    convert(source, tmp_path / "ms")
    convert(tmp_path / "ms", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json", "modeling_x.py"} < names
    assert not names & {"training_args.bin", "optimizer.pt", "param_name_map.json"}


def test_a_dry_run_writes_nothing_and_prints_the_plan(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    report = convert(source, tmp_path / "ms", dry_run=True, plan_file=tmp_path / "plan.json")
    assert not (tmp_path / "ms").exists()
    assert "would convert" in report.headline
    assert "amplification 1.00" in row(report, "cost")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert len(plan["outputs"]) == len(contents(source))
    assert plan["summary"]["peak_memory_bytes"] == (64 << 20) + 4096 * plan["summary"]["slices"]


def test_a_differing_head_unties_the_config(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    report = convert(source, tmp_path / "ms")
    assert "they differ" in row(report, "note")
    assert json.loads((tmp_path / "ms" / "config.json").read_text())["tie_word_embeddings"] is False
    convert(tmp_path / "ms", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def rewrite(folder: Path, change: Any, **model: Any) -> None:
    """Write the model again after `change` has edited its tensors."""
    tensors = tensors_of(TinyModel(**model))
    change(tensors)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_safetensors(folder / "model.safetensors", tensors, "F32")


def test_an_equal_head_of_a_tied_model_is_one_copy(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", tied=True)
    wanted = contents(source)
    rewrite(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), tied=True)
    report = convert(source, tmp_path / "ms")
    assert "bit-equal to its tied twin" in row(report, "note")
    assert report.data["dropped"][0][0] == "lm_head.weight"
    convert(tmp_path / "ms", tmp_path / "back")
    assert contents(tmp_path / "back") == wanted


def test_a_stored_head_alone_is_the_embedding_of_a_tied_model(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", tied=True)
    wanted = contents(source)
    rewrite(source, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}), tied=True)
    convert(source, tmp_path / "ms")
    convert(tmp_path / "ms", tmp_path / "back")
    assert contents(tmp_path / "back") == wanted


def test_a_missing_head_is_named_and_can_be_tied_on_purpose(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    rewrite(source, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CoverageError, match="1 tensor is missing") as caught:
        convert(source, tmp_path / "ms")
    assert caught.value.items == ("lm_head.weight",)
    assert "--tie-embeddings" in caught.value.hint
    assert list(tmp_path.iterdir()) == [source]
    convert(source, tmp_path / "ms", tie_embeddings=True)
    assert json.loads((tmp_path / "ms" / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_unmapped_tensor_is_refused_or_reported(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    rewrite(source, lambda t: t.update({"model.extra.weight": t["model.norm.weight"]}))
    with pytest.raises(CoverageError, match="matches no row of `mappings/hf/llama.toml`"):
        convert(source, tmp_path / "ms")
    report = convert(source, tmp_path / "ms", allow_unmapped=True)
    assert row(report, "unmapped") == "model.extra.weight: matches no row of the table"


def test_buffers_are_ignored_in_one_line(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", layers=3)
    names = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(3)]
    rewrite(source, lambda t: t.update(dict.fromkeys(names, t["model.norm.weight"])), layers=3)
    report = convert(source, tmp_path / "ms")
    assert row(report, "ignored").startswith("3 x model.layers.{0..2}.self_attn.rotary_emb.inv_freq: buffer")


def test_a_shape_that_contradicts_config_json_is_refused(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    config = config_of(TinyModel()) | {"vocab_size": 7}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoverageError, match="another shape than config.json"):
        convert(source, tmp_path / "ms")


def test_a_wrapper_prefix_is_taken_off_and_said(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    wanted = contents(source)

    def wrap(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"_orig_mod.module.{name}"] = tensors.pop(name)

    rewrite(source, wrap)
    report = convert(source, tmp_path / "back", to_dialect="hf")
    assert "`_orig_mod.module.` was taken off" in row(report, "note")
    assert contents(tmp_path / "back") == wanted


def test_a_foreign_fused_checkpoint_needs_its_variant_named(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", variant="qkv_concat")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    with pytest.raises(UsageError, match="fit 2 layouts") as caught:
        convert(tmp_path / "ms", tmp_path / "back")
    assert "--from-variant" in caught.value.hint
    convert(tmp_path / "ms", tmp_path / "back", from_variant="qkv_concat")
    assert contents(tmp_path / "back") == contents(source)


def test_a_foreign_checkpoint_file_takes_its_config_from_elsewhere(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", format="ckpt")
    lone = tmp_path / "llama.ckpt"
    lone.write_bytes((tmp_path / "ms" / "model.ckpt").read_bytes())
    with pytest.raises(UsageError, match="no config.json"):
        convert(lone, tmp_path / "back")
    convert(lone, tmp_path / "back", config=source)
    assert contents(tmp_path / "back") == contents(source)


def test_the_manifest_says_what_the_result_is(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", variant="qkv_concat")
    manifest = json.loads((tmp_path / "ms" / "ckptkit.json").read_text())
    assert (manifest["to"]["dialect"], manifest["to"]["variant"]) == ("mindformers-legacy", "qkv_concat")
    assert manifest["tensors"].keys() == contents(tmp_path / "ms").keys()
    assert all(len(entry["xxh3_128"]) == 32 for entry in manifest["tensors"].values())
    assert manifest["source"]["files"][0]["name"] == "model.safetensors"
    assert str(tmp_path) not in (tmp_path / "ms" / "ckptkit.json").read_text()


def test_no_digest_leaves_them_out(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", digests=False)
    manifest = json.loads((tmp_path / "ms" / "ckptkit.json").read_text())
    assert {entry["xxh3_128"] for entry in manifest["tensors"].values()} == {None}


@pytest.mark.parametrize("name", ["llama2", "codellama", "yi", "vicuna", "llama"])
def test_a_family_is_found_by_its_aliases(tmp_path: Path, name: str) -> None:
    source = make_hf_plain(tmp_path / "hf")
    assert f"(`--model {name}`)" in row(convert(source, tmp_path / "ms", model=name, dry_run=True), "family")


def test_a_settings_file_supplies_every_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_hf_plain(tmp_path / "hf")
    (tmp_path / "ckptkit.toml").write_text('[convert]\nsrc = "hf"\ndst = "ms"\nformat = "ckpt"\n')
    monkeypatch.chdir(tmp_path)
    assert run(["convert", "--model", "llama2"]) == 0
    assert (tmp_path / "ms" / "model.ckpt").is_file()
    (tmp_path / "ckptkit.toml").write_text('[convert]\nsource = "hf"\n')
    assert run(["convert"]) == 2
    assert "source" in capsys.readouterr().err


def run_with_defaults(capsys: pytest.CaptureFixture[str], defaults: str, *arguments: str) -> tuple[int, str]:
    """Run `convert` with defaults in the working folder; return the exit code and what was printed."""
    Path("ckptkit.toml").write_text(f"[convert]\n{defaults}\n")
    capsys.readouterr()
    code = run(["convert", *arguments])
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("defaults", "options", "what"),
    [
        ('format = "ckpt"', ["--to", "hf"], "`format` {}HuggingFace weights are not stored as .ckpt"),
        ('max-shard-size = "2GB"', ["--format", "ckpt"], "`max-shard-size` {}`--max-shard-size` does nothing"),
        ("clamp = true", [], "`clamp` {}`--clamp` does nothing without `--dtype`"),
        ('variant = "qkv_concat"', ["--to", "hf"], "`variant` {}`hf` of the llama family has no variant"),
        ('from-variant = "qkv_concat"', [], "`from-variant` {}`hf` of the llama family has no variant"),
    ],
)
def test_an_option_without_effect_is_refused_when_it_is_typed_and_passed_over_when_it_is_a_default(
    tmp_path: Path, defaults: str, options: list[str], what: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make_hf_plain(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    key, _, value = defaults.partition(" = ")
    typed = [f"--{key}", *([] if value == "true" else [value.strip('"')])]
    code, said = run_with_defaults(capsys, "", "hf", "one", *options, *typed)
    assert code == 2
    assert what.partition("{}")[2] in said
    assert not (tmp_path / "one").exists()
    code, said = run_with_defaults(capsys, defaults, "hf", "one", *options)
    assert code == 0, said
    assert f"note     {what.replace('{}', 'of ckptkit.toml passed over: ')}" in said
    code, said = run_with_defaults(capsys, "", "hf", "two", *options)
    assert code == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert "passed over" not in said


def test_a_default_that_applies_still_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hf_plain(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    defaults = 'format = "ckpt"\nmax-shard-size = "20kB"\nclamp = true\nvariant = "qkv_concat"'
    assert run_with_defaults(capsys, defaults, "hf", "ms", "--dtype", "fp16")[0] == 0
    assert (tmp_path / "ms" / "model.ckpt").is_file()
    assert json.loads((tmp_path / "ms" / "ckptkit.json").read_text())["to"]["variant"] == "qkv_concat"
    assert run_with_defaults(capsys, defaults, "ms", "back")[0] == 0
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()
    code, said = run_with_defaults(capsys, 'format = "ckpt"', "hf", "other", "--max-shard-size", "20kB")
    assert code == 2
    assert "--format safetensors" in said
    assert run_with_defaults(capsys, 'max-shard-size = "5 apples"', "hf", "other", "--format", "ckpt")[0] == 2


def test_json_goes_to_stdout_and_errors_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_hf_plain(tmp_path / "hf")
    assert run(["convert", str(source), str(tmp_path / "ms"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["command"], report["ok"]) == (1, "convert", True)
    assert run(["convert", str(source), str(tmp_path / "ms"), "--json"]) == 2
    done = capsys.readouterr()
    assert json.loads(done.out)["error"]["exit_code"] == 2
    assert done.err.startswith("error: the output folder")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["convert", "nothing", "out"], 2, "no such file or folder"),
        (["convert", "{hf}", "out", "--model", "lama2"], 2, "did you mean llama"),
        (["convert", "{hf}", "out", "--to", "megatron"], 2, "has no such dialect"),
        (["convert", "{hf}", "out", "--variant", "x"], 2, "no variant `x`"),
        (["convert", "{hf}", "out", "--to", "hf", "--format", "ckpt"], 2, "not stored as .ckpt"),
        (["convert", "{hf}", "out", "--max-shard-size", "5 apples"], 2, "is not a size"),
        (["convert", "{hf}", "out", "--frmat", "ckpt"], 2, "no such option"),
        (["convert", "{hf}", "{hf}/inside"], 2, "same as, inside, or around"),
    ],
)
def test_mistakes_have_a_message_and_a_code(
    tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = make_hf_plain(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    assert run([word.replace("{hf}", str(source)) for word in arguments]) == code
    assert words in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_ckpt_whose_crc_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", format="ckpt")
    data = (tmp_path / "ms" / "model.ckpt").read_bytes()
    sound, broken = tmp_path / "sound.ckpt", tmp_path / "broken.ckpt"
    sound.write_bytes(data + b"crc_num" + zlib.crc32(data).to_bytes(10, "big"))
    broken.write_bytes(data + b"crc_num" + (zlib.crc32(data) ^ 1).to_bytes(10, "big"))
    convert(sound, tmp_path / "back", config=source)
    assert contents(tmp_path / "back") == contents(source)
    with pytest.raises(CorruptError, match="crc"):
        convert(broken, tmp_path / "other", config=source)
    assert not (tmp_path / "other").exists()


def test_the_manifest_is_not_overruled(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", variant="qkv_concat")
    with pytest.raises(UsageError, match="ckptkit.json says mindformers-legacy, variant qkv_concat"):
        convert(tmp_path / "ms", tmp_path / "back", variant="qkv_concat-1.4")
    with pytest.raises(UsageError, match="ckptkit.json says"):
        convert(tmp_path / "ms", tmp_path / "back", from_dialect="hf")
    convert(tmp_path / "ms", tmp_path / "back", variant="qkv_concat", from_dialect="mindformers")
    assert contents(tmp_path / "back") == contents(source)


def test_the_base_layout_has_a_name_for_where_a_variant_has_equal_names(tmp_path: Path) -> None:
    family = load_tables().family("qwen3")
    config = tiny_config(family) | {"model_type": "qwen3", "tie_word_embeddings": False}
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write_safetensors(source / "model.safetensors", numbered_tensors(resolve(family, config, "hf")), "F32")
    convert(source, tmp_path / "ms")
    (tmp_path / "ms" / "ckptkit.json").unlink()
    with pytest.raises(UsageError, match="fit 4 layouts") as caught:
        convert(tmp_path / "ms", tmp_path / "back")
    assert any("base: QKV per KV group" in item for item in caught.value.items)
    convert(tmp_path / "ms", tmp_path / "back", from_variant="base")
    assert contents(tmp_path / "back") == contents(source)


def test_an_edited_config_never_cuts_fused_tensors_elsewhere(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", heads=4, kv_heads=2, hidden=32, head_dim=8)
    convert(source, tmp_path / "ms", variant="qkv_concat")
    path = tmp_path / "ms" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_theta": 5.0, "bos_token_id": 7}))
    convert(tmp_path / "ms", tmp_path / "back")  # fields that no rule depends on may change
    path.write_text(json.dumps(config | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}))
    with pytest.raises(CoverageError, match="was not made with this config.json"):
        convert(tmp_path / "ms", tmp_path / "other")


def test_an_edited_table_never_cuts_fused_tensors_elsewhere(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    table = tmp_path / "own.toml"
    shipped = Path("mappings/mindformers-legacy/llama.qkv_concat.toml").read_text()
    table.write_text(shipped.replace('{ op = "interleave", axis = 0, groups = "ffn" }', '{ op = "concat", axis = 0 }'))
    convert(source, tmp_path / "ms", variant="qkv_concat", table=[table])
    with pytest.raises(CoverageError, match="these tables"):
        convert(tmp_path / "ms", tmp_path / "back")
    convert(tmp_path / "ms", tmp_path / "back", table=[table])
    assert contents(tmp_path / "back") == contents(source)


def test_the_users_word_on_ties_does_not_lose_a_head(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    with pytest.raises(CoverageError, match="both are stored and differ"):
        convert(source, tmp_path / "ms", tie_embeddings=True)


def test_one_file_of_our_folder_still_has_its_manifest(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", variant="qkv_concat", format="ckpt")
    with pytest.raises(UsageError, match="ckptkit.json says"):
        convert(tmp_path / "ms" / "model.ckpt", tmp_path / "back", variant="qkv_concat-1.4")
    convert(tmp_path / "ms" / "model.ckpt", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.frameworks
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_that_is_a_view_is_compared_by_its_elements(tmp_path: Path, tied: bool) -> None:
    """A square embedding and its transposed view have the same storage, and other values."""
    torch = pytest.importorskip("torch")
    source = make_hf_plain(tmp_path / "hf", tied=True, vocab=32, hidden=32)
    tensors = {
        n: torch.from_numpy(a.view("float32").copy())
        for n, a in tensors_of(TinyModel(tied=True, vocab=32, hidden=32)).items()
    }
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.t().contiguous().t() if tied else embedding.t()
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    report = convert(source, tmp_path / "ms")
    assert ("bit-equal" in row(report, "note")) is tied
    convert(tmp_path / "ms", tmp_path / "back")
    back = contents(tmp_path / "back")
    assert ("lm_head.weight" in back) is not tied
    assert back["model.embed_tokens.weight"][2] == embedding.numpy().tobytes()
    if not tied:
        assert back["lm_head.weight"][2] == embedding.t().contiguous().numpy().tobytes()


def test_an_hf_result_with_another_config_is_not_fused_elsewhere(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", heads=4, kv_heads=2, hidden=32, head_dim=8)
    convert(source, tmp_path / "copy", to_dialect="hf")
    path = tmp_path / "copy" / "config.json"
    config = json.loads(path.read_text()) | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    path.write_text(json.dumps(config))
    with pytest.raises(CoverageError, match="was not made with this config.json") as caught:
        convert(tmp_path / "copy", tmp_path / "ms", variant="qkv_concat")
    assert "kv_heads is 4, was 2" in caught.value.items


def test_one_of_several_files_is_no_checkpoint(tmp_path: Path) -> None:
    convert(make_hf_plain(tmp_path / "hf"), tmp_path / "ms", max_shard_size="20kB")
    (tmp_path / "link.safetensors").symlink_to("ms/part0.safetensors")
    for path in (tmp_path / "ms" / "part0.safetensors", tmp_path / "link.safetensors"):
        with pytest.raises(UsageError, match="is one of .* files of a checkpoint"):
            convert(path, tmp_path / "back", config=tmp_path / "hf")


@pytest.mark.parametrize(("key", "number"), [("num_hidden_layers", 10**15), ("num_hidden_layers", 300_000)])
def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path: Path, key: str, number: int) -> None:
    source = make_hf_plain(tmp_path / "hf")
    (source / "config.json").write_text(json.dumps(config_of(TinyModel()) | {key: number}))
    with pytest.raises(UsageError, match="no model has so many"):
        convert(source, tmp_path / "ms")


def test_a_size_of_nothing_is_refused(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    (source / "config.json").write_text(json.dumps(config_of(TinyModel()) | {"hidden_size": 0}))
    for variant in ("base", "qkv_concat"):
        with pytest.raises(UsageError, match="it would hold nothing"):
            convert(source, tmp_path / "ms", variant=variant)


def test_a_form_of_huggingfaces_own_is_written_on_demand(tmp_path: Path) -> None:
    family = load_tables().family("qwen3_moe")
    config = tiny_config(family) | {"model_type": "qwen3_moe", "tie_word_embeddings": False}
    config |= {"mlp_only_layers": [], "decoder_sparse_step": 1}
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    write_safetensors(source / "model.safetensors", numbered_tensors(resolve(family, config, "hf")), "F32")
    convert(source, tmp_path / "stacked", to_dialect="hf", variant="stacked")
    assert any(name.endswith("experts.gate_up_proj") for name in contents(tmp_path / "stacked"))
    convert(source, tmp_path / "ms")
    convert(tmp_path / "ms", tmp_path / "two", variant="stacked")
    assert contents(tmp_path / "two") == contents(tmp_path / "stacked")
    (tmp_path / "two" / "ckptkit.json").unlink()
    convert(tmp_path / "two", tmp_path / "back", to_dialect="hf")
    assert contents(tmp_path / "back") == contents(source)


def test_an_adapter_beside_the_model_is_not_passed_over(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(CoverageError, match="holds a LoRA adapter"):
        convert(source, tmp_path / "ms")


def test_training_state_beside_the_weights_is_called_by_its_name(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms")
    tensors = {
        name: read_region(info).view("uint32") for name, info in open_checkpoint(tmp_path / "ms").tensors.items()
    }
    tensors |= {f"adam_m.{name}": array for name, array in list(tensors.items())[:3]}
    tensors["global_step"] = tensors["model.norm_out.weight"]
    write_safetensors(tmp_path / "trained.safetensors", tensors, "F32")
    tensors["adam_v.other"] = tensors["model.norm_out.weight"]
    write_safetensors(tmp_path / "trained.safetensors", tensors, "F32")
    with pytest.raises(CoverageError, match="1 tensor of `trained.safetensors` matches no row") as caught:
        convert(tmp_path / "trained.safetensors", tmp_path / "back", config=source)
    assert "--no-optimizer" in caught.value.hint
    del tensors["adam_v.other"]
    write_safetensors(tmp_path / "trained.safetensors", tensors, "F32")
    convert(tmp_path / "trained.safetensors", tmp_path / "back", config=source, no_optimizer=True)
    assert contents(tmp_path / "back") == contents(source)
    convert(tmp_path / "trained.safetensors", tmp_path / "all", config=source)
    assert open_checkpoint(tmp_path / "all").tensors.keys() - open_checkpoint(source).tensors.keys() == {
        "adam_m.model.embed_tokens.weight", "adam_m.model.layers.0.input_layernorm.weight",
        "adam_m.model.layers.0.self_attn.q_proj.weight", "global_step",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["mindspore", "MindFormers", "mindformers-legacy"])
def test_a_side_may_be_named_by_its_framework(tmp_path: Path, word: str) -> None:
    source = make_hf_plain(tmp_path / "hf")
    convert(source, tmp_path / "ms", to_dialect=word, table=[])
    convert(tmp_path / "ms", tmp_path / "back", from_dialect=word, to_dialect="pytorch")
    assert contents(tmp_path / "back") == contents(source)


def test_packed_weights_are_called_by_their_method(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf")
    name = "model.layers.0.self_attn.q_proj"

    def pack(tensors: dict[str, Any]) -> None:
        weight = tensors.pop(f"{name}.weight")
        tensors |= {f"{name}.{part}": weight for part in ("qweight", "qzeros", "scales")}

    rewrite(source, pack)
    with pytest.raises(CoverageError, match="1 tensor is missing") as caught:
        convert(source, tmp_path / "ms")
    assert "GPTQ" in caught.value.hint
