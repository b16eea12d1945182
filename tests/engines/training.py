"""Functions that the tests of frameworks run on machines: in a module of their own, as a machine has no pytest."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import skypool as sky

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for the other processes when one has failed."""


@sky.compute(fresh=True, timeout=100)
def alone(steps: int) -> float:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = torch.randn(4096, 64).to(device)
    model = torch.nn.Linear(64, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()  # averages the gradients of all processes
        optimizer.step()
    return float(loss.item())


@sky.compute(fresh=True, timeout=100)
def alone_with_jax(steps: int) -> float:
    import jax
    import jax.numpy as jnp

    rows = jax.random.normal(jax.random.key(0), (4096, 64))

    def step(weights: Any) -> Any:
        loss, slope = jax.value_and_grad(lambda weights: jnp.square(rows @ weights - rows.sum(1)).mean())(weights)
        return weights - 0.1 * slope, loss

    weights, compiled = jnp.zeros(64), jax.jit(step)
    for _ in range(steps):
        weights, loss = compiled(weights)
    return float(loss)


@sky.compute(procs=2, timeout=100, grace=GRACE, output="silent")
def rank_1_raises() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        raise ValueError(time.time())
    dist.all_reduce(torch.ones(1))


@sky.compute(fresh=True, timeout=100, grace=GRACE, output="silent")
def node_1_raises() -> None:
    import torch
    import torch.distributed as dist

    info = sky.instance_info()
    dist.init_process_group("gloo", f"tcp://{info.head_address}:29512", rank=info.node, world_size=info.nodes)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        raise ValueError(time.time())
    dist.all_reduce(torch.ones(1))


@sky.compute(procs=2, retries=1, retry_on=sky.WorkerDied, timeout=150, output="silent")
def killed_once(steps: int) -> float:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(4096, 64)[rank::world]
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if step == 3 and rank == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.item())
