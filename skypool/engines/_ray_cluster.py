"""`RayCluster`, which runs Ray's daemons as services on the nodes of a pool, and runs programs that use them."""

from __future__ import annotations

import ast
import contextlib
import functools
import http.client
import json
import logging
import os
import re
import secrets
import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import skypool as sky
from skypool.engines import _pools, _ray_node, _trust, _versions

T = TypeVar("T")
HEAD = "ray-head"
"""The name of the service that runs Ray's head."""
OLDEST = (2, 60)
"""The oldest version of Ray that is supported: it has token authentication, and drains a node at SIGTERM."""
_WORKER = "ray-worker-"
"""The prefix of the name of the service on each other node. The number of the node follows."""
_LOOK = 0.2
"""Seconds between two checks of the nodes of the pool or of Ray."""
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds to wait before each restart of Ray on a node. The last value is used for all further restarts."""
_CLOSING = 20.0
"""Seconds that the daemons of a node may take to end, beyond the seconds in which its tasks may end."""
_ASKING = 20.0
"""Seconds within which the head must answer."""
_DEMAND = re.compile(r"^ (\{.*?\})(?: \* (\d+))?.*: (\d+)\+ pending (.*)$", re.MULTILINE)
"""A line of Ray's status with resources that tasks, actors or placement groups wait for."""
_MOST = 100 << 20
"""The most bytes of the files of a job. Ray has the same limit."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Demand:
    """Resources that tasks, actors or placement groups wait for.

    Attributes:
        resources: the amount of each resource that one of them needs, such as {"CPU": 4.0}.
        count: how many of them wait.
        kind: what waits, in Ray's words: "tasks/actors" or "placement groups".
    """

    resources: Mapping[str, float]
    count: int
    kind: str


class _Silent(sky.SkypoolError):
    """Raised if the head of a cluster does not answer."""


class RayCluster:
    """A Ray cluster on the nodes of a pool. `sky.ray.cluster` makes one.

    Any thread may call the methods. All but `close` raise SkypoolError if the cluster has ended.

    Args:
        pool: the started pool.
        cpus: the number of CPUs of each node that tasks use. None: all.
        store: the bytes of each node's object store. None: a part of its memory.
        drain: the most seconds for which running tasks may go on when their node leaves the cluster.
        firewalled: True if nodes may have public addresses, because a firewall protects their ports.

    Attributes:
        head: the number of the node that runs Ray's head.
        dashboard_url: the address of the dashboard on this computer. Browsers ask for `token` there.
        token: the token with which all parts of the cluster, and clients, authenticate.
    """

    def __init__(
        self, pool: sky.ComputePool, cpus: int | None, store: int | None, drain: float, firewalled: bool
    ) -> None:
        self.pool = pool
        self.head = min(_pools.ready(pool))
        self.token = secrets.token_urlsafe(32)
        self.dashboard_url = ""
        self._cpus, self._store, self._drain, self._firewalled = cpus, store, drain, firewalled
        self._prefix = f"/tmp/skypool-ray-{secrets.token_hex(4)}-"
        self._ends = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"{pool.name}-ray", daemon=True)
        self._lock = threading.Lock()  # guards what follows
        self._services: dict[int, sky.Service[None]] = {}
        self._starts: dict[int, tuple[int, float]] = {}
        self._leaving: set[int] = set()
        self._reports: dict[int, _ray_node.NodeReport] = {}
        self._environ: dict[str, str | None] = {}
        self._jobs = 0
        self._here = ""
        self._why = ""

    # --- its start -----------------------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start the head and the other nodes, and wait until they have joined, `timeout` seconds at most.

        Raises:
            UsageError: a node lacks Ray, has another version than this process, or its ports would be open to others.
            TimeoutError: the nodes have not joined in time.
            SkypoolError: the head has ended.
        """
        until = time.monotonic() + timeout
        nodes = _pools.ready(self.pool)
        self._check(nodes)
        report = self._reports[self.head]
        port, client, dashboard = report.ports
        host = report.address or "127.0.0.1"
        self._gcs = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._dashboard = dashboard
        call = sky.compute(_ray_node.run_head)(self._daemons(self.head), client, dashboard)
        service = self._ends.enter_context(self.pool.service(call, node=self.head, name=HEAD, busy=True))
        self._services[self.head] = service
        service.wait_ready(port, timeout)
        here = self._ends.enter_context(self.pool.forward(client, self.head, host="127.0.0.1"))
        self._here = f"ray://{here.address}"
        forward = self._ends.enter_context(self.pool.forward(dashboard, self.head, host="127.0.0.1"))
        self.dashboard_url = f"http://{forward.address}"
        self._watcher.start()
        self.wait_ready(len(nodes), max(1.0, until - time.monotonic()))

    def _daemons(self, node: int) -> _ray_node.Daemons:
        return _ray_node.Daemons(
            folder=f"{self._prefix}{node}",
            name=f"{self.pool.name}-{node}",
            address=self._gcs,
            environment={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token},
            cpus=self._cpus,
            store=self._store,
            drain=self._drain,
        )

    def _check(self, nodes: Sequence[int]) -> None:
        """Ask nodes for their reports, and keep them. Raise UsageError if Ray must not start on one of the nodes."""
        asked = sky.compute(_ray_node.report).with_options(devices=0)
        futures = {node: self.pool.send(asked(), node=node) for node in nodes}
        for node, future in futures.items():
            report = future.result()
            check_report(self.pool, node, report, self._reports.get(self.head, report), self._firewalled)
            with self._lock:
                self._reports[node] = report

    # --- a thread that starts Ray on nodes which join --------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK):
            try:
                if has_ended(self._services[self.head]):
                    self._lost()
                    return
                for node in _pools.ready(self.pool):
                    self._ensure(node)
            except (sky.PoolClosed, CancelledError):
                return
            except sky.SkypoolError as e:
                self._tell(f"Ray cannot start on a node: {e}")

    def _ensure(self, node: int) -> None:
        """Start Ray on a node, unless it runs there, the node is leaving, or the pause before a restart is not over."""
        with self._lock:
            running = self._services.get(node)
            count, last = self._starts.get(node, (0, 0.0))
            if node in self._leaving or (running is not None and not has_ended(running)):
                return
            if time.monotonic() < last + (_PAUSES[min(count, len(_PAUSES)) - 1] if count else 0.0):
                return
            self._starts[node] = (count + 1, time.monotonic())
        try:
            if node not in self._reports:
                self._check([node])
            function = sky.compute(_ray_node.run_worker).with_options(grace=self._drain + _CLOSING)
            service = self.pool.service(function(self._daemons(node)), node=node, name=f"{_WORKER}{node}", busy=True)
        except (sky.NodeInterrupted, sky.NodeRetired, sky.ConnectionLost):
            return  # the node leaves, or was lost: another one takes its place
        except sky.UsageError:
            with self._lock:
                self._leaving.add(node)
            raise
        with self._lock:
            self._services[node] = service
            is_late = self._stopping.is_set()
        if is_late:
            service.close(0)

    def _lost(self) -> None:
        """Warn the user that the head has ended, and end Ray on the other nodes."""
        self._why = self._reason()
        self._tell(self._why)
        self._stopping.set()
        self._close_workers()

    def _reason(self) -> str:
        service = self._services[self.head]
        try:
            error = service.exception(0)
        except (CancelledError, TimeoutError):
            error = None
        return (
            f"Ray's head on node {self.head} of pool {self.pool.name!r} has ended, and with it the cluster: "
            f"{error or 'it was closed'}; make a new one with sky.ray.cluster(pool)"
        )

    def _tell(self, text: str) -> None:
        logger.warning("%s: %s", self.pool.name, text)

    def _check_open(self) -> None:
        """Raise a SkypoolError if the cluster has ended."""
        if self._why or has_ended(self._services[self.head]):
            raise sky.SkypoolError(self._why or self._reason())
        if self._stopping.is_set():
            raise sky.SkypoolError(f"the Ray cluster of pool {self.pool.name!r} was closed")

    # --- its size ------------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, str]:
        """Return the state of each node that Ray has or had, "ALIVE" or "DEAD".

        The keys are the nodes' names in Ray, such as "NAME-3" for node 3 of the pool NAME. OSError is raised if the
        head does not answer.
        """
        found = self._get("/api/v0/nodes?limit=10000&detail=false")["data"]["result"]["result"]
        states: dict[str, str] = {}
        for each in found:
            if states.get(each["node_name"]) != "ALIVE":
                states[each["node_name"]] = each["state"]
        return states

    def wait_ready(self, n: int, timeout: float | None = None) -> None:
        """Wait until Ray has at least `n` nodes, `timeout` seconds at most. Default None: no limit.

        Raises:
            TimeoutError: the time is over. The message has the last output of the daemons.
        """
        until = None if timeout is None else time.monotonic() + timeout
        there = 0
        while True:
            self._check_open()
            with contextlib.suppress(_Silent):  # the head does not listen yet
                there = list(self.nodes().values()).count("ALIVE")
            if there >= n:
                return
            if until is not None and time.monotonic() > until:
                raise TimeoutError(
                    f"{there} of {n} nodes of pool {self.pool.name!r} have joined Ray within {timeout:g} s; see "
                    f"whether the nodes reach each other with skypool's network check\n{self._output()}"
                )
            time.sleep(_LOOK)

    def _output(self) -> str:
        with self._lock:
            ended = [each for each in self._services.values() if has_ended(each)]
        lines = []
        for each in ended:
            with contextlib.suppress(CancelledError, TimeoutError):
                lines.append(f"{each.name}: {each.exception(0)}")
        return "\n".join(lines)

    def resize(self, n: int) -> None:
        """Change the number of nodes of the pool and of Ray.

        To grow, the method orders machines and returns at once; `wait_ready(n)` waits for them. To shrink, it removes
        the nodes with the highest numbers, but never the head's. They get no new tasks, and running tasks may go on for
        `drain` seconds. The method waits for the tasks, but not for the end of the machines.

        Raises:
            UsageError: `n` is not a whole number from 1.
            BudgetExceeded: the first 20 minutes of the new nodes cost more than is left of the pool's budget.
            PoolClosed: the pool has ended.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise sky.UsageError(f"n must be a whole number from 1, not {n!r}")
        self._check_open()
        there = [node for node, state in self.pool.nodes.items() if state not in ("leaving", "draining", "ended")]
        surplus = sorted(node for node in there if node != self.head)[n - 1 :]
        if not surplus:
            self.pool.resize(n)
            return
        with self._lock:
            self._leaving.update(surplus)
            services = [self._services[node] for node in surplus if node in self._services]
        in_parallel([functools.partial(each.close, self._drain + _CLOSING) for each in services])
        for node in surplus:
            self.pool.retire(node)

    def demands(self) -> list[Demand]:
        """Return the resources that tasks, actors and placement groups wait for. Ray updates them every few seconds.

        OSError is raised if the head does not answer.
        """
        return parse_demands(self._get("/api/cluster_status?format=1")["data"]["clusterStatus"])

    def _get(self, path: str) -> Any:
        """Return the JSON value that the head's dashboard server returns for a path."""
        self._check_open()
        request = urllib.request.Request(self.dashboard_url + path, headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=_ASKING) as answer:
                return json.load(answer)
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise _Silent(
                f"the head of Ray on pool {self.pool.name!r} does not answer at {self.dashboard_url}: {e}; "
                f"`skypool logs {self.pool.name} --call {HEAD}` shows what it printed"
            ) from e

    # --- programs ------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which `ray.init()` finds the cluster on its nodes, as a new dict."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": self._gcs}

    @property
    def address(self) -> str:
        """The address for `ray.init` in this process, which begins with "ray://".

        Reading this property sets the environment variables RAY_AUTH_MODE and RAY_AUTH_TOKEN of this process, until the
        cluster is closed.

        Raises:
            UsageError: Ray is not installed here, or Ray or Python has another version here than on the nodes.
        """
        self._check_open()
        check_client(self.pool, self._reports[self.head], _versions.versions(("ray",)).get("ray", ""))
        told = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        for name in told:
            self._environ.setdefault(name, os.environ.get(name))
        _ray_node.use(told)
        return self._here

    def submit(
        self,
        script: str | os.PathLike[str],
        *args: str,
        working_dir: str | os.PathLike[str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        """Run a Python program as a job of Ray on the head, show its output, and wait for its end.

        Args:
            script: the program, a file on this computer.
            *args: its arguments.
            working_dir: a folder that contains the program. It is sent to the nodes, without `.git`, `.venv` and
                `__pycache__`. Default None: only the program is sent.
            runtime_env: further settings of the job, as in Ray's `runtime_env`, but without `working_dir`.

        Raises:
            UsageError: the program does not exist or is not in `working_dir`, or the files are more than 100 MiB.
            CommandFailed: the program has failed. The error has its exit status and its last output.
        """
        self._check_open()
        packed, entry = pack(Path(script), None if working_dir is None else Path(working_dir))
        with self._lock:
            self._jobs += 1
            name = f"{self._prefix.strip('-').rpartition('-')[2]}-{self._jobs}"
        words = [entry, *args]
        where = f"http://127.0.0.1:{self._dashboard}"
        function = sky.compute(_ray_node.run_job).with_options(devices=0)
        call = function(where, self._daemons(self.head).environment, name, packed, words, dict(runtime_env or {}))
        status, code, message, said = self._run(call, f"ray-job-{name}")
        if status != "SUCCEEDED":
            tail = said if said.strip() else message
            raise sky.CommandFailed(
                shlex.join(["python", *words]), 1 if code is None else code, tail[-2000:], self.head
            )

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on the head in a process of its own, in which `ray.init()` finds the cluster.

        The function and its arguments are sent like those of every call of a pool. This method returns the function's
        result, and raises its exception.
        """
        self._check_open()
        call = sky.compute(_ray_node.run_driver).with_options(devices=0)(self.environment, function, args, kwargs)
        result: T = self._run(call, getattr(function, "__name__", "driver"))
        return result

    def _run(self, call: sky.Call[Any], name: str) -> Any:
        """Run a call as a service on the head, and return its value. If the head ends, raise the head's error."""
        service = self.pool.service(call, node=self.head, name=name)
        try:
            while True:
                try:
                    return service.result(1.0)
                except TimeoutError:
                    if has_ended(service):
                        raise
                    self._check_open()
        except (sky.SkypoolError, OSError, CancelledError) as e:
            # A program sees that the head has ended before its service has.
            with contextlib.suppress(TimeoutError, CancelledError):
                self._services[self.head].exception(2.0)
            if has_ended(self._services[self.head]) and not isinstance(e, sky.UsageError):
                raise sky.SkypoolError(self._why or self._reason()) from e
            raise
        finally:
            service.close()

    # --- its end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End Ray on all nodes, and remove its files there. The pool goes on. May be called again."""
        self._stopping.set()
        if self._watcher.ident is not None:
            self._watcher.join()
        self._ends.close()  # the head first: then nothing is drained
        self._close_workers()
        asked = sky.compute(_ray_node.clean).with_options(devices=0)
        with contextlib.suppress(sky.PoolClosed):
            futures = [self.pool.send(asked(self._prefix), node=node) for node in _pools.ready(self.pool)]
            for future in futures:
                with contextlib.suppress(sky.ConnectionLost, sky.NodeInterrupted, sky.NodeRetired):
                    future.result(_CLOSING)
        for name, value in self._environ.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environ.clear()

    def _close_workers(self) -> None:
        with self._lock:
            workers = [each for node, each in self._services.items() if node != self.head]
        in_parallel([each.close for each in workers])

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the cluster. An exception of the `with` block is not suppressed."""
        self.close()

    def __repr__(self) -> str:
        with self._lock:
            running = sum(not has_ended(each) for each in self._services.values())
        return f"<RayCluster of pool {self.pool.name!r}: Ray runs on {running} nodes, dashboard {self.dashboard_url}>"


# --- decisions ---------------------------------------------------------------------------------------------------


def check_report(
    pool: sky.ComputePool,
    node: int,
    report: _ray_node.NodeReport,
    head: _ray_node.NodeReport,
    firewalled: bool,
    here: str | None = None,
) -> None:
    """Raise a UsageError if Ray must not start on a node, judging from its report and that of the head's node.

    `firewalled` is True if nodes may have public addresses. `here` is the version of Ray in this process, or "" if Ray
    is not installed; None to find out.
    """
    here = _versions.versions(("ray",)).get("ray", "") if here is None else here
    if not report.ray:
        raise sky.UsageError(
            f"node {node} of pool {pool.name!r} has no Ray: add it to the image, "
            f'Image(pip=["ray[default]=={here or "2.60.0"}"])'
        )
    if tuple(int(each) for each in re.findall(r"\d+", report.ray)[:2]) < OLDEST:
        raise sky.UsageError(
            f"node {node} of pool {pool.name!r} has Ray {report.ray}; 2.60 or newer is needed, because older versions "
            'lack token authentication, or do not let tasks of a node end: Image(pip=["ray[default]>=2.60"])'
        )
    wanted, whose = (here, "this process") if here else (head.ray, "the node of the head")
    if report.ray != wanted:
        raise sky.UsageError(
            f"node {node} of pool {pool.name!r} has Ray {report.ray}, but {whose} has {wanted}; the versions must be "
            f'equal: Image(pip=["ray[default]=={wanted}"])'
        )
    if firewalled or not report.address:
        return  # without an address, all nodes are on one computer
    _trust.refuse_public_address(pool, node, report.address, "Ray")
    if report.public:
        raise sky.UsageError(
            f"Ray cannot run on pool {pool.name!r}: node {node} has {report.public[0]}, a public address, "
            "and Ray opens its ports at all addresses of a node; use nodes with private addresses only, or pass "
            "firewalled=True to sky.ray.cluster if a firewall keeps others from these ports"
        )


def check_client(
    pool: sky.ComputePool, head: _ray_node.NodeReport, ray: str, python: str = sys.version.split()[0]
) -> None:
    """Raise a UsageError if a program in this process cannot be a client of the cluster.

    `head` is the report of the head's node. `ray` and `python` are the versions in this process; "" for no Ray.
    """
    if not ray:
        raise sky.UsageError(
            f"Ray is not installed on this computer, and ray:// needs it: pip install "
            f'"ray[client]=={head.ray}", or use submit() or run(), which do not need it'
        )
    if (ray, python) != (head.ray, head.python):
        raise sky.UsageError(
            f"ray:// needs equal versions: this process has Ray {ray} and Python {python}, but the nodes of pool "
            f"{pool.name!r} have Ray {head.ray} and Python {head.python}; use submit() or run() instead"
        )


def pack(script: Path, folder: Path | None) -> tuple[bytes, str]:
    """Return a zip file with the files of a job, and the path of the program in it.

    The files are those of `folder`, or the program alone if that is None. UsageError is raised if the program does not
    exist or is not in the folder, or if the files are too large.
    """
    if not script.is_file() and folder is not None and (folder / script).is_file():
        script = folder / script
    if not script.is_file():
        raise sky.UsageError(f"the program {str(script)!r} is not a file on this computer")
    base = script.resolve().parent if folder is None else folder.resolve()
    try:
        entry = script.resolve().relative_to(base)
    except ValueError:
        raise sky.UsageError(f"the program {str(script)!r} is not in working_dir {str(folder)!r}") from None
    files = [script.resolve()] if folder is None else [each for each in sorted(base.rglob("*")) if each.is_file()]
    files = [each for each in files if not {".git", ".venv", "__pycache__"} & set(each.relative_to(base).parts)]
    if (size := sum(each.stat().st_size for each in files)) > _MOST:
        raise sky.UsageError(
            f"the files of the job in {str(base)!r} have {size >> 20} MiB, and Ray accepts 100 MiB: move data elsewhere"
        )
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in files:
            archive.write(each, each.relative_to(base))
    return packed.getvalue(), entry.as_posix()


def parse_demands(status: str) -> list[Demand]:
    """Return the demands in the text of `ray status`."""
    found = []
    for resources, times, count, kind in _DEMAND.findall(status):
        found.append(Demand(ast.literal_eval(resources), int(count) * int(times or 1), kind))
    return found


def has_ended(service: sky.Service[Any]) -> bool:
    """Return True if a service has ended for good."""
    try:
        service.exception(0)
    except TimeoutError:
        return False
    except CancelledError:
        return True
    return True


def in_parallel(work: Sequence[Callable[[], None]]) -> None:
    """Call functions at the same time, each in a thread, and wait until all have returned."""
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
