"""Finds unfinished uploads in a bucket, and removes them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from skypool.buckets import google
from skypool.buckets.bucket import Bucket
from skypool.buckets.store import client, values

_STALE = {"NoSuchUpload", "NoSuchKey"}
"""What stores answer about an upload that is not there any more."""


class Unfinished(NamedTuple):
    """An upload that was begun and not completed.

    Attributes:
        key: the name of the object to be, with the prefix of the bucket.
        upload: the store's id of the upload.
        began: when it began.
    """

    key: str
    upload: str
    began: datetime


def command(bucket: Bucket) -> str:
    """Return the command that lists the unfinished uploads below the prefix of a bucket."""
    options = {"--bucket": bucket.url, "--endpoint": bucket.endpoint, "--region": bucket.region}
    given = {**options, "--keys": ",".join(bucket.keys)}
    return shlex.join(["skypool", "gc", *(word for each in given.items() if each[1] for word in each)])


def uploads(bucket: Bucket, variables: Mapping[str, str] = os.environ) -> Iterator[Unfinished]:
    """Yield the unfinished uploads below the prefix of a bucket, as far as the store lists them: MinIO lists none.

    Raises:
        UsageError: as `store.opened`.
        botocore.exceptions.ClientError, BotoCoreError: the store refuses to list them, or cannot be reached.
        google.Refused and others, as of `google.uploads`: the same with gs://.
    """
    bucket = google.as_s3(bucket)
    if bucket.scheme == "gs":
        yield from (Unfinished(*each) for each in google.uploads(bucket, values(bucket, variables)))
        return
    below = f"{bucket.prefix}/" if bucket.prefix else ""
    pages = client(bucket, variables).get_paginator("list_multipart_uploads").paginate(Bucket=bucket.name, Prefix=below)
    for page in pages:
        for each in page.get("Uploads", ()):
            if each.keys() >= {"Key", "UploadId", "Initiated"}:
                yield Unfinished(each["Key"], each["UploadId"], each["Initiated"])


def is_gone(error: Exception) -> bool:
    """Return True if a store says that it has no such bucket, which then has no uploads."""
    return _code(error) == "NoSuchBucket"


def is_denied(error: Exception) -> bool:
    """Return True if the login of this computer may not list the uploads of a bucket, or if it has none."""
    has_none = isinstance(error, google.NoLogin) or type(error).__name__ == "NoCredentialsError"
    return has_none or _code(error) == "AccessDenied"


def others(bucket: Bucket) -> str:
    """Return what removes the unfinished uploads of a bucket whose uploads the login here may not list."""
    return (
        "a lifecycle rule of the bucket can remove them (AbortIncompleteMultipartUpload), or with a login that may "
        f"list those of the whole bucket, `{command(bucket)} --yes`"
    )


def _code(error: Exception) -> str:
    """Return the code of an error of a store; "" for another error."""
    said = getattr(error, "response", None)  # of botocore's ClientError
    code = said.get("Error", {}).get("Code") if isinstance(said, dict) else getattr(error, "code", None)
    return code if isinstance(code, str) else ""


def remove_all(bucket: Bucket, variables: Mapping[str, str], since: datetime) -> int:
    """Remove the unfinished uploads below the prefix of a bucket that began after a time, and return their number.

    Raises as `uploads` does.
    """
    found = [each for each in uploads(bucket, variables) if each.began >= since]
    return sum(remove(bucket, each, variables) for each in found)


def remove(bucket: Bucket, found: Unfinished, variables: Mapping[str, str] = os.environ) -> bool:
    """Remove the parts of an unfinished upload. Return False if the store does not know it any more.

    Raises as `uploads` does.
    """
    bucket = google.as_s3(bucket)
    try:
        if bucket.scheme == "gs":
            google.abort(bucket, values(bucket, variables), found.key, found.upload)
        else:
            s3 = client(bucket, variables)
            s3.abort_multipart_upload(Bucket=bucket.name, Key=found.key, UploadId=found.upload)
    except Exception as e:
        if _code(e) not in _STALE:
            raise
        return False
    return True
