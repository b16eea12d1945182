"""Offers of RunPod in skypool's terms, and the names of its pods. Pure; figures and shapes are in facts.json.

Prices of GPUs are those of one for an hour (https://docs.runpod.io/sdks/graphql/manage-pods), those of CPU instances of
all of it; a container's disk costs by GB and month: https://docs.runpod.io/pods/storage/types (all read 2026-11-21).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Literal

from skypool.accelerators.spelling import meanings, sold
from skypool.drivers import tags
from skypool.drivers.settings import table
from skypool.errors import UsageError
from skypool.model import Instance, Need, Offer

FACTS: dict[str, Any] = table("skypool_runpod", "facts.json")

_MONTH_HOURS = 730
"""Hours in the month for which RunPod prices a disk."""

_LONGEST_NAME = 191
"""Characters of a pod's name. A longer one would be cut off, and never be found again."""

_SSH_PORT = 22
"""Port in the container at which sshd listens."""

_LEAST_BILLED = 0.0
"""Seconds that are billed for at least: none. Pods are billed by the second, computing and storage alike:
https://docs.runpod.io/pods/pricing (read 2026-11-22).
"""

_NAME_TAGS = (tags.POOL, tags.OWNER, tags.TOKEN, tags.NODES, tags.UNTIL)
"""The tag for each part of a pod's name, in order."""

Terms = dict[str, Any]
"""What RunPod is told, by the names that facts.json has."""


def where(cloud: str, place: str) -> Terms:
    """Return the terms of a place.

    Args:
        cloud: "secure" or "community".
        place: a data centre of the secure cloud, or a country of the community cloud; "" for any.
    """
    secure = cloud == "secure"
    return {
        "cloud": cloud.upper(),
        "secure": secure,
        "center": (place or None) if secure else None,
        "country": None if secure else (place or None),
        "at": (cloud, place),
    }


def gpus(need: Need) -> list[Terms]:
    """Return the numbers of GPUs that are asked for, of each software family."""
    asked = sorted({(each.count, each.runtime) for each in need.accelerators if each.kind != "cpu"})
    return [
        {
            "count": count,
            "runtime": runtime,
            "instance": None,
            "vcpus": math.ceil(need.vcpus) or None,
            "memory": math.ceil(need.memory_gib) or None,
        }
        for count, runtime in asked
    ]


def kinds(need: Need) -> dict[str, Any]:
    """Return a filter for the GPU types that could serve. It passes all where the name of one is not known yet."""
    names = {each.name for each in need.accelerators}
    known = meanings("runpod")
    if not names <= {has.name for has in known.values()}:
        return {}
    return {"ids": [id for id, has in known.items() if has.name in names]}


def cpus(need: Need, flavors: Iterable[Mapping[str, Any]]) -> Iterator[Terms]:
    """Yield the smallest instance of each flavor that is enough.

    An instance has a power of two of vCPUs, each with its memory and its room on the disk.
    """
    disk = disk_gb(need, "none")
    for flavor in flavors:
        memory_per_vcpu = flavor["ramMultiplier"]
        disk_per_vcpu = flavor["diskLimitPerVcpu"] or disk
        least = max(need.vcpus, need.memory_gib / memory_per_vcpu, disk / disk_per_vcpu, flavor["minVcpu"], 2)
        vcpus = 2 ** math.ceil(math.log2(least))
        if vcpus > flavor["maxVcpu"]:
            continue
        memory = vcpus * memory_per_vcpu
        yield {
            "count": 1,
            "runtime": "none",
            "instance": f"{flavor['id']}-{vcpus}-{memory:g}",
            "vcpus": vcpus,
            "memory": memory,
        }


def offers(need: Need, asked: Terms, types: Iterable[Mapping[str, Any]]) -> Iterator[Offer]:
    """Yield what is sold on these terms, on each market. A type that is not in stock has the price it would have."""
    cloud, place = asked["at"]
    count = asked["count"]
    instance = asked["instance"]
    disk = disk_gb(need, asked["runtime"])
    names = {each.name for each in need.accelerators if each.runtime == asked["runtime"]}
    for each in types:
        has = None
        if instance:
            if not instance.startswith(f"{each['id']}-"):
                continue
        else:
            has = sold("runpod", each["id"], [(each["id"], count)])
            if not has or has.name not in names or not each[f"{cloud}Cloud"]:
                continue
        now = each["now"] or {}
        for market in need.markets:
            current, usual = FACTS["markets"][market]
            price = now.get(current) or each.get(f"{cloud}{usual}")
            if not price:
                continue
            yield Offer(
                provider="runpod",
                instance_type=instance or f"{count}x {each['id']}",
                region=place,
                zone=cloud,
                market=market,
                usd_per_hour=price * count + disk * FACTS["disk_usd"] / _MONTH_HOURS,
                accelerator=has.with_count(count) if has else None,
                detail={
                    "gpu": None if instance else each["id"],
                    "instance": instance,
                    "count": count,
                    "price": price,
                    "disk": disk,
                },
                vcpus=max(asked["vcpus"] or 0, now.get("vcpus") or 0) or None,
                memory_gib=max(asked["memory"] or 0, now.get("memory") or 0) or None,
                arch="x86_64",
                available=bool(now.get("stockStatus") and now.get(current)),
                quota="spend limit",
                trust="full" if cloud == "secure" else "data",
                least_billed=_LEAST_BILLED,
            )


def disk_gb(need: Need, runtime: str) -> int:
    """Return the GB of a container's disk."""
    return max(need.disk_gb, int(FACTS["disk"].get(runtime, FACTS["disk"]["none"])))


# --- pods, whose names are in the place of tags --------------------------------------------------------------


def name(pool: str, token: str, node: int, until: datetime | None) -> str:
    """Return the name of a pod of this user: "skypool/train/ann@laptop/0123abcd-1/0/2026-11-21T15:28:00Z".

    Raises:
        UsageError: it would be too long.
    """
    text = f"skypool/{pool}/{tags.owner()}/{token}/{node}/{tags.stamp(until)}"
    if len(text) > _LONGEST_NAME or not re.fullmatch(FACTS["name"], text):
        raise UsageError(
            f"a pod cannot be called {text!r}, in {_LONGEST_NAME} characters: give the pool a shorter name="
        )
    return text


def pods(records: Iterable[Mapping[str, Any]], pool: str | None, owners: str) -> list[Instance]:
    """Return those of these pods that are of a pool, or of all pools, and whose owners match a pattern.

    A pod starts until its ports are mapped. One that was outbid, or stopped, has EXITED, and its disk is billed on. A
    pod that has TERMINATED is no more.
    """
    made = []
    for record in records:
        found = re.fullmatch(FACTS["name"], record["name"] or "")
        status = record["desiredStatus"]
        if found is None or status == "TERMINATED":
            continue
        said: dict[str, str] = dict(zip(_NAME_TAGS, found.groups(), strict=True))
        if pool not in (None, said[tags.POOL]) or not fnmatchcase(said[tags.OWNER], owners):
            continue
        ssh = _ssh(record)
        state: Literal["starting", "running", "ending"] = FACTS["states"].get(status, "ending")
        if status == "RUNNING" and ssh is None:
            state = "starting"
        detail = {"ssh": ssh, "price": record.get("costPerHr") or 0.0}
        made.append(tags.instance("runpod", record["id"], said, 0, state, detail, region="RunPod"))
    return made


def _ssh(record: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the public address of a pod's sshd, or None while its port is not mapped."""
    for port in (record.get("runtime") or {}).get("ports") or ():
        if port["privatePort"] == _SSH_PORT and port["isIpPublic"]:  # the ports of RunPod's proxy are not public
            return port["ip"], port["publicPort"]
    return None
