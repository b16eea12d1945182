"""Sends requests that Compute Engine must refuse, for the command `skypool prove`.

The API has no dry run for machines: `instances.insert` has no parameter "validateOnly"
(https://docs.cloud.google.com/compute/docs/reference/rest/v1/instances/insert, as the discovery document of 2026-11-06
says). So each request is a real one of the driver for its cheapest machine, in which one thing does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

from skypool.drivers import preflight, retry, tags
from skypool.drivers.retry import at_once
from skypool.errors import CapacityError, NoAnswer, ProviderError, RateLimitError
from skypool.model import Finding, Need, Offer, Order
from skypool_gcp import _api
from skypool_gcp._sdk import compute_v1
from skypool_gcp._settings import Settings
from skypool_gcp.catalog import machine_of
from skypool_gcp.compute import _client, _requests
from skypool_gcp.compute._client import ComputeApi

_MADE = 180.0
"""Seconds to wait until Google has refused or done what was requested."""

_REQUESTED = 30.0
"""Seconds for which a request is repeated while there is no answer."""

_NEEDED = timedelta(minutes=10)
"""Time from the request on after which `skypool gc` may delete what Google made although it should have refused."""

_POOL = "prove"
"""The name of the pool in the tags of the requests."""

_UNKNOWN = "skypool-does-not-exist"
"""The name of a machine type, an image and a network that no project should have."""


@dataclass(frozen=True)
class _Impossible:
    """A request that Google must refuse. `create` sends it, `expected` is the error's class, `remove` undoes it."""

    what: str
    made: str
    create: Callable[[], compute_v1.Operation | None]
    remove: Callable[[], compute_v1.Operation | None]
    expected: type[ProviderError]


def refusals(calls: ComputeApi, find: Callable[[], tuple[Offer, compute_v1.Image]]) -> Iterator[Finding]:
    """Send requests that must be refused, in parallel, and yield one finding for each. Does not raise.

    If Google makes something anyway, it is deleted again, and the finding is a failure that names it.

    Args:
        find: Returns an offer and the image of its machine. Each request asks for this machine with one change.
    """
    (impossible,) = at_once(lambda _: _requests_for(calls, *find()), [None])
    questions: dict[str, Callable[[], object]] = {}
    if isinstance(impossible, Exception):
        questions["Compute Engine: creates that must be refused"] = partial(_raise, impossible)
    else:
        for each in impossible:
            questions[f"Compute Engine: {each.what} is refused"] = partial(_refused, calls, each)
    yield from preflight.findings(questions)


def _requests_for(calls: ComputeApi, offer: Offer, image: compute_v1.Image) -> list[_Impossible]:
    """Return the requests that Google must refuse: for three machines and a firewall rule. None is sent here."""
    order = Order(_POOL, f"{secrets.token_hex(8)}-1", (0, 1, 2), Need(), until=datetime.now(UTC) + _NEEDED)
    settings = calls.settings
    elsewhere = replace(settings, network=_UNKNOWN, subnetwork=None)
    strange = replace(offer, detail={**offer.detail, "machine": replace(machine_of(offer), machine_type=_UNKNOWN)})
    absent = compute_v1.Image(image, self_link=f"projects/{settings.billed()}/global/images/{_UNKNOWN}")

    def machine(
        what: str, node: int, expected: type[ProviderError], settings: Settings, offer: Offer, image: compute_v1.Image
    ) -> _Impossible:
        name = _api.name(order.pool, order.token, str(node))
        record = _requests.machine(
            settings,
            offer,
            order,
            name=name,
            image=image,
            labels=_api.labels(tags.tags(replace(order, nodes=(node,)))),
            scripts=_requests.scripts(settings, order, offer.zone, f"instances/{name}"),
            policies=[],
        )
        id = _requests.request_id(offer.zone, name)
        return _Impossible(
            what,
            f"the machine {name} in {offer.zone}",
            partial(calls.instances.insert, record, what, zone=offer.zone, request_id=id),
            partial(calls.instances.delete, name, f"to end the machine {name}", zone=offer.zone),
            expected,
        )

    rule = _requests.firewall_rules(elsewhere, order, ["192.0.2.1/32"])[0]  # an address that nobody has: RFC 5737
    return [
        machine("a machine of an unknown type", 0, CapacityError, settings, strange, image),
        machine("a machine with an unknown image", 1, ProviderError, settings, offer, absent),
        machine("a machine in an unknown network", 2, ProviderError, elsewhere, offer, image),
        _Impossible(
            "a firewall rule in an unknown network",
            f"the firewall rule {rule.name}",
            partial(calls.firewalls.insert, rule, "a firewall rule in an unknown network"),
            partial(calls.firewalls.delete, rule.name, f"to remove the firewall rule {rule.name}"),
            ProviderError,
        ),
    ]


def _refused(calls: ComputeApi, request: _Impossible) -> str:
    """Send a request, and return Google's refusal as text. Raise ProviderError if it was not refused as expected."""
    try:
        _client.done(calls, retry.patiently(request.create, _REQUESTED), request.what, _MADE)
    except ProviderError as e:
        if type(e) is request.expected and _UNKNOWN in e.text:
            return f"{e.text.strip()} ({e.code})"
        if isinstance(e, (NoAnswer, RateLimitError)):
            _remove(calls, request)  # it may have been made anyway
        raise
    _remove(calls, request)
    raise ProviderError(
        f"Google Cloud made {request.made}, which should be impossible, and which is deleted again; report this "
        "message to skypool's authors",
        provider="gcp",
    )


def _remove(calls: ComputeApi, request: _Impossible) -> None:
    """Delete what a request may have made, and wait until it is gone. Raise ProviderError if that fails."""
    try:
        _client.insist(calls, f"to remove {request.made}", request.remove, _MADE)
    except ProviderError as e:
        text = f"{request.made} may exist and cost money ({e}); delete it: run `skypool gc --yes` in ten minutes"
        raise ProviderError(text, provider="gcp", code=e.code) from e


def _raise(error: Exception) -> None:
    raise error
