"""Rents machines of Google Compute Engine, with GPUs or without accelerators.

API: https://cloud.google.com/compute/docs/reference/rest/v1 (read 2026-11-22). The class `Compute` is this part of the
driver. `_requests` builds the resources to create, and `_client` sends the requests.

If a machine has a limited lifetime, Google deletes the machine at the end of that time (`maxRunDuration`). A machine
that shuts itself down is only stopped: its disk is billed until the client or `skypool gc` deletes the machine. A
machine with a service account can delete itself.

Words of this package:

- reservation: capacity that the project reserved before.
- operation: Google's record of a change in progress.
- record: the API's description of a resource, as an object of Google's SDK.
- placement policy: a resource that puts machines close together.
- session, run of a pool: the time from the start to the end of a pool. It may have several orders.
- need, offer, order: the requirements of a node, a machine type with zone, market and price, and the request to rent
  machines for nodes of a pool (`skypool.model`). A node is a rented machine of a pool; its node number is its number
  there.
- finding: the result of one check. Leftover: another resource of a pool than a machine, such as a disk.
- lease: the time for which a machine lives on without hearing from its client.
- settings: the arguments of `skypool_gcp.GCP`.
- In arguments: `calls` and `api` send the requests. `what` is a request in words, for error messages. `said` are
  skypool's tags of a resource, such as the pool and the node number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from skypool import tracebacks
from skypool.accelerators import Accelerator
from skypool.drivers import preflight, recording, retry, ssh_machine, tags
from skypool.drivers.contract import Answers, undo
from skypool.drivers.regional import chosen, each_done
from skypool.drivers.retry import at_once
from skypool.drivers.settings import networks
from skypool.errors import NoAnswer, ProviderError, RateLimitError, UsageError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api, catalog, list_prices
from skypool_gcp._sdk import requests
from skypool_gcp._settings import Settings
from skypool_gcp.catalog import STATES, boot_images
from skypool_gcp.catalog.facts import FACTS
from skypool_gcp.compute import _account_checks, _client, _proof, _requests
from skypool_gcp.compute._client import ComputeApi, insist, look

if TYPE_CHECKING:
    from google.cloud import compute_v1

_MADE = 180.0
"""Seconds that the creation of a resource may take. Most resources take a few seconds."""

_ADDRESS = 120.0
"""Seconds to wait until a new machine has its public address."""

_TIDYING = 180.0
"""Seconds that the removal of one resource may take."""

_AGAIN = 15.0
"""Seconds after which the deletion of a machine that still runs is requested again."""

_REQUESTED = 30.0
"""Seconds for which a request to create, change or delete a machine is repeated while there is no answer."""

_BOOTING = 420.0
"""Seconds that a machine may need, after it got its address, until it accepts ssh connections."""

_KEYING = 60.0
"""Seconds for which a new machine may show another host key than the one that skypool gives it."""

_QUOTAS = ("GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS")
"""The names of the project-wide quotas that `Compute.check` reports."""


@dataclass(frozen=True)
class Compute:
    """The part of the Google Cloud driver that rents single machines of Compute Engine, and ends them.

    Another part, `skypool_gcp.tpu7x`, lists these machines, and renews the time until which the machines are needed.
    All methods block.

    Attributes:
        api: The name of this part. The offers and machines of this part have this name in `detail["api"]`.
        ending: Seconds for which `terminate` waits until the machines have ended.
    """

    settings: Settings
    api: ClassVar[str] = "compute"
    ending: ClassVar[float] = 240.0

    def offers(self, need: Need) -> Answers[Offer]:
        """Return one offer for each suitable machine type in each zone that has the type, on demand and spot.

        A machine type without a known price is not offered. If the settings name a reservation, only its machine types
        are offered, on demand. If no known machine type could meet the need, no request is sent, and the result is
        empty. But if that is because a needed accelerator has no known price, UsageError is raised.

        If a zone does not answer, its offers are left out, a RuntimeWarning is issued, and `lacks` of the result says
        that offers are missing.

        Raises:
            ProviderError: Google refused or did not answer, or the project has no reservation of the name in the
                settings.
            UsageError: The project may not use a zone in the settings, or the setting `networks` fits no offer. Or no
                price is known for a needed accelerator, or the user's image does not have the form of an image's path.
        """
        types = catalog.types(need)
        if not types:
            catalog.refuse_unpriced(need)
            return Answers()
        zones = set(self.zones(need.regions))
        held = self._reservations()
        rates = list_prices.rates(self.settings)
        base = need.bases.get("gcp") or self.settings.image or ""
        records = look(self._calls.machine_types.list, _named(types))
        models = {model for cards in catalog.pairs(need).values() for model, _ in cards}
        attachable = look(self._calls.accelerator_types.list, _named(sorted(models))) if models else Answers()
        found: list[Offer] = []
        for ware in catalog.wares(records, attachable, need):
            if ware.zone in zones:
                found.extend(ware.offers(need, base, rates, held))
        if need.private_network:
            found = self._connected(found)
        return Answers(found, [*records.lacks, *attachable.lacks])

    def _connected(self, offers: Sequence[Offer]) -> list[Offer]:
        """Return the offers whose machines fit the setting `networks`; without it, warn, and return all offers."""
        wanted = {each.instance_type for each in offers if catalog.fabric(each.instance_type)}
        if not wanted:
            return list(offers)
        if not self.settings.networks:
            tracebacks.warn(_slow(wanted))
            return list(offers)
        places = self._places()
        fits = []
        for each in offers:
            needed = catalog.fabric(each.instance_type)
            mine = self.settings.networks[: len(needed)]
            reached = all(
                catalog.reaches(places[name], type, each.zone) for name, type in zip(mine, needed, strict=False)
            )
            if len(mine) == len(needed) and reached:
                fits.append(each)
        if not fits:
            raise UsageError(
                f"GCP(networks=…) does not fit: {'; '.join(map(_takes, sorted(wanted)))}; all must be in the region of "
                "the machines, and an RDMA network only serves the zone of its profile"
            )
        return fits

    def _places(self) -> dict[str, catalog.Place]:
        """Return where each network of the setting `networks` can be used. Raise ProviderError if one is missing."""
        names = self.settings.networks or ()
        profiles = {
            name: look(self._calls.networks.get, name).network_profile for name in {n.partition("/")[0] for n in names}
        }
        regions: dict[str, set[str]] = {name: set() for name in names}
        for each in look(self._calls.subnetworks.list, _named(sorted({name.partition("/")[2] for name in names}))):
            whole = f"{_api.last_part(each.network)}/{each.name}"
            if whole in regions:
                regions[whole].add(_api.last_part(each.region))
        for name, found in regions.items():
            if not found:
                what = f"the subnetwork {name.partition('/')[2]} of the network {name.partition('/')[0]}"
                raise _api.REFUSALS.error(what, "NoSubnetwork", "the project has no such subnetwork")
        return {name: catalog.Place(regions[name], profiles[name.partition("/")[0]]) for name in names}

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Create one machine for each node number of the order, all in parallel, and return the machines.

        Creates the firewall rules first, and a placement policy if the need has `private_network`. The machines may
        still be starting when they are returned. Calling again with the same order creates no second machine for a
        node: it returns the machines that exist.

        If Google refuses some of the machines, the others get the first node numbers of the order and are returned. If
        the need has `private_network`, the others are ended instead, and the first error is raised.

        Raises:
            ProviderError: No machine was rented. Google refused all machines, or one machine of a private network.
            NoAnswer, RateLimitError: Some machines may exist. Call again with the same order, which finds the machines.
            UsageError: The image is for another processor architecture than the machine type.
            StillRunning: Some machines of the failed order could not be ended, and may still run.
        """
        what = f"{offer.instance_type} in {offer.zone}"
        image = self.image(catalog.machine_of(offer).image, offer.accelerator)
        _requests.check_processor(image, offer)
        self.let_in(order)
        reserved = catalog.machine_of(offer).reserved
        if reserved is not None:
            policies = [*reserved.policies]  # with another placement policy, Google refuses the reservation
        else:
            policies = self._place_together(offer, order) if order.need.private_network else []

        def begin(node: int) -> tuple[str, compute_v1.Operation | None]:
            return self._begin(offer, order, node, image=image, policies=policies, what=what)

        order.asking(*order.nodes)
        begun = at_once(begin, order.nodes)
        outcomes = at_once(partial(self._made, offer.zone, what), begun)
        made = [each for each in outcomes if not isinstance(each, Exception)]
        failed = [each for each in outcomes if isinstance(each, Exception)]
        order.made(*(replace(each, offer=offer) for each in made))
        for e in failed:
            if isinstance(e, (NoAnswer, RateLimitError)):
                raise e  # the pool repeats the order, which then finds the machines that were made
        unexpected = [each for each in failed if not isinstance(each, ProviderError)]
        if failed and (order.need.private_network or not made or unexpected):
            undo(self.terminate, order, made)
            raise (unexpected or failed)[0]
        launched = []
        for instance, node in zip(made, order.nodes, strict=False):
            ranked = instance if instance.node == node else self._ranked(instance, node)
            launched.append(replace(ranked, offer=offer))
        return launched

    def access(self, instance: Instance) -> Access:
        """Return how to reach a machine by ssh at its public address. Waits up to 120 s for the address.

        The method does not test whether the machine accepts connections. For a machine with TPUs, `env` of the result
        has the environment variables that Google's TPU library needs.

        Raises:
            ProviderError: The machine does not exist, is ending, or got no public address in time.
        """
        ends = self._addresses(instance)
        made = ssh_machine.access(
            instance,
            ends.public,
            user=_api.USER,
            booting=_BOOTING,
            keying=_KEYING,
            watch=_api.WATCH,
        )
        return replace(made, env=catalog.env(instance.instance_type, 0, [ends.inside]))

    def terminate(self, instances: Sequence[Instance]) -> None:
        """Delete these machines in parallel, and wait up to 240 s until all are gone.

        If a machine still runs after 15 s, its deletion is requested again. Does not raise for a machine that does not
        exist.

        Raises:
            StillRunning: Some machines still exist, or Google did not say whether they exist. The error's `instances`
                are these machines, and its message gives the reasons.
        """
        zones = {each.id: each.region for each in instances}
        asked: dict[str, float] = {}

        def destroy(id: str) -> None:
            asked[id] = time.monotonic()
            delete = partial(self._calls.instances.delete, id, f"to end the machine {id}", zone=zones[id])
            retry.patiently(delete, _REQUESTED, "resourceNotReady")

        def there() -> list[str]:
            seen = look(self._calls.instances.list, f"labels.{tags.POOL}:*")
            running = {each.name for each in seen if each.status in STATES}
            for id in running & asked.keys():
                if time.monotonic() > asked[id] + _AGAIN:
                    retry.quietly(partial(destroy, id), "resourceNotReady")
            return [each.name for each in seen]

        ssh_machine.terminate_and_wait(instances, destroy, there, self.ending)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return resources that this user's pools left: unused disks, firewall rules, resource policies, templates.

        Args:
            pool: The name of a pool that was started from this machine. None means all pools of this user.

        Raises:
            ProviderError: A list could not be read.
        """
        return list(self._left(pool))

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove these leftover resources in parallel, and wait until all are gone.

        Each removal is tried, even if another one fails. Does not raise for a resource that no longer exists.

        Raises:
            ProviderError: A resource could not be removed, for example because a machine still uses the resource.
            ErrorGroup: Several resources could not be removed, for different reasons.
        """
        each_done(self._remove, leftovers, "Compute Engine: some leftover resources could not be removed")

    def check(self) -> Iterable[Finding]:
        """Yield one finding for each condition for renting machines.

        The checks run in parallel when the first finding is taken. No check changes anything, so none shows whether the
        account may create or delete machines. A failed check does not raise.
        """
        calls = self._calls
        questions = preflight.basics(
            lambda: look(self._calls.project_record).name,
            self._date,
            self.settings.ssh_from,
        )
        questions[f"network {self.settings.network}"] = lambda: _account_checks.network(calls, self._regions())
        questions["networks between GPUs"] = lambda: _account_checks.fabric(
            self._places() if self.settings.networks else None
        )
        questions["zones"] = lambda: len(self.zones(()))
        questions["machines of skypool"] = lambda: len(list(_client.labelled(self._calls.instances)))
        questions["prices"] = lambda: list_prices.told(self.settings, self._shapes)
        for path in [self.settings.image] if self.settings.image else boot_images.IMAGES.values():
            questions[f"image {path}"] = partial(self._image_name, path)
        questions["machine types with GPUs"] = lambda: _account_checks.types(
            look(calls.machine_types.list, _account_checks.filter()),
            look(calls.accelerator_types.list, 'name eq ".*"'),
        )
        for metric in _QUOTAS:
            questions[f"quota {metric}"] = partial(self._quota, metric)
        questions["quotas of GPUs"] = lambda: _account_checks.quotas(calls, self._regions())
        return preflight.findings({f"Compute Engine: {what}": question for what, question in questions.items()})

    def prove_creates(self) -> Iterable[Finding]:
        """Request three machines and a firewall rule that Google must refuse, and return one finding for each.

        Nothing is rented. The requests are sent when the first finding is taken. A request that is not refused as
        expected gives a failed finding.
        """

        def find() -> tuple[Offer, compute_v1.Image]:
            offer = min(self.offers(Need()), key=lambda each: each.usd_per_hour)
            return offer, self.image(catalog.machine_of(offer).image)

        return _proof.refusals(self._calls, find)

    def _shapes(self) -> dict[str, list_prices.Shape]:
        """Return a dict from machine type to shape, for the types in the table of prices that Google still has."""
        records = look(self._calls.machine_types.list, _named(sorted(list_prices.machines())))
        return {
            each.name: list_prices.Shape(
                each.guest_cpus,
                each.memory_mb / 1024,
                [(card.guest_accelerator_type, card.guest_accelerator_count) for card in each.accelerators],
            )
            for each in records
        }

    # --- what there is ---------------------------------------------------------------------------------------

    @property
    def _calls(self) -> ComputeApi:
        """A new client object for the requests to Compute Engine, for this driver's settings."""
        return ComputeApi(self.settings)

    def zones(self, patterns: Sequence[str]) -> list[str]:
        """Return the names of the zones to rent in: the zones of the settings, or else all zones that are up, sorted.

        Args:
            patterns: Patterns of zones or regions, such as "us-east1-b", "us-east1" or "eu*". A zone is returned if it
                matches one of them. If the list is empty, all zones are returned.

        Raises:
            UsageError: The settings name a zone that does not exist, is down, or that the project may not use.
            ProviderError: Google refused the request, or did not answer within 20 s.
        """
        up = [each.name for each in look(self._calls.zones.list) if each.status == "UP"]
        of_zones_and_regions = [each for pattern in patterns for each in (pattern, f"{pattern}-?")]
        return chosen(up, self.settings.zones or (), of_zones_and_regions)

    def _regions(self) -> list[str]:
        """Return the sorted names of the regions in which machines may be rented."""
        return sorted({_api.region_of(each) for each in self.zones(())})

    def _reservations(self) -> list[compute_v1.Reservation] | None:
        """Return the reservations with the name in the settings, in all zones; None if the settings name none."""
        if self.settings.reservation is None:
            return None
        found = look(self._calls.reservations.list, f'name eq "{self.settings.reservation}"')
        if not found:
            what = f"the reservation {self.settings.reservation}"
            raise _api.REFUSALS.error(what, "NoReservation", "the project has no reservation of this name")
        return found

    def _date(self) -> str:
        """Return the header "Date" of an answer of Google. Raises ProviderError if there is none within 10 s."""
        base = _api.endpoint("compute") or "https://compute.googleapis.com"
        with requests.Session() as session:
            recording.attend(session, _api.REFUSALS.provider, "compute", private=_api.PRIVATE)
            return _api.call("to tell the time", lambda: session.head(base, timeout=10).headers["Date"])

    def _quota(self, metric: str) -> str | Finding:
        """Return the limit and use of a project-wide quota, as text. Raise QuotaError if nothing is left of it."""
        for each in look(self._calls.project_record).quotas:
            if each.metric == metric:
                text = f"limit {each.limit:g}, in use {each.usage:g}"
                if each.limit > each.usage:
                    return text
                what = f"more of the quota {metric}"
                refused = _api.REFUSALS.error(what, "QUOTA_EXCEEDED", text, project=self.settings.billed())
                if each.limit or metric != "GPUS_ALL_REGIONS":
                    raise refused
                # a limit of 0 for GPUs is no failure: the user may want none
                return Finding("", True, text, f"to rent GPUs, {preflight.failure('', refused).advice}", open=True)
        return "Google does not report this quota"

    def image(self, path: str, has: Accelerator | None = None) -> compute_v1.Image:
        """Return Google's record of an image, or of the newest image of an image family.

        If Google has removed one of skypool's default families, an older family is used that serves the accelerator.

        Args:
            path: The path of an image or of an image family, such as "projects/P/global/images/family/F". Or a short
                name from `boot_images.IMAGES`, such as "ubuntu-24.04".
            has: The accelerator of the machine that the image is for. None means any.

        Raises:
            ProviderError: There is no such image or family, or Google did not answer within 20 s.
            UsageError: `path` does not have the form of an image's path.
        """
        *first, last = boot_images.families(boot_images.IMAGES.get(path, path), has)
        for each in first:
            found = retry.quietly(partial(self._image, each), "notFound")
            if found is not None:
                return found
        return self._image(last)

    def _image(self, path: str) -> compute_v1.Image:
        """Return Google's record of the image at a path. Raise ProviderError if there is none."""
        parsed = boot_images.parsed(path)
        if parsed.is_family:
            return look(self._calls.newest_image, parsed.project, parsed.name)
        return look(self._calls.images.get, parsed.name, project=parsed.project)

    def _image_name(self, path: str) -> str:
        """Return the name of the image at a path, or of a family's newest image. Raise ProviderError if none exists."""
        return str(self.image(path).name)

    def machine(self, record: compute_v1.Instance, said: Mapping[str, str]) -> Instance:
        """Convert the API's record of a machine to an `Instance`. Sends no request.

        The `region` of the instance is the machine's zone. The `state` is "starting", "running", or "ending" for every
        other status. `billed_from` is set only while the machine runs.

        Args:
            said: The tags from the machine's labels.
        """
        instance = tags.instance(
            "gcp",
            record.name,
            said,
            0,
            STATES.get(record.status, "ending"),
            {"api": self.api},
            region=_api.last_part(record.zone),
            instance_type=_api.last_part(record.machine_type),
        )
        if record.status != "RUNNING" or not record.last_start_timestamp:
            return instance
        return replace(instance, billed_from=datetime.fromisoformat(record.last_start_timestamp).timestamp())

    def _addresses(self, instance: Instance) -> catalog.Ends:
        """Return a machine's addresses. Raise ProviderError ("pending") if it has no public one within 120 s."""
        what = f"to describe the machine {instance.id}"
        tell = partial(self._calls.instances.get, instance.id, what, zone=instance.region)

        def see() -> catalog.Ends:
            record = retry.quietly(tell, "notFound")
            if record is None:
                raise _gone(instance, "it no longer exists", code="STOPPED")
            if record.status not in STATES:
                raise _gone(instance, f"its status is {record.status}", code=record.status)
            for ends in catalog.addresses(record):
                return ends
            text = f"the machine {instance.id} in {instance.region} has no public address yet; try again later"
            raise ProviderError(text, provider="gcp", code="pending")

        return retry.patiently(see, _ADDRESS, "pending")

    # --- making ----------------------------------------------------------------------------------------------

    def let_in(self, order: Order) -> None:
        """Create the firewall rules for the machines of one run of a pool, and wait until they exist.

        The rules open port 22 to the networks of the setting `ssh_from`. Without this setting, they open port 22 to the
        public address of the client's machine. If the order needs a private network, the rules also open all ports
        among the machines of the pool. All other incoming traffic is denied. Rules that exist are not changed.

        Raises:
            ProviderError: A rule could not be created, or the client's public address could not be found. If several
                rules fail, the error of the first of them is raised.
        """
        allowed = networks(self.settings.ssh_from)

        def make(rule: compute_v1.Firewall) -> None:
            what = f"the firewall rule {rule.name}"
            insist(self._calls, what, partial(self._calls.firewalls.insert, rule, what), _MADE)

        for outcome in at_once(make, _requests.firewall_rules(self.settings, order, allowed)):
            if isinstance(outcome, Exception):
                raise outcome  # the first error only: the pool does not handle groups of errors here

    def admit(self, instance: Instance) -> None:
        """Create a firewall rule that opens port 22 of the machines of a pool to this computer's present address.

        It is removed with the other rules of the pool. Does nothing with the setting `ssh_from`, or if there is such a
        rule.

        Raises:
            ProviderError: The rules could not be read, the rule could not be created, or the address is not known.
        """
        if self.settings.ssh_from:
            return
        [network] = networks(None)
        there = [rule for rule, _ in _client.described(self._calls.firewalls, instance.pool)]
        known = {rule.name for rule in there}
        for rule in filter(None, (_requests.admitting(each, network) for each in there)):
            if rule.name not in known:
                what = f"the firewall rule {rule.name}"
                insist(self._calls, what, partial(self._calls.firewalls.insert, rule, what), _MADE)

    def _place_together(self, offer: Offer, order: Order) -> list[str]:
        """Create the placement policy for the machines. Return its path in a list; [] if the type supports none."""
        if catalog.family(offer.instance_type) not in FACTS["placed"]:
            return []
        policy = _requests.placement(order, offer.region)
        what = f"the placement policy {policy.name}"
        insist(self._calls, what, partial(self._calls.policies.insert, policy, what, region=offer.region), _MADE)
        return [f"projects/{self.settings.billed()}/regions/{offer.region}/resourcePolicies/{policy.name}"]

    def _begin(
        self, offer: Offer, order: Order, node: int, *, image: compute_v1.Image, policies: Sequence[str], what: str
    ) -> tuple[str, compute_v1.Operation | None]:
        """Request the machine of one node. Return (name, operation); the latter is None if the machine exists."""
        name = _api.name(order.pool, order.token, str(node))
        instance = _requests.machine(
            self.settings,
            offer,
            order,
            name=name,
            image=image,
            labels=_api.labels(tags.tags(replace(order, nodes=(node,)))),
            scripts=_requests.scripts(self.settings, order, offer.zone, f"instances/{name}"),
            policies=policies,
        )
        id = _requests.request_id(offer.zone, name)
        insert = partial(self._calls.instances.insert, instance, what, zone=offer.zone, request_id=id)
        return name, retry.patiently(insert, _REQUESTED)

    def _made(self, zone: str, what: str, begun: tuple[str, compute_v1.Operation | None] | Exception) -> Instance:
        """Wait up to 180 s for the machine that `_begin` requested, and return it. `begun` is its result or error."""
        if isinstance(begun, Exception):
            raise begun
        name, operation = begun
        # Google may accept a request and refuse it later
        is_over = _client.done(self._calls, operation, what, _MADE)
        try:
            record = look(self._calls.instances.get, name, what, zone=zone)
        except ProviderError as e:
            if e.code == "notFound" and is_over:
                text = f"its machine {name} has ended already"
                raise _api.REFUSALS.error(what, "STOPPED", text) from e
            raise
        return self.machine(record, _api.said(record.labels))

    def _ranked(self, instance: Instance, node: int) -> Instance:
        """Give a machine another node number: write it into the labels, and return the instance with that number."""
        self.label(instance.id, instance.region, {tags.NODES: tags.packed([node])})
        return replace(instance, node=node)

    def label(self, id: str, zone: str, said: Mapping[str, str]) -> None:
        """Change some labels of a machine, and keep its other labels. Does nothing if the machine does not exist.

        Repeats the change for up to 30 s if there is no answer, or if somebody else changed the labels in between.
        Returns when Google has accepted the change.

        Args:
            said: The tags to write. The method encodes them as labels.

        Raises:
            ProviderError: Google refused the change, or did not answer within 30 s.
        """

        what = f"to label the machine {id}"

        def change() -> None:
            record = look(self._calls.instances.get, id, what, zone=zone)
            labels = {**record.labels, **_api.labels(said)}
            self._calls.set_labels(zone, id, labels, record.label_fingerprint, what)

        # "conditionNotMet" means that the labels were changed after they were read.
        retry.quietly(partial(retry.patiently, change, _REQUESTED, "conditionNotMet"), "notFound")

    # --- what else there is ----------------------------------------------------------------------------------

    def _left(self, pool: str | None) -> Iterator[Leftover]:
        """Yield the leftovers of a pool, or of all pools of this user: disks, firewall rules, policies, templates."""
        calls = self._calls
        for disk, said in _client.labelled(calls.disks, pool):
            if not disk.users:
                zone = _api.last_part(disk.zone)
                region = _api.last_part(disk.region) or _api.region_of(zone)
                yield self._leftover("disk", disk.name, said, region, zone)
        for rule, said in _client.described(calls.firewalls, pool):
            yield self._leftover("firewall", rule.name, said)
        for policy, said in _client.described(calls.policies, pool):
            yield self._leftover("placement", policy.name, said, _api.last_part(policy.region))
        for template, said in _client.described(calls.templates, pool):
            yield self._leftover("template", template.name, said, _api.last_part(template.region))

    def _leftover(self, kind: str, name: str, said: Mapping[str, str], region: str = "", zone: str = "") -> Leftover:
        """Return the `Leftover` of a resource. `region` and `zone` are "" for a resource of the whole project."""
        return tags.leftover("gcp", kind, name, said, region, {"api": self.api, "zone": zone})

    def _remove(self, leftover: Leftover) -> None:
        """Delete one leftover resource, and wait up to 180 s until it is gone."""
        calls = self._calls
        name = leftover.id
        what = f"to remove the {leftover.kind} {name}"
        remove: Callable[[], compute_v1.Operation | None]
        match leftover.kind:
            case "disk":
                remove = partial(calls.disks.delete, name, what, zone=leftover.detail["zone"])
            case "firewall":
                remove = partial(calls.firewalls.delete, name, what)
            case "placement":
                remove = partial(calls.policies.delete, name, what, region=leftover.region)
            case "template":
                remove = partial(calls.templates.delete, name, what)
            case _:
                raise ValueError(
                    f"cannot remove {leftover.kind} {leftover.id}: skypool never creates this kind of resource "
                    "in Compute Engine; remove it yourself in the Google Cloud console"
                )
        insist(calls, what, remove, _TIDYING)


def _named(names: Sequence[str]) -> str:
    """Return a filter expression of the API for resources with one of these names, such as 'name eq "(a|b)"'."""
    return f'name eq "({"|".join(names)})"'


def _takes(machine_type: str) -> str:
    """Return the further network interfaces of a machine type as text: "TYPE takes 1 GVNIC and 8 MRDMA in …"."""
    types = catalog.fabric(machine_type)
    parts = [f"{types.count(type)} {type}" for type in ("GVNIC", "MRDMA") if type in types]
    return f"{machine_type} takes {' and '.join(parts)} in this order"


def _slow(machine_types: Iterable[str]) -> str:
    """Return a warning: without the setting `networks`, GPUs of several such machines reach each other slowly."""
    several = sorted(machine_types)
    return (
        f"GPUs of several machines of {', '.join(several)} reach each other over one ordinary network interface, "
        f"because GCP(networks=…) is not set ({'; '.join(map(_takes, several))})"
    )


def _gone(instance: Instance, text: str, *, code: str) -> ProviderError:
    """Return the error for a machine that has ended or is ending. The file errors.csv maps `code` to its class."""
    return _api.REFUSALS.error(f"access to the machine {instance.id}", code, text)
