"""Programs that rent from a cloud of the lab, each a process of its own: they are killed, others collect the rest.

A cloud's tests say in one `Client` how it is used. What one of them left is known by the name of its pool, whatever it
is: instances, hosts of a slice, volumes.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest

import skypool as sky
from skypool.drivers.contract import Driver, Tidies
from tests.forks import Fork

POOL = """
import sys, time
import skypool as sky

sky.Budget.check_start = lambda *_, **__: None
with sky.ComputePool(eval(sys.argv[1]), console="off", **eval(sys.argv[2])) as pool:
    assert pool.submit(abs, -1).result() == 1
    print("at work", flush=True)
    time.sleep(float(sys.argv[3]))
"""
LATER = """
import sys, time
from skypool import clock
from skypool.cli import main

real, later = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + later
clock._BEGAN += later
main()
"""
"""`skypool`, so many seconds later as its first argument says."""
NAMED = """
import os, requests
made = requests.Session.__init__

def init(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.headers["X-Client"] = os.environ["X_CLIENT"]

requests.Session.__init__ = init
"""
LEASE_OVER = 3600.0
losses = pytest.mark.parametrize(
    ("ledger", "lose_reply"), [(True, False), (False, True)], ids=["ledger", "no ledger, replies lost"]
)
"""What is lost with the clients of a matrix."""


class World(Protocol):
    """An account in the lab."""

    on_call: Callable[[Any, str], object]

    def drop(self, action: str, *, moment: str = "after", when: Callable[[Any], bool] = ...) -> object:
        """Close the connection of the next call of an action, before or after it takes effect."""
        ...

    def left(self) -> dict[str, int]:
        """What is there that is billed, or would be left behind."""
        ...


@dataclass(frozen=True)
class Client:
    """How programs use a cloud.

    Attributes:
        name: of the provider.
        driver: an expression that makes it, as a program that has imported `skypool as sky` writes it.
        create: the call of the lab's cloud that rents; a pattern where several do.
        reads: what calls are named that change nothing.
        terms: of each of its pools.
        first: what each program does first.
        variable: of the environment, by which one client is told from another in the calls that it makes.
        value: its value for a client with this name.
        who: a call's client, as `value` has it.
        shares_prices: to ask for prices takes so many calls that only the first client does it.
    """

    name: str
    driver: str
    create: str
    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reads: str = r"GET .*|(Describe|Get|List)\w+"
    first: str = ""
    variable: str = "X_CLIENT"
    value: Callable[[str], str] = str
    who: Callable[[Any], str] = lambda call: call.headers.get("x-client", "")
    shares_prices: bool = False

    def start(self, seconds: float, terms: Mapping[str, Any], **environment: str) -> Fork:
        """A program with a pool of which it says "at work", and that it leaves so many seconds later."""
        program = self.first + (NAMED if "X_CLIENT" in environment else "") + POOL
        return Fork(program, self.driver, repr({**self.terms, **terms}), str(seconds), environment=environment)

    def killed(self, terms: str) -> None:
        """One that was killed while its pool was at work: nobody is left to end it.

        Args:
            terms: of the pool; a dict, as a program writes it.
        """
        process = self.start(600, {"name": "train", **eval(terms)})
        said = process.stdout.readline()
        process.kill()
        ended = process.end()
        assert said == "at work\n", ended

    def gc(self, later: float = LEASE_OVER, **environment: str) -> None:
        """`skypool gc --yes` of another process, so many seconds later."""
        program = self.first + LATER
        done = Fork(program, str(later), "gc", "--yes", "--provider", self.name, environment=environment).end()
        assert done.returncode == 0, done

    def changes_nothing(self, call: str) -> bool:
        """Whether a call only asks."""
        return re.fullmatch(self.reads, call) is not None

    def left(self) -> Counter[str]:
        """How much there is of each pool: instances, and what else the cloud has of it."""
        driver: Driver = eval(self.driver, {"sky": sky})
        pools = [each.pool for each in driver.instances()]
        return Counter(pools + ([each.pool for each in driver.leftovers()] if isinstance(driver, Tidies) else []))


class Cell(NamedTuple):
    """A client of the matrix: the number of the call at which it is killed, and whether before or after its effect."""

    number: int
    moment: str

    @property
    def name(self) -> str:
        return f"p{self.number}-{self.moment}"


@dataclass
class Matrix:
    """Clients of one account: for each call that one makes in its life, one is killed before it and one after it.

    Of calls that change nothing, the second would be the first again: neither hears the reply. They count only where
    those who collect have a ledger: without one, only what the cloud has matters.

    Attributes:
        home: of their ledgers.
        terms: of their pools.
        all: whether calls count that change nothing.
    """

    client: Client
    world: World
    home: Path
    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    all: bool = True
    processes: dict[str, Fork] = field(default_factory=dict[str, Fork])
    fates: dict[str, Cell] = field(default_factory=dict[str, Cell])
    calls: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on_call(self, call: Any, moment: str) -> None:
        """Kill whose hour has come."""
        who = self.client.who(call)
        if not self.all and self.client.changes_nothing(call.action):
            return
        with self.lock:
            mine = self.calls.setdefault(who, [])
            if moment == "before":
                mine.append(call)
            number = 1 + next(at for at, each in enumerate(mine) if each is call)
        if self.fates.get(who) == (number, moment):
            self.processes[who].kill()
            if moment == "before":
                self.world.drop(call.action, moment="before", when=lambda other: other is call)

    def live(self, name: str, fate: Cell | None = None, *, lose_reply: bool = False) -> list[str]:
        """One life, which ends with its fate or well if there are fewer calls; the calls of it."""
        who = self.client.value(name)
        if fate is not None:
            self.fates[who] = fate
        if lose_reply:
            self.world.drop(self.client.create, when=lambda call: self.client.who(call) == who)
        places = {"XDG_STATE_HOME": str(self.home / name)}
        if not self.client.shares_prices:
            places["XDG_CACHE_HOME"] = str(self.home / name / "cache")
        with self.lock:
            terms = {"name": name, "lease": "10m", **self.terms}
            self.processes[who] = process = self.client.start(0, terms, **places, **{self.client.variable: who})
        ended = process.end()
        calls = [each.action for each in self.calls.get(who, [])]
        killed = fate is not None and fate.number <= len(calls)
        assert ended.returncode == (-signal.SIGKILL if killed else 0), ended
        return calls

    def leaves_nothing(self, *, ledger: bool, lose_reply: bool) -> None:
        """What each left, and that nothing is left once the leases are over and it is collected.

        A third of the matrix, unless WHOLE_MATRICES is set (`tests/soak/matrices.py`), and always one that is killed
        once it has rented. That one is alone: of several at once, some are refused what another has taken, and rent
        later.

        Args:
            ledger: whether those who collect have the ledgers of the dead.
            lose_reply: whether no client hears of what it has rented.
        """
        self.world.on_call = self.on_call
        if self.client.shares_prices:
            self.live("first")
        self.all = ledger
        whole = self.live("whole", lose_reply=lose_reply)
        assert self.world.left() == {}
        cells = [
            Cell(number, moment)
            for number, call in enumerate(whole, 1)
            for moment in (["before"] if self.client.changes_nothing(call) else ["before", "after"])
        ]
        rents = Cell(max(at for at, call in enumerate(whole, 1) if re.fullmatch(self.client.create, call)), "after")
        cells = [each for each in (cells if os.environ.get("WHOLE_MATRICES") else cells[1::3]) if each != rents]
        lives = [self.live(rents.name, rents, lose_reply=lose_reply)]
        with ThreadPoolExecutor(4) as several:
            lives += several.map(lambda each: self.live(each.name, each, lose_reply=lose_reply), cells)
        cells = [rents, *cells]
        left = self.client.left()
        for each in [each.name for each in cells] if ledger else ["none"]:
            self.client.gc(XDG_STATE_HOME=str(self.home / each))
            if not self.world.left():
                break
        now = self.client.left()
        print(f"\n{'killed at call':>36}  {'':6}  left  after gc")
        for cell, calls in zip(cells, lives, strict=True):
            at = calls[cell.number - 1] if cell.number <= len(calls) else "(it was through)"
            print(f"{f'{cell.number} {at}':>36}  {cell.moment:6}  {left[cell.name]:>4}  {now[cell.name]:>8}")
        assert left[rents.name]
        assert self.world.left() == {}
