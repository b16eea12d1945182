"""What Vast.ai sells, in skypool's words, and what a machine there is told. Pure; shapes are in facts.json.

Fields: https://docs.vast.ai/api-reference/search/search-offers (read 2026-11-21).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, Literal

from skypool.accelerators import Accelerator, parse
from skypool.accelerators.spelling import meanings
from skypool.accelerators.value import as_reported
from skypool.drivers import settings, tags, userdata
from skypool.errors import UsageError
from skypool.model import Instance, Market, Need, Offer, Order

FACTS: dict[str, Any] = settings.table("skypool_vastai", "facts.json")
IMAGE = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
_LEAST_BILLED = 0.0
"""Seconds that are billed for at least: none. The GPU is charged for each second in which an instance is active, its
storage for each second in which it exists: https://docs.vast.ai/billing-help (read 2026-11-22).
"""
_OWNER = 80
_LABEL = re.compile(r"skypool pool=(\S+) owner=(\S+) token=([a-z0-9-]+) rank=(\d+) until=(\S*)")
_BROKEN = re.compile("Error response from daemon|OCI runtime")


def question(need: Need, market: Market, disk: int, reliable: float, verified: bool, ssh: str) -> dict[str, Any] | None:
    """What is searched for; None where Vast.ai cannot have it.

    Cores and memory are of the whole machine, whatever share of it is rented: they only narrow the search.
    """
    names, counts, wanted = None, None, {each.name for each in need.accelerators}
    if wanted and "cpu" not in {each.kind for each in need.accelerators}:
        names = {"in": sorted(alias for alias, has in meanings("vastai").items() if has.name in wanted)}
        counts = {"in": sorted({each.count for each in need.accelerators})}
        if not names["in"]:
            return None
    least = {"cores": need.vcpus, "memory": need.memory_gib * 1024, "ports": int(ssh == "direct")}
    told = {"disk": disk, "reliability": reliable, "type": FACTS["types"][market], "names": names, "counts": counts}
    told |= {"verified": {"eq": True} if verified else None}
    return dict(settings.filled(FACTS["search"], told | {name: {"gte": n} if n else None for name, n in least.items()}))


def offer(record: Mapping[str, Any], market: Market, disk: int, bid: float, ssh: str) -> Offer | None:
    """One of a search's offers; None where it has no price, or a driver too old for its GPUs.

    `dph_total` is of the whole machine, with the disk that was searched for; a bid is without that.
    """
    has = accelerator(record["gpu_name"], record["gpu_ram"], record["num_gpus"]) if record["gpu_ram"] else None
    base, total, least = record.get("dph_base"), record.get("dph_total"), record.get("min_bid")
    branch = str(record.get("driver_version") or "").partition(".")[0]
    old = has and has.metadata.driver_min and branch.isdecimal() and int(branch) < has.metadata.driver_min
    if old or total is None or base is None or (market == "spot" and not least):
        return None
    price = float(least) * bid if market == "spot" and least else None
    proxy = ssh == "proxy" or not record.get("direct_port_count")
    share, cores = float(record.get("gpu_frac") or 1.0), record.get("cpu_cores_effective")
    return Offer(
        provider="vastai",
        instance_type=f"{record['gpu_name']}x{record['num_gpus']}",
        region=str(record.get("geolocation") or ""),
        zone=f"machine {record['machine_id']}" + (" by proxy" if proxy else ""),
        market=market,
        usd_per_hour=float(total) if price is None else price + max(0.0, float(total) - float(base)),
        accelerator=has,
        detail={"ask": record["id"], "machine": record["machine_id"], "disk": disk, "price": price, "proxy": proxy},
        vcpus=float(cores) if cores else None,
        memory_gib=float(record["cpu_ram"]) * share / 1024 if record.get("cpu_ram") else None,
        arch=FACTS["arch"].get(record.get("cpu_arch")),
        available=True,
        trust="data",
        least_billed=_LEAST_BILLED,
    )


def accelerator(name: str, mib: float, count: int) -> Accelerator | None:
    """Return what Vast.ai calls so, in the size that its memory tells, as a node's health check will.

    Returns None for a name nobody knows, or for a card with clearly less memory than any of its name.
    """
    try:
        found = as_reported(parse(name, dialect="vastai"), mib)
        return found and found.with_count(count)
    except UsageError:
        return None


def told(offer: Offer, order: Order, image: str, base: str) -> dict[str, Any]:
    """What a create says. A container with a port of its own runs what we say and nothing of Vast.ai's own ("args"):
    the guard is armed before anything else, and sshd is ours. Vast.ai's proxy leads to an sshd of its making alone
    ("ssh_proxy"), so there the same is done to that one once it runs. The script is too long for a command (4096
    characters), which therefore unpacks it from the environment (32768).
    """
    end = f"base={shlex.quote(base)}\n{(files('skypool_vastai') / 'end.sh').read_text('utf-8')}"
    script = (userdata.boot_script if offer.detail["proxy"] else userdata.start_script)(order, end=end)
    said = f"pool={order.pool} owner={tags.owner()[:_OWNER]} token={order.token} rank={order.ranks[0]}"
    made = {"image": image, "disk": offer.detail["disk"], "label": f"skypool {said} until={tags.stamp(order.until)}"}
    made |= {"script": userdata.packed(script), "run": userdata.UNPACK, "login": f"{FACTS['plain']}; {userdata.UNPACK}"}
    made |= {"price": offer.detail["price"] if offer.market == "spot" else None}
    return dict(settings.filled(FACTS["create"] | FACTS["proxied" if offer.detail["proxy"] else "direct"], made))


def ours(records: list[dict[str, Any]], pool: str | None) -> Iterator[Instance]:
    """Those of this user's pools, or of one pool rented from this very host; nothing else has such a label."""
    names = tags.POOL, tags.OWNER, tags.TOKEN, tags.RANKS, tags.UNTIL
    for record in records:
        found = _LABEL.fullmatch(str(record.get("label") or ""))
        said = dict(zip(names, found.groups(), strict=True)) if found else {}
        if found and tags.ours(said, pool, _OWNER):
            detail = {"machine": record["machine_id"], "label": found[0], "made": record.get("start_date") or 0.0}
            detail |= {"proxied": "ssh" in str(record.get("image_runtype"))}
            yield tags.instance("vastai", str(record["id"]), said, 0, state(record), detail)


def state(record: Mapping[str, Any]) -> Literal["starting", "running", "ending"]:
    """One that was outbid, has exited or lost its host serves nobody any more, and is billed until it is destroyed."""
    status, stopped = record.get("actual_status"), record.get("intended_status") == "stopped"
    if status in FACTS["starting"] and not stopped:
        return "starting"
    return "running" if status == "running" and not stopped else "ending"


def trouble(record: Mapping[str, Any]) -> tuple[str, str]:
    """Why an instance has no address, if it has none: a code of errors.csv, and in Vast.ai's words."""
    words = str(record.get("status_msg") or "").strip()
    if _BROKEN.search(words):
        return "broken", words
    if record.get("intended_status") == "stopped":
        return "outbid", "it was stopped"
    status = str(record.get("actual_status"))
    if state(record) == "starting":
        return "pending", "its image is not there yet"
    if status == "running":
        return "unmapped", "it runs, and none of its machine's ports leads to it"
    return status, words or f"it is {status}"


def address(record: Mapping[str, Any], proxied: bool) -> tuple[str, int] | None:
    """Where its sshd is reached; None until it runs and that is known."""
    if trouble(record)[0] != "unmapped":
        return None
    mapped = (record.get("ports") or {}).get("22/tcp") or [{"HostPort": None}]
    direct = str(record.get("public_ipaddr") or "").strip(), mapped[0]["HostPort"]
    host, port = (record.get("ssh_host"), record.get("ssh_port")) if proxied else direct
    return (str(host), int(port)) if host and port else None
