"""A training config: a YAML file and `--set key=value`, checked, as a `TrainConfig`.

    config = load_config(Path("run.yaml"), ["optimizer.lr=1e-4"])

A path in the file is relative to the file's folder, so that a run can be moved as a whole; a path in `--set` is typed
in a shell and so is relative to the working folder. `~` is the home folder in both. `--set` replaces one key, or a
section as a whole, before anything is checked. A key that is not known is refused. No file but the config is opened.

The command alone imports this module: it loads pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ckptkit.errors import UsageError
from ckptkit.train.config_errors import problems_of, refuse, section_of
from ckptkit.train.config_models import ModelConfig, TrainConfig
from ckptkit.train.config_values import is_path
from ckptkit.train.config_yaml import parse_value, read_settings

__all__ = ["ModelConfig", "TrainConfig", "load_config"]


def load_config(path: Path, sets: Sequence[str] = ()) -> TrainConfig:
    """Read and check a config; UsageError names the file, the keys, what is wrong with them, and the remedy.

    `sets` are `key=value` with a dotted key and a value in YAML, applied in their order.
    """
    values = _completed(read_settings(path), TrainConfig, path.absolute().parent)
    keys = [_put(values, text) for text in sets]
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise refuse(path, keys, problems_of(error, TrainConfig)) from None


def _put(values: dict[str, Any], text: str) -> str:
    """Apply one `key=value` to the settings, and return its key."""
    key, equals, written = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise UsageError(f"`--set {text}` is not `key=value`", hint="write it like `--set optimizer.lr=1e-4`")
    fragment: Any = parse_value(written, f"--set {text}")
    for name in reversed(names):
        fragment = {name: fragment}
    fragment = _completed(fragment, TrainConfig, Path.cwd())
    place = values
    for name in names[:-1]:
        fragment, inner = fragment[name], place.get(name)
        if not isinstance(inner, Mapping | None):
            raise UsageError(
                f"`--set {text}`: `{name}` is no section", hint="`section.key=value`, as in `optimizer.lr=1e-4`"
            )
        place[name] = dict(inner or {})
        place = place[name]
    place[names[-1]] = fragment[names[-1]]
    return ".".join(names)


def _completed(values: Mapping[str, Any], model: type[BaseModel], folder: Path) -> dict[str, Any]:
    """Return settings with every path completed by `folder`, and an empty section as one without keys."""
    found = dict(values)
    for name, value in values.items():
        field = model.model_fields.get(name)
        section = section_of(field)
        if section is not None and value is None:
            found[name] = {}
        elif section is not None and isinstance(value, Mapping):
            found[name] = _completed(value, section, folder)
        elif field is not None and is_path(field):
            found[name] = _complete(value, folder)
    return found


def _complete(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_complete(item, folder) for item in value]
    if not isinstance(value, str) or not value or "\0" in value:
        return value  # refused when it is checked
    return folder / _home(Path(value))


def _home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"`{path}` begins with a home folder that is not known", hint="write the whole path"
        ) from error
