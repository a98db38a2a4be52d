"""What a user says of a target's parallel layout, and what becomes of it: ranks, files, strategy files, YAML lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.commands.moment import moment
from ckptkit.commands.ranks import read_layout
from ckptkit.commands.source import Source
from ckptkit.errors import UsageError
from ckptkit.formats import mindspore_ckpt, safetensors
from ckptkit.formats.base import OutputFile
from ckptkit.formats.mindformers_folder import METADATA
from ckptkit.formats.mindformers_write import MODEL, OPTIMIZER, Held, Saved, small_files, weight_file
from ckptkit.formats.mindspore_strategy import STRATEGY, Strategy, dump_strategy
from ckptkit.formats.rank_folders import META, RankSet
from ckptkit.formats.registry import MINDFORMERS
from ckptkit.layout.degrees import Cuts, Degrees, as_legacy_net, lay_out, smallest_dp
from ckptkit.layout.layout import MAX_RANKS, Layout, Stage, replicated, slice_number, without_opt_shard
from ckptkit.layout.run_yaml import RunFacts, yaml_lines
from ckptkit.layout.slices import num_parts
from ckptkit.mapping.rules import RuleSet
from ckptkit.mapping.state_names import is_counter, parameter_of
from ckptkit.plan.build import Arrangement
from ckptkit.plan.plan import OutputTensor
from ckptkit.plan.shard import Holder, Placement, holders_of, place_on_ranks
from ckptkit.quantities import parse_numbers
from ckptkit.types import TensorSpec, item_bytes

LEGACY, QKV_CONCAT = "mindformers-legacy", "qkv_concat"


@dataclass(frozen=True, slots=True)
class Sharding:
    """The layout that a result has: `degrees`, or that of strategy files; whole, when both are absent.

    With `free_dp` nobody named a data-parallel degree, and the smallest possible one is taken. `pad_vocab_to` lengthens
    the embedding and the head with zero rows; `only` are the ranks to write; `run` is what a run's YAML says of its
    model.
    """

    degrees: Degrees = field(default_factory=Degrees)
    strategy: Path | None = None
    pad_vocab_to: int | None = None
    only: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    free_dp: bool = False
    run: RunFacts | None = None

    @property
    def is_whole(self) -> bool:
        """Say whether the result has no ranks: every degree is 1 and no strategy files are given."""
        d = self.degrees
        return self.strategy is None and d.tp * d.pp * d.dp * d.ep * d.cp == 1


@dataclass(frozen=True, slots=True)
class Arranger:
    """Give the tensors of a result their ranks. `kind` is that of `file_layout`.

    `ranks` are those of the source, whose files say at which step training is to be resumed; None when it is not.
    `saved` is the moment of training that a folder of MindFormers' newer kind is of, `unknown` what is to be said of it
    to whoever resumes from the result.
    """

    sharding: Sharding
    kind: str
    ranks: RankSet | None = None
    saved: Saved = field(default_factory=lambda: Saved(0, {}))
    unknown: tuple[str, ...] = ()

    def __call__(self, wholes: Sequence[OutputTensor], rules: RuleSet) -> Arrangement:
        degrees, layout, notes = self._layout(wholes, rules)
        _check_ranks(self.sharding.only, layout)
        if self.kind == MINDFORMERS:
            placement, extra = self._iteration(wholes, rules, layout)
            if _has_state(wholes, rules):  # weights alone begin a run, and resume none
                notes = [*notes, *self.unknown]
        else:
            placement = place_on_ranks(
                wholes, layout, self._lay_out, parameter_of=parameter_of, on_every_rank=is_counter
            )
            shapes = {whole.spec.name: whole.spec.shape for whole in wholes}
            extra = _strategy_files(layout, shapes) | self._last_saves(layout)
        load = [] if degrees is None else load_lines(degrees, rules, self.kind, self.sharding.pad_vocab_to)
        return Arrangement(placement, extra, self._facts(layout, degrees), [*self.sharding.notes, *notes], load)

    def _iteration(
        self, wholes: Sequence[OutputTensor], rules: RuleSet, layout: Layout
    ) -> tuple[Placement, dict[str, bytes]]:
        """Return the files of an iteration of MindFormers' newer folders: two for each rank, and the small ones."""
        state = {rule.target for rule in rules.rules if rule.is_state}
        number, num_ranks = self.saved.iteration, layout.num_ranks

        def lay_out_file(kind: str, rank: int, specs: Sequence[TensorSpec]) -> OutputFile:
            return safetensors.lay_out(weight_file(number, kind, rank, num_ranks), specs, {"format": "ms"})

        placement = place_on_ranks(
            wholes, layout, partial(lay_out_file, MODEL), parameter_of=parameter_of, on_every_rank=is_counter,
            apart=(state.__contains__, partial(lay_out_file, OPTIMIZER)),
        )  # fmt: skip
        tensors = (
            _held(whole.spec, holders_of(whole.spec, layout, parameter_of, is_counter), layout.devices,
                  OPTIMIZER if whole.spec.name in state else MODEL)
            for whole in wholes
        )  # fmt: skip
        return placement, small_files(self.saved, num_ranks, tensors)

    def _layout(self, wholes: Sequence[OutputTensor], rules: RuleSet) -> tuple[Degrees | None, Layout, Sequence[str]]:
        if self.sharding.is_whole:
            tensors = {whole.spec.name: replicated(len(whole.spec.shape), 1) for whole in wholes}
            return self.sharding.degrees if rules.dialect else None, Layout((Stage(1, tensors),)), ()
        if self.sharding.strategy is not None:
            axes = {whole.spec.name: len(whole.spec.shape) for whole in wholes}
            layout, shapes = read_layout(self.sharding.strategy, axes)
            _check_shapes(wholes, shapes)
            return None, layout, ()
        if self.sharding.run is not None:
            check_run(self.sharding.run, rules)
        degrees, cuts = self.sharding.degrees, list(_cuts(wholes, rules, self.sharding.run))
        if self.sharding.free_dp:
            degrees = replace(degrees, dp=smallest_dp(degrees.ep, degrees.tp, degrees.cp, cuts))
        return degrees, *lay_out(degrees, cuts, _num_layers(rules))

    def _lay_out(self, rank: int, specs: Sequence[TensorSpec]) -> OutputFile:
        file = self.ranks.result_name(rank, self._suffix) if self.ranks else f"checkpoint_{rank}{self._suffix}"
        name = f"rank_{rank}/{file}"
        if self.kind == "ckpt":
            return mindspore_ckpt.lay_out(name, specs)
        return safetensors.lay_out(name, specs, {"format": "ms"})

    @property
    def _suffix(self) -> str:
        return ".ckpt" if self.kind == "ckpt" else ".safetensors"

    def _last_saves(self, layout: Layout) -> dict[str, bytes]:
        """Return a `meta.json` for each rank, when the source has a step at which training is to be resumed."""
        ranks = self.ranks
        if ranks is None or ranks.last_save(0, self._suffix) is None:
            return {}
        found = ((rank, ranks.last_save(rank, self._suffix)) for rank in range(layout.num_ranks))
        return {f"rank_{rank}/{META}": data for rank, data in found if data is not None}

    def _facts(self, layout: Layout, d: Degrees | None) -> dict[str, Any]:
        facts: dict[str, Any] = {"ranks": layout.num_ranks, "pp": len(layout.stages)}
        if d is not None:
            facts |= {"tp": d.tp, "dp": d.dp, "ep": d.ep, "cp": d.cp, "optimizer_shard": d.optimizer_shard}
        return facts


def _has_state(wholes: Sequence[OutputTensor], rules: RuleSet) -> bool:
    names = {whole.spec.name for whole in wholes}
    return any(rule.is_state and rule.target in names for rule in rules.rules)


def arranger(sharding: Sharding, kind: str, source: Source, *, drop_state: bool) -> Arranger | None:
    """Return what gives the tensors of a result their ranks; None for one that has none."""
    if sharding.is_whole and kind != MINDFORMERS:
        return None
    ranks = None if drop_state else source.ranks
    if kind != MINDFORMERS:
        return Arranger(sharding, kind, ranks)
    saved, unknown = moment(source)
    return Arranger(sharding, kind, ranks, saved, tuple(unknown))


def _held(spec: TensorSpec, holders: Sequence[Holder], devices: int, kind: str) -> Held:
    """Return a tensor as its ranks hold it; UsageError when the stages that share it cut it in different ways."""
    slices = {rank: slice_number(how, device) for rank, device, how in holders}
    first, _, layout = holders[0]
    parts = num_parts(layout)
    if any(num_parts(how) != parts or slices[rank] != slices[first + device] for rank, device, how in holders):
        raise UsageError(
            f"`{spec.name}` is cut in one way in a stage and in another way in the next",
            why=f"`{METADATA}` has one layout for each tensor",
            hint="write `rank_N` folders, which may differ: leave out `--format mindformers`",
        )
    stage = range(first, first + devices)
    return Held(spec, parts, without_opt_shard(layout), stage, slices, kind)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that `0-7` or `0,2,5-9` names, in order; UsageError for anything else."""
    try:
        return parse_numbers(text, MAX_RANKS, "rank")
    except ValueError as error:
        raise UsageError(f"`--ranks {text}` names no ranks: {error}", hint="write it like `0-7` or `0,2,5-9`") from None


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the numbers in `8,9,9,6`; UsageError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"`--pp-layers {text}` is no list of numbers", hint="write it like `8,9,9,6`")
    return tuple(int(part) for part in parts)


def _check_ranks(only: Sequence[int] | None, layout: Layout) -> None:
    if only is not None and only[-1] >= layout.num_ranks:
        raise UsageError(f"there is no rank {only[-1]}: the layout has {layout.num_ranks}, from 0 on")


def _cuts(wholes: Sequence[OutputTensor], rules: RuleSet, run: RunFacts | None) -> Iterator[Cuts]:
    """Yield what the tables say of each tensor that is to be cut; counters need no layout."""
    by_name = {rule.target: rule for rule in rules.rules}
    dtypes = {whole.spec.name: whole.spec.dtype for whole in wholes}
    twins = {tie.target_twin for tie in rules.ties} if rules.tied else set()
    for whole in wholes:
        rule = by_name[whole.spec.name]
        if rule.stage == "all":
            continue
        weight = parameter_of(rule.target) or rule.target  # state is cut as its weight is
        dtype = dtypes.get(weight, whole.spec.dtype)
        cuts = Cuts(
            whole.spec.name, whole.spec.shape, item_bytes(dtype), rule.layer, rule.stage, rule.tp_axis, rule.tp_unit,
            rule.tp_unless, rule.tp_indivisible, rule.ep_axis, rule.ep_unit, also_last=weight in twins,
        )  # fmt: skip
        if rules.dialect == LEGACY:
            cuts = as_legacy_net(cuts, embedding_opt=run is not None and run.embedding_opt)
        yield cuts


def load_lines(degrees: Degrees, rules: RuleSet, kind: str, padded_to: int | None) -> list[str]:
    """Return the lines of a run's YAML with which MindFormers loads a result; `{dst}` stands for its folder."""
    legacy = rules.dialect == LEGACY
    run = RunFacts(legacy=legacy, qkv_concat=rules.variant.startswith(QKV_CONCAT) if legacy else None)
    if kind == MINDFORMERS:
        lines = ['load_checkpoint: "{dst}"', "use_legacy_format: False", *yaml_lines(degrees, _num_layers(rules), run)]
    else:
        file_format = "ckpt" if kind == "ckpt" else "safetensors"
        lines = yaml_lines(degrees, _num_layers(rules), run, load="{dst}", format=file_format)
    if padded_to is not None:
        lines += [
            *([] if "  model_config:" in lines else ["model:", "  model_config:"]),
            f"    vocab_size: {padded_to}",
        ]
    return lines


def check_run(run: RunFacts, rules: RuleSet) -> None:
    """Raise UsageError when a run's YAML is about another model than the one that is to be cut."""
    wrong = []
    if run.num_layers not in (None, _num_layers(rules)):
        wrong.append(f"num_layers {run.num_layers}: the model has {_num_layers(rules)}")
    for name, told in (("heads", run.num_heads), ("kv_heads", run.num_kv_heads), ("hidden", run.hidden)):
        if told is not None and rules.dims.get(name, told) != told:
            wrong.append(f"{name} {told}: config.json says {rules.dims[name]}")
    if run.legacy != (rules.dialect == LEGACY):
        wrong.append(f"use_legacy {run.legacy}: the tensors are in {rules.dialect}")
    elif run.legacy and bool(run.qkv_concat) != rules.variant.startswith(QKV_CONCAT):
        wrong.append(f"qkv_concat {bool(run.qkv_concat)}: the tensors are in variant {rules.variant or 'base'}")
    if wrong:
        raise UsageError(
            "the run's YAML is about another model, or another layout of its tensors",
            items=wrong,
            hint="give the YAML of this model's run; `--variant` and `--to` choose the layout of tensors",
        )


def _num_layers(rules: RuleSet) -> int:
    return 1 + max((rule.layer for rule in rules.rules if rule.layer is not None), default=-1)


def _check_shapes(wholes: Sequence[OutputTensor], promised: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [
        f"{whole.spec.name} is {whole.spec.shape}, the strategy says {promised[whole.spec.name]}"
        for whole in wholes
        if promised.get(whole.spec.name, whole.spec.shape) != whole.spec.shape
    ]
    if wrong:
        raise UsageError(
            f"{len(wrong)} tensors have another shape than the target's strategy files say",
            items=wrong,
            hint="give the strategy files of the net that will load this",
        )


def _strategy_files(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bytes]:
    """Return a strategy file for each stage, named after its first rank, as MindSpore and MindFormers name them.

    State that follows its weight has an entry of its own in it: MindSpore's tools would take it for whole without one.
    """
    files = {}
    following = {name: weight for name in shapes if name not in layout.stages_of and (weight := parameter_of(name))}
    for number, stage in enumerate(layout.stages):
        held = {name: how for name, how in stage.tensors.items() if name in shapes}
        held |= {
            name: stage.tensors[weight]
            for name, weight in following.items()
            if weight in stage.tensors and len(stage.tensors[weight].tensor_map) == len(shapes[name])
        }
        strategy = Strategy(number, held, {name: shapes[name] for name in held})
        files[f"{STRATEGY}/ckpt_strategy_rank_{number * layout.devices}.ckpt"] = dump_strategy(strategy)
    return files
