"""Lays out the live view with the library rich: headline, table of nodes, colours. The time is always an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from skypool.console.board import Picture, Row
from skypool.console.lines import bare, last_line
from skypool.console.words import many

_WIDEST_BAR = 8
_COLOURS = {"ready": "green", "lost": "bold red", "draining": "magenta", "ended": "bright_black"}
_WAITING = "yellow"


def draw(pictures: Sequence[Picture], now: float, height: int, unfinished: Sequence[str] = ()) -> RenderableType:
    """Return all pools one below the other, and at the bottom the unfinished lines of the user's own program.

    The result is an object that rich can print. Nothing is printed here.

    Args:
        pictures: the pools.
        now: the time in seconds since 1970.
        height: number of lines available. Nodes of a pool that do not fit are summed up in one line.
        unfinished: lines of stdout and stderr that have no newline yet. Default (): none.
    """
    rooms = share_lines([len(each.rows) for each in pictures], height - 1 - len(unfinished))
    pools = zip(pictures, rooms, strict=True)
    parts: list[RenderableType] = [part for each, room in pools for part in _pool(each, now, room)]
    parts += [Text.from_ansi(text, no_wrap=True, overflow="crop") for text in unfinished]
    return Group(*parts)


def share_lines(rows: Sequence[int], height: int) -> list[int]:
    """Return the number of lines for each pool, in the order of `rows`.

    A pool needs one line for its headline and one for each node. If there is not enough room for all, small pools get
    what they need, and the larger pools share the rest equally. Each pool gets at least 2 lines, or 3 if it has several
    nodes, even if the sum is then more than `height`.

    Args:
        rows: number of nodes of each pool.
        height: number of lines available.
    """
    rooms = [0] * len(rows)
    left = height
    for place, i in enumerate(sorted(range(len(rows)), key=lambda i: rows[i])):
        rooms[i] = max(3 if rows[i] > 1 else 2, min(rows[i] + 1, left // (len(rows) - place)))
        left -= rooms[i]
    return rooms


def _pool(picture: Picture, now: float, room: int) -> list[RenderableType]:
    rows = _foremost(picture.rows, room - 1)
    if len(rows) < len(picture.rows):
        rows = _foremost(picture.rows, room - 2)
    parts: list[RenderableType] = [_headline(picture, now)]
    if rows:
        parts.append(_table(rows, now))
    if len(rows) < len(picture.rows):
        parts.append(_rest(picture.rows, rows))
    return parts


def _headline(picture: Picture, now: float) -> Text:
    """Return the first line of a pool: `train  ready  3 nodes  5/6 busy  12 done  0:42`.

    Busy slots are left out while no node has a slot. Busy CPU slots, failed calls and, in a ready pool, ended nodes are
    added if there are any. The last part is the time since the pool's first event.

    Args:
        picture: the pool.
        now: the time in seconds since 1970.
    """
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


def _table(rows: Sequence[Row], now: float) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=28)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        said = _trouble(row) or Text(last_line(row.tail), "bright_black")
        table.add_row(
            f"  node {row.node}",
            _phase(row, now),
            _bar(row),
            f"{row.done:,} done",
            _running(row.running),
            said,
        )
    return table


def _phase(row: Row, now: float) -> Text:
    """Return a node's phase as coloured text, with the time for which it has lasted unless the node is ready.

    If the connection to the node is broken, the text is "unreachable" and the time for which it has been so.

    Args:
        row: the node.
        now: the time in seconds since 1970.
    """
    if row.down:
        return Text(f"unreachable {clock(now - row.down_at)}", "bold red")
    age = "" if row.phase == "ready" else f" {clock(now - row.since)}"
    return Text(f"{row.phase}{age}", _colour(row.phase))


def _bar(row: Row) -> Text:
    """Return a bar of busy and free slots with their numbers, such as "██░░ 2/4"; empty text for a node without slots.

    A slot is a place on a node where one call runs at a time. Up to eight slots have one block each. More slots share
    eight blocks. CPU slots (slots without a device) have no blocks. If some of them are busy, their numbers follow the
    bar.
    """
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
    why = row.down or ("" if row.phase == "ready" else row.detail)
    return Text(bare(why.strip().partition("\n")[0]), "red") if why else None


def _foremost(rows: Sequence[Row], room: int) -> Sequence[Row]:
    """Return the rows (one for each node) that fit into `room` lines, in the order of their node numbers.

    If not all rows fit, nodes that are not ready or have a broken connection are preferred. Next are nodes with running
    calls, and then nodes with low numbers. If there are any rows, at least one is returned.
    """
    if len(rows) <= room:
        return rows
    ranked = sorted(rows, key=lambda r: (r.phase == "ready" and not r.down, not (r.busy or r.cpu_busy), r.node))
    return sorted(ranked[: max(1, room)], key=lambda r: r.node)


def _rest(rows: Sequence[Row], shown: Sequence[Row]) -> Text:
    seen = {row.node for row in shown}
    phases = Counter(row.phase for row in rows if row.node not in seen)
    words = ", ".join(f"{n} {phase}" for phase, n in phases.items())
    return Text(f"  … and {many(sum(phases.values()), 'more node')}: {words}", "bright_black")


def _colour(phase: str) -> str:
    return _COLOURS.get(phase, _WAITING)


def clock(seconds: float) -> str:
    """Return a duration in seconds as a clock shows it: 0:07, 12:30, 1:02:03. Negative durations count as 0.

    Parts of a second are cut off.
    """
    whole = max(0, int(seconds))
    minutes = f"{whole // 60 % 60:02}" if whole >= 3600 else f"{whole // 60}"
    return f"{f'{whole // 3600}:' if whole >= 3600 else ''}{minutes}:{whole % 60:02}"
