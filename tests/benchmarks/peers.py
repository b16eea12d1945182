"""What other libraries do on this machine, each measured in a process of its own.

A peer that is not installed, cannot start, fails or does not end has its row, too, which says why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CALLS = 10_000
PATIENCE = 180.0
"""Seconds that a peer may take to start, to be measured, and to end."""
_SAYS = "calls/s: "


class Unmeasured(Exception):
    """A peer could not be measured, and why."""


def rate(peer: str, patience: float = PATIENCE) -> float:
    """Return how many no-ops a second a peer does, at best.

    Raises:
        Unmeasured: it could not be measured.
    """
    if importlib.util.find_spec(peer) is None:
        raise Unmeasured("not installed (make bench installs it)")
    argv = [sys.executable, "-m", "tests.benchmarks.peers", peer]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # Ray asks for a token otherwise, also on one machine
    process = subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        raise Unmeasured(f"did not end within {patience:g} s") from None
    finally:
        _end(process)
    said = [line for line in out.splitlines() if line.startswith(_SAYS)]
    if said:  # what it complains about at its end changes nothing
        return float(said[-1].removeprefix(_SAYS))
    words = [line.strip() for line in errors.splitlines() if line.strip()]
    raise Unmeasured(words[-1][:200] if words else f"ended with exit status {process.returncode} and said nothing")


def _end(process: subprocess.Popen[str]) -> None:
    """End what a peer has started and left, in its session."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _identity(x: Any) -> Any:
    return x


def _rate(run: Callable[[], Any]) -> float:
    """The best of three."""
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        rates.append(CALLS / (time.perf_counter() - began))
    return max(rates)


def _say(rate: float) -> None:
    """Tell it before the peer ends, which may fail."""
    print(f"{_SAYS}{rate}", flush=True)


def _dask() -> None:
    dask: Any = importlib.import_module("distributed")
    with (
        dask.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        dask.Client(cluster) as client,
    ):
        client.gather(client.map(_identity, range(10), pure=False))
        _say(_rate(lambda: client.gather(client.map(_identity, range(CALLS), pure=False))))


def _ray() -> None:
    ray: Any = importlib.import_module("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        remote = ray.remote(_identity)
        ray.get([remote.remote(n) for n in range(10)])
        _say(_rate(lambda: ray.get([remote.remote(n) for n in range(CALLS)])))
    finally:
        ray.shutdown()


def _execnet() -> None:
    execnet: Any = importlib.import_module("execnet")
    group = execnet.Group(["popen", "popen"])
    try:
        channels = [g.remote_exec("for x in channel: channel.send(x)") for g in group]
        for channel in channels:
            channel.send(0)
            channel.receive()

        def run() -> None:
            for n in range(CALLS):
                channels[n % 2].send(n)
            for n in range(CALLS):
                assert channels[n % 2].receive() == n

        _say(_rate(run))
    finally:
        group.terminate(timeout=1.0)


PEERS: dict[str, Callable[[], None]] = {"distributed": _dask, "ray": _ray, "execnet": _execnet}


if __name__ == "__main__":
    PEERS[sys.argv[1]]()
