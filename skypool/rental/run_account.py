"""`RunAccount`: what the client of a hand-over does in the ledger and at the provider."""

from __future__ import annotations

import math
import time

from skypool.errors import SkypoolError, UsageError
from skypool.head.states import Claim, Entry, Ledger
from skypool.rental.supply import Supply

ENDING = 120.0
"""Seconds after the written end in which the machine may still be there. A machine needs up to 60 s to end itself, and
clocks differ."""


class RunAccount:
    """The account of a run that its client hands over to the pool's machine. Any thread may call the methods, which
    block.

    `write` and `renew_tags` perform the actions `WriteLedger` and `RenewTags` of `skypool.head.steps.client`.

    Attributes:
        claim: the run and its generation.
        heir: the digest of the word by which the runner will be known; "" if it was not given.
        ends: the written end in seconds since 1970, by the wall clock.
        latest: the latest time at which the machine may still be there.

    Args:
        supply: the providers of the pool.
        seconds: seconds from now until the guard ends the machine in any case.
        heir: the digest of the word by which the runner will be known, as from `messages.heir_digest`.

    Raises:
        UsageError: `seconds` is not a positive, finite number.
    """

    def __init__(self, supply: Supply, claim: Claim, seconds: float, heir: str = "") -> None:
        if not 0 < seconds < math.inf:
            raise UsageError(f"a run is handed over with an end, after a positive number of seconds, not {seconds!r}")
        self._supply = supply
        self._rental = supply.rental
        self.claim = claim
        self.heir = heir
        self.ends = time.time() + seconds
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
            usd = rental.worst_until(self.latest)
            rental.ledger.hand_over(
                rental.session, self.claim, ends=self.ends, latest=self.latest, worst_usd=usd, heir=self.heir
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
