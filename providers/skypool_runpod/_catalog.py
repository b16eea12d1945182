"""Converts RunPod's records into offers.

This module sends no requests. Records of the API REST v2 are those of
https://docs.runpod.io/api-reference-v2/openapi.json, records of the GraphQL API those of
https://docs.runpod.io/sdks/graphql/manage-pods. A GPU's price is for one GPU and hour, and a CPU's price for one vCPU
and hour. A container's disk is priced by GB and month: https://docs.runpod.io/pods/storage/types (all read 2026-11-23).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import meanings, sold
from skypool.model import Market, Need, Offer

CLOUDS: Mapping[str, Sequence[str]] = {
    "secure": ("secure",),
    "community": ("community",),
    "any": ("secure", "community"),
}
"""A dict from a value of the setting `cloud` to the clouds of RunPod that it allows."""

IMAGES: Mapping[str, tuple[str, str | None]] = {
    "cuda": ("runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404", "12.8"),
    "rocm": ("runpod/pytorch:2.4.0-py3.10-rocm6.1.0-ubuntu22.04", None),
    "none": ("python:{python}-slim", None),
}
"""A dict from runtime to (default container image, lowest CUDA version that the image needs).

"{python}" stands for the client's Python version, such as "3.12". The CUDA version is None if the image needs no CUDA.
"""

_DISK_GB = {"cuda": 50, "rocm": 100, "none": 20}
"""A dict from runtime to the smallest size of a container's disk, in GB. Images for GPUs need more space."""

_DISK_USD = 0.10
"""Price of one GB of a container's disk for a month, in USD."""

_MONTH_HOURS = 730
"""Hours in a month, for the price of a disk."""

_DISK_PER_VCPU = {"cpu5": 15}
"""A dict from the beginning of a flavor's id to the largest disk of its pods, in GB for each vCPU:
https://docs.runpod.io/flash/configuration/cpu-types (read 2026-11-23).
"""

_USUAL_DISK_PER_VCPU = 10
"""Largest disk of CPU pods, in GB for each vCPU, for flavors that `_DISK_PER_VCPU` lacks."""

_LEAST_BILLED = 0.0
"""Minimum number of seconds billed: none. Pods are billed by the second, for computing and storage:
https://docs.runpod.io/pods/pricing (read 2026-11-22).
"""

_GRAPHQL_PRICES: Mapping[Market, tuple[str, str]] = {
    "on-demand": ("on_demand", "Price"),
    "spot": ("spot", "SpotPrice"),
}
"""A dict from market to the two fields of the GraphQL API in which a GPU type has its prices on this market.

The first value is the field with the current price. The second value is the end of the name of the field with the list
price. The name begins with the cloud: "Price" stands for "securePrice" and "communityPrice".
"""


@dataclass(frozen=True, slots=True)
class Size:
    """The hardware of a pod that a need asks for.

    Attributes:
        count: number of GPUs; 0 for a CPU pod.
        runtime: runtime of the GPUs; "none" for a CPU pod.
        flavor: flavor of a CPU pod; "" for a pod with GPUs.
        vcpus: number of vCPUs: the exact number for a CPU pod, otherwise a minimum. 0 for any.
        memory: memory in RunPod's GB, which skypool treats as GiB. The exact size for a CPU pod, otherwise a minimum. 0
            for any.
    """

    count: int
    runtime: str
    flavor: str = ""
    vcpus: int = 0
    memory: float = 0


class Detail(TypedDict):
    """The driver's own data in `Offer.detail`, from which `launch` builds the request.

    Attributes:
        gpu: id of the GPU type; "" for a CPU pod.
        count: number of GPUs; 0 for a CPU pod.
        flavor: flavor of a CPU pod; "" for a pod with GPUs.
        vcpus: number of vCPUs of a CPU pod; 0 for a pod with GPUs.
        price: price in USD per hour without the disk, for one GPU or for the whole CPU pod. A spot pod bids this price
            for each GPU.
        disk: size of the container's disk in GB.
        graphql: True if the pod must be created by the GraphQL API.
    """

    gpu: str
    count: int
    flavor: str
    vcpus: int
    price: float
    disk: int
    graphql: bool


# --- what a need asks for ------------------------------------------------------------------------------------


def gpu_sizes(need: Need) -> list[Size]:
    """Return the sizes of GPU pods that a need asks for: one for each pair of GPU count and runtime in it, sorted.

    The minimum vCPUs and memory of the need are rounded up to whole numbers.
    """
    asked = sorted({(each.count, each.runtime) for each in need.accelerators if each.kind != "cpu"})
    vcpus, memory = math.ceil(need.vcpus), math.ceil(need.memory_gib)
    return [Size(count, runtime, vcpus=vcpus, memory=memory) for count, runtime in asked]


def cpu_sizes(need: Need, flavors: Iterable[Mapping[str, Any]]) -> Iterator[Size]:
    """Yield the smallest sufficient size of each flavor, from RunPod's records of the flavors.

    The number of vCPUs is a power of two, and decides the memory and the largest possible disk. A flavor without a
    sufficient size is left out.
    """
    disk = disk_gb(need, "none")
    for flavor in flavors:
        per_vcpu = flavor["ramGbPerVcpu"]
        disk_per_vcpu = _DISK_PER_VCPU.get(flavor["id"][:4], _USUAL_DISK_PER_VCPU)
        least = max(need.vcpus, need.memory_gib / per_vcpu, disk / disk_per_vcpu, flavor["vcpu"]["min"], 2)
        vcpus = 2 ** math.ceil(math.log2(least))
        if vcpus <= flavor["vcpu"]["max"]:
            yield Size(0, "none", flavor["id"], vcpus, vcpus * per_vcpu)


def disk_gb(need: Need, runtime: str) -> int:
    """Return the size of a container's disk in GB: the size in the need, but at least a minimum for the runtime.

    Images for "cuda" and "rocm" are larger than others. An unknown runtime counts as "none".
    """
    return max(need.disk_gb, _DISK_GB.get(runtime, _DISK_GB["none"]))


def known_ids(need: Need) -> list[str] | None:
    """Return the ids of RunPod's GPU types whose accelerator the need names.

    Returns None if skypool does not know RunPod's name for one of the need's accelerators. All types must then be
    searched.
    """
    names = {each.name for each in need.accelerators}
    known = meanings("runpod")
    if not names <= {has.name for has in known.values()}:
        return None
    return [id for id, has in known.items() if has.name in names]


# --- offers --------------------------------------------------------------------------------------------------


def gpu_offers(need: Need, size: Size, places: Sequence[str], types: Iterable[Mapping[str, Any]]) -> Iterator[Offer]:
    """Yield the on-demand offers of pods with GPUs in RunPod's data centres, from records of the API REST v2.

    There is one offer for each GPU type and place. Types that are not among the needed accelerators are left out. So
    are types of which no machine has the needed number. A type that is out of stock is marked as not available.

    Args:
        size: the size whose stock and prices the records have.
        places: data centres; "" for any.
        types: the records of GPU types.
    """
    for each in types:
        has = _accelerator(need, size, each["id"])
        price = each["price"]["secure"]
        if has is None or not each["secure"] or not price or size.count > each["maxCount"]["secure"]:
            continue
        for place in places:
            yield _offer(need, size, has, each["id"], price, place, _in_stock(each, place))


def any_offer(types: Iterable[Mapping[str, Any]]) -> Iterator[Offer]:
    """Yield an offer of a pod with one GPU, in any data centre, for each GPU type that skypool knows.

    Types that are out of stock are included, marked as not available.
    """
    for each in types:
        has = sold("runpod", each["id"], [(each["id"], 1)])
        if has is not None and each["secure"] and each["price"]["secure"]:
            size = Size(1, has.runtime)
            yield _offer(Need(), size, has, each["id"], each["price"]["secure"], "", _in_stock(each, ""))


def unknown(ids: Iterable[str]) -> list[str]:
    """Return those of RunPod's ids of GPU types whose GPU skypool does not know, so that it cannot offer them."""
    return [id for id in ids if sold("runpod", id, [(id, 1)]) is None]


def cpu_offers(need: Need, size: Size, places: Sequence[str], types: Iterable[Mapping[str, Any]]) -> Iterator[Offer]:
    """Yield the offers of one size of CPU pods, one for each place, from records of the API REST v2.

    Args:
        size: the size whose stock the records have. Records of other flavors are ignored.
        places: data centres; "" for any.
        types: the records of flavors.
    """
    for each in types:
        price = each["price"]["securePerVcpu"]
        if each["id"] == size.flavor and price:
            for place in places:
                yield _offer(need, size, None, "", price * size.vcpus, place, _in_stock(each, place))


def graphql_offers(
    need: Need, size: Size, cloud: str, place: str, markets: Iterable[Market], types: Iterable[Mapping[str, Any]]
) -> Iterator[Offer]:
    """Yield the offers of pods with GPUs in one place, for each market with a price, from the GraphQL API's records.

    If a type is out of stock, the offer has the type's usual price, and is marked as not available. Types that are not
    among the needed accelerators are left out.

    Args:
        size: the size whose stock and prices the records have.
        cloud: "secure" or "community".
        place: a data centre or country; "" for any.
        types: the records of GPU types.
    """
    for each in types:
        has = _accelerator(need, size, each["id"])
        if has is None or not each[f"{cloud}Cloud"]:
            continue
        now = each["now"] or {}
        for market in markets:
            current, usual = _GRAPHQL_PRICES[market]
            price = now.get(current) or each.get(f"{cloud}{usual}")
            if price:
                there = bool(now.get("stockStatus") and now.get(current))
                yield _offer(need, size, has, each["id"], price, place, there, cloud=cloud, market=market, now=now)


def _accelerator(need: Need, size: Size, id: str) -> Accelerator | None:
    """Return the accelerators of a pod with GPUs of this type; None if the need does not ask for them."""
    has = sold("runpod", id, [(id, size.count)])
    names = {each.name for each in need.accelerators if each.runtime == size.runtime}
    # several partitions could be of different cards, and the setup of a node expects equal cards
    if has is None or has.name not in names or (has.profile and size.count > 1):
        return None
    return has.with_count(size.count)


def _in_stock(record: Mapping[str, Any], place: str) -> bool:
    """Return True if a GPU type or flavor is in stock in a data centre, or in any if `place` is ""."""
    if not place:
        return bool(record.get("availability", "NONE") != "NONE")
    return any(each["id"] == place and each["availability"] != "NONE" for each in record.get("dataCenters") or ())


def _offer(
    need: Need,
    size: Size,
    has: Accelerator | None,
    gpu: str,
    price: float,
    place: str,
    available: bool,
    *,
    cloud: str = "secure",
    market: Market = "on-demand",
    now: Mapping[str, Any] | None = None,
) -> Offer:
    """Return an offer. `price` is in USD per hour, for one GPU or the whole CPU pod. `now`: lowest price and stock."""
    disk = disk_gb(need, size.runtime)
    told = now or {}
    detail: Detail = {
        "gpu": gpu,
        "count": size.count,
        "flavor": size.flavor,
        "vcpus": size.vcpus if size.flavor else 0,
        "price": price,
        "disk": disk,
        "graphql": now is not None,
    }
    return Offer(
        provider="runpod",
        instance_type=f"{size.flavor}-{size.vcpus}-{size.memory:g}" if size.flavor else f"{size.count}x {gpu}",
        region=place,
        zone=cloud,
        market=market,
        usd_per_hour=price * max(size.count, 1) + disk * _DISK_USD / _MONTH_HOURS,
        accelerator=has,
        detail=dict(detail),
        vcpus=max(size.vcpus, told.get("vcpus") or 0) or None,
        memory_gib=max(size.memory, told.get("memory") or 0) or None,
        arch="x86_64",
        available=available,
        quota="spend limit",
        trust="full" if cloud == "secure" else "data",
        least_billed=_LEAST_BILLED,
    )
