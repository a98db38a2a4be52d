"""The contract: TensorBoard's event files are written as others read them."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_log import at, opened

from ckptkit.errors import ResourceError
from ckptkit.train.log import Evaluation
from ckptkit.train.log_events import crc32c, crc_table, masked, open_events


def test_the_crc_is_that_of_the_standard() -> None:
    """RFC 3720, B.4: 32 bytes of zeros, of ones, and ascending ones; the check value of the nine digits."""
    table = crc_table()
    assert crc32c(bytes(32), table) == 0x8A9136AA
    assert crc32c(b"\xff" * 32, table) == 0x62A8AB43
    assert crc32c(bytes(range(32)), table) == 0x46DD794E
    assert crc32c(b"123456789", table) == 0xE3069283


_READ_EVENTS = """
import json, struct, sys
from pathlib import Path
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event
def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff
found = []
for file in sorted(Path(sys.argv[1]).glob("*tfevents*")):
    data = file.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked(data[:8]),)
        event = Event.FromString(data[12:12 + size])
        assert struct.unpack("<I", data[12 + size:16 + size]) == (masked(data[12:12 + size]),)
        assert event.wall_time > 1e9
        found.append([event.file_version, event.step, event.session_log.status,
                      {value.tag: value.simple_value for value in event.summary.value}])
        data = data[16 + size:]
print(json.dumps(found))
"""


def read_events(folder: Path) -> list[Any]:
    """Return version, step, session state and values of each event, as tensorboardX reads them."""
    words = [sys.executable, "-c", _READ_EVENTS, str(folder)]
    found: list[Any] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.frameworks
def test_another_implementation_reads_the_events(tmp_path: Path) -> None:
    for start in (0, 1):
        log, _ = opened(tmp_path, start=start, tensorboard=tmp_path / "board")
        log.step(at(start + 1, scale=256.0))
        log.step(at(start + 2, loss=1e300))
        log.eval(start + 2, Evaluation(loss=1.5, perplexity=4.5, tokens=9, seconds=0.1))
        log.close()
    found = read_events(tmp_path / "board")
    head, begin, one, two, held = found[:5]
    assert head[0] == "brain.Event:2"
    assert [entry[1:3] for entry in (begin, found[6])] == [[1, 1], [2, 1]], "START, at the first step of each process"
    assert one[1] == 1 and one[3]["train/loss"] == 2.5 and one[3]["train/scale"] == 256.0
    assert two[1] == 2 and two[3]["train/loss"] == math.inf and "train/scale" not in two[3]
    assert held[1] == 2 and held[3] == {"eval/loss": 1.5, "eval/perplexity": 4.5}


def test_a_wrong_crc_would_be_seen(tmp_path: Path) -> None:
    """The control: an event whose byte was changed has another crc."""
    events = open_events(tmp_path, 1)
    events.add(1, {"loss": 1.0})
    events.close()
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked(crc32c(data[12 : 12 + size], crc_table()))
    changed = bytes([data[12] ^ 1]) + data[13 : 12 + size]
    assert struct.unpack("<I", data[12 + size : 16 + size])[0] != masked(crc32c(changed, crc_table()))


def test_events_that_cannot_be_written_are_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match=r"cannot write .*tfevents"):
        open_events(tmp_path / "file", 1)
