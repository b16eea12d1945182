"""Buckets of Google Cloud Storage: what skypool does with gs:// against a real server, which judges who may do what."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import skypool as sky
from skypool import clock, events
from skypool.buckets import downscoped, google, store, temporary, unfinished
from skypool.buckets.bucket import Bucket, with_values
from skypool.buckets.bucket_check import OUTSIDE, check, check_temporary
from skypool.buckets.policies import condition
from skypool.cli import unfinished_uploads
from skypool.data import mover, objects
from skypool.data.checksums import Checksums
from skypool.data.data_asked import data_asked, examined
from skypool.data.folder_saver import PART
from skypool.data.save_asked import checked, overlap, save_asked
from skypool.errors import UsageError
from skypool.model import Finding
from skypool.wire.save_orders import Order
from tests.conftest import eventually
from tests.lab import gcs, stores
from tests.lab.gcs_iam import Request, Rule
from tests.lab.stores import secret_of
from tests.test_prefix_keys import PLACES, REQUESTS
from tests.test_save import heard, pool, processes_in, train, write

OTHERS = [each.replace("s3://", "gs://") for each in PLACES]
HMAC = ("GCS_ID", "GCS_SECRET")


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Store]:
    if why := stores.missing_s3():
        pytest.skip(why)
    with stores.seaweedfs(tmp_path_factory.mktemp("store"), volumes=30) as made:
        owner = stores.client(made.endpoint)
        owner.create_bucket(Bucket="private")
        for each in map(Bucket, OTHERS):
            key = f"{each.prefix}/kept".lstrip("/")
            eventually(partial(_is_put, owner, each.name, key), 60, "volumes")
        yield made


def _is_put(owner: Any, bucket: str, key: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        owner.put_object(Bucket=bucket, Key=key, Body=b"private")
    except ClientError:
        return False
    return True


@pytest.fixture
def cloud(weed: stores.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.CloudStorage]:
    """Cloud Storage, to which this computer has a login."""
    with gcs.cloud_storage(weed) as made:
        made.log_in(monkeypatch, tmp_path)
        yield made


def by_name(bucket: Bucket, **variables: str) -> dict[str, Finding]:
    return {each.what: each for each in check(bucket, variables)}


# --- what is asked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"url": "gcs://models/x"}, "did you mean gs://"),
        ({"keys": ("A", "B", "C")}, "the HMAC key and with its secret, or the one with an access token"),
        ({"role": "arn:aws:iam::123456789012:role/runs"}, "makes temporary credentials by itself; leave it out"),
        ({"keys": ("A",), "identity": True}, "more than one of keys, role and identity"),
        ({"identity": "runs"}, r"True or False; .* GCP\(service_account="),
        ({"url": "gs://M"}, "has no name of a bucket"),
        ({"endpoint": "ftp://host"}, "is the address of a server"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_told(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Bucket(**{"url": "gs://models/runs", **arguments})


def test_a_place_is_the_same_by_both_protocols() -> None:
    bucket = Bucket("gs://models/runs/x")
    assert (bucket.scheme, bucket.name, bucket.prefix, bucket.login) == ("gs", "models", "runs/x", "temporary")
    assert overlap(bucket, Bucket("s3://models/runs", "https://storage.googleapis.com", keys=HMAC))
    assert not overlap(bucket, Bucket("s3://models/runs", keys=HMAC))
    for host in ("storage-psc.p.googleapis.com", "storage.us-central1.rep.googleapis.com"):
        for scheme in ("gs", "s3"):
            assert overlap(bucket, Bucket(f"{scheme}://models/runs", f"https://{host}", keys=HMAC))
    assert not google.is_google(Bucket("s3://models", "https://googleapis.com.example.com", keys=HMAC))
    by_s3 = google.as_s3(Bucket("gs://models/runs/x", keys=HMAC))
    assert (by_s3.url, by_s3.endpoint, by_s3.keys) == ("s3://models/runs/x", "https://storage.googleapis.com", HMAC)


def test_a_condition_says_what_a_prefix_means_whatever_is_in_it() -> None:
    for prefix in ("runs/x", 'it\'s "x"', "ä b"):
        rule = Rule("models", frozenset({"storage.objects.get"}), condition(Bucket(f"gs://models/{prefix}")))

        def allows(name: str, listed: str | None = None, rule: Rule = rule) -> bool:
            return rule.allows(Request("models", name, listed, frozenset()), "storage.objects.get")

        assert allows(f"{prefix}/a")
        assert allows("", f"{prefix}/")
        assert allows("", f"{prefix}/a/b")
        for name in (prefix, f"{prefix}2/a", f"x{prefix}/a", "", "a"):
            assert not allows(name)
            assert not allows("", name)


def test_without_a_login_it_says_how_to_log_in_or_what_else_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs.log_out(monkeypatch, tmp_path)
    bucket = Bucket("gs://models/x")
    with pytest.raises(UsageError, match=r"no login for Google Cloud .*; run `gcloud auth application-default login`$"):
        store.opened(bucket)
    with pytest.raises(UsageError, match=r"login`, or name keys .* keys=, or give the machines an identity"):
        sky.ComputePool("local", save={"out": bucket})
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(UsageError, match=r"google-auth is not installed .* pip install 'skypool\[buckets\]'"):
        store.opened(bucket)


def test_what_the_environment_names_for_other_programs_changes_nothing_or_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket, values = Bucket("gs://models/x", "http://127.0.0.1:9", keys=("T",)), {"T": "token"}
    for name, value in {
        "GOOGLE_BUCKET": "other", "GOOGLE_BASE_URL": "http://127.0.0.1:1", "GOOGLE_SKIP_SIGNATURE": "true",
        "GOOGLE_BEARER_TOKEN": "another", "GOOGLE_APPLICATION_CREDENTIALS": "/nonexistent",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    opened: Any = store.opened(bucket, values)
    assert opened.config == {"bucket": "models", "base_url": "http://127.0.0.1:9", "skip_signature": "false"}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/nonexistent")
    with pytest.raises(UsageError, match=r"in the environment or the files of Google is wrong: .*/nonexistent"):
        store.opened(bucket, values)


def test_a_login_that_cannot_be_read_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs.log_out(monkeypatch, tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))  # as root can read all files
    with pytest.raises(UsageError, match=rf"cannot be read: .*{tmp_path}.* GOOGLE_APPLICATION_CREDENTIALS names"):
        store.opened(Bucket("gs://models/x"))


def test_a_prefix_that_is_too_long_for_a_condition_is_told(cloud: gcs.CloudStorage) -> None:
    with pytest.raises(UsageError, match=r"would have 2\d\d\d characters, and Google takes 2048; use a shorter prefix"):
        temporary.Issuer(Bucket(f"gs://models/{'x' * 980}", cloud.endpoint)).current()
    assert not cloud.exchanged


def test_a_network_that_is_down_is_not_told_as_a_bad_login(
    cloud: gcs.CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STS", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match=r"cannot be reached: .*; check the network and the proxy"):
        temporary.Issuer(Bucket("gs://models/x", cloud.endpoint)).current()


def test_a_login_that_expires_before_now_is_told_as_a_wrong_clock(
    cloud: gcs.CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(hours=2)

    monkeypatch.setattr(downscoped, "datetime", Late)
    cloud.tells_life = False
    with pytest.raises(UsageError, match=r"token of the login expires at .* UTC, and the clock .* UTC; set the clock"):
        temporary.Issuer(Bucket("gs://models/x", cloud.endpoint)).current()


# --- what a bucket does --------------------------------------------------------------------------------------


def test_a_bucket_does_what_saving_needs_with_each_login(cloud: gcs.CloudStorage) -> None:
    bucket = Bucket("gs://models/runs/check", cloud.endpoint)
    values = {"T": cloud.token(), "GCS_ID": "owner", "GCS_SECRET": secret_of("owner")}
    for keys in ((), ("T",), HMAC):
        found = by_name(Bucket(bucket.url, bucket.endpoint, keys=keys), **values)
        assert [each.what for each in found.values() if not each.good] == []
        assert found["create"].text == "to create an object that exists was refused"
        assert found["write in parts"].text == "an object was uploaded in parts"
        assert found["unfinished uploads"].text == "the store lists none"
        assert found["outside of the prefix"].text == OUTSIDE if keys else "outside of the prefix" not in found
    made = {each.what: each for each in check_temporary(bucket)}
    assert made["temporary credentials"].text == "this computer's login makes some for 1 h; they are used below"
    assert made["unfinished uploads"].text == "the store lists none"  # as the login may list them
    assert made["outside of the prefix"].text.startswith("the keys were refused to list or look at objects there")
    assert all(each.good for each in made.values())
    assert len({*cloud.written}) == len(cloud.written)  # Google takes one write of an object in a second
    [boundary] = cloud.boundaries
    [rule] = boundary["accessBoundary"]["accessBoundaryRules"]
    assert rule["availablePermissions"] == ["inRole:roles/storage.objectUser"]


def test_errors_of_the_store_are_told_in_words(cloud: gcs.CloudStorage) -> None:
    def listed(url: str, token: str) -> str:
        return by_name(Bucket(url, cloud.endpoint, keys=("T",)), T=token)["list"].text

    limited = temporary.Issuer(Bucket("gs://models/runs", cloud.endpoint)).current().values[0]
    assert listed("gs://nothing/x", cloud.token()) == "there is no such bucket"
    assert listed("gs://models/other", limited) == store.DENIED
    denied = by_name(Bucket("gs://models/other", cloud.endpoint, keys=("T",)), T=limited)["list"].advice
    assert "for the permission (This caller does not have storage.objects.list access.)" in str(denied)
    assert "`gcloud storage buckets update gs://models --uniform-bucket-level-access`" in str(denied)
    late = cloud.token(ends=time.monotonic() - 1)
    expired = "the credentials have expired, or the store does not know them"
    assert (listed("gs://models/runs", late), listed("gs://models/runs", "no-token")) == (expired, expired)
    opened = store.opened(*with_values("gs://models/runs", cloud.endpoint, "", (late,)))
    with pytest.raises(Exception, match="401") as raised:
        objects.exists(opened, "a")  # whose answer has no text
    assert store.trouble(raised.value).text == expired
    cloud.refuses = True
    with pytest.raises(UsageError, match=r"Service makes none: .*invalid token.*; to log in again, run .* keys="):
        temporary.Issuer(Bucket("gs://models/runs", cloud.endpoint)).current()


def test_objects_come_back_as_they_were_sent_small_and_in_parts(cloud: gcs.CloudStorage) -> None:
    import obstore

    opened = store.opened(Bucket("gs://models/runs/objects", cloud.endpoint))
    content = {"a": b"", "deep/ä b'c": b"1", "large": random.Random(1).randbytes(2 * PART + 7)}
    for name, data in content.items():
        obstore.put(opened, name, data, chunk_size=PART, attributes={"mtime": "1.5"})
    assert {each["path"] for page in obstore.list(opened) for each in page} == {*content}
    for name, data in content.items():
        got = obstore.get(opened, name)
        assert got.attributes["mtime"] == "1.5"
        assert bytes(got.bytes()) == data
    assert not objects.create(opened, "a", b"2")
    objects.remove(opened, "a")
    assert not objects.exists(opened, "a")
    assert objects.create(opened, "a", b"2")
    [token] = temporary.Issuer(Bucket("gs://models/runs/objects", cloud.endpoint)).current().values
    limited = store.opened(*with_values("gs://models/runs/objects", cloud.endpoint, "", (token,)))
    for _ in range(2):  # it is not told that it is not there
        objects.remove(limited, "a")
    assert not objects.exists(opened, "a")


def test_unfinished_uploads_are_listed_and_removed_below_the_prefix(cloud: gcs.CloudStorage) -> None:
    for key in ("runs/left/ä b", "runs/left/b", "runs/other"):
        cloud.owner.create_multipart_upload(Bucket="models", Key=key)
    bucket = Bucket("gs://models/runs/left", cloud.endpoint)
    found = [*unfinished.uploads(bucket)]
    assert {each.key for each in found} == {"runs/left/ä b", "runs/left/b"}
    assert all(abs((datetime.now(UTC) - each.began).total_seconds()) < 600 for each in found)
    assert unfinished.remove_all(bucket, {}, since=min(each.began for each in found)) == 2
    for each in found:
        unfinished.remove(bucket, each)  # once more, as another process may have removed it
    left = cloud.owner.list_multipart_uploads(Bucket="models")["Uploads"]
    assert [each["Key"] for each in left] == ["runs/other"]
    by_s3 = Bucket("gs://models/runs", cloud.endpoint, keys=HMAC)
    assert (
        unfinished.remove_all(by_s3, dict(zip(HMAC, ("owner", secret_of("owner")), strict=True)), found[0].began) == 1
    )
    gone = unfinished_uploads.look(None, Bucket("gs://nothing/x", cloud.endpoint), removes=False)
    assert "NoSuchBucket" in gone.failures["gs://nothing/x"]


def test_the_token_of_this_computers_login_is_sent_to_no_other_one_unencrypted(
    cloud: gcs.CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket("gs://models/x", cloud.endpoint)
    assert store.opened(Bucket("gs://models/x", "http://localhost:9")) is not None
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STS", "http://sts.example.com/")
    with pytest.raises(UsageError, match=r"http://sts.example.com would get the token"):
        save_asked({"out": bucket})


@pytest.mark.parametrize("login", [{}, {"keys": ("T",)}, {"identity": True}])
def test_no_token_is_sent_to_another_computer_unencrypted(login: dict[str, Any]) -> None:
    for host in ("store.example.com", "127.example.com", "192.0.2.1:80"):
        with pytest.raises(UsageError, match=rf"http://{host} would get tokens for gs://models/x unencrypted"):
            Bucket("gs://models/x", f"http://{host}", **login)
    for here in ("http://127.0.0.1:9", "http://[::1]:9", "http://localhost", "https://store.example.com"):
        assert Bucket("gs://models/x", here, **login).endpoint == here
    assert Bucket("gs://models/x", "http://192.0.2.1", keys=HMAC).keys == HMAC  # which sign, and are not sent


def test_an_endpoint_may_be_written_with_capitals_and_a_slash() -> None:
    for scheme in ("gs", "s3"):
        one, other = (Bucket(f"{scheme}://models/x", each, keys=HMAC) for each in ("HTTPS://Host:1/", "https://host:1"))
        assert (one, one.endpoint) == (other, "https://host:1")
        assert overlap(one, other)
    assert Bucket("s3://models/x", "https://host/A/", keys=HMAC).endpoint == "https://host/A"


def test_the_netrc_of_other_programs_replaces_no_token(
    cloud: gcs.CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("default login ann password 5ecret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    bucket = Bucket("gs://models/netrc", cloud.endpoint, keys=("T",))
    assert [*unfinished.uploads(bucket, {"T": cloud.token()})] == []
    assert [*unfinished.uploads(Bucket(bucket.url, cloud.endpoint))] == []
    sky.GCP(project=gcs.PROJECT).bucket_identity(bucket)


def test_an_upload_is_removed_by_its_own_name_whatever_that_is(cloud: gcs.CloudStorage) -> None:
    paths = []
    answer = b"<Error><Code>NoSuchUpload</Code><Message>It is not there.</Message></Error>"

    class Names(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            paths.append(self.path)
            is_there = "gone" not in self.path
            self.send_response(204 if is_there else 404)
            self.send_header("Content-Length", str(0 if is_there else len(answer)))
            self.end_headers()
            self.wfile.write(b"" if is_there else answer)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Names) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bucket = Bucket("gs://models", f"http://127.0.0.1:{server.server_port}", keys=("T",))

        def is_removed(key: str) -> bool:
            return unfinished.remove(bucket, unfinished.Unfinished(key, "a/b", datetime.now(UTC)), {"T": "token"})

        assert all(is_removed(each) for each in ("a/../b", "a/./b", "a/", "a?b#ä", "/a"))
        assert not is_removed("gone")
        server.shutdown()
    names = ["a/%2E%2E/b", "a/%2E/b", "a/", "a%3Fb%23%C3%A4", "/a", "gone"]
    assert paths == [f"/models/{each}?uploadId=a%2Fb" for each in names]


def test_etags_of_parts_are_compared_with_nothing_as_google_makes_them_otherwise() -> None:
    for place, compared in (("gs://models", False), ("s3://models", True)):
        checksums = Checksums(parts=not google.is_google(Bucket(place)))
        assert bool(checksums.expected(f'"{"0" * 32}-2"', PART + 1)) == compared
        assert checksums.expected(f'"{"0" * 32}"', 1)
    assert google.is_google(Bucket("s3://models", "https://storage.googleapis.com", keys=HMAC))


def test_pages_of_unfinished_uploads_are_read_to_their_end() -> None:
    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            number = int(asked.get("upload-id-marker", ["0"])[0])
            upload = (
                f"<Upload><Key>x/{number}</Key><UploadId>{number}</UploadId>"
                "<Initiated>2026-11-30T19:47:08.000Z</Initiated></Upload>"
            )
            marks = f"<NextKeyMarker>x/{number}</NextKeyMarker><NextUploadIdMarker>{number + 1}</NextUploadIdMarker>"
            body = (
                "<?xml version='1.0'?><ListMultipartUploadsResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
                f"{upload}{marks}<IsTruncated>{str(number < 2).lower()}</IsTruncated></ListMultipartUploadsResult>"
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bucket = Bucket("gs://models/x", f"http://127.0.0.1:{server.server_port}", keys=("T",))
        assert [each.key for each in unfinished.uploads(bucket, {"T": "token"})] == ["x/0", "x/1", "x/2"]
        server.shutdown()


def test_public_data_is_read_without_a_login_and_other_data_is_refused(
    cloud: gcs.CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs.log_out(monkeypatch, tmp_path)
    for key in ("public/data/a", "private/a"):
        cloud.owner.put_object(Bucket="models", Key=key, Body=b"12")
    [found] = examined(data_asked({"data": Bucket("gs://models/public/data", cloud.endpoint)}))
    assert (found.files, found.bytes) == (1, 2)
    with pytest.raises(UsageError, match="it is not public, and no keys are named"):
        examined(data_asked({"data": Bucket("gs://models/private", cloud.endpoint)}))


def test_large_files_are_saved_though_the_store_puts_them_together_slowly(
    cloud: gcs.CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "_PATIENCE", 1.0)
    cloud.to_complete = 2.0
    (tmp_path / "out").mkdir()
    content = random.Random(3).randbytes(PART + 1)
    (tmp_path / "out/large").write_bytes(content)
    order = Order(
        "out", str(tmp_path / "out"), "gs://models/runs/slow", cloud.endpoint, values=(cloud.token(),), serial="1",
        session="1", restores=False,
    )  # fmt: skip
    folder = mover.Folder(order.to_json(), str(tmp_path / "journal"))
    folder.end(20)
    folder.join()
    assert (folder.whole, folder.told()["trouble"]) == (True, "")
    assert cloud.owner.get_object(Bucket="models", Key="runs/slow/large")["Body"].read() == content


# --- what tokens reach ---------------------------------------------------------------------------------------


def refused_everywhere(cloud: gcs.CloudStorage, token: str) -> None:
    """Try all requests of the mover outside of gs://models/runs, and see that nothing has changed there."""
    tries = [(place, what) for place in OTHERS for what in REQUESTS]
    assert len(tries) >= 40
    reached = []
    for place, what in tries:
        try:
            REQUESTS[what](store.opened(*with_values(place, cloud.endpoint, "", (token,))))
        except Exception as e:  # noqa: BLE001 - what it means is compared
            if store.trouble(e).text != store.DENIED:
                reached.append((place, what, str(e)))
        else:
            reached.append((place, what, "it was allowed"))
    assert reached == []
    for each in map(Bucket, OTHERS):
        key = f"{each.prefix}/kept".lstrip("/")
        assert cloud.owner.get_object(Bucket=each.name, Key=key)["Body"].read() == b"private"
        assert not cloud.has(each.name, key.replace("kept", "new"))


def allowed_inside(cloud: gcs.CloudStorage, token: str) -> None:
    opened = store.opened(*with_values("gs://models/runs/x", cloud.endpoint, "", (token,)))
    for request in REQUESTS.values():
        objects.put(opened, "kept", b"mine")
        objects.remove(opened, "new")
        assert not objects.exists(opened, "new")
        request(opened)


def test_a_token_for_a_prefix_reaches_nothing_else_with_the_requests_of_the_mover(cloud: gcs.CloudStorage) -> None:
    [token] = temporary.Issuer(Bucket("gs://models/runs", cloud.endpoint)).current().values
    refused_everywhere(cloud, token)
    allowed_inside(cloud, token)


def test_tokens_are_renewed_at_half_of_their_life_and_the_last_one_counts_meanwhile(
    cloud: gcs.CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = temporary.Issuer(Bucket("gs://models/runs", cloud.endpoint))
    first = issuer.current()
    assert (first.number, [*first.values], 3500 < first.life <= 3600) == (1, cloud.exchanged, True)
    assert issuer.newest() is first
    real = clock.elapsed
    monkeypatch.setattr(clock, "elapsed", lambda: real() + 0.51 * first.life)
    cloud.refuses = True
    assert issuer.newest() is first
    assert "Security Token Service makes none" in issuer.trouble
    cloud.refuses = False
    monkeypatch.setattr(clock, "elapsed", lambda: real() + 0.52 * first.life)
    assert (issuer.current().number, issuer.trouble) == (2, "")
    assert first.values[0] not in repr(issuer) + repr(first)
    cloud.tells_life = False  # then it counts as long as the token that it was made of
    assert 3500 < temporary.Issuer(Bucket("gs://models/runs", cloud.endpoint)).current().life <= 3600


def test_what_a_machine_would_get_is_tried_before_anything_is_rented(cloud: gcs.CloudStorage) -> None:
    told: list[str] = []
    [found] = checked(save_asked({"out": Bucket("gs://models/runs/x", cloud.endpoint)}), told.append)
    assert (found.values, told, len(cloud.exchanged)) == ((), [], 1)
    assert found.issuer is not None
    with pytest.raises(UsageError, match="gs://nothing/x cannot be used to save out: list: there is no such bucket"):
        checked(save_asked({"out": Bucket("gs://nothing/x", cloud.endpoint)}), told.append)
    named = Bucket("gs://models/runs/x", cloud.endpoint, keys=("T",))
    checked(save_asked({"out": named}, {"T": cloud.token()}), told.append)
    assert told[0] == f"the keys of {named} have an access token: when it expires, saving fails"


def test_a_lease_that_outlives_a_token_without_a_client_is_refused(cloud: gcs.CloudStorage, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"longer than the 1\d\d\d s .* make lease= shorter, or name keys .* identity="
    ) as e:
        pool(tmp_path, save={"out": Bucket("gs://models/runs/x", cloud.endpoint)}, lease="1h").start()
    assert "role=" not in str(e.value)


# --- while a pool runs ---------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder beside which calls run."""
    for name in ("cache", "state"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def emptied(work: Path) -> None:
    """Remove what the next pool is to bring back."""
    work.rename(work.with_name(f"work-{time.monotonic_ns()}"))
    work.mkdir()
    os.chdir(work)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("login", ["temporary", "hmac"])
def test_a_pool_saves_and_brings_back_files_and_checkpoints(
    login: str, cloud: gcs.CloudStorage, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(HMAC, ("run", secret_of("run")), strict=True):
        monkeypatch.setenv(name, value)
    bucket = Bucket(f"gs://models/runs/{login}", cloud.endpoint, keys=HMAC if login == "hmac" else ())
    ckpt = Bucket(f"gs://models/runs/{login}-ckpt", cloud.endpoint, keys=bucket.keys)
    files = {"a": "1", "deep/large": "2" * (2 * PART + 1)}
    with pool(tmp_path, save={"out": bucket, "ckpt": ckpt}) as first:
        write(files) >> first
        assert train(3) @ first == [(0, None, [], 3)] * 2
    emptied(work)
    with pool(tmp_path, save={"out": bucket, "ckpt": ckpt}) as second:
        assert write({}) >> second == sorted(files)
        there = ["model", "only-0", "only-1"]
        assert train(1) @ second == [(3, f"{rank} 3", there, 4) for rank in range(2)]
    assert Path("out/deep/large").read_text() == files["deep/large"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_data_is_fetched_with_a_token_that_only_reads(
    cloud: gcs.CloudStorage, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = b"1" * 10, random.Random(2).randbytes(3 * PART)
    for name, data in (("small", small), ("large", large)):
        cloud.owner.put_object(Bucket="models", Key=f"shards/{name}", Body=data)
    reads = frozenset({"storage.objects.get", "storage.objects.list"})
    bucket = Bucket("gs://models/shards", cloud.endpoint, keys=("TOKEN",))
    monkeypatch.setenv("TOKEN", cloud.token(rules=[Rule("models", reads, condition(bucket))]))
    with sky.ComputePool("local", slots=1, console="off", data={"data": bucket}) as made:
        write({}) >> made
    assert (Path("data/small").read_bytes(), Path("data/large").read_bytes()) == (small, large)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_login_that_may_list_no_unfinished_uploads_is_told_what_removes_them(
    cloud: gcs.CloudStorage, work: Path, tmp_path: Path
) -> None:
    file = tmp_path / "login.json"
    limited = f"limited@{gcs.PROJECT}.iam.gserviceaccount.com"
    file.write_text(file.read_text().replace(gcs.OWNER, limited))
    bucket = Bucket("gs://models/runs/limited", cloud.endpoint)
    expression = {"title": "prefix", "expression": condition(bucket)}
    binding = {"role": downscoped.ROLE, "members": [f"serviceAccount:{limited}"], "condition": expression}
    cloud.policies["models"] = {"version": 3, "bindings": [binding], "etag": "1"}
    with pool(tmp_path, save={"out": bucket}) as made:
        told: list[str] = []
        made.events.listen(lambda event: told.append(event.text) if isinstance(event, events.Notice) else None)
        write({"a": "1"}) >> made
    [said] = [each for each in told if "unfinished uploads" in each]
    command = f"`skypool gc --bucket {bucket} --endpoint {cloud.endpoint} --yes`"
    assert "does not have storage.multipartUploads.list access" in said
    assert "a lifecycle rule of the bucket can remove them (AbortIncompleteMultipartUpload)" in said
    assert said.endswith(f"or with a login that may list those of the whole bucket, {command}")
    assert unfinished_uploads.look(None, None, removes=True).failures == {}  # it is not asked again
    asked = unfinished_uploads.look(None, bucket, removes=False)
    assert command in asked.failures[bucket.url]


LIFE = 16.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_token_that_expires_three_times_in_the_middle_loses_nothing_and_is_found_nowhere(
    weed: stores.Store, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(temporary, "_AGAIN", 1.0)
    with gcs.cloud_storage(weed, LIFE) as cloud:
        cloud.log_in(monkeypatch, tmp_path)
        bucket = Bucket("gs://models/runs/expires", cloud.endpoint)

        def kept() -> set[str]:
            there = cloud.owner.list_objects_v2(Bucket="models", Prefix="runs/expires/").get("Contents", ())
            names = {each["Key"].removeprefix("runs/expires/") for each in there}
            return {each for each in names if not each.startswith(".skypool")}

        with pool(tmp_path, name="gs-renewed", save={"out": bucket}, lease=6, drain=20) as made:
            told = heard(made)
            began, number = time.monotonic(), 0
            while time.monotonic() - began < 3 * LIFE + 1:
                write({f"file-{number}": str(number)}) >> made
                number += 1
                time.sleep(1)
            assert sum(time.monotonic() > cloud.tokens[each].ends for each in cloud.exchanged) >= 3
            assert not [each.trouble for each in told if each.trouble]
            assert not cloud.refused
            pids = processes_in("gs-renewed", "")
            lines = [(Path("/proc") / str(pid) / what).read_bytes() for pid in pids for what in ("cmdline", "environ")]
            assert lines
            assert not any(each in line for line in lines for each in cloud.secrets)

            cloud.refuses = True  # as if the client could not be asked
            newest = len(cloud.exchanged)
            eventually(lambda: time.monotonic() > cloud.tokens[cloud.exchanged[-1]].ends + 1, 60, "the end of the last")
            write({"late": "1"}) >> made
            words = (
                "the credentials have expired, or the store does not know them; the client renews them when it is back"
            )
            eventually(lambda: any(each.trouble == words for each in told), 60, "the trouble")
            cloud.refuses = False
            eventually(lambda: "late" in kept(), 30, "the file after it")
            assert len(cloud.exchanged) > newest
        assert kept() == {*(f"file-{each}" for each in range(number)), "late"}
        emptied(work)
        with pool(tmp_path, save={"out": bucket}, lease=6) as second:
            assert {*(write({}) >> second)} == kept()
    said = "".join(capfd.readouterr())
    content = [said.encode(), *(each.read_bytes() for each in tmp_path.rglob("*") if each.is_file())]
    assert not [each for each in cloud.secrets if any(each in text for text in content)]


# --- the command line ----------------------------------------------------------------------------------------


def test_the_doctor_and_gc_take_such_a_bucket(cloud: gcs.CloudStorage, work: Path) -> None:
    def skypool(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [
            sys.executable,
            "-m",
            "skypool",
            *words,
            "--bucket",
            "gs://models/runs/cli",
            "--endpoint",
            cloud.endpoint,
        ]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)

    found = skypool("doctor")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "ok   temporary credentials: this computer's login makes some for 1 h" in found.stdout
    assert "ok   outside of the prefix: the keys were refused" in found.stdout
    cloud.owner.create_multipart_upload(Bucket="models", Key="runs/cli/a")
    listed = skypool("gc")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert "runs/cli/a" not in listed.stdout  # it is not a day old
    assert cloud.owner.list_multipart_uploads(Bucket="models", Prefix="runs/cli/")["Uploads"]


def test_the_login_of_a_machine_of_google_makes_tokens_that_may_be_about_to_expire(
    cloud: gcs.CloudStorage, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs.log_out(monkeypatch, work)
    monkeypatch.delenv("NO_GCE_CHECK")
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, cloud.endpoint.removeprefix("http://"))
    cloud.machine = gcs.OWNER
    Path("train.py").touch()
    Path("pyproject.toml").touch()
    place = ["--save", "out=gs://models/runs/machine", "--bucket-endpoint", cloud.endpoint]
    argv = [sys.executable, "-m", "skypool", "run", "--local", *place, "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert "600 s, is longer than the 225 s for which temporary credentials of gs://models" in done.stderr
    assert len(cloud.exchanged) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_saves_to_such_a_bucket(cloud: gcs.CloudStorage, work: Path) -> None:
    Path("train.py").write_text("import pathlib\n\npathlib.Path('out/a').write_text('1')\n")
    Path("pyproject.toml").touch()
    place = ["--save", "out=gs://models/runs/cli-run", "--bucket-endpoint", cloud.endpoint]
    argv = [sys.executable, "-m", "skypool", "run", "--local", *place, "train.py"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "saves    out to gs://models/runs/cli-run" in done.stderr
    assert cloud.owner.get_object(Bucket="models", Key="runs/cli-run/a")["Body"].read() == b"1"
