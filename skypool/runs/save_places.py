"""Finds where the folders of a run are saved: a bucket that the user names with a folder, or one for all runs."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skypool.buckets.bucket import Bucket
from skypool.data.save_asked import split
from skypool.errors import UsageError

VARIABLE = "SKYPOOL_BUCKET"
"""The environment variable with the URL of the bucket for all runs."""
_FIELDS = {"url", "endpoint", "region", "keys", "role", "identity"}


class Place(NamedTuple):
    """The way to the buckets of a run, as of `Bucket`."""

    endpoint: str = ""
    region: str = ""
    keys: Sequence[str] = ()
    role: str = ""
    identity: bool = False

    def bucket(self, url: str) -> Bucket:
        """Return the bucket with a URL. What reaches it is for stores only, not for folders."""
        return Bucket(url) if url.startswith("file:") else Bucket(url, *self)


def named(save: Sequence[str], place: Place, option: str = "--save") -> tuple[list[str], dict[str, Bucket]]:
    """Return the folders that are given without a place, and the places of the others by their paths.

    Args:
        save: folders as "out", or with their places as "out=s3://models/run".
        place: how their buckets are reached.
        option: the option with which they are given, for messages.

    Raises:
        UsageError: a folder is given twice, or a bucket is not valid.
    """
    without: list[str] = []
    found: dict[str, Bucket] = {}
    for each in save:
        path, url = split(each)
        if path in found or path in without:
            raise UsageError(f"{option} names {path} twice; name it once")
        if url:
            found[path] = place.bucket(url)
        else:
            without.append(path)
    return without, found


def common(root: Path, place: Place, variables: Mapping[str, str] = os.environ) -> Bucket | None:
    """Return the bucket for folders that are given without a place; None if there is none.

    Args:
        root: the folder of the project. Its pyproject.toml may name the bucket, unless `SKYPOOL_BUCKET` does.

    Raises:
        UsageError: it is not valid.
    """
    if url := variables.get(VARIABLE, ""):
        return place.bucket(url)
    file = root / "pyproject.toml"
    try:
        said = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("skypool", {}).get("bucket")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as e:
        raise UsageError(f"{file} cannot be read: {e}; correct it") from e
    if said is None:
        return None
    table: dict[str, Any] = said if isinstance(said, dict) else {"url": said}
    if unknown := sorted(table.keys() - _FIELDS):
        raise UsageError(f"{file}: bucket has no {unknown[0]}; it has {', '.join(sorted(_FIELDS))}")
    kinds = {"keys": list, "identity": bool}
    if "url" not in table or not all(isinstance(each, kinds.get(name, str)) for name, each in table.items()):
        raise UsageError(
            f"{file}: bucket must be a URL, or a table with url and perhaps endpoint, region, keys, role and identity"
        )
    asked = {name: value for name, value in place._asdict().items() if value}
    return Bucket(**{**table, **asked})
