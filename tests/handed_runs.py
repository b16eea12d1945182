"""Runs that were handed over to their machine, in a cloud whose machines are mere records.

`python -m tests.handed_runs CLOUD NAME STATE` hands a run over, up to a state such as "detaching", and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import skypool as sky
from skypool.head import messages, rows
from skypool.head.states import Claim, Entry
from skypool.head.states import Ledger as State
from skypool.model import Instance, Leftover, Need
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record, newest
from skypool.rental.run_account import RunAccount
from skypool.rental.supply import Supply
from skypool.testing import FakeCloud, Stock
from tests.supplies import supply_of
from tests.test_ledger import change

HEIR = messages.heir_digest("the word of the runner")
SEAL = messages.seal_key("the word of the runner")
STOCK = [Stock("gpu-8", 36.0, "H100:8"), Stock("gpu-8", 18.0, "H100:8", market="spot"), Stock("small", 0.1)]


def cloud_at(folder: Path | str, ends_itself: bool = True) -> FakeCloud:
    list(FakeCloud(folder, stock=STOCK, machines=False, ends_itself=ends_itself).offers(Need()))
    return FakeCloud(folder, machines=False, patience=0.3, ends_itself=ends_itself)


def runners_of(run: str) -> list[int]:
    """The processes of the runner of a run whose machine is this computer."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = each.read_bytes()
            if b"skypool.runs.runner" in words and f"/{run}.0.".encode() in words:
                found.append(int(each.parent.name))
    return found


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def rented(
    cloud: FakeCloud,
    name: str = "train",
    budget: float | None = 100.0,
    market: Literal["on-demand", "spot"] = "on-demand",
    max_usd_per_hour: float | None = None,
) -> Supply:
    """The supply of a pool with one machine, which this process has rented."""
    cloud = replace(cloud, stock=None)  # the ledger can record the rest
    pool = sky.ComputePool(
        cloud, accelerator="H100:8", name=name, budget=budget, lease=600, console="off", market=market,
        max_usd_per_hour=max_usd_per_hour,
    )  # fmt: skip
    supply = supply_of(pool)
    asyncio.run(supply.look())
    supply.begin()
    made = asyncio.run(supply.rent([0], None, _pause))
    assert made.error is None
    supply.rental.has(made.instances)
    supply.rental.billed(made.instances)
    return supply


def handed(
    cloud: FakeCloud, name: str = "train", state: State = State.DETACHED, seconds: float = 3600.0, budget: float = 100.0
) -> RunAccount:
    """Hand a run over, as its client does, up to a state. Its heir is `HEIR`."""
    supply = rented(cloud, name, budget)
    account = RunAccount(supply, Claim(name), seconds, HEIR, SEAL)
    account.write(Entry(State.DETACHING))
    account.renew_tags()
    if state is not State.DETACHING:
        account.write(Entry(state))
    return account


def write_row(folder: Path, claim: Claim, heir: str = HEIR, **more: str) -> None:
    """Write the row of a run into its folder, as its agent does."""
    folder.mkdir(parents=True, exist_ok=True)
    rows.write(str(folder), rows.WrittenRow(claim, time.time() + 3600, heir, time.time(), **more))


def record_of(name: str = "train") -> Record:
    found = newest(Ledger.here().pools(name))
    assert found is not None
    return found


def untils(cloud: FakeCloud, name: str = "train") -> list[datetime]:
    """The times until which the machines and other things of a pool are needed, as their tags say."""
    things: list[Instance | Leftover] = [*cloud.instances(pool=name), *cloud.leftovers(pool=name)]
    return [each.until for each in things if each.until is not None]


def passed(cloud: FakeCloud, seconds: float, name: str = "train") -> None:
    """So many seconds have passed, for the ledger and for the tags at the provider."""
    file, session = Ledger.here().file, record_of(name).session
    columns = {"runs": "at ends latest seen", "pools": "started beat", "instances": "launched billed_from"}
    for table, names in columns.items():
        for column in names.split():
            change(file, f"UPDATE {table} SET {column} = {column} - ? WHERE session = ?", seconds, session)
    if times := untils(cloud, name):
        cloud.renew(name, max(times) - timedelta(seconds=seconds))


def begin(folder: str, name: str, state: str) -> None:
    handed(cloud_at(folder), name, State(state))
    print("holds it", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    begin(*sys.argv[1:])
