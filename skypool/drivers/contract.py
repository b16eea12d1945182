"""Protocols that a driver implements: `Driver`, its optional parts (`Renews`, `Tidies`, …), and `Abilities`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from skypool.errors import StillRunning, not_ended
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order, Trust

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of a provider. A driver declares them with `abilities: ClassVar[Abilities]`.

    Attributes:
        ends_itself: True if a machine ends itself when its lease is over, and is not billed any more.
            `Offer.ends_itself` may differ.
        private_network: True if machines that are launched together reach each other. Pools that need a private network
            skip other providers.
        spot: True if the provider has a spot market.
        trust: trust in a machine that was found without its offer. None means: as the driver's offers say.
        billed_from: when billing of a machine starts: "create" is the request to make it, "running" is when it runs.
            With "running", a machine that never runs costs nothing. See also `Instance.billed_from`.
        lists_all: True if every client of this user sees all machines of the user at this provider. False if a client
            sees only those of its own host or folder. A machine that is missing from a list may then still run.
    """

    ends_itself: bool = True
    private_network: bool = False
    spot: bool = False
    trust: Trust | None = None
    billed_from: Literal["create", "running"] = "create"
    lists_all: bool = True


def abilities(driver: Driver) -> Abilities:
    """Return the abilities that a driver declares, or `Abilities()` if it declares none."""
    said: Abilities = getattr(driver, "abilities", Abilities())
    return said


def ends_itself(driver: Driver, offer: Offer) -> bool:
    """Return True if a machine of this offer ends itself, and is not billed any more, when its lease is over.

    The offer's own `ends_itself` counts. If that is None, the driver's abilities decide.
    """
    return abilities(driver).ends_itself if offer.ends_itself is None else offer.ends_itself


def terminate(driver: Driver, instances: Sequence[Instance]) -> None:
    """Terminate instances with the driver's own method, and raise `StillRunning` for every kind of failure.

    After any other error of the driver, none of the instances counts as ended.

    Raises:
        StillRunning: names the instances whose end could not be proved.
    """
    try:
        driver.terminate(instances)
    except StillRunning:
        raise
    except Exception as e:
        why = str(e) or type(e).__name__
        raise not_ended({f"{each.id} at {driver.name}": why for each in instances}, instances) from e


def undo(terminate: Callable[[Sequence[Instance]], None], order: Order, instances: Sequence[Instance]) -> None:
    """Terminate instances that a failing launch made, and report the ended ones to `order.undone`.

    The report is needed to count their cost. Does nothing if `instances` is empty.

    Args:
        terminate: the driver's method that terminates instances.
        order: order that the instances belong to.
        instances: instances that the launch does not return.

    Raises:
        StillRunning: names the instances whose end could not be proved. The ended ones are reported before it is
            raised.
    """
    if not instances:
        return
    try:
        terminate(instances)
    except StillRunning as e:
        left = {getattr(each, "id", "") for each in e.instances} or {each.id for each in instances}
        order.undone(*(each for each in instances if each.id not in left))
        raise
    order.undone(*instances)


class Answers(list[T]):
    """A list of answers of a provider, together with the names of what is missing from it.

    A driver returns `Answers` instead of a list if some offers may be missing. Such an incomplete answer is not cached.

    Attributes:
        lacks: names of what may be missing, such as "offers" or "prices"; empty for a complete answer. If the given
            `answers` are `Answers` too, their `lacks` come first.
    """

    __slots__ = ("lacks",)

    def __init__(self, answers: Iterable[T] = (), lacks: Iterable[str] = ()) -> None:
        super().__init__(answers)
        self.lacks: tuple[str, ...] = (*(answers.lacks if isinstance(answers, Answers) else ()), *lacks)


def lacks(what: str, why: Exception) -> str:
    """Warn the user that an answer is incomplete, and return `what` for `Answers.lacks`.

    Args:
        what: what may be missing, such as "prices".
        why: error that caused it; its text is part of the RuntimeWarning.
    """
    warnings.warn(f"{what} may be missing: {why}", RuntimeWarning, stacklevel=3)
    return what


@runtime_checkable
class Driver(Protocol):
    """A provider together with the user's settings. Making one does no I/O and imports no SDK.

    Every method may block. Methods are called from worker threads, several at the same time.

    A driver may set `offers_keep: ClassVar[float]`, the seconds for which its offers are cached. Without it, offers are
    requested each time. The cache key is the driver's `repr` and the need, so fields with secrets must have
    `repr=False`.
    """

    name: ClassVar[str]

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return all offers that are sold now and could meet the need. It should be quick.

        Leave out offers that cannot be read. In that case return `Answers` whose `lacks` says what is missing; the
        function `lacks` warns the user. Any other list counts as complete, and may be cached for the next request.

        Raises:
            ProviderError: the provider refused or failed; its error is translated to one of skypool's.
        """
        ...

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent `order.count` machines and return them at once, without waiting until they run.

        The create is idempotent by `order.token`: a repetition, also after a lost reply, makes no further machines.

        If the launch sends several creates, call `order.asking` before each and `order.made` after it. Terminate
        machines that the launch does not return with `undo`. Each machine is then charged from its own create, even if
        it is undone.

        If the offer is a slice (`offer.hosts` > 1), `order.nodes` lists the hosts of whole slices, one slice after the
        other. Return all hosts of a slice, in order and with the same `Instance.slice`, or none of them.

        With `order.need.private_network`, rent all machines in one place, or none. Otherwise fewer machines may be
        returned if no more are in stock: at least one, and those of the first nodes.

        Raises:
            CapacityError, QuotaError, CredentialsError, …: nothing was rented. The kind of error decides which offer is
                tried next.
            RateLimitError, NoAnswer: the launch is repeated with the same token, and then the next offer is tried.
            SkypoolError: nothing was rented, and no other offer is tried.
        """
        ...

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return all instances of this user's pools at this provider, found by their tags and never from the ledger.

        Args:
            pool: return only the instances of the pool of this name; None for all pools.

        Raises:
            ProviderError: a region could not be asked, so instances could be missing. An ErrorGroup if several could
                not.
        """
        ...

    def access(self, instance: Instance) -> Access:
        """Return how to connect to an instance. It is called when the instance's state is "running"."""
        ...

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Terminate instances, and return when the provider says that they have ended.

        A slice (several hosts that are rented together) ends as a whole, even if only one host is named. Does not raise
        for instances that no longer exist.

        Raises:
            StillRunning: names the instances whose end could not be proved. After any other error, no end counts as
                proved.
        """
        ...


@runtime_checkable
class Renews(Protocol):
    """An optional protocol of a driver: it can postpone the time in the tags of a pool's machines."""

    def renew(self, pool: str, until: datetime) -> None:
        """Set the tag of everything that the pool has to a new time until which it is needed.

        It is called a few times during each lease.

        Args:
            pool: name of the pool.
            until: the new time.

        Raises:
            ProviderError: a tag could not be changed. An ErrorGroup of several such errors. The next call tries again.
        """
        ...


@runtime_checkable
class Learns(Protocol):
    """An optional part of a driver that rents machines of strangers: it can leave out machines that failed before."""

    def rejected(self, instance: Instance, why: Exception) -> None:
        """Record that the pool gave up an instance before it was ready, so that later offers can leave out its machine.

        Args:
            instance: the instance that was given up.
            why: the error. The driver decides from it whether the machine is to blame.
        """
        ...


@runtime_checkable
class Tidies(Protocol):
    """An optional part of a driver whose pools make other resources than instances, such as disks or key pairs."""

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return all resources other than instances that this user's pools have here, found by tag, label or name.

        Args:
            pool: return only the resources of the pool of this name; None for all pools.
        """
        ...

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove these resources. The caller ensures that no instance uses them.

        Does not raise for resources that no longer exist.

        Raises:
            ProviderError: a resource could not be removed. An ErrorGroup of several such errors.
        """
        ...


@runtime_checkable
class Checks(Protocol):
    """An optional part of a driver: it can check in advance, at no cost, whether it could work."""

    def check(self) -> Iterable[Finding]:
        """Check credentials, permissions (by dry run), quotas, images and the clock, and return the results.

        Each result is a `Finding`. A failed check is returned as a finding, too. This method never raises.
        """
        ...


@runtime_checkable
class Policed(Protocol):
    """An optional part of a driver: it can name the smallest set of permissions that it needs."""

    def policy(self) -> str:
        """Return the smallest set of permissions that the driver needs, in the provider's format, ready to paste."""
        ...
