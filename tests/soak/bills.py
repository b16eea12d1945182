"""Receipts of random worlds against the simulated cloud's own bill, and what pools cost after their promised end.

    python -m tests.soak.bills --worlds 1000 --pools 1000 --seed 7

In each world one pool rents from a cloud without real machines, on a clock that the world moves: machines are made one
by one or as slices, wait in queues, boot, die silently, survive their end; calls are throttled, refused, and lose their
replies; launches are undone; clients die; the lifetime of the pool is over. What the ledger has then is compared with
`tests.bill`, machine by machine. `_living` has further worlds with real pools.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import skypool as sky
from skypool import clock
from skypool.errors import CapacityError, LifetimeExceeded, QuotaError, SkypoolError
from skypool.model import Instance, Need
from skypool.rental import launch, reaper
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import Line
from skypool.rental.supply import Supply
from skypool.testing import FakeCloud, Stock, cloud_state
from skypool.testing.api import Api
from tests.bill import Item, bill
from tests.soak import _living
from tests.supplies import supply_of

TOLERANCE = 1.0
"""Seconds of a machine's rent by which its line may differ from the bill."""

_EPOCH = 1.8e9
"""When each world begins, in seconds since 1970: how fast this machine is must change nothing."""
_CREATE = Api.create
_POLL = 0.05
"""Seconds after which a pool that waits for a machine sees that it runs."""
_MEMORY = "/dev/shm"
"""Where each world is kept, if that is there: it is written thousands of times, and no disk need have it."""


class Patience(threading.Event):
    """An event whose waits let the world's time pass, not ours."""

    def __init__(self, cloud: FakeCloud) -> None:
        super().__init__()
        self._cloud = cloud

    def wait(self, timeout: float | None = None) -> bool:
        self._cloud.control.advance(min(timeout or 0.0, 0.1))
        return self.is_set()


@dataclass
class World:
    """One world: a cloud and a pool on it, both made from a seed.

    Attributes:
        happened: what befell it, for the summary.
        faults: what its receipt has wrong.
        answered: seconds for which creates were waited for.
    """

    seed: int
    folder: Path
    happened: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list)
    answered: float = 0.0

    def run(self) -> None:
        """Let the pool live and end, and compare."""
        self.dice = dice = random.Random(self.seed)
        self.sliced = dice.choice([None, None, None, "v5p-16", "v5p-32"])  # hosts of a slice: 2 and 4
        self.cloud = FakeCloud(
            self.folder / "cloud",
            [self._stock(n) for n in range(dice.randint(1, 3))],
            machines=False,
            ends_itself=False,
            patience=5.0,
            billing=dice.choice(["create", "running"]),
            tells_billing=dice.random() < 0.5,
        )
        list(self.cloud.offers(Need()))
        self.lifetime = dice.choice([None, dice.uniform(300.0, 9000.0)])
        pool = sky.ComputePool(
            self.cloud,
            name=f"w{self.seed}",
            nodes=dice.randint(1, 5),
            private_network=dice.random() < 0.4,
            accelerator=self.sliced,
            max_lifetime=self.lifetime,
            console="off",
        )
        supply = supply_of(pool, Patience(self.cloud))
        with self._time():
            self._live(supply, pool._terms.minimum)
            receipt = Ledger.here().receipt(supply.rental.session)
            items = bill(self.folder / "cloud" / "events", clock.now())
            self._compare({line.id: line for line in receipt.lines}, items)
            self._check_lifetime([*items.values()])
        left = [] if not self.cloud.count("machine") else self.cloud.control.alive("machine")
        self.faults += [f"still there: {each}" for each in left]

    # --- what there is ---------------------------------------------------------------------------------------

    def _stock(self, n: int) -> Stock:
        dice = self.dice
        return Stock(
            f"type-{n}",
            usd_per_hour=round(dice.uniform(0.1, 400.0), 2),
            capacity=dice.choice([None, None, 1, 2, 3]),
            quota=dice.choice(["", "few"]),
            accelerator=self.sliced,
            least_billed=dice.choice([0.0, 0.0, 60.0]),
            market="on-demand",
        )

    @contextmanager
    def _time(self) -> Iterator[None]:
        """The time of money is the cloud's, and nobody waits for lists that lag."""
        with (
            mock.patch.object(clock, "now", self._now),
            mock.patch.object(cloud_state, "time", SimpleNamespace(time=lambda: _EPOCH + self.answered)),
            mock.patch.object(Api, "create", lambda api, *asked: self._create(api, *asked)),
            mock.patch.object(reaper, "SETTLING", 0.0),
            mock.patch.object(launch, "_ATTEMPTS", 3),
        ):
            yield

    def _create(self, *asked: Any) -> Any:
        """Let a create take a while to be answered, so that machines made one by one are of different ages."""
        try:
            return _CREATE(*asked)
        finally:
            self.answered += self.dice.choice([0.0, 0.5, 4.0])

    def _now(self) -> float:
        return self.cloud.clock.now().timestamp()

    # --- what happens ----------------------------------------------------------------------------------------

    def _live(self, supply: Supply, nodes: int) -> None:
        asyncio.run(self._plan(supply))
        self._spoil_launch()
        hosts = supply.plan.offers[0].hosts if supply.plan else 1
        there = self._rent(supply, range(0, nodes * hosts, hosts), hosts)
        try:
            self._wait(supply, there)
            for n in range(self.dice.choice([0, 0, 1, 2])):
                self._let_time_pass(supply)
                if there and self.dice.random() < 0.6:
                    there = self._die(supply, there)
                first = hosts * (nodes + n)
                new = self._rent(supply, [first], hosts)
                there += new
                self._wait(supply, new)
            self._let_time_pass(supply)
        except LifetimeExceeded:
            self.happened["lifetime over"] += 1
            if self._rent(supply, [9000], hosts):
                self.faults.append("a machine was rented after the lifetime")
        self._end(supply, there)

    async def _plan(self, supply: Supply) -> None:
        await supply.look()
        await asyncio.to_thread(supply.begin)

    def _rent(self, supply: Supply, nodes: Sequence[int], hosts: int) -> list[Instance]:
        async def pause(seconds: float) -> None:
            self.cloud.control.advance(seconds)

        try:
            rented = asyncio.run(supply.rent(tuple(nodes), hosts, pause))
        except SkypoolError:
            self.happened["refused"] += 1
            return []
        if rented.error is not None:
            self.happened["launched too few"] += 1
            self._prove(supply, rented.instances)
            return []
        self.happened["launched"] += 1
        return list(rented.instances)

    def _spoil_launch(self) -> None:
        dice, control = self.dice, self.cloud.control
        if dice.random() < 0.3:
            control.limit("few", dice.randint(0, 4))
        for _ in range(dice.randint(0, 3)):
            what = dice.choice(
                ["lost", "throttled create", "throttled delete", "throttled list", "refused", "lost all"]
            )
            self.happened[what] += 1
            if what == "lost":
                control.lose_reply()
            elif what == "lost all":
                control.lose_reply(times=dice.randint(2, 4))
            elif what == "refused":
                control.refuse(dice.choice([CapacityError, QuotaError]), times=1)
            else:
                call = {"create": "create", "delete": "delete", "list": "describe"}[what.partition(" ")[2]]
                control.throttle(times=1, retry_after=0.05, call=call)
        queue = dice.choice([0.0, 0.0, 0.0, dice.uniform(0.0, 1800.0), None])
        if queue != 0.0:
            self.happened["never runs" if queue is None else "queued"] += 1
            control.next_machines(8, boots=queue)
        elif dice.random() < 0.15:
            self.happened["undying"] += 1
            control.next_machines(1, undying=dice.randint(1, 2))

    def _wait(self, supply: Supply, there: Sequence[Instance]) -> None:
        """Let machines boot, as a pool waits for them: it hears of each that runs within moments."""
        with self.cloud.control.state.open() as there_is:
            boots = {each.id: each.boots_at for each in there_is.machines.values()}
        order = sorted(there, key=lambda each: boots[each.id] or 0.0)
        for each in order:
            at = boots[each.id]
            if at is None:
                continue
            self._pass(supply, max(0.0, at - clock.now()) + _POLL)
            with self.cloud.control.state.open() as there_is:
                found = there_is.machines[each.id]
            if found.state == "running":
                supply.runs(self.cloud._instance(found))

    def _let_time_pass(self, supply: Supply) -> None:
        self._pass(supply, self.dice.choice([0.0, 1.0, self.dice.uniform(0.0, 7200.0)]))

    def _pass(self, supply: Supply, seconds: float) -> None:
        """Let time pass, but not beyond the pool's lifetime, which raises LifetimeExceeded as in a pool's engine."""
        until = clock.now() + seconds
        while (left := supply.rental.limits.check()) < until - clock.now():
            self.cloud.control.advance(left)
        self.cloud.control.advance(max(0.0, until - clock.now()))

    def _die(self, supply: Supply, there: list[Instance]) -> list[Instance]:
        """A machine dies, its provider forgets it, and the pool hears of that only by its silence."""
        it = self.dice.choice(there)
        with_it = [each for each in there if (it.slice and each.slice == it.slice) or each is it]
        for each in with_it:
            self.cloud.control.kill(each)
        silence = self.dice.uniform(6.0, 95.0)
        self.happened["died silently"] += 1
        self.cloud.control.advance(silence)
        self._prove(supply, with_it, dict.fromkeys((each.node for each in with_it), silence))
        return [each for each in there if each not in with_it]

    def _prove(self, supply: Supply, left: Sequence[Instance], silent: dict[int, float] | None = None) -> None:
        """End machines, and again where that is not proved, as the engine does."""
        some = list(left)
        for _ in range(8):
            unproved = supply.terminate(some, silent)
            some = [each for each in some if each.node in unproved]
            if not some:
                return
            self.cloud.control.advance(5.0)
        raise AssertionError(f"they do not end: {some}")

    def _end(self, supply: Supply, there: Sequence[Instance]) -> None:
        self.cloud.control.relent()
        if self.dice.random() < 0.2:
            self.happened["ended by another process"] += 1
            reaper.terminate_all([self.cloud], supply._terms.name, Ledger.here())
            return
        self._prove(supply, there)
        supply.close(None, proved=True)

    def _check_lifetime(self, items: Sequence[Item]) -> None:
        """Note machines that cost something after the pool's lifetime. Where an end fails, it takes longer."""
        begins = [each.begins for each in items if each.begins is not None]
        if self.lifetime is None or not begins:
            return
        over = min(begins) + self.lifetime
        slow = 60.0 if self.happened["undying"] or self.happened["throttled delete"] else 20.0
        self.faults += [
            f"{each.machine} cost something {each.ended - over:.0f} s after the lifetime"
            for each in items
            if each.ended is not None and each.begins is not None and each.ended > over + slow
        ]

    # --- the comparison --------------------------------------------------------------------------------------

    def _compare(self, lines: dict[str, Line], items: dict[str, Item]) -> None:
        for name, item in items.items():
            line = lines.get(name)
            if line is None:
                self.faults.append(f"{name} was billed {item.seconds:.1f} s and has no line")
                continue
            rent = item.prices[-1][1] / 3600
            off = (line.usd - item.usd) / rent
            if abs(off) > TOLERANCE:
                self.faults.append(f"{name}: the receipt has {line.seconds:.2f} s, the bill {item.seconds:.2f} s")
            if not line.ended:
                self.faults.append(f"{name} has ended, and the receipt does not say so")
        self.faults += [f"{name} is on the receipt and on no bill" for name in lines.keys() - items.keys()]
        self.happened["machines"] += len(items)


def run(worlds: int, seed: int) -> tuple[Counter[str], dict[int, list[str]]]:
    """Run so many worlds; what happened in them, and the faults of each world that has any, by its seed."""
    happened, faults = Counter[str](), dict[int, list[str]]()
    for n in range(worlds):
        folder = Path(tempfile.mkdtemp(prefix="skypool-bills-", dir=_MEMORY if os.path.isdir(_MEMORY) else None))
        homes = {name: str(folder / "state") for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
        one = World(seed * 1_000_000 + n, folder)
        try:
            with mock.patch.dict(os.environ, homes):
                one.run()
        finally:
            shutil.rmtree(folder)
        happened += one.happened
        if one.faults:
            faults[one.seed] = one.faults
    return happened, faults


def main(argv: Sequence[str] | None = None) -> int:
    """Run worlds and say what they came to; 1 if a receipt differs from its bill."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.bills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--pools", type=int, default=1000, help="how many worlds with real pools")
    parser.add_argument("--at-once", type=int, default=6, help="how many of these live at the same time")
    parser.add_argument("--seed", type=int, default=1, help="of the first one; the same seed gives the same worlds")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    happened, faults = run(asked.worlds, asked.seed)
    _tell(asked.worlds, happened, faults, began)
    began = time.monotonic()
    lived, wrong, late = _living.run(asked.pools, asked.seed, asked.at_once)
    _tell(asked.pools, lived, wrong, began)
    worst = ", ".join(f"{each:.1f}" for each in sorted(late)[-5:])
    print(f"seconds of rent after the promised end, the longest: {worst}; beyond {_living.LATE:g} s: {len(wrong)}")
    return 1 if faults or wrong else 0


def _tell(worlds: int, happened: Counter[str], faults: dict[int, list[str]], began: float) -> None:
    for seed, told in faults.items():
        print(f"world {seed}: {'; '.join(told)}")
    print(", ".join(f"{what}: {times}" for what, times in sorted(happened.items())))
    print(f"{worlds} worlds, {len(faults)} of them with a fault, in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
