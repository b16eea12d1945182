"""Buckets: what their URLs mean, and what `skypool doctor --bucket` finds in real object stores."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from skypool.buckets import store, unfinished
from skypool.buckets.bucket import Bucket
from skypool.buckets.bucket_check import check
from skypool.errors import UsageError
from skypool.model import Finding
from tests.lab import stores
from tests.lab.stores import secret_of

KEYS = ("ID", "SECRET")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://models", ("s3", "models", "")),
        ("s3://models/", ("s3", "models", "")),
        ("s3://models/runs/train-7/", ("s3", "models", "runs/train-7")),
        ("s3://my_models.example.com/ä", ("s3", "my_models.example.com", "ä")),
        ("file:///mnt/shared/runs/", ("file", "/mnt/shared/runs", "")),
    ],
)
def test_a_url_names_a_place(url: str, parts: tuple[str, str, str]) -> None:
    bucket = Bucket(url)
    assert (bucket.scheme, bucket.name, bucket.prefix, str(bucket)) == (*parts, url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("models/runs", "begins with s3://, gs://, file://"),
        ("s3a://models", "did you mean s3://"),
        ("az://models", "begins with s3://"),
        ("https://account.example.com/models", "name the server as the endpoint"),
        ("s3:///runs", "no name of a bucket"),
        ("s3://ab cd/runs", "no name of a bucket"),
        ("s3://models//runs", "an empty part"),
        ("s3://models/runs//x", "an empty part"),
        ("s3://models/../other", "'..' in its path"),
        ("s3://models/./x", "an empty part, '.'"),
        ("s3://models/a\nb", "a character that not every store allows"),
        ("s3://models/a?b", "a character that not every store allows"),
        ("s3://models/a\udc80", "a character that not every store allows"),
        ("s3://models/" + "x" * 1100, "over 1024 bytes"),
        ("file://host/runs", "write the whole path"),
        ("file:///", "write the whole path"),
        ("file:///mnt/../etc", "'..' in its path"),
        (7, "not by 7"),
    ],
)
def test_a_url_that_names_no_place_is_refused(url: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why.replace("?", r"\?").replace(".", r"\.")):
        Bucket(url)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"endpoint": "account.example.com"}, "the address of a server"),
        ({"endpoint": "https://account.example.com/models"}, "leave /models out"),
        ({"url": "s3://ID:secret-word@models"}, "no credentials"),
        ({"url": "https://a.example.com/models?X-Signature=secret-word"}, "name the server as the endpoint"),
        ({"endpoint": "https://me:secret-word@example.com"}, "without credentials"),
        ({"endpoint": "http://example.com:99999"}, "the address of a server"),
        ({"url": "file:///runs", "endpoint": "http://a"}, "a folder has no endpoint"),
        ({"endpoint": "http://192.0.2.1:9", "role": stores.ROLE}, "would send temporary keys for .* unencrypted"),
        ({"keys": "secret-word"}, "a list of names"),
        ({"keys": ("ID",)}, "has 1 names"),
        ({"keys": ("AKIA/secret-word", "x")}, "takes names of variables"),
        ({"url": "file:///runs", "keys": KEYS}, "keys are for buckets in a store"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_and_secrets_not_repeated(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        Bucket(**{"url": "s3://models/runs", **arguments})
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"minioadmin": "a"}, "variable 2 of the keys, which s3://models needs, has no value"),
        ({"minioadmin": "a\n", "secretword": "b"}, "variable 1 of the keys has characters that no key has"),
    ],
)
def test_values_that_are_missing_or_no_keys_are_refused_and_not_repeated(variables: dict[str, str], why: str) -> None:
    bucket = Bucket("s3://models", "http://127.0.0.1:9", keys=("minioadmin", "secretword"))
    with pytest.raises(UsageError, match=why) as caught:
        store.values(bucket, variables)
    assert "secretword" not in str(caught.value)


def doctor(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skypool", "doctor", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **variables})


def test_the_doctor_checks_a_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/runs"
    (tmp_path / "runs").mkdir()
    done = doctor("--bucket", url, "--json")
    found = json.loads(done.stdout)[url]
    assert (done.returncode, [each["what"] for each in found if each["good"]]) == (
        0,
        ["list", "write", "read", "create", "delete"],
    )
    assert [*(tmp_path / "runs").iterdir()] == []


def test_the_doctor_says_what_is_wrong_with_what_it_is_told(tmp_path: Path) -> None:
    for words, why in (
        (["--bucket", "models"], "begins with s3://"),
        (["--endpoint", "http://a"], "name it with --bucket URL"),
        (["--bucket", "", "--provider", "local"], "leave --provider out"),
        (["--bucket", ""], "begins with s3://"),
        (
            ["--bucket", "s3://models", "--endpoint", "http://a", "--keys", "NO_ID,NO_SECRET"],
            "NO_ID, which s3://models",
        ),
        (["--bucket", f"file://{tmp_path}/runs"], "is no folder here"),
    ):
        done = doctor(*words)
        assert done.returncode != 0
        assert why in done.stderr
        assert "Traceback" not in done.stderr


def by_name(bucket: Bucket, **variables: str) -> dict[str, Finding]:
    """What was found, by what was checked."""
    return {each.what: each for each in check(bucket, variables)}


@contextmanager
def answering(status: int, headers: Mapping[str, str] | None = None) -> Iterator[str]:
    """The URL of a server that answers each request in one way."""
    said = b"<Error><Code>SlowDown</Code><Message>Reduce your\nrequest rate.</Message></Error>"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"" if self.command == "HEAD" else said
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("status", [400, 503])
def test_a_store_that_fails_is_told_with_its_own_words(status: int) -> None:
    with answering(status) as url:
        found = by_name(Bucket("s3://models", url, keys=KEYS), ID="a", SECRET="b")
    assert {name: each.good for name, each in found.items()} == {"list": False}
    assert found["list"].text == "the store answers SlowDown: Reduce your request rate."


@pytest.mark.parametrize("status", [200, 301, 403])
def test_the_region_of_a_bucket_is_told_also_to_those_who_may_not_use_it(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(status, {"x-amz-bucket-region": "eu-west-3"}) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        assert store.region_of(Bucket("s3://models", keys=KEYS), {"ID": "a", "SECRET": "b"}) == "eu-west-3"


@pytest.mark.parametrize(("status", "why"), [(404, "there is no such bucket"), (403, "does not tell the region")])
def test_a_bucket_without_a_region_is_refused(status: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(status) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        with pytest.raises(UsageError, match=why):
            store.region_of(Bucket("s3://models", keys=KEYS), {"ID": "a", "SECRET": "b"})


@pytest.mark.parametrize("missing", ["boto3", "obstore"])
def test_a_library_that_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool.buckets.store.find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(UsageError, match=rf"{missing} is not installed .* pip install 'skypool\[buckets\]'"):
        list(check(Bucket("s3://models", keys=KEYS), {"ID": "a", "SECRET": "b"}))


def test_a_login_that_is_set_half_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody-has-this")
    with pytest.raises(UsageError, match="no login for the bucket: The config profile"):
        store.opened(Bucket("s3://models", "http://127.0.0.1:9"))


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(60)
def test_a_store_that_says_nothing_holds_nobody_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE", 0.5)
    began = time.monotonic()
    found = by_name(Bucket("s3://models", silent, keys=KEYS), ID="a", SECRET="b")
    assert time.monotonic() < began + 20
    assert [(each.what, each.text) for each in found.values()] == [("list", store.UNREACHED)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(stores.missing_s3()), reason=stores.missing_s3())
def test_what_seaweedfs_allows_and_refuses_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(url: str, who: str, secret: str = "") -> dict[str, Finding]:
        return by_name(Bucket(url, server.endpoint, keys=KEYS), ID=who, SECRET=secret or secret_of(who))

    with stores.seaweedfs(tmp_path) as server:
        owner = stores.client(server.endpoint)
        good = found("s3://models/runs", "run")
        assert all(each.good for each in good.values()), good
        assert {"list", "write", "read", "create", "delete"} < good.keys()
        assert "were refused to list or look" in good["outside of the prefix"].text

        owner.create_multipart_upload(Bucket="models", Key="runs/large")
        owner.create_multipart_upload(Bucket="models", Key="other/large")
        all_of_it = found("s3://models/runs", "owner")
        assert all(each.good for each in all_of_it.values())
        assert all_of_it["outside of the prefix"].open
        assert all_of_it["unfinished uploads"].text.startswith("1, the oldest of 0 days")
        bucket = Bucket("s3://models", server.endpoint, keys=KEYS)
        variables = {"ID": "owner", "SECRET": secret_of("owner")}
        for each in [*unfinished.uploads(bucket, variables)]:
            unfinished.remove(bucket, each, variables)
        assert found("s3://models", "owner")["unfinished uploads"].text == "the store lists none"

        with monkeypatch.context() as patch:  # what is set for another store does not count
            for name, value in {"ENDPOINT_URL_S3": "http://127.0.0.1:9", "SESSION_TOKEN": "another"}.items():
                patch.setenv(f"AWS_{name}", value)
            assert all(each.good for each in found("s3://models/runs", "run").values())

        only_writes = found("s3://models/runs", "writer")
        assert [name for name, each in only_writes.items() if not each.good] == ["list", "read"]
        assert "do not allow" in only_writes["list"].text
        for url, who, secret, why in (
            ("s3://none-such", "owner", "", "there is no such bucket"),
            ("s3://models", "nobody", "", "the store does not know the access key"),
            ("s3://models", "owner", "another", "the secret does not belong to the access key"),
        ):
            refused = found(url, who, secret)
            assert [(each.what, each.text) for each in refused.values()] == [("list", why)]
            assert all(each.advice for each in refused.values())
        elsewhere = found("s3://models/other", "run")
        assert {name: each.text for name, each in elsewhere.items()} == dict.fromkeys(["list", "write"], store.DENIED)
        left = [each["Key"] for each in owner.list_objects_v2(Bucket="models").get("Contents", ())]
        assert left == ["ready"]
