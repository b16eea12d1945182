"""Rents one machine by the usual path of a pool, runs a call on it, ends it, and proves that nothing is left."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skypool.compute_pool.compute_pool import ComputePool, ConsoleMode, PoolOptions
from skypool.drivers.contract import Driver, Tidies, ends_itself
from skypool.drivers.preflight import failure
from skypool.model import Finding, Offer, Wanted
from skypool.proof.comparison import SEND, offered_price, price_step
from skypool.proof.report import RentedMachine, Step
from skypool.proof.selection import Stage, StageName
from skypool.rental.budget import Budget
from skypool.rental.receipt import Receipt
from skypool.runtime import instance_info

WORDS: dict[StageName, str] = {
    "first": "first machine",
    "spot": "spot machine",
    "second": "second machine",
    "guard": "machine without its client",
}
"""The titles of the stages."""
_CALL = 300.0
"""Seconds within which the call must return."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The machines that the user asked for, and the limits of each.

    Attributes:
        accelerator: the accelerator of each machine; None for the cheapest machine of all.
        region: the regions to rent in; () for all.
        lifetime: seconds after which each machine ends in any case.
        console: what the pools show of their work, as the pools' argument `console`.
    """

    accelerator: str | None = None
    region: tuple[str, ...] = ()
    lifetime: float = 1200.0
    console: ConsoleMode = "plain"

    @property
    def memory(self) -> str | None:
        """The least memory of a machine, "2GiB", which the installation of packages needs; None with an accelerator."""
        return None if self.accelerator else "2GiB"

    def options(self, driver: Driver, stage: Stage, left_usd: float) -> PoolOptions:
        """Return the arguments of the pool that rents a stage's machine, with a budget of `left_usd` US dollars."""
        market: Wanted = stage.offer.market
        budget = Budget(left_usd, best_effort=not ends_itself(driver, stage.offer))
        options: PoolOptions = {
            "nodes": 1,
            "slots": 1,
            "market": market,
            "budget": budget,
            "max_lifetime": self.lifetime,
            "console": self.console,
        }
        if self.accelerator is not None:
            options["accelerator"] = self.accelerator
        if self.memory is not None:
            options["memory"] = self.memory
        if self.region:
            options["region"] = self.region
        return options


def about() -> dict[str, Any]:
    """Return the host name and the devices of the machine that runs this call, as plain data."""
    info = instance_info()
    return {"hostname": socket.gethostname(), "devices": [each.name for each in info.accelerators]}


def rent(
    driver: Driver,
    pool: str,
    stage: Stage,
    offers: Sequence[Offer],
    options: PoolOptions,
    tell: Callable[[Step], None],
) -> tuple[RentedMachine, ...]:
    """Rent the machine of a stage, run a call on it, end it, and prove its end. Return the machines of the receipt.

    If this is interrupted, for example by Ctrl-C, the machine is ended, and the interruption is raised.

    Args:
        pool: the name of the pool that rents the machine.
        offers: the offers of the plan, to compare prices with.
        options: further arguments of the pool.
        tell: called with each step when it has ended.
    """
    title = WORDS[stage.name]
    reached, called, ended = (f"{title}: {each}" for each in ("reached", "a call", "ended"))
    rented = ComputePool(driver, name=pool, **options)
    what = reached
    began = time.monotonic()
    try:
        rented.start()
        tell(Step("cents", what, "good", _machine(rented.receipt), "", time.monotonic() - began))
        what = called
        began = time.monotonic()
        got = rented.submit(about).result(timeout=_CALL)
        tell(Step("cents", what, "good", _told(got), "", time.monotonic() - began))
    except Exception as e:  # noqa: BLE001 - any error is a step to show
        took = time.monotonic() - began
        tell(Step.of("cents", failure(what, e, f"`skypool plan -p {driver.name}` shows what can be rented"), took))
    except BaseException:  # Ctrl-C, or SIGTERM
        rented.stop()
        raise
    began = time.monotonic()
    try:
        rented.stop()
        finding = proved(driver, pool, ended)
    except Exception as e:  # noqa: BLE001 - any error is a step to show
        finding = failure(ended, e, f"run `skypool down {pool}`")
    receipt = rented.receipt
    tell(replace(Step.of("cents", finding, time.monotonic() - began), usd=receipt.usd))
    machines = machines_of(receipt, offers)
    if machines:
        tell(price_step(f"{title}: price", machines))
    return machines


def proved(driver: Driver, pool: str, what: str) -> Finding:
    """Ask the provider if anything of a pool is left. Return a finding titled `what`, which is good if nothing is.

    Raises ProviderError or ErrorGroup if the provider cannot be asked.
    """
    left = [f"machine {each.id}" for each in driver.instances(pool=pool) if each.state != "ended"]
    if isinstance(driver, Tidies):
        left += [f"{each.kind} {each.id}" for each in driver.leftovers(pool=pool)]
    if left:
        return Finding(what, False, f"the provider still lists {', '.join(left)}", f"run `skypool down {pool}`")
    return Finding(what, True, "the provider lists no machine and nothing else of the pool")


def machines_of(receipt: Receipt, offers: Sequence[Offer]) -> tuple[RentedMachine, ...]:
    """Return the lines of a receipt as machines of the report. `offers` are those of the plan, to compare prices."""
    return tuple(RentedMachine.of(receipt.pool, line, offered_price(offers, line)) for line in receipt.lines)


def _machine(receipt: Receipt) -> str:
    return ", ".join(
        f"{each.id}: {each.type} in {each.place or each.provider}, {each.market}, {each.usd_per_hour:.4f} USD/h"
        for each in receipt.lines
    )


def _told(got: object) -> str:
    """Return the result of the call of `about` as text. The host name is without its domain."""
    if not isinstance(got, dict):
        raise TypeError(f"the call returned {got!r}, and not what it was to return; {SEND}")
    devices = got["devices"]
    named = f"{len(devices)} x {devices[0]}" if devices else "no devices"
    return f"host {str(got['hostname']).partition('.')[0]}, {named}"
