"""What Verda sells, in skypool's words: instance types, prices, images. Pure.

API: GET /instance-types, /instance-availability, /volume-types at https://api.verda.com/v1/docs (read 2026-11-21).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import sold
from skypool.errors import ProviderError
from skypool.model import Market, Need, Offer

_IMAGE = re.compile(r"ubuntu-(\d\d\.\d\d)(?:-cuda-(\d+)\.(\d+))?(-open)?(-docker)?")
_ONLY_CLOSED = ("V100",)  # which no open kernel module drives
_GRACE = ("GH200", "GB200", "GB300")
_MONTH = 730.0  # hours
_LEAST_GB, _DRIVEN_GB = 50, 100
DISK = "NVMe"
Stock = Mapping[Market, Mapping[str, Iterable[str]]]
"""The types in stock, by market and by location."""


def offers(record: Mapping[str, Any], stock: Stock, need: Need, usd_per_gb: float, base: str) -> Iterator[Offer]:
    """An instance type wherever it is in stock, or once as sold out; its price with that of its disk.

    Args:
        record: of GET /instance-types; usd_per_gb: of the disk, a month; base: the image, "" for one that fits.

    Raises:
        ProviderError: the prices are in another currency.
    """
    if (currency := str(record.get("currency") or "usd")).lower() != "usd":
        raise ProviderError(f"Verda says its prices in {currency}, though it was asked for USD", provider="verda")
    name, has = record["instance_type"], accelerator(record)
    oses = list(map(str, record.get("supported_os") or ()))
    gb = disk(need, has)
    for market, places in stock.items():
        usd = record.get("spot_price" if market == "spot" else "price_per_hour")
        if not usd or float(usd) <= 0:
            continue  # it is not sold so
        for place in [place for place, types in places.items() if name in types] or [""]:
            yield Offer(
                "verda",
                name,
                place,
                market=market,
                usd_per_hour=float(usd) + gb * usd_per_gb / _MONTH,
                accelerator=has,
                vcpus=float(record["cpu"]["number_of_cores"]),
                memory_gib=float(record["memory"]["size_in_gigabytes"]),
                arch="arm64" if has and has.name in _GRACE else "x86_64",
                available=bool(place),
                detail={"image": base or image(oses, has), "gb": gb},
            )


def accelerator(record: Mapping[str, Any]) -> Accelerator | None:
    """What a type has: by its own name, by its description, by its model with its memory, or by that alone."""
    count, model = int(record["gpu"]["number_of_gpus"]), str(record.get("model") or "")
    if not count:
        return None
    gb = float(record["gpu_memory"]["size_in_gigabytes"]) / count
    names = record["instance_type"], record["gpu"]["description"], f"{model} {gb:g}GB", model, model.split(" ")[0]
    return sold("verda", record["instance_type"], [(each, count) for each in names if each])


def image(oses: Iterable[str], has: Accelerator | None) -> str:
    """The Ubuntu that serves best: 24.04, for GPUs with a driver that fits them; "" where there is none.

    Args:
        oses: image types that the instance type takes.
    """

    def worth(found: re.Match[str]) -> tuple[Any, ...]:
        release, major, minor, is_open, docker = found.groups()
        driven = bool(major) == (has is not None)
        fits = not (is_open and has is not None and has.name in _ONLY_CLOSED)
        version = int(major or 0), int(minor or 0)
        return driven, fits, release == "24.04", version, bool(is_open), not docker

    known = [found for found in map(_IMAGE.fullmatch, oses) if found]
    return max(known, key=worth)[0] if known else ""


def disk(need: Need, has: Accelerator | None) -> int:
    """GB of the disk from which it boots."""
    return max(_DRIVEN_GB if has is not None else _LEAST_GB, math.ceil(need.disk_gib))
