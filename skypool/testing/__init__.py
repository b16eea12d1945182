"""Tools for tests: `FakeCloud`, a cloud for rehearsals, and `DriverContract`, the tests that a driver must pass.

A driver is the class through which skypool rents machines of one cloud provider.

    from skypool.testing import FakeCloud, HttpCloud, Stock        # needs nothing but skypool
    from skypool.testing import Control, DriverContract            # DriverContract needs pytest

- `cloud`: `FakeCloud`; `control`: makes it fail, change prices or move its clock; `api`: the calls its driver makes.
- `http_cloud`: `HttpCloud`, the same cloud with an HTTP API; `template`: a driver for it, which `skypool new-driver`
  copies.
- `world`, `state`: the contents of the fake cloud, and their storage; `machine`, `hypervisor`: its machines and their
  end.
- `contract`, `slices`: `DriverContract`; `trial`, `free`: helpers of its tests.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from skypool.testing.cloud import FakeCloud
    from skypool.testing.contract import DriverContract
    from skypool.testing.control import Control
    from skypool.testing.http_cloud import HttpCloud
    from skypool.testing.world import Stock

_HOME = {
    "Control": "skypool.testing.control",
    "DriverContract": "skypool.testing.contract",
    "FakeCloud": "skypool.testing.cloud",
    "HttpCloud": "skypool.testing.http_cloud",
    "Stock": "skypool.testing.world",
}

__all__ = ["Control", "DriverContract", "FakeCloud", "HttpCloud", "Stock"]

_ASSERTS = ("contract", "slices", "trial")
if "pytest" in sys.modules:  # pytest then shows the values of a failed assertion of the contract
    sys.modules["pytest"].register_assert_rewrite(*(f"skypool.testing.{each}" for each in _ASSERTS))


def __getattr__(name: str) -> Any:
    """Import a public name of this package when it is first used, and return it.

    The class, function or value is imported only then, so that importing the package does not need pytest.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'skypool.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
