"""Runs the calls of a group at the same time. `GroupFuture` is the future of a group, as `group > pool` returns it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, cast

from skypool.calls.call import Call, Group
from skypool.calls.callbacks import Callbacks
from skypool.calls.futures import (
    CallFuture,
    JoinedFuture,
    Returned,
    as_one_error,
    as_they_end,
    cancel_all,
    in_order,
    results_of,
)
from skypool.errors import UsageError

R = TypeVar("R")
Send = Callable[[Call[Any]], CallFuture[Any]]
"""The type of a function that sends a call and returns its future."""


class GroupFuture(JoinedFuture[R]):
    """The future of a group of calls. Its result is the tuple of their values, in the order of the calls.

    It is done when all calls have ended. If one of them raised, that exception is raised; if several did, an
    ExceptionGroup. Cancelling the future stops all of the calls.

    Args:
        parts: the future of each call.
        callbacks: calls what users add with `add_done_callback`.
    """

    def __init__(self, parts: Sequence[CallFuture[Any]], callbacks: Callbacks) -> None:
        super().__init__(f"a group of {len(parts)} calls", callbacks=callbacks)
        self.parts = parts
        self._counting = threading.Lock()
        self._running = len(parts)
        self.on_cancel(lambda: cancel_all(parts))
        for each in parts:
            Future.add_done_callback(each, self._on_part_end)  # not in a thread for callbacks of users
        if not parts:
            self.finish(Returned(()))

    def _on_part_end(self, _: Future[Any]) -> None:
        with self._counting:
            self._running -= 1
            if self._running:
                return
        errors = [error for each in self.parts if (error := _error_of(each)) is not None]
        self.finish(as_one_error(errors, len(self.parts)) if errors else Returned(()))

    def _joined(self) -> R:
        return cast(R, tuple(results_of(self.parts)))


def _error_of(future: CallFuture[Any]) -> BaseException | None:
    """Return the error of a future that is done, without decoding its value."""
    return CancelledError() if future.cancelled() else Future.exception(future)


def run_group(group: Group[R], send: Send) -> R:
    """Run the calls of a group at the same time, as `group >> pool` does.

    Return the tuple of their values, or an iterator for `stream=True`. Raises UsageError if `group` is not a group.
    """
    futures = _sent(group, send, "run_group")
    if not group.stream:
        return cast(R, tuple(results_of(futures)))
    return cast(R, in_order(futures) if group.ordered else as_they_end(futures))


def send_group(group: Group[R], send: Send, callbacks: Callbacks) -> GroupFuture[R]:
    """Send the calls of a group, and return the future of all without waiting. `group > pool` does this.

    Raises UsageError if `group` is not a group, or was made with `stream=True`.
    """
    if isinstance(group, Group) and group.stream:
        for each in group.calls:
            each.sent = True
        raise UsageError("a group with stream=True has no future: iterate over `group >> pool`, or leave stream= out")
    return GroupFuture(_sent(group, send, "send_group"), callbacks)


def _sent(group: Group[Any], send: Send, method: str) -> list[CallFuture[Any]]:
    """Send all calls of a group. If one cannot be sent, stop those that were sent, and raise the error."""
    if not isinstance(group, Group):
        raise UsageError(f"{method}() takes a group of calls made by gather() or &, not {group!r:.80}")
    futures: list[CallFuture[Any]] = []
    try:
        for call in group.calls:
            futures.append(send(call))
    except BaseException:
        cancel_all(futures)
        for call in group.calls:
            call.sent = True  # the error is enough, without a warning for each call
        raise
    return futures
