"""Folders that are kept in buckets, of a run that belongs to its machine: the machine saves them alone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import clock
from skypool.buckets import store
from skypool.buckets.bucket import Bucket
from skypool.buckets.temporary import Credentials, Issuer
from skypool.data import left_uploads
from skypool.data.save_asked import SaveFolder
from skypool.errors import SkypoolError, UsageError
from skypool.head.states import Claim, Outcome
from skypool.rental.ledger import Ledger
from skypool.rental.run_account import RunAccount
from skypool.rental.run_state import state_of
from skypool.rental.supply import Supply
from skypool.runs import stored, whole_run
from skypool.runs.asking import ask_machines
from skypool.runs.end_in_bucket import end_in_bucket
from skypool.runs.needs import Needs
from skypool.runs.program_run import ProgramRun
from skypool.runs.run import _Printer
from skypool.runs.stored import KeptFolder, RunStatus
from skypool.runs.target import Target
from skypool.runs.whole_run import Asked, WholeRun
from skypool.testing import FakeCloud, Stock
from skypool.wire.save_orders import FolderState
from tests.conftest import children, eventually
from tests.handed_runs import HEIR, SEAL, cloud_at, handed, record_of
from tests.lab import stores, sts
from tests.lab.stores import KEYS, secret_of
from tests.test_detached_run import Project, project
from tests.test_runner import Machine, keeper_of, machine
from tests.test_save import kept

__all__ = ["machine", "project"]  # fixtures

CLAIM = Claim("train")
WRITES = """import os
for step in (1, 2):
    os.makedirs(f"out/step-{step}")
    for name in ("model", "optimizer"):
        with open(f"out/step-{step}/{name}", "w") as file:
            file.write(f"{name} {step}")
with open("out/log", "w") as file:
    file.write("done")
"""
WRITTEN = {
    "log": "done",
    **{f"step-{step}/{name}": f"{name} {step}" for step in (1, 2) for name in ("model", "optimizer")},
}


def bytes_of(files: dict[str, str]) -> int:
    return sum(map(len, files.values()))


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder in place of a bucket."""
    made = tmp_path / "bucket"
    made.mkdir()
    return made


def saved(machine: Machine, bucket: Path, script: str, name: str = "out", drain: float = 120.0, **more: Any) -> Needs:
    """Have a folder of a machine saved, and return what the runner of a program there needs."""
    needs = machine.needs(script, **more)
    folder = SaveFolder(name, Bucket(f"file://{bucket}"))
    machine.pool._sender.working().saving.begin(0, {str(machine.project / name): folder}, drain=drain)
    env = {**needs.call.env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return replace(needs, folders=(name,), call=replace(needs.call, env=env))


# --- the folders of a run ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_client_is_killed_right_after_the_hand_over_has_all_its_files_in_the_bucket(
    project: Project, bucket: Path
) -> None:
    url = f"file://{bucket}"
    with project.start(WRITES, "--max-lifetime", "10m", "--save", f"out={url}") as process:
        eventually((project.place / "row.json").exists, 60, "the commit")
        process.kill()
        process.communicate()
    status = project.ends()
    assert (status.outcome, status.returncode, status.unsaved) == (Outcome.ENDED, 0, "")
    assert status.folders == (KeptFolder("out", url, len(WRITTEN), bytes_of(WRITTEN)),)
    assert kept(bucket) == WRITTEN
    [note] = bucket.glob(f".skypool/runs/{project.name}-1-*.json")
    run = record_of(project.name).run
    assert run is not None
    assert note.name == stored.note_name(run.claim, run.heir)
    assert stored.from_note(note.read_bytes(), run.claim, run.heir, run.seal) == status, "it is signed"


def test_data_is_there_and_the_bucket_for_all_runs_has_what_is_saved(
    project: Project, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYPOOL_BUCKET", f"file://{bucket}")
    data = tmp_path / "data"
    data.mkdir()
    (data / "shard").write_text("from afar")
    program = "import shutil\nshutil.copy('data/shard', 'out/copy')"
    project.run(program, "--max-lifetime", "10m", "--save", "out", "--data", f"data=file://{data}")
    assert project.ends().unsaved == ""
    assert kept(bucket) == {f"{project.name}/out/copy": "from afar"}


def test_another_runner_has_the_last_files_saved(machine: Machine, bucket: Path) -> None:
    waits = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
    machine.hand_over(saved(machine, bucket, waits + WRITES)).give_up()
    machine.begins()
    machine.replace_runner()
    (machine.project / "go").touch()
    status = machine.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.ENDED, 0, 1)
    assert [(each.files, each.why) for each in status.folders] == [(len(WRITTEN), "")]
    assert kept(bucket) == WRITTEN


CHECKPOINTS = """import os
import skypool as sky
store = sky.Checkpoints("ckpt")
last = store.latest()
first = last.step + 1 if last else 1
for step in range(first, first + 2):
    with store.save(step, wait=True) as folder:
        (folder / "model").write_text(os.environ["RANK"])
if last is None:
    os.kill(os.getppid(), 9)
"""


def test_the_next_attempt_goes_on_from_the_newest_whole_checkpoint(machine: Machine, bucket: Path) -> None:
    machine.hand_over(saved(machine, bucket, CHECKPOINTS, "ckpt", retries=1, procs=2)).give_up()
    status = machine.ends()
    assert (status.outcome, status.returncode, status.attempts) == (Outcome.ENDED, 0, 2)
    assert status.unsaved == ""
    commits = sorted(str(each.parent.relative_to(bucket)) for each in bucket.glob("step-*/attempt-*/COMMIT"))
    assert commits == [f"step-{step}/attempt-00000{1 if step < 3 else 2}" for step in range(2, 5)]


def test_a_run_says_what_of_its_folder_is_saved_nowhere(machine: Machine, bucket: Path) -> None:
    script = f"import os, shutil\nshutil.rmtree({str(bucket)!r})\nopen({str(bucket)!r}, 'w')\n"
    machine.hand_over(saved(machine, bucket, f"{script}open('out/a', 'w').write('lost')", drain=3.0)).give_up()
    status = machine.ends()
    assert (status.outcome, status.returncode) == (Outcome.ENDED, 0)
    assert status.unsaved.startswith("1 file of out (a): ")


class ShortAccount(RunAccount):
    """That of a run whose written end is near."""

    def __init__(self, supply: Supply, claim: Claim, seconds: float, heir: str = "") -> None:
        super().__init__(supply, claim, 45.0, heir)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_is_stopped_by_its_lifetime_has_all_saved_that_was_there(
    is_killed: bool, machine: Machine, bucket: Path
) -> None:
    """Also if its runner is killed when it has stopped the program."""
    script = (
        "import itertools, time\n"
        "try:\n"
        "    for n in itertools.count():\n"
        "        open(f'out/{n}', 'w').write(str(n))\n"
        "        time.sleep(0.1)\n"
        "finally:\n"
        "    open('out/last', 'w').write('stopped')\n"
    )
    began = time.time()
    needs = saved(machine, bucket, script, drain=4.0)
    _, why, owned = machine.try_to_hand_over(needs, ShortAccount)
    owned.give_up()
    if is_killed:
        eventually((machine.project / "out" / "last").exists, 60, "the stop")
        os.kill(machine.runners[0], signal.SIGKILL)
    status = machine.ends()
    assert (status.outcome, status.returncode, status.limit) == (Outcome.CANCELLED, 130, "lifetime"), why
    assert status.unsaved == ""
    assert status.ended < began + 45.0
    there = {each.name: each.read_text() for each in (machine.project / "out").iterdir()}
    assert there["last"] == "stopped"
    assert kept(bucket) == there


class LongAccount(RunAccount):
    """That of a run whose written end leaves time for an end of 20 s."""

    def __init__(self, supply: Supply, claim: Claim, seconds: float, heir: str = "") -> None:
        super().__init__(supply, claim, 60.0, heir)


@pytest.mark.slow
def test_the_machine_lives_until_its_end_is_stored_though_the_program_stops_late_and_the_store_fails(
    machine: Machine, bucket: Path
) -> None:
    """The agent would end 20 s before the written end by itself, so that the mover has these."""
    script = (
        "import shutil, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"shutil.rmtree({str(bucket)!r})\n"
        f"open({str(bucket)!r}, 'w').close()\n"
        "open('out/a', 'w').write('lost')\n"
        "time.sleep(600)\n"
    )
    began = time.time()
    _, why, owned = machine.try_to_hand_over(saved(machine, bucket, script, drain=20.0), LongAccount)
    owned.give_up()
    status = machine.ends()
    assert (status.outcome, status.limit) == (Outcome.CANCELLED, "lifetime"), why
    assert status.unsaved.startswith("1 file of out (a): ")
    assert began + 40.0 < status.ended < began + 60.0


def test_a_run_whose_agent_is_killed_has_all_saved_that_was_there(machine: Machine, bucket: Path) -> None:
    machine.hand_over(saved(machine, bucket, f"{WRITES}import time\ntime.sleep(600)\n")).give_up()
    eventually((machine.project / "out" / "log").exists, 60, "the last file")
    [instance] = sky.Local().instances(pool=machine.claim.run)
    [agent] = children(keeper_of(instance))
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: kept(bucket) == WRITTEN, 30, "the files in the bucket")
    eventually(lambda: not Path(instance.detail["folder"]).exists(), 30, "the end of the node")
    assert stored.stored(machine.folder) is None


# --- before anything is rented -------------------------------------------------------------------------------


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    """A cloud, and a project in the current folder."""
    folder = tmp_path / f"p{secrets.token_hex(3)}"
    folder.mkdir()
    (folder / "train.py").write_text(WRITES)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as made:
        yield made


def run_of(cloud: FakeCloud, **options: Any) -> WholeRun:
    name = f"kept-{secrets.token_hex(3)}"
    given: dict[str, Any] = {"name": name, "max_lifetime": 3600.0, "detach": True, **options}
    return WholeRun(Target.of(["train.py"]), Asked({"provider": cloud}, **given), _Printer())


def with_credentials(life: float) -> Issuer:
    issuer = Issuer(Bucket("s3://models/x"))
    issuer._last = Credentials(("an id", "a secret", "a token"), 1, life, clock.elapsed())
    return issuer


def logs_in(monkeypatch: pytest.MonkeyPatch, bucket: Bucket, issuer: Issuer | None = None) -> None:
    """Have the folder of a run kept in this bucket, which is not tried."""

    def checked(folders: Sequence[SaveFolder], tell: object) -> list[SaveFolder]:
        return [SaveFolder(each.path, bucket, (), issuer) for each in folders]

    monkeypatch.setattr(whole_run, "checked", checked)


@pytest.mark.parametrize(("life", "is_refused"), [(7190.0, True), (7210.0, False)])
def test_temporary_credentials_are_refused_unless_they_outlast_the_run(
    life: float, is_refused: bool, cloud: FakeCloud, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs_in(monkeypatch, Bucket("s3://models/x"), with_credentials(life))
    run = run_of(cloud, buckets={"out": f"file://{bucket}"})
    said = (
        r"with detach=True, nobody renews the temporary credentials of s3://models/x, which may last 1\.0 hours: name"
    )
    with pytest.raises(UsageError, match=said) if is_refused else contextlib.nullcontext():
        run.check()
    assert cloud.count() == 0


def test_a_token_that_expires_nobody_knows_when_is_refused(
    cloud: FakeCloud, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs_in(monkeypatch, Bucket("s3://models/x", "http://127.0.0.1:9", keys=("ID", "SECRET", "TOKEN")))
    with pytest.raises(UsageError, match=r"nobody renews the token among the keys .* nothing says when it expires"):
        run_of(cloud, buckets={"out": f"file://{bucket}"}).check()
    run_of(cloud, buckets={"out": f"file://{bucket}"}, detach=False).check()
    assert cloud.count() == 0


def test_a_lifetime_that_leaves_the_program_no_time_is_refused(cloud: FakeCloud, bucket: Path) -> None:
    with pytest.raises(
        UsageError, match=r"the last 145 s of the lifetime may be needed to save out.*longer max_lifetime="
    ):
        run_of(cloud, buckets={"out": f"file://{bucket}"}, max_lifetime=145.0).check()
    run_of(cloud, buckets={"out": f"file://{bucket}"}, max_lifetime=146.0).check()
    assert cloud.count() == 0


def test_credentials_count_as_long_as_there_are_no_newer_ones() -> None:
    issuer = with_credentials(100.0)
    assert issuer.lasts(1) == pytest.approx(100.0, abs=5.0)
    assert issuer.lasts(2) == 0.0


def test_a_machine_whose_credentials_do_not_last_gets_no_run(
    cloud: FakeCloud, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were renewed last when the client could reach the provider last."""
    monkeypatch.setattr(whole_run, "_TO_RENEW", 0.1)
    monkeypatch.setattr(ProgramRun, "logins_last", lambda run: 60.0)
    run = run_of(cloud, buckets={"out": f"file://{bucket}"})
    run.check()
    with pytest.raises(SkypoolError, match=r"not started, as nobody would renew .* end in 1:00 min, before its end in"):
        run.run()
    assert cloud.count() == 0


def test_the_machine_needs_not_stay_if_the_folder_is_kept_in_a_bucket(
    cloud: FakeCloud, bucket: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"as by keep='1h', or have what it saves kept in a bucket, as by save="):
        run_of(cloud).check()
    run = run_of(cloud, buckets={"out": f"file://{bucket}"})
    run.check()
    assert cloud.count() == 0
    assert run.run() == 0
    assert "its folders and its end are in their buckets, and its output is lost" in capsys.readouterr().err
    eventually(lambda: not [each for each in cloud.instances() if each.state != "ended"], 60, "the machine's end")
    assert kept(bucket) == WRITTEN
    record = record_of(run.name)
    noted = left_uploads.Noted(record.session, datetime.now(UTC), (Bucket(f"file://{bucket}"),))
    monkeypatch.setattr(left_uploads, "noted", lambda: [noted])  # folders are not noted
    assert ask_machines(Ledger.here(), [record]) == {}
    assert (state := state_of(record_of(run.name), time.time())) is not None
    assert state.word == "ended"


# --- what is stored ------------------------------------------------------------------------------------------


def test_what_is_told_of_a_folder_says_what_is_saved_nowhere() -> None:
    whole = FolderState("out", "ended", whole=True, files=3, bytes=12, url="file:///x", trouble="an old one")
    assert KeptFolder.of("out", whole).lost == ""
    begun = FolderState("out", "ended", files=3, bytes=12)  # a checkpoint of which its program had not written all
    assert KeptFolder.of("out", begun).lost == ""
    names = ("a", "b" * 500, "c\x1b[31m")
    left = FolderState("out", "ended", unsaved=12, names=names, trouble="the store refuses")
    lost = KeptFolder.of("out", left).lost
    assert lost.startswith("12 files of out (a, b")
    assert lost.endswith("): the store refuses")
    assert "\x1b" not in lost
    assert len(lost) < 400
    late = FolderState("out", "ending", unsaved=1, names=("a",))
    assert KeptFolder.of("out", late).lost == "1 file of out (a): there was no time for it"
    assert KeptFolder.of("out", None).lost.startswith("files of the last seconds of out perhaps: its machine has not")


def test_a_status_has_the_folders_of_its_run_and_one_of_before_has_none() -> None:
    folders = KeptFolder("out", "s3://models/x", 3, 12), KeptFolder("log", "", 0, 0, 2, ("a", "b"), "no answer")
    status = RunStatus(CLAIM, Outcome.ENDED, 0, 1, 100.0, folders=folders)
    said = json.loads(json.dumps(status.to_json()))
    assert RunStatus.from_json(said) == status
    assert status.unsaved == "2 files of log (a, b): no answer"
    del said["folders"]
    assert RunStatus.from_json(said) == replace(status, folders=())


@pytest.mark.parametrize("wrong", [None, 7, [7], [{}], [{"id": "a"}], {"out": 1}, "out"])
def test_folders_that_make_no_sense_are_refused(wrong: object) -> None:
    said = {**RunStatus(CLAIM, Outcome.ENDED, 0, 1, 100.0).to_json(), "folders": wrong}
    with pytest.raises(SkypoolError, match="the status of a run is not valid"):
        RunStatus.from_json(said)


def test_what_a_machine_says_of_folders_is_short_and_without_control_characters() -> None:
    each = {
        "id": "\x1b",
        "url": "u" * 5000,
        "files": 1,
        "bytes": 1,
        "unsaved": 1,
        "names": ["\n"] * 99,
        "why": "w" * 999,
    }
    said = {**RunStatus(CLAIM, Outcome.ENDED, 0, 1, 100.0).to_json(), "folders": [each] * 99}
    found = RunStatus.from_json(said)
    assert (len(found.folders), len(found.folders[0].names)) == (64, 5)
    assert len(found.folders[0].why) <= 300
    assert found.unsaved.isprintable()


@pytest.mark.parametrize(
    "what", ["another run", "another hand-over", "forged", "no JSON", "large", "nothing", "no folder"]
)
def test_an_end_in_a_bucket_that_is_of_another_run_or_not_valid_is_none(
    what: str, tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    handed(cloud_at(tmp_path / "cloud"))
    place = bucket / ".skypool" / "runs" / stored.note_name(CLAIM, HEIR)
    place.parent.mkdir(parents=True)
    noted = left_uploads.Noted(record_of().session, datetime.now(UTC), (Bucket(f"file://{bucket}"),))
    monkeypatch.setattr(left_uploads, "noted", lambda: [noted])
    status = RunStatus(CLAIM, Outcome.ENDED, 0, 1, time.time())
    place.write_text(stored.note_of(status, HEIR, SEAL))
    assert end_in_bucket(record_of()) == status
    reasons = {
        "forged": "was not written by the run",
        "no JSON": "cannot be read",
        "large": "cannot be read: it has 1,0",
        "no folder": "is no folder here",
    }
    why = reasons.get(what)
    match what:
        case "another run":
            place.write_text(stored.note_of(replace(status, claim=Claim("other")), HEIR, SEAL))
        case "another hand-over":
            place.write_text(stored.note_of(status, "0" * 64, SEAL))
        case "forged":
            place.write_text(stored.note_of(status, HEIR, "0" * 64))
        case "no JSON":
            place.write_text("[" * 100_000)
        case "large":
            place.write_text(stored.note_of(replace(status, saved="x" * stored.MOST), HEIR, SEAL))
        case "nothing":
            place.unlink()
        case "no folder":
            shutil.rmtree(bucket)
    with pytest.raises(SkypoolError, match=why) if why else contextlib.nullcontext():
        assert end_in_bucket(record_of()) is None


# --- a real store --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rented_machine_saves_alone_to_a_store_and_its_keys_are_on_no_disk(
    cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := stores.missing_s3():
        pytest.skip(why)
    (tmp_path / "store").mkdir()
    monkeypatch.setenv("SKYPOOL_BUCKET", "")
    with stores.seaweedfs(tmp_path / "store") as served:
        for identity in ("reader", "run"):
            for name, value in zip(KEYS, (identity, secret_of(identity)), strict=True):
                monkeypatch.setenv(name, value)
            run = run_of(cloud, buckets={"out": sky.Bucket("s3://models/runs/alone", served.endpoint, keys=KEYS)})
            if identity == "reader":
                with pytest.raises(UsageError, match="cannot be used to save out"):
                    run.check()
        assert cloud.count() == 0
        (Path.cwd() / "train.py").write_text(f"{WRITES}import time\ntime.sleep(2)\n")
        run.check()
        assert run.run() == 0
        [place] = (tmp_path / "cloud").glob(f"machines/*/home/.skypool/heads/{run.name}-1")
        status: RunStatus | None = None
        searched = set[Path]()

        def is_over() -> bool:
            nonlocal status
            for each in (tmp_path / "cloud").rglob("*"):
                with contextlib.suppress(OSError):  # it is gone
                    if each.is_file() and each not in searched:
                        assert secret_of("run").encode() not in each.read_bytes(), each
                        searched.add(each)
            status = status or stored.stored(place)
            return not [each for each in cloud.instances(pool=run.name) if each.state != "ended"]

        eventually(is_over, 90, "the end of the machine")
        found = stores.client(served.endpoint).list_objects_v2(Bucket="models", Prefix="runs/alone/")["Contents"]
        assert ask_machines(Ledger.here(), [record_of(run.name)]) == {}
    there = {each["Key"].removeprefix("runs/alone/"): each["Size"] for each in found}
    assert {name: size for name, size in there.items() if not name.startswith(".skypool")} == {
        name: len(text) for name, text in WRITTEN.items()
    }
    assert len(searched) > 10
    assert status is None or (status.returncode, status.unsaved) == (0, "")
    assert (state := state_of(record_of(run.name), time.time())) is not None
    assert state.word == "ended", "its end was read from the bucket"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_temporary_credentials_that_outlast_it_is_handed_over_and_saves(
    cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sts.short_lived(7300.0) as made:
        session = {"ACCESS_KEY_ID": "ASIASESSION", "SECRET_ACCESS_KEY": "a secret", "SESSION_TOKEN": "its token"}
        sts.log_in(monkeypatch, {f"AWS_{name}": value for name, value in session.items()})
        bucket = Bucket("s3://models/runs/x", made.endpoint, role=sts.ROLE)
        run = run_of(cloud, buckets={"out": bucket})
        run.check()
        assert run.run() == 0
        eventually(lambda: not [each for each in cloud.instances() if each.state != "ended"], 60, "the machine's end")
        owner = store.client(Bucket("s3://models", made.endpoint))
        there = {each["Key"].removeprefix("runs/x/") for each in owner.list_objects_v2(Bucket="models")["Contents"]}
        assert {each for each in there if not each.startswith(".skypool")} == WRITTEN.keys()
        assert ask_machines(Ledger.here(), [record_of(run.name)]) == {}
        assert (state := state_of(record_of(run.name), time.time())) is not None
        assert state.word == "ended"
