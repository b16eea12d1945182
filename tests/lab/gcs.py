"""Google's Cloud Storage for tests: its XML API with bearer tokens, in front of SeaweedFS, which keeps the objects.

What it has of Google's, with the pages (read 2026-11-30 in stored copies):

- Objects, lists (`list-type=2`), `x-goog-meta-…`, `x-goog-if-generation-match: 0`, which only creates, and multipart
  uploads: https://cloud.google.com/storage/docs/xml-api/overview. SeaweedFS has the same requests with the names of S3,
  as Google's are made after these.
- 401 AuthenticationRequired for a token that has expired or is not known, and 403 AccessDenied:
  https://cloud.google.com/storage/docs/xml-api/reference-status, and https://github.com/apache/arrow-rs/issues/4417 for
  the words. Who may not list an object's neighbours is not told that it is missing, which is the worse case of two.
- HMAC keys, which sign as at S3 (https://cloud.google.com/storage/docs/aws-simple-migration): SeaweedFS's own.
- Security Token Service, which makes a token of another one with a Credential Access Boundary; the token expires no
  later than the other one: https://cloud.google.com/iam/docs/reference/sts/rest/v1/TopLevel/token.
- The token endpoint of OAuth for service accounts: https://developers.google.com/identity/protocols/oauth2/service-account.
- The token of the metadata server: https://cloud.google.com/compute/docs/access/authenticate-workloads.
- Policies of buckets and service accounts, as far as `skypool setup gcp` needs them:
  https://cloud.google.com/storage/docs/json_api/v1/buckets/setIamPolicy,
  https://cloud.google.com/iam/docs/reference/rest/v1/projects.serviceAccounts.

It has no generations, no checksums of its own and no storage classes.
"""

from __future__ import annotations

import copy
import http.client
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.lab.gcs_iam import Request, Rule, allowed, bindings_of, rules_of
from tests.lab.stores import Store, client, secret_of

PROJECT = "lab-project"
OWNER = f"owner@{PROJECT}.iam.gserviceaccount.com"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_JWT = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_AUDIENCE = "https://oauth2.googleapis.com/token"
"""What signed requests of service accounts are for, wherever they are sent."""
_LIFE = 3599.0
_PASSED = ("content-type", "cache-control", "range", "if-match", "if-none-match", "content-encoding")
_DENIED = "Access denied."
_METADATA = "/computeMetadata/v1/instance/service-accounts/default/"


@dataclass(frozen=True)
class Access:
    """What a token is good for: whom it is of, until when by `time.monotonic()`, and the rules of its boundary."""

    who: str
    ends: float
    rules: tuple[Rule, ...] | None = None


@dataclass
class CloudStorage:
    """The state of the service.

    Attributes:
        endpoint: its URL, for all of its APIs.
        store: SeaweedFS.
        life: the seconds for which tokens count.
        refuses: True while no tokens are exchanged.
        tokens: what each token is good for.
        exchanged: the tokens that were made with a boundary, in their order.
        boundaries: the boundary of each.
        refused: the tokens of requests that came when they had expired.
        denied: the methods and paths of requests that were not allowed.
        policies: the IAM policy of each bucket.
        accounts: the service accounts by their email addresses.
        machine: the service account of the machine that asks for metadata; "" for none.
        account_of: returns the account of a token that was made elsewhere; "" for none.
        tells_life: False if the service that makes tokens does not say how long they count.
        to_complete: the seconds after which the parts of an upload are one object.
        unwilling: why no policy is taken; "" if they are.
        written: the names of objects that were written or replaced, in their order.
        uniform: False if buckets have access lists of objects, so that policies take no conditions.
    """

    endpoint: str
    store: Store
    life: float = _LIFE
    refuses: bool = False
    tokens: dict[str, Access] = field(default_factory=dict[str, Access])
    exchanged: list[str] = field(default_factory=list[str])
    boundaries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: list[str] = field(default_factory=list[str])
    denied: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    policies: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    machine: str = ""
    account_of: Callable[[str], str] = lambda token: ""
    tells_life: bool = True
    to_complete: float = 0.0
    unwilling: str = ""
    written: list[str] = field(default_factory=list[str])
    uniform: bool = True
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def secrets(self) -> set[bytes]:
        """The tokens that were made with a boundary."""
        return {each.encode() for each in self.exchanged}

    def token(self, who: str = OWNER, rules: Sequence[Rule] | None = None, ends: float | None = None) -> str:
        """Make a token."""
        made = f"ya29.{secrets.token_urlsafe(24)}"
        until = time.monotonic() + self.life if ends is None else ends
        self.tokens[made] = Access(who, until, None if rules is None else tuple(rules))
        return made

    def access(self, token: str) -> Access | None:
        """What a token is good for now; None if it has expired or is not known."""
        if who := self.account_of(token):
            return Access(who, math.inf)
        found = self.tokens.get(token)
        if found is not None and time.monotonic() > found.ends:
            self.refused.append(token)
            return None
        return found

    def permits(self, access: Access, request: Request) -> bool:
        """True if both the policy of the bucket and the boundary of the token allow a request."""
        with self.lock:
            policy = self.policies.get(request.bucket, {})
            by_policy = access.who == OWNER or allowed(
                bindings_of(policy, request.bucket, f"serviceAccount:{access.who}"), request
            )
        return by_policy and (access.rules is None or allowed(access.rules, request))

    @cached_property
    def owner(self) -> Any:
        """boto3's client of SeaweedFS, which may do all."""
        return client(self.store.endpoint)

    def owner_has(self, bucket: str) -> bool:
        """True if there is such a bucket."""
        return _is_there(lambda: self.owner.head_bucket(Bucket=bucket))

    def has(self, bucket: str, name: str) -> bool:
        """True if there is such an object."""
        return _is_there(lambda: self.owner.head_object(Bucket=bucket, Key=name))

    @cached_property
    def key(self) -> Any:
        """The private key of `OWNER`."""
        from cryptography.hazmat.primitives.asymmetric import rsa

        return rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def log_in(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        """Make Application Default Credentials of `OWNER`, whatever this computer has, and name this service."""
        from cryptography.hazmat.primitives import serialization

        pem = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        said = {
            "type": "service_account", "project_id": PROJECT, "private_key_id": "1", "private_key": pem.decode(),
            "client_email": OWNER, "client_id": "1", "token_uri": f"{self.endpoint}/token",
        }  # fmt: skip
        (folder / "login.json").write_text(json.dumps(said))
        log_out(patch, folder)
        patch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(folder / "login.json"))
        for each in ("STS", "IAM", "STORAGE"):
            patch.setenv(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{each}", self.endpoint)


def log_out(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leave no login of Google's that libraries could find."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        patch.delenv(name, raising=False)
    patch.setenv("CLOUDSDK_CONFIG", str(folder / "no-gcloud"))
    patch.setenv("NO_GCE_CHECK", "true")


def _is_there(look: Callable[[], object]) -> bool:
    from botocore.exceptions import ClientError

    try:
        look()
    except ClientError as e:
        if e.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            raise
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cloud: CloudStorage

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests read what was refused."""

    def _serve(self) -> None:
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self._query = dict(parse_qsl(url.query, keep_blank_values=True))
        path = url.path
        if path == "/token":
            self._log_in()
        elif path == "/v1/token":
            self._exchange()
        elif path in ("/", _METADATA, f"{_METADATA}token"):
            self._metadata(path)
        elif path.startswith(("/storage/v1/b/", "/v1/projects/")):
            self._iam(path)
        elif self.headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256"):
            self._pass_on(self.path, dict(self.headers.items()))
        else:
            bucket, _, name = path.lstrip("/").partition("/")
            self._xml(unquote(bucket), unquote(name))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    # --- tokens ----------------------------------------------------------------------------------------------

    def _log_in(self) -> None:
        """Answer a service account that signs its request."""
        from cryptography.hazmat.primitives import serialization
        from google.auth import jwt

        said = {name: values[0] for name, values in parse_qs(self._body.decode()).items()}
        public = self.cloud.key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        try:
            if said["grant_type"] != _JWT:
                raise ValueError(said["grant_type"])
            who = jwt.decode(said["assertion"], public, audience=_AUDIENCE)["iss"]
        except (KeyError, ValueError) as e:
            self._json(400, {"error": "invalid_grant", "error_description": str(e)})
            return
        self._json(200, self._token_of(self.cloud.token(who)))

    def _exchange(self) -> None:
        """Make a token with a boundary of another one."""
        said = {name: values[0] for name, values in parse_qs(self._body.decode()).items()}
        access = self.cloud.access(said.get("subject_token", ""))
        if self.cloud.refuses or said.get("grant_type") != _EXCHANGE or access is None or access.rules is not None:
            self._json(400, {"error": "invalid_grant", "error_description": "Request contains an invalid token."})
            return
        try:
            boundary = json.loads(unquote(said["options"]))
            rules = rules_of(boundary)
        except (KeyError, ValueError) as e:
            self._json(400, {"error": "invalid_request", "error_description": f"Invalid boundary: {e}"})
            return
        made = self.cloud.token(access.who, rules, min(access.ends, time.monotonic() + self.cloud.life))
        self.cloud.exchanged.append(made)
        self.cloud.boundaries.append(boundary)
        said = self._token_of(made)
        self._json(200, said if self.cloud.tells_life else {**said, "expires_in": None})

    def _metadata(self, path: str) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            self._say(403, b"Missing Metadata-Flavor:Google header.", "text/plain")
        elif not self.cloud.machine:
            self._say(404, b"no service account", "text/plain")
        elif not path.endswith("token"):
            self._json(200, {"email": self.cloud.machine, "scopes": []})
        else:
            self._json(200, self._token_of(self.cloud.token(self.cloud.machine)))

    def _token_of(self, made: str) -> dict[str, Any]:
        left = self.cloud.tokens[made].ends - time.monotonic()
        return {"access_token": made, "expires_in": max(1, round(left)), "token_type": "Bearer"}

    # --- objects ---------------------------------------------------------------------------------------------

    def _needed(self, name: str) -> frozenset[str]:
        """Return the permissions that a request of the XML API needs, but for what it replaces."""
        uploads = "storage.multipartUploads"
        match self.command, bool(name), self._query:
            case "GET", False, {"uploads": _}:
                found = {f"{uploads}.list"}
            case "GET" | "HEAD", False, _:
                found = {"storage.objects.list"}
            case "GET" | "HEAD", True, _:
                found = {"storage.objects.get"}
            case "DELETE", True, {"uploadId": _}:
                found = {f"{uploads}.abort"}
            case "DELETE", True, _:
                found = {"storage.objects.delete"}
            case "POST" | "PUT", True, {"uploadId": _} | {"uploads": _}:
                found = {f"{uploads}.create", "storage.objects.create"}
            case "PUT", True, _:
                found = {"storage.objects.create"}
            case _:
                found = {"storage.buckets.update"}
        return frozenset(found)

    def _xml(self, bucket: str, name: str) -> None:
        cloud, said = self.cloud, self.headers.get("Authorization", "")
        access = cloud.access(said.removeprefix("Bearer ")) if said.startswith("Bearer ") else None
        if said and access is None:
            self._error(401, "AuthenticationRequired", "Authentication required.")
            return
        prefix = self._query.get("prefix", "") if self.command == "GET" and not name else None
        asked = Request(bucket, name, prefix if "uploads" not in self._query else None, self._needed(name))
        public = access is None and asked.permissions <= {"storage.objects.get", "storage.objects.list"}
        if access is None and not (public and (name or prefix or "").startswith("public/")):
            self._deny()
            return
        if not cloud.owner_has(bucket):
            self._error(404, "NoSuchBucket", "The specified bucket does not exist.")
            return
        if access is not None:
            replaces = (
                self.command in ("PUT", "POST") and "partNumber" not in self._query and "uploads" not in self._query
            )
            if replaces and self.headers.get("x-goog-if-generation-match") != "0" and cloud.has(bucket, name):
                asked = asked._replace(permissions=asked.permissions | {"storage.objects.delete"})
            if not cloud.permits(access, asked) or (access.rules is not None and not cloud.uniform):
                self._deny()
                return
            lists = Request(bucket, "", None, frozenset({"storage.objects.list"}))
            if replaces and self.headers.get("x-goog-if-generation-match") != "0":
                cloud.written.append(name)
            reads = self.command in ("GET", "HEAD", "DELETE") and name and "uploadId" not in self._query
            if reads and not cloud.permits(access, lists) and not cloud.has(bucket, name):
                self._deny()
                return
        if self.command == "POST" and "uploadId" in self._query:
            time.sleep(cloud.to_complete)
        self._forward(bucket, name)

    def _deny(self) -> None:
        self.cloud.denied.append((self.command, self.path))
        needed = self._needed(urlsplit(self.path).path.lstrip("/").partition("/")[2])
        self._error(403, "AccessDenied", _DENIED, f"This caller does not have {min(needed)} access.")

    def _forward(self, bucket: str, name: str) -> None:
        """Send a request to SeaweedFS with the names of S3, signed by its owner."""
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        headers = {each: self.headers[each] for each in _PASSED if each in self.headers}
        for each, value in self.headers.items():
            if each.lower().startswith("x-goog-meta-"):
                headers[f"x-amz-meta-{each[len('x-goog-meta-') :].lower()}"] = value
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            if generation != "0":
                self._error(400, "InvalidArgument", "this server has no generations")
                return
            headers["if-none-match"] = "*"
        path = f"/{bucket}" + (f"/{quote(name, safe='/~')}" if name else "")
        query = f"?{urlencode(self._query, quote_via=quote)}" if self._query else ""
        request = AWSRequest(self.command, f"{self.cloud.store.endpoint}{path}{query}", headers, self._body)
        S3SigV4Auth(Credentials("owner", secret_of("owner")), "s3", "us-east-1").add_auth(request)
        self._pass_on(
            f"{path}{query}", {**dict(request.headers.items()), "Host": urlsplit(self.cloud.store.endpoint).netloc}
        )

    def _pass_on(self, path: str, headers: Mapping[str, str]) -> None:
        connection = http.client.HTTPConnection(urlsplit(self.cloud.store.endpoint).netloc, timeout=60)
        try:
            connection.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(self._body)))
            connection.endheaders(self._body)
            answer = connection.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(body))
            for name, value in answer.headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                    self.send_header(re.sub("(?i)^x-amz-meta-", "x-goog-meta-", name), value)
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(body)
        finally:
            connection.close()

    # --- policies and accounts -------------------------------------------------------------------------------

    def _iam(self, path: str) -> None:
        """Answer requests about policies of buckets and service accounts. Whoever asks may do all."""
        cloud = self.cloud
        if (found := re.fullmatch("/storage/v1/b/([^/]+)(/iam)?", path)) is not None:
            name = unquote(found[1])
            if not cloud.owner_has(name):
                self._refuse(404, "The specified bucket does not exist.")
            elif found[2] is None:
                config = {"uniformBucketLevelAccess": {"enabled": cloud.uniform}}
                self._json(200, {"name": name, "iamConfiguration": config, "location": "US-CENTRAL1"})
            else:
                self._policy(name)
        elif (found := re.fullmatch(f"/v1/projects/{PROJECT}/serviceAccounts(?:/([^/]+))?", path)) is not None:
            self._account(found[1] and unquote(found[1]))
        else:
            self._refuse(404, "Not found.")

    def _policy(self, bucket: str) -> None:
        with self.cloud.lock:
            now = self.cloud.policies.setdefault(bucket, {"version": 1, "bindings": [], "etag": "CAE="})
            if self.command == "GET":
                shown = copy.deepcopy(now)
                if int(self._query.get("optionsRequestedPolicyVersion", 1)) < 3:
                    shown["bindings"] = [each for each in shown["bindings"] if "condition" not in each]
                self._json(200, shown)
                return
            said = json.loads(self._body)
            has_conditions = any("condition" in each for each in said["bindings"])
            members = {member for each in said["bindings"] for member in each["members"]}
            known = {f"serviceAccount:{each}" for each in (OWNER, *self.cloud.accounts)}
            missing = {each for each in members if each.startswith("serviceAccount:")} - known
            if self.cloud.unwilling:
                self._refuse(400, self.cloud.unwilling)
            elif said.get("etag") != now["etag"]:
                self._refuse(412, "At least one of the pre-conditions you specified did not hold.")
            elif has_conditions and said.get("version") != 3:
                self._refuse(400, "A policy with a condition has the version 3.")
            elif has_conditions and not self.cloud.uniform:
                self._refuse(412, "Conditions need uniform bucket-level access.")
            elif missing:
                self._refuse(400, f"Service account {missing.pop()} does not exist.")
            else:
                self.cloud.policies[bucket] = {**said, "etag": secrets.token_urlsafe(6)}
                self._json(200, self.cloud.policies[bucket])

    def _account(self, email: str | None) -> None:
        with self.cloud.lock:
            if email is not None:
                found = self.cloud.accounts.get(email)
                if found is None:
                    self._refuse(404, f"Unknown service account {email}")
                else:
                    self._json(200, found)
                return
            said = json.loads(self._body)
            name = f"{said['accountId']}@{PROJECT}.iam.gserviceaccount.com"
            if not re.fullmatch("[a-z][a-z0-9-]{4,28}[a-z0-9]", said["accountId"]):
                self._refuse(400, "Invalid service account ID.")
            elif name in self.cloud.accounts:
                self._refuse(409, f"Service account {said['accountId']} already exists.")
            else:
                self.cloud.accounts[name] = {**said["serviceAccount"], "email": name, "projectId": PROJECT}
                self._json(200, self.cloud.accounts[name])

    # --- answers ---------------------------------------------------------------------------------------------

    def _refuse(self, status: int, why: str) -> None:
        self._json(status, {"error": {"code": status, "message": why, "errors": [{"message": why}]}})

    def _error(self, status: int, code: str, why: str, details: str = "") -> None:
        text = (
            f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{escape(why)}</Message>"
            f"{f'<Details>{escape(details)}</Details>' if details else ''}</Error>"
        )
        self._say(status, text.encode(), "application/xml; charset=UTF-8")

    def _json(self, status: int, said: object) -> None:
        self._say(status, json.dumps(said).encode(), "application/json")

    def _say(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.headers.get("Metadata-Flavor"):
            self.send_header("Metadata-Flavor", "Google")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def cloud_storage(store: Store, life: float = _LIFE) -> Iterator[CloudStorage]:
    """Serve Cloud Storage, whose tokens count for so many seconds, in front of a SeaweedFS."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    cloud = CloudStorage(f"http://127.0.0.1:{server.server_port}", store, life)
    handler.cloud = cloud  # type: ignore[attr-defined]
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
