"""`Effects`: actions that `Dispatch` and `GangRunner` decide under their lock, and perform after its release.

These actions may run code of the user, such as listeners of events, or wake a thread that waits for a call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Effects:
    """The effects of one pool's calls that are still to be performed. Any thread may use this object.

    Attributes:
        ends: functions without arguments that end calls. They are called before those in `others`.
        others: functions without arguments that report something to the user.
    """

    __slots__ = ("_lock", "ends", "others")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.ends: deque[Callable[[], object]] = deque()
        self.others: deque[Callable[[], object]] = deque()

    def later(self, tell: Callable[[T], object]) -> Callable[[T], None]:
        """Return a function that takes one argument, and has `perform` call `tell` with that argument later.

        The returned function may be called with the lock held.
        """
        return lambda what: self.others.append(partial(tell, what))

    def perform(self) -> None:
        """Perform all effects that wait. Do nothing if this thread holds the lock.

        A thread that holds the lock calls this method again when it has released the lock.
        """
        while (self.ends or self.others) and not self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            try:
                effect = (self.ends or self.others).popleft()
            except IndexError:  # another thread has taken it
                continue
            effect()
