"""A store that makes temporary credentials, and takes them for a few seconds only: moto's S3 and STS in one server.

moto knows no expiry, so that what stands before it notes the credentials that it makes, and refuses them when they are
older.
"""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

import pytest

ROLE = "arn:aws:iam::123456789012:role/runs"
_CREDENTIAL = re.compile(r"Credential=([^/]+)/")
_MADE = re.compile(rb"<AccessKeyId>(.*?)</AccessKeyId>")
_SECRETS = re.compile(rb"<(?:AccessKeyId|SecretAccessKey|SessionToken)>(.*?)</")
_ENDS = re.compile(rb"<Expiration>.*?</Expiration>")
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_DENIED = (
    b"<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code><Message>not now</Message></Error>"
    b"<RequestId>0</RequestId></ErrorResponse>"
)
Start = Callable[[str, list[tuple[str, str]]], object]


class ShortLived:
    """A WSGI application before that of moto.

    Args:
        app: the application of moto.
        life: the seconds for which the credentials count that it makes.

    Attributes:
        refuses: True while no credentials are made.
        hides: True to say of an object that is not there that it may not be looked at, as some stores do.
        asked: the parameters of each request for credentials.
        made: the access keys that were made, in their order, and until when they count by `time.monotonic()`.
        secrets: all values that were made.
        refused: the access keys of requests that came too late.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]], life: float) -> None:
        self.refuses = self.hides = False
        self.asked: list[dict[str, str]] = []
        self.made: dict[str, float] = {}
        self.secrets: set[bytes] = set()
        self.refused: list[str] = []
        self.endpoint = ""
        self._app, self._life = app, life

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        found = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
        key = found[1] if found else ""
        if "/sts/" in environ.get("HTTP_AUTHORIZATION", ""):
            return self._sts(environ, start)
        if time.monotonic() > self.made.get(key, float("inf")):
            self.refused.append(key)
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _answer(start, "400 Bad Request", _EXPIRED)

        def begin(status: str, *more: Any) -> object:
            is_hidden = self.hides and environ["REQUEST_METHOD"] == "HEAD" and status.startswith("404")
            return start("403 Forbidden" if is_hidden else status, *more)

        return self._app(environ, begin)

    def _sts(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        said = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        environ["wsgi.input"] = io.BytesIO(body)
        if said["Action"] == "GetCallerIdentity":
            return self._app(environ, start)
        self.asked.append(said)
        if self.refuses:
            return _answer(start, "403 Forbidden", _DENIED)
        heads: list[Any] = []
        answer = b"".join(self._app(environ, lambda *head: heads.append(head)))
        self.secrets |= {*_SECRETS.findall(answer)}
        for key in _MADE.findall(answer):
            self.made[key.decode()] = time.monotonic() + self._life
        ends = datetime.now(UTC) + timedelta(seconds=self._life)
        answer = _ENDS.sub(b"<Expiration>%s</Expiration>" % ends.strftime("%Y-%m-%dT%H:%M:%SZ").encode(), answer)
        return _answer(start, heads[0][0], answer)


def _answer(start: Start, status: str, body: bytes) -> Iterable[bytes]:
    start(status, [("content-type", "text/xml"), ("content-length", str(len(body)))])
    return [body]


@contextmanager
def short_lived(life: float, buckets: Iterable[str] = ("models",)) -> Iterator[ShortLived]:
    """Serve a store whose temporary credentials count for so many seconds. It has empty buckets."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    made = ShortLived(DomainDispatcherApplication(create_backend_app), life)
    server = make_server("127.0.0.1", 0, made, threaded=True, request_handler=MotoRequestHandler)
    made.endpoint = f"http://127.0.0.1:{server.server_port}"
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    owner = boto3.Session("owner", "owner's secret", None, "us-east-1").client("s3", endpoint_url=made.endpoint)
    try:
        for each in buckets:
            owner.create_bucket(Bucket=each)
        yield made
    finally:
        _empty(owner)
        server.shutdown()
        server.server_close()
        serving.join()


def _empty(owner: Any) -> None:
    """Remove all buckets, as moto's state is one for the process."""
    for bucket in owner.list_buckets()["Buckets"]:
        for each in owner.list_objects_v2(Bucket=bucket["Name"]).get("Contents", ()):
            owner.delete_object(Bucket=bucket["Name"], Key=each["Key"])
        owner.delete_bucket(Bucket=bucket["Name"])


def log_in(patch: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    """Set the variables by which boto3 finds this login and no other one, whatever this computer has; {} for none."""
    for name in ("PROFILE", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "ENDPOINT_URL", "ENDPOINT_URL_S3"):
        patch.delenv(f"AWS_{name}", raising=False)
    files = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    for name, value in {
        **files, "AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1", **values
    }.items():  # fmt: skip
        patch.setenv(name, value)
