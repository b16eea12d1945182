"""The part of `skypool gc` about buckets: unfinished uploads, which cost money and are in no listing of objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skypool import clock
from skypool.buckets import unfinished
from skypool.buckets.bucket import Bucket
from skypool.buckets.unfinished import Unfinished
from skypool.cli import output
from skypool.cli.ps import is_over
from skypool.data import left_uploads
from skypool.errors import LedgerError, NotPrivate, UsageError
from skypool.rental.ledger import Ledger
from skypool.text import one_line

_NOTES = "notes of the buckets to which pools save"


@dataclass(frozen=True, slots=True)
class Uploads:
    """The unfinished uploads that ended pools have left.

    Attributes:
        found: those of each bucket.
        failures: why a bucket could not be asked, or uploads could not be removed, by the bucket's URL; and why the
            notes of pools could not be read or removed.
    """

    found: dict[Bucket, list[Unfinished]] = field(default_factory=dict[Bucket, list[Unfinished]])
    failures: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def count(self) -> int:
        return sum(map(len, self.found.values()))


def look(ledger: Ledger | None, bucket: Bucket | None, removes: bool) -> Uploads:
    """Find the uploads that ended pools of this computer have left, and remove them if `removes`.

    Errors are among the failures that are returned.

    Args:
        bucket: the only place to look at. Default None: those to which pools of this computer have saved.
    """
    done = Uploads()
    try:
        runs = left_uploads.noted()
    except (NotPrivate, OSError) as e:
        done.failures[_NOTES] = _said(e)
        return done
    places = {each for run in runs for each in run.buckets} if bucket is None else {bucket}
    ended = _ended(ledger)
    clean = []
    for place in sorted(places, key=lambda each: (each.url, each.endpoint)):
        try:
            found = left_uploads.left(place, runs, ended)
            if found:
                done.found[place] = found
            for each in [*found] if removes else ():
                if not unfinished.remove(place, each):  # another process has, or it was completed
                    found.remove(each)
        except Exception as e:  # noqa: BLE001 - boto3 raises many kinds for what a store may answer; all are told
            if bucket is None and unfinished.is_gone(e):
                clean.append(place)
            else:
                more = f"; {unfinished.others(place)}" if unfinished.is_denied(e) else ""
                done.failures[str(place)] = f"{_said(e)}{more}"
        else:
            if removes or not found:
                clean.append(place)
    try:
        left_uploads.forget_all(runs, clean, ended)
    except (OSError, LedgerError) as e:
        done.failures[_NOTES] = _said(e)
    return done


def _said(error: Exception) -> str:
    return one_line(str(error), 300) or type(error).__name__


def _ended(ledger: Ledger | None) -> Callable[[str], float | None]:
    """Return a function that says when a run has ended at the latest; None for one that goes on.

    Without a ledger, no end is known. A run that the ledger does not know has ended at a time that is not known either.
    """

    def end_of(session: str) -> float | None:
        if ledger is None:
            return None
        record, now = ledger.record(session), clock.now()
        if record is None:
            return math.inf
        if record.state(now) != "ended" and not is_over(record, now):
            return None
        machines = max((each.until for each in record.lines), default=math.inf)
        ends = (record.lasts, record.ended, None if record.running else machines)
        # a process that ends a pool may do so long after its client and its machines are gone
        return min(each for each in ends if each is not None)

    return end_of


def show(uploads: Uploads, removed: bool, command: str = "skypool gc") -> None:
    """Print what was found by a command."""
    rows = [
        [str(place), str(each.key), f"{each.began:%Y-%m-%d %H:%M} UTC"]
        for place, several in uploads.found.items()
        for each in several
    ]
    if rows:
        output.table(["kept in", "unfinished upload of", "began"], rows)
    for place, why in uploads.failures.items():
        output.say(f"not asked: {place}: {why}")
    if uploads.count:
        many = f"{uploads.count} unfinished upload{'s' * (uploads.count != 1)}"
        if not removed:
            output.say(f"nothing was removed; `{command} --yes` removes {many}")
        elif not uploads.failures:
            output.say(f"removed: {many}")


def as_data(uploads: Uploads, removed: bool) -> list[dict[str, object]]:
    """Return what was found as values for JSON."""
    return [
        {
            "url": str(place),
            "endpoint": place.endpoint,
            "key": each.key,
            "began": each.began.isoformat(),
            "removed": removed and str(place) not in uploads.failures,
        }
        for place, several in uploads.found.items()
        for each in several
    ]


def bucket_named(url: str | None, endpoint: str, region: str, keys: str, others: Sequence[object]) -> Bucket | None:
    """Return the bucket that options name; None for none. Raises UsageError if they do not fit together."""
    if url is None:
        if endpoint or region or keys:
            raise UsageError("--endpoint, --region and --keys are about a bucket; name it with --bucket URL")
        return None
    if any(others):
        raise UsageError("--bucket looks at a bucket alone; leave --provider and --all out")
    bucket = Bucket(url, endpoint, region, keys.split(",") if keys else ())
    if bucket.scheme == "file":
        raise UsageError(f"{url} has no unfinished uploads: they are of object stores")
    return bucket
