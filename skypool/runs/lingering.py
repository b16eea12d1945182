"""Finds the machines that an earlier run has left for the next one, and says whether that may use them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from skypool import clock
from skypool.checks import duration_words
from skypool.errors import UsageError
from skypool.rental.budget import ceiling
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record
from skypool.runs.target import Target

_TOO_LATE = 8.0
"""Seconds before the end of machines from which they are not used any more, as they may not hear of it in time."""
_LEAST = 600.0
"""The least seconds that the limits of a pool must leave to another run."""
_USUAL = {"market": "on-demand", "order_by": "cheapest"}


def mark(target: Target, rent: Mapping[str, Any], *needs: object) -> str:
    """Return a word that is the same for runs of a project with the same needs, and for no others."""
    said = [str(target.project.root), *map(repr, needs)]
    for name, value in sorted(rent.items()):
        if value is not None and value != _USUAL.get(name):
            several = value if isinstance(value, (list, tuple)) else [value]
            said.append(f"{name}={' '.join(map(str, several))}")
    return hashlib.sha256("\0".join(said).encode("utf-8", "surrogateescape")).hexdigest()[:8]


def staying(word: str, nodes: int) -> Record | None:
    """Return the newest pool that stays, has `nodes` nodes, and has this word, from `mark`, in its name.

    A pool that has lost a machine, or ends at once, does not count. None if there is none. Raises LedgerError if the
    ledger cannot be read.
    """
    return _newest_usable(_known(word), nodes)


def is_complete(record: Record, nodes: int) -> bool:
    """Return True unless it is known that a pool has lost one of its nodes, or slices, for good."""
    return len(record.running) >= nodes


def _known(word: str) -> list[Record]:
    """Return the pools with this word in their name that nothing has ended yet."""
    return [each for each in Ledger.here().open_pools() if f"-{word}-" in each.pool and each.ending is None]


def _newest_usable(known: Iterable[Record], nodes: int) -> Record | None:
    latest = clock.now() + _TOO_LATE
    found = [each for each in known if each.is_staying and each.lasts > latest and is_complete(each, nodes)]
    return max(found, key=lambda each: each.started, default=None)


def left(word: str, nodes: int, option: Callable[..., str], note: Callable[[str], object]) -> Record | None:
    """Return the pool that stays for this run, as `staying` does; None if there is none.

    Args:
        word: what `mark` has returned.
        nodes: the number of nodes, or slices, that the run needs.
        option: returns an option as the user writes it.
        note: called with a text for the user of each pool that costs money and is not used.

    Raises:
        UsageError: no such pool stays, and another run uses one.
        LedgerError: the ledger cannot be read.
    """
    known = _known(word)
    found = _newest_usable(known, nodes)
    if found is not None:
        return found
    now = clock.now()
    for each in known:
        if each.client_lives(now):
            raise UsageError(
                f"the machines of pool {each.pool} are in use by another run, of process {each.client.pid}; wait for "
                f"its end, or rent others with {option('new')}"
            )
        if each.running and not each.is_kept(now):
            note(f"pool {each.pool} of an earlier run still costs money; `skypool down {each.pool}` ends it")
    return None


def check_limits(former: Record, budget: float | None, lifetime: float | None, option: Callable[..., str]) -> None:
    """Raise UsageError unless the limits of a pool that stays are as strict as those asked for, and leave some time.

    A pool keeps the limits of its first run. `budget` is in USD, `lifetime` in seconds.
    """
    ways = f"end it with `skypool down {former.pool}`, or rent others with {option('new')}"
    has = former.budget.max_usd if former.budget else None
    if budget is not None and (has is None or budget < has):
        limit = f"a budget of {has:g} USD" if has is not None else "no budget"
        raise UsageError(f"pool {former.pool}, which stays, has {limit}, and this run asks for {budget:g} USD; {ways}")
    if lifetime is not None and (former.lifetime is None or lifetime < former.lifetime):
        limit = f"a lifetime of {duration_words(former.lifetime)}" if former.lifetime is not None else "no lifetime"
        raise UsageError(
            f"pool {former.pool}, which stays, has {limit}, and this run asks for {duration_words(lifetime)}; {ways}"
        )
    most = ceiling()
    worst = sum(each.worst for each in Ledger.here().open_pools())
    if most is not None and worst > most:
        raise UsageError(
            f"SKYPOOL_MAX_USD allows {most:g} USD, and the pools that have not ended may cost {worst:g} USD; {ways}"
        )
    seconds = seconds_left(former)
    if seconds < _LEAST:
        until = duration_words(seconds)
        raise UsageError(f"the budget or the lifetime of pool {former.pool}, which stays, is over in {until}; {ways}")


def seconds_left(former: Record) -> float:
    """Return the seconds until the limits of a pool end it; `math.inf` if it has none."""
    now = clock.now()
    begun = min((line.begins for line in former.lines), default=now)
    lifetime = math.inf if former.lifetime is None else max(0.0, begun + former.lifetime - now)
    budget = math.inf if former.budget is None else former.budget.lasts(former.lines, now)
    return min(lifetime, budget)
