"""Accepts a client at the agent, and sends frames to it. Clients connect through a holder.

A later client can take the place of one that is gone or silent.
"""

from __future__ import annotations

import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from skypool.agent.connection import Connection
from skypool.agent.processes import is_own
from skypool.agent.unacknowledged import Unacknowledged
from skypool.agent.value_storage import SpareMemory
from skypool.clock import RunningClock
from skypool.errors import ProtocolError, protocol_violation
from skypool.wire.frames import Buffer, Frame, Kind, frame, header_of, long_frame

OUTPUT_WINDOW = 4 << 20
"""The number of bytes of output that may wait for the client's acknowledgement. More output is dropped."""
_BREATH = 0.01
"""Seconds that the agent waits after it could not accept a connection. The loop reports that connection again."""
_HELLO = Kind.HELLO
Watch = Callable[[int, int, Callable[[], None]], None]


class Client:
    """The agent's end of the connection to its client. A node has one client at a time, which may leave and come back.

    Args:
        listener: the Unix socket at which holders hand over the file descriptors of a client.
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.
        liveness: seconds for which the present client must be silent before another client may take the node.
        clock: the agent's clock, which measures that silence.
        on_frame: called with every frame of the accepted client, except its first one, the HELLO.
        may_take: called before another client than the first one takes the node over. Returns "" if that client may
            have the node, or else why not.
        on_hello: called when a client was accepted, with True if the client is not the same as before, and with the
            header of its HELLO. Returns the header of the WELCOME, the answer to a HELLO.
        on_resumed: called after the WELCOME was queued for sending.
        on_gone: called when the accepted client's connection was closed.
        kept: takes over the memory of large values that the client has received, for later values.
        refusal: called with the header of each HELLO. Returns the header of a TAKEN if the node was handed over to its
            own runner and this client is not that; else None. A client that then comes with an heir is the runner.
        on_other: called with each frame of others than the accepted client, except HELLO, and with their connection.
            Returns False if such a frame is invalid.

    Attributes:
        unacknowledged: what was sent to the client and must arrive; it is sent again after a reconnection.
        session: the id of the client that was accepted last; "" before the first one.
        epoch: how many clients with different ids were accepted. Each takes the node over from the one before.
        heard: the time of the client's last sign of life, by the agent's clock; at first, the time of the start.
    """

    def __init__(
        self,
        listener: socket.socket,
        watch: Watch,
        liveness: float,
        clock: RunningClock,
        on_frame: Callable[[Frame], None],
        may_take: Callable[[], str],
        on_hello: Callable[[bool, Mapping[str, Any]], Mapping[str, object]],
        on_resumed: Callable[[], None],
        on_gone: Callable[[], None],
        kept: SpareMemory,
        refusal: Callable[[Mapping[str, Any]], Mapping[str, object] | None] = lambda hello: None,
        on_other: Callable[[Frame, Connection], bool] = lambda f, connection: False,
    ) -> None:
        self._listener = listener
        self._watch = watch
        self._liveness = liveness
        self._on_frame = on_frame
        self._may_take = may_take
        self._on_hello = on_hello
        self._on_resumed = on_resumed
        self._on_gone = on_gone
        self._refusal = refusal
        self._on_other = on_other
        self._clock = clock
        self.unacknowledged = Unacknowledged(kept)
        self.session = ""
        self.epoch = 0
        self.heard = self._clock()
        self._current: Connection | None = None
        self._holders: dict[Connection, socket.socket] = {}
        listener.setblocking(False)
        watch(listener.fileno(), select.EPOLLIN, self._on_holder)

    def _on_holder(self) -> None:
        """Accept a holder, and take its client's file descriptors. Disconnect one without them, or of another user."""
        try:
            holder, _ = self._listener.accept()
        except OSError as e:  # this process has too many open files, or the holder is gone
            print(f"no process can connect to the agent now: {e}", file=sys.stderr, flush=True)
            time.sleep(_BREATH)
            return
        if not is_own(holder):
            holder.close()
            return
        holder.settimeout(2)
        try:
            _, fds, _, _ = socket.recv_fds(holder, 16, 2)
        except OSError as e:
            print(f"a process connected to the agent and passed no file descriptors: {e}", file=sys.stderr, flush=True)
            fds = []
        if len(fds) != 2:
            holder.close()
            return
        connection = Connection(
            fds[0], fds[1], lambda fd, events: self._watch(fd, events, lambda: self._read(connection))
        )
        self._holders[connection] = holder

    def _read(self, connection: Connection) -> None:
        """Handle the frames that have arrived. Close the connection if it has ended or a frame is invalid."""
        if connection not in self._holders:
            return
        try:
            frames = connection.read()
            for each in frames:
                self._take(connection, each)
        except EOFError:
            self._drop(connection)
        except (OSError, ProtocolError) as e:
            self._complain(connection, e)
        except Exception as e:  # noqa: BLE001 - whatever a client sends must not end the agent
            traceback.print_exc()
            self._complain(
                connection, protocol_violation(f"the client sent an invalid message: {type(e).__name__}: {e}")
            )
        if connection is self._current:
            self.heard = self._clock()  # the agent's loop flushes this connection
        else:
            self.flush(connection)

    def _take(self, connection: Connection, f: Frame) -> None:
        """Handle one frame. Raises ProtocolError if it is invalid, or if it came before HELLO."""
        if f.kind is not _HELLO and connection is self._current:
            self._on_frame(f)
        elif connection not in self._holders:
            return
        elif f.kind is _HELLO:
            self._greet(connection, header_of(f))
        elif not self._on_other(f, connection):
            raise protocol_violation(f"the client sent a {f.kind.name} message before its first message, HELLO")

    def _greet(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Accept the client that sent a HELLO, or answer TAKEN and close the connection."""
        if (refusal := self._refusal(hello)) is not None:
            self._refuse(connection, refusal)
            return
        session = str(hello["session"])
        awaited = set(hello["calls"])
        is_new = session != self.session
        is_heir = "heir" in hello
        # Each client that takes the node over gets a higher epoch, which it names when it comes back. So another client
        # that names one is refused for good. A new client is refused only while the present one is heard.
        is_former = is_new and int(hello.get("epoch", 0)) > 0
        is_taken = self._current is not None and self._clock() - self.heard < self._liveness
        if is_former or (is_new and is_taken and not is_heir):
            silent = round(self._clock() - self.heard, 1)
            self._refuse(connection, {"silent": silent, "former": is_former})
            return
        # the node may be about to end itself
        if is_new and self.epoch and (why := self._may_take()):
            self._refuse(connection, {"silent": 0.0, "why": why})
            return
        if self._current is not None and self._current is not connection:
            self._drop(self._current)
        if is_new:
            self.epoch += 1
        else:
            # outcomes that the client no longer waits for
            self.unacknowledged.acknowledge([c for c in self.unacknowledged.calls if c not in awaited], 0)
        self.session = session
        self._current = connection
        connection.send(long_frame(Kind.WELCOME, {**self._on_hello(is_new, hello), "epoch": self.epoch}))
        self._on_resumed()
        self.unacknowledged.resend(connection)

    def _refuse(self, connection: Connection, header: Mapping[str, object]) -> None:
        """Answer TAKEN on a connection, and close it."""
        connection.send(frame(Kind.TAKEN, header))
        self.flush(connection)
        self._drop(connection)

    def _complain(self, connection: Connection, error: Exception) -> None:
        """Log an error of a connection to stderr, and close that connection."""
        print(f"connection to the client closed: {error}", file=sys.stderr, flush=True)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection, if open, and its holder's socket. Call `on_gone` if it was the accepted client's."""
        holder = self._holders.pop(connection, None)
        if holder is None:
            return
        if connection is self._current:
            self._current = self.unacknowledged.connection = None
            self._on_gone()
        connection.close()
        holder.close()

    def leave(self) -> None:
        """Close the connection of the accepted client, which has said that it leaves. Another client may come at once.

        Frames that wait to be sent to it are dropped.
        """
        if self._current is not None:
            self._drop(self._current)

    def give_up(self) -> Connection | None:
        """Let the accepted client be one of the others from now on, and return its connection, if there is one."""
        connection, self._current = self._current, None
        self.unacknowledged.connection = None
        self.session = ""
        if connection is not None:
            connection.abandon_all()
            self._on_gone()
        return connection

    def reply(self, connection: Connection, buffers: list[Buffer]) -> None:
        """Send a small frame over any connection, as far as it takes that now. Does nothing if it is closed."""
        if connection in self._holders:
            connection.send(buffers)
            self.flush(connection)

    def is_open(self, connection: Connection) -> bool:
        """Return True if a connection is not closed."""
        return connection in self._holders

    @property
    def connection(self) -> Connection | None:
        """The connection of the accepted client; None if it is not connected."""
        return self._current

    @property
    def is_connected(self) -> bool:
        """True if a client is connected now."""
        return self._current is not None

    def send(self, kind: Kind, header: Mapping[str, object], buffers: list[Buffer] | None = None) -> None:
        """Queue a small frame for the connected client; `flush` writes it. Without a client, the frame is dropped.

        So frames that must arrive are sent through `unacknowledged`.
        """
        if self._current is not None:
            self._current.send(frame(kind, header, buffers or []))

    def flush(self, connection: Connection | None = None) -> None:
        """Write the queued frames to a connection, as far as the client takes them now. Does not wait.

        If writing fails, the error is logged and the connection is closed. By default, the connection is that of the
        accepted client, if there is one.
        """
        connection = connection or self._current
        if connection in self._holders and connection is not None:
            try:
                connection.flush()
            except (OSError, ProtocolError) as e:
                self._complain(connection, e)
