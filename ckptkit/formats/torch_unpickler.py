"""Read a pickle without running it: a closed list of opcodes over inert values.

The standard `pickle.Unpickler` with `find_class` overridden was weighed and left: it still calls `__setstate__` and
sets attributes (BUILD), imports through copyreg (EXT), lets one opcode reserve gigabytes (PUT of a high index) and
hashes keys of any depth in C. This loop knows the opcodes that PyTorch writes (protocols 2 to 5), calls nothing but
the functions in `torch_globals.GLOBALS`, and is bounded: opcodes, memo and text cost at most their own bytes in the
file times a small constant. What does not live here: what the names build (`torch_globals.py`).
Format: the `pickletools` module of the standard library.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ckptkit.errors import CorruptError, UnsafeError
from ckptkit.formats.torch_machine import Machine, TruncatedPickle
from ckptkit.formats.torch_objects import Builder, Foreign, open_storage

MAX_OPCODES = 1 << 24


@dataclass(frozen=True, slots=True)
class Unpickled:
    """The object of one pickle, where the pickle ends, and what was built on the way."""

    value: object
    end: int
    builder: Builder


def unpickle(data: bytes, file_name: str, *, start: int = 0) -> Unpickled:
    """Return the object pickled in `data` from `start` on.

    The object is made of dict, list, tuple, str, int, float, bool, bytes, None and the records of
    `torch_objects`. Raises UnsafeError when the pickle names anything outside the table, CorruptError (or its
    subclass TruncatedPickle) when it is damaged.
    """
    machine = Machine(data, file_name, start)
    try:
        value = _run(machine)
    except TruncatedPickle:
        raise
    except CorruptError as error:
        if machine.foreign and not isinstance(error, UnsafeError):
            raise machine.foreign_refusal() from None
        raise
    if machine.foreign:
        raise machine.foreign_refusal()
    return Unpickled(value, machine.at, machine.builder)


def _run(machine: Machine) -> object:
    """Run to the STOP opcode and return the one object left."""
    data, operations, stop = machine.data, _OPERATIONS, pickle.STOP[0]
    try:
        for _ in range(MAX_OPCODES):
            code = data[machine.at]
            machine.at += 1
            if code == stop:
                return _result(machine)
            operations[code](machine)
    except IndexError:
        if machine.at >= len(data):
            raise TruncatedPickle(machine.builder.file_name, machine.at + 1) from None
        raise machine.error("takes more values than it gives") from None
    raise machine.error(f"has more than {MAX_OPCODES} operations")


def _result(machine: Machine) -> object:
    if len(machine.stack) != 1 or machine.marks:
        raise machine.error("leaves more than one object")
    return machine.stack[0]


Operation = Callable[[Machine], None]
_U1, _U2, _U4, _U8 = (struct.Struct(f"<{letter}") for letter in "BHIQ")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")


def _refuse_opcode(machine: Machine) -> None:
    """Refuse an opcode that is not on the list, by the name of what it would call or import."""
    code = machine.data[machine.at - 1]
    if code == pickle.INST[0]:
        machine.name(machine.line(), machine.line())
        raise machine.call_refusal(machine.stack.pop())
    if code == pickle.OBJ[0]:
        values = machine.since_mark() or [None]
        raise machine.call_refusal(values[0])
    for opcode, layout in ((pickle.EXT1, _U1), (pickle.EXT2, _U2), (pickle.EXT4, _U4)):
        if code == opcode[0]:
            raise machine.refusal("import", f"copyreg extension {machine.number(layout)}")
    names = {op.code: op.name for op in pickletools.opcodes}
    raise machine.error(f"uses the operation `{names.get(chr(code), hex(code))}`, which PyTorch does not write")


def _constant(value: object) -> Operation:
    return lambda machine: machine.stack.append(value)


def _number(layout: struct.Struct) -> Operation:
    return lambda machine: machine.stack.append(machine.number(layout))


def _text(layout: struct.Struct) -> Operation:
    return lambda machine: machine.stack.append(machine.decode(machine.take(machine.number(layout))))


def _bytes(layout: struct.Struct) -> Operation:
    return lambda machine: machine.stack.append(machine.take(machine.number(layout)))


def _python2_text(layout: struct.Struct) -> Operation:
    """Python 2's str is text here when it can be: the names in old files are."""

    def operation(machine: Machine) -> None:
        raw = machine.take(machine.number(layout))
        try:
            machine.stack.append(raw.decode("utf-8"))
        except UnicodeDecodeError:
            machine.stack.append(raw)

    return operation


def _small_int(machine: Machine) -> None:
    machine.stack.append(machine.data[machine.at])
    machine.at += 1


def _long(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(_U1)), "little", signed=True))


def _put1(machine: Machine) -> None:
    machine.remember(machine.data[machine.at])
    machine.at += 1


def _put4(machine: Machine) -> None:
    machine.remember(machine.number(_U4))


def _get1(machine: Machine) -> None:
    machine.recall(machine.data[machine.at])
    machine.at += 1


def _tuple_of(size: int) -> Operation:
    def operation(machine: Machine) -> None:
        stack = machine.stack
        if len(stack) < size:
            raise machine.error("takes more values than it gives")
        stack[-size:] = [tuple(stack[-size:])]

    return operation


def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    function = machine.stack.pop()
    machine.stack.append(machine.call(function, args))


def _new(num_args: int) -> Operation:
    """NEWOBJ and NEWOBJ_EX make an object of a class: there is no class in the table that a file may make so."""

    def operation(machine: Machine) -> None:
        args = [machine.stack.pop() for _ in range(num_args)]
        kind = machine.stack.pop()
        if not isinstance(kind, Foreign):
            raise machine.call_refusal(kind)
        machine.stack.append(machine.call_foreign(kind, args))

    return operation


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise machine.error("names a global by something that is not text")
    machine.name(module, name)


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.put_pairs([key, value])


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    machine.build(machine.stack[-1], state)


def _storage(machine: Machine) -> None:
    machine.stack.append(open_storage(machine.builder, machine.stack.pop()))


def _protocol(machine: Machine) -> None:
    if machine.number(_U1) > 5:
        raise machine.error("is of a protocol that does not exist")


def _frame(machine: Machine) -> None:
    """Pass over the size of a frame: it only helps to read ahead."""
    machine.number(_U8)


_LISTED: dict[int, Operation] = {
    code[0]: operation
    for code, operation in (
        (pickle.PROTO, _protocol),
        (pickle.FRAME, _frame),
        (pickle.MARK, lambda m: m.marks.append(len(m.stack))),
        (pickle.NONE, _constant(None)),
        (pickle.NEWTRUE, _constant(True)),
        (pickle.NEWFALSE, _constant(False)),
        (pickle.EMPTY_TUPLE, _constant(())),
        (pickle.EMPTY_LIST, lambda m: m.stack.append([])),
        (pickle.EMPTY_SET, lambda m: m.stack.append([])),
        (pickle.EMPTY_DICT, lambda m: m.stack.append({})),
        (pickle.BININT1, _small_int),
        (pickle.BININT2, _number(_U2)),
        (pickle.BININT, _number(_I4)),
        (pickle.LONG1, _long),
        (pickle.BINFLOAT, _number(_F8)),
        (pickle.SHORT_BINUNICODE, _text(_U1)),
        (pickle.BINUNICODE, _text(_U4)),
        (pickle.BINUNICODE8, _text(_U8)),
        (pickle.SHORT_BINSTRING, _python2_text(_U1)),
        (pickle.BINSTRING, _python2_text(_U4)),
        (pickle.SHORT_BINBYTES, _bytes(_U1)),
        (pickle.BINBYTES, _bytes(_U4)),
        (pickle.BINBYTES8, _bytes(_U8)),
        (pickle.BYTEARRAY8, _bytes(_U8)),
        (pickle.TUPLE1, _tuple_of(1)),
        (pickle.TUPLE2, _tuple_of(2)),
        (pickle.TUPLE3, _tuple_of(3)),
        (pickle.TUPLE, lambda m: m.stack.append(tuple(m.since_mark()))),
        (pickle.FROZENSET, lambda m: m.stack.append(m.since_mark())),
        (pickle.APPEND, lambda m: m.extend([m.stack.pop()])),
        (pickle.APPENDS, lambda m: m.extend(m.since_mark())),
        (pickle.ADDITEMS, lambda m: m.extend(m.since_mark())),
        (pickle.SETITEM, _set_item),
        (pickle.SETITEMS, lambda m: m.put_pairs(m.since_mark())),
        (pickle.BINPUT, _put1),
        (pickle.LONG_BINPUT, _put4),
        (pickle.MEMOIZE, lambda m: m.remember(len(m.memo))),
        (pickle.BINGET, _get1),
        (pickle.LONG_BINGET, lambda m: m.recall(m.number(_U4))),
        (pickle.GLOBAL, lambda m: m.name(m.line(), m.line())),
        (pickle.STACK_GLOBAL, _stack_global),
        (pickle.REDUCE, _reduce),
        (pickle.NEWOBJ, _new(1)),
        (pickle.NEWOBJ_EX, _new(2)),
        (pickle.BUILD, _build),
        (pickle.BINPERSID, _storage),
    )
}
_OPERATIONS = [_LISTED.get(code, _refuse_opcode) for code in range(256)]
