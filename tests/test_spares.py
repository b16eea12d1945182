"""Connections that are opened before they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skypool.link.spares import Spares
from skypool.model import Access
from skypool.wire.transport import Subprocess
from tests.conftest import children, eventually


@pytest.fixture
def here(tmp_path: Path) -> Access:
    """The way to this computer."""
    return Access(Subprocess(), None, str(tmp_path), str(tmp_path))


@pytest.fixture
def spares() -> Iterator[Spares]:
    """Two connections to each node. What the test leaves is closed."""
    made = Spares(2)
    yield made
    made.close()


def test_a_connection_runs_one_script_with_the_input_that_follows(spares: Spares, here: Access) -> None:
    spares.connect(3, here)
    stream = spares.take(3, "read line; echo got $line; exec cat")
    assert stream is not None
    stream.socket.sendall(b"one\ntwo\n")
    said = b""
    while len(said) < 12:
        said += stream.socket.recv(100)
    stream.close()
    assert said == b"got one\ntwo\n"


def test_there_are_as_many_as_were_asked_for_of_each_node(spares: Spares, here: Access) -> None:
    spares.connect(0, here)
    spares.connect(1, here)
    taken = [spares.take(node, "true") for node in (0, 0, 0, 1, 2)]
    assert [each is None for each in taken] == [False, False, True, False, True]
    for each in taken:
        if each is not None:
            each.close()


def test_what_was_not_taken_ends_and_nothing_is_opened_later(spares: Spares, here: Access) -> None:
    before = len(children(os.getpid()))
    spares.connect(0, here)
    assert len(children(os.getpid())) == before + 2
    spares.close()
    eventually(lambda: len(children(os.getpid())) == before, 5, "the end of the connections")
    spares.connect(0, here)
    assert len(children(os.getpid())) == before
    assert spares.take(0, "true") is None


def test_a_program_that_is_missing_harms_nobody_before_it_is_needed(spares: Spares, here: Access) -> None:
    class Missing(Subprocess):
        def argv(self, command: object, *, terminal: bool = False) -> list[str]:
            return ["/no/such/program"]

    spares.connect(0, Access(Missing(), None, here.folder, here.spool))
    assert spares.take(0, "true") is None
