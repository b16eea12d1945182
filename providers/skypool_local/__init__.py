"""Local: this machine. Nodes are process groups. They cost nothing and see the same files."""

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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from skypool import devices
from skypool.agent.plan import share
from skypool.agent.processes import descendants, started
from skypool.drivers import settings
from skypool.drivers.contract import Abilities
from skypool.errors import CapacityError, StillRunning, UsageError
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.wire.transport import Subprocess

_PATIENCE = 10.0
"""Seconds for whoever starts or ends an agent there, at most."""


@settings.settings_named
@dataclass(frozen=True)
class Local:
    """Provider that runs nodes on this machine.

    Args:
        python: interpreter of the nodes, of the same minor version as this one. None means this one.
        spool: folder for values that are too large for memory. None means the node's own.
        spool_memory: size in bytes up to which values are kept in memory. None means half of the free memory.

    Raises:
        UsageError: this machine does not run Linux.
    """

    python: str | None = None
    spool: str | None = None
    spool_memory: int | None = None
    name: ClassVar[str] = "local"
    abilities: ClassVar[Abilities] = Abilities(private_network=True, lists_all=False)

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise UsageError(f"Local() needs Linux, and this is {sys.platform}; use SSH() or Container() from here")
        settings.plain(self, python=Path, spool=Path, spool_memory=int)

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return one free offer for each requested accelerator that this machine has.

        If it has none of them, return one offer of the machine as it is.

        Raises:
            UsageError: the interpreter `python` does not exist.
        """
        if self.python is not None and shutil.which(self.python) is None:
            raise UsageError(f"python={self.python!r} was not found on this machine; leave it out for {sys.executable}")
        here = devices.accelerators()
        found = [
            Offer(provider=self.name, instance_type="this-machine", accelerator=asked)
            for asked in need.accelerators
            if any(asked.could_be(each) and asked.count <= each.count for each in here)
        ]
        return found or [Offer(provider=self.name, instance_type="this-machine", accelerator=next(iter(here), None))]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Create a folder for each node. The node's agent starts at the first connection.

        Nodes that this order has created before are returned as they are. If one node fails, all are ended.

        Raises:
            CapacityError: the devices are in use by other nodes of the same pool.
        """
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
        folder.mkdir(mode=0o700, parents=True)
        (folder / "node.json").write_text(json.dumps(about))
        return self._instance(folder, about)

    def _devices(self, offer: Offer, order: Order) -> dict[str, Any]:
        """Return the devices and slots of one more node. Empty if the pool asks for no particular devices.

        Raises:
            CapacityError: too few devices are free.
        """
        asked = offer.accelerator
        if not order.need.accelerators or asked is None or asked.kind == "cpu":
            return {}
        used = {pin for each in self.instances(pool=order.pool) for pin in each.detail["devices"]}
        fit = [d for d in devices.detect() if d.accelerator is not None and asked.could_be(d.accelerator)]
        free = [device for device in fit if f"{device.kind} {device.pin}" not in used][: asked.count]
        if len(free) < asked.count:
            raise CapacityError(
                f"this machine has {len(fit)} of {asked}, but pool {order.pool!r} already uses {len(used)} of "
                "them; ask for fewer nodes",
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
        """Return all nodes of this user's pools on this machine, or of one pool."""
        found = []
        for file in sorted(home().glob("*/node.json")):
            try:
                about = json.loads(file.read_text())
            except (OSError, ValueError):
                continue  # the node is being created or removed
            if pool in (None, about["pool"]):
                found.append(self._instance(file.parent, about))
        return found

    def access(self, instance: Instance) -> Access:
        """Return how to run commands on a node: by a subprocess on this machine.

        Calls run in the client's current folder.
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
        """End the processes of these nodes and wait until they are gone.

        Raises:
            StillRunning: some processes still exist after SIGKILL.
        """
        left = [instance for instance in instances if not _end(Path(instance.detail["folder"]))]
        if left:
            names = ", ".join(instance.id for instance in left)
            raise StillRunning(
                f"processes of {names} still run after SIGKILL; check with `ps` what blocks them. Their "
                f"folders are in {home()}",
                left,
            )


def home() -> Path:
    """Return the private folder of this user's nodes on this machine.

    Its path is short, because it contains sockets.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"skypool-{os.getuid()}"


def _end(folder: Path) -> bool:
    """End a node's processes and remove its folder. Return True if nothing is left.

    Wait for the keeper (the node's first process) to end by itself, then send SIGTERM, then SIGKILL.
    """
    _wait_for_starters(folder)
    keeper = _keeper(folder)
    if keeper is not None:
        below = descendants(keeper)
        for number, patience in ((None, 2.0), (signal.SIGTERM, 4.0), (signal.SIGKILL, 1.0)):
            if number is not None:
                below = [*below, *descendants(keeper)]
                _kill(keeper, number)
            if _gone(folder, keeper, patience):
                break
        for pid in below if folder.exists() else []:  # the keeper did not end its children
            _kill(pid, signal.SIGKILL)
        if not _gone(folder, keeper, 1.0):
            return False
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        home().rmdir()  # succeeds only for the last node
    return not folder.exists()


def _wait_for_starters(folder: Path) -> None:
    """Wait until no process is starting an agent in this folder.

    Such a process holds the lock until the keeper runs.
    """
    try:
        with open(folder / "lock", "a") as lock:
            until = time.monotonic() + _PATIENCE
            while time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(0.005)
    except FileNotFoundError:
        return  # the folder is gone


def _keeper(folder: Path) -> int | None:
    """Return the process id of a node's keeper, or None if it does not run."""
    try:
        about = json.loads((folder / "keeper.json").read_text())
        alive = started(about["pid"]) == about["started"]
    except (OSError, ValueError, KeyError):
        return None
    return about["pid"] if alive else None


def _gone(folder: Path, keeper: int, patience: float) -> bool:
    until = time.monotonic() + min(patience, _PATIENCE)
    while _keeper(folder) == keeper:
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
