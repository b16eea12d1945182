"""A small runner: it speaks the protocol of a runner, and does what the needs say, a JSON object.

`small_runner.py ROOT`. The fields of the needs: `notes`, the folder with all files named here; `socket`, that of the
agent; `retries` and `ranks`. At each step it appends a line to the file `journal`. If there is a file `die-STEP`, it
removes it and kills itself there. With a file `hang`, it says nothing any more, and with a file `stuck`, its loop
stands still. With a file `unstored`, it cannot store how the run has ended. With a file `again`, it asks for its calls
back, and sends them again; with a file `bye`, it says that the machine is to end. The program appends a line to the
file `ran`, and waits for the file `go`; see `program`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])

from skypool.calls.call import compute
from skypool.gangs.environment import Member
from skypool.head import messages, steps
from skypool.head.states import (
    AgentSaid,
    GotNeeds,
    NotStored,
    Outcome,
    Runner,
    RunnerEvent,
    RunnerPhase,
    RunOver,
    Say,
    StandsBy,
    Starts,
    Stops,
    Store,
    Stored,
    Takes,
)
from skypool.wire import exceptions
from skypool.wire.frames import (
    WIRE_VERSION,
    Decoder,
    Kind,
    frame,
    header_of,
    long_frame,
    split_buffers,
)


def program(notes: str, attempt: int, rank: int) -> int:
    """Note a start, wait for the file `go`, and return. With a file `crash`, remove it and be killed instead."""
    with open(os.path.join(notes, "ran"), "a") as file:
        file.write(f"{attempt} {rank}\n")
    while not os.path.exists(os.path.join(notes, "go")):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(notes, "crash"))
            os.kill(os.getpid(), 9)
        time.sleep(0.02)
    return 7


class SmallRunner:
    def __init__(self, said: dict[str, Any]) -> None:
        self.notes = Path(said["notes"])
        self.socket_path: str = said["socket"]
        self.ranks: int = said["ranks"]
        self.state = Runner(said["retries"])
        self.link: socket.socket | None = None
        self.holder: socket.socket | None = None
        self.decoder = Decoder()
        self.ids: dict[int, list[int]] = {}
        self.known: list[int] = []
        self.lines = self.sent = b""
        self.moves = 0

    def at(self, step: str) -> None:
        """Note a step, and die there if the test says so."""
        with open(self.notes / "journal", "a") as file:
            file.write(f"{os.getpid()} {step}\n")
        if (self.notes / f"die-{step}").exists():
            (self.notes / f"die-{step}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, message: Any) -> None:
        os.write(1, messages.line(message))

    def run(self) -> None:
        self.step(GotNeeds())
        while self.state.phase is not RunnerPhase.OVER:
            if (self.notes / "hang").exists():
                time.sleep(0.05)
                continue
            self.moves += not (self.notes / "stuck").exists()
            self.write(messages.Alive(self.moves))
            link = -1 if self.link is None else self.link.fileno()
            ready = select.select([0, *([link] if self.link else [])], [], [], 0.1)[0]
            if 0 in ready:
                self.hear()
            if link in ready:
                self.receive()

    def hear(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(0)  # the agent has ended
        *lines, self.lines = (self.lines + data).split(b"\n")
        for line in lines:
            message = messages.to_runner(line)
            self.at(f"got-{type(message).__name__}")
            self.step(AgentSaid(message))

    def receive(self) -> None:
        assert self.link is not None
        n = self.link.recv_into(self.decoder.space())
        if n == 0:
            sys.exit("the agent has closed the connection")
        for f in self.decoder.advance(n):
            if f.kind is Kind.WELCOME:
                self.known = list(header_of(f)["calls"])
            elif f.kind is Kind.TAKEN:
                sys.exit(f"refused: {f.header}")
            elif f.kind is Kind.OUTCOME:
                buffers = split_buffers(f.body, f.header["lens"])
                told = "" if f.header["ok"] else " ".join(str(exceptions.load_error(buffers)).splitlines())
                with open(self.notes / "outcomes", "a") as file:
                    file.write(f"{f.header['id']} {told}\n")
                if (self.notes / "again").exists():
                    acknowledged = frame(Kind.ACK, {"calls": [f.header["id"]], "output": 0})
                    self.link.sendall(b"".join(acknowledged) + self.sent)

    def step(self, event: RunnerEvent) -> None:
        self.state, actions = steps.runner(self.state, event)
        for action in actions:
            match action:
                case Say(Takes(heir)):
                    self.at("before-Takes")
                    self.take(heir)
                    self.at("after-Takes")
                case Say(Starts(attempt)):
                    self.at("before-Starts")
                    self.start(attempt)
                    if (self.notes / "bye").exists():
                        assert self.link is not None
                        self.link.sendall(b"".join(frame(Kind.BYE, {})))
                    self.at("after-Starts")
                case Say(Stops()):
                    assert self.link is not None
                    for id_ in self.known + [each for ids in self.ids.values() for each in ids]:
                        self.link.sendall(b"".join(frame(Kind.CANCEL, {"id": id_, "grace": 0.2})))
                case Say(StandsBy() | RunOver() as message):
                    self.at(f"before-{type(message).__name__}")
                    self.write(message)
                    self.at(f"after-{type(message).__name__}")
                case Store(outcome):
                    self.at("before-Store")
                    self.store(outcome)

    def store(self, outcome: Outcome) -> None:
        path = self.notes / "stored"
        if not path.exists():
            path.with_suffix(".new").write_text(outcome.value)
            path.with_suffix(".new").rename(path)
        if (self.notes / "unstored").exists():
            self.step(NotStored(outcome, "how it has ended could not be stored: no room"))
            return
        self.at("after-Store")
        self.step(Stored(Outcome(path.read_text())))

    def take(self, heir: str) -> None:
        self.link = connect(self.socket_path, self)
        hello = {"wire": WIRE_VERSION, "session": f"runner-{os.getpid()}", "calls": [], "epoch": 0, "heir": heir}
        self.link.sendall(b"".join(long_frame(Kind.HELLO, hello)))

    def start(self, attempt: int) -> None:
        assert self.link is not None
        code = compute(program).code()
        said: dict[str, Any] = {"key": code.key, "lens": [len(each) for each in code.buffers], "name": "program"}
        self.link.sendall(b"".join(frame(Kind.FUNCTION, said, code.buffers)))
        for rank in range(self.ranks):
            id_ = os.getpid() * 1000 + 10 * attempt + rank
            self.ids.setdefault(attempt, []).append(id_)
            payload, _ = compute(program)(str(self.notes), attempt, rank).payload()
            self.sent = call(id_, code.key, payload, attempt, rank, self.ranks)
            self.link.sendall(self.sent)
            if (self.notes / "again").exists():
                recall = frame(Kind.RECALL, {"n": 8, "cpu": False})
                self.link.sendall(b"".join(recall) + self.sent + call(7, code.key, payload, attempt))
            self.at(f"sent-{rank}")


def connect(path: str, keeper: Any) -> socket.socket:
    """Return a connection to the agent, as its holder makes one. `keeper` keeps the holder's socket."""
    keeper.holder = holder = socket.socket(socket.AF_UNIX)
    holder.connect(path)
    ours, theirs = socket.socketpair()
    socket.send_fds(holder, [b"skypool"], [theirs.fileno(), theirs.fileno()])
    theirs.close()
    return ours


def call(id_: int, fn: str, payload: Sequence[Any], attempt: int, rank: int = 0, ranks: int = 1) -> bytes:
    """Return the frame of a call."""
    header: dict[str, Any] = {"id": id_, "fn": fn, "lens": [len(each) for each in payload], "output": "silent"}
    if attempt:
        header["attempt"] = attempt
    if ranks > 1:
        member = Member(rank, ranks, rank, ranks, 0, 1, 1, False, f"gang-{attempt}", "127.0.0.1", 40001, 40002)
        header |= {"gang": member.header, "world": [0, ["127.0.0.1"]]}
    return b"".join(frame(Kind.CALL, header, payload))


def read(size: int) -> bytes:
    """Read so many bytes of stdin, and no more."""
    data = b""
    while len(data) < size and (part := os.read(0, size - len(data))):
        data += part
    return data


if __name__ == "__main__":
    SmallRunner(json.loads(messages.read_needs(read))).run()
