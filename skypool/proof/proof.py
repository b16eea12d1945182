"""`Proof`: performs the levels of a proof, one after the other, and writes the results into a report."""

from __future__ import annotations

import math
import os
import platform
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata

from skypool.buckets.bucket import Bucket
from skypool.buckets.bucket_check import check_as_machine
from skypool.compute_pool.compute_pool import ComputePool
from skypool.drivers.contract import Bills, Driver, ends_itself
from skypool.drivers.preflight import failure
from skypool.errors import BudgetExceeded, NoOffers, SkypoolError
from skypool.event_loop import Loop
from skypool.model import Bill, Finding
from skypool.offers.need import NodeTerms, need_asked
from skypool.offers.ranking import Plan
from skypool.offers.search import look_around
from skypool.proof import free_checks, renting, self_end_check
from skypool.proof.comparison import bill_step
from skypool.proof.renting import Wish
from skypool.proof.report import Level, RentedMachine, Report, Step
from skypool.proof.report_redaction import Redaction, secrets_of
from skypool.proof.selection import Selection, Stage, select

MARGIN = 120.0
"""Seconds after its lease within which a machine must be gone from the provider's list.

That is a minute for the end of the machine, and a minute until the list shows the end.
"""
_USUAL = (
    "T4", "L4", "A10G", "A10", "RTX_A4000", "RTX_3090", "RTX_4090", "RTX_A5000", "A40", "V100", "L40S", "A100", "H100",
    "v5litepod-1",
)  # fmt: skip
"""Accelerators that many providers sell. If "cents" rented no accelerator, its report names the cheapest of these."""
_BEFORE = 3600.0
"""A bill is asked for from this many seconds before the first machine on, as some providers bill by the hour."""


@dataclass
class Proof:
    """The proof of one account. Money is in US dollars.

    Attributes:
        max_usd: the most that all machines of the proof may cost together.
        wish: what machines to rent.
        bucket: the place that level "write" checks, as machines would save there; None for none.
        lease: seconds that the machine of the stage "guard" may live on without its client.
        margin: seconds after the lease within which that machine must have ended.
        tell: called with each step when it has ended.
        warn: called with each warning about the ledger.
        keep: called with the report after each step.
    """

    driver: Driver
    level: Level
    max_usd: float
    wish: Wish = field(default_factory=Wish)
    bucket: Bucket | None = None
    lease: float = 120.0
    margin: float = MARGIN
    tell: Callable[[Step], None] = lambda step: None
    warn: Callable[[str], None] = lambda text: None
    keep: Callable[[Report], None] = lambda report: None
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(
            provider=self.driver.name,
            level=self.level,
            began=time.time(),
            versions=versions(self.driver),
            max_usd=self.max_usd,
        )

    # --- the levels ------------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Perform the level "read". Return False if the credentials are not accepted: then no other level can work."""
        for each in free_checks.of_this_computer(self.warn):
            self._done(Step.of("read", each))
        began = time.monotonic()
        reading = free_checks.read(self.driver)
        took = time.monotonic() - began
        for each in reading.findings:
            self._done(Step.of("read", each, took))
        return reading.known

    def write(self) -> None:
        """Perform the level "write": send creates that the provider must refuse, and try the bucket if there is one."""
        began = time.monotonic()
        told = free_checks.refused_creates(self.driver)
        took = time.monotonic() - began
        if told is None:
            text = f"the driver of {self.driver.name} has no requests that must be refused"
            self._done(Step("write", "creates that must be refused", "open", text))
        for each in told or ():
            self._done(Step.of("write", each, took))
        if self.bucket is None:
            return
        try:
            for each in check_as_machine(self.bucket):
                self._done(Step.of("write", replace(each, what=f"bucket: {each.what}")))
        except SkypoolError as e:
            self._done(Step.of("write", failure("bucket", e)))

    def select(self) -> Selection | None:
        """Choose what the level "cents" rents. If nothing can be rented, report the reason, and return None."""
        try:
            made = self._plan()
            can_end = ends_itself(self.driver, made.offers[0])
            return select(made.offers, max_usd=self.max_usd, lifetime=self.wish.lifetime, with_guard=can_end)
        except NoOffers as e:
            first = str(e).partition("\n")[0].rstrip(":")
            advice = f"`skypool plan -p {self.driver.name}` shows why; choose another --accelerator or --region"
            self._done(Step.of("cents", Finding("what to rent", False, first, advice)))
        except (SkypoolError, BudgetExceeded) as e:
            self._done(Step.of("cents", failure("what to rent", e)))
        return None

    def rent(self, selection: Selection) -> None:
        """Perform the level "cents": rent the machines of the selection, one after the other, and compare the bill."""
        prefix = f"prove-{secrets.token_hex(3)}"
        for stage in selection.stages:
            left = self.max_usd - self.report.receipt_usd
            if left < stage.most_usd:
                text = f"{stage.most_usd:.2f} USD are needed, and {left:.2f} USD are left"
                self._done(Step("cents", renting.WORDS[stage.name], "open", text, "raise --max-usd"))
                continue
            machines = self._rented(f"{prefix}-{stage.name}", stage, selection, left)
            self.report = replace(self.report, machines=(*self.report.machines, *machines))
            self.keep(self.redacted)
        for text in selection.left_out:
            self._done(Step("cents", "left out", "open", text, "raise --max-usd"))
        if self.wish.accelerator is None and (step := self._accelerator()) is not None:
            self._done(step)
        if not ends_itself(self.driver, selection.stages[0].offer):
            text = f"machines of {self.driver.name} cannot end their own cost, so there is no end to watch"
            advice = "run `skypool gc --yes` after a crash of your computer"
            self._done(Step("cents", renting.WORDS["guard"], "open", text, advice))
        self.bill()

    def bill(self) -> None:
        """Ask the provider for the bill of the machines in the report, and compare it with their receipts."""
        if not self.report.machines:
            return
        try:
            bill = billed(self.driver, self.report)
        except Exception as e:  # noqa: BLE001 - any error is a step to show
            self._done(Step.of("bill", failure("bill", e, "compare it later by --bill and this report")))
            return
        self.report = replace(self.report, billed_usd=bill.usd)
        self._done(bill_step(self.report.machines, bill))

    def end(self) -> None:
        """Note in the report that the proof reached its end, and pass the report to `keep`."""
        self.report = replace(self.report, ended=time.time())
        self.keep(self.redacted)

    # --- helpers ---------------------------------------------------------------------------------------------

    @property
    def redacted(self) -> Report:
        """The report without secrets, account names and addresses."""
        return redacted(self.report, Redaction(secrets_of(self.driver, os.environ)))

    def _accelerator(self) -> Step | None:
        """Return a step that says how to rent a usual accelerator, and its cost; None if none is sold."""
        try:
            offers = self._plan(_USUAL).offers
        except SkypoolError:
            return None
        can_end = ends_itself(self.driver, offers[0])
        chosen = select(offers, max_usd=math.inf, lifetime=self.wish.lifetime, with_guard=can_end)
        first = chosen.stages[0].offer
        name = str(first.accelerator)
        place = f" in {first.zone or first.region}" if first.zone or first.region else ""
        text = f"no machine with an accelerator was rented; {name}{place} costs {first.usd_per_hour:.4f} USD/h"
        words = ["skypool", "prove", self.driver.name, "--level", "cents", "--accelerator", name]
        if chosen.most_usd > self.max_usd:
            words += ["--max-usd", str(math.ceil(chosen.most_usd))]
        advice = f"run `{shlex.join(words)}`, for about {chosen.usual_usd:.2f} USD"
        return Step("cents", "accelerator", "open", text, advice)

    def _plan(self, accelerators: Sequence[str] = ()) -> Plan:
        """Return the plan for the user's wish. If the wish has no accelerator, accept any of `accelerators`."""
        terms: NodeTerms = {"market": "cheapest"}
        if self.wish.memory is not None and not accelerators:
            terms["memory"] = self.wish.memory
        if self.wish.region:
            terms["region"] = self.wish.region
        need = need_asked(ComputePool.__init__, self.wish.accelerator or list(accelerators) or None, 1, {}, terms)
        return Loop.shared().run(look_around([self.driver], need, refresh=True))

    def _rented(self, pool: str, stage: Stage, selection: Selection, left_usd: float) -> tuple[RentedMachine, ...]:
        options = self.wish.options(self.driver, stage, left_usd)
        if stage.name == "guard":
            return self_end_check.watch_end(
                self.driver,
                pool,
                selection.offers,
                options,
                lease=self.lease,
                margin=self.margin,
                tell=self._done,
            )
        return renting.rent(self.driver, pool, stage, selection.offers, options, self._done)

    def _done(self, step: Step) -> None:
        self.report = replace(self.report, steps=(*self.report.steps, step))
        self.tell(step)
        self.keep(self.redacted)


def billed(driver: Driver, report: Report) -> Bill:
    """Return what the provider bills for the machines of a report. Raise ProviderError if it cannot be asked."""
    if not isinstance(driver, Bills):
        return Bill(None, f"the driver of {driver.name} cannot ask for bills; look at the provider's billing page")
    since = datetime.fromtimestamp(min(each.launched for each in report.machines) - _BEFORE, UTC)
    return driver.billed([each.id for each in report.machines], since, datetime.now(UTC))


def versions(driver: Driver) -> dict[str, str]:
    """Return the versions of skypool, Python and the driver's distribution, by name, and the name of the system."""
    found = {"skypool": metadata.version("skypool"), "Python": platform.python_version(), "system": platform.system()}
    package = type(driver).__module__.partition(".")[0]
    for name in metadata.packages_distributions().get(package, ()):
        found.setdefault(name, metadata.version(name))
    return found


def redacted(report: Report, redact: Redaction) -> Report:
    """Return a copy of a report whose texts `redact` has cleared of secrets, account names and addresses."""
    steps = (
        replace(
            each,
            text="accepted" if each.result == "good" and "credentials" in each.what else redact(each.text),
            advice=redact(each.advice),
        )
        for each in report.steps
    )
    return replace(report, steps=tuple(steps))
