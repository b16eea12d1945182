"""GCP: Compute Engine with GPUs and TPUs, and Cloud TPU, on demand and spot, billed by the second.

API: https://cloud.google.com/compute/docs/reference/rest/v1 and https://cloud.google.com/tpu/docs/reference/rest
(read 2026-11-22). Credentials: Application Default Credentials, as `gcloud auth application-default login` makes them.
Each of the two APIs has a folder here, `compute` and `tpu`; slices of several machines of the former are in `groups`.
What they have in common is in `_api`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, TypeVar

from skypool.drivers.contract import Abilities, Answers, lacks
from skypool.drivers.regional import each_done, everywhere
from skypool.drivers.retry import at_once
from skypool.drivers.settings import plain, settings_named, settle
from skypool.errors import AccessError, StillRunning, UsageError, together
from skypool.model import Access, Finding, Instance, Leftover, Need, Offer, Order
from skypool_gcp import _api

if TYPE_CHECKING:
    from skypool_gcp.compute import Compute
    from skypool_gcp.tpu import Tpu

T = TypeVar("T")
_NEVER = datetime.min.replace(tzinfo=UTC)


@settings_named
@dataclass(frozen=True)
class GCP:
    """Rent from Google Cloud: machines with GPUs or none of Compute Engine, and slices of Cloud TPU.

    Args:
        project: the id of the project that pays; None is $GOOGLE_CLOUD_PROJECT, or that of the credentials.
        zones: such as "us-central1-a", or several; None is every zone that the project may use.
        network: of the project, which machines are put into; theirs is a firewall rule of their own there.
        subnetwork: by name, the same in each region; needed where the network does not make its own.
        image: what machines of Compute Engine start from, one with cloud-init: "ubuntu-22.04", or the path of an image
            or a family; None is Google's own for the accelerator. An Image's base= comes first.
        reservation: run in this one, which was bought before. Nothing is ever reserved or bought.
        service_account: whose rights the machines have; without it Compute Engine's have none, and Cloud TPU's may
            read storage and write logs as the project's own account. With the right to delete themselves they end
            all their cost when their lease is over: without it a machine of Compute Engine stops, and its disk alone
            is billed on until the pool's end or `skypool gc`.
        ssh_from: networks that may reach port 22; None is this machine's public address alone.
        queue: seconds for which a TPU slice may wait for its chips before another offer is tried.
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
    name: ClassVar[str] = "gcp"
    abilities: ClassVar[Abilities] = Abilities(
        ends_itself=True,
        private_network=True,
        spot=True,
        trust="full",
        billed_from="running",  # a TPU from READY: cloud.google.com/tpu/pricing; neither while it waits (2026-11-22)
    )
    offers_keep: ClassVar[float] = 86400.0

    def __post_init__(self) -> None:
        settle(self, _api.FACTS["settings"], {})
        plain(self, queue=float)
        if not 0 <= self.queue <= 7 * 86400:
            raise UsageError(f"queue is seconds up to a week, not {self.queue!r}")

    def offers(self, need: Need) -> Iterable[Offer]:
        """Of both APIs. What one cannot tell is missing, with a warning, as long as the other sells something."""
        outcomes = at_once(lambda api: Answers(api.offers(need)), self._apis)
        failed = [each for each in outcomes if isinstance(each, Exception)]
        told = [some for some in outcomes if not isinstance(some, Exception)]
        found = [*chain.from_iterable(told)]
        if failed and not found:
            raise next((each for each in failed if isinstance(each, UsageError)), failed[0])
        silent = [each for each in failed if not isinstance(each, (AccessError, UsageError))]
        lacking = [lacks("offers", each) for each in silent]
        return Answers(found, [*chain.from_iterable(some.lacks for some in told), *lacking])

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return self._of(offer.detail["api"]).launch(offer, order)

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        """Of both APIs.

        Raises:
            ProviderError, ErrorGroup: one of them did not answer, or refused: what it has would be missing.
        """
        return self._of_both(lambda api: api.instances(pool=pool))

    def access(self, instance: Instance) -> Access:
        return self._of(instance.detail["api"]).access(instance)

    def terminate(self, instances: Sequence[Instance]) -> None:
        """At both APIs at once.

        Raises:
            StillRunning: which have not ended, and why.
        """
        theirs = {api: [each for each in instances if each.detail["api"] == api.api] for api in self._apis}
        asked = [(api, some) for api, some in theirs.items() if some]
        outcomes = zip(at_once(lambda each: each[0].terminate(each[1]), asked), asked, strict=True)
        if failed := {e: getattr(e, "instances", some) for e, (_, some) in outcomes if isinstance(e, Exception)}:
            why = together("not all could be ended", failed)
            if isinstance(why, StillRunning):
                raise why
            raise StillRunning(str(why), [*chain.from_iterable(failed.values())]) from why

    def renew(self, pool: str, until: datetime) -> None:
        self._of_both(lambda api: api.renew(pool, until))

    def leftovers(self, *, pool: str | None = None) -> list[Leftover]:
        """Of both APIs; each is needed as long as any machine of its pool, as firewall rules serve those of both."""
        left = self._of_both(lambda api: api.leftovers(pool=pool))
        until: dict[str, datetime] = {}
        for each in self.instances(pool=pool) if left else ():
            until[each.pool] = max(filter(None, (each.until, until.get(each.pool))), default=_NEVER)
        return [
            replace(each, until=max(filter(None, (each.until, until.get(each.pool))), default=None)) for each in left
        ]

    def tidy(self, leftovers: Sequence[Leftover]) -> None:
        """Remove them at both APIs."""
        each_done(
            lambda api: api.tidy([each for each in leftovers if each.detail["api"] == api.api]),
            self._apis,
            "not all that pools left behind could be removed",
        )

    def policy(self) -> str:
        """A custom role, for `gcloud iam roles create skypool --project PROJECT --file FILE`."""
        return (files("skypool_gcp") / "role.yaml").read_text("utf-8")

    def check(self) -> Iterable[Finding]:
        """Of both APIs."""
        return chain.from_iterable(api.check() for api in self._apis)

    def _of_both(self, do: Callable[[Tpu], Iterable[T] | None]) -> list[T]:
        """What both APIs answer; one that is not enabled for the project has nothing, as long as the other is."""
        is_disabled = lambda e: getattr(e, "code", "") in _api.DISABLED  # noqa: E731
        return everywhere(lambda api: do(api) or (), self._both, closed=is_disabled)

    @property
    def _apis(self) -> list[Compute | Tpu]:
        """All that rent. Made anew each time: they hold nothing but settings."""
        from skypool_gcp.compute import Compute

        both = self._both
        return [Compute(both[0].settings), *both]

    @property
    def _both(self) -> list[Tpu]:
        """Those that tell what is there: `groups` of all of Compute Engine, so that it is listed once."""
        from skypool_gcp.groups import Groups
        from skypool_gcp.tpu import Tpu

        zones, ssh_from = (tuple(each) if each is not None else None for each in (self.zones, self.ssh_from))
        more = self.image, self.reservation, self.service_account
        settings = _api.Settings(self.project, zones, self.network, self.subnetwork, *more, ssh_from, self.queue)
        return [Tpu(settings), Groups(settings)]

    def _of(self, api: str) -> Compute | Tpu:
        """By what the API itself has written into `detail["api"]`."""
        return next(each for each in self._apis if each.api == api)
