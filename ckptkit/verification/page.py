"""The report of `ckptkit verify` as one HTML page that needs no network: what `--html FILE` writes.

The page holds the report's data once, as JSON; that of the levels holds plotly.js too, packed. Its tables are made
here with Jinja2, so they are read without JavaScript too; the filter is `templates/filter.js`, the chart `verify.js`,
which reads that JSON. Names come from checkpoints and are not trusted: Jinja2 escapes them, and by the page's content
security policy a browser runs the scripts that this module put there, known by their digests, and fetches nothing.
What does not live here: what a page says of the data (`page_parts.py`, and `sanity_parts.py` for `--sanity`), and what
the figures mean (docs/verify.md).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit import __version__
from ckptkit.errors import UsageError, printable
from ckptkit.formats.disk import disk_error, fsync_folder, write_file
from ckptkit.report import folded, human_bytes
from ckptkit.verification import page_parts as parts
from ckptkit.verification import sanity_parts as sanity
from ckptkit.verification.page_compute import compute_of

if TYPE_CHECKING:
    from markupsafe import Markup

GENERATOR = "ckptkit verify --html"
_THEN = "or name another file"
_HEAD_BYTES = 1024  # the generator is named among the first of them


def write_page(data: Mapping[str, Any], file: Path, command: str, *, read: Iterable[Path] = ()) -> None:
    """Write the page about `data`, which is `Report.data` of verify, to `file`; it appears whole or not at all.

    `command` is the shell's line that makes the report again. An older page at `file` is replaced, and never any other
    file. Raises UsageError as `check_page` does, and ResourceError when the disk fails.
    """
    check_page(file, read=read)
    text = page(data, command)
    with _made(file) as made:
        write_file(made, text.encode(), why="", then=_THEN)
        made.replace(file)
        fsync_folder(file.absolute().parent)


@contextmanager
def _made(file: Path) -> Iterator[Path]:
    """Give the name under which a page is made beside its place, where nothing is left afterwards."""
    made = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        yield made
    except OSError as error:
        raise disk_error(error, file, why="", then=_THEN) from error
    finally:
        with suppress(OSError):  # a disk that cannot be written says so even of what is not there
            made.unlink(missing_ok=True)


def check_page(file: Path, *, read: Iterable[Path] = ()) -> None:
    """Raise UsageError when no page may be written to `file`, or none can be made; to be asked before a long run.

    It may not be one of the files and folders in `read`, nor lie inside of one. Raises ResourceError where the disk
    cannot be written.
    """
    try:
        import jinja2  # noqa: F401
        import plotly  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"`--html` needs {error.name}, which is not installed",
            hint="pip install 'ckptkit-mindspore[verify]'",
        ) from error
    if not file.absolute().parent.is_dir():
        raise UsageError(f"cannot write `{file}`: there is no folder `{file.absolute().parent}`", hint="make it first")
    _check_outside(file, read)
    if os.path.lexists(file):
        if not file.is_file() and not (file.is_symlink() and not file.exists()):
            raise UsageError(f"`{file}` is there, and is no file", hint="name another file")
        if not _is_page(file):
            raise UsageError(f"`{file}` exists, and is no page that `{GENERATOR}` made", hint="name another file")
    with _made(file) as made:
        made.touch(exist_ok=False)


def _check_outside(file: Path, read: Iterable[Path]) -> None:
    """Raise UsageError for a page that would take the place of what is read, or lie among it."""
    places = {Path(os.path.realpath(file)), Path(os.path.realpath(file.parent)) / file.name}  # a link's end, and itself
    for source in read:
        origin = Path(os.path.realpath(source))
        if any(place == origin or origin in place.parents for place in places):
            raise UsageError(
                f"the page `{file}` is the same as, or inside, `{source}`, which is read or written here",
                why="it would be a file of the checkpoint or of the dump, or take the place of one",
                hint="name a file elsewhere",
            )


def _is_page(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return f'name="generator" content="{GENERATOR}'.encode() in stream.read(_HEAD_BYTES)
    except OSError:
        return False


def page(data: Mapping[str, Any], command: str) -> str:
    """Return the page as text that UTF-8 can encode."""
    plain: dict[str, Any] = _finite(data)
    if plain["level"] == "sanity":
        return _render("sanity.html.j2", plain, command, [_asset("filter.js")], sanity.words(plain))
    return _verify_page(plain, command)


def _verify_page(plain: Mapping[str, Any], command: str) -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    library, script = get_plotlyjs(), _asset("filter.js") + _asset("verify.js")
    parameters = plain.get("parameters", [])
    words = {
        "title": f"{parts.mark(plain)}: {plain['b']['path']}",
        "mark": parts.mark(plain),
        "compute": compute_of(plain),
        "plotly": b64encode(gzip.compress(library.encode(), mtime=0)).decode(),
        "layers": plain.get("layers"),
        "forward": plain.get("forward", {}),
        "inputs": plain.get("forward", {}).get("inputs", []),
        "shards": plain.get("shards", []),
        "benign": plain.get("benign", []),
        "verdict": parts.verdict(plain),
        "levels": parts.levels(plain),
        "counts": parts.counts(parameters),
        "groups": parts.groups(parameters),
        "sides": parts.sides(plain),
        "rows_of": parts.rows_of,
        "notes": parts.notes(plain),
    }
    return _render("verify.html.j2", plain, command, [script, library], words)


def _render(
    template: str, plain: Mapping[str, Any], command: str, scripts: Sequence[str], words: Mapping[str, Any]
) -> str:
    """Return a template filled with `words`; the first of `scripts` is run when the page is opened, others by it."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, finalize=_printable,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "figure": _figure,
        "words": _words,
        "folded": folded,
        "gap": _gap,
        "coded": _coded,
        "bytes": human_bytes,
    }
    return environment.get_template(template).render(
        generator=f"{GENERATOR} {__version__}",
        policy=f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; "
        f"form-action 'none'; script-src {' '.join(map(_digest, scripts))}",
        style=Markup(_asset("verify.css")),
        script=Markup(scripts[0]),
        json=Markup(_json(plain)),
        data=plain,
        command=command,
        status_words=parts.STATUS,
        **words,
    )


def _asset(name: str) -> str:
    return (files("ckptkit.verification") / "templates" / name).read_text("utf-8")


def _digest(script: str) -> str:
    """Return a script as a content security policy names it."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(data: Mapping[str, Any]) -> str:
    """Return JSON in ASCII in which nothing ends a script element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    """Return data without inf and NaN, which JSON has no numbers for: they become words."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def _printable(value: Any) -> Any:
    """Escape what cannot be printed in a text: line breaks, marks that turn the reading direction, half characters."""
    return printable(value) if type(value) is str else value


def _figure(value: Any, shown: str = "") -> Markup:
    """Return a number as people read it, with all digits that `--json` has in the element's `value`."""
    from markupsafe import Markup

    if value is None:
        return Markup("&ndash;")
    exact = value if isinstance(value, str) else json.dumps(value)
    shown = shown or (f"{value:.3g}" if isinstance(value, float) else exact)
    return Markup('<data value="{}">{}</data>').format(exact, shown)


def _gap(cosine: Any) -> str:
    return f"{abs(1 - cosine):.0e}" if isinstance(cosine, float) else str(cosine)


def _coded(text: str) -> Markup:
    """Return a text with what stands in backticks as code."""
    from markupsafe import Markup

    pieces = printable(text).split("`")
    marked = [Markup("<code>{}</code>").format(piece) if at % 2 else piece for at, piece in enumerate(pieces)]
    return Markup("").join(marked) if len(pieces) % 2 else Markup("{}").format(printable(text))


def _words(value: Any) -> str:
    """Return a value of the config or of the settings in a few words; a list of one value says it once."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        words = [_words(item) for item in value]
        return f"{words[0]} (all {len(words)})" if len(words) > 1 and len(set(words)) == 1 else ", ".join(words)
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value)
