"""The types of settings that are more than a number, a word or a flag: paths, sizes, lists, layers, devices.

Each takes what YAML gives, and raises a `Fault` for what it cannot be. What does not live here: the sections
(`config_models.py`), and how an error reads (`config_errors.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from ckptkit.errors import UsageError
from ckptkit.quantities import parse_bytes, parse_layers
from ckptkit.verification.runners.devices import parse_device


class PathMark:
    """Marks a setting that is a path, or a list of them: `config.py` completes these."""


class Fault(ValueError):
    """A value that is `what` ("not a size", "no device"), and the remedy; pydantic keeps it beside its own message."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}; {hint}")
        self.what = what
        self.hint = hint


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise Fault("not a path", "write a path; one that looks like a number needs quotes")
    return Path(value)


def _paths(value: object) -> tuple[Path, ...]:
    return tuple(map(_path, value)) if isinstance(value, (list, tuple)) else (_path(value),)


def _texts(value: object) -> tuple[str, ...]:
    texts = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    wrong = [text for text in texts if not isinstance(text, str) or not text]
    if wrong:
        raise Fault("not a list of texts", "write `[first, second]`, or one text")
    return texts


def _size(value: object) -> str:
    text = str(value) if type(value) is int else value
    hint = "write it like `6GB`, `500MB` or `2GiB`"
    if not isinstance(text, str):
        raise Fault("not a size", hint)
    try:
        parse_bytes(text)
    except ValueError:
        raise Fault("not a size", hint) from None
    return text


def _layers(value: object) -> object:
    hint = "write `none`, `all`, numbers and ranges (`0-3,7`), or a list of numbers"
    if value in ("none", "all"):
        return value
    if value is False or value is None:  # YAML 1.1 reads `off` and `no` so
        return "none"
    items = value if isinstance(value, (list, tuple)) else [value]
    if not all(type(item) is int or isinstance(item, str) for item in items):
        raise Fault("no selection of layers", hint)
    if not items:
        return "none"
    try:
        return parse_layers(",".join(map(str, items)))
    except ValueError as error:
        raise Fault(f"no selection of layers: {error}", hint) from None


def _loss_scale(value: object) -> object:
    if value == "dynamic":
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= 2.0**64:
        return float(value)
    raise Fault("not a loss scale", "write `dynamic`, or a number from 1 to 2**64 that stays as it is, such as `1024`")


def _device(value: object) -> str:
    try:
        kind, number = parse_device(str(value))
    except UsageError as error:
        raise Fault("no device", error.hint) from None
    return f"{kind}:{number}" if number else kind


PathSetting = Annotated[Path, BeforeValidator(_path), PathMark()]
PathsSetting = Annotated[tuple[Path, ...], BeforeValidator(_paths), PathMark()]
TextsSetting = Annotated[tuple[str, ...], BeforeValidator(_texts)]
SizeSetting = Annotated[str, BeforeValidator(_size)]
LayersSetting = Annotated[Literal["none", "all"] | tuple[int, ...], BeforeValidator(_layers)]
LossScaleSetting = Annotated[Literal["dynamic"] | float, BeforeValidator(_loss_scale)]
DeviceSetting = Annotated[str, BeforeValidator(_device)]


def is_path(field: FieldInfo) -> bool:
    """Is a setting a path (`PathSetting`, `PathSetting | None`, `PathsSetting`)?"""
    marks = [*field.metadata, *(mark for kind in get_args(field.annotation) for mark in _marks(kind))]
    return any(isinstance(mark, PathMark) for mark in marks)


def _marks(kind: object) -> tuple[object, ...]:
    marks: tuple[object, ...] = getattr(kind, "__metadata__", ())
    return marks
