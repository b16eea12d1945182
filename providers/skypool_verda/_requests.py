"""Builds the bodies of the requests to Verda that create and end instances. This module sends no requests.

API: POST /instances and PUT /instances at https://api.verda.com/v1/docs (read 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NotRequired, TypedDict

from skypool.drivers import tags
from skypool.model import Offer, Order


class Volume(TypedDict):
    """Disk from which an instance boots."""

    name: str
    size: int
    on_spot_discontinue: NotRequired[Literal["delete_permanently"]]


class Deploy(TypedDict):
    """Body of `POST /instances` without the fields that differ between the nodes of an order."""

    instance_type: str
    image: str
    location_code: str
    description: str
    is_spot: bool
    contract: Literal["SPOT", "PAY_AS_YOU_GO"]
    pricing: Literal["FIXED_PRICE"]
    ssh_key_ids: list[str]
    startup_script_id: str
    os_volume: Volume


class DeployNode(Deploy):
    """Whole body of `POST /instances`, which creates the instance of one node."""

    hostname: str
    tags: list[dict[str, str]]


class Delete(TypedDict):
    """Body of `PUT /instances` that deletes an instance."""

    id: list[str]
    action: Literal["delete"]
    volume_ids: list[str] | None
    delete_permanently: bool


def deploy(offer: Offer, order: Order, *, name: str, ssh_key_id: str, script_id: str) -> Deploy:
    """Return the part of a request that all instances of an order share.

    Args:
        offer: the offer.
        order: the order.
        name: name of each instance's disk.
        ssh_key_id: id of the pool's key, which may log in.
        script_id: id of the script that each instance runs at its first boot.
    """
    volume: Volume = {"name": name, "size": offer.detail["gb"]}
    spot = offer.market == "spot"
    if spot:
        volume["on_spot_discontinue"] = "delete_permanently"
    return {
        "instance_type": offer.instance_type,
        "image": offer.detail["image"],
        "location_code": offer.region,
        "description": f"of skypool's pool {order.pool}",
        "is_spot": spot,
        "contract": "SPOT" if spot else "PAY_AS_YOU_GO",
        "pricing": "FIXED_PRICE",
        "ssh_key_ids": [ssh_key_id],
        "startup_script_id": script_id,
        "os_volume": volume,
    }


def deploy_node(common: Deploy, *, hostname: str, said: Mapping[str, str]) -> DeployNode:
    """Return the request for the instance of one node.

    Args:
        common: result of `deploy` for its order.
        hostname: host name of the instance.
        said: tags of the instance.
    """
    return {**common, "hostname": hostname, "tags": tags.pairs(said, "key", "value")}


def delete(id_: str, *, disks: Collection[str], built_in: Collection[str]) -> Delete:
    """Return the request that ends an instance.

    Disks are deleted permanently. If an instance has disks built into its host, Verda refuses that, so all disks go to
    the trash.

    Args:
        id_: id of the instance.
        disks: ids of the disks to delete with it.
        built_in: ids of the disks that are part of its host.
    """
    return {
        "id": [id_],
        "action": "delete",
        "volume_ids": [*disks, *built_in] or None,
        "delete_permanently": bool(disks) and not built_in,
    }
