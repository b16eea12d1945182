"""HttpCloud answers as its page says, and goes wrong on the wire as its control says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from skypool.drivers.contract import Driver
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimitError,
    UsageError,
)
from skypool.model import Instance, Need, Offer, Order
from skypool.testing import Control, HttpCloud, Stock
from skypool.testing.http_cloud import Answer, Request, Route
from tests.conftest import eventually, processes_of

KEY = "sesame"
SMALL = {"type": "small", "zone": "north-a", "market": "on-demand", "lease": 600, "tags": {"skypool-pool": "p"}}


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[HttpCloud]:
    with HttpCloud(tmp_path / "cloud", key=KEY, machines=False) as cloud:
        yield cloud


def ask(cloud: HttpCloud, method: str, path: str, *, key: str = KEY, **more: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.request(method, cloud.url + path, headers=headers, timeout=30, **more)


def make(cloud: HttpCloud, token: str = "t-0", **more: Any) -> dict[str, Any]:
    got = ask(cloud, "POST", "/machines", json={**SMALL, "client_token": token, **more})
    assert got.status_code == 201, got.text
    made: dict[str, Any] = got.json()
    return made


def test_a_type_that_is_sold_by_regions_needs_no_zone(tmp_path: Path) -> None:
    stock = [Stock("small", usd, region=region, zone="") for region, usd in (("north", 1.0), ("south", 2.0))]
    with HttpCloud(tmp_path / "cloud", stock, key=KEY, machines=False) as cloud:
        assert make(cloud, zone="", region="south")["region"] == "south"
        asked = {name: value for name, value in SMALL.items() if name != "zone"}
        without = ask(cloud, "POST", "/machines", json={**asked, "client_token": "t-2", "region": "north"})
        assert without.json()["region"] == "north"
        for given, missing in (({}, "zone"), ({"zone": ""}, "region")):
            refused = ask(cloud, "POST", "/machines", json={**asked, **given, "client_token": "t-3"})
            assert f"the field {missing!r} of the request's body is missing" in refused.json()["message"]
        asked = {**SMALL, "client_token": "t-1", "zone": "", "region": "east"}
        refused = ask(cloud, "POST", "/machines", json=asked)
        assert (refused.status_code, refused.json()["code"]) == (400, "NoSuchType")
        assert "is not sold in 'east'" in refused.json()["message"]


def listed(cloud: HttpCloud, **params: str) -> list[dict[str, Any]]:
    """The machines of the first page, which is the only one unless a test says else."""
    found: list[dict[str, Any]] = ask(cloud, "GET", "/machines", params=params).json()["machines"]
    return found


def instance(made: Mapping[str, Any]) -> Instance:
    return Instance("acme", made["id"], "p", 0)


def test_a_machine_is_made_once_for_a_token_found_with_its_tags_and_ended(cloud: HttpCloud) -> None:
    made = make(cloud)
    assert (made["state"], made["type"], made["tags"]) == ("active", "small", {"skypool-pool": "p"})
    assert make(cloud)["id"] == made["id"]
    other = make(cloud, "t-1")
    assert [each["id"] for each in listed(cloud)] == [made["id"], other["id"]]
    assert ask(cloud, "PUT", f"/machines/{made['id']}/tags", json={"a": "b"}).status_code == 204
    assert ask(cloud, "GET", f"/machines/{made['id']}").json()["tags"] == {"a": "b"}
    assert ask(cloud, "GET", f"/machines/{other['id']}").json()["tags"] == {"skypool-pool": "p"}
    assert ask(cloud, "DELETE", f"/machines/{made['id']}").status_code == 202
    assert ask(cloud, "DELETE", f"/machines/{made['id']}").json()["code"] == "NotFound"
    assert ask(cloud, "GET", f"/machines/{made['id']}").status_code == 404
    assert cloud.control.count() == 1


def test_machines_are_listed_in_pages_that_say_where_the_next_one_begins(cloud: HttpCloud) -> None:
    ids = [make(cloud, f"t-{n}")["id"] for n in range(12)]
    cloud.control.paged(5)
    found, after, sizes = [], "", []
    while after is not None:
        page = ask(cloud, "GET", "/machines", params={"after": after}).json()
        found += [each["id"] for each in page["machines"]]
        sizes.append(len(page["machines"]))
        after = page["next"]
    assert (found, sizes) == (ids, [5, 5, 2])
    cloud.control.cut_short()
    assert ask(cloud, "GET", "/machines", params={"after": "more"}).json() == {"machines": [], "next": "more"}
    cloud.control.cut_short(False)
    assert len(listed(cloud)) == 5


def test_what_is_sold_has_prices_and_what_was_sold_out_says_so(cloud: HttpCloud) -> None:
    cloud.control.stock_out(Offer("acme", "gpu-8", zone="north-a", market="spot"))
    types = ask(cloud, "GET", "/types").json()
    spots = {(each["type"], each["zone"]): each for each in types if each["market"] == "spot"}
    assert spots["gpu-8", "north-a"]["gpu"] == {"model": "H100-80GB", "count": 8}
    assert spots["gpu-8", "north-a"]["usd_per_hour"] == 8.0
    assert not spots["gpu-8", "north-a"]["in_stock"]
    assert spots["gpu-8", "north-b"]["in_stock"]
    assert spots["small", "north-a"]["gpu"] is None


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (CredentialsError, 401),
        (FundsError, 402),
        (AccessError, 403),
        (CapacityError, 409),
        (QuotaError, 409),
        (OfferGone, 410),
        (RateLimitError, 429),
        (ProviderError, 500),
    ],
)
def test_a_refusal_has_a_status_a_code_and_words_and_makes_nothing(
    cloud: HttpCloud, kind: type[ProviderError], status: int
) -> None:
    cloud.control.refuse(kind)
    got = ask(cloud, "POST", "/machines", json={**SMALL, "client_token": "t"})
    assert got.status_code == status
    assert {*got.json()} == {"code", "message"}
    assert got.json()["code"]
    assert cloud.control.count() == 0


def test_a_wrong_key_is_refused_and_a_machine_needs_none_to_hear_its_notice(cloud: HttpCloud) -> None:
    made = make(cloud)
    assert ask(cloud, "GET", "/machines", key="open").status_code == 401
    notice = f"{cloud.url}/metadata/{made['id']}/notice"
    assert requests.get(notice, timeout=30).status_code == 404
    cloud.control.interrupt(instance(made), 120.0)
    assert requests.get(notice, timeout=30).json() == pytest.approx(time.time() + 120, abs=30)


def test_a_lost_reply_is_a_dropped_connection_and_the_machine_is_there_with_its_tags(cloud: HttpCloud) -> None:
    cloud.control.lose_reply()
    with pytest.raises(requests.ConnectionError):
        make(cloud)
    [there] = listed(cloud)
    assert there["tags"] == SMALL["tags"]
    assert make(cloud)["id"] == there["id"]


def test_throttling_says_when_to_come_again(cloud: HttpCloud) -> None:
    cloud.control.throttle(retry_after=2.5)
    got = ask(cloud, "GET", "/types")
    assert (got.status_code, got.headers["Retry-After"]) == (429, "2.5")
    assert ask(cloud, "GET", "/types").status_code == 200


def test_a_lease_ends_a_machine_and_a_stubborn_one_survives_being_ended(cloud: HttpCloud) -> None:
    stubborn = make(cloud, lease=3600)
    cloud.control.undying(instance(stubborn), 1)
    make(cloud, "t-1", lease=60)
    cloud.clock.advance(61)
    assert [each["id"] for each in listed(cloud)] == [stubborn["id"]]
    ask(cloud, "DELETE", f"/machines/{stubborn['id']}")
    assert ask(cloud, "GET", f"/machines/{stubborn['id']}").json()["state"] == "deleting"
    ask(cloud, "DELETE", f"/machines/{stubborn['id']}")
    assert listed(cloud) == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"zone": "moon"}, "NoSuchType"),
        ({"client_token": None}, "BadRequest"),
        ({"lease": "long"}, "BadRequest"),
        ({"tags": "none"}, "BadRequest"),
    ],
)
def test_a_request_that_means_nothing_is_refused_with_a_reason(
    cloud: HttpCloud, body: dict[str, Any], code: str
) -> None:
    got = ask(cloud, "POST", "/machines", json={**SMALL, "client_token": "t", **body})
    assert (got.status_code, got.json()["code"]) == (400, code)
    assert ask(cloud, "POST", "/machines", data="no json").status_code == 400
    assert ask(cloud, "GET", "/nothing").json()["code"] == "NoSuchPath"
    assert cloud.control.count() == 0


def test_commands_run_on_a_machine_behind_its_console_and_end_with_it(tmp_path: Path) -> None:
    with HttpCloud(tmp_path / "cloud", key=KEY) as cloud:
        made = make(cloud)
        code = "import os; print(os.environ['ACME_METADATA'], os.getcwd())"
        done = subprocess.run([*made["console"], made["python"], "-c", code], capture_output=True, text=True)
        assert done.stdout.split() == [f"{cloud.url}/metadata", f"{tmp_path}/cloud/machines/{made['id']}/home"]
        cloud.control.never_boot()
        deaf = make(cloud, "t-1")
        done = subprocess.run([*deaf["console"], "true"], capture_output=True, text=True)
        assert (deaf["state"], done.returncode) == ("booting", 255)
        assert "No route to host" in done.stderr
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of the cloud's processes")


def test_another_provider_is_imitated_by_other_routes(tmp_path: Path) -> None:
    class Other(HttpCloud):
        def routes(self) -> Mapping[str, Route]:
            return {"GET /v1/vms": self.get_machines, "GET /v1/broken/{what}": self.broken}

        def broken(self, request: Request) -> Answer:
            raise RuntimeError(request.parts["what"])

    cloud = Other(tmp_path / "cloud")
    assert ask(cloud, "GET", "/vms").json() == {"machines": [], "next": None}
    assert ask(cloud, "GET", "/machines").status_code == 404
    assert ask(cloud, "GET", "/broken/leg").status_code == 500
    with pytest.raises(ExceptionGroup) as failed:
        cloud.close()
    assert [str(each) for each in failed.value.exceptions] == ["leg"]


def test_slices_are_refused_and_so_is_killing_a_client_that_nobody_knows(cloud: HttpCloud, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="v5p-16"):
        HttpCloud(tmp_path / "other", [Stock("v5p-16", accelerator="v5p-16")])
    with pytest.raises(UsageError, match="does not know the process"):
        cloud.control.kill_client(1, "before")


def test_it_can_be_served_from_a_shell_until_it_is_ended(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "skypool.testing.http_cloud", "--key", KEY, "--folder", str(tmp_path / "cloud")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={**os.environ}) as served:
        assert served.stdout is not None
        told = dict(word.split("=", 1) for word in served.stdout.readline().split()[1:])
        assert told["ACME_API_KEY"] == KEY
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {**SMALL, "client_token": "t"}
        made = requests.post(f"{told['ACME_URL']}/machines", headers=headers, json=body, timeout=30)
        assert made.status_code == 201
        served.send_signal(signal.SIGTERM)
        try:
            assert served.wait(30) == 0
        finally:
            served.kill()
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of its machines")


def test_its_control_has_every_method_that_a_contract_may_call(cloud: HttpCloud) -> None:
    control: Control = cloud.control
    names = [name for name in vars(Control) if not name.startswith("_")]
    assert len(names) == 12
    assert [name for name in names if not callable(getattr(control, name, None))] == []


def test_the_drivers_of_the_template_see_each_others_machines_only_where_they_are_of_one_pool(
    cloud: HttpCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "skypool" / "testing" / "template"))
    from skypool_acme import Acme

    driver: Driver = Acme(url=cloud.url, api_key=KEY)
    assert driver.instances() == []
    make(cloud, tags={})
    assert driver.instances() == [], "a machine without tags is nobody's"
    with pytest.raises(CredentialsError, match=r"Acme refused the list of machines.*set \$ACME_API_KEY"):
        replace(driver, api_key="open").instances()  # type: ignore[type-var]  # every driver is a dataclass


def test_the_driver_of_the_template_rents_where_there_are_no_zones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "skypool" / "testing" / "template"))
    from skypool_acme import Acme

    stock = [Stock("small", usd, region=region, zone="") for region, usd in (("north", 1.0), ("south", 2.0))]
    with HttpCloud(tmp_path / "cloud", stock, key=KEY, machines=False) as cloud:
        driver: Driver = Acme(url=cloud.url, api_key=KEY)
        for number, offer in enumerate(driver.offers(Need())):
            assert (offer.region, offer.zone) == (("north", "south")[number], "")
            order = Order("p", f"token-{number}", (0,), Need())
            [made] = driver.launch(offer, order)
            assert cloud.control.count() == 1
            driver.terminate([made])
        cloud.control.stock_out(offer, 0)
        with pytest.raises(CapacityError, match="small in south"):
            driver.launch(offer, replace(order, token="token-9"))
