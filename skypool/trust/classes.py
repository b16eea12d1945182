"""The client's own classes in what a stranger sends: data classes, named tuples, enumerations and exceptions.

They are found by name among the modules that are loaded here, and made without a line of their own code: no
`__init__`, `__new__`, `__post_init__`, `__setstate__` or property runs. So what a class checks when it is made is not
checked, and fields have whatever plain values the node chose. A class that the user allows is made as pickle does it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from skypool import usercode
from skypool.codec import SCRIPT
from skypool.trust.machine import Machine, Name, Refused
from skypool.trust.text import plain

_LARGEST_ERROR = 10_000
_MISSING = object()
_STATELESS: tuple[Any, ...] = (None, {}, (None, None), (None, {}))
Setter = Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The classes that the user wrote may be made of what nodes send: "mypkg.Point", or "mypkg.*" for all of it."""

    names: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        parts = str(name).split(".")
        return str(name) in self.names or any(".".join([*parts[:n], "*"]) in self.names for n in range(1, len(parts)))


def locate(module: str, name: str) -> type | None:
    """The class that a loaded module defines under that name; no attribute is asked for, so nothing runs."""
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
    """Whether a loaded module is the user's own, or skypool's."""
    if module in SCRIPT or module.partition(".")[0] == "skypool":
        return True
    space: Any = types.ModuleType.__getattribute__(sys.modules[module], "__dict__")
    file = space.get("__file__")
    return isinstance(file, str) and usercode.is_users(file)


def resolve(m: Machine, name: Name, allowed: Allowed) -> bool:
    """Give the name of a class what makes it; False where it is none that may be made."""
    kind = locate(name.module, name.name)
    if kind is None:
        return False
    if str(name) in allowed:
        _take_at_its_word(m, name, kind)
    elif issubclass(kind, enum.Enum):
        name.call = functools.partial(_member_of, kind)
        m.keys.add(kind)
    elif issubclass(kind, BaseException):
        return _resolve_error(m, name, kind)
    elif issubclass(kind, tuple) and type(fields := _attribute(kind, "_fields")) is tuple:
        name.new = functools.partial(_named_tuple, kind, len(fields))
    elif _attribute(kind, "__dataclass_fields__") is not _MISSING and is_own(name.module):
        return _resolve_data(m, name, kind)
    else:
        return False
    return True


def _attribute(kind: type, name: str) -> Any:
    """What a class and those above it have under a name, as it stands there: nothing is bound, nothing runs."""
    for each in type.__getattribute__(kind, "__mro__"):
        if name in each.__dict__:
            return each.__dict__[name]
    return _MISSING


def _home(kind: type, name: str) -> str:
    """The module of the class that defines an attribute."""
    return next((each.__module__ for each in kind.__mro__ if name in each.__dict__), "")


# --- enumerations and named tuples ---------------------------------------------------------------------------


def _member_of(kind: type[enum.Enum], m: Machine, args: tuple[Any, ...]) -> enum.Enum:
    """The member of that value. Calling the class would run its `_missing_`, or make a new enumeration."""
    if len(args) != 1:
        raise Refused(f"it would make a new enumeration of {kind.__qualname__}")
    value = args[0]
    if type(value) in (list, dict, set):
        found = [each for each in kind.__members__.values() if type(each.value) is type(value) and each.value == value]
        if found:
            return found[0]
    else:
        m.check_key(value)
        member = kind.__dict__["_value2member_map_"].get(value)
        if member is not None:
            return member  # type: ignore[no-any-return]  # as the map says
        if _is_plain_flag(kind) and type(value) is int and value >= 0 and not value & ~_mask(kind):
            return kind(value)
    raise Refused(f"it has no member {value!r:.40} in the enumeration {kind.__qualname__}", kind.__qualname__)


def _mask(kind: type[enum.Enum]) -> int:
    return functools.reduce(int.__or__, (each.value for each in kind.__members__.values()), 0)


def _is_plain_flag(kind: type[enum.Enum]) -> bool:
    """Whether the standard library's own code, and no other, makes a member of several bits."""
    made = _attribute(kind, "_new_member_")
    return (
        issubclass(kind, enum.Flag)
        and _home(kind, "_missing_") == "enum"
        and getattr(made, "__func__", made) in (object.__new__, int.__new__)
    )


def member(kind: type[enum.Enum], name: str) -> enum.Enum:
    """The member of that name.

    Raises:
        Refused: there is none.
    """
    found = kind.__dict__["_member_map_"].get(name)
    if found is None:
        raise Refused(f"it has no member {name!r:.40} in the enumeration {kind.__qualname__}", kind.__qualname__)
    return found  # type: ignore[no-any-return]  # as the map says


def _named_tuple(kind: type[Any], size: int, _: Machine, args: tuple[Any, ...]) -> Any:
    if len(args) != size:
        raise Refused(f"it makes a {kind.__qualname__} of {len(args)} fields, which has {size}", kind.__qualname__)
    return tuple.__new__(kind, args)


# --- data classes --------------------------------------------------------------------------------------------


def _resolve_data(m: Machine, name: Name, kind: type) -> bool:
    """A data class is made by `object.__new__`, and its fields are set one by one."""
    own = ("__new__", "__del__", "__setstate__")
    if any(_home(kind, each) not in ("", "builtins") and not _is_generated(kind, each) for each in own):
        return False
    name.new = functools.partial(_blank, kind)
    m.setters[kind] = functools.partial(_set_fields, kind, {})
    return True


def _is_generated(kind: type, name: str) -> bool:
    """Whether `@dataclass` wrote this method, as it does for frozen ones with slots."""
    return name == "__setstate__" and _attribute(kind, name) is getattr(dataclasses, "_dataclass_setstate", None)


def _blank(kind: type, _: Machine, args: tuple[Any, ...]) -> Any:
    if args:
        raise Refused(f"it makes a {kind.__qualname__} of arguments", kind.__qualname__)
    return object.__new__(kind)


def _set_fields(kind: type, places: dict[str, Any], made: Any, state: Any) -> None:
    """State as pickle writes it: a dictionary, that and one of slots, or a list in the order of the fields."""
    if type(state) is list:
        names = [each.name for each in dataclasses.fields(kind)]
        parts = [dict(zip(names, state, strict=True))]
    else:
        parts = [part for part in (state if type(state) is tuple else (state,)) if part is not None]
    for part in parts:
        if type(part) is not dict:
            raise Refused(f"it sets the state of a {kind.__qualname__} to no fields", kind.__qualname__)
        for name, value in part.items():
            place = places.get(name, _MISSING)
            if place is _MISSING:
                place = places[name] = _place(kind, name)
            if place is None:
                object.__getattribute__(made, "__dict__")[name] = value
            else:
                place.__set__(made, value)


def _place(kind: type, name: Any) -> Any:
    """The slot of a field, None for the dictionary.

    Raises:
        Refused: the class has something else there: a method, a property.
    """
    if type(name) is str and name.isidentifier() and not (name.startswith("__") and name.endswith("__")):
        there = _attribute(kind, name)
        if isinstance(there, types.MemberDescriptorType):
            return there
        is_code = hasattr(type(there), "__set__") or hasattr(type(there), "__get__")
        if there is _MISSING or isinstance(there, functools.cached_property) or not is_code:
            return None
    raise Refused(f"it sets {name!r:.40} of a {kind.__qualname__}, which is no field", kind.__qualname__)


# --- exceptions ----------------------------------------------------------------------------------------------


def _resolve_error(m: Machine, name: Name, kind: type[BaseException]) -> bool:
    ours = name.module.partition(".")[0] in sys.stdlib_module_names or is_own(name.module)
    if not ours or not issubclass(kind, Exception) or _home(kind, "__new__") != "builtins" or _home(kind, "__del__"):
        return False
    name.call = functools.partial(_error, kind)
    m.setters[kind] = functools.partial(_set_error, m, kind, {})
    return True


def _error(kind: type[Exception], m: Machine, args: tuple[Any, ...]) -> Exception:
    _bound(m, args)
    if kind.__module__ == "skypool.errors" and "__reduce__" in kind.__dict__:
        if not all(type(each) in (str, int, type(None)) for each in args if type(each) is not tuple):
            raise Refused(f"it makes a {kind.__name__} of something else than texts", kind.__name__)
        return kind(*map(_shown, args))
    args = tuple(map(_shown, args))
    if kind.__module__ == "builtins":
        return kind(*args)
    made: Exception = kind.__new__(kind, *args)
    BaseException.args.__set__(made, args)  # type: ignore[attr-defined]  # a descriptor, though typeshed has a tuple
    return made


def _shown(part: Any) -> Any:
    """A text that a traceback may print as it is."""
    return plain(part) if type(part) is str else part


def _set_error(m: Machine, kind: type, places: dict[str, Any], made: BaseException, state: Any) -> None:
    if state is None:
        return
    if type(state) is not dict:
        raise Refused(f"it sets the state of a {kind.__qualname__} to no attributes", kind.__qualname__)
    _bound(m, state)
    state = {name: _shown(value) for name, value in state.items()}
    state.pop("args", None)  # which some of Python's own write there, too
    notes = state.pop("__notes__", None)
    if type(notes) is list and notes:
        made.__notes__ = [plain(note) for note in notes if type(note) is str]
    _set_fields(kind, places, made, state)


def rebuilt(m: Machine, args: tuple[Any, ...]) -> BaseException:
    """What `codec.rebuild` makes, made here: (class, arguments, attributes)."""
    name, arguments, state = args
    if type(name) is not Name or type(arguments) is not tuple or type(state) is not dict:
        raise Refused("an exception of it is made of something else")
    m.find(m, name)
    kind = locate(name.module, name.name)
    if name.call is None or kind not in m.setters or not issubclass(kind, BaseException):
        raise Refused(f"it would make an exception of {name}", str(name))
    if getattr(name.call, "func", None) is _allowed_call:  # even then: `rebuild` calls no `__init__` either
        return _error(kind, m, arguments)  # type: ignore[arg-type]  # an exception, as just seen
    made: BaseException = name.call(m, arguments)
    m.setters[kind](made, state)
    return made


def _bound(m: Machine, parts: Iterable[Any]) -> None:
    """That who shows an exception is done soon, though a part may be in it many times over."""
    todo: list[Any] = [parts]
    seen = 0
    while todo:
        each = todo.pop()
        seen += 1
        if type(each).__name__ == "ndarray" and each.dtype.hasobject:
            below = each.reshape(-1).tolist()
        elif isinstance(each, types.FunctionType | type | types.ModuleType):
            continue
        else:
            below = gc.get_referents(each) if gc.is_tracked(each) else []
        if seen + len(todo) + len(below) > _LARGEST_ERROR:
            raise Refused("an exception of it is a monster")
        todo += below
    m.charge(seen)


# --- what the user allows ------------------------------------------------------------------------------------


def _take_at_its_word(m: Machine, name: Name, kind: type) -> None:
    """As pickle does it: with the class's own `__new__`, `__init__` and `__setstate__`."""
    name.call = functools.partial(_allowed_call, kind)
    name.new = functools.partial(_allowed_new, kind)
    m.setters[kind] = _allowed_state
    m.keys.add(kind)


def _allowed_call(kind: type, _: Machine, args: tuple[Any, ...]) -> Any:
    return kind(*args)


def _allowed_new(kind: type, _: Machine, args: tuple[Any, ...]) -> Any:
    return kind.__new__(kind, *args)


def _allowed_state(made: Any, state: Any) -> None:
    setter = getattr(made, "__setstate__", None)
    if setter is not None:
        setter(state)
    elif state not in _STATELESS:
        _set_fields(type(made), {}, made, state)
