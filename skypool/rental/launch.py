"""Rents machines: tries ranked offers one after the other until enough machines are made."""

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
"""Seconds for which one create is repeated, and the longest pause that a provider may ask for."""
_ATTEMPTS = 6
"""How often one create is sent at most."""
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
"""Errors after which the next offer is tried."""
Attempts = list[tuple[Offer, ProviderError]]


class Book(Protocol):
    """Where every create is written down before it goes out, and then what became of it."""

    def intend(self, order: Order, offer: Offer) -> None: ...
    def rented(self, order: Order, instances: Sequence[Instance]) -> None: ...
    def refused(self, order: Order, error: Exception) -> None: ...
    def failed(self, order: Order) -> None: ...


@dataclass(frozen=True, slots=True)
class Rented:
    """What came of a launch: the instances, and if they are fewer than were asked for, the error that says why."""

    instances: tuple[Instance, ...]
    error: Exception | None = None

    @property
    def slices(self) -> list[list[Instance]]:
        """The instances slice by slice, each host after host; a machine by itself is one of its own."""
        ranked = sorted(self.instances, key=lambda each: each.node)
        return [list(hosts) for _, hosts in groupby(ranked, key=lambda each: (each.provider, each.slice or each.node))]


@dataclass
class Launcher:
    """Rents the best offers that are in stock, one pool's nodes at a time. Blocks.

    Attributes:
        order: makes the order for these nodes on an offer, each with a token of its own.
        attempts: what was refused, and why, so far.
        stopping: set when nothing more is to be rented.
        lacking: places that took an order and then had no machine for it, and what they said; not tried any more.
        together: whether all nodes are needed in one place.
    """

    drivers: Sequence[Driver]
    order: Callable[[Offer, tuple[int, ...]], Order]
    book: Book
    attempts: Attempts = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    lacking: dict[tuple[str, ...], ProviderError] = field(default_factory=dict[tuple[str, ...], ProviderError])
    together: bool = False

    def launch(self, offers: Sequence[Offer], nodes: Sequence[int]) -> Rented:
        """The best offer first, the next when it is out of stock; what a refusal covers is not asked for again.

        Where an offer has machines for some of the nodes, the rest goes on to the next one, unless all are needed in
        one place. An order without an answer stays open in the book: it may have taken effect.

        Args:
            nodes: of the first host of each slice; the others, if the offer has more, get those that follow.
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
        except Exception as e:  # noqa: BLE001 - what was rented before it must not be lost
            return Rented(tuple(launched), e)
        return Rented(tuple(launched), _nothing_left(offers, self.attempts[before:], barred, len(launched)))

    def _rent_what_fits(self, offer: Offer, nodes: tuple[int, ...]) -> Iterator[list[Instance]]:
        """Rent for these nodes; where a quota has no room for all of them, for as many as it has room for.

        Yields:
            What came of each create, so that it is known also where a later one is refused.

        Raises:
            QuotaError: there was no room for one more.
        """
        most = len(nodes)
        while nodes:
            try:
                instances = self._rent(offer, nodes[:most])
            except QuotaError:
                if most == 1 or self.together:
                    raise
                most = max(1, most // 2)
                continue
            yield instances
            if len(instances) < len(nodes[:most]) * offer.hosts:
                return  # no more are in stock
            nodes = nodes[most:]

    def _rent(self, offer: Offer, nodes: tuple[int, ...]) -> list[Instance]:
        """One create, written down before and after. What is no word of the provider leaves open if it took effect.

        It is asked again, with the same token, where the provider asks for patience, or its reply was lost. Whatever
        it says after a lost reply, that one may have taken effect.
        """
        driver = next(each for each in self.drivers if each.name == offer.provider)
        order = self.order(offer, tuple(node + host for node in nodes for host in range(offer.hosts)))
        instances: list[Instance] = []
        lost = False
        try:
            for attempt in _patiently(self.stopping):
                with attempt:
                    if self.stopping.is_set():
                        raise PoolClosed("the pool was stopped while it launched")
                    self.book.intend(order, offer)
                    try:
                        instances = _launched(driver, offer, order)
                    except NoAnswer:
                        lost = True
                        raise
                    except SkypoolError as e:
                        if not lost:
                            self.book.refused(order, e)
                        raise
        except Exception:
            self.book.failed(order)
            raise
        if wrong := _wrong(order, offer, instances):
            terminate(driver, instances)  # where that is not proved, nothing else is tried
            raise LaunchError(f"{driver.name} {wrong}; they are ended; report it to its author")
        self.book.rented(order, instances)
        return instances


def _patiently(stopping: threading.Event) -> Retrying:
    """Attempts, with growing pauses or those that the provider asks for."""
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
        sleep=sleep_using_event(stopping),
        reraise=True,
    )


def _launched(driver: Driver, offer: Offer, order: Order) -> list[Instance]:
    """What the driver rents. If several of its places fail when it looks what is there, it has not answered."""
    try:
        return driver.launch(offer, order)
    except ErrorGroup as e:
        raise NoAnswer(str(e), provider=driver.name) from e


def _wrong(order: Order, offer: Offer, instances: Sequence[Instance]) -> str:
    """What is the matter with instances that are not what was ordered, "" for nothing."""
    ranked = sorted(instances, key=lambda each: each.node)
    got = [each.node for each in ranked]
    asked = sorted(order.nodes)
    if not got or got != asked[: len(got)] or (order.need.private_network and got != asked):
        return f"launched nodes {got} for {asked}"
    hosts = offer.hosts
    names = [each.slice or ("" if hosts > 1 else str(each.node)) for each in ranked]
    slices = [set(names[first : first + hosts]) for first in range(0, len(names), hosts)]
    is_each_one = len(names) % hosts == 0 and all(len(each) == 1 for each in slices)
    if not is_each_one or "" in names or len(set(names)) != len(slices):
        parts = ", ".join(f"{each.node} of {each.slice or 'none'}" for each in ranked)
        return f"launched what are no whole slices of {hosts} hosts (nodes {parts})"
    return ""


def place(offer: Offer) -> tuple[str, ...]:
    """What is in stock or not: a type of machine with its accelerators, somewhere, in a market."""
    return offer.provider, offer.instance_type, str(offer.accelerator), offer.region, offer.zone, offer.market


_Bar = tuple[str, str, str]  # provider, then the region or the quota, each "" for all


def _bars(offer: Offer) -> list[_Bar]:
    """What would keep this offer from being tried."""
    return [(offer.provider, "", ""), (offer.provider, offer.region, ""), (offer.provider, "", offer.quota)]


def _covers(offer: Offer, error: ProviderError) -> _Bar | None:
    """What else need not be tried after this refusal; None where it was for this offer alone.

    Who could not be reached at all need not be asked for another place either.
    """
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
            lines.append(f"  {spared} more of {where} were not tried, as the same refusal holds for them")
    had = f" for all nodes; {launched} were, and are ended" if launched else ""
    is_short = any(isinstance(error, (CapacityError, OfferGone)) for _, error in tried) or (launched > 0 and not tried)
    if is_short:
        lines.append("  ask for more places or kinds, or wait for what is out of stock: ComputePool(wait='1h')")
    return LaunchError(f"none of {len(offers)} offers could be launched{had}:\n" + "\n".join(lines), is_short=is_short)


def _kind(attempt: tuple[Offer, ProviderError]) -> tuple[str, ...]:
    """What attempts have in common that are told of in one line."""
    offer, error = attempt
    return offer.provider, offer.instance_type, str(offer.accelerator), offer.market, type(error).__name__, error.code


def _told(alike: Attempts) -> str:
    offer, error = alike[0]
    market = offer.market if offer.market != "on-demand" else ""
    places = ", ".join(filter(None, (each.zone or each.region for each, _ in alike)))
    words = offer.provider, offer.instance_type, market, f"in {places}" if len(alike) > 1 and places else places
    return f"  {' '.join(filter(None, words))}: {error}"
