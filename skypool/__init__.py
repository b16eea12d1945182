"""skypool: rent machines with accelerators, run Python functions on them, and end them again.

This module holds the public names only; each is imported at its first use. The class of a driver is found by its
package: `skypool.AWS` is the class `AWS` of `skypool_aws`. The modules beside the packages:

- `checks`: checks of arguments that users pass.
- `clock`: clocks that survive wall-clock corrections and pauses of this process.
- `errors`: all exceptions that skypool raises.
- `event_loop`: the thread with the asyncio loop that all pools share.
- `events`: events that a pool emits, and the stream that carries them to the console and other listeners.
- `model`: data types that drivers and the core share: Need, Offer, Order, Instance and others.
- `processes`: identity of processes and of this machine, as the ledger stores it.
- `runtime`: functions that user code calls on a node: `instance_info`, `shard`.
- `supported`: checks of the operating system.
- `text`: removes control characters from texts of nodes, servers and programs, and makes texts encodable.
- `tracebacks`: shortened tracebacks for errors that skypool raises.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # importing typing would double the cost of whatever is imported from here
if TYPE_CHECKING:
    from typing import Any

    from skypool import accelerators, devices
    from skypool.agent.own_notices import interruption
    from skypool.buckets.bucket import Bucket
    from skypool.calls.arguments import Ref
    from skypool.calls.call import Call, ComputeFunction, compute, gather
    from skypool.calls.command import cmd
    from skypool.calls.futures import CallFuture, Stream
    from skypool.compute_pool.compute_pool import ComputePool
    from skypool.data.checkpoints import Checkpoint, Checkpoints, Flushed, SavedFolder, saved
    from skypool.engines import dask, joblib, ray
    from skypool.errors import (
        BootstrapError,
        BudgetExceeded,
        CallTimeout,
        CommandFailed,
        ConnectionLost,
        LedgerError,
        LifetimeExceeded,
        NodeInterrupted,
        NodeRetired,
        NodeUnhealthy,
        NoOffers,
        PickleError,
        PoolClosed,
        PythonMismatch,
        RemoteError,
        SkypoolError,
        SpoolFull,
        StillRunning,
        UnknownAccelerator,
        UsageError,
        WorkerDied,
    )
    from skypool.metrics.otlp import OTLP
    from skypool.metrics.prometheus import Prometheus
    from skypool.offers.plan import plan
    from skypool.offers.ranking import Plan
    from skypool.pool.service import Service
    from skypool.pool.views import PoolView
    from skypool.rental.budget import Budget
    from skypool.rental.receipt import Receipt
    from skypool.runs.detached_run import DetachedRun
    from skypool.runs.run import Run, run
    from skypool.runtime import InstanceInfo, Interruption, instance_info, is_head, shard
    from skypool.wire.codec import Captured
    from skypool_aws import AWS as AWS
    from skypool_container import Container as Container
    from skypool_gcp import GCP as GCP
    from skypool_images import Image
    from skypool_local import Local as Local
    from skypool_runpod import RunPod as RunPod
    from skypool_ssh import SSH as SSH
    from skypool_ssh import Host
    from skypool_vastai import VastAI as VastAI
    from skypool_verda import Verda as Verda

_HOME = {
    "Image": "skypool_images",
    "Host": "skypool_ssh",
    "accelerators": "skypool",
    "devices": "skypool",
    "dask": "skypool.engines",
    "joblib": "skypool.engines",
    "ray": "skypool.engines",
    "Captured": "skypool.wire.codec",
    "Budget": "skypool.rental.budget",
    "Bucket": "skypool.buckets.bucket",
    "Checkpoint": "skypool.data.checkpoints",
    "Checkpoints": "skypool.data.checkpoints",
    "Flushed": "skypool.data.checkpoints",
    "SavedFolder": "skypool.data.checkpoints",
    "saved": "skypool.data.checkpoints",
    "DetachedRun": "skypool.runs.detached_run",
    "Run": "skypool.runs.run",
    "run": "skypool.runs.run",
    "Receipt": "skypool.rental.receipt",
    "Call": "skypool.calls.call",
    "ComputeFunction": "skypool.calls.call",
    "cmd": "skypool.calls.command",
    "compute": "skypool.calls.call",
    "gather": "skypool.calls.call",
    "BootstrapError": "skypool.errors",
    "BudgetExceeded": "skypool.errors",
    "CallTimeout": "skypool.errors",
    "CommandFailed": "skypool.errors",
    "ConnectionLost": "skypool.errors",
    "LedgerError": "skypool.errors",
    "LifetimeExceeded": "skypool.errors",
    "NoOffers": "skypool.errors",
    "NodeInterrupted": "skypool.errors",
    "NodeRetired": "skypool.errors",
    "NodeUnhealthy": "skypool.errors",
    "PickleError": "skypool.errors",
    "PoolClosed": "skypool.errors",
    "PythonMismatch": "skypool.errors",
    "RemoteError": "skypool.errors",
    "SkypoolError": "skypool.errors",
    "SpoolFull": "skypool.errors",
    "StillRunning": "skypool.errors",
    "Stream": "skypool.calls.futures",
    "UnknownAccelerator": "skypool.errors",
    "UsageError": "skypool.errors",
    "WorkerDied": "skypool.errors",
    "CallFuture": "skypool.calls.futures",
    "ComputePool": "skypool.compute_pool.compute_pool",
    "PoolView": "skypool.pool.views",
    "Plan": "skypool.offers.ranking",
    "Service": "skypool.pool.service",
    "Ref": "skypool.calls.arguments",
    "OTLP": "skypool.metrics.otlp",
    "Prometheus": "skypool.metrics.prometheus",
    "plan": "skypool.offers.plan",
    "InstanceInfo": "skypool.runtime",
    "Interruption": "skypool.runtime",
    "instance_info": "skypool.runtime",
    "interruption": "skypool.agent.own_notices",
    "is_head": "skypool.runtime",
    "shard": "skypool.runtime",
}

_MODULES = {"accelerators", "dask", "devices", "joblib", "ray"}
"""The public names that are modules. Every other public name is a class, function or value in a module."""

__all__ = [  # noqa: RUF022 - ruff would begin with OTLP, as with a constant
    "BootstrapError",
    "Bucket",
    "Budget",
    "BudgetExceeded",
    "Call",
    "CallFuture",
    "CallTimeout",
    "Captured",
    "Checkpoint",
    "Checkpoints",
    "CommandFailed",
    "ComputeFunction",
    "ComputePool",
    "ConnectionLost",
    "DetachedRun",
    "Flushed",
    "Host",
    "Image",
    "InstanceInfo",
    "Interruption",
    "LedgerError",
    "LifetimeExceeded",
    "NoOffers",
    "NodeInterrupted",
    "NodeRetired",
    "NodeUnhealthy",
    "OTLP",
    "PickleError",
    "Plan",
    "PoolClosed",
    "PoolView",
    "Prometheus",
    "PythonMismatch",
    "Receipt",
    "Ref",
    "RemoteError",
    "Run",
    "SavedFolder",
    "Service",
    "SkypoolError",
    "SpoolFull",
    "StillRunning",
    "Stream",
    "UnknownAccelerator",
    "UsageError",
    "WorkerDied",
    "accelerators",
    "cmd",
    "compute",
    "dask",
    "devices",
    "gather",
    "instance_info",
    "interruption",
    "is_head",
    "joblib",
    "plan",
    "ray",
    "run",
    "saved",
    "shard",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name) if name in _HOME else _driver_package(name)
    if sys.platform == "win32" and home not in (None, "skypool", "skypool.errors"):
        from skypool.supported import check_client

        check_client()  # what is imported next needs modules that Windows lacks
    importlib.import_module("skypool.tracebacks").install()  # the first use of a name may be a wrong one
    if name in _MODULES:
        value = importlib.import_module(f"{home}.{name}")
    elif home is None or not hasattr(module := importlib.import_module(home), name):
        said = f"module 'skypool' has no attribute {name!r}; `dir(skypool)` lists its names"
        raise AttributeError(said, name=name, obj=sys.modules[__name__])
    else:
        value = getattr(module, name)
    globals()[name] = value
    return value


def _driver_package(name: str) -> str | None:
    """Return the name of the installed package of a driver class ("AWS": "skypool_aws"); None if there is none."""
    from importlib.util import find_spec

    package = f"skypool_{name.lower()}"
    return package if name[:1].isupper() and name.isidentifier() and find_spec(package) else None


def __dir__() -> list[str]:
    from importlib.metadata import entry_points

    drivers = entry_points(group="skypool.providers")
    return sorted({*__all__, *(each.attr for each in drivers if each.module == f"skypool_{each.attr.lower()}")})
