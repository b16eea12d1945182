"""Decides if a lost slice is replaced. All functions are pure: they depend only on the pool's state (see `lifecycle`).

A slice is one machine, or several hosts that a provider rents out only together.
"""

from __future__ import annotations

import re

from skypool.errors import CredentialsError, HostKeyMismatch, PythonMismatch, UsageError
from skypool.pool.states import Node, Phase, Pool

CERTAIN = (PythonMismatch, UsageError, CredentialsError, HostKeyMismatch)
"""Errors after which no other machine is tried. It would fail too, or the error must not be bypassed."""

SAME_FAILURE_LIMIT = 2
"""The number of slices that may fail with the same error text before they are ready. Then no more are launched."""

REPLACEMENTS = 3
"""The most replacements for each slice of the pool's maximum."""

WORTHWHILE = 300.0
"""Seconds of service after which an interruption is normal for a spot market, and is not counted.

Slices that are taken back sooner are counted while they follow each other. A market that takes every machine back so
soon is not worth renting on.
"""

LIVING = (Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING, Phase.READY)
"""The phases of nodes that run calls or will run them."""


def may_replace(pool: Pool, lost: Node) -> bool:
    """Return True if a lost slice (one machine, or several hosts rented together) may be replaced.

    A slice that its provider took back may, unless `is_churning`. For other losses, the pool may have at most 3
    replacements for each slice of its maximum.

    Args:
        pool: the state of the pool.
        lost: a node of the lost slice.
    """
    return not is_churning(pool) if lost.taken is not None else pool.replaced < REPLACEMENTS * pool.maximum


def is_churning(pool: Pool) -> bool:
    """Return True if the provider took back too many slices in a row soon (300 s) after they were ready.

    A slice is one machine, or several hosts rented together. Too many are more than 3 for each slice of the pool's
    maximum.
    """
    return pool.hasty > REPLACEMENTS * pool.maximum


def alike(error: BaseException) -> str:
    """Return the type and text of an error, with "#" for each word that has a digit.

    A word is a run of characters without spaces. Errors of the same cause on different machines then have equal texts.
    """
    return re.sub(r"\S*\d\S*", "#", f"{type(error).__name__}: {error}")


def is_hopeless(pool: Pool) -> bool:
    """Return True if another machine would probably fail too.

    That is so if two slices failed with the same text (see `alike`) before they were ready. It is also so if more than
    3 for each slice of the pool's maximum failed in all.
    """
    times = pool.failures.values()
    return max(times, default=0) >= SAME_FAILURE_LIMIT or sum(times) > REPLACEMENTS * pool.maximum


def can_go_on(pool: Pool, hopeless: bool) -> bool:
    """Return True if a pool can go on after the loss of a slice that is not replaced.

    A ready pool can if a node is ready, or if one is being launched or set up. A pool that is not ready yet can if at
    least `minimum` slices are left.

    Args:
        pool: the state after the loss.
        hopeless: True if no other machine would succeed. Then only a ready node of a ready pool counts.
    """
    if pool.phase is Phase.READY and any(node.phase is Phase.READY for node in pool.nodes.values()):
        return True
    return not hopeless and pool.count(*LIVING) >= (1 if pool.phase is Phase.READY else pool.minimum)
