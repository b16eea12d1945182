"""An observer's side: ask the owner of a pool (the process that made it) on this computer."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from skypool import errors
from skypool.errors import SkypoolError, UsageError
from skypool.observers import place
from skypool.observers.protocol import LONGEST_ANSWER, VERSION, line_of, read_line

_CONNECTING = 5.0
"""Seconds in which the owner must accept the connection, and answer what it knows itself."""
_REACHING = 75.0
"""Seconds in which the owner must have made a forward, which takes it at most 60 s."""


class NoOwner(SkypoolError):
    """The error if no process on this computer answers as the owner of a pool.

    Attributes:
        exists: True if such a process exists, but does not answer, as when it was stopped.
    """

    def __init__(self, message: str, exists: bool = False) -> None:
        super().__init__(message)
        self.exists = exists


class Observation:
    """A connection to the owner of a pool, with one request that was answered. Use it in a `with` block, or close it.

    Args:
        pool: the name of the pool.
        patience: seconds to wait for the answer.
        asked: the request, as in `protocol`.

    Attributes:
        answer: the fields of the answer.

    Raises:
        NoOwner: no process on this computer owns the pool, or it does not answer.
        SkypoolError: the owner refused the request. The error has the type that it had there.
    """

    def __init__(self, pool: str, patience: float = _CONNECTING, **asked: object) -> None:
        self._pool = pool
        self._rest = b""
        self._connection = _connected(pool)
        try:
            with contextlib.suppress(BrokenPipeError):  # refused at once; the answer says why
                self._connection.sendall(line_of({"skypool": VERSION, **asked}))
            try:
                self.answer = self._line(time.monotonic() + patience)
            except TimeoutError as e:
                raise _silent(pool, patience) from e
            except (EOFError, OSError) as e:
                raise NoOwner(
                    f"the process that owns pool {pool!r} closed the connection without an answer; the pool may be "
                    "ending: see `skypool ps`"
                ) from e
            if not self.answer.get("ok"):
                raise _error_of(self.answer)
        except BaseException:
            self.close()
            raise

    def _line(self, until: float) -> dict[str, Any]:
        line, self._rest = read_line(self._connection, LONGEST_ANSWER, until, self._rest)
        said = json.loads(line)
        if not isinstance(said, dict):
            raise SkypoolError(f"the owner of pool {self._pool!r} sent {said!r:.80} instead of a JSON object")
        return said

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield each further line of the owner as it comes, until the owner ends the connection."""
        while True:
            try:
                yield self._line(time.monotonic() + 3600)
            except TimeoutError:  # nothing was to be said for an hour
                continue
            except (EOFError, ConnectionError):
                return

    def close(self) -> None:
        """End the connection, and what the owner keeps for it. May be called more than once."""
        self._connection.close()

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def info(pool: str, patience: float = _CONNECTING) -> dict[str, Any]:
    """Return the state of a pool and its nodes, as its owner knows it.

    Raises:
        NoOwner: no process on this computer owns the pool, or it does not answer within `patience` seconds.
    """
    with Observation(pool, patience, ask="info") as made:
        return {name: value for name, value in made.answer.items() if name != "ok"}


def events(pool: str) -> Observation:
    """Subscribe to the events of a pool. `lines` of the returned object yields each event from now on.

    Raises:
        NoOwner: no process on this computer owns the pool, or it does not answer.
    """
    return Observation(pool, ask="logs")


def forward(
    pool: str, port: int, node: int = 0, host: str = "localhost", here: int = 0, socket: str = ""
) -> Observation:
    """Have the owner of a pool make a forward, which lasts as long as the returned object. Blocks until it can be used.

    The answer's field "address" is its host and port on this computer, or `socket`, the absolute path of a Unix socket.

    Raises:
        NoOwner: no process on this computer owns the pool, or it does not answer.
        UsageError: the pool does not have the node, the port `here` is not free, or the socket cannot be made.
        ConnectionLost: the node cannot be reached.
    """
    path = {"socket": socket} if socket else {}
    return Observation(pool, _REACHING, ask="forward", port=port, node=node, host=host, here=here, **path)


def command(
    pool: str, node: int, script: str, terminal: bool = False, ports: Sequence[tuple[int, str, int]] = ()
) -> list[str]:
    """Return a local command that runs a shell script on a node, by the way in which the owner reaches the node.

    Args:
        pool: the name of the pool.
        node: the number of the node.
        script: the script. It can use the variables `folder` (that of the node's agent) and `cwd` (that of calls).
        terminal: True if the command is to run in a terminal.
        ports: triples (port of this computer, host, port) that are forwarded meanwhile.

    Raises:
        NoOwner: no process on this computer owns the pool, or it does not answer.
        UsageError: the pool does not have the node, or cannot forward ports to it.
    """
    asked: dict[str, Any] = {
        "node": node,
        "script": script,
        "terminal": terminal,
        "ports": [list(each) for each in ports],
    }
    with Observation(pool, ask="reach", **asked) as made:
        return [str(each) for each in made.answer["argv"]]


def _connected(pool: str) -> socket.socket:
    try:
        return place.connect(pool, _CONNECTING)
    except TimeoutError as e:
        raise _silent(pool, _CONNECTING) from e
    except (FileNotFoundError, ConnectionRefusedError) as e:
        raise NoOwner(f"no process on this computer owns a pool called {pool!r}") from e
    except OSError as e:
        raise NoOwner(f"the process that owns pool {pool!r} cannot be asked: {e}") from e


def _silent(pool: str, patience: float) -> NoOwner:
    return NoOwner(
        f"the process that owns pool {pool!r} did not answer within {patience:g} s; it may be stopped (Ctrl-Z) or "
        "busy: see `skypool ps`",
        exists=True,
    )


def _error_of(answer: Mapping[str, Any]) -> SkypoolError:
    """Return the error that the owner answered with, as the type that it had there."""
    kind = getattr(errors, str(answer.get("kind")), SkypoolError)
    text = str(answer.get("error"))
    if kind is UsageError:
        return UsageError(text)
    if isinstance(kind, type) and issubclass(kind, errors.ConnectionLost):
        return errors.ConnectionLost(text)
    return SkypoolError(text)
