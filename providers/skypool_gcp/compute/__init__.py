"""Rents machines of Google Compute Engine, with GPUs or without accelerators.

API: https://cloud.google.com/compute/docs/reference/rest/v1 (read 2026-11-22). `Compute` is the part of the driver. It
uses `_asked`, which sends the requests, and `_requests`, which builds them.

If a machine has a limited lifetime, Google deletes it at its end (`maxRunDuration`). A machine that shuts itself down
is only stopped: its disk is still billed until the machine is deleted. The client or `skypool gc` deletes it. A machine
with a service account can delete itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from skypool.drivers import preflight, retry, ssh_machine, tags
from skypool.drivers.contract import Answers, undo
from skypool.drivers.regional import chosen, each_done
from skypool.drivers.retry import at_once
from skypool.drivers.settings import networks
from skypool.errors import NoAnswer, ProviderError, RateLimitError
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api, billing, catalog
from skypool_gcp._sdk import requests
from skypool_gcp.catalog import STATES
from skypool_gcp.compute import _asked, _requests
from skypool_gcp.compute._asked import ComputeApi, insist, look

if TYPE_CHECKING:
    from google.cloud import compute_v1

_MADE = 180.0
"""Seconds that the creation of a resource may take. Most take a few."""

_ADDRESS = 120.0
"""Seconds to wait until a new machine has its public address."""

_TIDYING = 180.0
"""Seconds that the removal of one resource may take."""

_AGAIN = 15.0
"""Seconds after which the deletion of a machine that still runs is requested again."""

_REQUESTED = 30.0
"""Seconds for which a request to create, change or delete a machine is repeated while there is no answer."""

_BOOTING = 420.0
"""Seconds that a machine may need until it accepts ssh connections, after it has got its address."""

_KEYING = 60.0
"""Seconds for which a new machine may show another host key than the one that skypool gives it."""

_QUOTAS = ("GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS")
"""The names of the project-wide quotas that `Compute.check` reports."""


@dataclass(frozen=True)
class Compute:
    """The part of the Google Cloud driver that rents single machines of Compute Engine, and ends them.

    Listing its machines and renewing their time is done by the part `skypool_gcp.groups`. All methods block.

    Attributes:
        settings: The settings of the driver.
        api: The name of this part. Its offers and machines carry it in `detail["api"]`.
        ending: Seconds for which `terminate` waits until the machines have ended.
    """

    settings: _api.Settings
    api: ClassVar[str] = "compute"
    ending: ClassVar[float] = 240.0

    def offers(self, need: Need) -> Answers[Offer]:
        """Return one offer for each suitable machine type, in each zone that has it, on each market (on demand, spot).

        A type without a known price is not offered. If the settings name a reservation, only the types in it are
        offered, on demand. If a zone does not answer, its offers are left out, a RuntimeWarning is issued, and `lacks`
        of the result is not empty. The result is empty, without any request, if no type could meet the need.

        Args:
            need: The requirements that each machine must meet.

        Raises:
            ProviderError: Google refused or did not answer, or the project has no reservation of the name in the
                settings.
            UsageError: The settings name a zone that the project may not use, or the image is not a path of an image.
        """
        types = catalog.types(need)
        if not types:
            return Answers()
        zones = set(self.zones(need.regions))
        held = self._reservations()
        rates = billing.rates(self.settings)
        base = need.bases.get("gcp") or self.settings.image or ""
        records = look(self._calls.machine_types, _named(types))
        models = {model for cards in catalog.pairs(need).values() for model, _ in cards}
        attachable = look(self._calls.accelerator_types, _named(sorted(models))) if models else Answers()
        found: list[Offer] = []
        for ware in catalog.wares(records, attachable, need):
            if ware.zone in zones:
                found.extend(ware.offers(need, base, rates, held))
        return Answers(found, [*records.lacks, *attachable.lacks])

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Create one machine for each node number of the order, all in parallel, and return the machines.

        Firewall rules are created first, and with `private_network` a placement policy. The machines may still be
        starting when they are returned. The same order creates no second machine: it returns those that exist.

        If Google refuses some of the machines, the others are renumbered, so that they have the first node numbers, and
        are returned. With `private_network` they are ended instead, and the first error is raised.

        Args:
            offer: The machine type, zone and market, as `offers` returned them.
            order: The node numbers, the pool, and an idempotency token.

        Raises:
            ProviderError: No machine was rented. Google refused all, or one of a private network.
            NoAnswer, RateLimitError: Some machines may exist. Call again with the same order, which finds them.
            UsageError: The image is for another processor architecture than the machine type.
            StillRunning: Machines that had to be ended again may still run.
        """
        what = f"{offer.instance_type} in {offer.zone}"
        image = self.image(catalog.machine_of(offer).image)
        _requests.check_processor(image, offer)
        self.let_in(order)
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
        """Return how to reach a machine by ssh at its public address. Waits up to 120 s for that address.

        Whether the machine accepts connections is not tried. For a machine with TPUs, `env` of the result has the
        variables that its TPU library needs.

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

        The request is repeated after 15 s for a machine that still runs. Does not raise for a machine that does not
        exist.

        Raises:
            StillRunning: Some machines still exist, or Google did not say. The error carries them, with the reasons.
        """
        zones = {each.id: each.region for each in instances}
        asked: dict[str, float] = {}

        def destroy(id: str) -> None:
            asked[id] = time.monotonic()
            delete = partial(self._calls.delete_instance, zones[id], id, what=f"to end {id}")
            retry.patiently(delete, _REQUESTED, "resourceNotReady")

        def there() -> list[str]:
            seen = look(self._calls.instances, f"labels.{tags.POOL}:*")
            running = {each.name for each in seen if each.status in STATES}
            for id in running & asked.keys():
                if time.monotonic() > asked[id] + _AGAIN:
                    retry.quietly(partial(destroy, id), "resourceNotReady")
            return [each.name for each in seen]

        ssh_machine.terminate_and_wait(instances, destroy, there, self.ending)

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return resources that this user's pools left: unused disks, firewall rules, resource policies, templates.

        Disks that a machine uses are not among them. The list is empty if there are none.

        Args:
            pool: The name of a pool (a group of rented machines), which must have been started from this machine. None
                means all pools of this user.

        Raises:
            ProviderError: A list could not be read.
        """
        return list(self._left(pool))

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove these leftover resources in parallel, and wait until all are gone.

        All are tried, even if one fails. Does not raise for a resource that no longer exists.

        Raises:
            ProviderError: One could not be removed, for example because a machine still uses it.
            ErrorGroup: Several could not be removed, for different reasons.
        """
        each_done(self._remove, leftovers, "Compute Engine: not all leftovers could be removed")

    def check(self) -> Iterable[Finding]:
        """Yield one finding (a passed or failed check, with text) for each condition for renting machines.

        They are: the SSH program, the networks that may log in, credentials, this machine's clock, the network, zones,
        prices, images and quotas. The checks run in parallel when the first finding is taken. They only read. So they
        do not show if the account may create or delete machines. A failed check does not raise.
        """
        network = self.settings.network
        questions = preflight.basics(
            lambda: look(self._calls.project_record).name,
            self._date,
            self.settings.ssh_from,
        )
        questions[f"network {network}"] = lambda: look(self._calls.network, network).name
        questions["zones"] = lambda: len(self.zones(()))
        questions["machines of skypool"] = lambda: len(list(_asked.labelled(self._calls.instances)))
        questions["prices"] = lambda: billing.told(self.settings)
        for path in [self.settings.image] if self.settings.image else catalog.IMAGES.values():
            questions[f"image {path}"] = partial(self._image_name, path)
        for metric in _QUOTAS:
            questions[f"quota {metric}"] = partial(self._quota, metric)
        return preflight.findings({f"Compute Engine: {what}": question for what, question in questions.items()})

    # --- what there is ---------------------------------------------------------------------------------------

    @property
    def _calls(self) -> ComputeApi:
        """A new client object for the requests to Compute Engine, for this driver's settings."""
        return ComputeApi(self.settings)

    def zones(self, patterns: Sequence[str]) -> list[str]:
        """Return the names of the zones to rent in: those of the settings, or else all that are up, sorted.

        Args:
            patterns: Zones or regions to keep, such as "us-east1-b", "us-east1" or "eu*". A zone is kept if it matches
                one of them. Empty keeps all. The result may be [].

        Raises:
            UsageError: The settings name a zone that does not exist, is down, or that the project may not use.
            ProviderError: Google refused the request, or did not answer within 20 s.
        """
        up = [each.name for each in look(self._calls.zones) if each.status == "UP"]
        of_zones_and_regions = [each for pattern in patterns for each in (pattern, f"{pattern}-?")]
        return chosen(up, self.settings.zones or (), of_zones_and_regions)

    def _reservations(self) -> list[compute_v1.Reservation] | None:
        """Return the reservations (capacity reserved before) that have the name in the settings, one for each zone.

        Returns None if the settings name no reservation.

        Raises:
            ProviderError: The project has no reservation of this name, or the list could not be read.
        """
        if self.settings.reservation is None:
            return None
        found = look(self._calls.reservations, f'name eq "{self.settings.reservation}"')
        if not found:
            text = f"the project has no reservation {self.settings.reservation}"
            raise _api.REFUSALS.error("a reservation", "NoReservation", text)
        return found

    def _date(self) -> str:
        """Return the HTTP header "Date" of an answer of Google, such as "Mon, 23 Nov 2026 05:00:00 GMT".

        Raises:
            ProviderError: Google did not answer within 10 s.
        """
        base = _api.endpoint("compute") or "https://compute.googleapis.com"
        return _api.call("the time", lambda: requests.head(base, timeout=10).headers["Date"])

    def _quota(self, metric: str) -> str:
        """Return the limit and the current use of a project-wide quota as text, such as "8 at once, 2 in use".

        Returns "Google does not report it" if the project has no such quota.

        Args:
            metric: Google's name of the quota, such as "GPUS_ALL_REGIONS".

        Raises:
            QuotaError: The use has reached the limit. This is so for a limit of 0, too.
            ProviderError: The quotas could not be read.
        """
        for each in look(self._calls.project_record).quotas:
            if each.metric == metric:
                text = f"{each.limit:g} at once, {each.usage:g} in use"
                if each.limit <= each.usage:
                    raise _api.REFUSALS.error(metric, "QUOTA_EXCEEDED", text, project=self.settings.billed())
                return text
        return "Google does not report it"

    def image(self, path: str) -> compute_v1.Image:
        """Return Google's record of an image, or of the newest image of an image family.

        Args:
            path: The path of an image or of a family, such as "projects/P/global/images/family/F". Or a short name from
                `catalog.IMAGES`, such as "ubuntu-24.04".

        Raises:
            ProviderError: There is no such image or family, or Google did not answer within 20 s.
            UsageError: `path` does not have the form of an image's path.
        """
        parsed = catalog.parsed(catalog.IMAGES.get(path, path))
        if parsed.is_family:
            return look(self._calls.newest_image, parsed.project, parsed.name)
        return look(self._calls.image, parsed.project, parsed.name)

    def _image_name(self, path: str) -> str:
        """Return the name of the image at a path, or of the newest image if the path names a family.

        Raises as `image` does.
        """
        return str(self.image(path).name)

    def machine(self, record: compute_v1.Instance, said: Mapping[str, str]) -> Instance:
        """Convert the API's record of a machine to an `Instance`. Sends no request.

        Its `region` is the machine's zone. Its state is "ending" if Google's status is none of the known starting or
        running ones. Its `billed_from` is set only while the machine is running.

        Args:
            record: The API's record of the machine.
            said: The tags that were read from the machine's labels. They give pool, node number, token and time.
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
        """Wait up to 120 s until a machine has a public address, and return its internal and public address.

        Raises:
            ProviderError: The machine does not exist, is ending, or got no public address in time (`code` "pending").
        """
        tell = partial(self._calls.instance, instance.region, instance.id, what=f"to tell of {instance.id}")

        def see() -> catalog.Ends:
            record = retry.quietly(tell, "notFound")
            if record is None:
                raise _gone(instance, "gone", code="STOPPED")
            if record.status not in STATES:
                raise _gone(instance, record.status, code=record.status)
            for ends in catalog.addresses(record):
                return ends
            text = f"the machine {instance.id} in {instance.region} has no public address yet; try again"
            raise ProviderError(text, provider="gcp", code="pending")

        return retry.patiently(see, _ADDRESS, "pending")

    # --- making ----------------------------------------------------------------------------------------------

    def let_in(self, order: Order) -> None:
        """Create the firewall rules for the machines of one run of a pool, and wait until they exist.

        They open port 22 to the networks of the setting `ssh_from`, or to this machine's public address. If the order
        needs a private network, they also open all ports among the machines. All other incoming traffic is denied.
        Rules that exist are kept as they are.

        Raises:
            ProviderError: A rule could not be created, or this machine's public address is not known. If several rules
                fail, it is the first error.
        """
        allowed = networks(self.settings.ssh_from)

        def make(rule: compute_v1.Firewall) -> None:
            what = f"the firewall rule {rule.name}"
            insist(self._calls, what, partial(self._calls.insert_firewall, rule, what), _MADE)

        for outcome in at_once(make, _requests.firewall_rules(self.settings, order, allowed)):
            if isinstance(outcome, Exception):
                raise outcome  # the first error only: failover does not know groups of errors

    def _place_together(self, offer: Offer, order: Order) -> list[str]:
        """Create the placement policy that puts the machines of a private network close together.

        Waits until it exists.

        Returns:
            The path of the policy as the only item of a list. [] if the machine type does not support such a policy.

        Raises:
            ProviderError: The policy could not be created.
        """
        if catalog.family(offer.instance_type) not in catalog.FACTS["placed"]:
            return []
        policy = _requests.placement(order, offer.region)
        what = f"the placement {policy.name}"
        insist(self._calls, what, partial(self._calls.insert_policy, offer.region, policy, what), _MADE)
        return [f"projects/{self.settings.billed()}/regions/{offer.region}/resourcePolicies/{policy.name}"]

    def _begin(
        self, offer: Offer, order: Order, node: int, *, image: compute_v1.Image, policies: Sequence[str], what: str
    ) -> tuple[str, compute_v1.Operation | None]:
        """Request the machine of one node, without waiting for it.

        Return its name and the operation (Google's progress record). The operation is None if the machine exists
        already. A repetition makes no second machine, because the machine's name and the request's id depend only on
        the order and the node. While there is no answer, the request is repeated for up to 30 s.

        Args:
            offer: The offer that is rented.
            order: The request to rent: pool, node numbers, token and limits.
            node: The node number of the machine.
            image: The image of its disk.
            policies: The paths of its placement policies.
            what: The request in words, for error messages.

        Raises:
            ProviderError: Google refused the request, or did not answer.
        """
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
        insert = partial(
            self._calls.insert_instance,
            offer.zone,
            instance,
            _requests.request_id(offer.zone, name),
            what,
        )
        return name, retry.patiently(insert, _REQUESTED)

    def _made(self, zone: str, what: str, begun: tuple[str, compute_v1.Operation | None] | Exception) -> Instance:
        """Wait up to 180 s until a machine is created, and return it as an `Instance`.

        Google may accept a request and refuse it later, so its operation (Google's progress record) must end first. If
        it still runs after that time, the machine is returned nevertheless if it exists.

        Args:
            zone: The zone of the machine.
            what: The request in words, for error messages.
            begun: The result of `_begin`, or the exception that it raised.

        Raises:
            Exception: `begun`, if it is an exception.
            ProviderError: Google refused the machine after all, or the machine of this order has ended already.
        """
        if isinstance(begun, Exception):
            raise begun
        name, operation = begun
        is_over = _asked.done(self._calls, operation, what, _MADE)
        try:
            record = look(self._calls.instance, zone, name, what=what)
        except ProviderError as e:
            if e.code == "notFound" and is_over:
                raise _api.REFUSALS.error(what, "STOPPED", "the machine of this order has ended already") from e
            raise
        return self.machine(record, _api.said(record.labels))

    def _ranked(self, instance: Instance, node: int) -> Instance:
        """Write a new node number into the labels of a machine, and return a copy of the instance with that number.

        If the machine no longer exists, the copy is returned all the same. Raises ProviderError if Google refuses.
        """
        self.label(instance.id, instance.region, {tags.NODES: tags.packed([node])})
        return replace(instance, node=node)

    def label(self, id: str, zone: str, said: Mapping[str, str]) -> None:
        """Change some labels of a machine, and keep its other labels. Does nothing if the machine does not exist.

        Repeats the change for up to 30 s if there is no answer, or if somebody else changed the labels in between.
        Returns when Google has accepted the change.

        Args:
            id: The name of the machine.
            zone: The zone of the machine.
            said: The tags to write. They are encoded as labels.

        Raises:
            ProviderError: Google refused the change, or did not answer in that time.
        """

        def change() -> None:
            record = look(self._calls.instance, zone, id)
            labels = {**record.labels, **_api.labels(said)}
            self._calls.set_labels(zone, id, labels, record.label_fingerprint, what=f"to label {id}")

        # "conditionNotMet" means that the labels were changed after they were read.
        retry.quietly(partial(retry.patiently, change, _REQUESTED, "conditionNotMet"), "notFound")

    # --- what else there is ----------------------------------------------------------------------------------

    def _left(self, pool: str | None) -> Iterator[Leftover]:
        """Yield the resources that this user's pools left: unused disks, firewall rules, resource policies, templates.

        Args:
            pool: The name of a pool (a group of rented machines), which must have been started from this machine. None
                means all pools of this user.

        Raises:
            ProviderError: A list could not be read.
        """
        calls = self._calls
        for disk, said in _asked.labelled(calls.disks, pool):
            if not disk.users:
                zone = _api.last_part(disk.zone)
                region = _api.last_part(disk.region) or _api.region_of(zone)
                yield self._leftover("disk", disk.name, said, region, zone)
        for rule, said in _asked.described(calls.firewalls, pool):
            yield self._leftover("firewall", rule.name, said)
        for policy, said in _asked.described(calls.policies, pool):
            yield self._leftover("placement", policy.name, said, _api.last_part(policy.region))
        for template, said in _asked.described(calls.templates, pool):
            yield self._leftover("template", template.name, said, _api.last_part(template.region))

    def _leftover(self, kind: str, name: str, said: Mapping[str, str], region: str = "", zone: str = "") -> Leftover:
        """Return a `Leftover` object for a resource of Compute Engine. Sends no request.

        Args:
            kind: "disk", "firewall", "placement" (any resource policy) or "template".
            name: The name of the resource.
            said: Its tags, from which the pool and the time until which it is needed are read.
            region: Its region; "" if it belongs to the whole project.
            zone: Its zone; "" if it is not in a zone.
        """
        return tags.leftover("gcp", kind, name, said, region, {"api": self.api, "zone": zone})

    def _remove(self, leftover: Leftover) -> None:
        """Delete one leftover resource, and wait up to 180 s until it is gone. Does not raise if it does not exist.

        Raises:
            ProviderError: It could not be deleted, for example because it is still used.
            ValueError: `leftover.kind` is not a kind that `leftovers` returns.
        """
        calls = self._calls
        name = leftover.id
        what = f"to remove {name}"
        remove: Callable[[], compute_v1.Operation | None]
        match leftover.kind:
            case "disk":
                remove = partial(calls.delete_disk, leftover.detail["zone"], name, what)
            case "firewall":
                remove = partial(calls.delete_firewall, name, what)
            case "placement":
                remove = partial(calls.delete_policy, leftover.region, name, what)
            case "template":
                remove = partial(calls.delete_template, name, what)
            case _:
                raise ValueError(
                    f"cannot remove {leftover.kind} {leftover.id}: skypool never creates this kind of resource "
                    "in Compute Engine; remove it yourself in the Google Cloud console"
                )
        insist(calls, what, remove, _TIDYING)


def _named(names: Sequence[str]) -> str:
    """Return a filter expression of the API for resources with one of these names, such as 'name eq "(a|b)"'."""
    return f'name eq "({"|".join(names)})"'


def _gone(instance: Instance, status: str, *, code: str) -> ProviderError:
    """Return, without raising it, the error for a machine that has ended or is ending.

    Args:
        instance: The machine.
        status: Its state in words, for the message.
        code: The error code to look up in errors.csv, which decides the class of the error.
    """
    text = f"the machine is {status}: Google took it back, or its lease was over"
    return _api.REFUSALS.error(f"to keep {instance.id}", code, text)
