"""`ShownPool`: the part of `ComputePool` that shows a pool: its nodes, its costs, its report."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from skypool.calls.futures import CallFuture
from skypool.checks import whole
from skypool.console.event_text import kept_in
from skypool.errors import UsageError
from skypool.model import Trust
from skypool.pool.engine import PoolEngine
from skypool.rental.handover import Handover
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import Terms
from skypool.rental.receipt import Receipt
from skypool.samples.reader import Samples

if TYPE_CHECKING:
    from skypool.observers.stacks import Stacks
    from skypool.report.report import Report
    from skypool.report.widget import Now, Widget
    from skypool_images import Image


class ShownPool(ABC):
    """Base class of `ComputePool`: the methods and properties that do not change the pool."""

    name: str
    _terms: Terms
    _handover: Handover | None
    _begun: PoolEngine | None
    _engine: PoolEngine | None
    _ended: bool
    _widget: Widget | None = None

    @abstractmethod
    def _running(self, engine: PoolEngine | None) -> PoolEngine:
        """Return the engine of a pool that runs or starts. Raises PoolClosed, or the error that ended the pool."""

    @property
    def phase(self) -> str:
        """The phase of the pool: "planned" until `start` has returned, then "ready", "draining" and "ended".

        "draining" means that the pool ends by itself, as after an error, and its machines are being ended. While `stop`
        ends a started pool, and after `start` has failed, the phase is "ended".
        """
        if self._engine is not None:
            return self._engine.state.phase.value
        return "ended" if self._ended else "planned"

    @property
    def nodes(self) -> Mapping[int, str]:
        """The state of each node, by its number; empty until `start` has returned, and after the pool was stopped.

        The states are:
            "launching": the machine is being rented.
            "booting": the machine was rented, but cannot be reached yet.
            "bootstrapping": the machine is being set up as the image says.
            "ready": the node runs calls.
            "unreachable since 12:03:04": the connection to a ready node is down. Calls go on there, but the node gets
                no new ones. The time is the local time of the node's last sign of life.
            "leaving": the node was retired, or the provider takes the machine back. Calls go on there, but the node
                gets no new ones.
            "unhealthy": a device of the node must not be used any more. The node gets no new calls.
            "draining": the machine is being ended.
            "ended": the machine has ended, or could not be rented.

        A TPU slice is one entry until its machines are launched, and then one for each host.
        """
        return {} if self._engine is None else self._engine.life.words()

    def slots(self, devices: Literal[0] | None = None) -> dict[int, int]:
        """Return how many calls each node runs at once, by its number. Nodes that get no new calls are left out.

        The dict is empty until `start` has returned, and after the pool was stopped.

        Args:
            devices: 0 to count the calls that need no accelerator (`@compute(devices=0)`). On nodes with accelerators,
                these calls have slots of their own. Default None: count all other calls.
        """
        return {} if self._engine is None else self._engine.dispatch.roster.slots(on_cpu=devices == 0)

    @property
    def devices(self) -> dict[int, int]:
        """The number of accelerators of each node that has been reached, by the node's number.

        The dict is empty until `start` has returned, and after the pool was stopped.
        """
        return {} if self._engine is None else self._engine.connections.devices()

    @property
    def image(self) -> Image:
        """The packages, files and settings of each node."""
        image: Image = self._terms.image
        return image

    @property
    def trust(self) -> Trust | None:
        """ "data" if the results of at least one node are read as plain data only, otherwise "full"; see docs/trust.md.

        Before nodes are known, this is the argument `trust` of the pool, which may be None.
        """
        known = () if self._engine is None else self._engine.trust_levels.trusts()
        return self._terms.trust if not known else "data" if "data" in known else "full"

    @property
    def inherited(self) -> list[CallFuture[object]]:
        """The futures of the calls that a former process had sent, before `attach` took the pool over from it.

        `future.name` is the name of the function. The list is a copy. It is empty for a pool that was not taken over,
        and after the pool was stopped.
        """
        return [] if self._engine is None else list(self._engine.takeover.inherited)

    def explain(self) -> str:
        """Return the pool's last plan as text: the offers that it tries, with prices, and why it rejects the others.

        Attempts to rent that failed, and the folders that are saved, are listed below the offers. Before the start, and
        while the pool waits for machines that are out of stock, there is no plan, and the text says so.
        """
        if self._handover is not None:
            return f"pool {self.name!r} makes no plan, as it has no account of a provider"
        if self._begun is None or (plan := self._begun.facts.plan) is None:
            return f"pool {self.name!r} has not made a plan yet: it makes one when it starts"
        terms = self._terms
        is_limited = terms.budget is not None and any(each.usd_per_hour for each in plan.offers)
        limit = "the budget" if is_limited else "the lifetime" if terms.lifetime is not None else ""
        saves = [f"saves {kept_in(each.path, each.bucket, terms.drain, limit)}" for each in terms.save]
        return "\n".join([plan.explain(), *self._begun.facts.attempts, *saves])

    @property
    def receipt(self) -> Receipt:
        """The costs of the pool so far, in US dollars, with a line for each machine that was rented.

        `receipt.usd` is the sum, and `receipt.idle_usd` is the part that was paid for idle time. Before the pool is
        started, the receipt has no lines.
        """
        if self._begun is None:
            return Receipt(self.name, (), time.time())
        self._begun.idle.record()
        return self._begun.rental.receipt

    def report(self) -> Report:
        """Return a report of what the pool has done and cost until now, as an HTML page that needs no other files.

        `pool.report().save("report.html")` writes it to a file, and a notebook shows it. It can be made while the pool
        runs and after its end. `skypool report` makes the same report in another process.

        Raises:
            UsageError: the pool was not started.
            LedgerError: the ledger cannot be read.
            sqlite3.Error: the file of the measurements is damaged.
        """
        from skypool.report.report import report_of  # imported here, as few programs need it

        record = None
        if self._begun is not None:
            self._begun.idle.record()
            self._begun.watches.settle()
            record = Ledger.here().record(self._begun.rental.session)
        if record is None:
            raise UsageError(f"pool {self.name!r} has not been started, so there is nothing to report")
        return report_of(record)

    def stack(self, node: int | None = None, *, native: bool = False) -> Stacks:
        """Return what the calls, gangs and services of the pool are doing now, as stacks of calls.

            print(pool.stack())

        prints what `skypool stack` prints. For a pool that was not started, the result is empty. Blocks until all nodes
        have answered; a node that does not answer within 60 s is in `errors` of the result.

        Args:
            node: the number of a node. Default None: all nodes.
            native: True also asks py-spy for calls of native code, such as those of NCCL. If a node has no py-spy, it
                is installed there from PyPI, and a node has 300 s to answer.

        Raises:
            UsageError: the pool does not have the node.
            PoolClosed: the pool has ended.
        """
        from skypool.observers import stacks  # imported here, as few programs need it
        from skypool.observers.observed import Observed

        if self._engine is None and not self._ended:
            return stacks.Stacks({})
        engine = self._running(self._engine)
        if node is not None:
            whole("node", node, "the number of a node", least=0)
        nodes = engine.dispatch.roster.nodes(None if node is None else [node])
        observed = Observed(engine.facts)
        return stacks.ask(
            self.name, list(nodes), native, lambda node, script: observed.command(node, script, False, ())
        )

    @property
    def samples(self) -> Samples:
        """The measurements of the pool's nodes, devices and running calls, and the health of the devices."""
        return Samples(self._begun)

    def _repr_html_(self) -> str:
        """Return the present state of the pool as HTML, for notebooks that cannot update what they show."""
        from skypool.report.widget import picture

        return picture(self.name, self._now())

    def _ipython_display_(self) -> None:
        """Show the state of the pool below the notebook cell, and update it each second until the pool has ended."""
        from skypool.report.widget import Widget

        mine = weakref.ref(self)
        widget = Widget(self.name, lambda: None if (pool := mine()) is None else pool._now())
        if not widget.show():
            raise NotImplementedError  # IPython in a terminal then shows the text of `repr`
        if self._widget is not None:
            self._widget.stop()
        self._widget = widget

    def _now(self) -> Now:
        from skypool.observers.observed import Observed
        from skypool.report.widget import Now

        engine = self._begun
        return Now() if engine is None else Now(Observed(engine.facts).info())
