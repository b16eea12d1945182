"""Checks what a user asks to be fetched: folders of nodes that are filled from buckets before anything runs there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import combinations
from typing import NamedTuple

from skypool.buckets import store, temporary
from skypool.buckets.bucket import Bucket, with_values
from skypool.data.data_listing import wanted
from skypool.data.local_files import nested
from skypool.data.save_asked import SaveFolder, normal_path, overlap, refused_to_stranger
from skypool.errors import UsageError
from skypool.model import Offer

PUBLIC = ", or data that is public"
"""What helps, beside another provider, where a stranger would have keys."""
_GIB = 2**30
_BESIDE = 20.0
"""GiB of a machine's disk that the system, skypool and the packages of a program need beside data.

Data of this size needs a disk that was asked for, where the disk of a rented machine is not known.
"""


class DataFolder(NamedTuple):
    """A folder of nodes, and the place that it is filled from.

    Attributes:
        path: the folder, as the user wrote it, but without "./" and "/" at the end.
        bucket: the place. Without keys, a bucket must be public.
        values: the access key, its secret, and a session token if there is one; () for a folder, a public bucket, or
            where machines get another login.
        issuer: makes temporary credentials of the bucket's role, once the place was looked at; None for other logins.
        files: the number of files there, and `bytes` their bytes, as `examined` found them; None if that is not known.
        expires: when the session token among the values expires; None if there is none, or this is not known.
    """

    path: str
    bucket: Bucket
    values: tuple[str, ...] = ()
    files: int | None = None
    bytes: int | None = None
    expires: datetime | None = None
    issuer: temporary.Issuer | None = None

    @property
    def is_secret(self) -> bool:
        """True if machines get a login for it."""
        return bool(self.values or self.bucket.role)

    @property
    def login(self) -> str:
        """The way in which machines log in, as of `Bucket.login`."""
        return "temporary" if self.bucket.role else "identity" if self.bucket.identity else "keys"

    def __repr__(self) -> str:
        return f"DataFolder({self.path!r}, {self.bucket!r})"


def data_asked(
    data: Mapping[str, str | Bucket],
    saved: Sequence[SaveFolder] = (),
    variables: Mapping[str, str] = os.environ,
    name: str = "data",
) -> list[DataFolder]:
    """Return the folders that a user asks to be filled, with their places.

    Args:
        data: the places by the paths of folders.
        saved: the folders that the same nodes save.
        variables: where the values of `Bucket.keys` are.
        name: the name of the argument, for messages.

    Raises:
        UsageError: a path, a place or its login is not valid, folders or places are inside each other, or a key has no
            value.
    """
    if not isinstance(data, Mapping):
        raise UsageError(
            f"{name} takes folders and their places, such as {{'/data': 's3://NAME/PREFIX'}}, not {data!r}"
        )
    found = []
    for path, place in data.items():
        bucket = place if isinstance(place, Bucket) else Bucket(place)
        if bucket.role:
            temporary.check_login(bucket)
        values, expires = tuple(store.values(bucket, variables)), temporary.end_of(bucket, variables)
        found.append(DataFolder(_path(path, name), bucket, values, expires=expires))
    for one, other in combinations(found, 2):
        if nested(one.path, other.path):
            raise UsageError(
                f"{name}: {one.path} and {other.path} are inside each other; use folders beside each other"
            )
    for each in found:
        for kept in saved:
            if nested(each.path, kept.path):
                raise UsageError(
                    f"{name}: {each.path} and {kept.path}, which is saved, are inside each other; data is only read, "
                    "so use another folder"
                )
            if overlap(each.bucket, kept.bucket):
                raise UsageError(
                    f"{name}: {each.bucket} and {kept.bucket}, to which {kept.path} is saved, are inside each other, "
                    "so that data would change; use another place"
                )
    return found


def _path(path: object, name: str) -> str:
    """Return the path of a folder as it is used. Raises UsageError if it is none."""
    found = normal_path(path, name)
    found = f"/{found.lstrip('/')}" if found.startswith("/") else found
    parts = found.split("/")
    if found in (".", "/", "~") or parts[0] == ".." or (parts[0].startswith("~") and parts[0] != "~"):
        raise UsageError(f"{name} takes a folder such as '/data', 'data' or '~/data', not {path!r}")
    if parts[0] == "~" and ".." in parts:
        raise UsageError(f"{name} takes no '..' after '~', as in {path!r}; write the whole path")
    return found


def on_node(base: str, path: str) -> str:
    """Return the path on a node of a folder of data. A relative one begins in the folder `base`."""
    return path if path.startswith("~") else os.path.normpath(os.path.join(base, path))


def examined(folders: Sequence[DataFolder]) -> list[DataFolder]:
    """Look at each place from this computer: list it, and begin to read an object. Nothing is written.

    Return the folders with the regions and endpoints of their buckets, and with the number and bytes of their files.
    The place of a folder is on the machines, and not looked at here; nor is a bucket that only an identity of theirs
    reaches, but for its region.

    Raises:
        UsageError: a place cannot be used. The message says why, and what to do.
    """
    return [each if each.bucket.scheme == "file" else _examined(each) for each in folders]


def _examined(folder: DataFolder) -> DataFolder:
    bucket = folder.bucket
    variables = dict(zip(bucket.keys, folder.values, strict=True))
    if not bucket.region and not bucket.endpoint:
        bucket = replace(bucket, region=store.region_of(bucket, variables, unsigned=True))
    if bucket.identity:
        return folder._replace(bucket=bucket)
    issuer = temporary.Issuer(bucket, reads=True) if bucket.role else None
    if bucket.scheme == "s3":
        bucket = replace(bucket, endpoint=bucket.endpoint or store.endpoint_here())
    tried = bucket
    if issuer is not None:
        tried, variables = with_values(bucket.url, bucket.endpoint, bucket.region, issuer.current().values)
    opened = store.opened(tried, variables, unsigned=True)
    import obstore
    from obstore.exceptions import BaseError

    try:
        found = wanted(opened)
        first = next((each for each in found.values() if each.size), None)
        if first is not None:
            obstore.get(opened, first.name)
    except UsageError as e:
        raise UsageError(f"{bucket} cannot be data for {folder.path}: {e}") from e
    except (BaseError, OSError, ValueError) as e:
        trouble = store.trouble(e)
        words = trouble.words
        if trouble.text == store.DENIED and not (bucket.keys or bucket.role):
            words = (
                "it is not public, and no keys are named; this computer's login is never sent to a machine, so make "
                f"keys that only read {bucket.prefix or bucket.name}, and name the variables that have them as its keys"
            )
        raise UsageError(f"{bucket} cannot be read for {folder.path}: {words}") from e
    size = sum(each.size for each in found.values())
    return folder._replace(bucket=bucket, issuer=issuer, files=len(found), bytes=size)


def check_offers(
    folders: Sequence[DataFolder],
    offers: Sequence[Offer],
    disk_gib: float,
    is_stranger: Callable[[Offer], bool],
    option: Callable[[str, object], str] = lambda name, value: f"{name}={value!r}",
) -> None:
    """Raise UsageError if machines have no room for data, or would have keys and belong to strangers.

    Args:
        folders: the folders, as `examined` returns them.
        offers: what would be rented.
        disk_gib: the size of the disk that was asked for, in GiB; 0 for none.
        is_stranger: returns True if the machine of an offer belongs to a stranger.
        option: returns an option as the user writes it.
    """
    total = sum(each.bytes or 0 for each in folders) / _GIB
    for offer in offers if folders else ():
        machine = f"{offer.provider} {offer.instance_type}"
        keyed = next((each for each in folders if each.is_secret), None)
        if keyed is not None and is_stranger(offer):
            raise UsageError(refused_to_stranger(machine, keyed.bucket, PUBLIC))
        disk = offer.disk_gib or disk_gib
        is_unknown = not disk and offer.usd_per_hour > 0 and total > _BESIDE
        if is_unknown or (disk and total > disk):
            has = f"{disk:g} GiB" if disk else "the usual size of its provider"
            raise UsageError(
                f"the data has {total:.1f} GiB, and the disk of {machine} has {has}; ask for a larger one with "
                f"{option('disk', f'{total + _BESIDE:.0f}GiB')}"
            )


def far_apart(folders: Iterable[DataFolder], offers: Iterable[Offer]) -> list[str]:
    """Return a sentence for each place that is in another region than a machine that may be rented."""
    regions = sorted({each.region for each in offers if each.region})
    found = []
    for each in folders:
        others = [region for region in regions if each.bucket.region not in ("", "auto", region)]
        if others:
            found.append(
                f"{each.bucket} is in {each.bucket.region}, and machines may be in {', '.join(others[:3])}"
                f"{', …' * (len(others) > 3)}: the store may charge for the traffic"
            )
    return found
