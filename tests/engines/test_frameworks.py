"""Training programs of the documentation, on four machines with two processes each: they compute what one process does.

The machines are reached by ssh, and their /etc/hosts is Debian's. They see a virtual environment of this computer with
PyTorch for CPUs, JAX, Accelerate and Lightning (requirements/frameworks.txt).
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.calls.call import ComputeFunction
from tests.clients import venvs
from tests.conftest import ROOT
from tests.engines import training
from tests.lab import environments
from tests.lab.machines import Lab, Machine

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(500)]
HERE = Path(__file__).parent
GUIDE = "docs/guides/many-nodes.md"
RECIPES = "docs/multi-node.md"
STEPS = 20

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
    with environments.machines_with(lab, environment) as made:
        yield made


@pytest.fixture(scope="module")
def pool(lab: Lab, machines: list[Machine], environment: Path) -> Iterator[sky.ComputePool]:
    with environments.pool_on(lab, machines, environment) as made:
        yield made


# --- programs ------------------------------------------------------------------------------------------------


def shown(page: str, word: str) -> str:
    """Return the first program of a page that has a word in it."""
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if word in block)


def function(page: str, word: str) -> ComputeFunction[[int], float]:
    """Return the function `train` of a program, with two processes on each node."""
    namespace: dict[str, Any] = {"__name__": "recipe", "sky": sky}
    exec(compile(shown(page, word), page, "exec", dont_inherit=True), namespace)
    train: ComputeFunction[[int], float] = namespace["train"]
    return train.with_options(procs=2, timeout=150, output="silent")


@pytest.fixture(scope="module")
def loss(pool: sky.ComputePool) -> float:
    """Return the loss after training with PyTorch in one process."""
    return training.alone(STEPS) >> pool


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


# --- the same loss -------------------------------------------------------------------------------------------


def test_the_program_has_at_most_twelve_lines_beyond_the_model() -> None:
    model = {line.strip() for line in inspect.getsource(training.alone.function).splitlines()}
    lines = [line.strip() for line in shown(GUIDE, "DistributedDataParallel").splitlines() if line.strip()]
    added = [line for line in lines if line not in model and not line.startswith(("def train(", "return "))]
    assert 5 < len(added) <= 12, added


def test_ddp_computes_what_one_process_computes(pool: sky.ComputePool, machines: list[Machine], loss: float) -> None:
    losses = function(GUIDE, "DistributedDataParallel")(STEPS) @ pool
    assert len(losses) == 8
    assert mean(losses) == pytest.approx(loss, abs=1e-5)
    for each in machines:
        assert each.path("/etc/hosts").read_text() == f"127.0.0.1 localhost\n127.0.1.1 {each.name}\n"


def test_jax_computes_what_one_process_computes(pool: sky.ComputePool, machines: list[Machine]) -> None:
    """Its collectives go by the machines' own names, which lead to 127.0.1.1 on them, but not in a gang."""
    losses = function(GUIDE, "jax.lax.psum")(STEPS) @ pool
    assert len(losses) == 8
    assert losses == pytest.approx([training.alone_with_jax(STEPS) >> pool] * 8, abs=1e-5)
    for each in machines:
        assert each.path("/etc/hosts").read_text() == f"127.0.0.1 localhost\n127.0.1.1 {each.name}\n"


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_a_framework_computes_what_one_process_computes(framework: str, pool: sky.ComputePool, loss: float) -> None:
    losses = function(RECIPES, f"import {framework}")(STEPS) @ pool
    assert losses == pytest.approx([loss] * 8, abs=1e-5)


# --- twice in one process ------------------------------------------------------------------------------------

TWICE = """
import os
import skypool as sky


@sky.compute
def train(fails):
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    if fails:
        raise ValueError("the training failed")
    return dist.get_world_size()


with sky.ComputePool(slots=1, console="off") as pool:
    for _ in range(2):
        try:
            train(True) >> pool
        except ValueError as e:
            print(e)
    print(train(False) >> pool)
"""


def test_torch_is_initialised_again_after_a_call_that_failed(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    path = os.pathsep.join(each for each in sys.path if each and Path(each).is_dir())  # skypool and what it needs
    ran = subprocess.run(
        [environment / "bin" / "python", str(tmp_path / "twice.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.split("\n") == ["the training failed", "the training failed", "1", ""], ran.stderr


# --- torchrun ------------------------------------------------------------------------------------------------

MEETS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
sum_of_ranks = torch.tensor([dist.get_rank()])
dist.all_reduce(sum_of_ranks)
print(f"{dist.get_world_size()} processes, {sum_of_ranks.item()}")
dist.destroy_process_group()
"""


def test_torchrun_meets_on_its_own_in_a_gang(pool: sky.ComputePool) -> None:
    """Its first node announces an address for all; without PET_LOCAL_ADDR that is its name, which the others find."""
    words = ("--rdzv-backend=c10d", "--rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT", "--nnodes=$GROUP_WORLD_SIZE")
    run = ("--nproc-per-node=2", "--no-python", "python", "-c", MEETS)
    gang = sky.cmd("torchrun", *words, *run, expand=True).with_options(procs=1, timeout=150, output="capture")
    by_name = sky.cmd("env", "-u", "PET_LOCAL_ADDR", "torchrun", *words, *run, expand=True)
    for call in (gang, by_name.with_options(procs=1, timeout=150, output="capture")):
        said: Any = call @ pool
        assert sum(each.output.count("8 processes, 28") for each in said) == 8, said


# --- a program that does not know skypool -------------------------------------------------------------------

PROGRAM = """
import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def shard(rows, rank, size):
    return rows.tensor_split(size)[rank]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(4096, 64)
    mine = shard(rows, rank, size)
    target = shard(rows.sum(1, keepdim=True), rank, size)
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step in range(args.steps):
        optimizer.zero_grad()
        loss = (model(mine) - target).square().mean()
        loss.backward()
        optimizer.step()

    total = loss.detach() / size
    dist.all_reduce(total)
    if rank == 0:
        print(f"{size} processes, loss {total.item():.7f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
BY_TORCHRUN = ["torchrun", "train.py", "--steps=10"]


def test_a_program_for_torchrun_trains_as_it_is(
    lab: Lab, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `skypool run --nodes 2 --procs 2 train.py` and `skypool run --nodes 2 torchrun train.py`."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    here = [str(environment / "bin" / "torchrun"), "--standalone", "--nproc-per-node=4", *BY_TORCHRUN[1:]]
    alone = subprocess.run(here, capture_output=True, text=True, timeout=200)
    told = re.fullmatch(r"4 processes, loss (\d+\.\d+)\n", alone.stdout)
    assert told, alone
    loss = float(told[1])
    with environments.machines_with(lab, environment, 2) as two:  # the others serve a pool
        ssh = environments.ssh_to(lab, two, environment)
        for words, procs, processes in ((["train.py", "--steps=10"], 2, 4), (BY_TORCHRUN, None, 2)):
            ran = sky.run(words, ssh, nodes=2, procs=procs)
            # at times, PyTorch 2.13 aborts a process that ends, also if torchrun alone starts it
            assert ran.returncode == 0 or "terminate called without an active exception" in ran.output, ran.output
            found = re.search(rf"{processes} processes, loss (\d+\.\d+)", ran.output)
            assert found, ran.output
            assert float(found[1]) == pytest.approx(loss, abs=1e-6)


# --- one rank fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [training.rank_1_raises, training.node_1_raises], ids=["gang", "broadcast"])
def test_the_rank_that_raised_is_the_cause_while_others_sit_in_a_collective(
    failing: ComputeFunction[[], None], pool: sky.ComputePool
) -> None:
    with pytest.raises(ValueError, match=r"^\d") as raised:
        failing() @ pool
    took = time.time() - raised.value.args[0]
    print(f"raised {took:.2f} s after rank 1 had raised")
    assert took < training.GRACE + 2
    assert "rank 1" in "".join(raised.value.__notes__) or "node 1" in "".join(raised.value.__notes__)


def test_a_gang_whose_rank_was_killed_runs_again_and_gives_the_right_losses(pool: sky.ComputePool, loss: float) -> None:
    losses = training.killed_once(STEPS) @ pool
    assert len(losses) == 8
    assert mean(losses) == pytest.approx(loss, abs=1e-5)


# --- the example ---------------------------------------------------------------------------------------------


def test_the_example_trains_on_nodes_of_this_computer(environment: Path) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    env = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "examples/10_ddp.py"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"4 processes, mean loss 0\.00\d+\n", done.stdout), done.stdout
