"""Rents TPU7x slices, which consist of Compute Engine's machines. Cloud TPU's API does not have this generation.

https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice (read 2026-11-22). A slice of one host
is a machine like any other, and `compute` rents it. A slice of several hosts is a managed instance group. Its machines
are made all at once or not at all. It needs an instance template, and a workload policy that says how the chips are
connected.

If there is no room for a group, it waits until it is deleted. A group replaces no machines: if one is lost, the slice
ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from skypool.accelerators import tables
from skypool.drivers import tags
from skypool.drivers.contract import Abilities, Answers
from skypool.drivers.regional import each_done
from skypool.errors import CapacityError, UsageError
from skypool.model import Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api as google
from skypool_gcp import billing, catalog
from skypool_gcp.compute import Compute, _asked, _requests
from skypool_gcp.compute._asked import ComputeApi, insist, look
from skypool_gcp.groups import _catalog
from skypool_gcp.tpu import Tpu

if TYPE_CHECKING:
    from google.cloud import compute_v1

_MADE = 180.0
"""Seconds within which a template or a policy must be made."""

_TYPE = "type"
"""The key under which a group's description holds the type of the slice, beside the tags."""


@dataclass(frozen=True)
class Groups(Tpu):
    """The part of the driver for TPU slices on Compute Engine. It overrides what differs from Cloud TPU's slices.

    It also finds and renews all other machines of Compute Engine, because one list contains them all.
    """

    api: ClassVar[str] = "groups"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, private_network=True, spot=True)
    passing: ClassVar[Sequence[str]] = ("resourceNotReady", "resourceInUseByAnotherResource")

    def offers(self, need: Need) -> Answers[Offer]:
        """Return offers of slices. Slices of one host are among them, although `compute` rents these.

        Requests are only sent if the need names TPU7x.

        Raises:
            UsageError: A zone has the machine type, but no price is known.
        """
        kinds = _catalog.wanted(need)
        if not kinds:
            return Answers()
        types = sorted({tables.slices()[kind].machine_type for kind in kinds})
        records = look(self._machines.machine_types, f'name eq "({"|".join(types)})"')
        base = need.bases.get("gcp") or self.settings.image or ""
        zones = Compute(self.settings).zones(need.regions)
        rates = billing.rates(self.settings)
        sold = Answers(_catalog.offers(records, zones, need, base, rates), records.lacks)
        if records and not sold:
            raise UsageError(
                f"no price of {', '.join(kinds)} is known, so it is not rented; let skypool read Google's "
                "price catalogue: `gcloud services enable "
                f"cloudbilling.googleapis.com`{f' ({rates.why})' if rates.why else ''}"
            )
        return sold

    def renew(self, pool: str, until: datetime) -> None:
        """Write the time until which a pool is needed into the labels of all its machines of Compute Engine.

        A group that has no machines yet is not changed, because its recorded time is after the longest wait.
        Firewall rules and other resources without labels count as needed while the pool has machines.
        """
        each_done(
            lambda each: Compute(self.settings).label(each.name, _zone(each), {tags.UNTIL: tags.stamp(until)}),
            [each for each, _ in _asked.labelled(self._machines.instances, pool)],
            "Compute Engine: not all labels could be renewed",
        )

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return all leftovers of Compute Engine, of one pool or of all pools of this user."""
        return Compute(self.settings).leftovers(pool=pool)

    def check(self) -> Iterable[Finding]:
        """Return an empty list, because `compute` checks everything that is needed here."""
        return []

    @property
    def _machines(self) -> ComputeApi:
        """Return the API of Compute Engine for this project."""
        return ComputeApi(self.settings)

    # --- making ----------------------------------------------------------------------------------------------

    def _let_in(self, offer: Offer, order: Order) -> None:
        """Make the firewall rules for a slice's hosts, which may always reach each other."""
        Compute(self.settings).let_in(replace(order, need=replace(order.need, private_network=True)))

    def _queued(self, offer: Offer, order: Order, nodes: Sequence[int]) -> compute_v1.Operation | None:
        """Make the policy and the template of a group, then request the group.

        Returns:
            The operation; None if the group exists already.
        """
        settings = self.settings
        name = self._slice(order, nodes)
        slice = tables.slices()[offer.instance_type]
        said = self._tagged(order, nodes)

        policy = _requests.workload_policy(order, name=name, topology=slice.topology)
        what = f"the workload policy {name}"
        insist(self._machines, what, partial(self._machines.insert_policy, offer.region, policy, what), _MADE)

        image = Compute(settings).image(catalog.machine_of(offer).image)
        _requests.check_processor(image, offer)
        template = _requests.template(
            settings,
            offer,
            order,
            name=name,
            image=image,
            labels=google.labels({**said, google.SLICE: name}),
            scripts=_requests.scripts(settings, order, offer.zone, f"instanceGroupManagers/{name}"),
        )
        what = f"{offer.instance_type} in {offer.zone}"
        insist(self._machines, what, partial(self._machines.insert_template, template, what), _MADE)

        group = _requests.group(
            settings,
            offer,
            name=name,
            hosts=slice.vms,
            description=google.description({**said, _TYPE: slice.type}),
        )
        return self._machines.insert_group(offer.zone, group, _requests.request_id(offer.zone, name), what)

    def _look(self, zone: str, slice: str, operation: Any = None) -> str:
        """Return the state of a slice's group, with the name that Cloud TPU has for such a state.

        Args:
            zone: The zone of the slice.
            slice: The name of the slice and its group.
            operation: The operation that creates the group; None if that has ended.

        Raises:
            ProviderError: The slice has failed or is gone, or found no room within the setting `queue`.
        """
        what = f"to make {slice} in {zone}"
        over = _asked.done(self._machines, operation, what, 0.0)
        group, machines = self._seen(zone, slice)
        if group is None and not over:
            return "CREATING"
        for each in machines:
            if each.status not in catalog.STATES:
                raise google.REFUSALS.error(what, "STOPPED", f"a host of the slice is {each.status}")
        if group is None:
            raise google.REFUSALS.error(what, "STOPPED", "the slice is gone")
        if len(machines) >= group.target_size:
            return "ACTIVE"
        for refusal in group.status.bulk_instance_operation.last_progress_check.error.errors:
            error = google.REFUSALS.error(what, refusal.code, refusal.message, project=self.settings.billed())
            if not isinstance(error, CapacityError) or _age(group) > self.settings.queue:
                raise error
            return "WAITING_FOR_RESOURCES"
        return "CREATING"

    def _ends(self, zone: str, slice: str) -> tuple[str, list[catalog.Ends]]:
        """Return the type of a slice and the addresses of its hosts in order.

        The addresses are empty while a host is not running. The type is "" if the order of the hosts is unknown: libtpu
        then finds it by itself. Returns ("", []) if there is no group.
        """
        group, machines = self._seen(zone, slice)
        if group is None:
            return "", []
        kind = google.tags_in(group.description).get(_TYPE, "") if _catalog.numbered(machines) else ""
        running = [each for each in _catalog.in_order(machines) if each.status == "RUNNING"]
        ends = [catalog.addresses(each)[:1] for each in running]
        if len(ends) != group.target_size or not all(ends):
            return kind, []
        return kind, [first for (first,) in ends]

    # --- finding, ending -------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """Yield all machines of Compute Engine, of one pool or of all pools of this user, in all zones.

        Slices are found by their groups, and by the labels of their machines.
        """
        groups = {each.name: (each, said) for each, said in _asked.described(self._machines.groups, pool)}
        machines: dict[str, list[tuple[compute_v1.Instance, dict[str, str]]]] = {}
        for each, said in _asked.labelled(self._machines.instances, pool):
            machines.setdefault(said.get(google.SLICE, ""), []).append((each, said))
        for record, said in machines.pop("", ()):
            yield Compute(self.settings).machine(record, said)
        for slice in {**groups, **machines}:
            group, said = groups.get(slice, (None, {}))
            hosts = [each for each, _ in machines.get(slice, ())]
            for _, labels in machines.get(slice, ())[:1]:
                said = said | labels
            size = len(tags.unpacked(said.get(tags.NODES, "")))
            age = _age(group) if group is not None else 0.0
            zone = _zone(group if group is not None else hosts[0])
            yield from self._hosts(zone, slice, said, _catalog.state(group, hosts, size, age))

    def _seen(self, zone: str, slice: str) -> tuple[compute_v1.InstanceGroupManager | None, list[compute_v1.Instance]]:
        """Return (group, machines) of a slice. The managed instance group is None if it does not exist."""
        group = look(self._machines.group, zone, slice)
        return group, look(self._machines.instances, f"labels.{google.SLICE}={slice}")

    def _ask_to_terminate(self, zone: str, slice: str) -> bool:
        """Request the end of a slice if it exists. Return True if any part of it still existed.

        Deleting a group deletes its machines. Without a group, machines are deleted one by one.
        """
        group, machines = self._seen(zone, slice)
        if group is not None:
            self._machines.delete_group(zone, slice, f"to end {slice}")
            return True
        for each in machines:
            self._machines.delete_instance(zone, each.name, f"to end {each.name}")
        return bool(machines)


def _zone(record: compute_v1.Instance | compute_v1.InstanceGroupManager) -> str:
    """Return the zone of a machine or a group."""
    return google.last_part(record.zone)


def _age(group: compute_v1.InstanceGroupManager) -> float:
    """Return the seconds since a group was created."""
    return (datetime.now(UTC) - datetime.fromisoformat(group.creation_timestamp)).total_seconds()
