"""Every error that ckptkit raises on purpose, and the exit code of each.

    CkptkitError                    (abstract)
     +-- UsageError            2    wrong options, paths or names; a table that breaks the schema
     +-- CoverageError         3    tensors missing, unmapped or contradictory
     +-- ResourceError         4    no space, no memory, a disk that fails
     +-- CorruptError          5    a file that is damaged
     |    +-- UnsafeError      5    a file that would run code, or that hides what it holds
     +-- DivergedError         6    training that cannot go on: NaN, or an overflow at every loss scale
     +-- InternalError        70    a broken promise of ckptkit itself

Exit code 0 is success and 1 is "a difference was found", which is a result and not an error. What does not live
here: how a message reaches the terminal (`cli/run.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

SHOWN_ITEMS = 5


def printable(text: str) -> str:
    """Return a text for one line of a terminal: what cannot be printed (line breaks, half characters) is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class CkptkitError(Exception):
    """Say what happened, why it matters and how to fix it.

    `what` is one lower-case line without a final period; `items` are the things concerned (the first five are
    shown, then a count); `why` and `hint` are each a line, or empty.
    """

    exit_code = 70

    def __init__(self, what: str, *, items: Sequence[str] = (), why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.items = tuple(items)
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        lines = [printable(self.what)]
        lines += [f"  {printable(item)}" for item in self.items[:SHOWN_ITEMS]]
        if len(self.items) > SHOWN_ITEMS:
            lines[-1] += f"   ... and {len(self.items) - SHOWN_ITEMS} more"
        if self.why:
            lines.append(f"why: {self.why}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class UsageError(CkptkitError):
    """Options, paths or names that cannot be right."""

    exit_code = 2


class CoverageError(CkptkitError):
    """Tensors that are missing, that no rule names, or that contradict a claim about them."""

    exit_code = 3


class ResourceError(CkptkitError):
    """The disk is full, read-only or failing, or memory does not suffice."""

    exit_code = 4


class CorruptError(CkptkitError):
    """A file whose bytes are not what its format or its manifest says."""

    exit_code = 5


class UnsafeError(CorruptError):
    """A file that would run code when loaded, or that is encrypted."""


class DivergedError(CkptkitError):
    """Training that cannot go on: a loss or a gradient that is NaN, or an overflow at every loss scale."""

    exit_code = 6


class InternalError(CkptkitError):
    """A promise that ckptkit made to itself and broke; always a bug."""

    exit_code = 70
