"""Converts RunPod's records into offers and instances, and writes and reads the names of pods.

This module sends no requests. Constants such as disk sizes and images are in facts.json. A GPU's price is for one GPU
and hour (https://docs.runpod.io/sdks/graphql/manage-pods). A CPU instance's price is for the whole instance and hour. A
container's disk is priced by GB and month:
https://docs.runpod.io/pods/storage/types (all read 2026-11-21).
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
"""Hours in a month, for the price of a disk."""

_LONGEST_NAME = 191
"""Maximum length of a pod's name, in characters. RunPod would cut a longer name."""

_SSH_PORT = 22
"""Port of sshd in the container."""

_LEAST_BILLED = 0.0
"""Minimum number of seconds billed: none. Pods are billed by the second, for computing and storage:
https://docs.runpod.io/pods/pricing (read 2026-11-22).
"""

_NAME_TAGS = (tags.POOL, tags.OWNER, tags.TOKEN, tags.NODES, tags.UNTIL)
"""Keys of the values in a pod's name, in the order of the values. Other providers store these values in tags."""

Terms = dict[str, Any]
"""The values for one request to RunPod. Keys are the names of placeholders in the request's template in facts.json."""


def where(cloud: str, place: str) -> Terms:
    """Return those values for a request to RunPod that select a cloud and a place in this cloud.

    The keys of the dict are the names of placeholders in facts.json.

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
    """Return the values for a request to RunPod for each pair of GPU count and software family in a need.

    A software family is a text such as "cuda". The values are dicts, sorted by count and family. Their keys are the
    names of placeholders in facts.json. Minimum vCPUs and memory (in GB) are rounded up. The list is empty if no GPUs
    are needed.
    """
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
    """Return a filter {"ids": […]} that selects RunPod's GPU types with an accelerator of the need.

    Returns {}, which selects all types, if skypool does not know RunPod's name for one of these accelerators.
    """
    names = {each.name for each in need.accelerators}
    known = meanings("runpod")
    if not names <= {has.name for has in known.values()}:
        return {}
    return {"ids": [id for id, has in known.items() if has.name in names]}


def cpus(need: Need, flavors: Iterable[Mapping[str, Any]]) -> Iterator[Terms]:
    """Yield the smallest sufficient CPU instance of each flavor, as a dict of values for a request to RunPod.

    A flavor is one of RunPod's series of CPU instances. The number of vCPUs is a power of two. Memory and the largest
    possible disk grow with this number. A flavor without a sufficient instance is left out.

    Args:
        need: the requirements, of which vCPUs, memory and disk are used.
        flavors: the records of the flavors at RunPod.
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
    """Yield the offers in RunPod's answer, for each market (on demand, spot) with a price.

    Prices are in USD per hour for all GPUs together, with the disk. If a type is out of stock, the offer has the type's
    usual price, and is marked as not available. Types without a needed accelerator are left out.

    Args:
        need: the requirements of each node.
        asked: the values that were sent in the request.
        types: the records of GPU types or CPU flavors in RunPod's answer.
    """
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
    """Return the size of a container's disk in GB: the size in the need, but at least a minimum.

    The minimum depends on the software family `runtime`: images for "cuda" and "rocm" are larger than others. An
    unknown family counts as "none".
    """
    return max(need.disk_gb, int(FACTS["disk"].get(runtime, FACTS["disk"]["none"])))


# --- pods, whose names replace tags --------------------------------------------------------------------------


def name(pool: str, token: str, node: int, until: datetime | None) -> str:
    """Return the name for a pod of this user, such as "skypool/train/ann@laptop/0123abcd-1/0/2026-11-21T15:28:00Z".

    The parts are pool, owner, token of the order, node number, and `until` (the end of the lease). The last part is
    empty if `until` is None.

    Raises:
        UsageError: the name has more than 191 characters, or a part has a character that is not allowed.
    """
    text = f"skypool/{pool}/{tags.owner()}/{token}/{node}/{tags.stamp(until)}"
    if len(text) > _LONGEST_NAME:
        raise UsageError(
            f"RunPod cannot name a pod {text!r}, because names have at most {_LONGEST_NAME} characters; give the "
            "pool a shorter name="
        )
    if not re.fullmatch(FACTS["name"], text):
        raise UsageError(
            f"skypool cannot name a pod of RunPod {text!r}, because a part between slashes has a character that is not "
            "allowed there; a pool's name= may have only a-z, 0-9 and '-'"
        )
    return text


def pods(records: Iterable[Mapping[str, Any]], pool: str | None, owners: str) -> list[Instance]:
    """Return the instances in RunPod's records that belong to a pool, or to all pools if `pool` is None.

    Records with names that skypool did not write, and pods with the status TERMINATED, are left out. A pod has
    the state "starting" until its ssh port is mapped. A pod with the status EXITED was outbid or stopped. The disk of
    such a pod is still billed, so the pod is returned with the state "ending".

    Args:
        records: RunPod's records of pods.
        pool: name of the pool; None for all pools.
        owners: pattern that the owner in a pod's name must match, such as "ann@*". "*" matches any text.
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
    """Return the public host and port of a pod's ssh server, or None while its port 22 is not mapped.

    An address of RunPod's proxy is not returned. `record` is RunPod's record of the pod.
    """
    for port in (record.get("runtime") or {}).get("ports") or ():
        if port["privatePort"] == _SSH_PORT and port["isIpPublic"]:  # the ports of RunPod's proxy are not public
            return port["ip"], port["publicPort"]
    return None
