"""Elastic IP addresses of the lab's AWS: allocated up to a quota, given to an interface, billed until their release.

A machine that is given one is really reached at it. What each call does and refuses is in
https://docs.aws.amazon.com/AWSEC2/latest/APIReference (AllocateAddress, AssociateAddress, ReleaseAddress, and the error
codes), read 2026-11-24 in a stored copy. moto keeps the addresses, and describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests.lab.aws_wire import ApiError, Call

if TYPE_CHECKING:
    from tests.lab.aws import AWS
    from tests.lab.aws_life import Rental

QUOTA = 5
"""Addresses that a new account may have in a region (quota L-0263D0A3, "EC2-VPC Elastic IPs")."""


def allocate_address(world: AWS, call: Call) -> Mapping[str, Any]:
    backend = world.backend(call.region)
    if call.params.get("Domain", "vpc") != "vpc":
        raise ApiError("InvalidParameterValue", "Invalid value for parameter domain: it must be vpc.")
    group = call.params.get("NetworkBorderGroup", call.region)
    if group != call.region and not group.startswith(f"{call.region}-"):
        raise ApiError("InvalidParameterValue", f"Value ({group}) for parameter networkBorderGroup is invalid.")
    if len(backend.addresses) >= world.elastic_ips:
        raise ApiError("AddressLimitExceeded", "The maximum number of addresses has been reached.")
    tags = {tag["Key"]: tag["Value"] for each in call.params.get("TagSpecifications", ()) for tag in each["Tags"]}
    made = backend.allocate_address("vpc", address=world.public_address(), tags=tags)
    made.network_border_group = group
    return {
        "PublicIp": made.public_ip, "AllocationId": made.allocation_id, "PublicIpv4Pool": "amazon", "Domain": "vpc",
        "NetworkBorderGroup": group,
    }  # fmt: skip


def associate_address(world: AWS, call: Call) -> Mapping[str, Any]:
    """Give one to an interface; that it has another one already is refused only if the call says so."""
    params = call.params
    address = _address(world, call)
    nic = _interface(world, call)
    rental = world.life.rentals.get(nic.instance.id) if nic.instance else None
    if rental is not None and rental.state not in ("running", "stopped"):
        # https://github.com/hashicorp/terraform-provider-aws/issues/19699 has these words.
        text = f"The {'pending-instance-creation' if rental.state == 'pending' else rental.state} instance to which '{nic.id}' is attached is not in a valid state for this operation"  # noqa: E501
        raise ApiError("IncorrectInstanceState", text)
    if nic.interface_type == "efa-only":
        # That it has none: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/create-efa.html. The code is assumed.
        raise ApiError("UnsupportedOperation", f"The interface '{nic.id}' is EFA-only and cannot have an IP address.")
    if address.network_border_group != nic.availability_zone[:-1]:
        # "IP addresses cannot move between network border groups":
        # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_AllocateAddress.html. The code is assumed.
        text = f"The address is of the network border group {address.network_border_group}, and the interface is not."
        raise ApiError("InvalidParameterCombination", text)
    gateways = world.backend(call.region).internet_gateways.values()
    if not any(each.vpc and each.vpc.id == nic.vpc_id for each in gateways):
        raise ApiError("Gateway.NotAttached", f"Network {nic.vpc_id} is not attached to any internet gateway")
    if address.eni is not None and address.eni is not nic:
        if params.get("AllowReassociation") is False:
            text = f"resource {address.allocation_id} is already associated with associate-id {address.association_id}"
            raise ApiError("Resource.AlreadyAssociated", text)
        _part(world, address)
    if address.eni is not nic:
        for other in list(world.backend(call.region).addresses):
            if other.eni is nic:
                _part(world, other)
        if rental is not None and nic is rental.model.nics[0]:
            rental.awaits_address = False
        world.backend(call.region).associate_address(nic.instance, nic, allocation_id=address.allocation_id)
        if rental is not None and rental.machine is not None:
            rental.machine.lab.network.lend(rental.machine.number, address.public_ip)
    return {"AssociationId": address.association_id}


def disassociate_address(world: AWS, call: Call) -> Mapping[str, Any]:
    wanted = call.params.get("AssociationId")
    for each in world.backend(call.region).addresses:
        if each.association_id == wanted:
            _part(world, each)
            return {}
    raise ApiError("InvalidAssociationID.NotFound", f"The association ID '{wanted}' does not exist")


def release_address(world: AWS, call: Call) -> Mapping[str, Any]:
    """In a default network, also one that an interface has."""
    address, backend = _address(world, call), world.backend(call.region)
    if address.eni is not None:
        if not backend.get_vpc(address.eni.vpc_id).is_default:
            raise ApiError("InvalidIPAddress.InUse", f"Address {address.public_ip} is in use.")
        _part(world, address)
    backend.addresses.remove(address)
    if world.lab is not None:
        world.lab.network.give_back(address.public_ip)
    return {}


def let_go(world: AWS, rental: Rental) -> None:
    """The end of an instance takes its addresses from it; they stay allocated, and are billed."""
    for each in world.backend(rental.region).addresses:
        if each.instance is rental.model:
            _part(world, each, is_gone=True)


def _part(world: AWS, address: Any, *, is_gone: bool = False) -> None:
    rental = world.life.rentals.get(address.instance.id) if address.instance else None
    if rental is not None and rental.machine is not None and not is_gone:
        rental.machine.lab.network.unlend(rental.machine.number, address.public_ip)
    address.eni.public_ip = None
    address.eni = address.instance = address.association_id = None


def _address(world: AWS, call: Call) -> Any:
    wanted = call.params.get("AllocationId")
    if not wanted:
        raise ApiError("MissingParameter", "The request must contain the parameter AllocationId")
    for each in world.backend(call.region).addresses:
        if each.allocation_id == wanted:
            return each
    raise ApiError("InvalidAllocationID.NotFound", f"The allocation ID '{wanted}' does not exist")


def _interface(world: AWS, call: Call) -> Any:
    """The interface that a call names, or the only one of its instance."""
    name, instance = call.params.get("NetworkInterfaceId"), call.params.get("InstanceId")
    if bool(name) == bool(instance):
        text = "Either the instance ID or the network interface ID must be specified, and not both."
        raise ApiError("InvalidParameterCombination", text)
    if instance:
        rental = world.life.rentals.get(instance)
        if rental is None or rental.region != call.region:
            raise ApiError("InvalidInstanceID.NotFound", f"The instance ID '{instance}' does not exist")
        if len(rental.model.nics) > 1:
            # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_AssociateAddress.html: "The instance must have
            # exactly one attached network interface"
            text = f"There are multiple interfaces attached to instance '{instance}'. Please specify an interface ID for the operation instead."  # noqa: E501
            raise ApiError("InvalidInstanceID", text)
        return rental.model.nics[0]
    found = world.backend(call.region).enis.get(name)
    if found is None:
        raise ApiError("InvalidNetworkInterfaceID.NotFound", f"The networkInterface ID '{name}' does not exist")
    return found


ANSWERS: Mapping[str, Callable[[AWS, Call], Mapping[str, Any]]] = {
    "AllocateAddress": allocate_address,
    "AssociateAddress": associate_address,
    "DisassociateAddress": disassociate_address,
    "ReleaseAddress": release_address,
}
