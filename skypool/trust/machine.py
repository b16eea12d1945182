"""Pickles from strangers, read as data: a machine of our own for the few opcodes that an honest worker writes.

Nothing that a pickle names is ever looked up by walking attributes, and no callable is ever on the stack: a name is a
`Name` until a table says what stands for it. What is nothing but numbers, texts and containers is left to the C
unpickler once a regular expression has seen every opcode of it.
"""

from __future__ import annotations

import pickle
import re
import struct
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from skypool.wire import Buffer

Maker = Callable[["Machine", tuple[Any, ...]], Any]


def _sized_up_to(most: int) -> bytes:
    """A byte that says how many follow it, and those."""
    return rb"(?:" + b"|".join(b"%b.{%d}" % (re.escape(bytes([n])), n) for n in range(most + 1)) + rb")"


_NUMBER = rb"[N\x88\x89]|K.|M..|G.{8}|J.{4}|\x8a" + _sized_up_to(8)
_COMMON = _NUMBER + rb"|\x8c" + _sized_up_to(255) + rb"|[\x94(\]ae)]|h.|j.{4}|\x95.{8}"
_WITHOUT_TUPLES = re.compile(rb"\x80[\x04\x05](?:" + _COMMON + rb"|[}su])*+\.", re.DOTALL)
_WITHOUT_DICTS = re.compile(rb"\x80[\x04\x05](?:" + _COMMON + rb"|[t\x85-\x87])*+\.", re.DOTALL)
"""Pickles that can do no harm in C: no tuple is a key there, whose hash may never end; no integer is beyond 64 bit."""
_NUMBERS = re.compile(rb"(?:" + _NUMBER + rb")*+", re.DOTALL)
_NUMBER_OPS = frozenset(b"NKMJG\x88\x89\x8a")
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_RUN = 64

_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
_UNHASHED = frozenset({str, bytes})
_MOST_ALIKE = 256
_LARGEST_KEY = 1000
CHAINS = (deque, defaultdict, slice)
"""What CPython frees by calling itself: a long chain of these, one directly in the other, would end the process."""


def is_plain(data: Buffer) -> bool:
    """Whether a pickle is nothing but numbers, texts and containers of them, and the C unpickler may read it."""
    return bool(_WITHOUT_TUPLES.fullmatch(data) or _WITHOUT_DICTS.fullmatch(data))


class Refused(Exception):
    """What a pickle holds is no data.

    Attributes:
        name: what it named, such as "os.system", "" where that is not the point; why: what is wrong with it.
        allowable: whether the user might allow that name.
    """

    def __init__(self, why: str, name: str = "", allowable: bool = False) -> None:
        self.why, self.name, self.allowable = why, name, allowable
        super().__init__(why)


class Name:
    """A class or a function that a pickle names. It stands for nothing until a table says so."""

    __slots__ = ("__weakref__", "call", "module", "name", "new")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.call: Maker | None = None
        self.new: Maker | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self} is a name in a pickle that is being read")


class Pending:
    """What becomes a value when its state is known. `place` is where the pickle remembers it."""

    __slots__ = ("__weakref__", "finish", "place", "what")

    def __init__(self, what: str, finish: Callable[[Any], Any]) -> None:
        self.what, self.finish = what, finish
        self.place: int | None = None


class Machine:
    """Reads one pickle.

    Args:
        find: gives a `Name` its `call` and `new`, what stands for calling it and for making one of it, or refuses it.
        parent: reads the pickle that this one is a part of, and bears what it costs.
    """

    def __init__(
        self, buffers: Sequence[Buffer], find: Callable[[Machine, Name], None], parent: Machine | None = None
    ) -> None:
        data = buffers[0]
        self.data = bytes(data) if len(data) <= 1 << 20 else memoryview(data)
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.find = find
        self.setters: dict[type, Callable[[Any, Any], None]] = {}
        """What sets the state of an instance that this machine made."""
        self.keys: set[type] = set()
        """Types beyond the plain ones whose instances may be keys: their hash is cheap and nobody's own code."""
        self._buffers = list(buffers[1:])
        self._taken = 0
        self._room = 16 * sum(map(len, buffers)) + 65536
        self._parent = parent
        self._depth: int = parent._depth + 1 if parent else 0
        if self._depth > 20:
            raise Refused("it holds pickles in pickles in pickles")
        self._hashes: dict[int, Counter[int]] = {}
        self._unfinished: list[weakref.ref[Any]] = []

    def read(self) -> Any:
        """The value.

        Raises:
            Refused: it is no data. Other exceptions: it is no pickle.
        """
        value = self._run()
        if self._taken != len(self._buffers) or self.at != len(self.data) or self.stack or self.marks:
            raise Refused("it has parts that belong to nothing")
        self.memo.clear()
        for each in self._unfinished:
            left = each()  # alive, it is somewhere in the value
            if isinstance(left, Pending):
                raise Refused(f"it holds an unfinished {left.what}")
            if left is not None:
                raise Refused(f"it holds {left} itself, and a class or a function is no data", str(left))
        return value

    def _run(self) -> Any:
        data, acts = self.data, _OPS
        while (op := data[self.at]) != 0x2E:
            self.at += 1
            act = acts.get(op)
            if act is None:
                raise Refused(f"its opcode {op:#04x} is none that a worker writes")
            act(self)
        self.at += 1
        return self.stack.pop()

    # --- what it costs ---------------------------------------------------------------------------------------

    def charge(self, amount: int) -> None:
        """So much is copied or looked at beyond reading it once: no pickle makes more of itself than it is."""
        if self._parent is not None:
            self._parent.charge(amount)
            return
        self._room -= amount
        if self._room < 0:
            raise Refused("it would become far more than was sent")

    def check_keys(self, target: Any, keys: Sequence[Any]) -> None:
        """Whether these may become keys of `target`: hashing and comparing them takes no time to speak of."""
        kinds = set(map(type, keys))
        if kinds <= _UNHASHED:
            return
        if not kinds <= _ATOMS:
            for key in keys:
                self.check_key(key)
        if len(target) + len(keys) <= _MOST_ALIKE:
            return
        alike = self._hashes.get(id(target))
        if alike is None:
            alike = self._hashes[id(target)] = Counter(map(hash, target))
        hashes = list(map(hash, keys))
        alike.update(hashes)
        if max(map(alike.__getitem__, hashes)) > _MOST_ALIKE:
            raise Refused("its keys were made to collide")

    def check_key(self, key: Any) -> None:
        """Whether one value may be hashed: a tuple counts with all that is in it."""
        todo, seen = [(key, 0)], 0
        while todo:
            each, depth = todo.pop()
            seen += 1
            kind = type(each)
            if kind in _ATOMS or kind is frozenset or kind in self.keys:
                continue
            if not isinstance(each, tuple) or (kind is not tuple and _hashes_itself(kind)):
                name = f"{kind.__module__}.{kind.__qualname__}"
                raise Refused(f"it has a key of type {name}, whose own code would run to hash it", name, True)
            if seen + len(todo) + len(each) > _LARGEST_KEY or depth > 50:
                raise Refused("one of its keys is a monster")
            todo.extend((part, depth + 1) for part in each)
        self.charge(seen)

    # --- names and instances ---------------------------------------------------------------------------------

    def named(self, module: str, name: str) -> Name:
        """A name, of which it is watched that it is no part of the value."""
        made = Name(module, name)
        self._unfinished.append(weakref.ref(made))
        return made

    def pending(self, what: str, finish: Callable[[Any], Any]) -> Pending:
        """Something that waits for its state."""
        made = Pending(what, finish)
        self._unfinished.append(weakref.ref(made))
        return made

    def pop_name(self) -> Name:
        name = self.stack.pop()
        if type(name) is not Name:
            raise Refused(f"it would call a {type(name).__name__}")
        if name.call is None and name.new is None:
            self.find(self, name)
        return name

    def pop_args(self) -> tuple[Any, ...]:
        args = self.stack.pop()
        if type(args) is not tuple:
            raise Refused("it calls something with no tuple of arguments")
        return args

    def next_buffer(self) -> memoryview:
        """The next of the buffers that travel beside the pickle."""
        if self._taken == len(self._buffers):
            raise Refused("a buffer of it is missing")
        self._taken += 1
        return memoryview(self._buffers[self._taken - 1])


def _hashes_itself(kind: type) -> bool:
    """Whether a kind of tuple has a hash or a comparison that is not a tuple's."""
    return any(each.__dict__.keys() & {"__hash__", "__eq__"} for each in kind.__mro__[: kind.__mro__.index(tuple)])


def _take(m: Machine, n: int) -> Any:
    """The next `n` bytes."""
    start, m.at = m.at, m.at + n
    if m.at > len(m.data):
        raise Refused("it is cut off")
    return m.data[start : m.at]


def _pop_mark(m: Machine) -> list[Any]:
    start = m.marks.pop()
    items = m.stack[start:]
    del m.stack[start:]
    return items


def _number_op(size: int, decode: Callable[[Any], object]) -> Callable[[Machine], None]:
    """For a number of so many bytes. Where more follow, the C unpickler takes as many as there are."""

    def number(m: Machine) -> None:
        data, start = m.data, m.at
        end = m.at = start + size
        if end >= len(data):
            raise Refused("it is cut off")
        if data[end] in _NUMBER_OPS and (found := _NUMBERS.match(data, start - 1)) and found.end() - start >= _RUN:
            m.at = found.end()
            m.stack += pickle.loads(b"\x80\x04(" + data[start - 1 : m.at] + b"t.")
        else:
            m.stack.append(decode(data[start:end]))

    return number


def _long(m: Machine) -> None:
    m.stack.append(int.from_bytes(_take(m, _take(m, 1)[0]), "little", signed=True))


def _longer(m: Machine) -> None:
    m.stack.append(int.from_bytes(_take(m, int.from_bytes(_take(m, 4), "little")), "little", signed=True))


def _unsigned(data: Any) -> int:
    return int.from_bytes(data, "little")


def _signed(data: Any) -> int:
    return int.from_bytes(data, "little", signed=True)


def _float(data: Any) -> float:
    return struct.unpack(">d", data)[0]  # type: ignore[no-any-return]  # as the format says


def _short_text(m: Machine) -> None:
    start = m.at + 1
    m.at = end = start + m.data[m.at]
    if end > len(m.data):
        raise Refused("it is cut off")
    m.stack.append(str(m.data[start:end], "utf-8", "surrogatepass"))


def _sized_op(size: int, kind: Callable[[Any], object]) -> Callable[[Machine], None]:
    def sized(m: Machine) -> None:
        m.stack.append(kind(_take(m, int.from_bytes(_take(m, size), "little"))))

    return sized


def _text(data: Any) -> str:
    return str(data, "utf-8", "surrogatepass")


def _push_op(make: Callable[[], object]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(make())


def _tuple_op(n: int) -> Callable[[Machine], None]:
    def tuple_(m: Machine) -> None:
        if len(m.stack) < n:
            raise Refused("it takes what is not there")
        m.stack[-n:] = [tuple(m.stack[-n:])]

    return tuple_


def _proto(m: Machine) -> None:
    if _take(m, 1)[0] > pickle.HIGHEST_PROTOCOL:
        raise Refused("it is of a protocol that is not known here")


def _frame(m: Machine) -> None:
    _take(m, 8)  # how long it is: of use to who reads from a file


def _mark(m: Machine) -> None:
    m.marks.append(len(m.stack))


def _pop(m: Machine) -> None:
    m.stack.pop()


def _memoize(m: Machine) -> None:
    value = m.stack[-1]
    if type(value) is Pending:
        value.place = len(m.memo)
    m.memo.append(value)


def _get(m: Machine) -> None:
    m.stack.append(m.memo[m.data[m.at]])
    m.at += 1


def _long_get(m: Machine) -> None:
    m.stack.append(m.memo[int.from_bytes(_take(m, 4), "little")])


def _extend(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    if type(target) is list:
        target.extend(items)
    elif type(target) is deque:
        check_chain(items)
        target.extend(items)
    else:
        raise Refused(f"it appends to a {type(target).__name__}")


def _set_items(m: Machine, items: list[Any]) -> None:
    target = m.stack[-1]
    keys, values = items[::2], items[1::2]
    if len(keys) != len(values):
        raise Refused("a key of it has no value")
    if type(target) not in (dict, OrderedDict, defaultdict, Counter):
        raise Refused(f"it sets items of a {type(target).__name__}")
    m.check_keys(target, keys)
    if type(target) is OrderedDict:
        target.update(zip(keys, values, strict=True))
        return
    if type(target) is defaultdict:
        check_chain(values)
    dict.update(target, zip(keys, values, strict=True))


def check_chain(parts: Iterable[Any]) -> None:
    """That none of these would make a chain with what they are to be in; see `CHAINS`."""
    for part in parts:
        if isinstance(part, CHAINS) or (type(part).__name__ == "ndarray" and part.dtype.hasobject):
            raise Refused(f"it has a {type(part).__name__} directly in another container that is freed like it")


def _add_items(m: Machine) -> None:
    items, target = _pop_mark(m), m.stack[-1]
    if type(target) is not set:
        raise Refused(f"it adds to a {type(target).__name__}")
    m.check_keys(target, items)
    target.update(items)


def _frozenset(m: Machine) -> None:
    items = _pop_mark(m)
    m.check_keys((), items)
    m.stack.append(frozenset(items))


def _name(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise Refused("it names something by no text")
    m.stack.append(m.named(module, name))


def _reduce(m: Machine) -> None:
    args, name = m.pop_args(), m.pop_name()
    if name.call is None:
        raise Refused(f"it would call {name}", str(name), True)
    m.stack.append(name.call(m, args))


def _new(m: Machine) -> None:
    args, name = m.pop_args(), m.pop_name()
    if name.new is None:
        raise Refused(f"it would make a {name}", str(name), True)
    m.stack.append(name.new(m, args))


def _build(m: Machine) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if type(target) is Pending:
        value = m.stack[-1] = target.finish(state)
        if target.place is not None:
            m.memo[target.place] = value
        return
    setter = m.setters.get(type(target))
    if setter is None:
        kind = f"{type(target).__module__}.{type(target).__qualname__}"
        raise Refused(f"it would set the state of a {kind}", kind)
    setter(target, state)


def _read_only(m: Machine) -> None:
    buffer = m.stack.pop()
    if type(buffer) is not memoryview:
        raise Refused("it has no buffer where one is due")
    m.stack.append(buffer.toreadonly())


_OPS: dict[int, Callable[[Machine], None]] = {
    **{op: _number_op(0, lambda _, constant=constant: constant) for op, constant in _CONSTANTS.items()},  # type: ignore[misc]
    **{op: _number_op(size, _unsigned) for op, size in ((0x4B, 1), (0x4D, 2))},
    **{op: _sized_op(size, _text) for op, size in ((0x58, 4), (0x8D, 8))},
    **{op: _sized_op(size, bytes) for op, size in ((0x43, 1), (0x42, 4), (0x8E, 8))},
    **{op: _push_op(make) for op, make in ((0x29, tuple), (0x5D, list), (0x7D, dict), (0x8F, set))},
    **{op: _tuple_op(n) for op, n in ((0x85, 1), (0x86, 2), (0x87, 3))},
    0x4A: _number_op(4, _signed),
    0x47: _number_op(8, _float),
    0x8A: _long,
    0x8B: _longer,
    0x8C: _short_text,
    0x96: _sized_op(8, bytearray),
    0x80: _proto,
    0x95: _frame,
    0x28: _mark,
    0x30: _pop,
    0x31: lambda m: cast(None, _pop_mark(m)),
    0x94: _memoize,
    0x68: _get,
    0x6A: _long_get,
    0x74: lambda m: m.stack.append(tuple(_pop_mark(m))),
    0x61: lambda m: _extend(m, [m.stack.pop()]),
    0x65: lambda m: _extend(m, _pop_mark(m)),
    0x73: lambda m: _set_items(m, [m.stack.pop(-2), m.stack.pop()]),
    0x75: lambda m: _set_items(m, _pop_mark(m)),
    0x90: _add_items,
    0x91: _frozenset,
    0x93: _name,
    0x52: _reduce,
    0x81: _new,
    0x62: _build,
    0x97: lambda m: m.stack.append(m.next_buffer()),
    0x98: _read_only,
}
