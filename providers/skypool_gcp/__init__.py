"""Driver for Google Cloud: Compute Engine with GPUs and TPUs, and Cloud TPU, on demand and spot, billed by the second.

API: https://cloud.google.com/compute/docs/reference/rest/v1 and https://cloud.google.com/tpu/docs/reference/rest (read
2026-11-22). Credentials: Application Default Credentials, as `gcloud auth application-default login` makes them.

`GCP` is the driver. It passes each request to the modules `compute`, `tpu` and `tpu7x`, which are called the parts of
the driver.

- `compute`: rents machines of Compute Engine. `tpu`: rents slices of Cloud TPU. `tpu7x`: rents slices that consist of
  several machines of Compute Engine.
- `catalog`: the machine types of Compute Engine. `list_prices`: Google's prices.
- `_settings`: the checked settings. `_api`: credentials, errors, names and labels for all parts.
- `_bucket_identity`: service accounts that reach one prefix of a bucket.

Words of this package:

- slice: a group of TPU hosts that are rented, billed and ended together.
- reservation: capacity that the project reserved before.
- pool: a group of machines that a user rented together. A node is one of them; its node number is its number there.
- run of a pool: the time from its start to its end. A run may have several orders.
- need, offer, order: the requirements of a node, a machine type or slice with zone, market and price, and the request
  to rent machines for nodes (`skypool.model`). Market: "on-demand" or "spot".
- finding: the result of one check. Leftover: another resource of a pool than a machine, such as a disk.
- lease: the time for which a machine lives on without hearing from its client.
- recording: a file into which skypool writes requests and replies, if the user has switched that on.
- settings: the arguments of `GCP`.
- In arguments: `what` is a request in words, for error messages. `said` are the tags of a resource, as a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, TypeVar

from skypool.buckets.bucket import Bucket
from skypool.drivers.bucket_identity import BucketIdentity
from skypool.drivers.contract import Abilities, Answers, lacks
from skypool.drivers.regional import each_done, everywhere
from skypool.drivers.retry import at_once
from skypool.drivers.settings import plain, settings_named, settle
from skypool.errors import AccessError, CredentialsError, StillRunning, UsageError, together
from skypool.model import Access, Bill, Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api, _bucket_identity, _settings

if TYPE_CHECKING:
    from skypool_gcp.compute import Compute
    from skypool_gcp.tpu import Tpu

T = TypeVar("T")

_LONGEST_QUEUE = 7 * 86400.0
"""The largest value of the setting `queue`, in seconds: a week."""


@settings_named
@dataclass(frozen=True)
class GCP:
    """A driver for one Google Cloud project: rents machines of Compute Engine, with or without GPUs, and TPU slices.

    A slice is a group of TPU hosts that are rented together. Creating a `GCP` object sends no request. All methods
    block.

    Args:
        project: The id of the project that pays. None means $GOOGLE_CLOUD_PROJECT, else $CLOUDSDK_CORE_PROJECT, else
            the project of the credentials.
        zones: The name of a zone such as "us-central1-a", or a list of names. None means every zone that the project
            may use.
        network: The name of the project's network in which machines are placed. skypool creates the machines' firewall
            rules in this network.
        subnetwork: The name of a subnetwork, the same in each region. None lets Google choose, which works only if the
            network has automatic subnetworks.
        image: The image of machines of Compute Engine: "ubuntu-22.04", "ubuntu-24.04", or the path of an image or of an
            image family. The image must have the program cloud-init. None means Google's image with drivers for the
            accelerator, or Ubuntu 24.04 if there is none. The `base=` of an Image overrides this setting.
        reservation: The name of an existing reservation, in which machines are placed. None means that machines are
            placed outside reservations. skypool never reserves or buys anything.
        service_account: The email address of the Google service account whose rights the machines have. If the account
            may delete machines, the machines delete themselves when their lease is over. Otherwise a machine of Compute
            Engine only stops at that time, and its disk is billed until the pool's end or `skypool gc`. None means that
            machines of Compute Engine have no rights. Hosts of Cloud TPU may then read storage and write logs as the
            project's own account.
        ssh_from: The addresses or networks that may reach port 22. None means this computer's public address only.
        queue: Seconds for which a TPU slice may wait for its chips before another offer is tried; 0 to 604800 (a week).
        networks: Further networks for the GPUs of several nodes, such as "rdma-net/rdma-subnet-0", in the order of a
            machine's network interfaces. They are used for pools with `private_network`. A3 Ultra and A4 take nine: one
            ordinary network, then eight subnetworks of an RDMA network. A3 Mega takes eight ordinary networks, and A3
            High takes four. The networks must exist; skypool creates none. None means one interface for each machine.

    Raises:
        UsageError: A setting is invalid or unknown.
    """

    project: str | None = None
    zones: str | Sequence[str] | None = None
    network: str = "default"
    subnetwork: str | None = None
    image: str | None = None
    reservation: str | None = None
    service_account: str | None = None
    ssh_from: str | Sequence[str] | None = None
    queue: float = 300.0
    networks: str | Sequence[str] | None = None
    name: ClassVar[str] = "gcp"
    abilities: ClassVar[Abilities] = Abilities(
        ends_itself=True,
        private_network=True,
        spot=True,
        trust="full",
        billed_from="running",  # a TPU slice from its state READY: cloud.google.com/tpu/pricing (2026-11-22)
    )
    offers_keep: ClassVar[float] = 86400.0

    def __post_init__(self) -> None:
        _settings.refuse_ipv6(self.ssh_from)
        settle(self, _settings.SHAPES, {})
        _settings.check_networks(self.network, self.networks or ())
        plain(self, queue=float)
        if not 0 <= self.queue <= _LONGEST_QUEUE:
            raise UsageError(f"queue must be a number of seconds from 0 to 604800 (a week), not {self.queue!r}")

    def offers(self, need: Need) -> Answers[Offer]:
        """Return all offers of Compute Engine and Cloud TPU that could meet the need.

        The parts of the driver are asked in parallel. If one part fails and another has offers, a RuntimeWarning is
        issued, and `lacks` of the result says that offers are missing. There is no warning if the account may not use a
        part, or if a setting is wrong for a part. The result is empty if no offer meets the need.

        Args:
            need: The requirements that each machine must meet.

        Raises:
            UsageError: No part has offers, and at least one part raised UsageError, for example for a wrong setting.
            ProviderError: No part has offers, and at least one part failed.
        """
        outcomes = at_once(lambda api: api.offers(need), self._apis)
        failed = [each for each in outcomes if isinstance(each, Exception)]
        answers = [each for each in outcomes if not isinstance(each, Exception)]
        found = list(chain.from_iterable(answers))
        if failed and not found:
            raise next((each for each in failed if isinstance(each, UsageError)), failed[0])
        lacking = [what for answer in answers for what in answer.lacks]
        for each in failed:
            if not isinstance(each, (AccessError, UsageError)):
                lacking.append(lacks("offers", each))
        return Answers(found, lacking)

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        """Rent the machines of an order, and return the machines, which may still be starting.

        Fewer machines than ordered are returned if Google refuses some of them, unless the need has `private_network`.
        Calling again with the same order rents no further machines, and returns the same ones.

        Args:
            offer: The machine type or the TPU slice, with zone and market, as `offers` returned it.
            order: The node numbers, the pool, and an idempotency token.

        Raises:
            ProviderError: Google refused the order, and nothing was rented.
            NoAnswer, RateLimitError: Machines may exist. Call again with the same order, which finds those machines.
            StillRunning: Some machines of the failed order could not be ended, and may still run.
        """
        return self._of(offer.detail["api"]).launch(offer, order)

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Return the machines of this user's pools on Compute Engine and Cloud TPU, found by their labels.

        Machines that are starting or ending are included. If one of the two APIs is not enabled for the project, only
        the machines of the other API are returned.

        Args:
            pool: The name of a pool that was started from this machine. None means all pools of this user, started from
                any machine.

        Raises:
            ProviderError: An API failed, so machines could be missing. Or neither API is enabled for the project.
            ErrorGroup: Both APIs failed, for different reasons.
        """
        return self._of_both(lambda api: api.instances(pool=pool))

    def admit(self, instance: Instance) -> None:
        """Let this computer's present address reach the machines of a pool by ssh. Does nothing with `ssh_from`.

        Raises:
            ProviderError: The address is not known, or Google did not create the firewall rule.
        """
        from skypool_gcp.compute import Compute

        Compute(self._listing[0].settings).admit(instance)

    def access(self, instance: Instance) -> Access:
        """Return how to reach a machine by ssh. Waits until the machine has an address.

        The wait is up to 120 s for a machine of Compute Engine. For a host of a TPU slice, it is up to half an hour
        plus the seconds of the setting `queue`.

        Args:
            instance: The machine, as `launch` or `instances` returned it.

        Raises:
            ProviderError: The machine has ended, or Google refused to create it, or it got no address in time.
        """
        return self._of(instance.detail["api"]).access(instance)

    def terminate(self, instances: Sequence[Instance]) -> None:
        """End these machines of Compute Engine and Cloud TPU in parallel, and return when all have ended.

        All hosts of a TPU slice end, even if only one host is given. Does not raise for machines that no longer exist.

        Args:
            instances: The machines, as `launch` or `instances` returned them.

        Raises:
            StillRunning: Some machines may still run and cost money. The error's `instances` are these machines, and
                its message gives the reasons.
        """
        asked: list[tuple[Compute | Tpu, list[Instance]]] = []
        for api in self._apis:
            theirs = [each for each in instances if each.detail["api"] == api.api]
            if theirs:
                asked.append((api, theirs))
        failed: list[Exception] = []
        left: list[Instance] = []
        outcomes = at_once(lambda each: each[0].terminate(each[1]), asked)
        for outcome, (_, theirs) in zip(outcomes, asked, strict=True):
            if isinstance(outcome, Exception):
                failed.append(outcome)
                left.extend(getattr(outcome, "instances", theirs))
        if not failed:
            return
        why = together("Google Cloud: some machines could not be ended", failed)
        if isinstance(why, StillRunning):
            raise why
        raise StillRunning(str(why), left) from why

    def renew(self, pool: str, until: datetime) -> None:
        """Record in the labels of all machines of a pool until when the pool is needed.

        `skypool gc` removes machines only after that time.

        Args:
            pool: The name of the pool.
            until: The time until which the pool is needed.

        Raises:
            ProviderError: The labels of a machine could not be written.
            ErrorGroup: The labels of several machines could not be written, for different reasons.
        """
        self._of_both(lambda api: api.renew(pool, until))

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Return resources that pools of this user left behind, such as disks and firewall rules.

        Machines are not included. A resource may still be in use: for example, a firewall rule may protect running
        machines. `until` of a resource is the latest time until which the resource or a machine of its pool is needed.

        Args:
            pool: The name of a pool that was started from this machine. None means all pools of this user.

        Raises:
            ProviderError, ErrorGroup: A list of resources or machines could not be read.
        """
        left = self._of_both(lambda api: api.leftovers(pool=pool))
        if not left:
            return []
        until: dict[str, datetime | None] = {}
        for instance in self.instances(pool=pool):
            until[instance.pool] = _later(instance.until, until.get(instance.pool))
        return [replace(each, until=_later(each.until, until.get(each.pool))) for each in left]

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove these leftover resources. Each removal is tried, even if another one fails.

        Does not raise for a resource that no longer exists.

        Args:
            leftovers: The resources, as the method `leftovers` returned them.

        Raises:
            ProviderError: A resource could not be removed.
            ErrorGroup: Several resources could not be removed, for different reasons.
        """
        each_done(
            lambda api: api.tidy([each for each in leftovers if each.detail["api"] == api.api]),
            self._apis,
            "Google Cloud: some leftover resources could not be removed",
        )

    @property
    def gives_identity(self) -> bool:
        """True if the settings name the service account of machines."""
        return self.service_account is not None

    @property
    def bucket_scheme(self) -> str:
        """The scheme of the buckets that machines reach with their service account."""
        return "gs"

    def bucket_identity(self, bucket: Bucket) -> BucketIdentity:
        """Return a service account for the prefix of a bucket. Requests that only read are sent.

        Raises:
            ProviderError: Google refused a request, or the project is not known.
            UsageError: There is no such bucket, or its policy takes no conditions.
        """
        return _bucket_identity.identity(self._listing[0].settings.billed(), bucket)

    def policy(self) -> str:
        """Return the smallest set of permissions that this driver needs, as the YAML text of a custom role.

        Create the role with `gcloud iam roles create skypool --project PROJECT --file FILE`.
        """
        return (files("skypool_gcp") / "role.yaml").read_text("utf-8")

    def check(self) -> Iterable[Finding]:
        """Check if the project can rent from Compute Engine and Cloud TPU, and return one finding for each check.

        The checks run only when the result is iterated: first those of Compute Engine, then those of Cloud TPU. A
        failed check does not raise.
        """
        return chain.from_iterable(api.check() for api in self._apis)

    def prove_creates(self) -> Iterable[Finding]:
        """Send create requests that Google must refuse, and return one finding for each. Nothing is rented.

        The requests are sent only when the result is iterated. The method does not raise.
        """
        return chain.from_iterable(api.prove_creates() for api in self._apis)

    def billed(self, instances: Sequence[str], since: datetime, until: datetime) -> Bill:
        """Return where to look for what machines have cost. No API that skypool uses has it, so the sum is None.

        Costs are in the console, and in an export to BigQuery that a user may set up for the billing account:
        https://docs.cloud.google.com/billing/docs/how-to/export-data-bigquery-tables (read 2026-11-24). No request is
        sent.

        Args:
            instances: The names of the machines.
            since: A time before the first machine was rented.
            until: A time after the last machine had ended.
        """
        days = " to ".join(dict.fromkeys(each.astimezone(UTC).date().isoformat() for each in (since, until)))
        return Bill(
            None,
            f"Google tells costs in its console and by a BigQuery export only: for {days}, choose the project and the "
            "label skypool-pool at https://console.cloud.google.com/billing/reports",
        )

    def _of_both(self, do: Callable[[Tpu], Iterable[T] | None]) -> list[T]:
        """Call a function with the parts `tpu` and `tpu7x`, which together list all machines. Join its results."""

        def is_disabled(error: Exception) -> bool:
            return getattr(error, "code", "") in _api.DISABLED

        try:
            return everywhere(lambda api: do(api) or (), self._listing, closed=is_disabled)
        except ExceptionGroup as e:
            if all(isinstance(each, CredentialsError) for each in e.exceptions):
                raise e.exceptions[0] from e  # both APIs say the same, each in its own words
            raise

    @property
    def _apis(self) -> list[Compute | Tpu]:
        """New objects of the three parts that rent machines: `compute`, `tpu` and `tpu7x`, in this order."""
        from skypool_gcp.compute import Compute

        listing = self._listing
        return [Compute(listing[0].settings), *listing]

    @property
    def _listing(self) -> list[Tpu]:
        """New objects of the parts that list machines: `tpu`, and `tpu7x` for all machines of Compute Engine."""
        from skypool_gcp.tpu import Tpu
        from skypool_gcp.tpu7x import Groups

        settings = _settings.Settings(
            project=self.project,
            zones=None if self.zones is None else tuple(self.zones),
            network=self.network,
            subnetwork=self.subnetwork,
            image=self.image,
            reservation=self.reservation,
            service_account=self.service_account,
            ssh_from=None if self.ssh_from is None else tuple(self.ssh_from),
            queue=self.queue,
            networks=None if self.networks is None else tuple(self.networks),
        )
        return [Tpu(settings), Groups(settings)]

    def _of(self, api: str) -> Compute | Tpu:
        """Return a new object of the part with this name, which its offers and machines have in `detail["api"]`."""
        return next(each for each in self._apis if each.api == api)


def _later(one: datetime | None, other: datetime | None) -> datetime | None:
    """Return the later of two times. None counts as earlier than any time."""
    return max(filter(None, (one, other)), default=None)
