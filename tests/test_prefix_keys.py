"""Keys of a real store that are limited to a prefix: what the mover's own requests reach with them, and what not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from skypool.buckets import store
from skypool.buckets.bucket import Bucket
from skypool.buckets.bucket_check import OUTSIDE, check
from skypool.data import objects
from skypool.data.folder_saver import PART
from tests.conftest import eventually
from tests.lab import stores
from tests.lab.stores import secret_of

KEYS = ("ID", "SECRET")
PLACES = (
    "s3://models",
    "s3://models/other",
    "s3://models/runs2",
    "s3://models/run",
    "s3://models/xruns",
    "s3://private",
    "s3://private/runs",
)
"""Places that keys for s3://models/runs must not reach. Each has an object "kept"."""


def large(opened: Any, name: str) -> None:
    import obstore

    obstore.put(opened, name, iter([b"x" * PART, b"x"]), chunk_size=PART, max_concurrency=2)


REQUESTS: dict[str, Callable[[Any], object]] = {
    "list": lambda opened: [*_listed(opened)],
    "read": lambda opened: objects.read(opened, "kept"),
    "overwrite": lambda opened: objects.put(opened, "kept", b"stolen"),
    "write": lambda opened: objects.put(opened, "new", b"stolen"),
    "create": lambda opened: objects.create(opened, "new", b"stolen"),
    "write a large one": lambda opened: large(opened, "new"),
    "delete": lambda opened: objects.remove(opened, "kept"),
}


def _listed(opened: Any) -> Iterator[str]:
    import obstore

    return (each["path"] for page in obstore.list(opened) for each in page)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(stores.missing_s3()), reason=stores.missing_s3())
def test_keys_of_a_prefix_reach_nothing_else_with_the_requests_of_the_mover(tmp_path: Path) -> None:
    with stores.seaweedfs(tmp_path, volumes=30) as server:
        owner = stores.client(server.endpoint)
        owner.create_bucket(Bucket="private")

        def has_volumes() -> bool:
            try:
                owner.put_object(Bucket="private", Key="ready", Body=b"1")
            except ClientError:
                return False
            return True

        eventually(has_volumes, 60, "volumes of the other bucket")
        for place in PLACES:
            bucket = Bucket(place)
            owner.put_object(Bucket=bucket.name, Key=f"{bucket.prefix}/kept".lstrip("/"), Body=b"private")

        def opened(url: str, who: str = "run") -> Any:
            bucket = Bucket(url, server.endpoint, keys=KEYS)
            return store.opened(bucket, {"ID": who, "SECRET": secret_of(who)})

        tries = [(place, what) for place in PLACES for what in REQUESTS]
        assert len(tries) >= 40
        reached = []
        for place, what in tries:
            try:
                REQUESTS[what](opened(place))
            except Exception as e:  # noqa: BLE001 - what it means is compared
                if store.trouble(e).text != store.DENIED:
                    reached.append((place, what, str(e)))
            else:
                reached.append((place, what, "it was allowed"))
        assert reached == []
        for place in PLACES:  # the owner sees that nothing has changed
            mine = opened(place, "owner")
            assert objects.read(mine, "kept") == b"private"
            assert "new" not in [*_listed(mine)]

        for what in REQUESTS:
            inside = opened("s3://models/runs/x")
            objects.put(inside, "kept", b"mine")
            objects.remove(inside, "new")
            REQUESTS[what](inside)
        for who, told in (("run", "were refused to list or look at"), ("owner", OUTSIDE)):
            found = check(Bucket("s3://models/runs", server.endpoint, keys=KEYS), {"ID": who, "SECRET": secret_of(who)})
            said = {each.what: each for each in found}
            assert told in said["outside of the prefix"].text
            assert all(each.good for each in said.values())
