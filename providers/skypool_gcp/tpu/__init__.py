"""Rents slices of TPU chips from Google's Cloud TPU.

API: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources (read 2026-11-21). The API
has the generations v2 to v6e, but no later ones.

Words of this package:

- slice: a group of TPU hosts that start, are billed and end together. Each host is one `Instance`.
- queued resource: Google's object for the request for a slice.
- node: Google's object for the running slice. Only the node has labels. But a "node number" is the number of a host in
  its pool.
- operation: Google's record of a change in progress.
- need, offer, order: the requirements of a node, a type of slice with zone, market and price, and the request to rent
  slices for nodes of a pool (`skypool.model`).
- lease: the time for which a host lives on without hearing from its client. Finding: the result of one check.
- settings: the arguments of `skypool_gcp.GCP`.
- In arguments: `nodes` are the node numbers of a slice's hosts. `what` is a request in words, for error messages.
  `said` are skypool's tags of a slice, such as the pool and the node numbers.

Lists cannot be filtered by labels, but one request lists all zones. A slice that failed or was taken back remains, and
counts toward the quota, until it is deleted. Hosts that are switched off are still billed. Only the deletion of the
node ends the billing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from skypool import tracebacks
from skypool.drivers import retry, ssh_machine, tags
from skypool.drivers.contract import Abilities, Answers, undo
from skypool.drivers.regional import Regional, each_done, everywhere
from skypool.drivers.retry import at_once, in_turn
from skypool.errors import AccessError, NoAnswer, ProviderError, RateLimitError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api as google
from skypool_gcp import catalog, list_prices
from skypool_gcp._settings import Settings
from skypool_gcp.compute import Compute
from skypool_gcp.tpu import _account_checks, _catalog, _proof, _requests, _states
from skypool_gcp.tpu._api import PASSING, TpuApi, is_over, raise_status

if TYPE_CHECKING:
    from google.cloud import tpu_v2

_ORDERED = 8.0
"""Seconds for which `launch` waits for Google to accept or refuse the slices."""

_MADE = 1800.0
"""Seconds that the creation of a slice's hosts may take after Google has found the chips."""

_KEYING = 600.0
"""Seconds that a host may need until it accepts ssh connections with the right host key."""

_MARGIN = 240.0
"""Seconds for which a new slice counts as needed after the longest wait for its chips, if its order ends earlier."""

_BILLED = (
    "without GCP(service_account=…), a TPU slice is billed until the client ends it; "
    "if the client is killed, run `skypool gc --yes`"
)
"""The text of the finding of `Tpu.check` about the end of slices, if the settings name no service account."""

_ENDS = (
    "a TPU slice deletes itself when its lease is over, if its account may delete TPU slices (as with roles/tpu.admin)"
)
"""The text of the finding of `Tpu.check` about the end of slices, if the settings name a service account."""


@dataclass(frozen=True)
class Tpu(Regional):
    """The part of the Google Cloud driver that rents TPU slices of Cloud TPU. All methods block.

    Each host of a slice is one `Instance`, whose `region` is the zone of the slice.

    Attributes:
        api: The name of this part. The offers and hosts of this part have this name in `detail["api"]`.
        ending: Seconds for which `terminate` waits until the slices have ended.
        passing: Error codes with which Google refuses a deletion temporarily. `terminate` then repeats the deletion.
    """

    settings: Settings
    name: ClassVar[str] = "gcp"
    api: ClassVar[str] = "tpu"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=False, private_network=True, spot=True)
    ending: ClassVar[float] = 300.0
    passing: ClassVar[Sequence[str]] = PASSING

    def offers(self, need: Need) -> Answers[Offer]:
        """Return an offer for each TPU slice that meets the need, in each zone that has the slice, on each market.

        No offer is made for a market without a known price. If the need names no TPUs, the result is empty and no
        request is sent. If a zone does not answer, its offers are left out, a RuntimeWarning is issued, and `lacks` of
        the result says that offers are missing.

        Raises:
            ProviderError: Google refused the request, or no zone answered.
        """
        if not _catalog.wanted(need):
            return Answers()
        rates = list_prices.rates(self.settings)
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
        """Request the TPU slices of an order, one after the other, and return their hosts as instances.

        The hosts of the first slice get the first node numbers of the order, and those of the next slice the next
        numbers. Firewall rules are created first. After all requests, the method waits up to 8 s for Google to accept
        or refuse the slices. Slices that still wait for their chips then are returned, too, with the state "starting".
        Calling again with the same order makes no further slices, and returns the slices that exist.

        If a slice is refused, this slice and those after it are ended, and only the slices before it are returned. If
        the need has `private_network`, all slices are ended and the error is raised.

        Raises:
            ProviderError: No slice was made, or Google refused one slice of a private network.
            NoAnswer, RateLimitError: Slices may exist. Call again with the same order, which finds the slices.
            StillRunning: Some slices of the failed order could not be ended, and may still run.
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
        text = f"Google Cloud made no TPU slice {offer.instance_type} in {offer.zone}, for no known reason; try again"
        raise error or NoAnswer(text, provider=self.name)

    def access(self, instance: Instance) -> Access:
        """Return how to reach a host of a TPU slice by ssh. Waits until the slice has all its hosts.

        The wait is up to half an hour plus the seconds of the setting `queue`. `env` of the result has the environment
        variables with which Google's TPU library finds the other hosts.

        Raises:
            ProviderError: Google refused the slice, or the slice has ended, or it was not made in time.
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
        """Record in the labels of the running TPU slices of a pool until when the pool is needed.

        Google changes the labels of running slices only. Other slices are not changed: their labels got a late enough
        time when the slices were requested.

        Raises:
            ProviderError: The labels of a slice could not be written.
            ErrorGroup: The labels of several slices could not be written, for different reasons.
        """
        slices = {each.slice: each for each in self.instances(pool=pool) if each.detail["node"] == "READY"}
        each_done(
            partial(self._relabel, until),
            slices.values(),
            "Cloud TPU: the labels of some TPU slices could not be changed",
        )

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return []: TPU slices leave no resources behind in Cloud TPU.

        Firewall rules of slices are resources of Compute Engine. Another part of the driver lists these rules.
        """
        return []

    def check(self) -> Iterable[Finding]:
        """Return findings about Cloud TPU: its zones, slice types, runtime versions and quotas, and the end of slices.

        The requests are sent when the first finding is taken. If Cloud TPU's API is not enabled for the project, the
        check passes, and the first finding says how to enable the API. A failed check does not raise.
        """
        return _account_checks.findings(
            self._calls, self.settings.zones, _ENDS if self.settings.service_account else _BILLED
        )

    def prove_creates(self) -> Iterable[Finding]:
        """Request two TPU slices that Google must refuse, and return one finding for each.

        Nothing is rented. The requests are sent when the first finding is taken. The method does not raise.
        """
        return _proof.refusals(self.offers, self._tried)

    # --- names -----------------------------------------------------------------------------------------------

    @property
    def _calls(self) -> TpuApi:
        """A new client object for the requests to Cloud TPU, for this driver's settings."""
        return TpuApi(self.settings)

    def _regions(self) -> Sequence[str]:
        """Return ["-"]. With the name "-" for the zone, Cloud TPU's API lists all zones in one request."""
        return ["-"]

    @staticmethod
    def _slice(order: Order, nodes: Sequence[int]) -> str:
        """Return the name of an order's slice for these node numbers. A repeated order gives the same name."""
        return google.name(order.token, str(nodes[0]))

    # --- making ----------------------------------------------------------------------------------------------

    def _tagged(self, order: Order, nodes: Sequence[int]) -> dict[str, str]:
        """Return the tags for a new slice, whose expiry time is at least the setting `queue` plus 240 s from now."""
        # the labels of a slice cannot be changed while the slice waits for its chips
        late = datetime.now(UTC) + timedelta(seconds=self.settings.queue + _MARGIN)
        until = max(order.until, late) if order.until else order.until
        return tags.tags(replace(order, nodes=tuple(nodes), until=until))

    def _let_in(self, offer: Offer, order: Order) -> None:
        """Create the firewall rules for a slice's hosts. If the account may not do that, only issue a warning."""
        among = order.need.private_network or offer.hosts > 1
        try:
            Compute(self.settings).let_in(replace(order, need=replace(order.need, private_network=among)))
        except AccessError as e:
            text = (
                "not all firewall rules for TPU hosts could be created, so the existing rules of the network "
                f"{self.settings.network} decide who can reach the hosts: {e}"
            )
            tracebacks.warn(text)

    def _queued(self, offer: Offer, order: Order, nodes: Sequence[int]) -> Any:
        """Request one slice, without waiting for it, and return the operation; None if the slice exists already."""
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

    def _tried(self, offer: Offer, order: Order, nodes: Sequence[int]) -> ProviderError | None:
        """Request a slice, and delete what was made. Return the error with which Google refused it; None if not."""
        hosts = list(self._launched(offer, order, nodes))
        try:
            begun = self._queued(offer, order, nodes)
        except (NoAnswer, RateLimitError):
            self.terminate(hosts)
            raise
        except ProviderError as e:
            return e
        refused = self._refused(offer, [self._slice(order, nodes)], [begun])
        self.terminate(hosts)
        return refused.get(0)

    def _launched(self, offer: Offer, order: Order, nodes: Sequence[int]) -> Iterator[Instance]:
        """Yield the hosts of a requested slice as instances with the state "starting". Sends no request."""
        said = tags.tags(replace(order, nodes=tuple(nodes)))
        for each in self._hosts(offer.zone, self._slice(order, nodes), said, "starting"):
            yield replace(each, offer=offer)

    def _refused(self, offer: Offer, slices: Sequence[str], begun: Sequence[Any]) -> dict[int, ProviderError]:
        """Wait up to 8 s until Google has accepted or refused the slices. Return a dict: refused index to error."""
        refused: dict[int, ProviderError] = {}
        unknown = set(range(len(slices)))

        def look() -> bool:
            for number in sorted(unknown):
                try:
                    if self._look(offer.zone, slices[number], begun[number]) in _states.NEW:
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
        """Return the state of a slice's queued resource, or raise the error with which Google refused the slice."""
        what = f"to make the TPU slice {slice} in {zone}"
        over = operation is None or is_over(operation, what)
        queued = self._calls.queued_resource(zone, slice, what)
        if queued is None:
            if not over:
                return "CREATING"
            raise google.REFUSALS.error(what, "DELETED", "its state is DELETED")
        state = str(queued.state.state.name)
        if state == "FAILED":
            raise_status(queued.state.failed_data.error, what)
        if state not in _states.QUEUED:
            raise google.REFUSALS.error(what, state, f"its state is {state}")
        late: Any = queued.queueing_policy.valid_until_time  # a datetime: the SDK turns a Timestamp into one
        if state == "WAITING_FOR_RESOURCES" and late and datetime.now(UTC) > late - timedelta(seconds=_ORDERED):
            raise google.REFUSALS.error(what, state, f"Google had no free chips within {self.settings.queue:g} s")
        return state

    def _ready(self, zone: str, slice: str) -> tuple[str, list[catalog.Ends]]:
        """Wait until a slice has all its hosts. Return (type, addresses of the hosts in order)."""

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
        """Return (type, addresses of the hosts) of a slice. [] until it is ready; ("", []) if it has no node."""
        node = self._calls.node(zone, slice, f"to describe the TPU slice {slice}")
        if node is None:
            return "", []
        if node.state.name != "READY":
            return node.accelerator_type, []
        ends = [catalog.Ends(each.ip_address, each.access_config.external_ip) for each in node.network_endpoints]
        return node.accelerator_type, ends

    # --- finding, ending -------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """Yield the hosts of a pool's slices, or of all pools of this user, also if a slice waits for its chips."""
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
                _states.state(state_of_queued, state_of_node),
                node=state_of_node,
                labels=labels,
            )

    def _hosts(
        self, zone: str, slice: str, said: Mapping[str, str], state: _states.State, **detail: object
    ) -> Iterator[Instance]:
        """Yield an instance for each node number in a slice's tags. `detail` gives entries of `Instance.detail`."""
        for host in range(len(tags.unpacked(said.get(tags.NODES, "")))):
            about = {"api": self.api, "host": host, **detail}
            made = tags.instance(self.name, f"{slice}-w-{host}", said, host, state, about, region=zone)
            yield replace(made, slice=slice)

    def _terminate(self, region: str, instances: Mapping[str, Instance]) -> Mapping[str, str]:
        """Request the end of slices, without waiting. Return a dict from each host still there to the reason, or ""."""
        slices = list(dict.fromkeys(each.slice for each in instances.values()))
        outcomes = dict(zip(slices, at_once(partial(self._ask_to_terminate, region), slices), strict=True))
        left: dict[str, str] = {}
        for outcome in outcomes.values():
            if isinstance(outcome, Exception) and getattr(outcome, "code", "") not in self.passing:
                raise outcome  # other refusals are temporary, and the next call repeats the request
        for id, instance in instances.items():
            is_there = outcomes[instance.slice]
            if is_there:
                left[id] = str(is_there) if isinstance(is_there, Exception) else ""
        return left

    def _ask_to_terminate(self, zone: str, slice: str) -> bool:
        """Request the end of a slice that is not ending yet, without waiting. Return True if a part of it existed."""
        what = f"to end the TPU slice {slice}"
        queued = self._calls.queued_resource(zone, slice, what)
        node = self._calls.node(zone, slice, what)
        if queued is not None and queued.state.state.name != "DELETING":
            self._calls.delete_queued_resource(zone, slice, what)
        elif queued is None and node is not None and node.state.name != "DELETING":
            self._calls.delete_node(zone, slice, what)
        return queued is not None or node is not None

    def _relabel(self, until: datetime, instance: Instance) -> None:
        """Write the time until which a slice is needed into the labels of its node. Other labels are kept."""
        labels = instance.detail["labels"] | google.labels({tags.UNTIL: tags.stamp(until)})
        self._calls.set_labels(instance.region, instance.slice, labels, f"to label the TPU slice {instance.slice}")


def _labels(queued: tpu_v2.QueuedResource | None, node: tpu_v2.Node | None) -> dict[str, str]:
    """Return the labels of a slice, from its node or else from its queued resource; {} if both are None."""
    if node is not None:
        return dict(node.labels)
    if queued is not None:
        for each in queued.tpu.node_spec:
            return dict(each.node.labels)
    return {}
