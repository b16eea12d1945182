"""The lab's AWS against the models that botocore ships: what fits them, and what is refused.

Wrong requests are made of the driver's real ones, each by one change, and sent as they are: boto3 would keep some back.
"""

from __future__ import annotations

import json
import re
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode

import botocore
import pytest

from skypool.accelerators import parse
from skypool.model import Need, Order
from skypool_aws import AWS
from tests.lab import aws_calls
from tests.lab.aws import AWS as World
from tests.lab.aws_schema import SOURCE, Schema
from tests.lab.aws_wire import Call, answer

pytestmark = pytest.mark.needs("openssh")

HERE = "us-east-1"
Sent = dict[str, Call]


def lived(world: World) -> Sent:
    """What the driver sends in the life of a pool that is over and of one that is still there, by action.

    "spot" is a launch of that kind.
    """
    driver = AWS(region=HERE, ssh_from="203.0.113.7")
    together = Need((parse("H100:8"),), private_network=True)
    spot = replace(together, market="spot", private_network=False, max_usd_per_hour=200.0)

    def launch(pool: str, need: Need, nodes: tuple[int, ...]) -> None:
        offer = next(each for each in driver.offers(need) if each.instance_type == "p5.48xlarge")
        token = f"{pool:0>16}-{nodes[0]}"
        for each in driver.launch(offer, Order(pool, token, nodes, need, until=datetime(2030, 1, 1, tzinfo=UTC))):
            driver.access(each)

    for pool in ("past", "present"):
        launch(pool, together, (0, 1))
        launch(pool, spot, (2,))
        driver.renew(pool, datetime(2031, 1, 1, tzinfo=UTC))
        if pool == "past":
            end(driver)
    block = world.reserve("p5.48xlarge", "us-east-1b", 1)
    list(AWS(region=HERE, capacity_reservation=block).offers(together))
    list(driver.check())
    good = [call for call in world.journal if not call.error]
    runs = [call for call in good if call.action == "RunInstances"]
    return {call.action: call for call in good} | {"RunInstances": runs[-2], "spot": runs[-1]}


def end(driver: AWS) -> None:
    driver.terminate(driver.instances())
    driver.tidy(driver.leftovers())


def test_a_world_that_gave_a_false_reply_fails_when_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    false = {"PlacementGroups": [{"GroupName": "g", "State": "perhaps"}]}
    monkeypatch.setitem(aws_calls.ANSWERS, "DescribePlacementGroups", lambda world, call: false)
    with pytest.raises(ExceptionGroup, match="the lab's AWS failed") as failed, World() as world:
        world.client().describe_placement_groups()
    assert "'perhaps' is none of its values" in str(failed.value.exceptions[0])


@pytest.fixture(scope="module")
def past() -> Iterator[tuple[World, Sent]]:
    """A world in which a pool has lived and another one is there, for all tests of this module."""
    with pytest.MonkeyPatch.context() as patch, World() as world:
        for name, value in world.environment.items():
            patch.setenv(name, value)
        world.schema = Schema()
        yield world, lived(world)
        end(AWS(region=HERE))
        assert world.left() == {}


@pytest.mark.slow
def test_all_that_the_driver_sends_and_gets_fits_the_models(past: tuple[World, Sent]) -> None:
    """A request that does not fit would be refused, and a reply that does not would fail the world when it closes."""
    world, _ = past
    schema, journal = world.schema, list(world.journal)
    checked = {f"{call.service}:{call.action}" for call in journal}
    assert schema.operations == checked
    assert {"ec2:RunInstances", "ec2:AssociateAddress", "pricing:GetProducts", "ssm:GetParameter"} <= checked
    assert {"servicequotas:GetServiceQuota", "sts:GetCallerIdentity"} <= checked
    assert schema.requests == len(journal)
    assert schema.replies == len([call for call in journal if call.status < 400]) > 60
    assert schema.fields > 2000
    assert f"botocore {botocore.__version__}" == SOURCE
    print(
        f"\n{SOURCE}: {schema.requests} requests and {schema.replies} replies of {len(schema.operations)} operations "
        f"with {schema.fields} fields fit"
    )


# --- wrong replies -------------------------------------------------------------------------------------------


def asked(service: str, action: str) -> Call:
    """A request for which a reply is looked at."""
    return Call(1, service, action, HERE, {}, "", 0.0, target="" if service == "ec2" else action)


GROUPS = {"PlacementGroups": [{"GroupName": "g", "State": "available", "Strategy": "cluster", "PartitionCount": 2}]}
PARAMETER = {"Parameter": {"Name": "n", "Type": "String", "Version": 42}}


@pytest.mark.parametrize(
    ("service", "action", "result", "right", "false", "says"),
    [
        (
            "ec2",
            "DescribePlacementGroups",
            GROUPS,
            b"<state>available",
            b"<state>there",
            "'there' is none of its values",
        ),
        ("ec2", "DescribePlacementGroups", GROUPS, b"<partitionCount>2", b"<partitionCount>two", "'two' is no integer"),
        ("ec2", "DescribePlacementGroups", GROUPS, b"groupName>", b"name>", "item.name: it is not known"),
        ("ec2", "DescribePlacementGroups", GROUPS, b"<item>", b"<item><groupName>h</groupName>", "it is there twice"),
        ("ec2", "DescribePlacementGroups", GROUPS, b"item>", b"member>", "an item is called item"),
        (
            "ec2",
            "DescribePlacementGroups",
            GROUPS,
            b"2016-11-15/",
            b"2016-11-15",
            "is not of http://ec2.amazonaws.com/",
        ),
        ("ec2", "DescribePlacementGroups", GROUPS, b"requestId>", b"id>", "requestId: it is missing"),
        ("ec2", "DescribePlacementGroups", GROUPS, b"GroupsResponse", b"Response", "DescribePlacementResponse"),
        ("ec2", "DeletePlacementGroup", {}, b"<return>true", b"<return>yes", "return: it is not known"),
        ("ssm", "GetParameter", PARAMETER, b'"String"', b'"Text"', "Parameter.Type: 'Text' is none of its values"),
        ("ssm", "GetParameter", PARAMETER, b'"Version"', b'"Number"', "Parameter.Number: it is not known"),
        ("ssm", "GetParameter", PARAMETER, b"42", b'"42"', "Parameter.Version: '42' is no long"),
    ],
)
def test_a_reply_that_is_not_aws_s_is_told(
    service: str, action: str, result: Any, right: bytes, false: bytes, says: str
) -> None:
    call, schema = asked(service, action), Schema()
    reply = answer(call, result)
    assert schema.wrong_reply(call, reply) == []
    assert right in reply.body
    wrong = schema.wrong_reply(call, replace(reply, body=reply.body.replace(right, false)))
    assert any(says.removeprefix("item.") in each for each in wrong), wrong


# --- wrong requests ------------------------------------------------------------------------------------------

Form = dict[str, Any]


def as_it_was(form: Form) -> Form:
    return form


def put(**fields: Any) -> Callable[[Form], Form]:
    """Set fields; "__" stands for the dot in their names."""
    return lambda form: form | {name.replace("__", "."): value for name, value in fields.items()}


def without(*names: str) -> Callable[[Form], Form]:
    return lambda form: {name: value for name, value in form.items() if name not in names}


def tags(number: int) -> Form:
    return {f"Tag.{n}.{part}": f"{part}{n}" for n in range(1, number + 1) for part in ("Key", "Value")}


WRONG: list[tuple[str, Callable[[Form], Form], str]] = [
    ("RunInstances", without("MinCount"), "MissingParameter"),
    ("RunInstances", put(InstanceType="p5.49xlarge"), "InvalidParameterValue"),
    ("RunInstances", put(InstanceInitiatedShutdownBehavior="delete"), "InvalidParameterValue"),
    ("RunInstances", put(MetadataOptions__HttpTokens="forced"), "InvalidParameterValue"),
    ("RunInstances", put(MaxCount="two"), "InvalidParameterValue"),
    ("RunInstances", put(ClientToken="t" * 65), "InvalidParameterValue"),
    ("RunInstances", put(Lease="60"), "UnknownParameter"),
    ("RunInstances", put(NetworkInterface__1__Lease="60"), "UnknownParameter"),
    ("RunInstances", put(NetworkInterface__1__AssociatePublicIpAddress="true"), "InvalidParameterCombination"),
    ("RunInstances", put(NetworkInterface__2__InterfaceType="interface", NetworkInterface__1__InterfaceType="efa-only"),
     "InvalidParameterCombination"),
    ("RunInstances", put(NetworkInterface__33__NetworkCardIndex="32"), "InvalidParameterValue"),
    ("RunInstances", put(NetworkInterface__33__NetworkCardIndex="30"), "InvalidParameterValue"),
    ("RunInstances", put(NetworkInterface__1__InterfaceType="efa"), "AttachmentLimitExceeded"),
    ("RunInstances", put(SubnetId="subnet-0123456789abcdef0"), "InvalidParameterCombination"),
    ("RunInstances", put(**{f"NetworkInterface__{n}__SubnetId": "subnet-0123456789abcdef0" for n in range(1, 34)}),
     "InvalidSubnetID.NotFound"),
    ("RunInstances", put(ImageId="ami-ubuntu"), "InvalidAMIID.Malformed"),
    ("RunInstances", put(ImageId="ami-0123456789abcdef0"), "InvalidAMIID.NotFound"),
    ("RunInstances", put(TagSpecification__1__Tag__1__Key="aws:skypool"), "InvalidParameterValue"),
    ("RunInstances", put(TagSpecification__1__Tag__1__Value="v" * 257), "InvalidParameterValue"),
    ("RunInstances", put(TagSpecification__1__ResourceType="machine"), "InvalidParameterValue"),
    ("RunInstances", put(UserData="#cloud-config"), "InvalidParameterValue"),
    ("RunInstances", put(InstanceMarketOptions__MarketType="capacity-block"), "InvalidParameterCombination"),
    ("spot", put(InstanceMarketOptions__SpotOptions__SpotInstanceType="once"), "InvalidParameterValue"),
    ("spot", put(InstanceMarketOptions__SpotOptions__MaxPrice="0.0001"), "SpotMaxPriceTooLow"),
    ("CreateSecurityGroup", without("GroupDescription"), "MissingParameter"),
    ("CreateSecurityGroup", put(VpcId="vpc-0123456789abcdef0"), "InvalidVpcID.NotFound"),
    ("AuthorizeSecurityGroupIngress", put(IpPermissions__1__FromPort="ssh"), "InvalidParameterValue"),
    ("AuthorizeSecurityGroupIngress", put(GroupId="sg-0123456789abcdef0"), "InvalidGroup.NotFound"),
    ("CreatePlacementGroup", put(Strategy="near"), "InvalidParameterValue"),
    ("CreatePlacementGroup", as_it_was, "InvalidPlacementGroup.Duplicate"),
    ("ImportKeyPair", put(PublicKeyMaterial="c3NoLXJzYSBBQUFB"), "InvalidKey.Format"),
    ("CreateTags", lambda form: form | tags(51), "TagLimitExceeded"),
    ("CreateTags", put(ResourceId__1="i-0123456789abcdef0"), "InvalidInstanceID.NotFound"),
    ("TerminateInstances", put(InstanceId__1="i-0123456789abcdef0"), "InvalidInstanceID.NotFound"),
    ("AllocateAddress", put(Domain="classic"), "InvalidParameterValue"),
    ("AssociateAddress", put(AllocationId="eipalloc-0123456789abcdef0"), "InvalidAllocationID.NotFound"),
    ("AssociateAddress", put(InstanceId="i-0123456789abcdef0"), "InvalidParameterCombination"),
    ("ReleaseAddress", without("AllocationId"), "MissingParameter"),
    ("DescribeInstanceTypeOfferings", put(LocationType="zone"), "InvalidParameterValue"),
    ("DescribeSpotPriceHistory", put(StartTime="today"), "InvalidParameterValue"),
    ("DescribeInstanceTypes", put(MaxResults="1"), "InvalidParameterValue"),
    ("DescribeCapacityReservations", put(CapacityReservationId__1="cr-0123456789abcdef0"),
     "InvalidCapacityReservationId.NotFound"),
    ("GetParameter", without("Name"), "ValidationException"),
    ("GetProducts", put(ServiceCode=1), "InvalidParameterException"),
    ("GetProducts", put(Filters=[{"Type": "SAME", "Field": "a", "Value": "b"}]), "InvalidParameterException"),
    ("GetServiceQuota", put(QuotaCode="P instances"), "IllegalArgumentException"),
]  # fmt: skip


def send(world: World, call: Call, change: Callable[[Form], Form]) -> tuple[int, str]:
    """The status and the code with which a changed request is answered. A launch has a token of its own."""
    headers = {"Authorization": f"AWS4-HMAC-SHA256 Credential={call.key}/20261124/{HERE}/{call.service}/aws4_request"}
    if call.is_json:
        body = json.dumps(change(json.loads(call.body))).encode()
        headers |= {"X-Amz-Target": call.target, "Content-Type": "application/x-amz-json-1.1"}
    else:
        form = dict(parse_qsl(call.body.decode(), keep_blank_values=True))
        form |= {"ClientToken": secrets.token_hex(8)} if "ClientToken" in form else {}
        body = urlencode(change(form)).encode()
        headers["Content-Type"] = "application/x-www-form-urlencoded"
    try:
        with urllib.request.urlopen(urllib.request.Request(world.url, body, headers)) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as refused:
        found = re.search(rb"<Code>([^<]+)|\"__type\": ?\"([^\"]+)", refused.read())
        assert found is not None
        return refused.code, (found[1] or found[2]).decode()


def test_there_are_wrong_requests_of_most_of_what_the_driver_sends(past: tuple[World, Sent]) -> None:
    _, sent = past
    assert len(WRONG) >= 20
    assert {action for action, _, _ in WRONG} <= set(sent)


@pytest.mark.parametrize("action", ["RunInstances", "spot", "CreateTags", "AssociateAddress", "GetProducts"])
def test_the_same_request_is_not_refused_as_it_was(past: tuple[World, Sent], action: str) -> None:
    world, sent = past
    assert send(world, sent[action], as_it_was) == (200, "")


@pytest.mark.parametrize(
    ("action", "change", "code"), WRONG, ids=[f"{n} {each[0]} {each[2]}" for n, each in enumerate(WRONG)]
)
def test_a_wrong_request_is_refused_as_aws_refuses_it(
    past: tuple[World, Sent], action: str, change: Callable[[Form], Form], code: str
) -> None:
    world, sent = past
    before = world.count()
    answered = send(world, sent[action], change)
    assert answered[1] == code
    assert answered[0] == 400
    assert world.count() == before
