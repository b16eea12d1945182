"""`GangSteps`: the agent's part in the agreement at which step the ranks of a gang hear of a notice.

`skypool.gangs.agreement` has the rules. A rank writes the step that it begins into the shared page, and then looks at
what it is offered. The agent writes the offer, and reads the steps a while later. A processor may let a write wait
behind a read, but never for so long: so either the rank sees the offer, or the agent sees the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from skypool.agent.messages import Agree
from skypool.agent.worker_processes import GANG, Slot, Slots
from skypool.gangs import agreement
from skypool.gangs.agreement import SETTLE, Agreement, Answer, Offer
from skypool.runtime import LEASE

_AGAIN = 1.0
"""Seconds between two messages that a gang of several nodes must agree."""
_PACE = 1.0
"""Seconds over which the rate of steps is measured."""
_ME = 0
"""The number of this node where it is the owner."""


@dataclass
class _Gang:
    """The ranks of one run of a gang on this node.

    Attributes:
        round: the greatest round of which this node has heard.
        offer: what is offered to the ranks.
        due: when the round is to be answered; None if it was, or if there was none.
        own: the agreement, if all ranks are on this node.
        told: when the client was told last.
        paces: when the step of a rank was looked at, and which it was, by slot: the last two times, a second apart.
    """

    round: int = 0
    offer: Offer | None = None
    due: float | None = None
    own: Agreement | None = None
    told: float = float("-inf")
    paces: dict[int, tuple[tuple[float, int], tuple[float, int]]] = field(
        default_factory=dict[int, tuple[tuple[float, int], tuple[float, int]]]
    )


class GangSteps:
    """The agreements of one node.

    Args:
        send: sends the client the header of a STEPS frame.
        clock: the agent's clock.
    """

    def __init__(self, slots: Slots, send: Callable[[dict[str, Any]], object], clock: Callable[[], float]) -> None:
        self._slots, self._send, self._clock = slots, send, clock
        self._page = slots.page
        self._gangs: dict[tuple[str, int], _Gang] = {}
        self._now = 0.0

    def agree(self, said: Agree) -> None:
        """Obey the client: tell how far ranks are, offer them a step, or tell them that it is decided."""
        for key, slots in self._present().items():
            mine = [slot for slot in slots if self._page.running(slot.number)[0] in said.calls]
            if not mine:
                continue
            gang = self._gangs.setdefault(key, _Gang())
            for slot in mine:
                if not self._page.announced(slot.number):
                    self._slots.notify({self._page.running(slot.number)[0]}, said.at, said.reason)
            self._obey(gang, slots, said.round, said.offer)
            if gang.offer is not None and gang.offer.decided and gang.due is None:  # the last answer was lost
                self._answer(gang, slots)

    def tick(self, now: float) -> None:
        """Answer what is due, and begin where there is a notice. `now` is the time of the agent's clock."""
        self._now = now
        if not self._gangs and all(slot.kind != GANG for slot in self._slots.all):
            return
        present = self._present()
        self._gangs = {key: gang for key, gang in self._gangs.items() if key in present}
        for key, slots in present.items():
            gang = self._gangs.setdefault(key, _Gang())
            self._measure(gang, slots)
            if gang.due is not None and now >= gang.due:
                self._answer(gang, slots)
            if not any(self._page.announced(slot.number) for slot in slots) or max(self._told(slots)) < 0:
                continue
            if self._is_whole(slots):
                self._own(gang, slots)
            # without a lease there is no client, and one that returns renews it
            elif gang.offer is None and gang.due is None and now - gang.told >= _AGAIN and not self._is_lease(slots):
                self._answer(gang, slots)

    def _present(self) -> dict[tuple[str, int], list[Slot]]:
        """Return the slots of each gang of several processes that runs here."""
        found: dict[tuple[str, int], list[Slot]] = {}
        for slot in self._slots.all:
            if slot.kind == GANG and slot.member is not None and slot.member.size > 1 and slot.pid:
                found.setdefault((slot.member.gang, slot.member.attempt), []).append(slot)
        return found

    def _is_lease(self, slots: list[Slot]) -> bool:
        return any(self._page.reason(slot.number) == LEASE for slot in slots if self._page.announced(slot.number))

    @staticmethod
    def _is_whole(slots: list[Slot]) -> bool:
        """Return True if all ranks of a gang are on this node."""
        member = slots[0].member
        return member is not None and member.of == member.size

    def _told(self, slots: list[Slot]) -> Iterator[int]:
        return (self._page.told_step(slot.number) for slot in slots)

    def _own(self, gang: _Gang, slots: list[Slot]) -> None:
        """Let the ranks of a gang agree whose owner is this node."""
        if gang.own is None:
            gang.own = Agreement(frozenset([_ME]), began=self._now)
            self._obey(gang, slots, gang.own.round, gang.own.offer)
        elif not gang.own.is_over and (later := agreement.waited(gang.own, self._now)) is not None:
            gang.own = later
            self._obey(gang, slots, later.round, later.offer)

    def _obey(self, gang: _Gang, slots: list[Slot], round_: int, offer: Offer | None) -> None:
        """Offer the ranks what the owner says, and note when to answer."""
        if not agreement.accepted(gang.round, gang.offer, round_, offer):
            return
        gang.round, gang.offer = max(gang.round, round_), offer
        for slot in slots:
            self._page.offer(slot.number, 0 if offer is None else offer.word)
        gang.due = self._clock() + SETTLE

    def _answer(self, gang: _Gang, slots: list[Slot]) -> None:
        """Answer the owner, or tell the client that there is something to agree."""
        gang.due, gang.told = None, self._now
        answer = agreement.answer(gang.round, gang.offer, self._told(slots), self._rate(gang))
        if gang.own is None:
            self._send(self._report(slots, answer))
            return
        before = gang.own
        gang.own = agreement.heard(before, _ME, answer, self._now)
        if (gang.own.round, gang.own.offer) != (before.round, before.offer):
            self._obey(gang, slots, gang.own.round, gang.own.offer)

    def _report(self, slots: list[Slot], answer: Answer) -> dict[str, Any]:
        at = min((at for slot in slots if (at := self._page.announced(slot.number))), default=0.0)
        return {
            "calls": [self._page.running(slot.number)[0] for slot in slots],
            "round": answer.round,
            "highest": answer.highest,
            "rate": answer.rate,
            "ok": answer.ok,
            "decided": answer.decided,
            "at": at,
            "reason": self._page.reason(slots[0].number),
        }

    def _measure(self, gang: _Gang, slots: list[Slot]) -> None:
        for slot in slots:
            told = self._page.told_step(slot.number)
            if told < 0:
                continue
            last = gang.paces.get(slot.number)
            if last is None:
                gang.paces[slot.number] = ((self._now, told), (self._now, told))
            elif self._now - last[1][0] >= _PACE:
                gang.paces[slot.number] = (last[1], (self._now, told))

    def _rate(self, gang: _Gang) -> float:
        """Return the steps in a second of the fastest rank; 0.0 if none is known."""
        paces = gang.paces.values()
        return max((max(0, to - of) / (at - since) for (since, of), (at, to) in paces if at > since), default=0.0)
