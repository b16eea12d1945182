"""Finds what pools left behind at all providers by its tags, judges each thing, and ends it (`skypool gc`).

The ledger is not needed: it only helps to judge, as it knows whose client lives, and is told what has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from skypool import clock
from skypool.drivers import registry
from skypool.drivers.contract import Driver, Renews, Tidies, abilities
from skypool.errors import ErrorGroup, UsageError
from skypool.model import Instance, Leftover
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import PATIENCE, SETTLING, Say, again, silently
from skypool.rental.records import Record, newest
from skypool.wire.keys import Keys

GRACE = 60.0
"""Seconds after the time on a tag in which its client may still be putting it off; clocks differ, too."""
MONTH = 30 * 86400.0
"""Seconds for which a pool that has ended has its provider asked, with its settings, for what it left behind."""
Verdict = Literal["live", "lost", "unknown"]
Thing = Instance | Leftover


@dataclass(frozen=True, slots=True)
class Found:
    """Something that a pool of this user has at a provider.

    Attributes:
        verdict: "live" where somebody needs it, "lost" where nobody does, "unknown" where that cannot be told.
        why: the reason, in words.
    """

    thing: Thing
    driver: Driver
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What there is.

    Attributes:
        failures: drivers that could not say what they have, and why.
        at: when they were asked, seconds since 1970 by the ledger's clock.
    """

    found: tuple[Found, ...]
    asked: tuple[Driver, ...]
    failures: tuple[tuple[Driver, Exception], ...]
    at: float


def everyone(ledger: Ledger | None, names: Sequence[str] = ()) -> tuple[list[Driver], dict[str, Exception]]:
    """Every driver that can be asked: those that need no settings, and those of the ledger's pools with theirs.

    Args:
        names: only these providers.

    Returns:
        The drivers, and for the names of those that cannot be made: why.

    Raises:
        UsageError: none of these names is a provider that can be asked. LedgerError: the ledger cannot be read;
            `everyone(None)` does without.
    """
    drivers, left_out = registry.ready(names)
    known = [_text(registry.noted(each)) for each in drivers]
    for record in ledger.pools() if ledger is not None else ():
        is_over = record.state(now := time.time()) == "ended"
        if is_over and (record.ended or record.lasts) < now - MONTH:
            continue
        for note in record.notes:
            if (names and note["provider"] not in names) or _text(note) in known:
                continue
            known.append(_text(note))
            try:
                drivers.append(registry.made(note))
            except UsageError as e:
                if not is_over:
                    left_out[f"{note['provider']} of pool {record.pool}"] = e
    there = {each.name for each in drivers}
    for name in names:
        if name not in there and name in left_out:
            raise left_out[name]
    return drivers, {name: e for name, e in left_out.items() if name not in there}


def _text(note: registry.DriverNote) -> str:
    return json.dumps(note, sort_keys=True)


def survey(drivers: Sequence[Driver], ledger: Ledger | None = None) -> Survey:
    """Ask them all at once what pools of this user have there, and judge each thing. Ends nothing.

    Raises:
        LedgerError: it cannot be read; `survey(drivers)` does without.
    """
    at = clock.now()
    records = ledger.pools() if ledger is not None else []
    with ThreadPoolExecutor(max_workers=max(1, len(drivers))) as threads:
        answers = list(threads.map(_asked, drivers))
    found: dict[tuple[str, ...], Found] = {}
    failures = []
    for driver, answer in zip(drivers, answers, strict=True):
        if isinstance(answer, Exception):
            failures.append((driver, answer))
            continue
        for each in judged(answer, isinstance(driver, Renews), records, time.time()):
            thing, verdict, why = each
            found.setdefault(_key(thing), Found(thing, driver, verdict, why))
    ordered = sorted(found.values(), key=lambda each: _key(each.thing))
    return Survey(tuple(ordered), tuple(drivers), tuple(failures), at)


def _asked(driver: Driver) -> list[Thing] | Exception:
    try:
        there: list[Thing] = [each for each in driver.instances() if each.state != "ended"]
        return [*there, *(driver.leftovers() if isinstance(driver, Tidies) else ())]
    except Exception as e:  # noqa: BLE001 - it is told as this driver's failure
        return e


def _key(thing: Thing) -> tuple[str, ...]:
    """Instances before what they use; the same thing found with two settings of a provider is one."""
    if isinstance(thing, Instance):
        return thing.provider, thing.pool, "", f"{thing.node:06d}", thing.id, thing.token
    return thing.provider, thing.pool, thing.kind, thing.region, thing.id


def judged(
    things: Sequence[Thing], renews: bool, records: Sequence[Record], now: float
) -> list[tuple[Thing, Verdict, str]]:
    """What becomes of a provider's things. Pure.

    Args:
        renews: whether the provider's tags are renewed while a client lives; else their time says little.
    """
    made = [(thing, *_judged(thing, renews, _record_of(thing, records), now)) for thing in things]
    at_stake: dict[str, set[Verdict]] = {}
    for thing, verdict, _ in made:
        if isinstance(thing, Instance):
            at_stake.setdefault(thing.pool, set()).add(verdict)
    return [_with_instances(*each, at_stake.get(each[0].pool, set())) for each in made]


def _with_instances(thing: Thing, verdict: Verdict, why: str, instances: set[Verdict]) -> tuple[Thing, Verdict, str]:
    """What is no instance lasts as long as those of its pool."""
    if isinstance(thing, Leftover) and "live" in instances and verdict != "live":
        return thing, "live", "its pool has live machines"
    if isinstance(thing, Leftover) and "unknown" in instances and verdict == "lost":
        return thing, "unknown", "of some machines of its pool nothing is known"
    return thing, verdict, why


def _record_of(thing: Thing, records: Sequence[Record]) -> Record | None:
    """The one that rented it. By the pool's name only where the thing has no token: another client may use the name."""
    same = [each for each in records if each.pool == thing.pool]
    if not isinstance(thing, Instance) or not thing.token:
        return newest(same)
    return next((each for each in same if each.has(thing)), None)


def _judged(thing: Thing, renews: bool, record: Record | None, now: float) -> tuple[Verdict, str]:
    until = thing.until.timestamp() if thing.until is not None else None
    if record is not None and record.client_lives(now):
        return "live", f"{record.client} {'holds' if record.ending is None else 'is ending'} its pool"
    if until is not None and now <= until + GRACE:
        return "live", f"its lease runs until {_clock(until)}"
    if until is not None and renews:
        return "lost", f"its lease ran out at {_clock(until)}"
    if record is None:
        return "unknown", "no tag says until when it is needed, and its pool is not in the ledger here"
    if record.ended is not None:
        return "lost", f"its pool ended at {_clock(record.ended)}"
    if now <= record.lasts + GRACE:
        return "live", f"its client is gone, and it may be taken over until {_clock(record.lasts)}"
    return "lost", f"its client was heard of last at {_clock(record.beat)}"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def terminate_found(found: Sequence[Found], *, patience: float = PATIENCE, say: Say = silently) -> None:
    """End these things and prove it: instances first, then what they used.

    Raises:
        ErrorGroup: what could not be ended, once everything was tried.
    """
    by_driver: dict[int, list[Found]] = {}
    for each in found:
        by_driver.setdefault(id(each.driver), []).append(each)
    errors: list[Exception] = []
    for group in by_driver.values():
        try:
            again(partial(_terminate_group, group), patience, False, say)
        except Exception as e:  # noqa: BLE001 - raised below, once the others had their turn
            errors.append(e)
    if errors:
        raise ErrorGroup("not everything could be ended", errors)


def _terminate_group(group: Sequence[Found]) -> None:
    driver = group[0].driver
    if instances := [each.thing for each in group if isinstance(each.thing, Instance)]:
        driver.terminate(instances)
    left = [each.thing for each in group if isinstance(each.thing, Leftover)]
    if left and isinstance(driver, Tidies):
        driver.tidy(left)


def reconcile(ledger: Ledger, seen: Survey, ended: Sequence[Found] = ()) -> list[str]:
    """Let the ledger know what has ended: pools that nobody holds and of which nothing is there any more.

    Args:
        seen: what there was; ended: what was ended since.

    Returns:
        The names of pools that it holds to be over now.
    """
    gone = {_key(each.thing) for each in ended}
    there = {each.thing.pool for each in seen.found if _key(each.thing) not in gone}
    failed = {id(driver) for driver, _ in seen.failures}
    answered = [registry.noted(each) for each in seen.asked if id(each) not in failed]
    partial_lists = {each.name for each in seen.asked if not abilities(each).lists_all}
    over = []
    now = time.time()
    for record in ledger.pools():
        is_open = record.ended is None or record.running or record.intents
        may_come = set(record.since(seen.at - SETTLING)) - {(each.thing.provider, each.thing.id) for each in ended}
        if not is_open or may_come or record.client_lives(now) or record.pool in there:
            continue
        seen_only_there = {(each.provider, each.id) for each in record.running if each.provider in partial_lists}
        if now <= record.lasts + GRACE and not seen_only_there <= {(e.thing.provider, e.thing.id) for e in ended}:
            continue  # they may run where this client does not see them, and end with their lease at the latest
        if all(note in answered for note in record.notes):
            for name in {note["provider"] for note in record.notes}:
                ids = [each.thing.id for each in ended if each.thing.provider == name]
                ledger.cleared(record.pool, name, ids)
            ledger.end(record.session)
            Keys.of(record.pool).forget()
            over.append(record.pool)
    return over
