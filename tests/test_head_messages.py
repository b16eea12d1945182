"""The messages of a hand-over as JSON: there and back, and what is refused."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from skypool.errors import ProtocolError
from skypool.head import messages
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
    Welcome,
)

CLAIM = Claim("train-7", 2)
TO_AGENT = [
    Prepare(CLAIM, 3600.5, "word"),
    EndSooner(CLAIM, 60.0),
    Commit(CLAIM),
    Abandon(CLAIM),
    Ask(CLAIM),
    CancelRun(CLAIM),
]
FROM_RUNNER = [
    StandsBy(),
    Takes("word"),
    Starts(2),
    Stops(2),
    Drops(2),
    Expires(),
    RunOver(Outcome.FAILED),
    messages.Alive(17),
]
TO_RUNNER = [Go("word"), Welcome(1, Program.LOST, True, is_expired=True), ProgramOver(3, Program.ENDED), Cancel()]
STATUSES = [Status(CLAIM, Stage.FAILED, "no room"), Status(CLAIM, Stage.OVER, "", True, Outcome.CANCELLED)]


@pytest.mark.parametrize("message", TO_AGENT, ids=repr)
def test_messages_to_the_agent_come_back_as_they_were(message: Any) -> None:
    assert messages.to_agent(json.loads(json.dumps(messages.to_json(message)))) == message


@pytest.mark.parametrize("message", STATUSES, ids=repr)
def test_answers_come_back_as_they_were(message: Any) -> None:
    assert messages.status(json.loads(json.dumps(messages.to_json(message)))) == message


@pytest.mark.parametrize("message", FROM_RUNNER, ids=repr)
def test_lines_of_a_runner_come_back_as_they_were(message: Any) -> None:
    line = messages.line(message)
    assert line.endswith(b"\n")
    assert messages.from_runner(line) == message


@pytest.mark.parametrize("message", TO_RUNNER, ids=repr)
def test_lines_to_a_runner_come_back_as_they_were(message: Any) -> None:
    assert messages.to_runner(messages.line(message)) == message


def test_fields_of_later_versions_are_ignored_and_those_with_a_default_may_be_left_out() -> None:
    said = messages.to_json(Status(CLAIM, Stage.READY)) | {"later": [1]}
    del said["outcome"], said["why"]
    assert messages.status(said) == Status(CLAIM, Stage.READY)


COMMIT = messages.to_json(Commit(CLAIM))
PREPARE = messages.to_json(Prepare(CLAIM, 60, "secret word"))


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"is": "explode"},
        {"is": ["commit"]},
        {"is": "stands by"},
        {"is": "commit"},
        COMMIT | {"claim": "train-7"},
        COMMIT | {"claim": {"run": "", "generation": 1}},
        COMMIT | {"claim": {"run": "x" * 201, "generation": 1}},
        COMMIT | {"claim": {"run": "x", "generation": 0}},
        COMMIT | {"claim": {"run": "x", "generation": True}},
        PREPARE | {"end": -1},
        PREPARE | {"end": float("nan")},
        PREPARE | {"end": float("inf")},
        PREPARE | {"end": True},
        PREPARE | {"heir": ""},
        PREPARE | {"heir": 7},
    ],
    ids=str,
)
def test_what_is_no_message_to_the_agent_is_refused_without_its_secret(said: Any) -> None:
    with pytest.raises(ProtocolError) as found:
        messages.to_agent(said)
    assert "secret word" not in str(found.value)


@pytest.mark.parametrize("said", [b"", b"{", b"\xff", b"7", b'{"is": "alive", "moves": -1}', b'{"is": "run over"}'])
def test_a_line_that_is_no_message_of_a_runner_is_refused(said: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.from_runner(said)


def test_needs_are_read_whole_or_not_at_all() -> None:
    packed = messages.packed_needs(b"all that it needs")
    stream = io.BytesIO(packed + b"the next line\n")
    assert messages.read_needs(stream.read) == b"all that it needs"
    assert stream.readline() == b"the next line\n"
    for length in (0, 5, 8, len(packed) - 1):
        with pytest.raises(EOFError, match="the agent has ended"):
            messages.read_needs(io.BytesIO(packed[:length]).read)
