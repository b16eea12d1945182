"""Builds offers of TPU7x slices on Compute Engine with their prices, and derives the state of a rented slice.

This module sends no requests. Compute Engine's API lists the machine types of each zone. Google's price catalogue has
the price of a chip.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from skypool.accelerators import Accelerator, tables
from skypool.accelerators.facts import Slice
from skypool.model import Need, Offer
from skypool_gcp import _api, catalog
from skypool_gcp.catalog import boot_images
from skypool_gcp.list_prices import Rates
from skypool_gcp.tpu import _catalog as slices
from skypool_gcp.tpu._states import State

if TYPE_CHECKING:
    from google.cloud import compute_v1

_GENERATIONS = ("tpu7x",)
"""The generations of TPUs that Compute Engine rents out."""

_NUMBERS = ("agent-worker-number", "worker-id", "tpu-env")
"""Keys of a machine's metadata, any of which may hold the machine's number in its slice."""

_YOUNG = 60.0
"""Seconds after the creation of an instance group during which its missing machines count as being created."""

_LEAST_BILLED = 60.0
"""The shortest time that is billed, in seconds: a rule of Compute Engine's machine types."""


def wanted(need: Need) -> dict[str, Accelerator]:
    """Return a dict from each type of TPU7x slice that meets a need, such as "tpu7x-16", to an accelerator.

    It is the one of the need's accelerators that the slice provides.
    """
    known = tables.slices()
    return {type: each for type, each in slices.wanted(need).items() if known[type].generation in _GENERATIONS}


def offers(
    records: Iterable[compute_v1.MachineType], zones: Iterable[str], need: Need, base: str, rates: Rates
) -> Iterator[Offer]:
    """Yield an offer for each slice that meets a need, in each zone that has it, on each market with a known price.

    Args:
        records: Machine types, as the API lists them, each in one zone.
        zones: The zones for which to make offers. Records of other zones are ignored.
        base: The image that the user chose. "" means Google's own image for TPUs.
        rates: Google's prices.

    Raises:
        UsageError: `base` does not have the form of an image's path.
    """
    serving = wanted(need)
    places = set(zones)
    for record in records:
        zone = _api.last_part(record.zone)
        if zone not in places:
            continue
        for type in sorted(serving):
            slice = tables.slices()[type]
            if slice.machine_type == record.name:
                yield from _offers_of(slice, serving[type], record, zone, need, base, rates)


def _offers_of(
    slice: Slice,
    serves: Accelerator,
    record: compute_v1.MachineType,
    zone: str,
    need: Need,
    base: str,
    rates: Rates,
) -> Iterator[Offer]:
    """Yield the offers of one slice in one zone. The price is that of all chips, disks and public addresses."""
    region = _api.region_of(zone)
    image, gb = boot_images.image_for(base, serves, "x86_64", need)
    prices = rates.chips(slice.generation)
    for market in need.markets:
        price = prices.get((region, market))
        if price is None:
            continue
        yield Offer(
            provider="gcp",
            instance_type=slice.type,
            region=region,
            zone=zone,
            market=market,
            usd_per_hour=price.usd * slice.chips + catalog.extras(region, market, gb) * slice.vms,
            accelerator=serves,
            detail={
                "api": "groups" if slice.vms > 1 else "compute",
                "machine": catalog.MachineDetail(record.name, image, gb),
            },
            vcpus=float(record.guest_cpus),
            memory_gib=record.memory_mb / 1024,
            disk_gib=gb,
            arch="x86_64",
            hosts=slice.vms,
            quota=f"TPU {slice.generation} {market} in {region}",
            least_billed=_LEAST_BILLED,
            price_source=price.source,
        )


def state(
    group: compute_v1.InstanceGroupManager | None, machines: Sequence[compute_v1.Instance], hosts: int, age: float
) -> State:
    """Return the state of all hosts of a slice: "starting", "running" or "ending". The hosts end together.

    The state is "ending" if the group does not exist or a machine has stopped. It is also "ending" if machines are
    missing that Google is not creating. The state is "running" only if all machines run.

    Args:
        group: The slice's managed instance group; None if it does not exist.
        machines: The machines that exist.
        hosts: The number of machines that the group is to have.
        age: Seconds since the group was created. In the first 60 s, missing machines count as being created.
    """
    seen = [catalog.STATES.get(each.status, "ending") for each in machines]
    if group is None or "ending" in seen:
        return "ending"
    if len(seen) < hosts:
        return "starting" if _is_making(group) or age < _YOUNG else "ending"
    return "running" if set(seen) == {"running"} else "starting"


def _is_making(group: compute_v1.InstanceGroupManager) -> bool:
    """Return True if Google is creating machines of an instance group, or waits for room to create them."""
    actions = group.current_actions
    return bool(
        group.status.bulk_instance_operation.in_progress or actions.creating or actions.creating_without_retries
    )


def in_order(machines: Sequence[compute_v1.Instance]) -> list[compute_v1.Instance]:
    """Return a slice's hosts sorted by their numbers in the slice; by name if these are not complete."""
    if numbered(machines):
        return sorted(machines, key=_number)
    return sorted(machines, key=lambda each: each.name)


def numbered(machines: Sequence[compute_v1.Instance]) -> bool:
    """Return True if the machines have the numbers 0, 1, 2 and so on in their metadata, without a gap, in any order."""
    return sorted(map(_number, machines)) == list(range(len(machines)))


def _number(machine: compute_v1.Instance) -> int:
    """Return the number of a host in its slice, from 0; -1 if the host's metadata does not have a number."""
    values = {each.key: each.value for each in machine.metadata.items}
    for key in _NUMBERS:
        # the number alone, or a text with a line such as "TPU_WORKER_ID: '1'" or "WORKER_ID: '1'"
        found = re.search(r"^\d+$|^(?:TPU_)?WORKER_ID: *'?(\d+)'?$", values.get(key, ""), re.MULTILINE)
        if found:
            return int(found[1] or found[0])
    return -1
