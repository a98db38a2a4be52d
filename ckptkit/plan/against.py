"""The pairs of a comparison over what is really stored: where a side is cut over ranks, part by part.

Every shard of both sides is compared, the replicas too: those of B with what A makes of them, those of A with what
is read in their place. What does not live here: which tensors are pairs (`pair.py`), and comparing (`compare.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ckptkit.mapping.expr import leaves, substitute
from ckptkit.plan.join import Joined
from ckptkit.plan.pair import Pairing
from ckptkit.plan.plan import OutputTensor, Plan
from ckptkit.plan.shard import part_of
from ckptkit.types import Region, TensorInfo


@dataclass(frozen=True, slots=True)
class Part:
    """What output number i of a comparison is: `region` of pair number `pair`, stored as `stored`.

    `pair` is None for a replica in A: then `stored` is it, and `name` the tensor that it is a part of.
    """

    pair: int | None
    name: str
    region: Region
    stored: str


@dataclass(slots=True)
class Comparison:
    """`outputs[i]`, made of A's bytes, is to be equal to `others[i]`; `parts[i]` says what it is."""

    outputs: list[OutputTensor] = field(default_factory=list)
    others: list[TensorInfo] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def plan(self) -> Plan:
        """Return the plan that makes the outputs, for a sink that is no file."""
        return Plan(tuple(self.outputs), (), {}, (), (), (), (), (), {})

    def _add(self, output: OutputTensor, other: TensorInfo, part: Part) -> None:
        self.outputs.append(output)
        self.others.append(other)
        self.parts.append(part)


def over_parts(pairing: Pairing, a: Joined | None, b: Joined | None) -> Comparison:
    """Return the comparison of all pairs, over the bytes of two sides of which `a` and `b` say how they are joined."""
    found = Comparison()
    for number, (output, other) in enumerate(zip(pairing.outputs, pairing.others, strict=True)):
        name = output.spec.name
        whole = output if a is None else _over_shards(output, a)
        if b is None:
            found._add(whole, other, Part(number, name, Region.whole(other.shape), other.name))
            continue
        for region, shard in stored_parts(b, other.name):
            made = part_of(whole, region)
            spec = replace(made.spec, name=shard.name)
            found._add(replace(made, spec=spec), shard, Part(number, name, region, shard.name))
    for replica in a.replicas if a else ():
        output = OutputTensor(replica.shard.spec, 0, replica.expr, replica.inputs, replica.region)
        found._add(output, replica.shard, Part(None, replica.name, replica.region, replica.shard.name))
    return found


def stored_parts(joined: Joined, name: str) -> Iterator[tuple[Region, TensorInfo]]:
    """Yield every shard of a whole tensor that is stored apart, replicas included, with the region that it is."""
    yield from joined.parts_of(name)
    for replica in joined.replicas_of.get(name, ()):
        yield replica.region, replica.shard


def _over_shards(output: OutputTensor, joined: Joined) -> OutputTensor:
    expr = substitute(output.expr, {name: joined.exprs[name] for name in output.inputs})
    return replace(output, expr=expr, inputs={leaf.name: joined.shards[leaf.name] for leaf in leaves(expr)})
