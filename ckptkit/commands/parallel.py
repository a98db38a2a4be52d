"""The parallel layouts of a source and of a target, as a user says them: `--mp 4` and its companions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.commands.defaults import Defaults
from ckptkit.commands.sharding import Sharding, parse_layers, parse_ranks
from ckptkit.errors import UsageError
from ckptkit.formats.files import regular_file
from ckptkit.formats.model_config import CONFIG, read_config
from ckptkit.layout.degrees import Degrees

_DEGREES = ("mp", "pp", "dp", "ep", "optimizer_shard", "pp_layers", "pp_interleave", "shard_embedding")
_COUNTS = ("mp", "pp", "dp", "ep", "devices", "pp_interleave", "pad_vocab_to")
# These say how a result is cut over ranks, and not over how many: by themselves they cut nothing.
_MANNERS = ("optimizer_shard", "pp_layers", "pp_interleave", "shard_embedding", "replicate_kv", "ranks")


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a result is cut over ranks, and how the source was. None means that nothing was said.

    The target's layout is given by degrees (`mp` tensor, `pp` pipeline, `dp` data, `ep` expert parallel; `devices` is
    their product), by a run's YAML (`parallel_config`), or by strategy files (`dst_strategy`); without any it is whole.
    `optimizer_shard` cuts what data-parallel ranks share; `pp_layers` are the layers of each stage (`8,9,9,6`);
    `pp_interleave` the virtual stages; `shard_embedding` False keeps embedding and head whole; `pad_vocab_to` adds rows
    of zeros to them; `replicate_kv` copies KV heads that are fewer than `mp`. `ranks` (`0-7`) are those to write.
    `src_strategy` and `step` are about the source.
    """

    mp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    devices: int | None = None
    optimizer_shard: bool | None = None
    pp_layers: str | Sequence[int] | None = None
    pp_interleave: int | None = None
    shard_embedding: bool | None = None
    pad_vocab_to: int | None = None
    replicate_kv: bool = False
    parallel_config: str | Path | None = None
    dst_strategy: str | Path | None = None
    src_strategy: str | Path | None = None
    step: int | None = None
    ranks: str | None = None

    def target(self, given: Defaults | None = None, model: Path | None = None) -> Sharding:
        """Return the target's layout; UsageError for options that contradict one another, or that do nothing.

        What does nothing and is a default is passed over, and noted in `given`. `model` is a config.json, or a folder
        or a file that may have one beside it: a run's YAML need not say how many layers there are.
        """
        given = Defaults() if given is None else given
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"`{_option(name)}` is {count}, and must be 1 or more")
        self._check_one_way()
        only = parse_ranks(self.ranks) if self.ranks is not None else None
        if self.dst_strategy:
            why = "strategy files say how many devices there are, and what each of them holds"
            self._refuse(("devices", "replicate_kv"), given, "beside `--dst-strategy`", why)
            return Sharding(Degrees(), Path(self.dst_strategy), self.pad_vocab_to, only)
        if self.parallel_config:
            sharding = self._of_run(Path(self.parallel_config), only, given, model)
        else:
            free_dp = self.dp is None and self.devices is None
            sharding = Sharding(self._degrees(), None, self.pad_vocab_to, only, free_dp=free_dp)
        if sharding.is_whole:
            why = "every parallel degree is 1, so that nothing is cut"
            self._refuse(_MANNERS, given, "where DST is whole", why, "give a degree too, as `--mp 2`, or ")
            return replace(sharding, only=None)
        return replace(sharding, degrees=self._used(sharding.degrees, given))

    def _check_one_way(self) -> None:
        ways = [_option(name) for name in ("dst_strategy", "parallel_config") if getattr(self, name)]
        told = [_option(name) for name in _DEGREES if getattr(self, name) is not None]
        if len(ways) > 1 or (ways and told):
            raise UsageError(
                "the target's layout is given in more than one way",
                items=[*ways, *told],
                hint="give degrees, a run's YAML, or strategy files: one of these",
            )

    def _used(self, degrees: Degrees, given: Defaults) -> Degrees:
        """Return `degrees` without what cuts nothing beside the others; the options that say so are refused."""
        if degrees.tp == 1:
            why = "heads are whole on every device then"
            self._refuse(("replicate_kv",), given, "without tensor parallelism", why, "add `--mp`, or ")
            degrees = replace(degrees, replicate_kv=False)
        if degrees.pp == 1 and not self.parallel_config:
            why = "the only stage has all layers"
            self._refuse(("pp_interleave",), given, "without pipeline stages", why, "add `--pp`, or ")
            degrees = replace(degrees, pp_interleave=1)
        return degrees

    def _refuse(self, names: Sequence[str], given: Defaults, where: str, why: str, hint: str = "") -> None:
        """Refuse those of the options `names` that were asked for, and do nothing `where`; pass over defaults."""
        for name in filter(self._asks_for, names):
            option = "--no-shard-embedding" if getattr(self, name) is False else _option(name)
            error = UsageError(f"`{option}` does nothing {where}", why=why, hint=f"{hint}leave it out")
            given.pass_over(name, error)

    def _asks_for(self, name: str) -> bool:
        value = getattr(self, name)
        if name == "shard_embedding":
            return value is not None
        return value not in (None, False) and (name != "pp_interleave" or value > 1)

    def _of_run(
        self, path: Path, only: tuple[int, ...] | None, given: Defaults, model: Path | None
    ) -> Sharding:  # fmt: skip
        """Return the layout in a run's YAML; that it cuts nothing is noted in `given`."""
        from ckptkit.layout.run_yaml import read_run_yaml

        file = regular_file(path, "a run's YAML")
        layers = None if model is None else _layers_of(model)
        degrees, notes, run = read_run_yaml(
            file, devices=self.devices, num_layers=layers, replicate_kv=self.replicate_kv
        )
        sharding = Sharding(degrees, None, self.pad_vocab_to, only, tuple(notes), run=run)
        if sharding.is_whole:
            given.notes.extend([*notes, f"no degree in `{path.name}` is above 1: DST is whole"])
        return sharding

    def _degrees(self) -> Degrees:
        layers = parse_layers(self.pp_layers) if isinstance(self.pp_layers, str) else self.pp_layers
        if self.devices is not None and self.dp is None:
            rest = (self.mp or 1) * (self.pp or 1)
            if self.devices % rest or self.devices < rest:
                raise _misfit(self.devices, f"{self.mp or 1} (mp) * {self.pp or 1} (pp)", rest)
        degrees = Degrees(
            tp=1 if self.mp is None else self.mp,
            pp=1 if self.pp is None else self.pp,
            dp=self._dp(),
            ep=1 if self.ep is None else self.ep,
            optimizer_shard=bool(self.optimizer_shard),
            pp_layers=None if layers is None else tuple(layers),
            pp_interleave=1 if self.pp_interleave is None else self.pp_interleave,
            shard_embedding=self.shard_embedding is not False,
            replicate_kv=self.replicate_kv,
        )
        if self.devices not in (None, degrees.num_ranks):
            assert self.devices is not None
            raise _misfit(self.devices, f"{degrees.tp} (mp) * {degrees.pp} (pp) * {degrees.dp} (dp)", degrees.num_ranks)
        return degrees

    def _dp(self) -> int:
        """Return the data-parallel degree: as told, or what is left of the devices, or 1."""
        if self.dp is None and self.devices is not None:
            return self.devices // ((self.mp or 1) * (self.pp or 1))
        return 1 if self.dp is None else self.dp


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _layers_of(model: Path) -> int | None:
    """Return the number of layers in the config.json in, at or beside `model`; None where none says it."""
    from ckptkit.layout.run_yaml import SIZES

    file = model / CONFIG if model.is_dir() else model if model.suffix == ".json" else model.parent / CONFIG
    config = read_config(file) if file.is_file() else {}
    found = (config.get(name) for name in SIZES["num_layers"])
    return next((number for number in found if type(number) is int), None)


def _misfit(devices: int, product: str, count: int) -> UsageError:
    return UsageError(
        f"`--devices {devices}` is no multiple of {product} = {count}"
        if devices % count
        else f"`--devices {devices}` is not {product} = {count}",
        why="every device has its place in the layout",
        hint="leave out `--dp`: it is what remains of the devices; or change a degree",
    )


WHOLE = Parallel()
