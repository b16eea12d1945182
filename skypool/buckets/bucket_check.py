"""`check`: whether a bucket does what saving needs. It writes one small object, and removes it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from skypool.buckets import store, unfinished
from skypool.buckets.bucket import Bucket
from skypool.errors import UsageError
from skypool.model import Finding


def check(bucket: Bucket, variables: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield what was found about a bucket. Whatever the store answers, this ends within about two minutes.

    Raises UsageError if a library is not installed, or a variable that `bucket.keys` names has no value.
    """
    opened = store.opened(bucket, variables)
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError

    name, content = f"skypool-check-{secrets.token_hex(6)}", secrets.token_bytes(32)
    exists = False

    def write() -> str:
        nonlocal exists
        exists = True  # also if the answer is lost
        obstore.put(opened, name, content, mode="create")
        return "an object was written"

    def read() -> str:
        if bytes(obstore.get(opened, name).bytes()) != content:
            raise BaseError("what was read is not what was written")
        return "it was read again"

    def create_again() -> str:
        try:
            obstore.put(opened, name, b"another", mode="create")
        except AlreadyExistsError:
            return "a second object of the same name was refused"
        raise BaseError("the store has replaced an object that was to be created")

    def delete() -> str:
        nonlocal exists
        obstore.delete(opened, name)
        exists = False
        return "the object was removed"

    def list_() -> str:
        stream = obstore.list(opened, chunk_size=1)
        return "it has objects" if next(iter(stream), None) else "it has no objects yet"

    try:
        listed = _tried("list", list_)
        yield listed
        if not listed.good and listed.text != store.DENIED:  # keys that only write may not list
            return
        written = _tried("write", write)
        yield written
        if not written.good:
            return
        yield _tried("read", read)
        again = _tried("create", create_again)
        yield (
            again
            if again.good
            else replace(
                again, advice="use another store for checkpoints, which need this; plain files can be saved here"
            )
        )
        yield _tried("delete", delete)
    finally:
        if exists:
            with suppress(BaseError, OSError):  # the findings tell that the store does not do it
                obstore.delete(opened, name)
    if bucket.scheme == "s3":
        yield _left_over(bucket, variables)
        if bucket.keys and bucket.prefix:
            yield _outside(bucket, variables)


def _tried(what: str, act: Callable[[], str]) -> Finding:
    """Do something, and return what was found by it."""
    from obstore.exceptions import BaseError

    try:
        return Finding(what, True, act())
    except (BaseError, OSError, ValueError) as e:
        found = store.trouble(e)
        return Finding(what, False, found.text, found.advice)


def _left_over(bucket: Bucket, variables: Mapping[str, str]) -> Finding:
    """Look for unfinished uploads, which cost money."""
    from botocore.exceptions import BotoCoreError, ClientError

    what = "unfinished uploads"
    try:
        found = [*unfinished.uploads(bucket, variables)]
    except UsageError as e:  # boto3 is not installed
        return Finding(what, True, str(e), open=True)
    except ClientError as e:
        code = e.response.get("Error", {}).get("Code", "")
        return Finding(what, True, f"they cannot be listed ({code}), and what they cost is not seen", open=True)
    except BotoCoreError as e:
        return Finding(what, True, f"they cannot be listed: {e}", open=True)
    if not found:
        return Finding(what, True, "none")
    days = (datetime.now(UTC) - min(each.began for each in found)).days
    text = f"{len(found)}, the oldest of {days} days; they cost money, and no listing shows them"
    return Finding(what, True, text, "a lifecycle rule of the bucket can remove them after some days", open=True)


def _outside(bucket: Bucket, variables: Mapping[str, str]) -> Finding:
    """Look whether the keys reach objects outside of the prefix. Nothing is written there."""
    import obstore
    from obstore.exceptions import BaseError

    what = "outside of the prefix"
    whole = store.opened(replace(bucket, url=f"{bucket.scheme}://{bucket.name}"), variables)
    try:
        obstore.head(whole, f"skypool-check-{secrets.token_hex(6)}")
    except FileNotFoundError:
        return Finding(what, True, "the keys reach other objects of the bucket, too", open=True)
    except (BaseError, OSError) as e:
        found = store.trouble(e)
        if not found.is_refusal:
            return Finding(what, True, f"it is not known whether the keys reach other objects: {found.text}", open=True)
    return Finding(what, True, "the keys reach nothing else in the bucket")
