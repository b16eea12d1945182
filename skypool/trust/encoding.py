"""Encodes values in skypool's data format, on nodes that may not run code on their client.

This module writes only values that the client can read. For any other value it raises a WriteError, which has the
reason and the place of the refused part inside the value. Arrays of numpy and tensors of torch can be written, but this
module does not import these libraries. In this module, "the reader" is the decoder on the client.
"""

from __future__ import annotations

import copyreg
import enum
import json
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from skypool.trust import classes, values
from skypool.trust.format import (
    ALLOWED,
    BOOLS,
    BYTES,
    DEEPEST,
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
    GROWS,
    INSTANCE,
    INSTANCE_PRICE,
    INSTANCES,
    INT,
    INTS,
    LIST,
    LIST_PRICE,
    LONG,
    MAGIC,
    MARKED,
    MEMBER,
    NAMED,
    NONE,
    OTHER,
    OTHER_PRICE,
    OTHERS,
    REF,
    SET,
    SET_ITEM,
    SET_PRICE,
    SHAPE_PRICE,
    SLOT,
    SPARE,
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
from skypool.trust.refusals import WriteError, refusal, short_form
from skypool.trust.tables import table_of
from skypool.wire.frames import Buffer
from skypool.wire.unpicklable import name_of

JSON = b"\x93sky{"
"""The first bytes of a small value that is written as JSON."""
MOST_JSON = 200
"""The greatest length in bytes of a value that is written as JSON."""
_U64 = struct.Struct("<Q").pack
_I64 = struct.Struct("<bq").pack
_F64 = struct.Struct("<bd").pack
_SMALL_BUFFER = 1024
"""The size in bytes from which an array's memory is sent as a separate buffer, not as a part of the encoded value."""
_SHORT = 32
"""The greatest length of a text or bytes object that is written at each occurrence, without references to it."""
_FEW = 4
"""The number of items up to which a list is written item by item."""
_MOST_DICT = 64
"""The number of keys up to which a dictionary is written item by item."""
_PLAIN_JSON = frozenset({type(None), bool, int, float, str})


def _too_deep() -> WriteError:
    return WriteError(f"its nesting is more than {DEEPEST} levels deep", advice="Return a value with less nesting")


class _Entangled(Exception):
    """Raised if a cell of a table refers to a row of this table. The whole value is then written without tables."""


def write(value: object, allowed: classes.Allowed) -> list[Buffer]:
    """Return the buffers of a value in skypool's data format: the encoded value, then the memory of its large arrays.

    A small value that JSON can represent is written as JSON with the prefix `JSON`, in one buffer.

    Args:
        value: not changed here. The caller must not change it until the buffers are sent, because large arrays are not
            copied.
        allowed: classes that the user allows in results, from the pool's argument `allow_results`.

    Raises:
        WriteError: the client could not read the value.
    """
    if _is_json(value):
        text = json.dumps(value).encode("ascii")
        if len(text) <= MOST_JSON:
            return [JSON + text]
    try:
        return _Writing(allowed, tables=True).buffers_of(value)
    except _Entangled:
        return _Writing(allowed, tables=False).buffers_of(value)


def _is_json(value: object) -> bool:
    """Return True for None, small numbers and ASCII texts, and for small dictionaries of these."""
    kind = type(value)
    if kind is str:
        return len(value) < MOST_JSON and value.isascii()  # type: ignore[arg-type, attr-defined]  # a str here
    if kind is int:
        return abs(value) < 1 << 63  # type: ignore[arg-type]  # an int here
    if kind in _PLAIN_JSON:
        return True
    if kind is dict and len(value) < _FEW * 4:  # type: ignore[arg-type]
        return all(type(k) is str and k.isascii() and type(v) in _PLAIN_JSON and _is_json(v) for k, v in value.items())  # type: ignore[attr-defined]
    return False


class _Writing:
    """An encoder that writes one value, and counts its price. Make a new one for each value.

    Its methods raise WriteError if a part cannot be written as data, and _Entangled if tables must not be used.
    """

    def __init__(self, allowed: classes.Allowed, tables: bool) -> None:
        self._allowed = allowed
        self._tables = tables
        self._out = bytearray(MAGIC)
        self._beside: list[Buffer] = []
        self._price = 0
        self._memo: dict[int, int] = {}
        self._numbered = 0
        self._kept: list[object] = []
        self._open: set[int] = set()
        self._shapes: dict[tuple[str, str, tuple[str, ...]], int] = {}
        self._alone = 0
        self._depth = 0

    def buffers_of(self, value: object) -> list[Buffer]:
        """Return the buffers of a value: the encoded value, then the memory of large arrays.

        The reader's budget depends on the number of bytes sent. So zeros are added if these are too few for the price.
        """
        try:
            self.value(value)
        except RecursionError:
            raise _too_deep() from None
        size = len(self._out) + sum(map(len, self._beside))
        missing = (self._price + self._price // 50 - SPARE) // GROWS + 64 - size
        if missing > 0:
            self._out += bytes(missing)
        return [bytes(self._out), *self._beside]

    def value(self, value: Any) -> None:
        """Append a value, with all values inside it, to the encoded data."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
        else:
            self._unusual(value)

    # --- plain values ----------------------------------------------------------------------------------------

    def put_none(self, _: None) -> None:
        self._price += SLOT
        self._out.append(NONE)

    def put_bool(self, value: Any) -> None:
        self._price += SLOT
        self._out.append(TRUE if value else FALSE)

    def put_int(self, value: Any) -> None:
        if -(1 << 63) <= value < 1 << 63:
            self._price += SLOT + 8
            self._out += _I64(INT, value)
            return
        size = value.bit_length() // 8 + 1
        self._price += long_price(size)
        self._out.append(LONG)
        self._out += _U64(size) + value.to_bytes(size, "little", signed=True)

    def put_float(self, value: Any) -> None:
        self._price += SLOT + 8
        self._out += _F64(FLOAT, value)

    def put_str(self, value: Any) -> None:
        if len(value) > _SHORT:
            if self._again(value):
                return
            self._out.append(MARKED)
            self._out.append(STR)
            self._text(value)
            self._number(value)
            return
        self._out.append(STR)
        self._text(value)

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._price += text_price(len(data), value.isascii())
        self._out += _U64(len(data))
        self._out += data

    def put_bytes(self, value: Any) -> None:
        if len(value) > _SHORT:
            if self._again(value):
                return
            self._out.append(MARKED)
        self._price += SLOT + 40 + len(value)
        self._out.append(BYTES)
        self._out += _U64(len(value))
        self._out += value
        if len(value) > _SHORT:
            self._number(value)

    # --- references to values that were written before -------------------------------------------------------

    def _again(self, value: object) -> bool:
        """If this object was written before, write a reference to it and return True. Otherwise return False.

        Inside an exception, the result is always False. Raises _Entangled if the object is a row of a table that is
        being written. Some values, such as tuples, cannot be referred to before they are complete. For one that
        contains itself, raises _Entangled if tables are in use, and otherwise WriteError.
        """
        if self._alone or (number := self._memo.get(id(value))) is None:
            if id(value) in self._open:
                if self._tables:
                    raise _Entangled
                raise WriteError(
                    f"it contains a {name_of(type(value))} that contains itself",
                    advice="Return a value without circular references",
                )
            return False
        if number < 0:
            raise _Entangled
        self._price += SLOT
        self._out.append(REF)
        self._out += _U64(number)
        return True

    def _number(self, value: object) -> None:
        """Give a value the next number, from 0. References to the value are written with this number."""
        # called before the parts of a list, dictionary, set or data class are written, and after other values
        if not self._alone:
            self._memo[id(value)] = self._numbered
            self._kept.append(value)
        self._numbered += 1

    def _deeper(self, parts: Iterable[Any], path: Callable[[int], str]) -> None:
        """Write the parts of a value, one level deeper. `path(index)` is the path of a part, for errors."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise _too_deep()
        done = 0
        try:
            for part in parts:
                self.value(part)
                done += 1
        except WriteError as e:
            e.path = path(done) + e.path
            raise
        self._depth -= 1

    # --- containers ------------------------------------------------------------------------------------------

    def put_list(self, value: Any) -> None:
        if not self._again(value):
            self._list(value, value)

    def _list(self, items: Sequence[Any], owner: object, path: Callable[[int], str] = "[{}]".format) -> None:
        """Write a list, in a compact form if it has more than four items and they are similar.

        `owner` is what later references point to; None for a part of another value, such as a column of a table. `path`
        returns the path of an item by its index.
        """
        if owner is None:
            owner = _Nobody()
        if len(items) > _FEW and self._run(items, path):
            self._number(owner)
            return
        self._price += LIST_PRICE + 10 * len(items)
        self._out.append(LIST)
        self._out += _U64(len(items))
        self._number(owner)
        self._deeper(items, path)

    def _run(self, items: Sequence[Any], path: Callable[[int], str]) -> bool:
        """Write items of one type in a compact form, and return True. If none fits, write nothing and return False.

        Compact forms exist for integers of at most 64 bits, floats, booleans and short texts. Tuples, dictionaries and
        instances of data classes are written as tables, except inside exceptions.
        """
        kinds = set(map(type, items))
        if len(kinds) != 1:
            return False
        (kind,) = kinds
        count = len(items)
        if kind is int:
            try:
                data = struct.pack(f"<{count}q", *items)
            except struct.error:
                return False
            return self._packed(INTS, count, data, 42)
        if kind is float:
            return self._packed(FLOATS, count, struct.pack(f"<{count}d", *items), 36)
        if kind is bool:
            return self._packed(BOOLS, count, bytes(items), 10)
        if kind is str:
            return self._strs(items)
        return self._tables and not self._alone and self._table(kind, items, path)

    def _packed(self, tag: int, count: int, data: bytes, price: int) -> bool:
        self._price += LIST_PRICE + price * count
        self._out.append(tag)
        self._out += _U64(count)
        self._out += data
        return True

    def _strs(self, items: Sequence[str]) -> bool:
        text = "\0".join(items)
        if text.count("\0") != len(items) - 1 or len(text) > 2 * _SHORT * len(items):
            return False
        data = text.encode("utf-8", "surrogatepass")
        self._price += LIST_PRICE + STR_PRICE * len(items) + text_price(2 * len(data), text.isascii())
        self._out.append(STRS)
        self._out += _U64(len(items)) + _U64(len(data)) + data
        return True

    def _table(self, kind: type, items: Sequence[Any], path: Callable[[int], str]) -> bool:
        """Write rows of type `kind` as columns, and return True. Return False if they form no table."""
        table = table_of(kind, items)
        if table is None or any(id(item) in self._memo for item in items):
            return False
        self._out.append(table.tag)
        if table.tag == TUPLES:
            self._out += _U64(len(table.names))
        elif table.tag == DICTS:
            self._out += _U64(len(table.names))
            for each in table.names:
                self._text(each)
        else:
            self._shape(kind, tuple(table.names))
        self._price += table.row_price * len(items)
        self._out += _U64(len(items))
        # the number -1 marks the rows of this table: no cell of the table may refer to such a row
        self._memo.update(dict.fromkeys(map(id, items), -1))
        self._depth += 1
        for name, column in zip(table.names, table.columns, strict=True):
            cell = f".{name}" if table.tag == INSTANCES else f"[{name!r:.40}]"
            self._list(column, None, lambda index, cell=cell: path(index) + cell)  # type: ignore[misc]
        self._depth -= 1
        for item in items:
            self._number(item)
        return True

    def put_tuple(self, value: Any) -> None:
        if value and self._again(value):
            return
        self._price += LIST_PRICE + 20 * len(value)
        self._out.append(TUPLE)
        self._out += _U64(len(value))
        self._open.add(id(value))
        self._deeper(value, "[{}]".format)
        self._open.discard(id(value))
        self._number(value)

    def put_dict(self, value: Any) -> None:
        if self._again(value):
            return
        keys = list(value)
        if len(keys) <= _MOST_DICT:
            self._price += DICT_PRICE + DICT_ITEM * len(keys)
            self._out.append(DICT)
            self._out += _U64(len(keys))
            self._number(value)
            self._deeper(keys, lambda index: f".keys()[{index}]")
            self._deeper(value.values(), lambda index: f"[{short_form(keys[index])}]")
        else:
            self._price += DICT_PRICE + 2 * DICT_ITEM * len(keys)
            self._out.append(WIDE)
            self._out += _U64(len(keys))
            self._number(value)
            self._depth += 1
            self._list(keys, None, lambda index: f".keys()[{index}]")
            self._list(list(value.values()), None, lambda index: f"[{short_form(keys[index])}]")
            self._depth -= 1
        self._key_price(keys)

    def put_set(self, value: Any) -> None:
        if not self._again(value):
            self._out.append(SET)
            self._number(value)
            self._members(value)

    def put_frozenset(self, value: Any) -> None:
        if not self._again(value):
            self._out.append(FROZENSET)
            self._members(value)
            self._number(value)

    def _members(self, value: Any) -> None:
        self._out += _U64(len(value))
        self._price += 2 * (SET_PRICE + SET_ITEM * len(value))
        items = list(value)
        self._depth += 1
        self._list(items, None, lambda index: f"{{{short_form(items[index])}}}")
        self._depth -= 1
        self._key_price(items)

    def _key_price(self, keys: list[Any]) -> None:
        """Add the price of these dictionary keys or set members to the price of the value."""
        # at least what the reader subtracts: 0 if all are texts or bytes
        if set(map(type, keys)) <= {str, bytes}:
            return
        todo = [*keys]
        while todo:
            each = todo.pop()
            self._price += SLOT
            if isinstance(each, (tuple, frozenset)):
                todo += each
            elif type(each) is int:
                self._price += each.bit_length() >> 2
            else:
                self._price += len(each) if type(each) in (str, bytes) else 500

    # --- everything else -------------------------------------------------------------------------------------

    def other(self, name: str, args: Sequence[Any]) -> None:
        """Write a value whose type has a name in the data format, such as "date", with the arguments to build it."""
        self._price += OTHERS.get(name, OTHER_PRICE) + extra_price(args)
        self._out += bytes([OTHER, len(name)]) + name.encode()
        self._arguments(args)

    def _arguments(self, args: Sequence[Any], path: Callable[[int], str] = ".args[{}]".format) -> None:
        self._price += SLOT * len(args)
        self._out += _U64(len(args))
        self._deeper(args, path)

    def _shape(self, kind: type, names: tuple[str, ...] = ()) -> None:
        """Write a class with the names of its fields, or its number if it was written before. Raises WriteError."""
        module = kind.__module__
        name = kind.__qualname__
        if "<locals>" in name:
            raise WriteError(
                f"it contains an instance of {module}.{name}, a class that is defined inside a function",
                advice="Define the class at the top of a module",
            )
        known = (module, name, names)
        if known in self._shapes:
            self._out += _U64(self._shapes[known])
            return
        self._out += _U64(len(self._shapes)) + _U64(len(names))
        self._shapes[known] = len(self._shapes)
        self._price += SHAPE_PRICE
        for each in (module, name, *names):
            self._text(each)

    def _unusual(self, value: Any) -> None:
        kind = type(value)
        if self._again(value):
            return
        if f"{kind.__module__}.{kind.__qualname__}" in self._allowed:
            self._allowed_value(value)
        elif isinstance(value, enum.Enum):
            self._member(value)
        elif isinstance(value, BaseException):
            self._error(value)
        elif isinstance(value, tuple) and type(getattr(kind, "_fields", None)) is tuple:
            self._out.append(NAMED)
            self._shape(kind)
            self._price += INSTANCE_PRICE
            self._open.add(id(value))
            self._arguments(tuple(value), lambda index: f".{kind._fields[index]}")
            self._open.discard(id(value))
        elif classes.is_data(kind) and (state := classes.state_of(value)) is not None:
            self._out.append(INSTANCE)
            self._shape(kind, tuple(state))
            self._price += INSTANCE_PRICE + FIELD_PRICE * len(state)
            self._number(value)
            names = list(state)
            self._deeper(state.values(), lambda index: f".{names[index]}")
            return
        elif (parts := values.parts_of(value)) is not None:
            name, args = parts
            self._open.add(id(value))
            self._kept.append(args)
            self.other(name, args)
            self._open.discard(id(value))
        else:
            parts = self._of_library(value)
            if parts is None:
                raise refusal(value)
            name, args = parts
            self._kept.append(args)
            self._price += _array_price(name, args)
            self.other(name, args)
        self._number(value)

    def _of_library(self, value: Any) -> tuple[str, tuple[Any, ...]] | None:
        library = type(value).__module__.partition(".")[0]
        if library in ("numpy", "torch") and library in sys.modules:
            from skypool.trust import arrays

            try:
                return arrays.parts_of(value, self._buffer)
            except arrays.NoData as e:
                raise WriteError(
                    str(e), advice="Convert the array to plain numbers or text before you return it"
                ) from None
        return None

    def _buffer(self, memory: Any) -> Any:
        """Return the bytes of a piece of memory. Send larger memory beside the value, and return None."""
        view = memoryview(memory).cast("B") if memoryview(memory).nbytes else memoryview(b"")
        if len(view) < _SMALL_BUFFER:
            return bytes(view)
        self._beside.append(view)
        self._price += len(view) // 2
        return None

    def _member(self, value: enum.Enum) -> None:
        name = value._name_
        kind = type(value)
        if name is not None and kind.__dict__["_member_map_"].get(name) is value:
            self._out.append(MEMBER)
            self._shape(kind)
            self._price += INSTANCE_PRICE
            self._arguments((str(name),))
        else:
            self._out.append(FLAGS)
            self._shape(kind)
            self._price += INSTANCE_PRICE
            self._arguments((int(value.value),))

    def _error(self, error: BaseException) -> None:
        """Write an exception without its causes, and without references to other values."""
        # with references, few bytes could encode an exception that takes very long to print
        self._out.append(ERROR)
        self._shape(type(error))
        self._price += INSTANCE_PRICE
        self._alone += 1
        args, state = classes.parts_of_error(error)
        # the reader decodes each member of the group on its own, and subtracts its price from the budget of the group
        if isinstance(error, BaseExceptionGroup):
            self._price += sum(SPARE + GROWS * len(link[0] or b"") for link in args[1])
        try:
            self._arguments((args, state), lambda index: (".args", ".__dict__")[index])
        finally:
            self._alone -= 1

    def _allowed_value(self, value: Any) -> None:
        """Write an instance of a class that the user allows, as pickle's `__reduce_ex__` takes it apart."""
        reduced = value.__reduce_ex__(4)
        if type(reduced) is not tuple or len(reduced) < 2 or any(part is not None for part in reduced[3:]):
            raise refusal(value)
        make = reduced[0]
        args = reduced[1]
        state = reduced[2] if len(reduced) > 2 else None
        new = make is copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed lacks it
        if (args[0] if new else make) is not type(value):
            raise refusal(value)
        self._out.append(ALLOWED)
        self._shape(type(value))
        self._price += INSTANCE_PRICE
        self._kept.append(reduced)
        self._arguments((new, tuple(args[1:] if new else args), state))


def _array_price(name: str, args: tuple[Any, ...]) -> int:
    """Return what making and checking an array costs beyond the price of its arguments; 0 for other values."""
    from skypool.trust import arrays

    return arrays.price_of(name, args)


class _Nobody:
    """A placeholder for a list that is only a part of another value's encoding. No reference can point to the list."""


_WRITERS: dict[type, Callable[[Any, Any], None]] = {
    type(None): _Writing.put_none,
    bool: _Writing.put_bool,
    int: _Writing.put_int,
    float: _Writing.put_float,
    str: _Writing.put_str,
    bytes: _Writing.put_bytes,
    list: _Writing.put_list,
    tuple: _Writing.put_tuple,
    dict: _Writing.put_dict,
    set: _Writing.put_set,
    frozenset: _Writing.put_frozenset,
}
