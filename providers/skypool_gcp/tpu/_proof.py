"""Sends requests that Cloud TPU must refuse, for the command `skypool prove`.

The API has no dry run: its methods that create have no parameter "validateOnly", as Google's discovery document of
2026-10-01 says (read 2026-11-24). So each request is a real one of the driver for its cheapest slice, in which one
thing does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial

from skypool.accelerators import parse, tables
from skypool.drivers import preflight
from skypool.drivers.retry import at_once
from skypool.errors import CapacityError, ProviderError
from skypool.model import Finding, Need, Offer, Order
from skypool_gcp import _api as google

Tried = Callable[[Offer, Order, Sequence[int]], ProviderError | None]
"""A function that requests a slice, deletes what was made, and returns the error with which Google refused it."""

_NEEDED = timedelta(minutes=10)
"""Time from the request on after which `skypool gc` may delete what Google made although it should have refused."""

_POOL = "prove"
"""The name of the pool in the tags of the requests."""

_UNKNOWN = "skypool-does-not-exist"
"""The name of an accelerator type and of a runtime version that Google does not have."""


@dataclass(frozen=True, slots=True)
class _Impossible:
    """A request that Google must refuse, because a part of `offer` does not exist. `expected` is the error's class."""

    what: str
    offer: Offer
    node: int
    expected: type[ProviderError]


def refusals(offers: Callable[[Need], Sequence[Offer]], tried: Tried) -> Iterator[Finding]:
    """Request two slices that must be refused, in parallel, and yield one finding for each. Does not raise.

    If Google accepts a request anyway, the slice is deleted again, and the finding is a failure that names it. If
    the API is not enabled for the project, no request is sent, and one finding says so.

    Args:
        offers: Returns the offers of slices that meet a need.
        tried: Requests a slice of an offer, deletes what was made, and returns the error of Google's refusal, or None.
    """
    order = Order(_POOL, f"{secrets.token_hex(8)}-1", (0, 1), Need(), until=datetime.now(UTC) + _NEEDED)
    (offer,) = at_once(lambda need: _cheapest(offers(need)), [_one_host()])
    if isinstance(offer, Exception):
        yield from preflight.findings({"Cloud TPU: creates that must be refused": partial(_not_sent, offer)})
        return
    strange = replace(offer, instance_type=_UNKNOWN)
    old = replace(offer, detail={**offer.detail, "runtime": _UNKNOWN})
    requests = [
        _Impossible("a slice of an unknown type", strange, 0, CapacityError),
        _Impossible("a slice with an unknown runtime version", old, 1, ProviderError),
    ]
    yield from preflight.findings(
        {f"Cloud TPU: {each.what} is refused": partial(_refused, tried, order, each) for each in requests}
    )


def _one_host() -> Need:
    """Return the need for any slice of one host that Cloud TPU's API has."""
    types = [type for type, slice in tables.slices().items() if slice.runtime_version and slice.vms == 1]
    return Need(accelerators=tuple(map(parse, types)))


def _cheapest(offers: Sequence[Offer]) -> Offer:
    """Return the cheapest of some offers. Raises ProviderError if there is none."""
    if not offers:
        raise ProviderError(
            "no zone that may be used has a TPU slice of one host with a known price, so none can be asked for; "
            "choose other zones with GCP(zones=…)",
            provider="gcp",
        )
    return min(offers, key=lambda each: each.usd_per_hour)


def _not_sent(error: Exception) -> str:
    """Return a text that says that nothing was sent, if `error` means that the API is not enabled. Else raise it."""
    if getattr(error, "code", "") in google.DISABLED:
        return "not sent, as the API of Cloud TPU is not enabled"
    raise error


def _refused(tried: Tried, order: Order, request: _Impossible) -> str:
    """Send a request, and return Google's refusal as text. Raise ProviderError if it was not refused as expected."""
    refusal = tried(request.offer, order, [request.node])
    if refusal is None:
        raise ProviderError(
            f"Google Cloud accepted {request.what}, which should be impossible; it is deleted again, so only look "
            "whether `skypool gc` finds something else",
            provider="gcp",
        )
    if type(refusal) is request.expected and _UNKNOWN in refusal.text:
        return f"{refusal.text.strip()} ({refusal.code})"
    raise refusal
