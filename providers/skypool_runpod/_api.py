"""Requests to RunPod, and its errors as ours. The GraphQL itself is in questions.json.

Errors of GraphQL come with HTTP 200, so what is asked again is decided by what they say.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from skypool.drivers import rest
from skypool.drivers.refusals import Refusals
from skypool.drivers.retry import patiently, quietly
from skypool.drivers.settings import table

REFUSALS = Refusals("skypool_runpod", "runpod", "RunPod")

_QUESTIONS = table("skypool_runpod", "questions.json")
"""GraphQL of each question, by its name."""

_RENAMES = {"PATCH *": 1.0}
"""Seconds between two renames: REST v2 takes 60 calls a minute."""


def base() -> str:
    """Return the address of the API, as RunPod's own tools are told it."""
    return (os.environ.get("RUNPOD_API_BASE_URL") or "https://api.runpod.io").rstrip("/")


def key(given: str | None) -> str:
    """Return the key that was given, $RUNPOD_API_KEY, or that of RunPod's own tools.

    Raises:
        CredentialsError: there is none.
    """
    file = Path.home() / ".runpod" / "config.toml"
    found = given or os.environ.get("RUNPOD_API_KEY")
    if not found and file.exists():
        known = tomllib.loads(file.read_text())
        found = known.get("default", {}).get("api_key") or known.get("apikey")
    found = str(found or "").strip()
    if not found:
        raise REFUSALS.error("anything", "401", "there is no API key")
    return found


class Api:
    """Client of RunPod's APIs: GraphQL for nearly all, REST v2 for the names of pods. Any thread may use it."""

    def __init__(self, key: str, base: str) -> None:
        headers = {"Authorization": f"Bearer {key}", "User-Agent": "skypool"}
        self._rest = rest.Rest(base, REFUSALS, lambda: headers, said=_said, apart=_RENAMES)

    def ask(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """Return the data that answer a question, by its name. It is repeated while there is no answer."""
        return patiently(partial(self.once, question, what, **variables), rest.PATIENCE)

    def once(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """Return the data that answer a question that must not be repeated by itself, such as a create.

        Raises:
            ProviderError: the refusal.
            NoAnswer: what came is neither data nor a refusal, or it is a pod beside an error.
        """
        what = what or f"to tell {question}"
        asked = {"query": _QUESTIONS[question], "variables": variables}
        answer = self._rest.once("POST", "/graphql", what=what, json=asked)
        if not isinstance(answer, Mapping):
            answer = {"error": str(answer)}
        errors = answer.get("errors")
        data = answer.get("data")
        if not isinstance(data, Mapping):
            data = {}
        if data and not errors:
            return data
        code, text = _said(200, answer)
        refused = errors and not data.get("pod")
        raise self._rest.error(what, code if refused else "502", text)

    def rename(self, id: str, name: str) -> None:
        """Give a pod another name, which is all that may change while it runs. Quiet for one that has ended."""
        ask = partial(self._rest.ask, "PATCH", f"/v2/pods/{id}", what=f"to rename {id}", json={"name": name})
        quietly(ask, "404")


api = lru_cache(maxsize=16)(Api)
"""One for each account, so that connections are kept."""


def _said(status: int, body: Any) -> tuple[str, str]:
    """Return the code and the text of a refusal: those of GraphQL's first error, else as REST has them."""
    errors = body.get("errors") if isinstance(body, Mapping) else None
    first = errors[0] if errors else None
    if not isinstance(first, Mapping) or not first.get("message"):
        return rest.said(status, body)
    code = (first.get("extensions") or {}).get("code") or status
    return str(code), str(first["message"])
