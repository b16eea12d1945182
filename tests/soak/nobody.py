"""Runs that belong to their machine, and nobody ever comes back: what they cost, against the worst bill that was told.

    python -m tests.soak.nobody --worlds 200 --seed 1

In each world, a run is handed over to a machine that is a mere record, on a clock that the world moves. The owner on
the machine extends its lease until the run is over, or until the agreed end, or it dies before. The machine may take a
minute to end itself, and prices of spot machines change. No command is run any more. The cloud's bill is compared with
the worst bill and the budget.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from unittest import mock

from skypool.agent.guard import END
from skypool.errors import BudgetExceeded
from skypool.head.states import Claim, Entry
from skypool.head.states import Ledger as State
from skypool.model import Need
from skypool.rental.run_account import RunAccount
from skypool.testing import FakeCloud, Stock, machine
from skypool.testing.state_store import State as CloudState
from tests.bill import bill
from tests.handed_runs import record_of, rented

RISE = 1.25
"""By what the price of a spot machine may be multiplied while nobody watches it."""
TO_END = 60.0
"""The most seconds that a machine needs to end itself."""
LEASE = 600.0
STEP = 240.0
_MEMORY = "/dev/shm"


class World:
    """One run. `wrong` is what was found, and `share` the part of its worst bill that it has cost."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.dice = random.Random(seed)
        self.folder = folder
        self.wrong: list[str] = []
        self.share = 0.0
        self.how = ""

    def run(self) -> None:
        dice = self.dice
        price = dice.choice((0.4, 3.0, 36.0))
        market: Literal["on-demand", "spot"] = dice.choice(("on-demand", "spot"))
        stock = [Stock("gpu-8", price, "H100:8"), Stock("gpu-8", price / 2, "H100:8", market="spot")]
        billing: Literal["create", "running"] = dice.choice(("create", "running"))
        cloud = FakeCloud(self.folder / "cloud", stock, machines=False, patience=0.3, billing=billing)
        list(cloud.offers(Need()))
        self.cloud = cloud
        budget = price * dice.uniform(0.1, 30)
        seconds = dice.choice((dice.uniform(60, 3600), dice.uniform(3600, 200_000)))
        try:
            supply = rented(cloud, budget=budget, market=market)
            account = RunAccount(supply, Claim("train"), seconds)
        except BudgetExceeded:
            self.how = "refused, as the budget is too small"
            return
        account.write(Entry(State.DETACHING))
        account.renew_tags()
        account.write(Entry(State.DETACHED))
        self._live(account, market, price / 2)
        items = [*bill(self.folder / "cloud" / "events", time.time()).values()]
        billed = sum(each.usd for each in items)
        run = record_of().run
        assert run is not None
        self.share = billed / run.worst_usd
        if any(each.ended is None for each in items) or cloud.count("machine"):
            self.wrong.append("a machine lives on")
        if billed > run.worst_usd * (1 + 1e-9):
            self.wrong.append(f"the bill is {billed:.4f} USD, and the worst bill was {run.worst_usd:.4f} USD")
        if billed > budget * (1 + 1e-9):
            self.wrong.append(f"the bill is {billed:.4f} USD, and the budget {budget:.4f} USD")

    def _live(self, account: RunAccount, market: str, spot: float) -> None:
        """Let time pass until the machine has ended."""
        dice = self.dice
        left = account.left
        self.how = how = dice.choice(("until its end", "over", "dead"))
        over = left if how == "until its end" else dice.uniform(0, left)
        [home] = (self.folder / "cloud" / "machines").glob("i-*")
        # as the guard: the agreed end, and the time that ending takes
        self._ask(home, left + dice.uniform(0, TO_END))
        passed, serial = 0.0, 1
        while self.cloud.count("machine") and passed < left + LEASE + 10 * TO_END:
            if passed < over:
                serial += 1
                Path(machine.guard(str(home))).write_text(f"{serial:<8} {LEASE:.0f}".ljust(31) + "\n")
            elif how == "over":  # the guard's stop
                self._ask(home, dice.uniform(0, TO_END))
            if market == "spot" and dice.random() < 0.3:
                self.cloud.control.spot_price("gpu-8", spot * dice.uniform(0.3, RISE))
            step = min(STEP, max(1.0, over - passed)) if passed < over else STEP
            self.cloud.control.advance(step)
            passed += step

    def _ask(self, home: Path, seconds: float) -> None:
        """Ask the machine for its end in so many seconds at the latest, and let the cloud see that."""
        if not home.exists():
            return
        serial = self.dice.randrange(1, 1 << 30)
        (home / END).write_text(f"{serial} {int(seconds)} - {serial}".ljust(127) + "\n")
        with CloudState(self.folder / "cloud").open() as world:
            world.settle()


@contextmanager
def _home(folder: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"XDG_STATE_HOME": str(folder / "state")}):
        os.environ.pop("SKYPOOL_MAX_USD", None)
        yield


def soak(worlds: int, seed: int) -> tuple[Counter[str], float, list[str]]:
    """Have so many worlds. Return how they went, the largest part of a worst bill, and what was found."""
    ends, most, wrong = Counter[str](), 0.0, list[str]()
    for number in range(worlds):
        place = _MEMORY if os.path.isdir(_MEMORY) else None
        with tempfile.TemporaryDirectory(prefix="nobody-", dir=place) as top, _home(Path(top)):
            world = World(seed * 1_000_003 + number, Path(top))
            world.run()
        ends[world.how] += 1
        most = max(most, world.share)
        wrong += [f"seed {seed}, world {number}, {world.how}: {each}" for each in world.wrong]
    return ends, most, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Have worlds, and print what was found; 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.nobody", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", type=int, default=200)
    asked = parser.parse_args(argv)
    ends, most, wrong = soak(asked.worlds, asked.seed)
    print(*(f"{count} runs: {how}" for how, count in ends.items()), sep="\n")
    print(f"the largest bill was {most:.1%} of its worst bill")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
