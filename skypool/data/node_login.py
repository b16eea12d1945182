"""`place_of`: the bucket of an order, with the login that a node uses there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skypool.buckets.bucket import Bucket, with_values


def place_of(said: Mapping[str, Any], values: Sequence[str]) -> tuple[Bucket, dict[str, str]]:
    """Return the bucket of an order as a node uses it, and the variables of its keys, which have these values.

    `said` has the members of `Order` in `skypool.wire.save_orders`.
    """
    bucket, variables = with_values(said["url"], said["endpoint"], said["region"], values)
    if said["login"] == "identity":
        bucket = replace(bucket, endpoint=bucket.endpoint if bucket.scheme == "gs" else "", identity=True)
    return bucket, variables
