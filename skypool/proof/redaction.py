"""Removes secrets, account names and addresses from the texts of a report, so that others may read it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""Matches names of environment variables that may have secrets."""
_SHORTEST = 8
"""The least length of a value that is removed. A shorter value would also remove usual words."""
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\barn:[\w-]*:[\w-]*:[\w-]*:[\w-]*:\S+"), "(ARN)"),
    (re.compile(r"[\w.+-]+@[\w-]+(\.[\w-]+)+"), "(e-mail)"),
    (re.compile(r"\b(AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), "(key)"),
    (re.compile(r"\b(projects?)([/:=]\s*|\s+['\"])[a-z][a-z0-9-]{4,28}[a-z0-9]"), r"\1\2(project)"),
    (re.compile(r"\b(account|user)([ :=]+['\"]?)(?=\S*\d)[\w.:-]+"), r"\1\2(account)"),
    (re.compile(r"\b\d{12,}\b"), "(number)"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}(/\d{1,2})?\b"), "(address)"),
    (re.compile(r"(/home|/Users)/[^/\s]+"), "~"),
)  # fmt: skip
"""Patterns of texts that name a person, an account or a computer, with what replaces them."""


class Redaction:
    """A function that removes secrets, account names and addresses from texts.

    Args:
        secrets: values to remove, wherever they are. Values of less than 8 characters are ignored.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted({each for each in secrets if len(each) >= _SHORTEST}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Return a text without what must not be shown."""
        for secret in self._secrets:
            text = text.replace(secret, "(secret)")
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text


def secrets_of(driver: object, environment: Mapping[str, str]) -> set[str]:
    """Return the values that must not be in a report of this driver.

    These are the driver's secret settings (fields with `repr=False`), and the values of environment variables whose
    names suggest a secret.
    """
    found = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    if dataclasses.is_dataclass(driver):
        values: list[Any] = [getattr(driver, each.name) for each in dataclasses.fields(driver) if not each.repr]
        found |= {each for each in values if isinstance(each, str)}
    return found
