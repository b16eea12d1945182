"""What a program writes into a folder is kept in a bucket and comes back, and no error or kill makes it worse."""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore

from skypool.agent import mover_watch
from skypool.agent.shared_page import SharedPage
from skypool.buckets.bucket import Bucket
from skypool.buckets.store import opened
from skypool.data import fetching, folder_saver, local_files, mover, objects
from skypool.data.folder_saver import LONG, PART, QUIET, UNFINISHED, FolderSaver
from skypool.data.local_files import written_by
from skypool.data.progress import Rate
from skypool.data.restoring import Restored, restore
from skypool.errors import UsageError
from skypool.wire.save_orders import Order
from tests.conftest import eventually
from tests.lab import stores

AGES = 1_700_000_000
"""When the first file of a test was written, in seconds since 1970."""


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of the files in a folder by their paths."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@dataclass
class Place:
    """A folder `out`, a bucket that is another folder, and a clock that a test turns."""

    root: Path
    executor: ThreadPoolExecutor
    now: float = 0.0
    written: int = field(default=0)

    @property
    def out(self) -> Path:
        return self.root / "out"

    def saver(self, node: int = 0, nodes: int = 1, patterns: tuple[str, ...] = (), out: str = "out") -> FolderSaver:
        """A saver as a new mover makes it, with the journal of the last one."""
        self.bucket.mkdir(exist_ok=True)
        saver = FolderSaver(
            LocalStore(self.bucket),
            str(self.root / out),
            str(self.root / f"journal-{out}"),
            self.executor,
            node,
            nodes,
            patterns,
            lambda: self.now,
        )
        saver.begin()
        return saver

    @property
    def bucket(self) -> Path:
        return self.root / "bucket"

    def write(self, path: str, data: bytes | str = b"data", out: str = "out") -> Path:
        """Write a file, which is newer than all that were written before."""
        there = self.root / out / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(data.encode() if isinstance(data, str) else data)
        self.written += 1
        os.utime(there, (AGES + self.written, AGES + self.written))
        return there

    def settle(self, saver: FolderSaver) -> None:
        """Have the saver look, wait until all is quiet, and save."""
        saver.turn()
        self.now += QUIET
        saver.turn()

    def saved(self) -> dict[str, bytes]:
        """The objects of the bucket but skypool's own."""
        return {name: data for name, data in files_of(self.bucket).items() if not name.startswith(".skypool/")}

    def unfinished(self) -> list[str]:
        marks = self.bucket / UNFINISHED
        return sorted(str(each.relative_to(marks)) for each in marks.rglob("*") if each.is_file())

    def restored(self, out: str = "fresh", node: int = 0, nodes: int = 1) -> tuple[Restored, dict[str, bytes]]:
        """What another machine gets."""
        done = restore(self.saver(node, nodes, out=out))
        return done, files_of(self.root / out)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "out").mkdir()
    with ThreadPoolExecutor(4) as executor:
        yield Place(tmp_path, executor)


@contextmanager
def stopped_writer(path: Path, text: str) -> Iterator[tuple[int, Callable[[], object]]]:
    """A process that has a file open in which it has written a text, and a function that kills it."""
    argv = ["sh", "-c", 'exec 3>"$1"; printf %s "$2" >&3; echo; exec sleep 600', "sh", str(path), text]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:

            def stop() -> None:
                process.kill()
                process.wait()

            yield process.pid, stop
        finally:
            process.kill()


# --- finished files -------------------------------------------------------------------------------------------------


def test_a_file_is_saved_when_it_is_closed_and_has_been_quiet(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "model.pt", "wb") as file:
        file.write(b"half")
        file.flush()
        place.settle(saver)
        assert place.saved() == {}
        file.write(b" and half")
    saver.turn()
    place.now += QUIET - 0.1
    assert not saver.turn()
    assert (place.saved(), saver.account.names, saver.account.unsaved_bytes) == ({}, ["model.pt"], 13)
    place.now += 0.1
    assert saver.turn()
    assert place.saved() == {"model.pt": b"half and half"}
    assert (saver.account.unsaved, saver.account.files, saver.account.bytes) == (0, 1, 13)


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 3 * PART])
def test_a_file_of_any_size_comes_back_byte_for_byte(place: Place, size: int) -> None:
    data = os.urandom(size)
    place.write("data.bin", data)
    place.settle(place.saver())
    done, there = place.restored()
    assert there == {"data.bin": data}
    assert (done.files, done.bytes, done.aside) == (1, size, "")


def change_while_it_is_read(saver: FolderSaver, monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Have something happen to a file after it was looked at, and before its first byte is read."""
    state_of = local_files.state_of
    left = [change]

    def changed(file: int) -> object:
        found = state_of(file)
        while left:
            left.pop()()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(folder_saver, "state_of", changed)
        saver.turn()
    assert not left


@pytest.mark.parametrize("size", [100, 2 * PART + 5])
@pytest.mark.parametrize("how", ["grows", "shrinks", "is written over", "is replaced"])
def test_a_file_that_changes_while_it_is_read_leaves_the_former_object(
    place: Place, monkeypatch: pytest.MonkeyPatch, size: int, how: str
) -> None:
    saver = place.saver()
    place.write("model.pt", b"a" * size)
    place.settle(saver)
    there = place.write("model.pt", b"b" * size)
    saver.turn()
    place.now += QUIET

    def change() -> None:
        if how == "is replaced":
            place.write("new", b"c" * size)
            os.replace(place.out / "new", there)
            return
        with open(there, "r+b") as file:
            if how == "shrinks":
                file.truncate(size // 2)
            else:
                file.seek(size if how == "grows" else size // 2)
                file.write(b"c" * 10)

    change_while_it_is_read(saver, monkeypatch, change)
    assert set(place.saved()["model.pt"]) in ({ord("a")}, {ord("b")})
    assert len(place.saved()["model.pt"]) == size
    assert saver.account.trouble == ""
    place.settle(saver)
    assert place.saved() == {"model.pt": there.read_bytes()}


def test_a_file_that_a_program_begins_anew_after_the_look_at_the_folder_is_not_saved_torn(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = place.saver()
    there = place.write("model.pt", b"whole")
    place.settle(saver)
    place.write("model.pt", b"whole again")
    saver.turn()
    place.now += QUIET
    send = FolderSaver._send

    def begun_anew(self: FolderSaver, path: str, name: str, may_change: bool = False) -> object:
        with open(there, "wb") as file:
            file.write(b"who")
            file.flush()
            return send(self, path, name, may_change)

    with monkeypatch.context() as patch:
        patch.setattr(FolderSaver, "_send", begun_anew)
        saver.turn()
    assert place.saved() == {"model.pt": b"whole"}


def test_what_is_there_is_not_sent_again_by_the_next_mover(place: Place) -> None:
    place.write("a/model.pt")
    place.write("step_1/model.pt")
    place.settle(place.saver())
    for each in ("a/model.pt", "step_1/model.pt"):
        (place.bucket / each).write_bytes(b"as it was")
    with open(place.root / "journal-out", "ab") as file:
        file.write(b'["step_1/model.pt", [1, 2\xff')  # a line that was not written to its end
    for new in (0, 1):
        after = place.saver()
        place.settle(after)
        assert (after.account.files, after.account.unsaved) == (new, 0)
        assert list(place.saved().values()).count(b"as it was") == 2 - new
        place.write("a/model.pt", "new")


# --- what is whole ------------------------------------------------------------------------------------------


def test_a_checkpoint_with_a_file_that_stays_open_is_not_whole(place: Place) -> None:
    saver = place.saver()
    place.write("step_3/config.json", "{}")
    place.write("step_3/train.log", "a log is no part of it")
    with open(place.out / "step_3/model.pt", "wb") as file:
        file.write(b"half")
        file.flush()
        for _ in range(15):
            saver.turn()
            place.now += QUIET
        assert place.restored()[1].keys() <= {"step_3/train.log"}
    place.settle(saver)
    assert place.restored("later")[1].keys() == {"step_3/config.json", "step_3/train.log", "step_3/model.pt"}


def test_a_copied_checkpoint_is_whole_when_its_last_file_has_come_last(place: Place) -> None:
    saver, source = place.saver(), place.root / "source"
    source.mkdir()
    for number, name in enumerate(("__0_0.distcp", "__1_0.distcp", ".metadata")):
        (source / name).write_bytes(b"x")
        os.utime(source / name, (AGES + number, AGES + number))
    (place.out / "step_3").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy2(source / name, place.out / "step_3" / name)
        time.sleep(0.02)  # a tick of the file system's clock
    saver.turn()
    assert place.restored()[1] == {}


@pytest.mark.parametrize(("folder", "last"), [("step_3", []), ("checkpoint-3/model_fsdp_0", ["trainer_state.json"])])
def test_a_checkpoint_of_two_nodes_is_whole_when_both_have_saved_their_part(
    place: Place, folder: str, last: list[str]
) -> None:
    first, second = (place.saver(node, 2, out=f"out-{node}") for node in (0, 1))
    place.write(f"{folder}/__0_0.distcp", out="out-0")
    place.write(f"{folder}/__1_0.distcp", out="out-1")
    place.write(f"{folder}/.metadata", b"x\x00__0_0.distcp\x8c\x0c__1_0.distcp", out="out-0")
    for name in last:
        place.write(f"checkpoint-3/{name}", out="out-0")
    place.settle(first)
    place.settle(first)
    assert place.restored("before", 0, 2)[1] == {}
    place.settle(second)
    place.settle(first)
    assert place.restored("after", 0, 2)[1].keys() == {
        *(f"{folder}/{each}" for each in ("__0_0.distcp", "__1_0.distcp", ".metadata")),
        *(f"checkpoint-3/{each}" for each in last),
    }


def test_a_checkpoint_with_a_file_that_cannot_be_saved_is_not_whole(place: Place) -> None:
    saver = place.saver()
    place.write("step_3/a")
    (place.out / "step_3/b").symlink_to("/etc/hostname")
    place.settle(saver)
    assert place.restored()[1] == {}
    assert "step_3/b" in saver.account.refused


def test_a_checkpoint_that_is_written_anew_slowly_is_never_mixed(place: Place) -> None:
    saver = place.saver(patterns=("step-*/done",))
    for name in ("a", "b", "done"):
        place.write(f"step-1/{name}", "old")
    place.settle(saver)
    time.sleep(0.02)  # a tick of the file system's clock
    place.write("step-1/a", "new")
    saver.turn()
    place.now += QUIET + 1
    saver.turn()
    assert place.restored()[1] == {}
    for name in ("b", "done"):
        place.write(f"step-1/{name}", "new")
    place.settle(saver)
    assert {*place.restored("later")[1].values()} == {b"new"}


def test_what_is_deleted_together_stays_until_as_much_has_been_saved(place: Place) -> None:
    saver = place.saver()
    place.write("results.json", "x" * 100)
    for number in (1, 2, 3):
        place.write(f"step_{number}/model", "x" * 10_000)
    place.settle(saver)
    shutil.rmtree(place.out)
    place.settle(saver)
    place.write("config.json", "y" * 60)
    place.write("step_4/model", "y" * 10_000)
    place.settle(saver)
    place.settle(saver)
    assert {"results.json", "step_1/model", "step_3/model"} <= place.saved().keys()
    assert saver.account.kept == 4
    place.write("step_5/model", "y" * 10_000)
    place.settle(saver)
    place.settle(saver)
    assert place.saved().keys() == {"config.json", "step_4/model", "step_5/model"}


def test_a_file_that_is_written_again_and_again_replaces_no_others(place: Place) -> None:
    saver = place.saver()
    for number in range(10):
        place.write(f"result-{number}", "x" * 1000)
    place.settle(saver)
    shutil.rmtree(place.out)
    place.settle(saver)
    for _ in range(20):
        place.write("latest", "y" * 1000)
        place.settle(saver)
    assert len(place.saved()) == 11


def test_a_folder_that_is_named_as_a_node_is_refused_where_there_are_nodes(place: Place) -> None:
    first, second = (place.saver(node, 2, out=f"out-{node}") for node in (0, 1))
    place.write("x", "of 0", out="out-0")
    place.write("node-1/x", "of a user", out="out-0")
    place.settle(first)
    place.write("x", "of 1", out="out-1")
    place.settle(second)
    assert "node-1/x" in first.account.refused
    assert place.restored("fresh", 1, 2)[1] == {"x": b"of 1"}


# --- files that stay open -------------------------------------------------------------------------------------------


def test_a_file_that_is_never_quiet_is_saved_each_minute(place: Place) -> None:
    saver, saved = place.saver(), list[bytes]()
    for seconds in range(0, 200, 4):
        place.write("last.ckpt", str(seconds))
        saver.turn()
        saved += place.saved().values()
        place.now += 4
    assert [*dict.fromkeys(saved)] == [b"60", b"124", b"188"]


def test_a_large_file_that_is_never_quiet_is_saved_each_minute_as_a_snapshot(place: Place) -> None:
    saver, saved = place.saver(), list[tuple[str, bytes]]()
    for seconds in range(0, 200, 4):
        place.write("last.ckpt", bytes([seconds]) * (PART + 1))
        saver.turn()
        saved += [(name, data[:1]) for name, data in place.saved().items()]
        place.now += 4
    assert [*dict.fromkeys(saved)] == [("last.ckpt.snapshot", bytes([each])) for each in (60, 120, 180)]
    place.settle(saver)
    assert place.saved() == {"last.ckpt": bytes([196]) * (PART + 1)}


def test_a_file_that_was_open_for_long_must_be_quiet_when_it_is_closed(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "model.pt", "wb") as file:
        for _ in range(3):
            file.write(b"part ")
            file.flush()
            saver.turn()
            place.now += LONG - 1
        file.write(b"end")
    saver.turn()
    assert place.saved().keys() <= {"model.pt.snapshot"}
    place.settle(saver)
    assert place.saved() == {"model.pt": b"part part part end"}


def test_a_file_that_stays_open_is_saved_each_minute_as_a_snapshot(place: Place) -> None:
    saver = place.saver()
    place.write("log.snapshot", "another file")
    place.settle(saver)
    with open(place.out / "log", "w") as file:
        file.write("1")
        file.flush()
        saver.turn()
        place.now += LONG - 1
        saver.turn()
        assert place.saved().keys() == {"log.snapshot"}
        place.now += 1
        saver.turn()
        assert place.saved() == {"log.snapshot": b"another file", "log.snapshot-2": b"1"}
        file.write("2")
        file.flush()
        place.now += LONG - 1
        saver.turn()
        assert place.saved()["log.snapshot-2"] == b"1"
        place.now += 1
        saver.turn()
        assert place.saved()["log.snapshot-2"] == b"12"
        file.write("3")
        file.flush()
        assert saver.turn(last=True)
        assert place.saved() == {"log.snapshot": b"another file", "log.snapshot-2": b"123"}
    place.settle(saver)
    assert place.saved() == {"log.snapshot": b"another file", "log": b"123"}


def test_a_file_whose_program_is_stopped_while_it_writes_replaces_no_former_one(place: Place) -> None:
    saver = place.saver()
    place.write("model.pt", "whole")
    place.write("state", "whole")
    place.settle(saver)
    place.write("state", "whole, too")
    with stopped_writer(place.out / "model.pt", "ha") as (_, stop):
        saver.halves.note(0, None)
        stop()
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"whole", "model.pt.snapshot": b"ha", "state": b"whole, too"}
    other = place.write("new", "finished by another name")
    other.rename(place.out / "model.pt")
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"finished by another name", "state": b"whole, too"}


def test_what_a_stopped_program_was_writing_is_a_half_until_it_changes_also_for_the_next_mover(place: Place) -> None:
    place.write("model.pt", "whole")
    place.settle(place.saver())
    with stopped_writer(place.out / "model.pt", "ha") as (pid, stop):
        place.saver().halves.note(1, [pid])
        stop()
    place.saver().halves.end(1, time.time_ns())
    saver = place.saver()
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"whole", "model.pt.snapshot": b"ha"}
    (place.out / "model.pt").chmod(0o600)
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"whole", "model.pt.snapshot": b"ha"}
    with (place.out / "model.pt").open("w") as same:  # the next attempt of a call writes the file anew
        same.write("whole, too")
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"whole, too"}


def test_what_the_next_call_has_finished_before_the_mover_looks_again_is_whole(place: Place) -> None:
    saver = place.saver()
    place.write("model.pt", "whole")
    place.settle(saver)
    with stopped_writer(place.out / "model.pt", "ha") as (pid, stop):
        saver.halves.note(1, [pid])
        stop()
    ended = time.time_ns()
    time.sleep(0.02)  # the file system's clock has ticked
    old = place.write("model.pt", "whole, too")
    os.utime(old, (1, 1))  # a copy may have the time of its original
    saver.halves.end(1, ended)
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"whole, too"}


def test_who_is_looked_for_when_a_call_has_ended_leaves_no_halves(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "log", "w") as log:
        saver.halves.end(1, time.time_ns())
        assert not saver.halves.note(1, [os.getpid()])
        log.write("a later call of the same worker")
    assert saver.turn(last=True)
    assert place.saved() == {"log": b"a later call of the same worker"}


def test_a_file_that_stays_open_in_a_worker_is_saved_when_a_later_call_has_written_it(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "log", "w") as log:
        log.write("1")
        log.flush()
        saver.halves.note(1, [os.getpid()])
        saver.halves.end(1, time.time_ns())
        assert saver.turn(last=True)
        assert place.saved() == {"log.snapshot": b"1"}
        time.sleep(0.02)  # the file system's clock has ticked
        log.write("2")
    assert saver.turn(last=True)
    assert place.saved() == {"log": b"12"}


def test_a_call_that_ends_by_itself_before_it_is_asked_to_stop_leaves_no_half(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "model.pt", "w") as model:
        saver.halves.note(1, [os.getpid()])
        model.write("whole")
    saver.halves.end(1, 0)
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"whole"}


def test_a_half_is_known_by_a_name_that_it_gets_later(place: Place) -> None:
    saver = place.saver()
    place.write("model.pt", "whole")
    place.settle(saver)
    with stopped_writer(place.out / "new", "ha") as (pid, stop):
        saver.halves.note(1, [pid])
        (place.out / "new").rename(place.out / "model.pt")
        stop()
    saver.halves.end(1, time.time_ns())
    assert saver.turn(last=True)
    assert place.saved() == {"model.pt": b"whole", "model.pt.snapshot": b"ha"}


def test_a_half_that_was_never_saved_is_a_snapshot_only(place: Place) -> None:
    saver = place.saver()
    with stopped_writer(place.out / "epoch=3.ckpt", "ha") as (pid, stop):
        saver.halves.note(1, [pid])
        stop()
    saver.halves.end(1, time.time_ns())
    assert saver.turn(last=True)
    assert place.saved() == {"epoch=3.ckpt.snapshot": b"ha"}


def test_a_file_that_is_open_and_does_not_change_before_its_program_is_killed_is_a_half(place: Place) -> None:
    saver = place.saver()
    place.write("rows.sqlite", "whole")
    place.settle(saver)
    with open(place.out / "rows.sqlite", "r+b") as rows:
        saver.halves.note(1, [os.getpid()])
        rows.write(b"ha")
    assert saver.turn(last=True)
    assert place.saved() == {"rows.sqlite": b"whole", "rows.sqlite.snapshot": b"haole"}


def test_a_checkpoint_of_a_stopped_program_is_not_whole(place: Place) -> None:
    saver = place.saver()
    (place.out / "step-1").mkdir()
    with stopped_writer(place.out / "step-1/model.pt", "ha") as (pid, stop):
        saver.halves.note(1, [pid])
        stop()
    saver.halves.end(1, time.time_ns())
    place.settle(saver)
    assert saver.turn(last=True)
    assert place.saved() == {"step-1/model.pt.snapshot": b"ha"}
    assert place.unfinished() == ["step-1/0"]


def test_a_file_that_is_written_through_memory_has_a_writer(place: Place) -> None:
    path = place.write("array", "1234")
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4)
    known = path.stat().st_dev, path.stat().st_ino
    assert written_by(str(place.out), [os.getpid()]) == {known}
    memory.close()
    assert written_by(str(place.out), [os.getpid()]) == set()


def test_a_snapshot_is_removed_when_its_file_is_finished_after_the_mover_was_killed(place: Place) -> None:
    with open(place.out / "log", "w") as file:
        file.write("1")
        file.flush()
        place.saver().turn(last=True)
        file.write("2")
        file.flush()
        after = place.saver()
        after.turn()
        place.now += LONG
        after.turn()
        assert place.saved() == {"log.snapshot": b"12"}
    place.settle(place.saver())
    assert place.saved() == {"log": b"12"}


def test_a_snapshot_is_removed_when_its_file_was_renamed_and_is_saved(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "model.pt.tmp", "wb") as file:
        file.write(b"x" * 100)
        file.flush()
        saver.turn()
        place.now += LONG
        saver.turn()
        assert place.saved().keys() == {"model.pt.tmp.snapshot"}
        file.write(b"y" * 100)
    os.replace(place.out / "model.pt.tmp", place.out / "model.pt")
    place.settle(saver)
    saver.turn()
    assert place.saved().keys() == {"model.pt"}


def test_a_file_that_gets_the_name_of_a_snapshot_is_not_removed_with_it(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "log", "w") as file:
        file.write("1")
        file.flush()
        saver.turn(last=True)
        place.write("log.snapshot", "mine")
        place.settle(saver)
    place.settle(saver)
    assert place.saved() == {"log": b"1", "log.snapshot": b"mine"}


# --- what is deleted ------------------------------------------------------------------------------------------------


def test_a_program_that_empties_its_folder_when_it_begins_loses_nothing(place: Place) -> None:
    saver = place.saver()
    place.write("step_1/model.pt", b"x" * 1000)
    place.write("result.json", b"x" * 1000)
    place.settle(saver)
    before = place.saved()
    shutil.rmtree(place.out)
    place.settle(saver)
    place.write("config.json", "small")
    place.settle(saver)
    saver.turn(last=True)
    assert place.saved() == {**before, "config.json": b"small"}
    assert saver.account.kept == 2
    place.write("step_9/model.pt", b"y" * 1000)
    saver.turn()
    assert before.items() <= place.saved().items()  # the newer file is not saved yet
    place.settle(saver)
    saver.turn()
    assert place.saved().keys() == {"step_9/model.pt", "config.json"}
    assert saver.account.kept == 0


def test_a_file_that_was_renamed_is_in_the_bucket_once(place: Place) -> None:
    saver = place.saver()
    place.write("step_3.tmp/model.pt")
    place.write("model.tmp", "other")
    place.settle(saver)
    assert place.saved().keys() == {"step_3.tmp/model.pt", "model.tmp"}
    (place.out / "step_3.tmp").rename(place.out / "step_3")
    (place.out / "model.tmp").rename(place.out / "model.pt")
    place.settle(saver)
    assert place.saved() == {"step_3/model.pt": b"data", "model.pt": b"other"}


def test_old_checkpoints_that_a_program_removes_are_removed_in_the_bucket(place: Place) -> None:
    saver = place.saver()
    for step in range(1, 6):
        place.write(f"checkpoint-{step}/model.pt", b"x" * 1000)
        place.write(f"checkpoint-{step}/optimizer.pt", b"x" * 2000)
        place.settle(saver)
        if step > 2:
            shutil.rmtree(place.out / f"checkpoint-{step - 2}")
        place.settle(saver)
    assert place.saved().keys() == {f"checkpoint-{step}/{of}.pt" for step in (4, 5) for of in ("model", "optimizer")}
    assert place.unfinished() == []


def test_a_checkpoint_that_is_being_removed_in_the_bucket_is_not_brought_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = place.saver()
    for name in ("a", "b"):
        place.write(f"step_1/{name}", b"x" * 1000)
    place.settle(saver)
    for name in ("a", "b"):
        place.write(f"step_2/{name}", b"x" * 1000)
    place.settle(saver)
    shutil.rmtree(place.out / "step_1")
    remove, count = objects.remove, [0]

    def killed(store: ObjectStore, name: str) -> None:
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt
        remove(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            place.settle(saver)
    assert len(place.saved()) == 3
    assert place.restored()[1].keys() == {"step_2/a", "step_2/b"}
    place.settle(place.saver())
    assert place.saved().keys() == {"step_2/a", "step_2/b"}
    assert place.unfinished() == []


def test_a_checkpoint_that_is_half_removed_here_stays_whole_in_the_bucket(place: Place) -> None:
    saver = place.saver()
    for step in (1, 2):
        for name in ("a", "b"):
            place.write(f"step_{step}/{name}", b"x" * 1000)
        place.settle(saver)
    before = place.saved()
    (place.out / "step_1/a").unlink()
    saver.turn()
    place.now += QUIET - 1
    (place.out / "step_1/b").unlink()
    saver.turn()
    place.now += QUIET - 1
    saver.turn()
    assert place.saved() == before
    place.now += 1
    saver.turn()
    assert place.saved().keys() == {"step_2/a", "step_2/b"}


# --- what is told ---------------------------------------------------------------------------------------------------


def test_a_file_waits_from_its_change_until_it_is_saved(place: Place) -> None:
    saver = place.saver()
    assert saver.waiting.oldest == 0
    place.write("a", "1")
    saver.turn()
    place.now += 2
    place.write("b", "1")
    saver.turn()
    place.now += 2
    assert saver.waiting.oldest == 4  # also while a turn takes long
    place.now += 1
    saver.turn()  # the first one is quiet now
    assert saver.waiting.oldest == 3
    place.now += 2
    saver.turn()
    assert saver.waiting.oldest == 0
    place.write("a", "2")
    saver.turn()
    place.now += 1
    (place.out / "a").unlink()
    assert saver.waiting.oldest == 1
    saver.turn()
    assert saver.waiting.oldest == 0


def test_a_file_that_stays_open_waits_from_its_last_snapshot(place: Place) -> None:
    saver = place.saver()
    with open(place.out / "log", "w", buffering=1) as file:
        file.write("1\n")
        saver.turn()
        place.now += LONG
        assert saver.waiting.oldest == LONG
        saver.turn()
        assert saver.waiting.oldest == 0
        place.now += 10
        saver.turn()
        assert saver.waiting.oldest == 0  # it is as the snapshot
        file.write("2\n")
        place.now += 10
        saver.turn()
        place.now += 10
        assert saver.waiting.oldest == 20
        assert saver.account.unsaved == 1


def test_files_that_are_sent_side_by_side_take_their_time_once() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    assert rate.per_second == 0
    with rate.sending():
        now = 1.0
        with rate.sending():
            rate.add(300)
            now = 2.0
            assert rate.per_second == 150
        now = 3.0
    now = 90.0
    assert rate.per_second == 100


# --- several nodes --------------------------------------------------------------------------------------------------


def test_nodes_that_save_to_one_place_overwrite_nothing_and_get_their_own_files_back(place: Place) -> None:
    savers = [place.saver(node, 2, out=f"out-{node}") for node in (0, 1)]
    for node, saver in enumerate(savers):
        place.write("state.json", f"of {node}", out=f"out-{node}")
        place.write(f"only-{node}", "x", out=f"out-{node}")
        place.settle(saver)
    assert place.saved() == {
        "state.json": b"of 0",
        "node-1/state.json": b"of 1",
        "only-0": b"x",
        "only-1": b"x",
    }
    for node in (0, 1):
        _, there = place.restored(f"fresh-{node}", node, 2)
        assert there == {"state.json": f"of {node}".encode(), "only-0": b"x", "only-1": b"x"}


def test_a_node_that_changes_or_deletes_what_came_from_another_leaves_that_as_it_is(place: Place) -> None:
    place.write("state.json", "of 0", out="out-0")
    place.write("step_1/model.pt", "of 0", out="out-0")
    place.settle(place.saver(0, 2, out="out-0"))
    place.restored("out-1", 1, 2)
    saver = place.saver(1, 2, out="out-1")
    place.written += 10**6
    place.write("state.json", "of 1", out="out-1")
    shutil.rmtree(place.root / "out-1/step_1")
    place.settle(saver)
    place.settle(saver)
    assert saver.account.unsaved == 0
    assert place.saved() == {"state.json": b"of 0", "step_1/model.pt": b"of 0", "node-1/state.json": b"of 1"}
    place.settle(place.saver(1, 2, out="out-1"))
    assert place.restored("fresh-0", 0, 2)[1] == {"state.json": b"of 0", "step_1/model.pt": b"of 0"}


def test_a_node_that_joins_one_that_was_alone_overwrites_none_of_its_files(place: Place) -> None:
    alone = place.saver(0, 1, out="out-0")
    place.write("state.json", "of 0", out="out-0")
    place.settle(alone)
    place.restored("out-1", 1, 2)
    place.write("late.json", "of 0", out="out-0")
    alone.turn()
    alone._name_of("late.json")  # it is being sent just then
    alone.share(2)
    joined = FolderSaver(
        LocalStore(place.bucket), str(place.root / "out-1"), str(place.root / "journal-out-1"), place.executor, 1, 2,
        clock=lambda: place.now, joins=True,
    )  # fmt: skip
    for name in ("state.json", "late.json", "next.json"):
        place.write(name, "of 1", out="out-1")
    place.settle(joined)
    place.write("state.json", "of 0 again", out="out-0")
    place.write("next.json", "of 0", out="out-0")
    place.settle(alone)
    kept = {
        "state.json": b"of 0 again", "node-1/state.json": b"of 1", "late.json": b"of 0", "node-1/late.json": b"of 1",
        "next.json": b"of 1", "node-0/next.json": b"of 0",
    }  # fmt: skip
    assert place.saved() == kept
    place.write("state.json", "of 0 at last", out="out-0")
    place.settle(place.saver(0, 2, out="out-0"))  # a mover that begins again knows it
    assert place.saved() == {**kept, "state.json": b"of 0 at last"}
    for node in (0, 1):
        there = place.restored(f"fresh-{node}", node, 2)[1]
        assert {name: data[:4] for name, data in there.items()} == {
            name: f"of {node}".encode() for name in ("state.json", "late.json", "next.json")
        }


# --- bringing back --------------------------------------------------------------------------------------------------


def test_the_folder_becomes_as_the_bucket_has_it_and_the_rest_moves_aside(place: Place) -> None:
    place.write("kept", "1")
    place.write("changed", "1")
    saver = place.saver()
    place.settle(saver)
    place.write("changed", "2")
    place.write("deep/new", "3")
    done = restore(place.saver())
    assert files_of(place.out) == {"kept": b"1", "changed": b"1"}
    assert files_of(Path(done.aside)) == {"changed": b"2", "deep/new": b"3"}
    assert (done.files, done.moved, Path(done.aside).parent) == (1, 2, place.root)
    again = restore(place.saver())
    assert (again.files, again.aside) == (0, "")


def test_a_folder_stays_as_it_is_if_the_bucket_has_nothing(place: Place) -> None:
    place.write("first", "1")
    assert restore(place.saver()) == Restored()
    assert files_of(place.out) == {"first": b"1"}


def test_links_and_folders_in_the_way_of_files_move_aside_and_lead_nowhere(place: Place) -> None:
    for name in ("link/a", "link/sub", "file/a", "folder", "filled", "dangling", "to/a"):
        place.write(name, "saved")
    place.settle(place.saver())
    before = place.saved()
    shutil.rmtree(place.out)
    elsewhere = place.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "sub").mkdir()
    (elsewhere / "a").write_text("not to be touched")
    (place.out / "folder").mkdir(parents=True)
    (place.out / "filled/deep").mkdir(parents=True)
    (place.out / "filled/deep/b").write_text("mine")
    (place.out / "file").write_text("mine")
    (place.out / "link").symlink_to(elsewhere)
    (place.out / "dangling").symlink_to(elsewhere / "new")
    (place.out / "to").mkdir()
    (place.out / "to/a").symlink_to(elsewhere / "a")
    (place.out / "stays").symlink_to(elsewhere)
    done = restore(place.saver())
    assert files_of(elsewhere) == {"a": b"not to be touched"}
    assert (elsewhere / "sub").is_dir()
    assert (place.out / "stays").is_symlink()
    (place.out / "stays").unlink()
    assert files_of(place.out) == before
    assert files_of(Path(done.aside))["filled/deep/b"] == b"mine"


def test_a_restore_that_has_failed_can_be_repeated(place: Place) -> None:
    place.write("large", os.urandom(3 * PART + 1))
    place.write("small", "x")
    place.settle(place.saver())
    before = place.saved()
    (place.root / "fresh").write_text("a file in the place of the folder")
    with pytest.raises(OSError):  # noqa: PT011
        restore(place.saver(out="fresh"))
    (place.root / "fresh").unlink()
    assert place.restored()[1] == before
    assert [each.name for each in (place.root / "fresh").iterdir() if each.name.startswith(".")] == []


# --- names ----------------------------------------------------------------------------------------------------------

NAMES = [
    "a b",
    " a",
    "a#b",
    "100%",
    "%41",
    "a+b&c=d;e",
    "ä/日本",
    "ö",
    ".hidden",
    "~",
    "*?",
    "a:b",
    "'\"<>|^`{}[]",
    "x" * 250,
]
"""Names of files that any store can have."""


def test_files_with_unusual_names_come_back(place: Place) -> None:
    deep = "/".join("d" for _ in range(300))
    for name in [*NAMES, f"{deep}/file"]:
        place.write(name, name)
    saver = place.saver()
    place.settle(saver)
    assert (saver.account.refused, saver.account.unsaved) == ({}, 0)
    assert place.restored()[1] == files_of(place.out)


def test_what_cannot_be_saved_is_named_with_the_reason(place: Place) -> None:
    place.write("good", "x")
    os.mkfifo(place.out / "fifo")
    (place.out / "to-etc").symlink_to("/etc/hostname")
    (place.out / "to-folder").symlink_to(place.root)
    (place.out / "nowhere").symlink_to("none")
    (place.out / "inside").symlink_to("good")
    saver = place.saver()
    place.settle(saver)
    assert place.saved() == {"good": b"x", "inside": b"x"}
    assert saver.account.refused == {
        "fifo": "it is no file",
        "nowhere": "it is a link that leads nowhere",
        "to-etc": "it is a link that leads out of the folder",
        "to-folder": "it is a link that leads out of the folder",
    }
    shutil.rmtree(place.out)
    long = "/".join(["x" * 200] * 5)
    os.makedirs(os.fsencode(place.out))
    for name in ("a\nb", "a\\b", "bytes-\udcff", ".skypool/unfinished/step_1/0", long):
        place.write(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place.out / "socket"))
        found = local_files.listed(str(place.out))
    assert found.files == {}
    assert found.refused.keys() == {
        "a\nb", "a\\b", "bytes-\udcff", ".skypool/unfinished/step_1/0", long, "socket",
    }  # fmt: skip


def test_a_folder_deeper_than_python_can_call_is_looked_at(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.out)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    Path("file").write_text("x")
    monkeypatch.chdir(place.root)
    try:
        found = local_files.listed(str(place.out))
    finally:
        subprocess.run(["rm", "-rf", place.out], check=True)  # Python cannot remove it
    assert [*found.refused] == ["d/" * 1500 + "file"]


def test_a_folder_that_cannot_be_read_for_a_moment_counts_as_no_deletion(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = place.saver()
    place.write("step_1/model.pt", b"x" * 100)
    place.settle(saver)
    place.write("new", b"x" * 100)
    scandir = os.scandir

    def failing(folder: str) -> object:
        if str(folder) == f"{place.out}/step_1/":
            raise OSError(5, "Input/output error")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    place.settle(saver)
    place.settle(saver)
    assert place.saved().keys() == {"step_1/model.pt", "new"}
    assert saver.account.refused == {"step_1": "it cannot be read: Input/output error"}


# --- checkpoints ----------------------------------------------------------------------------------------------------

TRAINER = ["model.safetensors", "training_args.bin", "optimizer.pt", "trainer_state.json"]
SHARDS = ["__0_0.distcp", "__1_0.distcp", ".metadata"]
ORBAX = ["params/d/0", "manifest.ocdbt", "_CHECKPOINT_METADATA"]


@pytest.mark.parametrize(
    ("folder", "names", "patterns"),
    [
        ("checkpoint-500", TRAINER, ()),
        ("run/last", SHARDS, ()),
        ("run/state", ORBAX, ()),
        ("step-7", ["a", "b/c", "done"], ("step-*/done",)),
    ],
)
def test_a_checkpoint_is_saved_at_once_when_its_last_file_is_there_and_not_before(
    place: Place, folder: str, names: list[str], patterns: tuple[str, ...]
) -> None:
    saver = place.saver(patterns=patterns)
    for name in names[:-1]:
        place.write(f"{folder}/{name}")
        if name != names[0] or folder != "run/state":  # nothing tells yet that it is one of orbax
            saver.turn()
    for _ in range(3):
        if folder != "run/state":
            place.settle(saver)
    assert place.saved() == {}
    place.write(f"{folder}/{names[-1]}")
    assert saver.turn()
    assert place.saved().keys() == {f"{folder}/{name}" for name in names}
    assert place.unfinished() == []


def test_a_checkpoint_whose_last_file_is_not_known_is_saved_when_all_is_quiet(place: Place) -> None:
    saver = place.saver()
    place.write("step_3/a")
    saver.turn()
    place.now += QUIET - 1
    place.write("step_3/b")
    saver.turn()
    place.now += QUIET - 1
    saver.turn()
    assert (place.saved(), saver.account.unsaved) == ({}, 2)
    place.now += 1
    assert saver.turn()
    assert place.saved().keys() == {"step_3/a", "step_3/b"}


def test_a_checkpoint_that_its_program_did_not_finish_is_marked_and_not_brought_back(place: Place) -> None:
    saver = place.saver()
    place.write("model.pt", "x")
    for name in TRAINER[:-1]:
        place.write(f"checkpoint-500/{name}")
    saver.turn(last=True)
    assert place.saved().keys() == {"model.pt", *(f"checkpoint-500/{name}" for name in TRAINER[:-1])}
    assert place.unfinished() == ["checkpoint-500/0"]
    done, there = place.restored()
    assert (done.unfinished, there) == (["checkpoint-500"], {"model.pt": b"x"})
    after = place.saver()
    place.write(f"checkpoint-500/{TRAINER[-1]}")
    assert after.turn()
    assert (after.account.files, place.unfinished()) == (1, [])
    assert place.restored("fresh-2")[1].keys() == {"model.pt", *(f"checkpoint-500/{name}" for name in TRAINER)}


@pytest.mark.parametrize("folder", ["tmp-checkpoint-500", "step_5.orbax-checkpoint-tmp-17"])
def test_a_folder_that_will_be_renamed_is_not_saved_before(place: Place, folder: str) -> None:
    saver = place.saver()
    place.write(f"{folder}/model.pt")
    place.settle(saver)
    assert place.saved() == {}
    (place.out / folder).rename(place.out / "step_5")
    place.settle(saver)
    assert place.saved() == {"step_5/model.pt": b"data"}


def test_a_checkpoint_of_lightning_in_shards_is_not_whole_before_its_last_file(place: Place) -> None:
    saver = place.saver()
    for name in SHARDS:
        place.write(f"epoch=1-step=20.ckpt/{name}")
        saver.turn()
        assert place.saved() == {}
    place.write("epoch=1-step=20.ckpt/meta.pt")
    assert saver.turn()
    assert place.saved().keys() == {f"epoch=1-step=20.ckpt/{name}" for name in [*SHARDS, "meta.pt"]}


def test_a_checkpoint_of_orbax_is_saved_at_once_when_it_has_its_name(place: Place) -> None:
    saver = place.saver()
    names = ["default/commit_success.txt", *ORBAX, "commit_success.txt"]
    for name in names:
        place.write(f"10.orbax-checkpoint-tmp/{name}")
        saver.turn()
    assert place.saved() == {}
    (place.out / "10.orbax-checkpoint-tmp").rename(place.out / "10")
    assert saver.turn()
    assert place.saved().keys() == {f"10/{name}" for name in names}
    assert place.unfinished() == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kill_at", range(1, 27))
def test_a_mover_that_is_killed_at_any_request_leaves_no_torn_checkpoint(
    place: Place, monkeypatch: pytest.MonkeyPatch, kill_at: int, when: str
) -> None:
    left = kill_at

    def killed_at(owner: object, method: str) -> Callable[..., object]:
        genuine = getattr(owner, method)

        def request(*words: object) -> object:
            nonlocal left
            left -= 1
            if left > 0 or (left == 0 and when == "after"):
                done = genuine(*words)
            if left <= 0:
                raise OSError("killed")
            return done

        return request

    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        _, there = place.restored(f"fresh-{checks}")
        for name in {each.split("/")[0] for each in there}:
            found = {each.split("/")[1]: data for each, data in there.items() if each.startswith(f"{name}/")}
            assert found in versions[name]

    saver = place.saver()
    versions: dict[str, list[dict[str, bytes]]] = {}
    for step, numbers in ((1, "abc"), (2, "abc"), (1, "a"), (3, "abc")):
        folder = f"step_{step}"
        shutil.rmtree(place.out / folder, ignore_errors=True)
        versions.setdefault(folder, []).append({each: f"{place.written}".encode() * 500 for each in numbers})
        for name, data in versions[folder][-1].items():
            place.write(f"{folder}/{name}", data)
        if step == 3:
            shutil.rmtree(place.out / "step_2")
        for _ in range(6):
            with monkeypatch.context() as patch:
                for owner, each in ((objects, "put"), (objects, "remove"), (FolderSaver, "_send")):
                    patch.setattr(owner, each, killed_at(owner, each))
                saver.turn()
            check()
            if left <= 0:
                left, saver = 10**6, place.saver()
            place.now += QUIET
    assert place.saved() == files_of(place.out)
    assert place.unfinished() == []
    assert left < 1000 or kill_at < 26  # with the last number none is killed, so each request has been the last


# --- stores that fail -----------------------------------------------------------------------------------------------


@dataclass
class FaultyStore:
    """A server with the part of S3's protocol that small files need, which answers as a test tells it.

    Attributes:
        objects: its objects by their names.
        answer: returns the status of the answer to a method and a name; 0 if all is well, and -1 for no answer at all.
        asked: the methods and names of all requests.
        most: the most bytes of an answer that are sent before the connection ends.
        etag: returns the ETag of an object.
    """

    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    answer: Callable[[str, str], int] = lambda method, name: 0
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    endpoint: str = ""
    most: int = 1 << 40
    etag: Callable[[bytes], str] = lambda data: str(zlib.crc32(data))

    def respond(self, method: str, name: str, data: bytes) -> tuple[int, bytes]:
        self.asked.append((method, name))
        status = self.answer(method, name)
        if status == -1:
            time.sleep(3600)
        if status:
            return status, b"<Error><Code>Faulty</Code><Message>It has a bad day.</Message></Error>"
        if method == "GET" and not name:
            keys = "".join(
                f"<Contents><Key>{escape(each)}</Key><Size>{len(data)}</Size><ETag>&quot;{self.etag(data)}&quot;</ETag>"
                "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                for each, data in self.objects.items()
            )
            return 200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>".encode()
        if method == "PUT":
            self.objects[name] = data
        elif method == "DELETE":
            self.objects.pop(name, None)
            return 204, b""
        elif name not in self.objects:
            return 404, b""
        return 200, self.objects[name] if method == "GET" else b""


@pytest.fixture
def faulty() -> Iterator[FaultyStore]:
    store = FaultyStore()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            name = unquote(urlsplit(self.path).path).removeprefix("/models").removeprefix("/")
            status, body = store.respond(self.command, name, data)
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
                first, last, size = int(found[1]), min(int(found[2]), len(body) - 1), len(body)
                status, body = 206, body[first : last + 1]
            self.send_response(status)
            if status == 206:
                self.send_header("content-range", f"bytes {first}-{last}/{size}")
            self.send_header("content-length", str(len(body)))
            self.send_header("etag", f'"{store.etag(store.objects.get(name, b""))}"')
            self.send_header("last-modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.end_headers()
            with suppress(OSError):  # the client has lost its patience
                self.wfile.write(b"" if self.command == "HEAD" else body[: store.most])
            self.close_connection |= len(body) > store.most

        do_PUT = do_DELETE = do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield store
    finally:
        server.shutdown()
        server._threads = type(server._threads)()  # type: ignore[attr-defined]  # some never end
        server.server_close()


def faulty_saver(place: Place, faulty: FaultyStore, patience: float = 10.0) -> FolderSaver:
    bucket = Bucket("s3://models", faulty.endpoint, keys=("ID", "SECRET"))
    store = opened(bucket, {"ID": "a", "SECRET": "b"}, patience)
    return FolderSaver(store, str(place.out), str(place.root / "journal"), place.executor, clock=lambda: place.now)


@pytest.mark.parametrize("status", [-1, 400, 403, 404, 500, 503])
def test_an_error_of_the_store_is_told_and_repeated_after_pauses(
    place: Place, faulty: FaultyStore, status: int
) -> None:
    faulty.answer = lambda method, name: status
    place.write("model.pt", "x")
    saver = faulty_saver(place, faulty, 0.5)
    for pause in (1, 2, 4):
        place.settle(saver)
        assert saver.account.trouble
        assert saver.account.names == ["model.pt"]
        asked = len(faulty.asked)
        if pause > QUIET:
            assert not saver.turn()
            assert len(faulty.asked) == asked
    faulty.answer = lambda method, name: 0
    place.now += 8
    assert saver.turn()
    assert (saver.account.trouble, faulty.objects) == ("", {"model.pt": b"x"})


def test_what_is_being_sent_when_there_is_hope_is_not_followed_by_a_long_pause(
    place: Place, faulty: FaultyStore
) -> None:
    def refused(method: str, name: str) -> int:
        if len(faulty.asked) == 8:
            saver.pause.end()  # as when new credentials come
        return 403

    faulty.answer = refused
    place.write("model.pt", "x")
    saver = faulty_saver(place, faulty)
    place.settle(saver)
    while len(faulty.asked) < 8:
        place.now += 100
        assert not saver.turn()
    faulty.answer = lambda method, name: 0
    place.now += 1
    assert saver.turn()
    assert faulty.objects == {"model.pt": b"x"}


def test_a_file_that_the_store_refuses_holds_up_no_other(place: Place, faulty: FaultyStore) -> None:
    saver = faulty_saver(place, faulty)
    faulty.answer = lambda method, name: 403 if "bad" in name else 0
    for name in ("bad", "good", "step_1/bad", "step_2/good"):
        place.write(name, name)
    with open(place.out / "log", "w") as file:
        file.write("log")
        file.flush()
        place.settle(saver)
        assert not saver.turn(last=True)
    assert {each for each in faulty.objects if not each.startswith(".")} == {"good", "step_2/good", "log.snapshot"}
    assert sorted(saver.account.names) == ["bad", "log", "step_1/bad"]
    assert saver.account.trouble == "the store answers Faulty: It has a bad day."


def test_a_disk_that_is_full_or_gone_is_told(place: Place) -> None:
    saver = place.saver()
    place.write("model.pt", "x")
    shutil.rmtree(place.bucket)
    place.bucket.write_text("in the way")
    place.settle(saver)
    assert saver.account.trouble
    place.bucket.unlink()
    place.bucket.mkdir()
    place.now += 60
    assert saver.turn()
    assert (place.saved(), saver.account.trouble) == ({"model.pt": b"x"}, "")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a//b", "a/./b", "a\nb", "a\\b"])
def test_no_name_of_an_object_leads_out_of_the_folder(place: Place, faulty: FaultyStore, name: str) -> None:
    faulty.objects = {"good": b"x", name: b"evil"}
    with suppress(BaseError, FileNotFoundError):  # obstore lists no bucket that has such a name
        restore(faulty_saver(place, faulty))
    assert files_of(place.out).keys() <= {"good", "a\\b"}
    assert {each.name for each in place.root.iterdir()} <= {"out", "journal"}


def test_objects_that_can_be_no_files_here_are_named_and_hold_up_no_other(place: Place, faulty: FaultyStore) -> None:
    long, own = "x" * 256, ".skypool-part"
    faulty.objects = {
        "good": b"x",
        long: b"x",
        own: b"x",
        "marked": b"",
        "marked/a": b"x",
        "was": b"file",
        "was/a": b"x",
    }
    done = restore(faulty_saver(place, faulty))
    assert files_of(place.out) == {"good": b"x", "marked/a": b"x", "was/a": b"x"}
    assert sorted(done.refused) == [own, "was", long]
    assert (done.refused[own], done.refused["was"]) == ("no file can have this name", "a folder has its name")


def test_a_restore_that_the_store_ends_goes_on_with_what_is_missing(place: Place, faulty: FaultyStore) -> None:
    faulty.objects = {each: each.encode() for each in "abc"}
    faulty.answer = lambda method, name: 403 if (method, name) == ("GET", "b") else 0
    with pytest.raises(BaseError):
        restore(faulty_saver(place, faulty))
    assert files_of(place.out) == {"a": b"a", "c": b"c"}
    faulty.answer = lambda method, name: 0
    done = restore(faulty_saver(place, faulty))
    assert (done.files, done.aside) == (1, "")
    assert files_of(place.out) == faulty.objects


def test_a_restore_needs_room_on_the_disk_before_it_fetches(
    place: Place, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_SPARE", 1 << 60)
    faulty.objects = {"a": b"1"}
    with pytest.raises(UsageError, match=r"out there has no room: 0.00 GB are to be fetched, and .* are free"):
        restore(faulty_saver(place, faulty))
    assert ("GET", "a") not in faulty.asked


def test_what_comes_of_a_file_that_breaks_off_is_taken_back(place: Place, faulty: FaultyStore) -> None:
    faulty.objects = {"large": bytes(3 * PART), "small": b"12"}
    faulty.answer = lambda method, name: 403 if name == "large" and faulty.asked.count(("GET", "large")) >= 3 else 0
    done = Restored()
    with pytest.raises(BaseError):
        restore(faulty_saver(place, faulty), done)
    assert done.received == done.bytes == 2


def test_a_large_file_comes_back_though_each_answer_ends_early(place: Place, faulty: FaultyStore) -> None:
    data = random.Random(7).randbytes(2 * PART + 5)
    faulty.objects = {"large": data}
    faulty.most = PART // 5  # obstore itself tries three times
    done = restore(faulty_saver(place, faulty))
    assert (place.out / "large").read_bytes() == data
    assert (done.files, done.bytes) == (1, len(data))
    assert done.received == len(data)


# --- the mover as a process -----------------------------------------------------------------------------------------

needs_s3 = pytest.mark.skipif(bool(stores.missing_s3()), reason=stores.missing_s3())


def test_new_credentials_end_the_pause_of_a_folder_that_saves_what_is_left(
    tmp_path: Path, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "_PAUSES", (300.0, 300.0))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/new").write_text("1")
    faulty.answer = lambda method, name: 403
    order = Order("out", str(tmp_path / "out"), "s3://models", faulty.endpoint, "us-east-1", ("a", "b"), restores=False)
    folder = mover.Folder(order.to_json(), str(tmp_path / "journal"))
    eventually(lambda: folder.told()["trouble"], 30, "the trouble")
    folder.end(200.0)
    faulty.asked.clear()
    eventually(lambda: faulty.asked, 30, "the attempt at the end")
    faulty.answer = lambda method, name: 0
    folder.renew(1, ("c", "d"))
    eventually(lambda: folder.phase == "ended", 60, "the end")
    assert (folder.whole, faulty.objects.get("new")) == (True, b"1")


class Mover:
    """A mover in a folder of its own, as the agent starts it.

    Args:
        root: the folder of the node. The journal of a former mover is in it.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        argv = [sys.executable, "-P", "-c", "from skypool.data.mover import main; main()"]
        env = {**os.environ, "XDG_CACHE_HOME": str(root / "cache"), "PYTHONPATH": str(Path(__file__).parents[1])}
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=env)
        self.told: list[tuple[float, dict[str, Any]]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            for each in json.loads(line)["folders"]:
                self.told.append((time.monotonic(), each))

    @property
    def last(self) -> dict[str, Any]:
        """What was told last."""
        return self.told[-1][1] if self.told else {}

    def order(self, said: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(said).encode() + b"\n")
        self.process.stdin.flush()

    def save(self, endpoint: str, out: Path, restores: bool = False, patterns: tuple[str, ...] = ()) -> None:
        values = ("run", stores.secret_of("run"))
        order = Order("out", str(out), "s3://models/runs/a", endpoint, "us-east-1", values, patterns=patterns)
        self.order({**replace(order, journal="j", restores=restores).to_json(), "drain": 60.0})

    def end(self, seconds: float = 60.0, calm: bool = True) -> None:
        self.order({"do": "end", "id": "out", "seconds": seconds, "calm": calm})

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for each in (self.process.stdin, self.process.stdout):
            assert each is not None
            with suppress(OSError):
                each.close()


@dataclass
class Trainer:
    """A program that writes checkpoints and removes old ones, some in place and some under another name at first.

    Attributes:
        whole: the files of each checkpoint that it began, by folders.
    """

    out: Path
    random: random.Random
    whole: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        step = 0
        while not self.stopped.wait(0.2):
            step += 1
            self.write(step)
            for kind in ("step", "epoch"):
                for old in sorted(self.out.glob(f"{kind}-*"), key=lambda each: each.stat().st_mtime)[:-6]:
                    shutil.rmtree(old)

    def write(self, step: int) -> None:
        folder = f"{'step' if step % 2 else 'epoch'}-{step}"
        parts = {f"{name}": self.random.randbytes(self.random.choice([0, 10, 20_000])) for name in "abc"}
        parts["shards/large"] = self.random.randbytes(PART + 1 if step % 10 == 1 else 30_000)
        parts["done"] = b"done"
        self.whole[folder] = parts
        there = self.out / (folder if step % 2 else f"writing-{step}")
        for name, data in parts.items():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            with open(there / name, "wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                time.sleep(0.02)
                file.write(data[len(data) // 2 :])
            time.sleep(0.02)
        if not step % 2:
            there.rename(self.out / folder)


@contextmanager
def slowed(endpoint: str) -> Iterator[str]:
    """The URL of a way to a server on which each request takes a while, so that many kills come between two."""

    def forward(source: socket.socket, target: socket.socket, pause: float) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                if len(data) < 1 << 16:
                    time.sleep(pause)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
                ends.extend((client, server))
                for ways in ((client, server, 0.05), (server, client, 0.0)):
                    threads.append(threading.Thread(target=forward, args=ways))
                    threads[-1].start()

    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=serve))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for each in (listener, *ends):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for each in ends:
                each.close()


def restorable(client: Any, prefix: str) -> dict[str, bytes]:
    """What a node must get, as the objects of a bucket say by themselves."""
    names = [
        each["Key"].removeprefix(prefix)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket="models", Prefix=prefix)
        for each in page.get("Contents", ())
    ]
    marks = [each.removeprefix(".skypool/unfinished/").rpartition("/")[0] for each in names if "/unfinished/" in each]
    return {
        name: client.get_object(Bucket="models", Key=f"{prefix}{name}")["Body"].read()
        for name in names
        if not name.startswith((".skypool/", *(f"{each}/" for each in marks)))
    }


@needs_s3
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mover_that_is_killed_again_and_again_leaves_no_torn_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(20)
    out = tmp_path / "out"
    out.mkdir()
    trainer = Trainer(out, random.Random(21))
    seen = set[str]()
    (tmp_path / "store").mkdir()
    with stores.seaweedfs(tmp_path / "store", 30) as server, slowed(server.endpoint) as slow:
        client = stores.client(server.endpoint)

        def check() -> None:
            there = restorable(client, "runs/a/")
            for folder in {each.partition("/")[0] for each in there if each.startswith(("step-", "epoch-"))}:
                found = {name.partition("/")[2]: data for name, data in there.items() if name.startswith(f"{folder}/")}
                assert found == trainer.whole[folder], folder
                seen.add(folder)

        thread = threading.Thread(target=trainer.run)
        thread.start()
        try:
            for _ in range(40):
                mover = Mover(tmp_path / "node")
                try:
                    mover.save(slow, out, patterns=("step-*/done",))
                    eventually(lambda mover=mover: mover.last.get("phase") == "saving")  # type: ignore[misc]
                    time.sleep(moments.uniform(0, 2.5))
                finally:
                    mover.kill()
                time.sleep(0.4)  # the store may still be at work
                check()
        finally:
            trainer.stopped.set()
            thread.join()
        assert len(seen) > 10
        mover = Mover(tmp_path / "node")
        try:
            mover.save(server.endpoint, out, patterns=("step-*/done",))
            mover.end()
            eventually(lambda: mover.last.get("phase") == "ended", 60)
            assert mover.last["whole"], mover.last
        finally:
            mover.kill()
        check()
        there = restorable(client, "runs/a/")
        here = files_of(out)
        assert here.items() <= there.items()
        fresh = Mover(tmp_path / "node-2")
        try:
            fresh.save(server.endpoint, tmp_path / "fresh", restores=True)
            eventually(lambda: fresh.last.get("phase") == "saving", 60)
        finally:
            fresh.kill()
        assert files_of(tmp_path / "fresh") == there
        for name in here:
            assert abs((tmp_path / "fresh" / name).stat().st_mtime_ns - (out / name).stat().st_mtime_ns) < 1000


@needs_s3
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_files_of_all_names_and_sizes_come_back_from_seaweedfs_with_their_times(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = [0, 1, PART, PART + 1, 3 * PART + 7]
    (tmp_path / "store").mkdir()
    with stores.seaweedfs(tmp_path / "store", 10) as server:
        for number, name in enumerate([*NAMES, "/".join(["deep"] * 50), *(f"sizes/{each}" for each in sizes)]):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(random.randbytes(int(name[6:]) if name.startswith("sizes/") else 20))
            os.utime(out / name, ns=(0, 1_600_000_000_123_456_789 + number * 10**9))
        mover, fresh = Mover(tmp_path / "node"), Mover(tmp_path / "node-2")
        try:
            mover.save(server.endpoint, out)
            mover.end()
            eventually(lambda: mover.last.get("phase") == "ended", 60)
            assert (mover.last["whole"], mover.last["refused"], mover.last["trouble"]) == (True, {}, "")
            fresh.save(server.endpoint, tmp_path / "fresh", restores=True)
            eventually(lambda: fresh.last.get("phase") == "saving", 60)
        finally:
            mover.kill()
            fresh.kill()
        again = Mover(tmp_path / "node")
        try:
            again.save(server.endpoint, out, restores=True)
            eventually(lambda: again.last.get("phase") == "saving", 60)
            assert (again.last["back"]["files"], again.last["back"]["aside"]) == (0, "")
        finally:
            again.kill()
        assert files_of(tmp_path / "fresh") == files_of(out)
        for name in files_of(out):
            assert (tmp_path / "fresh" / name).stat().st_mtime_ns == (out / name).stat().st_mtime_ns, name


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("status", [403, 404, 500, 503, -1])
def test_a_mover_outlives_a_store_that_fails_and_saves_when_it_is_well(
    tmp_path: Path, faulty: FaultyStore, status: int
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.pt").write_bytes(b"x")
    faulty.answer = lambda method, name: status if method == "PUT" else 0
    mover = Mover(tmp_path / "node")
    try:
        mover.save(faulty.endpoint, out)
        eventually(lambda: mover.last.get("trouble"), 200)
        assert (mover.last["phase"], mover.last["names"]) == ("saving", ["model.pt"])
        faulty.answer = lambda method, name: 0
        eventually(lambda: not mover.last["unsaved"], 100)
        assert (faulty.objects, mover.last["trouble"]) == ({"runs/a/model.pt": b"x"}, "")
        mover.end()
        eventually(lambda: mover.last["phase"] == "ended")
        assert mover.last["whole"]
        assert mover.process.poll() is None
        times = [at for at, _ in mover.told]
        assert max(later - at for at, later in pairwise(times)) < 15  # the agent kills a mover that is silent for 20
    finally:
        mover.kill()


@pytest.mark.slow
def test_a_mover_that_takes_too_much_memory_is_given_up_and_started_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.root / "cache"))
    monkeypatch.setattr(mover_watch, "_MOST_MIB", 1)
    watched: dict[int, Callable[[], None]] = {}
    told: list[dict[str, Any]] = []

    def watch(number: int, events: int, call: Callable[[], None]) -> None:
        watched.pop(number, None)
        if events:
            watched[number] = call

    mover = mover_watch.MoverWatch(watch, told.extend, SharedPage(1))
    place.write("model.pt", "x")
    order = Order("out", str(place.out), f"file://{place.bucket}", journal="j", parts=str(Path(__file__).parents[1]))
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1]), *sys.path])
    mover.order(order.to_json(), lambda grace: False)
    mover.tick(0.0, is_idle=True)
    first = mover.pid
    try:
        assert first
        eventually(lambda: (place.bucket / "model.pt").exists())
        time.sleep(1)  # several accounts are there to be read at once
        [read] = watched.values()
        read()
        assert mover.pid not in (0, first)
        assert len(watched) == 1
        assert told[-1]["trouble"] == "the mover takes more than 1 MiB of memory"
    finally:
        mover.kill()
        for call in [*watched.values()]:
            eventually(lambda: not mover.pid or call() or not mover.pid)  # noqa: B023
