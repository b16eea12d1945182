"""A provider of lab machines that are booted already: what stays of a cloud when its API is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skypool.drivers import userdata
from skypool.errors import CapacityError
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.wire import host_keys, transport
from skypool.wire.keys import Keys


@dataclass(frozen=True)
class Booted:
    """Machines whose user data was `cloud_config` with the keys in this folder; nothing ends them but they themselves.

    Args:
        addresses: of the machines; keys: the folder of the pool's keys; label: of their host key; user: who logs in.
    """

    addresses: tuple[str, ...]
    keys: str
    label: str
    user: str = "ubuntu"
    name: ClassVar[str] = "booted"

    def offers(self, need: Need) -> Iterable[Offer]:
        return [Offer(self.name, "lab")]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        if order.nodes[-1] >= len(self.addresses):
            raise CapacityError("there is no such machine", provider=self.name)
        return [Instance(self.name, self.addresses[node], order.pool, node, offer=offer) for node in order.nodes]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return []

    def access(self, instance: Instance) -> Access:
        keys = Keys(Path(self.keys))
        bare = transport.SSH(instance.id, user=self.user, identity=keys.identity, config="none", connect_timeout=6)
        folder = f"~/.skypool/pools/{instance.pool}.{instance.node}"
        return Access(
            transport=host_keys.declared(bare, instance.id, keys.host(self.label)[1]),
            python=None,
            folder=folder,
            spool=folder,
            cwd="~/.skypool/work",
            booting=20,
            settling=5,
            exclusive=True,
            guard=userdata.GUARD,
        )

    def terminate(self, instances: Sequence[Instance]) -> None:
        """It says so, and does nothing."""
