"""A tokenised corpus as a MindRecord file, written and read by MindSpore: one document a record.

    input_ids   int32 (T,)   the document's tokens
    loss_mask   int32 (T,)   1: the token counts in the loss where the one before it predicts it
    digest      string       XXH3-64 of all records up to this one, in hex

Documents are kept, not rows: the same file serves any `seq_length`, packed or padded, and gives the rows that the JSONL
file gave. MindSpore notices no altered byte, and the digest does. Files of others need `input_ids` only, and may have
`loss_mask` or `labels`, as a JSONL line may. An index lies beside the file, in `NAME.mindrecord.db`, and has the name
of the file in it: both may be moved to another folder together, and neither can be renamed.

What does not live here: rows (`packing.py`, `corpus.py`). MindSpore is imported when a function is called.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ckptkit.errors import CorruptError, ResourceError, UsageError
from ckptkit.formats import files
from ckptkit.formats.disk import disk_error, fsync_file, fsync_folder
from ckptkit.train.documents import Documents, DocumentsBuilder, Flags, Ints, Longs, ids_document
from ckptkit.verification.runners.frameworks import framework

if TYPE_CHECKING:
    from ckptkit.train.corpus import Corpus

SUFFIX = ".mindrecord"
INDEX_SUFFIX = ".db"
_DIGEST = "digest"
_SCHEMA = {
    "input_ids": {"type": "int32", "shape": [-1]},
    "loss_mask": {"type": "int32", "shape": [-1]},
    _DIGEST: {"type": "string"},
}
_BLOCK = 256  # records handed to MindSpore at a time
_OPTIONAL = ("loss_mask", "labels", "attention_mask", _DIGEST)


def write_mindrecord(corpus: Corpus, path: Path) -> None:
    """Write all documents that a corpus was made of to `path`, which ends in `.mindrecord`, and its index beside it.

    Both appear when they are complete, the index first. UsageError when one is there already, or MindSpore is not;
    ResourceError when they cannot be written.
    """
    if path.suffix != SUFFIX:
        raise UsageError(f"`{path}` does not end in `{SUFFIX}`", hint=f"call it `{path.stem}{SUFFIX}`")
    there = [file for file in (path, _index_of(path)) if files.look(file) is not None]
    if there:
        raise UsageError(f"`{there[0]}` exists already", hint="choose another name, or remove it")
    writer_of = _mindspore("mindspore.mindrecord").FileWriter
    try:
        # MindSpore writes the name of the file into it, so it is written under its own, in another folder
        with tempfile.TemporaryDirectory(prefix=f".tmp-{path.stem}-", dir=path.parent) as folder:
            part = Path(folder) / path.name
            _write(writer_of, corpus.documents, part)
            for file in (_index_of(part), part):
                fsync_file(file)
                file.replace(path.with_name(file.name))
            fsync_folder(path.parent)
    except OSError as error:
        raise disk_error(error, path, why="", then="then write it again") from error
    except RuntimeError as error:
        raise ResourceError(f"cannot write `{path}`: {_reason(error)}", hint="check the folder and the disk") from error


def _write(writer_of: Any, documents: Documents, path: Path) -> None:
    writer = writer_of(str(path), shard_num=1)
    writer.add_schema(_SCHEMA, "documents of ckptkit")
    chain = _Chain()
    for first in range(0, len(documents), _BLOCK):
        block = []
        for index in range(first, min(first + _BLOCK, len(documents))):
            ids_T, learned_T = documents.document(index)
            digest = chain.add(ids_T, learned_T)
            block.append({"input_ids": ids_T, "loss_mask": learned_T.astype(np.int32), _DIGEST: digest})
        writer.write_raw_data(block)
    writer.commit()


def read_mindrecord(path: Path, *, ids_key: str, vocab: int, option: str) -> Documents:
    """Return the documents of a MindRecord file, in its order; `vocab` is how many rows the embedding has.

    `option` is where the user named the file.

    UsageError when the file, its index or MindSpore is missing, when it has no column `ids_key`, and for ids that the
    embedding does not have; CorruptError when it cannot be read, or when a record is not the one that was written.
    """
    files.regular_file(path, option)
    if files.look(_index_of(path)) is None:
        raise UsageError(
            f"`{path}` has no index: there is no `{_index_of(path).name}` beside it",
            why="a MindRecord is two files, and MindSpore reads neither without the other",
            hint="copy both, and do not rename them: the index has the name of the file in it",
        )
    builder, chain = DocumentsBuilder(path, "record", vocab), _Chain()
    for number, record in enumerate(_records(path, ids_key), 1):
        where = f"record {number} of `{path}`"
        ids_T, learned_T = ids_document(where, record, ids_key)
        if _DIGEST in record and chain.add(ids_T, learned_T) != str(record[_DIGEST]):
            raise CorruptError(f"{where} is not what was written: its digest differs", hint="write or copy it again")
        builder.add(number, ids_T, learned_T)
    return builder.finish()


def _records(path: Path, ids_key: str) -> Iterator[dict[str, Any]]:
    dataset_of = _mindspore("mindspore.dataset").MindDataset
    try:
        # one worker and no shuffling: the order of the file
        columns = dataset_of(str(path), num_parallel_workers=1, shuffle=False).get_col_names()
        if ids_key not in columns:
            raise UsageError(
                f"`{path}` has no column `{ids_key}`",
                items=[f"it has `{column}`" for column in columns],
                hint="name the column of token ids with `data.ids_key`",
            )
        wanted = [ids_key, *(column for column in _OPTIONAL if column in columns)]
        dataset = dataset_of(str(path), columns_list=wanted, num_parallel_workers=1, shuffle=False)
        yield from dataset.create_dict_iterator(num_epochs=1, output_numpy=True)
    except (RuntimeError, ValueError) as error:
        raise CorruptError(
            f"`{path}` cannot be read: {_reason(error)}",
            hint="copy both files again, under the names that they were written with",
        ) from error


class _Chain:
    """The digest of all records up to one: a record that is altered, lost or elsewhere alters it."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def add(self, ids_T: Ints | Longs, learned_T: Flags) -> str:
        """Return the digest that a record has, in hex."""
        self._state.update(len(ids_T).to_bytes(8, "little") + ids_T.astype("<i4").tobytes() + learned_T.tobytes())
        return str(self._state.hexdigest())


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + INDEX_SUFFIX)


def _reason(error: Exception) -> str:
    """Return the line of MindSpore's message that says something."""
    text = str(error)
    found = re.search(r"\[ERROR\] (?:\[[^\]]*\] ?)?(.+)", text)
    return (found[1] if found else text.partition("\n")[0]).strip().rstrip(".")


def _mindspore(name: str) -> Any:
    return framework(name, extra="train", asked_by="a MindRecord file", instead="give the corpus as JSONL")
