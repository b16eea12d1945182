"""Lets the stop of a call wait while the worker's own code must not be interrupted."""

from __future__ import annotations

from types import TracebackType


class Cancelled(BaseException):
    """Exception that is raised inside a running call when the agent wants it to stop.

    The call's `finally` and `with` blocks run then. It is a BaseException, so `except Exception` does not catch it.
    """


class Closed(Cancelled, GeneratorExit):
    """A Cancelled that is raised inside a generator, which then ends as if its `close` was called."""


class Shield:
    """Context manager for code that holds a lock: a stop of the call is raised at the end of the block, not inside.

    `cancelled` is the class of the exception. Without this, `threading.Condition` may keep its lock for ever, if a
    signal handler raises an exception at the wrong moment. The block must not wait for anything that a stopped call no
    longer gets.
    """

    def __init__(self) -> None:
        self.cancelled = Cancelled
        self._is_up = False
        self._is_due = False

    def stop(self) -> None:
        """Raise Cancelled, or let the end of the block raise it. Called by the handler of SIGTERM."""
        if not self._is_up:
            raise self.cancelled
        self._is_due = True

    def __enter__(self) -> None:
        self._is_up = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_up = False
        if self._is_due:
            self._is_due = False
            raise self.cancelled
