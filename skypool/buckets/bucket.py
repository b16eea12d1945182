"""`Bucket`: a place in an object store, or a folder, where files are kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from skypool.errors import UsageError

SCHEMES = ("s3", "gs", "file")
_OTHER_WORDS = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
"""What other programs write for a scheme."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
"""Matches the names that object stores give to buckets, those of old buckets too."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ROLE = re.compile(r"arn:[a-z-]+:iam::\d*:role/[\w+=,.@/-]{1,576}", re.ASCII)
Login = Literal["keys", "temporary", "identity"]
"""The ways in which a machine logs in to a bucket."""
_LONGEST = 1024
"""The most bytes of the name of an object in every store."""


class _Parts(NamedTuple):
    scheme: str
    name: str
    prefix: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """A place in an object store, or a folder, where files are kept.

    Args:
        url: "s3://NAME/PREFIX" for a store with the protocol of S3, "gs://NAME/PREFIX" for Google Cloud Storage, or
            "file:///FOLDER". The prefix may be left out.
        endpoint: the URL of a store with this protocol. Default "": AWS, or what the login of this computer names; for
            gs://, Google. One that gets tokens, with gs:// and no HMAC key, or that makes temporary keys for a role,
            begins with https:// or is this computer.
        region: the region of the bucket. Default "": it is looked up; with an endpoint, what such stores expect.
        keys: the names of the variables with the access key, with its secret, and with a session token if there is one.
            For gs://, the HMAC key and its secret, or an access token alone. Default (): to save, a machine gets
            temporary credentials for the prefix, which the login of this computer makes. Data without keys must be
            public.
        role: the ARN of a role that the login of this computer assumes to make temporary credentials. With an endpoint,
            the store itself must make them, by the request AssumeRole. For s3:// alone, and not for data. Default "":
            none.
        identity: True if the machine has an identity of its own that reaches the prefix, such as an instance profile
            or a service account. It then gets no credentials. Not for data.

    Raises:
        UsageError: an argument is not valid.
    """

    url: str
    endpoint: str = ""
    region: str = ""
    keys: Sequence[str] = ()
    role: str = ""
    identity: bool = False

    def __post_init__(self) -> None:
        scheme, name, _ = _split(self.url)
        self._check_logins(scheme)
        if self.endpoint:
            object.__setattr__(self, "endpoint", _endpoint(self.endpoint, scheme, name))
        if isinstance(self.keys, str) or not all(isinstance(each, str) for each in self.keys):
            raise UsageError("keys of a bucket is a list of names of variables, not one text")
        object.__setattr__(self, "keys", tuple(self.keys))
        if self.endpoint and not is_private(self.endpoint):
            self._check_unencrypted(scheme)
        if not self.keys:
            return
        if scheme == "file":
            raise UsageError(f"keys are for buckets in a store, and this one is {self.url}; leave them out")
        if scheme == "gs" and len(self.keys) not in (1, 2):
            raise UsageError(
                f"keys of {self.url} has {len(self.keys)} names; name the variables with the HMAC key and with its "
                "secret, or the one with an access token"
            )
        if scheme != "gs" and len(self.keys) not in (2, 3):
            raise UsageError(
                f"keys of {self.url} has {len(self.keys)} names; name the variables with the access key and with its "
                "secret, and with a session token if there is one"
            )
        for each in self.keys:
            if not _VARIABLE.fullmatch(each):
                raise UsageError(f"keys of {self.url} takes names of variables, and one of these is none")

    def _check_logins(self, scheme: str) -> None:
        """Raise UsageError if a role or an identity is not valid, or there is another login beside it."""
        if not (self.role or self.identity):
            return
        if scheme == "file":
            raise UsageError(f"a role and an identity are for buckets in a store, and this one is {self.url}")
        if scheme == "gs" and self.role:
            raise UsageError(
                f"role is for buckets with s3://, and {self.url} needs none: the login of this computer makes "
                "temporary credentials by itself; leave it out"
            )
        if bool(self.role) + bool(self.identity) + bool(self.keys) > 1:
            raise UsageError(f"{self.url} has more than one of keys, role and identity; name one way to log in")
        if self.role and not (isinstance(self.role, str) and _ROLE.fullmatch(self.role)):
            raise UsageError(f"role of {self.url} is the ARN of a role, such as 'arn:aws:iam::123456789012:role/runs'")
        if self.identity is not True and self.identity is not False:
            setting = "GCP(service_account='…')" if scheme == "gs" else "AWS(instance_profile='runs')"
            raise UsageError(
                f"identity of {self.url} is True or False; the provider's setting names the identity, such as {setting}"
            )
        if self.identity and self.endpoint and scheme != "gs":  # Google's cloud has several endpoints
            raise UsageError(f"a machine has an identity at its own cloud only; leave the endpoint of {self.url} out")

    def _check_unencrypted(self, scheme: str) -> None:
        """Raise UsageError if an endpoint without encryption would get or send what logs in to the bucket."""
        if scheme == "gs" and len(self.keys) != 2:
            raise UsageError(
                f"{self.endpoint} would get tokens for {self.url} unencrypted, which everybody on the way can use; "
                "name an address with https://, or an HMAC key and its secret as its keys"
            )
        if self.role:
            raise UsageError(
                f"{self.endpoint} would send temporary keys for {self.url} unencrypted, which everybody on the way can "
                "use; name an address with https://, or the variables of keys that reach this prefix alone"
            )

    @property
    def login(self) -> Login:
        """The way in which a machine logs in to the bucket."""
        return "keys" if self.keys or self.scheme == "file" else "identity" if self.identity else "temporary"

    @property
    def scheme(self) -> str:
        """The protocol: "s3", "gs" or "file"."""
        return _split(self.url).scheme

    @property
    def name(self) -> str:
        """The name of the bucket; the path of the folder for "file"."""
        return _split(self.url).name

    @property
    def prefix(self) -> str:
        """The beginning of the names of its objects, without "/" at the end; "" for none."""
        return _split(self.url).prefix

    @property
    def has_token(self) -> bool:
        """True if the keys have a token, which expires."""
        return len(self.keys) == (1 if self.scheme == "gs" else 3)

    def __str__(self) -> str:
        return self.url


def with_values(url: str, endpoint: str, region: str, values: Sequence[str]) -> tuple[Bucket, dict[str, str]]:
    """Return a bucket whose keys have these values, and the variables that have them. Without values it has no keys."""
    variables: dict[str, str] = dict(zip(("ID", "SECRET", "TOKEN"), values, strict=False))
    return Bucket(url, endpoint, region, tuple(variables)), variables


def _split(url: str) -> _Parts:
    """Return the parts of a URL. Raises UsageError if it names no bucket."""
    if not isinstance(url, str):
        raise UsageError(f"a bucket is named by a URL such as 's3://NAME/PREFIX', not by {url!r}")
    scheme, found, rest = url.partition("://")
    if scheme in ("http", "https"):
        raise UsageError(
            "a bucket is not named by the address of a server; write 's3://NAME/PREFIX', and name the server as the "
            "endpoint"
        )
    if "@" in rest:
        raise UsageError("a bucket's URL has no credentials; name the variables that have them as its keys")
    if not found or scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        hint = f"; did you mean {_OTHER_WORDS[scheme]}://?" if scheme in _OTHER_WORDS else ""
        raise UsageError(f"a bucket's URL begins with {known}, and this one is {url!r}{hint}")
    if not url.isprintable() or len(url.encode("utf-8", "surrogatepass")) > _LONGEST or re.search(r"[?#\\]", url):
        raise UsageError(f"{url!r:.200} has a character that not every store allows, or over {_LONGEST} bytes")
    name, _, prefix = rest.partition("/")
    if scheme == "file":
        if name or not prefix.strip("/"):
            raise UsageError(f"{url!r} names no folder; write the whole path, as in file:///mnt/shared/runs")
        path = prefix.rstrip("/")
        name, prefix = f"/{path}", ""
    elif not _NAME.fullmatch(name):
        raise UsageError(f"{url!r} has no name of a bucket; write {scheme}://NAME/PREFIX")
    else:
        path = prefix = prefix.removesuffix("/")
    if path and any(each in ("", ".", "..") for each in path.split("/")):
        raise UsageError(f"{url!r} has an empty part, '.' or '..' in its path, which stores read in different ways")
    return _Parts(scheme, name, prefix)


def is_private(address: str) -> bool:
    """Return True if nobody on the way reads what is sent to an address: it is encrypted, or to this computer."""
    parts = urlsplit(address)
    try:
        is_here = ip_address(parts.hostname or "").is_loopback
    except ValueError:  # a name
        is_here = parts.hostname == "localhost"
    return is_here or parts.scheme == "https"


def _endpoint(endpoint: str, scheme: str, name: str) -> str:
    """Return an endpoint as it is used, without "/" at its end. Raises UsageError if it is not the URL of a server."""
    if scheme == "file":
        raise UsageError("a folder has no endpoint; leave it out")
    try:
        parts = urlsplit(endpoint)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # such as a port that is no number
        is_server = False
        parts = urlsplit("")
    if not is_server or parts.query or parts.fragment or parts.username is not None:
        raise UsageError(
            "the endpoint of a bucket is the address of a server, such as 'https://HOST:PORT', without credentials"
        )
    if parts.path.strip("/").rpartition("/")[2] == name != "":
        raise UsageError(f"the endpoint of a bucket is without its name: leave /{name} out at its end")
    return parts._replace(netloc=parts.netloc.lower(), path=parts.path.rstrip("/")).geturl()
