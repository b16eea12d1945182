"""What of the driver contract runs commands on machines: for the clouds whose instances the lab boots."""

from __future__ import annotations

from typing import ClassVar

import pytest

from skypool.model import Need
from skypool.testing import DriverContract


class OnMachines:
    """Its test classes say which `driver` and which `control`, and add what else their cloud can do."""

    patience = 60.0
    quick = 60.0
    real = True
    several: ClassVar[bool] = True
    trial = DriverContract.trial
    secrets = DriverContract.secrets
    _needs_machines = DriverContract._needs_machines
    test_access = DriverContract.test_access_reaches_the_machine_and_passes_words_as_they_are
    test_pool = DriverContract.test_a_pool_lives_and_ends_there

    @pytest.fixture
    def need(self) -> Need:
        return Need()
