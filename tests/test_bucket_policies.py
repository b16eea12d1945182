"""Policies for one prefix of a bucket, judged by an evaluator of AWS's rules that does not know how they are made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from skypool.buckets.bucket import Bucket
from skypool.buckets.policies import LONGEST, policy
from tests.lab.iam_evaluator import Request, decide

KEY = "arn:aws:kms:eu-west-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
FORMER_KEY = KEY[:-1] + "c"
BY_S3 = {"kms:ViaService": "s3.eu-west-1.amazonaws.com"}
ALL = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
SESSION = "arn:aws:sts::123456789012:assumed-role/runs/skypool-1"


def inside(bucket: str, prefix: str) -> Iterator[Request]:
    """What saving, bringing back and checkpoints need."""
    place = f"arn:aws:s3:::{bucket}"
    for below in ("", ".skypool/unfinished/", "step-1/", "a b/ä/"):
        yield request("s3:ListBucket", place, {"s3:prefix": f"{prefix}/{below}", "s3:max-keys": "1000"})
    yield request("s3:ListBucket", place, {"s3:prefix": f"{prefix}/.skypool", "s3:delimiter": "/"})
    for name in ("file", "step-1/model.bin", ".skypool/attempts/000001", "a b/ä*?", f"{prefix}/{prefix}"):
        for action in ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload", "ListMultipartUploadParts"):
            yield request(f"s3:{action}", f"{place}/{prefix}/{name}")


def outside(bucket: str, prefix: str) -> Iterator[Request]:
    """What nobody must be able to do who has stolen the credentials of a machine."""
    place, parent = f"arn:aws:s3:::{bucket}", prefix.rpartition("/")[0]
    for below in (
        "",
        "/",
        prefix,
        f"{prefix}2/",
        f"{prefix[:-1]}/",
        f"{parent}/" if parent else "other/",
        f"x{prefix}/",
    ):
        yield request("s3:ListBucket", place, {"s3:prefix": below})
    yield request("s3:ListBucket", place)
    yield request("s3:ListBucket", f"{place}2", {"s3:prefix": f"{prefix}/"})
    for name in (f"{prefix}2/file", prefix, f"{prefix}-file", f"{parent}/file".lstrip("/"), f"x{prefix}/file", "file"):
        yield request("s3:GetObject", f"{place}/{name}")
        yield request("s3:PutObject", f"{place}/{name}")
        yield request("s3:DeleteObject", f"{place}/{name}")
    yield request("s3:GetObject", f"{place}2/{prefix}/file")
    yield request("s3:PutObject", f"arn:aws:s3:::x{bucket}/{prefix}/file")
    for action in (
        "DeleteBucket", "PutBucketPolicy", "GetBucketPolicy", "PutBucketAcl", "PutLifecycleConfiguration",
        "ListBucketVersions", "ListBucketMultipartUploads", "PutBucketVersioning", "PutEncryptionConfiguration",
    ):  # fmt: skip
        yield request(f"s3:{action}", place, {"s3:prefix": f"{prefix}/"})
    for action in (
        "PutObjectAcl", "GetObjectVersion", "DeleteObjectVersion", "PutObjectTagging", "BypassGovernanceRetention",
        "PutObjectRetention", "RestoreObject",
    ):  # fmt: skip
        yield request(f"s3:{action}", f"{place}/{prefix}/file")
    for action, resource in (
        ("s3:ListAllMyBuckets", "*"),
        ("s3:CreateBucket", "arn:aws:s3:::new"),
        ("iam:CreateUser", "arn:aws:iam::123456789012:user/eve"),
        ("sts:AssumeRole", "arn:aws:iam::123456789012:role/admin"),
        ("ec2:RunInstances", "*"),
    ):
        yield request(action, resource)
    yield request("kms:GenerateDataKey", KEY)
    yield request("kms:Decrypt", KEY)  # not in the name of S3
    yield request("kms:Decrypt", KEY, {"kms:ViaService": "s3.eu-west-2.amazonaws.com"})
    yield request("kms:Decrypt", KEY, {"kms:ViaService": "ec2.eu-west-1.amazonaws.com"})
    yield request("kms:Encrypt", KEY, BY_S3)
    yield request("kms:CreateGrant", KEY, BY_S3)
    yield request("kms:ScheduleKeyDeletion", KEY, BY_S3)
    yield request("kms:PutKeyPolicy", KEY, BY_S3)


def request(action: str, resource: str, context: Mapping[str, str] | None = None) -> Request:
    return Request(action, resource, context or {}, SESSION)


def verdict(asked: Request, text: str) -> str:
    """What AWS decides for a role with this policy, and for a session of any role with this policy of its own."""
    said = json.loads(text)
    of_role, of_session = decide(asked, identity=[said]), decide(asked, identity=[ALL], session=[said])
    assert of_role == of_session
    return of_role


PREFIXES = ["p", "runs/train-7", "a*b", "a${aws:username}b", "runs/$x/ä", "*"]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("region", ["", "eu-west-1"])
def test_what_saving_needs_is_allowed_and_all_else_is_not(prefix: str, region: str) -> None:
    text = policy(Bucket(f"s3://models/{prefix}", region=region))
    needed, others = [*inside("models", prefix)], [*outside("models", prefix)]
    by_s3 = [request(f"kms:{each}", key, BY_S3) for each in ("Decrypt", "GenerateDataKey") for key in (KEY, FORMER_KEY)]
    if region:
        needed += by_s3
    else:
        others += by_s3
    assert len(needed) >= 30
    assert len(others) >= 40
    assert [each for each in needed if verdict(each, text) != "allow"] == []
    assert [each for each in others if verdict(each, text) == "allow"] == []
    assert len(text) < LONGEST


@pytest.mark.parametrize("prefix", ["a*b", "*"])
def test_characters_of_a_prefix_mean_nothing_in_its_policy(prefix: str) -> None:
    text = policy(Bucket(f"s3://models/{prefix}"))
    for name in ("acb/file", "axxb/file", "c/file"):
        assert verdict(request("s3:GetObject", f"arn:aws:s3:::models/{name}"), text) != "allow"
        assert verdict(request("s3:ListBucket", "arn:aws:s3:::models", {"s3:prefix": name}), text) != "allow"


def test_a_bucket_without_a_prefix_is_allowed_as_a_whole_and_no_other() -> None:
    text = policy(Bucket("s3://models"))
    assert verdict(request("s3:PutObject", "arn:aws:s3:::models/any"), text) == "allow"
    assert verdict(request("s3:ListBucket", "arn:aws:s3:::models"), text) == "allow"
    assert verdict(request("s3:DeleteBucket", "arn:aws:s3:::models"), text) != "allow"
    assert verdict(request("s3:PutObject", "arn:aws:s3:::models2/any"), text) != "allow"


def test_other_parts_of_aws_have_names_of_their_own() -> None:
    said = json.loads(policy(Bucket("s3://models/p", region="cn-north-1"), "aws-cn"))
    listing, objects, keys = said["Statement"]
    assert listing["Resource"] == "arn:aws-cn:s3:::models"
    assert objects["Resource"] == "arn:aws-cn:s3:::models/p/*"
    assert keys["Condition"]["StringEquals"] == {"kms:ViaService": "s3.cn-north-1.amazonaws.com.cn"}
    other = policy(Bucket("s3://models/p", endpoint="https://minio.example.com", region="eu-west-1"))
    assert len(json.loads(other)["Statement"]) == 2, "a store that is not AWS has no such keys"
