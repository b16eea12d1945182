"""Converts Vast.ai's records (parsed JSON) into offers. This module sends no requests.

Fields: https://docs.vast.ai/api-reference/search/search-offers (read 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skypool.accelerators import Accelerator, parse
from skypool.accelerators.accelerator import as_reported
from skypool.errors import UsageError
from skypool.model import Arch, Market, Offer
from skypool_vastai._requests import MIB_PER_GIB

_LEAST_BILLED = 0.0
"""Minimum number of seconds billed: none. The GPU is billed for each second in which an instance is active, and the
storage for each second in which it exists: https://docs.vast.ai/billing-help (read 2026-11-22).
"""

_ARCHES: dict[str, Arch] = {"amd64": "x86_64", "arm64": "arm64"}
"""A dict from Vast.ai's name of a processor architecture to skypool's name."""


def offer(
    record: Mapping[str, Any], market: Market, disk_gb: int, bid: float, ssh: str, traffic_gb: tuple[float, float]
) -> Offer | None:
    """Convert one result of a search to an offer.

    Returns None for a machine without a price (on the spot market: without a minimum bid), or with a driver that is too
    old for its GPUs. The offer's accelerator is None if the machine has no GPU, or an unknown GPU. Prices are in US
    dollars per hour and include the disk.

    Args:
        market: the market that was searched. For "spot", the price is `bid` times the current minimum bid, plus the
            price of the disk.
        disk_gb: disk size in GB for which the search was made, and which the price includes.
        bid: the driver's setting `bid`, a factor.
        ssh: the driver's setting `ssh`. With "proxy", or if the machine has no port of its own, the proxy is used.
        traffic_gb: GB that the machine is assumed to receive, and GB that it is assumed to send.
    """
    has = None
    if record["gpu_ram"]:
        has = accelerator(record["gpu_name"], record["gpu_ram"], record["num_gpus"])
    if has and _is_outdated(has, str(record.get("driver_version") or "")):
        return None
    if record.get("dph_total") is None or record.get("dph_base") is None:
        return None
    usd_per_hour = float(record["dph_total"])  # the whole machine with its disk
    price = None
    if market == "spot":
        if not record.get("min_bid"):
            return None
        price = float(record["min_bid"]) * bid
        disk_usd_per_hour = max(0.0, usd_per_hour - float(record["dph_base"]))
        usd_per_hour = price + disk_usd_per_hour  # a bid does not include the disk
    proxy = ssh == "proxy" or not record.get("direct_port_count")
    machine = record["machine_id"]
    vcpus = record.get("cpu_cores_effective")
    memory_gib = None
    if record.get("cpu_ram"):
        share = float(record.get("gpu_frac") or 1.0)
        memory_gib = float(record["cpu_ram"]) * share / MIB_PER_GIB
    return Offer(
        provider="vastai",
        instance_type=f"{record['gpu_name']}x{record['num_gpus']}",
        region=str(record.get("geolocation") or ""),
        zone=f"machine {machine} by proxy" if proxy else f"machine {machine}",
        market=market,
        usd_per_hour=usd_per_hour,
        accelerator=has,
        detail={
            "ask": record["id"],
            "machine": machine,
            "disk": disk_gb,
            "price": price,
            "proxy": proxy,
        },
        vcpus=float(vcpus) if vcpus else None,
        memory_gib=memory_gib,
        arch=_ARCHES.get(record.get("cpu_arch") or ""),
        available=True,
        trust="data",
        least_billed=_LEAST_BILLED,
        start_usd=traffic_usd(record, *traffic_gb),
        start_note="{:g} GB of traffic in and {:g} GB out".format(*traffic_gb),
    )


def traffic_usd(record: Mapping[str, Any], in_gb: float, out_gb: float) -> float:
    """Return what it costs in US dollars if a machine receives `in_gb` GB and sends `out_gb` GB.

    A price that the machine's record lacks counts as 0.

    Vast.ai charges each byte, in both directions, also the download of the image. The host sets the prices:
    https://vast.ai/docs/billing/billing (read 2026-11-26 in a stored copy).
    """
    return in_gb * float(record.get("inet_down_cost") or 0.0) + out_gb * float(record.get("inet_up_cost") or 0.0)


def _is_outdated(has: Accelerator, driver_version: str) -> bool:
    """Return True if a driver, such as "550.54.15", is too old. Only the part before the first dot is compared."""
    branch = driver_version.partition(".")[0]
    oldest = has.metadata.driver_min
    return oldest is not None and branch.isdecimal() and int(branch) < oldest


def accelerator(name: str, mib: float, count: int) -> Accelerator | None:
    """Return the accelerator with this name at Vast.ai, in the variant (such as 40 or 80 GB) that matches the memory.

    Returns None for an unknown name, and for a card with less than 80 % of the nearest variant's memory.

    Args:
        mib: memory of one GPU in MiB.
        count: number of GPUs.
    """
    try:
        found = as_reported(parse(name, dialect="vastai"), mib)
        return found.with_count(count) if found else None
    except UsageError:
        return None
