"""config.json across the spellings of transformers 4 and 5, and the files that travel beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit.errors import CorruptError, CoverageError, UsageError
from ckptkit.formats.model_config import read_config, side_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 499723\n"


@pytest.mark.parametrize("where", ["", "config.json"])
def test_a_config_is_read_from_its_folder_or_file(tmp_path: Path, where: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path / where) == {"model_type": "llama"}


def test_a_config_with_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_config(tmp_path) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "two different values"),
        (POINTER.encode(), "git-lfs pointer"),
    ],
)
def test_a_config_that_cannot_be_understood_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CorruptError, match=words) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value)
    assert caught.value.hint


def test_a_key_that_is_repeated_with_one_value_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1, "a": 1}')
    assert read_config(tmp_path) == {"a": 1}


def test_a_folder_without_config_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no `config\.json`"):
        read_config(tmp_path)


def test_a_dangling_config_says_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../blobs/gone")
    with pytest.raises(CoverageError, match=r"points to missing `\.\./blobs/gone`"):
        read_config(tmp_path)


TRAVEL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modeling_x.py",
    "README.md",
    "LICENSE",
    "USE_POLICY.md",
)
STAY = (
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "net.ckpt",
    "pytorch_model.bin.index.json",
    "param_name_map.json",
    "consolidated.00.pth",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state_0.pth",
    "scaler.pt",
    "trainer_state.json",
    "x.lock",
    "y.safetensors.incomplete",
    ".gitattributes",
    ".DS_Store",
    "ckptkit.json",
    "events.out.tfevents.1",
)


def test_all_but_weights_and_what_belongs_to_a_run_travels(tmp_path: Path) -> None:
    for name in (*TRAVEL, *STAY):
        (tmp_path / name).write_text("x")
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "params.json").write_text("{}")
    assert sorted(path.name for path in side_files(tmp_path)) == sorted(TRAVEL)


def test_links_to_side_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").mkdir()
    (tmp_path / "blob" / "b1").write_text("{}")
    (tmp_path / "tokenizer.json").symlink_to("blob/b1")
    (side,) = side_files(tmp_path)
    assert side.read_text() == "{}"


def test_a_dangling_side_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("gone")
    with pytest.raises(CoverageError, match="points to missing `gone`"):
        side_files(tmp_path)


def test_a_dangling_link_to_what_stays_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").symlink_to("gone")
    assert side_files(tmp_path) == []


def test_a_tokenizer_that_is_a_git_lfs_pointer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text(POINTER)
    with pytest.raises(CorruptError, match=r"tokenizer\.model` is a git-lfs pointer.* 499723 bytes"):
        side_files(tmp_path)


def test_an_empty_side_file_travels(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_bytes(b"")
    assert [path.name for path in side_files(tmp_path)] == ["__init__.py"]
