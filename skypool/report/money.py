"""The costs of a pool over time, by node and by offer, and how much was paid for idle machines."""

from __future__ import annotations

from collections.abc import Sequence

from skypool.rental.receipt import LEFT_OUT, Line, Receipt
from skypool.report import words
from skypool.report.elements import Element, element
from skypool.report.facts import PoolFacts
from skypool.report.page_parts import Cell, long_table, note, section
from skypool.report.timeline import axis

_POINTS = 120
"""The number of points of the plot."""
_IDLE = (
    "A machine is idle while no call runs on it, or while all of its devices are under 5 % of their use. What was paid "
    "before its first call and after its last one is idle, too."
)


def money(facts: PoolFacts) -> Element:
    """Return the section of the page with the costs."""
    lines = facts.receipt.lines
    if not lines:
        return section("money", "Money", note("No machine was rented."))
    open_lines = sum(not each.ended for each in lines)
    return section(
        "money",
        "Money",
        _plot(facts),
        note(_IDLE),
        *long_table("Cost of each machine", _OF_NODE, [_node_row(each) for each in _in_order(lines)], _NUMBERS),
        *long_table("Cost of each offer", _OF_OFFER, _offer_rows(facts.receipt), _NUMBERS),
        note(f"The end of {words.several(open_lines, 'machine')} is not proved, so its cost is counted until now.")
        if open_lines
        else None,
        note(f"Orders without an answer: {facts.receipt.unanswered}; their cost, if any, is not included.")
        if facts.receipt.unanswered
        else None,
        note(f"{LEFT_OUT[:1].upper()}{LEFT_OUT[1:]}."),
    )


def _in_order(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda each: (each.node, each.launched))


def _plot(facts: PoolFacts) -> Element | None:
    lines, span = facts.receipt.lines, facts.span
    times = [facts.start + span * each / _POINTS for each in range(_POINTS + 1)]
    costs = [sum(each.usd_between(0.0, time) for each in lines) for time in times]
    most = max(costs)
    if most <= 0:
        return None
    path = "".join(
        f"{'L' if at else 'M'}{time - facts.start:.2f} {100 * (1 - cost / most):.3f}"
        for at, (time, cost) in enumerate(zip(times, costs, strict=True))
    )
    plot = element(
        "svg",
        element("title", f"Cost over time: {words.usd(most)} USD at the end"),
        *(element("line", x1=0, x2=f"{span:.3f}", y1=y, y2=y, class_="grid") for y in (0, 50, 100)),
        element("path", d=path, class_="cost", data_most=most),
        viewBox=f"0 0 {span:.3f} 100",
        preserveAspectRatio="none",
        role="img",
    )
    labels = [element("span", words.usd(most)), element("span", "0 USD")]
    scale = element("div", *labels, class_="scale", aria_hidden="true")
    return element(
        "figure",
        element("div", scale, plot, class_="plot wide"),
        axis(facts.start, span),
        element("figcaption", "Cost in US dollars over time, all machines together."),
        class_="cost",
    )


_NUMBERS = {"machines", "time", "USD/h", "USD", "idle USD", "idle"}
_OF_NODE = ("node", "instance", "provider", "type", "place", "market", "time", "USD/h", "USD", "idle USD", "idle")
_OF_OFFER = ("offer", "machines", "time", "USD", "idle USD", "idle")


def _node_row(line: Line) -> list[Cell]:
    return [
        f"{line.node}",
        element("span", line.id, class_="id"),
        line.provider,
        line.type,
        line.place or words.UNKNOWN,
        line.market or words.UNKNOWN,
        words.duration(line.seconds) + ("" if line.ended else ", not ended"),
        words.usd(line.usd_per_hour),
        words.usd(line.usd),
        words.known(line.idle_usd, words.usd),
        words.share(line.idle_usd, line.usd),
    ]


def _offer_rows(receipt: Receipt) -> list[list[str]]:
    groups: dict[str, list[Line]] = {}
    for each in receipt.lines:
        offer = " ".join(filter(None, (each.provider, each.type, each.place, each.market)))
        groups.setdefault(offer, []).append(each)
    rows = []
    for offer, lines in sorted(groups.items(), key=lambda pair: -sum(each.usd for each in pair[1])):
        part = Receipt(receipt.pool, tuple(lines), receipt.at)
        idle = part.idle_usd
        rows.append(
            [
                offer,
                words.count(len(lines)),
                words.duration(sum(each.seconds for each in lines)),
                words.usd(part.usd),
                words.known(idle, words.usd),
                words.share(idle, part.usd),
            ]
        )
    return rows
