"""`imported`, which imports the SDKs of providers when they are first needed, one thread at a time."""

from __future__ import annotations

import threading
from importlib import import_module
from types import ModuleType

_importing = threading.RLock()


def imported(module: str) -> ModuleType:
    """Import a module of an SDK, and return it. Only one thread imports at a time; others wait.

    Drivers are called in parallel, and their SDKs share packages. If two threads import `requests` and
    `requests.exceptions` at the same time, they may wait for each other. Python then raises an error in one thread.

    Args:
        module: full name of the module, such as "botocore.session".

    Raises:
        ImportError: the module is not installed.
    """
    with _importing:
        return import_module(module)
