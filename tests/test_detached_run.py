"""`skypool run --detach`: the run belongs to its machine when the command returns. Real processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool.head.states import Claim, Ledger, Outcome
from skypool.rental import ledger
from skypool.rental.records import newest
from skypool.runs import stored
from skypool.runs.stored import RunStatus
from tests.conftest import eventually

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
        self.name = f"detached-{folder.name}"
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{self.name}"\nversion = "1"\n')
        state = os.environ["XDG_STATE_HOME"]
        self.place = Path(stored.folder_of(f"{state}/skypool", Claim(self.name)))

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

    def status(self) -> RunStatus | None:
        return stored.stored(self.place)

    def output(self, attempt: int = 1) -> bytes:
        return (self.place / stored.OUTPUT / str(attempt) / "0" / "0").read_bytes()

    def ends(self) -> RunStatus:
        eventually(lambda: self.status() is not None, 60, "the end of the run")
        eventually(lambda: not sky.Local().instances(pool=self.name), 60, "the end of its machine")
        found = self.status()
        assert found is not None
        return found


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    made = Project(tmp_path_factory.mktemp("p"))
    yield made
    driver = sky.Local()
    driver.terminate(driver.instances(pool=made.name))


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


@pytest.mark.parametrize("words", [(), ("--budget", "1", "--nodes", "2"), ("--budget", "1", "--best-effort")])
def test_a_run_that_cannot_be_handed_over_is_refused_before_anything_is_rented(
    words: tuple[str, ...], project: Project
) -> None:
    with project.start("", *words) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 125
    assert "--detach" in out
    assert not sky.Local().instances(pool=project.name)
