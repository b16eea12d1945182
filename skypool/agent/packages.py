"""Keeps the user's own modules and packages on a node, as folders with all their files, and asks the client for them.

Workers ask the agent through their sockets. Children, which are other processes that calls have started, such as those
of `multiprocessing`, ask the agent at a Unix socket by the program `child_imports`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pkgutil
import select
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from skypool.agent.child_imports import SOCKET
from skypool.agent.processes import is_own
from skypool.errors import protocol_violation
from skypool.wire.frames import Frame, Kind

_MOST_CHILDREN = 200
"""The most processes that may wait for modules at once."""
_BREATH = 0.01
"""Seconds that the agent waits when it cannot accept a connection."""
_LONGEST = 1000
"""The most bytes of a child's question at the socket, which is the name of a module."""
_PATIENCE = 60.0
"""Seconds after which a process that waits at the socket is told that there is no such module."""
_MISSED = 5.0
"""Seconds for which the client is not asked again, on behalf of children, for a module that it does not have."""
Answer = dict[str, Any]
Tell = Callable[[Answer], None]
Wanted = tuple[str, str]


class Packages:
    """The user's own packages on a node, each with all its files in a folder of its own.

    Args:
        folder: the node's folder.
        ask: `ask(kind, header)` sends a frame to the client.
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.
    """

    def __init__(
        self,
        folder: str,
        ask: Callable[[Kind, Mapping[str, object]], None],
        watch: Callable[[int, int, Callable[[], None]], None],
    ) -> None:
        self._folder = os.path.join(folder, "modules")
        self._ask = ask
        self._watch = watch
        self._waiting: dict[Wanted, list[Tell]] = {}
        self._coming: dict[Wanted, tuple[str, dict[str, tuple[str, int]], list[str]]] = {}
        self._children: dict[int, tuple[socket.socket, float]] = {}
        self._missed: dict[str, float] = {}
        self._listener = self._listen(folder)

    def _listen(self, folder: str) -> socket.socket | None:
        """Open the socket at which children ask, and write their program `child_imports`. Return None if that fails."""
        place = os.path.join(folder, "children")
        try:
            os.makedirs(place, 0o700, exist_ok=True)
            with open(os.path.join(place, "sitecustomize.py"), "wb") as file:
                file.write(pkgutil.get_data("skypool.agent", "child_imports.py") or b"")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SOCKET)  # the agent's current folder is the node's, as the path may be too long for a socket
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            listener.bind(SOCKET)
            os.chmod(SOCKET, 0o600)
            listener.listen(128)
        except OSError as e:
            print(f"children of calls cannot import modules of the client: {e}", flush=True)
            return None
        self._watch(listener.fileno(), select.EPOLLIN, self._accept)
        return listener

    # --- children --------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            child, _ = self._listener.accept()
        except BlockingIOError:
            return  # it has left
        except OSError:  # no descriptor is free; the loop is told of the connection again at once
            time.sleep(_BREATH)
            return
        if not is_own(child) or len(self._children) >= _MOST_CHILDREN:
            child.close()
            return
        child.setblocking(False)
        self._children[child.fileno()] = child, time.monotonic()
        self._watch(child.fileno(), select.EPOLLIN, lambda: self._hear(child))

    def _hear(self, child: socket.socket) -> None:
        try:
            said = child.recv(_LONGEST)
        except OSError:
            said = b""
        name = said.decode("utf-8", "replace").strip()
        self._watch(child.fileno(), 0, _nothing)
        if not name or self._missed.get(name, 0.0) > time.monotonic():
            self._tell_child(child, {"found": False, "why": ""})
        else:
            self.want(name, "", lambda answer: self._tell_child(child, answer))

    def _tell_child(self, child: socket.socket, answer: Answer) -> None:
        if self._children.pop(child.fileno(), None) is None:
            return
        with contextlib.suppress(OSError):
            child.send((json.dumps({"folder": answer.get("folder")}) + "\n").encode())
        child.close()

    def tick(self) -> None:
        """Tell children that have waited for `_PATIENCE` (60) seconds that there is no such module."""
        if self._children:
            now = time.monotonic()
            for child, since in list(self._children.values()):
                if now - since > _PATIENCE:
                    self._watch(child.fileno(), 0, _nothing)
                    self._tell_child(child, {})

    # --- from workers and to the client ----------------------------------------------------------------------

    def want(self, name: str, version: str, tell: Tell) -> None:
        """Ask the client for a package, unless it is here already. Call `tell` with the answer when it has come.

        Args:
            name: the name of the module or package.
            version: the hash of its files; "" for whichever version the client has.
            tell: called with a dict. If its "found" is True, "folder" is the folder with the package, "hash" its
                version, and "left_out" has the paths of files that were too large to be sent. Otherwise "why" says
                what the client knows of the module.
        """
        wanted = name, version
        folder = os.path.join(self._folder, version)
        if version and os.path.isdir(folder):
            tell({"found": True, "folder": folder, "hash": version, "left_out": self._left_out(folder)})
            return
        if wanted not in self._waiting:
            self._ask(Kind.MODULE, {"name": name, "version": version, "file": ""})
        self._waiting.setdefault(wanted, []).append(tell)

    def ask_again(self) -> None:
        """Ask the client again, after a reconnection, for the packages that processes wait for."""
        self._coming.clear()
        for name, version in self._waiting:
            self._ask(Kind.MODULE, {"name": name, "version": version, "file": ""})

    def on_module(self, f: Frame) -> None:
        """Store files of a package that the client has sent. When it is complete, tell the processes that wait for it.

        If the disk is full, these processes are told that there is no such module, and why. Raises ProtocolError if a
        file does not match its hash, or if the version of the package is not a hash.
        """
        h = f.header
        if "file" in h:
            self._on_file(str(h["name"]), str(h["hash"]), str(h["file"]), f.body)
            return
        wanted = str(h["name"]), str(h["version"])
        if not h["found"]:
            self._missed = {each: until for each, until in self._missed.items() if until > time.monotonic()}
            self._missed[wanted[0]] = time.monotonic() + _MISSED
            self._tell(wanted, {"found": False, "why": h.get("why", "")})
            return
        folder = os.path.join(self._folder, _plain(h["hash"]))
        left_out = [str(path) for path in h.get("left_out", ())]
        answer = {"found": True, "folder": folder, "hash": h["hash"], "left_out": left_out}
        if os.path.isdir(folder):
            self._tell(wanted, answer)
            return
        listing, _, rest = bytes(f.body).partition(b"\n")
        part = f"{folder}.part"
        try:
            shutil.rmtree(part, ignore_errors=True)
            os.makedirs(part, 0o700)
            with open(os.path.join(part, ".left-out"), "w") as file:
                json.dump(left_out, file)
            missing: dict[str, tuple[str, int]] = {}
            for number, (path, hash_, size) in enumerate(json.loads(listing)):
                if number < h["inline"]:
                    _write(part, path, hash_, rest[:size])
                    rest = rest[size:]
                else:
                    missing[path] = hash_, size
        except OSError as e:
            self._tell(wanted, {"found": False, "why": f"full {e}"})
            return
        self._coming[wanted] = h["hash"], missing, left_out
        self._proceed(wanted)

    def _on_file(self, name: str, version: str, path: str, data: memoryview) -> None:
        for wanted, (hash_, missing, _) in list(self._coming.items()):
            if wanted[0] == name and hash_ == version and path in missing:
                try:
                    _write(os.path.join(self._folder, f"{version}.part"), path, missing.pop(path)[0], bytes(data))
                except OSError as e:
                    del self._coming[wanted]
                    self._tell(wanted, {"found": False, "why": f"full {e}"})
                    return
                self._proceed(wanted)
                return

    def _proceed(self, wanted: Wanted) -> None:
        """Ask for the next file of a package. When the package is complete, tell the processes that wait for it."""
        version, missing, left_out = self._coming[wanted]
        # one by one, so that at most one answer, of up to 10 MB, waits at the client to be sent
        if missing:
            self._ask(Kind.MODULE, {"name": wanted[0], "version": version, "file": next(iter(missing))})
            return
        del self._coming[wanted]
        folder = os.path.join(self._folder, version)
        with contextlib.suppress(OSError):  # another one has come first
            os.rename(f"{folder}.part", folder)
        self._tell(wanted, {"found": True, "folder": folder, "hash": version, "left_out": left_out})

    def _left_out(self, folder: str) -> list[str]:
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, ".left-out")) as file:
            return [str(path) for path in json.load(file)]
        return []

    def _tell(self, wanted: Wanted, answer: Answer) -> None:
        for tell in self._waiting.pop(wanted, []):
            tell(answer)


def _nothing() -> None: ...


def _plain(name: str) -> str:
    """Return `name` if it is the plain name of a folder. Raise a ProtocolError if it could be a path to elsewhere."""
    if not name.isalnum():
        raise protocol_violation("the client sent a package whose version is no hash")
    return name


def _write(folder: str, path: str, hash_: str, data: bytes) -> None:
    """Write a file of a package below a folder. Raises OSError if there is no room, ProtocolError if it is invalid."""
    if hashlib.sha256(data).hexdigest()[:16] != hash_ or path.startswith("/") or ".." in path.split("/"):
        raise protocol_violation(f"the client sent the file {path!r:.200} of a package, which does not match its hash")
    place = os.path.join(folder, path)
    os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
    with open(place, "wb") as file:
        file.write(data)
