"""`sky.plan`: tells which offers a pool with the given arguments would rent, with prices. It rents nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from skypool import tracebacks
from skypool.drivers.contract import Driver
from skypool.event_loop import Loop
from skypool.model import SlotsAsked
from skypool.offers.need import (
    NodeTerms,
    bases_asked,
    drivers_asked,
    hosts_alike,
    image_asked,
    need_asked,
    nodes_asked,
    order_asked,
)
from skypool.offers.ranking import Plan
from skypool.offers.search import look_around
from skypool.offers.sort_keys import OrderBy

if TYPE_CHECKING:
    from skypool.offers.need import AcceleratorAsked
    from skypool_images import Image


def plan(
    provider: Driver | str | Sequence[Driver | str] | None = None,
    *,
    accelerator: AcceleratorAsked = None,
    image: Image | None = None,
    nodes: int | tuple[int, int] = 1,
    slots: SlotsAsked = None,
    order_by: OrderBy = "cheapest",
    refresh: bool = False,
    **node: Unpack[NodeTerms],
) -> Plan:
    """Return the plan of a `ComputePool` with these arguments: the offers in the order in which the pool tries them.

    Nothing is rented. The plan also says why each other offer does not meet the requirements. If a provider cannot be
    reached, its cached offers are used, and the plan says how old they are. This blocks until all providers have
    answered, or for about 30 s.

    Args:
        provider, accelerator, image, nodes, slots, order_by, node: the same arguments as those of `ComputePool`.
        refresh: True to ask every provider again, also if its cached offers are still valid.

    Raises:
        NoOffers: no offer meets the requirements. The error carries the plan.
        SkypoolError: there is only one provider, and it failed. This is the provider's own error.
        UsageError: an argument is invalid.
    """
    drivers = drivers_asked(provider)
    need = need_asked(plan, accelerator, slots, bases_asked(image_asked(image), drivers), node)
    asked = nodes_asked(nodes)
    hosts_alike(need.accelerators, asked[1])
    order = order_asked(order_by)
    with tracebacks.warned_here():
        return Loop.shared().run(look_around(drivers, need, order_by=order, nodes=asked, refresh=refresh, offline=True))
