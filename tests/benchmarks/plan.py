"""What a plan over a large catalogue costs, beside the loop that one would write by hand for just that need.

python -m tests.benchmarks.plan
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from skypool.accelerators import Accelerator, parse
from skypool.model import Need, Offer
from skypool.offers.ranking import rank_offers

MANY = 100_000
KINDS = ["H100:8", "A100-80GB:8", "L4", "T4:4", "H200:8", "A10G", "L40S:2", "MI300X:8", "B200:8", "V100:4"]


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio): one that few offers serve, one that all do."""
    offers = catalogue()
    few = Need((parse("H100:8"),), memory_gib=1000, market="spot-if-available", max_usd_per_hour=40)
    return [
        _row("plan over 100,000 offers, few serve", offers, few, lambda: by_hand(offers, few.accelerators[0], 40)),
        _row("plan over 100,000 offers, all serve", offers, Need(market="cheapest"), lambda: all_by_hand(offers)),
    ]


def catalogue(many: int = MANY) -> list[Offer]:
    """Made-up offers of ten kinds of nodes in sixty zones."""
    dice = random.Random(7)
    kinds = [parse(each) for each in KINDS]
    return [
        Offer(
            "acme",
            f"type-{number % 500}",
            f"region-{number % 20}",
            f"zone-{number % 60}",
            "spot" if number % 2 else "on-demand",
            round(dice.uniform(1, 90), 4),
            dice.choice(kinds),
            vcpus=dice.choice([8, 96, 192]),
            memory_gib=dice.choice([64, 1024, 2048]),
        )
        for number in range(many)
    ]


def by_hand(offers: list[Offer], asked: Accelerator, cap: float) -> list[Offer]:
    """The same answer as the first plan, in one loop."""
    found = []
    for o in offers:
        has = o.accelerator
        if has is None or has.name != asked.name or has.count != asked.count or has.memory_gb != asked.memory_gb:
            continue
        if (o.memory_gib is not None and o.memory_gib < 1000) or o.available is False or o.usd_per_hour > cap:
            continue
        found.append(o)
    found.sort(key=lambda o: (o.market != "spot", o.usd_per_hour, o.provider, o.region, o.zone, o.instance_type))
    return found


def all_by_hand(offers: list[Offer]) -> list[Offer]:
    """The same answer as the second plan."""
    found = [o for o in offers if o.available is not False and o.usd_per_hour >= 0]
    found.sort(key=lambda o: (o.usd_per_hour, o.provider, o.region, o.zone, o.instance_type))
    return found


def _row(what: str, offers: list[Offer], need: Need, loop: Callable[[], list[Offer]]) -> tuple[str, str, str, str]:
    assert list(rank_offers(offers, need).offers) == loop()
    ours, theirs = _best(lambda: rank_offers(offers, need)), _best(loop)
    return what, f"{ours * 1e3:.1f} ms", f"{theirs * 1e3:.1f} ms sort loop", f"{ours / theirs:.2f} (< 50 ms)"


def _best(run: Callable[[], object], times: int = 7) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
