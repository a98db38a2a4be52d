"""The frameworks' own loaders and writers against the formats here.

MindSpore's `save_checkpoint` must be matched byte for byte; the safetensors library must accept what is laid out and
its files must be read.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_contract import FORMATS, assemble, check_read_back, random_contents, specs_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptkit.errors import CorruptError, UnsafeError
from ckptkit.formats import mindspore_ckpt, registry, safetensors
from ckptkit.formats.io import read_region
from ckptkit.types import DTYPES, TensorSpec

pytestmark = pytest.mark.frameworks

SAFETENSORS, CKPT = FORMATS
DTYPES_OF_MINDSPORE = [name for name in CKPT.dtypes if name != "STR"]


@pytest.fixture(scope="module")
def ms() -> Iterator[Any]:
    os.environ.setdefault("GLOG_v", "4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mindspore

        yield mindspore


def save_with_mindspore(
    ms: Any, file: Path, specs: Sequence[TensorSpec], contents: Mapping[str, bytes], **options: object
) -> bytes:
    """Save tensors by MindSpore and return the file's bytes; texts are given as text."""
    from mindspore.common._tensor import Tensor_ if False else None  # pragma: no cover
