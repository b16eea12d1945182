"""Import hook on a node: imports the user's own modules from source that the client sends.

Sources travel by content hash.

What was defined in the client's script is nowhere to be imported from, so that multiprocessing inside a call, which
sends functions and classes by name, gets them by value.

Modules that the client had loaded from outside site-packages come first, as they do there; any other that the node
lacks is asked for when it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import cloudpickle

from skypool.wire.pickling import SCRIPT


@dataclass(frozen=True, slots=True)
class FoundModule:
    """A module of the client's.

    Attributes:
        file: its source here, None for a namespace package, which has none.
        is_package: whether it may have modules in it.
        hash: of its source.
    """

    file: str | None
    is_package: bool
    hash: str


class UserModules:
    """An import hook.

    Args:
        fetch: asks the agent for a module by its name, which asks the client; None if the client has none.
    """

    def __init__(self, fetch: Callable[[str], FoundModule | None]) -> None:
        self._fetch = fetch
        self._known: dict[str, str] = {}
        self._loaded: dict[str, str] = {}
        self._tops: set[str] = set()

    def install(self) -> None:
        """First in line for the names known to be the user's own, last for all others."""
        send_script_by_value()
        sys.meta_path.insert(0, _First(self))
        sys.meta_path.append(_Last(self))

    def learn(self, manifest: dict[str, str]) -> bool:
        """Take the client's list of its user's modules, name -> content hash.

        Returns:
            False when a module already imported here has changed there: only a fresh process can follow.
        """
        self._known.update(manifest)
        self._tops.update(name.partition(".")[0] for name in manifest)
        return not any(manifest.get(name, hash_) != hash_ for name, hash_ in self._loaded.items())

    def is_first(self, name: str) -> bool:
        """Whether the user's own module of this name comes before an installed one."""
        return name.partition(".")[0] in self._tops

    def find(self, name: str) -> ModuleSpec | None:
        """The spec of a module of the user's own, None if the client has none of that name."""
        found = self._fetch(name)
        if found is None:
            return None
        self._loaded[name] = found.hash
        if found.file is None:
            spec = ModuleSpec(name, None, is_package=True)  # a namespace package: nothing to run
            spec.submodule_search_locations = []
            return spec
        return importlib.util.spec_from_file_location(
            name, found.file, submodule_search_locations=[] if found.is_package else None
        )


def send_script_by_value() -> None:
    """Let multiprocessing send what the client's script defined, from this process."""
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign, assignment]  # as pickle has it


def _by_value(_: ForkingPickler, thing: Any) -> Any:
    """How a function or class of the client's script is pickled for a child process; all else as ever."""
    if isinstance(thing, (types.FunctionType, type)) and thing.__module__ in SCRIPT:
        return _loaded, (cloudpickle.dumps(thing),)
    return NotImplemented


def _loaded(pickled: bytes) -> Any:
    send_script_by_value()  # a child that was not forked answers with such things, too
    return cloudpickle.loads(pickled)


class _First:
    def __init__(self, modules: UserModules) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return self._modules.find(name) if self._modules.is_first(name) else None


class _Last(_First):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if self._modules.is_first(name) or top in sys.stdlib_module_names or top == "skypool":
            return None
        if "." in name and path:  # a submodule that an installed package lacks
            return None
        return self._modules.find(name)
