"""What is odd about AWS, against the lab's AWS; and the contract."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import os
import re
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from moto.ec2.models.instance_types import INSTANCE_TYPES

import skypool as sky
import skypool_aws
from skypool.accelerators import parse
from skypool.drivers import tags
from skypool.drivers.userdata import GUARD
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    NoAnswer,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UsageError,
)
from skypool.model import Instance, Need, Offer, Order
from skypool.rental.ledger import Ledger
from skypool.testing import DriverContract
from skypool.wire.transport import SSH
from skypool_aws import AWS, _api, _boot_images, _catalog, _elastic_ips, _requests
from tests.forks import Fork
from tests.lab import aws_addresses, aws_calls, aws_facts, aws_launch
from tests.lab.aws import AWS as World
from tests.lab.aws_wire import TEXTS, Call
from tests.lab.launches import LATER, LEASE_OVER
from tests.providers.on_machines import OnMachines
from tests.providers.strings import PagedStrings
from tests.supplies import supply_of

pytestmark = pytest.mark.needs("openssh")

HERE = "us-east-1"
H100 = Need(accelerators=(parse("H100:8"),))
EXTRAS_30, EXTRAS_120 = 30 * 0.08 / 730 + 0.005, 120 * 0.08 / 730 + 0.005
CODES = {
    CredentialsError: "AuthFailure",
    AccessError: "UnauthorizedOperation",
    CapacityError: "InsufficientInstanceCapacity",
    QuotaError: "VcpuLimitExceeded",
    RateLimitError: "RequestLimitExceeded",
}


class Strings(PagedStrings):
    """The contract's control of the lab's AWS."""

    create, boot = "RunInstances", "pending"
    refusals = CODES

    def refuse(self, kind: type[ProviderError]) -> bool:
        if kind in CODES:
            self.world.fail(self.create, CODES[kind])
        return kind in CODES

    def interrupt(self, instance: Instance) -> None:
        self.world.interrupt(instance.id)

    def kill(self, instance: Instance) -> None:
        self.world.fail_instance(instance.id, "Server.InternalError", "its host is gone")
        self.world.wait(lambda: instance.id not in [each.id for each in self.world.rentals])

    def undying(self, instance: Instance, times: int | None) -> None:
        """It shuts down for so many questions more: only where there are no machines."""
        rental = self.world.rental(instance.id)
        rental.ending = rental.ending or Future()
        asked = len(self.world.calls("TerminateInstances"))

        def look(call: object, moment: str) -> None:
            ending = rental.ending
            over = times is not None and len(self.world.calls("TerminateInstances")) - asked >= times
            if over and ending is not None and not ending.done():
                ending.set_result(None)

        self.world.on_call = look
        look(None, "")


class TestAwsCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, aws_api: World, monkeypatch: pytest.MonkeyPatch) -> AWS:
        monkeypatch.setattr(AWS, "ending", 3.0)
        return AWS(region=HERE, ssh_from="203.0.113.7")

    @pytest.fixture
    def control(self, aws_api: World) -> Strings:
        return Strings(aws_api)

    @pytest.fixture
    def need(self) -> Need:
        return H100  # of which there are two types, so that few prices are asked for

    @pytest.fixture
    def secrets(self, aws_api: World) -> list[str]:
        return [aws_api.environment["AWS_SECRET_ACCESS_KEY"], aws_api.environment["AWS_ACCESS_KEY_ID"]]


# --- what is sold --------------------------------------------------------------------------------------------


def sold(world: World, need: Need, **settings: Any) -> list[Offer]:
    return list(AWS(**({"region": HERE} | settings)).offers(need))


def test_every_type_that_aws_describes_has_what_aws_says_of_it_but_for_what_misleads() -> None:
    fields = ("GpuInfo", "Gpus"), ("NeuronInfo", "NeuronDevices"), ("InferenceAcceleratorInfo", "Accelerators")
    some = 0
    for name, record in INSTANCE_TYPES.items():
        has = _catalog.accelerator(record)
        device = next((record[info][several][0] for info, several in fields if record.get(info)), None)
        if device is None:
            assert has is None or has.kind in ("fpga", "media") or name.startswith("trn2u"), name
            continue
        assert has is not None, name
        some += 1
        assert has.count == (device["Count"] or device["LogicalGpuCount"]), name
        seen = device["MemoryInfo"]["SizeInMiB"] / 1024
        assert has.name == "Trainium2" or abs(has.memory_gb - seen) < 0.1 * has.memory_gb, (name, has, seen)
    assert some > 60


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("trn2.48xlarge", "Trainium2:16"),
        ("trn2.3xlarge", "Trainium2"),
        ("trn2u.48xlarge", "Trainium2:16"),
        ("g6f.large", "L4/1of8"),
        ("gr6f.4xlarge", "L4/1of2"),
        ("inf1.6xlarge", "Inferentia1:4"),
        ("inf2.48xlarge", "Inferentia2:12"),
        ("p4d.24xlarge", "A100-40GB-SXM:8"),
        ("p4de.24xlarge", "A100-80GB-SXM:8"),
        ("p3dn.24xlarge", "V100-32GB-SXM:8"),
        ("g7e.2xlarge", "RTX_PRO_6000-Server"),
        ("p6-b300.48xlarge", "B300:8"),
        ("dl2q.24xlarge", "Qualcomm_AI100:8"),
        ("m7i.large", "None"),
    ],
)
def test_the_figures_that_mislead_are_not_believed(name: str, has: str) -> None:
    assert str(_catalog.accelerator(INSTANCE_TYPES[name])) == has


def test_a_type_that_nobody_knows_yet_has_what_its_devices_are_called() -> None:
    record = INSTANCE_TYPES["p5.48xlarge"] | {"InstanceType": "p9.96xlarge"}
    assert str(_catalog.accelerator(record)) == "H100-80GB-SXM:8"
    record["GpuInfo"] = {"Gpus": [record["GpuInfo"]["Gpus"][0] | {"Name": "X1000"}]}
    assert _catalog.accelerator(record) is None


def test_the_price_is_that_of_the_snapshot_with_disk_and_address(aws_api: World) -> None:
    offers = sold(aws_api, replace(H100, market="cheapest"))
    assert {each.instance_type for each in offers} == {"p5.4xlarge", "p5.48xlarge"}
    for each in offers:
        if each.market == "on-demand":
            bare = aws_facts.on_demand_price(HERE, each.instance_type)
        else:
            bare = aws_facts.spot_prices(HERE)[each.instance_type, each.zone]
        assert bare is not None
        assert each.usd_per_hour == pytest.approx(bare + EXTRAS_120)
        assert each.least_billed == 60
        assert each.quota == f"us-east-1 {each.market} {'P5' if each.market == 'spot' else 'P'}"
    assert {each.market for each in offers} == {"on-demand", "spot"}


def test_spot_machines_of_p5_have_another_quota_than_those_of_p4(aws_api: World) -> None:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-spot-limits.html"""
    quotas = {}
    for name in ("V100", "A100", "H100", "B200", "A10G"):
        for each in sold(aws_api, Need(accelerators=(parse(f"{name}:8"),), market="spot")):
            quotas[each.instance_type.partition(".")[0]] = each.quota
    quotas.pop("p3", None)
    older, newest = "us-east-1 spot P4, P3 and P2", "us-east-1 spot P6"
    expected = {"p3dn": older, "p4d": older, "p4de": older, "p5": "us-east-1 spot P5", "p6-b200": newest}
    assert quotas == {**expected, "g5": "us-east-1 spot G and VT"}
    aws_api.quota(0, "P", "spot")
    a100, h100 = (Need(accelerators=(parse(f"{name}:8"),), market="spot") for name in ("A100", "H100"))
    with pytest.raises(QuotaError):
        AWS(region=HERE, ssh_from="203.0.113.7").launch(sold(aws_api, a100)[0], order(token="a-1"))
    made = AWS(region=HERE, ssh_from="203.0.113.7").launch(sold(aws_api, h100)[0], order(token="b-1"))
    assert len(made) == 1


def test_a_larger_disk_costs_more(aws_api: World) -> None:
    small, large = (sold(aws_api, replace(H100, disk_gib=gib))[0] for gib in (0, 1000))
    assert large.usd_per_hour - small.usd_per_hour == pytest.approx(880 * 0.08 / 730)


def test_capacity_blocks_of_the_price_list_are_no_gift() -> None:
    def row(usd: str) -> str:
        terms = {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": usd}}}}}}
        return json.dumps(
            {"product": {"attributes": {"regionCode": HERE, "instanceType": "p5.48xlarge"}}, "terms": terms}
        )

    assert dict(_catalog.on_demand([row("55.04"), row("0.0000000000")])) == {(HERE, "p5.48xlarge"): 55.04}


def test_only_zones_that_have_the_type_are_offered_and_each_is_one_offer(aws_api: World) -> None:
    offers = [each for each in sold(aws_api, H100) if each.instance_type == "p5.48xlarge"]
    assert [each.zone for each in offers] == sorted(aws_facts.zones_of(HERE, "p5.48xlarge"))


def test_a_new_spot_price_is_the_one_that_counts(aws_api: World) -> None:
    aws_api.spot_price("us-east-1a", "p5.48xlarge", 7.5)
    offers = sold(aws_api, replace(H100, market="spot"))
    assert next(o for o in offers if (o.zone, o.instance_type) == ("us-east-1a", "p5.48xlarge")).usd_per_hour == (
        pytest.approx(7.5 + EXTRAS_120)
    )
    assert aws_api.calls("GetProducts") == []


def test_little_is_asked_for_one_accelerator(aws_api: World) -> None:
    sold(aws_api, H100)
    asked = sorted(call.action for call in aws_api.journal)
    assert asked == [
        "DescribeInstanceTypeOfferings",
        "DescribeInstanceTypes",
        "DescribeRegions",
        "DescribeSubnets",
        "GetProducts",
        "GetProducts",
    ]


def test_prices_are_asked_for_again_where_that_was_too_often(aws_api: World) -> None:
    aws_api.fail("GetProducts", "ThrottlingException", times=9)
    assert "p5.48xlarge" in {each.instance_type for each in sold(aws_api, H100)}
    assert len(aws_api.calls("GetProducts")) > 9


def test_a_type_whose_price_is_not_told_does_not_keep_the_others_back(aws_api: World) -> None:
    def asks(call: Call) -> bool:
        return any(each["Value"] == "g6.xlarge" for each in call.params["Filters"])

    aws_api.fail("GetProducts", "InternalFailure", times=None, status=500, when=asks)
    with pytest.warns(RuntimeWarning, match="prices may be missing"):
        kinds = {each.instance_type for each in sold(aws_api, Need(accelerators=(parse("L4"),)))}
    assert kinds
    assert "g6.xlarge" not in kinds


def test_what_aws_cannot_have_is_not_asked_for(aws_api: World) -> None:
    assert sold(aws_api, Need(accelerators=(parse("v5e-8"),))) == []
    assert aws_api.journal == []


def test_without_an_accelerator_the_smallest_of_each_family_that_is_enough_is_offered(aws_api: World) -> None:
    offers = sold(aws_api, Need(vcpus=3, memory_gib=6))
    assert {"c5.xlarge", "m5.xlarge", "m7i.xlarge"} <= {each.instance_type for each in offers}
    for each in offers:
        assert (each.vcpus or 0) >= 3
        assert (each.memory_gib or 0) >= 6
        assert each.instance_type[0] in "cmr"
        bare = aws_facts.on_demand_price(HERE, each.instance_type)
        assert bare is not None
        assert each.usd_per_hour == pytest.approx(bare + EXTRAS_30)
    assert {each.arch for each in offers} == {"x86_64", "arm64"}


def test_every_region_that_is_enabled_is_asked_unless_some_are_named(aws_api: World) -> None:
    aws_api.opt_in("ap-southeast-3")
    everywhere = AWS().offers(Need(accelerators=(parse("H200:8"),)))
    assert len({each.region for each in everywhere}) > 3
    assert {c.region for c in aws_api.calls("DescribeInstanceTypes")} == aws_api.opted_in
    aws_api.journal.clear()
    sold(aws_api, replace(H100, regions=("EU-*",)), region=["eu-west-1", "eu-north-1", "us-east-2"])
    assert {c.region for c in aws_api.calls("DescribeInstanceTypes")} == {"eu-west-1", "eu-north-1"}


def test_a_region_that_is_closed_to_the_account_keeps_nothing_back(aws_api: World) -> None:
    aws_api.deny("DescribeInstanceTypes", region="us-west-2")
    offers = sold(aws_api, H100, region=["us-east-1", "us-west-2"])
    assert {each.region for each in offers} == {"us-east-1"}
    aws_api.deny("DescribeInstanceTypes")
    with pytest.raises(AccessError, match="DescribeInstanceTypes"):
        sold(aws_api, H100)


def test_a_region_that_does_not_answer_is_told_of_in_offers_and_an_error_in_instances(aws_api: World) -> None:
    aws_api.fail("Describe*", "ServiceUnavailable", times=None, region="us-west-2")
    driver = AWS(region=["us-east-1", "us-west-2"])
    with pytest.warns(RuntimeWarning, match="us-west-2"):
        assert {each.region for each in driver.offers(H100)} == {"us-east-1"}
    with pytest.raises(NoAnswer, match="us-west-2"):
        driver.instances()


def test_a_region_without_subnets_says_what_to_do(aws_api: World) -> None:
    aws_api.fail("DescribeSubnets", "UnauthorizedOperation")
    with pytest.raises(AccessError):
        sold(aws_api, H100)
    with pytest.raises(AccessError, match="subnet="):
        sold(aws_api, H100, subnet="subnet-0123456789abcdef0")


# --- base images ---------------------------------------------------------------------------------------------


def based(accelerator: str, asked: str = "", arch: Any = "x86_64", **need: Any) -> tuple[str, int]:
    has = parse(accelerator) if accelerator else None
    return _boot_images.base(asked, Offer("aws", "x", accelerator=has, arch=arch), Need(**need))


@pytest.mark.parametrize(
    ("accelerator", "asked", "arch", "part", "gb"),
    [
        ("H100:8", "", "x86_64", "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04", 120),
        ("H100:8", "ubuntu-22.04", "x86_64", "deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04", 120),
        ("T4G", "", "arm64", "deeplearning/ami/arm64/base-oss-nvidia-driver-gpu-ubuntu-24.04", 120),
        ("V100-32GB:8", "", "x86_64", "ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3", 30),
        ("Trainium2:16", "", "x86_64", "neuron/dlami/multi-framework/ubuntu-24.04", 120),
        ("Inferentia2", "", "x86_64", "neuron/dlami/multi-framework/ubuntu-24.04", 120),
        ("Inferentia1", "", "x86_64", "ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2", 30),
        ("Gaudi:8", "", "x86_64", "ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2", 30),
        ("", "", "arm64", "ubuntu/server/24.04/stable/current/arm64/hvm/ebs-gp3", 30),
        ("", "ubuntu-22.04", "x86_64", "ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2", 30),
        ("H100", "ami-0123", "x86_64", "ami-0123", 120),
    ],
)
def test_the_base_image_fits_what_the_machine_has(accelerator: str, asked: str, arch: str, part: str, gb: int) -> None:
    name, least = based(accelerator, asked, arch)
    assert part in name
    assert least == gb
    assert name in aws_facts.IMAGES or name == asked


def test_the_disk_is_as_large_as_was_asked_for() -> None:
    assert based("", disk_gib=99.5)[1] == 100
    assert based("H100", disk_gib=99.5)[1] == 120


def test_a_base_image_that_is_for_another_provider_is_refused(aws_api: World) -> None:
    with pytest.raises(UsageError, match=r"base image of AWS.*ami-"):
        sold(aws_api, replace(H100, bases={"aws": "pytorch/pytorch:latest"}))


# --- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"region": "us-esat-1"}, "'us-east-1'"),
        ({"region": "us-east1"}, "did you mean 'us-east-1'"),
        ({"region": ["us-east-1", "euwest1"]}, "did you mean 'eu-west-1'"),
        ({"region": []}, "empty list"),
        ({"region": 1}, "region"),
        ({"subnet": "subnet-0abc"}, "belongs to one region: set region="),
        ({"subnet": "vpc-1", "region": HERE}, "such as 'subnet-"),
        ({"ami": "ami-0abc"}, "belongs to one region"),
        ({"ami": "Ubuntu"}, "ubuntu-24.04"),
        ({"ami": ["ubuntu-22.04"]}, "must be one string"),
        ({"user": "two words"}, "such as 'ubuntu'"),
        ({"capacity_reservation": "cr-0abc", "region": ["us-east-1", "us-east-2"]}, "belongs to one region"),
        ({"ssh_from": "300.1.1.1"}, "203.0.113"),
        ({"ssh_from": ["10.0.0.0/8", "10.0.0.0/33"]}, "203.0.113"),
        ({"profile": ""}, "profile"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_where_they_are_written(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        AWS(**settings)


@pytest.mark.parametrize("given", ["203.0.113.7", "0.0.0.0/0", "10.255.249.199/25", ["1.2.3.4", "5.6.7.8/32"]])
def test_networks_may_be_one_or_several(given: Any) -> None:
    assert AWS(ssh_from=given).ssh_from == (tuple(given) if isinstance(given, list) else (given,))


def test_a_region_that_the_account_may_not_use_is_told_of(aws_api: World) -> None:
    with pytest.raises(UsageError, match=r"eu-south-2 is not a region that the account may use.*eu-west-1"):
        sold(aws_api, H100, region="eu-south-2")


def test_a_profile_that_is_not_there_says_how_to_see_those_that_are(aws_api: World) -> None:
    with pytest.raises(CredentialsError, match=r"nobody.*list-profiles"):
        sold(aws_api, H100, profile="nobody")


def test_without_credentials_it_says_where_they_come_from(aws_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(CredentialsError, match="aws configure") as refused:
        sold(aws_api, H100)
    assert refused.value.code == "NoCredentialsError"


def test_without_the_sdk_it_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['botocore.exceptions'] = None\n"
        "import skypool as sky\ntry: list(sky.AWS().instances())\nexcept sky.UsageError as e: print(e)"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'skypool[aws]'" in got.stdout


# --- errors --------------------------------------------------------------------------------------------------

WORDS = {
    "InsufficientInstanceCapacity": "We currently do not have sufficient p4d.24xlarge capacity in the Availability "
    "Zone you requested (us-east-1d). Our system will be working on provisioning additional capacity. You can "
    "currently "
    "get p4d.24xlarge capacity by not specifying an Availability Zone in your request or choosing us-east-1a, "
    "us-east-1b.",
    "VcpuLimitExceeded": "You have requested more vCPU capacity than your current vCPU limit of 32 allows for the "
    "instance bucket that the specified instance type belongs to. Please visit "
    "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    "Unsupported": "Your requested instance type (p3.16xlarge) is not supported in your requested Availability Zone "
    "(us-east-2c). Please retry your request by not specifying an Availability Zone or choosing us-east-2a, "
    "us-east-2b.",
    "MaxFleetCountExceeded": "You've reached your quota for maximum Fleet Requests for this account.",
}
"""AWS's own, as they stand in threads of those who met them."""
TABLE: list[tuple[str, type[ProviderError], str]] = [
    ("InsufficientInstanceCapacity", CapacityError, "out of stock"),
    ("InsufficientHostCapacity", CapacityError, "out of stock"),
    ("InsufficientReservedInstanceCapacity", CapacityError, "out of stock"),
    ("InsufficientCapacity", CapacityError, "out of stock"),
    ("ReservationCapacityExceeded", CapacityError, "out of stock"),
    ("UnfulfillableCapacity", CapacityError, "out of stock"),
    ("InsufficientFreeAddressesInSubnet", CapacityError, "subnet="),
    ("SpotMaxPriceTooLow", CapacityError, "max_usd_per_hour"),
    ("Unsupported", CapacityError, "zone"),
    ("IdempotentInstanceTerminated", CapacityError, "ended"),
    ("VcpuLimitExceeded", QuotaError, "us-east-1.console.aws.amazon.com/servicequotas"),
    ("MaxSpotInstanceCountExceeded", QuotaError, "servicequotas"),
    ("InstanceLimitExceeded", QuotaError, "servicequotas"),
    ("MaxFleetCountExceeded", QuotaError, "servicequotas"),
    ("VolumeLimitExceeded", QuotaError, "servicequotas"),
    ("AddressLimitExceeded", QuotaError, "Elastic IP"),
    ("AttachmentLimitExceeded", ProviderError, "report"),
    ("RequestLimitExceeded", RateLimitError, "wait"),
    ("ThrottlingException", RateLimitError, "wait"),
    ("Unavailable", NoAnswer, "health.aws"),
    ("InternalError", NoAnswer, "health.aws"),
    ("ServiceUnavailable", NoAnswer, "health.aws"),
    ("AuthFailure", CredentialsError, "get-caller-identity"),
    ("InvalidClientTokenId", CredentialsError, "get-caller-identity"),
    ("UnrecognizedClientException", CredentialsError, "get-caller-identity"),
    ("ExpiredToken", CredentialsError, "sso login"),
    ("ExpiredTokenException", CredentialsError, "sso login"),
    ("RequestExpired", CredentialsError, "sso login"),
    ("RequestTimeTooSkewed", CredentialsError, "clock"),
    ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", AccessError, "aws iam create-service-linked-role"),
    ("UnauthorizedOperation", AccessError, "skypool doctor --policy aws"),
    ("AccessDeniedException", AccessError, "skypool doctor --policy aws"),
    ("OptInRequired", AccessError, "enable"),
    ("PendingVerification", AccessError, "4 hours"),
    ("Blocked", AccessError, "support"),
    ("IdempotentParameterMismatch", ProviderError, "other settings"),
    ("UnsupportedOperation", ProviderError, "report"),
    ("InvalidParameterCombination", ProviderError, "report"),
    ("InvalidParameterValue", ProviderError, "report"),
    ("InvalidAMIID.NotFound", ProviderError, "ami="),
    ("InvalidAMIID.Malformed", ProviderError, "ami="),
    ("InvalidSubnetID.NotFound", ProviderError, "subnet="),
    ("InvalidBlockDeviceMapping", ProviderError, "disk="),
    ("SomethingQuiteNew", ProviderError, "SomethingQuiteNew"),
]


@pytest.mark.slow
def test_every_refusal_of_a_launch_has_its_kind_its_code_and_its_advice_and_is_not_asked_again(aws_api: World) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    offer = next(iter(driver.offers(H100)))
    for number, (code, kind, says) in enumerate(TABLE):
        aws_api.fail("RunInstances", code, f"the very words of {code}")
        asked = len(aws_api.calls("RunInstances"))
        with pytest.raises(ProviderError) as refused:
            driver.launch(offer, order("table", f"abcdef-{number}"))
        error = refused.value
        assert type(error) is kind, code
        assert (error.provider, error.code, error.text) == ("aws", code, f"the very words of {code}")
        assert says in str(error), str(error)
        assert f"the very words of {code}" in str(error)
        assert len(aws_api.calls("RunInstances")) == asked + 1, code
    assert aws_api.count()["instances"] == 0


PAGE = Path(__file__).parents[2] / "docs" / "aws-errors.md"
INTRODUCTION = """# What AWS refuses, and what you read then

Every message here is one that was really raised: `tests/providers/test_aws.py` lets AWS refuse a launch with each of
these codes, in AWS's own words where they are known and with `…` where they are not, and compares. `CapacityError` goes
on to the next offer; `QuotaError` past all that counts toward the same limit; `AccessError` past the region;
`CredentialsError` past AWS; `RateLimitError` and `NoAnswer` are asked again with the same token, then passed by; any
other `ProviderError` ends the launch. The error's `provider`, `code` and `text` have the parts for programs.

| code | is raised as | and says |
|---|---|---|
"""


@pytest.mark.slow
def test_the_page_of_refusals_says_what_a_user_reads(aws_api: World) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    offer = next(iter(driver.offers(H100)))
    rows = []
    for number, (code, kind, _) in enumerate(TABLE[:-1]):
        aws_api.fail("RunInstances", code, WORDS.get(code) or TEXTS.get(code, (0, "…"))[1])
        with pytest.raises(ProviderError) as refused:
            driver.launch(offer, order("page", f"abcdef-{number}"))
        rows.append(f"| `{code}` | `{kind.__name__}` | {str(refused.value).replace('|', '/')} |")
    page = INTRODUCTION + "\n".join(rows) + "\n"
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write it anew: SKYPOOL_WRITE_DOCS=1 pytest tests/providers/test_aws.py"


def test_the_table_of_refusals_has_no_row_that_another_one_hides() -> None:
    for meaning in _api.REFUSALS.meanings:
        for code in meaning.codes:
            plain = code.replace("*", "x").replace("?", "3")
            assert _api.REFUSALS._meaning(plain) is meaning, code


@pytest.mark.parametrize("code", _requests.NOT_KNOWN_YET)
def test_what_this_pool_had_made_and_is_gone_is_told_of(
    aws_api: World, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr("skypool_aws._NEW", 1.0)
    aws_api.fail("RunInstances", code, times=None)
    with pytest.raises(ProviderError, match="somebody removed") as refused:
        run(aws_api, order())
    assert (type(refused.value), refused.value.code) == (ProviderError, code)
    assert len(aws_api.calls("RunInstances")) > 2


def test_a_group_of_an_earlier_order_may_not_be_listed_at_first(aws_api: World) -> None:
    aws_api.delays.unknown = 1
    aws_api.deny("AuthorizeSecurityGroupIngress")
    with pytest.raises(AccessError):
        run(aws_api, order())
    aws_api.heal()
    run(aws_api, order())
    counts = aws_api.count()
    assert (counts["instances"], counts["security_groups"]) == (1, 1)


def test_credentials_that_were_renewed_in_their_file_serve_a_pool_that_began_with_the_old_ones(
    aws_api: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=x\naws_session_token={key}\n")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write("ASIAOLD")
    launched, _ = run(aws_api, order())
    aws_api.fail("*", "RequestExpired", times=None, when=lambda call: call.key == "ASIAOLD")
    with pytest.raises(StillRunning, match="sso login"):
        AWS(region=HERE).terminate(launched)
    write("ASIANEWER")
    AWS(region=HERE).renew("train", datetime(2031, 1, 1, tzinfo=UTC))
    AWS(region=HERE).terminate(launched)
    assert aws_api.count()["instances"] == 0


def test_an_encoded_message_is_left_out(aws_api: World) -> None:
    aws_api.deny("RunInstances")
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    with pytest.raises(AccessError, match="ec2:RunInstances because") as refused:
        driver.launch(next(iter(driver.offers(H100))), order("denied"))
    assert "6vVtNz" not in str(refused.value)


def test_nobody_at_the_other_end_is_no_answer(aws_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(NoAnswer, match="reaches the internet") as refused:
        AWS(region=HERE).instances()
    assert refused.value.code == "ConnectionError"


def test_describing_is_asked_again_where_that_was_too_often(aws_api: World) -> None:
    aws_api.fail("DescribeInstances", "RequestLimitExceeded", times=2)
    assert AWS(region=HERE).instances() == []
    assert len(aws_api.calls("DescribeInstances")) == 3


# --- launching -----------------------------------------------------------------------------------------------


def order(pool: str = "train", token: str = "0123456789abcdef-1", nodes: tuple[int, ...] = (0,), **need: Any) -> Order:
    until = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    return Order(pool, token, nodes, replace(H100, **need), until=until)


def run(world: World, placed: Order, **settings: Any) -> tuple[list[Instance], dict[str, Any]]:
    """The instances, and what RunInstances was asked."""
    driver = AWS(**({"region": HERE, "ssh_from": "203.0.113.7"} | settings))
    offers = [each for each in driver.offers(placed.need) if each.instance_type == "p5.48xlarge"]
    launched = driver.launch(offers[0], placed)
    return launched, world.calls("RunInstances")[-1].params


def test_a_launch_says_what_the_machine_is_and_whose_on_everything_it_makes(aws_api: World) -> None:
    launched, asked = run(aws_api, order(nodes=(3, 4, 5, 9)))
    assert [each.node for each in launched] == [3, 4, 5, 9]
    assert asked["ClientToken"] == "0123456789abcdef-1"
    assert (asked["MinCount"], asked["MaxCount"]) == (1, 4)
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert asked["MetadataOptions"]["HttpTokens"] == "required"
    [disk] = asked["BlockDeviceMappings"]
    assert disk == {
        "DeviceName": "/dev/sda1",
        "Ebs": {"VolumeType": "gp3", "VolumeSize": 120, "DeleteOnTermination": True},
    }
    assert not asked.get("InstanceMarketOptions")
    said = {each["ResourceType"]: tags.read(each["Tags"]) for each in asked["TagSpecifications"]}
    assert set(said) == {"instance", "volume", "network-interface"}
    for each in said.values():
        assert each == {
            "Name": "skypool-train-0123456789abcdef",
            "skypool-pool": "train",
            "skypool-owner": tags.owner(),
            "skypool-session": "0123456789abcdef",
            "skypool-token": "0123456789abcdef-1",
            "skypool-ranks": "3-5 9",
            "skypool-until": "2030-01-02T03:04:05Z",
        }
    for left in AWS(region=HERE).leftovers(pool="train"):
        assert left.until == datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_spot_is_asked_for_once_and_never_above_the_cap(aws_api: World) -> None:
    _, asked = run(aws_api, order(market="spot", max_usd_per_hour=40.0))
    market = asked["InstanceMarketOptions"]
    assert market["MarketType"] == "spot"
    assert market["SpotOptions"]["SpotInstanceType"] == "one-time"
    assert market["SpotOptions"]["InstanceInterruptionBehavior"] == "terminate"
    assert float(market["SpotOptions"]["MaxPrice"]) == pytest.approx(40 - EXTRAS_120, abs=1e-4)
    assert "spot-instances-request" in {each["ResourceType"] for each in asked["TagSpecifications"]}


def test_user_data_holds_the_host_key_and_no_other_secret(aws_api: World) -> None:
    placed = order()
    _, asked = run(aws_api, placed)
    text = base64.b64decode(asked["UserData"]).decode()
    assert len(text) < 16384
    said = yaml.safe_load(text)
    assert placed.keys is not None
    private, public = placed.keys.host(placed.token)
    assert said["ssh_keys"] == {"ed25519_private": private, "ed25519_public": public}
    assert said["ssh_authorized_keys"] == [placed.keys.public]
    assert text.count("PRIVATE KEY") == 2  # where it begins and where it ends
    client = Path(placed.keys.identity).read_text().splitlines()[3]
    for secret in (aws_api.environment["AWS_SECRET_ACCESS_KEY"], aws_api.environment["AWS_ACCESS_KEY_ID"], client):
        assert secret not in text


def test_port_22_is_open_to_the_caller_alone(aws_api: World) -> None:
    launched, asked = run(aws_api, order(), ssh_from=["203.0.113.7", "198.51.100.0/24"])
    [nic] = asked["NetworkInterfaces"]
    [group] = aws_api.client().describe_security_groups(GroupIds=nic["Groups"])["SecurityGroups"]
    rules = [
        (r["IpProtocol"], r["FromPort"], r["ToPort"], i["CidrIp"])
        for r in group["IpPermissions"]
        for i in r["IpRanges"]
    ]
    assert sorted(rules) == [("tcp", 22, 22, "198.51.100.0/24"), ("tcp", 22, 22, "203.0.113.7/32")]
    assert all(not r["Ipv6Ranges"] and not r["UserIdGroupPairs"] for r in group["IpPermissions"])
    assert (nic["AssociatePublicIpAddress"], nic["InterfaceType"]) == (True, "interface")
    assert launched


def test_a_gang_is_in_one_place_and_reaches_each_other(aws_api: World) -> None:
    launched, asked = run(aws_api, order(nodes=(0, 1), private_network=True))
    assert (asked["MinCount"], asked["MaxCount"]) == (2, 2)
    nic = asked["NetworkInterfaces"][0]
    assert asked["Placement"]["GroupName"] in [name for _, name in aws_api.groups]
    [group] = aws_api.client().describe_security_groups(GroupIds=nic["Groups"])["SecurityGroups"]
    for way in ("IpPermissions", "IpPermissionsEgress"):
        assert [group["GroupId"]] in [[p["GroupId"] for p in r["UserIdGroupPairs"]] for r in group[way]]
    driver = AWS(region=HERE)
    driver.terminate(launched)
    driver.tidy(driver.leftovers(pool="train"))
    assert aws_api.left() == {}


def test_each_zone_has_a_placement_group_of_its_own_and_what_a_failed_attempt_made_is_tidied(aws_api: World) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    aws_api.capacity(0)
    by_zone = {offer.zone: offer for offer in driver.offers(H100)}
    for number, offer in enumerate(list(by_zone.values())[:3]):
        with pytest.raises(CapacityError):
            driver.launch(offer, order(token=f"s-{number}", private_network=True))
    found = driver.leftovers()
    assert sorted(each.kind for each in found) == ["key-pair", *["placement-group"] * 3, "security-group"]
    driver.tidy(found)
    assert aws_api.left() == {}


def test_with_less_stock_than_asked_for_the_first_ranks_are_rented(aws_api: World) -> None:
    aws_api.capacity(2)
    launched, _ = run(aws_api, order(nodes=(4, 5, 6)))
    assert [each.node for each in launched] == [4, 5]
    assert [each.node for each in AWS(region=HERE).instances(pool="train")] == [4, 5]


def test_an_ami_of_ones_own_brings_its_disk_and_its_processor(aws_api: World) -> None:
    name = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
    ami = aws_facts.IMAGES[name].id(HERE)
    _, asked = run(aws_api, order(), ami=ami)
    assert asked["ImageId"] == ami
    assert asked["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 120
    _, asked = run(aws_api, order(token="b-1", bases={"aws": name}))
    assert asked["ImageId"] == ami
    arm = aws_facts.IMAGES[name.replace("x86_64", "arm64")].id(HERE)
    with pytest.raises(UsageError, match="arch='arm64'"):
        run(aws_api, order(token="c-1"), ami=arm)
    with pytest.raises(ProviderError, match="ami="):
        run(aws_api, order(token="d-1"), ami="ami-0123456789abcdef0")


def test_subnets_of_ones_own_are_the_only_places(aws_api: World) -> None:
    subnets = aws_api.client().describe_subnets()["Subnets"]
    mine = {each["SubnetId"]: each["AvailabilityZone"] for each in subnets[:2]}
    offers = sold(aws_api, replace(H100, market="cheapest"), subnet=list(mine))
    assert {each.zone for each in offers} <= set(mine.values())
    _, asked = run(aws_api, order(), subnet=list(mine))
    assert asked["NetworkInterfaces"][0]["SubnetId"] in mine


def test_a_reservation_is_used_and_a_block_is_paid_for_already(aws_api: World) -> None:
    block = aws_api.reserve("p5.48xlarge", "us-east-1b", 2, kind="capacity-block", end=86400)
    plain = aws_api.reserve("p5.48xlarge", "us-east-1c", 1)
    [offer] = sold(aws_api, H100, capacity_reservation=block)
    assert (offer.zone, offer.available) == ("us-east-1b", True)
    assert offer.usd_per_hour == pytest.approx(EXTRAS_120)
    _, asked = run(aws_api, order(), capacity_reservation=block)
    assert asked["InstanceMarketOptions"]["MarketType"] == "capacity-block"
    assert asked["CapacityReservationSpecification"]["CapacityReservationTarget"]["CapacityReservationId"] == block
    [offer] = sold(aws_api, H100, capacity_reservation=plain)
    assert offer.usd_per_hour == pytest.approx((aws_facts.on_demand_price(HERE, "p5.48xlarge") or 0) + EXTRAS_120)
    run(aws_api, order(token="b-1"), capacity_reservation=plain)
    [offer] = sold(aws_api, H100, capacity_reservation=plain)
    assert offer.available is False
    assert not [call for call in aws_api.journal if "Purchase" in call.action or "CreateCapacity" in call.action]


def test_machines_of_a_reservation_are_where_and_as_it_is(aws_api: World) -> None:
    """A placement group of the pool's own is an error for a capacity block, and fewer machines for a reservation."""
    aws_api.elastic_ips = 8
    aws_api.client().create_placement_group(GroupName="near", Strategy="cluster")
    reserve = partial(aws_api.reserve, "p5.48xlarge", "us-east-1b", 2)
    for number, (reservation, placement) in enumerate(
        [
            (reserve(), {}),
            (reserve(kind="capacity-block", end=86400), {}),
            (reserve(group="near"), {"GroupName": "near"}),
            (reserve(tenancy="dedicated"), {"Tenancy": "dedicated"}),
        ]
    ):
        gang = order(nodes=(0, 1), token=f"g-{number}", private_network=True)
        launched, asked = run(aws_api, gang, capacity_reservation=reservation)
        assert asked.get("Placement", {}) == placement
        assert len(launched) == 2
    assert [name for _, name in aws_api.groups] == ["near"]


def test_what_aws_sells_only_by_capacity_blocks_is_offered_with_one_and_told_of_without(aws_api: World) -> None:
    """As p6e-gb200.36xlarge, of which there is no record that was read from EC2."""
    kind, need = "p6-b300.48xlarge", Need((parse("B300:8"),), market="cheapest")
    region = next(each for each in sorted(aws_facts.ENABLED) if aws_facts.zones_of(each, kind))
    only_blocks = INSTANCE_TYPES[kind] | {"SupportedUsageClasses": ["capacity-block"]}
    with aws_calls.other_facts(INSTANCE_TYPES, {kind: only_blocks}):
        with pytest.warns(RuntimeWarning, match=rf"sells {kind} only by capacity blocks.*capacity_reservation="):
            assert sold(aws_api, need, region=region) == []
        block = aws_api.reserve(kind, aws_facts.zones_of(region, kind)[0], kind="capacity-block", end=86400)
        [offer] = sold(aws_api, need, region=region, capacity_reservation=block)
        assert (offer.instance_type, offer.detail["prepaid"]) == (kind, True)


def test_a_new_family_is_ranked_by_its_prices(aws_api: World) -> None:
    found = {each.instance_type: each for each in sold(aws_api, Need((parse("RTX_PRO_6000"),), market="on-demand"))}
    ranked = sorted(found, key=lambda kind: found[kind].usd_per_hour)
    assert ranked == [f"g7e.{size}xlarge" for size in (2, 4, 8, 12, 24, 48)]
    for kind, each in found.items():
        bare = aws_facts.on_demand_price(HERE, kind)
        assert bare is not None
        assert each.usd_per_hour == pytest.approx(bare + EXTRAS_120)
        assert (each.accelerator and each.accelerator.card_memory_gb, each.quota) == (
            96,
            "us-east-1 on-demand G and VT",
        )


@pytest.mark.parametrize(
    ("kind", "region"),
    [("trn2.48xlarge", "us-east-2"), ("trn2u.48xlarge", "ap-south-2"), ("trn2.3xlarge", "sa-east-1")],
)
def test_trainium_2_is_offered_by_a_block_and_without_a_price_not_at_all(
    aws_api: World, kind: str, region: str
) -> None:
    aws_api.opt_in(region)
    assert aws_facts.on_demand_price(region, kind) is None
    accelerator = _catalog.accelerator(INSTANCE_TYPES[kind])
    assert accelerator is not None
    need = Need((accelerator,))
    assert kind not in {each.instance_type for each in sold(aws_api, need, region=region)}
    block = aws_api.reserve(kind, aws_facts.zones_of(region, kind)[0], kind="capacity-block", end=86400)
    [offer] = sold(aws_api, need, region=region, capacity_reservation=block)
    assert (offer.instance_type, offer.detail["prepaid"], offer.accelerator) == (kind, True, accelerator)


def test_a_node_of_an_ultraserver_is_known_by_its_name_and_has_an_image_for_its_processor() -> None:
    assert _catalog.patterns(Need((parse("GB200:4"),))) == ["p6e-gb200.*"]
    processor = {"ProcessorInfo": {"SupportedArchitectures": ["arm64"]}, "SupportedUsageClasses": ["capacity-block"]}
    record = INSTANCE_TYPES["p6-b300.48xlarge"] | {"InstanceType": "p6e-gb200.36xlarge"} | processor
    offer = _catalog.kind(record)
    assert (str(offer.accelerator), offer.arch, offer.quota) == ("GB200:4", "arm64", "P")
    assert "ami/arm64/base-oss-nvidia-driver-gpu" in _boot_images.base("", offer, Need())[0]
    record |= {"InstanceType": "p6e-gb300.36xlarge", "GpuInfo": {"Gpus": [{"Name": "GB300", "Count": 4}]}}
    assert str(_catalog.accelerator(record)) == "GB300:4"
    assert "p*" in _catalog.patterns(Need((parse("GB300:4"),)))


def test_a_part_of_a_gpu_is_offered_only_with_an_image_of_the_users(aws_api: World) -> None:
    """It needs a driver of NVIDIA's that no default image has."""
    need = Need((parse("L4/1of8"),), market="spot")
    for name in ("g6.xlarge", "g6f.large"):
        aws_api.spot_price("us-east-1a", name, 0.1)

    def types(**settings: Any) -> set[str]:
        return {each.instance_type for each in sold(aws_api, need, **settings)}

    assert "g6.xlarge" in types()
    assert not [each for each in types() if each.startswith(("g6f.", "gr6f."))]
    assert "g6f.large" in types(ami="ami-0123456789abcdef0")


def _operations(session: Any, service: str) -> list[str]:
    """Return the names of a service's operations."""
    return list(session.get_service_model(service).operation_names)


def requested() -> dict[str, str]:
    """Return the methods of boto3's clients that the driver's source uses, each with the permission it needs."""
    prefixes = {"ec2": "ec2", "pricing": "pricing", "ssm": "ssm", "service-quotas": "servicequotas", "sts": "sts"}
    session = botocore.session.get_session()
    methods = {
        botocore.xform_name(operation): f"{prefix}:{operation}"
        for service, prefix in prefixes.items()
        for operation in _operations(session, service)
    }
    used: set[str] = set()
    for file in Path(skypool_aws.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.Call(ast.Attribute(attr="get_paginator"), [ast.Constant(str(name))]):
                    used.add(name)
    return {name: methods[name] for name in used & methods.keys()}


@pytest.mark.slow
def test_the_requests_of_the_driver_are_found_in_its_source(aws_api: World) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    run(aws_api, order())
    driver.renew("train", datetime(2031, 1, 1, tzinfo=UTC))
    together, _ = run(aws_api, order(token="b-1", private_network=True))
    driver.access(together[0])
    driver.terminate(driver.instances())
    driver.tidy(driver.leftovers())
    list(driver.check())
    sent = {call.action for call in aws_api.journal}
    assert sent - {permission.partition(":")[2] for permission in requested().values()} == set()
    assert {"RunInstances", "CreateTags", "TerminateInstances", "DeleteSecurityGroup", "GetServiceQuota"} <= sent


def test_nothing_that_is_asked_of_aws_buys_or_reserves() -> None:
    verbs = requested().keys()
    assert {"run_instances", "describe_instances"} <= verbs
    bought = [verb for verb in verbs if re.search("purchase|capacity_block|create_capacity|allocate|modify", verb)]
    assert bought == ["allocate_address"], "an address costs what the public address of any other machine does"


# --- several network interfaces ------------------------------------------------------------------------------


def interfaces(kind: str) -> list[Any]:
    """The interfaces that a gang of this type asks for."""
    request = _requests.InstanceRequest(
        "t", kind, "on-demand", 1, 1, "ami-0", "/dev/sda1", 8, "k", "", "subnet-0", "sg-0", {},
        efa=_catalog.kind(INSTANCE_TYPES[kind]).detail["efa"],
    )  # fmt: skip
    return _requests._interfaces(request)


def test_every_type_gets_all_the_adapters_that_it_may_have_and_ec2_accepts_that() -> None:
    several = 0
    for kind, record in INSTANCE_TYPES.items():
        asked = interfaces(kind)
        aws_launch._check_cards(kind, asked)
        adapters = [each for each in asked if each["InterfaceType"] != "interface"]
        assert len(adapters) == record["NetworkInfo"].get("EfaInfo", {}).get("MaximumEfaInterfaces", 0), kind
        assert bool(asked[0].get("AssociatePublicIpAddress")) is (len(asked) == 1), kind
        several += len(asked) > 1
    assert several > 20


@pytest.mark.parametrize(
    ("kind", "first", "last"),
    [
        ("g5.xlarge", (0, 0, "interface"), (0, 0, "interface")),
        ("g5.48xlarge", (0, 0, "efa"), (0, 0, "efa")),
        ("p4d.24xlarge", (0, 1, "efa-only"), (3, 0, "efa-only")),
        ("hpc6id.32xlarge", (1, 0, "efa-only"), (1, 0, "efa-only")),
        ("p5.48xlarge", (0, 1, "efa-only"), (31, 0, "efa-only")),
        ("p5en.48xlarge", (0, 1, "efa-only"), (15, 0, "efa-only")),
        ("p6-b300.48xlarge", (1, 0, "efa-only"), (16, 0, "efa-only")),
        ("trn1n.32xlarge", (0, 1, "efa-only"), (15, 0, "efa-only")),
    ],
)
def test_adapters_are_on_the_cards_that_can_have_them(
    kind: str, first: tuple[int, int, str], last: tuple[int, int, str]
) -> None:
    primary, *others = [
        (each["NetworkCardIndex"], each["DeviceIndex"], each["InterfaceType"]) for each in interfaces(kind)
    ]
    assert primary[:2] == (0, 0)
    assert ((others or [primary])[0], (others or [primary])[-1]) == (first, last)


def gang(token: str = "g-1", nodes: tuple[int, ...] = (0, 1)) -> Order:
    return order(token=token, nodes=nodes, private_network=True)


def host(driver: AWS, instance: Instance) -> str:
    transport = driver.access(instance).transport
    assert isinstance(transport, SSH)
    return transport.host


def owned(world: World, region: str = HERE) -> list[Any]:
    """The Elastic IP addresses of the account in a region."""
    return list(world.client("ec2", region).describe_addresses()["Addresses"])


def test_a_gang_with_several_interfaces_has_an_elastic_address_each_that_goes_with_its_machine(aws_api: World) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    launched, asked = run(aws_api, gang())
    assert len(asked["NetworkInterfaces"]) == 33
    assert {tuple(each["Groups"]) for each in asked["NetworkInterfaces"]} == {
        tuple(asked["NetworkInterfaces"][0]["Groups"])
    }
    before = owned(aws_api)
    assert [each.get("AssociationId") for each in before] == [None, None]
    hosts = [host(driver, each) for each in launched]
    by_node = {tags.read(each["Tags"])["skypool-ranks"]: each for each in owned(aws_api)}
    assert [by_node["0"]["PublicIp"], by_node["1"]["PublicIp"]] == hosts
    assert [by_node["0"]["InstanceId"], by_node["1"]["InstanceId"]] == [each.id for each in launched]
    assert tags.read(by_node["0"]["Tags"])["skypool-pool"] == "train"
    driver.renew("train", datetime(2031, 1, 1, tzinfo=UTC))
    until = {each.until for each in driver.leftovers(pool="train") if each.kind == "elastic-ip"}
    assert until == {datetime(2031, 1, 1, tzinfo=UTC)}
    driver.terminate(launched[:1])
    assert [each["PublicIp"] for each in owned(aws_api)] == hosts[1:]
    driver.terminate(driver.instances(pool="train"))
    assert aws_api.count()["addresses"] == 0
    driver.tidy(driver.leftovers())
    assert aws_api.left() == {}


def test_the_price_of_a_machine_has_one_address_whatever_kind_that_is(aws_api: World) -> None:
    alone, together = (
        {each.zone: each.usd_per_hour for each in sold(aws_api, replace(H100, private_network=wanted))}
        for wanted in (False, True)
    )
    assert together == alone
    run(aws_api, gang())
    assert aws_api.count()["addresses"] == aws_api.count()["instances"] == 2
    assert not [each for each in aws_api.rentals if each.public]


def test_a_machine_of_a_reservation_whose_first_card_has_no_fabric_gets_all_adapters(aws_api: World) -> None:
    kind = "p6-b300.48xlarge"
    region = next(each for each in sorted(aws_facts.ENABLED) if aws_facts.zones_of(each, kind))
    block = aws_api.reserve(kind, aws_facts.zones_of(region, kind)[0], 2, kind="capacity-block", end=86400)
    driver = AWS(region=region, capacity_reservation=block, ssh_from="203.0.113.7")
    placed = replace(gang(), need=Need((parse("B300:8"),), private_network=True))
    [offer] = driver.offers(placed.need)
    launched = driver.launch(offer, placed)
    asked = aws_api.calls("RunInstances")[-1].params["NetworkInterfaces"]
    assert [each["InterfaceType"] for each in asked] == ["interface", *["efa-only"] * 16]
    assert {host(driver, each) for each in launched} == {each["PublicIp"] for each in owned(aws_api, region)}
    driver.terminate(launched)
    driver.tidy(driver.leftovers())
    assert aws_api.left() == {}


def test_too_few_addresses_are_a_quota_that_costs_nothing(aws_api: World) -> None:
    aws_api.elastic_ips = 1
    with pytest.raises(QuotaError, match=r"Elastic IP.*us-east-1\.console") as refused:
        run(aws_api, gang())
    assert refused.value.code == "AddressLimitExceeded"
    assert aws_api.calls("RunInstances") == []
    assert aws_api.count()["addresses"] == 0


def test_a_launch_that_is_refused_keeps_no_address_and_one_that_is_lost_keeps_those_that_it_has(aws_api: World) -> None:
    aws_api.capacity(0)
    with pytest.raises(CapacityError):
        run(aws_api, gang())
    assert len(aws_api.calls("AllocateAddress")) == len(aws_api.calls("ReleaseAddress")) == 2
    aws_api.capacity(None)
    for action in ("AllocateAddress", "RunInstances"):
        aws_api.drop(action)
        with pytest.raises(NoAnswer):
            run(aws_api, gang("g-2"))
    launched, _ = run(aws_api, gang("g-2"))
    assert (len(launched), len(owned(aws_api)), aws_api.count()["instances"]) == (2, 2, 2)


def test_access_allocates_no_address_in_place_of_one_that_somebody_took_away(
    aws_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_aws._elastic_ips._NEW", 0.5)
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    launched, _ = run(aws_api, gang())
    kept, taken = owned(aws_api)
    aws_api.client().release_address(AllocationId=taken["AllocationId"])
    lost = int(tags.read(taken["Tags"])["skypool-ranks"])
    begun = len(aws_api.journal)
    assert host(driver, launched[1 - lost]) == kept["PublicIp"]
    with pytest.raises(ProviderError, match=r"does not exist any more.*released the address\. End the instance"):
        driver.access(launched[lost])
    changes = {call.action for call in aws_api.journal[begun:] if not call.action.startswith("Describe")}
    assert changes == {"AssociateAddress"}
    driver.terminate(launched)
    assert aws_api.count()["addresses"] == 0


def test_an_address_is_in_the_ledger_and_has_its_tags_before_it_costs_anything(aws_api: World, own_state: None) -> None:
    seen: list[tuple[list[str], str]] = []

    def look(call: Call, moment: str) -> None:
        if (call.action, moment) == ("AllocateAddress", "before"):
            [record] = Ledger.here().pools("train")
            [said] = [tags.read(each["Tags"]) for each in call.params["TagSpecifications"]]
            seen.append(([each.token for each in record.intents], said["skypool-token"]))

    async def pause(seconds: float) -> None: ...

    aws_api.on_call = look
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    pool = sky.ComputePool(driver, accelerator="H100:8", nodes=2, private_network=True, name="train", console="off")
    supply = supply_of(pool)
    asyncio.run(supply.look())
    supply.begin()
    there = asyncio.run(supply.rent([0, 1], None, pause)).instances
    assert len(owned(aws_api)) == len(there) == len(seen) == 2
    assert all(open_orders == [token] for open_orders, token in seen)
    assert not supply.terminate(there)
    assert aws_api.count()["addresses"] == 0
    supply.close(None, proved=True)
    assert aws_api.left() == {}


def test_an_address_that_ec2_still_lists_is_not_released_yet(aws_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool_aws._requests._RELEASING", 0.2)
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    launched, _ = run(aws_api, gang(nodes=(0,)))
    with monkeypatch.context() as patched:
        patched.setitem(aws_addresses.ANSWERS, "ReleaseAddress", lambda world, call: {})
        with pytest.warns(RuntimeWarning, match="still lists Elastic IP address"):
            driver.terminate(launched)
        with pytest.raises(ProviderError, match="still lists Elastic IP address"):
            driver.tidy(driver.leftovers(pool="train"))
    driver.tidy(driver.leftovers(pool="train"))
    assert aws_api.left() == {}


def test_an_address_is_given_when_the_machine_runs_and_not_taken_from_one_that_does(
    aws_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_aws._TIDYING", 0.0)
    aws_api.delays.pending = 1.5
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    [one], _ = run(aws_api, gang(nodes=(0,)))
    assert host(driver, one)
    found = [each for each in driver.leftovers() if each.kind == "elastic-ip"]
    with pytest.raises(ProviderError, match="end the instance first"):
        driver.tidy(found)
    assert aws_api.calls("ReleaseAddress") == []
    driver.terminate([one])
    driver.tidy(found)  # it is gone


@pytest.mark.parametrize(("zone", "group"), [("us-east-1a", "us-east-1"), ("us-east-1-dfw-2a", "us-east-1-dfw-2")])
def test_an_address_is_of_the_network_border_group_of_its_zone(aws_api: World, zone: str, group: str) -> None:
    _elastic_ips.allocate(aws_api.client(), Offer("aws", "p6e-gb200.36xlarge", HERE, zone), gang())
    assert [call.params["NetworkBorderGroup"] for call in aws_api.calls("AllocateAddress")] == [group, group]


def test_an_address_that_cannot_be_released_is_told_of_and_is_a_leftover(aws_api: World) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    launched, _ = run(aws_api, gang())
    aws_api.deny("ReleaseAddress")
    with pytest.warns(RuntimeWarning, match=r"train in us-east-1 are billed until .* `skypool gc`"):
        driver.terminate(launched)
    assert aws_api.count()["instances"] == 0
    aws_api.heal()
    driver.tidy(driver.leftovers(pool="train"))
    assert aws_api.left() == {}


GANG = """
import sys
from datetime import UTC, datetime, timedelta
import skypool as sky
from skypool.accelerators import parse
from skypool.model import Need, Order

driver = sky.AWS(region="us-east-1", ssh_from="203.0.113.7")
need = Need((parse("H100:8"),), private_network=True)
offer = next(each for each in driver.offers(need) if each.instance_type == "p5.48xlarge")
until = datetime.now(UTC) + timedelta(minutes=10)
launched = driver.launch(offer, Order(sys.argv[1], f"{sys.argv[1]:0>16}-1", (0, 1), need, until=until))
for each in launched:
    driver.access(each)
driver.renew(sys.argv[1], until)
driver.terminate(launched)
driver.tidy(driver.leftovers(pool=sys.argv[1]))
"""
"""The whole life of a gang, by the driver alone."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_killed_at_any_call_leaves_no_address_once_it_is_collected(aws_api: World, tmp_path: Path) -> None:
    """Killed just before a call that changes something takes effect, and just after: gc finds all by its tags."""
    aws_api.elastic_ips = 1000
    environment = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def live(number: int = 0, moment: str = "") -> int:
        """Kill a client at its call of this number; how many such calls it made."""
        begun = len(aws_api.journal)
        client = Fork(GANG, f"p{number}{moment}", environment=environment)

        def changes() -> list[Call]:
            return [call for call in aws_api.journal[begun:] if not re.match("Describe|Get|List", call.action)]

        def kill(call: Call, now: str) -> None:
            if now == moment and len(made := changes()) >= number and made[number - 1] is call:
                client.kill()
                if moment == "before":
                    aws_api.drop(call.action, moment="before", when=lambda other: other is call)

        aws_api.on_call = kill
        ended = client.end()
        aws_api.on_call = lambda call, moment: None
        assert ended.returncode == (-9 if number else 0), ended
        return len(changes())

    many = live()
    assert aws_api.left() == {}
    held, before = [], 0
    for number in range(1, many + 1):
        for moment in ("before", "after"):
            live(number, moment)
            held.append(aws_api.count()["addresses"] - before)
            before = aws_api.count()["addresses"]
    print("addresses that each left:", held)
    assert set(held) == {0, 1, 2}
    later = [sys.executable, "-c", LATER, str(LEASE_OVER), "gc", "--yes", "--provider", "aws"]
    subprocess.run(later, env=os.environ | environment, check=True, capture_output=True)
    assert aws_api.left() == {}


# --- what is there -------------------------------------------------------------------------------------------


def test_states_are_told_as_they_are(aws_api: World) -> None:
    aws_api.delays.pending = aws_api.delays.ending = aws_api.delays.stopping = 60
    driver = AWS(region=HERE)

    def state() -> str:
        return "".join(each.state for each in driver.instances(pool="train"))

    [one], _ = run(aws_api, order())
    assert one.state == state() == "starting"
    aws_api.clock.advance(61)
    assert state() == "running"
    aws_api.client().stop_instances(InstanceIds=[one.id])
    assert state() == "ending"
    aws_api.clock.advance(61)
    assert state() == "ending"  # its disk is still billed
    aws_api.client().terminate_instances(InstanceIds=[one.id])
    aws_api.clock.advance(61)
    assert state() == ""


def test_a_pool_of_the_same_name_that_another_host_rented_is_not_touched(
    aws_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = tags.owner()
    user = me.partition("@")[0]
    for owner, token in ((me, "a-1"), (f"{user}@elsewhere", "b-1"), ("ann@laptop", "c-1")):
        monkeypatch.setattr(tags, "owner", lambda owner=owner: owner)
        run(aws_api, order(token=token))
    monkeypatch.setattr(tags, "owner", lambda: me)
    driver = AWS(region=HERE)
    assert [each.token for each in driver.instances(pool="train")] == ["a-1"]
    assert sorted(each.token for each in driver.instances()) == ["a-1", "b-1"]
    assert {each.region for each in driver.instances()} == {HERE}
    assert len(driver.leftovers(pool="train")) == 2
    assert len(driver.leftovers()) == 4


def test_why_aws_ended_a_machine_is_what_access_says(aws_api: World) -> None:
    [one], _ = run(aws_api, order())
    aws_api.fail_instance(one.id, "Server.InsufficientInstanceCapacity", "Insufficient capacity to satisfy the request")
    with pytest.raises(CapacityError, match="satisfy the request") as refused:
        AWS(region=HERE).access(one)
    assert refused.value.code == "Server.InsufficientInstanceCapacity"


def test_an_instance_that_aws_does_not_know_yet_is_waited_for_and_not_given_up(aws_api: World) -> None:
    aws_api.delays.unseen = 3
    [one], _ = run(aws_api, order())
    assert AWS(region=HERE).access(one).guard == GUARD
    aws_api.fail(
        "TerminateInstances", "InvalidInstanceID.NotFound", f"The instance ID '{one.id}' does not exist", times=2
    )
    AWS(region=HERE).terminate([one])
    assert aws_api.count()["instances"] == 0


def test_an_instance_of_long_ago_that_aws_does_not_know_is_gone(aws_api: World) -> None:
    launched, _ = run(aws_api, order(nodes=(0, 1)))
    old = replace(launched[0], id="i-0123456789abcdef0", created_at=1.0)
    AWS(region=HERE).terminate([old, *launched])
    assert aws_api.count()["instances"] == 0


def test_an_end_that_is_refused_is_still_running_by_name(aws_api: World) -> None:
    launched, _ = run(aws_api, order(nodes=(0, 1)))
    aws_api.deny("TerminateInstances")
    with pytest.raises(StillRunning, match="not authorized") as left:
        AWS(region=HERE).terminate(launched)
    assert {getattr(each, "id", None) for each in left.value.instances} == {each.id for each in launched}
    aws_api.heal()
    AWS(region=HERE).terminate(launched)


def test_regions_are_ended_at_once_and_one_that_fails_does_not_keep_the_others(aws_api: World) -> None:
    here, _ = run(aws_api, order())
    there, _ = run(aws_api, order(token="b-1"), region="us-west-2")
    aws_api.deny("TerminateInstances", region="us-west-2")
    driver = AWS(region=["us-east-1", "us-west-2"])
    with pytest.raises(StillRunning) as left:
        driver.terminate([*here, *there])
    assert [getattr(each, "id", None) for each in left.value.instances] == [there[0].id]
    assert [each.region for each in aws_api.rentals] == ["us-west-2"]
    aws_api.heal()
    driver.terminate(there)


def test_a_group_that_is_still_used_is_asked_for_again_until_it_can_go(aws_api: World) -> None:
    launched, _ = run(aws_api, order())
    aws_api.delays.ending = 1.5
    driver = AWS(region=HERE)
    aws_api.client().terminate_instances(InstanceIds=[launched[0].id])
    driver.tidy(driver.leftovers(pool="train"))
    assert "DependencyViolation" in [call.error for call in aws_api.calls("DeleteSecurityGroup")]
    assert aws_api.left() == {}


def test_a_disk_that_outlived_its_machine_is_found_by_its_tag(aws_api: World) -> None:
    ec2 = aws_api.client()
    said = tags.pairs(tags.tags(order()))
    made = [{"ResourceType": "volume", "Tags": said}]
    volume = ec2.create_volume(AvailabilityZone="us-east-1a", Size=8, TagSpecifications=made)["VolumeId"]
    driver = AWS(region=HERE)
    [found] = driver.leftovers(pool="train")
    assert (found.kind, found.id, found.region) == ("volume", volume, HERE)
    driver.tidy([found])
    assert aws_api.left() == {}


# --- beforehand ----------------------------------------------------------------------------------------------


def test_the_policy_allows_what_the_driver_asks_and_ends_only_what_pools_made() -> None:
    policy = json.loads(AWS().policy())
    allowed = {a for s in policy["Statement"] for a in ([s["Action"]] if isinstance(s["Action"], str) else s["Action"])}
    needed = set(requested().values())
    assert {"ec2:RunInstances", "ssm:GetParameter", "servicequotas:GetAWSDefaultServiceQuota"} <= needed
    assert needed - allowed == {"sts:GetCallerIdentity"}  # which nobody needs a permission for
    assert allowed - needed == {"iam:CreateServiceLinkedRole"}  # which EC2 itself uses, for a first spot request
    [ends] = [s for s in policy["Statement"] if "ec2:TerminateInstances" in s["Action"]]
    assert ends["Condition"] == {"StringLike": {"aws:ResourceTag/skypool-pool": "*"}}
    assert not [a for a in allowed if a.endswith("*")]


# --- on machines ---------------------------------------------------------------------------------------------


class TestAwsMachines(OnMachines):
    """What of the contract runs commands, each on machines of its own."""

    test_interruption = DriverContract.test_an_interruption_is_told_on_the_machine

    @pytest.fixture
    def driver(self, aws: World) -> AWS:
        return AWS(region=HERE, ssh_from="203.0.113.7")

    @pytest.fixture
    def control(self, aws: World) -> Strings:
        return Strings(aws)


def test_a_machine_ends_itself_and_is_terminated_by_that(aws: World) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    placed = replace(order("lease"), lease=4.0)
    launched = driver.launch(next(iter(driver.offers(H100))), placed)
    assert aws.count()["instances"] == 1
    aws.wait(lambda: not aws.rentals, 40)
    driver.terminate(launched)
    driver.tidy(driver.leftovers(pool="lease"))
    assert aws.left() == {}
    [seen] = aws.client().describe_instances(InstanceIds=[launched[0].id])["Reservations"][0]["Instances"]
    assert seen["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


@pytest.mark.slow
def test_a_pool_of_gpus_finds_a_zone_that_has_them_and_leaves_nothing(aws: World) -> None:
    """Spot, on AWS's own image; the cheapest zones are out of stock."""
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    wanted = [each for each in driver.offers(replace(H100, market="spot")) if each.instance_type == "p5.48xlarge"]
    cheapest, *rest = sorted(wanted, key=lambda each: (each.usd_per_hour, each.zone))
    aws.capacity(0, "p5.48xlarge", cheapest.zone)
    with sky.ComputePool(driver, accelerator="H100:8", market="spot", nodes=2, name="gpus", console="off") as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
        assert {each.zone for each in aws.rentals} == {rest[0].zone}
        assert {each.market for each in aws.rentals} == {"spot"}
    assert [call.error for call in aws.calls("RunInstances")] == ["InsufficientInstanceCapacity", ""]
    assert aws.left() == {}
