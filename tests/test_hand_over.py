"""The agent's part of a hand-over: a real agent with its keeper, a small runner, and clients that speak the protocol."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skypool.head import messages, rows
from skypool.head.states import (
    Abandon,
    Ask,
    CancelRun,
    Claim,
    Commit,
    Outcome,
    Prepare,
    Stage,
    Status,
    ToAgent,
)
from skypool.wire.frames import WIRE_VERSION, Decoder, Frame, Kind, frame, header_of, long_frame
from tests.conftest import eventually
from tests.lab import small_runner

ROOT = Path(__file__).parent.parent
LAB = ROOT / "tests" / "lab"
CLAIM = Claim("train-7")
HEIR = "the heir's word"


class Peer:
    """A connection to the agent: of its client, or of anybody else who may log in."""

    def __init__(self, head: Head, name: str = "") -> None:
        self.link = small_runner.connect(str(head.folder / "agent.sock"), self)
        self.decoder = Decoder()
        self.frames: list[tuple[Kind, dict[str, Any]]] = []
        self.is_open = True
        if name:
            self.send(long_frame(Kind.HELLO, {"wire": WIRE_VERSION, "session": name, "calls": [], "epoch": 0}))

    def send(self, buffers: list[Any]) -> None:
        self.link.sendall(b"".join(buffers))

    def say(self, message: ToAgent, needs: bytes = b"", **more: Any) -> None:
        self.send(frame(Kind.HANDOVER, messages.to_json(message) | more, [needs]))

    def read(self, seconds: float = 0.1) -> None:
        if self.is_open and select.select([self.link], [], [], seconds)[0]:
            n = 0
            with contextlib.suppress(ConnectionError):
                n = self.link.recv_into(self.decoder.space())
            self.is_open = n > 0
            self.frames += [(f.kind, header_of(f)) for f in self.decoder.advance(n)] if n else []

    def hears(self, test: Callable[[Kind, dict[str, Any]], bool], seconds: float = 30.0) -> dict[str, Any]:
        """Return the header of the first frame like this, and forget it and those before it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for index, (kind, header) in enumerate(self.frames):
                if test(kind, header):
                    del self.frames[: index + 1]
                    return header
            assert self.is_open, f"closed after {self.frames}"
            self.read()
        raise AssertionError(f"only {self.frames}")

    def gets(self, kind: Kind) -> dict[str, Any]:
        return self.hears(lambda each, header: each is kind)

    def status(self) -> Status:
        return messages.status(self.gets(Kind.HANDED))

    def until(self, stage: Stage, seconds: float = 30.0) -> Status:
        """Return the first state that is in this stage."""
        like = lambda kind, header: kind is Kind.HANDED and header["stage"] == stage.value  # noqa: E731
        return messages.status(self.hears(like, seconds))

    def asks(self, message: ToAgent) -> Status:
        """Return the answer to a message, after all that came before."""
        while self.frames or select.select([self.link], [], [], 0)[0]:
            self.read(0)
            self.frames.clear()
            assert self.is_open
        self.say(message)
        return self.status()

    def is_closed(self) -> bool:
        self.read(0)
        return not self.is_open


class Head:
    """A machine with its agent, and the files by which runner and program are told what to do."""

    def __init__(self, place: Path, guard: str = "", lease: float = 60.0, ranks: int = 1, retries: int = 0) -> None:
        self.place, self.folder, self.notes = place, place / "node", place / "notes"
        for each in (self.folder, self.notes):
            each.mkdir(0o700)
        self.run = place / "home" / "heads" / "train-7-1"
        config = {"folder": str(self.folder), "spool": str(self.folder), "cwd": str(self.folder)}
        more: dict[str, Any] = {"lease": lease, "slots": 1, "liveness": 5.0}
        if guard:
            (place / "lease").write_text(" " * 32)
            more["guard"] = str(place / "lease")
        runner = [sys.executable, str(LAB / "small_runner.py"), str(ROOT)]
        argv = [sys.executable, "-m", "tests.lab.head_agent", json.dumps(config | more), guard or "holds", *runner]
        self.keeper = subprocess.Popen(argv, cwd=ROOT)
        said = {"notes": str(self.notes), "socket": str(self.folder / "agent.sock")}
        self.needs = json.dumps(said | {"ranks": ranks, "retries": retries}).encode()
        eventually((self.folder / "keeper.json").exists, 30, "the keeper")
        self.pid = json.loads((self.folder / "keeper.json").read_text())["pid"]
        self.client = Peer(self, "client")
        self.agent = self.client.gets(Kind.WELCOME)["pid"]

    def tell(self, name: str) -> None:
        (self.notes / name).touch()

    def lines(self, name: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self.notes / name).read_text().splitlines()
        return []

    def steps(self) -> list[str]:
        return [each.split()[1] for each in self.lines("journal")]

    def runners(self) -> list[int]:
        return list(dict.fromkeys(int(each.split()[0]) for each in self.lines("journal")))

    def prepare(self, end: float = 600.0, keep: float = 0.0) -> None:
        self.client.say(Prepare(CLAIM, end, HEIR), self.needs, folder=str(self.run), keep=keep)

    def commit(self, end: float = 600.0, keep: float = 0.0) -> None:
        self.prepare(end, keep)
        self.client.until(Stage.READY)
        self.client.say(Commit(CLAIM))
        self.client.until(Stage.COMMITTED)

    def ran(self) -> None:
        eventually(lambda: bool(self.lines("ran")), 60, "the start of the program")

    def is_gone(self, seconds: float = 60.0) -> None:
        """Wait until the agent has ended and all that it has started."""
        self.keeper.wait(seconds)
        assert not self.folder.exists()
        for pid in self.runners():
            assert not lives(pid)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.keeper.wait(30)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Head]]:
    made: list[Head] = []

    def start(**more: Any) -> Head:
        made.append(Head(tmp_path, **more))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_a_run_that_was_handed_over_ends_without_its_client(started: Callable[..., Head]) -> None:
    head = started()
    before = time.time()
    head.commit(end=600)
    row = rows.read(str(head.run))
    assert row is not None
    assert (row.claim, row.heir) == (CLAIM, messages.heir_digest(HEIR))
    assert before + 600 <= row.end <= time.time() + 600
    assert HEIR not in (head.run / rows.FILE).read_text()
    head.client.link.close()
    head.ran()
    watcher = Peer(head)
    assert watcher.asks(Ask(CLAIM)) == Status(CLAIM, Stage.COMMITTED)
    head.tell("go")
    assert watcher.until(Stage.OVER).outcome is Outcome.ENDED
    head.is_gone()
    assert head.lines("ran") == ["1 0"]
    assert rows.read(str(head.run)) == row  # it outlives the agent's folder
