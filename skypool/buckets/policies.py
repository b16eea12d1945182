"""IAM policies and conditions that allow what saving needs below one prefix of a bucket, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from skypool.buckets.bucket import Bucket
from skypool.errors import UsageError

OBJECTS = (
    "s3:AbortMultipartUpload",
    "s3:DeleteObject",
    "s3:GetObject",
    "s3:ListMultipartUploadParts",
    "s3:PutObject",
)
"""What may be done to objects below the prefix."""
KEYS = ("kms:Decrypt", "kms:GenerateDataKey")
"""What S3 may do with keys, in the name of who asks for an object. The first one is enough to read."""
READS = ("s3:GetObject",)
"""What may be done to objects that are only read."""
LONGEST = 2048
"""The most characters of a session policy (https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRole.html),
and of a condition (https://cloud.google.com/iam/docs/reference/sts/rest/v1/AccessBoundary; both read 2026-11-30)."""
_ESCAPES = str.maketrans({"*": "${*}", "?": "${?}", "$": "${$}"})
"""The characters that mean something in a policy, as they are written to mean themselves."""


def condition(bucket: Bucket) -> str:
    """Return Google's condition for a prefix: true for its objects, and for lists that begin with it.

    https://cloud.google.com/iam/docs/downscoping-short-lived-credentials#limit-perms-objects and
    https://github.com/google/cel-spec/blob/master/doc/langdef.md#string-and-bytes-values (read 2026-11-30).

    Raises UsageError if the prefix is too long for one.
    """
    objects, below = (
        json.dumps(each, ensure_ascii=False)  # the escapes of CEL are those of JSON
        for each in (f"projects/_/buckets/{bucket.name}/objects/{bucket.prefix}/", f"{bucket.prefix}/")
    )
    listed = 'api.getAttribute("storage.googleapis.com/objectListPrefix", "")'
    found = f"resource.name.startsWith({objects}) || {listed}.startsWith({below})"
    if len(found) > LONGEST:
        raise UsageError(
            f"the condition for {bucket} would have {len(found)} characters, and Google takes {LONGEST}; use a shorter "
            "prefix, or name keys that reach it alone"
        )
    return found


def policy(bucket: Bucket, partition: str = "aws", *, reads: bool = False) -> str:
    """Return the policy for the prefix of a bucket, as JSON without spaces.

    If the region of a bucket of AWS is known, S3 may use keys of KMS. It uses one only for an object that the policy
    allows, and the policy of that key must allow it, too. So objects can be read whose key is another one than now.

    Args:
        partition: the part of AWS that the bucket is in, as in ARNs: "aws", "aws-cn" or "aws-us-gov".
        reads: True if objects are only read.
    """
    place = f"arn:{partition}:s3:::{bucket.name}"
    below = f"{bucket.prefix.translate(_ESCAPES)}/*" if bucket.prefix else "*"
    listing: dict[str, Any] = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": place}
    if bucket.prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": below}}
    to_objects, to_keys = (READS, KEYS[:1]) if reads else (OBJECTS, KEYS)
    statements = [listing, {"Effect": "Allow", "Action": [*to_objects], "Resource": f"{place}/{below}"}]
    if bucket.region and not bucket.endpoint:
        service = f"s3.{bucket.region}.amazonaws.com{'.cn' * (partition == 'aws-cn')}"
        by_s3 = {"StringEquals": {"kms:ViaService": service}}
        statements.append({"Effect": "Allow", "Action": [*to_keys], "Resource": "*", "Condition": by_s3})
    return json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))
