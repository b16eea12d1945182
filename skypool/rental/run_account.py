"""`RunAccount`: what the client of a hand-over does in the ledger and at the provider."""

from __future__ import annotations

import math
import time

from skypool import clock
from skypool.errors import BudgetExceeded, SkypoolError, UsageError
from skypool.head.states import Claim, Entry, Ledger
from skypool.rental.supply import Supply

ENDING = 120.0
"""Seconds after the written end in which the machine may still be there. A machine needs up to 60 s to end itself, and
clocks differ."""
COSTS_ON = "cannot end its own cost: it would be billed until somebody runs `skypool gc --yes`"
"""Why a run is not handed over to a machine that is only switched off when it ends itself."""
PRICE_RISES = "the price of a spot machine may rise while nobody watches it, and nothing limits that"
"""Why a run on a spot machine is not handed over if it has neither a budget nor a highest price."""


class RunAccount:
    """The account of a run that its client hands over to the pool's machine. Any thread may call the methods, which
    block.

    `write` and `renew_tags` perform the actions `WriteLedger` and `RenewTags` of `skypool.head.steps.client`.

    Attributes:
        claim: the run and its generation.
        heir: the digest of the word by which the runner will be known; "" if it was not given.
        seal: the key with which the runner signs what it keeps in buckets; "" if it was not given.
        ends: the written end in seconds since 1970, by the wall clock. It is early enough that the pool costs no more
            than its budget, even if the price of a spot machine rises.
        limit: what ends the run then: "budget" or "lifetime".
        latest: the latest time at which the machine may still be there.
        worst_usd: the most that the pool may cost in all, in US dollars, if the machine is there until `latest`.

    Args:
        supply: the providers of the pool.
        seconds: the most seconds from now until the guard ends the machine in any case. Less if the budget ends before.
        heir: the digest of the word by which the runner will be known, as from `messages.heir_digest`.
        seal: the key with which the runner signs what it keeps in buckets, as from `messages.seal_key`.

    Raises:
        UsageError: `seconds` is not a positive, finite number, the machine cannot end its own cost, or nothing limits
            the price of a spot machine.
        BudgetExceeded: the budget does not pay for a run that nobody watches.
        SkypoolError: the pool has several machines.
        LedgerError: the costs cannot be read from the ledger or from memory.
    """

    def __init__(self, supply: Supply, claim: Claim, seconds: float, heir: str = "", seal: str = "") -> None:
        if not 0 < seconds < math.inf:
            raise UsageError(f"a run is handed over with an end, after a positive number of seconds, not {seconds!r}")
        self._supply = supply
        self._rental = rental = supply.rental
        self.claim, self.heir, self.seal = claim, heir, seal
        for each in rental.there:
            if not (supply.ends_itself(each) or rental.is_free(each)):
                raise UsageError(f"the run is not handed over, as machine {each.id} at {each.provider} {COSTS_ON}")
        if len(rental.there) > 1:
            raise SkypoolError(
                f"the run is not handed over, as the pool has other machines, whose end is not proved, beside its own: "
                f"{', '.join(each.id for each in rental.there)}; `skypool down {rental.pool}` ends them all"
            )
        now, budget = clock.now(), rental.limits.budget
        for_budget = rental.surely_until() - ENDING
        self.limit = "budget" if for_budget < now + seconds else "lifetime"
        ends = min(for_budget, now + seconds)
        worst = rental.worst_until(max(now, ends) + ENDING)
        if budget is not None and (ends <= now or worst > budget.max_usd * (1 + 1e-9)):
            raise BudgetExceeded(
                f"the run is not handed over, as its machine could then cost {worst:.2f} USD, which is more than the "
                f"budget of {budget.max_usd:g} USD: up to {ENDING:g} s may pass until it has ended itself, and the "
                "price of a spot machine may rise; raise the budget"
            )
        if not worst < math.inf:
            raise UsageError(f"the run is not handed over, as {PRICE_RISES}")
        self.worst_usd = worst
        self.ends = ends + time.time() - clock.now()
        self.latest = self.ends + ENDING

    @property
    def left(self) -> float:
        """Seconds until the written end; 0 after it. A message that is sent later than others has a shorter end."""
        return max(0.0, self.ends - time.time())

    def write(self, entry: Entry) -> None:
        """Write an entry into the ledger. It only goes forward.

        Raises:
            LedgerError, SkypoolError: "detaching" could not be written; do not hand the run over. Other entries do not
                raise: if one cannot be written now, it is written later, and the user is told.
            PoolClosed: another process is ending the pool.
            TakenOver: another process has taken the pool over.
        """
        rental = self._rental
        if rental.ledger is None:
            raise SkypoolError(f"the ledger does not have pool {rental.pool!r}, so its run cannot be handed over")
        if entry.state is Ledger.DETACHING:
            rental.ledger.hand_over(
                rental.session,
                self.claim,
                ends=self.ends,
                latest=self.latest,
                worst_usd=self.worst_usd,
                heir=self.heir,
                seal=self.seal,
            )
        else:
            rental.ledger.mark(rental.session, entry)

    def renew_tags(self) -> None:
        """Write into the tags of the machines that they are needed until the end of the run.

        `skypool gc` then ends them neither before that nor much later, also without the ledger. This process writes the
        same time whenever it renews its lease.

        Raises:
            SkypoolError, ErrorGroup: a provider did not take it; do not hand the run over.
        """
        self._supply.renew_to(self.latest)
