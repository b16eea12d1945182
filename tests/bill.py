"""What a simulated cloud bills, from the log of its events alone. It imports nothing of skypool, whose sums it checks.

    python -m tests.bill EVENTS...

Each line of a log is a JSON object with `event`, `at` (seconds since 1970) and `machine`. "made" has the price
(`usd_per_hour`), the seconds that are billed for at least (`least`) and from when on (`billing`: "create" or
"running"). "running", "price" (a new `usd_per_hour`) and "ended" follow.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Item:
    """One machine on the bill; `prices` are (since when, USD per hour)."""

    machine: str
    pool: str
    made: float
    least: float
    billing: str
    prices: list[tuple[float, float]]
    ran: float | None = None
    ended: float | None = None
    seconds: float = field(default=0.0, init=False)
    usd: float = field(default=0.0, init=False)

    @property
    def begins(self) -> float | None:
        """Since when it is billed; None for never."""
        return self.made if self.billing == "create" else self.ran

    def close(self, now: float) -> None:
        """Sum up what it costs until its end, or until now."""
        if self.begins is None:
            return
        over = max(now if self.ended is None else self.ended, self.begins + self.least)
        self.seconds = over - self.begins
        for n, (since, usd_per_hour) in enumerate(self.prices):
            until = self.prices[n + 1][0] if n + 1 < len(self.prices) else over
            self.usd += max(0.0, min(until, over) - max(since, self.begins)) * usd_per_hour / 3600


def bill(log: str | Path, now: float = 0.0) -> dict[str, Item]:
    """Return what each machine costs, by its name; those that live cost until `now`."""
    items: dict[str, Item] = {}
    for line in Path(log).read_text().splitlines() if Path(log).exists() else ():
        said = json.loads(line)
        name = said["machine"]
        if said["event"] == "made":
            prices = [(said["at"], said["usd_per_hour"])]
            items[name] = Item(name, said["pool"], said["at"], said["least"], said["billing"], prices)
        elif said["event"] == "running":
            items[name].ran = said["at"]
        elif said["event"] == "price":
            items[name].prices.append((said["at"], said["usd_per_hour"]))
        elif said["event"] == "ended":
            items[name].ended = said["at"]
    for item in items.values():
        item.close(now)
    return items


def main(argv: list[str]) -> int:
    """Print the bill of each log."""
    for log in argv:
        for item in bill(log).values():
            print(f"{item.machine}  {item.pool}  {item.seconds:.1f} s  {item.usd:.4f} USD")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
