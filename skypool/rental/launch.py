"""Rents machines: tries the ranked offers one after the other until enough machines are made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from skypool.drivers.contract import Driver, terminate
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    ErrorGroup,
    FundsError,
    LaunchError,
    NoAnswer,
    OfferGone,
    PoolClosed,
    ProviderError,
    QuotaError,
    RateLimitError,
    SkypoolError,
)
from skypool.model import Instance, Offer, Order

if TYPE_CHECKING:
    from tenacity import RetryCallState, Retrying

_PATIENCE = 60.0
"""Seconds for which one order is repeated. If a provider asks for a longer pause, the pause is cut to this length."""
_ATTEMPTS = 6
"""Largest number of times that one order is sent."""
_FAILOVER = (
    CapacityError,
    OfferGone,
    QuotaError,
    AccessError,
    CredentialsError,
    FundsError,
    NoAnswer,
    RateLimitError,
)
"""Errors of an order after which the next offer is tried."""
Attempts = list[tuple[Offer, ProviderError]]
"""Offers that were refused, each with its error."""


class Book(Protocol):
    """A protocol for the record of orders, such as `Orders`.

    `intend` is called before each attempt to send an order, `rented` or `refused` when the order is answered, and
    `failed` when it is given up.
    """

    def intend(self, order: Order, offer: Offer) -> None: ...
    def rented(self, order: Order, instances: Sequence[Instance]) -> None: ...
    def refused(self, order: Order, error: Exception) -> None: ...
    def failed(self, order: Order) -> None: ...


@dataclass(frozen=True, slots=True)
class Rented:
    """The result of a launch: the instances that were rented, and the `error` if some are missing (None if none is)."""

    instances: tuple[Instance, ...]
    error: Exception | None = None

    @property
    def slices(self) -> list[list[Instance]]:
        """The instances grouped by slice, sorted by node. A machine that belongs to no slice is a group of its own."""
        ranked = sorted(self.instances, key=lambda each: each.node)
        return [list(hosts) for _, hosts in groupby(ranked, key=lambda each: (each.provider, each.slice or each.node))]


@dataclass
class Launcher:
    """A launcher that rents the best offers that are in stock, for the nodes of one pool. Its methods block.

    Attributes:
        drivers: the drivers of the pool's providers.
        order: called with an offer and node numbers. It returns the order, with a new token each time.
        book: records what becomes of each order.
        attempts: offers that were refused so far, each with its error.
        stopping: event that is set when nothing more is to be rented.
        lacking: the errors of places that accepted an order and then had no machine. These places are not tried. A key
            is what the function `place` returns for an offer: its provider, machine type, place and market.
        together: True if one order must make the machines of all nodes, because the nodes need a private network.
    """

    drivers: Sequence[Driver]
    order: Callable[[Offer, tuple[int, ...]], Order]
    book: Book
    attempts: Attempts = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    lacking: dict[tuple[str, ...], ProviderError] = field(default_factory=dict[tuple[str, ...], ProviderError])
    together: bool = False

    def launch(self, offers: Sequence[Offer], nodes: Sequence[int]) -> Rented:
        """Rent machines for these nodes on the best offers that are in stock. All errors are returned, not raised.

        The offers are tried in order. After a refusal, offers to which the same refusal applies are skipped. If an
        offer has machines for some of the nodes only, the other nodes are tried on the next offer, unless `together` is
        True. An order without an answer stays open in `book`, because the order may have made machines. For a slice,
        `nodes` has the number of its first machine; its other machines get the numbers that follow.

        Returns:
            The instances, and an error if fewer were rented than asked for. The error is a LaunchError if all offers
            were tried. Otherwise it is the error that ended the launch.
        """
        launched: list[Instance] = []
        barred: dict[_Bar, int] = {}
        before = len(self.attempts)
        try:
            for offer in offers:
                if (lack := self.lacking.get(place(offer))) is not None:
                    self.attempts.append((offer, lack))
                    continue
                bar = next((each for each in _bars(offer) if each in barred), None)
                if bar is not None:
                    barred[bar] += 1
                    continue
                left = tuple(sorted(set(nodes) - {instance.node for instance in launched}))
                try:
                    for instances in self._rent_what_fits(offer, left):
                        launched += instances
                except _FAILOVER as e:
                    self.attempts.append((offer, e))
                    covers = _covers(offer, e)
                    if covers is not None:
                        barred[covers] = 0
                if {instance.node for instance in launched}.issuperset(nodes):
                    return Rented(tuple(launched))
        except Exception as e:  # noqa: BLE001 - machines that were already rented must not be lost
            return Rented(tuple(launched), e)
        return Rented(tuple(launched), _nothing_left(offers, self.attempts[before:], barred, len(launched)))

    def _rent_what_fits(self, offer: Offer, nodes: tuple[int, ...]) -> Iterator[list[Instance]]:
        """Rent machines on an offer for as many nodes as quota and stock allow. Yield the machines of each order."""
        most = len(nodes)
        while nodes:
            try:
                instances = self._rent(offer, nodes[:most])
            except QuotaError:
                if most == 1 or self.together:
                    raise
                most = max(1, most // 2)
                continue
            yield instances  # at once, as a later order may be refused
            if len(instances) < len(nodes[:most]) * offer.hosts:
                return  # no more are in stock
            nodes = nodes[most:]

    def _rent(self, offer: Offer, nodes: tuple[int, ...]) -> list[Instance]:
        """Send one order, again after a lost reply or a requested pause. Return its instances; some may be missing."""
        driver = next(each for each in self.drivers if each.name == offer.provider)
        order = self.order(offer, tuple(node + host for node in nodes for host in range(offer.hosts)))
        instances: list[Instance] = []
        lost = False
        try:
            for attempt in _patiently(self.stopping):
                with attempt:
                    if self.stopping.is_set():
                        raise PoolClosed(
                            f"pool {order.pool!r} was stopped while its machines were being launched, so the launch "
                            "was cancelled; make a new ComputePool to rent machines"
                        )
                    self.book.intend(order, offer)
                    try:
                        instances = _launched(driver, offer, order)
                    except NoAnswer:
                        lost = True
                        raise
                    except SkypoolError as e:
                        if not lost:  # otherwise the lost attempt may have made machines, so the order stays open
                            self.book.refused(order, e)
                        raise
        except Exception:
            self.book.failed(order)
            raise
        if wrong := _wrong(order, offer, instances):
            terminate(driver, instances)  # raises if that is not proved; then nothing else is tried
            raise LaunchError(
                f"the driver {driver.name} {wrong}; these machines were ended. Report this bug to the author "
                "of the driver"
            )
        self.book.rented(order, instances)
        return instances


def _patiently(stopping: threading.Event) -> Retrying:
    """Return a retry object that repeats an order after RateLimitError and NoAnswer, up to 6 times in 60 s."""
    from tenacity import (
        Retrying,
        retry_if_exception_type,
        sleep_using_event,
        stop_after_attempt,
        stop_after_delay,
        wait_random_exponential,
    )

    backoff = wait_random_exponential(multiplier=0.5, max=30.0)

    def wait(state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        said = error.retry_after if isinstance(error, RateLimitError) else None
        return backoff(state) if said is None else min(said, _PATIENCE)

    return Retrying(
        retry=retry_if_exception_type((RateLimitError, NoAnswer)),
        stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_PATIENCE),
        wait=wait,
        sleep=sleep_using_event(stopping),  # a pause ends when the event is set
        reraise=True,
    )


def _launched(driver: Driver, offer: Offer, order: Order) -> list[Instance]:
    """Send an order, and return its instances. Raise NoAnswer in place of an ErrorGroup, such as of several regions."""
    try:
        return driver.launch(offer, order)
    except ErrorGroup as e:
        raise NoAnswer(str(e), provider=driver.name) from e


def _wrong(order: Order, offer: Offer, instances: Sequence[Instance]) -> str:
    """Return in words how the instances differ from the order; "" if they agree. Its last nodes may be missing."""
    ranked = sorted(instances, key=lambda each: each.node)
    got = [each.node for each in ranked]
    asked = sorted(order.nodes)
    if not got or got != asked[: len(got)] or (order.need.private_network and got != asked):
        return f"launched nodes {got}, but {asked} were ordered"
    hosts = offer.hosts
    names = [each.slice or ("" if hosts > 1 else str(each.node)) for each in ranked]
    slices = [set(names[first : first + hosts]) for first in range(0, len(names), hosts)]
    is_each_one = len(names) % hosts == 0 and all(len(each) == 1 for each in slices)
    if not is_each_one or "" in names or len(set(names)) != len(slices):
        parts = ", ".join(f"{each.node} of {each.slice or 'none'}" for each in ranked)
        return f"launched incomplete or mixed slices, but slices of {hosts} hosts were ordered (got nodes {parts})"
    return ""


def place(offer: Offer) -> tuple[str, ...]:
    """Return the key under which a shortage of this offer's machine type in its place and market is remembered."""
    return offer.provider, offer.instance_type, str(offer.accelerator), offer.region, offer.zone, offer.market


_Bar = tuple[str, str, str]
"""The key of a group of offers: (provider, region, quota). "" stands for all regions, or for all quotas. When a refusal
of one offer bars a key, no offer of this group is tried."""


def _bars(offer: Offer) -> list[_Bar]:
    """Return the keys of the groups that this offer is in: of its provider, of its region, and of its quota."""
    return [(offer.provider, "", ""), (offer.provider, offer.region, ""), (offer.provider, "", offer.quota)]


def _covers(offer: Offer, error: ProviderError) -> _Bar | None:
    """Return the key of the group of offers to which a refusal of one applies; None if it applies to this one only."""
    match error:
        case QuotaError():
            return offer.provider, "", offer.quota
        case CredentialsError() | FundsError() | NoAnswer(code="ConnectionError"):
            return offer.provider, "", ""
        case AccessError() | RateLimitError() | NoAnswer():
            return offer.provider, offer.region, ""
    return None


def _nothing_left(offers: Sequence[Offer], tried: Attempts, barred: Mapping[_Bar, int], launched: int) -> LaunchError:
    lines = [_told(list(alike)) for _, alike in groupby(tried, _kind)]
    for (provider, region, quota), spared in barred.items():
        if spared:
            where = f"{provider} ({region or quota})" if region or quota else provider
            lines.append(f"  {spared} more offers of {where} were not tried, because the same refusal applies to them")
    had = f" for all nodes; {launched} machines were launched and then ended" if launched else ""
    is_short = any(isinstance(error, (CapacityError, OfferGone)) for _, error in tried) or (launched > 0 and not tried)
    if is_short:
        lines.append(
            "  allow more regions or accelerators, or wait until machines are in stock: ComputePool(wait='1h')"
        )
    return LaunchError(f"none of {len(offers)} offers could be launched{had}:\n" + "\n".join(lines), is_short=is_short)


def _kind(attempt: tuple[Offer, ProviderError]) -> tuple[str, ...]:
    """Return the key of a refused attempt for the error message, which has one line for all attempts with one key."""
    offer, error = attempt
    return offer.provider, offer.instance_type, str(offer.accelerator), offer.market, type(error).__name__, error.code


def _told(alike: Attempts) -> str:
    offer, error = alike[0]
    market = offer.market if offer.market != "on-demand" else ""
    places = ", ".join(filter(None, (each.zone or each.region for each, _ in alike)))
    words = offer.provider, offer.instance_type, market, f"in {places}" if len(alike) > 1 and places else places
    return f"  {' '.join(filter(None, words))}: {error}"
