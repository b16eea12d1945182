"""`OwnedMachine`: what this process has of the machine of a run until it hands the run over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace

from skypool.compute_pool.compute_pool import ComputePool
from skypool.errors import ConnectionLost, PoolClosed, SkypoolError, TakenOver
from skypool.event_loop import Loop
from skypool.head import messages
from skypool.head.states import AgentGone, ClientEvent, EndSooner, Entry, MachineGone, Prepare, ToAgent
from skypool.rental.run_account import RunAccount
from skypool.runs.machine_look import look
from skypool.runs.needs import Needs
from skypool.wire.frames import Kind, frame

_TO_LOOK = 30.0
"""Seconds in which a machine has said what is there."""
_TO_END = 20
"""Seconds of them in which an agent that is ending has ended."""


class OwnedMachine:
    """The only machine of a pool. It is an `Owned` for `HandingOver`.

    Args:
        pool: the pool.
        needs: what the runner needs.
        account: the run in the ledger and at the provider. It has the digest of the heir.
        keep: the seconds before its end for which the program ends, so that its machine stays so long.
        stay: the most seconds that the machine stays after the run if there is time for that; None for `keep`.
    """

    def __init__(
        self, pool: ComputePool, needs: Needs, account: RunAccount, keep: float = 0.0, stay: float | None = None
    ) -> None:
        self._pool, self._account = pool, account
        self._place = messages.Place(needs.folder, keep if stay is None else stay)
        self._engine = pool._sender.working()
        self._needs = replace(needs, ends=account.ends, limit=account.limit, keep=keep)
        [held] = needs.handover.nodes  # the pool may have had other nodes, which have ended
        self._node = held.instance.node

    def follow(self, hear: Callable[[ClientEvent | ConnectionLost], None]) -> None:
        """Have a function called with what happens, in any thread: answers, new connections, and the machine's loss."""
        self._engine.takeover.follow(hear)

    @property
    def over(self) -> SkypoolError | None:
        life = self._engine.life
        error = life.state.error
        if not life.is_ending:
            return None
        return error if isinstance(error, SkypoolError) else PoolClosed(f"pool {self._pool.name!r} was ended")

    @property
    def left(self) -> float:
        return self._account.left

    def send(self, message: ToAgent) -> None:
        link = self._engine.connections.links.get(self._node)
        if link is None:
            return
        if isinstance(message, Prepare | EndSooner):
            message = replace(message, end=min(message.end, self.left))
        header = messages.to_json(message)
        if isinstance(message, Prepare):
            link.send(frame(Kind.HANDOVER, {**header, **asdict(self._place)}, [self._needs.packed()]))
        else:
            link.send(frame(Kind.HANDOVER, header))

    def write(self, entry: Entry) -> None:
        self._account.write(entry)

    def renew_tags(self) -> None:
        self._account.renew_tags()

    def withhold(self) -> None:
        Loop.shared().call(self._engine.takeover.withhold)

    def own_again(self) -> None:
        Loop.shared().call(self._engine.takeover.own_again)

    def end(self) -> None:
        self._pool.stop()
        if self._engine.rental.there:  # the pool had ended before, and left the machine alone
            self._engine.end_now()

    def look(self) -> AgentGone | MachineGone | None:
        instance = self._engine.life.state.instance_of(self._node)
        access, _ = self._engine.connections.ways[self._node]
        account = self._account
        try:
            found = look(access, account.claim, account.heir, time.monotonic() + _TO_LOOK, _TO_END)
            if not found.has_agent:
                return AgentGone(found.has_row, None if found.status is None else found.status.outcome)
        except (OSError, SkypoolError):  # it cannot be reached, or a file there is damaged
            pass
        supply = self._engine.supply
        try:
            return MachineGone() if supply is not None and supply.is_gone(instance) else None
        except Exception:  # noqa: BLE001 - then the provider cannot say it, whatever its driver has raised
            return None

    def give_up(self) -> None:
        """Leave the machine to its new owner, or to its lease if there is none. The pool is over in this process."""
        error = TakenOver(f"the run {self._pool.name} belongs to its machine", self._node)
        Loop.shared().run(self._engine.takeover.hand_over(error))
