"""The contract: a trap is named when, and only when, what it is about is installed; no framework is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from ckptkit import env
from ckptkit.commands.env import applies, compare_with_tested, find_devices, memory_text, release

DATA = tomllib.loads((Path(sys.modules["ckptkit"].__file__ or "").parent / "tested.toml").read_text())
TESTED = {"mindspore": "2.9.0", "mindformers": "1.9.0", "transformers": "4.57.1", "torch": "2.13.0", "numpy": "1.26.4"}


def traps(**versions: str) -> list[str]:
    return [trap["package"] + ": " + trap["what"] for trap in DATA["trap"] if applies(trap, versions)]


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"numpy": "2.1.0", "mindspore": "2.9.0"}, ["numpy: bfloat16"]),
        ({"numpy": "2.1.0"}, []),
        ({"numpy": "1.26.4", "mindspore": "2.9.0"}, []),
        ({"safetensors": "0.8.0"}, ["safetensors: its numpy save_file"]),
        (
            {"safetensors": "0.8.0", "mindspore": "2.9.0"},
            ["safetensors: its numpy", "safetensors: mindspore.transform"],
        ),
        ({"safetensors": "0.7.0", "mindspore": "2.9.0"}, []),
        ({"transformers": "5.0.0"}, ["transformers: it writes `rope_parameters`"]),
        ({"transformers": "4.57.1"}, ["transformers: it does not read the `rope_parameters`"]),
        ({"gguf": "0.19.0", "transformers": "4.57.1", "accelerate": "1.15"}, ["transformers: it does not"]),
        ({"gguf": "0.19.0", "transformers": "4.57.1"}, ["transformers: it does not", "gguf: transformers reads"]),
        ({"mindformers": "1.9.0"}, ["mindformers: importing it"]),
        ({}, []),
    ],
    ids=str,
)
def test_a_trap_is_named_only_where_it_applies(versions: dict[str, str], said: list[str]) -> None:
    found = traps(**versions)
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))


def test_every_trap_has_known_keys_and_a_remedy() -> None:
    known = {"package", "at_least", "below", "exactly", "with", "without", "what", "remedy"}
    for trap in DATA["trap"]:
        assert trap.keys() <= known and {"package", "what", "remedy"} <= trap.keys()


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (TESTED, "these were run together: mindspore 2.9.0, mindformers 1.9.0"),
        (TESTED | {"torch": "2.13.0+cpu"}, "these were run together"),
        (TESTED | {"mindspore": "2.7.2", "mindformers": "1.8.0"}, "these were run together: mindspore 2.7.2"),
        (TESTED | {"mindspore": "2.7.2"}, "not run together"),
        (TESTED | {"mindspore": "2.8.0"}, "the nearest tested set has mindspore 2.9.0"),
        ({"torch": "2.13.0"}, "these were run together: torch 2.13.0"),
        ({"numpy": "2.3.0"}, "no framework is installed"),
    ],
    ids=str,
)
def test_versions_are_compared_with_the_sets_that_were_run_together(versions: dict[str, str], said: str) -> None:
    assert said in compare_with_tested(versions, DATA["tested"])


def test_a_version_is_its_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13)
    assert release("2.13") == release("2.13.0")
    assert release("4.57.1") > release("4.9")
    assert release("5.0.0rc1") == (5,)


def test_devices_are_counted_by_their_files(tmp_path: Path) -> None:
    for name in ("davinci0", "davinci7", "davinci_manager", "nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    devices = find_devices(tmp_path)
    assert devices["Ascend NPU"]["files"] == ["davinci0", "davinci7"]
    assert devices["NVIDIA GPU"]["files"] == ["nvidia0"]
    assert find_devices(tmp_path / "nothing")["NVIDIA GPU"]["files"] == []


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        if name == "numpy":
            return "1.26.4"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    report = env(tmp_path)
    assert ("versions", "mindspore (not installed)") in report.rows
    assert ("traps", "none of the known ones applies here") in report.rows
    assert report.exit_code == 0
    assert report.data["free_bytes"] > 0 and report.data["cores"] >= 1


def test_a_system_that_says_nothing_of_memory_is_no_error() -> None:
    assert memory_text({"memory_bytes": None}) == "not known on this system"


def test_the_command_imports_neither_frameworks_nor_numpy() -> None:
    code = (
        "import sys\nfrom ckptkit.cli import run\ncode = run(['env', '--json'])\n"
        "names = {'numpy', 'torch', 'mindspore', 'mindformers', 'transformers', 'safetensors'}\n"
        "assert code == 0 and not names & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["command"] == "env"
