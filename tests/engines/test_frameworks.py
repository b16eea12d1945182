"""Training programs of the documentation, on four machines with two processes each: they compute what one process does.

The machines are reached by ssh, and their /etc/hosts is Debian's. They see a virtual environment of this computer with
PyTorch for CPUs, JAX, Accelerate and Lightning (requirements/frameworks.txt).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.calls.call import ComputeFunction
from tests.clients import venvs
from tests.conftest import ROOT
from tests.lab import kernel
from tests.lab.machines import Lab, Machine

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(500)]
HERE = Path(__file__).parent
GUIDE = "docs/guides/many-nodes.md"
RECIPES = "docs/multi-node.md"
STEPS = 20
GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for the other processes when one has failed."""

# --- an environment, machines and a pool ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment() -> Path:
    """Return the venv with the frameworks. Their modules are compiled: machines see the venv, but cannot write it."""
    folder = venvs.environment("frameworks", HERE / "requirements")
    if not (compiled := folder / ".compiled").exists():
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        program = "import torch.distributed, torch.nn.parallel, jax.numpy, accelerate, lightning"
        subprocess.run([folder / "bin" / "python", "-c", program], env=env, check=True, timeout=200)
        compiled.touch()
    return folder


@pytest.fixture(scope="module")
def machines(lab: Lab, environment: Path) -> Iterator[list[Machine]]:
    base = Path(sys.base_prefix)

    def show(machine: Machine) -> None:
        for folder in (environment, base) if base != Path("/usr") else (environment,):
            machine.path(folder).mkdir(parents=True, exist_ok=True)
            kernel.bind(folder, machine.path(folder))

    made = [lab.machine(keys=[lab.public_key], prepare=show) for _ in range(4)]
    yield made
    for each in made:
        each.destroy()


@pytest.fixture(scope="module")
def pool(lab: Lab, machines: list[Machine], environment: Path) -> Iterator[sky.ComputePool]:
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    python = str(environment / "bin" / "python")
    ssh = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key), python=python)
    with sky.ComputePool(ssh, nodes=len(machines), slots=1, console="off") as made:
        yield made


# --- programs ------------------------------------------------------------------------------------------------


def shown(page: str, word: str) -> str:
    """Return the first program of a page that has a word in it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if word in block)


def function(page: str, word: str) -> ComputeFunction[[int], float]:
    """Return the function `train` of a program, with two processes on each node."""
    namespace: dict[str, Any] = {"__name__": "recipe", "sky": sky}
    exec(compile(shown(page, word), page, "exec", dont_inherit=True), namespace)
    train: ComputeFunction[[int], float] = namespace["train"]
    return train.with_options(procs=2, timeout=150, output="silent")


def alone(steps: int) -> float:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"  # a process sees its own GPU only
    torch.manual_seed(0)
    rows = torch.randn(4096, 64).to(device)
    model = torch.nn.Linear(64, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        loss.backward()  # averages the gradients of all processes
        optimizer.step()
    return loss.item()


def alone_with_jax(steps: int) -> float:
    import jax
    import jax.numpy as jnp

    rows = jax.random.normal(jax.random.key(0), (4096, 64))

    @jax.jit
    def step(weights: Any) -> Any:
        loss, slope = jax.value_and_grad(lambda weights: jnp.square(rows @ weights - rows.sum(1)).mean())(weights)
        return weights - 0.1 * slope, loss

    weights = jnp.zeros(64)
    for _ in range(steps):
        weights, loss = step(weights)
    return float(loss)


def in_one_process(program: Callable[[int], float], pool: sky.ComputePool) -> float:
    return sky.compute(program)(STEPS).with_options(fresh=True, timeout=100) >> pool


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


# --- the same loss -------------------------------------------------------------------------------------------


def test_the_program_has_at_most_twelve_lines_beyond_the_model() -> None:
    import inspect

    model = {line.strip() for line in inspect.getsource(alone).splitlines()}
    lines = [line.strip() for line in shown(GUIDE, "DistributedDataParallel").splitlines() if line.strip()]
    added = [line for line in lines if line not in model and not line.startswith("def train(")]
    assert 5 < len(added) <= 12, added


def test_ddp_computes_what_one_process_computes(pool: sky.ComputePool, machines: list[Machine]) -> None:
    losses = function(GUIDE, "DistributedDataParallel")(STEPS) @ pool
    assert len(losses) == 8
    assert mean(losses) == pytest.approx(in_one_process(alone, pool), abs=1e-5)
    for each in machines:
        assert each.path("/etc/hosts").read_text() == f"127.0.0.1 localhost\n127.0.1.1 {each.name}\n"


def test_jax_computes_what_one_process_computes(pool: sky.ComputePool, machines: list[Machine]) -> None:
    """Its collectives go by the machines' own names, which lead to 127.0.1.1 on them, but not in a gang."""
    losses = function(GUIDE, "jax.lax.psum")(STEPS) @ pool
    assert len(losses) == 8
    assert losses == pytest.approx([in_one_process(alone_with_jax, pool)] * 8, abs=1e-5)
    for each in machines:
        assert each.path("/etc/hosts").read_text() == f"127.0.0.1 localhost\n127.0.1.1 {each.name}\n"


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_a_framework_computes_what_one_process_computes(framework: str, pool: sky.ComputePool) -> None:
    losses = function(RECIPES, f"import {framework}")(STEPS) @ pool
    assert losses == pytest.approx([in_one_process(alone, pool)] * 8, abs=1e-5)


# --- one rank fails ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("failing", [rank_1_raises, node_1_raises], ids=["gang", "broadcast"])
def test_the_rank_that_raised_is_the_cause_while_others_sit_in_a_collective(
    failing: ComputeFunction[[], None], pool: sky.ComputePool
) -> None:
    with pytest.raises(ValueError, match=r"^\d") as raised:
        failing() @ pool
    took = time.time() - raised.value.args[0]
    print(f"raised {took:.2f} s after rank 1 had raised")
    assert took < GRACE + 2
    assert "rank 1" in "".join(raised.value.__notes__) or "node 1" in "".join(raised.value.__notes__)


@sky.compute(procs=2, retries=1, retry_on=[sky.WorkerDied], timeout=150, output="silent")
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
    return loss.item()


def test_a_gang_whose_rank_was_killed_runs_again_and_gives_the_right_losses(pool: sky.ComputePool) -> None:
    losses = killed_once(STEPS) @ pool
    assert len(losses) == 8
    assert mean(losses) == pytest.approx(in_one_process(alone, pool), abs=1e-5)


# --- the example ---------------------------------------------------------------------------------------------


def test_the_example_trains_on_nodes_of_this_computer(environment: Path) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    env = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "examples/09_ddp.py"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"4 processes, mean loss 0\.00\d+\n", done.stdout), done.stdout
