"""What AWS sells, in skypool's words: instance types, prices, base images. Pure; figures are in facts.json.

API: DescribeInstanceTypes, GetProducts, DescribeSpotPriceHistory at https://docs.aws.amazon.com (read 2026-11-21).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from skypool.accelerators import Accelerator, parse
from skypool.errors import UnknownAccelerator
from skypool.model import Need, Offer

FACTS: dict[str, dict[str, Any]] = json.loads((files("skypool_aws") / "facts.json").read_text())
_ACCELERATED = {"cuda": ("p*", "g*"), "rocm": ("g*",), "neuron": ("trn*", "inf*"), "hpu": ("dl*",), "tpu": ()}
_EVERY = ("p*", "g*", "trn*", "inf*", "dl*")
_PLAIN = [f"{use}{kind}.*" for use in "cmr" for kind in ("5", "?a", "?g", "?i")]
"""Not t, whose price is not all it costs once its credits are spent; not n, d, b, z, which cost more."""
_QUOTAS = {family: quota for quota, (_, _, families) in FACTS["quotas"].items() for family in families.split()}
_LEAST_GIB = 2.0  # of memory, for Python, packages and the agent
_MONTH, _ADDRESS = 730.0, 0.005  # hours; USD an hour: https://aws.amazon.com/vpc/pricing/


def patterns(need: Need) -> list[str]:
    """Of the names of the instance types that could serve."""
    kinds = [_PLAIN if each.kind == "cpu" else _ACCELERATED.get(each.runtime, _EVERY) for each in need.accelerators]
    return sorted({name for names in kinds or [_PLAIN] for name in names})


def kinds(records: Iterable[Mapping[str, Any]], need: Need) -> dict[str, Offer]:
    """The instance types that could serve, as offers without place and price.

    Also those with another number of the same accelerator, for a plan to speak of; of a family without accelerators
    only the smallest that is large enough.
    """
    names, found, plain = {each.name for each in need.accelerators}, dict[str, Offer](), dict[str, Offer]()
    for offer in sorted(map(_kind, records), key=lambda each: (each.vcpus or 0, each.memory_gib or 0)):
        memory, family = (
            max(need.memory_gib, _LEAST_GIB),
            re.match(r"[cmr](5|\d[agi])(?=\.(?!metal))", offer.instance_type),
        )
        if offer.accelerator is not None and offer.accelerator.name in names:
            found[offer.instance_type] = offer
        elif (
            family
            and (offer.vcpus or 0) >= need.vcpus
            and (offer.memory_gib or 0) >= memory
            and need.arch in (None, offer.arch)
        ):
            plain.setdefault(family[0], offer)
    return found | {each.instance_type: each for each in plain.values()}


def _kind(record: Mapping[str, Any]) -> Offer:
    name, markets = record["InstanceType"], tuple(record["SupportedUsageClasses"])
    cluster = "cluster" in record.get("PlacementGroupInfo", {}).get("SupportedStrategies", ())
    efa = bool(record.get("NetworkInfo", {}).get("EfaSupported"))
    return Offer(
        provider="aws",
        instance_type=name,
        accelerator=accelerator(record),
        detail={"markets": markets, "cluster": cluster, "efa": efa, "prepaid": False},
        vcpus=record["VCpuInfo"]["DefaultVCpus"],
        memory_gib=record["MemoryInfo"]["SizeInMiB"] / 1024,
        arch="arm64" if "arm64" in record["ProcessorInfo"]["SupportedArchitectures"] else "x86_64",
        quota=_QUOTAS.get(re.split(r"\d", name)[0], "Standard"),
        least_billed=60.0,
    )


def accelerator(record: Mapping[str, Any]) -> Accelerator | None:
    """What a record of DescribeInstanceTypes has: by the type's own name, where that is known.

    Its figures mislead: each Trainium2 has 512 GiB there and trn2u no device at all, g6f counts no GPU, inf is told of
    twice, and some memory is as it is sold and some as a program sees it.
    """
    fields = ("GpuInfo", "Gpus"), ("NeuronInfo", "NeuronDevices"), ("InferenceAcceleratorInfo", "Accelerators")
    device = next((record[info][several][0] for info, several in fields if record.get(info, {}).get(several)), {})
    if not device and record["InstanceType"][0] in "cmr":
        return None
    try:
        return parse(record["InstanceType"], dialect="aws-type")
    except UnknownAccelerator:
        if not device.get("Count"):
            return None
    try:
        return parse(device["Name"], dialect="aws").with_count(device["Count"])
    except UnknownAccelerator:
        return None


def base(asked: str, offer: Offer, need: Need) -> tuple[str, int]:
    """What a machine starts from, an AMI or the SSM parameter that holds it, and GB of its disk.

    Args:
        asked: either, or "ubuntu-22.04", "ubuntu-24.04", or "" for what fits the offer.
    """
    has, is_arm, release = offer.accelerator, offer.arch == "arm64", asked.removeprefix("ubuntu-") or "24.04"
    runtime = has.runtime if has is not None else "none"
    known = has is not None and (
        float(has.compute_capability or 0) >= 7.5 or (runtime == "neuron" and has.name != "Inferentia1")
    )
    if runtime in ("neuron", "hpu") and not asked:
        release = "22.04"  # where there is no image for what it has, its last SDK is for this
    name = FACTS["images"][runtime if known else release] if not asked.startswith(("ami-", "/")) else asked
    words = {"arch": "arm64", "cpu": "arm64"} if is_arm else {"arch": "x86_64", "cpu": "amd64"}
    return name.format(release=release, **words), max(120 if known else 30, math.ceil(need.disk_gib))


def extras(region: str, disk_gb: int) -> float:
    """USD an hour that a node costs beside its instance: its disk and its public address."""
    gp3: dict[str, float] = FACTS["gp3"]  # https://aws.amazon.com/ebs/pricing/, as public code quoted it on 2021-07-14
    return disk_gb * gp3.get(region, gp3["ap-east-1"]) / _MONTH + _ADDRESS


def on_demand(rows: Iterable[str]) -> Iterator[tuple[tuple[str, str], float]]:
    """USD an hour by (region, instance type), of GetProducts' PriceList. Capacity blocks have rows of 0 there."""
    for row in map(json.loads, rows):
        about, terms = row["product"]["attributes"], row["terms"].get("OnDemand", {}).values()
        for dimension in (each for term in terms for each in term["priceDimensions"].values()):
            if (usd := float(dimension["pricePerUnit"].get("USD", 0))) > 0:
                yield (about["regionCode"], about["instanceType"]), usd


def spot(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """USD an hour by (zone, instance type): the newest of DescribeSpotPriceHistory."""
    by_age = sorted(rows, key=lambda row: row["Timestamp"])
    return {(row["AvailabilityZone"], row["InstanceType"]): float(row["SpotPrice"]) for row in by_age}
