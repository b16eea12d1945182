"""The program on a node that saves folders to buckets, and brings or fetches them. The agent starts it and watches it.

It reads commands from stdin, one JSON object a line, and prints the state of all folders, one JSON object a line. When
stdin ends, it saves what is left and ends. Programs of the node ask it at a socket to save at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from skypool.buckets import google, store
from skypool.data import objects
from skypool.data.checkpoint_saver import CheckpointSaver
from skypool.data.filled_folder import FETCHES, FilledFolder
from skypool.data.folder_saver import Account, FolderSaver
from skypool.data.node_login import place_of
from skypool.data.progress import Pause
from skypool.data.restoring import Restored, restore
from skypool.errors import SkypoolError, UsageError
from skypool.safety import peers, private
from skypool.wire.save_orders import LOOKED, NOTES, SOCKET, seconds_needed

_SMALL_FILES = 8
"""The number of small files, or parts of a large one, that move at the same time."""
_PATIENCE = 60.0
"""Seconds after which a request to a store has failed. A part of a large file must be sent in this time."""
_TO_COMPLETE = 300.0
"""The same for large files at Google, as that puts the parts of one together in several minutes at most:
https://cloud.google.com/storage/docs/xml-api/post-object-complete (read 2026-11-30)."""
_EVERY = 1.0
"""Seconds between two looks at a folder; a look at a large folder takes at most a tenth of the time."""
_SHARE = 10
_TOLD = 0.5
"""Seconds between two accounts, if something has changed."""
_TO_SETTLE = 60.0
"""Seconds after which the last checkpoint is known to be whole, if its program has not said so."""
_TO_BE_KILLED = 10.0
"""Seconds in which the keeper has killed all that writes files, when the agent has ended."""
_TO_HEAR = 2.0
"""Seconds in which a mover that begins has all orders."""
_SILENT = 5.0
"""The most seconds between two accounts."""
_RENEWALS = {
    "keys": "pass new ones, and start again",
    "temporary": "the client renews them when it is back",
    "identity": "the machine renews them",
}
"""What to do about credentials that have expired, by the way to log in."""
_PAUSES = 1.0, 30.0
"""The first and the longest pause in seconds after an attempt to bring a folder back."""
_LONGEST = 1 << 16
"""The most bytes of a request at the socket."""
_IOPRIO = {"x86_64": 251, "aarch64": 30}
"""The number of the system call `ioprio_set` by machine."""
_LAST_OF_ALL = (2 << 13) | 7
"""The priority of requests to a disk that come after those of all other programs."""
_PR_SET_DUMPABLE = 4
_QUIET = threading.Event()
"""An event that is set: nobody writes any more."""
_QUIET.set()


class Folder:
    """A folder that is saved. It has a thread of its own.

    Args:
        said: the command, with the members of `Order` in `skypool.wire.save_orders`. `before` is the last account of a
            mover that has ended; its counts go on.
        journal: the file in which it is noted what was saved.
        former: the same folder when it was saved to another place. Its end is awaited.
        news: is set when something is to be told at once.

    Attributes:
        phase: "restoring", "saving", "ending", or "ended".
        whole: True if everything was saved when it ended.
    """

    def __init__(
        self,
        said: Mapping[str, Any],
        journal: str,
        former: Folder | FilledFolder | None = None,
        news: threading.Event | None = None,
    ) -> None:
        self.id: str = said["id"]
        self.serial: str = said["serial"]
        self.phase = "restoring" if said["restores"] else "saving"
        self.whole = False
        self.trouble = ""
        before = said.get("before", {})
        self.restored = Restored(**before.get("back", {}))
        self.restored.received = self.restored.bytes  # parts of files come again
        self._account = Account(**{each.name: before[each.name] for each in fields(Account) if each.name in before})
        self._account.trouble = ""
        self._former_rate: int = before.get("rate", 0)
        self._said, self._journal, self._former = said, journal, former
        self._credentials: tuple[int, tuple[str, ...]] = said["credentials"], tuple(said["values"])
        self._saver: FolderSaver | None = None
        self._checkpoints: CheckpointSaver | None = None
        self._wake = threading.Event()
        self._until: float | None = None
        self._calm, self._is_quiet = False, _QUIET
        self._took = 0.0  # seconds of the last turn, without those in which checkpoints were sent
        self._turns = threading.Lock()  # for the thread of the folder, and those who want it saved at once
        self._asking = threading.Lock()  # for those who bring a checkpoint back
        self._nodes: int = said["nodes"]
        self._shared: int = said["nodes"]  # for so many nodes all files that are sent have owners
        self._sharing = threading.Lock()
        self._noted: list[int] = []  # by the numbers of their stops: whose halves are known
        self._noting = threading.Lock()
        self._notes: list[str] = []  # the names of those that are in the bucket
        self._keeping: set[str] = set()  # the names of those that are on their way there
        self._news = news or threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"save {self.id}", daemon=True)
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """True if it saves what is left, or has."""
        return self._until is not None

    def renew(self, credentials: int, values: tuple[str, ...]) -> None:
        """Use other values for the requests that follow, and try again at once what has failed."""
        self._credentials = credentials, values
        if self._saver is not None:
            self._saver.pause.end()
        self._wake.set()

    def end(self, seconds: float, calm: bool = False, is_quiet: threading.Event = _QUIET) -> None:
        """Save what is left, in so many seconds at most: as long as it should take, but half a minute at least.

        Args:
            calm: True if what writes the files has ended by itself.
            is_quiet: is set when nobody writes any more.
        """
        self._is_quiet = is_quiet
        said = self.told()
        if said.get("rate") and not said["trouble"]:
            seconds = min(seconds, _TO_SETTLE + seconds_needed(seconds, "ending", said["unsaved_bytes"], said["rate"]))
        self._calm = calm
        self._until = time.monotonic() + seconds
        self._wake.set()

    def share(self, nodes: int) -> None:
        """Give files owners from now on, as so many nodes will save to the place. An error is repeated by who asks."""
        self._nodes = max(nodes, self._nodes)
        if self._saver is not None and self._sharing.acquire(blocking=False):
            try:
                self._saver.share(self._nodes)
                self._shared = self._nodes
            except Exception as e:  # noqa: BLE001 - whatever a store answers is told
                self._saver.account.trouble = store.trouble(e).words
            finally:
                self._sharing.release()

    def note_halves(self, number: int = 0, pids: Sequence[int] | None = None) -> None:
        """Note which files are being written: who writes them is stopped next, so that they stay halves.

        Args:
            number: is told when they are known, until `end_halves` has it.
            pids: the processes that are stopped. Default None: all that write.
        """
        saver = self._saver_soon()
        if saver is None or saver.halves.note(number, pids):
            with self._noting:
                self._noted = [*self._noted, number]
        self._news.set()

    def end_halves(self, number: int, at: int) -> None:
        """Note when those who wrote had ended, in nanoseconds since 1970."""
        if (saver := self._saver_soon()) is not None:
            saver.halves.end(number, at)
        with self._noting:
            self._noted = [each for each in self._noted if each != number]

    def keep_note(self, name: str, text: str, file: str = "") -> None:
        """Keep a text in the bucket, also when the folder is not saved any more. Who wants it asks until it is told.

        If `file` is the path of a file, its content is kept in place of the text.
        """
        with self._noting:
            if self._saver is None or name in self._notes or name in self._keeping:
                return
            self._keeping.add(name)  # a large file may take longer than the pause between two orders
        try:
            if file:
                objects.put_file(self._saver.store, f"{NOTES}/{name}", Path(file))
            else:
                objects.put(self._saver.store, f"{NOTES}/{name}", text.encode())
        except Exception as e:  # noqa: BLE001 - whatever a store answers
            print(f"{name} cannot be noted in the bucket: {store.trouble(e).words}", file=sys.stderr, flush=True)
            return
        finally:
            with self._noting:
                self._keeping.discard(name)
        self._notes = [*self._notes, name]
        self._news.set()

    def _saver_soon(self) -> FolderSaver | None:
        """Return the saver, which a mover that just begins has in a moment; None before the folder is back."""
        until = time.monotonic() + _TO_HEAR
        while self._saver is None and self.phase == "saving" and time.monotonic() < until:
            time.sleep(_TOLD / 10)
        return self._saver

    def join(self) -> None:
        self._thread.join()

    def told(self) -> dict[str, Any]:
        """Return the state of the folder for the client."""
        saver = self._saver
        account = asdict(self._account)
        account["rate"] = self._former_rate
        restored = asdict(self.restored)
        trouble = self._advised(self.trouble or account.pop("trouble", ""))
        said = {name: self._said[name] for name in ("id", "url", "serial", "drain")}
        if saver is not None and self._checkpoints is not None:
            more = self._checkpoints
            account["files"] += more.files
            account["bytes"] += more.sent
            account["unsaved"] += more.unsaved
            account["unsaved_bytes"] += more.unsaved_bytes
            account["oldest"] = round(max(saver.waiting.oldest, more.waiting.oldest))
            account["rate"] = round(saver.rate.per_second) or self._former_rate
        said |= {"place": self._said["node"], "nodes": self._shared, "phase": self.phase, "whole": self.whole}
        said |= {"looked": self._noted, "noted": self._notes, "credentials": self._credentials[0]}
        return {**account, **said, "trouble": trouble, "back": restored}

    def _advised(self, trouble: str) -> str:
        """Return trouble with what helps on a machine, where a login is missing or has expired."""
        login = self._said["login"]
        if trouble.startswith(store.NO_LOGIN):
            return "this machine has no identity for the store; name one in the settings of its provider"
        if trouble.startswith(store.EXPIRED):
            return f"{trouble.partition('; ')[0]}; {_RENEWALS[login]}"
        return trouble

    def answer(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a program of the node: save at once, or say which checkpoint to go on from or is safe."""
        if self.phase == "ended":
            return {"error": "the folder is not saved any more"}
        until = time.monotonic() + _PATIENCE
        while self.phase == "restoring" and time.monotonic() < until:  # after a mover that was killed, for a moment
            time.sleep(_TOLD)
        if said["do"] == "flush" and self._saver is not None:
            return self.flush(float(said["seconds"]))
        while True:
            try:
                return self._about_checkpoints(said)
            except SkypoolError as e:
                return {"error": str(e)}
            except Exception as e:  # noqa: BLE001 - whatever a store answers is told
                if time.monotonic() >= until or self.phase == "ended":
                    return {"error": store.trouble(e).words}
            time.sleep(_EVERY)

    def _about_checkpoints(self, said: Mapping[str, Any]) -> dict[str, Any]:
        if self._checkpoints is None or self.phase == "restoring":
            raise OSError("the folder is not back yet")
        from obstore.exceptions import BaseError

        token = f"{self._said['session']}.{said['token']}"  # the same on all nodes
        if said["do"] == "safe":  # beside what is being saved, which may take long
            try:
                safe, is_over = self._checkpoints.safe(token)
            except (OSError, BaseError):  # which the program must not suffer for
                safe, is_over = self._checkpoints.known(token), False
            return {"safe": safe, "over": is_over}
        with self._asking:
            number, first = self._checkpoints.attempt(token)
            path = "" if first is None else self._checkpoints.fetch(first, said["rank"], said["world"])
            step = None if first is None else first.step
            return {"attempt": number, "step": step, "path": path, "folder": self._checkpoints.folder}

    def flush(self, seconds: float) -> dict[str, Any]:
        """Save all files as they are now, and return the account."""
        until = time.monotonic() + seconds
        whole = False
        while self._saver is not None and self.phase == "saving":
            if self._turns.acquire(timeout=max(0.0, until - time.monotonic())):
                try:
                    whole = self._turn(last=True)
                finally:
                    self._turns.release()
            if whole or time.monotonic() >= until:
                break
            time.sleep(min(_EVERY, max(0.0, until - time.monotonic())))
        return {**self.told(), "whole": whole}

    def _work(self) -> None:
        try:
            if self._former is not None:
                self._former.end(0.0)
                self._former.join()
                self._former = None
            self._open()
            if self._bring_back():
                self.phase = "saving"
                self._save()
            self.phase = "ended"
        except Exception as e:
            self.trouble = f"{type(e).__name__}: {e}"
            self.phase = "ended"
            raise

    def _open(self) -> None:
        said = self._said
        bucket, values = place_of(said, self._credentials[1])
        if bucket.scheme == "file":
            os.makedirs(bucket.name, exist_ok=True)
        newest = (lambda: self._credentials[1]) if bucket.keys else None
        opened = store.opened(bucket, values, _PATIENCE, newest)
        large = store.opened(bucket, values, _TO_COMPLETE, newest) if google.is_google(bucket) else None
        folder, executor = os.path.expanduser(said["folder"]), ThreadPoolExecutor(_SMALL_FILES)
        place = said["node"], said["nodes"], said["patterns"]
        saver = FolderSaver(
            opened, folder, self._journal, executor, *place, joins=said["joins"], account=self._account, large=large
        )
        if said["restores"]:
            saver.halves.forget()
        self._checkpoints = CheckpointSaver(opened, folder, executor, said["url"], saver.rate, large)
        self._saver = saver  # after the others, as threads look for it

    def _bring_back(self) -> bool:
        """Bring the folder back, again and again. Return False if the end comes before.

        A folder that is not to be brought back has files that are not saved yet, so that its end is no end of this.
        """
        assert self._saver is not None
        assert self._checkpoints is not None
        pause = Pause(*_PAUSES)
        while self._until is None or (not self._said["restores"] and time.monotonic() < self._until):
            try:
                if self._said["restores"]:
                    self.restored.aside = self._checkpoints.clear() or self.restored.aside
                    restore(self._saver, self.restored)
                self._saver.begin()
                self.trouble = ""
                return True
            except UsageError as e:
                self.trouble = str(e)
                return False
            except Exception as e:  # noqa: BLE001 - whatever a store answers is told, and the next attempt follows
                self.trouble = store.trouble(e).words
            pause.wait(self._wake, math.inf if self._until is None else self._until - time.monotonic())
            self._wake.clear()
        return False

    def _turn(self, last: bool = False, calm: bool = False) -> bool:
        """Save once what is to be saved. Return True if nothing is left."""
        assert self._saver is not None
        assert self._checkpoints is not None
        began = time.monotonic()
        is_whole = self._saver.turn(last, calm)
        self._took = time.monotonic() - began
        if last or self._saver.pause.is_over:
            try:
                return self._checkpoints.turn() and is_whole
            except Exception as e:  # noqa: BLE001 - whatever a store answers is told, and the next attempt follows
                self._saver.failed(e)
        return False

    def _save(self) -> None:
        assert self._saver is not None
        while self._until is None:
            with self._turns:
                self._turn()
            self._wake.wait(max(_EVERY, _SHARE * min(1.0, self._took)))
            self._wake.clear()
        self.phase, began = "ending", time.monotonic()
        while True:
            is_quiet = self._is_quiet.is_set() or time.monotonic() - began > _TO_BE_KILLED
            with self._turns:
                self.whole = self._turn(last=True, calm=self._calm)
            left = self._until - time.monotonic()
            if (self.whole and is_quiet) or left <= 0:
                return
            time.sleep(min(_EVERY, left))


class Mover:
    """The folders of one node, and what is told of them."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._folders: dict[str, Folder | FilledFolder] = {}
        self._drains: dict[str, float] = {}
        self._turns = threading.Semaphore(FETCHES)
        self._news = threading.Event()
        self._killed = threading.Event()  # by the keeper: all others that write
        signal.signal(signal.SIGTERM, lambda *_: self._killed.set())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # the agent has blocked it until now

    def run(self) -> None:
        """Obey the commands from stdin until it ends. Then save what is left."""
        threading.Thread(target=self._tell, name="tell", daemon=True).start()
        self._listen()
        for line in sys.stdin.buffer:
            if line.endswith(b"\n"):  # else the agent has ended while it wrote
                self._obey(json.loads(line))
        self._note_halves()
        for id_, each in self._folders.items():
            if not each.is_ending:
                each.end(self._drains[id_], is_quiet=self._killed)
        for each in self._folders.values():
            each.join()
        self._write(self._account())

    def _note_halves(self) -> None:
        """Note which files are being written, before the keeper kills all others that write."""
        saved = [each for each in self._folders.values() if isinstance(each, Folder) and each.phase != "ended"]
        notes = [threading.Thread(target=each.note_halves, name="halves", daemon=True) for each in saved]
        until = time.monotonic() + _TO_HEAR
        for each in notes:
            each.start()
        for each in notes:  # a disk may take long
            each.join(max(0.0, until - time.monotonic()))
        Path(LOOKED).touch()

    def _obey(self, said: Mapping[str, Any]) -> None:
        id_ = said["id"]
        if said["do"] == "end":
            if id_ in self._folders:
                self._folders[id_].end(said["seconds"], said["calm"])
            return
        former = self._folders.get(id_)
        if said["do"] in ("share", "look", "over", "note"):
            if isinstance(former, Folder):  # in a thread, as a store or a disk may take long
                acts: dict[str, Callable[[], None]] = {
                    "share": lambda: former.share(said["nodes"]),
                    "look": lambda: former.note_halves(said["number"], said["pids"]),
                    "over": lambda: former.end_halves(said["number"], said["at"]),
                    "note": lambda: former.keep_note(said["name"], said["text"], said.get("file", "")),
                }
                threading.Thread(target=acts[said["do"]], name=said["do"], daemon=True).start()
            return
        if said["do"] == "values":
            if former is not None and former.serial == said["serial"]:
                former.renew(said["credentials"], tuple(said["values"]))
            return
        if former is None or former.serial != said["serial"]:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "skypool"
            self._drains[id_] = said["drain"]
            if said["do"] == "fill":
                self._folders[id_] = FilledFolder(
                    said, private.folder(cache / "data", private.CACHE), self._turns, former
                )
            else:
                journals = private.folder(cache / "saved", private.CACHE)
                self._folders[id_] = Folder(said, str(journals / said["journal"]), former, self._news)

    def _tell(self) -> None:
        told, at = b"", 0.0
        while True:
            now = time.monotonic()
            line = self._account()
            if line != told or now - at >= _SILENT:
                told, at = line, now
                self._write(line)
            self._news.wait(_TOLD)
            self._news.clear()

    def _account(self) -> bytes:
        return json.dumps({"folders": [each.told() for each in list(self._folders.values())]}).encode() + b"\n"

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the agent is gone
            os.write(self._out, line)

    def _listen(self) -> None:
        """Serve the socket in a thread."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET)
        listener.listen()

        def serve() -> None:
            while True:
                peer, _ = listener.accept()
                threading.Thread(target=self._answer, args=(peer,), name="flush", daemon=True).start()

        threading.Thread(target=serve, name="socket", daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError, ValueError, KeyError):
            if peers.user(peer) != os.geteuid():
                return
            with peer.makefile("rb") as file:
                said = json.loads(file.readline(_LONGEST))
            until = time.monotonic() + _TO_HEAR
            while (folder := self._folders.get(said["id"])) is None and time.monotonic() < until:
                time.sleep(_TOLD / 5)  # the orders are only coming
            if isinstance(folder, Folder):
                answer = folder.answer(said)
            else:
                answer = {"known": sorted(id_ for id_, each in self._folders.items() if isinstance(each, Folder))}
            peer.sendall(json.dumps(answer).encode() + b"\n")


def _settle() -> None:
    """Let other programs go first, and let nobody read this process's memory, which has keys."""
    import ctypes

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # a program wants to write to a file that is being looked at
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if number := _IOPRIO.get(os.uname().machine):
        library.syscall(number, 1, 0, _LAST_OF_ALL)


def main() -> None:
    """Run the mover in the current folder, that of the node. stdout gets nothing but accounts."""
    out = os.dup(1)
    os.dup2(2, 1)
    _settle()
    Mover(out).run()


def start(out: int) -> None:
    """Run the mover as `main` does, but write accounts to the file `out`, and at the end an error that ended it."""
    os.dup2(out, 1)
    try:
        main()
    except Exception as e:
        os.write(out, json.dumps({"error": f"{type(e).__name__}: {e}"}).encode() + b"\n")
        raise
