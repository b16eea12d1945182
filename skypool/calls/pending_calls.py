"""The client's records of calls.

`PendingCall` is one call, from its submission to its end. `Code` is a function's code as it is sent to nodes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from skypool.calls.futures import CallFuture, Items, ResultCell, Returned
from skypool.calls.options import Options
from skypool.shipping.sources import Source
from skypool.wire.frames import Buffer, members

if TYPE_CHECKING:
    from skypool.gangs.environment import Member

T = TypeVar("T")
SMALL = 8 << 10
"""The most bytes of pickled arguments with which a call may share a frame with other calls."""
World = tuple[int, list[str]]
"""(position, addresses): what a node is told about a call that several nodes run.

The position is that of the node among these nodes, from 0. The addresses are those of all these nodes, by node number.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """A pickled function, as it is sent to nodes. Each node gets it once.

    Attributes:
        key: a hash of the function and of the user's modules that it may need. Messages name the function by this key.
        buffers: the pickle, then the memory of its large arrays, if any. Last comes a JSON object with the user's
            modules and the texts of scripts, and their hashes.
        sources: the texts of the scripts that the function and its helpers come from.
    """

    key: str
    name: str
    buffers: tuple[Buffer, ...]
    sources: tuple[Source, ...] = ()


class Packed(NamedTuple, Generic[T]):
    """A call whose function and arguments are pickled, so that it can be sent. `T` is the type of its value.

    Attributes:
        code: the function.
        payload: the arguments.
        options: the options of the call.
        feeds: the iterators among the arguments, which are not pickled. Their items are sent while the call runs.
        is_generator: True if the function is a generator function.
    """

    code: Code
    payload: Sequence[Buffer]
    options: Options
    feeds: Sequence[Iterator[Any]]
    is_generator: bool

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.code.name


@dataclass(slots=True, eq=False)
class UserCall:
    """A call as the user sees it, of which several pending calls are parts: one for each node or process.

    Attributes:
        left: the number of pending calls of it that have not ended.
        seconds: the wall time of the longest part that has ended; None if no part's time is known.
        node: the node of the part that failed, or of the last part; -1 for none.
        error: the text of the error of a part that failed; "" for none.
        stopped: True if a part was cancelled.
    """

    name: str
    left: int
    seconds: float | None = None
    node: int = -1
    error: str = ""
    stopped: bool = False


NO_CALL = UserCall("", 0)
"""The `part_of` of pending calls that do not count by themselves: checks of skypool's own, and processes of gangs."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call that was sent to a node or waits for one.

    Two objects are equal only if they are the same object.

    Attributes:
        payload: the pickled arguments.
        outlet: the object from which the caller gets the result, or the items of a generator.
        node: the number of the node that must run the call, or a tuple of the nodes that may run it; None for any node.
        world: the position of the call's node among the nodes that run the call, from 0, and the addresses of all these
            nodes. None if only one node runs the call.
        feeds: the iterators among the arguments. Their items are sent while the call runs.
        gang: the number of the gang that the call belongs to, as one of its processes or as the empty call that asks if
            a node is free. None if it belongs to none.
        member: the place of the call's process in the gang; None if the call is not a process of a gang.
        chunk: the most calls of the same function that may share a frame. None if their duration decides.
        service: True for a service of `pool.service`, or a test of its port. Such a call takes no slot. It is sent to
            its node at once, and never queued.
        part_of: the call of the user of which this call is a part. None if this call itself is a call of the user.
            `NO_CALL` if it is not the user's, such as a check of skypool's own. The tally counts calls of the user.
        busy: True for a service that counts as work, so that its node is not idle. Other calls always count.
        id: a new one for each run.
        at: the number of the node that the call was sent to; -1 while the call waits.
        attempt: the number of this run of the call, from 1. Runs that ended because a machine was taken back count too.
        retried: how many of the call's allowed retries are used up.
        stopped: True once the call was cancelled.
        settled: True once the dispatch has decided how the call ends. Its result may be stored a little later.
        ended: True once the result of the call was stored for the caller.
    """

    code: Code
    payload: Sequence[Buffer]
    outlet: CallFuture[Any] | Items[Any] | ResultCell[Any]
    options: Options
    node: int | tuple[int, ...] | None = None
    world: World | None = None
    feeds: Sequence[Iterator[Any]] = ()
    chunk: int | None = None
    gang: int | None = None
    member: Member | None = None
    service: bool = False
    busy: bool = False
    part_of: UserCall | None = None
    id: int = 0
    at: int = -1
    attempt: int = 1
    retried: int = 0
    stopped: bool = False
    settled: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.code.name

    @property
    def header(self) -> str:
        """The options of the call as JSON members without braces, for the header of its frame; "" if there are none.

        For a generator, its window is included; for a call to several nodes, its `world`. The call's id, the function's
        key and the lengths of the buffers are left out.
        """
        options = self.options
        if self.world is None and not self.service and not isinstance(self.outlet, Items):
            return options.header
        more: dict[str, Any] = {"service": True, "busy": self.busy} if self.service else {}
        if self.world is not None:
            more["world"] = self.world
            if options.output == "head" and self.world[0]:
                more["output"] = "silent"
        if self.member is not None:
            more["gang"] = self.member.header
        if isinstance(self.outlet, Items):
            more["stream"] = options.window
        return f"{options.header},{members(more)}" if options.header else members(more)

    @property
    def together(self) -> int | None:
        """The most calls of the same function that may share a frame with this call.

        None means that the number depends on how long these calls take. It is 1 for a call that runs in a new process
        (`fresh=True`) or belongs to a gang.
        """
        return 1 if self.options.fresh or self.gang is not None else self.chunk

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of the only nodes that may run the call; () if any node may."""
        return (self.node,) if isinstance(self.node, int) else self.node or ()

    @property
    def retries(self) -> int:
        """The number of retries that are left."""
        return self.options.retries - self.retried

    def bound(self, nodes: Container[int], begun: bool) -> str:
        """Return the reason why none of these nodes can run the call again. Return "" if one of them can.

        The number of retries that are left is not considered.

        Args:
            nodes: the numbers of the nodes that can take calls.
            begun: True if the call may have begun already. A begun call cannot run again if it has yielded items or has
                an iterator argument.
        """
        if self.gang is not None:
            return "the processes of a gang run again only together"
        if isinstance(self.node, tuple):
            if not any(node in nodes for node in self.node):
                return f"the call was sent to nodes {', '.join(map(str, self.node))} only"
        elif self.node is not None and self.node not in nodes:
            return f"the call was sent to node {self.node} only"
        if begun and isinstance(self.outlet, Items) and self.outlet.seen > 0:
            return f"the call had yielded {self.outlet.seen} items, which cannot be taken back"
        if begun and self.feeds:
            return "the call may have read items of an iterator argument, which cannot be read again"
        return ""

    def finish(self, end: BaseException | Returned) -> None:
        """Mark the call as ended, store its encoded value or its exception for the caller, and wake the caller."""
        self.ended = True
        self.outlet.finish(end)

    def is_like(self, other: PendingCall) -> bool:
        """Return True if `other` may be sent in the same frame as this call, which must be small.

        `other` must be small too, call the same function and have the same options.
        """
        is_same = self.options is other.options and self.world is other.world  # as in `map`, and quicker to compare
        return self.code.key == other.code.key and other.is_small and (is_same or self.header == other.header)

    @property
    def is_small(self) -> bool:
        """True if the call may share a frame with other calls.

        This needs pickled arguments in a single buffer of at most 8 KiB. Calls of a gang, of generators, or with an
        iterator argument never share a frame.
        """
        if self.gang is not None:
            return False
        payload = self.payload
        return len(payload) == 1 and len(payload[0]) <= SMALL and not self.feeds and not isinstance(self.outlet, Items)
