"""Functions that run on the nodes of a pool: Ray's daemons, jobs, drivers, and a report of the node."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any

import skypool as sky

_LOCAL = "127.0.0.1"
_ENDING = 10.0
"""Seconds that the daemons of a node may take to end, beyond the seconds in which its tasks may end."""
_STORE = 0.3
"""The part of a node's memory that Ray's object store may use. It is Ray's own default."""
_MODEL = re.compile(r"\b(RTX PRO \d+|[A-Z]{1,2}\d{1,4}[A-Z]?)\b")
"""The model of a data-centre GPU in the name that NVIDIA's tool gives it, such as "NVIDIA H100 80GB HBM3"."""
_TOLD = 4000
"""The most characters of Ray's log in an error message."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The facts of a node that the cluster needs.

    Attributes:
        address: the address at which other nodes reach the node; "" if it is not known.
        public: the public addresses of the node's network interfaces.
        ray, python: the versions of Ray and Python on the node; "" if Ray is not installed.
        ports: TCP ports that are free: for the cluster's state, for clients, and for the dashboard.
    """

    address: str
    public: tuple[str, ...]
    ray: str
    python: str
    ports: tuple[int, int, int]


def report() -> NodeReport:
    """Return the facts that the cluster needs about the node on which this function runs."""
    address = sky.instance_info().address
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        version = ""
    one, two, three = free_ports(3)
    return NodeReport(address, public_addresses(), version, sys.version.split()[0], (one, two, three))


def free_ports(count: int) -> list[int]:
    """Return `count` TCP ports that are free at all addresses of this node."""
    with contextlib.ExitStack() as kept:
        sockets = [kept.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def public_addresses(proc: Path = Path("/proc/net")) -> tuple[str, ...]:
    """Return the public addresses of this node's network interfaces, as Linux lists them in the folder `proc`."""
    trie, inet6 = proc / "fib_trie", proc / "if_inet6"
    found = set(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", trie.read_text())) if trie.exists() else set[str]()
    if inet6.exists():
        found |= {str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in inet6.read_text().splitlines()}
    return tuple(sorted(each for each in found if ipaddress.ip_address(each).is_global))


# --- resources of a node ---------------------------------------------------------------------------------------------


def accelerator_type(name: str) -> str:
    """Return Ray's name of a GPU's model: "H100" for NVIDIA's "NVIDIA H100 80GB HBM3", "" for an unknown one."""
    found = _MODEL.search(name)
    return found[1].replace(" ", "-") if found else ""


def resources(cpus: int | None, store: int | None, folder: Path) -> list[str]:
    """Return the options of `ray start` for the resources of this node.

    Args:
        cpus: the number of CPUs for tasks. None: those that this process may use.
        store: the bytes of the object store. None: a part of the memory, but no more than is free in /dev/shm, or on
            the disk without /dev/shm.
        folder: the folder into which Ray writes objects that do not fit into memory.
    """
    info = sky.instance_info()
    gpus = [each for each in info.accelerators if each.kind in ("cuda", "rocm")]
    words = [f"--num-cpus={info.vcpus if cpus is None else cpus}"]
    if gpus:
        words.append(f"--num-gpus={len(gpus)}")
        if model := accelerator_type(gpus[0].name):
            words.append(f"--resources={json.dumps({f'accelerator_type:{model}': 1})}")
    if store is None:
        shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        store = int(min(_STORE * memory(), 0.95 * (shared or shutil.disk_usage(folder).free)))
    spill = folder / "spilled"
    spill.mkdir(exist_ok=True)
    return [*words, f"--object-store-memory={store}", f"--object-spilling-directory={spill}"]


def memory() -> int:
    """Return the bytes of memory that this node may use. The limit of a container counts."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


# --- daemons -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Daemons:
    """The settings with which the daemons of one node are started.

    Attributes:
        folder: the beginning of the path of the daemons' folder, to which a random text is added. The folder is made
            when the daemons start, and removed when they end.
        name: the name of the node in Ray.
        address: "HOST:PORT" of the cluster's state, which the head keeps.
        environment: the environment variables with the token.
        cpus: the number of CPUs for tasks. None: all.
        store: the bytes of the object store. None: a part of the memory.
        drain: the seconds that tasks may take to end when the node leaves.
    """

    folder: str
    name: str
    address: str
    environment: Mapping[str, str]
    cpus: int | None
    store: int | None
    drain: float


class _Stopped(Exception):
    """Raised by the signal handler at SIGTERM."""


def run_head(daemons: Daemons, client: int, dashboard: int) -> None:
    """Run Ray's head as a service, until SIGTERM.

    `client` is the port for clients on another computer. `dashboard` is the port of the dashboard and of jobs, which is
    open on 127.0.0.1 only.
    """
    words = ["--head", f"--port={daemons.address.rpartition(':')[2]}", f"--ray-client-server-port={client}"]
    words += [f"--dashboard-host={_LOCAL}", f"--dashboard-port={dashboard}", "--include-dashboard=true"]
    _run(daemons, words, lambda: False)


def run_worker(daemons: Daemons) -> None:
    """Run Ray as a service on a node that joins a head, until SIGTERM.

    Running tasks may then go on for `daemons.drain` seconds.
    """
    _run(daemons, [f"--address={daemons.address}"], lambda: _answers(daemons.address))


def _run(daemons: Daemons, words: list[str], has_to_drain: Callable[[], bool]) -> None:
    """Run `ray start` until SIGTERM, then let tasks end if `has_to_drain()`. SkypoolError if it ends by itself."""
    prefix = f"{daemons.folder}-"
    clean(prefix)  # of a run that was killed
    folder = Path(tempfile.mkdtemp(prefix=Path(prefix).name, dir=Path(prefix).parent))  # a name that nobody can guess
    address = sky.instance_info().address or _LOCAL
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *words]
    argv += [f"--node-ip-address={address}", f"--node-name={daemons.name}", f"--temp-dir={folder}"]
    argv += ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={free_ports(1)[0]}"]
    argv += resources(daemons.cpus, daemons.store, folder)
    soon = {
        # How long daemons wait for a head that is gone. Ray waits 60 s.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        # A node that does not answer is given up after 5 tests. Ray tests every 3 s, and waits 10 s each time.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{daemons.drain:g}",
    }
    own = folder / "tmp"
    own.mkdir()
    soon["TMPDIR"] = str(own)
    log = folder / "start.log"
    signal.signal(signal.SIGTERM, _stop)
    child: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output:
            env = {**os.environ, **soon, **daemons.environment}
            child = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        status = child.wait()
        said = log.read_text(errors="replace")[-_TOLD:]
        raise sky.SkypoolError(f"Ray on this node has ended with status {status}\n{said}")
    except _Stopped:
        if child is not None and has_to_drain():
            child.terminate()  # it tells the head that this node leaves, and waits for its tasks
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(daemons.drain + _ENDING)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if child is not None:
            child.kill()
            child.wait()
        end_processes(str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


def _answers(address: str) -> bool:
    """Return True if the port of an address "HOST:PORT" accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 2).close()
    except OSError:
        return False
    return True


def end_processes(folder: str) -> None:
    """Kill all processes of this user whose command line contains a path, and wait until they are gone, 10 s at most.

    `folder` is that path, or the beginning of several paths. No other program of this user may have it in its command
    line.
    """
    until = time.monotonic() + _ENDING
    while time.monotonic() < until:
        found = [pid for pid in _processes() if pid != os.getpid() and _has(pid, folder)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> list[int]:
    return [int(each) for each in os.listdir("/proc") if each.isdigit()]


def _has(pid: int, folder: str) -> bool:
    try:
        is_own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
        return is_own and folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def clean(prefix: str) -> None:
    """Kill the processes, and remove the folders, that daemons have left on this node.

    `prefix` is the beginning of the paths of these folders.
    """
    end_processes(prefix)
    for folder in Path(prefix).parent.glob(f"{Path(prefix).name}*"):
        shutil.rmtree(folder, ignore_errors=True)


# --- programs ----------------------------------------------------------------------------------------------------


def run_job(
    address: str, environment: Mapping[str, str], name: str, packed: bytes, entry: list[str], options: dict[str, Any]
) -> tuple[str, int | None, str, str]:
    """Run a job of Ray on this node, print its output, and wait for its end.

    Args:
        address: the address of the job server.
        environment: the environment variables with the token.
        name: the name of the job.
        packed: a zip file with the files of the job.
        entry: the program that Python runs, and its arguments.
        options: the job's `runtime_env`, without its files.

    Returns:
        (status, exit_status, message, output): Ray's status of the job, such as "SUCCEEDED"; its exit status, None if
            unknown; Ray's message; and its last output.
    """
    os.environ.update(environment)
    from ray.job_submission import JobSubmissionClient  # pyright: ignore[reportMissingImports]

    client: Any = JobSubmissionClient(address)
    folder = Path(tempfile.mkdtemp(prefix=f"skypool-job-{name}-", dir="/tmp"))
    said = ""
    signal.signal(signal.SIGTERM, _stop)
    try:
        zipfile.ZipFile(BytesIO(packed)).extractall(folder)
        runtime: dict[str, Any] = {**options, "working_dir": str(folder)}
        job: str = client.submit_job(
            entrypoint=shlex.join([sys.executable, *entry]), submission_id=name, runtime_env=runtime
        )

        async def show() -> None:
            nonlocal said
            async for piece in client.tail_job_logs(job):
                print(piece, end="", flush=True)
                said = (said + piece)[-_TOLD:]

        try:
            asyncio.run(show())
        except _Stopped:
            client.stop_job(job)
            raise
        until = time.monotonic() + 30
        while not (info := client.get_job_info(job)).status.is_terminal() and time.monotonic() < until:
            time.sleep(0.2)
        return str(info.status.value), info.driver_exit_code, str(info.message or ""), said
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_driver(
    environment: Mapping[str, str], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function in a process in which `ray.init()` finds the cluster by environment variables."""
    use(environment)
    import ray.cloudpickle  # pyright: ignore[reportMissingImports]

    if function.__module__ in sys.modules and function.__module__ != "__main__":
        # Workers of Ray do not have the modules that skypool brings, so what the module defines goes to them as it is.
        ray.cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
    try:
        return function(*args, **kwargs)
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def use(environment: Mapping[str, str]) -> None:
    """Set environment variables of this process. If Ray was imported before, make it read them again."""
    os.environ.update(environment)
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportMissingImports]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
