"""Rents slices of TPU chips from Cloud TPU. The hosts of a slice start, are billed and end together.

API: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources (read 2026-11-21). It offers
v2 to v6e, but no later generations. A slice is a queued resource with one node. Only the node has labels, and lists
cannot be filtered by them. But one request lists all zones.

A slice that failed or was taken back remains, and counts toward the quota, until it is deleted. Hosts that are switched
off are still billed. Only deleting the node ends that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from skypool.drivers import preflight, retry, ssh_machine, tags
from skypool.drivers.contract import Abilities, Answers, undo
from skypool.drivers.regional import Regional, each_done, everywhere
from skypool.drivers.retry import at_once, in_turn
from skypool.errors import AccessError, NoAnswer, ProviderError, RateLimitError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api as google
from skypool_gcp import billing, catalog
from skypool_gcp.compute import Compute
from skypool_gcp.tpu import _catalog, _requests
from skypool_gcp.tpu._api import PASSING, TpuApi, is_over, raise_status

if TYPE_CHECKING:
    from google.cloud import tpu_v2

_ORDERED = 8.0
"""Seconds for which a launch waits to learn whether its slices are refused."""

_MADE = 1800.0
"""Seconds within which the hosts of a slice must be made once it has its chips."""

_KEYING = 600.0
"""Seconds within which a host must accept ssh connections, after its startup script."""

_MARGIN = 240.0
"""Seconds by which the time in a slice's tags exceeds the longest wait for its chips, at least."""

_DISABLED = (
    "the API of Cloud TPU is not enabled; only slices of v2 to v6e need it: `gcloud services enable tpu.googleapis.com`"
)
"""The text of a check for a project without the API."""

_BILLED = (
    "a slice cannot end its own cost without a service_account= that may delete it; "
    "if its client is killed, run `skypool gc --yes`"
)
"""The text of a check for slices without a service account."""

_ENDS = "a slice deletes itself when its lease is over, if its service account may do so, as with roles/tpu.admin"
"""The text of a check for slices with a service account."""


@dataclass(frozen=True)
class Tpu(Regional):
    """The Cloud TPU part of the driver, with the methods of `skypool.drivers.contract`.

    The region of an instance is its zone.

    Attributes:
        settings: The settings of the driver.
        passing: Error codes with which a delete is refused temporarily. It is then repeated.
    """

    settings: google.Settings
    name: ClassVar[str] = "gcp"
    api: ClassVar[str] = "tpu"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=False, private_network=True, spot=True)
    ending: ClassVar[float] = 300.0
    passing: ClassVar[Sequence[str]] = PASSING
    """Error codes with which a delete is refused temporarily. It is then repeated."""

    def offers(self, need: Need) -> Answers[Offer]:
        """Return an offer for each slice that meets the need, in each zone that has it, on each market with a price.

        Requests are only sent if the need names TPUs. A zone that does not answer is left out, with a warning.
        """
        if not _catalog.wanted(need):
            return Answers()
        rates = billing.rates(self.settings)
        regions = _catalog.regions(need, rates)
        if not regions:
            return Answers()
        ends_itself = self.settings.service_account is not None

        def sold(zone: str) -> Iterable[Offer]:
            kinds = [google.last_part(each.name) for each in self._calls.accelerator_types(zone)]
            return _catalog.offers(zone, kinds, need, rates, ends_itself=ends_itself)

        zones = [each for each in self._calls.zones() if google.region_of(each) in regions]
        if self.settings.zones:
            zones = [each for each in zones if each in self.settings.zones]
        return everywhere(sold, zones, "offers of TPUs")

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Create a queued resource for each slice, in order, and return the hosts.

        The same order yields the same slices.

        The launch waits a few seconds to learn whether slices are refused. A slice that still waits for its chips then
        is returned as "starting". If one is refused, only the slices before it are returned; with `private_network`,
        none.

        Raises:
            ProviderError: No slice was made.
        """
        self._let_in(offer, order)
        slices = [order.nodes[first : first + offer.hosts] for first in range(0, order.count, offer.hosts)]
        order.asking(*order.nodes)
        begun = in_turn(lambda nodes: self._queued(offer, order, nodes), slices)
        error = begun.pop() if isinstance(begun[-1], Exception) else None
        if isinstance(error, (NoAnswer, RateLimitError)):
            raise error  # the pool repeats the order, which then finds the slices that were made
        asked = slices[: len(begun)]
        refused = self._refused(offer, [self._slice(order, nodes) for nodes in asked], begun)
        good = min([len(begun), *refused])
        if order.need.private_network and good < len(slices):
            good = 0
        hosts = [list(self._launched(offer, order, nodes)) for nodes in asked]
        order.made(*(host for of_slice in hosts for host in of_slice))
        undo(self.terminate, order, [host for of_slice in hosts[good:] for host in of_slice])
        if good:
            return [host for of_slice in hosts[:good] for host in of_slice]
        if refused:
            raise refused[min(refused)]
        text = f"Google Cloud made no {offer.instance_type} in {offer.zone}; try again"
        raise error or NoAnswer(text, provider=self.name)

    def access(self, instance: Instance) -> Access:
        """Return ssh access to a host of a slice, with the environment variables that tell it its place in the slice.

        Waits until the slice is made.

        Raises:
            ProviderError: The slice will not be made; the error says why.
        """
        number = instance.detail["host"]
        kind, ends = self._ready(instance.region, instance.slice)
        made = ssh_machine.access(
            instance,
            ends[number].public or ends[number].inside,
            user=google.USER,
            booting=_KEYING,
            keying=_KEYING,
            watch=google.WATCH,
        )
        return replace(
            made,
            settling=_KEYING,
            env=catalog.env(kind, number, [each.inside for each in ends]),
        )

    def renew(self, pool: str, until: datetime) -> None:
        """Write the time until which a pool is needed into the labels of its ready nodes.

        Other nodes cannot be changed, but their labels already have a late time.

        Raises:
            ProviderError, ErrorGroup: Some labels could not be written.
        """
        slices = {each.slice: each for each in self.instances(pool=pool) if each.detail["node"] == "READY"}
        each_done(partial(self._relabel, until), slices.values(), "Cloud TPU: not all labels could be renewed")

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return an empty list: slices leave nothing here, and their firewall rules are listed by Compute Engine."""
        return []

    def check(self) -> Iterable[Finding]:
        """Return one finding about the API's zones, and one about how its slices end."""
        end = _ENDS if self.settings.service_account else _BILLED
        return preflight.findings(
            {
                "zones of Cloud TPU": lambda: google.unless_disabled(lambda: len(self._calls.zones()), _DISABLED),
                "the end of TPU slices": lambda: end,
            }
        )

    # --- names -----------------------------------------------------------------------------------------------

    @property
    def _calls(self) -> TpuApi:
        """Return the API of Cloud TPU for this project."""
        return TpuApi(self.settings)

    def _regions(self) -> Sequence[str]:
        """Return ["-"], which means all zones in lists of this API."""
        return ["-"]

    @staticmethod
    def _slice(order: Order, nodes: Sequence[int]) -> str:
        """Return the name of a slice, of its queued resource and of its node.

        The same order and nodes give the same name.
        """
        return google.name(order.token, str(nodes[0]))

    # --- making ----------------------------------------------------------------------------------------------

    def _tagged(self, order: Order, nodes: Sequence[int]) -> dict[str, str]:
        """Return the tags of a new slice.

        They cannot be renewed while the slice waits for chips. So the time in them is later than the end of the longest
        wait.
        """
        late = datetime.now(UTC) + timedelta(seconds=self.settings.queue + _MARGIN)
        until = max(order.until, late) if order.until else order.until
        return tags.tags(replace(order, nodes=tuple(nodes), until=until))

    def _let_in(self, offer: Offer, order: Order) -> None:
        """Make the firewall rules of Compute Engine for a slice's hosts. Warn if the account may not make any."""
        among = order.need.private_network or offer.hosts > 1
        try:
            Compute(self.settings).let_in(replace(order, need=replace(order.need, private_network=among)))
        except AccessError as e:
            text = f"logins to TPU hosts are left to the rules of network {self.settings.network}: {e}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _queued(self, offer: Offer, order: Order, nodes: Sequence[int]) -> Any:
        """Request a slice. Return the operation, for `_look`; None if the slice exists already."""
        slice = self._slice(order, nodes)
        resource = _requests.queued_resource(
            self.settings,
            offer,
            order,
            parent=self._calls.zone_path(offer.zone),
            slice=slice,
            labels=google.labels(self._tagged(order, nodes)),
            until=datetime.now(UTC) + timedelta(seconds=self.settings.queue + _ORDERED),
        )
        return self._calls.create_queued_resource(
            offer.zone,
            slice,
            resource,
            request_id=_requests.request_id(self._calls.queued_path(offer.zone, slice)),
            what=f"{offer.instance_type} in {offer.zone}",
        )

    def _launched(self, offer: Offer, order: Order, nodes: Sequence[int]) -> Iterator[Instance]:
        """Yield the hosts of a slice that was requested, as instances with the offer."""
        said = tags.tags(replace(order, nodes=tuple(nodes)))
        for each in self._hosts(offer.zone, self._slice(order, nodes), said, "starting"):
            yield replace(each, offer=offer)

    def _refused(self, offer: Offer, slices: Sequence[str], begun: Sequence[Any]) -> dict[int, ProviderError]:
        """Wait up to `_ORDERED` seconds, and return the errors of slices that were refused, by their number.

        Args:
            offer: The offer of the slices.
            slices: The names of the slices.
            begun: The operation of each slice, as `_queued` returned it.
        """
        refused: dict[int, ProviderError] = {}
        unknown = set(range(len(slices)))

        def look() -> bool:
            for number in sorted(unknown):
                try:
                    if self._look(offer.zone, slices[number], begun[number]) in _catalog.NEW:
                        continue
                except (NoAnswer, RateLimitError):
                    continue
                except ProviderError as e:
                    refused[number] = e
                unknown.remove(number)
            return not unknown

        retry.soon(look, _ORDERED)
        return refused

    def _look(self, zone: str, slice: str, operation: Any = None) -> str:
        """Return the state of a slice's queued resource; "CREATING" if it does not exist yet.

        Args:
            zone: The zone of the slice.
            slice: The name of the slice.
            operation: The operation that creates it; None if that has ended.

        Raises:
            ProviderError: The slice has failed, was taken back, or is gone.
        """
        what = f"to make {slice} in {zone}"
        over = operation is None or is_over(operation, what)
        queued = self._calls.queued_resource(zone, slice, what)
        if queued is None:
            if not over:
                return "CREATING"
            raise google.REFUSALS.error(what, "DELETED", "its state is DELETED")
        state = str(queued.state.state.name)
        if state == "FAILED":
            raise_status(queued.state.failed_data.error, what)
        if state not in _catalog.QUEUED:
            raise google.REFUSALS.error(what, state, f"its state is {state}")
        late: Any = queued.queueing_policy.valid_until_time  # a datetime: the SDK turns a Timestamp into one
        if state == "WAITING_FOR_RESOURCES" and late and datetime.now(UTC) > late - timedelta(seconds=_ORDERED):
            raise google.REFUSALS.error(what, state, f"Google had no chips for it within {self.settings.queue:g} s")
        return state

    def _ready(self, zone: str, slice: str) -> tuple[str, list[catalog.Ends]]:
        """Wait until a slice is made, and return its type and the addresses of its hosts in order.

        Raises:
            ProviderError: The slice will not be made, or was not made in time.
        """

        def look() -> tuple[str, list[catalog.Ends]]:
            kind, ends = self._ends(zone, slice)
            if ends:
                return kind, ends
            state = self._look(zone, slice)
            raise ProviderError(
                f"the TPU slice {slice} in {zone} is not ready yet: its state is {state}; try again later",
                provider=self.name,
                code="pending",
            )

        return retry.patiently(look, self.settings.queue + _MADE, "pending")

    def _ends(self, zone: str, slice: str) -> tuple[str, list[catalog.Ends]]:
        """Return the type of a slice and the addresses of its hosts in order.

        The addresses are empty while the slice is not ready. Returns ("", []) if there is no node.
        """
        node = self._calls.node(zone, slice, f"to tell of {slice}")
        if node is None:
            return "", []
        if node.state.name != "READY":
            return node.accelerator_type, []
        ends = [catalog.Ends(each.ip_address, each.access_config.external_ip) for each in node.network_endpoints]
        return node.accelerator_type, ends

    # --- finding, ending -------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """Yield all hosts of the slices of one pool, or of all pools of this user.

        A slice that waits for its chips has hosts, too: its labels tell how many there will be.
        """
        queued = {
            each.name.replace("/queuedResources/", "/nodes/"): each for each in self._calls.queued_resources(region)
        }
        nodes = {each.name: each for each in self._calls.nodes(region)}
        for path in {**queued, **nodes}:
            resource = queued.get(path)
            node = nodes.get(path)
            labels = _labels(resource, node)
            said = google.said(labels)
            if not tags.ours(said, pool):
                continue
            state_of_node = node.state.name if node is not None else ""
            state_of_queued = resource.state.state.name if resource is not None else "ACTIVE"
            *_, zone, _, slice = path.split("/")
            yield from self._hosts(
                zone,
                slice,
                said,
                _catalog.state(state_of_queued, state_of_node),
                node=state_of_node,
                labels=labels,
            )

    def _hosts(
        self, zone: str, slice: str, said: Mapping[str, str], state: _catalog.State, **detail: object
    ) -> Iterator[Instance]:
        """Yield the hosts of a slice as instances.

        Args:
            zone: The zone of the slice.
            slice: The name of the slice.
            said: The tags of the slice.
            state: The state of all hosts.
            detail: Additional items for the detail of each instance.
        """
        for host in range(len(tags.unpacked(said.get(tags.NODES, "")))):
            about = {"api": self.api, "host": host, **detail}
            made = tags.instance(self.name, f"{slice}-w-{host}", said, host, state, about, region=zone)
            yield replace(made, slice=slice)

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> Mapping[str, str]:
        """Request the end of slices. Return the instances that have not ended, by id, each with a reason or "".

        Slices are requested by name, because a list may lack the newest. A refusal that will pass is a reason, for
        example while a slice is provisioned. The next call requests the end of that slice again.

        Raises:
            ProviderError: A request was refused for good.
        """
        slices = list(dict.fromkeys(each.slice for each in instances.values()))
        outcomes = dict(zip(slices, at_once(partial(self._ask_to_terminate, region), slices), strict=True))
        left: dict[str, str] = {}
        for outcome in outcomes.values():
            if isinstance(outcome, Exception) and getattr(outcome, "code", "") not in self.passing:
                raise outcome
        for id, instance in instances.items():
            is_there = outcomes[instance.slice]
            if is_there:
                left[id] = str(is_there) if isinstance(is_there, Exception) else ""
        return left

    def _ask_to_terminate(self, zone: str, slice: str) -> bool:
        """Request the end of a slice if it exists. Return True if any part of it still existed."""
        what = f"to end {slice}"
        queued = self._calls.queued_resource(zone, slice, what)
        node = self._calls.node(zone, slice, what)
        if queued is not None and queued.state.state.name != "DELETING":
            self._calls.delete_queued_resource(zone, slice, what)
        elif queued is None and node is not None and node.state.name != "DELETING":
            self._calls.delete_node(zone, slice, what)
        return queued is not None or node is not None

    def _relabel(self, until: datetime, instance: Instance) -> None:
        """Write the time until which a node is needed into its labels."""
        labels = instance.detail["labels"] | google.labels({tags.UNTIL: tags.stamp(until)})
        self._calls.set_labels(instance.region, instance.slice, labels, "to renew it")


def _labels(queued: tpu_v2.QueuedResource | None, node: tpu_v2.Node | None) -> dict[str, str]:
    """Return the labels of a slice: those of its node, or else those of the node that will be made."""
    if node is not None:
        return dict(node.labels)
    if queued is not None:
        for each in queued.tpu.node_spec:
            return dict(each.node.labels)
    return {}
