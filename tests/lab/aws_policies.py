"""IAM policy documents, and what they say of a request.

It follows https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html and
reference_policies_elements_condition_operators.html beside it (read 2026-11-24). Identity-based policies only. What is
not known here (an operator for dates, say) is refused when the policy is made, and never passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["allowed", "no policy allows it", "denied"]
Context = Mapping[str, Sequence[str]]
"""The values of the condition keys of a request. Keys are in lower case, as AWS ignores their case."""


@dataclass(frozen=True)
class Ask:
    """One question that a request puts to the policies: may this action be done to this resource?

    Attributes:
        action: such as "ec2:RunInstances".
        resource: an ARN; "*" for an action that knows no resources.
    """

    action: str
    resource: str
    context: Context


def decide(policies: Iterable[Policy], ask: Ask) -> Verdict:
    """An explicit denial wins over all that allows."""
    effects = {each.effect for policy in policies for each in policy.statements if each.fits(ask)}
    return "denied" if "Deny" in effects else "allowed" if "Allow" in effects else "no policy allows it"


# --- documents -----------------------------------------------------------------------------------------------


class MalformedPolicyError(ValueError):
    """A document that is none, or that has what is not known here."""


class Policy:
    """A policy document.

    Raises:
        MalformedPolicyError: an element or an operator is unknown.
    """

    def __init__(self, text: str) -> None:
        document = json.loads(text)
        if document.get("Version") != "2012-10-17":
            raise MalformedPolicyError(f"Version {document.get('Version')!r} is not 2012-10-17")
        _only(document, "Version", "Id", "Statement")
        self.statements = [_statement(each) for each in _several(document["Statement"])]


@dataclass(frozen=True)
class Condition:
    """One operator with one key: the values wanted, any of which is enough (none of which may be, if negated)."""

    key: str
    wanted: tuple[str, ...]
    compare: Callable[[str, str], bool]
    negated: bool
    quantifier: str
    if_exists: bool

    def holds(self, context: Context) -> bool:
        """Whether a request with these values passes."""
        got = context.get(self.key)
        if self.quantifier == "ForAllValues":
            return all(self._one(value, context) for value in got or ())
        if got is None:
            return self.if_exists or (self.negated and not self.quantifier)
        if self.quantifier == "ForAnyValue":
            return any(self._one(value, context) for value in got)
        return len(got) == 1 and self._one(got[0], context)  # several values want a quantifier

    def _one(self, value: str, context: Context) -> bool:
        return self.negated != any(self.compare(_filled(each, context), value) for each in self.wanted)


@dataclass(frozen=True)
class Null:
    """The operator that asks whether a key is there at all."""

    key: str
    absent: bool

    def holds(self, context: Context) -> bool:
        return (not context.get(self.key)) == self.absent


@dataclass(frozen=True)
class Statement:
    """One statement. `not_actions` and `not_resources` turn the lists around."""

    effect: str
    actions: tuple[str, ...]
    not_actions: bool
    resources: tuple[str, ...]
    not_resources: bool
    conditions: tuple[Condition | Null, ...]

    def fits(self, ask: Ask) -> bool:
        """Whether the statement speaks of this."""
        if self.not_actions == any(_like(each.lower(), ask.action.lower()) for each in self.actions):
            return False
        if self.not_resources == any(arn_like(_filled(each, ask.context), ask.resource) for each in self.resources):
            return False
        return all(each.holds(ask.context) for each in self.conditions)


def _statement(raw: Mapping[str, Any]) -> Statement:
    _only(raw, "Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition")
    if raw.get("Effect") not in ("Allow", "Deny"):
        raise MalformedPolicyError(f"Effect is {raw.get('Effect')!r}")
    for one in ("Action", "Resource"):
        if (one in raw) == (f"Not{one}" in raw):
            raise MalformedPolicyError(f"a statement must have either {one} or Not{one}: {raw}")
    tests = [
        _condition(operator, key, values)
        for operator, keys in raw.get("Condition", {}).items()
        for key, values in keys.items()
    ]
    return Statement(
        effect=raw["Effect"],
        actions=tuple(_several(raw.get("Action", raw.get("NotAction")))),
        not_actions="NotAction" in raw,
        resources=tuple(_several(raw.get("Resource", raw.get("NotResource")))),
        not_resources="NotResource" in raw,
        conditions=tuple(tests),
    )


def _condition(operator: str, key: str, values: Any) -> Condition | Null:
    wanted = tuple(str(each).lower() if isinstance(each, bool) else str(each) for each in _several(values))
    if operator == "Null":
        return Null(key.lower(), wanted == ("true",))
    quantifier, _, name = operator.rpartition(":")
    if quantifier not in ("", "ForAllValues", "ForAnyValue"):
        raise MalformedPolicyError(f"{operator} is not known here")
    if_exists = name.endswith("IfExists")
    name = name.removesuffix("IfExists")
    negated = "Not" in name
    compare = _COMPARE.get(name.replace("Not", "", 1) if negated else name)
    if compare is None:
        raise MalformedPolicyError(f"the operator {operator} is not known here")
    return Condition(key.lower(), wanted, compare, negated, quantifier, if_exists)


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _only(raw: Mapping[str, Any], *known: str) -> None:
    if unknown := raw.keys() - set(known):
        raise MalformedPolicyError(f"unknown elements {sorted(unknown)}")


# --- comparing -----------------------------------------------------------------------------------------------


def _like(pattern: str, value: str) -> bool:
    """With "*" for anything and "?" for one character."""
    parts = (".*" if each == "*" else "." if each == "?" else re.escape(each) for each in pattern)
    return re.fullmatch("".join(parts), value, re.DOTALL) is not None


def arn_like(pattern: str, value: str) -> bool:
    """Compare ARNs part by part, as no wildcard reaches beyond its part. "*" alone is every resource."""
    if pattern == "*":
        return True
    wanted, got = pattern.split(":", 5), value.split(":", 5)
    return len(wanted) == len(got) and all(map(_like, wanted, got))


def _filled(text: str, context: Context) -> str:
    """With the variables of policies in it, such as ${aws:username}."""

    def value(found: re.Match[str]) -> str:
        got = context.get(found[1].lower(), ())
        return got[0] if len(got) == 1 else found[0]

    return re.sub(r"\$\{([^}]+)\}", value, text)


_COMPARE: Mapping[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda wanted, got: wanted == got,
    "StringEqualsIgnoreCase": lambda wanted, got: wanted.lower() == got.lower(),
    "StringLike": _like,
    "NumericEquals": lambda wanted, got: float(got) == float(wanted),
    "NumericLessThan": lambda wanted, got: float(got) < float(wanted),
    "NumericLessThanEquals": lambda wanted, got: float(got) <= float(wanted),
    "NumericGreaterThan": lambda wanted, got: float(got) > float(wanted),
    "NumericGreaterThanEquals": lambda wanted, got: float(got) >= float(wanted),
    "Bool": lambda wanted, got: wanted.lower() == got.lower(),
    "ArnEquals": arn_like,
    "ArnLike": arn_like,
}
