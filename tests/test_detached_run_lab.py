"""A run that belongs to its machine, on a machine that is reached by ssh, while nobody reaches it."""

from __future__ import annotations

import base64
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import skypool as sky
from skypool.head import messages
from skypool.head.states import Claim, Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.rental.ledger import Ledger
from skypool.rental.records import RunRecord
from skypool.runs import stored
from skypool.runs.asking import ask_machines
from skypool.runs.run import _Printer
from skypool.runs.target import Target
from skypool.runs.whole_run import Asked, WholeRun
from tests.conftest import eventually
from tests.handed_runs import record_of
from tests.lab.machines import Lab, Machine
from tests.secret_search import in_memory
from tests.test_detached_run import skypool

pytestmark = [pytest.mark.lab, pytest.mark.slow]

PROGRAM = """import os, time
print("began", flush=True)
time.sleep(8)
open("ran", "a").write("1")
print("done " + os.environ["TOKEN"])
raise SystemExit(3)
"""


def run_of(name: str) -> RunRecord:
    run = record_of(name).run
    assert run is not None
    return run


def detach(
    lab: Lab, machine: Machine, project: Path, program: str, monkeypatch: pytest.MonkeyPatch, **env: str
) -> None:
    """Start a program on a machine of the lab, as the run with the name of its project, and leave it there."""
    project.mkdir()
    (project / "train.py").write_text(program)
    monkeypatch.chdir(project)
    host = sky.Host(machine.address, host_key=machine.host_key)
    ssh = sky.SSH(hosts=[host], user="root", identity=str(lab.client_key))
    asked = Asked({"provider": ssh}, env=env, name=project.name, max_lifetime=300.0, yes=True, detach=True)
    whole = WholeRun(Target.of(["train.py"]), asked, _Printer())
    whole.check()
    assert whole.run() == 0
    assert whole.is_detached


def test_a_run_ends_alone_on_a_machine_that_nobody_reaches_and_has_no_key_of_the_client(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = lab.machine(keys=[lab.public_key])
    machine.wait_for_ssh()
    before = set(machine.processes().values())
    name = f"alone-{secrets.token_hex(3)}"
    token, account = secrets.token_hex(16), secrets.token_hex(20)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", account)
    detach(lab, machine, tmp_path / name, PROGRAM, monkeypatch, TOKEN=token)
    known = Ledger.here()
    session = record_of(name).session
    assert ask_machines(known, [record_of(name)]) == {}
    seen = run_of(name).seen
    assert seen is not None
    text = b"".join(lab.client_key.read_bytes().splitlines()[1:-1])
    looked_for = {
        "the private key": base64.b64decode(text)[-120:-60],
        "its text": lab.client_key.read_bytes().splitlines()[2],
        "an account": account.encode(),
        "TOKEN": token.encode(),
    }
    found = {pid: in_memory(pid, looked_for) for pid in machine.processes()}
    assert {"TOKEN"} in found.values(), "the search finds what is there"
    assert set().union(*found.values()) == {"TOKEN"}
    machine.cut()
    told = ask_machines(known, [record_of(name)])
    assert told[session].startswith("its machine could not be asked: ")
    assert (run_of(name).entry, run_of(name).seen) == (Entry(State.DETACHED), seen)
    folder = machine.path(messages.folder_of("/root/.skypool", Claim(name)))
    eventually(lambda: stored.stored(folder) is not None, 90, "the end of the run")
    status = stored.stored(folder)
    assert status is not None
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.ENDED, 3, 1)
    assert f"done {token}".encode() in (folder / stored.OUTPUT / "1" / "0" / "0").read_bytes()
    eventually(lambda: set(machine.processes().values()) == before, 60, "the end of all processes")
    machine.mend()
    assert ask_machines(known, [record_of(name)]) == {}, "its host is still there, without a node"
    assert run_of(name).entry == Entry(State.DETACHED, Outcome.ENDED)
    [copy] = machine.path("/root/.cache/skypool/runs/projects").glob(f"{name}-*")
    assert (copy / "ran").read_text() == "1"
    key = lab.client_key.read_bytes().splitlines()[2]
    shutil.rmtree(folder / stored.OUTPUT)  # what the program printed is its own affair
    for each in machine.path("/root").rglob("*"):
        if each.is_file() and not each.is_symlink():
            data = each.read_bytes()
            assert key not in data, each
            assert token.encode() not in data, each
            assert account.encode() not in data, each
    machine.destroy()


LINES = """import os, time
print("began", flush=True)
for number in range(150):
    print("line", number, flush=True)
    time.sleep(0.2)
raise SystemExit(3)
"""


def test_who_looks_in_gets_all_output_once_and_the_end_although_its_network_was_lost(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = lab.machine(keys=[lab.public_key])
    machine.wait_for_ssh()
    name = f"cut-{secrets.token_hex(3)}"
    detach(lab, machine, tmp_path / name, LINES, monkeypatch)
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        logs = subprocess.Popen(skypool("logs", "-f", name), stdout=file, stderr=subprocess.PIPE, text=True)
    waits = subprocess.Popen(skypool("wait", name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    eventually(lambda: printed.read_text().startswith("began\n"), 60, "the first line")
    machine.cut()
    time.sleep(45)
    machine.mend()
    _, notes = logs.communicate(timeout=120)
    assert printed.read_text().splitlines() == ["began", *(f"line {number}" for number in range(150))]
    assert "the machine cannot be reached now, and is tried again" in notes
    ended, _ = waits.communicate(timeout=60)
    assert (waits.returncode, f"run {name} ended with status 3" in ended) == (3, True)
    done = subprocess.run(skypool("logs", name), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == printed.read_text(), "the node has ended, and its host is still there"
    machine.destroy()
