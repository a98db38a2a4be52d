"""Numbers from config.json: the dims, flags and layer sets that a catalogue names, and formulas over them.

A formula is a sum of products of dims and whole numbers, such as `heads*head_dim` or `2*ffn`; `/` must divide
exactly. What does not live here: how a table spells these (`schema.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import UsageError

_TOKEN = re.compile(r"\s*([a-z_][a-z0-9_]*|\d+)\s*")


@dataclass(frozen=True, slots=True)
class Formula:
    """A sum of products: each term is factors, each a sign (`*` or `/`) and a dim's name or a number."""

    text: str
    terms: tuple[tuple[tuple[str, str | int], ...], ...]

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Return the formula that `text` spells; raise ValueError when it spells none."""
        terms = []
        for term in text.split("+"):
            factors: list[tuple[str, str | int]] = []
            for i, piece in enumerate(re.split(r"([*/])", "*" + term)[1:]):
                if i % 2 == 0:
                    sign = piece
                    continue
                match = _TOKEN.fullmatch(piece)
                if match is None:
                    raise ValueError(f"`{text}` is not a product or sum of dims and whole numbers")
                factors.append((sign, int(match[1]) if match[1].isdigit() else match[1]))
            terms.append(tuple(factors))
        return cls(text, tuple(terms))

    def names(self) -> frozenset[str]:
        """Return the dims that the formula names."""
        return frozenset(atom for term in self.terms for _, atom in term if isinstance(atom, str))

    def value(self, dim: Callable[[str], int]) -> int:
        """Return the number; raise ValueError on a quotient that is not whole."""
        total = 0
        for term in self.terms:
            product = 1
            for sign, atom in term:
                factor = atom if isinstance(atom, int) else dim(atom)
                if sign == "/" and (factor == 0 or product % factor):
                    raise ValueError(f"{product} / {factor} is not a whole number")
                product = product // factor if sign == "/" else product * factor
            total += product
        return total


@dataclass(frozen=True, slots=True)
class Dim:
    """A size: config.json's `key`, else `default`; a fixed number has no key."""

    key: str | None
    default: Formula | None


@dataclass(frozen=True, slots=True)
class Flag:
    """A yes or no: config.json's `key`, else `default`; a fixed answer has no key."""

    key: str | None
    default: bool | None


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Some of the layers.

    Either all that `complement` does not hold, or those from `start` on whose (index + offset) is a multiple of
    `every`, without those listed under config.json's `excluding`, and none when the dim `needs` is 0.
    """

    complement: str | None = None
    start: Formula | None = None
    every: Formula | None = None
    offset: int = 0
    excluding: str | None = None
    needs: str | None = None


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the dims, flags and layer sets of a catalogue come to, for one config.json."""

    config: Mapping[str, Any]
    dims: Mapping[str, Dim]
    multiples: Mapping[str, str]
    flags: Mapping[str, Flag]
    sets: Mapping[str, LayerSet]
    origin: str
    known: dict[str, int]

    def dim(self, name: str) -> int:
        """Return a dim; raise UsageError naming the config key, the table and the remedy when it is not known."""
        if name not in self.known:
            self.known[name] = self._dim(name)
            base = self.multiples.get(name)
            if base is not None and (self.dim(base) == 0 or self.known[name] % self.dim(base)):
                raise UsageError(
                    f"{self._said(name)} = {self.known[name]} is not a multiple of "
                    f"{self._said(base)} = {self.dim(base)}",
                    why=f"`{self.origin}` says that `{name}` is a multiple of `{base}`",
                    hint="config.json does not describe this model: take the one that came with the weights",
                )
        return self.known[name]

    def number(self, formula: Formula, origin: str) -> int:
        """Return a formula's value; `origin` names the table row that needs it."""
        try:
            return formula.value(self.dim)
        except ValueError as error:
            raise UsageError(f"`{formula.text}` cannot be computed: {error}", why=f"{origin} needs it") from None

    def flag(self, name: str) -> bool:
        """Return a flag; raise UsageError when config.json has something that is neither true nor false."""
        return self.answer(self.flags[name], name)

    def answer(self, flag: Flag, name: str) -> bool:
        """Return what a flag comes to; `name` is how errors call it."""
        value = None if flag.key is None else self.config.get(flag.key)
        if value is None:
            value = flag.default
        if not isinstance(value, bool):
            raise self._missing(flag.key, name, value, "true or false")
        return value

    def layers(self, name: str, total: int) -> tuple[int, ...]:
        """Return the indices, of `total` layers, that a layer set holds."""
        chosen, where = self.sets[name], f"`{self.origin}` [sets.{name}]"
        if chosen.complement is not None:
            others = set(self.layers(chosen.complement, total))
            return tuple(i for i in range(total) if i not in others)
        if chosen.needs is not None and self.dim(chosen.needs) == 0:
            return ()
        every = 1 if chosen.every is None else self.number(chosen.every, where)
        start = 0 if chosen.start is None else self.number(chosen.start, where)
        if every < 1:
            raise UsageError(f"a layer step of {every} chooses no layers", why=f"{where} needs 1 or more")
        without = self._excluded(chosen.excluding)
        return tuple(i for i in range(start, total) if (i + chosen.offset) % every == 0 and i not in without)

    def _excluded(self, key: str | None) -> set[int]:
        value = (None if key is None else self.config.get(key)) or []
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            raise UsageError(f"`{key}` in config.json is {value!r}, not a list of layer numbers")
        return set(value)

    def _dim(self, name: str) -> int:
        dim = self.dims[name]
        value = None if dim.key is None else self.config.get(dim.key)
        if value is None and dim.default is not None:
            try:
                value = dim.default.value(self.dim)
            except ValueError as error:
                raise UsageError(
                    f"config.json does not give `{dim.key}`, and {dim.default.text} does not either: {error}",
                    why=f"`{self.origin}` [dims] `{name}`",
                    hint=f'add `"{dim.key}"` to config.json',
                ) from None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._missing(dim.key, name, value, "a whole number")
        return value

    def _said(self, name: str) -> str:
        key = self.dims[name].key
        return f"`{name}`" if key is None else f"`{key}`"

    def _missing(self, key: str | None, name: str, value: object, wanted: str) -> UsageError:
        said = f"`{key}` in config.json is {value!r}, not {wanted}"
        return UsageError(
            f"config.json has no `{key}`" if value is None else said,
            why=f"`{self.origin}` computes `{name}` from it",
            hint=f'add `"{key}"` to config.json, or pass the right one with `--config`',
        )
