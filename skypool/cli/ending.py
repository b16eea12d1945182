"""`skypool down`: end pools by name. `skypool gc`: find and end what pools left behind, at every provider."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from skypool import clock
from skypool.buckets import unfinished
from skypool.buckets.bucket import Bucket
from skypool.cli import output, unfinished_uploads
from skypool.cli.run_end import end_data
from skypool.drivers import registry
from skypool.drivers.contract import Driver
from skypool.errors import CredentialsError, ErrorGroup, LedgerError, SkypoolError, UsageError
from skypool.model import Instance
from skypool.rental import run_state
from skypool.rental.gc import Found, Survey, everyone, explained_again, reconcile, survey, terminate_found
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import spelt
from skypool.rental.reaper import terminate_all
from skypool.rental.records import Record, RunEnd, newest
from skypool.runs.asking import ask_machines
from skypool.runs.ends_here import note_ends
from skypool.runs.machine_end import by_user

Yes = Annotated[bool, typer.Option("--yes", "-y", help="End the pools without asking for confirmation.")]
Providers = Annotated[
    list[str] | None, typer.Option("--provider", "-p", help="Ask only this provider (repeatable). Default: all.")
]
_NOT_SET_UP = (UsageError, CredentialsError, ImportError)
"""Types of errors that are raised if this user has not set up a provider."""


def add_to(app: typer.Typer) -> None:
    """Add the commands `skypool down` and `skypool gc` to the program."""
    app.command("down")(down)
    app.command("gc")(gc)


def _ledger() -> Ledger | None:
    """Return this user's ledger. If it cannot be read, tell the user and return None: the commands go on without it."""
    ledger = Ledger.here(output.warn)
    try:
        note_ends(ledger)
    except LedgerError as e:
        output.complain(f"{e} (continuing without the ledger)")
        return None
    return ledger


# --- pools by name -------------------------------------------------------------------------------------------


def down(
    names: Annotated[list[str], typer.Argument(help="Names of pools, as `skypool ps` shows them.")], yes: Yes = False
) -> None:
    """End pools, whichever client started them, and check that they have ended.

    Machines, keys, disks and other things of a pool are found by their tags. The exit status is 1 if a pool could not
    be ended.
    """
    ledger = _ledger()
    failed = False
    for name in dict.fromkeys(map(spelt, names)):
        try:
            _down(name, ledger, yes)
        except SkypoolError as e:
            output.complain(_said(e))
            failed = True
    if failed:
        raise typer.Exit(1)


def _down(name: str, ledger: Ledger | None, yes: bool) -> None:
    records = ledger.pools(name) if ledger is not None else []
    noted = _drivers_of(records)
    drivers, doubts = (noted, dict[str, Exception]()) if noted else everyone(ledger)
    seen = survey(drivers, ledger)
    found = [each for each in seen.found if each.thing.pool == name]
    failures = {driver.name: e for driver, e in seen.failures}
    is_open = any(each.ended is None or each.running or each.intents for each in records)
    if not found and not (is_open and records):
        for provider, e in {**doubts, **failures}.items():
            output.say(f"not asked: {provider}: {_said(e)}")
        raise UsageError(
            f"no provider has machines or other resources of a pool called {name!r}; `skypool ps` and `skypool "
            "gc` list existing pools"
        )
    for line in _to_end(name, found, records):
        output.say(line)
    unheard: dict[str, str] = {}
    if ledger is not None:
        unheard = ask_machines(ledger, records, found)
        records = ledger.pools(name)
    listed = [each.thing for each in found if isinstance(each.thing, Instance)]
    kept = [
        each
        for each in records
        if each.is_kept(clock.now()) and (doubts or failures or any(each.has(thing) for thing in listed))
    ]
    for each in kept:
        why = f", so far as is known ({unheard[each.session]})" if each.session in unheard else ""
        output.say(f"pool {name}: {_what_ends(each)}{why}; what it has not saved is lost")
    _confirm(f"End {'run' if kept else 'pool'} {name!r}?", yes)
    if ledger is not None:
        if not yes:  # it may have ended while its user was asked
            ask_machines(ledger, records, found)
        ledger.ending(name)
    asked = [each for each in drivers if noted or each.name not in failures]
    terminate_all(asked, name, ledger, say=output.say)
    if ledger is not None and any(isinstance(each.thing, Instance) for each in found):
        for each in kept:  # a run whose outcome is known keeps it
            ledger.mark(each.session, by_user)
    if elsewhere := _of_others(found, records):
        terminate_found(elsewhere, say=output.say)
    for record in records:
        if ledger is not None and record.ended is None and (after := ledger.record(record.session)) is not None:
            if after.run is not None and after.run.end is not None:
                output.say(f"run {name} {run_state.told(after.run.end)}")
            output.say(str(after.receipt(after.ended or 0.0)))
    unseen = [e for driver, e in seen.failures if not noted and not isinstance(e, _NOT_SET_UP)]
    if unseen:
        raise ErrorGroup(
            f"what the other providers list of pool {name!r} has ended, but a provider that could not be asked may "
            "have more of it; correct the cause, and run the same command again",
            unseen,
        )
    if any(each.verdict != "lost" for each in elsewhere):
        output.say(
            f"every machine of pool {name} has ended; it was rented from another computer, and a program that still "
            "runs there rents new ones when it misses these: end it there, and run the same command again"
        )
    else:
        output.say(f"pool {name} has ended")


def _what_ends(record: Record) -> str:
    """Return what is on a machine that belongs to a run: a run that goes on, or one that has ended."""
    if record.run is None or record.run.end is None:
        return "its run belongs to its machine and goes on there"
    return f"its run {run_state.told(record.run.end)}; its machine is still there"


def _drivers_of(records: Sequence[Record]) -> list[Driver]:
    """Return the drivers of the pools in `records`, each once. If one cannot be made, tell the user and return []."""
    notes = {str(note): note for record in records for note in record.notes}
    try:
        return [registry.made(note) for note in notes.values()]
    except UsageError as e:
        output.complain(f"{e}; asking every provider that is set up instead")
        return []


def _of_others(found: Sequence[Found], records: Sequence[Record]) -> list[Found]:
    """Return `found` if another client rented one of its machines, which `records` lack then. Otherwise return []."""
    machines = [each.thing for each in found if isinstance(each.thing, Instance)]
    if all(any(record.has(each) for record in records) for each in machines):
        return []
    return list(found)


def _to_end(name: str, found: Sequence[Found], records: Sequence[Record]) -> list[str]:
    lines = [f"pool {name}: {_what(each)} at {each.thing.provider}: {each.why}" for each in found]
    if not found:
        lines = [f"pool {name}: found no machine or other resource of this pool; checking once more"]
    if any(each.verdict != "lost" for each in _of_others(found, records)):
        lines.append(
            f"pool {name}: another computer rented some of these; if its program still runs, end it there first"
        )
    return lines


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("stdin is not a terminal, so the end cannot be confirmed by hand: pass --yes to end the pool")
    if not typer.confirm(question):
        raise typer.Exit(1)


# --- whatever is left ----------------------------------------------------------------------------------------


def gc(
    provider: Providers = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also end things of unknown state. Live ones are kept.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="End what is lost. Default: only list it.")] = False,
    bucket: Annotated[
        str | None,
        typer.Option(
            "--bucket",
            metavar="URL",
            help="Only look for unfinished uploads below s3://NAME/PREFIX or gs://NAME/PREFIX.",
        ),
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="URL", help="The server of the bucket, if it is another.")
    ] = "",
    region: Annotated[str, typer.Option("--region", help="The region of the bucket.")] = "",
    keys: Annotated[
        str, typer.Option("--keys", metavar="ID,SECRET", help="Names of the variables with the keys of the bucket.")
    ] = "",
    as_json: output.AsJson = False,
) -> None:
    """Find machines, keys and disks that your pools left behind, by their tags, in every region.

    The ledger is not needed. Unfinished uploads to buckets are found, too: those that pools of this computer have left,
    and with --bucket those of a day ago or earlier. Without --yes nothing is ended or removed. The exit status is 1 if
    a provider that you use could not be asked, or if something could not be ended.
    """
    only = unfinished_uploads.bucket_named(bucket, endpoint, region, keys, (provider, everything))
    ledger = _ledger()
    if only is not None:
        _sweep_bucket(only, ledger, yes, as_json)
        return
    drivers, left_out = everyone(ledger, provider or ())
    seen = survey(drivers, ledger)
    if ledger is not None:  # before their machines end, which may know how runs have ended
        ask_machines(ledger, ledger.open_pools(), seen.found)
        seen = explained_again(seen, ledger)
    doomed = [each for each in seen.found if each.verdict == "lost" or (everything and each.verdict == "unknown")]
    if not as_json:
        _show(seen)
    error = _swept(doomed, as_json) if yes and doomed else None
    over = reconcile(ledger, seen, doomed if yes and error is None else ()) if ledger is not None else []
    failures, ends = _failures(seen, left_out), _ends_of(over, ledger)
    uploads = unfinished_uploads.look(ledger, None, yes)
    if as_json:
        told = _told(seen, doomed, yes and error is None)
        asked = sorted({each.name for each in seen.asked} - failures.keys())
        output.data({
            "found": told, "uploads": unfinished_uploads.as_data(uploads, yes), "over": list(over), "asked": asked,
            "runs": {name: _end_data(end) for name, end in ends.items()},
            "not_asked": failures | uploads.failures,
        })  # fmt: skip
    else:
        _tell(seen, doomed, yes, over, failures, ends)
        unfinished_uploads.show(uploads, yes)
    if error is not None:
        output.complain(_said(error))
    if error is not None or _serious(seen, provider or (), ledger):
        raise typer.Exit(1)


def _sweep_bucket(bucket: Bucket, ledger: Ledger | None, yes: bool, as_json: bool) -> None:
    uploads = unfinished_uploads.look(ledger, bucket, yes)
    if as_json:
        found = unfinished_uploads.as_data(uploads, yes)
        output.data({"uploads": found, "not_asked": uploads.failures})
    else:
        unfinished_uploads.show(uploads, yes, unfinished.command(bucket))
        if not uploads.count and not uploads.failures:
            output.say(f"{bucket} has no unfinished upload that is a day old")
    if uploads.failures:
        raise typer.Exit(1)


def _swept(doomed: Sequence[Found], quietly: bool) -> ErrorGroup | None:
    try:
        terminate_found(doomed, say=(lambda text: None) if quietly else output.say)
    except ErrorGroup as e:
        return e
    return None


_HEADINGS = ["", "provider", "pool", "what", "why"]


def _show(seen: Survey) -> None:
    if seen.found:
        rows = [[each.verdict, each.thing.provider, each.thing.pool, _what(each), each.why] for each in seen.found]
        output.table(_HEADINGS, rows)


def _what(found: Found) -> str:
    thing = found.thing
    if not isinstance(thing, Instance):
        return f"{thing.kind} {thing.id}"
    return f"machine {thing.id} (node {thing.node}{f' of slice {thing.slice}' if thing.slice else ''})"


def _end_data(end: RunEnd) -> dict[str, object]:
    return {"state": run_state.WORDS[end.outcome][0], **end_data(end), "why": run_state.reason(end)}


def _ends_of(names: Sequence[str], ledger: Ledger | None) -> dict[str, RunEnd]:
    """Return the known ends of the runs of these pools that belonged to their machine, by the names of the pools."""
    if ledger is None:
        return {}
    records = {name: newest(ledger.pools(name)) for name in names}
    runs = {name: each.run for name, each in records.items() if each is not None and each.run is not None}
    return {name: each.end for name, each in runs.items() if each.end is not None}


def _tell(
    seen: Survey,
    doomed: Sequence[Found],
    yes: bool,
    over: Sequence[str],
    failures: dict[str, str],
    how: Mapping[str, RunEnd],
) -> None:
    for name in over:
        run = f"; its run {run_state.told(how[name])}" if name in how else ""
        output.say(f"pool {name}: nothing is left of it; the ledger now shows it as ended{run}")
    for name, why in failures.items():
        output.say(f"not asked: {name}: {why}")
    asked = ", ".join(sorted({each.name for each in seen.asked} - failures.keys())) or "no provider"
    if not seen.found:
        output.say(f"found nothing of your pools; asked: {asked}")
    elif not doomed:
        live = ", ".join(sorted({each.thing.pool for each in seen.found if each.verdict == "live"}))
        ends = f"; `skypool down NAME` ends what is live: {live}" if live else ""
        output.say(f"nothing is lost; asked: {asked}{ends}")
    elif yes:
        output.say(f"ended: {_count(doomed)}")
    else:
        output.say(f"nothing was ended; `skypool gc --yes` ends {_count(doomed)}")
    if unknown := sum(each.verdict == "unknown" for each in seen.found if each not in doomed):
        output.say(
            f"of unknown state, and kept: {unknown}; if you know that nobody uses them, `skypool down NAME` ends those "
            "of one pool, and `skypool gc --all --yes` ends all of them"
        )


def _count(doomed: Sequence[Found]) -> str:
    machines = sum(isinstance(each.thing, Instance) for each in doomed)
    others = len(doomed) - machines
    return f"{machines} machine{'' if machines == 1 else 's'} and {others} other resource{'' if others == 1 else 's'}"


def _told(seen: Survey, doomed: Sequence[Found], ended: bool) -> list[dict[str, object]]:
    """Return what was found as values for JSON."""
    return [
        {
            "verdict": each.verdict,
            "why": each.why,
            "provider": each.thing.provider,
            "pool": each.thing.pool,
            "kind": "machine" if isinstance(each.thing, Instance) else each.thing.kind,
            "id": each.thing.id,
            "slice": each.thing.slice if isinstance(each.thing, Instance) else "",
            "until": each.thing.until and each.thing.until.isoformat(),
            "to_end": each in doomed,
            "ended": ended and each in doomed,
        }
        for each in seen.found
    ]


def _failures(seen: Survey, left_out: dict[str, Exception]) -> dict[str, str]:
    told = {name: _said(e) for name, e in left_out.items()}
    return told | {driver.name: _said(e) for driver, e in seen.failures}


def _serious(seen: Survey, asked: Sequence[str], ledger: Ledger | None) -> bool:
    """Return True if a provider that could not be asked may have machines or resources of this user."""
    notes = []
    if ledger is not None:
        open_ones = [each for each in ledger.pools() if each.ended is None or each.running or each.intents]
        notes = [note for record in open_ones for note in record.notes]
    # named on the command line, used by a pool that may not have ended, or set up on this computer
    return any(
        driver.name in asked or registry.noted(driver) in notes or not isinstance(e, _NOT_SET_UP)
        for driver, e in seen.failures
    )


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
