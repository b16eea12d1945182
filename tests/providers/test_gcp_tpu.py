"""What is odd about Cloud TPU, against the lab's; and the contract."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import skypool as sky
from skypool.accelerators import parse, tables
from skypool.drivers import tags
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    NoAnswer,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UnknownAccelerator,
    UsageError,
)
from skypool.model import Instance, Need, Offer, Order
from skypool.testing import DriverContract
from skypool.wire.keys import Keys
from skypool_gcp import _api as google
from skypool_gcp._settings import Settings
from skypool_gcp.list_prices import Rates
from skypool_gcp.tpu import Tpu, _api, _catalog
from tests.lab import tpu as world_of
from tests.lab import tpu_wares as wares
from tests.lab.gce import GCE
from tests.lab.tpu import PROJECT
from tests.lab.tpu import TPU as World
from tests.lab.tpu_grpc import grpc_of
from tests.providers.on_machines import OnMachines
from tests.providers.strings import PagedStrings

SCOPES = "devstorage.read_only", "logging.write", "monitoring.write"
COMPUTE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"

pytestmark = [
    pytest.mark.needs("openssh"),
    pytest.mark.filterwarnings("ignore:not all firewall rules for TPU hosts"),  # no Compute Engine there
]
V5P_8, V5P_16, V5E_8 = (Need(accelerators=(parse(each),)) for each in ("v5p-8", "v5p-16", "v5litepod-8"))
CODES: dict[type[ProviderError], tuple[str, str]] = {
    CredentialsError: (
        "UNAUTHENTICATED",
        "Request had invalid authentication credentials. Expected OAuth 2 access token",
    ),
    AccessError: (
        "PERMISSION_DENIED",
        "Permission 'tpu.nodes.create' denied on resource (or it may not exist).",
    ),
    CapacityError: ("RESOURCE_EXHAUSTED", world_of.NO_CAPACITY.format(zone="us-east5-a")),
    QuotaError: ("RESOURCE_EXHAUSTED", world_of.NO_QUOTA),
    RateLimitError: ("RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Create requests' and limit per minute"),
}


def backend(**settings: Any) -> Tpu:
    """The back end alone."""
    told: dict[str, Any] = dict.fromkeys(
        ("zones", "subnetwork", "image", "reservation", "service_account", "ssh_from")
    ) | {"project": PROJECT, "network": "default", "ssh_from": ("203.0.113.7",)}
    return Tpu(Settings(**{**told, **settings}))


class Strings(PagedStrings):
    """The contract's control of the lab's Cloud TPU."""

    create = "POST queuedResources"
    refusals = CODES

    def never_boot(self) -> None:
        self.world.ready = False

    def interrupt(self, instance: Instance) -> None:
        self.world.preempt(instance.id)


@pytest.fixture(autouse=True)
def _forgetful() -> None:
    """An address may be one at which another test's world was."""
    _api._client.cache_clear()


class TestTpuCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, tpu_api: World, monkeypatch: pytest.MonkeyPatch) -> Tpu:
        monkeypatch.setattr(Tpu, "ending", 3.0)
        return backend()

    @pytest.fixture
    def control(self, tpu_api: World) -> Strings:
        return Strings(tpu_api)

    @pytest.fixture
    def need(self) -> Need:
        return V5E_8

    @pytest.fixture
    def slice_need(self) -> Need:
        return V5P_16


@pytest.mark.slow
class TestTpuCallsOverGrpc(DriverContract):
    """The same over gRPC, which is how the SDK asks the real one."""

    real = False
    several = True

    @pytest.fixture
    def driver(self, tpu_api: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tpu]:
        monkeypatch.setattr(Tpu, "ending", 5.0)
        with grpc_of(tpu_api) as address:
            monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
            yield backend()

    control, need, slice_need = TestTpuCalls.control, TestTpuCalls.need, TestTpuCalls.slice_need


# --- what is sold --------------------------------------------------------------------------------------------


def sold(*kinds: str, **more: Any) -> list[Offer]:
    accelerators = tuple(map(parse, kinds))
    settings = {name: more.pop(name) for name in ("zones", "service_account") if name in more}
    return list(backend(**settings).offers(Need(accelerators=accelerators, **more)))


def order(*nodes: int, pool: str = "train", **more: Any) -> Order:
    until = datetime.now(UTC) + timedelta(seconds=720)
    given: dict[str, Any] = {
        "need": V5P_16,
        "until": until,
        "token": "0011223344556677-0",
        **more,
    }
    return Order(pool=pool, nodes=nodes, **given)


@pytest.mark.parametrize(
    ("kind", "market", "prices"),
    [
        ("v5p-64", "on-demand", {"us-east5-a": 32 * 4.2 + 8 * 0.005}),
        ("v5p-64", "spot", {"us-east5-a": 32 * 2.415 + 8 * 0.0025}),
        ("v4-8", "on-demand", {"us-central2-b": 4 * 3.22 + 0.005}),
        ("v4-8", "spot", {}),
        ("v3-8", "on-demand", {"europe-west4-a": 4 * 2.2 + 0.005}),
        ("v3-32", "on-demand", {"europe-west4-a": 16 * 2.0 + 4 * 0.005, "us-east1-d": 16 * 2.0 + 4 * 0.005}),
        ("v3-32", "spot", {"us-east1-d": 16 * 0.6 + 4 * 0.0025}),
        ("v5litepod-16", "spot", {"us-west4-a": 16 * 0.51 + 4 * 0.0025, "europe-west4-b": 16 * 0.663 + 4 * 0.0025}),
        (
            "v6e-1",
            "on-demand",
            {"us-east5-a": 2.705, "us-east5-b": 2.705, "europe-west4-a": 2.975, "us-east1-d": 2.705},
        ),
    ],
)
def test_a_slice_costs_what_all_of_its_chips_and_addresses_do_and_is_not_sold_without_a_price(
    tpu_api: World, kind: str, market: Any, prices: dict[str, float]
) -> None:
    found = {each.zone: each.usd_per_hour for each in sold(kind, market=market)}
    known = {zone: price for zone, price in found.items() if zone in prices}
    assert known == pytest.approx(prices)
    assert kind == "v5litepod-16" or found == known, "zones without a price are left out"
    assert all(each.ends_itself is False for each in sold(kind, market=market))


def test_an_offer_is_a_whole_slice_with_the_size_of_each_host(tpu_api: World) -> None:
    (offer,) = sold("v5p-64")
    assert (offer.hosts, offer.vcpus, offer.memory_gib, offer.disk_gib) == (8, 208, 448, 100)
    assert offer.accelerator == parse("v5p-64")
    assert offer.region == "us-east5"
    (spot,) = sold("v5p-64", market="spot")
    assert spot.quota != offer.quota, "spot has a quota of its own"


def test_who_asks_for_bare_chips_gets_a_slice_of_one_host(tpu_api: World) -> None:
    assert {(each.instance_type, str(each.accelerator)) for each in sold("TPUv5e:4")} == {("v5litepod-4", "TPUv5e:4")}
    assert sold("TPUv5e:3") == []


def test_only_zones_that_are_asked_for_are_looked_at(tpu_api: World) -> None:
    assert {each.zone for each in sold("v6e-8", zones=("us-east5-b", "us-central1-f"))} == {"us-east5-b"}
    assert {each.zone for each in sold("v6e-8", regions=("europe-*",))} == {"europe-west4-a"}
    looked = {each.by["zone"] for each in tpu_api.calls("GET acceleratorTypes")}
    assert looked == {"us-east5-b", "europe-west4-a", "europe-west4-b"}


def test_who_asks_for_no_tpu_asks_nothing(tpu_api: World) -> None:
    assert sold("H100:8") == sold() == []
    assert tpu_api.journal == []


def test_what_the_api_does_not_have_is_not_asked_for(tpu_api: World) -> None:
    assert sold("tpu7x-8") == []
    assert tpu_api.journal == []
    assert sold("tpu7x-8", "v6e-8")
    with pytest.raises(UnknownAccelerator, match="v5p-12"):
        parse("v5p-12")
    with pytest.raises(UsageError, match="no TPU v5p slice has 8x8x9"):
        sky.accelerators.TPU("v5p", topology="8x8x9")


KINDS = [kind for kind, each in tables.slices().items() if each.generation != "tpu7x"]


@pytest.mark.slow
def test_every_slice_there_is_can_be_asked_for(tpu_api: World) -> None:
    """Each by one create, which the API looks at closely."""
    driver = backend()
    for number, kind in enumerate(KINDS):
        zone = next(zone for zone in wares.zones() if any(each.type == kind for each in wares.types(zone)))
        need = Need(accelerators=(parse(kind),))
        region = next(iter(_catalog.regions(need, Rates({}))))
        [offer] = _catalog.offers(f"{region}-x", [kind], need, Rates({}), ends_itself=False)
        assert driver._queued(replace(offer, zone=zone), order(number * 10000), [number * 10000]) is not None
    assert {each.kind for each in tpu_api.queued.values()} == {*KINDS}
    assert len(KINDS) > 130


# --- what is asked -------------------------------------------------------------------------------------------


def asked(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """The queued resource of the last create, and its node."""
    told = world.calls("POST queuedResources")[-1].body
    return told, told["tpu"]["nodeSpec"][0]["node"]


def test_a_queued_resource_says_how_long_it_may_wait_and_what_its_hosts_are_told(tpu_api: World) -> None:
    (offer,) = sold("v5p-16")
    backend(queue=600.0, subnetwork="inner").launch(offer, order(0, 1))
    told, node = asked(tpu_api)
    until = datetime.fromisoformat(told["queueingPolicy"]["validUntilTime"])
    assert 595 < (until - datetime.now(UTC)).total_seconds() < 615
    assert "guaranteed" in told
    assert "spot" not in told
    assert node["acceleratorType"] == "v5p-16"
    assert node["runtimeVersion"] == "v2-alpha-tpuv5"
    assert (node["networkConfig"]["network"], node["networkConfig"]["subnetwork"]) == ("default", "inner")
    assert node["metadata"]["ssh-keys"] == f"ubuntu:{Keys.of('train').public}"
    assert "shutdown -P now" in node["metadata"]["startup-script"]
    assert node["serviceAccount"]["scope"] == [f"https://www.googleapis.com/auth/{each}" for each in SCOPES]
    assert "email" not in node["serviceAccount"], "Google's own choice, which can do no more than these"
    assert backend().instances()[0].until is not None


def test_spot_and_a_reservation_and_an_account_are_asked_for(tpu_api: World) -> None:
    (spot,) = sold("v5p-16", market="spot")
    backend(reservation="ours").launch(spot, order(0, 1))
    told, node = asked(tpu_api)
    assert "spot" in told
    assert "reservationName" not in told, "a reservation has no spot market"
    assert node["schedulingConfig"] == {"spot": True}
    account = "runner@lab-project.iam.gserviceaccount.com"
    (offer,) = sold("v5p-16", service_account=account)
    assert offer.ends_itself is True
    backend(reservation="ours", service_account=account).launch(offer, order(2, 3))
    told, node = asked(tpu_api)
    assert told["reservationName"].endswith("us-east5-a/reservations/ours")
    assert node["serviceAccount"] == {"email": account, "scope": [google.SCOPE]}
    (name,) = {each.slice for each in backend().instances() if each.node >= 2}
    assert f"queuedResources/{name}?force=true" in node["metadata"]["startup-script"]
    assert "-X DELETE" in node["metadata"]["startup-script"]


def test_one_order_has_one_id_of_its_request_and_another_has_another(tpu_api: World) -> None:
    (offer,) = sold("v5p-16")
    for each in (order(0, 1), order(0, 1), order(2, 3)):
        backend().launch(offer, each)
    first, again, other = (each.query["requestId"] for each in tpu_api.calls("POST queuedResources"))
    assert first == again != other
    assert len(tpu_api.queued) == 2


def test_what_is_there_under_the_same_name_is_the_same(tpu_api: World) -> None:
    """A server may forget the ids of requests."""
    (offer,) = sold("v5p-16")
    backend().launch(offer, order(0, 1))
    tpu_api._requests.clear()
    assert [each.node for each in backend().launch(offer, order(0, 1))] == [0, 1]
    assert len(tpu_api.queued) == 1


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["failed", "operation"])
@pytest.mark.parametrize("status", ["RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE"])
def test_a_slice_that_failed_for_a_passing_reason_is_not_waited_for(tpu_api: World, how: str, status: str) -> None:
    """Its state is final: asking again would find the same, for half an hour."""
    (offer,) = sold("v5p-16")
    tpu_api.doom(how, status, "The valid until time of the queued resource has passed.")
    with pytest.raises(CapacityError, match=r"until time .* could not make it: try another zone"):
        backend().launch(offer, order(0, 1))
    assert tpu_api.left() == {}


@pytest.mark.parametrize("how", ["failed", "operation"])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (world_of.NO_CAPACITY, CapacityError),
        (
            "Insufficient reserved capacity. Contact customer support to increase your reservation. [EID: 0x1]",
            CapacityError,
        ),
        (world_of.NO_QUOTA, QuotaError),
        (
            "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 in region x.",
            QuotaError,
        ),
    ],
)
def test_what_is_refused_only_after_it_was_accepted_is_told_apart_and_leaves_nothing(
    tpu_api: World, how: str, text: str, kind: type[ProviderError]
) -> None:
    (offer,) = sold("v5p-16")
    tpu_api.doom(how, message=text)
    with pytest.raises(kind, match=re.escape(text.format(zone="us-east5-a"))) as refused:
        backend().launch(offer, order(0, 1))
    assert type(refused.value) is kind
    assert tpu_api.left() == {}


def test_slices_that_must_reach_each_other_come_all_or_none_also_where_one_fails_late(tpu_api: World) -> None:
    (offer,) = sold("v5p-16")
    gang = order(*range(4), need=replace(V5P_16, private_network=True))
    tpu_api.capacity(1, "v5p-16")
    with pytest.raises(CapacityError):
        backend().launch(offer, gang)
    assert tpu_api.left() == {}


def test_a_slice_that_waits_for_chips_is_starting_and_is_given_up_when_its_time_is_over(tpu_api: World) -> None:
    tpu_api.waits = True
    tpu_api.capacity(0)
    (offer,) = sold("v5p-16")
    launched = backend(queue=1.0).launch(offer, order(0, 1))
    assert {(each.state, each.region) for each in backend().instances()} == {("starting", offer.zone)}
    with pytest.raises(CapacityError, match=r"GCP\(queue=SECONDS\)|valid until"):
        backend(queue=1.0).access(launched[0])
    backend().terminate(launched)
    assert tpu_api.left() == {}


def test_a_queued_resource_nobody_asks_for_any_more_fails_by_itself(tpu_api: World) -> None:
    tpu_api.waits = True
    tpu_api.capacity(0)
    (offer,) = sold("v5p-16")
    backend(queue=1.0).launch(offer, order(0, 1))
    tpu_api.clock.advance(30)
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"FAILED"})
    assert {each.state for each in backend().instances(pool="train")} == {"ending"}, (
        "it holds quota, and is to be deleted"
    )
    backend().terminate(backend().instances(pool="train"))
    assert tpu_api.left() == {}


# --- what there is -------------------------------------------------------------------------------------------


def test_a_place_that_does_not_answer_is_no_place_where_nothing_is(tpu_api: World) -> None:
    tpu_api.unreachable = ["us-east5-a"]
    with pytest.raises(NoAnswer, match="no answer came from us-east5-a"):
        backend().instances()


def test_what_was_taken_back_is_ending_until_it_is_deleted(tpu_api: World) -> None:
    (spot,) = sold("v5p-16", market="spot")
    launched = backend().launch(spot, order(0, 1))
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"ACTIVE"})
    assert {each.state for each in backend().instances()} == {"running"}
    tpu_api.take(launched[0].id)
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"SUSPENDED"})
    assert [(each.node, each.state) for each in backend().instances()] == [(0, "ending"), (1, "ending")]
    with pytest.raises(CapacityError, match="took the slice or machine back"):
        backend()._ready("us-east5-a", launched[0].slice)
    backend().terminate(launched[:1])
    assert tpu_api.left() == {}


def test_others_slices_are_let_be(tpu_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (offer,) = sold("v5p-16")
    with monkeypatch.context() as others:
        others.setattr(tags, "owner", lambda: "somebody@else")
        backend().launch(offer, order(0, 1))
    assert backend().instances() == backend().instances(pool="train") == []


def test_a_slice_can_be_ended_while_it_is_made(tpu_api: World) -> None:
    """It is refused for its state at first."""
    (offer,) = sold("v5p-16")
    launched = backend().launch(offer, order(0, 1))
    tpu_api.refuse("DELETE queuedResource", "FAILED_PRECONDITION", "a node of it is being created", times=2)
    backend().terminate(launched)
    assert tpu_api.left() == {}


@pytest.mark.parametrize("action", ["DELETE queuedResource", "GET queuedResource", "GET node"])
def test_an_end_that_google_does_not_answer_at_once_is_asked_for_again(tpu_api: World, action: str) -> None:
    (offer,) = sold("v5p-16")
    launched = backend().launch(offer, order(0, 1))
    tpu_api.refuse(action, "UNAVAILABLE", "The service is currently unavailable.", times=2)
    backend().terminate(launched)
    assert tpu_api.left() == {}


def test_labels_of_many_hosts_fit(tpu_api: World) -> None:
    (offer,) = sold("v5p-12288")
    launched = backend().launch(offer, order(*range(5000, 5000 + offer.hosts), pool="x" * 40))
    found = backend().instances(pool="x" * 40)
    assert [each.node for each in found] == [each.node for each in launched]
    assert len({each.id for each in found}) == 1536


# --- both APIs -----------------------------------------------------------------------------------------------


def test_an_api_that_is_not_enabled_does_not_stop_the_other(tpu_api: World) -> None:
    gcp = sky.GCP(ssh_from="203.0.113.7")
    (offer,) = gcp.offers(V5P_16)
    with pytest.warns(RuntimeWarning, match="rules of the network default decide.*enable the API"):
        launched = gcp.launch(offer, order(0, 1))
    assert {each.id for each in gcp.instances()} == {each.id for each in launched}
    assert gcp.leftovers() == []
    gcp.terminate(launched)
    assert tpu_api.left() == {}


def test_hosts_are_behind_firewall_rules_of_their_pool_which_last_as_long_as_they_do(
    gce_api: GCE, tpu_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", gce_api.environment[COMPUTE])
    gcp = sky.GCP(ssh_from="203.0.113.7")
    (offer,) = gcp.offers(V5P_16)
    launched = gcp.launch(offer, order(0, 1))
    _, node = asked(tpu_api)
    assert {tag for rule in gce_api.firewalls.values() for tag in rule["targetTags"]} == {*node["tags"]}
    assert any(rule.get("sourceTags") == node["tags"] for rule in gce_api.firewalls.values()), "hosts reach each other"
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"ACTIVE"})
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=5)
    gcp.renew("train", later)
    assert {each.until for each in gcp.leftovers(pool="train")} == {later}
    gcp.terminate(launched)
    gcp.tidy(gcp.leftovers(pool="train"))
    assert (gce_api.left(), tpu_api.left()) == ({}, {})


@pytest.mark.parametrize("queue", [-1, 1e9, "10m", None])
def test_a_time_to_wait_that_cannot_be_meant_is_refused(queue: Any) -> None:
    with pytest.raises(UsageError, match=r"queue must be a number"):
        sky.GCP(queue=queue)


def test_an_end_that_is_refused_for_a_state_keeps_googles_words(
    tpu_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tpu, "ending", 0.5)
    (offer,) = sold("v5p-16")
    launched = backend().launch(offer, order(0, 1))
    tpu_api.refuse("DELETE queuedResource", "FAILED_PRECONDITION", "a node of it is being created", times=None)
    with pytest.raises(StillRunning, match="a node of it is being created"):
        backend().terminate(launched)


def test_an_api_that_is_not_enabled_is_no_fault_of_who_rents_no_slices(gce_api: GCE) -> None:
    found = {each.what: each for each in sky.GCP(ssh_from="203.0.113.7").check()}
    assert found["Cloud TPU: zones"].good
    assert "not enabled: the API of Cloud TPU" in found["Cloud TPU: zones"].text


def test_check_says_what_ends_a_slice(tpu_api: World) -> None:
    found = {each.what: each for each in backend().check()}
    assert found["Cloud TPU: zones"].text == str(len(wares.zones()))
    assert "skypool gc --yes" in found["Cloud TPU: end of slices"].text
    own = {each.what: each for each in backend(service_account="a@b.iam.gserviceaccount.com").check()}
    assert "deletes itself when its lease is over" in own["Cloud TPU: end of slices"].text


# --- on machines ---------------------------------------------------------------------------------------------


class TestTpuMachines(OnMachines):
    """What of the contract a machine is needed for."""

    slices = DriverContract.slices
    test_interruption = DriverContract.test_an_interruption_is_told_on_the_machine
    test_pool: Any = DriverContract.test_a_pool_has_a_node_for_each_host_of_its_slices

    @pytest.fixture
    def driver(self, tpu: World) -> Tpu:
        return backend()

    @pytest.fixture
    def control(self, tpu: World) -> Strings:
        return Strings(tpu)

    need, slice_need = TestTpuCalls.need, TestTpuCalls.slice_need
