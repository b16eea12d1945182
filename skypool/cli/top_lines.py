"""The lines of `skypool top`: a table of pools that fits the terminal, and the nodes and calls of one pool."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.filesize import decimal
from rich.text import Text

from skypool.cli.top_survey import PoolView, calls_of, folders_of, picture_of
from skypool.console.board import Figures
from skypool.console.gauges import usd
from skypool.console.layout import clock, costs, draw_pool
from skypool.console.whole_lines import bare

Order = Literal["start", "name", "rate", "spent", "idle"]
ORDERS: tuple[Order, ...] = ("start", "name", "rate", "spent", "idle")
"""What the pools can be sorted by. The key `s` changes to the next one. Amounts are sorted from the highest."""
_MOST_CALLS = 200
"""The most running calls of a pool that are listed."""
_LONGEST_NAME = 40
_SHORTEST_NAME = 8
_GAP = 2
"""Number of blanks between two columns. It is 1 if the columns of rank 0 would otherwise not fit."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table of pools.

    Attributes:
        cell: returns the text of a pool in this column, called as (view, now).
        is_number: True aligns the text to the right.
        rank: columns of the highest rank are left out first if the terminal is too narrow. Rank 0 is always shown.
    """

    heading: str
    cell: Callable[[PoolView, float], str]
    is_number: bool = True
    rank: int = 0


def _state(view: PoolView, now: float) -> str:
    if view.left is None:
        return view.state
    return f"left {clock(view.left)}" if view.left else "lease over"


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _amount(value: float | None) -> str:
    return "?" if value is None else usd(value)


def _budget(view: PoolView, now: float) -> str:
    budget = view.record.budget
    return "" if budget is None or view.usd is None else f"{view.usd / budget.max_usd:.0%} of {budget.max_usd:g}"


_COLUMNS = (
    _Column("pool", lambda view, now: view.name, is_number=False),
    _Column("state", _state, is_number=False),
    _Column("nodes", lambda view, now: str(view.nodes)),
    _Column("busy", lambda view, now: _count(view.busy)),
    _Column("wait", lambda view, now: _count(view.waiting)),
    _Column("done", lambda view, now: _count(view.done)),
    _Column("USD/h", lambda view, now: _amount(view.usd_per_hour)),
    _Column("spent", lambda view, now: _amount(view.usd)),
    _Column("idle", lambda view, now: _amount(view.idle_usd)),
    _Column("pid", lambda view, now: str(view.record.client.pid)),
    _Column("age", lambda view, now: clock(now - view.record.started), rank=1),
    _Column("of budget", _budget, rank=2),
    _Column("host", lambda view, now: view.record.client.host, is_number=False, rank=3),
    _Column(
        "providers",
        lambda view, now: " ".join(sorted({each.provider for each in view.record.lines})),
        is_number=False,
        rank=4,
    ),
)


def ordered(views: Sequence[PoolView], order: Order) -> list[PoolView]:
    """Return the pools sorted by `order`, such as "name". Pools whose amount is unknown come last."""
    match order:
        case "start":
            return sorted(views, key=lambda view: view.record.started)
        case "name":
            return sorted(views, key=lambda view: view.name)
        case "rate":
            return sorted(views, key=lambda view: -(view.usd_per_hour or 0.0))
        case "spent":
            return sorted(views, key=lambda view: -(view.usd or 0.0))
        case "idle":
            return sorted(views, key=lambda view: -(view.idle_usd or 0.0))


def summary(views: Sequence[PoolView], trouble: str = "") -> Text:
    """Return the first line: `trouble` if it is not "", otherwise the numbers of pools and nodes, rate and cost."""
    text = _line("").append("skypool top", "bold")
    if trouble:
        return text.append(f"  {trouble}", "red")
    rates = [view.usd_per_hour for view in views]
    spent = [view.usd for view in views]
    nodes = sum(view.nodes for view in views)
    text.append(f"  {len(views)} pool{'' if len(views) == 1 else 's'}  {nodes} node{'' if nodes == 1 else 's'}")
    return text.append(f"  rate {_sum(rates)} USD/h  spent {_sum(spent)} USD")


def _sum(amounts: Sequence[float | None]) -> str:
    known = [each for each in amounts if each is not None]
    return usd(sum(known)) if len(known) == len(amounts) else f"at least {usd(sum(known))}"


def pool_lines(views: Sequence[PoolView], now: float, width: int) -> tuple[Text, list[Text]]:
    """Return the headings of the table of pools, and a line for each pool, for a terminal of `width` columns.

    Columns that do not fit are left out. If that is not enough, long names of pools are cut.
    """
    columns = list(_COLUMNS)
    cells = [[each.cell(view, now) for view in views] for each in columns]
    widths = [max(map(len, [each.heading, *column])) for each, column in zip(columns, cells, strict=True)]
    widths[0] = min(widths[0], _LONGEST_NAME)
    gap = _GAP
    while sum(widths) + gap * (len(widths) - 1) > width:
        if worst := max(each.rank for each in columns):
            at = next(n for n, each in enumerate(columns) if each.rank == worst)
            for each in (columns, cells, widths):
                del each[at]
        elif gap > 1:
            gap -= 1
        else:
            widths[0] = max(_SHORTEST_NAME, widths[0] + width - sum(widths) - gap * (len(widths) - 1))
            break

    def joined(texts: Sequence[str]) -> str:
        fitted = [
            _cut(text, room).rjust(room) if each.is_number else _cut(text, room).ljust(room)
            for each, text, room in zip(columns, texts, widths, strict=True)
        ]
        return (" " * gap).join(fitted).rstrip()

    headings = _line(joined([each.heading for each in columns]), "bold")
    lines = [_line(joined([column[n] for column in cells])) for n in range(len(views))]
    for line, view in zip(lines, views, strict=True):
        if view.notes:
            line.stylize("yellow")
    return headings, lines


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def details(view: PoolView, now: float, width: int) -> list[Text]:
    """Return the lines of one pool for `width` columns: state, costs, nodes, problems and running calls."""
    notes = [
        _line(line, "yellow")
        for note in view.notes
        for line in textwrap.wrap(bare(note.partition("\n")[0]), width, initial_indent="  ! ", subsequent_indent="    ")
    ]
    if view.said is None:
        return _from_ledger(view, now, notes)
    picture = picture_of(view)
    lines = draw_pool(picture, now, 10**9, width)
    lines[2:2] = notes
    if folders := folders_of(view):
        lines += _table(
            ("  folder", "node", "state", "saved", "bytes", "rate", "unsaved", "bytes", "waits"),
            [
                (
                    f"  {_cut(each.folder, 28)}",
                    str(each.node),
                    each.phase,
                    f"{each.files:,}",
                    decimal(each.bytes),
                    f"{decimal(int(each.rate))}/s" if each.rate else "",
                    f"{each.unsaved:,}",
                    decimal(each.unsaved_bytes),
                    clock(each.oldest) if each.unsaved else "",
                )
                for each in folders
            ],
        )
        troubles = {each.trouble: each for each in folders if each.trouble}
        lines += [
            _line(f"  ! {each.folder} on node {each.node}: {each.trouble}", "yellow") for each in troubles.values()
        ]
    calls = calls_of(picture)
    if calls:
        lines += _table(
            ("  call", "node", "slot", "time", "CPU", "memory", "GPU memory"),
            [
                (
                    f"  {_cut(bare(call.name).rpartition('.')[2], 28)}",
                    str(node),
                    str(call.slot),
                    clock(call.wall_seconds),
                    "?" if call.cpu_seconds is None else f"{call.cpu_seconds:.0f} s",
                    _size(call.rss_mib),
                    _size(call.device_memory_mib),
                )
                for node, call in calls[:_MOST_CALLS]
            ],
        )
        if len(calls) > _MOST_CALLS:
            lines.append(_line(f"  … and {len(calls) - _MOST_CALLS:,} more calls", "bright_black"))
    return lines


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Text]:
    """Return the lines of a table. The first column is aligned to the left."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    made = []
    for n, row in enumerate((headings, *rows)):
        name, *others = row
        cells = [cell.rjust(room) for cell, room in zip(others, widths[1:], strict=True)]
        made.append(_line("  ".join([name.ljust(widths[0]), *cells]), "" if n else "bright_black"))
    return made


def _from_ledger(view: PoolView, now: float, notes: Sequence[Text]) -> list[Text]:
    count = f"{view.nodes} machine{'' if view.nodes == 1 else 's'}"
    lines = [_line("").append(f"{view.name}  ", "bold").append(f"{_state(view, now)}  {count}", "yellow"), *notes]
    lines.append(costs(Figures(view.usd, view.usd_per_hour, view.idle_usd)))
    for each in sorted(view.record.running, key=lambda line: line.node):
        facts = filter(None, (each.type, each.place, each.provider, each.id))
        lines.append(_line(f"  node {each.node}  {usd(each.usd_per_hour)} USD/h  {' '.join(facts)}"))
    return lines


def _size(mib: float | None) -> str:
    if mib is None:
        return "?"
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")
