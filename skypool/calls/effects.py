"""`Effects`: what `Dispatch` and `GangRunner` decide under their lock, and do after it is released.

Code of the user may run then, such as listeners of events, and a thread that waits for a call is woken.
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
        ends: the ends of calls. They come before all others.
        others: what the user is told.
    """

    __slots__ = ("_lock", "ends", "others")

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.ends: deque[Callable[[], object]] = deque()
        self.others: deque[Callable[[], object]] = deque()

    def later(self, tell: Callable[[T], object]) -> Callable[[T], None]:
        """Return a function, to be called even with the lock held, that has `tell` called with its argument later."""
        return lambda what: self.others.append(partial(tell, what))

    def perform(self) -> None:
        """Call all that waits here. Do nothing if this thread holds the lock; it calls this again after that."""
        while (self.ends or self.others) and not self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            try:
                effect = (self.ends or self.others).popleft()
            except IndexError:  # another thread has taken it
                continue
            effect()
