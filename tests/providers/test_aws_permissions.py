"""What an IAM user may do with the policy that skypool prints, and how the lab's AWS evaluates policies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

import skypool as sky
from skypool.accelerators import parse
from skypool.drivers import tags
from skypool.errors import AccessError, StillRunning
from skypool.model import Instance, Market, Need, Order
from skypool_aws import AWS
from tests.lab import aws_facts
from tests.lab.aws import AWS as World
from tests.lab.aws_permissions import User
from tests.lab.aws_policies import Ask, MalformedPolicyError, Policy, decide
from tests.lab.aws_wire import Call
from tests.lab.launches import LATER

HERE = "us-east-1"
POOL = {"skypool-pool": "train"}
SSM = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"


# --- policies ------------------------------------------------------------------------------------------------


def statement(action: Any = "*", resource: Any = "*", effect: str = "Allow", **condition: Any) -> dict[str, Any]:
    """Return a statement of a policy; a condition is given as StringEquals={"key": "value"}."""
    made = {"Effect": effect, "Action": action, "Resource": resource}
    return made | ({"Condition": condition} if condition else {})


def policy(*statements: Mapping[str, Any]) -> str:
    """Return a policy document with these statements."""
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})


def verdict(document: str, action: str = "ec2:RunInstances", resource: str = "*", **keys: Any) -> str:
    """Return what a policy says of an action; keys are given as tagkeys=["a"], for aws:tagkeys."""
    context = {f"aws:{key}": value for key, value in keys.items()}
    return decide([Policy(document)], Ask(action, resource, context))


CONDITIONS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"StringEquals": {"aws:Name": ["a", "b"]}}, {"name": ["b"]}, {"name": ["B"]}),
    ({"StringEquals": {"AWS:name": "a"}}, {"name": ["a"]}, {}),
    ({"StringNotEquals": {"aws:name": ["a", "b"]}}, {"name": ["c"]}, {"name": ["b"]}),
    ({"StringNotEquals": {"aws:name": "a"}}, {}, {"name": ["a"]}),
    ({"StringEqualsIgnoreCase": {"aws:name": "Ab"}}, {"name": ["aB"]}, {"name": ["ab "]}),
    ({"StringLike": {"aws:name": "tr*n-?"}}, {"name": ["train-1"]}, {"name": ["train-12"]}),
    ({"StringLike": {"aws:name": "*"}}, {"name": [""]}, {}),
    ({"StringNotLike": {"aws:name": "a*"}}, {"name": ["ba"]}, {"name": ["ab"]}),
    ({"StringEqualsIfExists": {"aws:name": "a"}}, {}, {"name": ["b"]}),
    ({"Bool": {"aws:public": "true"}}, {"public": ["True"]}, {"public": ["false"]}),
    ({"Bool": {"aws:public": True}}, {"public": ["true"]}, {}),
    ({"Null": {"aws:name": "true"}}, {}, {"name": ["a"]}),
    ({"Null": {"aws:name": "false"}}, {"name": ["a"]}, {}),
    ({"NumericLessThanEquals": {"aws:size": "200"}}, {"size": ["30"]}, {"size": ["201"]}),
    ({"ArnLike": {"aws:vpc": "a:b:c:*:1:vpc/*"}}, {"vpc": ["a:b:c:x:1:vpc/y"]}, {"vpc": ["a:b:c:x:2:vpc/y"]}),
    ({"ForAllValues:StringEquals": {"aws:tagkeys": ["a", "b"]}}, {"tagkeys": ["a"]}, {"tagkeys": ["a", "c"]}),
    ({"ForAllValues:StringEquals": {"aws:tagkeys": ["a", "b"]}}, {}, {"tagkeys": ["c"]}),
    ({"ForAnyValue:StringEquals": {"aws:tagkeys": ["a", "b"]}}, {"tagkeys": ["c", "b"]}, {"tagkeys": ["c"]}),
    ({"ForAnyValue:StringEquals": {"aws:tagkeys": ["a", "b"]}}, {"tagkeys": ["a"]}, {}),
    ({"StringEquals": {"aws:tagkeys": "a"}}, {"tagkeys": ["a"]}, {"tagkeys": ["a", "b"]}),
    (
        {"StringEquals": {"aws:name": "${aws:username}-1"}},
        {"name": ["ann-1"], "username": ["ann"]},
        {"name": ["bob-1"], "username": ["ann"]},
    ),
    ({"StringEquals": {"aws:a": "1"}, "StringLike": {"aws:b": "2"}}, {"a": ["1"], "b": ["2"]}, {"a": ["1"]}),
    ({"StringEquals": {"aws:a": "1", "aws:b": "2"}}, {"a": ["1"], "b": ["2"]}, {"b": ["2"]}),
]  # fmt: skip


@pytest.mark.parametrize(("condition", "allowed", "refused"), CONDITIONS, ids=lambda value: json.dumps(value))
def test_a_condition_lets_through_what_fits_it_alone(
    condition: dict[str, Any], allowed: dict[str, Any], refused: dict[str, Any]
) -> None:
    document = policy(statement(**condition))
    assert verdict(document, **allowed) == "allowed"
    assert verdict(document, **refused) == "no policy allows it"


@pytest.mark.parametrize(
    ("action", "resource", "fits"),
    [
        ("ec2:runinstances", "arn:aws:ec2:us-east-1:1:instance/*", True),
        ("ec2:Run*", "arn:aws:ec2:*:1:*/*", True),
        ("ec2:*Instance?", "*", True),
        ("ec2:TerminateInstances", "*", False),
        ("ec2:RunInstances", "arn:aws:ec2:us-west-2:1:instance/*", False),
        ("ec2:RunInstances", "arn:aws:*:instance/*", False),
    ],
)
def test_wildcards_reach_to_the_end_of_their_part_of_an_arn(action: str, resource: str, fits: bool) -> None:
    said = verdict(policy(statement(action, resource)), resource="arn:aws:ec2:us-east-1:1:instance/*")
    assert (said == "allowed") == fits


def test_a_denial_wins_and_lists_can_be_turned_around() -> None:
    document = policy(statement(), statement("ec2:Run*", effect="Deny"))
    assert verdict(document) == "denied"
    assert verdict(document, "ec2:StopInstances") == "allowed"
    turned = policy(
        {"Effect": "Deny", "NotAction": "ec2:Run*", "NotResource": "arn:aws:ec2:*:*:instance/*"}, statement()
    )
    assert verdict(turned) == "allowed"
    assert verdict(turned, "ec2:StopInstances") == "denied"
    assert verdict(turned, "ec2:StopInstances", "arn:aws:ec2:us-east-1:1:instance/i-1") == "allowed"


@pytest.mark.parametrize(
    "document",
    [
        policy(statement(DateLessThan={"aws:CurrentTime": "2030-01-01T00:00:00Z"})),
        policy(statement(effect="Permit")),
        policy({"Effect": "Allow", "Action": "*", "NotAction": "*", "Resource": "*"}),
        policy({**statement(), "Principal": "*"}),
        json.dumps({"Version": "2008-10-17", "Statement": statement()}),
    ],
)
def test_what_is_not_known_in_a_policy_is_not_passed_over(document: str) -> None:
    with pytest.raises(MalformedPolicyError):
        Policy(document)


def test_a_word_of_a_policy_that_means_nothing_is_refused(aws_api: World) -> None:
    with pytest.raises(MalformedPolicyError, match="nothing is called ec2:RunInstance"):
        aws_api.user(policy(statement("ec2:RunInstance")))
    with pytest.raises(MalformedPolicyError, match="ec2:createactions is no key of ec2:CreateTags"):
        aws_api.user(policy(statement("ec2:CreateTags", StringEquals={"ec2:CreateActions": "RunInstances"})))


# --- requests ------------------------------------------------------------------------------------------------


def client(user: User, service: str = "ec2", region: str = HERE) -> Any:
    """Return a client with the user's keys."""
    return boto3.client(
        service,
        region_name=region,
        endpoint_url=user.environment["AWS_ENDPOINT_URL"],
        aws_access_key_id=user.environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=user.environment["AWS_SECRET_ACCESS_KEY"],
    )


def refusal(do: Any, **parameters: Any) -> dict[str, Any]:
    """Return the error of a request that must fail, with its HTTP status."""
    with pytest.raises(ClientError) as refused:
        do(**parameters)
    response: Any = refused.value.response
    return {**response["Error"], "status": response["ResponseMetadata"]["HTTPStatusCode"]}


def machine(world: World, region: str = HERE, kind: str = "c5.large", **more: Any) -> dict[str, Any]:
    """Return the parameters of a launch; tags=… is for the instance."""
    image = world.client("ssm", region).get_parameter(Name=SSM)["Parameter"]["Value"]
    found: dict[str, Any] = {"ImageId": image, "InstanceType": kind, "MinCount": 1, "MaxCount": 1}
    if tags := more.pop("tags", None):
        found["TagSpecifications"] = [{"ResourceType": "instance", "Tags": pairs(tags)}]
    return found | more


def pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return tags as EC2 takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def test_a_denial_of_ec2_reads_as_that_of_ec2(aws_api: World) -> None:
    user = aws_api.user(policy(statement("ec2:DescribeRegions")))
    ec2 = client(user)
    error = refusal(ec2.run_instances, **machine(aws_api))
    image = machine(aws_api)["ImageId"]
    assert (error["Code"], error["status"]) == ("UnauthorizedOperation", 403)
    assert error["Message"].startswith(
        f"You are not authorized to perform this operation. User: {user.arn} is not authorized to perform: "
        f"ec2:RunInstances on resource: arn:aws:ec2:us-east-1::image/{image} because no identity-based policy allows "
        "the ec2:RunInstances action. Encoded authorization failure message: "
    )
    assert refusal(ec2.describe_instances)["Message"] == (
        f"You are not authorized to perform this operation. User: {user.arn} is not authorized to perform: "
        "ec2:DescribeInstances because no identity-based policy allows the ec2:DescribeInstances action"
    )
    assert len(ec2.describe_regions()["Regions"]) == 17
    assert client(user, "sts").get_caller_identity()["Arn"] == user.arn, "which needs no permission"
    assert user.used == {"ec2:DescribeRegions"}


def test_denials_of_the_other_services_read_as_theirs(aws_api: World) -> None:
    user = aws_api.user(
        policy(statement(), statement("servicequotas:*", effect="Deny"), statement("ssm:*", effect="Deny"))
    )
    error = refusal(client(user, "ssm").get_parameter, Name=SSM)
    assert (error["Code"], error["status"]) == ("AccessDeniedException", 400)
    assert error["Message"] == (
        f"User: {user.arn} is not authorized to perform: ssm:GetParameter on resource: "
        f"arn:aws:ssm:us-east-1::parameter{SSM} with an explicit deny in an identity-based policy"
    )
    error = refusal(client(user, "service-quotas").get_service_quota, ServiceCode="ec2", QuotaCode="L-417A185B")
    assert "on resource: arn:aws:servicequotas:us-east-1:123456789012:ec2/L-417A185B with" in error["Message"]
    assert client(user, "pricing").get_products(ServiceCode="AmazonEC2")["PriceList"]


def test_a_dry_run_tells_permission_from_its_lack(aws_api: World) -> None:
    request = machine(aws_api, DryRun=True)
    assert refusal(client(aws_api.user(policy(statement()))).run_instances, **request)["Code"] == "DryRunOperation"
    nobody = client(aws_api.user(policy(statement("ec2:Describe*"))))
    assert refusal(nobody.run_instances, **request)["Code"] == "UnauthorizedOperation"
    group = {"GroupName": "g", "Description": "g", "DryRun": True}
    assert refusal(nobody.create_security_group, **group)["Code"] == "UnauthorizedOperation"


def test_policies_of_a_user_can_be_changed_by_iam(aws_api: World) -> None:
    user = aws_api.user(policy(statement("ec2:DescribeRegions")))
    iam = aws_api.client("iam")
    assert refusal(client(user).describe_instances)["Code"] == "UnauthorizedOperation"
    iam.put_user_policy(UserName=user.name, PolicyName="more", PolicyDocument=policy(statement("ec2:Describe*")))
    assert client(user).describe_instances()["Reservations"] == []
    arn = iam.create_policy(PolicyName="less", PolicyDocument=policy(statement("ec2:*", effect="Deny")))["Policy"][
        "Arn"
    ]
    iam.attach_user_policy(UserName=user.name, PolicyArn=arn)
    assert refusal(client(user).describe_instances)["Code"] == "UnauthorizedOperation"


def test_each_resource_of_a_launch_must_be_allowed(aws_api: World) -> None:
    kinds = (
        "image",
        "instance",
        "network-interface",
        "security-group",
        "subnet",
        "volume",
        "key-pair",
        "placement-group",
    )
    admin = aws_api.client()
    admin.create_key_pair(KeyName="k")
    admin.create_placement_group(GroupName="p", Strategy="cluster")
    group = admin.create_security_group(GroupName="g", Description="g")["GroupId"]
    subnet = admin.describe_subnets()["Subnets"][0]
    card = {"DeviceIndex": 0, "SubnetId": subnet["SubnetId"], "Groups": [group]}
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeType": "gp3", "VolumeSize": 30}}
    request = machine(
        aws_api, DryRun=True, KeyName="k", NetworkInterfaces=[card], BlockDeviceMappings=[disk],
        Placement={"GroupName": "p"},
    )  # fmt: skip
    arns = {kind: f"arn:aws:ec2:*:{'' if kind == 'image' else '*'}:{kind}/*" for kind in kinds}
    everything = client(aws_api.user(policy(statement("ec2:RunInstances", [*arns.values()]))))
    assert refusal(everything.run_instances, **request)["Code"] == "DryRunOperation"
    for left_out in kinds:
        rest = [arn for kind, arn in arns.items() if kind != left_out]
        error = refusal(client(aws_api.user(policy(statement("ec2:RunInstances", rest)))).run_instances, **request)
        assert error["Code"] == "UnauthorizedOperation"
        assert f":{left_out}/" in error["Message"], left_out


CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("type", {"StringLike": {"ec2:InstanceType": ["c5.*"]}}, {}, {"InstanceType": "m5.large"}),
    (
        "market",
        {"StringEquals": {"ec2:InstanceMarketType": "spot"}},
        {"InstanceMarketOptions": {"MarketType": "spot"}},
        {},
    ),
    (
        "metadata",
        {"StringEquals": {"ec2:MetadataHttpTokens": "required"}},
        {"MetadataOptions": {"HttpTokens": "required"}},
        {"MetadataOptions": {"HttpTokens": "optional"}},
    ),
    ("tag", {"StringLike": {"aws:RequestTag/skypool-pool": "*"}}, {"tags": POOL}, {"tags": {"Name": "x"}}),
    (
        "tag keys",
        {"ForAllValues:StringEquals": {"aws:TagKeys": ["skypool-pool"]}},
        {"tags": POOL},
        {"tags": {"Name": "x"}},
    ),
    ("region", {"StringEquals": {"ec2:Region": "us-east-1"}}, {}, {"region": "us-west-2"}),
    ("requested region", {"StringEquals": {"aws:RequestedRegion": "us-east-1"}}, {}, {"region": "us-west-2"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "allowed", "refused"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_launch_is_allowed_or_refused_by_what_it_asks_for(
    aws_api: World, condition: dict[str, Any], allowed: dict[str, Any], refused: dict[str, Any]
) -> None:
    rest = {"Effect": "Allow", "Action": "ec2:RunInstances", "NotResource": "arn:aws:ec2:*:*:instance/*"}
    instances = statement("ec2:RunInstances", "arn:aws:ec2:*:*:instance/*", **condition)
    user = aws_api.user(policy(rest, instances, statement("ec2:CreateTags")))
    for parameters, code in ((allowed, "DryRunOperation"), (refused, "UnauthorizedOperation")):
        region = parameters.get("region", HERE)
        request = machine(aws_api, DryRun=True, **parameters)
        request.pop("region", None)
        assert refusal(client(user, region=region).run_instances, **request)["Code"] == code


def test_tags_are_given_only_to_what_is_being_made(aws_api: World) -> None:
    creation = statement("ec2:CreateTags", StringEquals={"ec2:CreateAction": "RunInstances"})
    user = aws_api.user(policy(statement("ec2:RunInstances"), creation))
    ec2 = client(user)
    [made] = ec2.run_instances(**machine(aws_api, tags=POOL))["Instances"]
    error = refusal(ec2.create_tags, Resources=[made["InstanceId"]], Tags=pairs({"a": "b"}))
    assert error["Code"] == "UnauthorizedOperation"
    assert (
        f"ec2:CreateTags on resource: arn:aws:ec2:us-east-1:123456789012:instance/{made['InstanceId']}"
        in error["Message"]
    )
    assert user.used == {"ec2:RunInstances", "ec2:CreateTags"}
    untagged = client(aws_api.user(policy(statement("ec2:RunInstances"))))
    assert (
        "perform: ec2:CreateTags on resource: arn:aws:ec2:us-east-1:123456789012:instance/*"
        in refusal(untagged.run_instances, **machine(aws_api, tags=POOL))["Message"]
    )
    assert untagged.run_instances(**machine(aws_api))["Instances"]


def test_spot_requests_are_a_resource_and_need_their_role_the_first_time(aws_api: World) -> None:
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}}
    tagged = {"TagSpecifications": [{"ResourceType": "spot-instances-request", "Tags": pairs(POOL)}]}
    may_tag = statement("ec2:CreateTags")
    everything_else = {
        "Effect": "Allow",
        "Action": "ec2:RunInstances",
        "NotResource": "arn:aws:ec2:*:*:spot-instances-request/*",
    }
    user = aws_api.user(policy(everything_else, may_tag))
    assert (
        ":spot-instances-request/*"
        in refusal(client(user).run_instances, **machine(aws_api), **spot, **tagged)["Message"]
    )
    user = aws_api.user(policy(statement("ec2:RunInstances"), may_tag))
    error = refusal(client(user).run_instances, **machine(aws_api), **spot, **tagged)
    assert error["Code"] == "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
    role = "arn:aws:iam::*:role/aws-service-role/spot.amazonaws.com/AWSServiceRoleForEC2Spot"
    first = statement("iam:CreateServiceLinkedRole", role, StringEquals={"iam:AWSServiceName": "spot.amazonaws.com"})
    user_too = aws_api.user(policy(statement("ec2:RunInstances"), may_tag, first))
    assert client(user_too).run_instances(**machine(aws_api), **spot, **tagged)["Instances"]
    assert "iam:CreateServiceLinkedRole" in user_too.used
    assert client(user).run_instances(**machine(aws_api), **spot, **tagged)["Instances"], "the role is there now"


def test_a_role_is_passed_on_only_by_those_who_may(aws_api: World) -> None:
    iam = aws_api.client("iam")
    for name in ("reader", "admin"):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName=f"{name}-profile")
        iam.add_role_to_instance_profile(InstanceProfileName=f"{name}-profile", RoleName=name)
    passing = statement(
        "iam:PassRole", "arn:aws:iam::*:role/reader", StringEquals={"iam:PassedToService": "ec2.amazonaws.com"}
    )
    user = aws_api.user(policy(statement("ec2:RunInstances"), passing))
    reader = machine(aws_api, IamInstanceProfile={"Name": "reader-profile"}, DryRun=True)
    assert refusal(client(user).run_instances, **reader)["Code"] == "DryRunOperation"
    error = refusal(client(user).run_instances, **machine(aws_api, IamInstanceProfile={"Name": "admin-profile"}))
    assert error["Code"] == "UnauthorizedOperation"
    assert "perform: iam:PassRole on resource: arn:aws:iam::123456789012:role/admin because" in error["Message"]
    to_lambda = statement("iam:PassRole", "*", StringEquals={"iam:PassedToService": "lambda.amazonaws.com"})
    other = client(aws_api.user(policy(statement("ec2:RunInstances"), to_lambda)))
    assert "iam:PassRole" in refusal(other.run_instances, **reader)["Message"]


# --- skypool's own policy ------------------------------------------------------------------------------------

NEED = Need(vcpus=2)
P5 = Need(accelerators=(parse("H100:8"),), private_network=True)
DLAMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"


def command(*words: str, later: float = 0.0) -> str:
    """Run `skypool` with these words in a process of its own, so many seconds later, and return what it prints."""
    run = [sys.executable, "-c", LATER, str(later), *words]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def tester(aws_api: World, own_state: None, monkeypatch: pytest.MonkeyPatch) -> User:
    """Return a user with exactly the policy that skypool prints. The test's environment has the user's keys."""
    user = aws_api.user(command("doctor", "--policy", "aws"))
    for name, value in user.environment.items():
        monkeypatch.setenv(name, value)
    return user


def placed(number: int, need: Need, nodes: tuple[int, ...] = (0,)) -> Order:
    """Return an order whose machines are needed for a minute more."""
    return Order("train", f"{number:016x}-1", nodes, need, until=datetime.now(UTC) + timedelta(minutes=1))


def rented(driver: AWS, order: Order, kind: str = "", market: Market = "on-demand") -> list[Instance]:
    """Return what is rented on the first offer for an order."""
    offers = (each for each in driver.offers(replace(order.need, market=market)) if each.market == market)
    return driver.launch(next(each for each in offers if kind in each.instance_type), order)


def refused(world: World) -> list[Call]:
    """Return the calls that were refused because their user may not make them."""
    return [each for each in world.journal if "Unauthorized" in each.error or "AccessDenied" in each.error]


@pytest.mark.needs("openssh")
def test_a_machine_has_an_identity_if_who_rents_it_may_pass_that_on(aws_api: World, tester: User) -> None:
    iam = aws_api.client("iam")
    iam.create_role(RoleName="runs", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="runs-profile")
    iam.add_role_to_instance_profile(InstanceProfileName="runs-profile", RoleName="runs")
    driver = AWS(region=HERE, ssh_from="203.0.113.7", instance_profile="runs-profile")
    with pytest.raises(AccessError, match="iam:PassRole"):
        rented(driver, placed(1, NEED))
    passing = statement("iam:PassRole", "arn:aws:iam::123456789012:role/runs")
    iam.put_user_policy(UserName=tester.name, PolicyName="pass", PolicyDocument=policy(passing))
    rented(driver, placed(2, NEED))
    assert aws_api.calls("RunInstances")[-1].params["IamInstanceProfile"] == {"Name": "runs-profile"}
    driver.terminate(driver.instances())


@pytest.mark.slow
def test_the_policy_is_enough_for_all_that_a_pool_does_and_has_nothing_that_is_not_used(
    aws_api: World, tester: User
) -> None:
    network = {"region": HERE, "ssh_from": "203.0.113.7"}
    driver = AWS(**network)
    rented(driver, placed(1, NEED))
    rented(driver, placed(2, NEED), market="spot")
    gang = rented(driver, placed(3, P5, (0, 1)), "p5.48xlarge")
    aws_api.wait(lambda: {each.state for each in driver.instances()} == {"running"})
    for each in gang:
        driver.access(each)
    until = datetime.now(UTC) + timedelta(minutes=2)
    driver.renew("train", until)
    assert {each.until for each in driver.instances()} == {until.replace(microsecond=0)}
    for number, kind in enumerate(("default", "capacity-block"), 4):
        held = aws_api.reserve("p5.48xlarge", "us-east-1b", 1, kind=kind, end=86400)
        rented(AWS(**network, capacity_reservation=held), placed(number, replace(P5, private_network=False)))
    subnet = aws_api.client().describe_subnets()["Subnets"][0]["SubnetId"]
    for number, ami in enumerate((DLAMI, aws_facts.IMAGES[DLAMI].id(HERE)), 6):
        rented(AWS(**network, subnet=subnet, ami=ami), placed(number, NEED))
    disk = [{"ResourceType": "volume", "Tags": pairs(tags.tags(placed(8, NEED)))}]
    aws_api.client().create_volume(AvailabilityZone="us-east-1a", Size=8, TagSpecifications=disk)
    assert aws_api.left().keys() >= {"instances", "volumes", "key_pairs", "security_groups", "placement_groups"}
    command("gc", "--yes", "--provider", "aws", later=3600)
    assert aws_api.left() == {}

    aws_api.fail("GetServiceQuota", "NoSuchResourceException")  # a quota that is AWS's default still
    findings = [*driver.check(), *driver.prove_creates()]
    assert [each for each in findings if not each.good] == []
    assert refused(aws_api) == []
    document = json.loads(driver.policy())
    listed = [each["Action"] for each in document["Statement"]]
    assert tester.used == {name for some in listed for name in ([some] if isinstance(some, str) else some)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "terms",
    [{"vcpus": 2}, {"vcpus": 2, "market": "spot"}, {"accelerator": "A10G", "private_network": True, "nodes": 2}],
    ids=["on demand", "spot", "private network"],
)
def test_whole_pools_need_no_more_than_the_policy(
    aws: World, own_state: None, monkeypatch: pytest.MonkeyPatch, terms: dict[str, Any]
) -> None:
    user = aws.user(AWS().policy())
    for name, value in user.environment.items():
        monkeypatch.setenv(name, value)
    with sky.ComputePool(AWS(region=HERE, ssh_from="0.0.0.0/0"), console="off", **terms) as pool:
        assert pool.submit(divmod, 7, 2).result() == (3, 1)
    assert aws.left() == {}
    assert refused(aws) == []
    assert {"ec2:RunInstances", "ec2:TerminateInstances", "ec2:DeleteSecurityGroup"} <= user.used


def test_the_policy_ends_and_changes_only_what_skypool_made(aws_api: World, tester: User) -> None:
    admin, ec2 = aws_api.client(), client(tester)
    [foreign] = admin.run_instances(**machine(aws_api, tags={"Name": "production"}))["Instances"]
    id = foreign["InstanceId"]
    volume = admin.create_volume(AvailabilityZone="us-east-1a", Size=8)["VolumeId"]
    group = admin.create_security_group(GroupName="g", Description="g")["GroupId"]
    admin.create_key_pair(KeyName="k")
    admin.create_placement_group(GroupName="p", Strategy="cluster")
    rule = [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
    for do, parameters in (
        (ec2.terminate_instances, {"InstanceIds": [id]}),
        (ec2.create_tags, {"Resources": [id], "Tags": pairs(POOL)}),
        (ec2.delete_volume, {"VolumeId": volume}),
        (ec2.authorize_security_group_ingress, {"GroupId": group, "IpPermissions": rule}),
        (ec2.delete_security_group, {"GroupId": group}),
        (ec2.delete_key_pair, {"KeyName": "k"}),
        (ec2.delete_placement_group, {"GroupName": "p"}),
        (ec2.stop_instances, {"InstanceIds": [id]}),
        (ec2.create_volume, {"AvailabilityZone": "us-east-1a", "Size": 8}),
    ):
        assert refusal(do, **parameters)["Code"] == "UnauthorizedOperation", do
    [ours] = ec2.run_instances(**machine(aws_api, tags=POOL))["Instances"]
    error = refusal(ec2.terminate_instances, InstanceIds=[ours["InstanceId"], id])
    assert f"instance/{id} because" in error["Message"]
    ec2.create_tags(Resources=[ours["InstanceId"]], Tags=pairs({"skypool-until": "x"}))
    ec2.terminate_instances(InstanceIds=[ours["InstanceId"]])


@pytest.mark.needs("openssh")
def test_what_has_ended_already_is_not_a_refusal_by_the_policy(aws_api: World, tester: User) -> None:
    """What is gone has no tags, and so may not be ended by somebody who may end only what has them."""
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    order = placed(1, NEED, (0, 1, 2))
    launched = rented(driver, order)
    left = driver.leftovers()
    aws_api.fail_instance(launched[0].id, "Server.InternalError", "its host is gone")
    aws_api.wait(lambda: len(aws_api.rentals) == 2)
    driver.terminate([*launched, replace(launched[0], id="i-0123456789abcdef0", created_at=1.0)])
    assert "UnauthorizedOperation" in [call.error for call in aws_api.calls("TerminateInstances")]
    driver.terminate(launched)
    for _ in range(2):
        driver.tidy(left)
    assert "UnauthorizedOperation" in [call.error for call in aws_api.calls("DeleteSecurityGroup")]
    assert aws_api.left() == {}


@pytest.mark.needs("openssh")
def test_an_end_that_the_policy_does_not_allow_is_still_told(aws_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    launched = rented(driver, placed(1, NEED, (0, 1)))
    without = (
        driver.policy().replace('"ec2:TerminateInstances"', '"ec2:StopInstances"').replace('"ec2:DeleteKeyPair", ', "")
    )
    for name, value in aws_api.user(without).environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StillRunning) as left:
        driver.terminate(launched)
    assert {getattr(each, "id", None) for each in left.value.instances} == {each.id for each in launched}
    assert "is not authorized to perform: ec2:TerminateInstances on resource" in str(left.value)
    with pytest.raises(AccessError, match="ec2:DeleteKeyPair"):
        driver.tidy([each for each in driver.leftovers() if each.kind == "key-pair"])


@pytest.mark.needs("openssh")
@pytest.mark.parametrize(
    ("missing", "does"),
    [
        ("ec2:RunInstances", "launch"),
        ("ec2:ImportKeyPair", "launch"),
        ("ec2:DescribeInstances", "list"),
        ("pricing:GetProducts", "offers"),
        ("ssm:GetParameter", "launch"),
    ],
)
def test_a_missing_permission_is_named_with_the_next_step(
    aws_api: World, monkeypatch: pytest.MonkeyPatch, missing: str, does: str
) -> None:
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    offer = next(iter(driver.offers(replace(NEED, market="on-demand"))))
    without = policy(*json.loads(driver.policy())["Statement"], statement(missing, effect="Deny"))
    for name, value in aws_api.user(without).environment.items():
        monkeypatch.setenv(name, value)
    do: dict[str, Callable[[], object]] = {
        "launch": lambda: driver.launch(offer, placed(1, NEED)),
        "list": driver.instances,
        "offers": lambda: driver.offers(replace(NEED, market="on-demand")),
    }
    with pytest.raises(AccessError) as denied:
        do[does]()
    assert f"is not authorized to perform: {missing} " in str(denied.value)
    assert "Encoded" not in str(denied.value)
    assert str(denied.value).endswith(
        "; ask your administrator for the permissions that `skypool doctor --policy aws` prints"
    )
