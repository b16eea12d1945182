"""Real price snapshots as offers, and a driver that sells them. The first line of each CSV says where it was read."""

from __future__ import annotations

import csv
import functools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import ClassVar

from skypool.accelerators import parse
from skypool.errors import ProviderError
from skypool.model import Access, Instance, Market, Need, Offer, Order, PriceSource

FOLDER = Path(__file__).parent / "offers"
_MARKETS: tuple[tuple[Market, str], ...] = (
    ("on-demand", "on_demand_usd_per_hour"),
    ("spot", "spot_usd_per_hour"),
)


@functools.cache
def snapshot(provider: str = "*") -> tuple[Offer, ...]:
    """What one provider sold, or all of them, on the day of the snapshot."""
    found = []
    for file in sorted(FOLDER.glob(f"{provider}.csv")):
        lines = file.read_text().splitlines()[1:]
        for row in csv.DictReader(lines):
            for market, column in _MARKETS:
                if row[column]:
                    found.append(_offer(file.stem, row, market, float(row[column])))
    return tuple(found)


def _offer(provider: str, row: dict[str, str], market: Market, price: float) -> Offer:
    return Offer(
        provider,
        row["instance_type"],
        row["region"],
        row["zone"],
        market,
        price,
        parse(row["accelerator"]),
        vcpus=float(row["vcpus"]) if row["vcpus"] else None,
        memory_gib=float(row["memory_gib"]) if row["memory_gib"] else None,
    )


@dataclass(frozen=True)
class Snapshot:
    """Sells what a snapshot has, and rents nothing.

    Args:
        of: whose snapshot, "*" for all of them.
        log: a file that gets a line for each time it is asked; $SNAPSHOT_LOG without it.
        down: a file; while it is there the provider cannot be reached; $SNAPSHOT_DOWN without it.
    """

    of: str = "*"
    log: str = ""
    down: str = ""
    name: ClassVar[str] = "snapshot"

    def offers(self, need: Need) -> Iterable[Offer]:
        log, down = self.log or os.environ.get("SNAPSHOT_LOG"), self.down or os.environ.get("SNAPSHOT_DOWN")
        if log:
            with open(log, "a") as file:
                file.write(f"asked for {need.market}\n")
        if down and Path(down).exists():
            raise ProviderError("no route to api.snapshot.example", provider=self.name)
        return [replace(each, provider=self.name) for each in snapshot(self.of)]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        raise ProviderError("a snapshot rents nothing", provider=self.name)

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return []

    def access(self, instance: Instance) -> Access:
        raise ProviderError("a snapshot rents nothing", provider=self.name)

    def terminate(self, instances: Sequence[Instance]) -> None:
        return


@dataclass(frozen=True)
class Kept(Snapshot):
    """The same with offers that keep for a day."""

    name: ClassVar[str] = "kept"
    offers_keep: ClassVar[float] = 86400.0


@dataclass(frozen=True)
class Fleeting(Kept):
    """The same, and it says what is in stock."""

    name: ClassVar[str] = "fleeting"

    def offers(self, need: Need) -> Iterable[Offer]:
        return [replace(each, available=True) for each in super().offers(need)]


@dataclass(frozen=True)
class Dated(Snapshot):
    """The same, and each offer says from which table its price is, and of which day that is."""

    name: ClassVar[str] = "dated"

    def offers(self, need: Need) -> Iterable[Offer]:
        on_demand = {(o.instance_type, o.region, o.zone): o.usd_per_hour for o in snapshot() if o.market == "on-demand"}
        for file in sorted(FOLDER.glob(f"{self.of}.csv")):
            origin = file.read_text().partition("\n")[0].removeprefix("# ")
            days = re.findall(r"\d{4}-\d\d-\d\d", origin)
            source = PriceSource("table", date.fromisoformat(days[0]), origin, "a snapshot has no API to ask")
            for each in snapshot(file.stem):
                usual = on_demand.get((each.instance_type, each.region, each.zone)) if each.market == "spot" else None
                yield replace(each, provider=self.name, price_source=source, on_demand_usd_per_hour=usual)


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH in which these drivers are installed under their names."""
    info = folder / "prices-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prices\nVersion: 1\n")
    lines = [f"{kind.name} = tests.lab.prices:{kind.__name__}" for kind in (Snapshot, Kept, Fleeting, Dated)]
    (info / "entry_points.txt").write_text("\n".join(["[skypool.providers]", *lines]) + "\n")
    return folder
