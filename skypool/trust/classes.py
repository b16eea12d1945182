"""Builds instances of the client's own classes from data, without running code of these classes.

The classes are data classes, named tuples, enumerations and exceptions. They are looked up by name in the modules that
are imported in this process. No `__init__`, `__new__`, `__post_init__`, `__setstate__` or property of these classes
runs. So checks that a class makes at construction are skipped, and fields may have any value that the node chose.
Two kinds of classes are built in another way. Built-in exceptions and some exceptions of skypool are made by calling
their class, after a check of the arguments. Classes that the user allows with `allow_results` are built as pickle
builds them, which runs their code.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skypool.errors import WorkerDied, died
from skypool.shipping import user_modules
from skypool.text import printable
from skypool.trust.bounded_reader import FAULTY, NotData
from skypool.trust.decoding import ClassShape, Reading
from skypool.trust.format import ALLOWED, ERROR, FLAGS, INSTANCE, MEMBER, NAMED
from skypool.trust.refusals import short_form
from skypool.wire import exceptions
from skypool.wire.exception_pickles import HEAP, assign
from skypool.wire.pickling import SCRIPT

T = TypeVar("T")
_MISSING = object()
_MOST_COLUMNS = 1000
"""The most columns by which the place that a SyntaxError marks may go beyond the text that it shows."""
_STATELESS: tuple[Any, ...] = (None, {}, (None, None), (None, {}))
_SAME_VERSION = "Use the same version of the module {} on your machine and on the node"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The names of classes whose instances results may contain, from the pool's argument `allow_results`.

    Names are such as "mypkg.Point", or "mypkg.*" for all classes in a package and its subpackages. `name in allowed` is
    True if a class with this name is allowed.
    """

    names: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        parts = str(name).split(".")
        return str(name) in self.names or any(".".join([*parts[:n], "*"]) in self.names for n in range(1, len(parts)))


def locate(module: str, name: str) -> type | None:
    """Return the class that a loaded module defines under a qualified name such as "Outer.Inner", or None.

    A class that the module only imported does not count. Nothing is imported, and no code of the module runs, because
    only dictionaries are read and no attributes.
    """
    found = sys.modules.get(module)
    if found is None or not issubclass(type(found), types.ModuleType):
        return None
    space: Any = types.ModuleType.__getattribute__(found, "__dict__")
    made: Any = None
    for part in name.split("."):
        made = space.get(part, _MISSING)
        if not issubclass(type(made), type):
            return None
        space = type.__getattribute__(made, "__dict__")
    at_home = made.__module__ == module and made.__qualname__ == name
    return made if at_home else None


def is_own(module: str) -> bool:
    """Return True if a loaded module belongs to the user, like the user's script, or to skypool, and to no library."""
    if module in SCRIPT or module.partition(".")[0] == "skypool":
        return True
    space: Any = types.ModuleType.__getattribute__(sys.modules[module], "__dict__")
    file = space.get("__file__")
    return isinstance(file, str) and user_modules.is_users(file)


def resolve(tag: int, shape: ClassShape, allowed: Allowed) -> bool:
    """Find the class that a node has named for a value, and set `kind` and `make` of `shape`, which describes it.

    Return True if instances of the class may be made on the client. Otherwise return False, and leave `make` None.
    Raises NotData if a name that the node sent is not the name of a field of the data class, or is sent twice.

    Args:
        tag: the tag of the value, which says what kind of class it must be.
        shape: the class as the node named it.
        allowed: further classes that the user allows.
    """
    kind = locate(shape.module, shape.name)
    if kind is None:
        return False
    make: Any = None
    if tag == ALLOWED:
        make = _allowed if str(shape) in allowed else None
    elif tag in (MEMBER, FLAGS) and issubclass(kind, enum.Enum):
        make = _member if tag == MEMBER else _flags
    elif tag == ERROR and issubclass(kind, Exception) and (str(shape) in allowed or _is_plain_error(shape, kind)):
        make = _error
    elif tag == NAMED and issubclass(kind, tuple) and type(fields := _attribute(kind, "_fields")) is tuple:
        make = functools.partial(_named_tuple, len(fields))
    elif tag == INSTANCE and is_data(kind) and is_own(shape.module) and _makes_itself_plainly(kind):
        make = Filler(kind, shape.fields)
    shape.kind = kind
    shape.make = functools.partial(make, kind) if make is not None and tag != INSTANCE else make
    return make is not None


def _attribute(kind: type, name: str) -> Any:
    """Return an attribute of a class or its bases, or `_MISSING`. Unlike with `getattr`, no descriptor is called."""
    for each in type.__getattribute__(kind, "__mro__"):
        if name in each.__dict__:
            return each.__dict__[name]
    return _MISSING


def _home(kind: type, name: str) -> str:
    """Return the module of the first class in the `__mro__` of `kind` that defines an attribute; "" if none does."""
    return next((each.__module__ for each in kind.__mro__ if name in each.__dict__), "")


# --- enumerations and named tuples ---------------------------------------------------------------------------


def _member(kind: type[enum.Enum], _: Reading, values: tuple[Any, ...]) -> enum.Enum:
    """Return the member of an enumeration by its name or alias, the only item of `values`. Raises NotData."""
    # looked up in a dictionary, as calling the class would run its `_missing_` or make a new enumeration
    (name,) = values
    found = kind.__dict__["_member_map_"].get(name) if type(name) is str else None
    if found is None:
        raise NotData(
            f"it contains the member {short_form(name)} of the enumeration {kind.__qualname__}, which has no such "
            "member on your machine",
            kind.__qualname__,
            advice=_SAME_VERSION.format(kind.__module__),
        )
    return found  # type: ignore[no-any-return]  # the map has members only


def _flags(kind: type[enum.Enum], _: Reading, values: tuple[Any, ...]) -> enum.Enum:
    (value,) = values
    if _is_plain_flag(kind) and type(value) is int and value >= 0 and not value & ~_mask(kind):
        return kind(value)
    raise NotData(
        f"it contains the value {short_form(value)} of the enumeration {kind.__qualname__}, which has no such value on "
        "your machine",
        kind.__qualname__,
        advice=_SAME_VERSION.format(kind.__module__),
    )


def _mask(kind: type[enum.Enum]) -> int:
    return functools.reduce(int.__or__, (each.value for each in kind.__members__.values()), 0)


def _is_plain_flag(kind: type[enum.Enum]) -> bool:
    """Return True if a class is an `enum.Flag` whose members only the standard library's code makes."""
    # it has no `_missing_` of its own, and no other `__new__` than that of object or int
    made = _attribute(kind, "_new_member_")
    return (
        issubclass(kind, enum.Flag)
        and _home(kind, "_missing_") == "enum"
        and getattr(made, "__func__", made) in (object.__new__, int.__new__)
    )


def _named_tuple(size: int, kind: type[Any], _: Reading, values: tuple[Any, ...]) -> Any:
    if len(values) != size:
        raise NotData(
            f"it contains a named tuple {kind.__qualname__} whose number of values is {len(values)}, and on your "
            f"machine the class has {size} fields",
            kind.__qualname__,
            advice=_SAME_VERSION.format(kind.__module__),
        )
    return tuple.__new__(kind, values)


# --- data classes --------------------------------------------------------------------------------------------


def is_data(kind: type) -> bool:
    """Return True if a class or one of its bases is a data class, which has the attribute `__dataclass_fields__`."""
    return _attribute(kind, "__dataclass_fields__") is not _MISSING


def _makes_itself_plainly(kind: type) -> bool:
    """Return True if no code of a class runs when an instance is made by `object.__new__`, or deleted."""
    own = ("__new__", "__del__", "__setstate__")
    return all(_home(kind, each) in ("", "builtins") or _is_generated(kind, each) for each in own)


def _is_generated(kind: type, name: str) -> bool:
    """Return True for the `__setstate__` that `@dataclass` adds to frozen classes with slots."""
    return name == "__setstate__" and _attribute(kind, name) is getattr(dataclasses, "_dataclass_setstate", None)


def state_of(value: Any) -> dict[str, Any] | None:
    """Return a dictionary of the fields and all other attributes of an instance of a data class, by name.

    Runs `__getstate__` of the class. Returns None if the class defines `__reduce__` or `__reduce_ex__`, or if the state
    is not a list, a dictionary, or a tuple of dictionaries and None.
    """
    kind = type(value)
    if _home(kind, "__reduce_ex__") != "builtins" or _home(kind, "__reduce__") != "builtins":
        return None
    state = value.__getstate__()
    if type(state) is list:
        return {each.name: part for each, part in zip(dataclasses.fields(value), state, strict=True)}
    parts = [part for part in (state if type(state) is tuple else (state,)) if part is not None]
    if not all(type(part) is dict for part in parts):
        return None
    return {name: held for part in parts for name, held in part.items()}


class Filler:
    """Makes instances of one data class without running code of the class.

    `fields` are the names of the fields for which a node gives values. The node may leave out some. Raises NotData if a
    name occurs twice, or is not the name of a field.
    """

    __slots__ = ("_in_slots", "_kind", "_names")

    def __init__(self, kind: type, fields: tuple[str, ...]) -> None:
        self._kind = kind
        self._names = fields
        places = [_place(kind, name) for name in fields]
        if len(set(fields)) != len(fields):
            raise NotData(
                f"it contains two values for one field of {kind.__qualname__}", kind.__qualname__, advice=FAULTY
            )
        self._in_slots = places if any(places) else None

    def blank(self) -> Any:
        """Return a new instance in which no field is set. `__new__` and `__init__` of the class do not run."""
        return object.__new__(self._kind)

    def fill(self, made: Any, values: Sequence[Any]) -> None:
        """Set the fields of an instance that `blank` made, in the order of `fields`, without running `__setattr__`."""
        if self._in_slots is None:
            object.__getattribute__(made, "__dict__").update(zip(self._names, values, strict=True))
            return
        for place, name, value in zip(self._in_slots, self._names, values, strict=True):
            if place is None:
                object.__getattribute__(made, "__dict__")[name] = value
            else:
                place.__set__(made, value)

    def rows(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Return new instances, one for each row of a table that has a column for each field, in this order."""
        made: list[Any] = [object.__new__(self._kind) for _ in columns[0]]
        if self._in_slots is None:
            names = self._names
            space = object.__getattribute__
            for each, row in zip(made, zip(*columns, strict=True), strict=True):
                space(each, "__dict__").update(zip(names, row))  # noqa: B905 - equal lengths, and speed matters here
            return made
        for place, name, column in zip(self._in_slots, self._names, columns, strict=True):
            for each, value in zip(made, column, strict=True):
                if place is None:
                    object.__getattribute__(each, "__dict__")[name] = value
                else:
                    place.__set__(each, value)
        return made


def _place(kind: type, name: Any) -> Any:
    """Return the slot descriptor of a field of a class; None if it is in an instance's dictionary. Raises NotData."""
    # not a field: a method, property or other descriptor of this name, or a name that no field may have
    if type(name) is str and name.isidentifier() and not (name.startswith("__") and name.endswith("__")):
        there = _attribute(kind, name)
        if isinstance(there, types.MemberDescriptorType):
            return there
        is_code = hasattr(type(there), "__set__") or hasattr(type(there), "__get__")
        if there is _MISSING or isinstance(there, functools.cached_property) or not is_code:
            return None
    raise NotData(
        f"it contains a value for {short_form(name)}, which is not a field of {kind.__qualname__} on your machine",
        kind.__qualname__,
        advice=_SAME_VERSION.format(kind.__module__),
    )


def _set_attribute(kind: type, made: Any, name: Any, value: Any) -> None:
    """Set an attribute of an instance without running `__setattr__`. Raises NotData if that is not safe."""
    # Python's own code relies, without a check, on the types of fields that it keeps in C
    place = _place(kind, name)
    if place is None:
        object.__getattribute__(made, "__dict__")[name] = value
    elif place.__objclass__.__flags__ & HEAP or (name in ("name", "path") and type(value) in (str, type(None))):
        place.__set__(made, value)
    elif name != "name_from":  # left out: from Python 3.12 on, printing an ImportError imports what its `name` says
        raise NotData(
            f"it contains {kind.__qualname__} with a value for its attribute {name}", kind.__qualname__, advice=FAULTY
        )


# --- exceptions ----------------------------------------------------------------------------------------------


def _is_plain_error(shape: ClassShape, kind: type[BaseException]) -> bool:
    ours = shape.module.partition(".")[0] in sys.stdlib_module_names or is_own(shape.module)
    return ours and _home(kind, "__new__") == "builtins" and not _home(kind, "__del__")


def parts_of_error(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and the attributes of an exception, from which the client builds the exception again.

    For an exception group, the arguments are the message and a list of the members, each encoded on its own. For an
    exception of skypool whose class defines `__reduce__`, the attributes are the notes only.
    """
    args = error.args
    state = dict(vars(error))
    if isinstance(error, BaseExceptionGroup):
        args = (error.message, [exceptions.dump_one(each) for each in error.exceptions])
    elif type(error).__module__ in ("builtins", "skypool.errors"):
        reduced: Any = error.__reduce__()
        args = reduced[1]
        if len(reduced) > 2 and type(reduced[2]) is dict:
            state |= reduced[2]
        if type(error).__module__ == "skypool.errors" and "__reduce__" in type(error).__dict__:
            state = {name: held for name, held in state.items() if name == "__notes__"}
    return tuple(args), state


def _error(kind: type[Exception], r: Reading, values: tuple[Any, ...]) -> Exception:
    args, state = values
    if type(args) is not tuple or type(state) is not dict:
        raise NotData(
            f"it contains an exception {kind.__qualname__} without a tuple of arguments and a dictionary of attributes",
            kind.__qualname__,
            advice=FAULTY,
        )
    if issubclass(kind, BaseExceptionGroup):
        args = (*args[:1], [r.makers["one"](r, link) for link in args[1]])
    made = _made_error(kind, tuple(map(_shown, args)))
    state = {name: _shown(value) for name, value in state.items()}
    state.pop("args", None)  # some built-in exceptions have their arguments there, too
    notes = state.pop("__notes__", None)
    if type(notes) is list and notes:
        assign(made, "__notes__", [printable(note) for note in notes if type(note) is str])
    for name, value in state.items():
        _set_attribute(kind, made, name, value)
    return made


def _printable_error(error: T) -> T:
    """Return an exception. Raise NotData if Python would crash, or write without end, when it shows it."""
    good = True
    if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)):
        good = error.start >= 0
    elif isinstance(error, SyntaxError):
        texts = (error.filename, error.text)
        numbers = (error.lineno, error.offset, error.end_lineno, error.end_offset)
        good = (
            all(text is None or type(text) is str for text in texts)
            and all(n is None or (type(n) is int and abs(n) < 1 << 31) for n in numbers)
            and (error.end_offset or 0) <= len(error.text or "") + _MOST_COLUMNS
        )
    if not good:
        name = type(error).__qualname__
        raise NotData(f"it contains an exception {name} that cannot be printed", name, advice=FAULTY)
    return error


def _made_error(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    if kind is WorkerDied:
        texts = (args[0], args[3], args[5])
        numbers = (args[1], args[2], args[4])
        if not all(type(t) is str for t in texts) or not all(n is None or type(n) is int for n in numbers):
            raise NotData("it contains a WorkerDied error with an argument of the wrong type", advice=FAULTY)
        return died(*args)
    if kind.__module__ == "skypool.errors" and "__reduce__" in kind.__dict__:
        if not all(type(each) in (str, int, float, type(None), tuple, list) for each in args):
            raise NotData(
                f"it contains a {kind.__name__} error with an argument of the wrong type", kind.__name__, advice=FAULTY
            )
        return kind(*args)
    if kind.__module__ == "builtins":
        return _printable_error(kind(*args))
    made: Exception = kind.__new__(kind, *args)
    BaseException.args.__set__(made, args)  # type: ignore[attr-defined]  # a descriptor; typeshed says tuple
    return made


def _shown(part: Any) -> Any:
    """Return a text without terminal control sequences, so that a traceback may print it; other values as is."""
    return printable(part) if type(part) is str else part


# --- classes that the user allows ----------------------------------------------------------------------------


def _allowed(kind: type, _: Reading, values: tuple[Any, ...]) -> Any:
    """Return an instance of a class that the user allows, built as pickle builds it, which runs code of the class.

    `values` has three items: True to call `__new__` or False to call the class, the arguments, and the state. The state
    is passed to `__setstate__` if the class has it; otherwise, its items become attributes.
    Raises NotData if an item of the state cannot become an attribute, and any error that the class raises.
    """
    new, args, state = values
    made = _printable_error(kind.__new__(kind, *args) if new else kind(*args))
    setter = getattr(made, "__setstate__", None)
    if setter is not None and state is not None:
        setter(state)
    elif state not in _STATELESS:
        for part in state if type(state) is tuple else (state,):
            for name, value in (part or {}).items():
                _set_attribute(kind, made, name, value)
    return made
