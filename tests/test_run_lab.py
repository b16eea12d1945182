"""Programs run with their project on machines that are reached by ssh, also across lost connections."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import skypool as sky
from skypool.runs.program_run import ProgramRun
from skypool.runs.target import Target
from tests.conftest import eventually
from tests.lab.machines import Lab, Machine
from tests.soak.endings import WAYS, agent_with, once

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("way", ["status 3", "Ctrl-C", "a closed terminal"])
def test_a_run_on_a_host_that_the_command_line_names_ends_as_elsewhere(
    way: str, lab: Lab, two: list[Machine], tmp_path: Path
) -> None:
    with agent_with(lab.client_key):
        assert once(WAYS[way], tmp_path / "run", two[0]) == ""


def test_a_program_runs_on_machines_of_ssh_and_its_output_outlives_a_lost_connection(
    lab: Lab, two: list[Machine], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CLIENT", "1")
    (project / ".env").write_text("TOKEN=1")
    (project / "train.py").write_text(
        "import os, time\n"
        "print(os.environ.get('OF_THE_CLIENT'), os.environ['A'], sorted(os.listdir('.')), flush=True)\n"
        "for n in range(200):\n    print(os.environ['RANK'], n, flush=True)\n    time.sleep(0.05)\n"
        "os.makedirs('out')\nopen(f\"out/{os.environ['RANK']}\", 'w').write('saved')\n"
    )
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in two]
    provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    printed: dict[int, bytes] = {0: b"", 1: b""}
    lock = threading.Lock()

    def write(rank: int, stream: int, data: bytes) -> None:
        assert stream == 1, data
        with lock:
            printed[rank] += data

    def cut() -> None:
        eventually(lambda: b"0 20\n" in printed[0], 60, "the first lines")
        two[0].kill_sshd()
        two[0].start_sshd()

    with sky.ComputePool(provider, nodes=2, name="run", slots=1, liveness=60, console="off") as pool:
        missing: list[str] = []
        target = Target.of(["train.py"])
        with ProgramRun(pool, target, 2, write, missing.append, list, env={"A": "b c"}, saved="out") as run:
            run.send()
            programs = run.prepare()
            cutter = threading.Thread(target=cut)
            cutter.start()
            assert run.run(programs) == 0
            cutter.join()
            assert run.fetch(project / "out", settled=False) == 2
        assert missing == []
    assert not [*two[0].path("/root/.skypool").rglob("output/*")]
    for rank in range(2):
        lines = b"".join(b"%d %d\n" % (rank, n) for n in range(200))
        assert printed[rank] == b"None b c ['train.py']\n" + lines
    assert sorted(
        str(each.relative_to(project / "out")) for each in (project / "out").rglob("*") if each.is_file()
    ) == [
        "0",
        "node-1/1",
    ]
