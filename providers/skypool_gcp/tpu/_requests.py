"""Builds queued resources: the objects with which the driver asks Cloud TPU to create a slice.

This module sends no requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime

from skypool.drivers import userdata
from skypool.model import Offer, Order
from skypool_gcp import _api
from skypool_gcp._sdk import tpu_v2
from skypool_gcp._settings import Settings

_DEFAULT_SCOPES = [
    "https://www.googleapis.com/auth/devstorage.read_only",
    "https://www.googleapis.com/auth/logging.write",
    "https://www.googleapis.com/auth/monitoring.write",
]
"""The OAuth scopes of hosts, if the settings name no service account. Scopes limit the rights of the default account.

https://cloud.google.com/python/docs/reference/tpu/latest/google.cloud.tpu_v2.types.ServiceAccount (read 2026-11-22).
"""


def queued_resource(
    settings: Settings,
    offer: Offer,
    order: Order,
    *,
    parent: str,
    slice: str,
    labels: Mapping[str, str],
    until: datetime,
) -> tpu_v2.QueuedResource:
    """Build the queued resource with which Cloud TPU is asked for one slice.

    Args:
        offer: The offer that is rented. For a spot offer, the reservation in the settings is not used.
        parent: The path of the zone, "projects/P/locations/ZONE".
        slice: The name of the slice and of its node.
        labels: The labels of the node.
        until: The time until which the slice may wait for its chips. After this time, Google does not create the slice.
    """
    spot = offer.market == "spot"
    node = tpu_v2.Node(
        accelerator_type=offer.instance_type,
        runtime_version=offer.detail["runtime"],
        description=f"of skypool's pool {order.pool}",
        labels=labels,
        metadata={
            "startup-script": _startup_script(settings, order, parent=parent, slice=slice),
            "ssh-keys": f"{_api.USER}:{order.keys.public}",
            "enable-oslogin": "FALSE",
        },
        tags=[_api.tag(order)],
        network_config=tpu_v2.NetworkConfig(
            network=settings.network,
            subnetwork=settings.subnetwork,
            enable_external_ips=True,
        ),
        scheduling_config=tpu_v2.SchedulingConfig(spot=spot),
        service_account=tpu_v2.ServiceAccount(
            email=settings.service_account or "",
            scope=[_api.SCOPE] if settings.service_account else _DEFAULT_SCOPES,
        ),
    )
    reservation = f"{parent}/reservations/{settings.reservation}" if settings.reservation and not spot else None
    return tpu_v2.QueuedResource(
        tpu=tpu_v2.QueuedResource.Tpu(
            node_spec=[tpu_v2.QueuedResource.Tpu.NodeSpec(parent=parent, node_id=slice, node=node)],
        ),
        spot=tpu_v2.QueuedResource.Spot() if spot else None,
        guaranteed=None if spot else tpu_v2.QueuedResource.Guaranteed(),
        queueing_policy=tpu_v2.QueuedResource.QueueingPolicy(valid_until_time=until),
        reservation_name=reservation,
    )


def request_id(path: str) -> str:
    """Return the UUID, as text, of the API request that creates the queued resource at a path.

    The same path always gives the same id, so that Google recognizes a repeated request.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_URL, path))


def _startup_script(settings: Settings, order: Order, *, parent: str, slice: str) -> str:
    """Return the script that each host runs as root at boot. When the lease is over, it ends the slice or the host."""
    end = userdata.OFF
    if settings.service_account:
        base = _api.endpoint("tpu") or "https://tpu.googleapis.com"
        end = _api.deletes(f"{base}/v2/{parent}/queuedResources/{slice}?force=true")
    return userdata.boot_script(order, user=_api.USER, end=end)
