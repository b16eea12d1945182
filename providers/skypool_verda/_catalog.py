"""What Verda sells, in skypool's words: instance types, prices, images. Pure.

API: GET /instance-types, /instance-availability, /volume-types at https://api.verda.com/v1/docs (read 2026-11-21).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import sold
from skypool.drivers.settings import table
from skypool.errors import ProviderError
from skypool.model import Arch, Market, Need, Offer

FACTS: dict[str, Any] = table("skypool_verda", "facts.json")
_IMAGE = re.compile(r"ubuntu-(\d\d\.\d\d)(?:-cuda-(\d+)\.(\d+))?(-open)?(-docker)?")
_LEAST_BILLED = 0.0
"""Seconds that are billed for at least: none. Verda takes ten minutes at a time from the balance, and returns what an
instance that was deleted has not used of them in the next billing period. Only the time used is a cost, therefore.
https://docs.verda.com/welcome-to-verda/pricing-and-billing, as third parties quoted it in September 2026 (2026-11-22).
"""
Stock = Mapping[Market, Mapping[str, Iterable[str]]]  # types by market and location


def offers(record: Mapping[str, Any], stock: Stock, need: Need, usd_per_gb: float, base: str) -> Iterator[Offer]:
    """A type wherever it is in stock, or once as sold out, with a disk of so much a month; base "" is a fit."""
    name, has, currency = record["instance_type"], accelerator(record), str(record.get("currency") or "usd")
    if currency.lower() != "usd":
        raise ProviderError(f"Verda says its prices in {currency}, though it was asked for USD", provider="verda")
    gb = max(FACTS["gb"]["driven" if has else "plain"], need.disk_gb)
    detail = {"image": base or image(map(str, record.get("supported_os") or ()), has), "gb": gb}
    arch: Arch = "arm64" if has and has.name in FACTS["arm"] else "x86_64"
    cpus, gib = float(record["cpu"]["number_of_cores"]), float(record["memory"]["size_in_gigabytes"])
    offer = Offer(
        "verda",
        name,
        accelerator=has,
        arch=arch,
        detail=detail,
        vcpus=cpus,
        memory_gib=gib,
        least_billed=_LEAST_BILLED,
    )
    for market, places in stock.items():
        usd = float(record.get("spot_price" if market == "spot" else "price_per_hour") or 0)
        for place in [each for each, types in places.items() if name in types] or [""] if usd > 0 else ():
            price = usd + gb * usd_per_gb / FACTS["month"]
            yield replace(offer, region=place, available=bool(place), market=market, usd_per_hour=price)


def accelerator(record: Mapping[str, Any]) -> Accelerator | None:
    """What a type has: by its own name, by its description, by its model with its memory, or by that alone."""
    count, model = int(record["gpu"]["number_of_gpus"]), str(record.get("model") or "")
    if not count:
        return None
    gb = float(record["gpu_memory"]["size_in_gigabytes"]) / count
    names = record["instance_type"], record["gpu"]["description"], f"{model} {gb:g}GB", model, model.partition(" ")[0]
    return sold("verda", record["instance_type"], [(each, count) for each in names if each])


def image(oses: Iterable[str], has: Accelerator | None) -> str:
    """Of the image types that a machine takes, the Ubuntu that serves best, "" for none: 24.04, with a GPU's driver."""

    def worth(found: re.Match[str]) -> tuple[object, ...]:
        release, major, minor, is_open, docker = found.groups()
        fits = not (is_open and has and has.name in FACTS["only closed drivers"])
        newest = release == "24.04", int(major or 0), int(minor or 0)
        return bool(major) == bool(has), fits, *newest, bool(is_open), not docker

    return max(filter(None, map(_IMAGE.fullmatch, oses)), key=worth, default=[""])[0]
