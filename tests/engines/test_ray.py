"""A Ray cluster on four machines that are reached by ssh. They see an environment with Ray (requirements/ray.txt)."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.engines._ray_cluster import RayCluster
from tests.clients import venvs
from tests.engines import ray_work
from tests.lab import kernel
from tests.lab.machines import Lab, Machine

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
PROGRAMS = {
    "tune/examples/tune_basic_example.py": ["--smoke-test"],
    "tune/examples/async_hyperband_example.py": ["--smoke-test"],
    "tune/examples/hyperband_function_example.py": [],
    "tune/examples/custom_func_checkpointing.py": ["--smoke-test"],
}
"""Programs that the wheel of Ray has, and their arguments."""


@pytest.fixture(scope="module")
def environment() -> Path:
    return venvs.environment("ray", HERE / "requirements")


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


@pytest.fixture(scope="module")
def cluster(pool: sky.ComputePool) -> Iterator[RayCluster]:
    with sky.ray.cluster(pool, cpus=2, object_store=200 << 20) as made:
        yield made


def until(found: Callable[[], Any], what: str) -> None:
    """Poll until something is true; raise after 120 s."""
    end = time.monotonic() + 120
    while not found():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.1)


def left(machine: Machine) -> list[str]:
    """Return the processes and the files of Ray on a machine."""
    processes = []
    for pid in machine.processes():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if "ray" in words and "skypool-" not in words.split(" ")[0]:
            processes.append(words)
    return processes + [each.name for each in machine.path("/tmp").iterdir() if each.name.startswith("skypool-")]


def daemon(machine: Machine, word: str) -> int:
    """Return the number of the process of a machine that runs a program of Ray."""
    for pid in machine.processes():
        if word in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode():
            return pid
    raise AssertionError(f"{word} does not run on {machine.name}")


def test_tasks_run_on_all_nodes_and_an_actor_keeps_its_state(cluster: RayCluster, machines: list[Machine]) -> None:
    assert cluster.run(ray_work.where, 12) == sorted(each.address for each in machines)
    assert cluster.run(ray_work.count, 5) == 5


def test_data_tune_and_train_give_what_one_process_computes(cluster: RayCluster) -> None:
    assert cluster.run(ray_work.data) == sum(n * n for n in range(1000))
    assert cluster.run(ray_work.tune) == 3
    assert cluster.run(ray_work.train) == [0, 1]


def test_a_job_shows_its_output_and_its_exit_status(
    cluster: RayCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "job.py"
    program.write_text(
        "import ray, sys\nray.init(log_to_driver=False)\n"
        "print('nodes:', len(ray.nodes()))\nsys.exit(int(sys.argv[1]))\n"
    )
    cluster.submit(program, "0")
    assert "nodes: 4" in capfd.readouterr().out
    with pytest.raises(sky.CommandFailed, match=r"python job\.py 3") as raised:
        cluster.submit(program, "3")
    assert raised.value.returncode == 3
    assert "nodes: 4" in raised.value.tail


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_ray_runs_unchanged(program: str, cluster: RayCluster, environment: Path) -> None:
    (file,) = environment.glob(f"lib/python3*/site-packages/ray/{program}")
    print(program, hashlib.sha256(file.read_bytes()).hexdigest())
    cluster.submit(file, *PROGRAMS[program])


def test_only_who_has_the_token_is_let_in(cluster: RayCluster) -> None:
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {'b' * 43}"}, 403)):
        request = urllib.request.Request(f"{cluster.dashboard_url}/api/v0/nodes", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=30)
        assert raised.value.code == status
    assert (
        "AuthenticationError" in ray_work.refused({**cluster.environment, "RAY_AUTH_TOKEN": "b" * 43}) >> cluster.pool
    )
    assert (
        "AuthenticationError" in ray_work.refused({**cluster.environment, "RAY_AUTH_MODE": "disabled"}) >> cluster.pool
    )


def test_what_tasks_wait_for_is_told(cluster: RayCluster) -> None:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(cluster.run, ray_work.hungry, 20)
        until(lambda: [each.resources for each in cluster.demands()] == [{"CPU": 64.0}], "a demand")
        running.result()


def test_a_killed_daemon_comes_back_on_its_node(
    cluster: RayCluster, pool: sky.ComputePool, machines: list[Machine]
) -> None:
    machine = next(each for each in machines if each.address != cluster.environment["RAY_ADDRESS"].split(":")[0])
    old = daemon(machine, "raylet")
    os.kill(old, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{old}").exists(), "the end of a daemon")
    until(lambda: any("raylet" in each for each in left(machine)), "a new daemon")
    until(lambda: len(cluster.run(ray_work.where, 12)) == 4, "tasks on four nodes")


def test_it_shrinks_and_grows(cluster: RayCluster, pool: sky.ComputePool) -> None:
    cluster.resize(3)
    assert list(cluster.nodes().values()).count("ALIVE") == 3
    until(lambda: list(pool.nodes.values()).count("ended") == 1, "the end of a node")
    cluster.resize(4)
    cluster.wait_ready(4, 120)
    assert len(cluster.run(ray_work.where, 12)) == 4


def test_a_killed_head_is_told_and_nothing_is_left(
    cluster: RayCluster, pool: sky.ComputePool, machines: list[Machine], tmp_path: Path
) -> None:
    head = next(each for each in machines if each.address == cluster.environment["RAY_ADDRESS"].split(":")[0])
    os.kill(daemon(head, "gcs_server"), signal.SIGKILL)
    with pytest.raises(sky.SkypoolError, match=r"Ray's head on node 0 of pool .* has ended"):
        cluster.run(time.sleep, 60)
    cluster.close()
    assert pool.services == []
    until(lambda: not [line for each in machines for line in left(each)], "machines without Ray")
    assert pool.phase == "ready"
