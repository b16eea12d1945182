"""The contract that a driver fulfils: what only one cloud knows, behind a few verbs that block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from skypool.model import Access, Instance, Need, Offer, Order


@runtime_checkable
class Driver(Protocol):
    """A provider with the user's settings. Constructing it is free: no I/O, no SDK import.

    Every verb may block and is called from a worker thread, several at once.

    A driver may say with `offers_keep: ClassVar[float]` for how many seconds its offers hold; without it they are
    asked for each time. What is kept goes by its `repr` and the need, so secrets must have `repr=False`.
    """

    name: ClassVar[str]

    def offers(self, need: Need) -> Iterable[Offer]:
        """Everything sold now that could serve; quick.

        Raises:
            ProviderError: what the provider said, translated.
        """
        ...

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent `order.count` machines: all or none. Returns at once; idempotent by `order.token`.

        Raises:
            CapacityError, QuotaError, CredentialsError, …: so that failover knows where to go next.
        """
        ...

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Every instance that this user's pools have here now, found by tag and never by a ledger."""
        ...

    def access(self, instance: Instance) -> Access:
        """How to reach an instance, once it is `running`."""
        ...

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End these instances and come back when the provider says they are ended.

        Quiet for those that are gone already, loud for the rest.

        Raises:
            StillRunning: naming those whose end could not be proved.
        """
        ...
