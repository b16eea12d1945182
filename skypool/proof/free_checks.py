"""Findings of the levels that cost nothing: this computer, what a provider tells, and creates that must be refused."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path

from skypool.drivers import preflight
from skypool.drivers.contract import Checks, Driver, Proves
from skypool.drivers.preflight import failure
from skypool.errors import CredentialsError, LedgerError
from skypool.event_loop import Loop
from skypool.model import Finding, Need, Offer
from skypool.offers.search import look_around
from skypool.offers.sort_keys import SPOT_DAYS, outdated
from skypool.rental.ledger import Ledger

TABLE_DAYS = 180
"""Days after which an on-demand price from a table counts as old. Such prices change seldom."""


# --- this computer -------------------------------------------------------------------------------------------


def of_this_computer(warn: Callable[[str], None]) -> Iterable[Finding]:
    """Yield findings about this computer: Python, ssh, ledger and clock. `warn` gets warnings about the ledger."""
    version = "{}.{}.{}".format(*sys.version_info)
    yield Finding("Python", True, f"{version}; nodes get {'{}.{}'.format(*sys.version_info)}")
    yield Finding("skypool", True, f"{metadata.version('skypool')} in {Path(__file__).parent.parent}")
    for program in ("ssh", "ssh-keygen"):
        yield _program(program)
    ledger = Ledger.here(warn)
    yield _ledger(ledger)
    yield _clock(ledger)


def _program(name: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        return Finding(name, False, "not found", "install openssh-client")
    if name != "ssh":
        return Finding(name, True, path)
    said = subprocess.run([path, "-V"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return Finding(name, said.returncode == 0, f"{path}, {(said.stderr or said.stdout).strip()}")


def _ledger(ledger: Ledger) -> Finding:
    try:
        ledger.check()
    except LedgerError as e:
        return failure("ledger", e)
    return Finding("ledger", True, f"{ledger.file} can be written")


def _clock(ledger: Ledger) -> Finding:
    """Check that the wall clock is not over 1 s before the ledger's latest time or this file's modification time."""
    now, last = time.time(), Path(__file__).stat().st_mtime
    with contextlib.suppress(LedgerError):  # _ledger() reports it
        last = max([last, *(each.beat for each in ledger.pools())])
    text = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if now < last - 1:
        before = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return Finding(
            "clock",
            False,
            f"{text} is before {before}, a time seen earlier",
            "set this computer's clock: the end of a lease is computed with it",
        )
    return Finding("clock", True, text)


# --- a provider, level "read" --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading:
    """The findings of the level "read". `known` is False if the provider does not accept the credentials."""

    findings: tuple[Finding, ...]
    known: bool


def read(driver: Driver) -> Reading:
    """Ask a provider for everything that costs nothing and changes nothing, and return the findings, each fact once.

    If the credentials are not accepted, most other checks fail, too. Then only the findings that are good are returned,
    and the reason for the refusal. The reason may be a wrong clock of this computer, because requests are signed with
    the time.
    """
    with ThreadPoolExecutor() as threads:
        told = threads.submit(_told, driver)
        offers = threads.submit(_offers, driver)
        there = _instances(driver)
        checked = told.result()
        sold = offers.result()
    bad_clock = [each for each in checked if not each.good and each.what.endswith("clock")]
    if isinstance(there, CredentialsError):
        reason = bad_clock or [failure("credentials", there)]
        return Reading((*(each for each in checked if each.good), *reason), known=False)
    instances = failure("machines", there) if isinstance(there, Exception) else _counted(there)
    return Reading(tuple(once([*checked, instances, *sold])), known=True)


def once(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings in which failures with the same advice are merged into one, with the titles of all.

    Failures without advice are merged if they have the same text.
    """
    groups: dict[object, list[Finding]] = {}
    for place, each in enumerate(findings):
        groups.setdefault(place if each.good else each.advice or each.text, []).append(each)
    return [replace(several[0], what=", ".join(each.what for each in several)) for several in groups.values()]


def _told(driver: Driver) -> list[Finding]:
    """Return the findings of the driver's own checks; [] without checks. Leave out ssh, which is checked elsewhere."""
    if not isinstance(driver, Checks):
        return []
    try:
        return [each for each in driver.check() if not each.what.endswith(preflight.SSH)]
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return [failure("checks of the driver", e)]


def _instances(driver: Driver) -> int | Exception:
    try:
        return len(driver.instances())
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return e


def _counted(count: int) -> Finding:
    return Finding("machines", True, f"{count} {'machine' if count == 1 else 'machines'} of your pools")


def _offers(driver: Driver) -> list[Finding]:
    """Return findings about the offers: how many there are, the cheapest, and the age of prices from tables."""
    try:
        made = Loop.shared().run(look_around([driver], Need(market="cheapest")))
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return [failure("offers", e, "run `skypool offers --refresh` for this provider")]
    best = made.offers[0]
    many = "1 offer" if len(made.offers) == 1 else f"{len(made.offers):,} offers"
    place = f" in {best.zone or best.region}" if best.zone or best.region else ""
    text = f"{many}; the cheapest is {best.instance_type}{place} for {best.usd_per_hour:.4f} USD/h"
    return [Finding("offers", True, text), *prices(made.offers, datetime.now(UTC).date())]


def prices(offers: Sequence[Offer], today: date) -> list[Finding]:
    """Return a finding about prices from tables, as a list; [] if the provider itself told all prices.

    The finding is bad if a price is too old: over `SPOT_DAYS` days for spot, and over `TABLE_DAYS` (180) days for
    on-demand. `today` is the day in UTC.
    """
    tables = Counter(each.price_source.day for each in offers if each.price_source.kind == "table")
    if not tables:
        return []
    old = len(outdated(offers, today)) + sum(
        each.market == "on-demand" and each.price_source.is_outdated(today, TABLE_DAYS) for each in offers
    )
    text = f"{sum(tables.values()):,} of {len(offers):,} prices are from tables of {', '.join(sorted(tables))}"
    if not old:
        return [Finding("prices", True, text)]
    return [
        Finding(
            "prices",
            False,
            f"{text}; {old:,} are too old (more than {SPOT_DAYS} days for spot, {TABLE_DAYS} for on-demand)",
            "install a later skypool, or let the provider tell its prices, as the driver's page describes",
        )
    ]


# --- a provider, level "write" -------------------------------------------------------------------------------


def refused_creates(driver: Driver) -> list[Finding] | None:
    """Send creates that the provider must refuse, and return the findings. None if the driver has no such creates."""
    if not isinstance(driver, Proves):
        return None
    try:
        return once(driver.prove_creates())
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return [failure("creates that must be refused", e)]
