"""The machine that a pickle's opcodes work: a stack, a memo, and what it refuses.

Every bound is here: bytes are taken only from the pickle itself, the memo grows with the values stored in it, and a
name outside the table of `torch_globals.py` is never looked up, only remembered for the refusal. What does not live
here: the opcodes (`torch_unpickler.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptkit.errors import CorruptError, UnsafeError
from ckptkit.formats.torch_globals import GLOBALS
from ckptkit.formats.torch_objects import Builder, Foreign, Global, OddTensor, TensorView, shown

MAX_NAME_BYTES = 1024
MAX_MEMO_GAP = 1 << 16
MAX_FOREIGN_USES = 1000
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_UNSET = object()


class TruncatedPickle(CorruptError):
    """A pickle that goes on past the bytes given; `needed` is the least number of bytes to give instead."""

    def __init__(self, file_name: str, needed: int) -> None:
        super().__init__(
            f"the pickle in `{file_name}` ends too early",
            hint="the file was probably cut short while it was copied or downloaded; fetch it again",
        )
        self.needed = needed


class Machine:
    """The state of one pickle: `at` is the next byte, `marks` are heights of `stack`, `foreign` and `called` the names
    without a meaning that were asked for and called, in order."""

    __slots__ = ("at", "builder", "called", "data", "foreign", "foreign_uses", "marks", "memo", "stack", "used")

    def __init__(self, data: bytes, file_name: str, start: int) -> None:
        self.data = data
        self.at = start
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: list[object] = []
        self.used = 0
        self.foreign: dict[str, None] = {}
        self.foreign_uses = 0
        self.called: dict[str, None] = {}
        self.builder = Builder(file_name)

    def error(self, what: str) -> CorruptError:
        """Return the error that this pickle is damaged."""
        return self.builder.error(what)

    def refusal(self, verb: str, name: str, items: Sequence[str] = ()) -> UnsafeError:
        """Return the error that names what the pickle wants to use."""
        file_name = self.builder.file_name
        return UnsafeError(
            f"`{file_name}` asks to {verb} {shown(name)} when it is loaded",
            items=items,
            why="a pickle can run any code; only tensors and plain containers are read, and nothing is ever run",
            hint="prefer a safetensors copy of this checkpoint; if you trust the file, load it with PyTorch in a "
            "sandbox and save its tensors as safetensors there",
        )

    def foreign_refusal(self) -> UnsafeError:
        """Return the error that names the last call of a name without a meaning, and lists them all."""
        names = self.called or {name: None for name in self.foreign if name != "builtins.getattr"} or self.foreign
        items = [shown(name) for name in names] if len(names) > 1 else []
        return self.refusal("run" if self.called else "import", list(names)[-1], items)

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes of the pickle."""
        end = self.at + size
        if end > len(self.data):
            raise TruncatedPickle(self.builder.file_name, end)
        result = self.data[self.at : end]
        self.at = end
        return result

    def number(self, layout: struct.Struct) -> int:
        """Return the next number of the pickle."""
        try:
            value: int = layout.unpack_from(self.data, self.at)[0]
        except struct.error:
            raise TruncatedPickle(self.builder.file_name, self.at + layout.size) from None
        self.at += layout.size
        return value

    def line(self) -> str:
        """Return the next line of the pickle: a module or a name."""
        end = self.data.find(b"\n", self.at, self.at + MAX_NAME_BYTES)
        if end < 0:
            if self.at + MAX_NAME_BYTES > len(self.data):
                raise TruncatedPickle(self.builder.file_name, len(self.data) + 1)
            raise self.error(f"holds a name of more than {MAX_NAME_BYTES} bytes")
        text = self.decode(self.take(end - self.at))
        self.at += 1
        return text

    def decode(self, text: bytes) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("holds text that is not UTF-8") from None

    def since_mark(self) -> list[object]:
        """Return and remove the values above the last mark."""
        if not self.marks or self.marks[-1] > len(self.stack):
            raise self.error("closes a group that it did not open")
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def remember(self, index: int) -> None:
        """Store the top of the stack in the memo; indices are dense but for a bounded gap."""
        value = self.stack[-1]
        memo = self.memo
        if index == len(memo):
            memo.append(value)
        elif index < len(memo):
            memo[index] = value
        elif index - self.used <= MAX_MEMO_GAP:
            memo.extend([_UNSET] * (index - len(memo)))
            memo.append(value)
        else:
            raise self.error(f"numbers a value {index} after {self.used} values")
        self.used += 1

    def recall(self, index: int) -> None:
        """Push a value of the memo."""
        if index >= len(self.memo) or self.memo[index] is _UNSET:
            raise self.error(f"recalls value {index}, which it did not store")
        self.stack.append(self.memo[index])

    def name(self, module: str, name: str) -> None:
        """Push what (module, name) stands for."""
        module = _PYTHON2.get(module, module)
        known = GLOBALS.get((module, name))
        self.stack.append(self.unknown(f"{module}.{name}") if known is None else known)

    def unknown(self, name: str) -> Foreign:
        """Return a name without a meaning, and note that it was asked for; a file that goes on so is refused here."""
        self.foreign[name[:MAX_NAME_BYTES]] = None
        self.foreign_uses += 1
        if self.foreign_uses > MAX_FOREIGN_USES:
            raise self.foreign_refusal()
        return Foreign(name[:MAX_NAME_BYTES])

    def call_refusal(self, function: object, method: str = "") -> CorruptError:
        """Return the error for a call of `function`, or of its `method`, that the table does not have."""
        if isinstance(function, Foreign | Global):
            return self.refusal("run", function.name + method)
        return self.error(f"calls a {type(function).__name__}, which is not a function")

    def call(self, function: object, args: object) -> object:
        """Return the result of REDUCE, from the table."""
        if type(function) is Foreign:
            return self.call_foreign(function, args)
        if type(function) is not Global or function.call is None:
            raise self.call_refusal(function)
        if type(args) is not tuple:
            raise self.error(f"calls `{function.name}` without a tuple of arguments")
        return function.call(self.builder, args)

    def call_foreign(self, function: Foreign, args: object) -> Foreign:
        """Return a name for what a foreign call would give.

        Nothing runs, and the pickle is refused in the end; but reading on finds the call that matters: a call of
        `getattr(x, "y")` gives `x.y`, and arguments are made by calls that come before.
        """
        if function.name == "builtins.getattr" and type(args) is tuple and len(args) == 2:
            owner, attribute = args
            if isinstance(owner, Foreign | Global) and type(attribute) is str:
                return self.unknown(f"{owner.name}.{attribute}")
        self.called.pop(function.name, None)
        self.called[function.name] = None
        return self.unknown(f"{function.name}()")

    def build(self, target: object, state: object) -> None:
        """Accept the attributes of a container (BUILD), which hold no tensor of a state dict; refuse all else."""
        if isinstance(target, TensorView | OddTensor):
            raise self.refusal("run", "torch.Tensor.__setstate__")
        if type(target) is dict:
            self.builder.set_aside(state)
        elif type(target) is not Foreign:
            raise self.call_refusal(target, ".__setstate__")

    def put_pairs(self, pairs: list[object]) -> None:
        """Store key, value, key, value ... in the dict on top of the stack."""
        target = self.stack[-1]
        if type(target) is not dict or len(pairs) % 2:
            raise self.error("stores items in something that is not a dict")
        put = self.builder.put
        for i in range(0, len(pairs), 2):
            put(target, pairs[i], pairs[i + 1])

    def extend(self, values: list[object]) -> None:
        """Append values to the list on top of the stack (a set is a list here)."""
        target = self.stack[-1]
        if type(target) is not list:
            raise self.error("appends to something that is not a list")
        target.extend(values)
