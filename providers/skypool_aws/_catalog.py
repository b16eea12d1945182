"""Translates AWS's instance types and prices into skypool's terms. This module sends no requests.

API: DescribeInstanceTypes, GetProducts, DescribeSpotPriceHistory at https://docs.aws.amazon.com (read 2026-11-21).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import meanings, sold
from skypool.model import Arch, Need, Offer

GP3_USD_PER_GB_MONTH: Mapping[str, float] = {
    "us-east-1": 0.08,
    "us-east-2": 0.08,
    "us-west-1": 0.096,
    "us-west-2": 0.08,
    "ca-central-1": 0.088,
    "sa-east-1": 0.152,
    "eu-west-1": 0.088,
    "eu-west-2": 0.0928,
    "eu-west-3": 0.0928,
    "eu-central-1": 0.0952,
    "eu-north-1": 0.0836,
    "eu-south-1": 0.0924,
    "ap-east-1": 0.1056,
    "ap-south-1": 0.0912,
    "ap-northeast-1": 0.096,
    "ap-northeast-2": 0.0912,
    "ap-northeast-3": 0.096,
    "ap-southeast-1": 0.096,
    "ap-southeast-2": 0.096,
    "me-south-1": 0.0968,
    "af-south-1": 0.1047,
}
"""USD per GB and month of a gp3 disk, by region: https://aws.amazon.com/ebs/pricing as quoted on 2021-07-14."""

_UNKNOWN_GP3_USD = GP3_USD_PER_GB_MONTH["ap-east-1"]
"""USD per GB and month of a gp3 disk in a region that `GP3_USD_PER_GB_MONTH` lacks. A high price is assumed."""

_HOURS_PER_MONTH = 730.0
"""Hours in a month, for the price of a disk."""

ADDRESS_USD_PER_HOUR = 0.005
"""Price of a public IPv4 address in USD per hour: https://aws.amazon.com/vpc/pricing/."""

LEAST_BILLED = 60.0
"""The shortest time that AWS bills, in seconds."""


@dataclass(frozen=True, slots=True)
class SpotQuota:
    """A limit of the account on the vCPUs of spot instances that run at once, for a group of instance types.

    Attributes:
        name: AWS's name for this group of instance types.
        codes: the code of the limit in Service Quotas, AWS's service for limits. Several codes if it is not known which
            of them counts.
        types: regular expression that matches the beginning of the names of the group's instance types.
    """

    name: str
    codes: tuple[str, ...]
    types: str


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of the account on the vCPUs of on-demand instances that run at once, for one group of instance types.

    Attributes:
        name: AWS's name for the group of instance types.
        on_demand: the code of this limit in Service Quotas, AWS's service for limits.
        spot: the limits on spot instances of the same types. Usually there is one, which has the name of the group.
        families: the letters before the first digit in the names of the group's instance types.
    """

    name: str
    on_demand: str
    spot: tuple[SpotQuota, ...]
    families: tuple[str, ...]


def _quota(name: str, on_demand: str, spot: str, *families: str) -> Quota:
    """Return a quota of a group with one limit on spot instances. `on_demand` and `spot` are the limits' codes."""
    return Quota(name, on_demand, (SpotQuota(name, (spot,), "|".join(families)),), families)


QUOTAS = (
    Quota(
        "P",
        "L-417A185B",
        (
            SpotQuota("P4, P3 and P2", ("L-7212CCBC",), "p[234]"),
            SpotQuota("P5", ("L-C4BD4855",), "p5"),
            SpotQuota("P6", ("L-C4BD4855", "L-7212CCBC"), "p"),
        ),
        ("p",),
    ),
    _quota("G and VT", "L-DB2E81BA", "L-3819A6DF", "g", "gr"),
    _quota("Trn", "L-2C3B7624", "L-6B0D517C", "trn"),
    _quota("Inf", "L-1945791B", "L-B5D1601B", "inf"),
    _quota("DL", "L-6E869C2A", "L-85EED4F7", "dl"),
    _quota("Standard", "L-1216C47A", "L-34B43A08", "c", "m", "r"),
)
"""The quotas that limit the instance types which this driver offers.

Spot instances of P4, P3 and P2 have one quota, and P5 has another:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-limits.html (read 2026-11-26 in a stored copy). The page
does not name P6, and public programs differ: some count it to P5, and some to P4, P3 and P2 (read 2026-11-26).
"""

PLAIN = "Standard"
"""The name of the quota for types without accelerators."""

_QUOTA_OF_FAMILY = {family: quota.name for quota in QUOTAS for family in quota.families}


def spot_quota(offer: Offer) -> str:
    """Return the name of the limit on spot instances that counts for an offer; "" if it is not known."""
    quota = next((each for each in QUOTAS if each.name == offer.quota), None)
    return next((each.name for each in quota.spot if re.match(each.types, offer.instance_type)), "") if quota else ""


_GRAVITON = r"[a-z]+\d+[a-z]*g[a-z]*\.|.*-gb\d"
"""Regular expression of the names of instance types with arm64 processors.

Such a name has a "g" after the number of the generation, as "c7g.large", or ends with the name of a chip, "-gb200".

https://docs.aws.amazon.com/ec2/latest/instancetypes/instance-type-names.html, read 2026-11-24.
"""

_TYPES_OF_RUNTIME = {
    "cuda": ("p*", "g*"),
    "rocm": ("g*",),
    "neuron": ("trn*", "inf*"),
    "hpu": ("dl*",),
    "none": ("p*", "g*", "trn*", "inf*", "dl*"),
}
"""A dict from runtime (an accelerator's software family) to patterns of instance types.

These types are searched for an accelerator that no instance type in skypool's catalogue has.
"""

_VCPUS_OF_SIZE = {
    "large": 2,
    "xlarge": 4,
    "2xlarge": 8,
    "4xlarge": 16,
    "8xlarge": 32,
    "12xlarge": 48,
    "16xlarge": 64,
    "24xlarge": 96,
    "32xlarge": 128,
    "48xlarge": 192,
}
"""A dict from size (the last part of a type's name) to vCPUs, for types without accelerators; smallest first."""

_GIB_PER_VCPU = {"c": 2, "m": 4, "r": 8}
"""A dict from first letter of a type's name to GiB of memory for each vCPU, for types without accelerators."""

_PLAIN_GENERATIONS = ("5", "?a", "?g", "?i")
"""Patterns of the part between the first letter and the dot in the names of types, such as "5" in "c5.large".

Of the types without accelerators, only those that match are offered. "?" matches one character.
"""


def patterns(need: Need) -> list[str]:
    """Return sorted patterns of the names of instance types that could meet the need, such as "p5.*" or "c?a.xlarge".

    "*" matches any text, and "?" one character. If the need has no accelerators, the result has the smallest sufficient
    type of each family of types without accelerators, such as "c5".
    """
    found: set[str] = set()
    for wanted in need.accelerators:
        if known := _families_with(wanted):
            found |= known
        elif wanted.kind != "cpu":
            found.update(_TYPES_OF_RUNTIME.get(wanted.runtime, ()))
    if all(wanted.kind == "cpu" for wanted in need.accelerators):
        found |= _smallest_plain_types(need)
    return sorted(found)


def _families_with(wanted: Accelerator) -> set[str]:
    """Return patterns, such as "p5.*", of the families of which a known type has whole devices of the wanted model."""
    families = set()
    for name, has in meanings("aws-type").items():
        if has.name == wanted.name and " " not in name:
            family = name.split(".")[0]
            families.add(f"{family}.*")
    return families


def _smallest_plain_types(need: Need) -> set[str]:
    """Return patterns, such as "c?a.xlarge", of the smallest types without accelerators that meet the need."""
    found: set[str] = set()
    for letter, gib_per_vcpu in _GIB_PER_VCPU.items():
        vcpus_needed = max(need.vcpus, need.memory_gib / gib_per_vcpu)
        size = next((size for size, vcpus in _VCPUS_OF_SIZE.items() if vcpus >= vcpus_needed), None)
        if size is not None:
            found.update(f"{letter}{generation}.{size}" for generation in _PLAIN_GENERATIONS)
    return found


def kind(record: Mapping[str, Any]) -> Offer:
    """Convert EC2's record of an instance type to an offer with the price 0 and with "" as region and zone.

    The offer's `detail` has these keys:

    - "sold": a list of the markets on which AWS sells the type: "on-demand", "spot" or "capacity-block".
    - "cluster": True if instances of the type can be placed close together, in a cluster placement group.
    - "efa": where EFAs go, as pairs (network card, device on the card). [] if the type cannot have any.
    - "prepaid": always False here. The driver changes it to True for a capacity block, which is paid for in advance.

    Args:
        record: EC2's record, from the answer to DescribeInstanceTypes.
    """
    name: str = record["InstanceType"]
    family = re.split(r"\d", name)[0]
    strategies = record.get("PlacementGroupInfo", {}).get("SupportedStrategies", ())
    network = record.get("NetworkInfo", {})
    arch: Arch = "arm64" if "arm64" in record["ProcessorInfo"]["SupportedArchitectures"] else "x86_64"
    return Offer(
        provider="aws",
        instance_type=name,
        accelerator=accelerator(record),
        detail={
            "sold": [*record["SupportedUsageClasses"]],
            "cluster": "cluster" in strategies,
            "efa": _efa(network),
            "prepaid": False,
        },
        vcpus=record["VCpuInfo"]["DefaultVCpus"],
        memory_gib=record["MemoryInfo"]["SizeInMiB"] / 1024,
        arch=arch,
        quota=_QUOTA_OF_FAMILY.get(family, ""),
        least_billed=LEAST_BILLED,
    )


def _efa(network: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return a pair (network card, device on the card) for each EFA that an instance type may have. [] for none."""
    if not network.get("EfaSupported"):
        return []
    most = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1)
    room = {
        card["NetworkCardIndex"]: card.get("MaximumNetworkInterfaces", 1)
        for card in network.get("NetworkCards", ())
        if "efa" in card.get("InterfaceTypes", ("efa",))  # a record without the list counts as able
    }
    cards = sorted(room)[:most]
    # Device 0 of card 0 is the primary interface, which carries IP traffic. It is an EFA only if the type has a single
    # EFA, or if card 0 has no room for another interface. AWS recommends this:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html (read 2026-11-24 in a stored copy).
    # On p6-b300.48xlarge, card 0 cannot have an EFA: https://github.com/aws/aws-parallelcluster/issues/7143 (read
    # 2026-11-24 in a stored copy).
    if cards == [0]:
        return [(0, 0)]
    return [(card, 1 if card == 0 and room[0] > 1 else 0) for card in cards]


def needs_grid_driver(instance_type: str) -> bool:
    """Return True for an instance type with a fraction of a GPU, such as "g6f.large".

    Such a fraction is a virtual GPU. It needs NVIDIA's GRID driver, which no image or recipe of skypool has.
    """
    return instance_type.startswith(("g6f.", "gr6f."))


def accelerator(record: Mapping[str, Any]) -> Accelerator | None:
    """Return the accelerator of an instance type, with its count; None if it has none that skypool knows.

    If skypool's tables have the type's name, the name decides, because AWS's description of the devices is wrong for
    some types. Otherwise the description decides.
    """
    gpus = record.get("GpuInfo", {}).get("Gpus", ())
    chips = record.get("NeuronInfo", {}).get("NeuronDevices", ())
    devices = [(each["Name"], each.get("Count", 0)) for each in (*gpus, *chips)]
    return sold("aws", record["InstanceType"], devices)


def arch_of(name: str) -> Arch:
    """Return the processor architecture of an instance type, which AWS writes into the type's name."""
    return "arm64" if re.match(_GRAVITON, name) else "x86_64"


def known_types() -> set[str]:
    """Return the names of the instance types with accelerators that skypool's tables have."""
    return {name for name in meanings("aws-type") if " " not in name}


def accelerated() -> list[str]:
    """Return patterns, such as "p*", of instance types: one for the first letters of each type with accelerators."""
    return sorted({f"{re.split(r'[0-9]', name)[0]}*" for name in known_types()})


def disk_usd(region: str) -> float:
    """Return the price of a disk in USD per GB and month, from skypool's table. An unknown region gets a high price."""
    return GP3_USD_PER_GB_MONTH.get(region, _UNKNOWN_GP3_USD)


def extras(region: str, disk_gb: int) -> float:
    """Return the price of a machine's disk and public address together, in USD per hour.

    In a region whose price of disks is not known, a high price is assumed. `disk_gb` is in GiB.
    """
    disk_usd_per_month = disk_gb * disk_usd(region)
    return disk_usd_per_month / _HOURS_PER_MONTH + ADDRESS_USD_PER_HOUR


def on_demand(rows: Iterable[str]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield ((region, instance type), USD per hour) for each on-demand price above 0 in rows of AWS's price list.

    Args:
        rows: the rows, each a JSON text, from the field PriceList of the answer to GetProducts.
    """
    for attributes, usd in _prices(rows):
        yield (attributes["regionCode"], attributes["instanceType"]), usd


def by_region(rows: Iterable[str], usage: str) -> dict[str, float]:
    """Return a dict from region to price in USD for one kind of usage, from rows of AWS's price list.

    Args:
        rows: the rows, each a JSON text.
        usage: the end of the usage type, such as "EBS:VolumeUsage.gp3". Before it, AWS writes the region.
    """
    return {
        attributes["regionCode"]: usd for attributes, usd in _prices(rows) if attributes["usagetype"].endswith(usage)
    }


def _prices(rows: Iterable[str]) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield (attributes of the product, USD) for each on-demand price above 0 in rows of AWS's price list."""
    for row in rows:
        product = json.loads(row)
        attributes = product["product"]["attributes"]
        for term in product["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"].get("USD", 0))
                if usd > 0:
                    yield attributes, usd
