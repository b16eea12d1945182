"""A real agent with its keeper, in a process of its own, whose runner and guard are of a test.

`head_agent.py CONFIG GUARD RUNNER…`: the configuration as JSON, what the guard does with an end ("holds", "refuses" or
"hangs"), and the command of the runner. It ends with the keeper.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from skypool.agent import agent, keeper

CONFIG, GUARD, *RUNNER = sys.argv[1:]


class FileGuard:
    """It writes down what it was told, into a file beside the node's folder."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def give_end(self, seconds: float, heir_digest: str) -> bool:
        self._note(f"end {seconds:g} {heir_digest}")
        if GUARD == "hangs":
            time.sleep(3600)
        return GUARD == "holds"

    def stop_now(self, keep_seconds: float) -> None:
        self._note(f"stop {keep_seconds:g}")

    def _note(self, line: str) -> None:
        with open(self._file, "a") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    given = json.loads(CONFIG)
    os.chdir(given["folder"])
    notes = Path(given["folder"]).parent / "guard.txt"
    agent.Agent = partial(agent.Agent, guard=FileGuard(notes), runner=RUNNER)  # type: ignore[assignment, misc]
    words = os.open("last-words", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    keeper.start(given, words)
    os.wait()
