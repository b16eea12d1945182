"""How Compute Engine is asked: the questions of questions.json, and the operations that come of some."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from skypool.drivers import tags
from skypool.drivers.contract import lacks
from skypool.drivers.retry import patiently, quietly, soon
from skypool.drivers.settings import filled, table
from skypool.errors import NoAnswer
from skypool_gcp import _api

QUESTIONS: dict[str, dict[str, Any]] = table("skypool_gcp.compute", "questions.json")
_SECONDS = 60.0
_PASSING = "resourceNotReady", "resourceInUseByAnotherResource"
_making = threading.Lock()


def ask(settings: _api.Settings, question: str, what: str = "", **values: Any) -> Any:
    """The answer to one of the QUESTIONS; a list, all its pages, where it is one. None where it is quietly refused.

    Args:
        what: is asked for, in words for an error.
    """
    asked, project = QUESTIONS[question], settings.billed()
    given = filled(asked["give"], {"project": project, **values})
    with _making:
        client = _client(_api.endpoint("compute"), asked["of"], _api.credentials("compute"))

    def do() -> Any:
        told = getattr(client, asked["do"])(request=given, retry=None, timeout=_SECONDS)
        if asked["do"] == "list":
            return list(told)
        return _taken(asked, what or question, list(told)) if "take" in asked else told

    return quietly(partial(_api.asked, what or question, do, project=project), *asked.get("quiet", ()))


def _taken(asked: dict[str, Any], what: str, scopes: list[Any]) -> list[Any]:
    """What all zones and regions have. Raises NoAnswer: some did not tell; of wares the others' will do."""
    if silent := sorted(where for where, some in scopes if some.warning.code == "UNREACHABLE"):
        error = _api.REFUSALS.error(what, "Unreachable", f"no answer came from {', '.join(silent)}")
        if not asked.get("wares"):
            raise error
        lacks("offers", error)
    return [each for _, some in scopes for each in getattr(some, asked["take"])]


@lru_cache(maxsize=64)
def _client(endpoint: str | None, service: str, credentials: Any) -> Any:
    compute, options = _api.sdk("google.cloud.compute_v1"), _api.sdk("google.api_core.client_options").ClientOptions
    return getattr(compute, f"{service}Client")(credentials=credentials, client_options=options(api_endpoint=endpoint))


def look(settings: _api.Settings, question: str, **values: Any) -> Any:
    """The same of a question that changes nothing, with patience."""
    return patiently(partial(ask, settings, question, **values), 20.0)


def done(settings: _api.Settings, operation: Any, what: str, seconds: float) -> bool:
    """Whether an operation is through, after so many seconds at most.

    Raises:
        ProviderError: it has failed.
    """
    over = operation is None or soon(partial(_over, settings, operation, what), seconds)
    return bool(over)


def _over(settings: _api.Settings, operation: Any, what: str) -> bool:
    place = {kind: getattr(operation, kind).rpartition("/")[2] for kind in ("zone", "region")}
    question = next((f"{kind} operation" for kind, name in place.items() if name), "operation")
    told = look(settings, question, name=operation.name, **place)
    for each in told.error.errors:
        raise _api.REFUSALS.error(what, each.code, each.message, project=settings.billed())
    if told.http_error_status_code:
        raise _api.REFUSALS.error(what, str(told.http_error_status_code), told.http_error_message)
    return bool(told.status == told.Status.DONE)


def insist(settings: _api.Settings, seconds: float, question: str, what: str, **values: Any) -> None:
    """Ask for a change and wait until it is made; asked again as long as it is refused in passing.

    Raises:
        NoAnswer: it is not made within so many seconds.
    """

    def change() -> None:
        if not done(settings, ask(settings, question, what, **values), what, seconds):
            raise NoAnswer(f"Google Cloud has not made {what} within {seconds:g} s; try again", provider="gcp")

    patiently(change, seconds, *_PASSING)


def described(said: Mapping[str, str]) -> str:
    """What tags say, for the description of what has no labels."""
    return json.dumps(said, sort_keys=True)


def mine(settings: _api.Settings, question: str, pool: str | None) -> Iterator[tuple[Any, dict[str, str]]]:
    """What a question finds of this user's pools, or of that one, with its tags."""
    by_label = "labels" in QUESTIONS[question].get("by", "labels")
    label = f"labels.{tags.POOL}"
    exact = pool is not None and _api.labels({tags.POOL: pool}) == {tags.POOL: pool}
    narrow = f"{label}={pool}" if exact else f"{label}:*"
    for each in look(settings, question, filter=narrow if by_label else 'name eq "skypool-.*"'):
        said = _api.said(each.labels) if by_label else read(each.description)
        if tags.ours(said, pool):
            yield each, said


def read(description: str) -> dict[str, str]:
    """The tags of a description; none where somebody else wrote it."""
    try:
        told = json.loads(description)
    except ValueError:
        return {}
    return {key: text for key, text in told.items() if isinstance(text, str)} if isinstance(told, dict) else {}
