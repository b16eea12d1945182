"""Folders that nodes keep in a bucket: saved while calls and programs write them, and back before the next ones."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.data.folder_saver import PART
from skypool.data.save_asked import save_asked, split
from skypool.errors import LifetimeExceeded, UsageError
from skypool.model import Need, Offer
from skypool.pool import saving
from skypool.testing import FakeCloud
from skypool.wire.save_orders import SOCKET, FolderState
from tests.conftest import eventually, nodes, processes_of
from tests.lab import stores
from tests.lab.stores import secret_of
from tests.lab.sts import log_in
from tests.soak._faulty_way import FaultyWay

KEYS = ("SAVE_ID", "SAVE_SECRET")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of a bucket. Calls run in a folder beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


def kept(place: Path) -> dict[str, str]:
    """The files of a bucket, without those of skypool's own."""
    return {
        str(each.relative_to(place)): each.read_text()
        for each in sorted(place.rglob("*"))
        if each.is_file() and ".skypool" not in each.parts
    }


@sky.compute
def write(names: Mapping[str, str]) -> list[str]:
    """Write files into the folder "out", and return all that are there."""
    for name, text in names.items():
        path = Path("out", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sorted(str(each.relative_to("out")) for each in Path("out").rglob("*") if each.is_file())


@sky.compute
def empty() -> None:
    shutil.rmtree("out")


@sky.compute
def go_on_writing(seconds: float) -> None:
    Path("out").mkdir(exist_ok=True)
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        Path("out", f"file-{number:04}").write_text(str(number))
        number += 1
        time.sleep(0.02)


def pool(place: Path, **options: Any) -> sky.ComputePool:
    asked: dict[str, Any] = {"provider": "local", "slots": 1, "console": "off", "save": {"out": f"file://{place}"}}
    return sky.ComputePool(**{**asked, **options})


def heard(pool: sky.ComputePool) -> list[events.FolderSaved]:
    found: list[events.FolderSaved] = []
    pool.events.listen(lambda event: found.append(event) if isinstance(event, events.FolderSaved) else None)
    return found


# --- what is asked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save", "why"),
    [
        ({"out": "s3://models/x"}, "needs keys that a machine may have"),
        ({"out": "s3a://models/x"}, "did you mean s3://"),
        ({"out": "file:///a", "out/b": "file:///b"}, "out and out/b are inside each other"),
        ({"out": "file:///a", "./out/": "file:///b"}, "inside each other"),
        ({"out": "file:///a", "other": "file:///a/b"}, "are inside each other, so that files"),
        ({".": "file:///a"}, "a folder below the one"),
        ({"../out": "file:///a"}, "a folder below the one"),
        ({"": "file:///a"}, "takes the paths of folders"),
        ({"out/.skypool-x": "file:///a"}, "are skypool's own"),
        (["out"], "takes folders and their places"),
        ({"out": 7}, "not by 7"),
    ],
)
def test_what_cannot_be_saved_is_refused_where_it_is_written(
    save: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, {})
    with pytest.raises(UsageError, match=why):
        sky.ComputePool("local", save=save)


def test_places_that_begin_alike_are_no_trouble() -> None:
    found = save_asked({"out": "file:///a/b", "out2": "file:///a/b2"})
    assert [each.path for each in found] == ["out", "out2"]


def test_a_key_without_a_value_is_named_and_values_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = sky.Bucket("s3://models/x", "http://127.0.0.1:9", keys=KEYS)
    with pytest.raises(UsageError, match="SAVE_ID, which s3://models/x needs, has no value"):
        save_asked({"out": bucket}, {})
    found = save_asked({"out": bucket}, {"SAVE_ID": "an id", "SAVE_SECRET": "a secret"})
    assert found[0].values == ("an id", "a secret")
    assert "a secret" not in repr(found)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("out", ("out", "")),
        ("out=s3://models/x", ("out", "s3://models/x")),
        ("a=b=file:///x", ("a=b", "file:///x")),
        ("a=b", ("a=b", "")),
    ],
)
def test_a_folder_and_its_place_are_told_apart(said: str, found: tuple[str, str]) -> None:
    assert split(said) == found


def test_a_store_that_cannot_be_used_is_told_before_anything_is_rented(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVE_ID", "a")
    monkeypatch.setenv("SAVE_SECRET", "b")
    monkeypatch.setattr("skypool.buckets.store.PATIENCE", 0.5)
    cloud = FakeCloud()
    bucket = sky.Bucket("s3://models/x", "http://127.0.0.1:9", keys=KEYS)
    asked = pool(place, provider=cloud, save={"out": bucket})
    with pytest.raises(UsageError, match="cannot be used to save out: list: the store cannot be reached"):
        asked.start()
    assert not cloud.instances()


def test_a_drain_of_more_than_a_fifth_of_the_lifetime_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match=r"drain=60 s, .* is over a fifth of the 100 s"):
        pool(place, max_lifetime=100, drain=60).start()


class OfStrangers(sky.Local):
    """This machine, sold as that of a stranger."""

    def offers(self, need: Need) -> list[Offer]:
        return [replace(each, trust="data") for each in super().offers(need)]


def test_machines_of_strangers_are_refused_before_they_are_rented(place: Path) -> None:
    for options in ({"provider": OfStrangers()}, {"trust": "data"}):
        with pytest.raises(UsageError, match="this-machine is a machine of a stranger, who could read the keys"):
            pool(place, **options).start()
    with pool(place, provider=OfStrangers(), trust="full") as trusted:
        write({"a": "1"}) >> trusted
    assert kept(place) == {"a": "1"}


# --- calls ---------------------------------------------------------------------------------------------------


def test_what_calls_write_is_saved_and_there_for_the_next_pool(place: Path) -> None:
    files = {"a": "1", "deep/er/b": "2", "step-3/model": "3", "ä b": "4"}
    with pool(place) as first:
        told = heard(first)
        write(files) >> first
    assert kept(place) == files
    assert not [*(place / ".skypool").rglob("unfinished/*/*")]
    assert (told[-1].phase, told[-1].whole, told[-1].files, told[-1].unsaved) == ("ended", True, 4, 0)
    os.rename("out", "former")
    with pool(place) as second:
        told = heard(second)
        assert write({"step-4/model": "5"}) >> second == sorted({*files, "step-4/model"})
    assert [each.restored for each in told][-1] == 4
    assert kept(place) == {**files, "step-4/model": "5"}


def test_what_is_there_and_not_in_the_bucket_is_moved_aside(place: Path) -> None:
    with pool(place) as first:
        write({"a": "1"}) >> first
    Path("out", "leftover").write_text("2")
    with pool(place) as second:
        told = heard(second)
        assert write({}) >> second == ["a"]
    aside = Path(told[-1].aside)
    assert (aside / "leftover").read_text() == "2"


def test_a_program_that_empties_its_folder_loses_nothing(place: Path) -> None:
    with pool(place) as first:
        write({"step-1/model": "x" * 10_000}) >> first
    with pool(place) as second:
        empty() >> second
        write({"log": "began"}) >> second
    assert kept(place) == {"step-1/model": "x" * 10_000, "log": "began"}


def test_a_folder_is_saved_at_once_if_its_program_asks(place: Path) -> None:
    @sky.compute
    def flush() -> sky.Flushed:
        Path("out").mkdir(exist_ok=True)
        Path("out/a").write_text("1")
        return sky.saved("out").flush(timeout=30)

    with pool(place) as made:
        done = flush() >> made
        assert (done.whole, done.files, done.bytes, done.unsaved) == (True, 1, 1, ())
        assert kept(place) == {"a": "1"}
        with pytest.raises(UsageError, match="another is not kept in a bucket on this machine; those that are: out"):
            sky.compute(lambda: sky.saved("another").flush())() >> made


def test_what_is_saved_is_shown_in_other_processes_and_in_the_report(place: Path) -> None:
    with pool(place, name="shown") as made:
        write({"a": "1"}) >> made
        eventually(lambda: kept(place), 30, "the file")
        eventually(lambda: made.samples.latest(), 30, "the first sample")

        def folder() -> list[str]:
            argv = [sys.executable, "-m", "skypool", "top", "shown", "--once"]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            lines = subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout.splitlines()
            at = next(n for n, each in enumerate(lines) if each.startswith("  folder"))
            return lines[at + 1].split()

        eventually(lambda: folder()[:6] == ["out", "0", "saving", "1", "1", "byte"], 30, "the line of the folder")
    html = made.report().html
    assert "Folders" in html
    assert f"file://{place}" in html


def test_nobody_waits_for_what_is_saved_nowhere() -> None:
    with pytest.raises(sky.SkypoolError, match="out is not saved here"):
        sky.saved("out").flush()


@pytest.mark.slow
def test_all_is_saved_before_the_lifetime_is_over(place: Path) -> None:
    began = time.monotonic()
    made = pool(place, max_lifetime=24, drain=4)
    with pytest.raises(LifetimeExceeded), made:
        go_on_writing(600) >> made
    assert time.monotonic() - began < 24
    assert made.explain().endswith(f"saves out to file://{place}; up to 4.0 s of the lifetime are kept for its end")
    assert kept(place).keys() == {each.name for each in Path("out").iterdir() if each.is_file()}
    assert len(kept(place)) > 50


@sky.compute
def flush() -> bool:
    return sky.saved("out").flush(timeout=60).whole


@sky.compute
def write_half() -> None:
    with Path("out/model").open("w") as file:
        file.write("ha")
        file.flush()
        time.sleep(600)


@pytest.mark.slow
def test_what_a_call_was_writing_that_is_stopped_replaces_no_former_file(place: Path) -> None:
    with pytest.raises(LifetimeExceeded), pool(place, max_lifetime=45, drain=4) as made:
        write({"model": "whole"}) >> made
        eventually(lambda: kept(place) == {"model": "whole"}, 30, "the whole file")
        write_half() >> made
    assert kept(place) == {"model": "whole", "model.snapshot": "ha"}


@pytest.mark.slow
def test_what_a_call_was_writing_that_takes_too_long_replaces_no_former_file_before_it_is_written_anew(
    place: Path,
) -> None:
    with pool(place) as made:
        write({"model": "whole"}) >> made
        flush() >> made
        with pytest.raises(TimeoutError):
            write_half.with_options(timeout=1)() >> made
        flush() >> made
        assert kept(place) == {"model": "whole", "model.snapshot": "ha"}
        write({"model": "whole, too"}) >> made
        flush() >> made
        assert kept(place) == {"model": "whole, too"}


LEFT = 99
"""The number of an open file that one call leaves to the next one."""


@sky.compute
def leave_half_open() -> None:
    with Path("out/model").open("w") as file:
        file.write("ha")
        file.flush()
        os.dup2(file.fileno(), LEFT)
    with suppress(BaseException):
        time.sleep(600)


@sky.compute
def finish_half() -> None:
    with open(LEFT, "w") as file:
        file.write("lf and half")


@pytest.mark.slow
def test_what_the_next_call_of_a_worker_has_finished_is_no_half_of_the_call_before(place: Path) -> None:
    with pool(place) as made:
        write({"model": "whole"}) >> made
        flush() >> made
        stopped = made.submit(leave_half_open.with_options(timeout=1))
        made.submit(finish_half).result(60)
        with pytest.raises(TimeoutError):
            stopped.result(60)
        time.sleep(1)  # the mover may see now that the file is closed
        flush() >> made
        assert kept(place) == {"model": "half and half"}


@sky.compute
def write_half_when_stopped() -> None:
    try:
        time.sleep(600)
    finally:
        with Path("out/model").open("w") as file:
            file.write("ha")
            file.flush()
            time.sleep(600)


@pytest.mark.slow
def test_what_a_call_was_writing_that_is_killed_after_its_grace_replaces_no_former_file(place: Path) -> None:
    with pool(place) as made:
        write({"model": "whole"}) >> made
        flush() >> made
        with pytest.raises(TimeoutError):
            write_half_when_stopped.with_options(timeout=1, grace=1)() >> made
        flush() >> made
        assert kept(place) == {"model": "whole", "model.snapshot": "ha"}


# --- processes that die --------------------------------------------------------------------------------------

CLIENT = """
    import sys, time
    import skypool as sky
    from tests.test_save import flush, go_on_writing, pool, write, write_half
    made = pool(sys.argv[1], lease=5, name=sys.argv[2]).start()
    if sys.argv[2] == "saved-half":
        write({"model": "whole"}) >> made
        flush() >> made
        going = made.submit(write_half)
    else:
        going = made.submit(go_on_writing, 600)
    print("at work", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def killed_client(place: Path, name: str) -> Iterator[None]:
    """Another client with a pool that is at work. It is killed after the block."""
    client = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), str(place), name], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with client:
        assert client.stdout is not None
        client.stdout.readline()
        try:
            yield
        finally:
            client.send_signal(signal.SIGKILL)


@pytest.mark.slow
def test_a_node_whose_client_is_killed_saves_what_is_left(place: Path) -> None:
    with killed_client(place, "saved-orphan"):
        eventually(lambda: Path("out/file-0020").exists(), 60, "the first files")
    eventually(lambda: not nodes("saved-orphan"), 60, "the end of the node")
    written = {each.name for each in Path("out").iterdir() if each.is_file()}
    eventually(lambda: kept(place).keys() == written, 30, "the last file")


@pytest.mark.slow
def test_what_a_call_was_writing_whose_client_is_killed_replaces_no_former_file(place: Path) -> None:
    with killed_client(place, "saved-half"):
        eventually(lambda: Path("out/model").read_text() == "ha", 60, "the half file")
    eventually(lambda: not nodes("saved-half"), 60, "the end of the node")
    assert kept(place) == {"model": "whole", "model.snapshot": "ha"}


@sky.compute
def write_half_and_talk() -> None:
    with Path("out/model").open("w") as file:
        file.write("ha")
        file.flush()
        while True:
            print("still at it", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("call", [write_half, write_half_and_talk], ids=["silent", "talking"])
def test_what_a_call_was_writing_whose_agent_is_killed_replaces_no_former_file(place: Path, call: Any) -> None:
    with pytest.raises(sky.ConnectionLost), pool(place, name="half-killed") as made:
        write({"model": "whole"}) >> made
        flush() >> made
        going = made.submit(call)
        eventually(lambda: Path("out/model").read_text() == "ha", 60, "the half file")
        movers = processes_in("half-killed", "skypool.data.mover")
        for each in movers:  # it is slow to look what the call writes
            os.kill(each, signal.SIGSTOP)
        for each in processes_in("half-killed", "skypool-agent"):
            os.kill(each, signal.SIGKILL)
        time.sleep(1)
        for each in movers:
            os.kill(each, signal.SIGCONT)
        going.result(60)
    eventually(lambda: kept(place) == {"model": "whole", "model.snapshot": "ha"}, 30, "the last file")


def processes_in(pool: str, words: str) -> list[int]:
    """The processes in the folders of a pool's nodes whose name or command line has these words."""
    folders = {str(each) for each in nodes(pool)}
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            said = (each / "comm").read_bytes() + (each / "cmdline").read_bytes()
            if os.readlink(each / "cwd") in folders and words.encode() in said:
                found.append(int(each.name))
    return found


@pytest.mark.slow
def test_a_node_whose_agent_is_killed_saves_what_is_left(place: Path) -> None:
    made = pool(place, name="agent-killed")
    with pytest.raises(sky.ConnectionLost), made:
        going = made.submit(go_on_writing, 600)
        eventually(lambda: Path("out/file-0020").exists(), 60, "the first files")
        for each in processes_in("agent-killed", "skypool-agent"):
            os.kill(each, signal.SIGKILL)
        going.result(60)
    written = {each.name for each in Path("out").iterdir() if each.is_file()}
    eventually(lambda: kept(place).keys() >= written, 30, "the last file")


def test_a_mover_that_is_killed_begins_again(place: Path) -> None:
    with pool(place, name="mover-killed") as made:
        write({"a": "1"}) >> made
        eventually(lambda: kept(place), 30, "the first file")
        for each in processes_in("mover-killed", "skypool.data.mover"):
            os.kill(each, signal.SIGKILL)
        write({"b": "2"}) >> made
        eventually(lambda: kept(place) == {"a": "1", "b": "2"}, 30, "the file after it")
        assert write({}) >> made == ["a", "b"]  # nothing was moved aside


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_whose_agent_ends_while_its_mover_waits_for_its_next_start_saves_what_is_left(
    place: Path, how: signal.Signals
) -> None:
    made = pool(place, name="both-killed", liveness=5)
    with suppress(sky.ConnectionLost), made:
        write({"a": "1"}) >> made
        eventually(lambda: kept(place), 30, "the first file")

        killed = set[int]()

        def next_ones() -> set[int]:
            return {*processes_in("both-killed", "skypool.data.mover")} - killed

        def has_begun() -> bool:
            with socket.socket(socket.AF_UNIX) as asked:
                return asked.connect_ex(str(nodes("both-killed")[0] / SOCKET)) == 0

        for _ in range(5):  # the next one begins after 8 seconds
            eventually(has_begun, 30, "the work of the mover")
            time.sleep(0.5)  # the agent knows of it
            for each in next_ones():
                os.kill(each, signal.SIGKILL)
                killed.add(each)
            eventually(next_ones, 30, "the next mover")
        time.sleep(1)  # it would have begun, if it did not wait
        Path("out/late").write_text("2")
        assert not has_begun()
        for each in processes_in("both-killed", "skypool-agent"):
            os.kill(each, how)
        eventually(lambda: kept(place) == {"a": "1", "late": "2"}, 30, "the last file")


@pytest.mark.slow
def test_a_node_of_a_pool_that_had_one_overwrites_no_file_of_the_first(place: Path) -> None:
    with FakeCloud() as cloud, pool(place, provider=cloud, nodes=1) as made:
        write({"state": "of 0"}) >> made
        eventually(lambda: kept(place) == {"state": "of 0"}, 30, "the first file")
        made.resize(2)
        made.wait_ready(2, timeout=60)
        made.send(write({"state": "of 1", "new": "of 1"}), node=1).result(60)
        eventually(lambda: "new" in kept(place), 30, "the file of the node that came")
        made.send(write({"state": "of 0, too", "new": "of 0"}), node=0).result(60)
    assert kept(place) == {
        "state": "of 0, too", "node-1/state": "of 1", "new": "of 1", "node-0/new": "of 0"
    }  # fmt: skip


def test_a_process_that_takes_a_pool_over_has_the_rest_saved(place: Path) -> None:
    first = pool(place, name="handed", linger="2m")
    with first:
        write({"a": "1"}) >> first
        Path("out/late").write_text("2")
    with sky.ComputePool.attach("handed", console="off") as second:
        write({"b": "3"}) >> second
        second.stop()
    assert kept(place) == {"a": "1", "late": "2", "b": "3"}


@pytest.mark.slow
def test_a_process_that_takes_a_pool_over_has_new_nodes_save_beside_the_old_ones(place: Path) -> None:
    save = {"out": f"file://{place}"}
    with FakeCloud() as cloud:
        with pool(place, provider=cloud, name="grown", nodes=1, linger="2m") as first:
            write({"a": "of 0"}) >> first
            eventually(lambda: kept(place) == {"a": "of 0"}, 30, "the first file")
        more: dict[str, Any] = {"image": sky.Image(), "provider": cloud, "console": "off", "save": save}
        with sky.ComputePool.attach("grown", **more) as second:
            second.resize(2)
            second.wait_ready(2, timeout=60)
            second.send(write({"a": "of 1", "b": "of 1"}), node=1).result(60)
            second.send(write({"c": "of 0"}), node=0).result(60)
            second.stop()
    assert kept(place) == {"a": "of 0", "node-1/a": "of 1", "b": "of 1", "c": "of 0"}


def judged(*told: tuple[int, int, str]) -> list[str]:
    """Return what is said of a folder after each state: bytes that came, whole files, and trouble."""
    arrivals = saving._Arrivals()
    return [
        arrivals.trouble(FolderState("out", "restoring", received=came, restored=files, trouble=trouble))
        for came, files, trouble in told
    ]


def test_a_folder_whose_files_break_off_again_and_again_is_given_up() -> None:
    again = [(1000, 0, ""), (0, 0, "the disk is full")] * 10
    assert judged(*again) == [*[""] * 19, "the disk is full"]
    whole = [each for number in range(30) for each in ((1000 + number, number, ""), (number, number, "slow"))]
    assert set(judged(*whole)) == {""}


def test_a_folder_of_which_nothing_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_TO_RESTORE", 0.0)
    assert judged((0, 0, ""), (1, 0, "503"), (1, 0, ""), (1, 0, "")) == ["", "503", "503", "503"]
    assert judged((1, 0, "503"), (2, 0, "")) == ["503", ""]


# --- checkpoints ---------------------------------------------------------------------------------------------


@sky.compute(procs=2)
def train(steps: int) -> tuple[int, str | None, list[str], int | None]:
    """Return where it began, what this rank had then, all files that were there, and what is safe at the end."""
    store = sky.Checkpoints("ckpt", keep=2)
    last = store.latest()
    began = last.step if last else 0
    had = (last.path / "model").read_text() if last else None
    there = sorted(each.name for each in last.path.iterdir()) if last else []
    for step in range(began + 1, began + steps + 1):
        with store.save(step, wait=step == began + steps) as folder:
            (folder / "model").write_text(f"{os.environ['RANK']} {step}")
            (folder / f"only-{os.environ['RANK']}").write_text("x")
    return began, had, there, store.safe()


def commits(place: Path) -> list[str]:
    return sorted(str(each.parent.relative_to(place)) for each in place.glob("step-*/attempt-*/COMMIT"))


def test_a_gang_goes_on_from_the_newest_checkpoint_of_all_ranks(place: Path) -> None:
    with pool(place, save={"ckpt": f"file://{place}"}) as made:
        assert train(3) @ made == [(0, None, [], 3)] * 2
        assert train(2) @ made == [(3, f"{rank} 3", ["model", "only-0", "only-1"], 5) for rank in range(2)]
    assert commits(place) == ["step-3/attempt-000001", "step-4/attempt-000002", "step-5/attempt-000002"]
    os.rename("ckpt", "former")
    with pool(place, save={"ckpt": f"file://{place}"}) as made:  # another machine, with nothing of it
        assert train(1) @ made == [(5, f"{rank} 5", ["model", "only-0", "only-1"], 6) for rank in range(2)]


def test_the_nodes_of_a_gang_are_one_attempt(place: Path) -> None:
    with FakeCloud() as cloud, pool(place, provider=cloud, nodes=2, save={"ckpt": f"file://{place}"}) as made:
        everywhere: Any = train.with_options(node="all")
        assert everywhere(2) @ made == [(0, None, [], 2)] * 4
        assert [each[0] for each in everywhere(1) @ made] == [2] * 4
    assert commits(place) == ["step-2/attempt-000001", "step-3/attempt-000002"]


def test_a_gang_of_another_client_of_the_same_pool_is_another_attempt(place: Path) -> None:
    with pool(place, name="handed-on", linger="2m", save={"ckpt": f"file://{place}"}) as first:
        assert train(2) @ first == [(0, None, [], 2)] * 2
    with sky.ComputePool.attach("handed-on", console="off") as second:
        assert [each[0] for each in train(1) @ second] == [2] * 2
        second.stop()


@sky.compute
def look_twice() -> list[int | None]:
    """Save and look with several objects, as the functions of a program do."""
    found = []
    for step in range(2):
        last = sky.Checkpoints("ckpt").latest()
        found.append(last.step if last else None)
        with sky.Checkpoints("ckpt").save((last.step if last else 0) + step + 1, wait=True) as folder:
            (folder / "model").write_text("x")
    return found


def test_objects_of_one_call_are_one_attempt_and_the_next_call_is_another(place: Path) -> None:
    with pool(place, save={"ckpt": f"file://{place}"}) as made:
        assert look_twice() >> made == [None, None]
        assert look_twice() >> made == [2, 2]
    assert commits(place) == ["step-2/attempt-000001", "step-3/attempt-000002", "step-4/attempt-000002"]


def test_checkpoints_without_a_bucket_stay_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SKYPOOL_MOVER", raising=False)
    store = sky.Checkpoints("ckpt", keep=2)
    assert store.latest() is None
    for step in (1, 2, 10):
        with store.save(step) as folder:
            (folder / "model").write_text(str(step))
    with pytest.raises(ZeroDivisionError), store.save(11):
        raise ZeroDivisionError
    last = sky.Checkpoints("ckpt").latest()
    assert last is not None
    assert (last.step, (last.path / "model").read_text(), store.safe()) == (10, "10", None)
    with pytest.raises(UsageError, match="step 10 was saved before in this attempt"), store.save(10):
        raise AssertionError("the block must not begin")
    assert len([*Path("ckpt").rglob("model")]) == 2
    with pytest.raises(UsageError, match="keep"):
        sky.Checkpoints("ckpt", keep=0)


# --- programs ------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
os.makedirs("out", exist_ok=True)
found = sorted(os.listdir("out"))
print("found", *found, flush=True)
with open(f"out/{len(found)}", "w") as file:
    file.write("saved")
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "skypool", "run", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)


def test_a_program_finds_what_the_run_before_has_saved(place: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    Path("pyproject.toml").write_text(f'[tool.skypool]\nbucket = "file://{place}"\n')
    place_of_run = place / "named" / "out"
    for number in range(2):
        done = run("--local", "--save", "out", "--name", "named", "train.py")
        assert (done.returncode, done.stdout.split()) == (0, ["found", *map(str, range(number))]), done.stderr
        assert f"saves    out to file://{place_of_run}\n" in done.stderr
        assert f"saved    1 file, 5 bytes, of out to file://{place_of_run}" in done.stderr
        assert kept(place_of_run) == {str(each): "saved" for each in range(number + 1)}
    shown = run("--local", "--save", f"out=file://{place}/other", "train.py", SKYPOOL_BUCKET="file:///nowhere")
    assert shown.returncode == 0
    assert kept(place / "other").keys() == {"0", "1", "2"}  # what is on the machine stays where the bucket has nothing


def test_the_time_that_is_kept_for_saving_is_told_before_anything_is_rented(place: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    done = run("--provider", "fake", "--budget", "20", "--dry-run", "--save", f"out=file://{place}", "train.py")
    assert done.returncode == 0, done.stderr
    assert f"saves    out to file://{place}; up to 2:00 min of the budget are kept for its end\n" in done.stderr


def test_wrong_folders_of_a_run_are_refused(place: Path) -> None:
    Path("train.py").write_text(PROGRAM)
    for words, why in (
        (["--save", "out", "--save", "other"], "names 2 folders without a bucket"),
        (["--save", f"out=file://{place}", "--save", "out"], "names out twice"),
        (["--save", "out=s3://models/x"], "needs keys that a machine may have"),
        (["--save", f"../out=file://{place}"], "takes a folder below the current one"),
    ):
        done = run("--local", *words, "train.py")
        assert done.returncode == 125
        assert why in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


# --- a real store --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stores.Store]:
    if why := stores.missing_s3():
        pytest.skip(why)
    with stores.seaweedfs(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_keys_are_nowhere_but_in_the_mover(place: Path, store: stores.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVE_ID", "run")
    monkeypatch.setenv("SAVE_SECRET", secret_of("run"))
    bucket = sky.Bucket("s3://models/runs/keys", store.endpoint, keys=KEYS)

    @sky.compute
    def environment() -> dict[str, str]:
        return dict(os.environ)

    with pool(place, provider=FakeCloud(), save={"out": bucket}) as made:
        write({"large": "x" * (20 << 20), "a": "1"}) >> made
        seen = json.dumps(environment() >> made)
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            seen += each.read_bytes().decode("latin-1") if each.exists() else ""
        for pid in processes_of("skypool.data.mover"):
            seen += Path(f"/proc/{pid}/environ").read_bytes().decode("latin-1")
    owner = stores.client(store.endpoint)
    found = owner.list_objects_v2(Bucket="models", Prefix="runs/keys/")["Contents"]
    assert {each["Key"]: each["Size"] for each in found} == {"runs/keys/a": 1, "runs/keys/large": 20 << 20}
    for state in (Path(os.environ["XDG_STATE_HOME"]), Path(os.environ["XDG_CACHE_HOME"])):
        for each in state.rglob("*"):
            seen += each.read_bytes().decode("latin-1") if each.is_file() else ""
    assert secret_of("run") not in seen


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_file_that_comes_back_slowly_after_an_error_is_not_given_up(
    place: Path, store: stores.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVE_ID", "run")
    monkeypatch.setenv("SAVE_SECRET", secret_of("run"))
    monkeypatch.setattr(saving, "_TO_RESTORE", 7.0)
    size = PART - 1  # such a file takes at least ten seconds on the slow way
    stores.client(store.endpoint).put_object(Bucket="models", Key="runs/slow/a", Body=b"x" * size)
    with FaultyWay(store.endpoint, random.Random(1)) as way:
        bucket = sky.Bucket("s3://models/runs/slow", way.endpoint, keys=KEYS)
        made = pool(place, save={"out": bucket})
        told: list[events.FolderSaved] = []

        def hear(event: events.Event) -> None:
            if isinstance(event, events.FolderSaved):
                told.append(event)
                if event.trouble:
                    way.fail("slow")
            elif isinstance(event, events.NodePhase) and event.phase == "bootstrapping":
                way.fail("403")

        made.events.listen(hear)
        with made:
            assert write({}) >> made == ["a"]
        assert any(each.trouble for each in told)
        back = next(each for each in told if each.phase == "saving")
        assert (back.restored, back.restored_bytes) == (1, size)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_lost_node_has_left_of_an_upload_is_removed(
    place: Path, store: stores.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVE_ID", "run")
    monkeypatch.setenv("SAVE_SECRET", secret_of("run"))
    bucket = sky.Bucket("s3://models/runs/lost", store.endpoint, keys=KEYS)
    owner = stores.client(store.endpoint)
    with FakeCloud() as cloud, pool(place, provider=cloud, save={"out": bucket}, liveness=5) as made:
        write({"a": "1"}) >> made
        owner.create_multipart_upload(Bucket="models", Key="runs/lost/large")  # as its mover may have
        cloud.terminate(cloud.instances())
        with contextlib.suppress(sky.ConnectionLost):
            write({"b": "1"}) >> made
        assert "b" in (write({"b": "1"}) >> made)  # on another node
    assert not owner.list_multipart_uploads(Bucket="models").get("Uploads")
