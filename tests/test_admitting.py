"""Looking in from another address: drivers that open port 22 to an address admit the present one first."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.accelerators import parse
from skypool.drivers import settings
from skypool.drivers.contract import Admits, Driver, admitted
from skypool.errors import CredentialsError, ProviderError
from skypool.model import Access, Instance, Need, Order
from skypool.runs import reaching
from skypool.testing import FakeCloud
from skypool.wire.transport import Subprocess
from tests.handed_runs import cloud_at, handed, record_of
from tests.lab.aws import AWS
from tests.lab.gce import GCE

FIRST, SECOND = "203.0.113.7/32", "198.51.100.9/32"
NEED = {"aws": Need((parse("A10G"),)), "gce": Need((parse("L4"),))}


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give this computer another public address."""

    def moved(network: str) -> None:
        monkeypatch.setattr(settings, "public_network", lambda: network)

    moved(FIRST)
    return moved


def launched(driver: Any, need: Need, pool: str = "train") -> Instance:
    offer = min(driver.offers(need), key=lambda each: each.usd_per_hour)
    token, until = f"{pool.encode().hex():0>16}-1", datetime(2030, 1, 1, tzinfo=UTC)
    order = Order(pool, token, (0,), need, until=until, lifetime=3600.0)
    [made] = driver.launch(offer, order)
    found: Instance = made
    return found


@pytest.mark.needs("openssh")
def test_aws_admits_the_present_address_once_and_removes_it_with_the_group(
    aws_api: AWS, move: Callable[[str], None]
) -> None:
    driver = sky.AWS(region="us-east-1")
    instance = launched(driver, NEED["aws"])
    other = launched(driver, NEED["aws"], "other")

    def networks() -> dict[str, list[str]]:
        groups = aws_api.client().describe_security_groups()["SecurityGroups"]
        return {
            name: [each["CidrIp"] for rule in group["IpPermissions"] for each in rule["IpRanges"]]
            for group in groups
            for name in ("train", "other")
            if name in group["GroupName"]
        }

    assert networks() == {"train": [FIRST], "other": [FIRST]}
    move(SECOND)
    for _ in range(2):
        assert admitted(driver, instance).transport
    assert networks() == {"train": [FIRST, SECOND], "other": [FIRST]}
    move("192.0.2.1/32")
    sky.AWS(region="us-east-1", ssh_from=FIRST).admit(instance)
    assert networks()["train"] == [FIRST, SECOND], "whoever has chosen addresses keeps them"
    driver.terminate([instance, other])
    driver.tidy(driver.leftovers())
    assert networks() == {}


@pytest.mark.needs("openssh")
def test_google_cloud_admits_the_present_address_once_and_removes_it_with_the_others(
    gce_api: GCE, move: Callable[[str], None]
) -> None:
    driver = sky.GCP(zones="us-central1-a")
    instance = launched(driver, NEED["gce"])
    first = sorted(gce_api.firewalls)
    move(SECOND)
    for _ in range(2):
        assert admitted(driver, instance).transport
    [name] = sorted({*gce_api.firewalls} - {*first})
    rules = {each: gce_api.firewalls[each] for each in gce_api.firewalls if gce_api.firewalls[each].get("allowed")}
    assert [rules[each]["sourceRanges"] for each in sorted(rules, key=lambda each: each == name)] == [[FIRST], [SECOND]]
    assert len({tuple(each["targetTags"]) for each in rules.values()}) == 1
    assert len(name) <= 63
    move("192.0.2.1/32")
    sky.GCP(zones="us-central1-a", ssh_from=FIRST).admit(instance)
    assert len(gce_api.firewalls) == len(first) + 1
    driver.terminate([instance])
    driver.tidy(driver.leftovers())
    assert gce_api.firewalls == {}


class Guarded(FakeCloud):
    """A cloud that notes whom it has admitted, and how its machines were reached."""

    def admit(self, instance: Instance) -> None:
        TOLD.append(f"admit {instance.id}")

    def access(self, instance: Instance) -> Access:
        TOLD.append(f"access {instance.id}")
        return Access(Subprocess(), python="", folder="", spool="")


TOLD: list[str] = []


def test_the_machine_of_a_run_is_reached_after_the_address_was_admitted(tmp_path: Any) -> None:
    cloud = Guarded(cloud_at(tmp_path / "cloud").state, machines=False, patience=0.3)
    assert isinstance(cloud, Admits)
    handed(cloud)
    TOLD.clear()
    reaching.reach(record_of())
    assert TOLD == ["admit i-0001", "access i-0001"]


def test_a_machine_that_could_not_let_the_address_in_is_tried_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit(_: Driver, instance: Instance) -> None:
        raise errors.pop()

    cloud = Guarded(cloud_at(tmp_path / "cloud").state, machines=False, patience=0.3)
    monkeypatch.setattr(Guarded, "admit", admit)
    instance = Instance("fake", "i-0001", "train", 0)
    errors = [CredentialsError("wrong key"), ProviderError("the public address is not known")]
    TOLD.clear()
    with pytest.warns(RuntimeWarning, match="i-0001 may not be reached from here: the public address is not known"):
        admitted(cloud, instance)
    assert TOLD == ["access i-0001"]
    with pytest.raises(CredentialsError):
        admitted(cloud, instance)


def test_a_driver_without_the_method_is_asked_for_the_way_alone(tmp_path: Any) -> None:
    driver: Driver = sky.Local()
    assert not isinstance(driver, Admits)
