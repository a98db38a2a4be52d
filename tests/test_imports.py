"""The contract: imports point one way (docs/architecture.md), so that each room can be understood by itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ckptkit"
# a module may import modules of a lower level, and of its own room
LEVELS = {
    "cli": 8, "__main__": 9, "commands": 7, "settings": 7, "train": 6.5, "verification": 6, "execute": 5,
    "compare": 5, "moves": 4, "plan": 3, "mapping": 2, "formats": 2, "layout": 2, "cast": 2, "values": 2, "types": 1,
    "quantities": 1, "memory": 1, "report": 1, "errors": 0, "": 0,
}  # fmt: skip
FRAMEWORKS = {"torch", "mindspore", "mindformers", "transformers", "safetensors"}
RUNNERS = "ckptkit.verification.runners"
# a network that took its weights by way of a table would forgive the table's errors
RUNNERS_MAY = {"types", "errors", "memory", "cast", "values", "formats", "verification"}
# imported where it is used, and done without
OPTIONAL = {"tokenizers", "jinja2", "markupsafe", "plotly", "pydantic", "pydantic_core", "matplotlib"}


def room(module: str) -> str:
    return module.removeprefix("ckptkit").removeprefix(".").split(".")[0]


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def faults(module: str, source: str) -> list[str]:
    """Return the imports of `module` that point the wrong way, or to a framework."""
    found = []
    here = room(module)
    for name in imports(source):
        is_runner = module.startswith(RUNNERS)
        trains = here == "train" and name.split(".")[0] == "mindspore"
        if name.split(".")[0] in FRAMEWORKS and not is_runner and not trains:
            found.append(f"{module} imports {name}")
        if is_runner and name.startswith("ckptkit.") and not _runner_may(name):
            found.append(f"{module} imports {name}")
        if name.split(".")[0] == "ckptkit" and here and room(name) != here and LEVELS[room(name)] >= LEVELS[here]:
            found.append(f"{module} imports {name}")
    return found


def _runner_may(name: str) -> bool:
    return room(name) in RUNNERS_MAY and (room(name) != "verification" or name.startswith(RUNNERS))


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_is_below_it(path: Path) -> None:
    module = ".".join(("ckptkit", *path.relative_to(PACKAGE).with_suffix("").parts))
    assert faults(module.removesuffix(".__init__"), path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from ckptkit.plan.plan import Plan",
        "from ckptkit.mapping.rules import Rule",
        "import ckptkit.cli",
    ],
)
def test_a_wrong_import_is_seen(source: str) -> None:
    assert faults("ckptkit.formats.io", source)


@pytest.mark.parametrize(
    "source",
    [
        "from ckptkit.mapping.rules import resolve",
        "from ckptkit.plan.join import join",
        "from ckptkit.commands.convert import convert",
        "from ckptkit.layout.layout import Layout",
        "from ckptkit.verification.weights import compare",
    ],
)
def test_a_runner_that_would_know_the_tables_is_seen(source: str) -> None:
    assert faults(f"{RUNNERS}.builtin", source)
    assert not faults(f"{RUNNERS}.builtin", "from ckptkit.verification.runners.job import Job\nimport mindspore")


def test_no_runner_loads_the_tables_by_way_of_another_module() -> None:
    code = (
        "import sys\nimport ckptkit.verification.runners.builtin, ckptkit.verification.runners.torch\n"
        "import ckptkit.verification.runners.mindformers\n"
        "print([m for m in sys.modules if m.startswith(('ckptkit.mapping', 'ckptkit.plan', 'ckptkit.commands'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_ckptkit_needs_is_what_it_imports() -> None:
    """Test tools, and the frameworks' own packages, are none of its dependencies."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    imported = {name.split(".")[0] for path in modules() for name in imports(path.read_text())}
    packages = {"pyyaml" if name == "yaml" else name for name in imported}
    assert needed == packages - sys.stdlib_module_names - {"ckptkit"} - FRAMEWORKS - OPTIONAL


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"], ["inspect", "nothing_here"]])
def test_help_and_inspect_do_without_numpy_and_frameworks(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ckptkit.cli import run\nrun(sys.argv[1:])\n"
        f"print('loaded:', sorted({FRAMEWORKS | {'numpy'}!r} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"
