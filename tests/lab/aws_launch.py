"""RunInstances, as EC2 does it: idempotent by token, within quotas and capacity, in a zone that offers the type.

It launches up to MaxCount, at least MinCount, else nothing. What moto then makes is corrected in its own objects.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.types import WSGIEnvironment

from tests.lab import aws_facts
from tests.lab.aws_facts import IMAGES, Image, Market
from tests.lab.aws_life import Rental, SpotRequest
from tests.lab.aws_wire import ApiError, Call, Reply, answer, ask_moto, error_code, rewritten

if TYPE_CHECKING:
    from tests.lab.aws import AWS

USER_DATA = 16384
NOT_SUPPORTED = "The requested configuration is currently not supported. Please check the documentation for supported configurations."  # noqa: E501
UNKNOWN = ("LaunchTemplate", "CpuOptions", "LicenseSpecifications", "ElasticInferenceAccelerators")
"""Options that would be ignored, and so are refused."""


@dataclass
class Wish:
    """What was asked for, once it has been found to make sense.

    Attributes:
        zone: where it must be; "" if anywhere will do.
        price: the most a spot instance may cost, USD an hour; None for the on-demand price.
        reservation: the capacity reservation it must use; "" for none.
    """

    call: Call
    type: str
    image: Image
    least: int
    most: int
    market: Market
    zone: str
    price: float | None
    reservation: str
    keys: list[str]
    options: dict[str, Any]


def run_instances(world: AWS, call: Call, environ: WSGIEnvironment) -> Reply:
    """The whole call. The caller holds the world's lock."""
    if (before := _launched_before(world, call)) is not None:
        return before
    wish = _wish(world, call)
    if call.params.get("DryRun"):
        raise ApiError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
    world.throttle.instances(call, wish.most)
    zone, number = _place(world, wish)
    changes = {"MinCount": str(number), "MaxCount": str(number), "ImageId": wish.image.id(call.region)}
    without = ["BlockDeviceMapping."]
    if "NetworkInterfaces" in wish.options:
        changes["Placement.AvailabilityZone"] = zone
        # moto has one interface for each device index, whatever its card: it makes the first one, `_rental` the others.
        without += [f"NetworkInterface.{number}." for number, _ in _secondary(wish.options)]
    elif not _subnet(wish.options):
        changes["SubnetId"] = world.backend(call.region).get_default_subnets()[zone].id
    body = rewritten(call.body, changes | _disks(wish), without)
    with _corrected(world, wish, zone) as failures:
        reply = ask_moto(environ, body)
    if failures:
        raise failures[0]
    call.error = error_code(reply)
    return reply


@contextlib.contextmanager
def _corrected(world: AWS, wish: Wish, zone: str) -> Iterator[list[Exception]]:
    """While it lasts, what moto launches begins its life here before moto answers; what failed in that."""
    backend, call = world.backend(wish.call.region), wish.call
    failures: list[Exception] = []

    def launch(*given: Any, **named: Any) -> Any:
        reservation = type(backend).run_instances(backend, *given, **named)
        try:
            world.life.begin([_rental(world, wish, zone, model) for model in reservation.instances])
        except Exception as error:
            failures.append(error)
            raise
        if token := call.params.get("ClientToken"):
            world.tokens[call.region, token] = (_fingerprint(call), reservation.id)
        return reservation

    backend.run_instances = launch
    try:
        yield failures
    finally:
        del backend.run_instances


def _fingerprint(call: Call) -> str:
    return repr(sorted((name, repr(value)) for name, value in call.params.items() if name != "ClientToken"))


def _launched_before(world: AWS, call: Call) -> Reply | None:
    """The reservation that this token has made already, as it is now."""
    token = call.params.get("ClientToken", "")
    if len(token) > 64:
        raise ApiError("InvalidParameterValue", "Invalid value for parameter clientToken: it is longer than 64.")
    known = world.tokens.get((call.region, token)) if token else None
    if known is None or call.params.get("DryRun"):
        return None
    fingerprint, reservation = known
    if fingerprint != _fingerprint(call):
        raise ApiError("IdempotentParameterMismatch")
    found = world.backend(call.region).reservations.get(reservation)
    if found is None or all(model._state.name == "terminated" for model in found.instances):
        text = "The client token has already been used for instances that are terminated; use another one."
        raise ApiError("IdempotentInstanceTerminated", text)
    return answer(call, found)


# --- what is asked -------------------------------------------------------------------------------------------


def _wish(world: AWS, call: Call) -> Wish:
    options, region = call.params, call.region
    for name in UNKNOWN:
        if name in options:
            raise ApiError("UnsupportedOperation", f"The lab's RunInstances does not know {name}.")
    least, most = int(options["MinCount"]), int(options["MaxCount"])
    if not 1 <= least <= most:
        raise ApiError("InvalidParameterValue", f"Value ({least}) for parameter minCount is invalid.")
    kind = options.get("InstanceType", "m1.small")
    image = _image(region, options.get("ImageId", ""))
    record = aws_facts.instance_type(kind)
    if record is None:
        raise ApiError("InvalidParameterValue", f"Invalid value '{kind}' for InstanceType.")
    if kind not in aws_facts.types_in(region):
        raise ApiError("Unsupported", NOT_SUPPORTED)
    if aws_facts.architecture(kind) != image.architecture:
        text = f"The architecture '{aws_facts.architecture(kind)}' of the specified instance type does not match the architecture '{image.architecture}' of the specified AMI. Specify an instance type and an AMI that have matching architectures, and try again. You can use 'describe-instance-types' or 'describe-images' to discover the architecture of the instance type or AMI."  # noqa: E501
        raise ApiError("InvalidParameterValue", text)
    market = _market(options)
    if market not in record["SupportedUsageClasses"]:
        raise ApiError("Unsupported", NOT_SUPPORTED)
    _check_user_data(options.get("UserData", ""))
    _check_disks(options, image)
    _check_network(world, call)
    zone = _zone(world, call)
    _check_group(world, call)
    spot = options.get("InstanceMarketOptions", {}).get("SpotOptions", {})
    price = float(spot["MaxPrice"]) if spot.get("MaxPrice") else None
    target = options.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    return Wish(
        call, kind, image, least, most, market, zone, price, target.get("CapacityReservationId", ""),
        _keys(world, call), options,
    )  # fmt: skip


def _market(options: dict[str, Any]) -> Market:
    match options.get("InstanceMarketOptions", {}).get("MarketType", "on-demand"):
        case "on-demand":
            return "on-demand"
        case "spot":
            return "spot"
        case "capacity-block":
            return "capacity-block"
        case other:
            raise ApiError("InvalidParameterValue", f"Invalid value '{other}' for MarketType.")


def _image(region: str, asked: str) -> Image:
    if asked.startswith("resolve:ssm:"):
        parameter = asked.removeprefix("resolve:ssm:")
        if parameter not in IMAGES:
            raise ApiError("InvalidParameterValue", f"Unable to find the SSM parameter {parameter}.")
        return IMAGES[parameter]
    if not asked:
        raise ApiError("MissingParameter", "The request must contain the parameter ImageId")
    if not re.fullmatch(r"ami-[0-9a-f]+", asked):
        raise ApiError("InvalidAMIID.Malformed", f'Invalid id: "{asked}"')
    if (found := aws_facts.image(region, asked)) is None:
        raise ApiError("InvalidAMIID.NotFound", f"The image id '[{asked}]' does not exist")
    return found


def _check_user_data(text: str) -> None:
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ApiError("InvalidParameterValue", "Invalid BASE64 encoding of user data.") from error
    if len(raw) > USER_DATA:
        raise ApiError("InvalidParameterValue", f"User data is limited to {USER_DATA} bytes")


def _keys(world: AWS, call: Call) -> list[str]:
    name = call.params.get("KeyName")
    if not name:
        return []
    pair = world.backend(call.region).key_pairs.get(name)
    if pair is None:
        raise ApiError("InvalidKeyPair.NotFound", f"The key pair '{name}' does not exist")
    material = pair.material_public
    return [material.decode() if isinstance(material, bytes) else material]


def _root(options: dict[str, Any]) -> dict[str, Any]:
    """What is asked of the root volume."""
    for each in options.get("BlockDeviceMappings", ()):
        if each.get("DeviceName") in ("/dev/sda1", "/dev/xvda"):
            found: dict[str, Any] = each.get("Ebs", {})
            return found
    return {}


def _check_disks(options: dict[str, Any], image: Image) -> None:
    size = _root(options).get("VolumeSize", image.size)
    if size < image.size:
        text = f"Volume of size {size}GB is smaller than snapshot '{image.snapshot}', expect size >= {image.size}GB"
        raise ApiError("InvalidBlockDeviceMapping", text)


def _disks(wish: Wish) -> dict[str, str]:
    """The form of every disk: moto makes none where nothing is said of its size, and leaves those it makes behind."""
    asked = list(wish.options.get("BlockDeviceMappings", ()))
    if not any(each.get("DeviceName") == "/dev/sda1" for each in asked):
        asked.insert(0, {"DeviceName": "/dev/sda1", "Ebs": {}})
    form = {}
    for number, each in enumerate(asked, 1):
        ebs = {"VolumeSize": wish.image.size, "VolumeType": "gp3", "DeleteOnTermination": True} | each.get("Ebs", {})
        form[f"BlockDeviceMapping.{number}.DeviceName"] = str(each["DeviceName"])
        for name in ("VolumeSize", "VolumeType", "DeleteOnTermination", "Encrypted", "Iops"):
            if name in ebs:
                form[f"BlockDeviceMapping.{number}.Ebs.{name}"] = str(ebs[name]).lower()
    return form


def _check_network(world: AWS, call: Call) -> None:
    options, backend = call.params, world.backend(call.region)
    cards: list[dict[str, Any]] = options.get("NetworkInterfaces", [])
    groups: list[str] = list(options.get("SecurityGroupIds", ()))
    if cards and (groups or options.get("SubnetId")):
        text = "Network interfaces and an instance-level security groups may not be specified on the same request"
        raise ApiError("InvalidParameterCombination", text)
    if cards:
        _check_cards(options.get("InstanceType", "m1.small"), cards)
    for group in [*groups, *(group for card in cards for group in card.get("Groups", ()))]:
        if backend.get_security_group_from_id(group) is None:
            raise ApiError("InvalidGroup.NotFound", f"The security group '{group}' does not exist")


def _check_cards(kind: str, asked: list[dict[str, Any]]) -> None:
    """Refuse interfaces that a type cannot have together.

    How many cards and adapters a type has, and what fits on each card, is what DescribeInstanceTypes says of it
    (`NetworkCards`, `EfaInfo`). The rules are those of
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html (read 2026-11-24 in a stored copy): the
    primary interface is device 0 of card 0, and is not EFA-only. That p6-b300, whose card 0 has no EFA, requires it:
    https://github.com/aws/aws-parallelcluster/issues/7143. The codes are EC2's; texts without a source are made up.
    """
    if len(asked) > 1 and any(each.get("AssociatePublicIpAddress") for each in asked):
        # The words are in https://github.com/skypilot-org/skypilot, sky/provision/aws/instance.py; the rule is in
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/working-with-ip-addresses.html.
        text = "The associatePublicIPAddress parameter cannot be specified when launching with multiple network interfaces."  # noqa: E501
        raise ApiError("InvalidParameterCombination", text)
    places = Counter((int(each.get("NetworkCardIndex", 0)), int(each.get("DeviceIndex", 0))) for each in asked)
    if (0, 0) not in places:
        raise ApiError(
            "InvalidParameterValue", "A primary network interface with device index 0 on card 0 is required."
        )
    for (card, device), number in places.items():
        if number > 1:
            text = f"Each network interface requires a unique device index: {device} on network card {card} is taken."
            raise ApiError("InvalidParameterValue", text)
    for each in asked:
        _check_card(kind, each)
    network = (aws_facts.instance_type(kind) or {})["NetworkInfo"]
    for card in network["NetworkCards"]:
        number, most = card["NetworkCardIndex"], card["MaximumNetworkInterfaces"]
        devices = [device for index, device in places if index == number]
        if len(devices) > most or max(devices, default=0) >= most:
            text = f"Interface count {len(devices)} exceeds the limit of {most} for network card {number} of {kind}"
            raise ApiError("AttachmentLimitExceeded", text)
    adapters = sum(each.get("InterfaceType") in ("efa", "efa-only") for each in asked)
    if adapters > (most := network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)):
        raise ApiError(
            "AttachmentLimitExceeded", f"EFA interface count {adapters} exceeds the limit of {most} for {kind}"
        )


def _check_card(kind: str, interface: dict[str, Any]) -> None:
    """Refuse an interface on a network card that the type lacks, or of a kind that this card does not have."""
    network = (aws_facts.instance_type(kind) or {})["NetworkInfo"]
    number = int(interface.get("NetworkCardIndex", 0))
    card = next((each for each in network["NetworkCards"] if each["NetworkCardIndex"] == number), None)
    if card is None:
        text = f"The network card index '{number}' is not valid for instance type '{kind}'."
        raise ApiError("InvalidParameterValue", text)
    way = interface.get("InterfaceType", "interface")
    if way in ("efa", "efa-only") and not network["EfaSupported"]:
        raise ApiError("InvalidParameterCombination", f"{kind} instances do not support Elastic Fabric Adapters.")
    if way not in card["InterfaceTypes"]:
        text = f"The network card {number} of {kind} does not support interfaces of type {way}."
        raise ApiError("AttachmentLimitExceeded", text)
    if way == "efa-only" and (number, int(interface.get("DeviceIndex", 0))) == (0, 0):
        text = "An EFA-only network interface cannot be the primary network interface."
        raise ApiError("InvalidParameterCombination", text)


def _secondary(options: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """What is asked for beside the primary interface, with its number in the form of the call."""
    asked = enumerate(options.get("NetworkInterfaces", ()), 1)
    return [
        (number, each) for number, each in asked if (each.get("NetworkCardIndex", 0), each["DeviceIndex"]) != (0, 0)
    ]


def _subnet(options: dict[str, Any]) -> str:
    cards: Sequence[dict[str, Any]] = options.get("NetworkInterfaces", ())
    return str(options.get("SubnetId") or next((card["SubnetId"] for card in cards if card.get("SubnetId")), ""))


def _zone(world: AWS, call: Call) -> str:
    """Where it must be, by its subnet or by its placement."""
    asked = str(call.params.get("Placement", {}).get("AvailabilityZone", ""))
    if asked and asked not in aws_facts.zone_ids(call.region):
        text = f"Invalid availability zone: [{asked}]"
        raise ApiError("InvalidParameterValue", text)
    if not (subnet := _subnet(call.params)):
        return asked
    for by_zone in world.backend(call.region).subnets.values():
        if subnet in by_zone:
            zone = str(by_zone[subnet].availability_zone)
            if asked not in ("", zone):
                text = f"The requested availability zone ({asked}) does not match that of the subnet ({zone})."
                raise ApiError("InvalidParameterValue", text)
            return zone
    raise ApiError("InvalidSubnetID.NotFound", f"The subnet ID '{subnet}' does not exist")


def _check_group(world: AWS, call: Call) -> None:
    name = call.params.get("Placement", {}).get("GroupName")
    if name and (call.region, name) not in world.groups:
        raise ApiError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    kind = call.params.get("InstanceType", "m1.small")
    strategies = (aws_facts.instance_type(kind) or {}).get("PlacementGroupInfo", {}).get("SupportedStrategies", ())
    if name and world.groups[call.region, name].strategy not in strategies:
        text = f"Cluster placement groups are not supported by the '{kind}' instance type. Specify a supported instance type or change the placement group strategy, and try again."  # noqa: E501
        raise ApiError("InvalidParameterCombination", text)


# --- where, and how many -------------------------------------------------------------------------------------


def _place(world: AWS, wish: Wish) -> tuple[str, int]:
    """The zone, and how many of them it gets."""
    region = wish.call.region
    offering = aws_facts.zones_of(region, wish.type)
    preference = wish.options.get("CapacityReservationSpecification", {}).get("CapacityReservationPreference", "open")
    if wish.market == "on-demand" and not wish.reservation and preference != "none":
        wish.reservation = world.stock.open_reservation(region, wish.type, wish.zone, wish.least)
    if wish.reservation or wish.market == "capacity-block":
        return world.stock.reserved(
            wish.call, wish.reservation, wish.type, wish.zone, wish.market, wish.least, wish.most
        )
    if wish.zone and wish.zone not in offering:
        others = f" or choosing {', '.join(offering)}" if offering else ""
        text = f"Your requested instance type ({wish.type}) is not supported in your requested Availability Zone ({wish.zone}). Please retry your request by not specifying an Availability Zone{others}."  # noqa: E501
        raise ApiError("Unsupported", text)
    allowed = world.stock.within_quota(region, wish.type, wish.market, wish.least, wish.most)
    zones = [wish.zone] if wish.zone else list(offering)
    if wish.market == "spot":
        zones = world.stock.affordable(region, zones, wish.type, wish.price)
    room = {zone: world.stock.free(zone, wish.type, wish.market) for zone in zones}
    best = max(zones, key=lambda zone: room[zone])
    if room[best] < wish.least:
        raise world.stock.sold_out(region, wish.type, wish.market, wish.zone)
    return best, int(min(allowed, room[best]))


def _rental(world: AWS, wish: Wish, zone: str, model: Any) -> Rental:
    """What moto has made, with what moto leaves out."""
    call = wish.call
    public = bool(model.public_ip) and not _secondary(wish.options)
    rental = Rental(
        model, call.region, zone, wish.type, wish.market, wish.image, wish.options, wish.keys, public, wish.reservation
    )
    model.lifecycle = None if wish.market == "on-demand" else wish.market
    model._placement.group_name = rental.group
    if not model.security_groups:
        model.security_groups = [world.backend(call.region).get_default_security_group(model.vpc_id)]
    model.metadata_options.http_tokens = "required"
    _attach(world, wish, model)
    for nic in model.nics.values():
        nic.delete_on_termination = True
        nic.add_tags({tag["Key"]: tag.get("Value", "") for tag in _tags(wish.options, "network-interface")})
    if wish.reservation:
        model.capacity_reservation_id = wish.reservation
    if wish.market == "spot":
        spot = wish.options["InstanceMarketOptions"].get("SpotOptions", {})
        price = spot.get("MaxPrice") or str(aws_facts.on_demand_price(call.region, wish.type) or "")
        kind = spot.get("SpotInstanceType", "one-time")
        tags = _tags(wish.options, "spot-instances-request")
        request = SpotRequest(f"sir-{secrets.token_hex(4)}", kind, price, zone, call.at, tags, instance_id=model.id)
        rental.spot = world.spots[request.id] = request
        model.spot_instance_request_id = request.id
    return rental


def _attach(world: AWS, wish: Wish, model: Any) -> None:
    """The other interfaces of an instance. Those for EFA alone have no address."""
    backend = world.backend(wish.call.region)
    for each in wish.options.get("NetworkInterfaces", ())[:1]:
        model.nics[0].interface_type = each.get("InterfaceType", "interface")
    tags = {tag["Key"]: tag["Value"] for tag in _tags(wish.options, "network-interface")}
    for number, each in _secondary(wish.options):
        subnet = each.get("SubnetId") or model.subnet_id
        nic = backend.create_network_interface(
            backend.get_subnet(subnet), None, group_ids=list(each.get("Groups", ())), tags=tags
        )
        nic.interface_type = each.get("InterfaceType", "interface")
        if nic.interface_type == "efa-only":
            nic.private_ip_address, nic.private_ip_addresses = None, []
        nic.instance, nic.attachment_id, nic.attach_time = (
            model,
            f"eni-attach-0{secrets.token_hex(8)}",
            model.launch_time,
        )
        nic.device_index, nic.network_card_index = int(each["DeviceIndex"]), int(each.get("NetworkCardIndex", 0))
        model.nics[number] = nic


def _tags(options: dict[str, Any], kind: str) -> list[dict[str, str]]:
    specifications = options.get("TagSpecifications", ())
    return [tag for each in specifications if each.get("ResourceType") == kind for tag in each.get("Tags", ())]
