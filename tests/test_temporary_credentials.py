"""Temporary credentials of kept folders: made by STS for one prefix, renewed before they expire, and shown nowhere."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skypool as sky
from skypool import clock
from skypool.buckets import store, temporary
from skypool.buckets.bucket import Bucket
from skypool.buckets.bucket_check import OUTSIDE, check_temporary
from skypool.cli import run_messages
from skypool.data import objects
from skypool.data.data_asked import DataFolder, data_asked, examined
from skypool.data.filled_folder import FETCHES, FilledFolder
from skypool.data.save_asked import SaveFolder, checked, save_asked
from skypool.errors import UsageError
from skypool.pool.renewals import Renewals
from skypool.pool.saving import check_expiry
from skypool.pool.states import Phase
from skypool.testing import FakeCloud
from skypool.wire.save_orders import FolderState, Order
from tests.conftest import eventually
from tests.lab import sts
from tests.lab.sts import log_in
from tests.test_save import heard, pool, processes_in, write

IDS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
USER: dict[str, str] = dict(zip(IDS, ("AKIAUSER", "the secret of a user"), strict=False))
SESSION: dict[str, str] = dict(zip(IDS, ("ASIASESSION", "the secret of a session", "its token"), strict=True))


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[sts.ShortLived]:
    """S3 and STS in the place of AWS. This computer has the login of a user."""
    with sts.short_lived(3600) as made:
        log_in(monkeypatch, USER)
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


# --- which login makes them ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("login", "bucket", "why"),
    [
        ({}, {}, "has no login that could make temporary ones. Log in, or name keys .* role=, .* identity=True"),
        (SESSION, {}, "is temporary itself, and must assume a role .* Name keys"),
        (USER, {"endpoint": "http://127.0.0.1:9"}, "is not known to make temporary ones"),
    ],
)
def test_a_login_that_makes_none_is_refused_where_it_is_written(
    login: dict[str, str], bucket: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, login)
    with pytest.raises(UsageError, match=why):
        sky.ComputePool("local", save={"out": Bucket("s3://models/x", **bucket)})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"role": "runs"}, "is the ARN of a role"),
        ({"role": sts.ROLE, "identity": True}, "more than one of keys, role and identity"),
        ({"role": sts.ROLE, "keys": ("ID", "SECRET")}, "more than one of"),
        ({"identity": "runs"}, r"True or False; .* AWS\(instance_profile='runs'\)"),
        ({"identity": True, "endpoint": "http://a"}, "leave the endpoint"),
        ({"url": "file:///runs", "identity": True}, "are for buckets in a store"),
    ],
)
def test_ways_to_log_in_that_make_no_sense_are_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Bucket(**{"url": "s3://models/runs", **arguments})


def test_a_user_gets_a_federation_token_and_a_role_is_assumed(
    cloud: sts.ShortLived, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket("s3://models/runs/x", region="us-east-1")
    first = temporary.Issuer(bucket)
    found = first.current()
    assert first.current() is found  # it counts for long
    assert cloud.asked[0]["Action"] == "GetFederationToken"
    log_in(monkeypatch, SESSION)
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    assert temporary.Issuer(Bucket("s3://models/runs/x", region="us-east-1", role=sts.ROLE)).current().number == 1
    assert (cloud.asked[1]["Action"], cloud.asked[1]["RoleArn"]) == ("AssumeRole", sts.ROLE)
    for asked in cloud.asked:
        assert json.loads(asked["Policy"])["Statement"][0]["Condition"] == {"StringLike": {"s3:prefix": "runs/x/*"}}
        assert asked["DurationSeconds"] == "43200"
    assert found.values[2] not in repr((first, found))


def test_time_asleep_counts_towards_the_life_of_credentials(
    cloud: sts.ShortLived, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = temporary.Issuer(Bucket("s3://models/runs/x", region="us-east-1"))
    first = issuer.current()
    real = clock.elapsed
    monkeypatch.setattr(clock, "elapsed", lambda: real() + 0.49 * first.life)
    assert issuer.current() is first
    monkeypatch.setattr(clock, "elapsed", lambda: real() + 0.51 * first.life)
    cloud.refuses = True
    assert issuer.current() is first  # it still counts
    assert "may not do that" in issuer.trouble
    cloud.refuses = False
    monkeypatch.setattr(clock, "elapsed", lambda: real() + 1.1 * first.life)
    assert issuer.current().number == 2
    assert issuer.trouble == ""


def test_the_policy_lets_s3_use_keys_also_for_a_login_that_may_not_look_at_the_encryption(
    cloud: sts.ShortLived,
) -> None:
    temporary.Issuer(Bucket("s3://models/runs/x", region="us-east-1")).current()
    said = json.loads(cloud.asked[-1]["Policy"])["Statement"][-1]
    assert said["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
    assert said["Condition"] == {"StringEquals": {"kms:ViaService": "s3.us-east-1.amazonaws.com"}}


def test_what_sts_refuses_is_told_with_what_helps(cloud: sts.ShortLived) -> None:
    cloud.refuses = True
    issuer = temporary.Issuer(Bucket("s3://models/x", region="us-east-1"))
    with pytest.raises(UsageError, match=r"by GetFederationToken: the login of this computer may not .* name keys"):
        issuer.current()
    with pytest.raises(UsageError, match="may not do that"):
        issuer.current()
    assert len(cloud.asked) == 1  # it is not asked again and again
    with pytest.raises(UsageError, match="characters, and STS takes 2048; use a shorter prefix"):
        temporary.Issuer(Bucket(f"s3://models/{'x' * 990}", region="us-east-1")).current()


def test_the_doctor_checks_what_a_machine_would_get(cloud: sts.ShortLived) -> None:
    found = {each.what: each for each in check_temporary(Bucket("s3://models/runs/x"))}
    assert found["temporary credentials"].text == "this computer's login makes some for 1 h; they are used below"
    assert all(each.good for each in found.values())
    assert found["outside of the prefix"].text == OUTSIDE  # moto knows no policies
    cloud.refuses = True
    found = {each.what: each for each in check_temporary(Bucket("s3://models/runs/x"))}
    assert (found["temporary credentials"].good, found["temporary credentials"].open) == (True, True)
    assert found["read"].good
    found = {each.what: each for each in check_temporary(Bucket("s3://models/runs/x", role=sts.ROLE))}
    assert not found["temporary credentials"].good


def test_an_object_that_may_not_be_looked_at_is_looked_for_in_the_list(cloud: sts.ShortLived) -> None:
    cloud.hides = True
    opened = store.opened(Bucket("s3://models/runs/x", region="us-east-1"))
    objects.put(opened, "a/b", b"1")
    assert [objects.exists(opened, each) for each in ("a/b", "a/c", "a", "d", "e/f")] == [True, *4 * [False]]


# --- before anything is rented -------------------------------------------------------------------------------


def test_the_credentials_of_a_machine_are_tried_and_not_those_of_this_computer(cloud: sts.ShortLived) -> None:
    told: list[str] = []
    found = checked(save_asked({"out": Bucket("s3://models/runs/x")}), told.append)
    assert (found[0].bucket.region, found[0].values, len(cloud.made)) == ("us-east-1", (), 1)
    assert found[0].issuer is not None
    assert any("reach other objects of the bucket" in each for each in told)  # moto knows no policies


def test_a_session_token_that_expires_before_the_machines_end_is_refused(
    cloud: sts.ShortLived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SESSION.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket("s3://models/runs/x", keys=IDS)
    told: list[str] = []
    checked(save_asked({"out": bucket}), told.append)
    assert "the keys of s3://models/runs/x have a session token: when it expires, saving fails" in told
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", (datetime.now(UTC) + timedelta(minutes=30)).isoformat())
    for options, runs in (({}, "for any time"), ({"max_lifetime": "1h"}, "1.0 hours")):
        with pytest.raises(UsageError, match=rf"expires in 0\.5 hours, and the machines may run {runs}: .* role="):
            pool(tmp_path, save={"out": bucket}, **options).start()
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "soon")
    with pytest.raises(UsageError, match="AWS_CREDENTIAL_EXPIRATION is no time"):
        pool(tmp_path, save={"out": bucket})


def test_keys_of_data_that_expire_are_refused_in_the_words_of_the_user(
    cloud: sts.ShortLived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").touch()
    for name, value in SESSION.items():
        monkeypatch.setenv(name, value)
    objects.put(store.opened(Bucket("s3://models/shards", region="us-east-1")), "a", b"1")
    bucket = Bucket("s3://models/shards", keys=IDS)

    def expires(minutes: float) -> None:
        monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat())

    expires(30)
    with pytest.raises(UsageError, match=r"expires in 0\.5 hours, .* for any time: .* log in again, or name keys that"):
        pool(tmp_path, save={}, data={"data": bucket}).start()
    expires(10)
    with pytest.raises(UsageError, match=r"expires in 0\.2 hours, .* may run 0\.3 hours: shorten max_lifetime=, log"):
        sky.run("train.py", FakeCloud(), budget=20, data={"data": bucket})
    option = run_messages.Lines().option
    for folder, ways in (
        (DataFolder("data", bucket, expires=datetime.now(UTC)), "log in again, or name keys .* as --bucket-keys$"),
        (
            SaveFolder("out", bucket, expires=datetime.now(UTC)),
            "--bucket-keys, .* --bucket-role, .* --bucket-identity ",
        ),
    ):
        with pytest.raises(UsageError, match=rf"expires in 0\.0 hours, .*: shorten --max-lifetime, .*{ways}"):
            check_expiry([folder], 60, option)


def test_the_endpoint_of_this_computer_goes_on_to_machines(
    cloud: sts.ShortLived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.put(store.opened(Bucket("s3://models/shards", region="us-east-1")), "a", b"1")

    def places() -> set[str]:
        [saved] = checked(save_asked({"out": Bucket("s3://models/runs/x")}), lambda text: None)
        [data] = examined(data_asked({"data": Bucket("s3://models/shards", keys=IDS[:2])}))
        assert (saved.bucket.region, data.bucket.region, data.files) == ("us-east-1", "us-east-1", 1)
        return {saved.bucket.endpoint, data.bucket.endpoint}

    assert places() == {cloud.endpoint}
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert store.endpoint_here() == ""
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {cloud.endpoint}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert places() == {cloud.endpoint}
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", cloud.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert store.endpoint_here() == cloud.endpoint


def test_a_lease_that_outlives_credentials_without_a_client_is_refused(cloud: sts.ShortLived, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lease=3600 s is longer than the 1800 s .* make lease= shorter"):
        pool(tmp_path, save={"out": Bucket("s3://models/runs/x")}, lease="1h").start()


# --- while a pool runs ---------------------------------------------------------------------------------------


def test_an_answer_without_credentials_is_trouble_and_the_last_ones_count(
    cloud: sts.ShortLived, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = temporary.Issuer(Bucket("s3://models/runs/x", region="us-east-1"))
    first = issuer.current()
    real = clock.elapsed
    monkeypatch.setattr(clock, "elapsed", lambda: real() + 0.51 * first.life)
    with monkeypatch.context() as patch:
        patch.setattr(temporary.Issuer, "_answer", lambda self: {})
        assert issuer.newest() is first
        assert "no temporary credentials for s3://models/runs/x: KeyError: 'Credentials'" in issuer.trouble
    monkeypatch.setattr(clock, "elapsed", lambda: real() + 0.52 * first.life)
    assert issuer.current().number == 2


def test_a_login_by_a_program_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(monkeypatch, {})
    (tmp_path / "config").write_text("[default]\ncredential_process = /nonexistent/login\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(UsageError, match=r"no temporary credentials for s3://models/x: .*/nonexistent/login.*; log in"):
        save_asked({"out": Bucket("s3://models/x")})
    issuer = temporary.Issuer(Bucket("s3://models/x", region="us-east-1"))
    assert issuer.newest() is None
    assert "/nonexistent/login" in issuer.trouble


def test_data_is_read_with_credentials_of_a_role_that_only_read_and_are_renewed_while_it_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with sts.short_lived(4) as cloud:
        log_in(monkeypatch, SESSION)
        variables = {"ID": "owner", "SECRET": "owner's secret"}
        owner = store.client(Bucket("s3://models", cloud.endpoint, keys=("ID", "SECRET")), variables)
        owner.put_object(Bucket="models", Key="shards/a", Body=b"123")
        [asked] = data_asked({"data": Bucket("s3://models/shards", cloud.endpoint, role=sts.ROLE)})
        [found] = examined([asked])
        assert (found.files, found.bytes, found.login) == (1, 3, "temporary")
        actions = [each["Action"] for each in json.loads(cloud.asked[0]["Policy"])["Statement"]]
        assert actions == ["s3:ListBucket", ["s3:GetObject"]]
        issuer = found.issuer
        assert issuer is not None
        old = issuer.current()
        eventually(lambda: time.monotonic() > cloud.made[old.values[0]], 30, "the end of the first ones")
        url, values = found.bucket.url, old.values
        order = Order("data", str(tmp_path / "data"), url, cloud.endpoint, "", values, "temporary", 1, is_data=True)
        folder = FilledFolder(order.to_json(), tmp_path, threading.Semaphore(FETCHES))
        try:
            eventually(lambda: folder.trouble.startswith(store.EXPIRED), 30, "the trouble")
            assert (folder.phase, folder.told()["credentials"]) == ("fetching", 1)

            def comes() -> bool:
                newest = issuer.current()
                folder.renew(newest.number, newest.values)
                return folder.phase == "there"

            eventually(comes, 30, "the data")
            assert folder.told()["credentials"] > 1
            assert (tmp_path / "data/a").read_bytes() == b"123"
        finally:
            folder.end(0.0)
            folder.join()


def test_a_bucket_that_only_an_identity_of_machines_reaches_is_not_read_here(cloud: sts.ShortLived) -> None:
    bucket = Bucket("s3://models/shards", region="eu-west-1", identity=True)
    [found] = examined(data_asked({"data": bucket}))
    assert (found.bucket, found.files, found.login, found.is_secret) == (bucket, None, "identity", False)
    with pytest.raises(
        UsageError, match=r"fake is asked for machines without one; .*log in with keys= or role= instead"
    ):
        sky.ComputePool(FakeCloud(), data={"data": bucket}).start()


def test_an_error_does_not_end_the_renewal_of_other_folders(cloud: sts.ShortLived) -> None:
    told: list[str] = []
    sent: list[int] = []
    life: Any = SimpleNamespace(state=SimpleNamespace(phase=Phase.READY), given_away=None, notice=told.append)
    connections: Any = SimpleNamespace(links={0: None, 1: None})
    orders = [Order("out", "out", "s3://models/runs/x", node=node, serial=str(node)) for node in range(2)]
    states = {(each.node, "out"): FolderState("out", "saving", serial=each.serial) for each in orders}

    def send(node: int, order: Mapping[str, object]) -> None:
        if node == 0:
            raise RuntimeError("no way")
        sent.append(node)

    renewals = Renewals(life, connections, lambda: states, send)
    issuer = temporary.Issuer(Bucket("s3://models/runs/x", region="us-east-1"))
    for each in orders:
        renewals.add(each.node, each, issuer)
    eventually(lambda: len(sent) > 1, 30, "two times that credentials are sent")
    life.state.phase = Phase.ENDED
    assert told == ["the credentials of s3://models/runs/x cannot be renewed: RuntimeError: no way"]


def test_a_process_that_takes_a_pool_over_says_that_it_renews_nothing(
    cloud: sts.ShortLived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    bucket = Bucket("s3://models/runs/x", cloud.endpoint, role=sts.ROLE)
    with pool(tmp_path, name="handed-on", save={"out": bucket}, linger="2m") as first:
        write({"a": "1"}) >> first
    with sky.ComputePool.attach("handed-on", console="plain") as second:
        write({"b": "2"}) >> second
        second.stop()
    said = capfd.readouterr()
    assert "the temporary credentials of s3://models/runs/x are not renewed by this process" in said.out + said.err
    opened = store.opened(Bucket("s3://models/runs/x", region="us-east-1"))
    assert (objects.read(opened, "a"), objects.read(opened, "b")) == (b"1", b"2")


LIFE = 24.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_credentials_are_renewed_for_three_times_their_life_and_found_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(temporary, "_AGAIN", 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with sts.short_lived(LIFE) as cloud:
        log_in(monkeypatch, SESSION)
        bucket = Bucket("s3://models/runs/x", cloud.endpoint, role=sts.ROLE)
        variables = {"ID": "owner", "SECRET": "owner's secret"}

        def kept() -> set[str]:
            owner = store.client(Bucket("s3://models", cloud.endpoint, keys=("ID", "SECRET")), variables)
            there = {each["Key"] for each in owner.list_objects_v2(Bucket="models").get("Contents", ())}
            return {each.removeprefix("runs/x/") for each in there if "/.skypool" not in each}

        with pool(tmp_path, name="renewed", save={"out": bucket}, lease=12, drain=20) as made:
            told = heard(made)
            began, number = time.monotonic(), 0
            while time.monotonic() - began < 3 * LIFE:
                write({f"file-{number}": str(number)}) >> made
                number += 1
                time.sleep(1)
            assert len(cloud.made) >= 5
            assert not [each.trouble for each in told if each.trouble]
            assert not cloud.refused
            lines = [
                (Path("/proc") / str(pid) / what).read_bytes()
                for pid in processes_in("renewed", "")
                for what in ("cmdline", "environ")
            ]
            assert lines
            assert not any(each in line for line in lines for each in cloud.secrets)

            cloud.refuses = True  # as if the client could not be asked
            newest = len(cloud.made)
            eventually(lambda: time.monotonic() > max(cloud.made.values()) + 1, 60, "the end of the last ones")
            write({"late": "1"}) >> made
            words = "the credentials have expired; the client renews them when it is back"
            eventually(lambda: any(each.trouble == words for each in told), 60, "the trouble")
            cloud.refuses = False
            eventually(lambda: "late" in kept(), 30, "the file after it")
            assert len(cloud.made) > newest

            refused = len(cloud.refused)
            for each in processes_in("renewed", "skypool.data.mover"):  # the next one begins with the newest
                os.kill(each, signal.SIGKILL)
            write({"last": "1"}) >> made
            eventually(lambda: "last" in kept(), 30, "the file after the mover")
            assert len(cloud.refused) == refused
        assert kept() == {*(f"file-{each}" for each in range(number)), "late", "last"}
    said = "".join(capfd.readouterr())
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert any(each.suffix == ".db" or "ledger" in each.name for each in files)
    content = [said.encode(), *(each.read_bytes() for each in files)]
    assert len(cloud.secrets) > 2 * len(cloud.made)
    assert not [each for each in cloud.secrets if any(each in text for text in content)]
