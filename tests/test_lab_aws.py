"""The AWS of the lab, as an unpatched boto3 sees it: every point in which it is to be like the real one."""

from __future__ import annotations

import base64
import functools
import gzip
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, HTTPClientError

from tests.conftest import eventually
from tests.lab.aws import AWS
from tests.lab.aws_wire import Call
from tests.lab.machines import Lab, Machine

UBUNTU = "/aws/service/canonical/ubuntu/server/{}/stable/current/{}/hvm/{}/ami-id"
NOBLE = UBUNTU.format("24.04", "amd64", "ebs-gp3")
NVIDIA = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
NVIDIA_ARM = NVIDIA.replace("x86_64", "arm64")
NEURON = "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id"
NEURON_TORCH = "/aws/service/neuron/dlami/pytorch-2.9/ubuntu-24.04/latest/image_id"
ONCE = Config(retries={"mode": "standard", "total_max_attempts": 1})


@functools.cache
def clients(url: str, region: str) -> tuple[Any, Any]:
    """For EC2 and SSM; every world of this process is at the same place, and a client takes long to make."""
    keys = {"aws_access_key_id": "somebody", "aws_secret_access_key": "else"}
    ec2, ssm = (
        boto3.client(name, region_name=region, endpoint_url=url, config=ONCE, **keys) for name in ("ec2", "ssm")
    )
    return ec2, ssm


class Cloud:
    """One region of it, as a client that never tries twice sees it."""

    def __init__(self, world: AWS, region: str = "us-east-1") -> None:
        self.world = world
        self.region = region
        self.ec2, self.ssm = clients(world.url, region)

    def ami(self, parameter: str = NOBLE) -> str:
        got = self.ssm.get_parameter(Name=parameter)
        return str(got["Parameter"]["Value"])

    def run(self, kind: str = "t3.micro", number: int = 1, *, ami: str = NOBLE, **options: Any) -> list[str]:
        """Launch; the ids."""
        asked = {"ImageId": self.ami(ami), "InstanceType": kind, "MinCount": number, "MaxCount": number, **options}
        return [each["InstanceId"] for each in self.ec2.run_instances(**asked)["Instances"]]

    def see(self, instance_id: str) -> dict[str, Any]:
        found = self.ec2.describe_instances(InstanceIds=[instance_id])["Reservations"]
        seen: dict[str, Any] = found[0]["Instances"][0]
        return seen

    def state(self, instance_id: str) -> str:
        return str(self.see(instance_id)["State"]["Name"])

    def end(self, *ids: str) -> None:
        self.ec2.terminate_instances(InstanceIds=list(ids))
        self.world.wait(lambda: not self.world.rentals)

    def machine(self, instance_id: str) -> Machine:
        found = self.world.rental(instance_id).machine
        assert found is not None
        return found


@pytest.fixture
def cloud(aws_api: AWS) -> Cloud:
    return Cloud(aws_api)


@pytest.fixture
def real(aws: AWS, lab: Lab) -> Cloud:
    """With machines, and the key pair `me` of the lab's client key."""
    made = Cloud(aws)
    made.ec2.import_key_pair(KeyName="me", PublicKeyMaterial=lab.public_key.encode())
    return made


def refused(call: Callable[[], object]) -> tuple[str, int, str]:
    """Code, HTTP status and text of what a call is refused with."""
    with pytest.raises(ClientError) as caught:
        call()
    error, said = caught.value.response["Error"], caught.value.response["ResponseMetadata"]
    return error["Code"], said["HTTPStatusCode"], error["Message"]


SPOT = {"MarketType": "spot"}


def in_zone(zone: str) -> dict[str, str]:
    return {"AvailabilityZone": zone}


# --- a launch ------------------------------------------------------------------------------------------------


def test_boto3_finds_it_by_its_environment_alone(aws_api: AWS) -> None:
    assert boto3.client("sts", region_name="eu-west-1").get_caller_identity()["Account"] == "123456789012"
    assert aws_api.journal[0].action == "GetCallerIdentity"


def test_an_instance_begins_and_ends_in_steps_and_leaves_nothing(cloud: Cloud) -> None:
    world = cloud.world
    world.delays.pending = world.delays.address = world.delays.ending = 60
    (one,) = cloud.run(KeyName=_key(cloud), TagSpecifications=[{"ResourceType": "instance", "Tags": [_tag("a", "b")]}])
    assert cloud.state(one) == "pending"
    world.clock.advance(61)
    assert cloud.state(one) == "running"
    assert "PublicIpAddress" not in cloud.see(one)
    assert cloud.see(one)["PrivateIpAddress"].startswith("172.31.")
    world.clock.advance(61)
    assert cloud.see(one)["PublicIpAddress"]
    assert world.count()["volumes"] == world.count()["instances"] == 1
    ended = cloud.ec2.terminate_instances(InstanceIds=[one])["TerminatingInstances"][0]
    assert (ended["PreviousState"]["Name"], ended["CurrentState"]["Name"]) == ("running", "shutting-down")
    assert cloud.state(one) == "shutting-down"
    assert world.count()["volumes"] == 1
    world.clock.advance(61)
    assert cloud.see(one)["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert cloud.state(one) == "terminated"
    cloud.ec2.delete_key_pair(KeyName="mine")
    assert world.left() == {}
    world.clock.advance(3601)
    assert refused(lambda: cloud.see(one))[0] == "InvalidInstanceID.NotFound"


def _key(cloud: Cloud) -> str:
    blob = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(range(32))
    line = b"ssh-ed25519 " + base64.b64encode(blob) + b" somebody"
    return str(cloud.ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=line)["KeyName"])


def _tag(key: str, value: str) -> dict[str, str]:
    return {"Key": key, "Value": value}


def test_terminating_is_idempotent_and_touches_none_if_one_is_unknown(cloud: Cloud) -> None:
    (one,) = cloud.run()
    both = [one, "i-0123456789abcdef0"]
    code, status, text = refused(lambda: cloud.ec2.terminate_instances(InstanceIds=both))
    assert (code, status) == ("InvalidInstanceID.NotFound", 400)
    assert text == "The instance ID 'i-0123456789abcdef0' does not exist"
    assert cloud.state(one) != "shutting-down"
    cloud.end(one)
    again = cloud.ec2.terminate_instances(InstanceIds=[one])["TerminatingInstances"][0]
    assert again["CurrentState"]["Name"] == again["PreviousState"]["Name"] == "terminated"


def test_a_stopped_instance_is_still_counted_and_its_disk_too(cloud: Cloud) -> None:
    world = cloud.world
    world.capacity(1, "t3.micro")
    (one,) = cloud.run()
    cloud.ec2.stop_instances(InstanceIds=[one])
    eventually(lambda: cloud.state(one) == "stopped")
    assert world.left() == {"instances": 1, "volumes": 1, "network_interfaces": 1}
    (other,) = cloud.run(Placement=in_zone(cloud.see(one)["Placement"]["AvailabilityZone"]))
    assert refused(lambda: cloud.ec2.start_instances(InstanceIds=[one]))[0] == "InsufficientInstanceCapacity"
    cloud.ec2.terminate_instances(InstanceIds=[other])
    eventually(lambda: cloud.state(other) == "terminated")
    cloud.ec2.start_instances(InstanceIds=[one])
    eventually(lambda: cloud.state(one) == "running")


def test_what_is_launched_together_is_numbered(cloud: Cloud) -> None:
    seen = [cloud.see(each) for each in cloud.run(number=3)]
    assert sorted(each["AmiLaunchIndex"] for each in seen) == [0, 1, 2]
    assert {each["SecurityGroups"][0]["GroupName"] for each in seen} == {"default"}


def test_a_new_instance_may_not_be_found_at_first(cloud: Cloud) -> None:
    cloud.world.delays.unseen = 2
    (one,) = cloud.run()
    assert refused(lambda: cloud.see(one))[0] == "InvalidInstanceID.NotFound"
    assert cloud.ec2.describe_instances()["Reservations"] == []
    assert cloud.see(one)["InstanceId"] == one
    assert len(cloud.ec2.describe_instances()["Reservations"]) == 1


def test_an_old_disk_a_wrong_image_and_long_user_data_are_refused(cloud: Cloud) -> None:
    small = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 50}}]
    code, status, text = refused(lambda: cloud.run("g5.xlarge", ami=NVIDIA, BlockDeviceMappings=small))
    assert (code, status) == ("InvalidBlockDeviceMapping", 400)
    assert text.startswith("Volume of size 50GB is smaller than snapshot 'snap-0")
    assert text.endswith("expect size >= 100GB")
    assert refused(lambda: cloud.run("g5g.xlarge"))[0] == "InvalidParameterValue"  # arm64 on amd64
    assert refused(lambda: cloud.run(ImageId="ami-00000000000000000"))[0] == "InvalidAMIID.NotFound"
    assert refused(lambda: cloud.run(ImageId="ubuntu"))[0] == "InvalidAMIID.Malformed"
    assert refused(lambda: cloud.run(UserData="#" * 16385))[0] == "InvalidParameterValue"
    assert refused(lambda: cloud.run("t9.micro"))[0] == "InvalidParameterValue"
    assert refused(lambda: cloud.run(KeyName="nobody's"))[0] == "InvalidKeyPair.NotFound"
    assert refused(lambda: cloud.run(SecurityGroupIds=["sg-00000000"]))[0] == "InvalidGroup.NotFound"
    assert refused(lambda: cloud.run(SubnetId="subnet-00000000"))[0] == "InvalidSubnetID.NotFound"
    assert refused(lambda: cloud.run(LaunchTemplate={"LaunchTemplateName": "x"}))[0] == "UnsupportedOperation"
    assert cloud.world.left() == {}


def test_root_volumes_are_as_large_as_asked_and_may_outlive_their_instance(cloud: Cloud) -> None:
    disk = {"VolumeSize": 120, "VolumeType": "gp3", "DeleteOnTermination": False}
    (one,) = cloud.run("g5.xlarge", ami=NVIDIA, BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": disk}])
    (other,) = cloud.run()
    volumes = cloud.ec2.describe_volumes()["Volumes"]
    assert sorted(each["Size"] for each in volumes) == [8, 120]
    cloud.end(one, other)
    assert cloud.world.left() == {"volumes": 1}


def test_a_dry_run_says_whether_it_would_have_worked(cloud: Cloud) -> None:
    assert refused(lambda: cloud.run(DryRun=True))[:2] == ("DryRunOperation", 412)
    assert refused(lambda: cloud.ec2.describe_instances(DryRun=True))[0] == "DryRunOperation"
    cloud.world.deny("RunInstances")
    code, status, text = refused(lambda: cloud.run(DryRun=True))
    assert (code, status) == ("UnauthorizedOperation", 403)
    assert "ec2:RunInstances" in text
    assert "Encoded authorization failure message" in text
    assert cloud.world.left() == {}


def test_several_cards_do_not_get_a_public_address(cloud: Cloud) -> None:
    card = {"DeviceIndex": 0, "AssociatePublicIpAddress": True}
    cards = [card, {"DeviceIndex": 1, "NetworkCardIndex": 1}]
    assert refused(lambda: cloud.run("p5.48xlarge", ami=NVIDIA, NetworkInterfaces=cards))[0] == (
        "InvalidParameterCombination"
    )
    (one,) = cloud.run("p5.48xlarge", ami=NVIDIA, NetworkInterfaces=[card])
    eventually(lambda: "PublicIpAddress" in cloud.see(one))


def cards(*interfaces: tuple[int, int, str]) -> list[dict[str, Any]]:
    return [{"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": way} for card, device, way in interfaces]


def test_an_instance_has_the_interfaces_that_were_asked_for(cloud: Cloud) -> None:
    asked = cards((0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only"), (2, 1, "interface"))
    (one,) = cloud.run("p5.48xlarge", ami=NVIDIA, NetworkInterfaces=asked)
    seen = cloud.see(one)["NetworkInterfaces"]
    places = [
        (each["Attachment"]["NetworkCardIndex"], each["Attachment"]["DeviceIndex"], each["InterfaceType"])
        for each in seen
    ]
    assert places == [(0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only"), (2, 1, "interface")]
    assert ["PrivateIpAddress" in each for each in seen] == [True, False, False, True]
    cloud.end(one)
    assert cloud.world.left() == {}


# --- Elastic IP addresses ------------------------------------------------------------------------------------


def test_an_address_is_billed_until_it_is_released_whatever_becomes_of_its_instance(cloud: Cloud) -> None:
    ec2 = cloud.ec2
    tags = [{"ResourceType": "elastic-ip", "Tags": [_tag("pool", "x")]}]
    made = ec2.allocate_address(Domain="vpc", TagSpecifications=tags)
    (one,) = cloud.run("p5.48xlarge", ami=NVIDIA, NetworkInterfaces=cards((0, 0, "efa"), (1, 0, "efa-only")))
    eventually(lambda: cloud.state(one) == "running")
    assert "PublicIpAddress" not in cloud.see(one)
    primary, other = (each["NetworkInterfaceId"] for each in cloud.see(one)["NetworkInterfaces"])
    name = made["AllocationId"]
    given = functools.partial(ec2.associate_address, AllocationId=name)
    assert refused(lambda: given(InstanceId=one))[0] == "InvalidInstanceID"
    assert refused(lambda: given(NetworkInterfaceId=other))[0] == "UnsupportedOperation"
    first = given(NetworkInterfaceId=primary, AllowReassociation=False)["AssociationId"]
    assert given(NetworkInterfaceId=primary, AllowReassociation=False)["AssociationId"] == first
    assert cloud.see(one)["PublicIpAddress"] == made["PublicIp"]
    (seen,) = ec2.describe_addresses(Filters=[{"Name": "tag:pool", "Values": ["x"]}])["Addresses"]
    assert (seen["InstanceId"], seen["AssociationId"]) == (one, first)
    cloud.end(one)
    (seen,) = ec2.describe_addresses(AllocationIds=[name])["Addresses"]
    assert "AssociationId" not in seen
    assert cloud.world.left() == {"addresses": 1}
    ec2.release_address(AllocationId=name)
    assert refused(lambda: ec2.release_address(AllocationId=name))[0] == "InvalidAllocationID.NotFound"
    assert cloud.world.left() == {}


def test_an_address_has_one_instance_and_moves_only_if_it_may(cloud: Cloud) -> None:
    ec2, world = cloud.ec2, cloud.world
    world.delays.pending = 60
    ids = cloud.run(number=2)
    name = ec2.allocate_address()["AllocationId"]
    code, status, text = refused(lambda: ec2.associate_address(AllocationId=name, InstanceId=ids[0]))
    assert (code, status) == ("IncorrectInstanceState", 400)
    assert "is attached is not in a valid state for this operation" in text
    world.clock.advance(61)
    ec2.associate_address(AllocationId=name, InstanceId=ids[0])
    move = functools.partial(ec2.associate_address, AllocationId=name, InstanceId=ids[1])
    assert refused(lambda: move(AllowReassociation=False))[0] == "Resource.AlreadyAssociated"
    moved = move()["AssociationId"]
    assert "PublicIpAddress" not in cloud.see(ids[0])
    ec2.disassociate_address(AssociationId=moved)
    assert "PublicIpAddress" not in cloud.see(ids[1])
    ec2.associate_address(AllocationId=name, InstanceId=ids[1])
    ec2.release_address(AllocationId=name)  # of a default network: that takes it away
    assert "PublicIpAddress" not in cloud.see(ids[1])


def test_an_address_stays_in_its_network_border_group(cloud: Cloud) -> None:
    (one,) = cloud.run()
    eventually(lambda: cloud.state(one) == "running")
    made = cloud.ec2.allocate_address(Domain="vpc", NetworkBorderGroup="us-east-1-dfw-2")
    assert made["NetworkBorderGroup"] == "us-east-1-dfw-2"
    give = functools.partial(cloud.ec2.associate_address, AllocationId=made["AllocationId"], InstanceId=one)
    assert refused(give)[0] == "InvalidParameterCombination"
    assert refused(lambda: cloud.ec2.allocate_address(NetworkBorderGroup="us-west-2"))[0] == "InvalidParameterValue"


def test_an_account_has_five_addresses_in_a_region(cloud: Cloud) -> None:
    for _ in range(5):
        cloud.ec2.allocate_address(Domain="vpc")
    code, status, text = refused(lambda: cloud.ec2.allocate_address(Domain="vpc"))
    assert (code, status, text) == (
        "AddressLimitExceeded", 400, "The maximum number of addresses has been reached."
    )  # fmt: skip
    assert Cloud(cloud.world, "us-west-2").ec2.allocate_address(Domain="vpc")["PublicIp"]


# --- idempotence ---------------------------------------------------------------------------------------------


def test_a_token_launches_once_in_a_region(cloud: Cloud) -> None:
    world = cloud.world
    (one,) = cloud.run(ClientToken="t")
    assert cloud.run(ClientToken="t") == [one]
    code, status, _ = refused(lambda: cloud.run("t3.small", ClientToken="t"))
    assert (code, status) == ("IdempotentParameterMismatch", 400)
    assert cloud.see(one)["ClientToken"] == "t"
    west = Cloud(world, "us-west-2")
    assert west.run("t3.small", ClientToken="t") != [one]
    cloud.ec2.terminate_instances(InstanceIds=[one])
    eventually(lambda: cloud.state(one) == "terminated")
    assert refused(lambda: cloud.run(ClientToken="t"))[0] == "IdempotentInstanceTerminated"


def test_a_token_of_a_refused_launch_can_be_used_again(cloud: Cloud) -> None:
    cloud.world.capacity(0)
    assert refused(lambda: cloud.run(ClientToken="t"))[0] == "InsufficientInstanceCapacity"
    cloud.world.capacity(None)
    assert cloud.run(ClientToken="t")


def test_many_launches_at_once_with_one_token_are_one(cloud: Cloud) -> None:
    ami = cloud.ami()
    found: list[str] = []

    def launch() -> None:
        client = cloud.world.client(config=ONCE)
        got = client.run_instances(ImageId=ami, InstanceType="t3.micro", MinCount=2, MaxCount=2, ClientToken="t")
        found.extend(each["InstanceId"] for each in got["Instances"])

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == cloud.world.count()["instances"] == 2


# --- capacity, quotas, prices --------------------------------------------------------------------------------


def test_capacity_is_used_up_and_given_back(cloud: Cloud) -> None:
    world = cloud.world
    world.capacity(0, "p5.48xlarge")
    world.capacity(2, "p5.48xlarge", "us-east-1a", "on-demand")
    here: dict[str, Any] = {"ami": NVIDIA, "Placement": in_zone("us-east-1a")}
    two = cloud.run("p5.48xlarge", 2, **here)
    code, status, text = refused(lambda: cloud.run("p5.48xlarge", **here))
    assert (code, status) == ("InsufficientInstanceCapacity", 500)
    assert text == (
        "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested "
        "(us-east-1a). Our system will be working on provisioning additional capacity."
    )
    world.capacity(1, "p5.48xlarge", "us-east-1[bc]")
    said = refused(lambda: cloud.run("p5.48xlarge", **here))[2]
    assert said.endswith("by not specifying an Availability Zone in your request or choosing us-east-1b, us-east-1c.")
    assert refused(lambda: cloud.run("p5.48xlarge", InstanceMarketOptions=SPOT, **here))[2] == (
        "There is no Spot capacity available that matches your request."
    )
    (elsewhere,) = cloud.run("p5.48xlarge", ami=NVIDIA)
    assert cloud.see(elsewhere)["Placement"]["AvailabilityZone"] in ("us-east-1b", "us-east-1c")
    cloud.ec2.terminate_instances(InstanceIds=two)
    eventually(lambda: cloud.state(two[0]) == "terminated")
    assert len(cloud.run("p5.48xlarge", 2, **here)) == 2


def test_as_many_as_there_are_but_no_fewer_than_the_least(cloud: Cloud) -> None:
    cloud.world.capacity(3, "t3.micro")
    zone = in_zone("us-east-1a")
    assert refused(lambda: cloud.run(MinCount=4, MaxCount=8, Placement=zone))[0] == "InsufficientInstanceCapacity"
    assert cloud.world.left() == {}
    assert len(cloud.run(MinCount=2, MaxCount=8, Placement=zone)) == 3


def test_a_zone_that_does_not_offer_the_type(cloud: Cloud) -> None:
    east = Cloud(cloud.world, "us-east-2")
    code, status, text = refused(lambda: cloud.run("p6-b200.48xlarge", ami=NVIDIA, Placement=in_zone("us-east-1a")))
    assert (code, status) == ("Unsupported", 400)
    assert text == (
        "Your requested instance type (p6-b200.48xlarge) is not supported in your requested Availability Zone "
        "(us-east-1a). Please retry your request by not specifying an Availability Zone or choosing us-east-1c."
    )
    assert refused(lambda: cloud.run("trn2.48xlarge", ami=NEURON))[0] == "Unsupported"
    assert east.run("trn2.48xlarge", ami=NEURON)


def test_quotas_count_vcpus_by_family_and_market(cloud: Cloud) -> None:
    world = cloud.world
    world.quota(192, "P")
    (one,) = cloud.run("p5.48xlarge", ami=NVIDIA)
    code, status, text = refused(lambda: cloud.run("p4d.24xlarge", ami=NVIDIA))
    assert (code, status) == ("VcpuLimitExceeded", 400)
    assert "than your current vCPU limit of 192 allows for the instance bucket" in text
    assert cloud.run("g5.xlarge", ami=NVIDIA)
    assert cloud.run("p4d.24xlarge", ami=NVIDIA, InstanceMarketOptions=SPOT)
    world.quota(0, "Trn", "spot", "us-west-2")
    west = Cloud(world, "us-west-2")
    code, status, text = refused(lambda: west.run("trn1.2xlarge", ami=NEURON, InstanceMarketOptions=SPOT))
    assert (code, status, text) == ("MaxSpotInstanceCountExceeded", 400, "Max spot instance count exceeded")
    cloud.ec2.terminate_instances(InstanceIds=[one])
    eventually(lambda: cloud.state(one) == "terminated")
    assert cloud.run("p4d.24xlarge", ami=NVIDIA)


@pytest.mark.parametrize(
    ("code", "family", "market"),
    [("L-417A185B", "P", "on-demand"), ("L-7212CCBC", "P", "spot"), ("L-2C3B7624", "Trn", "on-demand")],
)
def test_service_quotas_tells_the_same(aws_api: AWS, code: str, family: str, market: str) -> None:
    quotas = aws_api.client("service-quotas")
    before = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
    aws_api.quota(64, family, market)
    after = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
    assert (after["Value"], after["QuotaName"]) == (64.0, before["QuotaName"])
    assert before["Value"] > 1000
    listed = quotas.list_service_quotas(ServiceCode="ec2")["Quotas"]
    assert after in listed
    missing = refused(lambda: quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-00000000"))
    assert missing[:2] == ("NoSuchResourceException", 400)


def test_a_spot_launch_needs_a_price_high_enough(cloud: Cloud) -> None:
    cloud.world.spot_price("us-east-1a", "g5.xlarge", 0.5)
    low = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.4"}}
    zone = in_zone("us-east-1a")
    code, status, text = refused(lambda: cloud.run("g5.xlarge", ami=NVIDIA, InstanceMarketOptions=low, Placement=zone))
    assert (code, status) == ("SpotMaxPriceTooLow", 400)
    assert text.endswith(
        "request price of 0.4 is lower than the minimum required Spot request fulfillment price of 0.5."
    )
    (one,) = cloud.run("g5.xlarge", ami=NVIDIA, InstanceMarketOptions=SPOT, Placement=zone)
    seen = cloud.see(one)
    assert seen["InstanceLifecycle"] == "spot"
    request = cloud.ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[seen["SpotInstanceRequestId"]])
    (row,) = request["SpotInstanceRequests"]
    assert (row["InstanceId"], row["State"], row["Status"]["Code"]) == (one, "active", "fulfilled")
    assert refused(lambda: cloud.ec2.stop_instances(InstanceIds=[one]))[0] == "UnsupportedOperation"
    (other,) = cloud.run("g5.xlarge", ami=NVIDIA, Placement=zone)
    assert "InstanceLifecycle" not in cloud.see(other)
    assert "SpotInstanceRequestId" not in cloud.see(other)


def test_spot_prices_now_and_then(cloud: Cloud) -> None:
    asked: dict[str, Any] = {"InstanceTypes": ["p5.48xlarge"], "ProductDescriptions": ["Linux/UNIX"]}
    now = cloud.ec2.describe_spot_price_history(StartTime=datetime.now(UTC), **asked)["SpotPriceHistory"]
    zones = [each["AvailabilityZone"] for each in now]
    assert zones
    assert len(zones) == len(set(zones))
    assert all(isinstance(each["SpotPrice"], str) and float(each["SpotPrice"]) > 1 for each in now)
    assert all(each["Timestamp"] < datetime.now(UTC) for each in now)
    week = cloud.ec2.describe_spot_price_history(StartTime=datetime.now(UTC) - timedelta(days=7), **asked)
    assert len(week["SpotPriceHistory"]) == 3 * len(now)
    cloud.world.spot_price("us-east-1a", "p5.48xlarge", 12.5)
    where = {"Filters": [{"Name": "availability-zone", "Values": ["us-east-1a"]}]}
    (one,) = cloud.ec2.describe_spot_price_history(StartTime=datetime.now(UTC), **asked, **where)["SpotPriceHistory"]
    assert one["SpotPrice"] == "12.500000"
    pages = cloud.ec2.get_paginator("describe_spot_price_history").paginate(
        StartTime=datetime.now(UTC), PaginationConfig={"PageSize": 50}
    )
    rows = [row for page in pages for row in page["SpotPriceHistory"]]
    assert len({(row["InstanceType"], row["AvailabilityZone"]) for row in rows}) == len(rows) > 50


def test_the_price_list_is_json_in_strings_with_rows_that_nobody_wants(aws_api: AWS) -> None:
    pricing = aws_api.client("pricing")
    plain = {
        "instanceType": "p5.48xlarge", "regionCode": "us-east-1", "operatingSystem": "Linux", "tenancy": "Shared",
        "preInstalledSw": "NA", "capacitystatus": "Used", "marketoption": "OnDemand",
    }  # fmt: skip

    def found(**wanted: str) -> list[float]:
        filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
        pages = pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters)
        products = [json.loads(text) for page in pages for text in page["PriceList"]]
        dimensions = [
            dimension
            for product in products
            for term in product["terms"]["OnDemand"].values()
            for dimension in term["priceDimensions"].values()
        ]
        assert all(dimension["unit"] == "Hrs" for dimension in dimensions)
        return [float(dimension["pricePerUnit"]["USD"]) for dimension in dimensions]

    (price,) = found(**plain)
    assert 50 < price < 120
    assert sorted(found(**{name: plain[name] for name in plain if name != "marketoption"})) == [0.0, price]
    assert len(found(regionCode="us-east-1", productFamily="Compute Instance")) > 300  # three pages at least
    assert found(instanceType="no.such") == []
    elsewhere = aws_api.client("pricing", "us-west-2")
    assert refused(lambda: elsewhere.get_products(ServiceCode="AmazonEC2"))[1] == 400


# --- the catalogue -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_types_come_in_pages_and_only_those_of_the_region(cloud: Cloud) -> None:
    pages = list(cloud.ec2.get_paginator("describe_instance_types").paginate())
    names = [each["InstanceType"] for page in pages for each in page["InstanceTypes"]]
    assert len(pages) > 5
    assert all(len(page["InstanceTypes"]) <= 100 for page in pages)
    assert len(names) == len(set(names))
    assert "p5.48xlarge" in names
    assert "trn2.3xlarge" not in names  # it is in no region of the US
    assert (
        refused(lambda: cloud.ec2.describe_instance_types(InstanceTypes=["trn2.3xlarge"]))[0] == "InvalidInstanceType"
    )
    filters = [{"Name": "instance-type", "Values": ["p5*"]}]
    some = cloud.ec2.describe_instance_types(Filters=filters)["InstanceTypes"]
    assert {each["InstanceType"] for each in some} >= {"p5.48xlarge", "p5en.48xlarge"}


def test_the_odd_facts_are_told_as_the_real_api_tells_them(cloud: Cloud) -> None:
    def told(kind: str, region: str) -> dict[str, Any]:
        client = Cloud(cloud.world, region).ec2
        found: dict[str, Any] = client.describe_instance_types(InstanceTypes=[kind])["InstanceTypes"][0]
        return found

    trn2 = told("trn2.48xlarge", "us-east-2")["NeuronInfo"]["NeuronDevices"][0]
    assert (trn2["Count"], trn2["MemoryInfo"]["SizeInMiB"]) == (16, 524288)
    cloud.world.opt_in("ap-south-2")
    assert "NeuronInfo" not in told("trn2u.48xlarge", "ap-south-2")
    g6f = told("g6f.large", "us-east-1")["GpuInfo"]["Gpus"][0]
    assert (g6f["Count"], g6f["LogicalGpuCount"], g6f["GpuPartitionSize"]) == (0, 1, 0.125)
    inf2 = told("inf2.xlarge", "us-east-1")
    assert (
        inf2["NeuronInfo"]["NeuronDevices"][0]["Count"] == inf2["InferenceAcceleratorInfo"]["Accelerators"][0]["Count"]
    )
    assert told("p5.48xlarge", "us-east-1")["NetworkInfo"]["EfaInfo"]["MaximumEfaInterfaces"] == 32


def test_offerings_by_zone_take_patterns(cloud: Cloud) -> None:
    filters = [{"Name": "instance-type", "Values": ["p6-b*"]}]
    got = cloud.ec2.describe_instance_type_offerings(LocationType="availability-zone", Filters=filters)
    rows = {(each["InstanceType"], each["Location"]) for each in got["InstanceTypeOfferings"]}
    assert ("p6-b200.48xlarge", "us-east-1c") in rows
    assert ("p6-b200.48xlarge", "us-east-1a") not in rows


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
def test_public_parameters_name_images_that_can_be_launched(aws_api: AWS, region: str) -> None:
    cloud = Cloud(aws_api, region)
    for release, disk in (("22.04", "ebs-gp2"), ("24.04", "ebs-gp3")):
        for cpu, kind in (("amd64", "t3.micro"), ("arm64", "t4g.micro")):
            assert cloud.run(kind, ami=UBUNTU.format(release, cpu, disk))
    assert cloud.run("g5.xlarge", ami=NVIDIA)
    if region == "us-east-1":
        assert cloud.run("g5g.xlarge", ami=NVIDIA_ARM)
        assert cloud.run("inf2.xlarge", ami=NEURON)
        assert cloud.run(ImageId=f"resolve:ssm:{NOBLE}")
    (image,) = cloud.ec2.describe_images(ImageIds=[cloud.ami(NVIDIA)])["Images"]
    assert image["Name"].startswith("Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)")
    assert image["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 100


def test_a_parameter_that_is_not_there(cloud: Cloud) -> None:
    ssm = cloud.world.client("ssm")
    wrong = NVIDIA.replace("24.04", "18.04")
    assert refused(lambda: ssm.get_parameter(Name=wrong))[:2] == ("ParameterNotFound", 400)
    got = ssm.get_parameters(Names=[NVIDIA, wrong])
    assert [each["Name"] for each in got["Parameters"]] == [NVIDIA]
    assert got["InvalidParameters"] == [wrong]
    pages = ssm.get_paginator("get_parameters_by_path").paginate(Path="/aws/service/neuron/dlami", Recursive=True)
    assert NEURON in [each["Name"] for page in pages for each in page["Parameters"]]
    ssm.put_parameter(Name="mine", Value="1", Type="String")
    assert ssm.get_parameter(Name="mine")["Parameter"]["Value"] == "1"


# --- groups, keys, reservations ------------------------------------------------------------------------------


def test_a_placement_group_is_kept_and_cannot_go_while_it_is_used(cloud: Cloud) -> None:
    tags = [{"ResourceType": "placement-group", "Tags": [_tag("pool", "x")]}]
    made = cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster", TagSpecifications=tags)
    assert made["PlacementGroup"]["State"] == "available"
    code = refused(lambda: cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster"))[0]
    assert code == "InvalidPlacementGroup.Duplicate"
    (one,) = cloud.run("p5.48xlarge", ami=NVIDIA, Placement={"GroupName": "g"})
    assert cloud.see(one)["Placement"]["GroupName"] == "g"
    assert refused(lambda: cloud.ec2.delete_placement_group(GroupName="g"))[0] == "InvalidPlacementGroup.InUse"
    cloud.end(one)
    found = cloud.ec2.describe_placement_groups(Filters=[{"Name": "tag:pool", "Values": ["x"]}])["PlacementGroups"]
    assert [each["GroupName"] for each in found] == ["g"]
    assert cloud.world.left() == {"placement_groups": 1}
    cloud.ec2.delete_placement_group(GroupName="g")
    assert refused(lambda: cloud.ec2.delete_placement_group(GroupName="g"))[0] == "InvalidPlacementGroup.Unknown"
    code = refused(lambda: cloud.run("p5.48xlarge", ami=NVIDIA, Placement={"GroupName": "g"}))[0]
    assert code == "InvalidPlacementGroup.Unknown"


def test_a_type_is_only_in_groups_of_its_strategies(cloud: Cloud) -> None:
    cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")
    code, _, text = refused(lambda: cloud.run("t3.micro", Placement={"GroupName": "g"}))
    assert code == "InvalidParameterCombination"
    assert "not supported by the 't3.micro' instance type" in text


@pytest.mark.parametrize(
    ("kind", "interfaces", "says"),
    [
        ("g5.xlarge", [(0, 0, "efa")], "g5.xlarge instances do not support Elastic Fabric Adapters"),
        ("g5.xlarge", [(0, 0, "interface"), (0, 1, "efa-only")], "g5.xlarge instances do not support Elastic Fabric"),
        ("p6-b300.48xlarge", [(0, 0, "efa")], "network card 0 of p6-b300.48xlarge"),
        ("p6-b300.48xlarge", [(0, 0, "interface"), (0, 1, "efa-only")], "network card 0 of p6-b300.48xlarge"),
        ("p6-b300.48xlarge", [(1, 0, "efa-only")], "A primary network interface"),
        ("p5.48xlarge", [(0, 0, "efa"), (32, 1, "efa-only")], "index '32' is not valid"),
        ("p5.48xlarge", [(0, 0, "efa-only")], "cannot be the primary"),
        ("p5.48xlarge", [(0, 0, "efa"), (1, 1, "efa-only"), (1, 1, "interface")], "requires a unique device index"),
        ("p5.48xlarge", [(0, 0, "efa"), (1, 2, "efa-only")], "exceeds the limit of 2 for network card 1"),
        ("p5.4xlarge", [(0, 0, "efa"), (0, 1, "efa-only")], "EFA interface count 2 exceeds the limit of 1"),
    ],
)
def test_interfaces_are_only_as_the_cards_of_the_type_have_them(
    cloud: Cloud, kind: str, interfaces: list[tuple[int, int, str]], says: str
) -> None:
    subnet = cloud.ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    told = [
        {"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": way, "SubnetId": subnet}
        for card, device, way in interfaces
    ]
    code, _, text = refused(lambda: cloud.run(kind, ami=NVIDIA, NetworkInterfaces=told))
    assert says in text
    assert code in ("InvalidParameterCombination", "InvalidParameterValue", "AttachmentLimitExceeded")
    assert cloud.world.left() == {}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("aws:mine", "x", "reserved for internal use"),
        ("k" * 129, "x", "from 1 to 128"),
        ("k", "x" * 257, "256 characters"),
    ],
)
def test_tags_that_ec2_does_not_take_are_refused_at_a_create_and_later(
    cloud: Cloud, key: str, value: str, says: str
) -> None:
    tags = [{"ResourceType": "instance", "Tags": [_tag(key, value)]}]
    assert says in refused(lambda: cloud.run(TagSpecifications=tags))[2]
    (one,) = cloud.run()
    assert says in refused(lambda: cloud.ec2.create_tags(Resources=[one], Tags=[_tag(key, value)]))[2]


def test_answers_have_the_namespace_as_ec2_spells_it(cloud: Cloud) -> None:
    """With its last "/"; without it, clients that look elements up by namespace read empty lists."""
    seen: list[bytes] = []
    cloud.ec2.meta.events.register("after-call.ec2.*", lambda http_response, **_: seen.append(http_response.content))
    cloud.run()
    cloud.ec2.describe_instances()
    cloud.ec2.describe_placement_groups()
    assert len(seen) >= 3
    assert all(b'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"' in each for each in seen if b"xmlns" in each)
    assert any(b"DescribeInstancesResponse xmlns" in each for each in seen)


def test_the_default_network_is_open_to_the_internet(cloud: Cloud) -> None:
    (vpc,) = cloud.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    attached = [{"Name": "attachment.vpc-id", "Values": [vpc["VpcId"]]}]
    (gateway,) = cloud.ec2.describe_internet_gateways(Filters=attached)["InternetGateways"]
    assert gateway["Attachments"] == [{"State": "available", "VpcId": vpc["VpcId"]}]
    in_vpc = [{"Name": "vpc-id", "Values": [vpc["VpcId"]]}]
    (table,) = cloud.ec2.describe_route_tables(Filters=in_vpc)["RouteTables"]
    assert any(each["Main"] for each in table["Associations"])
    routes = {each["DestinationCidrBlock"]: (each["GatewayId"], each["State"]) for each in table["Routes"]}
    assert routes == {vpc["CidrBlock"]: ("local", "active"), "0.0.0.0/0": (gateway["InternetGatewayId"], "active")}
    subnets = cloud.ec2.describe_subnets(Filters=in_vpc)["Subnets"]
    assert subnets
    assert all(each["MapPublicIpOnLaunch"] and each["DefaultForAz"] for each in subnets)
    assert cloud.world.left() == {}


def test_an_address_needs_a_network_that_is_open_to_the_internet(cloud: Cloud) -> None:
    vpc = cloud.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = cloud.ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24", AvailabilityZone="us-east-1a")["Subnet"]
    (one,) = cloud.run(SubnetId=subnet["SubnetId"])
    eventually(lambda: cloud.state(one) == "running")
    name = cloud.ec2.allocate_address(Domain="vpc")["AllocationId"]
    given = functools.partial(cloud.ec2.associate_address, AllocationId=name, InstanceId=one)
    assert refused(given)[0] == "Gateway.NotAttached"
    gateway = cloud.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    cloud.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    given()
    assert refused(lambda: cloud.ec2.release_address(AllocationId=name))[0] == "InvalidIPAddress.InUse"


@pytest.mark.parametrize(
    ("reserved", "placement", "says"),
    [
        ({}, {"GroupName": "mine"}, ""),  # fewer machines than there are
        ({"kind": "capacity-block", "end": 86400}, {"GroupName": "mine"}, "cannot be used with a Capacity Block"),
        ({"group": "near"}, {"GroupName": "mine"}, "do not match those of the launch"),
        ({"group": "near"}, {}, "do not match those of the launch"),
        ({"tenancy": "dedicated"}, {}, "do not match those of the launch"),
    ],
)
def test_a_reservation_is_not_used_in_a_foreign_placement_group(
    cloud: Cloud, reserved: dict[str, Any], placement: dict[str, str], says: str
) -> None:
    for name in ("mine", "near"):
        cloud.ec2.create_placement_group(GroupName=name, Strategy="cluster")
    block = cloud.world.reserve("p5.48xlarge", "us-east-1b", 2, **reserved)
    options: dict[str, Any] = {
        "Placement": placement,
        "CapacityReservationSpecification": {"CapacityReservationTarget": {"CapacityReservationId": block}},
    }
    if "kind" in reserved:
        options["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    code, _, text = refused(lambda: cloud.run("p5.48xlarge", 2, ami=NVIDIA, **options))
    assert says in text
    assert code in ("InvalidParameterCombination", "InvalidParameterValue", "ReservationCapacityExceeded")
    assert cloud.world.count()["instances"] == 0


def test_what_is_new_may_not_be_known_everywhere_at_first(cloud: Cloud) -> None:
    cloud.world.delays.unknown = 2
    group = cloud.ec2.create_security_group(GroupName="g", Description="d")["GroupId"]
    rule = [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]}]

    def let_in() -> None:
        cloud.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rule)

    assert cloud.ec2.describe_security_groups()["SecurityGroups"] == []
    assert refused(let_in)[0] == "InvalidGroup.NotFound"
    let_in()
    cloud.ec2.create_placement_group(GroupName="p", Strategy="cluster")
    for _ in range(2):
        code = refused(lambda: cloud.run("p5.48xlarge", ami=NVIDIA, Placement={"GroupName": "p"}))[0]
        assert code == "InvalidPlacementGroup.Unknown"
    cloud.run("p5.48xlarge", ami=NVIDIA, Placement={"GroupName": "p"})


def test_a_placement_group_gets_tags_later_together_with_other_resources(cloud: Cloud) -> None:
    group = cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")["PlacementGroup"]["GroupId"]
    (one,) = cloud.run()
    for value in ("x", "y"):
        cloud.ec2.create_tags(Resources=[group, one], Tags=[_tag("pool", value)])
    assert cloud.see(one)["Tags"] == [_tag("pool", "y")]
    (seen,) = cloud.ec2.describe_placement_groups(GroupIds=[group])["PlacementGroups"]
    assert seen["Tags"] == [_tag("pool", "y")]
    cloud.ec2.create_tags(Resources=[group], Tags=[_tag("other", "z")])
    assert refused(lambda: cloud.ec2.create_tags(Resources=["pg-00000000000000000"], Tags=[_tag("a", "b")]))[1] == 400


def test_a_security_group_cannot_go_while_it_is_used(cloud: Cloud) -> None:
    group = cloud.ec2.create_security_group(GroupName="g", Description="d")["GroupId"]
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    cloud.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[inside])
    (one,) = cloud.run(SecurityGroupIds=[group])
    code, status, text = refused(lambda: cloud.ec2.delete_security_group(GroupId=group))
    assert (code, status, text) == ("DependencyViolation", 400, f"resource {group} has a dependent object")
    cloud.end(one)
    assert cloud.world.left() == {"security_groups": 1}
    other = cloud.ec2.create_security_group(GroupName="h", Description="d")["GroupId"]
    cloud.ec2.authorize_security_group_ingress(GroupId=other, IpPermissions=[inside])
    assert refused(lambda: cloud.ec2.delete_security_group(GroupId=group))[0] == "DependencyViolation"
    cloud.ec2.delete_security_group(GroupId=other)
    cloud.ec2.delete_security_group(GroupId=group)
    assert cloud.world.left() == {}


@pytest.mark.parametrize("text", [b"nonsense", b"ssh-ed25519 AAAA", b"ssh-dss AAAAB3NzaC1kc3M=", b""])
def test_a_malformed_key_is_refused(cloud: Cloud, text: bytes) -> None:
    code, status, _ = refused(lambda: cloud.ec2.import_key_pair(KeyName="k", PublicKeyMaterial=text))
    assert (code, status) == ("InvalidKey.Format", 400)
    assert cloud.world.left() == {}


def test_a_key_pair_comes_once(cloud: Cloud) -> None:
    _key(cloud)
    assert refused(lambda: _key(cloud))[0] == "InvalidKeyPair.Duplicate"


def test_a_capacity_block_is_launched_into_and_ends_with_its_instances(cloud: Cloud) -> None:
    world = cloud.world
    world.capacity(0, "p5.48xlarge")
    block = world.reserve("p5.48xlarge", "us-east-1b", 2, kind="capacity-block", start=3600, end=7200)
    options: dict[str, Any] = {
        "ami": NVIDIA, "InstanceMarketOptions": {"MarketType": "capacity-block"},
        "CapacityReservationSpecification": {"CapacityReservationTarget": {"CapacityReservationId": block}},
    }  # fmt: skip
    told = cloud.ec2.describe_capacity_reservations(CapacityReservationIds=[block])["CapacityReservations"][0]
    assert (told["State"], told["ReservationType"], told["AvailableInstanceCount"]) == (
        "scheduled",
        "capacity-block",
        2,
    )
    assert refused(lambda: cloud.run("p5.48xlarge", **options))[0] == "InvalidCapacityReservationState"
    world.clock.advance(3601)
    two = cloud.run("p5.48xlarge", 2, **options)
    seen = cloud.see(two[0])
    assert (seen["InstanceLifecycle"], seen["CapacityReservationId"]) == ("capacity-block", block)
    assert seen["Placement"]["AvailabilityZone"] == "us-east-1b"
    assert refused(lambda: cloud.run("p5.48xlarge", **options))[0] == "ReservationCapacityExceeded"
    assert refused(lambda: cloud.run("p5.4xlarge", **options))[0] == "InvalidParameterValue"
    world.clock.advance(1801)
    eventually(lambda: {cloud.state(each) for each in two} == {"terminated"})
    world.clock.advance(1801)
    told = cloud.ec2.describe_capacity_reservations()["CapacityReservations"][0]
    assert told["State"] == "expired"


def test_an_open_reservation_is_used_without_being_named(cloud: Cloud) -> None:
    cloud.world.capacity(0, "p4d.24xlarge")
    zone = in_zone("us-east-1a")
    assert refused(lambda: cloud.run("p4d.24xlarge", ami=NVIDIA, Placement=zone))[0] == "InsufficientInstanceCapacity"
    targeted = cloud.world.reserve("p4d.24xlarge", "us-east-1a")
    assert refused(lambda: cloud.run("p4d.24xlarge", ami=NVIDIA))[0] == "InsufficientInstanceCapacity"
    cloud.world.capacity(1, "p4d.24xlarge", "us-east-1b")
    made = cloud.ec2.create_capacity_reservation(
        InstanceType="p4d.24xlarge", InstancePlatform="Linux/UNIX", AvailabilityZone="us-east-1b", InstanceCount=1
    )["CapacityReservation"]["CapacityReservationId"]
    (one,) = cloud.run("p4d.24xlarge", ami=NVIDIA)
    assert cloud.see(one)["CapacityReservationId"] == made != targeted
    assert cloud.ec2.cancel_capacity_reservation(CapacityReservationId=made)["Return"] is True


# --- refusals and rates --------------------------------------------------------------------------------------


def test_a_region_that_was_not_opted_in_to(aws_api: AWS) -> None:
    sydney = Cloud(aws_api, "ap-southeast-4")
    assert refused(sydney.ec2.describe_instances)[:2] == ("AuthFailure", 401)
    listed = Cloud(aws_api).ec2.describe_regions()["Regions"]
    assert len(listed) == 17
    everywhere = Cloud(aws_api).ec2.describe_regions(AllRegions=True)["Regions"]
    assert {each["RegionName"]: each["OptInStatus"] for each in everywhere}["ap-southeast-4"] == "not-opted-in"
    aws_api.opt_in("ap-southeast-4")
    assert sydney.ec2.describe_instances()["Reservations"] == []
    assert len(Cloud(aws_api).ec2.describe_regions()["Regions"]) == 18


@pytest.mark.parametrize(
    ("expired", "ec2", "sts", "ssm"),
    [
        (False, "AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException"),
        (True, "RequestExpired", "ExpiredToken", "ExpiredTokenException"),
    ],
)
def test_bad_credentials_are_told_of_in_each_services_words(
    aws_api: AWS, expired: bool, ec2: str, sts: str, ssm: str
) -> None:
    aws_api.bad_credentials(expired=expired)
    assert refused(Cloud(aws_api).ec2.describe_instances)[0] == ec2
    assert refused(aws_api.client("sts").get_caller_identity)[0] == sts
    assert refused(lambda: aws_api.client("ssm").get_parameter(Name=NOBLE))[0] == ssm
    aws_api.heal()
    assert aws_api.client("sts").get_caller_identity()["Account"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("OptInRequired", 403), ("PendingVerification", 400), ("RequestLimitExceeded", 503), ("Unavailable", 503),
     ("InternalError", 500), ("Blocked", 403), ("InsufficientHostCapacity", 500)],
)  # fmt: skip
def test_any_error_comes_as_often_as_asked(cloud: Cloud, code: str, status: int) -> None:
    cloud.world.fail("RunInstances", code, times=2)
    assert refused(cloud.run)[:2] == (code, status)
    assert refused(cloud.run)[:2] == (code, status)
    assert len(cloud.run()) == 1


def test_botocore_repeats_what_the_real_one_makes_it_repeat(cloud: Cloud) -> None:
    cloud.world.capacity(0)
    patient = cloud.world.client(config=Config(retries={"mode": "standard", "total_max_attempts": 2}))
    asked = {"ImageId": cloud.ami(), "InstanceType": "t3.micro", "MinCount": 1, "MaxCount": 1}
    assert refused(lambda: patient.run_instances(**asked))[0] == "InsufficientInstanceCapacity"
    assert len(cloud.world.calls("RunInstances")) == 2
    tokens = {call.params["ClientToken"] for call in cloud.world.calls("RunInstances")}
    assert len(tokens) == 1


def test_requests_and_instances_come_from_buckets(cloud: Cloud) -> None:
    world = cloud.world
    world.throttle.requests = True
    world.capacity(0)
    world.clock.speed = 0.001
    codes = [refused(cloud.run)[0] for _ in range(6)]
    assert codes == ["InsufficientInstanceCapacity"] * 5 + ["RequestLimitExceeded"]
    world.clock.advance(10)
    assert refused(cloud.run)[0] == "InsufficientInstanceCapacity"
    code, status, _ = refused(lambda: cloud.run(number=1001))
    assert (code, status) == ("RequestLimitExceeded", 503)


@pytest.mark.slow
def test_a_thousand_at_once_are_all_that_the_bucket_holds(cloud: Cloud) -> None:
    assert len(cloud.run(number=1000)) == 1000
    assert refused(lambda: cloud.run(number=900))[0] == "RequestLimitExceeded"
    cloud.world.clock.advance(6)
    assert len(cloud.run(number=10)) == 10
    pages = cloud.ec2.get_paginator("describe_instances").paginate()
    assert sum(len(each["Instances"]) for page in pages for each in page["Reservations"]) == 1010
    cloud.end(*(each.id for each in cloud.world.rentals))


# --- faults and the journal ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "there"), [("before", 0), ("after", 1)])
def test_a_reply_gets_lost(cloud: Cloud, moment: str, there: int) -> None:
    ami = cloud.ami()
    cloud.world.drop("RunInstances", moment=moment)
    with pytest.raises(HTTPClientError):
        cloud.run(ImageId=ami, ClientToken="t")
    assert cloud.world.count()["instances"] == there
    (one,) = cloud.run(ImageId=ami, ClientToken="t")
    assert [each.id for each in cloud.world.rentals] == [one]


def test_a_lost_reply_is_made_up_for_by_botocore_with_the_same_token(cloud: Cloud) -> None:
    cloud.world.drop("RunInstances")
    patient = cloud.world.client(config=Config(retries={"mode": "standard", "total_max_attempts": 3}))
    got = patient.run_instances(ImageId=cloud.ami(), InstanceType="t3.micro", MinCount=1, MaxCount=1)
    assert [each["InstanceId"] for each in got["Instances"]] == [each.id for each in cloud.world.rentals]


def test_a_reply_comes_late(cloud: Cloud) -> None:
    cloud.world.delay("DescribeInstances", 0.3)
    began = time.monotonic()
    cloud.ec2.describe_instances()
    assert time.monotonic() - began >= 0.3
    cloud.world.delay("DescribeInstances", 2.0)
    hasty = cloud.world.client(config=Config(read_timeout=0.2, retries={"total_max_attempts": 1}))
    with pytest.raises(HTTPClientError, match="Read timeout"):
        hasty.describe_instances()


def test_the_journal_has_every_call_in_order(cloud: Cloud) -> None:
    moments: list[tuple[int, str, int]] = []
    world = cloud.world

    def note(call: Call, moment: str) -> None:
        moments.append((call.number, moment, len(world.life.rentals)))

    world.on_call = note
    cloud.run(number=2, ClientToken="t")
    world.fail("DescribeInstances", "Unavailable")
    refused(cloud.ec2.describe_instances)
    assert [(call.number, call.service, call.action) for call in world.journal] == [
        (1, "ssm", "GetParameter"), (2, "ec2", "RunInstances"), (3, "ec2", "DescribeInstances")
    ]  # fmt: skip
    assert world.calls("RunInstances")[0].params["MaxCount"] == 2
    assert (world.journal[1].status, world.journal[2].status, world.journal[2].error) == (200, 503, "Unavailable")
    assert moments[2:4] == [(2, "before", 0), (2, "after", 2)]


CLIENT = """
import boto3, sys
ec2 = boto3.client("ec2", region_name="us-east-1")
ec2.run_instances(ImageId=sys.argv[1], InstanceType="t3.micro", MinCount=1, MaxCount=1)
print("it goes on")
"""


@pytest.mark.parametrize(("moment", "there"), [("before", 0), ("after", 1)])
def test_a_client_can_be_killed_around_a_call(cloud: Cloud, moment: str, there: int) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT, cloud.ami()], stdout=subprocess.PIPE, text=True)

    def kill(call: Call, now: str) -> None:
        if (call.action, now) == ("RunInstances", moment):
            client.kill()
            client.wait()

    cloud.world.on_call = kill
    cloud.world.drop("RunInstances", moment=moment)
    assert client.communicate(timeout=30)[0] == ""
    eventually(lambda: cloud.world.calls("RunInstances"))
    eventually(lambda: cloud.world.count()["instances"] == there)


def test_faults_of_one_region_leave_the_others_alone(aws_api: AWS) -> None:
    aws_api.fail("*", "Unavailable", times=None, region="us-west-*")
    assert refused(Cloud(aws_api, "us-west-2").ec2.describe_instances)[0] == "Unavailable"
    assert Cloud(aws_api).ec2.describe_instances()["Reservations"] == []


def test_what_fails_in_the_lab_itself_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExceptionGroup, match="the lab's AWS failed"), AWS() as world:
        monkeypatch.setattr(world.life, "begin", lambda rentals: 1 / 0)
        assert refused(Cloud(world).run)[0] == "InternalError"


def test_a_hook_that_fails_fails_the_test() -> None:
    with pytest.raises(ExceptionGroup, match="the lab's AWS failed"), AWS() as world:
        world.on_call = lambda call, moment: 1 / 0
        assert Cloud(world).ec2.describe_regions()["Regions"]


def test_a_call_that_it_does_not_know_is_refused_in_words(cloud: Cloud) -> None:
    scores = functools.partial(cloud.ec2.get_spot_placement_scores, InstanceTypes=["p5.48xlarge"], TargetCapacity=1)
    assert refused(scores) == ("InvalidAction", 400, "The lab's AWS does not know ec2:GetSpotPlacementScores.")
    fleet = {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"}
    config = [{"LaunchTemplateSpecification": {"LaunchTemplateName": "some", "Version": "1"}}]
    launch = functools.partial(
        cloud.ec2.create_fleet, TargetCapacitySpecification=fleet, LaunchTemplateConfigs=config, Type="instant"
    )
    assert refused(launch)[0] == "UnsupportedOperation"


def test_a_new_world_is_empty(cloud: Cloud) -> None:
    assert cloud.world.left() == {}
    assert cloud.ec2.describe_instances()["Reservations"] == []


# --- machines ------------------------------------------------------------------------------------------------

ASK = """
TOKEN=$(curl -sS -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token)
ask() { curl -sS -w ' %{http_code}\\n' -H "X-aws-ec2-metadata-token: $TOKEN" "http://169.254.169.254/latest/$1"; }
"""


def ssh(machine: Machine, command: str) -> str:
    argv = [*machine.ssh_argv("ubuntu"), command]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout


def test_an_instance_is_a_machine_reached_at_its_public_address(real: Cloud) -> None:
    script = f"#!/bin/sh\n{ASK}\nask meta-data/instance-id >/said\nask user-data >>/said\n"
    ids = real.run(number=2, KeyName="me", UserData=script)
    eventually(lambda: all("PublicIpAddress" in real.see(each) for each in ids))
    for each in ids:
        machine = real.machine(each)
        assert real.see(each)["PublicIpAddress"] == real.see(each)["PrivateIpAddress"] == machine.address
        machine.wait_booted()
        assert ssh(machine, "id -un; sudo cat /said").startswith(f"ubuntu\n{each} 200\n#!/bin/sh\n")
        assert "lab: sshd started" in real.ec2.get_console_output(InstanceId=each)["Output"]
    machines = [real.machine(each) for each in ids]
    real.end(*ids)
    assert not any(machine.is_running for machine in machines)
    assert real.world.left() == {"key_pairs": 1}


def test_user_data_may_be_cloud_config_and_packed(real: Cloud) -> None:
    text = "#cloud-config\nruncmd: [touch /here]\n"
    (one,) = real.run(KeyName="me", UserData=gzip.compress(text.encode()))
    machine = real.machine(one)
    assert machine.wait_booted() == 0
    assert machine.path("/here").exists()


def test_metadata_needs_a_token_and_has_no_credentials(real: Cloud) -> None:
    (one,) = real.run(KeyName="me", UserData="#!/bin/sh\n")
    machine = real.machine(one)
    machine.wait_booted()
    assert (
        machine.run("curl -sS -o /dev/null -w '%{http_code}' http://169.254.169.254/latest/meta-data/").stdout == "401"
    )
    paths = [
        "meta-data/placement/availability-zone", "meta-data/instance-type", "meta-data/local-ipv4",
        "meta-data/iam/security-credentials/", "meta-data/spot/instance-action",
    ]  # fmt: skip
    said = machine.run(ASK + "".join(f"ask {path}\n" for path in paths)).stdout.splitlines()
    zone = real.see(one)["Placement"]["AvailabilityZone"]
    assert said == [f"{zone} 200", "t3.micro 200", f"{machine.address} 200", " 404", " 404"]
    document = json.loads(machine.run(ASK + "ask dynamic/instance-identity/document").stdout.rpartition(" ")[0])
    assert (document["instanceId"], document["region"]) == (one, "us-east-1")


@pytest.mark.parametrize(("behaviour", "ends"), [("terminate", "terminated"), ("stop", "stopped")])
def test_a_shutdown_inside_ends_it_or_only_stops_it(real: Cloud, behaviour: str, ends: str) -> None:
    (one,) = real.run(InstanceInitiatedShutdownBehavior=behaviour, UserData="#!/bin/sh\nshutdown -h now\n")
    eventually(lambda: real.state(one) == ends)
    assert real.see(one)["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"
    assert real.world.count()["instances"] == real.world.count()["volumes"] == (behaviour == "stop")
    if behaviour == "stop":
        real.end(one)


def test_a_machine_with_devices_may_end_before_these_are_plugged_in(real: Cloud) -> None:
    options: dict[str, Any] = {"InstanceInitiatedShutdownBehavior": "terminate", "UserData": "#!/bin/sh\npoweroff\n"}
    (one,) = real.run("p5.48xlarge", ami=NVIDIA, **options)
    eventually(lambda: real.state(one) == "terminated")


def test_a_reboot_inside_keeps_it(real: Cloud) -> None:
    script = "#!/bin/sh\necho >>/ran\n"
    (one,) = real.run(KeyName="me", InstanceInitiatedShutdownBehavior="terminate", UserData=script)
    machine = real.machine(one)
    machine.wait_booted()
    machine.run("touch /kept; reboot", check=False)
    eventually(lambda: machine.is_running and machine.console().count(" boots") == 2)
    machine.wait_for_ssh()
    assert ssh(machine, "ls /kept; wc -l </ran") == "/kept\n1\n"
    assert real.state(one) == "running"


def test_a_spot_instance_is_told_before_it_goes(real: Cloud) -> None:
    (one,) = real.run(InstanceMarketOptions=SPOT, KeyName="me")
    machine = real.machine(one)
    machine.wait_for_ssh()
    real.world.rebalance(one)
    real.world.interrupt(one, notice=1.5)
    action = "ask meta-data/spot/instance-action; ask meta-data/events/recommendations/rebalance"
    notice, warning = machine.run(ASK + action).stdout.splitlines()
    told = json.loads(notice.removesuffix(" 200"))
    assert told["action"] == "terminate"
    assert abs(datetime.fromisoformat(told["time"]).timestamp() - time.time()) < 3
    assert "noticeTime" in json.loads(warning.removesuffix(" 200"))
    assert real.state(one) == "running"
    eventually(lambda: real.state(one) == "terminated")
    assert not machine.is_running
    seen = real.see(one)
    assert seen["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    (request,) = real.ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
    assert (request["State"], request["Status"]["Code"]) == ("closed", "instance-terminated-no-capacity")


def test_an_elastic_address_leads_to_its_machine(real: Cloud) -> None:
    asked = cards((0, 0, "interface"), (0, 1, "efa-only"), (1, 0, "efa-only"))
    (one,) = real.run("p5.48xlarge", ami=NVIDIA, KeyName="me", NetworkInterfaces=asked)
    machine = real.machine(one)
    machine.wait_for_ssh()
    eventually(lambda: real.state(one) == "running")
    made = real.ec2.allocate_address(Domain="vpc")
    primary = real.see(one)["NetworkInterfaces"][0]["NetworkInterfaceId"]
    given = real.ec2.associate_address(AllocationId=made["AllocationId"], NetworkInterfaceId=primary)
    assert (real.see(one)["PublicIpAddress"], real.see(one)["PrivateIpAddress"]) == (made["PublicIp"], machine.address)

    def answers() -> bool:
        try:
            socket.create_connection((made["PublicIp"], 22), timeout=0.5).close()
        except OSError:
            return False
        return True

    eventually(answers)
    real.ec2.disassociate_address(AssociationId=given["AssociationId"])
    assert not answers()
    real.ec2.release_address(AllocationId=made["AllocationId"])
    real.end(one)
    assert real.world.left() == {"key_pairs": 1}


def test_an_nvidia_image_has_a_driver_that_sees_the_cards_of_the_type(real: Cloud) -> None:
    (eight,) = real.run("p5.48xlarge", ami=NVIDIA, KeyName="me")
    (one,) = real.run("g5g.xlarge", ami=NVIDIA_ARM, KeyName="me")
    for each in (eight, one):
        real.machine(each).wait_for_ssh()
    query = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
    assert ssh(real.machine(eight), query).splitlines() == ["NVIDIA H100 80GB HBM3, 81559"] * 8
    assert len(ssh(real.machine(eight), "nvidia-smi -L; ls /sys/bus/pci/devices").splitlines()) == 16
    assert ssh(real.machine(one), query).splitlines() == ["NVIDIA T4G, 15360"]
    assert real.see(one)["Architecture"] == "arm64"


def test_a_neuron_image_has_tools_and_environments(real: Cloud) -> None:
    (one,) = real.run("trn1.32xlarge", ami=NEURON_TORCH, KeyName="me")
    machine = real.machine(one)
    machine.wait_for_ssh()
    devices = json.loads(ssh(machine, "/opt/aws/neuron/bin/neuron-ls --json-output"))
    assert len(devices) == 16
    assert {(each["nc_count"], each["memory_size"] >> 30) for each in devices} == {(2, 32)}
    assert "/opt/aws_neuronx_venv_pytorch_2_9\n" in ssh(machine, "ls -d /opt/aws_neuronx_venv_*")


def test_a_plain_image_has_cards_but_no_driver(real: Cloud) -> None:
    (one,) = real.run("g4dn.xlarge", KeyName="me")
    machine = real.machine(one)
    machine.wait_for_ssh()
    said = ssh(
        machine, "command -v nvidia-smi || echo none; cat /sys/bus/pci/devices/*/vendor; . /etc/os-release; echo $ID"
    )
    assert said.splitlines() == ["none", "0x10de", "ubuntu"]


def test_a_world_that_is_closed_leaves_no_machine(lab: Lab) -> None:
    with AWS(lab) as world:
        cloud = Cloud(world)
        machines = [cloud.machine(each) for each in cloud.run(number=2)]
    assert not any(machine.is_running or machine in lab.machines for machine in machines)
