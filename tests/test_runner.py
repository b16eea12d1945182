"""A runner: the process that owns a run on its own machine. A real agent starts it, after a real hand-over."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

import skypool as sky
from skypool.calls.options import Options
from skypool.errors import BudgetExceeded, ProtocolError
from skypool.head import messages, rows
from skypool.head.states import CancelRun, Claim, Commit, NotStored, Outcome, Said, StandsBy, Stored, ToAgent
from skypool.model import Instance
from skypool.pool.states import Stop
from skypool.processes import Process
from skypool.rental.budget import Budget
from skypool.rental.handover import Handover
from skypool.rental.records import Record
from skypool.rental.run_account import RunAccount
from skypool.rental.supply import Supply
from skypool.runs import stored
from skypool.runs.handing_over import HandingOver
from skypool.runs.needs import Needs
from skypool.runs.owned_machine import OwnedMachine
from skypool.runs.program_run import ProgramCall
from skypool.runs.runner import RunnerProcess
from skypool.runs.stored import RunStatus
from skypool.safety import private
from tests.conftest import children, eventually
from tests.handed_runs import runners_of
from tests.lab.machines import Lab

PROGRAM = "import sys; sys.path[:0] = sys.argv[1:]; from skypool.runs.runner import start; start()"
MOST_MIB = 150
WAITS = """import os, time
while not os.path.exists("go"):
    time.sleep(0.02)
"""


HOUR = 3600.0


class BehindAccount(RunAccount):
    """That of a client whose clock is an hour behind."""

    def __init__(self, supply: Supply, claim: Claim, seconds: float, heir: str = "") -> None:
        super().__init__(supply, claim, seconds, heir)
        self.ends -= HOUR

    @property
    def left(self) -> float:
        return self.ends + HOUR - time.time()


class ShortAccount(RunAccount):
    """That of a run whose lifetime ends soon."""

    def __init__(self, supply: Supply, claim: Claim, seconds: float, heir: str = "") -> None:
        super().__init__(supply, claim, 45.0, heir)


def keeper_of(instance: Instance) -> int:
    pid: int = json.loads(Path(instance.detail["folder"], "keeper.json").read_text())["pid"]
    return pid


class Machine:
    """A node on this machine, with a project.

    Attributes:
        folder: the folder of its run.
    """

    def __init__(self, place: Path) -> None:
        self.claim = Claim(f"run-{secrets.token_hex(3)}")
        self.pool = sky.ComputePool("local", name=self.claim.run, lease=60.0, slots=1, console="off").start()
        self.project = place / "projects" / "given"
        self.project.mkdir(parents=True)
        self.folder = Path()
        self.heir = secrets.token_hex(8)

    def needs(self, script: str, retries: int = 0, procs: int | None = None) -> Needs:
        (self.project / "train.py").write_text(script)
        words, places = (sys.executable, "train.py"), {0: (str(self.project), "")}
        call = ProgramCall(words, places, ".", {"WORD": "hidden"}, "", procs, "")
        return Needs.of(self.claim, self.pool._handed_over(), call, retries, saved="")

    def needs_of(self, script: str, record: Record) -> Needs:
        """Needs as of a client whose ledger has this record of the pool."""
        handover = replace(self.pool._handed_over(), record=record)
        return Needs.of(self.claim, handover, self.needs(script).call, 0, saved="")

    def hand_over(self, needs: Needs) -> OwnedMachine:
        """Hand the run over. The connection stays, as of a client that watches."""
        said, why, owned = self.try_to_hand_over(needs)
        assert said is Said.DETACHED, why
        return owned

    def try_to_hand_over(self, needs: Needs, account: type[RunAccount] = RunAccount) -> tuple[Said, str, OwnedMachine]:
        self.folder = Path(needs.folder)
        supply = self.pool._sender.working().supply
        assert supply is not None
        made = account(supply, self.claim, 600.0, messages.heir_digest(self.heir))
        owned = OwnedMachine(self.pool, needs, made)
        handing = HandingOver(self.claim, made.left, self.heir, owned)
        owned.follow(handing.hear)
        return handing.run(), handing.why, owned

    @property
    def runners(self) -> list[int]:
        return runners_of(self.claim.run)

    def begins(self) -> None:
        """Wait until the program runs."""
        eventually((self.folder / stored.OUTPUT / "1" / "0" / "end").exists, 60, "the start of the program")

    def ends(self) -> RunStatus:
        eventually(lambda: stored.stored(self.folder) is not None, 60, "the end of the run")
        found = stored.stored(self.folder)
        assert found is not None
        return found

    def printed(self, attempt: int = 1) -> bytes:
        return (self.folder / stored.OUTPUT / str(attempt) / "0" / "0").read_bytes()

    def replace_runner(self) -> None:
        """Kill the runner, and wait for the next one."""
        [first] = self.runners
        os.kill(first, signal.SIGKILL)
        eventually(lambda: self.runners not in ([], [first]), 60, "the next runner")

    def end(self) -> None:
        self.pool.stop()
        driver = sky.Local()
        driver.terminate(driver.instances(pool=self.claim.run))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.end()


def test_it_runs_the_program_and_keeps_secrets_in_memory_which_it_takes_little_of(machine: Machine) -> None:
    script = f"{WAITS}print(os.environ['WORD']); open('ran', 'a').write('1'); raise SystemExit(3)"
    machine.hand_over(machine.needs(script)).give_up()
    machine.begins()
    [runner] = machine.runners
    about = Path("/proc", str(runner))
    assert b"hidden" not in (about / "environ").read_bytes() + (about / "cmdline").read_bytes()
    most = next(each for each in (about / "status").read_text().splitlines() if each.startswith("VmHWM:"))
    assert int(most.split()[1]) < MOST_MIB * 1024
    files = [each for each in machine.folder.rglob("*") if each.is_file() and stored.OUTPUT not in each.parts]
    assert len(files) > 2
    assert not [each for each in files if b"hidden" in each.read_bytes()], "a secret is on the disk"
    (machine.project / "go").touch()
    status = machine.ends()
    assert (status.claim, status.outcome, status.returncode, status.attempts) == (machine.claim, Outcome.ENDED, 3, 1)
    assert status.usd == 0.0
    assert b"hidden" in machine.printed()
    assert (machine.project / "ran").read_text() == "1"
    eventually(lambda: not machine.runners, 60, "the end of the runner")


def test_a_lost_program_is_started_again_as_another_attempt(machine: Machine) -> None:
    script = "import os, time\nif not os.path.exists('once'):\n    open('once', 'w')\n    os.kill(os.getppid(), 9)\n"
    machine.hand_over(machine.needs(f"{script}    time.sleep(60)\n", retries=1)).give_up()
    status = machine.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.ENDED, 0, 2)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_user_cancels_the_program_also_if_another_runner_has_started_it(is_restarted: bool, machine: Machine) -> None:
    script = "import time\nopen('began', 'w').close()\ntry:\n    time.sleep(60)\nfinally:\n    print('interrupted')\n"
    owned = machine.hand_over(machine.needs(script))
    eventually((machine.project / "began").exists, 60, "the start of the program")
    if is_restarted:
        machine.replace_runner()
    owned.send(CancelRun(machine.claim))
    status = machine.ends()
    assert (status.outcome, status.returncode) == (Outcome.CANCELLED, 130)
    assert b"interrupted" in machine.printed()


@pytest.mark.slow
def test_a_program_that_is_lost_at_its_limit_is_not_started_again_and_the_next_runner_knows_why(
    machine: Machine,
) -> None:
    script = """import os, time
try:
    time.sleep(600)
finally:
    open("stopping", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    os.kill(os.getppid(), 9)
"""
    said, why, owned = machine.try_to_hand_over(machine.needs(script, retries=1), ShortAccount)
    assert said is Said.DETACHED, why
    owned.give_up()
    eventually((machine.project / "stopping").exists, 60, "the stop of the program")
    machine.replace_runner()
    (machine.project / "go").touch()
    status = machine.ends()
    assert (status.outcome, status.attempts, status.limit) == (Outcome.CANCELLED, 1, "lifetime")


@pytest.mark.parametrize("row", [None, "its own", "another"])
def test_an_agent_that_dies_at_the_commit_leaves_a_row_that_tells_whether_there_was_one(
    row: str | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of another hand-over is none, as that of an earlier run of that name on a machine of the user's own."""
    send = OwnedMachine.send
    is_committed = row == "its own"

    def kill_then(owned: OwnedMachine, message: ToAgent) -> None:
        """The agent dies in place of taking the commit, or when it has written the row and before it can say so."""
        if isinstance(message, Commit):
            [keeper] = [keeper_of(each) for each in sky.Local().instances(pool=machine.claim.run)]
            [agent] = children(keeper)
            if row is not None:
                heir = messages.heir_digest(machine.heir if is_committed else row)
                rows.write(str(private.folder(machine.folder)), rows.WrittenRow(machine.claim, 1e10, heir, time.time()))
            os.kill(agent, signal.SIGKILL)
        send(owned, message)

    monkeypatch.setattr(OwnedMachine, "send", kill_then)
    said, _, owned = machine.try_to_hand_over(machine.needs(""))
    if is_committed:
        assert said is Said.INTERRUPTED
        owned.give_up()
    else:
        assert said is Said.NOT_STARTED
    assert not machine.runners


def test_a_client_whose_pool_ends_while_it_prepares_says_why_and_ends_the_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_then(owned: OwnedMachine, message: ToAgent) -> None:
        """The message is lost, as the pool ends first: `skypool down` elsewhere, or the budget is spent."""
        life = machine.pool._sender.working().life
        life.soon(life.apply, Stop(BudgetExceeded("the budget is spent")))

    monkeypatch.setattr(OwnedMachine, "send", end_then)
    monkeypatch.setattr("skypool.runs.handing_over._PATIENCE", 0.1)
    said, why, _ = machine.try_to_hand_over(machine.needs(""))
    assert (said, why) == (Said.NOT_STARTED, "the budget is spent")
    assert not sky.Local().instances(pool=machine.claim.run)


def test_a_gang_on_the_node_runs_and_its_first_failure_is_the_status(machine: Machine) -> None:
    machine.hand_over(machine.needs("import os; raise SystemExit(4 * int(os.environ['RANK']))", procs=2)).give_up()
    status = machine.ends()
    assert (status.outcome, status.attempts) == (Outcome.ENDED, 1)
    assert status.returncode in (4, 130)  # the first rank is stopped if it was slower


def test_a_clock_of_the_machine_that_is_an_hour_ahead_neither_stops_the_program_nor_changes_what_it_costs(
    machine: Machine,
) -> None:
    record = machine.pool._handed_over().record
    [line] = record.lines
    now = time.time() - HOUR
    line = replace(line, launched=now, billed_from=now, until=now, usd_per_hour=360.0)
    record = replace(record, lines=(line,), lifetime=600.0, budget=Budget(60.0))
    needs = machine.needs_of("import time; time.sleep(3)", record)
    said, why, owned = machine.try_to_hand_over(needs, BehindAccount)
    assert said is Said.DETACHED, why
    owned.give_up()
    status = machine.ends()
    assert (status.outcome, status.returncode, status.limit) == (Outcome.ENDED, 0, "")
    assert now < status.ended < time.time() - HOUR + 1
    assert status.usd is not None
    assert 0.3 <= status.usd <= 0.1 * (time.time() - HOUR + 1 - now)


def test_a_gang_that_is_cancelled_before_its_calls_were_sent_is_over(machine: Machine) -> None:
    busy = sky.compute(time.sleep)(600.0) > machine.pool  # so the gang waits for the node
    owned = machine.hand_over(machine.needs("open('ran', 'w').close()", procs=2))
    eventually((machine.folder / stored.OUTPUT / "1").exists, 60, "the start of the gang")
    time.sleep(1.0)  # it is submitted
    owned.send(CancelRun(machine.claim))
    status = machine.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.CANCELLED, None, 1)
    assert not (machine.project / "ran").exists()
    assert not busy.done()


def test_a_program_that_cannot_be_started_says_why(machine: Machine) -> None:
    needs = machine.needs("")
    (machine.project / "train.py").unlink()
    object.__setattr__(needs.call, "words", ("no-such-program",))
    machine.hand_over(needs).give_up()
    status = machine.ends()
    assert (status.outcome, status.returncode) == (Outcome.ENDED, 127)
    assert "no-such-program" in status.why


def test_a_runner_without_an_agent_ends(machine: Machine) -> None:
    needs = machine.needs("")
    [archive] = Path(needs.handover.nodes[0].access.folder).glob("skypool-*.zip")
    argv = [sys.executable, "-I", "-S", "-c", PROGRAM, str(archive)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(messages.packed_needs(needs.packed()))
        process.stdin.flush()
        assert messages.from_runner(process.stdout.readline()) == StandsBy()
        first = messages.from_runner(process.stdout.readline())
        assert isinstance(first, messages.Alive)
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunnerProcess, BinaryIO]]:
    """A runner in this process, without a machine, and what it writes for the agent."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    record = Record("given", "1", Process.this(), 0.0, 0.0, 60.0, None, None, None, "", (), (), ())
    call = ProgramCall(("true",), {0: (str(tmp_path), "")}, ".", {}, "", None, "")
    needs = Needs(Claim("given"), Handover(record, ()), call, 0, str(tmp_path / "run"), "", b"")
    reads, writes = os.pipe()
    with open(reads, "rb", buffering=0) as said:
        yield RunnerProcess(needs, writes), said
    os.close(writes)


def test_a_runner_of_which_a_work_is_stuck_does_not_move(
    alone: tuple[RunnerProcess, BinaryIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, said = alone

    def moves() -> int:
        runner._alive_at = 0.0
        runner._tell_alive()
        alive = messages.from_runner(said.readline())
        assert isinstance(alive, messages.Alive)
        return alive.moves

    def wait() -> None:
        stuck.wait()

    monkeypatch.setattr("skypool.runs.runner._STUCK", 0.05)
    threading.Thread(target=runner._work, daemon=True).start()
    stuck, is_over = threading.Event(), threading.Event()
    assert moves() < moves()
    runner._works.put(wait)
    runner._works.put(is_over.set)
    time.sleep(0.1)
    assert moves() == moves()
    stuck.set()
    is_over.wait()
    eventually(lambda: moves() < moves(), 10, "the end of the work")


def test_each_call_of_an_attempt_names_it_to_the_agent_also_those_of_ranks() -> None:
    options = Options(output="silent").of_attempt(2).but({"procs": 2})
    assert '"attempt":2' in options.header
    assert '"attempt":2' in options.but({"retries": 0, "node": None}).header
    assert "attempt" not in Options(output="silent").but({"procs": 2}).header


def test_what_is_stored_first_stays(tmp_path: Path) -> None:
    run = Claim("given")
    first = RunStatus(run, Outcome.ENDED, 0, 1, 100.0)
    assert stored.store(tmp_path / "run", first) == first
    assert stored.store(tmp_path / "run", RunStatus(run, Outcome.FAILED, None, 2, 200.0)) == first
    assert [each.name for each in (tmp_path / "run").iterdir()] == [stored.STATUS]


def test_a_status_is_stored_on_a_disk_that_the_run_has_filled(lab: Lab, tmp_path: Path) -> None:
    """`lab` stands for root, who may mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "skypool-test", str(disk)], check=True)
    try:
        stored.reserve(disk / "run")
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 512)
        with pytest.raises(OSError, match="No space"):
            (disk / "other").write_bytes(b"x" * 1000)
        status = RunStatus(Claim("given"), Outcome.ENDED, 3, 1, 100.0)
        assert stored.store(disk / "run", status) == status
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("fails", [2, 3])
def test_a_runner_tries_to_store_some_times_and_then_says_why_not(
    fails: int,
    alone: tuple[RunnerProcess, BinaryIO],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store, tries = stored.store, list[int]()

    def refuse(folder: Path, status: RunStatus) -> RunStatus:
        tries.append(len(tries))
        if len(tries) <= fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return store(folder, status)

    monkeypatch.setattr(stored, "store", refuse)
    monkeypatch.setattr("skypool.runs.runner._TO_STORE", (0.0, 0.01, 0.01))
    found = alone[0]._stored(RunStatus(Claim("given"), Outcome.ENDED, 3, 1, 100.0))
    why = (
        "the exit status of its program is 3; how it has ended could not be stored: [Errno 28] No space left on device"
    )
    assert found == (NotStored(Outcome.ENDED, why) if fails == 3 else Stored(Outcome.ENDED))
    assert tries == [0, 1, 2]
    assert why in capfd.readouterr().err


def test_needs_hold_no_secret_in_their_text_and_nothing_else_is_taken_for_them(machine: Machine) -> None:
    needs = machine.needs("")
    assert "hidden" not in repr(needs)
    assert Needs.unpacked(needs.packed()) == needs
    for each in (b"", b"no", messages.line(StandsBy())):
        with pytest.raises(ProtocolError):
            Needs.unpacked(each)
