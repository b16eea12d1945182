"""Tables, figures and lists of a report. On narrow screens, each row of a table becomes a block of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from skypool.report.elements import Element, element
from skypool.report.words import UNKNOWN

Cell = Element | str


def table(
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    numbers: Collection[str] = (),
    is_compact: bool = False,
) -> Element:
    """Return a table. The first cell of each row is its heading.

    ARIA roles are set, because some browsers drop them for tables whose layout is changed by CSS.

    Args:
        numbers: the headings of columns with numbers, which are aligned to the right.
        is_compact: True for a table with few short columns, which stays a table on narrow screens.
    """
    head = [
        element("th", each, scope="col", role="columnheader", class_="number" if each in numbers else None)
        for each in headings
    ]
    body = [_row(headings, row, numbers) for row in rows]
    return element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head, role="row"), role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        role="table",
        class_="compact" if is_compact else None,
    )


def _row(headings: Sequence[str], row: Sequence[Cell], numbers: Collection[str]) -> Element:
    cells = []
    for place, (heading, cell) in enumerate(zip(headings, row, strict=True)):
        kinds = [*(["number"] if heading in numbers else []), *(["unknown"] if cell == UNKNOWN else [])]
        values = {"class_": " ".join(kinds) or None, "data_heading": heading}
        if place == 0:
            cells.append(element("th", cell, scope="row", role="rowheader", **values))
        else:
            cells.append(element("td", cell, role="cell", **values))
    return element("tr", *cells, role="row")


def folded(summary: str, *content: Element | None) -> Element:
    """Return a summary with content that is hidden until the reader opens it."""
    return element("details", element("summary", summary), *content)


def long_table(
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    numbers: Collection[str] = (),
    is_compact: bool = False,
    shown: int = 10,
    most: int = 1000,
) -> list[Element]:
    """Return a table of the first `shown` rows, and a hidden one, which can be opened, of further rows up to `most`.

    If there are more than `most` rows, a note says how many are left out. The first cell of each row is its heading.
    `numbers` has the headings of columns that are aligned to the right. `is_compact` is True for a table with few short
    columns, which stays a table on narrow screens.
    """
    made = [table(caption, headings, rows[:shown], numbers, is_compact)]
    if len(rows) > shown:
        rest = rows[shown:most]
        made.append(folded(f"{len(rest):,} more", table(f"{caption}, continued", headings, rest, numbers, is_compact)))
    if len(rows) > most:
        made.append(note(f"{len(rows) - most:,} further rows are left out."))
    return made


def section(name: str, title: str, *content: Element | None) -> Element:
    """Return a section of the page, with the heading `title`. `name` is the anchor for links to it."""
    return element(
        "section", element("h2", title, id=f"{name}-title"), *content, id=name, aria_labelledby=f"{name}-title"
    )


def note(text: str) -> Element:
    """Return a paragraph in a quieter colour."""
    return element("p", text, class_="note")


def legend(*entries: tuple[str, str]) -> Element:
    """Return a legend. Each entry is a pair: the CSS class of a mark in the plot, and its meaning."""
    items = [
        element("li", element("span", class_=f"swatch {mark}", aria_hidden="true"), text) for mark, text in entries
    ]
    return element("ul", *items, class_="legend")
