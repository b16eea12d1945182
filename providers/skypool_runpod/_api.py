"""How RunPod is asked, and its errors as ours. The questions themselves are in questions.json.

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
_RENAMES = {"PATCH *": 1.0}  # seconds; REST v2 takes 60 calls a minute


def base() -> str:
    """Where its API is, as RunPod's own tools are told."""
    return (os.environ.get("RUNPOD_API_BASE_URL") or "https://api.runpod.io").rstrip("/")


def key(given: str | None) -> str:
    """The key that was given, $RUNPOD_API_KEY, or that of RunPod's own tools. Raises CredentialsError without one."""
    file = Path.home() / ".runpod" / "config.toml"
    if not (found := given or os.environ.get("RUNPOD_API_KEY")) and file.exists():
        known = tomllib.loads(file.read_text())
        found = known.get("default", {}).get("api_key") or known.get("apikey")
    if not (found := str(found or "").strip()):
        raise REFUSALS.error("anything", "401", "there is no API key")
    return found


class Api:
    """GraphQL for nearly all, REST v2 for the names of pods. Any thread may ask."""

    def __init__(self, key: str, base: str) -> None:
        headers = {"Authorization": f"Bearer {key}", "User-Agent": "skypool"}
        self._rest = rest.Rest(base, REFUSALS, lambda: headers, said=_said, apart=_RENAMES)

    def ask(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """The data that answer a question, by its name, asked for again with patience."""
        return patiently(partial(self.once, question, what, **variables), rest.PATIENCE)

    def once(self, question: str, what: str = "", /, **variables: Any) -> Any:
        """The same for a create. What is neither data nor a refusal is no answer, and so is a pod beside an error."""
        asked, what = {"query": _QUESTIONS[question], "variables": variables}, what or f"to tell {question}"
        answer = self._rest.once("POST", "/graphql", what=what, json=asked)
        answer = answer if isinstance(answer, Mapping) else {"error": str(answer)}
        errors, data = answer.get("errors"), answer.get("data")
        data = data if isinstance(data, Mapping) else {}
        if data and not errors:
            return data
        code, text = _said(200, answer)
        raise self._rest.error(what, code if errors and not data.get("pod") else "502", text)

    def rename(self, id: str, name: str) -> None:
        """The one thing of a pod that may change while it runs. Quiet for one that has ended."""
        ask = partial(self._rest.ask, "PATCH", f"/v2/pods/{id}", what=f"to rename {id}", json={"name": name})
        quietly(ask, "404")


api = lru_cache(maxsize=16)(Api)
"""One for each account, so that connections are kept."""


def _said(status: int, body: Any) -> tuple[str, str]:
    """The code and the text of a refusal: GraphQL's first error, else as REST has it."""
    first = (body.get("errors") or [None])[0] if isinstance(body, Mapping) else None
    if not isinstance(first, Mapping) or not first.get("message"):
        return rest.said(status, body)
    return str((first.get("extensions") or {}).get("code") or status), str(first["message"])
