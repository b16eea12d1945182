"""A Dask cluster on machines of the lab over SSH, and on spot machines of the lab's AWS.

The machines see a virtual environment of this computer with Dask (requirements/dask.txt), which the client uses, too.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.lab.aws import AWS
from tests.lab.machines import Lab, Machine
from tests.soak import dask

ZONES = ("us-east-1a", "us-east-1b")
OWN = {
    # These read files that the client wrote, or count the graphs of a scheduler that nobody has used before.
    "dask/tests/test_distributed.py": "not blockwise_dataframe_io and not default_scheduler_on_worker",
    # These compare the identity of objects, which no other process has, or start a cluster of their own.
    "dask/tests/test_delayed.py": "not traverse_false and not callable_obj and not p2p_as_delayed",
    "dask/bag/tests/test_bag.py": "fold or frequencies or topk or map",
}
"""Files of tests in the wheel of dask, with an expression for `pytest -k`."""
pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def machines(lab: Lab) -> Iterator[list[Machine]]:
    venv = dask.environment()
    made = [dask.machine(lab, venv) for _ in range(dask.MACHINES)]
    yield made
    for each in made:
        each.destroy()


def shown(home: Path, script: str, lab: Lab, machines: Sequence[Machine], **more: Any) -> dict[str, Any]:
    """Run a program with Dask on machines, and return what it shows."""
    python = str(dask.environment() / "bin" / "python")
    hosts = [(each.address, each.host_key) for each in machines]
    settings = {"machines": hosts, "identity": str(lab.client_key), "python": python, **more}
    return finished(home, script, json.dumps(settings))


def finished(home: Path, script: str, *words: str) -> dict[str, Any]:
    """Run a program with Dask, and return what it shows."""
    python = str(dask.environment() / "bin" / "python")
    (home / "tmp").mkdir()
    env = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PATH": "/usr/bin:/bin"}
    argv = [python, "-W", "ignore", str(dask.ENGINES / "scripts" / script), *words]
    done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["shown"]
    return found


def test_workers_and_machines_come_back_and_nothing_is_left(lab: Lab, machines: list[Machine]) -> None:
    """One run of `python -m tests.soak.dask`, with one of each of its steps."""
    done = dask.run(0, random.Random(1), lab, machines)
    print(done.seconds, done.steps, done.said)
    assert done.troubles == []
    assert done.steps.keys() == {*dask.STEPS, dask.LAST, "end"}


def test_a_machine_with_another_version_of_dask_is_refused(lab: Lab, machines: list[Machine], tmp_path: Path) -> None:
    (folder,) = dask.environment().glob("lib/python*/site-packages/distributed-*.dist-info")
    shutil.copytree(folder, changed := tmp_path / "changed")
    text = (changed / "METADATA").read_text()
    (changed / "METADATA").write_text(re.sub("^Version: .*$", "Version: 2020.1.0", text, flags=re.MULTILINE))
    other = dask.machine(lab, dask.environment(), {folder: changed})
    said = shown(tmp_path, "dask_refused.py", lab, [machines[0], other])
    other.destroy()
    assert "of pool 'versions' has distributed 2020.1.0, but this process has" in said["refused"]
    assert said["services"] == []


def test_programs_of_dask_run_unchanged_inside_a_cluster(lab: Lab, machines: list[Machine], tmp_path: Path) -> None:
    said = shown(tmp_path, "dask_own_tests.py", lab, machines[:2], files=OWN)
    for file in OWN:
        done = said[file]
        print(file, done["outcomes"], done["transitions"])
        assert done["failed"] == []
        assert done["status"] == 0
        assert done["transitions"] > 5 * done["outcomes"]["passed"]  # the cluster has computed


@pytest.mark.usefixtures("own_state")
def test_spot_machines_of_two_zones_on_aws_compute_right_when_one_is_taken_back(aws: AWS, tmp_path: Path) -> None:
    aws.capacity(0)
    for zone in ZONES:
        aws.capacity(1, "*", zone, "spot")
    zones: set[str] = set()
    python, script = dask.environment() / "bin" / "python", dask.ENGINES / "scripts" / "dask_aws.py"
    argv = [str(python), "-W", "ignore", str(script), str(metadata.distribution("boto3").locate_file(""))]
    with subprocess.Popen(
        argv, cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(tmp_path / "stderr").open("w"),
    ) as program:  # fmt: skip
        timer = threading.Timer(280, program.kill)
        timer.start()
        assert program.stdin is not None
        assert program.stdout is not None
        said: dict[str, Any] = {}
        for line in program.stdout:
            if "@{" in line:
                asked = json.loads(line[line.index("@{") + 1 :])
                zones = {each.zone for each in aws.rentals}
                (taken,) = [each for each in aws.rentals if each.machine and each.machine.address == asked["address"]]
                aws.capacity(1, "*", "us-east-1c", "spot")
                aws.interrupt(taken.id, notice=30.0)
                program.stdin.write("done\n")
                program.stdin.flush()
            elif line.startswith("{"):
                said = json.loads(line)["shown"]
        timer.cancel()
    assert program.wait() == 0, (tmp_path / "stderr").read_text()[-6000:]
    assert zones == set(ZONES)
    assert said["kept"]
    assert (said["sum"], said["after"]) == (sum(n * n for n in range(400)), sum(n * n for n in range(100)))
    assert said["services"] == []
    assert sorted((place, ended) for place, ended, _ in said["receipt"]["lines"]) == [
        ("us-east-1a", True),
        ("us-east-1b", True),
        ("us-east-1c", True),
    ]
    assert said["receipt"]["usd"] == pytest.approx(sum(usd for _, _, usd in said["receipt"]["lines"]))
    assert said["receipt"]["usd"] > 0
    assert aws.left() == {}
