"""How Vast.ai is asked: whose key, at what pace, its refusals as our errors.

API: https://docs.vast.ai/api-reference and the vastai package 1.9.1 (read 2026-11-21).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from skypool.drivers import rest
from skypool.drivers.refusals import Refusals
from skypool.drivers.retry import quietly
from skypool.drivers.settings import table

REFUSALS = Refusals("skypool_vastai", "vastai", "Vast.ai")
PACE: dict[str, float] = table("skypool_vastai", "facts.json")["pace"]
"""Seconds between two calls of a kind, as Vast.ai itself names them where calls come faster."""
_PAGE = 25


class Account:
    """What is asked with one key. Who wants the list of instances at the same time gets the same one."""

    def __init__(self, base: str, key: str) -> None:
        self.base, head = base.rstrip("/"), {"Authorization": f"Bearer {key}"}
        asked = rest.Rest(base, REFUSALS, lambda: head, said=said, refuses=_refuses, apart=PACE)
        self.ask, self.once, self.error = asked.ask, asked.once, asked.error
        self.destroy = partial(self.quietly, "DELETE", body={})
        self._lock, self._began, self._listed = threading.Lock(), float("-inf"), list[dict[str, Any]]()

    def instances(self, age: float = 0.0) -> list[dict[str, Any]]:
        """Every instance, as it was at most `age` seconds before this call."""
        since = time.monotonic() - age
        with self._lock:
            if self._began < since:
                began, found, asked = time.monotonic(), list[dict[str, Any]](), {"limit": _PAGE}
                while asked:
                    page = self.ask("GET", "/api/v1/instances/", what="to list the instances", params=asked)
                    found += page["instances"]
                    asked = {**asked, "after_token": page["next_token"]} if page.get("next_token") else {}
                self._began, self._listed = began, found
            return self._listed

    def quietly(self, method: str, id: str, body: Mapping[str, str]) -> None:
        """Something done to an instance, if it is still there."""
        ask = partial(self.ask, method, f"/api/v0/instances/{id}/", what=f"{method} of {id}", json=body)
        quietly(ask, "no_such_instance")


def account(key: str | None) -> Account:
    """The account of this key, or else of the one that Vast.ai's own tools would take.

    Raises:
        CredentialsError: there is no key.
    """
    file = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "vastai" / "vast_api_key"
    key = (key or os.environ.get("VAST_API_KEY") or (file.read_text() if file.is_file() else "")).strip()
    if not key:
        raise REFUSALS.error("to say who you are", "no_key", f"neither $VAST_API_KEY nor {file} has an API key")
    return _account(os.environ.get("VAST_URL") or "https://console.vast.ai", key)


_account = lru_cache(maxsize=64)(Account)


def _refuses(body: Any) -> bool:
    return not isinstance(body, Mapping) or body.get("success") is False


def said(status: int, body: Any) -> tuple[str, str]:
    """The code and the text of a refusal; what it made all the same is told as "(new_contract 123)"."""
    code, text = rest.said(status if isinstance(body, Mapping) or status >= 300 else 502, body)
    if isinstance(body, Mapping):
        error, text = str(body.get("error") or ""), str(body.get("msg") or text)
        plain = status >= 500 or (status in (401, 402, 403, 429) and "quota" not in error)
        code = error if error.isidentifier() and not plain else code
        text += f" (new_contract {body['new_contract']})" if body.get("new_contract") else ""
    return code, text
