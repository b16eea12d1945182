"""`HistoryWatch`: writes what happens in a pool to disk, so that a report can be made of it, also after its end.

`skypool.samples.journal` writes the file. Threads that emit events only append to a list. The rest is done every second
or every 5 s in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from skypool import events
from skypool.calls.dispatch import Dispatch
from skypool.calls.idle import Idleness
from skypool.event_loop import beside
from skypool.events import node_of
from skypool.link.inbound import Welcome
from skypool.logs.masking import Masker
from skypool.offers.ranking import Plan
from skypool.pool.observed import hardware
from skypool.rental.supply import Supply
from skypool.safety.quota import WAITING, Quota
from skypool.samples.journal import Journal, JournalEvent, WorkSpan
from skypool.text import encodable

KEPT = (
    events.PoolPhase,
    events.NodePhase,
    events.BootstrapStep,
    events.Notice,
    events.LinkDown,
    events.LinkUp,
    events.NodeInterruption,
    events.GangFailed,
    events.NodeRetirement,
    events.HealthChanged,
    events.CallRetried,
    events.ServiceEnded,
)
"""The events that are kept. Calls that failed are kept as calls, and what calls print stands in the logs."""
_LOOK_EVERY = 1.0
"""Seconds between two looks for events that are to be written."""
_COUNT_EVERY = 5.0
"""Seconds between two looks at calls and working times."""
_OFTEN = 60
"""The number of looks at the beginning that include calls and working times, so that short runs are seen in detail."""
_RESTS = 200
"""How many times as long as a write took, the next look at calls is put off. So a storm of calls costs little."""
_RESTS_AT_MOST = 30.0
"""The most seconds for which it is put off by that."""
_MOST_WAITING = 8 << 20
"""The most bytes of events of all nodes that wait to be written. Beyond it, events are dropped."""
_LONGEST = 1000
"""The most characters of a text in an event or an error."""
_LONGEST_PLAN = 100_000
"""The most characters of the explanation of a plan."""
_MOST_OFFERS = 20
"""The number of offers of a plan that are kept with their prices."""
_ALIKE = 0.02
"""The difference of the working shares of two spans of time up to which they become one."""


class HistoryWatch:
    """The writer of a pool's history. Any thread may use it.

    Args:
        welcomes: the first message of each node's agent, by the node's number.
        is_stranger: returns True for a node that is not trusted.
        emit: called with a notice for the user if the history cannot be written.
        quota: limits what is kept of each node.
    """

    def __init__(
        self,
        pool: str,
        journal: Journal,
        dispatch: Dispatch,
        supply: Supply | None,
        welcomes: Mapping[int, Welcome],
        is_stranger: Callable[[int], bool],
        emit: Callable[[events.Event], None],
        quota: Quota,
    ) -> None:
        self.journal = journal
        self._quota = quota
        self._pool = pool
        self._dispatch = dispatch
        self._supply = supply
        self._welcomes = welcomes
        self._is_stranger = is_stranger
        self._emit = emit
        self._waiting: deque[events.Event] = deque()
        self._counting = threading.Lock()  # guards _size
        self._size = 0  # of the events that wait, in bytes
        self._writing = threading.Lock()  # guards all below
        self._masker: Masker | None = None
        self._began = time.time()
        self._spans: dict[int, WorkSpan] = {}
        self._idle: dict[int, Idleness] = {}
        self._over: set[int] = set()  # nodes that are gone, and whose working time is written
        self._facts: dict[str, object] = {}
        self._planned: tuple[Plan | None, int] = (None, 0)
        self._no_room = ""

    def hear(self, event: events.Event) -> None:
        """Keep an event until `flush` writes it, if it is of a type in `KEPT`. Does not wait."""
        if not isinstance(event, KEPT):
            return
        size = events.weight(event)
        if self._size + size <= _MOST_WAITING and self._quota.take(node_of(event), WAITING, size):
            with self._counting:
                self._size += size
            self._waiting.append(event)

    def open(self, secrets: Mapping[str, str]) -> None:
        """Let `flush` write from now on, with these secrets masked. Events that came before are written, too."""
        self._masker = Masker(secrets)

    async def keep(self) -> None:
        """Write the history regularly, for as long as the task runs."""
        due = 0.0
        number = 0
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            number += 1
            now = time.monotonic()
            if self._waiting or now >= due:
                await beside(self.flush, "skypool history")
                took = time.monotonic() - now
                pause = _LOOK_EVERY if number < _OFTEN else _COUNT_EVERY
                due = now + max(pause, min(_RESTS * took, _RESTS_AT_MOST))

    def flush(self) -> None:
        """Write what is new. If that fails, tell the user once; the pool goes on."""
        with self._writing:
            if self._masker is None:
                return
            made = [self._event(self._taken()) for _ in range(len(self._waiting))]
            calls = self._dispatch.tally.take()
            work = self._work()
            facts = {name: value for name, value in self._known().items() if self._facts.get(name) != value}
            if not (made or calls or work or facts):
                return
            try:
                self.journal.write(made, [each._replace(error=self._text(each.error)) for each in calls], work, facts)
            except Exception as e:  # noqa: BLE001 - what only watches must not end the pool
                if str(e) != self._no_room:
                    self._no_room = str(e)
                    self._emit(events.Notice(pool=self._pool, text=f"the history of the pool cannot be kept: {e}"))
            else:
                self._facts |= facts

    def _taken(self) -> events.Event:
        event = self._waiting.popleft()
        size = events.weight(event)
        self._quota.give_back(node_of(event), WAITING, size)
        with self._counting:
            self._size -= size
        return event

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
        text = self._masker.mask(text) if self._masker is not None else text
        return text if len(text) <= longest else f"{text[: longest - 2]} …"

    def _work(self) -> list[WorkSpan]:
        """Return spans of time with the seconds that nodes worked in them, so far as they are new or were extended."""
        changed = []
        for node, now in self._dispatch.roster.idleness().items():
            if node in self._over:
                continue
            if node not in self._dispatch.node_queues:
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
        facts: dict[str, object] = {"skypool": self._facts.get("skypool") or _version()}
        counts = self._dispatch.tally.now()
        ended = asdict(counts.ended)
        facts[f"calls {self._began:.6f}"] = {**ended, "classes": list(ended["classes"])}
        facts |= {f"done {node} {self._began:.6f}": each.done for node, each in counts.nodes.items()}
        facts |= {
            f"node {node}": {"hardware": self._text(hardware(each.health.devices)), "claimed": self._is_stranger(node)}
            for node, each in list(self._welcomes.items())
        }
        plan, attempts = (None, []) if self._supply is None else (self._supply.plan, list(self._supply.attempts))
        if plan is not None and (plan is not self._planned[0] or len(attempts) != self._planned[1]):
            self._planned = plan, len(attempts)
            tried = [f"tried {offer.provider} {offer.instance_type}: {error}" for offer, error in attempts]
            facts["plan"] = self._text("\n".join([plan.explain(), *tried]), _LONGEST_PLAN)
            facts["prices"] = [asdict(each) for each in prices_of(plan)]
        return facts


_COLUMNS = ("pool", "time", "node")
"""Fields of an event that stand in columns of their own, or are the same for all events of a file."""


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
