"""The pickler that everything is pickled with: cloudpickle, protocol 5, with the user's script by value."""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from types import ModuleType
from typing import Any, ClassVar, cast

import cloudpickle

PROTOCOL = 5
SCRIPT = frozenset({"__main__", "__mp_main__"})
"""Names of the user's script: its own, and the one it has in a process that multiprocessing spawned.

No node can import it, so its functions and classes travel by value.
"""
if "__mp_main__" in sys.modules:  # only then can functions have it; of its own accord cloudpickle knows `__main__` only
    cloudpickle.register_pickle_by_value(ModuleType("__mp_main__"))


def _no_file(file: io.TextIOWrapper) -> Any:
    raise TypeError(f"cannot pickle the open file {file.name!r}; send its path, or what it holds")


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, which would send an open file as a copy of what is left in it."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {io.TextIOWrapper: _no_file}, cast(Any, cloudpickle.Pickler.dispatch_table)
    )


def pickled(value: object) -> bytes:
    """Return the pickle of a value, whose large buffers stay in it."""
    with io.BytesIO() as file:
        Pickler(file, PROTOCOL).dump(value)
        return file.getvalue()
