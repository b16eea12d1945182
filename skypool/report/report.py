"""`Report`: what a pool did and cost, as one HTML file that loads nothing from the network."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from skypool import clock
from skypool.rental.records import Record
from skypool.report.facts import collect
from skypool.report.page import page
from skypool.samples.session_file import path_of


class Report:
    """A report of a pool. A notebook shows it below the cell that returns it.

    Attributes:
        pool: the name of the pool.
        html: the report as a whole HTML page, which has no scripts and loads nothing.
    """

    def __init__(self, pool: str, html: str) -> None:
        self.pool = pool
        self.html = html

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report to a file, and return the file's path. A file of that name is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        file = Path(path)
        file.write_text(self.html, encoding="utf-8", errors="backslashreplace")
        return file

    def _repr_html_(self) -> str:
        """Return the report in a frame of its own, so that its styles and those of the notebook stay apart."""
        style = "width: 100%; height: 40rem; border: 1px solid #8c959f; border-radius: 6px"
        title = escape(f"Report of pool {self.pool}")
        return f'<iframe title="{title}" sandbox="" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"<Report of pool {self.pool!r}, {len(self.html):,} characters>"


def report_of(record: Record, file: Path | None = None) -> Report:
    """Return a report of a pool, from its record in the ledger and from what has been stored of it until now.

    `file` has the pool's history; None for the file on this computer. Raises sqlite3.Error if it is damaged.
    """
    return Report(record.pool, page(collect(record, file or path_of(record.session), clock.now())))
