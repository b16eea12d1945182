"""Removes secrets, account names and addresses from the texts of a report, so that others may read it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from skypool.drivers.request_hooks import NOTHING_PRIVATE
from skypool.proof.recording_scrub import Scrubber

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""Matches names of environment variables that may have secrets."""
_SHORTEST = 8
"""The least length of a secret that is searched for. A shorter value would also remove usual words."""
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\barn:[\w-]*:[\w-]*:[\w-]*:[\w-]*:\S+"), "(ARN)"),
    (re.compile(r"\b(AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), "(key)"),
    (re.compile(r"\b(projects?)([/:=]\s*|\s+['\"])[a-z][a-z0-9-]{4,28}[a-z0-9]"), r"\1\2(project)"),
    (re.compile(r"\b(account|user)([ :=]+['\"]?)(?=\S*\d)[\w.:-]+"), r"\1\2(account)"),
    (re.compile(r"\b\d{12,}\b"), "(number)"),
    (re.compile(r"(/home|/Users)/[^/\s]+"), "~"),
)  # fmt: skip
"""Patterns of texts that name a person or an account, with what replaces them.

Such texts occur in sentences of drivers and providers. For requests and replies, the module `scrub` has its own
patterns.
"""


class Redaction:
    """A callable that removes account names, addresses and `secrets` (of 8 characters or more) from texts."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._scrubber = Scrubber(each for each in secrets if len(each) >= _SHORTEST)

    def __call__(self, text: str) -> str:
        """Return a text with a mark, such as "(account)", in place of each thing that must not be shown."""
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return self._scrubber.text(text, NOTHING_PRIVATE)


def secrets_of(driver: object, environment: Mapping[str, str]) -> set[str]:
    """Return the values that must not be in a report of this driver.

    These are the driver's settings with `repr=False`, and environment variables whose names suggest a secret.
    """
    found = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    if dataclasses.is_dataclass(driver):
        values: list[Any] = [getattr(driver, each.name) for each in dataclasses.fields(driver) if not each.repr]
        found |= {each for each in values if isinstance(each, str)}
    return found
