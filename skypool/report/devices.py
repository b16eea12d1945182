"""Utilisation and memory of each device, as plots with a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

from skypool.report import words
from skypool.report.elements import Element, element
from skypool.report.facts import NodeFacts, PoolFacts
from skypool.report.page_parts import folded, legend, long_table, note, section, table
from skypool.samples.store import Point

_MOST_PLOTS = 128
"""The most devices with a plot. All of them are in the table."""
_MOST_TIMES = 12
"""The most rows for each device in the table of values over time."""
_MOST_ROWS_OVER_TIME = 1600
"""The most rows of all tables of values over time."""
_GAP = 3.0
"""Points further apart than this many times the usual interval are not connected by a line."""
_LEGEND = (("use", "utilisation in percent"), ("memory", "memory in percent of the device's memory"))
_MEANING = (
    "Utilisation of a GPU is the share of the time in which at least one kernel ran, so 100 % does not mean that the "
    "GPU was full. Of a node without devices it is that of its CPUs."
)


def devices(facts: PoolFacts) -> Element:
    """Return the section with the devices of all nodes. Nodes without devices are shown with CPUs and memory."""
    measured = _by_device(facts.points)
    if not measured:
        return section("devices", "Devices", note("Nothing was measured, or the measurements are not kept."))
    shown = measured[:_MOST_PLOTS]
    rest = len(measured) - len(shown)
    known = {each.node: each for each in facts.nodes}
    groups = [
        _of_node(known.get(node, NodeFacts(node)), list(each), facts)
        for node, each in groupby(shown, key=lambda points: points[0].node)
    ]
    return section(
        "devices",
        "Devices",
        legend(*_LEGEND),
        note(_MEANING),
        *groups,
        note(f"{rest:,} further devices are only in the table.") if rest else None,
        *long_table("Devices", _HEADINGS, [_device_row(each) for each in measured], set(_HEADINGS[1:-1])),
        _over_time(shown, facts),
    )


def _by_device(points: Sequence[Point]) -> list[list[Point]]:
    """Return the points of each device, and those of the node itself for nodes without devices."""
    with_devices = {each.node for each in points if each.kind}
    kept = [each for each in points if each.kind or each.node not in with_devices]
    return [list(each) for _, each in groupby(kept, key=lambda each: (each.node, each.kind, each.index))]


def name_of(point: Point) -> str:
    """Return the name of the device of a point, such as "cuda 0"; "CPUs" for the node itself."""
    return f"{point.kind} {point.index}" if point.kind else "CPUs"


def _of_node(node: NodeFacts, measured: Sequence[Sequence[Point]], facts: PoolFacts) -> Element:
    is_claimed = node.claimed or any(each.claimed for points in measured for each in points)
    tag = element("span", "claimed by the machine's owner", class_="tag") if is_claimed else None
    hardware = f": {node.hardware}" if node.hardware else ""
    return element(
        "div",
        element("h3", f"Node {node.node}{hardware} ", tag),
        element("div", *(_plot(each, facts) for each in measured), class_="plots"),
        class_="node",
    )


def _plot(points: Sequence[Point], facts: PoolFacts) -> Element:
    name = name_of(points[0])
    use = _line(points, facts, lambda each: each.use_percent)
    memory = _line(points, facts, _memory_percent)
    told = _sentence(points)
    plot = element(
        "svg",
        element("title", f"{name} of node {points[0].node}: {told}"),
        *(element("line", x1=0, x2=f"{facts.span:.3f}", y1=y, y2=y, class_="grid") for y in (0, 50, 100)),
        element("path", d=use, class_="use", data_series="use") if use else None,
        element("path", d=memory, class_="memory", data_series="memory") if memory else None,
        viewBox=f"0 0 {facts.span:.3f} 100",
        preserveAspectRatio="none",
        role="img",
        data_node=points[0].node,
        data_device=name,
    )
    scale = element("div", element("span", "100 %"), element("span", "0 %"), class_="scale", aria_hidden="true")
    unknown = next((each.unknown for each in reversed(points) if each.unknown), "")
    return element(
        "figure",
        element("div", scale, plot, class_="plot"),
        element(
            "figcaption",
            element("strong", name),
            f" {told}",
            element("span", f" unknown at times: {unknown}", class_="unknown") if unknown else None,
        ),
    )


def _memory_percent(point: Point) -> float | None:
    if point.memory_mib is None or not point.memory_total_mib:
        return None
    return 100 * point.memory_mib / point.memory_total_mib


def _line(points: Sequence[Point], facts: PoolFacts, value_of: Callable[[Point], float | None]) -> str:
    """Return an SVG path of a value over time, interrupted where the value is unknown. x is seconds since the start."""
    pauses = sorted(two.time - one.time for one, two in pairwise(points))
    most = _GAP * max(1.0, pauses[len(pauses) // 2]) if pauses else 0.0
    parts: list[str] = []
    before: float | None = None
    for each in points:
        value = value_of(each)
        if value is None:
            before = None
            continue
        joins = before is not None and each.time - before <= most
        # y is 100 minus the percentage, because y grows downwards in SVG
        place = f"{max(0.0, each.time - facts.start):.2f} {100 - min(100.0, value):.1f}"
        parts.append(f"L{place}" if joins else f"M{place}h0")
        before = each.time
    return "".join(parts)


# --- tables --------------------------------------------------------------------------------------------------

_HEADINGS = (
    "device",
    "utilisation",
    "highest",
    "SM activity",
    "memory, highest",
    "of",
    "power",
    "temperature",
    "source",
)


def _mean(points: Sequence[Point], value_of: Callable[[Point], float | None]) -> float | None:
    known = [(value, each.samples) for each in points if (value := value_of(each)) is not None]
    samples = sum(number for _, number in known)
    return sum(value * number for value, number in known) / samples if samples else None


def _most(points: Sequence[Point], value_of: Callable[[Point], float | None]) -> float | None:
    return max((value for each in points if (value := value_of(each)) is not None), default=None)


def _device_row(points: Sequence[Point]) -> list[str]:
    return [
        f"node {points[0].node} {name_of(points[0])}",
        words.known(_mean(points, lambda each: each.use_percent), words.percent),
        words.known(_most(points, lambda each: each.most_used_percent), words.percent),
        words.known(_mean(points, lambda each: each.sm_activity_percent), words.percent),
        words.known(_most(points, lambda each: each.most_memory_mib), words.gib),
        words.known(_most(points, lambda each: each.memory_total_mib), words.gib),
        words.known(_mean(points, lambda each: each.power_watts), lambda watts: f"{watts:.0f} W"),
        words.known(_most(points, lambda each: each.temperature_celsius), lambda degrees: f"{degrees:.0f} °C"),
        "claimed" if any(each.claimed for each in points) else "measured",
    ]


def _sentence(points: Sequence[Point]) -> str:
    use = words.known(_mean(points, lambda each: each.use_percent), words.percent)
    most = words.known(_most(points, lambda each: each.most_memory_mib), words.gib)
    total = words.known(_most(points, lambda each: each.memory_total_mib), words.gib)
    return f"utilisation {use} on average; memory up to {most} of {total}"


def _over_time(measured: Sequence[Sequence[Point]], facts: PoolFacts) -> Element:
    times = max(2, min(_MOST_TIMES, _MOST_ROWS_OVER_TIME // len(measured)))
    rows = [row for points in measured for row in _rows_over_time(points, times)]
    headings = ("device", "time", "utilisation", "memory")
    made = table("Values over time", headings, rows, {"time", "utilisation", "memory"}, is_compact=True)
    return folded(f"Values over time, {words.several(times, 'time')} of each device", made)


def _rows_over_time(points: Sequence[Point], times: int) -> Iterator[list[str]]:
    step = max(1, -(-len(points) // times))
    for each in points[::step]:
        yield [
            f"node {each.node} {name_of(each)}",
            words.clock(each.time),
            words.known(each.use_percent, words.percent),
            words.known(each.memory_mib, words.gib),
        ]
