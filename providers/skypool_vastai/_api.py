"""Sends requests to Vast.ai: lists, ends and relabels instances, limits the rate of requests, and translates refusals.

API: https://docs.vast.ai/api-reference and the vastai package 1.9.1 (read 2026-11-21).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from skypool.drivers import rest
from skypool.drivers.pages import WholeList
from skypool.drivers.refusals import Refusals
from skypool.drivers.retry import quietly

REFUSALS = Refusals("skypool_vastai", "vastai", "Vast.ai")

PACE: dict[str, float] = {
    "PUT /api/v0/asks/*": 4.5,
    "DELETE /api/v0/instances/*": 3.0,
    "GET /api/v?/instances/*": 2.0,
    "PUT /api/v0/instances/*": 1.0,
}
"""A dict from a pattern of HTTP method and path to the minimum seconds between two requests that match it."""

_PAGE = 25
"""Number of instances in one page of Vast.ai's list of instances."""


_CHARGES_PAGE = 500
"""Number of instances in one page of Vast.ai's list of charges."""


class Account:
    """A client of Vast.ai's API with one API key. Creating a client sends nothing.

    Several threads may use the same client. Threads that list the instances at the same time share one answer. All
    methods raise ProviderError if a request is refused or gets no answer.

    Attributes:
        base: address of the API, without "/" at its end.
        ask: sends a request, and repeats the request if there is no answer.
        once: sends a request only once.
        error: returns the exception for a refusal.
    """

    def __init__(self, base: str, key: str) -> None:
        self.base = base.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"}
        api = rest.Rest(base, REFUSALS, lambda: headers, said=said, refuses=_refuses, apart=PACE)
        self.ask = api.ask
        self.once = api.once
        self.error = api.error
        self._ask_all = api.ask_all
        self._reply = api.reply
        self._lock = threading.Lock()
        self._listed: WholeList[dict[str, Any]] = WholeList()
        self._listed_at = float("-inf")

    def instances(self, age: float = 0.0) -> WholeList[dict[str, Any]]:
        """Return all instances of the account as Vast.ai's records, from a list that is at most `age` seconds old.

        One thread requests the list; other threads wait for it. Do not change the result, because threads share it.

        Args:
            age: maximum age of the list in seconds. With 0, a new list is always requested, unless another thread
                requests one while this thread waits.
        """
        since = time.monotonic() - age
        with self._lock:
            if self._listed_at < since:
                began = time.monotonic()
                self._listed = self._all_instances()
                self._listed_at = began
            return self._listed

    def _all_instances(self) -> WholeList[dict[str, Any]]:
        """Request the list of the account's instances, one page after the other."""
        return self._ask_all(
            "/api/v1/instances/",
            "instances",
            what="to list the instances",
            params={"limit": _PAGE},
            next="next_token",
            token="after_token",
        )

    def date(self) -> str:
        """Send a request, and return the header "Date" of the answer."""
        _, headers = self._reply("GET", "/api/v0/users/current/", what="to show the account")
        return str(headers["Date"])

    def charges(self, since: datetime, until: datetime) -> dict[str, float]:
        """Return a dict from the id of each instance of the account to what it has cost in US dollars.

        Args:
            since: instances that had ended on an earlier day are left out.
            until: instances that began on a later day are left out.
        """
        first = since.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        last = until.astimezone(UTC).replace(hour=23, minute=59, second=59, microsecond=0)
        day = {"gte": int(first.timestamp()), "lte": int(last.timestamp())}
        filters = json.dumps({"day": day, "type": {"in": ["instance"]}})
        charges = self._ask_all(
            "/api/v0/charges/",
            "results",
            what="to show charges",
            params={"select_filters": filters, "limit": _CHARGES_PAGE},
            next="next_token",
            token="after_token",
        )
        found: dict[str, float] = {}
        for each in charges:
            kind, _, id = each["source"].partition("-")
            if kind == "instance":
                found[id] = found.get(id, 0.0) + float(each["amount"])
        return found

    def exists(self, id: str) -> bool:
        """Return True if an instance exists.

        https://docs.vast.ai/api-reference/instances/show-instance (read 2026-11-21)
        """
        ask = partial(self.ask, "GET", f"/api/v0/instances/{id}/", what=f"to show instance {id}")
        found = quietly(ask, "no_such_instance")
        return bool(found and found.get("instances"))

    def terminate(self, id: str) -> None:
        """Request the destruction of an instance, which ends its cost. Does not wait for the end.

        Does not raise for an instance that no longer exists.
        """
        self._change("DELETE", id, {})

    def relabel(self, id: str, label: str) -> None:
        """Give an instance another label. Does not raise for an instance that no longer exists."""
        self._change("PUT", id, {"label": label})

    def _change(self, method: str, id: str, body: Mapping[str, str]) -> None:
        what = f"to destroy instance {id}" if method == "DELETE" else f"to relabel instance {id}"
        ask = partial(self.ask, method, f"/api/v0/instances/{id}/", what=what, json=body)
        quietly(ask, "no_such_instance")


def account(key: str | None) -> Account:
    """Return the client of Vast.ai's API for an API key. Sends no request, so a wrong key is noticed later.

    The same key gives the same client. The environment variable $VAST_URL can name another address of the API.

    Args:
        key: the API key; None or "" for the key in $VAST_API_KEY, or else in the file that Vast.ai's own tools write.

    Raises:
        CredentialsError: no key was found.
    """
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    file = settings / "vastai" / "vast_api_key"
    key = key or os.environ.get("VAST_API_KEY")
    if not key and file.is_file():
        key = file.read_text()
    key = (key or "").strip()
    if not key:
        raise REFUSALS.error("a login", "no_key", f"neither $VAST_API_KEY nor {file} has an API key")
    return _account(os.environ.get("VAST_URL") or "https://console.vast.ai", key)


_account = lru_cache(maxsize=64)(Account)


def _refuses(body: Any) -> bool:
    """Return True if an answer with a successful status is a refusal: no JSON object, or with "success": false."""
    return not isinstance(body, Mapping) or body.get("success") is False


def said(status: int, body: Any) -> tuple[str, str]:
    """Return the pair (code, text) of a refusal.

    The code is the entry "error" of the body, which is Vast.ai's own code, if that is more exact than the HTTP status.
    Otherwise it is the entry "code" of the body, or else the HTTP status. A refused request for a new instance may
    still have created the instance. The text then ends with "(new_contract 123)", where 123 is the instance's id.

    Args:
        status: the HTTP status. If it means success, but the body is no JSON object, 502 is used instead.
        body: the body of the reply, parsed if it is JSON.
    """
    if not isinstance(body, Mapping):
        return rest.said(status if status >= 300 else 502, body)
    code, text = rest.said(status, body)
    text = str(body.get("msg") or text)
    error = str(body.get("error") or "")
    if error.isidentifier() and not _tells_enough(status, error):
        code = error
    if body.get("new_contract"):
        text += f" (new_contract {body['new_contract']})"
    return code, text


def _tells_enough(status: int, error: str) -> bool:
    """Return True if the HTTP status of a refusal says more exactly than Vast.ai's own code `error` what is wrong."""
    if status >= 500:
        return True
    return status in (401, 402, 403, 429) and "quota" not in error
