"""`imported`: imports a provider's SDK when it is first needed, in one thread at a time."""

from __future__ import annotations

import threading
from importlib import import_module
from types import ModuleType

_importing = threading.RLock()


def imported(module: str) -> ModuleType:
    """Import a module of a provider's SDK by its full name, such as "botocore.session", and return the module.

    Only one thread at a time imports through this function; other threads wait. Python can raise an error if two
    threads import modules of the same package at the same time.

    Raises:
        ImportError: the module is not installed.
    """
    with _importing:
        return import_module(module)
