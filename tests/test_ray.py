"""What the engine of Ray decides without Ray: refusals, versions, files of a job, and demands."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.engines import _ray_cluster, _ray_node, _versions
from skypool.engines._ray_cluster import Demand, check_client, check_report, pack, parse_demands

REPORT = _ray_node.NodeReport("10.0.0.4", (), "2.60.0", "3.11.7", (1, 2, 3))


@pytest.fixture
def pool() -> sky.ComputePool:
    return sky.ComputePool(name="mine", console="off")


@pytest.mark.parametrize(
    "options", [{"cpus": -1}, {"cpus": True}, {"object_store": 1.5}, {"drain": -1}, {"timeout": "soon"}]
)
def test_arguments_that_are_not_valid_are_refused_before_anything_is_rented(
    options: dict[str, Any], pool: sky.ComputePool
) -> None:
    (name,) = options
    with pytest.raises(sky.UsageError, match=rf"^{name} must be"):
        sky.ray.cluster(pool, **options)
    assert pool.phase == "planned"


def test_machines_of_strangers_are_refused_before_anything_is_rented() -> None:
    pool = sky.ComputePool(console="off", trust="data")
    with pytest.raises(sky.UsageError, match="Ray cannot run on pool"):
        sky.ray.cluster(pool)
    assert pool.phase == "planned"


def test_an_image_with_another_version_is_refused_before_anything_is_rented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "versions", lambda packages: {"ray": "2.60.0"})
    pool = sky.ComputePool(console="off", image=sky.Image(pip=["ray[default]==2.59.1"]))
    with pytest.raises(sky.UsageError, match=r"ray 2\.59\.1, but this process has 2\.60\.0"):
        sky.ray.cluster(pool)
    assert pool.phase == "planned"


@pytest.mark.parametrize(
    ("change", "here", "said"),
    [
        ({"ray": ""}, "", r"has no Ray.*ray\[default\]==2\.60\.0"),
        ({"ray": "2.61.0"}, "", r"has Ray 2\.61\.0, but the node of the head has 2\.60\.0"),
        ({"ray": "2.61.0"}, "2.60.1", r"has Ray 2\.61\.0, but this process has 2\.60\.1"),
        ({"ray": "2.51.0"}, "2.51.0", r"2\.60 or newer is needed"),
        ({"address": "52.4.7.12"}, "", r"at 52\.4\.7\.12, a public address"),
        ({"public": ("52.4.7.12",)}, "", r"has 52\.4\.7\.12, a public address.*firewalled=True"),
    ],
)
def test_a_node_that_ray_must_not_start_on_is_refused(
    change: dict[str, Any], here: str, said: str, pool: sky.ComputePool
) -> None:
    with pytest.raises(sky.UsageError, match=said):
        check_report(pool, 1, replace(REPORT, **change), REPORT, False, here)


def test_a_node_with_a_firewall_or_with_private_addresses_is_accepted(pool: sky.ComputePool) -> None:
    check_report(pool, 1, REPORT, REPORT, False, "")
    check_report(pool, 1, replace(REPORT, public=("52.4.7.12",)), REPORT, True, "2.60.0")


@pytest.mark.parametrize(("ray", "python"), [("2.60.1", "3.11.7"), ("2.60.0", "3.11.8")])
def test_a_client_with_other_versions_is_told_all_four(ray: str, python: str, pool: sky.ComputePool) -> None:
    with pytest.raises(
        sky.UsageError, match=r"Ray 2\.60\.\d and Python 3\.11\.\d.* have Ray 2\.60\.0 and Python 3\.11\.7"
    ):
        check_client(pool, REPORT, ray, python)
    check_client(pool, REPORT, "2.60.0", "3.11.7")


def test_a_client_without_ray_is_told_what_to_install_and_what_works_without(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.UsageError, match=r"ray\[client\]==2\.60\.0.*submit\(\)"):
        check_client(pool, REPORT, "")


def test_addresses_of_the_internet_are_found_in_what_linux_says(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(
        "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.0.4\n        /32 host LOCAL\n"
        "     |-- 52.4.7.12\n        /32 host LOCAL\n     |-- 52.4.7.255\n        /32 link BROADCAST\n"
    )
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80 lo\nfe800000000000000000000000000001 02 40 20 80 eth0\n"
        "26001f18000000000000000000000005 02 40 00 80 eth0\n"
    )
    assert _ray_node.public_addresses(tmp_path) == ("2600:1f18::5", "52.4.7.12")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4090", ""),
    ],
)
def test_a_gpu_has_the_name_that_ray_gives_its_model(name: str, model: str) -> None:
    assert _ray_node.accelerator_type(name) == model


def test_a_job_takes_its_program_or_a_folder_without_caches(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "job.py").write_text("1")
    (tmp_path / "data.txt").write_text("2")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_text("3")
    packed, entry = pack(tmp_path / "a" / "job.py", None)
    assert (zipfile.ZipFile(BytesIO(packed)).namelist(), entry) == (["job.py"], "job.py")
    packed, entry = pack(Path("a/job.py"), tmp_path)
    assert (zipfile.ZipFile(BytesIO(packed)).namelist(), entry) == (["a/job.py", "data.txt"], "a/job.py")
    with pytest.raises(sky.UsageError, match="is not in working_dir"):
        pack(tmp_path / "data.txt", tmp_path / "a")
    with pytest.raises(sky.UsageError, match=r"'none\.py' is not a file"):
        pack(Path("none.py"), None)


def test_demands_are_read_from_the_status_of_ray() -> None:
    status = (
        "Resources\n Total Usage:\n 0.0/1.0 CPU\n\nPending Demands:\n"
        " {'CPU': 4.0, 'x': 1.0}: 2+ pending tasks/actors\n"
        " {'GPU': 1.0} * 2 (STRICT_PACK): 3+ pending placement groups"
    )
    assert parse_demands(status) == [
        Demand({"CPU": 4.0, "x": 1.0}, 2, "tasks/actors"),
        Demand({"GPU": 1.0}, 6, "placement groups"),
    ]
    assert parse_demands("Pending Demands:\n (no resource demands)") == []


def test_leftovers_are_removed_with_their_processes(tmp_path: Path) -> None:
    folder = tmp_path / "skypool-ray-1-0"
    folder.mkdir()
    (folder / "log").write_text("x")
    _ray_node.clean(str(tmp_path / "skypool-ray-1-"))
    assert list(tmp_path.iterdir()) == []
    assert _ray_cluster.HEAD == "ray-head"
