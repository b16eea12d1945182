"""A Dask cluster on a pool. Dask is in an environment of its own, so programs in tests/engines/scripts use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skypool as sky
from skypool.engines import _trust
from tests.clients.runs import Client, Report
from tests.clients.venvs import environment, with_skypool
from tests.conftest import processes_of
from tests.test_guides import PYTHON

ROOT = Path(__file__).parent.parent
ENGINES = ROOT / "tests" / "engines"


def client(home: Path) -> Client:
    """Return what runs programs in an environment that has Dask, and this skypool."""
    with_skypool(environment("dask", ENGINES / "requirements"))
    (home / "tmp").mkdir()
    return Client("dask", home, {"TMPDIR": str(home / "tmp")}, ENGINES)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return client(tmp_path_factory.mktemp("dask")).script("dask_pool.py")


@pytest.mark.slow
def test_arrays_and_frames_have_the_values_of_numpy_and_pandas(report: Report) -> None:
    assert (report.shown["array"], report.shown["frame"], report.shown["sum"]) == (True, True, 6)
    assert (report.shown["workers"], report.shown["processes"]) == (2, 3)


@pytest.mark.slow
def test_only_clients_with_the_key_of_the_cluster_reach_its_scheduler(report: Report) -> None:
    assert report.shown["refused"] == {"plain": True, "other": True}


@pytest.mark.slow
def test_the_dashboard_and_the_widget_are_there(report: Report) -> None:
    assert report.shown["dashboard"] == 200
    assert report.shown["widget"]


@pytest.mark.slow
def test_a_pool_has_one_cluster_whose_parts_are_services_and_end_with_it(report: Report) -> None:
    assert report.shown["services"] == ["dask-scheduler", "dask-worker-0", "dask-worker-1"]
    assert "has a Dask cluster already" in report.shown["second"]
    assert report.shown["services left"] == []
    assert report.shown["phase"] == "ready"  # the pool goes on
    assert report.shown["files"] == []
    assert processes_of("dask_pool.py") == []


@pytest.mark.slow
def test_scale_rents_machines_and_ends_them_once_their_data_was_copied(report: Report) -> None:
    assert report.shown["grown"] == [0, 1, 2]
    assert report.shown["shrunk"] == [0]
    assert report.shown["kept"] == [36, True]


@pytest.mark.slow
def test_a_killed_worker_comes_back(report: Report) -> None:
    assert report.shown["after a kill"] == 9


@pytest.mark.slow
def test_adapt_changes_the_size_of_the_pool_with_the_load(report: Report) -> None:
    assert report.shown["adapted"] == sum(range(40))


@pytest.mark.slow
@pytest.mark.heavy
def test_the_data_of_a_machine_that_is_taken_back_is_copied_first_and_its_worker_moves(tmp_path: Path) -> None:
    shown = client(tmp_path).script("dask_notice.py", str(tmp_path / "cloud")).shown
    assert shown["kept"] == [36, True]
    assert shown["seconds"] < 30  # of the 60 s between the notice and the end
    assert shown["sum"] == 6
    assert shown["kept after a retirement"]
    # A notice of 30 s, as Google gives: the worker is gone before the machine, although its data cannot be copied.
    assert 1 < shown["slow data"]["left"] < 30
    assert shown["slow data"]["sum"] == 6


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return what came of clusters on machines with two H100 each, which a fake cloud has."""
    home = tmp_path_factory.mktemp("places")
    return client(home).script("dask_places.py", str(home / "cloud"))


@pytest.mark.slow
@pytest.mark.heavy
def test_each_accelerator_of_a_node_has_a_worker_that_sees_only_this_one(places: Report) -> None:
    assert places.shown["devices"] == {"0": 2}
    assert [(devices, memory) for devices, _, memory in places.shown["per-device"]] == [("0", 2**30), ("1", 2**30)]
    assert places.shown["four"] == [[0, 1], ["0", "0", "1", "1"]]


@pytest.mark.slow
@pytest.mark.heavy
def test_a_number_of_workers_share_the_accelerators_and_the_memory_of_their_node(places: Report) -> None:
    assert places.shown["one"] == ["0,1", 1, True]
    assert places.shown["shared"] == ["0", "0", "1", "1"]
    assert places.shown["all memory"]
    assert "must be a whole number from 1" in places.shown["wrong"]


@pytest.mark.slow
@pytest.mark.heavy
def test_scale_takes_threads_and_memory(places: Report) -> None:
    assert places.shown["by memory"] == [3, 2]  # 2.5 GiB are three workers of 1 GiB, on two machines
    assert places.shown["by cores"] == 2
    assert places.shown["memory without a worker"] == 2


@pytest.mark.slow
@pytest.mark.heavy
def test_async_with_is_refused_and_a_client_in_an_event_loop_works(places: Report) -> None:
    refused, total = places.shown["async"]
    assert "asyncio.to_thread(sky.dask.cluster, pool)" in refused
    assert total == 6


@pytest.mark.slow
@pytest.mark.heavy
def test_machines_of_strangers_are_refused_before_they_are_rented(places: Report) -> None:
    said, phase = places.shown["stranger"]
    assert "Dask cannot run on pool" in said
    assert phase == "planned"


@pytest.mark.slow
def test_the_example_and_the_first_program_of_the_guide_run(tmp_path: Path) -> None:
    dask = client(tmp_path)
    done = dask.run("python", str(ROOT / "examples/15_dask.py"))
    assert done.stdout == "mean of the squares: 333332833333.5\nnodes: ['ready', 'ready']\n", done.stderr
    program = PYTHON.findall((ROOT / "docs/guides/dask.md").read_text())[0]
    (tmp_path / "first.py").write_text(program)
    done = dask.run("python", "first.py")
    assert done.stdout.splitlines()[1:] == ["64000000000"], done.stderr


def test_what_cannot_run_is_refused_before_anything_is_rented() -> None:
    dask_is_here = subprocess.run([sys.executable, "-c", "import distributed"], capture_output=True).returncode == 0
    pool = sky.ComputePool(console="off", trust="data")
    with pytest.raises(sky.UsageError, match="Dask cannot run on pool" if dask_is_here else r"skypool\[dask\]"):
        sky.dask.cluster(pool)
    assert pool.phase == "planned"


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [("52.4.7.12", True), ("2600:1f18::5", True), ("10.0.0.4", False), ("100.64.0.9", False), ("", False)],
)
def test_ports_at_addresses_of_the_internet_are_refused(address: str, is_refused: bool) -> None:
    pool = sky.ComputePool(name="mine", console="off")
    if is_refused:
        with pytest.raises(sky.UsageError, match=rf"node 1 at {address}, a public address"):
            _trust.refuse_public_address(pool, 1, address, "Dask")
    else:
        _trust.refuse_public_address(pool, 1, address, "Dask")
