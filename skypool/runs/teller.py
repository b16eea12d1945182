"""`Teller`: tells the user what happens in a run."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta

from skypool import events
from skypool.compute_pool.compute_pool import ComputePool
from skypool.console.event_text import Words, kept_in, span
from skypool.data.data_asked import DataFolder
from skypool.data.save_asked import SaveFolder
from skypool.files.project import Survey
from skypool.logs.masking import Masker
from skypool.model import Offer
from skypool.offers.ranking import Plan
from skypool.rental.budget import highest_price
from skypool.runs.rank_lines import RankLines
from skypool.runs.target import Target
from skypool.wire.save_orders import DRAIN, FolderState

_FAR = 10 * 365 * 86400.0
"""Seconds after which an end is not told as a date."""
_MOST_NAMED = 5
"""The most files that are named."""
_SLOW = 3.0
"""Seconds after which it is told what a run waits for."""


def bounds(
    plan: Plan, budget: float | None, lifetime: float | None, spot_price: float | None = None
) -> tuple[float | None, datetime | None]:
    """Return the worst bill in USD, and the latest end in local time. Each is None if there is no limit.

    `spot_price` is the price in USD per hour to which that of a spot machine may rise; None if only a budget limits it.
    """
    prices = [offer.usd_per_hour * plan.nodes[0] for offer in plan.offers]
    if not any(prices):
        budget = 0.0
    bills = [] if budget is None else [budget]
    spans = [] if lifetime is None else [lifetime]
    if lifetime is not None:
        most = max(_most_usd(offer, lifetime, spot_price, budget is not None) for offer in plan.offers)
        bills.append(plan.nodes[0] * most)
    if budget and min(prices) > 0:
        spans.append(budget / min(prices) * 3600)
    ends = None
    if spans and min(spans) < _FAR:
        ends = (datetime.now(UTC) + timedelta(seconds=min(spans))).astimezone()
    return min(bills, default=None), ends


def _most_usd(offer: Offer, seconds: float, spot_price: float | None, has_budget: bool) -> float:
    price = offer.usd_per_hour
    if offer.market == "spot":
        price = max(price, highest_price(offer, spot_price, has_budget) or price)
    return price * max(seconds, offer.least_billed) / 3600 + offer.start_usd


def _when(at: datetime | None) -> str:
    """Return "ends by" with a time of day, or with a date if it is almost 12 hours or more ahead; "" for None."""
    if at is None:
        return ""
    is_soon = at < datetime.now(UTC) + timedelta(hours=11, minutes=59)
    return f"ends by {at:%H:%M}" if is_soon else f"ends by {at:%Y-%m-%d %H:%M}"


def _price(usd: float | None) -> str:
    return "an unknown cost" if usd is None else f"{usd:.2f} USD"


class Teller(ABC):
    """Tells the user what happens in a run, and passes on what its program prints. Threads call these methods.

    Attributes:
        is_stranger: True if the program runs on a machine of a stranger, whose output must not change the terminal.
        log: called with the output, without secrets, as `output` gets it, but with no marks.
        source: "rank" or "node" if each line of output gets a mark, as `[rank 3]`, that tells processes apart; else "".
    """

    is_stranger = False
    source = ""

    def __init__(self) -> None:
        self._words = Words(routine=False)
        self._lines = RankLines()
        self.log: Callable[[int, int, bytes], object] = lambda rank, stream, data: None
        self._stage = threading.Timer(0.0, lambda: None)
        self.hide({})

    # --- for subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    def note(self, text: str) -> None:
        """Tell something that is good to know."""

    @abstractmethod
    def error(self, text: str) -> None:
        """Tell what has failed."""

    @abstractmethod
    def output(self, rank: int, stream: int, data: bytes) -> None:
        """Show output of a process of the program, which has no secrets. `stream` is 1 for stdout, 2 for stderr."""

    @abstractmethod
    def option(self, name: str, value: object = None) -> str:
        """Return an option as the user writes it, with a value unless it is None. `name` is that of the parameter."""

    @abstractmethod
    def ask(self, question: str) -> bool | None:
        """Ask the user. Return True for a yes, and None if nobody can be asked."""

    @abstractmethod
    def watching(self, pool: ComputePool) -> AbstractContextManager[Callable[[], None]]:
        """Return a context manager in which `pool` runs. It yields a function to call when the program has ended."""

    # --- what happens ----------------------------------------------------------------------------------------

    def hide(self, secrets: Mapping[str, str]) -> None:
        """Show marks in place of these values, by their names."""
        # bytes are text of one character each here, so that all else stays as it is
        self._masker = Masker(
            {name: value.encode("utf-8", "surrogateescape").decode("latin-1") for name, value in secrets.items()}
        )
        self._text_masker = Masker(secrets)

    def masked(self, text: str) -> str:
        """Return a text with marks in place of secrets."""
        return self._text_masker.mask(text)

    def wrote(self, rank: int, stream: int, data: bytes) -> None:
        """Take output of a process of the program. `stream` is 1 for stdout, 2 for stderr."""
        if self._masker.is_needed:
            data = self._masker.feed((rank, stream), data.decode("latin-1")).encode("latin-1")
        self.log(rank, stream, data)
        self._pass_on(rank, stream, data)

    def end_output(self) -> None:
        """Show the output that is held back: what may be the beginning of a secret, and unfinished lines."""
        for source in self._masker.held():
            match source:
                case (int() as rank, int() as stream):
                    self._pass_on(rank, stream, self._masker.finish(source).encode("latin-1"))
        for rank, stream, data in self._lines.finish():
            self.output(rank, stream, data)

    def _pass_on(self, rank: int, stream: int, data: bytes) -> None:
        if self.source:
            data = self._lines.feed(rank, stream, data, f"[{self.source} {rank}] ")
        if data:
            self.output(rank, stream, data)

    def project(self, target: Target, survey: Survey) -> None:
        from rich.filesize import decimal  # imported here, as nodes import this module and have no rich

        about = ", ".join(
            filter(None, [target.project.source, target.project.python and f"Python {target.project.python}"])
        )
        left = ", ".join(sorted(survey.unsent)[:8]) + (", …" if len(survey.unsent) > 8 else "")
        unsent = f"; not sent: {left}" if left else ""
        links = [f"{path} -> {target}" for path, target in sorted(survey.links_out.items())[:_MOST_NAMED]]
        if links:
            unsent += f"; links that lead out: {', '.join(links)}{', …' * (len(survey.links_out) > len(links))}"
        files = f"{len(survey.paths):,} file{'s' * (len(survey.paths) != 1)}"
        self.note(f"project  {files}, {decimal(survey.bytes)}{', ' + about if about else ''}{unsent}")

    def rents(
        self, plan: Plan, budget: float | None, lifetime: float | None, pool: str, spot_price: float | None = None
    ) -> None:
        """Tell what is rented, and which limits it has. `pool` is the name of the pool to be.

        `spot_price` is the price in USD per hour to which that of a spot machine may rise; None if only a budget limits
        it.
        """
        best, nodes = plan.offers[0], plan.nodes[0]
        usd, ends = bounds(plan, budget, lifetime, spot_price)
        limits = [f"at most {usd:.2f} USD" if usd is not None else "no limit", _when(ends)]
        limit = ", ".join(filter(None, limits)) if best.usd_per_hour else "free"
        machine = " ".join(filter(None, [best.provider, best.instance_type, best.zone or best.region]))
        most = nodes * max(offer.usd_per_hour for offer in plan.offers)
        least = nodes * best.usd_per_hour
        price = f"{least:g} USD/h{f' (up to {most:g})' if most > least else ''}"
        self.note(f"rents    {f'{nodes} × ' if nodes > 1 else ''}{machine}, {price}; {limit}")

    def uses(self, pool: str, seconds: float | None, usd_per_hour: float) -> None:
        """Tell which machines of an earlier run are used, after how long their limits end them, and what they cost."""
        limits = "no limit" if seconds is None else f"its limits end it in {span(seconds)}"
        price = f"{usd_per_hour:g} USD/h; {limits if usd_per_hour else 'free'}"
        self.note(f"uses     pool {pool} of an earlier run, {price}")

    def stays(self, pool: str, seconds: float, usd_per_hour: float) -> None:
        """Tell which machines stay after the run, how long, and what they cost."""
        self.note(
            f"stays    pool {pool}, for {span(seconds)}, {usd_per_hour:g} USD/h: the next such run uses it; "
            f"`skypool down {pool}` ends it"
        )

    def starts(self, pool: str, boot: float, environment: float, usd: float | None) -> None:
        spent = f"{_price(usd)} before your first line"
        self.note(f"start    pool {pool}: boot {span(boot)}, environment {span(environment)}, {spent}")

    def detached(self, pool: str, seconds: float, worst_usd: float, folder: str, is_kept: bool = True) -> None:
        """Tell that the run belongs to its machine now. `folder` is that of its output there.

        Args:
            seconds: after how long the machine ends in any case.
            worst_usd: the most that the pool may cost in all, in US dollars.
            is_kept: False if the machine ends at once with the run, and with that folder.
        """
        where = f"its output and its end are in {folder} there"
        if not is_kept:
            where = f"its folders and its end are in their buckets, and its output is lost with the machine ({folder})"
        cost = f" and costs at most {math.ceil(100 * worst_usd - 1e-6) / 100:.2f} USD in all" if worst_usd else ""
        self.note(
            f"detached run {pool} belongs to its machine now, which ends within {span(seconds)}{cost}; {where}; "
            f"`skypool logs -f {pool}` shows what it prints, `skypool wait {pool}` waits for its end, and `skypool "
            f"cancel {pool}` ends it"
        )

    def stage(self, text: str) -> None:
        """Note what the run waits for from now on, "" for nothing. It is told if it takes longer than 3 seconds."""
        self._stage.cancel()
        if text:
            self._stage = threading.Timer(_SLOW, self.waits, [text])
            self._stage.daemon = True
            self._stage.start()

    def waits(self, text: str) -> None:
        self.note(f"waits    for {text}")

    def saved(self, folder: str, files: int) -> None:
        if files:
            self.note(f"saved    {files} file{'s' * (files != 1)} to {folder}")
        else:
            self.note(f"saved    nothing: the program wrote no file into {folder}, below the folder where it starts")

    def saves(self, folders: Sequence[SaveFolder], limit: str) -> None:
        """Tell in which buckets folders are kept. `limit` is what ends the machines, such as "the budget", or ""."""
        for each in folders:
            self.note(f"saves    {kept_in(each.path, each.bucket, DRAIN, limit)}")

    def data(self, folders: Sequence[DataFolder]) -> None:
        """Tell from which places folders are filled, and how much that is."""
        from rich.filesize import decimal  # imported here, as nodes import this module and have no rich

        for each in folders:
            known = f"{decimal(each.bytes or 0)} in {each.files:,} file{'s' * (each.files != 1)} " if each.files else ""
            self.note(f"data     {known}from {each.bucket} to {each.path}")

    def saved_to(self, folder: FolderState) -> None:
        """Tell what was saved of a folder to a bucket."""
        from rich.filesize import decimal  # imported here, as nodes import this module and have no rich

        files = f"{folder.files} file{'s' * (folder.files != 1)}, {decimal(folder.bytes)},"
        self.note(f"saved    {files} of {folder.id} to {folder.url}")

    def unsaved(self, files: Sequence[tuple[str, int]]) -> None:
        from rich.filesize import decimal  # imported here, as nodes import this module and have no rich

        if files:
            named = ", ".join(f"{path} ({decimal(size)})" for path, size in files[:_MOST_NAMED])
            more = f", and {len(files) - _MOST_NAMED} more" if len(files) > _MOST_NAMED else ""
            self.note(f"not saved: {named}{more}; {self.option('save', 'FOLDER')} fetches what a program writes there")

    def ends(self, status: int, usd: float | None, seconds: float, program: int | None, limit: str) -> None:
        """Tell of the end, also of the program's own `WholeRun.returncode`, and of `WholeRun.limit`."""
        self.note(f"end      status {status} after {span(seconds)}, {_price(usd)}")

    def hear(self, event: events.Event) -> None:
        """Tell of problems of the pool, and of what the user should know. How the run ends is told by other methods."""
        ends = isinstance(event, events.PoolPhase) and event.phase in ("draining", "ended")
        if ends or isinstance(event, (events.CallFailed, events.GangFailed)):
            return
        match event:
            case events.NodePhase(phase="launching"):
                self.stage(f"the launch of node {event.node}")
            case events.NodePhase(phase="booting"):
                self.stage(f"node {event.node}, which boots")
            case events.BootstrapStep(state="started"):
                self.stage(f"the setup of node {event.node}: {event.step} ({event.number} of {event.steps})")
            case events.NodePhase(phase="ready" | "draining" | "ended"):
                self.stage("")
        for line in self._words.tell(event):
            self.note(line.rstrip("\n"))
