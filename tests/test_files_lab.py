"""Files go to machines that are reached by ssh, and come back, though connections, machines and disks fail."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.errors import TransferError
from skypool.files.entries import PARTS
from skypool.files.progress import Progress
from tests.conftest import eventually
from tests.lab.machines import Lab, Machine
from tests.test_files import is_an_end, tree

pytestmark = pytest.mark.slow
PROGRAM = [sys.executable, "-m", "skypool"]


@pytest.fixture
def pool(lab: Lab, two: list[Machine]) -> Iterator[sky.ComputePool]:
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in two]
    provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    with sky.ComputePool(provider, nodes=2, name="files", slots=1, liveness=60, console="off") as made:
        yield made


def parts(machine: Machine) -> list[Path]:
    """What has come only partly."""
    return [*(work(machine) / "there").glob(f"{PARTS}*/*")]


def work(machine: Machine) -> Path:
    """The folder of a machine in which calls run."""
    return machine.path("/root/.skypool/work")


def project(root: Path, large: int = 0) -> Path:
    chance = random.Random(3)
    for number in range(200):
        file = root / f"part {number % 7}" / f"ü{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(chance.randbytes(number * 31))
        os.utime(file, ns=(1, 1_700_000_000_000_000_001 + number))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "link").symlink_to("part 0/ü0")
    (root / "empty").mkdir()
    if large:
        with (root / "large").open("wb") as written:
            for _ in range(large >> 20):
                written.write(chance.randbytes(1 << 20))
    return root


def in_the_middle(move: Callable[[Callable[[Progress], None]], Any], does: Callable[[], None], after: int) -> list[Any]:
    """Push or pull, and do something once so many bytes have gone. Returns what was returned, or its error."""
    begun = threading.Event()
    said: list[Any] = []

    def see(progress: Progress) -> None:
        if progress.bytes >= after:
            begun.set()

    def work() -> None:
        try:
            said.append(move(see))
        except (sky.SkypoolError, OSError) as e:
            said.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(60)
    does()
    thread.join(120)
    assert not thread.is_alive()
    return said


def test_a_folder_goes_to_all_machines_and_comes_back(
    pool: sky.ComputePool, two: list[Machine], tmp_path: Path
) -> None:
    source = project(tmp_path / "source")
    done = pool.push(source, "there")
    assert done.files == 2 * 201
    for each in two:
        assert tree(work(each) / "there") == tree(source)
    assert pool.push(source, "there").files == 0
    (source / "part 3" / "ü3").write_text("changed")
    (source / "run.sh").unlink()
    done = pool.push(source, "there", delete=True)
    assert (done.files, done.deleted) == (2, 2)
    for each in two:
        assert tree(work(each) / "there") == tree(source)
    (work(two[0]) / "there" / "closed").mkdir(mode=0o000)
    back = tmp_path / "back"
    pool.pull("there", back, node=0)
    assert {path: about for path, about in tree(back).items() if path != "closed"} == tree(source)
    with pytest.raises(TransferError, match=r"/no/such: No such file or directory"):
        pool.pull("/no/such", back)
    assert not parts(two[0])


def test_over_a_slow_line_go_few_bytes_more_than_what_changed(
    pool: sky.ComputePool, lab: Lab, two: list[Machine], tmp_path: Path
) -> None:
    source = project(tmp_path / "source", 40 << 20)
    pool.push(source, "there")
    changed = source / "changed"
    device = lab.network.device(two[0].number)

    def sent() -> int:
        """Bytes that went to the machine, without the headers of Ethernet, IP and TCP."""
        counts = Path("/sys/class/net", device, "statistics")
        return int((counts / "tx_bytes").read_text()) - (14 + 20 + 32) * int((counts / "tx_packets").read_text())

    limit = f"tc qdisc add dev {device} root tbf rate 16mbit burst 32kbit latency 400ms"
    if (said := subprocess.run(limit.split(), capture_output=True, text=True)).returncode:
        pytest.skip(f"this kernel makes no slow line: {said.stderr.strip()}")
    changed.write_bytes(random.Random(4).randbytes(10 << 20))
    before = sent()
    began = time.monotonic()
    assert pool.push(source, "there", node=0).files == 1
    took, went = time.monotonic() - began, sent() - before
    assert took > 4, "the line is slow"
    assert went <= 1.05 * changed.stat().st_size


def test_another_terminal_sends_and_fetches(pool: sky.ComputePool, two: list[Machine], tmp_path: Path) -> None:
    source = project(tmp_path / "source")
    sent = subprocess.run([*PROGRAM, "push", "files", str(source), "there"], capture_output=True, text=True)
    assert (sent.returncode, sent.stderr) == (0, ""), sent
    assert sent.stdout.startswith("402 files, 1.2 MB in ")
    back = tmp_path / "back"
    fetched = subprocess.run([*PROGRAM, "pull", "files", "there", str(back), "-n", "1"], capture_output=True, text=True)
    assert fetched.returncode == 0, fetched
    assert tree(back) == tree(source)
    nothing = subprocess.run([*PROGRAM, "pull", "files", "nothing", str(back)], capture_output=True, text=True)
    assert (nothing.returncode, nothing.stderr) == (2, "error: node 0: nothing: No such file or directory\n")


def restart_sshd(machine: Machine) -> None:
    machine.kill_sshd()
    machine.start_sshd()


def cut_for_a_while(machine: Machine) -> None:
    machine.cut()
    threading.Event().wait(3)
    machine.mend()


def frozen_for_a_while(machine: Machine) -> None:
    with machine.frozen():
        threading.Event().wait(3)


@pytest.mark.parametrize("trouble", [restart_sshd, cut_for_a_while, frozen_for_a_while])
def test_a_transfer_goes_on_after(
    trouble: Callable[[Machine], None], pool: sky.ComputePool, two: list[Machine], tmp_path: Path
) -> None:
    source = project(tmp_path / "source", 200 << 20)
    target = work(two[0]) / "there"

    def does() -> None:
        assert not (target / "large").exists()
        trouble(two[0])

    (done,) = in_the_middle(lambda see: pool.push(source, "there", progress=see), does, 60 << 20)
    assert not isinstance(done, Exception), done
    for each in two:
        assert tree(work(each) / "there") == tree(source)
        assert not parts(each)
    if trouble is restart_sshd:
        assert done.bytes < 200 << 20 << 1, "it goes on where it stopped"


def test_a_full_disk_is_told_and_leaves_no_half_of_a_file(
    pool: sky.ComputePool, two: list[Machine], tmp_path: Path
) -> None:
    source = project(tmp_path / "source", 100 << 20)
    (said,) = in_the_middle(
        lambda see: pool.push(source, "there", progress=see), lambda: two[1].fill_disk(leave=1 << 20), 10 << 20
    )
    assert isinstance(said, TransferError)
    assert said.node == 1
    assert "No space left on device" in str(said)
    assert tree(work(two[0]) / "there") == tree(source)
    assert not (work(two[1]) / "there" / "large").exists()
    with pytest.raises(TransferError, match=r"the files need at least \d+ bytes, and \d+ are free"):
        pool.push(source, "there")
    two[1].free_disk()
    assert pool.push(source, "there").files >= 1
    assert tree(work(two[1]) / "there") == tree(source)


@pytest.fixture
def small(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """A disk of 160 MB of the client; `lab` stands for root."""
    (folder := tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "skypool-test", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_of_the_client_is_told_and_leaves_no_half_of_a_file(
    pool: sky.ComputePool, two: list[Machine], small: Path
) -> None:
    source = project(work(two[0]) / "there", 100 << 20)
    back, filler = small / "back", small / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    (said,) = in_the_middle(lambda see: pool.pull("there", back, node=0, progress=see), fill, 10 << 20)
    assert isinstance(said, (TransferError, OSError))
    assert "No space left on device" in str(said)
    assert not (back / "large").exists()
    with pytest.raises((TransferError, OSError), match=r"the files need at least \d+ bytes, and \d+ are free"):
        pool.pull("there", back, node=0)
    filler.unlink()
    pool.pull("there", back, node=0)
    assert {path: about for path, about in tree(back).items() if not path.startswith(PARTS)} == tree(source)


def test_a_client_that_is_killed_leaves_nothing_that_runs(
    pool: sky.ComputePool, two: list[Machine], tmp_path: Path
) -> None:
    source = project(tmp_path / "source", 300 << 20)

    def transfers() -> list[int]:
        return [pid for machine in two for pid in machine.processes() if is_an_end(pid)]

    with subprocess.Popen([*PROGRAM, "push", "files", str(source), "there"], start_new_session=True) as client:
        eventually(lambda: parts(two[0]), 60)
        assert len(transfers()) == 2
        client.kill()
    eventually(lambda: not transfers(), 90)
    assert not (work(two[0]) / "there" / "large").exists()
    pool.push(source, "there")
    for each in two:
        assert tree(work(each) / "there") == tree(source)
