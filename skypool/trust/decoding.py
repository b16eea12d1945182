"""Decodes values in skypool's data format. Nodes that may not run code in this process send them.

`writing` has the encoder. Only these values can be read: those with a function in `_ACTS` of this module or in `MAKERS`
of `values` and `arrays`, and instances of the classes that `classes.resolve` accepts.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skypool.trust.bounded_reader import FAULTY, Cursor, NotData
from skypool.trust.format import (
    ALLOWED,
    BOOLS,
    BYTES,
    DICT,
    DICT_ITEM,
    DICT_PRICE,
    DICTS,
    ERROR,
    FALSE,
    FIELD_PRICE,
    FLAGS,
    FLOAT,
    FLOATS,
    FROZENSET,
    INSTANCE,
    INSTANCE_PRICE,
    INSTANCES,
    INT,
    INTS,
    LIST,
    LIST_PRICE,
    LONG,
    MARKED,
    MEMBER,
    NAMED,
    NONE,
    OTHER,
    OTHER_PRICE,
    OTHERS,
    REF,
    ROW,
    ROW_ITEM,
    SET,
    SET_ITEM,
    SET_PRICE,
    SHAPE_PRICE,
    SLOT,
    STR,
    STR_PRICE,
    STRS,
    TRUE,
    TUPLE,
    TUPLES,
    WIDE,
    extra_price,
    long_price,
    text_price,
)
from skypool.wire.frames import Buffer


class ClassShape:
    """A class as the sender of a value named it, with the names of the fields that are sent for each instance.

    Args:
        module: the name of the module that defines the class.
        name: the qualified name of the class, such as "Outer.Inner".
        fields: the names of the fields, in the order in which their values are sent; () if the class is no data class.

    Attributes:
        kind: the class on the client; None until the decoder has found the class.
        make: makes instances of the class: a `classes.Filler` for a data class, otherwise a function. None until the
            decoder has found the class, and if its instances must not be made.
    """

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
"""The number of keys up to which adding keys to a dictionary is fast even if all their hashes are equal."""
_LARGEST_KEY = 1000
"""The greatest number of parts of one dictionary key, counting the contents of all tuples and frozensets in the key."""
_DEEPEST_KEY = 50
"""The greatest depth of nested tuples and frozensets in a key. It limits the recursion that hashing a key takes."""
_KEYS_AT_ONCE = 512
"""The number of keys of the types in `_ATOMS` that are added in one portion. The time of each portion is measured."""
_SLOW = 0.001
"""The time in seconds that adding one portion of keys may take: twenty times the usual time."""
_SLOW_IN_ALL = 0.05
"""The sum of seconds by which the portions of one value may exceed `_SLOW`. Above this sum, the value is refused."""
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")


class Reading(Cursor):
    """A decoder that reads one value in skypool's data format.

    Its methods raise NotData if a value is not allowed or too large. Any other exception means that the bytes are not
    in skypool's data format.

    Args:
        buffers: the encoded value, followed by the buffers of its large arrays.
        resolve: called with this decoder, a tag and a `ClassShape`. It finds the class, and sets `kind` and `make` of
            the `ClassShape`. It raises NotData if the class is not allowed.
        makers: the functions that build values of further types, by the name of the type, such as "date" or "ndarray".
        keys: types whose instances may be dictionary keys. Numbers, texts, bytes and None are always allowed, and so
            are tuples and frozensets of allowed keys. Hashing instances of such a type must be fast and run no code of
            the user.
        parent: the decoder of the enclosing value, if this value is a part of another value. Both then share one
            budget.

    Attributes:
        memo: the values that later references may name by their index.
        shapes: the classes that occurred, which later values may name by their index.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        resolve: Callable[[Reading, int, ClassShape], None],
        makers: dict[str, Maker],
        keys: frozenset[type],
        parent: Reading | None = None,
    ) -> None:
        super().__init__(buffers, parent)
        self.memo: list[Any] = []
        self.shapes: list[ClassShape] = []
        self.resolve = resolve
        self.makers = makers
        self.keys = keys
        self.alone = 0
        """The number of exceptions that enclose the next value. References are not allowed inside an exception."""
        self._slow = 0.0

    def read(self) -> Any:
        """Read and return the whole value, which must begin with `format.MAGIC` and use all buffers. Call this once."""
        self.check_begin()
        value = self.value()
        self.check_end()
        return value

    def value(self) -> Any:
        """Read and return the next value, with all values inside it."""
        act = _ACTS[self.data[self.at]]
        self.at += 1
        return act(self)

    # --- keys ------------------------------------------------------------------------------------------------

    def check_key(self, key: Any) -> int:
        """Check that a value may be a dictionary key or set member. Subtract its price from the budget, and return it.

        The price is higher for keys that take longer to hash. Tuples and frozensets are checked with their
        contents. A part that occurs several times counts each time.

        Raises:
            NotData: hashing the key would run code of its class, or its price exceeds the budget. Also for a key of
                more than 1000 parts or more than 50 levels of nesting.
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
                    raise NotData(
                        f"it contains a dictionary key or set member with more than {_LARGEST_KEY} parts or more than "
                        f"{_DEEPEST_KEY} levels of nesting",
                        advice="Return the large keys in a list instead",
                    )
                todo.extend((part, depth + 1) for part in each)
            elif kind in self.keys:
                price += 400
            elif kind not in _ATOMS:
                name = f"{kind.__module__}.{kind.__qualname__}"
                raise NotData(
                    f"it contains a dictionary key or set member of the type {name}, whose __hash__ would run code",
                    name,
                    True,
                )
        price += SLOT * seen
        self.charge(price)
        return price

    def mapping(self, keys: list[Any], values: Iterable[Any]) -> dict[Any, Any]:
        """Return a dictionary of these keys and values. Of equal keys, the last one's value is kept.

        Each key is checked by `check_key`. Raises NotData if a key is not allowed, or if adding the keys takes far too
        long, because a sender may choose keys with equal hashes to keep this process busy.
        """
        made: dict[Any, Any] = {}
        following = iter(values)
        self._add(keys, lambda part: made.update(zip(part, following)))  # noqa: B905 - the keys of the part end first
        return made

    def members(self, items: list[Any]) -> set[Any]:
        """Return a set of these items. Each item is checked by `check_key`, as a dictionary key is.

        Raises NotData if an item may not be a set member, or if adding the items takes far too long, because a sender
        may choose items with equal hashes to keep this process busy.
        """
        made: set[Any] = set()
        self._add(items, made.update)
        return made

    def _add(self, keys: list[Any], add: Callable[[list[Any]], object]) -> None:
        """Add keys to a container in portions with `add`, and measure the processor time that each portion takes.

        A portion may take 1 ms. All portions of a value together may exceed this limit by 50 ms, or NotData is raised.
        Texts and bytes are added in one step without a measurement. So are up to 64 keys that are numbers, texts, bytes
        or None.
        """
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
                raise NotData(
                    "it contains too many dictionary keys or set members with equal hashes (adding them took more than "
                    f"{_SLOW_IN_ALL:g} s too long)",
                    advice="Return these keys in a list instead",
                )

    # --- arguments and classes -------------------------------------------------------------------------------

    def arguments(self) -> tuple[Any, ...]:
        """Read the arguments from which another value is built, and return them as a tuple.

        Values that come later in the data can refer to an argument, but not to this tuple.
        """
        count = self.count()
        self.deeper()
        self.charge(SLOT * count)
        value = self.value
        made = tuple([value() for _ in range(count)])
        self.depth -= 1
        return made

    def shape(self, tag: int) -> ClassShape:
        """Read and return a class with the names of its fields, for a value with this tag.

        A class that occurred before in this value is encoded as its number, and any other class as its name.
        """
        index = self.number()
        if index < len(self.shapes):
            shape = self.shapes[index]
        else:
            self.charge(SHAPE_PRICE)
            names = [self.text() for _ in range(2 + self.count())]
            shape = ClassShape(names[0], names[1], tuple(names[2:]))
            self.resolve(self, tag, shape)
            self.shapes.append(shape)
        if shape.kind is None or shape.make is None:
            raise NotData(f"it names the class {shape} for two different kinds of values", str(shape), advice=FAULTY)
        return shape


def _hashes_itself(kind: type) -> bool:
    """Return True if a subclass of tuple, or a base class that comes before tuple, defines `__hash__` or `__eq__`."""
    return any(each.__dict__.keys() & {"__hash__", "__eq__"} for each in kind.__mro__[: kind.__mro__.index(tuple)])


def _unknown(r: Reading) -> Any:
    raise NotData(f"it contains a value with the unknown type code {r.data[r.at - 1]:#04x}", advice=FAULTY)


def _constant(value: Any) -> Callable[[Reading], Any]:
    def constant(r: Reading) -> Any:
        r.charge(SLOT)
        return value

    return constant


def _int(r: Reading) -> int:
    r.charge(SLOT + 8)
    at = r.at
    r.at = at + 8
    return _I64.unpack_from(r.data, at)[0]  # type: ignore[no-any-return]  # the format code gives this type


def _long(r: Reading) -> int:
    data = r.take(r.count())
    r.charge(long_price(len(data)))
    return int.from_bytes(data, "little", signed=True)


def _float(r: Reading) -> float:
    r.charge(SLOT + 8)
    at = r.at
    r.at = at + 8
    return _F64.unpack_from(r.data, at)[0]  # type: ignore[no-any-return]  # the format code gives this type


def _bytes(r: Reading) -> bytes:
    size = r.count()
    r.charge(SLOT + 40 + size)
    return bytes(r.take(size))


def _ref(r: Reading) -> Any:
    index = r.number()
    r.charge(SLOT)
    if r.alone:
        raise NotData("it contains an exception that refers to another value", advice=FAULTY)
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
    """Read a dictionary with more than 64 keys: their number, a list of keys and a list of values."""
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
    """Read a list of exactly `count` items, which is a part of another value. Raises NotData if it is anything else."""
    made = r.value()
    if type(made) is not list or len(made) != count:
        raise NotData(
            f"a list of {count} keys, values, set members or table cells in it is missing or has another length",
            advice=FAULTY,
        )
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
        raise NotData(f"it contains {data.count(bytes(1)) + 1} texts in a list that should have {count}", advice=FAULTY)
    made = str(data, "utf-8", "surrogatepass").split("\0")
    r.memo.append(made)
    return made


def _columns(r: Reading, width: int) -> tuple[int, list[list[Any]]]:
    """Read a table of `width` columns, and return (the number of rows, the columns). Raises NotData."""
    count = r.number()
    if count * (8 * width + 1) > 1 << 50 or not width:
        raise NotData(f"it contains a table of {count} rows and {width} columns, which is not possible", advice=FAULTY)
    r.charge((ROW + ROW_ITEM * width) * count)
    r.deeper()
    columns = [_items(r, count) for _ in range(width)]
    r.depth -= 1
    return count, columns


def _rows(r: Reading, made: list[Any]) -> list[Any]:
    """Append the rows of a table, and then the list of rows, to the `memo` of the decoder, and return the list."""
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
    return _rows(r, [dict(zip(keys, row)) for row in zip(*columns)])  # noqa: B905 - `_columns` checks the lengths


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
    """Return a function that reads a value with this tag: a class and arguments, of which it makes an instance."""

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
        raise NotData(f"it contains a value of the unknown type {name!r:.40}", advice=FAULTY)
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
