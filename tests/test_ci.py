"""The contract of `.ci/run`: it installs a Chromium where it may, says so where not, and fails with the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
RUN = REPOSITORY / ".ci" / "run"
pytestmark = pytest.mark.skipif(not RUN.is_file(), reason="an unpacked sdist has no .ci/run")


class Machine:
    """A checkout whose tests are a fake, and a machine on which `tools` are all the commands that there are."""

    def __init__(self, folder: Path, *tools: str, user: int = 0, apt_code: int = 0) -> None:
        self.folder, self.tools, self.calls_file = folder, folder / "tools", folder / "calls"
        for name in (".ci", "scripts", "tools"):
            (folder / name).mkdir()
        shutil.copy(RUN, folder / ".ci")
        for name in ("bash", "dirname", "env"):
            found = shutil.which(name)
            assert found
            (self.tools / name).symlink_to(found)
        fakes = {
            "id": f"echo {user}", "timeout": 'shift; "$@"', "chromium": "exit 0", "google-chrome": "exit 0",
            "apt-get": f'echo "$*" >> "{self.calls_file}"; echo noise; [ "$1" = update ] || exit {apt_code}',
        }  # fmt: skip
        for name in ("id", "timeout", *tools):
            self._program(self.tools / name, fakes[name])

    def _program(self, file: Path, text: str) -> None:
        file.write_text(f"#!{shutil.which('bash')}\n{text}\n")
        file.chmod(0o755)

    def run(self, *, tests_code: int = 0, ci: str = "true") -> tuple[int, str]:
        """Run it; return its exit code and what it says."""
        self._program(self.folder / "scripts" / "test", f'echo "tests: $*"; exit {tests_code}')
        done = subprocess.run(
            [str(self.folder / ".ci" / "run")], cwd="/", env={"PATH": str(self.tools), "CI": ci, "HOME": os.devnull},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def calls(self) -> Sequence[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


def test_a_chromium_that_is_missing_is_installed_before_the_tests(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "apt-get")
    code, said = machine.run()
    assert code == 0 and said.index("installing Chromium") < said.index("tests: --durations=40")
    assert "noise" not in said and "could not" not in said and said.endswith("passed\n")
    first, second = machine.calls()
    assert first == "update" and second.startswith("install -y") and "chromium" in second.split()


def test_an_installation_that_fails_is_said_and_fails_nothing(tmp_path: Path) -> None:
    code, said = Machine(tmp_path, "apt-get", apt_code=100).run()
    assert code == 0 and "could not be installed" in said and said.endswith("passed\n")


@pytest.mark.parametrize(
    ("tools", "user", "ci"), [(("apt-get",), 1000, "true"), (("apt-get",), 0, ""), ((), 0, "true")]
)
def test_nothing_is_installed_where_it_may_not_be(tmp_path: Path, tools: Sequence[str], user: int, ci: str) -> None:
    machine = Machine(tmp_path, *tools, user=user)
    code, said = machine.run(ci=ci)
    assert (code, machine.calls()) == (0, []) and "not installed here" in said and "tests: " in said


@pytest.mark.parametrize("browser", ["chromium", "google-chrome"])
def test_a_browser_that_is_there_is_enough(tmp_path: Path, browser: str) -> None:
    machine = Machine(tmp_path, "apt-get", browser)
    code, said = machine.run()
    assert (code, machine.calls()) == (0, []) and "Chromium" not in said


@pytest.mark.parametrize("code", [1, 5])
def test_tests_that_fail_fail_it(tmp_path: Path, code: int) -> None:
    found, said = Machine(tmp_path, "chromium").run(tests_code=code)
    assert found == code and "passed" not in said
