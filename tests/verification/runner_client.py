"""Run many jobs through one runner in this process: importing a framework costs seconds.

    python runner_client.py RUNNER SPECS.json [--mcore-stand-ins]

SPECS is a list of {"job": folder, "out": folder, "change": name or ""}; a change of CHANGES is made to the network
once it is built, for tests that want to see it go wrong, or to see that it works. Exit codes go to `codes.json` in the
working folder. With `--mcore-stand-ins`, CPU stand-ins take the place of Ascend's primitives before MindFormers is
imported, and the runner is told that it may run mcore networks here.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.verification.runners.main import main as run


def train(net: Any) -> None:
    """Let dropout drop."""
    net._model.train()


def lose_mask(net: Any) -> None:
    """Run without an attention mask."""
    forward = net._model.forward
    net._model.forward = lambda **arguments: forward(**{**arguments, "attention_mask": None})


def remember_inputs(net: Any) -> None:
    """Keep what one input made of dynamic rotary frequencies for the next."""
    importlib.import_module(type(net).__module__).renew_rotary = lambda *_: None


def halve_frequencies(net: Any) -> None:
    """Put other rotary frequencies."""
    for name in net.constants:
        net.put(name, net.get(name) / 2)


def pad_with_zero(net: Any) -> None:
    """Let a MindFormers network take id 0 for padding, which it masks."""
    net._cell.model.casual_mask.pad_token_id = 0


@contextmanager
def _nothing(names: Sequence[str]) -> Iterator[None]:
    yield


def stay_in_float32(net: Any) -> None:
    """Run in float32 what should run in another dtype."""
    if net.runner == "builtin":
        net._decoder._low_kernels.lower = lambda x: x
    else:
        net.lowered = _nothing


def keep_rounded(net: Any) -> None:
    """Leave the weights as rounding to the other dtype makes them."""
    lowered = net.lowered

    @contextmanager
    def changed(names: Sequence[str]) -> Iterator[None]:
        with lowered(names):
            yield
        for name in names:
            net.put(name, net.get(name).astype(np.float16).astype(np.float32))

    net.lowered = changed


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change
    for change in (
        train,
        lose_mask,
        remember_inputs,
        halve_frequencies,
        pad_with_zero,
        stay_in_float32,
        keep_rounded,
    )
}


def changed(build: Callable[..., Any], change: str) -> Callable[..., Any]:
    """Return `build`, followed by a change."""

    def build_changed(job: Any) -> Any:
        net = build(job)
        CHANGES[change](net)
        return net

    return build_changed if change else build


def main(argv: list[str]) -> int:
    runner, specs, *options = argv
    if "--mcore-stand-ins" in options:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "clients"))
        stand_ins = importlib.import_module("mcore_standins")
        stand_ins.install()
    build = importlib.import_module(f"ckptkit.verification.runners.{runner}").build
    if "--mcore-stand-ins" in options:
        build = functools.partial(build, mcore_anywhere=True, after_build=stand_ins.keep_attention_in_float32)
    codes = [
        run(changed(build, spec["change"]), [spec["job"], spec["out"]]) for spec in json.loads(Path(specs).read_text())
    ]
    Path("codes.json").write_text(json.dumps(codes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
