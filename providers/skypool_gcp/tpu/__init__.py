"""Cloud TPU: slices of chips, each one or more hosts that come, cost and end together.

API: https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources (read 2026-11-21). It has
v2 to v6e; later ones are not in it. A slice is a queued resource with one node. It has labels on the node alone, no
list filters by them, and it is found in every zone by one question. One that failed or was taken back stays, and holds
quota, until it is deleted. Hosts that are switched off are billed on, and nothing but deleting the node ends that.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, ClassVar

from skypool.drivers import preflight, retry, ssh_machine, tags, userdata
from skypool.drivers.contract import Abilities, undo
from skypool.drivers.regional import Regional, each_done, everywhere
from skypool.drivers.retry import at_once, in_turn
from skypool.drivers.settings import filled
from skypool.errors import AccessError, NoAnswer, ProviderError, RateLimitError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api as google
from skypool_gcp import billing, catalog
from skypool_gcp.compute import Compute
from skypool_gcp.tpu import _catalog
from skypool_gcp.tpu._api import ask, fail, is_over, quietly

_FACTS, _WATCH = _catalog.FACTS, ssh_machine.watch(**_catalog.FACTS["watch"])
_ORDERED, _MADE = 8.0, 1800.0  # seconds in which it is known what an order becomes; from its chips to its hosts
_KEYING = 600.0  # seconds until the startup script has run
_MARGIN = 240.0  # seconds for which a slice is needed at least once it has waited as long as it may


@dataclass(frozen=True)
class Tpu(Regional):
    """The slices of one project: the verbs of `skypool.drivers.contract`."""

    settings: google.Settings
    name: ClassVar[str] = "gcp"
    api: ClassVar[str] = "tpu"
    abilities: ClassVar[Abilities] = Abilities(ends_itself=False, private_network=True, spot=True)
    ending: ClassVar[float] = 300.0
    passing: ClassVar[Sequence[str]] = "FailedPrecondition", "BadRequest", "Aborted", "Conflict"  # for its state

    def offers(self, need: Need) -> Iterable[Offer]:
        """Each slice that serves, in each zone that has it and whose price is known; nothing who asks for no TPU."""
        rates = billing.rates(self.settings) if _catalog.wanted(need) else billing.Rates({})
        regions, only = _catalog.regions(need, rates), self.settings.zones

        def sold(zone: str) -> Iterable[Offer]:
            told = ask("list_accelerator_types", f"what TPUs {zone} has", parent=self._at(zone))
            kinds = [each.name.rpartition("/")[2] for each in told]
            return _catalog.offers(zone, kinds, need, rates, ends_itself=self.settings.service_account is not None)

        known = self._zones() if regions else []
        zones = [each for each in known if each.rpartition("-")[0] in regions and each in (only or [each])]
        return everywhere(sold, zones, "offers of TPUs")

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """A queued resource for each slice, in order; its name makes it idempotent.

        What becomes of it within seconds is waited for; what still waits for chips then is `starting`.
        """
        self._let_in(offer, order)
        slices = [order.ranks[first : first + offer.hosts] for first in range(0, order.count, offer.hosts)]
        order.asking(*order.ranks)
        begun = in_turn(lambda ranks: self._queued(offer, order, ranks), slices)
        error = begun.pop() if isinstance(begun[-1], Exception) else None
        if isinstance(error, (NoAnswer, RateLimitError)):
            raise error  # the same order comes again, and finds what there is
        refused = self._refused(offer, [self._slice(order, ranks) for ranks in slices[: len(begun)]], begun)
        first = min([len(begun), *refused])
        if order.need.private_network and first < len(slices):
            first = 0
        hosts = [list(self._launched(offer, order, ranks)) for ranks in slices[: len(begun)]]
        order.made(*(each for some in hosts for each in some))
        undo(self.terminate, order, [each for some in hosts[first:] for each in some])
        if not first:
            raise refused[min(refused)] if refused else error or NoAnswer("nothing was made", provider=self.name)
        return [each for some in hosts[:first] for each in some]

    def access(self, instance: Instance) -> Access:
        """ssh to one host, which is told which it is. Raises why the slice does not come, if it does not."""
        host, (kind, ends) = instance.detail["host"], self._ready(instance.detail["region"], instance.slice)
        address, env = ends[host][1] or ends[host][0], catalog.env(kind, host, [inside for inside, _ in ends])
        made = ssh_machine.access(instance, address, user=google.USER, booting=_KEYING, keying=_KEYING, watch=_WATCH)
        return replace(made, settling=_KEYING, env=env)

    def renew(self, pool: str, until: datetime) -> None:
        """On the labels of nodes that are ready: others cannot be changed, and say long enough."""
        slices = {each.slice: each for each in self.instances(pool=pool) if each.detail["node"] == "READY"}
        each_done(partial(self._relabel, until), slices.values(), "not all labels could be renewed")

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Nothing: a slice is all that there is, and firewall rules are Compute Engine's."""
        return []

    def check(self) -> Iterable[Finding]:
        """What it needs, and what its slices cannot do."""
        zones = partial(google.unless_disabled, lambda: len(self._zones()), _FACTS["disabled"])
        end = partial(str, _FACTS["ends" if self.settings.service_account else "billed"])
        return preflight.findings({"zones of Cloud TPU": zones, "the end of TPU slices": end})

    # --- names -----------------------------------------------------------------------------------------------

    def _at(self, zone: str) -> str:
        return f"projects/{self.settings.billed()}/locations/{zone}"

    def _zones(self) -> list[str]:
        told = ask("list_locations", "its zones", name=f"projects/{self.settings.billed()}", page_size=500)
        return sorted(each.location_id for each in told.locations)

    def _regions(self) -> Sequence[str]:
        return ["-"]  # as the API calls all zones

    @staticmethod
    def _slice(order: Order, ranks: Sequence[int]) -> str:
        """The name of a slice, its queued resource and its node: the same for the same order."""
        return google.name(order.token, str(ranks[0]))

    # --- making ----------------------------------------------------------------------------------------------

    def _tagged(self, order: Order, ranks: Sequence[int]) -> dict[str, str]:
        """The tags of a new slice: it is needed for as long as it may wait, when they cannot be renewed, and longer."""
        late = datetime.now(UTC) + timedelta(seconds=self.settings.queue + _MARGIN)
        return tags.tags(replace(order, ranks=tuple(ranks), until=order.until and max(order.until, late)))

    def _let_in(self, offer: Offer, order: Order) -> None:
        """The firewall rules of Compute Engine's machines; without them where one may not make any."""
        need = replace(order.need, private_network=order.need.private_network or offer.hosts > 1)
        try:
            Compute(self.settings).let_in(replace(order, need=need))
        except AccessError as e:
            text = f"who may log in to the hosts of TPUs is left to the rules of network {self.settings.network}: {e}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _queued(self, offer: Offer, order: Order, ranks: Sequence[int]) -> Any:
        """The operation of a create; None where it is there already."""
        slice, at, own, spot = self._slice(order, ranks), self._at(offer.zone), self.settings, offer.market == "spot"
        url = f"{at}/queuedResources/{slice}"
        whole = f"{google.endpoint('tpu') or 'https://tpu.googleapis.com'}/v2/{url}?force=true"
        end = google.deletes(whole) if own.service_account else userdata.OFF
        values = {
            "parent": at, "slice": slice, "type": offer.instance_type, "runtime": offer.detail["runtime"],
            "labels": google.labels(self._tagged(order, ranks)),
            "script": userdata.boot_script(order, user=google.USER, end=end),
            "key": f"{google.USER}:{order.keys.public}", "description": f"of skypool's pool {order.pool}",
            "tag": google.tag(order), "network": own.network, "subnetwork": own.subnetwork,
            "account": {"email": own.service_account or "", "scope": _FACTS["scopes"][bool(own.service_account)]},
            "is spot": spot, "spot": {} if spot else None, "guaranteed": None if spot else {},
            "late": datetime.now(UTC) + timedelta(seconds=own.queue + _ORDERED),
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, url)),
            "reservation": f"{at}/reservations/{own.reservation}" if own.reservation and not spot else None,
        }  # fmt: skip
        what, told = f"{offer.instance_type} in {offer.zone}", filled(_FACTS["create"], values)
        return quietly("create_queued_resource", what, "AlreadyExists", "Conflict", **told)

    def _launched(self, offer: Offer, order: Order, ranks: Sequence[int]) -> Iterator[Instance]:
        said = tags.tags(replace(order, ranks=tuple(ranks)))
        for each in self._hosts(offer.zone, self._slice(order, ranks), said, "starting", {}):
            yield replace(each, offer=offer)

    def _refused(self, offer: Offer, slices: Sequence[str], begun: Sequence[Any]) -> dict[int, ProviderError]:
        """Which of the slices, by number, will not be, as far as that is known soon."""
        refused, new = dict[int, ProviderError](), dict(enumerate(slices))

        def look() -> bool:
            for number, slice in [*new.items()]:
                try:
                    if self._look(offer.zone, slice, begun[number]) in _FACTS["new"]:
                        continue
                except (NoAnswer, RateLimitError):
                    continue
                except ProviderError as e:
                    refused[number] = e
                del new[number]
            return not new

        retry.soon(look, _ORDERED)
        return refused

    def _look(self, zone: str, slice: str, operation: Any = None) -> str:
        """The state of a queued resource. Raises ProviderError: it has failed, was taken back, or is gone."""
        what = f"to make {slice} in {zone}"
        over = operation is None or is_over(operation, what)
        queued = quietly("get_queued_resource", what, name=f"{self._at(zone)}/queuedResources/{slice}")
        if not queued and not over:
            return "CREATING"
        state = str(queued.state.state.name) if queued else "DELETED"
        if state == "FAILED":
            fail(queued.state.failed_data.error, what)
        if state not in _FACTS["queued"]:
            raise google.REFUSALS.error(what, state, f"its state is {state}")
        late = queued.queueing_policy.valid_until_time
        if state == "WAITING_FOR_RESOURCES" and late and datetime.now(UTC) > late - timedelta(seconds=_ORDERED):
            raise google.REFUSALS.error(what, state, f"no chips came within {self.settings.queue:g} s")
        return state

    def _ready(self, zone: str, slice: str) -> tuple[str, list[tuple[str, str]]]:
        """The type of a slice and its hosts' own and public addresses, in order; once it has its chips and is made."""

        def look() -> tuple[str, list[tuple[str, str]]]:
            if (ends := self._ends(zone, slice))[1]:
                return ends
            state = self._look(zone, slice)
            raise ProviderError(f"{slice} is not ready yet: its state is {state}", provider=self.name, code="pending")

        return retry.patiently(look, self.settings.queue + _MADE, "pending")

    def _ends(self, zone: str, slice: str) -> tuple[str, list[tuple[str, str]]]:
        """The same as it is now; no addresses of what is not ready."""
        node = quietly("get_node", f"to tell of {slice}", name=f"{self._at(zone)}/nodes/{slice}")
        ends = node.network_endpoints if node is not None and node.state.name == "READY" else []
        return getattr(node, "accelerator_type", ""), [(one.ip_address, one.access_config.external_ip) for one in ends]

    # --- finding, ending -------------------------------------------------------------------------------------

    def _found(self, region: str, pool: str | None) -> Iterator[Instance]:
        """All hosts of a slice, also while there is none yet: its labels tell how many there are."""
        lists = "list_queued_resources", "list_nodes"
        queued, nodes = (ask(verb, "a list of slices", parent=self._at(region)) for verb in lists)
        known = {each.name.replace("/queuedResources/", "/nodes/"): each for each in queued}
        there = {each.name: each for each in nodes}
        for path in {**known, **there}:
            one, node = known.get(path), there.get(path)
            specs = [node] if node is not None else [each.node for each in one.tpu.node_spec] if one is not None else []
            labels = dict(specs[0].labels) if specs else {}
            if tags.ours(said := google.said(labels), pool):
                of_node = node.state.name if node is not None else ""
                state = _catalog.state(one.state.state.name if one is not None else "ACTIVE", of_node)
                *_, zone, _, slice = path.split("/")
                yield from self._hosts(zone, slice, said, state, {"node": of_node, "labels": labels})

    def _hosts(self, zone: str, slice: str, said: Mapping[str, str], state: Any, more: Any) -> Iterator[Instance]:
        for host in range(len(tags.unpacked(said.get(tags.RANKS, "")))):
            detail = {"api": self.api, "region": zone, "host": host, **more}
            yield replace(tags.instance(self.name, f"{slice}-w-{host}", said, host, state, detail), slice=slice)

    def _end(self, region: str, instances: Mapping[str, Instance]) -> Mapping[str, str]:
        """Asked by name, as a list may lack the newest; again where it is refused, as while it is provisioned."""
        slices = list(dict.fromkeys(each.slice for each in instances.values()))
        outcomes = dict(zip(slices, at_once(partial(self._asked_to_end, region), slices), strict=True))
        for each in outcomes.values():
            if isinstance(each, Exception) and getattr(each, "code", "") not in self.passing:
                raise each
        left = {id: outcomes[each.slice] for id, each in instances.items()}
        return {id: str(why) if isinstance(why, Exception) else "" for id, why in left.items() if why}

    def _asked_to_end(self, zone: str, slice: str) -> bool:
        """Whether anything of it is still there, which was asked to end then."""
        what, at = f"to end {slice}", self._at(zone)
        whole, part = {"name": f"{at}/queuedResources/{slice}"}, {"name": f"{at}/nodes/{slice}"}
        queued, node = quietly("get_queued_resource", what, **whole), quietly("get_node", what, **part)
        if queued is not None and queued.state.state.name != "DELETING":
            quietly("delete_queued_resource", what, **whole, force=True)
        elif queued is None and node is not None and node.state.name != "DELETING":
            quietly("delete_node", what, **part)
        return queued is not None or node is not None

    def _relabel(self, until: datetime, instance: Instance) -> None:
        labels = instance.detail["labels"] | google.labels({tags.UNTIL: tags.stamp(until)})
        node = {"name": f"{self._at(instance.detail['region'])}/nodes/{instance.slice}", "labels": labels}
        quietly("update_node", "to renew it", *self.passing, node=node, update_mask={"paths": ["labels"]})
