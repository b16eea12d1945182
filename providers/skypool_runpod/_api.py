"""Sends requests to RunPod, and translates its errors to skypool's. The GraphQL queries are in questions.json.

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
"""A dict from the kind of request that renames a pod to the minimum seconds between two such requests."""


def base() -> str:
    """Return the address of RunPod's API: $RUNPOD_API_BASE_URL, which RunPod's own tools use, or the public one.

    The address does not end with "/".
    """
    return (os.environ.get("RUNPOD_API_BASE_URL") or "https://api.runpod.io").rstrip("/")


def key(given: str | None) -> str:
    """Return the given API key, else $RUNPOD_API_KEY, else the key in ~/.runpod/config.toml.

    RunPod's own tools store a key in that file. Blanks around the key are removed.

    Raises:
        CredentialsError: no key was found, or only blanks. Whether RunPod accepts the key is not checked.
    """
    file = Path.home() / ".runpod" / "config.toml"
    found = given or os.environ.get("RUNPOD_API_KEY")
    if not found and file.exists():
        known = tomllib.loads(file.read_text())
        found = known.get("default", {}).get("api_key") or known.get("apikey")
    found = str(found or "").strip()
    if not found:
        raise REFUSALS.error("a login", "401", f"neither $RUNPOD_API_KEY nor {file} has an API key")
    return found


class Api:
    """A client of RunPod's APIs: GraphQL for nearly everything, and REST v2 for renaming pods. Any thread may use it.

    Creating a client sends nothing.

    Args:
        key: the API key.
        base: the address of the API.
    """

    def __init__(self, key: str, base: str) -> None:
        headers = {"Authorization": f"Bearer {key}", "User-Agent": "skypool"}
        self._rest = rest.Rest(base, REFUSALS, lambda: headers, said=_said, apart=_RENAMES)

    def ask(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """Send a GraphQL query, and return the data of the answer.

        The query is repeated for up to 20 s if there is no answer, or if RunPod receives too many requests. So use this
        method only for queries that may take effect twice.

        Args:
            question: name of the query in questions.json.
            what: what the request does, for error messages: "to end 123". "" means the name of the query.
            variables: variables of the query.

        Raises:
            ProviderError: RunPod refused.
            NoAnswer: there was no usable answer within 20 s.
            KeyError: questions.json has no query of this name.
        """
        return patiently(partial(self.once, question, what, **variables), rest.PATIENCE)

    def once(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """Send a GraphQL query once, and return the data of the answer.

        Use this method for queries that must not be repeated, such as the creation of a pod.

        Args:
            question: name of the query in questions.json.
            what: what the request does, for error messages: "to rent a pod". "" means the name of the query.
            variables: variables of the query.

        Raises:
            ProviderError: RunPod refused.
            NoAnswer: RunPod did not answer, or the answer is unclear: neither data nor a refusal, or both a pod and an
                error. The query may have taken effect.
            KeyError: questions.json has no query of this name.
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

        Waits so that there is at least a second between two renames. The request is repeated for up to 20 s if there is
        no answer.

        Raises:
            ProviderError: RunPod refused for another reason, or did not answer.
        """
        ask = partial(self._rest.ask, "PATCH", f"/v2/pods/{id}", what=f"to rename {id}", json={"name": name})
        quietly(ask, "404")


api = lru_cache(maxsize=16)(Api)
"""Return the client for an API key and an address of the API. The same arguments give the same client."""


def _said(status: int, body: Any) -> tuple[str, str]:
    """Return the code and the text of a refusal, from the first GraphQL error in the body of the answer.

    If the GraphQL error has no code, the HTTP status is the code. If the body has no GraphQL error, the body is read as
    an answer of the REST API.

    Args:
        status: HTTP status of the answer.
        body: the body of the answer, parsed if it is JSON.
    """
    errors = body.get("errors") if isinstance(body, Mapping) else None
    first = errors[0] if errors else None
    if not isinstance(first, Mapping) or not first.get("message"):
        return rest.said(status, body)
    code = (first.get("extensions") or {}).get("code") or status
    return str(code), str(first["message"])
