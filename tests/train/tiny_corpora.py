"""Corpora of a few lines, and a tokenizer of whole words, for the tests of the training data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.train.corpus import Corpus, make_corpus, open_corpus
from ckptkit.train.documents import Documents, DocumentsBuilder

VOCAB = 100
WORDS = ("<unk>", "<s>", "</s>", "a", "b", "c", "d", "e", "ab")
UNK, START, END, A, B, C, D, E, AB = range(len(WORDS))


@dataclass(frozen=True, slots=True)
class Data:
    """The section `data` of a configuration, without pydantic."""

    path: Path
    seq_length: int = 8
    format: str = "auto"
    packing: bool = True
    tokenizer: Path | None = None
    text_key: str = "text"
    prompt_key: str = "prompt"
    response_key: str = "response"
    ids_key: str = "input_ids"
    eos: bool = True


def write_lines(file: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSON lines; a text is written as it is."""
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def write_model(folder: Path, *, template: Sequence[str] = (), eos: str | None = "</s>", **more: Any) -> Path:
    """Write a tokenizer.json of whole words, and who ends a document; `template` is what is put around a text."""
    special = [
        {"id": number, "content": WORDS[number], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for number in (START, END)
    ]  # fmt: skip
    around = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}} if one == "$A" else {"SpecialToken": {"id": one, "type_id": 0}}
            for one in template
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {WORDS[n]: {"id": WORDS[n], "ids": [n], "tokens": [WORDS[n]]} for n in (START, END)},
    }
    found = {
        "version": "1.0", "added_tokens": special, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": around if template else None,
        "model": {"type": "WordLevel", "vocab": {w: n for n, w in enumerate(WORDS)}, "unk_token": "<unk>"},
        **more,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(found))
    if eos is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


def documents(lists: Sequence[Sequence[int]], learned: Sequence[Sequence[bool]] | None = None) -> Documents:
    """Return documents of these ids, all of which count in the loss unless `learned` says otherwise."""
    builder = DocumentsBuilder(Path("memory"), "line", 1 << 31)
    for number, ids in enumerate(lists):
        builder.add(number + 1, ids, [True] * len(ids) if learned is None else learned[number])
    return builder.finish()


def corpus_of(
    lists: Sequence[Sequence[int]], seq_length: int = 8, *, packing: bool = True, learned: Any = None
) -> Corpus:
    """Return a corpus of these ids, without a file."""
    made = documents(lists, learned)
    return make_corpus(made, seq_length=seq_length, packing=packing, source="memory", notes=())


def numbered(rows: int, seq_length: int = 4) -> Corpus:
    """Return a corpus of which each row is full of its own number, as gen/T01 has it."""
    return corpus_of([[number] * seq_length for number in range(rows)], seq_length)


def open_rows(tmp_path: Path, rows: Sequence[Any], *, vocab: int = VOCAB, **settings: Any) -> Corpus:
    """Write rows beside a model with a tokenizer of words, unless there is one, and open them."""
    if not (tmp_path / "tokenizer.json").exists():
        write_model(tmp_path)
    return open_corpus(Data(write_lines(tmp_path / "text.jsonl", rows), **settings), tmp_path, vocab)
