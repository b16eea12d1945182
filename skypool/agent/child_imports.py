"""Lets Python processes that calls start import the modules of the client, as their parents do.

It also makes them write their stacks when `skypool stack` asks for that.

Such a process runs this file as its `sitecustomize`, because the environment of calls names its folder in PYTHONPATH.
The file imports only the standard library. If Python finds a module nowhere, the process asks the agent for it at a
Unix socket. The answer is the folder in which the module is.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing these takes time that every process would pay
    from collections.abc import Collection, Sequence
    from importlib.machinery import ModuleSpec

SOCKET = "modules.sock"
PLACE = "SKYPOOL_MODULES"
"""The environment variable with the node's folder."""
FIRST = "SKYPOOL_FIRST"
"""The environment variable with the names of the client's modules that take precedence over others of that name."""
_PATIENCE = 90.0


def ask(place: str, name: str) -> str | None:
    """Ask the agent in which folder the module `name` is, and wait for the answer.

    `place` is the node's folder, which contains the agent's socket. Returns None if the client has no such module, or
    if the agent is gone or does not answer within 90 seconds.
    """
    import json
    import socket

    folder = None
    connection = None
    try:
        folder = os.open(place, os.O_RDONLY)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_PATIENCE)
        connection.connect(f"/proc/self/fd/{folder}/{SOCKET}")  # the whole path may be too long
        connection.sendall(name.encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            piece = connection.recv(65536)
            if not piece:
                return None
            said += piece
        found: str | None = json.loads(said.decode())["folder"]
        return found
    except (OSError, ValueError):
        return None
    finally:
        if connection is not None:
            connection.close()
        if folder is not None:
            os.close(folder)


class _Finder:
    """Finder that asks the agent for modules: those in `names`, or all if it is None. `place`: the node's folder."""

    def __init__(self, place: str, names: Collection[str] | None = None) -> None:
        self._place = place
        self._names = names
        self._asked: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module that the client has; None if it has no such module."""
        top = name.partition(".")[0]
        if top in self._asked or not self._wants(top, name):
            return None
        self._asked.add(top)
        folder = ask(self._place, top)
        if folder is None:
            return None
        from importlib.machinery import PathFinder

        if folder not in sys.path:
            sys.path.insert(0, folder)
        parent = sys.modules.get(name.rpartition(".")[0])
        return PathFinder.find_spec(name, None if parent is None else parent.__path__)

    def _wants(self, top: str, name: str) -> bool:
        if self._names is not None:
            return name in self._names
        if top in sys.stdlib_module_names or top in ("sitecustomize", "usercustomize", "skypool"):
            return False
        package = sys.modules.get(name.rpartition(".")[0])
        return package is None or getattr(package, "__file__", None) is None


def install(place: str, first: Collection[str]) -> None:
    """Add finders to this process which ask the agent for modules. `place` is the node's folder.

    Modules with the names in `first` are asked for before Python looks elsewhere; all others only if it finds none.
    """
    if first:
        sys.meta_path.insert(0, _Finder(place, frozenset(first)))
    sys.meta_path.append(_Finder(place))


def write_stacks() -> None:
    """Make this process write the stacks of its threads to a file in memory whenever it gets `stacks.SIGNAL`."""
    import _signal  # type: ignore[import-not-found]  # parts of the interpreter, which are quick to import
    import _thread
    import faulthandler
    import fcntl

    fd = os.memfd_create(f"skypool-stack-{_thread.get_ident():x}", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(_signal.SIGRTMIN + 9, file=fd, all_threads=True)


def _become_sitecustomize() -> None:
    """Install the finders. Then run another `sitecustomize`, if there is one, which Python has not found first."""
    try:
        write_stacks()
    except (OSError, ImportError, AttributeError) as e:
        del e  # then `skypool stack` says less about it
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != here]
    if PLACE in os.environ:
        install(os.environ[PLACE], [each for each in os.environ.get(FIRST, "").split(",") if each])
    hidden = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError:
        if hidden is not None:
            sys.modules["sitecustomize"] = hidden


if __name__ == "sitecustomize":
    _become_sitecustomize()
