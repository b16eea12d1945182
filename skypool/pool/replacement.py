"""Decides if a lost slice is replaced. The functions are pure: they depend only on the pool's state."""

from __future__ import annotations

import re

from skypool.errors import CredentialsError, HostKeyMismatch, PythonMismatch, UsageError
from skypool.pool.states import Node, Phase, Pool

CERTAIN = (PythonMismatch, UsageError, CredentialsError, HostKeyMismatch)
"""Errors after which no other machine is tried: another machine would fail too, or the user must act first."""

SAME_FAILURE_LIMIT = 2
"""When this many slices have failed with the same error text before they were ready, no more are launched."""

REPLACEMENTS = 3
"""The most replacements, as a multiple of the number of slices that the pool may grow to (`Pool.maximum`)."""

WORTHWHILE = 300.0
"""Seconds that a slice must have served, so that it was worth renting although the provider took it back.

`Pool.hasty` counts the slices in a row that were taken back sooner. If there are too many, no more are rented.
"""

LIVING = (Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING, Phase.READY)
"""The phases of nodes that run calls or will run them."""


def may_replace(pool: Pool, lost: Node) -> bool:
    """Return True if a lost slice, of which `lost` is a node, may be replaced.

    A slice that its provider took back may be replaced, unless too many in a row were taken back soon after they were
    ready. Any other slice may be replaced if the pool has had fewer than 3 × `pool.maximum` replacements.
    """
    return not is_churning(pool) if lost.taken is not None else pool.replaced < REPLACEMENTS * pool.maximum


def is_churning(pool: Pool) -> bool:
    """Return True if more than 3 × `pool.maximum` slices in a row were taken back within 300 s of being ready."""
    return pool.hasty > REPLACEMENTS * pool.maximum


def alike(error: BaseException) -> str:
    """Return the type and text of an error, with "#" in place of each word that has a digit.

    So errors with the same cause, but other numbers, have the same text.
    """
    return re.sub(r"\S*\d\S*", "#", f"{type(error).__name__}: {error}")


def is_hopeless(pool: Pool) -> bool:
    """Return True if another machine would probably fail too, because too many have failed before they were ready.

    Too many means two slices with the same error text (apart from words with digits), or more than 3 × `pool.maximum`
    slices in all.
    """
    times = pool.failures.values()
    return max(times, default=0) >= SAME_FAILURE_LIMIT or sum(times) > REPLACEMENTS * pool.maximum


def can_go_on(pool: Pool, hopeless: bool) -> bool:
    """Return True if a pool can go on after the loss of a slice that is not replaced.

    A ready pool can go on if a node is ready. It can also go on if a node is being launched or set up, unless this is
    expected to fail (`hopeless`). A pool that is not ready yet can go on if at least `pool.minimum` slices are left,
    and if it is not `hopeless`.
    """
    if pool.phase is Phase.READY and any(node.phase is Phase.READY for node in pool.nodes.values()):
        return True
    return not hopeless and pool.count(*LIVING) >= (1 if pool.phase is Phase.READY else pool.minimum)
