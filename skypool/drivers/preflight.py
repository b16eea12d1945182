"""Checks for `skypool doctor`: the programs and the clock of this machine, and the account at a provider."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime

from skypool.drivers.retry import at_once
from skypool.drivers.settings import networks
from skypool.errors import UsageError
from skypool.model import Finding

# How many seconds this machine's clock may be off. Signatures of requests hold 300 s, so this leaves a minute.
_SKEW = 240.0


def findings(questions: Mapping[str, Callable[[], object]]) -> Iterator[Finding]:
    """What came of each question, by its title: its answer, or why there is none and what to do."""
    outcomes = at_once(lambda question: str(question() or "yes"), questions.values())
    for what, outcome in zip(questions, outcomes, strict=True):
        if isinstance(outcome, Exception):
            text, _, advice = str(outcome).rpartition("; ")
            yield Finding(what, False, text or advice, advice if text else "")
        else:
            yield Finding(what, True, outcome)


def basics(
    identity: Callable[[], object], date: Callable[[], str], given: Sequence[str] | None
) -> dict[str, Callable[[], object]]:
    """Questions for every cloud of machines with ssh: who the provider says we are, and the Date of an answer."""
    return {
        "ssh on this machine": openssh,
        "networks that may log in": lambda: ", ".join(networks(given)),
        "credentials": identity,
        "clock": lambda: clock(date()),
    }


def openssh() -> str:
    """The version of the programs that every rented machine needs on this one."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UsageError(f"there is no {program} program here; install openssh-client")
    return subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.strip()


def clock(date: str) -> str:
    """How far this machine's clock is from a provider's, as the Date of its answer has it."""
    ahead = time.time() - parsedate_to_datetime(date).timestamp()
    if abs(ahead) > _SKEW:
        raise UsageError(f"the clock of this machine is {ahead:+.0f} s off, and signatures hold 300 s; set it")
    return f"{ahead:+.0f} s off"
