"""A part of a plan: the files of some ranks, as one node writes them while others write the rest.

A part keeps the digest of the whole plan, by which the parts of one result know one another. What does not live here:
how parts become one folder (`formats/parts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptkit.formats.base import OutputFile
from ckptkit.plan.plan import Plan


def take_ranks(plan: Plan, ranks: Sequence[int]) -> Plan:
    """Return the part of a plan for a sharded result that makes these `ranks`; the plan itself for all of them.

    Small files that belong to no rank go with every part. A file that is a link to one of another part is written.
    """
    if len(ranks) == plan.facts["layout"]["ranks"]:
        return plan
    wanted = {f"rank_{rank}" for rank in ranks}
    names_of = {file.name: [file.name] for file in plan.files}
    for name, main in plan.links.items():
        names_of[main].append(name)
    files: list[OutputFile] = []
    links: dict[str, str] = {}
    numbers: dict[int, int] = {}
    for number, file in enumerate(plan.files):
        names = [name for name in names_of[file.name] if _folder(name) in wanted]
        if names:
            numbers[number] = len(files)
            files.append(replace(file, name=names[0]))
            links |= dict.fromkeys(names[1:], names[0])
    return replace(
        plan,
        outputs=tuple([replace(o, file=numbers[o.file]) for o in plan.outputs if o.file in numbers]),
        files=tuple(files),
        links=links,
        extra={n: data for n, data in plan.extra.items() if _folder(n) in wanted or not n.startswith("rank_")},
        facts={**plan.facts, "layout": {**plan.facts["layout"], "only": sorted(ranks)}},
        whole=plan,
    )


def _folder(name: str) -> str:
    return name.partition("/")[0]
