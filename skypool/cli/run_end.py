"""`skypool wait`: wait until a run that belongs to its machine is over. `skypool cancel`: end it."""

from __future__ import annotations

import math
import time
from typing import Annotated

import typer

from skypool.checks import seconds
from skypool.cli import output
from skypool.cli.owner import Name, run_named
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record, RunEnd
from skypool.rental.run_state import CANCELLED, WORDS, reason, state_of, status_of, told, what_is_left
from skypool.runs import cancelling
from skypool.runs.looking import await_end, run_of

TIMED_OUT = 124
"""The exit status if the run is not over in time, as that of the command `timeout`."""
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON object instead of a line.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands `skypool wait` and `skypool cancel` to the program."""
    app.command("wait")(wait)
    app.command("cancel")(cancel)


def wait(
    run: Name,
    timeout: Annotated[str | None, typer.Option(help="The longest time to wait, such as 90s, 5m or 2h.")] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a run that belongs to its machine is over, and say how it has ended.

    The exit status is that of its program, 124 if the run is not over after --timeout, and 130 if a user has cancelled
    it. It is 125 if the run has failed, was interrupted or is lost, or was stopped for its budget or lifetime. It is
    also 125 if a file of its folders is saved nowhere, and 2 if its machine refuses the login. Lost connections are
    made again.
    """
    until = math.inf if timeout is None else time.monotonic() + seconds("--timeout", timeout)
    record, known = run_named(run), Ledger.here(output.warn)
    try:
        end = await_end(record, known, Lost().hear, until)
    except KeyboardInterrupt:
        raise typer.Exit(CANCELLED) from None
    except TimeoutError:
        record = known.record(record.session) or record
        if as_json:
            output.data({**_data(record, None), "status": TIMED_OUT})
        else:
            output.say(f"run {run} is not over after {timeout}")
        raise typer.Exit(TIMED_OUT) from None
    _tell(known.record(record.session) or record, end, as_json, status=status_of(end))
    raise typer.Exit(status_of(end))


def cancel(run: Name, as_json: AsJson = False) -> None:
    """Cancel a run that belongs to its machine, and wait until it is over.

    Its program gets SIGINT and 5 seconds to end. Then the run stores how it has ended, and its machine ends as after
    any other end. The exit status is 0 if the run is over, also if it was so before.
    """
    record, known = run_named(run), Ledger.here(output.warn)
    try:
        end, was_over = cancelling.cancel(record, known, Lost().hear)
    except KeyboardInterrupt:
        raise typer.Exit(CANCELLED) from None
    _tell(known.record(record.session) or record, end, as_json, was_over=was_over)


class Lost:
    """Tells the user once that the machine is not connected, and why."""

    def __init__(self) -> None:
        self._told = ""

    def hear(self, why: str) -> None:
        """Take why the machine is not connected; "" if it is."""
        if why and not self._told:
            output.note(f"the machine cannot be reached now, and is tried again: {why}")
        self._told = why


def _tell(
    record: Record, end: RunEnd, as_json: bool, *, was_over: bool | None = None, status: int | None = None
) -> None:
    """Tell how a run has ended. What is None is not part of the JSON object."""
    if as_json:
        more = {name: value for name, value in {"status": status, "was_over": was_over}.items() if value is not None}
        output.data({**_data(record, end), **more})
    else:
        before = "nothing to cancel: " if was_over else ""
        output.say(f"{before}run {record.pool} {told(end)}{what_is_left(record, time.time())}")


def _data(record: Record, end: RunEnd | None) -> dict[str, object]:
    """Return what is known of a run for JSON. `end` is None if it is not over."""
    state = state_of(record, time.time())
    assert state is not None
    return {
        "pool": record.pool,
        "generation": run_of(record).claim.generation,
        "state": state.word if end is None else WORDS[end.outcome][0],
        **end_data(end),
        "why": state.why if end is None else reason(end),
        "usd": None if end is None else end.usd,
    }


def end_data(end: RunEnd | None) -> dict[str, object]:
    """Return what a run has stored of its end, for JSON; None for what is not known."""
    ended = None if end is None else end.ended
    return {
        "returncode": None if end is None else end.returncode,
        "attempts": None if end is None else end.attempts,
        "ended": None if ended is None else output.utc(ended),
        "limit": None if end is None else end.limit or None,
    }
