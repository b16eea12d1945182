"""`check`: whether a bucket does what saving needs. It writes a small object or two, and removes them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice

from skypool.buckets import google, store, temporary, unfinished
from skypool.buckets.bucket import Bucket, with_values
from skypool.errors import UsageError
from skypool.model import Finding
from skypool.text import one_line

OUTSIDE = "the keys reach other objects of the bucket, too"
_MOST = 1000
"""The most unfinished uploads that are counted."""


def check(bucket: Bucket, variables: Mapping[str, str] = os.environ, named: Bucket | None = None) -> Iterator[Finding]:
    """Yield what was found about a bucket. Each request to a store that does not answer fails after some seconds.

    `named` is the bucket as the user names it, for advice, and to look for unfinished uploads as `skypool gc` does.
    Default None: `bucket`.

    Raises UsageError if a library is not installed, if there is no login, or no such folder or region.
    """
    opened = store.opened(bucket, variables)
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError

    name, content = f"skypool-check-{secrets.token_hex(6)}", secrets.token_bytes(32)
    in_parts = f"{name}-in-parts"  # as Google lets nobody write one object twice in a second
    written: set[str] = set()

    def tried(what: str, act: Callable[[], str]) -> Finding:
        found = _tried(what, act)
        if found.text == store.DENIED and bucket.scheme == "gs" and bucket.has_token:
            uniform = f"a token for a prefix needs uniform bucket-level access: {google.without_lists(bucket)}"
            return replace(found, advice=f"{found.advice}; {uniform}")
        return found

    def list_() -> str:
        return "it has objects" if next(iter(obstore.list(opened, chunk_size=1)), None) else "it has no objects yet"

    def write() -> str:
        written.add(name)  # also if the answer is lost
        obstore.put(opened, name, content)
        return "an object was written"

    def read() -> str:
        if bytes(obstore.get(opened, name).bytes()) != content:
            raise BaseError("what was read is not what was written")
        return "it was read again"

    def create() -> str:
        try:
            obstore.put(opened, name, b"another", mode="create")
        except AlreadyExistsError:
            return "to create an object that exists was refused"
        raise BaseError("the store has replaced an object that was to be created")

    def write_in_parts() -> str:
        written.add(in_parts)
        obstore.put(opened, in_parts, content, use_multipart=True)
        return "an object was uploaded in parts"

    def delete() -> str:
        for each in [*written]:
            obstore.delete(opened, each)
            written.remove(each)
        return "the object was removed"

    try:
        listed = tried("list", list_)
        yield listed
        if not listed.good and listed.text != store.DENIED:  # keys that only write may not list
            return
        wrote = tried("write", write)
        yield wrote
        if not wrote.good:
            return
        yield tried("read", read)
        created = tried("create", create)
        advice = "use another store for what several machines write; files of one machine can be kept here"
        yield created if created.good else replace(created, advice=advice)
        if bucket.scheme == "gs":  # where other permissions are for that
            yield tried("write in parts", write_in_parts)
        deleted = tried("delete", delete)
        left = " and ".join(sorted(written))
        yield deleted if deleted.good else replace(deleted, advice=f"remove the object {left}; {deleted.advice}")
    finally:
        for each in written:
            with suppress(BaseError, OSError):  # the findings say so
                obstore.delete(opened, each)
    if bucket.scheme != "file":
        yield _left_over(replace(named or bucket, region=bucket.region), variables, named or bucket)
        if bucket.keys and bucket.prefix:
            yield _outside(bucket, variables)


def check_temporary(bucket: Bucket) -> Iterator[Finding]:
    """Yield what was found about a bucket with the temporary credentials that a machine would get.

    If this computer's login makes none, yield what was found with that login. Without a role, this is no failure.

    Raises UsageError as `check` does.
    """
    what, named = "temporary credentials", bucket
    if not bucket.region and not bucket.endpoint:
        bucket = replace(bucket, region=store.region_of(bucket))
    try:
        made = temporary.Issuer(bucket).current()
    except UsageError as e:
        yield Finding(what, not bucket.role, str(e), open=not bucket.role)
        yield from check(replace(bucket, role=""), named=named)
        return
    lasts = f"{made.life / 3600:.0f} h" if made.life > 3000 else f"{made.life / 60:.0f} min"
    yield Finding(what, True, f"this computer's login makes some for {lasts}; they are used below")
    yield from check(*with_values(bucket.url, bucket.endpoint, bucket.region, made.values), named)


def check_as_machine(bucket: Bucket) -> Iterator[Finding]:
    """Yield what was found about a bucket with what a machine would log in with, as far as that is here.

    Raises UsageError as `check` does.
    """
    makes = bucket.login == "temporary" and (bucket.role or not bucket.endpoint or bucket.scheme == "gs")
    return check_temporary(bucket) if makes else check(bucket)


def _tried(what: str, act: Callable[[], str]) -> Finding:
    """Do something, and return what was found by it."""
    from obstore.exceptions import BaseError

    try:
        return Finding(what, True, act())
    except (BaseError, OSError, ValueError) as e:
        found = store.trouble(e)
        return Finding(what, False, found.text, found.advice)


def _left_over(bucket: Bucket, variables: Mapping[str, str], named: Bucket) -> Finding:
    """Look for unfinished uploads, which cost money. `named` is the bucket as the user names it."""
    what = "unfinished uploads"
    try:
        found = [*islice(unfinished.uploads(bucket, variables), _MOST)]
    except Exception as e:  # noqa: BLE001 - boto3 raises many kinds for what a server may answer; all mean the same
        return Finding(what, True, f"they cannot be listed: {one_line(str(e), 200)}", open=True)
    if not found:
        return Finding(what, True, "the store lists none")
    days = (datetime.now(UTC) - min(each.began for each in found)).days
    more = " or more" * (len(found) == _MOST)
    text = f"{len(found)}{more}, the oldest of {days} days; they cost money, and no listing of objects shows them"
    advice = f"`{unfinished.command(named)} --yes` removes those that are a day old; a lifecycle rule can do so, too"
    return Finding(what, True, text, advice, open=True)


def _outside(bucket: Bucket, variables: Mapping[str, str]) -> Finding:
    """Look whether the keys reach objects outside of the prefix. Nothing is written there."""
    import obstore
    from obstore.exceptions import BaseError

    what, name = "outside of the prefix", f"skypool-check-{secrets.token_hex(6)}"
    whole = store.opened(replace(bucket, url=f"{bucket.scheme}://{bucket.name}"), variables)
    beside = f"{bucket.prefix.rpartition('/')[0]}/{name}".lstrip("/")
    looks: tuple[Callable[[], object], ...] = (
        lambda: next(iter(obstore.list(whole, chunk_size=1)), None),
        lambda: obstore.head(whole, name),
        lambda: obstore.head(whole, beside),
    )
    for look in looks:
        try:
            look()
        except FileNotFoundError:  # it may look there
            break
        except (BaseError, OSError) as e:
            found = store.trouble(e)
            if found.text != store.DENIED:
                return Finding(what, True, f"it is not known what the keys reach there: {found.text}", open=True)
        else:
            break
    else:
        return Finding(what, True, "the keys were refused to list or look at objects there; to write was not tried")
    advice = "give a machine keys that reach the prefix alone"
    return Finding(what, True, OUTSIDE, advice, open=True)
