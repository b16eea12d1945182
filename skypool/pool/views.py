"""`PoolView`: some nodes of a pool, such as `pool[0]` and `pool[0:4]`, to which calls can be sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

from skypool.calls import call as calls
from skypool.calls.call import Call, ComputeFunction, Group, call_asked
from skypool.calls.callbacks import Callbacks
from skypool.calls.futures import CallFuture
from skypool.calls.groups import run_group, send_group
from skypool.calls.options import NamedNodes, no_such_node, node_asked
from skypool.checks import whole
from skypool.errors import UsageError
from skypool.link.forward import Forward

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Selection = int | slice | tuple[int, ...]
"""The nodes of a view: a number, a range of numbers, or several numbers in ascending order."""


class Pool(Protocol):
    """A protocol for the members of `ComputePool` that a view uses. `ComputePool` describes them."""

    name: str

    @property
    def nodes(self) -> Mapping[int, str]: ...
    @property
    def _callbacks(self) -> Callbacks: ...
    def run_all(self, call: Call[T]) -> list[T]: ...
    def send(self, call: Call[T], *, node: Sequence[int]) -> CallFuture[list[T]]: ...
    def map(
        self,
        fn: ComputeFunction[..., T],
        *iterables: Iterable[object],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[T]: ...
    def forward(
        self,
        port: int,
        node: int = 0,
        *,
        host: str = "localhost",
        here: int = 0,
        socket: str | os.PathLike[str] | None = None,
    ) -> Forward: ...
    def _function(self, fn: ComputeFunction[..., T] | Callable[..., T]) -> ComputeFunction[..., T]: ...
    def _node_numbers(self, named: Sequence[int] | None = None) -> tuple[int, ...]: ...
    def _run_gang(self, call: Call[Any], every: bool) -> Any: ...
    def _send_gang(self, call: Call[Any], named: NamedNodes, every: bool) -> CallFuture[Any]: ...
    def _run_on(self, call: Call[T], node: int | tuple[int, ...] | None) -> T: ...
    def _send_to(self, call: Call[T], node: int | tuple[int, ...] | None) -> CallFuture[T]: ...


class PoolView:
    """Some nodes of a pool. Calls that are sent to the view run on these nodes only.

        pool[0]         node number 0
        pool[0:4]       the nodes with the numbers 0, 1, 2 and 3
        pool[[0, 2]]    the nodes with the numbers 0 and 2

    The numbers are those of `pool.nodes`, not positions. A range means the nodes of the pool that have these numbers
    when a call is sent. A node that replaces another one gets a new number, so it may be outside the range. Making a
    view sends nothing and starts nothing. A view cannot start or stop the pool.

    Operators and methods do the same as those of the pool, on the nodes of the view. `call >> view` runs a call on one
    of them, and `call @ view` on each. `call > view` returns a future, and `(a & b) >> view` runs several calls at
    once. If the option `node` of a call is a number or a list, these nodes must be in the view. "all" means every node
    of the view.
    """

    def __init__(self, pool: Pool, selection: Selection) -> None:
        self._pool = pool
        self._selection = selection

    # --- which nodes -----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[int, str]:
        """The state of each node of the view, by its number, as in `pool.nodes`. Nodes that have ended are included."""
        return {node: word for node, word in self._pool.nodes.items() if self._has(node)}

    def _has(self, node: int) -> bool:
        match self._selection:
            case int():
                return node == self._selection
            case tuple():
                return node in self._selection
            case slice() as span:
                return node in range(span.start or 0, node + 1 if span.stop is None else span.stop, span.step or 1)

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the nodes to which calls would be sent now, in ascending order.

        A range leaves out nodes that get no calls now. If the pool was not started, this starts it first.

        Raises:
            UsageError: the pool does not have a node that the view names, or has none in the range of the view.
            PoolClosed: the pool has ended.
        """
        if isinstance(self._selection, slice):
            there = self._pool._node_numbers()
            numbers = tuple(node for node in there if self._has(node))
            if not numbers:
                raise UsageError(
                    f"pool {self._pool.name!r} has no node in the range of {self!r}; its nodes are {list(there)}"
                )
            return numbers
        numbers = (self._selection,) if isinstance(self._selection, int) else self._selection
        self._pool._node_numbers(numbers)
        return numbers

    def _chosen(self, call: Call[Any]) -> tuple[int, ...]:
        """Return the nodes of the view that the call's option `node` names. Raise UsageError for nodes outside it."""
        named = call_asked(call).options.node
        call.sent = True  # also if it is refused here: the error is enough, without a warning
        numbers = self.numbers()
        if named is None or named == "all":
            return numbers
        asked = (named,) if isinstance(named, int) else named
        if missing := set(asked) - set(numbers):
            raise UsageError(
                f"{call!r} asks for node {', '.join(map(str, sorted(missing)))}, which {self!r} does not have; its "
                f"nodes are {list(numbers)}"
            )
        return asked

    def _narrowed(self, call: Call[T]) -> Call[T]:
        """Return a copy of a call that names the nodes of the view that may run it. The original counts as sent."""
        numbers = self._chosen(call)
        copy = Call(call.function, call.args, call.kwargs, call.options.but({"node": numbers}))
        copy.sent = True
        return copy

    # --- calls -----------------------------------------------------------------------------------------------

    def run(self, call: Call[T]) -> T:
        """Run a call on one node of the view, wait for it, and return its value. `call >> view` does the same.

        If the call's option `node` is "all" or a list, run it on each of these nodes, and return the list of values.
        `ComputePool.run` says more, and lists the errors.

        Raises:
            UsageError: the pool does not have a node of the view, or the call names a node that is not in the view.
        """
        if call_asked(call).options.is_broadcast:
            return cast(T, self.run_all(call))
        if call.options.procs is not None:
            return cast(T, self._pool._run_gang(self._narrowed(call), every=False))
        return self._pool._run_on(call, _one_of(self._chosen(call)))

    def run_all(self, call: Call[T]) -> list[T]:
        """Run a call on every node of the view, wait, and return the list of values. `call @ view` does the same.

        `ComputePool.run_all` says more, and lists the errors.

        Raises:
            UsageError: the pool does not have a node of the view, or the call names a node that is not in the view.
        """
        return self._pool.run_all(self._narrowed(call))

    def send(self, call: Call[T]) -> CallFuture[T]:
        """Send a call to one node of the view, and return its future at once. `call > view` does the same.

        If the call's option `node` is "all" or a list, send it to each of these nodes; the future's value is a list.
        `ComputePool.send` says more, and lists the errors.

        Raises:
            UsageError: the pool does not have a node of the view, or the call names a node that is not in the view.
        """
        numbers = self._chosen(call)
        if call.options.is_broadcast:
            return cast(CallFuture[T], self._pool.send(call, node=numbers))
        if call.options.procs is not None:
            return self._pool._send_gang(call, numbers, every=False)
        return self._pool._send_to(call, _one_of(numbers))

    def run_group(self, group: Group[R]) -> R:
        """Run a group's calls at the same time on the view's nodes, and wait for all. `group >> view` does the same.

        `ComputePool.run_group` says more, and lists the errors.

        Raises:
            UsageError: the argument is not a group, or the pool does not have a node of the view. Also raised if a call
                names a node that is not in the view.
        """
        return run_group(group, self.send)

    def send_group(self, group: Group[R]) -> CallFuture[R]:
        """Send a group's calls to nodes of the view, and return one future for all. `group > view` does the same.

        `ComputePool.send_group` says more, and lists the errors.

        Raises:
            UsageError: the argument is not a group, the group has `stream=True`, or the pool does not have a node of
                the view. Also raised if a call names a node that is not in the view.
        """
        return send_group(group, self.send, self._pool._callbacks)

    @overload
    def submit(self, fn: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...
    def submit(self, fn: ComputeFunction[P, T] | Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Send `fn(*args, **kwargs)` to one node of the view, and return its future without waiting for the result.

        `ComputePool.submit` says more, and lists the errors.

        Raises:
            UsageError: the pool does not have a node of the view, or `fn` names a node that is not in the view.
        """
        function = self._pool._function(fn)
        return self.send(Call(function, args, kwargs, function.options))

    @overload
    def map(
        self,
        fn: ComputeFunction[..., T],
        *iterables: Iterable[object],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[object],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[T]: ...
    def map(
        self,
        fn: ComputeFunction[..., T] | Callable[..., T],
        *iterables: Iterable[object],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Call `fn` for each item on nodes of the view, and return an iterator of the results in the items' order.

        The nodes are those of the view when `map` is called. `ComputePool.map` describes the arguments and the errors.

        Raises:
            UsageError: the pool does not have a node of the view, or `fn` names a node that is not in the view.
        """
        function = self._pool._function(fn)
        numbers = self._chosen(Call(function, (), {}, function.options))
        return self._pool.map(
            function.with_options(node=numbers),
            *iterables,
            timeout=timeout,
            chunksize=chunksize,
            buffersize=buffersize,
        )

    def forward(
        self,
        port: int,
        node: int | None = None,
        *,
        host: str = "localhost",
        here: int = 0,
        socket: str | os.PathLike[str] | None = None,
    ) -> Forward:
        """Forward connections from a port of this computer to a port of a node of the view.

        `ComputePool.forward` says more, and lists the errors.

        Args:
            port: the port on the node.
            node: the number of the node. Default None: the node of the view with the lowest number.
            host, here, socket: as for `ComputePool.forward`.

        Raises:
            UsageError: the view or the pool does not have the node.
        """
        numbers = self.numbers()
        if node is not None and node not in numbers:
            raise no_such_node(self._pool.name, [node], numbers)
        return self._pool.forward(port, numbers[0] if node is None else node, host=host, here=here, socket=socket)

    # --- operators with a left operand that is not a call ----------------------------------------------------

    __array_ufunc__ = None  # makes numpy leave `array @ view` to `__rmatmul__`

    def __rrshift__(self, value: object) -> NoReturn:
        """Raise a UsageError: the left operand of `>> view` is not a call."""
        raise calls.no_call(value, ">>")

    def __rmatmul__(self, value: object) -> NoReturn:
        """Raise a UsageError: the left operand of `@ view` is not a call."""
        raise calls.no_call(value, "@")

    def __lt__(self, value: object) -> NoReturn:
        """Raise a UsageError: the left operand of `> view` is not a call."""
        raise calls.no_call(value, ">")

    def __rand__(self, value: object) -> NoReturn:
        """Raise a UsageError for `value & view`: `&` combines calls, and a view is not a call."""
        raise calls.no_call(value, "&")

    def __enter__(self) -> NoReturn:
        """Raise a UsageError, always: a view cannot start or stop its pool."""
        raise UsageError(f"{self!r} cannot start or stop its pool: write `with pool:`, and use the view inside")

    def __exit__(self, *_: object) -> None:
        """Do nothing: the block of a view never begins."""

    def __repr__(self) -> str:
        match self._selection:
            case slice(start=start, stop=stop, step=step):
                ends = ["" if each is None else str(each) for each in (start, stop)]
                inside = ":".join(ends if step is None else [*ends, str(step)])
            case tuple() as numbers:
                inside = str(list(numbers))
            case number:
                inside = str(number)
        return f"<ComputePool {self._pool.name!r}[{inside}]>"


def _one_of(numbers: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return the nodes that may run a call, as `PendingCall.node` has them: one number, or a tuple of several."""
    return numbers[0] if len(numbers) == 1 else numbers


def selection_asked(pool: str, key: object) -> Selection:
    """Return what a user wrote in `pool[…]` in its usual form; a list becomes a tuple in ascending order.

    Whether the pool has the nodes is not checked. Raises UsageError for anything but a number, slice or list, for
    negative numbers, and for an empty range or list.
    """
    if isinstance(key, slice):
        for name, value, least in (("start", key.start, 0), ("stop", key.stop, 1), ("step", key.step, 1)):
            if value is not None:
                whole(f"the {name} of pool[{name}]", value, "the number of a node", least=least)
        if key.stop is not None and (key.start or 0) >= key.stop:
            raise UsageError(f"pool[{key.start}:{key.stop}] is an empty range of nodes of pool {pool!r}")
        return key
    if isinstance(key, int) and key < 0:
        raise UsageError(
            f"pool[{key}] names no node of pool {pool!r}: numbers of nodes are not positions, and begin at 0; "
            "pool.nodes has them"
        )
    if key is None or isinstance(key, (str, bool)) or not isinstance(key, (int, Sequence)):
        raise UsageError(
            f"pool[…] takes the number of a node, a range such as 0:4, or a list of numbers, not {key!r:.80}"
        )
    return cast(Selection, node_asked(key))
