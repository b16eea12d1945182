"""Compute Engine: machines with GPUs, or none.

API: https://cloud.google.com/compute/docs/reference/rest/v1 (read 2026-11-22). With a lifetime a machine is deleted by
Google when it is over (`maxRunDuration`). A machine that shuts itself down stops: that ends the cost of all but its
disk, which goes when the machine is deleted: by the pool, by `skypool gc`, or by itself where it has a service account.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from skypool import asking, rented, tags
from skypool.asking import at_once
from skypool.driver import undo
from skypool.errors import NoAnswer, ProviderError, RateLimitError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool.regional import chosen, each_done
from skypool_gcp import _api, billing, catalog
from skypool_gcp.catalog import _order
from skypool_gcp.compute import _asked
from skypool_gcp.compute._asked import ask, insist, look

_FACTS, _WATCH = catalog.FACTS, rented.watch(**catalog.FACTS["watch"])
_MADE, _ADDRESS, _TIDYING = 180.0, 120.0, 180.0  # seconds in which operations are through, mostly in a few
_AGAIN = 15.0  # seconds after which what was asked to end, and still runs, is asked again
_LEFT = {"disk": "disks", "firewall": "firewalls", "placement": "policies", "template": "templates"}


@dataclass(frozen=True)
class Compute:
    """Rent from Compute Engine: the verbs of `skypool.driver`, but for those of `groups` that find and renew."""

    settings: _api.Settings
    api: ClassVar[str] = "compute"
    ending: ClassVar[float] = 240.0

    def offers(self, need: Need) -> Iterable[Offer]:
        """Each type that could serve in each zone that has it and for which there is a price."""
        types = catalog.types(need)
        if not types:
            return
        zones, held, rates = set(self.zones(need.regions)), self._held(), billing.rates(self.settings)
        base = need.bases.get("gcp") or self.settings.image or ""
        models = {model for cards in catalog.pairs(need).values() for model, _ in cards}
        records, there = (
            look(self.settings, question, filter=f'name eq "({"|".join(sorted(names))})"') if names else ()
            for question, names in (("types", types), ("accelerators", models))
        )
        for ware in catalog.wares(records, there, need):
            if ware.zone in zones:
                yield from ware.offers(need, base, rates, held)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """One insert for each machine, all at once; who asks again with the same order gets the same machines.

        Where some are refused, those that are made get the first ranks, or are ended where it is to be all or none.
        """
        told = self._told(offer, order)
        order.asking(*order.ranks)
        begun = at_once(partial(self._begin, told, order), order.ranks)
        outcomes = at_once(partial(self._made, told), begun)
        made = [each for each in outcomes if not isinstance(each, Exception)]
        failed = [each for each in outcomes if isinstance(each, Exception)]
        order.made(*(replace(each, offer=offer) for each in made))
        for e in failed:
            if isinstance(e, (NoAnswer, RateLimitError)):
                raise e  # what is made is found when it is asked again
        if failed and (order.need.private_network or not made or not all(isinstance(e, ProviderError) for e in failed)):
            undo(self.terminate, order, made)
            raise next((e for e in failed if not isinstance(e, ProviderError)), failed[0])
        named = zip(made, order.ranks, strict=False)
        placed = [each if each.rank == rank else self._ranked(each, rank) for each, rank in named]
        return [replace(each, offer=offer) for each in placed]

    def access(self, instance: Instance) -> Access:
        """ssh to its public address. Raises why it is no more, if it is not."""
        inside, address = self._addresses(instance)
        made = rented.access(instance, address, user=_api.USER, booting=420.0, keying=60.0, watch=_WATCH)
        return replace(made, env=catalog.env(instance.detail["type"], 0, [inside]))

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Ask for the end of each, and look until they are gone; again where an operation came to nothing.

        Raises:
            StillRunning: which are not, and why.
        """
        zones, asked = {each.id: each.detail["zone"] for each in instances}, dict[str, float]()

        def destroy(id_: str) -> None:
            asked[id_] = time.monotonic()
            again = partial(ask, self.settings, "delete", f"to end {id_}", zone=zones[id_], name=id_)
            asking.patiently(again, 30.0, "resourceNotReady")

        def there() -> list[str]:
            seen = look(self.settings, "instances", filter=f"labels.{tags.POOL}:*")
            runs = {each.name for each in seen if each.status in _FACTS["states"]} & asked.keys()
            for id_ in (each for each in runs if time.monotonic() > asked[each] + _AGAIN):
                asking.quietly(partial(destroy, id_), "resourceNotReady")
            return [each.name for each in seen]

        rented.end_all(instances, destroy, there, self.ending)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Disks that no machine has, firewall rules, placement policies and, of slices, templates."""
        return list(self._left(pool))

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove them all, at once."""
        each_done(self._remove, leftovers, "not all that pools left behind could be removed")

    def check(self) -> Iterable[Finding]:
        """Of the project; permissions only as far as it takes to look."""
        project, network = partial(look, self.settings, "project"), self.settings.network
        mine = partial(_asked.mine, self.settings, "instances", None)
        questions = asking.basics(lambda: project().name, self._date, self.settings.ssh_from)
        questions |= {f"network {network}": lambda: look(self.settings, "network", network=network).name}
        questions |= {"zones": lambda: len(self.zones(())), "machines of skypool": lambda: len(list(mine()))}
        questions["prices"] = lambda: billing.told(self.settings)
        paths = [self.settings.image] if self.settings.image else _FACTS["images"].values()
        questions |= {f"image {each}": partial(self._image_name, each) for each in paths}
        questions |= {f"quota {each}": partial(self._quota, each, project) for each in _FACTS["checked"]}
        return asking.findings({f"Compute Engine: {what}": question for what, question in questions.items()})

    # --- what there is ---------------------------------------------------------------------------------------

    def zones(self, patterns: Sequence[str]) -> list[str]:
        up = [each.name for each in look(self.settings, "zones") if each.status == "UP"]
        return chosen(up, self.settings.zones or (), [p for each in patterns for p in (each, f"{each}-?")])

    def _held(self) -> list[Any] | None:
        """The reservations to run in, one for each zone; None where none is named."""
        if self.settings.reservation is None:
            return None
        found: list[Any] = look(self.settings, "reservations", filter=f'name eq "{self.settings.reservation}"')
        if not found:
            text = f"the project has no reservation {self.settings.reservation}"
            raise _api.REFUSALS.error("a reservation", "NoReservation", text)
        return found

    def _date(self) -> str:
        base = _api.endpoint("compute") or "https://compute.googleapis.com"
        head = _api.sdk("requests").head
        return str(_api.asked("the time", lambda: head(base, timeout=10).headers["Date"]))

    def _quota(self, metric: str, project: Any) -> str:
        for each in project().quotas:
            if each.metric == metric:
                text = f"{each.limit:g} at once, {each.usage:g} in use"
                if each.limit <= each.usage:
                    raise _api.REFUSALS.error(metric, "QUOTA_EXCEEDED", text, project=self.settings.billed())
                return text
        return "not told"

    def image(self, path: str) -> Any:
        question, whose, name = catalog.parsed(_FACTS["images"].get(path, path))
        return look(self.settings, question, whose=whose, image=name)

    def _image_name(self, path: str) -> str:
        return str(self.image(path).name)

    def machine(self, record: Any, said: Mapping[str, str]) -> Instance:
        zone = record.zone.rpartition("/")[2]
        state: Any = _FACTS["states"].get(record.status, "ending")
        detail = {"api": self.api, "zone": zone, "region": zone.rpartition("-")[0]}
        detail["type"] = record.machine_type.rpartition("/")[2]
        started = getattr(record, "last_start_timestamp", "")
        since = datetime.fromisoformat(started).timestamp() if started and record.status == "RUNNING" else None
        return replace(tags.instance("gcp", record.name, said, 0, state, detail), billed_from=since)

    def _addresses(self, instance: Instance) -> tuple[str, str]:
        """Its own and its public one."""

        def see() -> tuple[str, str]:
            where = {"zone": instance.detail["zone"], "name": instance.id}
            tell = partial(ask, self.settings, "instance", f"to tell of {instance.id}", **where)
            record = asking.quietly(tell, "notFound")
            if record is None or record.status not in _FACTS["states"]:
                status = record.status if record is not None else "gone"
                text = f"it is {status}: taken back, or its lease was over"
                raise _api.REFUSALS.error(f"to keep {instance.id}", status if record is not None else "STOPPED", text)
            for ends in catalog.addresses(record):
                return ends
            raise ProviderError(f"{instance.id} has no public address yet", provider="gcp", code="pending")

        return asking.patiently(see, _ADDRESS, "pending")

    # --- making ----------------------------------------------------------------------------------------------

    def _told(self, offer: Offer, order: Order) -> dict[str, Any]:
        """What all machines of an order are told; what they have in common is made."""
        told = _order.told(self.settings, offer, order, self.image(offer.detail["image"]))
        self.let_in(order)
        return told | {"policies": self._together(offer, order) if order.need.private_network else None}

    def let_in(self, order: Order) -> None:
        """Firewall rules for the machines of a session: port 22 for who may log in, all among a gang, and no more."""
        networks, said = asking.networks(self.settings.ssh_from), _asked.described(_order.shared(order))
        rules = ["let ssh in", "let nobody else in", *(["let each other in"] if order.need.private_network else [])]

        def make(rule: str) -> None:
            values = {"tag": _api.tag(order), "network": self.settings.path(), "networks": networks}
            name = _api.name(order.pool, tags.session(order), rule.replace(" ", "-"))
            insist(self.settings, _MADE, rule, f"the firewall rule {name}", name=name, description=said, **values)

        for outcome in at_once(make, rules):
            if isinstance(outcome, Exception):
                raise outcome  # one says enough, and a launch raises errors that failover knows

    def _together(self, offer: Offer, order: Order) -> list[str] | None:
        """The policy that places a gang's machines close to each other, where their type takes one."""
        if catalog.family(offer.instance_type) not in _FACTS["placed"]:
            return None
        name, where = _api.name(order.pool, tags.session(order), offer.region), {"region": offer.region}
        said = _asked.described(_order.shared(order))
        insist(self.settings, _MADE, "place together", f"the placement {name}", name=name, description=said, **where)
        return [f"projects/{self.settings.billed()}/regions/{offer.region}/resourcePolicies/{name}"]

    def _begin(self, told: Mapping[str, Any], order: Order, rank: int) -> tuple[str, Any]:
        """Ask for a machine; it is made once whoever asks again, by its name and by the id of the request."""
        said, name = tags.tags(replace(order, ranks=(rank,))), _api.name(order.pool, order.token, str(rank))
        own = _order.scripts(self.settings, order, told["zone"], f"instances/{name}") | {"name": name}
        id_ = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{told['zone']}/{name}"))
        insert = partial(ask, self.settings, "insert", id=id_, labels=_api.labels(said), **{**told, **own})
        return name, asking.patiently(insert, 30.0)

    def _made(self, told: Mapping[str, Any], begun: tuple[str, Any] | Exception) -> Instance:
        """The machine that was asked for, once that is through: only then it is known whether there is one."""
        if isinstance(begun, Exception):
            raise begun
        name, operation = begun
        over = _asked.done(self.settings, operation, told["what"], _MADE)
        try:
            record = look(self.settings, "instance", what=told["what"], zone=told["zone"], name=name)
        except ProviderError as e:
            if e.code == "notFound" and over:
                raise _api.REFUSALS.error(told["what"], "STOPPED", "what this order rented has ended already") from e
            raise
        return self.machine(record, _api.said(record.labels))

    def _ranked(self, instance: Instance, rank: int) -> Instance:
        self.label(instance.id, instance.detail["zone"], {tags.RANKS: tags.packed([rank])})
        return replace(instance, rank=rank)

    def label(self, id_: str, zone: str, said: Mapping[str, str]) -> None:
        """Change some of its labels; read again where somebody else has changed them meanwhile."""

        def change() -> None:
            record = look(self.settings, "instance", zone=zone, name=id_)
            labels = {**record.labels, **_api.labels(said)}
            about = {"fingerprint": record.label_fingerprint, "labels": labels}
            ask(self.settings, "label", f"to label {id_}", zone=zone, name=id_, **about)

        asking.quietly(partial(asking.patiently, change, 30.0, "conditionNotMet"), "notFound")  # it has ended meanwhile

    # --- what else there is ----------------------------------------------------------------------------------

    def _left(self, pool: str | None) -> Iterator[Leftover]:
        for kind, question in _LEFT.items():
            for each, said in _asked.mine(self.settings, question, pool):
                if kind == "disk" and each.users:
                    continue
                zone, region = (getattr(each, name, "").rpartition("/")[2] for name in ("zone", "region"))
                detail = {"api": self.api, "zone": zone}
                yield tags.leftover("gcp", kind, each.name, said, region or zone.rpartition("-")[0], detail)

    def _remove(self, leftover: Leftover) -> None:
        where = {"name": leftover.id, "zone": leftover.detail["zone"], "region": leftover.region}
        insist(self.settings, _TIDYING, f"remove {leftover.kind}", f"to remove {leftover.id}", **where)
