"""Builds the offers of Compute Engine from its machine types, prices and base images. It sends no requests.

The API lists machine types, but no prices: those come from `skypool_gcp.billing`. A type without a price is not
offered. Tables are in facts.json. Their sources:

- How many GPUs may be attached to how many vCPUs and GiB: https://cloud.google.com/compute/docs/gpus, as in
  skypilot-org/skypilot, sky/catalog/gcp_catalog.py (read 2026-11-22). For P100 it is the limit of its smallest zones.
- What is sold on the spot market alone:
  https://cloud.google.com/compute/docs/accelerator-optimized-machines#consumption_option_availability_by_machine_type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from skypool.accelerators import Accelerator, parse, tables
from skypool.accelerators.spelling import sold
from skypool.drivers.settings import table, words
from skypool.errors import UsageError
from skypool.model import Arch, Market, Need, Offer
from skypool_gcp import _api, billing

if TYPE_CHECKING:
    from google.cloud import compute_v1

Facts = TypedDict(
    "Facts",
    {
        "undriven": list[str],
        "hyperdisk": list[str],
        "placed": list[str],
        "spot only": list[str],
        "more types": list[str],
        "metrics": dict[str, str],
        "attached": dict[str, dict[str, list[int]]],
        "n1": dict[str, float],
        "disk": dict[str, float],
        "address": dict[Market, float],
    },
)

FACTS: Facts = table("skypool_gcp.catalog", "facts.json")
"""The tables of facts.json, which describes each of them."""

IMAGES: dict[str, str] = {
    "cuda": "projects/deeplearning-platform-release/global/images/family/common-cu128-ubuntu-2204-nvidia-570",
    "tpu": "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2404-amd64-tpu-tpu7x",
    "ubuntu-24.04": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
    "ubuntu-22.04": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts",
}
"""Image families, by the accelerator runtime that they support, or by the short name that a user may write."""

STATES: dict[str, Literal["starting", "running"]] = {
    "PENDING": "starting",
    "PROVISIONING": "starting",
    "STAGING": "starting",
    "RUNNING": "running",
    "REPAIRING": "running",
}
"""The states of machines that exist, by the API's name. A machine in any other state is ending."""

_HOURS_A_MONTH = 730.0
"""Hours in a month, as Google bills disks."""

_SIZES_OF_N1 = (4, 8, 16, 32, 64, 96)
"""The numbers of vCPUs of N1 machine types to which GPUs can be attached."""

_VCPUS_FOR_A_GPU = 4
"""The least vCPUs of an N1 machine for each of its GPUs."""

_PLAIN_GIB = {"highcpu": 1, "standard": 4, "highmem": 8}
"""GiB of memory for each vCPU of E2 and N2 machine types, by the second word of their names."""

_DISK_GB = 30
"""The smallest disk in GB of a machine without accelerators."""

_DRIVEN_DISK_GB = 120
"""The smallest disk in GB of a machine with accelerators: images with drivers take tens of GB."""

_LEAST_BILLED = 60.0
"""The shortest time that is billed, in seconds: a rule of Compute Engine's machine types."""

_ARCHS: dict[str, Arch] = {"ARM64": "arm64", "X86_64": "x86_64", "": "x86_64"}
"""Processor architectures, by the API's name. The API leaves some machine types without one."""

Card = tuple[str, int]
"""The API's name of an accelerator type, and the number of accelerators."""


@dataclass(frozen=True, slots=True)
class MachineDetail:
    """The data of a Compute Engine offer that `Offer` has no fields for. An offer has it as `detail["machine"]`.

    Attributes:
        machine_type: The machine type of each host. The offer's own type may be that of a slice.
        image: The path of the image, or of its family.
        disk_gb: The size of the disk, at least.
        attached: GPUs that are attached to the machine. GPUs that its type has are not among them.
    """

    machine_type: str
    image: str
    disk_gb: int
    attached: Sequence[Card] = ()


def machine_of(offer: Offer) -> MachineDetail:
    """Return the `MachineDetail` of an offer of Compute Engine."""
    machine: MachineDetail = offer.detail["machine"]
    return machine


class Ends(NamedTuple):
    """The internal and the public network address of one host.

    Attributes:
        inside: Its address in the project's network.
        public: Its public address.
    """

    inside: str
    public: str


class ImagePath(NamedTuple):
    """The parts of an image's path.

    Attributes:
        project: The project that has the image.
        name: The name of the image, or of the family.
        is_family: True if the path names a family, of which the newest image is used.
    """

    project: str
    name: str
    is_family: bool


def types(need: Need) -> list[str]:
    """Return the names of the machine types that could meet a need, sorted.

    Without accelerators, these are the smallest types that are large enough, and others with up to twice their vCPUs.
    """
    names = {each.name for each in need.accelerators if each.kind != "cpu"}
    known = {*billing.machines(), *FACTS["more types"]}
    if names:
        found = set(pairs(need))
        for name in known:
            has = sold("gcp", name, ())
            if has is not None and has.name in names:
                found.add(name)
        return sorted(found)
    if any(each.kind != "cpu" for each in need.accelerators):
        return []
    return _plain_types(known, need)


def _plain_types(known: Iterable[str], need: Need) -> list[str]:
    """Return the E2 and N2 machine types that are large enough for a need.

    Types with more than twice the vCPUs of the smallest one in their series are left out.

    Args:
        known: The names of machine types to choose from.
        need: The requirements.
    """
    enough: dict[str, int] = {}
    for name in known:
        if not name.startswith(("e2-", "n2-")):
            continue
        _, kind, size = name.split("-")
        vcpus = int(size)
        if vcpus >= need.vcpus and vcpus * _PLAIN_GIB[kind] >= need.memory_gib:
            enough[name] = vcpus
    smallest: dict[str, int] = {}
    for name, vcpus in enough.items():
        series = name.rpartition("-")[0]
        smallest[series] = min(vcpus, smallest.get(series, vcpus))
    return sorted(name for name, vcpus in enough.items() if vcpus <= 2 * smallest[name.rpartition("-")[0]])


def pairs(need: Need) -> dict[str, list[Card]]:
    """Return the N1 machine types that meet a need with attached GPUs, each with the possible GPU types and numbers."""
    found: dict[str, list[Card]] = {}
    for model, limits in FACTS["attached"].items():
        wanted = parse(model, dialect="gcp").name
        counts = {each.count for each in need.accelerators if each.name == wanted}
        for count, series in itertools.product(counts, FACTS["n1"]):
            most_vcpus, most_gib = limits.get(str(count), (0, 0))
            for vcpus in _SIZES_OF_N1:
                gib = vcpus * FACTS["n1"][series]
                if _VCPUS_FOR_A_GPU * count <= vcpus <= most_vcpus and gib <= most_gib:
                    found.setdefault(f"n1-{series}-{vcpus}", []).append((model, count))
    return found


@dataclass(frozen=True)
class Ware:
    """A machine type in one zone, with its accelerators.

    Attributes:
        record: The API's record of the machine type.
        zone: The zone.
        cards: The accelerators.
        attached: True if the accelerators are attached to the machine, False if they are built into the machine type.
    """

    record: compute_v1.MachineType
    zone: str
    cards: tuple[Card, ...]
    attached: bool

    def offers(
        self, need: Need, base: str, rates: billing.Rates, held: Sequence[compute_v1.Reservation] | None
    ) -> Iterator[Offer]:
        """Yield an offer for each market with a price. The price includes the disk and the public address.

        Args:
            need: The requirements.
            base: The image that the user named; "" for one that fits the accelerator.
            rates: Google's prices.
            held: The reservations to run in; None for no reservation. With reservations, there are only on-demand
                offers of what they hold, also for types that are otherwise only sold as spot.
        """
        kind = self.record.name
        region = _api.region_of(self.zone)
        has = sold("gcp", kind, self.cards)
        arch = _ARCHS[self.record.architecture or ""]
        image, gb = image_for(base, has, arch, need)
        room = None if held is None else self._room(held)
        if held is not None and room is None:
            return
        for market in self._markets(need, reserved=held is not None):
            price = self._price(rates, region, market, gb)
            if price is None:
                continue
            usual = self._price(rates, region, "on-demand", gb) if market == "spot" else None
            yield Offer(
                provider="gcp",
                instance_type=kind,
                region=region,
                zone=self.zone,
                market=market,
                usd_per_hour=price.usd,
                accelerator=has,
                detail={
                    "api": "compute",
                    "machine": MachineDetail(kind, image, gb, tuple(self.cards) if self.attached else ()),
                },
                vcpus=float(self.record.guest_cpus),
                memory_gib=self.record.memory_mb / 1024,
                arch=arch,
                available=None if held is None else bool(room),
                quota="" if held is not None else self._quota(region, market),
                least_billed=_LEAST_BILLED,
                price_source=price.source,
                on_demand_usd_per_hour=usual.usd if usual is not None else None,
            )

    def _markets(self, need: Need, *, reserved: bool) -> Sequence[Market]:
        """Return the markets of the need on which the machine type is sold.

        Args:
            need: The requirements.
            reserved: True if the machine runs in a reservation, which is only possible on demand.
        """
        if reserved:
            return [each for each in need.markets if each == "on-demand"]
        if self.record.name in FACTS["spot only"]:
            return [each for each in need.markets if each == "spot"]
        return need.markets

    def _price(self, rates: billing.Rates, region: str, market: Market, gb: int) -> billing.Price | None:
        """Return the price in USD per hour, with the disk and the public address, and its source; None if it is
        unknown.
        """
        gib = self.record.memory_mb / 1024
        price = rates.machine(self.record.name, region, market, float(self.record.guest_cpus), gib, self.cards)
        return price and billing.Price(price.usd + extras(region, market, gb), price.source)

    def _quota(self, region: str, market: Market) -> str:
        """Return a name for the quota toward which the machine counts, with region and market."""
        series = self.record.name.rpartition("-")[0]
        names = [model for model, _ in self.cards] if self.attached else []
        names += [series, family(series)]
        metric = next((FACTS["metrics"][name] for name in names if name in FACTS["metrics"]), series)
        return f"{region} {'PREEMPTIBLE_' if market == 'spot' else ''}{metric}"

    def _room(self, held: Iterable[compute_v1.Reservation]) -> int | None:
        """Return how many more machines fit into the reservation of this type and zone.

        Returns None if there is no such reservation.
        """
        for each in held:
            has = each.specific_reservation
            if has.instance_properties.machine_type != self.record.name or self.zone != _api.last_part(each.zone):
                continue
            cards = [
                (_api.last_part(one.accelerator_type), one.accelerator_count)
                for one in has.instance_properties.guest_accelerators
            ]
            if not self.attached or cards == list(self.cards):
                return int(has.count - has.in_use_count)
        return None


def wares(
    records: Iterable[compute_v1.MachineType], models: Iterable[compute_v1.AcceleratorType], need: Need
) -> Iterator[Ware]:
    """Yield the machine types that may meet a need, each with its accelerators.

    Args:
        records: The API's records of machine types in zones.
        models: The API's records of accelerator types in zones.
        need: The requirements.
    """
    there = {(_api.last_part(each.zone), each.name) for each in models}
    attachable = pairs(need)
    for record in records:
        zone = _api.last_part(record.zone)
        if record.name.startswith("n1-"):
            for model, count in attachable.get(record.name, ()):
                if (zone, model) in there:
                    yield Ware(record, zone, ((model, count),), attached=True)
        else:
            built_in = [(each.guest_accelerator_type, each.guest_accelerator_count) for each in record.accelerators]
            yield Ware(record, zone, tuple(built_in), attached=False)


def extras(region: str, market: Market, gb: int) -> float:
    """Return the price of a machine's disk and public address together, in USD per hour.

    Disks are priced as in the most expensive region of a part of the world. Sources:
    https://cloud.google.com/compute/disks-image-pricing and https://cloud.google.com/vpc/network-pricing.

    Args:
        region: The region of the machine.
        market: The market, on which the price of the address depends.
        gb: The size of the disk.
    """
    gb_a_month = next(usd for start, usd in FACTS["disk"].items() if region.startswith(start))
    return gb * gb_a_month / _HOURS_A_MONTH + FACTS["address"][market]


def image_for(asked: str, has: Accelerator | None, arch: Arch, need: Need) -> tuple[str, int]:
    """Return the path of an image or a family for a machine, and the size of its disk in GB.

    Args:
        asked: The image that the user named; "" for one that fits the accelerator.
        has: The machine's accelerator; None for none.
        arch: The machine's processor architecture.
        need: The requirements, of which the disk size is used.

    Raises:
        UsageError: `asked` is not an image of Google Cloud.
    """
    shape = _api.SHAPES["image"]
    words("base image of GCP", asked or None, shape.pattern, shape.like)
    fit = "ubuntu-24.04"
    if has is not None and arch == "x86_64" and has.runtime in IMAGES and has.name not in FACTS["undriven"]:
        fit = has.runtime
    path = IMAGES.get(asked or fit, asked)
    if arch == "arm64":
        path = path.replace("-amd64", "-arm64").replace("2204-lts", "2204-lts-arm64")
    least = _DRIVEN_DISK_GB if has is not None else _DISK_GB
    return path, max(least, math.ceil(need.disk_gib))


def parsed(image: str) -> ImagePath:
    """Return the parts of the path of an image or a family.

    Raises:
        UsageError: It is not such a path.
    """
    project, found, name = image.removeprefix("projects/").partition("/global/images/")
    if not found:
        raise UsageError(f"{image!r} is not an image of GCP; it must be like 'projects/PROJECT/global/images/NAME'")
    return ImagePath(project, name.removeprefix("family/"), is_family=name.startswith("family/"))


def addresses(record: compute_v1.Instance) -> list[Ends]:
    """Return the addresses of a machine, one item for each public address; an empty list if it has none yet."""
    return [
        Ends(str(interface.network_i_p), str(config.nat_i_p))
        for interface in record.network_interfaces
        for config in interface.access_configs
        if config.nat_i_p
    ]


def env(kind: str, host: int, hosts: Sequence[str]) -> dict[str, str]:
    """Return the environment variables with which libtpu on a host finds the other hosts of its slice.

    Returns {} if the machine is no TPU host.

    Args:
        kind: The type of the slice, or the machine type of a slice of one host.
        host: The host's number in the slice, from 0.
        hosts: The addresses of all hosts, in their order.
    """
    slice = tables.slices().get(kind)
    if slice is None and kind:
        alone = (each for each in tables.slices().values() if each.machine_type == kind and each.vms == 1)
        slice = next(alone, None)
    if slice is None:
        return {}
    variables = {
        "TPU_WORKER_ID": str(host),
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
        "TPU_ACCELERATOR_TYPE": slice.type,
    }
    if slice.topology:
        variables["TPU_TOPOLOGY"] = slice.topology
    return variables


def family(name: str) -> str:
    """Return the family of a machine type: "a3" for "a3-highgpu-8g"."""
    return name.split("-")[0]
