"""What is odd about Compute Engine, against the lab's; and the contract."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from skypool.accelerators import parse
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
    UsageError,
)
from skypool.model import Finding, Instance, Need, Offer, Order
from skypool.testing import DriverContract
from skypool.wire.keys import Keys
from skypool_gcp import GCP, _api
from skypool_gcp._settings import Settings
from skypool_gcp.catalog.facts import FACTS
from skypool_gcp.compute import Compute
from tests.lab import gce_wares, prices, tpu
from tests.lab.billing import Billing
from tests.lab.gce import GCE as World
from tests.lab.gce import NO_ROOM, PROJECT
from tests.lab.gce_things import error
from tests.providers.on_machines import OnMachines
from tests.providers.strings import PagedStrings

pytestmark = pytest.mark.needs("openssh")

FORBIDDEN = "Required 'compute.instances.create' permission for 'projects/lab-project/zones/us-central1-a/instances/a'"
NO_QUOTA = "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally."
CODES: dict[type[ProviderError], tuple[int, str, str]] = {
    CredentialsError: (401, "authError", "Invalid Credentials"),
    AccessError: (403, "forbidden", FORBIDDEN),
    QuotaError: (403, "quotaExceeded", NO_QUOTA),
    RateLimitError: (403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries' and limit 'per minute'."),
}


class Strings(PagedStrings):
    """The contract's control of the lab's Compute Engine."""

    create = "POST instances"
    refusals = CODES

    def count(self) -> int:
        return len(self.world.machines())

    def refuse(self, kind: type[ProviderError]) -> bool:
        if kind is CapacityError:
            self.world.doom(503, "ZONE_RESOURCE_POOL_EXHAUSTED", NO_ROOM.format(zone="us-central1-a"))
        return kind is CapacityError or super().refuse(kind)

    def never_boot(self) -> None:
        self.world.ready = False

    def interrupt(self, instance: Instance) -> None:
        self.world.preempt(instance.id)


class TestComputeCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, gce_api: World, monkeypatch: pytest.MonkeyPatch) -> GCP:
        monkeypatch.setattr(Compute, "ending", 3.0)
        return GCP(ssh_from="203.0.113.7")

    @pytest.fixture
    def control(self, gce_api: World) -> Strings:
        return Strings(gce_api)

    @pytest.fixture
    def need(self) -> Need:
        return Need(vcpus=2)


# --- what is sold --------------------------------------------------------------------------------------------

L4, A100, H100, PRO = (Need(accelerators=(parse(each),)) for each in ("L4", "A100-40GB", "H100", "RTX_PRO_6000"))
UNTIL = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
ROBOT = "robot@lab-project.iam.gserviceaccount.com"


def gcp(**settings: Any) -> GCP:
    return GCP(**{"ssh_from": "203.0.113.7", **settings})


def sold(need: Need, **settings: Any) -> list[Offer]:
    return list(gcp(**settings).offers(need))


def best(need: Need = L4, **settings: Any) -> Offer:
    """The cheapest."""
    return min(sold(need, **settings), key=lambda offer: (offer.usd_per_hour, offer.zone))


def order(*nodes: int, token: str = "0123456789abcdef-1", pool: str = "train", **more: Any) -> Order:
    need = more.pop("need", L4)
    return Order(pool, token, nodes or (0,), need, until=UNTIL, **more)


def inserted(world: World, placed: Order, offer: Offer, **settings: Any) -> dict[str, Any]:
    """What the API was told of the last machine."""
    gcp(**settings).launch(offer, placed)
    body: dict[str, Any] = world.calls("POST instances")[-1].body
    return body


def test_the_price_of_every_offer_of_the_snapshot_is_that_with_its_disk_and_its_address(gce_api: World) -> None:
    """The lab's API has the types, and no prices, as the real one."""
    known = {(each.instance_type, each.region, each.market): each for each in prices.snapshot("gcp")}
    wanted = Need(accelerators=tuple(parse(each) for each in ("H100", "A100-40GB", "A100-80GB", "L4", "RTX_PRO_6000")))
    offers = {(each.instance_type, each.region, each.market): each for each in sold(replace(wanted, market="cheapest"))}
    assert {each for each in known if each not in offers} == {
        each for each in known if each[0] in FACTS["spot only"] and each[2] == "on-demand"
    }, "what is sold as spot alone has no other offer"
    for key in known.keys() & offers.keys():
        offer, row = offers[key], known[key]
        disk = {"us": 0.10, "northamerica": 0.11, "europe": 0.13}.get(offer.region.split("-")[0], 0.15)
        address = 0.0025 if offer.market == "spot" else 0.005
        assert offer.usd_per_hour == pytest.approx(row.usd_per_hour + 120 * disk / 730 + address, abs=2e-6)
        assert (offer.vcpus, offer.memory_gib) == (row.vcpus, row.memory_gib)
        assert offer.accelerator is not None
        assert row.accelerator is not None
        assert (offer.accelerator.name, offer.accelerator.count) == (row.accelerator.name, row.accelerator.count)
    assert len(known.keys() & offers.keys()) > 300


def test_a_machine_without_accelerators_is_the_smallest_that_is_enough(gce_api: World) -> None:
    assert best(Need()).instance_type == "e2-highcpu-2"
    assert best(Need(vcpus=3, memory_gib=9)).instance_type == "e2-standard-4"
    assert best(Need(vcpus=100)).instance_type == "n2-standard-128"
    assert sold(Need(accelerators=(parse("MI300X"),))) == []


def test_zones_and_regions_narrow_what_is_offered(gce_api: World) -> None:
    assert {each.zone for each in sold(L4, zones="us-east1-b")} == {"us-east1-b"}
    assert {each.region for each in sold(replace(L4, regions=("us-east1",)))} == {"us-east1"}
    assert {each.region.split("-")[0] for each in sold(replace(L4, regions=("europe-*",)))} == {"europe"}
    with pytest.raises(UsageError, match="us-east1-z is not a region that the account may use"):
        sold(L4, zones="us-east1-z")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"zones": "us-central1"}, "'us-central1-a'"),
        ({"project": "1234"}, "id and not the number"),
        ({"image": "ubuntu"}, "ubuntu-24.04"),
        ({"network": "a/b"}, "'default'"),
        ({"service_account": "robot"}, "gserviceaccount.com"),
        ({"ssh_from": "::1"}, "'::1' is an IPv6 address, but machines of Google Cloud get IPv4 addresses only"),
        ({"ssh_from": ["203.0.113.7", "2001:db8::/32"]}, "'2001:db8::/32' is an IPv6 address"),
        ({"ssh_from": "203.0.113"}, "203.0.113.7"),
        ({"networks": "rdma-sub-0"}, "'my-rdma-net/my-rdma-subnet-0'"),
        ({"networks": []}, "networks is an empty list"),
        ({"networks": ["a/b", "a/b"]}, "names a/b twice"),
        ({"networks": ["default/b"]}, "first interface is in the network default"),
        ({"network": "mine", "networks": "mine/b"}, "name another network"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_where_they_are_written(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        GCP(**settings)
    assert says in str(refused.value)


def test_a_reservation_is_the_only_thing_that_is_offered_where_one_is_named(gce_api: World) -> None:
    usual = best()
    kind = {"machineType": usual.instance_type}
    has: dict[str, Any] = {"count": "4", "inUseCount": "1", "instanceProperties": kind}
    gce_api.reservations["mine"] = {"name": "mine", "zone": f"x/zones/{usual.zone}", "specificReservation": has}
    (offer,) = sold(replace(L4, market="cheapest"), reservation="mine")
    assert (offer.zone, offer.instance_type) == (usual.zone, usual.instance_type)
    assert (offer.market, offer.available) == ("on-demand", True)
    told = inserted(gce_api, order(), offer, reservation="mine")["reservationAffinity"]
    assert (told["consumeReservationType"], told["values"]) == ("SPECIFIC_RESERVATION", ["mine"])
    with pytest.raises(ProviderError, match="gcloud compute reservations list"):
        sold(L4, reservation="other")


@pytest.mark.parametrize("dense", [False, True])
def test_a_machine_of_a_reservation_has_its_policies_and_its_local_ssds(gce_api: World, dense: bool) -> None:
    """Google refuses a reservation to a machine with another placement policy, such as one of the pool's own."""
    usual = best()
    policy = f"projects/{PROJECT}/regions/{usual.region}/resourcePolicies/near"
    gce_api.placements["near"] = {"name": "near"}
    ssds = [{"interface": "NVME", "diskSizeGb": "375"}] * 2
    kind = {"machineType": usual.instance_type, "localSsds": ssds}
    gce_api.reservations["mine"] = {
        "name": "mine",
        "zone": f"x/zones/{usual.zone}",
        "specificReservation": {"count": "4", "inUseCount": "0", "instanceProperties": kind},
        "resourcePolicies": {"placement": policy},
        **({"deploymentType": "DENSE"} if dense else {}),
    }
    (offer,) = sold(L4, reservation="mine")
    told = inserted(gce_api, order(0, 1, need=replace(L4, private_network=True)), offer, reservation="mine")
    assert told["resourcePolicies"] == [policy]
    assert [each["interface"] for each in told["disks"][1:]] == ["NVME", "NVME"]
    plan = told["scheduling"]
    assert plan["provisioningModel"] == ("RESERVATION_BOUND" if dense else "STANDARD")
    assert plan.get("instanceTerminationAction") == ("DELETE" if dense else None)
    assert [*gce_api.placements] == ["near"]


# --- what is asked -------------------------------------------------------------------------------------------


def test_a_gpu_machine_is_asked_for_as_google_takes_it(gce_api: World) -> None:
    told = inserted(gce_api, order(lifetime=3600.5), best())
    assert told["machineType"].endswith("/machineTypes/g2-standard-4")
    plan = told["scheduling"]
    assert (plan["provisioningModel"], plan["onHostMaintenance"], plan["automaticRestart"]) == (
        "STANDARD", "TERMINATE", False,
    )  # fmt: skip
    assert (plan["instanceTerminationAction"], plan["maxRunDuration"]) == ("DELETE", {"seconds": "3600"})
    about = {each["key"]: each["value"] for each in told["metadata"]["items"]}
    assert (about["enable-oslogin"], about["block-project-ssh-keys"]) == ("FALSE", "TRUE")
    assert about["ssh-keys"] == f"ubuntu:{Keys.of('train').public}"
    assert "LIFETIME=3720" in about["user-data"], "Google deletes it first, and its disk with it"
    (disk,) = told["disks"]
    assert (disk["autoDelete"], disk["initializeParams"]["diskSizeGb"]) == (True, "120")
    assert disk["initializeParams"]["sourceImage"].endswith("common-cu129-ubuntu-2404-nvidia-580-v20260626")
    assert disk["initializeParams"]["diskType"].endswith("pd-balanced")
    assert "serviceAccounts" not in told, "no rights of yours are put on a machine unless you say which"
    assert _api.said(told["labels"]) == tags.tags(order())


def test_an_image_family_that_google_has_ended_is_replaced_by_an_older_one_where_that_serves(
    gce_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {key: image for key, image in gce_wares.FAMILIES.items() if key[1] != gce_wares.DRIVEN}
    monkeypatch.setattr(gce_wares, "FAMILIES", left)
    (disk,) = inserted(gce_api, order(), best())["disks"]
    assert "nvidia-570" in disk["initializeParams"]["sourceImage"]
    with pytest.raises(ProviderError, match="nvidia-580"):  # an older driver does not know the card
        inserted(gce_api, order(token="abc-2", need=PRO), best(PRO))


def test_without_a_lifetime_nothing_is_said_that_google_refuses(gce_api: World) -> None:
    plan = inserted(gce_api, order(), best())["scheduling"]
    assert "maxRunDuration" not in plan
    assert "instanceTerminationAction" not in plan
    spot = inserted(gce_api, order(token="abc-2"), best(replace(L4, market="spot")))["scheduling"]
    assert (spot["provisioningModel"], spot["instanceTerminationAction"]) == ("SPOT", "DELETE")


def test_types_that_take_only_newer_disks_get_one(gce_api: World) -> None:
    disk = inserted(gce_api, order(need=PRO), best(PRO))["disks"][0]["initializeParams"]
    assert disk["diskType"].endswith("hyperdisk-balanced")


def test_a_service_account_is_given_where_one_is_named_and_the_machine_deletes_itself(gce_api: World) -> None:
    told = inserted(gce_api, order(), best(), service_account=ROBOT)
    assert told["serviceAccounts"] == [{"email": ROBOT, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}]
    (data,) = [each["value"] for each in told["metadata"]["items"] if each["key"] == "user-data"]
    assert f"/compute/v1/projects/{PROJECT}/zones/{best().zone}/instances/{told['name']}" in data


def test_nobody_but_who_may_log_in_reaches_a_machine(gce_api: World) -> None:
    told = inserted(gce_api, order(), best(), ssh_from=["203.0.113.7", "198.51.100.0/24"])
    rules = {each["priority"]: each for each in gce_api.firewalls.values()}
    assert sorted(rules) == [500, 501]
    assert rules[500]["sourceRanges"] == ["203.0.113.7/32", "198.51.100.0/24"]
    assert rules[500]["allowed"] == [{"IPProtocol": "tcp", "ports": ["22"]}]
    assert rules[501]["denied"] == [{"IPProtocol": "all"}]
    assert rules[501]["sourceRanges"] == ["0.0.0.0/0"]
    for each in rules.values():
        assert each["targetTags"] == told["tags"]["items"], "and the rules are about no other machine"


def test_machines_that_must_reach_each_other_are_let_in_and_placed_together(gce_api: World) -> None:
    need = replace(A100, private_network=True)
    told = inserted(gce_api, order(0, 1, need=need), best(need))
    (among,) = [each for each in gce_api.firewalls.values() if "sourceTags" in each]
    assert among["sourceTags"] == among["targetTags"] == told["tags"]["items"]
    (policy,) = gce_api.placements.values()
    assert policy["groupPlacementPolicy"] == {"collocation": "COLLOCATED"}
    assert [each.rpartition("/")[2] for each in told["resourcePolicies"]] == [policy["name"]]
    driver = gcp()
    driver.terminate(driver.instances(pool="train"))
    assert {each.kind for each in driver.leftovers(pool="train")} == {"firewall", "placement"}
    driver.tidy(driver.leftovers(pool="train"))
    assert gce_api.left() == {}
    plain = Need(vcpus=2, private_network=True)
    assert "resourcePolicies" not in inserted(gce_api, order(0, 1, need=plain, token="b-1"), best(plain)), "e2 has none"


def test_an_image_of_your_own_says_how_large_its_disk_is(gce_api: World) -> None:
    large = "projects/lab-project/global/images/family/large"
    told = inserted(gce_api, order(), best(image=large))["disks"][0]["initializeParams"]
    assert (told["sourceImage"].rpartition("/")[2], told["diskSizeGb"]) == ("large-v1", "500")
    with pytest.raises(ProviderError, match=r"there is no such image, "):
        gcp().launch(best(image=large.replace("large", "none")), order(token="a-2"))
    arm = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-arm64"
    with pytest.raises(UsageError, match=r"is for arm64, but g2-standard-4 is x86_64"):
        gcp().launch(best(image=arm), order(token="a-3"))
    assert "ubuntu-2204-lts" in best(replace(L4, bases={"gcp": "ubuntu-22.04"})).detail["machine"].image


# --- one order, some machines --------------------------------------------------------------------------------


def test_where_some_of_an_order_are_refused_the_others_get_the_first_ranks(gce_api: World) -> None:
    gce_api.doom(503, "ZONE_RESOURCE_POOL_EXHAUSTED", NO_ROOM.format(zone="a"))
    made = gcp().launch(best(), order(3, 5, 8))
    assert [each.node for each in made] == [3, 5]
    assert sorted(each.node for each in gcp().instances(pool="train")) == [3, 5]
    assert {each.id for each in gcp().instances(pool="train")} == {each.id for each in made}


def test_an_order_that_is_placed_again_asks_with_the_same_ids_and_names(gce_api: World) -> None:
    gce_api.drop("POST instances")
    offer = best()
    first, second = gcp().launch(offer, order(0, 1)), gcp().launch(offer, order(0, 1))
    assert [each.id for each in first] == [each.id for each in second]
    assert len({each.query["requestId"] for each in gce_api.calls("POST instances")}) == 2
    assert gce_api.count()["instances"] == 2


def test_what_an_order_rented_and_has_ended_already_is_no_machine(gce_api: World) -> None:
    offer = best()
    gcp().terminate(gcp().launch(offer, order()))
    with pytest.raises(CapacityError, match="ended already"):
        gcp().launch(offer, order())


def test_a_machine_that_is_switched_off_is_to_end_as_its_disk_is_billed(gce_api: World) -> None:
    (one,) = gcp().launch(best(), order())
    gce_api.wait(lambda: gce_api.rentals[one.id].state == "RUNNING")
    gce_api.off(gce_api.rentals[one.id])
    assert [each.state for each in gcp().instances(pool="train")] == ["ending"]
    with pytest.raises(CapacityError, match="its status is TERMINATED"):
        gcp().access(one)
    gcp().terminate(gcp().instances(pool="train"))
    assert gce_api.count()["instances"] == gce_api.count()["disks"] == 0


def test_a_spot_machine_that_is_taken_back_while_it_boots_is_out_of_stock(gce_api: World) -> None:
    """Google deletes it then."""
    (one,) = gcp().launch(best(replace(L4, market="spot")), order())
    gce_api.preempt(one.id, 0.0)
    gce_api.wait(lambda: gce_api.count()["instances"] == 0)
    with pytest.raises(CapacityError, match="it no longer exists"):
        gcp().access(one)


def test_a_machine_of_which_google_will_not_say_yet_whether_it_is_made_is_not_left_out(
    gce_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order comes again, and finds what there is."""
    monkeypatch.setattr("skypool_gcp.compute._client.patiently", lambda do, *_: do())
    offer = best()
    said = error(403, "rateLimitExceeded", "Quota exceeded for quota metric 'Read requests' and limit 'per minute'")
    gce_api.fail("GET operation", 403, said, when=lambda request: "/zones/" in request.path)
    with pytest.raises(RateLimitError):
        gcp().launch(offer, order(0, 1))
    assert [each.node for each in gcp().launch(offer, order(0, 1))] == [0, 1]
    assert gce_api.count()["instances"] == 2


def test_a_machine_whose_end_came_to_nothing_is_asked_to_end_again(
    gce_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call was answered with an operation, which did nothing."""
    monkeypatch.setattr(Compute, "ending", 30.0)
    monkeypatch.setattr("skypool_gcp.compute._AGAIN", 0.5)
    launched = gcp().launch(best(), order(0, 1))
    gce_api.undying(launched[0].id, 2)
    gcp().terminate(launched)
    assert gce_api.count()["instances"] == 0
    assert len([each for each in gce_api.calls("DELETE instance") if launched[1].id in each.path]) == 1


def test_to_renew_leaves_other_labels_as_they_are_and_does_not_mind_who_changes_them(gce_api: World) -> None:
    (one,) = gcp().launch(best(), order())
    rental = gce_api.rentals[one.id]
    rental.labels["team"] = "blue"
    gce_api.refuse("POST labels", 412, "conditionNotMet", "Labels fingerprint either invalid or have changed")
    gcp().renew("train", UNTIL + timedelta(hours=1))
    assert rental.labels["team"] == "blue"
    assert [each.until for each in gcp().instances(pool="train")] == [UNTIL + timedelta(hours=1)]


# --- both APIs -----------------------------------------------------------------------------------------------


def test_an_api_that_is_not_enabled_does_not_stop_the_other(gce_api: World) -> None:
    """Cloud TPU is not, in this project."""
    both = replace(L4, accelerators=(*L4.accelerators, parse("v5p-8")))
    assert {each.detail["api"] for each in sold(both)} == {"compute"}
    gcp().launch(best(), order())
    assert len(gcp().instances()) == 1


def test_what_may_not_be_looked_at_is_not_said_to_be_gone(gce_api: World) -> None:
    gcp().launch(best(), order())
    gce_api.refuse("GET instances", 403, "forbidden", "Required 'compute.instances.list' permission", times=None)
    with pytest.raises(AccessError, match=r"compute\.instances\.list"):
        gcp().instances()


def test_a_zone_that_lists_lack_is_no_zone_where_nothing_is(gce_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool_gcp.compute._client.patiently", lambda do, *_: do())
    (one,) = gcp().launch(best(), order())
    gce_api.undying(one.id, None)
    gce_api.unreachable = [one.region]
    with pytest.raises(NoAnswer, match=f"no answer came from zones/{one.region}"):
        gcp().instances(pool="train")
    with pytest.raises(StillRunning, match="no answer came from"):
        gcp().terminate([one])
    with pytest.warns(RuntimeWarning, match="offers may be missing: .* no answer came from"):
        others = {each.zone for each in sold(L4)}
    assert others
    assert one.region not in others


@pytest.mark.parametrize("code", ["UNREACHABLE", "PARTIAL_SUCCESS", "LIST_OVERHEAD_QUOTA_EXCEED"])
def test_a_list_that_says_that_it_lacks_results_proves_nothing(
    gce_api: World, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setattr("skypool_gcp.compute._client.patiently", lambda do, *_: do())
    (one,) = gcp().launch(best(), order())
    gce_api.undying(one.id, None)
    gce_api.warning = code
    says = "no answer came from a part of" if code == "UNREACHABLE" else f"may be incomplete: it has the warning {code}"
    with pytest.raises(ProviderError, match=says):
        gcp().instances(pool="train")
    with pytest.raises(ProviderError, match=says):
        gcp().leftovers(pool="train")
    with pytest.raises(StillRunning):
        gcp().terminate([one])
    gce_api.warning = "DEPRECATED_RESOURCE_USED"
    assert [each.id for each in gcp().instances(pool="train")] == [one.id]


def test_without_its_sdk_it_says_how_to_get_it(gce_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.compute_v1", None)
    _asked_anew()
    with pytest.raises(UsageError, match=r"pip install 'skypool\[gcp\]'"):
        list(Compute(_settings()).offers(L4))


def test_without_credentials_it_says_where_they_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(CredentialsError, match="gcloud auth application-default login"):
        gcp().instances()


@pytest.mark.parametrize("named", [True, False])
def test_a_login_that_was_renewed_serves_a_pool_that_began_with_the_old_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    file = tmp_path / "application_default_credentials.json"
    monkeypatch.setenv(*("GOOGLE_APPLICATION_CREDENTIALS", str(file)) if named else ("CLOUDSDK_CONFIG", str(tmp_path)))

    def login(token: str) -> None:
        about = {"client_id": "a", "client_secret": "b", "quota_project_id": PROJECT, "type": "authorized_user"}
        file.write_text(json.dumps({**about, "refresh_token": token}))

    login("old")
    assert _api.credentials("compute") is _api.credentials("compute")
    kept: Any = _api.credentials("compute")
    assert kept.refresh_token == "old"
    login("new one")
    renewed: Any = _api.credentials("compute")
    assert renewed.refresh_token == "new one"


def _settings() -> Settings:
    return Settings(PROJECT, None, "default", None, None, None, None, ("203.0.113.7",))


def _asked_anew() -> None:
    from skypool_gcp.compute import _client

    _client._client.cache_clear()


@given(st.dictionaries(st.from_regex(r"skypool-[a-z]{1,20}", fullmatch=True), st.text(max_size=300), max_size=6))
def test_what_labels_say_is_read_as_it_was_written(said: dict[str, str]) -> None:
    made = _api.labels(said)
    for key, text in made.items():
        assert len(key) <= 63
        assert len(text) <= 63
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert _api.said({**made, "team": "blue"}) == said


@given(st.lists(st.text(min_size=1, max_size=90), min_size=1, max_size=3))
def test_names_are_as_google_takes_them_and_differ(words: list[str]) -> None:
    name = _api.name(*words)
    assert len(name) <= 63
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name[-1] != "-"
    assert name != _api.name(*words, "x")


def test_the_role_is_one_that_google_takes() -> None:
    role = yaml.safe_load(gcp().policy())
    assert role["includedPermissions"] == sorted(set(role["includedPermissions"]))
    assert "compute.instances.delete" in role["includedPermissions"]
    # in the role of a project it would permit to act as any service account of the project, the owners' among them
    assert "iam.serviceAccounts.actAs" not in role["includedPermissions"]


def test_a_check_says_what_is_there(gce_api: World) -> None:
    def found() -> dict[str, Finding]:
        return {each.what: each for each in Compute(_settings()).check()}

    assert [each for each in found().values() if not each.good] == []
    assert found()["Compute Engine: credentials"].text == PROJECT
    assert {each.text for what, each in found().items() if "ubuntu-2404-lts" in what} == {
        "ubuntu-2404-noble-amd64-v20261118"
    }
    assert found()["Compute Engine: network default"].text.startswith("subnetwork default in all ")
    assert "GCP(networks=…) is not set" in found()["Compute Engine: networks between GPUs"].text
    assert "does not tell those of B200, H100" in found()["Compute Engine: quotas of GPUs"].text
    gce_api.quotas["GPUS_ALL_REGIONS"] = 0.0
    assert "iam-admin/quotas?project=lab-project" in found()["Compute Engine: quota GPUS_ALL_REGIONS"].advice
    assert gce_api.left() == {}


def test_a_check_tells_both_quotas_that_a_machine_with_a_lifetime_may_use(gce_api: World) -> None:
    gce_api.regional = {(region, each): 0.0 for region in gce_api._regions() for each in gce_wares.QUOTAS}
    gce_api.regional["us-central1", "PREEMPTIBLE_NVIDIA_T4_GPUS"] = 4.0
    (found,) = [each for each in Compute(_settings()).check() if each.what == "Compute Engine: quotas of GPUs"]
    assert found.good
    assert not found.open
    assert "T4: none (preemptible: up to 4 in 1 regions)" in found.text
    assert "machines with a lifetime may use either" in found.text
    gce_api.untold = {"us-central1"}
    (found,) = [each for each in Compute(_settings()).check() if each.what == "Compute Engine: quotas of GPUs"]
    assert "T4: none (preemptible: none)" in found.text
    assert "could not tell the quotas of us-central1" in found.text
    assert not found.open, "the quotas of that region may not be zero"


def test_a_check_tells_networks_quotas_and_types_that_do_not_fit_in_one_line_each(
    gce_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sold = {zone: dict(kinds) for zone, kinds in gce_wares.sold().items()}
    sold["us-central1-a"]["a9-highgpu-8g"] = gce_wares.Kind("a9-highgpu-8g", 8, 64, "nvidia-r900")
    monkeypatch.setattr(gce_wares, "sold", lambda: sold)
    gce_api.regional = {(region, each): 0.0 for region in gce_api._regions() for each in gce_wares.QUOTAS}
    gce_api.network("lab-net", "us-central1", "inner")
    checked = list(gcp(network="lab-net", subnetwork="inner").check())
    found = {each.what: each for each in checked if each.open or not each.good}
    told = {what.removeprefix("Compute Engine: "): (each.text, each.advice) for what, each in found.items()}
    assert told.keys() == {"network lab-net", "machine types with GPUs", "quotas of GPUs"}
    assert "no subnetwork inner in africa-south1, " in told["network lab-net"][0]
    assert "GCP(zones=…)" in told["network lab-net"][1]
    assert "Google has a9-highgpu-8g, nvidia-r900, which" in told["machine types with GPUs"][0]
    assert "T4: none (preemptible: none)" in told["quotas of GPUs"][0]
    assert "iam-admin/quotas" in told["quotas of GPUs"][1]
    assert next(each for each in checked if each.what.endswith("quotas of GPUs")).good  # nobody asked for GPUs
    gce_api.network("lab-net", "us-central1")
    (text,) = [each for each in gcp(network="lab-net").check() if each.what.endswith("network lab-net")]
    assert "GCP(subnetwork=…)" in text.advice


# --- networks between GPUs -----------------------------------------------------------------------------------

H200 = Need(accelerators=(parse("H200:8"),), market="spot", private_network=True)
NETWORKS = ["second/second-sub", *(f"rdma/rdma-{number}" for number in range(8))]


@pytest.fixture
def ultra(gce_api: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Prices for A3 Ultra, which only the catalogue has, and networks for it in the zone that has it."""
    gce_api.network("second", "us-central1", "second-sub")
    gce_api.network("rdma", "us-central1", *(f"rdma-{number}" for number in range(8)), zone="us-central1-b")
    with Billing() as prices:
        for name, value in prices.environment.items():
            monkeypatch.setenv(name, value)
        yield gce_api


def test_gpus_of_several_nodes_get_the_networks_that_the_user_names(ultra: World) -> None:
    """Google takes two interfaces of GVNIC and eight of MRDMA, in this order; the lab refuses anything else."""
    offer = best(H200, networks=NETWORKS)
    assert (offer.instance_type, offer.zone) == ("a3-ultragpu-8g", "us-central1-b")
    told = inserted(ultra, order(0, 1, need=H200), offer, networks=NETWORKS)
    first, *more = told["networkInterfaces"]
    assert (first["nicType"], first["network"].rpartition("/")[2]) == ("GVNIC", "default")
    assert [each["nicType"] for each in more] == ["GVNIC"] + ["MRDMA"] * 8
    assert ["/".join(each[part].rpartition("/")[2] for part in ("network", "subnetwork")) for each in more] == NETWORKS
    assert [each for each in more if "accessConfigs" in each] == [], "only the first has a public address"
    assert len(ultra.rentals) == 2
    one = gcp().instances()[0]
    assert ultra.rentals[one.id].ip in str(gcp().access(one).transport)


def test_one_node_and_types_without_such_networks_have_one_interface(ultra: World) -> None:
    alone = replace(H200, private_network=False)
    told = inserted(ultra, order(need=alone), best(alone, networks=NETWORKS), networks=NETWORKS)
    assert len(told["networkInterfaces"]) == 1
    need = replace(A100, private_network=True)
    told = inserted(ultra, order(need=need, token="b-1"), best(need, networks=NETWORKS), networks=NETWORKS)
    assert len(told["networkInterfaces"]) == 1


def test_without_the_setting_a_warning_says_what_is_missing(ultra: World) -> None:
    missing = r"a3-ultragpu-8g reach each other over one ordinary .*GCP\(networks=…\) is not set .*1 GVNIC and 8 MRDMA"
    with pytest.warns(RuntimeWarning, match=missing):
        offer = best(H200)
    assert len(inserted(ultra, order(need=H200), offer)["networkInterfaces"]) == 1


def test_networks_that_do_not_fit_are_refused_before_anything_is_rented(ultra: World) -> None:
    with pytest.raises(UsageError, match="a3-ultragpu-8g takes 1 GVNIC and 8 MRDMA in this order"):
        sold(H200, networks=NETWORKS[:8])  # too few
    with pytest.raises(UsageError, match="takes 1 GVNIC and 8 MRDMA"):
        sold(H200, networks=NETWORKS[::-1])  # GVNIC would come last
    ultra.network("rdma", "us-central1", *(f"rdma-{number}" for number in range(8)), zone="us-central1-a")
    with pytest.raises(UsageError, match=r"only serves the zone of its profile"):
        sold(H200, networks=NETWORKS)
    with pytest.raises(ProviderError, match=r"subnetwork rdma-9 of the network rdma.*no such subnetwork"):
        sold(H200, networks=[*NETWORKS[:8], "rdma/rdma-9"])
    with pytest.raises(ProviderError, match="the project has no such network"):
        sold(H200, networks=[*NETWORKS[:8], "none/rdma-8"])


def test_a3_mega_takes_eight_ordinary_networks(gce_api: World) -> None:
    names = [f"gpu-{number}" for number in range(8)]
    for name in names:
        gce_api.network(name, "europe-west1", name)
    need = replace(H100, accelerators=(parse("H100:8"),), private_network=True, regions=("europe-west1",))
    networks = [f"{name}/{name}" for name in names]
    mega = [each for each in sold(need, networks=networks) if each.instance_type == "a3-megagpu-8g"]
    told = inserted(gce_api, order(0, 1, need=need), mega[0], networks=networks)
    assert [each["nicType"] for each in told["networkInterfaces"]] == ["GVNIC"] * 9


def test_what_has_no_price_is_refused_by_name(gce_api: World) -> None:
    with pytest.raises(UsageError, match=r"GB200 cannot be offered: .* has no price for a4x-highgpu-4g"):
        sold(Need(accelerators=(parse("GB200:4"),)))
    assert sold(Need(accelerators=(parse("GB200:4"), *L4.accelerators))), "where others can be had, they are"


# --- creates that must be refused ----------------------------------------------------------------------------


def test_creates_that_must_be_refused_are_refused_and_leave_nothing(gce_api: World) -> None:
    found = list(Compute(_settings()).prove_creates())
    assert [(each.what, each.good) for each in found] == [
        ("Compute Engine: a machine of an unknown type is refused", True),
        ("Compute Engine: a machine with an unknown image is refused", True),
        ("Compute Engine: a machine in an unknown network is refused", True),
        ("Compute Engine: a firewall rule in an unknown network is refused", True),
    ]
    assert all("skypool-does-not-exist" in each.text for each in found)
    bodies = [each.body for each in gce_api.calls("POST instances")]
    assert len(bodies) == 3
    assert all(tags.tags(order(pool="prove")).keys() == _api.said(each["labels"]).keys() for each in bodies)
    assert gce_api.left() == {}


def test_what_is_made_though_it_should_be_refused_is_deleted_and_told(
    gce_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_gcp.compute._proof._UNKNOWN", "e2-standard-2")  # a type that there is
    first = next(iter(gcp().prove_creates()))
    assert not first.good
    assert "made the machine skypool-prove-" in first.text
    assert "is deleted again" in first.text
    assert gce_api.left() == {}


def test_a_create_that_is_refused_for_another_reason_or_not_answered_is_a_failed_finding(
    gce_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_gcp.compute._proof._REQUESTED", 0.5)
    gce_api.refuse("POST instances", 403, "forbidden", FORBIDDEN, times=None)
    gce_api.drop("POST firewalls", times=None)
    found = [*Compute(_settings()).prove_creates()]
    assert [each.good for each in found] == [False] * 4
    assert "compute.instances.create" in found[0].text
    assert "skypool doctor --policy gcp" in found[0].advice
    assert gce_api.left() == {}


def test_without_an_offer_no_create_is_tried_and_the_reason_is_told(gce_api: World) -> None:
    gce_api.refuse("GET zones", 403, "forbidden", "Required 'compute.zones.list' permission", times=None)
    (found,) = Compute(_settings()).prove_creates()
    assert not found.good
    assert "compute.zones.list" in found.text
    assert gce_api.calls("POST *") == []


# --- errors --------------------------------------------------------------------------------------------------

NO_H100 = "A a3-highgpu-8g VM instance with 8 nvidia-h100-80gb accelerator(s) is currently unavailable in the zone."
FIELD = "Invalid value for field 'resource."
NO_TYPE = "Machine type with name 'a' does not exist in zone 'z'."
NO_IMAGE = "The referenced image resource cannot be found."
NO_NETWORK = "The referenced network resource cannot be found."
SYNC: list[tuple[int, str, str, type[ProviderError]]] = [
    (403, "quotaExceeded", NO_QUOTA, QuotaError),
    (503, "insufficientCapacity", "…", CapacityError),
    (404, "notFound", "The resource 'projects/p/zones/z/machineTypes/a3-highgpu-8g' was not found", CapacityError),
    (
        403,
        "rateLimitExceeded",
        "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute'",
        RateLimitError,
    ),
    (
        403,
        "accessNotConfigured",
        "Compute Engine API has not been used in project 1 before or it is disabled.",
        AccessError,
    ),
    (403, "forbidden", FORBIDDEN, AccessError),
    (403, "billingNotEnabled", "…", AccessError),
    (412, "conditionNotMet", "Constraint constraints/compute.vmExternalIpAccess violated for project 1.", AccessError),
    (404, "notFound", "The resource 'projects/p/global/networks/none' was not found", ProviderError),
    (404, "notFound", "The resource 'projects/p/global/images/none' was not found", ProviderError),
    (400, "invalid", f"{FIELD}machineType': 'zones/z/machineTypes/a'. {NO_TYPE}", CapacityError),
    (
        400,
        "invalid",
        f"{FIELD}disks[0].…sourceImage': 'projects/p/global/images/none'. {NO_IMAGE}",
        ProviderError,
    ),
    (400, "invalid", f"{FIELD}networkInterfaces[0].network': 'global/networks/none'. {NO_NETWORK}", ProviderError),
    (400, "invalid", "Invalid value for field 'resource.name'", ProviderError),
    (503, "backendError", "…", NoAnswer),
    (500, "internalError", "…", NoAnswer),
]
LATE: list[tuple[int, str, str, type[ProviderError]]] = [
    (503, "ZONE_RESOURCE_POOL_EXHAUSTED", NO_ROOM.format(zone="us-central1-a"), CapacityError),
    (503, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", NO_H100, CapacityError),
    (503, "STOCKOUT", NO_H100, CapacityError),
    (403, "QUOTA_EXCEEDED", "Quota 'NVIDIA_H100_GPUS' exceeded.  Limit: 8.0 in region us-central1.", QuotaError),
    (403, "PERMISSIONS_ERROR", "…", AccessError),
    (400, "SERVICE_ACCOUNT_ACCESS_DENIED", f"The user does not have access to service account '{ROBOT}'.", AccessError),
    (400, "RESOURCE_NOT_FOUND", "…", ProviderError),
    (500, "INTERNAL_ERROR", "Internal error. Please try again or contact Google Support.", NoAnswer),
]
PAGE = Path(__file__).parents[2] / "docs" / "gcp-errors.md"
INTRODUCTION = """# What Google Cloud refuses, and what you read then

Every message here is one that was really raised: `tests/providers/test_gcp_compute.py` lets Compute Engine refuse a
launch with each of these, in its own words where they are known and with `…` where they are not, and compares. The
first come at once; those after the line of dots when the operation that was begun is through, as only then it says
that there is no room. `CapacityError` goes on to the next offer; `QuotaError` past all that the same quota limits;
`AccessError` and `CredentialsError` past Google Cloud; `RateLimitError` and `NoAnswer` are asked again with the same
id, so that nothing is made twice; any other `ProviderError` ends the launch. The error's `provider`, `code` and `text`
have the parts for programs. The last ones are Cloud TPU's, for a slice; a group of TPU7x says what Compute Engine says.

| code | is raised as | and says |
|---|---|---|
"""


SLICES: list[tuple[str, str, type[ProviderError]]] = [
    ("RESOURCE_EXHAUSTED", tpu.NO_CAPACITY.format(zone="us-east5-a"), CapacityError),
    ("RESOURCE_EXHAUSTED", "Insufficient reserved capacity. Contact customer support. [EID: 0x1]", CapacityError),
    ("RESOURCE_EXHAUSTED", tpu.NO_QUOTA, QuotaError),
    ("RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Create requests' and limit per minute", RateLimitError),
    ("INVALID_ARGUMENT", "The accelerator v5p-16 was not found in zone us-east5-a", CapacityError),
    ("INVALID_ARGUMENT", "…", ProviderError),
    ("PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied on resource (or it may not exist).", AccessError),
    (
        "PERMISSION_DENIED",
        f"Permission 'iam.serviceAccounts.actAs' denied on service account {ROBOT} (or it may not exist).",
        AccessError,
    ),
    ("UNAVAILABLE", "…", NoAnswer),
]


def refused_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ProviderError]]:
    """What Cloud TPU refuses, at once and when it is waited for, and how a slice that was taken back reads."""
    need, driver = Need(accelerators=(parse("v5p-16"),)), gcp(queue=0.0)
    with tpu.TPU() as world:
        monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", world.url)
        [offer] = driver.offers(need)

        def launched(number: int) -> list[Instance]:
            return driver.launch(offer, order(0, 1, token=f"fedcba-{number}", need=need))

        for number, (status, text, kind) in enumerate(SLICES):
            world.refuse("POST queuedResources", status, text)
            with pytest.raises(ProviderError) as refused:
                launched(number)
            assert (type(refused.value), refused.value.text) == (kind, text)
            yield status, refused.value
        made = launched(len(SLICES))
        world.wait(lambda: {each.state for each in world.queued.values()} == {"ACTIVE"})
        world.take(made[0].id)
        world.wait(lambda: "SUSPENDED" in {each.state for each in world.queued.values()})
        with pytest.raises(CapacityError) as taken:
            driver.access(made[0])
        yield taken.value.code, taken.value
        world.waits = True
        world.capacity(0)
        with pytest.raises(CapacityError) as late:
            launched(len(SLICES) + 1)
        yield late.value.code, late.value


def test_every_refusal_of_a_launch_is_what_its_words_say_and_leaves_no_machine(
    gce_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of refusals says what a user reads."""
    monkeypatch.setattr("skypool.drivers.retry.patiently", lambda do, *_: do())
    offer, rows = best(), list[tuple[str, ProviderError]]()
    for number, (status, code, text, kind) in enumerate([*SYNC, *LATE]):
        if number < len(SYNC):
            gce_api.refuse("POST instances", status, code, text)
        else:
            gce_api.doom(status, code, text)
        with pytest.raises(ProviderError) as refused:
            gcp().launch(offer, order(token=f"abcdef-{number}"))
        error = refused.value
        assert type(error) is kind, (text, error)
        assert (error.provider, error.code, error.text) == ("gcp", code, text)
        rows += [("…", error)] if number == len(SYNC) else []
        rows.append((code, error))
    assert gce_api.count()["instances"] == gce_api.count()["disks"] == 0
    rows += [("…", rows[0][1]), *refused_slices(monkeypatch)]
    lines = [
        f"| `{code}` | `{type(e).__name__}` | {str(e).replace('|', '/')} |\n" if code != "…" else "| … | | |\n"
        for code, e in rows
    ]
    page = INTRODUCTION + "".join(lines)
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write it anew: SKYPOOL_WRITE_DOCS=1 pytest tests/providers/test_gcp_compute.py"


def test_a_refused_firewall_rule_leaves_no_machine(gce_api: World) -> None:
    gce_api.refuse("POST firewalls", 403, "forbidden", "Required 'compute.firewalls.create' permission", times=None)
    with pytest.raises(AccessError, match="the firewall rule skypool-train-"):
        gcp().launch(best(), order())
    assert gce_api.count()["instances"] == 0


# --- on machines ---------------------------------------------------------------------------------------------


class TestComputeMachines(OnMachines):
    """What of the contract a machine is needed for."""

    test_interruption = DriverContract.test_an_interruption_is_told_on_the_machine

    @pytest.fixture
    def driver(self, gce: World) -> GCP:
        return GCP(ssh_from="203.0.113.7")

    @pytest.fixture
    def control(self, gce: World) -> Strings:
        return Strings(gce)

    need = TestComputeCalls.need
