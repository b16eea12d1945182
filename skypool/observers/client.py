"""An observer's side: ask the owner of a pool on this computer.

Everything here raises NoOwner if no process on this computer owns the pool, or if it does not answer in time.
"""

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
from skypool.observers import pool_sockets
from skypool.observers.protocol import LONGEST_ANSWER, VERSION, line_of, read_line

_CONNECTING = 5.0
"""Seconds in which the owner must accept the connection, and answer what it knows itself."""
_REACHING = 75.0
"""Seconds in which the owner must have made a forward, which takes it at most 60 s."""


class NoOwner(SkypoolError):
    """The error if no process answers as the owner of a pool.

    The attribute `exists` is True if there is an owner, but it does not answer. False: there is none.
    """

    def __init__(self, message: str, exists: bool = False) -> None:
        super().__init__(message)
        self.exists = exists


class Observation:
    """A connection to the owner of a pool, with one request that was answered. Use it in a `with` block, or close it.

    `asked` has the fields of the request, such as "ask", and the attribute `answer` has those of the answer. The module
    `protocol` lists them. If no answer comes within `patience` seconds, the constructor raises NoOwner. If the owner
    refuses the request, it raises the owner's error (SkypoolError).
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
        """Yield each line that the owner sends after its answer, as a dict, until the owner ends the connection."""
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
    """Ask a pool's owner for the state of the pool and its nodes, and return it. Wait at most `patience` seconds."""
    with Observation(pool, patience, ask="info") as made:
        return {name: value for name, value in made.answer.items() if name != "ok"}


def events(pool: str) -> Observation:
    """Subscribe to the events of a pool. The method `lines` of the result yields each event from now on, as a dict."""
    return Observation(pool, ask="logs")


def forward(
    pool: str, port: int, node: int = 0, host: str = "localhost", here: int = 0, socket: str = ""
) -> Observation:
    """Have the owner forward a port to `host`:`port`, as the node sees them, until the returned object is closed.

    `here` is the port of this computer (0 for a free one), and `socket` the absolute path of a Unix socket to use
    instead. Blocks until the forward can be used. `answer["address"]` of the result has that port or path. Raises
    UsageError for a wrong node, port or socket, and ConnectionLost if the node cannot be reached.
    """
    path = {"socket": socket} if socket else {}
    return Observation(pool, _REACHING, ask="forward", port=port, node=node, host=host, here=here, **path)


def command(
    pool: str, node: int, script: str, terminal: bool = False, ports: Sequence[tuple[int, str, int]] = ()
) -> list[str]:
    """Return a local command that runs a shell script on a node, by the way in which the owner reaches the node.

    Args:
        script: the script. It can use the variables `folder` (folder of the node's agent), `cwd` (that of calls) and
            `python`.
        terminal: True if the command is to run in a terminal.
        ports: triples (port of this computer, host, port) to forward while the command runs.

    Raises:
        UsageError: there is no such node, or ports cannot be forwarded to it.
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
        return pool_sockets.connect(pool, _CONNECTING)
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
    """Return the error that an answer describes, as a UsageError, a ConnectionLost or a plain SkypoolError."""
    kind = getattr(errors, str(answer.get("kind")), SkypoolError)
    text = str(answer.get("error"))
    if kind is UsageError:
        return UsageError(text)
    if isinstance(kind, type) and issubclass(kind, errors.ConnectionLost):
        return errors.ConnectionLost(text)
    return SkypoolError(text)
