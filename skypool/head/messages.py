"""The messages of a hand-over as JSON: between client and agent in frames, between agent and runner in lines.

A JSON object has the name of the message as "is", and its fields: `{"is": "starts", "attempt": 1}`. Fields that are not
known are ignored, so that a later version may add some.

- Client and agent: the header of a HANDOVER frame is one of `ToAgent`. With `Prepare`, it also has the fields of
  `Place`, and the body of the frame is what the runner needs. The header of a HANDED frame is a `Status`. A TAKEN frame
  has one as "handover".
- Agent and runner: the agent writes to the runner's stdin: first the needs, as `packed_needs` says, then lines of
  `ToRunner`. The runner writes to its stdout: lines of `FromRunner`, and of `Alive` at least every `ALIVE_EVERY`
  seconds. A runner ends when its stdin ends.

Some messages of a runner are frames: a HELLO with the heir is `Takes`, the first CALL of an attempt is `Starts`, and
the CANCEL of one of its calls is `Stops`. The agent answers `Takes` by a line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from skypool.errors import protocol_violation
from skypool.head.states import (
    Abandon,
    Ask,
    Cancel,
    CancelRun,
    Claim,
    Commit,
    Drops,
    EndSooner,
    Expires,
    FromRunner,
    Go,
    Outcome,
    Prepare,
    Program,
    ProgramOver,
    RunOver,
    Stage,
    StandsBy,
    Starts,
    Status,
    Stops,
    Takes,
    ToAgent,
    ToRunner,
    Welcome,
)

ALIVE_EVERY = 5.0
"""The most seconds between two signs of life of a runner that is well."""
MOST_LINE = 64 << 10
"""The most bytes of a line."""
_MOST_NAME = 200
"""The most characters of the name of a run, and of an heir."""
_HOME = "~/.skypool"
"""The usual folder of skypool's files on a machine."""
_LENGTH = 8
"""The bytes before the needs, which say how many bytes these have; big-endian."""


@dataclass(frozen=True, slots=True)
class Alive:
    """A message of the runner: it lives.

    Attributes:
        moves: how often its dispatch loop has turned since its start. While this stands still, no lease is extended.
    """

    moves: int


@dataclass(frozen=True, slots=True)
class Place:
    """Fields beside a `Prepare` in the header of its frame: where the run has its files, and how long they stay there.

    Attributes:
        folder: the folder of the run on the machine, outside of the agent's. It may begin with "~". The row goes there.
        keep: seconds that the machine stays after the end of the run.
    """

    folder: str
    keep: float = 0.0


def folder_of(home: str, claim: Claim) -> str:
    """Return the folder of a run on its machine, below the folder of skypool's files there. It may begin with "~"."""
    return f"{home}/heads/{claim.run}-{claim.generation}"


_TO_AGENT = {
    "prepare": Prepare,
    "end sooner": EndSooner,
    "commit": Commit,
    "abandon": Abandon,
    "ask": Ask,
    "cancel run": CancelRun,
}
_FROM_RUNNER = {
    "stands by": StandsBy,
    "takes": Takes,
    "starts": Starts,
    "stops": Stops,
    "drops": Drops,
    "expires": Expires,
    "run over": RunOver,
    "alive": Alive,
}
_TO_RUNNER = {"go": Go, "welcome": Welcome, "program over": ProgramOver, "cancel": Cancel}
_STATUS = {"status": Status}
_NAMES: dict[type, str] = {
    each: name for kinds in (_TO_AGENT, _FROM_RUNNER, _TO_RUNNER, _STATUS) for name, each in kinds.items()
}


def to_json(message: ToAgent | Status | FromRunner | ToRunner | Alive) -> dict[str, object]:
    """Return a message as an object for JSON. Secrets are part of it."""
    values = {each.name: _plain(getattr(message, each.name)) for each in fields(message)}
    return {"is": _NAMES[type(message)], **values}


def _plain(value: object) -> object:
    if isinstance(value, Claim):
        return {"run": value.run, "generation": value.generation}
    return value.value if isinstance(value, Enum) else value


def to_agent(said: object) -> ToAgent:
    """Return the message of a client. Raises ProtocolError for anything else."""
    found: ToAgent = _message(said, _TO_AGENT, "to the agent about a hand-over")
    return found


def place(header: Mapping[str, Any], claim: Claim) -> Place:
    """Return what is told with `Prepare` in the header of its frame. Raises ProtocolError if it is not valid."""
    try:
        folder = _why(header.get("folder", folder_of(_HOME, claim)))
        return Place(folder, _seconds(header.get("keep", 0.0)))
    except (TypeError, ValueError) as e:
        raise protocol_violation(f"skypool received an invalid place of a run: {e}") from e


def status(said: object) -> Status:
    """Return the agent's answer. Raises ProtocolError for anything else."""
    found: Status = _message(said, _STATUS, "about the state of a hand-over")
    return found


def line(message: FromRunner | ToRunner | Alive) -> bytes:
    """Return a message between agent and runner as a line."""
    return json.dumps(to_json(message)).encode() + b"\n"


def from_runner(said: bytes) -> FromRunner | Alive:
    """Return the message of a runner in a line. Raises ProtocolError for anything else."""
    found: FromRunner | Alive = _message(_parsed(said), _FROM_RUNNER, "of a runner")
    return found


def to_runner(said: bytes) -> ToRunner:
    """Return the message to a runner in a line. Raises ProtocolError for anything else."""
    found: ToRunner = _message(_parsed(said), _TO_RUNNER, "to a runner")
    return found


def packed_needs(needs: bytes) -> bytes:
    """Return what the agent writes to a runner's stdin before the lines: the number of bytes, and the needs."""
    return len(needs).to_bytes(_LENGTH, "big") + needs


def read_needs(read: Callable[[int], bytes]) -> bytes:
    """Return the needs from a runner's stdin.

    Args:
        read: reads so many bytes, or fewer only at the end of the stream, as `sys.stdin.buffer.read` does.

    Raises:
        EOFError: the stream ends before.
    """
    length = read(_LENGTH)
    needs = read(int.from_bytes(length, "big")) if len(length) == _LENGTH else b""
    if len(length) < _LENGTH or len(needs) < int.from_bytes(length, "big"):
        raise EOFError("the agent has ended before the runner had all that it needs")
    return needs


def heir_digest(heir: str) -> str:
    """Return what may be written down of an heir: 64 hexadecimal digits, of which it cannot be found."""
    return hashlib.sha256(heir.encode()).hexdigest()


def seal_key(heir: str) -> str:
    """Return the key with which the runner of an heir signs what it keeps in buckets: 64 hexadecimal digits."""
    return hmac.new(heir.encode(), b"what a run keeps in buckets", hashlib.sha256).hexdigest()


def _parsed(said: bytes) -> object:
    try:
        return json.loads(said)
    except ValueError as e:
        raise protocol_violation(f"a line between agent and runner is not JSON: {said[:60]!r}") from e


_AnyMessage = TypeVar("_AnyMessage")


def _message(said: object, kinds: Mapping[str, type[Any]], what: str) -> Any:
    """Return the message that a JSON object is; one of these kinds."""
    try:
        if not isinstance(said, dict):
            raise TypeError("it is not an object")
        kind = kinds[said["is"]]
        found = {}
        for each in fields(kind):
            if each.name in said or each.default is MISSING:
                found[each.name] = _READERS[each.name](said[each.name])
        return kind(**found)
    except (KeyError, TypeError, ValueError) as e:
        # the message itself may hold a secret
        raise protocol_violation(f"skypool received an invalid message {what}: {type(e).__name__}: {e}") from e


def claim(said: object) -> Claim:
    """Return the claim that a JSON object is. Raises KeyError, TypeError or ValueError for anything else."""
    if not isinstance(said, dict):
        raise TypeError("a claim is an object")
    return Claim(_text(said["run"]), _count(said["generation"], least=1))


def _text(said: object) -> str:
    if not isinstance(said, str):
        raise TypeError("expected text")
    if not 0 < len(said) <= _MOST_NAME:
        raise ValueError(f"a text of {len(said)} characters; expected 1 to {_MOST_NAME}")
    return said


def _why(said: object) -> str:
    if not isinstance(said, str):
        raise TypeError("expected text")
    return said


def _count(said: object, least: int = 0) -> int:
    if type(said) is not int:
        raise TypeError("expected an integer")
    if said < least:
        raise ValueError(f"{said} is less than {least}")
    return said


def _seconds(said: object) -> float:
    if type(said) not in (int, float):
        raise TypeError("expected seconds")
    if not 0 <= (seconds := float(said)) < math.inf:  # type: ignore[arg-type]  # the line above says that it is a number
        raise ValueError(f"{seconds} s")
    return seconds


def _flag(said: object) -> bool:
    if type(said) is not bool:
        raise TypeError("expected true or false")
    return said


_READERS: dict[str, Callable[[Any], object]] = {
    "claim": claim,
    "end": _seconds,
    "heir": _text,
    "stage": Stage,
    "why": _why,
    "is_cancelled": _flag,
    "is_expired": _flag,
    "left": lambda said: None if said is None else _seconds(said),
    "outcome": lambda said: None if said is None else Outcome(said),
    "attempts": _count,
    "attempt": _count,
    "program": Program,
    "moves": _count,
}
"""For each field of a message: what reads it. A field has the same type in all messages."""
