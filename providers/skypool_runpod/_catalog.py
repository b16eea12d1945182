"""What RunPod sells, in skypool's words, and what its pods are called. Pure; figures and shapes are in facts.json.

Prices of GPUs are those of one for an hour (https://docs.runpod.io/sdks/graphql/manage-pods), those of CPU instances of
all of it; a container's disk costs by GB and month: https://docs.runpod.io/pods/storage/types (all read 2026-11-21).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from skypool.accelerators.spelling import meanings, sold
from skypool.drivers import tags
from skypool.drivers.settings import table
from skypool.errors import UsageError
from skypool.model import Instance, Need, Offer

FACTS: dict[str, Any] = table("skypool_runpod", "facts.json")
_LEAST_BILLED = 0.0
"""Seconds that are billed for at least: none. Pods are billed by the second, computing and storage alike:
https://docs.runpod.io/pods/pricing (read 2026-11-22).
"""
_SAID = tags.POOL, tags.OWNER, tags.TOKEN, tags.RANKS, tags.UNTIL
Terms = dict[str, Any]  # what RunPod is told, by the names that facts.json has


def where(cloud: str, place: str) -> Terms:
    """A place: "secure" or "community", and its data centre or country, "" for any."""
    secure, at = cloud == "secure", place or None
    center, country = (at, None) if secure else (None, at)
    return {"cloud": cloud.upper(), "secure": secure, "center": center, "country": country, "at": (cloud, place)}


def gpus(need: Need) -> list[Terms]:
    """The numbers of GPUs that are asked for, of each software family."""
    least = {"instance": None, "vcpus": math.ceil(need.vcpus) or None, "memory": math.ceil(need.memory_gib) or None}
    asked = sorted({(each.count, each.runtime) for each in need.accelerators if each.kind != "cpu"})
    return [{"count": count, "runtime": runtime, **least} for count, runtime in asked]


def kinds(need: Need) -> dict[str, Any]:
    """A filter for GPU types that could serve; all of them where the name of one is not known yet."""
    names, known = {each.name for each in need.accelerators}, meanings("runpod")
    ids = [id for id, has in known.items() if has.name in names]
    return {"ids": ids} if names <= {has.name for has in known.values()} else {}


def cpus(need: Need, flavors: Iterable[Mapping[str, Any]]) -> Iterator[Terms]:
    """Of each flavor the smallest instance that is enough: a power of two of vCPUs, each with its memory and disk."""
    disk = disk_gb(need, "none")
    for flavor in flavors:
        per, room = flavor["ramMultiplier"], flavor["diskLimitPerVcpu"] or disk
        vcpus = 2 ** math.ceil(math.log2(max(need.vcpus, need.memory_gib / per, disk / room, flavor["minVcpu"], 2)))
        if vcpus <= flavor["maxVcpu"]:
            memory = vcpus * per
            id = f"{flavor['id']}-{vcpus}-{memory:g}"
            yield {"count": 1, "runtime": "none", "instance": id, "vcpus": vcpus, "memory": memory}


def offers(need: Need, asked: Terms, types: Iterable[Mapping[str, Any]]) -> Iterator[Offer]:
    """What is sold on these terms, on each market. What is not in stock has the price it would have."""
    (cloud, place), count, id, disk = asked["at"], asked["count"], asked["instance"], disk_gb(need, asked["runtime"])
    names = {each.name for each in need.accelerators if each.runtime == asked["runtime"]}
    for each in types:
        has, now = None if id else sold("runpod", each["id"], [(each["id"], count)]), each["now"] or {}
        if not (id.startswith(f"{each['id']}-") if id else has and has.name in names and each[f"{cloud}Cloud"]):
            continue
        for market in need.markets:
            name, usual = FACTS["markets"][market]
            if price := now.get(name) or each.get(f"{cloud}{usual}"):
                yield Offer(
                    "runpod", id or f"{count}x {each['id']}", place, cloud, market,
                    price * count + disk * FACTS["disk_usd"] / 730, has and has.with_count(count),
                    {"gpu": None if id else each["id"], "instance": id, "count": count, "price": price, "disk": disk},
                    vcpus=max(asked["vcpus"] or 0, now.get("vcpus") or 0) or None,
                    memory_gib=max(asked["memory"] or 0, now.get("memory") or 0) or None,
                    arch="x86_64", available=bool(now.get("stockStatus") and now.get(name)), quota="spend limit",
                    trust="full" if cloud == "secure" else "data", least_billed=_LEAST_BILLED,
                )  # fmt: skip


def disk_gb(need: Need, runtime: str) -> int:
    """GB of a container's disk."""
    return max(need.disk_gb, int(FACTS["disk"].get(runtime, FACTS["disk"]["none"])))


# --- pods, whose names are in the place of tags --------------------------------------------------------------


def name(pool: str, token: str, rank: int, until: datetime | None) -> str:
    """Of a pod of this user: "skypool/train/ann@laptop/0123abcd-1/0/2026-11-21T15:28:00Z"."""
    text = f"skypool/{pool}/{tags.owner()}/{token}/{rank}/{tags.stamp(until)}"
    if len(text) > 191 or not re.fullmatch(FACTS["name"], text):  # one that is cut off would never be found again
        raise UsageError(f"a pod cannot be called {text!r}, in 191 characters: give the pool a shorter name=")
    return text


def pods(records: Iterable[Mapping[str, Any]], pool: str | None, owners: str) -> list[Instance]:
    """Of these pods those of a pool, or of all, whose owners fit a pattern. What has TERMINATED is no more.

    A pod starts until its ports are mapped. One that was outbid, or stopped, has EXITED, and its disk is billed on.
    """
    made = []
    for each in records:
        found, status = re.fullmatch(FACTS["name"], each["name"] or ""), each["desiredStatus"]
        if found is None or status == "TERMINATED" or pool not in (None, found[1]) or not fnmatchcase(found[2], owners):
            continue
        ports = (each.get("runtime") or {}).get("ports") or ()  # those of RunPod's proxy are not public
        ssh = next(((p["ip"], p["publicPort"]) for p in ports if p["privatePort"] == 22 and p["isIpPublic"]), None)
        state: Any = "starting" if (status, ssh) == ("RUNNING", None) else FACTS["states"].get(status, "ending")
        detail = {"ssh": ssh, "price": each.get("costPerHr") or 0.0}
        said = dict(zip(_SAID, found.groups(), strict=True))
        made.append(tags.instance("runpod", each["id"], said, 0, state, detail, region="RunPod"))
    return made
