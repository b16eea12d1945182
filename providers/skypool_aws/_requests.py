"""Sends the driver's requests to AWS.

Most functions send one kind of request and block until AWS answers. Every function that sends a request raises a
ProviderError if AWS refuses, also where the function's docstring does not say so.

API: https://docs.aws.amazon.com/AWSEC2/latest/APIReference (read 2026-11-21).
"""
# pyright: reportTypedDictNotRequiredAccess=false
# The stubs of boto3 mark every field of an answer as one that may be missing.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from skypool.drivers.retry import patiently, soon
from skypool.errors import AccessError, ProviderError
from skypool.model import Market
from skypool_aws._api import accepted, all_of

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.literals import InstanceTypeType, ResourceTypeType, TenancyType
    from types_boto3_ec2.type_defs import (
        AddressTypeDef,
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
        PlacementTypeDef,
        RunInstancesRequestTypeDef,
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
"""EC2's error codes for a launch if EC2 does not find the key pair or group yet, which was just made."""

NOT_RUNNING_YET = "IncorrectInstanceState"
"""EC2's error code if an instance that does not run yet is given an Elastic IP address."""

SOME_GONE = ("InvalidInstanceID.NotFound", "UnauthorizedOperation")
"""EC2's error codes for a request about several instances if some have ended, or if EC2 does not list them yet."""

_TAGGED: Mapping[Market, Sequence[ResourceTypeType]] = {
    "on-demand": ("instance", "volume", "network-interface"),
    "spot": ("instance", "volume", "network-interface", "spot-instances-request"),
}
"""A dict from market to the kinds of resources that a launch makes. All of these resources get the pool's tags."""

_ADDRESS_IN_USE = "InvalidIPAddress.InUse"
"""EC2's error code for the release of an Elastic IP address that a network interface has."""

_RELEASING = 20.0
"""Seconds to wait until EC2 no longer lists an Elastic IP address that was released."""

_STATES_THERE = ("pending", "running", "shutting-down", "stopping", "stopped")
"""States of an instance that has not ended, so that it costs money or may do so again: all but "terminated"."""

TRIAL_NAME = "skypool-check"
"""The name of the resources in dry runs (requests that AWS checks and does not execute)."""

_TRIAL_KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
"""The public key in dry runs, which is well-formed and belongs to nobody."""


# --- what is sold --------------------------------------------------------------------------------------------


def regions(ec2: EC2Client) -> list[str]:
    """Return the names of the regions that are enabled for the account, as AWS orders them."""
    return [each["RegionName"] for each in ec2.describe_regions()["Regions"]]


def clock(ec2: EC2Client) -> str:
    """Return the time at AWS, such as "Sat, 21 Nov 2026 15:28:00 GMT".

    Reads the HTTP header "Date" of AWS's answer, which a refusal has, too.

    Raises:
        ProviderError: AWS did not answer.
    """
    try:
        headers = ec2.describe_regions()["ResponseMetadata"]["HTTPHeaders"]
    except ProviderError as e:
        headers = getattr(e.__cause__, "response", {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if "date" not in headers:
            raise
    return str(headers["date"])


def instance_types(ec2: EC2Client, patterns: Sequence[str]) -> list[InstanceTypeInfoTypeDef]:
    """Return EC2's records of a region's instance types that match at least one pattern, such as "p5.*".

    In a pattern, "*" matches any text and "?" one character.
    """
    by_name: FilterTypeDef = {"Name": "instance-type", "Values": patterns}
    return all_of(ec2.get_paginator("describe_instance_types").paginate(Filters=[by_name]), "InstanceTypes")


def offerings(ec2: EC2Client, types: Sequence[str], zones: Sequence[str]) -> list[InstanceTypeOfferingTypeDef]:
    """Return one record for each pair of a zone and one of these instance types that the zone has.

    Args:
        zones: the names of the zones, such as "us-east-1a".
    """
    filters: list[FilterTypeDef] = [
        {"Name": "instance-type", "Values": types},
        {"Name": "location", "Values": zones},
    ]
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone",
        Filters=filters,
    )
    return all_of(pages, "InstanceTypeOfferings")


def types_in_region(ec2: EC2Client, patterns: Sequence[str]) -> list[str]:
    """Return the names of a region's instance types that match at least one pattern, such as "p5.*"."""
    filters: list[FilterTypeDef] = [{"Name": "instance-type", "Values": patterns}]
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(LocationType="region", Filters=filters)
    return [each["InstanceType"] for each in all_of(pages, "InstanceTypeOfferings")]


def spot_prices(ec2: EC2Client, types: Sequence[str]) -> list[SpotPriceTypeDef]:
    """Return the current spot prices of these instance types, one record for each pair of type and zone.

    The zones are those of the client's region. A pair without a spot price has no record. The field "SpotPrice" of a
    record is text, in USD per hour.
    """
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=cast("Sequence[InstanceTypeType]", types),
        StartTime=datetime.now(UTC),
        ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
    )
    return all_of(pages, "SpotPriceHistory")


def price_list(pricing: PricingClient, instance_type: str, region: str = "") -> list[str]:
    """Return the rows of AWS's price list for an instance type on demand with Linux, each as a JSON text.

    Args:
        region: the region whose rows are wanted; "" means all regions.
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
    return _products(pricing, "AmazonEC2", wanted)


def disk_prices(pricing: PricingClient) -> list[str]:
    """Return the rows of AWS's price list for gp3 disks in all regions, each as a JSON text."""
    return _products(pricing, "AmazonEC2", {"productFamily": "Storage", "volumeApiName": "gp3"})


def address_prices(pricing: PricingClient) -> list[str]:
    """Return the rows of AWS's price list for public IPv4 addresses in all regions, each as a JSON text."""
    return _products(pricing, "AmazonVPC", {"group": "VPCPublicIPv4Address"})


def _products(pricing: PricingClient, service: str, wanted: Mapping[str, str]) -> list[str]:
    """Return the rows for a service in AWS's price list that have the attributes `wanted`, each as a JSON text."""
    filters: list[PriceFilterTypeDef] = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()
    ]
    return all_of(pricing.get_paginator("get_products").paginate(ServiceCode=service, Filters=filters), "PriceList")


def capacity_reservations(ec2: EC2Client, id: str) -> list[CapacityReservationTypeDef]:
    """Return EC2's record of the capacity reservation or capacity block with this id, as a list of one record.

    Raises:
        ProviderError: the client's region has no reservation with this id.
    """
    pages = ec2.get_paginator("describe_capacity_reservations").paginate(CapacityReservationIds=[id])
    return all_of(pages, "CapacityReservations")


def subnets(ec2: EC2Client, ids: Sequence[str]) -> list[SubnetTypeDef]:
    """Return EC2's records of the subnets with these ids. Without ids, return those of each zone's default subnet.

    Ids that do not exist are left out.
    """
    which: FilterTypeDef = {"Name": "default-for-az", "Values": ["true"]}
    if ids:
        which = {"Name": "subnet-id", "Values": ids}
    return all_of(ec2.get_paginator("describe_subnets").paginate(Filters=[which]), "Subnets")


def image_parameter(ssm: SSMClient, name: str) -> str:
    """Return the id of the AMI that an SSM parameter holds.

    Raises:
        ProviderError: there is no such parameter.
    """
    return str(ssm.get_parameter(Name=name)["Parameter"]["Value"])


def image(ec2: EC2Client, ami: str) -> ImageTypeDef:
    """Return EC2's record of an AMI.

    Raises:
        ProviderError: EC2 does not know the AMI.
    """
    found: ImageTypeDef = all_of(ec2.get_paginator("describe_images").paginate(ImageIds=[ami]), "Images")[0]
    return found


# --- what a launch makes -------------------------------------------------------------------------------------


def tag_list(tags: Mapping[str, str]) -> list[TagTypeDef]:
    """Return tags in the form that EC2 takes: a list of {"Key": …, "Value": …}, in the same order."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag_values(tags: Iterable[TagTypeDef]) -> dict[str, str]:
    """Return tags in EC2's form, [{"Key": …, "Value": …}, …], as a dict from key to value."""
    return {each["Key"]: each["Value"] for each in tags}


def _tagged(kind: ResourceTypeType, tags: Mapping[str, str]) -> TagSpecificationTypeDef:
    """Return tags in the form that a create request of EC2 takes for one kind of resource, such as "volume"."""
    return {"ResourceType": kind, "Tags": tag_list(tags)}


def import_key_pair(ec2: EC2Client, name: str, public_key: str, tags: Mapping[str, str]) -> None:
    """Import the pool's public key into EC2 under a name.

    Does nothing if EC2 has a key pair of this name already, even with another key.

    Args:
        public_key: the key, in the form of an OpenSSH public key file.
    """
    with accepted("InvalidKeyPair.Duplicate"):
        ec2.import_key_pair(
            KeyName=name,
            PublicKeyMaterial=public_key.encode(),
            TagSpecifications=[_tagged("key-pair", tags)],
        )


def create_placement_group(ec2: EC2Client, name: str, tags: Mapping[str, str]) -> None:
    """Make a cluster placement group, whose instances are placed close together. Do nothing if it exists already."""
    with accepted("InvalidPlacementGroup.Duplicate"):
        ec2.create_placement_group(
            GroupName=name,
            Strategy="cluster",
            TagSpecifications=[_tagged("placement-group", tags)],
        )


def create_security_group(ec2: EC2Client, name: str, vpc: str, tags: Mapping[str, str]) -> str:
    """Make a security group in a network, and return its id. Return "" if the network has one of this name already.

    An existing group is not changed.
    """
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
    """Return the id of the security group of this name in a network; "" if EC2 lists none (yet)."""
    filters: list[FilterTypeDef] = [
        {"Name": "group-name", "Values": [name]},
        {"Name": "vpc-id", "Values": [vpc]},
    ]
    found = all_of(ec2.get_paginator("describe_security_groups").paginate(Filters=filters), "SecurityGroups")
    return str(found[0]["GroupId"]) if found else ""


def allow_ssh(ec2: EC2Client, group: str, network: str, seconds: float) -> None:
    """Allow a network to reach port 22 of a security group's instances. Does nothing if that is allowed already.

    Args:
        network: the network in CIDR notation, such as "203.0.113.0/24".
        seconds: for how long to repeat the request while EC2 does not find the group.

    Raises:
        ProviderError: EC2 still does not find the group, or refused for another reason.
    """
    rule: IpPermissionTypeDef = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": network}],
    }
    _allow(lambda: ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule]), seconds)


def own_security_groups(ec2: EC2Client, instance: str) -> set[str]:
    """Return the id of the security group that was made for an instance's pool; an empty set if EC2 tells none."""
    found: set[str] = set()
    for record in instances(ec2, [instance]):
        name = tag_values(record.get("Tags", ())).get("Name")  # the group has the same name
        groups = [*record.get("SecurityGroups", ())]
        groups += [group for each in record.get("NetworkInterfaces", ()) for group in each.get("Groups", ())]
        found |= {each["GroupId"] for each in groups if each["GroupName"] == name}
    return found


def allow_each_other(ec2: EC2Client, group: str, seconds: float) -> None:
    """Allow all traffic among a security group's instances, in both directions. Rules that exist already are kept.

    Args:
        seconds: for how long to repeat each request while EC2 does not find the group.

    Raises:
        ProviderError: EC2 still does not find the group, or refused for another reason.
    """
    rule: IpPermissionTypeDef = {
        "IpProtocol": "-1",
        "UserIdGroupPairs": [{"GroupId": group}],
    }
    _allow(lambda: ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule]), seconds)
    _allow(lambda: ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[rule]), seconds)


def _allow(authorize: Callable[[], object], seconds: float) -> None:
    """Call `authorize` to add a rule, if it is missing. Repeat for `seconds` while EC2 does not find the group."""

    def attempt() -> None:
        with accepted("InvalidPermission.Duplicate"):
            authorize()

    patiently(attempt, seconds, "InvalidGroup.NotFound")


@dataclass(frozen=True, slots=True)
class InstanceRequest:
    """The parameters of EC2's launch request (RunInstances) that vary from launch to launch.

    Attributes:
        token: makes the request idempotent: the same token and parameters return the same instances.
        least: how many instances are enough; if fewer are in stock, AWS makes none.
        ami: the id of the image.
        root_device: the name of the root disk, such as "/dev/sda1".
        disk_gb: the size of the root disk in GiB.
        user_data: the configuration for cloud-init.
        tags: the tags of everything that the request makes.
        efa: a pair (network card, device on the card) for each EFA; empty for none. (0, 0) is the primary interface.
        placement_group: the name of the placement group; "" for none.
        tenancy: "default", or "dedicated" for hardware that only this account uses.
        prepaid: True if `reservation` is a capacity block, which was paid for when it was bought.
        reservation: the id of a capacity reservation; "" for none.
        instance_profile: the name of the instance profile that gives instances an identity; "" for none.
        max_usd_per_hour: the highest spot price to pay for one instance; None means the on-demand price, which is AWS's
            default. Ignored for on-demand instances.
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
    efa: Sequence[tuple[int, int]] = ()
    placement_group: str = ""
    tenancy: str = "default"
    prepaid: bool = False
    reservation: str = ""
    instance_profile: str = ""
    max_usd_per_hour: float | None = None

    @property
    def has_several_interfaces(self) -> bool:
        """True if each instance gets several network interfaces. EC2 then gives it no public address at its launch."""
        return any(place != (0, 0) for place in self.efa)


def run_instances(ec2: EC2Client, request: InstanceRequest) -> list[InstanceTypeDef]:
    """Rent instances, and return EC2's records of them. Does not wait until the instances run.

    There are at least `request.least` and at most `request.count` instances. Each gets a public address, unless it has
    several network interfaces. An instance that shuts itself down is terminated, and its disk is deleted.

    Raises:
        NoAnswer: the answer was lost, so instances may have been made.
        ProviderError: AWS refused; nothing was rented.
    """
    made: list[InstanceTypeDef] = ec2.run_instances(**_run_parameters(request))["Instances"]
    return made


def _run_parameters(request: InstanceRequest) -> RunInstancesRequestTypeDef:
    """Return a request as parameters of EC2's RunInstances. An empty key name or security group is left out."""
    root_disk: BlockDeviceMappingTypeDef = {
        "DeviceName": request.root_device,
        "Ebs": {"VolumeType": "gp3", "VolumeSize": request.disk_gb, "DeleteOnTermination": True},
    }
    placement: PlacementTypeDef = {}
    if request.placement_group:
        placement["GroupName"] = request.placement_group
    if request.tenancy != "default":
        placement["Tenancy"] = cast("TenancyType", request.tenancy)
    parameters: RunInstancesRequestTypeDef = {
        "ClientToken": request.token,
        "ImageId": request.ami,
        "InstanceType": cast("InstanceTypeType", request.instance_type),
        "MinCount": request.least,
        "MaxCount": request.count,
        "UserData": request.user_data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required"},
        "BlockDeviceMappings": [root_disk],
        "NetworkInterfaces": _interfaces(request),
        "Placement": placement,
        "InstanceMarketOptions": _market_options(request),
        "CapacityReservationSpecification": {
            "CapacityReservationTarget": {"CapacityReservationId": request.reservation} if request.reservation else {}
        },
        "TagSpecifications": [_tagged(kind, request.tags) for kind in _TAGGED[request.market]],
    }
    if request.instance_profile:
        parameters["IamInstanceProfile"] = {"Name": request.instance_profile}
    if request.key_name:
        parameters["KeyName"] = request.key_name
    return parameters


def _interfaces(request: InstanceRequest) -> list[InstanceNetworkInterfaceSpecificationTypeDef]:
    """Return the network interfaces for RunInstances. The first is the primary one, which alone carries IP traffic."""
    primary = _interface(request, "efa" if (0, 0) in request.efa else "interface", card=0, device=0)
    others = [_interface(request, "efa-only", card, device) for card, device in request.efa if (card, device) != (0, 0)]
    # with several interfaces, EC2 refuses a public address at the launch, and never assigns one by itself:
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/working-with-ip-addresses.html
    # (read 2026-11-24 in a stored copy)
    if not others:
        primary["AssociatePublicIpAddress"] = True
    return [primary, *others]


def _interface(
    request: InstanceRequest, kind: str, card: int, device: int
) -> InstanceNetworkInterfaceSpecificationTypeDef:
    """Return one network interface for RunInstances. `kind`: "efa", "efa-only" (no IP traffic), or "interface"."""
    interface: InstanceNetworkInterfaceSpecificationTypeDef = {
        "NetworkCardIndex": card,
        "DeviceIndex": device,
        "InterfaceType": kind,
        "SubnetId": request.subnet,
        "DeleteOnTermination": True,
    }
    if request.security_group:
        interface["Groups"] = [request.security_group]
    return interface


def _market_options(request: InstanceRequest) -> InstanceMarketOptionsRequestTypeDef:
    """Return the options of RunInstances for a spot instance or a capacity block; an empty dict for on demand."""
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
    """Return filters for EC2's list requests that find a pool's resources by their tags.

    Args:
        owner: the owner of the pools, as user@host. It may contain "*", which matches any text, such as "ann@*".
        pool: the pool's name; None or "" matches any pool.
    """
    return [
        {"Name": "tag:skypool-owner", "Values": [owner]},
        {"Name": "tag:skypool-pool", "Values": [pool or "*"]},
    ]


def pool_instances(ec2: EC2Client, filters: Sequence[FilterTypeDef]) -> list[InstanceTypeDef]:
    """Return EC2's records of the instances that match the filters, except terminated ones."""
    there: FilterTypeDef = {"Name": "instance-state-name", "Values": _STATES_THERE}
    pages = ec2.get_paginator("describe_instances").paginate(Filters=[*filters, there])
    return [each for reservation in all_of(pages, "Reservations") for each in reservation["Instances"]]


def instances(ec2: EC2Client, ids: Sequence[str]) -> list[InstanceTypeDef]:
    """Return EC2's records of the instances with these ids, also of terminated ones.

    Returns an empty list if EC2 does not know one of the ids (yet), even if it knows the others.
    """
    with accepted("InvalidInstanceID.NotFound"):
        pages = ec2.get_paginator("describe_instances").paginate(InstanceIds=ids)
        return [each for reservation in all_of(pages, "Reservations") for each in reservation["Instances"]]
    return []


def living(ec2: EC2Client, ids: Sequence[str]) -> list[str]:
    """Return the ids of those instances that EC2 lists and that have not ended. Unknown ids are left out."""
    return [each["InstanceId"] for each in pool_instances(ec2, [{"Name": "instance-id", "Values": ids}])]


def terminate(ec2: EC2Client, ids: Sequence[str]) -> list[str]:
    """Ask EC2 to end instances, and return the ids of those that have not ended yet. Does not wait.

    Raises:
        ProviderError: EC2 does not know one of the ids, and so ends none of the instances. Also if EC2 refused for
            another reason.
    """
    told = ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"]
    return [each["InstanceId"] for each in told if each["CurrentState"]["Name"] != "terminated"]


def tag(ec2: EC2Client, ids: Sequence[str], tags: Mapping[str, str]) -> None:
    """Set tags on the resources with these ids. A tag with the same key is replaced, and other tags stay."""
    ec2.create_tags(Resources=ids, Tags=tag_list(tags))


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of a pool other than an instance.

    Attributes:
        kind: "key-pair", "security-group", "placement-group", "elastic-ip" or "volume".
        id: the id or name that the request to delete the resource takes.
        tagged_as: the id that the request to tag the resource takes. Only key pairs and placement groups have a name as
            `id`, so that it differs.
    """

    kind: str
    id: str
    tagged_as: str
    tags: Mapping[str, str]


def pool_resources(ec2: EC2Client, filters: Sequence[FilterTypeDef]) -> Iterator[Resource]:
    """Yield the key pairs, groups, Elastic IP addresses and unused disks that match the filters.

    An unused disk is attached to no instance. Requests are sent while the result is read.
    """
    for key in ec2.describe_key_pairs(Filters=filters)["KeyPairs"]:
        yield Resource("key-pair", key["KeyName"], key["KeyPairId"], tag_values(key["Tags"]))
    for group in all_of(ec2.get_paginator("describe_security_groups").paginate(Filters=filters), "SecurityGroups"):
        yield Resource("security-group", group["GroupId"], group["GroupId"], tag_values(group["Tags"]))
    for place in ec2.describe_placement_groups(Filters=filters)["PlacementGroups"]:
        yield Resource("placement-group", place["GroupName"], place["GroupId"], tag_values(place["Tags"]))
    for address in ec2.describe_addresses(Filters=filters)["Addresses"]:
        yield Resource("elastic-ip", address["AllocationId"], address["AllocationId"], tag_values(address["Tags"]))
    unused: FilterTypeDef = {"Name": "status", "Values": ["available"]}
    for disk in all_of(ec2.get_paginator("describe_volumes").paginate(Filters=[*filters, unused]), "Volumes"):
        yield Resource("volume", disk["VolumeId"], disk["VolumeId"], tag_values(disk["Tags"]))


def remove(ec2: EC2Client, kind: str, id: str, seconds: float) -> None:
    """Remove a resource. Does not raise if the resource no longer exists.

    An IAM policy that allows only the removal of tagged resources also refuses the removal of a resource that is gone,
    because it has no tags. So EC2 is asked after such a refusal whether the resource exists.

    Args:
        kind: "key-pair", "security-group", "placement-group", "elastic-ip" or "volume".
        id: the id of the resource. For a key pair and a placement group, it is the name.
        seconds: for how long to repeat the request while instances that are ending still use the resource.

    Raises:
        ProviderError: the resource is still in use after `seconds`, the kind is unknown, or AWS refused for another
            reason.
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
            case "elastic-ip":
                release_address(ec2, id)
            case "volume":
                with accepted("InvalidVolume.NotFound"):
                    ec2.delete_volume(VolumeId=id)
            case _:
                raise ProviderError(
                    f"cannot remove {kind} {id} from AWS: skypool does not know this kind of resource; remove "
                    f"{id} in the AWS console",
                    provider="aws",
                )

    try:
        patiently(
            attempt, seconds, "DependencyViolation", "InvalidPlacementGroup.InUse", _ADDRESS_IN_USE, "VolumeInUse"
        )
    except AccessError:
        if _exists(ec2, kind, id):
            raise


def _exists(ec2: EC2Client, kind: str, id: str) -> bool:
    """Return True if EC2 lists the resource of this kind, such as "volume", with this id or name."""

    def by(name: str) -> list[FilterTypeDef]:
        return [{"Name": name, "Values": [id]}]

    match kind:  # EC2 has no pages of key pairs, placement groups and addresses
        case "key-pair":
            return bool(ec2.describe_key_pairs(Filters=by("key-name"))["KeyPairs"])
        case "security-group":
            return bool(
                all_of(ec2.get_paginator("describe_security_groups").paginate(Filters=by("group-id")), "SecurityGroups")
            )
        case "placement-group":
            return bool(ec2.describe_placement_groups(Filters=by("group-name"))["PlacementGroups"])
        case "elastic-ip":
            return bool(ec2.describe_addresses(Filters=by("allocation-id"))["Addresses"])
        case _:
            return bool(all_of(ec2.get_paginator("describe_volumes").paginate(Filters=by("volume-id")), "Volumes"))


# --- Elastic IP addresses ------------------------------------------------------------------------------------


def addresses(ec2: EC2Client, pool: str, token: str) -> list[AddressTypeDef]:
    """Return EC2's records of the Elastic IP addresses of one order, found by its pool and token, sorted by id."""
    filters: list[FilterTypeDef] = [
        {"Name": "tag:skypool-pool", "Values": [pool]},
        {"Name": "tag:skypool-token", "Values": [token]},
    ]
    return sorted(ec2.describe_addresses(Filters=filters)["Addresses"], key=lambda each: each["AllocationId"])


def allocate_address(ec2: EC2Client, zone: str, tags: Mapping[str, str]) -> str:
    """Allocate an Elastic IP address with these tags, and return its id. It is billed from now on until its release.

    A Local Zone needs an address of its own network border group, named like the zone without its last letter:
    https://docs.aws.amazon.com/local-zones/latest/ug/available-local-zones.html (read 2026-11-24 in a stored copy). The
    group of all other zones is the region.

    Args:
        ec2: the client of the region. It must not repeat requests: each one would allocate another address.
        zone: the zone of the instance that will get the address, such as "us-east-1a".

    Raises:
        QuotaError: the account has as many addresses as it may have in the region.
        NoAnswer: the answer was lost, so an address with these tags may have been allocated.
        ProviderError: AWS refused for another reason.
    """
    made = ec2.allocate_address(
        Domain="vpc",
        NetworkBorderGroup=zone[:-1],
        TagSpecifications=[_tagged("elastic-ip", tags)],
    )
    return str(made["AllocationId"])


def associate_address(ec2: EC2Client, id: str, interface: str) -> None:
    """Give an Elastic IP address to a network interface. Does nothing if the interface has this address already.

    Raises:
        ProviderError: another interface has the address, the instance does not run yet, or AWS refused for another
            reason.
    """
    ec2.associate_address(AllocationId=id, NetworkInterfaceId=interface, AllowReassociation=False)


def release_address(ec2: EC2Client, id: str) -> None:
    """Release an Elastic IP address, which ends its cost, and return when EC2 no longer lists it.

    Does nothing if the address no longer exists.

    In a default network, EC2 would also take the address away from a running instance:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ReleaseAddress.html (read 2026-11-24 in a stored copy).
    So an address that an interface has is not released.

    Raises:
        ProviderError: an interface has the address, EC2 still lists it after 20 s, or AWS refused for another reason.
    """
    with accepted("InvalidAllocationID.NotFound"):
        for each in ec2.describe_addresses(AllocationIds=[id])["Addresses"]:
            if each.get("AssociationId"):
                raise ProviderError(
                    f"cannot release Elastic IP address {each['PublicIp']} ({id}), because interface "
                    f"{each.get('NetworkInterfaceId', '')} of instance {each.get('InstanceId', '')} has the address; "
                    "end the instance first",
                    provider="aws",
                    code=_ADDRESS_IN_USE,
                )
            ec2.release_address(AllocationId=id)
            if not soon(lambda: not _exists(ec2, "elastic-ip", id), _RELEASING):
                raise ProviderError(
                    f"EC2 still lists Elastic IP address {each['PublicIp']} ({id}) {_RELEASING:g} s after it was "
                    "released, so it may be billed; try again",
                    provider="aws",
                )


# --- what the account may do ---------------------------------------------------------------------------------


def disk_size(image: ImageTypeDef) -> int:
    """Return the size in GiB of an image's own root disk; 0 if EC2 does not say it."""
    sizes = [
        disk.get("Ebs", {}).get("VolumeSize", 0)
        for disk in image["BlockDeviceMappings"]
        if disk["DeviceName"] == image["RootDeviceName"]
    ]
    return max(sizes, default=0)


def identity(sts: STSClient) -> str:
    """Return the ARN, AWS's full name, of the user or role to whom the credentials belong."""
    return str(sts.get_caller_identity()["Arn"])


def quota(quotas: ServiceQuotasClient, code: str) -> float:
    """Return a quota of the account in one region, or AWS's default if the account has no value of its own.

    For quotas of EC2 instances, the number counts vCPUs that may run at once.

    Args:
        code: the quota's code, such as "L-417A185B".
    """
    with accepted("NoSuchResourceException"):
        return float(quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
    return float(quotas.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])


def may_run_instances(ec2: EC2Client, request: InstanceRequest) -> None:
    """Test with a dry run whether the account may rent these instances. Raises ProviderError if it may not.

    The dry run has all parameters of the request, as permissions may depend on them: image, subnet, tags, market.
    """
    parameters = _run_parameters(request)
    parameters["DryRun"] = True
    with accepted("DryRunOperation"):
        ec2.run_instances(**parameters)


def may_import_keys(ec2: EC2Client, tags: Mapping[str, str]) -> None:
    """Test with a dry run whether the account may import key pairs with tags. Raises ProviderError if not."""
    with accepted("DryRunOperation"):
        ec2.import_key_pair(
            DryRun=True,
            KeyName=TRIAL_NAME,
            PublicKeyMaterial=_TRIAL_KEY,
            TagSpecifications=[_tagged("key-pair", tags)],
        )


def may_create_security_groups(ec2: EC2Client, vpc: str, tags: Mapping[str, str]) -> None:
    """Test with a dry run whether the account may make security groups with tags in a network.

    Raises ProviderError if not.
    """
    with accepted("DryRunOperation"):
        ec2.create_security_group(
            DryRun=True,
            GroupName=TRIAL_NAME,
            Description="only a question",
            VpcId=vpc,
            TagSpecifications=[_tagged("security-group", tags)],
        )


def may_create_placement_groups(ec2: EC2Client, tags: Mapping[str, str]) -> None:
    """Test with a dry run whether the account may make placement groups with tags. Raises ProviderError if not."""
    with accepted("DryRunOperation"):
        ec2.create_placement_group(
            DryRun=True,
            GroupName=TRIAL_NAME,
            Strategy="cluster",
            TagSpecifications=[_tagged("placement-group", tags)],
        )


def may_allocate_addresses(ec2: EC2Client, tags: Mapping[str, str]) -> None:
    """Test with a dry run whether the account may allocate Elastic IP addresses with tags.

    Raises ProviderError if not.
    """
    with accepted("DryRunOperation"):
        ec2.allocate_address(DryRun=True, Domain="vpc", TagSpecifications=[_tagged("elastic-ip", tags)])
