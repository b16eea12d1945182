"""Imports the user's own modules on a node (a rented machine), from source that the client sends.

The client is the user's process. Sources are identified by a hash of their content.

Modules that the client had loaded from outside site-packages take precedence over installed ones, as they do on the
client. For any other module that the node lacks, the client is asked when the module is imported.

The client's script cannot be imported on a node. multiprocessing inside a call normally sends functions and classes by
name. Functions and classes of the script are sent by value instead.
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

from skypool.wire.named import NAMED
from skypool.wire.pickling import SCRIPT, pickled


@dataclass(frozen=True, slots=True)
class FoundModule:
    """A module that the client has sent.

    Attributes:
        file: the path of the module's source on this node; None for a namespace package, which has no source.
        is_package: True if the module is a package.
        hash: the hash of the source, as the client computed it.
    """

    file: str | None
    is_package: bool
    hash: str


class UserModules:
    """An import hook for the modules that the user wrote. It loads these modules from source that the client sends.

    The import hook has no effect before `install` is called.

    Args:
        fetch: asks the client for a module by its name, and waits for the answer. Returns None if the client has no
            such module.
    """

    def __init__(self, fetch: Callable[[str], FoundModule | None]) -> None:
        self._fetch = fetch
        self._known: dict[str, str] = {}
        self._loaded: dict[str, str] = {}
        self._tops: set[str] = set()

    def install(self) -> None:
        """Add the import hook to this process: two finders in `sys.meta_path`.

        The first finder comes before all others, and finds modules known to be the user's own. The other comes last,
        and is for modules that nothing else finds.

        Also makes multiprocessing send functions and classes of the client's script by value.
        """
        send_script_by_value()
        sys.meta_path.insert(0, _First(self))
        sys.meta_path.append(_Last(self))

    def learn(self, manifest: dict[str, str]) -> bool:
        """Add a list of the user's own modules, which the client has sent, to the lists that came before.

        Args:
            manifest: a dict from the name of each module to the hash of its source.

        Returns:
            False if a module that was imported here has changed on the client. Only a new process can then import the
                changed module. Otherwise True.
        """
        self._known.update(manifest)
        self._tops.update(name.partition(".")[0] for name in manifest)
        return not any(manifest.get(name, hash_) != hash_ for name, hash_ in self._loaded.items())

    def is_first(self, name: str) -> bool:
        """Return True if a module of this name takes precedence over an installed one.

        That is so if the client's list has a module of the user's own with the same top-level package.
        """
        return name.partition(".")[0] in self._tops

    def has_sent(self, name: str) -> bool:
        """Return True if the module of this name was imported here from source that the client sent."""
        return name in self._loaded

    def find(self, name: str) -> ModuleSpec | None:
        """Return the spec of a module of the user's own, whose source the client sends. Waits for the client's answer.

        Returns None if the client has no module of that name.
        """
        found = self._fetch(name)
        if found is None:
            return None
        self._loaded[name] = found.hash
        if found.file is None:
            spec = ModuleSpec(name, None, is_package=True)  # a namespace package has no code
            spec.submodule_search_locations = []
            return spec
        return importlib.util.spec_from_file_location(
            name, found.file, submodule_search_locations=[] if found.is_package else None
        )


def send_script_by_value() -> None:
    """Make multiprocessing in this process send functions and classes of the client's script by value.

    The script cannot be imported on a node, so multiprocessing cannot send them by name. A second call changes nothing.
    """
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign, assignment]  # documented by pickle


def _by_value(_: ForkingPickler, thing: Any) -> Any:
    """Return the reduce value (as of `__reduce__`) by which pickle sends a function or class of the client's script.

    Returns NotImplemented for any other object, which is then pickled as usual.

    Args:
        _: the pickler, not used.
        thing: the object to pickle.
    """
    if isinstance(thing, (types.FunctionType, type, *NAMED)) and getattr(thing, "__module__", "") in SCRIPT:
        return _loaded, (pickled(thing),)
    return NotImplemented


def _loaded(data: bytes) -> Any:
    """Unpickle a function or class that a parent process sent by value, and return it.

    Also makes this process send such functions and classes by value.
    """
    send_script_by_value()  # a child process that was not forked may send such objects back
    return cloudpickle.loads(data)


class _First:
    """A finder for modules that are known to be the user's own. It finds no other modules."""

    def __init__(self, modules: UserModules) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return self._modules.find(name) if self._modules.is_first(name) else None


class _Last(_First):
    """A finder for modules that no other finder has found. It asks the client for these modules.

    Modules of the standard library and of skypool, and submodules of installed packages, are never asked for.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if self._modules.is_first(name) or top in sys.stdlib_module_names or top == "skypool":
            return None
        package = name.rpartition(".")[0]
        if package and path and not self._modules.has_sent(package):  # a submodule that an installed package lacks
            return None
        return self._modules.find(name)
