"""The part of `skypool gc` about buckets: unfinished uploads, which cost money and are in no listing of objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skypool import clock
from skypool.buckets import unfinished
from skypool.buckets.bucket import Bucket
from skypool.buckets.unfinished import Unfinished
from skypool.cli import output
from skypool.cli.ps import is_over
from skypool.data import left_uploads
from skypool.errors import UsageError
from skypool.rental.ledger import Ledger
from skypool.text import one_line


@dataclass(frozen=True, slots=True)
class Uploads:
    """The unfinished uploads that ended pools have left.

    Attributes:
        found: those of each bucket.
        failures: why a bucket could not be asked, or uploads could not be removed, by the bucket's URL.
    """

    found: dict[Bucket, list[Unfinished]] = field(default_factory=dict[Bucket, list[Unfinished]])
    failures: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def count(self) -> int:
        return sum(map(len, self.found.values()))


def look(ledger: Ledger | None, bucket: Bucket | None, removes: bool) -> Uploads:
    """Find the uploads that ended pools of this computer have left, and remove them if `removes`.

    Args:
        bucket: the only place to look at. Default None: those to which pools of this computer have saved.
    """
    runs = left_uploads.noted()
    places = {each for run in runs for each in run.buckets} if bucket is None else {bucket}
    done = Uploads()
    over = _is_over(ledger)
    clean = []
    for place in sorted(places, key=lambda each: (each.url, each.endpoint)):
        try:
            found = left_uploads.left(place, runs, over)
            if found:
                done.found[place] = found
            for each in found if removes else ():
                unfinished.remove(place, each)
        except Exception as e:  # noqa: BLE001 - boto3 raises many kinds for what a store may answer; all are told
            done.failures[str(place)] = one_line(str(e), 300) or type(e).__name__
        else:
            if removes or not found:
                clean.append(place)
    left_uploads.forget_all(runs, clean, over)
    return done


def _is_over(ledger: Ledger | None) -> Callable[[str], bool]:
    """Return a function that says whether a run has ended. Without a ledger, that is not known of any."""

    def has_ended(session: str) -> bool:
        if ledger is None:
            return False
        record = ledger.record(session)
        now = clock.now()
        return record is None or record.state(now) == "ended" or is_over(record, now)

    return has_ended


def show(uploads: Uploads, removed: bool) -> None:
    """Print what was found."""
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
            output.say(f"nothing was removed; `skypool gc --yes` removes {many}")
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
    if bucket.scheme != "s3":
        raise UsageError(f"{url} has no unfinished uploads: they are of stores with the protocol of S3")
    return bucket
