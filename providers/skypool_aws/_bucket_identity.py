"""A role and an instance profile that reach one prefix of a bucket.

IAM: https://docs.aws.amazon.com/IAM/latest/APIReference (read 2026-11-30). The role trusts EC2, so that instances have
it, and the account, whose own policies say which logins may assume it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from typing import Any

from skypool.buckets import store
from skypool.buckets.bucket import Bucket
from skypool.buckets.policies import policy
from skypool.drivers.bucket_identity import BucketIdentity
from skypool.errors import UsageError
from skypool_aws import _api

_POLICY = "skypool-bucket"
"""The name of the role's only policy."""
_TAG = "skypool-bucket"
"""The tag with the URL that a role is for."""
_LONGEST_SESSION = 43200
"""The most seconds of temporary credentials by the role: the most that IAM allows."""


def name_of(bucket: Bucket) -> str:
    """Return the name of the role and of the instance profile for a prefix. No other prefix has the same."""
    place = f"{bucket.name}/{bucket.prefix}"
    plain = re.sub(r"[^A-Za-z0-9]+", "-", place).strip("-")
    return f"skypool-{plain[:40]}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def identity(profile: str | None, bucket: Bucket) -> BucketIdentity:
    """Return the identity for the prefix of a bucket. Raises as `Identifies.bucket_identity` does."""
    if not bucket.region:  # by no login; the region of the profile says only in which part of AWS to ask
        here = replace(bucket, region=_api.sts(profile, "").meta.region_name)
        bucket = replace(bucket, region=store.region_of(here, unsigned=True))
    caller = _api.sts(profile, bucket.region).get_caller_identity()
    _, partition, _, _, account, _ = caller["Arn"].split(":", 5)
    name, text = name_of(bucket), policy(bucket, partition)
    arn = f"arn:{partition}:iam::{account}:role/{name}"
    trust = _trust(partition, account)
    shown = json.dumps(json.loads(text), indent=2)
    return BucketIdentity(
        plan=f"role and instance profile {name} in account {account}, for {bucket} alone:\n{shown}",
        use=(
            f"on machines of AWS: AWS(instance_profile={name!r}) with Bucket({bucket.url!r}, identity=True)\n"
            f"  your login needs iam:PassRole for {arn}\n"
            f"elsewhere, as temporary credentials: Bucket({bucket.url!r}, role={arn!r})\n"
            f"  your login needs sts:AssumeRole for it"
        ),
        removal="\n".join(f"  aws iam {each}" for each in _removals(name)),
        make=lambda: _make(_api.iam(profile, bucket.region), name, bucket, trust, text),
    )


def _trust(partition: str, account: str) -> str:
    """Return the policy that says who may have the role."""
    # in China, EC2 has a name of its own: https://github.com/hashicorp/terraform-provider-aws/pull/47141
    service = f"ec2.amazonaws.com{'.cn' * (partition == 'aws-cn')}"
    statements = [
        {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"},
        {"Effect": "Allow", "Principal": {"AWS": f"arn:{partition}:iam::{account}:root"}, "Action": "sts:AssumeRole"},
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def _make(iam: Any, name: str, bucket: Bucket, trust: str, text: str) -> None:
    """Make the role and the instance profile, or set right what is there.

    Raises UsageError if the name is taken, or if the role may do more than skypool lets it.
    """
    place = f"s3://{bucket.name}/{bucket.prefix}"
    tag = {"Key": _TAG, "Value": re.sub(r"[^\w .:/=+@-]", "_", place)[:256]}
    with _api.accepted("EntityAlreadyExists"):
        iam.create_role(
            RoleName=name, AssumeRolePolicyDocument=trust, MaxSessionDuration=_LONGEST_SESSION, Tags=[tag],
            Description="Machines that skypool rents save files with it.",
        )  # fmt: skip
    if tag not in iam.list_role_tags(RoleName=name)["Tags"]:
        raise UsageError(f"the role {name} exists and was not made for {place}; remove it, or use another prefix")
    others = [each["PolicyName"] for each in iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]]
    others += [each for each in iam.list_role_policies(RoleName=name)["PolicyNames"] if each != _POLICY]
    if others:
        raise UsageError(
            f"the role {name} has other policies than that of skypool: {', '.join(others)}; remove them, or the role"
        )
    iam.update_assume_role_policy(RoleName=name, PolicyDocument=trust)
    iam.update_role(RoleName=name, MaxSessionDuration=_LONGEST_SESSION)
    iam.put_role_policy(RoleName=name, PolicyName=_POLICY, PolicyDocument=text)
    with _api.accepted("EntityAlreadyExists"):
        iam.create_instance_profile(InstanceProfileName=name)
    has = [each["RoleName"] for each in iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]]
    if has and has != [name]:
        raise UsageError(f"the instance profile {name} has the role {has[0]}; remove that, or use another prefix")
    if not has:
        iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)


def _removals(name: str) -> list[str]:
    """Return the commands that remove all of it, in their order."""
    return [
        f"remove-role-from-instance-profile --instance-profile-name {name} --role-name {name}",
        f"delete-instance-profile --instance-profile-name {name}",
        f"delete-role-policy --role-name {name} --policy-name {_POLICY}",
        f"delete-role --role-name {name}",
    ]
