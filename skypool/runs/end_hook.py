"""`post`: tells a web server that a run has ended, such as an incoming webhook of Slack or Discord.

The address is a secret: who knows it can write to the channel. No message of this module has it.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from skypool.console.event_text import span
from skypool.errors import UsageError
from skypool.rental.records import RunEnd
from skypool.rental.run_state import WORDS, reason, told
from skypool.runs import secret_values
from skypool.runs.own_thread import in_thread
from skypool.text import one_line

LIMIT = 20.0
"""The most seconds for all tries."""
_PAUSES = 0.0, 1.0, 3.0
"""The pauses in seconds before each try."""
_ONE = 8.0
"""The most seconds for one try."""
_HERE = ("localhost", "127.0.0.1", "::1")
_MOST = 1800
"""The most characters of the text. Discord takes 2,000."""
_BUSY = 429
_SERVER = 500
"""The least status of an answer that says that the server has failed."""


@dataclass(frozen=True, slots=True)
class Posted:
    """An end of a run, as it is posted.

    Attributes:
        name: the name of the run.
        usd: what it has cost, in US dollars; None if that is not known.
        seconds: how long it took, with its machines.
    """

    name: str
    end: RunEnd
    usd: float | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        cost = "" if self.usd is None else f", {self.usd:.2f} USD"
        text = one_line(f"run {self.name} {told(self.end)}", _MOST) + f"; {span(self.seconds)}{cost}"
        return {
            "text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),  # as Slack reads it
            "content": text,
            "allowed_mentions": {"parse": []},  # Discord calls nobody, whatever the text has
            "name": self.name,
            "state": WORDS[self.end.outcome][0],
            "returncode": self.end.returncode,
            "why": reason(self.end),
            "usd": self.usd,
            "seconds": round(self.seconds, 3),
        }


def named(said: str, root: Path, option: str) -> str:
    """Return the address that a user has given, or that a variable of this name has; "" for "".

    Args:
        root: the folder with the file `.env`.
        option: how the user has given it, for messages.

    Raises UsageError if it is not valid, or there is no such variable.
    """
    if not said:
        return ""
    is_name = said.isidentifier()
    return checked(secret_values.found([said], root, option)[said] if is_name else said, option)


def checked(url: str, option: str) -> str:
    """Return the address of a hook. Raises UsageError, without the address, if it is not valid.

    `option` is how the user has given it, for messages.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
        parts = urlsplit("")
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if not host or not is_plain or parts.username is not None:
        raise UsageError(f"{option} takes the address of a web server, such as https://hooks.slack.com/services/…")
    if parts.scheme != "https" and not (parts.scheme == "http" and host in _HERE):
        raise UsageError(f"{option} takes an https:// address, as it is a secret; http:// is for localhost only")
    return url


def host_of(url: str) -> str:
    """Return the part of the address that is no secret."""
    return urlsplit(url).hostname or ""


def post(url: str, posted: Posted, limit: float = LIMIT) -> str:
    """Post an end, in several tries. Return why it was not taken; "" if it was. Blocks for `limit` seconds at most."""
    if limit <= 0:
        return "there was no time for it"
    until = time.monotonic() + limit
    done = in_thread(partial(_tries, url, json.dumps(posted.to_json()).encode(), until), "skypool-post")
    if not wait([done], limit).done:  # a server may answer a byte at a time
        return f"{host_of(url)} did not answer within {limit:.3g} s"
    return done.result()


def _tries(url: str, data: bytes, until: float) -> str:
    why = ""
    for pause in _PAUSES:
        left = until - time.monotonic() - pause
        if left <= 0:
            break
        time.sleep(pause)
        try:
            _once(url, data, min(_ONE, left))
        except urllib.error.HTTPError as e:
            e.close()
            why = f"{host_of(url)} answered with status {e.code}"
            if e.code < _SERVER and e.code != _BUSY:  # another try would fail in the same way
                break
        except Exception as e:  # noqa: BLE001 - whatever it is, the run has ended all the same
            cause = e.reason if isinstance(e, urllib.error.URLError) else e
            words = (cause.strerror or type(cause).__name__) if isinstance(cause, OSError) else type(cause).__name__
            why = f"{host_of(url)} could not be reached: {one_line(words, 200)}"
        else:
            return ""
    return why or "there was no time for it"


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which could lead to another server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def _once(url: str, data: bytes, patience: float) -> None:
    handlers: list[urllib.request.BaseHandler] = [_Stays()]
    if urlsplit(url).scheme == "http":  # a server on this computer is not behind a proxy
        handlers.append(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/json", "User-Agent": "skypool"}
    request = urllib.request.Request(url, data, headers, method="POST")
    urllib.request.build_opener(*handlers).open(request, timeout=patience).close()
