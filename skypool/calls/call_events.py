"""`CallEvents`: reports calls that fail or run again to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from skypool import events
from skypool.calls.pending_calls import PendingCall
from skypool.wire import error_text

if TYPE_CHECKING:
    from skypool.calls.gangs import GangFailure

_LONGEST_OTHER = 1000
"""The most characters of the error of each further rank of a gang in an event."""


class CallEvents:
    """The events about calls of one pool. Any thread may call the methods."""

    def __init__(self, pool: str, emit: Callable[[events.Event], None]) -> None:
        self._pool = pool
        self._emit = emit

    def failed(self, pending: PendingCall, error: BaseException, node: int) -> None:
        """Report that a call ended with an error, on the node of this number. Do nothing for a service."""
        if not pending.service:
            self._emit(events.CallFailed(pool=self._pool, node=node, call=pending.name, error=error_text.told(error)))

    def retried(self, pending: PendingCall, error: BaseException, node: int, attempt: int) -> None:
        """Report that a call runs again, because its run on `node` ended with `error`.

        `attempt` is the number of the run that begins, from 1.
        """
        reason = error_text.cut(error_text.text_of(error))
        self._emit(events.CallRetried(pool=self._pool, node=node, call=pending.name, attempt=attempt, reason=reason))

    def notice(self, text: str) -> None:
        """Show the user a sentence."""
        self._emit(events.Notice(pool=self._pool, text=text))

    def gang_failed(self, failure: GangFailure) -> None:
        """Report that a gang has failed, and whether it runs again."""
        self._emit(
            events.GangFailed(
                pool=self._pool,
                node=failure.node,
                call=failure.call,
                rank=failure.rank,
                error=error_text.told(failure.error),
                others=tuple(error_text.told(each, _LONGEST_OTHER) for each in failure.others),
                attempt=failure.attempt,
                again=failure.again,
            )
        )
