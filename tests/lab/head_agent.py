"""A real agent with its keeper, in a process of its own, whose runner and guard are of a test.

`head_agent.py CONFIG GUARD RUNNER…`: the configuration as JSON, what the guard does with an end ("holds" or "refuses";
"" if there is none), and the command of the runner. It ends with the keeper.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from functools import partial

from skypool.agent import agent, guard, keeper
from skypool.agent.shared_page import SharedPage

CONFIG, GUARD, *RUNNER = sys.argv[1:]


class FileGuard(guard.Guard):
    """It writes down what it was told, into a file beside the node's folder."""

    def ask_end(self, seconds: float, heir_digest: str) -> guard.Asking:
        self._note(f"end {seconds:g} {heir_digest}")
        return guard.Asking(answers())

    def ask_stop(self, keep_seconds: float = 0.0) -> guard.Asking:
        self._note(f"stop {keep_seconds:g}")
        return guard.Asking(answers())

    def _note(self, line: str) -> None:
        with open(os.path.join(self._folder, "guard.txt"), "a") as file:
            file.write(f"{line}\n")


def answers() -> Generator[None, None, bool]:
    """Answer at the second look."""
    yield
    return GUARD == "holds"


if __name__ == "__main__":
    given = json.loads(CONFIG)
    os.chdir(given["folder"])
    own = FileGuard(given["guard"], SharedPage(0)) if GUARD else None
    agent.Agent = partial(agent.Agent, guard=own, runner=RUNNER)  # type: ignore[assignment, misc]
    words = os.open("last-words", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    keeper.start(given, words)
    os.wait()
