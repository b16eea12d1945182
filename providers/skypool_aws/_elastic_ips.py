"""The life of Elastic IP addresses: `allocate`, `attach` and `release`.

EC2 gives no public address to an instance with several network interfaces, so each such instance needs an Elastic IP
address. An address costs money from its allocation to its release, whether an instance uses it or not. Only `allocate`
allocates addresses. By then, skypool has written the order to its ledger, a local database. The request itself writes
the order's tags to the address. So `skypool gc` finds the address, with and without the ledger, whatever happens next.
"""
# pyright: reportTypedDictNotRequiredAccess=false
# The stubs of boto3 mark every field of an answer as one that may be missing.

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from skypool import tracebacks
from skypool.drivers import retry, tags
from skypool.errors import ProviderError
from skypool.model import Instance, Offer, Order
from skypool_aws import _requests

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import AddressTypeDef, InstanceNetworkInterfaceTypeDef, InstanceTypeDef

_NEW = 20.0
"""Seconds for which EC2 may not list an address that was just allocated."""


def is_needed_by(instance: Instance) -> bool:
    """Return True if an instance has several network interfaces, and so needs an Elastic IP address."""
    return int(instance.detail.get("interfaces", 1)) > 1


def allocate(ec2: EC2Client, offer: Offer, order: Order) -> None:
    """Allocate an Elastic IP address for each node of an order, except nodes for which there is one already.

    Each address gets the tags of the order, with the number of its node.

    Args:
        ec2: the client of the offer's region. It must not repeat requests: each one would allocate another address.

    Raises:
        QuotaError: the account may not have that many addresses.
        NoAnswer: an answer was lost, so an address with these tags may have been allocated.
    """
    has = {_node(each) for each in _requests.addresses(ec2, order.pool, order.token)}
    said = {**tags.tags(order), "Name": f"skypool-{order.pool}-{tags.session(order)}"}
    for node in order.nodes:
        if node not in has:
            _requests.allocate_address(ec2, offer.zone, {**said, tags.NODES: tags.packed([node])})


def attach(ec2: EC2Client, instance: Instance, record: InstanceTypeDef) -> None:
    """Give a running instance the Elastic IP address that was allocated for it. No address is allocated.

    `record` is EC2's record of the instance. Raises ProviderError if the address does not exist any more, or if EC2
    refuses.
    """
    token = _requests.tag_values(record["Tags"])[tags.TOKEN]

    def allocated() -> list[str]:
        found = _requests.addresses(ec2, instance.pool, token)
        return [each["AllocationId"] for each in found if _node(each) == instance.node]

    ids = retry.soon(allocated, _NEW)
    if not ids:
        raise ProviderError(
            f"the Elastic IP address of node {instance.node} of pool {instance.pool} does not exist any more, so its "
            f"instance {instance.id} in {instance.region} cannot be reached: somebody has released the address. End "
            "the instance; a pool does that, and rents another one with a new address",
            provider="aws",
            code="InvalidAllocationID.NotFound",
        )
    primary = next(each for each in record["NetworkInterfaces"] if _is_primary(each))
    _requests.associate_address(ec2, ids[0], primary["NetworkInterfaceId"])


def release(ec2: EC2Client, region: str, pool: str, nodes: Mapping[str, Collection[int]]) -> None:
    """Release the Elastic IP addresses of nodes that have no instance any more, and return when EC2 lists none of them.

    `nodes` is a dict from the token of an order to numbers of its nodes. If an address cannot be released, a
    RuntimeWarning says so, and the address is a leftover of its pool. At its end, the pool tries again to release it.
    """
    try:
        for token, numbers in nodes.items():
            for each in _requests.addresses(ec2, pool, token):
                if _node(each) in numbers and not each.get("AssociationId"):
                    _requests.release_address(ec2, each["AllocationId"])
    except ProviderError as e:
        tracebacks.warn(
            f"Elastic IP addresses of pool {pool} in {region} are billed until the pool ends, or until "
            f"`skypool gc` releases them: {e}"
        )


def _is_primary(interface: InstanceNetworkInterfaceTypeDef) -> bool:
    """Return True for the primary network interface of an instance: device 0 of card 0."""
    attached = interface["Attachment"]
    return attached["DeviceIndex"] == attached.get("NetworkCardIndex", 0) == 0


def _node(address: AddressTypeDef) -> int:
    """Return the number of the node that an Elastic IP address was allocated for; -1 if its tags do not tell."""
    nodes = tags.unpacked(_requests.tag_values(address.get("Tags", ())).get(tags.NODES, ""))
    return nodes[0] if nodes else -1
