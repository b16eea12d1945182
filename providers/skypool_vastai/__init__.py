"""Vast.ai: containers on machines of strangers, on demand and for bids, billed by the second.

API: https://docs.vast.ai/api-reference (read 2026-11-21). Credentials: $VAST_API_KEY, what `vastai set api-key` wrote,
or VastAI(api_key=...). A stopped instance is billed on for its disk: only its destruction ends the cost, which it can
ask for itself by a key that is its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from skypool import errors
from skypool.drivers import blocklist, preflight, retry, settings, ssh_machine, tags
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import each_done
from skypool.errors import NoAnswer, OfferGone, ProviderError, UsageError
from skypool.model import Access, Finding, Instance, Need, Offer, Order
from skypool_vastai import _api, _catalog

_LAG, _YOUNG, _SHARED, _MAPPING, _KEYING = 6.0, 60.0, 3.0, 60.0, 420.0
"""Seconds: for which what may have been made is looked for, a list may lack what was, one list serves everybody, what
runs may have no port yet, Vast.ai's own sshd may not have our host key yet."""


@settings.settings_named
@dataclass(frozen=True)
class VastAI:
    """Rent from Vast.ai.

    Args:
        api_key: from https://cloud.vast.ai/manage-keys/; None is $VAST_API_KEY, or what `vastai set api-key` wrote.
        min_reliability: of a machine's host, from 0 to 1, as Vast.ai reckons it.
        verified: only machines that Vast.ai has tested.
        bid: what is bid for an interruptible machine, times the least that would do now.
        image: the Docker image that machines start from, with sh, base64, gzip and apt, apk or dnf (or an sshd); None
            is Python's own of this client's version. An Image's base= comes first.
        disk_gb: of a machine whose pool asks for no disk.
        ssh: "any" goes to a machine's own port, and by Vast.ai's proxy to machines without one; "direct" leaves these
            out; "proxy" goes to all by the proxy. Each machine shows the host key that it was given, either way.
    """

    api_key: str | None = field(default=None, repr=False)
    min_reliability: float = 0.98
    verified: bool = True
    bid: float = 1.1
    image: str | None = None
    disk_gb: int = 32
    ssh: str = "any"
    name: ClassVar[str] = "vastai"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, spot=True)
    offers_keep: ClassVar[float] = 60.0
    ending: ClassVar[float] = 20.0
    loading: ClassVar[float] = 900.0

    def __post_init__(self) -> None:
        settings.plain(self, api_key=str, min_reliability=float, bid=float, disk_gb=float, image=str, verified=bool)
        if not 0 <= self.min_reliability <= 1:
            raise UsageError(f"min_reliability is a share from 0 to 1, such as 0.98, not {self.min_reliability!r}")
        if not (self.bid >= 1 and self.disk_gb >= 1):
            raise UsageError(f"bid, a factor, and disk_gb are 1 or more, not {self.bid!r} and {self.disk_gb!r}")
        settings.settle(self, _catalog.FACTS["settings"], {"ssh": ("any", "direct", "proxy")})

    def offers(self, need: Need) -> Iterable[Offer]:
        """Each machine that could serve, but for those that failed lately."""
        out, disk = blocklist.known(self.name), need.disk_gb or self.disk_gb
        for market in need.markets:
            asked = _catalog.question(need, market, disk, self.min_reliability, self.verified, self.ssh)
            found = (
                self._account.ask("POST", "/api/v0/bundles/", what="a search", json=asked)["offers"] if asked else ()
            )
            there = [each for each in found if each["machine_id"] not in out]
            yield from filter(None, (_catalog.offer(each, market, disk, self.bid, self.ssh) for each in there))

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """One machine, as an offer is one: of the first rank. What the order has made already is found by its label."""
        return [replace(each, offer=offer) for each in self._ordered(order) or [self._create(offer, order)]]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return [*_catalog.ours(self._account.instances(), pool)]

    def access(self, instance: Instance) -> Access:
        """ssh to its mapped port, or by the proxy, once its image is there. Raises why it never will be, if so."""
        mapped = partial(retry.patiently, partial(self._address, instance), _MAPPING, "unmapped")
        host, port = retry.patiently(mapped, self.loading, "pending")
        keying = _KEYING if instance.detail["proxied"] else 0.0
        return ssh_machine.access(instance, host, user="root", port=port, keying=keying)

    def terminate(self, instances: Sequence[Instance]) -> None:
        there = lambda: {str(each["id"]) for each in self._account.instances()}  # noqa: E731
        young = {each.id for each in instances if time.time() - float(each.detail["made"]) < _YOUNG}
        ssh_machine.end_all(instances, self._account.destroy, there, self.ending, young)

    def renew(self, pool: str, until: datetime) -> None:
        def write(each: Instance) -> None:
            label = f"{each.detail['label'].rpartition('=')[0]}={tags.stamp(until)}"
            self._account.quietly("PUT", each.id, {"label": label})

        each_done(write, self.instances(pool=pool), "not all labels could be renewed")

    def rejected(self, instance: Instance, why: Exception) -> None:
        """One that never answered, or whose sshd, container, GPUs or driver are not as they should be, is left out."""
        between = isinstance(why, errors.HostKeyMismatch) and not instance.detail["proxied"]
        silent = isinstance(why, errors.ConnectionLost) and not (between or isinstance(why, errors.NodeInterrupted))
        broken = isinstance(why, errors.CapacityError) and why.code in ("broken", "offline", "pending", "unmapped")
        if silent or broken or getattr(why, "step", "") in ("health", "nvidia"):
            blocklist.note(self.name, instance.detail["machine"], str(why))

    def check(self) -> Iterable[Finding]:
        """Nothing is searched for, as searches are counted."""
        out = lambda: ", ".join(f"{id}: {why}" for id, why in blocklist.known(self.name).items()) or "none"  # noqa: E731
        return preflight.findings({"ssh here": preflight.openssh, "credentials": self._who, "machines left out": out})

    # --- how -------------------------------------------------------------------------------------------------

    @property
    def _account(self) -> _api.Account:
        return _api.account(self.api_key)

    def _who(self) -> str:
        user: dict[str, Any] = self._account.ask("GET", "/api/v0/users/current/", what="to say who you are")
        return f"{user.get('username') or user.get('id')}, with ${float(user.get('credit') or 0):.2f} of credit"

    def _ordered(self, order: Order) -> list[Instance]:
        """What it has made and may be of use; what is of none is destroyed."""
        of_it = [e for e in self.instances(pool=order.pool) if e.token == order.token and e.rank in order.ranks]
        for each in of_it:
            if each.state == "ending":
                self._account.destroy(each.id)
        return [each for each in of_it if each.state != "ending"]

    def _create(self, offer: Offer, order: Order) -> Instance:
        """Its ask can be taken once, by anybody; a reply that was lost is looked for in a list that may lag."""
        account, machine = self._account, offer.detail["machine"]
        what = f"to rent {offer.instance_type} in {offer.region} ({offer.zone})"
        if why := blocklist.known(self.name).get(machine):
            raise account.error(what, "failed_lately", why)
        image = order.need.bases.get(self.name) or self.image or _catalog.IMAGE
        told = _catalog.told(offer, order, image, account.base)
        refused: ProviderError | None = None
        order.asking(order.ranks[0])
        try:
            made = account.once("PUT", f"/api/v0/asks/{offer.detail['ask']}/", what=what, json=told)
            if not made.get("new_contract"):
                raise account.error(what, *_api.said(502, made))
            ids = [made["new_contract"]]
        except (NoAnswer, OfferGone) as e:
            return retry.patiently(partial(self._made, order, e), _LAG)
        except ProviderError as e:
            refused, ids = e, re.findall(r"\(new_contract (\d+)\)", e.text)
        same = {"machine_id": machine, "label": told["label"], "image_runtype": told["runtype"]}
        there = [*_catalog.ours([{**same, "id": id, "start_date": time.time()} for id in ids], order.pool)]
        order.made(*(replace(each, offer=offer) for each in there))
        if refused is not None:
            undo(self.terminate, order, there)
            raise refused
        return there[0]

    def _made(self, order: Order, error: ProviderError) -> Instance:
        """What an order made although that was the answer. Raises that if there is nothing."""
        if found := self._ordered(order):
            return found[0]
        raise error

    def _address(self, instance: Instance) -> tuple[str, int]:
        """Raises: ProviderError: "pending" until it is known, or why it never will be."""
        record = next((each for each in self._account.instances(_SHARED) if str(each["id"]) == instance.id), None)
        if record and (found := _catalog.address(record, instance.detail["proxied"])):
            return found
        gone = record is None and time.time() - float(instance.detail["made"]) > _YOUNG
        told = ("gone", "there is no such instance") if gone else _catalog.trouble(record or {})
        raise _api.REFUSALS.error(f"to keep {instance.id}", *told)
