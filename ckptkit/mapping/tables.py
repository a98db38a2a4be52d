"""Find the tables, and choose among them: by family, alias, config.json, or the names in a checkpoint.

The tables are TOML files: in a wheel they lie in `ckptkit/mappings`, in a checkout in `mappings/`. A file is parsed
when it is first needed. `hf/<family>.toml` is a catalogue; `<dialect>/<family>.toml` and
`<dialect>/<family>.<variant>.toml` are dialect tables. No numpy here: `inspect` works without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.mapping import names
from ckptkit.mapping.link import check_catalogue, check_dialect, extend_catalogue, override
from ckptkit.mapping.rows import Catalogue, DialectTable, Family, MapRow
from ckptkit.mapping.schema import parse_catalogue, parse_dialect, parse_file, read_toml

HUB = "hf"
MINDFORMERS = ("mindformers-legacy", "mindformers-mcore")
Key = tuple[str, str, str]  # dialect, family, variant
Words = Callable[[Catalogue], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Match:
    """How far a table fits a checkpoint's names: `matched` of its `total` names, `absent` patterns found nowhere."""

    family: str
    dialect: str
    variant: str
    matched: int
    total: int
    absent: int


class Tables:
    """All tables within reach. Holds the parsed ones, so that each file is read once."""

    def __init__(self, folder: Path, extra: Sequence[Path] = ()) -> None:
        self._paths = _list_tables(folder)
        self._folder = folder
        self._catalogues: dict[str, Catalogue] = {}
        self._dialects: dict[Key, DialectTable] = {}
        self._linked: dict[str, Catalogue] = {}
        self._checked: dict[Key, DialectTable] = {}
        self._own: set[str] = set()
        for path in extra:
            self._take(path)

    def families(self) -> tuple[str, ...]:
        """Return the names of all families, sorted."""
        found = {family for dialect, family, variant in self._paths if dialect == HUB and not variant}
        return tuple(sorted(found | set(self._catalogues)))

    def family(self, name: str) -> Family:
        """Return a family by its name or an alias; raise UsageError listing the families when there is none."""
        found = self._find(name.lower(), _names)
        if found is None:
            near = get_close_matches(name.lower(), self._words(), 3)
            raise UsageError(
                f"unknown family `{name}`",
                items=[f"did you mean {n}?" for n in near],
                why=f"the families are {', '.join(self.families())}",
                hint="give your own table with `--table FILE`",
            )
        return found

    def for_config(self, config: Mapping[str, Any]) -> Family:
        """Return the family of a config.json: by its model_type, or without one by its architectures."""
        kind, architectures = config.get("model_type"), config.get("architectures") or []
        found = self._find(kind, _model_types) if isinstance(kind, str) else None
        for name in architectures if kind is None and isinstance(architectures, list) else []:
            found = found or self._find(name, _architectures)
        if found is None:
            said = f'model_type "{kind}"' if kind is not None else "no model_type"
            raise UsageError(
                f"config.json says {said}, which no table knows",
                why=f"the families are {', '.join(self.families())}",
                hint="name the family with `--model` if this is one of them under another name (equal tensor names do "
                "not make equal arithmetic), or give your own table with `--table FILE`",
            )
        return found

    def dialects(self, family: Family | str) -> tuple[str, ...]:
        """Return the dialects, other than `hf`, that a family has tables for."""
        name = family if isinstance(family, str) else family.name
        found = {d for d, f, variant in self._keys() if f == name and not variant and d != HUB}
        return tuple(sorted(found))

    def variants(self, family: Family | str, dialect: str) -> tuple[str, ...]:
        """Return the variants of a family's dialect, those that it takes from the family it extends included."""
        name = family if isinstance(family, str) else family.name
        chain = self._chain(name, dialect)
        return tuple(sorted({v for d, f, v in self._keys() if d == dialect and f in chain and v}))

    def mindformers_dialect(self, family: Family) -> str:
        """Return the family's MindFormers naming: legacy where it exists, else mcore."""
        known = self.dialects(family)
        for dialect in MINDFORMERS:
            if dialect in known:
                return dialect
        raise UsageError(
            f"the {family.name} family has no MindFormers table",
            why=f"its dialects are {', '.join((HUB, *known))}",
            hint="name a dialect with `--to`, or give your own table with `--table FILE`",
        )

    def detect(self, tensors: Collection[str], family: Family | None = None) -> list[Match]:
        """Return the tables that know some of the names, the best fit first.

        Tables with equal names (another order inside fused tensors) fit equally and are all returned.
        """
        counts = Counter(names.skeletons(tensors))
        families = [family] if family is not None else [self.family(name) for name in self.families()]
        found = []
        for candidate in families:
            for dialect in (HUB, *self.dialects(candidate)):
                for variant in ("", *self.variants(candidate, dialect)):
                    match = _match(candidate, candidate.table(dialect, variant), counts)
                    if match.matched:
                        found.append(match)
        return sorted(found, key=lambda m: (-m.matched, m.absent, m.dialect != HUB))

    def check(self) -> tuple[str, ...]:
        """Parse and link every table and return their files; raise UsageError on the first fault."""
        files: dict[str, None] = {}
        self._check_claims()
        for name in self.families():
            family = self.family(name)
            for dialect in (HUB, *self.dialects(name)):
                for variant in ("", *self.variants(name, dialect)):
                    files |= dict.fromkeys(family.table(dialect, variant).files)
        strays = sorted({f for _, f, _ in self._keys()} - set(self.families()))
        if strays:
            raise UsageError(f"there are dialect tables for `{strays[0]}`, but no `hf/{strays[0]}.toml`")
        return tuple(files)

    def _check_claims(self) -> None:
        """Raise UsageError when two families claim one name, model_type or architecture."""
        for words in (_names, _model_types, _architectures):
            for word in {w for name in self.families() for w in words(self._catalogue(name))}:
                self._find(word, words, all_files=True)

    def _keys(self) -> set[Key]:
        return set(self._paths) | set(self._dialects)

    def _take(self, path: Path) -> None:
        """Read a user's own file; what it holds goes before a shipped table of the same name."""
        catalogue, table = parse_file(read_toml(path, str(path)))
        if catalogue is not None:
            self._catalogues[catalogue.family] = catalogue
            self._own.add(catalogue.family)
        if table is not None:
            self._dialects[table.dialect, table.family, table.variant] = table

    def _find(self, word: str, words: Words, *, all_files: bool = False) -> Family | None:
        """Return the family that claims `word`; a user's own goes first, two shipped ones are an error.

        The family of that very name needs no look into the other files, unless `all_files` is set.
        """
        claims = [name for name in sorted(self._own) if word in words(self._catalogue(name))]
        if not claims and not all_files and word in self.families() and word in words(self._catalogue(word)):
            claims = [word]
        claims = claims or [name for name in self.families() if word in words(self._catalogue(name))]
        if len(claims) > 1:
            raise UsageError(
                f"`{word}` is claimed by two families, {claims[0]} and {claims[1]}",
                items=[self._catalogue(name).files[-1] for name in claims],
                hint="an alias, a model_type or an architecture belongs to one family",
            )
        return self._family(claims[0]) if claims else None

    def _words(self) -> list[str]:
        return [w for name in self.families() for w in (name, *self._catalogue(name).aliases)]

    def _family(self, name: str) -> Family:
        return Family(self._catalogue(name), lambda dialect, variant: self._table(name, dialect, variant))

    def _catalogue(self, name: str, above: tuple[str, ...] = ()) -> Catalogue:
        """Return a family's catalogue, joined with the one that it extends, checked."""
        if name not in self._linked:
            own = self._raw_catalogue(name, above)
            if own.extends is not None:
                own = extend_catalogue(self._catalogue(own.extends, (*above, name)), own)
            check_catalogue(own)
            self._linked[name] = own
        return self._linked[name]

    def _raw_catalogue(self, name: str, above: tuple[str, ...]) -> Catalogue:
        if name in above:
            raise UsageError(f"the catalogues of {' and '.join(above)} extend one another")
        if name not in self._catalogues:
            key = (HUB, name, "")
            if key not in self._paths:
                raise UsageError(f"`{above[-1]}` extends `{name}`, which has no catalogue")
            catalogue = parse_catalogue(read_toml(self._paths[key], self._label(key)))
            if catalogue.family != name:
                raise UsageError(f'{self._label(key)} says `family = "{catalogue.family}"`')
            self._catalogues[name] = catalogue
        return self._catalogues[name]

    def _raw_table(self, key: Key) -> DialectTable:
        if key not in self._dialects:
            table = parse_dialect(read_toml(self._paths[key], self._label(key)))
            if (table.dialect, table.family, table.variant) != key:
                raise UsageError(
                    f"{self._label(key)} says dialect `{table.dialect}`, family `{table.family}`, "
                    f"variant `{table.variant}`, which does not fit its name"
                )
            self._dialects[key] = table
        return self._dialects[key]

    def _label(self, key: Key) -> str:
        return f"mappings/{self._paths[key].relative_to(self._folder).as_posix()}"

    def _chain(self, family: str, dialect: str) -> tuple[str, ...]:
        """Return the families whose tables of a dialect build up a family's, itself last."""
        chain: tuple[str, ...] = (family,)
        while True:
            key = (dialect, chain[0], "")
            if dialect == HUB:
                base = self._raw_catalogue(chain[0], chain[1:]).extends
            elif key in self._keys():
                base = self._raw_table(key).extends
            else:
                return chain
            if base is None:
                return chain
            if base in chain:
                raise UsageError(f"the {dialect} tables of {' and '.join(chain)} extend one another")
            chain = (base, *chain)

    def _table(self, family: str, dialect: str, variant: str) -> DialectTable:
        """Return a dialect table, built up from those that it extends and from its variant's overrides, checked."""
        if (dialect, family, variant) not in self._checked:
            self._checked[dialect, family, variant] = self._build(family, dialect, variant)
        return self._checked[dialect, family, variant]

    def _build(self, family: str, dialect: str, variant: str) -> DialectTable:
        catalogue = self._catalogue(family)
        chain = self._chain(family, dialect)
        table = _identity(catalogue) if dialect == HUB else self._base(chain, dialect)
        if variant:
            overrides = [(dialect, name, variant) for name in chain if (dialect, name, variant) in self._keys()]
            if not overrides:
                raise UsageError(
                    f"the {dialect} tables of the {family} family have no variant `{variant}`",
                    items=self.variants(family, dialect),
                    hint="choose one of these, or none",
                )
            for key in overrides:
                table = override(table, self._raw_table(key))
        table = replace(table, family=family)
        check_dialect(table, catalogue)
        return table

    def _base(self, chain: tuple[str, ...], dialect: str) -> DialectTable:
        for name in chain:
            if (dialect, name, "") not in self._keys():
                raise UsageError(f"the {name} family has no {dialect} table", items=self.dialects(name))
        table = self._raw_table((dialect, chain[0], ""))
        for name in chain[1:]:
            table = override(table, self._raw_table((dialect, name, "")))
        return table


def load_tables(extra: Sequence[Path] = ()) -> Tables:
    """Return the shipped tables and a user's own `extra` files; only those are read at once."""
    packaged = Path(str(resources.files("ckptkit"))) / "mappings"
    folder = packaged if packaged.is_dir() else packaged.parents[1] / "mappings"
    if not folder.is_dir():
        raise UsageError("the mapping tables are missing", why=f"`{folder}` is no folder", hint="install ckptkit again")
    return Tables(folder, extra)


def _names(catalogue: Catalogue) -> tuple[str, ...]:
    return (catalogue.family, *catalogue.aliases)


def _model_types(catalogue: Catalogue) -> tuple[str, ...]:
    return catalogue.model_types


def _architectures(catalogue: Catalogue) -> tuple[str, ...]:
    return catalogue.architectures


def _list_tables(folder: Path) -> dict[Key, Path]:
    found = {}
    for path in sorted(folder.glob("*/*.toml")):
        family, _, variant = path.stem.partition(".")
        found[path.parent.name, family, variant] = path
    return found


def _identity(catalogue: Catalogue) -> DialectTable:
    """Return the hub as a spoke of itself: every tensor under its own name."""
    rows = tuple(MapRow((r.hf,), r.hf, (), None, None, r.stage, r.where) for r in catalogue.rows)
    return DialectTable(catalogue.family, HUB, "", None, "", rows, catalogue.ignores, (), (), catalogue.files)


def _match(family: Family, table: DialectTable, counts: Mapping[str, int]) -> Match:
    biased = {row.hf for row in family.catalogue.rows if row.bias is not None}
    matched = absent = 0
    for row in table.rows:
        patterns = [row.target, names.bias_name(row.target)] if row.hf[0] in biased else [row.target]
        found = [counts[names.pattern_skeleton(pattern)] for pattern in patterns]
        matched += sum(found)
        absent += found[0] == 0
    return Match(family.name, table.dialect, table.variant, matched, sum(counts.values()), absent)
