"""What a transformers model gives inside while it runs: by hooks, and by the matrix products that it calls.

Its own forward function runs; it is told on here, and stopped before each block (`pausing.py`). What does not live
here: the network as a runner's `Net` (`torch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ckptkit.verification.runners.net import LAYER, Tap, Watch
from ckptkit.verification.runners.pausing import Pause

_PRODUCTS = ("q @ k", "weights @ v")  # the matrix products of eager attention, in their order; the first is not scaled
_ANY = "a projection"  # of a network that stacks its experts: its weight is a part of a parameter


@dataclass(slots=True)
class _Watching:
    """Who is told of a run. `part` is the output that is being made, empty outside of the layers; `products` counts
    the matrix products of its attention; `seen` is what the last projection was given: several share it."""

    tap: Tap | None = None
    pause: Pause | None = None
    watch: Watch | None = None
    part: str = ""
    products: int = 0
    seen: Any = None


class Watcher:
    """Hooks on a model whose layers have the numbers `layers`; they tell whoever watches."""

    def __init__(self, torch: Any, model: Any, layers: Sequence[int]) -> None:
        self._torch = torch
        self._now = _Watching()
        self._labels = {id(tensor): _label(name) for name, tensor in model.named_parameters()}
        body = model.model
        self._hook(body.embed_tokens, "embedding", before="embedding")
        for number, layer in zip(layers, body.layers, strict=True):
            name = f"layers.{number}"
            self._hook(layer, name, before=name)
            layer.register_forward_pre_hook(self._enter(f"{name}.attention"))
            self._hook(layer.self_attn, f"{name}.attention")
            layer.post_attention_layernorm.register_forward_pre_hook(
                self._enter(f"{name}.mlp", sum_of=f"{name}.attention")
            )
            self._hook(layer.mlp, f"{name}.mlp")
            layer.mlp.register_forward_hook(self._enter(""))
        self._hook(body.norm, "norm", before="head")

    @contextmanager
    def watching(self, tap: Tap | None, pause: Pause | None, watch: Watch | None) -> Iterator[None]:
        """Tell these of what runs inside of the context."""
        self._now = _Watching(tap, pause, watch)
        with nullcontext() if watch is None else self._products():
            yield
        self._now = _Watching()

    def _hook(self, module: Any, name: str, *, before: str = "") -> None:
        def stop(*_: Any) -> None:
            now = self._now
            if now.pause is not None:
                now.pause(before)
                self._now = now  # another one may have run in the meantime

        def tell(_module: Any, _arguments: Any, output: Any) -> None:
            if self._now.tap is not None:
                self._now.tap(name, output[0] if isinstance(output, tuple) else output)

        if before:
            module.register_forward_pre_hook(stop)
        module.register_forward_hook(tell)

    def _enter(self, part: str, *, sum_of: str = "") -> Callable[..., None]:
        """Return a hook that notes which output is being made; `sum_of` is one that was just added to the others."""

        def enter(_module: Any, arguments: Any, *_: Any) -> None:
            now = self._now
            now.part, now.products, now.seen = part, 0, None
            if sum_of and now.watch is not None:
                now.watch(sum_of, "the sum with it", arguments[0])

        return enter

    def _products(self) -> AbstractContextManager[Any]:
        """Return a context in which every matrix product inside of a layer is told of."""
        linear, matmul = self._torch.nn.functional.linear, self._torch.matmul
        watcher = self

        class Products(self._torch.overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]  # untyped
            def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if func is linear:
                    watcher._see_projection(args[0], args[1], result)
                elif func is matmul:
                    watcher._see_product(result)
                return result

        context: AbstractContextManager[Any] = Products()
        return context

    def _see_projection(self, x: Any, weight: Any, result: Any) -> None:
        now = self._now
        if not now.part or now.watch is None:
            return
        label = self._labels.get(id(weight), _ANY)
        if now.seen is not x:
            now.watch(now.part, f"the input of {label}", x)
            now.seen = x
        now.watch(now.part, label, result)

    def _see_product(self, result: Any) -> None:
        now = self._now
        if now.watch is not None and now.part.endswith(".attention"):
            now.watch(now.part, _PRODUCTS[min(now.products, 1)], result)
            now.products += 1


def _label(name: str) -> str:
    """Return what a layer's module is called, from a parameter's name: `down_proj`, `experts.3.down_proj`."""
    found = LAYER.search(name)
    return name if found is None else ".".join(name[found.end() :].split(".")[1:-1])
