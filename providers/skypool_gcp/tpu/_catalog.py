"""Builds offers of Cloud TPU's slices with their prices.

This module sends no requests. The API lists the slice types of a zone without prices. The prices come from
`skypool_gcp.list_prices`, which uses a table if Google's price catalogue lacks a price. A slice without a price is not
offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from skypool.accelerators import Accelerator, tables
from skypool.accelerators.facts import Slice
from skypool.drivers.regional import chosen
from skypool.model import Market, Need, Offer
from skypool_gcp.catalog.facts import FACTS
from skypool_gcp.list_prices import Price, Rates

_DISK_GIB = 100
"""The size of a host's disk in GiB: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm."""

_PRICED_BY_SIZE = ("v2", "v3")
"""Generations in which a slice of one host (a "device") and one of several hosts (a "pod") have different prices."""

_LEAST_BILLED = 0.0
"""The shortest time that is billed, in seconds. 0 means that there is no minimum.

A slice is charged while its node is READY. Single devices are charged in steps of one second, and no minimum is
documented: https://cloud.google.com/tpu/pricing (read 2026-11-22). The minimum of one minute is a rule of Compute
Engine's machine types. It applies only to slices of Compute Engine, such as TPU7x.
"""


def wanted(need: Need) -> dict[str, Accelerator]:
    """Return a dict from each type of slice that meets a need, such as "v5p-16", to an accelerator.

    It is the one of the need's accelerators that the slice provides. If the need names a number of chips instead of a
    type of slice, the slice must have one host with exactly these chips.
    """
    return {
        type: accelerator
        for accelerator in need.accelerators
        for type, slice in tables.slices().items()
        if _serves(slice, accelerator)
    }


def _serves(slice: Slice, accelerator: Accelerator) -> bool:
    """Return True if `accelerator` names this type of slice, or chips of which one host of the slice has as many."""
    if accelerator.slice is not None:
        return accelerator.slice == slice
    chips = (tables.tpu_names()[slice.generation], slice.chips)
    return slice.vms == 1 and chips == (accelerator.name, accelerator.count)


def regions(need: Need, rates: Rates) -> set[str]:
    """Return the regions, of those that match `need.regions`, in which a slice that meets the need has a known price.

    Slices that Cloud TPU's API does not have, such as TPU7x, do not count.
    """
    kinds = [tables.slices()[type] for type in wanted(need)]
    names = {_priced(each) for each in kinds if each.runtime_version}  # Cloud TPU's API does not have the others
    return {*chosen((region for name in names for region, _ in rates.chips(name)), (), need.regions)}


def offers(zone: str, sold: Iterable[str], need: Need, rates: Rates, *, ends_itself: bool) -> Iterator[Offer]:
    """Yield an offer for each slice that meets a need and that the zone has, on each market with a known price.

    Prices include the public addresses of the hosts.

    Args:
        sold: The types of slices that the zone has.
        rates: Google's prices.
        ends_itself: True if slices delete themselves when their lease is over. The offers say so.
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


def _whole(slice: Slice, chip: Price, market: Market) -> float:
    """Return the price of a whole slice in USD per hour, with the public addresses of its hosts."""
    return chip.usd * slice.chips + FACTS["address"][market] * slice.vms


def _priced(slice: Slice) -> str:
    """Return the name of a slice's chips in the prices, such as "v5e". For v2 and v3: "v2 device" or "v2 pod"."""
    if slice.generation not in _PRICED_BY_SIZE:
        return slice.generation
    return f"{slice.generation} {'device' if slice.vms == 1 else 'pod'}"
