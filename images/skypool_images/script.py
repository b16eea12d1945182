"""`Step`, one part of the setup of a machine, and `assemble`, which joins steps into a script.

The script is POSIX shell code that a person can read and run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from skypool_images.errors import ImageError

_END = "SKYPOOL_END"
"""The line that marks the end of a step's code in the script that `assemble` returns."""


@dataclass(frozen=True, slots=True)
class Step:
    """One named part of the setup of a machine.

    Attributes:
        name: name of the step in the script's output, of the characters a-z, 0-9 and "-". No two steps of a script may
            have the same name.
        script: POSIX shell code that is safe to run twice. It runs with `set -eu`, and can use the shell functions of
            `scripts/prelude.sh` and `scripts/python.sh` in this package.
        check: shell code that succeeds if `script` has had its effect; "" if the exit status of `script` is enough.
        limit: maximum seconds for one attempt.
        retries: number of further attempts after a network failure.
    """

    name: str
    script: str
    check: str = ""
    limit: int = 900
    retries: int = 0

    @property
    def hash(self) -> str:
        """Return a hash of the step's script and check, as 16 hexadecimal digits.

        A machine records finished steps by this hash. The step's name and limits do not affect it.
        """
        return hashlib.sha256(f"{self.script}\0{self.check}".encode("utf-8", "surrogateescape")).hexdigest()[:16]


def program(name: str) -> str:
    """Return the text of the file with this name in this package's folder `scripts`."""
    return (files("skypool_images") / "scripts" / name).read_text("utf-8")


def shell(name: str) -> str:
    """Return the text of the shell script `scripts/NAME.sh` in this package."""
    return program(f"{name}.sh")


def assemble(steps: Sequence[Step], title: str) -> str:
    """Return the shell script that runs `steps` in order, reports its progress, and ends with the path of Python.

    A step that the machine has finished before is skipped. The script prints one line for each event:

        @boot 1                     the script has begun
        @step 2 5 env               step 2 of 5, called env, begins
        | text                      output of the step
        @skip env                   the step was done before
        @retry env 1 2              attempt 1 failed in the network; the next one begins in 2 s
        @done env                   the step has succeeded
        @advice text                advice on the failure that follows
        @fail env 100 command       exit status and the command that failed; the script exits with 1
        @python /usr/bin/python3    the Python that runs the agent
        @ready                      all steps are done

    Args:
        steps: the steps. No two steps may have the same name.
        title: comment in the second line of the script, without line breaks.

    Raises:
        ImageError: a step contains the word SKYPOOL_END, which ends steps in the script.
    """
    parts = [f"#!/bin/sh\n# {title}\n# It can be run repeatedly: finished steps are skipped.\nSTEPS={len(steps)}"]
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
        raise ImageError(
            f"a script in the image contains the word {_END}, which skypool uses to mark the end of steps; remove it"
        )
    return script.rstrip("\n") + "\n"
