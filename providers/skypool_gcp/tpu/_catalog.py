"""What Cloud TPU sells, in skypool's words: slices, their prices, the states of what was rented. Pure.

The API tells which slices a zone has, and no prices: those are `skypool_gcp.billing`'s, which takes them from its
table where Google's catalogue has none. What has no price is not sold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from skypool.accelerators import Accelerator, tables
from skypool.accelerators.facts import Slice
from skypool.drivers.regional import chosen
from skypool.drivers.settings import table
from skypool.model import Market, Need, Offer
from skypool_gcp.billing import Price, Rates

FACTS: dict[str, Any] = table("skypool_gcp.tpu", "facts.json")
_LEAST_BILLED = 0.0
"""Seconds that are billed for at least: none. A slice is charged while its node is READY, single devices in steps of
one second, and no minimum is named: https://cloud.google.com/tpu/pricing (read 2026-11-22). The minute of Compute
Engine is a rule of its machine types; slices rented there, such as TPU7x, have it.
"""


def wanted(need: Need) -> dict[str, Accelerator]:
    """The slices that serve a need, by their types, as what they serve: a slice, or as many bare chips on one host."""
    names = tables.tpu_names()
    return {
        type: each
        for each in need.accelerators
        for type, one in tables.slices().items()
        if each.slice == one
        or (each.slice is None and one.vms == 1 and (each.name, each.count) == (names[one.generation], one.chips))
    }


def regions(need: Need, rates: Rates) -> set[str]:
    """Where what serves a need may be had, as far as its price is known."""
    kinds = (tables.slices()[type] for type in wanted(need))  # what has no runtime version is not this API's
    names = {_priced(each) for each in kinds if each.runtime_version}
    return {*chosen((region for name in names for region, _ in rates.chips(name)), (), need.regions)}


def offers(zone: str, sold: Iterable[str], need: Need, rates: Rates, *, ends_itself: bool) -> Iterator[Offer]:
    """What serves a need of the slice types that a zone has."""
    serving, region = wanted(need), zone.rpartition("-")[0]
    for kind in sorted({*sold} & serving.keys()):
        each = tables.slices()[kind]
        for market in need.markets:
            prices = rates.chips(_priced(each))
            if price := prices.get((region, market)):
                usd = _whole(each, price, market)
                usual = prices.get((region, "on-demand")) if market == "spot" else None
                detail = {"api": "tpu", "runtime": each.runtime_version}
                yield Offer(
                    "gcp", kind, region, zone, market, usd, serving[kind], detail, each.vcpus_per_vm,
                    each.ram_gb_per_vm, FACTS["disk_gib"], "x86_64", hosts=each.vms, ends_itself=ends_itself,
                    quota=f"TPU {each.generation} {market} in {region}", price_source=price.source,
                    on_demand_usd_per_hour=_whole(each, usual, "on-demand") if usual else None,
                    least_billed=_LEAST_BILLED,
                )  # fmt: skip


def state(queued: str, node: str) -> str:
    """What is said of the hosts of a slice, by the states of its queued resource and its node, "" where one is not."""
    if queued in FACTS["lost"] or (node and node not in FACTS["node"]):
        return "ending"
    said: str = FACTS["node"].get(node) or FACTS["queued"].get(queued, "ending")
    return "ending" if said == "running" and not node else said


def _whole(kind: Slice, chip: Price, market: Market) -> float:
    """Return USD an hour of a slice, the addresses of its hosts included, by the price of a chip."""
    return chip.usd * kind.chips + float(FACTS["address"][market]) * kind.vms


def _priced(kind: Slice) -> str:
    """What the table of prices calls it: where one host has a price of its own, that, too."""
    of = kind.generation
    return f"{of} {'device' if kind.vms == 1 else 'pod'}" if of in FACTS["devices"] else of
