"""Compares what was offered, what a receipt says, and what the provider bills. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from skypool.model import Bill, Offer
from skypool.proof.report import RentedMachine, Step
from skypool.rental.receipt import Line

PRICE_TOLERANCE = 0.01
"""The share by which a price may differ from the price in the plan."""
BILL_TOLERANCE = 0.1
"""The share by which a bill may differ from the receipt: providers round the seconds of a machine up."""
BILL_ROUNDING = 0.005
"""US dollars by which a bill may always differ: some providers round to cents."""
SEND = "docs/guides/first-account.md says how to send us this report"
"""Advice after a failure that may be a bug of skypool."""


def offered_price(offers: Sequence[Offer], line: Line) -> float | None:
    """Return the price per machine of the offer with type, place and market of a receipt's line; None without one."""
    for each in offers:
        if (each.instance_type, each.zone or each.region, each.market) == (line.type, line.place, line.market):
            return each.usd_per_hour / each.hosts
    return None


def price_step(what: str, machines: Sequence[RentedMachine]) -> Step:
    """Compare the prices of machines with the plan.

    `what` is the title of the step. The step is bad if an on-demand price differs; spot prices may change meanwhile. It
    is open if a machine was rented on an offer that is not in the plan, because those of the plan were out of stock.
    """
    drifted = [
        each
        for each in machines
        if each.offered_usd_per_hour is not None
        and abs(each.usd_per_hour - each.offered_usd_per_hour) > PRICE_TOLERANCE * each.offered_usd_per_hour
    ]
    told = ", ".join(f"{each.type} in {each.place} for {each.usd_per_hour:.4f} USD/h" for each in machines)
    if drifted:
        text = "; ".join(
            f"{each.type} was offered for {each.offered_usd_per_hour:.4f} USD/h and is charged {each.usd_per_hour:.4f}"
            for each in drifted
        )
        if all(each.market == "spot" for each in drifted):
            return Step("cents", what, "good", f"{text}: the spot price moved")
        return Step("cents", what, "bad", text, f"run the command again; if the price differs again, {SEND}")
    if any(each.offered_usd_per_hour is None for each in machines):
        return Step("cents", what, "open", f"rented {told}, which the plan did not have")
    return Step("cents", what, "good", f"{told}, as offered")


def bill_step(machines: Sequence[RentedMachine], bill: Bill) -> Step:
    """Compare a bill with the receipts of machines. The step is open if the provider does not (yet) tell the sum."""
    what = "bill"
    usd = sum(each.usd for each in machines)
    if bill.usd is None:
        return Step("bill", what, "open", f"not told: {bill.text}", "compare it later by --bill and this report")
    text = f"billed {bill.usd:.4f} USD, receipts {usd:.4f} USD ({bill.text})"
    if abs(bill.usd - usd) <= max(BILL_ROUNDING, BILL_TOLERANCE * usd):
        return Step("bill", what, "good", text)
    return Step("bill", what, "bad", text, f"look at the provider's billing page for other costs; else {SEND}")
