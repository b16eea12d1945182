"""`NodeCount`: how many nodes a pool has. It changes their number, retires nodes, and waits until nodes are ready."""

from __future__ import annotations

import time

from skypool.calls.dispatch import Dispatch
from skypool.errors import LaunchError, PoolClosed, UsageError
from skypool.event_loop import Loop
from skypool.offers.need import hosts_alike
from skypool.pool import states
from skypool.pool.growth import Launches
from skypool.pool.life import Life
from skypool.pool.replacement import LIVING
from skypool.pool.shrinking import check_retirement
from skypool.pool.states import Phase
from skypool.rental.handover import NoSupply
from skypool.rental.pool_terms import Terms
from skypool.rental.supply import Supply


class NodeCount:
    """Sets the number of one pool's nodes.

    A method runs in the engine's thread unless its description says otherwise.
    """

    def __init__(self, terms: Terms, life: Life, supply: Supply | None, dispatch: Dispatch, launches: Launches) -> None:
        self._terms = terms
        self._life = life
        self._supply = supply
        self._dispatch = dispatch
        self._launches = launches

    def resize(self, minimum: int, maximum: int) -> None:
        """Change how many nodes (or slices) the pool must have, and how many it may grow to. This does not wait.

        Any thread may call this.

        Raises:
            UsageError: the pool was taken over from another process and lacks the requirements of new nodes, or its
                accelerators have different numbers of hosts.
            BudgetExceeded: the new nodes cost more in their first 20 minutes than is left of the budget.
            NoSupply: the pool would grow, and has no account of a provider.
        """
        hosts_alike(self._terms.need.accelerators, maximum)
        state = self._life.state
        living = state.count(*LIVING)
        if self._supply is None:
            if maximum > living:
                raise NoSupply(self._terms.name, f"grow from {living} nodes to {maximum}")
        elif not self._terms.replaces:
            if minimum > living:
                raise UsageError(
                    f"pool {self._terms.name!r} has {living} nodes and cannot grow to {minimum}, because it was taken "
                    "over without the requirements of new nodes: pass accelerator= or image= to ComputePool.attach()"
                )
            minimum = 0
        elif state.phase is not Phase.PLANNED:
            self._supply.check_budget(minimum - living)
        self._life.soon(self._resize, minimum, maximum)

    def _resize(self, minimum: int, maximum: int) -> None:
        self._life.apply(states.Resize(minimum, maximum, self._dispatch.roster.load))
        if self._life.state.phase is Phase.READY:
            self._launches.watch()

    def retire(self, node: int) -> None:
        """Retire a node, with all hosts of its slice. Do not wait for its end.

        Any thread may call this. When it returns, no new call is sent to the node, and a further `retire` or `resize`
        counts the node as gone.

        Raises:
            UsageError: the pool has no such node, it is a later host of a slice, or no other node would be left.
        """
        Loop.shared().call(lambda: self._retire(node))

    def _retire(self, node: int) -> None:
        check_retirement(self._life.state, self._terms.name, node)
        self._life.apply(states.Retire(node))

    # --- waiting for nodes -----------------------------------------------------------------------------------

    async def wait_ready(self, count: int | None, timeout: float | None) -> None:
        """Wait until this many nodes (or slices) are ready; None for the smallest number that the pool must have.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Raises:
            TimeoutError: the time is over.
            UsageError: the pool may not have so many nodes.
            LaunchError: nodes are missing, and no more are being launched in their place.
            SkypoolError: the error that ended the pool.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._has(count):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(self._missing(count, f"after {timeout:g} s"))
            await self._life.change(left)

    def _has(self, count: int | None) -> bool:
        """Return True if this many nodes (or slices) are ready. Raise the reason if they never will be."""
        state = self._life.state
        if self._life.is_ending:
            raise state.error or PoolClosed(f"pool {self._terms.name!r} has ended")
        wanted = state.minimum if count is None else count
        if wanted > state.maximum:
            raise UsageError(
                f"pool {self._terms.name!r} has at most {state.maximum} nodes, so {wanted} are never ready: make it "
                f"larger with pool.resize({wanted})"
            )
        grows = self._launches.may_grow and wanted > state.minimum
        if state.phase is not Phase.PLANNED and state.count(*LIVING) < wanted and not grows:
            errors = [each.error for _, each in sorted(state.nodes.items()) if each.error is not None]
            why = f": {errors[-1]}" if errors else ""
            again = f"; pool.resize({state.minimum}) tries again" if self._supply is not None else ""
            raise LaunchError(
                self._missing(count, f"and no more are launched{again}{why}"),
                is_short=bool(errors) and getattr(errors[-1], "is_short", False),
            ) from (errors[-1] if errors else None)
        return state.count(Phase.READY) >= wanted

    @property
    def _whole(self) -> int:
        """The number of nodes that the pool is to have, at least 1."""
        return max(1, self._life.state.minimum * self._life.state.hosts)

    def check_least(self, name: str, least: int | None, named: int | None) -> None:
        """Raise UsageError if a call named `name` cannot run on `least` nodes (its option `min_nodes`).

        `named` is the number of nodes that the call names; None for all nodes of the pool. Any thread may call this.
        """
        most = max(self._whole, len(self._dispatch.roster.nodes())) if named is None else named
        if least is not None and least > most:
            raise UsageError(f"min_nodes={least} is more than the {most} nodes on which {name} is to run")

    def await_nodes(self, name: str, least: int | None, every: bool = True) -> None:
        """Wait until the pool has as many nodes for calls as it is to have. Any thread but the engine's may call this.

        Args:
            name: the name of the call that needs them, for messages.
            least: the number of nodes that is enough when the pool's `wait` is over, or if no more are being launched.
                None for all.
            every: False if `least` nodes are enough at once.

        Raises:
            LaunchError: nodes are missing, and no more are being launched in their place.
            PoolClosed: the pool has ended.
            SkypoolError: the error that ended the pool.
        """
        if len(self._dispatch.roster.nodes()) < (self._whole if every else least or 1):
            Loop.shared().run(self._await_nodes(name, least, every))

    async def _await_nodes(self, name: str, least: int | None, every: bool) -> None:
        until = time.monotonic() + (self._terms.wait if every else 0.0)
        is_told = False
        while (there := len(self._dispatch.roster.nodes())) < self._whole:
            is_enough = least is not None and there >= least
            left = until - time.monotonic()
            try:
                self._has(None)
            except LaunchError as e:
                if not is_enough:
                    ready = self._life.state.count(Phase.READY)
                    rest = f"; pool.resize({ready}) does without the others" if there else ""
                    words = f"{name} needs {self._whole} nodes and was not run on {there}{rest}: {e}"
                    raise LaunchError(words, is_short=e.is_short) from e
                left = 0.0
            if is_enough and left <= 0:
                if every:
                    self._life.notice(f"{name} runs on {there} of {self._whole} nodes (min_nodes={least})")
                return
            coming = self._coming()
            if coming and not is_told:
                is_told = True
                self._life.notice(f"{name} waits for {self._whole - there} of {self._whole} nodes: {', '.join(coming)}")
            await self._life.change(left if is_enough else None)

    def _coming(self) -> list[str]:
        """Return a text for each node that is being launched or set up, such as "node 3 is booting"."""
        nodes = sorted(self._life.state.nodes.items())
        return [f"node {node} is {each.word}" for node, each in nodes if each.phase in LIVING[:-1]]

    def _missing(self, count: int | None, why: str) -> str:
        state = self._life.state
        wanted = state.minimum if count is None else count
        coming = self._coming()
        rest = f" ({', '.join(coming)})" if coming else ""
        return f"pool {self._terms.name!r} has {state.count(Phase.READY)} of {wanted} nodes ready {why}{rest}"
