"""Options that do nothing in a conversion: refused when somebody asked for them, passed over when they are defaults.

A `ckptkit.toml` serves both directions and both formats, so what stands there need not fit each of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ckptkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Defaults:
    """`names` are the options, as `convert` calls them, that nobody typed; `notes` says what was passed over."""

    names: Collection[str] = ()
    notes: list[str] = field(default_factory=list)

    def pass_over(self, name: str, error: UsageError) -> None:
        """Note that option `name` is passed over, for what `error` says; raise it when the option is no default."""
        if name not in self.names:
            raise error
        self.notes.append(f"`{name.replace('_', '-')}` of ckptkit.toml passed over: {error.what}")
