"""What is odd about RunPod, against the lab's RunPod; and the contract."""

from __future__ import annotations

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
from skypool.model import Instance, Need, Offer
from skypool.testing import DriverContract
from skypool_runpod import RunPod
from tests.lab.runpod import GONE
from tests.lab.runpod import RunPod as World

CREATE = "podFindAndDeployOnDemand"
L4 = Need(accelerators=(parse("L4"),))
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
            self.world.fail(self.create, 429, {"title": "Too Many Requests", "detail": "slow"}, headers={"Retry-After": "0"})
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
        return L4

    @pytest.fixture
    def secrets(self, runpod_api: World) -> list[str]:
        return [runpod_api.key]
