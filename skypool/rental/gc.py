"""Finds machines and other resources that pools left behind at all providers, and ends them (`skypool gc`).

Instances and leftovers, here called things, are found by their tags. The ledger is not needed. If there is one, it
helps to decide what is still in use, and the ends of instances are recorded there.

- `survey`: finds the things, and decides for each if it is in use. `explained_again` says why, when more is known.
- `terminate_found`: ends things.
- `reconcile`: corrects the ledger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from skypool import clock
from skypool.drivers import registry
from skypool.drivers.contract import Driver, Renews, Tidies, abilities
from skypool.drivers.retry import at_once
from skypool.errors import ErrorGroup, UsageError
from skypool.head.steps import seen_ended
from skypool.model import Instance, Leftover
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import PATIENCE, SETTLING, Say, again, silently
from skypool.rental.records import Record, newest
from skypool.rental.run_state import told
from skypool.wire.keys import Keys

GRACE = 60.0
"""Seconds after the end of a lease for which a machine or other resource still counts as in use. Its client may be
about to renew the lease, and clocks differ."""
_ROUNDED = 2.0
"""Seconds by which the time in a tag may differ from the one that was to be written there."""
MONTH = 30 * 86400.0
"""Seconds after a pool's end for which `everyone` still returns the pool's drivers, with their recorded settings."""
Verdict = Literal["live", "lost", "unknown"]
"""The decision about a thing: "live" if it is in use, "lost" if it is not, and "unknown" if that cannot be told."""
Thing = Instance | Leftover
"""An instance, or another resource that a pool made."""


@dataclass(frozen=True, slots=True)
class Found:
    """A thing that a pool of this user has at a provider, the driver that found it, and if it is in use.

    Attributes:
        verdict: "live" if the thing is in use, "lost" if it is not, "unknown" if that cannot be told.
        why: reason for the verdict, as text.
    """

    thing: Thing
    driver: Driver
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Survey:
    """The answers of all providers: what pools of this user have there.

    Attributes:
        found: the things, sorted by provider and pool.
        asked: drivers that were asked, including those that could not answer.
        failures: pairs of a driver that could not answer and its error.
        at: time when the drivers were asked, in seconds since 1970.
    """

    found: tuple[Found, ...]
    asked: tuple[Driver, ...]
    failures: tuple[tuple[Driver, Exception], ...]
    at: float


def everyone(ledger: Ledger | None, names: Sequence[str] = ()) -> tuple[list[Driver], dict[str, Exception]]:
    """Return every driver that can be asked for what pools left behind, and the errors of drivers that cannot be made.

    These are the drivers that need no settings, and those of the ledger's pools with their recorded settings. Pools
    that ended more than 30 days ago are left out. `names` are the providers to ask; empty for all.

    An error of a recorded pool's driver has a key such as "aws of pool mine". Other errors have the provider's name as
    key, and are left out if another driver of that provider could be made.

    Raises:
        SkypoolError, ImportError: no driver can be made for one of `names`. The error of the first such name is raised.
        LedgerError: the ledger cannot be read.
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
    """Ask all drivers at once what pools of this user have at the providers, and decide what is in use. End nothing.

    Blocks until all drivers have answered, each in a thread of its own. The things are sorted by provider and pool. A
    thing that several drivers found is listed once. A driver that fails is in `failures`. May raise LedgerError.
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


def explained_again(seen: Survey, ledger: Ledger) -> Survey:
    """Return what was seen, with the same verdicts, and the reasons by what the ledger knows now. Asks no provider.

    May raise LedgerError.
    """
    records, now = ledger.pools(), time.time()
    found = list(seen.found)
    for driver in seen.asked:
        mine = [number for number, each in enumerate(found) if each.driver is driver]
        made = judged([found[number].thing for number in mine], isinstance(driver, Renews), records, now)
        for number, (_, verdict, why) in zip(mine, made, strict=True):
            if verdict == found[number].verdict:
                found[number] = replace(found[number], why=why)
    return replace(seen, found=tuple(found))


def _asked(driver: Driver) -> list[Thing] | Exception:
    """Return all things that this user's pools have at a provider, or the error if the provider cannot be asked."""
    try:
        there: list[Thing] = [each for each in driver.instances() if each.state != "ended"]
        return [*there, *(driver.leftovers() if isinstance(driver, Tidies) else ())]
    except Exception as e:  # noqa: BLE001 - the caller reports it as this driver's failure
        return e


def _key(thing: Thing) -> tuple[str, ...]:
    """Return what identifies a thing, whichever driver found it. Instances of a pool are sorted before leftovers."""
    if isinstance(thing, Instance):
        return thing.provider, thing.pool, "", f"{thing.node:06d}", thing.id, thing.token
    return thing.provider, thing.pool, thing.kind, thing.region, thing.id


def judged(
    things: Sequence[Thing], renews: bool, records: Sequence[Record], now: float
) -> list[tuple[Thing, Verdict, str]]:
    """Decide for each thing at one provider if it is in use, with the reason. No provider is asked.

    Args:
        renews: True if the expiry time in the tags of a thing is renewed while its client lives. If False, a thing may
            be in use after that time.
        records: the ledger's records of pools.
        now: the present time, in seconds since 1970.
    """
    there = {each.pool for each in things if isinstance(each, Instance)}
    made = [(thing, *_judged(thing, renews, _record_of(thing, records), there, now)) for thing in things]
    at_stake: dict[str, set[Verdict]] = {}
    for thing, verdict, _ in made:
        if isinstance(thing, Instance):
            at_stake.setdefault(thing.pool, set()).add(verdict)
    return [_with_instances(*each, at_stake.get(each[0].pool, set())) for each in made]


def _with_instances(thing: Thing, verdict: Verdict, why: str, instances: set[Verdict]) -> tuple[Thing, Verdict, str]:
    """Return a thing, its verdict and the reason. A leftover is "live" or "unknown" if instances of its pool are."""
    if isinstance(thing, Leftover) and "live" in instances and verdict != "live":
        return thing, "live", "its pool has live machines"
    if isinstance(thing, Leftover) and "unknown" in instances and verdict == "lost":
        return thing, "unknown", "the state of some machines of its pool is unknown"
    return thing, verdict, why


def _record_of(thing: Thing, records: Sequence[Record]) -> Record | None:
    """Return the record of a thing's pool, or None. Without a token, it is the newest pool of the thing's pool name."""
    same = [each for each in records if each.pool == thing.pool]
    if not isinstance(thing, Instance) or not thing.token:
        return newest(same)
    return next((each for each in same if each.has(thing)), None)


def _judged(
    thing: Thing, renews: bool, record: Record | None, there: Collection[str], now: float
) -> tuple[Verdict, str]:
    """Decide for one thing if it is in use, with the reason. `there`: the pools that have machines at its provider."""
    until = thing.until.timestamp() if thing.until is not None else None
    if record is not None and record.client_lives(now):
        return "live", f"{record.client} {'runs' if record.ending is None else 'is ending'} its pool"
    if record is not None and record.run is not None:
        if _is_of_gone(thing, record, there, now):
            return "lost", "the machine of its run is gone"
        if record.is_kept(now - GRACE) and record.run.end is not None:
            until_then = f"its machine may stay until {_clock(record.run.latest)}"
            return "live", f"its run {told(record.run.end)}, and {until_then}"
        if record.is_kept(now - GRACE):
            return "live", f"it belongs to its run, until {_clock(record.run.latest)} at the latest"
    if until is not None and now <= until + GRACE:
        return "live", f"its lease runs until {_clock(until)}"
    if until is not None and renews:
        return "lost", f"its lease ran out at {_clock(until)}"
    if record is None:
        return "unknown", "no tag says when its lease ends, and its pool is not in the ledger of this computer"
    if record.ended is not None:
        return "lost", f"its pool ended at {_clock(record.ended)}"
    if now <= record.lasts + GRACE:
        return "live", f"its client is gone, and its pool may be taken over until {_clock(record.lasts)}"
    return "lost", f"its client was last seen at {_clock(record.beat)}"


def _is_of_gone(thing: Thing, record: Record, there: Collection[str], now: float) -> bool:
    """Return True if a thing is a leftover with the end of this run in its tag, and the run's machine is not there."""
    if not isinstance(thing, Leftover) or thing.until is None or record.run is None:
        return False
    is_its = abs(thing.until.timestamp() - record.run.latest) < _ROUNDED
    return is_its and thing.pool not in there and not record.since(now - SETTLING)


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def terminate_found(found: Sequence[Found], *, patience: float = PATIENCE, say: Say = silently) -> None:
    """Terminate these things, and prove that they have ended. Blocks until then, or until `patience` is over.

    All providers are asked at the same time; at each, instances end before leftovers. A provider that fails does not
    stop the others.

    Args:
        patience: seconds for which a provider that fails is tried again. Default 120.
        say: called with a line about each error before the next attempt.

    Raises:
        ErrorGroup: the errors of the providers at which not everything could be ended.
    """
    by_driver: dict[int, list[Found]] = {}
    for each in found:
        by_driver.setdefault(id(each.driver), []).append(each)
    outcomes = at_once(lambda group: again(partial(_terminate_group, group), patience, False, say), by_driver.values())
    errors = [each for each in outcomes if isinstance(each, Exception)]
    if errors:
        raise ErrorGroup(
            "some machines or other resources could not be ended and may still cost money; correct these "
            "causes and run the same command again",
            errors,
        )


def _terminate_group(group: Sequence[Found]) -> None:
    driver = group[0].driver
    if instances := [each.thing for each in group if isinstance(each.thing, Instance)]:
        driver.terminate(instances)
    left = [each.thing for each in group if isinstance(each.thing, Leftover)]
    if left and isinstance(driver, Tidies):
        driver.tidy(left)


def reconcile(ledger: Ledger, seen: Survey, ended: Sequence[Found] = ()) -> list[str]:
    """Close the ledger's records of pools that have no process and no resource left, and delete these pools' ssh keys.

    A record stays open if one of the pool's providers was not asked or did not answer. A record also stays open if
    machines may still appear, or may run without being listed to this computer. May raise LedgerError.

    Args:
        seen: what the providers have answered.
        ended: the things in `seen` that were ended after that.

    Returns:
        The names of the pools whose records were closed, the oldest first.
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
        is_over = record.run is not None and record.run.entry.outcome is not None
        may_last = now <= record.lasts + GRACE and not is_over
        if may_last and not seen_only_there <= {(e.thing.provider, e.thing.id) for e in ended}:
            continue  # machines may run where this client does not see them; they end when their lease is over
        if all(note in answered for note in record.notes):
            for name in {note["provider"] for note in record.notes}:
                ids = [each.thing.id for each in ended if each.thing.provider == name]
                ledger.cleared(record.pool, name, ids)
            ledger.mark(record.session, partial(seen_ended, stored=None))
            ledger.end(record.session)
            Keys.of(record.pool).forget()
            over.append(record.pool)
    return over
