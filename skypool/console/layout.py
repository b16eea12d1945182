"""Lays out the live view with the library rich, also for `skypool top`. `now` is in seconds since 1970 everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from skypool.console.board import Figures, Picture, Row
from skypool.console.event_text import many
from skypool.console.gauges import BAR, Gauge, gauges, usd
from skypool.console.whole_lines import bare, last_line

_WIDEST_BAR = 8
_WIDEST_NAMES = 28
"""Maximum number of characters of the names of running functions in the line of a node."""
_LEAST_OUTPUT = 8
"""If a node's line has fewer columns than this left, no output of the node is shown there."""
_WIDE = 120
"""On a terminal with at least this many columns, up to `_MOST_BARS` devices of a node have a bar each."""
_MOST_BARS = 16
_INDENT = 10
"""Number of columns before the measurements of a node."""
_COLOURS = {
    "ready": "green",
    "unhealthy": "bold red",
    "lost": "bold red",
    "draining": "magenta",
    "ended": "bright_black",
}
_WAITING = "yellow"


def draw(
    pictures: Sequence[Picture], now: float, height: int, unfinished: Sequence[str] = (), width: int = 80
) -> RenderableType:
    """Return all pools one below the other, and the unfinished lines of the user's own program at the bottom.

    Args:
        pictures: the states of the pools.
        now: the current time, in seconds since 1970.
        height: number of lines available. Nodes of a pool that do not fit are summed up in one line.
        unfinished: unfinished lines of stdout and stderr.
        width: number of columns available.
    """
    left = height - 1 - len(unfinished)
    is_detailed = sum(_lines_of(each) for each in pictures) <= left
    rooms = share_lines([_lines_of(each, is_detailed) - 1 for each in pictures], left)
    pools = zip(pictures, rooms, strict=True)
    parts: list[RenderableType] = [
        part for each, room in pools for part in draw_pool(each, now, room, width, is_detailed=is_detailed)
    ]
    parts += [Text.from_ansi(text, no_wrap=True, overflow="crop") for text in unfinished]
    return Group(*parts)


def _lines_of(picture: Picture, is_detailed: bool = True) -> int:
    """Return the number of lines that a pool needs: headline, costs, and one or two for each node."""
    measured = sum(map(_is_measured, picture.rows)) if is_detailed and picture.figures else 0
    return 1 + bool(picture.figures) + len(picture.rows) + measured


def share_lines(rows: Sequence[int], height: int) -> list[int]:
    """Return the number of lines for each pool. `rows` has the lines that each needs below its headline.

    If `height` lines are too few for all, small pools get what they need, and larger pools share the rest equally. But
    each pool gets at least 2 lines, or 3 if it needs 3 or more, even if the sum then exceeds `height`.
    """
    rooms = [0] * len(rows)
    left = height
    for place, i in enumerate(sorted(range(len(rows)), key=lambda i: rows[i])):
        rooms[i] = max(3 if rows[i] > 1 else 2, min(rows[i] + 1, left // (len(rows) - place)))
        left -= rooms[i]
    return rooms


def draw_pool(picture: Picture, now: float, room: int, width: int = 80, *, is_detailed: bool = True) -> list[Text]:
    """Return the lines of one pool: its headline, its costs, and its nodes.

    Args:
        now: the current time, in seconds since 1970.
        room: number of lines available. Nodes that do not fit are summed up in one line.
        width: number of columns available.
        is_detailed: True shows the measurements of each node on a second line. False shows a few of them on the line of
            the node. They are not shown if the picture has no figures.
    """
    parts = [_headline(picture, now)]
    if picture.figures and room > 2:
        parts.append(costs(picture.figures))
    is_detailed = is_detailed and picture.figures is not None
    room -= len(parts)
    rows = _foremost(picture.rows, room, is_detailed)
    if len(rows) < len(picture.rows):
        rows = _foremost(picture.rows, room - 1, is_detailed)
    brief = picture.figures is not None and not is_detailed
    for row, line in zip(rows, _node_lines(rows, now, width, brief), strict=True):
        parts.append(line)
        if is_detailed and _is_measured(row):
            parts.append(_measured(row, width))
    if len(rows) < len(picture.rows):
        parts.append(_rest(picture.rows, rows))
    return parts


def _is_measured(row: Row) -> bool:
    """Return True if a node has been measured, or should have been."""
    return row.sample is not None or row.phase == "ready"


def costs(figures: Figures) -> Text:
    """Return the line of a pool's costs: `  spent 1.21 USD  rate 47.80 USD/h  idle 0.4000 USD`."""
    facts = [("spent", figures.usd, "USD"), ("rate", figures.usd_per_hour, "USD/h"), ("idle", figures.idle_usd, "USD")]
    said = [f"{name} {'unknown' if amount is None else f'{usd(amount)} {unit}'}" for name, amount, unit in facts]
    return _whole_line("  " + "  ".join(said))


def _measured(row: Row, width: int) -> Text:
    most = _MOST_BARS if width >= _WIDE else BAR
    text = _whole_line(f"{_claim(row):<{_INDENT}}")
    for n, each in enumerate(gauges(row.sample, most)):
        text.append("  " if n else "")
        _append(text, each)
    return text


def _claim(row: Row) -> str:
    """Return "claimed" as a mark on values of an untrusted machine, whose owner may make them up; otherwise ""."""
    return "  claimed " if row.sample and row.sample.claimed else ""


def _append(text: Text, gauge: Gauge) -> None:
    text.append(f"{gauge.name} ", "bright_black")
    if gauge.bars:
        text.append(f"{gauge.bars} ", "green")
    text.append(gauge.text, _WAITING if gauge.text == "unknown" else "default")


def _whole_line(text: str = "", style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _headline(picture: Picture, now: float) -> Text:
    """Return a pool's first line, `train  ready  3 nodes  5/6 busy  12 done  0:42`, with the time since its start."""
    slots = sum(row.slots for row in picture.rows)
    busy = sum(row.busy for row in picture.rows)
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{picture.pool}  ", "bold")
    text.append(picture.phase, _colour(picture.phase))
    facts = [many(len(picture.rows), "node")]
    if slots:
        facts.append(f"{busy}/{slots} busy")
    if on_cpu := sum(row.cpu_busy for row in picture.rows):
        facts.append(f"{on_cpu}/{sum(row.cpu_slots for row in picture.rows)} CPU")
    facts.append(f"{picture.done:,} done")
    text.append("".join(f"  {fact}" for fact in facts))
    if picture.failed:
        text.append(f"  {picture.failed:,} failed", "red")
    if picture.gone and picture.phase == "ready":
        text.append(f"  {many(picture.gone, 'node')} gone", "red")
    text.append(f"  {clock(now - picture.began if picture.began else 0.0)}", "bright_black")
    return text


def _node_lines(rows: Sequence[Row], now: float, width: int, is_brief: bool) -> list[Text]:
    """Return the line of each node, with aligned columns. `is_brief` adds a column with a few measurements."""
    names = [_running(row.running) for row in rows]
    for each in names:
        each.truncate(_WIDEST_NAMES, overflow="ellipsis")
    columns = [
        [Text(f"  node {row.node}", justify="right") for row in rows],
        [_phase(row, now) for row in rows],
        [_bar(row) for row in rows],
        [Text(f"{row.done:,} done", justify="right") for row in rows],
        names,
    ]
    if is_brief:
        columns.append(_brief_column(rows, width - sum(_width_of(each) + 2 for each in columns if _width_of(each))))
    lines = [_whole_line() for _ in rows]
    for column in columns:
        widest = _width_of(column)
        for line, each in zip(lines, column, strict=True) if widest else ():
            blank = " " * (widest - each.cell_len)
            line.append_text(Text(blank) + each if each.justify == "right" else each + Text(blank)).append("  ")
    for line, row in zip(lines, rows, strict=True):
        line.append_text(_trouble(row) or Text(_about(row, width - line.cell_len), "bright_black"))
        line.rstrip()  # blanks that do not fit would be cut with an ellipsis
    return lines


def _width_of(column: Sequence[Text]) -> int:
    return max((each.cell_len for each in column), default=0)


def _about(row: Row, room: int) -> str:
    """Return the end of a node's line: facts about its machine that fit into `room` columns, or its last output."""
    facts = list(row.machine)
    while facts and cell_len("  ".join(facts)) > room:
        facts.pop()
    return "  ".join(facts) or (last_line(row.tail) if room >= _LEAST_OUTPUT else "")


def _brief_column(rows: Sequence[Row], room: int) -> list[Text]:
    """Return each node's measurements as text. If `room` is too small, leave out power for all, then memory."""
    for count in (3, 2):
        column = [_brief(row, count) for row in rows]
        if _width_of(column) <= room:
            return column
    return [_brief(row, 1) for row in rows]


def _brief(row: Row, count: int) -> Text:
    if not _is_measured(row):
        return Text()
    measured = gauges(row.sample, _MOST_BARS)[:count]
    return Text(f"{_claim(row).strip()} {' '.join(f'{each.name} {each.text}' for each in measured)}".strip())


def _phase(row: Row, now: float) -> Text:
    """Return "unreachable", the bad health of a ready node, or the phase: the first that applies, and its duration."""
    if row.down:
        return Text(f"unreachable {clock(now - row.down_at)}", "bold red")
    if row.phase == "ready" and row.health:
        return Text(row.health, _colour(row.health))
    age = "" if row.phase == "ready" or not row.since else f" {clock(now - row.since)}"
    return Text(f"{row.phase}{age}", _colour(row.phase))


def _bar(row: Row) -> Text:
    """Return a bar of busy and free slots with their numbers, such as "██░░ 2/4"; empty text without slots."""
    if not row.slots:
        return Text()
    width = min(row.slots, _WIDEST_BAR)
    busy = min(row.busy, row.slots)
    full = -(-busy * width // row.slots)
    text = Text("█" * full, "green")
    text.append("░" * (width - full), "bright_black")
    text.append(f" {row.busy}/{row.slots}", "default")
    return text.append(f" {row.cpu_busy}/{row.cpu_slots} CPU", "default") if row.cpu_busy else text


def _running(names: Sequence[str]) -> Text:
    counts = Counter(bare(name) for name in names)
    return Text(", ".join(name if n == 1 else f"{name} ×{n}" for name, n in counts.items()), "cyan")


def _trouble(row: Row) -> Text | None:
    why = row.down or ("" if row.phase == "ready" else row.detail) or row.why
    return Text(bare(why.strip().partition("\n")[0]), "red") if why else None


def _foremost(rows: Sequence[Row], room: int, is_detailed: bool) -> Sequence[Row]:
    """Choose at least one row for `room` lines: first problems, then running calls. Return them in node order."""
    if sum(_height(row, is_detailed) for row in rows) <= room:
        return rows
    ranked = sorted(
        rows, key=lambda r: (r.phase == "ready" and not r.down and not r.health, not (r.busy or r.cpu_busy), r.node)
    )
    shown = ranked[:1]
    left = room - sum(_height(row, is_detailed) for row in shown)
    for row in ranked[1:]:
        left -= _height(row, is_detailed)
        if left < 0:
            break
        shown.append(row)
    return sorted(shown, key=lambda r: r.node)


def _height(row: Row, is_detailed: bool) -> int:
    return 2 if is_detailed and _is_measured(row) else 1


def _rest(rows: Sequence[Row], shown: Sequence[Row]) -> Text:
    seen = {row.node for row in shown}
    phases = Counter(row.phase for row in rows if row.node not in seen)
    words = ", ".join(f"{n} {phase}" for phase, n in phases.items())
    return Text(f"  … and {many(sum(phases.values()), 'more node')}: {words}", "bright_black")


def _colour(phase: str) -> str:
    return _COLOURS.get(phase, _WAITING)


def clock(seconds: float) -> str:
    """Return a duration in seconds as a clock shows it: 0:07, 12:30, 1:02:03. Negative durations count as 0."""
    whole = max(0, int(seconds))
    minutes = f"{whole // 60 % 60:02}" if whole >= 3600 else f"{whole // 60}"
    return f"{f'{whole // 3600}:' if whole >= 3600 else ''}{minutes}:{whole % 60:02}"
