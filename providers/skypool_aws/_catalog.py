"""What AWS sells, in skypool's words: instance types, prices, base images. Pure; figures are in facts.json.

API: DescribeInstanceTypes, GetProducts, DescribeSpotPriceHistory at https://docs.aws.amazon.com (read 2026-11-21).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import meanings, sold
from skypool.drivers.settings import table, words
from skypool.model import Arch, Need, Offer

FACTS: dict[str, Any] = table("skypool_aws", "facts.json")
_EVERY = {"cuda": "p* g*", "rocm": "g*", "neuron": "trn* inf*", "hpu": "dl*", "none": "p* g* trn* inf* dl*"}
_SIZES = {"large": 2, "xlarge": 4} | {f"{n}xlarge": 4 * n for n in (2, 4, 8, 12, 16, 24, 32, 48)}
_QUOTAS = {family: quota for quota, (_, _, families) in FACTS["quotas"].items() for family in families.split()}
_MONTH, _ADDRESS = 730.0, 0.005  # hours; USD an hour: https://aws.amazon.com/vpc/pricing/


def patterns(need: Need) -> list[str]:
    """Of the names of the instance types that could serve; without accelerators of the smallest that are enough.

    Of those not t, which costs more than its price once its credits are spent; nor n, d, b and z, which are dear.
    """
    found = set[str]()
    for each in need.accelerators:
        types = meanings("aws-type").items()
        known = {f"{name.split('.')[0]}.*" for name, has in types if has.name == each.name and " " not in name}
        found |= known or set(_EVERY.get(each.runtime, "").split() if each.kind != "cpu" else ())
    plain = all(each.kind == "cpu" for each in need.accelerators)
    for use, gib_per_vcpu in {"c": 2, "m": 4, "r": 8}.items() if plain else ():
        sizes = [size for size, vcpus in _SIZES.items() if vcpus >= max(need.vcpus, need.memory_gib / gib_per_vcpu)]
        found |= {f"{use}{kind}.{sizes[0]}" for kind in ("5", "?a", "?g", "?i") if sizes}
    return sorted(found)


def kind(record: Mapping[str, Any]) -> Offer:
    """An instance type of DescribeInstanceTypes, without place and price."""
    name, markets, network = record["InstanceType"], record["SupportedUsageClasses"], record.get("NetworkInfo", {})
    cluster = "cluster" in record.get("PlacementGroupInfo", {}).get("SupportedStrategies", ())
    detail = {"sold": [*markets], "cluster": cluster, "efa": bool(network.get("EfaSupported")), "prepaid": False}
    offer = Offer("aws", name, accelerator=accelerator(record), detail=detail, least_billed=60.0)
    arch: Arch = "arm64" if "arm64" in record["ProcessorInfo"]["SupportedArchitectures"] else "x86_64"
    cpus, gib = record["VCpuInfo"]["DefaultVCpus"], record["MemoryInfo"]["SizeInMiB"] / 1024
    return replace(offer, vcpus=cpus, memory_gib=gib, arch=arch, quota=_QUOTAS.get(re.split(r"\d", name)[0], ""))


def accelerator(record: Mapping[str, Any]) -> Accelerator | None:
    """What an instance type has: by its own name, where that is known.

    Its figures mislead: each Trainium2 has 512 GiB there and trn2u no device at all, g6f counts no GPU, inf is told of
    twice, and some memory is as it is sold and some as a program sees it.
    """
    gpus, chips = record.get("GpuInfo", {}).get("Gpus", ()), record.get("NeuronInfo", {}).get("NeuronDevices", ())
    return sold("aws", record["InstanceType"], [(each["Name"], each.get("Count", 0)) for each in (*gpus, *chips)])


def base(asked: str, offer: Offer, need: Need) -> tuple[str, int]:
    """What a machine starts from, an AMI or the SSM parameter that holds it, and GB of its disk; "" asks for a fit."""
    words("base image of AWS", asked or None, *FACTS["settings"]["ami"][:2])
    has, release = offer.accelerator, asked.removeprefix("ubuntu-") or "24.04"
    driven = has.runtime if has and has.name not in FACTS["undriven"] and has.runtime in FACTS["images"] else ""
    release = "22.04" if has and has.runtime in ("neuron", "hpu") and not (driven or asked) else release
    name = asked if asked.startswith(("ami-", "/")) else FACTS["images"][driven or release]
    arm = {"arch": "arm64", "cpu": "arm64"} if offer.arch == "arm64" else {"arch": "x86_64", "cpu": "amd64"}
    return name.format(release=release, **arm), max(120 if driven else 30, math.ceil(need.disk_gib))


def extras(region: str, disk_gb: int) -> float:
    """USD an hour beside the instance: disk (aws.amazon.com/ebs/pricing as quoted on 2021-07-14) and public address."""
    return disk_gb * float(FACTS["gp3"].get(region, FACTS["gp3"]["ap-east-1"])) / _MONTH + _ADDRESS


def on_demand(rows: Iterable[str]) -> Iterator[tuple[tuple[str, str], float]]:
    """USD an hour by (region, instance type), of GetProducts' PriceList. Capacity blocks have rows of 0 there."""
    for row in map(json.loads, rows):
        about, terms = row["product"]["attributes"], row["terms"].get("OnDemand", {}).values()
        for dimension in (each for term in terms for each in term["priceDimensions"].values()):
            if (usd := float(dimension["pricePerUnit"].get("USD", 0))) > 0:
                yield (about["regionCode"], about["instanceType"]), usd
