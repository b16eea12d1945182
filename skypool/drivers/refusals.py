"""Translates a provider's error codes to skypool's error classes, with advice, by a table in the driver's package."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files

from skypool import errors
from skypool.errors import ProviderError


@dataclass(frozen=True, slots=True)
class Meaning:
    """One row of the table that translates a provider's error codes: the codes, the error class to raise, and advice.

    Attributes:
        codes: patterns of error codes, such as "Insufficient*".
        kind: class of the error that is raised.
        advice: what the user can do. It may contain names in braces, which `Refusals.error` fills in.
        text: regular expression that must also be found in the provider's error text, upper and lower case alike; ""
            for any text.
    """

    codes: tuple[str, ...]
    kind: type[ProviderError]
    advice: str
    text: str = ""

    def fits(self, code: str, text: str) -> bool:
        """Return True if `code` matches one of the patterns, and the regular expression is found in `text`.

        Upper and lower case are the same in `text`, but differ in `code`. A pattern must match the whole code. A row
        without a regular expression fits any text.
        """
        said = not self.text or re.search(self.text, text, re.IGNORECASE)
        return bool(said) and any(fnmatchcase(code, one) for one in self.codes)


class Refusals:
    """A table that translates the error codes of one provider to skypool's errors. The first row that fits counts.

    The constructor reads it from the file `errors.csv` in the driver's package.

    Args:
        package: name of the driver's package.
        provider: name of the driver, for `ProviderError.provider`.
        called: name of the provider in error messages.
    """

    def __init__(self, package: str, provider: str, called: str) -> None:
        self.provider = provider
        self._called = called
        rows = csv.DictReader((files(package) / "errors.csv").read_text("utf-8").splitlines())
        self.meanings = [
            Meaning(tuple(row["codes"].split()), getattr(errors, row["kind"]), row["advice"], row.get("text", ""))
            for row in rows
        ]

    def error(self, what: str, code: str, text: str, **names: str) -> ProviderError:
        """Return the error for a refusal, with a message that says what was refused, why, and what to do.

        Nothing is raised.

        Its class is that of the first row that fits. If no row fits, it is a plain ProviderError without advice.

        Args:
            what: name of the refused request.
            code: the provider's error code; "" for none.
            text: the provider's error text; "" for none.
            names: values for the names in braces in the advice. A missing one is a KeyError.
        """
        meaning = self._meaning(code, text)
        kind, advice = (meaning.kind, meaning.advice.format(**names)) if meaning else (ProviderError, "")
        said = f"{self._called} refused {what}: {text.strip() or 'no reason given'} ({code or 'no code'})"
        return kind(f"{said}; {advice}" if advice else said, provider=self.provider, code=code, text=text)

    def known(self, codes: Sequence[str]) -> str:
        """Return the first of these error codes that is in the table, or the first code of all if none is.

        Rows that also require an error text do not count. `codes` must not be empty.
        """
        return next((code for code in codes if self._meaning(code)), codes[0])

    def _meaning(self, code: str, text: str = "") -> Meaning | None:
        return next((each for each in self.meanings if each.fits(code, text)), None)
