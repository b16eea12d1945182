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
from functools import partial
from typing import Any, NoReturn, TypeVar

from skypool.drivers import tags
from skypool.drivers.pages import WholeList, incomplete, whole_list
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
from skypool.testing import bills, hypervisor, machine
from skypool.testing.cloud_state import Flaw, Machine, Stock, Thing, When, World
from skypool.testing.state_store import Overtaken, State

T = TypeVar("T")
Place = tuple[str, str, str]
_NOWHERE: Place = ("", "", "")
BILLED_AFTER = 3600.0
"""Seconds after the end of a machine when its bill is complete. Real clouds take hours or days."""

_SAYS: dict[type[ProviderError], tuple[str, str, str]] = {
    CredentialsError: ("InvalidKey", "the key is not known", "set $SKYPOOL_FAKE_KEY, or pass FakeCloud(key=…)"),
    AccessError: ("Forbidden", "the account lacks the permission", "ask the owner of the account for the permission"),
    CapacityError: ("OutOfStock", "there are no such machines left", "try another zone or instance type"),
    QuotaError: ("QuotaExceeded", "the account's limit is reached", "ask for a higher limit, or end some machines"),
    RateLimitError: ("SlowDown", "too many requests", "wait, and repeat the request"),
    FundsError: ("NoFunds", "the account has no money left", "add money to the account"),
    OfferGone: ("OfferTaken", "another customer took the offer", "list the offers again"),
    ProviderError: ("InternalError", "the fake cloud has an internal error", "try again"),
}


def refusal(kind: type[ProviderError], what: str, provider: str, text: str | None = None) -> ProviderError:
    """Return (not raise) the error for a request that the fake cloud refuses, with a code, a text and advice.

    The class `kind`, or its nearest base class that has an entry in `_SAYS`, determines the code and the advice. `what`
    completes "refused to" in the message, as in "create a machine". `text` is the provider's text; None means the usual
    text of the class.
    """
    code, usual, advice = next(_SAYS[each] for each in kind.__mro__ if each in _SAYS)
    text = usual if text is None else text
    return kind(f"{provider} refused to {what}: {text} ({code}); {advice}", provider=provider, code=code, text=text)


class Api:
    """A client's connection to a fake cloud: each method is one call of the cloud's API.

    Every method raises CredentialsError if the key is wrong, NoAnswer if a test made the reply get lost, and any error
    that a test prepared for the call with `FakeCloudControl.refuse`. A parameter `pool` selects resources of this pool
    that were made from this computer; None selects those of all pools of this user, made from any computer.
    """

    def __init__(self, state: State, provider: str, key: str) -> None:
        self._state = state
        self._provider = provider
        self._key = key

    # --- the calls -------------------------------------------------------------------------------------------

    def account(self) -> dict[str, int]:
        """Return the account's limits: the maximum number of live machines for each quota that has a limit."""
        return self._call("account", lambda world: dict(world.limits))

    def stock(self) -> list[tuple[Stock, bool]]:
        """Return everything that the cloud sells: pairs of a stock, and True if it is not sold out now."""
        return self._call("stock", lambda world: [(each, _left(world, each) > 0) for each in world.stock])

    def drift(self) -> list[tuple[Stock, Stock]]:
        """Return the on-demand stock whose price differs from the published price list: pairs (listed, sold now)."""

        def drifted(world: World) -> list[tuple[Stock, Stock]]:
            listed = {each.place: each for each in world.listed if each.market == "on-demand"}
            pairs = [(listed[each.place], each) for each in world.stock if each.place in listed]
            return [(old, new) for old, new in pairs if old.usd_per_hour != new.usd_per_hour]

        return self._call("prices", drifted)

    def bill(self, ids: Sequence[str]) -> float | None:
        """Return the bill of machines in USD; None until an hour after their last end. Unknown ids cost nothing."""

        def billed(world: World) -> float | None:
            ends = [world.machines[each].ended_at for each in ids if each in world.machines]
            if any(each is None or each + BILLED_AFTER > world.now for each in ends):
                return None
            with open(self._state.folder / "events") as events:
                return world.surcharge * bills.billed(events, ids)

        return self._call("bill", billed, ids=list(ids))

    def create(
        self, stock: Stock, order: Order, nodes: Sequence[int], token: str, said: Mapping[str, str] | None = None
    ) -> list[Machine]:
        """Make one machine, or all hosts of one slice, and return them without waiting for their boot.

        If a call with the same token made machines before, nothing is made, and those machines are returned.

        Args:
            stock: what to buy.
            order: the order; only its `pool`, `until`, `lease` and `lifetime` are used.
            nodes: the numbers of the nodes that the machines become, one machine for each.
            token: the idempotency token.
            said: further tags that the client wants on the machines.

        Raises:
            OfferGone: the cloud does not sell this stock.
            CapacityError: the stock is sold out.
            QuotaError: the machines would exceed the account's limit.
            ProviderError: a machine that was made with this token has ended.
        """

        def made(world: World) -> list[Machine]:
            if there := [each for each in world.machines.values() if each.token == token and each.tagged]:
                if not all(each.lives for each in there):
                    text = f"a machine that was made with the token {token!r} has ended"
                    words = f"{self._provider} refused to create a machine: {text} (InternalError); use a new token"
                    raise ProviderError(words, provider=self._provider, code="InternalError", text=text)
                return there
            return self._made(world, stock, order, nodes, token, dict(said or {}))

        new = self._call("create", made, place=stock.place, pool=order.pool, node=nodes[0], token=token)
        self._look_after(new)
        return new

    def describe(self, pool: str | None, after: str = "") -> tuple[list[Machine], str]:
        """Return one page of the live machines whose tags name this user, oldest first, and a text for the next page.

        Pass this text as `after` to get the next page. It is "" on the last page. `after` is "" for the first page.
        `pool` selects this pool's machines that were made from this computer; None selects those of all pools, made
        from any computer.
        """
        return self._call("describe", lambda world: page_of(world, _tagged(world.alive(), pool), after), pool=pool)

    def machines(self, pool: str | None) -> WholeList[Machine]:
        """Return this user's live machines from all pages. Raise ProviderError if the list may be incomplete.

        `pool` selects this pool's machines that were made from this computer; None selects those of all pools, made
        from any computer.
        """
        what = "the list of machines"
        return whole_list(partial(self.describe, pool), partial(incomplete, self._provider, self._provider, what))

    def terminate(self, ids: Sequence[str]) -> None:
        """End machines, and with each machine of a slice the whole slice. Ids of unknown or ended machines are ignored.

        The machines have ended when this method returns. The exception is a machine that a test made ignore such
        requests: it and all hosts of its slice stay in the state "ending".
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

        Only resources of this user that were made from this computer are changed.
        """

        def tagged(world: World) -> None:
            for each in [*_tagged(world.alive(), pool), *_tagged(world.things.values(), pool)]:
                each.until = until

        self._call("tag", tagged, pool=pool)

    def make(self, kind: str, pool: str, until: datetime | None) -> None:
        """Make a key pair or security group for a pool. Does nothing if the pool has one already.

        `kind` is "key-pair" or "security-group". `until` is the time in its tag; None for no such tag.
        """

        def made(world: World) -> None:
            name = f"skypool-{pool}"
            world.things.setdefault((kind, name), Thing(kind, name, pool, until))

        self._call("make", made, kind=kind, pool=pool)

    def things(self, pool: str | None) -> list[Thing]:
        """Return the key pairs and security groups whose tags name this user.

        `pool` selects this pool's things that were made from this computer; None selects those of all pools, made from
        any computer.
        """
        return self._call("things", lambda world: _tagged(world.things.values(), pool), pool=pool)

    def remove(self, kind: str, name: str) -> None:
        """Remove a key pair or a security group by its kind and id. Does nothing if there is no such resource.

        Raises:
            ProviderError: a live machine uses the security group. Each machine uses the group of its pool that has the
                same owner tag.
        """

        def removed(world: World) -> None:
            thing = world.things.get((kind, name))
            there = [each for each in world.alive() if thing and each.pool == thing.pool]
            users = [each.id for each in there if thing and each.owner == thing.owner]
            if thing and users and kind == "security-group":
                text = f"machines use it: {', '.join(users)}"
                words = f"{self._provider} refused to remove {kind} {name}: {text} (InUse); end these machines first"
                raise ProviderError(words, provider=self._provider, code="InUse", text=text)
            world.things.pop((kind, name), None)

        self._call("remove", removed, kind=kind, name=name)

    # --- parts of the calls ----------------------------------------------------------------------------------

    def _made(
        self, world: World, stock: Stock, order: Order, nodes: Sequence[int], token: str, said: dict[str, str]
    ) -> list[Machine]:
        """Make one machine or slice in `world`, and return its machines. If it raises an error, nothing was made."""
        if not world.lenient and stock.place not in {each.place for each in world.stock}:
            text = f"no {stock.instance_type} is sold in {stock.where} on the market {stock.market!r}"
            self._refuse(OfferGone, "create a machine", text)
        if world.limits or world.capacity or stock.capacity is not None:
            world.settle()  # machines that are due to end make room
        if _left(world, stock) <= 0:
            self._refuse(CapacityError, "create a machine", f"no {stock.instance_type} is left in {stock.where}")
        if (limit := world.limits.get(stock.quota)) is not None:
            there = sum(each.stock.quota == stock.quota for each in world.alive())
            if there + stock.size > limit:
                text = (
                    f"at most {limit} machines of the quota {stock.quota!r} may be alive at once: {there} are alive, "
                    f"and {stock.size} more were requested"
                )
                self._refuse(QuotaError, "create a machine", text)
        name = f"s-{world.made + 1:04d}" if stock.size > 1 else ""
        made = [self._machine(world, stock, order, node, token, name, said) for node in nodes]
        world.settle(made)
        return made

    def _machine(
        self, world: World, stock: Stock, order: Order, node: int, token: str, slice_: str, said: dict[str, str]
    ) -> Machine:
        """Add one machine to `world`, with the next prepared defect, and make its folder. Limits are not checked."""
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
        """Start the process that ends machines on time, unless it runs already or no machine of `new` is alive."""

        def looked_after(world: World) -> None:
            if any(each.lives for each in new) and world.real and not hypervisor.busy(self._state.folder):
                machine.start_hypervisor(str(self._state.folder))

        self._do(looked_after, settle=False)

    def _refuse(self, kind: type[ProviderError], what: str, text: str) -> NoReturn:
        """Raise the error for a request that the cloud refuses; `what` follows "refused to" in the message."""
        raise refusal(kind, what, self._provider, text=text)

    def _call(self, call: str, effect: Callable[[World], T], *, place: Place = _NOWHERE, **about: Any) -> T:
        """Perform one call with the failures that a test prepared, and return the result of `effect`."""

        # The order: journal, kill "before", delay, check of the key, error "before", effect, kill or error "after".
        def before(world: World) -> tuple[int, float, Any, bool]:
            world.calls += 1
            self._tell(world.calls, call, **about)
            self._die_if_told(world, world.calls, "before")
            delay, error = _spent(world, call, place, "before")
            return world.calls, delay, error, not world.key or world.key == self._key

        number, delay, error, known = self._do(before, settle=False)
        time.sleep(delay)
        if not known:
            raise refusal(CredentialsError, f"perform the call {call!r}", self._provider)
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
        """Run a function on the locked state, and store its changes. `settle` first ends machines that are due."""
        while True:
            try:
                with self._state.open(settle) as world:
                    return work(world)
            except Overtaken:  # this process was stopped, and lost the lock and the changes
                continue

    def _raise(self, error: Exception | type[Exception] | None, call: str) -> None:
        """Raise an error that a test prepared, or do nothing for None. A ConnectionError is raised as NoAnswer."""
        if isinstance(error, type) and issubclass(error, ProviderError):
            raise refusal(error, f"perform the call {call!r}", self._provider)
        if isinstance(error, ConnectionError):
            raise NoAnswer(
                f"{self._provider} did not answer the call {call!r}: {error}; "
                "the call may have taken effect, so repeat it with the same arguments",
                provider=self._provider,
                text=str(error),
            ) from error
        if error is not None:
            raise error

    def _die_if_told(self, world: World, number: int, when: When) -> None:
        """Store `world` and kill this process with SIGKILL, if a test prepared that for this call and `when`."""
        if (number, when) in world.kills:
            del world.kills[number, when]
            self._state.keep(world)
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell(self, number: int, call: str, **about: Any) -> None:
        """Append a call and its arguments `about` to the cloud's journal, a file with one JSON object on each line."""
        line = json.dumps({"number": number, "call": call, "pid": os.getpid(), **about})
        with open(self._state.folder / "journal", "a") as journal:
            journal.write(f"{line}\n")


def _left(world: World, stock: Stock) -> float:
    """Return how many more machines or slices of a stock can be made: inf without limit, < 0 if too many are alive."""
    capacity = world.capacity.get(stock.place, stock.capacity)
    if capacity is None:
        return float("inf")
    return capacity - len({each.slice or each.id for each in world.alive() if each.stock.place == stock.place})


def _tagged(all_: Any, pool: str | None) -> list[Any]:
    """Return the machines or things whose tags name this user and, if `pool` is given, this pool and computer."""
    mine = [each for each in all_ if tags.ours({tags.POOL: each.pool, tags.OWNER: each.owner}, pool)]
    return [each for each in mine if getattr(each, "tagged", True)]


def page_of(world: World, machines: Sequence[Machine], after: str) -> tuple[list[Machine], str]:
    """Return the machines of one page of a list, and the text with which the next page is requested; "" at the end.

    `after` is that text from the previous page, the id of its last machine; "" for the first page.
    """
    if world.cut:
        return [], "more"
    left = [each for each in machines if (len(each.id), each.id) > (len(after), after)]
    page = left[: world.page]
    return page, page[-1].id if len(page) < len(left) else ""


def _spent(world: World, call: str, place: Place, when: When) -> tuple[float, Exception | type[Exception] | None]:
    """Use up the rules that match a call. Return the sum of their delays in seconds, and the first error or None."""
    delay = 0.0
    error = None
    for each in list(world.rules):
        here = all(a in ("", b) for a, b in zip(each.place, place, strict=True))
        # only the first error is used; rules with other errors stay for later calls
        if each.call not in ("", call) or each.when != when or not here or (each.error and error):
            continue
        delay = delay + each.delay
        error = each.error or error
        if each.times is not None:
            each.times -= 1
            if each.times <= 0:
                world.rules.remove(each)
    return delay, error
