"""`Options`: how a call runs (timeout, retries, node, output, …). Values are checked where the user writes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict

from skypool.calls.arguments import takes_one
from skypool.checks import Duration, number, seconds, whole
from skypool.errors import UsageError, nearest
from skypool.runtime import Interruption
from skypool.wire.frames import members

OutputMode = Literal["show", "head", "rank0", "silent", "capture"]
_OUTPUT_MODES = ("show", "head", "rank0", "silent", "capture")
Procs = int | Literal["per-device"]
"""The type of the option `procs`: the number of processes on each node, or "per-device"."""
MOST_PROCS = 128
"""The most processes of a gang on one node."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a call that is cancelled and has no `grace` of its own."""
NodesAsked = int | Literal["all"] | Sequence[int] | None
"""The type of the option `node`: the number of a node, several numbers, "all", or None for any node with room."""
NamedNodes = int | Literal["all"] | tuple[int, ...] | None
"""The type of a checked option `node`. Several numbers of nodes have become a tuple in ascending order."""
_OPTIONS = (
    "timeout",
    "retries",
    "retry_on",
    "node",
    "output",
    "grace",
    "window",
    "on_interruption",
    "fresh",
    "devices",
    "independent",
    "procs",
    "min_nodes",
)


class OptionChanges(TypedDict, total=False):
    """The options of a call except `node`, as keywords of `with_options`. Options that are left out keep their values.

    `ComputeFunction` describes each option.
    """

    timeout: Duration | None
    retries: int
    retry_on: type[BaseException] | tuple[type[BaseException], ...]
    output: OutputMode
    grace: Duration | None
    window: int
    on_interruption: Callable[[Interruption], object] | None
    fresh: bool
    devices: Literal[0] | None
    independent: bool
    procs: Procs | None
    min_nodes: int | None


class OneNodeChanges(OptionChanges, total=False):
    """The options of a call that runs on one node, as keywords of `with_options`.

    `node` is the number of that node, or None for any node with room.
    """

    node: int | None


class NodesChanges(OptionChanges, total=False):
    """All options of a call, as keywords of `compute` and `with_options`.

    `node` may also be a list of numbers of nodes, or "all"; the call then runs on each of these nodes.
    """

    node: NodesAsked


class Options:
    """The options of a call: how, where and for how long it runs. The constructor checks the values.

    The arguments are the options of `@compute`, and each is also an attribute. Durations such as "5m" become seconds
    there, and a single `retry_on` class becomes a tuple.

    Attributes:
        grace: seconds between SIGTERM and SIGKILL when the call is cancelled.
        own_grace: the option `grace` in seconds; None if it was not given. Then `grace` is `GRACE` (5), and a call that
            exceeds its timeout gets the `grace` of the pool.
        on_cpu: True if the call needs no device (`devices=0`). A node that has CPU slots runs the call on one of them.
        is_broadcast: True if the option `node` is "all" or several numbers, so that each of these nodes gets the call.
        pinned: the number of the only node that may run the call; None if `node` is not a single number.
        header: the options that the node needs, as JSON members without braces, for the header of the call's frame.
        attempt: the number of the start of the program that the call is, counted from 1; 0 for any other call. The
            agent of a run that belongs to its own machine starts each attempt once.

    Raises:
        UsageError: a value is not valid.
    """

    __slots__ = (*_OPTIONS, "attempt", "header", "is_broadcast", "on_cpu", "own_grace", "pinned")

    def __init__(
        self,
        *,
        timeout: Duration | None = None,
        retries: int = 0,
        retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
        node: NodesAsked = None,
        output: OutputMode = "show",
        grace: Duration | None = None,
        window: int = 1 << 20,
        on_interruption: Callable[[Interruption], object] | None = None,
        fresh: bool = False,
        devices: Literal[0] | None = None,
        independent: bool = False,
        procs: Procs | None = None,
        min_nodes: int | None = None,
    ) -> None:
        self.timeout = seconds("timeout", timeout) if isinstance(timeout, (str, timedelta)) else timeout
        self.retries = retries
        self.node: NamedNodes = node_asked(node)
        self.output = output
        self.retry_on = retry_on if isinstance(retry_on, tuple) else (retry_on,)
        self.own_grace = seconds("grace", grace) if isinstance(grace, (str, timedelta)) else grace
        self.grace = GRACE if self.own_grace is None else self.own_grace
        self.window = window
        self.fresh = fresh
        self.on_interruption = on_interruption
        self.devices = devices
        self.independent = independent
        self.procs = procs
        self.min_nodes = min_nodes
        self.attempt = 0
        self._check()
        self.header = self._header()
        self.on_cpu = devices == 0
        self.is_broadcast = isinstance(self.node, (str, tuple))
        self.pinned = self.node if isinstance(self.node, int) else None

    def _header(self) -> str:
        """Return the options that a node needs, without default values, as JSON members without braces."""
        said: dict[str, Any] = {} if self.timeout is None else {"timeout": self.timeout}
        if self.timeout is not None and self.own_grace is not None:
            said["grace"] = self.own_grace
        if self.output in ("silent", "capture"):
            said["output"] = self.output
        if self.fresh:
            said["fresh"] = True
        if self.devices is not None:
            said["devices"] = self.devices
        if self.attempt:
            said["attempt"] = self.attempt
        return members(said)

    def of_attempt(self, attempt: int) -> Options:
        """Return a copy of these options for a call that is this start of a program."""
        made = self.but({})
        made.attempt = attempt
        made.header = made._header()
        return made

    def _check(self) -> None:
        """Check the type and range of each option except `node`. Raises UsageError for the first that is not valid."""
        number("timeout", self.timeout, "seconds the call may run", optional=True, above=0)
        number("grace", self.own_grace, "seconds between SIGTERM and SIGKILL", optional=True, least=0)
        whole("retries", self.retries, "how often the call may run again", least=0)
        whole("window", self.window, "bytes of a stream under way", least=1)
        for name, value in (("fresh", self.fresh), ("independent", self.independent)):
            if not isinstance(value, bool):
                raise UsageError(f"{name} must be True or False, not {value!r}")
        if self.output not in _OUTPUT_MODES:
            raise UsageError(f"output must be one of {', '.join(map(repr, _OUTPUT_MODES))}, not {self.output!r}")
        self._check_gang()
        if self.devices is not None and (isinstance(self.devices, bool) or self.devices != 0):
            raise UsageError(
                f"devices must be 0 for a call without accelerators, or left out, not {self.devices!r}; "
                "ComputePool(slots=…) sets how many accelerators the other calls get"
            )
        for kind in self.retry_on:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise UsageError(f"retry_on must contain exception classes such as OSError, not {kind!r}")
        told = self.on_interruption
        if told is not None and not (callable(told) and takes_one(told)):
            raise UsageError(
                f"on_interruption must be a function that takes one argument, an Interruption, not {told!r}"
            )

    def _check_gang(self) -> None:
        """Check the options of a gang. Raises UsageError if one is not valid, or does not fit the other options."""
        if self.procs is None:
            if self.min_nodes is not None:
                raise UsageError('min_nodes is for gangs: set procs=, such as procs="per-device", too')
            if self.output == "rank0":
                raise UsageError("output='rank0' is for gangs: set procs= too, or use output='head'")
            return
        if not isinstance(self.procs, str) or self.procs != "per-device":
            whole("procs", self.procs, 'the number of processes on each node, or "per-device"', least=1)
            if int(self.procs) > MOST_PROCS:
                raise UsageError(f"procs must be at most {MOST_PROCS}, not {self.procs!r}")
        if self.min_nodes is not None:
            whole("min_nodes", self.min_nodes, "the fewest nodes on which the gang may run again", least=1)
        if self.independent:
            raise UsageError("procs= and independent=True exclude each other: the processes of a gang end together")
        if self.devices == 0:
            raise UsageError("procs= and devices=0 exclude each other: a gang uses the accelerators of its nodes")

    def but(self, changes: Mapping[str, object]) -> Options:
        """Return a copy of these options with some of them changed. Raises UsageError for invalid changes."""
        for name in changes:
            if name not in _OPTIONS:
                close = nearest(name, _OPTIONS)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise UsageError(f"a call has no option {name!r}{hint}; its options are {', '.join(_OPTIONS)}")
        options: dict[str, Any] = {name: getattr(self, name) for name in _OPTIONS}
        options["grace"] = self.own_grace
        options.update(changes)
        made = Options(**options)
        if changes.get("retry_on") and not made.retries:
            raise UsageError(
                "retry_on= has no effect without retries=, which says how often a call may run again; give both, "
                "such as retry_on=OSError, retries=2"
            )
        if self.attempt:
            made.attempt = self.attempt
            made.header = made._header()
        return made


def node_asked(node: object) -> NamedNodes:
    """Check the value that a user passed as `node=`, and return it in its usual form.

    A sequence becomes a tuple of its numbers in ascending order. Whether the pool has such a node is not checked.

    Raises:
        UsageError: the type is wrong, the sequence is empty, a number is negative, or a number occurs twice.
    """
    if node is None or isinstance(node, int):
        if node is not None:
            whole("node", node, "the number of a node", least=0)
        return node
    if isinstance(node, str) and node == "all":
        return "all"
    if isinstance(node, (str, bytes)) or not isinstance(node, Sequence):
        raise UsageError(
            f'node must be the number of a node, "all", or a list of numbers such as [0, 2], not {node!r:.80}'
        )
    if not node:
        raise UsageError('node must not be an empty sequence: leave node= out for any node, or write "all"')
    for each in node:
        whole("node", each, "the number of a node, in a list of them", least=0)
        if node.count(each) > 1:
            raise UsageError(f"node={node!r:.80} names node {each} more than once; name each node only once")
    return tuple(sorted(node))


def no_such_node(pool: str, missing: Collection[int], there: Collection[int]) -> UsageError:
    """Return (do not raise) a UsageError: `node=` names nodes that the pool does not have.

    `missing` has the numbers of these nodes, and `there` has those of the pool's nodes.
    """
    names = ", ".join(map(str, sorted(missing)))
    return UsageError(f"pool {pool!r} has no node {names}; its nodes are {sorted(there)}")
