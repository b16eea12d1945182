"""Results for the caller: `CallFuture`, `Stream` of a generator's items, and waiting for several calls."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, Generic, NamedTuple, TypeVar

from skypool.errors import PickleError, ProtocolError, UntrustedResult
from skypool.trust import Reader as Reader
from skypool.wire import codec
from skypool.wire.frames import Buffer

T = TypeVar("T")
_NOTHING = pickle.dumps(None)
"""What a stream that was closed returns."""
_MOST_UNTAKEN = 1 << 30
"""Bytes of items that a node may send ahead of what is taken: far more than a stream's window allows."""


class Returned(NamedTuple):
    """A call's value, still in buffers; it is unpickled by the thread that asks for it.

    `reader` reads what comes from a node that is trusted with data only; None unpickles it.
    """

    buffers: Sequence[Buffer]
    reader: Reader | None = None


def _opened(raw: Returned, name: str) -> Any:
    """The value of a call.

    Raises:
        PickleError: it cannot be rebuilt here. UntrustedResult: nor may it be.
    """
    if raw.reader is not None:
        return raw.reader.value(raw.buffers, f"the result of {name}")
    try:
        return codec.loads(raw.buffers)
    except Exception as e:
        what = f"the result of {name}"
        raise PickleError(f"{what} cannot be rebuilt here: {type(e).__name__}: {e}", what) from e


class ResultCell(Generic[T]):
    """Result of one call, for a single thread that waits for many calls in order. It costs less than a future."""

    __slots__ = ("_end", "_waiter")

    def __init__(self) -> None:
        self._end: BaseException | Returned | None = None
        self._waiter: threading.Event | None = None

    def finish(self, end: BaseException | Returned) -> None:
        """The call ended; from any thread."""
        self._end = end
        if self._waiter is not None:
            self._waiter.set()

    def result(self, name: str, timeout: float | None = None) -> T:
        """The call's value; raises what the call raised.

        Raises:
            TimeoutError: it did not end within `timeout` seconds; it goes on.
        """
        if self._end is None:
            self._waiter = threading.Event()
            if self._end is None and not self._waiter.wait(timeout):  # it may have ended in between
                raise TimeoutError
        end = self._end
        if isinstance(end, Returned):
            return _opened(end, name)  # type: ignore[no-any-return]  # what the function returned
        assert end is not None
        raise end


class CallFuture(Future[T]):
    """A `concurrent.futures.Future` whose call can be stopped, and that an asyncio program can await."""

    def __init__(self, name: str = "the call") -> None:
        super().__init__()
        self.name = name
        self._stop: Callable[[], None] | None = None
        self._opening = threading.Lock()
        self._opened = False
        self._cancelled = False
        self._stopped = False
        self._broken: PickleError | UntrustedResult | None = None

    def on_cancel(self, stop: Callable[[], None]) -> None:
        """What `cancel` does about the call itself."""
        self._stop = stop

    def result(self, timeout: float | None = None) -> T:
        """The call's value; raises what the call raised.

        Raises:
            TimeoutError: it did not end within `timeout` seconds; it goes on.
            CancelledError: it was cancelled.
        """
        value: object = super().result(timeout)
        return self._open(value) if isinstance(value, Returned) else value  # type: ignore[return-value]  # then it is T

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` raises, None if it gives a value: a value that cannot be rebuilt here counts, too."""
        error = super().exception(timeout)
        if error is None:
            with contextlib.suppress(PickleError, UntrustedResult):
                self.result()
        return error or self._broken

    def finish(self, end: BaseException | Returned) -> None:
        """The call ended, or will never begin. A future that was cancelled before stays cancelled."""
        self._stopped = True
        try:
            if isinstance(end, Returned):
                self.set_result(end)  # type: ignore[arg-type]  # `result` opens it
            else:
                self.set_exception(end)
        except InvalidStateError:
            with self._condition:
                self._condition.notify_all()  # for `wait_stopped`

    def _open(self, raw: Returned) -> T:
        """Unpickle, once, in the thread that asks."""
        with self._opening:
            if not self._opened:
                try:
                    self._value: T = _opened(raw, self.name)
                except (PickleError, UntrustedResult) as e:
                    self._broken = e
                self._opened = True
        if self._broken is not None:
            raise self._broken
        return self._value

    def cancel(self) -> bool:
        """Stop the call, also when it runs already: SIGTERM, its grace, then SIGKILL. False if it has ended.

        The future is done at once, while the function may still clean up on its node: see `wait_stopped`.
        """
        if not super().cancel():
            return False
        with self._opening:
            first = not self._cancelled
            self._cancelled = True
        if first:
            self.set_running_or_notify_cancel()
            if self._stop is not None:
                self._stop()
        return True

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Wait until the function has stopped on its node, its `finally` and `with` blocks included.

        This tells a caller that cancelled the call when its files, ports and memory are free again.

        Args:
            timeout: seconds; None waits without a limit. A call that is cancelled ends within its `grace`.

        Returns:
            True if it has stopped or will never begin: it ended, or its worker or node is gone. False if it may still
            run when `timeout` is over.
        """
        with self._condition:
            return self._condition.wait_for(lambda: self._stopped, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        return asyncio.wrap_future(self).__await__()


class ListFuture(CallFuture[list[T]]):
    """The future of a call that was sent to several nodes: a list of their values, by node.

    It is done when the call has ended on every node. Cancelling it stops the call on all of them.

    Args:
        name: the name of the function.
        parts: the futures of the call, one for each node, in the order of the list.
    """

    def __init__(self, name: str, parts: Sequence[CallFuture[T]]) -> None:
        super().__init__(name)
        self._parts = parts
        self._running = len(parts)
        self._counting = threading.Lock()
        self.on_cancel(lambda: cancel_all(parts))
        for part in parts:
            part.add_done_callback(self._on_part_done)

    def _on_part_done(self, _: Future[T]) -> None:
        with self._counting:
            self._running -= 1
            if self._running:
                return
        # `Future.exception` leaves the values pickled: the thread that asks for them unpickles them
        ended = [part for part in self._parts if not part.cancelled()]
        errors = [error for part in ended if (error := Future.exception(part)) is not None]
        self.finish(_as_one_error(errors, len(self._parts)) if errors else Returned(()))

    def result(self, timeout: float | None = None) -> list[T]:
        """Return the values by node; raises what a node raised, or an ExceptionGroup if several did.

        Raises:
            TimeoutError: it did not end on all nodes within `timeout` seconds; it goes on.
            CancelledError: it was cancelled.
        """
        Future.result(self, timeout)
        return results_of(self._parts)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what `result` raises, None if it gives a list."""
        error = Future.exception(self, timeout)
        if error is None:
            try:
                self.result()
            except (PickleError, UntrustedResult, BaseExceptionGroup) as e:
                return e
        return error

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """See `CallFuture.wait_stopped`. It waits for the function on every node."""
        until = None if timeout is None else time.monotonic() + timeout
        for part in self._parts:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not part.wait_stopped(left):
                return False
        return True


class Items(Generic[T]):
    """Items on their way from a generator on a node; what its user holds is a `Stream` of them.

    Attributes:
        value: what the generator returned, once it is exhausted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._batches: queue.SimpleQueue[tuple[int, bool, Returned] | BaseException | Returned] = queue.SimpleQueue()
        self._reader: Reader | None = None
        self._fed = 0
        self._eaten = 0
        self._batch: Iterator[Any] = iter(())
        self._seq = 0
        self._over = False
        self.seen = 0
        self.taken = 0
        self.value: Any = None
        self._credit: Callable[[int], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._stopped = threading.Event()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to take."""
        return self._over

    def connect(self, credit: Callable[[int], None], stop: Callable[[], None]) -> None:
        """How to tell the generator that items were taken, and that no more are wanted."""
        self._credit = credit
        self._stop = stop

    def feed(self, seq: int, single: bool, buffers: list[Buffer], reader: Reader | None = None) -> None:
        """Items up to number `seq` came; engine's thread."""
        if seq <= self.seen:
            return  # told again after a reconnection
        self.seen = seq
        self._fed += sum(map(len, buffers))
        if self._fed - self._eaten > _MOST_UNTAKEN and not self._batches.empty():
            raise ProtocolError(f"{self._name} yields far more than may be on its way")
        self._batches.put((seq, single, Returned(buffers, reader)))

    def finish(self, end: BaseException | Returned) -> None:
        """The generator ended; engine's thread."""
        self._batches.put(end)
        self._stopped.set()

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """See `Stream.wait_stopped`."""
        return self._stopped.wait(timeout)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            for item in self._batch:
                if type(item) is tuple or type(item) is list:
                    return self._read(item)  # type: ignore[no-any-return]  # what the generator yielded
                return item  # type: ignore[no-any-return]
            self._acknowledge()
            if self._over:
                raise StopIteration
            self._next_batch()

    def _acknowledge(self) -> None:
        if self._seq > self.taken and self._credit is not None:
            self.taken = self._seq
            self._credit(self._seq)

    def _next_batch(self) -> None:
        got = self._batches.get()
        if isinstance(got, BaseException):
            self._over = True
            raise got
        if isinstance(got, Returned):
            self._over = True
            self._reader = got.reader
            self.value = self._read(got.buffers, "the return value")
            return
        self._seq, single, came = got
        self._eaten += sum(map(len, came.buffers))
        self._reader = came.reader
        self._batch = iter([came.buffers] if single else self._read(came.buffers))

    def _read(self, buffers: Sequence[Buffer], what: str = "an item") -> Any:
        return codec.loads(buffers) if self._reader is None else self._reader.value(buffers, f"{what} of {self._name}")

    def close(self) -> None:
        """Take no more items, and stop the generator."""
        if not self._over:
            self._over = True
            self._batch = iter(())
            self._batches.put(Returned((_NOTHING,)))  # wakes a thread that waits for the next item
            if self._stop is not None:
                self._stop()


class Stream(Generic[T]):
    """The items of a generator that runs on a node, pulled as they are yielded.

    Iterate it with `for` or `async for`. The generator waits while too much is not yet taken, and is stopped when the
    stream is closed or forgotten, as by a `break` out of the loop.
    """

    def __init__(self, items: Items[T], later: Callable[[Callable[[], None]], object]) -> None:
        self._items = items
        self._later = later
        self._next = items.__next__

    @property
    def value(self) -> Any:
        """What the generator returned, once it is exhausted."""
        return self._items.value

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._next()

    def close(self) -> None:
        """Take no more items, and stop the generator. It may still clean up on its node: see `wait_stopped`."""
        self._items.close()

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Wait until the generator has stopped on its node, its `finally` and `with` blocks included.

        Args:
            timeout: seconds; None waits without a limit. Call `close` first, unless all items were taken.

        Returns:
            False if it may still run when `timeout` is over.
        """
        return self._items.wait_stopped(timeout)

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._items.is_over:
            self._later(self._items.close)  # not here: this may be any thread, with any lock

    async def __aiter__(self) -> AsyncIterator[T]:
        import asyncio

        end = object()
        while (item := await asyncio.to_thread(next, self, end)) is not end:
            yield item  # type: ignore[misc]  # not the sentinel, so an item


def results_of(futures: Sequence[CallFuture[T]]) -> list[T]:
    """All values; one failure as it is, several as a group. Interrupted, it stops them all."""
    try:
        wait(futures)
    except BaseException:
        cancel_all(futures)
        raise
    errors = [e for f in futures if (e := f.exception()) is not None]
    if len(errors) > 1:
        raise _as_one_error(errors, len(futures))
    return [future.result() for future in futures]


def _as_one_error(errors: Sequence[BaseException], calls: int) -> BaseException:
    """Return one failure as it is, and several of so many calls as a group."""
    if len(errors) == 1:
        return errors[0]
    return BaseExceptionGroup(f"{len(errors)} of {calls} calls failed", errors)


def cancel_all(futures: Iterable[CallFuture[T]]) -> None:
    """Cancel each of them."""
    for future in futures:
        future.cancel()


def in_order(futures: Sequence[CallFuture[T]]) -> Iterator[T]:
    left = deque(futures)
    del futures  # what was taken is kept alive by its taker alone
    try:
        while left:
            values = [left[0].result()]
            left.popleft()
            yield values.pop()
    finally:
        cancel_all(left)


def as_they_end(futures: Sequence[CallFuture[T]]) -> Iterator[T]:
    waiting = set(futures)
    try:
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=futures.index):
                waiting.discard(future)
                yield future.result()
    finally:
        cancel_all(futures)
