"""What is odd about Verda, against the lab's Verda; and the contract."""

from __future__ import annotations

import pytest

from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    ProviderError,
    RateLimitError,
)
from skypool.model import Instance, Need, Offer
from skypool.testing import DriverContract
from skypool_verda import Verda
from tests.lab.verda import SECRET
from tests.lab.verda import Verda as World

CODES: dict[type[ProviderError], tuple[int, str, str]] = {
    CredentialsError: (401, "unauthorized_request", "Access token is missing or invalid"),
    AccessError: (403, "forbidden_action", "You do not have permission to perform this action"),
    CapacityError: (
        503,
        "service_unavailable",
        "Not enough resources to deploy a 1 GPU instance type 1V100.6V in FIN-01",
    ),
    RateLimitError: (429, "too_many_requests", "Too many requests"),
    FundsError: (402, "insufficient_funds", "Not enough funds"),
}


class Strings:
    """The contract's control of the lab's Verda."""

    def __init__(self, world: World) -> None:
        self.world = world

    def count(self) -> int:
        return self.world.count()["instances"]

    def leftovers(self) -> int:
        return sum(number for name, number in self.world.count().items() if name != "instances")

    def stock_out(self, offer: Offer, left: int) -> None:
        self.world.capacity(left, offer.instance_type, offer.region, offer.market)

    def refuse(self, kind: type[ProviderError]) -> bool:
        if kind not in CODES:
            return False
        status, code, text = CODES[kind]
        times = 2 if kind is CredentialsError else 1  # one of them could be a token that has just ended
        self.world.fail("POST /instances", status, {"code": code, "message": text}, times=times)
        return True

    def lose_reply(self) -> None:
        self.world.drop("POST /instances")

    def never_boot(self) -> None:
        self.world.delays.validating = 1e9

    def kill(self, instance: Instance) -> None:
        self.world.preempt(instance.id)

    def undying(self, instance: Instance, times: int | None) -> None:
        self.world.undying(instance.id, times)


class TestVerdaCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, verda_api: World, monkeypatch: pytest.MonkeyPatch) -> Verda:
        monkeypatch.setattr(Verda, "ending", 3.0)
        return Verda()

    @pytest.fixture
    def control(self, verda_api: World) -> Strings:
        return Strings(verda_api)

    @pytest.fixture
    def secrets(self) -> list[str]:
        return [SECRET]


# --- on machines ---------------------------------------------------------------------------------------------


class TestVerdaMachines:
    """What of the contract runs commands, each on machines of its own."""

    patience = 60.0
    quick = 60.0
    real = True
    trial = DriverContract.trial
    secrets = DriverContract.secrets
    _needs_machines = DriverContract._needs_machines
    test_access = DriverContract.test_access_reaches_the_machine_and_passes_words_as_they_are
    test_pool = DriverContract.test_a_pool_lives_and_ends_there

    @pytest.fixture
    def driver(self, verda: World) -> Verda:
        return Verda()

    @pytest.fixture
    def control(self, verda: World) -> Strings:
        return Strings(verda)

    @pytest.fixture
    def need(self) -> Need:
        return Need()
