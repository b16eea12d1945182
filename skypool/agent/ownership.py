"""`Ownership`: who owns this machine: its client, or after a hand-over the runner of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from skypool.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from skypool.agent.connection import Connection
    from skypool.agent.hand_over import HandOver


class Ownership:
    """Tells the agent who its owner is: the client, until a `HandOver` says otherwise.

    That object is made with the first message about a hand-over, because its modules would delay the start of each
    node.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], HandOver]) -> None:
        self._make = make
        self._hand_over: HandOver | None = None

    def _made(self) -> HandOver:
        if self._hand_over is None:
            self._hand_over = self._make()
        return self._hand_over

    def heard(self, client: float) -> float:
        """Return the last sign of life of the owner. `client` is that of the accepted client. By the agent's clock."""
        return client if self._hand_over is None else self._hand_over.heard(client)

    def refusal(self, hello: Mapping[str, Any]) -> dict[str, object] | None:
        """Return the header of the TAKEN for a client that is not the owner; None if it may be accepted."""
        return self._made().refusal(hello) if self._hand_over is not None or "heir" in hello else None

    def on_accepted(self, hello: Mapping[str, Any]) -> None:
        """Note that a client was accepted, which may be the runner."""
        if self._hand_over is not None:
            self._hand_over.on_accepted(hello)

    def on_frame(self, f: Frame) -> None:
        """Handle a HANDOVER frame of the accepted client. Raises ProtocolError if it is invalid."""
        self._made().on_frame(f)

    def on_other(self, f: Frame, connection: Connection) -> bool:
        """Handle a frame of a connection that is not the accepted client's. Return False if it must not send that."""
        return (f.kind is Kind.HANDOVER or self._hand_over is not None) and self._made().on_other(f, connection)

    def tick(self, now: float) -> None:
        """Do what no file descriptor reports. `now` is the time of the agent's clock."""
        if self._hand_over is not None:
            self._hand_over.tick(now)
