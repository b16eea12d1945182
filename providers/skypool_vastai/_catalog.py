"""Converts Vast.ai's records (parsed JSON) into offers and instances. This module sends no requests.

Fields: https://docs.vast.ai/api-reference/search/search-offers (read 2026-11-21).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from skypool.accelerators import Accelerator, parse
from skypool.accelerators.accelerator import as_reported
from skypool.drivers import tags
from skypool.errors import UsageError
from skypool.model import Arch, Instance, Market, Offer
from skypool_vastai._requests import LONGEST_OWNER, MIB_PER_GIB

_LEAST_BILLED = 0.0
"""Minimum number of seconds billed: none. The GPU is billed for each second in which an instance is active, and the
storage for each second in which it exists: https://docs.vast.ai/billing-help (read 2026-11-22).
"""

_ARCHES: dict[str, Arch] = {"amd64": "x86_64", "arm64": "arm64"}
"""A dict from Vast.ai's name of a processor architecture to skypool's name."""

_STARTING = (None, "", "created", "loading", "rebooting", "unknown")
"""Values of the field `actual_status` of an instance that is starting."""

_LABEL = re.compile(r"skypool pool=(\S+) owner=(\S+) token=([a-z0-9-]+) rank=(\d+) until=(\S*)")
"""Pattern of the label of an instance that a pool created."""

_LABEL_TAGS = (tags.POOL, tags.OWNER, tags.TOKEN, tags.NODES, tags.UNTIL)
"""The tags that the values in a label stand for, in the order of the values. Vast.ai itself has no tags."""

_BROKEN = re.compile("Error response from daemon|OCI runtime")
"""Matches a text in the field `status_msg` of an instance if Docker failed on the machine."""


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


def ours(records: Iterable[Mapping[str, Any]], pool: str | None) -> Iterator[Instance]:
    """Yield the instances of this user's pools, or of one pool, from Vast.ai's records of instances.

    Instances are found by their labels.

    Args:
        pool: name of a pool, for only the instances of this pool that were rented from this computer. None means all
            pools, from any computer.
    """
    for record in records:
        found = _LABEL.fullmatch(str(record.get("label") or ""))
        if found is None:
            continue
        said: dict[str, str] = dict(zip(_LABEL_TAGS, found.groups(), strict=True))
        if tags.ours(said, pool, LONGEST_OWNER):
            detail = {
                "machine": record["machine_id"],
                "label": found[0],
                "proxied": "ssh" in str(record.get("image_runtype")),
            }
            yield tags.instance(
                "vastai",
                str(record["id"]),
                said,
                0,
                state(record),
                detail,
                region=str(record.get("geolocation") or ""),
                created_at=float(record["start_date"]) if record.get("start_date") else None,
            )


def state(record: Mapping[str, Any]) -> Literal["starting", "running", "ending"]:
    """Return the state of an instance: "starting", "running" or "ending".

    An instance that neither starts nor runs is "ending", such as one that was outbid or has exited. It cannot be used
    any more, and is billed until it is destroyed.
    """
    if record.get("intended_status") == "stopped":
        return "ending"
    status = record.get("actual_status")
    if status in _STARTING:
        return "starting"
    return "running" if status == "running" else "ending"


def trouble(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reason why an instance has no address yet or any more, as an error code and a text.

    The codes are "broken" (Docker failed), "outbid", "pending" (the instance still starts) and "unmapped" (the instance
    runs, but has no port). For any other reason, the code is Vast.ai's status of the instance. An empty record gives
    "pending".
    """
    words = str(record.get("status_msg") or "").strip()
    if _BROKEN.search(words):
        return "broken", words
    if record.get("intended_status") == "stopped":
        return "outbid", "the instance was stopped"
    status = str(record.get("actual_status"))
    if state(record) == "starting":
        return "pending", "the instance's image is not pulled yet"
    if status == "running":
        return "unmapped", "the instance runs, but none of its machine's ports is mapped to it"
    return status, words or f"the instance is {status}"


def address(record: Mapping[str, Any], proxied: bool) -> tuple[str, int] | None:
    """Return the pair (host, port) of an instance's SSH server.

    Returns None if the instance does not run, or if the host or the port is not known yet.

    Args:
        proxied: True for the address of Vast.ai's proxy, False for the machine's own.
    """
    if trouble(record)[0] != "unmapped":
        return None
    if proxied:
        host = record.get("ssh_host")
        port = record.get("ssh_port")
    else:
        host = str(record.get("public_ipaddr") or "").strip()
        mapped = (record.get("ports") or {}).get("22/tcp")
        port = mapped[0]["HostPort"] if mapped else None
    return (str(host), int(port)) if host and port else None
