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
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skypool.agent.child_imports import SOCKET
from skypool.agent.processes import is_own
from skypool.errors import protocol_violation
from skypool.wire.frames import Buffer, Frame, Kind

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
_MOST_TOLD = 20
"""The number of versions of a package of which the client is told that they are here."""
_SHARE = 0.05
"""Seconds for which files are written before the agent's loop handles other events, such as pings of the client."""
Answer = dict[str, Any]
Tell = Callable[[Answer], None]
Wanted = tuple[str, str]


@dataclass(slots=True)
class _Arrival:
    """A package that is being stored.

    Attributes:
        wanted: the names and versions by which processes have asked for it.
        left_out: the paths of files that the client did not send.
        files: the (path, contents) of the files that have come and are not yet written.
        missing: the (hash, size) of each file that has not come, by its path, in the order of the package.
    """

    wanted: set[Wanted]
    left_out: list[str]
    files: deque[tuple[str, Buffer]]
    missing: dict[str, tuple[str, int]]


class Packages:
    """The user's own packages on a node, each with all its files in a folder of its own.

    Args:
        folder: the node's folder.
        ask: `ask(kind, header)` sends a frame to the client.
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.

    Attributes:
        is_behind: True if files wait to be written; `proceed` must be called soon then.
    """

    def __init__(
        self,
        folder: str,
        ask: Callable[[Kind, Mapping[str, object]], None],
        watch: Callable[[int, int, Callable[[], None]], None],
    ) -> None:
        self.is_behind = False
        self._folder = os.path.join(folder, "modules")
        self._ask = ask
        self._watch = watch
        self._waiting: dict[Wanted, list[Tell]] = {}
        self._coming: dict[str, _Arrival] = {}
        self._children: dict[int, tuple[socket.socket, float]] = {}
        self._missed: dict[str, float] = {}
        self._kept: dict[str, list[str]] = {}
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
                version, and "left_out" has the paths of files that were not sent. Otherwise "why" says
                what the client knows of the module.
        """
        wanted = name, version
        folder = os.path.join(self._folder, version)
        if version and os.path.isdir(folder):
            tell(self._found(version, self._left_out(folder)))
            return
        if wanted not in self._waiting:
            self._ask_for(name, version)
        self._waiting.setdefault(wanted, []).append(tell)

    def ask_again(self) -> None:
        """Ask the client again, after a reconnection, for the packages that processes wait for."""
        self._coming.clear()
        for wanted in self._waiting:
            self._ask_for(*wanted)

    def _ask_for(self, name: str, version: str) -> None:
        has = self._kept.get(name, [])[-_MOST_TOLD:]
        self._ask(Kind.MODULE, {"name": name, "version": version, "file": "", "has": has})

    def on_module(self, f: Frame) -> None:
        """Store files of a package that the client has sent. When it is complete, tell the processes that wait for it.

        If the files take long to write, `proceed` goes on with them. If the disk is full, these processes are told that
        there is no such module, and why. Raises ProtocolError if a file does not match its hash, or if the version of
        the package is not a hash.
        """
        h = f.header
        if "file" in h:
            self._on_files(str(h["hash"]), [str(path) for path in h["files"]], memoryview(bytes(f.body)))
            return
        wanted = str(h["name"]), str(h["version"])
        if not h["found"]:
            self._missed = {each: until for each, until in self._missed.items() if until > time.monotonic()}
            self._missed[wanted[0]] = time.monotonic() + _MISSED
            self._tell(wanted, {"found": False, "why": h.get("why", "")})
            return
        version = _plain(h["hash"])
        left_out = [str(path) for path in h.get("left_out", ())]
        if version in self._coming:
            self._coming[version].wanted.add(wanted)
        elif os.path.isdir(os.path.join(self._folder, version)):
            self._tell(wanted, self._found(version, left_out))
        else:
            listing, _, body = bytes(f.body).partition(b"\n")
            rest = memoryview(body)
            first = (".left-out", json.dumps(left_out).encode())
            arrival = _Arrival({wanted}, left_out, deque([first]), {})
            for number, (path, hash_, size) in enumerate(json.loads(listing)):
                if number < h["inline"]:
                    _check(path, hash_, rest[:size])
                    arrival.files.append((path, rest[:size]))
                    rest = rest[size:]
                else:
                    arrival.missing[path] = hash_, size
            self._coming[version] = arrival
            self.proceed()

    def _on_files(self, version: str, paths: list[str], rest: memoryview) -> None:
        """Store files that were missing. Ignore an answer that comes twice, as after a reconnection."""
        arrival = self._coming.get(version)
        if arrival is None or not arrival.missing.keys() >= {*paths}:
            return
        for path in paths:
            hash_, size = arrival.missing.pop(path)
            _check(path, hash_, rest[:size])
            arrival.files.append((path, rest[:size]))
            rest = rest[size:]
        self.proceed()

    def proceed(self) -> None:
        """Write files that have come, for up to `_SHARE` (0.05) seconds. Set `is_behind` if some are left."""
        self.is_behind = False
        until = time.monotonic() + _SHARE
        for version, arrival in list(self._coming.items()):
            if not arrival.files:
                continue
            part = os.path.join(self._folder, f"{version}.part")
            try:
                while arrival.files:
                    _write(part, *arrival.files[0])
                    arrival.files.popleft()
                    if arrival.files and time.monotonic() > until:
                        self.is_behind = True
                        return
                if not arrival.missing:
                    os.rename(part, part.removesuffix(".part"))
            except OSError as e:
                shutil.rmtree(part, ignore_errors=True)
                self._end(version, {"found": False, "why": f"full {e}"})
                continue
            if arrival.missing:
                # one after the other, so that at most one answer, of up to 10 MB, waits at the client to be sent
                name, _ = next(iter(arrival.wanted))
                self._ask(Kind.MODULE, {"name": name, "version": version, "file": next(iter(arrival.missing))})
            else:
                for name in {name for name, _ in arrival.wanted}:
                    self._kept.setdefault(name, []).append(version)
                self._end(version, self._found(version, arrival.left_out))

    def _end(self, version: str, answer: Answer) -> None:
        """Tell the processes that wait for a package what has become of it."""
        for wanted in self._coming.pop(version).wanted:
            self._tell(wanted, answer)

    def _found(self, version: str, left_out: list[str]) -> Answer:
        folder = os.path.join(self._folder, version)
        return {"found": True, "folder": folder, "hash": version, "left_out": left_out}

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


def _check(path: str, hash_: str, data: Buffer) -> None:
    """Raise a ProtocolError if a file of a package does not match its hash, or would lie outside of the package."""
    if hashlib.sha256(data).hexdigest()[:16] != hash_ or path.startswith("/") or ".." in path.split("/"):
        raise protocol_violation(f"the client sent the file {path!r:.200} of a package, which does not match its hash")


def _write(folder: str, path: str, data: Buffer) -> None:
    """Write a file of a package below a folder. Raises OSError if there is no room."""
    place = os.path.join(folder, path)
    os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
    with open(place, "wb") as file:
        file.write(data)
