"""Instance types, prices and base images of AWS, in skypool's words. Nothing here asks AWS anything.

API: DescribeInstanceTypes, GetProducts, DescribeSpotPriceHistory at https://docs.aws.amazon.com (read 2026-11-21).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import meanings, sold
from skypool.drivers.settings import words
from skypool.model import Arch, Need, Offer

BASE_SHAPE = r"ami-[0-9a-f]+|/\S+|ubuntu-2[24]\.04"
"""The regular expression of what a user may call a base image."""

BASE_EXAMPLE = "'ami-0123456789abcdef0', an SSM parameter '/aws/…', 'ubuntu-22.04' or 'ubuntu-24.04'"
"""Base images as a user may write them, for messages."""

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
"""Price of a gp3 disk by region: https://aws.amazon.com/ebs/pricing as quoted on 2021-07-14."""

_UNKNOWN_GP3_USD = GP3_USD_PER_GB_MONTH["ap-east-1"]
"""Price of a gp3 disk in a region that the table lacks: among the highest, so that no plan promises too little."""

_HOURS_PER_MONTH = 730.0
"""Hours for which AWS bills a month of a disk."""

_ADDRESS_USD_PER_HOUR = 0.005
"""Price of a public IPv4 address: https://aws.amazon.com/vpc/pricing/."""

LEAST_BILLED = 60.0
"""Seconds that are billed for at least."""

_DRIVER_DISK_GB = 120
"""Disk of a machine whose image brings a driver. AWS's Neuron image is the largest of them with 105 GB."""

_PLAIN_DISK_GB = 30
"""Disk of a machine with plain Ubuntu."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of the account on vCPUs that run at once, one on demand and one as spot.

    Attributes:
        name: AWS's own for the group of instance types.
        on_demand: the quota's code in Service Quotas.
        spot: the same for the spot market.
        families: letters with which the group's instance types begin, before the first digit.
    """

    name: str
    on_demand: str
    spot: str
    families: tuple[str, ...]


QUOTAS = (
    Quota("P", "L-417A185B", "L-7212CCBC", ("p",)),
    Quota("G and VT", "L-DB2E81BA", "L-3819A6DF", ("g", "gr")),
    Quota("Trn", "L-2C3B7624", "L-6B0D517C", ("trn",)),
    Quota("Inf", "L-1945791B", "L-B5D1601B", ("inf",)),
    Quota("DL", "L-6E869C2A", "L-85EED4F7", ("dl",)),
    Quota("Standard", "L-1216C47A", "L-34B43A08", ("c", "m", "r")),
)
"""The quotas that what is offered here counts toward."""

_QUOTA_OF_FAMILY = {family: quota.name for quota in QUOTAS for family in quota.families}

_UBUNTU_IMAGES = {
    "24.04": "/aws/service/canonical/ubuntu/server/24.04/stable/current/{cpu}/hvm/ebs-gp3/ami-id",
    "22.04": "/aws/service/canonical/ubuntu/server/22.04/stable/current/{cpu}/hvm/ebs-gp2/ami-id",
}
"""SSM parameters that hold the AMI of plain Ubuntu, by release."""

_DRIVER_IMAGES = {
    "cuda": "/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-{release}/latest/ami-id",
    "neuron": "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id",
}
"""SSM parameters that hold an AMI with an accelerator's driver, by the accelerator's runtime."""

_NOT_DRIVEN = ("K80", "K520", "M60", "V100", "Inferentia1")
"""Accelerators that the image of their runtime does not support: NVIDIA's before Turing, and the first Inferentia."""

_TYPES_OF_RUNTIME = {
    "cuda": ("p*", "g*"),
    "rocm": ("g*",),
    "neuron": ("trn*", "inf*"),
    "hpu": ("dl*",),
    "none": ("p*", "g*", "trn*", "inf*", "dl*"),
}
"""Patterns of the instance types that may have an accelerator no known type has, by its runtime."""

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
"""vCPUs of an instance type without accelerators, by the last part of its name; the smallest first."""

_GIB_PER_VCPU = {"c": 2, "m": 4, "r": 8}
"""Memory of an instance type without accelerators, by the first letter of its name."""

_PLAIN_GENERATIONS = ("5", "?a", "?g", "?i")
"""What follows that letter in types that are offered. Types t cost more than their price once their credits are spent;
types with n, d, b or z are dear."""


def patterns(need: Need) -> list[str]:
    """Return patterns of the names of the instance types that could serve.

    Without accelerators these are the smallest types of each family that are large enough.
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
    """Return patterns of the families in which some known type has whole ones of this accelerator."""
    families = set()
    for name, has in meanings("aws-type").items():
        if has.name == wanted.name and " " not in name:
            family = name.split(".")[0]
            families.add(f"{family}.*")
    return families


def _smallest_plain_types(need: Need) -> set[str]:
    """Return patterns of the smallest types without accelerators that have enough vCPUs and memory."""
    found: set[str] = set()
    for letter, gib_per_vcpu in _GIB_PER_VCPU.items():
        vcpus_needed = max(need.vcpus, need.memory_gib / gib_per_vcpu)
        size = next((size for size, vcpus in _VCPUS_OF_SIZE.items() if vcpus >= vcpus_needed), None)
        if size is not None:
            found.update(f"{letter}{generation}.{size}" for generation in _PLAIN_GENERATIONS)
    return found


def kind(record: Mapping[str, Any]) -> Offer:
    """Return an instance type of DescribeInstanceTypes as an offer without place and price.

    The offer's `detail` says on which markets AWS sells it ("sold"), whether it can be in a cluster placement group
    ("cluster"), has an Elastic Fabric Adapter ("efa"), and is paid for already ("prepaid").
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
            "efa": bool(network.get("EfaSupported")),
            "prepaid": False,
        },
        vcpus=record["VCpuInfo"]["DefaultVCpus"],
        memory_gib=record["MemoryInfo"]["SizeInMiB"] / 1024,
        arch=arch,
        quota=_QUOTA_OF_FAMILY.get(family, ""),
        least_billed=LEAST_BILLED,
    )


def accelerator(record: Mapping[str, Any]) -> Accelerator | None:
    """Return what an instance type has, by its name if that is known, otherwise by what AWS calls its devices.

    AWS's figures mislead: each Trainium2 has 512 GiB there and trn2u no device at all, g6f counts no GPU, inf is
    described twice, and some memory is as it is sold and some as a program sees it.
    """
    gpus = record.get("GpuInfo", {}).get("Gpus", ())
    chips = record.get("NeuronInfo", {}).get("NeuronDevices", ())
    devices = [(each["Name"], each.get("Count", 0)) for each in (*gpus, *chips)]
    return sold("aws", record["InstanceType"], devices)


def base(asked: str, offer: Offer, need: Need) -> tuple[str, int]:
    """Return what a machine starts from, and the GB of its disk.

    Args:
        asked: an AMI, an SSM parameter or an Ubuntu release that the user named; "" takes what fits the accelerator.

    Returns:
        An AMI or the SSM parameter that holds one; GB of 2**30 bytes, as AWS counts them.

    Raises:
        UsageError: `asked` is none of these.
    """
    words("base image of AWS", asked or None, BASE_SHAPE, BASE_EXAMPLE)
    driver_image = _driver_image(offer.accelerator)
    if asked.startswith(("ami-", "/")):
        name = asked
    elif driver_image:
        name = driver_image
    else:
        name = _UBUNTU_IMAGES[_release(asked, offer.accelerator)]
    least_gb = _DRIVER_DISK_GB if driver_image else _PLAIN_DISK_GB
    return parameter(name, offer.arch or "x86_64", asked), max(least_gb, math.ceil(need.disk_gib))


def parameter(template: str, arch: Arch = "x86_64", release: str = "") -> str:
    """Return the name of an SSM parameter for one kind of processor.

    Args:
        release: the Ubuntu release, as "ubuntu-22.04"; "" takes 24.04.
    """
    return template.format(
        release=release.removeprefix("ubuntu-") or "24.04",
        arch=arch,
        cpu="arm64" if arch == "arm64" else "amd64",
    )


def default_images() -> list[str]:
    """Return the SSM parameters of all images that machines with an x86 processor start from by default."""
    return [parameter(template) for template in (*_DRIVER_IMAGES.values(), *_UBUNTU_IMAGES.values())]


def _driver_image(has: Accelerator | None) -> str:
    """Return the SSM parameter of the image with the driver of this accelerator; "" if there is none."""
    if has is None or has.name in _NOT_DRIVEN:
        return ""
    return _DRIVER_IMAGES.get(has.runtime, "")


def _release(asked: str, has: Accelerator | None) -> str:
    """Return the Ubuntu release for an accelerator without an image of its own, unless one is asked for."""
    if asked:
        return asked.removeprefix("ubuntu-")
    if has is not None and has.runtime in ("neuron", "hpu"):
        return "22.04"  # the last SDKs for Gaudi and the first Inferentia are for this release
    return "24.04"


def extras(region: str, disk_gb: int) -> float:
    """Return what is charged beside the instance, in USD an hour: its disk and its public address."""
    disk_usd_per_month = disk_gb * GP3_USD_PER_GB_MONTH.get(region, _UNKNOWN_GP3_USD)
    return disk_usd_per_month / _HOURS_PER_MONTH + _ADDRESS_USD_PER_HOUR


def on_demand(rows: Iterable[str]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield ((region, instance type), USD an hour) for each price of GetProducts' PriceList.

    Rows of 0 are left out: the price list has them for capacity blocks.
    """
    for row in rows:
        product = json.loads(row)
        attributes = product["product"]["attributes"]
        for term in product["terms"].get("OnDemand", {}).values():
            for dimension in term["priceDimensions"].values():
                usd = float(dimension["pricePerUnit"].get("USD", 0))
                if usd > 0:
                    yield (attributes["regionCode"], attributes["instanceType"]), usd
