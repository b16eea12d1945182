"""`cancel`: cancels a run that belongs to its machine, through its agent there."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable

from skypool.errors import SkypoolError
from skypool.head import messages
from skypool.head.states import CancelRun, Stage, Status, ToAgent
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record, RunEnd
from skypool.runs import stored
from skypool.runs.follow import exactly
from skypool.runs.looking import FINAL, SILENT, await_end, known_end, lost_end, reached, run_of, started
from skypool.runs.reaching import NotListed
from skypool.shipping.package_zip import shell_path
from skypool.text import one_line
from skypool.wire.frames import WIRE_VERSION, Kind

_TO_TELL = 60.0
"""Seconds in which the agent must have been told."""
_TO_STOP = 120.0
"""Seconds in which the run must be over then. Its program has 5 s to end, and a runner that is stuck is replaced."""
_AGAIN = 1.0
"""Seconds between two attempts to tell the agent."""
_DOOR = ("safety.peers", "agent.agent_socket", "runs.agent_door")
"""The modules that talk to the agent of a machine."""
_MOST = 64 << 10
"""The most bytes of its answer."""


def cancel(record: Record, known: Ledger, hear: Callable[[str], object]) -> tuple[RunEnd, bool]:
    """Cancel a run and wait until it is over. Return how it has ended, and True if it was over before.

    Args:
        hear: called about once a second with why the machine is not connected; "" if it is.

    Raises:
        SkypoolError: the agent could not be told within 60 s, or the run was not over 120 s later.
        LoginRefused, HostKeyMismatch, CredentialsError: the machine cannot be reached from here.
    """
    if (end := known_end(record, known)) is not None:
        return end, True
    try:
        is_over = _tell_until(record, time.monotonic() + _TO_TELL, hear)
        return await_end(record, known, hear, time.monotonic() + _TO_STOP), is_over
    except NotListed:
        return lost_end(known, record), True
    except TimeoutError as e:
        raise SkypoolError(
            f"run {record.pool} was told to end, and is not over after {_TO_STOP:g} s; `skypool wait {record.pool}` "
            f"waits for that, and `skypool down {record.pool}` ends its machine"
        ) from e


def _tell_until(record: Record, until: float, hear: Callable[[str], object]) -> bool:
    """Tell the agent that the run is cancelled. Return True if the run was over already."""
    while True:
        try:
            status = tell(record, CancelRun(run_of(record).claim), until)
        except FINAL:
            raise
        except Exception as e:  # a driver may raise whatever it wants if its provider cannot be asked
            why = one_line(str(e) or type(e).__name__, 500)
            hear(why)
            if time.monotonic() > until:
                raise SkypoolError(
                    f"run {record.pool} could not be cancelled, as its machine was not reached within {_TO_TELL:g} s: "
                    f"{why}; `skypool down {record.pool}` has the provider end the machine"
                ) from e
        else:
            if status is None or status.stage is Stage.OVER:
                return True
            if status.is_cancelled:
                return False
            if status.stage in (Stage.OTHER, Stage.ABANDONED, Stage.FAILED):
                raise SkypoolError(
                    f"run {record.pool} does not belong to its machine: {status.why or 'it was given up'}"
                )
            if time.monotonic() > until:
                raise SkypoolError(
                    f"run {record.pool} could not be cancelled, as {record.client} still hands it over to its machine; "
                    "press Ctrl-C there, or run the same command again"
                )
        time.sleep(_AGAIN)


def tell(record: Record, message: ToAgent, until: float) -> Status | None:
    """Send a message about a run to the agent of its machine, and return the answer; None if the agent has ended.

    Raises:
        NotListed: the provider does not list the machine any more.
        ConnectionLost: it could not be reached, or has not answered until `until`, a time of `time.monotonic()`.
        LoginRefused, HostKeyMismatch: it cannot be reached from here.
        Exception: whatever its driver raises if the provider cannot be asked.
    """
    access = reached(record, until)
    about = shell_path(f"{stored.place_of(access, message.claim)}/{stored.ABOUT}")
    said = shlex.quote(json.dumps(messages.to_json(message)))
    words = f'"$folder" {about} {WIRE_VERSION} {int(Kind.HANDOVER)} {int(Kind.HANDED)} {said}'
    with started(access, _DOOR, words) as stream:
        stream.socket.settimeout(max(0.01, min(SILENT, until - time.monotonic())))
        line = b""
        while not line.endswith(b"\n") and len(line) < _MOST:
            line += exactly(stream, 1)
    return None if line == b"\n" else messages.status(json.loads(line))
