"""Who may do what in the lab's Cloud Storage: roles, conditions, and Credential Access Boundaries.

What it has of Google's, with the pages (read 2026-11-30 in stored copies):

- The permissions that requests of the XML API need: https://cloud.google.com/storage/docs/access-control/iam-xml. Who
  replaces an object needs storage.objects.delete, too.
- Which of these a role has: https://cloud.google.com/storage/docs/access-control/iam-roles.
- A boundary is an upper bound on the permissions of whom the token is of, and its rules are a union:
  https://cloud.google.com/iam/docs/downscoping-short-lived-credentials. It has ten rules at most.
- Conditions: `resource.name` is the bucket when objects are listed, and the object otherwise;
  `storage.googleapis.com/objectListPrefix` is the prefix of a list, and otherwise the default in the expression.
  Only calls of `startsWith` of both, joined by `||`, are known here: anything else is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_WRITES = {
    "storage.objects.create", "storage.multipartUploads.create", "storage.multipartUploads.abort",
    "storage.multipartUploads.listParts",
}  # fmt: skip
_READS = {"storage.objects.get", "storage.objects.list"}
ROLES = {
    "roles/storage.objectViewer": _READS,
    "roles/storage.objectCreator": _WRITES,
    "roles/storage.objectUser": {
        *_READS, *_WRITES, "storage.objects.delete", "storage.objects.update", "storage.multipartUploads.list",
    },
}  # fmt: skip
_MOST_RULES = 10
_CALL = re.compile(
    r"""(?P<of>resource\.name|api\.getAttribute\(\s*(?P<name>'[^']*'|"[^"]*")\s*,\s*(?P<or>'[^']*'|"[^"]*")\s*\))
    \.startsWith\(\s*(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*\)""",
    re.VERBOSE,
)
_LIST_PREFIX = "storage.googleapis.com/objectListPrefix"


class Request(NamedTuple):
    """A request as conditions see it: the bucket, the object or "", the prefix of a list or None, and what it needs."""

    bucket: str
    name: str
    prefix: str | None
    permissions: frozenset[str]

    @property
    def resource(self) -> str:
        return f"projects/_/buckets/{self.bucket}" + (f"/objects/{self.name}" if self.name else "")


@dataclass(frozen=True)
class Rule:
    """Permissions on one bucket, where a condition holds. Raises ValueError for a condition that is not known here."""

    bucket: str
    permissions: frozenset[str]
    condition: str = ""

    def __post_init__(self) -> None:
        list(_calls(self.condition))

    def allows(self, request: Request, permission: str) -> bool:
        if request.bucket != self.bucket or permission not in self.permissions:
            return False
        return not self.condition or any(
            (request.resource if name is None else _attribute(request, name, default)).startswith(text)
            for name, default, text in _calls(self.condition)
        )


def allowed(rules: Iterable[Rule], request: Request) -> bool:
    """True if the rules together allow all that a request needs."""
    several = list(rules)
    return all(any(rule.allows(request, each) for rule in several) for each in request.permissions)


def _attribute(request: Request, name: str, default: str) -> str:
    return request.prefix if name == _LIST_PREFIX and request.prefix is not None else default


def _calls(expression: str) -> Iterable[tuple[str | None, str, str]]:
    """Yield the attribute (None for the name of the resource), its default and the text of each `startsWith`."""
    at = 0
    while at < len(expression):
        found = _CALL.match(expression, at)
        if found is None:
            raise ValueError(f"unknown condition: {expression[at:]}")
        name = found["name"]
        yield (None if name is None else name[1:-1]), (found["or"] or "''")[1:-1], _literal(found["text"])
        at = found.end()
        if at < len(expression):
            joined = re.compile(r"\s*\|\|\s*").match(expression, at)
            if joined is None or joined.end() == len(expression):
                raise ValueError(f"unknown condition: {expression[at:]}")
            at = joined.end()


def _literal(text: str) -> str:
    """Return the value of a string literal of CEL, whose escapes are those of JSON and of quotes."""
    inner = re.sub(r"\\'", "'", text[1:-1])
    return str(json.loads('"' + (re.sub(r'(?<!\\)"', r"\"", inner) if text[0] == "'" else inner) + '"'))


def rules_of(boundary: Mapping[str, Any]) -> list[Rule]:
    """Return the rules of a Credential Access Boundary. Raises ValueError or KeyError if it is none."""
    several: Sequence[Mapping[str, Any]] = boundary["accessBoundary"]["accessBoundaryRules"]
    if not 0 < len(several) <= _MOST_RULES:
        raise ValueError(f"{len(several)} rules")
    found = []
    for each in several:
        place = re.fullmatch(r"//storage\.googleapis\.com/projects/_/buckets/([^/]+)", each["availableResource"])
        if place is None:
            raise ValueError("no bucket")
        roles = [re.fullmatch("inRole:(.+)", one) for one in each["availablePermissions"]]
        permissions = frozenset(one for role in roles if role is not None for one in ROLES[role[1]])
        found.append(Rule(place[1], permissions, each.get("availabilityCondition", {}).get("expression", "")))
    return found


def bindings_of(policy: Mapping[str, Any], bucket: str, member: str) -> list[Rule]:
    """Return what the policy of a bucket allows a member."""
    return [
        Rule(bucket, frozenset(ROLES.get(each["role"], ())), each.get("condition", {}).get("expression", ""))
        for each in policy.get("bindings", ())
        if member in each["members"]
    ]
