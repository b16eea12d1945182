"""Pickles functions and classes by value, and makes them once in each process where they arrive.

cloudpickle sets the attributes of a class again with each pickle, and defines a class again without the arguments of
its definition. Here a class that exists already stays as it is, and a new one is copied, not defined again:
https://github.com/cloudpipe/cloudpickle/issues/439 and https://github.com/cloudpipe/cloudpickle/issues/527.
"""

from __future__ import annotations

import abc
import builtins
import inspect
import threading
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, EnumMeta, Flag
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple, cast

from cloudpickle import cloudpickle

from skypool.wire import definition_ids, namespaces
from skypool.wire.value_hash import fingerprint

_FILE = 10
"""The position of the file's name among the arguments of `types.CodeType`."""
_MADE_WITH = ("__module__", "__qualname__", "__slots__", "__orig_bases__", "__firstlineno__")
"""The attributes that a class must have while it is made."""
_MADE_ANEW = frozenset(("__dict__", "__weakref__", "_abc_impl", "__slotnames__"))
_MADE_ANEW |= {"__annotate_func__", "__annotate__", "__annotations_cache__"}  # Python 3.14
"""The attributes that Python makes with each class, or when it first needs them."""
MADE_BY_ENUM = frozenset(
    (
        "_member_names_",
        "_member_map_",
        "_value2member_map_",
        "_hashable_values_",
        "_unhashable_values_",
        "_unhashable_values_map_",
    )
)
_FOLLOWING = frozenset(("__dataclass_fields__", "__dataclass_params__"))
"""Attributes that follow from other attributes. The version of a class leaves them out, as they take long to hash."""
OF_MEMBERS = frozenset(("_name_", "_value_", "__objclass__", "_sort_order_"))
"""The attributes that `enum` gives each member."""


# --- code and functions ------------------------------------------------------------------------------------------


def reduce_code(code: CodeType) -> Any:
    """Return how to pickle a code object, as `__reduce__` does, with the name of its file for tracebacks.

    cloudpickle 3.1.3 leaves the name out: https://github.com/cloudpipe/cloudpickle/pull/560
    """
    make, arguments = cloudpickle._code_reduce(code)
    return make, (*arguments[:_FILE], code.co_filename, *arguments[_FILE + 1 :])


class _Sent(NamedTuple):
    """What is sent of a function besides its code.

    Attributes:
        id: the id of the function; None if it has no name, so that each copy of it is separate.
        sender: the name of the process that has pickled the function.
        version: the version of the function; None if `id` is None.
        space: the dict of globals of its module.
        names: the globals that it uses, by name.
        tokens: the tokens of the globals that can change in place.
        absent: names that it uses, but that are neither globals nor builtins.
        attributes: a dict of its own attributes, and a dict of those that Python gives to every function.
    """

    id: str | None
    sender: str
    version: str | None
    space: Any
    names: dict[str, Any]
    tokens: dict[str, namespaces.Token]
    absent: tuple[str, ...]
    attributes: tuple[dict[str, Any], dict[str, Any]]


def reduce_function(function: FunctionType, space: namespaces.Space) -> Any:
    """Return how to pickle a function by value, as `__reduce__` does.

    `space` stands for the dict of globals of the function's module. All functions of a module in one pickle must get
    the same object.
    """
    state, slots = cloudpickle._function_getstate(function)
    if parameters := getattr(function, "__type_params__", None):
        slots["__type_params__"] = parameters
    names = slots.pop("__globals__")
    id_ = definition_ids.id_of(function) if definition_ids.is_named(function) else None
    version = None if id_ is None else _version_of(function)
    tokens = namespaces.tokens_of(names, fingerprint) if space.key is not None else {}
    absent = tuple(
        name
        for name in cloudpickle._extract_code_globals(function.__code__)
        if name not in names and not hasattr(builtins, name)
    )
    cells = None if function.__closure__ is None else len(function.__closure__)
    sent = _Sent(id_, definition_ids.here(), version, space, names, tokens, absent, (state, slots))
    head = (id_, sent.sender, version, function.__code__, space, cells)
    return _function, head, tuple(sent), None, None, _fill_function


def _version_of(function: FunctionType) -> str:
    """Return the version of a function, from its code, defaults, closure and attributes. Globals do not count."""
    parts = (function.__defaults__, function.__kwdefaults__)
    if function.__closure__ is None and not function.__dict__ and all(map(_is_constant, parts)):
        return f"{hash(function.__code__)} {parts!r}"
    return fingerprint((hash(function.__code__), *parts, function.__closure__, function.__dict__))


def _is_constant(defaults: tuple[object, ...] | dict[str, object] | None) -> bool:
    values = defaults.values() if isinstance(defaults, dict) else defaults or ()
    return all(type(value) in namespaces.CONSTANTS for value in values)


def _function(
    id_: str | None, sender: str, version: str | None, code: CodeType, values: dict[str, Any], cells: int | None
) -> FunctionType:
    """Return the function that has this id here. If there is none, or it is outdated, return a new one to be filled."""
    found = None if id_ is None else definition_ids.known(id_)
    if found is not None and not definition_ids.is_outdated(found, sender, version):
        return cast(FunctionType, found)
    closure = None if cells is None else tuple(cloudpickle._make_empty_cell() for _ in range(cells))
    made = FunctionType(code, values, None, None, closure)
    return made if id_ is None else cast(FunctionType, definition_ids.replace(id_, sender, made))


def _fill_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    sent = _Sent(*state)
    if sent.id is not None and not definition_ids.came_from(function, sent.sender):
        return  # it is one of this process, or another process has sent it first
    namespaces.bind(sent.space, sent.sender, sent.names, sent.tokens, sent.absent)
    if sent.id is None or definition_ids.is_outdated(function, sent.sender, sent.version):
        slots = {**sent.attributes[1], "__globals__": {}}
        cloudpickle._function_setstate(function, (sent.attributes[0], slots))
    if sent.id is not None:
        definition_ids.note(function, sent.version)


# --- classes -----------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """Member of an enum in a pickle. `arguments` are for `__new__` of the type that is mixed in, such as `str`."""

    name: str
    arguments: tuple[Any, ...]
    value: Any


def reduce_class(kind: type) -> Any:
    """Return how to pickle a class by value, as `__reduce__` does."""
    body = {name: value for name in _MADE_WITH if (value := vars(kind).get(name)) is not None}
    body["__qualname__"] = kind.__qualname__
    if isinstance(vars(kind).get("__dict__"), property):
        body["__dict__"] = vars(kind)["__dict__"]
    left_out = _MADE_ANEW | body.keys()
    members: tuple[_Member, ...] = ()
    states: tuple[tuple[str, dict[str, Any]], ...] = ()
    boundary = None
    if issubclass(kind, Enum):
        left_out |= MADE_BY_ENUM | kind.__members__.keys()
        members = tuple(
            _Member(name, _arguments_of(member), member._value_) for name, member in kind.__members__.items()
        )
        states = tuple((name, _state_of(member)) for name, member in kind._member_map_.items())
        boundary = getattr(kind, "_boundary_") if issubclass(kind, Flag) else None  # noqa: B009 - mypy knows no such name
    attributes = {
        name: value for name, value in vars(kind).items() if name not in left_out and not _is_descriptor(value, kind)
    }
    if not attributes.get("__annotations__", True):
        del attributes["__annotations__"]  # Python makes an empty one when somebody asks
    registry = _registered(kind) if isinstance(kind, abc.ABCMeta) else []
    head = (
        definition_ids.id_of(kind),
        definition_ids.here(),
        type if typing.is_typeddict(kind) else None,
        type(kind),
        kind.__name__,
        kind.__bases__,
        body,
        members,
        boundary,
    )
    own = {name: value for name, value in attributes.items() if name not in _FOLLOWING}
    version = fingerprint((kind.__bases__, body, own, registry, members, states))
    state = (definition_ids.here(), version, attributes, registry, states, definition_ids.is_named(kind))
    return _class, head, state, None, None, _fill_class


def _registered(kind: abc.ABCMeta) -> list[type]:
    """Return the classes that were registered with an abstract class."""
    found: list[type | None] = [ref() for ref in cast(Any, abc)._get_dump(kind)[0]]
    return [each for each in found if each is not None]


def _is_descriptor(value: object, kind: type) -> bool:
    """Return True if Python has made this attribute for `__slots__`, `__dict__` or `__weakref__` of the class."""
    return isinstance(value, (MemberDescriptorType, GetSetDescriptorType)) and value.__objclass__ is kind


def _arguments_of(member: Any) -> tuple[Any, ...]:
    """Return the arguments with which `__new__` of the type of an enum's values, such as `str`, makes a member."""
    kind = type(member)._member_type_
    if hasattr(kind, "__getnewargs__"):  # such as int and str
        return tuple(kind.__getnewargs__(member))
    if kind.__reduce__ is not object.__reduce__:  # such as date
        return tuple(kind.__reduce__(member)[1])
    return ()


def _state_of(member: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(member).items() if name not in OF_MEMBERS}


def _class(
    id_: str,
    sender: str,
    maker: type | None,
    metaclass: type,
    name: str,
    bases: tuple[type, ...],
    body: dict[str, Any],
    members: tuple[_Member, ...],
    boundary: Any,
) -> type:
    """Return the class that has this id here. If there is none, return a new one, whose attributes are set later."""
    found = definition_ids.known(id_)
    if found is not None:
        return cast(type, found)
    making: Any = maker or _maker(metaclass)
    with _silenced(bases):
        if issubclass(making, EnumMeta):
            made = _enum(making, metaclass, name, bases, body, members, boundary)
        else:
            space = making.__prepare__(name, bases)
            for key, value in body.items():
                space[key] = value
            made = making.__new__(metaclass, name, bases, space)
            making.__init__(made, name, bases, space)
    return cast(type, definition_ids.receive(id_, sender, made))


def _maker(metaclass: type) -> Any:
    """Return the class that makes copies of a class with this metaclass: the first in its MRO that is of no script."""
    # what a script's metaclass does, such as registering the class, was done where the class was defined
    return next(each for each in metaclass.__mro__ if not definition_ids.is_tracked(each))


_silencing = threading.RLock()


@contextmanager
def _silenced(bases: tuple[type, ...]) -> Iterator[None]:
    """Switch off `__init_subclass__` methods of scripts in this thread, while a subclass of `bases` is made."""
    # methods of scripts, and those that need arguments, were called where the subclass was defined
    owners = [
        kind
        for kind in dict.fromkeys(each for base in bases for each in base.__mro__)
        if "__init_subclass__" in vars(kind) and (definition_ids.is_tracked(kind) or _needs_arguments(kind))
    ]
    if not owners:
        yield
        return
    with _silencing:
        hooks = [(kind, vars(kind)["__init_subclass__"]) for kind in owners]
        for kind, hook in hooks:
            type.__setattr__(kind, "__init_subclass__", _silent(hook))
        try:
            yield
        finally:
            for kind, hook in hooks:
                type.__setattr__(kind, "__init_subclass__", hook)


def _needs_arguments(kind: type) -> bool:
    try:
        inspect.signature(kind.__init_subclass__).bind()
    except TypeError:
        return True
    except ValueError:
        return False  # a builtin, whose signature is not known
    return False


def _silent(hook: Any) -> Any:
    """Return an `__init_subclass__` that does nothing in this thread, and what `hook` does in others."""
    thread = threading.get_ident()

    def silent(kind: type, /, **arguments: Any) -> None:
        if threading.get_ident() != thread:
            hook.__get__(None, kind)(**arguments)

    return classmethod(silent)


def _enum(
    maker: Any,
    metaclass: type,
    name: str,
    bases: tuple[type, ...],
    body: Mapping[str, Any],
    members: tuple[_Member, ...],
    boundary: Any,
) -> Any:
    """Return a new enum with copies of its members. No method of a script, such as `__init__`, is called for them."""
    # cloudpickle calls the class with the values, and so loses aliases and the attributes of members
    space = maker.__prepare__(name, bases)
    for key, value in body.items():
        space[key] = value

    def new(kind: Any, member: _Held) -> Any:
        made = kind._member_type_.__new__(kind, *member.sent.arguments)
        made._value_ = member.sent.value
        return made

    if members:  # an enum without members keeps the methods that it inherits
        space["__new__"] = new
        space["__init__"] = lambda *_: None
    for each in members:
        space[each.name] = _Held(each)
    made = maker.__new__(metaclass, name, bases, space, **({} if boundary is None else {"boundary": boundary}))
    if members:
        type.__delattr__(made, "__init__")
    return made


class _Held:
    """Wrapper of a `_Member`. It is not a tuple, so `enum` does not take it apart while it makes the class."""

    def __init__(self, sent: _Member) -> None:
        self.sent = sent


def _fill_class(kind: Any, state: tuple[Any, ...]) -> None:
    sender, version, attributes, registry, members, is_named = state
    if definition_ids.came_from(kind, sender):
        namespaces.define(kind, version)
    if not definition_ids.is_outdated(kind, sender, version):
        return
    setter = _maker(type(kind))
    for name in definition_ids.names_of(kind) - attributes.keys():
        if name in vars(kind):
            setter.__delattr__(kind, name)
    for name, value in attributes.items():
        setter.__setattr__(kind, name, value)
    for each in registry:
        kind.register(each)
    for name, values in members:
        kind._member_map_[name].__dict__.update(values)
    definition_ids.note(kind, version, frozenset(attributes))
    if is_named and kind.__module__ == "__main__":
        namespaces.offer(kind, kind.__qualname__, namespaces.main_of(sender))
