"""Steps, and the one script that runs them: plain POSIX shell that a person can read and run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from skypool_images.errors import ImageError

_END = "SKYPOOL_END"


@dataclass(frozen=True, slots=True)
class Step:
    """One named part of making a machine ready.

    Attributes:
        name: of a-z, 0-9 and "-"; unique in its script.
        script: POSIX shell, run with `set -eu` after `scripts/prelude.sh` and `python.sh`; harmless when run twice.
        check: shell that succeeds when the step has had its effect; "" where the script proves itself.
        limit: seconds that one attempt may take.
        retries: how often it is tried again after a failure of the network.
    """

    name: str
    script: str
    check: str = ""
    limit: int = 900
    retries: int = 0

    @property
    def hash(self) -> str:
        """Changes with whatever the step does; names its stamp on the machine."""
        return hashlib.sha256(f"{self.script}\0{self.check}".encode()).hexdigest()[:16]


def program(name: str) -> str:
    """Return one of our own programs, by its name in `scripts`."""
    return (files("skypool_images") / "scripts" / name).read_text("utf-8")


def shell(name: str) -> str:
    """Return one of our own shell files, by its name in `scripts` without ".sh"."""
    return program(f"{name}.sh")


def assemble(steps: Sequence[Step], title: str) -> str:
    """The script that performs `steps` in order, says how far it is, and ends with where Python is.

    It says one line for each thing that happens:

        @boot 1                     it has begun
        @step 2 5 env               step 2 of 5, called env, begins
        | text                      what the step prints
        @skip env                   it was done before
        @retry env 1 2              attempt 1 failed in the network; the next one in 2 s
        @done env
        @advice text                what to do about the failure that follows
        @fail env 100 command       exit status and the command that failed; the script exits with 1
        @python /usr/bin/python3    runs the agent
        @ready
    """
    parts = [f"#!/bin/sh\n# {title}\n# Run it as often as you like: what is done is skipped.\nSTEPS={len(steps)}"]
    parts.append(shell("advice").rstrip())
    parts.append("{\n" + shell("runner") + "} <<'" + _END + "'\n" + shell("prelude") + shell("python") + _END)
    for step in steps:
        parts.append(f"task {step.name} <<'{_END}'\n{_body(step.script)}{_END}")
        if step.check:
            parts.append(f"check {step.name} <<'{_END}'\n{_body(step.check)}{_END}")
        parts.append(f"perform {step.name} {step.hash} {step.limit} {step.retries}")
    parts.append('printf %s "$SKYPOOL_PYTHON" > "$B/python"\necho "@python $SKYPOOL_PYTHON"\necho "@ready"\n')
    return "\n\n".join(parts)


def _body(script: str) -> str:
    if _END in script:
        raise ImageError(f"no step of an image may hold the word {_END}: it ends each of them in the script")
    return script.rstrip("\n") + "\n"
