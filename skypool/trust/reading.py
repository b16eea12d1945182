"""Decoder of skypool's data format, which nodes write that are trusted with data only.

The format is a tag and what belongs to it, one value after the other. `writing` writes it. There is no tag that calls
anything or imports anything: what a value may be stands in the tables here and in `values`, `arrays` and `classes`.

Everything that is made costs a price in bytes, which is at least the memory that it takes and pays for the time that
making it takes. All prices together must not exceed `GROWS` times what was sent, plus `SPARE`. An honest writer counts
the same prices and adds zeros where its text is shorter than that.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skypool.wire.frames import Buffer

GROWS = 3
"""How many bytes of objects one byte that was sent pays for. With what was sent itself that is four times as much."""
SPARE = 16 << 10
"""Bytes of objects that are free, so that small values need no zeros."""
DEEPEST = 150
"""How deep values may be nested. Reading one level takes two levels of Python's own stack."""

MAGIC = b"\x93sky1"
"""How a value begins; a pickle never does."""
# The first byte of a value says what it is: single values,
NONE = ord("N")
TRUE = ord("T")
FALSE = ord("F")
INT = ord("i")
LONG = ord("I")
FLOAT = ord("f")
STR = ord("s")
BYTES = ord("b")
REF = ord("r")
MARKED = ord("m")
# collections,
LIST = ord("l")
TUPLE = ord("t")
DICT = ord("d")
WIDE = ord("w")
SET = ord("S")
FROZENSET = ord("Z")
# columns of many values of one type,
INTS = ord("q")
FLOATS = ord("g")
BOOLS = ord("o")
STRS = ord("u")
TUPLES = ord("R")
DICTS = ord("D")
INSTANCES = ord("C")
# and values of classes.
MEMBER = ord("e")
FLAGS = ord("E")
NAMED = ord("n")
INSTANCE = ord("O")
ERROR = ord("X")
ALLOWED = ord("A")
OTHER = ord("x")

# Prices in bytes, somewhat above what CPython 3.11 allocates.
SLOT = 32
"""The price of whatever has none of its own, and of its place in what it is in."""
LIST_PRICE = 120
DICT_PRICE = 320
DICT_ITEM = 150
SET_PRICE = 280
SET_ITEM = 170
ROW = 120
ROW_ITEM = 16
INSTANCE_PRICE = 400
FIELD_PRICE = 100
SHAPE_PRICE = 3000
STR_PRICE = 72
OTHERS = {
    **dict.fromkeys(("date", "time", "datetime", "timedelta", "decimal", "uuid", "complex", "bytearray"), 300),
    **dict.fromkeys(("range", "slice", "fraction"), 400),
    **dict.fromkeys(("path", "address", "scalar", "ndarray"), 900),
    **dict.fromkeys(("zone", "dtype", "tensor"), 3000),
}
"""Prices of what has a name in the format."""
OTHER_PRICE = 1200
"""The price of all others of these."""


def text_price(size: int, is_ascii: bool) -> int:
    """The price of a text of so many bytes: each letter takes up to four, and more while it is read."""
    return STR_PRICE + (size if is_ascii else 6 * size)


def long_price(size: int) -> int:
    """The price of an integer of so many bytes."""
    return 48 + size + size // 4


def extra_price(args: Iterable[Any]) -> int:
    """The price of what is made of these, beside that of its kind: it copies them, or counts with them."""
    price = 0
    for each in args:
        kind = type(each)
        if kind is str or kind is bytes or kind is bytearray:
            price += 3 * len(each)
        elif kind is list or kind is dict or kind is tuple:
            price += 250 * len(each)
        elif kind is int and (bits := each.bit_length()) > 64:
            price += bits // 2 + (bits // 30) ** 2 // 15
    return price


class Refused(Exception):
    """What was sent is no data.

    Attributes:
        name: what it named, such as "os.system", "" where that is not the point; why: what is wrong with it.
        allowable: whether the user might allow that name.
    """

    def __init__(self, why: str, name: str = "", allowable: bool = False) -> None:
        self.why = why
        self.name = name
        self.allowable = allowable
        super().__init__(why)


class Shape:
    """A class as a node names it, with the names of the fields that it sends; `kind` is what that is here."""

    __slots__ = ("fields", "kind", "make", "module", "name")

    def __init__(self, module: str, name: str, fields: tuple[str, ...]) -> None:
        self.module = module
        self.name = name
        self.fields = fields
        self.kind: Any = None
        self.make: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


Maker = Callable[["Reading", tuple[Any, ...]], Any]
_UNHASHED = frozenset({str, bytes})
_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
_FEW_KEYS = 64
_LARGEST_KEY = 1000
_DEEPEST_KEY = 50
_KEYS_AT_ONCE = 512
_SLOW = 0.001
"""Seconds that adding `_KEYS_AT_ONCE` keys may take: twenty times what it does, and far less than what they pay for."""
_SLOW_IN_ALL = 0.05
"""Seconds beyond those after which the keys of a value were made to collide."""
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")


class Reading:
    """Reads one value.

    Args:
        resolve: gives a `Shape` its `kind` and `make`, by the tag that it is for, or refuses it.
        makers: of what has a name in the format.
        keys: types beyond the plain ones whose instances may be keys: their hash is cheap and nobody's own code.
        parent: reads the value that this one is a part of, and bears what it costs.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        resolve: Callable[[Reading, int, Shape], None],
        makers: dict[str, Maker],
        keys: frozenset[type],
        parent: Reading | None = None,
    ) -> None:
        data = buffers[0]
        self.data = data if type(data) is bytes else bytes(data) if len(data) < 1 << 20 else memoryview(data)
        self.at = len(MAGIC)
        self.memo: list[Any] = []
        self.shapes: list[Shape] = []
        self.resolve = resolve
        self.makers = makers
        self.keys = keys
        self.buffers = buffers
        self._taken = 1
        self.left: int = GROWS * sum(map(len, buffers)) + SPARE if parent is None else parent.left
        self._parent = parent
        self.depth: int = parent.depth + 10 if parent else 0
        self.alone = 0
        """Within how many values this is that hold no references to others."""
        self._slow = 0.0

    def read(self) -> Any:
        """Return the value.

        Raises:
            Refused: it is no data. Other exceptions: it is not in this format.
        """
        if bytes(self.data[: len(MAGIC)]) != MAGIC:
            raise Refused("it is no value in skypool's format")
        value = self.value()
        if self._taken != len(self.buffers):
            raise Refused("it has buffers that belong to nothing")
        return value

    def value(self) -> Any:
        """The next value."""
        act = _ACTS[self.data[self.at]]
        self.at += 1
        return act(self)

    # --- what it costs ---------------------------------------------------------------------------------------

    def charge(self, price: int) -> None:
        """Pay for what is about to be made.

        Raises:
            Refused: not so much was sent.
        """
        if self._parent is not None:
            self._parent.charge(price)
        self.left -= price
        if self.left < 0:
            raise Refused("it would become far more than was sent")

    def deeper(self) -> None:
        """Begin a value in a value; `depth` is taken back when it has ended."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Refused(f"it is nested more than {DEEPEST} deep")

    def check_key(self, key: Any) -> int:
        """Check that a value may be hashed, and pay for it: a tuple or a frozenset counts with all that is in it.

        A part that is in it many times over counts each time, as it does where two keys are compared.
        """
        todo = [(key, 0)]
        seen = 0
        price = 0
        while todo:
            each, depth = todo.pop()
            seen += 1
            kind = type(each)
            if kind is int:
                price += each.bit_length() >> 3
            elif kind is str or kind is bytes:
                price += len(each) >> 2
            elif kind is frozenset or (isinstance(each, tuple) and not (kind is not tuple and _hashes_itself(kind))):
                if seen + len(todo) + len(each) > _LARGEST_KEY or depth > _DEEPEST_KEY:
                    raise Refused("one of its keys is a monster")
                todo.extend((part, depth + 1) for part in each)
            elif kind in self.keys:
                price += 400
            elif kind not in _ATOMS:
                name = f"{kind.__module__}.{kind.__qualname__}"
                raise Refused(f"it has a key of type {name}, whose own code would run to hash it", name, True)
        price += SLOT * seen
        self.charge(price)
        return price

    def mapping(self, keys: list[Any], values: Iterable[Any]) -> dict[Any, Any]:
        """A dictionary, whose keys take no time to speak of to hash and to compare."""
        made: dict[Any, Any] = {}
        following = iter(values)
        self._add(keys, lambda part: made.update(zip(part, following)))  # noqa: B905 - the part is what ends first
        return made

    def members(self, items: list[Any]) -> set[Any]:
        """A set of them, likewise."""
        made: set[Any] = set()
        self._add(items, made.update)
        return made

    def _add(self, keys: list[Any], add: Callable[[list[Any]], object]) -> None:
        kinds = set(map(type, keys))
        if kinds <= _UNHASHED or (kinds <= _ATOMS and int not in kinds and len(keys) <= _FEW_KEYS):
            add(keys)
            return
        for key in keys:
            kind = type(key)
            if kind is int:
                if (bits := key.bit_length()) > 64:
                    self.charge(bits >> 3)
            elif kind not in _ATOMS:
                self.check_key(key)
        if len(keys) <= _FEW_KEYS and kinds <= _ATOMS:
            add(keys)
            return
        step = _KEYS_AT_ONCE if kinds <= _ATOMS else _FEW_KEYS
        for at in range(0, len(keys), step):
            part = keys[at : at + step]
            began = time.thread_time()
            add(part)
            self._slow += max(0.0, time.thread_time() - began - _SLOW)
            if self._slow > _SLOW_IN_ALL:
                raise Refused("its keys were made to collide")

    # --- parts -----------------------------------------------------------------------------------------------

    def number(self) -> int:
        """A length or an index."""
        at = self.at
        self.at = at + 8
        return _U64.unpack_from(self.data, at)[0]  # type: ignore[no-any-return]  # as the format says

    def count(self, least: int = 1) -> int:
        """How many follow, of which each takes so many bytes at least: never more than there can be."""
        count = self.number()
        if count * least > len(self.data) - self.at:
            raise Refused("it is cut off")
        return count

    def take(self, size: int) -> Any:
        """The next bytes."""
        start = self.at
        self.at = start + size
        if self.at > len(self.data):
            raise Refused("it is cut off")
        return self.data[start : self.at]

    def view(self, size: int) -> memoryview:
        """The next bytes, which are not copied."""
        start = self.at
        self.at = start + size
        return memoryview(self.data)[start : self.at]

    def text(self) -> str:
        """A text."""
        data = bytes(self.take(self.count()))
        self.charge(text_price(len(data), data.isascii()))
        return str(data, "utf-8", "surrogatepass")

    def arguments(self) -> tuple[Any, ...]:
        """Some values, which are no value together."""
        count = self.count()
        self.deeper()
        self.charge(SLOT * count)
        value = self.value
        made = tuple([value() for _ in range(count)])
        self.depth -= 1
        return made

    def shape(self, tag: int) -> Shape:
        """A class: by its number, or by its name if this is the first one."""
        index = self.number()
        if index < len(self.shapes):
            shape = self.shapes[index]
        else:
            self.charge(SHAPE_PRICE)
            names = [self.text() for _ in range(2 + self.count())]
            shape = Shape(names[0], names[1], tuple(names[2:]))
            self.resolve(self, tag, shape)
            self.shapes.append(shape)
        if shape.kind is None or shape.make is None:
            raise Refused(f"it makes something else of {shape}", str(shape))
        return shape

    def next_buffer(self) -> memoryview:
        """The next of the buffers that travel beside the value."""
        if self._taken == len(self.buffers):
            raise Refused("a buffer of it is missing")
        self._taken += 1
        return memoryview(self.buffers[self._taken - 1])


def _hashes_itself(kind: type) -> bool:
    """Whether a kind of tuple has a hash or a comparison that is not a tuple's."""
    return any(each.__dict__.keys() & {"__hash__", "__eq__"} for each in kind.__mro__[: kind.__mro__.index(tuple)])


def _unknown(r: Reading) -> Any:
    raise Refused(f"its tag {r.data[r.at - 1]:#04x} is none that a worker writes")


def _constant(value: Any) -> Callable[[Reading], Any]:
    def constant(r: Reading) -> Any:
        r.charge(SLOT)
        return value

    return constant


def _int(r: Reading) -> int:
    r.charge(SLOT + 8)
    at = r.at
    r.at = at + 8
    return _I64.unpack_from(r.data, at)[0]  # type: ignore[no-any-return]  # as the format says


def _long(r: Reading) -> int:
    data = r.take(r.count())
    r.charge(long_price(len(data)))
    return int.from_bytes(data, "little", signed=True)


def _float(r: Reading) -> float:
    r.charge(SLOT + 8)
    at = r.at
    r.at = at + 8
    return _F64.unpack_from(r.data, at)[0]  # type: ignore[no-any-return]  # as the format says


def _bytes(r: Reading) -> bytes:
    size = r.count()
    r.charge(SLOT + 40 + size)
    return bytes(r.take(size))


def _ref(r: Reading) -> Any:
    index = r.number()
    r.charge(SLOT)
    if r.alone:
        raise Refused("an exception of it refers to something else")
    return r.memo[index]


def _marked(r: Reading) -> Any:
    value = r.value()
    r.memo.append(value)
    return value


def _list(r: Reading) -> list[Any]:
    count = r.count()
    r.charge(LIST_PRICE + 10 * count)
    made: list[Any] = []
    r.memo.append(made)
    r.deeper()
    made += [r.value() for _ in range(count)]
    r.depth -= 1
    return made


def _tuple(r: Reading) -> tuple[Any, ...]:
    count = r.count()
    r.charge(LIST_PRICE + 20 * count)
    r.deeper()
    made = tuple([r.value() for _ in range(count)])
    r.depth -= 1
    r.memo.append(made)
    return made


def _dict(r: Reading) -> dict[Any, Any]:
    count = r.count(2)
    r.charge(DICT_PRICE + DICT_ITEM * count)
    made: dict[Any, Any] = {}
    r.memo.append(made)
    r.deeper()
    keys = [r.value() for _ in range(count)]
    made.update(r.mapping(keys, [r.value() for _ in range(count)]))
    r.depth -= 1
    return made


def _wide(r: Reading) -> dict[Any, Any]:
    """A dictionary whose keys and values came as two lists."""
    count = r.number()
    made: dict[Any, Any] = {}
    r.memo.append(made)
    r.deeper()
    keys = _items(r, count)
    r.charge(DICT_PRICE + 2 * DICT_ITEM * count)
    made.update(r.mapping(keys, _items(r, count)))
    r.depth -= 1
    return made


def _items(r: Reading, count: int) -> list[Any]:
    """A list of so many, which has no number of its own to refer to."""
    made = r.value()
    if type(made) is not list or len(made) != count:
        raise Refused(f"it has something else than the {count} keys or values of a dictionary, or fields of rows")
    return made


def _set(r: Reading) -> set[Any]:
    made: set[Any] = set()
    r.memo.append(made)
    made |= _members(r)
    return made


def _frozenset(r: Reading) -> frozenset[Any]:
    made = frozenset(_members(r))
    r.memo.append(made)
    return made


def _members(r: Reading) -> set[Any]:
    count = r.number()
    r.deeper()
    items = _items(r, count)
    r.depth -= 1
    r.charge(2 * (SET_PRICE + SET_ITEM * count))
    return r.members(items)


def _ints(r: Reading) -> list[int]:
    count = r.count(8)
    r.charge(LIST_PRICE + 42 * count)
    made: list[int] = r.view(8 * count).cast("q").tolist()
    r.memo.append(made)
    return made


def _floats(r: Reading) -> list[float]:
    count = r.count(8)
    r.charge(LIST_PRICE + 36 * count)
    made: list[Any] = r.view(8 * count).cast("d").tolist()
    r.memo.append(made)
    return made


def _bools(r: Reading) -> list[bool]:
    count = r.count()
    r.charge(LIST_PRICE + 10 * count)
    made = list(map((0).__ne__, r.take(count)))
    r.memo.append(made)
    return made


def _strs(r: Reading) -> list[str]:
    count = r.count()
    data = bytes(r.take(r.count()))
    r.charge(LIST_PRICE + STR_PRICE * count + text_price(2 * len(data), data.isascii()))
    if not count or data.count(b"\0") != count - 1:
        raise Refused("its texts are not as many as it says")
    made = str(data, "utf-8", "surrogatepass").split("\0")
    r.memo.append(made)
    return made


def _columns(r: Reading, width: int) -> tuple[int, list[list[Any]]]:
    """How many rows there are, and their columns."""
    count = r.number()
    if count * (8 * width + 1) > 1 << 50 or not width:
        raise Refused("it has rows of nothing")
    r.charge((ROW + ROW_ITEM * width) * count)
    r.deeper()
    columns = [_items(r, count) for _ in range(width)]
    r.depth -= 1
    return count, columns


def _rows(r: Reading, made: list[Any]) -> list[Any]:
    """These rows as a list, each with a number to refer to."""
    r.memo += made
    r.memo.append(made)
    return made


def _tuples(r: Reading) -> list[tuple[Any, ...]]:
    _, columns = _columns(r, r.count())
    return _rows(r, list(zip(*columns, strict=True)))


def _dicts(r: Reading) -> list[dict[str, Any]]:
    keys = [r.text() for _ in range(r.count())]
    count, columns = _columns(r, len(keys))
    r.charge((DICT_PRICE - ROW + (DICT_ITEM * len(keys) if len(keys) > 5 else 0)) * count)
    return _rows(r, [dict(zip(keys, row)) for row in zip(*columns)])  # noqa: B905 - as many: `_columns` counts them


def _instances(r: Reading) -> list[Any]:
    shape = r.shape(INSTANCE)
    count, columns = _columns(r, len(shape.fields))
    r.charge((INSTANCE_PRICE + FIELD_PRICE * len(shape.fields)) * count)
    make: Any = shape.make
    return _rows(r, make.rows(columns))


def _instance(r: Reading) -> Any:
    shape = r.shape(INSTANCE)
    r.charge(INSTANCE_PRICE + FIELD_PRICE * len(shape.fields))
    fill: Any = shape.make
    made = fill.blank()
    r.memo.append(made)
    r.deeper()
    fill.fill(made, [r.value() for _ in shape.fields])
    r.depth -= 1
    return made


def _of_shape(tag: int) -> Callable[[Reading], Any]:
    """For what is made of a class and some values: `make(reading, values)`."""

    def made_of(r: Reading) -> Any:
        shape = r.shape(tag)
        r.charge(INSTANCE_PRICE)
        r.alone += tag == ERROR
        values = r.arguments()
        r.alone -= tag == ERROR
        assert shape.make is not None
        made = shape.make(r, values)
        r.memo.append(made)
        return made

    return made_of


def _other(r: Reading) -> Any:
    start = r.at + 1
    r.at = start + r.data[r.at]
    name = str(r.data[start : r.at], "ascii")
    make = r.makers.get(name)
    if make is None:
        raise Refused(f"it holds a {name!r:.40}, which is nothing that is known here")
    args = r.arguments()
    r.charge(OTHERS.get(name, OTHER_PRICE) + extra_price(args))
    made = make(r, args)
    r.memo.append(made)
    return made


_ACTS: list[Callable[[Reading], Any]] = [_unknown] * 256
for _tag, _act in {
    NONE: _constant(None), TRUE: _constant(True), FALSE: _constant(False), INT: _int, LONG: _long, FLOAT: _float,
    STR: Reading.text, BYTES: _bytes, REF: _ref, MARKED: _marked, LIST: _list, TUPLE: _tuple, DICT: _dict,
    WIDE: _wide, SET: _set, FROZENSET: _frozenset, INTS: _ints, FLOATS: _floats, BOOLS: _bools, STRS: _strs,
    TUPLES: _tuples, DICTS: _dicts, INSTANCES: _instances, INSTANCE: _instance, OTHER: _other,
    **{tag: _of_shape(tag) for tag in (MEMBER, FLAGS, NAMED, ERROR, ALLOWED)},
}.items():  # fmt: skip
    _ACTS[_tag] = _act
