"""What there is of TPU7x, in skypool's words: slices, their prices, the states of their groups. Pure.

Compute Engine tells which zones have the machine types, and the Cloud Billing Catalogue what a chip costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from skypool.accelerators import Accelerator, tables
from skypool.model import Need, Offer
from skypool_gcp import catalog
from skypool_gcp.billing import Rates
from skypool_gcp.tpu import _catalog as slices

_GENERATIONS = ("tpu7x",)
_NUMBERS = "agent-worker-number", "worker-id", "tpu-env"  # where Compute Engine writes which host of its slice one is
_YOUNG = 60.0  # seconds in which a new group may not say yet that it makes machines


def wanted(need: Need) -> dict[str, Accelerator]:
    """The slices that serve a need and are Compute Engine's, by their types, as what they serve."""
    known = tables.slices()
    return {type: each for type, each in slices.wanted(need).items() if known[type].generation in _GENERATIONS}


def offers(records: Iterable[Any], zones: Iterable[str], need: Need, base: str, rates: Rates) -> Iterator[Offer]:
    """Each slice that serves, in each of these zones that has its machine type, and each market with a price.

    Args:
        records: machine types as the API lists them; base: the image that is asked for, "" for Google's own.
    """
    serving, known, places = wanted(need), tables.slices(), {*zones}
    for record in records:
        zone, region = (record.zone.rpartition("/")[2], record.zone.rpartition("/")[2].rpartition("-")[0])
        for each in (known[type] for type in sorted(serving) if known[type].machine_type == record.name):
            image, gb = catalog.image_for(base, serving[each.type], "x86_64", need)
            detail = {"machine": record.name, "image": image, "gb": gb, "cards": ()}
            detail["api"] = "groups" if each.vms > 1 else "compute"
            for market in need.markets if zone in places else ():
                if price := rates.chips(each.generation).get((region, market)):
                    usd = price.usd * each.chips
                    yield Offer(
                        "gcp", each.type, region, zone, market,
                        usd + catalog.extras(region, market, gb) * each.vms, serving[each.type], detail,
                        float(record.guest_cpus), record.memory_mb / 1024, gb, "x86_64", hosts=each.vms,
                        quota=f"TPU {each.generation} {market} in {region}", least_billed=60.0,
                        price_source=price.source,
                    )  # fmt: skip


def state(group: Any, machines: Sequence[Any], hosts: int, age: float) -> Literal["starting", "running", "ending"]:
    """What is said of the hosts of a slice: of all the same, as one that is lost ends them all.

    Args:
        group: as the API tells of it, None where there is none; hosts: how many it is to have.
    """
    seen = [catalog.FACTS["states"].get(each.status, "ending") for each in machines]
    if group is None or "ending" in seen:
        return "ending"
    if len(seen) < hosts:
        return "starting" if making(group) or age < _YOUNG else "ending"
    return "running" if set(seen) == {"running"} else "starting"


def making(group: Any) -> bool:
    """Whether its machines are being made, or wait for their chips."""
    doing = group.current_actions
    return bool(group.status.bulk_instance_operation.in_progress or doing.creating or doing.creating_without_retries)


def in_order(machines: Sequence[Any]) -> list[Any]:
    """The hosts of a slice as Compute Engine numbers them in their metadata; by their names where it does not."""
    return sorted(machines, key=_number if numbered(machines) else lambda each: str(each.name))


def numbered(machines: Sequence[Any]) -> bool:
    """Whether the metadata of all of them has their numbers."""
    return sorted(map(_number, machines)) == [*range(len(machines))]


def _number(machine: Any) -> int:
    """Of a host, as its metadata has it: "1", or a line TPU_WORKER_ID: '1' or WORKER_ID: '1' of several; else -1."""
    said = {each.key: each.value for each in machine.metadata.items}
    found = (re.search(r"^\d+$|^(?:TPU_)?WORKER_ID: *'?(\d+)'?$", said.get(key, ""), re.MULTILINE) for key in _NUMBERS)
    return next((int(each[1] or each[0]) for each in found if each), -1)
