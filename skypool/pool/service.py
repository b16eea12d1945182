"""`Service`: a long-lived call or program on a node, such as a daemon or a web server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from skypool.calls.futures import CallFuture, Returned
from skypool.calls.pending_calls import PendingCall
from skypool.checks import Duration, number, seconds, whole
from skypool.errors import CallTimeout, SkypoolError, UsageError

T = TypeVar("T")
KEPT = 64 << 10
"""The most characters of a service's output that are kept on the client."""
_LATE = 10.0
"""Seconds that the answer of a node may take beyond the time that the node was given."""


class Keeper(Protocol):
    """A protocol for the methods of `Services` that a `Service` uses."""

    def address(self, node: int) -> str:
        """Return the address of a node; "" if it is not known, or if the pool does not have the node."""
        ...

    def test_port(self, node: int, port: int, timeout: float) -> CallFuture[bool]:
        """Have a node wait until this port of it accepts connections. Return the future: False if it does not in time.

        `timeout` is in seconds.
        """
        ...

    def stop(self, service: Service[Any], grace: float | None = None) -> None:
        """Stop a service for good, without waiting for its end."""
        ...


class Run(CallFuture[Any]):
    """The future of one run of a service, from a start of its process to the end of that process.

    When the run ends, `on_end` is called as (run, end). `end` is the value, still encoded, or the exception.
    """

    def __init__(self, service: Service[Any], on_end: Callable[[Run, BaseException | Returned], None]) -> None:
        super().__init__(service.name, lambda end: on_end(self, end))
        self.service = service
        self.began = time.monotonic()


class Service(Generic[T]):
    """A call that runs on a node beside all others, until it is closed. `pool.service` starts one and returns it.

        with pool.service(sky.cmd("ray", "start", "--head", "--block")) as ray:
            ray.wait_ready(6379)

    A service has a process of its own and takes no slot. It sees all devices of its node. It does not keep the pool
    open: the pool closes it when the pool ends. Any thread may call the methods.

    Attributes:
        name: the name of the service in messages.
        restart: how often the service may start again after it ended: a number, or True for any number.
        restarts: how often the service has started again.
    """

    def __init__(self, name: str, node: int, restart: int, first: PendingCall, keeper: Keeper) -> None:
        self.name = name
        self.restart = restart
        self.restarts = 0
        self._node = node
        self._call = first
        self._keeper = keeper
        self._changed = threading.Condition()  # guards what follows
        self._running: PendingCall | None = None
        self._closing = False
        self._pauses = 0
        self._future: CallFuture[T] = CallFuture(name)
        self._pieces: list[str] = []
        self._size = 0

    # --- what it does ----------------------------------------------------------------------------------------

    @property
    def node(self) -> int:
        """The number of the node that runs the service, or ran it last."""
        return self._node

    @property
    def address(self) -> str:
        """The address at which other nodes reach the node of the service; "" if it is not known."""
        return self._keeper.address(self._node)

    @property
    def is_running(self) -> bool:
        """True while the service has a process. False between the end of a process and the start of the next."""
        return self._running is not None

    @property
    def output(self) -> str:
        """The last 64 Ki characters, at most, of what the service has printed in all of its runs."""
        with self._changed:
            return "".join(self._pieces)[-KEPT:]

    def __repr__(self) -> str:
        state = "ended" if self._future.done() else "running" if self.is_running else "waits to start again"
        return f"<service {self.name!r} on node {self.node}: {state}>"

    # --- waiting ---------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the service has ended and will not start again. Its error is not raised here.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Returns:
            True if it has ended, False if it runs or will run again after `timeout` seconds.
        """
        return bool(wait([self._future], timeout).done)

    def result(self, timeout: float | None = None) -> T:
        """Wait until the service has ended and will not start again. Return its function's value or raise its error.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Raises:
            TimeoutError: the service has not ended within `timeout` seconds. It goes on.
            CancelledError: the service was closed, or its pool has ended.
            CommandFailed, WorkerDied, ConnectionLost: its program failed, its process died, or its node was lost.
        """
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the service has ended and will not start again. Return the error that `result` would raise.

        Return None if `result` would return a value.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Raises:
            TimeoutError: the service has not ended within `timeout` seconds. It goes on.
            CancelledError: the service was closed, or its pool has ended.
        """
        return self._future.exception(timeout)

    def wait_ready(self, port: int, timeout: Duration = 60.0) -> Service[T]:
        """Wait until a port of the service's node accepts connections, and return this service.

        The node itself tries the port, on its own 127.0.0.1 and on the address at which other nodes reach it. If the
        service ends meanwhile and starts again, this waits for the port of its next run.

        Args:
            port: the number of the port.
            timeout: the time to wait, in seconds or as a duration such as "2m". Default 60 s.

        Raises:
            CallTimeout: the port did not accept a connection in time. The service goes on.
            SkypoolError: the service has ended, and does not start again. The cause is its own error.
        """
        whole("port", port, "the number of a port", least=1)
        if port > 65535:
            raise UsageError(f"port must be at most 65535, not {port}")
        limit = seconds("timeout", timeout)
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            with self._changed:
                run = self._running
                if run is None and not self._future.done():
                    self._changed.wait(left)
                    continue
            if run is None:
                raise self._ended_early(port)
            if self._answers(run, port, left):
                return self
        said = f"\nlast output of the service:\n{self.output[-2000:]}" if self.output else ""
        raise CallTimeout(
            f"service {self.name!r} on node {self.node} did not accept connections at port {port} within {limit:g} s; "
            f"it goes on, and wait_ready({port}, timeout=…) waits longer{said}"
        )

    def _answers(self, run: PendingCall, port: int, timeout: float) -> bool:
        """Return True when a port accepts connections; False after `timeout` seconds, or when this run has ended."""
        assert isinstance(run.outlet, CallFuture)
        test = self._keeper.test_port(self._node, port, timeout)
        try:
            wait([test, run.outlet], timeout + _LATE, FIRST_COMPLETED)
            return not run.outlet.done() and test.done() and test.exception() is None and test.result()
        finally:
            test.cancel()

    def _ended_early(self, port: int) -> SkypoolError:
        """Return (do not raise) the error for a service that has ended before its port accepted connections."""
        error = None if self._future.cancelled() else self._future.exception()
        why = "it was closed" if self._future.cancelled() else "its function returned" if error is None else str(error)
        early = SkypoolError(f"service {self.name!r} ended before port {port} of node {self.node} answered: {why}")
        early.__cause__ = error
        return early

    # --- its end ---------------------------------------------------------------------------------------------

    def close(self, grace: float = 5.0) -> None:
        """Stop the service, and wait until its process and all processes that it has started are gone.

        The process gets SIGTERM, and SIGKILL after `grace` seconds. For a service of `sky.cmd`, the program gets both.
        If the node cannot be reached, this waits until the pool has given the node up. Does nothing if the service has
        ended.

        Args:
            grace: seconds between SIGTERM and SIGKILL. Default 5.

        Raises:
            UsageError: `grace` is not a number, or negative.
        """
        number("grace", grace, "seconds between SIGTERM and SIGKILL", least=0)
        self._keeper.stop(self, grace)
        self.wait()

    def __enter__(self) -> Service[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the service. An exception of the block is not suppressed."""
        self.close()

    def _printed(self, text: str) -> None:
        """Keep a piece of output, and forget the oldest output if there is too much."""
        with self._changed:
            self._pieces.append(text)
            self._size += len(text)
            if self._size > 2 * KEPT:
                self._pieces = ["".join(self._pieces)[-KEPT:]]
                self._size = KEPT
