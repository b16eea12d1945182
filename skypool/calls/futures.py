"""The results of calls: `CallFuture`, `Stream` (items of a generator), and functions that wait for several calls.

The thread that reads the node's connection stores the call's result here. Threads of the program wait here for it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import pickle
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from skypool.calls.callbacks import Callbacks
from skypool.errors import PickleError, UntrustedResult, protocol_violation
from skypool.trust import Reader as Reader
from skypool.wire import codec
from skypool.wire.frames import Buffer

T = TypeVar("T")
_NOTHING = pickle.dumps(None)
"""The pickled return value of a generator whose stream was closed: None."""
_logger = logging.getLogger("concurrent.futures")  # where other executors report callbacks that fail
_ASYNCIO = "asyncio.futures"
"""The module of the callback of `asyncio.wrap_future`, which only wakes an event loop, so that it needs no thread."""
_UNTAKEN = 8
"""The most bytes of a generator's items that wait here, as a multiple of its `window`. `_UNTAKEN_SPARE` is added.

A node keeps to the window, but it counts the characters of texts, and a character may have several bytes.
"""
_UNTAKEN_SPARE = 1 << 20
_BATCH = 512
"""Bytes that are counted for each message with items, in addition to the bytes of the items."""


class Returned(NamedTuple):
    """The value that a call returned, still encoded as it was received.

    The thread that asks for the value decodes it.

    Attributes:
        buffers: the pickle, followed by the memory of its large arrays.
        reader: decodes a value from a node that is not trusted, because unpickling it could run code. If None, the node
            is trusted, and the value is unpickled.
    """

    buffers: Sequence[Buffer]
    reader: Reader | None = None


def _opened(raw: Returned, name: str) -> Any:
    """Return the decoded value of a call. Raises PickleError or UntrustedResult if it cannot be decoded."""
    if raw.reader is not None:
        return raw.reader.value(raw.buffers, f"the result of {name}")
    try:
        return codec.loads(raw.buffers)
    except Exception as e:
        what = f"the result of {name}"
        raise PickleError(
            f"{what} arrived, but cannot be unpickled here: {type(e).__name__}: {e}; {_remedy(e)}",
            what,
        ) from e


def _remedy(error: Exception) -> str:
    """Return advice for an error message: what to do if a result cannot be unpickled here because of `error`."""
    numpy = sys.modules.get("numpy")
    if numpy is None and isinstance(error, ModuleNotFoundError) and str(error.name).startswith("numpy."):
        numpy = importlib.import_module("numpy")
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("numpy._") and numpy is not None:
        return (
            f"this computer has numpy {numpy.__version__} and the node numpy 2 or later, whose arrays it cannot read: "
            f'update numpy here, or use Image(pip=["numpy=={numpy.__version__}"])'
        )
    return "install the packages that the result needs on this computer too, or return plain data"


class ResultCell(Generic[T]):
    """A place for the result of one call, cheaper than a future. Only one thread may wait for the result.

    Unlike a future, a cell has no callbacks and cannot be cancelled.
    """

    __slots__ = ("_end", "_waiter")

    def __init__(self) -> None:
        self._end: BaseException | Returned | None = None
        self._waiter: threading.Event | None = None

    def finish(self, end: BaseException | Returned) -> None:
        """Store how the call ended, and wake the thread that waits. Return at once. Any thread may call this."""
        self._end = end
        if self._waiter is not None:
            self._waiter.set()

    def result(self, name: str, timeout: float | None = None) -> T:
        """Wait for the call, and return its value. Raise the exception that the call raised.

        The value is decoded in this thread, each time this method is called.

        Args:
            name: the name of the function, for messages.
            timeout: seconds to wait; None waits without a limit.

        Raises:
            TimeoutError: the call has not ended within `timeout` seconds. The call keeps running.
            PickleError: the value cannot be unpickled here.
            UntrustedResult: the node is not trusted, and the value is more than plain data.
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
    """The future of a call that was sent to a pool, as `call > pool` returns it.

    A `CallFuture` is a `concurrent.futures.Future` with four differences:

    - `cancel` also stops a call that is running.
    - An asyncio program can `await` the future.
    - `running` always returns False.
    - Functions added with `add_done_callback` run in a thread of their own, and may wait for other calls.

    Args:
        name: the name of the function, for messages. It is also an attribute of the future.
        on_end: called with the value or exception of the call, also if it was cancelled. Only the pool passes it.
        callbacks: calls what users add with `add_done_callback`. Default None: the thread that ends the future does.
    """

    def __init__(
        self,
        name: str = "the call",
        on_end: Callable[[BaseException | Returned], None] | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self._on_end = on_end
        self._callbacks = callbacks
        self._told: list[Callable[[Future[T]], object]] = []
        self._stop: Callable[[], None] | None = None
        self._opening = threading.Lock()
        self._opened = False
        self._cancelled = False
        self._stopped = False
        self._broken: PickleError | UntrustedResult | None = None

    def on_cancel(self, stop: Callable[[], None]) -> None:
        """Set the function that `cancel` calls to stop the call. Only the pool calls this method.

        The function is called at most once, and not at all if the future is cancelled already. Calling `on_cancel`
        again replaces it.
        """
        self._stop = stop

    def call_in(self, callbacks: Callbacks) -> None:
        """Have `callbacks` call functions of `add_done_callback`. The pool does this before a user has the future."""
        self._callbacks = callbacks

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function with this future as its only argument when the call has ended or was cancelled.

        The function is called in a thread that the pool has for such functions, and may wait for other calls. If the
        call has ended already, the function is called at once in this thread. The functions of one future are called in
        the order in which they were added. Their exceptions are logged, and otherwise ignored. A pool ends after all of
        these functions have returned.
        """
        is_quick = getattr(fn, "__module__", "") == _ASYNCIO  # without the lock, as the function may be any object
        with self._condition:
            if self._callbacks is not None and not is_quick and not self.done():
                self._told.append(fn)
                if len(self._told) == 1:
                    super().add_done_callback(self._tell_later)
                return
        super().add_done_callback(fn)

    def _tell_later(self, _: Future[T]) -> None:
        if self._callbacks is not None:
            self._callbacks.call(self._tell)

    def _tell(self) -> None:
        for fn in self._told:
            try:
                fn(self)
            except Exception:
                _logger.exception("exception calling callback for %r", self)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the call, and return its value. Raise the exception that the call raised.

        The first caller's thread decodes the value; later callers get the same object.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Raises:
            TimeoutError: the call has not ended within `timeout` seconds. The call keeps running.
            CancelledError: the call was cancelled.
            PickleError: the value cannot be unpickled here.
            UntrustedResult: the node is not trusted, and the value is more than plain data.
        """
        value: object = super().result(timeout)
        return self._open(value) if isinstance(value, Returned) else value  # type: ignore[return-value]  # then it is T

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call, and return the exception that `result` would raise, or None if it would return a value.

        If the value cannot be decoded, the PickleError or UntrustedResult is returned, not raised.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Raises:
            TimeoutError: the call has not ended within `timeout` seconds. The call keeps running.
            CancelledError: the call was cancelled.
        """
        error = super().exception(timeout)
        if error is None:
            with contextlib.suppress(PickleError, UntrustedResult):
                self.result()
        return error or self._broken

    def finish(self, end: BaseException | Returned) -> None:
        """Store how the call ended. The pool calls this once, also for a call that will never begin.

        A future that was cancelled before stays cancelled, and `end` is dropped. Threads that wait in `wait_stopped`
        wake up in both cases.

        Args:
            end: the value still encoded, or the exception that `result` is to raise.
        """
        self._stopped = True
        try:
            if isinstance(end, Returned):
                self.set_result(end)  # type: ignore[arg-type]  # `result` opens it
            else:
                self.set_exception(end)
        except InvalidStateError:
            with self._condition:
                self._condition.notify_all()  # for `wait_stopped`
        if self._on_end is not None:
            self._on_end(end)

    def _open(self, raw: Returned) -> T:
        """Decode the value in the first caller's thread. Later calls return the same object or raise the same error."""
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
        """Stop the call, also if it is running: its process gets SIGTERM, and SIGKILL when its `grace` is over.

        `grace` is an option of the call; its default is 5 seconds. The future is cancelled at once, and this method
        does not wait. The function may still clean up on its node; `wait_stopped` waits until it has stopped.

        Returns:
            True if the call is cancelled, also if it was cancelled before. False if it has ended; then nothing changes.
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
        """Wait until the function has stopped on its node, including its `finally` and `with` blocks.

        When this method returns True, the function's files, ports and memory are free again. Without a `cancel` before,
        this method waits until the call ends. The exception of the call is never raised here.

        Args:
            timeout: seconds to wait; None waits without a limit. A cancelled function that does not stop is killed when
                the time of its option `grace` is over.

        Returns:
            True if the function has stopped or will never begin, also because its process or node is gone. False if it
            may still run after `timeout` seconds.
        """
        with self._condition:
            return self._condition.wait_for(lambda: self._stopped, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the call in an asyncio program, and return its value: `value = await future`.

        The event loop is not blocked meanwhile. An exception of the call is raised. Cancelling the waiting task cancels
        the call.
        """
        import asyncio

        return asyncio.wrap_future(self).__await__()

    def __reduce__(self) -> NoReturn:
        """Raise a TypeError, because a future cannot be pickled. The message says what to pass instead."""
        raise TypeError(
            f"the future of {self.name} can be used only in the process that sent the call: pass its value, "
            "future.result()"
        )


class JoinedFuture(CallFuture[T]):
    """A future of several calls, which is done when all of them have ended. Subclasses define its value.

    Attributes:
        parts: the future of each call.
    """

    parts: Sequence[CallFuture[Any]] = ()

    def _joined(self) -> T:
        """Return the value, made of the values of the parts. All parts have ended, and none has failed."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> T:
        """Wait for all calls, and return their values. If calls failed, raise the error of this future.

        Args:
            timeout: seconds to wait for all calls together; None waits without a limit.

        Raises:
            TimeoutError: some call has not ended within `timeout` seconds. The calls keep running.
            CancelledError: this future was cancelled.
            PickleError: a value cannot be unpickled here.
            UntrustedResult: a node is not trusted, and its value is more than plain data.
        """
        Future.result(self, timeout)
        return self._joined()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for all calls, and return the exception that `result` would raise, or None if it would return a value.

        If a value cannot be decoded, the PickleError or UntrustedResult is returned, not raised.

        Args:
            timeout: seconds to wait for all calls together; None waits without a limit.

        Raises:
            TimeoutError: some call has not ended within `timeout` seconds. The calls keep running.
            CancelledError: this future was cancelled.
        """
        error = Future.exception(self, timeout)
        if error is None:
            try:
                self.result()
            except (PickleError, UntrustedResult, BaseExceptionGroup) as e:
                return e
        return error

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Wait until the functions of all calls have stopped, including their `finally` and `with` blocks.

        Return True if all have stopped, and False if one may still run after `timeout` seconds. If `timeout` is None,
        wait without a limit.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for part in self.parts:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not part.wait_stopped(left):
                return False
        return True


class Items(Generic[T]):
    """The queue of items that a generator on a node yields. A `Stream` gives them to the user.

    The thread that reads the node's connection adds items with `feed`. The consumer takes them by iterating, which
    blocks until an item arrives or the generator ends.

    Args:
        on_failed: called with the exception that ended the generator, unless this object was closed before.

    Attributes:
        seen: the number of the last item that arrived, counted from 1; 0 before the first.
        taken: the number of the last item that was reported to the node as taken by the consumer; 0 before the first.
        value: the return value of the generator; None until the generator has returned and all items were taken.
    """

    def __init__(self, name: str, on_failed: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._on_failed = on_failed
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
        """True if iterating gives no more items, because the generator's end was reached or this object was closed.

        The generator's end, a return or an exception, is reached when all items that arrived before it are taken.
        """
        return self._over

    def connect(self, credit: Callable[[int], None], stop: Callable[[], None]) -> None:
        """Set the two functions with which taking items and closing control the generator on its node.

        `credit` is called with the number of the last item that was taken, so that the generator may go on. `stop` is
        called without arguments to stop it.
        """
        self._credit = credit
        self._stop = stop

    def feed(
        self, seq: int, single: bool, buffers: list[Buffer], reader: Reader | None = None, window: int = 1 << 20
    ) -> None:
        """Add items that arrived, without blocking. Ignore items that arrived before, as after a reconnection.

        Args:
            seq: the number of the last item, counted from 1.
            single: True if the buffers are one item, False if they are a list of items.
            buffers: the encoded item or list of items. The consumer decodes it later.
            reader: decodes items of a node that is not trusted. None if the node is trusted; they are then unpickled.
            window: the bytes of items that the node may send before they are taken.

        Raises:
            ProtocolError: far more bytes than the `window` allows would wait here to be taken (8 times as many, plus
                1 MiB). If no items wait, those that arrive may have any size.
        """
        if seq <= self.seen:
            return  # the node sent it again after a reconnection
        self.seen = seq
        self._fed += _BATCH + sum(map(len, buffers))
        most = _UNTAKEN * window + _UNTAKEN_SPARE
        if self._fed - self._eaten > most and not self._batches.empty():
            raise protocol_violation(
                f"the node sent {self._fed - self._eaten} bytes of items of {self._name} that were not read here yet, "
                f"and the limit is {most}"
            )
        self._batches.put((seq, single, Returned(buffers, reader)))

    def finish(self, end: BaseException | Returned) -> None:
        """Store how the generator ended: its encoded return value, or the exception to raise after the last item.

        Items that were added before can still be taken. The thread that reads the connection calls this.
        """
        self._batches.put(end)
        self._stopped.set()
        if self._on_failed is not None and isinstance(end, BaseException) and not self._over:
            self._on_failed(end)

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Wait until the generator has stopped on its node, including its `finally` and `with` blocks.

        Return False if it may still run after `timeout` seconds. None waits without a limit.
        """
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
        """Tell the node the number of the last item that was taken, so that the generator may go on."""
        if self._seq > self.taken and self._credit is not None:
            self.taken = self._seq
            self._credit(self._seq)

    def _next_batch(self) -> None:
        """Wait for the next items, which `__next__` then takes. Raise what ended the generator, if it failed."""
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
        self._eaten += _BATCH + sum(map(len, came.buffers))
        self._reader = came.reader
        self._batch = iter([came.buffers] if single else self._read(came.buffers))

    def _read(self, buffers: Sequence[Buffer], what: str = "an item") -> Any:
        """Return the decoded value of `buffers`. Raises UntrustedResult, or any error of unpickling."""
        return codec.loads(buffers) if self._reader is None else self._reader.value(buffers, f"{what} of {self._name}")

    def fail(self, error: BaseException) -> bool:
        """Let the iteration raise `error` in place of its next item. Call `stop` to stop the generator, too.

        Items that were not taken are dropped. Do nothing and return False if `is_over` was True already.
        """
        if self._over:
            return False
        waited_for = self._batches
        self._on_failed = None
        self._batches = queue.SimpleQueue()
        self._batches.put(error)
        self._batch = iter(())
        waited_for.put(error)  # wakes a thread that waits for the next item
        return True

    def stop(self) -> None:
        """Stop the generator on its node. Return at once."""
        if self._stop is not None:
            self._stop()

    def close(self) -> None:
        """Stop the generator, and end the iteration, also in a thread that waits for the next item. Return at once.

        Items that were not taken are dropped. Do nothing if `is_over` is True already.
        """
        if not self._over:
            self._over = True
            self._batch = iter(())
            self._batches.put(Returned((_NOTHING,)))  # wakes a thread that waits for the next item
            self.stop()


class Stream(Generic[T]):
    """The items of a generator that runs on a node. `generator_call >> pool` returns one.

    Iterate it with `for` or `async for` to take the items as they are yielded. An exception of the generator is raised
    after its last item. The option `window` limits the bytes of items that are sent but not taken (default 1 MiB). At
    this limit, the generator waits.

    The generator is stopped when the stream is closed, or when its `with` block is left. It is also stopped when the
    stream is garbage collected, as after a `break` out of the loop.

    Args:
        items: the queue of items.
        later: takes a function, and runs that function soon in another thread. A stream that is garbage collected stops
            the generator in this way.
    """

    def __init__(self, items: Items[T], later: Callable[[Callable[[], None]], object]) -> None:
        self._items = items
        self._later = later
        self._next = items.__next__

    @property
    def value(self) -> Any:
        """The return value of the generator once the iteration has ended. None before that.

        The value is also None if the stream was closed, or if the generator raised.
        """
        return self._items.value

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Wait for the next item and return it.

        After the last item, raise the exception that ended the generator. If it ended normally, raise StopIteration.
        """
        return self._next()

    def close(self) -> None:
        """Stop the generator, and end the iteration. Do nothing if the iteration has ended.

        Items that were not taken are dropped. The generator may still clean up on its node afterwards; `wait_stopped`
        waits until it has stopped.
        """
        self._items.close()

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Wait until the generator has stopped on its node, including its `finally` and `with` blocks.

        Call `close` first, unless all items were taken: a generator whose `window` is full waits for the consumer.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Returns:
            True if the generator has stopped. False if it may still run after `timeout` seconds.
        """
        return self._items.wait_stopped(timeout)

    def __enter__(self) -> Stream[T]:
        """Return this stream. Leaving the `with` block closes it, which stops the generator."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Stop the generator soon, in another thread, if the iteration has not ended. Return at once."""
        if not self._items.is_over:
            self._later(self._items.close)  # not here: garbage collection may happen in any thread, with any lock held

    def __reduce__(self) -> NoReturn:
        """Raise a TypeError, because a stream cannot be pickled. The message says what to pass instead."""
        raise TypeError(
            "a stream can be used only in the process that sent the call: pass a list of its items, or pass the stream "
            "as an argument of its own, not inside another value"
        )

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yield the items in an asyncio program: `async for item in stream`.

        Another thread waits for each item, so the event loop is not blocked. An exception of the generator is raised
        after its last item.
        """
        import asyncio

        end = object()
        while (item := await asyncio.to_thread(next, self, end)) is not end:
            yield item  # type: ignore[misc]  # not the sentinel, so an item


def results_of(futures: Sequence[CallFuture[T]]) -> list[T]:
    """Wait for all futures, and return the list of their values, in the same order.

    If a call failed, raise its exception after all calls have ended; if several failed, raise an ExceptionGroup. Raises
    CancelledError if a future was cancelled. If the wait itself is interrupted, as by Ctrl-C, all calls are cancelled.
    """
    try:
        wait(futures)
    except BaseException:
        cancel_all(futures)
        raise
    errors = [e for f in futures if (e := f.exception()) is not None]
    if len(errors) > 1:
        raise as_one_error(errors, len(futures))
    return [future.result() for future in futures]


def as_one_error(errors: Sequence[BaseException], calls: int) -> BaseException:
    """Return (do not raise) an exception group of several errors, or the error itself if it is the only one.

    `calls` is the number of all calls, failed or not, for the message of the group.
    """
    if len(errors) == 1:
        return errors[0]
    return BaseExceptionGroup(f"{len(errors)} of {calls} calls failed", errors)


def cancel_all(futures: Iterable[CallFuture[T]]) -> None:
    """Cancel all of these futures, and stop their calls. Do not wait until the calls have stopped."""
    for future in futures:
        future.cancel()


def in_order(futures: Sequence[CallFuture[T]]) -> Iterator[T]:
    """Yield the value of each future, in the order given, waiting for each. If a call failed, raise its exception.

    When the iterator is closed or raises, all calls that have not ended are cancelled.
    """
    left = deque(futures)
    del futures  # keep no reference to a value that the consumer has taken
    try:
        while left:
            values = [left[0].result()]
            left.popleft()
            yield values.pop()
    finally:
        cancel_all(left)


def as_they_end(futures: Sequence[CallFuture[T]]) -> Iterator[T]:
    """Yield the value of each future as soon as its call ends. If a call failed, raise its exception.

    Values of calls that ended at the same time are yielded in the order given. When the iterator is closed or raises,
    all calls that have not ended are cancelled.
    """
    waiting = set(futures)
    try:
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=futures.index):
                waiting.discard(future)
                yield future.result()
    finally:
        cancel_all(futures)
