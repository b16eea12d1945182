"""The command `skypool health`: the health of a running pool's nodes and devices, as its owner knows it."""

from __future__ import annotations

from typing import Any

import typer

from skypool.cli import output
from skypool.cli.owner import Name, looked_at
from skypool.observers import client


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool health` to the program."""
    app.command("health")(health)


def health(pool: Name, as_json: output.AsJson = False) -> None:
    """Show the health of a running pool's nodes and devices, with the last measurement of each device.

    "unknown" means that a check could not be made. The exit status is 1 if a node is unhealthy.
    """
    try:
        said = client.info(pool)
    except client.NoOwner as e:
        from skypool.runs import observing  # imported here, as most pools are asked in another way

        said = observing.info(looked_at(pool, None, e))
    nodes = [each for each in said["nodes"] if each["state"] != "ended"]
    if as_json:
        keys = ("node", "state", "hardware", "health", "sample")
        output.data([{key: each.get(key) for key in keys} for each in nodes])
    else:
        rows = [row for each in nodes for row in _health_rows(each)]
        output.table(_HEALTH, rows, numbers=_HEALTH[3:7])
    if any((each.get("health") or {}).get("state") == "unhealthy" for each in nodes):
        raise typer.Exit(1)


_HEALTH = ("node", "device", "health", "busy %", "MiB used", "W", "°C", "found")


def _health_rows(node: dict[str, Any]) -> list[list[str]]:
    """Return a row for each device of a node; one row if the node has no devices, or its devices were not read."""
    found = node.get("health")
    name = str(node["node"])
    if not found:
        why = "no measurement of its devices yet" if node.get("hardware") else "no devices"
        return [[name, node.get("hardware") or "-", "unknown" if node.get("hardware") else "-", "", "", "", "", why]]
    sample = node.get("sample") or {}
    read = {(each["kind"], each["index"]): each for each in sample.get("devices", [])}
    rows = []
    for each in found["devices"]:
        seen = read.get((each["kind"], each["index"]), {})
        measured = ("utilization_percent", "memory_used_mib", "power_watts", "temperature_celsius")
        cells = [f"{seen[key]:.0f}" if seen.get(key) is not None else "?" for key in measured]
        claimed = " (claimed)" if found["claimed"] else ""
        device = f"{each['kind']} {each['index']}"
        rows.append([name, device, f"{each['state']}{claimed}", *cells, "; ".join(each["reasons"])])
    return rows
