"""From a file to documents: which reader it needs, and what each line becomes.

What does not live here: the readers themselves (`jsonl.py`, `mindrecord.py`), tokens of text (`tokenizing.py`).
"""

from __future__ import annotations

from pathlib import Path

from ckptkit.errors import UsageError
from ckptkit.formats.json_lines import Oddities, no_lines
from ckptkit.train import jsonl
from ckptkit.train.documents import DataSettings, Documents, DocumentsBuilder, ids_document
from ckptkit.train.mindrecord import SUFFIX, read_mindrecord
from ckptkit.train.tokenizing import TextTokenizer, open_tokenizer

MINDRECORD = "mindrecord"


def read_documents(
    data: DataSettings, path: Path | None, model_folder: Path, vocab: int
) -> tuple[Documents, list[str]]:
    """Return the documents of `data.path`, or of `path`, and notes for the log; errors are those of `open_corpus`."""
    file, option = (data.path, "`data.path`") if path is None else (path, "`eval.path`")
    is_mindrecord = file.suffix == SUFFIX
    if data.format == MINDRECORD or (data.format == jsonl.AUTO and is_mindrecord):
        return read_mindrecord(file, ids_key=data.ids_key, vocab=vocab, option=option), []
    if is_mindrecord:
        raise UsageError(
            f"`{file}` is MindRecord, and `data.format` is `{data.format}`", hint="set `data.format: mindrecord`"
        )
    return _read_jsonl(data, file, option, model_folder, vocab)


def _read_jsonl(
    data: DataSettings, file: Path, option: str, model_folder: Path, vocab: int
) -> tuple[Documents, list[str]]:
    oddities, builder = Oddities(), DocumentsBuilder(file, "line", vocab)
    kind: str | None = None
    tokenizer: TextTokenizer | None = None
    joined = 0
    for line in jsonl.read_lines(file, oddities, option):
        kind = jsonl.kind_of(file, line, data, kind)
        if kind == jsonl.IDS:
            ids, learned = ids_document(f"line {line.number} of `{file}`", line.row, data.ids_key)
            builder.add(line.number, ids, learned)
            continue
        tokenizer = tokenizer or open_tokenizer(data, model_folder)
        joined += _add_text(builder, file, line, kind, data, tokenizer)
    if kind is None:
        raise no_lines(file)
    return builder.finish(), oddities.notes(file) + _notes(tokenizer, joined)


def _add_text(
    builder: DocumentsBuilder, file: Path, line: jsonl.Line, kind: str, data: DataSettings, tokenizer: TextTokenizer
) -> bool:
    """Add a line of text; tell whether one of its tokens reaches over prompt and response."""
    *prompt_keys, text_key = jsonl.keys_of(kind, data)
    prompt = "".join(jsonl.text_of(file, line, key) for key in prompt_keys)
    text = jsonl.text_of(file, line, text_key)
    if not text.strip():
        builder.skip_empty()
        return False
    made = tokenizer.document(text, prompt)
    builder.add(line.number, made.ids, made.learned)
    return made.joined


def _notes(tokenizer: TextTokenizer | None, joined: int) -> list[str]:
    if tokenizer is None:
        return []
    found = [f"tokens by `{tokenizer.file}`"]
    if tokenizer.eos is not None:
        found.append(f"documents end with the token {tokenizer.eos}, which `{tokenizer.eos_from}` names")
    if joined:
        found.append(
            f"{joined} documents have other tokens at the border of prompt and response than the prompt alone has:"
            " those that reach into the response count in the loss"
        )
    return found
