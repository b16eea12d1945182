"""`reading`: lets the calling thread read the connections to many nodes, instead of the thread of the event loop.

For more than four connections, one system call finds those on which something has arrived.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Iterable, Iterator, Sequence

from skypool.link.inbox import Reading
from skypool.link.link import Link

_FEW = 4
"""The most connections that are simply read one after the other. For more, it is quicker to ask which have data."""


@contextlib.contextmanager
def reading(links: Iterable[Link]) -> Iterator[Callable[[], None]]:
    """Return a context manager in which the calling thread reads the connections of `links`.

    Connections that another thread reads already, and links without a connection, are left out.

    Yields:
        A function that handles the messages that have arrived, without waiting.
    """
    with contextlib.ExitStack() as stack:
        there = [each for link in links if (each := stack.enter_context(link.reading())) is not None]
        selected = None
        if len(there) > _FEW:
            with contextlib.suppress(OSError):  # no free descriptor: then they are read one after the other
                selected = stack.enter_context(_Selected(there))
        yield (lambda: _read_all(there)) if selected is None else selected.read


def _read_all(readings: Sequence[Reading]) -> None:
    for each in readings:
        each()


class _Selected:
    """Several connections. Each of them is read only when something has arrived on it."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._selector = selectors.DefaultSelector()
        for each in readings:
            self._selector.register(each, selectors.EVENT_READ, each)

    def read(self) -> None:
        """Handle the messages that have arrived. A connection that is over is left out from then on."""
        for key, _ in self._selector.select(0):
            if not key.data():
                self._selector.unregister(key.fileobj)

    def __enter__(self) -> _Selected:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
