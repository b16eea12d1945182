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
        ends_itself: whether a machine ends itself, and its cost, when its lease is over. An offer may differ.
        private_network: whether machines launched together reach each other. Pools that need it get no others.
        spot: whether it has a spot market.
        trust: trust in a machine that is found without its offer. None takes that of its offers.
        billed_from: the moment from which the provider bills a machine: "create" is the request to make it, "running"
            is when it runs. One that never runs costs nothing then. See also `Instance.billed_from`.
        lists_all: whether each client of this user sees all of its machines there. False where a client sees only
            those of its own host or folder: not seeing one then proves nothing.
    """

    ends_itself: bool = True
    private_network: bool = False
    spot: bool = False
    trust: Trust | None = None
    billed_from: Literal["create", "running"] = "create"
    lists_all: bool = True


def abilities(driver: Driver) -> Abilities:
    """Return the abilities that a driver declares, or the default ones."""
    said: Abilities = getattr(driver, "abilities", Abilities())
    return said


def ends_itself(driver: Driver, offer: Offer) -> bool:
    """Return True if a machine rented on an offer ends itself, and its cost, when its lease is over."""
    return abilities(driver).ends_itself if offer.ends_itself is None else offer.ends_itself


def terminate(driver: Driver, instances: Sequence[Instance]) -> None:
    """Terminate instances. Any error of the driver other than StillRunning means: no instance is proved ended.

    Raises:
        StillRunning: naming those whose end could not be proved.
    """
    try:
        driver.terminate(instances)
    except StillRunning:
        raise
    except Exception as e:
        why = str(e) or type(e).__name__
        raise not_ended({f"{each.id} at {driver.name}": why for each in instances}, instances) from e


def undo(terminate: Callable[[Sequence[Instance]], None], order: Order, instances: Sequence[Instance]) -> None:
    """End instances that a launch made and does not return, and report each end to `order.undone`, which counts costs.

    Args:
        terminate: the driver's own.

    Raises:
        StillRunning: naming those whose end could not be proved. The ends of the others were reported.
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
    """A list of what a provider, or several places of it, answered, with the names of what it lacks.

    A driver returns its offers so if some of them may be missing. Such an answer is not kept for the next question.

    Attributes:
        lacks: what may be missing, such as "offers" or "prices"; empty for a complete answer. It begins with what the
            given `answers` lack, if they are such a list themselves.
    """

    __slots__ = ("lacks",)

    def __init__(self, answers: Iterable[T] = (), lacks: Iterable[str] = ()) -> None:
        super().__init__(answers)
        self.lacks: tuple[str, ...] = (*(answers.lacks if isinstance(answers, Answers) else ()), *lacks)


def lacks(what: str, why: Exception) -> str:
    """Warn that an answer, such as a driver's offers, lacks something.

    Returns:
        `what`, for `Answers.lacks`: an answer is incomplete only if it says so itself.
    """
    warnings.warn(f"{what} may be missing: {why}", RuntimeWarning, stacklevel=3)
    return what


@runtime_checkable
class Driver(Protocol):
    """A provider with the user's settings. Constructing it is free: no I/O, no SDK import.

    Every verb may block and is called from a worker thread, several at once.

    A driver may say with `offers_keep: ClassVar[float]` for how many seconds its offers hold; without it they are
    asked for each time. What is kept goes by its `repr` and the need, so secrets must have `repr=False`.
    """

    name: ClassVar[str]

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return everything sold now that could serve; quick.

        What cannot be told is left out. The offers are `Answers` then, whose `lacks` names it; the function `lacks`
        warns the user of it. Anything else than `Answers` counts as complete, and may be kept for the next question.

        Raises:
            ProviderError: what the provider said, translated.
        """
        ...

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent `order.count` machines. Returns at once; idempotent by `order.token`, also after a lost reply.

        Where one launch is several creates, `order.asking` is called before each and `order.made` after it; what a
        launch ends again, it ends with `undo`. So each machine is charged from its own create, also one that is undone.

        Where `offer.hosts` of them are a slice, `order.nodes` are those of whole slices, one after the other; all hosts
        of a slice come, in order, with the same `Instance.slice`, or none.

        With `order.need.private_network` all or none, in one place. Otherwise fewer will do where no more are to be
        had, at least one: those of the first nodes.

        Raises:
            CapacityError, QuotaError, CredentialsError, …: nothing was rented; so failover knows where to go next.
            RateLimitError, NoAnswer: it is asked again, with the same token, and at last passed by.
            SkypoolError: any other; nothing was rented, and no other offer will do either.
        """
        ...

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Every instance that this user's pools have here now, found by tag and never by a ledger.

        Raises:
            ProviderError: a place could not be asked, as what it has would be missing; an ErrorGroup of several.
        """
        ...

    def access(self, instance: Instance) -> Access:
        """How to reach an instance, once it is `running`."""
        ...

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End these instances and come back when the provider says they are ended.

        A slice ends as a whole, whichever of its hosts is named.

        Quiet for those that are gone already, loud for the rest.

        Raises:
            StillRunning: naming those whose end could not be proved. After any other error that is all of them.
        """
        ...


@runtime_checkable
class Renews(Protocol):
    """A driver that can put off what the tags of its machines say."""

    def renew(self, pool: str, until: datetime) -> None:
        """Let everything of this pool say that it is needed until then. Called a few times in a lease.

        Raises:
            ProviderError: what was not told so, and why; an ErrorGroup of several. It is asked again next time.
        """
        ...


@runtime_checkable
class Learns(Protocol):
    """A driver whose offers are single machines of strangers, and which leaves out those that failed."""

    def rejected(self, instance: Instance, why: Exception) -> None:
        """Hear that an instance was given up before it was ready, and why; the driver knows whose fault that is."""
        ...


@runtime_checkable
class Tidies(Protocol):
    """A driver whose pools make more than instances."""

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Everything but instances that this user's pools have here now, found by tag (or label, or name)."""
        ...

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove them, once no instance uses them; quiet for what is gone already.

        Raises:
            ProviderError: what could not be removed, and why; an ErrorGroup of several.
        """
        ...


@runtime_checkable
class Checks(Protocol):
    """A driver that can say beforehand, at no cost, whether it could work."""

    def check(self) -> Iterable[Finding]:
        """Credentials, permissions (by dry run), quotas, images, the clock: one finding each; never raises for one."""
        ...


@runtime_checkable
class Policed(Protocol):
    """A driver that knows the least permissions it needs."""

    def policy(self) -> str:
        """As the provider takes it, ready to paste."""
        ...
