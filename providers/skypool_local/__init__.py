"""Driver for this machine. Each node is a group of processes. Nodes cost nothing, and they all see the same files.

Words of this package:

- agent: the process on a node that runs calls. It starts at the first connection.
- keeper: a node's first process. All other processes of the node are its descendants.
- offer, order: what this machine can run, and the request to start nodes on an offer (`skypool.model`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from skypool import devices
from skypool.agent.processes import descendants, is_keeper, started
from skypool.agent.slot_plan import share
from skypool.drivers import settings
from skypool.drivers.contract import Abilities
from skypool.errors import CapacityError, NotPrivate, StillRunning, UsageError
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.safety import private, removal
from skypool.wire.transport import Subprocess

_INSTEAD = "set XDG_RUNTIME_DIR or TMPDIR to a folder of your own"
_PATIENCE = 10.0
"""Maximum seconds to wait for a process that is starting an agent, and for a node's first process to end."""


@settings.settings_named
@dataclass(frozen=True)
class Local:
    """A driver that runs nodes on this machine. A node is a folder and a group of processes, and costs nothing.

    Args:
        python: path or name of a Python interpreter for the nodes, of the client's minor version. None means the
            client's own interpreter.
        spool: folder for arguments and results that are too large for memory. None means the node's own folder.
        spool_memory: size in bytes of the largest argument or result that is kept in memory. None means half of the
            free memory.

    Raises:
        UsageError: this machine does not run Linux, or a setting is not valid.
    """

    python: str | None = None
    spool: str | None = None
    spool_memory: int | None = None
    name: ClassVar[str] = "local"
    abilities: ClassVar[Abilities] = Abilities(
        private_network=True,
        lists_all=False,
        network_advice="Let this machine's firewall allow TCP from this machine to its own address",
    )

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise UsageError(f"Local() needs Linux, and this machine runs {sys.platform}; use SSH() or Container()")
        settings.plain(self, python=Path, spool=Path, spool_memory=int)

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return one offer, at the price 0, for each needed accelerator that this machine has in the needed number.

        If the need names no accelerators, or this machine has none of those, there is one offer: with the machine's
        first kind of accelerator, or without accelerators if the machine has none. So the list is never empty.

        Raises:
            UsageError: the interpreter of the setting `python` does not exist.
        """
        if self.python is not None and shutil.which(self.python) is None:
            raise UsageError(
                f"python={self.python!r} was not found on this machine; without python=, nodes use {sys.executable}"
            )
        here = devices.accelerators()
        found = [
            Offer(provider=self.name, instance_type="this-machine", accelerator=asked)
            for asked in need.accelerators
            if any(asked.could_be(each) and asked.count <= each.count for each in here)
        ]
        return found or [Offer(provider=self.name, instance_type="this-machine", accelerator=next(iter(here), None))]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Create a folder for each node number of the order, and return the nodes in the order of the numbers.

        No process is started: a node's agent starts at the first connection. Nodes that an earlier launch of the same
        order created are reused. If there are too few accelerators for all nodes, all nodes of the order are ended.

        Raises:
            CapacityError: too few accelerators are free, because other nodes of the same pool use them. Nodes of other
                pools do not count.
            NotPrivate: another user of this machine can change the folder of the nodes.
            StillRunning: a node that had to be ended again may still run.
        """
        private.folder(home(), _INSTEAD, mend=False)
        there = {each.node: each for each in self.instances(pool=order.pool) if each.token == order.token}
        launched: list[Instance] = []
        try:
            for node in order.nodes:
                found = there.get(node) or self._launch(node, offer, order)
                launched.append(replace(found, offer=offer))
        except CapacityError:
            self.terminate(launched)  # launch all nodes or none
            raise
        return launched

    def _launch(self, node: int, offer: Offer, order: Order) -> Instance:
        who = {"pool": order.pool, "node": node, "token": order.token, "client": os.getpid()}
        about = {**who, **self._devices(offer, order)}
        folder = home() / f"{order.pool}.{node}.{secrets.token_hex(3)}"
        private.folder(folder, _INSTEAD, mend=False)
        (folder / "node.json").write_text(json.dumps(about))
        return self._instance(folder, about)

    def _devices(self, offer: Offer, order: Order) -> dict[str, Any]:
        """Choose devices for one more node. Return {"devices": …, "slots": …}, or {} if the node needs no devices."""
        asked = offer.accelerator
        if not order.need.accelerators or asked is None or asked.kind == "cpu":
            return {}
        used = {pin for each in self.instances(pool=order.pool) for pin in each.detail["devices"]}
        fit = [d for d in devices.detect() if d.accelerator is not None and asked.could_be(d.accelerator)]
        free = [device for device in fit if f"{device.kind} {device.pin}" not in used][: asked.count]
        if len(free) < asked.count:
            raise CapacityError(
                f"a node of pool {order.pool!r} needs {asked}, but only {len(free)} of this machine's {len(fit)} such "
                "devices are free, because other nodes of the pool use the others; ask for fewer nodes",
                provider=self.name,
            )
        return {
            "devices": [f"{device.kind} {device.pin}" for device in free],
            "slots": [asdict(each) for each in share(free, order.need.slots)],
        }

    def _instance(self, folder: Path, about: dict[str, Any]) -> Instance:
        detail = {"folder": str(folder), "devices": about.get("devices", []), "slots": about.get("slots")}
        token = about.get("token", "")
        return Instance(self.name, folder.name, about["pool"], about["node"], detail=detail, token=token)

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the nodes of this user on this machine, read from their folders. The list is empty if there are none.

        Every node has the state "running", even if its processes have ended. Folders that are being created or removed
        are skipped.

        Args:
            pool: the name of a pool, for its nodes only. None means all pools.

        Raises:
            NotPrivate: this user owns the folder of the nodes, but other users can change it.
        """
        found = []
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(home()).st_uid != os.geteuid():
                return []  # no node of this user is in a folder of another one
            private.check(home(), _INSTEAD)
        for file in sorted(home().glob("*/node.json")):
            try:
                about = json.loads(private.read(file))
            except (OSError, ValueError):
                continue  # the node is being created or removed, or is not this user's
            if pool in (None, about["pool"]):
                found.append(self._instance(file.parent, about))
        return found

    def access(self, instance: Instance) -> Access:
        """Return how to run commands on a node: as subprocesses on this machine. Starts nothing.

        Calls on the node will run in the folder that is the client's current folder now.
        """
        import platformdirs  # imported late: a node may import this module and lacks platformdirs

        folder = instance.detail["folder"]
        return Access(
            transport=Subprocess(),
            python=self.python or sys.executable,
            folder=folder,
            spool=self.spool or folder,
            spool_memory=self.spool_memory,
            cwd=os.getcwd(),
            slots=instance.detail["slots"],
            home=f"{platformdirs.user_cache_dir('skypool')}/local",
            owned=True,
        )

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End the processes of these nodes, remove their folders, and wait until both are gone.

        Each node first gets 2 s to end by itself, then SIGTERM, and SIGKILL 4 s later. Does not raise for nodes that do
        not exist. The nodes are ended one after the other.

        Raises:
            StillRunning: processes or folders of some nodes still exist after SIGKILL, or another user can change their
                folders. The error carries these nodes.
        """
        left: dict[str, Instance] = {}
        why = f"their processes still run after SIGKILL (see `ps`), or their folders in {home()} cannot be removed"
        for instance in instances:
            try:
                if _end(Path(instance.detail["folder"])):
                    continue
            except NotPrivate as e:  # so the process ids in the folder cannot be trusted
                why = str(e)
            left[instance.id] = instance
        if left:
            raise StillRunning(f"the nodes {', '.join(left)} could not be ended: {why}", [*left.values()])


def home() -> Path:
    """Return the path of the folder with this user's nodes on this machine. The folder is not created here.

    The folder is in $XDG_RUNTIME_DIR if this user owns that and can write there. Otherwise it is in the folder for
    temporary files. The path is short, because the path of a socket in the folder must not be long.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and _is_usable(runtime) else Path(tempfile.gettempdir())
    return base / f"skypool-{os.getuid()}"


def _is_usable(runtime: str) -> bool:
    """Return True if this user owns $XDG_RUNTIME_DIR, and can write there. After `su`, another user may own it."""
    try:
        return os.stat(runtime).st_uid == os.geteuid() and os.access(runtime, os.W_OK)
    except OSError:
        return False


def _end(folder: Path) -> bool:
    """End a node's processes and remove its folder. Return True if no process is left and the node is not listed."""
    try:
        private.check(folder, _INSTEAD)
        _wait_for_starters(folder)
    except FileNotFoundError:
        return True
    keeper = _keeper(folder)
    if keeper is not None:
        below = _below(keeper)
        for number, patience in ((None, 2.0), (signal.SIGTERM, 4.0), (signal.SIGKILL, 1.0)):
            if number is not None:
                below |= _below(keeper)
                _kill(keeper, number, lambda: _keeper(folder) == keeper)
            if _gone(folder, keeper, patience):
                break
        for pid, began in below.items() if folder.exists() else ():  # the keeper did not end its children
            _kill(pid, signal.SIGKILL, partial(_is_same, pid, began))
        if not _gone(folder, keeper, 1.0):
            return False
    # unmounts what a call has mounted there, except mounts that this user may not undo
    removal.remove(folder)
    with contextlib.suppress(OSError):
        home().rmdir()  # succeeds only for the last node
    return not (folder / "node.json").exists()  # a mount of the user may be left in the folder


def _wait_for_starters(folder: Path) -> None:
    """Wait up to 10 s until no process is starting an agent for the node. Such a process holds the folder's "lock"."""
    with open(private.opened(folder / "lock", os.O_RDWR | os.O_CREAT), "r+") as lock:
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.005)


def _keeper(folder: Path) -> int | None:
    """Return the process id of a node's keeper; None if the keeper has ended, even if its id is in use again."""
    try:
        about = json.loads(private.read(folder / "keeper.json"))
        pid, began = int(about["pid"]), int(about["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if is_keeper(pid, began, str(folder)) else None


def _below(keeper: int) -> dict[int, int]:
    """Return a dict from process id to start time for all descendants of a keeper."""
    found = {}
    for pid in descendants(keeper):
        with contextlib.suppress(OSError):
            found[pid] = started(pid)
    return found


def _is_same(pid: int, began: int) -> bool:
    return started(pid) == began


def _gone(folder: Path, keeper: int, patience: float) -> bool:
    """Wait up to `patience` seconds until a node's keeper has ended. Return True if it has."""
    until = time.monotonic() + min(patience, _PATIENCE)
    while _keeper(folder) == keeper:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def _kill(pid: int, number: int, is_it: Callable[[], bool]) -> None:
    """Send a signal to a process if `is_it` says that `pid` is the right one. A new process with this id gets none."""
    with contextlib.suppress(OSError):
        held = os.pidfd_open(pid)
        try:
            if is_it():
                signal.pidfd_send_signal(held, number)
        finally:
            os.close(held)
