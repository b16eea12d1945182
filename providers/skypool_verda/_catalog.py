"""Offers of Verda in skypool's terms: instance types, prices and images. Pure.

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
"""Name of an Ubuntu image: release, CUDA's version, open driver, Docker."""

_PLAIN_DISK_GB = 50
"""Least disk in GB of a machine without a GPU."""

_GPU_DISK_GB = 100
"""Least disk in GB of a machine with a GPU: its images bring a driver, CUDA and mostly Docker."""

_MONTH_HOURS = 730.0
"""Hours in the month for which Verda prices a disk."""

_ARM = ("GH200", "GB200", "GB300")
"""Accelerators whose machines have an ARM processor."""

_CLOSED_DRIVERS_ONLY = ("V100",)
"""Accelerators that NVIDIA's open driver does not know."""

_LEAST_BILLED = 0.0
"""Seconds that are billed for at least: none. Verda takes ten minutes at a time from the balance, and returns what an
instance that was deleted has not used of them in the next billing period. Only the time used is a cost, therefore.
https://docs.verda.com/welcome-to-verda/pricing-and-billing, as third parties quoted it in September 2026 (2026-11-22).
"""

Stock = Mapping[Market, Mapping[str, Iterable[str]]]
"""Names of the instance types in stock, by market and location."""


def offers(
    record: Mapping[str, Any], stock: Stock, need: Need, usd_per_gb_month: float, base_image: str
) -> Iterator[Offer]:
    """Yield an offer of an instance type for each location that has it, or one that is sold out.

    Args:
        record: the type, as Verda describes it.
        usd_per_gb_month: price of its disk.
        base_image: what a machine starts from; "" takes an image that fits.

    Raises:
        ProviderError: the price is not in USD.
    """
    currency = str(record.get("currency") or "usd")
    if currency.lower() != "usd":
        raise ProviderError(f"Verda says its prices in {currency}, though it was asked for USD", provider="verda")
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
    """Return what an instance type has.

    It is known by the type's own name, or else by its description, by its model with the memory, or by the model alone.
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
    """Return the Ubuntu image that serves best, "" for none: Ubuntu 24.04, with a driver for a machine with a GPU.

    Args:
        names: the images that a machine takes.
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
