"""Level files, and what is refused before it: bytes that are not as promised, shapes that are not config.json's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckptkit import CorruptError, Parallel, UsageError, convert, verify
from tests.rank_results import read_whole, write_whole
from tests.tiny_models import TinyModel, make_hf_plain, tensors_of, write_safetensors
from tests.trained_models import make_llama


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("hf") / "hf")


@pytest.fixture(scope="module")
def ms(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ms") / "ms"
    convert(hf, folder, to_dialect="mindformers")
    return folder


def test_bytes_that_are_not_the_promised_ones_are_an_error(hf: Path, tmp_path: Path) -> None:
    convert(hf, tmp_path / "ms", to_dialect="mindformers", parallel=Parallel(mp=2))
    assert verify(hf, tmp_path / "ms", level="files").exit_code == 0
    file = next((tmp_path / "ms" / "rank_1").iterdir())
    with file.open("r+b") as stream:
        stream.seek(-3, 2)
        stream.write(b"\x55")
    with pytest.raises(CorruptError, match="are not what ckptkit.json promises"):
        verify(hf, tmp_path / "ms", level="files")


def test_another_shape_is_a_fault_of_files_and_ends_the_run_unless_told_otherwise(
    hf: Path, ms: Path, tmp_path: Path
) -> None:
    tensors = dict(read_whole(ms))
    tensors["model.norm_out.weight"] = tensors["model.norm_out.weight"][:-1]
    write_whole(tmp_path / "other" / "part0.safetensors", tensors)
    shutil.copy(ms / "config.json", tmp_path / "other")
    report = verify(hf, tmp_path / "other")
    assert (report.exit_code, report.data["failed"]) == (1, ["files"])
    assert "B: model.norm_out.weight is (23,), by config.json (24,)" in report.to_text()
    assert "`--keep-going`" in report.headline
    report = verify(hf, tmp_path / "other", level="weights", keep_going=True)
    assert report.data["failed"] == ["files", "weights"]
    wrong = {row["name"] for row in report.data["parameters"] if row["status"] == "shape"}
    assert wrong == {"model.norm_out.weight"}


def test_sizes_of_another_config_are_a_fault(tmp_path: Path) -> None:
    model = TinyModel()
    hf = make_hf_plain(tmp_path / "hf")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((hf / "config.json").read_text()) | {"intermediate_size": model.intermediate + 8}
    (other / "config.json").write_text(json.dumps(config))
    write_safetensors(other / "model.safetensors", tensors_of(model), model.dtype)
    report = verify(other, other, level="files")
    assert (report.exit_code, len(report.data["unlike_config"])) == (1, 2 * 3 * model.layers)
    assert verify(hf, hf, level="files").data["unlike_config"] == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"level": "layer"}, "unknown level"),
        ({"runner": "other"}, "unknown runner"),
        ({"device_b": "tpu"}, "`--device-b tpu` is no device"),
        ({"dump": "x"}, "two were named"),
        ({"strategy_b": "x"}, "no `rank_N` folders"),
    ],
    ids=str,
)
def test_a_word_that_means_nothing_is_refused(hf: Path, ms: Path, options: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        verify(hf, ms, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "nothing to compare with"),
        ({"dump": "x", "against": "y"}, "are two runs"),
        ({"dump": "x", "level": "weights"}, "reads both checkpoints"),
    ],
    ids=str,
)
def test_one_checkpoint_alone_needs_a_dump(hf: Path, options: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        verify(hf, **options)  # type: ignore[arg-type]
