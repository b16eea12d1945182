"""Run other people's clients against the labs, and keep what they called and got."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.venvs import environment

HERE = Path(__file__).parent
LONGEST = 240.0
"""Seconds that a client may take. The longest one takes 60 s on an idle machine."""


@dataclass
class Report:
    """What a client called and got.

    Attributes:
        called: names of the client's functions or commands, by operation.
        shown: what they returned.
        refusals: type and text of the errors that had to come, by operation.
    """

    called: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    shown: dict[str, Any] = field(default_factory=dict[str, Any])
    refusals: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    def note(self, operation: str, called: str) -> None:
        """Add a call, once."""
        names = self.called.setdefault(operation, [])
        if called not in names:
            names.append(called)


class Client:
    """One client in its own environment, which sees nothing of this process's variables and home.

    Args:
        name: of its requirements.
        home: an empty folder.
        environment: the variables that lead it to a lab.
        folder: has the folders `requirements` and `scripts`.
    """

    def __init__(self, name: str, home: Path, environment_: Mapping[str, str], folder: Path = HERE) -> None:
        self.name, self.home = name, home
        self.bin = environment(name, folder / "requirements") / "bin"
        self._scripts = folder / "scripts"
        kept = {key: os.environ[key] for key in ("LANG", "TMPDIR") if key in os.environ}
        own = {"HOME": str(home), "PATH": f"{self.bin}:/usr/bin:/bin", "NO_COLOR": "1", "TZ": "UTC"}
        self.environment = {**kept, **own, **environment_}

    def run(self, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the client's environment, with `more` environment variables."""
        program = [str(self.bin / argv[0]), *argv[1:]]
        return subprocess.run(
            program, cwd=self.home, env={**self.environment, **more}, capture_output=True, text=True, timeout=LONGEST
        )

    def script(self, file: str, *argv: str, **more: str) -> Report:
        """Run a file of scripts/ by the client's Python and return its report.

        Raises:
            AssertionError: It failed.
        """
        done = self.run("python", str(self._scripts / file), *argv, **more)
        assert done.returncode == 0, f"{file} failed with {self.name}:\n{done.stderr[-6000:]}"
        return Report(**json.loads(done.stdout))


class Commands:
    """A command-line client, and a report of the commands that were run.

    Args:
        program: its name; output: options after which it prints JSON.
        failure: a text in the output that means failure, for a program whose exit status does not tell.
    """

    def __init__(self, client: Client, program: str, *output: str, failure: str = "") -> None:
        self.client, self.program, self.output, self.failure = client, program, output, failure
        self.report = Report()

    def call(self, operation: str, *argv: str, **more: str) -> Any:
        """Run a command that succeeds and return what it printed: JSON where it is, text otherwise."""
        done = self._run(operation, *argv, **more)
        assert not self._failed(done), f"{self.program} {' '.join(argv)}: {done.stdout}{done.stderr}"
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout

    def refused(self, operation: str, *argv: str, **more: str) -> str:
        """Run a command that must fail and return what it said."""
        done = self._run(operation, *argv, **more)
        said = (done.stdout + done.stderr).strip()
        assert self._failed(done), f"{self.program} {' '.join(argv)} was not refused: {said}"
        self.report.refusals.setdefault(operation, []).append(said)
        return said

    def _failed(self, done: subprocess.CompletedProcess[str]) -> bool:
        return done.returncode != 0 or bool(self.failure and self.failure in done.stdout + done.stderr)

    def _run(self, operation: str, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
        words = [self.program]
        for word in argv:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", word):
                break
            words.append(word)
        self.report.note(operation, " ".join(words))
        return self.client.run(self.program, *self.output, *argv, **more)


def without_news(ours: Any, theirs: Any) -> Any:
    """Return `ours` without the fields that `theirs` lacks: an older version of a client does not know them."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {key: without_news(value, theirs[key]) for key, value in ours.items() if key in theirs}
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [without_news(a, b) for a, b in zip(ours, theirs, strict=True)]
    return ours
