"""`skypool run` with a limit: the run belongs to its machine, and the terminal watches it. Real processes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool.head.states import Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.handed_runs import record_of
from tests.test_detached_run import WAITS, Project, project

__all__ = ["project"]  # a fixture


class Watched:
    """A project and its runs on a rented machine of a rehearsal cloud, started from a terminal.

    Attributes:
        cloud: the cloud.
        name: the name of the run.
        folder: the folder of the project.
    """

    def __init__(self, folder: Path, cloud: FakeCloud) -> None:
        self.folder, self.cloud = folder, cloud
        self.name = f"watched-{secrets.token_hex(3)}"

    def start(self, program: str, *words: str) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(program)
        argv = [
            sys.executable, "-m", "skypool", "run", "--provider", "fake", "--name", self.name, *words,
            "train.py",
        ]  # fmt: skip
        return subprocess.Popen(argv, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @property
    def began(self) -> Path:
        """The file that the program has written when it began. Waits for it."""
        eventually(lambda: [*self.folder.parent.glob("cloud/**/began")] != [], 60, "the start of the program")
        [found] = self.folder.parent.glob("cloud/**/began")
        return found

    def entry(self) -> Entry:
        run = record_of(self.name).run
        assert run is not None
        return run.entry


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setenv("SKYPOOL_FAKE_CLOUD", str(tmp_path / "cloud"))
    folder = tmp_path / f"p{secrets.token_hex(3)}"
    folder.mkdir()
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        yield Watched(folder, cloud)


PRINTS = (
    "import os, sys\nprint('began', flush=True)\nos.mkdir('out')\nopen('out/result', 'w').write('found')\n"
    f"open('elsewhere', 'w').write('x')\n{WAITS}print('done', file=sys.stderr)\nraise SystemExit(3)"
)


def test_a_watched_run_is_shown_fetched_and_ended_as_one_that_ends_with_the_terminal(watched: Watched) -> None:
    with watched.start(PRINTS, "--budget", "20", "--save", "out") as process:
        watched.began.with_name("go").touch()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "began\n"), err
    assert f"watches  run {watched.name} belongs to its machine now, which ends within " in err
    assert "its machine stays for 10:00 min after it; `skypool logs -f" in err
    assert "\ndone\n" in err
    assert "\nsaved    1 file to out\n" in err
    assert "\nnot saved: began (0 bytes)" not in err
    assert "\nnot saved: elsewhere (1 byte" in err
    assert "\nend      status 3 after " in err
    assert (watched.folder / "out" / "result").read_text() == "found"
    assert watched.cloud.count() == 0
    assert watched.entry() == Entry(State.ENDED, Outcome.ENDED)
    assert record_of(watched.name).ended is not None, "its end is proved"
    said = subprocess.run([sys.executable, "-m", "skypool", "logs", watched.name], capture_output=True, text=True)
    assert (said.stdout, "[0] done\n" in said.stderr) == ("[0] began\n", True)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_terminal_ends_the_view_alone(watched: Watched, number: signal.Signals) -> None:
    with watched.start(PRINTS, "--budget", "20") as process:
        began = watched.began
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number)
    if number != signal.SIGKILL:
        assert f"run {watched.name} goes on on its machine until it is over, and its machine stays for 10:00" in err
        assert "end      status" not in err
    run = sky.Run.get(watched.name)
    assert run.state == "running"
    began.with_name("go").touch()
    assert run.wait() == 3
    assert [each.state for each in watched.cloud.instances(pool=watched.name)] == ["running"], "it stays"
    assert sorted(run.logs()) == ["began", "done"]
    run.end()


def test_ctrl_c_cancels_a_watched_run_fetches_its_folder_and_ends_its_machine(watched: Watched) -> None:
    with watched.start(PRINTS, "--budget", "20", "--save", "out") as process:
        assert watched.began
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (130, "began\n"), err
    assert "interrupted: the run is cancelled, and the program has 5 s to end" in err
    assert "\nend      status 130 after " in err
    assert (watched.folder / "out" / "result").read_text() == "found"
    assert watched.cloud.count() == 0
    assert watched.entry() == Entry(State.ENDED, Outcome.CANCELLED)


def test_a_second_ctrl_c_ends_the_machine_of_a_program_that_ignores_the_first(watched: Watched) -> None:
    program = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{PRINTS}"
    with watched.start(program, "--budget", "20", "--save", "out") as process:
        assert watched.began
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        lines = iter(process.stderr.readline, "")
        assert any("another Ctrl-C ends the machine at once" in each for each in lines)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: the machine is ended now" in err
    assert watched.cloud.count() == 0
    assert watched.entry() == Entry(State.ENDED, Outcome.CANCELLED)


def test_what_cannot_be_fetched_at_the_end_stays_with_the_machine(watched: Watched) -> None:
    with watched.start(PRINTS, "--budget", "20", "--save", "out") as process:
        began = watched.began
        (watched.folder / "out").write_text("in its way")
        began.with_name("go").touch()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "what the program wrote into out was not fetched: " in err
    assert f"the machine stays for 10:00 min after the run: `skypool pull {watched.name} out` fetches" in err
    assert [each.state for each in watched.cloud.instances(pool=watched.name)] == ["running"]
    run = sky.Run.get(watched.name)
    run.pull("out", watched.folder / "fetched")
    assert (watched.folder / "fetched" / "result").read_text() == "found"
    run.end()
    assert watched.cloud.count() == 0


def test_a_closed_pipe_ends_the_view_alone(watched: Watched) -> None:
    program = PRINTS.replace("print('done'", "print('more', flush=True)\nprint('done'")
    with watched.start(program, "--budget", "20") as process:
        began = watched.began
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        began.with_name("go").touch()
        _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert sky.Run.get(watched.name).wait() == 3
    sky.Run.get(watched.name).end()


@pytest.mark.slow
def test_a_watched_run_is_stopped_for_its_lifetime_and_its_folder_is_fetched(watched: Watched) -> None:
    began = time.monotonic()
    with watched.start(PRINTS, "--max-lifetime", "45s", "--save", "out", "--json") as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 125, err
    told = [json.loads(line) for line in out.splitlines()]
    assert (told[-1]["event"], told[-1]["limit"], told[-1]["program"]) == ("end", "lifetime", None)
    [watches] = [each for each in told if each["event"] == "watches"]
    assert (watches["stay"], watches["seconds"] < 45) == (600, True)
    assert (watched.folder / "out" / "result").read_text() == "found"
    assert time.monotonic() < began + 60
    assert watched.cloud.count() == 0


def test_a_run_that_cannot_belong_to_its_machine_says_why_it_ends_with_the_terminal(watched: Watched) -> None:
    words = ["--dry-run", "--budget", "20"]
    for more, why in {
        (): "",
        ("--attached",): "as --attached says so",
        ("--nodes", "2"): "as it has several nodes",
        ("--best-effort",): "as --best-effort takes machines that do not end themselves",
        ("--keep", "1h"): "",
    }.items():
        with watched.start("", *words, *more) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert (f"; ends with this terminal, {why}" in err) if why else ("ends with this terminal" not in err), err
    with watched.start("", *words, "--attached", "--keep", "1h") as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "--keep is for runs that belong to their machine" in err) == (125, True)


def test_a_watched_run_on_this_computer_goes_on_when_its_terminal_is_closed(project: Project) -> None:
    (project.folder / "train.py").write_text(f"{WAITS}print('done'); raise SystemExit(3)")
    argv = [sys.executable, "-m", "skypool", "run", "--local", "--name", project.name]
    with subprocess.Popen([*argv, "--max-lifetime", "10m", "train.py"], cwd=project.folder) as process:
        began = f"{project.folder.name}-*/began"
        eventually(lambda: [*project.cache.glob(began)] != [], 60, "the start of the program")
        os.kill(process.pid, signal.SIGHUP)
        assert process.wait(60) == 129
    (project.copy / "go").touch()
    assert project.ends().returncode == 3
