"""The pools that were entered with `with` or `async with`, of which `await call` uses the innermost.

Each task and thread has its own: two tasks with an `async with` each never use each other's pool. A thread that was
started in a `with` block has none of its own, and uses the pool of that block.
"""

from __future__ import annotations

from contextvars import ContextVar

from skypool.errors import UsageError


class Entry:
    """A pool that was entered. Its attribute `pool` becomes None when the pool is left.

    A task or thread that was started inside the block shares this object, so it sees that, too.
    """

    __slots__ = ("pool",)

    def __init__(self, pool: object) -> None:
        self.pool: object | None = pool


_here: ContextVar[tuple[Entry, ...]] = ContextVar("skypool_entered", default=())
"""The pools that this task or thread has entered, or had when it was started; the innermost last."""
_everywhere: list[Entry] = []
"""The pools that were entered with `with`, by any thread. A context without a pool of its own may use the only one."""


def enter(pool: object, *, everywhere: bool) -> Entry:
    """Note that a pool was entered, and return an entry to pass to `leave`.

    `everywhere` is True for `with`: threads that have entered no pool may then use this one.
    """
    entry = Entry(pool)
    _here.set((*(each for each in _here.get() if each.pool is not None), entry))
    if everywhere:
        _everywhere.append(entry)
    return entry


def leave(entry: Entry) -> None:
    """Note that a pool was left, maybe by another task or thread than the one that entered it."""
    entry.pool = None
    if entry in _everywhere:
        _everywhere.remove(entry)


def innermost() -> object:
    """Return the pool that `await call` uses in this task or thread.

    Raises UsageError if there is none, or if there are several and this task or thread has entered none.
    """
    for entry in reversed(_here.get()):
        if entry.pool is not None:
            return entry.pool
    others = [pool for entry in _everywhere if (pool := entry.pool) is not None]
    if len(others) == 1:
        return others[0]
    if others:
        raise UsageError(
            "`await call` does not say which pool: this thread has entered none, and others have entered "
            f"{len(others)}; write `await (call > pool)`"
        )
    raise UsageError(
        "`await call` needs an `async with ComputePool(…)` around it; without one, write `await (call > pool)`"
    )
