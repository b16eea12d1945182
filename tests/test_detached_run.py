"""`skypool run --detach`: the run belongs to its machine when the command returns. Real processes on this machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.cli.output import utc
from skypool.errors import ConnectionLost, SkypoolError, UsageError
from skypool.head import messages
from skypool.head.states import Answered, Claim, ClientEvent, Entry, Ledger, Outcome, Stage
from skypool.rental import ledger, reaper
from skypool.rental.records import newest
from skypool.runs import stored
from skypool.runs.output_files import Records
from skypool.runs.owned_machine import OwnedMachine
from skypool.runs.run import _Printer
from skypool.runs.stored import RunStatus
from skypool.runs.target import Target
from skypool.runs.whole_run import Asked, WholeRun
from skypool.safety import removal
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.handed_runs import record_of, runners_of

WAITS = """import os, time
open("began", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
"""


class Project:
    """A project and its detached run on this machine.

    Attributes:
        name: the name of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.name = f"detached-{folder.name}"
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{self.name}"\nversion = "1"\n')
        state = os.environ["XDG_STATE_HOME"]
        self.place = Path(messages.folder_of(f"{state}/skypool", Claim(self.name)))

    def start(self, program: str, *words: str) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(program)
        argv = [sys.executable, "-m", "skypool", "run", "--local", "--detach", "--name", self.name, *words, "train.py"]
        return subprocess.Popen(argv, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, program: str, *words: str) -> str:
        with self.start(program, *words) as process:
            out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, out
        return out

    @property
    def copy(self) -> Path:
        """The folder in which the program runs."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        [found] = (cache / "skypool" / "runs" / "projects").glob(f"{self.folder.name}-*")
        return found

    @property
    def runners(self) -> list[int]:
        """The processes of its runner."""
        return runners_of(self.name)

    def status(self) -> RunStatus | None:
        return stored.stored(self.place)

    def output(self, attempt: int = 1) -> bytes:
        return (self.place / stored.OUTPUT / str(attempt) / "0" / "0").read_bytes()

    def ends(self) -> RunStatus:
        eventually(lambda: self.status() is not None, 60, "the end of the run")
        nodes = Path(os.environ["XDG_RUNTIME_DIR"])
        eventually(lambda: not [*nodes.glob(f"*/{self.name}.*")], 60, "the end of its machine")
        found = self.status()
        assert found is not None
        return found


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path / f"p{secrets.token_hex(3)}")
    yield made
    driver = sky.Local()
    driver.terminate(driver.instances(pool=made.name))
    with contextlib.suppress(ValueError):  # nothing was sent
        removal.remove(made.copy)  # data there is for reading only


def test_a_run_goes_on_after_the_command_has_returned_and_its_machine_ends_with_it(project: Project) -> None:
    out = project.run(f"{WAITS}print('done'); raise SystemExit(3)", "--max-lifetime", "10m")
    assert "belongs to its machine now" in out
    record = newest(ledger.Ledger.here().pools(project.name))
    assert record is not None
    assert record.run is not None
    assert record.run.entry.state is Ledger.DETACHED
    eventually((project.copy / "began").exists, 60, "the start of the program")
    assert project.status() is None
    (project.copy / "go").touch()
    status = project.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.ENDED, 3, 1)
    assert b"done" in project.output()
    said = subprocess.run([sys.executable, "-m", "skypool", "ps", "--json"], capture_output=True, check=True)
    [run] = [each["run"] for each in json.loads(said.stdout) if each["pool"] == project.name]
    assert run["state"] == "ended"


PRINTS = """import base64, os, sys, time
value = os.environ["MY_TOKEN"]
print("whole", value)
for part in ("cut ", value[:9], value[9:], "\\n"):
    sys.stdout.write(part)
    sys.stdout.flush()
    time.sleep(0.05)
print("base64", base64.b64encode(f"user:{value}".encode()).decode())
print(value * 20_000, file=sys.stderr)
sys.stdout.buffer.write(bytes(range(256)) * 4096)
print("the end begins as it does:", value[:5], end="")
sys.stdout.flush()
raise SystemExit(value)
"""


@pytest.mark.slow
def test_secrets_are_masked_in_all_that_a_run_leaves_on_its_machine(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = f"hf_{secrets.token_hex(20)}"
    monkeypatch.setenv("MY_TOKEN", token)
    project.run(PRINTS, "--max-lifetime", "10m", "--secret", "MY_TOKEN")
    status = project.ends()
    assert (status.outcome, status.returncode) == (Outcome.ENDED, 1)
    found = {1: b"", 2: b""}
    for stream, data in Records().feed(project.output()):
        found[stream] += data
    for each in project.place.rglob("*"):
        assert not each.is_file() or token.encode() not in each.read_bytes(), each
    lines = found[1].splitlines()
    assert lines[:2] == [b"whole [secret MY_TOKEN]", b"cut [secret MY_TOKEN]"]
    assert lines[2].startswith(b"base64 ")
    assert b"[secret MY_TOKEN]" in lines[2]
    assert bytes(range(256)) * 4096 in found[1]
    assert found[1].endswith(b"the end begins as it does: " + token[:5].encode())
    assert found[2].count(b"[secret MY_TOKEN]") == 20_001, "one of them is what the program has exited with"


@pytest.mark.parametrize("words", [(), ("--budget", "1", "--nodes", "2"), ("--budget", "1", "--best-effort")])
def test_a_run_that_cannot_be_handed_over_is_refused_before_anything_is_rented(
    words: tuple[str, ...], project: Project
) -> None:
    with project.start("", *words) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 125
    assert "--detach" in out
    assert not sky.Local().instances(pool=project.name)


def test_a_killed_runner_is_followed_by_another_one_and_the_program_runs_once(project: Project) -> None:
    project.run(f"{WAITS}open('ran', 'a').write('1')", "--max-lifetime", "10m")
    eventually((project.copy / "began").exists, 60, "the start of the program")
    [first] = project.runners
    os.kill(first, signal.SIGKILL)
    eventually(lambda: project.runners not in ([], [first]), 60, "the next runner")
    (project.copy / "go").touch()
    status = project.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.ENDED, 0, 1)
    assert (project.copy / "ran").read_text() == "1"


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [20.0, math.inf])
def test_a_stopped_runner_goes_on_or_is_replaced_and_the_program_runs_once(seconds: float, project: Project) -> None:
    project.run(f"{WAITS}open('ran', 'a').write('1')", "--max-lifetime", "10m")
    eventually((project.copy / "began").exists, 60, "the start of the program")
    [first] = project.runners
    os.kill(first, signal.SIGSTOP)
    (project.copy / "go").touch()
    if seconds < math.inf:
        time.sleep(seconds)
        os.kill(first, signal.SIGCONT)
    else:
        eventually(lambda: first not in project.runners, 120, "the end of a runner that says nothing")
    status = project.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.ENDED, 0, 1)
    assert (project.copy / "ran").read_text() == "1"


def test_the_name_of_a_run_that_has_left_its_end_here_can_be_used_again(project: Project) -> None:
    project.run("print('first')", "--max-lifetime", "10m")
    project.ends()
    argv = [sys.executable, "-m", "skypool", "down", "--yes", project.name]
    said = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert f"pool {project.name} has ended" in said.stdout
    for wrong in ("still there", "not confirmed"):
        assert wrong not in said.stdout + said.stderr
    first, project.place = project.place, project.place.with_name(f"{project.name}-2")
    project.run("print('second')", "--max-lifetime", "10m")
    assert project.ends().claim == Claim(project.name, 2)
    assert b"second" in project.output()
    assert stored.stored(first) is not None
    argv = [sys.executable, "-m", "skypool", "logs", project.name]
    said = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert said.stdout == "second\n"


def test_a_name_whose_end_here_the_ledger_does_not_know_is_refused_with_the_way_out(project: Project) -> None:
    project.place.mkdir(parents=True)
    (project.place / "row.json").touch()
    with project.start("", "--max-lifetime", "10m") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 125
    assert f"use another name, or remove {project.place}" in out


def test_a_program_whose_worker_dies_is_lost_and_the_run_has_failed(project: Project) -> None:
    project.run("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)", "--max-lifetime", "10m")
    status = project.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.FAILED, None, 1)
    assert "SIGKILL" in status.why


@pytest.mark.slow
def test_a_program_is_stopped_before_its_lifetime_ends_the_machine_and_its_end_is_stored(project: Project) -> None:
    project.run("import time\ntry:\n    time.sleep(600)\nfinally:\n    print('stopped')", "--max-lifetime", "25s")
    status = project.ends()
    assert (status.outcome, status.returncode, status.limit) == (Outcome.CANCELLED, 130, "lifetime")
    assert b"stopped" in project.output()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.0, 2.5, 3.0, 4.0])
def test_a_client_killed_at_any_moment_of_the_hand_over_leaves_a_run_that_runs_once_or_never(
    after: float, project: Project
) -> None:
    """The delay counts from the time at which the machine is there."""
    process = project.start("open('ran', 'a').write('1')", "--max-lifetime", "10m")
    eventually(lambda: sky.Local().instances(pool=project.name), 60, "the machine")
    time.sleep(after)
    process.kill()
    process.communicate()
    with contextlib.suppress(AssertionError):
        eventually((project.place / "row.json").exists, 10)
    if (project.place / "row.json").exists():
        assert project.ends().outcome is Outcome.ENDED
        assert (project.copy / "ran").read_text() == "1"
    else:
        assert not project.place.exists() or project.status() is None
        assert not [*project.folder.parent.glob("**/ran")]
        with contextlib.suppress(ValueError):  # it was not sent
            assert not (project.copy / "ran").exists()


def test_a_rented_machine_stays_for_its_time_after_the_run_and_then_ends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reaper, "SETTLING", 0.5)
    project = tmp_path / f"p{secrets.token_hex(3)}"
    project.mkdir()
    (project / "train.py").write_text("print('done')")
    monkeypatch.chdir(project)
    name = f"kept-{secrets.token_hex(3)}"
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        asked = Asked({"provider": cloud}, name=name, budget=20.0, detach=True)
        with pytest.raises(UsageError, match=r"stays after the run, and costs 36 USD an hour, as by keep"):
            WholeRun(Target.of(["train.py"]), asked, _Printer()).check()
        assert cloud.count() == 0
        whole = WholeRun(Target.of(["train.py"]), replace(asked, keep=6.0), _Printer())
        whole.check()
        assert whole.run() == 0
        assert whole.is_detached
        assert "and costs at most 20.00 USD in all" in capsys.readouterr().err
        [place] = (tmp_path / "cloud").glob(f"machines/*/home/.skypool/heads/{name}-1")
        eventually(lambda: stored.stored(place) is not None, 60, "the end of the run")
        status = stored.stored(place)
        assert status is not None
        assert (status.outcome, status.returncode) == (Outcome.ENDED, 0)
        assert status.usd is not None
        assert status.usd > 0.0
        assert b"done" in (place / stored.OUTPUT / "1" / "0" / "0").read_bytes()

        def machines() -> list[str]:
            return [each.id for each in cloud.instances(pool=name) if each.state != "ended"]

        assert len(machines()) == 1, "it stays"
        eventually(lambda: not machines(), 60, "its end")
        reaper.terminate_all([cloud], name, ledger.Ledger.here())
        assert cloud.count() == 0


def checked(cloud: FakeCloud, name: str) -> WholeRun:
    """A run that is to be handed over, when its options were checked."""
    asked = Asked({"provider": cloud}, name=name, budget=20.0, detach=True, keep=600.0)
    whole = WholeRun(Target.of(["train.py"]), asked, _Printer())
    whole.check()
    return whole


@pytest.mark.parametrize("asks", ["ps", "down"])
def test_a_command_asks_a_rented_machine_how_its_run_stands_and_records_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    project = tmp_path / f"p{secrets.token_hex(3)}"
    project.mkdir()
    (project / "train.py").write_text(f"{WAITS}raise SystemExit(3)")
    monkeypatch.chdir(project)
    name = f"asked-{secrets.token_hex(3)}"
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        whole = checked(cloud, name)
        assert whole.run() == 0
        eventually(lambda: [*tmp_path.glob("cloud/**/began")] != [], 60, "the start of the program")
        [began] = tmp_path.glob("cloud/**/began")
        before = time.time()
        if asks == "ps":
            run = shown(name)
            assert (run["state"], run["unheard"], run["seen"] >= utc(before)) == ("running", "", True)
        began.with_name("go").touch()
        [place] = (tmp_path / "cloud").glob(f"machines/*/home/.skypool/heads/{name}-1")
        eventually(lambda: stored.stored(place) is not None, 60, "the end of the run")
        assert entry_of(name).outcome is None, "nobody has asked"
        if asks == "ps":
            assert shown(name)["state"] == "ended"
            assert [each.state for each in cloud.instances(pool=name)] == ["running"], "it is kept"
        done = subprocess.run(skypool("down", "--yes", name), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "its run ended with status 3; its machine is still there; what it has not saved is lost" in done.stdout
        assert entry_of(name) == Entry(Ledger.ENDED, Outcome.ENDED), "and not cancelled or lost"
        assert shown(name)["state"] == "ended"
        assert cloud.count() == 0


def test_the_command_that_is_named_for_an_unknown_outcome_can_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is cut off before it hears of the commit."""
    follow = OwnedMachine.follow

    def cut_off(owned: OwnedMachine, hear: Callable[[ClientEvent | ConnectionLost], None]) -> None:
        def heard(event: ClientEvent | ConnectionLost) -> None:
            is_late = isinstance(event, Answered) and event.status.stage is Stage.COMMITTED
            hear(ConnectionLost("it is cut off") if is_late else event)

        follow(owned, heard)

    monkeypatch.setattr(OwnedMachine, "follow", cut_off)
    monkeypatch.setattr(OwnedMachine, "look", lambda owned: None)
    project = tmp_path / f"p{secrets.token_hex(3)}"
    project.mkdir()
    (project / "train.py").write_text(WAITS)
    monkeypatch.chdir(project)
    name = f"unknown-{secrets.token_hex(3)}"
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        whole = checked(cloud, name)
        with pytest.raises(SkypoolError, match=f"whether run {name} belongs .* `skypool ps` asks the machine"):
            whole.run()
        assert entry_of(name) == Entry(Ledger.DETACHING)
        assert shown(name)["state"] == "running"
        assert entry_of(name) == Entry(Ledger.DETACHED)


def entry_of(name: str) -> Entry:
    run = record_of(name).run
    assert run is not None
    return run.entry


def skypool(*words: str) -> list[str]:
    return [sys.executable, "-m", "skypool", *words]


def shown(name: str) -> dict[str, Any]:
    """What `skypool ps` shows of a run."""
    said = subprocess.run(skypool("ps", "--json"), capture_output=True, check=True)
    run: dict[str, Any]
    [run] = [each["run"] for each in json.loads(said.stdout) if each["pool"] == name]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_ctrl_c_at_any_moment_of_the_hand_over_ends_the_machine_or_cancels_the_run(
    after: float, project: Project
) -> None:
    """The delay counts from the time at which the machine is there. Later, the command has returned."""
    process = project.start("import time; open('ran', 'a').write('1'); time.sleep(20)", "--max-lifetime", "10m")
    eventually(lambda: sky.Local().instances(pool=project.name), 60, "the machine")
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    is_told = "belongs to its machine now" in out
    assert is_told or process.returncode != 0
    if is_told:  # the signal may still kill the process while Python ends
        assert project.ends().outcome is Outcome.ENDED
    elif (project.place / "row.json").exists():
        assert project.ends().outcome is Outcome.CANCELLED
    else:
        eventually(lambda: not sky.Local().instances(pool=project.name), 10, "the end of the machine")
        with contextlib.suppress(ValueError):  # it was not sent
            assert not (project.copy / "ran").exists()
