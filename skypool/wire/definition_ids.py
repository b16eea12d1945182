"""Gives classes, functions and the like of scripts an id that travels with them, so that each exists once in a process.

Such a definition is pickled by value, because the receiver cannot import the script. The id tells the receiver if it
has the definition already, because it made or received it before. A version tells if the definition has changed.
"""

from __future__ import annotations

import os
import sys
import weakref
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

from cloudpickle import cloudpickle

UNNAMED = cloudpickle._BUILTIN_TYPE_NAMES
"""Types of Python such as that of None, which cannot be found in their module under their name."""
MOST_WRAPPERS = 8
"""The most decorators around a function that `is_named` looks behind."""


@dataclass(slots=True)
class _Origin:
    """Origin of a definition that this process has received. Only the process that sent it first may change it here."""

    sender: str
    version: str | None = None  # None until its content has arrived
    names: frozenset[str] = field(default_factory=frozenset)  # of the attributes that were received, for a class


_received: weakref.WeakKeyDictionary[Any, _Origin] = weakref.WeakKeyDictionary()
_strong: dict[str, Any] = {}
"""The definitions, by id, to which Python allows no weak references, such as a ContextVar. They are kept for ever."""
_strong_ids: dict[int, str] = {}


@cache
def here() -> str:
    """Return the random name of this process for other processes. Processes forked from this one share it."""
    return os.urandom(8).hex()


def id_of(thing: Any) -> str:
    """Return the id of a definition, which gets one if it has none yet.

    cloudpickle's own table is used, so that objects which other libraries send with cloudpickle have the same classes.
    """
    if not _has_weak_references(thing):
        return strong_id_of(thing)
    return str(cloudpickle._get_or_create_tracker_id(thing))


def strong_id_of(thing: Any) -> str:
    """Return the id of an object, which gets one if it has none. It is kept for ever, and need not be hashable."""
    if id(thing) not in _strong_ids:
        remember(os.urandom(16).hex(), thing)
    return _strong_ids[id(thing)]


def _has_weak_references(thing: Any) -> bool:
    return bool(type(thing).__weakrefoffset__)


def remember(id_: str, thing: Any) -> None:
    """Note the id of a definition whose type has no weak references. The definition is kept until the process ends."""
    _strong[id_] = thing
    _strong_ids[id(thing)] = id_


def has_strong_id(thing: Any) -> bool:
    """Return True if `strong_id_of` has given this object an id, or if it arrived with one."""
    return id(thing) in _strong_ids


def known(id_: str) -> Any:
    """Return the definition that has this id in this process, or None."""
    found = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(id_)
    return _strong.get(id_) if found is None else found


def is_tracked(thing: Any) -> bool:
    """Return True if this class or function was sent or received by value, so that it has an id."""
    return thing in cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS


def receive(id_: str, sender: str, made: Any) -> Any:
    """Give the definition `made` the id with which it arrived, and return it.

    If another thread has made an object for this id meanwhile, that object is returned.
    """
    found = cloudpickle._lookup_class_or_track(id_, made)
    if found is made:
        _received[made] = _Origin(sender)
    return found


def replace(id_: str, sender: str, made: Any) -> Any:
    """Give the id of a definition to the new object `made`, which `sender` has sent, and return that.

    The object that had the id stays as it is.
    """
    with cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK:
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[id_] = made
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS[made] = id_
    _received[made] = _Origin(sender)
    return made


changes = 0
"""A number that grows when a definition in this process takes over another version."""


def version_of(thing: Any) -> str | None:
    """Return the version of a definition that this process has received; None for one that it has made itself."""
    origin = _received.get(thing)
    return None if origin is None else origin.version


def is_own(thing: Any) -> bool:
    """Return True if a definition with an id was not received, but made in this process."""
    return thing not in _received


def came_from(thing: Any, sender: str) -> bool:
    """Return True if a definition came from the process `sender` first, which may therefore change it here."""
    origin = _received.get(thing)
    return origin is not None and origin.sender == sender and sender != here()


def is_outdated(thing: Any, sender: str, version: str | None) -> bool:
    """Return True if a definition that is here must take over the content that has just arrived from `sender`.

    It must if `sender` is the process that sent it first, and if it has no content yet or another version than
    `version`, that of the arrived content.
    """
    return came_from(thing, sender) and (version is None or _received[thing].version != version)


def names_of(thing: Any) -> frozenset[str]:
    """Return the names of the attributes that were received for a class."""
    return _received[thing].names


def note(thing: Any, version: str | None, names: frozenset[str] = frozenset()) -> None:
    """Note that a received definition has this version now. For a class, `names` has the names of its attributes."""
    global changes
    if _received[thing].version not in (None, version):
        changes += 1
    _received[thing].version = version
    _received[thing].names = names


def is_by_value(thing: Any) -> bool:
    """Return True if a function or class is pickled by value, because the receiver cannot import it."""
    module = thing.__module__
    is_usual = type(module) is str and module != "__main__" and not cloudpickle._PICKLE_BY_VALUE_MODULES
    if is_usual and getattr(sys.modules.get(module), thing.__qualname__, None) is thing:
        return False  # this takes a third of the time that cloudpickle needs
    if type(thing) is not FunctionType and thing in UNNAMED:
        return False
    return not cloudpickle._should_pickle_by_reference(thing)


def is_named(thing: Any) -> bool:
    """Return True if a definition's module has it under its name, as `pickle` requires, or if it arrived with an id.

    A function behind decorators counts, if these set `__wrapped__` as `functools.wraps` does. A lambda, and a function
    that was made by another function, do not count: each copy of them has data of its own.
    """
    name: str = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or "<locals>"
    if "<" not in name:
        found: Any = sys.modules.get(getattr(thing, "__module__", None) or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is thing or getattr(found, "__func__", None) is thing:  # the second is the function of a class method
            return True
        if isinstance(thing, FunctionType):
            for _ in range(MOST_WRAPPERS):
                found = getattr(found, "__wrapped__", None)
                if found is None:
                    break
                if found is thing:
                    return True
    return is_tracked(thing)
