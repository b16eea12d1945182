"""A runner: the process that owns a run on its own machine, with a real agent. The test says what the agent would."""

from __future__ import annotations

import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.calls.options import Options
from skypool.errors import ProtocolError, TakenOver
from skypool.event_loop import Loop
from skypool.head import messages
from skypool.head.states import (
    Cancel,
    Claim,
    FromRunner,
    Go,
    Outcome,
    Program,
    ProgramOver,
    RunOver,
    StandsBy,
    ToRunner,
    Welcome,
)
from skypool.rental.handover import Handover
from skypool.runs import stored
from skypool.runs.needs import Needs
from skypool.runs.program_run import ProgramCall
from skypool.runs.stored import RunStatus
from tests.conftest import eventually

PROGRAM = "import sys; sys.path[:0] = sys.argv[1:]; from skypool.runs.runner import start; start()"
MOST_MIB = 150


class Node:
    """A node on this machine whose owner has given it up, and a project on it."""

    def __init__(self, place: Path, lease: float = 60.0) -> None:
        self.claim = Claim(f"given-{secrets.token_hex(3)}")
        pool = sky.ComputePool("local", nodes=1, name=self.claim.run, lease=lease, slots=1, console="off").start()
        self.handover: Handover = pool._handed_over()
        self.project = place / "projects" / "given"
        self.project.mkdir(parents=True)
        engine: Any = pool._engine
        Loop.shared().run(engine.takeover.hand_over(TakenOver("it was handed over")))
        pool.stop()

    def needs(self, script: str, retries: int = 0, procs: int | None = None) -> Needs:
        (self.project / "train.py").write_text(script)
        words, places = (sys.executable, "train.py"), {0: (str(self.project), "")}
        call = ProgramCall(words, places, ".", {"WORD": "hidden"}, "", procs, "")
        return Needs.of(self.claim, self.handover, call, retries, saved="")

    @property
    def archive(self) -> str:
        [found] = Path(self.handover.nodes[0].access.folder).glob("skypool-*.zip")
        return str(found)


class Started:
    """A runner as its agent sees it."""

    def __init__(self, node: Node, needs: Needs) -> None:
        self.folder = Path(needs.folder)
        argv = [sys.executable, "-I", "-S", "-c", PROGRAM, node.archive]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(messages.packed_needs(needs.packed()))
        self.process.stdin.flush()
        self.moves: list[int] = []
        self.said: queue.SimpleQueue[FromRunner] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for each in self.process.stdout:
            message = messages.from_runner(each)
            if isinstance(message, messages.Alive):
                self.moves.append(message.moves)
            else:
                self.said.put(message)

    def tell(self, message: ToRunner) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(messages.line(message))
        self.process.stdin.flush()

    def hears(self, message: FromRunner) -> None:
        assert self.said.get(timeout=60) == message

    def own(self, attempts: int = 0, program: Program = Program.NONE) -> None:
        self.hears(StandsBy())
        self.tell(Go("the heir"))
        self.tell(Welcome(attempts, program, is_cancelled=False))

    def until_over(self, attempt: int, ranks: int = 1) -> list[int | None]:
        """Wait until all processes of an attempt have ended. Return their statuses."""
        output = self.folder / stored.OUTPUT / str(attempt)
        eventually(lambda: None not in stored.statuses(output, range(ranks)), 60, "the end of the program")
        return stored.statuses(output, range(ranks))

    def printed(self, attempt: int = 1) -> bytes:
        return (self.folder / stored.OUTPUT / str(attempt) / "0" / "0").read_bytes()

    @property
    def status(self) -> RunStatus:
        found = stored.stored(self.folder)
        assert found is not None
        return found

    @property
    def most_mib(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(each.split()[1]) for each in lines if each.startswith("VmHWM:")) // 1024

    def ends(self) -> int:
        return self.process.wait(60)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    driver = sky.Local()
    driver.terminate(driver.instances(pool=node.claim.run))


@pytest.fixture
def started(node: Node) -> Iterator[Any]:
    made: list[Started] = []

    def start(*args: Any, **more: Any) -> Started:
        made.append(Started(node, node.needs(*args, **more)))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.wait()


def test_it_runs_the_program_once_and_stores_its_end_before_it_says_so(started: Any, node: Node) -> None:
    runner = started("import os; print(os.environ['WORD']); open('ran', 'a').write('1'); raise SystemExit(3)")
    runner.own()
    assert runner.until_over(1) == [3]
    assert runner.most_mib < MOST_MIB
    runner.tell(ProgramOver(1, Program.ENDED))
    runner.hears(RunOver(Outcome.ENDED))
    assert runner.ends() == 0
    status = runner.status
    assert (status.claim, status.outcome, status.returncode, status.attempts) == (node.claim, Outcome.ENDED, 3, 1)
    assert status.usd == 0.0
    assert b"hidden" in runner.printed()
    assert len([each for each in runner.folder.iterdir() if each.name.startswith(stored.STATUS)]) == 1
    assert runner.moves == sorted(runner.moves)
    assert runner.moves[-1] > 0


def test_the_node_lives_on_without_its_runner_and_the_next_one_waits_for_what_runs(started: Any, node: Node) -> None:
    script = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nopen('ran', 'a').write('1')\n"
    first = started(script)
    first.own()
    eventually((first.folder / stored.OUTPUT / "1" / "0" / "end").exists, 60, "the start of the program")
    first.process.kill()
    first.ends()
    second = started(script)
    second.own(attempts=1, program=Program.RUNNING)
    (node.project / "go").touch()
    assert second.until_over(1) == [0]
    second.tell(ProgramOver(1, Program.ENDED))
    second.hears(RunOver(Outcome.ENDED))
    assert (node.project / "ran").read_text() == "1"
    assert (second.status.returncode, second.status.attempts) == (0, 1)


def test_a_lost_program_is_started_again_as_another_attempt(started: Any) -> None:
    script = "import os, sys\nif not os.path.exists('once'):\n    open('once', 'w')\n    os.kill(os.getpid(), 9)\n"
    runner = started(script, retries=1)
    runner.own()
    assert runner.until_over(1) == [-9]
    runner.tell(ProgramOver(1, Program.LOST))
    assert runner.until_over(2) == [0]
    runner.tell(ProgramOver(2, Program.ENDED))
    runner.hears(RunOver(Outcome.ENDED))
    assert runner.status.attempts == 2


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_user_cancels_the_program(is_restarted: bool, started: Any) -> None:
    script = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('interrupted'); raise\n"
    runner = started(script)
    runner.own()
    eventually((runner.folder / stored.OUTPUT / "1" / "0" / "end").exists, 60, "the start of the program")
    time.sleep(0.5)  # it is in `sleep`
    if is_restarted:
        runner.process.kill()
        runner.ends()
        runner = started(script)
        runner.own(attempts=1, program=Program.RUNNING)
    runner.tell(Cancel())
    assert runner.until_over(1) == [-2]
    runner.tell(ProgramOver(1, Program.STOPPED))
    runner.hears(RunOver(Outcome.CANCELLED))
    assert (runner.status.outcome, runner.status.returncode) == (Outcome.CANCELLED, 130)
    assert b"interrupted" in runner.printed()


def test_a_gang_on_the_node_runs_and_its_first_failure_is_the_status(started: Any) -> None:
    runner = started("import os; raise SystemExit(4 * int(os.environ['RANK']))", procs=2)
    runner.own()
    statuses = runner.until_over(1, ranks=2)
    assert statuses[1] == 4
    runner.tell(ProgramOver(1, Program.ENDED))
    runner.hears(RunOver(Outcome.ENDED))
    assert runner.status.returncode == next(filter(None, statuses))


def test_each_call_of_an_attempt_names_it_to_the_agent_also_those_of_ranks() -> None:
    options = Options(output="silent").of_attempt(2).but({"procs": 2})
    assert '"attempt":2' in options.header
    assert '"attempt":2' in options.but({"retries": 0, "node": None}).header
    assert "attempt" not in Options(output="silent").but({"procs": 2}).header


def test_a_runner_without_an_agent_ends(started: Any) -> None:
    runner = started("")
    runner.hears(StandsBy())
    runner.process.stdin.close()
    assert runner.ends() == 0


def test_what_is_stored_first_stays(tmp_path: Path) -> None:
    run = Claim("given")
    first = RunStatus(run, Outcome.ENDED, 0, 1, 100.0)
    assert stored.store(tmp_path / "run", first) == first
    assert stored.store(tmp_path / "run", RunStatus(run, Outcome.FAILED, None, 2, 200.0)) == first
    assert [each.name for each in (tmp_path / "run").iterdir()] == [stored.STATUS]


def test_needs_hold_no_secret_in_their_text_and_nothing_else_is_taken_for_them(node: Node) -> None:
    needs = node.needs("")
    assert "hidden" not in repr(needs)
    assert Needs.unpacked(needs.packed()) == needs
    for each in (b"", b"no", messages.line(StandsBy())):
        with pytest.raises(ProtocolError):
            Needs.unpacked(each)
