"""Lets the stop of a call wait while the worker's own code must not be interrupted."""

from __future__ import annotations

from types import TracebackType


class Cancelled(BaseException):
    """An exception that is raised inside a running call when the agent (the node's main process) wants it to stop.

    The call's `finally` and `with` blocks run then. It is a BaseException, so that `except Exception` in the call does
    not catch it.
    """


class Closed(Cancelled, GeneratorExit):
    """A Cancelled inside a generator, to which it looks as if its `close` was called."""


class Shield:
    """A context manager for code that holds a lock: a stop of the call is raised at the end of the block, not inside.

    Python's `threading.Condition` may keep its lock for ever if an exception is raised by a signal handler at the wrong
    moment. The block must not wait for anything that a stopped call no longer gets.

    Attributes:
        cancelled: the class of what is raised.
    """

    def __init__(self) -> None:
        self.cancelled = Cancelled
        self._is_up = False
        self._is_due = False

    def stop(self) -> None:
        """Raise Cancelled, or let the end of the block raise it. Called by the handler of SIGTERM.

        Raises:
            Cancelled: the worker is not in a block.
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
