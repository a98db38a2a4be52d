"""The devices that runners are told to use, in the words of the command line. What each framework calls them: there."""

from __future__ import annotations

from ckptkit.errors import UsageError

_KINDS = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "ascend": "ascend", "npu": "ascend"}


def parse_device(name: str, *, option: str = "--device") -> tuple[str, int]:
    """Return the kind of a device (`cpu`, `cuda`, `ascend`) and its number.

    UsageError for anything but `cpu`, `cuda` (or `gpu`) and `ascend` (or `npu`), the latter two also with a number.
    """
    word, colon, number = name.partition(":")
    kind = _KINDS.get(word)
    if kind is None or (colon and (kind == "cpu" or not number.isdecimal())):
        raise UsageError(
            f"`{option} {name}` is no device", hint="`cpu`, `cuda`, `ascend`, or one of the last two with its number"
        )
    return kind, int(number or 0)
