"""TPU7x: slices of machines of Compute Engine, which the API of Cloud TPU does not have.

https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice (read 2026-11-22). A slice of one host
is a machine like any other, and `compute` rents it. One of several is a managed instance group, made all at once or not
at all, with a template of its machines and a workload policy that says how their chips are connected. A group that
there is no room for waits for it until it is deleted. It makes no machine anew: with one that is lost the slice ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, ClassVar

from skypool.accelerators import tables
from skypool.drivers import tags
from skypool.drivers.contract import Abilities
from skypool.drivers.regional import each_done
from skypool.errors import CapacityError, UsageError
from skypool.model import Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api as google
from skypool_gcp import billing, catalog
from skypool_gcp.catalog import _order
from skypool_gcp.compute import Compute, _asked
from skypool_gcp.compute._asked import ask, insist, look
from skypool_gcp.groups import _catalog
from skypool_gcp.tpu import Tpu

_MADE = 180.0  # seconds in which a template and a policy are made
_TYPE = "type"  # in a group's description, beside its tags: which slice it is


@dataclass(frozen=True)
class Groups(Tpu):
    """The slices of one project: the verbs of a driver, as far as they are not those of Cloud TPU's slices.

    All that there is of Compute Engine is found and renewed here, single machines too: one list has them all.
    """

    api: ClassVar[str] = "groups"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, private_network=True, spot=True)
    passing: ClassVar[Sequence[str]] = "resourceNotReady", "resourceInUseByAnotherResource"

    def offers(self, need: Need) -> Iterable[Offer]:
        """Slices, and machines of one host for `compute`; nothing who asks for no TPU7x.

        Raises:
            UsageError: a zone has them, and no price of them is known.
        """
        if not (kinds := _catalog.wanted(need)):
            return []
        rent, types = Compute(self.settings), sorted({tables.slices()[kind].machine_type for kind in kinds})
        records = look(self.settings, "types", filter=f'name eq "({"|".join(types)})"')
        base, zones = need.bases.get("gcp") or self.settings.image or "", rent.zones(need.regions)
        sold = list(_catalog.offers(records, zones, need, base, rates := billing.rates(self.settings)))
        if records and not sold:
            raise UsageError(
                f"no price of {', '.join(kinds)} is known, and what has none is not rented: have Google's catalogue "
                f"tell it: `gcloud services enable cloudbilling.googleapis.com`{f' ({rates.why})' if rates.why else ''}"
            )
        return sold

    def renew(self, pool: str, until: datetime) -> None:
        """Of all machines; a group that has none yet says long enough, and what has no labels lasts as long as they."""
        each_done(
            lambda each: Compute(self.settings).label(each.name, _zone(each), {tags.UNTIL: tags.stamp(until)}),
            [each for each, _ in _asked.mine(self.settings, "instances", pool)],
            "not all labels could be renewed",
        )

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """All of Compute Engine's."""
        return Compute(self.settings).leftovers(pool=pool)

    def check(self) -> Iterable[Finding]:
        """Nothing that is not `compute`'s."""
        return []

    # --- making ----------------------------------------------------------------------------------------------

    def _let_in(self, offer: Offer, order: Order) -> None:
        Compute(self.settings).let_in(replace(order, need=replace(order.need, private_network=True)))

    def _queued(self, offer: Offer, order: Order, ranks: Sequence[int]) -> Any:
        """The operation of a group's create, once what it needs is made; None where it is there already."""
        own, slice, kind = self.settings, self._slice(order, ranks), tables.slices()[offer.instance_type]
        said, shared, project = self._tagged(order, ranks), _asked.described(_order.shared(order)), own.billed()
        region = f"projects/{project}/regions/{offer.region}"
        connected = {"region": offer.region, "topology": kind.topology, "description": shared}
        insist(own, _MADE, "connect", f"the workload policy {slice}", name=slice, **connected)
        told = _order.told(own, offer, order, Compute(own).image(offer.detail["image"]))
        told |= _order.scripts(own, order, offer.zone, f"instanceGroupManagers/{slice}") | {
            "name": slice, "description": shared, "machine": kind.machine_type, "disk": told["disk"].rpartition("/")[2],
            "subnetwork": own.subnetwork and f"{region}/subnetworks/{own.subnetwork}",
            "labels": google.labels({**said, google.SLICE: slice}),
        }  # fmt: skip
        what = told.pop("what")
        insist(own, _MADE, "make template", what, **told)
        values = {
            "name": slice, "zone": offer.zone, "hosts": kind.vms, "base": f"{slice}-w-###[1]",
            "description": _asked.described({**said, _TYPE: kind.type}),
            "template": f"projects/{project}/global/instanceTemplates/{slice}",
            "topology": f"{region}/resourcePolicies/{slice}",
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{offer.zone}/{slice}")),
        }  # fmt: skip
        return ask(own, "make group", what, **values)

    def _look(self, zone: str, slice: str, operation: Any = None) -> str:
        """What its group does, in the words of Cloud TPU. Raises ProviderError: it has failed, or is gone."""
        what, own = f"to make {slice} in {zone}", self.settings
        over = _asked.done(own, operation, what, 0.0)
        group, machines = self._seen(zone, slice)
        if group is None and not over:
            return "CREATING"
        lost = [each.status for each in machines if each.status not in catalog.FACTS["states"]]
        if group is None or lost:
            raise google.REFUSALS.error(what, "STOPPED", f"a host of it is {lost[0]}" if lost else "it is gone")
        if len(machines) >= group.target_size:
            return "ACTIVE"
        for each in group.status.bulk_instance_operation.last_progress_check.error.errors:
            error = google.REFUSALS.error(what, each.code, each.message, project=own.billed())
            if not isinstance(error, CapacityError) or _age(group) > own.queue:
                raise error
            return "WAITING_FOR_RESOURCES"
        return "CREATING"

    def _ends(self, zone: str, slice: str) -> tuple[str, list[tuple[str, str]]]:
        """Without a type where nobody says which host is which: libtpu is left to find that out by itself then."""
        group, machines = self._seen(zone, slice)
        told = _asked.read(group.description) if group is not None and _catalog.numbered(machines) else {}
        ends = [catalog.addresses(each)[:1] for each in _catalog.in_order(machines) if each.status == "RUNNING"]
        there = group is not None and len(ends) == group.target_size and all(ends)
        return told.get(_TYPE, ""), [each[0] for each in ends] if there else []

    # --- finding, ending -------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """By groups, and by labels of machines, in all zones."""
        groups = {each.name: (each, said) for each, said in _asked.mine(self.settings, "groups", pool)}
        machines: dict[str, list[tuple[Any, dict[str, str]]]] = {}
        for each, said in _asked.mine(self.settings, "instances", pool):
            machines.setdefault(said.get(google.SLICE, ""), []).append((each, said))
        yield from (Compute(self.settings).machine(*each) for each in machines.pop("", ()))
        for slice in {**groups, **machines}:
            group, said = groups.get(slice, (None, {}))
            hosts = [each for each, _ in machines.get(slice, ())]
            said = said | next((dict(labels) for _, labels in machines.get(slice, ())), {})
            size, age = len(tags.unpacked(said.get(tags.RANKS, ""))), _age(group) if group is not None else 0.0
            state = _catalog.state(group, hosts, size, age)
            yield from self._hosts(_zone(group if group is not None else hosts[0]), slice, said, state, {})

    def _seen(self, zone: str, slice: str) -> tuple[Any, list[Any]]:
        """The group of a slice, None where there is none, and its machines."""
        group = look(self.settings, "group", zone=zone, name=slice)
        return group, look(self.settings, "instances", filter=f"labels.{google.SLICE}={slice}")

    def _asked_to_end(self, zone: str, slice: str) -> bool:
        """Whether anything of it is still there, which was asked to end then: machines go with their group."""
        group, machines = self._seen(zone, slice)
        if group is not None:
            ask(self.settings, "delete group", f"to end {slice}", zone=zone, name=slice)
        for each in machines if group is None else ():
            ask(self.settings, "delete", f"to end {each.name}", zone=zone, name=each.name)
        return group is not None or bool(machines)


def _zone(record: Any) -> str:
    return str(record.zone.rpartition("/")[2])


def _age(group: Any) -> float:
    """Seconds since it was made."""
    return (datetime.now(UTC) - datetime.fromisoformat(group.creation_timestamp)).total_seconds()
