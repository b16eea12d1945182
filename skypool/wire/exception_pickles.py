"""Pickles exceptions so that they can be made again without their `__init__`, which often takes other arguments.

Python makes an exception again by calling its class with `args`. That fails, or gives another text, for most classes
with an `__init__` of their own: https://github.com/python/cpython/issues/44791.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MemberDescriptorType
from typing import Any, cast

HEAP = 1 << 9
"""The flag, in `__flags__`, of classes that Python code has made, in contrast to those made in C."""
_LEFT_OUT = frozenset(("obj", "message", "exceptions"))
"""Attributes that Python does not pickle either, or that cannot be assigned."""
_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


def base_of(kind: type[BaseException]) -> type[BaseException]:
    """Return the first class in the MRO of an exception class that is Python's own, such as OSError."""
    return next(each for each in kind.__mro__ if issubclass(each, BaseException) and not each.__flags__ & HEAP)


def makes_itself(kind: type[BaseException]) -> bool:
    """Return True if Python's own way to pickle works for exceptions of this class, or if the class defines its own."""
    base = base_of(kind)
    if kind.__init__ is base.__init__ and kind.__new__ is base.__new__:
        return True
    return any(getattr(kind, name, None) is not getattr(base, name, None) for name in _METHODS)


def parts_of(error: BaseException) -> tuple[type[BaseException], tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """Return the four arguments with which `rebuild` makes an exception again: (kind, given, args, state)."""
    reduced: tuple[Any, ...] = cast(Any, base_of(type(error))).__reduce__(error)
    # an exception group may have more arguments of its own
    given = (error.message, error.exceptions) if isinstance(error, BaseExceptionGroup) else tuple(reduced[1])
    state = next((each for each in reduced[2:] if isinstance(each, dict)), {})
    return type(error), given, error.args, {**_slots_of(error), **state}


def _slots_of(error: BaseException) -> dict[str, Any]:
    """Return the attributes that are not in the `__dict__` of an exception, such as the `filename` of an OSError."""
    found: dict[str, Any] = {}
    for kind in type(error).__mro__:
        for name, slot in vars(kind).items() if kind is not BaseException else ():
            if isinstance(slot, MemberDescriptorType) and name not in _LEFT_OUT:
                value = getattr(error, name, None)
                if value is not None:
                    found[name] = value
    return found


def rebuild(
    kind: type[BaseException], given: tuple[Any, ...], args: tuple[Any, ...], state: Mapping[str, Any]
) -> BaseException:
    """Return an exception without calling `__init__` and `__new__` of its class.

    Args:
        kind: the class.
        given: the arguments for the first of its base classes that is Python's own. An OSError takes its errno and
            filename from them.
        args: the value of the attribute `args`.
        state: the other attributes, by name.
    """
    base = base_of(kind)
    error = base.__new__(kind, *given)
    base.__init__(error, *given)
    assign(error, "args", args)
    for name, value in state.items():
        assign(error, name, value)
    return error


def reduce(error: BaseException) -> Any:
    """Return how to pickle an exception: by its parts; NotImplemented if Python's own way works."""
    return NotImplemented if makes_itself(type(error)) else (rebuild, parts_of(error))


def assign(error: BaseException, name: str, value: object) -> None:
    """Set an attribute of an exception without running code of its class. A frozen dataclass would refuse."""
    object.__setattr__(error, name, value)
