"""What is odd about TPU7x, which Compute Engine has: single machines and managed instance groups; and the contract."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import skypool as sky
from skypool.accelerators import parse, tables
from skypool.drivers import tags
from skypool.errors import AccessError, CapacityError, ProviderError, QuotaError, StillRunning, UsageError
from skypool.model import Instance, Need, Offer, Order
from skypool.testing import DriverContract
from skypool.wire.keys import Keys
from skypool_gcp import GCP, list_prices, tpu7x
from skypool_gcp import _api as google
from skypool_gcp.compute import Compute
from skypool_gcp.tpu7x import Groups
from tests.lab import gce_wares as wares
from tests.lab.billing import Billing
from tests.lab.cloud import Request
from tests.lab.gce import GCE as World
from tests.lab.gce_groups import WAITING
from tests.providers.test_gcp_compute import CODES
from tests.providers.test_gcp_compute import Strings as Single

pytestmark = pytest.mark.needs("openssh")

SINGLE, SLICE = (Need(accelerators=(parse(each),)) for each in ("tpu7x-8", "tpu7x-16"))
RATES = list_prices.Rates({"tpu7x": {("us-central1", "on-demand"): 12.0, ("us-central1", "spot"): 6.0}}, "2026-11-22")
KINDS = [each for each in tables.slices().values() if each.generation == "tpu7x"]
ROBOT = "robot@lab-project.iam.gserviceaccount.com"


@pytest.fixture(autouse=True)
def _priced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's catalogue has a price, and is read by one test."""
    if "catalogue" not in request.node.name:
        monkeypatch.setattr(list_prices, "rates", lambda *_, **__: RATES)
    for kind in (Groups, Compute):
        monkeypatch.setattr(kind, "ending", 3.0)


def gcp(**settings: Any) -> GCP:
    return GCP(**{"ssh_from": "203.0.113.7", "queue": 0.0, **settings})


def backend() -> Groups:
    """The back end of slices alone."""
    return Groups(gcp()._apis[0].settings)


def sold(kind: str, market: Any = "on-demand", **settings: Any) -> list[Offer]:
    return list(gcp(**settings).offers(Need(accelerators=(parse(kind),), market=market)))


def order(*nodes: int, pool: str = "train", **more: Any) -> Order:
    until = datetime.now(UTC) + timedelta(seconds=720)
    given: dict[str, Any] = {
        "need": SLICE,
        "until": until,
        "token": "0011223344556677-0",
        **more,
    }
    return Order(pool=pool, nodes=nodes, **given)


class Strings(Single):
    """The contract's control of the lab's Compute Engine, where an offer may be a slice."""

    def stock_out(self, offer: Offer, left: int) -> None:
        kind = offer.instance_type if offer.hosts > 1 else offer.detail["machine"].machine_type
        self.world.capacity(left, kind, offer.zone, offer.market)

    def kill(self, instance: Instance) -> None:
        self.world.vanish(self.world.groups.machine(instance.id))


@pytest.mark.slow
class TestGroupCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, gce_api: World) -> GCP:
        return gcp()

    @pytest.fixture
    def control(self, gce_api: World) -> Strings:
        return Strings(gce_api)

    @pytest.fixture
    def need(self) -> Need:
        return SINGLE

    @pytest.fixture
    def slice_need(self) -> Need:
        return SLICE


class TestSliceCalls:
    """Those parts of it that are about slices."""

    real, patience, quick, several = False, 30.0, 30.0, False
    trial, slices = DriverContract.trial, DriverContract.slices
    test_order = DriverContract.test_a_slice_comes_with_all_its_hosts_in_order
    test_stock = DriverContract.test_launch_with_little_stock_gives_whole_slices
    test_end = DriverContract.test_a_slice_ends_as_a_whole_whichever_host_is_named
    driver, control = TestGroupCalls.driver, TestGroupCalls.control
    need, slice_need = TestGroupCalls.need, TestGroupCalls.slice_need


# --- what is sold, and asked ---------------------------------------------------------------------------------


def test_every_row_of_the_table_becomes_what_the_api_accepts(gce_api: World) -> None:
    """As Google's own client puts it; the API looks at it closely, and then has no room for slices."""
    gce_api.capacity(0, "tpu7x-[0-9]*")
    every = list(gcp().offers(Need(accelerators=tuple(parse(each.type) for each in KINDS))))
    for number, kind in enumerate(KINDS):
        offers = [each for each in every if each.instance_type == kind.type and each.market == "on-demand"]
        assert {(each.zone, each.hosts) for each in offers} == {(zone, kind.vms) for zone in wares.TPUS}
        asked = order(*range(kind.vms), token=f"0011223344556677-{number}")
        if kind.vms == 1:
            gcp().launch(offers[0], asked)
        else:
            assert backend()._queued(offers[0], asked, asked.nodes) is not None
    gce_api.wait(lambda: len(gce_api.groups.there) == 9)
    assert {each.kind for each in gce_api.groups.there.values()} == {each.type for each in KINDS if each.vms > 1}
    topologies = {each["workloadPolicy"]["acceleratorTopology"] for each in gce_api.placements.values()}
    assert topologies == {each.topology for each in KINDS if each.vms > 1}
    assert {each.kind for each in gce_api.rentals.values()} == {"tpu7x-standard-1t", "tpu7x-standard-4t"}


def test_a_slice_costs_what_all_its_chips_disks_and_addresses_do(gce_api: World) -> None:
    [slice] = [each for each in sold("tpu7x-16") if each.zone == "us-central1-c"]
    [host] = [each for each in sold("TPU7x:4", "spot") if each.zone == "us-central1-c"]
    disk = 120 * 0.10 / 730
    assert slice.usd_per_hour == pytest.approx(8 * 12.0 + 2 * (disk + 0.005))
    assert host.usd_per_hour == pytest.approx(4 * 6.0 + disk + 0.0025)
    assert (slice.hosts, slice.vcpus, slice.memory_gib) == (2, 224, 960)
    assert (str(slice.accelerator), str(host.accelerator)) == (str(parse("tpu7x-16")), "TPU7x:4")
    assert str(slice.price_source) == "price as of 2026-11-22"


def test_the_price_of_a_chip_is_that_of_googles_catalogue(gce_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with Billing() as catalogue:
        for name, value in catalogue.environment.items():
            monkeypatch.setenv(name, value)
        [slice] = [each for each in sold("tpu7x-32") if each.zone == "us-central1-c"]
        assert slice.usd_per_hour == pytest.approx(16 * 12.0 + 4 * (120 * 0.10 / 730 + 0.005))
        assert str(slice.price_source).startswith("price as of 20")


def test_what_has_no_price_is_not_sold_and_why_is_said(gce_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_prices, "rates", lambda *_, **__: list_prices.Rates({}, why="the API is not enabled"))
    with pytest.raises(UsageError, match=r"tpu7x-16 cannot be offered.*the API is not enabled.*enable cloudbilling"):
        sold("tpu7x-16")
    assert sold("L4"), "others are"


def test_a_template_has_what_a_machine_has_and_a_group_makes_all_at_once_or_none(gce_api: World) -> None:
    gce_api.networks["default"].subnetworks.add(("us-central1", "inner"))
    offer = sold("tpu7x-16", "spot", subnetwork="inner", service_account=ROBOT)[0]
    gcp(subnetwork="inner", service_account=ROBOT).launch(offer, order(0, 1, lifetime=3600.0))
    [template], [group] = gce_api.groups.templates.values(), gce_api.groups.there.values()
    properties = template["properties"]
    assert (properties["machineType"], properties["scheduling"]["provisioningModel"]) == ("tpu7x-standard-4t", "SPOT")
    assert properties["scheduling"]["maxRunDuration"]["seconds"] == "3600"
    assert properties["scheduling"]["instanceTerminationAction"] == "DELETE"
    [nic], [disk] = properties["networkInterfaces"], properties["disks"]
    assert nic["subnetwork"] == "projects/lab-project/regions/us-central1/subnetworks/inner"
    assert disk["initializeParams"]["diskType"] == "hyperdisk-balanced"
    assert "ubuntu-accel-2404-amd64-tpu-tpu7x" in disk["initializeParams"]["sourceImage"]
    assert properties["serviceAccounts"][0]["email"] == ROBOT
    told = {each["key"]: each["value"] for each in properties["metadata"]["items"]}
    assert f"/instanceGroupManagers/{group.name}" in told["startup-script"], "the whole slice ends itself"
    assert told["ssh-keys"] == f"ubuntu:{Keys.of('train').public}"
    assert group.told["targetSizePolicy"] == {"mode": "BULK"}
    assert group.told["instanceLifecyclePolicy"] == {"defaultActionOnFailure": "DO_NOTHING"}


def test_hosts_are_in_the_order_in_which_compute_engine_numbers_them(gce_api: World) -> None:
    driver, offer = gcp(), sold("tpu7x-16")[0]
    made = driver.launch(offer, order(0, 1))
    gce_api.wait(lambda: {each.state for each in gce_api.rentals.values()} == {"RUNNING"})
    [group] = gce_api.groups.there.values()
    first, second = (gce_api.rentals[each] for each in group.hosts)
    assert first.id.endswith("-w-002"), "names say nothing"
    access = [driver.access(each) for each in made]
    assert [each.env["TPU_WORKER_ID"] for each in access] == ["0", "1"]
    assert [each.transport.host for each in access] == [first.ip, second.ip]  # type: ignore[attr-defined]  # it is ssh
    names = {(each.env["TPU_ACCELERATOR_TYPE"], each.env["TPU_TOPOLOGY"]) for each in access}
    assert names == {("tpu7x-16", "2x2x2")}
    assert {len(each.env["TPU_WORKER_HOSTNAMES"].split(",")) for each in access} == {2}


def test_hosts_without_numbers_are_in_the_order_of_their_names_and_told_none(gce_api: World) -> None:
    driver, offer = gcp(), sold("tpu7x-16")[0]
    made = driver.launch(offer, order(0, 1))
    gce_api.wait(lambda: {each.state for each in gce_api.rentals.values()} == {"RUNNING"})
    for each in gce_api.rentals.values():
        each.told["metadata"]["items"] = [one for one in each.told["metadata"]["items"] if one["key"] != "tpu-env"]
    access = [driver.access(each) for each in made]
    assert [each.transport.host for each in access] == [gce_api.rentals[name].ip for name in sorted(gce_api.rentals)]  # type: ignore[attr-defined]  # it is ssh
    assert [each.env for each in access] == [{}, {}], "libtpu asks the metadata itself"


def test_a_machine_that_is_a_slice_is_told_so(gce_api: World) -> None:
    driver = gcp()
    [made] = driver.launch(sold("tpu7x-2")[0], order(0, need=SINGLE))
    env = driver.access(made).env
    assert (env["TPU_ACCELERATOR_TYPE"], env["TPU_TOPOLOGY"], env["TPU_WORKER_ID"]) == ("tpu7x-2", "1x1x1", "0")


# --- refusals ------------------------------------------------------------------------------------------------


def test_a_slice_there_is_no_room_for_waits_as_long_as_it_may(gce_api: World) -> None:
    offer = sold("tpu7x-16")[0]
    gce_api.capacity(0, "tpu7x-16")
    patient = gcp(queue=60.0)
    made = patient.launch(offer, order(0, 1))
    assert {each.state for each in patient.instances()} == {"starting"}
    with pytest.raises(CapacityError, match="does not have enough resources"):
        gcp().access(made[0])
    gce_api.capacity(None, "tpu7x-16")
    assert patient.access(made[0]).env["TPU_WORKER_ID"] == "0", "it came"
    patient.terminate(made)
    assert gce_api.groups.there == {}


@pytest.mark.parametrize(("code", "kind"), [("QUOTA_EXCEEDED", QuotaError), (WAITING, CapacityError)])
def test_what_a_group_says_is_told_apart_and_the_group_goes(
    gce_api: World, code: str, kind: type[ProviderError]
) -> None:
    offer = sold("tpu7x-16")[0]
    gce_api.doom(403, code, "it was not to be")
    with pytest.raises(kind, match="it was not to be"):
        gcp().launch(offer, order(0, 1))
    assert gce_api.groups.there == {}


@pytest.mark.parametrize("action", ["POST resourcePolicies", "POST templates", "POST groups"])
def test_what_is_refused_leaves_nothing_that_is_not_found(gce_api: World, action: str) -> None:
    driver, offer = gcp(), sold("tpu7x-16")[0]
    gce_api.refuse(action, *CODES[AccessError])
    with pytest.raises(AccessError):
        driver.launch(offer, order(0, 1))
    driver.tidy(driver.leftovers(pool="train"))
    assert gce_api.left() == {}


@pytest.mark.parametrize("action", ["POST resourcePolicies", "POST templates", "POST groups"])
def test_what_was_made_and_never_told_is_found(gce_api: World, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """As whoever was killed then leaves it."""
    monkeypatch.setattr(tpu7x, "_MADE", 0.5)
    driver, offer = gcp(), sold("tpu7x-16")[0]
    gce_api.drop(action, times=None)
    with pytest.raises(ProviderError):
        backend()._queued(offer, order(0, 1), [0, 1])
    gce_api.heal()
    gce_api.wait(lambda: all(each.status == "DONE" for each in gce_api.operations.values()))
    driver.terminate(driver.instances(pool="train"))
    driver.tidy(driver.leftovers(pool="train"))
    assert gce_api.left() == {}


@pytest.mark.slow
def test_whichever_call_is_the_last_one_what_was_made_is_found(gce_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on there is no answer; somebody else collects."""

    def once(do: Callable[[], Any], *_: object) -> Any:
        return do()

    for where in ("skypool.drivers.retry.patiently", "skypool_gcp.compute._client.patiently"):
        monkeypatch.setattr(where, once)
    monkeypatch.setattr(Groups, "ending", 0.1)
    driver, offer, last = gcp(), sold("tpu7x-16")[0], 0
    for number in itertools.count(1):
        last = len(gce_api.journal) + number

        def silent(call: Request, moment: str, last: int = last) -> None:
            gce_api.dark = gce_api.dark or (call.number >= last and moment == "after")

        gce_api.on_call = silent
        answered = _launched(driver, offer, order(0, 1, token=f"0011223344556677-{number}"))
        gce_api.on_call, gce_api.dark = (lambda call, moment: None), False
        gce_api.wait(lambda: all(each.status == "DONE" for each in gce_api.operations.values()))
        monkeypatch.setattr(Groups, "ending", 10.0)
        driver.terminate(driver.instances(pool="train"))
        monkeypatch.setattr(Groups, "ending", 0.1)
        driver.tidy(driver.leftovers(pool="train"))
        assert gce_api.left() == {}, f"after call {number}"
        if answered:
            break
    assert number > 10


def _launched(driver: GCP, offer: Offer, placed: Order) -> bool:
    try:
        return bool(driver.launch(offer, placed))
    except (ProviderError, StillRunning):
        return False


# --- what there is -------------------------------------------------------------------------------------------


def test_a_host_that_is_lost_is_the_end_of_all(gce_api: World) -> None:
    driver = gcp()
    made = driver.launch(sold("tpu7x-16")[0], order(0, 1))
    gce_api.wait(lambda: {each.state for each in driver.instances()} == {"running"})
    gce_api.off(gce_api.rentals[gce_api.groups.machine(made[1].id)])
    assert [(each.node, each.state) for each in driver.instances()] == [(0, "ending"), (1, "ending")]
    with pytest.raises(CapacityError, match=r"the status of its host .* is TERMINATED"):
        driver.access(made[0])
    driver.terminate(made[:1])
    assert gce_api.count()["instances"] == 0


def test_a_host_that_is_gone_is_the_end_of_all_once_its_group_is_not_new(gce_api: World) -> None:
    driver = gcp()
    made = driver.launch(sold("tpu7x-16")[0], order(0, 1))
    gce_api.wait(lambda: {each.state for each in driver.instances()} == {"running"})
    gce_api.vanish(gce_api.groups.machine(made[0].id))
    gce_api.wait(lambda: len(gce_api.rentals) == 1)
    assert {each.state for each in driver.instances()} == {"starting"}
    [group] = gce_api.groups.there.values()
    group.created -= 100
    assert {each.state for each in driver.instances()} == {"ending"}


def test_machines_without_their_group_are_found_and_ended(gce_api: World) -> None:
    driver = gcp()
    driver.launch(sold("tpu7x-16")[0], order(0, 1))
    gce_api.groups.there.clear()
    found = driver.instances(pool="train")
    assert [(each.node, each.state) for each in found] == [(0, "ending"), (1, "ending")]
    driver.terminate(found)
    driver.tidy(driver.leftovers())
    assert gce_api.left() == {}


def test_labels_of_all_hosts_are_renewed_and_what_is_shared_is_needed_as_long(gce_api: World) -> None:
    driver, later = gcp(), datetime.now(UTC).replace(microsecond=0) + timedelta(hours=5)
    made = driver.launch(sold("tpu7x-16")[0], order(0, 1))
    driver.renew("train", later)
    assert {each.until for each in driver.instances()} == {later}
    assert {each.labels[tags.UNTIL] for each in gce_api.rentals.values()} == set(
        google.labels({tags.UNTIL: tags.stamp(later)}).values()
    )
    assert {each.kind for each in driver.leftovers()} == {"firewall", "placement", "template"}
    assert {each.until for each in driver.leftovers()} == {later}
    driver.terminate(made)


def test_machines_and_hosts_of_slices_are_found_and_renewed_with_one_list_each(gce_api: World) -> None:
    driver, later = gcp(), datetime.now(UTC).replace(microsecond=0) + timedelta(hours=5)
    driver.launch(sold("tpu7x-16")[0], order(0, 1))
    driver.launch(sold("tpu7x-8")[0], order(2, need=SINGLE, token="8899aabbccddeeff-0"))
    before = len(gce_api.calls("GET instances"))
    driver.renew("train", later)
    assert len(gce_api.calls("GET instances")) == before + 1
    found = driver.instances(pool="train")
    assert len(gce_api.calls("GET instances")) == before + 2
    assert {(each.node, each.detail["api"], bool(each.slice), each.until) for each in found} == {
        (0, "groups", True, later),
        (1, "groups", True, later),
        (2, "compute", False, later),
    }


def test_an_end_that_is_refused_keeps_googles_words(gce_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = gcp()
    made = driver.launch(sold("tpu7x-16")[0], order(0, 1))
    monkeypatch.setattr(Groups, "ending", 0.3)
    gce_api.refuse("DELETE group", 400, "resourceInUseByAnotherResource", "the group is busy with itself", times=None)
    with pytest.raises(StillRunning, match="the group is busy with itself") as still:
        driver.terminate(made)
    assert [*still.value.instances] == made
    gce_api.heal()
    monkeypatch.setattr(Groups, "ending", 3.0)
    driver.terminate(made)
    assert gce_api.groups.there == {}


def test_slices_that_must_reach_each_other_come_all_or_none(gce_api: World) -> None:
    offer, gang = sold("tpu7x-16")[0], order(*range(4), need=replace(SLICE, private_network=True))
    gce_api.capacity(1, "tpu7x-16")
    with pytest.raises(CapacityError):
        gcp().launch(offer, gang)
    assert gce_api.groups.there == {}


# --- on machines ---------------------------------------------------------------------------------------------


@pytest.mark.slow
class TestGroupMachines:
    """A pool whose nodes are the hosts of a group of two."""

    real, patience, quick, several = True, 60.0, 60.0, True
    trial, slices = DriverContract.trial, DriverContract.slices
    secrets, _needs_machines = DriverContract.secrets, DriverContract._needs_machines
    test_pool = DriverContract.test_a_pool_has_a_node_for_each_host_of_its_slices

    @pytest.fixture
    def driver(self, gce: World, monkeypatch: pytest.MonkeyPatch) -> GCP:
        for kind in (Groups, Compute):
            monkeypatch.setattr(kind, "ending", 60.0)
        return gcp(queue=60.0)

    @pytest.fixture
    def control(self, gce: World) -> Strings:
        return Strings(gce)

    need, slice_need = TestGroupCalls.need, TestGroupCalls.slice_need

    def test_each_node_is_the_worker_that_its_rank_says(self, driver: GCP) -> None:
        """As the metadata of the machine that it runs on has it, whatever its name is."""

        @sky.compute
        def worker() -> tuple[str | None, str]:
            import urllib.request as web

            base = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/tpu-env"
            with web.urlopen(web.Request(base, headers={"Metadata-Flavor": "Google"}), timeout=10) as told:
                said = told.read().decode()
            return os.environ.get("TPU_WORKER_ID"), said.partition("TPU_WORKER_ID: ")[2].strip().strip("'")

        with sky.ComputePool(driver, accelerator="tpu7x-16", console="off") as pool:
            assert worker() @ pool == [("0", "0"), ("1", "1")]
        assert driver.instances() == []
