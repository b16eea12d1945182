"""Rents TPU7x slices, whose hosts are machines of Compute Engine. Cloud TPU's API does not have this generation.

A slice of one host is a machine like any other, and `skypool_gcp.compute` rents it. A slice of several hosts is a
managed instance group: a group of machines that Google creates all at once or not at all. The group needs an instance
template, from which its machines are created. It also needs a workload policy, which says how the chips are connected.
Documentation: https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice (read 2026-11-22).

If Google has no room for a group, the group waits for room until somebody deletes the group. A group does not replace
lost machines: if a machine is lost, the slice ends.

Words of this package:

- slice: a group of TPU hosts that start, are billed and end together. Each host is one `Instance`.
- operation: Google's record of a change in progress.
- part: a class that does a part of the driver's work: `Compute`, `Tpu`, and `Groups` in this package.
- need, offer, order: the requirements of a node, a type of slice with zone, market and price, and the request to rent
  slices for nodes of a pool (`skypool.model`). A node is a rented host of a pool; its node number is its number there.
- In arguments: `nodes` are the node numbers of a slice's hosts. `said` are skypool's tags of a slice, as a dict.
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
from skypool.drivers.retry import quietly
from skypool.errors import CapacityError, UsageError
from skypool.model import Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api as google
from skypool_gcp import catalog, list_prices
from skypool_gcp.compute import Compute, _client, _requests
from skypool_gcp.compute._client import ComputeApi, insist, look
from skypool_gcp.tpu import Tpu
from skypool_gcp.tpu7x import _catalog

if TYPE_CHECKING:
    from google.cloud import compute_v1

_MADE = 180.0
"""Seconds that the creation of a template or a policy may take."""

_TYPE = "type"
"""The key of the slice's type in a group's description, which is a JSON object with the tags and this type."""


@dataclass(frozen=True)
class Groups(Tpu):
    """The part of the Google Cloud driver for TPU7x slices, whose hosts are machines of Compute Engine.

    This class inherits from `Tpu`, and overrides the requests that differ between Compute Engine and Cloud TPU. One
    request lists all machines of Compute Engine. So this part lists the machines of the part `compute`, too, and renews
    the time until which they are needed. All methods block.
    """

    api: ClassVar[str] = "groups"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=True, private_network=True, spot=True)
    passing: ClassVar[Sequence[str]] = ("resourceNotReady", "resourceInUseByAnotherResource")

    def offers(self, need: Need) -> Answers[Offer]:
        """Return offers of TPU7x slices. Slices of one host are included, although the part `compute` rents them.

        If the need names no TPU7x, the result is empty and no request is sent. If a zone does not answer, its offers
        are left out, a RuntimeWarning is issued, and `lacks` of the result says that offers are missing.

        Raises:
            UsageError: Google has TPU7x, but not in the zones that the user chose, or without a known price. Or the
                project may not use a zone in the settings. Or the user's image does not have the form of an image's
                path.
            ProviderError: Google refused a request, or did not answer.
        """
        kinds = _catalog.wanted(need)
        if not kinds:
            return Answers()
        types = sorted({tables.slices()[kind].machine_type for kind in kinds})
        records = look(self._machines.machine_types.list, f'name eq "({"|".join(types)})"')
        base = need.bases.get("gcp") or self.settings.image or ""
        zones = Compute(self.settings).zones(need.regions)
        rates = list_prices.rates(self.settings)
        sold = Answers(_catalog.offers(records, zones, need, base, rates), records.lacks)
        if records and not sold:
            why, advice = "has none there", "choose other zones, another market or another TPU"
            if rates.why:
                why = f"could not be read ({rates.why})"
                advice = "choose other zones, or enable its API: `gcloud services enable cloudbilling.googleapis.com`"
            raise UsageError(
                f"{', '.join(kinds)} cannot be offered: either the chosen zones do not have this TPU, or no price is "
                f"known because Google's price catalogue {why}; {advice}"
            )
        return sold

    def renew(self, pool: str, until: datetime) -> None:
        """Record in the labels of all machines of a pool on Compute Engine until when the pool is needed.

        A TPU slice that has no machines yet is not changed: its description got a late enough time when the slice was
        requested. Firewall rules and other resources without labels count as needed while the pool has machines.

        Raises:
            ProviderError: The labels of a machine could not be written.
            ErrorGroup: The labels of several machines could not be written, for different reasons.
        """
        each_done(
            lambda each: Compute(self.settings).label(each.name, _zone(each), {tags.UNTIL: tags.stamp(until)}),
            [each for each, _ in _client.labelled(self._machines.instances, pool)],
            "Compute Engine: the labels of some machines could not be changed",
        )

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return all resources that this user's pools left in Compute Engine, such as disks and firewall rules.

        Raises:
            ProviderError: A list could not be read.
        """
        return Compute(self.settings).leftovers(pool=pool)

    def check(self) -> Iterable[Finding]:
        """Return []: this part needs no checks of its own, because those of the part `compute` cover it."""
        return []

    def prove_creates(self) -> Iterable[Finding]:
        """Return []: this part sends no requests of its own, because those of the part `compute` show the same."""
        return []

    @property
    def _machines(self) -> ComputeApi:
        """A new client object for the requests to Compute Engine, for this driver's settings."""
        return ComputeApi(self.settings)

    # --- making ----------------------------------------------------------------------------------------------

    def _let_in(self, offer: Offer, order: Order) -> None:
        """Create the firewall rules for a slice's hosts, which reach each other on all ports. Wait for the rules."""
        Compute(self.settings).let_in(replace(order, need=replace(order.need, private_network=True)))

    def _queued(self, offer: Offer, order: Order, nodes: Sequence[int]) -> compute_v1.Operation | None:
        """Request the instance group of a slice, and return the operation. Create policy and template before it."""
        settings = self.settings
        name = self._slice(order, nodes)
        slice = tables.slices()[offer.instance_type]
        said = self._tagged(order, nodes)

        policy = _requests.workload_policy(order, name=name, topology=slice.topology)
        what = f"the workload policy {name}"
        insist(self._machines, what, partial(self._machines.policies.insert, policy, what, region=offer.region), _MADE)

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
        insist(self._machines, what, partial(self._machines.templates.insert, template, what), _MADE)

        group = _requests.group(
            settings,
            offer,
            name=name,
            hosts=slice.vms,
            description=google.description({**said, _TYPE: slice.type}),
        )
        id = _requests.request_id(offer.zone, name)
        return self._machines.groups.insert(group, what, zone=offer.zone, request_id=id)

    def _look(self, zone: str, slice: str, operation: Any = None) -> str:
        """Return a slice's state in Cloud TPU's words, such as "ACTIVE". Raise the error with which it failed."""
        what = f"to make the TPU slice {slice} in {zone}"
        over = _client.done(self._machines, operation, what, 0.0)
        group, machines = self._seen(zone, slice)
        if group is None and not over:
            return "CREATING"
        for each in machines:
            if each.status not in catalog.STATES:
                raise google.REFUSALS.error(what, "STOPPED", f"the status of its host {each.name} is {each.status}")
        if group is None:
            raise google.REFUSALS.error(what, "STOPPED", "its instance group no longer exists")
        if len(machines) >= group.target_size:
            return "ACTIVE"
        for refusal in group.status.bulk_instance_operation.last_progress_check.error.errors:
            error = google.REFUSALS.error(what, refusal.code, refusal.message, project=self.settings.billed())
            if not isinstance(error, CapacityError) or _age(group) > self.settings.queue:
                raise error  # refused, or no room for longer than the setting `queue`
            return "WAITING_FOR_RESOURCES"
        return "CREATING"

    def _ends(self, zone: str, slice: str) -> tuple[str, list[catalog.Ends]]:
        """Return (type, addresses of the hosts) of a slice. [] until all hosts run; ("", []) if it has no group."""
        group, machines = self._seen(zone, slice)
        if group is None:
            return "", []
        # without numbers of the hosts, the order is that of the names, and the type is left out
        kind = google.tags_in(group.description).get(_TYPE, "") if _catalog.numbered(machines) else ""
        running = [each for each in _catalog.in_order(machines) if each.status == "RUNNING"]
        ends = [catalog.addresses(each)[:1] for each in running]
        if len(ends) != group.target_size or not all(ends):
            return kind, []
        return kind, [first for (first,) in ends]

    # --- finding, ending -------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """Yield all machines on Compute Engine of one pool, or of all pools of this user, also hosts of slices."""
        groups = {each.name: (each, said) for each, said in _client.described(self._machines.groups, pool)}
        machines: dict[str, list[tuple[compute_v1.Instance, dict[str, str]]]] = {}
        for each, said in _client.labelled(self._machines.instances, pool):
            machines.setdefault(said.get(google.SLICE, ""), []).append((each, said))
        for record, said in machines.pop("", ()):
            yield Compute(self.settings).machine(record, said)
        # a slice may have only a group or only machines; hosts that do not exist yet are yielded, too
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
        """Return (instance group of a slice, its machines). The group is None if it does not exist."""
        find = partial(self._machines.groups.get, slice, f"the instance group {slice}", zone=zone)
        group = look(quietly, find, "notFound")
        return group, look(self._machines.instances.list, f"labels.{google.SLICE}={slice}")

    def _ask_to_terminate(self, zone: str, slice: str) -> bool:
        """Request the end of a slice, without waiting. Return True if its group or one of its machines existed."""
        group, machines = self._seen(zone, slice)
        if group is not None:
            # this deletes the machines of the group, too
            self._machines.groups.delete(slice, f"to end the TPU slice {slice}", zone=zone)
            return True
        for each in machines:
            self._machines.instances.delete(each.name, f"to end the machine {each.name}", zone=zone)
        return bool(machines)


def _zone(record: compute_v1.Instance | compute_v1.InstanceGroupManager) -> str:
    """Return the name of the zone of a machine or an instance group."""
    return google.last_part(record.zone)


def _age(group: compute_v1.InstanceGroupManager) -> float:
    """Return the seconds since an instance group was created, by the client's clock."""
    return (datetime.now(UTC) - datetime.fromisoformat(group.creation_timestamp)).total_seconds()
