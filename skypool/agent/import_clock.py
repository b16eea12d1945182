"""Measures how long a call imports modules, so that this does not count towards its timeout."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

_NAME = "_find_and_load"
"""The function of importlib that the interpreter calls for each module that is not loaded yet."""


class ImportClock:
    """Clock that measures each import of the main thread. Modules that a module imports in turn belong to its import.

    Creating this object changes nothing; `install` does. `on_begin` is called before an import, and `on_end` after it,
    with the seconds that it took. The import of a module that is loaded already is not measured, and takes no longer.
    """

    def __init__(self, on_begin: Callable[[], None], on_end: Callable[[float], None]) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._is_importing = False

    def install(self) -> None:
        """Measure the imports of this process from now on. Call this in the main thread."""
        library: Any = sys.modules["_frozen_importlib"]
        import_it = getattr(library, _NAME, None)
        if import_it is None:
            return  # an interpreter other than CPython, where imports count
        main = threading.get_ident()

        def _find_and_load(name: str, import_: object) -> object:
            if self._is_importing or threading.get_ident() != main:
                return import_it(name, import_)
            self._is_importing = True
            began = time.monotonic()
            self._on_begin()
            try:
                return import_it(name, import_)
            finally:
                self._is_importing = False
                self._on_end(time.monotonic() - began)

        # with the name of importlib's file, Python leaves this function out of tracebacks, as it does importlib's own
        code = _find_and_load.__code__.replace(co_filename=import_it.__code__.co_filename)
        timed = types.FunctionType(code, _find_and_load.__globals__, _NAME, None, _find_and_load.__closure__)
        setattr(library, _NAME, timed)
