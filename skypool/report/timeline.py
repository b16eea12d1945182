"""The time line of the nodes, in seconds since the pool's start: launch, boot, setup, work, calls, and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skypool.report import words
from skypool.report.elements import Element, element
from skypool.report.facts import NodeFacts, PoolFacts, StepSpan
from skypool.report.page_parts import folded, legend, long_table, note, section, table
from skypool.samples.journal import JournalEvent, WorkSpan

_MOST_NODES = 100
"""The most nodes in the plot. All of them are in the table."""
_MOST_SPANS = 8000
"""About the most spans of working time in all rows together."""
_CUT = 0.005
"""A step of the setup has a line around it if it takes more than this share of the time line."""
_HEIGHT = 40
"""The height of a row of the plot: the phases are above 16, the work is between 19 and 33, the calls are below."""
_WORK_TOP = 19
_WORK_HEIGHT = 14
_CALLS_TOP = 35
_CALLS_HEIGHT = 4
_NAMES = {
    "launching": "launch",
    "booting": "boot",
    "bootstrapping": "setup",
    "ready": "ready",
    "draining": "end",
}
"""The names of the phases in the report."""
_LEGEND = (
    ("launching", "launch"),
    ("booting", "boot"),
    ("bootstrapping", "setup, cut into its steps"),
    ("ready", "ready"),
    ("draining", "end"),
    ("work", "work: the height is the share of the time in which the node was not idle"),
    ("call", "one of the slowest calls"),
    ("mark", "interruption, loss or a failed call"),
)


def timeline(facts: PoolFacts) -> Element:
    """Return the section of the page with the time line."""
    shown = facts.nodes[:_MOST_NODES]
    if not shown:
        return section("timeline", "Time line", note("No node was launched, or the history of the nodes is not kept."))
    rows = [_row(each, facts, _MOST_SPANS // len(shown)) for each in shown]
    rest = len(facts.nodes) - len(shown)
    return section(
        "timeline",
        "Time line",
        legend(*_LEGEND),
        element("div", *rows, axis(facts.start, facts.span), class_="timeline"),
        note(f"{rest:,} further nodes are only in the table.") if rest else None,
        note("Point at a bar to see its times. The tables have the same numbers."),
        *_tables(facts),
    )


def axis(start: float, span: float) -> Element:
    """Return a scale for a plot over time, with five times of day.

    `start` is the time at the left end, in seconds since 1970, and `span` the length of the plot in seconds.
    """
    ticks = [element("span", words.clock(start + span * each / 4)) for each in range(5)]
    return element("div", *ticks, class_="axis", aria_hidden="true")


def _percent(share: float) -> str:
    return words.percent(100 * share)


def _row(node: NodeFacts, facts: PoolFacts, most: int) -> Element:
    marks = [*_phases(node, facts), *_steps(node, facts), *_work(node, facts, most), *_calls(node, facts)]
    plot = element(
        "svg",
        *(_grid(facts.span)),
        *marks,
        *_marks(node, facts),
        viewBox=f"0 0 {facts.span:.3f} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"Time line of node {node.node}: {_sentence(node)}",
        data_node=node.node,
    )
    return element("div", element("span", f"node {node.node}", class_="label"), plot, class_="row")


def _grid(span: float) -> Iterator[Element]:
    for each in range(1, 4):
        x = f"{span * each / 4:.3f}"
        yield element("line", x1=x, x2=x, y1=0, y2=_HEIGHT, class_="grid")


def _rect(facts: PoolFacts, since: float, until: float, y: float, height: float, kind: str, title: str) -> Element:
    since, until = max(since, facts.start), min(max(until, since), facts.end)
    return element(
        "rect",
        element("title", title),
        x=f"{since - facts.start:.3f}",
        y=f"{y:g}",
        width=f"{max(until - since, 0.001 * facts.span):.3f}",
        height=f"{height:g}",
        class_=kind,
    )


def _phases(node: NodeFacts, facts: PoolFacts) -> Iterator[Element]:
    for each in node.phases:
        name = _NAMES.get(each.phase, each.phase)
        took = words.duration(each.until - each.since) + ("" if each.is_over else " so far")
        yield _rect(facts, each.since, each.until, 2, 14, each.phase, f"{name}: {took}, from {words.clock(each.since)}")


def _steps(node: NodeFacts, facts: PoolFacts) -> Iterator[Element]:
    for each in node.steps:
        took = words.duration(each.until - each.since) if each.state == "done" else each.state
        title = f"step {each.number} of {each.steps}, {each.name}: {took}"
        is_wide = each.until - each.since > _CUT * facts.span  # otherwise the lines between steps would hide them
        yield _rect(facts, each.since, each.until, 2, 14, f"bootstrapping{' step' if is_wide else ''}", title)


def _work(node: NodeFacts, facts: PoolFacts, most: int) -> Iterator[Element]:
    for each in fewer(node.work, most):
        seconds = each.until - each.since
        share = each.busy / seconds if seconds > 0 else 0.0
        title = f"worked {_percent(share)} of {words.duration(seconds)}, from {words.clock(each.since)}"
        height = _WORK_HEIGHT * share
        made = _rect(facts, each.since, each.until, _WORK_TOP + _WORK_HEIGHT - height, height, "work", title)
        yield Element(made.tag, (*made.attributes, ("data-busy", f"{each.busy:.3f}")), made.children)


def fewer(spans: Sequence[WorkSpan], most: int) -> list[WorkSpan]:
    """Merge adjacent spans of a node, so that at most `most` are left, and return them. Their `busy` is added up."""
    size = -(-len(spans) // max(1, most))
    if size <= 1:
        return list(spans)
    groups = [spans[at : at + size] for at in range(0, len(spans), size)]
    return [WorkSpan(each[0].node, each[0].since, each[-1].until, sum(one.busy for one in each)) for each in groups]


def _calls(node: NodeFacts, facts: PoolFacts) -> Iterator[Element]:
    for each in node.calls:
        if each.outcome == "ok" and each.seconds is not None:
            title = f"{each.name}: {words.duration(each.seconds)}, until {words.clock(each.ended)}"
            begin = each.ended - each.seconds
            yield _rect(facts, begin, each.ended, _CALLS_TOP, _CALLS_HEIGHT, "call", title)


def _marks(node: NodeFacts, facts: PoolFacts) -> Iterator[Element]:
    for event in node.marks:
        if (text := told(event)) is not None:
            yield _line(facts, event.time, 0, _HEIGHT, text)
    for call in node.calls:
        if call.outcome == "failed":
            yield _line(facts, call.ended, _WORK_TOP, _HEIGHT, f"{call.name} failed: {call.error}")
    if node.error and node.ended is not None:
        yield _line(facts, node.ended, 0, _HEIGHT, f"ended: {node.error}")


def _line(facts: PoolFacts, time: float, top: float, bottom: float, title: str) -> Element:
    x = f"{min(max(time, facts.start), facts.end) - facts.start:.3f}"
    text = element("title", f"{words.clock(time)} {title}")
    return element("line", text, x1=x, x2=x, y1=f"{top:g}", y2=f"{bottom:g}", class_="mark")


def told(event: JournalEvent) -> str | None:
    """Return the text of a node's event for a mark on the time line; None if it gets none."""
    said = event.data
    match event.kind:
        case "NodeInterruption":
            return f"the provider takes the machine back at {words.clock(float(said['at']))}"
        case "LinkDown":
            return f"the connection broke: {said['reason']}"
        case "HealthChanged" if said["state"] in ("unhealthy", "degraded"):
            claim = " (claimed)" if said.get("claimed") else ""
            return f"{said['state']}{claim}: {'; '.join(map(str, said['reasons']))}"
        case "ServiceEnded":
            return f"service {said['service']} ended{': ' if said['error'] else ''}{said['error']}"
        case "GangFailed":
            return f"rank {said['rank']} of {said['call']} failed: {said['error']}"
        case "FolderSaved" if said["phase"] == "ended" and said["unsaved"]:
            return f"{said['unsaved']} files of {said['folder']} are saved nowhere: {', '.join(said['names'])}"
        case "FolderSaved" if said["trouble"]:
            return f"{said['folder']} cannot be saved: {said['trouble']}"
        case "DataFetched" if said["trouble"]:
            return f"{said['folder']} cannot be filled: {said['trouble']}"
        case "DataFetched" if said["phase"] == "there":
            return f"{said['folder']} is filled: {said['wanted']} files, {said['wanted_bytes']:,} bytes"
        case "CallRetried":
            return f"{said['call']} runs again, the {said['attempt']}. time: {said['reason']}"
        case _:
            return None


# --- tables --------------------------------------------------------------------------------------------------

_HEADINGS = ("node", "machine", "devices", "launched", "ready after", "ended", "calls", "worked", "interruptions")


def _sentence(node: NodeFacts) -> str:
    parts = [f"{_NAMES.get(each.phase, each.phase)} {words.duration(each.until - each.since)}" for each in node.phases]
    return ", ".join(parts) + f"; worked {words.known(node.worked, _percent)}"


def _tables(facts: PoolFacts) -> Iterator[Element]:
    yield from long_table(
        "Nodes",
        _HEADINGS,
        [_node_row(each) for each in facts.nodes],
        {"ready after", "calls", "worked", "interruptions"},
    )
    rows = _step_rows([step for each in facts.nodes for step in each.steps])
    if rows:
        headings = ("step", "nodes", "mean time", "longest", "skipped", "retries")
        yield folded("Steps of the setup", table("Steps of the setup", headings, rows, set(headings[1:])))


def _node_row(node: NodeFacts) -> list[str]:
    first = min([*(each.since for each in node.phases[:1]), *(each.launched for each in node.lines)], default=None)
    ready = node.span_of("ready")
    machines = [" ".join(filter(None, (each.provider, each.type, each.place, each.market))) for each in node.lines]
    after = None if ready is None or first is None else ready.since - first
    hardware = (node.hardware or "none") if node.phases and ready is not None else words.UNKNOWN
    ended = words.known(node.ended, words.clock)
    is_running = bool(node.lines) and not all(each.ended for each in node.lines)
    return [
        f"{node.node}",
        "; ".join(dict.fromkeys(machines)) or words.UNKNOWN,
        hardware + (" (claimed)" if node.claimed else ""),
        words.known(first, words.clock),
        words.known(after, words.duration),
        "not yet, or unknown" if is_running else ended + (f": {node.error}" if node.error else ""),
        words.known(node.done, words.count),
        words.known(node.worked, _percent),
        words.count(sum(each.kind == "NodeInterruption" for each in node.marks)),
    ]


def _step_rows(steps: Sequence[StepSpan]) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(each.name for each in steps):
        same = [each for each in steps if each.name == name]
        times = [each.until - each.since for each in same if each.state == "done"]
        mean = sum(times) / len(times) if times else None
        skipped = sum(each.state == "skipped" for each in same)
        rows.append(
            [
                name,
                words.count(len(same)),
                words.known(mean, words.duration),
                words.known(max(times, default=None), words.duration),
                words.count(skipped),
                words.count(sum(each.retries for each in same)),
            ]
        )
    return rows
