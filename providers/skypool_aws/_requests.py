"""The requests that the driver sends to AWS. Each function is one request; its parameters are what differs.

API: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (read 2026-11-21).
"""
# pyright: reportTypedDictNotRequiredAccess=false
# The stubs of boto3 mark every field of an answer as one that may be missing.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from skypool.drivers.retry import patiently
from skypool.errors import ProviderError
from skypool.model import Market
from skypool_aws._api import accepted, all_of

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.literals import InstanceTypeType, ResourceTypeType
    from types_boto3_ec2.type_defs import (
        BlockDeviceMappingTypeDef,
        CapacityReservationTypeDef,
        FilterTypeDef,
        ImageTypeDef,
        InstanceMarketOptionsRequestTypeDef,
        InstanceNetworkInterfaceSpecificationTypeDef,
        InstanceTypeDef,
        InstanceTypeInfoTypeDef,
        InstanceTypeOfferingTypeDef,
        IpPermissionTypeDef,
        SpotPriceTypeDef,
        SubnetTypeDef,
        TagSpecificationTypeDef,
        TagTypeDef,
    )
    from types_boto3_pricing import PricingClient
    from types_boto3_pricing.type_defs import FilterTypeDef as PriceFilterTypeDef
    from types_boto3_service_quotas import ServiceQuotasClient
    from types_boto3_ssm import SSMClient
    from types_boto3_sts import STSClient

NOT_KNOWN_YET = (
    "InvalidGroup.NotFound",
    "InvalidKeyPair.NotFound",
    "InvalidPlacementGroup.Unknown",
)
"""Codes of a launch that may only mean that EC2 does not know yet what was made a moment ago."""

_TAGGED: Mapping[Market, Sequence[ResourceTypeType]] = {
    "on-demand": ("instance", "volume", "network-interface"),
    "spot": ("instance", "volume", "network-interface", "spot-instances-request"),
}
"""What RunInstances makes, all of which gets the pool's tags, by market."""

_STATES_THERE = ("pending", "running", "shutting-down", "stopping", "stopped")
"""States of an instance that still costs something or may again: all but "terminated"."""

_TRIAL_NAME = "skypool-check"
"""The name of what dry runs would make."""

_TRIAL_KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
"""A well-formed public key that belongs to nobody."""

_TRIAL_IMAGE = "resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
"""An image that every account may use."""


# --- what is sold --------------------------------------------------------------------------------------------


def regions(ec2: EC2Client) -> list[str]:
    """Return the regions that are enabled for the account."""
    return [each["RegionName"] for each in ec2.describe_regions()["Regions"]]


def clock(ec2: EC2Client) -> str:
    """Return the Date of an answer of AWS."""
    return str(ec2.describe_regions()["ResponseMetadata"]["HTTPHeaders"]["date"])


def instance_types(ec2: EC2Client, patterns: Sequence[str]) -> list[InstanceTypeInfoTypeDef]:
    """Return the region's instance types whose names match one of these patterns."""
    by_name: FilterTypeDef = {"Name": "instance-type", "Values": patterns}
    return all_of(ec2.get_paginator("describe_instance_types").paginate(Filters=[by_name]), "InstanceTypes")


def offerings(ec2: EC2Client, types: Sequence[str], zones: Sequence[str]) -> list[InstanceTypeOfferingTypeDef]:
    """Return which of these zones have which of these instance types."""
    filters: list[FilterTypeDef] = [
        {"Name": "instance-type", "Values": types},
        {"Name": "location", "Values": zones},
    ]
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone",
        Filters=filters,
    )
    return all_of(pages, "InstanceTypeOfferings")


def spot_prices(ec2: EC2Client, types: Sequence[str]) -> list[SpotPriceTypeDef]:
    """Return the spot prices of now, one for each of these instance types and zone."""
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=cast("Sequence[InstanceTypeType]", types),
        StartTime=datetime.now(UTC),
        ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
    )
    return all_of(pages, "SpotPriceHistory")


def price_list(pricing: PricingClient, instance_type: str, region: str = "") -> list[str]:
    """Return the on-demand prices of an instance type with Linux, as JSON texts.

    Args:
        region: "" takes the prices of all regions.
    """
    wanted = {
        "instanceType": instance_type,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    if region:
        wanted["regionCode"] = region
    filters: list[PriceFilterTypeDef] = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()
    ]
    return all_of(pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters), "PriceList")


def capacity_reservations(ec2: EC2Client, id: str) -> list[CapacityReservationTypeDef]:
    """Return the capacity reservation, or the capacity block, of this id."""
    pages = ec2.get_paginator("describe_capacity_reservations").paginate(CapacityReservationIds=[id])
    return all_of(pages, "CapacityReservations")


def subnets(ec2: EC2Client, ids: Sequence[str]) -> list[SubnetTypeDef]:
    """Return these subnets; for no ids the default one of each zone."""
    which: FilterTypeDef = {"Name": "default-for-az", "Values": ["true"]}
    if ids:
        which = {"Name": "subnet-id", "Values": ids}
    return all_of(ec2.get_paginator("describe_subnets").paginate(Filters=[which]), "Subnets")


def image_parameter(ssm: SSMClient, name: str) -> str:
    """Return the id of the AMI that an SSM parameter holds."""
    return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])


def image(ec2: EC2Client, ami: str) -> ImageTypeDef:
    """Return what EC2 knows of an AMI."""
    found: ImageTypeDef = all_of(ec2.get_paginator("describe_images").paginate(ImageIds=[ami]), "Images")[0]
    return found


# --- what a launch makes -------------------------------------------------------------------------------------


def tag_list(tags: Mapping[str, str]) -> list[TagTypeDef]:
    """Return tags as EC2 takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_values(tags: Iterable[TagTypeDef]) -> dict[str, str]:
    """Return the tags that EC2 gave, by their keys."""
    return {each["Key"]: each["Value"] for each in tags}


def _tagged(kind: ResourceTypeType, tags: Mapping[str, str]) -> TagSpecificationTypeDef:
    return {"ResourceType": kind, "Tags": tag_list(tags)}


def import_key_pair(ec2: EC2Client, name: str, public_key: str, tags: Mapping[str, str]) -> None:
    """Give EC2 the pool's public key. One of this name that is there already stays."""
    with accepted("InvalidKeyPair.Duplicate"):
        ec2.import_key_pair(
            KeyName=name,
            PublicKeyMaterial=public_key.encode(),
            TagSpecifications=[_tagged("key-pair", tags)],
        )


def create_placement_group(ec2: EC2Client, name: str, tags: Mapping[str, str]) -> None:
    """Make a group whose instances are placed close to each other, unless there is one of this name."""
    with accepted("InvalidPlacementGroup.Duplicate"):
        ec2.create_placement_group(
            GroupName=name,
            Strategy="cluster",
            TagSpecifications=[_tagged("placement-group", tags)],
        )


def create_security_group(ec2: EC2Client, name: str, vpc: str, tags: Mapping[str, str]) -> str:
    """Make a security group and return its id; "" if the network has one of this name."""
    with accepted("InvalidGroup.Duplicate"):
        made = ec2.create_security_group(
            GroupName=name,
            VpcId=vpc,
            Description="of one skypool pool, removed with it",
            TagSpecifications=[_tagged("security-group", tags)],
        )
        return str(made["GroupId"])
    return ""


def security_group(ec2: EC2Client, name: str, vpc: str) -> str:
    """Return the id of the security group of this name; "" if EC2 does not list it (yet)."""
    filters: list[FilterTypeDef] = [
        {"Name": "group-name", "Values": [name]},
        {"Name": "vpc-id", "Values": [vpc]},
    ]
    found = all_of(ec2.get_paginator("describe_security_groups").paginate(Filters=filters), "SecurityGroups")
    return str(found[0]["GroupId"]) if found else ""


def allow_ssh(ec2: EC2Client, group: str, network: str, seconds: float) -> None:
    """Let a network reach port 22 of a security group's instances.

    Args:
        seconds: for how long EC2 may answer that there is no such group.
    """
    rule: IpPermissionTypeDef = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": network}],
    }
    _allow(lambda: ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule]), seconds)


def allow_each_other(ec2: EC2Client, group: str, seconds: float) -> None:
    """Let a security group's instances send each other whatever they like.

    Elastic Fabric Adapters need the rule for both directions.

    Args:
        seconds: for how long EC2 may answer that there is no such group.
    """
    rule: IpPermissionTypeDef = {
        "IpProtocol": "-1",
        "UserIdGroupPairs": [{"GroupId": group}],
    }
    _allow(lambda: ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule]), seconds)
    _allow(lambda: ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[rule]), seconds)


def _allow(authorize: Callable[[], object], seconds: float) -> None:
    """Add a rule to a security group, unless it has the rule."""

    def attempt() -> None:
        with accepted("InvalidPermission.Duplicate"):
            authorize()

    patiently(attempt, seconds, "InvalidGroup.NotFound")


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """The parts of RunInstances that differ from launch to launch.

    Attributes:
        token: makes the request idempotent: the same token and parameters are the same instances.
        count: how many instances at most.
        least: how many at least; with fewer in stock none is made.
        ami: what they start from.
        root_device: the name of its root disk, such as "/dev/sda1".
        disk_gb: the size of that disk.
        key_name: the key pair of the pool.
        user_data: what cloud-init is told.
        security_group: the id of the security group.
        fabric: True for Elastic Fabric Adapters instead of ordinary network interfaces.
        placement_group: its name, "" for none.
        prepaid: True if the reservation is a capacity block.
        reservation: the id of a capacity reservation, "" for none.
        max_usd_per_hour: the highest spot price; None for the on-demand price, which is AWS's own limit.
    """

    token: str
    instance_type: str
    market: Market
    count: int
    least: int
    ami: str
    root_device: str
    disk_gb: int
    key_name: str
    user_data: str
    subnet: str
    security_group: str
    tags: Mapping[str, str]
    fabric: bool = False
    placement_group: str = ""
    prepaid: bool = False
    reservation: str = ""
    max_usd_per_hour: float | None = None


def run_instances(ec2: EC2Client, request: InstanceRequest) -> list[InstanceTypeDef]:
    """Rent instances. Each one that shuts itself down is terminated by that, with its disk."""
    root_disk: BlockDeviceMappingTypeDef = {
        "DeviceName": request.root_device,
        "Ebs": {"VolumeType": "gp3", "VolumeSize": request.disk_gb, "DeleteOnTermination": True},
    }
    network: InstanceNetworkInterfaceSpecificationTypeDef = {
        "DeviceIndex": 0,
        "InterfaceType": "efa" if request.fabric else "interface",
        "SubnetId": request.subnet,
        "Groups": [request.security_group],
        "AssociatePublicIpAddress": True,
        "DeleteOnTermination": True,
    }
    made: list[InstanceTypeDef] = ec2.run_instances(
        ClientToken=request.token,
        ImageId=request.ami,
        InstanceType=cast("InstanceTypeType", request.instance_type),
        MinCount=request.least,
        MaxCount=request.count,
        KeyName=request.key_name,
        UserData=request.user_data,
        InstanceInitiatedShutdownBehavior="terminate",
        MetadataOptions={"HttpEndpoint": "enabled", "HttpTokens": "required"},
        BlockDeviceMappings=[root_disk],
        NetworkInterfaces=[network],
        Placement={"GroupName": request.placement_group} if request.placement_group else {},
        InstanceMarketOptions=_market_options(request),
        CapacityReservationSpecification={
            "CapacityReservationTarget": {"CapacityReservationId": request.reservation} if request.reservation else {}
        },
        TagSpecifications=[_tagged(kind, request.tags) for kind in _TAGGED[request.market]],
    )["Instances"]
    return made


def _market_options(request: InstanceRequest) -> InstanceMarketOptionsRequestTypeDef:
    """Return how the instances are bought; empty for on demand."""
    if request.market == "spot":
        options: InstanceMarketOptionsRequestTypeDef = {
            "MarketType": "spot",
            "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
        }
        if request.max_usd_per_hour is not None:
            options["SpotOptions"]["MaxPrice"] = f"{request.max_usd_per_hour:.4f}"
        return options
    if request.prepaid:
        return {"MarketType": "capacity-block"}
    return {}


# --- what is there -------------------------------------------------------------------------------------------


def pool_filters(owner: str, pool: str | None) -> list[FilterTypeDef]:
    """Return filters that find what a pool has, by its tags.

    Args:
        owner: whose pools; "*" in it stands for anything.
        pool: the pool's name; None finds what any pool has.
    """
    return [
        {"Name": "tag:skypool-owner", "Values": [owner]},
        {"Name": "tag:skypool-pool", "Values": [pool or "*"]},
    ]


def pool_instances(ec2: EC2Client, filters: Sequence[FilterTypeDef]) -> list[InstanceTypeDef]:
    """Return the instances that match, except those that are terminated."""
    there: FilterTypeDef = {"Name": "instance-state-name", "Values": _STATES_THERE}
    pages = ec2.get_paginator("describe_instances").paginate(Filters=[*filters, there])
    return [each for reservation in all_of(pages, "Reservations") for each in reservation["Instances"]]


def instances(ec2: EC2Client, ids: Sequence[str]) -> list[InstanceTypeDef]:
    """Return the instances of these ids; none at all if EC2 does not know one of them (yet)."""
    with accepted("InvalidInstanceID.NotFound"):
        pages = ec2.get_paginator("describe_instances").paginate(InstanceIds=ids)
        return [each for reservation in all_of(pages, "Reservations") for each in reservation["Instances"]]
    return []


def terminate(ec2: EC2Client, ids: Sequence[str]) -> list[str]:
    """End instances, and return the ids of those that have not ended yet."""
    told = ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"]
    return [each["InstanceId"] for each in told if each["CurrentState"]["Name"] != "terminated"]


def tag(ec2: EC2Client, ids: Sequence[str], tags: Mapping[str, str]) -> None:
    """Give resources these tags, in the place of those with the same keys."""
    ec2.create_tags(Resources=ids, Tags=tag_list(tags))


@dataclass(frozen=True, slots=True)
class Resource:
    """Something other than an instance that a pool has.

    Attributes:
        id: what it is removed by.
        tagged_as: what it is tagged by: a key pair and a placement group have an id beside their name.
    """

    kind: str
    id: str
    tagged_as: str
    tags: Mapping[str, str]


def pool_resources(ec2: EC2Client, filters: Sequence[FilterTypeDef]) -> Iterator[Resource]:
    """Yield the key pairs, security groups, placement groups and unused disks that match."""
    for key in ec2.describe_key_pairs(Filters=filters)["KeyPairs"]:
        yield Resource("key-pair", key["KeyName"], key["KeyPairId"], tag_values(key["Tags"]))
    for group in all_of(ec2.get_paginator("describe_security_groups").paginate(Filters=filters), "SecurityGroups"):
        yield Resource("security-group", group["GroupId"], group["GroupId"], tag_values(group["Tags"]))
    for place in ec2.describe_placement_groups(Filters=filters)["PlacementGroups"]:
        yield Resource("placement-group", place["GroupName"], place["GroupId"], tag_values(place["Tags"]))
    unused: FilterTypeDef = {"Name": "status", "Values": ["available"]}
    for disk in all_of(ec2.get_paginator("describe_volumes").paginate(Filters=[*filters, unused]), "Volumes"):
        yield Resource("volume", disk["VolumeId"], disk["VolumeId"], tag_values(disk["Tags"]))


def remove(ec2: EC2Client, kind: str, id: str, seconds: float) -> None:
    """Remove a resource, as `pool_resources` names it. Does not raise for one that no longer exists.

    Args:
        seconds: for how long instances that are ending may still use it.
    """

    def attempt() -> None:
        match kind:
            case "key-pair":
                with accepted("InvalidKeyPair.NotFound"):
                    ec2.delete_key_pair(KeyName=id)
            case "security-group":
                with accepted("InvalidGroup.NotFound"):
                    ec2.delete_security_group(GroupId=id)
            case "placement-group":
                with accepted("InvalidPlacementGroup.Unknown"):
                    ec2.delete_placement_group(GroupName=id)
            case "volume":
                with accepted("InvalidVolume.NotFound"):
                    ec2.delete_volume(VolumeId=id)
            case _:
                raise ProviderError(f"skypool makes no {kind} at AWS and does not remove {id}", provider="aws")

    patiently(attempt, seconds, "DependencyViolation", "InvalidPlacementGroup.InUse", "VolumeInUse")


# --- what the account may do ---------------------------------------------------------------------------------


def identity(sts: STSClient) -> str:
    """Return whose credentials these are: an ARN."""
    return str(sts.get_caller_identity()["Arn"])


def quota(quotas: ServiceQuotasClient, code: str) -> float:
    """Return a limit of the account; AWS's default if the account has none of its own."""
    with accepted("NoSuchResourceException"):
        return float(quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
    return float(quotas.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])


def may_run_instances(ec2: EC2Client) -> None:
    """Raise the error of a launch that the account may not do. Nothing is rented."""
    with accepted("DryRunOperation"):
        ec2.run_instances(DryRun=True, ImageId=_TRIAL_IMAGE, InstanceType="c5.large", MinCount=1, MaxCount=1)


def may_import_keys(ec2: EC2Client) -> None:
    """Raise the error of a key pair that the account may not make. Nothing is made."""
    with accepted("DryRunOperation"):
        ec2.import_key_pair(DryRun=True, KeyName=_TRIAL_NAME, PublicKeyMaterial=_TRIAL_KEY)


def may_create_security_groups(ec2: EC2Client) -> None:
    """Raise the error of a security group that the account may not make. Nothing is made."""
    with accepted("DryRunOperation"):
        ec2.create_security_group(DryRun=True, GroupName=_TRIAL_NAME, Description="only a question")


def may_create_placement_groups(ec2: EC2Client) -> None:
    """Raise the error of a placement group that the account may not make. Nothing is made."""
    with accepted("DryRunOperation"):
        ec2.create_placement_group(DryRun=True, GroupName=_TRIAL_NAME, Strategy="cluster")
