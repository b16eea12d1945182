"""A Ray cluster on four machines that are reached by ssh. They see an environment with Ray (requirements/ray.txt)."""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import skypool as sky
from skypool.engines._ray_cluster import RayCluster
from tests.clients import venvs
from tests.engines import ray_work
from tests.lab import environments
from tests.lab.machines import Lab, Machine

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(400)]
HERE = Path(__file__).parent
OWN = {
    "experimental/shuffle.py": (
        "e94c00368865a545e9136fb598cb613296a5b83de0fb315951dae922ac09c742",
        ["--ray-address=auto", "--partition-size=8e6"],
        "Shuffled 38 MiB",
    ),
    "tune/examples/async_hyperband_example.py": (
        "75041ed34ea954eca14085ad4669240856bf9a2192ccbc2fbc92be73d88f0674",
        ["--smoke-test"],
        "Best hyperparameters found: {'steps': 100, 'width'",
    ),
    "tune/examples/logging_example.py": (
        "69c7a66d8373bb9c84ee8758e47d49c37487d0338992319194f19a50b8eb7f34",
        ["--smoke-test"],
        "Best hyperparameters:  {'steps': 100, 'width'",
    ),
    "tune/examples/tune_basic_example.py": (
        "5f7cce8626d9fe60fd38ac84c065e3ddeb1447d9c5fee929f3a738271a83be9a",
        ["--smoke-test"],
        "Best hyperparameters found were:  {'steps': 5, 'width'",
    ),
}
"""Programs in the wheel of Ray 2.60.0, each with its SHA-256, its arguments, and a part of its output."""


@pytest.fixture(scope="module")
def environment() -> Path:
    return environments.compiled(venvs.environment("ray", HERE / "requirements"))


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


def test_data_tune_and_train_have_the_right_results(cluster: RayCluster) -> None:
    assert cluster.run(ray_work.data) == sum(n * n for n in range(1000))
    assert cluster.run(ray_work.tune) == 3
    assert cluster.run(ray_work.train) == [0, 1]


@pytest.mark.parametrize(("file", "sha256", "args", "said"), [(file, *rest) for file, rest in OWN.items()], ids=OWN)
def test_a_program_of_ray_runs_unchanged_as_a_job(
    cluster: RayCluster,
    environment: Path,
    capfd: pytest.CaptureFixture[str],
    file: str,
    sha256: str,
    args: Sequence[str],
    said: str,
) -> None:
    (program,) = environment.glob(f"lib/python3*/site-packages/ray/{file}")
    assert hashlib.sha256(program.read_bytes()).hexdigest() == sha256
    cluster.submit(program, *args)
    assert said in capfd.readouterr().out


def test_only_who_has_the_token_is_let_in(cluster: RayCluster) -> None:
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {'b' * 43}"}, 403)):
        request = urllib.request.Request(f"{cluster.dashboard_url}/api/v0/nodes", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=30)
        assert raised.value.code == status
    wrong = [{"RAY_AUTH_TOKEN": "b" * 43}, {"RAY_AUTH_MODE": "disabled"}]
    for output in sky.gather(*[ray_work.refused({**cluster.environment, **each}) for each in wrong]) >> cluster.pool:
        assert "AuthenticationError" in output
        assert "let in" not in output
