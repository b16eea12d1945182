"""Images on machines of the lab: Debian packages, and disks that are full."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool.errors import BootstrapError, CapacityError, ConnectionLost
from skypool_images import Image
from tests.conftest import eventually
from tests.lab import repository
from tests.lab.machines import Lab, Machine
from tests.lab.repository import Package

# --- a disk that is full -------------------------------------------------------------------------------------


@pytest.fixture
def small(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    """A machine with as small a disk as the health gate passes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    machine = lab.machine(keys=[lab.public_key], disk=(1 << 30) + (256 << 20))
    yield machine
    machine.destroy()


def pool(machine: Machine, image: Image | None = None) -> sky.ComputePool:
    host = sky.Host(machine.address, host_key=machine.host_key)
    ssh = sky.SSH([host], user="root", identity=str(machine.lab.client_key))
    return sky.ComputePool(ssh, image=image, console="off")


def test_a_disk_that_is_full_when_a_host_is_taken_leaves_nothing_that_stands_in_the_way(small: Machine) -> None:
    small.run("mkdir -p /root/.skypool/pools")
    small.fill_disk()
    with pytest.raises((ConnectionLost, CapacityError), match=r"(?i)no space left|is its disk full\?"):
        pool(small).start()
    small.free_disk()
    with pool(small):
        pass


def test_a_claim_that_lost_its_words_stands_in_nobodys_way(small: Machine) -> None:
    small.run("mkdir -p /root/.skypool/pools/old.0; : > /root/.skypool/pools/old.0/claim")
    with pool(small):
        pass


@pytest.mark.parametrize("leave", [20_000, 80_000])
def test_what_does_not_fit_on_its_disk_is_told_and_arrives_whole_the_next_time(small: Machine, leave: int) -> None:
    image = Image(files={"data": os.urandom(60_000)}, run=["cat data | wc -c > ~/size #" + "x" * 9000])
    small.fill_disk(leave=leave)
    with pytest.raises(BootstrapError, match=r"the disk is full") as caught:
        pool(small, image).start()
    assert caught.value.step == "arrival"
    small.free_disk()
    with pool(small, image):
        assert small.path("/root/size").read_text() == "60000\n"


@pytest.mark.parametrize("end", ["exit 3", "true"])
def test_a_step_that_fills_the_disk_is_told(small: Machine, end: str) -> None:
    image = Image(run=[f"head -c 2000000000 /dev/zero > /big; echo over; {end}", "touch /never"])
    said = made(small, image)
    assert "@advice the disk is full: ask for a larger one, or install less\n" in said
    assert re.search(r"@fail run-[12] [1-9]", said)
    assert not small.path("/never").exists()


def test_no_half_of_a_step_is_run(small: Machine) -> None:
    image = Image(run=["head -c 2000000000 /dev/zero > /big & wait; sleep 1", "touch /never\n#" + "x" * 20_000])
    said = made(small, image)
    assert "@done run-1\n" in said
    assert "@fail run-2 1 write /root/.skypool/boot/run-2.task\n" in said
    assert "@advice the disk is full" in said
    assert not small.path("/never").exists()


def made(machine: Machine, image: Image) -> str:
    """What the image's script says on a machine."""
    script = f"export SKYPOOL_PYTHON=/usr/bin/python3\n{image.script()}"
    return machine.run("sh 2>&1", check=False, input=script, timeout=100).stdout
