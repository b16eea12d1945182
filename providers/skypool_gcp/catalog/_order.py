"""What Compute Engine is told of a machine that is ordered. Pure, but for the pool's keys."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from skypool.drivers import tags, userdata
from skypool.errors import UsageError
from skypool.model import Offer, Order
from skypool_gcp import _api
from skypool_gcp.catalog import FACTS

_LATER = 120.0  # seconds by which the guard lets Google come first, as that ends the disk, too
_LONGEST = 120 * 86400.0  # seconds of maxRunDuration, from 30: .../compute/docs/instances/limit-vm-runtime


def told(settings: _api.Settings, offer: Offer, order: Order, image: Any) -> dict[str, Any]:
    """What all machines of an order are told alike, but for what is made for them.

    Raises:
        UsageError: the image is for another processor.
    """
    if (image.architecture or "X86_64").lower() != offer.arch:
        arch = image.architecture.lower()
        raise UsageError(f"the image {image.name} is for {arch}, {offer.instance_type} is {offer.arch}: arch={arch!r}")
    zone, spot, account = offer.zone, offer.market == "spot", settings.service_account
    kind = offer.detail.get("machine", offer.instance_type)
    disk = "hyperdisk-balanced" if kind.startswith(tuple(FACTS["hyperdisk"])) else "pd-balanced"
    limit = _limit(order)
    return {
        "what": f"{offer.instance_type} in {zone}", "zone": zone, "tag": _api.tag(order),
        "type": f"zones/{zone}/machineTypes/{kind}",
        "image": image.self_link, "gb": max(offer.detail["gb"], image.disk_size_gb),
        "disk": f"zones/{zone}/diskTypes/{disk}", "network": settings.path(),
        "subnetwork": settings.subnetwork and f"regions/{offer.region}/subnetworks/{settings.subnetwork}",
        "cards": [
            {"accelerator_type": f"zones/{zone}/acceleratorTypes/{model}", "accelerator_count": count}
            for model, count in offer.detail.get("cards", ())  # a kept offer may be an older skypool's
        ] or None,
        "nic": "GVNIC" if offer.accelerator else None,
        "key": f"{_api.USER}:{order.keys.public}",
        "description": f"of skypool's pool {order.pool}", "spot": spot or None,
        "model": "SPOT" if spot else "STANDARD", "action": "DELETE" if spot or limit else None,
        "maintenance": "TERMINATE" if spot or offer.accelerator else "MIGRATE",
        "lifetime": {"seconds": limit} if limit else None,
        "accounts": [{"email": account, "scopes": [_api.SCOPE]}] if account else None, "policies": None,
        "reservation": settings.reservation and {
            "consume_reservation_type": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name", "values": [settings.reservation],
        },
    }  # fmt: skip


def scripts(settings: _api.Settings, order: Order, zone: str, what: str) -> dict[str, str]:
    """What cloud-init runs first, and what Google's own agent runs last, for images where either is missing.

    `what` is deleted when the lease is over, as "instances/NAME" of the zone.

    That agent may make new host keys of its own: https://github.com/GoogleCloudPlatform/guest-agent#instance-setup.
    """
    lifetime, end = order.lifetime, userdata.OFF
    if settings.service_account:
        base = _api.endpoint("compute") or "https://compute.googleapis.com"
        url = f"{base}/compute/v1/projects/{settings.billed()}/zones/{zone}/{what}"
        end = _api.deletes(url)
    later = lifetime + _LATER if lifetime is not None and _limit(order) else lifetime
    kept = replace(order, lifetime=later)
    told, script = (do(kept, user=_api.USER, end=end) for do in (userdata.cloud_config, userdata.boot_script))
    return {"told": told, "script": script}


def _limit(order: Order) -> int | None:
    """Seconds after which Google deletes it; None where it takes no such limit."""
    asked = order.lifetime
    return math.floor(asked) if asked is not None and 30.0 <= asked <= _LONGEST else None


def shared(order: Order) -> dict[str, str]:
    """The tags of what the orders of a session have in common."""
    return {key: text for key, text in tags.tags(order).items() if key not in (tags.RANKS, tags.TOKEN)}
