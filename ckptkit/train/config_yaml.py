"""YAML as people write settings: `1e-5` is a number, `010` and `2024-01-01` are texts, and no key is there twice.

YAML 1.1, which PyYAML reads, takes `1e-5` for a text (no dot), `010` for 8, `1:30` for 90, and a date for no text.
What does not live here: what the settings mean. MindFormers' run files are read by `layout/yaml_file.py`, as YAML 1.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError

_MAX_BYTES = 1 << 20
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9_]*)\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:0|[1-9][0-9_]*)[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_REPLACED = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_SHAPE = "sections with keys: `optimizer:` and below it `  lr: 3e-4`"


def read_settings(path: Path) -> dict[str, Any]:
    """Return the sections of a file; UsageError for what cannot be read, is no YAML or has no sections."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{path}`: {reason}", hint="name the YAML file of a training run") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"`{path}` is too long for settings", hint=f"write {_SHAPE}")
    values = _load(data, f"`{path}`")
    if values is None:
        raise UsageError(f"`{path}` is empty", hint=f"write {_SHAPE}")
    if not isinstance(values, Mapping):
        raise UsageError(f"`{path}` has no sections", hint=f"write {_SHAPE}")
    return dict(values)


def parse_value(text: str, where: str) -> Any:
    """Return a value that was typed, such as `1e-4`, `true` or `[a, b]`; nothing is None. UsageError for no YAML."""
    return _load(text.encode("utf-8", "surrogateescape"), f"`{where}`")


def _load(data: bytes, where: str) -> Any:
    import yaml

    if not _is_text(data):
        raise UsageError(f"{where} is no text", hint="save it as UTF-8")
    loader = _loader_class()(data)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_keys(node, where)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is no YAML: {_first_line(error)}", hint="mind indents, colons and quotes") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no YAML that holds settings", hint=f"write {_SHAPE}") from error
    finally:
        loader.dispose()


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c in "\t\r\n" for c in text)


def _loader_class() -> Any:
    """Return PyYAML's safe loader with numbers as YAML 1.2 has them, and without dates."""
    import yaml

    kept = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in _REPLACED]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": kept})
    for tag, pattern in (("int", _INT), ("float", _FLOAT)):
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", _whole(pattern), list("-+.0123456789"))
    return loader


def _whole(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern for a whole scalar: PyYAML only matches from the beginning."""
    return re.compile(f"(?:{pattern.pattern})\\Z")


def _check_keys(root: Any, where: str) -> None:
    """Raise UsageError where a section has a key twice or a key that is no text, and for aliases.

    PyYAML takes the last of two equal keys; which of them was meant nobody would learn.
    """
    todo = [(root, "")]
    seen = set()
    while todo:
        node, name = todo.pop()
        if id(node) in seen:
            raise UsageError(f"{where}: an alias (`*name`) is used", hint="write the value out")
        seen.add(id(node))
        if not isinstance(node.value, list):
            continue
        keys = set()
        for item in node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            if key is None:
                todo.append((value, name))
                continue
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                raise UsageError(f"{where}: line {line} has a key that is no text", hint=f"write {_SHAPE}")
            dotted = f"{name}.{key.value}" if name else key.value
            if key.value in keys:
                raise UsageError(f"{where}: `{dotted}` is there twice, again in line {line}", hint="keep one of them")
            keys.add(key.value)
            todo.append((value, dotted))


def _first_line(error: Exception) -> str:
    """Return what PyYAML says, in one line, without the name that it gives to data in memory."""
    return " ".join(str(error).replace('in "<byte string>", ', "").split())
