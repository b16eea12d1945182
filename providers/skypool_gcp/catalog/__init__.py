"""What Compute Engine sells, in skypool's words: machine types, prices, base images. Pure; figures are in the tables.

Machine types are what the API says; it says no prices. Those are `skypool_gcp.billing`'s. What has none is not sold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from skypool.accelerators import Accelerator, tables
from skypool.accelerators.spelling import sold
from skypool.asking import table, words
from skypool.errors import UsageError
from skypool.model import Arch, Market, Need, Offer
from skypool_gcp import _api, billing

FACTS: dict[str, Any] = table("skypool_gcp.catalog", "facts.json")
_MONTH = 730.0  # hours
_ARCHS: dict[str, Arch] = {"ARM64": "arm64", "X86_64": "x86_64", "": "x86_64"}


def types(need: Need) -> list[str]:
    """Those that could serve, by their names; without accelerators those that are enough, and twice that at most."""
    names = {each.name for each in need.accelerators if each.kind != "cpu"}
    known = {*billing.machines(), *FACTS["more types"]}
    has = {name: sold("gcp", name, ()) for name in known}
    if names:
        return sorted(name for name, one in has.items() if one is not None and one.name in names)
    if any(each.kind != "cpu" for each in need.accelerators):
        return []
    plain = {name: int(name.rpartition("-")[2]) for name in known if name.startswith(("e2-", "n2-"))}
    gib = {"highcpu": 1, "standard": 4, "highmem": 8}
    enough = {n: v for n, v in plain.items() if v >= need.vcpus and v * gib[n.split("-")[1]] >= need.memory_gib}
    smallest = {name.rpartition("-")[0]: vcpus for name, vcpus in sorted(enough.items(), key=lambda each: -each[1])}
    return sorted(name for name, vcpus in enough.items() if vcpus <= 2 * smallest[name.rpartition("-")[0]])


def offers(record: Any, zone: str, need: Need, base: str, rates: billing.Rates, *, held: bool) -> Iterator[Offer]:
    """A machine type of a zone in each market that has a price for it, with its disk and its address.

    Args:
        base: the image that is asked for, "" for a fit.
        held: whether a reservation is asked for, in which there is also what is else sold as spot alone.
    """
    name, region, family = record.name, zone.rpartition("-")[0], record.name.rpartition("-")[0]
    devices = [(each.guest_accelerator_type, each.guest_accelerator_count) for each in record.accelerators]
    has, arch = sold("gcp", name, devices), _ARCHS[record.architecture or ""]
    image, gb = image_for(base, has, arch, need)
    metric = FACTS["metrics"].get(family) or FACTS["metrics"].get(family.split("-")[0], family)
    vcpus, gib = float(record.guest_cpus), record.memory_mb / 1024
    markets: list[Market] = ["on-demand", "spot"] if held or name not in FACTS["spot only"] else ["spot"]
    for market in markets:
        price = rates.machine(name, region, market, vcpus, gib, devices)
        if price is not None and need.market in (market, "cheapest", "spot-if-available"):
            yield Offer(
                "gcp", name, region, zone, market, price.usd + extras(region, market, gb), has,
                {"api": "compute", "image": image, "gb": gb, "price": price.source}, vcpus, gib,
                arch=arch, quota=f"{region} {'PREEMPTIBLE_' if market == 'spot' else ''}{metric}", least_billed=60.0,
            )  # fmt: skip


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
    return path, max(120 if driven else 30, math.ceil(need.disk_gib))


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
    alone = (each for each in tables.slices().values() if each.machine_type == kind and each.vms == 1)
    if (slice := tables.slices().get(kind) or next(alone, None)) is None:
        return {}
    told = {"TPU_WORKER_ID": str(host), "TPU_WORKER_HOSTNAMES": ",".join(hosts), "TPU_ACCELERATOR_TYPE": slice.type}
    return told | ({"TPU_TOPOLOGY": slice.topology} if slice.topology else {})


def family(name: str) -> str:
    """Of a machine type: "a3" of "a3-highgpu-8g"."""
    return name.split("-")[0]
