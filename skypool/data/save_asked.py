"""Checks what a user asks to be saved: folders of nodes, and the places in buckets where they are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from skypool.buckets import store
from skypool.buckets.bucket import SCHEMES, Bucket
from skypool.buckets.bucket_check import check
from skypool.data.local_files import OURS
from skypool.errors import UsageError

_PAIR = re.compile(rf"(?P<path>.*?)=(?P<url>(?:{'|'.join(SCHEMES)}|\w+)://.*)", re.DOTALL)


class SaveFolder(NamedTuple):
    """A folder of nodes, and the place in a bucket where it is kept.

    Attributes:
        path: the folder, as the user wrote it, but without "./" and "/" at the end.
        bucket: the place.
        values: the access key, its secret, and a session token if there is one; () for a folder.
    """

    path: str
    bucket: Bucket
    values: tuple[str, ...] = ()

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
        UsageError: a path or a place is not valid, two of them are inside of each other, or a key has no value.
    """
    if not isinstance(save, Mapping):
        raise UsageError(f"{name} takes folders and their places, such as {{'out': 's3://NAME/PREFIX'}}, not {save!r}")
    found = []
    for path, place in save.items():
        bucket = place if isinstance(place, Bucket) else Bucket(place)
        if bucket.scheme != "file" and not bucket.keys:
            raise UsageError(
                f"{bucket} needs keys that a machine may have: those of this computer's login are never sent to one. "
                f"Make keys that reach {bucket.prefix or bucket.name} alone, and name the variables that have them "
                "as the bucket's keys"
            )
        found.append(SaveFolder(_path(path, name), bucket, tuple(store.values(bucket, variables))))
    for one, other in combinations(found, 2):
        if is_inside(one.path, other.path) or is_inside(other.path, one.path):
            raise UsageError(f"{name}: {one.path} and {other.path} are inside each other; save one of them")
        if overlap(one.bucket, other.bucket):
            raise UsageError(
                f"{name}: {one.bucket} and {other.bucket} are inside each other, so that files of {one.path} and "
                f"{other.path} could replace each other; use another place"
            )
    return found


def _path(path: object, name: str) -> str:
    """Return the path of a folder as it is used. Raises UsageError if it is none."""
    if not isinstance(path, str) or not path.strip() or not path.isprintable():
        raise UsageError(f"{name} takes the paths of folders, not {path!r}")
    found = os.path.normpath(path)
    if found in (".", "/", "~") or found.split("/")[0] == "..":
        raise UsageError(f"{name} takes a folder below the one in which the program runs, such as 'out', not {path!r}")
    if any(each.startswith(OURS) for each in found.split("/")):
        raise UsageError(f"{path}: names that begin with {OURS} are skypool's own; use another one")
    return found


def is_inside(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def overlap(one: Bucket, other: Bucket) -> bool:
    """Return True if the place of one bucket is inside that of the other."""
    first, second = (
        f"{each.scheme}://{each.endpoint}/{each.name}/{each.prefix}/".replace("//", "/") for each in (one, other)
    )
    return first.startswith(second) or second.startswith(first)


def checked(folders: Sequence[SaveFolder], tell: Callable[[str], object]) -> list[SaveFolder]:
    """Try each place from this computer, and return the folders with the regions of their buckets.

    Args:
        tell: called with what is good to know.

    Raises:
        UsageError: a place cannot be used. The message says why, and what to do.
    """
    found = []
    for each in folders:
        bucket = each.bucket
        variables = dict(zip(bucket.keys, each.values, strict=True))
        if bucket.scheme == "file":
            found.append(each)  # a folder of the machine
            continue
        if not bucket.region and not bucket.endpoint:
            bucket = replace(bucket, region=store.region_of(bucket, variables))
        for finding in check(bucket, variables):
            if not finding.good and finding.what != "create":
                advice = f"; {finding.advice}" if finding.advice else ""
                raise UsageError(f"{bucket} cannot be used to save {each.path}: {finding.what}: {finding.text}{advice}")
            if finding.open and finding.what == "unfinished uploads" and "cost money" in finding.text:
                tell(f"{bucket} has unfinished uploads: {finding.text}")
        found.append(each._replace(bucket=bucket))
    return found
