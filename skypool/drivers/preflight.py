"""Runs checks for the command `skypool doctor`: of this computer's programs and clock, and of a provider's account.

`findings` runs functions as checks. `basics`, `openssh` and `clock` are checks. `failure`, `hardware` and `refusal`
make findings.
"""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase

from skypool.drivers.retry import at_once
from skypool.drivers.settings import networks
from skypool.errors import (
    AccessError,
    CredentialsError,
    FundsError,
    NoAnswer,
    ProviderError,
    QuotaError,
    RateLimitError,
    UsageError,
)
from skypool.model import Finding, Instance, Need, Order

SSH = "ssh on this machine"
"""The title of the finding about the SSH programs. Commands show it only once, not again for each driver."""

# Seconds by which this computer's clock may differ. Signatures of requests are valid for 300 s, so a minute is left.
_SKEW = 240.0

_SHOWN = 8
"""The most names of unknown types that a finding shows; the others are only counted."""

_UPGRADE = "upgrade skypool: `pip install --upgrade skypool`"
"""Advice if a provider sells something that this version of skypool does not know."""

_REPORT = "report this message to skypool's authors"

_OTHER_REASONS = (AccessError, CredentialsError, FundsError, NoAnswer, QuotaError, RateLimitError)
"""Errors that do not depend on what is impossible about a request, or that leave open whether it was refused.

A finding about such an error shows the error's own advice.
"""


def findings(
    questions: Mapping[str, Callable[[], object]], then: Mapping[str, Callable[[], object]] | None = None
) -> Iterator[Finding]:
    """Run checks in parallel, and yield one `Finding` for each, in the order of `questions`.

    The checks start when the first finding is requested. That request waits until all checks have ended.

    A check passes if its function returns. The text of the finding is then the returned value, or "yes" if that value
    is None, empty, 0 or False. If the function returns a `Finding`, that is yielded with the title of the check. If the
    function raises an Exception, the check has failed, and `failure` makes the finding.

    Args:
        questions: a dict from the title of a finding to the function that performs the check.
        then: further checks of the same form, which need valid credentials. They run after `questions`, and only if
            none of these raised CredentialsError, so that wrong credentials are reported once. None for no further
            checks.
    """
    outcomes = at_once(lambda question: question() or "yes", questions.values())
    for what, outcome in zip(questions, outcomes, strict=True):
        if isinstance(outcome, Exception):
            yield failure(what, outcome)
        elif isinstance(outcome, Finding):
            yield replace(outcome, what=what)
        else:
            yield Finding(what, True, str(outcome))
    if then and not any(isinstance(outcome, CredentialsError) for outcome in outcomes):
        yield from findings(then)


def failure(what: str, error: Exception, advice: str = "") -> Finding:
    """Return a failed finding with the title `what` from an error.

    The part of the error's text after the last "; " becomes the advice, and the part before becomes the text. `advice`
    is used for an error whose text has no "; ".
    """
    told = str(error) or type(error).__name__
    text, _, own = told.rpartition("; ")
    return Finding(what, False, text or told, own if text else advice)


def hardware(known: int, unknown: Iterable[str]) -> Finding:
    """Return a finding that says how many of the types of accelerators that a provider sells are known to skypool.

    The finding is a failure if skypool knows none of them. It has no title, because `findings` adds the title.

    Args:
        known: number of types that skypool knows.
        unknown: the provider's names of the other types. They are sold, but skypool cannot offer them.
    """
    names = sorted(unknown)
    if not names:
        return Finding("", known > 0, f"skypool knows all {known} types with accelerators that are sold")
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = f"skypool knows {known} types with accelerators that are sold, and does not know {', '.join(names[:_SHOWN])}"
    return Finding("", known > 0, f"{text}{more}", _UPGRADE)


def impossible_order(need: Need) -> Order:
    """Return an order of one machine with this need, for a create request that the provider must refuse.

    The name of the pool is random. The expiry time is ten minutes from now: if the provider makes something all the
    same, `skypool gc` may then remove it.
    """
    token = secrets.token_hex(8)
    until = datetime.now(UTC) + timedelta(minutes=10)
    return Order(f"prove-{token}", f"{token}-1", (0,), need, until=until)


def refusal(
    what: str,
    create: Callable[[], Instance],
    kinds: Sequence[type[ProviderError]],
    end: Callable[[Sequence[Instance]], None],
    *,
    names: str,
    vague: Sequence[str] = (),
) -> Finding:
    """Send a create request that the provider must refuse, and return a finding about the answer. Does not raise.

    The finding is good if the provider refused, and its text names what is impossible about the request. Any other
    refusal may have another cause, such as a field that the provider does not know. So it does not show that a possible
    request would succeed. If a machine was made all the same, it is ended.

    Args:
        what: what is impossible about the request, such as "an unknown instance type".
        create: sends the request, and returns the machine if one was made.
        kinds: the classes of error that `create` may raise for the refusal. Their subclasses do not count.
        end: the driver's method that terminates machines.
        names: regular expression that the provider's error text or error code must contain, in any case: the impossible
            value, or the provider's words for it.
        vague: shell-style patterns of error codes with which the provider may refuse without naming the reason, for
            example as if there were no stock. Such a refusal gives a good finding, too, with `open` = True, because it
            shows little.
    """
    title = f"{what} is refused"
    try:
        made = create()
    except ProviderError as e:
        text = f"{e.text.strip()} ({e.code}), raised as {type(e).__name__}"
        is_expected = type(e) in kinds
        if is_expected and re.search(names, f"{e.code} {e.text}", re.IGNORECASE):
            return Finding(title, True, text)
        if is_expected and any(fnmatchcase(e.code, code) for code in vague):
            return Finding(title, True, f"{text}; the text does not name {what}, so this shows little", open=True)
        if is_expected:
            finding = failure(title, e, _REPORT)
            return replace(finding, text=f"{finding.text}, which does not name {what}")
        if isinstance(e, _OTHER_REASONS):
            return failure(title, e)
        expected = " or ".join(kind.__name__ for kind in kinds)
        return Finding(title, False, f"{text}, but skypool expects {expected}", _REPORT)
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return failure(title, e, _REPORT)
    try:
        end([made])
    except Exception as e:  # noqa: BLE001 - any error is a finding to show
        return failure(title, e, f"the machine {made.id} may still run: run `skypool gc --yes`")
    return Finding(title, False, f"the machine {made.id} was made, and was ended again", _REPORT)


def basics(
    identity: Callable[[], object], date: Callable[[], str], given: Sequence[str] | None
) -> dict[str, Callable[[], object]]:
    """Return a dict from title to check, for `findings`: the checks that drivers of clouds with SSH machines share.

    These are checks of the SSH programs, the networks from which users may log in, the credentials, and the clock. No
    check runs yet.

    Args:
        identity: returns the name of the account, as the provider reports it.
        date: sends a request to the provider and returns the Date header of the answer.
        given: the networks from which the settings allow logins; None for the public address of this computer.
    """
    return {
        SSH: openssh,
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

    A positive number means that the clock of this computer is ahead. `date` is the Date header of an answer that the
    provider has just sent.

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
