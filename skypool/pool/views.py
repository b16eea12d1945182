"""`PoolView`: some nodes of a pool, such as `pool[0]` and `pool[0:4]`, to which calls can be sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol, cast

from skypool.calls.options import NamedNodes, node_asked
from skypool.checks import whole
from skypool.errors import UsageError
from skypool.pool.call_routing import CallSender
from skypool.pool.surface import CallSurface

Selection = int | slice | tuple[int, ...]
"""The nodes of a view: a number, a range of numbers, or several numbers in ascending order."""


class Pool(Protocol):
    """A protocol for the members of `ComputePool` that a view uses."""

    name: str

    @property
    def nodes(self) -> Mapping[int, str]: ...
    @property
    def _sender(self) -> CallSender: ...


class PoolView(CallSurface):
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

    @property
    def _sender(self) -> CallSender:
        return self._pool._sender

    # --- which nodes -----------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Mapping[int, str]:
        """The state of each node of the view, by its number: a word such as "ready".

        Nodes that have ended are included.
        """
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
            there = tuple(self._sender.working().dispatch.roster.nodes())
            numbers = tuple(node for node in there if self._has(node))
            if not numbers:
                raise UsageError(
                    f"pool {self._pool.name!r} has no node in the range of {self!r}; its nodes are {list(there)}"
                )
            return numbers
        numbers = (self._selection,) if isinstance(self._selection, int) else self._selection
        self._sender.working().dispatch.roster.nodes(numbers)
        return numbers

    def _narrowed(self, asked: NamedNodes, asker: object) -> NamedNodes:
        numbers = self.numbers()
        if asked is None or asked == "all":
            return numbers
        wanted = (asked,) if isinstance(asked, int) else asked
        if missing := set(wanted) - set(numbers):
            raise UsageError(
                f"{asker} asks for node {', '.join(map(str, sorted(missing)))}, which {self!r} does not have; its "
                f"nodes are {list(numbers)}"
            )
        return wanted

    # --- what a view is not ----------------------------------------------------------------------------------

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


def selection_asked(pool: str, key: object) -> Selection:
    """Check what a user wrote in `pool[…]`, and return it as a `Selection`. A list becomes a tuple in ascending order.

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
