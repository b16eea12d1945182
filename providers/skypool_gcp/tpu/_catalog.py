"""Offers of Cloud TPU: slices, their prices, the states of what was rented. Nothing is asked here.

The API tells which slices a zone has, and no prices: those come from `skypool_gcp.billing`, which takes them from a
table where Google's catalogue has none. A slice without a price is not sold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from skypool.accelerators import Accelerator, tables
from skypool.accelerators.facts import Slice
from skypool.drivers.regional import chosen
from skypool.model import Market, Need, Offer
from skypool_gcp import catalog
from skypool_gcp.billing import Price, Rates

State = Literal["starting", "running", "ending"]
"""The state of an instance, as `skypool.model.Instance` has it."""

QUEUED: dict[str, State] = {
    "CREATING": "starting",
    "ACCEPTED": "starting",
    "WAITING_FOR_RESOURCES": "starting",
    "PROVISIONING": "starting",
    "ACTIVE": "running",
}
"""The states of queued resources that may have a node, by the API's name. One in any other state has none any more."""

NODE: dict[str, State] = {
    "CREATING": "starting",
    "STARTING": "starting",
    "RESTARTING": "starting",
    "REIMAGING": "starting",
    "READY": "running",
    "REPAIRING": "running",
}
"""The states of nodes that are there, by the API's name. One in any other state is ending."""

NEW = frozenset({"STATE_UNSPECIFIED", "CREATING", "ACCEPTED"})
"""States of a queued resource that do not tell yet whether it can be had."""

LOST = frozenset({"FAILED", "SUSPENDING", "SUSPENDED", "DELETING"})
"""States of a queued resource whose node is lost, whatever is said of the node."""

_DISK_GIB = 100
"""GiB of a host's disk: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm."""

_PRICED_BY_SIZE = ("v2", "v3")
"""Generations of which a slice of one host, a "device", has another price than one of several, a "pod"."""

_LEAST_BILLED = 0.0
"""Seconds that are billed for at least: none.

A slice is charged while its node is READY, single devices in steps of one second, and no minimum is named:
https://cloud.google.com/tpu/pricing (read 2026-11-22). The minute of Compute Engine is a rule of its machine types;
slices rented there, such as TPU7x, have it.
"""


def wanted(need: Need) -> dict[str, Accelerator]:
    """Return the slices that serve a need, by their types, each with the accelerator that it serves as.

    Who needs some bare chips gets a slice of one host with as many.
    """
    return {
        type: accelerator
        for accelerator in need.accelerators
        for type, slice in tables.slices().items()
        if _serves(slice, accelerator)
    }


def _serves(slice: Slice, accelerator: Accelerator) -> bool:
    if accelerator.slice is not None:
        return accelerator.slice == slice
    chips = (tables.tpu_names()[slice.generation], slice.chips)
    return slice.vms == 1 and chips == (accelerator.name, accelerator.count)


def regions(need: Need, rates: Rates) -> set[str]:
    """Return the regions in which what serves a need has a price, as far as the need names them."""
    kinds = [tables.slices()[type] for type in wanted(need)]
    names = {_priced(each) for each in kinds if each.runtime_version}  # what has no runtime version is not this API's
    return {*chosen((region for name in names for region, _ in rates.chips(name)), (), need.regions)}


def offers(zone: str, sold: Iterable[str], need: Need, rates: Rates, *, ends_itself: bool) -> Iterator[Offer]:
    """Yield what serves a need, in each market with a price.

    Args:
        sold: The types of slices that the zone has.
        ends_itself: True if a slice ends with its cost when its lease is over.
    """
    serving = wanted(need)
    region = zone.rpartition("-")[0]
    for kind in sorted({*sold} & serving.keys()):
        slice = tables.slices()[kind]
        prices = rates.chips(_priced(slice))
        for market in need.markets:
            price = prices.get((region, market))
            if price is None:
                continue
            usual = prices.get((region, "on-demand")) if market == "spot" else None
            yield Offer(
                provider="gcp",
                instance_type=kind,
                region=region,
                zone=zone,
                market=market,
                usd_per_hour=_whole(slice, price, market),
                accelerator=serving[kind],
                detail={"api": "tpu", "runtime": slice.runtime_version},
                vcpus=slice.vcpus_per_vm,
                memory_gib=slice.ram_gb_per_vm,
                disk_gib=_DISK_GIB,
                arch="x86_64",
                hosts=slice.vms,
                ends_itself=ends_itself,
                quota=f"TPU {slice.generation} {market} in {region}",
                price_source=price.source,
                on_demand_usd_per_hour=_whole(slice, usual, "on-demand") if usual else None,
                least_billed=_LEAST_BILLED,
            )


def state(queued: str, node: str) -> State:
    """Return the state of the hosts of a slice.

    Args:
        queued: The state of its queued resource; "ACTIVE" if the node is left alone.
        node: The state of its node, "" if there is none.
    """
    if queued in LOST:
        return "ending"
    if node:
        return NODE.get(node, "ending")
    of_queued = QUEUED.get(queued, "ending")
    return "ending" if of_queued == "running" else of_queued  # it was running, and its node is gone


def _whole(slice: Slice, chip: Price, market: Market) -> float:
    """Return USD an hour of a slice, the addresses of its hosts included, by the price of a chip."""
    return chip.usd * slice.chips + catalog.FACTS["address"][market] * slice.vms


def _priced(slice: Slice) -> str:
    """Return the name of a slice's chips in `Rates.chips`."""
    if slice.generation not in _PRICED_BY_SIZE:
        return slice.generation
    return f"{slice.generation} {'device' if slice.vms == 1 else 'pod'}"
