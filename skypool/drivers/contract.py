"""Protocols that a driver implements. A driver is the class that talks to one cloud provider.

`Driver` has the methods that every driver needs. `Renews`, `Learns`, `Tidies`, `Checks` and `Policed` are optional.
`Abilities` says what a provider can do. `Answers`, `lacks` and `undo` are helpers for authors of drivers.
"""

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
    """The abilities of a provider. A driver declares one such object as its class attribute `abilities`.

    A lease is the time for which a machine lives on without hearing from its client.

    Attributes:
        ends_itself: True if a machine ends itself when its lease is over, and is not billed any more.
            `Offer.ends_itself` overrides this value for one offer.
        private_network: True if machines that are launched together can reach each other. Pools that need a private
            network skip other providers.
        spot: True if the provider sells spot machines, which it may take back at any time.
        trust: "full" or "data", as in `Offer.trust`, for a machine that was found without its offer. None means: as the
            driver's offers say.
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
    """Return the abilities that a driver declares, or the default `Abilities()` if it declares none."""
    said: Abilities = getattr(driver, "abilities", Abilities())
    return said


def ends_itself(driver: Driver, offer: Offer) -> bool:
    """Return True if a machine of this offer ends itself, and is not billed any more, when its lease is over.

    The lease is the time for which a machine lives on without hearing from its client. The offer's own `ends_itself`
    counts. If that is None, the driver's abilities decide.
    """
    return abilities(driver).ends_itself if offer.ends_itself is None else offer.ends_itself


def terminate(driver: Driver, instances: Sequence[Instance]) -> None:
    """Terminate instances with the driver's own method, and raise `StillRunning` for every kind of failure.

    Blocks until the provider says that the instances have ended. If the driver raises another error than StillRunning,
    that error becomes the cause of a StillRunning that names all the given instances.

    Raises:
        StillRunning: names the instances whose end could not be proved. They may still run and cost money.
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
        StillRunning: names the instances whose end could not be proved. The other instances are reported as ended
            before the error is raised. If the error names no instance, none is reported.
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
    """A list of a provider's answers, together with the names of what may be missing from the list.

    A driver returns `Answers` instead of a plain list if, for example, some offers could not be read. Such an
    incomplete answer is not cached.

    Attributes:
        lacks: names of what may be missing, such as "offers" or "prices"; empty for a complete answer. If the
            constructor is given `Answers`, their `lacks` come first.
    """

    __slots__ = ("lacks",)

    def __init__(self, answers: Iterable[T] = (), lacks: Iterable[str] = ()) -> None:
        super().__init__(answers)
        self.lacks: tuple[str, ...] = (*(answers.lacks if isinstance(answers, Answers) else ()), *lacks)


def lacks(what: str, why: Exception) -> str:
    """Warn the user that an answer is incomplete, and return `what` unchanged, for `Answers.lacks`.

    Args:
        what: what may be missing, such as "prices".
        why: error that caused it; its text is part of the RuntimeWarning.
    """
    warnings.warn(f"{what} may be missing: {why}", RuntimeWarning, stacklevel=3)
    return what


@runtime_checkable
class Driver(Protocol):
    """A cloud provider together with the user's settings. Making one does no I/O and imports no SDK.

    Every method may block. Methods are called from worker threads, several at the same time.

    A driver may set `offers_keep: ClassVar[float]`, the seconds for which its offers are cached. Without it, offers are
    requested each time. The cache key is the driver's `repr` and the need, so fields with secrets must have
    `repr=False`.
    """

    name: ClassVar[str]

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return all offers that are sold now and could meet the need. The method should be quick.

        Leave out offers that cannot be read. In that case return `Answers` whose `lacks` says what is missing. The
        function `lacks` warns the user. Any other list, also an empty one, counts as complete, and may be cached for
        the next request.

        Raises:
            ProviderError: the provider refused or failed; its error is translated to one of skypool's.
        """
        ...

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent `order.count` machines and return them at once, without waiting until they run.

        Creating machines is idempotent by `order.token`: a repeated launch makes no further machines, even if the first
        reply was lost.

        If the launch sends several create requests, call `order.asking` before each and `order.made` after it. Use
        `undo` to terminate machines that this method does not return. So each machine is charged from the time of its
        own create request, even if it is undone.

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
        """Return all instances of this user's pools at this provider, in no particular order; [] if there are none.

        Find them by their tags at the provider, never from skypool's own records. Instances that have ended may be left
        out; if they are returned, their state is "ended".

        Args:
            pool: return only the instances of the pool of this name; None for all pools.

        Raises:
            ProviderError: a region could not be asked, so instances could be missing. An ErrorGroup if several could
                not.
        """
        ...

    def access(self, instance: Instance) -> Access:
        """Return how to connect to an instance and where to work on it, such as its address, login and folders.

        Called only when the instance's state is "running". The method need not connect; the machine's boot may not have
        finished yet.
        """
        ...

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Terminate instances, and return when the provider says that they have ended.

        A slice (several hosts that are rented together) ends as a whole, even if only one host is named. Does not raise
        for instances that no longer exist.

        Raises:
            StillRunning: names the instances whose end could not be proved. After any other error, skypool treats all
                the given instances as possibly still running.
        """
        ...


@runtime_checkable
class Renews(Protocol):
    """An optional protocol of a driver: it can postpone the expiry time in the tags of a pool's machines.

    A driver has this ability if it has the method `renew`; nothing needs to be declared.
    """

    def renew(self, pool: str, until: datetime) -> None:
        """Write a new expiry time into the tags of every machine and other resource of a pool.

        The expiry time is when a resource is no longer needed. The method is called a few times during each lease, the
        time for which a machine lives on without its client.

        Args:
            pool: name of the pool.
            until: the new time.

        Raises:
            ProviderError: a tag could not be changed. An ErrorGroup of several such errors. The next call tries again.
        """
        ...


@runtime_checkable
class Learns(Protocol):
    """An optional protocol of a driver: it is told which machines failed, and can leave them out of later offers."""

    def rejected(self, instance: Instance, why: Exception) -> None:
        """Record that the pool gave up an instance before it was ready, so that later offers can leave out its machine.

        Args:
            instance: the instance that was given up.
            why: the error. The driver decides from it whether the machine is to blame; if not, nothing needs to be
                recorded.
        """
        ...


@runtime_checkable
class Tidies(Protocol):
    """An optional protocol of a driver that creates resources other than instances, such as disks or key pairs.

    Its methods list and remove these resources when the instances that used them are gone.
    """

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return all resources other than instances that this user's pools have at this provider; [] if there are none.

        The resources are found by their tag, label or name.

        Args:
            pool: return only the resources of the pool of this name; None for all pools.
        """
        ...

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove these resources. The caller ensures that no instance uses them any more.

        Does not raise for resources that no longer exist.

        Raises:
            ProviderError: a resource could not be removed. An ErrorGroup of several such errors.
        """
        ...


@runtime_checkable
class Checks(Protocol):
    """An optional protocol of a driver: it can check credentials, quotas and the like before anything is rented.

    `skypool doctor` shows the results.
    """

    def check(self) -> Iterable[Finding]:
        """Check credentials, permissions (by dry run), quotas, images and the clock, and return the results.

        Each result is a `Finding`: title, passed or failed, and text. A check that fails or raises gives a failed
        finding; this method itself never raises.
        """
        ...


@runtime_checkable
class Policed(Protocol):
    """An optional protocol of a driver: it can return the smallest set of permissions that it needs at the provider."""

    def policy(self) -> str:
        """Return the smallest set of permissions that the driver needs.

        The text is in the provider's own format, ready to paste.
        """
        ...
