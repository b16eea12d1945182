"""Unfinished uploads that pools leave in buckets: `skypool gc` finds and removes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import clock
from skypool.cli import unfinished_uploads
from skypool.data import left_uploads
from skypool.errors import UsageError
from skypool.testing import FakeCloud
from tests.lab import stores
from tests.lab.stores import secret_of
from tests.lab.work import write_saved

KEYS = ("SAVE_ID", "SAVE_SECRET")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[stores.Store]:
    if why := stores.missing_s3():
        pytest.skip(why)
    (tmp_path / "store").mkdir()
    with stores.seaweedfs(tmp_path / "store") as made:
        yield made


def gc(*words: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "skypool", "gc", "--json", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found: dict[str, Any] = json.loads(subprocess.run(argv, capture_output=True, check=True, env=env).stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gc_removes_what_ended_pools_have_left_of_uploads_and_nothing_else(
    tmp_path: Path, store: stores.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVE_ID", "run")
    monkeypatch.setenv("SAVE_SECRET", secret_of("run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    owner = stores.client(store.endpoint)
    bucket = sky.Bucket("s3://models/runs/gone", store.endpoint, keys=KEYS)

    def uploads() -> set[str]:
        return {each["Key"] for each in owner.list_multipart_uploads(Bucket="models").get("Uploads", ())}

    with FakeCloud() as cloud, sky.ComputePool(cloud, slots=1, console="off", save={"out": bucket}) as made:
        write_saved("a", 1) >> made
        [run] = left_uploads.noted()
        assert run.buckets == (bucket,)
        for key in ("runs/gone/large", "runs/gone-else/large"):
            owner.create_multipart_upload(Bucket="models", Key=key)
        assert gc("--provider", "fake", "--yes")["uploads"] == []  # it may be of the pool
    assert uploads() == {"runs/gone-else/large"}
    assert left_uploads.noted() == []
    left_uploads.note("gone", [bucket])  # as a client that was killed leaves it
    owner.create_multipart_upload(Bucket="models", Key="runs/gone/large")
    found = gc("--provider", "fake")["uploads"]
    assert [(each["url"], each["key"], each["removed"]) for each in found] == [
        ("s3://models/runs/gone", "runs/gone/large", False)
    ]
    monkeypatch.delenv("SAVE_SECRET")
    [why] = gc("--provider", "fake", "--yes")["not_asked"].values()
    assert "SAVE_SECRET" in why
    monkeypatch.setenv("SAVE_SECRET", secret_of("run"))
    options = ("--bucket", bucket.url, "--endpoint", store.endpoint, "--keys", ",".join(KEYS))
    assert [each["removed"] for each in gc("--provider", "fake", "--yes")["uploads"]] == [True]
    assert uploads() == {"runs/gone-else/large"}
    assert left_uploads.noted() == []
    owner.create_multipart_upload(Bucket="models", Key="runs/gone/large")
    assert gc(*options, "--yes") == {"uploads": [], "not_asked": {}}  # it is not a day old
    assert uploads() == {"runs/gone-else/large", "runs/gone/large"}
    monkeypatch.setattr(clock, "now", lambda: time.time() + 86_500)
    done = unfinished_uploads.look(None, bucket, True)
    assert (done.count, uploads()) == (1, {"runs/gone-else/large"})
    owner.abort_multipart_upload(
        Bucket="models",
        Key="runs/gone-else/large",
        UploadId=owner.list_multipart_uploads(Bucket="models")["Uploads"][0]["UploadId"],
    )


def test_a_wrong_bucket_for_gc_is_refused() -> None:
    for options, why in (
        (("file:///x", "", "", "", ()), "has no unfinished uploads"),
        (("s3://x", "", "", "", (["aws"],)), "--bucket looks at a bucket alone"),
        ((None, "", "", "A,B", ()), "are about a bucket"),
    ):
        with pytest.raises(UsageError, match=why):
            unfinished_uploads.bucket_named(*options)
