"""What Compute Engine sells, in skypool's words: machine types, prices, base images. Pure; figures are in the tables.

Machine types are what the API says; it says no prices. Those are `skypool_gcp.billing`'s. What has none is not sold.
How many vCPUs and GiB may have how many GPUs attached: https://cloud.google.com/compute/docs/gpus, as in
skypilot-org/skypilot, sky/catalog/gcp_catalog.py (read 2026-11-22); of P100 what its smallest zones take. What is sold
as spot alone:
https://cloud.google.com/compute/docs/accelerator-optimized-machines#consumption_option_availability_by_machine_type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skypool.accelerators import Accelerator, parse, tables
from skypool.accelerators.spelling import sold
from skypool.drivers.settings import table, words
from skypool.errors import UsageError
from skypool.model import Arch, Market, Need, Offer
from skypool_gcp import _api, billing

FACTS: dict[str, Any] = table("skypool_gcp.catalog", "facts.json")
_MONTH = 730.0  # hours
Card = tuple[str, int]  # a type of accelerators, as the API calls it, and how many
_ARCHS: dict[str, Arch] = {"ARM64": "arm64", "X86_64": "x86_64", "": "x86_64"}


def types(need: Need) -> list[str]:
    """Those that could serve, by their names; without accelerators those that are enough, and twice that at most."""
    names = {each.name for each in need.accelerators if each.kind != "cpu"}
    known = {*billing.machines(), *FACTS["more types"]}
    has = {name: sold("gcp", name, ()) for name in known}
    if names:
        return sorted({*pairs(need), *(name for name, one in has.items() if one is not None and one.name in names)})
    if any(each.kind != "cpu" for each in need.accelerators):
        return []
    plain = {name: int(name.rpartition("-")[2]) for name in known if name.startswith(("e2-", "n2-"))}
    gib = {"highcpu": 1, "standard": 4, "highmem": 8}
    enough = {n: v for n, v in plain.items() if v >= need.vcpus and v * gib[n.split("-")[1]] >= need.memory_gib}
    smallest = {name.rpartition("-")[0]: vcpus for name, vcpus in sorted(enough.items(), key=lambda each: -each[1])}
    return sorted(name for name, vcpus in enough.items() if vcpus <= 2 * smallest[name.rpartition("-")[0]])


def pairs(need: Need) -> dict[str, list[Card]]:
    """N1 machine types with the GPUs, and how many of them, that serve a need attached to them.

    Each GPU has four vCPUs at least; the most of vCPUs and of memory are Google's.
    """
    found = dict[str, list[Card]]()
    for model, limits in FACTS["attached"].items():
        counts = {each.count for each in need.accelerators if parse(model, dialect="gcp").name == each.name}
        for count, name in itertools.product(counts, FACTS["n1"]):
            gib: float = FACTS["n1"][name]
            most, most_gib = limits.get(str(count), (0, 0))
            for vcpus in (4, 8, 16, 32, 64, 96):
                if 4 * count <= vcpus <= most and vcpus * gib <= most_gib:
                    found.setdefault(f"n1-{name}-{vcpus}", []).append((model, count))
    return found


@dataclass(frozen=True)
class Ware:
    """A machine type of a zone, with what it has built in, or what may be attached to it there."""

    record: Any
    zone: str
    cards: tuple[Card, ...]
    attached: bool

    def offers(self, need: Need, base: str, rates: billing.Rates, held: Iterable[Any] | None) -> Iterator[Offer]:
        """In each market that has a price for it, with its disk and its address.

        Args:
            base: the image that is asked for, "" for a fit.
            held: the reservations to run in, which also have what is else sold as spot alone; None for none.
        """
        kind, region, family = self.record.name, self.zone.rpartition("-")[0], self.record.name.rpartition("-")[0]
        has, arch = sold("gcp", kind, self.cards), _ARCHS[self.record.architecture or ""]
        image, gb = image_for(base, has, arch, need)
        names = [*(model for model, _ in self.cards if self.attached), family, family.split("-")[0]]
        metric = next((FACTS["metrics"][each] for each in names if each in FACTS["metrics"]), family)
        vcpus, gib, room = float(self.record.guest_cpus), self.record.memory_mb / 1024, self._room(held)
        only = "on-demand" if held is not None else "spot" if kind in FACTS["spot only"] else None
        for market in need.markets if held is None or room is not None else ():
            price = rates.machine(kind, region, market, vcpus, gib, self.cards)
            usual = rates.machine(kind, region, "on-demand", vcpus, gib, self.cards) if market == "spot" else None
            if price is not None and only in (None, market):
                detail = {"image": image, "gb": gb, "cards": self.cards if self.attached else ()}
                limit = f"{region} {'PREEMPTIBLE_' if market == 'spot' else ''}{metric}"
                yield Offer(
                    "gcp", kind, region, self.zone, market, price.usd + extras(region, market, gb), has,
                    {"api": "compute", **detail}, vcpus, gib, arch=arch, available=None if held is None else bool(room),
                    quota=limit if held is None else "", least_billed=60.0, price_source=price.source,
                    on_demand_usd_per_hour=usual.usd + extras(region, "on-demand", gb) if usual else None,
                )  # fmt: skip

    def _room(self, held: Iterable[Any] | None) -> int | None:
        """How many more of it reservations have room for; None where they are not of it."""
        for each in held or ():
            has = each.specific_reservation
            cards = [
                (one.accelerator_type.rpartition("/")[2], one.accelerator_count)
                for one in has.instance_properties.guest_accelerators
            ]
            mine = (
                has.instance_properties.machine_type == self.record.name and self.zone == each.zone.rpartition("/")[2]
            )
            if mine and (not self.attached or cards == [*self.cards]):
                return int(has.count - has.in_use_count)
        return None


def wares(records: Iterable[Any], models: Iterable[Any], need: Need) -> Iterator[Ware]:
    """What a need may be served with.

    Args:
        records: machine types of zones; models: the types of accelerators that zones have.
    """
    there = {(each.zone.rpartition("/")[2], each.name) for each in models}
    for record in records:
        zone = record.zone.rpartition("/")[2]
        if record.name.startswith("n1-"):
            fit = [card for card in pairs(need).get(record.name, ()) if (zone, card[0]) in there]
            yield from (Ware(record, zone, (card,), True) for card in fit)
        else:
            built_in = [(each.guest_accelerator_type, each.guest_accelerator_count) for each in record.accelerators]
            yield Ware(record, zone, tuple(built_in), False)


def extras(region: str, market: Market, gb: int) -> float:
    """USD an hour beside the machine: its disk, by the dearest region of a part of the world, and its public address.

    https://cloud.google.com/compute/disks-image-pricing and https://cloud.google.com/vpc/network-pricing.
    """
    a_month = next(usd for start, usd in FACTS["disk"].items() if region.startswith(start))
    return gb * float(a_month) / _MONTH + float(FACTS["address"][market])


def image_for(asked: str, has: Accelerator | None, arch: Arch, need: Need) -> tuple[str, int]:
    """The path of an image or a family, and GB of the disk."""
    shape, like, _ = _api.FACTS["settings"]["image"]
    words("base image of GCP", asked or None, shape, like)
    runtime = has.runtime if has and has.name not in FACTS["undriven"] else ""
    driven = runtime if runtime in FACTS["images"] and arch == "x86_64" else ""
    path: str = FACTS["images"].get(asked or driven or "ubuntu-24.04", asked)
    path = path.replace("-amd64", "-arm64").replace("2204-lts", "2204-lts-arm64") if arch == "arm64" else path
    return path, max(120 if has else 30, math.ceil(need.disk_gib))


def parsed(image: str) -> tuple[str, str, str]:
    """The question that has this image, whose it is, and its name."""
    whose, found, name = image.removeprefix("projects/").partition("/global/images/")
    if not found:
        raise UsageError(f"{image!r} is no image of GCP")
    return ("family", whose, name.removeprefix("family/")) if name.startswith("family/") else ("image", whose, name)


def addresses(record: Any) -> list[tuple[str, str]]:
    """Each public address of a machine, with its own in the network before it."""
    ends = [(nic, each) for nic in record.network_interfaces for each in nic.access_configs]
    return [(str(nic.network_i_p), str(each.nat_i_p)) for nic, each in ends if each.nat_i_p]


def env(kind: str, host: int, hosts: Sequence[str]) -> dict[str, str]:
    """What one host of a TPU slice is told of it, by which libtpu finds the others; {} for what is no TPU.

    Args:
        kind: a type of slices, or the machine type of one that is a slice alone.
        host: its number; hosts: the addresses of all of them, in their order.
    """
    alone = (each for each in tables.slices().values() if kind and each.machine_type == kind and each.vms == 1)
    if (slice := tables.slices().get(kind) or next(alone, None)) is None:
        return {}
    told = {"TPU_WORKER_ID": str(host), "TPU_WORKER_HOSTNAMES": ",".join(hosts), "TPU_ACCELERATOR_TYPE": slice.type}
    return told | ({"TPU_TOPOLOGY": slice.topology} if slice.topology else {})


def family(name: str) -> str:
    """Of a machine type: "a3" of "a3-highgpu-8g"."""
    return name.split("-")[0]
