"""`Handover`: the data that a process needs to own a pool without an account of a provider.

The process that has the account makes it, from what its ledger and its pool know. The new owner looks nothing up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from skypool.errors import SkypoolError
from skypool.model import Access, Instance, Trust
from skypool.rental.records import Record


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node that is handed over.

    Attributes:
        instance: its machine, without the details that only its driver understands.
        access: how it is reached. The key files that it names must exist.
        python: the path of Python on it; "" if its setup wrote the path to a file there.
        trust: "full" if its results are unpickled, "data" if they are read as plain data only.
        ends_itself: True if the machine ends itself when its lease is over, and is then no longer billed.
    """

    instance: Instance
    access: Access = field(repr=False)
    python: str
    trust: Trust
    ends_itself: bool

    @classmethod
    def of(cls, instance: Instance, access: Access, python: str, trust: Trust, ends_itself: bool) -> HeldNode:
        """Return a node without the details of its driver, which may be of classes that others cannot import."""
        offer = None if instance.offer is None else replace(instance.offer, detail={})
        return cls(replace(instance, offer=offer, detail={}), access, python, trust, ends_itself)


@dataclass(frozen=True, slots=True)
class Handover:
    """A pool that is handed over.

    Attributes:
        record: the pool in its former owner's ledger: budget, lifetime, lease, and its machines with their last prices.
        nodes: its ready nodes.
        heir: the word by which the agents know the new owner, if the hand-over was committed before; "" if it was not.
    """

    record: Record
    nodes: tuple[HeldNode, ...]
    heir: str = field(default="", repr=False)


class NoSupply(SkypoolError):
    """Raised if an action needs an account of a provider, and the pool has none. `what` names the action."""

    def __init__(self, pool: str, what: str) -> None:
        super().__init__(
            f"pool {pool!r} cannot {what}: this process has its machines, but no account of a provider to rent others. "
            f"It goes on with the nodes that it has. Where the credentials are, ComputePool.attach({pool!r}) with an "
            "accelerator= or image= takes it over and can rent"
        )
