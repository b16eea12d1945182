"""What users of the lab's AWS may do: each request of an IAM user is put to the user's policies first.

Users, keys and policies are those of moto's IAM. A key that belongs to no user is the account's own, and may do all.
What each action asks for is in aws_permissions.csv, which says where it was read. moto's own authorization is not used:
it ignores conditions, tags, resources of EC2 and iam:PassRole.
"""

from __future__ import annotations

import csv
import functools
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moto.iam.models import SERVICE_NAME_CONVERSION, iam_backends

from tests.lab import aws_facts
from tests.lab.aws_policies import Ask, MalformedPolicyError, Policy, decide
from tests.lab.aws_wire import ApiError, Call

if TYPE_CHECKING:
    from tests.lab.aws import AWS

ACCOUNT = "123456789012"
TABLE = Path(__file__).parent / "aws_permissions.csv"
FREE = frozenset({"sts:GetCallerIdentity"})
"""What everybody may do: docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html (read 2026-11-24)."""

GLOBAL_KEYS = frozenset({"aws:principalarn", "aws:principalaccount", "aws:username", "aws:requestedregion"})
SPOT_ROLE = "AWSServiceRoleForEC2Spot"
SPOT_ROLE_ARN = f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/spot.amazonaws.com/{SPOT_ROLE}"
SERVICE_NAME_CONVERSION["spot"] = "EC2Spot"  # moto would name it AWSServiceRoleForspot
NO_SPOT_ROLE = (
    "The provided credentials do not have permission to create the service-linked role for EC2 Spot Instances."
)
Tags = Mapping[str, str]


@functools.cache
def table() -> dict[str, dict[str, tuple[str, ...]]]:
    """By permission and type of resource, patterns of the condition keys in lower case; "" is of no resource."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for row in csv.DictReader(TABLE.read_text().splitlines()[1:]):
        found.setdefault(row["permission"], {})[row["resource"]] = tuple(row["keys"].lower().split())
    return found


@dataclass(frozen=True)
class User:
    """An IAM user with a key.

    Attributes:
        environment: for a client of this user.
        used: the permissions that the user's requests have needed and had.
    """

    name: str
    arn: str
    environment: Mapping[str, str] = field(repr=False)
    used: set[str]


@dataclass(frozen=True)
class Resource:
    """What a request does something to.

    Attributes:
        type: as the table names it.
        id: the end of its ARN; "*" for one that is only being made.
        keys: what conditions may ask of it.
        tags: those it has; None for one that is being made.
        new_tags: those that the request gives it.
    """

    type: str
    id: str
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    tags: Tags | None = None
    new_tags: Tags = field(default_factory=dict[str, str])

    def context(self) -> dict[str, list[str]]:
        """Values by condition key."""
        found = {key.lower(): [value] for key, value in self.keys.items()}
        for key, value in (self.tags or {}).items():
            found[f"aws:resourcetag/{key.lower()}"] = found[f"ec2:resourcetag/{key.lower()}"] = [value]
        for key, value in self.new_tags.items():
            found[f"aws:requesttag/{key.lower()}"] = [value]
        if self.new_tags:
            found["aws:tagkeys"] = [*self.new_tags]
        return found


class Permissions:
    """Those of all users. Every method is called with the world's lock held."""

    def __init__(self, world: AWS) -> None:
        self.world = world
        self.used: dict[str, set[str]] = {}

    @property
    def iam(self) -> Any:
        """moto's IAM of the account."""
        return iam_backends[ACCOUNT]["aws"]

    def add(self, policy: str | Mapping[str, Any]) -> User:
        """A new user with this policy.

        Raises:
            MalformedPolicyError: the policy has an element, a permission or a condition key that is unknown.
        """
        text = policy if isinstance(policy, str) else json.dumps(policy)
        check_names(Policy(text))
        name = f"user-{secrets.token_hex(4)}"
        made = self.iam.create_user("us-east-1", name)
        self.iam.put_user_policy(name, "policy", text)
        key = made.create_access_key(prefix="AKIA")
        keys = {"AWS_ACCESS_KEY_ID": key.access_key_id, "AWS_SECRET_ACCESS_KEY": key.secret_access_key}
        return User(name, made.arn, {**self.world.environment, **keys}, self.used.setdefault(name, set()))

    def check(self, call: Call) -> None:
        """Refuse a request that its user may not send.

        Raises:
            ApiError: as the service says it.
        """
        user = self.iam.get_user_from_access_key_id(call.key)
        permission = f"{call.service}:{call.action}"
        is_first_spot = (
            call.action == "RunInstances"
            and _market(call.params) == "spot"
            and not call.params.get("DryRun")
            and SPOT_ROLE not in [role.name for role in self.iam.get_roles()]
        )
        if user is not None and permission not in FREE:
            if permission not in table():
                raise ApiError("InvalidAction", f"aws_permissions.csv does not have {permission}: add it there")
            policies = [Policy(text) for text in self._documents(user)]
            self._put(user, call, policies, is_first_spot)
        if is_first_spot:
            self.iam.create_service_linked_role("spot.amazonaws.com", "", "")

    def _put(self, user: Any, call: Call, policies: Sequence[Policy], is_first_spot: bool) -> None:
        who = {
            "aws:principalarn": [user.arn], "aws:principalaccount": [ACCOUNT], "aws:username": [user.name],
            "aws:requestedregion": [call.region],
        }  # fmt: skip
        used = self.used.setdefault(user.name, set())
        for ask in asks(self.world, call):
            verdict = decide(policies, Ask(ask.action, ask.resource, {**ask.context, **who}))
            if verdict != "allowed":
                raise _denial(call, user.arn, ask, explicit=verdict == "denied")
            used.add(ask.action)
        if is_first_spot:
            service = {"iam:awsservicename": ["spot.amazonaws.com"]}
            ask = Ask("iam:CreateServiceLinkedRole", SPOT_ROLE_ARN, {**service, **who})
            if decide(policies, ask) != "allowed":
                raise ApiError("AuthFailure.ServiceLinkedRoleCreationNotPermitted", NO_SPOT_ROLE, 403)
            used.add(ask.action)

    def _documents(self, user: Any) -> Iterator[str]:
        """Of the user and of the user's groups, inline and attached."""
        for owner in [user, *self.iam.get_groups_for_user(user.name)]:
            yield from owner.policies.values()
            for each in owner.managed_policies.values():
                yield next(one.document for one in each.versions if one.version_id == each.default_version_id)


def check_names(policy: Policy) -> None:
    """See that the table has every permission of a policy, and that each condition is about one of these.

    Raises:
        MalformedPolicyError: it is not so, and the statement would never do anything.
    """
    for statement in policy.statements:
        fitting: set[str] = set()
        for pattern in statement.actions:
            found = {each for each in table() if fnmatchcase(each.lower(), pattern.lower())}
            if not found:
                raise MalformedPolicyError(f"nothing is called {pattern}")
            fitting |= found
        keys = {key for each in fitting for some in table()[each].values() for key in some} | GLOBAL_KEYS
        for condition in statement.conditions:
            if not any(fnmatchcase(condition.key, each) for each in keys):
                raise MalformedPolicyError(f"{condition.key} is no key of {', '.join(sorted(fitting))}")


def _denial(call: Call, who: str, ask: Ask, *, explicit: bool) -> ApiError:
    """In the words of the service: https://docs.aws.amazon.com/IAM/latest/UserGuide/troubleshoot_access-denied.html
    (2026-11-24); those of EC2 as in https://github.com/aws/karpenter-provider-aws/issues/7692."""
    on = "" if ask.resource == "*" else f" on resource: {ask.resource}"
    why = (
        "with an explicit deny in an identity-based policy"
        if explicit
        else f"because no identity-based policy allows the {ask.action} action"
    )
    text = f"User: {who} is not authorized to perform: {ask.action}{on} {why}"
    if call.service != "ec2":
        return ApiError("AccessDeniedException" if call.is_json else "AccessDenied", text, 400 if call.is_json else 403)
    encoded = "" if ask.resource == "*" else f". Encoded authorization failure message: {secrets.token_urlsafe(90)}"
    return ApiError("UnauthorizedOperation", f"You are not authorized to perform this operation. {text}{encoded}", 403)


# --- what a request asks for -----------------------------------------------------------------------------------


def asks(world: AWS, call: Call) -> Iterator[Ask]:
    """Every question of a request, that of its action first."""
    permission = f"{call.service}:{call.action}"
    touched = list(_RESOURCES.get(call.action, _nothing)(world, call))
    of_tags = {"ec2:CreateAction": call.action}
    if not touched:
        yield _ask(call, permission, None)
    for each in touched:
        yield _ask(call, permission, each)
    for each in touched:
        if each.new_tags and call.action not in ("CreateTags", "DeleteTags"):
            yield _ask(call, "ec2:CreateTags", each, of_tags)
    if call.action == "RunInstances":
        yield from _passed_roles(world, call)


def _ask(call: Call, permission: str, resource: Resource | None, more: Mapping[str, str] | None = None) -> Ask:
    """One question, with the condition keys that the table has for it."""
    rows = table()[permission]
    if resource is not None and resource.type not in rows:
        raise ValueError(f"aws_permissions.csv does not have {resource.type} of {permission}")
    said = {key.lower(): [value] for key, value in (more or {}).items()} | {"ec2:region": [call.region]}
    if call.service == "servicequotas":
        said["servicequotas:service"] = [str(call.params.get("ServiceCode", ""))]
    known = list(rows.get("", ()))
    if resource is not None:
        said |= resource.context()
        known += rows[resource.type]
    context = {key: value for key, value in said.items() if any(fnmatchcase(key, each) for each in known)}
    return Ask(permission, "*" if resource is None else _arn(call, resource), context)


def _arn(call: Call, resource: Resource) -> str:
    if resource.type == "role":
        return resource.id
    if resource.type == "quota":
        return f"arn:aws:servicequotas:{call.region}:{ACCOUNT}:{resource.id}"
    if resource.type == "parameter":
        owner = "" if resource.id.startswith("/aws/") else ACCOUNT
        return f"arn:aws:ssm:{call.region}:{owner}:parameter/{resource.id.lstrip('/')}"
    owner = "" if resource.type in ("image", "snapshot") else ACCOUNT
    return f"arn:aws:ec2:{call.region}:{owner}:{resource.type}/{resource.id}"


def _nothing(world: AWS, call: Call) -> Iterator[Resource]:
    yield from ()


def _passed_roles(world: AWS, call: Call) -> Iterator[Ask]:
    """A role that machines are to have, by an instance profile."""
    profile = call.params.get("IamInstanceProfile", {})
    name = profile.get("Name") or profile.get("Arn", "").rpartition("/")[2]
    for each in world.permissions.iam.get_instance_profiles():
        if each.name == name:
            for role in each.roles:
                passed = Resource("role", role.arn)
                yield _ask(call, "iam:PassRole", passed, {"iam:PassedToService": "ec2.amazonaws.com"})


def _market(options: Mapping[str, Any]) -> str:
    return str(options.get("InstanceMarketOptions", {}).get("MarketType", "on-demand"))


# --- resources of EC2 ----------------------------------------------------------------------------------------


def _run_instances(world: AWS, call: Call) -> Iterator[Resource]:
    options = call.params
    yield _there(world, call, options.get("ImageId", ""))
    zone = options.get("Placement", {}).get("AvailabilityZone", "")
    cards: list[dict[str, Any]] = options.get("NetworkInterfaces") or [{}]
    subnets = [str(card.get("SubnetId") or options.get("SubnetId") or "") for card in cards]
    if subnets[0] and (subnet := _subnet(world, call, subnets[0])) is not None:
        zone = subnet.availability_zone
    metadata = options.get("MetadataOptions", {})
    keys = {
        "ec2:InstanceType": options.get("InstanceType", "m1.small"), "ec2:InstanceMarketType": _market(options),
        "ec2:AvailabilityZone": zone, "ec2:Tenancy": options.get("Placement", {}).get("Tenancy", "default"),
        "ec2:MetadataHttpTokens": metadata.get("HttpTokens", ""), "ec2:RootDeviceType": "ebs",
        "ec2:MetadataHttpEndpoint": metadata.get("HttpEndpoint", ""),
    }  # fmt: skip
    yield _made(call, "instance", {key: value for key, value in keys.items() if value})
    for card, name in zip(cards, subnets, strict=True):
        where = {"ec2:Subnet": f"arn:aws:ec2:{call.region}:{ACCOUNT}:subnet/{name}"} if name else {}
        public = {"ec2:AssociatePublicIpAddress": str(bool(card.get("AssociatePublicIpAddress"))).lower()}
        yield _made(call, "network-interface", {**where, **public, "ec2:AvailabilityZone": zone})
    for name in dict.fromkeys(filter(None, subnets)):
        yield _there(world, call, name)
    for name in [*options.get("SecurityGroupIds", ()), *(each for card in cards for each in card.get("Groups", ()))]:
        yield _there(world, call, name)
    for disk in options.get("BlockDeviceMappings") or [{}]:
        ebs = disk.get("Ebs", {})
        asked = {"ec2:VolumeType": ebs.get("VolumeType"), "ec2:VolumeSize": ebs.get("VolumeSize")}
        yield _made(call, "volume", {key: str(value) for key, value in asked.items() if value})
    if options.get("KeyName"):
        yield _key_pair(world, call, options["KeyName"])
    if options.get("Placement", {}).get("GroupName"):
        yield _placement_group(world, call, options["Placement"]["GroupName"])
    target = options.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    if target.get("CapacityReservationId"):
        yield _there(world, call, target["CapacityReservationId"])
    if _market(options) == "spot" and _new_tags(call, "spot-instances-request"):
        yield _made(call, "spot-instances-request", {})


def _named(parameter: str) -> Callable[[AWS, Call], Iterator[Resource]]:
    """Those whose ids stand in a parameter, as one or as several."""

    def found(world: AWS, call: Call) -> Iterator[Resource]:
        named = call.params.get(parameter, ())
        tags = _pairs(call.params.get("Tags", ())) if call.action == "CreateTags" else {}
        for id in [named] if isinstance(named, str) else named:
            there = _there(world, call, id)
            yield Resource(there.type, there.id, there.keys, there.tags, tags)

    return found


def _import_key_pair(world: AWS, call: Call) -> Iterator[Resource]:
    name = call.params.get("KeyName", "")
    yield Resource("key-pair", name, {"ec2:KeyPairName": name}, None, _new_tags(call, "key-pair"))


def _delete_key_pair(world: AWS, call: Call) -> Iterator[Resource]:
    if id := call.params.get("KeyPairId"):
        yield _there(world, call, id)
    else:
        yield _key_pair(world, call, call.params.get("KeyName", ""))


def _create_security_group(world: AWS, call: Call) -> Iterator[Resource]:
    yield _made(call, "security-group", {})
    if vpc := call.params.get("VpcId"):
        yield _there(world, call, vpc)


def _create_placement_group(world: AWS, call: Call) -> Iterator[Resource]:
    name, strategy = call.params.get("GroupName", ""), call.params.get("Strategy", "cluster")
    keys = {"ec2:PlacementGroupName": name, "ec2:PlacementGroupStrategy": strategy}
    yield Resource("placement-group", name, keys, None, _new_tags(call, "placement-group"))


def _delete_placement_group(world: AWS, call: Call) -> Iterator[Resource]:
    yield _placement_group(world, call, call.params.get("GroupName", ""))


def _create_volume(world: AWS, call: Call) -> Iterator[Resource]:
    yield _made(call, "volume", {"ec2:AvailabilityZone": call.params.get("AvailabilityZone", "")})


def _create_capacity_reservation(world: AWS, call: Call) -> Iterator[Resource]:
    yield _made(call, "capacity-reservation", {"ec2:InstanceType": call.params.get("InstanceType", "")})


def _allocate_address(world: AWS, call: Call) -> Iterator[Resource]:
    yield _made(call, "elastic-ip", {"ec2:Domain": call.params.get("Domain", "vpc")})


def _associate_address(world: AWS, call: Call) -> Iterator[Resource]:
    for parameter in ("AllocationId", "InstanceId", "NetworkInterfaceId"):
        if call.params.get(parameter):
            yield _there(world, call, call.params[parameter])


def _parameters(world: AWS, call: Call) -> Iterator[Resource]:
    for name in [*call.params.get("Names", ()), *filter(None, (call.params.get("Name"), call.params.get("Path")))]:
        yield Resource("parameter", name)


def _service_quota(world: AWS, call: Call) -> Iterator[Resource]:
    yield Resource("quota", f"{call.params['ServiceCode']}/{call.params['QuotaCode']}")


_RESOURCES: Mapping[str, Callable[[AWS, Call], Iterator[Resource]]] = {
    "AllocateAddress": _allocate_address,
    "AssociateAddress": _associate_address,
    "AuthorizeSecurityGroupEgress": _named("GroupId"),
    "AuthorizeSecurityGroupIngress": _named("GroupId"),
    "CancelCapacityReservation": _named("CapacityReservationId"),
    "CancelSpotInstanceRequests": _named("SpotInstanceRequestIds"),
    "CreateCapacityReservation": _create_capacity_reservation,
    "CreateKeyPair": _import_key_pair,
    "CreatePlacementGroup": _create_placement_group,
    "CreateSecurityGroup": _create_security_group,
    "CreateTags": _named("Resources"),
    "CreateVolume": _create_volume,
    "DeleteKeyPair": _delete_key_pair,
    "DeletePlacementGroup": _delete_placement_group,
    "DeleteSecurityGroup": _named("GroupId"),
    "DeleteTags": _named("Resources"),
    "DeleteVolume": _named("VolumeId"),
    "GetConsoleOutput": _named("InstanceId"),
    "GetParameter": _parameters,
    "GetParameters": _parameters,
    "GetParametersByPath": _parameters,
    "GetServiceQuota": _service_quota,
    "ReleaseAddress": _named("AllocationId"),
    "ImportKeyPair": _import_key_pair,
    "RebootInstances": _named("InstanceIds"),
    "RevokeSecurityGroupEgress": _named("GroupId"),
    "RevokeSecurityGroupIngress": _named("GroupId"),
    "RunInstances": _run_instances,
    "StartInstances": _named("InstanceIds"),
    "StopInstances": _named("InstanceIds"),
    "TerminateInstances": _named("InstanceIds"),
}

_TYPES = {
    "i": "instance", "vol": "volume", "eni": "network-interface", "sg": "security-group", "subnet": "subnet",
    "eipalloc": "elastic-ip",
    "ami": "image", "snap": "snapshot", "sir": "spot-instances-request", "cr": "capacity-reservation", "vpc": "vpc",
}  # fmt: skip


def _made(call: Call, type: str, keys: Mapping[str, str]) -> Resource:
    """One that the request makes."""
    return Resource(type, "*", keys, None, _new_tags(call, type))


def _there(world: AWS, call: Call, id: str) -> Resource:
    """One that there is, by its id. One that there is not has no tags; so has an instance that has ended.

    Whoever may end only what has a tag is refused then: https://github.com/aws/karpenter-provider-aws/issues/2100.
    """
    backend = world.backend(call.region)
    prefix = id.partition("-")[0]
    if prefix == "key":
        pair = next((each for each in backend.key_pairs.values() if each.id == id), None)
        return _key_pair(world, call, pair.key_name if pair else id)
    if prefix == "pg":
        names = [name for (region, name), group in world.groups.items() if region == call.region and group.id == id]
        return _placement_group(world, call, names[0] if names else id)
    type = _TYPES.get(prefix, "instance")
    tags: Tags = backend.tags.get(id, {})
    vpcs = f"arn:aws:ec2:{call.region}:{ACCOUNT}:vpc"
    keys: dict[str, str] = {}
    exists = True
    match type:
        case "instance":
            rental = world.life.rentals.get(id)
            exists = rental is not None and rental.is_living
            if rental is not None and exists:
                keys = {
                    "ec2:InstanceType": rental.type, "ec2:AvailabilityZone": rental.zone,
                    "ec2:InstanceMarketType": rental.market, "ec2:RootDeviceType": "ebs",
                }  # fmt: skip
        case "image":
            exists = aws_facts.image(call.region, id) is not None
            keys = {"ec2:Owner": "amazon", "ec2:Public": "true", "ec2:RootDeviceType": "ebs"} if exists else {}
        case "subnet":
            subnet = _subnet(world, call, id)
            exists = subnet is not None
            if exists:
                keys = {"ec2:Vpc": f"{vpcs}/{subnet.vpc_id}", "ec2:AvailabilityZone": subnet.availability_zone}
        case "security-group":
            group = backend.get_security_group_from_id(id)
            exists = group is not None
            if exists:
                keys = {"ec2:Vpc": f"{vpcs}/{group.vpc_id}"}
        case "capacity-reservation":
            tags = _pairs(world.stock.reservations[id].tags) if id in world.stock.reservations else {}
        case "spot-instances-request":
            tags = _pairs(world.spots[id].tags) if id in world.spots else {}
        case "volume":
            exists = id in backend.volumes
        case "network-interface":
            exists = id in backend.enis
        case _:
            pass
    return Resource(type, id, keys, tags if exists else {})


def _key_pair(world: AWS, call: Call, name: str) -> Resource:
    backend = world.backend(call.region)
    pair = backend.key_pairs.get(name)
    keys = {"ec2:KeyPairName": name} | ({"ec2:KeyPairType": pair.key_type} if pair else {})
    return Resource("key-pair", name, keys, backend.tags.get(pair.id, {}) if pair else {})


def _placement_group(world: AWS, call: Call, name: str) -> Resource:
    group = world.groups.get((call.region, name))
    keys = {"ec2:PlacementGroupName": name} | ({"ec2:PlacementGroupStrategy": group.strategy} if group else {})
    tags = world.backend(call.region).tags.get(group.id, {}) if group else {}
    return Resource("placement-group", name, keys, {**_pairs(group.tags), **tags} if group else {})


def _subnet(world: AWS, call: Call, id: str) -> Any:
    """moto's record of a subnet; None if there is none."""
    return next((some[id] for some in world.backend(call.region).subnets.values() if id in some), None)


def _new_tags(call: Call, type: str) -> Tags:
    said = call.params.get("TagSpecifications", ())
    return {
        key: value
        for each in said
        if each.get("ResourceType") == type
        for key, value in _pairs(each.get("Tags", ())).items()
    }


def _pairs(tags: Any) -> dict[str, str]:
    return {each["Key"]: each.get("Value", "") for each in tags}
