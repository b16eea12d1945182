"""The supply of a pool that is not started, for tests that rent and terminate machines themselves."""

from __future__ import annotations

import threading

import skypool as sky
from skypool.rental.pool_account import Rental
from skypool.rental.supply import Supply


def supply_of(pool: sky.ComputePool, stopping: threading.Event | None = None) -> Supply:
    """The supply of a pool, with an account of its own that tells nobody of anything."""
    return Supply(pool._drivers, pool._terms, Rental(pool._terms, lambda event: None), stopping)


def tend(supply: Supply) -> None:
    """Renew tags and prices, as a running pool does."""
    supply.renew()
    supply.rental.repriced(supply.new_prices())
