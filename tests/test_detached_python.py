"""`sky.run(…, detach=True)` and `sky.Run.get`: the run belongs to its machine. Real processes on this computer."""

from __future__ import annotations

import secrets
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import skypool as sky
from skypool.errors import UsageError
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.test_detached_run import WAITS, Project, project

__all__ = ["project"]  # a fixture


@sky.compute
def halved(x: float) -> float:
    return x / 2


@pytest.mark.slow
def test_a_detached_run_is_found_and_looked_at_from_any_process(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"print('began')\n{WAITS}print('result')\nopen('out', 'w').write('found')\nraise SystemExit(3)"
    (project.folder / "train.py").write_text(program)
    monkeypatch.chdir(project.folder)
    made = sky.run("train.py", name=project.name, max_lifetime="10m", detach=True)
    assert made.name == project.name
    eventually((project.copy / "began").exists, 60, "the start of the program")
    asks = f"import skypool; run = skypool.Run.get({project.name!r}); print(run.state, run.returncode)"
    said = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert said.stdout == "running None\n"
    run = sky.Run.get(project.name)
    assert repr(run) == f"DetachedRun('{project.name}')"
    assert (run.usd, run.worst_usd, run.returncode) == (0.0, 0.0, None)
    assert 0 < (run.ends_by - datetime.now(UTC)).total_seconds() < 900
    assert "its machine ends at" in run.why
    with pytest.raises(TimeoutError, match=r"is not over after 0\.5"):
        run.wait(timeout=0.5)
    (tmp_path / "go").touch()
    assert run.push(tmp_path / "go").files == 1
    assert [*run.logs(follow=True)] == ["began", "result"]
    assert run.wait() == 3
    assert (run.state, run.returncode) == ("ended", 3)
    assert [*made.logs()] == ["began", "result"]
    assert made.cancel() == 3, "it was over"
    run.pull("out", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_text() == "found"
    assert run.end().usd == 0.0
    assert (run.state, run.wait()) == ("ended", 3)


def test_a_detached_run_on_a_rented_machine_is_cancelled_and_its_machine_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"p{secrets.token_hex(3)}"
    folder.mkdir()
    (folder / "train.py").write_text(WAITS)
    monkeypatch.chdir(folder)
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        run = sky.run("train.py", cloud, name=f"py-{folder.name}", budget=20, keep="10m", detach=True)
        eventually(lambda: [*tmp_path.glob("cloud/**/began")] != [], 60, "the start of the program")
        assert run.state == "running"
        assert run.cancel() == 130
        assert [each.state for each in cloud.instances(pool=run.name)] == ["running"], "it is kept"
        receipt = run.end()
        assert cloud.count() == 0
        assert 0 < receipt.usd < run.worst_usd <= 20.0
        assert (run.state, run.wait()) == ("cancelled", 130)
        with pytest.raises(sky.SkypoolError, match=f"what run '{run.name}' has written was on its machine"):
            run.pull("train.py", tmp_path / "fetched")


def test_wrong_arguments_and_names_are_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.folder / "train.py").touch()
    monkeypatch.chdir(project.folder)
    with pytest.raises(UsageError, match="there is no run 'nobody'; `skypool ps` lists runs"):
        sky.Run.get("nobody")
    with pytest.raises(UsageError, match="detach=True leaves the run alone with its machine, so say when"):
        sky.run("train.py", detach=True)
    with pytest.raises(UsageError, match="with detach=True, nobody knows yet how the program ends"):
        sky.run("train.py", max_lifetime="10m", detach=True, check=True)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="keep='1h' is for runs that belong to their machine; add detach=True"):
        sky.run("train.py", keep="1h")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="keep= is for runs that belong to their machine; add detach=True"):
        sky.run(halved(2), keep="1h")  # type: ignore[call-overload]
