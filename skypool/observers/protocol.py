"""The messages between an observer and the owner of a pool.

A connection carries one request. The observer sends one line of JSON, at most 64 KiB with its newline:

    {"skypool": 1, "ask": "info"}

"skypool" is the version of the protocol, or 0 in a request for "info" of any version. The owner answers with one line:
`{"ok": true, …}`, or `{"ok": false, "error": "…", "kind": "UsageError"}`, after which it closes the connection. The
observer sends nothing else. If it does, the owner closes the connection. The requests are:

| ask | further fields | answer |
|---|---|---|
| "info" | none | the pool and its nodes as fields; the connection ends |
| "logs" | none | then a line of JSON for each event from now on, with "event" as its type |
| "forward" | "node", "port", "host", "here", "socket" | "address" on this computer, open as long as the connection |
| "reach" | "node", "script", "terminal", "ports" | "argv", a local command that runs the shell script on the node |

An observer that reads events too slowly misses some: a line `{"event": "Missed", "count": 12}` says how many. If a
forward ends early, a line `{"closed": "…"}` says why. "ports" is a list of triples (here, host, port) for `ssh -L`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from socket import socket
from typing import Any

from skypool.errors import UsageError

VERSION = 2
ANY = 0
"""The version in a request for "info" of an observer of any version. Later versions only add fields to its answer."""
LONGEST_LINE = 65536
"""The most bytes of a request, with its newline."""
LONGEST_ANSWER = 16 << 20
"""The most bytes of a line that the owner sends, with its newline."""


@dataclass(frozen=True, slots=True)
class Info:
    """Request for the state of the pool and its nodes."""


@dataclass(frozen=True, slots=True)
class Logs:
    """Request for all events of the pool from now on."""


@dataclass(frozen=True, slots=True)
class ForwardPort:
    """Request for a port of this computer that leads to a port of a node.

    Attributes:
        port: the port to connect to from the node.
        host: the host to connect to, as the node knows it.
        here: the port of this computer; 0 for a free one.
        socket: the absolute path of a Unix socket in place of a port; "" for a port.
    """

    port: int
    node: int = 0
    host: str = "localhost"
    here: int = 0
    socket: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """Request for a local command that runs a shell script on a node.

    Attributes:
        script: the script. It can use the variables `folder` (folder of the node's agent), `cwd` (that of calls) and
            `python`.
        terminal: True if the command is to run in a terminal.
        ports: triples (port of this computer, host, port) to forward while the command runs. Needs a node that is
            reached by ssh.
    """

    node: int
    script: str
    terminal: bool = False
    ports: tuple[tuple[int, str, int], ...] = ()


Request = Info | Logs | ForwardPort | Reach


def request_of(line: bytes) -> Request:
    """Return the request in a line that an observer sent. Raise UsageError if it is no request of this version."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise UsageError(f"an observer's request must be one line of JSON: {e}") from e
    if not isinstance(said, dict):
        raise UsageError(f"an observer's request must be a JSON object, not {type(said).__name__}")
    if said.get("skypool") != VERSION and (said.get("skypool"), said.get("ask")) != (ANY, "info"):
        raise UsageError(
            f"the owner of the pool speaks version {VERSION} of the observers' protocol, not "
            f"{said.get('skypool')!r:.40}; run the same version of skypool in both terminals"
        )
    asked = said.get("ask")
    known = _REQUESTS.get(asked) if isinstance(asked, str) else None
    if known is None:
        raise UsageError(f"observers can ask for {', '.join(_REQUESTS)}, not for {asked!r:.80}")
    kind, checks = known
    fields = {name: value for name, value in said.items() if name not in ("skypool", "ask")}
    for name, value in fields.items():
        if name not in checks or not checks[name](value):
            raise UsageError(f"the request {asked!r} has an invalid field {name!r:.40}: {value!r:.80}")
    if missing := [name for name in _REQUIRED[kind] if name not in fields]:
        raise UsageError(f"the request {asked!r} has no field {missing[0]!r}")
    if "ports" in fields:
        fields["ports"] = tuple(map(tuple, fields["ports"]))
    made: Request = kind(**fields)
    return made


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_port(value: Any) -> bool:
    return type(value) is int and 0 < value < 65536


def _is_host(value: Any) -> bool:
    """Return True for a host name or address; False for text that a command would take for an option or two words."""
    return type(value) is str and 0 < len(value) < 256 and value[0] != "-" and value.isprintable() and " " not in value


def _are_ports(value: Any) -> bool:
    return type(value) is list and all(
        type(each) is list and len(each) == 3 and _is_port(each[0]) and _is_host(each[1]) and _is_port(each[2])
        for each in value
    )


_Check = Callable[[Any], bool]
_REQUESTS: dict[str, tuple[Callable[..., Request], dict[str, _Check]]] = {
    "info": (Info, {}),
    "logs": (Logs, {}),
    "forward": (
        ForwardPort,
        {
            "port": _is_port,
            "node": _is_count,
            "host": _is_host,
            "here": lambda value: value == 0 or _is_port(value),
            "socket": lambda value: type(value) is str and value[:1] in ("", "/") and "\0" not in value,
        },
    ),
    "reach": (
        Reach,
        {
            "node": _is_count,
            "script": lambda value: type(value) is str and "\0" not in value,
            "terminal": lambda value: type(value) is bool,
            "ports": _are_ports,
        },
    ),
}
"""The class of each request, and for each of its fields a function that returns True if a value is valid."""
_REQUIRED: dict[Callable[..., Request], tuple[str, ...]] = {
    Info: (),
    Logs: (),
    ForwardPort: ("port",),
    Reach: ("node", "script"),
}


def line_of(message: Mapping[str, object]) -> bytes:
    """Return a message as a line of JSON, with its newline."""
    return json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"


def read_line(connection: socket, longest: int, until: float, got: bytes = b"") -> tuple[bytes, bytes]:
    """Read a line from a connection. Return it without its newline, and the bytes that came after it.

    Args:
        longest: the most bytes of the line, with its newline. UsageError is raised beyond.
        until: the time of `time.monotonic()` at which the whole line must have arrived.
        got: bytes that have arrived already.

    Raises:
        EOFError: the connection ended before the line was complete.
        OSError: reading failed. TimeoutError: the line was not complete in time.
    """
    while b"\n" not in got:
        if len(got) >= longest:
            raise UsageError(f"the line is longer than {longest} bytes")
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the line was not complete in time")
        connection.settimeout(left)
        part = connection.recv(min(65536, longest - len(got)))
        if not part:
            raise EOFError("the connection ended before the line was complete")
        got += part
    line, _, rest = got.partition(b"\n")
    return line, rest
