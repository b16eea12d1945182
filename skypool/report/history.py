"""`History`: keeps what happens in a pool, so that a report of it can be made, also after the pool's end.

It is written to a file on the disk by `skypool.samples.journal`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import ClassVar

from skypool import events
from skypool.calls.idle_time import Idleness
from skypool.devices.device import hardware
from skypool.events import node_of
from skypool.logs.masking import Masker
from skypool.offers.ranking import Plan
from skypool.pool.watch import PoolFacts, Watch
from skypool.samples.journal import Journal, JournalEvent, WorkSpan
from skypool.samples.session_file import path_of
from skypool.text import encodable

KEPT = (
    events.PoolPhase,
    events.NodePhase,
    events.BootstrapStep,
    events.Notice,
    events.LinkDown,
    events.LinkUp,
    events.NodeInterruption,
    events.FolderSaved,
    events.DataFetched,
    events.GangFailed,
    events.NodeRetirement,
    events.HealthChanged,
    events.CallRetried,
    events.ServiceEnded,
)
"""The events that are kept. Failed calls are kept as calls, and the output of calls is in the logs."""
_LOOK_EVERY = 1.0
"""Seconds between two looks for events that are to be written."""
_COUNT_EVERY = 5.0
"""Seconds between two looks at calls and working times."""
_OFTEN = 60
"""For so many looks, calls and working times are looked at each time, so that short runs are recorded in detail."""
_RESTS = 200
"""The pause before the next look at calls is at least this many times as long as the last look and write took.

So the recording of very many calls takes little time.
"""
_RESTS_AT_MOST = 30.0
"""The most seconds that `_RESTS` makes the pause last."""
_LONGEST = 1000
"""The most characters of a text in an event or an error."""
_LONGEST_PLAN = 100_000
"""The most characters of the explanation of a plan."""
_MOST_OFFERS = 20
"""The number of offers of a plan that are kept with their prices."""
_ALIKE = 0.02
"""Two spans of time are joined if the shares of working time in them differ by at most this."""


class History(Watch):
    """The writer of one pool's history: it writes the pool's events, calls and working times to a file."""

    name = "the history of the pool"
    hears = KEPT
    gather = _LOOK_EVERY
    every: ClassVar[float | None] = _LOOK_EVERY

    def begin(self, facts: PoolFacts) -> None:
        self._facts = facts
        self.journal = Journal(lambda: path_of(facts.session), facts.quota)
        self._masker = Masker(facts.secrets)
        self._began = time.time()
        self._made: list[JournalEvent] = []
        self._spans: dict[int, WorkSpan] = {}
        self._idle: dict[int, Idleness] = {}
        self._over: set[int] = set()  # nodes that are gone, and whose working time is written
        self._written: dict[str, object] = {}  # facts for the report
        self._planned: tuple[Plan | None, int] = (None, 0)
        self._due = 0.0
        self._looks = 0

    def hear(self, event: events.Event) -> None:
        self._made.append(self._event(event))

    def tick(self) -> None:
        now = time.monotonic()
        if not self._made and now < self._due:
            return
        self.settle()
        self._looks += 1
        pause = _LOOK_EVERY if self._looks < _OFTEN else _COUNT_EVERY
        self._due = now + max(pause, min(_RESTS * (time.monotonic() - now), _RESTS_AT_MOST))

    def settle(self) -> None:
        """Write what is new. If that fails, tell the user once, and try again later."""
        made, self._made = self._made, []
        calls = self._facts.ended_calls()
        work = self._work()
        facts = {name: value for name, value in self._known().items() if self._written.get(name) != value}
        if not (made or calls or work or facts):
            return
        try:
            self.journal.write(made, [each._replace(error=self._text(each.error)) for each in calls], work, facts)
        except Exception as e:  # noqa: BLE001 - there may be room later
            self.tell_failure(self._facts, "the history of the pool cannot be kept", e)
        else:
            self._written |= facts

    def close(self) -> None:
        self.settle()

    def _event(self, event: events.Event) -> JournalEvent:
        data = {name: self._cleaned(value) for name, value in asdict(event).items() if name not in _COLUMNS}
        return JournalEvent(event.time, type(event).__name__, node_of(event), data)

    def _cleaned(self, value: object) -> object:
        """Return a value of an event with secrets masked, and cut if it is too long."""
        if isinstance(value, str):
            return self._text(value)
        return [self._cleaned(each) for each in value[:_LONGEST]] if isinstance(value, (list, tuple)) else value

    def _text(self, text: str, longest: int = _LONGEST) -> str:
        text = encodable(text)
        text = self._masker.mask(text)
        return text if len(text) <= longest else f"{text[: longest - 2]} …"

    def _work(self) -> list[WorkSpan]:
        """Return spans of time with the seconds that nodes worked in them: those that are new or have become longer."""
        changed = []
        for node, now in self._facts.idleness.items():
            if node in self._over:
                continue
            if not self._facts.takes_calls(node):
                self._over.add(node)
            before, span = self._idle.get(node), self._spans.get(node)
            since, idle = (now.began, 0.0) if before is None else (before.at, before.seconds)
            seconds = now.at - since
            if seconds <= 0:
                continue
            busy = min(seconds, max(0.0, seconds - (now.seconds - idle)))
            if span is not None and abs(busy / seconds - span.busy / (span.until - span.since)) <= _ALIKE:
                span = WorkSpan(node, span.since, now.at, span.busy + busy)
            else:
                span = WorkSpan(node, since, now.at, busy)
            self._idle[node], self._spans[node] = now, span
            changed.append(span)
        return changed

    def _known(self) -> dict[str, object]:
        """Return the facts for the report, by name: counts of calls, hardware of nodes, and the plan if it is new."""
        facts: dict[str, object] = {"skypool": self._written.get("skypool") or _version()}
        counts = self._facts.counts
        ended = asdict(counts.ended)
        facts[f"calls {self._began:.6f}"] = {**ended, "classes": list(ended["classes"])}
        facts |= {f"done {node} {self._began:.6f}": each.done for node, each in counts.nodes.items()}
        is_stranger = self._facts.is_stranger
        facts |= {
            f"node {node}": {"hardware": self._text(hardware(each.health.devices)), "claimed": is_stranger(node)}
            for node, each in self._facts.welcomes.items()
        }
        plan, tried = self._facts.plan, self._facts.attempts
        if plan is not None and (plan is not self._planned[0] or len(tried) != self._planned[1]):
            self._planned = plan, len(tried)
            facts["plan"] = self._text("\n".join([plan.explain(), *tried]), _LONGEST_PLAN)
            facts["prices"] = [asdict(each) for each in prices_of(plan)]
        return facts


_COLUMNS = ("pool", "time", "node")
"""Fields of an event that are not kept among its data: columns of the file have them, or all events share them."""


@dataclass(frozen=True, slots=True)
class PriceOfOffer:
    """The price of an offer of a plan, and its date.

    Attributes:
        place: the zone, or the region if no zone is known.
        market: "on-demand" or "spot".
        source: "provider" if the provider's API reported the price, "table" if it is from a table of the driver.
        as_of: the day of the price, such as "2026-03-02"; "" if it is not known.
    """

    provider: str
    type: str
    place: str
    market: str
    usd_per_hour: float
    source: str
    as_of: str


def prices_of(plan: Plan) -> list[PriceOfOffer]:
    """Return the prices of the first 20 offers of a plan. A provider's price without a day gets the day of the plan."""
    return [
        PriceOfOffer(
            each.provider,
            each.instance_type,
            each.zone or each.region,
            each.market,
            each.usd_per_hour,
            each.price_source.kind,
            str(each.price_source.as_of or (plan.today if each.price_source.kind == "provider" else "")),
        )
        for each in plan.offers[:_MOST_OFFERS]
    ]


def _version() -> str:
    from importlib import metadata  # imported here, as it takes long

    return metadata.version("skypool")
