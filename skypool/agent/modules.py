"""Imports the user's own modules on a node, from packages that the client sends.

A package comes with all its files, which become a folder on `sys.path`. Python's own finders do the rest: resources,
metadata and namespace packages work as on the client.

Modules that the client had loaded from outside site-packages take precedence over installed ones, as they do on the
client. For any other module that the node lacks, the client is asked when the module is imported.

The client's script cannot be imported on a node. Inside a call, multiprocessing therefore sends functions and classes
of the script by value instead of by name.
"""

from __future__ import annotations

import linecache
import os
import sys
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any

import cloudpickle

from skypool.agent import child_imports
from skypool.wire.error_text import text_of
from skypool.wire.named import NAMED
from skypool.wire.pickling import SCRIPT, pickled

_METADATA = "~metadata"
"""The name of the package with the metadata of editable installations."""
_ADVICE = "this node has no module {0!r}: "
_INSTALLED = "install it with Image(pip=[{1!r}]), the version that this program has"
_MADE = "the program made it while it ran, so that it has no file; write it into a file that the program imports"
_ELSE = (
    "install it with Image(pip=[…]) or Image(apt=[…]); a module of your own is sent if the program itself can import it"
)
_MUCH = (
    "the program has sent 256 MB of packages that it has not imported itself, and sends no more; import this module in "
    "the program"
)
_FULL = "it did not fit on the node's disk: {1}"


@dataclass(frozen=True, slots=True)
class FoundPackage:
    """Answer of the client about a module or package.

    Attributes:
        folder: the folder on this node in which the module is; None if the client cannot send such a module.
        version: a hash of the module's files.
        left_out: the paths of files that were not sent: they are too large, or may hold secrets.
        why: if `folder` is None, a word that says why, and details after a space: "installed" (not the user's own),
            "made" (it has no file), "full" (the node's disk) or "much" (the client sends no more). "" if unknown.
    """

    folder: str | None
    version: str
    left_out: tuple[str, ...]
    why: str


class ScriptModule(ModuleType):
    """Module `__main__` of a worker, which has the globals of the client's script.

    Its attribute `__file__` is missing for all code except `inspect`, which needs the name to show the text of classes.
    With the attribute, multiprocessing would run the script in the children that it starts. Functions of the script can
    still read the global variable `__file__`.
    """

    @property
    def __file__(self) -> str:  # type: ignore[override]
        if sys._getframe(1).f_globals.get("__name__") == "inspect" and "__file__" in self.__dict__:
            return str(self.__dict__["__file__"])  # its text is in `linecache`
        raise AttributeError("the script of the client is no file on this node")

    @property
    def __spec__(self) -> None:  # type: ignore[override]
        return None


class UserModules:
    """Import hook for the user's own modules, which the client sends. It has no effect before `install` is called.

    `fetch(name, version)` asks the client for a module or package, and waits for the answer. The version is a hash, or
    "" for any. `folder` is the node's folder.
    """

    def __init__(self, fetch: Callable[[str, str], FoundPackage], folder: str) -> None:
        self._fetch = fetch
        self._folder = folder
        self._known: dict[str, str] = {}
        self._first: frozenset[str] = frozenset()
        self._found: dict[str, FoundPackage] = {}
        self._missing: dict[str, str] = {}
        self._numpy = ""

    def install(self) -> None:
        """Add the import hook to this process: two finders in `sys.meta_path`.

        The first finder comes before all others, and finds modules known to be the user's own. The other comes last,
        for modules that nothing else finds. Environment variables make processes that calls start install such finders,
        too.

        Also makes multiprocessing send functions and classes of the client's script by value.
        """
        send_script_by_value()
        sys.meta_path.insert(0, _First(self))
        sys.meta_path.append(_Last(self))
        self._outside = os.environ.get("PYTHONPATH", "")
        os.environ[child_imports.PLACE] = self._folder
        self._tell_children()

    def _tell_children(self) -> None:
        """Set environment variables by which processes that calls start find packages here, and can ask for others."""
        folders = [os.path.join(self._folder, "children"), *(str(each.folder) for each in self._found.values())]
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([self._outside] if self._outside else [])])
        os.environ[child_imports.FIRST] = ",".join(sorted(self._first | self._known.keys()))

    def learn(self, about: Mapping[str, Any]) -> bool:
        """Note what the client says about the user's own modules. It says this together with each function.

        Returns False if a module that was imported here has changed: only a new process can import it again.

        Args:
            about: a dict. "modules" has the version of each of the user's modules and packages that the client has
                loaded, by name. "first" has names of other modules that take precedence over installed ones. "numpy"
                is the client's version of numpy, if it has loaded numpy.
        """
        self._known.update(about["modules"])
        self._first = self._first | frozenset(about["first"])
        self._numpy = about.get("numpy", "")
        for name, version in about["modules"].items():
            found = self._found.get(name)
            if found is not None and found.version != version:
                if any(each.partition(".")[0] == name for each in list(sys.modules)):
                    return False
                self._drop(name)
        if _METADATA in self._known:
            self.provide(_METADATA)
        self._tell_children()
        return True

    def _drop(self, name: str) -> None:
        found = self._found.pop(name)
        sys.path[:] = [each for each in sys.path if each != found.folder]

    def is_first(self, name: str) -> bool:
        """Return True if the user's own module of this name, without a dot, takes precedence over an installed one."""
        return name in self._known or name in self._first

    def provide(self, name: str) -> bool:
        """Get a module or package of the user's own from the client, and put its folder on `sys.path`.

        Waits for the client's answer. `name` has no dot. Returns False if the module is there already, or if the client
        cannot send it.
        """
        if name in self._found:
            return False
        found = self._fetch(name, self._known.get(name, ""))
        if found.folder is None:
            self._missing[name] = found.why
            return False
        self._found[name] = found
        if found.folder not in sys.path:
            sys.path.insert(0, found.folder)
        self._tell_children()
        return True

    def advice(self, error: BaseException) -> str:
        """Return advice for the user about an exception that concerns modules, their files or versions; else ""."""
        if isinstance(error, ImportError) and error.name and (path := self._code_left_out(error.name)):
            return (
                f"{path} of your package was not sent: files of more than 10 MB are left out; install the package with "
                "Image(pip=[…])"
            )
        if isinstance(error, ModuleNotFoundError) and error.name:
            return self._numpys(error.name) or self._missing_advice(error.name)
        if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
            for found in self._found.values():
                path = os.path.relpath(error.filename, found.folder)
                if path in found.left_out:
                    return (
                        f"{path} of your package was not sent: files of more than 10 MB, more than 50 MB of "
                        "files for a package, and files that may hold secrets are left out; send it with "
                        "Image(files={…})"
                    )
        return self._numpys("numpy.") if "numpy" in text_of(error) else ""

    def _code_left_out(self, name: str) -> str:
        """Return the path of a compiled file that was not sent and belongs to the package of module `name`; else ""."""
        found = self._found.get(name.partition(".")[0])
        return next((path for path in found.left_out if path.endswith(".so")), "") if found else ""

    def _missing_advice(self, name: str) -> str:
        top = name.partition(".")[0]
        kind, _, rest = self._missing.get(top, "").partition(" ")
        text = {"installed": _INSTALLED, "made": _MADE, "full": _FULL, "much": _MUCH}.get(kind, _ELSE)
        return (_ADVICE + text).format(name, rest)

    def _numpys(self, name: str) -> str:
        """Return a sentence with numpy's versions on client and node if they explain why `name` is missing; else ""."""
        numpy = sys.modules.get("numpy")
        if not name.startswith("numpy.") or numpy is None or not self._numpy:
            return ""
        if numpy.__version__.partition(".")[0] == self._numpy.partition(".")[0]:
            return ""
        return (
            f"this computer has numpy {self._numpy} and the node numpy {numpy.__version__}, which do not read each "
            f'other\'s arrays; use one major version: Image(pip=["numpy=={self._numpy}"])'
        )


def take_source(file: str, data: bytes) -> None:
    """Let tracebacks and `inspect` show the lines of a file of the client. `data` is its text, compressed by zlib."""
    text = zlib.decompress(data).decode("utf-8", "surrogatepass")
    # without a time, Python does not compare it with a file of that name here
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def send_script_by_value() -> None:
    """Make multiprocessing in this process send functions and classes of the client's script by value.

    The script cannot be imported on a node, so they cannot be sent by name. A second call changes nothing.
    """
    ForkingPickler.reducer_override = _by_value  # type: ignore[method-assign, assignment]  # documented by pickle


def _by_value(_: ForkingPickler, thing: Any) -> Any:
    """Return what pickle stores to send a function or class of the script by value; NotImplemented for others."""
    if isinstance(thing, (types.FunctionType, type, *NAMED)) and getattr(thing, "__module__", "") in SCRIPT:
        return _loaded, (pickled(thing),)
    return NotImplemented


def _loaded(data: bytes) -> Any:
    """Unpickle a function or class that a parent process sent by value, and send such objects by value, too."""
    send_script_by_value()  # a child process that was not forked may send such objects back
    return cloudpickle.loads(data)


class _First:
    """Finder for modules that are known to be the user's own."""

    def __init__(self, modules: UserModules) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None and self._modules.is_first(name) and self._modules.provide(name):
            return PathFinder.find_spec(name)
        return None


class _Last(_First):
    """Finder that asks the client for modules that no other finder has found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names or top == "skypool":
            return None
        parent = sys.modules.get(name.rpartition(".")[0])
        # of an installed package, the client may have more parts only if it is a namespace package, which has no file
        if parent is not None and getattr(parent, "__file__", None) is not None:
            return None
        if not self._modules.provide(top):
            return None
        return PathFinder.find_spec(name, None if parent is None else parent.__path__)
