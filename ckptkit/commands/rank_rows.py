"""What a report says of a result that is cut over ranks: its layout, and the bytes of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ckptkit.formats.manifest import MANIFEST
from ckptkit.formats.mindformers_write import rank_of
from ckptkit.plan.plan import Plan
from ckptkit.quantities import numbers_text
from ckptkit.report import human_bytes, listed


def rank_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows of a report on ranks; none for a result that is whole."""
    layout = plan.facts["layout"]
    if "ranks" not in layout:
        return []
    only = layout.get("only")
    part = [] if only is None else [("part", f"ranks {numbers_text(only)} of {layout['ranks']}")]
    return [("layout", layout_text(plan)), *part, *(("ranks", text) for text in listed(list(_ranks(plan))))]


def layout_text(plan: Plan) -> str:
    """Return the layout in words: ranks, stages, degrees."""
    layout = plan.facts["layout"]
    stages = layout["pp"]
    text = f"{layout['ranks']} rank{'s' * (layout['ranks'] > 1)}"
    if stages > 1:
        devices = layout["ranks"] // stages
        text += f": {stages} stages of {devices} device{'s' * (devices > 1)}"
    degrees = [f"{key} {layout[key]}" for key in ("tp", "dp", "ep", "cp") if layout.get(key, 1) > 1]
    if layout.get("optimizer_shard"):
        degrees.append("optimizer shards")
    return f"{text} ({', '.join(degrees)})" if degrees else text


def beside(plan: Plan) -> list[str]:
    """Return the names of the small files beside the weights, sorted; those that every rank has are one."""
    names = [name for _, name in plan.side] + [*plan.extra]
    of_ranks = {f"rank_N/{name.partition('/')[2]}" for name in names if name.startswith("rank_")}
    return sorted([*(name for name in names if not name.startswith("rank_")), *of_ranks, MANIFEST])


def _ranks(plan: Plan) -> Iterator[str]:
    """Yield a line for each run of ranks that write and read equally much."""
    read: dict[int, int] = {}
    for output in plan.outputs:
        read[output.file] = read.get(output.file, 0) + output.read_bytes
    sizes: dict[int, tuple[int, int]] = {}
    for number, file in enumerate(plan.files):
        rank, (size, count) = _rank(file.name), sizes.get(_rank(file.name), (0, 0))
        sizes[rank] = size + file.size, count + read.get(number, 0)
    linked = {_rank(name): _rank(file) for name, file in plan.links.items()}
    ranks = sorted({*sizes, *linked})
    for (size, count), run in groupby(ranks, key=lambda rank: sizes.get(rank, (-1, 0))):
        numbers = list(run)
        if size < 0:
            yield f"{_span(numbers)}: equal to rank {linked[numbers[0]]}" + (
                " and following: hard links, which take no room" if len(numbers) > 1 else ", a hard link"
            )
        else:
            each = " each" if len(numbers) > 1 else ""
            yield f"{_span(numbers)}: writes {human_bytes(size)}{each}, reads {human_bytes(count)}{each}"


def _rank(file: str) -> int:
    rank = rank_of(file)
    return int(file.partition("/")[0].removeprefix("rank_")) if rank is None else rank


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}"
