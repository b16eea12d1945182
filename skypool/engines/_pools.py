"""`started` starts the pool of an engine, and stops it again if the engine cannot start; `ready` lists ready nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import skypool as sky
from skypool.engines import _trust, _versions


def ready(pool: sky.ComputePool) -> list[int]:
    """Return the numbers of the nodes of a pool that are ready."""
    return [node for node, state in pool.nodes.items() if state == "ready"]


@contextmanager
def started(pool: sky.ComputePool, engine: str, packages: Sequence[str], service: str = "") -> Iterator[None]:
    """Start a pool for the `with` block, in which an engine starts on it.

    If this has started the pool, and the block raises an exception, the pool is stopped.

    Args:
        engine: the name of the engine, for messages.
        packages: the packages whose versions in the image must be those of this process.
        service: the name of a service that each cluster of the engine has, as a pool can have one cluster at a time.
            Default "": the engine has no clusters.

    Raises:
        UsageError: a package has another version, a machine belongs to a stranger, or the pool has a cluster already.
        SkypoolError: the pool could not become ready.
    """
    _trust.refuse_strangers(pool, engine)
    _versions.check_image(pool.image, packages)
    is_new = pool.phase == "planned"
    pool.start()
    try:
        _trust.refuse_strangers(pool, engine)
        if service and any(each.name == service for each in pool.services):
            raise sky.UsageError(f"pool {pool.name!r} has a {engine} cluster already; close that one first")
        yield
    except BaseException:
        if is_new:
            pool.stop()
        raise
