"""What all clouds of the lab are: a journal of calls, faults that happen to them, a clock, and things that come due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

TICK = 0.02


class Clock:
    """Seconds since 1970 that a test can speed up and put forward, never back.

    Attributes:
        speed: seconds of this clock in a real one.
    """

    def __init__(self) -> None:
        self._began = self._set = time.time()
        self._speed = 1.0

    def now(self) -> float:
        return self._set + (time.time() - self._began) * self._speed

    @property
    def speed(self) -> float:
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._set, self._began = self.now(), time.time()
        self._speed = speed

    def advance(self, seconds: float) -> None:
        """What is due meanwhile happens with the next call or within 20 ms."""
        self._set += seconds

    def real(self, at: float) -> float:
        """When, as time.time() counts, this clock will show `at`."""
        return time.time() + (at - self.now()) / self._speed


@dataclass
class Bucket:
    """A token bucket: `size` at most, `refill` a second of the lab's clock."""

    size: float
    refill: float
    tokens: float = -1.0
    at: float = 0.0

    def take(self, now: float, tokens: float) -> bool:
        """Whether there were so many; only then they are gone."""
        if self.tokens < 0:
            self.tokens, self.at = self.size, now
        self.tokens = min(self.size, self.tokens + (now - self.at) * self.refill)
        self.at = now
        if self.tokens < tokens:
            return False
        self.tokens -= tokens
        return True


class Asked(Protocol):
    """One call of an API."""

    action: str
    status: int


class Answered(Protocol):
    """What goes back; `status` is of HTTP."""

    @property
    def status(self) -> int: ...


@dataclass
class Fault:
    """Something that happens to calls. Made by the methods of a world.

    Attributes:
        action: which calls, as a pattern of the shell; when: only those of which this is true.
        times: so many of them; None for all.
        error: the refusal; the call takes no effect.
        drop: "before" or "after": no reply comes, and the call took effect only in the second case.
        delay: (real) seconds until it is looked at.
    """

    action: str
    times: int | None = 1
    when: Callable[[Any], bool] = lambda call: True
    error: Exception | None = None
    drop: str = ""
    delay: float = 0.0
    seen: int = 0

    def takes(self, call: Asked) -> bool:
        """Whether this call is one of them; counts it."""
        if (self.times is not None and self.seen >= self.times) or not fnmatchcase(call.action, self.action):
            return False
        if not self.when(call):
            return False
        self.seen += 1
        return True


@dataclass
class Pages:
    """How lists of what was made are answered.

    Attributes:
        size: at most so many in one answer; None for as many as the API allows.
        cut: lists break off: they say that there are more, and no request gets them.
    """

    size: int | None = None
    cut: bool = False


C = TypeVar("C", bound=Asked)
A = TypeVar("A", bound=Answered)


class World(Generic[C]):
    """One account, empty at first. Use it in a with block, or close it. Methods may be called from any thread.

    Attributes:
        journal: every call received, in order.
        on_call: called with a call and "before" or "after" it takes effect; its reply goes out after that.
        clock: time, which a test can speed up.
        pages: how lists are answered.
        minute: seconds in a minute of `shutdown +5` in machines.
        errors: what went wrong in the lab itself; `close` raises them.
    """

    def __init__(self) -> None:
        self.journal: list[C] = []
        self.on_call: Callable[[C, str], object] = lambda call, moment: None
        self.clock = Clock()
        self.pages = Pages()
        self.minute = 60.0
        self.errors: list[Exception] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, name=f"{type(self).__name__}-ticker", daemon=True)

    # --- what there is ---------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """What is there that would be billed or left behind."""
        raise NotImplementedError

    def left(self) -> dict[str, int]:
        """The same without what is zero: {} if nothing was left behind."""
        return {name: number for name, number in self.count().items() if number}

    def calls(self, action: str = "*") -> list[C]:
        """Of the journal, those whose action fits."""
        return [each for each in list(self.journal) if fnmatchcase(each.action, action)]

    def wait(self, check: Callable[[], object], within: float = 10.0) -> None:
        """Poll until something is true of this world."""
        deadline = time.monotonic() + within
        while not check():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not happen within {within} s; {self.count()}")
            time.sleep(TICK)

    # --- calls -----------------------------------------------------------------------------------------------

    def drop(
        self,
        action: str,
        *,
        moment: str = "after",
        times: int | None = 1,
        when: Callable[[C], bool] = lambda call: True,
    ) -> Fault:
        """Close the connection without an answer, before or after a call has taken effect."""
        return self.happen(Fault(action, times, when, drop=moment))

    def delay(self, action: str, seconds: float, *, times: int | None = 1) -> Fault:
        """Look at a call so many (real) seconds later."""
        return self.happen(Fault(action, times, delay=seconds))

    def heal(self) -> None:
        """No more faults."""
        with self.lock:
            self.faults.clear()

    def happen(self, fault: Fault) -> Fault:
        """From the next call on."""
        with self.lock:
            self.faults.append(fault)
        return fault

    def live(self, call: C, answer: Callable[[Exception | None], A]) -> A:
        """The life of a call that is in the journal: its faults, its effect, its answer.

        Args:
            answer: called with the lock held, and with what the call is to be refused with.

        Raises:
            ConnectionResetError: it gets no answer.
        """
        self._tell(call, "before")
        with self.lock:
            faults = [fault for fault in self.faults if fault.takes(call)]
        time.sleep(sum(fault.delay for fault in faults))
        drops = {fault.drop for fault in faults}
        if "before" in drops:
            raise ConnectionResetError("dropped before")
        with self.lock:
            answered = answer(next((fault.error for fault in faults if fault.error), None))
        self._tell(call, "after")
        if "after" in drops:
            raise ConnectionResetError("dropped after")
        call.status = answered.status
        return answered

    def _tell(self, call: C, moment: str) -> None:
        self.watched(lambda: self.on_call(call, moment))

    def watched(self, do: Callable[[], object]) -> None:
        """Do it; what goes wrong is raised by `close`."""
        try:
            do()
        except Exception as e:  # noqa: BLE001 - `close` raises it
            self.errors.append(e)

    # --- time ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do what is due; called with the lock held."""
        raise NotImplementedError

    def _tick_on(self) -> None:
        while not self._closed.wait(TICK):
            with self.lock:
                self.watched(self.tick)

    def close(self) -> None:
        """End every machine.

        Raises:
            ExceptionGroup: what went wrong in the lab itself.
        """
        raise NotImplementedError

    def raise_errors(self) -> None:
        """What `close` ends with."""
        if self.errors:
            raise ExceptionGroup(f"the lab's {type(self).__name__} failed", self.errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
