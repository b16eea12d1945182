"""Tools for tests: `FakeCloud`, a cloud for rehearsals, and `DriverContract`, the tests that a driver must pass.

A driver is the class through which skypool rents machines of one cloud provider.

    from skypool.testing import FakeCloud, HttpCloud, Stock        # needs nothing but skypool
    from skypool.testing import Control, DriverContract            # DriverContract needs pytest

The modules of this package:

- `cloud`: `FakeCloud`.
- `control`: `Control`, with which a test makes the fake cloud fail, change prices or move its clock.
- `api`: the calls that drivers make to the fake cloud.
- `http_cloud`: `HttpCloud`, the same cloud with an HTTP API.
- `template`: a driver for `HttpCloud`, which `skypool new-driver` copies.
- `bills`: the bill of the fake cloud.
- `world`, `state`: the contents of the fake cloud, and their storage.
- `machine`, `hypervisor`, `notice_watch`: the machines of the fake cloud, the process that ends them on time, and a
  program that runs on them.
- `contract`, `slices`: `DriverContract`.
- `trial`, `free`, `find_and_end`: helpers of the tests in `DriverContract`.
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
if "pytest" in sys.modules:  # pytest then shows the values in a failed assertion of these modules
    sys.modules["pytest"].register_assert_rewrite(*(f"skypool.testing.{each}" for each in _ASSERTS))


def __getattr__(name: str) -> Any:
    """Import and return the class with a public name of this package. Python calls this when the name is used.

    The class is imported this late so that `import skypool.testing` does not need pytest.

    Args:
        name: the name of the class, such as "FakeCloud".

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'skypool.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
