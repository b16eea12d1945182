"""Maps a provider's error codes to skypool's errors, each with advice, by a table in the driver's package."""

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
    """What error codes of a provider mean: patterns of them, an error of ours, what to do.

    Attributes:
        text: a regular expression that is found in what the provider said, where its codes do not tell; "" for any.
    """

    codes: tuple[str, ...]
    kind: type[ProviderError]
    advice: str
    text: str = ""

    def fits(self, code: str, text: str) -> bool:
        """Upper and lower case of the text are the same."""
        said = not self.text or re.search(self.text, text, re.IGNORECASE)
        return bool(said) and any(fnmatchcase(code, one) for one in self.codes)


class Refusals:
    """The error codes of a provider, from the table `errors.csv` of its driver's package; the first row that fits.

    Args:
        provider: the driver's name; called: the provider's own.
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
        """An error that says what was refused, why, and what to do; `names` are what the advice may speak of."""
        meaning = self._meaning(code, text)
        kind, advice = (meaning.kind, meaning.advice.format(**names)) if meaning else (ProviderError, "")
        said = f"{self._called} refused {what}: {text.strip() or 'no reason given'} ({code or 'no code'})"
        return kind(f"{said}; {advice}" if advice else said, provider=self.provider, code=code, text=text)

    def known(self, codes: Sequence[str]) -> str:
        """The first of these codes that the table has; the first of all where it has none."""
        return next((code for code in codes if self._meaning(code)), codes[0])

    def _meaning(self, code: str, text: str = "") -> Meaning | None:
        return next((each for each in self.meanings if each.fits(code, text)), None)
