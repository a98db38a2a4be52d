"""Without digests the same bytes are written as with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptkit import Parallel, convert, reshard
from tests.rank_results import rank_bytes
from tests.tiny_models import make_hf_plain

LAYOUTS = [Parallel(mp=2), Parallel(pp=2), Parallel()]


def through(source: Path, room: Path, *, digests: bool, workers: int) -> list[dict[str, bytes]]:
    """Reshard a checkpoint from layout to layout; return the weights' files of each."""
    found = []
    for number, layout in enumerate(LAYOUTS):
        target = room / f"{number} {digests} {workers}"
        reshard(source, target, layout, digests=digests, workers=workers)
        found.append({name: data for name, data in rank_bytes(target).items() if name.endswith(".safetensors")})
        source = target
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_a_reshard_without_digests_writes_the_same_bytes(tmp_path: Path, workers: int) -> None:
    convert(make_hf_plain(tmp_path / "hf", bias=True), tmp_path / "ms")
    wanted = through(tmp_path / "ms", tmp_path, digests=True, workers=2)
    assert all(wanted) and len({len(files) for files in wanted}) == 2
    assert through(tmp_path / "ms", tmp_path, digests=False, workers=workers) == wanted


def test_a_cast_without_digests_writes_the_same_bytes(tmp_path: Path) -> None:
    source = make_hf_plain(tmp_path / "hf", bias=True)
    for digests in (True, False):
        convert(source, tmp_path / f"{digests}", dtype="bf16", digests=digests)
    wanted, found = (rank_bytes(tmp_path / f"{digests}") for digests in (True, False))
    weights = [name for name in wanted if name.endswith(".safetensors")]
    assert weights and all(found[name] == wanted[name] for name in weights)
