"""Pickles the arguments of a call.

A value that was sent with `pool.put` is pickled as a reference. Iterator arguments are not pickled. Their items are
sent one by one while the call runs.
"""

from __future__ import annotations

import inspect
import io
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

from skypool.errors import PickleError
from skypool.runtime import Upstream
from skypool.wire import codec
from skypool.wire.frames import Buffer
from skypool.wire.pickling import PROTOCOL

T = TypeVar("T")


class Holder(Protocol):
    """A protocol for objects, such as a `ComputePool`, that can free values that `pool.put` has sent to nodes."""

    def drop(self, ref: Ref[T]) -> None:
        """Free a value that `pool.put` sent to all nodes. Calls must not use the value afterwards."""
        ...


class Ref(codec.Reference[T]):
    """A reference to a value that `pool.put` sent to all nodes (machines of the pool).

    A function that is called with the reference as an argument gets the value itself. The reference is small, so
    passing it costs little. `drop()` frees the value on all nodes, if the pool object still exists.

    Args:
        key: a hash of the pickled value.
        pool: the pool that has the value. The reference does not keep the pool alive.
    """

    __slots__ = ("_pool",)

    def __init__(self, key: str, pool: Holder) -> None:
        super().__init__(key)
        self._pool = weakref.ref(pool)

    def drop(self) -> None:
        """Free the value on all nodes. Do nothing if the pool object no longer exists.

        Calls must not use the reference afterwards.
        """
        if (pool := self._pool()) is not None:
            pool.drop(self)


class Remote(Protocol):
    """A protocol for functions that can run on a pool. Pickling the arguments of a call needs these attributes.

    `given` has the arguments that come before those of the call, such as the `self` of a bound method.
    """

    name: str
    function: Callable[..., Any]
    given: tuple[Any, ...]


def signature(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a function. Raises TypeError if it is not callable.

    A builtin without a known signature is taken to accept any arguments.
    """
    try:
        return inspect.signature(function)
    except ValueError:
        anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return inspect.Signature([inspect.Parameter(f"a{kind}", kind) for kind in anything])


def arity(function: Callable[..., object]) -> tuple[int, float]:
    """Return (fewest, most): how many arguments a function accepts without keyword arguments.

    Parameters with a default count only in `most`. A parameter `*args` makes `most` infinite. For a function that needs
    a keyword argument, the result is (1, 0.0), a range that contains no number.
    """
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
            return 1, 0.0  # no call without keywords is right, so the caller asks the signature, which says why
    return fewest, most


def takes_one(function: Callable[..., object]) -> bool:
    """Return True if a function can be called with one positional argument. The function is not called.

    Also return True for a builtin without a known signature. Return False for an object that is not callable.
    """
    try:
        signature(function).bind(None)
    except TypeError:
        return False
    return True


def payload_of(
    function: Remote, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Sequence[Buffer], Sequence[Iterator[object]]]:
    """Pickle the arguments of a call. The `given` arguments of the function are put before `args`.

    Returns:
        (buffers, iterators): the pickled arguments, and the iterators among the arguments. The pickle has an `Upstream`
            object in the place of each iterator. An iterator inside a list or other container is not replaced: a copy
            of the iterator is pickled, or pickling fails.

    Raises:
        PickleError: an argument cannot be pickled. The message names the argument.
    """
    args = (*function.given, *args) if function.given else args
    if not kwargs and codec.PLAIN.issuperset(map(type, args)):
        return (pickle.dumps((args, kwargs), PROTOCOL),), ()
    feeds: list[Iterator[Any]] = []
    if True in map(_is_stream, args) or True in map(_is_stream, kwargs.values()):
        args = tuple(_swap(a, feeds) for a in args)
        kwargs = {k: _swap(a, feeds) for k, a in kwargs.items()}
    try:
        return codec.dumps((args, kwargs), function.name), feeds
    except PickleError as e:
        raise _blame(function, args, kwargs) from e.__cause__


def _blame(function: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PickleError:
    """Return (do not raise) a PickleError that names the first argument which cannot be pickled, if it can be found."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        try:
            codec.dumps(value, f"{function.name}({_parameter(function, name)}=…)")
        except PickleError as e:
            return PickleError(str(e), e.path)
    return PickleError(
        f"the arguments of {function.name} cannot be pickled together, although each of them can be pickled alone; "
        "use plain data",
        function.name,
    )


def _parameter(function: Remote, name: int | str) -> str:
    """Return the parameter of an argument, given by position (from 0) or name; "argument N" if it has no parameter."""
    if isinstance(name, str):
        return name
    names = list(signature(function.function).parameters)
    return names[name] if name < len(names) else f"argument {name}"


def _is_stream(value: object) -> bool:
    """Return True if an argument is an iterator to be sent item by item. Nothing is read from the iterator."""
    # open files are refused, and an `Upstream` already takes the place of an iterator on a node
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, Upstream))


def _swap(value: object, feeds: list[Iterator[Any]]) -> object:
    """Return an `Upstream` for an iterator, which is added to `feeds`. Return other arguments unchanged."""
    if not _is_stream(value):
        return value
    feeds.append(cast("Iterator[Any]", value))
    return Upstream(len(feeds) - 1)
