"""Drivers that break the contract, each in one way: FakeCloud with a fault."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from skypool.drivers.contract import Abilities
from skypool.errors import CapacityError, ProviderError, StillRunning
from skypool.model import Access, Bill, Finding, Instance, Leftover, Need, Offer, Order
from skypool.testing import FakeCloud
from skypool.testing.cloud_state import Machine
from skypool.testing.machine import Door

# --- itself --------------------------------------------------------------------------------------------------


class Misnamed(FakeCloud):
    name = "Fake Cloud"


class ReadsFile(FakeCloud):
    def __post_init__(self) -> None:
        super().__post_init__()
        Path("/etc/hostname").exists()
        with open("/etc/passwd") as file:
            file.read()


class AsksTheNetwork(FakeCloud):
    def __post_init__(self) -> None:
        super().__post_init__()
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()


class StartsThread(FakeCloud):
    def __post_init__(self) -> None:
        super().__post_init__()
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()


class ImportsSdk(FakeCloud):
    def __post_init__(self) -> None:
        super().__post_init__()
        import joblib

        assert joblib


class ShowsItsKey(FakeCloud):
    def __repr__(self) -> str:
        return f"ShowsItsKey({self.key!r})"


@dataclass(frozen=True)
class ShowsItsToken(FakeCloud):
    token: str = ""


# --- offers --------------------------------------------------------------------------------------------------


class SlowOffers(FakeCloud):
    def offers(self, need: Need) -> Iterable[Offer]:
        time.sleep(1.1)
        return super().offers(need)


class Unpriced(FakeCloud):
    def offers(self, need: Need) -> Iterable[Offer]:
        return [replace(each, usd_per_hour=math.nan) for each in super().offers(need)]


class SellsForAnother(FakeCloud):
    def offers(self, need: Need) -> Iterable[Offer]:
        return [replace(each, provider="acme") for each in super().offers(need)]


class DeniesSpot(FakeCloud):
    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, spot=False)


# --- launch --------------------------------------------------------------------------------------------------


class CountsRanksFromZero(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return super().launch(offer, replace(order, nodes=tuple(range(order.count))))


class LaunchesOne(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return super().launch(offer, replace(order, nodes=order.nodes[:1]))


class ForgetsTheOffer(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return [replace(each, offer=None) for each in super().launch(offer, order)]


class ForgetsItsToken(FakeCloud):
    """Not idempotent: each launch is a new one."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return super().launch(offer, replace(order, token=f"{order.token}-{time.monotonic_ns()}"))


class OneTokenForAll(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        launched = super().launch(offer, replace(order, token="same", nodes=(0,)))
        return [replace(each, node=node) for each in launched for node in order.nodes]


class TriesAgainAnew(FakeCloud):
    """Leaks on a lost reply: it asks once more, with another token."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except ProviderError:
            return super().launch(offer, replace(order, token=f"{order.token}-again"))


class CallsALostReplyARefusal(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except ProviderError as e:
            raise CapacityError(str(e), provider=self.name, text=e.text) from e


class TagsAfterwards(FakeCloud):
    """Whoever dies between the create and the tag leaves a machine that nobody finds."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except ProviderError:
            _untag(self)
            raise


def _untag(cloud: FakeCloud) -> None:
    with cloud.control.state.open() as world:
        for each in world.alive():
            each.tagged = False


class WaitsForTheBoot(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        launched, until = super().launch(offer, order), time.monotonic() + 1.5
        while self.instances()[0].state == "starting" and time.monotonic() < until:
            time.sleep(0.05)
        return launched


class SaysItRuns(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return [replace(each, state="running") for each in super().launch(offer, order)]


class RentsTheNextBest(FakeCloud):
    """Out of stock here, it takes what there is elsewhere and says nothing."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except CapacityError:
            return super().launch(next(each for each in self.offers(order.need) if each.available), order)


class LeavesOneBehind(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except ProviderError:
            with self.control.state.open() as world:
                world.rules.clear()
                world.capacity.clear()
            super().launch(offer, replace(order, token=f"{order.token}-left"))
            raise


class GivesTheLastRanks(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return super().launch(offer, replace(order, nodes=order.nodes[::-1]))


class KeepsAPart(FakeCloud):
    """Where all or none was asked for."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return super().launch(offer, replace(order, need=replace(order.need, private_network=False)))


class AllErrorsAreOne(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except ProviderError as e:
            raise ProviderError(str(e), provider=e.provider, code=e.code, text=e.text) from e


@dataclass(frozen=True)
class SaysLess(FakeCloud):
    """Refusals without one part of what they are to say."""

    without: str = field(default="code")
    name: ClassVar[str] = "fake"

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except ProviderError as e:
            parts: dict[str, Any] = {"provider": e.provider, "code": e.code, "text": e.text}
            message = f"{e.text} ({e.code})" if self.without == "advice" else str(e)
            raise type(e)(message, **{k: v for k, v in parts.items() if k != self.without}) from e


class SwallowsRefusals(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        try:
            return super().launch(offer, order)
        except ProviderError:
            return []


# --- slices --------------------------------------------------------------------------------------------------


class LaunchesHalfASlice(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return super().launch(offer, order)[: order.count - 1]


class NamesNoSlice(FakeCloud):
    def _instance(self, made: Machine, offer: Offer | None = None) -> Instance:
        return replace(super()._instance(made, offer), slice="")


class NamesAllSlicesAlike(FakeCloud):
    def _instance(self, made: Machine, offer: Offer | None = None) -> Instance:
        return replace(super()._instance(made, offer), slice="slice")


class FindsHostsInAnyOrder(FakeCloud):
    """The nodes of a slice are not in the order of its hosts when it is found again."""

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        found = super().instances(pool=pool)
        nodes = [each.node for each in found]
        return [replace(each, node=node) for each, node in zip(found, nodes[::-1], strict=True)]


class SellsHostsOneByOne(FakeCloud):
    """Where one slice is left it gives a host of each that was asked for."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        launched = super().launch(offer, order)
        return launched if len(launched) == order.count else launched[:1]


class KeepsTheOtherHosts(FakeCloud):
    """Ends the host that is named, and the rest of the slice goes on."""

    def terminate(self, instances: Sequence[Instance]) -> None:
        for each in instances:
            if each.id in {there.id for there in self.instances(pool=each.pool)}:
                self.control.kill(each)


class HasOneHostToReach(FakeCloud):
    def access(self, instance: Instance) -> Access:
        if instance.node:
            raise ProviderError(f"there is no way to host {instance.node}", provider=self.name)
        return super().access(instance)


# --- instances -----------------------------------------------------------------------------------------------


class SeesAllPools(FakeCloud):
    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return super().instances()


class ReadsOnePage(FakeCloud):
    """For its lists, and for the proof of an end."""

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return [self._instance(each) for each in self._api().describe(pool)[0]]

    def terminate(self, instances: Sequence[Instance]) -> None:
        api = self._api()
        api.terminate([each.id for each in instances])
        there = {each.id for each in api.describe(None)[0]}
        if left := [each for each in instances if each.id in there]:
            raise StillRunning("still there", left)


class TakesWhatItGets(FakeCloud):
    """It reads pages until they repeat, and calls that a list."""

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        found, after, seen = list[Machine](), "", set[str]()
        while after not in seen:
            seen.add(after)
            page, after = self._api().describe(pool, after)
            found += page
        return [self._instance(each) for each in found]


class SeesLikeNames(FakeCloud):
    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return [each for each in super().instances() if each.pool.startswith(pool or "")]


class ForgetsRanks(FakeCloud):
    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return [replace(each, node=0) for each in super().instances(pool=pool)]


class ForgetsUntil(FakeCloud):
    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return [replace(each, until=None) for each in super().instances(pool=pool)]


class SaysNoTimeZone(FakeCloud):
    def instances(self, *, pool: str | None = None) -> list[Instance]:
        found = super().instances(pool=pool)
        return [replace(each, until=each.until and each.until.replace(tzinfo=None)) for each in found]


_remembered: list[Instance] = []


class RemembersInMemory(FakeCloud):
    """Finds what this very process has launched."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        _remembered.extend(launched := super().launch(offer, order))
        return launched

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        there = {each.id for each in super().instances(pool=pool)}
        return [each for each in _remembered if each.id in there and (each.pool == pool or pool is None)]


_orders: dict[str, Order] = {}


class SharesItsOrder(FakeCloud):
    """Two launches at once get into each other's way."""

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        _orders["now"] = order
        time.sleep(0.1)
        return super().launch(offer, _orders["now"])


# --- on the machine ------------------------------------------------------------------------------------------


class Unquoted(Door):
    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        return Door.argv(self, ["sh", "-c", " ".join(command)])


class PassesWordsThroughAShell(FakeCloud):
    def access(self, instance: Instance) -> Access:
        access = super().access(instance)
        assert isinstance(access.transport, Door)
        return replace(access, transport=Unquoted(access.transport.folder))


class HasAnotherPython(FakeCloud):
    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), python="/nowhere/python3")


class TellsOfNoInterruption(FakeCloud):
    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), watch="")


class CountsDown(FakeCloud):
    """Says how many seconds are left, and not when."""

    def access(self, instance: Instance) -> Access:
        access = super().access(instance)
        return replace(access, watch=access.watch.replace("said.read()", "120"))


class CriesWolf(FakeCloud):
    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), watch="import time; print(time.time()); time.sleep(60)")


class ArmsNoEnd(FakeCloud):
    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return super().launch(offer, replace(order, lease=1e9, lifetime=None))


class HearsNobody(FakeCloud):
    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), guard=f"{super().access(instance).guard}.else")


class HoldsNoEnd(FakeCloud):
    """Has the file for a written end, and nobody reads it."""

    def access(self, instance: Instance) -> Access:
        access = super().access(instance)
        home = Path(access.guard).parent / "home"
        (home / "end").touch()
        return replace(access, guard=str(home / "lease"))


# --- the end -------------------------------------------------------------------------------------------------


class OnlySaysItEnds(FakeCloud):
    def terminate(self, instances: Sequence[Instance]) -> None:
        return


class EndsThePool(FakeCloud):
    def terminate(self, instances: Sequence[Instance]) -> None:
        super().terminate([found for each in instances for found in self.instances(pool=each.pool)])


class IsLoudForTheGone(FakeCloud):
    def terminate(self, instances: Sequence[Instance]) -> None:
        there = {each.id for each in self.instances()}
        if gone := [each.id for each in instances if each.id not in there]:
            raise ProviderError(f"there is no {gone}", provider=self.name)
        super().terminate(instances)


class DoesNotLook(FakeCloud):
    """Believes that what was asked for is done."""

    def terminate(self, instances: Sequence[Instance]) -> None:
        self._api().terminate([each.id for each in instances])


class BlamesAll(FakeCloud):
    def terminate(self, instances: Sequence[Instance]) -> None:
        try:
            super().terminate(instances)
        except StillRunning as e:
            raise StillRunning(str(e), instances) from e


class StopsAtTheFirst(FakeCloud):
    def terminate(self, instances: Sequence[Instance]) -> None:
        for each in instances:
            super().terminate([each])


# --- what else there is --------------------------------------------------------------------------------------


class KeepsKeyPairs(FakeCloud):
    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        return [each for each in super().leftovers(pool=pool) if each.kind != "key-pair"]


class TidiesNothing(FakeCloud):
    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        return


class TidiesLoudly(FakeCloud):
    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        there = {each.id for each in self.leftovers()}
        if gone := [each.id for each in leftovers if each.id not in there]:
            raise ProviderError(f"there is no {gone}", provider=self.name)
        super().tidy(leftovers)


class SeesOthersLeftovers(FakeCloud):
    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        return super().leftovers()


class RenewsNothing(FakeCloud):
    def renew(self, pool: str, until: datetime) -> None:
        return


class RenewsAll(FakeCloud):
    def renew(self, pool: str, until: datetime) -> None:
        for each in self.instances():
            super().renew(each.pool, until)


class RenewsInLocalTime(FakeCloud):
    def renew(self, pool: str, until: datetime) -> None:
        wrong = until.astimezone(UTC) + timedelta(hours=2)
        super().renew(pool, wrong)


class RentsToCheck(FakeCloud):
    def check(self) -> Iterable[Finding]:
        offer = next(iter(self.offers(Need())))
        self.launch(offer, Order("check", "check", (0,), Need()))
        return super().check()


class ChecksWithoutAdvice(FakeCloud):
    def check(self) -> Iterable[Finding]:
        return [Finding("permissions", False, f"{os.getuid()} may not launch")]


class ChecksNothing(FakeCloud):
    def check(self) -> Iterable[Finding]:
        return []


class RentsToProve(FakeCloud):
    def prove_creates(self) -> Iterable[Finding]:
        offer = next(iter(self.offers(Need())))
        self.launch(offer, Order("prove", "prove", (0,), Need()))
        return super().prove_creates()


class ProvesWhatIsMade(FakeCloud):
    def prove_creates(self) -> Iterable[Finding]:
        self.control.make_anything()
        return super().prove_creates()


class ProvesNothing(FakeCloud):
    def prove_creates(self) -> Iterable[Finding]:
        return []


class TakesEveryRefusal(FakeCloud):
    def prove_creates(self) -> Iterable[Finding]:
        return [replace(each, good=True) for each in super().prove_creates()]


class BillsWithoutWords(FakeCloud):
    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        return replace(super().billed(instances, since, until), text="")


class BillsBelowZero(FakeCloud):
    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        return replace(super().billed(instances, since, until), usd=-1.0)
