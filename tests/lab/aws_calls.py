"""Calls of EC2 that the lab's AWS answers itself: those moto lacks, and those it answers unlike the real one."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import functools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from unittest import mock

from moto.ec2.models.instance_types import InstanceType

from tests.lab import aws_facts
from tests.lab.aws_life import CODES, Rental
from tests.lab.aws_stock import Reservation
from tests.lab.aws_wire import ApiError, Call

if TYPE_CHECKING:
    from tests.lab.aws import AWS

_INSTANCE_ID = re.compile(r"i-([0-9a-f]{8}|[0-9a-f]{17})")
Answer = Callable[["AWS", Call], Mapping[str, Any]]
Filters = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass
class PlacementGroup:
    """One, by its name in its region."""

    name: str
    strategy: str
    tags: list[dict[str, str]]
    id: str = field(default_factory=lambda: f"pg-0{secrets.token_hex(8)}")


# --- instances -----------------------------------------------------------------------------------------------


def _rentals(world: AWS, call: Call) -> list[Rental]:
    """Those that a call names; none of them is touched if one is not there."""
    asked: Sequence[str] = call.params.get("InstanceIds", ())
    if not asked:
        raise ApiError("MissingParameter", "The request must contain the parameter InstanceId")
    _instances_are_there(world, call, asked)
    return [world.life.rentals[each] for each in asked]


def _instances_are_there(world: AWS, call: Call, ids: Sequence[str]) -> None:
    rentals = world.life.rentals
    missing = [each for each in ids if each not in rentals or rentals[each].region != call.region]
    if missing:
        raise not_found(missing)


def check_ids(call: Call) -> None:
    """Refuse ids that no instance can have, as EC2 does before it looks for them.

    See InvalidInstanceID.Malformed on https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
    (read 2026-11-24).
    """
    for each in call.params.get("InstanceIds", ()):
        if not _INSTANCE_ID.fullmatch(each):
            raise ApiError("InvalidInstanceID.Malformed", f'Invalid id: "{each}"')


def not_found(missing: Sequence[str]) -> ApiError:
    one = len(missing) == 1
    text = f"The instance ID{'' if one else 's'} '{', '.join(missing)}' do{'es' if one else ''} not exist"
    return ApiError("InvalidInstanceID.NotFound", text)


def _change(world: AWS, call: Call, member: str, do: Callable[[Rental], object]) -> Mapping[str, Any]:
    rows = []
    for rental in _rentals(world, call):
        before = rental.state
        do(rental)
        states = {"CurrentState": rental.state, "PreviousState": before}
        row: dict[str, Any] = {name: {"Code": CODES[state], "Name": state} for name, state in states.items()}
        rows.append({"InstanceId": rental.id, **row})
    return {member: rows}


def terminate_instances(world: AWS, call: Call) -> Mapping[str, Any]:
    rentals = _rentals(world, call)
    world.throttle.instances(call, len(rentals))
    for rental in rentals:
        if rental.model.disable_api_termination:
            text = f"The instance '{rental.id}' may not be terminated. Modify its 'disableApiTermination' instance attribute and try again."  # noqa: E501
            raise ApiError("OperationNotPermitted", text)
    return _change(world, call, "TerminatingInstances", world.life.terminate)


def stop_instances(world: AWS, call: Call) -> Mapping[str, Any]:
    for rental in _rentals(world, call):
        if rental.spot is not None and rental.spot.kind == "one-time":
            text = f"You can't stop the Spot Instance '{rental.id}' because it is associated with a one-time Spot Instance request. You can only stop Spot Instances associated with persistent Spot Instance requests."  # noqa: E501
            raise ApiError("UnsupportedOperation", text)
        _must_be(rental, "pending", "running", "stopping", "stopped")
    return _change(world, call, "StoppingInstances", world.life.stop)


def start_instances(world: AWS, call: Call) -> Mapping[str, Any]:
    for rental in _rentals(world, call):
        _must_be(rental, "pending", "running", "stopped")
        if rental.state == "stopped" and world.stock.free(rental.zone, rental.type, rental.market) < 1:
            raise world.stock.sold_out(rental.region, rental.type, rental.market, rental.zone)

    def start(rental: Rental) -> None:
        if rental.state == "stopped":
            world.life.start(rental)

    return _change(world, call, "StartingInstances", start)


def reboot_instances(world: AWS, call: Call) -> Mapping[str, Any]:
    for rental in _rentals(world, call):
        _must_be(rental, "running")
        world.life.reboot(rental)
    return {}


def _must_be(rental: Rental, *states: str) -> None:
    if rental.state not in states:
        text = f"The instance '{rental.id}' is not in a state from which it can be started, stopped or rebooted."
        raise ApiError("IncorrectInstanceState", text)


def get_console_output(world: AWS, call: Call) -> Mapping[str, Any]:
    """What the machine really said."""
    found = world.life.rentals.get(call.params["InstanceId"])
    if found is None or found.region != call.region:
        raise not_found([call.params["InstanceId"]])
    said = found.machine.console() if found.machine else ""
    return {"InstanceId": found.id, "Output": base64.b64encode(said.encode()).decode(), "Timestamp": _time(time.time())}


def describe_spot_instance_requests(world: AWS, call: Call) -> Mapping[str, Any]:
    asked = call.params.get("SpotInstanceRequestIds")
    here = {each.spot.id: each for each in world.life.rentals.values() if each.spot and each.region == call.region}
    if asked and (missing := [each for each in asked if each not in here]):
        text = f"The spot instance request ID '{missing[0]}' does not exist"
        raise ApiError("InvalidSpotInstanceRequestID.NotFound", text)
    rows = []
    for name, rental in here.items():
        spot = rental.spot
        assert spot is not None
        row = {
            "SpotInstanceRequestId": name, "State": spot.state, "Type": spot.kind, "SpotPrice": spot.price,
            "Status": {"Code": spot.code, "UpdateTime": _time(call.at), "Message": spot.code},
            "InstanceId": rental.id, "LaunchedAvailabilityZone": spot.zone, "CreateTime": _time(spot.created),
            "ProductDescription": "Linux/UNIX", "InstanceInterruptionBehavior": "terminate", "Tags": spot.tags,
        }  # fmt: skip
        if name in (asked or here) and _filtered(call, {"state": spot.state, **_tag_values(spot.tags)}):
            rows.append(row)
    return {"SpotInstanceRequests": rows}


def cancel_spot_instance_requests(world: AWS, call: Call) -> Mapping[str, Any]:
    rows = []
    for name in call.params["SpotInstanceRequestIds"]:
        if name not in world.spots:
            text = f"The spot instance request ID '{name}' does not exist"
            raise ApiError("InvalidSpotInstanceRequestID.NotFound", text)
        if world.spots[name].state in ("open", "active"):
            world.spots[name].close("cancelled", "request-canceled-and-instance-running")
        rows.append({"SpotInstanceRequestId": name, "State": world.spots[name].state})
    return {"CancelledSpotInstanceRequests": rows}


# --- the catalogue -------------------------------------------------------------------------------------------


def describe_instance_types(world: AWS, call: Call) -> Mapping[str, Any]:
    """Of this region, a hundred a page."""
    offered = aws_facts.types_in(call.region)
    asked: Sequence[str] = call.params.get("InstanceTypes", ())
    if asked and "MaxResults" in call.params:
        raise ApiError(
            "InvalidParameterCombination",
            "The parameter instanceTypesSet cannot be used with the parameter maxResults",
        )
    if unknown := sorted(set(asked) - offered):
        text = f"The following supplied instance types do not exist: [{', '.join(unknown)}]"
        raise ApiError("InvalidInstanceType", text)
    return page(call, "InstanceTypes", _types(frozenset(asked or offered), _filters(call)), 100, 5)


def describe_instance_type_offerings(world: AWS, call: Call) -> Mapping[str, Any]:
    rows = _offerings(call.params.get("LocationType", "region"), call.region, _filters(call))
    return page(call, "InstanceTypeOfferings", rows, 1000, 5)


@functools.cache  # every client asks for the same ones, and they are the same in every world
def _types(names: frozenset[str], filters: Filters) -> list[Any]:
    found = []
    for name in sorted(names):
        record = InstanceType(name)
        if all(_matches(record.get_filter_value(each), values) for each, values in filters):
            found.append(aws_facts.instance_type(name))
    return found


@functools.cache
def _offerings(location: str, region: str, filters: Filters) -> list[Any]:
    rows = aws_facts.offerings(location, region)
    return [row for row in rows if _pass(filters, {"instance-type": row["InstanceType"], "location": row["Location"]})]


@contextmanager
def other_facts(table: dict[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Let a table of moto's about types have these entries, in all worlds of this process."""
    try:
        with mock.patch.dict(table, entries):
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    for each in (_types, _offerings, aws_facts.types_in, aws_facts.zones_of):
        each.cache_clear()


DAY = 86400.0


def describe_spot_price_history(world: AWS, call: Call) -> Mapping[str, Any]:
    """The price now of each type and zone, and made-up earlier ones; StartTime=now gives the first alone."""
    params = call.params
    since = params.get("StartTime")
    start = since.timestamp() if isinstance(since, datetime) else 0.0
    wanted = set(params.get("InstanceTypes", ()))
    products = params.get("ProductDescriptions") or ["Linux/UNIX"]
    ids = aws_facts.zone_ids(call.region)
    keys = set(aws_facts.spot_prices(call.region)) | {(kind, zone) for zone, kind in world.stock.prices if zone in ids}
    rows: list[dict[str, Any]] = []
    for kind, zone in sorted(keys):
        price = world.stock.spot_price(zone, kind)
        said = {"availability-zone": zone, "instance-type": kind, "product-description": "Linux/UNIX"}
        known = "Linux/UNIX" in products or "Linux/UNIX (Amazon VPC)" in products
        here = params.get("AvailabilityZone", zone) == zone
        if price is None or not known or not here or (wanted and kind not in wanted) or not _filtered(call, said):
            continue
        for age, factor in ((0.1, 1.0), (1.0, 1.04), (2.0, 0.97)):
            at = call.at - age * DAY
            row = {"AvailabilityZone": zone, "AvailabilityZoneId": ids[zone], "InstanceType": kind,
                   "ProductDescription": "Linux/UNIX", "SpotPrice": f"{price * factor:.6f}",
                   "Timestamp": _time(at)}  # fmt: skip
            rows.append(row)
            if at <= start:
                break
    rows.sort(key=lambda row: row["Timestamp"], reverse=True)
    return page(call, "SpotPriceHistory", rows, 1000, 1)


def describe_regions(world: AWS, call: Call) -> Mapping[str, Any]:
    """Those that the account may use, or all."""
    rows = []
    for name in aws_facts.regions():
        by_default = name in aws_facts.ENABLED
        status = "opt-in-not-required" if by_default else "opted-in" if world.may_use(name) else "not-opted-in"
        asked = call.params.get("RegionNames")
        shown = (call.params.get("AllRegions") or world.may_use(name)) and (not asked or name in asked)
        if shown and _filtered(call, {"opt-in-status": status, "region-name": name}):
            rows.append({"RegionName": name, "Endpoint": f"ec2.{name}.amazonaws.com", "OptInStatus": status})
    return {"Regions": rows}


# --- keys and groups -----------------------------------------------------------------------------------------


def check_key(world: AWS, call: Call) -> None:
    """ImportKeyPair takes RSA and ED25519 alone."""
    given = call.params.get("PublicKeyMaterial", b"")
    text = given.decode(errors="replace") if isinstance(given, bytes) else str(given)
    words = text.split()
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (IndexError, binascii.Error):
        blob = b""
    length = int.from_bytes(blob[:4])
    if not words or words[0] not in ("ssh-rsa", "ssh-ed25519") or blob[4 : 4 + length] != words[0].encode():
        raise ApiError("InvalidKey.Format", "Key is not in valid OpenSSH public key format")


def check_network(world: AWS, call: Call) -> None:
    """CreateSecurityGroup, in a network that is there."""
    name = call.params.get("VpcId")
    if name and name not in world.backend(call.region).vpcs:
        raise ApiError("InvalidVpcID.NotFound", f"The vpc ID '{name}' does not exist")


def check_security_group(world: AWS, call: Call) -> None:
    """DeleteSecurityGroup, of one that is in use."""
    backend = world.backend(call.region)
    name = call.params.get("GroupId") or call.params.get("GroupName")
    for nic in backend.enis.values():
        if any(name in (group.id, group.name) for group in nic.group_set):
            raise ApiError("DependencyViolation", f"resource {name} has a dependent object")
    for groups in backend.groups.values():
        for group in groups.values():
            rules = [*group.ingress_rules, *group.egress_rules]
            named = {(rule.source_group or {}).get("GroupId") for rule in rules}
            if group.id != name and name in named:
                raise ApiError("DependencyViolation", f"resource {name} has a dependent object")


def check_tags(call: Call) -> None:
    """Refuse tags that EC2 does not take: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html."""
    told = call.params.get("TagSpecifications", ()) if call.action != "CreateTags" else [call.params]
    for each in told:
        tags = each.get("Tags", ())
        if len(tags) > 50:
            raise ApiError("TagLimitExceeded", "The maximum number of Tags for a resource has been reached.")
        for tag in tags:
            key, value = tag.get("Key", ""), tag.get("Value", "")
            if key.lower().startswith("aws:"):
                text = f"Value ( {key} ) for parameter key is invalid. Tag keys starting with 'aws:' are reserved for internal use"  # noqa: E501
                raise ApiError("InvalidParameterValue", text)
            if not 0 < len(key) <= 128:
                raise ApiError("InvalidParameterValue", "Tag key must have from 1 to 128 characters.")
            if len(value) > 256:
                raise ApiError("InvalidParameterValue", "Tag value exceeds the maximum length of 256 characters.")


def create_placement_group(world: AWS, call: Call) -> Mapping[str, Any]:
    name, strategy = call.params.get("GroupName", ""), call.params.get("Strategy", "cluster")
    if not name:
        raise ApiError("MissingParameter", "The request must contain the parameter groupName")
    if strategy not in ("cluster", "spread", "partition"):
        raise ApiError("InvalidParameterValue", f"Value ({strategy}) for parameter strategy is invalid.")
    if (call.region, name) in world.groups:
        raise ApiError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    tags = [tag for each in call.params.get("TagSpecifications", ()) for tag in each.get("Tags", ())]
    made = world.groups[call.region, name] = PlacementGroup(name, strategy, tags)
    return {"PlacementGroup": _group(call, made)}


def describe_placement_groups(world: AWS, call: Call) -> Mapping[str, Any]:
    here = {name: group for (region, name), group in world.groups.items() if region == call.region}
    for name in call.params.get("GroupNames", ()):
        if name not in here:
            raise ApiError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    wanted = call.params.get("GroupNames") or here
    rows = []
    for name, group in here.items():
        said = {"group-name": name, "strategy": group.strategy, "state": "available", **_tag_values(group.tags)}
        if name in wanted and group.id in call.params.get("GroupIds", [group.id]) and _filtered(call, said):
            rows.append(_group(call, group))
    return {"PlacementGroups": rows}


def delete_placement_group(world: AWS, call: Call) -> Mapping[str, Any]:
    name = call.params.get("GroupName", "")
    if (call.region, name) not in world.groups:
        raise ApiError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    if any(each.is_living and (each.region, each.group) == (call.region, name) for each in world.life.rentals.values()):
        raise ApiError("InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use and may not be deleted.")
    del world.groups[call.region, name]
    return {}


def tag_groups(world: AWS, call: Call) -> list[str]:
    """Set the tags of a CreateTags on those placement groups that it names; the other resources that it names.

    Raises:
        ApiError: one of its instances is not there; moto says of any resource that its id is not valid.
    """
    _instances_are_there(world, call, [each for each in call.params.get("Resources", ()) if each.startswith("i-")])
    here = {group.id: group for (region, _), group in world.groups.items() if region == call.region}
    others = []
    for name in call.params.get("Resources", ()):
        if group := here.get(name):
            new = [tag["Key"] for tag in call.params["Tags"]]
            group.tags = [*(tag for tag in group.tags if tag["Key"] not in new), *call.params["Tags"]]
        else:
            others.append(name)
    return others


def _group(call: Call, group: PlacementGroup) -> dict[str, Any]:
    return {
        "GroupName": group.name, "State": "available", "Strategy": group.strategy, "GroupId": group.id,
        "Tags": group.tags, "GroupArn": _group_arn(call.region, group.name),
    }  # fmt: skip


def _group_arn(region: str, name: str) -> str:
    return f"arn:aws:ec2:{region}:123456789012:placement-group/{name}"


# --- reservations --------------------------------------------------------------------------------------------


def create_capacity_reservation(world: AWS, call: Call) -> Mapping[str, Any]:
    params = call.params
    zone, kind, number = params["AvailabilityZone"], params["InstanceType"], int(params["InstanceCount"])
    if world.stock.free(zone, kind, "on-demand") < number:
        raise world.stock.sold_out(call.region, kind, "on-demand", zone)
    match = params.get("InstanceMatchCriteria", "open")
    tags = [tag for each in params.get("TagSpecifications", ()) for tag in each.get("Tags", ())]
    made = Reservation(call.region, zone, kind, number, "default", match, call.at, None, tags=tags)
    return {"CapacityReservation": _reservation(world, world.stock.reserve(made))}


def cancel_capacity_reservation(world: AWS, call: Call) -> Mapping[str, Any]:
    name = call.params["CapacityReservationId"]
    found = world.stock.reservations.get(name)
    if found is None or found.region != call.region:
        text = f"The capacity reservation ID '{name}' does not exist"
        raise ApiError("InvalidCapacityReservationId.NotFound", text)
    if found.kind == "capacity-block":
        raise ApiError("UnsupportedOperation", "A Capacity Block cannot be cancelled.")
    found.state = "cancelled"
    return {"Return": True}


def describe_capacity_reservations(world: AWS, call: Call) -> Mapping[str, Any]:
    here = {each.id: each for each in world.stock.reservations.values() if each.region == call.region}
    asked = call.params.get("CapacityReservationIds")
    for name in asked or ():
        if name not in here:
            text = f"The capacity reservation ID '{name}' does not exist"
            raise ApiError("InvalidCapacityReservationId.NotFound", text)
    rows = []
    for name, each in here.items():
        said = {
            "state": each.state,
            "instance-type": each.type,
            "availability-zone": each.zone,
            **_tag_values(each.tags),
        }
        if name in (asked or here) and _filtered(call, said):
            rows.append(_reservation(world, each))
    return {"CapacityReservations": rows}


def _reservation(world: AWS, each: Reservation) -> dict[str, Any]:
    told = {
        "CapacityReservationId": each.id, "OwnerId": "123456789012", "InstanceType": each.type,
        "CapacityReservationArn": f"arn:aws:ec2:{each.region}:123456789012:capacity-reservation/{each.id}",
        "AvailabilityZone": each.zone, "AvailabilityZoneId": aws_facts.zone_ids(each.region)[each.zone],
        "InstancePlatform": "Linux/UNIX", "Tenancy": each.tenancy, "TotalInstanceCount": each.total,
        "AvailableInstanceCount": world.stock.available(each), "EbsOptimized": False, "EphemeralStorage": False,
        "State": each.state, "StartDate": _time(each.start), "CreateDate": _time(each.start), "Tags": each.tags,
        "EndDateType": "limited" if each.end else "unlimited", "InstanceMatchCriteria": each.match,
        "ReservationType": each.kind,
    }  # fmt: skip
    if each.group:
        told["PlacementGroupArn"] = _group_arn(each.region, each.group)
    return told | ({"EndDate": _time(each.end)} if each.end else {})


def refuse(world: AWS, call: Call) -> Mapping[str, Any]:
    """Calls that moto would answer, but not as instances of this lab."""
    raise ApiError("UnsupportedOperation", f"The lab's AWS does not know {call.action}: it launches by RunInstances.")


# --- pages and filters ---------------------------------------------------------------------------------------


def page(call: Call, member: str, rows: list[Any], most: int, least: int) -> Mapping[str, Any]:
    """As many rows as are asked for, and where the next ones begin."""
    size = int(call.params.get("MaxResults") or most)
    if not least <= size <= max(most, 1000):
        raise ApiError("InvalidParameterValue", f"Value ( {size} ) for parameter maxResults is invalid.")
    token = call.params.get("NextToken") or "0"
    try:
        start = int(base64.b64decode(token)) if token != "0" else 0
    except ValueError as error:
        raise ApiError("InvalidNextToken", "The token provided is invalid") from error
    found: dict[str, Any] = {member: rows[start : start + size]}
    if start + size < len(rows):
        found["NextToken"] = base64.b64encode(str(start + size).encode()).decode()
    return found


def _filters(call: Call) -> Filters:
    """The names of a call's filters, each with its patterns."""
    return tuple((each["Name"], tuple(each["Values"])) for each in call.params.get("Filters", ()))


def _matches(value: Any, patterns: tuple[str, ...]) -> bool:
    matches = _any_of(patterns).match
    return any(matches(str(each)) for each in (value if isinstance(value, list) else [value]))


@functools.cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)")


def _filtered(call: Call, said: Mapping[str, Any]) -> bool:
    """Whether what is said of a row passes every filter of the call."""
    return _pass(_filters(call), said)


def _pass(filters: Filters, said: Mapping[str, Any]) -> bool:
    for name, values in filters:
        if name not in said and not name.startswith("tag"):
            raise ApiError("InvalidParameterValue", f"The filter '{name}' is invalid")
        if not _matches(said.get(name, ""), values):
            return False
    return True


def _tag_values(tags: list[dict[str, str]]) -> dict[str, Any]:
    keys = [tag["Key"] for tag in tags]
    return {"tag-key": keys} | {f"tag:{tag['Key']}": tag.get("Value", "") for tag in tags}


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


ANSWERS: Mapping[str, Answer] = {
    "TerminateInstances": terminate_instances,
    "StopInstances": stop_instances,
    "StartInstances": start_instances,
    "RebootInstances": reboot_instances,
    "GetConsoleOutput": get_console_output,
    "DescribeSpotInstanceRequests": describe_spot_instance_requests,
    "CancelSpotInstanceRequests": cancel_spot_instance_requests,
    "DescribeInstanceTypes": describe_instance_types,
    "DescribeInstanceTypeOfferings": describe_instance_type_offerings,
    "DescribeSpotPriceHistory": describe_spot_price_history,
    "DescribeRegions": describe_regions,
    "CreatePlacementGroup": create_placement_group,
    "DescribePlacementGroups": describe_placement_groups,
    "DeletePlacementGroup": delete_placement_group,
    "CreateCapacityReservation": create_capacity_reservation,
    "CancelCapacityReservation": cancel_capacity_reservation,
    "DescribeCapacityReservations": describe_capacity_reservations,
    "CreateFleet": refuse,
    "RequestSpotInstances": refuse,
    "RequestSpotFleet": refuse,
}
CHECKS: Mapping[str, Callable[[AWS, Call], None]] = {
    "ImportKeyPair": check_key,
    "CreateSecurityGroup": check_network,
    "DeleteSecurityGroup": check_security_group,
}
"""What is looked at before moto is asked."""
