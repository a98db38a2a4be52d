"""A YAML file as plain data, and questions about its sections whose errors name the file and the key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import CorruptError, UsageError

MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The parsed file; a question raises UsageError when its answer has the wrong type."""

    path: str
    values: Mapping[str, Any]

    def section(self, *keys: str) -> Mapping[str, Any]:
        """Return a section, empty where there is none."""
        found: Any = self.values
        for depth, key in enumerate(keys, 1):
            found = found.get(key)
            if found is None:
                return {}
            if not isinstance(found, Mapping):
                raise self.error(f"`{'.'.join(keys[:depth])}` is `{found}`, not a section")
        section: Mapping[str, Any] = found
        return section

    def number(self, section: Mapping[str, Any], names: Sequence[str], least: int = 1) -> int | None:
        """Return the whole number that a section has under one of `names`; None where it has none."""
        given = {name: section[name] for name in names if section.get(name) is not None}
        for name, value in given.items():
            if type(value) is not int or value < least:
                raise self.error(f"`{name}` is `{value}`, not a whole number of {least} or more")
        if len(set(given.values())) > 1:
            raise self.error("; ".join(f"`{name}` is {value}" for name, value in given.items()), "they mean the same")
        return next(iter(given.values()), None)

    def flag(self, section: Mapping[str, Any], name: str, default: bool) -> bool:
        value = section.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"`{name}` is `{value}`, neither True nor False")
        return default if value is None else value

    def error(self, what: str, why: str = "", hint: str = "") -> UsageError:
        return UsageError(f"{self.path}: {what}", why=why, hint=hint)


def load_yaml(path: Path) -> YamlFile:
    """Parse a file into plain data. Raises CorruptError for what is no YAML, UsageError for a key that is there twice.

    PyYAML's safe loader takes the last of two equal keys, and nobody would learn which settings were dropped.
    """
    import yaml

    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise CorruptError(f"{path} has {len(data)} bytes, too many for settings")
    try:
        _refuse_twins(path, yaml.compose(data, yaml.SafeLoader))
        values = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise CorruptError(f"{path} does not hold sections with names")
    return YamlFile(str(path), values)


def _refuse_twins(path: Path, root: Any) -> None:
    """Raise UsageError where a section of the tree of YAML nodes `root` has a key twice."""
    todo, seen = [root], set()
    while todo:
        node = todo.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        pairs = [item for item in node.value if isinstance(item, tuple)]
        keys = Counter(key.value for key, _ in pairs if isinstance(key.value, str))
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            line = node.start_mark.line + 1
            raise UsageError(f"{path}: `{twice[0]}` is there twice in the section at line {line}", hint="keep one")
        todo += [value for _, value in pairs] + [item for item in node.value if not isinstance(item, tuple)]
