"""The head of a report: the pool's state, its cost, and how much of it was paid for idle machines."""

from __future__ import annotations

from skypool.rental.records import State
from skypool.report import words
from skypool.report.elements import Element, element
from skypool.report.facts import PoolFacts
from skypool.report.page_parts import note

_STATES: dict[State, str] = {
    "live": "running",
    "ending": "being ended",
    "detached": "its machine belongs to its run",
    "left": "left behind: the process that ran it is gone, and machines may still run",
    "ended": "ended",
}


def head(facts: PoolFacts) -> Element:
    """Return the head of the page, with the most important figures."""
    record, run = facts.record, facts.run
    version = facts.journal.facts.get("skypool") or words.UNKNOWN
    return element(
        "header",
        element("h1", f"Pool {record.pool}"),
        element("p", f"State: {_STATES[facts.state]}. From {words.moment(facts.start)} to {words.moment(facts.end)}."),
        element("p", f"Run: {run.word} since {words.moment(run.since)}: {run.why}.") if run else None,
        element("p", record.error, class_="error") if record.error else None,
        element("dl", *(_figure(name, value, rest) for name, value, rest in _figures(facts)), class_="figures"),
        None if facts.is_kept else note("The history of this run is not kept, so the report has its costs only."),
        note(f"Run {record.session}. Made at {words.moment(facts.now)}; the pool ran with skypool {version}."),
    )


def _figures(facts: PoolFacts) -> list[tuple[str, str, str]]:
    receipt, counts = facts.receipt, facts.counts
    is_open = any(not each.ended for each in receipt.lines)
    idle = receipt.idle_usd
    limit = facts.record.budget
    cost = (
        "no machine was rented" if not receipt.lines else "counted until now" if is_open else "all machines have ended"
    )
    if limit is not None:
        cost += f"; {words.share(receipt.usd, limit.max_usd)} of the budget of {words.usd(limit.max_usd)}"
    ready = sum(each.span_of("ready") is not None for each in facts.nodes)
    return [
        ("Cost, USD", words.usd(receipt.usd), cost),
        ("Of it idle, USD", words.known(idle, words.usd), f"{words.share(idle, receipt.usd)} of the cost"),
        (
            "Calls",
            words.UNKNOWN if counts is None else words.count(counts.ok + counts.failed + counts.cancelled),
            ""
            if counts is None
            else f"{counts.failed:,} failed, {counts.cancelled:,} cancelled, {counts.retried:,} run again",
        ),
        (
            "Nodes",
            words.count(len(facts.nodes)) if facts.nodes or facts.is_kept else words.UNKNOWN,
            f"{ready:,} of them became ready" if facts.is_kept else "",
        ),
        ("Time", words.duration(facts.span), ""),
    ]


def _figure(name: str, value: str, rest: str) -> Element:
    kind = "unknown" if value == words.UNKNOWN else None
    return element(
        "div",
        element("dt", name),
        element("dd", element("strong", value, class_=kind), element("span", rest) if rest else None),
    )
