"""Delays the exception that stops a call while the worker's own code must not be interrupted."""

from __future__ import annotations

from types import TracebackType


class Cancelled(BaseException):
    """Exception that is raised inside a running call when the agent wants it to stop.

    The call's `finally` and `with` blocks run then. It is a BaseException, so `except Exception` does not catch it.
    """


class Closed(Cancelled, GeneratorExit):
    """A Cancelled that is raised inside a generator, which then ends as if its `close` was called."""


class Shield:
    """Context manager for code that holds a lock: the exception that stops the call is raised only after the block.

    Otherwise `threading.Condition` may keep its lock for ever, if a signal handler raises the exception at the wrong
    moment. The block must not wait for anything that a stopped call no longer gets. The attribute `cancelled` is the
    class of the exception.
    """

    def __init__(self) -> None:
        self.cancelled = Cancelled
        self._is_up = False
        self._is_due = False

    def stop(self) -> None:
        """Stop the call: raise Cancelled now, or at the end of the block if one is running.

        Called by the handler of SIGTERM.
        """
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
