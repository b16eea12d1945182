"""What is odd about RunPod, against the lab's RunPod; and the contract."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from skypool.accelerators import parse
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    ProviderError,
    QuotaError,
    RateLimitError,
)
from skypool.keys import Keys
from skypool.model import Instance, Need, Offer, Order
from skypool.testing import DriverContract
from skypool_runpod import RunPod
from tests.lab.runpod import GONE
from tests.lab.runpod import RunPod as World

CREATE = "podFindAndDeployOnDemand"
A40 = Need(accelerators=(parse("A40"),))
SAYS: dict[type[ProviderError], tuple[str, str]] = {
    AccessError: ("Not authorized to perform this operation", "FORBIDDEN"),
    CapacityError: GONE,
    QuotaError: ("This would exceed the spend limit of your account.", ""),
    FundsError: ("You do not have enough money to deploy this pod.", ""),
}


class Strings:
    """The contract's control of the lab's RunPod."""

    def __init__(self, world: World, create: str = CREATE) -> None:
        self.world, self.create = world, create

    def count(self) -> int:
        return self.world.count()["instances"]

    def stock_out(self, offer: Offer, left: int) -> None:
        kind = offer.detail["gpu"] or offer.detail["instance"]
        self.world.capacity(0, kind, "*", offer.market)
        self.world.capacity(left, kind, "EU-RO-1", offer.market)

    def refuse(self, kind: type[ProviderError]) -> bool:
        if kind is CredentialsError:
            self.world.fail(self.create, 401, {"errors": [{"message": "Unauthorized"}]})
        elif kind is RateLimitError:
            self.world.fail(
                self.create, 429, {"title": "Too Many Requests", "detail": "slow"}, headers={"Retry-After": "0"}
            )
        elif kind in SAYS:
            self.world.refuse(self.create, *SAYS[kind])
        else:
            return False
        return True

    def lose_reply(self) -> None:
        self.world.drop(self.create)

    def never_boot(self) -> None:
        self.world.delays.starting = 1e9

    def kill(self, instance: Instance) -> None:
        self.world.vanish(instance.id)

    def undying(self, instance: Instance, times: int | None) -> None:
        if instance.id in self.world.rentals:
            self.world.rentals[instance.id].undying = times


class TestRunPodCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, runpod_api: World, monkeypatch: pytest.MonkeyPatch) -> RunPod:
        monkeypatch.setattr(RunPod, "ending", 3.0)
        return RunPod()

    @pytest.fixture
    def control(self, runpod_api: World) -> Strings:
        return Strings(runpod_api)

    @pytest.fixture
    def need(self) -> Need:
        return A40

    @pytest.fixture
    def secrets(self, runpod_api: World) -> list[str]:
        return [runpod_api.key]


# --- on machines ---------------------------------------------------------------------------------------------


class TestRunPodMachines:
    """What of the contract runs commands, each on machines of its own: CPU pods."""

    patience = 60.0
    quick = 60.0
    real = True
    trial = DriverContract.trial
    secrets = DriverContract.secrets
    _needs_machines = DriverContract._needs_machines
    test_access = DriverContract.test_access_reaches_the_machine_and_passes_words_as_they_are
    test_pool = DriverContract.test_a_pool_lives_and_ends_there

    @pytest.fixture
    def driver(self, runpod: World) -> RunPod:
        return RunPod()

    @pytest.fixture
    def control(self, runpod: World) -> Strings:
        return Strings(runpod, "deployCpuPod")

    @pytest.fixture
    def need(self) -> Need:
        return Need()


def order(pool: str = "train", token: str = "0123456789abcdef-1", ranks: tuple[int, ...] = (0,), **more: Any) -> Order:
    until = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    return Order(pool, token, ranks, more.pop("need", A40), until=until, keys=Keys.of(pool), **more)


@pytest.mark.parametrize("without", ["", "/usr/bin/curl"])
def test_a_pod_ends_itself_with_its_own_key_by_curl_or_by_python(runpod: World, without: str) -> None:
    driver = RunPod()
    [launched] = driver.launch(next(iter(driver.offers(Need()))), order(need=Need(), lease=4.0))
    runpod.wait(lambda: runpod.rentals[launched.id].machine is not None)
    machine = runpod.rentals[launched.id].machine
    assert machine is not None
    if without:
        machine.path(without).unlink()
    runpod.wait(lambda: not runpod.count()["instances"], 40)
    [ended] = runpod.calls("podTerminate")
    assert ended.headers["authorization"] == f"Bearer rpp_{launched.id}"
    driver.terminate([launched])
