"""Evaluator of AWS IAM policies: what AWS decides on a request, by the order that its documentation gives.

    decide(Request("s3:GetObject", "arn:aws:s3:::b/x", {}), identity=[policy])  # "allow"

The pages are of https://docs.aws.amazon.com/IAM/latest/UserGuide/, read on 2026-11-30 in public copies. Of March 2026:
reference_policies_variables and reference_policies_elements_ resource and notprincipal. Undated, but after 2024:
reference_policies_evaluation-logic_policy-eval-denyallow and reference_policies_elements_condition_operators. Of June
2023: reference_policies_grammar, reference_policies_multi-value-conditions, access_policies_boundaries, and elements
action, notaction, notresource, principal, condition and version.

An explicit deny in any policy wins. Then an SCP must allow, if there are SCPs. Then a resource-based policy of the same
account counts by the principal that it names:

- The user or role session that asks, or "*": allowed, whatever identity, boundary and session policies leave out.
- The role of the session: like an identity policy that allows, so boundary and session policies must allow, too.
- The account: nothing is added, as the account's identity policies decide. A Deny applies to all its principals.

Then identity policies, boundary and session policies must all allow. sts:GetCallerIdentity needs no permission, and no
Deny prevents it (https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html).

What is not covered is refused with ValueError where it shows: other principals than users and role sessions, other
accounts, trust and key policies. `scp` is one level of an organization.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tests.lab import iam_conditions
from tests.lab.iam_conditions import Context, Test, require, values

Decision = Literal["allow", "explicit deny", "implicit deny"]
Reach = Literal["self", "role", "account", ""]
Policy = Mapping[str, Any]
_ELEMENTS = {"Sid", "Effect", "Condition"} | {
    f"{prefix}{name}" for prefix in ("", "Not") for name in ("Principal", "Action", "Resource")
}
_PRINCIPAL = re.compile(
    r"arn:aws[a-z-]*:(?:iam|sts)::(?P<account>\d{12}):(?:(?P<root>root)|(?:user|federated-user)/[\w+=,.@/-]+"
    r"|role/(?:[\w+=,.@-]+/)*(?P<role>[\w+=,.@-]+)|assumed-role/(?P<assumed>[\w+=,.@-]+)/[\w+=,.@-]+)"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. An API call that touches several resources is one request for each of them.

    Attributes:
        action: Such as "ec2:RunInstances".
        resource: An ARN; "*" for an action that has no resources.
        context: Values of condition keys; a list for a key with several values. The case of keys does not matter.
        principal: The ARN of the user or role session that asks.
    """

    action: str
    resource: str
    context: Context
    principal: str = "arn:aws:iam::123456789012:user/alice"

    def __post_init__(self) -> None:
        require(re.fullmatch(r"[\w-]+:\w+", self.action), f"{self.action!r} is not one action")
        require(re.fullmatch(r"\*|arn(:[^:]*){4}:.+", self.resource), f"{self.resource!r} is neither an ARN nor *")
        require(re.search(r":(user|assumed-role)/", self.principal), f"{self.principal!r} is no user or role session")
        accounts = {self.resource.split(":")[4] if ":" in self.resource else "", _parse(self.principal)["account"]}
        require(len([each for each in accounts if each.isdigit()]) == 1, f"{self} is a request to another account")
        require(len({key.lower() for key in self.context}) == len(self.context), "keys differ in their case only")


def _parse(principal: str) -> dict[str, Any]:
    match = _PRINCIPAL.fullmatch(f"arn:aws:iam::{principal}:root" if re.fullmatch(r"\d{12}", principal) else principal)
    if not match:
        raise ValueError(f"{principal!r} is not a principal that this evaluator knows")
    return match.groupdict()


def _fit(named: str, principal: str) -> Reach:
    """Return which part of a principal a policy names: all of it, its role or its account; "" for none."""
    if named in ("*", principal):
        return "self"
    other, own = _parse(named), _parse(principal)
    if other["account"] != own["account"]:
        return ""
    if other["root"]:
        return "account"
    return "role" if other["role"] and other["role"] == own["assumed"] else ""


def _reach(statement: Policy, principal: str, resource_based: bool, bounded: bool) -> Reach:
    """Return by which part of the principal that asks a statement applies to it; "" if it does not."""
    elements = [each for each in ("Principal", "NotPrincipal") if each in statement]
    require(len(elements) == resource_based, f"{statement}: resource-based policies name principals, others do not")
    if not elements:
        return "self"
    block = {"AWS": "*"} if statement[elements[0]] == "*" else statement[elements[0]]
    known = isinstance(block, Mapping) and block and block.keys() <= {"AWS", "Service"}
    require(known, f"{block}: this evaluator knows AWS and Service only")
    fits = {_fit(each, principal) for each in values(block["AWS"])} if "AWS" in block else set()
    if elements == ["Principal"]:
        reaches: tuple[Reach, ...] = ("self", "role", "account")
        found: list[Reach] = [each for each in reaches if each in fits]
        return found[0] if found else ""
    require(statement["Effect"] == "Deny", f"{statement}: NotPrincipal must be used with Deny")
    if bounded:  # such a statement denies every principal that has a permissions boundary
        return "self"
    parts = {"self", "account", "role"} if _parse(principal)["assumed"] else {"self", "account"}
    require(fits >= parts or not fits & {"self", "role"}, f"{block} must name all of {sorted(parts)} of {principal}")
    return "" if fits >= parts else "self"


def _covers(statement: Policy, element: str, make: Callable[[str], Test], value: str) -> bool:
    """Return True if Action or Resource, or its Not form, covers a value."""
    negated = f"Not{element}" in statement
    require(negated != (element in statement), f"{statement} needs one of {element} and Not{element}")
    covered = [make(each)(value) for each in values(statement[f"Not{element}" if negated else element])]
    return any(covered) != negated


def _applying(kind: str, policies: Sequence[Policy], request: Request, bounded: bool) -> set[tuple[str, Reach]]:
    """Return effect and reach of each statement that applies. All are evaluated, so a mistake in any one is found."""
    context = {key.lower(): value for key, value in request.context.items()}
    found: set[tuple[str, Reach]] = set()
    for policy in policies:
        version = policy.get("Version", "2008-10-17")
        require(version in ("2008-10-17", "2012-10-17"), f"{version!r} is not a version of the policy language")
        optional = {"Version", "Id"} if kind == "resource" else {"Version"}
        require(policy.keys() - optional == {"Statement"}, f"an unknown element is in {policy}, or it has no Statement")
        lookup = partial(iam_conditions.variable, context) if version == "2012-10-17" else None
        statements = policy["Statement"]
        for statement in statements if isinstance(statements, list) else [statements]:
            known = isinstance(statement, Mapping) and statement.keys() <= _ELEMENTS
            require(known, f"{statement} is not a statement, or has an unknown element")
            effect, conditions = str(statement.get("Effect")), statement.get("Condition", {})
            require(effect in ("Allow", "Deny"), f"{statement} neither allows nor denies")
            reach = _reach(statement, request.principal, kind == "resource", bounded)
            unclear = (effect, reach) == ("Allow", "account") and "aws:principalarn" in str(conditions).lower()
            require(not unclear, f"{statement}: it is not documented what an account with aws:PrincipalArn grants")
            applies = [
                _covers(statement, "Action", iam_conditions.action, request.action),
                _covers(statement, "Resource", partial(iam_conditions.resource, lookup=lookup), request.resource),
                iam_conditions.meets(context, conditions, lookup),
            ]
            if reach and all(applies):
                found.add((effect, reach))
    return found


def decide(
    request: Request,
    *,
    identity: Sequence[Policy],
    resource: Sequence[Policy] = (),
    session: Sequence[Policy] | None = None,
    boundary: Sequence[Policy] | None = None,
    scp: Sequence[Policy] | None = None,
) -> Decision:
    """Return what AWS decides on a request within one account.

    Args:
        request: What is asked, by whom.
        identity: Policies of the user and its groups, or of the role.
        resource: Policies of the resource that is asked for.
        session: Session policies; None if none were passed.
        boundary: The permissions boundary; None if there is none.
        scp: Service control policies of the account; None if it is in no organization.

    Raises:
        ValueError: A policy has something that this evaluator does not know, or the request is not covered.
    """
    own_rules = re.match(r"kms:|sts:assumerole", request.action, re.IGNORECASE)
    require(not (resource and own_rules), "trust policies of roles and policies of KMS keys are not covered")
    require(session is None or ":assumed-role/" in request.principal, f"{request.principal} is not a session")
    given = {"identity": identity, "resource": resource, "session": session, "boundary": boundary, "scp": scp}
    found = {kind: _applying(kind, policies or (), request, boundary is not None) for kind, policies in given.items()}

    def allows(kind: str) -> bool:
        return given[kind] is None or ("Allow", "self") in found[kind]

    if request.action.lower() == "sts:getcalleridentity":
        return "allow"
    if any(effect == "Deny" for applying in found.values() for effect, _ in applying):
        return "explicit deny"
    if not allows("scp"):
        return "implicit deny"
    if allows("resource"):
        return "allow"
    granted = allows("identity") or ("Allow", "role") in found["resource"]
    return "allow" if granted and allows("boundary") and allows("session") else "implicit deny"
