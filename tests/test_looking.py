"""Looking in at a run that belongs to its machine: `skypool logs`, `wait`, `cancel` and `pull`, without its client."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from skypool import cli
from skypool.agent.processes import descendants
from skypool.buckets.bucket import Bucket
from skypool.cli.output import utc
from skypool.data import left_uploads
from skypool.errors import ConnectionLost, ProtocolError, SkypoolError
from skypool.head import messages
from skypool.head.states import Ask, CancelRun, Claim, Entry, Outcome, Stage
from skypool.head.states import Ledger as State
from skypool.model import Access, Instance
from skypool.rental.ledger import Ledger
from skypool.rental.records import RunEnd
from skypool.rental.run_state import status_of, told
from skypool.runs import cancelling, looking, stored
from skypool.runs.cancelling import tell
from skypool.runs.looking import Idle, Missing, Printed, RunLook, Seen, await_end
from skypool.runs.output_files import OutputFiles
from skypool.runs.run import _Printer
from skypool.runs.stored import About, RunStatus
from skypool.runs.target import Target
from skypool.runs.whole_run import Asked, WholeRun
from skypool.testing import FakeCloud, Stock
from skypool.wire.transport import CommandStream, Subprocess
from tests.conftest import eventually
from tests.handed_runs import HEIR, SEAL, cloud_at, handed, passed, record_of, write_row
from tests.test_detached_run import WAITS, Project, project, skypool
from tests.test_hand_over import Head, started

__all__ = ["project", "started"]  # fixtures
CLAIM = Claim("train")


class Reached(FakeCloud):
    """A cloud whose machines are mere records, but are reached: commands run on this computer."""

    def access(self, instance: Instance) -> Access:
        agent = str(Path(str(self.state)).with_name("agent"))
        return Access(Subprocess(), python=sys.executable, folder=agent, spool=agent)


class Machine:
    """What a machine has of the run "train", which was handed over to it.

    Attributes:
        place: the folder of the run.
        agent: the folder of the agent, which runs.
    """

    def __init__(self, folder: Path) -> None:
        self.cloud = Reached(cloud_at(folder / "cloud").state, machines=False, patience=0.3)
        self.agent = folder / "agent"
        self.agent.mkdir()
        self.place = Path(messages.folder_of(str(folder / "state" / "skypool"), CLAIM))
        handed(self.cloud)
        write_row(self.place, CLAIM)

    def files(self, rank: int = 0, attempt: int = 1) -> OutputFiles:
        return OutputFiles(str(self.place / stored.OUTPUT / str(attempt) / str(rank)))

    def ends(self, returncode: int | None = 0, outcome: Outcome = Outcome.ENDED, why: str = "") -> RunStatus:
        made = RunStatus(CLAIM, outcome, returncode, 1, time.time(), 0.5, why=why)
        stored.store(self.place, made)
        return made


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(looking, "_PAUSES", (0.05, 0.2))
    return Machine(tmp_path)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.build(words[0]), words)


def printed(record: Iterator[object] | RunLook) -> dict[tuple[int, int, int], bytes]:
    """All output, by attempt, rank and stream."""
    found: dict[tuple[int, int, int], bytes] = {}
    for each in record:
        if isinstance(each, Printed):
            key = each.attempt, each.rank, each.stream
            found[key] = found.get(key, b"") + each.data
    return found


def test_output_of_all_processes_comes_once_and_in_order_through_connections_that_are_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CommandStream] = []

    def started_stream(argv: list[str]) -> CommandStream:
        made.append(CommandStream(argv))
        return made[-1]

    monkeypatch.setattr(looking, "CommandStream", started_stream)
    written: dict[tuple[int, int, int], bytes] = {}
    for rank in range(3):
        files = machine.files(rank)
        for number in range(100):
            stream, data = 1 + number % 2, f"{rank}-{number} ".encode() * 12000
            files.write(stream, data)
            written[1, rank, stream] = written.get((1, rank, stream), b"") + data
        files.end(0)
    machine.ends()

    def cut() -> Iterator[object]:
        cuts: list[CommandStream] = []
        for each in RunLook(record_of(), output=True, follow=True):
            if isinstance(each, Printed) and made[-1] not in cuts and len(cuts) < 5:
                cuts.append(made[-1])
                made[-1].process.kill()
                made[-1].shut()
            yield each

    assert printed(cut()) == written
    assert len(made) > 2


def test_output_is_followed_until_the_run_is_over_and_another_attempt_comes_after_the_one_before(
    machine: Machine,
) -> None:
    first, second = machine.files(), threading.Event()
    first.write(1, b"one\n")

    def work() -> None:
        second.wait(30)
        files = machine.files(attempt=2)
        files.write(1, b"two\n")
        time.sleep(0.3)
        files.write(2, b"three\n")
        files.end(0)
        machine.ends()

    thread = threading.Thread(target=work)
    thread.start()
    shown = []
    for each in RunLook(record_of(), output=True, follow=True):
        if isinstance(each, Idle):
            second.set()
        else:
            shown.append(each)
    thread.join()
    assert [each for each in shown if isinstance(each, Printed)] == [
        Printed(1, 0, 1, b"one\n"), Printed(2, 0, 1, b"two\n"), Printed(2, 0, 2, b"three\n")
    ]  # fmt: skip
    seen = [each for each in shown if isinstance(each, Seen)]
    assert [each.found.status is None for each in seen] == [True, False]


def test_output_that_the_machine_does_not_have_any_more_is_missing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool.runs.output_files.SIZE", 1000)
    monkeypatch.setattr("skypool.runs.output_files.KEPT", 2)
    files = machine.files()
    for number in range(5):
        files.write(1, str(number).encode() * 900)
    files.end(0)
    found = [each for each in RunLook(record_of(), output=True, follow=False) if not isinstance(each, Seen | Idle)]
    assert [each.data[:1] if isinstance(each, Printed) else b"missing" for each in found] == [b"missing", b"3", b"4"]
    assert isinstance(found[0], Missing)


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        ("its end", Outcome.FAILED),
        ("no agent", Outcome.INTERRUPTED),
        ("no row", Outcome.LOST),
        ("no machine", Outcome.LOST),
    ],
)
def test_the_end_of_a_run_is_heard_and_recorded(machine: Machine, what: str, outcome: Outcome) -> None:
    end = RunEnd(outcome)
    if what == "its end":
        end = machine.ends(None, Outcome.FAILED, why="its worker died").end
    elif what == "no agent":
        machine.agent.rmdir()
    elif what == "no row":
        shutil.rmtree(machine.place)
    else:
        machine.cloud.control.kill(machine.cloud.instances(pool="train")[0])
        shutil.rmtree(machine.place)
    assert await_end(record_of(), Ledger.here(), lambda why: None) == end
    run = record_of().run
    assert run is not None
    assert run.entry == Entry(State.DETACHED, outcome if what in ("its end", "no agent") else None)


def test_an_end_that_was_heard_once_is_known_here_when_the_machine_is_gone(machine: Machine) -> None:
    status = machine.ends(7)
    assert invoke("wait", "train").exit_code == 7
    machine.cloud.control.kill(machine.cloud.instances(pool="train")[0])
    shutil.rmtree(machine.place)
    said = invoke("wait", "train", "--json")
    assert said.exit_code == 7
    told = json.loads(said.stdout)
    assert (told["state"], told["returncode"], told["status"], told["ended"]) == ("ended", 7, 7, utc(status.ended))


@pytest.mark.parametrize("machine_is", ["not listed", "lost by the ledger"])
def test_wait_reads_the_end_from_a_bucket_when_the_machine_is_gone(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine_is: str
) -> None:
    bucket = tmp_path / "bucket"
    note = bucket / ".skypool" / "runs" / stored.note_name(CLAIM, HEIR)
    note.parent.mkdir(parents=True)
    noted = left_uploads.Noted(record_of().session, datetime.now(UTC), (Bucket(f"file://{bucket}"),))
    monkeypatch.setattr(left_uploads, "noted", lambda: [noted])
    machine.cloud.control.kill(machine.cloud.instances(pool="train")[0])
    shutil.rmtree(machine.place)
    if machine_is == "lost by the ledger":
        Ledger.here().mark(record_of().session, Entry(State.ENDED, Outcome.LOST))
    note.write_text("{")
    said = invoke("wait", "train")
    assert said.exit_code == 125
    assert (
        f"run train is lost: its machine has ended, and nothing says what the run did here: its end in file://{bucket}"
        in (said.stdout)
    )
    status = RunStatus(CLAIM, Outcome.ENDED, 3, 1, time.time(), 0.5)
    note.write_text(stored.note_of(status, HEIR, SEAL))
    said = invoke("wait", "train", "--json")
    assert said.exit_code == 3
    assert (json.loads(said.stdout)["state"], json.loads(said.stdout)["usd"]) == ("ended", 0.5)
    note.unlink()
    assert invoke("wait", "train").stdout.startswith("run train ended with status 3"), "it is kept here"


def test_every_command_tells_how_a_run_has_ended(machine: Machine) -> None:
    passed(machine.cloud, 900.0)
    machine.ends(3)
    assert invoke("wait", "train").exit_code == 3
    assert "its program has ended with status 3" in invoke("ps").stdout
    [pool] = json.loads(invoke("ps", "--json").stdout)
    assert (pool["run"]["returncode"], pool["run"]["attempts"], pool["run"]["limit"]) == (3, 1, None)
    assert "ended with status 3" in invoke("cost").stdout
    [line] = json.loads(invoke("cost", "--json").stdout)["lines"]
    assert (line["state"], line["returncode"]) == ("ended", 3)
    machine.cloud.control.kill(machine.cloud.instances(pool="train")[0])
    shutil.rmtree(machine.place)
    said = json.loads(invoke("gc", "--yes", "--json").stdout)
    assert (said["over"], said["runs"]["train"]["returncode"]) == (["train"], 3)


@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_gc_asks_machines_before_it_ends_them_and_also_when_it_only_lists(machine: Machine, more: list[str]) -> None:
    passed(machine.cloud, 900.0)
    [thing] = [each for each in json.loads(invoke("gc", "--json").stdout)["found"] if each["kind"] == "machine"]
    assert (thing["verdict"], "it belongs to its run, until 20" in thing["why"]) == ("live", True)
    machine.ends(3)
    said = json.loads(invoke("gc", "--json", *more).stdout)
    assert said["over"] == []
    [thing] = [each for each in said["found"] if each["kind"] == "machine"]
    assert thing["why"].startswith("its run ended with status 3, and its machine may stay until 20")


@pytest.mark.parametrize("more", [[], ["--yes"]])
def test_gc_hears_of_the_end_of_a_run_whose_machine_should_be_gone(machine: Machine, more: list[str]) -> None:
    passed(machine.cloud, 9000.0)
    machine.ends(3)
    said = json.loads(invoke("gc", "--json", *more).stdout)
    assert {each["verdict"] for each in said["found"]} == {"lost"}
    assert said["over"] == (["train"] if more else [])
    run = record_of().run
    assert run is not None
    assert run.end is not None
    assert (run.end.outcome, run.end.returncode) == (Outcome.ENDED, 3)


def test_wait_gives_up_after_its_timeout_and_says_so(machine: Machine) -> None:
    began = time.monotonic()
    said = invoke("wait", "train", "--timeout", "1.5s")
    assert (said.exit_code, said.stdout) == (124, "run train is not over after 1.5s\n")
    assert 1.5 <= time.monotonic() - began < 20
    assert json.loads(invoke("wait", "train", "--timeout", "100ms", "--json").stdout)["state"] == "running"


def test_a_machine_that_cannot_be_reached_is_tried_again_or_given_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def fails(cloud: object, instance: Instance) -> Access:
        return Access(Subprocess(), python="/no/python", folder="", spool="")

    with monkeypatch.context() as patched:
        patched.setattr(Reached, "access", fails)
        with pytest.raises(ConnectionLost, match=r"the machine of run train cannot be reached: .*no/python"):
            list(RunLook(record_of(), output=True, follow=False, patience=0.0))

        def hear(why: str) -> None:
            lost.append(why)
            if len(lost) == 2:
                patched.undo()
                machine.ends()

        assert await_end(record_of(), Ledger.here(), hear).outcome is Outcome.ENDED
    assert "no/python" in lost[0]


def test_a_damaged_file_is_told_and_not_tried_again(machine: Machine) -> None:
    (machine.place / stored.STATUS).write_text("{")
    with pytest.raises(ProtocolError, match="run train: the status of the run there is not valid"):
        await_end(record_of(), Ledger.here(), lambda why: None)


def end(outcome: Outcome, returncode: int | None = None, limit: str = "", why: str = "") -> RunEnd:
    return RunStatus(CLAIM, outcome, returncode, 1, 1.0, None, limit, why).end


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        (end(Outcome.ENDED, 3), 3, "run r ended with status 3"),
        (RunEnd(Outcome.ENDED), 125, "run r ended by itself, and its exit status is not known here"),
        (end(Outcome.CANCELLED, 130), 130, "run r was cancelled"),
        (
            end(Outcome.CANCELLED, 130, "budget"),
            125,
            "run r was stopped for its budget",
        ),
        (end(Outcome.FAILED, why="it died"), 125, "run r failed: it died"),
        (RunEnd(Outcome.INTERRUPTED), 125, "run r was interrupted: its agent has ended, or its machine was rebooted"),
        (RunEnd(Outcome.LOST), 125, "run r is lost: its machine has ended, and nothing says what the run did"),
        (RunEnd(Outcome.NOT_STARTED), 125, "run r was never started: it was not handed over to its machine"),
    ],
)
def test_each_end_has_an_exit_status_and_words(how: RunEnd, status: int, said: str) -> None:
    assert status_of(how) == status
    assert f"run r {told(how)}".startswith(said)


def test_logs_mark_ranks_and_have_what_is_asked_for(machine: Machine) -> None:
    stored.describe(machine.place, About(2, "/", ""))
    for rank in range(2):
        files = machine.files(rank)
        files.write(1, b"step 1\nstep 2\nhalf")
        files.write(2, b"careful\n")
        files.end(0)
    machine.ends()
    said = invoke("logs", "train", "--follow")
    assert said.stdout.splitlines() == [f"[rank {n}] {text}" for n in range(2) for text in ("step 1", "step 2")] + [
        f"[rank {n}] half" for n in range(2)
    ]
    notes = said.stderr.splitlines()
    assert notes[0].startswith("from the machine of run train, fake ")
    assert notes[1:3] == ["[rank 0] careful", "[rank 1] careful"]
    assert notes[3].startswith("run train ended with status 0; its machine ends by ")
    assert invoke("logs", "train", "--tail", "1").stdout == "[rank 1] half\n"
    assert invoke("logs", "train", "--grep", "step 2$").stdout == "[rank 0] step 2\n[rank 1] step 2\n"
    told = [json.loads(line) for line in invoke("logs", "train", "--json").stdout.splitlines()]
    assert told[0] == {
        "event": "Output", "pool": "train", "node": 0, "rank": 0, "attempt": 1, "stream": 1, "text": "step 1"
    }  # fmt: skip
    for words in (["--node", "1"], ["--call", "f"], ["--since", "1h"]):
        assert isinstance(invoke("logs", "train", *words).exception, SkypoolError)


def test_logs_of_a_machine_that_has_ended_say_that_its_output_is_gone(machine: Machine) -> None:
    machine.cloud.control.kill(machine.cloud.instances(pool="train")[0])
    shutil.rmtree(machine.place)
    said = invoke("logs", "train")
    assert "what run train has printed was on its machine: fake does not list it any more" in " ".join(
        said.stderr.split()
    )


def test_logs_end_when_the_machine_was_rebooted_and_show_nothing_of_an_earlier_run(machine: Machine) -> None:
    machine.files().write(1, b"one\n")
    (machine.place / "row.json").unlink()
    write_row(machine.place, CLAIM, boot="an earlier one")
    said = invoke("logs", "-f", "train")
    assert said.stdout == "one\n"
    assert "run train was interrupted: its agent has ended, or its machine was rebooted" in said.stderr
    (machine.place / "row.json").unlink()
    write_row(machine.place, CLAIM, messages.heir_digest("of an earlier run"))
    assert invoke("logs", "train").stdout == ""


def test_who_waits_hears_that_another_terminal_ends_the_machine(machine: Machine) -> None:
    machine.cloud.control.kill(machine.cloud.instances(pool="train")[0])
    shutil.rmtree(machine.place)
    known, session = Ledger.here(), record_of().session
    known.ending("train")
    mark = threading.Timer(1.0, known.mark, [session, Entry(State.ENDED, Outcome.CANCELLED)])
    mark.start()
    assert await_end(record_of(), Ledger.here(), lambda why: None) == RunEnd(Outcome.CANCELLED)
    mark.join()


def test_wait_and_cancel_refuse_what_is_no_run_of_its_machine(machine: Machine) -> None:
    for command in ("wait", "cancel"):
        with pytest.raises(SkypoolError, match=r"there is no run 'trian'; .* did you mean train\?"):
            CliRunner().invoke(cli.build(command), [command, "trian"], catch_exceptions=False)


def test_an_agent_of_another_version_is_told_that_its_run_is_cancelled(
    machine: Machine, started: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    handed(machine.cloud, "train-7")
    record = record_of("train-7")
    head = started()
    access = Access(Subprocess(), python=sys.executable, folder=str(head.folder), spool="")
    monkeypatch.setattr(cancelling, "reached", lambda record, until: access)
    stored.describe(Path(messages.folder_of(str(machine.place.parent.parent), Claim("train-7"))), About(None, "/", ""))
    head.commit()
    head.ran()
    claim, soon = Claim("train-7"), time.monotonic() + 60
    with monkeypatch.context() as upgraded:
        upgraded.setattr(cancelling, "WIRE_VERSION", 99)
        for message, is_cancelled in ((Ask(claim), False), (CancelRun(claim), True)):
            status = tell(record, message, soon)
            assert status is not None
            assert (status.stage, status.is_cancelled) == (Stage.COMMITTED, is_cancelled)
        with pytest.raises(ConnectionLost):  # nothing says the version of the agent
            tell(record, CancelRun(Claim("other")), soon)
    other = tell(record, CancelRun(Claim("other")), soon)
    assert other is not None
    assert other.stage is Stage.OTHER
    head.is_gone()
    assert tell(record, Ask(claim), soon) is None


@pytest.fixture
def head(machine: Machine, started: Callable[..., Head], monkeypatch: pytest.MonkeyPatch) -> Head:
    """A real agent on the machine of the run "train-7", which runs."""
    head = started()
    monkeypatch.setattr(
        Reached,
        "access",
        lambda cloud, instance: Access(Subprocess(), python=sys.executable, folder=str(head.folder), spool=""),
    )
    handed(machine.cloud, "train-7")
    write_row(machine.place.with_name("train-7-1"), Claim("train-7"))
    head.commit(keep=20)
    head.ran()
    return head


@pytest.mark.parametrize("first", ["wait", "ps"])
def test_an_end_that_could_not_be_stored_on_the_machine_is_told(head: Head, first: str) -> None:
    why = "how it has ended could not be stored: no room"
    assert json.loads(invoke("wait", "train-7", "--timeout", "1s", "--json").stdout)["state"] == "running"
    head.tell("unstored")
    head.tell("go")
    if first == "wait":
        said = invoke("wait", "train-7")
        assert f"run train-7 ended by itself, and its exit status is not known here; {why}" in said.stdout
        assert said.exit_code == 125
    else:
        eventually(lambda: f"its program has ended by itself; {why}" in invoke("ps").stdout, 60, "the end")
    run = record_of("train-7").run
    assert run is not None
    assert run.end == RunEnd(Outcome.ENDED, why=why)
    head.close()
    assert json.loads(invoke("wait", "train-7", "--json").stdout)["why"].endswith(why), (
        "it is kept when the agent is gone"
    )


def test_a_run_was_interrupted_if_its_agent_was_killed_with_all_that_would_remove_its_folder(head: Head) -> None:
    below = descendants(head.pid)
    os.kill(head.pid, signal.SIGSTOP)
    os.kill(head.agent, signal.SIGKILL)
    os.kill(head.pid, signal.SIGKILL)
    for each in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    [pool] = [each for each in json.loads(invoke("ps", "--json").stdout) if each["pool"] == "train-7"]
    assert pool["run"]["state"] == "interrupted"
    assert (head.folder / "agent.sock").exists()


# --- real runs on this machine -------------------------------------------------------------------------------


def out(*words: str, status: int = 0) -> str:
    done = subprocess.run(skypool(*words), capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_is_looked_at_from_other_terminals_until_its_end_and_after_it(project: Project, tmp_path: Path) -> None:
    program = (
        "import os\nrank = os.environ['RANK']\nprint('began', rank, flush=True)\n"
        f"{WAITS}print('done', rank)\nopen('result' + rank, 'w').write(rank * 9)\nraise SystemExit(3)"
    )
    project.run(program, "--max-lifetime", "10m", "--procs", "2")
    eventually(lambda: (project.copy / "began").exists(), 60, "the start of the program")
    follows = subprocess.Popen(
        skypool("logs", "-f", project.name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    head = subprocess.Popen(skypool("logs", "-f", project.name), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    slow = subprocess.Popen(skypool("logs", "-f", project.name), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert head.stdout is not None
    assert head.stderr is not None
    assert head.stdout.readline().startswith(b"[rank ")
    head.stdout.close()
    assert head.wait(30) == 1, "it ends while nothing is printed"
    assert b"rror" not in head.stderr.read()
    head.stderr.close()
    os.kill(slow.pid, signal.SIGSTOP)
    assert out("shell", project.name, "--", "pwd") == f"{project.copy.resolve()}\n"
    assert "not over after 1s" in out("wait", project.name, "--timeout", "1s", status=124)
    out("pull", project.name, "began", str(tmp_path / "fetched"))
    assert (tmp_path / "fetched").exists()
    (project.copy / "go").touch()
    assert f"run {project.name} ended with status 3" in out("wait", project.name, status=3)
    followed, notes = follows.communicate(timeout=60)
    assert sorted(followed.splitlines()) == sorted(f"[rank {n}] {what} {n}" for n in "01" for what in ("began", "done"))
    assert f"run {project.name} ended with status 3" in notes
    project.ends()
    assert sorted(out("logs", project.name).splitlines()) == sorted(followed.splitlines())
    assert json.loads(out("wait", project.name, "--json", status=3))["returncode"] == 3
    out("pull", project.name, "result1", str(tmp_path / "one"))
    assert (tmp_path / "one").read_text() == "1" * 9
    assert out("shell", project.name, "--", "pwd") == f"{project.copy.resolve()}\n"
    out("push", project.name, str(tmp_path / "one"), "two")
    assert (project.copy / "two").read_text() == "1" * 9
    os.kill(slow.pid, signal.SIGCONT)
    said, _ = slow.communicate(timeout=60)
    assert sorted(said.decode().splitlines()) == sorted(followed.splitlines())


@pytest.mark.slow
def test_a_rented_machine_is_looked_at_while_it_is_kept_and_its_end_is_known_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"p{secrets.token_hex(3)}"
    folder.mkdir()
    program = "import os, time\nprint('x' * 100_000, end='')\nopen('began', 'w').close()\ntime.sleep(600)"
    (folder / "train.py").write_text(program)
    monkeypatch.chdir(folder)
    name = f"looked-{secrets.token_hex(3)}"
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        asked = Asked({"provider": cloud}, name=name, budget=20.0, detach=True, keep=600.0)
        whole = WholeRun(Target.of(["train.py"]), asked, _Printer())
        whole.check()
        assert whole.run() == 0
        eventually(lambda: [*tmp_path.glob("cloud/**/began")] != [], 60, "the start of the program")
        assert f"run {name} was cancelled; its machine ends by " in out("cancel", name)
        assert out("logs", name).endswith("x\n")
        out("pull", name, "train.py", "fetched.txt")
        assert (folder / "fetched.txt").read_text() == program
        assert [each.state for each in cloud.instances(pool=name)] == ["running"], "it is kept"
        out("down", "--yes", name)
        assert cloud.count() == 0
        assert json.loads(out("wait", name, "--json", status=130))["returncode"] == 130
        done = subprocess.run(skypool("pull", name, "train.py"), capture_output=True, text=True, check=False)
        assert f"what run '{name}' has written was on its machine: fake does not list it any more" in done.stderr


def test_cancel_ends_a_run_and_its_machine_and_the_run_stores_that(project: Project) -> None:
    project.run(f"{WAITS}", "--max-lifetime", "10m")
    eventually(lambda: (project.copy / "began").exists(), 60, "the start of the program")
    assert f"run {project.name} was cancelled" in out("cancel", project.name)
    status = project.ends()
    assert (status.outcome, status.returncode) == (Outcome.CANCELLED, 130)
    assert f"nothing to cancel: run {project.name} was cancelled" in out("cancel", project.name)
    assert "was cancelled" in out("wait", project.name, status=130)
