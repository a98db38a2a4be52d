"""The values that there is one of for each tensor: made fast, compared by content, not to be changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mypy import api

from ckptkit.types import Extent, Region, TensorInfo

INFO = TensorInfo("w", (2, 3), "BF16", Path("x"), (Extent(8, 12),))


def test_values_are_equal_and_hash_by_content() -> None:
    same = TensorInfo("w", (2, 3), "BF16", Path("x"), (Extent(8, 12),))
    assert (same, hash(same)) == (INFO, hash(INFO))
    assert replace(INFO, name="v") != INFO
    assert len({Region.whole((2, 3)), Region((0, 0), (2, 3)), Region((0, 0), (1, 3))}) == 2


def test_values_have_no_dict() -> None:
    assert not hasattr(INFO, "__dict__")


def test_mypy_refuses_to_change_a_value(tmp_path: Path) -> None:
    """At run time nothing does: see `value`."""
    lines = [
        "from ckptkit.types import TensorSpec",
        "spec = TensorSpec('w', (2, 3), 'F32')",
        "spec.name = 'v'",
        "spec.unheard_of = 'v'",
        "print(spec.name)",
    ]
    text, _, _ = api.run(["--strict", "--config-file=", f"--cache-dir={tmp_path}", "-c", "\n".join(lines)])
    errors = [line for line in text.splitlines() if ": error: " in line]
    assert [line.split(":")[1] for line in errors] == ["3", "4"], text
    assert "read-only" in errors[0]
