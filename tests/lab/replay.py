"""Recorded reads in the place of a lab's own, so that a lab answers as the real cloud did.

with AWS(recording="recorded") as aws:  # a folder that `skypool prove --record` or `skypool.drivers.recording` wrote

A read is a request that changes nothing. Reads are answered from the recording, and are found by operation and
parameters. Dates, accounts, projects and users do not count, as a recording has placeholders for them. If the same
request was recorded several times, the replies come in their order, and the last one again and again.

Everything else goes to the lab itself: creates, changes, ends, and tokens. After the first such request that succeeds,
reads of things (instances, disks, keys, …) go to the lab, too, because the recording does not know what was made. A
read of a thing that is not recorded goes there as well, and a dry run. A read of what is sold that is not recorded is
refused by name: an answer of the lab's own catalogue would not fit the recorded one.

A create must name what the lab has. So the lab always answers for its networks itself, and it refuses a create that
names an image of the recording which it lacks.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from skypool.drivers import recording
from skypool.drivers.recording import Exchange

_MASKS = (
    re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:\d\d)?"),  # a date
    re.compile(r"(?<=projects/)[^/\"]+"),
    re.compile(r"(?<![\w.+-])[\w.+-]+@(?:\*|[\w.-]+)"),  # a user, or an owner's tag; looks at long tokens only once
    re.compile(r"(?<!\w)\d{12}(?!\w)"),  # an account
)
_LEFT_OUT = frozenset(("$alt", "alt", "key", "prettyPrint", "requestId", "ClientToken", "Version", "Action"))
"""Parameters that do not tell what is asked."""
_PASSING = (429, 500, 502, 503, 504)
"""Statuses of HTTP with which a request is refused that succeeds when it is repeated."""
_PASSING_OF_GRPC = (8, 14)


class NotRecorded(Exception):
    """A read that the recording has no answer to."""


class Replay:
    """The reads of a recording.

    Args:
        directory: the folder of the recording.
        things: patterns of operations that read what was made, such as "GET /v1/instances*".
        own: operations that the lab always answers itself, because creates name what they return.

    Attributes:
        changed: whether the lab has made or changed something since it began.
    """

    def __init__(self, directory: Path | str, things: Iterable[str], own: Iterable[str] = ()) -> None:
        self._directory, self._things, self._own, self.changed = directory, tuple(things), frozenset(own), False
        self._told: defaultdict[Hashable, deque[Exchange]] = defaultdict(deque)
        self._operations: set[str] = set()
        told = [each for each in recording.read(directory).exchanges if not each.confidential and each.status >= 0]
        for each in told:
            request = Asked.of(each)
            if request.reads:
                self._operations.add(request.operation)
                self._told[request.key].append(each)
        for answers in self._told.values():
            final = [each for each in answers if not _passes(each)]
            if final:
                answers.clear()
                answers.extend(final)

    def answer(self, asked: Asked) -> Exchange | None:
        """The recorded answer to a request, or None if the lab itself is to answer.

        Raises:
            NotRecorded: the recording has no answer, and an answer of the lab would not fit.
        """
        if not asked.reads or asked.operation in self._own:
            return None
        thing = asked.dry or any(fnmatchcase(asked.operation, each) for each in self._things)
        if thing and self.changed and not asked.dry:
            return None
        answers = self._told.get(asked.key)
        if answers:
            return answers.popleft() if len(answers) > 1 else answers[0]
        if thing:
            return None
        same = asked.operation in self._operations
        why = "with other parameters only" if same else f"but only {', '.join(sorted(self._operations)) or 'nothing'}"
        raise NotRecorded(f"the recording in {self._directory} does not have {asked}: it was recorded {why}")

    def did(self, asked: Asked, status: int) -> None:
        """Note what the lab has answered."""
        self.changed = self.changed or (asked.changes and status < 300)


class Asked:
    """A request, of a recording or of a client of the lab.

    Args:
        operation: the operation, as it is told apart.
        where: the region, or "".
        query: parameters; body: JSON, the pairs of a form, or text.
    """

    def __init__(
        self, operation: str, query: Iterable[tuple[str, Any]] = (), body: Any = None, where: str = ""
    ) -> None:
        self.operation, self.where = _masked(operation), where
        self.parameters = sorted((_name(name), _masked(str(text))) for name, text in query if name not in _LEFT_OUT)
        self.body = body

    @property
    def key(self) -> Hashable:
        """The same for requests that ask the same."""
        return self.operation, self.where, tuple(self.parameters), _canonical(self.body)

    @property
    def reads(self) -> bool:
        """Whether nothing changes by it."""
        verb, _, path = self.operation.partition(" ")
        if not path:
            return self.dry or verb.startswith(("Describe", "Get", "List", "Search"))
        graphql = isinstance(self.body, Mapping) and str(self.body.get("query", "")).lstrip().startswith("query")
        return verb in ("GET", "HEAD") or graphql or path.startswith("/api/v0/bundles")

    @property
    def dry(self) -> bool:
        """Whether it only asks if a request would be allowed."""
        return ("DryRun", "true") in self.parameters

    @property
    def changes(self) -> bool:
        """Whether something may change by it. A token changes nothing."""
        return not self.reads and "oauth2" not in self.operation

    def __str__(self) -> str:
        told = "&".join(f"{name}={text}" for name, text in self.parameters)
        body = "" if self.body is None else f" {json.dumps(self.body, default=str)[:300]}"
        return f"{self.operation}{f' in {self.where}' if self.where else ''}{f' with {told}' if told else ''}{body}"

    @classmethod
    def of(cls, each: Exchange) -> Asked:
        """A recorded request."""
        if each.method == "gRPC":
            from tests.lab.tpu_grpc import as_rest  # only Google is asked so

            method, path, query, body = as_rest(each.url, json.loads(each.request or "{}"))
            return cls(f"{method} {path}", query.items(), body)
        path, _, asked = each.url.partition("?")
        if each.region:
            return cls.by_form(each.operation, each.region, str(each.request))
        return cls(f"{each.method} {path}", parse_qsl(asked, keep_blank_values=True), _read(str(each.request)))

    @classmethod
    def by_form(cls, operation: str, region: str, body: str) -> Asked:
        """A request of a protocol in which the body tells the operation, as JSON or as a form."""
        if body.startswith("{"):
            return cls(operation, (), json.loads(body), region)
        return cls(operation, parse_qsl(body, keep_blank_values=True), None, region)


def _passes(each: Exchange) -> bool:
    return each.status in (_PASSING_OF_GRPC if each.method == "gRPC" else _PASSING)


def _read(body: str) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body


def _name(name: str) -> str:
    """A parameter's name without the numbers of lists, whose order does not count."""
    return re.sub(r"\.\d+", "", name)


def _masked(text: str) -> str:
    for mask in _MASKS:
        text = mask.sub("*", text)
    return text


def _canonical(value: Any) -> str:
    """JSON in which the order of lists and of names does not count, nor what a recording has placeholders for."""
    match value:
        case Mapping():
            pairs = sorted(f"{json.dumps(name)}:{_canonical(inner)}" for name, inner in value.items())
            return "{" + ",".join(pairs) + "}"
        case list():
            return "[" + ",".join(sorted(map(_canonical, value))) + "]"
        case str():
            return json.dumps(_masked(value))
        case _:
            return json.dumps(value)
