"""Typed access to a parsed TOML table; every complaint names the file and the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ckptkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Fields:
    """One TOML table and where it stands (`mappings/hf/llama.toml row 3`)."""

    data: Mapping[str, Any]
    where: str

    def error(self, what: str, hint: str = "") -> UsageError:
        """Return a UsageError that says where."""
        return UsageError(f"{self.where}: {what}", hint=hint)

    def only(self, *keys: str) -> None:
        """Raise unless every key is one of `keys`."""
        for key in self.data:
            if key not in keys:
                near = get_close_matches(key, keys, 1)
                hint = f"did you mean `{near[0]}`?" if near else f"the keys here are {', '.join(keys)}"
                raise self.error(f"unknown key `{key}`", hint)

    def has(self, key: str) -> bool:
        return key in self.data

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; raise when it is missing without a default, empty, or no text."""
        value = self.data.get(key, default)
        if value is None:
            raise self.error(f"`{key}` is missing")
        if not isinstance(value, str) or (not value and value != default):
            raise self.error(f"`{key}` must be a text, not {value!r}")
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self.data else None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of 0 or more."""
        value = self.data.get(key, default)
        if value is None:
            raise self.error(f"`{key}` is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"`{key}` must be a whole number of 0 or more, not {value!r}")
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in choices:
            raise self.error(f"`{key}` is `{value}`, which is none of {', '.join(choices)}")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list, or an empty one when the key is missing."""
        value = self.data.get(key, [])
        if not isinstance(value, list):
            raise self.error(f"`{key}` must be a list, not {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; one text alone counts as a list of one."""
        value = self.data.get(key, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise self.error(f"`{key}` must be a text or a list of texts, not {value!r}")
        return tuple(values)

    def table(self, key: str) -> Fields:
        """Return a sub-table, or an empty one when the key is missing."""
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.error(f"`{key}` must be a table, not {value!r}")
        return Fields(value, f"{self.where} [{key}]")

    def rows(self, key: str, label: str) -> list[Fields]:
        """Return the rows of `[[key]]`, numbered from 1."""
        rows = self.items(key)
        if not all(isinstance(row, dict) for row in rows):
            raise self.error(f"`{key}` must be written as [[{key}]] rows")
        return [Fields(row, f"{self.where} {label} {i}") for i, row in enumerate(rows, 1)]
