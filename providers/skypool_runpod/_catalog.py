"""What RunPod sells, in skypool's words, and what its pods are called. Pure; figures and shapes are in facts.json.

Prices of GPUs are those of one for an hour (https://docs.runpod.io/sdks/graphql/manage-pods), those of CPU instances of
all of it; a container's disk costs by GB and month: https://docs.runpod.io/pods/storage/types (all read 2026-11-21).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from skypool import tags
from skypool.accelerators import Accelerator
from skypool.accelerators.spelling import meanings, sold
from skypool.asking import filled, table
from skypool.errors import UsageError
from skypool.model import Instance, Market, Need, Offer

FACTS: dict[str, Any] = table("skypool_runpod", "facts.json")
_SAID = tags.POOL, tags.OWNER, tags.TOKEN, tags.RANKS, tags.UNTIL
_LONGEST = 191  # of a name: a pod whose name is cut off would never be found again
Place = tuple[str, str]  # "secure" or "community", and its data centre or country, "" for any
Sizes = Mapping[str, tuple[float, float]]  # vCPUs and GB of memory of CPU instances


def wanted(need: Need) -> list[Accelerator]:
    """The accelerators that a need asks for."""
    return [each for each in need.accelerators if each.kind != "cpu"]


def terms(need: Need, at: Place, cuda: str | None) -> dict[str, Any]:
    """What RunPod is told of a need and a place, for `filled`."""
    cloud, place = at
    where = (
        {"center": place or None, "country": None} if cloud == "secure" else {"center": None, "country": place or None}
    )
    least = {"vcpus": math.ceil(need.vcpus) or None, "memory": math.ceil(need.memory_gib) or None}
    return {"secure": cloud == "secure", "cloud": cloud.upper(), "cuda": cuda, **where, **least}


def question(kind: str, asked: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """What all of this costs, in one question: its text, and its variables n0, n1, … by which the answers are called."""
    type_, fields, shape = FACTS["stock"][kind]
    given = {f"n{n}": filled(shape, each) for n, each in enumerate(asked)}
    told = ", ".join(f"${name}: {type_}" for name in given) + (", $gpus: GpuTypeFilter" if kind == "gpu" else "")
    prices = " ".join(f"{name}: {fields.replace('$this', f'${name}')}" for name in given)
    return f"query Stock({told}) {{ {prices} }}", given


def gpu_types(need: Need) -> dict[str, Any]:
    """A filter for those that could serve; all of them where the name of one is not known yet."""
    names, known = {each.name for each in wanted(need)}, meanings("runpod")
    ids = [id for id, has in known.items() if has.name in names]
    return {"ids": ids} if names <= {has.name for has in known.values()} else {}


def gpus(need: Need, at: Place, count: int, types: Iterable[Mapping[str, Any]]) -> Iterator[Offer]:
    """So many GPUs of each type in a place, on each market. What is not in stock has the price it would have."""
    names, (cloud, place) = {each.name for each in wanted(need)}, at
    for gpu in types:
        has, lowest = sold("runpod", gpu["id"], [(gpu["id"], count)]), gpu.get("lowestPrice") or {}
        if has is None or has.name not in names or not gpu[f"{cloud}Cloud"]:
            continue
        for market, (now, usual) in FACTS["markets"].items():
            price = lowest.get(now) or gpu.get(f"{cloud}{usual}")
            if not price or need.market in {"on-demand", "spot"} - {market}:
                continue
            stock = bool(lowest.get("stockStatus") and lowest.get(now))
            size = max(need.vcpus, lowest.get("minVcpu") or 0), max(need.memory_gib, lowest.get("minMemory") or 0)
            detail = {"gpu": gpu["id"], "count": count, "instance": None, "price": price}
            yield _offer(
                need, f"{count}x {gpu['id']}", at, market, price * count, has.with_count(count), detail, size, stock
            )


def sizes(need: Need, flavors: Iterable[Mapping[str, Any]]) -> Sizes:
    """Of each flavor the smallest CPU instance that is enough: a power of two of vCPUs, each with so much memory and disk."""
    found, disk = {}, disk_gb(need, "none")
    for flavor in flavors:
        per, room = flavor["ramMultiplier"], flavor["diskLimitPerVcpu"] or disk
        vcpus = 2 ** math.ceil(math.log2(max(need.vcpus, need.memory_gib / per, disk / room, flavor["minVcpu"], 2)))
        if vcpus <= flavor["maxVcpu"]:
            found[f"{flavor['id']}-{vcpus}-{vcpus * per:g}"] = vcpus, vcpus * per
    return found


def cpus(
    need: Need, at: Place, id: str, size: tuple[float, float], flavors: Iterable[Mapping[str, Any]]
) -> Iterator[Offer]:
    """A CPU instance in a place."""
    about = next((each["specifics"] or {} for each in flavors if each["id"] == id.partition("-")[0]), {})
    detail = {"gpu": None, "count": None, "instance": id, "price": None}
    if price := about.get("securePrice"):
        yield _offer(need, id, at, "on-demand", price, None, detail, size, bool(about["stockStatus"]))


def _offer(
    need: Need, type_: str, at: Place, market: Market, price: float, has: Accelerator | None,
    detail: Mapping[str, Any], size: tuple[float, float], stock: bool,
) -> Offer:  # fmt: skip
    (cloud, place), disk = at, disk_gb(need, has.runtime if has else "none")
    usd = price + disk * FACTS["disk_usd"] / 730
    trust: Any = "full" if cloud == "secure" else "data"
    return Offer(
        "runpod", type_, place, cloud, market, usd, has, {**detail, "disk": disk}, size[0] or None, size[1] or None,
        arch="x86_64", available=stock, quota="spend limit", trust=trust,
    )  # fmt: skip


def disk_gb(need: Need, runtime: str) -> int:
    """GB of a container's disk."""
    return max(math.ceil(need.disk_gib * 2**30 / 1e9), FACTS["disk"].get(runtime, FACTS["disk"]["none"]))


def image(runtime: str) -> tuple[str, str | None]:
    """The usual container image, and the CUDA that the driver of its host must do."""
    name, cuda = FACTS["images"].get(runtime, FACTS["images"]["none"])
    return name.format(python="{}.{}".format(*sys.version_info)), cuda


# --- pods, whose names are in the place of tags --------------------------------------------------------------


def name(pool: str, token: str, rank: int, until: datetime | None) -> str:
    """ "skypool/train/ann@laptop/0123abcd-1/0/2026-11-21T15:28:00Z" """
    text = f"skypool/{pool}/{tags.owner()}/{token}/{rank}/{tags.stamp(until) if until else ''}"
    if len(text) > _LONGEST or not re.fullmatch(FACTS["name"], text):
        raise UsageError(f"a pod cannot be called {text!r}, in {_LONGEST} characters: give the pool a shorter name=")
    return text


def pod(record: Mapping[str, Any]) -> tuple[Instance, str] | None:
    """A pod as RunPod tells of it, and its owner; None where it is none of ours, or is no more.

    It starts until its ports are mapped. One that was outbid, or stopped, has EXITED, and its disk is billed on.
    """
    found, status = re.fullmatch(FACTS["name"], record.get("name") or ""), record["desiredStatus"]
    if found is None or status == "TERMINATED":
        return None
    ports = (record.get("runtime") or {}).get("ports") or ()  # those of RunPod's proxy are not public
    ssh = next(((p["ip"], p["publicPort"]) for p in ports if p["privatePort"] == 22 and p["isIpPublic"]), None)
    state = FACTS["states"].get(status, "ending")
    detail = {"region": "", "ssh": ssh, "price": record.get("costPerHr") or 0.0, "status": status}
    state = "starting" if state == "running" and ssh is None else state
    said = dict(zip(_SAID, found.groups(), strict=True))
    return tags.instance("runpod", record["id"], said, 0, state, detail), found[2]


def mine(records: Iterable[Mapping[str, Any]], pool: str | None) -> list[Instance]:
    """Of these pods those of a pool of this user, or of all."""
    ours = [each for each in map(pod, records) if each is not None]
    return [each for each, owner in ours if pool in (None, each.pool) and fnmatchcase(owner, tags.owners(pool))]
