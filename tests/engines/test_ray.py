"""A Ray cluster on four machines that are reached by ssh. They see an environment with Ray (requirements/ray.txt)."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool.engines._ray_cluster import RayCluster
from tests.clients import venvs
from tests.engines import ray_work
from tests.lab import environments
from tests.lab.machines import Lab, Machine

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(400)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def environment() -> Path:
    return venvs.environment("ray", HERE / "requirements")


@pytest.fixture(scope="module")
def machines(lab: Lab, environment: Path) -> Iterator[list[Machine]]:
    with environments.machines_with(lab, environment) as made:
        yield made


@pytest.fixture(scope="module")
def pool(lab: Lab, machines: list[Machine], environment: Path) -> Iterator[sky.ComputePool]:
    with environments.pool_on(lab, machines, environment) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(pool: sky.ComputePool) -> Iterator[RayCluster]:
    with sky.ray.cluster(pool, cpus=2, object_store=200 << 20) as made:
        yield made


def test_tasks_run_on_all_nodes_and_an_actor_keeps_its_state(cluster: RayCluster, machines: list[Machine]) -> None:
    assert cluster.run(ray_work.where) == sorted(each.address for each in machines)
    assert cluster.run(ray_work.count, 5) == 5


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
