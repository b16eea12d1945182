"""Unfinished uploads that pools leave in buckets: `skypool gc` finds and removes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import clock
from skypool.buckets.bucket_check import check, check_temporary
from skypool.buckets.store import client
from skypool.cli import ending, unfinished_uploads
from skypool.data import left_uploads
from skypool.data.left_uploads import Noted
from skypool.errors import UsageError
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud
from tests.lab import stores, sts
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


BEGAN = datetime(2010, 11, 10, 20, 48, 33, tzinfo=UTC)
"""When each upload to moto's store has begun."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sts.ShortLived]:
    """A store with the bucket "models", an hour after the beginning of its uploads."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SAVE_ID", "owner")
    monkeypatch.setenv("SAVE_SECRET", "its secret")
    monkeypatch.setattr(clock, "now", lambda: BEGAN.timestamp() + 3600)
    with sts.short_lived(3600) as store:
        yield store


def begin(bucket: sky.Bucket, *keys: str) -> None:
    """Begin uploads."""
    for key in keys:
        client(bucket).create_multipart_upload(Bucket="models", Key=key)


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


def test_threads_that_note_places_and_forget_them_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                left_uploads.note("shared", [sky.Bucket(f"s3://models/{number}/{turn}")])
                left_uploads.note(f"own{number}", [sky.Bucket("s3://models/x")])
                left_uploads.forget(f"own{number}")
        except OSError as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    [run] = left_uploads.noted()
    assert {each.prefix for each in run.buckets} == {f"{n}/{turn}" for n in range(4) for turn in range(40)}
    assert [each.name for each in (tmp_path / "skypool" / "places").iterdir()] == ["shared.json"]


def test_uploads_of_a_run_that_goes_on_are_left_alone_however_its_place_is_written(made: sts.ShortLived) -> None:
    bucket = sky.Bucket("s3://models/runs/x", made.endpoint, keys=KEYS)
    begin(bucket, "runs/x/a", "runs/x/deep/b", "runs/y/c")
    gone = Noted("gone", BEGAN - timedelta(hours=1), (bucket,))

    def left(*places: sky.Bucket, since: datetime = BEGAN - timedelta(hours=1)) -> list[str]:
        """The keys of what has been left if a run with these places goes on."""
        ends = {"gone": BEGAN.timestamp() + 60}
        found = left_uploads.left(bucket, [gone, Noted("alive", since, places)], ends.get)
        return sorted(each.key for each in found)

    assert left() == ["runs/x/a", "runs/x/deep/b"]
    for alive in (
        replace(bucket, keys=(), role=sts.ROLE),
        replace(bucket, region="us-east-1"),
        replace(bucket, url="s3://models/runs"),
        replace(bucket, url="s3://models"),
        replace(bucket, url="s3://models/runs/x/"),
    ):
        assert left(alive) == [], alive
    assert left(replace(bucket, url="s3://models/runs/x/deep")) == ["runs/x/a"]
    assert left(replace(bucket, url="s3://models/runs/y")) == ["runs/x/a", "runs/x/deep/b"]
    assert left(bucket, since=BEGAN + timedelta(minutes=10)) == ["runs/x/a", "runs/x/deep/b"]


def test_uploads_that_began_after_the_end_of_a_run_are_not_its_own(
    made: sts.ShortLived, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = sky.Bucket("s3://models/runs/x", made.endpoint, keys=KEYS)
    begin(bucket, "runs/x/a")
    runs = [Noted("gone", BEGAN - timedelta(hours=2), (bucket,))]

    def left(minutes: float) -> int:
        return len(left_uploads.left(bucket, runs, lambda session: BEGAN.timestamp() + 60 * minutes))

    assert (left(-6), left(-4), left(4)) == (0, 1, 1)
    above = replace(bucket, url="s3://models")
    begin(bucket, "another")
    found = left_uploads.left(above, runs, lambda session: BEGAN.timestamp())
    assert [each.key for each in found] == ["runs/x/a"]  # the run cannot have begun the other one
    monkeypatch.setattr(clock, "now", lambda: BEGAN.timestamp() + 86_500)
    assert left(-6) == 1


def test_a_run_has_ended_when_its_client_and_its_machines_had_and_not_when_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ledger = Ledger.here()
    end_of = unfinished_uploads._ended(ledger)
    session = "0123456789ab"
    ledger.begin("gone", session, lease=600)
    assert end_of(session) is None
    began = time.time()
    monkeypatch.setattr(clock, "now", lambda: began + 86_400)
    ledger.end(session)  # as `skypool gc` does
    found = end_of(session)
    assert found is not None
    assert began + 500 < found < began + 700
    assert unfinished_uploads._ended(None)(session) is None


def test_a_bucket_that_was_deleted_is_clean_but_not_one_that_is_asked_for(made: sts.ShortLived) -> None:
    bucket = sky.Bucket("s3://deleted/runs", made.endpoint, keys=KEYS)
    left_uploads.note("gone", [bucket])
    named = unfinished_uploads.look(Ledger.here(), bucket, True)
    assert "NoSuchBucket" in named.failures[bucket.url]
    assert len(left_uploads.noted()) == 1
    assert unfinished_uploads.look(Ledger.here(), None, False).failures == {}
    assert left_uploads.noted() == []


def test_notes_that_cannot_be_read_or_removed_are_told_and_gc_goes_on(
    made: sts.ShortLived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = sky.Bucket("s3://models/runs/x", made.endpoint, keys=KEYS)
    left_uploads.note("gone", [bucket])

    def refuse(session: str) -> None:
        raise PermissionError(f"no right to remove the note of {session}")

    with monkeypatch.context() as patch:
        patch.setattr(left_uploads, "forget", refuse)
        [why] = unfinished_uploads.look(Ledger.here(), None, True).failures.values()
    assert why == "no right to remove the note of gone"
    (tmp_path / "state/skypool/places").chmod(0o777)
    found = gc("--provider", "fake")
    assert found["found"] == []
    [why] = found["not_asked"].values()
    assert "other users can change it" in why


def test_the_command_that_removes_uploads_has_all_that_it_needs(
    made: sts.ShortLived, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = sky.Bucket("s3://models/runs/x", made.endpoint, "eu-west-1", KEYS)
    begin(bucket, "runs/x/a")

    def advice(findings: Any) -> str:
        return next(str(each.advice) for each in findings if each.what == "unfinished uploads")

    options = f"--bucket {bucket} --endpoint {made.endpoint} --region eu-west-1 --keys SAVE_ID,SAVE_SECRET"
    assert f"`skypool gc {options} --yes`" in advice(check(bucket))
    sts.log_in(monkeypatch, {"AWS_ACCESS_KEY_ID": "AKIAUSER", "AWS_SECRET_ACCESS_KEY": "the secret of a user"})
    temporary = sky.Bucket(bucket.url, made.endpoint, role=sts.ROLE)
    words = f"`skypool gc --bucket {bucket} --endpoint {made.endpoint} --yes`"
    assert words in advice(check_temporary(temporary))  # gc takes the login of this computer
    monkeypatch.setattr(clock, "now", lambda: BEGAN.timestamp() + 86_500)
    ending._sweep_bucket(bucket, None, False, False)
    assert f"`skypool gc {options} --yes` removes 1 unfinished upload" in capsys.readouterr().out


def test_a_wrong_bucket_for_gc_is_refused() -> None:
    for options, why in (
        (("file:///x", "", "", "", ()), "has no unfinished uploads"),
        (("s3://x", "", "", "", (["aws"],)), "--bucket looks at a bucket alone"),
        ((None, "", "", "A,B", ()), "are about a bucket"),
    ):
        with pytest.raises(UsageError, match=why):
            unfinished_uploads.bucket_named(*options)
