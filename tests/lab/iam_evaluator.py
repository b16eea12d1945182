"""Evaluator of AWS IAM policies: what AWS decides on a request, by the rules that its documentation gives.

    decide(Request("s3:GetObject", "arn:aws:s3:::b/x", {}), identity=[policy])  # "allow"

The rules are of https://docs.aws.amazon.com/IAM/latest/UserGuide/, read on 2026-11-30 in public copies of June 2023 to
March 2026: reference_policies_ grammar, variables, multi-value-conditions, evaluation-logic_policy-eval-denyallow and
elements_*, and access_policies_boundaries. What is not covered is refused with ValueError where it shows: principals
other than users and role sessions, other accounts, trust and key policies, BinaryEquals, and dates without a time.
Neither are resource control policies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from ipaddress import ip_address, ip_network
from operator import eq, ge, gt, le, lt
from typing import Any, Literal

Decision = Literal["allow", "explicit deny", "implicit deny"]
Policy = Mapping[str, Any]
Context = Mapping[str, str | list[str]]
_ASKING = r"arn:aws[a-z-]*:(iam|sts)::\d{12}:(user|assumed-role/[\w+=,.@-]+)/[\w+=,.@/-]+"
_PRINCIPAL = rf"\*|\d{{12}}|{_ASKING}|arn:aws[a-z-]*:(iam|sts)::\d{{12}}:(root|(role|federated-user)/[\w+=,.@/-]+)"
_FORMS = {  # what a policy's string must be; variables stand after the fifth colon of a Resource only
    "Action": (r"\*|[\w-]+:[\w*?]+", "an action such as ec2:Describe*"),
    "Resource": (r"\*|arn:[^:$]+:[^:*?$]+:[^:$]*(:[^:$]*(:.*)?)?", "an ARN that Resource may have"),
    "Arn": (r"arn:((\$\{[^{}]*\}|[^:$])*:){4}.*", "a pattern for the six parts of an ARN"),
}
_DATE = r"\d{5,}|\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)"  # seconds since 1970, or ISO 8601
_TYPES: dict[str, tuple[str, Callable[[str], Any]]] = {  # values that are compared: their form, and how they are read
    "Bool": ("true|false", str),
    "Numeric": (r"[+-]?\d+(\.\d+)?", Decimal),
    "Date": (_DATE, lambda at: datetime.fromisoformat(at) if "T" in at else datetime.fromtimestamp(int(at), UTC)),
}
_COMPARE = {"Equals": eq, "LessThan": lt, "LessThanEquals": le, "GreaterThan": gt, "GreaterThanEquals": ge}
_OPERATORS = {"StringEquals", "StringEqualsIgnoreCase", "StringLike", "ArnEquals", "ArnLike", "IpAddress", "Bool"}
_OPERATORS |= {f"{kind}{name}" for kind in ("Numeric", "Date") for name in _COMPARE}


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a user or role session. A call that touches several resources is one request for each of them."""

    action: str
    resource: str  # an ARN; "*" for an action that has no resources
    context: Context  # values of condition keys, whose case does not matter; a list for a key with several values
    principal: str = "arn:aws:iam::123456789012:user/alice"

    def __post_init__(self) -> None:
        _require(re.fullmatch(r"[\w-]+:\w+", self.action), f"{self.action!r} is not one action")
        _require(re.fullmatch(r"\*|arn(:[^:]*){4}:.+", self.resource), f"{self.resource!r} is neither an ARN nor *")
        _require(re.fullmatch(_ASKING, self.principal), f"{self.principal!r} is no user or role session")
        accounts = {arn.split(":")[4] for arn in (self.resource, self.principal) if arn != "*"}
        _require(len([each for each in accounts if each.isdigit()]) == 1, f"{self} is a request to another account")
        _require(len({key.lower() for key in self.context}) == len(self.context), "keys differ in their case only")


def _strings(value: object) -> list[str]:
    """Return a JSON string, number or boolean, or a list of these, as strings."""
    each = value if isinstance(value, list) else [value]
    _require(each and all(isinstance(one, str | int | float) for one in each), f"{value!r} is not a list of strings")
    return [one if isinstance(one, str) else json.dumps(one) for one in each]


def _pattern(kind: str, text: str, context: Context) -> Callable[[str], bool]:
    """Return the test that a policy's string stands for. With a variable that has no value it matches nothing.

    Wildcards match all characters; none in StringEquals. In the kind "Arn" they match no colons before the sixth part;
    in "Resource" no colons at all, except for a `*` that ends a part, which goes on across colons.
    """
    form, what = _FORMS.get(kind, (".*", ""))
    _require(re.fullmatch(form, text, re.DOTALL), f"{text!r} is not {what}")
    regex, colons = "", 0
    for token in re.finditer(r"\$\{(?P<name>[^,'{}]+)(, '(?P<default>[^']*)')?\}|\$\{|.", text, re.DOTALL):
        if token[0].startswith("${"):
            name = token["name"] or ""
            value = name if name in ("*", "?", "$") else context.get(name.lower())
            if not name or isinstance(value, list):
                raise ValueError(f"{text!r} has a ${{ that does not end, or is not a variable with one value")
            value = value or token["default"]
            regex += "(?!)" if value is None else re.escape(value)
        elif token[0] in ("*", "?") and not kind.startswith("StringEquals"):
            ends_part = token[0] == "*" and text[token.end() :][:1] in ("", ":")
            crosses = {"Arn": colons >= 5, "Resource": ends_part}.get(kind, True)
            regex += ("." if crosses else "[^:]") + token[0].replace("?", "")
        else:
            colons += token[0] == ":"
            regex += re.escape(token[0])
    flags = re.DOTALL | (re.IGNORECASE if kind in ("Action", "StringEqualsIgnoreCase") else 0)
    return lambda value: re.fullmatch(regex, value, flags) is not None


def _test(operator: str, text: str, context: Context) -> Callable[[str], bool]:
    """Return the test that a condition operator stands for with one of the policy's strings."""
    kind = next((kind for kind in ("Arn", "IpAddress", *_TYPES) if operator.startswith(kind)), operator)
    if kind == "IpAddress":
        _require("/" in text or ":" not in text, f"{text!r} needs a prefix: the documented default, /32, is for IPv4")
        network = ip_network(text)
        return lambda value: ip_address(value) in network
    if kind not in _TYPES:
        return _pattern(kind, text, context)
    compare = _COMPARE.get(operator.removeprefix(kind), eq)
    form, read = _TYPES[kind]

    def meaning(text: str) -> Any:
        _require(re.fullmatch(form, text), f"{text!r} does not have the form {form}")
        return read(text)

    bound = meaning(text)
    return lambda value: compare(meaning(value), bound)


def _holds(operator: str, found: str | list[str] | None, wanted: list[str], context: Context) -> bool:
    """Return True if a condition on one key holds. `found` is the context's value; None if the key is missing."""
    given = [found] if isinstance(found, str) else found or []
    if operator == "Null":
        return _holds("Bool", json.dumps(not any(given)), wanted, context)
    match = re.fullmatch(r"(ForAllValues:|ForAnyValue:)?(\w+?)(IfExists)?", operator)
    quantifier, name, if_exists = match.groups() if match else ("", operator, "")
    base = re.sub("(?<!Than)Not(?=Equals|Like|Ip)", "", name)
    _require(base in _OPERATORS, f"{operator!r} is not a condition operator that this evaluator knows")
    _require(quantifier or not isinstance(found, list), f"{operator} needs ForAllValues: or ForAnyValue: for {found}")
    tests = [_test(base, each, context) for each in wanted]
    if found is None and (if_exists or not quantifier):
        return bool(if_exists) or base != name
    given = given if any(given) or not quantifier else []  # a set with empty values only is as a missing key
    met = [any(test(value) for test in tests) != (base != name) for value in given]
    return any(met) if quantifier == "ForAnyValue:" else all(met)


def _listed(statement: Policy, element: str) -> tuple[bool, Any]:
    """Return True if a statement has the Not form of an element, and the value of the form that it has."""
    negated = f"Not{element}" in statement
    _require(negated != (element in statement), f"{statement} needs one of {element} and Not{element}")
    return negated, statement[f"Not{element}" if negated else element]


def _met(statement: Policy, request: Request, context: Context) -> Iterator[bool]:
    """Yield for action and resource if a statement covers them, and for each condition if it is met."""
    for element, value in (("Action", request.action), ("Resource", request.resource)):
        negated, listed = _listed(statement, element)
        tests = [_pattern(element, each, context) for each in _strings(listed)]
        yield any(test(value) for test in tests) != negated
    conditions = statement.get("Condition", {})
    known = isinstance(conditions, Mapping) and all(isinstance(keys, Mapping) for keys in conditions.values())
    _require(known, f"{conditions} are not conditions")
    for operator, keys in conditions.items():
        for key, wanted in keys.items():
            yield _holds(operator, context.get(key.lower()), _strings(wanted), context)


def _reach(statement: Policy, principal: str, bounded: bool) -> str:
    """Return which part of the principal that asks a statement is for: "self", "role" or "account"; "" if for none."""
    negated, block = _listed(statement, "Principal")
    block = {"AWS": "*"} if block == "*" else block
    known = isinstance(block, Mapping) and block and block.keys() <= {"AWS", "Service"}
    _require(known, f"{block}: this evaluator knows AWS and Service only")
    named = _strings(block["AWS"]) if "AWS" in block else []
    _require(all(re.fullmatch(_PRINCIPAL, each) for each in named), f"{named}: not principals this evaluator knows")
    account, kind, name = re.split("[:/]", principal)[4:7]
    itself = rf"\*|{re.escape(principal)}"  # of a user, who has no role, it stands for the role, too
    role = rf"arn:[^:]+:iam::{account}:role/(.+/)?{re.escape(name)}" if kind == "assumed-role" else itself
    parts = {"self": itself, "role": role, "account": rf"{account}|arn:[^:]+:iam::{account}:root"}
    fits = [part for part, form in parts.items() if any(re.fullmatch(form, each) for each in named)]
    if not negated:
        return next(iter(fits), "")
    _require(statement["Effect"] == "Deny", f"{statement}: NotPrincipal must be used with Deny")
    _require(bounded or fits in ([*parts], ["account"], []), f"{block} must name all of {principal}, role and account")
    return "self" if bounded or fits != [*parts] else ""  # every principal that has a permissions boundary is denied


def _effects(kind: str, policies: Sequence[Policy], request: Request, bounded: bool) -> Iterator[tuple[str, str]]:
    """Yield effect and reach of each statement that applies. All are evaluated, so a mistake in any one is found."""
    context = {key.lower(): value for key, value in request.context.items()}
    elements = {"Sid", "Effect", "Condition", "Action", "NotAction", "Resource", "NotResource"}
    elements |= {"Principal", "NotPrincipal"} if kind == "resource" else set()
    optional = {"Version", "Id"} if kind == "resource" else {"Version"}
    for policy in policies:
        version = policy.get("Version", "2008-10-17")
        known = version in ("2008-10-17", "2012-10-17") and policy.keys() - optional == {"Statement"}
        _require(known, f"{policy} has an unknown version or element, or no Statement")
        statements = policy["Statement"] if isinstance(policy["Statement"], list) else [policy["Statement"]]
        if version == "2008-10-17":  # it has no variables
            statements = json.loads(json.dumps(statements).replace("$", "${$}"))
        for statement in statements:
            known = isinstance(statement, Mapping) and statement.keys() <= elements
            _require(known, f"{statement} has an unknown element, or only resource-based policies name principals")
            _require(statement.get("Effect") in ("Allow", "Deny"), f"{statement} neither allows nor denies")
            reach = _reach(statement, request.principal, bounded) if kind == "resource" else "self"
            effect = (statement["Effect"], reach)
            unclear = effect == ("Allow", "account") and "aws:principalarn" in str(statement).lower()
            _require(not unclear, f"{statement}: it is not documented what an account with aws:PrincipalArn grants")
            if all([*_met(statement, request, context)]) and reach:
                yield effect


def decide(
    request: Request,
    *,
    identity: Sequence[Policy],
    resource: Sequence[Policy] = (),
    session: Sequence[Policy] | None = None,
    boundary: Sequence[Policy] | None = None,
    scp: Sequence[Policy] | None = None,
) -> Decision:
    """Return what AWS decides, by policies of the user (with its groups) or role, and of the resource.

    Policies of a session, a permissions boundary and one level of service control policies are None if there are none.
    """
    own_rules = re.match(r"kms:|sts:assumerole", request.action, re.IGNORECASE)
    _require(not (resource and own_rules), "trust policies of roles and policies of KMS keys are not covered")
    _require(session is None or ":assumed-role/" in request.principal, f"{request.principal} is not a session")
    given = {"identity": identity, "resource": resource, "session": session, "boundary": boundary, "scp": scp}
    found = {kind: {*_effects(kind, policies or (), request, boundary is not None)} for kind, policies in given.items()}
    allowing = {kind for kind, policies in given.items() if policies is None or ("Allow", "self") in found[kind]}
    if request.action.lower() == "sts:getcalleridentity":  # needs no permission, and no Deny prevents it
        return "allow"
    if any(effect == "Deny" for effects in found.values() for effect, _ in effects):
        return "explicit deny"
    # A policy of the resource that names who asks, or "*", is limited by SCPs only. One that names the role of the
    # session counts like an identity policy. One that names the account adds nothing.
    granted = "identity" in allowing or ("Allow", "role") in found["resource"]
    allowed = "scp" in allowing and ("resource" in allowing or (granted and {"boundary", "session"} <= allowing))
    return "allow" if allowed else "implicit deny"
