"""`ListFuture` and `StreamParts`: one call that runs on several nodes, and stops on all of them when it fails on one.

The run of the call on one node is a part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from skypool.calls.callbacks import Callbacks
from skypool.calls.futures import CallFuture, Items, JoinedFuture, Returned, as_one_error, cancel_all, results_of
from skypool.calls.options import Options
from skypool.errors import ConnectionLost, WorkerDied
from skypool.wire.error_text import annotate, text_of
from skypool.wire.save_orders import TO_LOOK

T = TypeVar("T")

_SETTLING = 0.5
"""Seconds between the first error of a part and the decision which part failed first.

When a process is killed, its peers often report a broken connection some 10 to 50 ms before its death is known here.
"""

_STOPPING = 1.0 + 2 * TO_LOOK
"""If a stopped part still runs this many seconds after its `grace` is over, the call's error is raised anyway.

A node that saves folders looks which files a part writes before it asks it to stop, and again before it kills it.
"""


class FirstFailure:
    """The errors of the parts of one call, and the decision which of them is raised.

    The decision is made half a second after the first error. A part whose process or node died is preferred to a part
    that raised, because a death often makes the other parts raise. Otherwise the earliest error counts.

    Args:
        name: the name of the function, for messages.
        nodes: the number of the node of each part.
        on_decided: called in a thread of its own with the error that was chosen.
    """

    def __init__(self, name: str, nodes: Sequence[int], on_decided: Callable[[BaseException], None]) -> None:
        self._name = name
        self._nodes = nodes
        self._on_decided = on_decided
        self._lock = threading.Lock()
        self._errors: dict[int, BaseException] = {}  # by the place of the part, in the order in which they came
        self._texts: dict[int, str] = {}
        self._chosen: BaseException | None = None
        self._timer: threading.Timer | None = None

    def add(self, place: int, error: BaseException) -> None:
        """Note that the part on node `nodes[place]` failed. The decision comes half a second after the first error."""
        text = f"{type(error).__name__}: {text_of(error)}"  # without the lock, as this runs code of the user
        with self._lock:
            if self._chosen is not None:
                return
            self._texts[place] = text
            self._errors[place] = error
            if self._timer is None:
                self._timer = _timer(_SETTLING, self._decide)

    def _decide(self) -> None:
        error = self.choose()
        if error is not None:
            self._on_decided(error)

    def choose(self) -> BaseException | None:
        """Return the error to raise, or None if no part has failed. Errors that come later are dropped.

        The error gets a note about the nodes, and an attribute `others`: the list of the other errors, in the order in
        which they came. If all parts ended with the same exception object, as when the pool ends, that object is
        returned as it is.
        """
        with self._lock:
            if self._chosen is not None or self._timer is None:
                return self._chosen
            self._timer.cancel()
            deaths = [place for place, e in self._errors.items() if isinstance(e, (WorkerDied, ConnectionLost))]
            place = next(iter(deaths or self._errors))
            error = self._chosen = self._errors.pop(place)
        others = [each for each in self._errors.values() if each is not error]
        if others or not self._errors:
            annotate(error, self._note(place), {"others": others})
        return error

    def _note(self, place: int) -> str:
        note = f"{self._name} failed on node {self._nodes[place]}, one of {len(self._nodes)} nodes of this call"
        also = [f"node {self._nodes[each]}: {self._texts[each]}" for each in self._errors]
        return f"{note}; it also failed on {'; '.join(also)}" if also else note


def _timer(seconds: float, function: Callable[[], None]) -> threading.Timer:
    """Start a timer that calls a function in a thread of its own, and return it. It does not keep the process alive."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


class ListFuture(JoinedFuture[list[T]]):
    """The future of a call that runs on several nodes. Its result is the list of values, ordered by node number.

    When the call fails for good on one node, the other parts are stopped: their processes get SIGTERM, and SIGKILL when
    the call's `grace` is over. The future then gets the error of the part that failed first. With the option
    `independent`, the parts go on, and the future is done when the call has ended on every node. Cancelling the future
    stops the call on all nodes.

    Args:
        nodes: the number of the node of each part, in ascending order.
        on_stopping: called with a sentence for the user when the other parts are stopped.
        callbacks: calls what users add with `add_done_callback`. Default None: the thread that ends the future does.

    Attributes:
        parts: one future for each node, in the order of `nodes`. The pool sends the call with them.
    """

    def __init__(
        self,
        name: str,
        nodes: Sequence[int],
        options: Options,
        on_stopping: Callable[[str], None],
        callbacks: Callbacks | None = None,
    ) -> None:
        super().__init__(name, callbacks=callbacks)
        self._options = options
        self._on_stopping = on_stopping
        self._failure = FirstFailure(name, nodes, self._stop_others)
        self._counting = threading.Lock()
        self._errors: list[BaseException] = []
        self._running = len(nodes)
        self._timer: threading.Timer | None = None
        self.parts: Sequence[CallFuture[T]] = [
            CallFuture(name, partial(self._on_part_end, place)) for place in range(len(nodes))
        ]
        self.on_cancel(lambda: cancel_all(self.parts))

    def _on_part_end(self, place: int, end: BaseException | Returned) -> None:
        """Note the end of the part on node `nodes[place]`. When it is the last one, finish this future."""
        if isinstance(end, BaseException) and not self.parts[place].cancelled():  # not an error of a stopped part
            if self._options.independent or len(self.parts) == 1:
                self._errors.append(end)
            else:
                self._failure.add(place, end)
        with self._counting:  # only now, as the last part to be counted finishes the call with all errors
            self._running -= 1
            is_last = self._running == 0
        if is_last:
            self._finish()

    def _stop_others(self, error: BaseException) -> None:
        """Stop the parts that still run, after one part has failed with `error`."""
        if self.done():
            return
        # this future is finished when all of them have stopped, but not later than this
        self._timer = _timer(self._options.grace + _STOPPING, self._finish)
        self._on_stopping(
            f"{self.name} failed on one of {len(self.parts)} nodes ({type(error).__name__}), so its other parts are "
            "stopped; with_options(independent=True) lets them go on"
        )
        cancel_all(self.parts)

    def _finish(self) -> None:
        """Finish this future: with the call's error, or without one. `result` decodes the values of the parts later."""
        if self._timer is not None:
            self._timer.cancel()
        error = self._failure.choose()
        if error is None and self._errors:
            error = as_one_error(self._errors, len(self.parts))
        self.finish(error or Returned(()))

    def _joined(self) -> list[T]:
        return results_of(self.parts)


class StreamParts(Generic[T]):
    """The streams of a generator that runs on several nodes: one stream for each node.

    When the generator fails for good on one node, the others are stopped. Each other stream that has not ended raises
    the error of the part that failed first, in place of its next item. With the option `independent`, the other
    generators go on.

    Args:
        nodes: the number of the node of each part, in ascending order.
        on_stopping: called with a sentence for the user when other parts are stopped.

    Attributes:
        items: the queue of items of each part, in the order of `nodes`.
    """

    def __init__(self, name: str, nodes: Sequence[int], options: Options, on_stopping: Callable[[str], None]) -> None:
        self._name = name
        self._on_stopping = on_stopping
        self._failure = FirstFailure(name, nodes, self._stop_others)
        grouped = len(nodes) > 1 and not options.independent
        self.items: Sequence[Items[T]] = [
            Items(name, partial(self._failure.add, place) if grouped else None) for place in range(len(nodes))
        ]

    def _stop_others(self, error: BaseException) -> None:
        """Stop the parts that still run, after one part has failed with `error`, and let their streams raise it."""
        failed = [each for each in self.items if not each.wait_stopped(0) and each.fail(error)]
        for each in failed:  # only now, as stopping one takes a while, and the others raise meanwhile
            each.stop()
        if failed:
            self._on_stopping(
                f"{self._name} failed on one of {len(self.items)} nodes ({type(error).__name__}), so its other streams "
                "are stopped; with_options(independent=True) lets them go on"
            )
