"""`CallSurface`: the ways to send calls to a selection of nodes, which is a whole pool or a view of some nodes."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn, ParamSpec, TypeVar, overload

from skypool.calls import call as calls
from skypool.calls.call import Call, ComputeFunction, Group, call_asked, packed
from skypool.calls.futures import CallFuture
from skypool.calls.groups import run_group, send_group
from skypool.calls.options import NamedNodes, NodesAsked, node_asked
from skypool.checks import number, switch, whole
from skypool.errors import UsageError
from skypool.link.forward import Forward
from skypool.pool.call_routing import CallSender
from skypool.pool.service import Service
from skypool.pool.service_supervisor import check_service, restarts_asked

if TYPE_CHECKING:
    from skypool.files.progress import Progress
    from skypool.files.transfer import Transferred

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class CallSurface:
    """A selection of nodes to which calls can be sent: all nodes of a pool, or those of a view.

    "The nodes" below are those of the selection.
    """

    @property
    @abstractmethod
    def _sender(self) -> CallSender:
        """The sender of the pool's calls."""

    @abstractmethod
    def _narrowed(self, asked: NamedNodes, asker: object) -> NamedNodes:
        """Return the nodes of the selection that `asked` names. Raises UsageError, naming `asker`, for other nodes."""

    # --- calls -----------------------------------------------------------------------------------------------

    def run(self, call: Call[T]) -> T:
        """Run a call on one node, wait for it, and return its value. `call >> pool` does the same.

        For a generator function, return a `Stream` of the items at once. If the call's option `node` is "all" or a list
        of numbers, run the call on each of these nodes. The result is then the list of values, ordered by node number.

        If the function raises, its exception is raised here. If the wait is interrupted, as by Ctrl-C, the call is
        cancelled. If the pool was not started, start it first.

        Raises:
            PickleError: the function, an argument or the result cannot be pickled.
            UsageError: the argument is not a call, or the pool does not have the node that the call names.
            ConnectionLost, WorkerDied, CallTimeout: the call was lost, or ran longer than its `timeout`.
            PoolClosed: the pool has ended, or ended before the call did.
        """
        asked = packed(call)
        return self._sender.run(asked, self._narrowed(asked.options.node, call))

    def run_all(self, call: Call[T]) -> list[T]:
        """Run a call on every node, wait for all, and return the list of values. `call @ pool` does the same.

        The list is ordered by node number. If the call's option `node` is a number or a list of numbers, only these
        nodes run the call. For a generator function, return a list of `Stream` objects at once.

        Unless it names nodes, the call waits until the pool has as many nodes as it is to have. Nodes that were lost or
        taken back by the provider are replaced meanwhile. A notice says for which nodes the call waits. A gang (a call
        with the option `procs`) that has `min_nodes` waits at most for the time of the pool's `wait`.

        If the call fails on one node and is not retried, it is stopped on the others: its processes get SIGTERM, and
        SIGKILL when the call's `grace` is over. Then the exception that came first is raised, and its attribute
        `others` is the list of the further exceptions. If a node died and a function on another node raised at the same
        time, the node's error comes first. The other streams of a generator function raise that exception in place of
        their next item.

        With the option `independent`, the call goes on where it has not failed. Exceptions are raised when it has ended
        on all nodes. A gang's list has the values of all its processes, ordered by rank.

        Raises:
            ExceptionGroup: the call has the option `independent`, and failed on several nodes.
            UsageError: the argument is not a call, or the pool does not have a node that the call names.
            PickleError: the function or an argument cannot be pickled.
            LaunchError: the pool lacks nodes, and no more are being launched. A pool made smaller by `resize` does not
                wait for them.
            PoolClosed: the pool has ended.
        """
        asked = packed(call)
        return self._sender.run_all(asked, self._narrowed(asked.options.node, call))

    @overload
    def send(self, call: Call[T], *, node: Literal["all"] | Sequence[int]) -> CallFuture[list[T]]: ...
    @overload
    def send(self, call: Call[T], *, node: int | None = None) -> CallFuture[T]: ...
    def send(self, call: Call[T], *, node: NodesAsked = None) -> CallFuture[T] | CallFuture[list[T]]:
        """Send a call, and return its future without waiting for the result. `call > pool` does the same.

        If the pool was not started, this starts it, and blocks until it is ready.

        Args:
            call: the call, such as `train(3)`.
            node: the number of the node that runs the call. "all" or a list of numbers sends the call to each of these
                nodes; the future's result is then a list, ordered by node number. Default None: the call's own `node`
                option.

        Raises:
            PickleError: the function or an argument cannot be pickled. The message names it.
            UsageError: `call` is not a call, the function is a generator function, or the pool does not have a node
                that is named.
            PoolClosed: the pool has ended.
        """
        call_asked(call).sent = True  # also if it is refused here: the error is enough, without a warning
        named: NamedNodes = call.options.node if node is None else node_asked(node)
        return self._sender.send(packed(call), self._narrowed(named, call), every=isinstance(named, (str, tuple)))

    def run_group(self, group: Group[R]) -> R:
        """Run the calls of a group at the same time, and wait for all. `group >> pool` does the same.

        Returns:
            A tuple of the values, in the order of the calls, when all have ended. For `gather(…, stream=True)`: an
            iterator of the values, at once. If the group is `ordered`, the iterator yields the values in the order of
            the calls. Otherwise it yields each value when it arrives.

        Raises:
            ExceptionGroup: several calls raised. If only one did, its exception is raised.
            UsageError: the argument is not a group, or a call names a node that the pool does not have.
            PickleError: the function or an argument of a call cannot be pickled.
            PoolClosed: the pool has ended.
        """
        return run_group(group, self.send)

    def send_group(self, group: Group[R]) -> CallFuture[R]:
        """Send the calls of a group, and return one future for all, without waiting. `group > pool` does the same.

        The result of the future is the tuple of the values, in the order of the calls, when all have ended. Cancelling
        the future stops all of the calls. If a call cannot be sent, the others are stopped, too.

        Raises:
            UsageError: the argument is not a group, the group has `stream=True`, or a call names a node that the pool
                does not have.
            PickleError: the function or an argument of a call cannot be pickled.
            PoolClosed: the pool has ended.
        """
        return send_group(group, self.send, self._sender.working().dispatch.callbacks)

    @overload
    def submit(self, fn: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...
    def submit(self, fn: ComputeFunction[P, T] | Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Send `fn(*args, **kwargs)` to one node, and return its future without waiting for the result.

        If the pool was not started, this starts it, and blocks until it is ready.

        Args:
            fn: the function, with or without `@compute`.
            args, kwargs: the arguments of the function.

        Raises:
            PickleError: the function or an argument cannot be pickled.
            UsageError: `fn` is not a function, or is a generator function.
            PoolClosed: the pool has ended.
        """
        function = self._sender.function(fn)
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
        """Call `fn` for each item on the nodes, and return an iterator of the results, in the order of the items.

        The calls are sent before this returns; see `buffersize`. A node runs as many calls at once as it has slots.
        With the pool's default `slots=None`, a node with accelerators has one slot for functions that use them. If `fn`
        has the option `procs`, each call runs as a gang on one node, and its result is the value of its rank 0. To use
        only some nodes, name them: `pool.map(f.with_options(node=[0, 2]), items)`. If the pool was not started, this
        starts it first.

        If a call raises, the iterator raises that exception in place of the result. When the iterator is closed or has
        raised, the remaining calls are cancelled.

        Args:
            fn: the function, with or without `@compute`.
            iterables: the items. With several iterables, `fn` gets one argument from each, and the shortest ends the
                map.
            timeout: seconds from now within which all results must arrive. Default None: no limit.
            chunksize: the number of calls that are sent together to one slot, which runs them one after the other.
                Default None: short calls are sent together, long calls one by one.
            buffersize: how many items may be read before their results are taken from the iterator. Default None: all
                items are read now.

        Raises:
            TimeoutError: raised by the iterator when `timeout` is over.
            PickleError: the function or an argument cannot be pickled.
            UsageError: an argument is not valid, or the pool does not have a node that `fn` names.
            PoolClosed: the pool has ended.
        """
        number("timeout", timeout, "seconds until all results must be there", optional=True)
        if buffersize is not None:
            whole("buffersize", buffersize, "items read ahead", least=1)
        if chunksize is not None:
            whole("chunksize", chunksize, "calls sent at a time", least=1)
        until = None if timeout is None else time.monotonic() + min(timeout, 1e8)
        function = self._sender.function(fn)
        nodes = self._narrowed(function.options.node, function)
        return self._sender.map(function, nodes, iterables, chunksize, buffersize, until)

    @overload
    def service(
        self,
        call: Call[T],
        *,
        node: Literal["all"] | Sequence[int],
        restart: bool | int = False,
        name: str | None = None,
        busy: bool = False,
    ) -> list[Service[T]]: ...
    @overload
    def service(
        self,
        call: Call[T],
        *,
        node: int | None = None,
        restart: bool | int = False,
        name: str | None = None,
        busy: bool = False,
    ) -> Service[T]: ...
    def service(
        self,
        call: Call[T],
        *,
        node: NodesAsked = None,
        restart: bool | int = False,
        name: str | None = None,
        busy: bool = False,
    ) -> Service[T] | list[Service[T]]:
        """Start a long-lived call or program on a node beside all calls, such as a daemon or a web server.

            with pool.service(sky.cmd("python", "-m", "http.server", "8000")) as server:
                server.wait_ready(8000)

        A service has a process of its own and takes no slot. It sees all devices of its node, unless the call has the
        option `devices=0`. What it prints is shown like the output of calls. A service does not keep the pool open: the
        pool closes it at its own end. If the service ends earlier, the console says so, and its `result` raises its
        error. If the pool was not started, this starts it first. This does not wait until the process runs.

        Args:
            call: the call, such as `serve(8)` or `sky.cmd("ray", "start", "--head", "--block")`. Its options timeout,
                output, grace, devices and on_interruption count.
            node: the number of the node. "all" or a list of numbers starts a service on each of these nodes. Default
                None: the call's own `node` option; without one, node 0.
            restart: True starts the service again whenever it has ended, also if its function returned. A number limits
                the restarts. The pause before a restart grows from 0.5 s to 30 s. If its node is lost, the service
                starts on a node that joins in the lost node's place. Default False: no restart.
            name: the name of the service in messages. Default None: that of the function or program.
            busy: True counts the service as work, like a call: while it runs, `linger=` does not end the pool, and its
                node is idle only if all devices are below 5 % utilisation. Default False.

        Returns:
            a `Service`; for "all" or a list, a list of them, ordered by node number.

        Raises:
            UsageError: an argument is not valid, the call cannot be a service, or the pool does not have the node. Also
                raised for nodes with `trust="data"`, on which services do not run.
            PickleError: the function or an argument cannot be pickled.
            NodeInterrupted, NodeRetired: the node gets no new calls, as the provider takes it back or it was retired.
            PoolClosed: the pool has ended.
        """
        call_asked(call).sent = True
        check_service(call)
        again = restarts_asked(restart)
        if name is not None and not (isinstance(name, str) and name):
            raise UsageError(f"name must be a text that names the service in messages, not {name!r}")
        switch("busy", busy)
        named: NamedNodes = call.options.node if node is None else node_asked(node)
        asked = packed(call)
        nodes = self._narrowed(named, call)
        if isinstance(named, (str, tuple)):
            return self._sender.start_services(asked, nodes, again, name, busy)
        return self._sender.working().services.start(asked, _first_of(nodes), again, name, busy=busy)

    def forward(
        self,
        port: int,
        node: int | None = None,
        *,
        host: str = "localhost",
        here: int = 0,
        socket: str | os.PathLike[str] | None = None,
    ) -> Forward:
        """Forward connections from a port of this computer to a port of a node, such as that of a dashboard.

            with pool.forward(8265, node=0) as forward:
                webbrowser.open(forward.url)

        The port of this computer listens on 127.0.0.1 only. Every user of this computer can connect to it, but with
        `socket` only you can. The forward ends when the block is left, `forward.close()` is called, the node leaves the
        pool, or the pool ends. If the pool was not started, this starts it first. Blocks until the port can be used.

        Args:
            port: the port on the node.
            node: the number of the node.
            host: the host to connect to, as the node knows it. Default "localhost": the node itself.
            here: the port of this computer. Default 0: a free one, which `forward.port` names.
            socket: the path of a Unix socket that is made in place of the port. `curl --unix-socket` and many other
                programs can use it, but browsers cannot. No other user may be able to change its folder. Default None:
                a port.

        Raises:
            UsageError: an argument is not valid, the pool does not have the node, the port `here` is not free, or the
                socket cannot be made.
            NotPrivate: another user can change the folder of the socket.
            ConnectionLost: the node cannot be reached.
            PoolClosed: the pool has ended.
        """
        for name, value in (("port", port), ("here", here)):
            whole(name, value, "a port", least=0 if name == "here" else 1)
            if value > 65535:
                raise UsageError(f"{name} (a port) must be at most 65535, not {value}")
        if node is not None:
            whole("node", node, "the number of a node", least=0)
        if here and socket is not None:
            raise UsageError("pass either here= (a port) or socket= (a path) to forward(), not both")
        number_ = _first_of(self._narrowed(node, f"forward({port})"))
        engine = self._sender.working()
        engine.dispatch.roster.nodes([number_])  # raises UsageError for a node that does not exist
        return engine.forwards.open(number_, host, port, here if socket is None else os.path.abspath(socket))

    # --- files -----------------------------------------------------------------------------------------------

    def push(
        self,
        local: str | os.PathLike[str],
        remote: str | os.PathLike[str] | None = None,
        node: NodesAsked = "all",
        *,
        delete: bool = False,
        checksum: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> Transferred:
        """Send a file or a folder of this computer to nodes, side by side, and wait until it is there.

            pool.push("data")                      # the folder "data" in the folder in which calls run
            pool.push("train.py", "code/", node=0)

        Files that are there are not sent again: those of equal size and time of change, and those of equal size and
        contents. What `.gitignore` and `.skypoolignore` leave out is not sent. Permissions, times of change and
        symbolic links are kept; owners, hard links and extended attributes are not.

        A file gets its name when it is whole. If the connection is lost, this goes on where it stopped, until nothing
        has moved for the pool's `liveness`. If the pool was not started, this starts it first.

        Args:
            local: the file or folder.
            remote: the folder on the node whose contents the folder becomes, or the path of the file; for a file, a
                folder if there is one, or if it ends with "/". Relative paths begin where calls run. Default None: the
                same name there.
            node: the number of a node, several numbers, or "all".
            delete: also delete what the folder on the node has and this one does not. What is left out is not deleted.
            checksum: compare the contents of all files of equal size, whatever their times.
            progress: called in the thread that reads the files, a few times a second, with how far it is.

        Raises:
            UsageError: an argument is not valid, there is no such file, or the pool does not have the node.
            TransferError: some files could not be read here or written there. All others are there.
            ConnectionLost: a node cannot be reached.
            PoolClosed: the pool has ended.
        """
        from skypool.files import transfer  # imported here, as in `pull`, because most programs send no files
        from skypool.files.progress import Progress

        here = os.fspath(local)
        there = transfer.name_of(os.path.abspath(os.path.expanduser(here))) if remote is None else os.fspath(remote)
        _check_transfer(there, delete, checksum)
        nodes = self._narrowed(node_asked(node), f"push({here!r})")
        with self._sender.transfer(f"push({here!r})", None if nodes == "all" else nodes) as ends:
            return transfer.push(
                ends,
                here,
                there,
                patience=self._sender.patience,
                delete=delete,
                checksum=checksum,
                progress=Progress(progress),
            )

    def pull(
        self,
        remote: str | os.PathLike[str],
        local: str | os.PathLike[str] | None = None,
        node: int | None = None,
        *,
        delete: bool = False,
        checksum: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> Transferred:
        """Fetch a file or a folder from a node, and wait until it is here. `push` has the rules; nothing is left out.

            pool.pull("out", "results")        # the contents of "out" become those of the folder "results"
            pool.pull("model.pt")              # to "model.pt" in the current folder

        Nothing that the node says leads out of `local`, where it may put any files. Links that may lead out are told as
        failures.

        Args:
            remote: the file or folder on the node.
            local: the folder here, or the path of the file; for a file, a folder if there is one, or if it ends with
                "/". Default None: the same name here.
            node: the number of the node. Default: the first one.
            delete: also delete what the folder here has and the node's does not. What `.gitignore` and `.skypoolignore`
                leave out is not deleted.
            checksum: compare the contents of all files of equal size, whatever their times.
            progress: called a few times a second, with how far it is.

        Raises:
            UsageError: an argument is not valid, or the pool does not have the node.
            TransferError: some files could not be read there or written here, or the node sent what it may not.
            ConnectionLost: the node cannot be reached.
            PoolClosed: the pool has ended.
        """
        from skypool.files import transfer
        from skypool.files.progress import Progress

        there = os.fspath(remote)
        _check_transfer(there, delete, checksum)
        here = transfer.name_of(there) if local is None else os.fspath(local)
        if node is not None:
            whole("node", node, "the number of a node", least=0)
        number_ = _first_of(self._narrowed(node, f"pull({there!r})"))
        with self._sender.transfer(f"pull({there!r})", number_) as (end,):
            return transfer.pull(
                end,
                there,
                here,
                patience=self._sender.patience,
                delete=delete,
                checksum=checksum,
                progress=Progress(progress),
            )

    # --- operators with a left operand that is not a call ----------------------------------------------------

    __array_ufunc__ = None  # makes numpy leave `array @ pool` to `__rmatmul__`

    def __rrshift__(self, value: object) -> NoReturn:
        """Raise a UsageError: the left operand of `>> pool` is not a call. The message advises what to write."""
        raise calls.no_call(value, ">>")

    def __rmatmul__(self, value: object) -> NoReturn:
        """Raise a UsageError: the left operand of `@ pool` is not a call. The message advises what to write."""
        raise calls.no_call(value, "@")

    def __lt__(self, value: object) -> NoReturn:
        """Raise a UsageError: the left operand of `> pool` is not a call."""
        raise calls.no_call(value, ">")

    def __rand__(self, value: object) -> NoReturn:
        """Raise a UsageError for `value & pool`: `&` combines calls, and a pool is not a call."""
        raise calls.no_call(value, "&")


def _check_transfer(remote: str, delete: bool, checksum: bool) -> None:
    """Raise UsageError for arguments that are not valid."""
    switch("delete", delete)
    switch("checksum", checksum)
    if not remote or "\0" in remote:
        raise UsageError(f"remote must be a path on the node, not {remote!r}")


def _first_of(nodes: NamedNodes) -> int:
    """Return the first of these nodes; node 0 of a whole pool."""
    return nodes[0] if isinstance(nodes, tuple) else nodes if isinstance(nodes, int) else 0
