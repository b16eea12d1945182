"""Keeps the pickles of a script's classes, so that arguments and results need not pickle the same class each time.

The pickle of a class is kept only if the class and all that its methods use can be compared quickly: constants,
functions, and other classes of this kind. A receiver does not read the same pickle twice in a row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Set
from enum import Enum
from types import (
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from cloudpickle import cloudpickle

from skypool.wire import definition_ids, namespaces
from skypool.wire.definitions import MADE_BY_ENUM, OF_MEMBERS

_MOST_PARTS = 300
"""The most attributes and globals that are compared. A class with more is pickled each time."""
_FIXED: tuple[type, ...] = (
    *namespaces.CONSTANTS,
    ModuleType,
    WrapperDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    ClassMethodDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    type(dataclasses.MISSING),
)
"""Types of values that cannot change, or that Python makes with a class."""
_MADE = frozenset(("__annotations__", "__dataclass_fields__", "__dataclass_params__", "__slotnames__", "__weakref__"))
"""Attributes that follow from the definition of a class."""
_NOTHING = object()


class _Unknown(Exception):
    """Raised if the pickle of a class cannot be kept, because a change of one of its parts might not be noticed."""


class _Kept:
    """Pickle of a class, and the objects that it was made of, to notice whether one has changed.

    Attributes:
        kind: the class.
        data: the pickle.
        classes: for each class in the pickle: its dict, its attributes, and the names of attributes that Python makes.
        functions: for each function in the pickle: the function, and its code, defaults and other parts.
        globals: for each global that a function uses: the dict of globals, its name and its value.
        version: a hash of the pickle.
    """

    __slots__ = ("_seen", "classes", "data", "functions", "globals", "kind", "version")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.classes: list[tuple[MappingProxyType[str, Any], tuple[tuple[str, Any], ...], Set[str]]] = []
        self.functions: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.data = b""
        self._seen: list[type] = []
        self.version = ""
        self._add_class(kind)

    def _add_class(self, kind: type) -> None:
        if any(kind is each for each in self._seen):
            return
        self._seen.append(kind)
        made = _MADE
        if issubclass(kind, Enum):
            made = _MADE | MADE_BY_ENUM | kind.__members__.keys()
            for member in kind.__members__.values():
                if vars(member).keys() - OF_MEMBERS:
                    raise _Unknown  # an attribute of its own
                self._add(member._value_)
        attributes = tuple((name, value) for name, value in vars(kind).items() if name not in made)
        self.classes.append((vars(kind), attributes, made))
        self._add(type(kind))
        for base in kind.__bases__:
            self._add(base)
        for _, value in attributes:
            self._add(value)

    def _add_function(self, function: FunctionType) -> None:
        if any(function is each for each, _ in self.functions):
            return
        if function.__code__.co_filename == dataclasses.__file__:  # such as the one around `__repr__`
            return
        self.functions.append((function, _parts_of(function)))
        for part in (function.__defaults__ or (), (function.__kwdefaults__ or {}).values(), vars(function).values()):
            for value in part:
                self._add(value)
        for cell in function.__closure__ or ():
            try:
                self._add(cell.cell_contents)
            except ValueError:
                raise _Unknown from None
        for name in cloudpickle._extract_code_globals(function.__code__):
            value = function.__globals__.get(name, _NOTHING)
            self.globals.append((function.__globals__, name, value))
            if value is not _NOTHING:
                self._add(value)

    def _add(self, value: Any) -> None:
        if len(self.classes) + len(self.functions) + len(self.globals) > _MOST_PARTS:
            raise _Unknown
        kind = type(value)
        if kind in _FIXED:
            return
        if kind is tuple or kind is frozenset:
            for each in value:
                self._add(each)
        elif kind is classmethod or kind is staticmethod:
            self._add(value.__func__)
        elif kind is property:
            self._add((value.fget, value.fset, value.fdel))
        elif kind is FunctionType:
            if definition_ids.is_by_value(value):
                self._add_function(value)
        elif issubclass(kind, type):
            if definition_ids.is_by_value(value):
                self._add_class(value)
        else:
            raise _Unknown

    def is_valid(self) -> bool:
        """Return True if the class and all other objects that the pickle was made of are unchanged."""
        for attributes, before, made in self.classes:
            now = tuple(value for name, value in attributes.items() if name not in made)
            if len(now) != len(before) or any(a is not b[1] for a, b in zip(now, before, strict=True)):
                return False
        for function, parts in self.functions:
            if any(a is not b for a, b in zip(_parts_of(function), parts, strict=True)):
                return False
        return all(values.get(name, _NOTHING) is value for values, name, value in self.globals)


def _parts_of(function: FunctionType) -> tuple[Any, ...]:
    """Return the parts of a function that can be replaced: code, defaults, attributes and captured values."""
    closure = function.__closure__ or ()
    return (
        function.__code__,
        function.__defaults__,
        *(function.__kwdefaults__ or {}).values(),
        *vars(function).values(),
        *[cell.cell_contents for cell in closure if cell != _EMPTY],
    )


_EMPTY = cloudpickle._make_empty_cell()
_kept: dict[tuple[str, str], _Kept | type] = {}
"""A dict from module and name of a class to its kept pickle, or to the class itself if its pickle cannot be kept."""
_applied: dict[str, tuple[str, int, int]] = {}
"""A dict from the id of a class to what was true when its pickle was last read here.

The values are the version of the pickle, and how many changes of globals and of classes there had been in this process.
"""


def reduce_kept(kind: type, pickled: Callable[[type], bytes]) -> Any:
    """Return how to pickle a class by its kept pickle, as `__reduce__` does; None if its pickle cannot be kept.

    `kind` is a class that is pickled by value. `pickled(kind)` makes its pickle, if none is kept or the class has
    changed.
    """
    place = kind.__module__, kind.__qualname__
    kept = _kept.get(place)
    if kept is kind:
        return None
    if not isinstance(kept, _Kept) or kept.kind is not kind or not kept.is_valid():
        if not definition_ids.is_named(kind):
            return None
        try:
            kept = _Kept(kind)
        except _Unknown:
            _kept[place] = kind
            return None
        kept.data = pickled(kind)
        if not kept.is_valid():  # pickling may add an attribute
            return None
        kept.version = hashlib.blake2b(kept.data, digest_size=16).hexdigest()
        _kept[place] = kept
    return _class, (definition_ids.id_of(kind), definition_ids.here(), kept.version, kept.data)


def _class(id_: str, sender: str, version: str, data: bytes) -> Any:
    """Return the class that has this id here. Read its pickle `data` first if the class is new or may be outdated."""
    found = definition_ids.known(id_)
    if found is not None and (sender == definition_ids.here() or definition_ids.is_own(found)):
        return found
    if found is None or _applied.get(id_) != (version, namespaces.epoch(), definition_ids.changes):
        found = pickle.loads(data)
        _applied[id_] = version, namespaces.epoch(), definition_ids.changes
    return found
