"""From the object of a PyTorch pickle to named tensors: state dicts, wrappers, and what is passed over.

The rule: a tensor is never lost in silence. Values that hold no tensor (an epoch, a config) are passed over with a
note; a tensor in a place that has no name is an error. What does not live here: bytes (`torch_pickle.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptkit.errors import SHOWN_ITEMS, CorruptError
from ckptkit.formats.torch_objects import OddTensor, Storage, TensorView, shown
from ckptkit.types import DTYPES

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "params", "net")
MAX_WRAPPERS = 4
DTYPE_OF_TORCH = {d.torch: d.name for d in DTYPES.values() if d.torch}
_TENSORS = (TensorView, OddTensor)
_CONTAINERS = (dict, list, tuple)


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The tensors of a state dict by name, all of a dtype in `DTYPE_OF_TORCH`, and what to tell about the rest."""

    tensors: dict[str, TensorView]
    notes: tuple[str, ...]


def named_tensors(value: object, aside: list[object], file_name: str) -> NamedTensors:
    """Return the tensors of `value`, a state dict or a dict that holds one under a usual key.

    `aside` are values of the same pickle that no reader would look at. Raises CorruptError when there is no state
    dict, when a tensor stands where no name leads, or when one is sparse, quantized or of an unknown dtype.
    """
    scan = _Scan()
    if any(map(scan.holds_tensor, aside)):
        raise CorruptError(
            f"`{file_name}` holds a tensor in an attribute, a hook or a key",
            why="it would be lost, since only entries of a state dict have names",
            hint="save the plain state dict with PyTorch, or save as safetensors",
        )
    notes: list[str] = []
    state = _unwrap(value, scan, file_name, notes)
    tensors: dict[str, TensorView] = {}
    odd: list[str] = []
    for name, tensor in state.items():
        if not isinstance(tensor, _TENSORS):
            continue
        if type(name) is not str:
            raise CorruptError(f"`{file_name}` holds a tensor under a key that is not text, {shown(name)}")
        if isinstance(tensor, TensorView) and tensor.dtype in DTYPE_OF_TORCH:
            tensors[name] = tensor
        else:
            what = tensor.what if isinstance(tensor, OddTensor) else f"of dtype `{tensor.dtype}`"
            odd.append(f"{shown(name)} is {what}")
    if odd:
        raise CorruptError(
            f"{len(odd)} tensors of `{file_name}` are of a kind that is not supported",
            items=odd,
            why="only plain strided arrays of the usual dtypes can be converted bit for bit",
            hint="make them plain with PyTorch (`to_dense`, `dequantize`, `resolve_conj`, `to`) and save them again",
        )
    return NamedTensors(tensors, tuple(notes))


def _unwrap(value: object, scan: _Scan, file_name: str, notes: list[str]) -> dict[object, object]:
    """Return the state dict inside `value`: itself, or what a usual key of it holds, however often nested."""
    for _ in range(MAX_WRAPPERS):
        if not isinstance(value, dict):
            kind = "a tensor" if isinstance(value, _TENSORS) else f"a {type(value).__name__}"
            raise CorruptError(
                f"`{file_name}` holds {kind}, not a dict of named tensors",
                hint="save a state dict: `torch.save(model.state_dict(), path)`",
            )
        deeper = _keys_of_hidden(value, scan)
        wrapper = deeper[0] if len(deeper) == 1 and deeper[0] in WRAPPERS else None
        named = any(isinstance(entry, _TENSORS) for entry in value.values())
        if deeper and (wrapper is None or named):
            raise CorruptError(
                f"`{file_name}` holds tensors in nested containers, not in one state dict",
                items=[f"under {shown(key)}" for key in deeper],
                why="tensors there have no plain name, and would be lost",
                hint="save the state dict of the model alone: `torch.save(model.state_dict(), path)`",
            )
        _note_others(value, wrapper, notes)
        if wrapper is None:
            return value
        notes.append(f"the tensors are those under the key {shown(wrapper)}")
        value = value[wrapper]
    raise CorruptError(f"`{file_name}` wraps its state dict more than {MAX_WRAPPERS} times")


def _keys_of_hidden(state: dict[object, object], scan: _Scan) -> list[object]:
    """Return keys whose value is no tensor but holds one, enough of them for a message."""
    found: list[object] = []
    for key, entry in state.items():
        if not isinstance(entry, _TENSORS) and scan.holds_tensor(entry):
            found.append(key)
            if len(found) > SHOWN_ITEMS:
                break
    return found


def _note_others(state: dict[object, object], wrapper: object, notes: list[str]) -> None:
    """Note the entries that are neither tensors nor the wrapper (None: there is none)."""
    others = [key for key, entry in state.items() if not isinstance(entry, _TENSORS)]
    if wrapper is not None:
        others.remove(wrapper)
    if others:
        listed = ", ".join(map(shown, others[:SHOWN_ITEMS]))
        more = f" and {len(others) - SHOWN_ITEMS} more" if len(others) > SHOWN_ITEMS else ""
        notes.append(f"{len(others)} entries are not tensors and are passed over: {listed}{more}")


class _Scan:
    """Looks for tensors in nested containers, each container once however often it is shared."""

    __slots__ = ("clean",)

    def __init__(self) -> None:
        self.clean: set[int] = set()

    def holds_tensor(self, value: object) -> bool:
        """Say whether a tensor or a storage can be reached from `value`."""
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, (*_TENSORS, Storage)):
                return True
            if not isinstance(item, _CONTAINERS) or id(item) in self.clean or id(item) in seen:
                continue
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
        self.clean |= seen
        return False
