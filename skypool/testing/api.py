"""The API of the fake cloud: the calls that its drivers make. A test can make each call fail.

A driver uses one `Api` object as if it were the client library of a cloud provider. The calls change the stored state
of the fake cloud.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from skypool.drivers import tags
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    NoAnswer,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimitError,
)
from skypool.model import Order
from skypool.testing import hypervisor, machine
from skypool.testing.state import Overtaken, State
from skypool.testing.world import Flaw, Machine, Stock, Thing, When, World

T = TypeVar("T")
Place = tuple[str, str, str]
_NOWHERE: Place = ("", "", "")

_SAYS: dict[type[ProviderError], tuple[str, str, str]] = {
    CredentialsError: ("InvalidKey", "the key is not known", "set $SKYPOOL_FAKE_KEY, or FakeCloud(key=…)"),
    AccessError: ("Forbidden", "this account may not do that", "ask the account's owner for the permission"),
    CapacityError: ("OutOfStock", "there are none left", "try another zone or type"),
    QuotaError: ("QuotaExceeded", "the account's limit is reached", "ask for a higher one, or end some machines"),
    RateLimitError: ("SlowDown", "too many requests", "wait, and ask again"),
    FundsError: ("NoFunds", "the account has no money left", "add some"),
    OfferGone: ("OfferTaken", "another customer took the offer", "list the offers again"),
    ProviderError: ("InternalError", "the fake cloud has an internal error", "try again"),
}


def refusal(kind: type[ProviderError], what: str, provider: str, text: str | None = None) -> ProviderError:
    """Return the error for a request that the fake cloud refuses. It carries an error code, a text and advice.

    The caller raises the error. Its code and advice follow from the class. A class without an entry of its own in
    `_SAYS` gets those of its nearest base class.

    Args:
        kind: the class of the error.
        what: the refused action, to follow "refused to" in the message.
        provider: the driver's name.
        text: the cloud's own explanation; None for the usual one of this class.
    """
    code, usual, advice = next(_SAYS[each] for each in kind.__mro__ if each in _SAYS)
    text = usual if text is None else text
    return kind(f"{provider} refused to {what}: {text} ({code}); {advice}", provider=provider, code=code, text=text)


class Api:
    """A client's connection to a fake cloud.

    Every method raises the failure that a test prepared for its call. Every method raises CredentialsError if the key
    is wrong, and NoAnswer if the test let the reply be lost.

    Args:
        state: the stored state of the cloud.
        provider: the driver's name, for error messages.
        key: the client's API key.
    """

    def __init__(self, state: State, provider: str, key: str) -> None:
        self._state = state
        self._provider = provider
        self._key = key

    # --- what can be asked -----------------------------------------------------------------------------------

    def account(self) -> dict[str, int]:
        """Return the account's limits: the maximum number of live machines for each quota. Empty if no limit is set."""
        return self._call("account", lambda world: dict(world.limits))

    def stock(self) -> list[tuple[Stock, bool]]:
        """Return everything that the cloud sells, each with True if it is in stock now and False if it is sold out."""
        return self._call("stock", lambda world: [(each, _left(world, each) > 0) for each in world.stock])

    def create(
        self, stock: Stock, order: Order, nodes: Sequence[int], token: str, said: Mapping[str, str] | None = None
    ) -> list[Machine]:
        """Make one machine, or all hosts of one slice (several hosts that are sold together), and return them.

        The call is idempotent: if the token was used before, nothing is made, and the machines of that token are
        returned. Machines may still be booting when this returns.

        Args:
            stock: what to buy.
            order: the order; its pool, its lease and its lifetime are used.
            nodes: the number of the pool's node that each machine becomes. One machine is made for each.
            token: the idempotency token.
            said: tags that the client writes on the machines itself; None for none.

        Raises:
            CapacityError: it is out of stock.
            QuotaError: the account's limit is reached.
            ProviderError: a machine of this token has ended already.
        """

        def made(world: World) -> list[Machine]:
            if there := [each for each in world.machines.values() if each.token == token and each.tagged]:
                if not all(each.lives for each in there):
                    self._refuse(ProviderError, "create a machine", f"the machine of token {token} has ended")
                return there
            return self._made(world, stock, order, nodes, token, dict(said or {}))

        new = self._call("create", made, place=stock.place, pool=order.pool, node=nodes[0], token=token)
        self._look_after(new)
        return new

    def describe(self, pool: str | None) -> list[Machine]:
        """Return the live machines of this user that are found by their tags.

        Args:
            pool: only the machines of this pool that were rented from this host; None for all pools, from any host.
        """
        return self._call("describe", lambda world: _tagged(world.alive(), pool), pool=pool)

    def terminate(self, ids: Sequence[str]) -> None:
        """Ask the cloud to end machines, each together with all hosts of its slice.

        The machines have ended when this returns, except for those that a test made ignore such requests: these, with
        their slice, stay in the state "ending". Ids of unknown or ended machines are ignored.
        """

        def gone(world: World) -> None:
            wanted = set(ids)
            asked = {each.slice or each.id: each for each in world.alive() if each.id in wanted}
            for one in asked.values():
                hosts = world.together(one)
                stubborn = any(each.undying != 0 for each in hosts)
                for each in hosts:
                    if not stubborn:
                        world.end(each)
                        continue
                    each.state = "ending"
                    each.undying = each.undying - 1 if each.undying else each.undying

        self._call("delete", gone, ids=list(ids))

    def tag(self, pool: str, until: datetime) -> None:
        """Set the time until which a pool needs its machines, key pairs and security groups.

        Only those of this user that were made from this host are changed.

        Args:
            pool: the pool's name. One without resources is accepted, without effect.
            until: the new time.
        """

        def tagged(world: World) -> None:
            for each in [*_tagged(world.alive(), pool), *_tagged(world.things.values(), pool)]:
                each.until = until

        self._call("tag", tagged, pool=pool)

    def make(self, kind: str, pool: str, until: datetime | None) -> None:
        """Make a key pair or security group for a pool. Does nothing if it exists.

        Args:
            kind: "key-pair" or "security-group".
            pool: the pool's name.
            until: the time until which the pool needs it; None for no such tag.
        """

        def made(world: World) -> None:
            name = f"skypool-{pool}"
            world.things.setdefault((kind, name), Thing(kind, name, pool, until))

        self._call("make", made, kind=kind, pool=pool)

    def things(self, pool: str | None) -> list[Thing]:
        """Return the key pairs and security groups of this user.

        Args:
            pool: only those of this pool that were made from this host; None for all pools, from any host.
        """
        return self._call("things", lambda world: _tagged(world.things.values(), pool), pool=pool)

    def remove(self, kind: str, name: str) -> None:
        """Remove a key pair or a security group. Does nothing if it does not exist.

        Args:
            kind: "key-pair" or "security-group".
            name: the id of the key pair or security group.

        Raises:
            ProviderError: it is a security group, and a live machine of its pool and owner uses it.
        """

        def removed(world: World) -> None:
            thing = world.things.get((kind, name))
            there = [each for each in world.alive() if thing and each.pool == thing.pool]
            users = [each.id for each in there if thing and each.owner == thing.owner]
            if thing and users and kind == "security-group":
                text = f"{', '.join(users)} use it"
                words = f"{self._provider} refused to remove {kind} {name}: {text} (InUse); end these machines first"
                raise ProviderError(words, provider=self._provider, code="InUse", text=text)
            world.things.pop((kind, name), None)

        self._call("remove", removed, kind=kind, name=name)

    # --- what happens then -----------------------------------------------------------------------------------

    def _made(
        self, world: World, stock: Stock, order: Order, nodes: Sequence[int], token: str, said: dict[str, str]
    ) -> list[Machine]:
        """Make one machine, or all hosts of one slice, and return them. Nothing is made if this raises.

        Args:
            world: the state of the cloud. The new machines are added to it.
            stock: what to buy.
            order: the pool, its lease and its lifetime.
            nodes: the node of each machine; one machine is made for each.
            token: the idempotency token.
            said: tags that the client writes on the machines itself.

        Raises:
            CapacityError: it is out of stock.
            QuotaError: the account's limit would be exceeded.
        """
        if world.limits or world.capacity or stock.capacity is not None:
            world.settle()  # machines that are due to end make room
        if _left(world, stock) <= 0:
            self._refuse(CapacityError, "create a machine", f"there are no {stock.instance_type} left in {stock.zone}")
        if (limit := world.limits.get(stock.quota)) is not None:
            there = sum(each.stock.quota == stock.quota for each in world.alive())
            if there + stock.size > limit:
                self._refuse(QuotaError, "create a machine", f"the account's limit {stock.quota} is {limit}")
        name = f"s-{world.made + 1:04d}" if stock.size > 1 else ""
        made = [self._machine(world, stock, order, node, token, name, said) for node in nodes]
        world.settle(made)
        return made

    def _machine(
        self, world: World, stock: Stock, order: Order, node: int, token: str, slice_: str, said: dict[str, str]
    ) -> Machine:
        """Add one machine to the state of the cloud, make its folder, and return it.

        The machine is still "starting". It gets the next prepared defect, if there is one. Stock and limits are not
        checked.

        Args:
            world: the state of the cloud.
            stock: what to buy.
            order: the pool, its lease and its lifetime.
            node: the number of the pool's node that the machine becomes.
            token: the idempotency token.
            slice_: the name of the slice that the machine is a host of; "" for none.
            said: tags that the client writes on the machine itself.
        """
        flaw = world.flaws.pop(0) if world.flaws else Flaw()
        world.made += 1
        name = f"i-{world.made:04d}"
        lasts = min(order.lease, order.lifetime or order.lease)
        new = Machine(
            id=name,
            pool=order.pool,
            node=node,
            token=token,
            stock=stock,
            until=order.until,
            born=world.now,
            lease=order.lease,
            lifetime=order.lifetime,
            folder=f"{world.folder}/machines/{name}",
            boots_at=None if flaw.boots is None else world.now + flaw.boots,
            deaf=flaw.deaf,
            has=flaw.has if flaw.swapped else stock.has,
            granted=world.now + lasts,
            undying=flaw.undying,
            slice=slice_,
            tags=said,
        )
        world.machines[name] = new
        usd = stock.usd_per_hour / stock.size
        world.log("made", new, new.born, usd_per_hour=usd, least=stock.least_billed, billing=world.billing)
        machine.create(new.folder)
        return new

    def _look_after(self, new: Sequence[Machine]) -> None:
        """Start the background process that ends the cloud's machines on time, unless it runs already.

        Does nothing if all new machines have ended, or if machines exist by name only (they are no processes).
        """

        def looked_after(world: World) -> None:
            if any(each.lives for each in new) and world.real and not hypervisor.busy(self._state.folder):
                machine.start_hypervisor(str(self._state.folder))

        self._do(looked_after, settle=False)

    def _refuse(self, kind: type[ProviderError], what: str, text: str) -> NoReturn:
        """Raise the error with which the cloud refuses a request. Never returns.

        Args:
            kind: the class of the error.
            what: the refused action, to follow "refused to" in the message.
            text: the cloud's own explanation.
        """
        raise refusal(kind, what, self._provider, text=text)

    def _call(self, call: str, effect: Callable[[World], T], *, place: Place = _NOWHERE, **about: Any) -> T:
        """Perform one call of the API with the failures that a test prepared for it, and return the result of `effect`.

        The call is counted and written to the journal first, even if it then fails. Then come, in this order: a
        prepared kill of this process, a delay, the check of the key, and a prepared error. Then `effect` runs. After
        it, a prepared kill or a lost reply follows.

        Args:
            call: the name of the call, one of `control.CALLS`.
            effect: changes the state of the cloud and returns the result of the call.
            place: instance type, zone and market. Prepared failures may be limited to some of them.
            about: arguments of the call, for the journal.

        Raises:
            CredentialsError: the client's key is wrong.
            NoAnswer: a test let the reply be lost.
            Exception: another error that a test prepared, or an error of `effect`.
        """

        def before(world: World) -> tuple[int, float, Any, bool]:
            world.calls += 1
            self._tell(world.calls, call, **about)
            self._die_if_told(world, world.calls, "before")
            delay, error = _spent(world, call, place, "before")
            return world.calls, delay, error, not world.key or world.key == self._key

        number, delay, error, known = self._do(before, settle=False)
        time.sleep(delay)
        if not known:
            raise refusal(CredentialsError, call, self._provider)
        self._raise(error, call)

        def during(world: World) -> tuple[T, Any]:
            try:
                result = effect(world)
            finally:  # also after a refusal
                self._die_if_told(world, number, "after")
            return result, _spent(world, call, place, "after")[1]

        result, error = self._do(during, settle=call != "create")
        self._raise(error, call)
        return result

    def _do(self, work: Callable[[World], T], *, settle: bool) -> T:
        """Run a function on the locked state of the cloud, and return its result. Its changes are stored.

        The function is run again if this process was stopped meanwhile (as by SIGSTOP) and other processes went on
        without it. Its first changes are lost then.

        Args:
            work: the function.
            settle: first apply everything that is due by the cloud's clock, such as ends of leases.
        """
        while True:
            try:
                with self._state.open(settle) as world:
                    return work(world)
            except Overtaken:
                continue

    def _raise(self, error: Exception | type[Exception] | None, call: str) -> None:
        """Raise an error that a test prepared, in the form in which a driver would see it. Does nothing for None.

        A class of ProviderError is raised as an error with fitting texts. A ConnectionError object becomes NoAnswer.
        Any other error is raised as it is.

        Args:
            error: an exception or a class of exceptions; None for no error.
            call: the name of the call, for the message.
        """
        if isinstance(error, type) and issubclass(error, ProviderError):
            raise refusal(error, call, self._provider)
        if isinstance(error, ConnectionError):
            raise NoAnswer(
                f"{self._provider} did not answer {call}: {error}; the call may have taken effect, so repeat it",
                provider=self._provider,
                text=str(error),
            ) from error
        if error is not None:
            raise error

    def _die_if_told(self, world: World, number: int, when: When) -> None:
        """Kill this process with SIGKILL if a test has prepared that for this call; otherwise do nothing.

        Args:
            world: the state of the cloud. It is stored before the process dies.
            number: the number of the call.
            when: "before" or "after" the call takes effect.
        """
        if (number, when) in world.kills:
            del world.kills[number, when]
            self._state.keep(world)
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, number: int, call: str, **about: Any) -> None:
        """Append a call to the cloud's journal, a file with one JSON object on each line.

        The line has the call's number, its name, the id of this process, and the arguments in `about`.
        """
        line = json.dumps({"number": number, "call": call, "pid": os.getpid(), **about})
        with open(self._state.folder / "journal", "a") as journal:
            journal.write(f"{line}\n")


def _left(world: World, stock: Stock) -> float:
    """Return how many more machines (or slices) of a stock can be made now.

    Returns infinity if there is no limit. Returns 0 if it is sold out, or a negative number if a test lowered the limit
    below the number of live machines.
    """
    capacity = world.capacity.get(stock.place, stock.capacity)
    if capacity is None:
        return float("inf")
    return capacity - len({each.slice or each.id for each in world.alive() if each.stock.place == stock.place})


def _tagged(all_: Any, pool: str | None) -> list[Any]:
    """Return those machines, key pairs or security groups whose tags say that they belong to this user.

    Machines that have no tags are left out. The order is kept.

    Args:
        all_: what to choose from.
        pool: only those of the pool of this name, made from this host; None means all pools of this user, from any
            host.
    """
    mine = [each for each in all_ if tags.ours({tags.POOL: each.pool, tags.OWNER: each.owner}, pool)]
    return [each for each in mine if getattr(each, "tagged", True)]


def _spent(world: World, call: str, place: Place, when: When) -> tuple[float, Exception | type[Exception] | None]:
    """Find the prepared failures that match a call, count the call as one use of each, and return their effect.

    The failures are rules in `world.rules`. A rule that is used up is removed from there.

    Returns:
        (seconds, error): the delay of the call, and the error to raise, or None. The delays of all matching rules are
        added. Only the first matching rule with an error is applied; later ones with an error stay for later calls.
    """
    delay = 0.0
    error = None
    for each in list(world.rules):
        here = all(a in ("", b) for a, b in zip(each.place, place, strict=True))
        if each.call not in ("", call) or each.when != when or not here or (each.error and error):
            continue
        delay = delay + each.delay
        error = each.error or error
        if each.times is not None:
            each.times -= 1
            if each.times <= 0:
                world.rules.remove(each)
    return delay, error
