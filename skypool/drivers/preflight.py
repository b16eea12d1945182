"""Runs checks for the command `skypool doctor`: of this computer's programs and clock, and of a provider's account."""

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

# Seconds by which this computer's clock may differ. Signatures of requests are valid for 300 s, so a minute is left.
_SKEW = 240.0


def findings(questions: Mapping[str, Callable[[], object]]) -> Iterator[Finding]:
    """Run checks in parallel, and yield one `Finding` (the result of a check) for each, in the order of `questions`.

    The checks start when the first finding is requested. That request waits until all checks have ended.

    A check passes if its function returns. The text of the finding is then the returned value, or "yes" if that value
    is None, empty, 0 or False. If the function raises an Exception, the check has failed. The finding then has two
    parts of the error's text: its advice is the part after the last "; ", and its text is the part before.

    Args:
        questions: a dict from the title of each finding to the function that performs the check.
    """
    outcomes = at_once(lambda question: str(question() or "yes"), questions.values())
    for what, outcome in zip(questions, outcomes, strict=True):
        yield failure(what, outcome) if isinstance(outcome, Exception) else Finding(what, True, outcome)


def failure(what: str, error: Exception, advice: str = "") -> Finding:
    """Return a failed finding from an error.

    The part of the error's text after the last "; " becomes the advice, and the part before becomes the text.

    Args:
        what: title of the finding.
        error: the error.
        advice: advice for an error whose text has none.
    """
    told = str(error) or type(error).__name__
    text, _, own = told.rpartition("; ")
    return Finding(what, False, text or told, own if text else advice)


def basics(
    identity: Callable[[], object], date: Callable[[], str], given: Sequence[str] | None
) -> dict[str, Callable[[], object]]:
    """Return the checks that all drivers of clouds with SSH machines have in common, as input for `findings`.

    These are checks of the SSH programs, the networks from which users may log in, the credentials, and the clock. This
    function runs no check.

    Args:
        identity: a function that returns the name of the account, as the provider reports it.
        date: a function that sends a request to the provider and returns the Date header of the answer.
        given: the networks from which the settings allow logins; None for the public address of this computer.

    Returns:
        A dict from the title of each finding to the function that performs the check.
    """
    return {
        "ssh on this machine": openssh,
        "networks that may log in": lambda: ", ".join(networks(given)),
        "credentials": identity,
        "clock": lambda: clock(date()),
    }


def openssh() -> str:
    """Return the version of the installed OpenSSH client, as `ssh -V` prints it.

    Raises:
        UsageError: the program `ssh` or `ssh-keygen` is not on the PATH.
    """
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UsageError(
                f"the program {program} is not installed on this computer; install the package openssh-client"
            )
    return subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.strip()


def clock(date: str) -> str:
    """Return the difference between this computer's clock and a provider's clock, such as "+3 s off".

    A positive number means that the clock of this computer is ahead.

    Args:
        date: the Date header of an answer that the provider has just sent.

    Raises:
        UsageError: the difference is more than 240 s. At 300 s, providers refuse requests.
        ValueError: the header is no date.
    """
    ahead = time.time() - parsedate_to_datetime(date).timestamp()
    if abs(ahead) > _SKEW:
        raise UsageError(
            f"the clock of this computer is {ahead:+.0f} s off, but providers reject requests whose time differs by "
            "300 s or more; set the clock"
        )
    return f"{ahead:+.0f} s off"
