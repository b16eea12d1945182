"""Driver for Acme, which rents machines on demand and on a spot market."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from skypool.drivers import ssh_machine, tags
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.rest import Rest
from skypool.drivers.retry import quietly
from skypool.drivers.settings import settings_named
from skypool.errors import NoAnswer, ProviderError, RateLimitError
from skypool.model import Access, Instance, Need, Offer, Order
from skypool_acme import _api, _catalog


@settings_named
@dataclass(frozen=True)
class Acme:
    """A driver that rents machines from Acme.

    Args:
        url: the base address of the API. None means $ACME_URL, or Acme's own address if that is not set.
        api_key: the API key. None means $ACME_API_KEY.
    """

    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    name: ClassVar[str] = "acme"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, private_network=True, spot=True)

    # Acme deletes a machine within a few seconds. `terminate` raises StillRunning after this many seconds.
    ending: ClassVar[float] = 60.0

    def _api(self) -> Rest:
        """Return a client of Acme's API with this driver's settings."""
        return _api.account(self.url, self.api_key)

    def offers(self, need: Need) -> Iterable[Offer]:
        """Return all offers on the need's markets. The caller filters the offers by the rest of the need."""
        sold = self._api().ask("GET", "/types", what="the list of types")
        return [_catalog.offer(each) for each in sold if each["market"] in need.markets]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the live machines whose tags name this user and the pool. None means all pools of this user."""
        return [_catalog.instance(each) for each in self._machines() if tags.ours(each["tags"], pool)]

    def _machines(self) -> list[dict[str, Any]]:
        """Return Acme's list of the account's live machines, as JSON objects."""
        return self._api().ask_all("/machines", "machines", what="the list of machines", next="next", token="after")

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Delete machines, and wait until Acme no longer lists them.

        Raises:
            StillRunning: Acme still lists machines after `ending` seconds.
        """
        ssh_machine.terminate_and_wait(
            instances,
            self._delete,
            lambda: [each["id"] for each in self._machines()],
            self.ending,
        )

    def _delete(self, id: str) -> None:
        """Ask Acme to end a machine. Do nothing if the machine no longer exists."""
        quietly(lambda: self._api().ask("DELETE", f"/machines/{id}", what=f"the end of {id}"), "NotFound")

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Make a machine for each node, with one request for each. The same token and node give the same machine."""
        launched: list[Instance] = []
        for node in order.nodes:
            order.asking(node)
            try:
                made = self._create(offer, replace(order, nodes=(node,)))
            except (NoAnswer, RateLimitError):
                raise  # the pool repeats the launch with the same token
            except ProviderError:
                if launched and not order.need.private_network:
                    break  # return the first nodes; the pool rents the others elsewhere
                undo(self.terminate, order, launched)
                raise
            order.made(made)
            launched.append(made)
        return launched

    def _create(self, offer: Offer, order: Order) -> Instance:
        """Make one machine. The request has a token, so repeating the request makes no second machine."""
        asked = {
            "type": offer.instance_type,
            "region": offer.region,
            "zone": offer.zone,  # "" where Acme sells by regions
            "market": offer.market,
            "client_token": f"{order.token}-{order.nodes[0]}",
            "tags": tags.tags(order),
            "lease": order.lease,
            "lifetime": order.lifetime,
        }
        where = offer.zone or offer.region
        made = self._api().ask("POST", "/machines", what=f"a {offer.instance_type} in {where}", json=asked)
        return replace(_catalog.instance(made), offer=offer)

    def access(self, instance: Instance) -> Access:
        """Return how to run commands on a machine, and the paths of folders and files there."""
        machine = self._api().ask("GET", f"/machines/{instance.id}", what=f"a way to {instance.id}")
        folder = f"~/.skypool/pools/{instance.pool}.{instance.node}"
        return Access(
            transport=_api.Console(tuple(machine["console"])),
            python=machine["python"],
            folder=folder,
            spool=folder,
            cwd="~",
            booting=120.0,
            owned=True,  # Acme's images are complete: skypool installs nothing in their system
            guard=machine["lease_file"],
            watch=ssh_machine.notice_program(
                "http://169.254.169.254", f"/{instance.id}/notice", "float(said)", variable="ACME_METADATA"
            ),
        )
