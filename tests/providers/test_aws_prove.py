"""What `skypool doctor` and `skypool prove` find out about an AWS account: facts, faults and the next step."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator
from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS, INSTANCE_TYPES

from skypool.accelerators.spelling import meanings
from skypool.model import Finding, Need, Offer
from skypool_aws import AWS, _boot_images, _catalog
from tests.lab import aws_calls, aws_facts, aws_schema
from tests.lab.aws import AWS as World
from tests.lab.aws_wire import Call, rewritten

pytestmark = pytest.mark.needs("openssh")

HERE = "us-east-1"
DLAMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
NEURON = "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id"
POLICY = "ask your administrator for the permissions that `skypool doctor --policy aws` prints"


def driver(**settings: Any) -> AWS:
    return AWS(**({"region": HERE, "ssh_from": "203.0.113.7"} | settings))


def checked(**settings: Any) -> dict[str, Finding]:
    """Return the findings by title. No two may have the same title."""
    findings = list(driver(**settings).check())
    assert len({each.what for each in findings}) == len(findings)
    return {each.what: each for each in findings}


def only_bad(found: dict[str, Finding]) -> Finding:
    """Return the failed finding, of which there must be one. It says what to do in one line."""
    [bad] = [each for each in found.values() if not each.good]
    assert bad.advice
    assert "\n" not in bad.text + bad.advice
    return bad


# --- an account that is ready --------------------------------------------------------------------------------


def test_every_fact_about_a_ready_account_is_told_once_and_nothing_is_made(aws_api: World) -> None:
    found = checked()
    assert [each for each in found.values() if not each.good] == []
    assert found["credentials"].text.startswith("arn:aws:")
    assert found["networks that may log in"].text == "203.0.113.7/32"
    assert found["quota of G and VT in us-east-1"].text == "100000 vCPUs at once on demand; as spot: 100000"
    assert found["quota of P in us-east-1"].text == (
        "100000 vCPUs at once on demand; as spot: 100000 for P4, P3 and P2, 100000 for P5, "
        "100000 for P6 (AWS does not say which quota counts: L-C4BD4855 or L-7212CCBC)"
    )
    assert {each.text for each in found.values() if each.what.startswith("image ")} == {HERE}
    assert found["instances in us-east-1"].text == (
        "dry runs are allowed (on-demand: P, G and VT, Trn, Inf, Standard; "
        "spot: P4, P3 and P2, P5, P6, G and VT, Trn, Inf, Standard)"
    )
    assert {call.error for call in aws_api.calls("RunInstances")} == {"DryRunOperation"}
    assert aws_api.left() == {}


def test_each_dry_run_is_the_request_of_a_pool(aws_api: World) -> None:
    checked()
    families: dict[str, list[Call]] = {}
    for call in aws_api.calls("RunInstances"):
        kind, is_spot = call.params["InstanceType"], "InstanceMarketOptions" in call.params
        families.setdefault(kind.partition(".")[0] if is_spot else aws_facts.family(kind), []).append(call)
        tagged = {tag["Key"] for each in call.params["TagSpecifications"] for tag in each["Tags"]}
        assert {"skypool-pool", "skypool-owner", "skypool-token", "Name"} <= tagged
        assert call.params["UserData"]
        assert call.params["NetworkInterfaces"][0]["SubnetId"].startswith("subnet-")
    images = {family: {call.params["ImageId"] for call in calls} for family, calls in families.items()}
    assert images["P"] == images["G"] == images["p5"] == {aws_facts.IMAGES[DLAMI].id(HERE)}
    assert images["Trn"] == {aws_facts.IMAGES[NEURON].id(HERE)}
    assert all(len(calls) == 1 for calls in families.values()), "one for each quota"
    assert {"p3dn", "p5", "p6-b200"} <= set(families), "three quotas of spot instances"


def test_images_and_types_are_looked_for_in_every_region(aws_api: World) -> None:
    found = checked(region=None)
    assert [each for each in found.values() if not each.good] == []
    assert found[f"image {DLAMI}"].text == "17 regions"
    assert {call.region for call in aws_api.calls("GetParameter")} == aws_facts.ENABLED
    types = found["instance types with accelerators"]
    assert types.text.startswith("AWS sells 85 in 17 regions; none of these regions sells ")
    assert " p2," in types.text, "AWS has ended this family"


def test_the_image_the_subnet_and_the_reservation_of_the_settings_are_those_that_are_tried(aws_api: World) -> None:
    ami = aws_facts.IMAGES[DLAMI.replace("24.04", "22.04").replace("x86_64", "arm64")].id(HERE)
    subnet = aws_api.client().describe_subnets()["Subnets"][2]["SubnetId"]
    found = checked(ami=ami, subnet=subnet)
    assert [each for each in found.values() if not each.good] == []
    assert [each for each in found if each.startswith("image ")] == [f"image {ami}"]
    tried = [call.params for call in aws_api.calls("RunInstances")]
    assert {each["ImageId"] for each in tried} == {ami}
    assert {each["NetworkInterfaces"][0]["SubnetId"] for each in tried} == {subnet}
    assert {aws_facts.architecture(each["InstanceType"]) for each in tried} == {"arm64"}
    held = aws_api.reserve("p5.48xlarge", "us-east-1b", 2, kind="capacity-block", end=86400)
    found = checked(capacity_reservation=held)
    assert [each for each in found.values() if not each.good] == []
    [call] = [call for call in aws_api.calls("RunInstances") if "MarketType" in str(call.params)][-1:]
    target = call.params["CapacityReservationSpecification"]["CapacityReservationTarget"]
    assert target == {"CapacityReservationId": held}
    assert found["instances in us-east-1"].text == "dry runs are allowed (on-demand: the reservation)"


def test_processors_are_read_off_the_names_of_types() -> None:
    for name in _catalog.known_types() & INSTANCE_TYPES.keys():
        has = meanings("aws-type")[name]
        arch = aws_facts.architecture(name)
        offer = Offer("aws", name, HERE, "", "on-demand", 0.0, accelerator=has, arch=arch)  # type: ignore[arg-type]
        if not _catalog.needs_grid_driver(name):
            assert _boot_images.base("", offer, Need())[0] in _boot_images.images_of([name]), name
        assert (arch == "arm64") == (_catalog.arch_of(name) == "arm64"), name


# --- faults, each of which is one line -----------------------------------------------------------------------


def test_expired_credentials_are_the_only_thing_that_is_told_as_wrong(aws_api: World) -> None:
    aws_api.bad_credentials(expired=True)
    found = checked()
    assert [*found] == ["ssh on this machine", "networks that may log in", "credentials", "clock"]
    bad = only_bad(found)
    assert bad.what == "credentials"
    assert "aws sso login" in bad.advice


def test_no_credentials_at_all_are_one_line(aws_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    bad = only_bad(checked())
    assert bad.what == "credentials"
    assert "aws configure" in bad.advice


@pytest.mark.parametrize("seconds", [900, pytest.param(-900, marks=pytest.mark.slow)])
def test_a_wrong_clock_is_told_as_such_and_not_as_bad_credentials(aws_api: World, seconds: float) -> None:
    aws_api.checks_times = True
    assert [each for each in checked().values() if not each.good] == []
    aws_api.clock.advance(seconds)
    bad = only_bad(checked())
    assert bad.what == "clock"
    assert f"{-seconds:+.0f} s off" in bad.text or f"{-seconds + 1:+.0f} s off" in bad.text
    assert "set the clock" in bad.advice


@pytest.mark.parametrize(
    "permission",
    [
        "ec2:RunInstances",
        "ec2:CreateTags",
        "servicequotas:GetServiceQuota",
        "ssm:GetParameter",
        pytest.param("ec2:ImportKeyPair", marks=pytest.mark.slow),
        pytest.param("ec2:CreateSecurityGroup", marks=pytest.mark.slow),
        pytest.param("ec2:CreatePlacementGroup", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeImages", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeInstances", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeInstanceTypes", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeInstanceTypeOfferings", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeKeyPairs", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeRegions", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeSubnets", marks=pytest.mark.slow),
        pytest.param("ec2:DescribeVolumes", marks=pytest.mark.slow),
        pytest.param("pricing:GetProducts", marks=pytest.mark.slow),
    ],
)
def test_a_missing_permission_is_one_line_that_names_it(
    aws_api: World, monkeypatch: pytest.MonkeyPatch, permission: str
) -> None:
    lacks(aws_api, monkeypatch, permission)
    bad = only_bad(checked())
    assert bad.what == "permissions in us-east-1"
    assert f"is not authorized to perform: {permission} " in bad.text
    assert bad.advice == POLICY


def lacks(world: World, monkeypatch: pytest.MonkeyPatch, *permissions: str) -> None:
    """Become a user with the policy that skypool prints, without these permissions."""
    document = json.loads(AWS().policy())
    document["Statement"].append({"Effect": "Deny", "Action": list(permissions), "Resource": "*"})
    for name, value in world.user(document).environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_several_missing_permissions_are_one_line_too(aws_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks(aws_api, monkeypatch, "ec2:ImportKeyPair", "servicequotas:*", "ssm:GetParameter")
    bad = only_bad(checked())
    text = bad.text
    for permission in ("ec2:ImportKeyPair", "servicequotas:GetServiceQuota", "ssm:GetParameter"):
        assert permission in text


def test_a_quota_of_zero_is_one_line(aws_api: World) -> None:
    aws_api.quota(0, "P")
    aws_api.quota(0, "P", "spot")
    aws_api.quota(0, "P5", "spot")
    aws_api.quota(0, "G")
    found = checked()
    assert [each for each in found.values() if not each.good] == [], "nobody asked for these"
    [told] = [each for each in found.values() if each.open]
    assert told.what == "quota of P in us-east-1"
    assert told.text.startswith("0 vCPUs at once on demand; as spot: 0 for P4, P3 and P2, 0 for P5, 0 for P6")
    assert "console.aws.amazon.com/servicequotas" in told.advice
    aws_api.quota(48, "P5", "spot")
    told = checked()["quota of P in us-east-1"]
    assert (told.open, "48 for P5, 48 or 0 for P6 (AWS does not say" in told.text) == (False, True)


def test_an_account_that_may_rent_nothing_is_told_so(aws_api: World) -> None:
    for each in ("P", "G", "Trn", "Inf", "DL", "Standard", "P5"):
        aws_api.quota(0, each)
        aws_api.quota(0, each, "spot")
    bad = only_bad(checked())
    assert bad.what == "quotas in us-east-1"
    assert "nothing can be rented" in bad.text
    assert "console.aws.amazon.com/servicequotas" in bad.advice


@pytest.mark.slow
def test_an_image_that_some_regions_lack_is_one_line_that_names_them(aws_api: World) -> None:
    for region in ("eu-west-1", "eu-west-2"):
        aws_api.fail(
            "GetParameter",
            "ParameterNotFound",
            times=None,
            region=region,
            when=lambda call: call.params["Name"] == DLAMI,
        )
    bad = only_bad(checked(region=None))
    assert bad.what == f"image {DLAMI}"
    assert bad.text.startswith("missing in eu-west-1, eu-west-2, ")
    assert "ami=" in bad.advice


def test_a_region_without_subnets_is_one_line(aws_api: World) -> None:
    ec2 = aws_api.client()
    for each in ec2.describe_subnets()["Subnets"]:
        ec2.delete_subnet(SubnetId=each["SubnetId"])
    bad = only_bad(checked())
    assert "no default subnet" in bad.text
    assert "create-default-vpc" in bad.text + bad.advice


@pytest.mark.slow
def test_types_that_came_and_went_are_told_in_one_line_that_is_no_failure(
    aws_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions: dict[str, list[dict[str, str]]] = {
        region: [row for row in rows if row["InstanceType"] != "inf2.xlarge"]
        for region, rows in INSTANCE_TYPE_OFFERINGS["region"].items()
    }
    new = ("p9.48xlarge", "p9.96xlarge", "g5.96xlarge")
    monkeypatch.setattr(aws_schema, "BEYOND", aws_schema.BEYOND | {("InstanceType", name) for name in new})
    for name in new:
        regions[HERE].append({"InstanceType": name, "LocationType": "region", "Location": HERE})
    records = {name: INSTANCE_TYPES["g5.48xlarge"] | {"InstanceType": name} for name in new}
    with (
        aws_calls.other_facts(INSTANCE_TYPES, records),
        aws_calls.other_facts(INSTANCE_TYPE_OFFERINGS, {"region": regions}),
    ):
        found = checked(region=None)
        assert [each for each in found.values() if not each.good] == []
        told = found["instance types with accelerators"]
        assert "; skypool does not know g5.96xlarge, p9; none of these regions sells " in told.text
        assert " inf2.xlarge" in told.text
        assert "pip install --upgrade skypool" in told.advice
        here = checked()["instance types with accelerators"]
        assert "none of these regions" not in here.text, "other regions may sell them"


@pytest.mark.slow
def test_a_price_that_differs_from_the_table_is_told_in_one_line(aws_api: World) -> None:
    agree = checked(region=None)["prices of disks and addresses"]
    assert agree.text == "AWS's price list and skypool's tables agree"
    aws_api.disk_price("eu-west-1", 0.09)
    aws_api.stock.address = 0.006
    told = checked(region="eu-west-1")["prices of disks and addresses"]
    assert told.text == (
        "AWS's price list differs from skypool's tables: "
        "a GB and month of disk in eu-west-1 costs 0.09 USD, not 0.088, an hour "
        "of a public address in eu-west-1 costs 0.006 USD, not 0.005"
    )
    assert "upgrade skypool" in told.advice
    assert told.good


@pytest.mark.slow
def test_a_region_that_does_not_answer_does_not_hide_what_the_others_say(aws_api: World) -> None:
    aws_api.fail("DescribeInstanceTypeOfferings", "Unavailable", times=None, region="eu-west-3")
    found = checked(region=None)
    bad = only_bad(found)
    assert bad.what == "instance types"
    assert "eu-west-3" in bad.text
    assert found[f"image {DLAMI}"].good


# --- launches that must fail ---------------------------------------------------------------------------------


def proved(**settings: Any) -> dict[str, Finding]:
    return {each.what: each for each in driver(**settings).prove_creates()}


CODES = {
    "an unknown instance type": "InvalidParameterValue",
    "an unknown image": "InvalidAMIID.NotFound",
    "an unknown subnet": "InvalidSubnetID.NotFound",
    "an unknown key pair": "InvalidKeyPair.NotFound",
    "an unknown security group": "InvalidGroup.NotFound",
    "an unknown placement group": "InvalidPlacementGroup.Unknown",
}


def test_impossible_launches_are_refused_by_name_and_nothing_is_made(aws_api: World) -> None:
    found = proved()
    assert [each for each in found.values() if not each.good] == []
    for what, code in CODES.items():
        assert f"({code})" in found[f"{what} is refused"].text
    real = [call for call in aws_api.calls("RunInstances") if not call.params.get("DryRun")]
    assert sorted(call.error for call in real) == sorted(CODES.values())
    assert len(aws_api.calls("RunInstances")) == len(real) + 12
    assert aws_api.left() == {}


def test_a_refusal_for_another_reason_is_told_with_both_reasons(aws_api: World) -> None:
    aws_api.fail(
        "RunInstances", "Unsupported", "no such thing", when=lambda call: call.params["ImageId"].endswith("000")
    )
    bad = only_bad(proved())
    assert bad.what == "an unknown image"
    assert bad.text == (
        "no such thing (Unsupported), raised as CapacityError, "
        "but skypool expects InvalidAMIID.NotFound as ProviderError, with a text that names ami-00000000000000000"
    )
    assert "report this message" in bad.advice


def test_a_refusal_with_the_right_code_that_names_something_else_is_no_proof(aws_api: World) -> None:
    aws_api.fail(
        "RunInstances",
        "InvalidParameterValue",
        "Value (x) for parameter UserData is invalid",
        when=lambda call: call.params["InstanceType"] == "p99.skypool",
    )
    bad = only_bad(proved())
    assert (bad.what, "names p99.skypool" in bad.text) == ("an unknown instance type", True)


def test_what_is_launched_by_mistake_is_ended_and_told(aws_api: World) -> None:
    """A cloud that takes an unknown type for a known one."""

    def mistake(call: Call, moment: str) -> None:
        if moment == "before" and call.params.get("InstanceType") == "p99.skypool":
            call.params["InstanceType"] = "c5.large"
            call.body = rewritten(call.body, {"InstanceType": "c5.large"})

    aws_api.on_call = mistake
    aws_api.delays.unseen = 2  # as EC2 may not list at once what it has just launched
    bad = only_bad(proved())
    assert bad.what == "an unknown instance type"
    assert bad.text.startswith("AWS launched i-")
    assert bad.text.endswith("skypool has terminated it")
    assert aws_api.left() == {}


@pytest.mark.slow
def test_without_the_permission_to_launch_the_proof_is_one_line(
    aws_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(aws_api, monkeypatch, "ec2:RunInstances")
    bad = only_bad(proved())
    assert bad.what == "permissions in us-east-1"
    assert bad.advice == POLICY


@pytest.mark.parametrize("code", ["Unavailable", pytest.param("RequestLimitExceeded", marks=pytest.mark.slow)])
def test_a_cloud_that_does_not_answer_proves_nothing(aws_api: World, code: str) -> None:
    aws_api.fail("RunInstances", code, times=None, when=lambda call: "subnet-000" in str(call.params))
    bad = only_bad(proved())
    assert bad.what == "an unknown subnet"
    assert f"({code})" in bad.text


# --- the bill ------------------------------------------------------------------------------------------------


def test_the_bill_says_where_to_look_with_a_command_that_aws_understands(aws_api: World) -> None:
    since, until = datetime(2026, 11, 23, 23, 50, tzinfo=UTC), datetime(2026, 11, 24, 0, 20, tzinfo=UTC)
    ids = ["i-0123456789abcdef0", "i-0123456789abcdef1"]
    bill = driver(profile="research").billed(ids, since, until)
    assert bill.usd is None
    assert "0.01 USD" in bill.text
    command = shlex.split(bill.text[bill.text.index("aws ce ") :])
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options.pop("--profile") == "research"
    assert options.pop("--region") == HERE
    period = dict(each.split("=") for each in options["--time-period"].split(","))
    assert period == {"Start": "2026-11-23", "End": "2026-11-25"}, "the last day is not part of it"
    request = {
        "TimePeriod": period,
        "Granularity": options["--granularity"],
        "Filter": json.loads(options["--filter"]),
        "Metrics": options["--metrics"].split(),
        "GroupBy": [dict(each.split("=") for each in options["--group-by"].split(","))],
    }
    model: Any = botocore.session.get_session().get_service_model("ce")
    shape = model.operation_model("GetCostAndUsageWithResources").input_shape
    report: Any = ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()
    assert set(shape.required_members) <= request.keys()
    assert request["Filter"]["Dimensions"]["Values"] == ids
    assert aws_api.journal == []
