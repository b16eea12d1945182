"""The sections with errors and notices, and with the plan by which the pool's machines were chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skypool.report import words
from skypool.report.elements import Element, element
from skypool.report.facts import PoolFacts
from skypool.report.page_parts import folded, long_table, note, section, table
from skypool.report.timeline import told
from skypool.samples.journal import JournalEvent

_MOST = 500
"""The most events in the table: the newest ones."""


def problems(facts: PoolFacts) -> Element:
    """Return the section with errors and notices. Calls that failed are in the section of the calls."""
    rows = [
        [words.clock(each.time), f"node {each.node}" if each.node >= 0 else "pool", text]
        for each in facts.journal.events
        if (text := _text(each))
    ]
    left = len(rows) - _MOST
    made = long_table("Errors and notices", ("time", "where", "what"), rows[-_MOST:]) if rows else []
    return section(
        "errors",
        "Errors and notices",
        *made,
        note(f"{left:,} earlier ones are left out.") if left > 0 else None,
        None
        if rows
        else note("There were none." if facts.is_kept else "Unknown: the history of this run is not kept."),
    )


def _text(event: JournalEvent) -> str | None:
    said = event.data
    match event.kind:
        case "PoolPhase" | "NodePhase":
            detail = said.get("detail")
            return f"{said['phase']}: {detail}" if detail else None
        case "Notice":
            return str(said["text"])
        case "LinkUp":
            return "the connection was made again"
        case "NodeRetirement":
            return "the node was retired"
        case "BootstrapStep" if said["state"] == "retried":
            return f"step {said['step']} was tried again{': ' if said.get('detail') else ''}{said.get('detail', '')}"
        case _:
            return told(event)


def plan(facts: PoolFacts) -> Element:
    """Return the section with the plan and the dates of its prices."""
    said = facts.journal.facts
    text = said.get("plan")
    if not text:
        return section("plan", "Plan", note("The plan of this run is not kept."))
    rows = [_price(each) for each in said.get("prices", [])]
    headings = ("provider", "type", "place", "market", "USD/h", "price as of", "source")
    return section(
        "plan",
        "Plan",
        note("The offers in the order in which the pool tries them, by its last plan, with the dates of their prices."),
        table("Offers", headings, rows, {"USD/h"}) if rows else None,
        folded("The explanation of the plan", element("pre", str(text), tabindex=0)),
    )


def _price(said: Mapping[str, Any]) -> list[str]:
    source = "a table of skypool" if said["source"] == "table" else "the provider"
    return [
        str(said["provider"]),
        str(said["type"]),
        str(said["place"]) or words.UNKNOWN,
        str(said["market"]),
        words.usd(float(said["usd_per_hour"])),
        str(said["as_of"]) or words.UNKNOWN,
        source,
    ]
