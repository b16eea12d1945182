"""Secrets of all kinds, planted in requests and in replies of a lab, and a search for them in a recording.

with Planting(world) as planting:  # a proxy in front of a lab, which adds the secrets to each reply
    ...
assert found(directory, planting.secrets) == []
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import random
import re
import string
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, unquote_plus, urlsplit
from xml.sax.saxutils import escape

NUMBER = 100
"""How many secrets there are of each kind."""


@dataclass(frozen=True)
class Secret:
    """One secret.

    Attributes:
        kind: what it is.
        value: what must not be found.
        field: the name of the field that has it; "" for a secret that is recognised in any text.
        text: a sentence with it; "" for a secret that is only recognised by its field.
    """

    kind: str
    value: str
    field: str = ""
    text: str = ""

    @property
    def told(self) -> Any:
        """The value as JSON has it."""
        return float(self.value) if self.kind == "balance" else self.value


def secrets(kinds: Mapping[str, Callable[[random.Random], tuple[str, str, str]]], seed: int) -> list[Secret]:
    """A hundred of each kind."""
    dice = random.Random(seed)
    return [Secret(kind, *make(dice)) for kind, make in kinds.items() for _ in range(NUMBER)]


def _of(dice: random.Random, length: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(dice.choices(letters, k=length - 1)) + dice.choice("0123456789")


def _name(dice: random.Random) -> str:
    return "".join(dice.choices(string.ascii_lowercase, k=9))


def _ssh_key(dice: random.Random) -> tuple[str, str, str]:
    blob = b"\0\0\0\x0bssh-ed25519\0\0\0 " + dice.randbytes(32)
    coded = base64.b64encode(blob).decode()
    return coded[30:], "", f"ssh-ed25519 {coded} {_name(dice)}-laptop"


def _private_key(dice: random.Random) -> tuple[str, str, str]:
    body = base64.b64encode(dice.randbytes(48)).decode()
    return body, "", f"-----BEGIN OPENSSH PRIVATE KEY-----\n{body}\n-----END OPENSSH PRIVATE KEY-----\n"


def _signed(dice: random.Random) -> tuple[str, str, str]:
    signature = _of(dice, 40)
    return signature, "", f"curl https://files.example.org/a?X-Amz-Expires=60&X-Amz-Signature={signature}"


def _field(name: str, length: int = 20) -> Callable[[random.Random], tuple[str, str, str]]:
    def make(dice: random.Random) -> tuple[str, str, str]:
        return _of(dice, length), name, ""

    return make


def _text(template: str, length: int = 20) -> Callable[[random.Random], tuple[str, str, str]]:
    def make(dice: random.Random) -> tuple[str, str, str]:
        value = _of(dice, length)
        return value, "", template.format(value)

    return make


def _phrase(make: Callable[[random.Random], str], template: str) -> Callable[[random.Random], tuple[str, str, str]]:
    def phrase(dice: random.Random) -> tuple[str, str, str]:
        value = make(dice)
        return value, "", template.format(value)

    return phrase


Make = Callable[[random.Random], tuple[str, str, str]]
EVERYWHERE: Mapping[str, Make] = {
    "email": _phrase(lambda dice: f"{_name(dice)}@{_name(dice)}.org", "ask {} about it"),
    "IPv4": _phrase(lambda dice: ".".join(str(dice.randrange(11, 99)) for _ in range(4)), "allow {}/32"),
    "IPv6": _phrase(
        lambda dice: "2a02:" + ":".join(f"{dice.randrange(4096, 65535):x}" for _ in range(7)), "allow {}/128"
    ),
    "SSH key": _ssh_key,
    "private key": _private_key,
    "signed URL": _signed,
    "password in a command": _text("export DB_PASSWORD='{}'; run"),
    "token in a command": _text("docker run -e HF_TOKEN={} image"),
    "key in a command": _text("wandb_api_key: {}"),
    "bearer": _text("Authorization: Bearer {}", 30),
    "JWT": _phrase(lambda dice: f"eyJ{_of(dice, 20)}.{_of(dice, 30)}.{_of(dice, 20)}", "got {}"),
    "login in a URL": _text("git clone https://me:{}@git.example.org/x"),
    "GitHub token": _text("ghp_{}", 36),
    "password": _field("password"),
    "jupyter token": _field("jupyter_token", 40),
    "API key": _field("api_key", 40),
    "key of a pod": _field("instance_api_key", 40),
    "access token": _field("accessToken", 60),
    "user": lambda dice: (_name(dice), "username", ""),
    "user id": lambda dice: (str(dice.randrange(10**8, 10**9)), "user_id", ""),
    "balance": lambda dice: (f"{dice.randrange(10**4, 10**6)}.{dice.randrange(11, 99)}7", "clientBalance", ""),
}
AWS: Mapping[str, Make] = {
    "access key": _phrase(lambda dice: _of(dice, 16, string.ascii_uppercase + string.digits), "AKIA{}"),
    "secret key": lambda dice: (base64.b64encode(dice.randbytes(30)).decode(), "SecretAccessKey", ""),
    "session token": lambda dice: (base64.b64encode(dice.randbytes(90)).decode(), "SessionToken", ""),
    "account": _phrase(lambda dice: str(dice.randrange(10**11, 10**12)), "the account {} may not"),
    "account in an ARN": _phrase(lambda dice: str(dice.randrange(10**11, 10**12)), "arn:aws:ec2:us-east-1:{}:vpc/1"),
    "user in an ARN": _phrase(_name, "arn:aws:iam::123456789012:user/{} is not authorized"),
    "owner": lambda dice: (str(dice.randrange(10**11, 10**12)), "ownerId", ""),
}
GOOGLE: Mapping[str, Make] = {
    "project": _phrase(lambda dice: f"{_name(dice)}-{dice.randrange(1000)}", "see projects/{}/zones/us-central1-a"),
    "project number": _phrase(lambda dice: str(dice.randrange(10**11, 10**12)), "project_number:{}"),
    "service account": _phrase(
        lambda dice: f"{_name(dice)}@{_name(dice)}-7.iam.gserviceaccount.com", "serviceAccount:{}"
    ),
    "token of Google": _text("ya29.{}", 60),
    "number of a project": lambda dice: (str(dice.randrange(10**11, 10**12)), "projectNumber", ""),
}
RUNPOD: Mapping[str, Make] = {"key of RunPod": _text("RUNPOD is rpa_{}", 40)}


# --- planting ------------------------------------------------------------------------------------------------


ENCODINGS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: base64.b64encode(f"#!/bin/sh\n{text}\n".encode()).decode(),
    lambda text: "url=" + "".join(f"%{byte:02X}" for byte in text.encode()),
    lambda text: "a message: " + "".join(f"\\u{ord(letter):04x}" for letter in text),
    lambda text: json.dumps({"inner": json.dumps([text])}),
    lambda text: base64.b64encode(gzip.compress(json.dumps({"script": text}).encode())).decode(),
    lambda text: base64.urlsafe_b64encode(base64.b64encode(text.encode())).decode(),
)


def texts(secrets: list[Secret]) -> Iterator[str]:
    """Sentences with the secrets, each in two encodings. Each kind comes in all of them."""
    for number, each in enumerate(filter(lambda each: each.text, secrets)):
        for way in (number, number + 3):
            yield ENCODINGS[way % len(ENCODINGS)](each.text)


def objects(secrets: list[Secret]) -> list[dict[str, Any]]:
    """Objects whose fields have the secrets, also as JSON in strings and as base64."""
    made: list[dict[str, Any]] = []
    for each in filter(lambda each: each.field, secrets):
        plain = {each.field: each.told}
        coded = base64.b64encode(json.dumps(plain).encode()).decode()
        made.append({**plain, "inner": {"deeper": [plain]}, "text": json.dumps(plain), "coded": coded})
    return made


def escaped(value: Any) -> str:
    """JSON in which every letter of a string is written as an escape."""
    match value:
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)}: {escaped(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(escaped, value)) + "]"
        case str():
            return '"' + "".join(f"\\u{ord(letter):04x}" for letter in value) + '"'
        case _:
            return json.dumps(value)


def planted(secrets: list[Secret]) -> dict[str, Any]:
    """What is added to requests and replies of JSON."""
    return {"planted": {"texts": list(texts(secrets)), "objects": objects(secrets)}}


def planted_xml(secrets: list[Secret]) -> str:
    """What is added to replies of XML."""
    leaves = [f"<{each.field}>{each.value}</{each.field}>" for each in secrets if each.field]
    entities = ["".join(f"&#{ord(letter)};" for letter in each.text) for each in secrets if each.text]
    told = [*(escape(text) for text in texts(secrets)), *entities]
    return "<planted>" + "".join(f"<item>{each}</item>" for each in [*told, *leaves]) + "</planted>"


class Planting:
    """A proxy in front of a lab, which adds the secrets to the next replies.

    Attributes:
        environment: of the lab, with the proxy in the place of the lab.
        times: how many replies get them; each as XML, as plain JSON, or as JSON with escapes.
    """

    def __init__(self, world: Any, secrets: list[Secret]) -> None:
        self.secrets, self.times = secrets, 0
        self._strict = "/locations"  # Google's client refuses unknown fields there
        self._to = urlsplit(world.url)
        planting = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                planting.relay(self)

            do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the lab's journal has it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, name="planting", daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {name: text.replace(world.url, url) for name, text in world.environment.items()}

    def __enter__(self) -> Planting:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def relay(self, asked: BaseHTTPRequestHandler) -> None:
        """Pass on one request, and answer it."""
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        connection = http.client.HTTPConnection(self._to.hostname or "", self._to.port or 0, timeout=60)
        with contextlib.closing(connection):
            connection.request(asked.command, asked.path, body, dict(asked.headers.items()))
            got = connection.getresponse()
            reply = got.read()
        if self.times and reply and not asked.path.partition("?")[0].endswith(self._strict):
            self.times -= 1
            reply = self._grown(reply)
        asked.send_response(got.status)
        for name, value in got.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                asked.send_header(name, value)
        for each in self.secrets[:20]:
            asked.send_header("Set-Cookie", f"session={quote(each.value)}")
            asked.send_header("X-Planted", quote(each.value))
        asked.send_header("Content-Length", str(len(reply)))
        asked.end_headers()
        asked.wfile.write(reply)

    def _grown(self, reply: bytes) -> bytes:
        if reply.lstrip().startswith(b"<"):
            end = reply.rindex(b"</")
            return reply[:end] + planted_xml(self.secrets).encode() + reply[end:]
        value = json.loads(reply)
        more = planted(self.secrets)
        if isinstance(value, list):
            value = [{**each, **more} if isinstance(each, dict) else each for each in value[:1]] + value[1:]
        else:
            value = {**value, **more}
        return (escaped(value) if self.times % 2 else json.dumps(value)).encode()


# --- searching -----------------------------------------------------------------------------------------------


def found(directory: Path, secrets: list[Secret]) -> list[Secret]:
    """The secrets that a recording has, in whatever encoding."""
    lines = (line for file in directory.iterdir() for line in file.read_text().splitlines())
    pieces = {piece for line in lines for piece in decoded(line)}
    whole = "\n\0".join(pieces)
    return [each for each in secrets if each.value in whole or any(part in whole for part in _parts(each.value))]


def decoded(text: str, depth: int = 0) -> Iterator[str]:
    """A text, and all that is encoded in it. Of JSON, its strings, names and numbers."""
    told = _json(text)
    if told is None:
        yield text
    if depth > 8:
        return
    for inner in set(_strings(told) if told is not None else _inner(text)):
        if inner != text:
            yield from decoded(inner, depth + 1)


def _json(text: str) -> Any:
    """What JSON text has; None for other text."""
    with contextlib.suppress(ValueError):
        return json.loads(text) if text.startswith(("{", "[")) else None
    return None


def _inner(text: str) -> Iterator[str]:
    if "%" in text:
        yield unquote(text)
        yield unquote_plus(text)
    if "\\u" in text:
        with contextlib.suppress(ValueError):
            yield json.loads('"' + text.replace('"', '\\"').replace("\n", "\\n") + '"')
    for word in re.findall(r"[A-Za-z0-9+/_-]{12,}", text):
        with contextlib.suppress(ValueError, zlib.error, EOFError, OSError):
            data = base64.b64decode(word.replace("-", "+").replace("_", "/") + "==")
            yield (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


def _strings(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for key, inner in value.items():
                yield key
                yield from _strings(inner)
        case list():
            for inner in value:
                yield from _strings(inner)
        case str():
            yield value
        case bool() | None:
            return
        case _:
            yield str(value)


def _parts(value: str) -> Iterator[str]:
    """The characters that base64 of a text with this value always has."""
    for before in range(3):
        coded = base64.b64encode(b"\0" * before + value.encode()).decode().rstrip("=")
        part = coded[-(-before * 8 // 6) : (before + len(value)) * 8 // 6]
        if len(part) >= 10:
            yield part
