"""Files go to nodes and back whole, and nothing that a node says leads out of the folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.errors import TransferError
from skypool.files import entries, frames, node_end, receiving, safe_writing, sending, transfer
from skypool.files.entries import PARTS, Entry
from skypool.files.frames import Broken, Channel, Refused
from skypool.files.ignored import Ignored
from skypool.files.receiving import Receiver
from skypool.files.sending import Sender
from skypool.files.transfer import NodeEnd
from skypool.runs import node_folders
from skypool.wire.transport import Subprocess
from tests.conftest import eventually

HOSTILE_PATHS = [
    "",
    ".",
    "..",
    "../x",
    "/etc/x",
    "a/../../x",
    "a//b",
    "a/./b",
    "x\0",
    "a/",
    "y" * 256,
    "a/" * 40_000 + "b",
]


def tree(root: Path) -> dict[str, tuple[Any, ...]]:
    """What is in a folder: by path, the kind, the permissions and the contents of each thing."""
    found: dict[str, tuple[Any, ...]] = {}
    for each in sorted(root.rglob("*")):
        about = each.lstat()
        path = str(each.relative_to(root))
        if stat.S_ISLNK(about.st_mode):
            found[path] = ("link", os.readlink(each))
        elif stat.S_ISDIR(about.st_mode):
            found[path] = ("folder", stat.S_IMODE(about.st_mode), about.st_mtime_ns)
        else:
            found[path] = ("file", stat.S_IMODE(about.st_mode), about.st_mtime_ns, each.read_bytes())
    return found


@contextlib.contextmanager
def channels() -> Iterator[tuple[Channel, Channel, Callable[[], None]]]:
    """Both ends of a connection, and what cuts it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def cut() -> None:
            for each in (ours, theirs):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

        yield Channel(ours.fileno(), ours.fileno()), Channel(theirs.fileno(), theirs.fileno()), cut


def received(channel: Channel, target: Path, **options: Any) -> tuple[threading.Thread, list[Any]]:
    """Receive in a thread, which puts what was done, or the error, into the list."""
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(Receiver(channel, str(target), **options).run())
        except Refused as e:
            said.append(e)
            with contextlib.suppress(Broken):
                channel.tell(frames.Kind.FAILED, str(e))
        except Broken as e:
            said.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, said


def nothing(path: str, is_folder: bool) -> bool:
    return False


def sender_of(
    channels: list[Channel], source: Path, leaves_out: Callable[[str, bool], bool] = nothing, **told: Any
) -> Sender:
    return Sender(channels, str(source), "", entries.walk(str(source), leaves_out), leaves_out=leaves_out, **told)


def moved(source: Path, target: Path, leaves_out: Callable[[str, bool], bool] = nothing, **options: Any) -> Any:
    """Send a folder to another one of this machine, and return what the receiver says at the end."""
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target, **options)
        sender = sender_of([ours], source, leaves_out, delete=bool(options.get("delete")))
        sender.run()
        thread.join()
        cut()
        sender.stop()
    return said[0]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with what file systems have."""
    root = tmp_path / "source"
    chance = random.Random(1)
    for number in range(40):
        file = root / f"d{number % 5}" / f"below {number % 3}" / f"f{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(chance.randbytes(number * 997))
        os.utime(file, ns=(1, 1_600_000_000_123_456_789 + number))
    (root / "empty").mkdir()
    (root / ("ü" * 127)).write_text("long")
    (root / "a\nb").write_text("a line")
    (root / os.fsdecode(b"\xff\xfe")).write_text("no text")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "link").symlink_to("d1/below 1/f1")
    (root / "dangling").symlink_to("nowhere")
    (root / "locked").mkdir()
    (root / "locked" / "inside").write_text("x")
    (root / "locked").chmod(0o555)
    return root


def test_a_folder_arrives_as_it_is_and_is_not_sent_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    first = moved(source, target)
    assert (first["files"], first["failed"]) == (45, 0)
    assert tree(target) == tree(source)
    assert moved(source, target)["bytes"] == 0


def test_only_what_changed_is_sent(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    moved(source, target)
    (source / "d1" / "below 1" / "f1").write_bytes(bytes(997))  # as long as before
    os.utime(source / "d2" / "below 2" / "f2")  # the contents are the same
    assert (moved(source, target)["files"], tree(target)) == (1, tree(source))
    hidden = source / "d3" / "below 0" / "f3"
    before = hidden.stat().st_mtime_ns
    hidden.write_bytes(bytes(3 * 997))
    os.utime(hidden, ns=(before, before))
    assert moved(source, target)["files"] == 0, "size and time are the same"
    assert moved(source, target, checksum=True)["files"] == 1
    assert tree(target) == tree(source)


def test_what_the_sender_lacks_is_deleted_only_if_asked(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (target / "old" / "deep").mkdir(parents=True)
    (target / "old" / "deep" / "file").write_text("x")
    (target / "away").symlink_to(outside)
    moved(source, target)
    assert (target / "old" / "deep" / "file").exists()
    assert moved(source, target, lambda path, _: path == "old/deep/file", delete=True)["deleted"] == 1
    assert (target / "old" / "deep" / "file").exists(), "what is left out is kept"
    assert moved(source, target, delete=True)["deleted"] == 3
    assert tree(target) == tree(source)
    assert (outside / "kept").exists(), "no link is followed"


def test_a_thing_of_another_kind_is_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        each.mkdir()
    (source / "a").mkdir()
    (source / "a" / "x").write_text("x")
    (source / "b").write_text("b")
    (source / "c").symlink_to("b")
    (target / "a").symlink_to(tmp_path)
    (target / "b").mkdir()
    (target / "c").write_text("a file")
    assert moved(source, target)["failed"] == 0
    assert tree(target) == tree(source)
    assert not (tmp_path / "x").exists()


def test_holes_are_not_sent(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.seek(1 << 40)
        file.write(b"the end")
        file.truncate((1 << 40) + (1 << 30))
    said = moved(source, target)
    about = (target / "sparse").stat()
    assert (said["bytes"] < 1 << 20, about.st_size) == (True, (1 << 40) + (1 << 30))
    assert about.st_blocks * 512 < 1 << 20
    with (target / "sparse").open("rb") as file:
        file.seek(1 << 40)
        assert file.read(7) == b"the end"


def test_a_cut_connection_leaves_no_file_in_part_and_the_next_one_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    data = random.Random(2).randbytes(40 << 20)
    (source / "large").write_bytes(data)
    with channels() as (ours, theirs, cut):
        seen = 0

        def see(size: int) -> None:
            nonlocal seen
            seen += size
            if seen > 20 << 20:
                cut()

        thread, said = received(theirs, target, on_bytes=see)
        sender = sender_of([ours], source)
        sender.run()
        thread.join()
        sender.stop()
    assert isinstance(said[0], Broken)
    assert isinstance(sender.lost[0], Broken)
    assert not (target / "large").exists()
    again = moved(source, target)
    assert 15 << 20 < again["bytes"] < 21 << 20
    assert (target / "large").read_bytes() == data
    assert [each.name for each in target.iterdir()] == ["large"]


def test_a_file_that_changes_while_it_is_read_is_sent_again_or_told(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("once", "always"):
        (source / name).write_bytes(bytes(2 << 20))
    changes = {"once": 1, "always": 99}

    def change(size: int) -> None:
        if changes[now[0]]:
            changes[now[0]] -= 1
            with (source / now[0]).open("ab") as file:
                file.write(b"more")

    now = [""]
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target)
        sender = sender_of([ours], source, on_file=lambda path: now.__setitem__(0, path), on_bytes=change)
        sender.run()
        thread.join()
        cut()
        sender.stop()
    assert said[0]["errors"] == ["always: it changed while it was read"]
    assert (target / "once").read_bytes() == (source / "once").read_bytes()
    assert not (target / "always").exists()


def test_several_receivers_get_what_each_of_them_lacks_and_each_byte_is_read_once(source: Path, tmp_path: Path) -> None:
    targets = [tmp_path / f"target {number}" for number in range(3)]
    moved(source, targets[1])
    (targets[1] / "run").unlink()
    read = 0

    def count(size: int) -> None:
        nonlocal read
        read += size

    with contextlib.ExitStack() as both:
        ends = [both.enter_context(channels()) for _ in targets]
        threads = [received(theirs, target) for (_, theirs, _), target in zip(ends, targets, strict=True)]
        sender = sender_of([ours for ours, _, _ in ends], source, on_bytes=count)
        sender.run()
        for thread, _ in threads:
            thread.join()
        for _, _, cut in ends:
            cut()
        sender.stop()
    assert [sender.ends[number]["files"] for number in range(3)] == [45, 1, 45]
    assert read == sum(each.stat().st_size for each in source.rglob("*") if each.is_file() and not each.is_symlink())
    for each in targets:
        assert tree(each) == tree(source)


# --- slow and lost ends ----------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end gives up another one that is silent for 0.5 s."""
    monkeypatch.setattr(frames, "_SILENCE", 0.5)
    for module in (frames, sending):
        monkeypatch.setattr(module, "SIGN", 0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("slow", ["walk", "hash here", "hash there", "write", "delete", "read"])
def test_work_of_any_length_is_no_silence(slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        each.mkdir()
        (each / "equal").write_bytes(bytes(range(256)) * 8192)
        os.utime(each / "equal", ns=(1, 1 + (each == target)))
    (source / "new").write_bytes(bytes(8 << 20))
    (target / "extra").write_text("x")

    def slowly(module: Any, name: str) -> None:
        does = getattr(module, name)

        def run(*given: Any, **named: Any) -> Any:
            time.sleep(1.2)
            monkeypatch.setattr(module, name, does)
            return does(*given, **named)

        monkeypatch.setattr(module, name, run)

    match slow:
        case "walk":
            slowly(entries, "entry_of")
        case "hash here":
            slowly(sending, "digest_of")
        case "hash there":
            slowly(receiving, "digest_of")
        case "write":
            slowly(safe_writing.Incoming, "write")
        case "delete":
            slowly(safe_writing.Folder, "remove")
        case "read":
            slowly(sending, "pieces")
    said = moved(source, target, delete=True)
    assert (said["files"], said["failed"], said["deleted"]) == (1, 0, 1)
    assert tree(target) == tree(source)


@pytest.mark.usefixtures("impatient")
def test_a_slow_receiver_holds_up_others_and_a_lost_one_does_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number}").write_bytes(os.urandom(1 << 20))
    targets = [tmp_path / name for name in ("quick", "slow", "lost")]
    pauses = iter([1.0, 1.0])
    with contextlib.ExitStack() as both:
        ends = [both.enter_context(channels()) for _ in targets]
        threads = [
            received(ends[0][1], targets[0]),
            received(ends[1][1], targets[1], on_file=lambda _: time.sleep(next(pauses, 0))),
        ]
        sender = sender_of([ours for ours, _, _ in ends], source)
        sender.run()  # nobody reads at the third one
        for thread, _ in threads:
            thread.join()
        for _, _, cut in ends:
            cut()
        sender.stop()
    assert isinstance(sender.lost[2], Broken)
    for each in targets[:2]:
        assert tree(each) == tree(source)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("which", ["sender", "receiver"])
def test_an_end_that_stops_is_given_up(which: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(bytes(range(256)) * (1 << 16))
    with channels() as (ours, theirs, cut):
        began = time.monotonic()
        if which == "receiver":
            sender = sender_of([ours], source)
            sender.run()
            assert isinstance(sender.lost[0], Broken)
        else:
            thread, said = received(theirs, tmp_path / "target")
            thread.join()
            assert isinstance(said[0], Broken)
        assert 0.4 < time.monotonic() - began < 5
        cut()
        if which == "receiver":
            sender.stop()


def left_part(source: Path, target: Path) -> Path:
    """Cut a transfer of one file in its middle, and return what is left of it."""
    source.mkdir()
    (source / "large").write_bytes(random.Random(4).randbytes(4 << 20))
    with channels() as (ours, theirs, cut):
        seen = 0

        def see(size: int) -> None:
            nonlocal seen
            seen += size
            if seen >= 2 << 20:
                cut()

        thread, _ = received(theirs, target, on_bytes=see)
        sender = sender_of([ours], source)
        sender.run()
        thread.join()
        sender.stop()
    part = max(target.glob(f"{PARTS}*/*"), key=lambda each: each.stat().st_mtime_ns)
    assert part.stat().st_size >= 2 << 20
    return part


def test_a_damaged_part_does_not_become_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with left_part(source, target).open("r+b") as file:
        file.write(b"other")
    said = moved(source, target)
    assert said["errors"] == ["large: what an earlier transfer had left of it was damaged; send it again"]
    assert [*target.iterdir()] == []
    assert moved(source, target)["failed"] == 0
    assert tree(target) == tree(source)


def test_a_part_that_vanishes_does_not_become_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    part = left_part(source, target)
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target, on_want=lambda _: part.unlink())
        sender = sender_of([ours], source)
        sender.run()
        cut()
        thread.join()
        sender.stop()
    assert isinstance(said[0], Refused) or said[0]["failed"] == 1
    assert not (target / "large").exists()
    assert moved(source, target)["failed"] == 0
    assert tree(target) == tree(source)


def test_a_transfer_waits_until_a_lost_one_has_ended(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    lost = safe_writing.Parts(safe_writing.Folder(str(target)), "", wait=False)
    threading.Timer(0.5, lost.close, (False,)).start()  # which removes its folder, as it is empty
    assert moved(source, target, again=True)["failed"] == 0
    assert tree(target) == tree(source)


def test_what_lost_transfers_have_left_does_not_add_up(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    left_part(source, target)
    (source / "large").rename(tmp_path / "another")
    source.rmdir()
    left_part(source, target)
    left_part_again = [*target.glob(f"{PARTS}*/*")]
    assert len(left_part_again) <= 2
    (tmp_path / "empty").mkdir()
    moved(tmp_path / "empty", target)
    assert not [*target.glob(f"{PARTS}*")]


def test_two_transfers_into_one_folder_do_not_write_the_same_part(source: Path, tmp_path: Path) -> None:
    (source / "locked").chmod(0o755)
    target = tmp_path / "target"
    goes_on = threading.Event()
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target, on_file=lambda _: goes_on.wait())
        sender = sender_of([ours], source)
        running = threading.Thread(target=sender.run)
        running.start()
        while not [*target.glob(f"{PARTS}*")]:
            time.sleep(0.01)
        assert moved(source, target)["files"] == 45
        assert tree(source).items() <= tree(target).items()
        goes_on.set()
        running.join()
        thread.join()
        cut()
        sender.stop()
    assert said[0]["failed"] == 0
    assert tree(target) == tree(source)


def test_what_the_sender_cannot_read_is_told_and_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        (each / "closed").mkdir(parents=True)
        (each / "closed" / "inside").write_text("x")
        (each / "file").write_text("x")
    (target / "extra").write_text("x")
    scandir = os.scandir

    def refused(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    os.mkfifo(source / "pipe")
    (target / "pipe").write_text("x")
    monkeypatch.setattr(os, "scandir", refused)
    said = moved(source, target, delete=True)
    assert said["errors"] == ["pipe: it is no file, folder or link", "closed: Permission denied"]
    assert (said["failed"], said["deleted"]) == (2, 1)
    assert sorted(os.listdir(target)) == ["closed", "file", "pipe"]
    assert (target / "closed" / "inside").exists()


@pytest.mark.parametrize("delete", [False, True])
def test_a_full_folder_is_not_replaced_by_a_file(delete: bool, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "a").write_text("a file")
    (source / "b").symlink_to("a")
    for name in "ab":
        (target / name / "sub").mkdir(parents=True)
        (target / name / "sub" / "kept").write_text("x")
    (target / "c").mkdir()
    (source / "c").write_text("in place of an empty one")
    said = moved(source, target, delete=delete)
    why = "a folder is in its place; remove that first"
    assert (said["files"], sorted(said["errors"])) == (1, [f"a: {why}", f"b: {why}"])
    assert (target / "a" / "sub" / "kept").exists()
    assert (target / "c").read_text() == "in place of an empty one"


def test_very_deep_folders_take_few_descriptors(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    deep = source.joinpath(*["d"] * 300)
    deep.mkdir(parents=True)
    (deep / "file").write_text("x")
    before = len(os.listdir("/dev/fd"))
    most = 0

    def count(path: str) -> None:
        nonlocal most
        most = len(os.listdir("/dev/fd"))

    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target, on_file=count)
        sender = sender_of([ours], source)
        sender.run()
        thread.join()
        cut()
        sender.stop()
    assert said[0]["failed"] == 0
    assert most < before + 20
    (source / "d" / "d").rename(tmp_path / "away")
    assert moved(source, target, delete=True)["deleted"] == 300
    assert tree(target) == tree(source)


def test_an_error_that_a_disk_tells_when_a_file_is_closed_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "a").write_bytes(bytes(range(256)) * 4)
    close = os.close
    failed: list[int] = []

    def fails(file: int) -> None:
        whole = stat.S_ISREG(os.fstat(file).st_mode) and os.fstat(file).st_size == 1024
        read_only = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        close(file)
        if whole and not read_only and not failed:
            failed.append(file)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", fails)
    said = moved(source, target)
    assert failed
    assert isinstance(said, Refused)
    assert [*target.iterdir()] == []
    assert moved(source, target)["files"] == 1
    assert tree(target) == tree(source)


def test_a_transfer_that_is_lost_while_it_hashes_does_not_finish_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    left_part(source, target)
    monkeypatch.setattr(frames, "SIGN", 0.05)
    digest_of = entries.digest_of
    with channels() as (ours, theirs, cut):

        def slowly(file: int, check: Callable[[], None]) -> str:
            cut()
            time.sleep(1)
            return digest_of(file, check)

        monkeypatch.setattr(safe_writing, "digest_of", slowly)
        thread, said = received(theirs, target)
        sender = sender_of([ours], source)
        sender.run()
        thread.join()
        sender.stop()
    assert isinstance(said[0], Broken)
    assert not (target / "large").exists()
    assert len([*target.glob(f"{PARTS}*/*")]) == 1


def test_what_a_lost_transfer_has_left_makes_room_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    left_part(source, target)
    (source / "large").write_bytes(bytes(3 << 20))
    room = os.fstatvfs

    class Little:
        f_blocks, f_frsize = 1 << 20, 1
        f_bavail = 2 << 20

    monkeypatch.setattr(os, "fstatvfs", lambda _: Little)
    assert moved(source, target)["files"] == 1
    monkeypatch.setattr(os, "fstatvfs", room)
    assert tree(target) == tree(source)


def test_a_receiver_that_ends_before_another_one_has_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "SIGN", 0.05)
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("x")
    with channels() as slow, channels() as quick:
        first = received(slow[1], tmp_path / "slow", on_bytes=lambda _: time.sleep(1.5))
        second = received(quick[1], tmp_path / "quick")

        def close() -> None:
            second[0].join()
            quick[2]()

        threading.Thread(target=close).start()
        sender = sender_of([slow[0], quick[0]], source)
        sender.run()
        first[0].join()
        slow[2]()
        sender.stop()
    assert (sorted(sender.ends), sender.lost) == ([0, 1], {})


def test_a_file_that_changes_there_after_it_was_compared_keeps_its_time(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        each.mkdir()
        (each / "a").write_text("same")
    os.utime(target / "a", ns=(1, 1))
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target)
        say(ours, HELLO, listed(a_file("a", 4)))
        while ours.receive()[0] != frames.Kind.WANT:
            pass
        (target / "a").write_text("edit")
        say(ours, (frames.Kind.SAME, bytes(8)), (frames.Kind.LISTED, b""), (frames.Kind.END, b""))
        thread.join(5)
        cut()
    assert said[0]["errors"] == ["a: it was changed there meanwhile"]
    assert (target / "a").stat().st_mtime_ns > 1 << 60


def test_a_folder_that_cannot_be_emptied_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        each.mkdir()
    (target / "a").write_text("x")
    target.chmod(0o2775)

    def never(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "unlink", never)
    said = moved(source, target, delete=True)
    assert said["errors"] == ["a: Operation not permitted"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o2775


def test_what_other_computers_have_left_is_removed_after_a_day(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    for name in ("old", "new"):
        (target / f"{PARTS}-{name}").mkdir(parents=True)
        (target / f"{PARTS}-{name}" / "x").write_text("x")
    for each in (target / f"{PARTS}-old" / "x", target / f"{PARTS}-old"):
        os.utime(each, (1, 1))
    moved(source, target)
    assert [each.name for each in target.glob(f"{PARTS}*")] == [f"{PARTS}-new"]


def test_many_long_names_can_be_deleted(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    deep = target / ("ü" * 120) / ("ü" * 120) / ("ü" * 120)
    deep.mkdir(parents=True)
    for number in range(1500):
        (deep / f"{number:0100}").touch()
    assert moved(source, target, delete=True)["deleted"] == 1503


# --- a hostile sender ------------------------------------------------------------------------------------------


def say(channel: Channel, *said: tuple[int, object]) -> None:
    for kind, about in said:
        with contextlib.suppress(Broken):
            channel.send(kind, about if isinstance(about, bytes) else frames.packed(about))


HELLO = (frames.Kind.BEGIN, {"version": 1, "name": ""})
FILE = (frames.Kind.FILE, struct.pack(">QQ", 0, 0))
DONE = (frames.Kind.DONE, [0, "", ""])


def listed(*entries: Entry) -> tuple[int, object]:
    return (frames.Kind.LIST, [list(each) for each in entries])


def a_file(path: str = "a", size: int = 3, data: int | None = None) -> Entry:
    return Entry(path, "f", 0o644, size, 0, "", size if data is None else data)


ATTACKS: dict[str, list[tuple[int, object]]] = {
    **{f"path {path[:20]!r}": [HELLO, listed(a_file(path))] for path in HOSTILE_PATHS},
    "no text": [HELLO, (frames.Kind.LIST, [[7, "f", 0, 1, 0, "", 1]])],
    "a name of a part": [HELLO, listed(a_file(PARTS))],
    "a name below a part": [HELLO, listed(Entry(".SkyPool-Parts-x", "d"))],
    "a surrogate beyond bytes": [HELLO, listed(a_file("\ud800"))],
    "twice": [HELLO, listed(Entry("a", "d"), Entry("a", "d"))],
    "twice in another part": [HELLO, listed(a_file("a")), listed(a_file("a"))],
    "an earlier one later": [HELLO, listed(a_file("b"), a_file("a"))],
    "back into a folder": [HELLO, listed(Entry("a", "d"), Entry("b", "d"), a_file("b/x"), a_file("a/x"))],
    "below a file": [HELLO, listed(a_file("a"), a_file("a/x"))],
    "below what was not listed": [HELLO, listed(a_file("a/x"))],
    "a device": [HELLO, listed(Entry("a", "c", 0o644, 1))],
    "a size below 0": [HELLO, listed(a_file("a", -1))],
    "a size of no number": [HELLO, (frames.Kind.LIST, [["a", "f", 0, "1", 0, "", 1]])],
    "a mode of a flag": [HELLO, (frames.Kind.LIST, [["a", "f", True, 1, 0, "", 1]])],
    "a time beyond all": [HELLO, listed(Entry("a", "f", 0o644, 1, 1 << 70))],
    "a time before all": [HELLO, listed(Entry("a", "f", 0o644, 1, -(1 << 70)))],
    "a link without a target": [HELLO, listed(Entry("a", "l"))],
    "a link with a zero": [HELLO, listed(Entry("a", "l", text="x\0y"))],
    "a link with a long target": [HELLO, listed(Entry("a", "l", text="x" * 5000))],
    "a file with a target": [HELLO, listed(Entry("a", "f", 0o644, 1, 0, "/etc"))],
    "more than the disk has": [HELLO, listed(a_file("a", 1 << 60))],
    "more than the disk has in many": [HELLO, listed(*(a_file(f"{number:03}", 1 << 40) for number in range(999)))],
    "more data than size": [HELLO, listed(a_file("a", 1, 2))],
    "too short an entry": [HELLO, (frames.Kind.LIST, [["a", "f"]])],
    "too long an entry": [HELLO, (frames.Kind.LIST, [["a", "f", 0, 0, 0, "", 0, 0]])],
    "no list": [HELLO, (frames.Kind.LIST, 7)],
    "a list of text": [HELLO, (frames.Kind.LIST, "abcdefg")],
    "a list of nothing": [HELLO, (frames.Kind.LIST, [None])],
    "no JSON": [HELLO, (frames.Kind.LIST, b"x")],
    "JSON cut off": [HELLO, (frames.Kind.LIST, frames.packed([])[:-1])],
    "a bomb": [HELLO, (frames.Kind.LIST, zlib.compress(b" " * (64 << 20)))],
    "nesting": [HELLO, (frames.Kind.LIST, zlib.compress(b"[" * 100_000))],
    "another version": [(frames.Kind.BEGIN, {"version": 2, "name": ""})],
    "no version": [(frames.Kind.BEGIN, {})],
    "no greeting": [(frames.Kind.BEGIN, [])],
    "two greetings": [HELLO, HELLO],
    "a name with a folder": [(frames.Kind.BEGIN, {"version": 1, "name": "../a"})],
    "a name of no text": [(frames.Kind.BEGIN, {"version": 1, "name": 7})],
    "more than one file": [(frames.Kind.BEGIN, {"version": 1, "name": "a"}), listed(a_file("a"), a_file("b"))],
    "a folder for a file": [(frames.Kind.BEGIN, {"version": 1, "name": "a"}), listed(Entry("a", "d"))],
    "a list first": [listed(a_file("a"))],
    "a file first": [FILE],
    "data first": [HELLO, (frames.Kind.DATA, b"x")],
    "a hole first": [HELLO, (frames.Kind.HOLE, bytes(8))],
    "an end first": [HELLO, (frames.Kind.END, b"")],
    "a list after its end": [HELLO, (frames.Kind.LISTED, b""), listed(a_file("a"))],
    "two ends of the list": [HELLO, (frames.Kind.LISTED, b""), (frames.Kind.LISTED, b"")],
    "a file that was not asked for": [HELLO, FILE],
    "a file in a file": [HELLO, listed(a_file("a"), a_file("b")), FILE, (frames.Kind.FILE, struct.pack(">QQ", 1, 0))],
    "half a number": [HELLO, listed(a_file("a")), (frames.Kind.FILE, b"123")],
    "more data than announced": [HELLO, listed(a_file("a")), FILE, (frames.Kind.DATA, b"1234")],
    "data in a hole": [HELLO, listed(a_file("a", 8, 2)), FILE, (frames.Kind.DATA, b"123")],
    "a hole beyond the end": [HELLO, listed(a_file("a")), FILE, (frames.Kind.HOLE, (1 << 63).to_bytes(8))],
    "half the length of a hole": [HELLO, listed(a_file("a")), FILE, (frames.Kind.HOLE, b"123")],
    "less data than announced": [HELLO, listed(a_file("a")), FILE, (frames.Kind.DATA, b"1"), DONE],
    "a file that never begins": [HELLO, listed(a_file("a")), DONE],
    "a file that never comes": [HELLO, listed(a_file("a")), (frames.Kind.LISTED, b""), (frames.Kind.END, b"")],
    "a changed file that never comes": [
        HELLO, listed(a_file("a")), (frames.Kind.CHANGED, bytes(8)), (frames.Kind.LISTED, b""), (frames.Kind.END, b""),
    ],
    "an offset beyond what is there": [HELLO, listed(a_file("a")), (frames.Kind.FILE, struct.pack(">QQ", 0, 2))],
    "an end of nothing": [HELLO, DONE],
    "an end of another file": [HELLO, listed(a_file("a"), a_file("b")), FILE, (frames.Kind.DONE, [1, "", ""])],
    "an end that says nothing": [HELLO, listed(a_file("a")), FILE, (frames.Kind.DONE, 7)],
    "an end with a number": [HELLO, listed(a_file("a")), FILE, (frames.Kind.DONE, [0, 7, ""])],
    "an end with a list": [HELLO, listed(a_file("a")), FILE, (frames.Kind.DONE, [[0], "", ""])],
    "the same as nothing": [HELLO, (frames.Kind.SAME, bytes(8))],
    "changed nothing": [HELLO, (frames.Kind.CHANGED, bytes(8))],
    "an answer of a receiver": [HELLO, (frames.Kind.WANT, {"send": [], "hash": []})],
    "a kind that there is not": [HELLO, (99, b"")],
    "an error": [HELLO, (frames.Kind.FAILED, "no")],
    "an error of no text": [HELLO, (frames.Kind.FAILED, [["no"]])],
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_sender_that_says_what_it_may_not_is_refused_and_nothing_is_written_outside(
    attack: str, tmp_path: Path
) -> None:
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    before = tree(tmp_path)
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target, inside=True)
        say(ours, *ATTACKS[attack])
        thread.join(5)
        cut()
        thread.join(5)
    assert isinstance(said[0], Refused), said
    after = {path for path in tree(tmp_path) if PARTS not in path}
    assert after - {*before} <= {"deep/target/a", "deep/target/b"}
    assert not [each for each in target.rglob("*") if each.is_file() and PARTS not in str(each)]


@pytest.mark.parametrize("link", ["/etc", "..", "../..", "a/../../b", "../target2/x", "x/.."])
def test_links_that_lead_out_are_not_made_here(link: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with channels() as (ours, theirs, _):
        thread, said = received(theirs, target, inside=True)
        list_ = listed(Entry("in", "l", text="./x/y"), Entry("out", "l", text=link))
        say(ours, HELLO, list_, (frames.Kind.LISTED, b""), (frames.Kind.END, b""))
        thread.join(5)
    assert said[0]["errors"] == [f"out: it is a link that may lead out of the folder, to {link!r}"]
    assert [each.name for each in target.iterdir()] == ["in"]


def test_a_link_that_was_sent_is_not_followed(tmp_path: Path) -> None:
    target, outside = tmp_path / "target", tmp_path / "outside"
    outside.mkdir()
    target.mkdir()
    (target / "way").symlink_to(outside)  # as an earlier transfer, or the user, has left it
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target)
        say(ours, HELLO, listed(Entry("way", "d", 0o755), a_file("way/file")))
        say(
            ours,
            (frames.Kind.FILE, struct.pack(">QQ", 1, 0)),
            (frames.Kind.DATA, b"123"),
            (frames.Kind.DONE, [1, "", ""]),
        )
        say(ours, (frames.Kind.LISTED, b""), (frames.Kind.END, b""))
        thread.join(5)
        cut()
    assert said[0]["failed"] == 0
    assert [*outside.iterdir()] == []
    assert not (target / "way").is_symlink()
    assert (target / "way" / "file").read_bytes() == b"123"


ANSWERS: dict[str, list[tuple[int, object]]] = {
    "a file that there is not": [(frames.Kind.WANT, {"send": [[1, 0]], "hash": []})],
    "a file before all": [(frames.Kind.WANT, {"send": [[-1, 0]], "hash": []})],
    "a file twice": [(frames.Kind.WANT, {"send": [[0, 0], [0, 1]], "hash": []})],
    "an offset beyond the end": [(frames.Kind.WANT, {"send": [[0, 4]], "hash": []})],
    "an offset below 0": [(frames.Kind.WANT, {"send": [[0, -1]], "hash": []})],
    "an index of text": [(frames.Kind.WANT, {"send": [["0", 0]], "hash": []})],
    "a hash of a number": [(frames.Kind.WANT, {"send": [], "hash": [[0, 7]]})],
    "an answer of a list": [(frames.Kind.WANT, [])],
    "an answer of half": [(frames.Kind.WANT, {"send": []})],
    "answers without an end": [(frames.Kind.WANT, {"send": [], "hash": []})] * 100,
    "an answer without an end": [(frames.Kind.WANT, {"send": [[0, 0]] * 100_000, "hash": []})],
    "a hash without an end": [(frames.Kind.WANT, {"send": [], "hash": [[0, "x" * 100_000]]})],
    "an early end": [(frames.Kind.END, {"files": 1, "bytes": 1, "deleted": 0, "failed": 0, "errors": []})],
    "extra before the end": [(frames.Kind.EXTRA, [["x", False]])],
    "data": [(frames.Kind.DATA, b"x")],
    "nonsense": [(77, b"x")],
    "no JSON": [(frames.Kind.WANT, b"x")],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_receiver_that_answers_what_it_may_not_is_refused(answer: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("abc")
    with channels() as (ours, theirs, cut):
        say(theirs, *ANSWERS[answer])
        sender = sender_of([ours], source)
        running = threading.Thread(target=sender.run)
        running.start()
        running.join(5)
        assert not running.is_alive()
        cut()
        sender.stop()
    assert isinstance(sender.lost[0], Refused)
    assert not sender.ends


def lost_after(tmp_path: Path, said: tuple[int, object]) -> Broken | Refused:
    """Why a sender of nothing gives up a receiver that says this at the end."""
    source = tmp_path / "source"
    source.mkdir()
    with channels() as (ours, theirs, cut):
        sender = sender_of([ours], source)
        running = threading.Thread(target=sender.run)
        running.start()
        while theirs.receive()[0] != frames.Kind.END:
            pass
        say(theirs, said)
        running.join(5)
        assert not running.is_alive()
        cut()
        sender.stop()
    return sender.lost[0]


@pytest.mark.parametrize(
    "end", [{}, [], *({"files": n, "bytes": 1, "deleted": 0, "failed": 0, "errors": []} for n in (-1, 10**400))]
)
def test_a_receiver_whose_last_word_makes_no_sense_is_refused(end: object, tmp_path: Path) -> None:
    assert isinstance(lost_after(tmp_path, (frames.Kind.END, end)), Refused)


def test_the_list_of_a_hostile_sender_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_MEMORY", 1 << 20)
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, tmp_path / "target")
        parts = [listed(*(a_file(f"{part:04}-{each:03}") for each in range(1000))) for part in range(10)]
        saying = threading.Thread(target=say, args=(ours, HELLO, *parts))
        saying.start()
        thread.join(5)
        cut()
        saying.join()
    assert isinstance(said[0], Refused)
    assert "than fit into memory" in str(said[0])


def test_a_node_that_asks_what_it_may_delete_is_refused_unless_it_may_delete(tmp_path: Path) -> None:
    assert isinstance(lost_after(tmp_path, (frames.Kind.EXTRA, [["x", False]])), Refused)


def test_an_error_of_ours_in_an_answer_does_not_hang(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for each in (source, target):
        each.mkdir()
    (target / "x").write_text("x")

    def fails(path: str, is_folder: bool) -> bool:
        raise RuntimeError("a defect")

    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, target, delete=True)
        sender = sender_of([ours], source, fails, delete=True)
        sender.run()
        cut()
        thread.join()
        sender.stop()
    assert "a defect" in str(sender.lost[0])
    assert isinstance(said[0], Broken)


@pytest.mark.parametrize("again", [a_file("never listed"), a_file("a")])
def test_what_has_not_changed_is_not_listed_again(again: Entry, tmp_path: Path) -> None:
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, tmp_path / "target", inside=True)
        say(ours, HELLO, listed(a_file("a")), (frames.Kind.LISTED, b""), (frames.Kind.AGAIN, [list(again)]))
        thread.join(5)
        cut()
    assert isinstance(said[0], Refused)


@pytest.mark.parametrize("how", ["changed", "folders"])
def test_no_part_of_a_list_escapes_the_bound_of_memory(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "_MEMORY", 1 << 20)
    said_: list[tuple[int, object]] = [HELLO]
    for part in range(10):
        names = [f"{part:04}-{each:03}" for each in range(1000)]
        said_.append(listed(*(a_file(each) if how == "changed" else Entry(each, "d", 0o700) for each in names)))
        if how == "changed":
            said_ += [(frames.Kind.CHANGED, struct.pack(">Q", 1000 * part + each)) for each in range(1000)]
    with channels() as (ours, theirs, cut):
        thread, said = received(theirs, tmp_path / "target")
        saying = threading.Thread(target=say, args=(ours, *said_))
        saying.start()
        thread.join(10)
        cut()
        saying.join()
    assert isinstance(said[0], Refused)
    assert "than fit into memory" in str(said[0])


# --- what is left out ------------------------------------------------------------------------------------------


def test_gitignore_holds_as_in_git(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("*.log\n/build\ncache/\n!keep.log\n")
    below = tmp_path / "project"
    below.mkdir()
    (below / ".gitignore").write_text("*.tmp\n!once.log\n")
    (below / ".skypoolignore").write_text("data/\n!important.tmp\n")
    left_out = Ignored(str(below))
    answers = {
        "a.log": True, "keep.log": False, "once.log": False, "build": False, "sub/a.log": True, "a.tmp": True,
        "important.tmp": False, "sub/important.tmp": False, "train.py": False,
    }  # fmt: skip
    assert {path: left_out(path, False) for path in answers} == answers
    assert (left_out("cache", True), left_out("cache", False), left_out("data", True)) == (True, False, True)


def test_a_folder_that_is_named_is_sent_though_it_is_left_out_of_a_larger_one(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("/build\n*.log\n")
    below = tmp_path / "build" / "out"
    below.mkdir(parents=True)
    (below / ".gitignore").write_text("*.tmp\n")
    left_out = Ignored(str(below))
    assert [left_out(path, False) for path in ("a.o", "a.log", "a.tmp")] == [False, False, True]


def test_a_line_that_is_no_pattern_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("!\n[z-a]\n*.log\r\n\\\n")
    assert Ignored(str(tmp_path))("a.log", False)


# --- nodes -----------------------------------------------------------------------------------------------------


@sky.compute
def contents(path: str) -> dict[str, str]:
    return {str(each.relative_to(path)): each.read_text() for each in sorted(Path(path).rglob("*")) if each.is_file()}


@sky.compute
def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_a_pool_sends_to_all_nodes_and_fetches_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # calls on this computer run here, too
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "a.py").write_text("1")
    (project / "sub" / "b.py").write_text("2")
    (project / "x.log").write_text("no")
    (project / ".gitignore").write_text("*.log\n")
    with sky.ComputePool("local", nodes=2, slots=1, console="off") as pool:
        done = pool.push(project)
        assert (done.files, done.bytes) == (6, 16)
        expected = {".gitignore": "*.log\n", "a.py": "1", "sub/b.py": "2"}
        assert contents("project") @ pool == [expected, expected]
        pool.push(project / "a.py", "other/", node=1)
        assert contents("other").with_options(node=1) >> pool == {"a.py": "1"}
        write("out/model.pt", "weights").with_options(node=1) >> pool
        back = tmp_path / "back"
        assert pool.pull("out", back, node=1).files == 1
        assert (back / "model.pt").read_text() == "weights"
        (back / "old" / "deep").mkdir(parents=True)
        for path in ("extra", ".env", "old/deep/file"):
            (back / path).write_text("mine")
        (back / ".skypoolignore").write_text(".env\n.skypoolignore\n")
        assert pool.pull("out", back, node=1, delete=True).deleted == 4
        assert sorted(os.listdir(back)) == [".env", ".skypoolignore", "model.pt"]
        pool[1].pull("out/model.pt", tmp_path / "single")
        assert (tmp_path / "single").read_text() == "weights"
        with pytest.raises(TransferError, match="no/such: No such file or directory"):
            pool.pull("no/such", back)
        with pytest.raises(sky.UsageError, match="must be a whole number, not 'all'"):
            pool.pull("out", back, node="all")  # type: ignore[arg-type]
        (tmp_path / "latest").symlink_to(back / "model.pt")
        pool.push(tmp_path / "latest", "links/", node=0)
        assert contents("links").with_options(node=0) >> pool == {"latest": "weights"}
        with pytest.raises(sky.UsageError, match="does not exist; name a file or folder of this computer"):
            pool.push(tmp_path / "nothing")


def test_another_terminal_sends_and_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # no pool of another test is there to be meant
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a\x1b[31m").write_bytes(bytes(3000))
    program = [sys.executable, "-m", "skypool"]
    with sky.ComputePool("local", name="here", slots=1, console="off"):
        sent = subprocess.run([*program, "push", "here", "source", "there"], capture_output=True, text=True)
        assert (sent.returncode, sent.stderr) == (0, "")
        assert re.fullmatch(r"1 file, 3\.0 kB in \d+\.\d s\n", sent.stdout), sent.stdout
        fetched = subprocess.run([*program, "pull", "here", "there", "back"], capture_output=True, text=True)
        assert (fetched.returncode, fetched.stderr) == (0, "")
        unknown = subprocess.run([*program, "push", "her", "source"], capture_output=True, text=True)
        assert unknown.returncode != 0
        assert "did you mean here?" in unknown.stderr
    assert tree(tmp_path / "there") == tree(tmp_path / "source") == tree(tmp_path / "back")


def test_a_transfer_is_work_of_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(bytes(3000))
    idle: list[list[bool]] = []
    with sky.ComputePool("local", nodes=2, slots=1, console="off") as pool:
        engine: Any = pool._engine

        def note(_: object = None) -> None:
            known = engine.dispatch.roster.idleness()
            idle.append([known[node].is_idle for node in (0, 1)])

        abs_ = sky.compute(abs)(-1)
        assert abs_ @ pool == [1, 1]
        eventually(lambda: all(each.is_idle for each in engine.dispatch.roster.idleness().values()))
        pool.push("source", tmp_path / "there", node=1, progress=note)
        pool.pull("there", tmp_path / "back", node=1, progress=note)
        note()
    assert idle == [[True, False], [True, False], [True, True]]


def test_ctrl_c_ends_a_transfer_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large").write_bytes(bytes(64 << 20))
    program = """
        import time, skypool as sky
        def told(progress):
            if progress.files:
                print("begun", flush=True)
                time.sleep(1)
        with sky.ComputePool("local", nodes=2, slots=1, console="off") as pool:
            pool.push("source", "there", progress=told)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "begun\n"
        ends = [pid for pid, folder in processes().items() if folder == str(tmp_path) and is_an_end(pid)]
        assert len(ends) == 2
        for each in ends:
            os.kill(each, signal.SIGSTOP)
        time.sleep(2)  # nobody takes data any more
        began = time.monotonic()
        client.send_signal(signal.SIGINT)
        _, said = client.communicate(timeout=30)
        assert time.monotonic() - began < 10
    assert said.rstrip().endswith("KeyboardInterrupt"), said
    assert not (tmp_path / "there" / "large").exists()
    eventually(lambda: str(tmp_path) not in processes().values(), 20)


def processes() -> dict[int, str]:
    """The working folder of each process that this user can see, by its pid."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(each.name)] = os.readlink(each / "cwd")
    return found


def is_an_end(pid: int) -> bool:
    """Whether a process is a node's end of a transfer."""
    with contextlib.suppress(OSError):
        return b"zlib.decompress" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_an_error_of_the_users_function_comes_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_text("x")

    def fails(_: object) -> None:
        raise KeyError("mine")

    with sky.ComputePool("local", slots=1, console="off") as pool:
        with pytest.raises(KeyError, match="mine"):
            pool.push("source", "there", progress=fails)
        pool.push("source", "there")
        with pytest.raises(KeyError, match="mine"):
            pool.pull("there", "back", progress=fails)
        with pytest.raises(sky.UsageError, match=r"'\.\.' does not end with a name; say where its contents are to go"):
            pool.pull("..")
        assert pool.pull("there/a").files == 1
        assert (tmp_path / "a").read_text() == "x"


def test_a_node_that_cannot_be_reached_is_a_lost_connection(tmp_path: Path) -> None:
    end = NodeEnd(3, Subprocess(), lambda script: ["/no/such/program"])
    with pytest.raises(sky.ConnectionLost, match="node 3 cannot be reached: /no/such/program: No such file"):
        transfer.push([end], str(tmp_path), "there", patience=1)
    with pytest.raises(sky.ConnectionLost, match="node 3 cannot be reached: /no/such/program: No such file"):
        transfer.pull(end, "there", str(tmp_path), patience=1)


def test_one_file_that_cannot_be_written_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in "abc":
        (source / name).write_text(name)
    pwrite = os.pwrite

    def too_large(file: int, content: bytes, at: int) -> int:
        if bytes(content) == b"b":
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return pwrite(file, content, at)

    monkeypatch.setattr(os, "pwrite", too_large)
    said = moved(source, tmp_path / "target")
    assert (said["files"], said["errors"]) == (2, ["b: File too large"])
    assert sorted(os.listdir(tmp_path / "target")) == ["a", "c"]


def test_a_disk_without_locks_will_do(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert moved(source, tmp_path / "target")["failed"] == 0
    assert {each for each in tree(tmp_path / "target") if not each.startswith(PARTS)} == {*tree(source)}


def test_old_folders_without_anything_new_do_not_come_with_what_is_new(tmp_path: Path) -> None:
    for folder in ("old/deep", "left/empty"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "old" / "deep" / "file").touch()
    time.sleep(0.02)  # clocks of file systems are coarse
    (tmp_path / "begun").touch()
    since = (tmp_path / "begun").stat().st_ctime_ns
    (tmp_path / "old" / "deep" / "file").write_text("new")
    (tmp_path / "made").mkdir()
    found = node_end._without_old_folders(str(tmp_path), entries.walk(str(tmp_path), lambda *_: False), since)
    assert [each.path for each in found] == ["begun", "made", "old", "old/deep", "old/deep/file"]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "large").write_bytes(bytes(range(256)) * 4096)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    said = moved(source, tmp_path / "target")
    assert isinstance(said, Refused)
    assert "No space left on device" in str(said)
    assert not (tmp_path / "target" / "large").exists()


def test_a_leaving_node_waits_for_a_transfer() -> None:
    with sky.ComputePool("local", nodes=2, slots=1, console="off") as pool:
        with pool._sender.transfer("a test", 0):
            pool.retire(0)
            time.sleep(0.5)  # not for luck: it must not end in this time
            assert dict(pool.nodes) == {0: "leaving", 1: "ready"}
        eventually(lambda: pool.nodes[0] == "ended", 30, "the end of the node")


@pytest.mark.parametrize("path", ["a/.git/config", ".GIT/config", ".git"])
def test_a_checkout_is_refused_where_git_would_obey_it(path: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / path).parent.mkdir(parents=True)
    (source / path).write_text("x")
    assert isinstance(moved(source, target, no_git=True), Refused)
    assert not [each for each in target.rglob("*") if each.name.lower() == ".git"]


def test_a_folder_that_git_takes_for_a_repository_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("objects", "refs"):
        (source / "model" / name).mkdir(parents=True)
    (source / "model" / "config").write_text("[core]\nfsmonitor = touch /tmp/obeyed\n")
    moved(source, target, no_git=True)
    assert (target / "model" / "config").exists()
    (source / "model" / "HEAD").write_text("ref: refs/heads/main\n")
    assert isinstance(moved(source, target, no_git=True), Refused)
    assert not (target / "model" / "HEAD").exists()
    assert isinstance(moved(source, tmp_path / "another", no_git=True), Refused)
    assert not (tmp_path / "another" / "model" / "HEAD").exists()


def test_of_what_is_new_a_node_leaves_out_repositories_and_sends_the_rest(tmp_path: Path) -> None:
    known = tmp_path / "known"
    known.touch()
    os.utime(known, (0, 0))
    for number, (folder, head) in enumerate({"m": "HEAD", "n": "head", "": "head"}.items()):
        node = tmp_path / f"node {number}"
        for name in ("objects", "refs"):
            (node / folder / name).mkdir(parents=True)
        for name in (os.path.join(folder, head), "a/whole", "a/head"):
            (node / name).parent.mkdir(exist_ok=True)
            (node / name).write_text("x")
        end = NodeEnd(0, Subprocess(), lambda script: ["sh", "-c", f"python={sys.executable} cwd=/; {script}"])
        target = tmp_path / f"here {number}"
        transfer.pull(end, str(node), str(target), patience=10, since=1, known=str(known), no_git=True)
        assert {each.name for each in target.rglob("*") if each.is_file()} == {"whole", "head"}
        assert not (target / folder / head).exists()
    assert known.stat().st_mtime > 0, "nobody takes it for one of a run that is over"


def fetched(node: Path, target: Path, **options: Any) -> set[str]:
    """Fetch what is new on a node; the names of the files that are here then."""
    end = NodeEnd(0, Subprocess(), lambda script: ["sh", "-c", f"python={sys.executable} cwd=/; {script}"])
    transfer.pull(end, str(node), str(target), patience=10, no_git=True, **options)
    return {str(each.relative_to(target)) for each in target.rglob("*") if each.is_file()}


def test_a_file_that_is_being_written_does_not_replace_a_whole_one(tmp_path: Path) -> None:
    node, target = tmp_path / "node", tmp_path / "here"
    node.mkdir()
    (node / "model").write_bytes(bytes(1_000_000))
    (node / "log").write_text("1\n")
    assert fetched(node, target, since=1, settled=True) == {"model", "log"}
    with (node / "model").open("wb") as writing, (node / "log").open("a") as log, (node / "new").open("wb"):
        writing.write(bytes(300_000))
        writing.flush()
        log.write("2\n")
        log.flush()
        assert fetched(node, target, since=1, settled=True) == {"model", "log", "new"}
        assert ((target / "model").stat().st_size, (target / "log").read_text()) == (1_000_000, "1\n2\n")
        assert fetched(node, target, since=1) == {"model", "log", "new"}
        assert (target / "model").stat().st_size == 300_000, "the last fetch takes all"


def test_a_file_that_changes_while_a_settled_folder_is_read_is_left_for_later(tmp_path: Path) -> None:
    node, target = tmp_path / "node", tmp_path / "here"
    node.mkdir()
    (node / "model").write_bytes(bytes(1_000_000))
    here, there = socket.socketpair()
    with here, there:
        channels = Channel(here.fileno(), here.fileno()), Channel(there.fileno(), there.fileno())
        listed = [entries.entry_of("model", str(node / "model"))]
        (node / "model").write_bytes(bytes(300_000))  # after it was listed
        sender = Sender([channels[0]], str(node), "", listed, again=False)
        sending = threading.Thread(target=sender.run)
        sending.start()
        said = Receiver(channels[1], str(target), inside=True, settled=True).run()
        sending.join()
        sender.stop()
    assert (said["files"], said["failed"], sender.lost) == (0, 0, {})
    assert not (target / "model").exists()


def test_a_folder_that_is_renamed_to_a_known_name_is_new(tmp_path: Path) -> None:
    copy = tmp_path / "projects" / "a"
    for name, step in (("prev", "90"), ("latest", "100")):
        (copy / "out" / name).mkdir(parents=True)
        (copy / "out" / name / "step").write_text(step)
    node_folders.mark(str(copy), "1")
    since, _, known, _ = node_folders.begun(str(copy), "1", "out")
    assert fetched(copy / "out", tmp_path / "before", since=since, known=known) == set()
    shutil.rmtree(copy / "out" / "prev")
    (copy / "out" / "latest").rename(copy / "out" / "prev")
    (copy / "out" / "latest").mkdir()
    (copy / "out" / "latest" / "step").write_text("110")
    here = tmp_path / "here"
    assert fetched(copy / "out", here, since=since, known=known) == {"prev/step", "latest/step"}
    assert ((here / "prev/step").read_text(), (here / "latest/step").read_text()) == ("100", "110")


def test_a_repository_whose_parts_are_elsewhere_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "model").mkdir(parents=True)
    (source / "model" / "HEAD").write_text("ref: refs/heads/main\n")
    (source / "model" / "commondir").write_text("../x\n")
    assert isinstance(moved(source, target, no_git=True), Refused)
    assert not list(target.rglob("HEAD"))
