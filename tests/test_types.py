"""The values that there is one of for each tensor: made fast, compared by content, not to be changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mypy import api

from ckptkit.types import Extent, Region, TensorInfo, new_extent, total_bytes

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


def test_the_bytes_of_many_are_the_sum_of_each() -> None:
    tensors = [INFO, INFO, replace(INFO, dtype="F32"), replace(INFO, shape=())]
    assert total_bytes(tensors) == sum(tensor.num_bytes for tensor in tensors) == 12 + 12 + 24 + 2
    assert total_bytes([]) == 0


def test_an_extent_made_fast_is_an_extent() -> None:
    assert new_extent((8, 12)) == Extent(8, 12)
    assert new_extent((8, 12)).size == 12
