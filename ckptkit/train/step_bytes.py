"""Arrays to the bytes of a file and back, hashed on the way: one after another, in blocks, with no copy.

Writing and hashing let other threads run. What does not live here: which tensor goes where (`step_files.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import xxhash

from ckptkit.formats.base import OutputFile
from ckptkit.formats.disk import disk_error
from ckptkit.train.arrays import Floats
from ckptkit.train.step_files import Tensors

_BLOCK_BYTES = 1 << 20


def write_tensors(path: Path, layout: OutputFile, arrays: Tensors) -> dict[str, str]:
    """Write a new file from its first byte to its last and wait until it is on disk; return the tensors' digests.

    `arrays` are all that `layout` has a place for. Raises ResourceError when the disk fails.
    """
    pieces = [(offset, "", memoryview(data)) for offset, data in layout.fixed]
    pieces += [(layout.extents[name][0].offset, name, bytes_of(array)) for name, array in arrays.items()]
    digests = {}
    try:
        with open(path, "xb", buffering=0) as stream:
            for _, name, data in sorted(pieces, key=lambda piece: (piece[0], len(piece[2]))):
                state = xxhash.xxh3_128()
                for start in range(0, len(data), _BLOCK_BYTES):
                    block = data[start : start + _BLOCK_BYTES]
                    state.update(block)
                    while block:
                        block = block[stream.write(block) :]
                if name:
                    digests[name] = state.hexdigest()
            os.fsync(stream.fileno())
    except OSError as error:
        raise disk_error(error, path) from error
    return digests


def bytes_of(array: Floats) -> memoryview:
    """Return an array's bytes in C order; they are copied only where they do not lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def digest_of(array: Floats) -> str:
    """Return the xxh3-128 of an array's bytes in C order, as manifests have it."""
    return xxhash.xxh3_128_hexdigest(bytes_of(array))
