"""`imported`: imports a provider's SDK (Python package) when the SDK is first needed, in one thread at a time."""

from __future__ import annotations

import threading
from importlib import import_module
from types import ModuleType

_importing = threading.RLock()


def imported(module: str) -> ModuleType:
    """Import a module of an SDK (a provider's Python package), and return the module.

    Only one thread at a time imports through this function; other threads wait. Python can raise an error if two
    threads import modules of the same package at the same time.

    Args:
        module: full name of the module, such as "botocore.session".

    Raises:
        ImportError: the module is not installed.
    """
    with _importing:
        return import_module(module)
