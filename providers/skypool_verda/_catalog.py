"""Converts Verda's records into offers: instance types, prices and images. This module sends no requests.

API: GET /instance-types, /instance-availability, /volume-types at https://api.verda.com/v1/docs (read 2026-11-21).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import sold
from skypool.errors import ProviderError
from skypool.model import Arch, Market, Need, Offer

_IMAGE = re.compile(r"ubuntu-(\d\d\.\d\d)(?:-cuda-(\d+)\.(\d+))?(-open)?(-docker)?")
"""Matches an Ubuntu image's name. The groups are release, CUDA version in two parts, "-open" for NVIDIA's open driver,
and "-docker".
"""

_PLAIN_DISK_GB = 50
"""Minimum disk of a machine without a GPU, in GB."""

_GPU_DISK_GB = 100
"""Minimum disk of a machine with a GPU, in GB. Its images contain a driver, CUDA and usually Docker."""

_MONTH_HOURS = 730.0
"""Hours in a month, for the price of a disk."""

_ARM = ("GH200", "GB200", "GB300")
"""Accelerators whose machines have an ARM processor."""

_CLOSED_DRIVERS_ONLY = ("V100",)
"""Accelerators that NVIDIA's open driver does not support."""

_LEAST_BILLED = 0.0
"""Minimum number of seconds billed: there is none. Verda charges the balance for ten minutes in advance. In the next
billing period, Verda returns the money for the time that a deleted instance did not use. So only the time used costs.
https://docs.verda.com/welcome-to-verda/pricing-and-billing, as third parties quoted it in September 2026 (2026-11-22).
"""

Stock = Mapping[Market, Mapping[str, Iterable[str]]]
"""A dict from market to a dict from location to the names of the instance types that are in stock there."""


def offers(
    record: Mapping[str, Any], stock: Stock, need: Need, usd_per_gb_month: float, base_image: str
) -> Iterator[Offer]:
    """Yield the offers of an instance type: one for each market with a price and each location with stock.

    For a market on which the type is sold out, there is one offer without a location, which is marked as not available.
    The price includes the disk.

    Args:
        record: Verda's record of the instance type.
        stock: what is in stock: a dict from market to a dict from location to names of instance types.
        need: the requirements of a node, of which the disk size is used.
        usd_per_gb_month: price of the disk in USD for one GB and month.
        base_image: name of the image to start from; "" takes an image that fits the type.

    Raises:
        ProviderError: the price is not in USD.
    """
    currency = str(record.get("currency") or "usd")
    if currency.lower() != "usd":
        raise ProviderError(
            f"Verda listed prices in {currency}, although USD was requested, so they cannot be compared; "
            "choose another provider",
            provider="verda",
        )
    name = record["instance_type"]
    has = accelerator(record)
    disk_gb = max(_GPU_DISK_GB if has else _PLAIN_DISK_GB, need.disk_gb)
    supported_images = [str(each) for each in record.get("supported_os") or ()]
    arch: Arch = "arm64" if has and has.name in _ARM else "x86_64"
    offer = Offer(
        "verda",
        name,
        accelerator=has,
        arch=arch,
        detail={"image": base_image or image(supported_images, has), "gb": disk_gb},
        vcpus=float(record["cpu"]["number_of_cores"]),
        memory_gib=float(record["memory"]["size_in_gigabytes"]),
        least_billed=_LEAST_BILLED,
    )
    disk_usd_per_hour = disk_gb * usd_per_gb_month / _MONTH_HOURS
    for market, types_by_location in stock.items():
        usd_per_hour = float(record.get("spot_price" if market == "spot" else "price_per_hour") or 0)
        if usd_per_hour <= 0:
            continue
        locations = [location for location, types in types_by_location.items() if name in types]
        for location in locations or [""]:
            yield replace(
                offer,
                region=location,
                available=bool(location),
                market=market,
                usd_per_hour=usd_per_hour + disk_usd_per_hour,
            )


def accelerator(record: Mapping[str, Any]) -> Accelerator | None:
    """Return the accelerators of an instance type, with their count; None if it has none that skypool knows.

    The type's name is looked up first, then the description of the GPU, the model with the memory, and the model alone.
    """
    count = int(record["gpu"]["number_of_gpus"])
    if not count:
        return None
    model = str(record.get("model") or "")
    gb = float(record["gpu_memory"]["size_in_gigabytes"]) / count
    names = (
        record["instance_type"],
        record["gpu"]["description"],
        f"{model} {gb:g}GB",
        model,
        model.partition(" ")[0],
    )
    return sold("verda", record["instance_type"], [(each, count) for each in names if each])


def image(names: Iterable[str], has: Accelerator | None) -> str:
    """Return the name of the most suitable Ubuntu image, or "" if none of the names is an Ubuntu image.

    `has` is the accelerator of the machine, None for a machine without one.

    For a machine with a GPU, images with a driver are preferred. For other machines, images without a driver are
    preferred. Then Ubuntu 24.04 and the newest CUDA version are preferred.
    """

    def worth(found: re.Match[str]) -> tuple[object, ...]:
        release, major, minor, is_open, docker = found.groups()
        needs_closed = has is not None and has.name in _CLOSED_DRIVERS_ONLY
        return (
            bool(major) == bool(has),
            not (is_open and needs_closed),
            release == "24.04",
            int(major or 0),
            int(minor or 0),
            bool(is_open),
            not docker,
        )

    known = [found for found in map(_IMAGE.fullmatch, names) if found]
    return max(known, key=worth)[0] if known else ""
