"""Tools for tests: `FakeCloud`, a cloud for rehearsals, and `DriverContract`, the tests that a driver must pass.

    from skypool.testing import FakeCloud, HttpCloud, Stock        # needs nothing but skypool
    from skypool.testing import Control, DriverContract            # DriverContract needs pytest

The modules of this package:

- `cloud`: `FakeCloud`.
- `control`: `Control`, with which a test makes the fake cloud fail, change prices or move its clock.
- `api`: the calls that drivers make to the fake cloud.
- `http_cloud`: `HttpCloud`, the same cloud with an HTTP API.
- `template`: a driver for `HttpCloud`, which `skypool new-driver` copies.
- `bills`: the bill of the fake cloud.
- `cloud_state`, `state_store`: the contents of the fake cloud, and their storage.
- `machine`, `hypervisor`, `notice_watch`: the machines of the fake cloud, the process that ends them on time, and a
  program that runs on them.
- `contract`, with `contract_lists` and `contract_slices`: `DriverContract`.
- `trial`, `side_effects`, `find_and_end`: helpers of the tests in `DriverContract`.

Words of this package:

- driver: the class through which skypool rents machines of one cloud provider.
- pool: a user's set of rented machines. Each machine is a node with a number.
- slice: several machines (hosts) that are sold, start and end together.
- stock: one kind of machine that the cloud sells in one zone on one market.
- thing: a key pair or security group, which the cloud keeps for a pool.
- lease: the seconds that a machine lives on without hearing from its client. The client renews it in the lease file.
- lifetime: the seconds after which a machine ends in any case.
- notice: the announcement that the cloud takes a machine back soon.
- control: the object with which a test changes the cloud behind a driver.
- market: "on-demand" or "spot". The cloud may take spot machines back.
- quota: a limit of the account on machines that are alive at the same time.
- token: a text that the client makes up for each new purchase, so that a repeated request buys nothing twice.
- journal, events: log files of the cloud, of all calls and of what happened to machines.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from skypool.testing.cloud import FakeCloud
    from skypool.testing.cloud_state import Stock
    from skypool.testing.contract import DriverContract
    from skypool.testing.control import Control
    from skypool.testing.http_cloud import HttpCloud

_HOME = {
    "Control": "skypool.testing.control",
    "DriverContract": "skypool.testing.contract",
    "FakeCloud": "skypool.testing.cloud",
    "HttpCloud": "skypool.testing.http_cloud",
    "Stock": "skypool.testing.cloud_state",
}

__all__ = ["Control", "DriverContract", "FakeCloud", "HttpCloud", "Stock"]

_ASSERTS = ("contract", "slices", "trial")
if "pytest" in sys.modules:  # pytest then shows the values in a failed assertion of these modules
    sys.modules["pytest"].register_assert_rewrite(*(f"skypool.testing.{each}" for each in _ASSERTS))


def __getattr__(name: str) -> Any:
    """Import the class with a public name on first use, so that `import skypool.testing` does not need pytest."""
    if name not in _HOME:
        raise AttributeError(f"module 'skypool.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
