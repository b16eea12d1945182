"""Checks what a user asks to be saved: folders of nodes, and the places in buckets where they are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import combinations
from typing import NamedTuple

from skypool.buckets import google, store, temporary
from skypool.buckets.bucket import SCHEMES, Bucket, with_values
from skypool.buckets.bucket_check import OUTSIDE, check
from skypool.data.local_files import OURS, nested
from skypool.errors import UsageError

_PAIR = re.compile(rf"(?P<path>.*?)=(?P<url>(?:{'|'.join(SCHEMES)}|\w+)://.*)", re.DOTALL)


class SaveFolder(NamedTuple):
    """A folder of nodes, and the place in a bucket where it is kept.

    Attributes:
        path: the folder, as the user wrote it, but without "./" and "/" at the end.
        bucket: the place.
        values: the access key, its secret, and a session token if there is one; () if the machine gets none, or
            temporary ones.
        issuer: makes temporary credentials, once the place was tried; None for other logins.
        expires: when the session token among the values expires; None if there is none, or this is not known.
    """

    path: str
    bucket: Bucket
    values: tuple[str, ...] = ()
    issuer: temporary.Issuer | None = None
    expires: datetime | None = None

    def __repr__(self) -> str:
        return f"SaveFolder({self.path!r}, {self.bucket!r})"


def split(said: str) -> tuple[str, str]:
    """Return the path and the URL of a text such as "out=s3://models/run"; the URL is "" if there is none."""
    found = _PAIR.fullmatch(said)
    return (found["path"], found["url"]) if found else (said, "")


def save_asked(
    save: Mapping[str, str | Bucket], variables: Mapping[str, str] = os.environ, name: str = "save"
) -> list[SaveFolder]:
    """Return the folders that a user asks to be saved, with their places.

    Args:
        save: the places by the paths of folders.
        variables: where the values of `Bucket.keys` are.
        name: the name of the argument, for messages.

    Raises:
        UsageError: a path or a place is not valid, two of them are inside of each other, a key has no value, or this
            computer has no login that makes temporary credentials.
    """
    if not isinstance(save, Mapping):
        raise UsageError(f"{name} takes folders and their places, such as {{'out': 's3://NAME/PREFIX'}}, not {save!r}")
    found = []
    for path, place in save.items():
        bucket = place if isinstance(place, Bucket) else Bucket(place)
        if bucket.login == "temporary":
            temporary.check_login(bucket)
        values = tuple(store.values(bucket, variables))
        found.append(SaveFolder(_path(path, name), bucket, values, expires=temporary.end_of(bucket, variables)))
    for one, other in combinations(found, 2):
        if nested(one.path, other.path):
            raise UsageError(f"{name}: {one.path} and {other.path} are inside each other; save one of them")
        if overlap(one.bucket, other.bucket):
            raise UsageError(
                f"{name}: {one.bucket} and {other.bucket} are inside each other, so that files of {one.path} and "
                f"{other.path} could replace each other; use another place"
            )
    return found


def _path(path: object, name: str) -> str:
    """Return the path of a folder as it is used. Raises UsageError if it is none."""
    found = normal_path(path, name)
    if found in (".", "/", "~") or found.split("/")[0] == "..":
        raise UsageError(f"{name} takes a folder below the one in which the program runs, such as 'out', not {path!r}")
    return found


def normal_path(path: object, name: str) -> str:
    """Return a path without what changes nothing in it. Raises UsageError if no folder can have it."""
    if not isinstance(path, str) or not path.strip() or not path.isprintable():
        raise UsageError(f"{name} takes the paths of folders, not {path!r}")
    found = os.path.normpath(path)
    if any(each.startswith(OURS) for each in found.split("/")):
        raise UsageError(f"{path}: names that begin with {OURS} are skypool's own; use another one")
    return found


def refused_to_stranger(machine: str, bucket: Bucket, instead: str = "") -> str:
    """Return why a machine of a stranger gets no keys. `instead` is what helps beside another provider."""
    return (
        f"{machine} is a machine of a stranger, who could read the keys of {bucket} and what is there; "
        f"choose another provider{instead}"
    )


def overlap(one: Bucket, other: Bucket) -> bool:
    """Return True if the place of one bucket is inside that of the other."""
    first, second = (f"{_store_of(each)}/{each.name}/{each.prefix}/".replace("//", "/") for each in (one, other))
    return first.startswith(second) or second.startswith(first)


def _store_of(bucket: Bucket) -> str:
    """Return what tells the store of a bucket from others. Google's has two protocols."""
    return google.ENDPOINT if google.is_google(bucket) else f"{bucket.scheme}://{bucket.endpoint}"


def checked(folders: Sequence[SaveFolder], tell: Callable[[str], object]) -> list[SaveFolder]:
    """Try each place from this computer, and return the folders with the regions and endpoints of their buckets.

    What machines log in with is tried, too, but for an identity of their own, which only they have.

    Args:
        tell: called with what is good to know.

    Raises:
        UsageError: a place cannot be used. The message says why, and what to do.
    """
    found = []
    for each in folders:
        bucket = each.bucket
        if bucket.scheme == "file":
            found.append(each)  # a folder of the machine
            continue
        variables: Mapping[str, str] = dict(zip(bucket.keys, each.values, strict=True))
        if not bucket.region and not bucket.endpoint:
            bucket = replace(bucket, region=store.region_of(bucket, variables))
        asked, issuer = bucket, None
        if bucket.scheme == "s3" and not bucket.identity:  # a machine has one at its own cloud only
            bucket = replace(bucket, endpoint=bucket.endpoint or store.endpoint_here())
        if bucket.login == "temporary":
            issuer = temporary.Issuer(asked)  # STS may have another endpoint
            values = issuer.current().values
            tried, variables = with_values(bucket.url, bucket.endpoint, bucket.region, values)
            if temporary.check_login(asked):
                tell(f"when the session token of this computer's login expires, saving to {bucket} fails")
        else:
            tried = bucket
            if bucket.has_token and each.expires is None:
                kind = "an access token" if len(each.values) == 1 else "a session token"
                tell(f"the keys of {bucket} have {kind}: when it expires, saving fails")
        if not bucket.identity:
            _try(each.path, tried, variables, tell)
        found.append(each._replace(bucket=bucket, issuer=issuer))
    return found


def _try(path: str, bucket: Bucket, variables: Mapping[str, str], tell: Callable[[str], object]) -> None:
    """Try a place with the keys that a machine will have. Raises UsageError if it cannot be used."""
    for finding in check(bucket, variables):
        if not finding.good and finding.what != "create":
            advice = f"; {finding.advice}" if finding.advice else ""
            raise UsageError(f"{bucket} cannot be used to save {path}: {finding.what}: {finding.text}{advice}")
        if finding.open and finding.what == "unfinished uploads" and "cost money" in finding.text:
            tell(f"{bucket} has unfinished uploads: {finding.text}; `skypool gc` lists those of former pools")
        if finding.open and finding.text == OUTSIDE:
            tell(f"{bucket}: {finding.text}; {finding.advice}")
