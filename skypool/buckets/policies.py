"""IAM policies that allow what saving needs below one prefix of a bucket, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from skypool.buckets.bucket import Bucket

OBJECTS = (
    "s3:AbortMultipartUpload",
    "s3:DeleteObject",
    "s3:GetObject",
    "s3:ListMultipartUploadParts",
    "s3:PutObject",
)
"""What may be done to objects below the prefix."""
KEYS = ("kms:Decrypt", "kms:GenerateDataKey")
"""What may be done with the key by which the bucket is encrypted."""
LONGEST = 2048
"""The most characters of a session policy (https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html,
read 2026-11-30)."""
_ESCAPES = str.maketrans({"*": "${*}", "?": "${?}", "$": "${$}"})
"""The characters that mean something in a policy, as they are written to mean themselves."""


def policy(bucket: Bucket, partition: str = "aws", key: str = "", key_region: str = "") -> str:
    """Return the policy for the prefix of a bucket, as JSON without spaces.

    Args:
        partition: the part of AWS that the bucket is in, as in ARNs: "aws", "aws-cn" or "aws-us-gov".
        key: the ARN of the KMS key by which the bucket is encrypted, or the ARN of its alias; "" for none.
        key_region: the region of the key.
    """
    place = f"arn:{partition}:s3:::{bucket.name}"
    below = f"{bucket.prefix.translate(_ESCAPES)}/*" if bucket.prefix else "*"
    listing: dict[str, Any] = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": place}
    if bucket.prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": below}}
    statements = [listing, {"Effect": "Allow", "Action": [*OBJECTS], "Resource": f"{place}/{below}"}]
    if key:
        statements.append(_key_statement(partition, key, key_region))
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))


def _key_statement(partition: str, key: str, region: str) -> dict[str, Any]:
    """Return what allows S3 alone to use a key in the name of who asks."""
    service = f"s3.{region}.amazonaws.com{'.cn' * (partition == 'aws-cn')}"
    conditions: dict[str, Any] = {"StringEquals": {"kms:ViaService": service}}
    account, _, name = key.partition(":key/")
    if not name:  # an alias names a key in conditions only
        account, _, alias = key.rpartition(":alias/")
        conditions["ForAnyValue:StringEquals"] = {"kms:ResourceAliases": f"alias/{alias}"}
        key = f"{account}:key/*"
    return {"Effect": "Allow", "Action": [*KEYS], "Resource": key, "Condition": conditions}
