"""Builds the bodies of the requests to Verda that create and end instances. This module sends no requests.

API: POST /instances and PUT /instances at https://api.verda.com/v1/docs (read 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NotRequired, TypedDict

from skypool.drivers import tags
from skypool.model import Offer, Order


class Volume(TypedDict):
    """The disk from which an instance boots, as part of a create request. `size` is in GB.

    For a spot machine, `on_spot_discontinue` makes Verda delete the disk when Verda takes the machine back.
    """

    name: str
    size: int
    on_spot_discontinue: NotRequired[Literal["delete_permanently"]]


class Deploy(TypedDict):
    """The body of `POST /instances`, which creates an instance, without the fields that differ between nodes."""

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


class Changes(TypedDict, total=False):
    """The fields of a `Deploy` that are replaced by impossible values, for requests that Verda must refuse."""

    instance_type: str
    image: str
    location_code: str


class DeployNode(Deploy):
    """The whole body of `POST /instances`, which creates the instance of one node, with its host name and tags."""

    hostname: str
    tags: list[dict[str, str]]


class Delete(TypedDict):
    """The body of `PUT /instances` that deletes an instance and the volumes in `volume_ids`; other volumes are kept."""

    id: list[str]
    action: Literal["delete"]
    volume_ids: list[str] | None
    delete_permanently: bool


def deploy(offer: Offer, order: Order, *, name: str, ssh_key_id: str, script_id: str) -> Deploy:
    """Return the part of a create request that all instances of an order share.

    Args:
        name: name of each instance's disk.
        ssh_key_id: id of the pool's SSH key at Verda, which may log in.
        script_id: id of the script at Verda that each instance runs at its first boot.
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


def changed(common: Deploy, changes: Changes) -> Deploy:
    """Return a copy of the request `common` in which the fields in `changes` have the values given there."""
    return {**common, **changes}


def deploy_node(common: Deploy, *, hostname: str, said: Mapping[str, str]) -> DeployNode:
    """Return the body of the request that creates the instance of one node.

    Args:
        common: the part of the request that all instances of the order share. This dict is not changed.
        hostname: host name of the instance.
        said: tags of the instance.
    """
    return {**common, "hostname": hostname, "tags": tags.pairs(said, "key", "value")}


def delete(id_: str, *, disks: Collection[str], built_in: Collection[str]) -> Delete:
    """Return the body of the request that ends an instance and deletes volumes with it.

    The volumes are deleted permanently if none is built in. Otherwise all of them are moved to Verda's trash. Without
    any volumes, `volume_ids` is None.

    Args:
        id_: id of the instance.
        disks: ids of the instance's own volumes to delete.
        built_in: ids of attached volumes that are built into the computer on which the instance runs.
    """
    return {
        "id": [id_],
        "action": "delete",
        "volume_ids": [*disks, *built_in] or None,
        "delete_permanently": bool(disks) and not built_in,
    }
