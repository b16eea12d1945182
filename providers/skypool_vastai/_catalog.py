"""What Vast.ai sells, in skypool's words, and what a machine there is told. Pure.

Fields: https://docs.vast.ai/api-reference/search/search-offers (read 2026-11-21).
"""

from __future__ import annotations

import base64
import gzip
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Literal

from skypool import tags, userdata
from skypool.accelerators import Accelerator, parse, tables
from skypool.accelerators.spelling import meanings
from skypool.errors import UsageError
from skypool.model import Instance, Market, Need, Offer, Order

IMAGE = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
_ARCH: dict[str, Any] = {"amd64": "x86_64", "arm64": "arm64"}
_UNPACK = 'eval "$(printf %s "$SKYPOOL_START" | base64 -d | gzip -d)"'
_LIMIT, _OWNER = 512, 80
_LABEL = re.compile(r"skypool pool=(\S+) owner=(\S+) token=([a-z0-9-]+) rank=(\d+) until=(\S*)")
_STARTING = (None, "", "created", "loading", "rebooting", "unknown")
_BROKEN = re.compile("Error response from daemon|OCI runtime")


def question(need: Need, market: Market, disk: int, reliability: float, verified: bool) -> dict[str, Any] | None:
    """What is searched for; None where Vast.ai cannot have it.

    Cores and memory are of the whole machine, whatever share of it is rented: they only narrow the search.
    """
    asked: dict[str, Any] = {"rentable": {"eq": True}, "rented": {"eq": False}, "external": {"eq": False}}
    asked |= {"reliability": {"gte": reliability}, "direct_port_count": {"gte": 1}, "disk_space": {"gte": disk}}
    asked |= {"verified": {"eq": True}} if verified else {}
    asked |= {"cpu_cores": {"gte": need.vcpus}} if need.vcpus else {}
    asked |= {"cpu_ram": {"gte": need.memory_gib * 1024}} if need.memory_gib else {}
    wanted = {each.name: each for each in need.accelerators}
    if wanted and "cpu" not in {each.kind for each in need.accelerators}:
        names = sorted(alias for alias, has in meanings("vastai").items() if has.name in wanted)
        asked |= {"gpu_name": {"in": names}, "num_gpus": {"in": sorted({each.count for each in need.accelerators})}}
        if not names:
            return None
    kind = "bid" if market == "spot" else "on-demand"
    return asked | {"order": [["dph_total", "asc"]], "type": kind, "limit": _LIMIT, "allocated_storage": disk}


def offer(record: Mapping[str, Any], market: Market, disk: int, bid: float) -> Offer | None:
    """One of a search's offers; None where it has no price, or a driver too old for its GPUs.

    `dph_total` is of the whole machine, with the disk that was searched for; a bid is without that.
    """
    has, least = accelerator(record["gpu_name"], record["gpu_ram"], record["num_gpus"]), record.get("min_bid")
    base, total = record.get("dph_base"), record.get("dph_total")
    branch = str(record.get("driver_version") or "").partition(".")[0]
    old = has and has.metadata.driver_min and branch.isdecimal() and int(branch) < has.metadata.driver_min
    if old or total is None or base is None or (market == "spot" and not least):
        return None
    price = float(least) * bid if market == "spot" and least else None
    share, cores = float(record.get("gpu_frac") or 1.0), record.get("cpu_cores_effective")
    return Offer(
        provider="vastai",
        instance_type=f"{record['gpu_name']}x{record['num_gpus']}",
        region=str(record.get("geolocation") or ""),
        zone=f"machine {record['machine_id']}",
        market=market,
        usd_per_hour=float(total) if price is None else price + max(0.0, float(total) - float(base)),
        accelerator=has,
        detail={"ask": record["id"], "machine": record["machine_id"], "disk": disk, "price": price},
        vcpus=float(cores) if cores else None,
        memory_gib=float(record["cpu_ram"]) * share / 1024 if record.get("cpu_ram") else None,
        arch=_ARCH.get(str(record.get("cpu_arch"))),
        available=True,
        trust="data",
    )


def accelerator(name: str, mib: float, count: int) -> Accelerator | None:
    """What Vast.ai calls so, of the size that comes nearest; None for what nobody knows."""
    try:
        found = parse(name, dialect="vastai")
        sizes = [found.memory_gb, *(each.memory_gb for each in tables.variants(found.name))]
        size = min(sizes, key=lambda gb: abs(gb - mib / 1024))
        return (found if size == found.memory_gb else parse(f"{name}@{size:g}GB", dialect="vastai")).with_count(count)
    except UsageError:
        return None


def told(offer: Offer, order: Order, image: str, base: str) -> dict[str, Any]:
    """What a create says. Its container runs what we say and nothing of Vast.ai's own ("args"): so the guard is armed
    before anything else, sshd is ours with the host key that we know, and lets in the pool's key and no other. The
    script is too long for arguments (4096 characters), so these unpack it from the environment (32768).
    """
    end = (files("skypool_vastai") / "end.sh").read_text()
    script = userdata.start_script(order, end=f"base={shlex.quote(base)}\n{end}")
    packed = base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()
    until = tags.stamp(order.until) if order.until else ""
    made = {"client_id": "me", "image": image, "disk": offer.detail["disk"], "target_state": "running"}
    made |= {"runtype": "args", "onstart": "sh", "args": ["-c", _UNPACK], "cancel_unavail": True}
    made |= {"env": {"-p 22:22": "1", "SKYPOOL_START": packed}}
    said = f"pool={order.pool} owner={tags.owner()[:_OWNER]} token={order.token} rank={order.ranks[0]} until={until}"
    made |= {"label": f"skypool {said}"}  # the only tag there is, of 256 characters
    return made | ({"price": offer.detail["price"]} if offer.market == "spot" else {})


def renewed(label: str, until: datetime) -> str:
    """A label that says another time."""
    return f"{label.rpartition('=')[0]}={tags.stamp(until)}"


def ours(records: list[dict[str, Any]], pool: str | None) -> Iterator[Instance]:
    """Those of this user's pools, or of one pool rented from this very host; nothing else has such a label."""
    owner, names = tags.owners(pool)[:_OWNER], (tags.POOL, tags.OWNER, tags.TOKEN, tags.RANKS, tags.UNTIL)
    for record in records:
        found = _LABEL.fullmatch(str(record.get("label") or ""))
        if found and pool in (None, found[1]) and fnmatchcase(found[2], owner):
            said = dict(zip(names, found.groups(), strict=True))
            detail = {"machine": record["machine_id"], "label": found[0], "made": record.get("start_date") or 0.0}
            yield tags.instance("vastai", str(record["id"]), said, 0, state(record), detail)


def state(record: Mapping[str, Any]) -> Literal["starting", "running", "ending"]:
    """One that was outbid, has exited or lost its host serves nobody any more, and is billed until it is destroyed."""
    status, stopped = record.get("actual_status"), record.get("intended_status") == "stopped"
    if status in _STARTING and not stopped:
        return "starting"
    return "running" if status == "running" and not stopped else "ending"


def trouble(record: Mapping[str, Any]) -> tuple[str, str]:
    """Why an instance will not run, as a code of errors.csv and in Vast.ai's words; ("", "") while it may."""
    words = str(record.get("status_msg") or "").strip()
    if _BROKEN.search(words):
        return "broken", words
    if record.get("intended_status") == "stopped":
        return "outbid", words or "it was stopped"
    status = str(record.get("actual_status"))
    return (status, words or f"it is {status}") if state(record) == "ending" else ("", "")


def address(record: Mapping[str, Any]) -> tuple[str, int] | None:
    """Where its sshd is reached; None until that is known."""
    mapped, public = (record.get("ports") or {}).get("22/tcp"), str(record.get("public_ipaddr") or "").strip()
    return (public, int(mapped[0]["HostPort"])) if mapped and public else None
