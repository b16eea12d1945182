"""`skypool gc --yes` while a run goes on alone on its machine: it ends nothing then, and later all that is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skypool.head.states import Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.model import Need
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.handed_runs import record_of

PROGRAM = """import os, time
open("began", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
open("done", "w").close()
"""


def skypool(*words: str, **env: str) -> str:
    argv = [sys.executable, "-m", "skypool", *words]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=120, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_gc_ends_nothing_of_a_run_that_goes_on_alone_and_all_that_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SKYPOOL_FAKE_CLOUD", str(tmp_path / "cloud"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "alone"\nversion = "1"\n')
    (project / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(project)
    with FakeCloud(tmp_path / "cloud", [Stock("small", 0.1)]) as cloud:
        list(cloud.offers(Need()))
        given = ("--provider", "fake", "--name", "alone", "--budget", "5", "--max-lifetime", "10m", "--keep", "5")
        skypool("run", "--detach", *given, "train.py")
        eventually(lambda: [*tmp_path.glob("cloud/**/began")] != [], 60, "the start of the program")
        for _ in range(3):
            for more in ({}, {"XDG_STATE_HOME": str(tmp_path / "none")}):
                assert "nothing is lost" in skypool("gc", "--provider", "fake", "--yes", **more)
        assert cloud.count("machine") == 1
        [began] = tmp_path.glob("cloud/**/began")
        began.with_name("go").touch()
        eventually(lambda: cloud.count("machine") == 0, 60, "the end of the machine")
        run = record_of("alone").run
        assert run is not None
        assert run.entry == Entry(State.DETACHED)
        said: list[str] = []

        def is_closed() -> bool:
            said.append(skypool("gc", "--provider", "fake", "--yes"))
            return "pool alone: nothing is left of it" in said[-1]

        eventually(is_closed, 60, "30 s after the order, from which on a machine that is not listed is gone")
        assert cloud.count() == 0
        run = record_of("alone").run
        assert run is not None
        assert run.entry == Entry(State.ENDED, Outcome.LOST)
        spent = Ledger.here().receipt(record_of("alone").session).usd
        assert cloud.control.usd("alone") <= spent <= run.worst_usd
