"""Removal of folders in which something of the user is mounted: that is never emptied."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool.safety import removal
from skypool.testing import FakeCloud
from tests.conftest import nodes
from tests.lab import kernel
from tests.lab.machines import Lab


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can enter. Afterwards nothing is mounted in it."""
    folder = Path(tempfile.mkdtemp(prefix="sp-removal-"))
    folder.chmod(0o755)
    yield folder
    kernel.unmount_below(folder)
    assert kernel.mounts_below(folder) == []
    shutil.rmtree(folder)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user, which is mounted somewhere. What is in it is there afterwards."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "weights").write_text("three months of work")
    yield folder
    assert (folder / "weights").read_text() == "three months of work"


def bind(folder: Path, place: Path) -> None:
    place.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(folder), str(place)], check=True)


@pytest.mark.needs("root", "mounts")
def test_what_is_mounted_is_unmounted_and_not_emptied(place: Path, precious: Path) -> None:
    folder = place / "node with a space"
    bind(precious, folder / "work/data")
    (folder / "work/result").touch()
    (folder / "work/link").symlink_to(precious)
    removal.remove(folder)
    assert kernel.mounts_below(place) == []
    assert not folder.exists()


@pytest.mark.needs("root", "mounts")
def test_what_cannot_be_unmounted_stays_and_the_rest_goes(place: Path, precious: Path) -> None:
    folder = place / "node"
    bind(precious, folder / "work/data")
    (folder / "work/other/deep").mkdir(parents=True)
    (folder / "node.json").touch()
    for each in (folder, *folder.rglob("*")):
        os.chown(each, 65534, 65534)
    program = "import ctypes, os, subprocess, sys; from skypool.safety import removal; "  # root's Python may be hidden
    program += "os.setuid(65534); removal.remove(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, cwd=Path(__file__).parents[1])
    left = [str(each.relative_to(folder)) for each in sorted(folder.rglob("*"))]
    assert left == ["work", "work/data", "work/data/weights"]


@sky.compute
def mount(folder: str, place: str) -> str:
    place = os.path.abspath(place)
    os.mkdir(place)
    subprocess.run(["mount", "--bind", folder, place], check=True)
    return place


@pytest.mark.needs("root", "mounts")
@pytest.mark.parametrize("fake", [False, True])
def test_what_a_call_mounts_outlives_its_node(tmp_path: Path, precious: Path, fake: bool) -> None:
    with sky.ComputePool(FakeCloud(tmp_path / "cloud") if fake else sky.Local(), console="off") as pool:
        # Calls run in a folder of the machine, but locally in that of the client, which nobody removes.
        place = mount(str(precious), "data" if fake else f"{nodes(pool.name)[0]}/data") >> pool
        assert Path(place, "weights").exists()
    left = kernel.mounts_below(Path(place))
    kernel.unmount_below(Path(place))
    assert left == []


def test_a_machine_that_lost_its_power_keeps_what_the_host_has_mounted_in_its_tmp(lab: Lab, precious: Path) -> None:
    from tests.soak import _clusters

    machine = lab.machine()
    machine.path("/tmp/own").mkdir()
    bind(precious, machine.path("/tmp/seen"))
    machine.kill()
    _clusters.boot(machine)
    assert [each.name for each in machine.path("/tmp").iterdir()] == ["seen"]
    machine.destroy()


def test_folders_that_are_for_reading_only_are_removed_and_what_links_point_to_is_not(tmp_path: Path) -> None:
    """Root could remove them in any case."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    inner = tmp_path / "node" / "cache" / "module"
    inner.mkdir(parents=True)
    (inner / "code.go").touch()
    (inner / "link").symlink_to(outside)
    for each in (inner, inner.parent):
        each.chmod(0o500)
    removal.remove(tmp_path / "node")
    assert not (tmp_path / "node").exists()
    assert outside.stat().st_mode & 0o777 == 0o500
