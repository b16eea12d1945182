"""`Budget`, a limit of what a pool may cost, and `Enforcement`, which holds one pool to its budget and its lifetime.

The *ceiling* is a limit of what all pools of the user may cost together: the environment variable `SKYPOOL_MAX_USD`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skypool import clock
from skypool.checks import duration_words
from skypool.errors import BudgetExceeded, LedgerError, LifetimeExceeded, UsageError
from skypool.model import Offer
from skypool.rental.receipt import HOUR, Line, Receipt

if TYPE_CHECKING:
    from skypool.offers.ranking import Plan

NODE_LATER = 5.0
"""Seconds by which nodes end themselves later than the pool, so that the pool ends first and can say why."""
CEILING = "SKYPOOL_MAX_USD"
START = 1200.0
"""Seconds for which a budget must pay: ten minutes to boot a machine and set it up, and ten of work."""
HEADROOM = 1.25
"""Largest price of a spot machine in a pool with a budget, as a multiple of the price in the machine's offer.

If the price rises above that, the provider takes the machine back. With a smaller factor, a pool would lose machines to
every small rise of the price.
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit of what a pool may cost in all. When the budget is spent, every machine of the pool is terminated.

    Args:
        max_usd: the limit in US dollars, above 0.
        warn: share of the limit at which the pool warns the user, above 0 and at most 1. Default 0.8.
        best_effort: if False (the default), machines that cost something and cannot end themselves are not rented. If
            True, they may be rented, too. If the client is then killed or loses its network, such machines are billed
            beyond the budget until `skypool gc` ends them.

    Raises:
        UsageError: a value is out of range or of another type.
    """

    max_usd: float
    warn: float = 0.8
    best_effort: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.best_effort, bool):
            raise UsageError(f"Budget(best_effort=) must be True or False, not {self.best_effort!r}")
        for name, value, most in (("max_usd", self.max_usd, math.inf), ("warn", self.warn, 1.0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
                span = "above 0 and at most 1" if name == "warn" else "above 0"
                raise UsageError(f"Budget({name}=) must be a number {span}, not {value!r}")
        if self.max_usd == math.inf:
            raise UsageError("Budget(max_usd=inf) is endless; for a pool without a limit, leave budget= out")

    def left(self, spent: float) -> float:
        """Return the US dollars that are left of the budget after `spent` US dollars; never below 0."""
        return max(0.0, self.max_usd - spent)

    def warns(self, spent: float) -> bool:
        """Return True if `spent` US dollars reach the share `warn` of the budget. The pool then warns the user."""
        return spent >= self.warn * self.max_usd

    def lasts(self, lines: Iterable[Line], now: float, more: Iterable[Offer] = ()) -> float:
        """Return the seconds until these instances, and new machines on the offers in `more`, have spent the budget.

        The minimum billed time of each machine counts as spent at once. Prices are assumed to stay as they are.

        Args:
            lines: the instances and their costs.
            now: the time from which the seconds count, in seconds since 1970.
            more: offers. On each of them, one more machine (or slice) is assumed to be rented now.

        Returns:
            The seconds: 0 if the budget is spent and a machine goes on to cost money, `math.inf` if no machine costs
            anything.
        """
        open_lines = []
        spent = 0.0
        for line in lines:
            spent += line.at(now).usd
            if not line.ended and line.billed_from is None:  # its billing may begin at any moment
                spent += line.usd_per_hour * line.least_billed / HOUR + line.start_usd
                open_lines.append((line.usd_per_hour, now + line.least_billed))
            elif not line.ended:
                open_lines.append((line.usd_per_hour, line.begins + line.least_billed))
        for offer in more:
            spent += offer.usd_per_hour * offer.least_billed / HOUR + offer.start_usd
            open_lines.append((offer.usd_per_hour, now + offer.least_billed))
        return _spent_at(self.left(spent), now, open_lines) - now

    def check_start(self, offers: Sequence[Offer], spent: float = 0.0, lifetime: float | None = None) -> None:
        """Raise BudgetExceeded if starting one machine (or slice) on each offer costs more than is left.

        A start takes 20 minutes: ten to boot a machine and set it up, and ten of work. If the minimum billed time of an
        offer is longer, it counts instead.

        Args:
            offers: the offers. An offer may be given several times, for several machines.
            spent: US dollars that are spent already.
            lifetime: seconds after which the machines end anyway; None if there is no such limit. A lifetime of less
                than 20 minutes counts instead of these.

        Raises:
            BudgetExceeded: its message has the cost and the budget.
        """
        cost = usd_to_start(offers, lifetime)
        if cost > self.left(spent):
            word = "slice" if any(each.hosts > 1 for each in offers) else "node"
            nodes = f"{len(offers)} {word}{'' if len(offers) == 1 else 's'}"
            before = f", of which {spent:.2f} are spent" if spent else ""
            raise BudgetExceeded(
                f"the first {start_words(offers, lifetime)} of {nodes} cost {cost:.2f} USD, and the budget is "
                f"{self.max_usd:.2f} USD{before}: ask for fewer or cheaper {word}s, or raise the budget: "
                f"budget=Budget({math.ceil((cost + spent) * 100) / 100:.2f})"
            )


def usd_to_start(offers: Sequence[Offer], lifetime: float | None = None) -> float:
    """Return the US dollars that a start on these offers costs, as `Budget.check_start` counts them."""
    return sum(each.usd_per_hour * max(_start(lifetime), each.least_billed) / HOUR + each.start_usd for each in offers)


def start_words(offers: Sequence[Offer], lifetime: float | None = None) -> str:
    """Return for how long a start on these offers is billed, as words."""
    return duration_words(max([_start(lifetime), *(each.least_billed for each in offers)]))


def _start(lifetime: float | None) -> float:
    return min(START, lifetime or START)


def ceiling() -> float | None:
    """Return the US dollars that all pools may cost together; None for no limit.

    Raises UsageError if the environment variable is no number above 0.
    """
    said = os.environ.get(CEILING, "").strip()
    if not said:
        return None
    try:
        most = float(said)
    except ValueError:
        most = math.nan
    if not 0 < most < math.inf:
        raise UsageError(f"{CEILING} must be a number of US dollars above 0, not {said!r}; correct it, or unset it")
    return most


def lowered(budget: Budget | None, most: float | None) -> Budget | None:
    """Return a budget that is at most `most` US dollars; None for neither a budget nor a limit."""
    if most is None:
        return budget
    return Budget(most) if budget is None else replace(budget, max_usd=min(budget.max_usd, most))


def highest_price(offer: Offer, max_usd_per_hour: float | None, has_budget: bool) -> float | None:
    """Return the US dollars per hour above which a machine on this offer must end; None for no such price.

    Args:
        offer: the offer of the machine.
        max_usd_per_hour: the highest price that the user asked for; None or 0 for none.
        has_budget: whether its pool has a budget, which limits prices of spot machines.
    """
    caps = [max_usd_per_hour or math.inf]
    if has_budget and offer.market == "spot":
        caps.append(offer.usd_per_hour * HEADROOM)
    return None if (lowest := min(caps)) == math.inf else lowest


def worst_bill(lines: Iterable[Line], now: float, until: float) -> float:
    """Return the most that machines may cost in all, in US dollars, if those that have not ended end until a time.

    Args:
        lines: the machines and their costs so far. Prices stay as they are, so give the highest ones: `repriced`.
        now, until: the present time and that time, in seconds since 1970.
    """
    usd = 0.0
    for line in lines:
        if not line.ended:
            begins = now if line.billed_from is None else line.billed_from  # billing may begin at any moment
            line = replace(line, until=max(now, until), billed_from=begins)
        usd += line.usd
    return usd


def repriced(line: Line, now: float, usd_per_hour: float) -> Line:
    """Return a line with another price from the time `now` on, in seconds since 1970."""
    return replace(line, usd_per_hour=usd_per_hour, earlier=(*line.earlier, (now, line.usd_per_hour)))


def _spent_at(left: float, now: float, costs: list[tuple[float, float]]) -> float:
    """Return the time when `left` US dollars are spent; `math.inf` for never. `costs`: (US dollars per hour, begin)."""
    rate = 0.0
    at = now
    for usd_per_hour, begins in sorted(costs, key=lambda each: each[1]):
        if begins > at:
            until_spent = left * HOUR / rate if rate else math.inf
            if at + until_spent <= begins:
                return at + until_spent
            left -= (begins - at) * rate / HOUR
            at = begins
        rate += usd_per_hour
    return at + left * HOUR / rate if rate else math.inf


class Enforcement:
    """The enforcement of one pool's budget and lifetime. No provider is asked. Any thread may call the methods.

    Attributes:
        budget: None without a budget.
        lifetime: seconds from the first billing to the end of the pool; None without such a limit.
        billed_since: time when the pool began to cost something, in seconds since 1970; None until that is known.
    """

    def __init__(
        self,
        pool: str,
        budget: Budget | None,
        lifetime: float | None,
        receipt: Callable[[], Receipt],
        tell: Callable[[str, str], None],
    ) -> None:
        self._pool = pool
        self._receipt = receipt
        self._tell = tell
        self.budget = budget
        self.lifetime = lifetime
        self.billed_since: float | None = None

    def inherit(self, budget: Budget | None, lifetime: float | None) -> None:
        """Take over the limits that the pool had in its former process.

        The budget counts only if this pool has none. Of two lifetimes, the shorter one counts.
        """
        self.budget = self.budget or budget
        self.lifetime = min((each for each in (self.lifetime, lifetime) if each), default=None)

    # --- before machines are rented --------------------------------------------------------------------------

    def keepable(self, plan: Plan, ends_itself: Callable[[Offer], bool]) -> Plan:
        """Return the plan without offers whose machines cost money and cannot end themselves, if there is a budget.

        `ends_itself` returns True for an offer whose machines can end themselves. If the budget has `best_effort`, no
        offer is left out. Raises UsageError if every offer would be left out.
        """
        budget = self.budget
        if budget is None or budget.best_effort:
            return plan
        kept = tuple(each for each in plan.offers if each.usd_per_hour <= 0 or ends_itself(each))
        if plan.offers and not kept:
            first = plan.offers[0]
            raise UsageError(
                f"budget={budget.max_usd:g} cannot be guaranteed on {first.provider} {first.instance_type}: such a "
                f"machine cannot end itself, so it would be billed until `skypool gc --yes` runs if this process were "
                f"killed. Choose machines that end themselves (docs/nets.md says which), or accept that the budget "
                f"holds only while this process runs: Budget({budget.max_usd:g}, best_effort=True), or --best-effort"
            )
        if len(kept) < len(plan.offers):
            out = sorted({each.provider for each in plan.offers} - {each.provider for each in kept})
            of = f" of {', '.join(out)}" if out else ""
            said = f"offers{of} are left out: their machines cannot end themselves, so the budget is not guaranteed"
            return replace(
                plan,
                offers=kept,
                notes=(*plan.notes, f"{said}; Budget(…, best_effort=True), or --best-effort, allows them"),
            )
        return plan

    def check_start(self, offers: Sequence[Offer]) -> None:
        """Raise BudgetExceeded if starting one machine (or slice) on each offer costs more than is left."""
        if self.budget is not None:
            lifetime = None if self.lifetime is None else self.lifetime_left
            self.budget.check_start(offers, self._receipt().usd, lifetime)

    def life_of(self, offers: Sequence[Offer], lease: float) -> float | None:
        """Return the seconds for which new machines on these offers may live; None for no limit.

        `lease` is the lease of the pool, in seconds.

        Raises:
            BudgetExceeded, LifetimeExceeded: nothing is left of the budget, or of the lifetime.
        """
        left = self.left(offers)
        if left <= 0:
            raise BudgetExceeded(self._spent_words())
        lifetime = self.lifetime_left
        if lifetime <= 0:
            raise LifetimeExceeded(self._over_words())
        if left > lease and any(map(self._is_capped, offers)):
            left = math.inf  # its price may fall; until then the lease, and the time that `check` returns, limit it
        ends = min(left, lifetime)
        return None if ends == math.inf else ends

    def _is_capped(self, offer: Offer) -> bool:
        return self.budget is not None and offer.market == "spot"

    # --- while the pool runs ---------------------------------------------------------------------------------

    def check(self, early: float = 0.0) -> float:
        """Check budget and lifetime, and return the seconds for which the pool may go on; `math.inf` for no limit.

        Blocks for a moment. The user gets a warning when the share `warn` of the budget is spent.

        Args:
            early: seconds before the end in which this raises already. Default 0.

        Raises:
            BudgetExceeded: the budget is spent.
            LifetimeExceeded: the lifetime is over.
            LedgerError: there is a budget, and the costs cannot be read from the ledger or from memory.
        """
        lifetime = self.lifetime_left
        if lifetime <= early:
            raise LifetimeExceeded(self._over_words())
        budget = self.budget
        left = self.left()
        if budget is None:
            return min(left, lifetime)
        if left <= early:
            raise BudgetExceeded(self._spent_words())
        if budget.warns(spent := self._receipt().usd):
            share = f"{budget.warn:.0%} of the budget of ${budget.max_usd:g}"
            self._tell(f"{share} is spent; all machines are ended when the budget is used up", f"${spent:.2f} so far")
        return min(left, lifetime)

    def left(self, more: Sequence[Offer] = ()) -> float:
        """Return the seconds until the budget is spent, if one more machine is rented now on each offer in `more`.

        It is 0 if the budget is spent and costs go on, and `math.inf` without a budget, or if no machine costs
        anything. Raises LedgerError if the costs cannot be read from the ledger or from memory.
        """
        return math.inf if self.budget is None else self.budget.lasts(self._receipt().lines, clock.now(), more)

    @property
    def lifetime_left(self) -> float:
        """Seconds until the lifetime, which begins with the first billing, is over; `math.inf` if there is none."""
        if self.lifetime is None:
            return math.inf
        if self.billed_since is None:
            billed = [each.begins for each in self._known_lines() if each.billed_from is not None]
            if not billed:
                return self.lifetime
            self.billed_since = min(billed)
        return self.billed_since + self.lifetime - clock.now()

    @property
    def nearer(self) -> str:
        """The limit that ends the pool first: "lifetime" or "budget"."""
        return "lifetime" if self.lifetime_left < self.left() else "budget"

    def node_lifetime(self) -> float | None:
        """Return the seconds after which a new node ends itself, 5 s later than the pool; None for never. Blocks."""
        left = self.lifetime_left
        return None if left == math.inf else max(0.0, left) + NODE_LATER

    def _known_lines(self) -> Sequence[Line]:
        try:
            return self._receipt().lines
        except LedgerError:
            return ()

    def _spent_words(self) -> str:
        most = self.budget.max_usd if self.budget else 0.0
        return (
            f"pool {self._pool!r} has spent ${self._receipt().usd:.2f} of its budget of ${most:g}, and its machines "
            f"are ended; to go on, make a new pool with a larger Budget(max_usd=). `skypool cost` shows what was spent"
        )

    def _over_words(self) -> str:
        lifetime = duration_words(self.lifetime or 0.0)
        return (
            f"pool {self._pool!r} ends with its machines, as its max_lifetime of {lifetime} is over; calls that have "
            "not ended are lost. To go on, make a new ComputePool with a longer max_lifetime="
        )
