"""Pickles the arguments of a call: signature check, `pool.put` references, iterator arguments set apart."""

from __future__ import annotations

import inspect
import io
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

from skypool.errors import PickleError
from skypool.runtime import Upstream
from skypool.wire import codec
from skypool.wire.frames import Buffer

T = TypeVar("T")


class Holder(Protocol):
    """What has values on nodes: a pool."""

    def drop(self, ref: Ref[T]) -> None: ...


class Ref(codec.Reference[T]):
    """A value that the nodes of a pool have; in an argument it arrives as the value."""

    __slots__ = ("_pool",)

    def __init__(self, key: str, pool: Holder) -> None:
        super().__init__(key)
        self._pool = weakref.ref(pool)

    def drop(self) -> None:
        """Let the nodes forget it."""
        if (pool := self._pool()) is not None:
            pool.drop(self)


class Remote(Protocol):
    """A function that can run on a pool; `given` comes before a call's own arguments: the `self` of a method."""

    name: str
    function: Callable[..., Any]
    given: tuple[Any, ...]


def signature(function: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # a builtin that does not tell takes anything
        anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return inspect.Signature([inspect.Parameter(f"a{kind}", kind) for kind in anything])


def arity(function: Callable[..., object]) -> tuple[int, float]:
    """The fewest and the most positional arguments it takes when there are no others."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    fewest = 0
    most = 0.0
    for parameter in signature(function).parameters.values():
        if parameter.kind in positional:
            most += 1
            fewest += parameter.default is parameter.empty
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            most = float("inf")
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            return 1, 0.0  # never right without keywords: let the signature say so
    return fewest, most


def takes_one(function: Callable[..., object]) -> bool:
    try:
        signature(function).bind(None)
    except TypeError:
        return False
    return True


def payload_of(
    function: Remote, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Sequence[Buffer], Sequence[Iterator[object]]]:
    """The pickled arguments of a call, and the iterators among them, which stream up instead.

    Raises:
        PickleError: naming the argument that cannot travel.
    """
    args = (*function.given, *args) if function.given else args
    if not kwargs and (plain := codec.dumps_plain(args, kwargs)):
        return (plain,), ()
    feeds: list[Iterator[Any]] = []
    if True in map(_is_stream, args) or True in map(_is_stream, kwargs.values()):
        args = tuple(_swap(a, feeds) for a in args)
        kwargs = {k: _swap(a, feeds) for k, a in kwargs.items()}
    try:
        return codec.dumps((args, kwargs), function.name), feeds
    except PickleError as e:
        raise _blame(function, args, kwargs) from e.__cause__


def _blame(function: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PickleError:
    """The same error, with the argument's own name in it."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        try:
            codec.dumps(value, f"{function.name}({_parameter(function, name)}=…)")
        except PickleError as e:
            return PickleError(str(e), e.path)
    return PickleError(f"the arguments of {function.name} cannot be sent together", function.name)


def _parameter(function: Remote, name: int | str) -> str:
    if isinstance(name, str):
        return name
    names = list(signature(function.function).parameters)
    return names[name] if name < len(names) else f"argument {name}"


def _is_stream(value: object) -> bool:
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, Upstream))


def _swap(value: object, feeds: list[Iterator[Any]]) -> object:
    if not _is_stream(value):
        return value
    feeds.append(cast("Iterator[Any]", value))
    return Upstream(len(feeds) - 1)
