"""Cloud TPU: slices of chips, each one or more hosts that come, cost and end together.

API: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources (read 2026-11-21). It has
v2 to v6e; later generations are not in it. A slice is a queued resource with one node. Only the node has labels, and no
list filters by them: one question lists all zones. A slice that failed or was taken back stays, and holds quota, until
it is deleted. Hosts that are switched off are billed on, and nothing but deleting the node ends that.
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
"""Seconds in which it is known what becomes of an order."""

_MADE = 1800.0
"""Seconds from a slice's chips to its hosts."""

_KEYING = 600.0
"""Seconds until the startup script has run."""

_MARGIN = 240.0
"""Seconds for which a slice is needed at least once it has waited as long as it may."""

_DISABLED = (
    "its API is not enabled, and need not be for what Compute Engine has; slices of v2 to v6e need it: "
    "`gcloud services enable tpu.googleapis.com`"
)
"""What a check says of a project without the API."""

_BILLED = (
    "a slice cannot end its own cost unless service_account= may delete it: after its client was killed, "
    "`skypool gc --yes` does"
)
"""What a check says of slices without a service account."""

_ENDS = "its service account deletes it when its lease is over, if it has the right to, as roles/tpu.admin has"
"""What a check says of slices with a service account."""


@dataclass(frozen=True)
class Tpu(Regional):
    """Cloud TPU of one project: the verbs of `skypool.drivers.contract`. The region of an instance is its zone."""

    settings: google.Settings
    name: ClassVar[str] = "gcp"
    api: ClassVar[str] = "tpu"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=False, private_network=True, spot=True)
    ending: ClassVar[float] = 300.0
    passing: ClassVar[Sequence[str]] = PASSING
    """Error codes of a delete that is refused for now."""

    def offers(self, need: Need) -> Answers[Offer]:
        """Return each slice that serves, in each zone that has it, in each market with a price.

        The API is asked only for a need of TPUs. A zone that does not answer is missing, with a warning.
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
        """Create a queued resource for each slice, in order. The same order gets the same slices.

        What becomes of them within seconds is waited for. What still waits for chips then is `starting`.
        """
        self._let_in(offer, order)
        slices = [order.nodes[first : first + offer.hosts] for first in range(0, order.count, offer.hosts)]
        order.asking(*order.nodes)
        begun = in_turn(lambda nodes: self._queued(offer, order, nodes), slices)
        error = begun.pop() if isinstance(begun[-1], Exception) else None
        if isinstance(error, (NoAnswer, RateLimitError)):
            raise error  # the same order comes again, and finds what there is
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
        raise error or NoAnswer("nothing was made", provider=self.name)

    def access(self, instance: Instance) -> Access:
        """Return ssh access to one host, and the environment that tells it which one it is.

        Raises:
            ProviderError: The slice does not come; the error says why.
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
        """Renew the labels of nodes that are ready. Others cannot be changed, and say long enough."""
        slices = {each.slice: each for each in self.instances(pool=pool) if each.detail["node"] == "READY"}
        each_done(partial(self._relabel, until), slices.values(), "not all labels could be renewed")

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return nothing: there are slices alone here, and their firewall rules are Compute Engine's."""
        return []

    def check(self) -> Iterable[Finding]:
        """Check the API, and say what its slices cannot do."""
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
        return TpuApi(self.settings)

    def _regions(self) -> Sequence[str]:
        return ["-"]  # as the API calls all zones

    @staticmethod
    def _slice(order: Order, nodes: Sequence[int]) -> str:
        """Return the name of a slice, its queued resource and its node: the same for the same order."""
        return google.name(order.token, str(nodes[0]))

    # --- making ----------------------------------------------------------------------------------------------

    def _tagged(self, order: Order, nodes: Sequence[int]) -> dict[str, str]:
        """Return the tags of a new slice. As they cannot be renewed while it waits, they last longer than that."""
        late = datetime.now(UTC) + timedelta(seconds=self.settings.queue + _MARGIN)
        until = max(order.until, late) if order.until else order.until
        return tags.tags(replace(order, nodes=tuple(nodes), until=until))

    def _let_in(self, offer: Offer, order: Order) -> None:
        """Make the firewall rules of Compute Engine's machines. Warn if the account may not make any."""
        among = order.need.private_network or offer.hosts > 1
        try:
            Compute(self.settings).let_in(replace(order, need=replace(order.need, private_network=among)))
        except AccessError as e:
            text = f"who may log in to the hosts of TPUs is left to the rules of network {self.settings.network}: {e}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _queued(self, offer: Offer, order: Order, nodes: Sequence[int]) -> Any:
        """Ask for a slice. Return the operation, which `_look` takes; None if the slice is there already."""
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
        """Yield the hosts of a slice that was asked for."""
        said = tags.tags(replace(order, nodes=tuple(nodes)))
        for each in self._hosts(offer.zone, self._slice(order, nodes), said, "starting"):
            yield replace(each, offer=offer)

    def _refused(self, offer: Offer, slices: Sequence[str], begun: Sequence[Any]) -> dict[int, ProviderError]:
        """Return which of the slices, by number, will not be, as far as that is known soon.

        Args:
            begun: The operation of each, as `_queued` returned it.
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
        """Return the state of a queued resource.

        Args:
            operation: That of its create; None if it has ended.

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
            raise google.REFUSALS.error(what, state, f"no chips came within {self.settings.queue:g} s")
        return state

    def _ready(self, zone: str, slice: str) -> tuple[str, list[catalog.Ends]]:
        """Return the type of a slice and its hosts' addresses, in order, once it has its chips and is made.

        Raises:
            ProviderError: It will not be made, or is not within the time to wait.
        """

        def look() -> tuple[str, list[catalog.Ends]]:
            kind, ends = self._ends(zone, slice)
            if ends:
                return kind, ends
            state = self._look(zone, slice)
            raise ProviderError(f"{slice} is not ready yet: its state is {state}", provider=self.name, code="pending")

        return retry.patiently(look, self.settings.queue + _MADE, "pending")

    def _ends(self, zone: str, slice: str) -> tuple[str, list[catalog.Ends]]:
        """Return the type of a slice and its hosts' addresses as they are now; none of what is not ready."""
        node = self._calls.node(zone, slice, f"to tell of {slice}")
        if node is None:
            return "", []
        if node.state.name != "READY":
            return node.accelerator_type, []
        ends = [catalog.Ends(each.ip_address, each.access_config.external_ip) for each in node.network_endpoints]
        return node.accelerator_type, ends

    # --- finding, ending -------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """Yield all hosts of slices, also while there are none yet: the labels tell how many there will be."""
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
        """Yield the hosts of a slice.

        Args:
            said: The tags of the slice.
            detail: What is added to the detail of each instance.
        """
        for host in range(len(tags.unpacked(said.get(tags.NODES, "")))):
            about = {"api": self.api, "host": host, **detail}
            made = tags.instance(self.name, f"{slice}-w-{host}", said, host, state, about, region=zone)
            yield replace(made, slice=slice)

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> Mapping[str, str]:
        """Ask for the end of slices, and return which instances have not ended, each with the reason.

        They are asked for by name, as a list may lack the newest. A refusal for now, as while a slice is provisioned,
        is such a reason; the slice is asked to end again.
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
        """Return True if anything of a slice is still there. It is asked to end then."""
        what = f"to end {slice}"
        queued = self._calls.queued_resource(zone, slice, what)
        node = self._calls.node(zone, slice, what)
        if queued is not None and queued.state.state.name != "DELETING":
            self._calls.delete_queued_resource(zone, slice, what)
        elif queued is None and node is not None and node.state.name != "DELETING":
            self._calls.delete_node(zone, slice, what)
        return queued is not None or node is not None

    def _relabel(self, until: datetime, instance: Instance) -> None:
        """Write into the labels of a node until when it is needed."""
        labels = instance.detail["labels"] | google.labels({tags.UNTIL: tags.stamp(until)})
        self._calls.set_labels(instance.region, instance.slice, labels, "to renew it")


def _labels(queued: tpu_v2.QueuedResource | None, node: tpu_v2.Node | None) -> dict[str, str]:
    """Return the labels of a slice: those of its node, or of the node that is to be made."""
    if node is not None:
        return dict(node.labels)
    if queued is not None:
        for each in queued.tpu.node_spec:
            return dict(each.node.labels)
    return {}
