"""When a slice that was lost is replaced, and when that is hopeless. Pure: see `lifecycle`."""

from __future__ import annotations

import re

from skypool.errors import CredentialsError, HostKeyMismatch, PythonMismatch, UsageError
from skypool.pool.states import Node, Phase, Pool

CERTAIN = (PythonMismatch, UsageError, CredentialsError, HostKeyMismatch)
"""Failures that every other node would have, too, or that nobody should try to go around."""

SAME_FAILURE_LIMIT = 2
"""A failure that ends two slices in the same words would end every other one too: the pool ends with it."""

REPLACEMENTS = 3
"""How many slices are launched in the place of lost ones, for each slice that the pool may have."""

WORTHWHILE = 300.0
"""Seconds of service after which an interruption is what a spot market is: a node replaced for it does not count.
Nodes taken back sooner count while they follow each other, as a market that gives none for long is none to rent on."""

LIVING = (Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING, Phase.READY)
"""Phases of nodes that serve or will serve."""


def may_replace(pool: Pool, lost: Node) -> bool:
    """Return True if so few were replaced that another may be."""
    return not is_churning(pool) if lost.taken is not None else pool.replaced < REPLACEMENTS * pool.maximum


def is_churning(pool: Pool) -> bool:
    """Return True if the provider gives machines only to take them back."""
    return pool.hasty > REPLACEMENTS * pool.maximum


def alike(error: BaseException) -> str:
    """Return what a failure says, without the names and numbers that differ from machine to machine."""
    return re.sub(r"\S*\d\S*", "#", f"{type(error).__name__}: {error}")


def is_hopeless(pool: Pool) -> bool:
    """Return True if one more machine would end as those before it did."""
    times = pool.failures.values()
    return max(times, default=0) >= SAME_FAILURE_LIMIT or sum(times) > REPLACEMENTS * pool.maximum


def can_go_on(pool: Pool, hopeless: bool) -> bool:
    """Return True if a pool that lost a slice, and launches none in its place, still is of use or can become so."""
    if pool.phase is Phase.READY and any(node.phase is Phase.READY for node in pool.nodes.values()):
        return True
    return not hopeless and pool.count(*LIVING) >= (1 if pool.phase is Phase.READY else pool.minimum)
