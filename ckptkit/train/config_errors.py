"""What pydantic found, in words: the key, what is wrong with it, and the remedy; the nearest known key for a typo.

What does not live here: the checks themselves (`config_models.py`, `config_checks.py`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ckptkit.errors import UsageError
from ckptkit.train.config_checks import Contradictions, Problem
from ckptkit.train.config_values import Fault

# what other trainers call them
_ELSEWHERE = {
    "learning_rate": "optimizer.lr", "adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2",
    "betas": "optimizer.beta1", "adam_epsilon": "optimizer.eps", "epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip_norm", "grad_clip": "optimizer.clip_norm",
    "lr_scheduler_type": "schedule.kind", "warmup": "schedule.warmup_steps", "warmup_ratio": "schedule.warmup_steps",
    "max_steps": "schedule.total_steps", "epochs": "schedule.total_steps", "num_train_epochs": "schedule.total_steps",
    "per_device_train_batch_size": "training.micro_batch", "gradient_accumulation_steps": "training.micro_batch",
    "micro_batch_size": "training.micro_batch", "global_batch_size": "training.batch_size",
    "max_seq_length": "data.seq_length", "max_length": "data.seq_length", "dtype": "precision.compute",
    "output_dir": "checkpoint.folder", "save_steps": "checkpoint.every", "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every", "logging_steps": "log.every", "gradient_checkpointing": "recompute.layers",
}  # fmt: skip
_NAMES: Mapping[object, str] = {int: "a whole number", float: "a number", bool: "`true` or `false`", str: "a text"}
_LIMITS = {"gt": "above {}", "ge": "of {} or more", "lt": "below {}", "min_length": "that is not empty"}
_SHOWN_CHARACTERS = 60


def refuse(path: Path, sets: Sequence[str], problems: Sequence[Problem]) -> UsageError:
    """Return the error about a file and the keys of `--set` that has these problems."""
    if len(problems) == 1:
        (problem,) = problems
        typed = any(f"{problem.key}.".startswith(f"{key}.") or key.startswith(f"{problem.key}.") for key in sets)
        where = f"`--set {problem.key}`" if typed else f"`{path}`"
        return UsageError(f"{where}: {problem.what}", why=problem.why, hint=problem.hint)
    also = " with `--set`" if sets else ""
    return UsageError(
        f"{len(problems)} settings of `{path}`{also} are wrong",
        items=[problem.text() for problem in problems],
        hint="mend them all; docs/training.md lists every key",
    )


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return what pydantic found in a config of `model`, a problem a key."""
    found: dict[str, Problem] = {}
    for entry in error.errors(include_url=False):
        raised = entry.get("ctx", {}).get("error")
        if isinstance(raised, Contradictions):
            found |= {problem.key: problem for problem in raised.problems}
        elif entry["type"] != "default_factory_not_called":  # follows from another one
            keys = [str(part) for part in entry["loc"]]
            found.setdefault(".".join(keys), _problem(model, keys, dict(entry)))
    return list(found.values())


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Return the dotted names of every setting, those of sections in sections included, sections themselves not."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            yield f"{prefix}{name}"
        else:
            yield from known_keys(section, f"{prefix}{name}.")


def section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the model of a field that is a section."""
    kind = None if field is None else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def expected(field: FieldInfo) -> str:
    """Return what a setting must be, in words: `a whole number of 1 or more`."""
    kind = _inner(field.annotation)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f"`{word}`" for word in get_args(kind))
    words = _NAMES.get(kind, "a text")
    limits = [words for mark in field.metadata for words in _limit(mark)]
    return f"{words} {' and '.join(limits)}" if limits else words


def _limit(mark: object) -> Iterator[str]:
    """Return a limit in words; pydantic has one mark a limit, with one attribute."""
    for name, word in _LIMITS.items():
        limit = getattr(mark, name, None)
        if limit is not None:
            yield word.format("2**63" if limit == 2**63 else limit)


def _inner(kind: Any) -> Any:
    """Return what `kind | None` may be besides None."""
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [k for k in get_args(kind) if k is not type(None)]
        return kinds[0] if len(kinds) == 1 else kind
    return kind


def _problem(model: type[BaseModel], keys: Sequence[str], entry: Mapping[str, Any]) -> Problem:
    key, field = ".".join(keys), _field(model, keys)
    if entry["type"] == "extra_forbidden":
        return _unknown(model, keys)
    about = "" if field is None else field.description or ""
    if entry["type"] == "missing":
        section = section_of(field)
        kind = "section" if section else "key"
        return Problem(key, f"the {kind} `{key}` is missing", f"write it: {about}")
    value = _shown(entry["input"])
    raised = entry.get("ctx", {}).get("error")
    if isinstance(raised, Fault):
        return Problem(key, f"`{key}` is {value}, {raised.what}", raised.hint)
    if field is None or section_of(field):
        return Problem(key, f"`{key}` is {value}, not a section", f"write its keys below it, as in `{_example(field)}`")
    return Problem(key, f"`{key}` is {value}, not {expected(field)}", _remedy(field, entry["input"]) or about)


def _remedy(field: FieldInfo, value: object) -> str:
    kind = _inner(field.annotation)
    if get_origin(kind) is Literal and isinstance(value, str):
        near = get_close_matches(value.lower(), map(str, get_args(kind)), 1)
        return f"did you mean `{near[0]}`?" if near else ""
    if kind in (int, float) and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "write the number without quotes"
    return ""


def _unknown(model: type[BaseModel], keys: Sequence[str]) -> Problem:
    key = ".".join(keys)
    parent = _parent(model, keys)
    words = f"no key of `{'.'.join(keys[:-1])}`" if keys[:-1] else "no section"
    near = _nearest(model, parent, keys)
    names = ", ".join(parent.model_fields)
    return Problem(key, f"`{key}` is {words}", f"did you mean `{near}`?" if near else f"known: {names}")


def _nearest(model: type[BaseModel], parent: type[BaseModel], keys: Sequence[str]) -> str | None:
    """Return the known key that was probably meant: spelled nearly so, or the same word in another section."""
    last, prefix = keys[-1], "".join(f"{key}." for key in keys[:-1])
    near = get_close_matches(last.lower().replace("-", "_"), list(parent.model_fields), 1, 0.75)
    if near:
        return prefix + near[0]
    if last in _ELSEWHERE:
        return _ELSEWHERE[last]
    by_word: dict[str, list[str]] = {}
    for key in known_keys(model):
        by_word.setdefault(key.rpartition(".")[2], []).append(key)
    word = next(iter(get_close_matches(last, list(by_word), 1, 0.8)), "")
    return by_word[word][0] if len(by_word.get(word, ())) == 1 else None


def _parent(model: type[BaseModel], keys: Sequence[str]) -> type[BaseModel]:
    for key in keys[:-1]:
        model = section_of(model.model_fields.get(key)) or model
    return model


def _field(model: type[BaseModel], keys: Sequence[str]) -> FieldInfo | None:
    """Return the field at `keys`; what is deeper than a setting (an item of a list) belongs to that setting."""
    field = None
    for key in keys:
        field = model.model_fields.get(key)
        section = section_of(field)
        if section is None:
            return field
        model = section
    return field


def _example(field: FieldInfo | None) -> str:
    section = section_of(field)
    name = next(iter(section.model_fields), "key") if section else "key"
    return f"{name}: ..."


def _shown(value: object) -> str:
    if value is None or value == "":
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + '...'}`"
