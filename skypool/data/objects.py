"""Requests about single small objects of a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore


def put(store: ObjectStore, name: str, data: bytes) -> None:
    """Write an object, also in the place of another one."""
    import obstore

    obstore.put(store, name, data, use_multipart=False)


def put_file(store: ObjectStore, name: str, file: Path) -> None:
    """Write an object with the content of a file, also in the place of another one. A large one is sent in parts."""
    import obstore

    obstore.put(store, name, file)


def create(store: ObjectStore, name: str, data: bytes) -> bool:
    """Create an object. Return False if it is there already."""
    import obstore
    from obstore.exceptions import AlreadyExistsError

    try:
        obstore.put(store, name, data, use_multipart=False, mode="create")
    except AlreadyExistsError:
        return False
    return True


def read(store: ObjectStore, name: str) -> bytes:
    """Return what is in an object."""
    import obstore

    return bytes(obstore.get(store, name).bytes())


def size(store: ObjectStore, name: str) -> int:
    """Return the bytes of an object."""
    import obstore

    return obstore.head(store, name)["size"]


def exists(store: ObjectStore, name: str) -> bool:
    """Return True if an object is there."""
    import obstore
    from obstore.exceptions import PermissionDeniedError

    try:
        obstore.head(store, name)
    except FileNotFoundError:
        return False
    except PermissionDeniedError:  # so say some stores of what is not there to those who may list a prefix only
        folder = name.rpartition("/")[0] or None
        return any(each["path"] == name for page in obstore.list(store, folder) for each in page)
    return True


def remove(store: ObjectStore, name: str) -> None:
    """Remove an object if it is there."""
    import obstore
    from obstore.exceptions import PermissionDeniedError

    try:
        obstore.delete(store, name)
    except FileNotFoundError:
        return
    except PermissionDeniedError:  # so say some stores of what is not there
        if exists(store, name):
            raise
