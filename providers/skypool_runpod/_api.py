"""Sends requests to RunPod, and translates its errors. The GraphQL queries are in questions.json.

GraphQL reports errors with HTTP status 200, so the error's text decides whether a request is repeated.
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
"""GraphQL queries and mutations by name."""

_RENAMES = {"PATCH *": 1.0}
"""Seconds between two renames. REST v2 allows 60 calls a minute."""


def base() -> str:
    """Return the address of the API: $RUNPOD_API_BASE_URL, which RunPod's own tools use, or the public one."""
    return (os.environ.get("RUNPOD_API_BASE_URL") or "https://api.runpod.io").rstrip("/")


def key(given: str | None) -> str:
    """Return the given API key, else $RUNPOD_API_KEY, else the key that RunPod's own tools have stored.

    Raises:
        CredentialsError: there is no key.
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
    """Client of RunPod's APIs: GraphQL for nearly everything, REST v2 for names of pods. Any thread may use it."""

    def __init__(self, key: str, base: str) -> None:
        headers = {"Authorization": f"Bearer {key}", "User-Agent": "skypool"}
        self._rest = rest.Rest(base, REFUSALS, lambda: headers, said=_said, apart=_RENAMES)

    def ask(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """Return the data that answer a GraphQL query. The query is repeated if there is no answer.

        Args:
            question: name of the query in questions.json.
            what: what the request does, for error messages: "to end 123".
            variables: variables of the query.
        """
        return patiently(partial(self.once, question, what, **variables), rest.PATIENCE)

    def once(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """Return the data that answer a GraphQL query. The query is sent once, as a create must be.

        Args:
            question: name of the query in questions.json.
            what: what the request does, for error messages.
            variables: variables of the query.

        Raises:
            ProviderError: RunPod refused.
            NoAnswer: the reply is neither data nor a refusal, or it has a pod and an error.
        """
        what = what or f"to answer the query {question}"
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
        """Give a pod another name. Does not raise for a pod that no longer exists.

        The name is all that can change while a pod runs.
        """
        ask = partial(self._rest.ask, "PATCH", f"/v2/pods/{id}", what=f"to rename {id}", json={"name": name})
        quietly(ask, "404")


api = lru_cache(maxsize=16)(Api)
"""Return the client of an account. It is cached, so that connections are reused."""


def _said(status: int, body: Any) -> tuple[str, str]:
    """Return the code and the text of a refusal: of the first GraphQL error, or else of the REST answer."""
    errors = body.get("errors") if isinstance(body, Mapping) else None
    first = errors[0] if errors else None
    if not isinstance(first, Mapping) or not first.get("message"):
        return rest.said(status, body)
    code = (first.get("extensions") or {}).get("code") or status
    return str(code), str(first["message"])
