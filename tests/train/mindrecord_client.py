"""Write and read corpora with MindSpore's MindRecord, in a process of its own; see `arithmetic.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from arithmetic import main
from tiny_corpora import Data, write_lines

from ckptkit.errors import CkptkitError
from ckptkit.train.corpus import Corpus, open_corpus
from ckptkit.train.mindrecord import write_mindrecord

VOCAB = 1 << 31
EDGES = [0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1]  # MindSpore stores numbers by their size
SHAPES = [(packing, length) for packing in (True, False) for length in (7, 64)]


def rows() -> list[dict[str, Any]]:
    """Return 700 documents of 0 to 200 tokens, every third with a mask, and one of ids that are hard to store."""
    random = np.random.default_rng(20270107)
    found = []
    for number in range(700):
        ids = random.integers(0, 1000, int(random.integers(0, 201))).tolist()
        mask = random.integers(0, 2, len(ids)).tolist()
        found.append({"input_ids": ids, "loss_mask": mask} if number % 3 == 0 else {"input_ids": ids})
    return [*found, {"input_ids": EDGES}]


def digest(corpus: Corpus) -> str:
    state = xxhash.xxh3_128()
    for index in range(len(corpus)):
        row = corpus.row(index)
        for array in (row.ids_T, row.targets_T, row.weights_T, row.positions_T, row.segments_T):
            state.update(array.tobytes())
    return str(state.hexdigest())


def kept(corpus: Corpus) -> list[int]:
    """Return the figures that a MindRecord can know: what was skipped when it was made is not in it."""
    found = corpus.statistics
    return [found.documents, found.rows, found.tokens, found.targets, found.cut, found.left_out]


def error_of(function: Callable[[], object]) -> dict[str, str]:
    try:
        function()
    except CkptkitError as error:
        return {"kind": type(error).__name__, "what": error.what, "hint": error.hint}
    return {"kind": "none", "what": "", "hint": ""}


def foreign(folder: Path) -> Corpus:
    """Return the corpus of a file as other tools write it: int64 ids, labels, no digest."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(folder / "foreign.mindrecord"))
    writer.add_schema({"input_ids": {"type": "int64", "shape": [-1]}, "labels": {"type": "int64", "shape": [-1]}}, "")
    lists = (([1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7], [-100, -100, 6, 7]))
    writer.write_raw_data([{"input_ids": np.array(a), "labels": np.array(b)} for a, b in lists])
    writer.commit()
    return open_corpus(Data(folder / "foreign.mindrecord"), folder, VOCAB)


def copy(source: Path, folder: Path) -> Path:
    """Return a copy of a MindRecord, its index with it, in another folder."""
    folder.mkdir()
    for file in (source, source.with_name(f"{source.name}.db")):
        shutil.copy(file, folder)
    return folder / source.name


def damage(source: Path, folder: Path) -> dict[str, dict[str, str]]:
    """Return the errors of copies that are damaged, each in its own way."""

    def opened(file: Path, vocab: int = VOCAB, **more: Any) -> dict[str, str]:
        return error_of(lambda: open_corpus(Data(file, **more), folder, vocab))

    found = {"other column": opened(source, ids_key="tokens"), "small vocab": opened(source, 2)}
    file = copy(source, folder / "no-index")
    file.with_name(f"{file.name}.db").unlink()
    found["no index"] = opened(file)
    file = copy(source, folder / "renamed")
    for part in sorted(file.parent.iterdir()):
        part.rename(part.with_name(part.name.replace("corpus", "other")))
    found["renamed"] = opened(file.with_name("other.mindrecord"))
    file = copy(source, folder / "cut")
    file.write_bytes(source.read_bytes()[: source.stat().st_size // 3])
    found["cut"] = opened(file)
    file = copy(source, folder / "none")
    file.write_bytes(b"no MindRecord " * 5000)
    found["no MindRecord"] = opened(file)
    file = copy(source, folder / "bit")
    data = bytearray(file.read_bytes())
    stored = np.array(rows()[100]["input_ids"][:8], "<i2").tobytes()  # MindSpore keeps numbers as small as they are
    data[data.index(stored) + 12] ^= 1
    file.write_bytes(data)
    found["one bit"] = opened(file)
    return found


def together(room: str) -> dict[str, Any]:
    """Return what came of corpora that are written to and read from files in the folder `room`."""
    folder = Path(room)
    lines = write_lines(folder / "corpus.jsonl", rows())
    out = folder / "out"
    out.mkdir()
    target = out / "corpus.mindrecord"
    first = open_corpus(Data(lines), folder, VOCAB)
    write_mindrecord(first, target)
    again = open_corpus(Data(target), folder, VOCAB)
    digests = {
        f"{packing} {length}": [
            digest(open_corpus(Data(file, length, packing=packing), folder, VOCAB)) for file in (lines, target)
        ]
        for packing, length in SHAPES
    }
    listing = sorted(file.name for file in out.iterdir())
    other = foreign(folder)
    errors = damage(target, folder)
    errors["there already"] = error_of(lambda: write_mindrecord(first, target))
    errors["no folder"] = error_of(lambda: write_mindrecord(first, folder / "gone" / "a.mindrecord"))
    return {
        "digests": digests,
        "fingerprints": [first.fingerprint, again.fingerprint],
        "statistics": [kept(first), kept(again)],
        "listing": listing,
        "moved": open_corpus(Data(copy(target, folder / "moved")), folder, VOCAB).fingerprint,
        "foreign": [other.documents.document(index)[0].tolist() for index in range(len(other.documents))],
        "foreign_weights": other.row(0).weights_T.tolist(),
        "errors": errors,
    }


if __name__ == "__main__":
    main({"together": together})
