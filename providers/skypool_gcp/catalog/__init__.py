"""Builds the offers of Compute Engine from machine types and prices. This module sends no requests.

The API lists machine types without prices. The prices come from `skypool_gcp.list_prices`. A machine type without a
price is not offered. `boot_images` chooses what a machine boots from. This module also has helpers for addresses of
machines, and the environment variables of TPU hosts. GPUs are attached to machines of the N1 types. Machines of other
types with GPUs have these built in.

The tables are in facts.json. Their sources:

- How many vCPUs and GiB a machine with a number of attached GPUs may have: https://cloud.google.com/compute/docs/gpus,
  as in skypilot-org/skypilot, sky/catalog/gcp_catalog.py (read 2026-11-22). The limit of P100 differs between zones;
  the table has the smallest.
- Which machine types are sold as spot only:
  https://cloud.google.com/compute/docs/accelerator-optimized-machines#consumption_option_availability_by_machine_type.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from skypool.accelerators import parse, tables
from skypool.accelerators.spelling import sold
from skypool.errors import UsageError
from skypool.model import Arch, Market, Need, Offer
from skypool_gcp import _api, list_prices
from skypool_gcp.catalog.boot_images import image_for
from skypool_gcp.catalog.facts import FACTS

if TYPE_CHECKING:
    from google.cloud import compute_v1


STATES: dict[str, Literal["starting", "running"]] = {
    "PENDING": "starting",
    "PROVISIONING": "starting",
    "STAGING": "starting",
    "RUNNING": "running",
    "REPAIRING": "running",
}
"""A dict from Google's status of a machine to skypool's state of the machine.

A machine with any other status is ending.
"""

_HOURS_A_MONTH = 730.0
"""Hours in a month, as Google bills disks."""

_SIZES_OF_N1 = (4, 8, 16, 32, 64, 96)
"""The numbers of vCPUs of the N1 machine types to which the driver attaches GPUs."""

_VCPUS_FOR_A_GPU = 4
"""The smallest number of vCPUs that an N1 machine must have for each of its GPUs."""

_PLAIN_GIB = {"highcpu": 1, "standard": 4, "highmem": 8}
"""A dict from the second word in the name of an E2 or N2 machine type to its GiB of memory for each vCPU."""


_LEAST_BILLED = 60.0
"""The shortest time that is billed, in seconds: a rule of Compute Engine's machine types."""

_ARCHS: dict[str, Arch] = {"ARM64": "arm64", "X86_64": "x86_64", "": "x86_64"}
"""A dict from the API's name of a processor architecture, which is "" for some machine types, to skypool's name."""

Card = tuple[str, int]
"""The pair (the API's name of an accelerator type, number of accelerators)."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The demands of a reservation on its machines. Google refuses a machine that does not meet them.

    Attributes:
        policies: The paths of the placement policies of the reservation.
        is_dense: True if the reserved machines are close together. Such a machine ends with the reservation, and is
            requested with the provisioning model RESERVATION_BOUND.
        local_ssds: The local SSDs of each machine, as (interface, size in GB). The interface is "NVME" or "SCSI".
    """

    policies: tuple[str, ...] = ()
    is_dense: bool = False
    local_ssds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class MachineDetail:
    """The data of a Compute Engine offer for which `Offer` has no fields. An offer carries it as `detail["machine"]`.

    Attributes:
        machine_type: The machine type of each machine, such as "g2-standard-4". If the offer is a TPU slice,
            `Offer.instance_type` is the type of the slice instead.
        image: The path of the disk image, or of an image family.
        disk_gb: The smallest size of the disk in GB. The disk is larger if the image needs more.
        attached: GPUs to attach to the machine, as (Google's name, number), without those built into the machine type.
        reserved: The demands of the reservation that the machine runs in. None means outside reservations.
    """

    machine_type: str
    image: str
    disk_gb: int
    attached: Sequence[Card] = ()
    reserved: Reserved | None = None


def machine_of(offer: Offer) -> MachineDetail:
    """Return the `MachineDetail` of an offer of Compute Engine.

    Raises:
        KeyError: The offer is one of Cloud TPU, which has no `MachineDetail`.
    """
    machine: MachineDetail = offer.detail["machine"]
    return machine


class Ends(NamedTuple):
    """The two network addresses of one machine: in the project's own network, and the public one."""

    inside: str
    public: str


class Place(NamedTuple):
    """Where a network of the setting `networks`, given as "NETWORK/SUBNETWORK", can be used.

    Attributes:
        regions: The regions in which the network has a subnetwork of this name.
        profile: The network's profile, such as ".../networkProfiles/us-central1-b-vpc-roce"; "" if it has none.
    """

    regions: set[str]
    profile: str


def types(need: Need) -> list[str]:
    """Return the sorted names of the machine types that could meet a need; [] if no known type could.

    If the need names accelerators, the result has the machine types that contain them, and the N1 types to which they
    can be attached. Otherwise it has the E2 and N2 types with enough vCPUs and memory. Types with more than twice the
    vCPUs of the smallest sufficient type in their series, such as "n2-standard", are left out.
    """
    names = {each.name for each in need.accelerators if each.kind != "cpu"}
    known = {*list_prices.machines(), *FACTS["more types"]}
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


def fabric(machine_type: str) -> list[str]:
    """Return the types of the further network interfaces for a machine's GPUs, in order: "GVNIC" or "MRDMA" each.

    Returns [] if the machine type has no such interfaces.
    """
    gvnic, mrdma = FACTS["fabric"].get(machine_type, (0, 0))
    return ["GVNIC"] * gvnic + ["MRDMA"] * mrdma


def reaches(place: Place, type: str, zone: str) -> bool:
    """Return True if a network interface of a machine can be in a subnetwork of the setting `networks`.

    `type` is the type of the interface, "GVNIC" or "MRDMA". `zone` is the machine's zone. A network with an RDMA
    profile takes only MRDMA, and only in the zone of the profile:
    https://docs.cloud.google.com/vpc/docs/rdma-network-profiles (read 2026-11-24 in a stored copy).
    """
    if _api.region_of(zone) not in place.regions:
        return False
    if type != "MRDMA":
        return not place.profile
    return _api.last_part(place.profile) == f"{zone}-vpc-roce"


def refuse_unpriced(need: Need) -> None:
    """Raise UsageError if the need names an accelerator that Google has only in a machine type without a known price.

    The message names the accelerator and the machine type.
    """
    names = {each.name for each in need.accelerators}
    for kind, accelerator in FACTS["unpriced"].items():
        if accelerator in names:
            raise UsageError(
                f"{accelerator} cannot be offered: Google's price catalogue has no price for {kind}, so its offers "
                "could not be compared with others, and no budget could count them; choose another accelerator or "
                "provider"
            )


def _plain_types(known: Iterable[str], need: Need) -> list[str]:
    """Return the sorted E2 and N2 types of `known` that meet the need, without those that are much too large."""
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
    """Return a dict from each N1 machine type to the needed GPUs that can be attached to machines of this type.

    Each value is a list of (Google's name of the GPU, number). Only Google's limits on vCPUs and memory are checked,
    not the vCPUs and memory that the need asks for.
    """
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
    """A machine type in a zone, with the accelerators of its machines. The method `offers` makes offers of it.

    Attributes:
        record: The API's record of the machine type.
        cards: The accelerators, as (Google's name, number).
        attached: True if the accelerators are attached to the machine, False if they are built into the machine type.
    """

    record: compute_v1.MachineType
    zone: str
    cards: tuple[Card, ...]
    attached: bool

    def offers(
        self, need: Need, base: str, rates: list_prices.Rates, held: Sequence[compute_v1.Reservation] | None
    ) -> Iterator[Offer]:
        """Yield an offer for each market on which the machine type is sold and has a known price.

        The price includes the disk and the public address. If reservations are given, there is at most one offer, on
        demand, and none if no reservation is for this machine type and zone. `Offer.available` is False if the
        reservation is full.

        Args:
            need: The requirements of a node, of which the markets and the disk size are used.
            base: The image that the user chose: a path, or a short name such as "ubuntu-24.04". "" means the image that
                fits the accelerator.
            rates: Google's prices.
            held: The reservations in which the machine may be placed. None means outside reservations.

        Raises:
            UsageError: `base` does not have the form of an image's path.
        """
        kind = self.record.name
        region = _api.region_of(self.zone)
        has = sold("gcp", kind, self.cards)
        arch = _ARCHS[self.record.architecture or ""]
        image, gb = image_for(base, has, arch, need)
        reservation = None if held is None else self._reservation(held)
        if held is not None and reservation is None:
            return
        reserved = None if reservation is None else _reserved(reservation)
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
                    "machine": MachineDetail(kind, image, gb, tuple(self.cards) if self.attached else (), reserved),
                },
                vcpus=float(self.record.guest_cpus),
                memory_gib=self.record.memory_mb / 1024,
                arch=arch,
                available=None if reservation is None else _room(reservation) > 0,
                quota="" if held is not None else self._quota(region, market),
                least_billed=_LEAST_BILLED,
                price_source=price.source,
                on_demand_usd_per_hour=usual.usd if usual is not None else None,
            )

    def _markets(self, need: Need, *, reserved: bool) -> Sequence[Market]:
        """Return the need's markets on which the machine type is sold; if `reserved`, only "on-demand" of these."""
        if reserved:
            return [each for each in need.markets if each == "on-demand"]
        if self.record.name in FACTS["spot only"]:
            return [each for each in need.markets if each == "spot"]
        return need.markets

    def _price(self, rates: list_prices.Rates, region: str, market: Market, gb: int) -> list_prices.Price | None:
        """Return the price of a machine with a disk of `gb` GB and a public address; None if it is not known."""
        gib = self.record.memory_mb / 1024
        price = rates.machine(self.record.name, region, market, float(self.record.guest_cpus), gib, self.cards)
        return price and list_prices.Price(price.usd + extras(region, market, gb), price.source)

    def _quota(self, region: str, market: Market) -> str:
        """Return the quota that a machine counts toward, after the region: "us-east1 PREEMPTIBLE_NVIDIA_L4_GPUS"."""
        series = self.record.name.rpartition("-")[0]
        names = [model for model, _ in self.cards] if self.attached else []
        names += [series, family(series)]
        # the series, such as "c3-standard", stands for an unknown quota
        metric = next((FACTS["metrics"][name] for name in names if name in FACTS["metrics"]), series)
        return f"{region} {'PREEMPTIBLE_' if market == 'spot' else ''}{metric}"

    def _reservation(self, held: Iterable[compute_v1.Reservation]) -> compute_v1.Reservation | None:
        """Return the first reservation that is for this machine type, zone and attached GPUs; None if none is."""
        for each in held:
            has = each.specific_reservation
            if has.instance_properties.machine_type != self.record.name or self.zone != _api.last_part(each.zone):
                continue
            cards = [
                (_api.last_part(one.accelerator_type), one.accelerator_count)
                for one in has.instance_properties.guest_accelerators
            ]
            if not self.attached or cards == list(self.cards):
                return each
        return None


def _room(reservation: compute_v1.Reservation) -> int:
    """Return how many more machines fit into a reservation."""
    has = reservation.specific_reservation
    return int(has.count - has.in_use_count)


def _reserved(reservation: compute_v1.Reservation) -> Reserved:
    """Return what a machine must have to run in a reservation, as Google's record of the reservation says."""
    return Reserved(
        policies=tuple(reservation.resource_policies.values()),
        is_dense=reservation.deployment_type == "DENSE",
        local_ssds=tuple(
            (each.interface or "SCSI", int(each.disk_size_gb))
            for each in reservation.specific_reservation.instance_properties.local_ssds
        ),
    )


def wares(
    records: Iterable[compute_v1.MachineType], models: Iterable[compute_v1.AcceleratorType], need: Need
) -> Iterator[Ware]:
    """Yield each machine type in each zone, together with the accelerators that a machine of this type would have.

    A machine type is yielded once, with its built-in accelerators, whether the need names them or not. But an N1 type
    is yielded once for each type and number of GPUs that the need names and the zone has, and never without GPUs.

    Args:
        records: The API's records of machine types, each in one zone.
        models: The API's records of GPU types that can be attached, each in one zone.
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
    """Return the price in USD per hour of a machine's disk and public address, which Google charges separately.

    `gb` is the size of the disk. The price of a disk is that of the most expensive region in its part of the world, and
    the price of an address depends on the market. Sources:
    https://cloud.google.com/compute/disks-image-pricing and https://cloud.google.com/vpc/network-pricing.
    """
    gb_a_month = next(usd for start, usd in FACTS["disk"].items() if region.startswith(start))
    return gb * gb_a_month / _HOURS_A_MONTH + FACTS["address"][market]


def addresses(record: compute_v1.Instance) -> list[Ends]:
    """Return the addresses of a machine: one item for each public address."""
    return [
        Ends(str(interface.network_i_p), str(config.nat_i_p))
        for interface in record.network_interfaces
        for config in interface.access_configs
        if config.nat_i_p
    ]


def env(kind: str, host: int, hosts: Sequence[str]) -> dict[str, str]:
    """Return the environment variables with which libtpu, Google's library for TPUs, finds the slice's other hosts.

    Returns {} if `kind` is not a known type of TPU slice.

    Args:
        kind: The type of the slice, such as "v5p-16", or the machine type of a slice with one host. "" if the type is
            not known.
        host: The host's number in the slice, from 0.
        hosts: The internal addresses of all hosts of the slice, in the order of their numbers.
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
