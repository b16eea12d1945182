"""The evaluator of IAM policies: examples of AWS's documentation with the outcomes that it gives, and moto's decisions.

The pages are named by the last part of their address below https://docs.aws.amazon.com/IAM/latest/UserGuide/; those
that are called operators, principal and the like begin with reference_policies_elements_. tests/lab/iam_evaluator.py
says when they were read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.iam_evaluator import Decision, Policy, Request, decide

ACCOUNT = "arn:aws:iam::123456789012"
USER, ROLE = f"{ACCOUNT}:user/alice", f"{ACCOUNT}:role/service/runner"
SESSION = "arn:aws:sts::123456789012:assumed-role/runner/i-0123456789abcdef0"
OBJECT = "arn:aws:s3:::bucket/key"
GET = Request("s3:GetObject", OBJECT, {})
BY_SESSION = Request("s3:GetObject", OBJECT, {}, SESSION)


def policy(*statements: dict[str, Any], version: str = "2012-10-17") -> Policy:
    return {"Version": version, "Statement": list(statements)}


def statement(effect: str = "Allow", **elements: Any) -> dict[str, Any]:
    covers = {"Resource": "*"} if "NotResource" not in elements else {}
    acts = {"Action": "*"} if "NotAction" not in elements else {}
    return {"Effect": effect, **acts, **covers, **elements}


def decided(request: Request, *statements: dict[str, Any], version: str = "2012-10-17") -> Decision:
    return decide(request, identity=[policy(*statements, version=version)])


ALL, NOTHING = policy(statement()), policy(statement(Action="iam:ListUsers"))
NO = policy(statement("Deny"))


def meets(conditions: dict[str, Any], context: dict[str, str | list[str]], version: str = "2012-10-17") -> bool:
    """Return True if a statement with these conditions applies."""
    outcome = decided(Request("ec2:RunInstances", "*", context), statement(Condition=conditions), version=version)
    return {"allow": True, "implicit deny": False}[outcome]


# ---- conditions

JOB = {"StringEquals": {"aws:PrincipalTag/job-category": "iamuser-admin"}}
TAGGED = {
    "StringEqualsIgnoreCase": {"aws:RequestTag/environment": ["preprod", "storage"]},
    "ForAnyValue:StringEquals": {"aws:TagKeys": "environment"},
}
HOME = {"StringLike": {"s3:prefix": ["", "home/", "home/${aws:username}/"]}}
SSL = {"Bool": {"aws:SecureTransport": "false"}}
RANGE = {"IpAddress": {"aws:SourceIp": ["203.0.113.0/24", "2001:DB8:1234:5678::/64"]}}
TOPIC = {"ArnEquals": {"aws:SourceArn": "arn:aws:sns:us-west-2:123456789012:TOPIC-ID"}}
TYPES = {"StringLikeIfExists": {"ec2:InstanceType": ["t1.*", "t2.*", "m3.*"]}}
SOURCES = {
    "ForAllValues:ArnLike": {
        "logs:LogGeneratingResourceArns": [
            "arn:aws:cloudfront::123456789012:distribution/*",
            "arn:aws:cloudfront::123456789012:distribution/support*",
        ]
    }
}
CLOUDFRONT = "arn:aws:cloudfront::{}:distribution/costcenter"
TOKEN = "aws:TokenIssueTime"
RECENT = {"NumericLessThanEquals": {"aws:MultiFactorAuthAge": "3600"}}
ATTRIBUTES = {"ForAllValues:StringEquals": {"dynamodb:Attributes": ["ID", "Message", "Tags"]}}
FORBIDDEN = {"ForAnyValue:StringEquals": {"dynamodb:Attributes": ["ID", "PostDateTime"]}}
PEOPLE = {
    "StringEqualsIgnoreCase": {
        "aws:PrincipalTag/department": ["finance", "hr", "legal"],
        "aws:PrincipalTag/role": ["audit", "security"],
    },
    "StringEquals": {"aws:PrincipalAccount": "123456789012"},
}
AUDITOR = {
    "aws:PrincipalTag/department": "HR",
    "aws:PrincipalTag/role": "audit",
    "aws:PrincipalAccount": "123456789012",
}


@pytest.mark.parametrize(
    ("conditions", "context", "match"),
    [
        # the tables of operators
        (JOB, {"aws:PrincipalTag/job-category": "iamuser-admin"}, True),
        (JOB, {"aws:PrincipalTag/job-category": "dev-ops"}, False),
        (JOB, {}, False),
        (HOME, {"s3:prefix": "home/martha_rivera/", "aws:username": "martha_rivera"}, True),
        (HOME, {"s3:prefix": "home/martha_rivera/", "aws:username": "nikki_wolf"}, False),
        (HOME, {"s3:prefix": "home/martha_rivera/"}, False),
        (HOME, {"s3:prefix": ""}, True),
        (TAGGED, {"aws:TagKeys": ["environment"], "aws:RequestTag/environment": "preprod"}, True),
        (TAGGED, {"aws:TagKeys": ["environment", "costcenter"], "aws:RequestTag/environment": "PreProd"}, True),
        (TAGGED, {"aws:TagKeys": ["Environment"], "aws:RequestTag/Environment": "preprod"}, False),
        (TAGGED, {"aws:TagKeys": ["costcenter"], "aws:RequestTag/environment": "preprod"}, False),
        (TAGGED, {"aws:RequestTag/environment": "storage"}, False),
        (TAGGED, {"aws:TagKeys": ["environment"]}, False),
        (TAGGED, {}, False),
        (SSL, {"aws:SecureTransport": "false"}, True),
        (SSL, {"aws:SecureTransport": "true"}, False),
        (SSL, {}, False),
        (RANGE, {"aws:SourceIp": "203.0.113.1"}, True),
        (RANGE, {"aws:SourceIp": "2001:db8:1234:5678::1"}, True),
        (RANGE, {"aws:SourceIp": "198.51.100.1"}, False),
        (TOPIC, {"aws:SourceArn": "arn:aws:sns:us-west-2:123456789012:TOPIC-ID"}, True),
        (TOPIC, {"aws:SourceArn": "arn:aws:sns:us-west-2:777788889999:TOPIC-ID"}, False),
        (TOPIC, {}, False),
        (SOURCES, {"logs:LogGeneratingResourceArns": [CLOUDFRONT.format("123456789012")]}, True),
        (SOURCES, {"logs:LogGeneratingResourceArns": [CLOUDFRONT.format("777788889999")]}, False),
        (SOURCES, {}, True),
        (TYPES, {"ec2:InstanceType": "t1.micro"}, True),
        (TYPES, {"ec2:InstanceType": "m2.micro"}, False),
        (TYPES, {}, True),
        ({"StringLike": TYPES["StringLikeIfExists"]}, {}, False),
        ({"Null": {TOKEN: "false"}}, {TOKEN: "2026-11-30T12:00:00Z"}, True),
        ({"Null": {TOKEN: "false"}}, {}, False),
        ({"Null": {TOKEN: "true"}}, {}, True),
        ({"Null": {TOKEN: "true"}}, {TOKEN: "2026-11-30T12:00:00Z"}, False),
        ({"Null": {"aws:TagKeys": False}}, {"aws:TagKeys": []}, False),
        # its examples without a table
        ({"NumericLessThanEquals": {"s3:max-keys": "10"}}, {"s3:max-keys": "10"}, True),
        ({"NumericLessThanEquals": {"s3:max-keys": 10}}, {"s3:max-keys": "11"}, False),
        ({"DateGreaterThan": {TOKEN: "2020-01-01T00:00:01Z"}}, {TOKEN: "2020-01-01T01:00:02+01:00"}, True),
        ({"DateGreaterThan": {TOKEN: "2020-01-01T00:00:01Z"}}, {TOKEN: "2020-01-01T00:00:01Z"}, False),
        ({"DateGreaterThan": {TOKEN: "2020-01-01T00:00:01Z"}}, {}, False),
        ({"DateEquals": {"aws:EpochTime": "1577836801"}}, {"aws:EpochTime": "2020-01-01T00:00:01Z"}, True),
        # condition: true, false, and a key that is not there; names of keys have no case, but values have
        (RECENT, {"aws:MultiFactorAuthAge": "3600"}, True),
        (RECENT, {"aws:MultiFactorAuthAge": "3600.5"}, False),
        (RECENT, {}, False),
        ({"StringEquals": {"aws:username": "johndoe"}}, {"AWS:UserName": "johndoe"}, True),
        ({"StringEquals": {"aws:username": "johndoe"}}, {"aws:username": "JohnDoe"}, False),
        ({"StringEqualsIgnoreCase": {"aws:username": "johndoe"}}, {"aws:username": "JohnDoe"}, True),
        # reference_policies_multi-value-conditions: AND between operators and keys, OR between values
        (PEOPLE, AUDITOR, True),
        (PEOPLE, {**AUDITOR, "aws:PrincipalTag/role": "cook"}, False),
        (PEOPLE, {**AUDITOR, "aws:PrincipalAccount": "777788889999"}, False),
        (ATTRIBUTES, {"dynamodb:Attributes": ["ID", "Message", "Tags"]}, True),
        (ATTRIBUTES, {"dynamodb:Attributes": ["ID", "UserName"]}, False),
        (ATTRIBUTES, {"dynamodb:Attributes": []}, True),
        (ATTRIBUTES, {"dynamodb:Attributes": ""}, True),
        (FORBIDDEN, {"dynamodb:Attributes": ["UserName", "Message", "PostDateTime"]}, True),
        (FORBIDDEN, {"dynamodb:Attributes": ["UserName"]}, False),
        (FORBIDDEN, {"dynamodb:Attributes": []}, False),
        (FORBIDDEN, {}, False),
    ],
)
def test_conditions_hold_as_documented(conditions: dict[str, Any], context: dict[str, Any], match: bool) -> None:
    assert meets(conditions, context) is match


ARN = "arn:aws:iam::123456789012:role/a"


@pytest.mark.parametrize(
    ("operator", "wanted", "value", "match"),
    [
        ("StringEquals", "a*", "a*", True),  # wildcards count in Like only
        ("StringEquals", "a*", "ab", False),
        ("StringLike", "a?c", "abc", True),
        ("StringLike", "a?c", "ac", False),
        ("StringLike", "a.c", "abc", False),
        ("StringLike", "a*", "A", False),
        ("ArnLike", "arn:aws:iam::*:role/?", ARN, True),
        ("ArnEquals", "arn:aws:iam::*:role/*", ARN, True),
        ("ArnLike", "arn:aws:iam::*:ROLE/*", ARN, False),
        ("NumericEquals", "1", "1.0", True),
        ("NumericLessThan", "10", "9", True),
        ("NumericLessThan", "10", "10", False),
        ("NumericGreaterThan", "10", "10.5", True),
        ("NumericGreaterThan", "10", "9", False),
        ("NumericGreaterThanEquals", "10", "10", True),
        ("NumericGreaterThanEquals", "10", "9", False),
        ("DateLessThan", "2026-01-01T00:00:00Z", "2025-12-31T23:59:59.9Z", True),
        ("DateLessThan", "2026-01-01T00:00:00Z", "2026-01-01T00:00Z", False),
        ("DateLessThanEquals", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", True),
        ("DateLessThanEquals", "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", False),
        ("DateGreaterThanEquals", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00Z", True),
        ("DateGreaterThanEquals", "2026-01-01T00:00:00Z", "2025-01-01T00:00:00Z", False),
        ("Bool", True, "true", True),
        ("IpAddress", "203.0.113.7", "203.0.113.7", True),
        ("IpAddress", "203.0.113.7", "203.0.113.8", False),
    ],
)
def test_operators_compare_as_documented(operator: str, wanted: Any, value: str, match: bool) -> None:
    assert meets({operator: {"key": wanted}}, {"key": value}) is match
    assert not meets({operator: {"key": wanted}}, {})
    assert meets({f"{operator}IfExists": {"key": wanted}}, {})


@pytest.mark.parametrize(
    ("operator", "opposite", "wanted", "other"),
    [
        ("StringEquals", "StringNotEquals", "a", "b"),
        ("StringEqualsIgnoreCase", "StringNotEqualsIgnoreCase", "a", "b"),
        ("StringLike", "StringNotLike", "a", "b"),
        ("NumericEquals", "NumericNotEquals", "1", "2"),
        ("DateEquals", "DateNotEquals", "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z"),
        ("ArnEquals", "ArnNotEquals", ARN, ARN + "b"),
        ("ArnLike", "ArnNotLike", ARN, ARN + "b"),
        ("IpAddress", "NotIpAddress", "203.0.113.0/24", "198.51.100.0"),
    ],
)
def test_a_negated_operator_is_true_for_a_missing_key_and_for_a_value_that_is_none_of_the_listed(
    operator: str, opposite: str, wanted: str, other: str
) -> None:
    value = wanted.removesuffix("/24")
    assert meets({operator: {"key": [wanted, wanted]}}, {"key": value})
    assert not meets({opposite: {"key": [wanted, other]}}, {"key": value})  # NOR: one match is enough
    assert not meets({opposite: {"key": [other, wanted]}}, {"key": value})
    assert meets({opposite: {"key": [wanted]}}, {"key": other})
    assert meets({opposite: {"key": wanted}}, {})
    assert not meets({operator: {"key": wanted}}, {})


@pytest.mark.parametrize(
    ("operator", "found", "match"),
    [
        ("ForAllValues:StringNotEquals", ["x", "y"], True),
        ("ForAllValues:StringNotEquals", ["x", "a"], False),
        ("ForAnyValue:StringNotEquals", ["x", "a"], True),
        ("ForAnyValue:StringNotEquals", ["b", "a"], False),
        ("ForAnyValue:StringEqualsIfExists", ["x"], False),
    ],
)
def test_set_operators_negate_as_documented(operator: str, found: list[str], match: bool) -> None:
    assert meets({operator: {"key": ["a", "b"]}}, {"key": found}) is match
    assert meets({operator: {"key": ["a", "b"]}}, {}) is (
        operator.startswith("ForAll") or operator.endswith("IfExists")
    )


def test_resources_outside_the_listed_units_are_denied() -> None:
    # operators, "Wildcard matching". The outcomes are those of its text: the table there prints the opposite of each.
    units = ["o-acorg/r-acroot/ou-acroot-mediaou/", "o-acorg/r-acroot/ou-acroot-sportsou/*"]
    deny = statement("Deny", Action="s3:*", Condition={"ForAllValues:StringNotLike": {"aws:ResourceOrgPaths": units}})

    def inside(*paths: str) -> Decision:
        context: dict[str, str | list[str]] = {"aws:ResourceOrgPaths": list(paths)} if paths else {}
        return decided(Request("s3:GetObject", OBJECT, context), statement(), deny)

    assert inside("o-acorg/r-acroot/ou-acroot-sportsou/costcenter/") == "allow"
    assert inside("o-acorg/r-acroot/ou-acroot-mediaou/costcenter/") == "explicit deny"
    assert inside() == "explicit deny"


def test_an_arn_operator_compares_the_parts_of_an_arn_and_a_string_operator_does_not() -> None:
    # operators, "Amazon Resource Name (ARN) condition operators" (edition of June 2023)
    wanted = "arn:aws:someservice:*:111122223333:finance/*"
    value = "arn:aws:someservice:us-east-2:999999999999:store/abc:111122223333:finance/document.txt"
    assert meets({"StringLike": {"key": wanted}}, {"key": value})
    assert not meets({"ArnLike": {"key": wanted}}, {"key": value})
    assert meets({"ArnLike": {"key": "arn:aws:someservice:*:*:store/*"}}, {"key": value})
    assert not meets({"ArnLike": {"key": "arn:aws:someservice:us-east-2:*:finance/*"}}, {"key": value})


# ---- actions and resources


@pytest.mark.parametrize(
    ("listed", "action", "covered"),
    [
        ("iam:ListAccessKeys", "IAM:listaccesskeys", True),  # action: prefix and name have no case
        ("iam:*AccessKey*", "iam:CreateAccessKey", True),
        ("iam:*AccessKey*", "iam:ChangePassword", False),
        ("s3:*", "s3:GetObject", True),
        ("s3:*", "ec2:GetObject", False),
        (["ec2:StartInstances", "ec2:StopInstances"], "ec2:StopInstances", True),
        ("ec2:StopInstance?", "ec2:StopInstances", True),
        ("ec2:StopInstances?", "ec2:StopInstances", False),
        ("*", "s3:GetObject", True),
    ],
)
def test_action_and_not_action_are_opposites(listed: Any, action: str, covered: bool) -> None:
    assert (decided(Request(action, "*", {}), statement(Action=listed)) == "allow") is covered
    assert (decided(Request(action, "*", {}), statement(NotAction=listed)) == "allow") is not covered


BUCKET = "arn:aws:s3:::amzn-s3-demo-bucket"


@pytest.mark.parametrize(
    ("listed", "resource", "covered"),
    [
        # resource: the objects that the page lists
        *[
            (f"{BUCKET}/*/test/*", f"{BUCKET}/{key}", True)
            for key in (
                "1/test/object.jpg",
                "1/2/test/object.jpg",
                "1/2/test/3/object.jpg",
                "1/2/3/test/4/object.jpg",
                "1///test///object.jpg",
                "1/test/.jpg",
                "/test/object.jpg",
                "1/test/",
            )
        ],
        *[
            (f"{BUCKET}/*/test/*", f"{BUCKET}/{key}", False)
            for key in ("1-test/object.jpg", "test/object.jpg", "1/2/test.jpg")
        ],
        (f"{ACCOUNT}:user/Bob", f"{ACCOUNT}:user/Bob", True),
        (f"{ACCOUNT}:user/Bob", f"{ACCOUNT}:user/bob", False),
        (f"{ACCOUNT}:user/accounting/*", f"{ACCOUNT}:user/accounting/Bob", True),
        (["arn:aws:ec2:*:*:volume/*", "arn:aws:ec2:*::image/*"], "arn:aws:ec2:us-east-1::image/ami-1", True),
        ("arn:aws:ec2:*:*:volume/vol-?", "arn:aws:ec2:us-east-1:123456789012:volume/vol-1", True),
        ("arn:aws:ec2:*:*:volume/vol-?", "arn:aws:ec2:us-east-1:123456789012:volume/vol-12", False),
        # "If the * wildcard is the last character of a resource ARN segment, it can expand" beyond colons
        ("arn:aws:ec2:*", "arn:aws:ec2:us-east-1:123456789012:volume/vol-1", True),
        ("arn:aws:ec2:us-*-1:123456789012:volume/a", "arn:aws:ec2:us-east-1:123456789012:volume/a", True),
        ("arn:aws:ec2:*:volume/vol-1", "arn:aws:ec2:us-east-1:123456789012:volume/vol-1", True),
        ("arn:aws:logs:us-east-1::a*b", "arn:aws:logs:us-east-1::a:b", False),
        ("arn:aws:logs:us-east-1::a?", "arn:aws:logs:us-east-1::a:", False),
        # notaction: an action that asks for "*" is not covered by the ARNs of a service
        ("arn:aws:s3:::*", "*", False),
        ("*", "*", True),
    ],
)
def test_resource_and_not_resource_are_opposites(listed: Any, resource: str, covered: bool) -> None:
    assert (decided(Request("s3:GetObject", resource, {}), statement(Resource=listed)) == "allow") is covered
    assert (decided(Request("s3:GetObject", resource, {}), statement(NotResource=listed)) == "allow") is not covered


@pytest.mark.parametrize(
    ("listed", "resource", "context", "covered"),
    [
        # reference_policies_variables
        ("mybucket/${aws:username}/*", "mybucket/David/x", {"aws:username": "David"}, True),
        ("mybucket/${aws:username}/*", "mybucket/Adele/x", {"aws:username": "David"}, False),
        ("mybucket/${AWS:UserName}/*", "mybucket/David/x", {"aws:username": "David"}, True),
        ("mybucket/${aws:username}/*", "mybucket//x", {}, False),
        ("bucket-${aws:PrincipalTag/team, 'company-wide'}", "bucket-yellow", {"aws:PrincipalTag/team": "yellow"}, True),
        ("bucket-${aws:PrincipalTag/team, 'company-wide'}", "bucket-company-wide", {}, True),
        (
            "bucket-${aws:PrincipalTag/team, 'company-wide'}",
            "bucket-company-wide",
            {"aws:PrincipalTag/team": "yellow"},
            False,
        ),
        ("a${*}b${?}c${$}{d}", "a*b?c${d}", {}, True),
        ("a${*}b", "axb", {}, False),
        ("a${?}b", "axb", {}, False),
        ("${s3:prefix}/x", "abc/x", {"s3:prefix": "a*"}, False),
    ],
)
def test_variables_stand_for_values_of_the_request(
    listed: str, resource: str, context: dict[str, Any], covered: bool
) -> None:
    request = Request("s3:GetObject", f"arn:aws:s3:::{resource}", context)
    assert (decided(request, statement(Resource=f"arn:aws:s3:::{listed}")) == "allow") is covered
    assert (decided(request, statement(NotResource=f"arn:aws:s3:::{listed}")) == "allow") is not covered


def test_a_variable_without_a_value_denies_where_the_operator_is_negated() -> None:
    # reference_policies_variables, "Policy variables with no value"
    wanted = {"StringNotEquals": {"s3:ExistingObjectTag/Team": "${aws:PrincipalTag/Team}"}}
    rules = [statement(), statement("Deny", Action="s3:GetObject", Condition=wanted)]

    def outcome(**team: str) -> Decision:
        tags: dict[str, str | list[str]] = {f"aws:PrincipalTag/{name}": value for name, value in team.items()}
        return decided(Request("s3:GetObject", OBJECT, {"s3:ExistingObjectTag/Team": "red", **tags}), *rules)

    assert outcome() == "explicit deny"
    assert outcome(Team="blue") == "explicit deny"
    assert outcome(Team="red") == "allow"
    assert not meets({"StringEquals": {"key": "${aws:PrincipalTag/Team}"}}, {"key": ""})


@pytest.mark.parametrize("version", ["2008-10-17", ""])
def test_variables_are_literal_strings_without_the_version_that_has_them(version: str) -> None:
    # version
    rule = statement(Condition={"StringEquals": {"key": "${aws:username}"}})
    older = {"Statement": rule} | ({"Version": version} if version else {})
    literal, alice = ({"key": key, "aws:username": "alice"} for key in ("${aws:username}", "alice"))
    assert decide(Request("s3:GetObject", "*", literal), identity=[older]) == "allow"
    assert decide(Request("s3:GetObject", "*", alice), identity=[older]) == "implicit deny"
    assert decide(Request("s3:GetObject", "*", alice), identity=[policy(rule)]) == "allow"


# ---- the order


def test_an_explicit_deny_wins_and_what_nothing_allows_is_denied() -> None:
    # reference_policies_evaluation-logic, "The difference between explicit and implicit denies"
    rules = [statement(Action=["iam:Get*", "iam:List*"]), statement("Deny", Action="iam:*Report")]
    assert decided(Request("iam:GetUser", "*", {}), *rules) == "allow"
    assert decided(Request("iam:CreatePolicy", "*", {}), *rules) == "implicit deny"
    assert decided(Request("iam:GetOrganizationsAccessReport", "*", {}), *rules) == "explicit deny"
    more = [policy(*rules), policy(statement(Action="iam:GenerateCredentialReport"))]
    assert decide(Request("iam:GenerateCredentialReport", "*", {}), identity=more) == "explicit deny"


def test_carlos_may_write_to_his_bucket_and_not_to_that_of_his_logs() -> None:
    # reference_policies_evaluation-logic_policy-eval-basics, "Example identity-based and resource-based policy ..."
    carlos = f"{ACCOUNT}:user/carlossalazar"
    own = ["arn:aws:s3:::carlossalazar/*", "arn:aws:s3:::carlossalazar"]
    identity = policy(
        statement(Action=["s3:GetBucketLocation", "s3:ListAllMyBuckets"], Resource="arn:aws:s3:::*"),
        statement(Action="s3:*", Resource=own),
        statement("Deny", Action="s3:*", Resource="arn:aws:s3:::*log*"),
    )
    bucket = {"Id": "carlos", **policy(statement(Principal={"AWS": carlos}, Action="s3:*", Resource=own))}

    def put(resource: str, policies: Sequence[Policy]) -> Decision:
        return decide(Request("s3:PutObject", resource, {}, carlos), identity=policies, resource=[bucket])

    assert put("arn:aws:s3:::carlossalazar-logs/x", [identity]) == "explicit deny"
    assert put("arn:aws:s3:::carlossalazar/x", [identity]) == "allow"
    assert put("arn:aws:s3:::carlossalazar/x", []) == "allow"  # one of the two is enough
    assert put("arn:aws:s3:::other/x", []) == "implicit deny"


def test_only_iam_works_without_a_second_factor() -> None:
    # notaction
    rules = [
        statement(),
        statement("Deny", NotAction="iam:*", Condition={"BoolIfExists": {"aws:MultiFactorAuthPresent": "false"}}),
    ]
    assert decided(Request("iam:ListUsers", "*", {}), *rules) == "allow"
    assert decided(Request("s3:GetObject", OBJECT, {}), *rules) == "explicit deny"
    assert decided(Request("s3:GetObject", OBJECT, {"aws:MultiFactorAuthPresent": "false"}), *rules) == "explicit deny"
    assert decided(Request("s3:GetObject", OBJECT, {"aws:MultiFactorAuthPresent": "true"}), *rules) == "allow"


def test_a_boundary_limits_and_grants_nothing() -> None:
    # access_policies_boundaries: Shirley
    boundary = [policy(statement(Action=["s3:*", "cloudwatch:*", "ec2:*"]))]
    create = policy(statement(Action="iam:CreateUser"))
    assert decide(Request("iam:CreateUser", "*", {}), identity=[create]) == "allow"
    assert decide(Request("iam:CreateUser", "*", {}), identity=[create], boundary=boundary) == "implicit deny"
    assert decide(GET, identity=[create], boundary=boundary) == "implicit deny"
    assert decide(GET, identity=[ALL], boundary=boundary) == "allow"


@pytest.mark.parametrize("kind", ["scp", "boundary", "session"])
def test_each_kind_of_policy_that_limits_must_allow(kind: str) -> None:
    assert decide(BY_SESSION, identity=[ALL], **{kind: [NOTHING, ALL]}) == "allow"
    assert decide(BY_SESSION, identity=[ALL], **{kind: [NOTHING]}) == "implicit deny"
    assert decide(BY_SESSION, identity=[ALL], **{kind: []}) == "implicit deny"
    assert decide(BY_SESSION, identity=[NOTHING], **{kind: [ALL]}) == "implicit deny"


@pytest.mark.parametrize("kind", ["identity", "resource", "session", "boundary", "scp"])
def test_an_explicit_deny_of_any_kind_wins(kind: str) -> None:
    named: dict[str, Any] = {"Principal": {"AWS": SESSION}}
    policies: dict[str, Any] = {each: [ALL] for each in ("identity", "session", "boundary", "scp")}
    policies["resource"] = [policy(statement(**named))]
    assert decide(BY_SESSION, **policies) == "allow"
    policies[kind] = [*policies[kind], policy(statement("Deny", **named)) if kind == "resource" else NO]
    assert decide(BY_SESSION, **policies) == "explicit deny"


@pytest.mark.parametrize(
    ("asking", "named", "alone", "within"),
    [
        # reference_policies_evaluation-logic_policy-eval-denyallow: what a resource's policy grants to a principal,
        # where identity policies, boundary and session policies allow nothing, and where the last two allow
        (SESSION, ROLE, "implicit deny", "allow"),
        (SESSION, SESSION, "allow", "allow"),
        (SESSION, "*", "allow", "allow"),
        (SESSION, f"{ACCOUNT}:root", "implicit deny", "implicit deny"),
        (SESSION, f"{ACCOUNT}:role/other", "implicit deny", "implicit deny"),
        (SESSION, SESSION + "b", "implicit deny", "implicit deny"),
        (SESSION, "arn:aws:iam::777788889999:role/runner", "implicit deny", "implicit deny"),
        (USER, USER, "allow", "allow"),
        (USER, "123456789012", "implicit deny", "implicit deny"),
        (USER, f"{ACCOUNT}:user/Alice", "implicit deny", "implicit deny"),
    ],
)
def test_a_policy_of_a_resource_grants_by_the_principal_that_it_names(
    asking: str, named: str, alone: Decision, within: Decision
) -> None:
    request = Request("s3:GetObject", OBJECT, {}, asking)
    bucket = [policy(statement(Principal={"AWS": [f"{ACCOUNT}:root", named]}))]
    sessions = {"session": [NOTHING]} if asking == SESSION else {}
    assert decide(request, identity=[NOTHING], resource=bucket, boundary=[NOTHING], **sessions) == alone
    allowed = {"session": [ALL]} if asking == SESSION else {}
    assert decide(request, identity=[NOTHING], resource=bucket, boundary=[ALL], **allowed) == within
    assert decide(request, identity=[NOTHING], resource=bucket, scp=[NOTHING]) == "implicit deny"


@pytest.mark.parametrize(
    ("asking", "named", "denied"),
    [
        (USER, "*", True),
        (USER, {"AWS": "123456789012"}, True),
        (USER, {"AWS": [f"{ACCOUNT}:user/bob", USER]}, True),
        (USER, {"AWS": f"{ACCOUNT}:user/bob"}, False),
        (USER, {"Service": "ec2.amazonaws.com"}, False),
        (SESSION, {"AWS": ROLE}, True),
        (SESSION, {"AWS": "777788889999"}, False),
    ],
)
def test_a_policy_of_a_resource_denies_those_whom_it_names(asking: str, named: Any, denied: bool) -> None:
    request = Request("s3:GetObject", OBJECT, {}, asking)
    outcome = decide(request, identity=[ALL], resource=[policy(statement("Deny", Principal=named))])
    assert outcome == ("explicit deny" if denied else "allow")


def test_not_principal_denies_all_but_those_that_it_names_with_their_role_and_account() -> None:
    # notprincipal
    def outcome(asking: str, *named: str, **others: Any) -> Decision:
        bucket = policy(statement("Deny", NotPrincipal={"AWS": list(named)}))
        return decide(Request("s3:GetObject", OBJECT, {}, asking), identity=[ALL], resource=[bucket], **others)

    root = f"{ACCOUNT}:root"
    assert outcome(USER, USER, root) == "allow"
    assert outcome(f"{ACCOUNT}:user/bob", USER, root) == "explicit deny"
    assert outcome(SESSION, SESSION, ROLE, root) == "allow"
    assert outcome(SESSION, USER, root) == "explicit deny"
    assert outcome(USER, USER, root, boundary=[ALL]) == "explicit deny"  # "will always deny" those with a boundary
    for asking, named in ((USER, [USER]), (SESSION, [SESSION, root]), (SESSION, [ROLE, root])):
        with pytest.raises(ValueError, match="must name all of"):  # the page says that AWS "might" deny these
            outcome(asking, *named)


def test_anybody_may_ask_who_he_is() -> None:
    # https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html
    assert decide(Request("sts:GetCallerIdentity", "*", {}), identity=[NO]) == "allow"
    assert decide(Request("sts:GetSessionToken", "*", {}), identity=[NO]) == "explicit deny"


# ---- what is refused


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"Effect": "allow"}, "neither allows nor denies"),
        ({"Effects": "Allow"}, "unknown element"),
        ({"Principal": "*"}, "resource-based policies name principals"),
        ({"NotAction": "s3:*"}, "needs one of Action and NotAction"),
        ({"NotResource": "*"}, "needs one of Resource and NotResource"),
        ({"Action": "GetObject"}, "not an action"),
        ({"Action": "s*:GetObject"}, "not an action"),
        ({"Action": []}, "not a list of strings"),
        ({"Action": {"s3": "*"}}, "not a list of strings"),
        ({"Resource": "bucket/*"}, "not an ARN"),
        ({"Resource": "arn:aws:*:::bucket"}, "not an ARN"),
        ({"Resource": "arn:aws:sns:us-east-1:${aws:PrincipalAccount}:a"}, "not an ARN"),
        ({"Resource": "arn:aws:s3:::${aws:username"}, "does not end"),
        ({"Resource": "arn:aws:s3:::${aws:username,David}"}, "not a variable with one value"),
        ({"Resource": "arn:aws:s3:::${aws:TagKeys}"}, "not a variable with one value"),
        ({"Condition": "x"}, "not conditions"),
        ({"Condition": {"StringMatches": {"key": "a"}}}, "not a condition operator"),
        ({"Condition": {"stringequals": {"key": "a"}}}, "not a condition operator"),
        ({"Condition": {"BinaryEquals": {"key": "YQ=="}}}, "not a condition operator"),
        ({"Condition": {"NumericLessThanNotEquals": {"key": "1"}}}, "not a condition operator"),
        ({"Condition": {"NotBool": {"key": "true"}}}, "not a condition operator"),
        ({"Condition": {"NumericNotLessThan": {"key": "1"}}}, "not a condition operator"),
        ({"Condition": {"NullIfExists": {"key": "true"}}}, "not a condition operator"),
        ({"Condition": {"ForAnyValue:Null": {"key": "true"}}}, "not a condition operator"),
        ({"Condition": {"ForSomeValues:StringEquals": {"key": "a"}}}, "not a condition operator"),
        ({"Condition": {"StringEquals": {"aws:TagKeys": "a"}}}, "cannot test|needs ForAllValues"),
        ({"Condition": {"Null": {"key": "yes"}}}, "does not have the form"),
        ({"Condition": {"Bool": {"key": "${aws:username}"}}}, "does not have the form"),
        ({"Condition": {"NumericEquals": {"key": "1e3"}}}, "does not have the form"),
        ({"Condition": {"DateEquals": {"key": "2026-01-01"}}}, "does not have the form"),
        ({"Condition": {"IpAddress": {"key": "203.0.113.7/24"}}}, "has host bits set"),
        ({"Condition": {"IpAddress": {"key": "2001:db8::1"}}}, "needs a prefix"),
        ({"Condition": {"ArnLike": {"key": "*"}}}, "six parts of an ARN"),
    ],
)
def test_what_the_evaluator_does_not_know_is_refused_even_where_the_statement_does_not_apply(
    wrong: dict[str, Any], says: str
) -> None:
    request = Request("iam:ListUsers", "*", {"aws:TagKeys": ["a", "b"], "aws:username": "alice"})
    for other in ({}, {"Action": "s3:GetObject"}, {"Condition": {"StringEquals": {"key": "a"}}}):
        with pytest.raises(ValueError, match=says):
            decided(request, {**statement(), **other, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"Version": "2026-01-01", "Statement": []},
        {"Version": "2012-10-17"},
        {"Version": "2012-10-17", "Id": "x", "Statement": []},
        {"Statement": ["x"]},
    ],
)
def test_a_document_that_is_no_policy_is_refused(wrong: Policy) -> None:
    with pytest.raises(ValueError, match=r"version|element"):
        decide(GET, identity=[wrong])


@pytest.mark.parametrize(
    "elements",
    [
        {},
        {"Principal": USER},
        {"Principal": {}},
        {"Principal": {"AWS": f"{ACCOUNT}:user/*"}},
        {"Principal": {"AWS": "AIDAEXAMPLE"}},
        {"Principal": {"Federated": "accounts.google.com"}},
        {"Principal": {"AWS": "*"}, "NotPrincipal": {"AWS": "*"}},
        {"NotPrincipal": {"AWS": USER}},
        {"Principal": {"AWS": "123456789012"}, "Condition": {"ArnLike": {"aws:PrincipalArn": ROLE}}},
    ],
)
def test_principals_that_the_evaluator_does_not_know_are_refused(elements: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"principal|this evaluator knows|NotPrincipal|documented"):
        decide(GET, identity=[ALL], resource=[policy(statement(**elements))])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"action": "s3:Get*"}, "not one action"),
        ({"resource": "bucket"}, "neither an ARN"),
        ({"resource": "arn:aws:sqs:us-east-1:777788889999:queue"}, "another account"),
        ({"principal": f"{ACCOUNT}:root"}, "no user or role session"),
        ({"principal": ROLE}, "no user or role session"),
        ({"principal": "arn:aws:sts::123456789012:federated-user/alice"}, "no user or role session"),
        ({"context": {"aws:username": "a", "AWS:username": "b"}}, "differ in their case"),
    ],
)
def test_requests_that_are_not_covered_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Request(**{"action": "s3:GetObject", "resource": OBJECT, "context": {}, **fields})


def test_policies_of_roles_and_keys_and_sessions_of_users_are_refused() -> None:
    anybody = [policy(statement(Principal="*"))]
    for action, arn in (("sts:AssumeRole", ROLE), ("kms:Decrypt", "arn:aws:kms:us-east-1:123456789012:key/1")):
        assert decide(Request(action, arn, {}), identity=[ALL]) == "allow"
        with pytest.raises(ValueError, match="not covered"):
            decide(Request(action, arn, {}), identity=[ALL], resource=anybody)
    with pytest.raises(ValueError, match="not a session"):
        decide(GET, identity=[ALL], session=[ALL])


# ---- a second opinion

ACTIONS = ["s3:GetObject", "s3:PutObject", "s3:GetBucketAcl", "ec2:RunInstances", "ec2:GetObject"]
RESOURCES = ["arn:aws:s3:::bucket/key", "arn:aws:s3:::bucket/other/key", "arn:aws:s3:::pail", "*"]


@st.composite
def patterns(draw: st.DrawFn, texts: list[str]) -> str:
    """Draw "*", or one of some texts, in which an asterisk may replace a part of what follows the last colon."""
    text = draw(st.sampled_from([*texts, "*"]))
    start = text.rfind(":") + 1
    if text == "*" or draw(st.booleans()):
        return text
    first, last = sorted(draw(st.tuples(*[st.integers(start, len(text))] * 2)))
    return f"{text[:first]}*{text[last:]}"


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    statements = []
    for effect in draw(st.lists(st.sampled_from(["Allow", "Allow", "Deny"]), min_size=1, max_size=3)):
        acts = draw(st.sampled_from(["Action", "NotAction"]))
        listed = draw(st.lists(patterns(ACTIONS), min_size=1, max_size=2))
        where = draw(st.lists(patterns(RESOURCES), min_size=1, max_size=2))
        statements.append({"Effect": effect, acts: listed, "Resource": where})
    return policy(*statements)


REQUESTS = [Request(action, resource, {}, SESSION) for action in ACTIONS for resource in RESOURCES]


@settings(max_examples=25)
@given(st.lists(policies(), max_size=3))
def test_moto_decides_alike(identity: list[Policy]) -> None:
    from moto.iam.access_control import IAMPolicy, PermissionResult  # it loads S3 and STS

    readers = [IAMPolicy(json.dumps(each)) for each in identity]
    for request in REQUESTS:
        found = {reader.is_action_permitted(request.action, request.resource) for reader in readers}
        expected = "allow" if PermissionResult.PERMITTED in found else "implicit deny"
        expected = "explicit deny" if PermissionResult.DENIED in found else expected
        assert decide(request, identity=identity) == expected


@settings(max_examples=10)
@given(st.lists(policies(), max_size=3), policies())
def test_a_limit_never_allows_more_and_the_order_of_policies_does_not_matter(
    identity: list[Policy], limit: Policy
) -> None:
    for request in REQUESTS:
        before = decide(request, identity=identity)
        assert decide(request, identity=identity[::-1]) == before
        after = {decide(request, identity=identity, **{kind: [limit]}) for kind in ("session", "boundary", "scp")}
        assert len(after) == 1
        assert after == {before} or (before != "explicit deny" and "allow" not in after)
