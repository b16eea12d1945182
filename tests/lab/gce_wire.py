"""How Compute Engine speaks: errors in its format, filters and pages of lists, and requests checked by its schema.

The schema is tests/lab/compute_v1.json, a part of Google's discovery document; see tests/lab/discovery.py. Words of
errors are Google's where a public thread has them, as the comments say (all read 2026-11-24 in stored copies).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.cloud import Answer, Refused, Request
from tests.lab.discovery import Document, Wrong
from tests.lab.gce_things import refused
from tests.lab.world import Pages

SCHEMA = Path(__file__).parent / "compute_v1.json"
PREFIX = "/compute/v1/"
_TOKEN = re.compile(r'\s*(\(|\)|AND\b|OR\b|NOT\b|"[^"]*"|!=|[=:]|[^\s()=:!"]+)')
_MOST = 500
"""The most items of a page: https://docs.cloud.google.com/compute/docs/reference/rest/v1/instances/list."""


def invalid(field: str, value: object, why: str) -> Refused:
    """The commonest refusal: a field of the resource has a value that it may not have."""
    return refused(400, "invalid", f"Invalid value for field 'resource.{field}': '{value}'. {why}")


def absent(path: str) -> Refused:
    """What a path of the API names does not exist."""
    return refused(404, "notFound", f"The resource '{path}' was not found")


class Wire:
    """The schema of one project's API.

    Attributes:
        document: see `Document`; it counts what was checked.
    """

    def __init__(self) -> None:
        self.document = Document(SCHEMA)

    def check(self, request: Request) -> None:
        """Refuse a request that is no method of the API, or that does not fit the method's schema.

        Raises:
            Refused: in Google's words.
        """
        if not request.path.startswith(PREFIX):
            return
        if self.document.method(request.method, request.path) is None:
            raise refused(404, "notFound", "Method not found.")
        for each in self.document.wrong_request(request.method, request.path, request.query, request.body):
            raise _said(each, is_parameter=each.place in request.query or each.place in request.by)
        request.body = _without_null(request.body)

    def known(self, request: Request) -> bool:
        """Whether the request is a method of the API."""
        return self.document.method(request.method, request.path) is not None

    def wrong_answer(self, request: Request, answer: Answer) -> list[str]:
        """What an answer of the lab has that Google's do not have."""
        if answer.status == 200:
            return [str(each) for each in self.document.wrong_reply(request.method, request.path, answer.body)]
        told = answer.body["error"] if isinstance(answer.body, dict) else {}
        (first,) = told.get("errors", [{}])
        right = (told.get("code"), {*first}) == (answer.status, {"message", "domain", "reason"})
        return [] if right else [f"the error {answer.body} is not in Google's format"]


def _without_null(value: Any) -> Any:
    """A value without fields that are null, which Google takes for nothing."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _said(wrong: Wrong, is_parameter: bool) -> Refused:
    """What Google says about a part of a request that does not fit the schema."""
    field = wrong.place if is_parameter else f"resource.{wrong.place}".rstrip(".")
    match wrong.kind:
        case "missing":  # github.com/googleapis/google-api-python-client/issues/608
            return refused(400, "required", f"Required field '{field}' not specified")
        case "unknown":  # as all of Google's APIs say it: GoogleCloudPlatform/deploymentmanager-samples/issues/674
            inside, _, name = field.rpartition(".")
            where = f" at '{inside}'" if inside else ""
            text = f'Invalid JSON payload received. Unknown name "{name}"{where}: Cannot find field.'
            return refused(400, "badRequest", text)
        case "pattern":  # github.com/rapid7/insightconnect-plugins/pull/751
            why = f"Must be a match of regex '{wrong.wanted}'"
            return refused(400, "invalid", f"Invalid value for field '{field}': '{wrong.value}'. {why}")
        case _:  # the words after the value are made up
            return refused(400, "invalid", f"Invalid value for field '{field}': '{wrong.value}'. It is {wrong.wanted}.")


def page(
    request: Request, items: Sequence[Mapping[str, Any]], pages: Pages
) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """Those of the items that the filter fits and that are on the page; and the token of the next page, if any."""
    if pages.cut:
        return [], {"nextPageToken": "0"}
    found = [each for each in items if fits(request.query.get("filter", ""), each)]
    start, most = int(request.query.get("pageToken") or 0), int(request.query.get("maxResults") or _MOST)
    if not 1 <= most <= _MOST:
        text = f"Invalid value for field 'maxResults': '{most}'. Must be less than or equal to {_MOST}"
        raise refused(400, "invalid", text)
    most = min(most, pages.size or most)
    rest = {"nextPageToken": str(start + most)} if len(found) > start + most else {}
    return found[start : start + most], rest


# --- filters -------------------------------------------------------------------------------------------------


def fits(text: str, item: Mapping[str, Any]) -> bool:
    """Whether an item passes a filter such as `(labels.a = b) AND (status = RUNNING)`, or `name eq "a.*"`.

    Raises:
        Refused: the filter is none.
    """
    if not text:
        return True
    tokens = [found[1] for found in _TOKEN.finditer(text)]
    if "".join(tokens) != "".join(text.split()) and '"' not in text:
        raise _bad_filter(text)
    try:
        result, left = _any(tokens, item)
    except (IndexError, re.error) as e:
        raise _bad_filter(text) from e
    if left:
        raise _bad_filter(text)
    return result


def _bad_filter(text: str) -> Refused:
    return refused(400, "invalid", f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.")


def _any(tokens: list[str], item: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether an item passes the terms up to a closing bracket; terms without a word between them are joined by AND."""
    result, tokens = _one(tokens, item)
    while tokens and tokens[0] != ")":
        word = tokens[0] if tokens[0] in ("AND", "OR") else ""
        more, tokens = _one(tokens[1:] if word else tokens, item)
        result = (result or more) if word == "OR" else (result and more)
    return result, tokens


def _one(tokens: list[str], item: Mapping[str, Any]) -> tuple[bool, list[str]]:
    if tokens[0] == "NOT":
        result, left = _one(tokens[1:], item)
        return not result, left
    if tokens[0] == "(":
        result, left = _any(tokens[1:], item)
        if left[0] != ")":
            raise IndexError
        return result, left[1:]
    field, how, wanted = tokens[0], tokens[1], tokens[2].strip('"')
    values = list(_values(field.split("."), item))
    match how:
        case "=" | "eq":  # "eq" takes a regular expression of RE2
            right = any(re.fullmatch(wanted, each) if how == "eq" else each == wanted for each in values)
        case "!=" | "ne":
            right = not any(re.fullmatch(wanted, each) if how == "ne" else each == wanted for each in values)
        case ":":
            right = any(wanted in ("*", each) or wanted in each for each in values)
        case _:
            raise IndexError
    return right, tokens[3:]


def _values(path: Sequence[str], value: Any) -> Iterator[str]:
    """All values at a path, as texts; lists are gone through."""
    if isinstance(value, list):
        for each in value:
            yield from _values(path, each)
    elif not path:
        yield str(value).lower() if isinstance(value, bool) else str(value)
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _values(path[1:], value[path[0]])
