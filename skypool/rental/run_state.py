"""`state_of`: the state of a run that was handed over to its machine, as far as the ledger knows it. Asks nobody."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from skypool.head.states import Ledger, Outcome
from skypool.rental.records import Record, RunEnd

Word = Literal["starting", "running", "draining", "ended", "failed", "cancelled", "interrupted", "lost"]

WORDS: dict[Outcome, tuple[Word, str]] = {
    Outcome.ENDED: ("ended", "its program has ended by itself"),
    Outcome.FAILED: ("failed", "its program could not be started, or was lost"),
    Outcome.CANCELLED: ("cancelled", "a user, its budget or its lifetime has stopped it"),
    Outcome.INTERRUPTED: ("interrupted", "its agent has ended, or its machine was rebooted, while it went on"),
    Outcome.LOST: ("lost", "its machine has ended, and nothing says what the run did"),
    Outcome.NOT_STARTED: ("failed", "it was not handed over to its machine, so its program was never started"),
}
"""The state of a run, and why it has that, by the outcome."""
FAILED = 125
"""The exit status if the program's own is not known, or is that of a program which skypool has stopped for a limit."""
CANCELLED = 130
"""The exit status if a user has cancelled the run: that of `skypool run` after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run.

    Attributes:
        word: "starting" before it is known that its machine has taken it over, "running" after that, and "draining"
            when its written end has come. The others say how it has ended.
        since: since when, in seconds since 1970.
        why: reason for the state, and what is not known or saved nowhere.
    """

    word: Word
    since: float
    why: str


def state_of(record: Record, now: float) -> RunState | None:
    """Return the state of a pool's run; None for a pool whose run is not handed over.

    `now` is in seconds since 1970, by the wall clock.
    """
    run = record.run
    if run is None:
        return None
    seen = "" if run.seen is None else f"; it was seen at {_clock(run.seen)}"
    if run.entry.outcome is not None:
        end = run.end or RunEnd(run.entry.outcome)
        then = seen if end.outcome is Outcome.LOST else ""
        return RunState(WORDS[end.outcome][0], run.at, reason(end) + then + _nowhere(end) + what_is_left(record, now))
    if not run.is_given or record.ended is not None or not record.running:
        word, why = WORDS[Outcome.LOST]
        return RunState(word, record.ended or run.at, why + seen)
    if now > run.latest:
        why = "its end is over, and nothing says what it did"
        return RunState("lost", run.latest, why + seen + what_is_left(record, now))
    if run.entry.state is Ledger.DETACHED:
        if now < run.ends:
            return RunState("running", run.at, f"its machine ends at {_clock(run.ends)} at the latest{seen}")
        why = f"its end has come, and its machine ends by {_clock(run.latest)}"
        return RunState("draining", run.ends, why + seen)
    if record.client_lives(now):
        return RunState("starting", run.at, f"{record.client} hands it over to its machine")
    why = (
        "its client is gone, and it is not known if its machine had taken it over. If not, the machine ends by "
        f"{_clock(record.beat + record.lease)}; otherwise it goes on until {_clock(run.ends)} at the latest"
    )
    return RunState("starting", run.at, why)


def reason(end: RunEnd) -> str:
    """Return how a run has ended as a sentence about it, such as "its program has ended with status 3"."""
    match end.outcome:
        case Outcome.ENDED if end.returncode is not None:
            return f"its program has ended with status {end.returncode}{_because(end)}"
        case Outcome.ENDED:
            return WORDS[end.outcome][1] + _because(end)
        case Outcome.CANCELLED if end.limit:
            return f"it was stopped for its {end.limit}{_because(end)}"
        case Outcome.CANCELLED if end.attempts is not None:
            return f"a user has cancelled it{_because(end)}"
        case _:
            return end.why or WORDS[end.outcome][1]


def brief(end: RunEnd) -> str:
    """Return how a run has ended in a few words, such as "ended with status 3"."""
    if end.outcome is Outcome.ENDED and end.returncode is not None:
        return f"ended with status {end.returncode}"
    if end.outcome is Outcome.CANCELLED and end.limit:
        return f"stopped for its {end.limit}"
    return WORDS[end.outcome][0]


def told(end: RunEnd) -> str:
    """Return how a run has ended as words after its name, such as "was stopped for its budget"."""
    match end.outcome:
        case Outcome.ENDED if end.returncode is not None:
            words = brief(end) + _because(end)
        case Outcome.ENDED:
            words = f"ended by itself, and its exit status is not known here{_because(end)}"
        case Outcome.CANCELLED:
            words = f"was {brief(end)}{_because(end)}"
        case Outcome.FAILED:
            words = f"failed: {reason(end)}"
        case Outcome.INTERRUPTED:
            words = f"was interrupted: {reason(end)}"
        case Outcome.LOST:
            words = f"is lost: {reason(end)}"
        case Outcome.NOT_STARTED:
            words = f"was never started: {reason(end)}"
    return words + _nowhere(end)


def _because(end: RunEnd) -> str:
    return f"; {end.why}" if end.why else ""


def _nowhere(end: RunEnd) -> str:
    return f"; saved nowhere: {end.unsaved}" if end.unsaved else ""


def status_of(end: RunEnd) -> int:
    """Return the exit status for an end: that of the program, if that has ended by itself."""
    if end.outcome is Outcome.ENDED and end.returncode is not None:
        return end.returncode or (FAILED if end.unsaved else 0)
    return CANCELLED if end.outcome is Outcome.CANCELLED and not end.limit else FAILED


def what_is_left(record: Record, now: float) -> str:
    """Return what is known of the end of the machine of a run that is over, after "; ". Return "" if it is proved.

    `now` is in seconds since 1970, by the wall clock.
    """
    run = record.run
    if run is None or not record.running or record.ended is not None:
        return ""
    if now <= run.latest:
        return f"; its machine ends by {_clock(run.latest)}, and `skypool down {record.pool}` ends it now"
    return "; its machine ends itself, and `skypool gc` proves that it has"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")
