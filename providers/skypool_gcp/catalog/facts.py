"""Reads what skypool knows of Compute Engine's machine types, from facts.json."""

from __future__ import annotations

from typing import TypedDict

from skypool.drivers.settings import table
from skypool.model import Market

Facts = TypedDict(
    "Facts",
    {
        "undriven": list[str],
        "hyperdisk": list[str],
        "placed": list[str],
        "spot only": list[str],
        "more types": list[str],
        "fabric": dict[str, list[int]],
        "unpriced": dict[str, str],
        "unsold": list[str],
        "metrics": dict[str, str],
        "attached": dict[str, dict[str, list[int]]],
        "n1": dict[str, float],
        "disk": dict[str, float],
        "address": dict[Market, float],
    },
)

FACTS: Facts = table("skypool_gcp.catalog", "facts.json")
"""The tables of facts.json. The entry "about" of the file describes each table."""
