"""Calls that belong to their machine, `sky.run(call, detach=True)`, and their results. Real processes."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, assert_type, cast

import pytest

import skypool as sky
from skypool.buckets.bucket import Bucket
from skypool.data import left_uploads
from skypool.errors import LifetimeExceeded, SkypoolError, UsageError
from skypool.head.states import Claim, Outcome
from skypool.rental.ledger import Ledger
from skypool.rental.records import RunEnd
from skypool.runs import call_program, call_results, stored
from skypool.runs.detached_run import DetachedRun
from skypool.runs.stored import KeptResult, RunStatus
from skypool.testing import FakeCloud, Stock
from skypool.wire import codec
from tests.conftest import eventually
from tests.handed_runs import HEIR, SEAL, cloud_at, handed, record_of
from tests.lab import stores
from tests.lab.stores import KEYS, secret_of

CLAIM = Claim("train")
SCRIPT = """
    import os, signal, sys, threading
    import skypool as sky
    import own_shapes

    class Wrong(Exception):
        pass

    @sky.compute(retries=1)
    def work(n):
        import own_late  # which this process has not loaded
        print("works in", sky.instance_info().pool)
        return own_shapes.Square(n + own_late.ONE)

    run = sky.run(work(4), name=sys.argv[1], max_lifetime="10m", keep="5m", detach=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@sky.compute
def doubled(x: float) -> float:
    return 2 * x


@sky.compute
def fails(x: int) -> int:
    if x:
        raise KeyError(f"no {x}")
    return x


@sky.compute
def unpicklable() -> Any:
    import threading

    return {"lock": threading.Lock()}


@sky.compute
def waits(x: int) -> int:
    Path("began").touch()
    while True:
        time.sleep(0.1)


@sky.compute
def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@sky.compute
def writes(x: int) -> bytes:
    Path("out").mkdir(exist_ok=True)
    Path("out", "model").write_text(str(x))
    return b"x" * x


@sky.compute
def counts() -> Iterator[int]:
    yield 1


@pytest.fixture
def name() -> Iterator[str]:
    made = f"calls-{secrets.token_hex(3)}"
    yield made
    driver = sky.Local()
    driver.terminate(driver.instances(pool=made))


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the folders in which calls run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "skypool" / "runs" / "projects"


# --- real runs -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_value_of_a_call_whose_client_was_killed_is_read_from_other_processes(
    name: str, tmp_path: Path, copies: Path
) -> None:
    (tmp_path / "own_shapes.py").write_text(
        "class Square:\n    def __init__(self, side):\n        self.area = side * side\n"
    )
    (tmp_path / "own_late.py").write_text("ONE = 1\n")
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    killed = subprocess.run([sys.executable, "script.py", name], cwd=tmp_path, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    gets = f"import skypool; run = skypool.Run.get({name!r})\n"
    asks = f"{gets}print(run.result(timeout=60).area, run.returncode, *run.logs())"
    for _ in range(2):
        said = subprocess.run(
            [sys.executable, "-c", asks], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
        )
        assert said.stdout == f"25 0 works in {name}\n"
    sky.Run.get(name).end()
    asks = f"{gets}print(run.result().area, run.returncode)"
    said = subprocess.run([sys.executable, "-c", asks], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout == "25 0\n", "it stays on this computer"
    [copy] = copies.iterdir()
    assert not [*copy.iterdir()], "its arguments are removed"


@pytest.mark.slow
def test_an_exception_comes_with_its_traceback_and_a_value_that_cannot_be_packed_is_named(
    name: str, copies: Path
) -> None:
    run = sky.run(fails(3), name=name, max_lifetime="10m", detach=True)
    with pytest.raises(KeyError, match="no 3") as caught:
        run.result()
    assert run.returncode == 1
    assert "in fails" in str(caught.value.__cause__)
    assert any("KeyError: 'no 3'" in line for line in run.logs())
    run.end()
    again = sky.run(unpicklable(), name=name, max_lifetime="10m", detach=True)
    with pytest.raises(sky.PickleError, match=r"the result of unpicklable.*lock"):
        again.result()


@pytest.mark.slow
def test_a_call_that_is_cancelled_or_whose_process_dies_has_no_result(name: str, copies: Path) -> None:
    run = sky.run(waits(3), name=name, max_lifetime="10m", detach=True)
    eventually(lambda: [*copies.glob("*/began")] != [], 60, "its begin")
    with pytest.raises(TimeoutError, match=r"is not over after 0\.2"):
        run.result(timeout=0.2)
    assert run.cancel() == 130
    with pytest.raises(CancelledError, match="has no result, as it was cancelled"):
        run.result()
    run.end()
    died = sky.run(dies(), name=name, max_lifetime="10m", detach=True)
    with pytest.raises(SkypoolError, match="has ended with signal 9 before it returned"):
        died.result()


@pytest.mark.slow
def test_the_result_is_in_the_bucket_of_a_folder_when_the_machine_is_gone(
    name: str, tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    run = sky.run(writes(3_000_000), name=name, max_lifetime="10m", save={"out": f"file://{bucket}"}, detach=True)
    assert run.wait() == 0
    assert (bucket / "model").read_text() == "3000000"
    record = record_of(name)
    assert record.run is not None
    noted = left_uploads.Noted(record.session, datetime.now(UTC), (Bucket(f"file://{bucket}"),))
    monkeypatch.setattr(left_uploads, "noted", lambda: [noted])
    run.end()

    def gone(*_: object) -> bytes:
        raise sky.ConnectionLost("it is gone")

    monkeypatch.setattr(call_results, "_from_machine", gone)
    assert run.result() == b"x" * 3_000_000


@pytest.mark.slow
def test_a_result_that_was_changed_on_the_machine_is_not_unpickled(name: str, tmp_path: Path, copies: Path) -> None:
    run = sky.run(doubled(3), name=name, max_lifetime="10m", detach=True)
    assert run.wait() == 0
    [file] = (Path(os.environ["XDG_STATE_HOME"]) / "skypool" / "heads").glob(f"{name}-*/output/1/0/result")
    file.write_bytes(evil(tmp_path / "ran"))
    with pytest.raises(SkypoolError, match="is not the one that the run has stored"):
        run.result()
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_value_comes_from_a_rented_machine_while_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud:
        run = sky.run(doubled(4), cloud, image=sky.Image(env={"A": "b"}), budget=20, keep="10m", detach=True)
        assert_type(run, DetachedRun[float])
        assert run.result() == 8.0
        assert [each.state for each in cloud.instances(pool=run.name)] == ["running"], "it is kept"
        run.end()
        assert sky.Run.get(run.name).result() == 8.0
        other = sky.run(doubled(5), cloud, budget=20, keep="10m", detach=True)
        assert other.wait() == 0
        other.end()
        with pytest.raises(SkypoolError, match=f"the result of run {other.name} was on its machine: "):
            other.result()


@pytest.mark.slow
def test_a_large_value_comes_from_a_store_when_its_machine_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := stores.missing_s3():
        pytest.skip(why)
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYPOOL_BUCKET", "")
    for variable, value in zip(KEYS, ("run", secret_of("run")), strict=True):
        monkeypatch.setenv(variable, value)
    with (
        stores.seaweedfs(tmp_path / "store") as served,
        FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as cloud,
    ):
        bucket = sky.Bucket("s3://models/runs/alone", served.endpoint, keys=KEYS)
        run = sky.run(writes(20_000_000), cloud, budget=20, save={"out": bucket}, detach=True)
        assert run.wait() == 0
        run.end()
        assert cloud.count() == 0
        assert run.result() == b"x" * 20_000_000


# --- results of others ---------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def evil(path: Path) -> bytes:
    return pickle.dumps((True, [pickle.dumps(Evil(path))]))


@pytest.mark.parametrize(
    "what", ["right", "another file", "as long", "another end", "no signature", "no file", "no result"]
)
def test_only_the_result_of_a_signed_end_is_unpickled(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    handed(cloud_at(tmp_path / "cloud"))
    notes = tmp_path / "bucket" / ".skypool" / "runs"
    notes.mkdir(parents=True)
    record = record_of()
    noted = left_uploads.Noted(record.session, datetime.now(UTC), (Bucket(f"file://{tmp_path / 'bucket'}"),))
    monkeypatch.setattr(left_uploads, "noted", lambda: [noted])
    data = pickle.dumps((True, [bytes(each) for each in codec.dumps([1, 2])]))
    bad = evil(tmp_path / "ran")
    place = notes / stored.result_name(CLAIM, HEIR)
    place.write_bytes(data)
    key = SEAL
    match what:
        case "another file":
            place.write_bytes(bad)
        case "as long":
            bad = bad.ljust(len(data), b"\0")
            data = data.ljust(len(bad), b"\0")
            place.write_bytes(bad)
        case "another end":
            data, key = bad, "0" * 64
            place.write_bytes(bad)
        case "no signature":
            data = bad
            place.write_bytes(bad)
            assert record.run is not None
            record = replace(record, run=replace(record.run, seal=""))
        case "no file":
            place.unlink()
    (tmp_path / "kept").write_bytes(data)
    digest = call_program.digest_of(tmp_path / "kept")
    assert digest is not None
    status = RunStatus(CLAIM, Outcome.ENDED, 0, 1, time.time(), result=KeptResult(*digest))
    status = replace(status, result=None) if what == "no result" else status
    (notes / stored.note_name(CLAIM, HEIR)).write_text(stored.note_of(status, HEIR, key))
    end = RunEnd(Outcome.ENDED, 0)

    def gone(*_: object) -> bytes:
        raise sky.ConnectionLost("it is gone")

    monkeypatch.setattr(call_results, "_from_machine", gone)
    if what == "right":
        assert call_results.result_of(record, Ledger.here(), end, 1.0) == [1, 2]
        place.unlink()
        assert call_results.result_of(record, Ledger.here(), end, 1.0) == [1, 2], "it is kept here"
        return
    why = {
        "another file": "somebody has changed it",
        "as long": "somebody has changed it, and it was not unpickled",
        "another end": "was not written by the run",
        "no signature": "was on its machine: it is gone",
        "no file": "is not in file:",
        "no result": "has no result: it is no call",
    }[what]
    with pytest.raises(SkypoolError, match=why):
        call_results.result_of(record, Ledger.here(), end, 1.0)
    assert not (tmp_path / "ran").exists()


def test_the_errors_of_a_run_without_a_result_are_those_of_attached_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    handed(cloud_at(tmp_path / "cloud"))

    def none(record: Any, end: RunEnd, patience: float) -> bytes:
        raise call_results._none(record, end)

    monkeypatch.setattr(call_results, "_from_machine", none)
    for end, kind in (
        (RunEnd(Outcome.CANCELLED, 130, limit="lifetime"), LifetimeExceeded),
        (RunEnd(Outcome.CANCELLED, 130, limit="budget"), sky.BudgetExceeded),
        (RunEnd(Outcome.CANCELLED, 130), CancelledError),
        (RunEnd(Outcome.LOST), SkypoolError),
    ):
        with pytest.raises(kind, match="run train has no result"):
            call_results.result_of(record_of(), Ledger.here(), end, 1.0)


@pytest.mark.parametrize("wrong", [7, {}, {"bytes": 1, "sha256": "0"}, {"bytes": -1, "sha256": "0" * 64}])
def test_a_stored_result_that_makes_no_sense_is_refused(wrong: object) -> None:
    said = {**RunStatus(CLAIM, Outcome.ENDED, 0, 1, 100.0).to_json(), "result": wrong}
    with pytest.raises(SkypoolError, match="the status of a run is not valid"):
        RunStatus.from_json(said)


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"procs": 2}, "has the option procs"),
        ({"timeout": "5m"}, "has the option timeout, .* max_lifetime= ends it"),
        ({"grace": 3}, "has the option grace"),
        ({"node": "all"}, "has the option node"),
        ({"output": "capture"}, "has the option output='capture'"),
        ({"retry_on": ValueError, "retries": 1}, "has the option retry_on"),
    ],
)
def test_options_without_an_effect_are_refused_before_anything_is_rented(options: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        sky.run(doubled(2).with_options(**options), max_lifetime="10m", detach=True)


def test_calls_that_need_their_client_are_refused() -> None:
    with pytest.raises(UsageError, match="counts is a generator function"):
        sky.run(counts(), max_lifetime="10m", detach=True)
    group = doubled(1) & doubled(2)
    for each in group.calls:
        each.sent = True
    with pytest.raises(UsageError, match="run takes one call"):
        sky.run(group, max_lifetime="10m", detach=True)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="detach=True leaves the run alone with its machine"):
        sky.run(doubled(1), detach=True)
    with pytest.raises(UsageError, match="takes a run on one node"):
        sky.run(doubled(1), nodes=2, max_lifetime="10m", detach=True)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="with detach=True, nobody knows yet how the program ends"):
        sky.run(doubled(1), max_lifetime="10m", detach=True, check=True)  # type: ignore[call-overload]
    with open("/dev/null") as file, pytest.raises(sky.PickleError):
        sky.run(doubled(cast(Any, file)), max_lifetime="10m", detach=True)
