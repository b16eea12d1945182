"""Protocols that a driver implements.

`Driver` has the methods that every driver needs. `Renews`, `Learns`, `Tidies`, `Checks`, `Proves`, `Bills` and
`Policed` are optional: a driver implements one by having its methods. `Abilities` says what machines of a provider can
do. `Answers`, `lacks` and `undo` are helpers for authors of drivers.

An instance is a rented machine as its provider reports it. A slice is several machines (its hosts) that are rented
together. A lease is how long a machine lives on without hearing from its client.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from skypool import tracebacks
from skypool.errors import CredentialsError, ProviderError, StillRunning, not_ended
from skypool.model import Access, Bill, Finding, Instance, Leftover, Need, Offer, Order, Trust

T = TypeVar("T")
_DESCRIPTORS = 10.0
"""Seconds to wait for a file descriptor when machines must end."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a provider and of its machines, which a driver declares as its class attribute `abilities`.

    A driver without that attribute has the default values.

    Attributes:
        ends_itself: True if a machine ends itself when its lease is over, and is then no longer billed.
            `Offer.ends_itself` overrides this value for one offer.
        private_network: True if machines of one launch can reach each other over a private network. Pools with
            `private_network=True` use no provider for which this value is False.
        spot: True if the provider sells spot machines, which it may take back at any time.
        trust: "full" if results of this provider's machines may be unpickled on the client, which can run code there.
            "data" if they are read as plain data only. An offer has a trust of its own, so this value is used only for
            a machine that was found by its tags, whose offer is unknown. None means "full" if `offers` returns offers
            and all have the trust "full", and otherwise "data".
        billed_from: the event from which the provider bills a machine: "create" (the request that creates it) or
            "running". With "running", a machine that never runs costs nothing. See also `Instance.billed_from`.
        lists_all: True if `instances` returns all of the user's machines at this provider, whichever client calls it.
            False if it returns only those of the client's own host or folder. A machine that is missing from the list
            may then still run.
        network_advice: a sentence, without a full stop, that skypool adds to its NetworkError if machines of one pool
            cannot reach each other. It says which port or rule the user must open. "" for general advice.
    """

    ends_itself: bool = True
    private_network: bool = False
    spot: bool = False
    trust: Trust | None = None
    billed_from: Literal["create", "running"] = "create"
    lists_all: bool = True
    network_advice: str = ""


def abilities(driver: Driver) -> Abilities:
    """Return the abilities that a driver declares, or the default `Abilities()` if it declares none."""
    said: Abilities = getattr(driver, "abilities", Abilities())
    return said


def ends_itself(driver: Driver, offer: Offer) -> bool:
    """Return True if a machine of this offer ends itself, and is no longer billed, when its lease is over.

    If `offer.ends_itself` is None, the driver's `abilities` decide.
    """
    return abilities(driver).ends_itself if offer.ends_itself is None else offer.ends_itself


def admitted(driver: Driver, instance: Instance) -> Access:
    """Have a driver let the present address of this computer in, and return how to connect to an instance.

    If the driver cannot do that, the user is told: the address may be let in already.

    Raises:
        CredentialsError: the account is refused.
        SkypoolError: the instance cannot be reached, as `access` of the driver raises it.
    """
    if isinstance(driver, Admits):
        try:
            driver.admit(instance)
        except CredentialsError:
            raise
        except ProviderError as e:
            tracebacks.warn(f"machine {instance.id} may not be reached from here: {e}")
    return driver.access(instance)


def terminate(driver: Driver, instances: Sequence[Instance]) -> None:
    """Terminate instances with the driver's method `terminate`, and raise `StillRunning` for every kind of failure.

    Blocks until the provider says that the instances have ended. Any other error of the driver becomes the cause of a
    StillRunning that names all the given instances. While this process has no file descriptor left, the method is
    called again for 10 s.

    Raises:
        StillRunning: names the instances whose end could not be proved. They may still run and cost money.
    """
    try:
        _with_descriptors(partial(driver.terminate, instances))
    except StillRunning:
        raise
    except Exception as e:
        why = str(e) or type(e).__name__
        raise not_ended({f"{each.id} at {driver.name}": why for each in instances}, instances) from e


def _with_descriptors(do: Callable[[], None]) -> None:
    """Call `do`, and again while the process has no file descriptor left."""
    try:
        do()
    except OSError as e:
        if not _is_exhausted(e):
            raise
        from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed  # a pool has imported it

        stop, wait = stop_after_delay(_DESCRIPTORS), wait_fixed(0.1)
        Retrying(retry=retry_if_exception(_is_exhausted), stop=stop, wait=wait, reraise=True)(do)


def _is_exhausted(error: BaseException) -> bool:
    """Return True for the error of a process that has no file descriptor left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def undo(terminate: Callable[[Sequence[Instance]], None], order: Order, instances: Sequence[Instance]) -> None:
    """Terminate instances that a failing launch made, and report the ended instances to `order.undone`.

    The pool needs this report to compute what the instances cost.

    Args:
        terminate: the driver's method that terminates instances.
        order: order that the instances belong to.
        instances: instances that the launch made and does not return. May be empty.

    Raises:
        StillRunning: names the instances whose end could not be proved. The other instances are reported as ended
            before this error is raised. If the error names no instance, none is reported.
        Exception: any other error of `terminate`, unchanged. No instance is reported.
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
    """A list that may be incomplete, such as a provider's offers, with the names of what may be missing.

    A driver's method `offers` returns `Answers` if some offers or prices could not be read. skypool does not cache an
    incomplete list.

    Args:
        answers: the elements of the list. If they are themselves `Answers`, the new list also gets their `lacks`.
        lacks: further names of what may be missing.

    Attributes:
        lacks: names of what may be missing, such as "offers" or "prices"; () if the list is complete.
    """

    __slots__ = ("lacks",)

    def __init__(self, answers: Iterable[T] = (), lacks: Iterable[str] = ()) -> None:
        super().__init__(answers)
        self.lacks: tuple[str, ...] = (*(answers.lacks if isinstance(answers, Answers) else ()), *lacks)


def lacks(what: str, why: Exception) -> str:
    """Warn the user that a list is incomplete, and return `what` unchanged, to be put into `Answers.lacks`.

    If skypool called the driver for a pool, the warning is an event `Notice` of the pool. Otherwise it is a
    RuntimeWarning.

    Args:
        what: name of what may be missing, such as "prices". The warning shows it.
        why: the error that prevented reading. The warning shows its text.
    """
    tracebacks.warn(f"{what} may be missing: {why}")
    return what


@runtime_checkable
class Driver(Protocol):
    """The methods that every driver has. A driver object stands for one provider and the user's settings for it.

    Constructing a driver must not do any I/O and must not import the provider's SDK. Every method may block. skypool
    calls the methods from worker threads, several at the same time.

    A driver may have the class attribute `offers_keep: ClassVar[float]`, the number of seconds for which its offers are
    cached. Without it, skypool requests the offers each time. The cache key is computed from the driver's `repr` and
    the need, so fields with secrets must have `repr=False`.

    Attributes:
        name: name of the driver, such as "aws": lower-case letters, digits and hyphens.
    """

    name: ClassVar[str]

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return all offers that the provider sells now and that could meet the need.

        skypool itself removes offers that do not meet the need, so a driver need not check every requirement. The
        method should be quick: skypool waits 30 s at most.

        If some offers cannot be read, leave them out, warn the user with the function `lacks`, and return `Answers`
        whose attribute `lacks` names what may be missing. Any other list, also an empty one, counts as complete, and
        may be cached.

        Args:
            need: requirements of each machine. Its `max_usd_per_hour` is always None here.

        Raises:
            ProviderError: the provider refused the request or failed. The driver translates the provider's error to one
                of skypool's subclasses of ProviderError.
        """
        ...

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent `order.count` machines and return them at once, without waiting until they run.

        A launch with the same `order.token` as an earlier launch must not create further machines, even if the reply to
        the first launch was lost. It returns the machines that already exist, and creates only missing ones.

        If the launch sends several create requests, call `order.asking` before each request and `order.made` after it.
        Use `undo` to terminate machines that the launch made and does not return. These calls let skypool count the
        cost of each machine from its own create request on, also if the machine was terminated again.

        If `offer.hosts` is greater than 1, the offer is a slice. `order.nodes` then lists the hosts of whole slices,
        one slice after the other. Return all hosts of a slice, in order and with the same `Instance.slice`, or none of
        them.

        If `order.need.private_network` is True, rent all machines in one place, or none. Otherwise fewer machines may
        be returned if no more are in stock: at least one, and those for the first nodes of `order.nodes`.

        Args:
            offer: the offer to rent on, as `offers` returned it.
            order: the nodes, the token, the requirements and the time limits of the machines.

        Returns:
            The machines, with `Instance.node` from `order.nodes`, and `Instance.offer` and `Instance.token` set.

        Raises:
            CapacityError, OfferGone, QuotaError, AccessError, CredentialsError, FundsError: nothing was rented. skypool
                tries another offer. The class of the error decides which of the other offers it skips.
            RateLimitError, NoAnswer: skypool repeats the launch with the same token. If that fails, too, it tries
                another offer. After NoAnswer, machines may have been made. An ErrorGroup counts as NoAnswer.
            StillRunning: machines that the launch terminated again may still run. No other offer is tried.
            SkypoolError: nothing was rented, for a reason that is not listed here. No other offer is tried.
            Exception: any error that is not a SkypoolError counts as a lost reply. skypool looks for machines that the
                launch made, and terminates them. No other offer is tried.
        """
        ...

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return all instances of this user's pools at this provider, in no particular order.

        Find the instances by their tags at the provider, never from skypool's own records. Instances that have ended
        may be left out; if they are returned, their state must be "ended".

        Read the provider's list to its end, with all its pages. An instance that is missing counts as ended, so raise
        an error if the list may be incomplete. `Rest.ask_all` and `pages.whole_list` do both.

        Args:
            pool: return only the instances of the pool with this name; None for all pools.

        Raises:
            ProviderError: the provider or one of its regions could not be asked, or the list may be incomplete.
            ErrorGroup: several regions could not be asked, for different reasons.
        """
        ...

    def access(self, instance: Instance) -> Access:
        """Return how to connect to an instance, and which folders to use there.

        skypool calls this method only if the instance's state is "running". The boot of the machine may not have
        finished yet, so the method should not connect to the machine.

        Make nothing here that costs money, such as an address: `launch` does that, after the pool has written the order
        to its ledger.

        Raises:
            ProviderError: the provider does not tell the address, or could not be asked.
        """
        ...

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Terminate instances, and return when the provider says that all of them have ended.

        If an instance is a host of a slice, the whole slice ends. Instances that no longer exist are ignored. An
        instance that the provider's list lacks counts as ended only if all pages of the list were read.

        Raises:
            StillRunning: names the instances whose end could not be proved. The other instances have ended. After any
                other error, skypool treats all the given instances as possibly still running.
        """
        ...


@runtime_checkable
class Renews(Protocol):
    """An optional protocol of a driver: the driver can postpone the expiry time in the tags of a pool's machines."""

    def renew(self, pool: str, until: datetime) -> None:
        """Write a new expiry time into the tags of every machine and every other resource of a pool.

        After the expiry time, a resource counts as no longer needed. While the pool runs, skypool calls this method
        several times in each lease.

        Args:
            pool: name of the pool.
            until: the new expiry time, with a time zone.

        Raises:
            ProviderError: a tag could not be changed. skypool tells the user, and calls the method again later.
            ErrorGroup: several tags could not be changed, for different reasons.
        """
        ...


@runtime_checkable
class Admits(Protocol):
    """An optional protocol of a driver whose machines are reached from certain addresses only, such as the launch's."""

    def admit(self, instance: Instance) -> None:
        """Let the present address of this computer reach an instance, if it may not do so already.

        skypool calls this before `access` when it looks in at an instance that another process, or this computer at
        another address, has launched. What is made for it costs nothing, and ends with the pool. An address that the
        settings of the driver leave out is not admitted.

        Raises:
            ProviderError: the present address is not known, or the provider did not admit it.
        """
        ...


@runtime_checkable
class Learns(Protocol):
    """An optional protocol of a driver: skypool reports failed machines, and the driver can stop offering them."""

    def rejected(self, instance: Instance, why: Exception) -> None:
        """Record that a new instance failed, so that `offers` can leave out the instance's machine later.

        Args:
            instance: the instance that was given up.
            why: the error for which the pool gave it up. The driver decides from the error if the machine is to blame.
                If not, nothing needs to be recorded.
        """
        ...


@runtime_checkable
class Tidies(Protocol):
    """An optional protocol of a driver that creates resources other than instances, such as disks or key pairs.

    When no instance uses these resources any more, skypool lists and removes them with the methods of this protocol.
    """

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return all resources other than instances that this user's pools have at this provider.

        Find the resources by their tag, label or name at the provider, never from skypool's own records.

        Args:
            pool: return only the resources of the pool with this name; None for all pools.

        Raises:
            ProviderError: the provider or one of its regions could not be asked, or a list may be incomplete.
            ErrorGroup: several regions could not be asked, for different reasons.
        """
        ...

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove these resources. The caller ensures that no instance uses them any more.

        Resources that no longer exist are ignored.

        Raises:
            ProviderError: a resource could not be removed.
            ErrorGroup: several resources could not be removed, for different reasons.
        """
        ...


@runtime_checkable
class Checks(Protocol):
    """An optional protocol of a driver: the driver can check an account with requests that only read.

    The commands `skypool doctor` and `skypool prove --level read` show the results.
    """

    def check(self) -> Iterable[Finding]:
        """Check credentials, permissions, quotas, images, prices and the clock, as far as the provider allows.

        Nothing is rented or changed. Test permissions by a dry run, if the provider has one. Check every region that
        the settings allow, and say each fact once: one finding for an image in all regions, not one for each region.

        Returns:
            One `Finding` for each check. A check that raises gives a failed finding, with advice for the user; this
            method itself does not raise.
        """
        ...


@runtime_checkable
class Proves(Protocol):
    """An optional protocol of a driver: the driver can send requests for new machines that the provider must refuse.

    The command `skypool prove --level write` shows the results. Nothing is rented, and nothing is paid for.
    """

    def prove_creates(self) -> Iterable[Finding]:
        """Send create requests that the provider must refuse, and compare each refusal with the expected one.

        Send the driver's real requests, each with one part that is impossible, such as an instance type that does not
        exist. Use the provider's dry run if there is one. If a machine is made all the same, terminate it, and return a
        failed finding that names it.

        Returns:
            One `Finding` for each request. It is good if the provider refused for the expected reason, and the driver
            translated the refusal to the expected class of error. This method itself does not raise.
        """
        ...


@runtime_checkable
class Bills(Protocol):
    """An optional protocol of a driver: the provider's API tells what machines have cost.

    The command `skypool prove` compares these costs with the receipt, skypool's own list of machines and their costs.
    """

    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        """Return the sum that the provider bills for instances.

        Args:
            instances: ids of the instances. They have ended.
            since: a time before the first instance was rented, with a time zone.
            until: a time after the last instance had ended, with a time zone.

        Raises:
            ProviderError: the provider refused the request or did not answer.
        """
        ...


@runtime_checkable
class Policed(Protocol):
    """An optional protocol of a driver: the driver knows the smallest set of permissions that it needs."""

    def policy(self) -> str:
        """Return the smallest set of permissions that the driver needs, as text in the provider's own format.

        For AWS, for example, the format is JSON. The user can paste the text unchanged into the provider's console. The
        command `skypool doctor --policy NAME` prints it.
        """
        ...
