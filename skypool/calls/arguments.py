"""Pickles the arguments of a call.

A value that was sent with `pool.put` is pickled as a reference. Iterator arguments are not pickled. Their items are
sent one by one while the call runs.
"""

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
    """A protocol for objects that can free the values of `pool.put` on nodes (machines), such as a `ComputePool`."""

    def drop(self, ref: Ref[T]) -> None:
        """Free a value that `pool.put` sent to all nodes (machines of the pool). Calls must not use it afterwards.

        Args:
            ref: the reference to the value, as `pool.put` returned it.
        """
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
        """Free the value on all nodes (machines of the pool). Do nothing if the pool object no longer exists.

        Calls must not use the reference afterwards.
        """
        if (pool := self._pool()) is not None:
            pool.drop(self)


class Remote(Protocol):
    """A protocol for functions that can run on a pool. It has what is needed to pickle the arguments of a call.

    Attributes:
        name: the function's name, for messages.
        function: the plain function.
        given: arguments that come before those of the call, such as the `self` of a bound method.
    """

    name: str
    function: Callable[..., Any]
    given: tuple[Any, ...]


def signature(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a function. A builtin without a known signature is taken to accept any arguments.

    Raises:
        TypeError: the object is not callable.
    """
    try:
        return inspect.signature(function)
    except ValueError:
        anything = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return inspect.Signature([inspect.Parameter(f"a{kind}", kind) for kind in anything])


def arity(function: Callable[..., object]) -> tuple[int, float]:
    """Return how many positional arguments a function accepts in a call without keyword arguments.

    Returns:
        (fewest, most). Parameters with a default count only in `most`, which is infinite for `*args`. For a function
        that needs a keyword argument the result is (1, 0.0), which no number of arguments fits.
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

    Parameters after the first must have defaults. The answer is True for a builtin without a known signature, and False
    for an object that is not callable.
    """
    try:
        signature(function).bind(None)
    except TypeError:
        return False
    return True


def payload_of(
    function: Remote, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Sequence[Buffer], Sequence[Iterator[object]]]:
    """Pickle the arguments of a call.

    Args:
        function: the function; its `given` arguments are put before `args`.
        args, kwargs: the arguments of the call. They are not changed.

    Returns:
        (buffers, iterators): the pickled arguments, and the iterators among the arguments. In the pickle, an `Upstream`
        with an index stands for each iterator. The items are sent when the function asks for them. Iterators inside a
        list or other container are not replaced: they are pickled as a copy, or pickling them fails.

    Raises:
        PickleError: an argument cannot be pickled. The message names it.
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
    """Return (do not raise) a PickleError that names the first argument which cannot be pickled.

    Positional arguments are tried before keyword arguments. If each can be pickled alone, the error says that they
    cannot be pickled together.

    Args:
        function: the function of the call, for the names of its parameters.
        args, kwargs: the arguments of the call.
    """
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
    """Return the name of the parameter that an argument is passed to.

    Args:
        function: the function.
        name: the name of a keyword argument, which is returned as it is, or the position of an argument, from 0. A
            position N after the last parameter, as with `*args`, gives "argument N".
    """
    if isinstance(name, str):
        return name
    names = list(signature(function.function).parameters)
    return names[name] if name < len(names) else f"argument {name}"


def _is_stream(value: object) -> bool:
    """Return True if an argument is an iterator whose items are sent one by one. Nothing is read from it.

    Return False for lists and other iterables without `__next__`. Two kinds of iterators also give False: files, and
    `Upstream` objects, each of which stands for an iterator on a node.
    """
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, Upstream))


def _swap(value: object, feeds: list[Iterator[Any]]) -> object:
    """Return an argument itself if it is no iterator. Otherwise add the iterator to `feeds` and return a replacement.

    The replacement is an `Upstream`, from which the function on the node takes the items. The index of the `Upstream`
    is the position of the iterator in `feeds`, from 0.
    """
    if not _is_stream(value):
        return value
    feeds.append(cast("Iterator[Any]", value))
    return Upstream(len(feeds) - 1)
