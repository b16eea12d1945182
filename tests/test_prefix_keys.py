"""Keys and temporary credentials of a real store for one prefix: what the mover's own requests reach with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

import skypool as sky
from skypool.buckets import store
from skypool.buckets.bucket import Bucket, with_values
from skypool.buckets.bucket_check import OUTSIDE, check
from skypool.buckets.temporary import Issuer
from skypool.data import objects
from skypool.data.folder_saver import PART
from tests.conftest import eventually
from tests.lab import stores
from tests.lab.stores import secret_of
from tests.lab.sts import log_in
from tests.test_save import heard, pool, write

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
@pytest.mark.parametrize("login", ["keys", "temporary"])
def test_a_login_for_a_prefix_reaches_nothing_else_with_the_requests_of_the_mover(
    login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    with stores.seaweedfs(tmp_path / "store", volumes=30, roles=login == "temporary") as server:
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
        all_of_it = ("owner", secret_of("owner"))
        limited: tuple[str, ...] = ("run", secret_of("run"))
        if login == "temporary":  # SeaweedFS judges the policy that was passed
            log_in(monkeypatch, {"AWS_ACCESS_KEY_ID": all_of_it[0], "AWS_SECRET_ACCESS_KEY": all_of_it[1]})
            limited = Issuer(Bucket("s3://models/runs", server.endpoint, role=stores.ROLE)).current().values

        def opened(url: str, values: tuple[str, ...] = limited) -> Any:
            return store.opened(*with_values(url, server.endpoint, "", values))

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
            mine = opened(place, all_of_it)
            assert objects.read(mine, "kept") == b"private"
            assert "new" not in [*_listed(mine)]

        inside = opened("s3://models/runs/x")
        for what in REQUESTS:
            objects.put(inside, "kept", b"mine")
            objects.remove(inside, "new")
            assert not objects.exists(inside, "new")
            REQUESTS[what](inside)
        for values, told in ((limited, "were refused to list or look at"), (all_of_it, OUTSIDE)):
            said = {each.what: each for each in check(*with_values("s3://models/runs", server.endpoint, "", values))}
            assert told in said["outside of the prefix"].text
            assert all(each.good for each in said.values())


@sky.compute
def sizes(folder: str) -> dict[str, int]:
    there = (each for each in Path(folder).rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.stat().st_size for each in there}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(stores.missing_s3()), reason=stores.missing_s3())
def test_a_pool_saves_and_brings_back_with_temporary_credentials_of_a_store_that_judges_their_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with stores.seaweedfs(tmp_path / "store", roles=True) as server:
        log_in(monkeypatch, {"AWS_ACCESS_KEY_ID": "owner", "AWS_SECRET_ACCESS_KEY": secret_of("owner")})
        bucket = Bucket("s3://models/runs/x", server.endpoint, role=stores.ROLE)
        files = {"a": "1", "kept": "private", "step-3/model": "2" * (9 << 20)}
        with pool(tmp_path, save={"out": bucket}) as first:
            write(files) >> first
        (tmp_path / "work/out").rename(tmp_path / "work/former")
        with pool(tmp_path, save={"out": bucket}) as second:
            told = heard(second)
            assert write({}) >> second == sorted(files)
        assert (told[-1].whole, told[-1].trouble) == (True, "")
        with pool(tmp_path, save={}, data={"shards": bucket}) as third:
            assert sizes("shards") >> third == {name: len(text) for name, text in files.items()}
        values = Issuer(bucket, reads=True).current().values
        opened = store.opened(*with_values(bucket.url, server.endpoint, "", values))
        for what in ("overwrite", "write", "create", "write a large one", "delete"):
            with pytest.raises(Exception) as refused:  # noqa: PT011 - what it means is compared
                REQUESTS[what](opened)
            assert store.trouble(refused.value).text == store.DENIED, what
        assert objects.read(opened, "kept") == b"private"
