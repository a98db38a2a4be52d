"""The benchmark of `ckptkit convert`: run it as `scripts/bench convert`.

Each section (`bench_sections.py`) has an input, subjects that run once a round in an order that turns (`benchlib.py`),
and figures with the goals that they are held to. Inputs are made once and kept in the cache; the first run of each
subject, on a tiny model, is not recorded. Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import bench_machine
from bench_sections import MORE_PEERS, PEERS, SECTIONS, Context, Section
from benchlib import Bench, goals_table, results_table, to_data

ROOT = Path(__file__).resolve().parent.parent
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Return the bytes of `2GB` or `200MB`."""
    number, unit = text[:-2], text[-2:].upper()
    if unit not in UNITS:
        raise argparse.ArgumentTypeError(f"`{text}` is not a size like 2GB or 200MB")
    return int(float(number) * UNITS[unit])


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names out of `known`."""

    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := sorted(set(found) - set(known)):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return found

    return parse


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench convert", description="Measure `ckptkit convert`.")
    add = parser.add_argument
    known = (*PEERS, *MORE_PEERS)
    add(
        "--peers",
        type=names(known),
        default=list(PEERS),
        help=f"of section copy: {','.join(PEERS)}; and {', '.join(MORE_PEERS)}",
    )
    add("--tensors", type=int, default=50_000, help="tensors of section small (default 50000)")
    add_common(parser, tuple(SECTIONS), default=["copy", "start"])
    return parser.parse_args(args)


def add_common(parser: argparse.ArgumentParser, sections: Sequence[str], *, default: Sequence[str]) -> None:
    """Add the options that every benchmark has."""
    add = parser.add_argument
    add("--size", type=parse_size, default="2GB", help="bytes of the model: 2GB (default), 200MB")
    add("--rounds", type=int, default=5, help="runs of each subject (default 5)")
    add("--sections", type=names(sections), default=list(default), help=f"out of {','.join(sections)}")
    add("--cache", type=Path, default=Path(os.environ.get("CKPTKIT_CACHE") or ROOT / ".cache") / "bench")
    add("--json", type=Path, help="write all figures to this file too")


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of the subjects: no network, no bars, modules compiled once as an installation does."""
    env = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": str(cache / "pycache")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def main(args: Sequence[str]) -> int:
    options = parse_args(args)
    wants_apart = {"mergekit", "transformers5"} & set(options.peers) and "copy" in options.sections
    measure(options, SECTIONS, apart=bool(wants_apart))
    return 0


def measure(
    options: argparse.Namespace, sections: Mapping[str, Callable[[Context], Section]], *, apart: bool = False
) -> None:
    """Run the sections that `options` names and print their tables; with `apart`, the peers get their environment."""
    options.cache.mkdir(parents=True, exist_ok=True)
    cache = options.cache.resolve()
    python = None
    if apart:
        try:
            python = bench_machine.peers_python(cache, lambda text: print(text, file=sys.stderr))
        except OSError as error:
            print(error, file=sys.stderr)
    machine = bench_machine.facts(cache, python)
    print("\n".join(f"- {name}: {value}" for name, value in machine.items()), flush=True)
    data = {"machine": machine, "rounds": options.rounds, "size": options.size, "sections": {}}
    with tempfile.TemporaryDirectory(prefix="run.", dir=cache) as scratch:
        bench = Bench(Path(scratch) / "work", environment(cache))
        context = Context(cache, options.rounds, options.size, options.tensors, frozenset(options.peers), bench, python)
        for name in options.sections:
            section = sections[name](context)
            print(f"\n### {section.title}\n", results_table(section.results), goals_table(section.goals), sep="\n\n")
            data["sections"][name] = {"title": section.title, **to_data(section.results, section.goals)}
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
