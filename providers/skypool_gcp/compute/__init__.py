"""Rents machines of Compute Engine, with GPUs or without accelerators.

API: https://cloud.google.com/compute/docs/reference/rest/v1 (read 2026-11-22). Google deletes a machine at the end of
its lifetime, if it has one (`maxRunDuration`). A machine that shuts itself down is only stopped: its disk is still
billed until the machine is deleted. The pool or `skypool gc` deletes it, or the machine itself if it has a service
account.
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
"""Seconds within which a resource must be made. Most operations take a few."""

_ADDRESS = 120.0
"""Seconds within which a machine must get its public address."""

_TIDYING = 180.0
"""Seconds within which a leftover must be removed."""

_AGAIN = 15.0
"""Seconds after which the end of a machine that still runs is requested again."""

_REQUESTED = 30.0
"""Seconds for which a request to make, change or end a machine is repeated while there is no answer."""

_BOOTING = 420.0
"""Seconds within which a machine with an address must accept ssh connections."""

_KEYING = 60.0
"""Seconds for which a machine that accepts connections may still have another host key."""

_QUOTAS = ("GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS")
"""The project-wide quotas that a check reports."""


@dataclass(frozen=True)
class Compute:
    """The Compute Engine part of the driver. Finding and renewing its machines is left to `groups`.

    Attributes:
        settings: The settings of the driver.
        api: The name that offers and instances carry in `detail["api"]`.
        ending: Seconds within which machines must have ended.
    """

    settings: _api.Settings
    api: ClassVar[str] = "compute"
    ending: ClassVar[float] = 240.0

    def offers(self, need: Need) -> Answers[Offer]:
        """Return an offer for each machine type that could meet the need.

        There is one for each zone that has the type, and for each market with a price. A zone that does not answer is
        left out, with a warning.
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
        """Create the machines of an order, all at once, and return them. The same order yields the same machines.

        If some are refused, the others get the first nodes. With `private_network` they are ended instead.

        Raises:
            ProviderError: No machine was rented.
            NoAnswer, RateLimitError: Some machines may exist. The same order finds them.
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
        """Return ssh access to a machine's public address. Waits up to 120 s for that address.

        Raises:
            ProviderError: The machine is gone or ending, or got no address.
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
        """Request the end of each machine, and wait until all are gone.

        The request is repeated for a machine that still runs.

        Raises:
            StillRunning: Some have not ended. The error carries them, with the reasons.
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
        """Return what pools left behind: unused disks, firewall rules, resource policies and templates.

        Args:
            pool: The pool's name; None for all pools of this user.
        """
        return list(self._left(pool))

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove leftovers, all at once.

        Raises:
            ProviderError, ErrorGroup: Some could not be removed.
        """
        each_done(self._remove, leftovers, "Compute Engine: not all leftovers could be removed")

    def check(self) -> Iterable[Finding]:
        """Check if the project can rent machines, and return one finding for each check.

        Permissions to read are checked. Permissions to create or delete machines are not.
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
        """Return the API of Compute Engine for this project."""
        return ComputeApi(self.settings)

    def zones(self, patterns: Sequence[str]) -> list[str]:
        """Return the zones that the settings name, or else all that are up, if they match a pattern.

        Args:
            patterns: Patterns of zones or regions; without any, all match.

        Raises:
            UsageError: The settings name a zone that the project may not use.
        """
        up = [each.name for each in look(self._calls.zones) if each.status == "UP"]
        of_zones_and_regions = [each for pattern in patterns for each in (pattern, f"{pattern}-?")]
        return chosen(up, self.settings.zones or (), of_zones_and_regions)

    def _reservations(self) -> list[compute_v1.Reservation] | None:
        """Return the reservations of the name in the settings, one for each zone; None if the settings name none.

        Raises:
            ProviderError: The project has no such reservation.
        """
        if self.settings.reservation is None:
            return None
        found = look(self._calls.reservations, f'name eq "{self.settings.reservation}"')
        if not found:
            text = f"the project has no reservation {self.settings.reservation}"
            raise _api.REFUSALS.error("a reservation", "NoReservation", text)
        return found

    def _date(self) -> str:
        """Return the HTTP header "Date" of an answer of Google, such as "Mon, 23 Nov 2026 05:00:00 GMT"."""
        base = _api.endpoint("compute") or "https://compute.googleapis.com"
        return _api.call("the time", lambda: requests.head(base, timeout=10).headers["Date"])

    def _quota(self, metric: str) -> str:
        """Return the limit and the use of a quota in words, or a note if Google does not report the quota.

        Raises:
            QuotaError: The whole quota is in use.
        """
        for each in look(self._calls.project_record).quotas:
            if each.metric == metric:
                text = f"{each.limit:g} at once, {each.usage:g} in use"
                if each.limit <= each.usage:
                    raise _api.REFUSALS.error(metric, "QUOTA_EXCEEDED", text, project=self.settings.billed())
                return text
        return "Google does not report it"

    def image(self, path: str) -> compute_v1.Image:
        """Return an image, or the newest image of a family.

        Args:
            path: The path of an image or a family, or a key of `catalog.IMAGES`.

        Raises:
            ProviderError: There is no such image.
            UsageError: It is not the path of an image.
        """
        parsed = catalog.parsed(catalog.IMAGES.get(path, path))
        if parsed.is_family:
            return look(self._calls.newest_image, parsed.project, parsed.name)
        return look(self._calls.image, parsed.project, parsed.name)

    def _image_name(self, path: str) -> str:
        """Return the name of an image, or of the newest image of a family."""
        return str(self.image(path).name)

    def machine(self, record: compute_v1.Instance, said: Mapping[str, str]) -> Instance:
        """Convert the API's record of a machine to an `Instance`. Its `region` is the machine's zone.

        Args:
            record: The record.
            said: The machine's tags.
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
        """Wait until a machine has a public address, and return its addresses.

        Raises:
            ProviderError: The machine is gone or ending, or got no address in time.
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
        """Make the firewall rules for the machines of a pool's session.

        They open port 22 to the networks of `ssh_from`, and all ports among the machines of a private network.
        Everything else is closed.
        """
        allowed = networks(self.settings.ssh_from)

        def make(rule: compute_v1.Firewall) -> None:
            what = f"the firewall rule {rule.name}"
            insist(self._calls, what, partial(self._calls.insert_firewall, rule, what), _MADE)

        for outcome in at_once(make, _requests.firewall_rules(self.settings, order, allowed)):
            if isinstance(outcome, Exception):
                raise outcome  # the first error only: failover does not know groups of errors

    def _place_together(self, offer: Offer, order: Order) -> list[str]:
        """Make the policy that places the machines of a private network close together.

        Returns:
            A list with its path; an empty list if the machine type does not support it.
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
        """Request the machine of one node, and return its name and the operation.

        The operation is None if the machine exists already. Repeating the request makes no second machine, because the
        name and the id of the request are the same.
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
        """Wait for the end of an operation, because it may still be refused, and return the machine that it made.

        Args:
            zone: The zone.
            what: The request in words, for an error message.
            begun: The result of `_begin`, or the error that it raised.

        Raises:
            Exception: The machine could not be made.
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
        """Change the number of a machine in its labels, and return the instance with that number."""
        self.label(instance.id, instance.region, {tags.NODES: tags.packed([node])})
        return replace(instance, node=node)

    def label(self, id: str, zone: str, said: Mapping[str, str]) -> None:
        """Change some labels of a machine. Does not raise if the machine no longer exists."""

        def change() -> None:
            record = look(self._calls.instance, zone, id)
            labels = {**record.labels, **_api.labels(said)}
            self._calls.set_labels(zone, id, labels, record.label_fingerprint, what=f"to label {id}")

        # "conditionNotMet" means that the labels were changed after they were read.
        retry.quietly(partial(retry.patiently, change, _REQUESTED, "conditionNotMet"), "notFound")

    # --- what else there is ----------------------------------------------------------------------------------

    def _left(self, pool: str | None) -> Iterator[Leftover]:
        """Yield unused disks, firewall rules, resource policies and templates of one pool, or of all pools of this
        user.
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
        """Return a `Leftover` for a resource of Compute Engine."""
        return tags.leftover("gcp", kind, name, said, region, {"api": self.api, "zone": zone})

    def _remove(self, leftover: Leftover) -> None:
        """Remove a leftover, and wait until it is gone. Does not raise if it is gone already.

        Raises:
            ProviderError: It could not be removed, for example because it is still used.
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
    """Return a filter of the API that matches resources with one of these names."""
    return f'name eq "({"|".join(names)})"'


def _gone(instance: Instance, status: str, *, code: str) -> ProviderError:
    """Return the error for a machine that has ended or is ending.

    Args:
        instance: The machine.
        status: Its state in words, for the message.
        code: The error code to look up in errors.csv.
    """
    text = f"the machine is {status}: Google took it back, or its lease was over"
    return _api.REFUSALS.error(f"to keep {instance.id}", code, text)
