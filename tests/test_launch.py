"""From offers to instances: which is tried, and what is told of those that were not to be had."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from skypool.accelerators import parse
from skypool.drivers.contract import Abilities
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    ErrorGroup,
    FundsError,
    LaunchError,
    NoAnswer,
    NoOffers,
    OfferGone,
    PoolClosed,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UsageError,
)
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.offers.search import look_around
from skypool.rental import launch
from skypool.rental.launch import Launcher, place


class Cloud:
    """A driver that does what it is told to: `says` has an error, or None, for each instance type."""

    def __init__(
        self,
        name: str,
        says: Mapping[str, Exception | Sequence[Exception] | None],
        shift: int = 0,
        stock: dict[str, int] | None = None,
        hosts: int = 1,
    ) -> None:
        self.name, self.says, self.shift, self.stock = name, dict[str, Any](says), shift, stock or {}
        self.hosts = hosts
        self.abilities = Abilities()
        self.tried: list[str] = []
        self.tokens: list[str] = []
        self.running: list[Instance] = []

    def offers(self, need: Need) -> Iterable[Offer]:
        if "offers" in self.says and (error := self.says["offers"]):
            raise error
        return [Offer(self.name, each, region=f"{each}land", usd_per_hour=i) for i, each in enumerate(self.says)]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        kind = offer.instance_type
        self.tried.append(kind)
        self.tokens.append(order.token)
        error = self.says[kind]
        if isinstance(error, list):
            error = error.pop() if error else None
        if error:
            raise error
        nodes = order.nodes[: self.stock.get(kind, order.count)]
        new = [Instance(self.name, f"{kind}{r}", order.pool, r + self.shift, slice=self._slice(r)) for r in nodes]
        self.running += new
        return new

    def _slice(self, node: int) -> str:
        return f"s-{node // self.hosts}" if self.hosts > 1 else ""

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return self.running

    def access(self, instance: Instance) -> Access:
        raise NotImplementedError

    def terminate(self, instances: Sequence[Instance]) -> None:
        self.running = [each for each in self.running if each not in instances]


def fails(error: Exception) -> Any:
    """A verb that raises this."""

    def verb(*args: object) -> None:
        raise error

    return verb


class Ledger:
    """What was written down, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []
        self.tokens: list[str] = []
        self.ends_after: int | None = None
        self.ended_up: list[str] = []

    def intend(self, order: Order, offer: Offer) -> None:
        if len(self.tokens) == self.ends_after:
            raise PoolClosed("pool 'p' is being ended by another process")
        self.lines.append(("intend", offer.instance_type))
        self.tokens.append(order.token)

    def rented(self, order: Order, instances: Sequence[Instance]) -> None:
        self.lines.append(("rented", *(each.id for each in instances)))

    def refused(self, order: Order, error: Exception) -> None:
        self.lines.append(("refused", str(error)))

    def failed(self, order: Order) -> None:
        self.ended_up.append(order.token)


def launcher(*clouds: Cloud, together: bool = False) -> Any:
    numbers = itertools.count()

    def order(offer: Offer, nodes: tuple[int, ...]) -> Order:
        return Order(pool="p", token=f"t-{next(numbers)}", nodes=nodes, need=Need(private_network=together))

    drivers: Any = clouds
    return Launcher(drivers, order, Ledger())


def offers(*clouds: Cloud) -> tuple[Offer, ...]:
    drivers: Any = clouds
    return asyncio.run(look_around(drivers, Need())).offers


def test_the_next_offer_is_taken_when_one_is_out_of_stock() -> None:
    cloud = Cloud("a", {"small": CapacityError("none left"), "gone": OfferGone("taken"), "large": None})
    at = launcher(cloud)
    rented = at.launch(offers(cloud), (0, 1))
    assert [each.node for each in rented.instances] == [0, 1]
    assert rented.error is None
    assert cloud.tried == ["small", "gone", "large"]
    assert [(offer.instance_type, str(error)) for offer, error in at.attempts] == [
        ("small", "none left"),
        ("gone", "taken"),
    ]


def test_a_place_that_took_an_order_and_had_no_machine_for_it_is_not_tried_again() -> None:
    cloud = Cloud("a", {"small": None, "large": None})
    at = launcher(cloud)
    sold = offers(cloud)
    at.lacking[place(sold[0])] = CapacityError("none after all")
    assert at.launch(sold, (0,)).instances[0].id == "large0"
    at.lacking[place(sold[1])] = CapacityError("none there, too")
    rented = at.launch(sold, (1,))
    assert rented.instances == ()
    assert "none after all" in str(rented.error)
    assert "none there, too" in str(rented.error)
    assert cloud.tried == ["large"]


def test_a_type_of_machine_that_lacks_one_accelerator_may_have_another() -> None:
    cloud = Cloud("a", {"small": None})
    at = launcher(cloud)
    [one] = offers(cloud)
    lacking, other = (replace(one, accelerator=parse(name)) for name in ("T4", "V100"))
    at.lacking[place(lacking)] = CapacityError("no T4 after all")
    rented = at.launch([lacking, other], (0,))
    assert [each.id for each in rented.instances] == ["small0"]
    assert [str(error) for _, error in at.attempts] == ["no T4 after all"]


def test_every_create_is_written_down_before_it_goes_out_with_a_token_of_its_own() -> None:
    cloud = Cloud("a", {"small": CapacityError("none left"), "large": None})
    at = launcher(cloud)
    at.launch(offers(cloud), (0,))
    book = at.book
    assert isinstance(book, Ledger)
    assert book.lines == [("intend", "small"), ("refused", "none left"), ("intend", "large"), ("rented", "large0")]
    assert len(set(book.tokens)) == 2


@pytest.mark.parametrize("error", [QuotaError("8 vCPUs"), CredentialsError("expired"), FundsError("no money")])
def test_what_covers_a_whole_provider_spares_its_other_offers(error: ProviderError) -> None:
    first, second = Cloud("a", {"small": error, "large": None}), Cloud("b", {"small": None})
    rented = launcher(first, second).launch(offers(first, second), (0,))
    assert rented.instances[0].provider == "b"
    assert first.tried == ["small"]


def test_a_quota_covers_what_counts_toward_it_and_an_access_error_its_region() -> None:
    said = {
        "spot-p": QuotaError("32 vCPUs"),
        "spot-p2": None,
        "far": AccessError("not opted in"),
        "far2": None,
        "other": None,
    }
    cloud = Cloud("a", said)
    where = {"spot-p": ("near", "P"), "spot-p2": ("near", "P"), "far": ("far", "G"), "far2": ("far", "X")}
    asked = [
        replace(each, region=region, quota=quota)
        for each in offers(cloud)
        for region, quota in [where.get(each.instance_type, ("near", "G"))]
    ]
    assert launcher(cloud).launch(asked, (0,)).instances
    assert cloud.tried == ["spot-p", "far", "other"]


@pytest.mark.parametrize(
    ("error", "is_open"), [(ProviderError("your image is odd"), False), (KeyError("a fault of the driver"), True)]
)
def test_any_other_error_ends_it_at_once_and_may_leave_open_whether_it_took_effect(
    error: Exception, is_open: bool
) -> None:
    cloud = Cloud("a", {"small": error, "large": None})
    at = launcher(cloud)
    rented = at.launch(offers(cloud), (0, 1))
    assert rented.instances == ()
    assert rented.error is error
    assert cloud.tried == ["small"]
    assert isinstance(at.book, Ledger)
    assert (at.book.lines == [("intend", "small")]) == is_open


def test_what_one_offer_has_too_few_of_is_filled_up_from_the_next() -> None:
    cloud = Cloud("a", {"small": None, "large": None}, stock={"small": 2})
    rented = launcher(cloud).launch(offers(cloud), (0, 1, 2))
    assert sorted((each.node, each.id) for each in rented.instances) == [(0, "small0"), (1, "small1"), (2, "large2")]


def test_what_was_rented_is_told_even_when_the_rest_cannot_be() -> None:
    cloud = Cloud("a", {"small": None, "large": CapacityError("none left")}, stock={"small": 2})
    rented = launcher(cloud).launch(offers(cloud), (0, 1, 2))
    assert len(rented.instances) == 2
    assert isinstance(rented.error, LaunchError)


def sliced(cloud: Cloud, hosts: int = 2) -> list[Offer]:
    return [replace(each, hosts=hosts) for each in offers(cloud)]


def test_ranks_of_an_order_are_those_of_whole_slices_and_the_rest_goes_to_the_next_offer() -> None:
    cloud = Cloud("a", {"few": None, "many": None}, stock={"few": 2}, hosts=2)
    rented = launcher(cloud).launch(sliced(cloud), (0, 2, 6))
    assert [(each.id, each.node) for each in rented.instances] == [
        (f"{kind}{node}", node) for kind, node in [("few", 0), ("few", 1), *(("many", node) for node in (2, 3, 6, 7))]
    ]
    assert [[each.node for each in hosts] for hosts in rented.slices] == [[0, 1], [2, 3], [6, 7]]
    assert rented.error is None


def test_offers_of_other_sizes_serve_where_there_is_one_slice() -> None:
    cloud = Cloud("a", {"slice": CapacityError("none left"), "machine": None}, hosts=2)
    first, second = offers(cloud)
    rented = launcher(cloud).launch([replace(first, hosts=2), second], (4,))
    assert [[each.node for each in hosts] for hosts in rented.slices] == [[4]]


@pytest.mark.parametrize(
    ("stock", "hosts"), [(1, 2), (3, 2), (4, 1), (4, 4)], ids=["half", "one and a half", "no", "big"]
)
def test_a_driver_that_launches_no_whole_slices_leaves_none(stock: int, hosts: int) -> None:
    cloud = Cloud("a", {"liar": None}, stock={"liar": stock}, hosts=hosts)
    rented = launcher(cloud).launch(sliced(cloud), (0, 2))
    assert isinstance(rented.error, LaunchError)
    assert "launched incomplete or mixed slices, but slices of 2 hosts were ordered (got nodes 0 of " in str(
        rented.error
    )
    assert "these machines were ended. Report this bug to the author of the driver" in str(rented.error)
    assert cloud.running == []


def test_a_driver_that_calls_two_machines_one_slice_leaves_none() -> None:
    cloud = Cloud("a", {"liar": None}, hosts=2)
    rented = launcher(cloud).launch(offers(cloud), (0, 1))
    assert "slices of 1 hosts were ordered (got nodes 0 of s-0, 1 of s-0)" in str(rented.error)
    assert cloud.running == []


def test_who_has_machines_that_do_not_reach_each_other_is_not_asked_for_such() -> None:
    near: Any = Cloud("near", {"small": None})
    near.abilities = Abilities(private_network=True)
    far: Any = Cloud("far", {"small": None})
    need = Need(private_network=True)
    made = asyncio.run(look_around([near, far], need))
    assert {each.provider for each in made.offers} == {"near"}
    assert "machines of far cannot reach each other over a private network" in str(made.failures["far"])
    with pytest.raises(UsageError, match="leave out private_network=True, or choose another"):
        asyncio.run(look_around([far], need))
    assert asyncio.run(look_around([far], Need())).offers


def test_nodes_with_a_private_network_come_all_from_one_place_or_none() -> None:
    cloud = Cloud("a", {"small": CapacityError("only 2"), "large": None})
    rented = launcher(cloud, together=True).launch(offers(cloud), (0, 1, 2))
    assert [each.id for each in rented.instances] == ["large0", "large1", "large2"]
    careless = Cloud("b", {"small": None}, stock={"small": 2})
    rented = launcher(careless, together=True).launch(offers(careless), (0, 1, 2))
    assert careless.running == []
    assert isinstance(rented.error, LaunchError)


def test_a_provider_that_asks_for_patience_gets_it_with_the_same_token() -> None:
    cloud = Cloud("a", {"small": [RateLimitError("slow down", retry_after=0.05)] * 2})
    at = launcher(cloud)
    assert at.launch(offers(cloud), (0,)).instances
    assert cloud.tried == ["small"] * 3
    assert set(cloud.tokens) == {"t-0"}


@pytest.mark.parametrize(
    "error",
    [
        NoAnswer("connection reset"),
        ErrorGroup("2 regions or zones could not be queried", [NoAnswer("of one"), ProviderError("of another")]),
    ],
    ids=["one", "of several places"],
)
def test_a_lost_reply_is_asked_for_again_with_the_same_token(error: Exception) -> None:
    cloud = Cloud("a", {"small": [error]})
    assert launcher(cloud).launch(offers(cloud), (0,)).instances
    assert cloud.tokens == ["t-0", "t-0"]


@pytest.mark.parametrize(("code", "tried"), [("InternalError", ["small", "large"]), ("ConnectionError", ["small"])])
def test_a_cloud_that_does_not_answer_is_passed_by_and_its_order_stays_open(
    code: str, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_ATTEMPTS", 2)
    silent = [NoAnswer("no reply", code=code)] * 2
    dark = Cloud("a", {"small": list(silent), "large": list(silent)})
    light = Cloud("b", {"none": OfferGone("taken"), "nothing": OfferGone("taken"), "xl": None})
    at = launcher(dark, light)
    assert [each.id for each in at.launch(offers(dark, light), (0,)).instances] == ["xl0"]
    assert dark.tried == [kind for kind in tried for _ in silent]
    book = at.book
    assert isinstance(book, Ledger)
    assert [line for line in book.lines if line[0] != "intend"][-1] == ("rented", "xl0")
    assert sum(line[0] == "refused" for line in book.lines) == sum(line == ("refused", "taken") for line in book.lines)


def test_what_is_said_after_a_lost_reply_does_not_close_the_order() -> None:
    """The machine that it made may have been the last one, and not be listed yet."""
    cloud = Cloud("a", {"small": [CapacityError("out of stock"), NoAnswer("connection reset")], "large": None})
    at = launcher(cloud)
    assert [each.id for each in at.launch(offers(cloud), (0,)).instances] == ["large0"]
    assert cloud.tokens == ["t-0", "t-0", "t-1"]
    assert [line for line, *_ in at.book.lines] == ["intend", "intend", "intend", "rented"]


def test_a_pool_that_stops_while_a_provider_asks_for_patience_does_not_ask_again() -> None:
    cloud = Cloud("a", {"small": RateLimitError("slow down", retry_after=30)})
    at = launcher(cloud)
    stop = threading.Timer(0.5, at.stopping.set)
    stop.start()
    assert isinstance(at.launch(offers(cloud), (0,)).error, PoolClosed)
    stop.join()
    assert cloud.tried == ["small"]


def test_each_attempt_is_written_down_so_that_none_is_made_for_a_pool_that_another_process_ends() -> None:
    cloud = Cloud("a", {"small": RateLimitError("slow down", retry_after=0.05), "large": None})
    at = launcher(cloud)
    at.book.ends_after = 2
    assert isinstance(at.launch(offers(cloud), (0,)).error, PoolClosed)
    assert cloud.tried == ["small", "small"]
    assert cloud.running == []


def test_nothing_more_is_rented_once_the_pool_is_stopping() -> None:
    cloud = Cloud("a", {"small": None})
    at = launcher(cloud)
    at.stopping.set()
    rented = at.launch(offers(cloud), (0,))
    assert cloud.tried == []
    assert isinstance(rented.error, PoolClosed)


def test_when_nothing_is_to_be_had_every_attempt_is_told_and_so_is_what_was_not_tried() -> None:
    said = {
        "small": CapacityError("none left"),
        "large": QuotaError("8 vCPUs"),
        "xl": None,
    }
    cloud = Cloud("a", said)
    rented = launcher(cloud).launch(offers(cloud), (0,))
    with pytest.raises(
        LaunchError,
        match=r"none of 3 [\s\S]*a small smallland: none left[\s\S]*a large largeland: 8 vCPUs[\s\S]*1 more offers of",
    ):
        raise rented.error or AssertionError


def test_a_driver_that_launches_other_nodes_than_were_ordered_leaves_none() -> None:
    cloud = Cloud("a", {"small": None}, shift=5)
    rented = launcher(cloud).launch(offers(cloud), (0, 1))
    assert str(rented.error).startswith("the driver a launched nodes [5, 6], but [0, 1] were ordered")
    assert cloud.running == []


def test_what_was_launched_otherwise_than_ordered_and_cannot_be_ended_is_told_and_stays_open() -> None:
    cloud: Any = Cloud("a", {"small": None, "large": None}, shift=5)
    cloud.terminate = fails(NoAnswer("nothing comes through"))
    at = launcher(cloud)
    rented = at.launch(offers(cloud), (0, 1))
    assert isinstance(rented.error, StillRunning)
    assert "small0 at a: nothing comes through" in str(rented.error)
    assert rented.error.instances == tuple(cloud.running)
    assert cloud.tried == ["small"]
    assert at.book.lines == [("intend", "small")]


def test_a_provider_that_cannot_be_asked_stops_nobody_but_itself() -> None:
    silent, other = Cloud("a", {"offers": CredentialsError("who are you")}), Cloud("b", {"small": None})
    drivers: Any = [silent, other]
    made = asyncio.run(look_around(drivers, Need()))
    assert [offer.provider for offer in made.offers] == ["b"]
    assert "who are you" in made.explain()
    with pytest.raises(CredentialsError):
        asyncio.run(look_around(drivers[:1], Need()))
    with pytest.raises(NoOffers):
        asyncio.run(look_around([Cloud("c", {})], Need()))  # type: ignore[list-item]  # a Cloud's name is its own
