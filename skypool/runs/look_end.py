"""Sends what this machine has of a run that belongs to it, and what its program prints, to whoever looks in.

A node runs this text as a program, as `files.transfer.node_program` says. It only reads. Each message begins with
`MESSAGE`: its kind, the attempt, the rank, the number of an output file, the position in it, and the length of the
content that follows. The kinds are:

- STATE: what is there of the run, as JSON. It comes first, and whenever it has changed. As long as no end is stored,
  the agent is asked, too: it knows of an end that could not be stored.
- OUTPUT: a piece of an output file (see `output_files`).
- MISSING: the machine no longer has what comes before this position.
- END: a process of the program has ended. The content is that of its file "end".
- CURRENT: everything was sent that is there. It comes about once a second.
- OVER: nothing more will come.
"""

import contextlib
import json
import os
import select
import socket
import struct
import time
from typing import Any

from skypool.agent import agent_socket
from skypool.runs import agent_door
from skypool.runs.follow_end import EVERY, end_of, kept, send

MESSAGE = struct.Struct("!BIIIII")
STATE, OUTPUT, MISSING, END, CURRENT, OVER = range(1, 7)
_FILES = {"row": "row.json", "status": "status.json", "about": "about.json", "posted": "posted.json"}
"""The files in the folder of the run whose text is part of its state."""
_MOST_TEXT = 1 << 20
_MOST_PIECE = 1 << 20
_SHORT = 0.01
"""The shortest pause in seconds while nothing new is there."""
_LONG = 0.2
"""The longest pause."""
_TO_ANSWER = 1.0
"""Seconds in which the agent has answered. One that hangs takes longer."""
_MOST_ANSWER = 64 << 10
_TO_POST = 30.0
"""Seconds in which the runner has posted the end of the run, after it was stored."""


class Source:
    """The output of one process of the program.

    Args:
        folder: the folder of its output files.
        attempt, rank: which process that is.
        number, position: where to begin: the number of a file, and a position in it.
    """

    def __init__(self, folder: str, attempt: int, rank: int, number: int, position: int) -> None:
        self._folder, self._attempt, self._rank = folder, attempt, rank
        self._number, self._position = number, position
        self._has_ended = False

    def send(self) -> bool:
        """Send the next piece. Return False if there is none yet."""
        numbers = [] if self._has_ended else kept(self._folder)
        if not numbers:
            return False
        if self._number < numbers[0]:
            self._number, self._position = numbers[0], 0
            self._tell(MISSING, b"")
        is_last = self._number >= numbers[-1]  # asked before the file is read: nothing is written to it later
        end = end_of(self._folder)  # and this is written last
        data = b""
        with contextlib.suppress(FileNotFoundError):  # it was removed just now, and the next time it is missing
            with open(os.path.join(self._folder, str(self._number)), "rb") as file:
                file.seek(self._position)
                data = file.read(_MOST_PIECE)
        if data:
            self._tell(OUTPUT, data)
            self._position += len(data)
        elif not is_last:
            self._number, self._position = self._number + 1, 0
        elif end:
            self._has_ended = True
            self._tell(END, end)
        else:
            return False
        return True

    def _tell(self, kind: int, data: bytes) -> None:
        send(MESSAGE.pack(kind, self._attempt, self._rank, self._number, self._position, len(data)) + data)


class Sources:
    """The output of all processes of all attempts. Those of one attempt come side by side, and before the next one's.

    Args:
        folder: the folder with that of each attempt, and there of each process.
        begin: where to begin with each process, as [attempt, rank, number, position]. Others begin with their first.
    """

    def __init__(self, folder: str, begin: list[list[int]]) -> None:
        self._folder = folder
        self._begin = {(attempt, rank): (number, position) for attempt, rank, number, position in begin}
        self._known: dict[tuple[int, int], Source] = {}

    def send(self) -> bool:
        """Send one piece of each process of the first attempt that has some. Return False if there is none."""
        for attempt in _numbered(self._folder):
            folder = os.path.join(self._folder, str(attempt))
            sent = [self._of(attempt, rank).send() for rank in _numbered(folder)]
            if any(sent):
                return True
        return False

    def _of(self, attempt: int, rank: int) -> Source:
        key = attempt, rank
        if key not in self._known:
            folder = os.path.join(self._folder, str(attempt), str(rank))
            self._known[key] = Source(folder, attempt, rank, *self._begin.get(key, (0, 0)))
        return self._known[key]


class Agent:
    """The agent of this machine. Its methods do not wait for it.

    Args:
        folder: its folder, which its keeper removes when the agent has ended.
        about: the file that says what runs here.
        asked: "wire", "asks", "answers" and "message", as `agent_door.main` takes them.

    Attributes:
        over: the header of its answer if that says that the run is over; else None.
    """

    def __init__(self, folder: str, about: str, asked: dict[str, Any]) -> None:
        self._folder, self._about, self._asked = folder, about, asked
        self._holder: socket.socket | None = None
        self._door: socket.socket | None = None
        self._data = b""
        self._listens = True
        self._again = self._until = 0.0
        self.over: dict[str, object] | None = None

    @property
    def may_answer(self) -> bool:
        """True if it was asked just now, and has not answered."""
        return self._door is not None and time.monotonic() < self._until

    def look(self) -> bool:
        """Return False if no agent runs: its folder is gone, or nobody listens at the socket in it."""
        if not os.path.exists(self._folder):
            return False
        if self._door is None and self.over is None and time.monotonic() >= self._again:
            self._again = time.monotonic() + EVERY
            self._listens = self._connect()
        if self._door is not None:
            self._read(self._door)
        return self._listens

    def _connect(self) -> bool:
        """Ask the agent. Return False if nobody listens."""
        wire, asks, message = self._asked["wire"], self._asked["asks"], self._asked["message"]
        try:
            with contextlib.suppress(OSError):  # the agent is too busy, or ends just now
                os.chdir(self._folder)  # the path of a socket must not be long
                if not os.path.exists(agent_socket.NAME):
                    return True  # the agent is about to begin, or to end
                self._holder = agent_socket.find(waits=False)
                if self._holder is None:
                    return False
                self._door = agent_door.asked(self._holder, self._about, int(wire), int(asks), str(message))
                self._door.setblocking(False)
                self._data, self._until = b"", time.monotonic() + _TO_ANSWER
        finally:
            os.chdir("/")
        return True

    def _read(self, door: socket.socket) -> None:
        """Read its answer, and what it says later without being asked."""
        try:
            data = door.recv(_MOST_ANSWER)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._data += data
        size = agent_door.PREFIX.size
        while len(self._data) >= size:
            _, _, kind, header, body = agent_door.PREFIX.unpack(self._data[:size])
            if header + body > _MOST_ANSWER:
                data = b""
            if len(self._data) < size + header + body:
                break
            said, self._data = self._data[size : size + header], self._data[size + header + body :]
            if kind == self._asked["answers"]:
                self._until = 0.0
                answer = json.loads(said)
                self.over = answer if answer.get("stage") == "over" else None
        if not data:
            door.close()
            self._door = None
            if self._holder is not None:
                self._holder.close()


def main(run: str, agent: str, said: str) -> None:
    """Send the state of a run until it is over or the client goes, and its output if that is asked for.

    Args:
        run: the folder of the run.
        agent: the folder of the agent, which is removed when the agent ends.
        said: what is asked for, as JSON: "output", "follow" (false to end as soon as all was sent that is there),
            "begin", as for `Sources`, and "ask", as for `Agent`.
    """
    asked = json.loads(said)
    client = select.poll()
    client.register(1, 0)  # errors alone: the other end is closed
    sources = Sources(os.path.join(run, "output"), asked["begin"])
    there = Agent(agent, os.path.join(run, _FILES["about"]), asked["ask"])
    told: dict[str, object] = {}
    held = 0.0  # since when the end is held back, as the runner posts it now
    current, pause = 0.0, _SHORT
    while not client.poll(0):
        state = _state(run, there)  # looked for before the output, which is complete when the run is over
        if asked["follow"] and state["status"] and state["agent"] and _is_posting(state):
            held = held or time.monotonic()
            if time.monotonic() < held + _TO_POST:
                state["status"] = ""
        if state != told:
            told = state
            _tell(STATE, json.dumps(state).encode())
        if asked["output"] and sources.send():
            pause = _SHORT
            continue
        if there.may_answer and not asked["follow"] and not state["status"]:
            pass
        elif not asked["follow"] or state["status"] or state["over"] or not state["agent"]:
            _tell(OVER)
            client.poll()  # the client closes the connection
        elif time.monotonic() - current > EVERY:
            current = time.monotonic()
            _tell(CURRENT)
        time.sleep(pause)
        pause = min(_LONG, pause * 1.5)


def _state(run: str, agent: Agent) -> dict[str, object]:
    # the agent is looked for first: it has written the rest before it ends
    state: dict[str, object] = {"agent": agent.look(), "over": agent.over}
    state["boot"] = _text("/proc/sys/kernel/random/boot_id").strip()
    return state | {name: _text(os.path.join(run, file)) for name, file in _FILES.items()}


def _is_posting(state: dict[str, Any]) -> bool:
    """Return True if the runner posts the end of the run, and has not noted how that went."""
    try:
        return bool(json.loads(state["about"]).get("posts")) and not state["posted"]
    except (AttributeError, ValueError):
        return False


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""


def _numbered(folder: str) -> list[int]:
    """Return the folders that have a number as name, in order."""
    try:
        return sorted(int(each) for each in os.listdir(folder) if each.isdigit())
    except OSError:
        return []


def _tell(kind: int, data: bytes = b"") -> None:
    send(MESSAGE.pack(kind, 0, 0, 0, 0, len(data)) + data)
