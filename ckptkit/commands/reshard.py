"""`ckptkit reshard`: a MindSpore checkpoint under another parallel layout; names and values stay as they are."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.commands.choose import choose
from ckptkit.commands.common import Task, begin, file_layout, finish
from ckptkit.commands.convert import plan_by_tables
from ckptkit.commands.convert_report import naming_rows
from ckptkit.commands.defaults import Defaults
from ckptkit.commands.parallel import Parallel
from ckptkit.commands.plan_file import check_plan_file
from ckptkit.commands.sharding import arranger
from ckptkit.commands.source import SideFiles, Source, as_list, find_config, find_side_files, load_own_tables
from ckptkit.commands.write import Options, Progress
from ckptkit.errors import UsageError
from ckptkit.formats.files import listed, paused_gc
from ckptkit.formats.registry import CKPT, MINDFORMERS
from ckptkit.mapping.pad import pad
from ckptkit.mapping.state import check_state, identity_rules
from ckptkit.plan.build import Target, build_plan
from ckptkit.plan.plan import Plan
from ckptkit.report import Report
from ckptkit.types import TensorSpec


@paused_gc()
def reshard(
    src: str | Path,
    dst: str | Path,
    parallel: Parallel,
    *,
    model: str | None = None,
    variant: str | None = None,
    format: str | None = None,
    max_shard_size: str | int | None = None,
    table: Sequence[str | Path] = (),
    config: str | Path | None = None,
    tie_embeddings: bool = False,
    allow_unmapped: bool = False,
    no_optimizer: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    digests: bool = True,
    plan_file: str | Path | None = None,
    progress: Progress | None = None,
    defaults: Collection[str] = (),
) -> Report:
    """Write the MindSpore checkpoint `src` under the layout that `parallel` asks for, into the folder `dst`.

    A layout by degrees needs the family's table, and so config.json (beside the weights, or `config`), and takes
    `model`, `variant`, `table`, `tie_embeddings` and `allow_unmapped` as `convert` does. With strategy files, and to
    make one whole checkpoint, no table and no known family is needed, and these options are refused. `format` is that
    of the source without it. The other options, the report and the errors are those of `convert`.
    """
    table = as_list(table)
    options = Options(dry_run, overwrite, workers, digests, Path(plan_file) if plan_file else None)
    task = Task("reshard", Path(src), Path(dst), options, progress, Defaults(defaults), time.perf_counter())
    sharding, source, read = begin(task, parallel, table, config)
    by_table = sharding.pad_vocab_to is not None or not (sharding.is_whole or sharding.strategy)
    if by_table:
        settings, side, notes = find_config(source, Path(config) if config else None)
    else:
        told = {"model": model, "variant": variant, "table": table, "tie_embeddings": tie_embeddings,
                "allow_unmapped": allow_unmapped}  # fmt: skip
        _refuse_table_options(told, task.given, "beside `--dst-strategy`" if sharding.strategy else "in a merge")
        settings, side = {}, find_side_files(source, Path(config) if config else None)
        notes = _config_notes(side) if config else []
    if options.plan_file:
        check_plan_file(options.plan_file, task.dst, [*read, *(path for path, _ in side)])
    kind, size = file_layout("", format or _format_of(source), max_shard_size, task.given, sharding)
    arrange = arranger(sharding, kind, source, drop_state=no_optimizer)
    target = Target(kind, size, tie_embeddings, allow_unmapped, arrange=arrange, drop_state=no_optimizer)
    if by_table:
        tables = load_own_tables(table)
        choice = choose(
            source, settings, tables, model=model, from_dialect=None, to_dialect=None, variant=variant,
            from_variant=None, given=task.given,
        )  # fmt: skip
        if choice.source[0] == "hf":
            raise _refuse_hub(task.src)
        choice = replace(choice, target=choice.source)
        plan = plan_by_tables(source, choice, settings, side, target, sharding)
        return finish(task, plan, source, naming_rows(plan, choice), notes, sharding)
    plan = _plan_by_names(source, side, target)
    return finish(task, plan, source, [("names", "as they are: no table was needed")], notes, sharding)


def _format_of(source: Source) -> str:
    """Return the format of a source, as `--format` calls it."""
    if source.ranks is not None and source.ranks.iteration is not None:
        return MINDFORMERS
    return CKPT if source.checkpoint.kind == CKPT else "safetensors"


def _refuse_table_options(told: Mapping[str, Any], given: Defaults, where: str) -> None:
    """Refuse the options in `told` that are about a family's table; pass over those that are defaults."""
    for name, value in told.items():
        if value not in (None, False, []):
            what = f"`--{name.replace('_', '-')}` does nothing {where}"
            why = "names and values stay as they are, so that no table is needed"
            given.pass_over(name, UsageError(what, why=why, hint="leave it out, or give a layout by degrees"))


def _config_notes(side: SideFiles) -> list[str]:
    """Return a note on the files that were named with `--config`, which nothing is compared with here."""
    names = listed([name for _, name in side])
    return [f"from `--config`, and not compared with the tensors, as no table was needed: {names}"] if side else []


def _refuse_hub(src: Path) -> UsageError:
    return UsageError(
        f"`{src}` is in HuggingFace's naming, which has no parallel layout",
        why="MindSpore loads shards under its own names",
        hint="`ckptkit convert` takes the same options and makes shards in one pass",
    )


def _plan_by_names(source: Source, side: SideFiles, target: Target) -> Plan:
    """Return the plan that leaves every tensor as it is, whatever the network."""
    checkpoint = source.checkpoint
    rows = _rows_without_padding(source)
    specs = [
        TensorSpec(info.name, (rows[info.name], *info.shape[1:]) if info.name in rows else info.shape, info.dtype)
        for info in checkpoint.tensors.values()
    ]
    if not target.drop_state:
        check_state(checkpoint.tensors)
    rules = identity_rules(specs)
    if target.drop_state:
        rules = replace(rules, rules=tuple([rule for rule in rules.rules if not rule.is_state]))
    source_rules = pad(rules, source.padded)
    plan = build_plan(checkpoint, source_rules, rules, target, config={}, side=side, joined=source.joined)
    return replace(plan, facts={**plan.facts, **_carried(source, plan.facts)})


def _rows_without_padding(source: Source) -> dict[str, int]:
    layout = source.manifest["layout"] if source.manifest else {}
    return {name: int(rows[0]) for name, rows in layout.get("padded", {}).items()}


def _carried(source: Source, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the source's manifest knows of the naming, which a reshard does not change."""
    if source.manifest is None:
        return {}
    kept = {key: source.manifest[key] for key in ("family", "dims") if key in source.manifest}
    return kept | {"to": {**source.manifest["to"], "format": facts["to"]["format"]}}
