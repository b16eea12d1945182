"""The machine of a run has no credentials of an account, and nothing that is said of its end is run as code."""

from __future__ import annotations

import os
import pickle
import secrets
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from skypool.buckets.bucket import Bucket
from skypool.data import left_uploads
from skypool.errors import SkypoolError
from skypool.head import rows
from skypool.head.states import Claim, Outcome
from skypool.model import Need
from skypool.runs import stored
from skypool.runs.end_in_bucket import end_in_bucket
from skypool.runs.stored import About, RunStatus
from skypool.testing import FakeCloud, Stock
from skypool.testing.machine import MARK
from tests.conftest import children, eventually
from tests.handed_runs import HEIR, cloud_at, handed, record_of
from tests.secret_search import in_files, in_memory

ACCOUNT = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RUNPOD_API_KEY", "VAST_API_KEY", "SKYPOOL_FAKE_KEY")
WAITS = """import os, time
open("began", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def agents_of(place: Path) -> list[int]:
    """The agents of the machines in the folder of a fake cloud."""
    found = []
    mark = f"{MARK}={place}/".encode()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if (each / "comm").read_text() == "skypool-agent\n" and mark in (each / "environ").read_bytes():
                found.append(int(each.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def below(pid: int) -> list[int]:
    """A process, and all that it has started."""
    return [pid, *(each for child in children(pid) for each in below(child))]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="reads the memory of processes as root")
def test_no_credentials_of_an_account_are_in_files_memory_or_environment_of_the_machine(tmp_path: Path) -> None:
    words = {name: secrets.token_hex(20) for name in ACCOUNT}
    secret = secrets.token_hex(20)
    places = {"XDG_STATE_HOME": str(tmp_path / "state"), "SKYPOOL_FAKE_CLOUD": str(tmp_path / "cloud")}
    env = {**os.environ, **words, **places, "TOKEN": secret}
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "alone"\nversion = "1"\n')
    (project / "train.py").write_text(WAITS)
    looked_for = {name: word.encode() for name, word in {**words, "TOKEN": secret}.items()}
    name = f"searched-{secrets.token_hex(3)}"
    with FakeCloud(tmp_path / "cloud", [Stock("small", 0.1)], key=words["SKYPOOL_FAKE_KEY"]) as cloud:
        list(cloud.offers(Need()))
        argv = [sys.executable, "-m", "skypool", "run", "--detach", "--provider", "fake", "--name", name]
        argv += ["--budget", "5", "--max-lifetime", "10m", "--keep", "5", "--secret", "TOKEN", "train.py"]
        done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        eventually(lambda: [*tmp_path.glob("cloud/**/began")] != [], 60, "the start of the program")
        [agent] = agents_of(tmp_path / "cloud")
        ours = below(agent)
        runners = [each for each in ours if b"skypool.runs.runner" in Path(f"/proc/{each}/cmdline").read_bytes()]
        assert len(runners) == 1
        assert len(ours) >= 3, "agent, runner, worker"
        found = {pid: in_memory(pid, looked_for) for pid in ours}
        assert {"TOKEN"} in found.values(), "the search finds what is there"
        for pid, names in found.items():
            assert names <= {"TOKEN"}, Path(f"/proc/{pid}/comm").read_text()
        assert in_files((tmp_path / "cloud" / "machines").glob("*"), looked_for) == set()
        [began] = tmp_path.glob("cloud/**/began")
        began.with_name("go").touch()
        eventually(lambda: cloud.count("machine") == 0, 60, "the end of the machine")


class Runs:
    """What runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_an_end_that_was_forged_is_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    handed(cloud_at(tmp_path / "cloud"))
    bucket = tmp_path / "bucket"
    claim = Claim("train")
    place = bucket / ".skypool" / "runs" / stored.note_name(claim, HEIR)
    place.parent.mkdir(parents=True)
    noted = left_uploads.Noted(record_of().session, datetime.now(UTC), (Bucket(f"file://{bucket}"),))
    monkeypatch.setattr(left_uploads, "noted", lambda: [noted])
    ran = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(ran)))
    assert ran.exists(), "it would run"
    ran.unlink()
    folder = tmp_path / "folder"
    folder.mkdir()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        forged = pickle.dumps(Runs(ran), protocol)
        place.write_bytes(forged)
        with pytest.raises(SkypoolError, match="cannot be read"):
            end_in_bucket(record_of())
        (folder / stored.STATUS).write_bytes(forged)
        with pytest.raises(SkypoolError, match="was damaged"):
            stored.stored(folder)
        (folder / rows.FILE).write_bytes(forged)
        with pytest.raises(SkypoolError, match="not valid"):
            rows.read(str(folder))
        assert About.parsed(forged.decode("latin-1")) is None
    assert not ran.exists()


def test_words_of_a_forged_end_reach_no_terminal_as_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = RunStatus(Claim("train"), Outcome.FAILED, None, 1, time.time(), why="\x1b]0;x\x07\x1b[2J\r\nno")
    found = RunStatus.from_json({**said.to_json(), "limit": "\x1b[2Jx"})
    assert "\x1b" not in found.why + found.limit
    assert "\n" not in found.why
