"""Translates a provider's error codes to skypool's error classes.

The class and the advice for each code are in a table, the file `errors.csv` of the driver's package.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files

from skypool import errors
from skypool.drivers import pages
from skypool.errors import ProviderError


@dataclass(frozen=True, slots=True)
class Meaning:
    """One row of the table that translates a provider's error codes.

    A row is used for an error if one of `codes` matches the error's code, and `text` matches in the error's text.

    Attributes:
        codes: shell-style patterns of error codes, such as "Insufficient*".
        kind: class of the error that stands for these codes.
        advice: what the user can do. Names in braces, such as "{region}", are replaced by `Refusals.error`.
        text: regular expression that must match somewhere in the provider's error text, in upper or lower case. "" to
            accept every text.
    """

    codes: tuple[str, ...]
    kind: type[ProviderError]
    advice: str
    text: str = ""

    def fits(self, code: str, text: str) -> bool:
        """Return True if this row is the one for an error with this code and text.

        One of the patterns must match the whole code, and the regular expression must match somewhere in the text. Case
        matters for the code only. "" stands for a missing code or text.
        """
        said = not self.text or re.search(self.text, text, re.IGNORECASE)
        return bool(said) and any(fnmatchcase(code, one) for one in self.codes)


class Refusals:
    """A table that translates the error codes of one provider to skypool's errors. The first row that fits counts.

    The constructor reads the file `errors.csv` in the driver's package. Its columns are:

    - `codes`: shell-style patterns of error codes, separated by spaces.
    - `kind`: the name of the class in `skypool.errors` that stands for these codes.
    - `advice`: what the user can do. It may have names in braces, such as "{region}".
    - `text`: a regular expression that must also match in the provider's error text. This column may be missing.

    Args:
        package: name of the driver's package, such as "skypool_acme".
        provider: name of the driver, for `ProviderError.provider`.
        called: name of the provider in error messages, such as "Acme Cloud".

    Attributes:
        meanings: the rows of the table.

    Raises:
        FileNotFoundError: the package has no file `errors.csv`.
        KeyError: the file lacks one of the columns.
        AttributeError: a name in the column `kind` is no class of `skypool.errors`.
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
        """Return (not raise) the error for a refused request. Its message says what was refused, why, and what to do.

        The class of the error is that of the first row that fits. If no row fits, the class is ProviderError, and the
        message has no advice.

        Args:
            what: name of the refused request, such as "the list of machines".
            code: the provider's error code; "" for none.
            text: the provider's error text; "" for none.
            names: values for the names in braces in the advice.

        Raises:
            KeyError: the advice has a name in braces that is not among `names`.
        """
        meaning = self._meaning(code, text)
        kind, advice = (meaning.kind, meaning.advice.format(**names)) if meaning else (ProviderError, "")
        said = f"{self._called} refused {what}: {text.strip() or 'no reason given'} ({code or 'no code'})"
        return kind(f"{said}; {advice}" if advice else said, provider=self.provider, code=code, text=text)

    def incomplete(self, what: str, why: str) -> ProviderError:
        """Return (not raise) the error for a list that the provider did not give to its end. Its code is "incomplete".

        Args:
            what: name of the request for the list.
            why: why elements may be missing.
        """
        return pages.incomplete(self.provider, self._called, what, why)

    def known(self, codes: Sequence[str]) -> str:
        """Return the first of several codes of one refusal that the table translates whatever the error text is.

        If the table has no such row for any of them, `codes[0]` is returned.
        """
        return next((code for code in codes if self._meaning(code)), codes[0])

    def _meaning(self, code: str, text: str = "") -> Meaning | None:
        return next((each for each in self.meanings if each.fits(code, text)), None)
