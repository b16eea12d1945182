"""What Google charges, by its catalogue and by the tables; and GPUs attached to N1. Against the lab's."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from types import SimpleNamespace
from typing import Any

import pytest

import skypool as sky
from skypool import clock
from skypool.accelerators import parse
from skypool.errors import CapacityError, ProviderError
from skypool.model import Market, Need, Offer, Order, PriceSource
from skypool.offers import price_cache
from skypool_gcp import GCP, catalog, list_prices
from skypool_gcp._settings import Settings
from tests.lab import gce_wares
from tests.lab.billing import Billing
from tests.lab.gce import GCE, PROJECT
from tests.lab.tpu import TPU

MARKETS: tuple[Market, ...] = ("on-demand", "spot")
SETTINGS = Settings(PROJECT, None, "default", None, None, None, None, ("203.0.113.7",))


@pytest.fixture
def prices(gce_api: GCE, own_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Billing]:
    """The catalogue beside the lab's Compute Engine, with nothing kept yet."""
    monkeypatch.setattr(list_prices, "_SOON", 120.0)
    with Billing() as world:
        for name, value in world.environment.items():
            monkeypatch.setenv(name, value)
        yield world


def need(*accelerators: str, **more: Any) -> Need:
    return Need(accelerators=tuple(map(parse, accelerators)), **{"market": "cheapest", **more})


def sold(of: Need, **settings: Any) -> list[Offer]:
    return list(GCP(ssh_from="203.0.113.7", **settings).offers(of))


def asked(world: Billing) -> int:
    return len(world.calls("GET skus"))


# --- the catalogue -------------------------------------------------------------------------------------------


def test_every_price_of_the_table_is_what_the_catalogues_cores_memory_gpus_and_disks_come_to(prices: Billing) -> None:
    rates, compared = list_prices.rates(SETTINGS), 0
    assert rates.why == ""
    kinds = {name: kind for zone in gce_wares.sold().values() for name, kind in zone.items()}
    for name, places in list_prices.machines().items():
        for (region, market), usd in places.items() if name in kinds else ():
            kind = kinds[name]
            cards = ((kind.model, len(kind.cards)),) if kind.model else ()
            price = rates.machine(name, region, market, kind.vcpus, kind.memory_gib, cards)
            assert price is not None
            assert price.source == PriceSource("provider", date.fromisoformat(rates.day))
            assert price.usd == pytest.approx(usd, abs=2e-6), (name, region, market)
            compared += 1
    assert compared > 600
    for part, places in list_prices.parts().items():
        assert {place: rates.usd[part][place] for place in places} == places


def test_what_the_catalogue_says_counts_before_the_table(prices: Billing) -> None:
    here = need("L4", regions=("us-*",))
    usual = {(each.instance_type, each.zone, each.market): each for each in sold(here)}
    prices.dearer = 2.0
    price_cache.path().unlink()
    dearer = {(each.instance_type, each.zone, each.market): each for each in sold(here)}
    assert usual.keys() == dearer.keys()
    for key, offer in usual.items():
        machine = offer.usd_per_hour - catalog.extras(offer.region, offer.market, 120)
        assert dearer[key].usd_per_hour == pytest.approx(offer.usd_per_hour + machine)
        assert dearer[key].price_source == PriceSource("provider", clock.today())


def test_what_is_no_price_by_the_hour_is_left_out(prices: Billing) -> None:
    rates = list_prices.rates(SETTINGS)
    assert asked(prices) > 4, "there are pages, and all of them are read"
    assert {each.query["currencyCode"] for each in prices.calls("GET skus")} == {"USD"}
    assert max(usd for places in rates.usd.values() for usd in places.values()) < 25
    assert min(usd for places in rates.usd.values() for usd in places.values()) > 0
    assert rates.usd["ssd"]["us-central1", "on-demand"] == pytest.approx(0.08 / 730), "by the month, after a free tier"
    assert rates.usd["a4"]["us-central1", "spot"] == 4.9542, "which it calls on demand"


def test_of_two_prices_for_the_same_the_dearer_is_believed(prices: Billing) -> None:
    mega = list_prices.rates(SETTINGS).usd["nvidia-h100-mega-80gb"]["us-central1", "on-demand"]
    assert mega == 10.344276


def test_chips_of_tpus_cost_what_the_catalogue_says_and_else_the_table(prices: Billing) -> None:
    rates = list_prices.rates(SETTINGS)
    assert rates.chips("v6e")["us-east5", "spot"].usd == 1.4033
    usd, source = rates.chips("v6e")["us-east1", "spot"]
    assert (usd, str(source)) == (1.89, "price as of 2024-12-23 (table)")
    assert source.why == "Google's price catalogue does not have this price"
    assert rates.chips("v2 device")["us-central1", "on-demand"].usd == 1.125, "they are sold by four"
    assert rates.chips("v2 device")["us-central1", "spot"].usd == 0.3375
    assert rates.chips("v2 pod")["us-central1", "on-demand"].usd == 1.5
    assert rates.chips("v4")["us-central2", "spot"].usd == 0.966
    assert {region for region, _ in rates.chips("tpu7x")} >= {"us-central1", "us-east1", "us-west1"}
    assert rates.chips("v9") == {}


def test_a_slice_costs_what_the_catalogue_says_of_its_chips(
    tpu_api: TPU, own_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Billing() as world:
        for name, value in world.environment.items():
            monkeypatch.setenv(name, value)
        offers = sold(need("v6e-8", market="spot", regions=("us-east*",)))
    assert {each.region: each.price_source.kind for each in offers} == {
        "us-east5": "provider", "us-east1": "table",
    }  # fmt: skip
    paid = {each.region: each.usd_per_hour for each in offers}
    assert paid == pytest.approx({"us-east5": 8 * 1.4033 + 0.0025, "us-east1": 8 * 1.89 + 0.0025})


def test_a_chip_of_the_table_has_the_day_and_the_name_of_its_own_source() -> None:
    known = {(name, *place): price for name, places in list_prices.chips().items() for place, price in places.items()}
    assumed = {key for key, price in known.items() if "skypilot" in price.source.origin}
    assert assumed == {("v3 pod", "us-east1", "on-demand"), ("v3 pod", "us-east1", "spot")}
    for key, price in known.items():
        day, origin = None, "an assumption of skypilot-org/skypilot"
        if key not in assumed:
            day, origin = date(2024, 12, 23), "dstackai/gpuhunt"
        assert (price.source.as_of, price.source.origin) == (day, origin), key


def test_an_old_spot_price_of_a_slice_is_ranked_by_the_price_on_demand(tpu_api: TPU, own_state: None) -> None:
    made = sky.plan(GCP(ssh_from="203.0.113.7"), accelerator="v6e-8", market="spot", region="us-east1")
    assert made.best is not None
    assert made.best.usd_per_hour == pytest.approx(8 * 1.89 + 0.0025)
    assert made.best.on_demand_usd_per_hour == pytest.approx(8 * 2.7 + 0.005)
    assert "price as of 2024-12-23 (table), ranked by 21.6050 USD/h on demand" in made.explain()
    assert any("come from a table of 2024-12-23 (dstackai/gpuhunt)" in note for note in made.notes)


def test_an_old_spot_price_of_a_machine_is_ranked_by_the_price_on_demand(gce_api: GCE, own_state: None) -> None:
    machine = sky.plan(GCP(ssh_from="203.0.113.7"), accelerator="L4", market="spot").best
    usual = sky.plan(GCP(ssh_from="203.0.113.7"), accelerator="L4").offers
    assert machine is not None
    (same,) = [o for o in usual if (o.instance_type, o.zone) == (machine.instance_type, machine.zone)]
    assert machine.on_demand_usd_per_hour == same.usd_per_hour


@pytest.mark.slow
def test_the_command_says_the_day_of_the_table_and_how_to_have_googles_own_prices(prices: Billing) -> None:
    prices.disable()
    program = "import sys; from skypool.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", program, "plan", "L4", "--provider", "gcp"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^1\. gcp g2-\S+ .* USD/h, price as of 2026-08-03 \(table\)$", done.stdout, re.MULTILINE)
    assert "prices come from a table of 2026-08-03 (cloudpilot-ai/karpenter-provider-gcp)" in done.stdout
    assert "gcloud services enable cloudbilling.googleapis.com" in done.stdout


def test_a_machine_with_gpus_that_are_not_told_has_no_price(prices: Billing) -> None:
    rates = list_prices.rates(SETTINGS)
    assert rates.machine("a3-ultragpu-8g", "us-central1", "spot", 224, 2952) is None
    assert rates.machine("a4x-highgpu-4g", "us-central1", "spot", 140, 884, (("nvidia-gb200", 4),)) is None
    assert rates.machine("n4-standard-4", "us-central1", "spot", 4, 16) is None


@pytest.mark.needs("openssh")
def test_the_newest_machines_are_sold_by_the_catalogue_and_as_spot_alone(prices: Billing, gce_api: GCE) -> None:
    (ultra,) = sold(need("H200:8"))
    ssd = 8 * 1500 * 0.048 / 730
    alone = 224 * 0.0107 + 2952 * 0.00093 + 8 * 3.72 + ssd
    assert (ultra.instance_type, ultra.market) == ("a3-ultragpu-8g", "spot")
    assert ultra.usd_per_hour == pytest.approx(alone + catalog.extras("us-central1", "spot", 120))
    (b200,) = sold(need("B200:8"))
    assert b200.usd_per_hour == pytest.approx(8 * 4.9542 + catalog.extras("us-central1", "spot", 120))
    for offer in (ultra, b200):
        told = inserted(gce_api, offer)
        assert told["disks"][0]["initializeParams"]["diskType"].endswith("hyperdisk-balanced")


# --- asked once, and never in the way ------------------------------------------------------------------------


def test_it_is_asked_once_a_day(prices: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    first, calls = list_prices.rates(SETTINGS), asked(prices)
    sold(need("L4"))
    sold(need("T4"))
    assert list_prices.rates(SETTINGS) == first
    assert asked(prices) == calls
    tomorrow(monkeypatch)
    list_prices.rates(SETTINGS)
    assert asked(prices) == 2 * calls


def test_where_it_is_not_enabled_the_tables_serve_and_the_check_says_what_to_do(prices: Billing) -> None:
    prices.disable()
    offers = sold(need("L4"))
    (source,) = {each.price_source for each in offers}
    assert (str(source), source.origin) == ("price as of 2026-08-03 (table)", "cloudpilot-ai/karpenter-provider-gcp")
    assert "gcloud services enable cloudbilling.googleapis.com --project lab-project" in source.why
    calls = asked(prices)
    sold(need("L4"))
    assert asked(prices) == calls, "it is not asked at each plan"
    list_prices.rates(replace(SETTINGS, project="other-project"))
    assert asked(prices) > calls, "another project may ask it"
    (found,) = [each for each in GCP(ssh_from="203.0.113.7").check() if each.what.endswith("prices")]
    assert found.good
    assert (
        "tables: of 2026-08-03 for machines, of an unknown day for N1 machines, and of 2024-12-23 or older for TPUs"
        in found.text
    )
    assert "gcloud services enable cloudbilling.googleapis.com --project lab-project" in found.text
    prices.heal()
    (found,) = [each for each in GCP(ssh_from="203.0.113.7").check() if each.what.endswith("prices")]
    assert found.text.startswith(f"Google's price catalogue of {datetime.now(UTC).date()}")
    assert {each.price_source.kind for each in sold(need("L4"))} == {"provider"}


def test_yesterdays_catalogue_is_better_than_the_table(prices: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    first = list_prices.rates(SETTINGS)
    tomorrow(monkeypatch)
    prices.drop("GET skus", moment="before", times=None)
    again = list_prices.rates(SETTINGS)
    assert (again.usd, again.day) == (first.usd, first.day)
    assert "its price catalogue" in again.why


def test_one_that_does_not_answer_soon_is_not_waited_for(prices: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_prices, "_SOON", 0.2)
    prices.delay("GET skus", 2.0)
    rates = list_prices.rates(SETTINGS)
    assert rates.usd == {}
    assert "its price catalogue" in rates.why
    assert rates.machine("g2-standard-4", "us-central1", "spot", 4, 16, (("nvidia-l4", 1),)) is not None


def test_pages_that_come_too_slowly_are_given_up(prices: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_prices, "_SOON", 60)
    monkeypatch.setattr(list_prices, "time", SimpleNamespace(monotonic=itertools.count(0, 100).__next__))
    rates = list_prices.rates(SETTINGS)
    assert rates.usd == {}
    assert "Google's price catalogue was not read within 60 s" in rates.why


def test_without_its_part_of_the_sdk_the_tables_serve(prices: Billing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.billing_v1", None)
    rates = list_prices.rates(SETTINGS)
    assert rates.usd == {}
    assert "pip install 'skypool[gcp]'" in rates.why
    assert asked(prices) == 0


def test_it_is_never_asked_at_googles_own_address_by_who_has_set_others(
    gce_api: GCE, own_state: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no test of what else there is asks Google."""
    monkeypatch.setattr(list_prices, "_client", lambda *_: pytest.fail("it was asked"))
    assert list_prices.rates(SETTINGS).usd == {}
    assert "other addresses" in list_prices.told(SETTINGS, dict)
    assert {each.price_source.day for each in sold(need("L4"))} == {"2026-08-03 (table)"}


def tomorrow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + 86400 + 60)
    monkeypatch.setattr(price_cache, "time", clock)


# --- N1 with GPUs --------------------------------------------------------------------------------------------


def test_gpus_are_attached_to_n1_where_a_zone_has_them(prices: Billing) -> None:
    offers = sold(need("T4"))
    assert {each.zone for each in offers} == {"us-central1-a", "europe-west4-a"}
    names = [f"n1-{use}-{n}" for use in ("standard", "highmem") for n in (4, 8, 16, 32)]
    assert sorted({each.instance_type for each in offers}) == sorted(names)
    best = min((each for each in offers if each.market == "on-demand"), key=lambda each: each.usd_per_hour)
    assert (best.instance_type, best.region, str(best.accelerator)) == ("n1-standard-4", "us-central1", "T4")
    alone = 4 * 0.031611 + 15 * 0.004237 + 0.35
    assert best.usd_per_hour == pytest.approx(alone + catalog.extras("us-central1", "on-demand", 120))
    assert (best.vcpus, best.memory_gib, best.quota) == (4.0, 15.0, "us-central1 NVIDIA_T4_GPUS")
    assert {each.quota for each in offers if each.market == "spot"} == {
        "us-central1 PREEMPTIBLE_NVIDIA_T4_GPUS", "europe-west4 PREEMPTIBLE_NVIDIA_T4_GPUS",
    }  # fmt: skip
    assert sold(need("T4:3")) == []


def test_without_the_catalogue_some_are_sold_by_a_table_on_demand(gce_api: GCE) -> None:
    offers = sold(need("T4", "V100-16GB", "P4"))
    assert {(each.region, each.market, str(each.accelerator)) for each in offers} == {
        ("us-central1", "on-demand", "T4"), ("us-central1", "on-demand", "V100-16GB"),
    }  # fmt: skip
    assert {each.price_source.day for each in offers} == {"an unknown day (table)"}, "it was copied from undated code"


def test_a_need_of_several_has_each_of_what_it_takes(prices: Billing) -> None:
    found = {(each.instance_type.split("-")[0], str(each.accelerator)) for each in sold(need("T4:2", "L4", "V100:8"))}
    assert found >= {("n1", "T4:2"), ("n1", "V100-16GB:8")}
    assert {kind for kind, name in found if name.startswith("L4")} == {"g2"}


@pytest.mark.parametrize("model", gce_wares.ATTACHED)
def test_every_pair_that_is_sold_is_one_that_google_takes(gce_api: GCE, model: str) -> None:
    _, most, (zone, *_) = gce_wares.ATTACHED[model]
    for count in most:
        wanted = replace(parse(model, dialect="gcp"), count=count)
        pairs = catalog.pairs(Need(accelerators=(wanted,)))
        assert {card for cards in pairs.values() for card in cards} == {(model, count)}
        for kind in pairs:
            told = {"acceleratorType": f"zones/{zone}/acceleratorTypes/{model}", "acceleratorCount": count}
            gce_wares.equipped(gce_wares.sold()[zone][kind], zone, [told])


@pytest.mark.needs("openssh")
def test_it_is_asked_for_with_its_gpus_and_an_image_whose_driver_knows_them(prices: Billing, gce_api: GCE) -> None:
    t4 = min(sold(need("T4:4", market="on-demand")), key=lambda each: each.usd_per_hour)
    told = inserted(gce_api, t4)
    ((model, count),) = [(each["acceleratorType"], each["acceleratorCount"]) for each in told["guestAccelerators"]]
    assert (model, count) == (f"zones/{t4.zone}/acceleratorTypes/nvidia-tesla-t4", 4)
    assert told["machineType"].endswith("/n1-standard-16")
    assert told["scheduling"]["onHostMaintenance"] == "TERMINATE"
    assert "nvidia-580" in told["disks"][0]["initializeParams"]["sourceImage"]
    for name in ("V100-16GB", "P100", "P4"):
        old = min(sold(need(name)), key=lambda each: each.usd_per_hour)
        disk = inserted(gce_api, old)["disks"][0]["initializeParams"]
        assert "ubuntu-2404-noble" in disk["sourceImage"], (
            "Google's driver is of open modules, which know Turing and later"
        )
        assert disk["diskSizeGb"] == "120", "as the driver and CUDA's libraries are put there"
    assert "guestAccelerators" not in inserted(gce_api, sold(need("L4"))[0])


@pytest.mark.needs("openssh")
@pytest.mark.parametrize(
    ("kind", "cards", "says"),
    [
        ("e2-standard-4", [("nvidia-tesla-t4", 1)], "features are not compatible"),
        ("n1-standard-4", [("nvidia-tesla-t4", 3)], "acceleratorCount': '3'"),
        ("n1-standard-16", [("nvidia-tesla-v100", 1)], "At most 12 vCPUs can be used along with 1 accelerator cards"),
        ("n1-standard-4", [("nvidia-tesla-p100", 1)], "the zone does not have this machine type"),
    ],
)
def test_other_pairs_are_refused_as_google_does(
    prices: Billing, gce_api: GCE, kind: str, cards: list[tuple[str, int]], says: str
) -> None:
    offer = next(each for each in sold(need("T4")) if each.zone == "us-central1-a")
    machine = replace(offer.detail["machine"], machine_type=kind, attached=cards)
    wrong = replace(offer, instance_type=kind, detail={**offer.detail, "machine": machine})
    with pytest.raises(CapacityError if "zone" in says else ProviderError) as refused:
        inserted(gce_api, wrong)
    assert says in str(refused.value)
    assert gce_api.count()["instances"] == 0


def test_a_reservation_is_of_a_type_with_its_gpus(prices: Billing, gce_api: GCE) -> None:
    cards = [{"acceleratorType": "zones/us-central1-a/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 2}]
    kind = {"machineType": "n1-standard-8", "guestAccelerators": cards}
    has = {"count": "2", "inUseCount": "2", "instanceProperties": kind}
    gce_api.reservations["mine"] = {"name": "mine", "zone": "x/zones/us-central1-a", "specificReservation": has}
    (offer,) = sold(need("T4:2"), reservation="mine")
    assert (offer.instance_type, offer.zone, offer.available) == ("n1-standard-8", "us-central1-a", False)
    assert sold(need("T4"), reservation="mine") == []


def inserted(world: GCE, offer: Offer) -> dict[str, Any]:
    """What the API was told of a machine."""
    token = f"0123456789abcdef-{len(world.journal)}"
    order = Order("train", token, (0,), Need())
    GCP(ssh_from="203.0.113.7").launch(offer, order)
    body: dict[str, Any] = world.calls("POST instances")[-1].body
    return body
