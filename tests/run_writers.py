"""Writes entries of runs into a ledger: `python -m tests.run_writers LEDGER SESSION,SESSION… ENTRY…`.

An entry is a state, and perhaps an outcome after it: "detached" or "ended:lost". All of them are written for one
session after the other, which is printed when it is done.
"""

from __future__ import annotations

import sys
from pathlib import Path

from skypool.head.states import Entry, Outcome
from skypool.head.states import Ledger as State
from skypool.rental.ledger import Ledger


def main(file: str, sessions: str, *words: str) -> None:
    ledger = Ledger(Path(file))
    parts = [each.partition(":") for each in words]
    entries = [Entry(State(state), Outcome(outcome) if outcome else None) for state, _, outcome in parts]
    print("begins", flush=True)
    sys.stdin.readline()
    for session in sessions.split(","):
        for entry in entries:
            ledger.mark(session, entry)
        print(session, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
