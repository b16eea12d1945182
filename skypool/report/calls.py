"""The calls of a pool: a histogram of their wall times, the slowest ones, and those that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from skypool.calls.tally import BOUNDS, CallCounts, EndedCall
from skypool.report import words
from skypool.report.elements import Element, element
from skypool.report.facts import PoolFacts
from skypool.report.page_parts import Cell, long_table, note, section, table


def calls(facts: PoolFacts) -> Element:
    """Return the section of the page with the calls."""
    counts = facts.counts
    if counts is None:
        return section("calls", "Calls", note("The number of calls is unknown: the history of this run is not kept."))
    ended = counts.ok + counts.failed + counts.cancelled
    if not ended:
        return section("calls", "Calls", note("No call has ended."))
    told = [f"{words.several(ended, 'call')} ended: {counts.ok:,} well, {counts.failed:,} with an error, "]
    told += [f"{counts.cancelled:,} were cancelled. {words.several(counts.retried, 'run')} were repeated."]
    return section(
        "calls",
        "Calls",
        element("p", "".join(told)),
        *_histogram(counts),
        *_slowest([each for each in facts.journal.calls if each.outcome == "ok"]),
        *_failed([each for each in facts.journal.calls if each.outcome == "failed"], counts.failed),
    )


def _histogram(counts: CallCounts) -> Iterator[Element]:
    known = sum(counts.classes)
    if not known:
        yield note("The wall time of no call is known.")
        return
    share = _quantile(counts.classes, 0.5), _quantile(counts.classes, 0.95)
    mean = words.duration(counts.seconds / known)
    yield element("p", f"Mean {mean}; half of the calls took {share[0]}, and 95 % of them {share[1]}.")
    full = [number for number, count in enumerate(counts.classes) if count]
    most = max(counts.classes)
    rows: list[list[Cell]] = []
    for number in range(full[0], full[-1] + 1):
        count = counts.classes[number]
        bar = element("rect", x=0, y=0, width=f"{100 * count / most:.3f}", height=10, data_count=count)
        plot = element("svg", bar, viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true", class_="bar")
        rows.append([_class(number), words.count(count), plot])
    headings = ("wall time", "calls", "bar")
    yield table("Wall times of calls", headings, rows, {"calls"}, is_compact=True)


def _class(number: int) -> str:
    """Return the name of a class (bar) of the histogram of wall times, such as "50 ms to 100 ms"."""
    if number == len(BOUNDS):
        return f"more than {words.duration(BOUNDS[-1])}"
    if number == 0:
        return f"up to {words.duration(BOUNDS[0])}"
    return f"{words.duration(BOUNDS[number - 1])} to {words.duration(BOUNDS[number])}"


def _quantile(classes: Sequence[int], share: float) -> str:
    """Return a quantile of the wall times as text: the upper bound of its class, as exact times are not kept."""
    wanted = share * sum(classes)
    number = next(number for number, below in enumerate(accumulate(classes)) if below >= wanted)
    if number >= len(BOUNDS):
        return f"more than {words.duration(BOUNDS[-1])}"
    return f"at most {words.duration(BOUNDS[number])}"


def _slowest(kept: Sequence[EndedCall]) -> Iterator[Element]:
    rows = [
        [each.name, words.known(each.seconds, words.duration), _node(each.node), words.clock(each.ended)]
        for each in sorted(kept, key=lambda each: -(each.seconds or 0.0))
    ]
    if rows:
        yield from long_table(
            "Slowest calls", ("function", "wall time", "node", "ended"), rows, {"wall time", "ended"}, is_compact=True
        )
    else:
        yield note("No call has succeeded.")


def _failed(kept: Sequence[EndedCall], number: int) -> Iterator[Element]:
    if not number:
        yield note("No call has failed.")
        return
    groups = Counter((each.name, each.error) for each in kept)
    rows = []
    for (name, error), count in groups.most_common():
        same = [each for each in kept if (each.name, each.error) == (name, error)]
        nodes = ", ".join(_node(each) for each in sorted({each.node for each in same})[:10])
        rows.append([name, error, words.count(count), nodes, words.clock(max(each.ended for each in same))])
    headings = ("function", "error", "calls", "nodes", "last")
    yield from long_table("Calls that failed, by their errors", headings, rows, {"calls", "last"})
    if len(kept) < number:
        yield note(f"The newest {len(kept):,} of {number:,} failed calls are kept.")


def _node(node: int) -> str:
    return str(node) if node >= 0 else "none"
