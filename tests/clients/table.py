"""The tables of README.md: which functions of which client were called at which lab.

    python -m tests.clients.table     # after `pytest -m clients`: write the tables anew from what ran

Every test module has an `ABOUT`, and compares what ran with its part of README.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.clients.runs import Report
from tests.clients.venvs import PLACE, version

README = Path(__file__).parent / "README.md"
REPORTS = PLACE / "reports"
OPERATIONS = ("list", "create", "get", "tag", "log", "end", "bad key", "no stock", "bad id")
BEGIN, END = "<!-- made by tests/clients/table.py -->", "<!-- end -->"


@dataclass(frozen=True)
class About:
    """One client at one lab.

    Attributes:
        client: its name for readers; package: its name in the package index.
        requirements: of a file in requirements/, without its suffix.
        lab: what it was run against.
        how: how it is led to the lab.
        lacking: why an operation was not called, where it was not.
    """

    client: str
    package: str
    requirements: str
    lab: str
    how: str
    lacking: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def title(self) -> str:
        return f"{self.client} {version(self.requirements, self.package)} at {self.lab}"


def row(about: About, called: Mapping[str, Sequence[str]]) -> str:
    """Return the client's row of the first table."""
    cells = ["✓" if operation in called else "–" for operation in OPERATIONS]
    known = version(about.requirements, about.package)
    return f"| {' | '.join([f'{about.client} {known}', about.lab, *cells])} |"


def section(about: About, called: Mapping[str, Sequence[str]]) -> str:
    """Return the client's own section, with the names of all that was called."""
    lines = [f"### {about.title}", "", about.how, "", "| operation | called |", "|---|---|"]
    for operation in OPERATIONS:
        names = ", ".join(f"`{name}`" for name in called.get(operation, ()))
        lines.append(f"| {operation} | {names or 'none: ' + about.lacking[operation]} |")
    return "\n".join(lines)


def check(about: About, report: Report) -> None:
    """Compare what ran with README.md, and keep it for `python -m tests.clients.table`.

    Raises:
        AssertionError: README.md says something else, or an operation is missing without a reason.
    """
    REPORTS.mkdir(parents=True, exist_ok=True)
    told = {"about": asdict(about), "called": report.called}
    (REPORTS / f"{about.title.replace(' ', '-')}.json").write_text(json.dumps(told))
    assert set(report.called) <= set(OPERATIONS)
    assert set(OPERATIONS) - set(report.called) == set(about.lacking), "an operation that was not called has a reason"
    readme = README.read_text()
    for part in (row(about, report.called), section(about, report.called)):
        assert part in readme, f"{README} lacks this; python -m tests.clients.table writes it:\n{part}"


def rendered(told: Iterable[tuple[About, Mapping[str, Sequence[str]]]]) -> str:
    """Return all tables."""
    all = sorted(told, key=lambda each: (each[0].lab, each[0].client))
    head = ["client", "lab", *OPERATIONS]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(row(*each) for each in all)]
    return "\n\n".join(["\n".join(lines), *(section(*each) for each in all)])


def write() -> None:
    """Write the tables of README.md from the reports of the last runs."""
    told = []
    for file in REPORTS.glob("*.json"):
        report = json.loads(file.read_text())
        about = About(**report["about"])
        if file.stem == about.title.replace(" ", "-"):  # and not of an older version
            told.append((about, report["called"]))
    before, _, rest = README.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n\n{rendered(told)}\n\n{END}{after}")


if __name__ == "__main__":
    write()
