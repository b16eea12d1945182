"""Translation of Acme's answers into offers and instances of skypool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skypool import accelerators
from skypool.drivers import tags
from skypool.model import Instance, Offer


def offer(sold: Mapping[str, Any]) -> Offer:
    """Return the offer for an entry of Acme's list of types."""
    gpu = sold["gpu"]
    return Offer(
        provider="acme",
        instance_type=sold["type"],
        region=sold["region"],
        zone=sold["zone"],
        market=sold["market"],
        usd_per_hour=sold["usd_per_hour"],
        accelerator=accelerators.parse(f"{gpu['model']}:{gpu['count']}") if gpu else None,
        vcpus=sold["vcpus"],
        memory_gib=sold["memory_gib"],
        disk_gib=sold["disk_gib"],
        arch=sold["arch"],
        available=sold["in_stock"],
        quota=sold["quota"],
    )


_STATES: Mapping[str, Any] = {"booting": "starting", "active": "running", "deleting": "ending"}


def instance(machine: Mapping[str, Any]) -> Instance:
    """Return the instance for an entry of Acme's list of machines. Pool, node and token are read from the tags."""
    found = tags.instance("acme", machine["id"], machine["tags"], 0, _STATES[machine["state"]], {})
    return replace(found, billed_from=machine["billed_from"])
