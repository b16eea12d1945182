"""Machines for tests, made of namespaces on this Linux host: really booted, really reached by ssh, really broken.

A `Lab` is one run's network and its machines; a `Machine` is one of them. Needs root and tests/lab/setup; docs/lab.md
says more.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.lab import kernel, layer, network, runs, userdata
from tests.lab.kernel import wait_until
from tests.lab.metadata import MetadataServer, socket_inside
from tests.lab.relay import Relay

SETUP = Path(__file__).parent / "setup"
GiB = 2**30
USERS = ("root", "ubuntu", "plain")
"""Who has an account on every machine; `ubuntu` may sudo, `plain` may not."""

JOIN = 'while [ "$1" != -- ]; do echo 0 >"$1/cgroup.procs"; shift; done; shift; exec "$@"'
"""Shell that joins groups up to a `--`, then becomes the rest of its arguments."""

Handler = Callable[["Machine"], type[BaseHTTPRequestHandler]]


def unavailable() -> str:
    """Why there can be no lab here; empty if there can."""
    if os.geteuid() != 0:
        return "a lab needs root"
    missing = [name for name in ("ip", "iptables-restore", "unshare", "nsenter", "setpriv") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} missing: run tests/lab/setup"
    return "" if base_root().is_dir() else f"{base_root()} is not there: run tests/lab/setup"


def base_root() -> Path:
    """The base root file system, as tests/lab/setup names it."""
    return Path(subprocess.run([SETUP, "--root"], capture_output=True, text=True, check=True).stdout.strip())


def make_key(path: Path) -> Path:
    """An ed25519 key pair at `path` and `path`.pub."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", path], check=True)
    return path


class Lab:
    """One run's machines. Use it in a with block, or close it; if this process dies first, the next lab cleans up.

    Args:
        metadata: Makes the handler class of a machine's metadata service; can be given for each machine instead.
    """

    def __init__(self, metadata: Handler | None = None) -> None:
        if reason := unavailable():
            raise RuntimeError(reason)
        self.metadata = metadata
        self.machines: list[Machine] = []
        self._lock = threading.Lock()
        self._count = 0
        # A machine dies with the thread that started it (PR_SET_PDEATHSIG), so that is one which stays.
        self._starter = ThreadPoolExecutor(1, "lab-starter")
        self.lower = ""
        """The read-only layers under every machine's disk."""
        self.shown: Sequence[Path] = ()
        """Folders of the host that machines see."""
        with runs.all_labs():
            runs.sweep()
            self.run = runs.Run.claim()
            try:
                self._furnish()
            except BaseException:
                self.run.remove()
                raise

    def _furnish(self) -> None:
        """What all of its machines share."""
        self.network = network.Network.create(self.run.tag)
        self.shown = layer.build(self.run.folder / "layer")
        self.lower = f"{self.run.folder / 'layer'}:{base_root()}"

    @property
    def gateway(self) -> str:
        """The host's address as machines see it: a server which a test binds to it can be reached from all of them."""
        return self.network.gateway

    @cached_property
    def client_key(self) -> Path:
        """A private key for tests; its public half is beside it, and only lets in where it is given."""
        return make_key(self.run.folder / "client_key")

    @property
    def public_key(self) -> str:
        """What goes into `keys`."""
        return self.client_key.with_suffix(".pub").read_text().strip()

    def serve_metadata(self, handler: Handler | None) -> None:
        """What answers at 169.254.169.254 in machines that are made from now on."""
        self.metadata = handler

    def machine(
        self,
        *,
        user_data: str = "",
        start: str = "",
        keys: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        user: str = "root",
        memory: int | None = None,
        disk: int = 4 * GiB,
        minute: float = 60.0,
        name: str | None = None,
        metadata: Handler | None = None,
        prepare: Callable[[Machine], object] | None = None,
        wait: bool = True,
    ) -> Machine:
        """Boot a machine.

        Args:
            user_data: `#cloud-config` (see tests/lab/userdata.py for what it may say) or a `#!` script. sshd is up
                while its commands run.
            start: A container's start command, in place of that whole boot: it must start sshd itself, and the
                machine ends with it.
            keys: Public keys that may log in as `user`, as a cloud's key pairs.
            env: The environment of the start command, or of the user's script.
            memory: Bytes that its processes and its disk may use together; beyond it the kernel kills one.
            disk: Bytes of its disk (which is memory of the host, as far as it is used).
            minute: Seconds in a minute of its `shutdown +5`.
            prepare: Called with it before it is switched on: its disk is there.
            wait: Wait until sshd answers.
        """
        with self._lock:
            self._count += 1
            number = self._count
        name = name or f"m{number}"
        plan = userdata.plan(user_data, hostname=name, user=user, keys=keys, start=start, env=env or {})
        machine = Machine(self, number, name, self.network.attach(number), Limits(memory, disk, minute), plan)
        with self._lock:
            self.machines.append(machine)
        if handler := metadata or self.metadata:
            machine.serve_metadata(handler)
        if prepare is not None:
            prepare(machine)
        machine.boot()
        if wait:
            machine.wait_for_ssh()
        return machine

    def start(self, argv: Sequence[str], console: Path) -> subprocess.Popen[bytes]:
        """Start a process that dies with this one. Called by machines."""

        def popen() -> subprocess.Popen[bytes]:
            with open(console, "ab") as output:
                environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
                nothing = subprocess.DEVNULL
                return subprocess.Popen(
                    argv, stdin=nothing, stdout=output, stderr=output, env=environment, start_new_session=True
                )

        return self._starter.submit(popen).result()

    def close(self) -> None:
        """End every machine and remove all that this lab made on the host."""
        for machine in self.machines:
            machine.stop_metadata()
        with runs.all_labs():
            self.run.remove()
        for machine in self.machines:
            machine.reap()
        self.machines.clear()
        self._starter.shutdown()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Limits:
    """What a machine has: bytes of memory and disk, seconds in a minute."""

    memory: int | None
    disk: int
    minute: float


class Machine:
    """One machine. Made by `Lab.machine`."""

    port = 22

    def __init__(self, lab: Lab, number: int, name: str, address: str, limits: Limits, plan: Mapping[str, Any]) -> None:
        self.lab = lab
        self.number = number
        self.name = name
        self.hostname = str(plan["hostname"])
        self.address = address
        self.names = ""
        """More lines of its /etc/hosts, from its next boot on."""
        self._limits = limits
        self._plan = plan
        self._netns = lab.network.netns(number)
        self._group = kernel.Group(f"{lab.run.tag}-{number}")
        self._folder = lab.run.folder / str(number)
        self._root = self._folder / "root"
        self._metadata: MetadataServer | None = None
        self._relays: list[Relay] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._cut_power = ""
        self._mount()

    def __repr__(self) -> str:
        return f"<Machine {self.name} {self.address} {'running' if self.is_running else self.poweroff_reason}>"

    def _mount(self) -> None:
        """Its disk, with a limit, over the layers that all machines share."""
        disk = self._folder / "disk"
        for path in (disk, self._root):
            path.mkdir(parents=True)
        kernel.mount("tmpfs", disk, "tmpfs", options=f"size={self._limits.disk},mode=755")
        upper, work = disk / "upper", disk / "work"
        upper.mkdir()
        work.mkdir()
        options = f"lowerdir={self.lab.lower},upperdir={upper},workdir={work}"
        kernel.mount("overlay", self._root, "overlay", options=options)
        for folder in self.lab.shown:
            kernel.bind(folder, self.path(folder))

    # --- life ------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Switch it on. Called by the lab, and again for a machine that was powered off: its disk is as it was."""
        if self.is_running:
            raise RuntimeError(f"{self.name} runs already")
        run = self.path("/run")
        kernel.unmount_below(run)
        kernel.mount("tmpfs", run, "tmpfs", options="size=64m,mode=755")
        layer.place(run / "lab/minute", str(self._limits.minute))
        layer.place(run / "lab/boot.json", json.dumps(self._plan), 0o600)
        layer.place(self.path("/etc/hostname"), f"{self.hostname}\n")
        layer.place(self.path("/etc/hosts"), f"127.0.0.1 localhost\n127.0.1.1 {self.hostname}\n{self.names}")
        self._cut_power = ""
        (self._folder / "pid").unlink(missing_ok=True)
        groups = self._group.create(self._limits.memory)
        launch = [layer.INSIDE / "launch", "outer", self._folder, self._netns, self.hostname, *groups]
        self._process = self.lab.start([str(word) for word in launch], self._folder / "console")

    def forget_user_data(self) -> None:
        """From its next boot on none of it is done again: cloud-init does it once for an instance."""
        self._plan = {**self._plan, "script": "", "write_files": []}

    @property
    def is_running(self) -> bool:
        """Whether its process 1 lives; a frozen machine is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process 1, as this host counts."""
        self._wait(self.path("/run/lab/up").exists, 30, "its boot")
        return int((self._folder / "pid").read_text())

    @property
    def poweroff_reason(self) -> str:
        """Why it is off: the command that ended it from inside, or what the lab did; empty while it runs."""
        if self.is_running:
            return ""
        said = self.path("/run/lab/reason")
        return self._cut_power or (said.read_text().strip() if said.exists() else "process 1 ended")

    def kill(self) -> None:
        """Cut its power: every process of it ends at once, and nothing is flushed or said."""
        self._cut_power = "killed by the lab"
        self._group.kill()
        self.reap()

    def reap(self) -> None:
        """Wait for the end of a machine that was killed."""
        if self._process is not None:
            self._process.wait(timeout=30)

    def destroy(self) -> None:
        """End it and remove every trace of it, its disk included. Quiet if that was done before."""
        with self.lab._lock:
            if self not in self.lab.machines:
                return
            self.lab.machines.remove(self)
        self._cut_power = "destroyed"
        self.stop_metadata()
        for each in self._relays:
            each.close()
        self._group.remove()
        self.reap()
        kernel.unmount_below(self._folder)
        self.lab.network.detach(self.number, self.address)
        if left := kernel.mounts_below(self._folder):  # never delete through a mount
            raise OSError(f"still mounted: {left}")
        shutil.rmtree(self._folder)

    # --- waiting ---------------------------------------------------------------------------------------------

    def wait_for_ssh(self, within: float = 30.0) -> None:
        """Until sshd says hello."""
        self._wait(self._sshd_answers, within, "sshd")

    def wait_booted(self, within: float = 60.0) -> int:
        """Until user data is through; its exit status."""
        self._wait(self.path("/var/lib/cloud/instance/boot-finished").exists, within, "the end of user data")
        return int(self.path("/run/lab/status").read_text())

    def wait_off(self, within: float = 30.0) -> str:
        """Until it is off; why."""
        wait_until(lambda: not self.is_running, within, f"the end of {self.name}")
        return self.poweroff_reason

    def _wait(self, check: Callable[[], object], within: float, what: str) -> None:
        try:
            wait_until(lambda: check() or not self.is_running, within, what)
        except TimeoutError as error:
            error.add_note(self.console())
            raise
        if not self.is_running:
            raise RuntimeError(f"{self.name} is off before {what}: {self.poweroff_reason}\n{self.console()}")

    def _sshd_answers(self) -> bool:
        try:
            with socket.create_connection((self.address, self.port), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    # --- looking and touching --------------------------------------------------------------------------------

    def run(
        self, command: str | Sequence[str], user: str = "root", check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine, not by ssh; a string is a line of shell. `options` go to subprocess.run."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        who = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--reset-env"]
        inside = ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--", *who, *argv]
        join = ["/bin/sh", "-c", JOIN, "join", *map(str, self._group.folders), "--"]
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, **options}
        if "input" in settings:
            del settings["stdin"]
        done: subprocess.CompletedProcess[str] = subprocess.run([*join, *inside], check=False, **settings)
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, shlex.join(argv), done.stdout, done.stderr)
            error.add_note(f"{done.stdout}{done.stderr}")
            raise error
        return done

    def path(self, path: str | Path) -> Path:
        """A file of the machine as this host sees it, running or not. Beware of absolute links in it."""
        return self._root / str(path).lstrip("/")

    def console(self) -> str:
        """What it said while it booted, and what user data wrote."""
        files = [self._folder / "console", self.path("/var/log/cloud-init-output.log")]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    @property
    def host_key(self) -> str:
        """Its public ed25519 host key, as read from its disk: kind and key, no comment."""
        file = self.path("/etc/ssh/ssh_host_ed25519_key.pub")
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), 30, "the host key")
        return " ".join(file.read_text().split()[:2])

    def known_hosts(self) -> Path:
        """A file for ssh's UserKnownHostsFile that knows this machine and nobody else."""
        file = self._folder / "known_hosts"
        file.write_text(f"{self.address} {self.host_key}\n")
        return file

    def ssh_argv(self, user: str = "root", key: Path | None = None) -> list[str]:
        """ssh to it, trusting its host key alone; append a command."""
        trust = ["-o", f"UserKnownHostsFile={self.known_hosts()}", "-o", "StrictHostKeyChecking=yes"]
        identity = ["-o", "IdentitiesOnly=yes", "-i", str(key or self.lab.client_key)]
        options = ["-F", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-p", str(self.port)]
        return ["ssh", *options, *trust, *identity, f"{user}@{self.address}"]

    def processes(self) -> dict[int, str]:
        """Its processes as this host counts, with their names."""
        found = {}
        for pid in self._group.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    # --- breaking it -----------------------------------------------------------------------------------------

    def cut(self, *, incoming: bool = True, outgoing: bool = True) -> None:
        """Lose every packet to it and from it, silently, from now on."""
        self.lab.network.cut(self.number, incoming=incoming, outgoing=outgoing)

    def mend(self) -> None:
        """End every cut."""
        self.lab.network.mend(self.number)

    def freeze(self) -> None:
        """Stop all of its processes; its kernel still acknowledges what arrives."""
        self._group.freeze(True)

    def thaw(self) -> None:
        self._group.freeze(False)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Frozen for as long as the block takes."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def kill_sshd(self) -> None:
        """End sshd and every session with it; what sessions started lives on."""
        victims = [pid for pid, name in self.processes().items() if name == "sshd"]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not set(victims) & set(self.processes()), 30, "the end of sshd")

    def start_sshd(self) -> None:
        """Start it again."""
        self.run("mkdir -p /run/sshd && exec /usr/sbin/sshd")
        self.wait_for_ssh()

    def fill_disk(self, leave: int = 0) -> None:
        """Leave so many bytes on its disk. It shrinks, which costs no memory of the host."""
        seen = os.statvfs(self._folder / "disk")
        self._resize((seen.f_blocks - seen.f_bfree) * seen.f_frsize + max(leave, 0))

    def free_disk(self) -> None:
        """Give the disk its size back."""
        self._resize(self._limits.disk)

    def _resize(self, size: int) -> None:
        disk = self._folder / "disk"
        kernel.mount("tmpfs", disk, "tmpfs", kernel.MS_REMOUNT, f"size={max(size, 4096)}")

    # --- metadata --------------------------------------------------------------------------------------------

    def serve_metadata(self, handler: Handler) -> None:
        """Answer at its 169.254.169.254, in place of who did before; the server's `machine` is this one."""
        self.stop_metadata()
        self._metadata = MetadataServer(self, network.NETNS / self._netns, handler(self))

    def show_port(self, port: int) -> None:
        """Let a port of its 127.0.0.1 lead to the same one of this host."""
        here = "127.0.0.1", port
        self._relays.append(Relay(socket_inside(network.NETNS / self._netns, here), here))

    def stop_metadata(self) -> None:
        if self._metadata is not None:
            self._metadata.close()
            self._metadata = None
