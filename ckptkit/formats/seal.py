"""The seal of a JSON file that says what other files hold: its last entry, the digest of all bytes before it."""

from __future__ import annotations

import xxhash

_BEGINS = b',\n "seal": '


def sealed(body: bytes) -> bytes:
    """Return a JSON object with its seal; `body` is its text up to its last entry, without the brace that ends it."""
    return body + _BEGINS + f'"{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def is_sealed(data: bytes) -> bool:
    """Say whether a file's bytes are those that `sealed` returned."""
    return data == sealed(data[: data.rfind(_BEGINS)])
